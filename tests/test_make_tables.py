"""The script that makes tables again by the commands that they name."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import make_tables

from kbf.runtime.provenance import commit

COMMAND = (
    "kbf compare data=rotation 'n_train=[30]' runs=1 'models=[kalman,frame]' particles=50 workers=0"
)


@pytest.fixture
def results(tmp_path):
    """Two tables, one of them of two commands."""
    several = [COMMAND, COMMAND.replace("rotation", "oscillatory")]
    for name, command in (("small", f"{COMMAND} run_dir=somewhere"), ("both/two", several)):
        (folder := tmp_path / "results" / name).mkdir(parents=True)
        (folder / "about.json").write_text(json.dumps({"command": command, "commit": "abc"}))
        (folder / "runs.csv").write_text("seconds\n1800\n1800\n")
    return tmp_path / "results"


def test_they_are_listed_with_commit_and_hours(results, capsys):
    make_tables.main([], results)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:5] == ["both/two", "abc", "1.0", "h", "kbf"] and len(lines) == 3
    assert "run_dir" not in lines[2]
    make_tables.main(["--help"], results)
    assert "makes those of a folder" in capsys.readouterr().out


def test_every_table_of_the_project_names_its_commands(capsys):
    make_tables.main([])
    assert capsys.readouterr().out.count("kbf compare") > 50
    assert not any("folder" in about for about in make_tables.tables(make_tables.RESULTS).values())


@pytest.mark.slow
def test_a_table_is_replaced_by_what_its_command_makes_now(results, tmp_path, monkeypatch):
    monkeypatch.setattr(make_tables, "commit", lambda: "def")
    make_tables.main(["small", "both", "particles=40"], results, tmp_path / "runs")
    rows = list(csv.DictReader((results / "small" / "results.csv").open()))
    assert {row["model"] for row in rows} == {"kalman", "frame"} and all(
        float(row["mse"]) > 0 for row in rows
    )
    assert (
        json.loads((results / "small" / "about.json").read_text())["command"]
        == COMMAND.replace(" particles=50", "") + " particles=40"
    )
    assert not (results / "small" / "comparison.png").exists()  # there was none
    for about in results.rglob("about.json"):
        assert not {"folder", "cells"} & {*json.loads(about.read_text())}
    assert (tmp_path / "runs" / "def" / "small" / "cells").is_dir()
    rows = list(csv.DictReader((results / "both" / "two" / "runs.csv").open()))
    assert {row["data"] for row in rows} == {"rotation", "oscillatory"}


def test_what_cannot_be_made_is_told_and_stays(results, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no tables nothing in"):
        make_tables.main(["nothing"], results, tmp_path / "runs")
    monkeypatch.setattr(make_tables, "commit", lambda: "def-dirty")
    with pytest.raises(ValueError, match="commit your changes first"):
        make_tables.main(["small"], results, tmp_path / "runs")
    monkeypatch.setattr(make_tables, "commit", lambda: "def")
    with pytest.raises(ValueError, match="small stays as it was"):
        make_tables.main(["small", "runs=nothing"], results, tmp_path / "runs")
    assert json.loads((results / "small" / "about.json").read_text())["commit"] == "abc"


def test_tables_that_were_just_made_are_not_a_change_of_the_commit(tmp_path):
    def git(*words):
        subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *words],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    (tmp_path / "data" / "results").mkdir(parents=True)
    table, code = tmp_path / "data" / "results" / "table.csv", tmp_path / "code.py"
    table.write_text("1"), code.write_text("1")
    git("init"), git("add", "."), git("commit", "-m", "all")
    table.write_text("2"), (tmp_path / "untracked").write_text("1")
    clean = commit(tmp_path)
    code.write_text("2")
    assert (
        len(clean) >= 7
        and commit(tmp_path) == f"{clean}-dirty"
        and commit(tmp_path / "gone") is None
    )
