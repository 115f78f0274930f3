#!/usr/bin/env python
"""Puts the figures of data/results/ into the tables of README.md and docs/, each with the digits that the page has now.

    .venv/bin/python scripts/page_tables.py

Models and columns stay as they are: a model that a table lacks, or that was not measured, is an
error. Sentences around the tables are for a person to look at.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from gather_results import read

from kbf.runtime.atomic_files import write_text

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "data" / "results"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
VECTORS_AND_IMAGES = {
    "rotation": "rotation",
    "oscillatory": "oscillatory",
    "dsprites": "dsprites",
    "dmlab, DeepMind Lab": "dmlab",
    "dmlab, embedded renderer": "maze",
}
"""Headings of tables of docs/results.md, and the folders that they are of."""
SCORES = [
    ["rmse"],
    ["log_likelihood", "log_likelihood_se"],
    ["log_likelihood_raw", "log_likelihood_raw_se"],
    ["energy_score"],
    ["coverage_95"],
    ["seconds.fit"],
]
"""What the columns of the field's benchmark show, by their names in results.csv."""
Row = dict[str, str]


class Table(NamedTuple):
    """One table of a page.

    Attributes:
        page: its file. heading: words above the table, which comes next.
        values: the numbers of a cell, by model, column and head; None for a cell that has none, or
            that is words.
        models: those that it must have; None where it shows some of those that were measured.
    """

    page: str
    heading: str
    values: Callable[[str, int, str], list[float] | None]
    models: set[str] | None = None


def measured(folder: str) -> dict[tuple[str, str, int], Row]:
    """Rows of results.csv by data set, model and number of training steps."""
    return {
        (row["data"], row["model"], int(row["n_train"])): row
        for row in read(RESULTS / folder / "results.csv")
    }


def by_model(folder: str) -> dict[tuple[str, int], Row]:
    """Rows of one data set by model and number of training steps."""
    return {(model, n): row for (_, model, n), row in measured(folder).items()}


def errors(row: Row) -> list[float]:
    """Mean squared error, excess and its standard error in percent."""
    return [float(row["mse"]), *percent(row, "excess")]


def percent(row: Row, column: str) -> list[float]:
    """A share and its standard error, in percent."""
    return [100 * float(row[column]), 100 * float(row[f"{column}_se"])]


def models_of(rows: dict[tuple[str, int], Row]) -> set[str]:
    """Their names."""
    return {model for model, _ in rows}


def tables() -> list[Table]:
    """All tables of pages that show results."""
    return [*vectors_and_images(), *noise(), *field_benchmark(), recordings(), readme()]


def vectors_and_images() -> list[Table]:
    """By model and number of steps; features learned through the filter; the simulator, where no excess above 100 % is shown."""
    found = []
    for heading, folder in VECTORS_AND_IMAGES.items():
        rows = by_model(folder)
        found.append(Table("docs/results.md", f"**{heading}**", by_size(rows), models_of(rows)))
    learned = [by_model(folder) for folder in ("dsprites_e2e", "dmlab_e2e")]
    heading = "Learned features inside the rule"
    found.append(
        Table(
            "docs/results.md",
            heading,
            lambda model, k, _: errors(learned[k][model, 300]),
            models_of(learned[0]),
        )
    )
    swung = by_model("pendulum")
    return [
        *found,
        Table("docs/results.md", "## A simulator", by_size(swung, most=1.0), models_of(swung)),
    ]


def by_size(
    rows: dict[tuple[str, int], Row], most: float = math.inf
) -> Callable[[str, int, str], list[float]]:
    """Errors where a column is headed "n = N"; without an excess that is above ``most``."""

    def values(model: str, _: int, head: str) -> list[float]:
        row = rows[model, int(head.removeprefix("n = "))]
        return errors(row)[: 3 if float(row["excess"]) < most else 1]

    return values


def noise() -> list[Table]:
    """Excess by system, at two numbers of steps; the energy score's at both."""
    rows = measured("noise")
    models = {model for _, model, _ in rows}

    def excess(n: int) -> Callable[[str, int, str], list[float] | None]:
        return lambda model, _, head: (
            percent(row, "excess") if (row := rows.get((system(head), model, n))) else None
        )

    def energy(model: str, _: int, head: str) -> list[float]:
        return [
            value
            for n in (300, 1000)
            for value in percent(rows[system(head), model, n], "energy_excess")
        ]

    sizes = [
        Table("docs/results.md", f"**n = {n:,}**, excess", excess(n), models) for n in (300, 1000)
    ]
    return [*sizes, Table("docs/results.md", "**energy**", energy)]


def system(head: str) -> str:
    """The name of a data set from the head of its column."""
    return head.replace(" ", "_")


def field_benchmark() -> list[Table]:
    """One for each number of training sequences; models without uncertainty have an error alone."""
    rows = by_model("rkn_pendulum")

    def values(n: int) -> Callable[[str, int, str], list[float] | None]:
        def of(model: str, column: int, _: str) -> list[float] | None:
            row = rows[model, n]
            found = [
                float(row[name] or math.nan) * (100 if name == "coverage_95" else 1)
                for name in SCORES[column]
            ]
            return found if all(map(math.isfinite, found)) else None

        return of

    sizes = sorted({n for _, n in rows})
    return [
        Table(
            "docs/results.md", f"**{n} sequences**", values(n), {m for m, size in rows if size == n}
        )
        for n in sizes
    ]


def recordings() -> Table:
    """NMSE, its standard error where there are several draws or splits, and coverage; empty where a model was not run."""
    known = {
        folder: by_model(f"recordings/{folder}") for folder in ("rat", "ppg", "cartpole", "watch")
    }

    def values(model: str, _: int, head: str) -> list[float] | None:
        rows, sizes = (
            known[re.findall(r"`(.*?)`", head)[0]],
            [int(size.replace(",", "")) for size in re.findall(r"\d+,\d+", head)],
        )
        if model not in models_of(rows):
            return None
        some = [rows[model, n] for n in sizes]
        nmse, covered = ([float(row[name]) for row in some] for name in ("nmse", "coverage_95"))
        se = float(some[0]["nmse_se"]) if len(some) == 1 else stdev(nmse) / len(nmse) ** 0.5
        return [value for value in (mean(nmse), se, 100 * mean(covered)) if not math.isnan(value)]

    return Table(
        "docs/recordings.md",
        "## What it reaches",
        values,
        set().union(*map(models_of, known.values())),
    )


def readme() -> Table:
    """Excess of some models after 300 steps; the first column is words."""
    rows = {folder: by_model(folder) for folder in ("rotation", "oscillatory")}
    return Table(
        "README.md",
        "## What it reaches",
        lambda model, _, head: errors(rows[head][model, 300])[1:] if head in rows else None,
        {"kbf", "kbf_paper", "kbr_original", "lstm", "kalman", "ukf"},
    )


def filled(text: str, table: Table) -> str:
    """The page with the figures of now in this table.

    Raises:
        ValueError: no such table, other models, or other columns or numbers in a cell than were
            measured.
    """
    if table.heading not in text:
        raise ValueError(f"{table.page} has no {table.heading}")
    above, below = text[: text.index(table.heading)], text[text.index(table.heading) :]
    lines = below.split("\n")
    first = next(k for k, line in enumerate(lines) if line.startswith("|"))
    last = next(k for k in range(first, len(lines)) if not lines[k].startswith("|"))
    (_, *heads), _, *rows = (cells_of(line) for line in lines[first:last])
    names = [re.findall(r"`(\w+)`", row[0])[0] for row in rows]
    if table.models is not None and table.models != {*names}:
        raise ValueError(
            f"{table.page}, {table.heading}: there are {sorted(names)}, to be there are {sorted(table.models)}"
        )
    for k, (name, (lead, *cells)) in enumerate(zip(names, rows, strict=True)):
        try:
            found = [
                put(cell, table.values(name, c, head))
                for c, (cell, head) in enumerate(zip(cells, heads, strict=True))
            ]
        except KeyError as missing:
            raise ValueError(f"{table.page}, {table.heading}: {missing} was not measured") from None
        if found != cells:
            lines[first + 2 + k] = f"| {' | '.join([lead, *found])} |"
    return above + "\n".join(lines)


def cells_of(line: str) -> list[str]:
    """Of one row."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def put(cell: str, values: list[float] | None) -> str:
    """The cell with these numbers for its own, to as many digits; as it is without any.

    Raises:
        ValueError: not as many numbers.
    """
    if values is None:
        if NUMBER.search(cell):
            raise ValueError(f"nothing was measured for {cell!r}")
        return cell
    shown = NUMBER.findall(cell)
    if len(shown) != len(values):
        raise ValueError(f"{cell!r} has {len(shown)} numbers, measured are {values}")
    rest = iter(values)
    return NUMBER.sub(lambda number: f"{next(rest):.{len(number[0].partition('.')[2])}f}", cell)


def with_floors(text: str) -> str:
    """docs/results.md with the floors that stand beside its headings.

    Raises:
        ValueError: a heading without floors.
    """
    for heading, folder in VECTORS_AND_IMAGES.items():
        rows = by_model(folder)
        floors = ", ".join(
            f"{float(rows['kbf', n]['floor']):.4f}" for n in sorted({n for _, n in rows})
        )
        text, found = re.subn(
            rf"(?<=\*\*{heading}\*\* )(\([^\n]*?floor )[^)]*", rf"\g<1>{floors}", text, count=1
        )
        if not found:
            raise ValueError(f"docs/results.md tells no floor of {heading}")
    return text


def pages() -> dict[str, str]:
    """The text of each page, filled in."""
    found: dict[str, str] = {}
    for table in tables():
        text = found.get(table.page) or (ROOT / table.page).read_text(encoding="utf-8")
        found[table.page] = filled(text, table)
    return found | {"docs/results.md": with_floors(found["docs/results.md"])}


def main() -> None:
    """Write the pages that changed."""
    for name, text in pages().items():
        if text != (ROOT / name).read_text(encoding="utf-8"):
            write_text(ROOT / name, text)
            print(f"{name}: other figures now; look at the sentences around them")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
