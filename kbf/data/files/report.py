"""What is in recordings, and what will hurt: counts, ranges, and warnings. Nothing here changes the data."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kbf.data.files.dataset import FileData
from kbf.data.files.layout import FileRecording
from kbf.recording import Recording
from kbf.rkhs.linalg import evenly

# Warn if there are fewer training steps than this.
FEW_STEPS = 100

# Warn if more than this share of the steps repeat the step before.
REPEATED_SHARE = 0.05

# Warn if more than this share of the test steps lie outside the region of the training steps.
OUTSIDE_SHARE = 0.01

# A value this many robust standard deviations from the median is an outlier.
OUTLIER_DEVIATIONS = 8.0

# Points of each part that distances are taken between, at most.
LOOKED_AT = 10_000

# This many steps before and after a step do not count as its nearest neighbours.
ADJACENT_STEPS = 10


class Report(NamedTuple):
    """Tables as rows of one kind each, and warnings as sentences."""

    sequences: list[dict[str, Any]]
    columns: list[dict[str, Any]]
    warnings: list[str]


def examine(data: FileData) -> Report:
    """Examine a recording: its sequences, its columns, and warnings of what will hurt a filter."""
    named = all_columns(data)
    warnings = [*data.notes, *few(data)]
    for name, each in named.items():
        warnings += column_warnings(name, each, data)
    warnings += repeated(data) + shared_rows(data)
    warnings += beyond(data)
    warnings += outside("states", [s.states for s in data.train], [s.states for s in data.test])
    warnings += outside("observations", seen(data.train), seen(data.test))
    return Report(
        [sequence_row(data, k, recording) for k, recording in enumerate(data.recordings)],
        [column_row(name, torch.cat(each)) for name, each in named.items()],
        warnings,
    )


def all_columns(data: FileData) -> dict[str, list[Tensor]]:
    """The person's columns by name, each as one tensor a sequence; images are left out."""
    columns: dict[str, list[Tensor]] = {}
    sides = {
        "states": data.column_schema.columns("states"),
        "obs": data.column_schema.columns("observations"),
    }
    sides["controls"] = [*data.column_schema.controls, "time of the move"]
    for recording in data.recordings:
        for side, names in sides.items():
            values = getattr(recording, side)
            if values is not None and values.ndim == 2:
                for name, column in zip(names, values.unbind(1), strict=False):
                    label = (
                        name
                        if side != "obs" or name not in sides["states"]
                        else f"{name} (observed)"
                    )
                    columns.setdefault(label, []).append(column)
    return columns


def sequence_row(data: FileData, k: int, recording: FileRecording) -> dict[str, Any]:
    """Name, length, parts and time of one sequence."""
    steps = {
        part: sum(s.stop - s.start for s in spans if s.recording == k)
        for part, spans in data.spans.items()
    }
    times = recording.times
    timing = {} if times is None else {"duration": float(times[-1] - times[0])}
    if times is not None and len(times) > 1:
        moves = times.diff()
        timing |= {
            "step (least)": float(moves.min()),
            "step (median)": float(moves.median()),
            "step (largest)": float(moves.max()),
        }
    return {"recording": recording.name, "steps": len(recording.obs), **steps, **timing}


def column_row(name: str, values: Tensor) -> dict[str, Any]:
    """Range and missing share of one column."""
    known = values[values.isfinite()]
    missing = 1 - len(known) / len(values)
    if not len(known):
        return {
            "column": name,
            "min": math.nan,
            "mean": math.nan,
            "max": math.nan,
            "std": math.nan,
            "missing": missing,
        }
    extent = {"min": float(known.min()), "mean": float(known.mean()), "max": float(known.max())}
    return {"column": name, **extent, "std": float(known.std(correction=0)), "missing": missing}


def few(data: FileData) -> list[str]:
    """Too little to learn from, or to score on."""
    steps = {part: sum(len(s.states) for s in getattr(data, part)) for part in ("train", "test")}
    warnings = []
    if 0 < steps["train"] < FEW_STEPS:
        warnings.append(
            f"only {steps['train']} training steps: filters learned from fewer than {FEW_STEPS} are poor"
        )
    if 0 < steps["test"] < FEW_STEPS // 2:
        warnings.append(
            f"only {steps['test']} test steps: the error measured on them is itself uncertain"
        )
    blind = sum(int((~s.mask).sum()) for s in data.train if s.mask is not None)
    if blind > 0.5 * steps["train"] > 0:
        warnings.append(f"{blind} of {steps['train']} training steps have no observation")
    return warnings


def column_warnings(name: str, each: list[Tensor], data: FileData) -> list[str]:
    """A column that never changes, has outliers, or jumps as an angle does that nobody declared."""
    values = torch.cat(each)
    known = values[values.isfinite()]
    if not len(known):
        return [f"column {name}: it is empty"]
    if float(known.max() - known.min()) <= 1e-12 * float(known.abs().max()):
        return [f"column {name}: it is constant ({float(known[0]):g}); it tells nothing"]
    warnings = []
    parts = (*data.column_schema.states, *data.column_schema.observations)
    declared = {part.names[0] for part in parts if part.kind == "angle"}
    if (
        name.removesuffix(" (observed)") not in declared
        and (period := looks_like_angle(each)) is not None
    ):
        unit = "degrees" if period == 360 else "radians"
        advice = f"data.angles=[{name.removesuffix(' (observed)')}] data.angle_unit={unit}"
        warnings.append(
            f"column {name}: it jumps by {period:.4g}, as an angle in {unit} does: {advice}"
        )
    else:
        low, middle, high = (
            known.quantile(known.new_tensor([0.25, 0.5, 0.75])).tolist()
            if len(known) < 10_000_000
            else (0, 0, 0)
        )
        off = (values - middle).abs() > OUTLIER_DEVIATIONS * (high - low) / 1.349
        if high > low and bool(off.any()):
            k = int(off.nonzero()[0, 0])
            warnings.append(
                f"column {name}: {int(off.sum())} outliers (first: {values[k].item():g} at {place_of(data, each, k)})"
            )
    return warnings


def looks_like_angle(each: list[Tensor]) -> float | None:
    """2 pi or 360 if a column has that range and jumps over all of it, while nearly all other moves are small."""
    moves = torch.cat([column.diff().abs() for column in each])
    moves = moves[moves.isfinite()]
    values = torch.cat(each)
    values = values[values.isfinite()]
    extent = float(values.max() - values.min())
    for period in (2 * math.pi, 360.0):
        jumps = moves > 0.8 * period
        others = moves[~jumps] > 0.5 * period  # few: where recordings that nobody told apart meet
        if (
            0.9 * period < extent < 1.01 * period
            and bool(jumps.any())
            and float(others.double().mean()) < 0.01
        ):
            return period
    return None


def place_of(data: FileData, each: list[Tensor], k: int) -> str:
    """The place of the k-th value of a column in the file, for messages."""
    for recording, column in zip(data.recordings, each, strict=False):
        if k < len(column):
            return recording.place(k)
        k -= len(column)
    return f"step {k}"


def repeated(data: FileData) -> list[str]:
    """Steps that repeat the one before: a sensor that hangs, or a recording that was filled up."""
    count, total = 0, 0
    for s in [*data.train, *data.test]:
        obs = s.obs.flatten(1)
        same = (obs[1:] == obs[:-1]).all(1) & (s.states[1:] == s.states[:-1]).all(1)
        count, total = count + int(same.sum()), total + len(same)
    if count <= REPEATED_SHARE * total:
        return []
    return [
        f"{count} of {total} steps are copies of the step before: was the recording filled up, or sampled too often?"
    ]


def shared_rows(data: FileData) -> list[str]:
    """Test steps that stand in the training part as well: the same state and observation."""
    theirs = {row for s in data.train for row in fingerprints(s)}
    both = sum(row in theirs for s in data.test for row in fingerprints(s))
    if not both:
        return []
    return [
        f"{both} test steps are in the training part too, the same to the last digit: the test error will be too good"
    ]


def fingerprints(sequence: Recording) -> list[bytes]:
    """The bytes of each observed step's observation, and of its state if it is a vector (images tell steps apart by themselves)."""
    seen = (
        range(len(sequence.obs))
        if sequence.mask is None
        else sequence.mask.nonzero()[:, 0].tolist()
    )
    rows = sequence.obs.flatten(1)
    if sequence.obs.ndim == 2:
        rows = torch.cat([rows, sequence.states], 1)
    table = rows.numpy()
    return [table[t].tobytes() for t in seen]


def seen(sequences: list[Recording]) -> list[Tensor]:
    """Observations as vectors, NaN where there is none; images as 8 x 8 grey ones."""
    vectors = []
    for s in sequences:
        if s.obs.ndim == 4:
            small = torch.nn.functional.adaptive_avg_pool2d(
                s.obs.double().mean(1, keepdim=True), (8, 8)
            ).flatten(1)
        else:
            small = s.obs
        vectors.append(small if s.mask is None else torch.where(s.mask[:, None], small, torch.nan))
    return vectors


def beyond(data: FileData) -> list[str]:
    """States of the test part beyond all of the training part's, column by column: a split that asks for extrapolation."""
    if not data.train or not data.test:
        return []
    train, test = (torch.cat([s.states for s in part]) for part in (data.train, data.test))
    test = test[test.isfinite().all(1)]
    low, high = train.amin(0), train.amax(0)
    share = ((test < low) | (test > high)).double().mean(0)
    return [
        f"{100 * float(share[k]):.0f} % of the test steps have {name} outside of the training part's range, "
        f"{float(low[k]):.4g} to {float(high[k]):.4g}: the test asks for extrapolation"
        for k, name in enumerate(data.column_schema.components("states"))
        if float(share[k]) > REPEATED_SHARE
    ]


def evenly_spaced(rows: Tensor, most: int) -> Tensor:
    """At most so many of the rows."""
    return rows[evenly(len(rows), most, rows.device)]


def outside(name: str, train: list[Tensor], test: list[Tensor], most: int = 2000) -> list[str]:
    """Test points that are farther from the training part than its own points are from one another.

    Distances to the nearest training point, in standard deviations of the training part; for a
    training point its neighbours in time do not count. A test point is outside where its distance
    is twice that which 99 % of the training points keep. Of more than `LOOKED_AT` points of either
    part evenly spaced ones are looked at.
    """
    if not train or not test:
        return []
    points, when = (
        torch.cat(train),
        torch.cat([torch.arange(len(t)) + 1_000_000_000 * k for k, t in enumerate(train)]),
    )
    keep = points.isfinite().all(1)
    points, when = (evenly_spaced(each[keep], LOOKED_AT) for each in (points, when))
    fresh = torch.cat(test)
    whole = int(fresh.isfinite().all(1).sum())
    fresh = evenly_spaced(fresh[fresh.isfinite().all(1)], LOOKED_AT)
    if len(points) < 20 or not len(fresh):
        return []
    std = points.std(0)
    points, fresh = (each / torch.where(std > 0, std, 1) for each in (points, fresh))
    chosen = torch.linspace(0, len(points) - 1, min(most, len(points))).long()
    own = torch.cdist(points[chosen], points)
    own[(when[chosen, None] - when).abs() <= ADJACENT_STEPS] = math.inf
    nearest = own.amin(1)
    limit = (
        2 * float(nearest[nearest.isfinite()].quantile(0.99))
        if bool(nearest.isfinite().any())
        else math.inf
    )
    far = torch.cat([torch.cdist(part, points).amin(1) for part in fresh.split(most)]) > limit
    if float(far.double().mean()) <= OUTSIDE_SHARE:
        return []
    return [
        f"{round(int(far.sum()) / len(far) * whole)} of {whole} test {name} lie outside of the training part's region: "
        "filters cannot know what happens there; record more, or split in another way"
    ]


def markdown(path: str, report: Report) -> str:
    """The report as text."""
    lines = [f"# {path}", "", "## Warnings", ""]
    lines += [f"- {warning}" for warning in report.warnings] or ["None."]
    for title, rows in (("Sequences", report.sequences), ("Columns", report.columns)):
        if rows:
            lines += [
                "",
                f"## {title}",
                "",
                f"| {' | '.join(rows[0])} |",
                f"|{'---|' * len(rows[0])}",
            ]
            lines += [f"| {' | '.join(cell(row.get(key)) for key in rows[0])} |" for row in rows]
    return "\n".join([*lines, ""])


def cell(value: Any) -> str:
    """A value as text, floats with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
