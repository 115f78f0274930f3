"""State-space models whose noise is not Gaussian or depends on the state.

Each has its exact density, so that a particle filter computes the floor (the Bayes-optimal error).
z' is the next state, x its observation, e standard normal.

================  ================================================================================
`Volatility`      z' = a z + s e, x = exp(z / 2) e: the state is the log variance of x
`Clutter`         oscillatory states; a share of the observations is uniform on a square
`HeavyTails`      oscillatory states, x = z + s t, t from a Student distribution, 2 degrees of
                  freedom
`Spikes`          rotating states, observed as spike counts of neurons with preferred directions
`Multiplicative`  rotating states, x = z + (least + max(z_1, 0)) e: the noise depends on the state
`Fork`            the direction turns by +turn or -turn with even odds, then x = z + s e: the
                  transition density has two modes
================  ================================================================================
"""

import math
from dataclasses import dataclass, field
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
        """Draws z' given z."""
        return self.persistence * z + self.scale * normal(z, generator)

    def observe(
        self, z: Float[Tensor, "*b 1"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 1"]:
        """Draws x given z."""
        return (z / 2).exp() * normal(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b 1"], z: Float[Tensor, "*c 1"]
    ) -> Float[Tensor, "*e"]:
        """Returns log N(x; 0, exp(z))."""
        return (-0.5 * (x.square() * (-z).exp() + z + LOG_2PI)).sum(-1)

    def log_transition(
        self, after: Float[Tensor, "*b 1"], z: Float[Tensor, "*c 1"]
    ) -> Float[Tensor, "*e"]:
        """Returns log N(z'; persistence z, scale^2)."""
        white = (after - self.persistence * z) / self.scale
        return (-0.5 * (white.square() + LOG_2PI)).sum(-1) - math.log(self.scale)


@dataclass(frozen=True)
class ObservedPlane:
    """States that move as those of a model of the plane, from (1, 0); subclasses observe them."""

    model: StateSpaceModel
    m0 = (1.0, 0.0)

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draws z' given z."""
        return self.model.move(z, generator)

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Returns log p(z' | z)."""
        return self.model.log_transition(after, z)


@dataclass(frozen=True)
class Clutter(ObservedPlane):
    """A model of the plane; a ``share`` of its observations is uniform on [-width, width]^2."""

    model: StateSpaceModel = field(default_factory=oscillatory)
    share: float = 0.3
    width: float = 2.0

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draws x given z."""
        regular = self.model.observe(z, generator)
        clutter = self.width * (2 * uniform(z, generator) - 1)
        return torch.where(uniform(z[..., :1], generator) < self.share, clutter, regular)

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Returns log[(1 - share) N(x; h(z), R) + share / (2 width)^2 1(x in the square)]."""
        regular = math.log(1 - self.share) + self.model.log_likelihood(x, z)
        inside = (x.abs() <= self.width).all(-1)
        log_uniform = math.log(self.share) - 2 * math.log(2 * self.width)
        return torch.logaddexp(regular, torch.where(inside, log_uniform, -math.inf).to(regular))


@dataclass(frozen=True)
class HeavyTails(ObservedPlane):
    """The states of a model of the plane, x = z + scale t, t bivariate Student with 2 dof.

    t = e / sqrt(g), e standard normal and g exponential with mean 1, one g for both components. Its
    variance is infinite.
    """

    model: StateSpaceModel = field(default_factory=oscillatory)
    scale: float = 0.2

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draws x given z."""
        g = -(1 - uniform(z[..., :1], generator)).log()
        return z + self.scale * normal(z, generator) / g.sqrt()

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Returns log[(2 pi scale^2)^-1 (1 + |x - z|^2 / (2 scale^2))^-2]."""
        squared = ((x - z) / self.scale).square().sum(-1)
        return -2 * torch.log1p(squared / 2) - LOG_2PI - 2 * math.log(self.scale)


@dataclass(frozen=True)
class Spikes(ObservedPlane):
    """The states of a model of the plane, observed as Poisson counts of several neurons.

    The rates are exp(gain (cos a_j, sin a_j) . z + offset); the preferred directions a_j of the
    ``neurons`` are equally spaced.
    """

    model: StateSpaceModel = field(default_factory=rotation)
    neurons: int = 20
    gain: float = 1.5
    offset: float = -1.5

    def log_rate(self, z: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b q"]:
        """Returns the log rates of all neurons."""
        angle = (
            2 * math.pi / self.neurons * torch.arange(self.neurons, dtype=z.dtype, device=z.device)
        )
        return self.gain * (z @ torch.stack([angle.cos(), angle.sin()])) + self.offset

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draws x given z."""
        return torch.poisson(self.log_rate(z).exp(), generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Returns the logarithm of the product of Poisson probabilities."""
        log_rate = self.log_rate(z)
        return (x * log_rate - log_rate.exp() - torch.lgamma(x + 1)).sum(-1)


@dataclass(frozen=True)
class Multiplicative(ObservedPlane):
    """The states of a model of the plane, x = z + (least + max(z_1, 0)) e."""

    model: StateSpaceModel = field(default_factory=rotation)
    least: float = 0.1

    def scale(self, z: Float[Tensor, "*b 2"]) -> Float[Tensor, "*b 1"]:
        """Returns the standard deviation of the noise at z."""
        return self.least + z[..., :1].clamp_min(0)

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draws x given z."""
        return z + self.scale(z) * normal(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Returns log N(x; z, scale(z)^2 I)."""
        scale = self.scale(z)
        return -0.5 * ((x - z) / scale).square().sum(-1) - LOG_2PI - 2 * scale[..., 0].log()


class Fork(NamedTuple):
    """z' = z / |z| turned by +turn or -turn, even odds, + sigma_z e; x = z + sigma_x e."""

    turn: float = 0.9
    sigma_z: float = 0.1
    sigma_x: float = 0.6
    m0: tuple[float, ...] = (1.0, 0.0)

    def branch(
        self, z: Float[Tensor, "*b 2"], side: Float[Tensor, "*b"] | float
    ) -> Float[Tensor, "*b 2"]:
        """Returns the direction of z, turned to one side (1 or -1)."""
        angle = torch.as_tensor(side, dtype=z.dtype, device=z.device) * self.turn
        return rotate(z / z.norm(dim=-1, keepdim=True), angle)

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draws z' given z."""
        side = torch.where(uniform(z[..., 0], generator) < 0.5, 1.0, -1.0).to(z)
        return self.branch(z, side) + self.sigma_z * normal(z, generator)

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Draws x given z."""
        return z + self.sigma_x * normal(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Returns log N(x; z, sigma_x^2 I)."""
        return isotropic_log_density(x - z, self.sigma_x)

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Returns the logarithm of the mean of both branches' Gaussian densities."""
        both = [
            isotropic_log_density(after - self.branch(z, side), self.sigma_z)
            for side in (1.0, -1.0)
        ]
        return torch.logaddexp(*both) - math.log(2)


def isotropic_log_density(residual: Float[Tensor, "*b q"], sigma: float) -> Float[Tensor, "*b"]:
    """Returns log N(residual; 0, sigma^2 I)."""
    return -0.5 * (residual / sigma).square().sum(-1) - residual.shape[-1] * (
        math.log(sigma) + LOG_2PI / 2
    )


def uniform(like: Tensor, generator: Generator | None = None) -> Tensor:
    """Draws numbers between 0 and 1 of the shape, type and device of ``like``."""
    return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)
