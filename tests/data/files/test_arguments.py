"""Arguments and columns at the seams between the doors of the library: what one door accepts the
others accept, and what would be lost in silence is refused in one sentence.
"""

from __future__ import annotations

import csv
import datetime
import io
import sys
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.cli import main
from kbf.data.files.column_schema import column_schema_of
from kbf.data.files.latency import checked_latency, lags_of
from kbf.data.files.layout import FileRecording
from kbf.fitted import online_estimator

COLUMNS: dict[str, Any] = {"states": ["x", "y"], "observations": ["a", "b", "c"]}
QUICK: dict[str, Any] = {"model": "kalman", "progress": False, "calibrate": False}


def recorded(steps: int = 150, seed: int = 0) -> pd.DataFrame:
    """Two states of first order and three sensors, at whole seconds."""
    rng = np.random.default_rng(seed)
    z = np.zeros((steps, 2))
    for k in range(1, steps):
        z[k] = 0.95 * z[k - 1] + 0.5 * rng.normal(size=2)
    a, b, c = (np.stack([z[:, 0], z.sum(1), z[:, 1]]) + 0.3 * rng.normal(size=(3, steps))).tolist()
    columns = {"t": np.arange(steps, dtype=float), "x": z[:, 0], "y": z[:, 1]}
    return pd.DataFrame({**columns, "a": a, "b": b, "c": c})


def fit(data, **settings):
    return kbf.fit(data, **{**COLUMNS, **QUICK, **settings})


@pytest.fixture(scope="module")
def plain():
    """A filter of the columns as they are."""
    return fit(recorded())


def fed(monkeypatch, capsys, frame, *words):
    """Run `kbf filter` on standard input: exit code, rows of the output, and standard error."""
    text = frame.to_csv(index=False).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))
    capsys.readouterr()
    code = main(["filter", "input=-", *words])
    told = capsys.readouterr()
    return code, list(csv.DictReader(io.StringIO(told.out))), told.err


def test_states_that_are_known_at_a_low_rate():
    frame = recorded()
    frame.loc[::20, "x"] = np.nan  # no window of states is complete
    assert fit(frame).filter(recorded(20, 1)).mean.shape == (20, 2)
    assert len(kbf.check(frame, **COLUMNS).recordings) == 1
    states, obs = (torch.tensor(frame[list(names)].to_numpy()) for names in ("xy", "abc"))
    assert lags_of([FileRecording("slow", obs, states)], 3) == [None] * 3


@pytest.fixture(scope="module")
def with_sensors():
    return fit(recorded(), observations={"A": ["a", "b"], "C": ["c"]})


@pytest.mark.parametrize(
    "given",
    [
        {"A": (1, 2), "C": 0.5},
        {"A": {"b": 2, "a": 1}, "C": np.float64(0.5)},
        {"A": pd.Series({"b": 2, "a": 1}), "C": torch.tensor(0.5)},
        {"A": torch.tensor([1.0, 2.0]), "C": [0.5]},
        {"A": np.array([1, 2]), "C": {"c": 0.5}},
    ],
)
def test_a_sensor_is_a_number_or_numbers_or_a_mapping(given, with_sensors):
    expected = with_sensors.online().step({"a": 1, "b": 2, "c": 0.5})
    assert with_sensors.online().step(given) == expected


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (1, r"A must be 2 numbers \(a, b\), got 1"),
        ("12", r"A must be 2 numbers \(a, b\), got 1"),
        ({"a": 1}, r"A must be 2 numbers \(a, b\), got a"),
        ({"a": 1, "z": 2}, r"A must be 2 numbers \(a, b\), got a, z"),
    ],
)
def test_readings_that_are_not_those_of_the_sensor(reading, message, with_sensors):
    with pytest.raises(kbf.DataError, match=message):
        with_sensors.online().step({"A": reading, "C": 0.5})


def test_a_column_whose_name_is_a_pattern_belongs_to_a_sensor():
    names = ["s[0]", "s[1]", "s0", "t1", "t2"]
    sensors = {"S": ["s[0]", "s[1]"], "T": ["t*"]}
    schema = column_schema_of(["x"], names, [], [], [], sensors=sensors)
    assert schema.sensors == (("S", ("s[0]", "s[1]")), ("T", ("t1", "t2")))
    frame = recorded().rename(columns={"a": "s[0]", "b": "s[1]"})
    made = fit(frame, observations={"S": ["s[0]", "s[1]"], "C": ["c"]})
    assert made.online().step({"S": (1, 2), "C": 0}) == made.online().step([1, 2, 0])


@pytest.mark.parametrize("name", ["x_std", "x_lower", "x_upper", "alarm"])
def test_states_with_the_names_of_other_columns_of_the_estimates(name):
    frame = recorded().rename(columns={"y": name})
    with pytest.raises(kbf.DataError, match=f"states: the estimates have a column '{name}' of"):
        fit(frame, states=["x", name])
    column_schema_of(["y_std", "alarms"], [name], [], [], [])  # the twins


def test_a_diagnostic_does_not_replace_a_state(plain, tmp_path, monkeypatch, capsys):
    new = recorded(20, 1)
    plain.save(tmp_path / "plain.ckpt")
    found = {"x": torch.full((1,), -1.0), "other": torch.full((1,), -2.0)}
    monkeypatch.setattr(
        online_estimator,
        "diagnostics_of",
        lambda _, state: {name: each.expand(len(state[0])) for name, each in found.items()},
    )
    code, rows, _ = fed(monkeypatch, capsys, new, f"checkpoint={tmp_path}/plain.ckpt")
    assert code == 0 and {row["other"] for row in rows} == {"-2"}
    estimates = [[float(row[name]) for name in "xy"] for row in rows]
    np.testing.assert_allclose(estimates, plain.filter(new).mean, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ["recording", "step", "time"])
def test_states_with_the_names_of_positions(name, tmp_path, monkeypatch, capsys):
    frame = recorded().rename(columns={"y": name})
    fit(frame, states=["x", name]).save(tmp_path / "f.ckpt")
    code, _, err = fed(monkeypatch, capsys, frame, f"checkpoint={tmp_path}/f.ckpt")
    assert code == 2 and f"the state '{name}' has the name of a column of the output" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("zone", [None, "Europe/Berlin"])
def test_times_that_are_python_objects(zone):
    times = pd.date_range("2024-03-30", periods=150, freq="30min", tz=zone)  # the clocks change
    frame = recorded()
    as_dates = fit(frame.assign(t=times), time="t").filter(frame.assign(t=times)[:40]).to_frame()
    kinds = [list(times), [each.to_pydatetime() for each in times]]
    kinds += [[each.to_datetime64() for each in times]] if zone is None else []
    for each in kinds:
        objects = frame.assign(t=pd.Series(each, dtype=object))
        assert objects.t.dtype == object
        made = fit(objects, time="t")
        assert made.time_step == 1800
        found = made.filter(objects[:40]).to_frame()
        pd.testing.assert_frame_equal(found, as_dates)


@pytest.mark.parametrize(
    ("start", "step"), [(datetime.date(2024, 2, 1), 86400.0), (datetime.timedelta(0), 86400.0)]
)
def test_days_and_durations_that_are_python_objects(start, step):
    times = [start + datetime.timedelta(days=k) for k in range(150)]
    made = fit(recorded().assign(t=pd.Series(times, dtype=object)), time="t")
    assert made.time_step == step


def test_a_mask_is_not_read_from_standard_input(tmp_path, monkeypatch, capsys):
    frame = recorded().assign(m=(np.arange(150) % 3 > 0).astype(int))
    made = fit(frame, mask="m")
    made.save(tmp_path / "f.ckpt")
    words = [f"checkpoint={tmp_path}/f.ckpt"]
    code, _, err = fed(monkeypatch, capsys, frame, *words)
    assert code == 2 and "was trained with a mask (data.mask=m)" in err and err.count("\n") == 1
    frame.to_csv(tmp_path / "new.csv", index=False)  # the twin
    words += [f"input={tmp_path}/new.csv", f"output={tmp_path}/out.csv"]
    assert main(["filter", *words]) == 0
    out = pd.read_csv(tmp_path / "out.csv")[["x", "y"]]
    np.testing.assert_allclose(out, made.filter(frame).mean, rtol=1e-7, atol=1e-8)


def test_a_column_called_recording_is_read_where_it_is_declared(
    plain, tmp_path, monkeypatch, capsys
):
    frame = recorded(40, 1).assign(recording=np.repeat(["p", "q"], 20))
    plain.save(tmp_path / "f.ckpt")
    frame.to_csv(tmp_path / "new.csv", index=False)
    words = [f"checkpoint={tmp_path}/f.ckpt"]
    code, rows, _ = fed(monkeypatch, capsys, frame, *words)
    assert code == 0 and "recording" not in rows[0]
    words += [f"input={tmp_path}/new.csv", f"output={tmp_path}/out.csv"]
    assert main(["filter", *words]) == 0
    for found in (pd.DataFrame(rows).astype(float), pd.read_csv(tmp_path / "out.csv")):
        estimates = found[["x", "y"]]
        np.testing.assert_allclose(estimates, plain.filter(frame).mean, rtol=1e-7, atol=1e-8)
    train = recorded().assign(recording=np.repeat(["p", "q"], 75))  # the twin
    made = fit(train, recording="recording")
    made.save(tmp_path / "g.ckpt")
    code, rows, _ = fed(monkeypatch, capsys, frame, f"checkpoint={tmp_path}/g.ckpt")
    assert code == 0 and [row["recording"] for row in rows] == ["p"] * 20 + ["q"] * 20
    estimates = [[float(row[name]) for name in "xy"] for row in rows]
    np.testing.assert_allclose(estimates, made.filter(frame).mean, rtol=1e-7, atol=1e-8)


def test_check_takes_bounds_and_units():
    frame = recorded()
    frame["x"] = frame.x.clip(upper=0.5)
    edges = [text for text in kbf.check(frame, **COLUMNS).warnings if "keeps estimates" in text]
    assert len(edges) == 1
    report = kbf.check(frame, bounds={"x": np.array([-9, 0.5])}, units={"x": "m"}, **COLUMNS)
    assert not [text for text in report.warnings if "keeps estimates" in text]
    with pytest.raises(kbf.DataError, match="units: there is no column 'z'"):
        kbf.check(frame, units={"z": "m"}, **COLUMNS)


@pytest.mark.parametrize("door", [kbf.check, fit])
@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"x": 0}, "bounds of x must be two numbers or null, got 0"),
        ({"x": [0, 1, 2]}, "bounds of x must be two numbers or null"),
        ({"x": ["0", 1]}, "bounds of x must be two numbers or null"),
        ({"x": [1, 0]}, "bounds of x: 1 is not below 0"),
        ({"z": [0, 1]}, "bounds: 'z' is no column of the states; they are x, y"),
        ({"y": [0, 1]}, "bounds: 'y' is an angle or rotation, which have no bounds"),
    ],
)
def test_bounds_that_are_wrong(door, bounds, message):
    with pytest.raises(kbf.DataError, match=message):
        door(recorded(), bounds=bounds, angles=["y"], **COLUMNS)


@pytest.mark.parametrize("ends", [np.array([-1, 1]), (np.float64(-1), np.int64(1)), [-1, 1]])
def test_bounds_are_numbers_of_numpy_too(ends, tmp_path):
    made = fit(recorded(), bounds={"x": ends})
    made.save(tmp_path / "f.ckpt")
    for each in (made, kbf.load(tmp_path / "f.ckpt")):
        found = each.filter(recorded(60, 1)).mean[:, 0]
        assert found.min() == -1 and found.max() == 1


def test_latency_is_a_number_of_numpy_too(tmp_path):
    for late in (np.float64(3), np.int64(3), np.float32(3)):
        assert checked_latency({"c": late}, ["c"]) == {"c": 3.0}
    new = recorded(40, 1)
    expected = fit(recorded(), time="t", latency={"c": 3.0}).filter(new).mean
    fit(recorded(), time="t", latency={"c": np.float64(3)}).save(tmp_path / "f.ckpt")
    np.testing.assert_array_equal(kbf.load(tmp_path / "f.ckpt").filter(new).mean, expected)
    for wrong in (True, np.bool_(True), np.float64(-1)):
        with pytest.raises(ValueError, match="must be at least 0 seconds"):
            checked_latency({"c": wrong}, ["c"])


def save_arrays(path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)


def test_names_of_arrays_in_a_file(plain, tmp_path):
    for name, frame in (("train", recorded()), ("new", recorded(40, 1))):
        arrays = {"z": frame[["x", "y"]], "s": frame[["a", "b", "c"]]}
        save_arrays(tmp_path / f"{name}.npz", arrays)
    names = {"states": "z", "observations": "s"}
    made = kbf.fit(tmp_path / "train.npz", **names, **QUICK)
    assert made.columns["observations"] == ["x1", "x2", "x3"]
    expected = plain.filter(recorded(40, 1)).mean
    np.testing.assert_allclose(made.filter(tmp_path / "new.npz").mean, expected, rtol=1e-12)
    made.save(tmp_path / "f.ckpt")
    again = kbf.load(tmp_path / "f.ckpt").filter(tmp_path / "new.npz").mean
    np.testing.assert_allclose(again, expected, rtol=1e-12)
    with np.load(tmp_path / "train.npz") as file:
        arrays = dict(file)
    made = kbf.fit(arrays, **names, **QUICK)
    np.testing.assert_allclose(made.filter(tmp_path / "new.npz").mean, expected, rtol=1e-12)
    # arrays of one number a step are columns, as before: the twin
    save_arrays(tmp_path / "columns.npz", {name: recorded()[name] for name in "xa"})
    made = kbf.fit(tmp_path / "columns.npz", states="x", observations="a", **QUICK)
    assert (made.columns["states"], made.columns["observations"]) == (["x"], ["a"])
