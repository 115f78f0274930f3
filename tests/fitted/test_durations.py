"""Durations of moves as controls: a step at a time equals the filter of the whole recording."""

import warnings

import numpy as np
import pandas as pd
import pytest

import kbf
from kbf.serving.sessions import Sessions

GAP = 20


@pytest.fixture(scope="module")
def data():
    rng, n = np.random.default_rng(0), 300
    seconds = rng.uniform(0.05, 0.2, n)
    seconds[GAP] = 2.0  # more than 5 time steps: the filter starts again from the prior
    t = np.cumsum(seconds)
    push = rng.normal(size=n)
    return pd.DataFrame(
        {"z": np.sin(t), "x": np.sin(t) + 0.1 * rng.normal(size=n), "u": push, "t": t}
    )


def fitted_to(data, model, **settings):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kbf.DataWarning)
        return kbf.fit(
            data,
            states=["z"],
            observations=["x"],
            time="t",
            time_as_control=True,
            model=model,
            progress=False,
            **settings,
        )


@pytest.mark.parametrize("controls", [[], ["u"]])
def test_steps_equal_the_filter_of_the_recording(data, controls):
    fitted = fitted_to(data, "kalman", controls=controls or None)
    new = data.iloc[:50]
    expected = fitted.filter(new).mean[:, 0]
    by_time, by_duration = fitted.online(), fitted.online()
    for k in range(len(new)):
        row = new.iloc[k]
        given = {"control": {"u": row.u}} if controls else {}
        dt = None if k == 0 else row.t - new.iloc[k - 1].t
        one = by_time.step({"x": row.x}, time=row.t, **given)
        two = by_duration.step({"x": row.x}, dt=dt, **given)
        np.testing.assert_allclose([one["z"], two["z"]], expected[k], rtol=1e-12)


def test_the_duration_changes_the_prediction(data):
    fitted = fitted_to(data, "kernel_monte_carlo")
    short, long = fitted.online(), fitted.online()
    for each in (short, long):
        each.step({"x": 0.0})
    assert short.predict(dt=0.05)["z"] != pytest.approx(long.predict(dt=0.2)["z"], abs=1e-3)


def test_a_late_reading_repeats_moves_of_other_durations(data):
    fitted = fitted_to(data, "kalman")
    new = data.iloc[:50]
    live = fitted.online(max_delay=1.0)
    for k in range(len(new)):
        if k != 47:
            live.step({"x": new.x[k]}, time=new.t[k])
    late = live.update({"x": new.x[47]}, time=new.t[47])
    np.testing.assert_allclose(late["z"], fitted.filter(new).mean[-1, 0], rtol=1e-12)


def test_forecasts_without_durations_are_of_the_time_step(data):
    fitted = fitted_to(data, "kalman", controls=["u"])
    new = data.iloc[:15]
    given = np.column_stack([np.zeros(4), np.full(4, fitted.time_step)])
    expected = fitted.forecast(new, 4, controls=given).mean
    np.testing.assert_allclose(fitted.forecast(new, 4, controls=np.zeros(4)).mean, expected)
    given[2, 1] = np.nan
    with pytest.raises(kbf.DataError, match="duration of a move is missing"):
        fitted.forecast(new, 4, controls=given)


def test_a_program_and_a_session_take_durations(data, tmp_path):
    fitted = fitted_to(data, "kalman")
    fitted.export(tmp_path / "step.onnx")
    program = kbf.load_onnx(tmp_path / "step.onnx")
    session = Sessions(fitted, limit=1, expiry=100, settings={}).create()
    new = data.iloc[:50]
    expected = fitted.filter(new).mean[:, 0]
    for k in range(len(new)):
        x, dt = float(new.x[k]), None if k == 0 else float(new.t[k] - new.t[k - 1])
        one = program.step({"x": x}, dt=dt)["z"]
        two = session.step({"obs": {"x": x}, "dt": dt})["estimates"]["z"]["value"]
        np.testing.assert_allclose([one, two], expected[k], rtol=1e-9)


def test_a_duration_without_a_time_step_is_refused(data):
    fitted = kbf.fit(data, states=["z"], observations=["x"], model="kalman", progress=False)
    with pytest.raises(kbf.DataError, match="without times"):
        fitted.online().step({"x": 0.0}, dt=0.1)
