"""`Result`: estimates of rows in the components that filters use, and where the rows come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.runtime.errors import DataError

Array = np.ndarray


class Result(NamedTuple):
    """Estimates of rows, in the components that filters use.

    Attributes:
        means: ``T d``. covariances: ``T d d``, recalibrated; None for a filter without them.
        alarms: ``T`` texts, empty where there is none; None without a monitor.
        diagnostics: ``T`` numbers, by name.
        horizons: ``T``, the number of steps ahead of forecasts; None for estimates.
    """

    means: Tensor
    covariances: Tensor | None
    alarms: list[str] | None
    diagnostics: dict[str, Tensor]
    horizons: Tensor | None = None

    def rows(self, rows: Tensor) -> Result:
        """The rows of these numbers, in this order."""
        alarms = self.alarms
        return Result(
            self.means[rows],
            None if self.covariances is None else self.covariances[rows],
            None if alarms is None else [alarms[k] for k in rows.tolist()],
            {name: each[rows] for name, each in self.diagnostics.items()},
            None if self.horizons is None else self.horizons[rows],
        )

    def last(self) -> Result:
        """The last row."""
        return self.rows(torch.tensor([len(self.means) - 1]))


class Source(NamedTuple):
    """Where the rows of estimates come from.

    Attributes:
        names: of the recording of each row. times: of each row in seconds, or None.
        index: of the DataFrame that was filtered, or None.
        bounds: smallest and largest value by column; intervals and samples are clipped to them.
        units: by column, for the labels of figures.
    """

    names: Sequence[str]
    times: Array | None = None
    index: Any = None
    bounds: dict[str, tuple[float | None, float | None]] = {}  # noqa: RUF012 (never changed)
    units: dict[str, str] = {}  # noqa: RUF012 (never changed)


def joined(results: list[Result]) -> Result:
    """Concatenate results.

    Raises:
        DataError: there are none.
    """
    if not results:
        raise DataError("there are no rows")
    first = results[0]
    return Result(
        torch.cat([each.means for each in results]),
        None
        if first.covariances is None
        else torch.cat([each.covariances for each in results if each.covariances is not None]),
        None if first.alarms is None else [a for each in results for a in each.alarms or []],
        {
            name: torch.cat([each.diagnostics[name] for each in results])
            for name in first.diagnostics
        },
        None
        if first.horizons is None
        else torch.cat([each.horizons for each in results if each.horizons is not None]),
    )


def in_order(results: list[Result], rows: list[Tensor]) -> Result:
    """Concatenate results and put them into the order of the rows of the input.

    Steps without a row, whose number is negative, are left out.
    """
    return joined(results).rows(row_order(rows))


def row_order(rows: list[Tensor]) -> Tensor:
    """Return the steps of all pieces that have a row, in the order of the rows."""
    numbers = torch.cat(rows)
    return numbers.argsort()[int((numbers < 0).sum()) :]


def continued(index: Any, count: int) -> Any:
    """Return ``count`` further entries of an index: times and numbers by the median step.

    None for other kinds of index.
    """
    import pandas as pd

    if len(index) < 2 or index.nlevels > 1:
        return None
    if isinstance(index, pd.DatetimeIndex | pd.TimedeltaIndex):
        step: Any = pd.Series(index).diff().median()
    elif pd.api.types.is_numeric_dtype(index.dtype):
        step = index[-1] - index[-2]
    else:
        return None
    return pd.Index([index[-1] + k * step for k in range(1, count + 1)], name=index.name)
