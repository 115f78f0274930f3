"""Data in memory, read as files are: DataFrames as tables, arrays and recordings as named arrays.

`contents_of` returns the same `Contents` for a DataFrame and for the CSV file that it was read
from, so that the rest of the library does not distinguish them.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kbf.data.files import arrays, tables
from kbf.data.files.layout import Contents, FileRecording, Layout, finished, normalised
from kbf.data.files.read import read_all
from kbf.data.files.timestamps import seconds_since_1970
from kbf.recording import Recording, mask_of

# Names in messages, where a file has its path, and of a single recording.
FRAME = Path("DataFrame")
ARRAYS = Path("data")


def contents_of(data: Any, layout: Layout, *, states: bool = True) -> Contents:
    """Returns the recordings of data in memory, or of files.

    Args:
        data: a DataFrame; a list or a dict (by name of the recording) of DataFrames; a `Recording`
            or a list of them; a dict of arrays as in an ``.npz`` file (`kbf.data.files.arrays`); a
            path, a pattern of paths (``runs/*.csv``), or a list of paths; or `Contents`, which are
            returned as they are.
        layout: roles of the columns or arrays.
        states: whether states are required.

    Returns:
        The recordings; `FileRecording.rows` are the rows of the input, from 0, of DataFrames, and
        line numbers of files.

    Raises:
        ValueError: data of another kind, empty, or as `kbf.data.files.read.read`.
    """
    if isinstance(data, Contents):
        return data
    if isinstance(data, str | os.PathLike):
        return read_all(data, layout, states=states)
    if is_frame(data):
        contents = frame_contents(as_pandas(data), layout, states)
    elif isinstance(data, Recording):
        contents = array_contents(arrays_of([data]), layout, states)
    elif isinstance(data, Mapping):
        if data and all(map(is_frame, data.values())):
            contents = frames_contents(
                {str(k): as_pandas(v) for k, v in data.items()}, layout, states
            )
        else:
            contents = array_contents(dict(data), layout, states)
    elif isinstance(data, list | tuple) and data:
        if all(isinstance(each, str | os.PathLike) for each in data):
            return read_all(data, layout, states=states)
        if all(map(is_frame, data)):
            named = {str(k): as_pandas(each) for k, each in enumerate(data)}
            contents = frames_contents(named, layout, states)
        elif all(isinstance(each, Recording) for each in data):
            contents = array_contents(arrays_of(data), layout, states)
        else:
            raise unknown(data)
    else:
        raise unknown(data)
    return finished(contents, layout)


def unknown(data: Any) -> ValueError:
    """Returns the error about data of an unknown kind."""
    kind = type(data).__name__
    if isinstance(data, list | tuple):
        kind = f"{kind} of {', '.join(sorted({type(each).__name__ for each in data})) or 'nothing'}"
    return ValueError(
        "data must be a DataFrame, recordings (kbf.Recording), a dict of arrays, paths of files, "
        f"or a list of one of these; got a {kind}. Arrays are given by observations=ARRAY"
    )


def is_frame(data: Any) -> bool:
    """Whether an object is a DataFrame of pandas, or of a library that converts to pandas."""
    return hasattr(data, "columns") and (hasattr(data, "iloc") or hasattr(data, "to_pandas"))


def as_pandas(frame: Any) -> Any:
    """Returns a DataFrame of pandas."""
    return frame if hasattr(frame, "iloc") else frame.to_pandas()


def frames_contents(frames: dict[str, Any], layout: Layout, states: bool) -> Contents:
    """Returns the recordings of several DataFrames, one or (by a column) more of each.

    Raises:
        ValueError: as `frame_contents`.
    """
    several, start = [], 0
    for name, frame in frames.items():
        contents = frame_contents(frame, layout, states)
        alone = len(contents.recordings) == 1
        recordings = [
            each._replace(name=name if alone else f"{name}/{each.name}", rows=shifted(each, start))
            for each in contents.recordings
        ]
        several.append(contents._replace(recordings=recordings))
        start += len(frame)
    joined = [recording for each in several for recording in each.recordings]
    return several[0]._replace(recordings=joined)


def shifted(recording: FileRecording, start: int) -> Tensor:
    """Returns the rows of a recording in all DataFrames together."""
    assert recording.rows is not None
    return recording.rows + start


def frame_contents(frame: Any, layout: Layout, states: bool) -> Contents:
    """Returns the recordings of one DataFrame.

    A DatetimeIndex or TimedeltaIndex is the time if ``layout.time`` is None. Levels of the index
    may be named as columns.

    Raises:
        ValueError: an empty DataFrame, columns that are missing or not numeric, or times that
            decrease without ``layout.recording``.
    """
    frame, layout = with_index(frame, layout)
    header = [normalised(name) for name in frame.columns]
    frame = frame.set_axis(header, axis=1)
    if not len(frame):
        raise ValueError(f"{FRAME}: there are no rows")
    if repeated := sorted({name for name in header if header.count(name) > 1}):
        raise ValueError(f"{FRAME}: two columns are called {repeated[0]!r}")
    sides = tables.sides_of(FRAME, header, layout, states)
    numbers, words = tables.named_columns(FRAME, header, layout, sides)
    for name in numbers:
        if frame[name].dtype.kind in "mM":
            first = frame[name].iloc[0]
            raise ValueError(
                f"{FRAME}, column {name}: it holds dates, not numbers (row 0: {first})"
            )
    columns = {name: numeric(frame[name], name) for name in numbers}
    if (name := layout.time_name()) is not None:
        columns[name] = frame_times(frame, layout, name)
    texts = {
        name: ["" if v is None or v != v else str(v).strip() for v in frame[name]] for name in words
    }
    table = tables.Table(columns, texts, torch.arange(len(frame)))
    if name is not None and layout.recording is None and not layout.sort_by_time:
        check_forwards(frame, header, layout, columns[name])
    contents = tables.recordings_of(FRAME, layout, sides, table)
    if not layout.recording:
        return contents._replace(
            recordings=[each._replace(name=str(ARRAYS)) for each in contents.recordings]
        )
    return contents


def with_index(frame: Any, layout: Layout) -> tuple[Any, Layout]:
    """Returns a DataFrame whose named index levels are columns, and the layout with its time.

    A DatetimeIndex or TimedeltaIndex is the time unless a column has the name of the time.
    """
    import pandas as pd

    kinds = pd.DatetimeIndex | pd.TimedeltaIndex
    index = frame.index
    levels = [index.get_level_values(k) for k in range(index.nlevels)]
    names = [level.name for level in levels]
    if not layout.time_columns() or not {*layout.time_columns()} <= {*names, *frame.columns}:
        for k, level in enumerate(levels):
            if isinstance(level, kinds):
                names[k] = layout.time_name() or str(level.name or "time")
                layout = layout._replace(time=names[k])
                break
    wanted = [k for k, name in enumerate(names) if name is not None and name not in frame.columns]
    if not wanted:
        return frame, layout
    added = pd.DataFrame({names[k]: levels[k] for k in wanted}, index=frame.index)
    return pd.concat([frame, added], axis=1), layout


def numeric(column: Any, name: str) -> Tensor:
    """Returns a column as ``T`` float64: times in seconds, NaN where values are missing.

    Raises:
        ValueError: entries that are not numbers, or infinite; with the row.
    """
    import pandas as pd

    kind = column.dtype.kind if isinstance(column.dtype, np.dtype) else ""
    if isinstance(column.dtype, pd.DatetimeTZDtype) or kind == "M":
        since = column.dt.tz_convert("UTC").dt.tz_localize(None) if not kind else column
        values = seconds_since_1970(since.to_numpy())
    elif kind == "m":
        values = column.dt.total_seconds().to_numpy("float64", na_value=np.nan)
    elif kind == "c":
        raise ValueError(f"{FRAME}, column {name}: it holds complex numbers")
    else:
        as_numbers: Any = pd.to_numeric(column, errors="coerce")
        wrong = (as_numbers.isna() & column.notna()).to_numpy()
        if wrong.any():
            row = int(wrong.argmax())
            raise ValueError(
                f"{FRAME}, row {row}, column {name}: {column.iloc[row]!r} is no number"
            )
        values = as_numbers.to_numpy("float64", na_value=np.nan)
    if np.isinf(values).any():
        row = int(np.isinf(values).argmax())
        raise ValueError(f"{FRAME}, row {row}, column {name}: not a finite number")
    return torch.from_numpy(np.array(values, dtype="float64"))


def frame_times(frame: Any, layout: Layout, name: str) -> Tensor:
    """Returns the time of a DataFrame in seconds, of texts as in files (`texts.times_of`).

    Raises:
        ValueError: as `numeric` and `times_of`.
    """
    from kbf.data.files.texts import times_of

    parts = [frame[column] for column in layout.time_columns()]
    parts = [typed(parts[0])] if len(parts) == 1 else parts
    as_texts = parts[0].dtype == object or parts[0].dtype.name in ("str", "string")
    if len(parts) == 1 and not as_texts and layout.date_format is None:
        return numeric(parts[0], name)
    return times_of(parts, name, np.arange(len(frame)), layout, FRAME)


def typed(column: Any) -> Any:
    """Returns a column of Python objects as one of dates, durations or numbers, if it holds these.

    Dates without a time zone are in UTC.
    """
    import pandas as pd

    if column.dtype != object:
        return column
    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind in ("datetime", "datetime64", "date"):
        return pd.to_datetime(column, utc=True)
    return column.infer_objects()


def check_forwards(frame: Any, header: list[str], layout: Layout, times: Tensor) -> None:
    """Raises a ValueError where times decrease; it names a column that distinguishes recordings.

    Such a column is constant between the steps at which the time decreases.
    """
    back = (times.diff() < 0).nonzero().flatten() + 1
    if not len(back):
        return
    pieces = np.searchsorted(back.numpy(), np.arange(len(times)), side="right")
    candidates = [
        name
        for name in header
        if name not in layout.time_columns()
        and (frame[name].groupby(pieces).nunique(dropna=False) == 1).all()
        and frame[name].nunique() > 1
    ]
    advice = f"recording={candidates[0]!r} names them" if candidates else "sort the rows by time"
    raise ValueError(
        f"{FRAME}, row {int(back[0])}: the time decreases, so these are several recordings or rows "
        f"in disorder: {advice}"
    )


def arrays_of(recordings: Any) -> dict[str, Any]:
    """Returns recordings as named arrays, such as ``states_0``.

    Raises:
        ValueError: a batch of recordings.
    """
    found = {}
    for k, each in enumerate(recordings):
        if each.states.ndim != 2:
            raise ValueError(
                f"recording {k}: its states must be (T, d), got {tuple(each.states.shape)}"
            )
        for name, leaf in each._asdict().items():
            if leaf is not None:
                found[f"{name}_{k}"] = leaf
    return found


def named_arrays(**roles: Any) -> dict[str, Any]:
    """Returns arrays by role, or lists of arrays (one a recording), as named arrays."""
    found: dict[str, Any] = {}
    for role, values in roles.items():
        if values is None:
            continue
        if isinstance(values, list | tuple) and any(np.ndim(as_numpy(each)) for each in values):
            found |= {f"{role}_{k}": each for k, each in enumerate(values)}
        else:
            found[role] = values
    return found


def array_contents(named: dict[str, Any], layout: Layout, states: bool) -> Contents:
    """Returns the recordings of named arrays."""
    values = {name: as_numpy(each) for name, each in named.items()}
    for name in values:
        if name.startswith("mask"):
            mask_of(values[name])  # raises an error for numbers other than 0 and 1
    if not values or not all(each.size for each in values.values()):
        empty = next((name for name, each in values.items() if not each.size), None)
        raise ValueError(f"the array {empty} is empty" if empty else "there are no arrays")
    contents = arrays.recordings_by_name(ARRAYS, layout, list(values), values.__getitem__, states)
    start, recordings = 0, []
    for each in contents.recordings:
        recordings.append(each._replace(rows=torch.arange(start, start + len(each.obs))))
        start += len(each.obs)
    return contents._replace(recordings=recordings)


def as_numpy(values: Any) -> np.ndarray:
    """Returns an array-like as a NumPy array; masked entries are NaN."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if isinstance(values, np.ma.MaskedArray):
        numbers: Any = values.astype("float64")
        return numbers.filled(np.nan)
    return np.asarray(values)


def numbers_of(recordings: list[FileRecording]) -> list[Tensor]:
    """Return for each recording the numbers of its rows in the data, from 0."""
    numbers, start = [], 0
    for each in recordings:
        in_memory = each.file in (str(FRAME), str(ARRAYS)) and each.rows is not None
        numbers.append(each.rows if in_memory else torch.arange(start, start + len(each.obs)))
        start += len(each.obs)
    return numbers
