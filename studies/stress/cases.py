"""Stress cases: refused input runs in this process, killed commands in a forked one."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import io
import logging
import os
import random
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from kbf.cli import COMMANDS, execute, main
from kbf.config import configure, short
from kbf.plots.tracks import save, track_figure
from kbf.recording import Recording

CHECKPOINT = "small.ckpt"
"""The filter of the cases, in the folder in which they stand (`give_checkpoint`)."""
SMALL = [
    "train",
    "model=kbf_paper",
    "n_train=40",
    "data.n_test=20",
    "particles=50",
    "logger=none",
    "run_dir=run",
]
"""It has all that a checkpoint may: a memory, operators, a calibration and a monitor.

And it is quick.
"""


class Outcome(NamedTuple):
    """A case that was tried; ``why`` is empty where it passed."""

    section: str
    name: str
    why: str


def refused(words: list[str], stdin: bytes | None = None) -> str:
    """Run a command that must be refused: one line on standard error and exit code 2.

    Returns what is wrong, or nothing.
    """
    out, err, given = io.StringIO(), io.StringIO(), sys.stdin
    if stdin is not None:
        sys.stdin = io.TextIOWrapper(io.BytesIO(stdin))
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
    except BaseException as error:  # the very thing that must not be
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(where.filename).name}:{where.lineno}"
        return f"{type(error).__name__}: {str(error)[:100]} ({place})"
    finally:
        sys.stdin = given
    lines = err.getvalue().strip().splitlines()
    if code != 2:
        return f"exit code {code}"
    if len(lines) != 1 or not lines[0].startswith("kbf"):
        return f"{len(lines)} lines: {' / '.join(lines)[:200]}"
    return ""


class Killer:
    """An audit hook that ends the process before a given operation on files of a folder."""

    EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate")

    def __init__(self, folder: Path, at: int | None) -> None:
        self.folder, self.at, self.count = str(folder), at, 0
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        """An event of the interpreter."""
        if event == "open":
            path, mode, flags = arguments
            writes = (isinstance(mode, str) and set(mode) & set("wax+")) or (
                isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR)
            )
            if not writes or not isinstance(path, str | bytes | os.PathLike):
                return
        elif event in self.EVENTS:
            path = arguments[0]
        else:
            return
        if os.path.abspath(os.fsdecode(path)).startswith(self.folder):  # pyright: ignore[reportArgumentType]
            self.count += 1
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)


def load_all() -> None:
    """Import what the commands import when they run, so that a forked process has it already."""
    logging.getLogger("matplotlib.font_manager").setLevel(
        logging.ERROR
    )  # which fonts a machine has is no matter
    for name in (
        *(f"kbf.commands.{short(command)}" for command in COMMANDS),
        "kbf.plots.animation",
        "lightning",
        "matplotlib.pyplot",
    ):
        importlib.import_module(name)
    with (
        tempfile.TemporaryDirectory() as folder
    ):  # the first picture takes the longest: fonts and formulas are looked up for it
        states = torch.zeros(5, 2)
        save(track_figure(Recording(states, states), title="$10^{-1}$"), Path(folder) / "first.png")
    gc.freeze()


def forked(
    work: Callable[[], int], folder: Path, prepare: Callable[[], object] = lambda: None
) -> tuple[int, str]:
    """Run ``work`` in a forked process in ``folder``; returns its exit code and output.

    A negative code is the number of the signal.
    """
    reading, writing = os.pipe()  # no file: a case may be one of a full disk
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.chdir(folder)
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            prepare()
            code = work()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        output = pipe.read()
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), output


@functools.cache
def composed(words: tuple[str, ...]) -> tuple[str, dict]:
    """A command and its configuration, which is made once: it reads files and writes none."""
    if words[:2] == ("data", "render"):
        words = ("data render", f"renderer={words[2]}", *words[3:])
    return words[0], configure(words[0], list(words[1:]))


def run_words(words: list[str]) -> int:
    """Run a command that must not fail; returns its exit code."""
    if "-m" in words:
        return main(words)
    command, config = composed(tuple(words))
    code = execute(command, copy.deepcopy(config))
    return code if isinstance(code, int) else 0


def operations(words: list[str], folder: Path, make: Callable[[Path], None]) -> int:
    """How many operations on files a command needs: it is run once, and counted."""
    folder.mkdir(parents=True)
    make(folder)
    if "-m" not in words:
        with standing_in(folder):
            composed(tuple(words))

    def work() -> int:
        killer = Killer(folder, None)
        code = run_words(words)
        (folder.parent / "count").write_text(str(killer.count))
        return code

    code, output = forked(work, folder)
    if code:
        raise RuntimeError(f"{words} does not work: {output[-500:]}")
    return int((folder.parent / "count").read_text())


def chosen(count: int, most: int, generator: random.Random) -> list[int]:
    """Numbers of operations at which to kill: all of few, a random choice of many."""
    numbers = list(range(1, count + 1))
    return numbers if count <= most else sorted(generator.sample(numbers, most))


@functools.cache
def small_checkpoint() -> bytes:
    """The contents of `CHECKPOINT`."""
    with tempfile.TemporaryDirectory() as folder:
        code, output = forked(lambda: main(SMALL), Path(folder))
        if code:
            raise RuntimeError(f"{SMALL} does not work: {output[-500:]}")
        return (Path(folder) / "run" / "checkpoints" / "best.ckpt").read_bytes()


def give_checkpoint(folder: Path) -> Path:
    """Put `CHECKPOINT` into a folder."""
    (folder / CHECKPOINT).write_bytes(small_checkpoint())
    return folder / CHECKPOINT


@contextlib.contextmanager
def standing_in(folder: Path) -> Iterator[None]:
    """The working folder, for a while."""
    before = Path.cwd()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
