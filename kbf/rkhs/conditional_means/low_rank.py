"""Conditional mean embeddings in a few features: incomplete Cholesky, Nystrom landmarks, random Fourier features."""

from __future__ import annotations

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
    _by_rows,
    _check,
    _draw,
)
from kbf.rkhs.kernels import Bandwidth, Kernel
from kbf.rkhs.linalg import cholesky

# On explicit features


@dataclass(frozen=True, eq=False)
class FeatureRidge:
    """w_i(x) = h(x)^T h(x_i) with the whitened features h(x) = root^T base(x); ``coef`` is sum_i h(x_i) z_i^T.

    Both are float64 whatever the type of the data is, and so are the sums: Psi^T Psi squares the
    condition of Psi. Results are in the type of the query.
    """

    base: features.FeatureMap
    root: Float[Tensor, "p r"]
    coef: Float[Tensor, "r d"]
    x: Inputs
    block: int

    def weights(self, query: Query) -> Weights:
        """As in `ConditionalMean`: n p values of the base once for all queries, and O(n p) a query."""
        dual = _by_rows(
            lambda rows: self.base(rows).double() @ self.root @ self.root.mT,
            query,
            self.x,
            self.block,
        )
        return torch.cat(
            [(dual @ self.base(x).double().mT).to(query.dtype) for x in self.x.split(self.block)],
            -1,
        )

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`, O(p r): it does not depend on n."""
        return _by_rows(
            lambda rows: self.base(rows).double() @ self.root @ self.coef, query, self.x, self.block
        ).to(query.dtype)


def feature_ridge(
    base: features.FeatureMap,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    whiten: Float[Tensor, "p r"] | None = None,
    block: int = BLOCK,
) -> FeatureRidge:
    """w(x) = Psi (Psi^T Psi + n reg I)^-1 psi(x) for any features psi(x) = whiten^T base(x): the CME with k = psi^T psi. O(n p^2).

    With R R^T = (Psi^T Psi + n reg I)^-1, h(x) = R^T psi(x). One pass over the points, by ``block``
    of them at a time.

    Args:
        base: features ``n q`` -> ``n p``.
        x: ``n q``. z: ``n d``. reg: lambda > 0.
        whiten: ``p r``, or None for the base as it is.
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`.
    """
    _check(x, z, reg)
    whiten = (
        torch.eye(base(x[:1]).shape[-1], dtype=x.dtype, device=x.device)
        if whiten is None
        else whiten
    )
    whiten = whiten.double()
    r = whiten.shape[1]
    gram, cross = whiten.new_zeros(r, r), whiten.new_zeros(r, z.shape[1])
    for rows, outputs in zip(x.split(block), z.split(block), strict=True):
        psi = base(rows).double() @ whiten
        gram, cross = gram + psi.mT @ psi, cross + psi.mT @ outputs.double()
    factor = cholesky(gram, reg=len(x) * reg)
    root = torch.linalg.solve_triangular(factor, whiten.mT, upper=False).mT
    coef = torch.linalg.solve_triangular(factor, cross, upper=False)
    return FeatureRidge(base, root, coef, x, block)


def feature_loo(fit: FeatureRidge, z: Outputs) -> Float[Tensor, ""]:
    """Leave-one-out score sum_i ||z_i - m_{-i}(x_i)||^2 in closed form, O(n p r); lower is better.

    m_{-i} is fitted without pair i, with the same features and the same ridge n reg: z_i -
    m_{-i}(x_i) is (z_i - m(x_i)) / (1 - w_i(x_i)). It is `kbf.rkhs.embeddings.cme_loo` for the
    kernel psi^T psi of x and the linear kernel of z.

    Args:
        fit: on the training inputs. z: its outputs ``n d``.
    """
    total = fit.coef.new_zeros(())
    for rows, outputs in zip(fit.x.split(fit.block), z.split(fit.block), strict=True):
        h = fit.base(rows).double() @ fit.root
        total = (
            total
            + ((outputs - h @ fit.coef) / (1 - h.square().sum(-1, keepdim=True))).square().sum()
        )
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
    """w(x) = L (n reg I + L^T L)^-1 l(x), with G ~ L L^T by r pivots and l(x) = L_piv^-1 k_piv(x). O(n r^2).

    l(x_i) is row i of L, so that this is the exact CME of the kernel l(x)^T l(y). At the training
    points its weights are off by at most tr(G - L L^T) / (n reg) in the spectral norm. The search
    for pivots holds L, ``n r``; it is not kept. For a kernel with one value on the diagonal the
    first pivot is the first training point.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        rank: the most pivots, at most n.
        tol: stop once tr(G - L L^T) <= tol tr(G).
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or rank out of range.

    References: Fine and Scheinberg (2001); LCKME draft, section 4.1. Its equation 5 replaces G
    alone, and keeps the kernel itself in k(x): what of k(x) lies outside of the span of L is then
    divided by n reg, and explodes with a small ridge.
    """
    _check(x, z, reg, rank=rank)
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
    """The ridge of `incomplete_cholesky`, on m landmarks drawn at random instead of pivots. O(n m^2).

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: landmarks, at most n.
        sampling: all points alike, or with probabilities in proportion to their `leverage_scores`,
            which rare regions need.
        pilot: points that the leverage scores are computed from, at most n; m unless given.
        replacement: draw with replacement; a point that is drawn twice is one landmark.
        generator: draws the pilot and the landmarks.
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or m, pilot or sampling out of range.

    References: Williams and Seeger (2001); Alaoui and Mahoney (2015); Rudi, Camoriano and Rosasco
    (2015).
    """
    pilot = m if pilot is None else pilot
    _check(x, z, reg, m=m, pilot=pilot)
    if sampling not in ("uniform", "leverage"):
        raise ValueError(f"sampling must be 'uniform' or 'leverage', got {sampling!r}")
    if sampling == "uniform":
        scores = torch.ones(len(x))
    else:
        with torch.no_grad():
            scores = leverage_scores(
                kernel, x, reg, x[_draw(len(x), pilot, generator, x)], block=block
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
    """Approximate ridge leverage scores [G (G + n reg I)^-1]_ii: how much the fit at x_i hangs on pair i alone. O(n m^2).

    (k(x_i, x_i) - k_J(x_i)^T (G_J + m reg I)^-1 k_J(x_i)) / (n reg) over a uniform sample J, the
    pilot: exact when J is everything, large for points that J does not reach. Kept within [eps, 1],
    so that every point can be drawn.

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
        residuals.append(
            own
            - torch.linalg.solve_triangular(factor, kernel(pilot, rows), upper=False)
            .square()
            .sum(0)
        )
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
    """w(x) = Psi (Psi^T Psi + n reg I)^-1 psi(x) with m random Fourier features of the Gaussian kernel. O(n m^2).

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
    return feature_ridge(
        features.random_fourier(x.shape[1], m, bandwidth=bandwidth, generator=generator),
        x,
        z,
        reg,
        block=block,
    )


# What they share


def _at_landmarks(
    kernel: Kernel, landmarks: Tensor, x: Tensor, z: Tensor, reg: float | Tensor, block: int
) -> FeatureRidge:
    """Ridge on psi(x) = L^-1 k(landmarks, x), L L^T the landmarks' Gram matrix with a jitter of eps^(2/3).

    The kernel is taken in float64 as well: in float32 the jitter would have to be 2e-5, which costs
    more than all other rounding.
    """
    double = landmarks.double()
    jitter = torch.finfo(double.dtype).eps ** (
        2 / 3
    )  # 4e-11: above the rounding of a Gram matrix, far below m reg
    whiten = features.nystrom_whitening(kernel(double, double), jitter=jitter)
    return feature_ridge(partial(_against, kernel, double), x, z, reg, whiten=whiten, block=block)


def _against(kernel: Kernel, landmarks: Tensor, rows: Tensor) -> Tensor:
    """k(rows, landmarks) in the type of the landmarks; a function of the module, so that a fit can be pickled."""
    return kernel(rows.to(landmarks.dtype), landmarks)
