"""One check for all recordings that meet a fitted filter: time step and ranges of the training.

Names and order of columns, and declared codes of missing values, are those of the checkpoint in all
readers (`kbf.data.files.read.trained_layout`). What remains is compared here, for every command and
every method that takes recordings: `differences` returns sentences with both numbers.
"""

import importlib
import itertools
import math
import warnings
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.data.dataset import Data
from kbf.data.files.checks import MIN_CODE_COUNT
from kbf.data.files.layout import Observations
from kbf.data.files.report import fingerprints
from kbf.data.files.timestamps import LARGEST_GAP, UNEVEN_SHARE, moves_in
from kbf.fitted.checkpoint import Trained
from kbf.fitted.column_order import MAX_ROWS, find_change
from kbf.recording import Recording, observed
from kbf.runtime.errors import DataWarning

# Rows from which ranges and time steps are compared.
MIN_ROWS = 10

# Share of rows that may be outside of the training range by more than its width. Single outliers
# are rejected by the filter; they are no other unit.
MAX_FAR_SHARE = 0.05

# Share of rows that may be outside by `NEAR_MARGIN` of the width: most of a recording.
MAX_OUTSIDE_SHARE = 0.5
NEAR_MARGIN = 0.1

# A column that varies by less than this share of its training range is in another unit: metres in
# place of millimetres are 0.001. A sensor at rest has more noise, or is constant.
MIN_WIDTH_SHARE = 0.003
MIN_ROWS_OF_WIDTH = 100

# Durations that are kept; their median is compared.
MAX_DURATIONS = 10_000

# Share of rows that may be equal to rows of the training; and of rows that are distinct, below
# which they may be equal by chance.
MAX_SEEN_SHARE = 0.2
MIN_DISTINCT_SHARE = 0.5

# Rows in which a sensor may give the same value, and how much longer than ever in the training.
MAX_EQUAL_ROWS = 50
MAX_EQUAL_RATIO = 3

# Columns that a sentence names.
MAX_NAMED = 3


class Reference(NamedTuple):
    """Ranges of a filter's training data in the units of the data; angles have none.

    Attributes:
        names: of the components of observations and controls. low, high: ``c``; infinite where
            there is no range.
        time_step: of the training, or None.
        equal: ``c``, the longest runs of equal values; 0 where they are not compared.
        q: number of observations among the components.
        free: which components may have another sign, or be exchanged.
    """

    names: list[str]
    low: Tensor
    high: Tensor
    time_step: float | None
    equal: Tensor
    q: int
    free: list[bool]


def reference_of(trained: Trained) -> Reference:
    """Return the ranges of the recordings that a filter holds; its checkpoint contains them."""
    module, names = trained.module, []
    schema, series = module.column_schema(), training_series(trained)
    controls = module.memory.recordings()[0].controls
    k = 0 if controls is None else controls.shape[1]
    q = series[0].shape[1] - k
    if q:
        names += schema.components("observations")
    names += [*schema.controls, "time of the move"][:k]
    values = torch.cat(series)
    known = values.isfinite()
    low = torch.where(known, values, math.inf).amin(0)
    high = torch.where(known, values, -math.inf).amax(0)
    free = [*(schema.scalable("observations") if q else []), *[True] * k]
    fixed = ~torch.tensor(free, dtype=torch.bool)
    low[fixed], high[fixed] = -math.inf, math.inf
    step = (module.config.get("data") or {}).get("time_step")
    equal = torch.zeros(len(names), dtype=torch.int64)
    if q:
        seen = [each[each[:, :q].isfinite().any(1), :q] for each in series]
        equal[:q] = torch.stack(list(map(longest_runs, seen))).amax(0)
    return Reference(names, low, high, step, equal, q, free)


def training_series(trained: Trained) -> list[Tensor]:
    """Return the recordings that a filter holds, ``T c`` in the units of the data.

    Columns are the observations, NaN where missing, and the controls. Images are left out.
    """
    module = trained.module
    recordings = module.memory.recordings()
    if recordings[0].obs.ndim != 2 or not module.column_schema().observations:
        recordings = [each._replace(obs=each.states[:, :0], mask=None) for each in recordings]
    sides = [(observed(each).double(), each.controls) for each in recordings]
    if (scaling := module.scaling) is not None:
        sides = [
            (
                scaling.unscaled("x", obs) if obs.shape[1] else obs,
                None if controls is None else scaling.unscaled("u", controls),
            )
            for obs, controls in sides
        ]
    both = [[each.double() for each in side if each is not None] for side in sides]
    return [torch.cat(each, 1).cpu() for each in both]


def longest_runs(values: Tensor) -> Tensor:
    """Return how often in a row each column of ``T c`` gives one value, ``c``, at most."""
    if not len(values):
        return torch.zeros(values.shape[1], dtype=torch.int64)
    rows = torch.arange(1, len(values) + 1)[:, None]
    changes = torch.cat([torch.ones_like(values[:1]), values.diff(dim=0)]) != 0
    first = torch.where(changes.cpu(), rows, 1).cummax(0).values
    return (rows - first + 1).amax(0)


class Comparison:
    """Compares the rows that a filter takes with those of its training, as they arrive."""

    def __init__(
        self, trained: Trained, reference: Reference | None = None, *, live: bool = False
    ) -> None:
        """Compare with the training data of a filter.

        Args:
            trained: the filter.
            reference: `reference_of` it, if that is known.
            live: warn of sensors that are late, whose readings a live filter takes at
                another time than those of recordings.
        """
        late = (trained.module.config.get("data") or {}).get("latency") or {}
        for name, seconds in late.items() if live else ():
            text = (
                f"the readings of {name} are {seconds:g} s late in the training: give each by "
                "update(reading, time=...) with its own time, and set max_delay"
            )
            warnings.warn(text, DataWarning, stacklevel=4)
        if live:  # imported now: it would delay the step that compares by 0.2 s
            importlib.import_module("scipy.special")
        self.trained: Trained = trained
        self.reference: Reference = reference or reference_of(trained)
        self.timed: bool = not (trained.module.config.get("data") or {}).get("time_as_control")
        c = len(self.reference.names)
        self.rows: int = 0
        self.known: Tensor = torch.zeros(c)
        self.far: Tensor = torch.zeros(c)
        self.outside: Tensor = torch.zeros(c)
        self.low: Tensor = torch.full((c,), math.inf, dtype=torch.float64)
        self.high: Tensor = torch.full((c,), -math.inf, dtype=torch.float64)
        self.lowest: Tensor = torch.zeros(c)  # values that equal the least, and the largest
        self.highest: Tensor = torch.zeros(c)
        self.equal: Tensor = torch.zeros(c, dtype=torch.int64)
        self.durations: list[float] = []
        self.values: list[Tensor] = []  # the first recordings

    def add(
        self, obs: Tensor | None, controls: Tensor | None = None, durations: Iterable[float] = ()
    ) -> None:
        """Add rows.

        Args:
            obs: ``n q`` in components, NaN where missing; images are not compared.
            controls: ``n k``. durations: of the moves to rows, in seconds.
        """
        room = MAX_DURATIONS - len(self.durations)
        self.durations += [d for d, _ in zip(durations, range(room), strict=False)]
        sides = [each for each in (obs, controls) if each is not None and each.ndim == 2]
        if not sides:
            return
        values = torch.cat([each.double().cpu() for each in sides], 1)
        if values.shape[1] != len(self.reference.names) or not len(values):
            return
        ends = self.reference
        width = (ends.high - ends.low).nan_to_num(posinf=0)
        known = values.isfinite()
        self.equal = torch.maximum(self.equal, longest_runs(values[known[:, : ends.q].any(1)]))
        beyond = torch.maximum(ends.low - values, values - ends.high)
        if sum(map(len, self.values)) < MAX_ROWS:
            self.values.append(values)
        self.rows += int(known.any(1).sum())
        self.known += known.sum(0)
        self.far += (known & (beyond > width)).sum(0)
        self.outside += (known & (beyond > NEAR_MARGIN * width)).sum(0)
        low = torch.minimum(self.low, torch.where(known, values, math.inf).amin(0))
        high = torch.maximum(self.high, torch.where(known, values, -math.inf).amax(0))
        self.lowest = self.lowest * (low == self.low) + (values == low).sum(0)
        self.highest = self.highest * (high == self.high) + (values == high).sum(0)
        self.low, self.high = low, high

    def differences(self) -> list[str]:
        """Return a sentence for each difference from the training, with both numbers."""
        return [*self.time_differences(), *self.range_differences(), *self.order_differences()]

    def time_differences(self) -> list[str]:
        """Return what another time step causes."""
        step = self.reference.time_step
        if step is None or not self.timed or len(self.durations) < MIN_ROWS:
            return []
        here = float(torch.tensor(self.durations, dtype=torch.float64).median())
        if abs(here / step - 1) <= UNEVEN_SHARE:
            return []
        both = f"the rows are {here:.6g} apart in time, those of the training {step:.6g}"
        if here > LARGEST_GAP * step:
            return [
                f"{both}: the filter starts from the prior at each gap of more than "
                f"{LARGEST_GAP:g} time steps. Is the time in the unit of the training?"
            ]
        if (moves := moves_in(here, step)) > 1:
            return [f"{both}: the filter predicts {moves} steps for a row"]
        return [
            f"{both}, and no whole multiple: the filter moves one step for a row, so that its "
            "estimates and intervals are those of another motion. Resample the recording, or "
            "train with time_as_control"
        ]

    def range_differences(self) -> list[str]:
        """Return which columns are outside of the training range, or vary by much less."""
        if self.rows < MIN_ROWS:
            return []
        ends, known = self.reference, self.known.clamp_min(1)
        off = (self.far > MAX_FAR_SHARE * known) | (self.outside > MAX_OUTSIDE_SHARE * known)
        found = []
        for k in off.nonzero()[:MAX_NAMED, 0].tolist():
            share = 100 * float(self.outside[k] / known[k])
            found.append(
                f"column {ends.names[k]}: {share:.0f} % of {self.rows} rows are outside of the "
                f"training range, {ends.low[k]:.4g} to {ends.high[k]:.4g}; here it is "
                f"{self.low[k]:.4g} to {self.high[k]:.4g}. {self.question(k)}"
            )
        if (more := int(off.sum()) - len(found)) > 0:
            found.append(f"{more} more columns are outside of their training ranges")
        stuck = (ends.equal > 0) & (self.equal >= MAX_EQUAL_ROWS)
        stuck &= self.equal > MAX_EQUAL_RATIO * ends.equal
        found += [
            f"column {ends.names[k]} gives the same value in {int(self.equal[k])} rows on end, in "
            f"the training in at most {int(ends.equal[k])}: is the sensor stuck?"
            for k in (~off & stuck).nonzero()[:MAX_NAMED, 0].tolist()
        ]
        width, here = (ends.high - ends.low).nan_to_num(posinf=0), self.high - self.low
        narrow = ~off & (here > 0) & (here < MIN_WIDTH_SHARE * width)
        narrow &= self.known >= MIN_ROWS_OF_WIDTH
        return found + [
            f"column {ends.names[k]} varies by less than {100 * MIN_WIDTH_SHARE:g} % of its "
            f"training range: {self.low[k]:.4g} to {self.high[k]:.4g} here, {ends.low[k]:.4g} to "
            f"{ends.high[k]:.4g} there. Is this the unit of the training?"
            for k in narrow.nonzero()[:MAX_NAMED, 0].tolist()
        ]

    def order_differences(self) -> list[str]:
        """Return which column has the other sign, or which two are exchanged."""
        ends = self.reference
        if not self.values or not ends.q:
            return []
        found = find_change(training_series(self.trained), self.values, ends.q, ends.free)
        if found is None:
            return []
        names = [ends.names[k] for k in found.columns]
        what = (
            f"column {names[0]} seems to have the other sign, relative to the others"
            if len(names) == 1
            else f"the columns {names[0]} and {names[1]} seem to be exchanged"
        )
        return [
            f"{what}: each row is then predicted from the row before as well as in the training "
            f"(mean error {found.error:.3g}, in the training {found.in_training:.3g}; as the rows "
            f"are given {found.as_given:.3g})"
        ]

    def question(self, k: int) -> str:
        """Return the question of a column out of range: its unit, or a code for a missing value."""
        sides = ((self.lowest, self.low), (self.highest, self.high))
        for count, end in sides:
            below = end[k] < self.reference.low[k] or end[k] > self.reference.high[k]
            if below and count[k] >= MIN_CODE_COUNT and count[k] > 0.9 * self.outside[k]:
                return f"Does {end[k]:g} stand for a missing value, which the training had none of?"
        return "Are these the units of the training?"


def differences(
    trained: Trained,
    rows: Iterable[tuple[Tensor, Tensor | None, Tensor | None]],
    durations: Iterable[float] = (),
    reference: Reference | None = None,
) -> list[str]:
    """Return a sentence for each difference between recordings and those of the training.

    Args:
        trained: the filter.
        rows: of each recording observations, mask (False where nothing was observed; None where
            all is) and controls, in components.
        durations: of the moves, in seconds.
        reference: `reference_of` the filter, if that is known.
    """
    comparison = Comparison(trained, reference)
    comparison.add(None, durations=durations)
    for obs, mask, controls in rows:
        if mask is not None and obs.ndim == 2:
            obs = torch.where(mask[:, None], obs.double(), torch.nan)
        comparison.add(obs, controls)
    return comparison.differences()


def seen_in_training(trained: Trained, recordings: list[Recording]) -> list[str]:
    """Return a sentence where many rows of recordings with states are those of the training.

    Recordings of a few values, whose rows are alike by chance, and images are not compared.
    """
    module, memory = trained.module, trained.module.memory.recordings()
    if module.encoding is not None or memory[0].obs.ndim != 2:
        return []
    known = [np.unique(fingerprints(each)) for each in memory]
    rows = np.concatenate([fingerprints(each) for each in module.taken_in(recordings)])
    both = int(np.isin(rows, np.concatenate(known)).sum())
    if both <= MAX_SEEN_SHARE * len(rows) or len(np.unique(rows)) < MIN_DISTINCT_SHARE * len(rows):
        return []
    return [
        f"{both} of {len(rows)} rows are in the training, equal to the last digit: errors on them "
        "are too small, and appended again they count twice"
    ]


def data_differences(trained: Trained, data: Data, recordings: list[Recording]) -> list[str]:
    """Return `differences` of recordings of a data set, whose time step is `Data.own_step`."""
    times = [] if data.own_step is None else [data.own_step] * MIN_ROWS
    return differences(trained, ((r.obs, r.mask, r.controls) for r in recordings), times)


def piece_differences(
    trained: Trained, pieces: list[Observations], reference: Reference | None = None
) -> list[str]:
    """Return `differences` of recordings that are to be filtered."""
    durations = [
        duration
        for each in pieces
        if each.times is not None
        for duration in each.times[slice(None) if each.inserted is None else ~each.inserted]
        .diff()[:MAX_DURATIONS]
        .tolist()
    ]
    # A recording that was cut at each row: the durations are those between the pieces.
    starts = [float(each.times[0]) for each in pieces if each.times is not None]
    jumps = [b - a for a, b in itertools.pairwise(starts) if b > a]
    times = durations if len(durations) >= len(jumps) else jumps
    rows = ((p.obs, p.mask, p.controls) for p in pieces)
    return differences(trained, rows, times, reference)
