"""Columns that are empty or constant, and outliers: values that are far from all others."""

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.checks import are_whole
from kbf.data.files.dataset import FileData

# A value this many robust standard deviations from the median is an outlier.
OUTLIER_DEVIATIONS = 8.0

# Ratio of the distance of an outlier from the median to that of the farthest other value, at least.
MIN_OUTLIER_GAP = 1.5

# Steps around an outlier, of most of which the values must differ from it.
STEPS_AROUND = 11


def column_warnings(name: str, each: list[Tensor], data: FileData) -> list[str]:
    """Returns warnings of an empty or constant column, and of outliers; counts have none."""
    values = torch.cat(each)
    known = values[values.isfinite()]
    if not len(known):
        return [f"column {name}: it is empty"]
    if float(known.max() - known.min()) <= 1e-12 * float(known.abs().max()):
        return [f"column {name}: it is constant ({float(known[0]):g}) and holds no information"]
    if are_whole(known) and float(known.min()) >= 0:
        return []
    low, middle, high = np.quantile(known.numpy(), [0.25, 0.5, 0.75]).tolist()
    limit = detached((known - middle).abs(), OUTLIER_DEVIATIONS * (high - low) / 1.349)
    if high <= low or limit is None:
        return []
    off = (values - middle).abs() >= limit
    # A sensor that drifts away over many steps has no outliers.
    around = torch.cat([running_median(column) for column in each])
    off &= (values - around).abs() > 0.5 * (values - middle).abs()
    if name in data.column_schema.controls:
        off &= values != 0  # a control of 0 is off
    if not bool(off.any()):
        return []
    k = int(off.nonzero()[0, 0])
    count, where = int(off.sum()), place_of(data, each, k)
    return [f"column {name}: {count} outliers (first: {values[k].item():g} at {where})"]


def detached(distances: Tensor, least: float) -> float | None:
    """Returns the distance from which values are outliers: far, and with a gap to all others.

    Values of a heavy tail have no gap. None without outliers.
    """
    far = distances > least
    if not bool(far.any()):
        return None
    rest = distances[~far]
    ordered = torch.cat([distances[far], rest.amax().clamp_min(1e-300)[None]]).sort().values
    gaps = (ordered[1:] / ordered[:-1] > MIN_OUTLIER_GAP).nonzero()[:, 0]
    return float(ordered[int(gaps[0]) + 1]) if len(gaps) else None


def running_median(column: Tensor) -> Tensor:
    """Returns the medians ``T`` of the known values in windows of `STEPS_AROUND` steps."""
    import pandas as pd

    window = pd.Series(column.numpy()).rolling(STEPS_AROUND, center=True, min_periods=1)
    return torch.from_numpy(window.median().fillna(0).to_numpy(copy=True))


def place_of(data: FileData, each: list[Tensor], k: int) -> str:
    """Returns the place of the k-th value of a column in the file, for messages."""
    for recording, column in zip(data.recordings, each, strict=False):
        if k < len(column):
            return recording.place(k)
        k -= len(column)
    return f"step {k}"
