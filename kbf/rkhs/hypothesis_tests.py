"""Distances of distributions in an RKHS, MMD and HSIC, with permutation tests.

The maximum mean discrepancy (MMD) is the distance of two embeddings; with a characteristic kernel
it is 0 for equal distributions only. The Hilbert-Schmidt independence criterion (HSIC) is the
squared MMD of a joint distribution and the product of its marginals. The tests compare the
statistic with its values after permutations, under which the points are exchangeable if the
hypothesis is true.

Successive steps of a recording are not exchangeable. ``block`` permutes blocks of successive points
as a whole; choose blocks that are longer than the dependence lasts.

References: Gretton, Borgwardt, Rasch, Schoelkopf and Smola (2012), A kernel two-sample test;
Gretton, Fukumizu, Teo, Song, Schoelkopf and Smola (2007), A kernel statistical test of
independence.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.rkhs.kernels import Kernel

# Permutations that are computed at a time, which bounds the arrays.
PERMUTATIONS_AT_A_TIME = 256

# Permuted statistics count as at least the observed one up to this relative difference, which is
# rounding: the identity is among the permutations.
ROUNDING = 1e-10


class PermutationTest(NamedTuple):
    """A statistic, and the share of permutations whose statistic is at least as large.

    The p-value is (1 + number of these) / (1 + permutations): at most alpha with a probability of
    at most alpha if the hypothesis is true.
    """

    statistic: float
    p_value: float


def mmd2(
    kernel: Kernel,
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "m ..."],
    x_weights: Float[Tensor, " n"] | None = None,
    y_weights: Float[Tensor, " m"] | None = None,
) -> Float[Tensor, ""]:
    """Return ||sum_i v_i k(., x_i) - sum_j w_j k(., y_j)||^2, with weights 1/n and 1/m for None.

    Weights may be those of an embedding, of either sign. With 1/n and 1/m it is the biased estimate
    (V-statistic) of Gretton et al. (2012), equation 5.

    >>> from functools import partial
    >>> from kbf.rkhs.kernels import gaussian
    >>> x = torch.tensor([[0.0], [1.0]])
    >>> mmd2(partial(gaussian, bandwidth=1.0), x, x).item()
    0.0
    """
    v = x.new_full((len(x),), 1 / len(x)) if x_weights is None else x_weights
    w = y.new_full((len(y),), 1 / len(y)) if y_weights is None else y_weights
    own = v @ kernel(x, x) @ v + w @ kernel(y, y) @ w
    return (own - 2 * v @ kernel(x, y) @ w).clamp_min(0)


def mmd2_unbiased(
    kernel: Kernel, x: Float[Tensor, "n ..."], y: Float[Tensor, "m ..."]
) -> Float[Tensor, ""]:
    """Return the unbiased estimate of the squared MMD, which may be negative.

    The means of k(x_i, x_j) and k(y_i, y_j) leave i = j out.

    Raises:
        ValueError: fewer than two points in a sample.

    References: Gretton et al. (2012), equation 3.
    """
    n, m = len(x), len(y)
    if min(n, m) < 2:
        raise ValueError(f"mmd2_unbiased needs at least two points of each, got {n} and {m}")
    xx, yy = kernel(x, x), kernel(y, y)
    within_x = (xx.sum() - xx.diagonal().sum()) / (n * (n - 1))
    within_y = (yy.sum() - yy.diagonal().sum()) / (m * (m - 1))
    return within_x + within_y - 2 * kernel(x, y).mean()


def mmd_test(
    kernel: Kernel,
    x: Float[Tensor, "n ..."],
    y: Float[Tensor, "m ..."],
    *,
    permutations: int = 999,
    block: int = 1,
    generator: Generator | None = None,
) -> PermutationTest:
    """Test whether two samples are of one distribution; the statistic is `mmd2`.

    Args:
        kernel: k.
        x: ``n *k``, in the order of time if ``block`` is above 1. y: ``m *k``.
        permutations: their number; the smallest p-value is 1 / (1 + permutations).
        block: number of successive points that stay together. The last points of a sample that fill
            no block are left out.
        generator: draws the permutations.

    Raises:
        ValueError: fewer than two blocks in all of a sample, no permutations, or a block below 1.
    """
    check_permutations("mmd_test", permutations, block)
    k, m = len(x) // block, len(y) // block
    if min(k, m) < 2:
        raise ValueError(
            f"mmd_test: samples of {len(x)} and {len(y)} points have fewer than two blocks of "
            f"{block}"
        )
    points = torch.cat([x[: k * block], y[: m * block]])
    gram = blocks_of(kernel(points, points), block)
    signs = torch.cat([gram.new_full((k,), 1 / k), gram.new_full((m,), -1 / m)])

    def statistic(orders: Tensor) -> Tensor:
        v = signs[orders]
        return ((v @ gram) * v).sum(-1)

    return permutation_test(statistic, k + m, permutations, gram, generator)


def hsic(gram_x: Float[Tensor, "n n"], gram_y: Float[Tensor, "n n"]) -> Float[Tensor, ""]:
    """Return the biased estimate tr(K H L H) / n^2 of HSIC, H = I - 1/n; 0 for independent x, y.

    References: Gretton et al. (2007), equation 4.
    """
    return (centred(gram_x) * gram_y).sum() / len(gram_x) ** 2


def hsic_test(
    gram_x: Float[Tensor, "n n"],
    gram_y: Float[Tensor, "n n"],
    *,
    permutations: int = 999,
    block: int = 1,
    generator: Generator | None = None,
) -> PermutationTest:
    """Test whether x and y are independent; the statistic is `hsic`.

    The hypothesis is tested by permuting the y_i, or blocks of them.

    Args:
        gram_x: K ``n n``. gram_y: L ``n n``, of the same points in the same order.
        permutations: as in `mmd_test`. block: as in `mmd_test`.
        generator: draws the permutations.

    Raises:
        ValueError: as `mmd_test`, or Gram matrices of different sizes.
    """
    check_permutations("hsic_test", permutations, block)
    if gram_x.shape != gram_y.shape:
        raise ValueError(
            f"hsic_test: Gram matrices of {len(gram_x)} and {len(gram_y)} points are no pairs"
        )
    blocks = len(gram_x) // block
    if blocks < 2:
        raise ValueError(f"hsic_test: {len(gram_x)} points have fewer than two blocks of {block}")
    n = blocks * block
    K, L = centred(gram_x[:n, :n]), gram_y[:n, :n]
    within = torch.arange(block, device=K.device)

    def statistic(orders: Tensor) -> Tensor:
        rows = (orders[..., None] * block + within).flatten(1)
        return torch.stack([(K * L[row][:, row]).sum() for row in rows]) / n**2

    return permutation_test(statistic, blocks, permutations, K, generator)


def centred(gram: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """Return H K H, the Gram matrix of the features minus their mean."""
    return gram - gram.mean(0) - gram.mean(1, keepdim=True) + gram.mean()


def blocks_of(gram: Float[Tensor, "n n"], block: int) -> Float[Tensor, "k k"]:
    """Return the means of a Gram matrix over blocks of successive points."""
    k = len(gram) // block
    return gram.reshape(k, block, k, block).mean((1, 3))


def check_permutations(name: str, permutations: int, block: int) -> None:
    """Raise a ValueError for numbers below 1."""
    if permutations < 1 or block < 1:
        raise ValueError(
            f"{name}: permutations and block must be at least 1, got {permutations} and {block}"
        )


def permutation_test(
    statistic: Callable[[Tensor], Tensor],
    items: int,
    permutations: int,
    like: Tensor,
    generator: Generator | None,
) -> PermutationTest:
    """Compare a statistic of the order 0, 1, ... with that of random orders.

    Args:
        statistic: orders ``p items`` -> statistics ``p``.
        items: number of items that are permuted.
        permutations: their number.
        like: a tensor on the device of the statistic.
        generator: draws the orders.
    """
    observed = statistic(torch.arange(items, device=like.device)[None])[0]
    least, larger = observed - ROUNDING * observed.abs(), 0
    for first in range(0, permutations, PERMUTATIONS_AT_A_TIME):
        count = min(PERMUTATIONS_AT_A_TIME, permutations - first)
        orders = torch.stack([torch.randperm(items, generator=generator) for _ in range(count)])
        larger += int((statistic(orders.to(like.device)) >= least).sum())
    return PermutationTest(observed.item(), (1 + larger) / (1 + permutations))
