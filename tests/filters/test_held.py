"""Held and sticking sensors: which are found, and the filter without their repeats."""

import pytest
import torch

from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.held import (
    HeldFilter,
    HeldReadings,
    held_by,
    held_sensors,
    reading_periods,
    without_repeats,
)
from kbf.filters.rollout import rollout
from kbf.filters.smoothing import smooth
from kbf.recording import Recording


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def walk(n: int, seed: int = 0, period: int = 4) -> Recording:
    """A random walk that returns to 0, and two sensors; the second is read every 4th step."""
    z, rows = torch.zeros(1).double(), []
    for e in normal(n, 1, seed=seed):
        z = 0.95 * z + 0.3 * e
        rows.append(z)
    states = torch.stack(rows)
    obs = states + 0.5 * normal(n, 2, seed=seed + 100)
    slow = obs[torch.arange(n) // period * period, 1]
    return Recording(states, torch.stack([obs[:, 0], slow], 1))


def test_a_slow_sensor_is_found():
    assert held_sensors([walk(200)]).tolist() == [False, True]


def test_repeats_by_chance_are_no_held_readings():
    """Counts and rounded readings have few values, a sensor at the end of its range one."""
    x = normal(400, 3)
    counts, rounded, clipped = (x[:, 0].exp().round(), (4 * x[:, 1]).round() / 4, x[:, 2])
    obs = torch.stack([counts, rounded, clipped.clamp_max(0.3)], 1)
    assert held_sensors([Recording(x, obs)]).tolist() == [False] * 3


def test_the_first_reading_of_a_recording_is_no_repeat():
    x = torch.arange(10.0)[:, None]
    recordings = [Recording(x, x), Recording(x.flip(0), x.flip(0))]
    assert without_repeats(recordings[1], torch.tensor([True])).obs.isfinite().all()
    assert held_sensors(recordings).tolist() == [False]


def test_a_recording_of_one_step_keeps_it():
    one = Recording(torch.ones(1, 2).double(), torch.ones(1, 3).double())
    for held in (torch.tensor([True, False, True]), torch.tensor([0, 1, 3])):
        assert torch.equal(without_repeats(one, held).obs, one.obs)


def fitted() -> tuple[HeldFilter, Recording]:
    filter = HeldReadings(LearnedKalman(), torch.tensor([False, True])).fit([walk(300)])
    return filter, walk(60, seed=1)


def test_the_filter_is_that_of_missing_readings():
    filter, new = fitted()
    fresh = without_repeats(new, filter.held)
    assert int(fresh.obs.isnan().sum()) == 45
    run = rollout(filter, new.obs[None], covariances=True, log_likelihood=True)
    truth = rollout(filter.inner, fresh.obs[None], covariances=True, log_likelihood=True)
    for name in ("estimates", "covariances", "log_likelihood"):
        assert torch.equal(getattr(run, name), getattr(truth, name))


@pytest.mark.parametrize("held", [[0, 1], [1, 4]])
def test_training_and_filter_agree_on_repeats_after_gaps(held):
    """A value that is the last reading before a gap is a repeat after it, too."""
    new, gaps = (
        walk(60, seed=1),
        torch.rand(60, 2, generator=torch.Generator().manual_seed(3)) < 0.3,
    )
    obs = torch.where(gaps, torch.nan, new.obs)
    mask = torch.ones(60, dtype=torch.bool)
    mask[20:23] = False
    filter = HeldReadings(LearnedKalman(), torch.tensor(held)).fit([walk(300)])
    fresh = without_repeats(
        Recording(new.states, torch.where(mask[:, None], obs, 0), mask), filter.held
    )
    state, rows = filter.init(1), []
    for x, seen in zip(obs, mask, strict=True):
        state = filter.predict(state)
        rows.append(filter.fresh(state, x[None])[0])
        state = filter.update(state, x[None]) if seen else state
    assert torch.equal(torch.stack(rows)[mask].isnan(), fresh.obs[mask].isnan())
    assert int((fresh.obs[mask].isnan() & obs[mask].isfinite()).sum()) > 10


def test_a_constant_sensor_is_not_held():
    recording = walk(60)
    recording.obs[:, 1] = 2.5
    assert held_sensors([recording]).tolist() == [False, False]


def test_the_model_itself_requires_all_sensors_as_before():
    model = LearnedKalman()
    HeldReadings(model, torch.tensor([False, True])).fit([walk(300)])
    assert not model.allow_missing_sensors


def test_so_is_the_smoother():
    filter, new = fitted()
    fresh = without_repeats(new, filter.held)
    assert torch.allclose(
        smooth(filter, new.obs[None]).estimates, smooth(filter.inner, fresh.obs[None]).estimates
    )


def test_repeats_cost_accuracy_if_they_are_taken_as_readings():
    train, test = [walk(300)], walk(2000, seed=1)
    raw = LearnedKalman().fit(train)
    filter, _ = fitted()
    errors = [
        (rollout(each, test.obs[None]).estimates[0] - test.states).square().mean().item()
        for each in (filter, raw)
    ]
    assert errors[0] < 0.97 * errors[1]


def test_a_row_of_repeats_is_no_rejected_observation():
    filter = HeldReadings(LearnedKalman(), torch.tensor([True, True])).fit([walk(300)])
    state = filter.update(filter.predict(filter.init(1)), torch.tensor([[0.3, 0.2]]).double())
    moved = filter.predict(state)
    again, possible = filter.observe(moved, torch.tensor([[0.3, 0.2]]).double())
    assert bool(possible.all())
    assert torch.equal(filter.estimate(again), filter.estimate(moved))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_state_keeps_the_last_reading_of_each_sensor(dtype):
    filter, _ = fitted()
    state = filter.update(filter.init(2), torch.tensor([[1.0, 2.0], [3.0, torch.nan]], dtype=dtype))
    state = filter.update(state, torch.tensor([[torch.nan, 2.0], [4.0, 5.0]], dtype=dtype))
    assert state.last.tolist() == [[1.0, 2.0], [4.0, 5.0]]


def test_steps_that_were_not_observed_are_no_repeats():
    """Readings of masked steps are filled with zeros."""
    x = torch.randn(600, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mask = torch.ones(600, dtype=torch.bool)
    mask[200:220] = False
    filled = torch.where(mask[:, None], x, 0)
    assert not held_sensors([Recording(x, filled, mask)]).any()
    assert held_sensors([Recording(x, filled, None)]).all(), "as readings they are"


def few_values(n: int, seed: int = 0, period: int = 3, start: int = 0) -> Recording:
    """A random walk that returns to 0, read in whole numbers; the second sensor is held."""
    z = walk(n, seed=seed).states
    t = (torch.arange(start, n + start) // period * period - start).clamp_min(0)
    noisy = (3 * z + normal(n, 2, seed=seed + 50)).round()
    return Recording(z, torch.stack([noisy[:, 0], noisy[t, 1]], 1))


def test_held_sensors_of_few_values_are_found_by_their_period():
    """In each recording the held readings may begin at another step."""
    memory = [few_values(120, seed=k, start=k) for k in range(3)]
    assert held_sensors(memory).tolist() == [False, False]
    assert reading_periods(memory).tolist() == [1, 3]
    assert held_by("auto", memory).tolist() == [0, 3]
    assert held_by("auto", [walk(200)]).tolist() == [0, 1], "of many values repeats suffice"
    assert held_by(True, memory).tolist() == [1, 1] and len(held_by(False, memory)) == 0
    assert reading_periods([few_values(60, period=2)]).tolist() == [1, 1], "too few changes"


def test_readings_are_those_of_the_period():
    """Repeats among them, too; before the first change the period is not known."""
    x = torch.tensor([4.0, 4, 4, 5, 5, 5, 5, 5, 5, 7, 7, 7])[:, None]
    fresh = without_repeats(Recording(x, x), torch.tensor([3])).obs[:, 0]
    assert fresh.isfinite().nonzero()[:, 0].tolist() == [0, 3, 6, 9]
    every = without_repeats(Recording(x, x), torch.tensor([1])).obs[:, 0]
    assert every.isfinite().nonzero()[:, 0].tolist() == [0, 3, 9]


@pytest.mark.parametrize("start", [0, 1, 2])
def test_the_filter_knows_when_a_reading_is_due(start):
    held = torch.tensor([0, 3])
    filter = HeldReadings(LearnedKalman(), held).fit([few_values(300)])
    new = few_values(90, seed=1, start=start)
    fresh = without_repeats(new, held)
    assert 55 <= int(fresh.obs[:, 1].isnan().sum()) <= 62
    run = rollout(filter, new.obs[None], covariances=True)
    truth = rollout(filter.inner, fresh.obs[None], covariances=True)
    assert torch.equal(run.estimates, truth.estimates)
    assert torch.equal(run.covariances, truth.covariances)


def test_periods_cost_no_accuracy():
    """Beside the filter that takes all repeats as readings, and the one that takes none."""
    train, test = [few_values(400)], few_values(3000, seed=1)
    errors = []
    for held in ([0, 3], [0, 1], [0, 0]):
        filter = HeldReadings(LearnedKalman(), torch.tensor(held)).fit(train)
        left = rollout(filter, test.obs[None]).estimates[0] - test.states
        errors.append(left.square().mean().item())
    assert errors[0] < 0.99 * errors[1] and errors[0] < 0.97 * errors[2]
