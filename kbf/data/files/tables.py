"""Reads tables (CSV by pandas, Parquet by pyarrow): one row a step, named columns."""

import fnmatch
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.dialect import dialect_of
from kbf.data.files.layout import (
    Contents,
    FileRecording,
    Layout,
    by_recording,
    is_pattern,
    normalised,
    own_package,
)
from kbf.data.files.texts import Table, number, read_csv, times_of
from kbf.runtime.errors import nearest

# Types of the columns of a Parquet file that are read as numbers, as pyarrow calls them.
NUMERIC_KINDS = ("integer", "floating", "boolean", "decimal")


def read(path: Path, layout: Layout, *, states: bool = True) -> Contents:
    """Reads the recordings of a table.

    Raises:
        ValueError: columns that are not given or missing, or a cell that is not a number, with its
            row and column.
    """
    sides = sides_of(path, header_of(path, layout), layout, states)
    return recordings_of(path, layout, sides, read_table(path, layout, sides))


def sides_of(path: Path, header: list[str], layout: Layout, states: bool) -> dict[str, Any]:
    """Returns the columns of states, observations and controls, without patterns.

    Raises:
        ValueError: columns that are not given, or a pattern without a matching column.
    """
    sides = {
        "states": layout.states if states else [],
        "observations": [] if layout.images else layout.observations,
        "controls": layout.controls or [],
    }
    roles = [*layout.time_columns(), layout.recording, layout.mask, layout.images]
    roles += [name for names in sides.values() if isinstance(names, list) for name in names]
    sides = {
        side: matching(path, header, names, roles) if isinstance(names, list) else names
        for side, names in sides.items()
    }
    for side, names in sides.items():
        if not isinstance(names, list) or (
            not names and side != "controls" and (side != "states" or states) and not layout.images
        ):
            raise ValueError(
                f"{path}: data.{side}=[...] must name the columns of the {side}; "
                f"it has {', '.join(header)}"
            )
    return sides


def matching(
    path: Path, header: list[str], names: list[str], roles: Sequence[str | None] = ()
) -> list[str]:
    """Replaces patterns by the columns that match them, in the order of the file.

    Columns that are named among ``roles`` do not match a pattern.

    >>> matching(Path("a.csv"), ["x", "cell_1", "cell_2"], ["cell_*", "x"])
    ['cell_1', 'cell_2', 'x']
    >>> matching(Path("a.csv"), ["x", "y", "time"], ["*"], ["x", "time"])
    ['y']

    Raises:
        ValueError: a pattern without a matching column.
    """
    found: list[str] = []
    for name in names:
        pattern = is_pattern(name) and name not in header
        alike = [name]
        if pattern:
            literal = name.replace("[", "[[]")  # brackets are part of names, as in acc[x]
            alike = [each for each in fnmatch.filter(header, literal) if each not in roles]
        if not alike:
            raise ValueError(f"{path}: no column matches {name!r}; it has {', '.join(header)}")
        found += [each for each in alike if not (pattern and each in found)]
    return found


def read_table(path: Path, layout: Layout, sides: dict[str, Any]) -> Table:
    """Reads the columns that the layout names."""
    header = header_of(path, layout)
    numbers, words = named_columns(path, header, layout, sides)
    if is_parquet(path):
        return read_parquet(path, numbers, words, layout)
    return read_csv(path, numbers, words, layout)


def named_columns(
    path: Path, header: list[str], layout: Layout, sides: dict[str, Any]
) -> tuple[list[str], list[str]]:
    """Returns the columns of numbers, without the time, and those of texts.

    Raises:
        ValueError: a column that the header does not have.
    """
    # a column may have two roles, such as state and observation
    named = dict.fromkeys([*(name for names in sides.values() for name in names), layout.mask])
    words = [name for name in (layout.recording, layout.images) if name]
    times = layout.time_columns()
    check_columns(path, header, [*(name for name in named if name), *times, *words])
    return [name for name in named if name and [name] != times], words


def recordings_of(
    path: Path,
    layout: Layout,
    sides: dict[str, Any],
    table: Table,
    images: Tensor | None = None,
    folder: Path | None = None,
) -> Contents:
    """Returns the recordings of a table, with ``images`` or those named in it."""
    seen = None
    if images is not None:
        obs = images
    elif layout.images:
        from kbf.data.files.image_io import named_images

        obs, seen = named_images(
            Path(layout.root).expanduser() if layout.root else folder or path.parent,
            table.words[layout.images],
            layout.size,
            str(path),
            table.rows,
            outside=layout.images_outside,
        )
    else:
        obs = stacked(table, sides["observations"])
    if layout.mask:
        observed = mask_of_column(table, layout.mask, path)
        seen = observed if seen is None else observed & seen
    whole = FileRecording(
        path.stem,
        obs,
        stacked(table, sides["states"]) if sides["states"] else None,
        seen,
        table.numbers[name] if (name := layout.time_name()) else None,
        stacked(table, sides["controls"]) if sides["controls"] else None,
        str(path),
        table.rows,
    )
    recordings = by_recording(whole, table.words[layout.recording]) if layout.recording else [whole]
    return Contents(
        recordings, list(sides["states"]), list(sides["observations"]), list(sides["controls"])
    )


def mask_of_column(table: Table, name: str, path: Path) -> Tensor:
    """Returns the mask ``T`` of a column; an empty cell is False.

    Raises:
        ValueError: a number other than 0 and 1.
    """
    values = table.numbers[name].nan_to_num(0)
    if bool((wrong := (values != 0) & (values != 1)).any()):
        k = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"{path}, row {int(table.rows[k])}, column {name}: a mask is 0 or 1, got "
            f"{float(values[k]):g}"
        )
    return values != 0


def stacked(table: Table, names: list[str]) -> Tensor:
    """Stacks columns to ``T c``."""
    return torch.stack([table.numbers[name] for name in names], 1)


def is_parquet(path: Path) -> bool:
    """Whether a file is Parquet, by the ending of its name."""
    return path.suffix.lower() in (".parquet", ".pq")


def header_of(path: Path, layout: Layout) -> list[str]:
    """Returns the names of a table's columns.

    Raises:
        ValueError: no header, or a repeated name.
    """
    if is_parquet(path):
        header = [normalised(name) for name in opened_parquet(path).schema_arrow.names]
    else:
        header = dialect_of(path, layout).header
    if not header or all(number(cell.replace(",", ".")) is not None for cell in header):
        raise ValueError(
            f"{path}: the first line must name the columns, got "
            f"{', '.join(header[:5]) or 'nothing'}; data.header=false names them c1, c2, ..."
        )
    if repeated := [name for name, count in Counter(header).items() if name and count > 1]:
        raise ValueError(f"{path}: two columns are called {repeated[0]!r}")
    return header


def check_columns(path: Path, header: list[str], wanted: list[str]) -> None:
    """Raises a ValueError that names the first missing column and the most similar name."""
    for name in wanted:
        if name not in header:
            hint = nearest(name, header, "")
            hint = f"; {hint}" if hint.endswith("?") else ""
            a_text = path.suffix.lower() not in ("", ".parquet", ".pq")  # none: a DataFrame
            if not hint and a_text and not set(wanted) & set(header):
                hint = "; data.skip_lines=2 or data.comment='#' leaves out lines before the header"
            raise ValueError(
                f"{path}: there is no column {name!r}; it has {', '.join(header)}{hint}"
            )


def opened_parquet(path: Path) -> Any:
    """Opens a Parquet file.

    Raises:
        ValueError: damaged, or not Parquet.
    """
    parquet = own_package("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except Exception as error:  # pyarrow's own classes, and OSError for some damage
        raise ValueError(
            f"{path} is no Parquet file, or damaged: {str(error).splitlines()[0]}"
        ) from error


def read_parquet(path: Path, numbers: list[str], words: list[str], layout: Layout) -> Table:
    """Reads selected columns of a Parquet file; rows are counted from 1."""
    arrow, file = own_package("pyarrow", path), opened_parquet(path)
    times = layout.time_columns()
    named = list(dict.fromkeys([*numbers, *times]))
    stored = {normalised(name): name for name in file.schema_arrow.names}
    wanted = list(dict.fromkeys([*named, *words]))
    try:
        table = file.read(columns=[stored[name] for name in wanted])
    except Exception as error:
        raise ValueError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    if not table.num_rows:
        raise ValueError(f"{path}: there are no rows")
    table = table.rename_columns([normalised(name) for name in table.column_names])
    columns, rows = {}, np.arange(1, table.num_rows + 1)
    texts_of_times = len(times) > 1 or any(is_text(arrow, table[name].type) for name in times)
    if texts_of_times:
        parts = [table[name].to_pandas() for name in times]
        columns[layout.time_name()] = times_of(parts, str(layout.time_name()), rows, layout, path)
    for name in numbers if texts_of_times else named:
        column = table[name]
        if name in times and arrow.types.is_timestamp(column.type):
            since = (
                column.cast(arrow.timestamp("us"), safe=False)
                .cast(arrow.int64())
                .cast(arrow.float64(), safe=False)
            )
            column = own_package("pyarrow.compute", path).divide(since, 1e6)
        elif not any(getattr(arrow.types, f"is_{kind}")(column.type) for kind in NUMERIC_KINDS):
            raise ValueError(
                f"{path}, column {name}: it holds {column.type}, not numbers "
                f"(row 1: {column[0].as_py()!r})"
            )
        values = torch.tensor(
            column.cast(arrow.float64(), safe=False).to_numpy(), dtype=torch.float64
        )
        if bool(values.isinf().any()):
            raise ValueError(
                f"{path}, row {int(values.isinf().nonzero()[0, 0]) + 1}, column {name}: "
                "not a finite number"
            )
        columns[name] = values
    texts = {name: ["" if v is None else str(v) for v in table[name].to_pylist()] for name in words}
    return Table(columns, texts, torch.arange(1, table.num_rows + 1))


def is_text(arrow: Any, kind: Any) -> bool:
    """Whether a column of Parquet holds texts."""
    return arrow.types.is_string(kind) or arrow.types.is_large_string(kind)
