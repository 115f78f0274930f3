"""Gaussian noise of one covariance around a kernel ridge map: the law of smooth maps with additive noise, as a law among others."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.base import LOG_2PI
from kbf.densities.ridge import RidgeMap


class GaussianDensity(NamedTuple):
    """y = m(u) + e, e ~ N(0, scale(u) S): `kbf.densities.ridge.RidgeMap` with its normalising constant."""

    map: RidgeMap

    @property
    def constant(self) -> Tensor:
        """-1/2 log det(2 pi S)."""
        noise = self.map.noise
        return -0.5 * (torch.logdet(noise) + len(noise) * LOG_2PI)

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y given u."""
        return self.map.sample(u, generator)

    def log_density(
        self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of N(y; m(u), scale(u) S)."""
        return self.map.log_density(y, u) + self.constant.to(u)

    def table(self, y: Float[Tensor, "n q"], u: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
        """The same of every y given every u."""
        return self.map.log_density_table(y, *self.map.predict(u)) + self.constant.to(u)

    def mean(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """E[y | u]."""
        return self.map.expected(*self.map.predict(u))

    def covariance(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q q"]:
        """scale(u) S, in flat space."""
        return self.map.predict(u)[1][..., None, None] * self.map.noise.to(u)


def refitted(map: RidgeMap, u: Float[Tensor, "n d"], y: Float[Tensor, "n q"]) -> RidgeMap:
    """The map with the same kernel, landmarks and ridge, fitted to other points (`kbf.densities.ridge.fit_ridge_map`)."""
    phi, offset = map.features(u), y.mean(0)
    factor = torch.linalg.inv(phi.mT @ phi + map.ridge * torch.eye(phi.shape[1]).to(phi))
    coefficients = factor @ (phi.mT @ (y - offset))
    held_out = 1 - ((phi @ factor) * phi).sum(-1)
    error = (y - offset - phi @ coefficients) / held_out[:, None]
    moved = map.manifold.log(map.manifold.project(y - error), y)
    noise = (held_out[:, None] * moved).mT @ moved / len(y) + 1e-9 * y.var(0).mean() * torch.eye(
        moved.shape[1]
    ).to(y)
    return map._replace(coefficients=coefficients, offset=offset, factor=factor, noise=noise)
