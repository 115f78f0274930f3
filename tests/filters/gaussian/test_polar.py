"""Filters of turning motion: moments of points of the circle against draws."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch

from kbf.filters.gaussian.ekf import EKF, extended
from kbf.filters.gaussian.moments import GaussianState
from kbf.filters.gaussian.polar import TurningFilter, turning_filter
from kbf.filters.gaussian.ukf import UKF, sigma_points, unscented
from kbf.filters.rollout import rollout
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


class Pushed(Turning):
    """theta' = theta + omega, omega' = 0.9 omega + 0.3 e: linear, with noise of the speed alone."""

    def f(self, y: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
        return torch.cat([y[..., :1] + y[..., 1:], 0.9 * y[..., 1:] + 0.3 * e], -1)


A = torch.tensor([[1.0, 1.0], [0.0, 0.9]], dtype=F64)
Q = torch.tensor([[0.0, 0.0], [0.0, 0.09]], dtype=F64)
SIGMA_POINTS = partial(unscented, sigma=sigma_points(3, 1.0, 0.0, 0.0))
both = pytest.mark.parametrize("linearise", [extended, SIGMA_POINTS], ids=["ekf", "ukf"])


@both
def test_a_linear_equation_is_filtered_by_the_kalman_filter(linearise):
    """Two recordings of which one turns past pi; observed angles are one number each."""
    mean = torch.tensor([2.9, 0.2], dtype=F64)
    cov = torch.tensor([[0.2, 0.05], [0.05, 0.1]], dtype=F64)
    R = torch.tensor([[0.04]], dtype=F64)
    filter = TurningFilter(Pushed(), linearise, mean, cov, R)
    seen = torch.tensor([[2.8, -1.0], [3.3, -1.4], [3.9, -1.9]], dtype=F64)  # step, recording
    state = filter.init(2)
    m, P = mean.expand(2, 2).clone(), cov.expand(2, 2, 2).clone()
    torch.testing.assert_close(state.mean, m)
    torch.testing.assert_close(state.cov, P)
    for x in seen:
        state = filter.predict(state)
        m, P = m @ A.mT, A @ P @ A.mT + Q
        torch.testing.assert_close(state.mean, m)
        torch.testing.assert_close(state.cov, P, rtol=1e-6, atol=1e-9)
        state = filter.update(state, torch.stack([x.cos(), x.sin()], -1))
        turned = torch.remainder(x - m[:, 0] + math.pi, 2 * math.pi) - math.pi
        gain = P[:, :, 0] / (P[:, :1, 0] + R)
        m, P = m + gain * turned[:, None], P - gain[:, :, None] * P[:, :1]
        torch.testing.assert_close(state.mean, m)
        torch.testing.assert_close(state.cov, P, rtol=1e-6, atol=1e-9)


def test_the_noise_of_the_move_is_a_coordinate_of_the_equation():
    """omega' = omega exp(0.5 e): the unscented move has a larger mean, the linearised has not."""

    class Scaled(Turning):
        def f(self, y: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
            return torch.cat([y[..., :1], y[..., 1:] * (0.5 * e).exp()], -1)

    mean, cov = torch.tensor([0.0, 2.0], dtype=F64), 1e-8 * torch.eye(2, dtype=F64)
    R = torch.ones(1, 1, dtype=F64)
    moved = {
        linearise: TurningFilter(Scaled(), linearise, mean, cov, R)
        for linearise in (extended, SIGMA_POINTS)
    }
    ekf, ukf = (filter.predict(filter.init(1)) for filter in moved.values())
    torch.testing.assert_close(ekf.mean, mean[None])
    torch.testing.assert_close(ekf.cov[0, 1, 1], torch.tensor(1.0, dtype=F64), rtol=1e-6, atol=0)
    lognormal = 2 * math.exp(0.125)
    assert float(ukf.mean[0, 1]) == pytest.approx(lognormal, rel=0.01)
    assert abs(float(ekf.mean[0, 1]) - lognormal) > 0.2


def turning_memory(n: int = 200) -> Recording:
    draw = torch.Generator().manual_seed(0)
    y = torch.tensor([[0.0, 0.3]], dtype=F64)
    rows = []
    for _ in range(n):
        y = Pushed().f(y, torch.randn(1, 1, dtype=F64, generator=draw))
        rows.append(y[0])
    theta, omega = torch.stack(rows).unbind(-1)
    seen = theta + 0.6 * torch.randn(n, dtype=F64, generator=draw)
    z = torch.stack([theta.cos(), theta.sin(), omega / Turning.unit], -1)
    return Recording(z, torch.stack([seen.cos(), seen.sin()], -1))


@pytest.mark.parametrize("Model", [EKF, UKF])
def test_baselines_of_turning_models_filter_angles(Model):
    memory = turning_memory()
    filter = Model(Pushed()).fit(memory)
    assert isinstance(filter, TurningFilter)
    run = rollout(filter, memory.obs[None])
    error, seen = (
        (each[:, :2] - memory.states[:, :2]).square().sum(-1).mean()
        for each in (run.estimates[0], memory.obs)
    )
    assert float(error) < 0.7 * float(seen)


def test_observations_of_turning_motion_are_unit_vectors():
    memory = turning_memory(20)
    for obs in (1.01 * memory.obs, memory.states, memory.obs[:, :1]):
        with pytest.raises(ValueError, match=r"requires observations \(cos, sin\), unit vectors"):
            turning_filter(Turning(), memory._replace(obs=obs), extended)
    turning_filter(Turning(), memory._replace(obs=1.0005 * memory.obs), extended)
