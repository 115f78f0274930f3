"""``kbf data check``: read a recording of one's own; say what is in it, and warn of what will hurt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from kbf.commands.support.console import console, start
from kbf.commands.support.console_tables import print_wide
from kbf.data.files.dataset import FileData
from kbf.data.files.report import all_columns, cell, examine, markdown
from kbf.plots.charts import scatter_figure, series_figure
from kbf.plots.tracks import save
from kbf.runtime.atomic_files import write_text
from kbf.runtime.instantiate import build


def run(config: dict[str, Any]) -> int:
    """Read the recording, print and write the report; returns 0, with warnings or without.

    Raises:
        ValueError, FileNotFoundError: data that cannot be used.
    """
    start(config["threads"])
    data = build(config["data"]["source"], trust=True)
    if not isinstance(data, FileData):
        raise ValueError(
            f"kbf data check looks at recordings of your own, not at data={config['data']['name']}"
        )
    report = examine(data)
    directory = Path(config["run_dir"])
    path = str(config["data"]["path"])
    write_text(directory / "report.md", markdown(path, report))
    save(
        series_figure(all_columns(data), parts_of_steps(data), title=path), directory / "series.png"
    )
    parts = {
        part: torch.cat([s.states for s in getattr(data, part)])
        for part in data.spans
        if getattr(data, part)
    }
    save(
        scatter_figure(parts, data.column_schema.components("states"), title=path),
        directory / "states.png",
    )
    for rows in (report.sequences, report.columns):
        show_table(rows)
    for warning in report.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}", highlight=False)
    count = len(report.warnings)
    count_text = f"{count or 'no'} warning{'' if count == 1 else 's'}"
    console.print(
        f"{count_text}; in [bold]{directory}[/]: report.md, series.png, states.png", highlight=False
    )
    return 0


def show_table(rows: list[dict[str, Any]], most: int = 20) -> None:
    """Print the first rows of a table."""
    if not rows:
        return
    table = Table(*rows[0])
    for row in rows[:most]:
        table.add_row(*(escape(cell(row.get(key))) for key in rows[0]))
    print_wide(table)
    if len(rows) > most:
        console.print(f"... and {len(rows) - most} more", highlight=False)


def parts_of_steps(data: FileData) -> list[list[str]]:
    """For each sequence the part that each of its steps is in; "" for none."""
    part_of_step = [[""] * len(recording.obs) for recording in data.recordings]
    for part, spans in data.spans.items():
        for k, start_, stop in spans:
            part_of_step[k][start_:stop] = [part] * (stop - start_)
    return part_of_step
