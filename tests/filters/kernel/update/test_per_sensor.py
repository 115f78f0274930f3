"""Several sensors, any of which may be silent: what speaks is used, and nothing else changes."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kbf.evaluation.score import score
from kbf.filters.kernel.feature_kbf import FeatureKBF
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.update.per_sensor import (
    LEAST_TOGETHER,
    SensorUpdate,
    present,
    read_sensors,
    sensor_scale,
)
from kbf.filters.online import OnlineFilter
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.ssm import rotation, simulate

SENSORS = ((0, 1), (2,))


@functools.cache
def recording(n: int, seed: int = 0) -> Recording:
    """A turning point; the first sensor sees it, the second the height alone, in other units."""
    model = rotation()
    states, obs, *_ = simulate(model, model.m0, n, torch.Generator().manual_seed(seed))
    noise = torch.randn(
        n, 1, generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64
    )
    return Recording(states, torch.cat([obs, 1000 * (states[:, 1:] + 0.1 * noise)], -1))


def silent(sequence: Recording, columns: list[int], rows: slice | Tensor) -> Recording:
    obs = sequence.obs.clone()
    for column in columns:
        obs[rows, column] = math.nan
    return sequence._replace(obs=obs)


def built(memory: list[Recording], **settings: Any) -> KernelBayesFilter:
    model = KBF(**settings)
    model.prepare(memory)
    with torch.no_grad():
        return model.fit(memory)


def estimates(filter: KernelBayesFilter, obs: Tensor, **more: Any) -> Tensor:
    with torch.no_grad():
        return rollout(filter, obs, **more).estimates


@functools.cache
def half_silent() -> KernelBayesFilter:
    """Each sensor was silent in a third of the recording."""
    whole = recording(300)
    return built(
        [silent(silent(whole, [2], slice(0, 100)), [0, 1], slice(200, 300))], sensors=SENSORS
    )


# the truth where it is known


@pytest.mark.parametrize("rank", [64, None])
def test_if_all_speak_it_is_the_filter_of_all_columns(rank):
    """In the units in which sensors are compared: each by its median distance."""
    whole, test = recording(150), recording(20, 5)
    scale = sensor_scale(whole.obs, SENSORS)
    plain = built([whole._replace(obs=whole.obs / scale)], rank=rank)
    expected = estimates(plain, (test.obs / scale)[None])
    found = estimates(built([whole], rank=rank, sensors=SENSORS), test.obs[None])
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_a_sensor_that_is_always_silent_is_as_if_it_were_not_there():
    whole, test = recording(150), recording(20, 5)
    model = KBF(sensors=SENSORS)
    memory = [silent(whole, [2], slice(50, 150))]
    model.prepare(memory)
    model.sensor_scale.copy_(sensor_scale(whole.obs, SENSORS))
    alone = KBF()
    first = whole._replace(obs=whole.obs[:, :2] / model.sensor_scale[0])
    alone.prepare([first])
    model.load_state_dict(alone.state_dict() | {"sensor_scale": model.sensor_scale})
    with torch.no_grad():
        expected = estimates(alone.fit([first]), (test.obs[:, :2] / model.sensor_scale[0])[None])
        for gone in (memory, [silent(whole, [2], slice(None))]):
            found = estimates(model.fit(gone), silent(test, [2], slice(None)).obs[None])
            torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def test_points_that_lack_a_sensor_get_no_weight():
    filter, test = half_silent(), recording(3, 5)
    with torch.no_grad():
        state = filter.predict(filter.init(3))
        for gone, rows in (([], slice(100, 200)), ([2], slice(0, 200)), ([0, 1], slice(100, 300))):
            w = filter.update(state, silent(test, gone, slice(None)).obs).weights
            assert (w[:, rows] != 0).any()
            outside = torch.ones(300, dtype=torch.bool)
            outside[rows] = False
            assert (w[:, outside] == 0).all()


@pytest.mark.slow
def test_more_sensors_know_more_and_gaps_cost_little():
    test = recording(200, 5)
    filter = built([recording(300)], sensors=SENSORS)
    gaps = silent(test, [2], torch.arange(200) % 3 == 0)
    both, some, first, second = (
        score(filter, [s]).mse.item()
        for s in (test, gaps, silent(test, [2], slice(None)), silent(test, [0, 1], slice(None)))
    )
    assert both < some < first < second
    assert second < 0.3 * test.states.square().sum(-1).mean()


# silence


def test_a_step_without_any_sensor_keeps_the_prediction():
    filter, test = half_silent(), recording(12, 5)
    gone = silent(test, [0, 1, 2], slice(4, 8)).obs[None]
    mask = torch.ones(1, 12, dtype=torch.bool)
    mask[:, 4:8] = False
    torch.testing.assert_close(
        estimates(filter, gone),
        estimates(filter, test.obs[None], mask=mask),
        rtol=1e-12,
        atol=1e-12,
    )


def test_patterns_mix_in_a_batch_and_within_a_sensor_all_or_nothing_counts():
    filter, test = half_silent(), recording(10, 5)
    patterns = [[], [2], [0, 1], [0], [0, 1, 2], [0, 2]]
    runs = torch.stack([silent(test, gone, torch.arange(10) % 2 == 0).obs for gone in patterns])
    together = estimates(filter, runs)
    for k in range(len(patterns)):
        torch.testing.assert_close(
            estimates(filter, runs[k : k + 1])[0], together[k], rtol=1e-8, atol=1e-8
        )
    torch.testing.assert_close(
        together[3], together[2], rtol=1e-10, atol=1e-10
    )  # half of the first sensor is none of it
    torch.testing.assert_close(together[5], together[4], rtol=1e-10, atol=1e-10)
    infinite = torch.where(runs.isnan(), math.inf, runs)
    torch.testing.assert_close(estimates(filter, infinite), together, rtol=1e-10, atol=1e-10)


def test_live_and_other_filters_with_single_sensors_missing():
    filter, test = half_silent(), silent(recording(10, 5), [2], slice(3, 6))
    live, expected = OnlineFilter(filter), estimates(filter, test.obs[None])
    for t in range(10):
        torch.testing.assert_close(
            live.step(test.obs[t : t + 1])[0], expected[0, t], rtol=1e-10, atol=1e-10
        )
    plain = built([recording(150)])
    with pytest.raises(
        ValueError, match="observations hold NaN or infinite values in 3 of 10 rows"
    ):
        rollout(plain, test.obs[None])
    with pytest.raises(ValueError, match="not compiled"):
        OnlineFilter(filter, compiled=test.obs[:1])


def test_a_masked_step_of_a_recording_is_one_where_nobody_spoke():
    whole = recording(150)
    mask = torch.arange(150) % 10 > 0
    test = recording(10, 5)
    masked = built([whole._replace(mask=mask)], sensors=SENSORS)
    nan = built([silent(whole, [0, 1, 2], ~mask)], sensors=SENSORS)
    assert torch.equal(estimates(masked, test.obs[None]), estimates(nan, test.obs[None]))


def test_sensors_that_never_spoke_together_are_not_used_together():
    """Fewer than LEAST_TOGETHER common points: the first sensor alone is used, of which there are
    more.
    """
    whole, few = recording(200), LEAST_TOGETHER - 1
    apart = silent(silent(whole, [2], slice(0, 100 - few)), [0, 1], slice(100, 200))
    model = KBF(sensors=SENSORS)
    model.prepare([apart])
    with torch.no_grad():
        filter = model.fit([apart])
    update = filter.rule
    assert isinstance(update, SensorUpdate)
    assert update.instead == {0: 0, 1: 1, 2: 2, 3: 1}
    test = recording(8, 5)
    assert torch.equal(
        estimates(filter, test.obs[None]),
        estimates(filter, silent(test, [2], slice(None)).obs[None]),
    )


# learning, keeping, refusing


def test_gradients_pass_through_every_set_of_sensors():
    memory, test = [silent(recording(80), [2], slice(0, 30))], recording(6, 5)
    model = KBF(sensors=SENSORS, rank=12)
    model.prepare(memory)
    obs = torch.stack(
        [test.obs, silent(test, [2], slice(2, 4)).obs, silent(test, [0, 1], slice(None)).obs]
    )

    def loss() -> Tensor:
        return (rollout(model.fit(memory), obs).estimates - test.states).square().mean()

    loss().backward()
    slope = model.log_bandwidth.grad
    assert slope is not None
    with torch.no_grad():
        model.log_bandwidth[2] += 1e-5
        above = loss()
        model.log_bandwidth[2] -= 2e-5
        below = loss()
    torch.testing.assert_close(slope[2], (above - below) / 2e-5, rtol=1e-3, atol=1e-8)


def test_scales_are_kept():
    model, other = KBF(sensors=SENSORS), KBF(sensors=SENSORS)
    model.prepare([recording(100)])
    other.load_state_dict(model.state_dict())
    assert other.sensor_scale[2] > 300
    assert torch.equal(other.sensor_scale, model.sensor_scale)
    assert present(
        torch.tensor([[1.0, math.nan, 2.0], [1.0, 2.0, math.inf]]), SENSORS
    ).tolist() == [[False, True], [True, False]]


@pytest.mark.parametrize(
    "sensors", [[], [[]], [[0, 1]] * 2, [[0], [2]], [[k] for k in range(6)], [[0, 1], [1, 2]]]
)
def test_wrong_groups_are_refused(sensors):
    with pytest.raises(ValueError, match="sensors must be 1 to 5 lists that share out the columns"):
        read_sensors(sensors)


def test_what_cannot_be_is_refused():
    wrongs: list[dict[str, Any]] = [{"kernel": "matern32"}, {"select": "loo"}, {"normalise": False}]
    for wrong in wrongs:
        with pytest.raises(
            ValueError, match="sensors need kernel=gaussian, select=median and normalise=true"
        ):
            KBF(sensors=SENSORS, **wrong)
    with pytest.raises(ValueError, match="sensors cannot be told apart"):
        FeatureKBF(torch.nn.Flatten(), sensors=SENSORS)
    with pytest.raises(ValueError, match="share out 3 columns, the observations have 2"):
        KBF(sensors=SENSORS).prepare([recording(50)._replace(obs=recording(50).obs[:, :2])])
    with pytest.raises(
        ValueError, match=r"sensor 1 \(columns \[2\]\): median_distance needs at least two points"
    ):
        KBF(sensors=SENSORS).prepare([silent(recording(50), [2], slice(None))])
