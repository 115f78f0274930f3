"""The kernel Bayes' rules, side by side: weights ``*b n`` of the posterior embedding sum_i w_i k_Z(., z_i) given one observation.

Letters: G = G_X ``n n`` the Gram matrix of the training observations, g = k_X(X, x) ``*b n`` the new observation against them,
gamma or r ``*b n`` the density ratio of the prior (`kbf.ratios`), D = diag(r), n training points.
Every rule is differentiable in all of its arguments. At a ratio of exactly 0 the dual importance-weighted rule has a kink (it takes
negative ratios for 0) and gives the gradient 0; its primal form is smooth there.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.distributed import Total, alone
from kbf.linalg import psd_solve, safe_sqrt

Weights = Float[Tensor, "*b n"]
BLOCK = 2**18
"""Numbers in the block of features that a product takes at a time."""


def importance_weighted(
    ratio: Float[Tensor, "*b n"], gram: Float[Tensor, "n n"], query: Float[Tensor, "*b n"], reg: float | Tensor
) -> Weights:
    """Weights w = sqrt(D) (sqrt(D) G sqrt(D) + n reg I)^-1 sqrt(D) g: importance-weighted kernel ridge regression.

    With r = 1 it is the conditional mean embedding. The system is symmetric positive definite for every reg > 0.

    Args:
        ratio: r ``*b n``.
        gram: G ``n n``.
        query: g ``*b n``.
        reg: lambda.

    Raises:
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue.

    References: Xu et al. (2022), Algorithm 1, step 3, and equation 4. The authors' code calls this reg ``reg2``.
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
    *,
    check: bool = True,
    total: Total = alone,
) -> Weights:
    """Weights w = D Psi (Psi^T D Psi + n reg I_p)^-1 psi(x): the same weights when G = Psi Psi^T, in O(n p^2). No root is needed.

    Args:
        ratio: r ``*b n``.
        features: Psi ``n p``, or others for each of the batch ``*b n p``.
        query: psi(x) ``*b p``.
        reg: lambda.
        check: as in `kbf.linalg.psd_solve`.
        total: adds Psi^T D Psi up over processes that share the points (`kbf.distributed`); n is the number of them here.

    References: Xu et al. (2022), section 3.3, the last formula (which drops the n before lambda).
    """
    n = features.shape[-2]
    system = total(weighted_covariance(ratio, features))
    solved = psd_solve(system, query[..., None], reg=n * reg, check=check)
    return ratio * (solved[..., 0] @ features.mT if features.ndim == 2 else (features @ solved)[..., 0])


def weighted_covariance(ratio: Float[Tensor, "*b n"], features: Float[Tensor, "*#b n p"]) -> Float[Tensor, "*b p p"]:
    """Psi^T D Psi, by blocks of points that stay in a processor's cache; where it is worth it, without points of ratio 0."""
    p, batch = features.shape[-1], max(1, ratio.shape[:-1].numel())
    sparse = batch == 1 and p >= 64 and ratio.device.type == "cpu" and not torch.compiler.is_compiling()  # on a GPU: it would wait
    sparse = sparse and not ratio.requires_grad  # the ratio 0 has a gradient too
    size = max(1, BLOCK // (batch * p))
    total: Tensor | None = None
    for r, f in zip(ratio.split(size, -1), features.split(size, -2), strict=True):
        if sparse:
            rows = r.flatten().nonzero()[:, 0]
            r, f = r.index_select(-1, rows), f.index_select(-2, rows)
        part = (f * r[..., None]).mT @ f
        total = part if total is None else total + part
    assert total is not None
    return total


def original(
    ratio: Float[Tensor, "*b n"], gram: Float[Tensor, "n n"], query: Float[Tensor, "*b n"], delta: float | Tensor
) -> Weights:
    """Weights w = L G ((L G)^2 + delta I)^-1 L g with L = diag(gamma), gamma of either sign (`kbf.ratios.tikhonov`).

    Args:
        ratio: gamma ``*b n``, of mean about 1.
        gram: G ``n n``.
        query: g ``*b n``.
        delta: the ridge, not scaled by n. Where a paper's mu is gamma / n (Johno et al. (2018), Theorem 3; Fukumizu et al.,
            equation 19), its delta is this one over n^2.

    References: Fukumizu et al., equation 14 (step 3 of Figure 1); Xu et al. (2022), equation 2. The authors' code calls this
    delta ``reg2``.
    """
    n = gram.shape[-1]
    weighted = ratio[..., :, None] * gram
    shift = torch.as_tensor(delta, dtype=gram.dtype, device=gram.device) * torch.eye(n, dtype=gram.dtype, device=gram.device)
    solved = torch.linalg.solve(weighted @ weighted + shift, (ratio * query)[..., None])
    return (weighted @ solved)[..., 0]


def pseudo_inverse(
    ratio: Float[Tensor, "*b n"], gram: Float[Tensor, "n n"], query: Float[Tensor, "*b n"], rtol: float = 1e-10
) -> Weights:
    """Weights w = (L G)^+ L g with L = diag(gamma): "KBR2", the rule without any ridge.

    Args:
        ratio: gamma ``*b n`` (for KBR2 itself: G_Z^+ g).
        gram: G ``n n``.
        query: g ``*b n``.
        rtol: singular values below rtol times the largest count as zero.

    References: Johno, Nakamoto and Saigo (2018), section 4.1.3.
    """
    weighted = ratio[..., :, None] * gram
    return (torch.linalg.pinv(weighted, rtol=rtol) @ (ratio * query)[..., None])[..., 0]


def original_primal(
    ratio: Float[Tensor, "*b n"], features: Float[Tensor, "n p"], query: Float[Tensor, "*b p"], delta: float | Tensor
) -> Weights:
    """Weights w = L Psi C (C^2 + delta I_p)^-1 psi(x), C = Psi^T L Psi: those of `original` when G = Psi Psi^T, in O(n p^2).

    From `original` by (L Psi C Psi^T + delta I)^-1 L Psi = L Psi (C^2 + delta I)^-1.
    """
    inner = (features.mT * ratio[..., None, :]) @ features
    shift = torch.as_tensor(delta, dtype=features.dtype, device=features.device) * torch.eye(
        inner.shape[-1], dtype=features.dtype, device=features.device
    )
    solved = torch.linalg.solve(inner @ inner + shift, query[..., None])
    return ratio * (features @ (inner @ solved))[..., 0]


def second_moments(features: Float[Tensor, "n k p"]) -> Float[Tensor, "n t"]:
    """The lower triangle of (1/k) sum_k psi_ik psi_ik^T for each memory point, t = p (p + 1) / 2 columns: a constant in time."""
    p = features.shape[-1]
    row, column = torch.tril_indices(p, p, device=features.device)
    return torch.stack([(f[:, row] * f[:, column]) for f in features.unbind(1)]).mean(0)


def importance_weighted_moments(
    ratio: Float[Tensor, "*b n"],
    features: Float[Tensor, "*#b n p"],
    moments: Float[Tensor, "*#b n t"],
    query: Float[Tensor, "*b p"],
    reg: float | Tensor,
    *,
    check: bool = True,
    total: Total = alone,
) -> Weights:
    """The importance-weighted rule in its primal form for points that were each observed k times (k = 1 included).

    Sum_i r_i (1/k) sum_k psi_ik psi_ik^T takes the place of Psi^T D Psi, and the mean feature of a point that of its feature: the
    weights are those of the rule over all n k observations with the same lambda, each ratio repeated k times, summed over the
    observations of each point (both sides of the system are divided by k). With the products at hand (`second_moments`) the sum
    over the memory is one matrix product, whatever k and the batch.

    Args:
        ratio: r ``*b n``.
        features: mean features of each point ``n p``.
        moments: `second_moments` ``n t``.
        query: psi(x) ``*b p``.
        reg: lambda.
        check: as in `kbf.linalg.psd_solve`.
        total: as in `importance_weighted_primal`.
    """
    n, p = features.shape[-2:]
    row, column = torch.tril_indices(p, p, device=features.device)
    packed = total((ratio[..., None, :] @ moments)[..., 0, :] if moments.ndim > 2 else ratio @ moments)
    place = torch.empty(p, p, dtype=torch.long, device=features.device)
    place[row, column] = place[column, row] = torch.arange(len(row), device=features.device)
    solved = psd_solve(packed[..., place], query[..., None], reg=n * reg, check=check)
    return ratio * (solved[..., 0] @ features.mT if features.ndim == 2 else (features @ solved)[..., 0])
