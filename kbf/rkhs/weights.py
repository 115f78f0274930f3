"""Diagnostics of the weights of an embedding, and their normalisation to sum 1."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Smallest sum of weights over the sum of their absolute values for a division; often 0.5 to 1.
MIN_SHARE_OF_SUM = 0.05


def effective_sample_size(weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return (sum w)^2 / sum w^2: n for equal weights, 1 for a single one.

    With negative weights it may fall below 1.
    """
    return weights.sum(-1).square() / weights.square().sum(-1)


def negative_mass(weights: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Return the sum of the negative weights, at most 0."""
    return weights.clamp_max(0).sum(-1)


def divisor(weights: Float[Tensor, "*b n"]) -> tuple[Bool[Tensor, "*b 1"], Float[Tensor, "*b 1"]]:
    """Return whether weights cancel, and their sum (1 where they cancel).

    Weights cancel if their sum is at most `MIN_SHARE_OF_SUM` of the sum of their absolute values:
    divided by it, they might put the estimate far from all points. NaN does not count as
    cancelling, so that it propagates.
    """
    sums, sizes = weights.sum(-1, keepdim=True), weights.abs().sum(-1, keepdim=True)
    cancel = sums <= (MIN_SHARE_OF_SUM * sizes).clamp_min(torch.finfo(weights.dtype).tiny)
    return cancel, sums.masked_fill(cancel, 1)


def normalised(
    weights: Float[Tensor, "*b n"], otherwise: Float[Tensor, "*b n"]
) -> Float[Tensor, "*b n"]:
    """Return weights divided by their sum; ``otherwise`` where they cancel (`divisor`).

    >>> normalised(torch.tensor([[3.0, -1.0], [1.0, -1.0]]), torch.full((2, 2), 0.5))
    tensor([[ 1.5000, -0.5000],
            [ 0.5000,  0.5000]])
    """
    cancel, sums = divisor(weights)
    return torch.where(cancel, otherwise, weights * sums.reciprocal())
