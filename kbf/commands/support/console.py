"""Console output of the commands: notes, tables, status lines and progress bars."""

import os
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table

from kbf.commands.support.metric_descriptions import description_of, formatted
from kbf.runtime.allowlist import files_named
from kbf.runtime.errors import DataWarning

# Columns of the output where it is not a terminal: the widest table of one command fits.
PIPE_WIDTH = 160

# Where the commands print.
is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: it was closed (>&-)
console: Console = Console(width=None if is_terminal or "COLUMNS" in os.environ else PIPE_WIDTH)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes, one a line, in yellow."""
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Context that prints each `DataWarning` as a note."""
    with warnings.catch_warnings():
        others = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any) -> None:
            if issubclass(category, DataWarning):
                print_notes([str(message)])
            else:
                others(message, category, *where)

        warnings.simplefilter("always", DataWarning)
        warnings.showwarning = show
        yield


def print_written(directory: str | Path, names: Iterable[str]) -> None:
    """Print the names of the files that a command has written to a folder."""
    console.print(f"in [bold]{escape(str(directory))}[/]: {', '.join(names)}", highlight=False)


def print_read_files(
    data: Mapping[str, Any], checkpoint: object, given: Collection[str] = ()
) -> None:
    """Print the files that are read because the configuration in a checkpoint names them.

    Args:
        data: configuration of the data set.
        checkpoint: path of the checkpoint.
        given: files that were named on the command line, which are not printed.
    """
    for path in files_named(data):
        if path not in given:
            text = f"reading {escape(path)}, which {escape(str(checkpoint))} names"
            console.print(f"[dim]{text}[/]", highlight=False, soft_wrap=True)


def print_values(title: str, values: Mapping[str, Any], keys: list[str] | None = None) -> None:
    """Print a table of names, values and, for metrics, their descriptions.

    Args:
        title: printed above the table.
        values: by name; those that are None are left out.
        keys: the names to print, in this order; None prints all.
    """
    console.print(f"[bold]{title}[/]", highlight=False)
    names = [name for name in keys or values if values.get(name) is not None]
    table = Table(
        "quantity", "value", *(["description"] if any(map(description_of, names)) else [])
    )
    for name in names:
        cells = [name, escape(formatted(name, values[name])), description_of(name)]
        table.add_row(*cells[: len(table.columns)])
    console.print(table)


def progress_bar(description: str, **settings: Any) -> Progress:
    """Return a progress bar with the number of finished items, elapsed and remaining time.

    Args:
        description: format of the text in front of the bar.
        settings: keyword arguments of `rich.progress.Progress`.
    """
    columns: list[ProgressColumn] = [TextColumn(description), BarColumn(), MofNCompleteColumn()]
    columns += [TimeElapsedColumn(), TimeRemainingColumn()]
    return Progress(*columns, console=console, **settings)


# Columns of a console on which no table is cut.
UNLIMITED_WIDTH = 10_000


def print_table(table: Table, lead: int = 1) -> None:
    """Print a table; where it is wider than the console, in pieces below each other.

    Rich cuts the cells of a table that is too wide, and a number that is cut is wrong. Each piece
    repeats the first ``lead`` columns.
    """
    options = console.options.update(width=UNLIMITED_WIDTH)
    shown = first = table.columns[:lead]
    for column in table.columns[lead:]:
        width = Measurement.get(console, options, part_of(table, [*shown, column])).maximum
        if len(shown) > lead and width > console.width:
            console.print(part_of(table, shown))
            shown = first
        shown = [*shown, column]
    console.print(part_of(table, shown))


def part_of(table: Table, columns: list[Column]) -> Table:
    """Return the table with these columns only."""
    part = copy(table)
    part.columns = columns
    return part
