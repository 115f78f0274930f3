"""Weights with a wanted mean: closed forms, and what a coarse memory does without them."""

from __future__ import annotations

import torch

from kbf.filters.kernel.moment_matching import match_means
from kbf.filters.kernel.operators import density_transition

F64 = torch.float64


def test_the_tilt_of_a_gaussian_is_a_gaussian():
    """Of all densities with mean m the one of least relative entropy to N(0, 1) is N(m, 1)."""
    z = torch.linspace(-9, 9, 2001, dtype=F64)[:, None]
    means = torch.tensor([[0.0], [0.7], [-2.0]], dtype=F64)
    found = match_means((-z.square() / 2).mT.expand(3, -1), z, means)
    torch.testing.assert_close(
        found, (-(z - means.mT).square() / 2).softmax(0).mT, rtol=1e-3, atol=1e-9
    )


def test_means_are_exact_and_others_are_farther_in_relative_entropy(normal):
    z, b = normal(40, 3), normal(6, 40)
    means = normal(6, 40).softmax(-1) @ z  # within the hull
    p, q = match_means(b, z, means), b.softmax(-1)
    assert (p > 0).all()
    torch.testing.assert_close(p.sum(-1), torch.ones(6, dtype=F64))
    torch.testing.assert_close(p @ z, means, rtol=0, atol=1e-4)
    entropy = (p * (p / q).log()).sum(-1)
    nothing = torch.linalg.svd(torch.cat([z, torch.ones(40, 1, dtype=F64)], 1).mT)[2][
        4:
    ]  # changes neither sum nor mean
    for direction in nothing:
        for sign in (-1, 1):
            other = p + sign * 0.5 * (p / direction.abs()).amin(-1, keepdim=True) * direction
            assert ((other * (other / q).log()).sum(-1) > entropy).all()


def test_few_newton_steps_are_enough():
    z = torch.linspace(-9, 9, 2001, dtype=F64)[:, None]
    means = torch.tensor([[0.7], [-2.0]], dtype=F64)
    found = match_means((-z.square() / 2).mT.expand(2, -1), z, means, steps=2)
    torch.testing.assert_close(found @ z, means, rtol=0, atol=1e-4)


def test_nothing_is_tilted_that_is_right(normal):
    z, b = normal(30, 2), normal(5, 30)
    torch.testing.assert_close(match_means(b, z, b.softmax(-1) @ z), b.softmax(-1))


def test_a_mean_outside_of_the_points_goes_to_the_border():
    z = torch.tensor([[0.0, 5.0], [1.0, 5.0], [2.0, 5.0]], dtype=F64)  # one component is constant
    found = match_means(
        torch.zeros(2, 3, dtype=F64), z, torch.tensor([[9.0, 5.0], [1.5, 5.0]], dtype=F64)
    )
    torch.testing.assert_close(
        found[0], torch.tensor([0.0, 0.0, 1.0], dtype=F64), rtol=0, atol=1e-3
    )
    torch.testing.assert_close(found[1] @ z, torch.tensor([1.5, 5.0], dtype=F64), rtol=0, atol=1e-4)


def test_a_coarse_memory_moves_as_far_as_it_should():
    """z' = z + 0.04 + N(0, 0.02^2) on a grid of width 0.1: without the tilt few steps leave their
    point.
    """
    z = torch.linspace(0, 2, 21, dtype=F64)[:, None]
    means, mass = (z + 0.04).clamp(max=2), torch.full((21,), 1 / 21, dtype=F64)
    log_density = -((z - means.mT) / 0.02).square() / 2
    P = density_transition(log_density, mass, z, means)
    w = torch.zeros(1, 21, dtype=F64)
    w[0, 2] = 1
    stuck = w
    plain = log_density.softmax(0)
    for _ in range(20):
        w, stuck = P(w), stuck @ plain.mT
    torch.testing.assert_close((w @ z).item(), 0.2 + 20 * 0.04, rtol=0, atol=1e-3)
    assert (stuck @ z).item() < 0.5
