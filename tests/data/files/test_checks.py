"""Codes for missing values, dead sensors, leaks, shuffled rows, controls, units: each warning has
an ordinary twin without one.
"""

import numpy as np
import pandas as pd
import pytest
import torch

import kbf
from kbf.cli import main
from kbf.data.files.checks import codes_in, control_warning, unit_warnings
from kbf.data.files.layout import FileRecording
from kbf.data.files.report import fingerprints, nearest
from kbf.recording import Recording

COLUMNS = {"states": ["x"], "observations": ["a", "b"]}


def recorded(steps: int = 300, seed: int = 0) -> pd.DataFrame:
    rng, x = np.random.default_rng(seed), np.zeros(steps)
    for t in range(1, steps):
        x[t] = 0.9 * x[t - 1] + rng.normal()
    noise = 0.3 * rng.normal(size=(steps, 2))
    return pd.DataFrame({"x": x, "a": 20 + x + noise[:, 0], "b": -x + noise[:, 1]})


def causes(frame, **columns) -> list[str]:
    return kbf.check(frame, **{**COLUMNS, **columns}, test=0.0).warnings


def at_random(frame, column, value, share=0.1):
    chosen = np.random.default_rng(1).random(len(frame)) < share
    return frame.assign(**{column: frame[column].mask(chosen, value)})


def test_ordinary_data_has_no_warning():
    assert causes(recorded()) == []


@pytest.mark.parametrize("code", [-999.0, -200.0, 0.0, 1e6])
def test_codes_are_suspected_and_declared(code):
    frame = at_random(recorded(), "a", code)
    (text,) = causes(frame)
    setting = "{'a': [0]}" if code == 0 else f"[{code:g}]"
    assert text.startswith(f"column a: {code:g} occurs") and f"missing={setting}" in text
    columns = {**COLUMNS, "missing": {"a": [code]}, "allow_missing_sensors": True}
    partly = kbf.check(frame, **columns, test=0.0)
    assert partly.warnings == [] and partly.columns[1]["missing"] == pytest.approx(0.1, abs=0.04)


@pytest.mark.parametrize(
    "values",
    [
        np.random.default_rng(0).poisson(0.7, 500),  # counts, most of them 0
        np.clip(np.random.default_rng(0).normal(size=500), 0, 1),  # saturation
        np.random.default_rng(0).integers(0, 2, 500),  # a flag
        np.random.default_rng(0).exponential(size=500),
        np.r_[np.zeros(3), np.random.default_rng(0).normal(9, 1, 500)],
    ],
)
def test_other_values_are_no_codes(values):
    assert codes_in(torch.from_numpy(values.astype(float))) == []


@pytest.mark.parametrize("codes", [(-999.0, -998.0), (9999.0, -999.0), (1e20, 65535.0)])
def test_several_codes_of_a_column(codes):
    rng = np.random.default_rng(3)
    frame = recorded().assign(u=recorded(seed=5).x)
    for code in codes:
        frame["a"] = frame.a.mask(rng.random(300) < 0.1, code)
    (text,) = causes(frame)
    assert "and" in text and all(f"{code:g}" in text.split("far")[0] for code in codes)
    settings = {"missing": {"a": list(codes)}, "allow_missing_sensors": True}
    assert causes(frame, **settings) == []


def test_a_large_code_leaves_the_other_columns():
    """1e20 is no reason to call columns of ordinary size constant."""
    (text,) = causes(at_random(recorded(), "a", 1e20))
    assert text.startswith("column a: 1e+20 occurs")


def test_codes_of_controls_are_suspected():
    frame = recorded().assign(u=recorded(seed=5).x)
    assert causes(frame, controls=["u"]) == []
    (text,) = causes(at_random(frame, "u", -999.0), controls=["u"])
    assert text.startswith("column u: -999 occurs")


def smooth(steps: int = 400) -> pd.DataFrame:
    """A slow state, and sensors whose values never occur twice."""
    x = np.cumsum(np.random.default_rng(4).normal(size=steps))
    noise = 0.1 * np.random.default_rng(5).normal(size=(steps, 2))
    return pd.DataFrame({"x": x, "a": x - x.mean() + noise[:, 0], "b": noise[:, 1] - x})


def test_zero_in_the_middle_of_a_range_is_suspected_where_it_is_a_jump():
    frame = smooth()
    assert causes(frame) == []
    (text,) = causes(at_random(frame, "a", 0.0, 0.05))
    assert text.startswith("column a: 0 occurs") and "missing={'a': [0]}" in text
    # a sensor that stands still at 0 was slow before; one that is rounded repeats all values
    at_rest = frame.assign(a=np.sign(frame.a) * np.maximum(frame.a.abs() - 1, 0))
    assert causes(at_rest) == []
    rounded = causes(at_random(frame.assign(a=frame.a.round(0)), "a", 0.0, 0.05))
    assert rounded == []
    # on the states the report is silent: zero may be one of them
    assert not any("stands for" in text for text in causes(at_random(frame, "x", 0.0, 0.05)))


def test_sensors_that_are_stuck_are_named():
    frame = smooth()
    k = int((frame.b - frame.b.median()).abs()[:250].argmin())
    stuck = frame.assign(b=frame.b.mask((frame.index >= k) & (frame.index < k + 150), frame.b[k]))
    found = [text for text in causes(stuck) if "stuck" in text]
    assert len(found) == 1 and f"in 150 rows from DataFrame, row {k} on" in found[0]
    # sensors that are saturated, rounded or slow give equal values, too
    for ordinary in (
        frame.assign(b=frame.b.clip(upper=float(frame.b.quantile(0.6)))),
        frame.round(0),
        frame.assign(b=frame.b.where(np.arange(400) % 5 == 0).ffill()),
    ):
        assert not any("stuck" in text for text in causes(ordinary))


def test_codes_in_files_of_both_doors(tmp_path, capsys):
    frame = at_random(recorded(), "a", -999.0)
    frame.to_csv(tmp_path / "a.csv", index=False)
    words = ["data=own", f"data.path={tmp_path}/a.csv", "data.states=[x]"]
    words += ["data.observations=[a,b]", "model=kalman", "logger=none", "data.test=0"]
    words += ["trainer.enable_progress_bar=false", f"run_dir={tmp_path}/run"]
    assert main(["train", *words]) == 0
    assert "data.missing=[-999]" in capsys.readouterr().out
    words += ["data.missing=[-999]", "data.allow_missing_sensors=true", "overwrite=true"]
    assert main(["train", *words]) == 0
    assert "-999" not in capsys.readouterr().out
    fitted = kbf.fit(
        frame,
        **COLUMNS,
        missing=[-999],
        model="kalman",
        progress=False,
    )
    checkpoint = tmp_path / "run" / "checkpoints" / "best.ckpt"
    line = [f"checkpoint={checkpoint}", f"input={tmp_path}/a.csv", f"output={tmp_path}/out.csv"]
    assert main(["filter", *line]) == 0
    found = pd.read_csv(tmp_path / "out.csv").x
    assert found.to_numpy() == pytest.approx(fitted.filter(frame).mean[:, 0], abs=1e-6)
    live = fitted.online()
    for row in frame[:40].itertuples():
        live.step({"a": row.a, "b": row.b})
    assert live.estimate["x"] == pytest.approx(found[39], abs=1e-6)
    with pytest.raises(kbf.DataError, match="missing must be a list of numbers"):
        kbf.fit(frame, **COLUMNS, missing=["-999"], model="kalman")


def test_sensors_that_die_are_named():
    frame = recorded()
    frame.loc[150:, "b"] = np.nan
    (text,) = causes(frame, allow_missing_sensors=True)
    assert "column b has no value after DataFrame, row 149: 150 of 300 rows lack it" in text
    assert "allow_missing_sensors" not in text
    assert any(
        "allow_missing_sensors=True" in t for t in causes(frame, allow_missing_sensors=False)
    )
    late = recorded().assign(b=recorded().b.where(np.arange(300) >= 100))
    (text,) = causes(late, allow_missing_sensors=True)
    assert text == "column b has no value before DataFrame, row 100: 100 of 300 rows lack it"
    frame.loc[:, "b"] = recorded().b.where(np.arange(300) % 3 > 0)
    assert causes(frame, allow_missing_sensors=True) == []


def test_alternating_sensors_name_the_setting(tmp_path, capsys):
    frame = recorded()
    frame.loc[::2, "a"], frame.loc[1::2, "b"] = np.nan, np.nan
    with pytest.raises(kbf.DataError, match="allow_missing_sensors=True uses steps with some"):
        kbf.fit(frame, **COLUMNS, allow_missing_sensors=False)
    frame.to_csv(tmp_path / "a.csv", index=False)
    words = [f"data.path={tmp_path}/a.csv", "data.states=[x]", "data.observations=[a,b]"]
    assert main(["train", "data=own", *words, f"run_dir={tmp_path}/run"]) == 2
    assert "data.allow_missing_sensors=true" in capsys.readouterr().err
    assert causes(frame, allow_missing_sensors=True) == []
    frame.loc[:10, ["a", "b"]] = 0.5
    without = causes(frame, allow_missing_sensors=False)
    assert any("only 11 of 300 rows have all observations; allow_m" in text for text in without)


@pytest.mark.parametrize(
    ("leak", "named"),
    [
        (lambda x: 2 * x + 1, "exact function of x"),
        (np.exp, "exact function of x"),
        (lambda x: -np.arctan(x), "exact function of x"),
        (lambda x: (x - 1) ** 2, "exact function of x"),
        (np.abs, "exact function of x"),
        (lambda x: x.shift(1), "exact function of x in the row before"),
        (lambda x: 3 - x.shift(-1), "exact function of x in the row after"),
        (lambda x: x.shift(3), "exact function of x 3 rows before"),
        (lambda x: 5 * x.diff(), "exact function of x and its moves"),
        (lambda x: (2 * x + 1).round(1), "exact function of x"),
    ],
)
def test_sensors_that_are_functions_of_the_state_are_reported(leak, named):
    frame = recorded().assign(s=lambda f: leak(f.x).ffill().bfill())
    found = causes(frame[1:-1], observations=["a", "s"])
    assert any("column s is an" in text and named in text for text in found)
    precise = frame.assign(s=frame.s + 1e-3 * np.random.default_rng(0).normal(size=300))
    assert not any("function" in text for text in causes(precise, observations=["a", "s"]))


def test_a_distance_of_two_states_is_a_function_of_both():
    frame = recorded().assign(y=recorded(seed=1).x)
    exact = frame.assign(a=np.hypot(frame.x, frame.y), b=frame.x * frame.y)
    found = [text for text in causes(exact, states=["x", "y"]) if "function" in text]
    assert [text.split(" is")[0] for text in found] == ["column a", "column b"]
    assert all("exact function of x, y:" in text for text in found)
    two = pd.concat([exact.assign(run="r"), exact.assign(run="s")])
    shifted = two.assign(a=two.groupby("run").x.shift(1).fillna(0.0))
    found = causes(shifted, states=["x", "y"], recording="run")
    assert any("column a is an exact function of x, y in the row before" in t for t in found)
    noisy = exact.assign(a=exact.a + 1e-2 * frame.b, b=exact.b + 1e-2 * frame.a)
    assert not any("function" in text for text in causes(noisy, states=["x", "y"]))


@pytest.mark.parametrize("unit", ["radians", "degrees"])
def test_a_direction_is_a_function_of_two_states(unit):
    frame = recorded(600).assign(y=recorded(600, seed=1).x)
    bearing = np.arctan2(frame.y - 1, frame.x + 2)
    noisy = bearing + 1e-2 * np.random.default_rng(0).normal(size=600)
    for angle, exact in ((bearing, True), (noisy, False)):
        angle = np.rad2deg(angle) % 360 if unit == "degrees" else angle
        settings = {"states": ["x", "y"], "angles": {"s": unit}, "observations": ["a", "s"]}
        found = causes(frame.assign(s=angle), **settings)
        assert any("column s is an exact function of x, y" in text for text in found) == exact


def test_a_state_that_is_observed_is_reported():
    (text,) = causes(recorded(), observations=["a", "x"])
    assert text == "x is a state and an observation: the error will be too low"


def test_shuffled_rows_are_reported():
    (text,) = causes(recorded().sample(frac=1, random_state=0))
    assert "were the rows shuffled?" in text
    fast = recorded().assign(x=np.cos(2.5 * np.arange(300)), a=np.sin(2.5 * np.arange(300)))
    assert not any("shuffled" in text for text in causes(fast))


def controlled(timing: str, steps: int = 400) -> pd.DataFrame:
    rng, z = np.random.default_rng(0), np.zeros(steps)
    u = rng.normal(size=steps)
    for t in range(1, steps):
        z[t] = 0.9 * z[t - 1] + u[t if timing == "into" else t - 1] + 0.05 * rng.normal()
    return pd.DataFrame({"x": z, "u": u, "o": z + 0.5 * rng.normal(size=steps)})


@pytest.mark.parametrize("actual", ["into", "from"])
def test_controls_are_compared_in_both_alignments(actual, tmp_path):
    frame, columns = controlled(actual), {"states": ["x"], "observations": ["o"]}
    other = "from" if actual == "into" else "into"
    (text,) = kbf.check(frame, **columns, controls=["u"], control_timing=other).warnings
    assert f"control_timing={actual!r}" in text
    assert kbf.check(frame, **columns, controls=["u"], control_timing=actual).warnings == []
    settings = {**columns, "controls": ["u"], "model": "kalman", "progress": False}
    right = kbf.fit(frame[:300], **settings, control_timing=actual)
    score = right.evaluate(frame[300:], baselines=False).nmse["x"]
    assert score < 0.02
    frame[300:].to_csv(tmp_path / "new.csv", index=False)
    right.save(tmp_path / "a.ckpt")
    words = [f"checkpoint={tmp_path}/a.ckpt", f"input={tmp_path}/new.csv"]
    assert main(["filter", *words, f"output={tmp_path}/out.csv"]) == 0
    found = pd.read_csv(tmp_path / "out.csv").x
    assert found.to_numpy() == pytest.approx(right.filter(frame[300:]).mean[:, 0], abs=1e-6)
    with pytest.raises(kbf.DataError, match="control_timing must be into or from"):
        kbf.check(frame, **columns, controls=["u"], control_timing="after")


def test_controls_of_no_effect_are_not_compared():
    z, u = torch.from_numpy(recorded().x.to_numpy()[:, None]), torch.randn(300, 1).double()
    assert control_warning([FileRecording("a", z, z, controls=u)], "into") == []


@pytest.mark.parametrize(
    ("unit", "values", "wrong"),
    [
        ("radians", "wrapped degrees", True),
        ("degrees", "wrapped degrees", False),
        ("degrees", "wrapped radians", True),
        ("radians", "wrapped radians", False),
        ("radians", "turns in radians", False),
        ("degrees", "small degrees", False),
        ("radians", "degrees without a wrap", True),
    ],
)
def test_units_of_angles(unit, values, wrong):
    rng = np.random.default_rng(0)
    angle = np.cumsum(0.2 * rng.normal(size=600))
    found = {
        "wrapped degrees": np.rad2deg(angle) % 360,
        "wrapped radians": np.arctan2(np.sin(angle), np.cos(angle)),
        "turns in radians": np.linspace(0, 300, 600),
        "small degrees": 2 * np.sin(angle),
        "degrees without a wrap": 90 + 80 * np.sin(angle),
    }[values]
    told = unit_warnings("h", [torch.from_numpy(found)], unit)
    assert bool(told) == wrong
    assert not told or f"angle_unit={'degrees' if unit == 'radians' else 'radians'}" in told[0]


def test_counts_are_neither_angles_nor_outliers():
    rng = np.random.default_rng(0)
    frame = recorded(600).assign(spikes=np.minimum(rng.poisson(0.8, 600), 6))
    frame.loc[::50, "spikes"] = 6
    assert causes(frame, observations=["a", "spikes"]) == []


def test_an_undeclared_angle_of_every_other_row_is_found():
    frame = recorded(600).assign(a=(np.cumsum(np.full(600, 0.11)) + 3) % (2 * np.pi) - np.pi)
    found = causes(frame.assign(a=frame.a.where(frame.index % 2 == 0)), allow_missing_sensors=True)
    assert any("column a: it jumps by 6.283" in text for text in found)


def test_no_conclusion_where_a_cause_is_known(tmp_path, capsys):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": recorded().x, "a": rng.normal(size=300), "b": rng.normal(size=300)})
    words = ["data=own", f"data.path={tmp_path}/a.csv", "data.states=[x]", "logger=none"]
    words += ["data.observations=[a,b]", "model=kalman", "calibrate=false", "overwrite=true"]
    words += [f"run_dir={tmp_path}/run", "trainer.enable_progress_bar=false"]
    for code in (None, -999.0):
        new = frame if code is None else at_random(frame, "a", code, 0.3)
        new.to_csv(tmp_path / "a.csv", index=False)
        assert main(["train", *words]) == 0
        told = " ".join(capsys.readouterr().out.split())
        assert ("these observations do not determine it" in told) == (code is None)
        assert ("this may be the cause: column a: -999" in told) == (code is not None)


@pytest.mark.parametrize("columns", [2, 9])
def test_nearest_points_are_those_of_all_distances(columns):
    """By a tree, and by all distances where there are many columns."""
    generator = torch.Generator().manual_seed(0)
    points, fresh = (torch.randn(n, columns, generator=generator).double() for n in (300, 40))
    when, chosen = torch.arange(300), torch.arange(0, 300, 7)
    torch.testing.assert_close(nearest(fresh, points), torch.cdist(fresh, points).amin(1))
    distances = torch.cdist(points[chosen], points)
    distances[(chosen[:, None] - when).abs() <= 10] = np.inf
    found = nearest(points[chosen], points, (when[chosen], when))
    torch.testing.assert_close(found, distances.amin(1))


def test_fingerprints_tell_rows_apart():
    rng = np.random.default_rng(0)
    obs = torch.from_numpy(rng.integers(0, 3, (4000, 3)).astype("float64"))
    states = torch.from_numpy(rng.integers(0, 3, (4000, 2)).astype("float64"))
    hashes = fingerprints(Recording(states, obs, None))
    together = torch.cat([obs, states], 1)
    assert len(np.unique(hashes)) == len(together.unique(dim=0)) == 243
    assert (hashes[0] == hashes).tolist() == (together == together[0]).all(1).tolist()


def test_a_sensor_that_drifts_away_has_no_outliers():
    frame = recorded(600)
    drift = frame.a + 40 * np.maximum(0, np.arange(600) / 600 - 0.9) ** 2 * 400
    assert not any("outliers" in text for text in causes(frame.assign(a=drift)))
    far = frame.a.where(np.arange(600) % 100 != 50, 400.0 + np.arange(600))
    assert any("6 outliers" in text for text in causes(frame.assign(a=far)))


def test_heavy_tails_are_no_outliers():
    """Bumps of a road: some accelerations are large, and others nearly as large."""
    tail = np.random.default_rng(0).standard_t(3, size=2000)
    assert np.abs(tail).max() > 8 * np.diff(np.quantile(tail, [0.25, 0.75]))[0] / 1.349
    frame = recorded(2000).assign(a=tail)
    assert not any("outliers" in text for text in causes(frame))
    frame.loc[[100, 900, 1500], "a"] = [300.0, -350.0, 400.0]
    (text,) = [text for text in causes(frame) if "outliers" in text]
    assert "column a: 3 outliers (first: 300 at DataFrame, row 100)" in text


def test_a_code_of_one_column_is_found_in_others():
    """Also where their range is wide; it is no bound, and rows of codes are no copies."""
    frame = recorded()
    gone = np.random.default_rng(2).random(300) < 0.2
    wide = (400 * frame.b.abs()).mask(gone, -200)
    assert codes_in(torch.from_numpy(wide.to_numpy(copy=True))) == []  # alone it may be a value
    assert not any("-200" in text for text in causes(frame.assign(b=wide)))
    both = frame.assign(a=frame.a.mask(gone, -200), b=wide)
    (text,) = causes(both)
    assert text.startswith("column a: -200 occurs") and "so it does in b. If" in text
    (text,) = causes(both.assign(x=frame.x.mask(gone, -200)))
    assert text.startswith("column x: -200 occurs") and "so it does in a, b. If" in text


def test_a_control_of_zero_is_off():
    frame = recorded().assign(u=30 + recorded(seed=5).x.abs())
    assert causes(at_random(frame, "u", 0.0), controls=["u"]) == []
