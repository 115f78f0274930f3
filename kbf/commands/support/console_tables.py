"""Tables wider than the terminal, printed in pieces."""

from __future__ import annotations

from copy import copy

from rich.measure import Measurement
from rich.table import Column, Table

from kbf.commands.support.console import console

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
