"""``kbf train``: fits one model, scores it and writes a run directory."""

import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kbf.commands.support import search_report
from kbf.commands.support.baseline_report import print_baselines
from kbf.commands.support.console import (
    print_notes,
    print_read_files,
    print_values,
    print_written,
    warnings_as_notes,
)
from kbf.commands.support.provenance import about
from kbf.commands.support.run_files import write_figures
from kbf.commands.support.run_states import read_json
from kbf.commands.support.score_metrics import score_test_part, selected_filter
from kbf.config.run_settings import seconds_of, with_limits, with_selection
from kbf.data.dataset import Data, load_data
from kbf.data.files.dataset import FileData
from kbf.data.files.report import Report, examine
from kbf.data.windows import hold_out
from kbf.evaluation.floors import data_floor, floor
from kbf.evaluation.score import Score
from kbf.fitted.checkpoint import BEST, LAST, CheckpointError, Trained, read_checkpoint
from kbf.fitted.structure import ALWAYS, structure_of
from kbf.fitting import fit_model, with_shapes
from kbf.model_choice import choose, held_out_filter, held_out_part, held_out_score
from kbf.runtime.atomic_files import check_space, copy, scratch, write_json, write_text
from kbf.runtime.instantiate import build
from kbf.runtime.progress import shown_progress
from kbf.runtime.provenance import changes, continued, files_of, provenance
from kbf.runtime.run_folders import (
    ABOUT,
    RESULT,
    check_no_result,
    check_not_locked,
    locked,
    remove_former,
    set_aside,
)
from kbf.training.callbacks import ENCODERS
from kbf.training.figure_logging import log_frames, log_track
from kbf.training.fit import CHECKPOINT_KEYS, check, is_helper
from kbf.training.metric_logging import log_results

# Particles of the floor of the held-out part, which is only logged: more take long.
MAX_FLOOR_PARTICLES = 4000
# Warnings about the data that are printed; a table of many columns may have one for each.
MAX_WARNINGS = 12
# Metrics that are printed first; ``metrics.json`` has all.
PRINTED = ("filter", *(f"test.{key}" for key in ("mse", "nmse", "floor", "excess", "coverage_95")))


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Train, score and write the results; returns the metrics.

    Raises:
        ValueError: a configuration or data that cannot be used, with what to change; or another
            process writes to the folder.
    """
    with ExitStack() as lock:
        return train_and_score(config, lock)


def train_and_score(config: dict[str, Any], lock: ExitStack) -> dict[str, Any]:
    """Do the work of `run`; the lock of the run directory is entered when writing begins."""
    seconds_of(config["budget"])  # a wrong one is refused before any work
    asked = settings_of(config)
    ckpt_path = None if config["ckpt_path"] is None else Path(config["ckpt_path"])
    stored = None if ckpt_path is None else stored_configuration(ckpt_path)
    trust = stored is None or config["explicit"] or config["trust"]
    if stored is not None and not config["explicit"]:
        config = {**config, **stored, "trainer": with_limits(config["trainer"], stored["model"])}
        print_read_files(config["data"], config["ckpt_path"])
    directory, words, single = Path(config["run_dir"]), config["command"], config.get("single", "")
    config = {key: value for key, value in config.items() if key not in ("command", "single")}
    check_free(directory, ckpt_path, overwrite=config["overwrite"])
    loggers = [build(logger, trust=True) for logger in (config["logger"] or {}).values()]
    record = provenance(words, config, files_of(config["data"]))
    if ckpt_path is not None:
        record = continued(record_of_unchanged_data(ckpt_path, record), record)
    data = load_data(config["data"], trust=trust)
    bounds = config["data"].get("bounds")
    report = examine(data.source, bounds) if isinstance(data.source, FileData) else None
    print_notes(data.notes if report is None else first_warnings(report))
    # Two checkpoints, each with the recordings.
    check_space(directory, 2 * sum(r.obs.nbytes + r.states.nbytes for r in data.train))
    if stored is None or config["explicit"]:
        config = with_shapes(config, data)
        if stored is not None:
            check_same(config, stored, config["ckpt_path"])
    candidates: search_report.Candidates = []
    if "candidates" in config["model"]:
        config, rows = choose(config, data, trust=trust)
        candidates = search_report.candidates_of("auto", rows, {rows[0].model: 1.0})
        search_report.print_candidates(candidates)
    config = with_selection(config)
    check(config, data.train, trust=trust, validation=data.validation)
    least = data_floor(data, particles=config["particles"], seed=config["seed"])
    held_out = {}
    if config["hold_out"]:
        held_out = {"held_out.mse": error_without_last_steps(config, data, trust=trust)}
    began = time.perf_counter()

    def begin() -> None:
        # Checked again: another run may have ended in this folder meanwhile.
        check_free(directory, ckpt_path, overwrite=config["overwrite"])
        lock.enter_context(locked(directory))
        settings = asked
        if stored is not None and not config["explicit"]:
            settings = read_json(directory / ABOUT).get("settings")
        prepare_directory(directory, ckpt_path, config, candidates)
        write_json(directory / ABOUT, {**record, "settings": settings})

    with warnings_as_notes():
        trained = fit_model(
            config,
            data,
            directory / "checkpoints",
            ckpt_path=ckpt_path,
            validation_floor=held_out_floor(config, data) if loggers else None,
            loggers=loggers,
            trust=trust,
            begin=begin,
            extent=data.extent,
            provenance=record,
            single=single,
        )
    if trained is None:  # a helper process of a distributed run
        return {}
    result, metrics = finish(config, data, trained, least, began)
    metrics |= held_out
    title = f"{metrics['filter']} on {metrics['data']}, {metrics['n_train']} training steps"
    names = [] if result is None else write_figures(config, data, result, title)
    last_step = max(0, trained.steps - 1)  # that of the last point of the curves
    log_results(loggers, config, metrics, last_step)
    selection = search_report.candidates_of_net(trained.module.net)
    search_report.write(directory, candidates + selection)
    search_report.log(loggers, candidates + selection, last_step)
    if result is not None:
        spread = None if result.covariances is None else result.covariances[0]
        shown = (data.test[0], result.estimates[0], last_step)
        log_track(loggers, "track/test", *shown, covariances=spread)
        if data.test[0].obs.ndim == 4:
            log_frames(loggers, "frames/test", *shown, covariances=spread, extent=data.extent)
    for logger in loggers:
        logger.finalize("success")
    search_report.print_candidates(selection)
    schema = data.column_schema
    sensors = [] if schema is None else schema.components("observations")
    print_notes(search_report.selection_notes(trained.module.net, sensors))
    rejected = ["test.rejected"] if metrics.get("test.rejected") else []
    keys = [*PRINTED, *rejected, "validation.mse", "held_out.mse", "epochs", "seconds"]
    print_values(title, metrics, keys)
    if result is None:
        print_notes(["the filter was trained on all steps: there is no test part, and no score"])
    else:
        causes = [] if report is None else report.causes
        metrics |= print_baselines(config, data, result, metrics["filter"], causes)
    write_json(directory / RESULT, metrics)  # last: a run that has this file is whole
    remove_former(directory)
    if config["structure"] and isinstance(data.source, FileData):
        print_notes(structure_notes(trained, sensors))
    print_written(directory, ["metrics.json", *names, "checkpoints/best.ckpt"])
    return metrics


def structure_notes(trained: Trained, sensors: list[str]) -> list[str]:
    """Return a sentence for each property of sensors and moves that was found.

    Those that the model selection has found, too, are among its notes.
    """
    with shown_progress("what the recordings show"):
        found = structure_of(trained)
    held, late = search_report.held_and_late(trained.module.net, sensors)
    noted = (found.kind.isin(["held", "sticking"]) & found.column.isin(held)) | (
        (found.kind == "late") & found.column.isin(late)
    )
    return found.sentence[~found.kind.isin(ALWAYS) & ~noted].tolist()


def first_warnings(report: Report) -> list[str]:
    """Return the first `MAX_WARNINGS` warnings of a report on the data."""
    more = len(report.warnings) - MAX_WARNINGS
    tail = [f"and {more} more warnings: kbf data check prints all"] if more > 0 else []
    return [*report.warnings[:MAX_WARNINGS], *tail]


def error_without_last_steps(config: dict[str, Any], data: Data, *, trust: bool) -> float:
    """Return ``held_out.mse``: the error on the end of the training part, of a fit to the rest.

    That fit is only for this error; ``hold_out`` is the share of the end.
    """
    fit, held = held_out_part(data, config["hold_out"])
    with (
        scratch(config["run_dir"]) as folder,
        shown_progress("a fit without the end of the training part"),
    ):
        trained = held_out_filter(config, fit, folder, trust=trust, extent=data.extent)
        return held_out_score(trained, held).mse.mean().item()


def finish(
    config: dict[str, Any], data: Data, trained: Trained, least: Score | None, began: float
) -> tuple[Score | None, dict[str, Any]]:
    """Score a trained model on the test part, if there is one.

    Args:
        config: of the run.
        data: the data set.
        trained: the model.
        least: scores of the Bayes-optimal filter, if known.
        began: when the fit began (`time.perf_counter`).

    Returns:
        The scores, None without a test part; and the metrics as flat keys.
    """
    fitted, module, result = time.perf_counter(), trained.module, None
    metrics = about(config, data) | {"filter": selected_filter(trained)}
    if data.test:
        result, _, scores = score_test_part(trained, data, least, config["seed"])
        metrics |= scores
    # Encoders that were fitted for another model count as if they had been fitted here.
    began -= module.borrowed_seconds
    tested = time.perf_counter() - fitted
    metrics |= {
        "validation.mse": trained.validation_mse,
        "epochs": trained.epochs,
        "seconds.fit": fitted - began,
        "seconds.test": tested,
    }
    if data.test:  # recordings run in one batch: a step of the loop is one step of each
        metrics["seconds.step"] = tested / max(len(r.states) for r in data.test)
    if hasattr(module.net, "hyperparameters"):
        numbers = module.net.hyperparameters()
        metrics |= {f"hyperparameters.{name}": value for name, value in numbers.items()}
    return result, metrics | {"seconds": time.perf_counter() - began}


def stored_configuration(ckpt_path: Path) -> dict[str, Any]:
    """Return model and data of the run that a checkpoint is of.

    Raises:
        CheckpointError: the checkpoint was not written by ``kbf train``.
    """
    stored = read_checkpoint(ckpt_path)["hyper_parameters"]["config"]
    if missing := [key for key in CHECKPOINT_KEYS if key not in stored]:
        lacking = ", ".join(missing)
        raise CheckpointError(
            f"{ckpt_path} was not written by kbf train: its configuration lacks {lacking}"
        )
    return {key: stored[key] for key in CHECKPOINT_KEYS}


def record_of_unchanged_data(ckpt_path: Path, now: dict[str, Any]) -> dict[str, Any] | None:
    """Return the provenance of the run that a checkpoint is of, whose data must be the same.

    Raises:
        ValueError: a file has other contents now, is new, or is gone.
    """
    before = read_checkpoint(ckpt_path)["kbf"].get("provenance")
    if found := changes(before, now, same_files=True):
        raise ValueError(
            f"{'; '.join(found)}. A run continues on the same data: restore the files, or start a "
            "new run"
        )
    return before


def check_same(config: dict[str, Any], stored: dict[str, Any], ckpt_path: str) -> None:
    """Check that a run continues a checkpoint with its model and data.

    Raises:
        ValueError: they differ.
    """
    mine, theirs = (dict(flatten({k: c[k] for k in CHECKPOINT_KEYS})) for c in (config, stored))
    longer = {"model.training.epochs"}  # a run may continue for more epochs
    different = [
        f"{key}: {theirs.get(key)} there, {mine.get(key)} here"
        for key in sorted((mine.keys() | theirs.keys()) - longer)
        if mine.get(key) != theirs.get(key)
    ]
    if different:
        raise ValueError(
            f"{ckpt_path} is of a run with another configuration ({'; '.join(different[:3])}). "
            "Leave the overrides out to take its own."
        )


def settings_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a result depends on, by their full names, as JSON has them.

    Args:
        config: of `kbf.config.prepare.prepare`.
    """
    keys = ("model", "data", "trainer", "callbacks", "n_train", "seed")
    keys += ("calibrate", "budget", "hold_out", "particles")
    flat = dict(flatten({key: config[key] for key in keys}))
    shown = {key: value for key, value in flat.items() if not key.endswith("enable_progress_bar")}
    return json.loads(json.dumps(shown))


def check_free(directory: Path, ckpt_path: Path | None, *, overwrite: bool) -> None:
    """Check that a folder holds no other run, and that no other process writes to it.

    The helper processes of a distributed run belong to the process that writes.

    Raises:
        ValueError: results or checkpoints of another run are in the folder, or it is locked.
    """
    if is_helper():
        return
    check_not_locked(directory)
    checkpoints = directory / "checkpoints"
    if overwrite or (ckpt_path is not None and ckpt_path.resolve().parent == checkpoints.resolve()):
        return
    check_no_result(directory, overwrite=False)
    for name in (LAST, ENCODERS, BEST):
        if (checkpoints / name).exists():
            raise ValueError(
                f"{directory} holds an interrupted run: kbf train ckpt_path={checkpoints / name} "
                "continues it; overwrite=true starts a new one"
            )


def prepare_directory(
    directory: Path,
    ckpt_path: Path | None,
    config: dict[str, Any],
    candidates: search_report.Candidates | None = None,
) -> None:
    """Make the run directory and write ``config.yaml``.

    A new run moves the results of a former one aside (`set_aside`); a resumed run brings its best
    checkpoint.

    Args:
        directory: of the run.
        ckpt_path: the checkpoint of a resumed run.
        config: of the run.
        candidates: of ``model=auto``, written now so that a killed run keeps them.
    """
    from yaml import safe_dump

    checkpoints = directory / "checkpoints"
    checkpoints.mkdir(parents=True, exist_ok=True)
    if ckpt_path is None:
        written = (
            *("metrics.json", search_report.FILE, "track.png", "frames.png", "filter.gif"),
            *("projector_config.pbtxt", "hparams.yaml", "config.yaml", ABOUT),
        )
        former = [
            *directory.glob("events.out.tfevents.*"),
            *checkpoints.glob("*.ckpt"),
            *(directory / name for name in written),
        ]
        # Folders of TensorBoard's projector.
        former += [path.parent for path in directory.glob("[0-9]" * 5 + "*/features")]
        set_aside(directory, former)
    elif ckpt_path.resolve().parent != checkpoints.resolve():
        own, brought = checkpoints / BEST, ckpt_path.parent / BEST
        # These may be of another run, and would not fit the best checkpoint that comes now.
        for name in (LAST, ENCODERS):
            (checkpoints / name).unlink(missing_ok=True)
        if brought.exists():
            copy(brought, own)
        elif own.exists():
            mine, theirs = (read_checkpoint(each)["hyper_parameters"] for each in (own, ckpt_path))
            if mine != theirs:
                own.unlink()
    search_report.write(directory, candidates or [])
    internal = ("explicit", "references")
    stored = {key: value for key, value in config.items() if key not in internal}
    stored |= config.get("references", {})
    write_text(directory / "config.yaml", safe_dump(stored, sort_keys=False))


def held_out_floor(config: dict[str, Any], data: Data) -> float | None:
    """Return the floor of the held-out part of the training recordings.

    None where the true model is not known, or does not explain the observations themselves.
    """
    training = config["model"].get("training") or {}
    if data.problem is None or not training.get("validation") or data.decoded is not data.test:
        return None
    fit, held = hold_out(data.train, training["validation"])
    particles = min(config["particles"], MAX_FLOOR_PARTICLES)
    return floor(data.problem, fit, held, particles=particles).mse.mean().item()


def flatten(config: Any, prefix: str = "") -> list[tuple[str, Any]]:
    """Return the entries of nested dictionaries, with keys joined by dots.

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
