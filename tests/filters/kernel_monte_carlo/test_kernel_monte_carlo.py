"""The kernel Monte Carlo filter: its rule against `kbf.rkhs.rules`, the filter against the Kalman
filter, and hidden velocity.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kbf.data.windows import held_out_blocks, split
from kbf.densities.learned_ssm import learn_lagged_model, widened
from kbf.evaluation.metrics import nll
from kbf.evaluation.score import score
from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.kernel_monte_carlo.filter import JITTER, KernelMonteCarloFilter, local_weights
from kbf.filters.kernel_monte_carlo.model import (
    BURN_IN,
    HELD_OUT_SHARE,
    HeldOut,
    KernelMonteCarlo,
    held_out,
)
from kbf.filters.rollout import rollout
from kbf.filters.smoothing import smooth
from kbf.recording import Recording
from kbf.rkhs.rules import importance_weighted_primal
from kbf.ssm import StateSpaceModel, simulate

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def drift(
    position: float = 1.0,
    pull: float = 0.0,
    keep: float = 0.9,
    push: float = 0.3,
    noise: float = 1.0,
) -> LinearModel:
    """A place that moves by a velocity, which is kept to a share of ``keep`` and pushed at random;
    the place is seen.
    """
    A = torch.tensor([[position - pull, keep], [-pull, keep]], dtype=F64)
    return LinearModel(
        A=A,
        a=torch.zeros(2, dtype=F64),
        Q=push**2 * torch.ones(2, 2, dtype=F64) + 1e-9 * torch.eye(2, dtype=F64),
        C=torch.tensor([[1.0, 0.0]], dtype=F64),
        c=torch.zeros(1, dtype=F64),
        R=torch.tensor([[noise**2]], dtype=F64),
        m0=torch.zeros(2, dtype=F64),
        P0=torch.eye(2, dtype=F64),
    )


def as_samples(model: LinearModel) -> StateSpaceModel:
    return StateSpaceModel(
        f=lambda z: z @ model.A.mT.to(z),
        h=lambda z: z @ model.C.mT.to(z),
        Q=model.Q,
        R=model.R,
        m0=model.m0,
        P0=model.P0,
    )


@pytest.mark.parametrize("reg", [1e-1, 1e-3])
def test_weights_are_those_of_the_importance_weighted_rule(reg):
    """In Nystrom features at the same landmarks, written out, with the ratio 1 at every point;
    batch = one by one.
    """
    seen, obs = (
        torch.randn(2, 40, 3, generator=generator(), dtype=F64),
        torch.randn(2, 3, generator=generator(1), dtype=F64),
    )
    landmarks = torch.arange(0, 40, 4)
    found = local_weights(seen, obs[:, None], landmarks, reg=reg, factor=0.8)
    for k in range(2):
        width = (
            0.8 * torch.cdist(seen[k], seen[k]).square().mean().sqrt()
        )  # root mean square, of each from itself included
        base = seen[k, landmarks]
        gram = (-torch.cdist(base, base).square() / (2 * width**2)).exp()
        factor = torch.linalg.cholesky(gram + JITTER * torch.eye(10, dtype=F64))
        rows = (
            -torch.cdist(base, torch.cat([seen[k], obs[k : k + 1]])).square() / (2 * width**2)
        ).exp()
        features = torch.linalg.solve_triangular(factor, rows, upper=False).mT
        expected = importance_weighted_primal(
            torch.ones(40, dtype=F64), features[:-1], features[-1], reg
        )
        torch.testing.assert_close(found[k], expected)


def test_several_observations_are_their_weighted_mean():
    """The rule is linear in k(x): the weights of an embedding of observations are those of each,
    weighted.
    """
    seen, obs = (
        torch.randn(2, 40, 3, generator=generator(), dtype=F64),
        torch.randn(2, 5, 3, generator=generator(1), dtype=F64),
    )
    a, rule = (
        torch.randn(2, 5, generator=generator(2), dtype=F64),
        {"landmarks": torch.arange(0, 40, 4), "reg": 1e-2, "factor": 0.8},
    )
    each = torch.stack([local_weights(seen, obs[:, j, None], **rule) for j in range(5)], 1)
    torch.testing.assert_close(
        local_weights(seen, obs, weights=a, **rule), (a[..., None] * each).sum(1)
    )


@pytest.mark.parametrize("reg", [1e-3, 0.0])
def test_its_smoother_is_the_exact_one(reg):
    """Place and velocity with noise of one dimension: a move has no density, and needs none.

    Errors and sizes of the regions.
    """
    model = drift(pull=0.1, noise=2.0)
    truth = simulate(as_samples(model), torch.zeros(4, 2, dtype=F64), 60, generator(3))
    exact = smooth(KalmanFilter(model), truth.obs)
    start = torch.randn(4000, 2, generator=generator(4), dtype=F64)
    filter = KernelMonteCarloFilter(as_samples(model), start, particles=800, reg=reg)
    found = smooth(filter, truth.obs, generator=generator(5))
    assert exact.covariances is not None and found.covariances is not None

    def error(estimates):
        return (estimates - truth.states)[:, 10:].square().mean((0, 1))

    seen = rollout(KalmanFilter(model), truth.obs).estimates
    assert (error(exact.estimates) < 0.6 * error(seen)).all(), (
        "the smoother has nothing to win here"
    )
    assert (error(found.estimates) < 1.1 * error(exact.estimates)).all()
    sizes = [
        each.diagonal(dim1=-2, dim2=-1)[:, 10:].mean((0, 1)).sqrt()
        for each in (found.covariances, exact.covariances)
    ]
    assert (sizes[0] / sizes[1] - 1).abs().max() < 0.15


def test_weights_in_single_precision_stay_small():
    """A lambda below the rounding of K_mn K_nm let weights of one column grow to 7e5, and estimates
    with them.
    """
    seen = torch.randn(20, 1600, 1, generator=generator())
    for x in (0.3, 2.0):
        obs, rule = torch.full((20, 1, 1), x), {"reg": 1e-4, "factor": 0.7}
        weights = local_weights(seen, obs, torch.arange(0, 1600, 25), **rule)
        double = local_weights(seen.double(), obs.double(), torch.arange(0, 1600, 25), **rule)
        assert weights.abs().sum(1).max() < 3
        means = [(each[..., None] * seen).sum(1) for each in (weights, double)]
        torch.testing.assert_close(*means, rtol=0, atol=0.1, check_dtype=False)


@pytest.mark.parametrize("reg", [1e-4, 0.0])
def test_with_the_true_linear_model_it_is_the_kalman_filter(reg):
    """Place and velocity of a linear model with Gaussian noise: estimates are near the exact ones,
    covariances too.
    """
    model = drift(pull=0.1)
    truth = simulate(as_samples(model), torch.zeros(4, 2, dtype=F64), 60, generator(3))
    exact = rollout(KalmanFilter(model), truth.obs)
    spread = KalmanFilter(model).covariance(exact.state)
    start = torch.randn(4000, 2, generator=generator(4), dtype=F64)
    filter = KernelMonteCarloFilter(
        as_samples(model), start, particles=800, draws=4, rank=60, reg=reg
    )
    run = rollout(filter, truth.obs, generator=generator(5))
    apart = (run.estimates - exact.estimates)[:, 10:].square().mean((0, 1))
    assert (apart < 0.1 * spread[0].diagonal()).all(), apart / spread[0].diagonal()
    excess = (run.estimates - truth.states)[:, 10:].square().mean() / (
        exact.estimates - truth.states
    )[:, 10:].square().mean() - 1
    assert excess < 0.1
    assert (run.diagnostics["negative"] >= 0).all()


def test_more_draws_and_particles_come_nearer():
    model = drift(pull=0.1)
    truth = simulate(as_samples(model), torch.zeros(4, 2, dtype=F64), 40, generator(3))
    exact = rollout(KalmanFilter(model), truth.obs).estimates
    start = torch.randn(4000, 2, generator=generator(4), dtype=F64)

    def apart(particles, draws, rank):
        filter = KernelMonteCarloFilter(
            as_samples(model), start, particles=particles, draws=draws, rank=rank, reg=1e-4
        )
        return (
            (rollout(filter, truth.obs, generator=generator(5)).estimates - exact)[:, 10:]
            .square()
            .mean()
            .item()
        )

    assert apart(600, 4, 50) < 0.5 * apart(40, 2, 20)


def test_an_observation_far_from_everything_says_nothing():
    model = as_samples(drift())
    filter = KernelMonteCarloFilter(
        model, torch.randn(50, 2, generator=generator()), particles=30, draws=2, rank=10
    )
    state = filter.predict(filter.init(2, generator=generator()), generator=generator(1))
    after = filter.update(state, torch.tensor([[1e4], [state.draws[1, 0, 0, 0].item()]]))
    torch.testing.assert_close(after.weights[0], torch.full((30,), 1 / 30))
    assert not torch.allclose(after.weights[1], after.weights[0])
    torch.testing.assert_close(after.weights.sum(1), torch.ones(2))


def hidden_velocity(n, seed):
    """Recordings of a place whose velocity is no part of the state: order 1 cannot know where it
    goes.
    """
    model = drift(pull=0.02, keep=0.95, push=0.1, noise=1.0)
    drawn = simulate(as_samples(model), torch.zeros(1, 2, dtype=F64), n, generator(seed))
    return Recording(drawn.states[0, :, :1], drawn.obs[0]), model


@pytest.mark.slow
def test_hidden_velocity_is_found_and_used():
    """Chosen on held-out stretches: order 2, whose error is near that of the Kalman filter that
    knows the model of both.
    """
    memory, model = hidden_velocity(900, 1)
    test, _ = hidden_velocity(1500, 4)  # over 300 steps the ratio is 1.05 to 1.32
    floor = (
        (rollout(KalmanFilter(model), test.obs[None]).estimates[0, 20:, :1] - test.states[20:])
        .square()
        .mean()
    )

    net = KernelMonteCarlo(density="gaussian", regs=(1e-4, 1e-3), inflations=(1.0, 2.0))
    net.prepare([memory])
    run = rollout(net.fit([memory]), test.obs[None].float(), generator=generator())
    assert int(net.order) == 2
    assert (run.estimates[0, 20:].double() - test.states[20:]).square().mean() < 1.25 * floor


def test_settings_have_the_least_error_on_the_last_fifth():
    """Of those that differ from the selected ones in the inflation, or in the restarts."""
    memory, _ = hidden_velocity(260, 1)
    net = KernelMonteCarlo(
        *(60, 2, 16),
        density="gaussian",
        inflations=(1.0, 4.0),
        regs=(1e-2, 0.0),
        restarts=(0.005, 0.5),
        tempers=(1.0, 0.5),
    )
    net.prepare([memory])
    fit, held = split([memory], HELD_OUT_SHARE)
    blocks, scale = held_out_blocks(held), fit[0].states.var(0)

    def error(inflation: float, restart: float) -> float:
        model = widened(learn_lagged_model(fit, order=order, density="gaussian"), inflation)
        filter = net.filter_of(model, fit, float(net.reg), restart, float(net.temper))
        return held_out(filter, blocks, scale, net.seed).error

    order, inflation, restart = int(net.order), float(net.inflation), float(net.restart)
    best = error(inflation, restart)
    assert best <= error(inflation, 0.505 - restart)
    assert best <= error(5 - inflation, restart)
    filter = net.fit([memory])
    assert (filter.reg, filter.particles) == (float(net.reg), 60)
    assert filter.initial.dtype == torch.float32 and len(filter.initial) == 261 - order


@pytest.mark.parametrize("name", ["orders", "inflations", "regs", "restarts", "tempers"])
def test_settings_are_selected_only_where_there_are_several(name, monkeypatch):
    memory, _ = hidden_velocity(120, 1)
    single: dict[str, Any] = {
        "orders": (2,),
        "inflations": (2.0,),
        "regs": (0.0,),
        "restarts": (0.005,),
        "tempers": (1.0,),
    }
    several = {"orders": (1, 2), "inflations": (1.0, 2.0), "regs": (1e-2, 0.0)}
    several |= {"restarts": (0.005, 0.1), "tempers": (1.0, 0.5)}
    scored: list[float] = []

    def scores(*_: Any) -> HeldOut:
        scored.append(float(len(scored)))
        return HeldOut(float(len(scored)), 0.0)

    monkeypatch.setattr("kbf.filters.kernel_monte_carlo.model.held_out", scores)
    KernelMonteCarlo(20, 2, 8, density="gaussian", **single).prepare([memory])
    assert not scored
    KernelMonteCarlo(20, 2, 8, density="gaussian", **single | {name: several[name]}).prepare(
        [memory]
    )
    assert len(scored) >= 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"particles": 0},
        {"draws": 0},
        {"rank": 0},
        {"reg": -1e-9},
        {"factor": 0.0},
        {"restart": -1e-9},
        {"restart": 1.0},
        {"temper": 0.0},
        {"temper": 1.001},
    ],
)
def test_numbers_of_a_filter_that_are_out_of_range(wrong):
    least: dict[str, Any] = {
        **{"particles": 1, "draws": 1, "rank": 1, "reg": 0.0},
        **{"factor": 1e-9, "restart": 0.0, "temper": 1.0},
    }
    start = torch.zeros(1, 2)
    filter = KernelMonteCarloFilter(as_samples(drift()), start, **least)
    assert (filter.particles, filter.draws) == (1, 1)
    with pytest.raises(ValueError, match="a kernel Monte Carlo filter needs 1 > 0 initial states"):
        KernelMonteCarloFilter(as_samples(drift()), start, **least | wrong)


def test_the_scores_of_held_out_blocks():
    """Mean of e^2 / s, and of e^2 / v + log v with v = C / s; the first steps do not count."""
    memory, _ = hidden_velocity(120, 1)
    net = KernelMonteCarlo(60, 2, 16, density="gaussian", orders=(1,))
    filter = net.fit([memory])
    scale = torch.tensor([4.0], dtype=F64)
    found = held_out(filter, [memory], scale, seed=3)
    run = rollout(filter, memory.obs[None].float(), covariances=True, generator=generator(3))
    assert run.covariances is not None
    e = (run.estimates[0, BURN_IN:].double() - memory.states[BURN_IN:]).square() / scale
    v = run.covariances[0, BURN_IN:, :, 0].double() / scale
    assert found.error == pytest.approx(float(e.mean()), rel=1e-4)
    assert found.log_score == pytest.approx(float((e / v + v.log()).mean()), rel=1e-4)


def test_what_the_first_observation_cannot_tell_is_not_lost():
    """Of z only its size is seen, and far from 0 it keeps its sign for long: both signs stay
    possible, however few particles.
    """
    states = torch.cat([torch.linspace(-5, -1, 900), torch.linspace(1, 5, 900)])[:, None]
    model = StateSpaceModel(
        f=lambda z: z,
        h=torch.abs,
        Q=torch.tensor([[1e-4]]),
        R=torch.tensor([[1e-4]]),
        m0=torch.zeros(1),
        P0=torch.eye(1),
    )
    for reg in (0.0, 1e-3):
        settings = {"particles": 20, "draws": 4, "rank": 10, "reg": reg}
        filter = KernelMonteCarloFilter(model, states, recorded=True, **settings)
        start = filter.predict(filter.init(30, generator=generator()), generator=generator(1))
        assert not start.initialized.any()
        state, possible = filter.observe(start, torch.full((30, 1), 3.0))
        assert state.initialized.all() and possible.all()
        torch.testing.assert_close(
            state.particles.abs(), torch.full((30, 20, 1), 3.0), rtol=0, atol=0.05
        )
        assert ((state.particles > 0).double().mean(1) - 0.5).abs().max() <= 0.1
        none = filter.observe(
            start._replace(initialized=(torch.arange(30) < 10).to(start.initialized)),
            torch.full((30, 1), 3.0),
        )[0]
        assert torch.equal(none.particles[:10], start.particles[:10]) and torch.equal(
            none.particles[10:], state.particles[10:]
        )
        impossible, suits = filter.observe(start, torch.full((30, 1), 1e30))
        assert reg or not (suits.any() or impossible.initialized.any())
        plain = KernelMonteCarloFilter(model, states, **settings)
        few = plain.update(
            plain.predict(plain.init(30, generator=generator()), generator=generator(1)),
            torch.full((30, 1), 3.0),
        )
        assert (few.particles.abs() - 3).abs().mean() > 0.5, (
            "of 20 particles that were drawn before it hardly one is near"
        )


def test_moves_of_a_lagged_model_are_those_of_the_recording():
    """The next place is where the last move leads, its velocity the difference; noise is as wide as
    it is told to be.
    """
    steps = torch.arange(60, dtype=F64)
    states = (
        torch.stack([torch.sin(0.3 * steps), torch.cos(0.2 * steps)], 1)
        * (1 + 0.01 * torch.sin(steps))[:, None]
    )
    memory = Recording(states, states + 0.1 * torch.randn(60, 2, generator=generator(), dtype=F64))
    model = learn_lagged_model(memory, order=2)
    s = torch.cat([states[20:40], states[20:40] - states[19:39]], -1)
    after = model.move(s.expand(200, 20, 4), generator(1))
    torch.testing.assert_close(after[..., :2].mean(0), states[21:41], rtol=0, atol=0.05)
    torch.testing.assert_close(after[..., 2:], after[..., :2] - states[20:40])
    wide = learn_lagged_model(memory, order=2, inflation=3.0).move(
        s[:1].expand(4000, 1, 4), generator(1)
    )[:, 0, :2]
    narrow = model.move(s[:1].expand(4000, 1, 4), generator(1))[:, 0, :2]
    ratio = ((wide.var(0) - narrow.var(0)) / model.change.noise.diagonal()).sqrt()
    torch.testing.assert_close(ratio, torch.full((2,), math.sqrt(8), dtype=F64), rtol=0.06, atol=0)


def test_bad_input_is_refused():
    for wrong in ({"density": "cauchy"}, {"dtype": "int8"}, {"orders": ()}):
        with pytest.raises(ValueError, match=r"density must be|dtype must be"):
            KernelMonteCarlo(**wrong)
    with pytest.raises(ValueError, match="order 1 or 2"):
        learn_lagged_model(hidden_velocity(30, 1)[0], order=3)
    with pytest.raises(ValueError, match="needs 0 > 0 initial states"):
        KernelMonteCarloFilter(as_samples(drift()), torch.zeros(0, 2))
    with pytest.raises(ValueError, match="needs a memory"):
        KernelMonteCarlo().fit(None)


def test_particles_that_begin_anew_follow_a_jump_as_a_fresh_start_does():
    """The state jumps far away.

    With particles that begin anew the estimates are soon near those of a filter that began there.
    """
    model = drift(pull=0.1)
    wide = 30 * torch.randn(4000, 2, generator=generator(1), dtype=F64)
    wide[:, 1] /= 30
    before = simulate(as_samples(model), torch.tensor([[-40.0, 0.0]], dtype=F64), 30, generator(2))
    after = simulate(as_samples(model), torch.tensor([[40.0, 0.0]], dtype=F64), 60, generator(3))
    later = torch.cat([before.obs, after.obs], 1)

    def run(restart, obs):
        filter = KernelMonteCarloFilter(
            as_samples(model), wide, particles=1000, reg=0.0, restart=restart
        )
        return rollout(filter, obs, generator=generator(4)).estimates[:, -25:]

    fresh, found = run(0.0, after.obs), run(0.05, later)
    truth = after.states[:, -25:]
    error = [(each - truth)[..., 0].square().mean() for each in (fresh, found)]
    assert (found - fresh)[..., 0].square().mean() < 0.3 * error[0]  # two draws of particles
    assert error[1] < 1.5 * error[0]  # a part of the particles is always spent on beginning anew


def test_a_tempered_density_is_that_of_a_wider_noise():
    """p(x | z)^temper of a Gaussian is, up to a constant, one of variance R / temper: the Kalman
    filter of that model.
    """
    model = drift(pull=0.1)
    truth = simulate(as_samples(model), torch.zeros(4, 2, dtype=F64), 60, generator(3))
    wider = KalmanFilter(model._replace(R=model.R / 0.25))
    exact = rollout(wider, truth.obs)
    start = torch.randn(4000, 2, generator=generator(4), dtype=F64)
    filter = KernelMonteCarloFilter(as_samples(model), start, particles=800, reg=0.0, temper=0.25)
    run = rollout(filter, truth.obs, generator=generator(5))
    apart = (run.estimates - exact.estimates)[:, 10:].square().mean((0, 1))
    assert (apart < 0.1 * wider.covariance(exact.state)[0].diagonal()).all()


@pytest.mark.slow
def test_errors_that_go_on_from_step_to_step_are_tempered():
    """The sensor's error is an autoregression: ten readings say little more than one, and held-out
    stretches show it.
    """
    g = generator(7)

    def walk(keep, push):
        steps = [torch.zeros(8, 1, dtype=F64)]
        for _ in range(249):
            steps.append(keep * steps[-1] + push * torch.randn(8, 1, generator=g, dtype=F64))
        return torch.stack(steps, 1)

    states, errors = walk(0.99, 0.1), walk(0.9, 0.44)
    recordings = [Recording(z, z + e) for z, e in zip(states, errors, strict=True)]
    net = KernelMonteCarlo(
        density="gaussian", regs=(0.0,), orders=(1,), inflations=(1.0,), restarts=(0.0,)
    )
    net.prepare(recordings[:5])
    assert net.hyperparameters()["temper"] < 1
    found = {}
    for temper in (float(net.temper), 1.0):
        net.temper.fill_(temper)
        scored = score(
            net.fit(recordings[:5]), recordings[5:], dtype=torch.float32, covariances=True
        )
        ratio_dim = [
            nll(s.states, m, C)
            for s, m, C in zip(
                recordings[5:], scored.estimates, scored.covariances or [], strict=True
            )
        ]
        found[temper] = float(scored.mse.mean()), torch.stack(ratio_dim).mean().item()
    best, plain = found.values()
    assert best[0] < 0.93 * plain[0]
    assert best[1] < plain[1] - 0.5


def test_particles_that_leave_the_region_begin_anew():
    """Moves that double the state run away; within the region they go on as they are."""
    model = Doubling()
    initial = torch.linspace(-1, 1, 21, dtype=torch.float64)[:, None]
    bounds = torch.tensor([-2.0], dtype=torch.float64), torch.tensor([2.0], dtype=torch.float64)
    free = KernelMonteCarloFilter(model, initial, particles=50, reg=0.0)
    kept = KernelMonteCarloFilter(model, initial, particles=50, reg=0.0, region=bounds)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    away, inside = (
        each.init(2, generator=g) for each, g in zip((free, kept), generators, strict=True)
    )
    for _ in range(20):
        away, inside = (
            free.predict(away, generator=generators[0]),
            kept.predict(inside, generator=generators[1]),
        )
        assert inside.particles.abs().max() <= 2
    assert away.particles.abs().max() > 100
    assert inside.particles.unique().numel() > 10


class Doubling:
    """z' = 2 z, x = z + 0.1 e."""

    def move(self, z, generator=None):
        return 2 * z

    def observe(self, z, generator=None):
        return z + 0.1 * torch.randn(z.shape, dtype=z.dtype, generator=generator)

    def log_likelihood(self, x, z):
        return -50 * (x - z).square().sum(-1)
