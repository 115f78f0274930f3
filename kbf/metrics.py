"""Figures of merit, each with its equation. A mask says which steps count (None: all); padding may hold NaN."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kbf.distributed import Total, alone
from kbf.linalg import cholesky


def mse(
    estimates: Float[Tensor, "*b T d"], states: Float[Tensor, "*b T d"], mask: Bool[Tensor, "*b T"] | None = None
) -> Float[Tensor, "*b"]:
    """Mean over time of ||z_hat_t - z_t||^2, summed over the d components."""
    return _over_time(_difference(estimates, states, mask).square().sum(-1), mask)


class Excess(NamedTuple):
    """The excess of an error over the floor, and its standard error."""

    value: Tensor
    stderr: Tensor


def excess(errors: Float[Tensor, " s"], floors: Float[Tensor, " s"]) -> Excess:
    """mean(errors) / mean(floors) - 1 over s seeds, error and floor of a seed measured on the same sequences.

    The standard error is that of a ratio R of paired means by the delta method: that of the mean of e_i - R f_i, over mean(f).
    With a single seed it is NaN.

    Raises:
        ValueError: no seeds, or a mean floor that is not positive.

    >>> excess(torch.tensor([0.11, 0.23]), torch.tensor([0.1, 0.2])).value
    tensor(0.1333)
    """
    if len(errors) == 0 or not floors.mean() > 0:
        raise ValueError(f"excess needs at least one seed and a positive floor, got {len(errors)} with mean {floors.mean().item()}")
    ratio = errors.mean() / floors.mean()
    residual = errors - ratio * floors
    variance = residual.square().sum() / (len(errors) - 1) if len(errors) > 1 else residual.new_tensor(math.nan)
    return Excess(ratio - 1, (variance / len(errors)).sqrt() / floors.mean())


def angular_error(
    estimates: Float[Tensor, "*b T 2"], states: Float[Tensor, "*b T 2"], mask: Bool[Tensor, "*b T"] | None = None
) -> Float[Tensor, "*b"]:
    """Mean over time of the angle between z_hat_t and z_t in the plane, in [0, pi]; the lengths do not matter."""
    if mask is not None:
        states = torch.where(mask[..., None], states, torch.ones_like(states))
        estimates = torch.where(mask[..., None], estimates, torch.ones_like(estimates))
    cross = estimates[..., 0] * states[..., 1] - estimates[..., 1] * states[..., 0]
    return _over_time(torch.atan2(cross, (estimates * states).sum(-1)).abs(), mask)


def nll(
    states: Float[Tensor, "*b T d"],
    mean: Float[Tensor, "*b T d"],
    covariance: Float[Tensor, "*b T d d"],
    mask: Bool[Tensor, "*b T"] | None = None,
) -> Float[Tensor, "*b"]:
    """Mean over time of -log N(z_t; mean_t, covariance_t).

    Raises:
        NotPositiveDefiniteError: a covariance is singular.
    """
    factor = cholesky(covariance)
    squared = _mahalanobis(_difference(states, mean, mask), factor)
    log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return _over_time(0.5 * (squared + log_det + states.shape[-1] * math.log(2 * math.pi)), mask)


def coverage(
    states: Float[Tensor, "*b T d"],
    mean: Float[Tensor, "*b T d"],
    covariance: Float[Tensor, "*b T d d"],
    level: float = 0.9,
    mask: Bool[Tensor, "*b T"] | None = None,
) -> Float[Tensor, "*b"]:
    """Share of the steps at which z_t lies in the ellipsoid that should hold ``level`` of N(mean_t, covariance_t).

    A well calibrated filter gives ``level``; the ellipsoid is where the chi-square distribution function (d degrees of freedom) of
    (z - mean)^T covariance^-1 (z - mean) is at most ``level``.

    Raises:
        ValueError: level is not between 0 and 1. NotPositiveDefiniteError: a covariance is singular.
    """
    if not 0 < level < 1:
        raise ValueError(f"coverage: level must be between 0 and 1, got {level}")
    squared = _mahalanobis(_difference(states, mean, mask), cholesky(covariance))
    inside = torch.special.gammainc(torch.full_like(squared, states.shape[-1] / 2), squared / 2) <= level
    return _over_time(inside.to(states.dtype), mask)


def effective_sample_size(weights: Float[Tensor, "*b n"], total: Total = alone) -> Float[Tensor, "*b"]:
    """(sum w)^2 / sum w^2: n for equal weights, 1 for a single one; with negative weights it may fall below 1.

    ``total`` adds the sums up over processes that share the weights (`kbf.distributed`).
    """
    return total(weights.sum(-1)).square() / total(weights.square().sum(-1))


def negative_mass(weights: Float[Tensor, "*b n"], total: Total = alone) -> Float[Tensor, "*b"]:
    """Sum of the negative weights, at most 0; ``total`` as in `effective_sample_size`."""
    return total(weights.clamp_max(0).sum(-1))


def _difference(a: Tensor, b: Tensor, mask: Tensor | None) -> Tensor:
    """The difference, zero where the mask is False (so that NaN in the padding reaches neither the value nor the gradient)."""
    return a - b if mask is None else torch.where(mask[..., None], a - b, torch.zeros_like(a))


def _over_time(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the last dimension, of the steps in the mask."""
    if mask is None:
        return values.mean(-1)
    return torch.where(mask, values, torch.zeros_like(values)).sum(-1) / mask.sum(-1)


def _mahalanobis(difference: Tensor, factor: Tensor) -> Tensor:
    """||L^-1 difference||^2."""
    return torch.linalg.solve_triangular(factor, difference[..., None], upper=False)[..., 0].square().sum(-1)
