"""Observation maps h(z) of the grammar, and how a reading is drawn around them.

=============  ===================================================================================
`whole`        z
`partly`       about half of the components
`mixed`        C z, with fewer or as many rows as components
`ranges`       distances to points of the plane of two components, or of the line of one
`bearings`     the direction to such points, as (cos, sin)
`squared`      (z + c)^2 of each component
`saturated`    tanh(2 C z)
`counts`       exp(C z + c), the rates of Poisson counts
`rounded`      C z, rounded to few values
=============  ===================================================================================
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from studies.systems.draws import Draws
from studies.systems.noise import LAWS, Noise


class Sensor(NamedTuple):
    """An observation map.

    Attributes:
        h: ``*b d`` -> ``*b q``. q: number of readings.
        matrix: C of h(z) = C z, or None.
        reading: "continuous", "rounded" or "counts".
    """

    h: Callable[[Tensor], Tensor]
    q: int
    matrix: Tensor | None = None
    reading: str = "continuous"


def of_matrix(C: Float[Tensor, "q d"], reading: str = "continuous") -> Sensor:
    """Return h(z) = C z."""
    return Sensor(lambda z: z @ C.mT, len(C), C, reading)


def whole(d: int, draws: Draws) -> Sensor:
    """Return h(z) = z."""
    return of_matrix(torch.eye(d, dtype=torch.float64))


def partly(d: int, draws: Draws) -> Sensor:
    """Return half of the components, rounded up (of one component, this one)."""
    return of_matrix(torch.eye(d, dtype=torch.float64)[draws.subset(d, (d + 1) // 2)])


def mixed(d: int, draws: Draws) -> Sensor:
    """Return C z with (d + 1) / 2 to d random rows."""
    return of_matrix(random_rows(d, draws))


def random_rows(d: int, draws: Draws) -> Float[Tensor, "q d"]:
    """Return (d + 1) / 2 to d rows of an orthogonal matrix."""
    return draws.orthogonal(d)[: draws.choice(range((d + 1) // 2, d + 1))]


def ranges(d: int, draws: Draws) -> Sensor:
    """Return distances to two anchors of each pair of components; of one component, to one."""
    anchors = 1.5 * draws.normal((d + 1) // 2, 2, 2)

    def h(z: Tensor) -> Tensor:
        gap = in_pairs(z)[..., None, :] - anchors
        return gap.norm(dim=-1).flatten(-2)

    return Sensor(h, 2 * ((d + 1) // 2))


def bearings(d: int, draws: Draws) -> Sensor:
    """Return unit vectors from two anchors of each pair of components."""
    anchors = 2 * draws.normal((d + 1) // 2, 2, 2)

    def h(z: Tensor) -> Tensor:
        gap = in_pairs(z)[..., None, :] - anchors
        return (gap / gap.norm(dim=-1, keepdim=True).clamp_min(1e-9)).flatten(-3)

    return Sensor(h, 4 * ((d + 1) // 2))


def in_pairs(z: Float[Tensor, "*b d"]) -> Float[Tensor, "*b p 2"]:
    """Return pairs of components; a last one without a partner is paired with 0."""
    even = torch.cat([z, torch.zeros_like(z[..., : z.shape[-1] % 2])], -1)
    return even.unflatten(-1, (-1, 2))


def squared(d: int, draws: Draws) -> Sensor:
    """Return (z + c)^2."""
    shift = draws.uniforms(0.3, 1.0, d)
    return Sensor(lambda z: (z + shift).square(), d)


def saturated(d: int, draws: Draws) -> Sensor:
    """Return tanh(2 C z)."""
    C = random_rows(d, draws)
    return Sensor(lambda z: (2 * z @ C.mT).tanh(), len(C))


def counts(d: int, draws: Draws) -> Sensor:
    """Return the rates exp(C z + c) of 2 d to 4 d counts, at most exp(5)."""
    q = draws.choice(range(2 * d, 4 * d + 1))
    C = draws.normal(q, d)
    C, c = C / C.norm(dim=1, keepdim=True), draws.uniforms(-0.5, 1.5, q)
    return Sensor(lambda z: (z @ C.mT + c).clamp_max(5).exp(), q, reading="counts")


def rounded(d: int, draws: Draws) -> Sensor:
    """Return C z, to be rounded."""
    return of_matrix(random_rows(d, draws), "rounded")


SENSORS: dict[str, Callable[[int, Draws], Sensor]] = {
    "whole": whole,
    "partly": partly,
    "mixed": mixed,
    "ranges": ranges,
    "bearings": bearings,
    "squared": squared,
    "saturated": saturated,
    "counts": counts,
    "rounded": rounded,
}


class Reading(NamedTuple):
    """The law of a reading given its expectation m.

    m + noise; the same rounded to multiples of ``step``; or a Poisson count of rate m.

    Attributes:
        kind: "continuous", "rounded" or "counts".
        noise: of the first two. step: ``q``, of the second.
    """

    kind: str
    noise: Noise
    step: Tensor

    @property
    def discrete(self) -> bool:
        """Whether readings repeat by chance: their densities are probabilities then."""
        return self.kind != "continuous"

    def draw(
        self, mean: Float[Tensor, "*b q"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Return readings."""
        if self.kind == "counts":
            return torch.poisson(mean, generator)
        x = mean + self.noise.draw(tuple(mean.shape[:-1]), generator)
        return self.step * (x / self.step).round() if self.kind == "rounded" else x

    def log_density(
        self, x: Float[Tensor, "*b q"], mean: Float[Tensor, "*c q"]
    ) -> Float[Tensor, "*e"]:
        """Return terms ``*e q`` of log p(x | m), as `Noise.log_density`; log P(x | m) if discrete.

        A rounded reading has the probability P(|m + noise - x| < step / 2).
        """
        if self.kind == "counts":
            return x * mean.log() - mean - torch.lgamma(x + 1)
        if self.kind == "continuous":
            return self.noise.log_density(x - mean)
        cdf, scale = LAWS[self.noise.law].cdf, self.noise.root.diag()
        upper, lower = (cdf((x - mean + side * self.step) / scale) for side in (0.5, -0.5))
        return torch.where(upper > lower, (upper - lower).clamp_min(1e-300).log(), -math.inf)

    def covariance(self, mean: Float[Tensor, " q"]) -> Float[Tensor, "q q"]:
        """Return the covariance of a reading whose expectation is ``mean``."""
        if self.kind == "counts":
            return mean.diag()
        return self.noise.covariance + (self.step.square() / 12).diag()
