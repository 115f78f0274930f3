"""The report of ``kbf data check``: counts, ranges and warnings about recordings."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from kbf.data.files.bounds import edge_warnings
from kbf.data.files.checks import (
    code_warnings,
    codes_of,
    control_warning,
    looks_like_angle,
    repeated_value,
    sensor_warnings,
    shuffle_warning,
    unit_warnings,
)
from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.dataset import FileData
from kbf.data.files.latency import latency_warnings
from kbf.data.files.layout import FileRecording
from kbf.data.files.leaks import leak_warnings
from kbf.data.files.outliers import column_warnings
from kbf.recording import Recording
from kbf.rkhs.linalg import evenly

# With fewer training steps filters are inaccurate.
MIN_TRAINING_STEPS = 100

# Largest share of steps that equal the step before, and of test steps outside the range of the
# training part, without a warning.
MAX_REPEATED_SHARE = 0.05

# Largest share of test steps that are far from all training steps, without a warning.
MAX_OUTSIDE_SHARE = 0.01

# An odd number with random bits, 2^64 over the golden ratio, as of Fibonacci hashing.
HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)

# Columns up to which a tree finds the nearest points faster than all distances do.
MAX_TREE_COLUMNS = 8

# Points of each part between which distances are computed.
MAX_POINTS = 10_000

# Points whose distances are computed at once.
POINTS_AT_ONCE = 500

# Steps before and after a step that do not count as its neighbours.
ADJACENT_STEPS = 10


class Report(NamedTuple):
    """Rows of the table of recordings and of the table of columns, and warnings as sentences.

    ``causes`` are the warnings of problems that make states seem unpredictable: codes for missing
    values, undeclared angles, dead sensors, and a test part outside of the training region.
    """

    recordings: list[dict[str, Any]]
    columns: list[dict[str, Any]]
    warnings: list[str]
    causes: list[str] = []  # noqa: RUF012 (never changed)

    def __repr__(self) -> str:
        return markdown("Recordings", self)


def examine(data: FileData, bounds: Mapping[str, Any] | None = None) -> Report:
    """Returns the tables of recordings and columns, and warnings of problems for filters.

    Args:
        data: the recordings. bounds: of the states, by column.
    """
    named, schema, recordings = all_columns(data), data.column_schema, data.recordings
    coded = {}
    for name, each in named.items():
        kind, values = kind_of(name, schema), torch.cat(each)
        if kind in ("number", "control"):  # a control of 0 is off
            off = (values == 0) & (kind == "control")
            coded[plain_name(name)] = torch.where(off, torch.nan, values)
    codes = codes_of(coded)
    warnings, causes = [*data.notes, *few(data)], code_warnings(coded)
    for name, each in named.items():
        if plain_name(name) in codes:
            continue
        found = angle_warnings(name, each, schema) or value_warning(name, each, schema)
        causes += found
        warnings += [] if found else column_warnings(name, each, data)
    allowed = data.allow_missing_sensors
    names = schema.columns("observations")
    causes += sensor_warnings(recordings, names, allow_missing_sensors=allowed)
    warnings += leak_warnings(recordings, schema)
    warnings += control_warning(recordings, data.control_timing)
    warnings += latency_warnings(recordings, names, data.own_step)
    if not codes:  # which repeat, and change at random
        warnings += shuffle_warning(recordings) + repeated(data) + shared_rows(data)
    warnings += edge_warnings(schema, data.train, {**(bounds or {}), **codes})
    causes += beyond(data)
    causes += outside("states", [s.states for s in data.train], [s.states for s in data.test])
    causes += outside("observations", vectors(data.train), vectors(data.test))
    return Report(
        [recording_row(data, k, recording) for k, recording in enumerate(data.recordings)],
        [column_row(name, torch.cat(each)) for name, each in named.items()],
        warnings + causes,
        causes,
    )


def all_columns(data: FileData) -> dict[str, list[Tensor]]:
    """Returns the columns of the file by name, one tensor a recording each, without images."""
    columns: dict[str, list[Tensor]] = {}
    sides = {
        "states": data.column_schema.columns("states"),
        "obs": data.column_schema.columns("observations"),
        "controls": [*data.column_schema.controls, "time of the move"],
    }
    for recording in data.recordings:
        for side, names in sides.items():
            if (values := getattr(recording, side)) is not None and values.ndim == 2:
                for name, column in zip(names, values.unbind(1), strict=False):
                    both = side == "obs" and name in sides["states"]
                    columns.setdefault(f"{name} (observed)" if both else name, []).append(column)
    return columns


def recording_row(data: FileData, k: int, recording: FileRecording) -> dict[str, Any]:
    """Returns name, length, parts and times of one recording."""
    steps = {
        part: sum(s.stop - s.start for s in spans if s.recording == k)
        for part, spans in data.spans.items()
    }
    times = recording.times
    timing = {} if times is None else {"duration": float(times[-1] - times[0])}
    if times is not None and len(times) > 1:
        ranks = {"least": torch.min, "median": torch.median, "largest": torch.max}
        timing |= {f"step ({name})": float(rank(times.diff())) for name, rank in ranks.items()}
    return {"recording": recording.name, "steps": len(recording.obs), **steps, **timing}


def column_row(name: str, values: Tensor) -> dict[str, Any]:
    """Returns range and missing share of one column."""
    finite = values[values.isfinite()]
    known = finite if len(finite) else values.new_tensor([math.nan])
    extent = {"min": float(known.min()), "mean": float(known.mean()), "max": float(known.max())}
    spread = {"std": float(known.std(correction=0)), "missing": 1 - len(finite) / len(values)}
    return {"column": name, **extent, **spread}


def few(data: FileData) -> list[str]:
    """Returns warnings of too few training steps, test steps or observations."""
    steps = {part: sum(len(s.states) for s in getattr(data, part)) for part in ("train", "test")}
    warnings = []
    if 0 < steps["train"] < MIN_TRAINING_STEPS:
        warnings.append(
            f"only {steps['train']} training steps: filters that are trained on fewer than "
            f"{MIN_TRAINING_STEPS} are inaccurate"
        )
    if 0 < steps["test"] < MIN_TRAINING_STEPS // 2:
        warnings.append(f"only {steps['test']} test steps: the error measured on them is uncertain")
    blind = sum(int((~s.mask).sum()) for s in data.train if s.mask is not None)
    if blind > 0.5 * steps["train"] > 0:
        partly = any(
            bool((r.obs.isfinite().any(1) & ~r.obs.isfinite().all(1)).any())
            for r in data.recordings
            if r.obs.ndim == 2
        )
        advice = "; data.allow_missing_sensors=true uses rows with some of their values"
        warnings.append(
            f"{blind} of {steps['train']} training steps have no observation"
            + (advice if partly and not data.allow_missing_sensors else "")
        )
    return warnings


def plain_name(name: str) -> str:
    """Returns the name of a column of `all_columns` in the file."""
    return name.removesuffix(" (observed)")


def kind_of(name: str, schema: ColumnSchema) -> str:
    """Returns the kind of a column of `all_columns`: number, angle, rotation or control."""
    plain = plain_name(name)
    for part in (*schema.states, *schema.observations):
        if part.kind != "number" and plain in part.names:
            return part.kind
    return "control" if plain in (*schema.controls, "time of the move") else "number"


def angle_warnings(name: str, each: list[Tensor], schema: ColumnSchema) -> list[str]:
    """Returns a warning of an angle that is not declared, or in another unit than it is."""
    plain = plain_name(name)
    if (kind := kind_of(name, schema)) == "angle":
        return unit_warnings(name, each, schema.unit)
    if kind == "rotation" or (period := looks_like_angle(each)) is None:
        return []
    unit = "degrees" if period == 360 else "radians"
    advice = f"data.angles=[{plain}] data.angle_unit={unit}"
    return [f"column {name}: it jumps by {period:.4g}, as an angle in {unit} does: {advice}"]


def value_warning(name: str, each: list[Tensor], schema: ColumnSchema) -> list[str]:
    """Returns a warning of a value in the middle of a sensor's range that may be a missing one."""
    plain = plain_name(name)
    if plain not in schema.columns("observations") or kind_of(name, schema) != "number":
        return []
    if (value := repeated_value(each)) is None:
        return []
    count = sum(int((column == value).sum()) for column in each)
    return [
        f"column {name}: {value:.10g} occurs {count} times, where other values hardly occur twice, "
        "and is entered and left by jumps. If it stands for a missing value: "
        f"data.missing={{{plain}: [{value:.10g}]}}"
    ]


def repeated(data: FileData) -> list[str]:
    """Returns a warning of steps that repeat the one before: a stuck sensor, or padding."""
    count, total = 0, 0
    for s in [*data.train, *data.test]:
        obs = s.obs.flatten(1)
        same = (obs[1:] == obs[:-1]).all(1) & (s.states[1:] == s.states[:-1]).all(1)
        count, total = count + int(same.sum()), total + len(same)
    warning = (
        f"{count} of {total} steps are copies of the step before: was the recording padded, "
        "or sampled too often?"
    )
    return [warning] if count > MAX_REPEATED_SHARE * total else []


def shared_rows(data: FileData) -> list[str]:
    """Returns a warning of test steps with the state and observation of a training step."""
    parts = [[fingerprints(s) for s in part] for part in (data.train, data.test)]
    train, test = (np.concatenate([np.zeros(0, np.uint64), *part]) for part in parts)
    train.sort()  # `numpy.isin` sorts the positions as well, which takes ten times as long
    test.sort()
    first, last = (np.searchsorted(train, test, side) for side in ("left", "right"))
    both = int((first < last).sum())
    warning = (
        f"{both} test steps are in the training part too, equal to the last digit: "
        "the test error will be too low"
    )
    return [warning] if both else []


def fingerprints(recording: Recording) -> np.ndarray:
    """Returns a 64-bit hash of the bytes of each observed step: image, or observation and state."""
    rows = recording.obs.flatten(1)
    if recording.obs.ndim == 2:
        rows = torch.cat([rows, recording.states], 1)
    if recording.mask is not None:
        rows = rows[recording.mask]
    raw = np.ascontiguousarray(rows.numpy()).view(np.uint8)
    words = np.pad(raw, ((0, 0), (0, -raw.shape[1] % 8))).view(np.uint64)
    hashes = np.zeros(len(words), np.uint64)
    for word in words.T:  # as FNV-1a, with the upper bits mixed into the lower ones
        hashes = (hashes ^ word) * HASH_FACTOR
        hashes ^= hashes >> np.uint64(32)
    return hashes


def vectors(recordings: list[Recording]) -> list[Tensor]:
    """Returns observations as vectors, NaN where missing; images as 8 x 8 grey ones."""
    found = []
    for s in recordings:
        x = s.obs
        if x.ndim == 4:
            x = adaptive_avg_pool2d(x.double().mean(1, keepdim=True), (8, 8)).flatten(1)
        found.append(x if s.mask is None else torch.where(s.mask[:, None], x, torch.nan))
    return found


def beyond(data: FileData) -> list[str]:
    """Returns warnings of components whose test states exceed the range of the training part."""
    if not data.train or not data.test:
        return []
    train, test = (torch.cat([s.states for s in part]) for part in (data.train, data.test))
    test = test[test.isfinite().all(1)]
    low, high = train.amin(0), train.amax(0)
    share = ((test < low) | (test > high)).double().mean(0)
    return [
        f"{100 * float(share[k]):.0f} % of the test steps have {name} outside of the training "
        f"part's range, {float(low[k]):.4g} to {float(high[k]):.4g}: extrapolation is required"
        for k, name in enumerate(data.column_schema.components("states"))
        if float(share[k]) > MAX_REPEATED_SHARE
    ]


def outside(name: str, train: list[Tensor], test: list[Tensor], most: int = 2000) -> list[str]:
    """Returns a warning of test points that are far from all training points.

    Distances to the nearest training point are measured in standard deviations of the training
    part; for a training point its neighbours in time do not count. A test point is outside if its
    distance exceeds twice the 99 % quantile of those of the training points. Of more than
    `MAX_POINTS` points of either part, evenly spaced ones are used.
    """
    if not train or not test:
        return []
    points, fresh = torch.cat(train), torch.cat(test)
    when = torch.cat([torch.arange(len(t)) + 1_000_000_000 * k for k, t in enumerate(train)])
    keep = points.isfinite().all(1).nonzero()[:, 0]
    keep = keep[evenly(len(keep), MAX_POINTS)]
    points, when, fresh = points[keep], when[keep], fresh[fresh.isfinite().all(1)]
    whole = len(fresh)
    fresh = fresh[evenly(whole, MAX_POINTS)]
    if len(points) < 20 or not len(fresh):
        return []
    std = points.std(0)
    points, fresh = (each / torch.where(std > 0, std, 1) for each in (points, fresh))
    chosen = torch.linspace(0, len(points) - 1, min(most, len(points))).long()

    finite = nearest(points[chosen], points, (when[chosen], when))
    finite = finite[finite.isfinite()]
    limit = 2 * float(finite.quantile(0.99)) if len(finite) else math.inf
    far = nearest(fresh, points) > limit
    if float(far.double().mean()) <= MAX_OUTSIDE_SHARE:
        return []
    return [
        f"{round(int(far.sum()) / len(far) * whole)} of {whole} test {name} lie outside of "
        "the training part's region: filters extrapolate there; record more, or split differently"
    ]


def nearest(fresh: Tensor, points: Tensor, when: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Returns the distance ``m`` of each of ``m c`` to the nearest of ``n c``.

    With the times of both, those within `ADJACENT_STEPS` do not count.
    """
    if points.shape[1] <= MAX_TREE_COLUMNS:
        from scipy.spatial import KDTree

        # Within these steps there are at most so many points, since times differ.
        count = 1 if when is None else min(2 * ADJACENT_STEPS + 2, len(points))
        found, index = KDTree(points.numpy()).query(fresh.numpy(), k=count)
        distances = torch.from_numpy(np.reshape(found, (len(fresh), count)))
        if when is not None:
            apart = (when[0][:, None] - when[1][torch.from_numpy(index)]).abs()
            distances[apart <= ADJACENT_STEPS] = math.inf
        return distances.amin(1)
    closest = []
    for rows in torch.arange(len(fresh)).split(POINTS_AT_ONCE):
        distances = torch.cdist(fresh[rows], points)
        if when is not None:
            distances[(when[0][rows, None] - when[1]).abs() <= ADJACENT_STEPS] = math.inf
        closest.append(distances.amin(1))
    return torch.cat(closest)


def markdown(path: str, report: Report) -> str:
    """Returns the report as Markdown."""
    lines = [f"# {path}", "", "## Warnings", ""]
    lines += [f"- {warning}" for warning in report.warnings] or ["None."]
    for title, rows in (("Recordings", report.recordings), ("Columns", report.columns)):
        if rows:
            lines += ["", f"## {title}", "", f"| {' | '.join(rows[0])} |"]
            lines += [f"|{'---|' * len(rows[0])}"]
            lines += [f"| {' | '.join(cell(row.get(key)) for key in rows[0])} |" for row in rows]
    return "\n".join([*lines, ""])


def cell(value: Any) -> str:
    """Returns a value as text, floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
