"""Time stamps, gaps and missing values; conversion of a file's recordings for filters."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.layout import FileRecording

# A recording is split at gaps of more than this many median time steps.
LARGEST_GAP = 5.0

# A move is irregular if its duration differs from the median time step, or from a whole multiple of
# it, by more than this share. Clocks of ordinary loggers jitter by less.
UNEVEN_SHARE = 0.05


def seconds_since_1970(dates: np.ndarray) -> np.ndarray:
    """Returns dates in UTC, an array of datetime64, in seconds; NaN where missing.

    >>> seconds_since_1970(np.array(["1970-01-01T00:01", "NaT"], "datetime64[s]")).tolist()
    [60.0, nan]
    """
    moments = dates.astype("datetime64[us]")
    return np.where(np.isnat(moments), np.nan, moments.astype("int64") / 1e6)


def check_times(recording: FileRecording) -> None:
    """Raises a ValueError with the place of the first missing or non-increasing time stamp."""
    if (times := recording.times) is None:
        return
    if bool(times.isnan().any()):
        raise ValueError(
            f"{recording.place(int(times.isnan().nonzero()[0, 0]))}: the time is missing"
        )
    if bool((wrong := times.diff() <= 0).any()):
        k = int(wrong.nonzero()[0, 0]) + 1
        detail = f"time {times[k].item():.10g} after {times[k - 1].item():.10g}"
        raise ValueError(
            f"{recording.place(k)}: {detail}; times must increase within a recording "
            "(data.recording=COLUMN names the recordings, data.sort_by_time=true sorts the rows)"
        )


def median_step(recordings: list[FileRecording]) -> float | None:
    """Returns the median time between two steps; None without times or without two steps."""
    steps = [r.times.diff() for r in recordings if r.times is not None]
    together = torch.cat(steps) if steps else torch.zeros(0)
    return float(together.median()) if len(together) else None


def pieces_at_gaps(recording: FileRecording, step: float | None) -> list[tuple[int, int]]:
    """Returns start and stop (exclusive) of the pieces between the gaps of a recording."""
    if recording.times is None or step is None:
        return [(0, len(recording.obs))]
    cuts = ((recording.times.diff() > LARGEST_GAP * step).nonzero()[:, 0] + 1).tolist()
    return list(zip([0, *cuts], [*cuts, len(recording.obs)], strict=True))


def uneven(recordings: list[FileRecording], step: float | None) -> tuple[int, int, str | None]:
    """Returns the numbers of moves and of irregular ones, and the place of the first.

    A move is irregular if its duration is not the median step, up to `UNEVEN_SHARE`.
    """
    total, count, first = 0, 0, None
    for recording in recordings:
        if recording.times is None or step is None:
            continue
        moves = recording.times.diff()
        moves_here = moves <= LARGEST_GAP * step
        off = moves_here & ((moves - step).abs() > UNEVEN_SHARE * step)
        total, count = total + int(moves_here.sum()), count + int(off.sum())
        if first is None and bool(off.any()):
            k = int(off.nonzero()[0, 0])
            first = f"{recording.place(k + 1)}: {moves[k].item():.4g} instead of {step:.4g}"
    return total, count, first


def moves_in(duration: float, step: float) -> int:
    """Returns the number of time steps in a duration, up to `LARGEST_GAP`; 1 if it is irregular.

    >>> moves_in(0.3, 0.1), moves_in(0.26, 0.1)
    (3, 1)
    """
    count = round(duration / step)
    regular = abs(duration / step - count) <= UNEVEN_SHARE * count
    return count if regular and 2 <= count <= LARGEST_GAP else 1


def with_missing_steps(
    leaves: Mapping[str, Tensor | None], times: Tensor | None, step: float | None
) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """Inserts a step without observation and state for each time step that has no row.

    Filters move once a step, and predict through these. Where m >= 2 whole time steps have passed
    since the row before (`moves_in`), m - 1 steps are inserted; their control is that of the row.

    Args:
        leaves: ``T ...`` by name: obs, mask, states, controls, times.
        times: ``T``. step: the time step of the filter.

    Returns:
        The leaves ``S ...``, and which steps were inserted, ``S`` bool; None if none was.
    """
    if times is None or step is None or len(times) < 2:
        return dict(leaves), None
    durations, moves = times.diff(), torch.ones(len(times), dtype=torch.int64)
    for k in (durations > 1.5 * step).nonzero()[:, 0].tolist():
        moves[k + 1] = moves_in(float(durations[k]), step)
    rows = torch.arange(len(times)).repeat_interleave(moves)
    last = moves.cumsum(0) - 1
    inserted = torch.ones(len(rows), dtype=torch.bool)
    inserted[last] = False
    if not bool(inserted.any()):
        return dict(leaves), None
    found = {name: None if leaf is None else leaf[rows] for name, leaf in leaves.items()}
    for name in ("obs", "states"):
        if (leaf := found.get(name)) is not None and leaf.is_floating_point():
            leaf[inserted] = torch.nan
    mask = found.get("mask")
    found["mask"] = ~inserted if mask is None else mask & ~inserted
    if (stamps := found.get("times")) is not None:
        found["times"] = stamps - step * (last[rows] - torch.arange(len(rows)))
    return found, inserted


def with_control_timing(recording: FileRecording, timing: str | None) -> FileRecording:
    """Returns a recording whose controls act in the move *to* their row.

    Controls that are logged in the row that they act *from* are shifted by a row; the first move
    has the control of the first row.

    Raises:
        ValueError: neither "into" nor "from".
    """
    if timing not in (None, "into", "from"):
        raise ValueError(f"data.control_timing must be into or from, got {timing!r}")
    u = recording.controls
    if timing != "from" or u is None:
        return recording
    return recording._replace(controls=torch.cat([u[:1], u[:-1]]))


def with_time_control(recording: FileRecording, step: float | None) -> FileRecording:
    """Adds the duration of each move as a control; the first moves of pieces have the median.

    Raises:
        ValueError: the recording has no times.
    """
    if recording.times is None or step is None:
        raise ValueError(
            f"{recording.file}: data.time_as_control needs time stamps: data.time=COLUMN"
        )
    taken = torch.cat([recording.times.new_tensor([step]), recording.times.diff()])
    taken = torch.where(taken > LARGEST_GAP * step, step, taken)[:, None]
    return recording._replace(
        controls=taken if recording.controls is None else torch.cat([recording.controls, taken], 1)
    )


def encode_recording(
    recording: FileRecording, column_schema: ColumnSchema, *, allow_missing_sensors: bool = False
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Returns observations ``T *x``, states ``T d``, mask ``T`` and controls ``T k``.

    Missing observations and unknown states are NaN. A step is observed if no column is missing;
    with ``allow_missing_sensors``, if any column is present.

    Raises:
        ValueError: a missing control, or an error of `ColumnSchema.encode`, with the file.
    """
    if (controls := recording.controls) is not None and bool(controls.isnan().any()):
        row, column = controls.isnan().nonzero()[0].tolist()
        name = [*column_schema.controls, "time"][column]
        raise ValueError(
            f"{recording.place(row)}, column {name}: a control is missing; fill them all in"
        )
    try:
        states = None if recording.states is None else column_schema.encode(recording.states)
        obs = (
            recording.obs
            if recording.obs.ndim == 4
            else column_schema.encode(recording.obs, "observations")
        )
    except ValueError as error:
        raise ValueError(f"{recording.file}, recording {recording.name}: {error}") from error
    mask = recording.mask
    if obs.ndim == 2:
        known = obs.isfinite().any(1) if allow_missing_sensors else obs.isfinite().all(1)
        mask = known if mask is None else known & mask
        obs = torch.where(mask[:, None], obs, torch.nan)
    return obs, states, None if mask is None or bool(mask.all()) else mask, controls
