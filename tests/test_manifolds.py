"""Flat space and the circle: how points are displaced and compared, and the regressions and filters that use it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from kbf.data.synthetic import SyntheticData
from kbf.evaluation import floor, score
from kbf.filters.learned import RidgeMap, fit_ridge_map
from kbf.kernels import gaussian
from kbf.manifolds import CIRCLE, FLAT, circle_exp, circle_log, manifold_of, project_circle
from kbf.nn.kernel_bayes import EnlargedKBF
from kbf.ssm import OrientationModel

F64 = torch.float64


def heading(angle: Tensor) -> Tensor:
    return torch.stack([angle.cos(), angle.sin()], -1)


def wrapped(angle: Tensor) -> Tensor:
    """In [-pi, pi)."""
    return torch.remainder(angle + math.pi, 2 * math.pi) - math.pi


@pytest.mark.parametrize("manifold", [FLAT, CIRCLE], ids=["flat", "circle"])
def test_exp_undoes_log(normal, manifold):
    base, point = (manifold.project(normal(50, 2)) for _ in range(2))
    torch.testing.assert_close(manifold.exp(base, manifold.log(base, point)), point)
    v = normal(50, manifold.log(base, point).shape[-1])
    back = manifold.log(base, manifold.exp(base, v))
    torch.testing.assert_close(back, v if manifold.period is None else wrapped(v))
    torch.testing.assert_close(manifold.project(point), point)
    assert (manifold.log(base, base).abs() < 1e-15).all()


def test_the_distance_on_the_circle_is_the_arc(rng):
    a, b = torch.from_numpy(rng.uniform(-9, 9, (2, 200)))
    found = circle_log(heading(a), heading(b))[:, 0]
    torch.testing.assert_close(found, wrapped(b - a), atol=1e-12, rtol=0)
    torch.testing.assert_close(2 * (found.abs() / 2).sin(), (heading(a) - heading(b)).norm(dim=-1))  # the chord
    torch.testing.assert_close(circle_log(heading(b), heading(a))[:, 0], -found)
    assert circle_log(heading(torch.tensor(0.0)), torch.tensor([-1.0, 0.0])).item() == pytest.approx(math.pi)


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
    assert manifold_of(on) is CIRCLE
    assert manifold_of(on.float()) is CIRCLE
    assert manifold_of(on * 1.001) is FLAT
    assert manifold_of(torch.cat([on, points[:1]])) is FLAT
    assert manifold_of(torch.cat([on, on], 1)) is FLAT


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
    """Over the circle, with the constant -1/2 log(2 pi S) that `log_density` leaves out, at several u at once."""
    regression, count = ridge_map(noise), 4000
    angle = torch.arange(count, dtype=F64) * (2 * math.pi / count)
    u = torch.tensor([[-1.0], [0.3], [0.9]], dtype=F64)
    log_density = regression.log_density(heading(angle)[:, None], u) - 0.5 * math.log(2 * math.pi * noise)
    assert log_density.shape == (count, 3)
    total = log_density.exp().sum(0) * 2 * math.pi / count
    torch.testing.assert_close(total, torch.ones(3, dtype=F64), atol=1e-3, rtol=0)
    one_by_one = torch.stack([regression.log_density(heading(angle[:5]), each) for each in u], -1)
    torch.testing.assert_close(log_density[:5] + 0.5 * math.log(2 * math.pi * noise), one_by_one)


def test_draws_follow_the_density():
    """The mean direction of many draws: that of the regression, shorter by exp(-variance / 2)."""
    regression, u = ridge_map(0.3), torch.full((40_000, 1), 0.3, dtype=F64)
    drawn = regression.sample(u, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn.norm(dim=-1), torch.ones(40_000, dtype=F64))
    mean, scale = regression.predict(u[:1])
    torch.testing.assert_close(drawn.mean(0), mean[0] * (-0.5 * 0.3 * scale).exp(), atol=0.01, rtol=0)


def test_turn_and_noise_are_recovered():
    """theta' = theta + 0.4 + N(0, 0.2^2): the map turns every heading by 0.4, and its noise is 0.2 radians."""
    generator = torch.Generator().manual_seed(0)
    theta = (0.4 + 0.2 * torch.randn(400, dtype=F64, generator=generator)).cumsum(0)
    z = heading(theta)
    fitted = fit_ridge_map(z[:-1], z[1:])
    assert fitted.manifold is CIRCLE
    assert fitted.noise.shape == (1, 1)
    assert fitted.noise.sqrt().item() == pytest.approx(0.2, rel=0.1)
    grid = torch.arange(0, 6.3, 0.1, dtype=F64)
    mean, scale = fitted.predict(heading(grid))
    turned = circle_log(heading(grid), mean)[:, 0]
    assert (turned - 0.4).abs().max() < 0.1
    assert turned.mean().item() == pytest.approx(0.4, abs=0.03)
    assert scale.max() < 1.2


def test_the_enlarged_filter_is_near_the_particle_filter_on_headings():
    data = SyntheticData(OrientationModel(), n_train=300, n_test=200, seed=100)
    found = score(EnlargedKBF(points=300, draws=4, run=6000, rank=24).condition(data.train), data.test).mse.mean().item()
    least = floor(OrientationModel(), data.train, data.test, particles=1000).mse.mean().item()
    assert least < found < 1.1 * least
