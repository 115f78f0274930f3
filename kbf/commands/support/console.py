"""Console output of the commands: notes, tables, status lines and progress bars."""

import logging
import os
import sys
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
from rich.status import Status
from rich.table import Column, Table

from kbf.commands.support.metric_descriptions import description_of, formatted
from kbf.runtime.allowlist import files_named

# Columns of the output where it is not a terminal: the widest table of one command fits.
PIPE_WIDTH = 160

# Where the commands print.
console: Console = Console(
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes, one a line, in yellow."""
    for note in notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)


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


def progress_bar(description: str, *, remaining: bool = True, **settings: Any) -> Progress:
    """Return a progress bar with the number of finished items and the elapsed time.

    Args:
        description: format of the text in front of the bar.
        remaining: also estimate the remaining time.
        settings: keyword arguments of `rich.progress.Progress`.
    """
    columns: list[ProgressColumn] = [TextColumn(description), BarColumn(), MofNCompleteColumn()]
    columns += [TimeElapsedColumn(), *([TimeRemainingColumn()] if remaining else [])]
    return Progress(*columns, console=console, **settings)


@contextmanager
def fit_status(title: str) -> Iterator[Status]:
    """Show the messages that the package logs during a fit on one status line.

    Each message takes the place of the former one; warnings are printed above the line and stay.
    Where INFO messages were enabled before, they are propagated as before.

    Args:
        title: printed in front of each message.
    """
    logger = logging.getLogger("kbf")
    level, propagate = logger.level, logger.propagate
    with console.status(escape(title)) as status:
        handler = StatusHandler(title, status)
        logger.propagate = logger.isEnabledFor(logging.INFO)
        logger.setLevel(min(logging.INFO, logger.getEffectiveLevel()))
        logger.addHandler(handler)
        try:
            yield status
        finally:
            logger.removeHandler(handler)
            logger.propagate = propagate
            logger.setLevel(level)


class StatusHandler(logging.Handler):
    """Writes log records to a status line, cut to the width of the console."""

    def __init__(self, title: str, status: Status) -> None:
        super().__init__(logging.INFO)
        self.title: str = title
        self.status: Status = status

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
        message = record.getMessage()
        if record.levelno > logging.INFO and not logging.getLogger("kbf").propagate:
            print_notes([message])
        self.status.update(escape(f"{self.title}; {message}"[: console.width - 4]))


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
