"""What the weights of an embedding say of it, and how they are scaled to a given sum."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

LEAST_SHARE = 0.05
"""Least sum of weights, as a share of the sum of their absolute values, by which weights are divided; it is usually 0.5 to 1."""


def effective_sample_size(weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """(sum w)^2 / sum w^2: n for equal weights, 1 for a single one; with negative weights it may fall below 1."""
    return weights.sum(-1).square() / weights.square().sum(-1)


def negative_mass(weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Sum of the negative weights, at most 0."""
    return weights.clamp_max(0).sum(-1)


def mass(weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b 2"]:
    """The sum of the weights and that of their absolute values: all that `normalised` needs to know of all points."""
    return torch.stack([weights.sum(-1), weights.abs().sum(-1)], -1)


def divisor(masses: Float[Tensor, "*b 2"]) -> tuple[Bool[Tensor, "*b 1"], Float[Tensor, "*b 1"]]:
    """Whether weights of this `mass` cannot be divided by their sum, and that sum, or 1 where they cannot.

    They cannot where positive and negative ones nearly cancel (`LEAST_SHARE`): the estimate might
    come out far from all points. NaN counts as divisible, so that it stays visible.
    """
    sums, sizes = masses.split(1, -1)
    cancel = sums <= (LEAST_SHARE * sizes).clamp_min(torch.finfo(masses.dtype).tiny)
    return cancel, sums.masked_fill(cancel, 1)


def normalised(
    weights: Float[Tensor, "*b n"],
    masses: Float[Tensor, "*b 2"],
    otherwise: Float[Tensor, "*b n"],
    to: int = 1,
) -> Float[Tensor, "*b n"]:
    """Weights scaled to the sum ``to``; ``otherwise`` where they cannot be (`divisor`).

    Args:
        weights: w ``*b n``, those of some of the points or of all.
        masses: `mass` of all.
        otherwise: ``*b n``, to fall back to.
        to: the wanted sum.
    """
    cancel, sums = divisor(masses)
    return torch.where(cancel, otherwise, weights * (to / sums))


def with_sum(
    weights: Float[Tensor, "*b n"], total: Float[Tensor, "*b 1"], to: int
) -> Float[Tensor, "*b n"]:
    """Weights of which none is negative, scaled to the sum ``to``; those that are all 0 stay so.

    Args:
        weights: w ``*b n``, those of some of the points or of all. total: the sum of all. to: the
            wanted one.
    """
    return weights * (total.clamp_min(torch.finfo(total.dtype).tiny).reciprocal() * to)
