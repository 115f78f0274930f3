"""State-space models whose noise is not Gaussian, or not of one size: what a filter without a likelihood is for.

Each has its exact density, so that a particle filter tells the floor. z' is the next state, x its
observation, e standard normal.

==================  ===================================================================================================
`Volatility`        z' = a z + s e, x = exp(z / 2) e: only the spread of x tells of z, its sign says nothing
`Clutter`           oscillatory states; a share of the observations is uniform on a square, whatever the state
`HeavyTails`        oscillatory states, x = z + s t, t from a Student law of 2 degrees of freedom
`Spikes`            rotating states, seen by the spike counts of neurons with a preferred direction each
`Multiplicative`    rotating states, x = z + (least + max(z_1, 0)) e: noisy on one side, clear on the other
`Fork`              the direction turns by +turn or -turn with even odds, then x = z + s e: moves have two modes
==================  ===================================================================================================
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.ssm import StateSpaceModel, normal, oscillatory, rotate, rotation

LOG_2PI = math.log(2 * math.pi)


class Volatility(NamedTuple):
    """z' = persistence z + scale e, x = exp(z / 2) e, both scalars; z_0 = 0.

    References: Taylor (1982); the stochastic volatility model of Kim, Shephard and Chib (1998).
    """

    persistence: float = 0.95
    scale: float = 0.3
    m0: tuple[float, ...] = (0.0,)

    def move(
        self, z: Float[Tensor, "*b 1"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 1"]:
        """Draw z' given z."""
        return self.persistence * z + self.scale * normal(z, generator)

    def observe(
        self, z: Float[Tensor, "*b 1"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 1"]:
        """Draw x given z."""
        return (z / 2).exp() * normal(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b 1"], z: Float[Tensor, "*c 1"]
    ) -> Float[Tensor, "*e"]:
        """log N(x; 0, exp(z))."""
        return (-0.5 * (x.square() * (-z).exp() + z + LOG_2PI)).sum(-1)

    def log_transition(
        self, after: Float[Tensor, "*b 1"], z: Float[Tensor, "*c 1"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(z' | z)."""
        white = (after - self.persistence * z) / self.scale
        return (-0.5 * (white.square() + LOG_2PI)).sum(-1) - math.log(self.scale)


class Clutter(NamedTuple):
    """A model of the plane with Gaussian noise, but a ``share`` of its observations is uniform on [-width, width]^2."""

    model: StateSpaceModel = oscillatory()
    share: float = 0.3
    width: float = 2.0
    m0: tuple[float, ...] = (1.0, 0.0)

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw z' given z."""
        return self.model.move(z, generator)

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw x given z."""
        seen, anything = (
            self.model.observe(z, generator),
            self.width * (2 * uniform(z, generator) - 1),
        )
        return torch.where(uniform(z[..., :1], generator) < self.share, anything, seen)

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of (1 - share) N(x; h(z), R) + share / (2 width)^2 on the square."""
        seen = math.log(1 - self.share) + self.model.log_likelihood(x, z)
        inside = (x.abs() <= self.width).all(-1)
        anything = torch.where(
            inside, math.log(self.share) - 2 * math.log(2 * self.width), -math.inf
        ).to(seen)
        return torch.logaddexp(seen, anything)

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(z' | z)."""
        return self.model.log_transition(after, z)


class HeavyTails(NamedTuple):
    """The states of a model of the plane, x = z + scale t with t from the Student law of 2 degrees of freedom in the plane.

    t = e / sqrt(g), e standard normal and g exponential with mean 1: one g for both components. It
    has no variance.
    """

    model: StateSpaceModel = oscillatory()
    scale: float = 0.2
    m0: tuple[float, ...] = (1.0, 0.0)

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw z' given z."""
        return self.model.move(z, generator)

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw x given z."""
        g = -(1 - uniform(z[..., :1], generator)).log()
        return z + self.scale * normal(z, generator) / g.sqrt()

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of (2 pi scale^2)^-1 (1 + |x - z|^2 / (2 scale^2))^-2."""
        squared = ((x - z) / self.scale).square().sum(-1)
        return -2 * torch.log1p(squared / 2) - LOG_2PI - 2 * math.log(self.scale)

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(z' | z)."""
        return self.model.log_transition(after, z)


class Spikes(NamedTuple):
    """The states of a model of the plane, seen as Poisson counts of rate exp(gain (cos a_j, sin a_j) . z + offset).

    The preferred directions a_j of the ``neurons`` are evenly spaced.
    """

    model: StateSpaceModel = rotation()
    neurons: int = 20
    gain: float = 1.5
    offset: float = -1.5
    m0: tuple[float, ...] = (1.0, 0.0)

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw z' given z."""
        return self.model.move(z, generator)

    def log_rate(self, z: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b q"]:
        """Log rates of all neurons."""
        angle = (
            2 * math.pi / self.neurons * torch.arange(self.neurons, dtype=z.dtype, device=z.device)
        )
        return self.gain * (z @ torch.stack([angle.cos(), angle.sin()])) + self.offset

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw x given z."""
        return torch.poisson(self.log_rate(z).exp(), generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of the product of Poisson probabilities."""
        log_rate = self.log_rate(z)
        return (x * log_rate - log_rate.exp() - torch.lgamma(x + 1)).sum(-1)

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(z' | z)."""
        return self.model.log_transition(after, z)


class Multiplicative(NamedTuple):
    """The states of a model of the plane, x = z + (least + max(z_1, 0)) e."""

    model: StateSpaceModel = rotation()
    least: float = 0.1
    m0: tuple[float, ...] = (1.0, 0.0)

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw z' given z."""
        return self.model.move(z, generator)

    def scale(self, z: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 1"]:
        """Standard deviation of the noise at z."""
        return self.least + z[..., :1].clamp_min(0)

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw x given z."""
        return z + self.scale(z) * normal(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """log N(x; z, scale(z)^2 I)."""
        scale = self.scale(z)
        return -0.5 * ((x - z) / scale).square().sum(-1) - LOG_2PI - 2 * scale[..., 0].log()

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(z' | z)."""
        return self.model.log_transition(after, z)


class Fork(NamedTuple):
    """z' = z / |z| turned by +turn or -turn, even odds, + sigma_z e; x = z + sigma_x e."""

    turn: float = 0.9
    sigma_z: float = 0.1
    sigma_x: float = 0.6
    m0: tuple[float, ...] = (1.0, 0.0)

    def branch(
        self, z: Float[Tensor, "*b 2"], side: Float[Tensor, "*b"] | float
    ) -> Float[Tensor, "*b 2"]:
        """The direction of z, turned to one side (1 or -1)."""
        angle = torch.as_tensor(side, dtype=z.dtype, device=z.device) * self.turn
        return rotate(z / z.norm(dim=-1, keepdim=True), angle)

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw z' given z."""
        side = torch.where(uniform(z[..., 0], generator) < 0.5, 1.0, -1.0).to(z)
        return self.branch(z, side) + self.sigma_z * normal(z, generator)

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draw x given z."""
        return z + self.sigma_x * normal(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """log N(x; z, sigma_x^2 I)."""
        return isotropic_log_density(x - z, self.sigma_x)

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of the mean of both branches' Gaussians."""
        both = [
            isotropic_log_density(after - self.branch(z, side), self.sigma_z)
            for side in (1.0, -1.0)
        ]
        return torch.logaddexp(*both) - math.log(2)


def isotropic_log_density(residual: Float[Tensor, "*b q"], sigma: float) -> Float[Tensor, "*b"]:
    """log N(residual; 0, sigma^2 I)."""
    return -0.5 * (residual / sigma).square().sum(-1) - residual.shape[-1] * (
        math.log(sigma) + LOG_2PI / 2
    )


def uniform(like: Tensor, generator: Generator | None = None) -> Tensor:
    """Numbers between 0 and 1 of the shape, type and device of ``like``."""
    return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)
