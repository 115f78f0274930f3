"""Applies a filter to a stream of rows, writes its estimates, and keeps its state in a file."""

import csv
import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kbf.commands.support.stream_reader import LineError, Row
from kbf.data.cache import write_arrays
from kbf.filters.online import read_leaves
from kbf.fitted.compatibility import Comparison
from kbf.fitted.inputs import End
from kbf.fitted.online_estimator import OnlineEstimator, Values

# Columns of the output besides the estimates.
POSITION = ("recording", "step", "time")

# Writes a block of rows.
Write = Callable[[list[Values]], None]


def text_writer(file: Any, *, as_json: bool, header: bool = True, flush: bool = True) -> Write:
    """Return a function that writes rows as CSV or as JSON lines.

    The columns are those of the first row. In JSON, numbers that are not finite are null.

    Args:
        file: a text file.
        as_json: write JSON lines instead of CSV.
        header: write the names of the columns before the first line of CSV.
        flush: the file after each block, for the reader of a pipe.
    """
    lines = csv.writer(file, lineterminator="\n")

    def write(rows: list[Values]) -> None:
        nonlocal header
        if header and not as_json:
            lines.writerow(rows[0])
            header = False
        for row in rows:
            if as_json:
                finite = {
                    k: None if isinstance(v, float) and not math.isfinite(v) else v
                    for k, v in row.items()
                }
                file.write(json.dumps(finite) + "\n")
            else:
                lines.writerow(
                    v if not isinstance(v, float) else f"{v:.{digits(v, row.get(f'{name}_std'))}g}"
                    for name, v in row.items()
                )
        if flush:
            file.flush()

    return write


def digits(value: float, std: Any) -> int:
    """Return how many digits of an estimate are written: `MIN_DIGITS`, and 4 of its deviation.

    >>> digits(0.25, 0.01), digits(3948996.0018, 0.0014)
    (9, 14)
    """
    if not isinstance(std, float) or not 0 < std < math.inf or not 0 < abs(value) < math.inf:
        return MIN_DIGITS
    return min(17, max(MIN_DIGITS, 4 + math.ceil(math.log10(abs(value) / std))))


def write_npz(path: str, rows: list[Values]) -> None:
    """Write rows as one array for each column of the first row, atomically."""
    columns = {
        name: ["" if row.get(name) is None else row[name] for row in rows] for name in rows[0]
    }
    write_arrays(path, columns)


# Upper bound on the rows of a stream, of those that have arrived, that form one batch.
ROWS_PER_BATCH = 64

# Digits of numbers in CSV, at least.
MIN_DIGITS = 9

# Rows of a stream after which its differences from the training are reported.
ROWS_TO_COMPARE = 100

# Interleaved recordings whose filter states are kept, at most; a state may be as large as the
# memory of the filter.
MAX_OPEN_RECORDINGS = 256


class Track(NamedTuple):
    """The filter state of a recording that others are interleaved with.

    Attributes:
        state: of the filter. rejections: of the gate, or None. recent: of the monitor, or None.
        steps: so far. clock: the last time, or None.
    """

    state: Any
    rejections: Tensor | None
    recent: Tensor | None
    steps: int
    clock: float | None


class FilterRun:
    """Applies an estimator to all rows and saves its state, step count, last time and recording.

    Rows of several recordings may be interleaved: each has a state of its own.

    Attributes:
        predicted: number of time steps without a row that were predicted through.
        restarts: number of gaps in time after which the filter was re-initialised.
    """

    def __init__(
        self,
        estimator: OnlineEstimator,
        path: str | None,
        every: int | None,
        checkpoint: bytes,
        comparison: Comparison | None = None,
        report: Callable[[str], None] | None = None,
        rows_per_batch: int = ROWS_PER_BATCH,
    ) -> None:
        """Continue from the state in ``path``, if there is one.

        Args:
            estimator: of the checkpoint.
            path: of the state; None for none.
            every: steps between writings of it; None writes at the end alone.
            checkpoint: its `identity`.
            comparison: of the rows with the training, or None.
            report: takes the differences once `ROWS_TO_COMPARE` rows have been filtered, of a
                stream that may never end.
            rows_per_batch: upper bound on the rows, of those that have arrived, of one batch.

        Raises:
            ValueError: a state of another checkpoint, or one that cannot be read.
        """
        self.estimator: OnlineEstimator = estimator
        self.path: Path | None = None if path is None else Path(path)
        self.every: int | None = every
        self.rows_per_batch: int = rows_per_batch
        self.checkpoint: bytes = checkpoint
        self.steps: int = 0
        self.done: int = 0
        self.missing: int = 0
        self.columns: list[str] = []
        self.recording: str | None = None
        self.clock: float | None = None
        self.started: bool = False
        self.tracks: dict[str | None, Track] = {}  # of the other recordings
        self.acting: dict[str | None, list[float]] = {}  # `Row.logged` of last rows
        self.closed: set[str | None] = set()  # those whose track was dropped
        self.comparison, self.report = comparison, report
        self.predicted: int = 0
        self.restarts: int = 0
        if self.path is not None and self.path.exists():
            stored = read_leaves(self.path)
            if "checkpoint" not in stored or bytes(stored["checkpoint"].tolist()) != checkpoint:
                raise ValueError(
                    f"state: {path} was not written with this checkpoint: name the one it "
                    "belongs to, or another file"
                )
            estimator.live.load(self.path)
            if "recent" in stored:
                estimator.recent = stored["recent"].to(estimator.live.state[0].device)
            self.steps = int(stored.get("steps", 0))
            self.clock = float(stored["clock"]) if "clock" in stored else None
            self.started = "recording" in stored
            if self.started:
                self.recording = text_of(stored["recording"])
            self.tracks = read_tracks(stored, estimator.live.state)
            for key in [key for key in stored if key.endswith("_acting")]:
                name = stored.get(key.removesuffix("acting") + "of")
                self.acting[None if name is None else text_of(name)] = stored[key].tolist()

    def filter_rows(self, rows: Iterable[Row], write: Write) -> None:
        """Filter all rows and write their estimates.

        Up to `rows_per_batch` rows that have already arrived form one batch.
        """
        waiting: list[Row] = []
        try:
            for row in rows:
                if row.gap or (self.started and row.recording != self.recording):
                    self.filter_batch(waiting, write)
                    self.switch(row)
                self.recording, self.started = row.recording, True
                waiting += [row._replace(obs=None, inserted=True)] * (row.moves - 1)
                waiting.append(row)
                if not row.next_ready or len(waiting) >= self.rows_per_batch:
                    self.filter_batch(waiting, write)
        except LineError:
            self.filter_batch(waiting, write)
            raise
        self.filter_batch(waiting, write)

    def compare(self, rows: list[Row]) -> None:
        """Compare rows of one recording with the training."""
        if (comparison := self.comparison) is None:
            return
        clock, real = self.clock, [row for row in rows if not row.inserted]
        for row in real:
            if row.clock is not None:
                comparison.add(None, durations=[] if clock is None else [row.clock - clock])
                clock = row.clock
        seen = [row for row in real if row.obs is not None]
        if seen:
            obs, controls = ([getattr(row, side) for row in seen] for side in ("obs", "control"))
            comparison.add(torch.cat(obs), None if controls[0] is None else torch.cat(controls))
        if self.report is not None and comparison.rows >= ROWS_TO_COMPARE:
            for text in comparison.differences():
                self.report(text)
            self.comparison = None

    @property
    def clocks(self) -> dict[str | None, float]:
        """The last time of each recording that has one."""
        known = {name: track.clock for name, track in self.tracks.items()}
        known[self.recording] = self.clock
        return {name: clock for name, clock in known.items() if clock is not None}

    @property
    def ends(self) -> dict[str | None, End]:
        """What the next row of each recording follows on."""
        clocks = self.clocks
        names = {*clocks, *self.acting}
        return {name: End(clocks.get(name), self.acting.get(name)) for name in names}

    def switch(self, row: Row) -> None:
        """Continue with the recording of a row: from its own state, or from the prior."""
        estimator, live = self.estimator, self.estimator.live
        if self.started and row.recording != self.recording:
            self.tracks[self.recording] = Track(
                live.state, live.rejections, estimator.recent, self.steps, self.clock
            )
            if len(self.tracks) > MAX_OPEN_RECORDINGS:
                oldest = next(iter(self.tracks))
                self.closed.add(oldest)
                del self.tracks[oldest]
        track = self.tracks.pop(row.recording, None)
        if track is not None and not row.gap:
            live.state, live.rejections, estimator.recent, self.steps, self.clock = track
            return
        self.restarts += row.gap or row.recording in self.closed
        estimator.restart()
        self.steps = 0
        if track is None and row.recording != self.recording:
            self.clock = None

    def filter_batch(self, rows: list[Row], write: Write) -> None:
        """Filter rows of one recording, write their estimates and empty the list.

        The state is saved every ``save_every`` steps.
        """
        if not rows:
            return
        output: list[Values] = []
        self.compare(rows)
        for row, values in zip(rows, self.estimator.filter_rows(rows), strict=True):
            if row.inserted:
                self.predicted += 1
                continue
            position = dict(zip(POSITION, (row.recording, self.steps, row.time), strict=True))
            output.append({k: v for k, v in position.items() if v is not None} | values)
            self.steps += 1
            self.missing += row.obs is None
        self.columns = list(output[0])
        before, self.done, self.clock = self.done, self.done + len(output), rows[-1].clock
        if (logged := rows[-1].logged) is not None:
            self.acting[rows[-1].recording] = logged
        rows.clear()
        write(output)
        if self.every is not None and self.done // self.every > before // self.every:
            self.save()

    def save(self) -> None:
        """Write the state, if it has a file and a step has been made."""
        if self.path is None or not self.done:
            return
        position: dict[str, Tensor | None] = {
            "steps": torch.tensor(self.steps),
            "checkpoint": bytes_of(self.checkpoint),
            "clock": number_of(self.clock),
            "recording": None if self.recording is None else bytes_of(self.recording.encode()),
            "recent": self.estimator.recent,
        }
        for k, (name, track) in enumerate(self.tracks.items()):
            leaves: dict[str, Tensor | None] = {
                f"state_{field}": leaf for field, leaf in track.state._asdict().items()
            }
            leaves |= {
                "name": None if name is None else bytes_of(name.encode()),
                "rejections": track.rejections,
                "recent": track.recent,
                "steps": torch.tensor(track.steps),
                "clock": number_of(track.clock),
            }
            position |= {f"track_{k}_{key}": leaf for key, leaf in leaves.items()}
        for k, (name, logged) in enumerate(self.acting.items()):
            position |= {
                f"control_{k}_acting": torch.tensor(logged, dtype=torch.float64),
                f"control_{k}_of": None if name is None else bytes_of(name.encode()),
            }
        self.estimator.live.save(
            self.path, **{key: leaf for key, leaf in position.items() if leaf is not None}
        )


def bytes_of(text: bytes) -> Tensor:
    """Return bytes as a tensor."""
    return torch.tensor(list(text), dtype=torch.uint8)


def text_of(leaf: Tensor) -> str:
    """Return the text of a tensor of bytes."""
    return bytes(leaf.tolist()).decode()


def number_of(value: float | None) -> Tensor | None:
    """Return a number as a tensor in float64."""
    return None if value is None else torch.tensor(value, dtype=torch.float64)


def read_tracks(stored: dict[str, Tensor], like: Any) -> dict[str | None, Track]:
    """Return the tracks of a state file by recording; ``like`` is a filter state."""
    tracks: dict[str | None, Track] = {}
    for key in [key for key in stored if re.fullmatch(r"track_\d+_steps", key)]:
        start = key.removesuffix("steps")
        leaves = {
            field: stored[f"{start}state_{field}"].to(leaf.device)
            for field, leaf in like._asdict().items()
        }
        name, clock = stored.get(f"{start}name"), stored.get(f"{start}clock")
        tracks[None if name is None else text_of(name)] = Track(
            type(like)(**leaves),
            stored.get(f"{start}rejections"),
            stored.get(f"{start}recent"),
            int(stored[key]),
            None if clock is None else float(clock),
        )
    return tracks
