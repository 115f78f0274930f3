"""Ridge regression on Nystrom features, and its leave-one-out errors in closed form.

With weights w_i the coefficients are A = G sum_i w_i phi_i y_i^T,
G = (sum_i w_i phi_i phi_i^T + reg sum_i w_i I)^-1, and the error of point i of the fit without it
is (y_i - A^T phi_i) / (1 - w_i phi_i^T G phi_i). A point of weight 0 has its plain error.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kbf.rkhs.features import nystrom_whitening, pivots
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.rkhs.linalg import patterns, some_rows

# Nystrom features, and the ridge for each point.
FEATURES = 64
RIDGE = 1e-3
# Up to so many features sums over points are products with those of all pairs of features, without
# an array for each regression.
MAX_FEATURES_OF_PAIRS = 32
# Points that a regression of a column requires.
MIN_ROWS = 50


def features_of(z: Float[Tensor, "n d"]) -> Float[Tensor, "n p"]:
    """Return 1, z and Nystrom features of a Gaussian kernel with the median distance."""
    white = (z - z.mean(0)) / z.std(0).clamp_min(1e-9)
    some = white[some_rows(len(white), 500)]
    bandwidth = median_distance(some, distinct=True)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return gaussian(a, b, bandwidth=bandwidth)

    landmarks = some[pivots(kernel, some, rank=FEATURES, tol=1e-6)]
    phi = kernel(white, landmarks) @ nystrom_whitening(kernel(landmarks, landmarks))
    return torch.cat([torch.ones_like(white[:, :1]), white, phi], 1)


def weighted_errors(
    phi: Float[Tensor, "n p"],
    y: Float[Tensor, "n q"],
    weights: Float[Tensor, "b m n"],
    least: float = 0.0,
) -> Float[Tensor, "b m n q"]:
    """Return leave-one-out errors of the regressions with these weights.

    Args:
        phi: features. y: outputs.
        weights: of the points, for each of the regressions.
        least: of 1 - leverage.
    """
    p = phi.shape[1]
    total = weights.sum(-1).clamp_min(1)[..., None, None]
    ridge = RIDGE * total * torch.eye(p).to(phi)
    if p <= MAX_FEATURES_OF_PAIRS:
        pairs = (phi[:, :, None] * phi[:, None]).flatten(1)  # n p*p
        G = torch.linalg.inv((weights @ pairs).unflatten(-1, (p, p)) + ridge)
        moment = (weights @ (phi[:, :, None] * y[:, None]).flatten(1)).unflatten(-1, (p, -1))
        leverage = weights * (G.flatten(-2) @ pairs.mT)
    else:
        weighted = weights[..., None] * phi  # b m n p
        G = torch.linalg.inv(weighted.mT @ phi + ridge)
        moment = weighted.mT @ y
        leverage = ((phi @ G) * weighted).sum(-1)
    error = y - phi @ (G @ moment)
    return error / (1 - leverage).clamp_min(least)[..., None]


def left_out(
    phi: Float[Tensor, "n p"], x: Float[Tensor, "n q"], used: Bool[Tensor, "n q"] | None = None
) -> Float[Tensor, "n q"]:
    """Return errors of ridge regression of each column; NaN where x is missing.

    They are leave-one-out errors in the rows that the regression uses; None for all.
    """
    found = torch.full_like(x, torch.nan)
    used = x.isfinite() if used is None else used & x.isfinite()
    for columns in patterns(used):
        rows, y = used[:, columns[0]], x[:, columns]
        if int(rows.sum()) >= MIN_ROWS:
            errors = weighted_errors(phi, torch.nan_to_num(y), rows.to(phi)[None, None])[0, 0]
            found[:, columns] = torch.where(y.isfinite(), errors, torch.nan)
    return found
