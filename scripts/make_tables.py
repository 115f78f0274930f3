#!/usr/bin/env python
"""Makes tables of data/results/ again, each by the command that its about.json names, at the commit
that is checked out.

    .venv/bin/python scripts/make_tables.py    # lists them: command, commit, hours of one core
    .venv/bin/python scripts/make_tables.py calibration workers=2    # makes those of a folder

Hours are counted as if each model made its own encoders of images; they are made once. Runs go to
runs/tables/COMMIT/NAME, and go on where they were stopped; a table is replaced once all of its
commands are done.
"""

from __future__ import annotations

import csv
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from gather_results import commands, gather, stored_about

from kbf.runtime.atomic_files import copy, write_json
from kbf.runtime.provenance import commit

ROOT = Path(__file__).parents[1]
RESULTS, RUNS = ROOT / "data" / "results", ROOT / "runs" / "tables"
TABLES = {".csv", ".json"}
"""Endings of what is kept of every table; of pictures and texts those that are there."""


def tables(results: Path) -> dict[str, dict[str, Any]]:
    """What about.json says of each table, by the name of its folder."""
    return {
        str(path.parent.relative_to(results)): json.loads(path.read_text())
        for path in sorted(results.rglob("about.json"))
    }


def within(names: list[str], known: dict[str, Any], results: Path) -> list[str]:
    """The known tables of these names, and those in folders of these names.

    Raises:
        ValueError: a name of none.
    """
    below = {
        name: [each for each in known if f"{each}/".startswith(f"{name.rstrip('/')}/")]
        for name in names
    }
    if unknown := [name for name, some in below.items() if not some]:
        raise ValueError(
            f"no tables {', '.join(unknown)} in {results}; there are {', '.join(known)}"
        )
    return list(dict.fromkeys(each for some in below.values() for each in some))


def commands_of(about: dict[str, Any]) -> list[list[str]]:
    """The words of its commands, without the folder that they once wrote to."""
    return [
        [word for word in shlex.split(each)[1:] if not word.startswith("run_dir=")]
        for each in commands(about)
    ]


def with_settings(commands: list[list[str]], settings: list[str]) -> list[list[str]]:
    """Commands with these settings in place of their own of the same names."""
    given = {word.split("=")[0] for word in settings}
    return [
        [*(word for word in command if word.split("=")[0] not in given), *settings]
        for command in commands
    ]


def hours(folder: Path) -> float:
    """What its runs took, one after the other."""
    if not (folder / "runs.csv").exists():
        return 0.0
    with (folder / "runs.csv").open(newline="") as file:
        return sum(float(row.get("seconds") or 0) for row in csv.DictReader(file)) / 3600


def make(name: str, about: dict[str, Any], results: Path, runs: Path, settings: list[str]) -> None:
    """Run the commands of a table, then replace it.

    Raises:
        ValueError: a command failed.
    """
    made_by = with_settings(commands_of(about), settings)
    folders = (
        [runs / name / str(k) for k in range(len(made_by))] if len(made_by) > 1 else [runs / name]
    )
    for command, folder in zip(made_by, folders, strict=True):
        words = " ".join(["kbf", *command])
        print(f"{name}: {words}", flush=True)
        done = subprocess.run(
            [Path(sys.executable).with_name("kbf"), *command, f"run_dir={folder}"], cwd=ROOT
        )
        if done.returncode:
            raise ValueError(
                f"{name} stays as it was: {words} returned {done.returncode}; the same call resumes"
            )
        made = json.loads((folder / "about.json").read_text())
        write_json(
            folder / "about.json", stored_about(made) | {"command": shlex.join(["kbf", *command])}
        )
    if len(folders) > 1:
        gather(results / name, folders)
    else:
        for file in folders[0].iterdir():
            kept = results / name / file.name
            if file.is_file() and (file.suffix in TABLES or kept.exists()):
                copy(file, kept)


def main(words: list[str], results: Path = RESULTS, runs: Path = RUNS) -> None:
    """List the tables, or make those that ``words`` name.

    Raises:
        ValueError: an unknown table, a command that failed, or files that are not committed.
    """
    if {"-h", "--help"} & {*words}:
        print(__doc__)
        return
    known = tables(results)
    names, settings = (
        [word for word in words if "=" not in word],
        [word for word in words if "=" in word],
    )
    if not names:
        for name, about in known.items():
            for k, command in enumerate(commands_of(about)):
                lead = (
                    f"{name:34} {about['commit']:14} {hours(results / name):5.1f} h"
                    if k == 0
                    else " " * 57
                )
                print(f"{lead}  {shlex.join(['kbf', *command])}")
        return
    below = within(names, known, results)
    at = commit()
    if at is None or at.endswith("-dirty"):
        raise ValueError("commit your changes first: a table says which commit made it")
    for name in below:
        make(name, known[name], results, runs / at, settings)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
