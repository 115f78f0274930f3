"""The same numbers through different doors: halves of a recording, arrays, types, late readings."""

import itertools
import warnings

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.cli import main


def simulated(n=300, seed=0):
    """Two autoregressive states, three sensors, a control."""
    rng = np.random.default_rng(seed)
    u, z = np.repeat(rng.normal(size=n // 5 + 1), 5)[:n], np.zeros((n, 2))
    for k in range(1, n):
        z[k] = 0.95 * z[k - 1] + 0.8 * u[k] + 0.5 * rng.normal(size=2)
    noise = rng.normal(size=(n, 3)) * [0.3, 0.3, 0.5]
    a, b, c = (np.stack([z[:, 0], z.sum(1), z[:, 1] - z[:, 0]], 1) + noise).T
    return pd.DataFrame({"t": np.arange(n) * 1.0, "x": z[:, 0], "y": z[:, 1]}).assign(
        a=a, b=b, c=c, u=u
    )


def fit(data, **settings):
    columns = {"states": ["x", "y"], "observations": ["a", "b", "c"], "model": "kalman"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kbf.DataWarning)
        return kbf.fit(data, progress=False, **{**columns, **settings})


def halves(fitted, data, cut):
    """The estimates of two parts of a recording, the second from the state of the first."""
    first = fitted.filter(data[:cut])
    return np.concatenate([first.mean, fitted.filter(data[cut:], state=first.state).mean])


@pytest.mark.parametrize("dropped", [[], [100, 101], list(range(100, 150))])
@pytest.mark.parametrize("timed", [False, True])
def test_two_parts_equal_the_whole_with_holes_and_gaps_between_them(dropped, timed):
    fitted = fit(simulated(), time="t", time_as_control=timed)
    new = simulated(200, 1).drop(index=dropped)
    np.testing.assert_allclose(halves(fitted, new, 100), fitted.filter(new).mean, atol=1e-12)


def test_two_parts_equal_the_whole_where_controls_act_from_their_rows():
    fitted = fit(simulated(), controls=["u"], control_timing="from")
    new = simulated(100, 1)
    np.testing.assert_allclose(halves(fitted, new, 51), fitted.filter(new).mean, atol=1e-12)


def test_a_clock_that_begins_anew_is_one_move():
    fitted = fit(simulated(), time="t")
    new = simulated(100, 1)
    expected = fitted.filter(new).mean
    new.loc[50:, "t"] -= 50
    np.testing.assert_allclose(halves(fitted, new, 50), expected, atol=1e-12)


def test_scores_are_of_estimates_and_intervals_within_the_bounds():
    data, new = simulated(400), simulated(300, 1)
    for each in (data, new):
        each["x"] = each["x"].clip(upper=0.5)
    fitted = fit(data, bounds={"x": [None, 0.5]})
    found, est = fitted.evaluate(new).loc["x"], fitted.filter(new)
    low, high = (end[:, 0] for end in est.interval())
    assert found.coverage_95 == np.mean((low <= new.x) & (new.x <= high))
    np.testing.assert_allclose(found.rmse, np.sqrt(np.mean((est.mean[:, 0] - new.x) ** 2)))


def test_codes_by_column_are_found_in_arrays_and_in_single_precision():
    data, new = simulated(), simulated(100, 1)
    for each in (data, new):
        each.loc[::5, "a"] = -999.9
    fitted = fit(data, missing={"a": [-999.9]}, allow_missing_sensors=True)
    expected = fitted.filter(new).mean
    array = new[["a", "b", "c"]].to_numpy()
    np.testing.assert_allclose(fitted.filter(observations=array).mean, expected)
    single = fitted.filter(new.astype("float32")).mean
    np.testing.assert_allclose(single, expected, atol=1e-5)


def test_codes_of_a_column_that_is_not_there_are_refused():
    with pytest.raises(kbf.DataError, match="there is no column 'A'; did you mean 'a'"):
        fit(simulated(), missing={"A": [-99]})


def test_a_late_reading_off_the_grid_changes_nothing():
    live = fit(simulated(), time="t").online(max_delay=10.0)
    for row in simulated(20, 1).to_dict("records"):
        live.step({name: row[name] for name in "abc"}, time=row["t"])
    before = live.forecast(1).mean
    with pytest.raises(kbf.DataError, match="no multiple"):
        live.update({"a": 0, "b": 0, "c": 0}, time=15.5)
    assert live.time == 19
    np.testing.assert_array_equal(live.forecast(1).mean, before)


def test_missing_controls_are_refused(tmp_path):
    fitted, zero = fit(simulated(), controls=["u"], missing=[-999]), {"a": 0, "b": 0, "c": 0}
    fitted.export(tmp_path / "step.onnx")
    doors = [fitted.online(), kbf.load_onnx(tmp_path / "step.onnx")]
    for value in (None, np.nan, -999):
        for door in doors:
            with pytest.raises(kbf.DataError, match="the control u is missing"):
                door.step(zero, control={"u": value})
        with pytest.raises(kbf.DataError, match="the control u is missing"):
            fitted.forecast(simulated(20, 1), 1, controls=[{"u": value}])


def test_forecasts_of_recordings_that_are_shorter_than_the_horizon_have_no_score():
    found = fit(simulated()).evaluate(simulated(3, 1), horizon=3)
    assert found["nmse_ahead_1"].notna().all() and found["nmse_ahead_3"].isna().all()


def test_time_since_the_start_as_a_duration():
    data = simulated().set_index(pd.to_timedelta(np.arange(300), unit="s"))
    one, two = fit(data).online(), fit(data).online()
    zero = {"a": 0, "b": 0, "c": 0}
    for seconds in (1.0, 2.0, 4.0):
        first = one.step(zero, time=pd.Timedelta(seconds, "s"))
        np.testing.assert_array_equal(
            list(first.values()), list(two.step(zero, time=seconds).values())
        )


def test_frames_may_lack_the_column_of_recordings():
    fitted = fit(simulated().assign(run="first"), recording="run")
    new = simulated(60, 1)
    expected = fitted.filter(new).mean
    for data in ([new], {"second": new}, [new, new]):
        np.testing.assert_array_equal(fitted.filter(data).mean[:60], expected)


@pytest.mark.parametrize(
    ("case", "ending"),
    [
        *itertools.product(["hole", "gap", "durations"], ["csv", "parquet"]),
        ("controls", "csv"),  # other files do not keep the control of their last row
    ],
)
def test_the_command_continues_from_a_state_file(case, ending, tmp_path):
    """Two files equal one: with rows or a gap between them, and controls that act from rows."""
    settings = {
        "durations": {"time": "t", "time_as_control": True},
        "controls": {"controls": ["u"], "control_timing": "from"},
    }.get(case, {"time": "t"})
    fitted = fit(simulated(), **settings)
    fitted.save(tmp_path / "a.ckpt")
    dropped = {"hole": [100, 101], "durations": [100], "gap": list(range(100, 150))}.get(case, [])
    new = simulated(200, 1).drop(index=dropped)
    found = []
    for k, part in enumerate((new[:100], new[100:])):
        path = tmp_path / f"part{k}.{ending}"
        part.to_csv(path, index=False) if ending == "csv" else part.to_parquet(path)
        output = tmp_path / f"out{k}.csv"
        words = [f"checkpoint={tmp_path / 'a.ckpt'}", f"input={path}", f"output={output}"]
        assert main(["filter", *words, f"state={tmp_path / 'state.pt'}"]) == 0
        found.append(pd.read_csv(output)[["x", "y"]])
    np.testing.assert_allclose(pd.concat(found), fitted.filter(new).mean, atol=1e-6)


def test_arrays_and_recordings_have_the_columns_by_their_positions():
    """With controls of their own names, and with a column that does not vary."""
    data = simulated().assign(k=1.0)
    obs, states, acted = (data[list(names)].to_numpy() for names in ("kabc", "xy", "u"))
    whole = kbf.Recording(*map(torch.from_numpy, (states, obs)))
    fitted = kbf.fit(states=states, observations=obs, model="kalman", progress=False)
    expected = fitted.filter(observations=obs).mean
    np.testing.assert_array_equal(fitted.filter(whole).mean, expected)
    assert (fitted.evaluate(whole).rmse < 0.5).all()
    fitted = fit(data, controls=["u"])
    given = whole._replace(obs=whole.obs[:, 1:], controls=torch.from_numpy(acted))
    expected = fitted.filter(data).mean
    np.testing.assert_allclose(fitted.filter(given).mean, expected)
    found = fitted.filter(observations=obs[:, 1:], controls=acted)
    np.testing.assert_allclose(found.mean, expected)


def test_columns_that_never_varied_may_be_given_and_do_not_count():
    data = simulated().assign(flat=2.0, still=1.0)
    observations, controls = ["a", "b", "c", "flat"], ["u", "still"]
    fitted = fit(data, observations=observations, controls=controls)
    plain, online = fit(data, controls=["u"]).online(), fitted.online()
    for row in data[:5].to_dict("records"):
        given = {name: row[name] for name in observations}
        acting = {name: row[name] for name in controls}
        estimate = online.step({**given, "flat": 7.0}, control=acting)
        alone = plain.step({name: row[name] for name in "abc"}, control={"u": row["u"]})
        assert dict(estimate) == dict(alone)
    forecast = online.forecast(3, controls=data[controls].to_dict("records")[:3])
    np.testing.assert_array_equal(
        forecast.mean, plain.forecast(3, controls=data[["u"]].to_numpy()[:3]).mean
    )
    with pytest.raises(KeyError, match="'falt' is not among the observations; they are a, b, c"):
        online.step({**given, "falt": 2.0}, control=acting)


def test_evaluation_by_the_arrays_of_the_training(tmp_path):
    data = simulated()
    path, other = tmp_path / "own.npz", tmp_path / "usual.npz"
    z, x = data[["x", "y"]].to_numpy(), data[["a", "b", "c"]].to_numpy()
    np.savez(path, place=z, sensors=x)
    np.savez(other, states=z, observations=x)
    fitted = fit(str(path), states="place", observations="sensors")
    usual = fit(str(other), states="states", observations="observations")
    with pytest.warns(kbf.DataWarning, match="300 of 300 rows are in the training"):
        pd.testing.assert_frame_equal(fitted.evaluate(path), usual.evaluate(str(other)))
    with pytest.raises(KeyError, match="'sens' is not among the observations"):
        fitted.online().step({"x1": 0.0, "x2": 0.0, "x3": 0.0, "sens": 0.0})
