"""Rotating points whose angle has no noise, as Fukumizu et al. print their dynamics.

The angle is theta_t = theta_0 + t eta, with theta_0 uniform on the circle; the state scatters
around a point of that angle and is observed with noise:

    z_t = (1 + b sin(M theta_t)) (cos, sin)(theta_t) + N(0, s_z^2 I),    x_t = z_t + N(0, s_x^2 I).

The one unknown of all times is theta_0, so that Bayes' rule is a sum over a grid of its values.

References: Fukumizu et al., section 5.3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.recording import Recording

ANGLES = 7200
"""Values of theta_0: their distance is a hundredth of its error after 30 steps."""


class FreeAngle(NamedTuple):
    """The model; ``eta`` in radians a step."""

    eta: float
    b: float
    M: float = 8.0
    sigma_z: float = 0.2
    sigma_x: float = 0.2

    def point(self, theta: Float[Tensor, "*b"]) -> Float[Tensor, "*b 2"]:
        """The point that the state scatters around."""
        radius = 1 + self.b * torch.sin(self.M * theta)
        return radius[..., None] * torch.stack([theta.cos(), theta.sin()], -1)

    def recording(self, steps: int, seed: int) -> Recording:
        """States and observations of ``steps`` steps."""
        generator = Generator().manual_seed(seed)
        start = 2 * math.pi * torch.rand(1, dtype=torch.float64, generator=generator)
        around = self.point(start + self.eta * torch.arange(1, steps + 1))
        noise = torch.randn(2, steps, 2, dtype=torch.float64, generator=generator)
        states = around + self.sigma_z * noise[0]
        return Recording(states, states + self.sigma_x * noise[1])

    def optimal(self, obs: Float[Tensor, "t 2"]) -> Float[Tensor, "t 2"]:
        """E[z_t | x_1 ... x_t] by Bayes' rule over the grid of theta_0.

        Given theta_0 the states are independent: z_t = m + K (x_t - m) on average, with K = s_z^2 /
        (s_z^2 + s_x^2) and m the point of theta_t.
        """
        total = self.sigma_z**2 + self.sigma_x**2
        starts = 2 * math.pi / ANGLES * torch.arange(ANGLES, dtype=obs.dtype)
        times = self.eta * torch.arange(1, len(obs) + 1, dtype=obs.dtype)
        around = self.point(starts + times[:, None])
        log_likelihood = -(obs[:, None] - around).square().sum(-1) / (2 * total)
        weights = log_likelihood.cumsum(0).softmax(-1)
        mean = (weights[:, None] @ around)[:, 0]
        return mean + self.sigma_z**2 / total * (obs - mean)
