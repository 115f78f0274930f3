"""`kbf compare` on recordings of the user: each run tests another fold, or there is no ±."""

import csv
import math

import pytest

from kbf.cli import main
from kbf.commands.compare import make_cells, with_folds, with_shapes
from kbf.commands.support.comparison_report import overlap_of
from kbf.config import configure
from kbf.ssm import oscillatory, simulate

COLUMNS = ["data.states=[x,y]", "data.observations=[a,b]"]
SETTINGS = ["data.recording=run", "n_train=null", "workers=0", "particles=50"]


@pytest.fixture
def table(tmp_path, normal):
    """Three recordings of 40 steps."""
    path = tmp_path / "rec.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["run", "x", "y", "a", "b"])
        for run in "uvw":
            drawn = simulate(oscillatory(), normal(2), 40)
            for z, x in zip(drawn.states.tolist(), drawn.obs.tolist(), strict=True):
                writer.writerow([run, *z, *x])
    return path


def compared(table, *words):
    directory = table.parent / "compare"
    all_words = ["compare", "data=own", f"data.path={table}", *COLUMNS, *SETTINGS, *words]
    assert main([*all_words, "models=kalman,window_ridge", f"run_dir={directory}"]) == 0
    files = {path.name for path in directory.glob("*.csv")}
    return files, {name: list(csv.DictReader((directory / name).open())) for name in files}


def test_each_run_tests_another_fold(table, capsys):
    files, tables = compared(table, "runs=3")
    assert files == {"results.csv", "runs.csv", "corrected_t.csv"}
    runs = [row for row in tables["runs.csv"] if row["model"] == "kalman"]
    assert [row["test_part"] for row in runs] == ["u", "v", "w"], "whole recordings"
    assert {row["n_train"] for row in runs} == {"80"}
    found = [float(row["test.mse"]) for row in runs]
    assert len(set(found)) == 3
    (result,) = [row for row in tables["results.csv"] if row["model"] == "kalman"]
    mean = sum(found) / 3
    spread = sum((each - mean) ** 2 for each in found) / 2
    assert float(result["se"]) == pytest.approx(math.sqrt((1 / 3 + 40 / 80) * spread))
    assert float(tables["corrected_t.csv"][0]["p_value"]) > 0
    told = " ".join(capsys.readouterr().out.split())
    assert "each run tests another of 3 folds" in told and "±" in told


def test_a_fixed_split_has_no_errors_and_no_tests(table, capsys):
    files, tables = compared(table, "runs=2", "data.split=recording", "data.test=[w]")
    assert files == {"results.csv", "runs.csv"}
    assert {row["test_part"] for row in tables["runs.csv"]} == {"w"}
    assert {row["se"] for row in tables["results.csv"]} == {"nan"}
    told = " ".join(capsys.readouterr().out.split())
    assert "±" not in told
    assert "every run has the same test part (w): no standard errors and no tests" in told
    assert "data.test or data.validation names recordings" in told


def cells_of(table, *words):
    words = ["data=own", f"data.path={table}", *COLUMNS, *SETTINGS, *words]
    return make_cells(with_shapes(with_folds(configure("compare", words))), table.parent)


def test_blocks_where_there_are_fewer_recordings_than_runs(table):
    cells = [c for c in cells_of(table, "runs=4", "models=[lstm]", "seed=7") if c.model == "lstm"]
    data = [cell.config["data"] for cell in cells]
    assert [(d["split"], d["fold"], d["folds"], d["source"]["fold"]) for d in data] == [
        ("fold", k, 4, k) for k in range(4)
    ]
    assert [cell.seed for cell in cells] == [7, 8, 9, 10]
    sizes = [cell.config["n_train"] for cell in cells]
    assert sizes[1] < sizes[0] and sizes[1] < 90, "the middle blocks have a gap on both sides"
    assert {cell.n_train for cell in cells} == {round(sum(sizes) / 4)}
    assert {c.config["n_train"] for c in cells_of(table, "runs=4", "n_train=[50]")} == {50}


def test_what_keeps_its_split(table):
    for words in (["runs=1"], ["data.test=0"], ["data.fold=1", "data.folds=3", "data.split=fold"]):
        words = ["data=own", f"data.path={table}", *COLUMNS, *SETTINGS, *words]
        assert "recipes" not in with_folds(configure("compare", words))
    assert "recipes" not in with_folds(configure("compare", ["data=rotation", "runs=3"]))
    with pytest.raises(ValueError, match=r"data\.folds=2: each run tests another fold"):
        cells_of(table, "runs=3", "data.folds=2")
    with pytest.raises(ValueError, match="3 recordings cannot be 4 folds"):
        cells_of(table, "runs=4", "data.split=recording")


def test_overlap_of_runs():
    runs = [{"seed": k, "test_part": f"r{k}", "test_share": 0.2 + 0.1 * k} for k in range(3)]
    assert overlap_of(runs) == pytest.approx(0.3)
    assert overlap_of(runs[:1]) == overlap_of([{"seed": 0}, {"seed": 1}]) == 0
    assert math.isnan(overlap_of([runs[0], runs[0] | {"seed": 5}]))


def test_default_models_are_those_that_recordings_allow(table):
    names = {cell.model for cell in cells_of(table, "runs=2")}
    assert {"kbf", "kalman", "lstm"} <= names and not names & {"ekf", "ukf", "particle"}
    with pytest.raises(ValueError, match="model ekf requires the equations"):
        cells_of(table, "runs=2", "models=[kalman,ekf]")
