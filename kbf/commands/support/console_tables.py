"""Tables of numbers that have more columns than a screen has room for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table

from kbf.commands.support.console import console


def print_wide(table: Table, lead: int = 1) -> None:
    """Print a table; in pieces below each other where it is wider than the screen, each with the first ``lead`` columns.

    A number that is cut is worse than none: rich would shorten the cells of all columns until they
    fit.
    """
    first, rest = table.columns[:lead], table.columns[lead:]
    shown: list[Column] = []
    for column in rest:
        if shown and room(piece(table, [*first, *shown, column])) > console.width:
            console.print(piece(table, [*first, *shown]))
            shown = []
        shown.append(column)
    console.print(piece(table, [*first, *shown]))


def piece(table: Table, columns: Sequence[Column]) -> Table:
    """Some columns of a table, its rows in their style."""
    part = Table(title=table.title)
    for column in columns:
        part.add_column(column.header, justify=column.justify)
    for row, cells in zip(
        table.rows, zip(*(column.cells for column in columns), strict=True), strict=True
    ):
        part.add_row(*cells, style=row.style)
    return part


def room(table: Table) -> int:
    """The width at which no cell of a table is cut."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum
