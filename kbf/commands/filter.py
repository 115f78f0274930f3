"""``kbf filter``: estimates of new observations by a trained filter, from files or as they come on standard input."""

from __future__ import annotations

import hashlib
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

from kbf.commands.support.console import start
from kbf.commands.support.metric_descriptions import COLUMNS
from kbf.commands.support.row_writers import (
    CsvWriter,
    JsonLinesWriter,
    NpzWriter,
    OnlineEstimator,
    RowWriter,
    Values,
)
from kbf.commands.support.stream_reader import InputColumns, LineError, Row, RowReader
from kbf.data.files import ColumnSchema, read_observations
from kbf.data.files.column_schema import Part
from kbf.filters.protocols import allows_missing_sensors, control_components
from kbf.filters.state_io import read_leaves
from kbf.recording import as_float
from kbf.runtime.atomic_files import replacing
from kbf.training.checkpoint import Trained, checkpoint_file, load_filter

TEXT_SUFFIXES = (".csv", ".jsonl")
"""Files that are read line by line."""

BYTES_PER_READ = 2**13
"""The most bytes that are read at a time."""

ROWS_PER_BATCH = 64
"""The most rows whose estimates are computed and written together, of those that have already arrived."""


class Interrupted(Exception):
    """Ctrl-C or SIGTERM arrived while waiting for input: not an error, but the end of the input."""


class SignalListener:
    """Turns Ctrl-C and SIGTERM into the end of the input.

    A signal that arrives while waiting for input ends the wait; one that arrives during the work
    lets the rows that were read be filtered first.
    """

    stopped: bool
    waiting: bool

    def __init__(self) -> None:
        self.waiting = self.stopped = False

    def on_signal(self, *_: object) -> None:
        """The signal handler."""
        self.stopped = True
        if self.waiting:
            raise Interrupted

    def chunks(self, file: Any) -> Iterator[bytes]:
        """Bytes of a binary file as soon as they arrive, until its end or a signal."""
        try:
            while True:
                self.waiting = True
                if self.stopped:
                    return
                chunk = file.read1(BYTES_PER_READ)
                self.waiting = False
                if not chunk:
                    return
                yield chunk
        except Interrupted:
            return
        finally:
            self.waiting = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which this listener handles SIGINT and SIGTERM; the former handlers come back at its end."""
        previous = {
            number: signal.signal(number, self.on_signal)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def run(config: dict[str, Any]) -> int:
    """Load, filter, write; returns the exit code.

    Raises:
        CheckpointError: a checkpoint that cannot be loaded. ValueError, FileNotFoundError: input
            that does not fit it.
    """
    start(config["threads"])
    check_settings(config)
    trained = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    data, column_schema = layout_of(trained), column_schema_of(trained)
    example = torch.zeros(
        1,
        *(trained.module.observation or ()),
        dtype=trained.module.input_dtype,
        device=config["device"],
    )
    estimator = OnlineEstimator(
        trained,
        column_schema,
        covariance=config["covariance"],
        alarms=config["alarms"],
        compiled=example if config["compile"] else None,
        generator=torch.Generator(config["device"]).manual_seed(config["seed"]),
    )
    messages, listener = Console(stderr=True, highlight=False, soft_wrap=True), SignalListener()
    live = config["input"] == "-" and config["output"] == "-"
    running = FilterRun(
        estimator,
        config["state"],
        config["save_every"] if live else None,
        identity(config["checkpoint"]),
    )
    began, unreadable = time.perf_counter(), 0
    try:
        with ExitStack() as stack:
            if is_text(config["input"], column_schema, data):
                rows: Iterable[Row] = text_rows(
                    config, trained, column_schema, running, listener, stack, messages
                )
            else:
                rows = array_rows(
                    config, data | {"column_schema": column_schema.to_dict()}, trained
                )
            remaining = iter(rows)
            first = next(remaining, None)  # it shows whether the text is JSON or CSV
            if first is None and config["input"] != "-":
                raise ValueError(f"{config['input']}: there is no observation in it")
            began, json = time.perf_counter(), isinstance(rows, RowReader) and rows.json
            writer = stack.enter_context(
                open_writer(config["output"], json=json, header=running.steps == 0)
            )
            running.filter_rows(
                remaining if first is None else itertools.chain([first], remaining), writer
            )
            unreadable = rows.unreadable if isinstance(rows, RowReader) else 0
    except Exception:
        if live:  # estimates have been written: the next run goes on behind them
            running.save()
        raise
    running.save()
    seconds = max(time.perf_counter() - began, 1e-9)
    parts = [f"{running.done:,} steps", f"{running.missing:,} without observation"]
    parts += [f"{unreadable:,} lines could not be read"] if unreadable else []
    rejected = estimator.live.rejected
    parts += [
        f"{rejected:,} passed over as impossible ({100 * rejected / max(running.done, 1):.1f} %)"
    ]
    parts += [f"{estimator.alarms:,} alarms"] if estimator.monitor is not None else []
    messages.print(f"{', '.join(parts)}; {running.done / seconds:,.0f} a second")
    if config["output"] != "-":
        tell_columns(running.columns, messages)
    return 0


def tell_columns(columns: list[str], messages: Console) -> None:
    """Say what the diagnostics among the columns are."""
    for name in columns:
        if name in COLUMNS:
            messages.print(f"  {name:<14}{COLUMNS[name]}", style="dim", markup=False)


class FilterRun:
    """A live estimator applied to all rows, and the file that keeps its state, number of steps, last time and recording."""

    estimator: OnlineEstimator
    path: Path | None
    every: int | None
    checkpoint: bytes
    started: bool
    done: int
    columns: list[str]

    def __init__(
        self,
        estimator: OnlineEstimator,
        path: str | None,
        every: int | None,
        checkpoint: bytes,
    ) -> None:
        """Go on from the state in ``path``, if there is one.

        Args:
            estimator: of the checkpoint.
            path: of the state; None for none.
            every: steps between writings of it; None writes at the end alone.
            checkpoint: its `identity`.

        Raises:
            ValueError: a state of another checkpoint, or one that cannot be read.
        """
        self.estimator, self.path, self.every, self.checkpoint = (
            estimator,
            None if path is None else Path(path),
            every,
            checkpoint,
        )
        self.steps = self.done = self.missing = 0
        self.columns: list[str] = []
        self.sequence: str | None = None
        self.clock: float | None = None
        self.started = False
        if self.path is not None and self.path.exists():
            stored = read_leaves(self.path)
            if "checkpoint" not in stored or bytes(stored["checkpoint"].tolist()) != checkpoint:
                raise ValueError(
                    f"state: {path} was not written with this checkpoint: name the one it belongs to, or another file"
                )
            estimator.live.load(self.path)
            estimator.recent = (
                None
                if (recent := stored.get("recent")) is None
                else recent.to(estimator.live.state[0].device)
            )
            self.steps = int(stored.get("steps", 0))
            self.clock = float(stored["clock"]) if "clock" in stored else None
            self.sequence = (
                bytes(stored["recording"].tolist()).decode() if "recording" in stored else None
            )
            self.started = "recording" in stored

    def filter_rows(self, rows: Iterable[Row], writer: RowWriter) -> None:
        """Filter all rows and write their estimates; rows that have already arrived go through together, up to `ROWS_PER_BATCH`."""
        waiting: list[Row] = []
        try:
            for row in rows:
                if row.gap or (self.started and row.sequence != self.sequence):
                    self.filter_batch(waiting, writer)
                    self.estimator.restart()
                    self.steps = 0
                self.sequence, self.started = row.sequence, True
                waiting.append(row)
                if not row.next_ready or len(waiting) == ROWS_PER_BATCH:
                    self.filter_batch(waiting, writer)
        except LineError:
            self.filter_batch(waiting, writer)
            raise
        self.filter_batch(waiting, writer)
        writer.close()

    def filter_batch(self, rows: list[Row], writer: RowWriter) -> None:
        """Filter rows of one sequence, write their estimates and empty the list; every ``save_every`` steps save the state."""
        if not rows:
            return
        output: list[Values] = []
        for row, values in zip(rows, self.estimator.filter_rows(rows), strict=True):
            position: Values = {} if row.sequence is None else {"recording": row.sequence}
            position |= (
                {"step": self.steps} if row.time is None else {"step": self.steps, "time": row.time}
            )
            output.append(position | values)
            self.steps += 1
            self.missing += row.obs is None
        self.columns = list(output[0])
        before, self.done, self.clock = self.done, self.done + len(rows), rows[-1].clock
        rows.clear()
        writer.write(output)
        if self.every is not None and self.done // self.every > before // self.every:
            self.save()

    def save(self) -> None:
        """Write the state, if there is a file for it and something to keep."""
        if self.path is not None and self.done:
            position = (
                {}
                if self.clock is None
                else {"clock": torch.tensor(self.clock, dtype=torch.float64)}
            )
            position |= (
                {}
                if self.sequence is None
                else {"recording": torch.tensor(list(self.sequence.encode()), dtype=torch.uint8)}
            )
            position |= {} if self.estimator.recent is None else {"recent": self.estimator.recent}
            mine = torch.tensor(list(self.checkpoint), dtype=torch.uint8)
            self.estimator.live.save(
                self.path, steps=torch.tensor(self.steps), checkpoint=mine, **position
            )


def identity(checkpoint: str) -> bytes:
    """What tells a checkpoint from every other: the SHA-256 sum of its file."""
    with checkpoint_file(checkpoint).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def check_settings(config: dict[str, Any]) -> None:
    """Refuse settings that contradict each other, before anything is loaded.

    Raises:
        ValueError: a setting that is unknown or impossible, or an output that would overwrite an
            input.
        FileNotFoundError: there is no input.
    """
    source, target, every = str(config["input"]), str(config["output"]), config["save_every"]
    if config["on_error"] not in ("stop", "skip"):
        raise ValueError(f"on_error must be stop or skip, got {config['on_error']!r}")
    if type(every) is not int or every < 1:
        raise ValueError(f"save_every must be a whole number of at least 1, got {every!r}")
    if target != "-" and Path(target).suffix not in (*TEXT_SUFFIXES, ".npz"):
        raise ValueError(
            f"output must be - (standard output) or end in .csv, .jsonl or .npz, got {target}"
        )
    if source == "-" and target.endswith(".npz"):
        raise ValueError(
            "output: standard input may never end, so its estimates are not kept for an .npz; write .csv or .jsonl"
        )
    for name, closed in (
        ("input", source == "-" and sys.stdin is None),
        ("output", target == "-" and sys.stdout is None),
    ):
        if closed:
            raise ValueError(f"{name}=- is standard {name}, which is closed: name a file")
    if source != "-" and not Path(source).expanduser().exists():
        raise FileNotFoundError(f"input: there is no file or folder {source}")
    overwritten = [
        name
        for name in ("input", "checkpoint", "state")
        if config[name] is not None and same_file(config[name], target)
    ]
    if overwritten:
        raise ValueError(f"output={target} would overwrite the {overwritten[0]}")
    if config["state"] is not None:
        check_state(Path(config["state"]))


def same_file(path: str, other: str) -> bool:
    """Whether two settings name one file."""
    return (
        "-" not in (path, other)
        and Path(path).expanduser().resolve() == Path(other).expanduser().resolve()
    )


def check_state(path: Path) -> None:
    """Raise a ValueError or an OSError if a state could not be written at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"state: {path} cannot be written")


def layout_of(trained: Trained) -> dict[str, Any]:
    """The data settings of a checkpoint trained on somebody's own recordings; empty for built-in data, which has no columns."""
    data = trained.module.config.get("data") or {}
    return data if data.get("column_schema") else {}


def column_schema_of(trained: Trained) -> ColumnSchema:
    """The names of columns: the person's own, or z_0, z_1 ... of states, x_0 ... of observations and u_0 ... of controls."""
    if stored := layout_of(trained).get("column_schema"):
        return ColumnSchema.from_dict(stored)
    shape = trained.module.observation or ()
    d, q = trained.module.memory.sequences()[0].states.shape[1], shape[0] if len(shape) == 1 else 0
    states, observations = (
        tuple(Part("number", (f"{letter}_{k}",)) for k in range(n))
        for letter, n in (("z", d), ("x", q))
    )
    return ColumnSchema(
        states, observations, tuple(f"u_{k}" for k in range(control_components(trained.filter)))
    )


def columns_of(data: dict[str, Any], column_schema: ColumnSchema) -> InputColumns:
    """The columns of a text, from the data settings of the checkpoint."""
    time, recording = data.get("time") or "time", data.get("recording") or "recording"
    return InputColumns(
        column_schema, time, recording, bool(data.get("time_as_control")), data.get("time_step")
    )


def is_text(source: str, column_schema: ColumnSchema, data: dict[str, Any]) -> bool:
    """Whether the input is read line by line; a table that names images, or masks steps by a column, is read as a whole.

    Raises:
        ValueError: images on standard input.
    """
    if source == "-" and not column_schema.observations:
        raise ValueError(
            "images come as files, not on standard input: input=FOLDER, a video or an npz"
        )
    needs_whole = data.get("images") or data.get("mask") or not column_schema.observations
    return source == "-" or (Path(source).suffix.lower() in TEXT_SUFFIXES and not needs_whole)


def text_rows(
    config: dict[str, Any],
    trained: Trained,
    column_schema: ColumnSchema,
    running: FilterRun,
    listener: SignalListener,
    stack: ExitStack,
    messages: Console,
) -> RowReader:
    """The rows of a text; of standard input up to a signal, of a file with a bar that shows how far it is read."""
    if config["input"] == "-":
        stack.enter_context(listener.listening())
        chunks: Iterable[bytes] = listener.chunks(sys.stdin.buffer)
    else:
        path = Path(config["input"]).expanduser()
        hidden = not messages.is_terminal or (config["output"] == "-" and sys.stdout.isatty())
        file = stack.enter_context(
            rich.progress.open(
                path, "rb", description="filtering", console=messages, disable=hidden
            )
        )
        chunks = iter(lambda: file.read(BYTES_PER_READ), b"")
    report = (
        (lambda text: messages.print(text, markup=False)) if config["on_error"] == "skip" else None
    )
    return RowReader(
        chunks,
        columns_of(layout_of(trained), column_schema),
        trained.module.input_dtype,
        config["device"],
        source="standard input" if config["input"] == "-" else str(config["input"]),
        on_unreadable=report,
        clock=running.clock,
        sequence=running.sequence,
        allow_missing_sensors=allows_missing_sensors(trained.filter),
    )


def array_rows(config: dict[str, Any], data: dict[str, Any], trained: Trained) -> Iterator[Row]:
    """Rows of recordings in files of arrays, other tables, and images.

    Raises:
        ValueError: observations of another shape than those of the training.
    """
    recordings = read_observations(config["input"], data)
    shape, dtype, device = (
        tuple(trained.module.observation or ()),
        trained.module.input_dtype,
        config["device"],
    )
    messages = Console(stderr=True)
    hidden = config["output"] == "-" or not messages.is_terminal
    for r in recordings:
        if tuple(r.obs.shape[1:]) != shape:
            raise ValueError(
                f"{config['input']}: observations are {tuple(r.obs.shape[1:])}, those of the training {shape}"
            )
        for t in rich.progress.track(range(len(r.obs)), r.name, console=messages, disable=hidden):
            x = (
                None
                if r.mask is not None and not r.mask[t]
                else as_float(r.obs[t : t + 1], dtype).to(device)
            )
            control = None if r.controls is None else r.controls[t : t + 1].to(device, dtype)
            time, name = (
                None if r.times is None else f"{r.times[t].item():.15g}",
                r.name if len(recordings) > 1 else None,
            )
            yield Row(x, control, time, name, next_ready=t + 1 < len(r.obs))


@contextmanager
def open_writer(target: str, *, json: bool, header: bool) -> Iterator[RowWriter]:
    """The writer of estimates: to standard output, or to a file that appears once all rows are written."""
    if target == "-":
        try:
            yield JsonLinesWriter(sys.stdout) if json else CsvWriter(sys.stdout, header=header)
        except (
            BrokenPipeError
        ):  # whoever read the estimates has gone; nothing is left for Python to flush at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    with replacing(target) as temporary:
        if target.endswith(".npz"):
            yield NpzWriter(temporary)
            return
        with temporary.open("w", newline="", encoding="utf-8") as file:
            yield (
                JsonLinesWriter(file, flush=False)
                if target.endswith(".jsonl")
                else CsvWriter(file, flush=False)
            )
