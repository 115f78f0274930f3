"""``kbf filter``: estimates states from new observations, of files or of standard input."""

import glob
import hashlib
import itertools
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import rich.progress
import torch
from rich.console import Console

from kbf.commands.support.filter_run import (
    POSITION,
    ROWS_PER_BATCH,
    FilterRun,
    Write,
    text_writer,
    write_npz,
)
from kbf.commands.support.metric_descriptions import COLUMNS
from kbf.commands.support.stream_reader import STREAMED_DELIMITERS, InputColumns, Row, RowReader
from kbf.data.files import ColumnSchema, Observations, read_observations
from kbf.data.files.dialect import dialect_of
from kbf.data.files.layout import layout_of as roles_of
from kbf.data.files.read import files_in
from kbf.filters.protocols import allows_missing_sensors
from kbf.fitted.checkpoint import Trained, checkpoint_file, load_filter
from kbf.fitted.compatibility import Comparison, piece_differences
from kbf.fitted.inputs import End, following
from kbf.fitted.online_estimator import OnlineEstimator, Values
from kbf.fitted.program import compiled_step, zero_observation
from kbf.recording import as_float
from kbf.runtime.atomic_files import replacing

# Files that are read line by line.
TEXT_SUFFIXES = (".csv", ".jsonl")

# Upper bound on the bytes of one read.
BYTES_PER_READ = 2**13
BYTES_PER_READ_OF_FILES = 2**20


class Interrupted(Exception):
    """Ctrl-C or SIGTERM arrived while waiting for input: not an error, but the end of the input."""


class SignalListener:
    """Turns Ctrl-C and SIGTERM into the end of the input.

    A signal that arrives while waiting for input ends the wait; one that arrives during the work
    lets the rows that were read be filtered first.
    """

    def __init__(self) -> None:
        self.stopped: bool = False
        self.waiting: bool = False

    def on_signal(self, *_: object) -> None:
        """The signal handler."""
        self.stopped = True
        if self.waiting:
            raise Interrupted

    def chunks(self, file: Any) -> Iterator[bytes]:
        """Yield bytes of a binary file as soon as they arrive, until its end or a signal."""
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
        """Handle SIGINT and SIGTERM in this context, then restore the former handlers."""
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
    """Load, filter and write; returns the exit code.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ValueError: the input does not fit the checkpoint.
        FileNotFoundError: there is no input.
    """
    check_settings(config)
    trained = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    data, column_schema = layout_of(trained), trained.module.column_schema()
    if taken := [name for name in column_schema.columns("states") if name in POSITION]:
        raise ValueError(
            f"the state {taken[0]!r} has the name of a column of the output, which has "
            f"{', '.join(POSITION)} besides the estimates: rename it and train again, or filter "
            "from Python with kbf.load(...).filter(...)"
        )
    estimator = OnlineEstimator(
        trained,
        column_schema,
        covariance=config["covariance"],
        alarms=config["alarms"],
        compiled=compiled_step(trained) if config["compile"] else None,
        generator=torch.Generator(config["device"]).manual_seed(config["seed"]),
    )
    messages, listener = Console(stderr=True, highlight=False, soft_wrap=True), SignalListener()
    live = config["input"] == "-" and config["output"] == "-"
    is_lines = is_text(config["input"], column_schema, data)
    at_a_time = ROWS_PER_BATCH
    if config["input"] != "-":
        at_a_time = estimator.rows_at_a_time(zero_observation(trained))
    warn = partial(messages.print, style="yellow", markup=False)
    running = FilterRun(
        estimator,
        config["state"],
        config["save_every"] if live else None,
        identity(config["checkpoint"]),
        Comparison(trained) if is_lines else None,
        warn if config["input"] == "-" else None,
        at_a_time,
    )
    began, unreadable = time.perf_counter(), 0
    try:
        with ExitStack() as stack:
            if is_lines:
                rows: Iterable[Row] = text_rows(
                    config, trained, column_schema, running, listener, stack, messages
                )
            else:
                settings = data | {"column_schema": column_schema.to_dict()}
                recordings = read_observations(config["input"], settings)
                for text in piece_differences(trained, recordings):
                    warn(text)
                rows = array_rows(config, recordings, trained, running.ends)
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
        if live:  # estimates have been written: the next run continues after them
            running.save()
        raise
    running.save()
    seconds = max(time.perf_counter() - began, 1e-9)
    parts = [f"{running.done:,} steps", f"{running.missing:,} without observation"]
    parts += [f"{unreadable:,} lines could not be read"] if unreadable else []
    rejected = estimator.live.rejected
    parts += [
        f"{rejected:,} rejected as implausible ({100 * rejected / max(running.done, 1):.1f} %)"
    ]
    parts += [f"{estimator.alarms:,} alarms"] if estimator.monitor is not None else []
    parts += [f"{running.predicted:,} without a row predicted"] if running.predicted else []
    parts += [f"{running.restarts:,} restarts after gaps in time"] if running.restarts else []
    messages.print(f"{', '.join(parts)}; {running.done / seconds:,.0f} a second")
    for text in [] if running.comparison is None else running.comparison.differences():
        warn(text)
    for name in running.columns if config["output"] != "-" else []:
        if name in COLUMNS:
            messages.print(f"  {name:<18}{COLUMNS[name]}", style="dim", markup=False)
    return 0


def identity(checkpoint: str) -> bytes:
    """Return the SHA-256 sum of a checkpoint, which a saved state contains."""
    with checkpoint_file(checkpoint).open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def check_settings(config: dict[str, Any]) -> None:
    """Check that settings do not contradict each other, before anything is loaded.

    Raises:
        ValueError: a setting is unknown or impossible, the output would overwrite an input, or the
            state cannot be written at the end.
        FileNotFoundError: there is no input.
    """
    source, target, every = config["input"], str(config["output"]), config["save_every"]
    impossible = {
        f"on_error must be stop or skip, got {config['on_error']!r}": (
            config["on_error"] not in ("stop", "skip")
        ),
        f"save_every must be a whole number of at least 1, got {every!r}": (
            type(every) is not int or every < 1
        ),
        f"output must be - (standard output) or end in .csv, .jsonl or .npz, got {target}": (
            target != "-" and Path(target).suffix not in (*TEXT_SUFFIXES, ".npz")
        ),
        "output: standard input may never end, so its estimates are not kept for an .npz; "
        "write .csv or .jsonl": source == "-" and target.endswith(".npz"),
        "input=- is standard input, which is closed: name a file": (
            source == "-" and sys.stdin is None
        ),
        "output=- is standard output, which is closed: name a file": (
            target == "-" and sys.stdout is None
        ),
    }
    for message, applies in impossible.items():
        if applies:
            raise ValueError(message)
    inputs = source if isinstance(source, list) else [source]
    for each in inputs:
        path = Path(each).expanduser()
        if each != "-" and not path.exists() and not any(glob.iglob(str(path))):
            raise FileNotFoundError(f"input: there is no file or folder {each}")
    if "-" in inputs and source != "-":
        raise ValueError("input: standard input cannot be one of several files")
    others = {name: config[name] for name in ("checkpoint", "state") if config[name] is not None}
    for name, path in [*(("input", each) for each in inputs), *others.items()]:
        if same_file(path, target):
            raise ValueError(f"output={target} would overwrite the {name}")
    if config["state"] is not None:
        state = Path(config["state"])
        state.parent.mkdir(parents=True, exist_ok=True)
        if state.is_dir() or not os.access(state.parent, os.W_OK):
            raise ValueError(f"state: {state} cannot be written")


def same_file(path: str, other: str) -> bool:
    """Return whether two settings name the same file."""
    return (
        "-" not in (path, other)
        and Path(path).expanduser().resolve() == Path(other).expanduser().resolve()
    )


def layout_of(trained: Trained) -> dict[str, Any]:
    """Return the data settings of a checkpoint; empty for built-in data, which has no columns."""
    data = trained.module.config.get("data") or {}
    return data if data.get("column_schema") else {}


def is_text(source: str | list[str], column_schema: ColumnSchema, data: dict[str, Any]) -> bool:
    """Return whether the input is read line by line.

    Several files are read as a whole, one recording or more each. So is a table that names images,
    or masks steps by a column, and one with settings about its text, such as decimal commas or
    another encoding than UTF-8.

    Raises:
        ValueError: images, sensors that are late, or a column of masks, on standard input.
    """
    if source == "-" and not column_schema.observations:
        raise ValueError(
            "images come as files, not on standard input: input=FOLDER, a video or an npz"
        )
    if source == "-" and data.get("latency"):
        raise ValueError(
            "the sensors of this filter are late (data.latency), and a stream cannot be moved: "
            "input=FILE, or from Python update(readings, time=...) of kbf.load(...).online()"
        )
    if source == "-" and data.get("mask"):
        raise ValueError(
            f"this filter was trained with a mask (data.mask={data['mask']}), which is not read "
            "from standard input: input=FILE, or from Python step(None) of kbf.load(...).online() "
            "where nothing was observed"
        )
    if isinstance(source, list):
        return False
    path = Path(source).expanduser()
    if source != "-" and (not path.exists() or files_in(path)[1:]):
        return False
    suffix = path.suffix.lower()
    if source == "-" or suffix not in TEXT_SUFFIXES:
        return source == "-"
    layout = roles_of(data)
    whole = layout.images or layout.mask or data.get("latency") or not layout.is_plain_text()
    if whole or not column_schema.observations:
        return False
    if suffix != ".csv":
        return True
    try:
        dialect = dialect_of(path, layout)
        return dialect.decimal == "." and dialect.delimiter in STREAMED_DELIMITERS
    except ValueError:  # no UTF-8: the line is reported when it is read
        return True


def text_rows(
    config: dict[str, Any],
    trained: Trained,
    column_schema: ColumnSchema,
    running: FilterRun,
    listener: SignalListener,
    stack: ExitStack,
    messages: Console,
) -> RowReader:
    """Return the rows of a text: standard input up to a signal, or a file with a progress bar."""
    if config["input"] == "-":
        stack.enter_context(listener.listening())
        chunks: Iterable[bytes] = listener.chunks(sys.stdin.buffer)
    else:
        hidden = not messages.is_terminal or (config["output"] == "-" and sys.stdout.isatty())
        settings: Any = {"description": "filtering", "console": messages, "disable": hidden}
        file = stack.enter_context(
            rich.progress.open(Path(config["input"]).expanduser(), "rb", **settings)
        )
        chunks = iter(lambda: file.read(BYTES_PER_READ_OF_FILES), b"")
    report = (
        (lambda text: messages.print(text, markup=False)) if config["on_error"] == "skip" else None
    )
    data = layout_of(trained)
    return RowReader(
        chunks,
        InputColumns(
            column_schema,
            roles_of(data).time_name() or "time",
            data.get("recording") if data else "recording",
            elapsed=bool(data.get("time_as_control")),
            step=data.get("time_step"),
            missing=data.get("missing"),
            acts_from=data.get("control_timing") == "from",
        ),
        trained.module.input_dtype,
        config["device"],
        source="standard input" if config["input"] == "-" else str(config["input"]),
        on_unreadable=report,
        clocks=running.clocks,
        acting=running.acting,
        recording=running.recording,
        allow_missing_sensors=allows_missing_sensors(trained.filter),
    )


def array_rows(
    config: dict[str, Any],
    recordings: list[Observations],
    trained: Trained,
    ends: Mapping[str | None, End] | None = None,
) -> Iterator[Row]:
    """Yield the rows of recordings in files of arrays, other tables, and images.

    Those with an end among ``ends``, by their names, follow on the rows before it.

    Raises:
        ValueError: observations have another shape than in training.
    """
    shape, dtype, device = (
        tuple(trained.module.observation or ()),
        trained.module.input_dtype,
        config["device"],
    )
    messages = Console(stderr=True)
    hidden = config["output"] == "-" or not messages.is_terminal
    one = len(recordings) == 1
    for r in recordings:
        if tuple(r.obs.shape[1:]) != shape:
            raise ValueError(
                f"{config['input']}: observations are {tuple(r.obs.shape[1:])}, "
                f"those of the training {shape}"
            )
        name, moves = None if one else r.name, 1
        if ends is not None and name in ends:
            r, moves = following(r, ends[name], layout_of(trained))
        for t in rich.progress.track(range(len(r.obs)), r.name, console=messages, disable=hidden):
            missing = r.mask is not None and not r.mask[t]
            yield Row(
                None if missing else as_float(r.obs[t : t + 1], dtype).to(device),
                None if r.controls is None else r.controls[t : t + 1].to(device, dtype),
                None if r.times is None else f"{r.times[t].item():.15g}",
                name,
                None if r.times is None else r.times[t].item(),
                t == 0 and moves == 0,
                moves=max(moves, 1) if t == 0 else 1,
                next_ready=t + 1 < len(r.obs),
                inserted=r.inserted is not None and bool(r.inserted[t]),
            )


@contextmanager
def open_writer(target: str, *, json: bool, header: bool) -> Iterator[Write]:
    """Return the writer of estimates; a file appears once all rows are written."""
    if target == "-":
        try:
            yield text_writer(sys.stdout, as_json=json, header=header)
        except BrokenPipeError:
            # The reader of the estimates has exited: Python must not flush them at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    if target.endswith(".npz"):
        rows: list[Values] = []
        yield rows.extend
        write_npz(target, rows)
        return
    with replacing(target) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        yield text_writer(file, as_json=target.endswith(".jsonl"), flush=False)
