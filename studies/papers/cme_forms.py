"""Forms of the conditional mean embedding under the draft's names, and their errors.

Errors are against a known truth; cross-validation selects the parameters.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.rkhs import conditional_means
from kbf.rkhs.kernels import gaussian
from kbf.ssm import gaussian_log_density

CKME, LCKME, NWKR, RANDOM = "CKME", "LCKME", "NWKR", "random"
ICF, RFF, DIVIDED, LEVERAGE = "ICF", "RFF", "divide and conquer", "leverage"
METHODS = (CKME, LCKME, NWKR, RANDOM, ICF, RFF, DIVIDED, LEVERAGE)
ALL_POINTS = (CKME, NWKR)
"""The methods without a size m."""


def fit(
    method: str,
    x: Float[Tensor, "n q"],
    y: Float[Tensor, "n d"],
    *,
    variance: float,
    reg: float,
    m: int,
    seed: int = 0,
) -> conditional_means.ConditionalMean:
    """A form with the Gaussian kernel exp(-||x - x'||^2 / (2 variance)) and the ridge n reg.

    m is the one size of all: neighbours, points drawn, pivots, features (the even number below),
    landmarks, points in a part.

    Raises:
        ValueError: an unknown method.
    """
    width = math.sqrt(variance)
    kernel = partial(gaussian, bandwidth=width)
    generator = Generator().manual_seed(seed)
    n = len(x)
    m = m if method == RFF else min(m, n)
    match method:
        case "CKME":
            return conditional_means.exact(kernel, x, y, reg)
        case "LCKME":
            return conditional_means.nearest(kernel, x, y, reg, m=m)
        case "NWKR":
            return conditional_means.nadaraya_watson(kernel, x, y)
        case "random":
            return conditional_means.subsample(kernel, x, y, reg, m=m, generator=generator)
        case "ICF":
            return conditional_means.incomplete_cholesky(kernel, x, y, reg, rank=m)
        case "RFF":
            return conditional_means.random_fourier(
                width, x, y, reg, m=max(2, m - m % 2), generator=generator
            )
        case "divide and conquer":
            return conditional_means.divide_and_conquer(
                kernel, x, y, reg, s=max(1, round(n / m)), generator=generator
            )
        case "leverage":
            return conditional_means.nystrom(
                kernel, x, y, reg, m=m, sampling="leverage", generator=generator
            )
    raise ValueError(f"there is no method {method!r}; there are {', '.join(METHODS)}")


def density(
    x: Float[Tensor, "n q"], y: Float[Tensor, "m q"], *, variance: float
) -> Float[Tensor, "n m"]:
    """The draft's kernel d(x | y, variance I), a Gaussian density."""
    return (2 * math.pi * variance) ** (-x.shape[-1] / 2) * gaussian(
        x, y, bandwidth=math.sqrt(variance)
    )


def norm_error(
    w: Float[Tensor, "b n"],
    y: Float[Tensor, "n d"],
    mean: Float[Tensor, "b d"],
    cov: Float[Tensor, "d d"],
    *,
    variance: float,
) -> Float[Tensor, " b"]:
    """RKHS-norm error ||m - sum_i w_i k(., y_i)||, m the embedding of N(mean, cov).

    The kernel k is `density`.

    ||m||^2 = d(0 | 0, 2 cov + variance I), m(y) = d(y | mean, cov + variance I).

    References: LCKME draft, section 5.1.
    """
    own, shift = torch.zeros_like(mean[0]), variance * torch.eye(len(cov)).to(cov)
    truth = gaussian_log_density(own, 2 * cov + shift).exp()
    cross = gaussian_log_density(y - mean[:, None], cov + shift).exp()
    squared = truth - 2 * (w * cross).sum(-1) + (w @ density(y, y, variance=variance) * w).sum(-1)
    return squared.clamp_min(0).sqrt()


class Fold(NamedTuple):
    """One fold: training pairs, held-out inputs, and the kernel values of y for the score."""

    x: Tensor
    y: Tensor
    held: Tensor
    gram: Tensor
    cross: Tensor


def split(
    x: Float[Tensor, "n q"],
    y: Float[Tensor, "n d"],
    *,
    variance: float,
    folds: int = 5,
    most: int = 40,
) -> list[Fold]:
    """The folds of a cross-validation, dealt out in turn.

    At most ``most`` points of each are predicted.
    """
    fold = torch.arange(len(x)) % folds
    parts = []
    for f in range(folds):
        kept, held = fold != f, (fold == f).nonzero()[:most, 0]
        k_y = partial(density, variance=variance)
        parts.append(Fold(x[kept], y[kept], x[held], k_y(y[kept], y[kept]), k_y(y[held], y[kept])))
    return parts


def cv_score(
    parts: list[Fold], method: str, *, variance: float, reg: float, m: int, seed: int = 0
) -> float:
    """Mean over the held-out pairs of ||k(., y) - m(x)||^2 in the RKHS of y.

    The constant ||k(., y)||^2 is left out.
    """
    scores = []
    for part in parts:
        w = fit(method, part.x, part.y, variance=variance, reg=reg, m=m, seed=seed).weights(
            part.held
        )
        scores.append((w @ part.gram * w).sum(-1) - 2 * (w * part.cross).sum(-1))
    return torch.cat(scores).mean().item()
