"""States of runs, read from their folders: finished, failed, running, interrupted or missing.

A run directory has ``about.json`` from its first checkpoint on, ``metrics.json`` once it is whole,
and ``failed.json`` where it ended with an error. A folder of a sweep has ``jobs.json``, the jobs of
the sweep. Nothing else is needed, so that runs on other machines are seen as well.
"""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kbf.runtime.run_folders import ABOUT, CLAIM, FORMER, RESULT, writer_of

# The file of a run that ended with an error, with the line of the error.
FAILURE = "failed.json"
# The file of a sweep with the overrides and the folder of each job.
JOBS = "jobs.json"
# Settings that do not tell runs apart.
PLACES = ("run_dir", "overwrite", "hydra.sweep.dir", "hydra.run.dir", "launcher", "logger")


class Run(NamedTuple):
    """A run as its folder shows it.

    Attributes:
        folder: of the run.
        state: finished, failed, running, interrupted, or missing for a job that has not started.
        overrides: settings of its command line.
        metrics: of ``metrics.json``; empty without.
        error: the line of a failed run.
    """

    folder: Path
    state: str
    overrides: tuple[str, ...]
    metrics: dict[str, Any]
    error: str = ""


def read_runs(folder: Path) -> list[Run]:
    """Return the runs in a folder and below it, in the order of the jobs of a sweep, then by name.

    Raises:
        ValueError: there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}")
    jobs: dict[Path, tuple[str, ...]] = {}
    for file in sorted(folder.rglob(JOBS)):
        listed = read_json(file).get("jobs", [])
        jobs |= {file.parent / job["folder"]: tuple(job["overrides"]) for job in listed}
    found = {file.parent for name in (ABOUT, RESULT, FAILURE) for file in folder.rglob(name)}
    others = sorted(each for each in found if is_run(each) and each not in jobs)
    runs = [read_run(each, jobs.get(each)) for each in (*jobs, *others)]
    if not runs:
        raise ValueError(f"there is no run of kbf train in {folder}")
    return runs


def is_run(folder: Path) -> bool:
    """Return whether a folder is that of a training run, and not one that was replaced."""
    command = shlex.split(str(read_json(folder / ABOUT).get("command", "kbf train")))
    return FORMER not in folder.parts and command[1:2] == ["train"]


def read_run(folder: Path, overrides: tuple[str, ...] | None = None) -> Run:
    """Return the run in a folder.

    Args:
        folder: of the run, which may be missing.
        overrides: of the job of a sweep; None reads them from the folder.
    """
    words = shlex.split(str(read_json(folder / ABOUT).get("command", "")))[2:]
    shown = tuple(without_places(words if overrides is None else overrides))
    metrics, failure = read_json(folder / RESULT), read_json(folder / FAILURE)
    if metrics:
        state = "finished"
    elif writer_of(folder) or writer_of(folder, CLAIM):
        state = "running"
    elif failure:
        state = "failed"
    else:
        state = "interrupted" if folder.is_dir() else "missing"
    return Run(folder, state, shown, metrics, str(failure.get("error", "")))


def without_places(overrides: Iterable[str]) -> list[str]:
    """Return overrides without those that only name a place or a launcher (`PLACES`)."""
    return [word for word in overrides if word.lstrip("+").partition("=")[0] not in PLACES]


def read_json(path: Path) -> dict[str, Any]:
    """Return the contents of a JSON file; empty where there is none, or it is no dictionary."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return contents if isinstance(contents, dict) else {}
