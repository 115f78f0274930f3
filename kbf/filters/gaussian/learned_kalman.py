"""Kalman filter of a linear model fitted by least squares.

References: Hastie, Tibshirani and Friedman (2009), section 3.2.4 (multivariate regression).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.gaussian.moments import training_moments
from kbf.filters.protocols import WithoutHyperparameters
from kbf.recording import Recording, as_recordings, check_vectors, moves, observed_pairs
from kbf.runtime.errors import FitError, fit_errors


@fit_errors()
def regress(
    inputs: Float[Tensor, "m d"], targets: Float[Tensor, "m e"], name: str
) -> tuple[Float[Tensor, "e d"], Float[Tensor, " e"], Float[Tensor, "e e"]]:
    """Return B, b and the residual covariance of the least-squares fit y ~ B u + b.

    The residual covariance is sum r r^T / (m - d - 1). Where inputs are linearly dependent, B is
    the solution of least norm.

    Raises:
        FitError: fewer than d + 1 + e points, with which the residual covariance would be
            singular. The message names the points by ``name``.
    """
    (m, d), e = inputs.shape, targets.shape[1]
    if m < d + 1 + e:
        raise FitError(
            f"a linear model of {name} with {d} inputs and {e} outputs needs at least "
            f"{d + 1 + e} of them, got {m}"
        )
    B = (torch.linalg.pinv(inputs - inputs.mean(0)) @ (targets - targets.mean(0))).mT
    b = targets.mean(0) - B @ inputs.mean(0)
    residual = targets - inputs @ B.mT - b
    return B, b, residual.mT @ residual / (m - d - 1)


def fit_linear(
    memory: Recording | list[Recording] | None, *, allow_missing_sensors: bool = False
) -> LinearModel:
    """Return the least-squares fit of z' = A z + B u + a + N(0, Q) and x = C z + c + N(0, R).

    Transitions do not cross the end of a recording. Masked observations are not used. m0 and P0 are
    the mean and covariance of the training states. With ``allow_missing_sensors`` entries of
    observations may be NaN (`regress_columns`).

    Raises:
        ValueError: observations that are not vectors, or fewer than 2 d + k + 1 transitions or
            d + 1 + q observations.
    """
    sequences = as_recordings(memory, allow_missing_sensors=allow_missing_sensors)
    check_vectors(sequences, "a linear model")
    z, z_next, u = moves(sequences)
    z_seen, x = observed_pairs(sequences)
    AB, a, Q = regress(z if u is None else torch.cat([z, u], -1), z_next, "transitions")
    A, B = AB[:, : z.shape[1]], None if u is None else AB[:, z.shape[1] :]
    fit = regress_columns if allow_missing_sensors else regress
    C, c, R = fit(z_seen, x, "observations")
    return LinearModel(A, a, Q, C, c, R, *training_moments(sequences), B)


def regress_columns(
    inputs: Float[Tensor, "m d"], targets: Float[Tensor, "m e"], name: str
) -> tuple[Float[Tensor, "e d"], Float[Tensor, " e"], Float[Tensor, "e e"]]:
    """Return `regress` for targets with NaN: each column is fitted to the rows where it is finite.

    The covariance of two residuals is estimated from the rows that have both, and is 0 where there
    are none. Non-positive eigenvalues of the matrix are replaced by 1e-6 of its mean variance.

    Raises:
        ValueError: as `regress`, for a column.
    """
    seen = targets.isfinite()
    fits = [
        regress(inputs[rows], column[rows, None], name)
        for rows, column in zip(seen.mT, targets.mT, strict=True)
    ]
    B, b = torch.cat([fit[0] for fit in fits]), torch.cat([fit[1] for fit in fits])
    residual = torch.where(seen, targets - inputs @ B.mT - b, 0)
    rows = seen.to(residual)
    covariance = residual.mT @ residual / (rows.mT @ rows - inputs.shape[1] - 1).clamp_min(1)
    values, vectors = torch.linalg.eigh(covariance)
    if bool(values[0] <= 0):
        covariance = (vectors * values.clamp_min(1e-6 * covariance.diagonal().mean())) @ vectors.mT
    return B, b, covariance


class LearnedKalman(WithoutHyperparameters):
    """The Kalman filter of the linear model that `fit_linear` fits to the training recordings.

    It has neither hyper-parameters nor parameters or buffers. The filter has the dtype and the
    device of the recordings. With ``allow_missing_sensors`` components of an observation may be
    NaN; the update leaves their rows of C out.
    """

    allow_missing_sensors: bool = False

    def fit(self, memory: Recording | list[Recording] | None) -> KalmanFilter:
        """Return the Kalman filter of the linear model fitted to ``memory``.

        Raises:
            ValueError: no memory, or too few points (`fit_linear`).
        """
        missing = self.allow_missing_sensors
        return KalmanFilter(
            fit_linear(memory, allow_missing_sensors=missing), allow_missing_sensors=missing
        )
