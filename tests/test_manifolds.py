"""Flat space and the circle: how points are displaced and compared, and the regressions and filters
that use it.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from kbf.data.synthetic import SyntheticData
from kbf.densities.ridge import RidgeMap, fit_ridge_map
from kbf.evaluation.floors import floor
from kbf.evaluation.score import score
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.manifolds import (
    CIRCLE,
    FLAT,
    Manifold,
    circle_exp,
    circle_log,
    manifold_of,
    project_circle,
)
from kbf.rkhs.kernels import gaussian
from kbf.ssm import OrientationModel

F64 = torch.float64


def heading(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def wrapped(angle: Tensor) -> Tensor:
    """In [-pi, pi)."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


POSE = Manifold((2, 5))
"""(x, y, cos a, sin a, h, cos b, sin b): displacements (x, y, a, h, b)."""


@pytest.mark.parametrize(
    ("manifold", "q", "angles"),
    [(FLAT, 2, []), (CIRCLE, 2, [0]), (POSE, 7, [2, 4])],
    ids=["flat", "circle", "pose"],
)
def test_exp_undoes_log(normal, manifold, q, angles):
    base, point = (manifold.project(normal(50, q)) for _ in range(2))
    torch.testing.assert_close(manifold.exp(base, manifold.log(base, point)), point)
    v = 2 * normal(50, manifold.log(base, point).shape[-1])
    assert v.shape[-1] == q - len(angles)
    back, once = manifold.log(base, manifold.exp(base, v)), v.clone()
    once[:, angles] = wrapped(v[:, angles])
    torch.testing.assert_close(back, once)
    torch.testing.assert_close(manifold.project(point), point)
    assert (manifold.log(base, base).abs() < 1e-15).all()


def test_the_distance_on_the_circle_is_the_arc(rng):
    a, b = torch.from_numpy(rng.uniform(-9, 9, (2, 200)))
    found = circle_log(heading(a), heading(b))[:, 0]
    torch.testing.assert_close(found, wrapped(b - a), atol=1e-12, rtol=0)
    torch.testing.assert_close(
        2 * (found.abs() / 2).sin(), (heading(a) - heading(b)).norm(dim=-1)
    )  # the chord
    torch.testing.assert_close(circle_log(heading(b), heading(a))[:, 0], -found)
    assert circle_log(
        heading(torch.tensor(0.0)), torch.tensor([-1.0, 0.0])
    ).item() == pytest.approx(math.pi)


def test_batches_broadcast(normal):
    base, points = heading(normal(4, 1)), heading(normal(5))
    found = circle_log(base, points)
    assert found.shape == (4, 5, 1)
    for i in range(4):
        for j in range(5):
            torch.testing.assert_close(found[i, j], circle_log(base[i, 0], points[j]))
    assert circle_exp(base.expand(4, 5, 2), found).shape == (4, 5, 2)
    torch.testing.assert_close(circle_exp(base.expand(4, 5, 2), found), points.expand(4, 5, 2))


def test_projection_and_recognition(normal):
    points = 3 * normal(20, 2)
    on = project_circle(points)
    torch.testing.assert_close(on, heading(torch.atan2(points[:, 1], points[:, 0])))
    assert project_circle(torch.zeros(2)).tolist() == [1, 0]
    leaf = torch.cat([normal(2, 2), torch.zeros(1, 2, dtype=F64)]).requires_grad_()
    project_circle(leaf).sum().backward()
    assert leaf.grad is not None and torch.isfinite(leaf.grad).all()
    assert manifold_of(on) == CIRCLE
    assert manifold_of(on.float()) == CIRCLE
    assert manifold_of(on * 1.001) == FLAT
    assert manifold_of(torch.cat([on, points[:1]])) == FLAT
    assert manifold_of(torch.cat([points, on, points[:, :1], on.flip(1)], 1)) == POSE
    assert manifold_of(torch.cat([on, on], 1)) == Manifold((0, 2))
    assert (
        manifold_of(torch.tensor([[1.0, 0.0], [1.0, 0.0]])) == FLAT
    )  # constant components are no angle
    assert manifold_of(points[:, :1]) == FLAT


def test_a_pose_is_taken_apart(normal):
    """Each component of a displacement is that of its own part."""
    base, point = (POSE.project(normal(9, 7)) for _ in range(2))
    found, flat = POSE.log(base, point), point - base
    parts = [
        flat[:, :2],
        circle_log(base[:, 2:4], point[:, 2:4]),
        flat[:, 4:5],
        circle_log(base[:, 5:], point[:, 5:]),
    ]
    torch.testing.assert_close(found, torch.cat(parts, 1))
    torch.testing.assert_close(POSE.project(base), base)
    assert POSE.log(base[:, None], point).shape == (9, 9, 5)
    turns = POSE.turns(5)
    assert turns.shape == (5, 5)
    for turn in turns:
        torch.testing.assert_close(POSE.exp(base, turn.expand(9, 5)), base)
    assert FLAT.turns(3).tolist() == [[0, 0, 0]]


def turning_run(steps: int, seed: int = 0) -> Tensor:
    """(position, cos, sin): theta' = theta + 0.4 + e_1, position' = 0.5 position + e_2, e with
    standard deviations 0.2 and 0.3 and
    correlation 0.8."""
    cov = torch.tensor([[0.04, 0.048], [0.048, 0.09]], dtype=F64)
    e = (
        torch.randn(steps, 2, dtype=F64, generator=torch.Generator().manual_seed(seed))
        @ torch.linalg.cholesky(cov).mT
    )
    theta, position = (0.4 + e[:, 0]).cumsum(0), [torch.zeros((), dtype=F64)]
    for noise in e[1:, 1]:
        position.append(0.5 * position[-1] + noise)
    return torch.cat([torch.stack(position)[:, None], heading(theta)], 1)


def test_noise_of_an_angle_beside_other_components():
    """S is that of (position, angle), correlation and all; draws stay on the circle; the density is
    a normalised one.
    """
    z = turning_run(600)
    fitted = fit_ridge_map(z[:-1], z[1:])
    assert fitted.manifold == Manifold((1,))
    truth = torch.tensor([[0.09, 0.048], [0.048, 0.04]], dtype=F64)
    torch.testing.assert_close(fitted.noise, truth, rtol=0.15, atol=0)
    u = z[7:8].expand(20_000, 3)
    drawn = fitted.sample(u, torch.Generator().manual_seed(1))
    torch.testing.assert_close(drawn[:, 1:].norm(dim=-1), torch.ones(len(drawn), dtype=F64))
    mean, scale = fitted.predict(u[:1])
    torch.testing.assert_close(fitted.expected(mean, scale)[0], drawn.mean(0), rtol=0, atol=0.01)
    position, angle = torch.meshgrid(
        torch.linspace(-6, 6, 401, dtype=F64), torch.arange(0, 6.28, 0.04, dtype=F64), indexing="ij"
    )
    grid = torch.cat([position[..., None], heading(angle)], -1).flatten(0, 1)
    wide = fitted._replace(noise=20 * fitted.noise)  # an angle that may come round
    log_density = wide.log_density_table(grid, *wide.predict(u[:1]))[:, 0] - 0.5 * torch.logdet(
        2 * math.pi * wide.noise
    )
    assert log_density.exp().sum().item() * 0.03 * 0.04 == pytest.approx(1, abs=0.01)


def ridge_map(noise: float) -> RidgeMap:
    """A regression with made-up numbers: mean and scale move with u."""
    landmarks = torch.tensor([[0.0], [1.0]], dtype=F64)
    return RidgeMap(
        landmarks,
        torch.eye(2, dtype=F64),
        partial(gaussian, bandwidth=0.7),
        torch.tensor([[1.0, 0.4], [-0.3, 0.8]], dtype=F64),
        torch.tensor([0.2, -0.1], dtype=F64),
        0.1 * torch.eye(2, dtype=F64),
        torch.tensor([[noise]], dtype=F64),
        torch.tensor(2.0, dtype=F64),
        CIRCLE,
    )


@pytest.mark.parametrize("noise", [0.01, 0.3, 2.0])
def test_the_wrapped_density_integrates_to_one(noise):
    """Over the circle, at several u at once."""
    regression, count = ridge_map(noise), 4000
    angle = torch.arange(count, dtype=F64) * (2 * math.pi / count)
    u = torch.tensor([[-1.0], [0.3], [0.9]], dtype=F64)
    log_density = regression.log_density(heading(angle)[:, None], u)
    assert log_density.shape == (count, 3)
    total = log_density.exp().sum(0) * 2 * math.pi / count
    torch.testing.assert_close(total, torch.ones(3, dtype=F64), atol=1e-3, rtol=0)
    one_by_one = torch.stack([regression.log_density(heading(angle[:5]), each) for each in u], -1)
    torch.testing.assert_close(log_density[:5], one_by_one)


def test_draws_follow_the_density():
    """The mean direction of many draws: that of the regression, shorter by exp(-variance / 2)."""
    regression, u = ridge_map(0.3), torch.full((40_000, 1), 0.3, dtype=F64)
    drawn = regression.sample(u, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.norm(dim=-1), torch.ones(40_000, dtype=F64))
    mean, scale = regression.predict(u[:1])
    torch.testing.assert_close(
        drawn.mean(0), mean[0] * (-0.5 * 0.3 * scale).exp(), atol=0.01, rtol=0
    )


def test_turn_and_noise_are_recovered():
    """theta' = theta + 0.4 + N(0, 0.2^2): the map turns every heading by 0.4, and its noise is 0.2
    radians.
    """
    generator = torch.Generator().manual_seed(0)
    theta = (0.4 + 0.2 * torch.randn(400, dtype=F64, generator=generator)).cumsum(0)
    z = heading(theta)
    fitted = fit_ridge_map(z[:-1], z[1:])
    assert fitted.manifold == CIRCLE
    assert fitted.noise.shape == (1, 1)
    assert fitted.noise.sqrt().item() == pytest.approx(0.2, rel=0.1)
    grid = torch.arange(0, 6.3, 0.1, dtype=F64)
    mean, scale = fitted.predict(heading(grid))
    turned = circle_log(heading(grid), mean)[:, 0]
    assert (turned - 0.4).abs().max() < 0.1
    assert turned.mean().item() == pytest.approx(0.4, abs=0.03)
    assert scale.max() < 1.2


@pytest.mark.slow
def test_the_enlarged_filter_is_near_the_particle_filter_on_headings():
    data = SyntheticData(OrientationModel(), n_train=300, n_test=200, seed=100)
    found = (
        score(SimulatedKBF(points=300, draws=4, run=6000, rank=24).fit(data.train), data.test)
        .mse.mean()
        .item()
    )
    least = floor(OrientationModel(), data.train, data.test, particles=1000).mse.mean().item()
    assert least < found < 1.1 * least
