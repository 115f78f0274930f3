"""Smoothing and prediction of a hidden Markov chain, in parallel over time.

alpha_t(j) = sum_i alpha_{t-1}(i) P(i, j) l_t(j) and beta_t(i) = sum_j P(i, j) l_{t+1}(j)
beta_{t+1}(j) are products of the matrices P diag(l_t), computed by a scan.

References: Rabiner (1989), equations 19 to 27 and 37; Blelloch (1990), for scans.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

# Least log likelihood of a condition, relative to that of the likeliest one: products of three
# such numbers are positive in double precision.
MIN_LOG_RATIO = -200.0


class Smoothed(NamedTuple):
    """Probabilities of a chain given all observations.

    Attributes:
        marginals: ``b n k``, of the condition in each step.
        transitions: ``b k k``, expected numbers of transitions from i to j.
        log_predictive: ``b n``, log p(x_t | x_1, ..., x_{t-1}).
    """

    marginals: Tensor
    transitions: Tensor
    log_predictive: Tensor


def smoothed_chain(
    logs: Float[Tensor, "b n k"],
    P: Float[Tensor, "b k k"],
    start: Float[Tensor, "b k"],
    lengths: list[int],
) -> Smoothed:
    """Return the smoothed probabilities of chains with k conditions.

    Args:
        logs: log likelihood of each step in each condition.
        P: transition probabilities, rows sum to 1.
        start: probabilities in the first step of a recording.
        lengths: of the recordings, which follow each other along n.
    """
    most = logs.amax(-1, keepdim=True)
    likelihood = (logs - most).clamp_min(MIN_LOG_RATIO).exp()
    first = torch.zeros(logs.shape[1], dtype=torch.bool, device=logs.device)
    first[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    step = torch.where(first[:, None, None], start[:, None, None], P[:, None])
    M = step * likelihood[..., None, :]
    alpha = products(M)[..., 0, :]  # all rows are equal, as those of the first matrix are
    alpha = alpha / alpha.sum(-1, keepdim=True)
    beta = torch.ones_like(alpha)
    later = products(M.flip(1).mT).flip(1).mT  # M_t M_{t+1} ... M_n
    beta[:, :-1] = later[:, 1:].sum(-1)
    marginals = alpha * beta
    marginals = marginals / marginals.sum(-1, keepdim=True)
    pairs = alpha[:, :-1, :, None] * M[:, 1:] * beta[:, 1:, None]
    pairs = pairs / pairs.sum((-2, -1), keepdim=True).clamp_min(torch.finfo(pairs.dtype).tiny)
    transitions = (pairs * ~first[1:, None, None]).sum(1)
    before = alpha.roll(1, 1)
    prior = torch.where(
        first[:, None], start[:, None], (before[..., None, :] @ P[:, None])[..., 0, :]
    )
    predictive = (prior * likelihood).sum(-1).log() + most[..., 0]
    return Smoothed(marginals, transitions, predictive)


def products(M: Float[Tensor, "b n k k"]) -> Float[Tensor, "b n k k"]:
    """Return M_1 M_2 ... M_t for each t, each divided by its largest element.

    Of sqrt(n) blocks the products are computed at once, then those of the blocks before each one.
    """
    b, n, k = M.shape[:3]
    width = math.isqrt(n - 1) + 1
    eye = torch.eye(k, dtype=M.dtype, device=M.device)
    rest = eye.expand(b, -n % width, k, k)
    blocks = torch.cat([M, rest], 1).unflatten(1, (-1, width)).permute(2, 3, 4, 1, 0)
    inside = running(blocks)  # width k k blocks b
    totals = running(inside[-1].permute(2, 0, 1, 3))
    before = torch.cat([eye[None, ..., None].expand(1, k, k, b), totals[:-1]])
    left = before.permute(1, 2, 0, 3)[:, :, None]  # k k 1 blocks b
    found = joined(left, inside.movedim(0, 2))
    return found.permute(4, 3, 2, 0, 1).flatten(1, 2)[:, :n]


def running(M: Float[Tensor, "n k k *c"]) -> Float[Tensor, "n k k *c"]:
    """Return M_1 M_2 ... M_t for each t, one after the other."""
    found = [M[0] / M[0].amax((0, 1))]
    for each in M[1:].contiguous():
        found.append(joined(found[-1], each))
    return torch.stack(found)


def joined(
    left: Float[Tensor, "k k *c"], right: Float[Tensor, "k k *e"]
) -> Float[Tensor, "k k *f"]:
    """Return products of matrices, each divided by its largest element."""
    found = (left[:, :, None] * right).sum(1)
    return found / found.amax((0, 1))
