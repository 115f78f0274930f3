"""``kbf data check``: reads recordings from files, reports their contents and warns of problems."""

from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from kbf.commands.support.console import console, print_table, print_written
from kbf.data.files.dataset import FileData
from kbf.data.files.report import all_columns, cell, examine, markdown
from kbf.plots.charts import scatter_figure, series_figure
from kbf.plots.tracks import save
from kbf.runtime.atomic_files import write_json, write_text
from kbf.runtime.instantiate import build
from kbf.runtime.interpolation import masked
from kbf.runtime.provenance import files_of, provenance
from kbf.runtime.run_folders import ABOUT

# Rows of a table that are printed; ``report.md`` has all.
MAX_PRINTED_ROWS = 20


def run(config: dict[str, Any]) -> int:
    """Read the recordings, print and write the report; returns 0, with warnings or without.

    Raises:
        ValueError: the data cannot be used.
        FileNotFoundError: there is no such file.
    """
    data = build(config["data"]["source"], trust=True)
    if not isinstance(data, FileData):
        name = config["data"]["name"]
        raise ValueError(f"kbf data check reads recordings from your files, not data={name}")
    report = examine(data, config["data"].get("bounds"))
    directory, path = Path(config["run_dir"]), str(config["data"]["path"])
    write_text(directory / "report.md", masked(markdown(path, report), config))
    save(
        series_figure(all_columns(data), parts_of_steps(data), title=path), directory / "series.png"
    )
    parts = {
        part: torch.cat([recording.states for recording in getattr(data, part)])
        for part in data.spans
        if getattr(data, part)
    }
    save(
        scatter_figure(parts, data.column_schema.components("states"), title=path),
        directory / "states.png",
    )
    for rows in (report.recordings, report.columns):
        if rows:
            print_rows(rows)
    for warning in report.warnings:
        console.print(f"[yellow]warning[/] {escape(warning)}", highlight=False)
    count = len(report.warnings)
    console.print(f"{count or 'no'} warning{'' if count == 1 else 's'}", highlight=False)
    record = provenance(config["command"], config, files_of(config["data"]))
    write_json(directory / ABOUT, record)
    print_written(directory, ["report.md", "series.png", "states.png", ABOUT])
    return 0


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the first `MAX_PRINTED_ROWS` rows as a table."""
    table = Table(*rows[0])
    for row in rows[:MAX_PRINTED_ROWS]:
        table.add_row(*(escape(cell(row.get(key))) for key in rows[0]))
    print_table(table)
    if len(rows) > MAX_PRINTED_ROWS:
        console.print(f"... and {len(rows) - MAX_PRINTED_ROWS} more", highlight=False)


def parts_of_steps(data: FileData) -> list[list[str]]:
    """Return the part that each step of each recording is in; "" for none."""
    part_of_step = [[""] * len(recording.obs) for recording in data.recordings]
    for part, spans in data.spans.items():
        for k, start_, stop in spans:
            part_of_step[k][start_:stop] = [part] * (stop - start_)
    return part_of_step
