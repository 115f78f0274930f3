"""What ``model=auto`` and the net under a model have tried on held-out steps of the training part: table, file, TensorBoard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kbf.commands.support.console import console
from kbf.commands.support.console_tables import print_wide
from kbf.filters.selection.auto import ModelSelection
from kbf.filters.selection.cross_validation import Row
from kbf.runtime.atomic_files import write_csv

FILE = "candidates.csv"
COLUMNS = ("tried by", "model", "NMSE", "± s.e.", "seconds", "weight in the filter", "remark")
Lines = list[dict[str, Any]]
"""One for each model that was tried: by whom, the fields of its `kbf.filters.selection.cross_validation.Row`, its weight in what was made of it."""


def lines_of(by: str, rows: Sequence[Row], weights: dict[str, float]) -> Lines:
    """The rows of one search as lines; ``weights`` are of those models that were taken."""
    return [{"by": by, **row._asdict(), "weight": weights.get(row.model)} for row in rows]


def lines_of_net(net: Any) -> Lines:
    """What a net under a model has compared; empty where there was no comparison."""
    if not isinstance(net, ModelSelection) or not net.tried:
        return []
    used = net.used()
    weights = dict(zip(net.models, net.weights.mean(1).tolist(), strict=True))
    return lines_of("net", net.tried, {name: weights[name] for name in used})


def notes_on_selection(net: Any) -> list[str]:
    """What a person should know of what the net under a model has found: what was left out, and that nothing was learned."""
    told, count = [], int(net.newest) if isinstance(net, ModelSelection) else 0
    if count:
        told.append(
            f"these recordings drift: learned from their last {count} steps, since what is older misleads"
        )
    if isinstance(net, ModelSelection) and net.main_name != "mean" and net.used() == ["mean"]:
        told.append(
            "nothing did better than the mean of the states on what was held out, so the filter always answers the mean: "
            "what one part of these recordings teaches does not hold in another; more recordings may help, or other sensors"
        )
    return told


def texts(line: dict[str, Any]) -> list[str]:
    """The cells of a line."""
    numbers = ["" if line[key] is None else f"{line[key]:.4f}" for key in ("nmse", "error")]
    weight = "" if line["weight"] is None else f"{line['weight']:.2f}"
    return [line["by"], line["model"], *numbers, f"{line['seconds']:.1f}", weight, line["note"]]


def show(lines: Lines) -> None:
    """Print the lines, and what was made of it."""
    if not lines:
        return
    table = Table(*COLUMNS, title="on held-out steps of the training part")
    for line in lines:
        table.add_row(*map(escape, texts(line)))
    print_wide(table, lead=2)
    taken = ", ".join(line["model"] for line in lines if line["weight"] is not None)
    console.print(f"taken, as best on what was held out: [bold]{escape(taken)}[/]", highlight=False)


def write(directory: Path, lines: Lines) -> None:
    """Keep the lines as ``candidates.csv`` of a run's folder; nothing where nothing was compared."""
    if lines:
        write_csv(directory / FILE, lines)


def log(loggers: Sequence[Any], lines: Lines, step: int) -> None:
    """Tell loggers: a number ``tried/MODEL`` of each, and those that take text the table."""
    numbers = {f"tried/{line['model']}": line["nmse"] for line in lines if line["nmse"] is not None}
    if not lines:
        return
    cells = [list(COLUMNS), ["---"] * len(COLUMNS), *(texts(line) for line in lines)]
    table = "\n".join(
        "| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in cells
    )
    for logger in loggers:
        logger.log_metrics(numbers, step)
        add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
        if add_text is not None:
            add_text("tried", table, step)
