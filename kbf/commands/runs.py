"""``kbf runs``: a table of the runs below a folder, and the best of them, from files alone."""

import shlex
import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kbf.commands.support.console import console, print_notes, print_table
from kbf.commands.support.metric_descriptions import formatted
from kbf.commands.support.run_states import Run, read_runs
from kbf.runtime.atomic_files import write_csv
from kbf.runtime.errors import nearest

# Metrics by which the best run is selected, if none is given: the first that all finished runs
# have. Errors on the test part are the last resort, since a selection by them is optimistic.
METRICS = ("held_out.mse", "validation.mse", "test.mse")
# Scores that are shown, in addition to the metric; the CSV file has all.
SCORES = ("test.mse", "test.nmse", "test.coverage_95")
# Time between two readings of the folder.
WATCH_SECONDS = 3.0
# Readings without a run that is written, after which watching ends: the sweep was cut, or its next
# job has not started.
IDLE_READINGS = 10


def run(config: dict[str, Any]) -> int:
    """Print the table and write the CSV file; returns 1 if a run failed, was cut or is missing.

    Raises:
        ValueError: there is no run, or no run with the metric.
    """
    folder, idle = Path(config["folder"]), 0
    while True:
        runs = read_runs(folder)
        metric = metric_of(runs, config["metric"])
        print_runs(folder, runs, metric, largest=config["largest"])
        if config["csv"] is not None:
            write_csv(config["csv"], rows_of(folder, runs))
        states = {each.state for each in runs}
        idle = 0 if "running" in states else idle + 1
        if not config["watch"] or not states & {"running", "missing"} or idle > IDLE_READINGS:
            break
        time.sleep(WATCH_SECONDS)
        if console.is_terminal:
            console.clear()
    return 0 if states == {"finished"} else 1


def metric_of(runs: list[Run], given: str | None) -> str | None:
    """Return the metric by which runs are compared; None where no run is finished.

    Raises:
        ValueError: no finished run has the metric that is given.
    """
    finished = [each.metrics for each in runs if each.state == "finished"]
    if given is None or not finished:
        named = (key for key in METRICS if all(number(each, key) is not None for each in finished))
        return next(named, None) if finished else None
    if all(number(each, given) is None for each in finished):
        known = sorted({key for each in finished for key in each if number(each, key) is not None})
        raise ValueError(f"metric={given}: no run has this number; {nearest(given, known)}")
    return given


def number(metrics: dict[str, Any], key: str) -> float | None:
    """Return a metric as a number; None where it is none."""
    value = metrics.get(key)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def best_of(runs: list[Run], metric: str | None, *, largest: bool = False) -> Run | None:
    """Return the finished run with the smallest (or largest) metric; None where there is none."""
    scored = [
        (value, each)
        for each in runs
        if metric is not None and (value := number(each.metrics, metric)) is not None
    ]
    ordered = sorted(scored, key=lambda pair: -pair[0] if largest else pair[0])
    return ordered[0][1] if ordered else None


def print_runs(folder: Path, runs: list[Run], metric: str | None, *, largest: bool) -> None:
    """Print the table, the errors of failed runs, and the best run as a command."""
    shown: dict[str, None] = dict.fromkeys([*([metric] if metric else []), *SCORES])
    columns = [key for key in shown if any(number(each.metrics, key) is not None for each in runs)]
    table = Table("run", "overrides", "state", *columns, "seconds")
    for each in runs:
        values = [
            formatted(key, value) if (value := number(each.metrics, key)) is not None else ""
            for key in (*columns, "seconds")
        ]
        name = str(each.folder.relative_to(folder))
        table.add_row(*map(escape, (name, " ".join(each.overrides), each.state, *values)))
    print_table(table, lead=2)
    for each in runs:
        if each.state == "failed":
            text = f"[red]failed[/] {escape(str(each.folder))}: {escape(each.error)}"
            console.print(text, highlight=False, soft_wrap=True)
    counts = {state: sum(each.state == state for each in runs) for state in (e.state for e in runs)}
    console.print(", ".join(f"{n} {state}" for state, n in counts.items()), highlight=False)
    if (best := best_of(runs, metric, largest=largest)) is None or metric is None:
        return
    value = formatted(metric, best.metrics[metric])
    console.print(f"the best by {metric} ({value}) is [bold]{escape(str(best.folder))}[/]:")
    text = shlex.join(["kbf", "train", *best.overrides])
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    if metric.startswith("test.") and len(runs) > 1:
        print_notes(["selected on the test part, on which its error is optimistic: metric=NAME"])


def rows_of(folder: Path, runs: list[Run]) -> list[dict[str, Any]]:
    """Return a row for each run with its state, its overrides and all its metrics."""
    rows = [
        {
            "run": str(each.folder.relative_to(folder)),
            "state": each.state,
            "error": each.error,
            **{key: value for key, _, value in (w.partition("=") for w in each.overrides)},
            **each.metrics,
        }
        for each in runs
    ]
    keys = dict.fromkeys(key for row in rows for key in row)
    return [{key: row.get(key) for key in keys} for row in rows]
