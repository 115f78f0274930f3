"""Cross-validation: disjoint folds, a gap, and standard errors for folds that share data."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch
from sklearn.model_selection import KFold, LeaveOneGroupOut, TimeSeriesSplit

import kbf
from kbf.data.files.folds import Part, parts_of, without_near
from kbf.data.files.layout import FileRecording
from kbf.data.windows import Span

COLUMNS = {"states": ["z"], "observations": ["x"], "recording": "run"}


def frame(runs: int = 3, steps: int = 40, seed: int = 0) -> pd.DataFrame:
    """Autoregressions with noise, in recordings whose rows take turns."""
    rng = np.random.default_rng(seed)
    z = np.zeros((steps, runs))
    for t in range(1, steps):
        z[t] = 0.8 * z[t - 1] + rng.normal(size=runs)
    x = z + 0.3 * rng.normal(size=z.shape)
    names = np.tile([f"r{k}" for k in range(runs)], steps)
    return pd.DataFrame({"run": names, "z": z.ravel(), "x": x.ravel()})


def recordings(lengths: list[int]) -> list[FileRecording]:
    """Recordings of a DataFrame without states, whose rows are numbered from 0."""
    rows = torch.arange(sum(lengths)).split(lengths)
    return [
        FileRecording(f"r{k}", torch.zeros(n, 1), file="DataFrame", rows=each)
        for k, (n, each) in enumerate(zip(lengths, rows, strict=True))
    ]


def steps(spans: list[Span]) -> set[tuple[int, int]]:
    return {(k, t) for k, start, stop in spans for t in range(start, stop)}


@pytest.mark.parametrize(
    ("lengths", "cv", "folds"),
    [
        ([31], 4, 4),
        ([9, 14], 3, 3),
        ([5, 6, 7, 8], 2, 2),
        ([5, 6, 7], "leave_one_recording_out", 3),
        ([31], KFold(4), 4),
        ([9, 14], KFold(3, shuffle=True, random_state=0), 3),
        ([5, 6, 7], LeaveOneGroupOut(), 3),
    ],
)
def test_folds_are_disjoint_and_cover_all_rows(lengths, cv, folds):
    everything = {(k, t) for k, n in enumerate(lengths) for t in range(n)}
    parts = parts_of(recordings(lengths), cv)
    tested = [steps(part.test) for part in parts]
    assert len(parts) == folds
    assert sum(map(len, tested)) == len(set.union(*tested)) == len(everything)
    for part, test in zip(parts, tested, strict=True):
        assert steps(part.train) == everything - test
        for gap in (0, 1, 2):
            near = {(k, t + lag) for k, t in test for lag in range(-gap, gap + 1)}
            assert steps(without_near(part, gap)) == everything - near


def test_a_block_in_the_middle_leaves_two_recordings():
    part = parts_of(recordings([30]), 3)[1]
    assert part == Part([Span(0, 0, 10), Span(0, 20, 30)], [Span(0, 10, 20)])
    assert without_near(part, 4) == [Span(0, 0, 6), Span(0, 24, 30)]
    ahead = parts_of(recordings([30]), TimeSeriesSplit(2))
    assert [steps(p.train) for p in ahead] == [{(0, t) for t in range(n)} for n in (10, 20)]


def test_scores_are_those_of_a_filter_that_is_fitted_by_hand():
    data = frame()
    found = kbf.cross_validate(data, **COLUMNS, models=["kalman", "mean"], cv=3)
    table = found.to_frame()
    assert list(table.test_part.unique()) == ["r0", "r1", "r2"]
    for k, run in enumerate(("r0", "r1", "r2")):
        fitted = kbf.fit(data[data.run != run], **COLUMNS, model="kalman", progress=False)
        test = data[data.run == run]
        made = fitted.filter(test)
        np.testing.assert_allclose(found.estimates["kalman"][k].mean, made.mean, rtol=1e-9)
        np.testing.assert_allclose(
            found.estimates["kalman"][k].log_likelihood, made.log_likelihood, rtol=1e-9
        )
        (row,) = table[(table.fold == k) & (table.model == "kalman")].itertuples()
        errors = made.mean[:, 0] - test.z.to_numpy()
        assert row.rmse == pytest.approx(math.sqrt((errors**2).mean()))
        assert row.nmse == pytest.approx((errors**2).mean() / test.z.var(ddof=0))
        lower, upper = made.interval(0.95)
        inside = (lower[:, 0] <= test.z) & (test.z <= upper[:, 0])
        assert row.coverage_95 == pytest.approx(inside.mean())
        assert (row.n_train, row.n_test) == (80, 40)


def test_standard_errors_and_tests_are_corrected():
    """Against the formula: variance of the mean (1/J + n_test / n_train) s^2."""
    found = kbf.cross_validate(frame(), **COLUMNS, models=["kalman", "mean"], cv=3)
    table = found.to_frame().set_index(["model", "fold"]).rmse
    summary = found.summary()
    for name in ("kalman", "mean"):
        assert summary.loc[(name, "z"), "rmse"] == pytest.approx(table[name].mean())
        corrected = math.sqrt((1 / 3 + 40 / 80) * table[name].var(ddof=1))
        assert summary.loc[(name, "z"), "rmse_se"] == pytest.approx(corrected)
    (row,) = found.compare("mean").itertuples()
    apart = table["kalman"] - table["mean"]
    assert row.difference == pytest.approx(apart.mean()) and row.difference < 0
    assert row.se == pytest.approx(math.sqrt((1 / 3 + 1 / 2) * apart.var(ddof=1)))
    expected = 2 * scipy.stats.t.sf(abs(row.difference / row.se), 2)
    assert row.p_value == pytest.approx(expected)
    assert "3 folds" in repr(found) and "rmse_se" in found._repr_html_()
    with pytest.raises(ValueError, match="'ekf' is not among kalman, mean"):
        found.compare("ekf")
    with pytest.raises(ValueError, match="score must be"):
        found.compare("mean", score="mse")


def test_equal_models_do_not_differ():
    found = kbf.cross_validate(frame(), **COLUMNS, models=["kalman"], cv=3)
    rows = found.to_frame().to_dict("records")
    twin = [row | {"model": "twin", "rmse": row["rmse"]} for row in rows]
    both = kbf.CrossValidation(
        [*rows, *twin], {"kalman": found.estimates["kalman"], "twin": []}, found.gap
    )
    (row,) = both.compare("kalman").itertuples()
    assert row.difference == 0 and not row.p_value < 0.05


def test_one_split_has_no_standard_error():
    data = frame(1, 60)[["z", "x"]]
    pairs = [(np.arange(40), np.arange(40, 60))]
    found = kbf.cross_validate(data, states="z", observations="x", models="kalman", cv=pairs, gap=5)
    row = found.summary().loc[("kalman", "z")]
    assert row.folds == 1 and math.isnan(row.rmse_se) and row.rmse > 0
    assert found.to_frame().n_train.tolist() == [35] and found.gap == 5


def test_arrays_blocks_and_processes():
    """Blocks of one recording, with the gap of its autocorrelation; workers change no number."""
    data = frame(1, 90)
    arrays = {"states": data[["z"]].to_numpy(), "observations": data[["x"]].to_numpy()}
    found = kbf.cross_validate(**arrays, models=["window_ridge"], cv=3)
    table = found.to_frame()
    assert found.gap >= 1
    assert table.n_test.tolist() == [30, 30, 30]
    assert table.n_train.tolist() == [60 - found.gap, 60 - 2 * found.gap, 60 - found.gap]
    assert [len(each) for each in found.estimates["window_ridge"]] == [30, 30, 30]
    again = kbf.cross_validate(**arrays, models=["window_ridge"], cv=3, workers=2)
    pd.testing.assert_frame_equal(again.to_frame(), table)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cv": "five"}, "cv must be a number of folds"),
        ({"cv": 1}, "at least 2 folds"),
        ({"cv": 1000}, "there are only 120 rows"),
        ({"cv": [([0, 1], [1, 2])]}, "row 1 is both a training and a test row"),
        ({"cv": [([0, 1], [120])]}, "rows must be numbers from 0 to 119"),
        ({"cv": []}, "there are no folds"),
        ({"cv": 4, "gap": 40}, "no training rows with known states are left; the gap"),
        ({"gap": -1}, "gap must be a number of rows"),
        ({"models": []}, "models must be one or more"),
        ({"models": ["mean", "mean"]}, "different names"),
        ({"models": ["mean", "kalmann"]}, "there is no model .kalmann.; did you mean"),
        ({"model": "mean"}, "takes models="),
        ({"workers": 0}, "workers must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        kbf.cross_validate(frame(), **COLUMNS, **{"models": ["mean"], "cv": 3, **settings})
