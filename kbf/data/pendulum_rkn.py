"""The pendulum of the Recurrent Kalman Networks, observed as images of time-correlated quality.

The state is z = (sin theta, cos theta); theta = 0 is upright. Row numbers of an image grow with
cos theta, so that the upright pendulum points down in the image: states and images are those of the
authors rotated by half a turn, which is the same task. An image shows the angle with varying
quality; the speed and the quality must be inferred over time.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.recording import Recording
from kbf.runtime.memory_limit import BYTES_OF_A_PIXEL

# In m/s^2; mass and length are 1.
GRAVITY = 9.81

# In 1/s.
FRICTION = 0.1

# Seconds between two images.
DT = 0.05

# Seconds of one step of the simulation.
SIMULATED_DT = 1e-4

# Pixels along a side of the canvas on which the rod is drawn.
CANVAS = 128

# Pixels along a side of an image.
PIXELS = 24

# Of the rod, in pixels of the canvas.
ROD_LENGTH = 55.0
ROD_WIDTH = 8.0

# Half width of the resampling filter, in pixels of an image.
LANCZOS = 3


class Quality(NamedTuple):
    """Quality of the images of a sequence: observed = f_t image + (1 - f_t) U(0, 1) in each pixel.

    f is a random walk: g_0 ~ U(0, 1), g_t = g_{t-1} + U(-step, step) within [0, 1];
    f = (g - a) / (b - a)
    within [0, 1], with a ~ U(0, low) and b ~ U(high, 1) for each sequence. The first ``clean``
    images have f = 1.
    """

    step: float = 0.2
    low: float = 0.25
    high: float = 0.75
    clean: int = 5


class PendulumRKN:
    """Sequences of a pendulum with friction, observed as noisy images of 24 x 24 pixels.

    It starts at rest at a uniform angle.

    omega' = omega + (3 g sin theta - friction omega) dt, theta' = theta + omega' dt in steps of
    1e-4 s (inertia m l^2 / 3). Every 0.05 s N(0, sigma_omega^2) is added to omega and an image is
    taken. Sequences are drawn one by one: for one seed, the training sequences for a smaller
    ``n_train`` are the first of those for a larger one, and the test sequences are the same.

    Attributes:
        train: ``n_train`` sequences, states ``T 2`` float64, observations ``T 1 24 24`` float32 in
            [0, 1]. test: ``n_test``.

    References: Becker, Pandya, Gebhardt, Zhao, Taylor, Neumann (2019), Recurrent Kalman Networks,
    section 5.1.
    """

    @staticmethod
    def memory_needed(n_train: int = 0, n_test: int = 25, steps: int = 150, **_: Any) -> int:
        """Return the bytes of the images, float32 and drawn one recording at a time, at most."""
        return BYTES_OF_A_PIXEL // 2 * (n_train + n_test) * steps * 24 * 24

    def __init__(
        self,
        n_train: int,
        n_test: int = 25,
        seed: int = 0,
        *,
        steps: int = 150,
        sigma_omega: float = 0.1,
        quality: Quality | None = None,
        clean: bool = False,
    ) -> None:
        """Simulate the data.

        Args:
            n_train: number of training sequences. n_test: number of test sequences. seed: of all
                random draws.
            steps: length of each sequence. sigma_omega: standard deviation of the noise of the
                speed, rad/s a step.
            quality: of the images; None for that of the paper. clean: True for images without
                noise.

        Raises:
            ValueError: no training or test sequence, fewer than two steps, or numbers out of range.
        """
        quality = Quality() if quality is None else quality
        if n_train < 1 or n_test < 1 or steps < 2:
            raise ValueError(
                "the pendulum needs n_train >= 1 and n_test >= 1 sequences of steps >= 2, "
                f"got n_train {n_train}, n_test {n_test} and steps {steps}"
            )
        if not (
            0 <= quality.low < quality.high <= 1
            and quality.step >= 0
            and quality.clean >= 0
            and sigma_omega >= 0
        ):
            raise ValueError(
                "quality needs 0 <= low < high <= 1, and no number may be negative: "
                f"{quality}, {sigma_omega}"
            )
        settings = steps, sigma_omega, None if clean else quality
        self.test: list[Recording] = draw_sequences(n_test, 2 * seed + 1, *settings)
        self.train: list[Recording] = draw_sequences(n_train, 2 * seed, *settings)


def draw_sequences(
    count: int, seed: int, steps: int, sigma_omega: float, quality: Quality | None
) -> list[Recording]:
    """Returns ``count`` sequences, each drawn with its own generator."""
    generators = [Generator().manual_seed(1_000_003 * seed + k) for k in range(count)]
    start = torch.stack([2 * math.pi * uniform(g) for g in generators])
    noise = torch.stack(
        [sigma_omega * torch.randn(steps - 1, generator=g, dtype=torch.float64) for g in generators]
    )
    angles = swing(start, noise)
    factors = [
        torch.ones(steps, dtype=torch.float64) if quality is None else walk(quality, steps, g)
        for g in generators
    ]
    states = torch.stack([angles.sin(), angles.cos()], -1)
    return [
        Recording(z, spoil(reduce(lines(theta)), f, g)[:, None])
        for z, theta, f, g in zip(states, angles, factors, generators, strict=True)
    ]


def swing(start: Float[Tensor, " b"], noise: Float[Tensor, "b T"]) -> Float[Tensor, "b T+1"]:
    """Returns the angles from rest; ``noise`` is added to the speed after each move."""
    theta, omega = start, torch.zeros_like(start)
    angles = [theta]
    for e in noise.unbind(1):
        for _ in range(round(DT / SIMULATED_DT)):
            omega = omega + SIMULATED_DT * (3 * GRAVITY * theta.sin() - FRICTION * omega)
            theta = theta + SIMULATED_DT * omega
        omega = omega + e
        angles.append(theta)
    return torch.stack(angles, 1)


def lines(theta: Float[Tensor, " n"]) -> Float[Tensor, "n 128 128"]:
    """Returns pictures of a rod from the middle towards (sin theta, cos theta): 1 on it, else 0.

    The first coordinate is to the right, the second down.
    """
    centre = torch.arange(CANVAS, dtype=theta.dtype) + 0.5 - CANVAS / 2
    right, down = centre[None, None, :], centre[None, :, None]
    s, c = theta.sin()[:, None, None], theta.cos()[:, None, None]
    along, across = right * s + down * c, right * c - down * s
    return ((along >= 0) & (along <= ROD_LENGTH) & (across.abs() <= ROD_WIDTH / 2)).to(theta.dtype)


def reduce(images: Float[Tensor, "n 128 128"]) -> Float[Tensor, "n 24 24"]:
    """Returns the pictures resampled by a Lanczos filter along rows and columns."""
    W = lanczos(CANVAS, PIXELS).to(images)
    return (W @ images @ W.mT).clamp(0, 1)


def lanczos(n: int, m: int) -> Float[Tensor, "m n"]:
    """Returns the weights of n pixels in each of m < n: sinc(u) sinc(u / 3), normalised to sum 1.

    u is the distance in new pixels, |u| < 3.
    """
    old = (torch.arange(n, dtype=torch.float64) + 0.5) * m / n
    u = old - (torch.arange(m, dtype=torch.float64) + 0.5)[:, None]
    W = torch.where(u.abs() < LANCZOS, torch.sinc(u) * torch.sinc(u / LANCZOS), 0)
    return W / W.sum(1, keepdim=True)


def walk(quality: Quality, steps: int, generator: Generator) -> Float[Tensor, " T"]:
    """Draws f of `Quality`."""
    low = quality.low * uniform(generator)
    high = quality.high + (1 - quality.high) * uniform(generator)
    g = [uniform(generator)]
    draws = torch.rand(steps - 1, generator=generator, dtype=torch.float64)
    for move in quality.step * (2 * draws - 1):
        g.append((g[-1] + move).clamp(0, 1))
    f = ((torch.stack(g) - low) / (high - low)).clamp(0, 1)
    f[: quality.clean] = 1
    return f


def spoil(
    images: Float[Tensor, "T 24 24"], f: Float[Tensor, " T"], generator: Generator
) -> Float[Tensor, "T 24 24"]:
    """Returns f_t image + (1 - f_t) U(0, 1), float32."""
    noise = torch.rand(images.shape, generator=generator, dtype=images.dtype)
    f = f[:, None, None]
    return (f * images + (1 - f) * noise).float()


def uniform(generator: Generator) -> Tensor:
    """Draws one number from U(0, 1), float64."""
    return torch.rand((), generator=generator, dtype=torch.float64)
