"""The rule over the draws near an observation, against loops, the dense rule and Bayes' rule."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kbf.filters.kernel.update.nearest_draws import LocalUpdate

F64 = torch.float64


def problem(
    n: int = 12, k: int = 5, q: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """States, draws around them, ratios, and observations."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(n, 2, dtype=F64, generator=g)
    obs = states.repeat(1, q // 2)[:, None] + 0.5 * torch.randn(n, k, q, dtype=F64, generator=g)
    return (
        states,
        obs,
        torch.rand(3, n, dtype=F64, generator=g),
        torch.randn(3, q, dtype=F64, generator=g),
    )


def units(obs: Tensor) -> Tensor:
    """One over the median absolute deviation of each component."""
    flat = obs.flatten(0, 1)
    return 1 / (flat - flat.median(0).values).abs().median(0).values


def test_the_limit_weighs_by_a_kernel_estimate_of_the_likelihood():
    states, obs, ratio, x = problem()
    update = LocalUpdate(obs, states, near=20, width=0.5, dtype=F64)
    w, scale = update(ratio, x), units(obs)
    for b in range(3):
        near = sorted(
            (float(((x[b] - obs[i, j]) * scale).norm()), i) for i in range(12) for j in range(5)
        )[:20]
        expected = torch.zeros(12, dtype=F64)
        for distance, i in near:
            expected[i] += ratio[b, i] * math.exp(-0.5 * (distance / (0.5 * near[-1][0])) ** 2)
        assert torch.allclose(w[b], expected)


def test_a_batch_is_its_members_and_ratios_of_zero_take_no_part():
    states, obs, ratio, x = problem()
    ratio[:, 4:] = 0
    update = LocalUpdate(obs, states, near=40, dtype=F64)  # 20 draws have a ratio
    w = update(ratio, x)
    assert torch.equal(w[:, 4:], torch.zeros(3, 8, dtype=F64))
    for b in range(3):
        assert torch.allclose(update(ratio[b : b + 1], x[b : b + 1])[0], w[b])


@pytest.mark.parametrize(("q", "copies"), [(1, 1), (8, 8)])
def test_posterior_means_are_those_of_bayes_rule(q, copies):
    """z ~ N(0, 1), every component of x = z + N(0, s^2): E[z | x] = sum x / (q + s^2)."""
    g, s = torch.Generator().manual_seed(1), 0.5 * copies**0.5
    z = torch.randn(1000, 1, dtype=F64, generator=g)
    obs = z[:, None] + s * torch.randn(1000, 64, q, dtype=F64, generator=g)
    update = LocalUpdate(obs, z, dtype=F64)
    x = torch.linspace(-1.5, 1.5, 7, dtype=F64)[:, None].expand(-1, q)
    w = update(torch.ones(7, 1000, dtype=F64), x)
    assert (w >= 0).all()
    mean = (w @ z)[:, 0] / w.sum(1)
    assert torch.allclose(mean, x.sum(1) / (q + s**2), atol=0.08)


def test_the_width_of_the_kernel_smooths_little():
    """z ~ N(0, I_2), x = z + N(0, 0.25 I): E[z | x] = 0.8 x, from which a wide kernel shrinks."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(1000, 2, dtype=F64, generator=g)
    obs = z[:, None] + 0.5 * torch.randn(1000, 32, 2, dtype=F64, generator=g)
    x = 1.25**0.5 * torch.randn(200, 2, dtype=F64, generator=g)

    def error(**settings: float) -> float:
        w = LocalUpdate(obs, z, dtype=F64, **settings)(torch.ones(200, 1000, dtype=F64), x)
        return float((w @ z / w.sum(-1, keepdim=True) - 0.8 * x).square().mean())

    assert error() < 0.8 * error(width=1.0)  # measured: 0.0086 and 0.0118


def test_observations_of_more_components_than_the_state_are_projected():
    states, obs, _, x = problem(n=50, q=6)
    update = LocalUpdate(obs, states)
    assert update.draws.shape == (2, 250)
    moved = LocalUpdate(obs * 3 + 1, states)
    assert torch.allclose(
        moved(torch.ones(3, 50), (3 * x + 1).float()),
        update(torch.ones(3, 50), x.float()),
        atol=1e-3,
    )


def test_a_constant_component_does_no_harm():
    states, obs, ratio, x = problem()
    flat = torch.cat([obs[..., :1], torch.zeros_like(obs[..., :1])], -1)
    w = LocalUpdate(flat, states, dtype=F64)(ratio, x * torch.tensor([1.0, 0.0], dtype=F64))
    assert w.isfinite().all()
