#!/usr/bin/env python
"""Makes some runs of tables of data/results/ again, at the commit that is checked out: are the
scores the same?

    .venv/bin/python scripts/check_tables.py rotation noise workers=2  # first run of each model
    .venv/bin/python scripts/check_tables.py rkn_pendulum runs=1 n_train=10

Tables are those of `kbf compare`; settings are its settings, in place of those that made the table
(runs=1 where none are given). What was found stands in data/results/checked.csv: a line for each
table, of its last check. Runs go to runs/checks/COMMIT/NAME/SETTINGS, and go on where they were
stopped. It ends with 1 where a score differs by more than rounding.
"""

from __future__ import annotations

import math
import re
import shlex
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
ROUNDING = 1e-4
"""Relative difference up to which scores are the same: sums in another order, steps in float32.

Pages show four digits.
"""

Row = dict[str, Any]


def made_again(name: str, about: Row, folder: Path, settings: list[str]) -> list[Row]:
    """The runs that the commands of a table make with some settings.

    Raises:
        ValueError: a command failed.
    """
    rows: list[Row] = []
    for k, command in enumerate(with_settings(commands_of(about), settings)):
        words = [*command, f"run_dir={folder / str(k)}"]
        print(f"{name}: {shlex.join(['kbf', *words])}", flush=True)
        done = subprocess.run([Path(sys.executable).with_name("kbf"), *words], cwd=ROOT)
        if done.returncode:
            raise ValueError(
                f"{name} was not checked: its command ended with {done.returncode}; the same call "
                "goes on"
            )
        rows += read(folder / str(k) / "runs.csv")
    return rows


def folder_of(settings: list[str]) -> str:
    """A folder's name for settings: runs of others are not taken for them.

    >>> folder_of(["runs=1", "models=[kbf,lstm]", "data.frames=a/lab.npz"])
    'runs=1_models=[kbf,lstm]_data.frames=a_lab.npz'
    """
    return re.sub(r"[^\w.,=\[\]-]", "_", "_".join(settings))


def difference(kept: Row, made: Row) -> float:
    """The largest relative difference of two runs' scores; infinite where one has a score and the
    other has none.

    A column that the table does not have is not compared: it was made before there was one.

    >>> difference({"test.mse": "2.0"}, {"test.mse": "2.5"})
    0.25
    >>> difference({"test.mse": "2.0"}, {"test.mse": ""})
    inf
    """
    worst = 0.0
    for score in (each for each in SCORES if each in kept):
        a, b = number(kept.get(score)), number(made.get(score))
        if math.isnan(a) and math.isnan(b):
            continue
        if a != b:
            worst = max(
                worst,
                abs(a - b) / max(abs(a), 1e-12)
                if math.isfinite(a) and math.isfinite(b)
                else math.inf,
            )
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


def main(words: list[str], results: Path = RESULTS, runs: Path = RUNS) -> int:
    """Check the tables that ``words`` name; 1 where a score differs.

    Raises:
        ValueError: an unknown table, or one that `kbf compare` does not make; a command that
            failed; files that are not committed.
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
        if all(c[0] == "compare" for c in commands_of(about))
    }
    below = within(names, known, results)
    at = commit()
    if at is None or at.endswith("-dirty"):
        raise ValueError("commit your changes first: what is checked is a commit")
    if not any(word.startswith("runs=") for word in settings):
        settings = ["runs=1", *settings]
    differ = False
    for name in below:
        made = made_again(name, known[name], runs / at / name / folder_of(settings), settings)
        found = {
            "table": name,
            "commit": at,
            **compared(name, read(results / name / "runs.csv"), made),
        }
        others = [row for row in read(results / "checked.csv") if row["table"] != name]
        write_csv(
            results / "checked.csv", sorted([*others, found], key=lambda row: str(row["table"]))
        )
        worst = found["largest difference"]
        print(
            f"{name}: {found['same']} of {found['runs']} runs have the same scores; the largest "
            f"difference is {worst:.1e}"
        )
        differ |= found["same"] < found["runs"]
    return int(differ)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(str(error))
