"""Sweeps: ``kbf COMMAND --multirun`` with Hydra's launchers and sweepers.

A sweep of training runs goes on: the same command again skips the jobs that are finished, and runs
those that are missing or were cut (`kbf.commands.support.sweep_jobs`).
"""

import functools
import hashlib
import itertools
import json
import logging
import os
import re
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kbf.cli.errors import one_line
from kbf.cli.execution import execute
from kbf.config.composition import composing, hydra_of, short, words_for_hydra
from kbf.config.prepare import prepare
from kbf.runtime.hydra_quoting import quoted

# Settings that do not change what a sweep computes, and are not part of the name of its folder.
WITHOUT_EFFECT = re.compile(
    r"hydra\.sweep\.dir|overwrite|launcher|hydra/launcher|hydra\.launcher.*"
)
# Characters of the command line in the name of a sweep's folder; a hash follows.
MAX_NAME_LENGTH = 60
# Time between two looks of a worker whether the process that started it still runs.
SECONDS_BETWEEN_LOOKS = 0.5

log: logging.Logger = logging.getLogger("kbf")


def multirun(
    command: str, overrides: list[str], name: str | None = None, folders: tuple[str, ...] = ()
) -> int:
    """Run a sweep with Hydra's launcher and sweeper.

    Of a sweep of training runs all jobs run, also where some fail; a table of all is printed.

    Returns:
        1 if a job failed; of other commands than ``train``, the largest exit code of the runs.

    Raises:
        ValueError: an unknown setting, another sweep in the folder, or one reason for which all
            jobs failed.
    """
    with composing(command, jobs_of(overrides)[0], name=name, folders=folders):
        pass  # an unknown setting is an error here, with the nearest one
    words = [*words_for_hydra(command, overrides, sweep=True), "hydra.mode=MULTIRUN"]
    config_name = name or short(command)
    results: Any = []
    with hydra_of(command, folders) as hydra, root_logger_restored():
        folder = None
        if command == "train":
            words, folder = prepared_folder(hydra, config_name, words)
        task = functools.partial(run_of_sweep, command, os.getpid())
        try:
            results = hydra.multirun(config_name=config_name, task_function=task, overrides=words)
        finally:
            returned = [job.return_value for batch in results or [] for job in batch]
            failures = [each for each in returned if isinstance(each, str)]
            if folder is not None:
                report(folder, failures)
    if failures and failures == [failures[0]] * len(returned):
        raise ValueError(failures[0])
    return max((code for code in returned if type(code) is int), default=int(bool(failures)))


def prepared_folder(
    hydra: Any, config_name: str, words: list[str]
) -> tuple[list[str], Path | None]:
    """Return the words of a sweep with its folder, and the folder, in which its jobs are listed.

    The folder is named by the command line, so that the same command finds it again. That of a
    sweeper that searches is named by the time, and None is returned: its jobs are not known.

    Raises:
        ValueError: the folder holds another sweep.
    """
    from hydra.types import RunMode
    from omegaconf import OmegaConf

    settings: Any = {"with_log_configuration": False, "run_mode": RunMode.MULTIRUN}
    composed = hydra.compose_config(config_name, words, **settings).hydra
    if not str(composed.sweeper["_target_"]).endswith(".BasicSweeper"):
        return words, None
    raw: Any = OmegaConf.to_container(composed.sweep, resolve=False)
    folder = str(composed.sweep.dir)
    if "${now:" in raw["dir"]:
        folder = folder_of_sweep(words)
        words = [*words, f"hydra.sweep.dir={quoted(folder)}"]
    # Not resolved: values of environment variables belong in no file.
    task: Any = OmegaConf.to_container(composed.overrides.task, resolve=False)
    given = {word.lstrip("+").partition("=")[0] for word in task}
    if raw["subdir"] == "${hydra.job.num}" and "run_dir" not in given:
        list_jobs(Path(folder), jobs_of(task), overwrite="overwrite=true" in task)
    return words, Path(folder)


def folder_of_sweep(words: list[str]) -> str:
    """Return the default folder of a sweep, which its settings name.

    >>> folder_of_sweep(["model=kbf,lstm", "seed=0,1", "launcher=joblib"])
    'runs/multirun/model-kbf,lstm_seed-0,1-3401fec3'
    """
    named = [w for w in words if not WITHOUT_EFFECT.fullmatch(w.lstrip("+").partition("=")[0])]
    named = [word for word in named if word != "hydra.mode=MULTIRUN"]
    shown = re.sub(r"[^\w.,+]+", "-", "_".join(named).replace("=", "-"))[:MAX_NAME_LENGTH]
    digest = hashlib.sha256(json.dumps(named).encode()).hexdigest()[:8]
    return f"runs/multirun/{shown}-{digest}"


def jobs_of(overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each job, in the order of Hydra's basic sweeper.

    Ranges of numbers, from which other sweepers draw, are left out.

    >>> jobs_of(["model=kbf,ekf", "n_train=40"])
    [['model=kbf', 'n_train=40'], ['model=ekf', 'n_train=40']]
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    several: dict[str, list[str]] = {}
    for each in OverridesParser.create().parse_overrides(overrides):
        key, values = each.get_key_element(), []
        if not each.is_sweep_override():
            values = [each.get_value_element_as_str()]
        elif each.is_discrete_sweep():
            values = each.sweep_string_iterator()
        several[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*filter(None, several.values()))]


def list_jobs(folder: Path, jobs: list[list[str]], *, overwrite: bool) -> None:
    """Write the list of the jobs of a sweep into its folder.

    Raises:
        ValueError: the folder holds a job with other settings, and they are not to be replaced.
    """
    from kbf.commands.support.run_states import JOBS, read_json, without_places
    from kbf.runtime.atomic_files import write_json

    known = [job["overrides"] for job in read_json(folder / JOBS).get("jobs", [])]
    for k, (mine, theirs) in enumerate(zip(jobs, known, strict=False)):
        if not overwrite and without_places(mine) != without_places(theirs):
            there, here = (" ".join(each) for each in (theirs, mine))
            raise ValueError(
                f"{folder} holds another sweep: its job {k} is {there}, here it is {here}. Name "
                "another hydra.sweep.dir, or replace the runs with overwrite=true"
            )
    listed = [{"folder": str(k), "overrides": job} for k, job in enumerate(jobs)]
    write_json(folder / JOBS, {"jobs": listed})


def report(folder: Path, failures: list[str]) -> None:
    """Print a table of the runs of a sweep, and the lines of the jobs that failed or were refused.

    Args:
        folder: of the sweep.
        failures: lines of the jobs. Those of folders that hold another run are in no file.
    """
    from rich.markup import escape

    from kbf.commands.runs import metric_of, print_runs
    from kbf.commands.support.console import console
    from kbf.commands.support.run_states import read_runs

    try:
        runs = read_runs(folder)
    except ValueError:  # no job has started
        runs = []
    if runs:
        print_runs(folder, runs, metric_of(runs, None), largest=False)
        console.print(f"kbf runs {folder} prints this table again", highlight=False, soft_wrap=True)
    known = {each.error for each in runs}
    for line in (line for line in failures if line not in known):
        console.print(f"[red]refused[/] {escape(line)}", highlight=False, soft_wrap=True)


def run_of_sweep(command: str, launcher: int, composed: Any) -> float | int | str | None:
    """Run one job of a sweep, without progress bars, which would be mixed with those of others.

    Args:
        command: of the sweep.
        launcher: number of the process that started the sweep. A worker of it ends with it.
        composed: the configuration of the job.

    Returns:
        Of a training run the error on steps that it was not trained on (``held_out.mse``, else
        ``validation.mse``), which sweepers minimise; the line of its error if it failed, unless the
        sweeper searches. Runs of a sweeper that searches hold steps out (``hold_out``), unless the
        command line sets it, so that every model has this error. Of another command its exit code.
    """
    from hydra.core.hydra_config import HydraConfig

    if os.getpid() != launcher and os.getppid() == launcher:
        threading.Thread(target=end_with, args=(launcher,), daemon=True).start()
    job = HydraConfig.get()
    searches = not str(job.sweeper["_target_"]).endswith(".BasicSweeper")
    goes_on = command == "train" and not searches
    try:
        config = prepare(command, composed, list(job.overrides.task))
    except Exception as error:
        if not goes_on:
            raise
        return write_failure(Path(job.runtime.output_dir), error)
    if "trainer" in config:
        config["trainer"] = {**config["trainer"], "enable_progress_bar": False}
    # Lightning would start the command line of the sweep again, with all of its jobs.
    config["single"] = "jobs of a sweep run"
    if searches and config.get("hold_out") == 0:
        config["hold_out"] = 0.2
    result = finish_job(config) if goes_on else execute(command, config)
    if isinstance(result, dict):
        return result.get("held_out.mse", result.get("validation.mse"))
    return result


def end_with(launcher: int) -> None:
    """End this process when the process that started it has ended."""
    while os.getppid() == launcher:
        time.sleep(SECONDS_BETWEEN_LOOKS)
    os._exit(1)


def finish_job(config: dict[str, Any]) -> dict[str, Any] | str:
    """Finish a training run of a sweep, of which a part or all may be done.

    Returns:
        The metrics; the line of the error if the run failed. It is then in ``failed.json`` of the
        folder as well, unless that holds another run.
    """
    from kbf.commands.support.run_states import FAILURE, read_json
    from kbf.commands.support.sweep_jobs import DifferentRun, claimed, remaining
    from kbf.runtime.run_folders import RESULT

    directory = Path(config["run_dir"])
    with claimed(directory):
        (directory / FAILURE).unlink(missing_ok=True)
        try:
            if (left := remaining(config)) is None:
                log.info("%s is finished already", directory)
                return read_json(directory / RESULT)
            return execute("train", left)
        except Exception as error:
            kept = isinstance(error, DifferentRun)
            return write_failure(None if kept else directory, error, config)


def write_failure(directory: Path | None, error: Exception, config: Any = None) -> str:
    """Write the error of a job to ``failed.json`` in its folder and log it; returns its line.

    Args:
        directory: of the run; None writes no file.
        error: of the job.
        config: refers to the environment variables whose values are not written.
    """
    from kbf.commands.support.run_states import FAILURE
    from kbf.runtime.atomic_files import write_json
    from kbf.runtime.interpolation import masked

    texts = {"error": one_line(error), "traceback": traceback.format_exc()}
    failure = {key: masked(text, config) for key, text in texts.items()}
    if directory is not None:
        write_json(directory / FAILURE, failure)
    log.error("%s", failure["error"])
    return failure["error"]


@contextmanager
def root_logger_restored() -> Iterator[None]:
    """Context that restores the handlers and the level of Python's root logger."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
