"""``kbf append``: add recordings to a trained filter's memory, without training it again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kbf.commands.common import console, show, start, tell
from kbf.data.own.parts import where_known
from kbf.data.source import load_data
from kbf.data.windows import Span, take
from kbf.evaluation import score
from kbf.memory import append, check_like
from kbf.sequence import Sequence
from kbf.training import load_filter


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Read, append, write; returns what is told.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded. ValueError: recordings that do not fit it.
    """
    start(config["threads"])
    budget, out, began = config["budget"], Path(config["out"]), time.perf_counter()
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ValueError(f"budget must be a whole number of points, or null for all; got {budget!r}")
    loaded = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    data = load_data(config["data"], trust=config["trust"] or config["own_data"])
    tell(data)
    recordings = [part for whole in (*data.train, *data.validation, *data.test) for part in known(whole)]
    if not recordings:
        raise ValueError("there is no step with a known state in these recordings: nothing can be added")
    check_like(loaded.module, recordings, config["checkpoint"])
    settings: Any = {"seed": config["seed"] or 0, "dtype": loaded.module.model_dtype, "device": config["device"]}
    with console.status("the old filter on the new recordings"):
        error = score(loaded.filter, recordings, **settings).mse.mean().item()
    with console.status("the new memory"):
        found = append(
            config["checkpoint"],
            recordings,
            out,
            budget=budget,
            device=config["device"],
            trust=config["trust"],
            seed=config["seed"] or 0,
        )
    told = {"points before": found.before, "points added": found.added, "points kept": found.kept}
    told |= {"error of the old filter on the new recordings": error, "seconds": time.perf_counter() - began}
    show(f"{config['checkpoint']}, with more recordings", told)
    console.print(f"in [bold]{out}[/]", highlight=False)
    return {**told, "checkpoint": str(out)}


def known(sequence: Sequence) -> list[Sequence]:
    """The stretches of a recording in which the state is known."""
    there = sequence.states.isfinite().all(-1)
    return take([sequence], where_known([Span(0, 0, len(there))], lambda _: there))
