"""Reads texts of tables with pandas, and converts their cells to numbers and times."""

import io
import math
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.dialect import EMPTY_CELLS, GROUPED, dialect_of, rows_of, text_of
from kbf.data.files.layout import Layout
from kbf.data.files.timestamps import seconds_since_1970

# Their usual spellings.
SPELLINGS = (str.lower, str.upper, str.capitalize, lambda cell: cell.replace("nan", "NaN"))


class Table(NamedTuple):
    """Selected columns: numbers ``T`` float64 (NaN if empty), texts, and row numbers."""

    numbers: dict[str, Tensor]
    words: dict[str, list[str]]
    rows: Tensor


def read_csv(path: Path, numbers: list[str], words: list[str], layout: Layout) -> Table:
    """Reads selected columns of a CSV file with pandas; see `dialect_of`.

    Raises:
        ValueError: a line that does not fit the header, or a cell that is no number, with its row
            and column.
    """
    import pandas as pd

    dialect, content = dialect_of(path, layout), text_of(path, layout).encode()
    rows, width = rows_of(content, dialect, path)
    if not len(rows):
        raise ValueError(f"{path}: there is no row below the header")
    for name in numbers:
        if (cell := dialect.doubtful.get(name)) is not None:
            mark = "," if "," in cell else "."
            raise ValueError(
                f"{path}, column {name}: {cell} may be a thousand or a decimal: set "
                f"data.thousands='{mark}' or data.decimal='{mark}'"
            )
    times = layout.time_columns()
    named = dict.fromkeys([*numbers, *words, *times])
    places = {name: dialect.header.index(name) for name in named}
    dated = times if len(times) > 1 or layout.date_format else []
    unnamed = list(range(dialect.width, width))
    texts: Any = dict.fromkeys([*(places[name] for name in [*words, *dated]), *unnamed], str)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The 'float_precision' argument")  # for pandas < 3.1
        # Parts of a large column may have other types; `values_of` and `times_of` take both.
        warnings.simplefilter("ignore", pd.errors.DtypeWarning)
        frame = pd.read_csv(
            io.BytesIO(content),
            sep=dialect.delimiter,
            decimal=dialect.decimal,
            thousands=layout.thousands,
            header=None,
            skiprows=dialect.lines,
            names=list(range(width)),
            index_col=False,
            usecols=[*sorted({*places.values()}), *unnamed] or [0],
            dtype=texts,
            keep_default_na=False,
            na_values=sorted({spell(cell) for cell in EMPTY_CELLS for spell in SPELLINGS}),
            skipinitialspace=True,
            float_precision="round_trip",
        )
    assert len(frame) == len(rows), f"{path}: {len(frame)} rows in {len(rows)} lines"
    for k in unnamed:
        if (cells := frame[k].notna().to_numpy()).any():
            row = rows[int(cells.argmax())]
            raise ValueError(f"{path}, row {row}: {width} cells, the header has {dialect.width}")
    columns = {
        name: values_of(frame[places[name]], name, rows, (dialect.decimal, layout.thousands), path)
        for name in numbers
    }
    if (name := layout.time_name()) is not None:
        parts = [frame[places[part]] for part in times]
        columns[name] = times_of(parts, name, rows, layout, path, dialect.decimal)
    found = {name: frame[places[name]].fillna("").str.strip().tolist() for name in words}
    return Table(columns, found, torch.from_numpy(rows))


def times_of(
    parts: list[Any],
    name: str,
    rows: np.ndarray,
    layout: Layout,
    path: Path,
    decimal: str = ".",
) -> Tensor:
    """Returns the time of rows in seconds; dates without a time zone are in UTC.

    Args:
        parts: columns that together are the time, joined by spaces.
        name: of the time. rows: their numbers, for messages.
        layout: format of dates. decimal: mark of numbers.

    Raises:
        ValueError: a time that is no number and no date in this format.
    """
    import pandas as pd

    column = parts[0]
    if len(parts) > 1:
        texts = [part.astype("str").str.strip() for part in parts]
        known = pd.concat([part.notna() for part in parts], axis=1).all(axis=1)
        column = texts[0].str.cat(texts[1:], sep=" ").where(known)
    elif column.dtype.kind in "iufbM":
        if layout.date_format is None:
            return values_of(column, name, rows, (decimal, None), path, number)
        column = column.astype("str").where(column.notna())
    with suppress(ValueError):
        dates = pd.to_datetime(column.str.strip(), format=layout.date_format or "ISO8601", utc=True)
        return torch.from_numpy(seconds_since_1970(dates.dt.tz_localize(None).to_numpy()))
    if layout.date_format is None:
        try:
            return values_of(column, name, rows, (decimal, None), path, seconds)
        except ValueError as error:
            raise ValueError(
                f"{error} and no date in ISO 8601: data.date_format={format_like(column)!r} "
                "declares another format"
            ) from error
    found = pd.to_datetime(column.str.strip(), format=layout.date_format, utc=True, errors="coerce")
    k = int((found.isna() & column.notna()).to_numpy().argmax())
    raise ValueError(
        f"{path}, row {rows[k]}, column {name}: {str(column.iloc[k]).strip()!r} is no date in "
        f"the format {layout.date_format!r}"
    )


def format_like(column: Any) -> str:
    """Return a date format with the separators of the first text, for messages.

    The usual format if the text has letters or too few numbers.

    >>> import pandas as pd
    >>> format_like(pd.Series(["10/03/2004 18.00.00"]))
    '%d/%m/%Y %H.%M.%S'
    >>> format_like(pd.Series(["10 March 2004"]))
    '%d/%m/%Y %H:%M:%S'
    """
    text = str(column.dropna().iloc[0]).strip()
    if re.search(r"[^\W\d]", text) or len(re.findall(r"\d+", text)) < 3:
        return "%d/%m/%Y %H:%M:%S"
    codes = iter("YmdHMS" if re.match(r"\d{4}", text) else "dmYHMS")
    return re.sub(r"\d+", lambda match: "%" + next(codes, "f"), text)


def values_of(
    column: Any,
    name: str,
    rows: np.ndarray,
    marks: tuple[str, str | None],
    path: Path,
    read: Callable[[str], float | None] | None = None,
) -> Tensor:
    """Returns a column of a text as float64.

    Args:
        column, name: of a DataFrame. rows: their numbers, for messages.
        marks: of decimals and thousands.
        path: for messages. read: returns the number in a cell; None for `number_or_truth`.

    Raises:
        ValueError: a cell that is no number, or infinite.
    """
    if column.dtype.kind in "iuf":
        values = column.to_numpy("float64")
    else:  # a cell is no number, or a missing one is spelled in another way
        decimal, thousands = marks
        read = read or number_or_truth
        found = []
        for k, cell in enumerate(column):
            written = isinstance(cell, str | bool | np.bool_)
            text = str(cell).strip() if written else ""
            plain = text.replace(thousands, "") if thousands else text
            plain = plain.replace(",", ".") if decimal == "," else plain
            value = read(plain) if written else cell
            if value is None:
                problem = f"{str(cell).strip()!r} is no number"
                if GROUPED.fullmatch(text) and not thousands:
                    mark = next(sign for sign in text if sign in ",.")
                    problem += f"; data.thousands='{mark}' declares a mark of thousands"
                elif decimal == "." and number(text.replace(",", ".")) is not None:
                    problem += ": decimals need a point, or data.decimal=','"
                elif k == 0 and len(column) > 1 and number(str(column.iloc[1])) is not None:
                    problem += "; data.units_row=true leaves out a row of units"
                raise ValueError(f"{path}, row {rows[k]}, column {name}: {problem}")
            found.append(value)
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


def number_or_truth(cell: str) -> float | None:
    """Returns the number in a cell as `number`; 1 for True and 0 for False."""
    truth = {"true": 1.0, "false": 0.0}.get(cell.lower())
    return number(cell) if truth is None else truth


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
