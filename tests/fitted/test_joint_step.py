"""`step_together`: a batch of running filters has the estimates of single steps."""

import numpy as np
import pytest
import torch

import kbf
from kbf.filters.parallel_rollout import draws
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.fitted import joint_step
from kbf.fitted.joint_step import step_together
from kbf.fitted.online import take_together
from kbf.fitted.online_estimator import OnlineEstimator, StepInputs

# Standard deviations by which single steps and batches may differ: rounding of float32.
ROUNDING = 2e-3


@pytest.fixture(scope="module")
def fitted():
    return kbf.load("example:rotation")


def path(phase, steps=12):
    angle = phase + 0.2 * np.arange(steps)
    return np.stack([0.9 * np.cos(angle), 0.9 * np.sin(angle)], 1)


def test_a_batch_has_the_estimates_of_single_steps(fitted):
    """Three of ordinary paths; one whose observations are impossible, so that its track is lost."""
    paths = np.stack([path(phase) for phase in (0.0, 1.0, 2.0, 3.0)])
    paths[3, 4:9] = 1e30
    single, batch = ([fitted.online() for _ in paths] for _ in range(2))
    kinds = set()
    for t in range(paths.shape[1]):
        wanted = [one.step(x) for one, x in zip(single, paths[:, t], strict=True)]
        inputs = [one.inputs(x) for one, x in zip(batch, paths[:, t], strict=True)]
        found = take_together(batch, inputs)
        for one, other, a, b in zip(single, batch, wanted, found, strict=True):
            assert (a.rejected, a.alarm) == (b.rejected, b.alarm)
            kinds.add((a.rejected, a.alarm))
            assert one.rejections == other.rejections and other.estimate is b
            for name in a:
                assert abs(a[name] - b[name]) < ROUNDING * a.std[name]
                assert a.std[name] == pytest.approx(b.std[name], rel=ROUNDING)
                low, high = a.interval()[name]
                assert np.allclose(b.interval()[name], (low, high), atol=ROUNDING * (high - low))
    assert {(False, None), (True, "out_of_distribution")} <= kinds


def test_single_steps_are_those_of_whole_recordings(fitted):
    """Alarms by `Monitor.check` step by step equal those of `OnlineEstimator.advance` in blocks."""
    x = path(0.0, 30)
    x[10:22] = path(2.5, 12) * 1.02  # the path jumps, and back
    x[25] = 40.0
    whole, online = fitted.filter(observations=x), fitted.online()
    steps = [online.step(each) for each in x]
    assert [each.alarm or "" for each in steps] == list(whole.alarms)
    assert any(whole.alarms) and not all(whole.alarms)
    found = np.array([list(each.values()) for each in steps])
    assert np.abs((found - whole.mean) / whole.std).max() < ROUNDING


def test_a_diverged_track_starts_from_the_prior_and_the_others_do_not(fitted, monkeypatch):
    def estimators():
        found = [OnlineEstimator(fitted.trained, fitted.schema) for _ in range(2)]
        for each in found:
            for x in path(0.0, 6):
                step_together([each], [given(x)])
        return found

    def given(x):
        return StepInputs(torch.tensor(x[None], dtype=torch.float32))

    lost, other = estimators()
    ordinary = joint_step.alarms_of
    monkeypatch.setattr(
        joint_step, "alarms_of", lambda *a: (["diverged", ""][: len(a[3])], ordinary(*a)[1])
    )
    x = path(0.4, 1)[0]
    found = step_together([lost, other], [given(x), given(x)])
    assert found.alarms == ["diverged", ""] and (lost.alarms, other.alarms) == (1, 0)
    fresh = OnlineEstimator(fitted.trained, fitted.schema)
    fresh.live.step(given(x).obs)
    torch.testing.assert_close(lost.live.state, fresh.live.state)
    torch.testing.assert_close(found.means[:1], fresh.filter.estimate(fresh.live.state).double())
    assert not torch.allclose(lost.live.state[0], other.live.state[0])
    assert lost.recent is None and other.recent is not None


def test_no_filter_keeps_memory_of_the_batch(fitted):
    batch = [fitted.online() for _ in range(5)]
    take_together(batch, [each.inputs([0.3, 0.4]) for each in batch])
    leaf = batch[2]._estimator.live.state[0]
    assert leaf.untyped_storage().nbytes() == leaf.nbytes


def test_which_filters_draw(fitted):
    assert not draws(fitted.trained.filter, torch.zeros(1, 2), 0)
    memory = kbf.Recording(torch.rand(9, 2, dtype=torch.float64), torch.rand(9, 2).double())
    particles = ParticleFilter(kbf.ssm.oscillatory(), particles=8).fit([memory])
    assert draws(particles, torch.zeros(1, 2, dtype=torch.float64), 0)
