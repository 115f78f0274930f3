"""The operators of a Kernel Bayes Filter: what is constant in time, made once from the memory.

P moves weights one step in time, and A turns a predicted embedding into a density ratio at the
memory points. Each is made from full Gram matrices, or from features F of the memory points, G_Z =
F F^T ("primal"): then it costs O(n r) a step. The third part of a step, the rule over the memory's
observations, is in `kbf.filters.kernel.update.rule`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kbf.filters.kernel.moment_matching import match_means
from kbf.recording import Transitions
from kbf.rkhs.linalg import ROUNDING, psd_solve, two_factors
from kbf.runtime.distributed import OverPoints


class Operator(OverPoints):
    """A linear map of weights, w -> left (right^T w): ``n r`` twice; dense when right is None (then left is ``n n``)."""

    left: Tensor
    right: Tensor | None

    def __init__(
        self, left: Float[Tensor, "n r"], right: Float[Tensor, "n r"] | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("left", left)
        self.register_buffer("right", right)

    def forward(self, w: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """left (right^T w), for one or many vectors of weights."""
        return (
            w @ self.left.mT if self.right is None else self.reduce(w @ self.right) @ self.left.mT
        )


def compose(outer: nn.Module | None, inner: nn.Module) -> Operator | None:
    """w -> outer (inner w) as one operator, where both are of low rank: half the work. None where they are not."""
    if (
        not (isinstance(outer, Operator) and isinstance(inner, Operator))
        or outer.right is None
        or inner.right is None
    ):
        return None
    composed = Operator(outer.left @ outer.reduce(outer.right.mT @ inner.left), inner.right)
    composed.reduce = outer.reduce
    return composed


def shortened(dense: Operator) -> Operator:
    """A dense operator in float32 as one of low rank (`kbf.rkhs.linalg.two_factors`), where that has fewer numbers to read."""
    factors = two_factors(dense.left, ROUNDING) if dense.left.dtype == torch.float32 else None
    return dense if factors is None else Operator(factors[0], factors[1].mT.contiguous())


class Covariance(NamedTuple):
    """sum_i f_i f_i^T ``r r`` over some points, and how many they are."""

    total: Tensor
    points: int


def covariance_of(features: Float[Tensor, "n r"]) -> Covariance:
    """F^T F and n, of the points whose features are the rows of F."""
    return Covariance(features.mT @ features, len(features))


# P, the transition


def transition_operator(
    gram: Float[Tensor, "n n"], pairs: Transitions, reg: float | Tensor
) -> Operator:
    """P, the conditional mean embedding of the next state: row target(i) of P is row i of (G_ss + m reg I)^-1 G_s:.

    Args:
        gram: G_Z ``n n``.
        pairs: m transitions (source, target).
        reg: lambda'.

    Raises:
        NotPositiveDefiniteError: with m, reg and the smallest eigenvalue.

    References: Xu et al. (2022), Algorithm 2, step 4; Fukumizu et al., equation 18, the two factors
    on the right.
    """
    source = gram[pairs.source]
    solved = psd_solve(source[:, pairs.source], source, reg=len(pairs.source) * reg)
    return Operator(torch.zeros_like(gram).index_copy(0, pairs.target, solved))


def transition_operator_primal(
    features: Float[Tensor, "n r"],
    pairs: Transitions,
    reg: float | Tensor,
    covariance: Covariance | None = None,
) -> Operator:
    """P from features, G_Z = F F^T: rows F_s (F_s^T F_s + m reg I_r)^-1 on the left, F on the right.

    Args:
        features: F ``n r``.
        pairs: m transitions (source, target).
        reg: lambda'.
        covariance: F_s^T F_s and m, where the sources are not those of ``pairs`` alone.

    Raises:
        NotPositiveDefiniteError: with r, m reg and the smallest eigenvalue.
    """
    source = features[pairs.source]
    total, m = covariance or covariance_of(source)
    solved = psd_solve(total, source.mT, reg=m * reg).mT
    return Operator(torch.zeros_like(features).index_copy(0, pairs.target, solved), features)


def density_transition(
    log_density: Float[Tensor, "n n"],
    mass: Float[Tensor, " n"],
    points: Float[Tensor, "n d"],
    means: Float[Tensor, "n d"],
) -> Operator:
    """P from a transition density: points weighed by volume times density, each column tilted to have the mean E[z' | z_j].

        P_ij = v_i q(z_i | z_j) exp(l_j . z_i) / sum_k v_k q(z_k | z_j) exp(l_j . z_k),    v_i = m_i / p(z_i),
        sum_i P_ij z_i = E[z' | z_j]

    p(z_i) = sum_k m_k q(z_i | z_k) is the density of the memory after a move, and v_i the volume
    that point i stands for. Where moves are small beside the gaps between points, these weights
    alone stick to points or run ahead: the tilt (`kbf.filters.kernel.moment_matching`) makes every
    predicted mean exact (Z^T P = E[z' | z], a column's sum is 1). On a fine memory it hardly
    matters. So P w is the predicted embedding as a weighted sample of the memory, and n P w, n m_i
    r_i at point i, what the rule needs (where each point counts 1/n): the operator A is then n I.

    Args:
        log_density: log q(z_i | z_j), row i the target, column j the source; a constant is of no
            matter.
        mass: m ``n``, the share of the memory's distribution that each point stands for, sum 1; 1/n
            for a plain sample.
        points: z ``n d``. means: E[z' | z_j] ``n d``.
    """
    log_mass = mass.log()
    log_weight = (
        log_mass[:, None] + log_density - (log_density + log_mass).logsumexp(-1, keepdim=True)
    )
    return Operator(match_means(log_weight.mT, points, means).mT)


# A, the density ratio


def ratio_operator(gram: Float[Tensor, "n n"], reg: float | Tensor) -> Operator:
    """A = n (G_Z + n reg I)^-1 G_Z: from the weights of a prior over the memory points to gamma at these points.

    Args:
        gram: G_Z ``n n``.
        reg: eta.

    Raises:
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue.

    References: Xu et al. (2022), equation 1, with the prior m_Pi = sum_i w_i phi(z_i).
    """
    n = len(gram)
    return Operator(n * psd_solve(gram, gram, reg=n * reg))


def ratio_operator_primal(
    features: Float[Tensor, "n r"], reg: float | Tensor, covariance: Covariance | None = None
) -> Operator:
    """A from features, G_Z = F F^T: n F (F^T F + n reg I_r)^-1 on the left, F on the right.

    Args:
        features: F ``n r``.
        reg: eta.
        covariance: F^T F and n, where these are not all of the points.

    Raises:
        NotPositiveDefiniteError: with r, n reg and the smallest eigenvalue.
    """
    total, n = covariance or covariance_of(features)
    return Operator(n * psd_solve(total, features.mT, reg=n * reg).mT, features)


class RatioOfWeights(nn.Module):
    """A density ratio that is no linear map of the weights: w -> r(points, w, eta, alpha) at the memory points."""

    points: Tensor
    reg: Tensor
    form: Callable[..., Tensor]
    alpha: float

    def __init__(
        self,
        ratio: Callable[..., Tensor],
        points: Float[Tensor, "n m"],
        reg: float | Tensor,
        alpha: float,
    ) -> None:
        """The ratio of a memory.

        Args:
            ratio: a form of `kbf.rkhs.ratios.Ratio`.
            points: what it needs to know of the memory points: G_Z ``n n`` for a dense form, F ``n
                r`` for a primal one.
            reg: eta.
            alpha: of the relative ratio.
        """
        super().__init__()
        self.register_buffer("points", points)
        self.register_buffer("reg", torch.as_tensor(reg, dtype=points.dtype))
        self.form, self.alpha = ratio, alpha

    def forward(self, w: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """The ratio of the embedding with weights w, at the memory points."""
        return self.form(self.points, w, self.reg, self.alpha)


class UnitRatio(nn.Module):
    """The ratio r = 1, whatever the prediction: the filter becomes a chain of regressions ("COND")."""

    def forward(self, w: Tensor) -> Tensor:
        """A ratio of 1 at each memory point."""
        return torch.ones_like(w)
