"""Data for a fitted filter: the columns of the training, found by name in data of any kind."""

import re
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.in_memory import contents_of, is_frame, named_arrays, numbers_of
from kbf.data.files.layout import Contents, Layout, Observations, layout_of
from kbf.data.files.read import (
    ARRAYS,
    in_schema_order,
    kind_of,
    observations_of,
    trained_layout,
)
from kbf.data.files.timestamps import LARGEST_GAP, moves_in
from kbf.fitted.python_words import in_python
from kbf.fitted.results import Source
from kbf.recording import Recording
from kbf.runtime.errors import DataError, DataWarning

# The row of steps that were inserted: none.
NO_ROW = -1

# What `pieces_at_gaps` appends to the names of recordings.
PIECE = re.compile(r"\[\d+:\d+\]$")


class End(NamedTuple):
    """What the rows after a recording require of its last row.

    Attributes:
        time: in seconds, or None. controls: ``k`` numbers, as they were logged, or None.
    """

    time: float | None
    controls: Sequence[float] | None


class Inputs(NamedTuple):
    """Recordings, cut at gaps in time, and where their rows come from.

    Attributes:
        pieces: in the components that filters use.
        rows: of each piece, the rows of the input; `NO_ROW` for inserted steps.
        source: of all rows, in the order of the input.
        end: of the last recording.
    """

    pieces: list[Observations]
    rows: list[Tensor]
    source: Source
    end: End


def inputs_of(
    settings: dict[str, Any],
    data: Any,
    *,
    observations: Any = None,
    controls: Any = None,
    mask: Any = None,
    states: bool = False,
) -> Inputs:
    """Return the recordings of data, or of arrays.

    Args:
        settings: the ``data`` part of the filter's configuration, with ``column_schema``.
        data, observations, controls, mask: as of `FittedFilter.filter`.
        states: whether states are required.

    Raises:
        DataError: data that does not fit the columns of the training.
    """
    if (data is None) == (observations is None):
        raise DataError("give either data or observations=ARRAY")
    if data is None:
        data = named_arrays(observations=observations, controls=controls, mask=mask)
    elif controls is not None or mask is not None:
        raise DataError("controls and mask go with observations; data names its columns")
    index = data.index if is_frame(data) and hasattr(data, "iloc") else None
    contents = read_for(settings, data, states=states)
    with in_python():
        pieces = observations_of(contents, settings)
    # Pieces are the recordings in their order, cut at gaps, with inserted steps.
    numbers = torch.cat(numbers_of(contents.recordings))
    kept = [
        torch.ones(len(piece.obs), dtype=torch.bool) if piece.inserted is None else ~piece.inserted
        for piece in pieces
    ]
    rows = [torch.full((len(each),), NO_ROW) for each in kept]
    own = numbers.split([int(each.sum()) for each in kept])
    names, times = [""] * len(numbers), np.full(len(numbers), np.nan)
    for piece, row, keep, where in zip(pieces, rows, kept, own, strict=True):
        row[keep] = where
        for number in where.tolist():
            names[number] = recording_of(piece)
        if piece.times is not None:
            times[where.numpy()] = piece.times[keep].numpy()
    source = Source(names, times if np.isfinite(times).any() else None, index)
    schema = ColumnSchema.from_dict(settings["column_schema"])
    [last] = in_schema_order(
        contents._replace(recordings=contents.recordings[-1:]), schema
    ).recordings
    end = End(
        None if last.times is None else float(last.times[-1]),
        None if last.controls is None else last.controls[-1].tolist(),
    )
    return Inputs(pieces, rows, source, end)


def following(piece: Observations, end: End, settings: dict[str, Any]) -> tuple[Observations, int]:
    """Return a recording that follows on rows with this end, and the number of its first moves.

    Its first move has the control of the last row before, if controls act from their rows, and the
    duration since that row, if that is a control. There are 0 moves after a gap, at which the
    filter starts from the prior. Times that start over are those of the next time step.
    """
    step, timed = settings.get("time_step"), bool(settings.get("time_as_control"))
    u = None if piece.controls is None else piece.controls.clone()
    if u is not None and end.controls is not None and settings.get("control_timing") == "from":
        u[0, : len(end.controls)] = torch.tensor(end.controls, dtype=u.dtype)
    moves = 1
    if step is not None and end.time is not None and piece.times is not None:
        elapsed = float(piece.times[0]) - end.time
        if elapsed > LARGEST_GAP * step:
            moves = 0
        elif timed and u is not None and elapsed > 0:
            u[0, -1] = elapsed
        elif not timed and elapsed > 1.5 * step:
            moves = moves_in(elapsed, step)
    return piece._replace(controls=u), moves


def read_for(settings: dict[str, Any], data: Any, *, states: bool = False) -> Contents:
    """Return the recordings of data with the columns of the training; arguments as of `inputs_of`.

    Recordings that were read before are returned as they are, without a warning.

    Raises:
        DataError: data that does not fit the columns of the training.
    """
    if isinstance(data, Contents):
        return data
    with in_python():
        contents = contents_of(data, layout_for(settings, data, states=states), states=states)
    warn_of_partly_missing(contents, settings)
    return contents


def recording_of(piece: Observations) -> str:
    """Return the name of the recording that a piece was cut from."""
    return PIECE.sub("", piece.name)


def layout_for(settings: dict[str, Any], data: Any, *, states: bool) -> Layout:
    """Return the roles of the columns of data, by the names of the training.

    A column of recordings may be absent: each DataFrame is then a single recording.
    """
    schema = ColumnSchema.from_dict(settings["column_schema"])
    layout = trained_layout(layout_of(settings), schema)
    several = list(data.values()) if isinstance(data, dict) else data
    parts = several if isinstance(several, list) else [data]
    arrays = isinstance(data, dict) and not all(map(is_frame, parts))
    if arrays or (parts and all(isinstance(each, Recording) for each in parts)):
        codes = codes_of_arrays(layout.missing, schema)
        return Layout(size=layout.size, missing=codes)  # named arrays have the usual names
    files = [Path(each) for each in parts if isinstance(each, str | PathLike)]
    named_array = isinstance(layout.states, str) and all(kind_of(each) in ARRAYS for each in files)
    if states and not (files and named_array):
        layout = layout._replace(states=schema.columns("states"))
    named = any(layout.recording in names_of(each) for each in parts if is_frame(each))
    if parts and all(map(is_frame, parts)) and not named:
        layout = layout._replace(recording=None)
    return layout


def names_of(frame: Any) -> list[str]:
    """Return the names of the columns and index levels of a DataFrame."""
    levels = getattr(getattr(frame, "index", None), "names", ())
    return [*map(str, getattr(frame, "columns", ())), *map(str, levels)]


def codes_of_arrays(missing: Any, schema: ColumnSchema) -> Any:
    """Return codes of missing values by the columns of named arrays, x1, x2, ..., z1, ..., u1."""
    if not isinstance(missing, Mapping):
        return missing
    names = (
        ("x", schema.columns("observations")),
        ("z", schema.columns("states")),
        ("u", list(schema.controls)),
    )
    return {
        f"{letter}{k + 1}": missing[name]
        for letter, columns in names
        for k, name in enumerate(columns)
        if name in missing
    }


def warn_of_partly_missing(contents: Contents, settings: dict[str, Any]) -> None:
    """Warn of rows that lack some sensors, which are not used at all."""
    if settings.get("allow_missing_sensors"):
        return
    recordings = [each for each in contents.recordings if each.obs.ndim == 2]
    empty = [
        name
        for k, name in enumerate(contents.observations if recordings else [])
        if all(bool(each.obs[:, k].isnan().all()) for each in recordings)
    ]
    if empty:
        text = f"there is no value of {', '.join(empty)}: no row is observed"
        if len(empty) < len(contents.observations):
            text += "; kbf.fit(..., allow_missing_sensors=True) fits a filter that uses the others"
        warnings.warn(text, DataWarning, stacklevel=5)
    elif count := contents.partly_missing():
        warnings.warn(
            f"{count} rows lack some of their observations and count as unobserved: "
            "kbf.fit(..., allow_missing_sensors=True) fits a filter that uses the others",
            DataWarning,
            stacklevel=5,
        )
