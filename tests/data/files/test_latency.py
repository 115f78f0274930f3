"""Sensors whose readings are late: found by the report, moved by the setting, at both doors."""

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.cli import main
from kbf.data.files.latency import checked_latency, without_latency
from kbf.data.files.layout import FileRecording

T, LATE = 500, 4


def recorded(late: int = LATE, seed: int = 0) -> pd.DataFrame:
    """An autoregressive state; ``a`` is late, ``b`` is not."""
    rng, x = np.random.default_rng(seed), np.zeros(T)
    for t in range(1, T):
        x[t] = 0.9 * x[t - 1] + rng.normal()
    a, b = (x + s * rng.normal(size=T) for s in (0.2, 3.0))
    a = np.r_[np.full(late, a[0]), a[: T - late]]
    return pd.DataFrame({"t": 0.1 * np.arange(T), "x": x, "a": a, "b": b})


COLUMNS = {"states": ["x"], "observations": ["a", "b"], "time": "t"}


@pytest.mark.parametrize("late", [1, LATE, 10])
def test_the_report_estimates_a_latency(late):
    frame = recorded(late)
    (text,) = kbf.check(frame, **COLUMNS, test=0.0).warnings
    setting = {"a": pytest.approx(0.1 * late)}
    assert f"{0.1 * late:.4g} s late: states of {late} rows before" in text
    assert f"latency={{'a': {0.1 * late:.4g}}}" in text
    assert kbf.check(frame, **COLUMNS, latency={"a": 0.1 * late}, test=0.0).warnings == []
    untimed = {key: value for key, value in COLUMNS.items() if key != "time"}
    (text,) = kbf.check(frame.drop(columns="t"), **untimed, test=0.0).warnings
    assert f"{late} steps late" in text and setting


def test_sensors_that_are_not_late_have_no_warning():
    frame = recorded(0)
    turn = np.sin(0.3 * np.arange(T))
    rng = np.random.default_rng(1)
    ordinary = {
        "the state": (frame.x, frame.x),
        "a smoothed sensor": (frame.x, frame.x.ewm(alpha=0.3).mean()),
        "the velocity": (turn, np.gradient(turn)),
        "a position from its velocity": (np.gradient(turn), turn),
        "nothing": (frame.x, rng.normal(size=T)),
    }
    for name, (state, sensor) in ordinary.items():
        noise = 0.2 * np.std(sensor) * rng.normal(size=T)
        each = pd.DataFrame({"t": frame.t, "x": state, "a": sensor + noise, "b": frame.b})
        assert kbf.check(each, **COLUMNS, test=0.0).warnings == [], name


def test_readings_move_to_their_own_time(tmp_path):
    frame, new = recorded(), recorded(seed=1)
    late = {"latency": {"a": 0.1 * LATE}}
    quick = {"model": "kalman", "progress": False}
    with pytest.warns(kbf.DataWarning, match=r"seem to be 0.4 s late"):
        plain = kbf.fit(frame, **COLUMNS, **quick)
    fitted = kbf.fit(frame, **COLUMNS, **late, **quick)
    moved = new.assign(a=np.r_[new.a[LATE:], np.full(LATE, np.nan)])
    rows = slice(0, T - LATE)
    errors = [
        np.mean((each.filter(new).mean[rows, 0] - new.x[rows]) ** 2) for each in (plain, fitted)
    ]
    assert errors[1] < 0.3 * errors[0]
    own = kbf.fit(
        frame.assign(a=np.r_[frame.a[LATE:], np.full(LATE, np.nan)]),
        **COLUMNS,
        **quick,
        allow_missing_sensors=False,
    )
    np.testing.assert_allclose(fitted.filter(new).mean, own.filter(moved).mean, atol=1e-10)
    # the commands have the same estimates
    frame.to_csv(tmp_path / "train.csv", index=False)
    new.to_csv(tmp_path / "new.csv", index=False)
    words = ["data=own", f"data.path={tmp_path}/train.csv", "data.states=[x]", "data.time=t"]
    words += ["data.observations=[a,b]", "data.latency={a:0.4}", "data.test=0", "model=kalman"]
    words += ["logger=none", "trainer.enable_progress_bar=false", f"run_dir={tmp_path}/run"]
    assert main(["train", *words]) == 0
    run = f"checkpoint={tmp_path}/run"
    assert main(["filter", run, f"input={tmp_path}/new.csv", f"output={tmp_path}/out.csv"]) == 0
    np.testing.assert_allclose(
        pd.read_csv(tmp_path / "out.csv").x, fitted.filter(new).mean[:, 0], atol=1e-7
    )
    with pytest.warns(kbf.DataWarning, match=r"readings of a are 0.4 s late.*update"):
        fitted.online()


def test_a_stream_cannot_be_moved(tmp_path, capsys, monkeypatch):
    from kbf.commands.filter import is_text
    from kbf.data.files.column_schema import ColumnSchema

    schema = ColumnSchema.unnamed(1, 1, 0)
    assert is_text("-", schema, {"latency": None})
    with pytest.raises(ValueError, match=r"are late .*input=FILE"):
        is_text("-", schema, {"latency": {"x_0": 0.1}})
    assert not is_text("a.csv", schema, {"latency": {"x_0": 0.1}})


def test_rows_that_are_left_out_have_no_reading():
    times = torch.tensor([0.0, 0.1, 0.2, 0.5, 0.6, 0.72], dtype=torch.float64)
    obs = torch.arange(12.0, dtype=torch.float64).reshape(6, 2)
    recording = FileRecording("r", obs, times=times)
    found = without_latency(recording, ["a", "b"], {"a": 0.1}, 0.1).obs
    assert torch.equal(found[:, 1], obs[:, 1])
    assert found[[0, 1, 3, 4], 0].tolist() == [2.0, 4.0, 8.0, 10.0]
    assert bool(found[[2, 5], 0].isnan().all())
    assert without_latency(recording, ["a", "b"], {}, 0.1) is recording


@pytest.mark.parametrize(
    ("latency", "message"),
    [
        ({"c": 1}, "'c' is no observation; they are a, b"),
        ({"a": -1}, "must be at least 0 seconds"),
        ({"a": "1"}, "must be at least 0 seconds"),
        (0.3, "must name columns"),
    ],
)
def test_latencies_that_are_wrong(latency, message):
    with pytest.raises(ValueError, match=message):
        checked_latency(latency, ["a", "b"])
