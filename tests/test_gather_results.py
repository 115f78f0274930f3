"""The script that puts the tables of an experiment into one folder."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "gather_results.py"


@pytest.fixture
def folders(tmp_path):
    """What two comparisons leave, with columns of their own."""
    made = []
    for name, extra in (("clutter", ""), ("fork", ",energy_score")):
        made.append(folder := tmp_path / name)
        folder.mkdir()
        more = ",0.5" if extra else ""
        rows = [
            f"{name},{n},{model},0.{n},0.01{more}" for n in (300, 1000) for model in ("kbf", "lstm")
        ]
        (folder / "results.csv").write_text(
            "\n".join([f"data,n_train,model,excess,excess_se{extra}", *rows]) + "\n"
        )
        (folder / "runs.csv").write_text(
            f"data,n_train,seed,model,test.mse\n{name},300,0,kbf,0.1\n"
        )
        (folder / "about.json").write_text(
            json.dumps({"command": f"kbf compare data={name}", "commits": ["abc"], "torch": "2"})
        )
    return made


def gather(*arguments):
    return subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True
    )


@pytest.mark.slow
def test_tables_stand_one_below_the_other(folders, tmp_path):
    done = gather(tmp_path / "all", *folders)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "all" / "results.csv").open()))
    assert [(row["data"], row["model"]) for row in rows[::2]] == [("clutter", "kbf")] * 2 + [
        ("fork", "kbf")
    ] * 2
    assert [row["energy_score"] for row in rows] == [""] * 4 + ["0.5"] * 4
    about = json.loads((tmp_path / "all" / "about.json").read_text())
    assert about["command"] == ["kbf compare data=clutter", "kbf compare data=fork"]
    assert (tmp_path / "all" / "comparison.png").stat().st_size > 5000
    assert not (tmp_path / "all" / "wilcoxon.csv").exists()  # there were none

    (more := tmp_path / "more").mkdir()  # what was gathered is gathered with another table
    rows = (folders[0] / "results.csv").read_text().replace("clutter", "spikes")
    (more / "results.csv").write_text(rows)
    (more / "about.json").write_text(
        json.dumps({"command": "kbf compare data=spikes", "commit": "def"})
    )
    assert gather(tmp_path / "three", tmp_path / "all", more).returncode == 0
    about = json.loads((tmp_path / "three" / "about.json").read_text())
    assert about["command"][-1] == "kbf compare data=spikes" and len(about["command"]) == 3


@pytest.mark.slow
def test_both_kinds_of_paired_tests_are_kept(folders, tmp_path):
    tests = {"wilcoxon.csv": "p_value", "corrected_t.csv": "difference_se"}
    for folder, (name, column) in zip(folders, tests.items(), strict=True):
        (folder / name).write_text(f"data,first,second,{column}\n{folder.name},kbf,lstm,0.03\n")
    assert gather(tmp_path / "all", *folders).returncode == 0
    for folder, (name, column) in zip(folders, tests.items(), strict=True):
        (row,) = csv.DictReader((tmp_path / "all" / name).open())
        assert (row["data"], row[column]) == (folder.name, "0.03")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("choice", "told"), [((0, 0), "in two of these folders"), ((0, 2), "no results.csv in")]
)
def test_what_cannot_be_put_together_is_told(folders, tmp_path, choice, told):
    (tmp_path / "empty").mkdir()
    done = gather(tmp_path / "all", *([*folders, tmp_path / "empty"][k] for k in choice))
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "all").exists()
