#!/usr/bin/env python
"""Writes the figures of data/results/ into the tables of README.md and docs/.

    .venv/bin/python scripts/page_tables.py

Each figure keeps its number of digits; models and columns stay. A model that a table lacks, or that
was not measured, raises an error. The prose around the tables is checked by a person.
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
"""Headings of the tables of docs/results.md, and their folders in data/results/."""
SYSTEMS_OF_PAPERS = {
    "Lorenz in discrete time": r"lorenz_\d+",
    "Lorenz-96": r"lorenz96_.*",
    "Other systems": r"lorenz_[ds].*|double_pendulum|bearings",
}
"""Beginnings of the headings of the tables of experiment=lorenz, and the data sets in them."""
SCORES = [
    ["rmse"],
    ["log_likelihood", "log_likelihood_se"],
    ["log_likelihood_raw", "log_likelihood_raw_se"],
    ["energy_score"],
    ["coverage_95"],
    ["seconds.fit"],
]
"""Columns of results.csv that the columns of the pendulum benchmark show."""
Row = dict[str, str]


class Table(NamedTuple):
    """One table of a page.

    Attributes:
        page: file of the page. heading: text above the table; the table comes next.
        values: numbers of a cell, by model, column and header; None for an empty cell or for words.
        models: models that the table must have; None if it shows a subset of the measured ones.
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
    """Mean squared error; excess error and its standard error in percent."""
    return [float(row["mse"]), *percent(row, "excess")]


def percent(row: Row, column: str) -> list[float]:
    """A share and its standard error, in percent."""
    return [100 * float(row[column]), 100 * float(row[f"{column}_se"])]


def models_of(rows: dict[tuple[str, int], Row]) -> set[str]:
    """Names of the models."""
    return {model for model, _ in rows}


def tables() -> list[Table]:
    """All tables of pages that show results."""
    return [
        *vectors_and_images(),
        *noise(),
        *field_benchmark(),
        *systems_of_papers(),
        recordings(),
        *readme(),
    ]


def vectors_and_images() -> list[Table]:
    """Errors by model and size; learned features; the simulator (no excess above 100 %)."""
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
    """Errors of columns with the header "n = N", without an excess error above ``most``."""

    def values(model: str, _: int, head: str) -> list[float]:
        row = rows[model, int(head.removeprefix("n = "))]
        return errors(row)[: 3 if float(row["excess"]) < most else 1]

    return values


def noise() -> list[Table]:
    """Excess error by system at two sizes; the excess of the energy score at both."""
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
    """Name of a data set from the header of its column."""
    return head.replace(" ", "_")


def field_benchmark() -> list[Table]:
    """One table per number of training sequences; models without uncertainty have an RMSE only."""
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


def systems_of_papers() -> list[Table]:
    """Two tables of `experiment=lorenz`; headers of columns are "data set, recordings".

    Errors in dB, 10 log10 of the mean squared error of a component, of all steps and without the
    first ten; then log likelihood and seconds of the fit. Empty where a model was not run.
    """
    rows = measured("lorenz")

    def row_of(model: str, head: str) -> Row | None:
        name, _, count = head.partition(", ")
        return rows.get((name, model, int(count.replace(",", ""))))

    def errors_in_db(model: str, _: int, head: str) -> list[float] | None:
        row = row_of(model, head)
        return None if row is None else [decibels(row, key) for key in ("mse", "mse_settled")]

    def others(model: str, _: int, head: str) -> list[float] | None:
        row = row_of(model, head)
        if row is None:
            return None
        found = [float(row.get(key) or math.nan) for key in ("log_likelihood", "seconds.fit")]
        return [value for value in found if math.isfinite(value)]

    found = []
    for title, pattern in SYSTEMS_OF_PAPERS.items():
        models = {model for name, model, _ in rows if re.fullmatch(pattern, name)}
        for what, values in (("errors", errors_in_db), ("others", others)):
            found.append(Table("docs/results.md", f"**{title}, {what}**", values, models))
    return found


def decibels(row: Row, key: str) -> float:
    """A squared error, summed over components, as 10 log10 of that of one component."""
    components = sum(bool(value) for name, value in row.items() if name.startswith("nmse."))
    return 10 * math.log10(float(row[key]) / components)


def recordings() -> Table:
    """NMSE, its standard error over draws or splits, and coverage; empty if a model was not run."""
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
        "## Results",
        values,
        set().union(*map(models_of, known.values())),
    )


def readme() -> list[Table]:
    """Excess error after 300 steps (after a column of text), NMSE on recordings, RMSE on images."""
    rows = {folder: by_model(folder) for folder in ("rotation", "oscillatory")}
    nmse = recordings().values
    swung = by_model("rkn_pendulum")
    return [
        Table(
            "README.md",
            "**Synthetic data.**",
            lambda model, _, head: errors(rows[head][model, 300])[1:] if head in rows else None,
            {"kbf", "kbf_paper", "kbr_original", "lstm", "kalman", "ukf"},
        ),
        Table(
            "README.md",
            "**Recordings.**",
            lambda model, column, head: (nmse(model, column, head) or [])[:2],
            {"kbf", "gru", "window_boosting", "kalman"},
        ),
        Table(
            "README.md",
            "**Noisy images.**",
            lambda model, _, head: [float(swung[model, int(head.split()[0])]["rmse"])],
            {"kbf", "lstm", "gru", "rkn"},
        ),
    ]


def filled(text: str, table: Table) -> str:
    """The page with the current figures in this table.

    Raises:
        ValueError: the table is missing, or its models, columns or numbers of a cell differ from
            the measured ones.
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
            f"{table.page}, {table.heading}: the table has {sorted(names)}, "
            f"required are {sorted(table.models)}"
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
    """Cells of one row."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def put(cell: str, values: list[float] | None) -> str:
    """The cell with its numbers replaced, to as many digits; unchanged where values is None.

    Raises:
        ValueError: the cell has a different number of numbers.
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
    """docs/results.md with the floors next to its headings.

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
            raise ValueError(f"docs/results.md has no floor of {heading}")
    return text


def pages() -> dict[str, str]:
    """Text of each page with current figures."""
    found: dict[str, str] = {}
    for table in tables():
        text = found.get(table.page) or (ROOT / table.page).read_text(encoding="utf-8")
        found[table.page] = filled(text, table)
    return found | {"docs/results.md": with_floors(found["docs/results.md"])}


def main() -> None:
    """Writes the pages that changed."""
    for name, text in pages().items():
        if text != (ROOT / name).read_text(encoding="utf-8"):
            write_text(ROOT / name, text)
            print(f"{name}: figures changed; check the prose around them")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(str(error))
