"""State maps z' = f(z) of the grammar, with states of unit order.

==============  ==================================================================================
`linear`        z' = A z, eigenvalues of absolute value 0.8 to 0.99
`rotating`      each pair of components turns around the unit circle
`oscillating`   the same, with a radius that oscillates with the angle
`chaotic`       sine maps (1 and 2 components), Lorenz (3), Lorenz-96 (more)
`polynomial`    z' = z + h (M z + quadratic terms of constant energy - cubic damping)
`network`       z' = a z + W_2 tanh(W_1 z + b)
==============  ==================================================================================
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kbf.data.benchmark_systems import runge_kutta
from kbf.ssm import rotate
from studies.systems.draws import Draws

# Last component of an odd number of components, which has no partner to turn with: z' = 0.9 z.
LONE_COMPONENT = 0.9
# Mean and standard deviation of the Lorenz attractor, by component.
LORENZ_MEAN = (0.0, 0.0, 23.5)
LORENZ_STD = (7.9, 9.0, 8.6)
# The same of Lorenz-96.
LORENZ_96_MEAN = 2.3
LORENZ_96_STD = 3.6


class Motion(NamedTuple):
    """A state map and the noise that suits it.

    Attributes:
        f: ``*b d`` -> ``*b d``.
        levels: least and largest standard deviation of the noise of a step.
        matrix: A of z' = A z, or None.
    """

    f: Callable[[Tensor], Tensor]
    levels: tuple[float, float]
    matrix: Tensor | None = None


def linear(d: int, draws: Draws) -> Motion:
    """Return z' = A z; A = r S O S^-1 with O orthogonal and 0.8 <= r <= 0.99.

    The noise gives states a variance of about 1.
    """
    radius, factor = draws.uniform(0.8, 0.99), draws.uniforms(0.7, 1.4, d)
    A = radius * (factor[:, None] * draws.orthogonal(d) / factor)
    level = math.sqrt(1 - radius**2)
    return Motion(lambda z: z @ A.mT, (level, level), A)


def rotating(d: int, draws: Draws) -> Motion:
    """Return the map that turns the direction of each pair by an angle of its own."""
    return turning(d, draws, depth=0.0)


def oscillating(d: int, draws: Draws) -> Motion:
    """Return the same with the radius 1 + depth sin(M theta)."""
    return turning(d, draws, depth=draws.uniform(0.2, 0.5))


def turning(d: int, draws: Draws, depth: float) -> Motion:
    """Return the map of pairs (cos, sin)(theta) to radius (cos, sin)(theta + turn)."""
    sign = 1.0 if draws.chance(0.5) else -1.0
    turns, waves = sign * draws.uniforms(0.1, 0.6, d // 2), float(draws.choice((3, 5, 8)))

    def f(z: Tensor) -> Tensor:
        pairs = z[..., : d // 2 * 2].unflatten(-1, (d // 2, 2))
        unit = pairs / pairs.norm(dim=-1, keepdim=True).clamp_min(1e-9)
        moved = rotate(unit, turns.expand(unit.shape[:-1]))
        theta = torch.atan2(moved[..., 1], moved[..., 0])
        moved = (1 + depth * (waves * theta).sin())[..., None] * moved
        return torch.cat([moved.flatten(-2), LONE_COMPONENT * z[..., d // 2 * 2 :]], -1)

    return Motion(f, (0.05, 0.3))


def chaotic(d: int, draws: Draws) -> Motion:
    """Return a chaotic map of d components."""
    if d < 3:
        return sine_maps(draws)
    return lorenz(draws) if d == 3 else lorenz_96(draws)


def sine_maps(draws: Draws) -> Motion:
    """Return z_i' = a sin(pi ((1 - c) z_i + c z_j)), j the component before i."""
    size, coupling = draws.uniform(0.9, 0.99), draws.uniform(0.05, 0.3)

    def f(z: Tensor) -> Tensor:
        return size * (math.pi * ((1 - coupling) * z + coupling * z.roll(1, -1))).sin()

    return Motion(f, (0.01, 0.05))


def lorenz(draws: Draws) -> Motion:
    """Return the Lorenz equations over a time of 0.02 to 0.06, in units of their attractor."""
    step, rho = draws.uniform(0.02, 0.06), draws.uniform(26.0, 32.0)
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in (LORENZ_MEAN, LORENZ_STD))

    def slope(z: Tensor) -> Tensor:
        x, y, w = z.unbind(-1)
        return torch.stack([10 * (y - x), x * (rho - w) - y, x * y - 8 / 3 * w], -1)

    return Motion(
        lambda z: (runge_kutta(slope, mean + std * z, step / 4, 4) - mean) / std, (0.01, 0.1)
    )


def lorenz_96(draws: Draws) -> Motion:
    """Return dz_i/dt = (z_{i+1} - z_{i-2}) z_{i-1} - z_i + F over 0.03 to 0.1, in such units."""
    step, force = draws.uniform(0.03, 0.1), draws.uniform(6.0, 10.0)

    def slope(z: Tensor) -> Tensor:
        return (z.roll(-1, -1) - z.roll(2, -1)) * z.roll(1, -1) - z + force

    def f(z: Tensor) -> Tensor:
        whole = LORENZ_96_MEAN + LORENZ_96_STD * z
        return (runge_kutta(slope, whole, step / 4, 4) - LORENZ_96_MEAN) / LORENZ_96_STD

    return Motion(f, (0.01, 0.1))


def polynomial(d: int, draws: Draws) -> Motion:
    """Return z' = z + h (M z + q (z_{i+1} z_{i-1} - z_{i-2} z_{i-1}) - z^3).

    M has growth 0.5 to 1.5 and turns. Sums of z_i times the quadratic term are 0. States beyond 2
    are moved as from 2, so that the map is bounded.
    """
    h, growth, size = draws.uniform(0.05, 0.25), draws.uniform(0.5, 1.5), draws.uniform(0.2, 0.8)
    skew = draws.normal(d, d) / math.sqrt(d)
    M = growth * torch.eye(d, dtype=torch.float64) + skew - skew.mT

    def f(z: Tensor) -> Tensor:
        z = z.clamp(-2, 2)
        quadratic = (z.roll(-1, -1) - z.roll(2, -1)) * z.roll(1, -1)
        return z + h * (z @ M.mT + size * quadratic - z**3)

    return Motion(f, (0.03, 0.2))


def network(d: int, draws: Draws) -> Motion:
    """Return z' = a z + W_2 tanh(W_1 z + b) with 2 d + 4 units."""
    units, leak = 2 * d + 4, draws.uniform(0.3, 0.7)
    W1, b = 2 * draws.normal(units, d) / math.sqrt(d), 0.5 * draws.normal(units)
    W2 = (1 - leak) * 2 * draws.normal(d, units) / math.sqrt(units)
    return Motion(lambda z: leak * z + (z @ W1.mT + b).tanh() @ W2.mT, (0.05, 0.25))


MOTIONS: dict[str, Callable[[int, Draws], Motion]] = {
    "linear": linear,
    "rotating": rotating,
    "oscillating": oscillating,
    "chaotic": chaotic,
    "polynomial": polynomial,
    "network": network,
}
