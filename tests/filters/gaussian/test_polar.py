"""Filters of turning motion: moments of points of the circle against draws."""

from __future__ import annotations

import torch

from kbf.filters.gaussian.ekf import extended
from kbf.filters.gaussian.moments import GaussianState
from kbf.filters.gaussian.polar import TurningFilter, turning_filter
from kbf.recording import Recording

F64 = torch.float64


class Turning:
    """Only the unit of the speed, and z of (theta, omega)."""

    unit = 0.5

    def f(self, y: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def chart(self, z: torch.Tensor) -> torch.Tensor:
        return torch.stack([torch.atan2(z[:, 1], z[:, 0]), self.unit * z[:, 2]], -1)


def test_moments_on_the_circle_are_those_of_draws():
    mean = torch.tensor([[0.4, 0.2], [2.5, -0.1]], dtype=F64)
    cov = torch.tensor([[[0.3, 0.1], [0.1, 0.2]], [[0.8, -0.2], [-0.2, 0.1]]], dtype=F64)
    one = torch.eye(2, dtype=F64)
    filter = TurningFilter(Turning(), extended, mean[0], cov[0], one[:1, :1])
    state, generator = GaussianState(mean, cov), torch.Generator().manual_seed(0)
    e = torch.randn(2, 400_000, 2, dtype=F64, generator=generator)
    theta, omega = (mean[:, None] + e @ torch.linalg.cholesky(cov).mT).unbind(-1)
    z = torch.stack([theta.cos(), theta.sin(), omega / Turning.unit], -1)
    torch.testing.assert_close(filter.estimate(state), z.mean(1), atol=4e-3, rtol=0)
    expected = torch.stack([each.mT.cov() for each in z])
    torch.testing.assert_close(filter.covariance(state), expected, atol=4e-3, rtol=0)


def test_first_moments_are_taken_around_the_mean_direction():
    """Directions around pi: their angles, of which some are near -pi, have a small variance."""
    g = torch.Generator().manual_seed(0)
    theta = torch.pi + 0.2 * torch.randn(200, dtype=F64, generator=g)
    speed, error = torch.randn(2, 200, dtype=F64, generator=g)
    z = torch.stack([theta.cos(), theta.sin(), speed], -1)
    seen = theta + 0.1 * error
    memory = Recording(z, torch.stack([seen.cos(), seen.sin()], -1))
    filter = turning_filter(Turning(), memory, extended)
    expected = torch.stack([theta, Turning.unit * speed])
    away = (filter.mean - expected.mean(1) + torch.pi).remainder(2 * torch.pi) - torch.pi
    torch.testing.assert_close(away, torch.zeros(2, dtype=F64))
    torch.testing.assert_close(filter.cov, expected.cov())
    torch.testing.assert_close(filter.R, (0.1 * error).square().mean().reshape(1, 1))
