"""The UKF on learned maps: maps in closed form, the first update, choices, and the true model."""

import math
import time
from functools import partial
from typing import Any

import pytest
import torch

from kbf.data.benchmark_systems import SystemRecordings, discrete_lorenz
from kbf.filters.gaussian import learned_ukf
from kbf.filters.gaussian.block_scores import Scored, held_out_parts
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.gaussian.learned_maps import (
    MAX_POINTS_OF_LANDMARKS,
    fit_map,
    kernel_of,
    kernels_of_maps,
    row_of,
    select_kernel,
)
from kbf.filters.gaussian.learned_ukf import KINDS, LearnedUKF
from kbf.filters.gaussian.map_pairs import MAX_PAIRS, Pairs, SensorPairs, pairs_of
from kbf.filters.gaussian.moments import GaussianState
from kbf.filters.gaussian.regimes import STRUCTURES
from kbf.filters.gaussian.start import StartingFilter, tempering
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.rollout import rollout, rollout_recordings
from kbf.recording import Recording
from kbf.rkhs.kernels import arcsine, gaussian
from kbf.rkhs.linalg import evenly
from kbf.runtime.deadline import deadline
from kbf.runtime.errors import FitError
from kbf.ssm import StateSpaceModel, oscillatory, simulate


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def turning(n: int, seed: int = 0, **changes: Any) -> list[Recording]:
    model = oscillatory(**{"sigma_z": 0.1, "sigma_x": 0.3, **changes})
    drawn = simulate(model, model.m0, n, generator(seed))
    return [Recording(drawn.states, drawn.obs)]


def linear_with_control(n: int, seed: int = 0) -> list[Recording]:
    """z' = A z + B u + noise, three sensors."""
    A, B = torch.tensor([[0.9, 0.2], [-0.2, 0.8]]).double(), torch.tensor([[0.5], [-0.3]]).double()
    C, u, e, r = (
        normal(3, 2, seed=9),
        normal(n, 1, seed=seed),
        normal(n, 2, seed=50 + seed),
        normal(n, 3, seed=90 + seed),
    )
    z, rows = torch.zeros(2).double(), []
    for t in range(n):
        z = A @ z + B @ u[t] + 0.2 * e[t]
        rows.append(z)
    states = torch.stack(rows)
    return [Recording(states, states @ C.mT + 0.5 * r, None, u)]


# maps


def test_a_kernel_map_is_kernel_ridge_regression_of_the_residuals():
    """With every point a landmark: (K + n reg I)^-1, the same ridge."""
    u, y = normal(40, 2), normal(40, 2, seed=1)
    kernel = partial(gaussian, bandwidth=0.5)
    for kind in ("kernel", "both"):
        map = fit_map(kind, u, y, kernel=kernel, ranks=(40,))
        assert map.ridge is not None
        X = torch.cat([u, torch.ones(40, 1)], 1)
        solved = torch.linalg.lstsq(X, y).solution * (kind == "both")
        left = y - X @ solved
        K = kernel(u, u) + map.ridge.ridge * torch.eye(40)
        alpha = torch.linalg.solve(K, left - left.mean(0))
        at = normal(7, 2, seed=2)
        linear = torch.cat([at, torch.ones(7, 1)], 1) @ solved
        expected = linear + left.mean(0) + kernel(at, u) @ alpha
        assert torch.allclose(map(at), expected, atol=1e-5)


def test_a_linear_map_is_least_squares_and_continues_far_away():
    B = torch.tensor([[1.0, -2.0]]).double()
    u = normal(60, 2)
    y = u @ B.mT + 0.3
    map = fit_map("linear", u, y)
    far = torch.tensor([[100.0, -50.0]]).double()
    assert map(far).item() == pytest.approx(200.3, abs=1e-6)
    assert float(map.noise) < 1e-20
    assert map(far.float()).dtype == torch.float32


def test_larger_ranks_are_taken_where_they_are_better():
    u = 6 * torch.rand(600, 2, generator=generator(), dtype=torch.float64)
    y = (3 * u[:, :1]).sin() * (3 * u[:, 1:]).cos() + 0.01 * normal(600, 1)
    kernel = partial(gaussian, bandwidth=0.4)
    small, large = (fit_map("kernel", u, y, kernel=kernel, ranks=r) for r in ((20,), (20, 150)))
    assert small.ridge is not None
    assert large.ridge is not None
    assert (len(small.ridge.landmarks), len(large.ridge.landmarks)) == (20, 150)
    assert float(large.noise) < 0.2 * float(small.noise)
    straight = fit_map(
        "kernel", u, u[:, :1], kernel=partial(gaussian, bandwidth=60.0), ranks=(5, 9)
    )
    assert straight.ridge is not None
    assert len(straight.ridge.landmarks) <= 9


@pytest.mark.parametrize(
    "kernel", [partial(gaussian, bandwidth=0.7), partial(arcsine, bias=0.3, slope=2.0)]
)
def test_kernels_survive_as_numbers(kernel):
    x = normal(5, 2)
    assert torch.equal(kernel_of(row_of(kernel))(x, x), kernel(x, x))


def test_unknown_kernel_numbers_are_refused():
    with pytest.raises(ValueError, match="kernel 0 to 1, got 7"):
        kernel_of(torch.tensor([7.0, 1.0, 1.0]).double())


def test_the_kernel_has_the_scale_of_the_function():
    u = 10 * torch.rand(300, 1, generator=generator(), dtype=torch.float64)
    kernels: list[Any] = [
        select_kernel(u, (w * u).sin() + 0.05 * normal(300, 1)) for w in (6.0, 0.5)
    ]
    rough, smooth = (row_of(kernel)[1] for kernel in kernels)
    assert {int(row_of(kernel)[0]) for kernel in kernels} == {0}
    assert rough < smooth


def test_only_the_kernel_of_the_moves_is_selected_precisely():
    """Without noise a precise map of the sine has a kernel that is eight times as wide."""
    u = 4 * torch.rand(200, 1, generator=generator(), dtype=torch.float64)
    sensor = SensorPairs(torch.tensor([0]), 0, False, u, u.sin())
    found = kernels_of_maps(Pairs(u, u.sin(), [sensor], None), 1, ["kernel"], 96)
    precise, coarse = (row_of(select_kernel(u, u.sin(), 96, precise=p)) for p in (True, False))
    torch.testing.assert_close(found[:, 0], torch.stack([precise, coarse]))
    assert precise[1] > 4 * coarse[1]


# the first update


def bimodal(sigma: float = 0.2) -> StartingFilter:
    """x = z^2 over recorded states between -2 and 2."""
    one = torch.eye(1, dtype=torch.float64)
    model = StateSpaceModel(
        lambda z: z, lambda z: z.square(), 0.01 * one, sigma**2 * one, 0 * one[0], one
    )
    states = torch.linspace(-2, 2, 401, dtype=torch.float64)[:, None]
    return StartingFilter(UnscentedKalmanFilter(model), states)


def test_the_first_update_is_that_of_the_recorded_states():
    """On a linear sensor and a wide sample it is Bayes' rule; afterwards the inner filter's."""
    one = torch.eye(1, dtype=torch.float64)
    model = StateSpaceModel(lambda z: 0.9 * z, lambda z: z, 0.1 * one, 0.25 * one, 0 * one[0], one)
    states = torch.distributions.Normal(0.0, 1.0).icdf(
        torch.linspace(0.0005, 0.9995, 2000).double()
    )
    filter = StartingFilter(UnscentedKalmanFilter(model), states[:, None])
    x = torch.tensor([[0.8]]).double()
    state = filter.init(1)
    updated, possible = filter.observe(state, x)
    assert possible.all()
    assert updated.mean.item() == pytest.approx(0.8 / 1.25, abs=0.02)
    assert updated.cov.item() == pytest.approx(0.25 / 1.25, rel=0.05)
    assert (state.waiting.item(), updated.waiting.item()) == (1, 0)
    again, _ = filter.observe(updated, x)
    exact, _ = filter.inner.observe(GaussianState(updated.mean, updated.cov), x)
    assert torch.equal(again.mean, exact.mean)
    expected = torch.distributions.Normal(0.0, math.sqrt(1.25)).log_prob(x).item()
    assert filter.log_likelihood(state, x).item() == pytest.approx(expected, abs=0.02)


def test_the_first_update_of_a_square_covers_both_roots():
    state, _ = bimodal().observe(bimodal().init(1), torch.tensor([[2.25]]).double())
    assert abs(state.mean.item()) < 0.1
    assert math.sqrt(state.cov.item()) == pytest.approx(1.5, rel=0.1)


def starting_at_one(k: int) -> StartingFilter:
    """States around 0; k recordings that start at 1.5 +- 0.1."""
    one = torch.eye(1, dtype=torch.float64)
    model = StateSpaceModel(lambda z: 0.9 * z, lambda z: z, 0.1 * one, one, 0 * one[0], one)
    first = 1.5 + 0.1 * normal(k, 1)
    return StartingFilter(UnscentedKalmanFilter(model), normal(3000, 1, seed=1), first=first)


def test_first_states_of_many_recordings_have_half_of_the_probability():
    """Bayes' rule for the mixture of N(1.5, 0.1^2) and N(0, 1), by integration."""
    x = torch.tensor([[1.2]]).double()
    filter = starting_at_one(400)
    state, _ = filter.observe(filter.init(1), x)
    grid = torch.linspace(-6, 6, 20001).double()
    law = torch.distributions.Normal
    prior = 0.5 * law(1.5, 0.1).log_prob(grid).exp() + 0.5 * law(0.0, 1.0).log_prob(grid).exp()
    joint = prior * law(grid, 1.0).log_prob(x[0]).exp()
    expected = float((grid * joint).sum() / joint.sum())
    assert state.mean.item() == pytest.approx(expected, abs=0.05)
    evidence = math.log(float(joint.sum()) * 12 / 20000)
    assert filter.log_likelihood(filter.init(1), x).item() == pytest.approx(evidence, abs=0.05)


def test_first_states_without_a_past_have_a_covariance():
    """States joined with former ones are singular where all recordings begin."""
    eye = torch.eye(3, dtype=torch.float64)
    model = StateSpaceModel(lambda z: z, lambda z: z[..., :1], eye, eye[:1, :1], 0 * eye[0], eye)
    first = (5 + 1e-2 * normal(30, 1)).expand(-1, 3)
    filter = StartingFilter(UnscentedKalmanFilter(model), normal(200, 3), d=1, first=first)
    state, _ = filter.observe(filter.init(1), torch.tensor([[5.0]]).double())
    assert filter.estimate(state).item() == pytest.approx(5.0, abs=0.1)


def test_first_states_of_few_recordings_are_states_as_all_others():
    filter = starting_at_one(5)
    state, _ = filter.observe(filter.init(1), torch.tensor([[1.2]]).double())
    assert len(filter.states) == 3000
    assert state.mean.item() == pytest.approx(0.6, abs=0.05)


def test_a_row_without_readings_leaves_the_state_waiting():
    filter = bimodal()
    filter.inner.allow_missing_sensors = filter.allow_missing_sensors = True
    state, _ = filter.observe(filter.init(1), torch.full((1, 1), torch.nan).double())
    assert state.waiting.item() == 1


def test_tempering_reaches_the_effective_number():
    logs = -torch.linspace(0, 3, 200).double().square() * torch.tensor([[1.0], [900.0]])
    power = tempering(logs, 50.0, torch.zeros(logs.shape[1], dtype=torch.float64))
    w = (power[:, None] * logs).softmax(-1)
    effective = 1 / w.square().sum(-1)
    assert power[0] == 1
    assert effective[0] > 50
    assert effective[1] == pytest.approx(50, rel=1e-3)


# the filter


def test_maps_without_error_make_it_the_ukf_of_the_true_model():
    """From many rows: estimates close to those of the filter that is given f and h."""
    true = oscillatory(beta=0.0, sigma_z=0.1, sigma_x=0.3)
    train, test = turning(600, beta=0.0), turning(200, seed=1, beta=0.0)
    learned = LearnedUKF(ranks=(60,), kinds=("kernel",))
    learned.prepare(train)
    filter = learned.fit(train)
    exact = UnscentedKalmanFilter(true)
    runs = [rollout_recordings(each, test)[0].estimates for each in (filter, exact)]
    errors = [(run - test[0].states)[10:].square().sum(-1).mean() for run in runs]
    assert errors[0] < 1.1 * errors[1]
    assert (runs[0] - runs[1])[10:].square().sum(-1).mean() < 0.15 * errors[1]


def test_linear_maps_make_it_the_learned_kalman_filter():
    train, test = linear_with_control(400), linear_with_control(100, seed=3)
    learned, controls = LearnedUKF(kinds=("linear",), factors=(1.0,)), test[0].controls
    assert controls is not None
    learned.prepare(train)
    runs = [
        rollout(each.fit(train), test[0].obs[None], controls=controls[None])
        for each in (learned, LearnedKalman())
    ]
    assert torch.allclose(runs[0].estimates[:, 30:], runs[1].estimates[:, 30:], atol=1e-6)


def test_sensors_without_noise_give_the_state():
    """The covariance of an innovation would be 0 where the state is known exactly."""
    train, test = (
        [each._replace(obs=each.states @ normal(2, 2, seed=9)) for each in linear_with_control(*at)]
        for at in ((200,), (50, 3))
    )
    learned, controls = LearnedUKF(kinds=("linear",), factors=(1.0,)), test[0].controls
    assert controls is not None
    learned.prepare(train)
    run = rollout(learned.fit(train), test[0].obs[None], controls=controls[None])
    torch.testing.assert_close(run.estimates[0], test[0].states, atol=1e-4, rtol=0)


def test_linear_data_get_linear_maps_and_curved_data_do_not():
    linear, curved = (LearnedUKF(ranks=(20,), factors=(1.0, 16.0)) for _ in range(2))
    linear.prepare([r._replace(controls=None) for r in linear_with_control(200)])
    curved.prepare(turning(200))
    named = curved.hyperparameters()
    assert named["transition_kind"] > 0
    assert set(named) == {
        *("transition_kind", "observation_kind", "transition_factor", "observation_factor")
    }
    assert linear.hyperparameters()["observation_factor"] <= 4


def test_the_factor_of_q_grows_where_residuals_understate_the_error():
    """Smooth motion: errors of a map are serially correlated there."""
    t = torch.arange(400, dtype=torch.float64)
    z = torch.stack([(0.05 * t).sin(), (0.083 * t).cos()], 1)
    recording = Recording(z, z[:, :1] + 0.1 * normal(400, 1))
    learned = LearnedUKF(ranks=(40,), kinds=("kernel",))
    learned.prepare([recording])
    assert learned.hyperparameters()["transition_factor"] > 1


def test_missing_sensors_have_maps_of_their_own():
    train, test = turning(300), turning(120, seed=2)
    gaps = torch.rand(300, 2, generator=generator(), dtype=torch.float64) < 0.3
    some = [train[0]._replace(obs=train[0].obs.masked_fill(gaps, torch.nan))]
    learned = LearnedUKF(ranks=(40,), kinds=("kernel",), factors=(1.0, 4.0))
    learned.allow_missing_sensors = True
    learned.prepare(some)
    filter = learned.fit(some)
    whole = rollout_recordings(filter, test)[0].estimates
    holes = torch.rand(120, 2, generator=generator(7), dtype=torch.float64) < 0.3
    part = rollout_recordings(
        filter, [test[0]._replace(obs=test[0].obs.masked_fill(holes, torch.nan))]
    )[0].estimates
    errors = [(run - test[0].states).square().sum(-1).mean() for run in (whole, part)]
    assert errors[0] < errors[1] < 0.3
    useless = [train[0]._replace(obs=train[0].obs * torch.nan)]
    with pytest.raises(FitError, match="of 2 observations none has 10 readings"):
        learned.fit(useless)


def test_large_data_are_selected_by_the_last_steps(monkeypatch):
    """Within a deadline there are fewer of them, but a least number."""
    data = turning(450)
    last = data[0]._replace(states=data[0].states[-150:], obs=data[0].obs[-150:])

    def selected(recording: Recording) -> dict[str, torch.Tensor]:
        net = LearnedUKF(ranks=(24,), factors=(1.0, 4.0))
        net.prepare([recording])
        return net.state_dict()

    expected = selected(last)
    for most, least, rate, seconds in ((150, 1, 1, math.inf), (450, 1, 1, 150), (450, 150, 1, 99)):
        monkeypatch.setattr(learned_ukf, "MAX_STEPS_OF_SELECTION", most)
        monkeypatch.setattr(learned_ukf, "MIN_STEPS_OF_SELECTION", least)
        monkeypatch.setattr(learned_ukf, "STEPS_PER_SECOND", rate)
        with deadline(time.perf_counter() + seconds + 0.5):
            found = selected(data[0])
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_short_recordings_keep_the_first_candidates():
    learned = LearnedUKF()
    learned.prepare(turning(24))
    assert learned.factors.tolist() == [1, 1]
    assert held_out_parts(turning(24)) == []
    assert len(held_out_parts(turning(300))) == 3
    [(rest, held)] = held_out_parts(long := turning(3200))
    assert torch.equal(held[-1].states[-1], long[0].states[-1]), "the last part"
    assert torch.equal(rest[0].states[0], long[0].states[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": ()}, "must be positive and not empty"),
        ({"factors": (0.0,)}, "must be positive and not empty"),
        ({"kinds": ("cubic",)}, "kinds must be some of sparse, linear, kernel"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LearnedUKF(**settings)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("kinds", [0, 7], r"kinds of maps \[0, 7\]"), ("factors", [0.0, 1.0], "must be positive")],
)
def test_stored_settings_that_no_model_has_are_refused(name, value, message):
    learned = LearnedUKF()
    stored = {**learned.state_dict(), name: torch.tensor(value).to(getattr(learned, name))}
    with pytest.raises(ValueError, match=message):
        learned.load_state_dict(stored)


def test_precise_maps_represent_a_smooth_flow():
    """The change of the Lorenz equations from 2,000 noisy pairs: the error is a fifth of that of
    the usual settings, and below the noise of the pairs by 10 dB.
    """
    system = discrete_lorenz(30)
    drawn = SystemRecordings(system, 20, 10, 0, seed=1000)
    scale = torch.cat([each.states for each in drawn.train]).std(0)
    u = torch.cat([each.states[:-1] for each in drawn.train]) / scale
    y = torch.cat([each.states[1:] - each.states[:-1] for each in drawn.train]) / scale
    z = torch.cat([each.states[::3] for each in drawn.test])
    errors = []
    for precise in (False, True):
        map = fit_map("both", u, y, precise=precise)
        left = z + map(z / scale) * scale - system.f(z)
        errors.append(float(left.square().mean()))
    assert errors[1] < errors[0] / 5
    assert errors[1] < 0.1 * float(system.Q[0, 0])


def test_a_sensor_that_is_nearly_always_0_is_no_obstacle():
    """A neuron that fires three times; one that never does."""
    train = turning(1500)[0]
    rare = torch.zeros(1500, 2, dtype=torch.float64)
    rare[[100, 101, 700], 0] = 1.0
    obs = torch.cat([train.obs, rare], 1)
    model = LearnedUKF(ranks=(48,), factors=(1.0,))
    model.prepare([train._replace(obs=obs)])
    run = rollout(model.fit([train._replace(obs=obs)]), obs[None])
    assert float((run.estimates[0] - train.states).square().mean()) < 0.1


def test_several_regimes_are_compared_second_with_the_kinds_of_the_best_filter_first(monkeypatch):
    errors, asked = iter([1.0, 0.5, *[2.0] * 6]), []

    def raced(pairs, run, parts, best=None, until=0.0):
        asked.append(pairs)
        first = [(1, 1)] if best is None else pairs[:1]
        return {pair: Scored([], torch.tensor([[next(errors)]])) for pair in first}

    monkeypatch.setattr(learned_ukf, "raced", raced)
    model = LearnedUKF()
    z = torch.arange(50, dtype=torch.float64)[:, None].sin()
    model.select_kinds([([], [Recording(z, z)])], (0, 1), float("inf"))
    assert asked[1][0] == (1, 1), "the kinds of the first comparison"
    assert {reading for _, reading in asked[1]} == {1}, "only the change map is of another kind"
    assert len({move for move, _ in asked[1]}) > 1
    assert model.regimes.tolist() == [0, 1] and model.kinds.tolist() == [1, 1]


def test_kinds_that_are_slow_are_left_out_when_time_is_short():
    """One pair is compared in any case; a comparison that was cut short does not decide."""
    memory = turning(300)
    net = LearnedUKF(ranks=(20,), factors=(1.0,))
    net.prepare(memory)
    parts = held_out_parts(memory)
    filters = net.select_kinds(parts, STRUCTURES[0], -torch.inf)
    assert len(filters) == 1
    assert [KINDS[k] for k in net.kinds.tolist()] == ["linear", "linear"]
    one, three = Scored(filters, torch.zeros(1, 2)), Scored(filters * 3, torch.ones(3, 2))
    assert not one.better_than(three)
    assert three._replace(errors=-three.errors).better_than(three)


def test_a_map_of_many_recordings_has_landmarks_at_all_of_their_steps():
    """1,000 recordings of 100 steps: with evenly spaced pairs it had those of 42 steps only."""
    step = torch.arange(100.0, dtype=torch.float64)[:, None]
    memory = [Recording(step, step + 0.1 * normal(100, 1, seed=k)) for k in range(1000)]
    none = torch.zeros(1, dtype=torch.long)
    inputs = pairs_of(memory, none, none.bool()).inputs[:, 0]
    assert len(inputs) == MAX_PAIRS and len(inputs.unique()) == 99
    among = inputs[evenly(len(inputs), MAX_POINTS_OF_LANDMARKS)]
    assert len(among.unique()) == 99
