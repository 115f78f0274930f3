"""``kbf append``: add recordings to a trained filter's memory, without training it again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kbf.commands.support.console import console, show, start, tell, tell_files
from kbf.data.dataset import load_data
from kbf.data.files.splits import where_known
from kbf.data.windows import Span, take
from kbf.evaluation.score import score
from kbf.recording import Recording
from kbf.training.append import append
from kbf.training.checkpoint import check_like, load_filter


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Read the recordings, append them to the memory and write the new checkpoint; returns the summary that is printed.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded. ValueError: recordings that do not fit
            it.
    """
    start(config["threads"])
    budget, out, began = config["budget"], Path(config["out"]), time.perf_counter()
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ValueError(
            f"budget must be a whole number of points, or null for all; got {budget!r}"
        )
    loaded = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    check_new(config, loaded.module.config, out)
    if not config["own_data"]:
        tell_files(config["data"], config["checkpoint"], config["given"])
    data = load_data(config["data"], trust=config["trust"] or config["own_data"])
    tell(data)
    cut = bool(config["data"].get("cut_missing"))
    recordings = [
        part
        for whole in (*data.train, *data.validation, *data.test)
        for part in known(whole, cut_missing=cut)
    ]
    if not recordings:
        raise ValueError(
            "there is no step with a known state in these recordings: nothing can be added"
        )
    check_like(loaded.module, recordings[0], config["checkpoint"])
    settings: Any = {
        "seed": config["seed"] or 0,
        "dtype": loaded.module.input_dtype,
        "device": config["device"],
    }
    with console.status("the old filter on the new recordings"):
        error = score(loaded.filter, recordings, **settings).mse.mean().item()
    with console.status("the new memory"):
        appended = append(
            config["checkpoint"],
            recordings,
            out,
            budget=budget,
            device=config["device"],
            trust=config["trust"],
            seed=config["seed"] or 0,
        )
    summary = {
        "points before": appended.before,
        "points added": appended.added,
        "points kept": appended.kept,
    }
    summary |= {
        "error of the old filter on the new recordings": error,
        "seconds": time.perf_counter() - began,
    }
    show(f"{config['checkpoint']}, with more recordings", summary)
    console.print(f"in [bold]{out}[/]", highlight=False)
    return {**summary, "checkpoint": str(out)}


def check_new(config: dict[str, Any], stored: dict[str, Any], out: Path) -> None:
    """Raise a ValueError if the recordings are those that the checkpoint has learned from, or if ``out`` is their file."""
    path = config["data"].get("path")
    if path == stored["data"].get("path") if path is not None else config["data"] == stored["data"]:
        raise ValueError(
            "the checkpoint has learned from these recordings: data.path=FILE (or seed=NUMBER) says what is new"
        )
    if path is not None and out.expanduser().resolve() == Path(path):
        raise ValueError(f"out={out} would overwrite the recordings")


def known(sequence: Recording, *, cut_missing: bool = False) -> list[Recording]:
    """The stretches of a recording in which the state is known; with ``cut_missing`` also the observation, as in training."""
    there = sequence.states.isfinite().all(-1)
    there = there & sequence.mask if cut_missing and sequence.mask is not None else there
    return take([sequence], where_known([Span(0, 0, len(there))], lambda _: there))
