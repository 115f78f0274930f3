"""The UKF that knows a system: a Gaussian of (z, earlier states, log gains, biases).

Noises and jumps are matched by their covariances, rounding by its variance step^2 / 12, and Poisson
counts by their mean rates.
"""

import math

import torch
from torch import Generator, Tensor

from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.ssm import StateSpaceModel
from studies.systems.system import PERSISTENCE, Latent, System

# Draws of the latent state before the first step, for its mean and covariance.
DRAWS = 4000
# E size^2 of a jump whose size is log-uniform on (0.3, 3): (9 - 0.09) / (2 log 10).
JUMP_VARIANCE = (9 - 0.09) / (2 * math.log(10))


def moment_filter(system: System, seed: int = 0) -> UnscentedKalmanFilter:
    """Return the UKF of a system with one motion."""
    d, L = system.d, system.delay
    start = system.start(DRAWS, Generator().manual_seed(seed))
    points = flat(start)
    gains, biases = start.log_gain.shape[1], len(system.bias_spread)
    size = d * (L + 1) + gains + biases
    persistent = PERSISTENCE * torch.ones(gains + biases, dtype=torch.float64)

    def f(y: Tensor, u: Tensor | None = None) -> Tensor:
        z = system.motions[0].f(y[..., :d])
        z = z if u is None else z + u @ system.B.mT
        return torch.cat([z, y[..., : d * L], persistent * y[..., d * (L + 1) :]], -1)

    def h(y: Tensor) -> Tensor:
        rows = y.reshape(-1, size)
        return system.expected(unflat(system, rows)).unflatten(0, y.shape[:-1])

    Q = torch.zeros(size, size, dtype=torch.float64)
    Q[:d, :d] = system.noise.covariance
    Q[:d, :d] += system.jump_rate * JUMP_VARIANCE * torch.eye(d, dtype=torch.float64)
    spread = torch.cat([system.gain_spread * torch.ones(gains).double(), system.bias_spread])
    Q[d * (L + 1) :, d * (L + 1) :] = (1 - PERSISTENCE**2) * spread.square().diag()
    R = system.reading.covariance(system.expected(start).mean(0))
    model = StateSpaceModel(f, h, Q, R, points.mean(0), torch.cov(points.mT).view(size, size))
    missing = system.faults is not None or bool(system.held.any())
    return UnscentedKalmanFilter(model, allow_missing_sensors=missing, controlled=system.controlled)


def flat(s: Latent) -> Tensor:
    """Return the continuous parts of latent states as vectors."""
    return torch.cat([s.z, s.past.flatten(1), s.log_gain, s.bias], 1)


def unflat(system: System, rows: Tensor) -> Latent:
    """Return latent states from such vectors."""
    d, L, gains = system.d, system.delay, system.q if system.gain_spread else 0
    widths = [d, d * L, gains, len(system.bias_spread)]
    z, past, log_gain, bias = rows.split(widths, -1)
    regime = torch.zeros(len(rows), dtype=torch.long)
    return Latent(z, past.unflatten(1, (L, d)), regime, log_gain, bias, rows[:, :0, None])
