"""Kernel mean embeddings as weighted samples, and the conditional mean embedding (CME).

An embedding is m = sum_i w_i k(., z_i). Its weights may be negative and need not sum to 1; they are
neither clipped nor normalised unless a method documents it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.kernels import Kernel
from kbf.rkhs.linalg import psd_solve


@dataclass(frozen=True, eq=False)
class Embedding:
    """sum_i w_i k(., z_i), or a batch of such sums over the same points.

    Attributes:
        points: z ``n d``, or rotations ``n 3 3``.
        weights: w ``*b n``, of either sign.

    >>> m = Embedding(torch.tensor([[0.0], [1.0]]), torch.tensor([0.25, 0.75]))
    >>> m.mean(), m.cov()
    (tensor([0.7500]), tensor([[0.1875]]))
    """

    points: Float[Tensor, "n ..."]
    weights: Float[Tensor, "*b n"]

    def __post_init__(self) -> None:
        """Raise a ValueError when there is not one weight for each point."""
        if self.points.ndim < 2 or self.weights.shape[-1:] != self.points.shape[:1]:
            shapes = f"{tuple(self.points.shape)} and {tuple(self.weights.shape)}"
            raise ValueError(f"an embedding needs points (n, d) and weights (..., n), got {shapes}")

    def normalised(self) -> Embedding:
        """Return the same points with weights that sum to 1.

        Raises:
            ValueError: a sum of weights that is not positive: the embedding represents no
                distribution.
        """
        total = self.weights.sum(-1, keepdim=True)
        if not (total > 0).all():
            raise ValueError(f"weights with sum {total.min().item():.3g} cannot be normalised")
        return Embedding(self.points, self.weights / total)

    def expect(self, f: Callable[[Tensor], Tensor]) -> Tensor:
        """Return sum_i w_i f(z_i) ``*b *k``, for f from the points ``n d`` to ``n *k``.

        References: Fukumizu et al., equation 15.
        """
        return torch.tensordot(self.weights, f(self.points), dims=1)

    def mean(self) -> Tensor:
        """Return the mean sum_i w_i z_i ``*b d``, without normalisation of the weights."""
        return self.expect(lambda z: z)

    def cov(self) -> Float[Tensor, "*b d d"]:
        """Return the covariance matrix of the normalised weights, positive semi-definite.

        It is sum_i w_i z_i z_i^T - mu mu^T with w / sum(w) in place of w. If negative weights cause
        negative eigenvalues, these are set to zero, which gives the nearest positive semi-definite
        matrix in the Frobenius norm.

        Raises:
            ValueError: points that are not vectors, or a sum of weights that is not positive.
        """
        w = self.normalised().weights
        z = self._vectors("cov")
        z = z - z.mean(0)
        mu = w @ z
        moment = torch.einsum("...n,ni,nj->...ij", w, z, z) - mu[..., :, None] * mu[..., None, :]
        values, vectors = torch.linalg.eigh(moment)
        return (vectors * values.clamp_min(0)[..., None, :]) @ vectors.mT

    @torch.no_grad()
    def mode(self, kernel: Kernel, *, steps: int = 100, tol: float = 1e-6) -> Float[Tensor, "*b d"]:
        """Return the pre-image: the z whose k(., z) is nearest to the embedding (Gaussian kernel).

        Since k(z, z) = 1 this is the z with the largest m(z) = sum_i w_i k(z_i, z). The fixed-point
        iteration z <- sum_i w_i k(z_i, z) z_i / m(z) starts at the best training point. With
        negative weights m(z) may approach 0 and the iteration diverge; the best iterate is
        returned, which is at least as good as the best training point. Not differentiable.

        Args:
            kernel: Gaussian, with its bandwidth (``partial(gaussian, bandwidth=0.5)``).
            steps: largest number of iterations.
            tol: the iteration stops if no point moves by more than this share of the points'
                spread.

        Raises:
            ValueError: points that are not vectors.

        References: Fukumizu et al., section 4.1.
        """
        points = self._vectors("mode")
        w = self.weights.reshape(-1, len(points))
        spread = (points - points.mean(0)).abs().max()
        best = points[(w @ kernel(points, points)).argmax(-1)]
        terms = w * kernel(best, points)
        z, height = best, terms.sum(-1, keepdim=True)
        best_height = height
        for _ in range(steps):
            new = torch.where(height > 0, terms @ points / height, best)
            moved = (new - z).abs().max()
            z, terms = new, w * kernel(new, points)
            height = terms.sum(-1, keepdim=True)
            best = torch.where(height > best_height, z, best)
            best_height = torch.maximum(height, best_height)
            if moved <= tol * spread:
                break
        return best.reshape(*self.weights.shape[:-1], -1)

    def _vectors(self, what: str) -> Tensor:
        """Return the points; raise a ValueError if they are not ``n d``."""
        if self.points.ndim != 2:
            raise ValueError(
                f"Embedding.{what} needs points (n, d), got {tuple(self.points.shape)}"
            )
        return self.points


def project_so3(
    weights: Float[Tensor, "*b n"], rotations: Float[Tensor, "n 3 3"]
) -> Float[Tensor, "*b 3 3"]:
    """Return the rotation R with the largest tr(R^T sum_i w_i Z_i).

    With the singular value decomposition sum_i w_i Z_i = U S V^T it is
    U diag(1, 1, det(U V^T)) V^T, the pre-image within SO(3) of an embedding under the kernel
    tr(A B^T). It is not unique if the sum has a rank below 2.

    References: Fukumizu et al., section 5.3 (camera rotation).
    """
    u, _, vt = torch.linalg.svd(torch.tensordot(weights, rotations, dims=1))
    sign = torch.linalg.det(u @ vt)
    return torch.cat([u[..., :2], u[..., 2:] * sign[..., None, None]], -1) @ vt


def cme_weights_primal(
    features: Float[Tensor, "n p"], query: Float[Tensor, "*b p"], reg: float | Tensor
) -> Float[Tensor, "*b n"]:
    """Return the CME weights w(x) = Psi (Psi^T Psi + n reg I_p)^-1 psi(x) in O(n p^2).

    They are those of the kernel psi^T psi, whose Gram matrix is Psi Psi^T.
    """
    n = features.shape[-2]
    return psd_solve(features.mT @ features, query[..., None], reg=n * reg)[..., 0] @ features.mT


def cme_loo(
    gram_x: Float[Tensor, "n n"], gram_y: Float[Tensor, "n n"], reg: float | Tensor
) -> Float[Tensor, ""]:
    """Return the closed-form leave-one-out score of the CME from x to y; lower is better.

    It selects reg and the bandwidth of x. It is the sum over i of ||phi(y_i) - m_{-i}(x_i)||^2 in
    the RKHS of y, where m_{-i} is fitted without pair i (with the same ridge n reg):
    tr(D H K_Y H D) with H = I - G (G + n reg I)^-1 and D = diag(1 / H_ii). As
    H = n reg (G + n reg I)^-1, the factor n reg cancels. Only scores with the same kernel of y are
    comparable.

    Args:
        gram_x: G ``n n``, of the inputs.
        gram_y: K_Y ``n n``, of the outputs.
        reg: lambda > 0.

    Raises:
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue.
    """
    n = gram_x.shape[-1]
    B = psd_solve(gram_x, torch.eye(n, dtype=gram_x.dtype, device=gram_x.device), reg=n * reg)
    return ((B @ gram_y * B).sum(1) / B.diagonal().square()).sum()
