"""Density ratios r_i ~ pi(z_i) / p(z_i) of a prior to the distribution of the training points.

The prior comes as its embedding: g_i = m_Pi(z_i) = sum_j a_j k_Z(z_i, u_j). A ratio has mean about
1 over the training points, and every ridge is n * reg. `RATIOS` lists those that a filter can use
by name, where the prior is an embedding with weights w over the training points themselves, g = G_Z
w; to add one, write its functions here and give it a row there.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.linalg import cholesky, psd_solve, row_product, safe_sqrt
from kbf.runtime.errors import FitError

Ratios = Float[Tensor, "*b n"]


def tikhonov(
    gram: Float[Tensor, "n n"], prior: Float[Tensor, "*b n"], reg: float | Tensor
) -> Ratios:
    """Weights gamma = n (G_Z + n reg I)^-1 g of the original rule. May be negative.

    Args:
        gram: G_Z ``n n``.
        prior: g ``*b n``, the prior embedding at the training points.
        reg: eta (the original rule's epsilon).

    Raises:
        NotPositiveDefiniteError: G_Z + n reg I is not positive definite, or holds NaN.

    References: Fukumizu et al., equation 12 (step 2 of Figure 1); Xu et al. (2022), equation 1. In
    equation 18 of the former and in Proposition 1 of Johno et al. (2018) stands gamma / n.
    """
    n = gram.shape[-1]
    return n * psd_solve(gram, prior[..., None], reg=n * reg)[..., 0]


def kulsif(gram: Float[Tensor, "n n"], prior: Float[Tensor, "*b n"], reg: float | Tensor) -> Ratios:
    """Return the KuLSIF ratio r = max(0, n (G_Z + n reg I)^-1 g).

    KuLSIF is kernel unconstrained least-squares importance fitting, clipped at zero.

    r minimises sum_i r(z_i)^2 / (2n) - m_Pi(r) + reg/2 ||r||^2 over the RKHS before the clipping;
    arguments and errors as in `tikhonov`.

    References: Kanamori, Suzuki and Sugiyama (2012); Xu et al. (2022), Algorithm 1, step 2.
    """
    return tikhonov(gram, prior, reg).clamp_min(0)


def relative(
    gram: Float[Tensor, "n n"],
    prior_gram: Float[Tensor, "*#b n m"],
    weights: Float[Tensor, "*b m"],
    reg: float | Tensor,
    alpha: float,
) -> Ratios:
    """Return the relative ratio pi / (alpha pi + (1 - alpha) p).

    It is at most 1/alpha and has a lower variance than the ratio itself; alpha = 0 is KuLSIF.

    r minimises alpha/2 sum_j a_j r(u_j)^2 + (1 - alpha)/(2n) sum_i r(z_i)^2 - sum_j a_j r(u_j) +
    reg/2 ||r||^2 over the span of the k_Z(., z_i). Negative a_j would make the first term
    unbounded: there (and only there) they count as zero, a+ = max(0, a). The minimiser is the
    KuLSIF ratio to (1 - alpha) p of a damped prior,

        r = n ((1 - alpha) G + n reg I)^-1 K b,    b_j = a_j - alpha a+_j v_j,    v_j = r(u_j),

    and v solves (I + alpha W A+) v = W a, where W maps b to v: W = K^T G^-1 ((1 - alpha) G / n +
    reg I)^-1 K.

    Args:
        gram: G = G_Z ``n n``.
        prior_gram: K = k_Z(z_i, u_j) ``n m``, or other points u for each of the batch ``*b n m``.
        weights: a ``*b m``.
        reg: eta > 0.
        alpha: in [0, 1).

    Returns:
        ``*b n``, clipped to [0, 1/alpha].

    Raises:
        ValueError: alpha out of range. NotPositiveDefiniteError: as in `tikhonov`.

    References: Yamada et al. (2013), here with the RKHS norm as the penalty.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"relative: alpha must be in [0, 1), got {alpha}")
    n = gram.shape[-1]
    # G = L L^T; the jitter touches W only, where directions of G this small count for nothing
    jitter = 10 * n * torch.finfo(gram.dtype).eps * gram.detach().diagonal().max()
    factor = cholesky(gram, reg=jitter)
    prior_features = torch.linalg.solve_triangular(factor, prior_gram, upper=False)
    W = prior_features.mT @ psd_solve((1 - alpha) / n * factor.mT @ factor, prior_features, reg=reg)
    root = safe_sqrt(weights)
    damping = psd_solve(
        alpha * root[..., :, None] * W * root[..., None, :],
        (root * row_product(weights, W))[..., None],
        reg=1.0,
    )[..., 0]
    damped = weights - alpha * root * damping
    prior = row_product(damped, prior_gram.mT)
    r = n * psd_solve((1 - alpha) * gram, prior[..., None], reg=n * reg)[..., 0]
    return r.clamp(0, 1 / alpha if alpha > 0 else None)


def relative_primal(
    features: Float[Tensor, "n r"],
    prior_features: Float[Tensor, "m r"],
    weights: Float[Tensor, "*b m"],
    reg: float | Tensor,
    alpha: float,
    *,
    check: bool = True,
) -> Ratios:
    """`relative` from features, G = F F^T and K = F U^T, in O((n + m) r^2).

    The minimiser is r(z) = f(z)^T c with

        c = (alpha U^T A+ U + (1 - alpha) / n F^T F + reg I_r)^-1 U^T a,    A+ = diag(max(0, a)).

    Args:
        features: F ``n r``, of the training points.
        prior_features: U ``m r``, of the points of the prior.
        weights: a ``*b m``.
        reg: eta > 0.
        alpha: in [0, 1).
        check: as in `kbf.rkhs.linalg.psd_solve`.

    Returns:
        ``*b n``, clipped to [0, 1/alpha].

    Raises:
        ValueError: alpha out of range. NotPositiveDefiniteError: as in `tikhonov`.
    """
    if not 0 <= alpha < 1:
        raise ValueError(f"relative: alpha must be in [0, 1), got {alpha}")
    of_prior = (prior_features * weights.clamp_min(0)[..., None]).mT @ prior_features
    system = alpha * of_prior + (1 - alpha) / len(features) * features.mT @ features
    c = psd_solve(system, (weights @ prior_features)[..., None], reg=reg, check=check)
    return (features @ c)[..., 0].clamp(0, 1 / alpha if alpha > 0 else None)


def true_ratio(log_prior: Float[Tensor, "*b n"], log_density: Float[Tensor, " n"]) -> Ratios:
    """Return exp(log pi(z_i) - log p(z_i)) of two known densities.

    References: "IW-TrueRatio" of Xu et al. (2022), section 6.1.
    """
    return (log_prior - log_density).exp()


def kulsif_loo(
    gram: Float[Tensor, "n n"],
    cross: Float[Tensor, "n m"],
    gram_prior: Float[Tensor, "m m"],
    reg: float | Tensor,
) -> Float[Tensor, ""]:
    """Return the closed-form leave-one-out score of KuLSIF; lower is better.

    It selects reg and the bandwidth.

    The mean over l = 1 .. min(n, m) of r_{-l}(z_l)^2 / 2 - r_{-l}(u_l), where r_{-l} is fitted
    without z_l and u_l and not clipped:

        r_{-l} = sum_{j != l} k(., u_j) / ((m - 1) reg) + sum_{i != l} c_i k(., z_i),
        c = -(G_{-l} + (n - 1) reg I)^-1 s_{-l} / ((m - 1) reg),    s_i = sum_{j != l} k(z_i, u_j).

    With B = (G + (n - 1) reg I)^-1 computed once, deleting row and column l turns (G_{-l} + ..)^-1
    s_{-l} into B s - B_{:l} (B s)_l / B_ll: O(n^3 + n^2 m) for all l together.

    Args:
        gram: G = k(z_i, z_j) ``n n``.
        cross: k(z_i, u_j) ``n m``.
        gram_prior: k(u_i, u_j) ``m m``, u a sample of the prior.
        reg: eta > 0.

    Raises:
        ValueError: fewer than two training or prior points. NotPositiveDefiniteError: as in
            `tikhonov`.

    References: Kanamori, Suzuki and Sugiyama (2012).
    """
    n, m = cross.shape
    if min(n, m) < 2:
        raise FitError(
            f"kulsif_loo needs at least two training and two prior points, got {n} and {m}"
        )
    pairs = torch.arange(min(n, m), device=gram.device)
    eye = torch.eye(n, dtype=gram.dtype, device=gram.device)
    B = psd_solve(gram, eye, reg=(n - 1) * reg)
    scale = 1 / ((m - 1) * reg)
    s = (cross.sum(1, keepdim=True) - cross)[:, pairs]  # column l: without u_l
    solved = B @ s
    c = -scale * (
        solved - B[:, pairs] * (solved[pairs, pairs] / B[pairs, pairs])
    )  # column l: zero at z_l itself
    at_z = (gram[:, pairs] * c).sum(0) + scale * s[pairs, pairs]
    at_u = (cross[:, pairs] * c).sum(0) + scale * (gram_prior.sum(1) - gram_prior.diagonal())[pairs]
    return (at_z.square() / 2 - at_u).mean()


def relative_coef(
    gram: Float[Tensor, "m m"], n: int, reg: float | Tensor, alpha: float
) -> Float[Tensor, " m"]:
    """Return b of the relative ratio at any x, r(x) = sum_l b_l k(x, p_l) before clipping.

    The ratio is then clipped to [0, 1/alpha].

    r minimises alpha/(2 m') sum_j r(u_j)^2 + (1 - alpha)/(2n) sum_i r(z_i)^2 - 1/m' sum_j r(u_j) +
    reg/2 ||r||^2 over the RKHS, for samples z of p and u of pi. With the pooled points (z, u), d =
    (0, 1/m') and D = diag((1 - alpha)/n, alpha/m'),

        b = (reg I + D G)^-1 d = (d - D^1/2 (reg I + D^1/2 G D^1/2)^-1 D^1/2 G d) / reg.

    alpha = 0 is KuLSIF. `relative` has its centres at the z alone.

    Args:
        gram: G of the pooled points, the z before the u.
        n: how many of them are z.
        reg: eta > 0.
        alpha: in [0, 1).

    Raises:
        ValueError: alpha out of range, or no z or no u. NotPositiveDefiniteError: as in `tikhonov`.

    References: Kanamori, Suzuki and Sugiyama (2012); Yamada et al. (2013), here with the RKHS norm
    as the penalty.
    """
    d, root = _pooled(gram, n, alpha)
    factor = cholesky(root[:, None] * gram * root, reg=reg)
    return (d - root * torch.cholesky_solve((root * (gram @ d))[:, None], factor)[:, 0]) / reg


def relative_loo(
    gram: Float[Tensor, "m m"], n: int, reg: float | Tensor, alpha: float
) -> Float[Tensor, ""]:
    """Return the closed-form leave-one-out score of `relative_coef`; lower is better.

    The minimised sum without its penalty, each point's terms at the r that is fitted without that
    point (weights d, D and reg as they are): r_{-l}(p_l) = (r(p_l) - d_l q_l) / (1 - D_l q_l),
    where q_l is the value at p_l of the fit to d = e_l alone, q = diag(G - G D^1/2 (reg I + D^1/2 G
    D^1/2)^-1 D^1/2 G) / reg. Arguments and errors as in `relative_coef`.
    """
    d, root = _pooled(gram, n, alpha)
    D = root.square()
    half = torch.linalg.solve_triangular(
        cholesky(root[:, None] * gram * root, reg=reg), root[:, None] * gram, upper=False
    )
    fit = (gram @ d - half.mT @ (half @ d)) / reg
    own = (gram.diagonal() - half.square().sum(0)) / reg
    left_out = (fit - d * own) / (1 - D * own)
    return (D * left_out.square() / 2 - d * left_out).sum()


def _pooled(gram: Tensor, n: int, alpha: float) -> tuple[Tensor, Tensor]:
    """The vector d and the square root of the diagonal of D in `relative_coef`, checked."""
    m = len(gram) - n
    if not 0 <= alpha < 1:
        raise ValueError(f"the relative ratio needs alpha in [0, 1), got {alpha}")
    if min(n, m) < 1:
        raise FitError(f"a density ratio needs points of both samples, got {n} and {m}")
    prior = gram.new_tensor([0.0] * n + [1.0] * m)
    return prior / m, (alpha / m * prior + (1 - alpha) / n * (1 - prior)).sqrt()


class Ratio(NamedTuple):
    """A density ratio of an embedding with weights w over the training points, and its properties.

    Without a form, and not linear, it is 1 whatever the prior: each observation is regressed on by
    itself ("COND" of Xu et al.).

    Attributes:
        dense: (G_Z ``n n``, w ``*b n``, eta, alpha) -> ratio ``*b n``.
        primal: (F ``n r`` with G_Z = F F^T, w, eta, alpha) -> the same.
        linear: it is gamma = n (G_Z + n eta I)^-1 G_Z w (`tikhonov`), made once as an operator; cut
            off at 0 unless ``signed``.
        signed: values may be negative.
        reg: default of eta.
    """

    dense: Callable[..., Tensor] | None = None
    primal: Callable[..., Tensor] | None = None
    linear: bool = False
    signed: bool = False
    reg: float = 3e-4

    @property
    def constant(self) -> bool:
        """It is 1 whatever the prior."""
        return not self.linear and self.dense is None and self.primal is None

    def lacks(self, form: Literal["dense", "primal"]) -> bool:
        """Return whether a filter with full Gram matrices (dense) or features (primal) lacks it."""
        return not self.linear and not self.constant and getattr(self, form) is None


def _relative_dense(gram: Tensor, weights: Tensor, reg: float | Tensor, alpha: float) -> Tensor:
    """`relative`, with the prior over the training points."""
    return relative(gram, gram, weights, reg, alpha)


def _relative_primal(
    features: Tensor, weights: Tensor, reg: float | Tensor, alpha: float
) -> Tensor:
    """`relative_primal` likewise, unchecked as in `kbf.rkhs.rules.Rule.primal`."""
    return relative_primal(features, features, weights, reg, alpha, check=False)


RATIOS = {
    "kulsif": Ratio(linear=True),
    "tikhonov": Ratio(linear=True, signed=True),
    "relative": Ratio(_relative_dense, _relative_primal),
    "one": Ratio(),
}
"""The ratios by their names in configurations."""
