"""The script that makes runs of tables again and compares their digits."""

from __future__ import annotations

import csv
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import check_tables

COMMAND = (
    "kbf compare data=rotation 'n_train=[30]' runs=3 seed=4 'models=[kalman,frame]' particles=50 "
    "workers=0"
)
RUN = {
    "data": "rotation",
    "n_train": "30",
    "seed": "4",
    "model": "kalman",
    "test.mse": "0.5",
    "log_likelihood": "1.25",
}


@pytest.fixture
def results(tmp_path):
    """A table of `kbf compare` and one of a benchmark."""
    for name, command in (("small", COMMAND), ("bench/step", "kbf bench step")):
        (folder := tmp_path / "results" / name).mkdir(parents=True)
        (folder / "about.json").write_text(json.dumps({"command": command, "commit": "abc"}))
    return tmp_path / "results"


@pytest.fixture
def at(monkeypatch):
    monkeypatch.setattr(check_tables, "commit", lambda: "def")


def test_a_score_that_a_row_of_the_table_does_not_have_is_not_compared():
    assert check_tables.difference(RUN | {"log_likelihood": ""}, RUN) == 0
    assert check_tables.difference(RUN, RUN | {"log_likelihood": ""}) == math.inf
    assert check_tables.difference(RUN | {"log_likelihood": "nan"}, RUN) == math.inf


@pytest.mark.parametrize(
    ("made", "apart"),
    [
        ({}, 0.0),
        ({"test.mse": "0.50000000001"}, 2e-11),
        ({"test.mse": "0.4"}, 0.2),
        ({"log_likelihood": "1.5"}, 0.2),
        ({"log_likelihood": "nan"}, math.inf),
        ({"log_likelihood_raw": "1.0"}, 0.0),
    ],
)
def test_every_score_is_compared(made, apart):
    assert check_tables.difference(RUN, RUN | made) == pytest.approx(apart)
    found = check_tables.compared("small", [RUN, RUN | {"seed": "5"}], [RUN | made])
    assert found == {
        "runs": 1,
        "same": int(apart < 1e-4),
        "largest difference": pytest.approx(apart),
    }


def test_other_settings_have_another_folder():
    folders = [
        check_tables.folder_of(words)
        for words in (["runs=1"], ["runs=1", "data.frames=a/lab.npz"], ["runs=1", "n_train=10"])
    ]
    assert folders == ["runs=1", "runs=1_data.frames=a_lab.npz", "runs=1_n_train=10"]


ROW = {"data": "a", "T": "100", "method": "IW", "mse": "0.5", "beta": "0.25", "seconds": "3"}


@pytest.mark.parametrize(
    ("made", "apart"),
    [
        ({"seconds": "9"}, 0.0),
        ({"mse": "0.4"}, 0.2),
        ({"beta": "0.250000000001"}, 0.0),
        ({"beta": "0.5"}, math.inf),  # another bandwidth was selected
        ({"T": "200"}, math.inf),
        ({"extra": "1"}, 0.0),  # a column that the stored table does not have
    ],
)
def test_rows_of_reproductions_are_compared(made, apart):
    found = check_tables.compared_rows("reproduce/a", [ROW | {"T": "400"}, ROW], [ROW | made])
    assert found == {
        "runs": 1,
        "same": int(apart < 1e-4),
        "largest difference": pytest.approx(apart),
    }


def test_reproductions_without_rows_are_refused():
    for kept, made in (([], [ROW]), ([ROW], [])):
        with pytest.raises(ValueError, match="reproduce/a: there are no rows to compare"):
            check_tables.compared_rows("reproduce/a", kept, made)


def test_every_stored_reproduction_has_rows_that_can_be_found():
    """Each row is identified by the columns that are not measured."""
    for about in sorted(check_tables.RESULTS.glob("reproduce/*/about.json")):
        rows = check_tables.stored(about.parent, "reproduce")
        assert rows or about.parent.name == "prior_influence", about
        assert len({check_tables.identity(row) for row in rows}) == len(rows), about.parent.name
        assert not rows or set(rows[0]) & {*check_tables.MEASURED}, about.parent.name


@pytest.mark.slow
def test_a_reproduction_is_checked(results, tmp_path, at):
    command = "kbf reproduce posterior_mean preset=smoke workers=0"
    first = check_tables.made_again("posterior_mean", {"command": command}, tmp_path / "a", [])
    folder = results / "reproduce" / "posterior_mean"
    folder.mkdir(parents=True)
    (folder / "about.json").write_text(json.dumps({"command": command, "commit": "abc"}))
    for factor, answer in ((1.0, 0), (1 + 1e-3, 1)):
        with (folder / "results.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, first[0].keys())
            writer.writeheader()
            writer.writerows(row | {"mse": repr(float(row["mse"]) * factor)} for row in first)
        assert check_tables.main(["reproduce"], results, tmp_path / "runs") == answer


def test_a_run_that_the_table_lacks_is_told():
    with pytest.raises(ValueError, match="small has no run rotation, 30, 7, kalman"):
        check_tables.compared("small", [RUN], [RUN | {"seed": "7"}])


def test_what_cannot_be_checked_is_told(results, tmp_path, monkeypatch, at, capsys):
    for name in ("nothing", "bench"):
        with pytest.raises(ValueError, match=f"no tables {name} in .*; there are small$"):
            check_tables.main([name], results, tmp_path / "runs")
    with pytest.raises(ValueError, match="small was not checked"):
        check_tables.main(["small", "runs=nothing"], results, tmp_path / "runs")
    monkeypatch.setattr(check_tables, "commit", lambda: "def-dirty")
    with pytest.raises(ValueError, match="commit your changes first"):
        check_tables.main(["small"], results, tmp_path / "runs")
    assert not (results / "checked.csv").exists()
    assert check_tables.main([], results) == 0 and "Makes some runs" in capsys.readouterr().out


@pytest.mark.slow
def test_digits_are_found_again_and_one_that_differs_is_seen(results, tmp_path, at, capsys):
    first = check_tables.made_again("small", {"command": COMMAND}, tmp_path / "first", ["runs=1"])
    assert {row["model"] for row in first} == {"kalman", "frame", "floor"} and {
        row["seed"] for row in first
    } == {"4"}
    table = results / "small" / "runs.csv"

    def keep(rows):
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0].keys())
            writer.writeheader(), writer.writerows(rows)

    def checked():
        with (results / "checked.csv").open(newline="") as file:
            return {
                row["table"]: (row["commit"], row["runs"], row["same"])
                for row in csv.DictReader(file)
            }

    keep(first)
    assert check_tables.main(["small"], results, tmp_path / "runs") == 0
    assert checked() == {"small": ("def", "3", "3")}
    keep(
        [
            row | {"test.mse": repr(float(row["test.mse"]) * (1 + 1e-3))}
            if row["model"] == "kalman"
            else row
            for row in first
        ]
    )
    assert check_tables.main(["small"], results, tmp_path / "runs") == 1
    assert checked() == {"small": ("def", "3", "2")}
    assert "is it the machine?" not in capsys.readouterr().out, "there is no commit abc"
    # the code of the table's commit makes what the code makes that is checked out
    here = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True).strip()
    try:
        about = {"command": COMMAND, "commit": here}
        (results / "small" / "about.json").write_text(json.dumps(about))
        assert check_tables.main(["small"], results, tmp_path / "runs") == 0
        with (results / "checked.csv").open(newline="") as file:
            (row,) = csv.DictReader(file)
        assert (row["same"], row["its commit"], row["same at its commit"]) == ("2", here, "3")
        assert f"3 have the scores that the code of {here} has" in capsys.readouterr().out
        code = tmp_path / "runs" / "code" / here
        assert check_tables.checkout(here, tmp_path / "runs") == code
        # other code: its scores are not those of the code that is checked out
        system = code / "kbf" / "ssm.py"
        system.write_text(system.read_text().replace("omega=0.3", "omega=0.5"))
        shutil.rmtree(tmp_path / "runs" / here)
        assert check_tables.main(["small"], results, tmp_path / "runs") == 1
        # code that does not run: what was found stands nevertheless
        shutil.rmtree(code / "kbf" / "commands")
        shutil.rmtree(tmp_path / "runs" / here)
        assert check_tables.main(["small"], results, tmp_path / "runs") == 1
        assert checked() == {"small": ("def", "3", "2")}
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", tmp_path / "runs" / "code" / here])
