"""Intervals of forecasts contain what they state at every horizon, on new recordings."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.evaluation.calibration import Calibration, ForecastCalibration
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.particle.bootstrap import (
    MAX_BACKWARD_PARTICLES,
    BootstrapFilter,
    ParticleState,
)
from kbf.fitted import held_out_runs
from kbf.fitted.held_out_forecasts import (
    HORIZONS,
    MIN_STRIDE,
    HeldOutForecasts,
    Origins,
    forecasts,
    with_few_particles,
)
from kbf.fitted.held_out_runs import MIN_ORIGINS, run_through, watch_innovation
from kbf.recording import Recording
from kbf.ssm import rotation, simulate
from scripts.make_arm import arm


def cart(runs: int, seed: int) -> pd.DataFrame:
    """Runs of a damped cart on a spring that is pushed, with a sensor of its place alone."""
    rng, frames = np.random.default_rng(seed), []
    for run in range(runs):
        push = np.sign(np.sin(np.arange(100) / 7 + rng.uniform(0, 6)))
        z, now = np.zeros((100, 2)), rng.normal(size=2)
        for t in range(100):
            now = np.array([[0.98, 0.2], [-0.15, 0.93]]) @ now + [0, 0.2 * push[t]]
            z[t] = now = now + rng.normal(0, [0.02, 0.1])
        x = z[:, 0] + rng.normal(0, 0.3, 100)
        columns = {"run": f"run{run}", "p": z[:, 0], "v": z[:, 1], "x": x, "push": push}
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


SYSTEMS = {
    "arm": (lambda runs, seed: arm(runs, seed=seed), ["reach_mm", "torque_kNm"], ["s*"], None),
    "cart": (cart, ["p", "v"], ["x"], ["push"]),
}


@pytest.fixture(scope="module", params=SYSTEMS)
def system(request):
    make, states, observations, controls = SYSTEMS[request.param]
    fitted = kbf.fit(
        make(5, 0),
        states=states,
        observations=observations,
        controls=controls,
        recording="run",
        model="kalman",
        progress=False,
    )
    return fitted, make(8, 100)


def coverage(fitted: kbf.FittedFilter, data: pd.DataFrame, horizon: int) -> np.ndarray:
    """Share of the states in intervals of 95 %, and in the joint regions, at a horizon."""
    ahead, names = fitted.historical_forecasts(data, horizon, stride=3), fitted.columns["states"]
    low, high = ahead.interval(0.95)
    index = ahead.to_frame().index.to_frame(index=False)
    runs, z = data["run"].to_numpy(), data[names].to_numpy()
    at = np.flatnonzero((index.step == horizon) & (index.origin + horizon < len(z)))
    origin = index.origin.to_numpy()[at]
    at = at[runs[origin] == runs[origin + horizon]]
    aim = z[index.origin.to_numpy()[at] + horizon]
    inside = (low[at] <= aim) & (aim <= high[at])
    return np.array([*inside.mean(0), ahead.rows(at).contains(aim, 0.95).mean()])


@pytest.mark.parametrize("horizon", [1, 5, 20])
def test_intervals_of_forecasts_hold_what_they_state(horizon, system):
    fitted, new = system
    found = coverage(fitted, new, horizon)
    assert (found > 0.9).all() and found.mean() < 0.99


def test_forecasts_have_the_calibration_of_their_horizon(system, tmp_path):
    """Online as well, in a file, and as estimates if a file has none."""
    fitted, new = system
    some = new[new.run == "run0"]
    controls = None if "push" not in some else np.zeros((30, 1))
    ahead = fitted.forecast(some, 30, controls=controls)
    low, high = ahead.interval(0.9)
    factors = (high - low) / 2 / ahead.std
    assert fitted.trained.forecasts is not None
    for h in (1, 3, 20, 30):
        expected = fitted.trained.forecasts.at(h).column_quantile(0.9)
        np.testing.assert_allclose(factors[h - 1], expected)
    fitted.save(tmp_path / "filter.ckpt")
    again = kbf.load(tmp_path / "filter.ckpt")
    np.testing.assert_allclose(again.forecast(some, 30, controls=controls).interval(0.9)[1], high)
    stored = torch.load(tmp_path / "filter.ckpt", weights_only=True)
    del stored["kbf"]["forecasts"]
    torch.save(stored, tmp_path / "old.ckpt")
    old = kbf.load(tmp_path / "old.ckpt")
    found = old.forecast(some, 30, controls=controls)
    np.testing.assert_allclose(found.mean, ahead.mean, rtol=1e-12)
    calibration = fitted.trained.calibration
    assert calibration is not None
    expected = calibration.column_quantile(0.9)
    np.testing.assert_allclose((found.interval(0.9)[1] - found.mean)[7] / found.std[7], expected)


def test_calibrations_between_two_horizons():
    """The geometric mean of two horizons has the mean of their calibrations."""

    def one(scale: float) -> Calibration:
        ramp = torch.linspace(0, scale, 50, dtype=torch.float64)
        return Calibration(ramp[-1], ramp[-2:], ramp, torch.tensor(50), ramp[:, None])

    stack = ForecastCalibration.stack({1: one(1.0), 4: one(3.0), 20: one(9.0)})
    assert float(stack.at(2).scale) == pytest.approx(2.0)
    assert float(stack.at(1).scale) == 1 and float(stack.at(4).scale) == 3
    assert float(stack.at(100).scale) == 9
    expected = (one(1.0).column_quantile(0.8), one(3.0).column_quantile(0.8))
    middle = stack.at(2).column_quantile(0.8)
    assert middle is not None and expected[0] is not None and expected[1] is not None
    torch.testing.assert_close(middle, (expected[0] + expected[1]) / 2)


def test_forecasts_of_held_out_steps_are_those_of_predict_ahead(system):
    """Of two recordings of different lengths, with controls; NaN states beyond their ends."""
    fitted, new = system
    filter, names = fitted.trained.filter, fitted.columns
    recordings = []
    for k, (_, frame) in enumerate(list(new.groupby("run"))[:2]):
        part = frame.iloc[: 30 + 9 * k]
        sides = [torch.tensor(part[c].to_numpy()) for c in list(names.values()) if c]
        recordings.append(Recording(*sides[:2], controls=sides[2] if len(sides) > 2 else None))
    origins = Origins(watch_innovation, recordings)
    assert origins.stride == MIN_STRIDE
    origins.stride = 1
    kbf.evaluation.score.score(filter, recordings, watch=origins)
    found = forecasts(filter, recordings, origins)
    assert found is not None
    assert found.means.shape[:2] == (len(HORIZONS), 2 * 38)
    for k, each in enumerate(recordings):
        acted = None if each.controls is None else each.controls[None]
        ahead = kbf.predict_ahead(filter, each.obs[None], 20, controls=acted)[0]
        for row, h in enumerate(HORIZONS):
            mine, steps = found.means[row, k::2], len(each.states)
            known = found.states[row, k::2].isfinite().all(1)
            assert int(known.sum()) == steps - h
            torch.testing.assert_close(mine[known], ahead[h - 1, : steps - h])
            torch.testing.assert_close(found.states[row, k::2][known], each.states[h:])


def test_forecasts_of_particle_filters_are_those_of_some_particles():
    """Weights stay normalised, and mean and covariance are those of all, up to chance."""
    generator = torch.Generator().manual_seed(0)
    model, start = rotation(), torch.zeros(2, dtype=torch.float64)
    recording = simulate(model, start, 40, generator)
    filter = BootstrapFilter(model, recording.states, 20 * MAX_BACKWARD_PARTICLES)
    whole: list[ParticleState] = []

    def watch(filter, predicted, obs, **others):
        whole.append(predicted)
        return watch_innovation(filter, predicted, obs, **others)

    origins = Origins(watch, [recording])
    kbf.evaluation.score.score(filter, [recording], watch=origins)
    for step, few in origins.groups[0]:
        assert few.particles.shape[1] == MAX_BACKWARD_PARTICLES
        torch.testing.assert_close(few.log_weights.exp().sum(), torch.tensor(1.0).double())
        moved = filter.predict(few, generator=generator)
        torch.testing.assert_close(moved.log_weights.exp().sum(), torch.tensor(1.0).double())
        C = filter.covariance(whole[step])[0]
        error = filter.estimate(few) - filter.estimate(whole[step])
        assert (error[0].abs() < 5 * (C.diagonal() / MAX_BACKWARD_PARTICLES).sqrt()).all()
        torch.testing.assert_close(
            filter.covariance(few)[0], C, rtol=0.4, atol=0.2 * float(C.max())
        )


def test_particles_of_a_member_of_an_average_are_thinned():
    """Its other leaves stay as they are."""
    generator = torch.Generator().manual_seed(0)
    model, start = rotation(), torch.zeros(2, dtype=torch.float64)
    states = simulate(model, start, 40, generator).states
    particles = BootstrapFilter(model, states, 4 * MAX_BACKWARD_PARTICLES)
    weights = torch.full((2, 2), 0.5, dtype=torch.float64)
    kalman = LearnedKalman().fit(Recording(states, states))
    average = EnsembleFilter(
        {"kalman": kalman, "particles": particles}, weights, torch.zeros(2, 2, 2).double()
    )
    state = average.init(3, generator=generator)
    few = with_few_particles(state, 0)
    own, thin = (average.parts(each) for each in (state, few))
    assert thin[1].particles.shape == (3, MAX_BACKWARD_PARTICLES, 2)
    assert all(torch.equal(a, b) for a, b in zip(own[0], thin[0], strict=True))
    gap = (average.estimate(few) - average.estimate(state)).abs()
    assert 0 < gap.max() < 5 / MAX_BACKWARD_PARTICLES**0.5


def test_forecasts_of_slow_filters_are_fewer_within_a_budget(monkeypatch):
    recording = simulate(
        rotation(), torch.zeros(2, dtype=torch.float64), 900, torch.Generator().manual_seed(1)
    )
    filter = LearnedKalman().fit(recording)
    ahead: dict[tuple[float, float], list[HeldOutForecasts | None]] = {}
    for until, seconds in ((math.inf, 1.0), (0.0, 10.0), (0.0, 0.0)):
        monkeypatch.setattr(held_out_runs, "SECONDS_OF_FORECASTS", seconds)
        found = ahead[until, seconds] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run_through([(filter, [recording])] * 3, ahead=found, until=until)
        assert len(found) == 3
    assert all(each and each.means.shape[1] >= 90 for each in ahead[math.inf, 1.0])
    # Some seconds are enough for many forecasts of a linear filter; none are made without time.
    assert all(each and each.means.shape[1] >= MIN_ORIGINS for each in ahead[0.0, 10.0])
    assert ahead[0.0, 0.0] == [None] * 3


@pytest.mark.parametrize(("of_a_forecast", "most"), [(0.05, [45, 20, 20]), (0.2, [45])])
def test_forecasts_are_timed_by_those_of_the_filter_before(of_a_forecast, most, monkeypatch):
    """900 steps in one second: a forecast of 20 steps is expected to take 1/45 of a second."""
    recording = simulate(
        rotation(), torch.zeros(2, dtype=torch.float64), 900, torch.Generator().manual_seed(1)
    )
    filter, now, asked = LearnedKalman().fit(recording), [0.0], []
    score, forecasts = held_out_runs.score, held_out_runs.forecasts

    def timed_score(*args: Any, **how: Any) -> Any:
        now[0] += 1.0
        return score(*args, **how)

    def timed_forecasts(*args: Any, most: float, **how: Any) -> Any:
        asked.append(round(most))
        made = forecasts(*args, most=most, **how)
        now[0] += of_a_forecast * made.states.shape[1]
        return made

    monkeypatch.setattr(held_out_runs, "score", timed_score)
    monkeypatch.setattr(held_out_runs, "forecasts", timed_forecasts)
    monkeypatch.setattr(held_out_runs.time, "perf_counter", lambda: now[0])
    ahead: list[HeldOutForecasts | None] = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_through([(filter, [recording])] * 3, ahead=ahead, until=0.0)
    told = sum("intervals of forecasts" in str(each.message) for each in seen)
    assert told == (len(most) < 3)
    assert asked == most
    assert [each is not None for each in ahead] == [k < len(most) for k in range(3)]
