"""Kalman filter of a linear model that is fitted to the training pairs by least squares."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel, training_moments
from kbf.recording import Recording, as_recordings, check_vectors, moves, observed_pairs
from kbf.runtime.html_repr import ShownModule


def regress(
    inputs: Float[Tensor, "m d"], targets: Float[Tensor, "m e"], name: str
) -> tuple[Float[Tensor, "e d"], Float[Tensor, " e"], Float[Tensor, "e e"]]:
    """Least squares y ~ B u + b with intercept: B, b, and the residual covariance sum r r^T / (m - d - 1).

    Of inputs that are linearly dependent, the solution of least norm is taken.

    Raises:
        ValueError: m < d + 1 + e points: the residual covariance would be singular. ``name`` says
            of what.
    """
    (m, d), e = inputs.shape, targets.shape[1]
    if m < d + 1 + e:
        raise ValueError(
            f"a linear model of {name} with {d} inputs and {e} outputs needs at least {d + 1 + e} of them, got {m}"
        )
    B = (torch.linalg.pinv(inputs - inputs.mean(0)) @ (targets - targets.mean(0))).mT
    b = targets.mean(0) - B @ inputs.mean(0)
    residual = targets - inputs @ B.mT - b
    return B, b, residual.mT @ residual / (m - d - 1)


def fit_linear(
    memory: Recording | list[Recording], *, allow_missing_sensors: bool = False
) -> LinearModel:
    """Fit z' = A z + B u + a + N(0, Q) to the transitions and x = C z + c + N(0, R) to the observations, by least squares.

    Pairs do not cross the end of a sequence; masked observations are left out. m0 and P0 are the
    mean and covariance of the training states. With ``allow_missing_sensors`` entries of
    observations may be NaN (`regress_columns`).

    Raises:
        ValueError: observations that are no vectors, or fewer than 2 d + k + 1 transitions or d + 1
            + q observations.

    References: multivariate linear regression, e.g. Hastie, Tibshirani and Friedman (2009), section
    3.2.4.
    """
    sequences = as_recordings(memory, allow_missing_sensors=allow_missing_sensors)
    check_vectors(sequences, "a linear model")
    z, z_next, u = moves(sequences)
    z_seen, x = observed_pairs(sequences)
    AB, a, Q = regress(z if u is None else torch.cat([z, u], -1), z_next, "transitions")
    A, B = AB[:, : z.shape[1]], None if u is None else AB[:, z.shape[1] :]
    C, c, R = (
        regress_columns(z_seen, x) if allow_missing_sensors else regress(z_seen, x, "observations")
    )
    return LinearModel(A, a, Q, C, c, R, *training_moments(sequences), B)


def regress_columns(
    inputs: Float[Tensor, "m d"], targets: Float[Tensor, "m e"]
) -> tuple[Float[Tensor, "e d"], Float[Tensor, " e"], Float[Tensor, "e e"]]:
    """`regress` of targets with NaN: each column by the rows that have it.

    A covariance of two residuals is that of the rows that have both (0 without any), and the matrix
    the nearest one without negative eigenvalues.

    Raises:
        ValueError: as `regress`, for a column.
    """
    spoke = targets.isfinite()
    fits = [
        regress(inputs[rows], column[rows, None], "observations")
        for rows, column in zip(spoke.mT, targets.mT, strict=True)
    ]
    B, b = torch.cat([fit[0] for fit in fits]), torch.cat([fit[1] for fit in fits])
    residual = torch.where(spoke, targets - inputs @ B.mT - b, 0)
    rows = spoke.to(residual)
    covariance = residual.mT @ residual / (rows.mT @ rows - inputs.shape[1] - 1).clamp_min(1)
    values, vectors = torch.linalg.eigh(covariance)
    least = 1e-6 * covariance.diagonal().mean()
    return (
        B,
        b,
        (vectors * values.clamp_min(least)) @ vectors.mT if bool(values[0] <= 0) else covariance,
    )


class LearnedKalman(ShownModule):
    """The Kalman filter of `fit_linear`: the best *linear* filter that the training part alone can give.

    It has no hyper-parameters, parameters or buffers; the model is fitted to the memory, in its
    dtype and on its device. With ``allow_missing_sensors`` components of an observation may be NaN:
    the rows of C that belong to them are left out of the update.
    """

    allow_missing_sensors: bool = False

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Nothing to choose."""

    def fit(self, memory: Recording | list[Recording] | None) -> KalmanFilter:
        """The Kalman filter of the linear model fitted to ``memory``.

        Raises:
            ValueError: no memory, or too few points (`fit_linear`).
        """
        if memory is None:
            raise ValueError(
                "LearnedKalman fits its model to a memory: give fit() the training sequences"
            )
        return KalmanFilter(
            fit_linear(memory, allow_missing_sensors=self.allow_missing_sensors),
            allow_missing_sensors=self.allow_missing_sensors,
        )
