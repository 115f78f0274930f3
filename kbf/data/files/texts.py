"""Reads texts of tables with pandas: their delimiter, decimal mark, encoding and line numbers."""

import csv
import gzip
import io
import math
import re
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.layout import MAX_BYTES, check_bytes
from kbf.data.files.timestamps import seconds_since_1970

# Contents of a cell, in lower case, that represent a missing value.
EMPTY_CELLS = {"", "nan", "na", "n/a", "null", "none"}

# Their usual spellings.
SPELLINGS = (str.lower, str.upper, str.capitalize, lambda cell: cell.replace("nan", "NaN"))

# A number with a decimal comma.
DECIMAL_COMMA = re.compile(r"-?\d+,\d+")

# Bytes of the beginning of a text that show how it is written.
BYTES_OF_DIALECT = 2**18


class Table(NamedTuple):
    """Selected columns: numbers ``T`` float64 (NaN if empty), texts, and row numbers."""

    numbers: dict[str, Tensor]
    words: dict[str, list[str]]
    rows: Tensor


def text_of(path: Path, encoding: str | None = None, most: int | None = None) -> str:
    """Returns the text of a file, which may be compressed; or the whole lines of its beginning.

    Args:
        path: of a text, or of one in a ``.gz``, or alone in a ``.zip``.
        encoding: of the text; None for UTF-8.
        most: bytes that are read; None for all.

    Raises:
        ValueError: damaged, too large, or not text in this encoding.
    """
    try:
        with opened(path) as file:
            content = file.read(most or MAX_BYTES + 1)
        check_bytes(len(content), path)
        if len(content) == most:
            content = content[: content.rfind(b"\n") + 1] or content
        text = content.decode(encoding or "utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path} is not text in {encoding or 'UTF-8'}: {error.reason} at byte {error.start}; "
            "save it as UTF-8, or name its encoding, as in data.text_encoding=latin-1"
        ) from error
    except LookupError as error:
        raise ValueError(f"data.text_encoding: there is no encoding {encoding!r}") from error
    except (EOFError, BadZipFile, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    return text if "\n" in text else text.replace("\r", "\n")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a file, or the only one in an archive.

    Raises:
        ValueError: an archive of several files.
    """
    if path.suffix.lower() == ".zip":
        with ZipFile(path) as archive:
            if len(names := archive.namelist()) != 1:
                raise ValueError(f"{path} holds {len(names)} files; a table is one file")
            with archive.open(names[0]) as file:
                yield file
    else:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as file:
            yield file


class Dialect(NamedTuple):
    """How a text is written.

    Attributes:
        header: names of the columns. width: number of cells of each line; unnamed columns at the
            end hold nothing. lines: that the header takes, with blank lines before it.
        delimiter: comma, semicolon or tab. decimal: point or comma.
    """

    header: list[str]
    width: int
    lines: int
    delimiter: str
    decimal: str


def dialect_of(path: Path, encoding: str | None = None) -> Dialect:
    """Returns the dialect of a text from its first lines.

    The delimiter is the most frequent of comma, semicolon and tab in the first line. The decimal
    mark is a comma if that is not the delimiter and there are numbers with it.

    Raises:
        ValueError: as `text_of`, or the header is no CSV.
    """
    text = text_of(path, encoding, BYTES_OF_DIALECT)
    first = next((line for line in text.splitlines() if line.strip()), "")
    delimiter = max(",;\t", key=first.count)
    reader = csv.reader(io.StringIO(text), delimiter=delimiter, strict=True)
    try:
        header = next((cells for cells in reader if any(cells)), [])
    except csv.Error as error:
        raise ValueError(f"{path}, row {reader.line_num}: this is not CSV: {error}") from error
    names = [name.strip() for name in header]
    while names and not names[-1].strip(",; "):
        names.pop()
    cells = [cell.strip() for line in text.splitlines() for cell in line.split(delimiter)]
    commas = delimiter != "," and any(DECIMAL_COMMA.fullmatch(cell) for cell in cells)
    return Dialect(names, len(header), reader.line_num, delimiter, "," if commas else ".")


def rows_of(text: str, dialect: Dialect, path: Path) -> np.ndarray:
    """Returns the line numbers of the rows below the header, without blank lines.

    Raises:
        ValueError: a line with another number of cells than the header, or that is no CSV.
    """
    if '"' in text:
        counts, at = [], []
        reader = csv.reader(io.StringIO(text), delimiter=dialect.delimiter, strict=True)
        done = 0
        try:
            for cells in reader:
                if len(cells) > 1 or (cells and (cells[0] == "" or cells[0].strip(" "))):
                    counts.append(len(cells))
                    at.append(reader.line_num)
                done = reader.line_num
        except csv.Error as error:
            raise ValueError(f"{path}, row {done + 1}: this is not CSV: {error}") from error
        lines, cells = np.array(at[1:], dtype="int64"), np.array(counts[1:], dtype="int64")
    else:
        raw = np.frombuffer(text.encode(), dtype=np.uint8)
        ends = np.append(np.flatnonzero(raw == ord("\n")), len(raw))
        marks = np.diff(
            np.searchsorted(np.flatnonzero(raw == ord(dialect.delimiter)), ends), prepend=0
        )
        filled = marks > 0
        for k in np.flatnonzero(~filled).tolist():  # blank, or the only cell of a column
            filled[k] = bool(raw[ends[k - 1] + 1 if k else 0 : ends[k]].tobytes().strip())
        filled[: dialect.lines] = False
        lines, cells = np.flatnonzero(filled) + 1, marks[filled] + 1
    if (wrong := cells != dialect.width).any():
        k = int(wrong.argmax())
        raise ValueError(
            f"{path}, row {lines[k]}: {cells[k]} cells, the header has {dialect.width}"
        )
    return lines


def read_csv(
    path: Path,
    numbers: list[str],
    words: list[str],
    time: str | None,
    encoding: str | None = None,
) -> Table:
    """Reads selected columns of a CSV file with pandas; see `dialect_of`.

    Raises:
        ValueError: a line that does not fit the header, or a cell that is no number, with its row
            and column.
    """
    import pandas as pd

    dialect, text = dialect_of(path, encoding), text_of(path, encoding)
    rows = rows_of(text, dialect, path)
    if not len(rows):
        raise ValueError(f"{path}: there is no row below the header")
    times = [time] if time else []
    places = {name: dialect.header.index(name) for name in [*numbers, *words, *times]}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The 'float_precision' argument")  # for pandas < 3.1
        frame = pd.read_csv(
            io.BytesIO(text.encode()),
            sep=dialect.delimiter,
            decimal=dialect.decimal,
            header=None,
            skiprows=dialect.lines,
            names=list(range(dialect.width)),
            index_col=False,
            usecols=sorted(places.values()) or [0],
            dtype={places[name]: str for name in words},
            keep_default_na=False,
            na_values=sorted({spell(cell) for cell in EMPTY_CELLS for spell in SPELLINGS}),
            skipinitialspace=True,
            float_precision="round_trip",
            low_memory=False,
        )
    assert len(frame) == len(rows), f"{path}: {len(frame)} rows in {len(rows)} lines"
    columns = {
        name: values_of(frame[places[name]], name, rows, dialect.decimal, path, name == time)
        for name in [*numbers, *times]
    }
    texts = {name: frame[places[name]].fillna("").str.strip().tolist() for name in words}
    return Table(columns, texts, torch.from_numpy(rows))


def values_of(
    column: Any, name: str, rows: np.ndarray, decimal: str, path: Path, is_time: bool
) -> Tensor:
    """Returns a column of a text as float64; of times, dates in seconds.

    Raises:
        ValueError: a cell that is no number, or infinite.
    """
    import pandas as pd

    values = None
    if column.dtype.kind in "iuf":
        values = column.to_numpy("float64")
    elif is_time and column.dtype.kind != "b":
        with suppress(ValueError):
            dates = pd.to_datetime(column.str.strip(), format="ISO8601", utc=True)
            values = seconds_since_1970(dates.dt.tz_localize(None).to_numpy())
    if values is None:  # a cell is no number, or a missing one is spelled in another way
        read = seconds if is_time else number
        found = [read(cell.strip()) if isinstance(cell, str) else cell for cell in column]
        for k, (value, cell) in enumerate(zip(found, column, strict=True)):
            if value is None or isinstance(value, bool):
                problem = f"{str(cell).strip()!r} is no number"
                if decimal == "." and number(str(cell).strip().replace(",", ".")) is not None:
                    problem += ": decimals need a point"
                raise ValueError(f"{path}, row {rows[k]}, column {name}: {problem}")
        values = np.array(found, dtype="float64")
    if np.isinf(values).any():
        k = int(np.isinf(values).argmax())
        raise ValueError(f"{path}, row {rows[k]}, column {name}: '{values[k]}' is no finite number")
    return torch.from_numpy(np.array(values))


def number(cell: str) -> float | None:
    """Returns the number in a cell, NaN for an empty cell, None for any other text."""
    try:
        return float("not a number" if "_" in cell else cell)  # Python reads 1_0 as 10
    except ValueError:
        return math.nan if cell.lower() in EMPTY_CELLS else None


def seconds(cell: str) -> float | None:
    """Returns a time in seconds: a number, or the seconds since 1970 of an ISO 8601 date.

    A date without a time zone is UTC; None is returned for any other text.
    """
    if (value := number(cell)) is not None:
        return value
    try:
        date = datetime.fromisoformat(cell)
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
