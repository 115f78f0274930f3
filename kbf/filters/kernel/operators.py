"""Linear operators of the Kernel Bayes Filter: the transition P and the density ratio A.

Both are constant in time and are computed once from the memory. P maps the weights of the belief
to those of the prediction, and A maps the weights of the prediction to a density ratio at the
memory points. Each is computed from full Gram matrices, or from features F of the memory points
with G_Z = F F^T ("primal"), in which case a step costs O(n r). The third part of a step, the rule
over the memory's observations, is in `kbf.filters.kernel.update.rule`.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kbf.filters.kernel.moment_matching import match_means
from kbf.recording import Transitions
from kbf.rkhs.linalg import ROUNDING, psd_solve, two_factors
from kbf.runtime.html_repr import ShownModule


class Operator(ShownModule):
    """A linear map of weights, w -> left (right^T w); w -> left w if ``right`` is None.

    Attributes:
        left: ``n r``, or ``n n`` for a dense operator.
        right: ``n r``, or None.
    """

    left: Tensor
    right: Tensor | None

    def __init__(
        self, left: Float[Tensor, "n r"], right: Float[Tensor, "n r"] | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("left", left)
        self.register_buffer("right", right)

    def forward(self, w: Float[Tensor, "*b n"]) -> Float[Tensor, "*b n"]:
        """Return left (right^T w) for one or many weight vectors."""
        return (w if self.right is None else w @ self.right) @ self.left.mT


def compose(outer: nn.Module | None, inner: nn.Module) -> Operator | None:
    """Return w -> outer (inner w) as one operator of low rank, or None unless both have one.

    The composition takes half the work of the two operators.
    """
    if (
        isinstance(outer, Operator)
        and isinstance(inner, Operator)
        and outer.right is not None
        and inner.right is not None
    ):
        return Operator(outer.left @ (outer.right.mT @ inner.left), inner.right)
    return None


def low_rank(dense: Operator) -> Operator:
    """Return a float32 operator in factors of low rank where these have fewer entries.

    The error is that of `kbf.rkhs.linalg.two_factors`; other operators are returned unchanged.
    """
    factors = two_factors(dense.left, ROUNDING) if dense.left.dtype == torch.float32 else None
    return dense if factors is None else Operator(factors[0], factors[1].mT.contiguous())


# P, the transition


def transition_operator(
    gram: Float[Tensor, "n n"], pairs: Transitions, reg: float | Tensor
) -> Operator:
    """Return P, the conditional mean embedding of the next state given the present one.

    Row target(i) of P is row i of (G_ss + m reg I)^-1 G_s:, with s the sources; other rows are 0.

    Args:
        gram: G_Z ``n n``.
        pairs: m transitions (source, target).
        reg: lambda'.

    Raises:
        NotPositiveDefiniteError: with m, reg and the smallest eigenvalue.

    References: Xu et al. (2022), Algorithm 2, step 4; Fukumizu et al. (2013), equation 18, the two
    factors on the right.
    """
    source = gram[pairs.source]
    solved = psd_solve(source[:, pairs.source], source, reg=len(pairs.source) * reg)
    return Operator(torch.zeros_like(gram).index_copy(0, pairs.target, solved))


def transition_operator_primal(
    features: Float[Tensor, "n r"], pairs: Transitions, reg: float | Tensor
) -> Operator:
    """Return P from features, G_Z = F F^T: left F_s (F_s^T F_s + m reg I_r)^-1, right F.

    Args:
        features: F ``n r``.
        pairs: m transitions (source, target).
        reg: lambda'.

    Raises:
        NotPositiveDefiniteError: with r, m reg and the smallest eigenvalue.
    """
    source = features[pairs.source]
    solved = psd_solve(source.mT @ source, source.mT, reg=len(source) * reg).mT
    return Operator(torch.zeros_like(features).index_copy(0, pairs.target, solved), features)


def density_transition(
    log_density: Float[Tensor, "n n"],
    mass: Float[Tensor, " n"],
    points: Float[Tensor, "n d"],
    means: Float[Tensor, "n d"],
) -> Operator:
    """Return P from a transition density, with exact conditional means.

        P_ij = v_i q(z_i | z_j) exp(l_j . z_i) / sum_k v_k q(z_k | z_j) exp(l_j . z_k),
        v_i = m_i / p(z_i),
        sum_i P_ij z_i = E[z' | z_j]

    p(z_i) = sum_k m_k q(z_i | z_k) is the density of the memory after a transition, and v_i the
    volume that point i represents. If transitions are small compared with the distances between
    points, the weights v_i q(z_i | z_j) alone give a mean that stays at a point or runs ahead. The
    exponential tilt (`kbf.filters.kernel.moment_matching`) makes every predicted mean exact (Z^T P
    = E[z' | z], columns have sum 1); on a fine memory it has hardly any effect. P w is then the
    predicted embedding as a weighted sample of the memory, and n P w = n m_i r_i at point i is what
    the rule requires, in which each point has weight 1/n: the operator A is n I.

    Args:
        log_density: log q(z_i | z_j), row i the target, column j the source, up to one constant.
        mass: m ``n``, the share of the memory's distribution that each point represents, with sum
            1; 1/n for an unweighted sample.
        points: z ``n d``.
        means: E[z' | z_j] ``n d``.
    """
    log_mass = mass.log()
    log_weight = (
        log_mass[:, None] + log_density - (log_density + log_mass).logsumexp(-1, keepdim=True)
    )
    return Operator(match_means(log_weight.mT, points, means).mT)


# A, the density ratio


def ratio_operator(gram: Float[Tensor, "n n"], reg: float | Tensor) -> Operator:
    """Return A = n (G_Z + n reg I)^-1 G_Z, from weights of the prior to gamma at the memory points.

    Args:
        gram: G_Z ``n n``.
        reg: eta.

    Raises:
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue.

    References: Xu et al. (2022), equation 1, with the prior m_Pi = sum_i w_i phi(z_i).
    """
    n = len(gram)
    return Operator(n * psd_solve(gram, gram, reg=n * reg))


def ratio_operator_primal(features: Float[Tensor, "n r"], reg: float | Tensor) -> Operator:
    """Return A from features, G_Z = F F^T: left n F (F^T F + n reg I_r)^-1, right F.

    Args:
        features: F ``n r``.
        reg: eta.

    Raises:
        NotPositiveDefiniteError: with r, n reg and the smallest eigenvalue.
    """
    n = len(features)
    return Operator(n * psd_solve(features.mT @ features, features.mT, reg=n * reg).mT, features)


class RatioOfWeights(nn.Module):
    """A density ratio that is not linear in the weights: w -> r(points, w, eta, alpha)."""

    points: Tensor
    reg: Tensor

    def __init__(
        self,
        ratio: Callable[..., Tensor],
        points: Float[Tensor, "n m"],
        reg: float | Tensor,
        alpha: float,
    ) -> None:
        """Bind a ratio to the memory points.

        Args:
            ratio: a form of `kbf.rkhs.ratios.Ratio`.
            points: G_Z ``n n`` for a dense form, F ``n r`` for a primal one.
            reg: eta.
            alpha: of the relative ratio.
        """
        super().__init__()
        self.register_buffer("points", points)
        self.register_buffer("reg", torch.as_tensor(reg, dtype=points.dtype))
        self.form, self.alpha = ratio, alpha

    def forward(self, w: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Return the ratio of the embedding with weights w at the memory points."""
        return self.form(self.points, w, self.reg, self.alpha)


class UnitRatio(nn.Module):
    """The constant ratio r = 1, with which every observation is regressed on by itself ("COND")."""

    def forward(self, w: Tensor) -> Tensor:
        """Return a ratio of 1 at each memory point."""
        return torch.ones_like(w)
