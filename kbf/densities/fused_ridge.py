"""Kernel ridge regression with precomputed products, for evaluation at many particles."""

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.ridge import RidgeMap
from kbf.rkhs.kernels import own_value
from kbf.rkhs.linalg import cholesky
from kbf.ssm import normal


class MergedMap:
    """The numbers of a `kbf.densities.ridge.RidgeMap` from one product of matrices.

    With k(u) the kernel between u and the landmarks, phi = W^T k(u), M = Phi^T Phi + n reg I and
    rho = n reg,

        mean(u)  = offset + (W A)^T k(u),
        scale(u) = 1 + phi^T M^-1 phi + (k(u, u) - |phi|^2) / rho
                 = 1 + k(u, u) / rho - |(W C)^T k(u)|^2,  C C^T = I / rho - M^-1,

    so that W A and W C, side by side, are all that is needed. Products are in float64, as those of
    the map.
    """

    def __init__(self, map: RidgeMap) -> None:
        """Multiply the matrices of ``map``."""
        self.map: RidgeMap = map
        rest, vectors = torch.linalg.eigh(
            torch.eye(len(map.factor)).to(map.factor) / map.ridge - map.factor
        )
        self.rank: int = len(rest)
        self.both: Tensor = map.whiten @ torch.cat(
            [vectors * rest.clamp_min(0).sqrt(), map.coefficients], -1
        )
        self.noise: Tensor = map.noise
        self.root: Tensor = map.noise.sqrt().diag() if map.noise.ndim == 1 else cholesky(map.noise)
        self.inverse: Tensor = torch.linalg.inv(self.root)

    def predict(
        self, u: Float[Tensor, "*b d"]
    ) -> tuple[Float[Tensor, "*b q"], Float[Tensor, "*b"]]:
        """The mean and the scale of the predictive distribution at u."""
        rows = u.reshape(-1, u.shape[-1]).to(self.both)
        found = self.map.kernel(rows, self.map.landmarks) @ self.both
        scale = (
            1
            + own_value(self.map.kernel, rows) / self.map.ridge
            - found[:, : self.rank].square().sum(-1)
        )
        mean = self.map.manifold.project(self.map.offset + found[:, self.rank :]).to(u)
        return mean.unflatten(0, u.shape[:-1]), scale.clamp_min(1).to(u).unflatten(0, u.shape[:-1])

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y from the predictive distribution at u."""
        mean, scale = self.predict(u)
        return self.displaced(
            mean, scale, normal(mean.new_empty(*mean.shape[:-1], len(self.root)), generator)
        )

    def displaced(
        self, mean: Float[Tensor, "*b q"], scale: Float[Tensor, "*b"], white: Float[Tensor, "*b k"]
    ) -> Float[Tensor, "*b q"]:
        """The mean with noise: from ``white``, standard normal, to covariance scale S."""
        return self.map.manifold.exp(
            mean, scale.sqrt()[..., None] * (white @ self.root.to(mean).mT)
        )

    def log_density(
        self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(y | u) without -1/2 log det(2 pi S); y and u broadcast."""
        mean, scale = self.predict(u)
        if self.map.manifold.circles:
            return self.map.log_density_given(y, mean, scale)
        white = (y - mean) @ self.inverse.to(mean).mT
        return -0.5 * (white.square().sum(-1) / scale + white.shape[-1] * scale.log())
