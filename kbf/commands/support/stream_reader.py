"""Reads observations line by line from a stream: CSV with or without a header, or JSON lines."""

import csv
import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.dialect import DELIMITER_LINE
from kbf.data.files.layout import codes_by_column
from kbf.data.files.texts import number, number_or_truth, seconds
from kbf.data.files.timestamps import LARGEST_GAP, moves_in

# Delimiters of texts that are read line by line; of equally frequent ones the first.
STREAMED_DELIMITERS = ",;\t"

# Upper bound on the bytes of a line.
MAX_LINE_BYTES = 2**20


class Row(NamedTuple):
    """The input of one step.

    Attributes:
        obs: ``1 *x`` with NaN for missing sensors, or None where the observation is missing.
        control: ``1 k``, or None without controls.
        time: as it was written.
        recording: name of the recording; each recording has a filter state of its own.
        clock: the time as a number, where the length of a step is known.
        gap: more than `LARGEST_GAP` usual steps have passed since the row before.
        logged: the controls of the row, where they act in the move from it; None elsewhere.
        moves: time steps since the row before; all but the last have no row.
        inserted: such a step, whose estimate is not written.
        next_ready: the next row has already arrived.
    """

    obs: Tensor | None
    control: Tensor | None = None
    time: str | None = None
    recording: str | None = None
    clock: float | None = None
    gap: bool = False
    logged: list[float] | None = None
    next_ready: bool = False
    moves: int = 1
    inserted: bool = False


class InputColumns(NamedTuple):
    """Columns of the input: observations, controls, times and names of recordings.

    ``step`` is the median time between steps of the training data: a filter starts again where more
    than `LARGEST_GAP` times as much has passed. With ``elapsed`` the time since the step before is
    the last control; in the first step it is ``step``. ``missing`` are values that stand for a
    missing observation, as of `kbf.data.files.layout.codes_by_column`. With ``acts_from`` controls
    act in the move from their row, as in `kbf.data.files.timestamps.with_control_timing`. Without
    ``recording`` all rows are of one recording.
    """

    column_schema: ColumnSchema
    time: str = "time"
    recording: str | None = "recording"
    elapsed: bool = False
    step: float | None = None
    missing: Any = None
    acts_from: bool = False

    @property
    def needed(self) -> list[str]:
        """Return the names of the columns, in the order of lines without a header."""
        return [
            *self.column_schema.columns("observations"),
            *self.column_schema.controls,
            *([self.time] if self.elapsed else []),
        ]


class LineError(ValueError):
    """A line cannot be read."""


class HeaderError(LineError):
    """A header lacks a column that is required, so that no line below it can be read."""


class RowReader:
    """Reads rows from a stream of lines.

    A line whose observation has an empty, ``nan`` or ``null`` cell is a step without observation
    (if the filter models its sensors one by one, only those cells are missing). A blank line is
    skipped, as in recordings for training. The first line may be a header: columns are then found
    by their names, and others are ignored. A JSON line is null (a step without observation), a list
    of numbers in the order of a CSV line, or an object by names.
    """

    def __init__(
        self,
        chunks: Iterable[bytes],
        columns: InputColumns,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        source: str = "standard input",
        on_unreadable: Callable[[str], None] | None = None,
        clocks: Mapping[str | None, float] | None = None,
        acting: Mapping[str | None, list[float]] | None = None,
        recording: str | None = None,
        allow_missing_sensors: bool = False,
    ) -> None:
        """Set the source.

        Args:
            chunks: pieces of the text, as they arrive.
            columns: names of the columns.
            dtype: of the tensors.
            device: of the tensors.
            source: name of the input in error messages.
            on_unreadable: takes the message of a line that cannot be read, which then counts as a
                step without observation. None raises the error.
            clocks: of each recording the time of its last step, when a stream continues.
            acting: of each recording the controls of its last row, where these act from it.
            recording: name of the recording of the step before the first line.
            allow_missing_sensors: the filter uses observations with missing sensors.
        """
        self.chunks: Iterable[bytes] = chunks
        self.columns: InputColumns = columns
        self.tensor: Callable[..., Tensor] = partial(torch.tensor, dtype=dtype, device=device)
        self.source: str = source
        self.on_unreadable: Callable[[str], None] | None = on_unreadable
        self.clocks: dict[str | None, float] = dict(clocks or {})
        self.is_missing: Callable[[Iterable[bool]], bool] = all if allow_missing_sensors else any
        self.json: bool = False
        self.delimiter: str = ","
        self.column_index: list[int] | None = None
        self.needed: list[str] = columns.needed
        self.width: int = len(self.needed)
        self.optional_index: dict[str | None, int] = {}
        self.q: int = len(columns.column_schema.columns("observations"))
        self.controls: list[float] | None = None if self.needed[self.q :] else []
        self.codes: list[list[int | float]] = codes_by_column(
            columns.missing, columns.column_schema.columns("observations")
        )
        # controls that act in the next move
        self.acting: dict[str | None, list[float]] = dict(acting or {})
        self.recording: str | None = recording
        self.assumed: bool = False  # the clock was extrapolated over a line without a time
        self.untimed: Counter[str | None] = Counter()  # rows of recordings since their clock
        self.unreadable: int = 0

    def __iter__(self) -> Iterator[Row]:
        """Yield the rows.

        Raises:
            LineError: with source, line and column, if there is no ``on_unreadable``.
        """
        for line, text, next_ready in self.lines():
            try:
                if text is None:
                    raise LineError(
                        f": no end of a line in {MAX_LINE_BYTES:,} bytes; "
                        "this is no text of observations"
                    )
                if self.column_index is None and self.read_header(text):
                    continue
                yield self.parse(text)._replace(next_ready=next_ready)
            except LineError as error:
                message = f"{self.source}, line {line}{error}"
                if self.on_unreadable is None or isinstance(error, HeaderError):
                    raise LineError(message) from None
                self.on_unreadable(message)
                self.unreadable += 1
                # Before the first line that can be read there is no step.
                if self.column_index is not None and self.controls is not None:
                    yield self.missing_row()._replace(next_ready=next_ready)

    def lines(self) -> Iterator[tuple[int, str | None, bool]]:
        """Yield number and text of each line that is not blank, and whether the next has arrived.

        The text is None of a line that is too long, of which no more than that is ever kept.
        """
        rest, lines_read, too_long = b"", 0, False
        for chunk in itertools.chain(self.chunks, [None]):
            *lines, rest = (rest + chunk).split(b"\n") if chunk is not None else (rest, b"")
            texts = [readable(part) for part in lines]
            if too_long and lines:
                texts[0], too_long = None, False
            elif too_long or len(rest) > MAX_LINE_BYTES:
                rest, too_long = rest[:0], True
            arrived = [(lines_read + k, text) for k, text in enumerate(texts, 1) if text != ""]
            lines_read += len(lines)
            for k, (line, text) in enumerate(arrived, 1):
                yield line, text, k < len(arrived)

    def read_header(self, text: str) -> bool:
        """Find the format and the positions of the columns from the first line.

        Returns whether this line is a header, or names the delimiter as Excel does.
        """
        if DELIMITER_LINE.fullmatch(text):
            return True
        needed, self.json = self.needed, False
        if text[0] in "[{" or text == "null":
            read_json(text)  # a line that is no JSON raises: the format of those below is unknown
            self.json = True
        self.delimiter = max(STREAMED_DELIMITERS, key=text.count)
        cells = [] if self.json else self.split_cells(text)
        if self.json or all(number(cell) is not None for cell in cells):
            self.column_index = list(range(len(needed)))
            return False
        if "\ufffd" in text or "\0" in text:
            raise LineError(": this is no text in UTF-8")
        if repeated := [name for name in needed if cells.count(name) > 1]:
            raise HeaderError(f": two columns are called {repeated[0]!r}")
        if missing := [name for name in needed if name not in cells]:
            remedy = f"{', '.join(needed)} are needed, in a header or as numbers in this order"
            kind = LineError if len(missing) == len(needed) != len(cells) else HeaderError
            raise kind(f": there is no column {missing[0]!r} in {text[:80]!r}; {remedy}")
        self.column_index, self.width = [cells.index(name) for name in needed], len(cells)
        self.optional_index = {
            key: cells.index(key)
            for key in (self.columns.time, self.columns.recording)
            if key in cells
        }
        return True

    def parse(self, text: str) -> Row:
        """Return the row of a line."""
        if self.json:
            return self.parse_json(text)
        cells = self.split_cells(text)
        if len(cells) != self.width:
            raise LineError(f": it has {len(cells)} columns in place of {self.width}")
        assert self.column_index is not None
        values = [self.parse_number(cells[index], index) for index in self.column_index]
        time, recording = (
            cells[k] if (k := self.optional_index.get(key)) is not None else None
            for key in self.columns[1:3]
        )
        if recording == "":
            raise LineError(
                f", column {self.columns.recording!r}: the name of the recording is missing"
            )
        return self.make_row(values, time, recording)

    def parse_json(self, text: str) -> Row:
        """Return the row of a JSON line."""
        value, needed = read_json(text), self.needed
        if value is None:
            return self.missing_row()
        if isinstance(value, dict):
            if missing := [name for name in needed if name not in value]:
                raise LineError(
                    f": the object has no {missing[0]!r}; {', '.join(needed)} are needed"
                )
            time, recording = (
                None if value.get(key) is None else str(value[key]) for key in self.columns[1:3]
            )
            value = [value[name] for name in needed]
        else:
            time, recording = None, self.recording
        if not isinstance(value, list) or len(value) != len(needed):
            content = (
                f"{len(value)} entries" if isinstance(value, list) else f"a {type(value).__name__}"
            )
            raise LineError(
                f": it holds {content} in place of {len(needed)} numbers ({', '.join(needed)})"
            )
        return self.make_row(
            [self.parse_number(entry, k) for k, entry in enumerate(value)], time, recording
        )

    def missing_row(self) -> Row:
        """Return the row of a line without values.

        It has no observation, the controls of the step before, and the time one usual step later.
        """
        if self.controls is None:
            raise LineError(f": the first line must hold {', '.join(self.needed[self.q :])}")
        step = self.columns.step if self.columns.elapsed else None
        clock = self.clocks.get(self.recording)
        next_time = [clock + step] if step and clock is not None else []
        row = self.make_row([math.nan] * self.q + self.controls + next_time, None, self.recording)
        self.assumed = True
        return row

    def parse_number(self, cell: object, index: int) -> float:
        """Return a cell, or an entry of a JSON line, as a number; NaN if it is missing."""
        if cell is None:
            return math.nan
        position = index if self.json else (self.column_index or []).index(index)
        column, value = self.needed[position], None
        if isinstance(cell, str):
            value = (
                seconds(cell)
                if self.columns.elapsed and column == self.columns.time
                else number_or_truth(cell)
            )
        elif isinstance(cell, int | float) and not isinstance(cell, bool):
            # Whole numbers may be larger than any float.
            value = math.inf if abs(cell) > 1e300 else float(cell)
        if value is None:
            raise LineError(
                f", column {column!r} ({index + 1}): {str(cell)[:40]!r} is not a number"
            )
        return value

    def make_row(self, values: list[float], time: str | None, recording: str | None) -> Row:
        """Return a row of tensors; checks that controls are given and that time increases."""
        q, k, step = self.q, len(self.columns.column_schema.controls), self.columns.step
        if not all(map(math.isfinite, values[q:])):
            raise LineError(f": {', '.join(self.needed[q:])} must be there at each step")
        control = self.controls = values[q : q + k]
        if self.columns.acts_from:
            control = self.acting.get(recording, control)
            self.acting[recording] = self.controls
        previous = self.clocks.get(self.recording if recording is None else recording)
        now, gap, moves = seconds(time or "") if step else None, False, 1
        if self.columns.elapsed:
            now = values[-1]
        if now is not None and step is not None and math.isfinite(now):
            if (early := previous is not None and now <= previous) and not self.assumed:
                raise LineError(
                    f", column {self.columns.time!r}: time {now:.15g} does not come after "
                    f"{previous:.15g}"
                )
            gap = previous is not None and now - previous > LARGEST_GAP * step
            if self.columns.elapsed:
                control = [*control, step if previous is None or gap or early else now - previous]
            elif previous is not None and not gap:
                moves = max(1, moves_in(now - previous, step) - self.untimed[recording])
            self.clocks[recording], self.assumed, time = now, False, time or f"{now:.15g}"
            self.untimed[recording] = -1
        self.untimed[recording] += 1
        self.recording = recording
        return Row(
            self.observation(values[:q]),
            self.tensor([control]) if control else None,
            time,
            recording,
            self.clocks.get(recording),
            gap,
            self.acting.get(recording),
            moves=moves,
        )

    def observation(self, values: list[float]) -> Tensor | None:
        """Return the observation with angles as cosine and sine; None where it is missing."""
        if self.columns.missing:
            pairs = zip(values, self.codes, strict=True)
            values = [math.nan if value in codes else value for value, codes in pairs]
        if self.is_missing(map(math.isnan, values)):
            return None
        schema, obs = self.columns.column_schema, self.tensor([values])
        if not schema.sensors and all(part.kind == "number" for part in schema.observations):
            return obs
        try:
            found = schema.encode(obs, "observations")
        except ValueError as error:
            raise LineError(f": {error}") from None
        return None if self.is_missing(found.isnan().flatten().tolist()) else found

    def split_cells(self, text: str) -> list[str]:
        """Return the cells of a CSV line."""
        cells = text.split(self.delimiter)
        try:
            if '"' in text:
                cells = next(csv.reader([text], delimiter=self.delimiter))
        except csv.Error as error:
            raise LineError(f": this is no CSV: {error}") from None
        return [cell.strip() for cell in cells]


def readable(line: bytes) -> str | None:
    """Return the text of a line without spaces around it; None if it is too long."""
    if len(line) > MAX_LINE_BYTES:
        return None
    return line.decode("utf-8", errors="replace").lstrip("\ufeff").strip(" \r")


def read_json(text: str) -> Any:
    """Return the value of a JSON line.

    Raises:
        LineError: the line is no JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise LineError(f", column {error.colno}: this is no JSON: {error.msg}") from None
    except (ValueError, RecursionError):  # a number of thousands of digits, or brackets in brackets
        raise LineError(": this is no JSON of numbers") from None
