"""`Estimates`: what a fitted filter returns for recordings, in the columns and units of the data.

All arrays are NumPy arrays, with one row for each row of the input, in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from kbf.data.files.column_schema import WIDTH_OF_KIND, ColumnSchema
from kbf.evaluation.calibration import (
    Calibration,
    ForecastCalibration,
    chi_square,
    mahalanobis,
)
from kbf.fitted.results import Array, Result, Source
from kbf.runtime.html_repr import Shown


class Estimates(Shown):
    """Estimates of the states of recordings, with standard deviations, intervals and alarms.

    Attributes:
        columns: names of the state columns. mean: ``T c``, their estimates. bounds: by column.
        std: ``T c``, recalibrated standard deviations; of the columns of a rotation that of its
            angle. Of a filter without covariances, such as ``lstm``, they are those of its held-out
            errors, the same in all rows; None where it has no calibration.
        alarms: ``T`` texts: out_of_distribution, innovation_outlier, diverged, or empty; None
            where the filter was not calibrated.
        state: of the filter after the last row; an argument of `FittedFilter.filter`.
        result: the estimates in the components that filters use.
    """

    def __init__(
        self,
        result: Result,
        schema: ColumnSchema,
        calibration: Calibration | ForecastCalibration | None,
        source: Source,
        *,
        state: Any = None,
        likelihood: Callable[[], Array | None] | None = None,
        paths: Callable[[int, Generator], Tensor] | None = None,
    ) -> None:
        """Keep estimates in components, and decode them to columns.

        Args:
            result: in the components that filters use.
            schema: the columns.
            calibration: of the filter, or of its forecasts by their horizons, for intervals and
                regions.
            source: where the rows come from.
            state: of the filter after the last row.
            likelihood: returns `log_likelihood`.
            paths: draws n paths ``n T d``, of estimates from all observations.
        """
        self.result: Result = result
        self._schema, self._calibration = schema, calibration
        self._source, self._likelihood, self._paths = source, likelihood, paths
        self.bounds: dict[str, tuple[float | None, float | None]] = source.bounds
        self.columns: list[str] = schema.columns("states")
        decoded = schema.decode(result.means, result.covariances)
        self.mean: Array = self._clip(stacked(decoded, self.columns))
        self.std: Array | None = None
        if result.covariances is not None:
            deviations = stacked(decoded, [f"{name}_std" for name in schema.parts()])
            self.std = deviations[:, self._part_of_column()]
        self.alarms: Array | None = None if result.alarms is None else np.array(result.alarms)
        self.state: Any = state

    def __len__(self) -> int:
        return len(self.mean)

    @cached_property
    def covariance(self) -> Array | None:
        """Recalibrated covariances of the columns, ``T c c``.

        Those of angles are linearised at the estimate. None for a filter without covariances, and
        for states with rotations.
        """
        C, means = self.result.covariances, self.result.means
        if C is None or any(part.kind == "rotation" for part in self._schema.states):
            return None
        J, at = means.new_zeros(len(means), len(self.columns), means.shape[1]), 0
        for row, part in enumerate(self._schema.states):
            if part.kind == "number":
                J[:, row, at] = 1
            else:  # d atan2(s, c) = (c ds - s dc) / (c^2 + s^2)
                c, s = means[:, at], means[:, at + 1]
                squared = (c.square() + s.square()) / self._schema.turn()
                J[:, row, at], J[:, row, at + 1] = -s / squared, c / squared
            at += WIDTH_OF_KIND[part.kind]
        return (J @ C @ J.mT).numpy()

    @cached_property
    def log_likelihood(self) -> Array | None:
        """log p(x_t | x_1, ..., x_{t-1}) of each observation, ``T``, in the units of the data.

        NaN where nothing was observed or the observation was rejected; None for a filter without a
        density of its observations. Computed by a second run of the filter, at the first request.
        """
        return None if self._likelihood is None else self._likelihood()

    @property
    def diagnostics(self) -> Any:
        """Diagnostics of the filter at each row, a DataFrame."""
        import pandas as pd

        columns = {name: each.numpy() for name, each in self.result.diagnostics.items()}
        return pd.DataFrame(columns, index=self._index())

    def interval(self, level: float = 0.95) -> tuple[Array, Array]:
        """Return lower and upper ends ``T c`` of intervals that contain a state with this level.

        Each column has its own interval, m -+ f s with its standard deviation s and a factor f
        from its held-out errors (`Calibration.column_quantile`). Intervals of angles are not
        wrapped; those of the columns of a rotation are NaN.

        Raises:
            ValueError: a level that is not between 0 and 1, or a filter without covariances.
        """
        half = self.half_width(level)
        return self._clip(self.mean - half), self._clip(self.mean + half)

    def half_width(self, level: float = 0.95) -> Array:
        """Return half the widths ``T c`` of intervals, before they are clipped to bounds.

        Raises:
            ValueError: as `interval`.
        """
        return self._factors(level) * self._spread()

    def quantile(self, q: float) -> Array:
        """Return the q-th quantile of each column, ``T c``; quantiles are symmetric in the mean.

        Raises:
            ValueError: as `interval`.
        """
        if not 0 < q < 1:
            raise ValueError(f"q must be between 0 and 1, got {q}")
        if q == 0.5:
            return self.mean
        half = self._factors(abs(2 * q - 1)) * self._spread()
        return self._clip(self.mean + (half if q > 0.5 else -half))

    def contains(self, truth: Any, level: float = 0.95) -> Array:
        """Return whether the joint credible region of this level contains the states, ``T`` bool.

        Args:
            truth: states ``T c``, an array or a DataFrame with the columns of the states. Rows
                with missing values are not contained.
            level: of the region.

        Raises:
            ValueError: as `interval`, or states of another shape.
        """
        self._spread()
        C = self.result.covariances
        assert C is not None
        z = self._schema.encode(torch.from_numpy(self._truth(truth)))
        known = z.isfinite().all(1)
        distance = mahalanobis(torch.where(known[:, None], z, 0.0), self.result.means, C)
        radius2 = self._of_rows(lambda calibration: calibration.radius2(level))
        if radius2 is None:
            radius2 = chi_square(level, C.shape[-1])
        return ((distance <= radius2) & known).numpy()

    def sample(self, n: int, *, paths: bool = False, seed: int | None = None) -> Array:
        """Draw n states of each row, ``n T c``, with the calibrated spread.

        Args:
            n: number of draws.
            paths: draw whole paths given all observations, for estimates of
                `FittedFilter.smooth`. Without it rows are independent, from N(mean, covariance).
            seed: of the draws; None for another one in each call.

        Raises:
            ValueError: a filter without covariances, or paths of other estimates.
        """
        self._spread()
        C, means = self.result.covariances, self.result.means
        assert C is not None
        generator = torch.Generator()
        generator.seed() if seed is None else generator.manual_seed(seed)
        if paths:
            if self._paths is None:
                raise ValueError(
                    "paths are drawn given all observations: "
                    "fitted.smooth(data).sample(n, paths=True)"
                )
            return self._columns(self._paths(n, generator))
        noise = torch.randn(n, *means.shape, generator=generator, dtype=means.dtype)
        values, vectors = torch.linalg.eigh(C)
        root = vectors * values.clamp_min(0).sqrt()[:, None]
        draws = means + torch.einsum("tij,ntj->nti", root, noise)
        return self._columns(draws)

    def to_frame(self, level: float = 0.95) -> Any:
        """Return a DataFrame, on the index of the DataFrame that was filtered, if it was one.

        For each column of the states NAME it has NAME, NAME_std, NAME_lower and NAME_upper (the
        interval of ``level``); ``alarm`` where the filter was calibrated. Rows of files and arrays
        have ``recording`` and ``time`` in addition, where there are several recordings or times.
        """
        import pandas as pd

        columns: dict[str, Any] = {}
        index = self._index()
        if self._source.index is None:
            if len(set(self._source.names)) > 1:
                columns["recording"] = list(self._source.names)
            if self._source.times is not None:
                columns["time"] = self._source.times
        ends = None if self.std is None else self.interval(level)
        for k, name in enumerate(self.columns):
            columns[name] = self.mean[:, k]
            if self.std is not None and ends is not None:
                columns[f"{name}_std"] = self.std[:, k]
                if not np.isnan(ends[0][:, k]).all():
                    columns[f"{name}_lower"], columns[f"{name}_upper"] = (e[:, k] for e in ends)
        if self.alarms is not None:
            columns["alarm"] = self.alarms
        return pd.DataFrame(columns, index=index)

    def by_recording(self) -> dict[str, Estimates]:
        """Return the estimates of each recording, by name, in the order of their first rows."""
        names = np.array(self._source.names)
        return {
            name: self.rows(np.flatnonzero(names == name))
            for name in dict.fromkeys(self._source.names)
        }

    def plot(
        self,
        *,
        truth: Any = None,
        columns: Sequence[str] | None = None,
        level: float = 0.95,
        axes: Any = None,
    ) -> Any:
        """Draw the estimates of each column over time, with their intervals and the alarms.

        Args:
            truth: states ``T c``, as of `contains`.
            columns: of the states; None draws all.
            level: of the intervals.
            axes: of matplotlib, one for each column; None makes a figure.

        Returns:
            The matplotlib figure, which a notebook displays as the value of a cell; the given
            ``axes`` where there are some.

        Raises:
            ValueError: an unknown column, or another number of axes.
        """
        from kbf.plots.estimates import estimates_figure

        chosen = list(columns or self.columns)
        if unknown := [name for name in chosen if name not in self.columns]:
            raise ValueError(f"there is no column {unknown[0]!r}; it has {', '.join(self.columns)}")
        where = [self.columns.index(name) for name in chosen]
        ends = None if self.std is None else [end[:, where] for end in self.interval(level)]
        time, xlabel = self._time()
        units = self._source.units
        return estimates_figure(
            time,
            self.mean[:, where],
            ends,
            None if truth is None else self._truth(truth)[:, where],
            names=[f"{name} [{units[name]}]" if name in units else name for name in chosen],
            periods={
                chosen.index(part.names[0]): 2 * np.pi * self._schema.turn()
                for part in self._schema.states
                if part.kind == "angle" and part.names[0] in chosen
            },
            alarms=None if self.alarms is None else self.alarms != "",
            starts=self._starts(),
            level=level,
            axes=axes,
            xlabel=xlabel,
        )

    def parts(self) -> dict[str, Any]:
        """Returns what the table in notebooks shows."""
        count = len(set(self._source.names))
        shown: dict[str, Any] = {"rows": len(self), "recordings": count, "columns": self.columns}
        if self.alarms is not None:
            shown["alarms"] = int((self.alarms != "").sum())
        return shown

    def curve(self) -> tuple[Any, str]:
        """Returns the curve below the table, and its title."""
        return self.mean, ", ".join(self.columns)

    def rows(self, rows: Array) -> Estimates:
        """Return the estimates of some rows."""
        some, source = self.result.rows(torch.from_numpy(rows)), self._source
        origin = source._replace(
            names=[source.names[k] for k in rows],
            times=None if source.times is None else source.times[rows],
            index=None if source.index is None else source.index[rows],
        )

        def likelihood() -> Array | None:
            whole = self.log_likelihood
            return None if whole is None else whole[rows]

        def paths(n: int, generator: Generator) -> Tensor:
            assert self._paths is not None
            return self._paths(n, generator)[:, torch.from_numpy(rows)]

        return Estimates(
            some,
            self._schema,
            self._calibration,
            origin,
            likelihood=likelihood,
            paths=None if self._paths is None else paths,
        )

    def _columns(self, draws: Tensor) -> Array:
        """Draws ``n T d`` in columns ``n T c``, within the bounds."""
        decoded = stacked(self._schema.decode(draws.flatten(0, 1)), self.columns)
        return self._clip(decoded).reshape(len(draws), *self.mean.shape)

    def _index(self) -> Any:
        import pandas as pd

        index = self._source.index
        return pd.RangeIndex(len(self)) if index is None else index

    def _time(self) -> tuple[Array, str]:
        """The horizontal axis of figures and its label: the index, times, or the rows."""
        index, times = self._source.index, self._source.times
        if index is not None and index.nlevels == 1 and index.dtype.kind in "iufMm":
            if index.dtype.kind == "m":
                return np.asarray(index) / np.timedelta64(1, "s"), f"{index.name or 'time'} [s]"
            return np.asarray(index), str(index.name or ("time" if times is not None else "row"))
        if times is not None and len(self._starts()) == 1:
            return times - times[0], "time [s]"
        return np.arange(len(self)), "row"

    def _starts(self) -> list[int]:
        """The first rows of recordings, if the rows of none are interleaved."""
        names = np.array(self._source.names)
        return [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist()]

    def _spread(self) -> Array:
        if self.std is None:
            raise ValueError(
                "this filter has no covariances, so there are no intervals: "
                "kbf.fit(..., model='kbf', require=['intervals']) selects one that has"
            )
        return self.std

    def _part_of_column(self) -> list[int]:
        """The index of the part of each column."""
        return [k for k, part in enumerate(self._schema.states) for _ in part.names]

    def _of_rows(self, value: Callable[[Calibration], Tensor | None]) -> Tensor | None:
        """A value of the calibration; of forecasts ``T ...``, by the horizon of each row."""
        calibration, horizons = self._calibration, self.result.horizons
        if not isinstance(calibration, ForecastCalibration):
            return None if calibration is None else value(calibration)
        assert horizons is not None
        known, which = horizons.unique(return_inverse=True)
        found = [value(calibration.at(h)) for h in known.tolist()]
        return torch.stack([each.cpu() for each in found if each is not None])[which]

    def _factors(self, level: float) -> Array:
        """Half the width of intervals, in standard deviations, ``c`` or ``T c``; NaN of rotations.

        Those of forecasts depend on their horizons.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must be between 0 and 1, got {level}")
        parts = self._schema.states
        found = self._of_rows(lambda calibration: calibration.column_quantile(level))
        if found is None:
            found = torch.full((len(parts),), chi_square(level, 1) ** 0.5)
        single = [len(part.names) == 1 for part in parts]
        factors = np.where(single, found.double().cpu().numpy(), np.nan)
        return factors[..., self._part_of_column()]

    def _clip(self, values: Array) -> Array:
        """Values ``... c`` within the bounds of their columns."""
        if not self._source.bounds:
            return values
        ends = [self._source.bounds.get(name, (None, None)) for name in self.columns]
        low = [-np.inf if end[0] is None else end[0] for end in ends]
        high = [np.inf if end[1] is None else end[1] for end in ends]
        return np.clip(values, low, high)

    def _truth(self, truth: Any) -> Array:
        """States ``T c`` of an array or a DataFrame."""
        if hasattr(truth, "columns"):
            if lacking := [name for name in self.columns if name not in truth.columns]:
                raise ValueError(
                    f"truth: there is no column {lacking[0]!r}; it has "
                    f"{', '.join(map(str, truth.columns))}"
                )
            truth = truth[self.columns]
        values = np.asarray(truth, dtype="float64").reshape(len(truth), -1)
        if values.shape != self.mean.shape:
            raise ValueError(f"truth must be {self.mean.shape}, got {values.shape}")
        return np.ascontiguousarray(values)


def stacked(columns: dict[str, Tensor], names: Sequence[str]) -> Array:
    """Return columns as an array ``T c`` in float64."""
    return torch.stack([columns[name] for name in names], -1).double().numpy()
