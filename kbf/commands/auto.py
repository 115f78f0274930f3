"""``kbf train model=auto``: try several models on a validation part, and go on with the best."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from kbf.commands.common import console, seconds_of, with_limits, without_net_under
from kbf.data.dataset import Data
from kbf.data.windows import split
from kbf.evaluation.score import Score, score
from kbf.filters.best_of import MOST, Row, deviation, nmse_of
from kbf.runtime.files import scratch
from kbf.sequence import Sequence
from kbf.training.train import train


def choose(config: dict[str, Any], data: Data, *, trust: bool = False) -> tuple[dict[str, Any], list[Row]]:
    """The configuration of the best candidate, and what was tried, the best first, in the same words as the net under a model.

    Each candidate learns from the training part without its last steps, and is scored on these (or on ``data.validation``) by the
    loop that scores everything; the measure is the NMSE, as the components of a state may have units of their own. One that cannot
    be built or does not fit the data is noted and left out. No test data is seen.

    Raises:
        ValueError: too few training steps to hold some out, or no candidate that works.
    """
    auto = config["model"]
    fit, held = held_out_part(data, auto["validation"])
    n = sum(len(s.states) for s in fit)
    rows: list[Row] = []
    budget, began = seconds_of(config.get("budget")), time.perf_counter()
    columns = [TextColumn("trying {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()]
    with scratch(config["run_dir"]) as folder, Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(auto["candidates"]))
        for name, model in auto["candidates"].items():
            progress.update(bar, description=escape(name))
            if budget is not None and rows and time.perf_counter() - began > budget:
                note = f"not tried: the budget of {budget:g} s is spent"
                rows.append(Row(name, None, None, 0.0, note))
                continue
            rows.append(tried(with_model(config, without_net_under(model)), name, n, fit, held, folder, data, trust))
            progress.advance(bar)
    rows.sort(key=lambda row: (row.nmse is None, row.nmse))
    if rows[0].nmse is None:
        reasons = "; ".join(f"{row.model}: {row.note}" for row in rows)
        raise ValueError(f"model=auto: none of the models works on this data. {reasons}")
    return with_model(config, auto["candidates"][rows[0].model]), rows


def tried(
    config: dict[str, Any], name: str, n: int, fit: list[Sequence], held: list[Sequence], folder: Path, data: Data, trust: bool
) -> Row:
    """One candidate: its error on the held-out part, its time, and if there is no error why."""
    auto, began = config["auto"], time.perf_counter()
    errors, note = torch.zeros(0), ""
    if not (auto["least"].get(name) or 0) <= n <= (auto["most"].get(name) or n):
        note = f"not tried on {n} training steps"
    else:
        codes = folder / "codes.pt"  # of images, fitted once
        try:
            found = held_out_score(config, fit, held, folder / name, trust=trust, codes=codes, extent=data.extent)
            errors = errors_of(found, fit, held)
        except ValueError as failed:
            note = " ".join(str(failed).split())
    error = float(errors.mean()) if len(errors) else None
    return Row(name, error, deviation(errors), round(time.perf_counter() - began, 2), note)


def errors_of(found: Score, fit: list[Sequence], held: list[Sequence]) -> Float[Tensor, " s"]:
    """The NMSE of each of at most `MOST` equal stretches of the held-out part, over the variance of the states that were fitted."""
    scale = torch.cat([s.states for s in fit]).double().var(0, correction=0)
    residuals = torch.cat([s.states.double().cpu() for s in held]) - torch.cat(found.estimates).double().cpu()
    return torch.stack([nmse_of(each, scale.cpu()) for each in residuals.tensor_split(min(MOST, len(residuals)))])


def held_out_part(data: Data, share: float) -> tuple[list[Sequence], list[Sequence]]:
    """What to fit and what to score a choice on: the data's own validation part, else the last ``share`` of the training part."""
    return (data.train, data.validation) if data.validation else split(data.train, share)


def held_out_score(
    config: dict[str, Any], fit: list[Sequence], held: list[Sequence], directory: Path, *, trust: bool = False, **settings: Any
) -> Score:
    """The scores on ``held`` of the model of ``config`` after it was fitted to ``fit``.

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
    return score(trained.filter, held, seed=config["seed"], dtype=module.input_dtype, device=module.device)


def with_model(config: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """The configuration with one of the candidates as its model, and a trainer that goes with it."""
    return {**config, "auto": config.get("auto", config["model"]), "model": model, "trainer": with_limits(config["trainer"], model)}
