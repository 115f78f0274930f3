"""``kbf evaluate``: score a checkpoint, from itself alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kbf.commands.common import about, console, save_arrays, score_metrics, show, start, write_pictures
from kbf.data.source import load_data
from kbf.evaluation import data_floor, score
from kbf.files import write_json
from kbf.sequence import Sequence
from kbf.training import FilterTraining, load_filter


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Load, score, write; returns the metrics.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded. ValueError: data that does not fit it.
    """
    start(config["threads"])
    loaded = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    data = load_data(config["data"], trust=config["trust"] or config["own_data"])
    check_shapes(loaded.module, data.test[0], config["checkpoint"])
    least = data_floor(data, particles=config["particles"], seed=config["seed"])
    began = time.perf_counter()
    result = score(
        loaded.filter,
        data.test,
        seed=config["seed"],
        dtype=loaded.module.model_dtype,
        device=config["device"],
        covariances=True,
    )
    metrics = about({**config, "model": loaded.module.config["model"]}, data) | score_metrics(result, least)
    metrics |= {"checkpoint": str(config["checkpoint"]), "seconds": time.perf_counter() - began}
    directory = Path(config["run_dir"])
    arrays = {}
    for k, (sequence, found) in enumerate(zip(data.test, result.estimates, strict=True)):
        arrays |= {f"estimates_{k}": found, f"states_{k}": sequence.states}
        if sequence.mask is not None:
            arrays[f"mask_{k}"] = sequence.mask
        if result.covariances is not None:
            arrays[f"covariances_{k}"] = result.covariances[k]
    title = f"{metrics['model']} on {metrics['data']}"
    save_arrays(directory / "predictions.npz", arrays | {"mse": result.mse})
    names = write_pictures(config, data, result, title)
    write_json(directory / "metrics.json", metrics)
    show(title, {k: v for k, v in metrics.items() if k not in ("checkpoint", "version")})
    console.print(f"in [bold]{directory}[/]: metrics.json, predictions.npz, {', '.join(names)}", highlight=False)
    return metrics


def check_shapes(module: FilterTraining, sequence: Sequence, checkpoint: str) -> None:
    """Raise if the data has other shapes than what the filter was trained on."""
    states = module.memory.sequences()[0].states.shape[1:]
    for name, mine, theirs in (("states", states, sequence.states), ("observations", module.observation, sequence.obs)):
        if tuple(mine or ()) != tuple(theirs.shape[1:]):
            raise ValueError(
                f"the data's {name} have the shape {tuple(theirs.shape[1:])}, "
                f"those that {checkpoint} was trained on {tuple(mine or ())}"
            )
