#!/usr/bin/env python
"""Makes some runs of tables of data/results/ again, at the commit that is checked out: are the
scores the same?

    .venv/bin/python scripts/check_tables.py rotation noise workers=2  # first run of each model
    .venv/bin/python scripts/check_tables.py rkn_pendulum runs=1 n_train=10
    .venv/bin/python scripts/check_tables.py reproduce/posterior_mean    # its first run

Tables are those of `kbf compare` and `kbf reproduce`; settings are settings of these commands, in
place of those that made the table (runs=1 where none are given). What was found stands in
data/results/checked.csv: a line for each table, of its last check. Runs go to
runs/checks/COMMIT/NAME/SETTINGS, and go on where they were stopped.

Scores of trained networks differ from processor to processor. A table with scores that differ is
therefore made again by the code of its own commit, too, on the same machine (columns "at its
commit"). It ends with 1 where a score differs from both by more than rounding.
"""

from __future__ import annotations

import csv
import gzip
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gather_results import number, read
from make_tables import RESULTS, ROOT, commands_of, tables, with_settings, within

from kbf.runtime.atomic_files import write_csv
from kbf.runtime.provenance import commit

RUNS = ROOT / "runs" / "checks"
KEY = ("data", "n_train", "seed", "model")
SCORES = ("test.mse", "log_likelihood", "log_likelihood_raw")
"""What a run of runs.csv is found by, and what is compared."""
MEASURED = (
    *("mse", "error", "rkhs", "mean", "mode", "score", "held", "answer", "influence"),
    *("normalised error", "normalised influence", "theta_mean", "rho_mean", "mse_mean"),
    *("theta_mode", "rho_mode", "mse_mode"),
)
"""The columns of a reproduction's results.csv that are compared; a row is found by the others."""
TIMES = ("seconds",)
"""Columns that differ from run to run."""
ROUNDING = 1e-4
"""Relative difference up to which scores are the same: sums in another order, steps in float32.

Pages show four digits.
"""

Row = dict[str, Any]


def made_again(
    name: str, about: Row, folder: Path, settings: list[str], code: Path = ROOT
) -> list[Row]:
    """The runs that the commands of a table make with some settings, by the code of a checkout.

    Raises:
        ValueError: a command failed.
    """
    rows: list[Row] = []
    for k, command in enumerate(with_settings(commands_of(about), settings)):
        words = [*command, f"run_dir={folder / str(k)}"]
        print(f"{name}: {shlex.join(['kbf', *words])}", flush=True)
        done = subprocess.run(
            [Path(sys.executable).with_name("kbf"), *words],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(code)},
        )
        if done.returncode:
            raise ValueError(
                f"{name} was not checked: its command ended with {done.returncode}; the same call "
                "goes on"
            )
        rows += stored(folder / str(k), command[0])
    return rows


def checkout(at: str, runs: Path) -> Path | None:
    """A folder with the code of a commit; None where this repository does not have the commit."""
    folder = runs / "code" / at
    if not folder.exists():
        part = folder.with_name(f"{at}.part")  # moved once it is whole
        shutil.rmtree(part, ignore_errors=True)
        worktree = ["git", "-C", ROOT, "worktree"]
        for words in (["add", "--force", "--detach", part, at], ["move", part, folder]):
            if subprocess.run([*worktree, *words], capture_output=True).returncode:
                return None
    return folder


def stored(folder: Path, command: str) -> list[Row]:
    """The rows of a folder of ``compare`` or ``reproduce``; long tables may be compressed."""
    if command == "compare":
        return read(folder / "runs.csv")
    packed = folder / "results.csv.gz"
    if packed.exists():
        with gzip.open(packed, "rt", encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    return read(folder / "results.csv")


def folder_of(settings: list[str]) -> str:
    """A folder's name for settings: runs of others are not taken for them.

    >>> folder_of(["runs=1", "models=[kbf,lstm]", "data.frames=a/lab.npz"])
    'runs=1_models=[kbf,lstm]_data.frames=a_lab.npz'
    """
    return re.sub(r"[^\w.,=\[\]-]", "_", "_".join(settings))


def difference(kept: Row, made: Row, scores: tuple[str, ...] = SCORES) -> float:
    """The largest relative difference of two runs' scores; infinite where one has a score and the
    other has none.

    A column that the table, or this row of it, does not have is not compared: it was made before
    there was one.

    >>> difference({"test.mse": "2.0"}, {"test.mse": "2.5"})
    0.25
    >>> difference({"test.mse": "2.0"}, {"test.mse": ""})
    inf
    >>> difference({"test.mse": ""}, {"test.mse": "2.0"})
    0.0
    """
    worst = 0.0
    for score in (each for each in scores if kept.get(each, "") != ""):
        a, b = number(kept[score]), number(made.get(score))
        if a == b or (math.isnan(a) and math.isnan(b)):
            continue
        finite = math.isfinite(a) and math.isfinite(b)
        worst = max(worst, abs(a - b) / max(abs(a), 1e-12) if finite else math.inf)
    return worst


def compared(name: str, kept: list[Row], made: list[Row]) -> Row:
    """How many of the runs that were made again have the scores of the kept ones, and the largest
    relative difference.

    Raises:
        ValueError: no runs, or one that the table does not have.
    """
    if not made:
        raise ValueError(f"{name}: its command made no runs, there is nothing to compare")
    known = {tuple(row[key] for key in KEY): row for row in kept}
    apart = []
    for row in made:
        key = tuple(row[part] for part in KEY)
        if key not in known:
            raise ValueError(
                f"{name} has no run {', '.join(key)}: there is nothing to compare it with"
            )
        apart.append(difference(known[key], row))
        if apart[-1] > ROUNDING:
            print(f"{name}: {dict(zip(KEY, key, strict=True))} differs by {apart[-1]:.1e}")
    return {
        "runs": len(made),
        "same": sum(each <= ROUNDING for each in apart),
        "largest difference": max(apart, default=0.0),
    }


def identity(row: Row) -> tuple[tuple[str, str], ...]:
    """What a row of a reproduction is found by: all that is neither measured nor a time.

    Numbers are read to six digits: a selected bandwidth may differ by rounding.

    >>> identity({"n": "100", "method": "IW", "mse": "0.2", "seconds": "1"})
    (('n', '100'), ('method', 'IW'))
    """

    def rounded(text: str) -> str:
        try:
            return f"{float(text):.6g}"
        except ValueError:
            return text

    named = {key: value for key, value in row.items() if key not in (*MEASURED, *TIMES)}
    return tuple((key, rounded(value)) for key, value in named.items())


def compared_rows(name: str, kept: list[Row], made: list[Row]) -> Row:
    """As `compared`, for the rows of a reproduction.

    A row that the table does not have counts as one that differs: what identifies a row may have
    been selected, as a bandwidth.

    Raises:
        ValueError: no rows, on either side.
    """
    if not made or not kept:
        raise ValueError(f"{name}: there are no rows to compare")
    columns = [key for key in made[0] if key in kept[0]]
    known = {identity({key: row[key] for key in columns}): row for row in kept}
    apart = []
    for row in made:
        key = identity({key: row[key] for key in columns})
        apart.append(difference(known[key], row, MEASURED) if key in known else math.inf)
        if apart[-1] > ROUNDING:
            print(f"{name}: {dict(key)} differs by {apart[-1]:.1e}")
    return {
        "runs": len(made),
        "same": sum(each <= ROUNDING for each in apart),
        "largest difference": max(apart),
    }


def main(words: list[str], results: Path = RESULTS, runs: Path = RUNS) -> int:
    """Check the tables that ``words`` name; 1 where a score differs.

    Raises:
        ValueError: an unknown table, or one of another command than `kbf compare` and `kbf
            reproduce`; a command that failed; files that are not committed.
    """
    names, settings = (
        [word for word in words if "=" not in word],
        [word for word in words if "=" in word],
    )
    if not names or {"-h", "--help"} & {*words}:
        print(__doc__)
        return 0
    known = {
        name: about
        for name, about in tables(results).items()
        if all(c[0] in ("compare", "reproduce") for c in commands_of(about))
    }
    below = within(names, known, results)
    at = commit()
    if at is None or at.endswith("-dirty"):
        raise ValueError("commit your changes first: what is checked is a commit")
    if not any(word.startswith("runs=") for word in settings):
        settings = ["runs=1", *settings]
    differ = False
    for name in below:
        about, folder = known[name], Path(name) / folder_of(settings)
        command = commands_of(about)[0][0]
        made = made_again(name, about, runs / at / folder, settings)
        compare = compared if command == "compare" else compared_rows
        found = {
            "table": name,
            "commit": at,
            **compare(name, stored(results / name, command), made),
            "its commit": str(about.get("commit")),
            "same at its commit": "",
            "largest difference at its commit": "",
        }
        same = found["same"] == found["runs"]
        if not same and (code := checkout(found["its commit"], runs)):
            print(f"{name}: is it the machine? The same runs by the code of its commit")
            try:
                former = made_again(name, about, runs / code.name / folder, settings, code)
                again = compare(f"{name}, made by the code of {code.name}", former, made)
            except ValueError as error:  # of an earlier version, say, which lacks a package
                print(error)
            else:
                found["same at its commit"] = again["same"]
                found["largest difference at its commit"] = again["largest difference"]
                same = again["same"] == again["runs"]
        others = [row for row in read(results / "checked.csv") if row["table"] != name]
        write_csv(
            results / "checked.csv", sorted([*others, found], key=lambda row: str(row["table"]))
        )
        worst = found["largest difference"]
        print(
            f"{name}: {found['same']} of {found['runs']} rows have the same scores; the largest "
            f"difference is {worst:.1e}"
        )
        if found["same at its commit"] != "":
            print(
                f"{name}: {found['same at its commit']} have the scores that the code of "
                f"{found['its commit']} has on this machine"
            )
        differ |= not same
    return int(differ)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
