"""Losses of features for conditional mean embeddings: the error of ridge regression on them."""

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.linalg import psd_solve


def ridge_loss(
    features: Float[Tensor, "n p"],
    targets: Float[Tensor, "n q"],
    reg: float,
    ratio: Float[Tensor, " n"] | None = None,
) -> Float[Tensor, ""]:
    """Returns (1/n) tr(G_Z (D - D Psi (Psi^T D Psi + n reg I)^-1 Psi^T D)), the regularised error.

    It equals min over W of (1/n) sum_i r_i ||phi_i - W^T psi_i||^2 + reg ||W||^2, with G_Z the Gram
    matrix of the targets phi.

    Args:
        features: Psi.
        targets: phi, features of the state (random Fourier features in the paper) or the state
            itself.
        reg: lambda.
        ratio: r, D = diag(r); None for 1, as in the paper's filtering experiments.

    References: Xu et al. (2022), equation 4 and appendix B.2 (the appendix drops 1/n).
    """
    n, r = len(features), torch.ones_like(targets[:, 0]) if ratio is None else ratio
    weights = ridge_weights(features, targets, reg, r)
    explained = ((r[:, None] * features).mT @ targets * weights).sum()
    return ((r[:, None] * targets.square()).sum() - explained) / n


def split_ridge_loss(
    features: Float[Tensor, "n p"], targets: Float[Tensor, "n q"], reg: float
) -> Float[Tensor, ""]:
    """Returns the two-fold cross-validated error of the regression, mean ||phi - W^T psi||^2.

    Features that memorise their points gain nothing by it.

    Raises:
        ValueError: fewer than two points.
    """
    n = len(features)
    if n < 2:
        raise ValueError(
            f"a batch of {n} cannot be split into a part to fit and a part to score: "
            "use a larger batch_size"
        )
    half = n // 2
    parts = [(features[:half], targets[:half]), (features[half:], targets[half:])]
    errors = [
        (y - psi @ ridge_weights(fitted, known, reg, torch.ones_like(known[:, 0]))).square().sum()
        for (psi, y), (fitted, known) in (parts, parts[::-1])
    ]
    return (errors[0] + errors[1]) / n


def ridge_weights(
    features: Float[Tensor, "n p"],
    targets: Float[Tensor, "n q"],
    reg: float,
    ratio: Float[Tensor, " n"],
) -> Float[Tensor, "p q"]:
    """W = (Psi^T D Psi + n reg I)^-1 Psi^T D Phi."""
    weighted = ratio[:, None] * features
    return psd_solve(weighted.mT @ features, weighted.mT @ targets, reg=len(features) * reg)
