"""Applies a filter to a stream of rows, writes its estimates, and keeps its state in a file."""

import csv
import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kbf.commands.support.stream_reader import LineError, Row
from kbf.data.cache import write_arrays
from kbf.filters.online import read_leaves
from kbf.fitted.online_estimator import OnlineEstimator, Values

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
                lines.writerow([f"{v:.9g}" if isinstance(v, float) else v for v in row.values()])
        if flush:
            file.flush()

    return write


def write_npz(path: str, rows: list[Values]) -> None:
    """Write rows as one array for each column of the first row, atomically."""
    columns = {
        name: ["" if row.get(name) is None else row[name] for row in rows] for name in rows[0]
    }
    write_arrays(path, columns)


# Upper bound on the rows, of those that have arrived, that are written in one batch.
ROWS_PER_BATCH = 64


class FilterRun:
    """Applies an estimator to all rows and saves its state, step count, last time and recording."""

    def __init__(
        self,
        estimator: OnlineEstimator,
        path: str | None,
        every: int | None,
        checkpoint: bytes,
    ) -> None:
        """Continue from the state in ``path``, if there is one.

        Args:
            estimator: of the checkpoint.
            path: of the state; None for none.
            every: steps between writings of it; None writes at the end alone.
            checkpoint: its `identity`.

        Raises:
            ValueError: a state of another checkpoint, or one that cannot be read.
        """
        self.estimator: OnlineEstimator = estimator
        self.path: Path | None = None if path is None else Path(path)
        self.every: int | None = every
        self.checkpoint: bytes = checkpoint
        self.steps: int = 0
        self.done: int = 0
        self.missing: int = 0
        self.columns: list[str] = []
        self.sequence: str | None = None
        self.clock: float | None = None
        self.started: bool = False
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
                self.sequence = bytes(stored["recording"].tolist()).decode()

    def filter_rows(self, rows: Iterable[Row], write: Write) -> None:
        """Filter all rows and write their estimates.

        Up to `ROWS_PER_BATCH` rows that have already arrived form one batch.
        """
        waiting: list[Row] = []
        try:
            for row in rows:
                if row.gap or (self.started and row.sequence != self.sequence):
                    self.filter_batch(waiting, write)
                    self.estimator.restart()
                    self.steps = 0
                self.sequence, self.started = row.sequence, True
                waiting.append(row)
                if not row.next_ready or len(waiting) == ROWS_PER_BATCH:
                    self.filter_batch(waiting, write)
        except LineError:
            self.filter_batch(waiting, write)
            raise
        self.filter_batch(waiting, write)

    def filter_batch(self, rows: list[Row], write: Write) -> None:
        """Filter rows of one recording, write their estimates and empty the list.

        The state is saved every ``save_every`` steps.
        """
        if not rows:
            return
        output: list[Values] = []
        for row, values in zip(rows, self.estimator.filter_rows(rows), strict=True):
            position = {"recording": row.sequence, "step": self.steps, "time": row.time}
            output.append({k: v for k, v in position.items() if v is not None} | values)
            self.steps += 1
            self.missing += row.obs is None
        self.columns = list(output[0])
        before, self.done, self.clock = self.done, self.done + len(rows), rows[-1].clock
        rows.clear()
        write(output)
        if self.every is not None and self.done // self.every > before // self.every:
            self.save()

    def save(self) -> None:
        """Write the state, if it has a file and a step has been made."""
        if self.path is None or not self.done:
            return
        # A checkpoint's sum and a name are bytes; what is None is left out.
        clock, name, recent = self.clock, self.sequence, self.estimator.recent
        as_bytes = partial(torch.tensor, dtype=torch.uint8)
        position = {
            "steps": torch.tensor(self.steps),
            "checkpoint": as_bytes(list(self.checkpoint)),
            "clock": None if clock is None else torch.tensor(clock, dtype=torch.float64),
            "recording": None if name is None else as_bytes(list(name.encode())),
            "recent": recent,
        }
        self.estimator.live.save(
            self.path, **{key: leaf for key, leaf in position.items() if leaf is not None}
        )
