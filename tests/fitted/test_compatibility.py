"""What `kbf.fitted.compatibility` reports of recordings in other units and at other rates."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.cli import main
from kbf.fitted.compatibility import Comparison, longest_runs, reference_of
from kbf.runtime.errors import DataWarning

COLUMNS = {"states": ["x"], "observations": ["a", "b"], "controls": ["u"], "time": "t"}


def recorded(steps: int = 150, seed: int = 0) -> pd.DataFrame:
    """An autoregression with a control, seen by two sensors, at 10 Hz."""
    rng = np.random.default_rng(seed)
    u, x = rng.normal(size=steps), np.zeros(steps)
    for t in range(1, steps):
        x[t] = 0.9 * x[t - 1] + u[t]
    noise = 0.3 * rng.normal(size=(steps, 2))
    sensors = {"a": 500 + 100 * (x + noise[:, 0]), "b": -x + noise[:, 1]}
    return pd.DataFrame({"t": 0.1 * np.arange(steps), "x": x, "u": u, **sensors})


@pytest.fixture(scope="module")
def fitted():
    return kbf.fit(recorded(300), **COLUMNS, model="kalman", progress=False)


def warned(call) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, DataWarning)]


def test_the_reference_is_the_range_of_the_training(fitted):
    found, frame = reference_of(fitted.trained), recorded(300)
    assert found.names == ["a", "b", "u"] and found.time_step == pytest.approx(0.1)
    np.testing.assert_allclose(found.low, frame[["a", "b", "u"]].min(), rtol=1e-9)
    np.testing.assert_allclose(found.high, frame[["a", "b", "u"]].max(), rtol=1e-9)


def test_angles_and_images_have_no_range(fitted):
    angle = np.cumsum(np.random.default_rng(0).normal(0.2, 0.1, 200))
    frame = pd.DataFrame({"x": np.cos(angle), "phi": angle % (2 * np.pi)})
    columns = {"states": ["x"], "observations": ["phi"], "angles": ["phi"]}
    found = kbf.fit(frame, **columns, model="kalman", progress=False)
    assert reference_of(found.trained).low.tolist() == [-np.inf, -np.inf]
    comparison = Comparison(fitted.trained)
    comparison.add(torch.zeros(20, 3, 8, 8, dtype=torch.uint8))
    assert comparison.differences() == []


@pytest.mark.parametrize("method", ["filter", "smooth", "evaluate", "append"])
def test_ordinary_recordings_bring_no_warning(fitted, method):
    assert warned(lambda: getattr(fitted, method)(recorded(seed=1))) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda f: f.a / 1000}, "column a varies by less than 0.3 % of its training range"),
        ({"b": lambda f: 1000 * f.b}, "column b: .* here it is -.* Are these the units"),
        ({"u": lambda f: 50 * f.u}, "column u: .* of the training range"),
        ({"t": lambda f: 1000 * f.t}, "rows are 100 apart in time, those of the training 0.1"),
        ({"t": lambda f: 2 * f.t}, "rows are 0.2 apart .* 0.1: the filter predicts 2 steps"),
        ({"t": lambda f: 1.4 * f.t}, "rows are 0.14 apart .* no whole multiple"),
        ({"t": lambda f: f.t / 2}, "rows are 0.05 apart .* no whole multiple"),
    ],
)
def test_other_units_and_time_steps_are_reported_once(fitted, change, message):
    frame = recorded(seed=1).assign(**change)
    (text,) = warned(lambda: fitted.filter(frame))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(text)
    assert warned(lambda: fitted.evaluate(frame, baselines=False)) == [text]


def test_a_smaller_unit_is_no_sensor_at_rest():
    frame = recorded(300)
    columns = {"states": ["x"], "observations": ["b"]}
    found = kbf.fit(frame, **columns, model="kalman", progress=False)
    (text,) = warned(lambda: found.filter(recorded(seed=1).assign(b=lambda f: f.b / 1000)))
    assert "column b varies by less than 0.3 %" in text
    at_rest = frame.assign(b=0.3 * np.random.default_rng(0).normal(size=300))
    assert warned(lambda: found.filter(at_rest)) == []


def test_codes_that_the_training_did_not_have_are_asked_for(fitted):
    new = recorded(seed=3)
    first = next(iter(fitted.columns["observations"]))
    coded = new.assign(**{first: new[first].mask(new.index % 8 == 3, -9999.0)})
    (text,) = warned(lambda: fitted.filter(coded))
    assert f"column {first}: " in text and "Does -9999 stand for a missing value" in text


def test_a_sensor_without_any_reading_is_no_error(fitted):
    first = next(iter(fitted.columns["observations"]))
    (text,) = warned(lambda: fitted.filter(recorded(seed=3).assign(**{first: np.nan})))
    assert text.startswith(f"there is no value of {first}: no row is observed; kbf.fit(..., allow")
    nothing = recorded(seed=3).assign(a=np.nan, b=np.nan)
    assert warned(lambda: fitted.filter(nothing)) == [
        "there is no value of a, b: no row is observed"
    ]


def test_sensors_that_are_stuck_are_named(fitted):
    new = recorded(seed=3)
    stuck = new.assign(b=new.b.where(new.index < 60, new.b[59]))
    (text,) = warned(lambda: fitted.filter(stuck))
    assert "column b gives the same value in 91 rows on end, in the training in at most 1" in text
    briefly = new.assign(b=new.b.where((new.index < 60) | (new.index > 90), new.b[59]))
    assert warned(lambda: fitted.filter(briefly)) == []
    gappy = stuck.assign(**{k: stuck[k].where(stuck.index % 4 > 0) for k in ("a", "b")})
    (text,) = warned(lambda: fitted.filter(gappy))
    assert "column b gives the same value in 68 rows on end" in text


def test_lengths_of_runs():
    values = torch.tensor([[1.0, 1.0, np.nan], [1.0, 2.0, 5.0], [3.0, 2.0, 5.0], [4.0, 2.0, 5.0]])
    assert longest_runs(values).tolist() == [2, 3, 3]
    assert longest_runs(values[:0]).tolist() == [0, 0, 0]


@pytest.mark.parametrize("method", ["evaluate", "append"])
def test_rows_of_the_training_are_reported(fitted, method):
    texts = warned(lambda: getattr(fitted, method)([recorded(300), recorded(seed=3)]))
    assert len(texts) == 1
    assert texts[0].startswith("300 of 450 rows are in the training, equal to the last digit")


def test_rows_of_few_values_are_alike_by_chance():
    rng = np.random.default_rng(0)
    frames = [pd.DataFrame(rng.integers(0, 3, (300, 2)), columns=["x", "a"]) for _ in range(2)]
    columns = {"states": ["x"], "observations": ["a"], "model": "mean", "progress": False}
    found = kbf.fit(frames[0].astype(float), **columns, calibrate=False)
    assert warned(lambda: found.evaluate(frames[1].astype(float), baselines=False)) == []


def test_single_outliers_and_a_drift_are_no_other_unit(fitted):
    frame = recorded(seed=1)
    frame.loc[::40, "a"] = 1e6
    frame["b"] += np.linspace(0, 2, 150)
    assert warned(lambda: fitted.filter(frame)) == []


def test_online_filters_warn_once(fitted):
    frame, running, usual = recorded(seed=1), fitted.online(), fitted.online()

    def run(live, factor):
        for row in frame.itertuples():
            live.step({"a": factor * row.a, "b": row.b}, control={"u": row.u})

    (text,) = warned(lambda: run(running, 1000))
    assert "column a" in text
    assert warned(lambda: run(usual, 1)) == []


@pytest.mark.parametrize("kind", ["csv", "parquet", "-"])
def test_commands_report_the_same(fitted, tmp_path, capsys, monkeypatch, kind):
    import io
    import sys

    fitted.save(tmp_path / "a.ckpt")
    for factor in (1, 1000):
        frame = recorded(seed=1).assign(b=lambda f, factor=factor: factor * f.b)
        path = tmp_path / f"new.{kind}"
        if kind == "parquet":
            frame.to_parquet(path)
        else:
            frame.to_csv(path, index=False)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
        source = "-" if kind == "-" else path
        words = [f"checkpoint={tmp_path}/a.ckpt", f"input={source}", f"output={tmp_path}/out.csv"]
        assert main(["filter", *words]) == 0
        assert ("column b" in capsys.readouterr().err) == (factor == 1000)
    words = [f"checkpoint={tmp_path}/a.ckpt", f"data.path={path}"]
    if kind == "parquet":
        assert main(["evaluate", *words, f"run_dir={tmp_path}/score"]) == 0
        assert "column b" in capsys.readouterr().out
        assert main(["append", *words, f"out={tmp_path}/more.ckpt"]) == 0
        assert "column b" in capsys.readouterr().out
