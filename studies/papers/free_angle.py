"""Rotating points whose angle has no noise, as Fukumizu et al. print their dynamics.

The angle is theta_t = theta_0 + t eta, with theta_0 uniform on the circle; the state scatters
around a point of that angle and is observed with noise:

    z_t = (1 + b sin(M theta_t)) (cos, sin)(theta_t) + N(0, s_z^2 I),    x_t = z_t + N(0, s_x^2 I).

The one unknown of all times is theta_0, so that Bayes' rule is a sum over a grid of its values. The
states z_t alone are no Markov chain; (z_t, theta_t) is one.

References: Fukumizu et al., section 5.3.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.recording import Recording
from kbf.ssm import StateSpaceModel

ANGLES = 7200
"""Values of theta_0: 59 of them in its error after 30 steps at b = 0, about 24 at b = 0.4."""


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

    def angles(self, first: int, steps: int) -> Float[Tensor, "t a"]:
        """theta_t of the times ``first`` + 1 to ``first`` + ``steps``, for each theta_0."""
        times = torch.arange(first + 1, first + steps + 1, dtype=torch.float64)
        starts = torch.arange(ANGLES, dtype=torch.float64) * (2 * math.pi / ANGLES)
        return starts + self.eta * times[:, None]

    def log_weights(self, states: Float[Tensor, "t 2"]) -> Float[Tensor, " a"]:
        """log p(theta_0 | z_1 ... z_t), up to a constant."""
        gaps = states[:, None] - self.point(self.angles(0, len(states)))
        return -gaps.square().sum((0, -1)) / (2 * self.sigma_z**2)

    def optimal(
        self, obs: Float[Tensor, "t 2"], states: Float[Tensor, "T 2"]
    ) -> Float[Tensor, "t 2"]:
        """E[z_{T+t} | z_1 ... z_T, x_{T+1} ... x_{T+t}] by Bayes' rule over the grid of theta_0.

        Given theta_0 the states are independent: z_t = m + K (x_t - m) on average, with K = s_z^2 /
        (s_z^2 + s_x^2) and m the point of theta_t.
        """
        total = self.sigma_z**2 + self.sigma_x**2
        around = self.point(self.angles(len(states), len(obs)))
        log_likelihood = -(obs[:, None] - around).square().sum(-1) / (2 * total)
        weights = (self.log_weights(states) + log_likelihood.cumsum(0)).softmax(-1)
        mean = (weights[:, None] @ around)[:, 0]
        return mean + self.sigma_z**2 / total * (obs - mean)

    def with_angle(self, states: Float[Tensor, "T 2"]) -> StateSpaceModel:
        """The model of (z_t, theta_t) as a Markov chain, for filters of the true model.

        It starts at the time of the last of ``states``, with the mean and the variance of theta_T
        given them.
        """
        weights = self.log_weights(states).softmax(0)
        theta = self.angles(len(states) - 1, 1)[0]
        mean = torch.atan2(weights @ theta.sin(), weights @ theta.cos())
        gaps = torch.remainder(theta - mean + math.pi, 2 * math.pi) - math.pi

        def f(state: Float[Tensor, "*b 3"]) -> Float[Tensor, "*b 3"]:
            moved = state[..., 2] + self.eta
            return torch.cat([self.point(moved), moved[..., None]], -1)

        def h(state: Float[Tensor, "*b 3"]) -> Float[Tensor, "*b 2"]:
            return state[..., :2]

        noise = mean.new_tensor([self.sigma_z**2, self.sigma_z**2, 0])
        variance = torch.stack([*noise[:2], weights @ gaps.square()])
        start = torch.cat([self.point(mean), mean[None]])
        R = self.sigma_x**2 * torch.eye(2, dtype=mean.dtype)
        return StateSpaceModel(f, h, noise.diag(), R, start, variance.diag())
