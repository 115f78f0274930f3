"""Observations as lines of text, one a step: CSV with or without a header, or JSON lines, read one by one as they come."""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kbf.data.own.boundary import Boundary
from kbf.data.own.tables import number, seconds
from kbf.data.own.times import GAP

LONGEST = 2**20
"""Bytes that a line may have."""


class Row(NamedTuple):
    """What comes in at one step.

    Attributes:
        obs: ``1 *x`` with NaN where nothing was observed, or None. control: ``1 k``, or None without controls.
        time: as it was written. sequence: the recording that it belongs to; another one starts from the prior.
        clock: the time as a number, where a step has a known length. gap: too much of it has gone since the step before.
        more: the next row is there already.
    """

    obs: Tensor | None
    control: Tensor | None = None
    time: str | None = None
    sequence: str | None = None
    clock: float | None = None
    gap: bool = False
    more: bool = False


class Names(NamedTuple):
    """Columns of the input: those of observations and controls by the boundary, one of times and one that tells recordings apart.

    ``step`` is the median time between steps of the training data: where more than `GAP` of it has passed, a filter starts again.
    With ``elapsed`` the time since the step before is the last control; at a start it is ``step``.
    """

    boundary: Boundary
    time: str = "time"
    sequence: str = "sequence"
    elapsed: bool = False
    step: float | None = None

    @property
    def needed(self) -> list[str]:
        """Columns in the order of lines without names."""
        return [*self.boundary.columns("observations"), *self.boundary.controls, *([self.time] if self.elapsed else [])]


class LineError(ValueError):
    """A line that cannot be read."""


class Lines:
    """Rows of a stream of lines.

    A line whose observation has an empty, ``nan`` or ``null`` cell is a step without observation (where the filter knows its
    sensors, only those are silent). A blank line is no step, as in recordings to learn from. The first line may be a header:
    columns are then found by their names, and others are left alone. A JSON line is null (a step without observation), a list of
    numbers in the order of a CSV line, or an object by names.
    """

    def __init__(
        self,
        chunks: Iterable[bytes],
        names: Names,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        source: str = "standard input",
        skip: Callable[[str], None] | None = None,
        clock: float | None = None,
        sequence: str | None = None,
        partial: bool = False,
    ) -> None:
        """Lines of a source.

        Args:
            chunks: of the text, as they come.
            names: the columns.
            dtype: of the tensors, with their device.
            source: what errors call the input.
            skip: takes the message of a line that cannot be read; it then counts as a step without observation. None raises it.
            clock: the time of the step before the first, where a stream goes on. sequence: its recording.
            partial: the filter takes observations in which some sensors are silent.
        """
        self.chunks, self.names, self.dtype, self.device = chunks, names, dtype, device
        self.source, self.skip, self.clock = source, skip, clock
        self.silent = all if partial else any
        self.json, self.delimiter = False, ","
        self.places: list[int] | None = None
        self.needed = names.needed
        self.width = len(self.needed)
        self.optional: dict[str, int] = {}
        self.turned = any(part.kind != "number" for part in names.boundary.observations)
        self.q = len(names.boundary.columns("observations"))
        self.controls: list[float] | None = None if self.needed[self.q :] else []
        self.sequence = sequence
        self.assumed = False  # the clock is that of a step which did not tell its time
        self.bad = 0

    def __iter__(self) -> Iterator[Row]:
        """The rows.

        Raises:
            LineError: with source, line and column, if there is no ``skip``.
        """
        for at, text, more in self.lines():
            try:
                if self.places is None and self.opened(text):
                    continue
                yield self.row(text)._replace(more=more)
            except LineError as error:
                message = f"{self.source}, line {at}{error}"
                if self.skip is None or self.places is None or self.controls is None:
                    raise LineError(message) from None
                self.skip(message)
                self.bad += 1
                yield self.unknown()._replace(more=more)

    def lines(self) -> Iterator[tuple[int, str, bool]]:
        """Number and text of each line that is not blank, and whether the next such one is there already."""
        rest, at = b"", 0
        for chunk in itertools.chain(self.chunks, [None]):
            *lines, rest = (rest + chunk).split(b"\n") if chunk is not None else (rest, b"")
            texts = [part.decode("utf-8", errors="replace").lstrip("\ufeff").strip(" \r") for part in lines]
            told = [(at + k, text) for k, text in enumerate(texts, 1) if text]
            at += len(lines)
            for k, (line, text) in enumerate(told, 1):
                yield line, text, k < len(told)
            if len(rest) > LONGEST:
                raise LineError(f"{self.source}: no end of a line in {LONGEST:,} bytes; this is no text of observations")

    def opened(self, text: str) -> bool:
        """Look at the first line: JSON or CSV, and where the columns are. Returns whether it is a header."""
        self.json = text[0] in "[{" or text == "null"
        needed = self.needed
        self.delimiter = max(",;\t", key=text.count)
        cells = [] if self.json else self.split(text)
        if self.json or all(number(cell) is not None for cell in cells):
            self.places = list(range(len(needed)))
            return False
        if "\ufffd" in text or "\0" in text:
            raise LineError(": this is no text in UTF-8")
        if twice := [name for name in needed if cells.count(name) > 1]:
            raise LineError(f": two columns are called {twice[0]!r}")
        if gone := [name for name in needed if name not in cells]:
            told = f"{', '.join(needed)} are needed, in a header or as numbers in this order"
            raise LineError(f": there is no column {gone[0]!r} in {text[:80]!r}; {told}")
        self.places, self.width = [cells.index(name) for name in needed], len(cells)
        self.optional = {key: cells.index(key) for key in (self.names.time, self.names.sequence) if key in cells}
        return True

    def row(self, text: str) -> Row:
        """One line as a row."""
        if self.json:
            return self.from_json(text)
        cells = self.split(text)
        if len(cells) != self.width:
            raise LineError(f": it has {len(cells)} columns in place of {self.width}")
        assert self.places is not None
        values = [self.number(cells[place], place) for place in self.places]
        time, sequence = (cells[at] if (at := self.optional.get(key)) is not None else None for key in self.names[1:3])
        if sequence == "":
            raise LineError(f", column {self.names.sequence!r}: it does not say which recording this is")
        return self.made(values, time, sequence)

    def from_json(self, text: str) -> Row:
        """A JSON line as a row."""
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise LineError(f", column {error.colno}: this is no JSON: {error.msg}") from None
        except (ValueError, RecursionError):  # a number of thousands of digits, or brackets in brackets
            raise LineError(": this is no JSON of numbers") from None
        needed = self.needed
        if found is None:
            return self.unknown()
        if isinstance(found, dict):
            if gone := [name for name in needed if name not in found]:
                raise LineError(f": the object has no {gone[0]!r}; {', '.join(needed)} are needed")
            time, sequence = (None if found.get(key) is None else str(found[key]) for key in self.names[1:3])
            found = [found[name] for name in needed]
        else:
            time, sequence = None, self.sequence
        if not isinstance(found, list) or len(found) != len(needed):
            held = f"{len(found)} entries" if isinstance(found, list) else f"a {type(found).__name__}"
            raise LineError(f": it holds {held} in place of {len(needed)} numbers ({', '.join(needed)})")
        return self.made([self.number(value, k) for k, value in enumerate(found)], time, sequence)

    def unknown(self) -> Row:
        """A step of which nothing is known: the controls of the step before go on, and so does time, by a usual step."""
        if self.controls is None:
            raise LineError(f": the first line must hold {', '.join(self.needed[self.q :])}")
        after = [self.clock + self.names.step] if self.names.elapsed and self.clock is not None and self.names.step else []
        row = self.made([math.nan] * self.q + self.controls + after, None, self.sequence)
        self.assumed = True
        return row

    def number(self, cell: object, place: int) -> float:
        """A cell, or an entry of a JSON line, as a number; NaN if it is missing."""
        needed = self.needed
        column = needed[place if self.json else self.places.index(place)] if self.places else ""
        if cell is None:
            return math.nan
        value = None
        if isinstance(cell, str):
            value = seconds(cell) if self.names.elapsed and column == self.names.time else number(cell)
        elif isinstance(cell, int | float) and not isinstance(cell, bool):
            value = math.inf if abs(cell) > 1e300 else float(cell)  # whole numbers may be larger than any float
        if value is None:
            raise LineError(f", column {column!r} ({place + 1}): {str(cell)[:40]!r} is not a number")
        return value

    def made(self, values: list[float], time: str | None, sequence: str | None) -> Row:
        """The tensors of a row."""
        q, k = self.q, len(self.names.boundary.controls)
        if not all(map(math.isfinite, values[q:])):
            raise LineError(f": {', '.join(self.needed[q:])} must be there at each step")
        control = self.controls = values[q : q + k]
        before = self.clock if sequence in (None, self.sequence) else None
        now = values[-1] if self.names.elapsed else seconds(time or "") if self.names.step else None
        gap = False
        if now is not None and self.names.step is not None and math.isfinite(now):
            early = before is not None and now <= before
            if early and not self.assumed:
                raise LineError(f", column {self.names.time!r}: time {now:.15g} does not come after {before:.15g}")
            gap = before is not None and now - before > GAP * self.names.step
            if self.names.elapsed:
                control = [*control, self.names.step if before is None or gap or early else now - before]
            self.clock, self.assumed, time = now, False, time or f"{now:.15g}"
        self.sequence = sequence
        steer = torch.tensor([control], dtype=self.dtype, device=self.device) if control else None
        return Row(self.observed(values[:q]), steer, time, sequence, self.clock, gap)

    def observed(self, values: list[float]) -> Tensor | None:
        """The observation as the filter sees it; None where it is missing."""
        if self.silent(map(math.isnan, values)):
            return None
        obs = torch.tensor([values], dtype=self.dtype, device=self.device)
        if not self.turned:
            return obs
        try:
            return self.names.boundary.encode(obs, "observations")
        except ValueError as error:
            raise LineError(f": {error}") from None

    def split(self, text: str) -> list[str]:
        """The cells of a CSV line."""
        try:
            cells = next(csv.reader([text], delimiter=self.delimiter)) if '"' in text else text.split(self.delimiter)
        except csv.Error as error:
            raise LineError(f": this is no CSV: {error}") from None
        return [cell.strip() for cell in cells]
