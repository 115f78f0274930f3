"""Losses of features for conditional mean embeddings: the error of ridge regression on them."""

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.rkhs.kernels import gaussian, median_distance
from kbf.rkhs.linalg import psd_solve
from kbf.rkhs.ratios import RATIOS, kulsif


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


@torch.no_grad()
def belief_ratio(
    states: Float[Tensor, "n d"], generator: Generator | None = None
) -> Float[Tensor, " n"]:
    """Returns the density ratio of a belief at a random one of the states, of mean 1, in float64.

    The prior is the embedding k_Z(., z_i) with the median distance as bandwidth, and the ratio that
    of KuLSIF with its default ridge. In a filter the ratio differs from step to step; a loss that
    draws one for each of its steps is the mean over beliefs. Xu et al. learn one feature for all
    steps with r = 1.

    Args:
        states: z ``n d``.
        generator: draws i; None for the global one.
    """
    z = states.double()
    bandwidth = median_distance(z, distinct=True)
    i = int(torch.randint(len(z), (1,), generator=generator))
    gram = gaussian(z, z, bandwidth=bandwidth)
    r = kulsif(gram, gram[i], RATIOS["kulsif"].reg)
    return r * (len(z) / r.sum())
