"""Resampling against its definition; the bootstrap filter against the Kalman filter and a Bayes
filter on a grid.
"""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from reference import filter_moments

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.gaussian.moments import training_moments
from kbf.filters.particle.bootstrap import (
    MAX_BACKWARD_PARTICLES,
    BootstrapFilter,
    ParticleFilter,
    ParticleState,
    in_type_of,
    particle_backward,
    thinned,
)
from kbf.filters.particle.learned import (
    LearnedParticleFilter,
    ObservationParticleFilter,
    PixelParticleFilter,
)
from kbf.filters.particle.resampling import (
    effective_sample_size,
    invert,
    multinomial,
    soft,
    systematic,
)
from kbf.filters.protocols import Filter, FilterModel
from kbf.filters.rollout import rollout, step
from kbf.recording import Recording
from kbf.ssm import (
    FactoredModel,
    OrientationModel,
    StateSpaceModel,
    gaussian_noise,
    oscillatory,
    simulate,
)

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def random_log_weights(b: int, P: int, dtype: torch.dtype = F64) -> torch.Tensor:
    """Uneven weights, not normalised, a third of them zero."""
    lw = 3 * torch.randn(b, P, dtype=F64, generator=generator(1)) + 7
    return lw.masked_fill(torch.rand(b, P, generator=generator(2)) < 1 / 3, -math.inf).to(dtype)


def counts(chosen: torch.Tensor, P: int) -> torch.Tensor:
    return torch.zeros(len(chosen), P, dtype=F64).scatter_add_(
        1, chosen, torch.ones_like(chosen, dtype=F64)
    )


@pytest.mark.parametrize(
    ("b", "P", "dtype"), [(1, 1, F64), (5, 7, F64), (3, 1000, F64), (2, 20_000, torch.float32)]
)
def test_systematic_counts_are_floor_or_ceil(b, P, dtype):
    lw = random_log_weights(b, P, dtype)
    lw[:, 0] = 5.0  # never all zero
    expected = P * lw.double().softmax(-1)
    for seed in range(20 if P < 2000 else 2):
        n = counts(systematic(lw, generator(seed)), P)
        assert (n >= (expected - 1e-7).floor()).all() and (n <= (expected + 1e-7).ceil()).all()
        assert (n.sum(-1) == P).all() and (n[lw == -math.inf] == 0).all()


@pytest.mark.parametrize("resample", [systematic, multinomial])
def test_expected_counts_are_weights(resample):
    """Mean count over 4,000 resamplings within 4.5 standard errors of P w (20 comparisons), with
    the scheme's own variance.
    """
    lw = torch.randn(1, 20, dtype=F64, generator=generator(1)).expand(4000, 20)
    n = counts(resample(lw, generator()), 20)
    expected = 20 * lw[0].softmax(-1)
    error = n.std(0) / math.sqrt(4000)
    assert ((n.mean(0) - expected).abs() <= 4.5 * error + 1e-12).all()
    variance = n.var(0)
    if resample is multinomial:
        binomial = expected * (1 - expected / 20)
        assert ((variance - binomial).abs() <= 0.15 * binomial).all()
    else:
        assert ((n - expected).abs() < 1.0 + 1e-9).all()


def test_edges_of_the_unit_interval_choose_no_zero_weight():
    """Points exactly 0, on a boundary, and 1, of weights with zeros at both ends and sums that
    round to below 1.
    """
    lw = tensor([[0.0, 0.25, 0.25, 0.0, 0.5, 0.0]]).log()
    assert invert(lw, tensor([[0.0, 0.25, 0.5, 1.0]])).tolist() == [[1, 2, 4, 4]]
    for P in range(3, 200):
        lw = torch.full((1, P), -0.1 * P, dtype=F64)
        lw[:, -1] = -math.inf
        assert invert(lw, tensor([[0.0, 1.0]])).tolist() == [[0, P - 2]]


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("P", [1, 2, 30, 20_000])
def test_systematic_is_the_inverse_of_the_cumulative_weights_at_its_points(P, dtype):
    """By counts, which is faster than a search for each point: the same indices; at u = 0 and 1,
    too, none of weight 0.
    """
    lw = random_log_weights(6, P, dtype)
    lw[:, P // 2] = 5.0
    lw[3:, : P // 2] = lw[4:, P // 2 + 1 :] = -math.inf
    points = (torch.arange(P) + torch.rand(6, 1, dtype=F64, generator=generator(3))) / P
    assert torch.equal(systematic(lw, generator(3)), invert(lw, points))
    for m in (7, 50_000):
        points = (torch.arange(m) + torch.rand(6, 1, dtype=F64, generator=generator(3))) / m
        assert torch.equal(systematic(lw, generator(3), draws=m), invert(lw, points))
    for u in (0.0, 1.0 - 2.0**-53):
        with patch.object(
            torch, "rand", lambda *size, u=u, **given: torch.full(size, u, dtype=F64)
        ):
            chosen = systematic(lw)
        assert ((chosen >= 0) & (chosen < P)).all() and not lw.gather(1, chosen).isinf().any()


def test_a_row_of_nan_leaves_the_others_alone():
    lw = random_log_weights(3, 30, F64)
    lw[:, 4] = 5.0
    broken = lw.clone()
    broken[1] = math.nan
    assert torch.equal(systematic(broken, generator())[[0, 2]], systematic(lw, generator())[[0, 2]])


def test_systematic_uses_one_number_and_multinomial_many():
    lw = torch.zeros(500, 40)
    lw[:, 0] = 0.7
    assert (
        len(systematic(lw, generator()).unique(dim=0)) < 45
    )  # one u: as many outcomes as sub-intervals
    assert len(multinomial(lw, generator()).unique(dim=0)) == 500


def test_resampling_is_a_batch_of_its_own():
    """The weights of one element do not touch another: the same draw, with the others changed."""
    lw = random_log_weights(4, 30)
    changed = lw.clone()
    changed[[0, 1, 3]] = 0.0
    for resample in (systematic, multinomial):
        assert torch.equal(resample(lw, generator())[2], resample(changed, generator())[2])


def test_soft_resampling_keeps_expectations():
    """sum w'_i f(z_i) over what was drawn is sum w_i f(z_i) on average, for any alpha."""
    log_w = torch.randn(1, 6, generator=generator(), dtype=F64).log_softmax(-1)
    f = torch.randn(6, generator=generator(1), dtype=F64)
    for alpha in (1.0, 0.6, 0.1):
        chosen, weights = soft(
            log_w.repeat_interleave(4000, -1).log_softmax(-1), alpha, generator(2)
        )
        found = (weights.exp() * f.repeat_interleave(4000)[chosen]).sum()
        torch.testing.assert_close(found, log_w.exp()[0] @ f, rtol=0, atol=1e-3)


@pytest.mark.parametrize("alpha", [1.0, 0.6, 0.1])
def test_soft_resampling_weighs_what_is_drawn_by_w_over_q(alpha):
    """Draws from q = alpha w + (1 - alpha) / P, as often as systematic resampling draws from q."""
    log_w = random_log_weights(3, 40).log_softmax(-1)
    w = log_w.exp()
    q = alpha * w + (1 - alpha) / 40
    chosen, weights = soft(log_w, alpha, generator(5))
    assert torch.equal(chosen, systematic(q.log(), generator(5)))
    drawn = (w / q).gather(1, chosen)
    torch.testing.assert_close(weights.exp(), drawn / drawn.sum(1, keepdim=True))


def test_soft_resampling_has_the_gradient_of_its_weights():
    """The choice has none; with alpha = 1 all weights are equal, and none is left."""
    f = torch.randn(2, 8, generator=generator(1), dtype=F64)

    def estimate(logits: torch.Tensor, alpha: float) -> torch.Tensor:
        chosen, weights = soft(logits.log_softmax(-1), alpha, generator(3))
        return (weights.exp() * f.gather(1, chosen)).sum(1)

    logits = torch.randn(2, 8, generator=generator(), dtype=F64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: estimate(x, 0.4), (logits,))
    assert torch.autograd.grad(estimate(logits, 0.4).sum(), logits)[0].abs().max() > 1e-3
    assert torch.autograd.grad(estimate(logits, 1.0).sum(), logits)[0].abs().max() < 1e-12


def test_effective_sample_size():
    w = torch.rand(3, 9, dtype=F64, generator=generator())
    torch.testing.assert_close(
        effective_sample_size(w.log() - 800), w.sum(-1) ** 2 / w.square().sum(-1)
    )
    assert effective_sample_size(tensor([[0.0, -math.inf, -math.inf]])).item() == pytest.approx(1)


def linear_gaussian() -> LinearModel:
    return LinearModel(
        A=tensor([[0.9, 0.4], [-0.3, 0.8]]),
        a=tensor([0.2, -0.1]),
        Q=tensor([[0.3, 0.1], [0.1, 0.2]]),
        C=tensor([[1.0, 0.5]]),
        c=tensor([0.3]),
        R=tensor([[0.5]]),
        m0=tensor([1.0, -1.0]),
        P0=tensor([[0.6, 0.2], [0.2, 0.4]]),
    )


def as_state_space(m: LinearModel) -> StateSpaceModel:
    return StateSpaceModel(
        lambda z: z @ m.A.mT + m.a, lambda z: z @ m.C.mT + m.c, m.Q, m.R, m.m0, m.P0
    )


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_particle_filter_is_the_kalman_filter(threshold):
    """60 filters of 1,000 particles over the same observations, two of eight missing.

    The average estimate and covariance of each step are within 4.5 standard errors (of the 60) of
    the Kalman filter's: 48 comparisons, one in 3,000 would fail by chance; the seed is fixed. The
    bias, of order 1 / 1,000, is a fifth of a standard error.
    """
    model, T, R = linear_gaussian(), 8, 60
    initial = model.m0 + gaussian_noise(torch.Size([50_000]), model.P0, generator(1))
    obs = simulate(as_state_space(model), model.m0[None], T, generator(2)).obs
    mask = torch.tensor([[True, True, False, True, True, True, False, True]])
    m0, P0 = training_moments(Recording(initial, initial))
    exact = filter_moments(KalmanFilter(model._replace(m0=m0, P0=P0)), obs, mask)
    filter = BootstrapFilter(as_state_space(model), initial, 1000, threshold)
    g, state = generator(3), None
    resampled = 0
    for t in range(T):
        state = filter.init(R, generator=g) if state is None else state
        low = effective_sample_size(state.log_weights) < threshold * 1000
        resampled += int(low.sum())
        state = step(filter, state, obs[:, t].expand(R, -1), mask=mask[:, t].expand(R), generator=g)
        for ours, truth in (
            (filter.estimate(state), exact.mean[0, t]),
            (filter.covariance(state), exact.cov[0, t]),
        ):
            assert ((ours.mean(0) - truth).abs() < 4.5 * ours.std(0) / math.sqrt(R)).all()
            assert (ours.std(0) < 0.25).all()
    assert (resampled == 0) == (threshold == 0)


def test_orientation_filter_is_bayes_rule_on_a_grid():
    """40 filters of 800 particles against the exact filter on 360 angles; 10 numbers within 4.5
    standard errors.
    """
    model, T, R = OrientationModel(turn=0.5, sigma_z=0.3, sigma_x=0.6), 5, 40
    angles = torch.arange(360, dtype=F64) * (2 * math.pi / 360)
    grid = torch.stack([angles.cos(), angles.sin()], -1)
    gap = angles[:, None] - angles - model.turn  # to, from
    turns = 2 * math.pi * torch.arange(-3, 4, dtype=F64)
    wrapped = torch.exp(-0.5 * ((gap[..., None] + turns) / model.sigma_z) ** 2).sum(-1)
    wrapped = wrapped / wrapped.sum(0)
    obs = simulate(model, tensor([[1.0, 0.0]]), T, generator(1)).obs
    seen = torch.atan2(obs[0, :, 1], obs[0, :, 0])
    filter = BootstrapFilter(model, grid, 800)
    estimates = rollout(filter, obs.expand(R, T, 2), generator=generator(2)).estimates
    p = torch.full((360,), 1 / 360, dtype=F64)
    for t in range(T):
        gap = (seen[t] - angles)[:, None] + turns
        p = (wrapped @ p) * torch.exp(-0.5 * (gap / model.sigma_x) ** 2).sum(-1)
        p = p / p.sum()
        error = estimates[:, t].std(0) / math.sqrt(R)
        assert ((estimates[:, t].mean(0) - p @ grid).abs() < 4.5 * error).all()


def test_recipe_starts_from_the_training_states():
    model = oscillatory()
    data = simulate(model, model.m0[None], 60, generator())
    z, x = data.states[0], data.obs[0]
    recipe = ParticleFilter(model, particles=5000)
    recipe.prepare([Recording(z, x)], None)
    filter = recipe.fit([Recording(z[:20], x[:20]), Recording(z[20:], x[20:])])
    assert isinstance(recipe, FilterModel) and isinstance(filter, Filter)
    state = filter.init(3, generator=generator())
    assert state.particles.shape == (3, 5000, 2) and state.log_weights.shape == (3, 5000)
    matches = (state.particles[:, :, None] == z).all(-1)
    assert matches.any(-1).all()
    drawn = matches.double().sum(
        1
    )  # each of 60 states about 5000 / 60 times: binomial, 5 standard deviations
    assert ((drawn - 5000 / 60).abs() < 5 * math.sqrt(5000 / 60)).all()
    torch.testing.assert_close(
        filter.estimate(state), z.mean(0).expand(3, 2), rtol=0, atol=5 * 0.75 / math.sqrt(5000)
    )
    with pytest.raises(ValueError, match="training states"):
        recipe.fit(None)
    with pytest.raises(ValueError, match="got 0 and 60"):
        BootstrapFilter(model, z, 0)


def test_weights_are_bayes_rule():
    model = oscillatory()
    filter = BootstrapFilter(model, torch.randn(9, 2, dtype=F64, generator=generator()), 50)
    state = filter.init(2, generator=generator())._replace(
        log_weights=torch.randn(2, 50, dtype=F64).log_softmax(-1)
    )
    x = tensor([[0.3, 0.1], [-1.0, 0.5]])
    w = state.log_weights.exp() * torch.exp(
        -0.5 * (x[:, None] - state.particles).square().sum(-1) / 0.04
    )
    w = w / w.sum(-1, keepdim=True)
    after = filter.update(state, x)
    torch.testing.assert_close(after.log_weights.exp(), w)
    mean = torch.einsum("bp,bpd->bd", w, state.particles)
    torch.testing.assert_close(filter.estimate(after), mean)
    second = torch.einsum("bp,bpd,bpe->bde", w, state.particles, state.particles)
    torch.testing.assert_close(filter.covariance(after), second - mean[:, :, None] * mean[:, None])
    torch.testing.assert_close(filter.diagnostics(after)["ess"], 1 / w.square().sum(-1))


def test_only_the_degenerate_element_is_resampled():
    still = oscillatory()._replace(f=lambda z: z, Q=torch.zeros(2, 2, dtype=F64))
    filter = BootstrapFilter(
        still, torch.randn(40, 2, dtype=F64, generator=generator()), 40, threshold=0.5
    )
    state = filter.init(2, generator=generator())
    lw = 0.5 * torch.randn(2, 40, dtype=F64, generator=generator(1))
    lw[1, 5] = 20.0
    state = state._replace(log_weights=lw.log_softmax(-1))
    after = filter.predict(state, generator=generator())
    assert torch.equal(after.particles[0], state.particles[0]) and torch.equal(
        after.log_weights[0], state.log_weights[0]
    )
    assert (after.particles[1] == state.particles[1, 5]).all()
    torch.testing.assert_close(after.log_weights[1], torch.full((40,), -math.log(40), dtype=F64))
    torch.testing.assert_close(filter.estimate(after), filter.estimate(state), rtol=1e-5, atol=1e-5)


def test_no_noise_and_no_observation_change_nothing():
    still = oscillatory()._replace(f=lambda z: z, Q=torch.zeros(2, 2, dtype=F64))
    filter = BootstrapFilter(still, torch.randn(40, 2, dtype=F64, generator=generator()), 30)
    state = filter.init(3, generator=generator())
    after = step(
        filter,
        state,
        torch.full((3, 2), 9.0, dtype=F64),
        mask=torch.zeros(3, dtype=torch.bool),
        generator=generator(),
    )
    assert torch.equal(after.particles, state.particles) and torch.equal(
        after.log_weights, state.log_weights
    )


def test_one_initial_state_is_enough_and_none_too_few():
    one = BootstrapFilter(oscillatory(), tensor([[1.0, 2.0]]), 5).init(1, generator=generator())
    assert torch.equal(one.particles[0], tensor([[1.0, 2.0]]).expand(5, 2))
    for states, particles in ((torch.zeros(0, 2, dtype=F64), 5), (tensor([[1.0, 2.0]]), 0)):
        with pytest.raises(ValueError, match="requires particles and initial states"):
            BootstrapFilter(oscillatory(), states, particles)


def test_impossible_observation_resets_the_weights():
    """Gaussian likelihoods underflow to -inf in no case, so the model is made of a hard limit."""

    class Window(StateSpaceModel):
        def log_likelihood(self, x, z):
            return torch.where((x - z).abs().sum(-1) < 1, 0.0, -math.inf).to(z.dtype)

    filter = BootstrapFilter(
        Window(*oscillatory()),
        torch.randn(9, 2, dtype=F64, generator=generator()),
        20,
        threshold=0.0,
    )
    state = filter.init(2, generator=generator())
    state = state._replace(particles=state.particles.requires_grad_())
    after = filter.update(state, tensor([[100.0, 100.0], [0.0, 0.0]]))
    torch.testing.assert_close(after.log_weights[0], torch.full((20,), -math.log(20), dtype=F64))
    near = state.particles[1].abs().sum(-1) < 1
    torch.testing.assert_close(after.log_weights[1].exp(), near / near.sum(), check_dtype=False)
    assert filter.diagnostics(after)["ess"][0].item() == pytest.approx(20)
    again = filter.estimate(
        filter.update(
            filter.predict(after, generator=generator()), tensor([[0.0, 0.0], [50.0, 50.0]])
        )
    )
    assert torch.isfinite(again).all()
    again.sum().backward()
    assert state.particles.grad is not None and torch.isfinite(state.particles.grad).all()


def test_batch_is_one_by_one_and_masked_is_predicted():
    """Without noise and without resampling a rollout is deterministic: together and alone agree
    exactly.
    """
    quiet = oscillatory()._replace(Q=torch.zeros(2, 2, dtype=F64))
    filter = BootstrapFilter(
        quiet, torch.randn(30, 2, dtype=F64, generator=generator()), 50, threshold=0.0
    )
    start = filter.init(3, generator=generator())
    obs = torch.randn(3, 6, 2, dtype=F64, generator=generator(1))
    mask = torch.rand(3, 6, generator=generator(2)) < 0.6
    together = rollout(filter, obs, mask=mask, state=start)
    for k in range(3):
        state = ParticleState(*(leaf[k : k + 1] for leaf in start))
        for t in range(6):
            state = filter.predict(state)
            state = filter.update(state, obs[k : k + 1, t]) if mask[k, t] else state
            torch.testing.assert_close(together.estimates[k, t], filter.estimate(state)[0])
        torch.testing.assert_close(together.state.log_weights[k], state.log_weights[0])
    assert together.diagnostics["ess"].shape == (3, 6)


def test_same_generator_same_rollout():
    model = oscillatory()
    filter = BootstrapFilter(model, torch.randn(30, 2, dtype=F64, generator=generator()), 50)
    obs = torch.randn(2, 6, 2, dtype=F64, generator=generator(1))
    runs = [rollout(filter, obs, generator=generator(seed)).estimates for seed in (4, 4, 5)]
    assert torch.equal(runs[0], runs[1]) and not torch.allclose(runs[0], runs[2])


def test_gradients_flow_through_moves_and_weights():
    """Against finite differences with the noise held fixed; the choice of the resampled particles
    does not change under them.
    """
    base = oscillatory()
    initial = torch.randn(30, 2, dtype=F64, generator=generator())
    obs = torch.randn(2, 3, 2, dtype=F64, generator=generator(1))

    def estimates(theta):
        model = base._replace(f=lambda z: theta[0] * base.f(z), R=theta[1] * base.R)
        return rollout(
            BootstrapFilter(model, initial, 12, threshold=0.0),
            obs,
            generator=generator(2),
            gradients=True,
        ).estimates

    assert torch.autograd.gradcheck(
        estimates, tensor([0.9, 8.0]).requires_grad_(), rtol=1e-5, atol=1e-7
    )


def test_float32_follows_the_initial_states():
    model = oscillatory()  # float64 matrices
    data = simulate(model, model.m0[None], 40, generator())
    single = ParticleFilter(model, 500).fit(Recording(data.states[0].float(), data.obs[0].float()))
    double = ParticleFilter(model, 500).fit(Recording(data.states[0], data.obs[0]))
    out = rollout(single, data.obs.float(), generator=generator())
    assert out.estimates.dtype == out.state.log_weights.dtype == torch.float32
    state = double.init(1, generator=generator())
    a = double.update(state, data.obs[:, 0])
    b = single.update(ParticleState(*(leaf.float() for leaf in state)), data.obs[:, 0].float())
    torch.testing.assert_close(
        single.estimate(b).double(), double.estimate(a), rtol=1e-5, atol=1e-5
    )


def test_covariances_factored_once_give_the_same_numbers():
    """To the bit; a model with methods of its own, or with a covariance that learns, is left as it
    is.
    """
    model, z = oscillatory(), torch.randn(5, 2, dtype=F64, generator=generator())
    factored = in_type_of(model, z)
    assert isinstance(factored, FactoredModel)
    assert torch.equal(factored.move(z, generator(1)), model.move(z, generator(1)))
    assert torch.equal(factored.observe(z, generator(1)), model.observe(z, generator(1)))
    assert torch.equal(factored.log_likelihood(z[:1], z), model.log_likelihood(z[:1], z))
    assert torch.equal(factored.log_transition(z[:1], z), model.log_transition(z[:1], z))

    class Other(StateSpaceModel):
        """Of the same fields."""

    learned = model._replace(R=model.R.clone().requires_grad_())
    assert (
        type(in_type_of(learned, z)) is type(model) and type(in_type_of(Other(*model), z)) is Other
    )


@pytest.mark.parametrize("predictive", [True, False])
def test_drawn_images_have_the_variance_of_the_likelihood(predictive):
    """Far from the training states: that of the regression, if used, else of residuals."""
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(60, 1, generator=generator, dtype=torch.float64)
    images = (z * torch.linspace(0.5, 2.0, 6)).sin() + 0.1 * torch.randn(60, 6, generator=generator)
    recording = Recording(z, images.unflatten(1, (2, 3)))
    filter = PixelParticleFilter(oscillatory(), predictive=predictive)
    model = filter.state_space([recording], z)
    far = torch.full((4000, 1), 3.0, dtype=torch.float64)
    drawn = model.observe(far, generator)
    assert drawn.shape == (4000, 2, 3)
    mean, scale = model.image.predict(far)
    expected = model.image.noise * (scale[0] if predictive else 1.0)
    assert scale[0] > 1.5
    found = (drawn.flatten(1) - mean).square().mean(0)
    torch.testing.assert_close(found, expected, rtol=0.12, atol=0)

    x, at = recording.obs[:3, None], torch.tensor([[0.2], [0.7], [1.5], [3.0]], dtype=torch.float64)
    mean, scale = model.image.predict(at)
    variance = model.image.noise * (scale[:, None] if predictive else 1.0)
    naive = torch.distributions.Normal(mean, variance.sqrt()).log_prob(x.flatten(2)).sum(-1)
    found = model.log_likelihood(x, at)
    assert found.shape == (3, 4)
    torch.testing.assert_close(found - found[0, 0], naive - naive[0, 0])


# smoothing, and learned models


def test_a_step_back_weighs_particles_by_their_successors():
    """W_i = sum_j W'_j w_i f(z'_j | z_i) / sum_k w_k f(z'_j | z_k)."""
    model = as_state_space(linear_gaussian())
    g = generator()
    z, after = torch.randn(2, 1, 7, 2, dtype=F64, generator=g)
    log_w, log_after = torch.randn(2, 1, 7, dtype=F64, generator=g).log_softmax(-1)
    kept, found = particle_backward(model, ParticleState(z, log_w), ParticleState(after, log_after))
    expected = torch.zeros(7, dtype=F64)
    for j in range(7):
        density = [
            log_w[0, i].exp() * model.log_transition(after[0, j], z[0, i]).exp() for i in range(7)
        ]
        expected += log_after[0, j].exp() * torch.stack(density) / sum(density)
    assert torch.equal(kept, z)
    torch.testing.assert_close(found[0].exp(), expected)


def test_many_particles_are_thinned_by_their_weights():
    P = 4 * MAX_BACKWARD_PARTICLES
    particles = torch.arange(P, dtype=F64).expand(2, P)[..., None]
    weights = (particles[..., 0] < P / 2) * torch.ones(2, P, dtype=F64)
    some, log_w = thinned(particles, weights.log(), generator())
    assert some.shape == (2, MAX_BACKWARD_PARTICLES, 1)
    assert some.max() < P / 2 and some.mean() == pytest.approx(P / 4, rel=0.02)
    torch.testing.assert_close(log_w.exp(), torch.full_like(log_w, 1 / MAX_BACKWARD_PARTICLES))
    few = particles[:, :5], weights[:, :5].log()
    assert all(torch.equal(a, b) for a, b in zip(thinned(*few), few, strict=True))


@pytest.mark.parametrize("kind", ["learned", "observation"])
def test_filters_of_learned_models_come_near_the_kalman_filter(kind):
    """From 200 steps: the error is at most a third above that of the Kalman filter."""
    linear = linear_gaussian()
    model = as_state_space(linear)
    train, test = (simulate(model, model.m0, n, generator(n)) for n in (200, 300))
    recipe = {
        "learned": LearnedParticleFilter(500, transition="gaussian", observation="gaussian"),
        "observation": ObservationParticleFilter(model, 500),
    }[kind]
    filter = recipe.fit(Recording(train.states, train.obs))
    assert filter.particles == 500
    runs = [
        rollout(each, test.obs[None], generator=generator()).estimates[0]
        for each in (filter, KalmanFilter(linear))
    ]
    errors = [float((run - test.states).square().mean()) for run in runs]
    assert errors[0] < 1.33 * errors[1]
