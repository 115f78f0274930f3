"""Kernel Bayes' rules: weights of the posterior embedding given one observation.

Each rule returns the weights w ``*b n`` of sum_i w_i k_Z(., z_i). Letters: G = G_X ``n n`` the Gram
matrix of the training observations, g = k_X(X, x) ``*b n`` the new observation against them, gamma
or r ``*b n`` the density ratio of the prior (`kbf.rkhs.ratios`), D = diag(r), n training points.

Each rule has a *dense* form in these, and most have a *primal* form in features, G = Psi Psi^T and
g = Psi psi(x), which costs O(n p^2) instead of O(n^3). The primal forms share one pattern: the
training points enter through the sum C = Psi^T D Psi alone,

    w = D Psi c,    c ``*b p`` solves a p x p system of C and psi(x),

so a primal form is the function that gives c. `RULES` lists the rules by name, with the properties
that determine where each can be used; to add a rule, write its functions here and add a row there.

Every rule is differentiable in all of its arguments. At a ratio of exactly 0 the dense
importance-weighted rule has a kink (it takes negative ratios for 0) and gives the gradient 0; its
primal form is smooth there.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kbf.rkhs.linalg import psd_solve, row_product, safe_sqrt

Weights = Float[Tensor, "*b n"]

# Size of the blocks of features in `weighted_covariance`, which fit in the cache of a CPU.
COVARIANCE_BLOCK = 2**18

# The same on a GPU, where few large blocks take less time.
COVARIANCE_BLOCK_ON_GPU = 2**26

# Batch size from which `weighted_covariance` computes the products of features once for all.
MANY_RATIOS = 128


# Importance weighted


def importance_weighted(
    ratio: Float[Tensor, "*b n"],
    gram: Float[Tensor, "n n"],
    query: Float[Tensor, "*b n"],
    reg: float | Tensor,
) -> Weights:
    """Return the weights of importance-weighted kernel ridge regression.

        w = sqrt(D) (sqrt(D) G sqrt(D) + n reg I)^-1 sqrt(D) g

    With r = 1 it is the conditional mean embedding. The system is symmetric positive definite for
    every reg > 0.

    Args:
        ratio: r ``*b n``.
        gram: G ``n n``.
        query: g ``*b n``.
        reg: lambda.

    Raises:
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue.

    References: Xu et al. (2022), Algorithm 1, step 3, and equation 4. The authors' code calls this
    reg ``reg2``.
    """
    n = gram.shape[-1]
    root = safe_sqrt(ratio)
    system = root[..., :, None] * gram * root[..., None, :]
    return root * psd_solve(system, (root * query)[..., None], reg=n * reg)[..., 0]


def importance_weighted_primal(
    ratio: Float[Tensor, "*b n"],
    features: Float[Tensor, "*#b n p"],
    query: Float[Tensor, "*b p"],
    reg: float | Tensor,
) -> Weights:
    """Return the weights of `importance_weighted` for G = Psi Psi^T, in O(n p^2).

        w = D Psi (Psi^T D Psi + n reg I_p)^-1 psi(x)

    Args:
        ratio: r ``*b n``.
        features: Psi ``n p``, or others for each of the batch ``*b n p``.
        query: psi(x) ``*b p``.
        reg: lambda.

    Raises:
        NotPositiveDefiniteError: with p, n reg and the smallest eigenvalue.

    References: Xu et al. (2022), section 3.3, the last formula (which drops the n before lambda).
    """
    n = features.shape[-2]
    covariance = weighted_covariance(ratio, features)
    return from_coefficients(
        ratio, features, importance_weighted_coefficients(covariance, query, n * reg)
    )


def importance_weighted_coefficients(
    covariance: Float[Tensor, "*b p p"],
    query: Float[Tensor, "*b p"],
    ridge: float | Tensor,
    *,
    check: bool = True,
) -> Float[Tensor, "*b p"]:
    """c = (C + ridge I_p)^-1 psi(x) of the importance-weighted rule, whose ridge is n lambda.

    Args:
        covariance: C = Psi^T D Psi ``*b p p``.
        query: psi(x) ``*b p``.
        ridge: n lambda.
        check: as in `kbf.rkhs.linalg.psd_solve`.
    """
    return psd_solve(covariance, query[..., None], reg=ridge, check=check)[..., 0]


# Original


def original(
    ratio: Float[Tensor, "*b n"],
    gram: Float[Tensor, "n n"],
    query: Float[Tensor, "*b n"],
    delta: float | Tensor,
) -> Weights:
    """Return the weights of the original kernel Bayes' rule, for gamma of either sign.

        w = L G ((L G)^2 + delta I)^-1 L g,    L = diag(gamma)

    Args:
        ratio: gamma ``*b n``, of mean about 1 (`kbf.rkhs.ratios.tikhonov`).
        gram: G ``n n``.
        query: g ``*b n``.
        delta: the ridge, not scaled by n. Where a paper's mu is gamma / n (Johno et al. (2018),
            Theorem 3; Fukumizu et al., equation 19), its delta is this one over n^2.

    References: Fukumizu et al., equation 14 (step 3 of Figure 1); Xu et al. (2022), equation 2. The
    authors' code calls this delta ``reg2``.
    """
    weighted = ratio[..., :, None] * gram
    solved = torch.linalg.solve(_plus_ridge(weighted @ weighted, delta), (ratio * query)[..., None])
    return (weighted @ solved)[..., 0]


def original_primal(
    ratio: Float[Tensor, "*b n"],
    features: Float[Tensor, "n p"],
    query: Float[Tensor, "*b p"],
    delta: float | Tensor,
) -> Weights:
    """Return the weights of `original` for G = Psi Psi^T, in O(n p^2).

        w = L Psi C (C^2 + delta I_p)^-1 psi(x),    C = Psi^T L Psi

    It follows from `original` by (L Psi C Psi^T + delta I)^-1 L Psi = L Psi (C^2 + delta I)^-1.

    Args:
        ratio: gamma ``*b n``.
        features: Psi ``n p``.
        query: psi(x) ``*b p``.
        delta: as in `original`.
    """
    return from_coefficients(
        ratio, features, original_coefficients(weighted_covariance(ratio, features), query, delta)
    )


def original_coefficients(
    covariance: Float[Tensor, "*b p p"], query: Float[Tensor, "*b p"], delta: float | Tensor
) -> Float[Tensor, "*b p"]:
    """c = C (C^2 + delta I_p)^-1 psi(x) of the original rule.

    Args:
        covariance: C = Psi^T L Psi ``*b p p``.
        query: psi(x) ``*b p``.
        delta: as in `original`.
    """
    solved = torch.linalg.solve(_plus_ridge(covariance @ covariance, delta), query[..., None])
    return (covariance @ solved)[..., 0]


def _plus_ridge(a: Float[Tensor, "*b m m"], ridge: float | Tensor) -> Float[Tensor, "*b m m"]:
    """A + ridge I."""
    return a + torch.as_tensor(ridge, dtype=a.dtype, device=a.device) * torch.eye(
        a.shape[-1], dtype=a.dtype, device=a.device
    )


# Without a ridge


def pseudo_inverse(
    ratio: Float[Tensor, "*b n"],
    gram: Float[Tensor, "n n"],
    query: Float[Tensor, "*b n"],
    rtol: float = 1e-10,
) -> Weights:
    """The rule "KBR2", without any ridge: w = (L G)^+ L g, L = diag(gamma).

    Args:
        ratio: gamma ``*b n`` (for KBR2 itself: G_Z^+ g).
        gram: G ``n n``.
        query: g ``*b n``.
        rtol: singular values below rtol times the largest count as zero.

    References: Johno, Nakamoto and Saigo (2018), section 4.1.3.
    """
    weighted = ratio[..., :, None] * gram
    return (torch.linalg.pinv(weighted, rtol=rtol) @ (ratio * query)[..., None])[..., 0]


# What the primal forms share


def from_coefficients(
    ratio: Float[Tensor, "*b n"],
    features: Float[Tensor, "*#b n p"],
    coefficients: Float[Tensor, "*b p"],
) -> Weights:
    """w = D Psi c, the weights of a primal form.

    Args:
        ratio: r ``*b n``.
        features: Psi ``n p``, or others for each of the batch ``*b n p``.
        coefficients: c ``*b p``.
    """
    return ratio * (
        coefficients @ features.mT
        if features.ndim == 2
        else (features @ coefficients[..., None])[..., 0]
    )


def weighted_covariance(
    ratio: Float[Tensor, "*b n"], features: Float[Tensor, "*#b n p"]
) -> Float[Tensor, "*b p p"]:
    """Return C = Psi^T D Psi = sum_i r_i psi_i psi_i^T, computed by blocks of points.

    Points of ratio 0 are left out where this saves time.
    """
    p, batch, on_cpu = (
        features.shape[-1],
        max(1, ratio.shape[:-1].numel()),
        ratio.device.type == "cpu",
    )
    sparse = (
        batch == 1 and p >= 64 and on_cpu and not torch.compiler.is_compiling()
    )  # on a GPU: it would wait
    sparse = sparse and not ratio.requires_grad  # the ratio 0 has a gradient too
    many = features.ndim == 2 and batch >= MANY_RATIOS
    size = max(
        1, (COVARIANCE_BLOCK if on_cpu else COVARIANCE_BLOCK_ON_GPU) // (p * (p if many else batch))
    )
    covariance: Tensor | None = None
    for r, f in zip(ratio.split(size, -1), features.split(size, -2), strict=True):
        if sparse:
            rows = r.flatten().nonzero()[:, 0]
            r, f = r.index_select(-1, rows), f.index_select(-2, rows)
        part = (
            (r @ (f[:, :, None] * f[:, None]).flatten(1)).unflatten(-1, (p, p))
            if many
            else (f * r[..., None]).mT @ f
        )
        covariance = part if covariance is None else covariance + part
    assert covariance is not None
    return covariance


def second_moments(features: Float[Tensor, "n k p"]) -> Float[Tensor, "n t"]:
    """Return the lower triangles of (1/k) sum_j psi_ij psi_ij^T, t = p (p + 1) / 2 columns.

    There is one row for each memory point, which has k observations.

    They are constant in time; `covariance_from_moments` makes C of them.
    """
    p = features.shape[-1]
    row, column = torch.tril_indices(p, p, device=features.device)
    return torch.stack([(f[:, row] * f[:, column]) for f in features.unbind(1)]).mean(0)


def places(p: int, device: torch.device | None = None) -> Int[Tensor, " pp"]:
    """Return the positions of the entries of a symmetric p x p matrix in its lower triangle.

    >>> places(2)
    tensor([0, 1, 1, 2])
    """
    row, column = torch.tril_indices(p, p, device=device)
    place = torch.empty(p, p, dtype=torch.long, device=device)
    place[row, column] = place[column, row] = torch.arange(len(row), device=device)
    return place.flatten()


def covariance_from_moments(
    ratio: Float[Tensor, "*b n"],
    moments: Float[Tensor, "*#b n r"],
    place: Int[Tensor, " pp"],
    basis: Float[Tensor, "r t"] | None = None,
) -> Float[Tensor, "*b p p"]:
    """Return C = sum_i r_i (1/k) sum_j psi_ij psi_ij^T from the `second_moments`.

    It takes one matrix product, or two with ``basis``. Its time does not depend on k and hardly
    depends on the batch.

    Args:
        ratio: r ``*b n``.
        moments: `second_moments` ``n t``, or with ``basis`` the first of their two factors ``n r``.
        place: `places`.
        basis: the second factor, moments @ basis = `second_moments`.
    """
    packed = row_product(ratio, moments)
    packed = packed if basis is None else packed @ basis
    p = math.isqrt(len(place))
    return packed.index_select(-1, place).unflatten(-1, (p, p))


# The table


class Rule(NamedTuple):
    """A rule: its two forms, and the properties that determine where it can be used.

    Attributes:
        dense: (ratio ``*b n``, G ``n n``, g ``*b n``, reg) -> weights ``*b n``.
        primal: (C ``*b p p``, psi(x) ``*b p``, ridge) -> coefficients c ``*b p`` of w = D Psi c,
            the same weights; None where there is no such form. It is for the steps of a filter: a
            failed factorisation gives NaN, to be seen in the end.
        signed: it takes ratios of either sign as they are; others get them cut off at 0.
        ridge_scales_with_n: its ridge is n reg, added to a sum over n points; otherwise reg.
        reg: default of its ridge.
    """

    dense: Callable[..., Tensor]
    primal: Callable[..., Tensor] | None
    signed: bool = False
    ridge_scales_with_n: bool = True
    reg: float = 3e-4

    @property
    def regression(self) -> bool:
        """It is a regression weighted by ratios that are not negative.

        Then points of small ratios may be left out (``local``), a point may have several
        observations, and the leave-one-out score of a regression selects its ridge.
        """
        return not self.signed and self.ridge_scales_with_n and self.primal is not None


def _without_ridge(ratio: Tensor, gram: Tensor, query: Tensor, reg: float | Tensor) -> Tensor:
    """`pseudo_inverse` with the arguments of the others."""
    return pseudo_inverse(ratio, gram, query)


RULES = {
    "importance_weighted": Rule(
        importance_weighted, partial(importance_weighted_coefficients, check=False)
    ),
    "original": Rule(original, original_coefficients, signed=True, ridge_scales_with_n=False),
    "pseudo_inverse": Rule(_without_ridge, None, signed=True, ridge_scales_with_n=False),
}
"""The rules by their names in configurations."""
