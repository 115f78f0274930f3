"""Resampling of weighted particles.

`systematic` and `multinomial` return m indices for each element of a batch ``b``; the expected
count of index k is m w_k, with normalised weights w. They invert the cumulative weights at points
of [0, 1), which they draw in different ways. `soft` is differentiable in the weights. Cumulative
sums are in float64, so that 20,000 float32 weights are resampled exactly.

References: Douc, Cappe and Moulines (2005), a comparison of the schemes.
"""

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor


def systematic(
    log_weights: Float[Tensor, "b P"],
    generator: Generator | None = None,
    *,
    draws: int | None = None,
) -> Int[Tensor, "b m"]:
    """Return m = P (or ``draws``) indices; k occurs floor or ceil of m w_k times.

    The points are (i + u) / m with one uniform number u for each element of the batch. Since they
    are equidistant, no search is required: N_k = floor(m cdf_k + 1 - u) of them are below cdf_k,
    and the index of point i is the number of k with N_k <= i.

    >>> systematic(torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log())
    tensor([[0, 0, 1, 2]])
    """
    b, m = len(log_weights), draws or log_weights.shape[1]
    margin = m * torch.finfo(torch.float64).eps  # keeps all points in [0, 1)
    u = torch.rand(
        b, 1, dtype=torch.float64, device=log_weights.device, generator=generator
    ).clamp_(margin, 1 - margin)
    left = (m * cumulative(log_weights) + (1 - u)).long().clamp_(0, m)  # NaN gives an index, too
    return left.new_zeros(b, m + 1).scatter_add_(1, left, torch.ones_like(left)).cumsum(1)[:, :-1]


def multinomial(
    log_weights: Float[Tensor, "b P"],
    generator: Generator | None = None,
    *,
    draws: int | None = None,
) -> Int[Tensor, "b m"]:
    """Return P (or ``draws``) independent draws, in ascending order; their counts vary the most."""
    b, P = log_weights.shape
    u = torch.rand(
        b, draws or P, dtype=torch.float64, device=log_weights.device, generator=generator
    )
    return invert(log_weights, u.sort(-1).values)


def soft(
    log_weights: Float[Tensor, "b P"], alpha: float, generator: Generator | None = None
) -> tuple[Int[Tensor, "b P"], Float[Tensor, "b P"]]:
    """Return indices drawn from q_i = alpha w_i + (1 - alpha) / P, and log weights log w_i / q_i.

    The weights are normalised. The choice has no gradient; the weights have one where alpha < 1.
    alpha = 1 is `systematic` with equal weights.

    References: Karkus, Hsu and Lee (2018), Particle Filter Networks, equation 6.
    """
    log_q = (alpha * log_weights.softmax(-1) + (1 - alpha) / log_weights.shape[1]).log()
    chosen = systematic(log_q, generator)
    return chosen, (log_weights.gather(1, chosen) - log_q.gather(1, chosen)).log_softmax(-1)


def invert(log_weights: Float[Tensor, "b P"], points: Float[Tensor, "b m"]) -> Int[Tensor, "b m"]:
    """Return the indices k with cdf_{k-1} <= point < cdf_k.

    Weights need not be normalised. An index of weight zero is never returned.
    """
    points = points.clamp_max(1 - torch.finfo(torch.float64).eps)
    return torch.searchsorted(cumulative(log_weights), points.contiguous(), right=True)


def cumulative(log_weights: Float[Tensor, "b P"]) -> Float[Tensor, "b P"]:
    """Return cdf_k = sum_{j <= k} w_j, of which the last is 1, in float64 without gradients."""
    cdf = log_weights.detach().double().softmax(-1).cumsum(-1)
    return cdf / cdf[:, -1:]


def effective_sample_size(log_weights: Float[Tensor, "b P"]) -> Float[Tensor, " b"]:
    """Return (sum w)^2 / sum w^2, between 1 and P; NaN where every weight is zero.

    Weights need not be normalised.

    >>> effective_sample_size(torch.zeros(1, 8))
    tensor([8.])

    References: Kong, Liu and Wong (1994).
    """
    return log_weights.softmax(-1).square().sum(-1).reciprocal()
