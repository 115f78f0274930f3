#!/usr/bin/env python
"""Puts the tables of several `kbf compare` runs, each of one data set, into one folder: what
data/results/ keeps of an experiment.

    .venv/bin/python scripts/gather_results.py data/results/noise multirun/DATE/TIME/*

Writes results.csv, runs.csv and the paired tests (wilcoxon.csv, corrected_t.csv), one below the
other, about.json and comparison.png (excess by data set; NMSE where no floor is known).
"""

from __future__ import annotations

import csv
import json
import math
import sys
from pathlib import Path
from typing import Any

from kbf.commands.support.comparison_report import TEST_FILES
from kbf.plots.charts import curves
from kbf.plots.tracks import save
from kbf.runtime.atomic_files import write_csv, write_json

NUMBERS = ("n_train", "excess", "excess_se", "nmse", "nmse_se")


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a table; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def gather(into: Path, folders: list[Path]) -> None:
    """Make the folder ``into`` from those of comparisons.

    Raises:
        ValueError: a folder without results, or one data set twice.
    """
    for name in ("results.csv", "about.json"):
        if lacking := [str(folder) for folder in folders if not (folder / name).exists()]:
            raise ValueError(
                f"no {name} in {', '.join(lacking)}: give the folders that kbf compare wrote"
            )
    tables = {
        name: [row for folder in folders for row in read(folder / name)]
        for name in ("results.csv", "runs.csv", *TEST_FILES)
    }
    keys = [(row["data"], row["n_train"], row["model"]) for row in tables["results.csv"]]
    if len(set(keys)) < len(keys):
        raise ValueError("a model stands in two of these folders for the same data and n_train")
    into.mkdir(parents=True, exist_ok=True)
    for name, rows in ((name, rows) for name, rows in tables.items() if rows):
        columns = dict.fromkeys(key for row in rows for key in row)
        write_csv(into / name, [{key: row.get(key, "") for key in columns} for row in rows])
    abouts = [json.loads((folder / "about.json").read_text()) for folder in folders]
    commits = sorted(
        {commit for about in abouts for commit in about.get("commits", [about.get("commit")])}
    )
    write_json(
        into / "about.json",
        stored_about(abouts[0])
        | {"command": [each for about in abouts for each in commands(about)], "commits": commits},
    )
    numbers: list[dict[str, Any]] = [
        {
            "data": row["data"],
            "model": row["model"],
            **{key: number(row.get(key)) for key in NUMBERS},
        }
        for row in tables["results.csv"]
    ]
    for row in numbers:
        row["n_train"] = f"{row['n_train']:,.0f}"  # two or three sizes side by side
    known = any(math.isfinite(row["excess"]) for row in numbers)
    shown = [
        row | {"excess": 100 * row["excess"], "excess_se": 100 * row["excess_se"]}
        for row in numbers
    ]
    y, label = ("excess", "excess, %") if known else ("nmse", "NMSE")
    axes: dict[str, Any] = {
        "x": "n_train",
        "xlabel": "training steps",
        "y": y,
        "ylabel": label,
        "se": f"{y}_se",
    }
    figure = curves(shown, **axes, by="model", panel="data", log="y", across=3)
    save(figure, into / "comparison.png")
    print(f"in {into}: {len(keys)} rows of {len({key[0] for key in keys})} data sets")


def stored_about(about: dict[str, Any]) -> dict[str, Any]:
    """What a stored table keeps of about.json: neither the working folder nor files of single runs.

    >>> stored_about({"command": "kbf compare", "folder": "/home/somebody", "cells": ["a.json"]})
    {'command': 'kbf compare'}
    """
    return {key: value for key, value in about.items() if key not in ("folder", "cells")}


def commands(about: dict[str, Any]) -> list[str]:
    """The commands of a table: several if it was itself gathered."""
    given = about["command"]
    return given if isinstance(given, list) else [given]


def number(text: str | None) -> float:
    """A number; NaN for none."""
    return float(text) if text else math.nan


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    try:
        gather(Path(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
    except ValueError as error:
        sys.exit(str(error))
