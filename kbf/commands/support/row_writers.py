"""Estimates as rows of a table, computed by a running filter; writers of CSV, JSON lines, npz."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from kbf.commands.support.stream_reader import Row
from kbf.data.files.column_schema import ColumnSchema
from kbf.evaluation.alarms import WINDOW, Monitor, running_median
from kbf.evaluation.calibration import Calibration
from kbf.filters.online import OnlineFilter
from kbf.filters.protocols import covariance_of, diagnostics_of
from kbf.training.checkpoint import Trained

Values = dict[str, float | int | str | None]
"""A row of the output: numbers and texts by column."""


class OnlineEstimator:
    """A running filter: rows of observations in, rows of estimates and alarms out.

    Standard deviations and diagnostics of the filter are added where it has them.
    """

    column_schema: ColumnSchema
    calibration: Calibration | None

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
            covariance: sd (a standard deviation for each column), full (all entries as well) or
                none.
            alarms: judge each observation with the checkpoint's monitor, if it has one; a diverged
                track starts again from the prior.
            compiled: as in `OnlineFilter`.
            generator: randomness of filters that draw particles.

        Raises:
            ValueError: covariances of a filter that has none, or another word.
        """
        if covariance not in ("std", "full", "none"):
            raise ValueError(f"covariance must be sd, full or none, got {covariance!r}")
        self.filter: Any = trained.filter
        self.live: OnlineFilter = OnlineFilter(
            trained.filter, compiled=compiled, generator=generator
        )
        self.column_schema, self.calibration = column_schema, trained.calibration
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
            if valid < len(
                rest
            ):  # the rows behind it were filtered from a diverged track: start again at this one
                self.restart()
                self.live.rejected = rejected[valid]
                self.live.step(rest[valid].obs, rest[valid].control)
                states, alarms = [*states, self.live.state], [*alarms, "diverged"]
        self.alarms += sum(alarm != "" for alarm in alarms)
        output = self.output_rows(concatenated(states))
        return (
            output
            if self.monitor is None
            else [values | {"alarm": a} for values, a in zip(output, alarms, strict=True)]
        )

    def step_through(self, rows: list[Row]) -> tuple[list[Any], list[Any], list[int]]:
        """Return predicted and updated states of each row.

        The predicted ones are empty without a monitor, which alone needs them.

        And how many observations had been passed over before each row.
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
        observed = [x for x in obs if x is not None]
        if not observed:
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
        flags = zip(
            diverged.tolist(),
            (checks.out_of_distribution < monitor.rate).tolist(),
            checks.alarm.tolist(),
            strict=True,
        )
        return [
            "diverged"
            if has_diverged
            else "out_of_distribution"
            if is_outside
            else "innovation_outlier"
            if alarm
            else ""
            for has_diverged, is_outside, alarm in flags
        ]

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


@runtime_checkable
class RowWriter(Protocol):
    """Writes rows of estimates. The columns are those of the first row."""

    def write(self, rows: list[Values]) -> None:
        """Write a block of rows."""
        ...

    def close(self) -> None:
        """Write the rows that are still in memory."""
        ...


class CsvWriter:
    """Writes comma-separated lines, and flushes them after each block for the reader of a pipe."""

    file: Any
    flush: bool
    header: bool

    def __init__(self, file: Any, *, header: bool = True, flush: bool = True) -> None:
        self.file, self.header, self.flush = file, header, flush
        self.writer: Any = csv.writer(file, lineterminator="\n")

    def write(self, rows: list[Values]) -> None:
        """Write lines; the header comes before the first."""
        if self.header:
            self.writer.writerow(rows[0])
            self.header = False
        for values in rows:
            self.writer.writerow(
                [f"{value:.9g}" if isinstance(value, float) else value for value in values.values()]
            )
        if self.flush:
            self.file.flush()

    def close(self) -> None:
        """Do nothing: no rows are in memory."""


class JsonLinesWriter:
    """Writes one JSON object a line; numbers that are not finite become null."""

    file: Any
    flush: bool

    def __init__(self, file: Any, *, flush: bool = True) -> None:
        self.file, self.flush = file, flush

    def write(self, rows: list[Values]) -> None:
        """Write lines."""
        for values in rows:
            finite = {
                k: None if isinstance(v, float) and not math.isfinite(v) else v
                for k, v in values.items()
            }
            self.file.write(json.dumps(finite) + "\n")
        if self.flush:
            self.file.flush()

    def close(self) -> None:
        """Do nothing: no rows are in memory."""


class NpzWriter:
    """Writes one array for each column at the end; until then the rows are in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, list[Any]] = {}

    def write(self, rows: list[Values]) -> None:
        """Keep the rows until `close`."""
        for values in rows:
            for name, value in values.items():
                self.columns.setdefault(name, []).append("" if value is None else value)

    def close(self) -> None:
        """Write the file."""
        import numpy

        with self.path.open("wb") as file:
            numpy.savez_compressed(
                file,
                **{n: numpy.array(v) for n, v in self.columns.items()},  # pyright: ignore[reportArgumentType]
            )
