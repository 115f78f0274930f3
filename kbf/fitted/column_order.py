"""Columns that are exchanged, or have the other sign, in recordings that meet a fitted filter.

Ranges do not show this where the columns are alike. The law by which rows follow one another does:
a linear prediction of each row from the row before and the controls is fitted to the training
(`LinearPrediction`). A recording is predicted as it is, with each column negated, and with each two
columns exchanged. Only what is significantly better so, and then as good as in the training, is
reported: symmetric laws and other operating conditions bring no sentence.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# Blocks of consecutive rows that standard errors are computed from, and the fewest rows of a block.
BLOCKS = 20
MIN_ROWS_OF_BLOCK = 4
# Rows of the training, and of recordings, that are used.
MAX_ROWS = 5_000
# Probability that one of the changes is reported by chance.
ERROR_RATE = 1e-3
# Ridge on standardised columns, as a share of the rows, and variance that is added to the errors'.
RIDGE = 1e-3
ADDED_VARIANCE = 1e-4


class Change(NamedTuple):
    """A change of a recording after which it is like the training.

    Attributes:
        columns: one that is negated, or two that are exchanged.
        error: the mean error after the change. as_given: without it. in_training: of the training.
    """

    columns: tuple[int, ...]
    error: float
    as_given: float
    in_training: float


class LinearPrediction:
    """Prediction of standardised x_t from x_{t-1} and u_t by ridge regression.

    The error of a row is q log(1 + ||r||^2 / q) for its whitened residual r in q dimensions: single
    outliers count little. Missing values are replaced by the mean.

    Attributes:
        mean, scale: ``c``, of the columns of observations and controls.
        q: number of observations. coefficients: ``(c + 1) q``. whitening: ``q q``.
        errors: ``n``, of the training.
    """

    def __init__(self, series: list[Float[Tensor, "_ c"]], q: int) -> None:
        """Fit to recordings, columns of observations first."""
        values = torch.cat(series).double()
        known = values.isfinite()
        count = known.sum(0).clamp_min(1)
        self.q: int = q
        self.mean: Tensor = values.nan_to_num(0.0).sum(0) / count
        square = torch.where(known, values - self.mean, 0.0).square().sum(0) / count
        self.scale: Tensor = torch.where(square > 0, square.sqrt(), 1.0)
        pairs = [self.pairs(each.double()) for each in series]
        A, B = (torch.cat(side) for side in zip(*pairs, strict=True))
        gram = A.mT @ A + RIDGE * len(A) * torch.eye(A.shape[1], dtype=A.dtype)
        self.coefficients: Tensor = torch.linalg.solve(gram, A.mT @ B)
        residuals = B - A @ self.coefficients
        noise = residuals.mT @ residuals / max(len(A), 1)
        root = torch.linalg.cholesky(noise + ADDED_VARIANCE * torch.eye(q, dtype=A.dtype))
        self.whitening: Tensor = torch.linalg.inv(root).mT
        self.errors: Tensor = self.error(residuals @ self.whitening)

    def standardised(self, values: Tensor, columns: list[int]) -> Tensor:
        """Return the values of some columns in standard deviations; 0 where they are missing."""
        return ((values - self.mean[columns]) / self.scale[columns]).nan_to_num(0.0)

    def pairs(self, values: Float[Tensor, "T c"]) -> tuple[Tensor, Tensor]:
        """Return inputs ``T-1 c+1`` (x_{t-1}, u_t, 1) and targets ``T-1 q`` of a recording."""
        z = self.standardised(values, list(range(values.shape[1])))
        one = z.new_ones(max(len(z) - 1, 0), 1)
        return torch.cat([z[:-1, : self.q], z[1:, self.q :], one], 1), z[1:, : self.q]

    def error(self, whitened: Float[Tensor, "n q"]) -> Float[Tensor, " n"]:
        """Return the error of each row."""
        return self.q * torch.log1p(whitened.square().sum(1) / self.q)

    def residuals(self, values: Float[Tensor, "T c"]) -> Float[Tensor, "n q"]:
        """Return the whitened residuals of a recording."""
        A, B = self.pairs(values)
        return (B - A @ self.coefficients) @ self.whitening

    def changed(
        self, values: Float[Tensor, "T c"], columns: list[int], new: Float[Tensor, "T j"]
    ) -> Float[Tensor, "n q"]:
        """Return by how much the whitened residuals change if some columns are replaced."""
        moved = self.standardised(new, columns) - self.standardised(values[:, columns], columns)
        seen = torch.tensor([column < self.q for column in columns])
        inputs = torch.where(seen, moved[:-1], moved[1:]) @ self.coefficients[columns]
        targets = torch.zeros_like(inputs)
        targets[:, [k for k in columns if k < self.q]] = moved[1:, seen]
        return (targets - inputs) @ self.whitening


def find_change(
    training: list[Float[Tensor, "_ c"]],
    values: Float[Tensor, "n c"],
    q: int,
    free: list[bool],
) -> Change | None:
    """Return the change after which rows follow one another as in the training, or None.

    Args:
        training: its recordings, columns of observations first, then controls.
        values: rows in their order.
        q: number of observations.
        free: of each column, whether it may be negated or exchanged; components of angles may not.
    """
    from scipy.special import stdtrit  # quantiles of Student's t

    if len(values) <= BLOCKS * MIN_ROWS_OF_BLOCK or sum(map(len, training)) <= BLOCKS or not q:
        return None
    values = values[:MAX_ROWS].double()
    prediction = LinearPrediction(first_rows(training), q)
    given = prediction.residuals(values)
    as_given, best = prediction.error(given), None
    for columns in (found := list(changes(q, free))):
        new = -values[:, columns] if len(columns) == 1 else values[:, columns[::-1]]
        errors = prediction.error(given + prediction.changed(values, columns, new))
        if best is None or errors.mean() < best[1].mean():
            best = columns, errors
    if best is None:
        return None
    columns, errors = best
    gain = block_means(as_given - errors)
    t = float(gain.mean() / (gain.std() / math.sqrt(BLOCKS)).clamp_min(1e-12))
    usual = block_means(prediction.errors)
    if t < -stdtrit(BLOCKS - 1, ERROR_RATE / len(found)) or errors.mean() > usual.max():
        return None
    means = (float(each.mean()) for each in (errors, as_given, usual))
    return Change(tuple(columns), *means)


def changes(q: int, free: list[bool]) -> Iterator[list[int]]:
    """Return each free column, and each two free columns of observations or of controls."""
    columns = [k for k, each in enumerate(free) if each]
    yield from ([k] for k in columns)
    yield from ([i, j] for i, j in itertools.combinations(columns, 2) if (i < q) == (j < q))


def first_rows(series: list[Tensor]) -> list[Tensor]:
    """Return the first `MAX_ROWS` rows of recordings."""
    ends = itertools.accumulate(map(len, series))
    kept = [each[: MAX_ROWS - end + len(each)] for each, end in zip(series, ends, strict=True)]
    return [each for each in kept if len(each)]


def block_means(values: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
    """Return the means of `BLOCKS` blocks of equal length; the last rows are left out."""
    rows = len(values) // BLOCKS
    return values[: rows * BLOCKS].reshape(BLOCKS, rows).mean(1)
