"""Kalman, EKF, UKF, smoother and the fitted linear model, against the joint Gaussian, filterpy and
each other.
"""

from __future__ import annotations

import math

import pytest
import torch
from reference import Moments, filter_moments, rts_smoother

from kbf.config.prepare import configure
from kbf.data.benchmark_systems import SystemRecordings, discrete_lorenz
from kbf.filters.gaussian.ekf import EKF, ExtendedKalmanFilter, linearise
from kbf.filters.gaussian.kalman import (
    KalmanFilter,
    LearnedKalman,
    LinearModel,
    fit_linear,
    regress,
)
from kbf.filters.gaussian.moments import (
    GaussianState,
    kalman_predict,
    kalman_update,
    log_density_of_available,
    training_moments,
    with_initial_moments,
)
from kbf.filters.gaussian.ukf import UKF, UnscentedKalmanFilter, sigma_points
from kbf.filters.protocols import Filter, FilterModel
from kbf.filters.rollout import rollout, step
from kbf.fitted.model import FittedModel
from kbf.recording import Recording
from kbf.rkhs.linalg import NotPositiveDefiniteError
from kbf.runtime.errors import FitError
from kbf.ssm import OrientationModel, StateSpaceModel, gaussian_noise, oscillatory, simulate

F64 = torch.float64


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def linear_model() -> LinearModel:
    """Three states, two observations, nothing symmetric, nothing zero."""
    return LinearModel(
        A=tensor([[0.8, 0.3, 0.0], [-0.4, 0.7, 0.2], [0.1, -0.2, 0.9]]),
        a=tensor([0.3, -0.2, 0.1]),
        Q=tensor([[0.3, 0.1, 0.0], [0.1, 0.2, 0.05], [0.0, 0.05, 0.1]]),
        C=tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.4]]),
        c=tensor([0.5, -1.0]),
        R=tensor([[0.4, 0.1], [0.1, 0.3]]),
        m0=tensor([1.0, -1.0, 0.5]),
        P0=tensor([[1.0, 0.2, 0.1], [0.2, 0.5, 0.0], [0.1, 0.0, 0.7]]),
    )


def as_state_space(m: LinearModel) -> StateSpaceModel:
    return StateSpaceModel(
        lambda z: z @ m.A.mT + m.a, lambda z: z @ m.C.mT + m.c, m.Q, m.R, m.m0, m.P0
    )


def draw(model: LinearModel, b: int, T: int, seed: int = 0) -> Recording:
    g = torch.Generator().manual_seed(seed)
    z0 = model.m0 + gaussian_noise(torch.Size([b]), model.P0, g)
    return simulate(as_state_space(model), z0, T, g)


def joint_posterior(
    m: LinearModel, x, seen: list[int], upto: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean ``T d`` and covariances ``T d d`` of z_1 ... z_T given the x_t with t in ``seen`` and t
    <= ``upto``, by brute force.

    Builds the joint Gaussian of all states from the definition and conditions once. A may be ``T d
    d``, one for each move.
    """
    d, q, T = len(m.m0), len(m.c), len(x)
    A = m.A.expand(T, d, d)
    mean, blocks = [], torch.zeros(T, T, d, d, dtype=F64)
    mu, P = m.m0, m.P0
    for t in range(T):
        mu, P = A[t] @ mu + m.a, A[t] @ P @ A[t].T + m.Q
        mean.append(mu)
        blocks[t, t] = P
        for s in range(t + 1, T):  # Cov(z_t, z_s) = P_t (A_s ... A_t+1)^T
            blocks[t, s] = blocks[t, s - 1] @ A[s].T
            blocks[s, t] = blocks[t, s].T
    mz, Sz = torch.cat(mean), blocks.permute(0, 2, 1, 3).reshape(T * d, T * d)
    seen = [t for t in seen if t <= upto]
    if seen:
        H = torch.zeros(len(seen) * q, T * d, dtype=F64)
        for row, t in enumerate(seen):
            H[row * q : (row + 1) * q, t * d : (t + 1) * d] = m.C
        S = H @ Sz @ H.T + torch.kron(torch.eye(len(seen), dtype=F64), m.R)
        K = torch.linalg.solve(S, H @ Sz).T
        residual = torch.cat([x[t] for t in seen]) - H @ mz - m.c.repeat(len(seen))
        mz, Sz = mz + K @ residual, Sz - K @ H @ Sz
    cov = torch.stack([Sz[t * d : (t + 1) * d, t * d : (t + 1) * d] for t in range(T)])
    return mz.reshape(T, d), cov


def every_filter(model: LinearModel) -> list:
    nonlinear = as_state_space(model)
    return [KalmanFilter(model), ExtendedKalmanFilter(nonlinear), UnscentedKalmanFilter(nonlinear)]


@pytest.mark.parametrize("kind", range(3), ids=["kalman", "ekf", "ukf"])
def test_filter_is_conditioning_of_the_joint_gaussian(kind):
    model, T = linear_model(), 6
    data = draw(model, 2, T)
    mask = torch.tensor([[True] * T, [True, False, False, True, True, False]])
    filter = every_filter(model)[kind]
    moments = filter_moments(filter, data.obs, mask)
    assert torch.equal(rollout(filter, data.obs, mask=mask).estimates, moments.mean)
    for k in range(2):
        seen = mask[k].nonzero().flatten().tolist()
        for t in range(T):
            mean, cov = joint_posterior(model, data.obs[k], seen, upto=t)
            torch.testing.assert_close(moments.mean[k, t], mean[t], rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(moments.cov[k, t], cov[t], rtol=1e-9, atol=1e-9)


def test_smoother_is_conditioning_on_everything():
    model, T = linear_model(), 6
    data = draw(model, 2, T)
    mask = torch.tensor([[True] * T, [False, True, False, False, True, False]])
    smoothed = rts_smoother(
        filter_moments(KalmanFilter(model), data.obs, mask), model.A, model.Q, model.a
    )
    for k in range(2):
        mean, cov = joint_posterior(
            model, data.obs[k], mask[k].nonzero().flatten().tolist(), upto=T
        )
        torch.testing.assert_close(smoothed.mean[k], mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(smoothed.cov[k], cov, rtol=1e-9, atol=1e-9)


def test_smoother_takes_one_matrix_for_each_step():
    """A model whose A changes from step to step (as an extended smoother's does), against the joint
    Gaussian.
    """
    model, T = linear_model(), 5
    x = draw(model, 3, T).obs
    A = model.A + 0.3 * torch.randn(T, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    state, states = GaussianState(model.m0.expand(3, 3), model.P0.expand(3, 3, 3)), []
    for t in range(T):
        state = kalman_update(
            *kalman_predict(*state, A[t], model.Q, model.a), x[:, t], model.C, model.R, model.c
        )
        states.append(state)
    filtered = Moments(*(torch.stack(leaf, 1) for leaf in zip(*states, strict=True)))
    smoothed = rts_smoother(filtered, A[1:], model.Q, model.a)
    for k in range(3):
        mean, cov = joint_posterior(model._replace(A=A), x[k], list(range(T)), upto=T)
        torch.testing.assert_close(smoothed.mean[k], mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(smoothed.cov[k], cov, rtol=1e-9, atol=1e-9)


def test_linearisation_is_the_tangent():
    m = torch.randn(4, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    F, a = linearise(
        lambda z: torch.stack([z[..., 0] * z[..., 1], z[..., 0].sin(), z[..., 1] ** 2], -1), m
    )
    u, v, zero = m[:, 0], m[:, 1], 0 * m[:, 0]
    truth = torch.stack(
        [torch.stack(row, -1) for row in ((v, u), (u.cos(), zero), (zero, 2 * v))], 1
    )
    torch.testing.assert_close(F, truth)
    torch.testing.assert_close(
        (F @ m[..., None])[..., 0] + a, torch.stack([u * v, u.sin(), v**2], -1)
    )


def test_nonlinear_filters_equal_filterpy():
    kalman = pytest.importorskip("filterpy.kalman")
    model = oscillatory()._replace(m0=tensor([0.9, 0.4]), P0=tensor([[0.3, 0.1], [0.1, 0.2]]))
    model = model._replace(
        h=lambda z: torch.stack([z[..., 0] * z[..., 1], z[..., 1].exp(), z[..., 0]], -1),
        R=0.3 * torch.eye(3, dtype=F64),
    )
    obs = simulate(model, model.m0, 8, torch.Generator().manual_seed(0)).obs

    def numpy(f):
        return lambda z, *_: f(torch.as_tensor(z)).numpy()

    points = kalman.MerweScaledSigmaPoints(2, alpha=0.7, beta=1.5, kappa=0.5)
    theirs = kalman.UnscentedKalmanFilter(
        2, 3, dt=1, hx=numpy(model.h), fx=numpy(model.f), points=points
    )
    theirs.x, theirs.P, theirs.Q, theirs.R = (
        v.numpy() for v in (model.m0, model.P0, model.Q, model.R)
    )
    ukf = UnscentedKalmanFilter(model, alpha=0.7, beta=1.5, kappa=0.5)
    state = ukf.init(1)
    for x in obs:
        theirs.predict()
        theirs.update(x.numpy())
        state = step(ukf, state, x[None])
        torch.testing.assert_close(state.mean[0], torch.as_tensor(theirs.x), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(
            ukf.covariance(state)[0], torch.as_tensor(theirs.P), rtol=1e-8, atol=1e-8
        )

    theirs = kalman.ExtendedKalmanFilter(2, 3)
    theirs.x, theirs.P, theirs.Q, theirs.R = (
        v.numpy() for v in (model.m0, model.P0, model.Q, model.R)
    )
    ekf = ExtendedKalmanFilter(model)
    state = ekf.init(1)
    jacobian = torch.func.jacrev
    for x in obs:
        theirs.F = numpy(jacobian(model.f))(theirs.x)
        theirs.predict_x = lambda u=0, theirs=theirs: setattr(theirs, "x", numpy(model.f)(theirs.x))
        theirs.predict()
        theirs.update(x.numpy(), numpy(jacobian(model.h)), numpy(model.h))
        state = step(ekf, state, x[None])
        torch.testing.assert_close(state.mean[0], torch.as_tensor(theirs.x), rtol=1e-8, atol=1e-8)
        torch.testing.assert_close(
            ekf.covariance(state)[0], torch.as_tensor(theirs.P), rtol=1e-8, atol=1e-8
        )


@pytest.mark.parametrize(
    ("alpha", "beta", "kappa"), [(1.0, 0.0, 1.0), (1e-2, 2.0, 0.0), (0.5, 2.0, 3.0)]
)
def test_sigma_points_have_the_moments_of_a_standard_normal(alpha, beta, kappa):
    points, wm, wc = sigma_points(3, alpha, beta, kappa)
    torch.testing.assert_close(wm.sum(), tensor(1.0))
    torch.testing.assert_close(wm @ points, torch.zeros(3, dtype=F64))
    for w in (wm, wc):
        torch.testing.assert_close((w[:, None] * points).T @ points, torch.eye(3, dtype=F64))
    assert wc.sum().item() == pytest.approx(2 - alpha**2 + beta)


def test_unscented_mean_is_exact_for_a_quadratic():
    """E[z1^2], E[z1 z2] of N(m, P) are m m^T + P; a linearisation at the mean misses P."""
    m, P = tensor([0.3, -0.7]), tensor([[0.5, 0.2], [0.2, 0.4]])
    model = StateSpaceModel(
        lambda z: torch.stack([z[..., 0] ** 2, z[..., 0] * z[..., 1]], -1),
        lambda z: z,
        0 * P,
        P,
        m,
        P,
    )
    for ukf in (
        UnscentedKalmanFilter(model),
        UnscentedKalmanFilter(model, alpha=0.3, beta=2.0, kappa=1.0),
    ):
        predicted = ukf.predict(ukf.init(1))
        torch.testing.assert_close(
            predicted.mean[0], torch.stack([m[0] ** 2 + P[0, 0], m[0] * m[1] + P[0, 1]])
        )


def test_learned_model_recovers_a_linear_system_within_standard_errors():
    """Each coefficient within 4 standard errors of the truth, each variance too; on two sequences
    and with missing steps.
    """
    model = linear_model()
    data = draw(model, 2, 2000, seed=3)
    mask = torch.rand(2000, generator=torch.Generator().manual_seed(0)) < 0.7
    obs = torch.where(
        mask[:, None], data.obs[1], float("nan")
    )  # a masked observation that is used would show
    memory = [Recording(data.states[0], data.obs[0]), Recording(data.states[1], obs, mask)]
    fit = fit_linear(memory)
    z = torch.cat([data.states[0][:-1], data.states[1][:-1]])
    seen = torch.cat([data.states[0], data.states[1][mask]])
    for B, b, cov, B0, b0, cov0, inputs in (
        (fit.A, fit.a, fit.Q, model.A, model.a, model.Q, z),
        (fit.C, fit.c, fit.R, model.C, model.c, model.R, seen),
    ):
        design = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=F64)], 1)
        error = torch.sqrt(
            cov0.diagonal()[:, None] * torch.linalg.inv(design.T @ design).diagonal()
        )
        gap = torch.cat([B - B0, (b - b0)[:, None]], 1)
        assert (gap.abs() < 4 * error).all()
        spread = torch.sqrt(
            (cov0.diagonal()[:, None] * cov0.diagonal() + cov0**2) / (len(inputs) - 4)
        )
        assert ((cov - cov0).abs() < 4 * spread).all()
    torch.testing.assert_close(fit.m0, data.states.flatten(0, 1).mean(0))


def test_pairs_do_not_cross_the_end_of_a_sequence():
    """Without noise the fit is exact, however the sequences jump between them."""
    model = linear_model()
    model = model._replace(Q=0 * model.Q, R=0 * model.R, P0=9 * model.P0)
    data = draw(model, 6, 5)
    fit = fit_linear([Recording(z, x) for z, x in zip(data.states, data.obs, strict=True)])
    for ours, truth in zip(fit[:6], model[:6], strict=True):
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)


def test_regression_covariance_is_unbiased():
    """Mean over 4,000 fits of 6 points with 2 inputs (3 degrees of freedom): 1 within 4 standard
    errors; / n would give 0.5.
    """
    g = torch.Generator().manual_seed(0)
    inputs = torch.randn(6, 2, dtype=F64, generator=g)
    noise = torch.randn(6, 4000, dtype=F64, generator=g)
    design = torch.cat([inputs, torch.ones(6, 1, dtype=F64)], 1)
    residual = noise - design @ torch.linalg.lstsq(design, noise).solution
    B, b, cov = regress(inputs, noise[:, :1], "pairs")
    torch.testing.assert_close(cov[0, 0], residual[:, 0].square().sum() / 3)
    assert abs((residual.square().sum(0) / 3).mean() - 1) < 4 * math.sqrt(2 / 3 / 4000)


def test_learned_kalman_is_the_kalman_filter_of_the_fit():
    data = draw(linear_model(), 1, 60)
    memory = Recording(data.states[0], data.obs[0])
    learned = LearnedKalman()
    learned.prepare([memory])
    ours = rollout(learned.fit(memory), data.obs).estimates
    torch.testing.assert_close(ours, rollout(KalmanFilter(fit_linear(memory)), data.obs).estimates)


def test_fit_linear_says_what_is_missing():
    data = draw(linear_model(), 1, 7)
    enough, short = (
        Recording(data.states[0, :8], data.obs[0, :8]),
        Recording(data.states[0, :7], data.obs[0, :7]),
    )
    with pytest.raises(
        ValueError, match="transitions with 3 inputs and 3 outputs needs at least 7 of them, got 6"
    ):
        fit_linear(short)
    mask = torch.arange(7) < 5
    with pytest.raises(
        ValueError, match="observations with 3 inputs and 2 outputs needs at least 6 of them, got 5"
    ):
        fit_linear(
            [enough._replace(mask=mask), Recording(data.states[0], data.obs[0], mask & False)]
        )
    with pytest.raises(ValueError, match="vectors"):
        fit_linear(Recording(torch.randn(20, 2), torch.randn(20, 3, 4, 4)))
    with pytest.raises(ValueError, match="memory"):
        LearnedKalman().fit(None)


@pytest.mark.parametrize("model_type", [EKF, UKF])
def test_models_start_from_the_training_states(model_type):
    data = draw(linear_model(), 1, 30)
    z = data.states[0]
    memory = [Recording(z[:10], data.obs[0, :10]), Recording(z[10:], data.obs[0, 10:])]
    recipe = model_type(as_state_space(linear_model()))
    recipe.prepare(memory, None)
    filter = recipe.fit(memory)
    assert isinstance(recipe, FilterModel) and isinstance(filter, Filter)
    state = filter.init(2)
    torch.testing.assert_close(state.mean, z.mean(0).expand(2, 3))
    centred = z - z.mean(0)
    torch.testing.assert_close(state.cov, (centred.T @ centred / 29).expand(2, 3, 3))
    torch.testing.assert_close(recipe.fit(None).init(1).mean[0], linear_model().m0)
    with pytest.raises(ValueError, match="at least 2"):
        recipe.fit(Recording(z[:1], data.obs[0, :1]))


@pytest.mark.parametrize("model_type", [EKF, UKF])
def test_orientation_model_in_additive_form(model_type):
    model = OrientationModel()
    g = torch.Generator().manual_seed(0)
    data = simulate(model, tensor([[1.0, 0.0]]), 40, g)
    memory = Recording(data.states[0], data.obs[0])
    filter = model_type(model).fit(memory)
    m0, P0 = training_moments(memory)
    additive = model.additive(m0, P0)
    shrink = math.exp(-(0.2**2) / 2)
    turn = tensor([[math.cos(0.4), -math.sin(0.4)], [math.sin(0.4), math.cos(0.4)]])
    zero, eye = torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)
    exact = KalmanFilter(
        LinearModel(shrink * turn, zero, additive.Q, shrink * eye, zero, additive.R, m0, P0)
    )
    torch.testing.assert_close(
        rollout(filter, data.obs).estimates, rollout(exact, data.obs).estimates
    )
    with pytest.raises(ValueError, match="memory"):
        with_initial_moments(model, None)


@pytest.mark.parametrize("kind", range(3), ids=["kalman", "ekf", "ukf"])
def test_batch_is_one_by_one_and_masked_is_predicted(kind):
    model = linear_model()
    data = draw(model, 3, 5)
    filter = every_filter(model)[kind]
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    together = rollout(filter, data.obs, mask=mask)
    for k in range(3):
        alone = rollout(filter, data.obs[k : k + 1], mask=mask[k : k + 1])
        torch.testing.assert_close(together.estimates[k], alone.estimates[0])
        torch.testing.assert_close(together.state.cov[k], alone.state.cov[0])
    state = filter.init(2)
    kept = step(filter, state, data.obs[:2, 0], mask=torch.tensor([True, False]))
    torch.testing.assert_close(kept.cov[1], filter.predict(state).cov[1])
    assert not torch.allclose(kept.cov[0], kept.cov[1])


@pytest.mark.parametrize("kind", range(3), ids=["kalman", "ekf", "ukf"])
def test_no_noise_and_no_observation_change_nothing(kind):
    model = linear_model()
    eye = torch.eye(3, dtype=F64)
    model = model._replace(A=eye, a=0 * model.a, Q=0 * eye)
    filter = every_filter(model)[kind]
    state = filter.init(2)
    after = step(filter, state, torch.ones(2, 2, dtype=F64), mask=torch.tensor([False, False]))
    torch.testing.assert_close(after, state, rtol=1e-12, atol=1e-12)


def test_gradients_flow_through_the_rollout():
    """Against finite differences, in parameters of f, h, Q, R and P0; the EKF's need second
    derivatives.
    """
    base = oscillatory()._replace(m0=tensor([0.9, 0.3]), P0=0.2 * torch.eye(2, dtype=F64))
    data = simulate(base, base.m0[None], 4, torch.Generator().manual_seed(0))
    mask = torch.tensor([[True, False, True, True]])

    def loss(kind, theta):
        model = base._replace(
            f=lambda z: theta[0] * base.f(z),
            h=lambda z: z + theta[1] * z**2,
            Q=theta[2] * base.Q,
            R=theta[3] * base.R,
            P0=theta[4] * base.P0,
        )
        run = rollout(kind(model), data.obs, mask=mask, gradients=True)
        return (run.estimates - data.states).square().sum()

    theta = tensor([0.9, 0.3, 1.2, 0.8, 1.1]).requires_grad_()
    for kind in (ExtendedKalmanFilter, UnscentedKalmanFilter):
        assert torch.autograd.gradcheck(
            lambda t, kind=kind: loss(kind, t), theta, rtol=1e-5, atol=1e-7
        )


@pytest.mark.parametrize("kind", [ExtendedKalmanFilter, UnscentedKalmanFilter])
def test_known_start_has_finite_gradients(kind):
    """P0 = 0 is the data generator's own start."""
    model = oscillatory()
    data = simulate(model, model.m0[None], 3, torch.Generator().manual_seed(0))
    scale = tensor(1.0).requires_grad_()
    filter = kind(model._replace(Q=scale * model.Q))
    loss = rollout(filter, data.obs, gradients=True).estimates.square().sum()
    loss.backward()
    assert (
        torch.isfinite(loss)
        and scale.grad is not None
        and torch.isfinite(scale.grad)
        and scale.grad != 0
    )


def test_float32_is_close_to_float64():
    model = linear_model()
    data = draw(model, 2, 50)
    for double, single in zip(
        every_filter(model),
        every_filter(LinearModel(*(None if v is None else v.float() for v in model))),
        strict=True,
    ):
        a, b = rollout(double, data.obs), rollout(single, data.obs.float())
        assert b.estimates.dtype == torch.float32
        torch.testing.assert_close(b.estimates.double(), a.estimates, rtol=1e-4, atol=1e-4)
    for recipe in (
        EKF(oscillatory()),
        UKF(oscillatory()),
        EKF(OrientationModel()),
        LearnedKalman(),
    ):
        memory = Recording(data.states[0, :, :2].float(), data.obs[0].float())
        out = rollout(recipe.fit(memory), data.obs.float())
        assert out.estimates.dtype == out.state.cov.dtype == torch.float32


def test_update_stays_positive_where_the_short_form_does_not():
    """A precise observation in float32: Joseph's covariance keeps its eigenvalues, P - K S K^T gets
    negative ones.
    """
    cov = torch.tensor([[[1.0, 0.999], [0.999, 1.0]]]) * 1e4
    H, R = torch.tensor([[1.0, 1.0]]), torch.tensor([[1e-6]])
    state = kalman_update(torch.zeros(1, 2), cov, torch.ones(1, 1), H, R)
    assert torch.linalg.eigvalsh(state.cov.double()).min() > -1e-6 * state.cov.abs().max()
    torch.testing.assert_close(state.cov, state.cov.mT)


def test_errors():
    model = linear_model()
    known = KalmanFilter(model._replace(P0=0 * model.P0, Q=0 * model.Q, R=0 * model.R))
    with pytest.raises(NotPositiveDefiniteError, match="2 x 2"):
        known.update(known.init(1), torch.zeros(1, 2, dtype=F64))
    with pytest.raises(ValueError, match="alpha > 0"):
        UnscentedKalmanFilter(as_state_space(model), alpha=0.0)
    with pytest.raises(ValueError, match="kappa > 0"):
        UnscentedKalmanFilter(as_state_space(model), kappa=-3.0)


def test_the_density_of_available_sensors_is_that_of_the_shorter_vector():
    m = linear_model()
    residual, cov = tensor([[0.4, math.nan], [math.nan, -0.7], [math.nan, math.nan]]), m.P0
    S = m.C @ cov @ m.C.T + m.R
    found = log_density_of_available(residual, m.C, cov, m.R)
    for k, value in ((0, 0.4), (1, -0.7)):
        law = torch.distributions.Normal(0.0, S[k, k].sqrt())
        torch.testing.assert_close(found[k], law.log_prob(tensor(value)))
    assert float(found[2]) == pytest.approx(0.0)


def test_ukf_leaves_out_missing_sensors_and_takes_controls_as_the_kalman_filter():
    """On a linear model with B u: means, covariances and densities of rows with and without NaN."""
    generator = torch.Generator().manual_seed(4)
    A, C = 0.8 * torch.eye(2).double(), torch.randn(3, 2, generator=generator).double()
    B, one = torch.tensor([[0.7], [-0.4]]).double(), torch.eye(3).double()
    R = 0.2 * one + 0.1
    model = LinearModel(A, C[0], 0.1 * one[:2, :2], C, one[0], R, C[1], one[:2, :2], B)
    moved = StateSpaceModel(
        lambda z, u: z @ A.mT + u @ B.mT + C[0],
        lambda z: z @ C.mT + one[0],
        *(model.Q, model.R, model.m0, model.P0),
    )
    exact = KalmanFilter(model, allow_missing_sensors=True)
    ukf = UnscentedKalmanFilter(moved, allow_missing_sensors=True, controlled=1)
    obs, u = (torch.randn(4, 9, k, generator=generator).double() for k in (3, 1))
    obs[torch.rand(obs.shape, generator=generator) < 0.4] = torch.nan
    assert obs.isnan().all(-1).any()
    found = [
        rollout(each, obs, controls=u, covariances=True, log_likelihood=True)
        for each in (exact, ukf)
    ]
    for a, b in zip(found[0][:3], found[1][:3], strict=True):
        assert a is not None
        assert b is not None
        assert torch.allclose(a, b, atol=1e-9, equal_nan=True)
    plain = UnscentedKalmanFilter(moved, controlled=1)
    with pytest.raises(ValueError, match="observations hold NaN"):
        rollout(plain, obs, controls=u)


def inertial(n: int, seed: int) -> Recording:
    """A noisy position of a damped oscillator that is pushed at random: z'' = -k z - c z' + e."""
    generator = torch.Generator().manual_seed(seed)
    z, v, states = torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64), []
    for _ in range(n):
        v = 0.98 * v - 0.01 * z + 0.05 * torch.randn(1, generator=generator, dtype=F64)
        z = z + v
        states.append(z)
    states = torch.stack(states)
    return Recording(states, states + torch.randn(n, 1, generator=generator, dtype=F64))


def test_order_2_is_the_kalman_filter_of_position_and_velocity():
    train, test = inertial(600, 0), inertial(300, 1)
    filter = LearnedKalman(order=2).fit(train)
    lagged = Recording(
        torch.cat([train.states[1:], train.states[1:] - train.states[:-1]], 1), train.obs[1:]
    )
    direct = KalmanFilter(fit_linear(lagged))
    runs = [rollout(each, test.obs[None], covariances=True) for each in (filter, direct)]
    assert torch.allclose(runs[0].estimates[:, 60:], runs[1].estimates[:, 60:, :1], atol=1e-8)
    assert runs[0].covariances is not None
    assert runs[1].covariances is not None
    assert runs[0].covariances.shape == (1, 300, 1, 1)
    assert torch.allclose(runs[0].covariances, runs[1].covariances[..., :1, :1])
    first = rollout(LearnedKalman().fit(train), test.obs[None]).estimates
    errors = [(run - test.states).square().mean() for run in (runs[0].estimates, first)]
    assert errors[0] < 0.8 * errors[1]


def test_order_2_refuses_short_recordings_and_other_orders():
    with pytest.raises(FitError, match="at least 3 steps"):
        LearnedKalman(order=2).fit([inertial(2, 0), inertial(1, 1)])
    with pytest.raises(ValueError, match="order 1 or 2, got 3"):
        LearnedKalman(order=3)


# given equations


@pytest.mark.parametrize("Model", [EKF, UKF])
def test_a_filter_of_given_equations_starts_from_the_moments_that_it_is_asked_for(Model):
    drawn = SystemRecordings(discrete_lorenz(), 5, 1, 0, steps=30)
    states = torch.cat([each.states for each in drawn.train])
    start = Model(drawn.system).fit(drawn.train).init(1)
    torch.testing.assert_close(start.mean[0], states.mean(0))
    start = Model(drawn.system, initial="model").fit(drawn.train).init(1)
    torch.testing.assert_close(start.mean[0], torch.ones(3, dtype=torch.float64))
    assert float(start.cov.abs().max()) == 0
    with pytest.raises(ValueError, match="initial must be memory or model, got 'states'"):
        Model(drawn.system, initial="states")


def test_given_equations_are_in_the_units_of_the_data():
    """With scaled recordings a learned filter gets a scaling, and one with equations does not."""
    drawn = SystemRecordings(discrete_lorenz(20), 3, 1, 0, steps=30)
    config = configure("train", ["data=lorenz", "model=ekf", "data.noise_db=20"])
    assert config["data"]["normalise"] == "standard"
    module = FittedModel(config, drawn.train)
    assert module.scaling is None
    run = rollout(module.filter(), drawn.test[0].obs[None])
    assert float((run.estimates[0] - drawn.test[0].states).square().mean()) < 0.005
    config = configure("train", ["data=lorenz", "model=kalman"])
    assert FittedModel(config, drawn.train).scaling is not None


def test_a_sensor_that_is_constant_in_the_training_changes_no_estimate():
    """Whatever it reads later; without it the estimates are the same."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(200, 2, generator=generator, dtype=torch.float64).cumsum(0) / 5
    x = z + 0.3 * torch.randn(z.shape, generator=generator, dtype=torch.float64)
    constant = torch.cat([x, torch.full((200, 1), 7.0, dtype=torch.float64)], 1)
    for missing in (False, True):
        model = LearnedKalman()
        model.allow_missing_sensors = missing
        expected = rollout(model.fit([Recording(z, x)]), x[None]).estimates
        filter = model.fit([Recording(z, constant)])
        found = rollout(filter, constant[None])
        torch.testing.assert_close(found.estimates, expected)
        R = filter.model.R
        assert float(R[2, 2]) == pytest.approx(float(R.diagonal()[:2].mean()))
        moved = constant.clone()
        moved[50:60, 2] += 0.5
        torch.testing.assert_close(rollout(filter, moved[None]).estimates, expected)
