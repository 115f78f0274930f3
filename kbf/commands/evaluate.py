"""``kbf evaluate``: score a checkpoint, from itself alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from kbf.commands.support.console import (
    Drawn,
    about,
    console,
    estimate_rows,
    recalibrated,
    reliability_metrics,
    reliability_of,
    save_arrays,
    score_metrics,
    show,
    start,
    tell,
    tell_files,
    write_pictures,
)
from kbf.commands.support.smoothing_scores import check_requested, score_requested
from kbf.data.dataset import load_data
from kbf.evaluation.alarms import Check
from kbf.evaluation.floors import data_floor
from kbf.evaluation.score import score
from kbf.plots.tracks import calibration_figure, save
from kbf.runtime.atomic_files import write_csv, write_json
from kbf.training.checkpoint import check_like, load_filter


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Load, score, write; returns the metrics.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded. ValueError: data that does not fit it.
    """
    start(config["threads"])
    loaded = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    if not config["own_data"]:
        tell_files(config["data"], config["checkpoint"], config["given"])
    data = load_data(config["data"], trust=config["trust"] or config["own_data"])
    tell(data)
    if not data.test:
        raise ValueError(
            "there is no test part to score on (data.test=0): name another recording with data.path=FILE"
        )
    check_like(loaded.module, data.test[0], config["checkpoint"])
    check_requested(config, loaded, data)
    least = data_floor(data, particles=config["particles"], seed=config["seed"])
    began = time.perf_counter()
    result = score(
        loaded.filter,
        data.test,
        seed=config["seed"],
        dtype=loaded.module.input_dtype,
        device=config["device"],
        covariances=True,
        watch=None if loaded.monitor is None else loaded.monitor.check,
    )
    metrics = about({**config, "model": loaded.module.config["model"]}, data) | score_metrics(
        result, least, data.test
    )
    reliable = reliability_of(result, data.test, loaded.calibration)
    metrics |= reliability_metrics(reliable)
    result = recalibrated(result, loaded.calibration)
    checks = list(result.watched)
    metrics |= alarm_metrics(checks, 0.0 if loaded.monitor is None else loaded.monitor.rate.item())
    title = f"{metrics['model']} on {metrics['data']}"
    further = score_requested(config, loaded, data, title)
    metrics |= further.metrics
    metrics |= {"checkpoint": str(config["checkpoint"]), "seconds": time.perf_counter() - began}
    directory = Path(config["run_dir"])
    arrays = {}
    for k, (sequence, estimates) in enumerate(zip(data.test, result.estimates, strict=True)):
        arrays |= {f"estimates_{k}": estimates, f"states_{k}": sequence.states}
        if sequence.mask is not None:
            arrays[f"mask_{k}"] = sequence.mask
        if result.covariances is not None:
            arrays[f"covariances_{k}"] = result.covariances[k]
    save_arrays(directory / "predictions.npz", arrays | further.arrays | {"mse": result.mse})
    drawn = Drawn(
        checks[0].alarm if checks else None,
        None if loaded.calibration is None else loaded.calibration.radius2(0.95),
    )
    names = [*write_pictures(config, data, result, title, drawn), *further.pictures]
    if data.column_schema is not None:
        write_csv(directory / "estimates.csv", estimate_rows(data, result))
        names.append("estimates.csv")
    if reliable:
        sides = {
            "the filter's own" if name else "recalibrated": each for name, each in reliable.items()
        }
        save(calibration_figure(sides, title=title), directory / "calibration.png")
        names.append("calibration.png")
    write_json(directory / "metrics.json", metrics)
    show(title, {k: v for k, v in metrics.items() if k not in ("checkpoint", "version")})
    if reliable and loaded.calibration is None:
        hint = "this checkpoint has no calibration: its regions are the filter's own. kbf train writes one (calibrate=true)"
        console.print(f"[yellow]{hint}[/]", highlight=False)
    console.print(
        f"in [bold]{directory}[/]: metrics.json, predictions.npz, {', '.join(names)}",
        highlight=False,
    )
    return metrics


def alarm_metrics(checks: list[Check], rate: float) -> dict[str, float]:
    """The shares of steps with a novel or a surprising observation or a track that was found lost."""
    if not checks:
        return {}
    novelty, surprise, lost = (
        torch.cat([getattr(check, name) for check in checks])
        for name in ("novelty", "surprise", "lost")
    )
    alarms = {"novelty_alarms": novelty < rate, "surprise_alarms": surprise < rate, "lost": lost}
    return {f"test.{name}": alarm.double().mean().item() for name, alarm in alarms.items()}
