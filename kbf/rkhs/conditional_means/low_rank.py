"""Low-rank conditional mean embeddings: incomplete Cholesky, Nystrom, random Fourier features."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.rkhs import features
from kbf.rkhs.conditional_means.base import (
    BLOCK,
    Inputs,
    Mean,
    Outputs,
    Query,
    Weights,
    by_rows,
    check_pairs,
    draw,
)
from kbf.rkhs.kernels import Bandwidth, Kernel
from kbf.rkhs.linalg import cholesky

# On explicit features


@dataclass(frozen=True, eq=False)
class FeatureRidge:
    """w_i(x) = h(x)^T h(x_i) with whitened features h(x) = root^T base(x).

    ``coef`` is sum_i h(x_i) z_i^T. ``root``, ``coef`` and the sums are in float64 for data of any
    type, since Psi^T Psi squares the condition number of Psi. Results have the type of the query.
    """

    base: features.FeatureMap
    root: Float[Tensor, "p r"]
    coef: Float[Tensor, "r d"]
    x: Inputs
    block: int

    @by_rows
    def dual(self, query: Query) -> Float[Tensor, "*b p"]:
        """Return root h(x) in float64; w_i(x) is its product with base(x_i)."""
        return self.base(query).double() @ self.root @ self.root.mT

    def weights(self, query: Query) -> Weights:
        """See `ConditionalMean`; n p values of the base for all queries, O(n p) for each."""
        dual, parts = self.dual(query), self.x.split(self.block)
        return torch.cat([(dual @ self.base(x).double().mT).to(query.dtype) for x in parts], -1)

    @by_rows
    def mean(self, query: Query) -> Mean:
        """See `ConditionalMean`; O(p r), independent of n."""
        return (self.base(query).double() @ self.root @ self.coef).to(query.dtype)


def feature_ridge(
    base: features.FeatureMap,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    whiten: Float[Tensor, "p r"] | None = None,
    block: int = BLOCK,
) -> FeatureRidge:
    """Return the CME with the kernel psi^T psi of any features psi(x) = whiten^T base(x).

        w(x) = Psi (Psi^T Psi + n reg I)^-1 psi(x)

    With R R^T = (Psi^T Psi + n reg I)^-1, h(x) = R^T psi(x). It costs O(n p^2), in one pass over
    the points by ``block`` of them at a time.

    Args:
        base: features ``n q`` -> ``n p``.
        x: ``n q``. z: ``n d``. reg: lambda > 0.
        whiten: ``p r``, or None for the base as it is.
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`.
    """
    check_pairs(x, z, reg)
    if whiten is None:
        whiten = torch.eye(base(x[:1]).shape[-1], device=x.device)
    whiten = whiten.double()
    gram, cross = (whiten.new_zeros(whiten.shape[1], k) for k in (whiten.shape[1], z.shape[1]))
    for rows, outputs in zip(x.split(block), z.split(block), strict=True):
        psi = base(rows).double() @ whiten
        gram, cross = gram + psi.mT @ psi, cross + psi.mT @ outputs.double()
    factor = cholesky(gram, reg=len(x) * reg)
    root = torch.linalg.solve_triangular(factor, whiten.mT, upper=False).mT
    coef = torch.linalg.solve_triangular(factor, cross, upper=False)
    return FeatureRidge(base, root, coef, x, block)


def feature_loo(fit: FeatureRidge, z: Outputs) -> Float[Tensor, ""]:
    """Return the leave-one-out score sum_i ||z_i - m_{-i}(x_i)||^2 in closed form, in O(n p r).

    Lower is better. m_{-i} is fitted without pair i, with the same features and the same ridge
    n reg: z_i - m_{-i}(x_i) is (z_i - m(x_i)) / (1 - w_i(x_i)). The score equals
    `kbf.rkhs.embeddings.cme_loo` for the kernel psi^T psi of x and the linear kernel of z.

    Args:
        fit: on the training inputs. z: outputs of the fit ``n d``.
    """
    total = fit.coef.new_zeros(())
    for rows, outputs in zip(fit.x.split(fit.block), z.split(fit.block), strict=True):
        h = fit.base(rows).double() @ fit.root
        left_out = (outputs - h @ fit.coef) / (1 - h.square().sum(-1, keepdim=True))
        total = total + left_out.square().sum()
    return total.to(z.dtype)


def incomplete_cholesky(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    rank: int,
    tol: float = 0.0,
    block: int = BLOCK,
) -> FeatureRidge:
    """Return the CME with G ~ L L^T, an incomplete Cholesky factorisation by r pivots, in O(n r^2).

        w(x) = L (n reg I + L^T L)^-1 l(x),    l(x) = L_piv^-1 k_piv(x)

    l(x_i) is row i of L, so that this is the exact CME of the kernel l(x)^T l(y). At the training
    points the error of its weights is at most tr(G - L L^T) / (n reg) in the spectral norm. The
    search for pivots requires L, ``n r``, which is not kept. For a kernel with a constant diagonal
    the first pivot is the first training point.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        rank: largest number of pivots, at most n.
        tol: the search ends once tr(G - L L^T) <= tol tr(G).
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or rank out of range.

    References: Fine and Scheinberg (2001); LCKME draft, section 4.1. Its equation 5 replaces only
    G and keeps the kernel itself in k(x): the part of k(x) outside of the span of L is then
    divided by n reg and diverges as the ridge falls.
    """
    check_pairs(x, z, reg, rank=rank)
    return _at_landmarks(
        kernel, x[features.pivots(kernel, x.double(), rank=rank, tol=tol)], x, z, reg, block
    )


def nystrom(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    m: int,
    sampling: Literal["uniform", "leverage"] = "uniform",
    pilot: int | None = None,
    replacement: bool = False,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> FeatureRidge:
    """Return the CME of `incomplete_cholesky` with m random landmarks as pivots, in O(n m^2).

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: landmarks, at most n.
        sampling: uniform, or leverage: probabilities in proportion to the `leverage_scores`, for
            inputs with regions of few points.
        pilot: number of points from which leverage scores are computed, at most n; default m.
        replacement: draw with replacement; a point that is drawn twice is one landmark.
        generator: draws the pilot and the landmarks.
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or m, pilot or sampling out of range.

    References: Williams and Seeger (2001); Alaoui and Mahoney (2015); Rudi, Camoriano and Rosasco
    (2015).
    """
    pilot = m if pilot is None else pilot
    check_pairs(x, z, reg, m=m, pilot=pilot)
    if sampling not in ("uniform", "leverage"):
        raise ValueError(f"sampling must be 'uniform' or 'leverage', got {sampling!r}")
    if sampling == "uniform":
        scores = torch.ones(len(x))
    else:
        with torch.no_grad():
            scores = leverage_scores(
                kernel, x, reg, x[draw(len(x), pilot, generator, x)], block=block
            ).cpu()
    chosen = torch.multinomial(scores, m, replacement, generator=generator).unique()
    return _at_landmarks(kernel, x[chosen.to(x.device)], x, z, reg, block)


def leverage_scores(
    kernel: Kernel,
    x: Inputs,
    reg: float | Tensor,
    pilot: Float[Tensor, "m q"],
    *,
    block: int = BLOCK,
) -> Float[Tensor, " n"]:
    """Return approximate ridge leverage scores [G (G + n reg I)^-1]_ii, in O(n m^2).

    The score of x_i is the derivative of the fit at x_i by z_i. It is approximated by

        (k(x_i, x_i) - k_J(x_i)^T (G_J + m reg I)^-1 k_J(x_i)) / (n reg)

    with a uniform sample J, the pilot. It is exact if J contains all points, and large for points
    far from J. Scores are clamped to [eps, 1], so that every point can be drawn.

    Args:
        kernel: k. x: ``n q``. reg: lambda > 0.
        pilot: J, ``m q``.
        block: points at a time.

    References: Rudi, Calandriello, Carratino and Rosasco (2018).
    """
    pilot = pilot.double()  # 1 - (1 - small) / small
    factor = cholesky(kernel(pilot, pilot), reg=len(pilot) * reg)
    residuals = []
    for rows in x.double().split(block):
        own = kernel(rows[:, None], rows[:, None])[:, 0, 0]
        half = torch.linalg.solve_triangular(factor, kernel(pilot, rows), upper=False)
        residuals.append(own - half.square().sum(0))
    return (torch.cat(residuals) / (len(x) * reg)).clamp(torch.finfo(x.dtype).eps, 1).to(x.dtype)


def random_fourier(
    bandwidth: Bandwidth,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    m: int,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> FeatureRidge:
    """Return the CME with m random Fourier features of the Gaussian kernel, in O(n m^2).

        w(x) = Psi (Psi^T Psi + n reg I)^-1 psi(x)

    Args:
        bandwidth: of the Gaussian kernel.
        x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: features, an even number (it may exceed n).
        generator: draws the frequencies.
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or m is odd.

    References: Rahimi and Recht (2007); LCKME draft, section 4.4, there with complex features and
    the ridge m reg.
    """
    base = features.random_fourier(x.shape[1], m, bandwidth=bandwidth, generator=generator)
    return feature_ridge(base, x, z, reg, block=block)


# What they share


def _at_landmarks(
    kernel: Kernel, landmarks: Tensor, x: Tensor, z: Tensor, reg: float | Tensor, block: int
) -> FeatureRidge:
    """Return the ridge on psi(x) = L^-1 k(landmarks, x).

    L L^T is the Gram matrix of the landmarks with a jitter of eps^(2/3). The kernel is computed in
    float64 as well: in float32 the jitter would have to be 2e-5, a larger error than that of all
    other rounding.
    """
    double = landmarks.double()
    # 4e-11: above the rounding of a Gram matrix, far below m reg
    jitter = torch.finfo(double.dtype).eps ** (2 / 3)
    whiten = features.nystrom_whitening(kernel(double, double), jitter=jitter)
    return feature_ridge(partial(_against, kernel, double), x, z, reg, whiten=whiten, block=block)


def _against(kernel: Kernel, landmarks: Tensor, rows: Tensor) -> Tensor:
    """Return k(rows, landmarks) in the type of the landmarks; a global function can be pickled."""
    return kernel(rows.to(landmarks.dtype), landmarks)
