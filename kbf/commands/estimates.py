"""Estimates as rows of a table: what a running filter tells at each step, and where it is written."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor

from kbf.checkpoint import Trained
from kbf.commands.lines import Row
from kbf.data.own.boundary import Boundary
from kbf.filters.base import move
from kbf.filters.live import Live
from kbf.monitor import WINDOW, Monitor, middle

Values = dict[str, float | int | str | None]
"""A row of the output: numbers and words by column."""


class Tracker:
    """A running filter, and all that is told of its estimates."""

    def __init__(
        self,
        trained: Trained,
        boundary: Boundary,
        *,
        covariance: str = "sd",
        alarms: bool = True,
        compiled: Tensor | None = None,
        generator: Generator | None = None,
    ) -> None:
        """Start from the prior.

        Args:
            trained: filter, calibration and monitor of a checkpoint.
            boundary: from components of the state to columns.
            covariance: sd (a standard deviation for each column), full (all entries as well) or none.
            alarms: look at each observation with the checkpoint's monitor, if it has one; a lost track starts again.
            compiled: as in `Live`.
            generator: of filters that draw.

        Raises:
            ValueError: covariances of a filter that has none, or another word.
        """
        if covariance not in ("sd", "full", "none"):
            raise ValueError(f"covariance must be sd, full or none, got {covariance!r}")
        self.filter: Any = trained.filter
        self.live = Live(trained.filter, compiled=compiled, generator=generator)
        self.boundary, self.calibration = boundary, trained.calibration
        self.monitor = trained.monitor if alarms else None
        spread = getattr(self.filter, "covariance", None)
        has = spread is not None and spread(self.live.state) is not None
        if covariance == "full" and not has:
            raise ValueError("covariance=full: this model has no covariances, set covariance=sd or none")
        self.spread = spread if has and covariance != "none" else None
        d = len(boundary.inside("states"))
        self.entries = [(i, j) for i in range(d) for j in range(i, d)] if covariance == "full" else []
        self.diagnose = getattr(self.filter, "diagnostics", lambda _: {})
        self.recent: Tensor | None = None  # the monitor's last scores, 1 WINDOW
        self.alarms = 0

    def restart(self) -> None:
        """Back to the prior."""
        self.live.restart()
        self.recent = None

    @torch.inference_mode()
    def through(self, rows: list[Row]) -> list[Values]:
        """Move and observe row by row, then tell of all at once: that costs little more than to tell of one."""
        states, words = [], []
        while len(states) < len(rows):
            rest = rows[len(states) :]
            before, after = self.run(rest)
            found = [] if self.monitor is None else self.judged(self.monitor, before, rest)
            sound = found.index("lost") if "lost" in found else len(rest)
            states, words = states + after[:sound], words + found[:sound]
            if sound < len(rest):  # what came after was filtered in vain
                self.restart()
                self.live.step(rest[sound].obs, rest[sound].control)
                states, words = [*states, self.live.state], [*words, "lost"]
        self.alarms += sum(word != "" for word in words)
        told = self.told(together(states))
        return told if self.monitor is None else [values | {"alarm": word} for values, word in zip(told, words, strict=True)]

    def run(self, rows: list[Row]) -> tuple[list[Any], list[Any]]:
        """States before each observation, for the monitor, and behind it."""
        live, before, after = self.live, [], []
        for row in rows:
            if self.monitor is not None:
                before.append(move(self.filter, live.state, control=row.control, generator=live.generator))
            if self.monitor is None or live.fast is not None or row.obs is None or not torch.isfinite(row.obs).all():
                live.step(row.obs, row.control)
            else:
                live.state = self.filter.update(before[-1], row.obs)
            after.append(live.state)
        return before, after

    def judged(self, monitor: Monitor, before: list[Any], rows: list[Row]) -> list[str]:
        """What the monitor says of each row: novel, surprise, lost or nothing. Behind the first that is lost nothing is right."""
        obs = [row.obs if row.obs is not None and bool(torch.isfinite(row.obs).all()) else None for row in rows]
        known = [x for x in obs if x is not None]
        if not known:
            if self.recent is not None:
                self.recent = torch.cat([self.recent, torch.full_like(self.recent, torch.nan)[: len(rows)]])[-WINDOW:]
            return [""] * len(rows)
        seen = torch.tensor([x is not None for x in obs], device=known[0].device)
        filled = torch.cat([torch.zeros_like(known[0]) if x is None else x for x in obs])
        found = monitor.check(self.filter, together(before), filled, mask=seen)
        scores = found.recent[:, -1]
        window = scores.new_full((WINDOW,), torch.nan) if self.recent is None else self.recent
        series = torch.cat([window, scores])
        self.recent = series[-WINDOW:]
        lost = found.lost
        if monitor.lost is not None:
            lost = monitor.lost.p_value(middle(series.unfold(0, WINDOW, 1)[1:])) < monitor.rate
        flags = zip(lost.tolist(), (found.novelty < monitor.rate).tolist(), found.alarm.tolist(), strict=True)
        return ["lost" if a else "novel" if b else "surprise" if c else "" for a, b, c in flags]

    def told(self, state: Any) -> list[Values]:
        """Estimates, standard deviations and diagnostics of a batch of states, a row for each."""
        C = None if self.spread is None else self.spread(state)
        if C is not None and self.calibration is not None:
            C = self.calibration.covariance(C)
        columns = self.boundary.decode(self.filter.estimate(state), C)
        columns |= {f"cov_{i}_{j}": C[:, i, j] for i, j in self.entries} if C is not None else {}
        columns |= self.diagnose(state)
        return [dict(zip(columns, values, strict=True)) for values in zip(*(c.tolist() for c in columns.values()), strict=True)]


def together(states: list[Any]) -> Any:
    """States of single sequences as one of a batch."""
    return type(states[0])(*(torch.cat(leaves) for leaves in zip(*states, strict=True)))


@runtime_checkable
class Table(Protocol):
    """Where rows go. The columns are those of the first row."""

    def write(self, rows: list[Values]) -> None:
        """Rows that came together."""
        ...

    def close(self) -> None:
        """The end: what is not yet written."""
        ...


class Csv:
    """Lines of numbers, flushed as they come, so that a reader behind a pipe has them at once."""

    def __init__(self, file: Any, *, header: bool = True, flush: bool = True) -> None:
        self.file, self.header, self.flush = file, header, flush
        self.writer = csv.writer(file, lineterminator="\n")

    def write(self, rows: list[Values]) -> None:
        """Lines, with the header before the first."""
        if self.header:
            self.writer.writerow(rows[0])
            self.header = False
        for values in rows:
            self.writer.writerow([f"{value:.9g}" if isinstance(value, float) else value for value in values.values()])
        if self.flush:
            self.file.flush()

    def close(self) -> None:
        """Everything is written."""


class JsonLines:
    """An object a line; numbers that are not finite are null."""

    def __init__(self, file: Any, *, flush: bool = True) -> None:
        self.file, self.flush = file, flush

    def write(self, rows: list[Values]) -> None:
        """Lines."""
        for values in rows:
            known = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
            self.file.write(json.dumps(known) + "\n")
        if self.flush:
            self.file.flush()

    def close(self) -> None:
        """Everything is written."""


class Npz:
    """An array for each column, written at the end: the rows are kept until then."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.columns: dict[str, list[Any]] = {}

    def write(self, rows: list[Values]) -> None:
        """Keep rows."""
        for values in rows:
            for name, value in values.items():
                self.columns.setdefault(name, []).append("" if value is None else value)

    def close(self) -> None:
        """The file."""
        import numpy

        with self.path.open("wb") as file:
            numpy.savez_compressed(file, **{name: numpy.array(values) for name, values in self.columns.items()})  # pyright: ignore[reportArgumentType]
