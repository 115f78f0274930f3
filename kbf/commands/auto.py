"""``kbf train model=auto``: try several models on a validation part, and go on with the best."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kbf.commands.common import console, seconds_of, with_limits, without_net_under
from kbf.commands.meanings import shown
from kbf.data.dataset import Data
from kbf.data.windows import split
from kbf.evaluation.score import score
from kbf.runtime.files import scratch
from kbf.sequence import Sequence
from kbf.training.train import train

Row = dict[str, Any]


def choose(config: dict[str, Any], data: Data, *, trust: bool = False) -> tuple[dict[str, Any], list[Row]]:
    """The configuration of the best candidate, and what was tried: ``model, validation.mse, seconds, note``, the best first.

    Each candidate learns from the training part without its last steps, and is scored on these (or on ``data.validation``) by the
    loop that scores everything. One that cannot be built or does not fit the data is noted and left out. No test data is seen.

    Raises:
        ValueError: too few training steps to hold some out, or no candidate that works.
    """
    auto = config["model"]
    fit, held = held_out_part(data, auto["validation"])
    n, rows = sum(len(s.states) for s in fit), []
    budget, began = seconds_of(config.get("budget")), time.perf_counter()
    columns = [TextColumn("trying {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with scratch(config["run_dir"]) as folder, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(auto["candidates"]))
        for name, model in auto["candidates"].items():
            progress.update(bar, description=escape(name))
            if budget is not None and rows and time.perf_counter() - began > budget:
                note = f"not tried: the budget of {budget:g} s is spent"
                rows.append({"model": name, "validation.mse": None, "seconds": 0.0, "note": note})
                continue
            rows.append(
                {"model": name, **tried(with_model(config, without_net_under(model)), name, n, fit, held, folder, data, trust)}
            )
            progress.advance(bar)
    rows.sort(key=lambda row: (row["validation.mse"] is None, row["validation.mse"]))
    best = rows[0]["model"]
    if rows[0]["validation.mse"] is None:
        reasons = "; ".join(f"{row['model']}: {row['note']}" for row in rows)
        raise ValueError(f"model=auto: none of the models works on this data. {reasons}")
    return with_model(config, auto["candidates"][best]), rows


def tried(
    config: dict[str, Any], name: str, n: int, fit: list[Sequence], held: list[Sequence], folder: Path, data: Data, trust: bool
) -> Row:
    """One candidate: its error on the held-out part, its time, and if there is no error why."""
    auto, began = config["auto"], time.perf_counter()
    error, note = None, ""
    if not (auto["least"].get(name) or 0) <= n <= (auto["most"].get(name) or n):
        note = f"not tried on {n} training steps"
    else:
        codes = folder / "codes.pt"  # of images, fitted once
        try:
            error = held_out_error(config, fit, held, folder / name, trust=trust, codes=codes, extent=data.extent)
        except ValueError as failed:
            note = " ".join(str(failed).split())
    return {"validation.mse": error, "seconds": round(time.perf_counter() - began, 2), "note": note}


def held_out_part(data: Data, share: float) -> tuple[list[Sequence], list[Sequence]]:
    """What to fit and what to score a choice on: the data's own validation part, else the last ``share`` of the training part."""
    return (data.train, data.validation) if data.validation else split(data.train, share)


def held_out_error(
    config: dict[str, Any], fit: list[Sequence], held: list[Sequence], directory: Path, *, trust: bool = False, **settings: Any
) -> float:
    """The mean squared error on ``held`` of the model of ``config`` after it was fitted to ``fit``.

    Args:
        config: of ``kbf train``. fit: recordings to learn from. held: recordings to score on. directory: for checkpoints.
        trust, settings: as of `kbf.training.train.train`.

    Raises:
        ValueError: data that is too short for the model, or several processes.
    """
    quiet = {**config, "callbacks": None, "trainer": {**config["trainer"], "enable_progress_bar": False}}
    trained = train(quiet, fit, directory, trust=trust, **settings)
    if trained is None:
        raise ValueError("model=auto and hold_out run in one process: use trainer=cpu or trainer=gpu")
    module = trained.module
    return score(trained.filter, held, seed=config["seed"], dtype=module.input_dtype, device=module.device).mse.mean().item()


def with_model(config: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one of the candidates as its model, and a trainer that goes with it."""
    return {**config, "auto": config.get("auto", config["model"]), "model": model, "trainer": with_limits(config["trainer"], model)}


def show_choice(rows: list[Row]) -> None:
    """Print the candidates and their validation errors."""
    table = Table("model", "validation.mse", "seconds", "", title="model=auto: the first is chosen")
    for row in rows:
        error = "" if row["validation.mse"] is None else shown("validation.mse", row["validation.mse"])
        table.add_row(row["model"], error, shown("seconds", row["seconds"]), escape(row["note"]))
    console.print(table)
