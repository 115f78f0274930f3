"""Systems with noise of other shapes: densities by quadrature, draws against them, and floors
against a filter on a grid.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kbf.data.noise_systems import Clutter, Fork, HeavyTails, Multiplicative, Spikes, Volatility
from kbf.data.synthetic import SyntheticData
from kbf.evaluation.score import score
from kbf.filters.particle.bootstrap import BootstrapFilter
from kbf.ssm import StateSpace

F64 = torch.float64
PLANE = [Clutter(), HeavyTails(), Multiplicative(), Fork()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def grid(reach: float, m: int) -> tuple[Tensor, float]:
    """Middles of m x m cells on the square [-reach, reach]^2, ``m^2 2``, and the area of one."""
    axis = (torch.arange(m, dtype=F64) + 0.5) / m * 2 * reach - reach
    return torch.cartesian_prod(axis, axis), (2 * reach / m) ** 2


@pytest.mark.parametrize("z", [(0.4, -0.3), (-1.0, 0.2)])
@pytest.mark.parametrize("model", PLANE, ids=lambda m: type(m).__name__)
def test_densities_of_the_plane_integrate_to_one(model, z):
    points, area = grid(12.0, 600)
    state = torch.tensor([z], dtype=F64)
    tail = (
        0.04 / (0.04 + 144 / 2) if isinstance(model, HeavyTails) else 0.0
    )  # the mass outside of a disc of this radius
    assert abs((model.log_likelihood(points, state).exp().sum() * area).item() - 1) < 2e-3 + tail
    moved, cell = grid(3.0, 300)
    assert abs((model.log_transition(moved, state).exp().sum() * cell).item() - 1) < 1e-3


def test_densities_of_volatility_integrate_to_one():
    x = torch.linspace(-40, 40, 400_001, dtype=F64)[:, None]
    for z in (-1.5, 0.0, 1.0):
        state = torch.tensor([[z]], dtype=F64)
        for values in (
            Volatility().log_likelihood(x, state),
            Volatility().log_transition(x, state),
        ):
            assert torch.trapezoid(values.exp(), x[:, 0]).item() == pytest.approx(1, abs=1e-9)


def test_spike_probabilities_add_up_to_one():
    model, counts = Spikes(neurons=2), torch.arange(40, dtype=F64)
    both = torch.cartesian_prod(counts, counts)
    assert model.log_likelihood(
        both, torch.tensor([[0.3, 0.8]], dtype=F64)
    ).exp().sum().item() == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    "model", [*PLANE, Spikes(neurons=3), Volatility()], ids=lambda m: type(m).__name__
)
def test_draws_have_their_density(model):
    """Mean of exp(log q - log p) over draws from p is 1 for any density q: here p at
    another state.
    """
    d = 1 if isinstance(model, Volatility) else 2
    z = torch.tensor([0.3, -0.5][:d], dtype=F64)
    other = z + 0.05
    for draw, log_density in (("observe", model.log_likelihood), ("move", model.log_transition)):
        drawn = getattr(model, draw)(z.expand(40_000, d), generator(1))
        ratio = (log_density(drawn, other) - log_density(drawn, z)).exp()
        assert abs(ratio.mean().item() - 1) < 4 * ratio.std().item() / 200


def test_clutter_is_seen_as_often_as_it_should_be():
    model = Clutter(width=50.0)  # hardly any of it is near the state
    x = model.observe(torch.tensor([1.0, 0.0], dtype=F64).expand(20_000, 2), generator())
    far = ((x - torch.tensor([1.0, 0.0])).norm(dim=-1) > 2).double().mean().item()
    assert abs(far - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 20_000)


def test_the_floor_of_volatility_is_that_of_a_filter_on_a_grid():
    data = SyntheticData(Volatility(), 300, 300, seed=1000)
    z = torch.linspace(-6, 6, 1201, dtype=F64)[:, None]
    move = Volatility().log_transition(z[:, None], z).softmax(0)  # row the target
    start = (data.train[0].states.mT - z).abs().argmin(0)
    p = torch.zeros(len(z), dtype=F64).index_add(0, start, torch.full((300,), 1 / 300, dtype=F64))
    error = 0.0
    for state, x in zip(data.test[0].states, data.test[0].obs, strict=True):
        p = (move @ p).log() + Volatility().log_likelihood(x, z)
        p = p.softmax(0)
        error += float(((p @ z)[0] - state[0]).square()) / 300
    floor = score(BootstrapFilter(data.problem, data.train[0].states, 20_000), data.test).mse.item()
    assert floor == pytest.approx(error, rel=0.01)


@pytest.mark.parametrize("model", [*PLANE, Spikes(), Volatility()], ids=lambda m: type(m).__name__)
def test_they_are_state_spaces(model):
    assert isinstance(model, StateSpace)
    data = SyntheticData(model, 20, 10, seed=3)
    assert data.train[0].states.shape == (20, 1 if isinstance(model, Volatility) else 2)
    assert data.train[0].obs.isfinite().all()
