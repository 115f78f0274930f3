"""Short recordings are filtered as one batch: the numbers are those of one after the other."""

import numpy as np
import pytest

import kbf
from kbf.fitted import fitted_filter, runs
from kbf.fitted.online_estimator import OnlineEstimator

TURN = 0.95 * np.array([[np.cos(0.3), np.sin(0.3)], [-np.sin(0.3), np.cos(0.3)]])


def drawn(lengths, seed=0):
    """States and observations of recordings of a rotation, and controls."""
    rng = np.random.default_rng(seed)
    states, observations, controls = [], [], []
    for length in lengths:
        u = rng.normal(size=(length, 1))
        z = np.zeros((length, 2))
        for t in range(1, length):
            z[t] = z[t - 1] @ TURN + 0.2 * u[t] + 0.1 * rng.normal(size=2)
        x = np.stack([z[:, 0], z[:, 1], z.sum(1)], 1)
        states.append(z)
        observations.append(x + 0.1 * rng.normal(size=x.shape))
        controls.append(u)
    return states, observations, controls


STATES, OBSERVATIONS, CONTROLS = drawn([40] * 8)
LENGTHS = [7, 1, 30, 12, 12, 300, 2, 25, 9]
"""One is longer than a batch has rows."""


@pytest.fixture
def calls(monkeypatch):
    """Numbers of recordings of the batches."""
    found, together = [], runs.step_through_together

    def step(estimator, trained, pieces):
        found.append(len(pieces))
        return together(estimator, trained, pieces)

    monkeypatch.setattr(runs, "step_through_together", step)
    return found


def one_by_one(monkeypatch, fitted, **inputs):
    def steps(estimator, trained, pieces):
        results = []
        for each in pieces:
            estimator.restart()
            results.append(runs.step_through(estimator, trained, each))
        return results

    with monkeypatch.context() as patch:
        patch.setattr(fitted_filter, "step_through_all", steps)
        return fitted.filter(**inputs)


def compare(monkeypatch, calls, fitted, batches, **inputs):
    found = fitted.filter(**inputs)
    assert calls == batches
    expected = one_by_one(monkeypatch, fitted, **inputs)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=0, atol=1e-9)
    if expected.std is not None:
        np.testing.assert_allclose(found.std, expected.std, rtol=1e-9)
    assert list(found.alarms) == list(expected.alarms)
    return found


@pytest.mark.parametrize("model", ["kalman", "window_ridge", "mean"])
def test_the_numbers_are_those_of_one_after_the_other(model, monkeypatch, calls):
    fitted = kbf.fit(states=STATES, observations=OBSERVATIONS, model=model, progress=False)
    _, observations, _ = drawn(LENGTHS, seed=1)
    compare(monkeypatch, calls, fitted, [7], observations=observations)


def test_missing_rows_sensors_and_controls(monkeypatch, calls):
    gaps = [x.copy() for x in OBSERVATIONS]
    for k, x in enumerate(gaps):
        x[3 + k, 1] = np.nan
    inputs = {"states": STATES, "observations": gaps, "controls": CONTROLS}
    fitted = kbf.fit(**inputs, model="kalman", require=["missing_sensors"], progress=False)
    _, observations, controls = drawn(LENGTHS, seed=2)
    observations[0][2] = np.nan
    observations[2][4:9, 0] = np.nan
    compare(monkeypatch, calls, fitted, [7], observations=observations, controls=controls)


def test_a_track_that_diverges_is_stepped_through_alone(monkeypatch, calls):
    fitted = kbf.fit(states=STATES, observations=OBSERVATIONS, model="kalman", progress=False)
    _, observations, _ = drawn(LENGTHS, seed=3)
    observations[3][5] += 500.0

    def verdicts(self, monitor, predicted, rows):
        limit = 100.0 / fitted.trained.module.scaling.x_scale[0]
        return ["diverged" if float(row.obs[0, 0]) > limit else "" for row in rows]

    monkeypatch.setattr(OnlineEstimator, "verdicts", verdicts)
    found = compare(monkeypatch, calls, fitted, [7], observations=observations)
    assert list(found.alarms).count("diverged") == 1


def test_filters_that_draw_random_numbers_go_one_after_the_other(monkeypatch, calls):
    fitted = kbf.fit(
        states=STATES, observations=OBSERVATIONS, model="particle_learned", progress=False
    )
    _, observations, _ = drawn([5, 6, 7], seed=4)
    compare(monkeypatch, calls, fitted, [], observations=observations)


def test_the_state_is_the_end_of_the_last_recording(calls):
    fitted = kbf.fit(states=STATES, observations=OBSERVATIONS, model="kalman", progress=False)
    _, observations, _ = drawn([9, 8, 20], seed=5)
    whole = fitted.filter(observations=observations)
    parts = fitted.filter(observations=[*observations[:2], observations[2][:12]])
    rest = fitted.filter(observations=observations[2][12:], state=parts.state)
    np.testing.assert_allclose(whole.mean[-8:], rest.mean, atol=1e-12)
