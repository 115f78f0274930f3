"""Applies a filter to a stream of rows, writes its estimates, and keeps its state in a file."""

import csv
import json
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from kbf.commands.support.stream_reader import LineError, Row
from kbf.data.cache import write_arrays
from kbf.data.files.column_schema import ColumnSchema
from kbf.evaluation.alarms import WINDOW, Monitor, running_median
from kbf.evaluation.calibration import Calibration
from kbf.filters.online import OnlineFilter, read_leaves
from kbf.filters.protocols import covariance_of, diagnostics_of
from kbf.fitted.checkpoint import Trained

# A row of the output: numbers and texts by column.
Values = dict[str, float | int | str | None]
# Writes a block of rows.
Write = Callable[[list[Values]], None]


class OnlineEstimator:
    """A running filter: rows of observations in, rows of estimates and alarms out.

    Standard deviations and diagnostics of the filter are added where it has them.
    """

    def __init__(
        self,
        trained: Trained,
        column_schema: ColumnSchema,
        *,
        covariance: str = "std",
        alarms: bool = True,
        compiled: Tensor | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Initialise the filter at the prior.

        Args:
            trained: filter, calibration and monitor of a checkpoint.
            column_schema: names and kinds of the columns.
            covariance: std (a standard deviation for each column), full (all entries as well) or
                none.
            alarms: check each observation with the checkpoint's monitor, if it has one; a diverged
                track is re-initialised at the prior.
            compiled: as in `OnlineFilter`.
            generator: randomness of filters that draw particles.

        Raises:
            ValueError: covariances of a filter that has none, or another word.
        """
        if covariance not in ("std", "full", "none"):
            raise ValueError(f"covariance must be std, full or none, got {covariance!r}")
        self.filter: Any = trained.filter
        self.live: OnlineFilter = OnlineFilter(
            trained.filter, compiled=compiled, generator=generator
        )
        self.column_schema: ColumnSchema = column_schema
        self.calibration: Calibration | None = trained.calibration
        self.monitor: Monitor | None = trained.monitor if alarms else None
        has_covariance = covariance_of(self.filter, self.live.state) is not None
        if covariance == "full" and not has_covariance:
            raise ValueError(
                "covariance=full: this model has no covariances, set covariance=std or none"
            )
        self.with_covariance: bool = has_covariance and covariance != "none"
        d = len(column_schema.components("states"))
        self.entries: list[tuple[int, int]] = (
            [(i, j) for i in range(d) for j in range(i, d)] if covariance == "full" else []
        )
        self.recent: Tensor | None = None  # the monitor's last scores, 1 WINDOW
        self.alarms: int = 0

    def restart(self) -> None:
        """Re-initialise the filter at the prior."""
        self.live.restart()
        self.recent = None

    @torch.inference_mode()
    def filter_rows(self, rows: list[Row]) -> list[Values]:
        """Return estimates of rows of one recording.

        The filter runs row by row; the outputs are computed in one batch, which is cheaper.
        """
        states, alarms = [], []
        while len(states) < len(rows):
            rest = rows[len(states) :]
            predicted, updated, rejected = self.step_through(rest)
            verdicts = [] if self.monitor is None else self.verdicts(self.monitor, predicted, rest)
            valid = verdicts.index("diverged") if "diverged" in verdicts else len(rest)
            states, alarms = states + updated[:valid], alarms + verdicts[:valid]
            # The rows behind it were filtered from a diverged track: start again at this one.
            if valid < len(rest):
                self.restart()
                self.live.rejected = rejected[valid]
                self.live.step(rest[valid].obs, rest[valid].control)
                states, alarms = [*states, self.live.state], [*alarms, "diverged"]
        self.alarms += sum(alarm != "" for alarm in alarms)
        output = self.output_rows(concatenated(states))
        if self.monitor is None:
            return output
        return [values | {"alarm": a} for values, a in zip(output, alarms, strict=True)]

    def step_through(self, rows: list[Row]) -> tuple[list[Any], list[Any], list[int]]:
        """Return predicted and updated states, and the number of earlier rejections, of each row.

        The predicted states are empty without a monitor: nothing else requires them.
        """
        live, predicted, updated, rejected = self.live, [], [], []
        collect = None if self.monitor is None else lambda state, *_: predicted.append(state)
        for row in rows:
            rejected.append(live.rejected)
            live.step(row.obs, row.control, before=collect)
            updated.append(live.state)
        return predicted, updated, rejected

    def verdicts(self, monitor: Monitor, predicted: list[Any], rows: list[Row]) -> list[str]:
        """Return the alarm of each row, or an empty string.

        Those after the first "diverged" are not valid.
        """
        obs = [None if row.obs is None or bool(row.obs.isnan().any()) else row.obs for row in rows]
        if not (observed := [x for x in obs if x is not None]):
            if self.recent is not None:
                self.recent = torch.cat(
                    [self.recent, torch.full_like(self.recent, torch.nan)[: len(rows)]]
                )[-WINDOW:]
            return [""] * len(rows)
        mask = torch.tensor([x is not None for x in obs], device=observed[0].device)
        filled = torch.cat([torch.zeros_like(observed[0]) if x is None else x for x in obs])
        checks = monitor.check(self.filter, concatenated(predicted), filled, mask=mask)
        scores = checks.recent[:, -1]
        window = scores.new_full((WINDOW,), torch.nan) if self.recent is None else self.recent
        series = torch.cat([window, scores])
        self.recent = series[-WINDOW:]
        diverged = checks.diverged
        if monitor.divergence is not None:
            diverged = monitor.divergence.p_value(running_median(series)[WINDOW:]) < monitor.rate
        outside = checks.out_of_distribution < monitor.rate
        names = ("diverged", "out_of_distribution", "innovation_outlier", "")
        # The first that applies, of each row.
        flags = torch.stack([diverged, outside, checks.alarm, torch.ones_like(diverged)])
        return [names[k] for k in flags.int().argmax(0).tolist()]

    def output_rows(self, state: Any) -> list[Values]:
        """Return a row of estimates, standard deviations and diagnostics for each filter state."""
        C = covariance_of(self.filter, state) if self.with_covariance else None
        if C is not None and self.calibration is not None:
            C = self.calibration.covariance(C)
        columns = self.column_schema.decode(self.filter.estimate(state), C)
        columns |= {f"cov_{i}_{j}": C[:, i, j] for i, j in self.entries} if C is not None else {}
        columns |= diagnostics_of(self.filter, state)
        return [
            dict(zip(columns, values, strict=True))
            for values in zip(*(c.tolist() for c in columns.values()), strict=True)
        ]


def concatenated(states: list[Any]) -> Any:
    """Return the filter states of single recordings as one of a batch."""
    return type(states[0])(*(torch.cat(leaves) for leaves in zip(*states, strict=True)))


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
