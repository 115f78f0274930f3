"""What is left to do of a training run of a sweep: nothing, its end, or all of it."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from kbf.commands.support.console import print_notes
from kbf.commands.support.run_states import read_json
from kbf.commands.train import settings_of
from kbf.fitted.checkpoint import BEST, LAST, CheckpointError, read_checkpoint
from kbf.runtime.provenance import changes, commit, files_of, sums_of
from kbf.runtime.run_folders import ABOUT, CLAIM, RESULT, locked
from kbf.training.callbacks import ENCODERS

# Time between two attempts to begin a job that another process works on.
SECONDS_BETWEEN_ATTEMPTS = 1.0
# Differences of two configurations that a message names.
MAX_NAMED_DIFFERENCES = 3


class DifferentRun(ValueError):
    """The folder of a job holds a run with other settings, data or code, which is kept."""


@contextmanager
def claimed(directory: Path) -> Iterator[None]:
    """Context in which no other process works on a job; waits until that is so.

    A sweep that is started again while jobs of the first still run, as on a cluster, thus finds
    their results.
    """
    place = directory / CLAIM.removeprefix(".lock-")
    with ExitStack() as stack:
        noted = False
        while True:
            try:
                stack.enter_context(locked(place, file=True))
                break
            except ValueError as error:
                if not noted:
                    print_notes([f"{error}; waiting for it"])
                    noted = True
                time.sleep(SECONDS_BETWEEN_ATTEMPTS)
        yield


def remaining(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return the configuration that finishes a run, or None if it is finished.

    A run that was cut continues from its last checkpoint. One whose checkpoints are lost or damaged
    starts again.

    Raises:
        DifferentRun: the folder holds a run with other settings, data or code.
    """
    directory = Path(config["run_dir"])
    if config["overwrite"] or config["ckpt_path"] is not None:
        return config
    checkpoints, whole = directory / "checkpoints", bool(read_json(directory / RESULT))
    best, encoders = (readable(checkpoints / name) for name in (BEST, ENCODERS))
    last = checkpoints / LAST if readable(checkpoints / LAST) and best else None
    last = last or (checkpoints / ENCODERS if encoders else None)
    if (whole and not best) or (not whole and last is None):  # cut between two files, or damaged
        started = whole or any(checkpoints.glob("*.ckpt"))
        return {**config, "overwrite": True} if started else config
    if found := differences(config, read_json(directory / ABOUT)):
        raise DifferentRun(
            f"{directory} holds {'a finished' if whole else 'an interrupted'} run that differs "
            f"({'; '.join(found[:MAX_NAMED_DIFFERENCES])}): name another hydra.sweep.dir, or "
            "replace the runs with overwrite=true"
        )
    if whole:
        return None
    return {**config, "ckpt_path": str(last), "explicit": False, "trust": True}


def readable(path: Path) -> bool:
    """Return whether there is a checkpoint that can be read; a note names one that cannot."""
    if not path.exists():
        return False
    try:
        read_checkpoint(path)
    except CheckpointError as error:
        print_notes([f"{error}: the run does not continue from it"])
        return False
    return True


def differences(config: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """Return the settings, files and the commit in which a run differs from its record."""
    mine, theirs = settings_of(config), record.get("settings")
    if not isinstance(theirs, dict):
        return ["there is no record of its settings"]
    found = [
        f"{key}: {theirs.get(key)} there, {mine.get(key)} here"
        for key in sorted(mine.keys() | theirs.keys())
        if mine.get(key) != theirs.get(key)
    ]
    found += changes(record, {"files": sums_of(files_of(config["data"]), config)})
    if (here := commit()) != record.get("commit"):
        found.append(f"commit: {record.get('commit')} there, {here} here")
    return found
