"""Candidates of model selection as a table, as ``candidates.csv`` and for loggers.

Both ``model=auto`` and the model selection of a model (`kbf.filters.selection.auto`) report here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kbf.commands.support.console import console, print_table
from kbf.filters.selection.auto import ModelSelection
from kbf.filters.selection.cross_validation import Row
from kbf.runtime.atomic_files import write_csv

FILE = "candidates.csv"
HEADINGS = ("search", "candidate", "NMSE", "± s.e.", "seconds", "weight", "note")
# One dictionary a candidate, with the columns of `FILE`; ``weight`` is None if not selected.
Candidates = list[dict[str, Any]]


def candidates_of(search: str, rows: Sequence[Row], weights: dict[str, float]) -> Candidates:
    """Return the candidates of one search; ``weights`` has those that were selected."""
    return [
        {
            "search": search,
            "candidate": row.model,
            "nmse": row.nmse,
            "standard_error": row.error,
            "seconds": row.seconds,
            "weight": weights.get(row.model),
            "note": row.note,
        }
        for row in rows
    ]


def candidates_of_net(net: Any) -> Candidates:
    """Return the candidates of a model's model selection; empty where nothing was compared."""
    if not isinstance(net, ModelSelection) or not net.candidates:
        return []
    weights = dict(zip(net.models, net.weights.mean(1).tolist(), strict=True))
    return candidates_of(
        "model_selection", net.candidates, {name: weights[name] for name in net.used()}
    )


def selection_notes(net: Any, sensors: Sequence[str] = ()) -> list[str]:
    """Return notes on a model selection.

    They name steps that were left out, sensors that are held or late, and that no candidate is
    informative.

    Args:
        net: the model.
        sensors: names of the components of its observations.
    """
    if not isinstance(net, ModelSelection):
        return []
    notes = []
    held, delays = held_and_late(net, sensors)
    if held:
        notes.append(
            f"NOTE: readings of {', '.join(held)} repeat exactly; repeats are missing readings "
            "(data.held=false: they are readings)"
        )
    for name, steps in delays.items():
        late = f"{steps} step{'s' if steps > 1 else ''}"
        notes.append(f"NOTE: {name} is late by {late}, and filtered so")
    if count := int(net.newest):
        notes.append(
            f"NOTE: these recordings drift; the filter is trained on their last {count} steps only"
        )
    if net.main_name != "mean" and net.used() == ["mean"]:
        notes.append(
            "NOTE: no candidate has a smaller held-out error than the mean of the states, so the "
            "filter always answers the mean. What is learned from one part of these recordings "
            "does not hold in another; more recordings or other sensors may help"
        )
    return notes


def held_and_late(net: Any, sensors: Sequence[str] = ()) -> tuple[list[str], dict[str, int]]:
    """Return the sensors that a model selection takes as held, and the steps of those as late.

    Args:
        net, sensors: as of `selection_notes`.
    """
    if not isinstance(net, ModelSelection):
        return [], {}
    names = dict(enumerate(sensors))
    held = [names.get(k, f"x_{k}") for k in net.held.nonzero()[:, 0].tolist()]
    learned: Any = net.models["ukf_learned"] if "ukf_learned" in net.used() else None
    if learned is None:
        return held, {}
    late = learned.delays.nonzero()[:, 0].tolist()
    return held, {names.get(k, f"x_{k}"): int(learned.delays[k]) for k in late}


def cells_of(candidate: dict[str, Any]) -> list[str]:
    """Return the cells of a candidate in the table."""
    formats = {"nmse": ".3g", "standard_error": ".2g", "seconds": ".1f", "weight": ".2f"}
    return [
        "" if value is None else format(value, formats.get(key, ""))
        for key, value in candidate.items()
    ]


def print_candidates(candidates: Candidates) -> None:
    """Print the candidates and the names of the selected ones."""
    if not candidates:
        return
    table = Table(*HEADINGS, title="on held-out steps of the training part")
    for candidate in candidates:
        table.add_row(*map(escape, cells_of(candidate)))
    print_table(table, lead=2)
    selected = ", ".join(c["candidate"] for c in candidates if c["weight"] is not None)
    console.print(f"selected by held-out error: [bold]{escape(selected)}[/]", highlight=False)


def write(directory: Path, candidates: Candidates) -> None:
    """Write ``candidates.csv`` to a run directory; nothing where nothing was compared."""
    if candidates:
        write_csv(directory / FILE, candidates)


def log(loggers: Sequence[Any], candidates: Candidates, step: int) -> None:
    """Log the NMSE of each candidate as ``candidates/NAME``, and the table where text is taken."""
    if not candidates:
        return
    numbers = {
        f"candidates/{each['candidate']}": each["nmse"]
        for each in candidates
        if each["nmse"] is not None
    }
    rows = [HEADINGS, ["---"] * len(HEADINGS), *map(cells_of, candidates)]
    table = "\n".join(f"| {' | '.join(c.replace('|', '/') for c in row)} |" for row in rows)
    for logger in loggers:
        logger.log_metrics(numbers, step)
        if (add_text := getattr(getattr(logger, "experiment", None), "add_text", None)) is not None:
            add_text("candidates", table, step)
