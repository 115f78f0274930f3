"""Density ratios that come with an observation: against densities written out, and mixtures against
their parts.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal, Normal

from kbf.densities.ratio import (
    RatioDensity,
    encoding_width,
    fit_state_density,
    mixed,
    read_encoding,
)

F64 = torch.float64


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def encodings(n: int, d: int, components: int, seed: int = 0) -> Tensor:
    """Rows with shares of sum 1."""
    rows = draws(n, encoding_width(d, components), seed=seed)
    rows[:, d : d + components + 1] = rows[:, d : d + components + 1].log_softmax(-1)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("d", [1, 2])
def test_the_density_of_states_is_one(d):
    """Its integral over a grid is 1, and it is the mixture that its docstring names."""
    density = fit_state_density(0.3 * draws(700, d))
    axis = torch.linspace(-3, 3, 301, dtype=F64)
    grid = torch.cartesian_prod(*[axis] * d).reshape(-1, d)
    torch.testing.assert_close(
        (density.log(grid).exp().sum() * 0.02**d).item(), 1.0, atol=1e-3, rtol=0
    )
    wide = (density.points.var(0, correction=0).mean() + density.width**2).sqrt()
    each = Normal(density.points[:, None], density.width).log_prob(grid[:50]).sum(-1).exp().mean(0)
    broad = Normal(density.points.mean(0), wide).log_prob(grid[:50]).sum(-1).exp()
    torch.testing.assert_close(density.log(grid[:50]).exp(), 0.9 * each + 0.1 * broad)


def test_a_ratio_is_its_shares_over_the_density():
    d, J = 2, 3
    rows, z, density = (
        encodings(5, d, J),
        draws(5, d, seed=1),
        fit_state_density(draws(300, d, seed=2)),
    )
    expected = rows[:, d].exp()
    for j in range(J):
        at = d + J + 1 + j * 5
        mean, entries = rows[:, at : at + 2], rows[:, at + 2 : at + 5]
        root = torch.zeros(5, 2, 2, dtype=F64)
        root[:, 0, 0], root[:, 1, 0], root[:, 1, 1] = (
            entries[:, 0].exp(),
            entries[:, 1],
            entries[:, 2].exp(),
        )
        gaussian = MultivariateNormal(mean, precision_matrix=root.mT @ root)
        expected = (
            expected + rows[:, d + 1 + j].exp() * gaussian.log_prob(z).exp() / density.log(z).exp()
        )
    density = RatioDensity(density)
    torch.testing.assert_close(density.log_density(rows, z).exp(), expected)
    assert density.log_density(rows[:, None], z).shape == (5, 5)
    with pytest.raises(ValueError, match="no image can be drawn"):
        density.sample(z)


def test_a_mixture_of_codes_is_the_mean_of_their_ratios():
    several, z = [encodings(6, 2, 2, seed=k) for k in range(3)], draws(6, 2, seed=9)
    density = RatioDensity(fit_state_density(draws(200, 2)))
    together = mixed(several, 2)
    assert together.shape == (6, encoding_width(2, 6))
    each = torch.stack([density.log_density(code, z).exp() for code in several])
    torch.testing.assert_close(density.log_density(together, z).exp(), each.mean(0))
    torch.testing.assert_close(together[:, :2], torch.stack(several)[..., :2].mean(0))
    alone = mixed(several, 2, alone=1)
    assert alone.shape == together.shape
    torch.testing.assert_close(density.log_density(alone, z).exp(), each[1], atol=1e-9, rtol=1e-6)


def test_an_image_that_tells_nothing_has_ratio_one():
    row = torch.zeros(1, encoding_width(2, 2), dtype=F64)
    row[:, 3:5] = -math.inf
    density = RatioDensity(fit_state_density(draws(100, 2)))
    torch.testing.assert_close(
        density.log_density(row, draws(20, 2, seed=1)), torch.zeros(20, dtype=F64)
    )


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="at least 2"):
        fit_state_density(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="no ratios"):
        read_encoding(torch.zeros(3, 16), 2)
