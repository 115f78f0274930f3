"""Detects columns of new recordings that are exchanged or have the opposite sign.

Ranges do not reveal this where columns are alike, but the dynamics do: a linear prediction of
each row from the row before and the controls is fitted to the training recordings
(`LinearPrediction`). A recording that is predicted worse than any part of the training is predicted
with each column negated, and with each two columns exchanged. A change is reported only if it
reduces the error significantly, to that of the training; symmetric dynamics or less motion than in
the training are not reported.
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
# Columns up to which exchanges are tried.
MAX_COLUMNS = 64
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
        A, B = self.sides(*moves_in(series))
        gram = A.mT @ A + RIDGE * len(A) * torch.eye(A.shape[1], dtype=A.dtype)
        self.coefficients: Tensor = torch.linalg.solve(gram, A.mT @ B)
        residuals = B - A @ self.coefficients
        noise = residuals.mT @ residuals / max(len(A), 1)
        root = torch.linalg.cholesky(noise + ADDED_VARIANCE * torch.eye(q, dtype=A.dtype))
        self.whitening: Tensor = torch.linalg.inv(root).mT
        self.errors: Tensor = self.error((residuals @ self.whitening).square().sum(1))

    def standardised(self, values: Tensor, columns: slice | list[int]) -> Tensor:
        """Return the values of some columns in standard deviations; 0 where they are missing."""
        return ((values - self.mean[columns]) / self.scale[columns]).nan_to_num(0.0)

    def sides(
        self, before: Float[Tensor, "n c"], after: Float[Tensor, "n c"]
    ) -> tuple[Float[Tensor, "n i"], Float[Tensor, "n q"]]:
        """Return inputs (x_{t-1}, u_t, 1) and targets x_t of moves."""
        q, every = self.q, slice(None)
        first, then = self.standardised(before, every), self.standardised(after, every)
        return torch.cat([first[:, :q], then[:, q:], then.new_ones(len(then), 1)], 1), then[:, :q]

    def error(self, square: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return the errors of rows, given the squared norms of their whitened residuals."""
        return self.q * torch.log1p(square / self.q)


class ChangedErrors:
    """Errors of a recording with some of its columns replaced.

    A column that is replaced changes the whitened residuals by its difference as a target, times a
    row of W, minus its difference as an input, times a row of C W. Norms after a change follow from
    products that are computed once.
    """

    def __init__(
        self, prediction: LinearPrediction, before: Float[Tensor, "n c"], after: Tensor
    ) -> None:
        """Take the moves of a recording, from ``before`` to ``after``."""
        self.prediction, self.before, self.after = prediction, before, after
        A, B = prediction.sides(before, after)
        W, C = prediction.whitening, prediction.coefficients
        residuals = (B - A @ C) @ W
        directions = torch.cat([W, -C[:-1] @ W])
        self.square: Tensor = residuals.square().sum(1)
        self.products: Tensor = residuals @ directions.mT
        self.gram: Tensor = directions @ directions.mT

    @property
    def as_given(self) -> Float[Tensor, " n"]:
        """The errors without a change."""
        return self.prediction.error(self.square)

    def after_change(self, columns: list[int]) -> Float[Tensor, " n"]:
        """Return the errors with one column negated, or with two exchanged."""
        q, terms = self.prediction.q, list[Tensor]()
        places: list[int] = []
        first, then = (self.difference(each, columns) for each in (self.before, self.after))
        for k, column in enumerate(columns):
            if column < q:
                terms += [then[:, k], first[:, k]]
                places += [column, q + column]
            else:
                terms.append(then[:, k])
                places.append(q + column)
        a = torch.stack(terms, 1)
        cross = (a * self.products[:, places]).sum(1)
        own = ((a @ self.gram[places][:, places]) * a).sum(1)
        return self.prediction.error((self.square + 2 * cross + own).clamp_min(0))

    def difference(self, values: Tensor, columns: list[int]) -> Float[Tensor, "n k"]:
        """Return by how much the standardised columns change."""
        old = values[:, columns]
        new = -old if len(columns) == 1 else old.flip(1)
        standardised = self.prediction.standardised
        return standardised(new, columns) - standardised(old, columns)


def find_change(
    training: list[Float[Tensor, "_ c"]],
    recordings: list[Float[Tensor, "_ c"]],
    q: int,
    free: list[bool],
) -> Change | None:
    """Return the change after which rows follow one another as in the training, or None.

    Args:
        training: its recordings, columns of observations first, then controls.
        recordings: that are compared, with the same columns.
        q: number of observations.
        free: of each column, whether it may be negated or exchanged; components of angles may not.
    """
    from scipy.special import stdtrit  # quantiles of Student's t

    training, recordings = first_rows(training), first_rows(recordings)
    usual, new = moves_in(training), moves_in(recordings)
    found = list(changes(q, free))
    if min(len(usual[0]), len(new[0])) < BLOCKS * MIN_ROWS_OF_BLOCK or not q or not found:
        return None
    prediction = LinearPrediction(training, q)
    errors = ChangedErrors(prediction, *new)
    means = block_means(prediction.errors)
    if errors.as_given.mean() <= means.max():
        return None  # as in the training
    after = {tuple(columns): errors.after_change(columns) for columns in found}
    columns = min(after, key=lambda each: float(after[each].mean()))
    gain = block_means(errors.as_given - after[columns])
    t = float(gain.mean() / (gain.std() / math.sqrt(BLOCKS)).clamp_min(1e-12))
    least = -stdtrit(BLOCKS - 1, ERROR_RATE / len(found))
    if t < least or after[columns].mean() > means.max():
        return None
    each = (after[columns], errors.as_given, means)
    return Change(columns, *(float(values.mean()) for values in each))


def changes(q: int, free: list[bool]) -> Iterator[list[int]]:
    """Return each free column, and each two free columns of observations or of controls.

    With more than `MAX_COLUMNS` free columns there are no pairs, of which there would be too many.
    """
    columns = [k for k, each in enumerate(free) if each]
    yield from ([k] for k in columns)
    if len(columns) <= MAX_COLUMNS:
        yield from ([i, j] for i, j in itertools.combinations(columns, 2) if (i < q) == (j < q))


def moves_in(series: list[Tensor]) -> tuple[Float[Tensor, "n c"], Float[Tensor, "n c"]]:
    """Return rows and the rows after them, within recordings, in float64."""
    sides = [(each[:-1], each[1:]) for each in series if len(each)]
    before, after = (torch.cat(side).double() for side in zip(*sides, strict=True))
    return before, after


def first_rows(series: list[Tensor]) -> list[Tensor]:
    """Return the first `MAX_ROWS` rows of recordings."""
    starts = [0, *itertools.accumulate(map(len, series))]
    return [
        each[: MAX_ROWS - start]
        for each, start in zip(series, starts, strict=False)
        if start < MAX_ROWS and len(each)
    ]


def block_means(values: Float[Tensor, " n"]) -> Float[Tensor, " b"]:
    """Return the means of `BLOCKS` blocks of equal length; the last rows are left out."""
    rows = len(values) // BLOCKS
    return values[: rows * BLOCKS].reshape(BLOCKS, rows).mean(1)
