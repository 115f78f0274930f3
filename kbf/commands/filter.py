"""``kbf filter``: estimates of new observations by a trained filter, from files or as they come on standard input."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import rich.progress
import torch
from rich.console import Console

from kbf.checkpoint import Trained, load_filter
from kbf.commands.common import start
from kbf.commands.estimates import Csv, JsonLines, Npz, Table, Tracker, Values
from kbf.commands.lines import LineError, Lines, Names, Row
from kbf.data.own import Boundary, read_observations
from kbf.data.own.boundary import Part
from kbf.files import replacing
from kbf.filters.base import read_leaves, save_state
from kbf.sequence import as_float

TEXT = (".csv", ".jsonl")
"""Files that are read line by line."""


CHUNK, BLOCK = 2**13, 64
"""Bytes that are read at a time, at most, and rows that are told of at a time, of those that are there already."""


class Stopped(Exception):
    """Ctrl-C or SIGTERM came: not an error, the end of the input."""


class Ear:
    """Listens for Ctrl-C and SIGTERM. One that comes while input is waited for ends the wait, another what has been read."""

    def __init__(self) -> None:
        self.waiting = self.stopped = False

    def hear(self, *_: object) -> None:
        """A signal."""
        self.stopped = True
        if self.waiting:
            raise Stopped

    def chunks(self, file: Any) -> Iterator[bytes]:
        """What a binary file brings, as soon as it is there, up to its end or a signal."""
        try:
            while True:
                self.waiting = True
                if self.stopped:
                    return
                chunk = file.read1(CHUNK)
                self.waiting = False
                if not chunk:
                    return
                yield chunk
        except Stopped:
            return
        finally:
            self.waiting = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """While this lasts."""
        before = {number: signal.signal(number, self.hear) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def run(config: dict[str, Any]) -> int:
    """Load, filter, write; returns the exit code.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded. ValueError, FileNotFoundError: input that does not fit it.
    """
    start(config["threads"])
    check(config)
    trained = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    data, boundary = layout_of(trained), boundary_of(trained)
    example = torch.zeros(1, *(trained.module.observation or ()), dtype=trained.module.input_dtype, device=config["device"])
    tracker = Tracker(
        trained,
        boundary,
        covariance=config["covariance"],
        alarms=config["alarms"],
        compiled=example if config["compile"] else None,
        generator=torch.Generator(config["device"]).manual_seed(config["seed"]),
    )
    told, ear = Console(stderr=True, highlight=False, soft_wrap=True), Ear()
    live = config["input"] == "-" and config["output"] == "-"
    running = Running(tracker, config["state"], config["save_every"] if live else None)
    began, bad = time.perf_counter(), 0
    try:
        with ExitStack() as stack:
            if is_text(config["input"], boundary, data):
                rows: Iterable[Row] = text_rows(config, trained, boundary, running, ear, stack, told)
            else:
                rows = array_rows(config, data | {"boundary": boundary.to_dict()}, trained)
            each = iter(rows)
            first = next(each, None)  # it tells JSON from CSV
            if first is None and config["input"] != "-":
                raise ValueError(f"{config['input']}: there is no observation in it")
            began, json = time.perf_counter(), isinstance(rows, Lines) and rows.json
            table = stack.enter_context(opened(config["output"], json=json, header=running.steps == 0))
            running.through(each if first is None else itertools.chain([first], each), table)
            bad = rows.bad if isinstance(rows, Lines) else 0
    except Exception:
        if live:  # what was told is told
            running.save()
        raise
    running.save()
    seconds = max(time.perf_counter() - began, 1e-9)
    parts = [f"{running.done:,} steps", f"{running.missing:,} without observation"]
    parts += [f"{bad:,} lines could not be read"] if bad else []
    parts += [f"{tracker.alarms:,} alarms"] if tracker.monitor is not None else []
    told.print(f"{', '.join(parts)}; {running.done / seconds:,.0f} a second")
    return 0


class Running:
    """A tracker's way through its rows, and the file that keeps its state, the number of steps, the last time and the recording."""

    def __init__(self, tracker: Tracker, path: str | None, every: int | None) -> None:
        self.tracker, self.path, self.every = tracker, None if path is None else Path(path), every
        self.steps = self.done = self.missing = 0
        self.sequence: str | None = None
        self.clock: float | None = None
        self.started = False
        if self.path is not None and self.path.exists():
            tracker.live.load(self.path)
            kept = read_leaves(self.path)
            self.steps = int(kept.get("steps", 0))
            self.clock = float(kept["clock"]) if "clock" in kept else None
            self.sequence = bytes(kept["sequence"].tolist()).decode() if "sequence" in kept else None
            self.started = "sequence" in kept

    def through(self, rows: Iterable[Row], table: Table) -> None:
        """Filter and write all rows, those together that are there already; save the state every now and then."""
        waiting: list[Row] = []
        try:
            for row in rows:
                if row.gap or (self.started and row.sequence != self.sequence):
                    self.tell(waiting, table)
                    self.tracker.restart()
                    self.steps = 0
                self.sequence, self.started = row.sequence, True
                waiting.append(row)
                if not row.more or len(waiting) == BLOCK:
                    self.tell(waiting, table)
        except LineError:
            self.tell(waiting, table)
            raise
        self.tell(waiting, table)
        table.close()

    def tell(self, rows: list[Row], table: Table) -> None:
        """Filter rows of one sequence and write what is found; the list is emptied."""
        if not rows:
            return
        told = []
        for row, values in zip(rows, self.tracker.through(rows), strict=True):
            named: Values = {} if row.sequence is None else {"sequence": row.sequence}
            named |= {"step": self.steps} if row.time is None else {"step": self.steps, "time": row.time}
            told.append(named | values)
            self.steps += 1
            self.missing += row.obs is None
        before, self.done, self.clock = self.done, self.done + len(rows), rows[-1].clock
        rows.clear()
        table.write(told)
        if self.every is not None and self.done // self.every > before // self.every:
            self.save()

    def save(self) -> None:
        """Write the state, if there is a file for it and something to keep."""
        if self.path is not None and self.done:
            others = {} if self.clock is None else {"clock": torch.tensor(self.clock, dtype=torch.float64)}
            others |= {} if self.sequence is None else {"sequence": torch.tensor(list(self.sequence.encode()), dtype=torch.uint8)}
            save_state(self.tracker.live.state, self.path, steps=torch.tensor(self.steps), **others)


def check(config: dict[str, Any]) -> None:
    """Raise if settings do not go together, before anything is loaded."""
    source, target, every = str(config["input"]), str(config["output"]), config["save_every"]
    if config["on_error"] not in ("stop", "skip"):
        raise ValueError(f"on_error must be stop or skip, got {config['on_error']!r}")
    if not isinstance(every, int) or every < 1:
        raise ValueError(f"save_every must be a whole number of at least 1, got {every!r}")
    if target != "-" and Path(target).suffix not in (*TEXT, ".npz"):
        raise ValueError(f"output must be - (standard output) or end in .csv, .jsonl or .npz, got {target}")
    if source == "-" and target.endswith(".npz"):
        raise ValueError("output: standard input may never end, so its estimates are not kept for an .npz; write .csv or .jsonl")
    if source != "-" and not Path(source).expanduser().exists():
        raise FileNotFoundError(f"input: there is no file or folder {source}")
    kept = [name for name in ("input", "checkpoint", "state") if config[name] is not None and same(config[name], target)]
    if kept:
        raise ValueError(f"output={target} would overwrite the {kept[0]}")
    if config["state"] is not None:
        check_state(Path(config["state"]))


def same(path: str, other: str) -> bool:
    """Whether two settings name one file."""
    return "-" not in (path, other) and Path(path).expanduser().resolve() == Path(other).expanduser().resolve()


def check_state(path: Path) -> None:
    """Raise a ValueError or an OSError if a state could not be written at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"state: {path} cannot be written")


def layout_of(trained: Trained) -> dict[str, Any]:
    """What the checkpoint knows of columns and files: nothing for built-in data, whose settings mean other things."""
    data = trained.module.config.get("data") or {}
    return data if data.get("boundary") else {}


def boundary_of(trained: Trained) -> Boundary:
    """The names of columns: the person's own, or z_0, z_1 ... of states, x_0 ... of observations and u_0 ... of controls."""
    if stored := layout_of(trained).get("boundary"):
        return Boundary.from_dict(stored)
    shape = trained.module.observation or ()
    d, q = trained.module.memory.sequences()[0].states.shape[1], shape[0] if len(shape) == 1 else 0
    states, observations = (tuple(Part("number", (f"{letter}_{k}",)) for k in range(n)) for letter, n in (("z", d), ("x", q)))
    return Boundary(states, observations, tuple(f"u_{k}" for k in range(int(getattr(trained.filter, "controlled", 0)))))


def names_of(data: dict[str, Any], boundary: Boundary) -> Names:
    """The columns of a text."""
    time, sequence = data.get("time") or "time", data.get("sequence") or "sequence"
    return Names(boundary, time, sequence, bool(data.get("time_as_control")), data.get("time_step"))


def is_text(source: str, boundary: Boundary, data: dict[str, Any]) -> bool:
    """Whether the input is read line by line; a table that names images, or masks steps by a column, is read as a whole.

    Raises:
        ValueError: images on standard input.
    """
    if source == "-" and not boundary.observations:
        raise ValueError("images come as files, not on standard input: input=FOLDER, a video or an npz")
    whole = data.get("images") or data.get("mask") or not boundary.observations
    return source == "-" or (Path(source).suffix.lower() in TEXT and not whole)


def text_rows(
    config: dict[str, Any], trained: Trained, boundary: Boundary, running: Running, ear: Ear, stack: ExitStack, told: Console
) -> Lines:
    """The rows of a text; of standard input up to a signal, of a file with a bar that shows how far it is read."""
    if config["input"] == "-":
        stack.enter_context(ear.listening())
        chunks: Iterable[bytes] = ear.chunks(sys.stdin.buffer)
    else:
        path = Path(config["input"]).expanduser()
        silent = not told.is_terminal or (config["output"] == "-" and sys.stdout.isatty())
        file = stack.enter_context(rich.progress.open(path, "rb", description="filtering", console=told, disable=silent))
        chunks = iter(lambda: file.read(CHUNK), b"")
    skip = (lambda text: told.print(text, markup=False)) if config["on_error"] == "skip" else None
    return Lines(
        chunks,
        names_of(layout_of(trained), boundary),
        trained.module.input_dtype,
        config["device"],
        source="standard input" if config["input"] == "-" else str(config["input"]),
        skip=skip,
        clock=running.clock,
        sequence=running.sequence,
        partial=bool(getattr(trained.filter, "partial", False)),
    )


def array_rows(config: dict[str, Any], data: dict[str, Any], trained: Trained) -> Iterator[Row]:
    """Rows of recordings in files of arrays, other tables, and images.

    Raises:
        ValueError: observations of another shape than those of the training.
    """
    recordings = read_observations(config["input"], data)
    shape, dtype, device = tuple(trained.module.observation or ()), trained.module.input_dtype, config["device"]
    told = Console(stderr=True)
    silent = config["output"] == "-" or not told.is_terminal
    for r in recordings:
        if tuple(r.obs.shape[1:]) != shape:
            raise ValueError(f"{config['input']}: observations are {tuple(r.obs.shape[1:])}, those of the training {shape}")
        for t in rich.progress.track(range(len(r.obs)), r.name, console=told, disable=silent):
            x = None if r.mask is not None and not r.mask[t] else as_float(r.obs[t : t + 1], dtype).to(device)
            control = None if r.controls is None else r.controls[t : t + 1].to(device, dtype)
            time, name = None if r.times is None else f"{r.times[t].item():.15g}", r.name if len(recordings) > 1 else None
            yield Row(x, control, time, name, more=t + 1 < len(r.obs))


@contextmanager
def opened(target: str, *, json: bool, header: bool) -> Iterator[Table]:
    """The table to write to: standard output, or a file that is there when all has been written."""
    if target == "-":
        try:
            yield JsonLines(sys.stdout) if json else Csv(sys.stdout, header=header)
        except BrokenPipeError:  # whoever read the estimates has gone; nothing is left for Python to flush at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    with replacing(target) as temporary:
        if target.endswith(".npz"):
            yield Npz(temporary)
            return
        with temporary.open("w", newline="", encoding="utf-8") as file:
            yield JsonLines(file, flush=False) if target.endswith(".jsonl") else Csv(file, flush=False)
