"""Runs the module of a command, with locks of the files and folders that the command writes to."""

import importlib
import json
import os
import shlex
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from kbf.cli.commands import COMMANDS
from kbf.config.composition import short
from kbf.runtime.run_folders import ABOUT, locked

# Settings that name the folder or the files that a command writes.
WRITTEN = ("run_dir", "out", "output", "state")


def execute(command: str, config: dict[str, Any]) -> Any:
    """Run a command, with locks of the files and folders that it writes to; returns its result.

    Raises:
        ValueError: another process writes to one of them, or a folder has results of another
            command.
    """
    if config.get("run_dir"):
        check_same_command(Path(os.path.expanduser(str(config["run_dir"]))), command)
    if command == "train":  # which locks its folder when it begins to write
        return run_module(command, config)
    with ExitStack() as locks:
        for key in WRITTEN:
            place = Path(os.path.expanduser(str(config.get(key) or "-")))
            if str(place) != "-" and not (key != "run_dir" and is_stream(place)):
                locks.enter_context(locked(place, file=key != "run_dir"))
        return run_module(command, config)


def check_same_command(directory: Path, command: str) -> None:
    """Check that a folder has no results of another command, which would be mixed with its own.

    Raises:
        ValueError: it has.
    """
    words: list[str] = []
    with suppress(OSError, ValueError, TypeError, KeyError):  # no folder, or no record of kbf
        words = shlex.split(json.loads((directory / ABOUT).read_text(encoding="utf-8"))["command"])
    for known in (" ".join(words[1:3]), " ".join(words[1:2])):
        if known == command:
            return
        if known in COMMANDS:
            raise ValueError(f"{directory} is the folder of kbf {known}: name another run_dir")


def is_stream(path: Path) -> bool:
    """Whether a path is a device or a pipe, which several processes may write to."""
    return path.exists() and not path.is_file()


def run_module(command: str, config: dict[str, Any]) -> Any:
    """Set up the process, and run the module of a command."""
    if command == "bench" and config["threads"]:  # NumPy's threads are set before its import
        os.environ["OMP_NUM_THREADS"] = str(config["threads"])
    if command != "runs":  # which runs without PyTorch
        tune_process = importlib.import_module("kbf.runtime.threads").tune_process
        # Exported programs are compared with the filter in one thread.
        tune_process(1 if command == "export" else config.get("threads"))
    return importlib.import_module(f"kbf.commands.{short(command)}").run(config)
