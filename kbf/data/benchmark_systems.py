"""State-space models of other papers' comparisons of filters, and recordings of them.

All noises are Gaussian and independent. z' is the next state, x its observation. "r dB" means 10
log10(1 / r^2) with r^2 the variance of each observation.

===================  =============================================================================
`discrete_lorenz`    z' = sum_{j=0..5} (0.02 A(z))^j / j! z + N(0, q^2 I), x = R z + N(0, r^2 I)
`spherical_lorenz`   the same states, x = (norm, inclination, azimuth) + N(0, r^2 I)
`lorenz_flow`        the Lorenz differential equations every 0.02, no noise of states, x = z + noise
`lorenz96`           the equations of Lorenz (1996) in d variables every 0.05, x = z + N(0, r^2 I)
`double_pendulum`    two rods every 0.05 s, both angles observed
`Bearings`           a target that turns, observed by three sensors of its bearing
===================  =============================================================================

References: Lorenz (1963); Lorenz (1996); Revach et al. (2022), KalmanNet, section IV.C, for the
discrete Lorenz equations and the rotated, spherical and decimated observations.
"""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.recording import Recording
from kbf.runtime.html_repr import Shown
from kbf.ssm import (
    StateSpaceModel,
    normal,
    rotate,
    simulate,
    wrapped_log_density,
)

# Time between two steps of the Lorenz equations, and terms of the Taylor series of a step.
LORENZ_STEP = 0.02
LORENZ_TERMS = 5
# Angle of the turns of the sensors about each axis.
SENSOR_TURN = math.pi / 180
# Time of a Runge-Kutta step, and their number between two observations.
FLOW_STEP = 1e-3
FLOW_STEPS = 20
LORENZ96_STEP = 0.01
LORENZ96_STEPS = 5
# Most variables of Lorenz (1996): a covariance of so many needs 0.2e9 bytes.
MAX_VARIABLES = 5000
PENDULUM_STEP = 0.005
PENDULUM_STEPS = 10
# Variance of the noise of states, as a share of that of observations.
STATE_NOISE = 0.01
GRAVITY = 9.81
# Recordings that are drawn together, by one generator: the first ones do not depend on how many.
DRAWN_TOGETHER = 20

Field = Callable[[Tensor], Tensor]


def runge_kutta(f: Field, z: Float[Tensor, "*b d"], step: float, steps: int) -> Tensor:
    """Return z after some steps of the classical Runge-Kutta method for dz/dt = f(z)."""
    for _ in range(steps):
        a = f(z)
        b = f(z + step / 2 * a)
        c = f(z + step / 2 * b)
        z = z + step / 6 * (a + 2 * b + 2 * c + f(z + step * c))
    return z


def taylor_step(z: Float[Tensor, "*b 3"]) -> Float[Tensor, "*b 3"]:
    """Return the Taylor series of exp(0.02 A) z to the fifth order, with A fixed at z.

    A(z) = [[-10, 10, 0], [28 - z_3, -1, 0], [z_2, 0, -8/3]]; A(z) z is `lorenz_field`.
    """
    total = term = z
    for j in range(1, LORENZ_TERMS + 1):
        u, v, w = term.unbind(-1)
        change = (10 * (v - u), (28 - z[..., 2]) * u - v, z[..., 1] * u - 8 / 3 * w)
        term = torch.stack(change, -1) * (LORENZ_STEP / j)
        total = total + term
    return total


def lorenz_field(z: Float[Tensor, "*b 3"]) -> Float[Tensor, "*b 3"]:
    """Return dz/dt = (10 (z_2 - z_1), z_1 (28 - z_3) - z_2, z_1 z_2 - 8/3 z_3)."""
    x, y, w = z.unbind(-1)
    return torch.stack([10 * (y - x), x * (28 - w) - y, x * y - 8 / 3 * w], -1)


def lorenz96_field(z: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """Return dz_i/dt = (z_{i+1} - z_{i-2}) z_{i-1} - z_i + 8, with indices modulo d."""
    return (z.roll(-1, -1) - z.roll(2, -1)) * z.roll(1, -1) - z + 8


def pendulum_field(z: Float[Tensor, "*b 4"]) -> Float[Tensor, "*b 4"]:
    """Return d(a, b, p, q)/dt of two rods without mass with unit masses at their ends.

    a and b are the angles of the rods from the vertical, p and q their speeds. With D = a - b and
    N = 3 - cos 2D: p' = (-3 g sin a - g sin(a - 2b) - 2 sin D (q^2 + p^2 cos D)) / N,
    q' = 2 sin D (2 p^2 + 2 g cos a + q^2 cos D) / N.
    """
    a, b, p, q = z.unbind(-1)
    D = a - b
    N = 3 - (2 * D).cos()
    g, s, c = GRAVITY, D.sin(), D.cos()
    dp = (-3 * g * a.sin() - g * (a - 2 * b).sin() - 2 * s * (q.square() + p.square() * c)) / N
    dq = 2 * s * (2 * p.square() + 2 * g * a.cos() + q.square() * c) / N
    return torch.stack([p, q, dp, dq], -1)


def sensor_rotation() -> Float[Tensor, "3 3"]:
    """Return R, turns by one degree about the last, the middle and the first axis."""
    c, s = math.cos(SENSOR_TURN), math.sin(SENSOR_TURN)
    z = torch.tensor([[c, -s, 0], [s, c, 0], [0, 0, 1]], dtype=torch.float64)
    y = torch.tensor([[c, 0, s], [0, 1, 0], [-s, 0, c]], dtype=torch.float64)
    x = torch.tensor([[1, 0, 0], [0, c, -s], [0, s, c]], dtype=torch.float64)
    return z @ y @ x


def spherical(z: Float[Tensor, "*b 3"]) -> Float[Tensor, "*b 3"]:
    """Return (|z|, arccos(z_3 / |z|), the angle of (z_1, z_2) in [0, 2 pi))."""
    norm = z.norm(dim=-1)
    azimuth = torch.atan2(z[..., 1], z[..., 0]).remainder(2 * math.pi)
    return torch.stack([norm, (z[..., 2] / norm).arccos(), azimuth], -1)


def variance_of(noise_db: int | float) -> float:
    """Return r^2 = 10^(-dB / 10).

    >>> variance_of(20)
    0.01
    """
    return 10 ** (-noise_db / 10)


def with_noise(
    f: Field, h: Field, variances: list[float], observed: list[float], start: Tensor, spread: Tensor
) -> StateSpaceModel:
    """Return the model with diagonal covariances; ``spread``: standard deviations of z_0."""
    Q, R = (torch.tensor(v, dtype=torch.float64).diag() for v in (variances, observed))
    return StateSpaceModel(f, h, Q, R, start.double(), spread.double().square().diag())


def discrete_lorenz(
    noise_db: int | float = 0.0, *, q2: float | None = None, rotated: bool = True
) -> StateSpaceModel:
    """Return the Lorenz equations in discrete time, from (1, 1, 1).

    Args:
        noise_db: r^2 of the observations.
        q2: variance of the noise of states; None for r^2 / 100.
        rotated: x = R z by `sensor_rotation`; False for x = z.
    """
    R, r2 = sensor_rotation(), variance_of(noise_db)
    q2 = STATE_NOISE * r2 if q2 is None else q2
    h = (lambda z: z @ R.to(z).mT) if rotated else (lambda z: z)
    return with_noise(taylor_step, h, [q2] * 3, [r2] * 3, torch.ones(3), torch.zeros(3))


def spherical_lorenz(noise_db: int | float = 0.0) -> StateSpaceModel:
    """Return the Lorenz equations in discrete time, seen in spherical coordinates; q^2 = r^2."""
    r2 = variance_of(noise_db)
    return with_noise(taylor_step, spherical, [r2] * 3, [r2] * 3, torch.ones(3), torch.zeros(3))


def lorenz_flow(noise_db: int | float = 0.0) -> StateSpaceModel:
    """Return the Lorenz differential equations, every 0.02, from N((0, 0, 25), 8^2 I)."""

    def f(z: Tensor) -> Tensor:
        return runge_kutta(lorenz_field, z, FLOW_STEP, FLOW_STEPS)

    start, r2 = torch.tensor([0.0, 0.0, 25.0]), variance_of(noise_db)
    return with_noise(f, lambda z: z, [0.0] * 3, [r2] * 3, start, torch.full((3,), 8.0))


def lorenz96(d: int = 10, noise_db: int | float = 0.0) -> StateSpaceModel:
    """Return the equations of Lorenz (1996), every 0.05, from N(8/3, 3^2 I); q^2 = r^2 / 100.

    Raises:
        ValueError: fewer than four variables, or more than `MAX_VARIABLES`.
    """
    if not 4 <= d <= MAX_VARIABLES:
        raise ValueError(
            f"the equations of Lorenz (1996) need 4 to {MAX_VARIABLES:,} variables, got {d}"
        )

    def f(z: Tensor) -> Tensor:
        return runge_kutta(lorenz96_field, z, LORENZ96_STEP, LORENZ96_STEPS)

    r2 = variance_of(noise_db)
    start, spread = torch.full((d,), 8 / 3), torch.full((d,), 3.0)
    return with_noise(f, lambda z: z, [STATE_NOISE * r2] * d, [r2] * d, start, spread)


def double_pendulum() -> StateSpaceModel:
    """Return a double pendulum, every 0.05 s.

    States are two angles and their speeds, observations the angles with a standard deviation of
    0.05. The noise of a step has the standard deviations 0.002 (angles) and 0.02 (speeds). It
    starts at rest, the variance of the angles is that of U(-1.2, 1.2).
    """

    def f(z: Tensor) -> Tensor:
        return runge_kutta(pendulum_field, z, PENDULUM_STEP, PENDULUM_STEPS)

    spread = torch.tensor([1.2, 1.2, 0, 0]) / 3**0.5
    Q = [0.002**2] * 2 + [0.02**2] * 2
    return with_noise(f, lambda z: z[..., :2], Q, [0.05**2] * 2, torch.zeros(4), spread)


def turned(z: Float[Tensor, "*b 5"]) -> Float[Tensor, "*b 5"]:
    """Return position, velocity and turn rate (p, v, w) a step later, without noise.

    The velocity turns by w and the position moves along the arc; then v - 0.004 p and w 0.99.
    """
    p, v, w = z[..., :2], z[..., 2:4], z[..., 4]
    half = w / 2  # the arc is |v| sinc(w / 2) long, in the direction of half of the turn
    moved = p + rotate(v, half) * torch.sinc(half / math.pi)[..., None]
    return torch.cat([moved, rotate(v, w) - 0.004 * moved, 0.99 * w[..., None]], -1)


class Bearings(StateSpaceModel):
    """A target (p, v, w) that turns, and the bearings of three sensors as (cos, sin) each.

    A bearing has an error N(0, 0.03^2). f and h with R = 0.03^2 I are its additive form: the part
    of that noise along the ray carries no information on the state.
    """

    SENSORS = ((-60.0, -60.0), (60.0, -60.0), (0.0, 70.0))
    SIGMA = 0.03

    def observe(
        self, z: Float[Tensor, "*b 5"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 6"]:
        """Draw the cosines of the three bearings, then their sines."""
        pairs = bearings(z).unflatten(-1, (2, 3)).mT
        return rotate(pairs, self.SIGMA * normal(pairs[..., 0], generator)).mT.flatten(-2)

    def log_likelihood(
        self, x: Float[Tensor, "*b 6"], z: Float[Tensor, "*c 5"]
    ) -> Float[Tensor, "*e"]:
        """Return the sum of the log densities of the three angles."""
        seen, expected = (each.unflatten(-1, (2, 3)).mT for each in (x, bearings(z)))
        return wrapped_log_density(seen, expected, self.SIGMA).sum(-1)


def bearings(z: Float[Tensor, "*b 5"]) -> Float[Tensor, "*b 6"]:
    """Return the cosines of the directions from the sensors to the target, then their sines."""
    ray = z[..., None, :2] - torch.tensor(Bearings.SENSORS).to(z)
    return (ray / ray.norm(dim=-1, keepdim=True)).mT.flatten(-2)


def turning_target() -> Bearings:
    """Return `Bearings`: noises 0.05 of p and v and 0.005 of w.

    It starts with the moments of p in U(-25, 25), v from N(0, 1.2^2) and w from N(0, 0.05^2).
    """
    spread = torch.tensor([25 / 3**0.5] * 2 + [1.2] * 2 + [0.05])
    noises = [0.05**2] * 4 + [0.005**2]
    return Bearings(
        *with_noise(turned, bearings, noises, [Bearings.SIGMA**2] * 6, torch.zeros(5), spread)
    )


class SystemRecordings(Shown):
    """Recordings of a state-space model, each from a start of its own.

    For one seed, the training recordings for a smaller ``n_train`` are the first of those for a
    larger one, and the test recordings are the same.

    Attributes:
        train, validation, test: recordings, float64.
        problem: None. The Bayes-optimal error of these models requires more particles than fit
            into memory.
    """

    problem = None

    def __init__(
        self,
        system: StateSpaceModel,
        n_train: int,
        n_test: int = 50,
        n_validation: int = 20,
        seed: int = 0,
        *,
        steps: int = 100,
        uniform: int = 0,
        warm_up: int = 0,
    ) -> None:
        """Simulate the recordings.

        Args:
            system: the model; z_0 has its moments m0 and P0, and P0 is diagonal.
            n_train, n_test, n_validation: numbers of recordings.
            seed: of all random draws.
            steps: of each recording.
            uniform: the first components of z_0 that are uniform; the others are normal.
            warm_up: moves without noise before a recording begins.

        Raises:
            ValueError: no training or test recording, or fewer than two steps.
        """
        if n_train < 1 or n_test < 1 or n_validation < 0 or steps < 2:
            raise ValueError(
                "recordings of a system need n_train >= 1, n_test >= 1, n_validation >= 0 and "
                f"steps >= 2, got {(n_train, n_test, n_validation, steps)}"
            )
        self.system, self.steps, self.uniform, self.warm_up = system, steps, uniform, warm_up
        parts = {"train": n_train, "validation": n_validation, "test": n_test}
        drawn = {
            name: self.draw(count, 3 * seed + k) for k, (name, count) in enumerate(parts.items())
        }
        self.train: list[Recording] = drawn["train"]
        self.validation: list[Recording] = drawn["validation"]
        self.test: list[Recording] = drawn["test"]

    def draw(self, count: int, seed: int) -> list[Recording]:
        """Draw recordings, `DRAWN_TOGETHER` at a time."""
        found: list[Recording] = []
        for k in range(math.ceil(count / DRAWN_TOGETHER)):
            generator = Generator().manual_seed(1_000_003 * seed + k)
            z = self.starts(generator)
            for _ in range(self.warm_up):
                z = self.system.f(z)
            states, obs, *_ = simulate(self.system, z, self.steps, generator)
            found += [Recording(*each) for each in zip(states, obs, strict=True)]
        return found[:count]

    def starts(self, generator: Generator) -> Float[Tensor, "b d"]:
        """Draw z_0 of `DRAWN_TOGETHER` recordings."""
        m0, spread = self.system.m0, self.system.P0.diagonal().sqrt()
        e = normal(m0.expand(DRAWN_TOGETHER, -1), generator)
        flat = torch.rand(e.shape, generator=generator, dtype=e.dtype)
        e[:, : self.uniform] = 3**0.5 * (2 * flat[:, : self.uniform] - 1)
        return m0 + spread * e
