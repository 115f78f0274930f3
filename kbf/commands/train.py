"""``kbf train``: fit one model, score it, leave a run directory."""

from __future__ import annotations

import json
import shutil
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

from rich.markup import escape

from kbf.commands import auto
from kbf.commands.support import search_report
from kbf.commands.support.baseline_report import beside
from kbf.commands.support.console import (
    Telling,
    about,
    console,
    recalibrated,
    reliability_metrics,
    reliability_of,
    score_metrics,
    seconds_of,
    show,
    start,
    tell,
    tell_files,
    with_limits,
    without_model_selection,
    write_pictures,
)
from kbf.data.dataset import Data, load_data
from kbf.data.windows import hold_out
from kbf.evaluation.floors import data_floor, floor
from kbf.evaluation.score import Score, score
from kbf.runtime.atomic_files import LOCK, copy, locked, scratch, write_json, write_text
from kbf.runtime.instantiate import build
from kbf.training.callbacks import BEST, ENCODERS, LAST
from kbf.training.checkpoint import CheckpointError, Trained, read_checkpoint
from kbf.training.figure_logging import log_frames, log_track
from kbf.training.fit import check, is_helper, train
from kbf.training.held_out_calibration import learn_and_keep
from kbf.training.metric_logging import log_results


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Train, score, write; returns the metrics.

    Raises:
        ValueError: a configuration or data that cannot be used, with what to change; or another
            process that writes to the folder.
    """
    with ExitStack() as lock:
        return train_and_score(config, lock)


def train_and_score(config: dict[str, Any], lock: ExitStack) -> dict[str, Any]:
    """`run`, which takes the run's folder (``lock``) when it begins to write there."""
    start(config["threads"])
    budget = seconds_of(config["budget"])
    ckpt_path = None if config["ckpt_path"] is None else Path(config["ckpt_path"])
    trust = True
    if ckpt_path is not None:
        config, trust = resumed(config, ckpt_path)
        if not config["explicit"]:
            tell_files(config["data"], ckpt_path)
    directory = Path(config["run_dir"])
    check_free(directory, ckpt_path, overwrite=config["overwrite"])
    loggers = [build(logger, trust=True) for logger in (config["logger"] or {}).values()]
    data = load_data(config["data"], trust=trust)
    tell(data)
    compared: search_report.Lines = []
    if "candidates" in config["model"]:
        config, rows = auto.choose(config, data, trust=trust)
        compared = search_report.lines_of("auto", rows, {rows[0].model: 1.0})
        search_report.show(compared)
    if not config["calibrate"]:
        config = {**config, "model": without_model_selection(config["model"])}
    if budget is not None and config["model"].get("model_selection"):
        config = {**config, "model": {**config["model"], "budget": budget}}
    check(config, data.train, trust=trust, validation=data.validation)
    least = data_floor(data, particles=config["particles"], seed=config["seed"])
    held_out = (
        {}
        if not config["hold_out"]
        else {"held_out.mse": error_without_last_steps(config, data, trust=trust)}
    )
    began = time.perf_counter()

    def begin() -> None:
        check_free(
            directory, ckpt_path, overwrite=config["overwrite"]
        )  # another run may have ended meanwhile
        lock.enter_context(locked(directory))
        prepare_directory(directory, ckpt_path, config, compared)

    silent = not config["model"].get("training") and not config["model"].get(
        "encoding"
    )  # else there is a progress bar
    steps = sum(len(s.states) for s in data.train)
    with (
        Telling(f"fitting {config['model']['name']} to {steps:,} steps")
        if silent
        else nullcontext()
    ):
        trained = train(
            config,
            data.train,
            directory / "checkpoints",
            ckpt_path=ckpt_path,
            validation_floor=held_floor(config, data) if loggers else None,
            loggers=loggers,
            trust=trust,
            begin=begin,
            extent=data.extent,
            validation=data.validation,
        )
    if trained is None:  # a helper process of a distributed run
        return {}
    if config["calibrate"]:
        trained = calibrated(trained, data, directory / "checkpoints", config["seed"])
    result, metrics = finish(config, data, trained, least, began)
    metrics |= held_out
    title = f"{metrics['model']} on {metrics['data']}, {metrics['n_train']} training steps"
    names = [] if result is None else write_pictures(config, data, result, title)
    write_json(directory / "metrics.json", metrics)
    last_step = max(0, trained.steps - 1)  # that of the last point of the curves
    log_results(loggers, config, metrics, last_step)
    under = search_report.lines_of_net(trained.module.net)
    search_report.write(directory, compared + under)
    search_report.log(loggers, compared + under, last_step)
    if result is not None:
        spread = None if result.covariances is None else result.covariances[0]
        shown = (data.test[0], result.estimates[0], last_step)
        log_track(loggers, "track/test", *shown, covariances=spread)
        if data.test[0].obs.ndim == 4:
            log_frames(loggers, "frames/test", *shown, covariances=spread, extent=data.extent)
    for logger in loggers:
        logger.finalize("success")
    search_report.show(under)
    for told in search_report.notes_on_selection(trained.module.net):
        console.print(f"[yellow]{told}[/]", highlight=False)
    of_the_test = [f"test.{name}" for name in ("mse", "nmse", "floor", "excess", "coverage_95")]
    of_the_test += ["test.rejected"] if metrics.get("test.rejected") else []
    show(title, metrics, [*of_the_test, "validation.mse", "held_out.mse", "epochs", "seconds"])
    if result is not None:
        metrics |= beside(config, data, result)
        write_json(directory / "metrics.json", metrics)
    if result is None:
        console.print(
            "[yellow]all steps were learned from[/]: there is no test part, and no score",
            highlight=False,
        )
    written = ", ".join(["metrics.json", *names, "checkpoints/best.ckpt"])
    console.print(f"in [bold]{directory}[/]: {written}", highlight=False)
    return metrics


def error_without_last_steps(config: dict[str, Any], data: Data, *, trust: bool) -> float:
    """``held_out.mse``: the error on the end of the training part (``hold_out``) of a fit to the rest, which is then forgotten."""
    fit, held = auto.held_out_part(data, config["hold_out"])
    with (
        scratch(config["run_dir"]) as folder,
        console.status("a fit without the end of the training part"),
    ):
        trained = auto.held_out_filter(config, fit, folder, trust=trust, extent=data.extent)
        return auto.held_out_score(trained, held).mse.mean().item()


def calibrated(trained: Trained, data: Data, directory: Path, seed: int) -> Trained:
    """The model with its calibration and its monitor, in its checkpoints too; without, and told why, where data is too short."""
    with console.status(
        "learning from held-out parts of the training data how sure the filter may be"
    ):
        try:
            calibrated = learn_and_keep(trained, directory, data.validation, seed=seed)
        except ValueError as error:
            console.print(
                f"[yellow]no calibration and no alarms[/]: {escape(str(error))}", highlight=False
            )
            return trained
    if calibrated.monitor is None:
        console.print(
            "[yellow]no alarms[/]: at nearly no training step all sensors have spoken",
            highlight=False,
        )
    return calibrated


def finish(
    config: dict[str, Any], data: Data, trained: Trained, least: Score | None, began: float
) -> tuple[Score | None, dict[str, Any]]:
    """Score a trained model on the test part, if there is one: the scores, and its metrics as flat keys."""
    fitted = time.perf_counter()
    module, result = trained.module, None
    metrics = about(config, data)
    if data.test:
        scores = score(
            trained.filter,
            data.test,
            seed=config["seed"],
            dtype=module.input_dtype,
            device=module.device,
            covariances=True,
        )
        metrics |= score_metrics(scores, least, data.test)
        metrics |= reliability_metrics(reliability_of(scores, data.test, trained.calibration))
        result = recalibrated(scores, trained.calibration)
    validated = trained.validation_mse
    metrics |= {"validation.mse": validated, "epochs": trained.epochs}
    began -= (
        module.borrowed_seconds
    )  # the time that the encoders took when they were fitted for another model
    tested = time.perf_counter() - fitted
    metrics |= {"seconds.fit": fitted - began, "seconds.test": tested}
    if data.test:  # sequences run beside each other: a step of the loop is one of each
        metrics["seconds.step"] = tested / max(len(s.states) for s in data.test)
    if hasattr(module.net, "hyperparameters"):
        metrics |= {
            f"hyperparameters.{name}": value for name, value in module.net.hyperparameters().items()
        }
    return result, metrics | {"seconds": time.perf_counter() - began}


def resumed(config: dict[str, Any], ckpt_path: Path) -> tuple[dict[str, Any], bool]:
    """The configuration of a run that goes on, and whether to trust it.

    With nothing said of model and data on the command line they are the checkpoint's own; otherwise
    they must be equal to them.
    """
    stored = read_checkpoint(ckpt_path)["hyper_parameters"]["config"]
    keys = ("model", "data", "recipe", "n_train", "seed")
    if missing := [key for key in keys if key not in stored]:
        raise CheckpointError(
            f"{ckpt_path} was not written by kbf train: its configuration lacks {', '.join(missing)}"
        )
    if not config["explicit"]:
        return {
            **config,
            **{key: stored[key] for key in keys},
            "trainer": with_limits(config["trainer"], stored["model"]),
        }, config["trust"]
    mine, theirs = (dict(flatten({key: c[key] for key in keys})) for c in (config, stored))
    more = {"model.training.epochs"}  # a run may go on for longer
    different = sorted(
        key
        for key in mine.keys() | theirs.keys()
        if mine.get(key) != theirs.get(key) and key not in more
    )
    if different:
        differences = "; ".join(
            f"{key}: {theirs.get(key)} there, {mine.get(key)} here" for key in different[:3]
        )
        raise ValueError(
            f"{ckpt_path} is of a run with another configuration ({differences}). Leave the overrides out to take its own."
        )
    return config, True


def check_free(directory: Path, ckpt_path: Path | None, *, overwrite: bool) -> None:
    """Raise a ValueError if a run that is not the one that goes on has left its results or its checkpoints in a folder.

    Or if another process writes there now; the helper processes of a distributed run belong to the
    one that does.
    """
    if is_helper():
        return
    if (directory / LOCK).exists():
        with locked(directory):
            pass
    checkpoints = directory / "checkpoints"
    if overwrite or (ckpt_path is not None and ckpt_path.resolve().parent == checkpoints.resolve()):
        return
    if (directory / "metrics.json").exists():
        raise ValueError(
            f"{directory} holds a finished run: name another run_dir, or replace it with overwrite=true"
        )
    for name in (LAST, ENCODERS, BEST):
        if (checkpoints / name).exists():
            goes_on = f"kbf train ckpt_path={checkpoints / name} goes on with it"
            raise ValueError(
                f"{directory} holds an interrupted run: {goes_on}; overwrite=true begins anew"
            )


def prepare_directory(
    directory: Path,
    ckpt_path: Path | None,
    config: dict[str, Any],
    compared: search_report.Lines | None = None,
) -> None:
    """Make the run directory: a fresh run clears the results of one before, a resumed one brings its best checkpoint.

    ``compared``: what model=auto tried, for ``candidates.csv``: a kill does not take it away.
    """
    from yaml import safe_dump

    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    if ckpt_path is None:
        written = (
            "metrics.json",
            "candidates.csv",
            "track.png",
            "frames.png",
            "filter.gif",
            "projector_config.pbtxt",
            "hparams.yaml",
        )
        old = [
            *directory.glob("events.out.tfevents.*"),
            *checkpoints.glob("*.ckpt"),
            *(directory / name for name in written),
        ]
        for path in old:
            path.unlink(missing_ok=True)
        for path in directory.glob("[0-9]" * 5 + "*/features"):  # of TensorBoard's projector
            shutil.rmtree(path.parent)
    elif ckpt_path.resolve().parent != checkpoints.resolve():
        own, brought = checkpoints / BEST, ckpt_path.parent / BEST
        for name in (
            LAST,
            ENCODERS,
        ):  # of another run, perhaps, which would not go with the best that comes now
            (checkpoints / name).unlink(missing_ok=True)
        if brought.exists():
            copy(brought, own)
        elif (
            own.exists()
            and read_checkpoint(own)["hyper_parameters"]
            != read_checkpoint(ckpt_path)["hyper_parameters"]
        ):
            own.unlink()
    search_report.write(directory, compared or [])
    write_text(
        directory / "config.yaml",
        safe_dump({k: v for k, v in config.items() if k != "explicit"}, sort_keys=False),
    )


def held_floor(config: dict[str, Any], data: Data) -> float | None:
    """The floor of the held-out part of the training sequences, where the true model explains the observations themselves."""
    training = config["model"].get("training") or {}
    if data.problem is None or not training.get("validation") or data.decoded is not data.test:
        return None
    fit, held = hold_out(data.train, training["validation"])
    return (
        floor(data.problem, fit, held, particles=min(config["particles"], 4000)).mse.mean().item()
    )


def flatten(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Nested keys with dots between them.

    >>> flatten({"a": {"b": 1}, "c": [2]})
    [('a.b', 1), ('c', '[2]')]
    """
    if not isinstance(config, dict):
        return [(prefix, json.dumps(config) if isinstance(config, list) else config)]
    return [
        pair
        for key, value in config.items()
        for pair in flatten(value, f"{prefix}.{key}" if prefix else str(key))
    ]
