"""``kbf evaluate``: scores a checkpoint on the test part of the data."""

import time
from pathlib import Path
from typing import Any

import torch

from kbf.commands.support.console import (
    print_notes,
    print_read_files,
    print_values,
    print_written,
)
from kbf.commands.support.provenance import about
from kbf.commands.support.run_files import estimate_rows, save_arrays, write_figures
from kbf.commands.support.score_metrics import score_test_part, selected_filter
from kbf.commands.support.smoothing_scores import check_requested, score_requested
from kbf.data.dataset import load_data
from kbf.evaluation.alarms import Check
from kbf.evaluation.floors import data_floor
from kbf.fitted.checkpoint import check_like, load_filter
from kbf.fitted.compatibility import data_differences
from kbf.plots.tracks import calibration_figure, save
from kbf.runtime.atomic_files import write_csv, write_json
from kbf.runtime.provenance import changes, files_of, provenance
from kbf.runtime.run_folders import ABOUT, RESULT, check_no_result, remove_former, set_aside

# Files that an evaluation may write, in addition to those that it always writes.
FILES = {
    *("track.png", "frames.png", "filter.gif", "estimates.csv"),
    *("calibration.png", "smoothed.png", "ahead.png", "predictions.npz"),
}


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint and the data, score, and write the results; returns the metrics.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ValueError: the data does not fit the checkpoint.
    """
    directory = Path(config["run_dir"])
    check_no_training(directory)
    check_no_result(directory, overwrite=config["overwrite"])
    loaded = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    if not config["own_data"]:
        print_read_files(config["data"], config["checkpoint"], config["given"])
    data = load_data(config["data"], trust=config["trust"] or config["own_data"])
    record = provenance(config["command"], config, files_of(config["data"]))
    print_notes([*data.notes, *changes(loaded.module.provenance, record)])
    if not data.test:
        raise ValueError(
            "there is no test part to score on (data.test=0): "
            "name another recording with data.path=FILE"
        )
    check_like(loaded.module, data.test[0], config["checkpoint"])
    print_notes(data_differences(loaded, data, data.test))
    check_requested(config, loaded, data)
    floor = data_floor(data, particles=config["particles"], seed=config["seed"])
    began, monitor, calibration = time.perf_counter(), loaded.monitor, loaded.calibration
    result, reliable, scores = score_test_part(loaded, data, floor, config["seed"])
    metrics = about({**config, "model": loaded.module.config["model"]}, data)
    checks = list(result.watched)
    alarms = alarm_metrics(checks, 0.0 if monitor is None else monitor.rate.item())
    metrics |= {"filter": selected_filter(loaded), **scores, **alarms}
    title = f"{metrics['filter']} on {metrics['data']}"
    if config["overwrite"]:
        set_aside(directory, [directory / name for name in FILES | {RESULT, ABOUT}])
    further = score_requested(config, loaded, data, title)
    seconds = time.perf_counter() - began
    metrics |= {**further.metrics, "checkpoint": str(config["checkpoint"]), "seconds": seconds}
    arrays = {"mse": result.mse} | further.arrays
    series = {
        "estimates": result.estimates,
        "states": [recording.states for recording in data.test],
        "mask": [recording.mask for recording in data.test],
        "covariances": result.covariances or [],
    }
    for name, values in series.items():
        arrays |= {f"{name}_{k}": each for k, each in enumerate(values) if each is not None}
    save_arrays(directory / "predictions.npz", arrays)
    marked = {
        "alarms": checks[0].alarm if checks else None,
        "radius2": None if calibration is None else calibration.radius2(0.95),
    }
    names = [*write_figures(config, data, result, title, **marked), *further.figures]
    if data.column_schema is not None:
        rows = estimate_rows(data, result, config["data"].get("bounds"))
        write_csv(directory / "estimates.csv", rows)
        names.append("estimates.csv")
    if reliable:
        labels = {"raw": "before recalibration", "": "recalibrated"}
        curves = {labels[name]: each for name, each in reliable.items()}
        save(calibration_figure(curves, title=title), directory / "calibration.png")
        names.append("calibration.png")
    write_json(directory / "metrics.json", metrics)
    write_json(directory / ABOUT, record)
    remove_former(directory)
    print_values(title, {k: v for k, v in metrics.items() if k not in ("checkpoint", "version")})
    if reliable and calibration is None:
        print_notes(
            [
                "this checkpoint has no calibration: its credible regions are not recalibrated. "
                "kbf train writes a calibration (calibrate=true)"
            ]
        )
    print_written(directory, ["metrics.json", "predictions.npz", *names])
    return metrics


def check_no_training(directory: Path) -> None:
    """Check that a folder is not that of a training run, whose results would be replaced.

    Raises:
        ValueError: it is.
    """
    if (directory / "checkpoints").exists():
        raise ValueError(f"{directory} is the folder of kbf train: name another run_dir")


def alarm_metrics(checks: list[Check], rate: float) -> dict[str, float]:
    """Return the shares of steps that are out of distribution, outliers, or diverged.

    The last two are left out for filters whose innovations are not measured.
    """
    if not checks:
        return {}
    out_of_distribution, innovation, diverged = (
        torch.cat([getattr(check, name) for check in checks])
        for name in ("out_of_distribution", "innovation", "diverged")
    )
    alarms = {
        "out_of_distribution_alarms": out_of_distribution < rate,
        "innovation_alarms": innovation < rate,
        "diverged": diverged,
    }
    if bool(innovation.isnan().all()):
        del alarms["innovation_alarms"], alarms["diverged"]
    return {f"test.{name}": alarm.double().mean().item() for name, alarm in alarms.items()}
