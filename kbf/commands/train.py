"""``kbf train``: fit one model, score it, leave a run directory."""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

from rich.markup import escape

from kbf.build import build
from kbf.checkpoint import CheckpointError, Trained, read_checkpoint
from kbf.commands import auto
from kbf.commands.common import (
    about,
    console,
    recalibrated,
    reliability_metrics,
    reliability_of,
    score_metrics,
    show,
    start,
    tell,
    with_limits,
    write_pictures,
)
from kbf.data.source import Data, load_data
from kbf.data.windows import split
from kbf.evaluation import Score, data_floor, floor, score
from kbf.files import copy, write_csv, write_json, write_text
from kbf.held_out import learn_and_keep
from kbf.pictures import log_frames, log_track
from kbf.training import check, train


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Train, score, write; returns the metrics.

    Raises:
        ValueError: a configuration or data that cannot be used, with what to change.
    """
    start(config["threads"])
    ckpt_path = None if config["ckpt_path"] is None else Path(config["ckpt_path"])
    trust = True
    if ckpt_path is not None:
        config, trust = resumed(config, ckpt_path)
    directory = Path(config["run_dir"])
    data = load_data(config["data"], trust=trust)
    tell(data)
    tried: list[auto.Row] = []
    if "candidates" in config["model"]:
        config, tried = auto.choose(config, data, trust=trust)
        auto.show_choice(tried)
    check(config, data.train, trust=trust, validation=data.validation)
    least = data_floor(data, particles=config["particles"], seed=config["seed"])
    loggers = [build(logger, trust=True) for logger in (config["logger"] or {}).values()]
    began = time.perf_counter()
    trained = train(
        config,
        data.train,
        directory / "checkpoints",
        ckpt_path=ckpt_path,
        validation_floor=held_floor(config, data) if loggers else None,
        loggers=loggers,
        trust=trust,
        begin=lambda: prepare_directory(directory, ckpt_path, config, tried),
        extent=data.extent,
        validation=data.validation,
    )
    if trained is None:  # a helper process of a distributed run
        return {}
    if config["calibrate"]:
        trained = calibrated(trained, data, directory / "checkpoints", config["seed"])
    result, metrics = finish(config, data, trained, least, began)
    title = f"{metrics['model']} on {metrics['data']}, {metrics['n_train']} training steps"
    names = [] if result is None else write_pictures(config, data, result, title)
    write_json(directory / "metrics.json", metrics)
    flat = {name: value if isinstance(value, str | int | float | bool) else str(value) for name, value in flatten(config)}
    for logger in loggers:
        numbers = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float) and math.isfinite(v)}
        try:
            logger.log_hyperparams(flat, numbers)
        except TypeError:  # only TensorBoard takes both at once
            logger.log_hyperparams(flat)
            logger.log_metrics(numbers)
        logger.save()
    if result is not None:
        spread = None if result.covariances is None else result.covariances[0]
        shown = (data.test[0], result.estimates[0], trained.epochs)
        log_track(loggers, "track/test", *shown, covariances=spread)
        if data.test[0].obs.ndim == 4:
            log_frames(loggers, "frames/test", *shown, covariances=spread, extent=data.extent)
    for logger in loggers:
        logger.finalize("success")
    show(title, metrics, ["test.mse", "test.floor", "test.excess", "test.coverage_95", "validation.mse", "epochs", "seconds"])
    if result is None:
        console.print("[yellow]all steps were learned from[/]: there is no test part, and no score", highlight=False)
    written = ", ".join(["metrics.json", *names, "checkpoints/best.ckpt"])
    console.print(f"in [bold]{directory}[/]: {written}", highlight=False)
    return metrics


def calibrated(trained: Trained, data: Data, directory: Path, seed: int) -> Trained:
    """The model with its calibration and its monitor, in its checkpoints too; without, and told why, where data is too short."""
    with console.status("learning from held-out parts of the training data how sure the filter may be"):
        try:
            found = learn_and_keep(trained, directory, data.validation, seed=seed)
        except ValueError as error:
            console.print(f"[yellow]no calibration and no alarms[/]: {escape(str(error))}", highlight=False)
            return trained
    if found.monitor is None:
        console.print("[yellow]no alarms[/]: at nearly no training step all sensors have spoken", highlight=False)
    return found


def finish(
    config: dict[str, Any], data: Data, trained: Trained, least: Score | None, began: float
) -> tuple[Score | None, dict[str, Any]]:
    """Score a trained model on the test part, if there is one: the scores, and its metrics as flat keys."""
    fitted = time.perf_counter()
    module, result = trained.module, None
    metrics = about(config, data)
    if data.test:
        found = score(
            trained.filter, data.test, seed=config["seed"], dtype=module.input_dtype, device=module.device, covariances=True
        )
        metrics |= score_metrics(found, least) | reliability_metrics(reliability_of(found, data.test, trained.calibration))
        result = recalibrated(found, trained.calibration)
    validated = trained.validation_mse
    metrics |= {"validation.mse": validated, "epochs": trained.epochs}
    began -= module.borrowed_seconds  # the time that the encoders took when they were fitted for another model
    metrics |= {"seconds.fit": fitted - began, "seconds.test": time.perf_counter() - fitted}
    if hasattr(module.net, "hyperparameters"):
        metrics |= {f"hyperparameters.{name}": value for name, value in module.net.hyperparameters().items()}
    return result, metrics | {"seconds": time.perf_counter() - began}


def resumed(config: dict[str, Any], ckpt_path: Path) -> tuple[dict[str, Any], bool]:
    """The configuration of a run that goes on, and whether to trust it.

    With nothing said of model and data on the command line they are the checkpoint's own; otherwise they must be equal to them.
    """
    stored = read_checkpoint(ckpt_path)["hyper_parameters"]["config"]
    keys = ("model", "data", "recipe", "n_train", "seed")
    if missing := [key for key in keys if key not in stored]:
        raise CheckpointError(f"{ckpt_path} was not written by kbf train: its configuration lacks {', '.join(missing)}")
    if not config["explicit"]:
        return {**config, **{key: stored[key] for key in keys}, "trainer": with_limits(config["trainer"], stored["model"])}, config[
            "trust"
        ]
    mine, theirs = (dict(flatten({key: c[key] for key in keys})) for c in (config, stored))
    more = {"model.training.epochs"}  # a run may go on for longer
    different = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key) and key not in more)
    if different:
        told = "; ".join(f"{key}: {theirs.get(key)} there, {mine.get(key)} here" for key in different[:3])
        raise ValueError(f"{ckpt_path} is of a run with another configuration ({told}). Leave the overrides out to take its own.")
    return config, True


def prepare_directory(
    directory: Path, ckpt_path: Path | None, config: dict[str, Any], tried: list[dict[str, Any]] | None = None
) -> None:
    """Make the run directory: a fresh run clears the results of one before, a resumed one brings its best checkpoint.

    ``tried``: what model=auto tried, for ``auto.csv``.
    """
    from yaml import safe_dump

    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    if ckpt_path is None:
        written = ("metrics.json", "auto.csv", "track.png", "frames.png", "filter.gif", "projector_config.pbtxt")
        old = [*directory.glob("events.out.tfevents.*"), *checkpoints.glob("*.ckpt"), *(directory / name for name in written)]
        for path in old:
            path.unlink(missing_ok=True)
        for path in directory.glob("[0-9]" * 5 + "/features"):  # of TensorBoard's projector
            shutil.rmtree(path.parent)
    elif ckpt_path.resolve().parent != checkpoints.resolve() and (best := ckpt_path.parent / "best.ckpt").exists():
        copy(best, checkpoints / "best.ckpt")
    if tried:
        write_csv(directory / "auto.csv", tried)
    write_text(directory / "config.yaml", safe_dump({k: v for k, v in config.items() if k != "explicit"}, sort_keys=False))


def held_floor(config: dict[str, Any], data: Data) -> float | None:
    """The floor of the held-out part of the training sequences, where the true model explains the observations themselves."""
    training = config["model"].get("training") or {}
    if data.problem is None or not training.get("validation") or data.decoded is not data.test:
        return None
    fit, held = split(data.train, training["validation"])
    return floor(data.problem, fit, held, particles=min(config["particles"], 4000)).mse.mean().item()


def flatten(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested keys with dots between them.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    [('a.b', 1), ('c', '[2]')]
    """
    if not isinstance(config, dict):
        return [(prefix, json.dumps(config) if isinstance(config, list) else config)]
    return [pair for key, value in config.items() for pair in flatten(value, f"{prefix}.{key}" if prefix else str(key))]
