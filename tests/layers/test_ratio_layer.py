"""The density ratio as a layer against `kbf.rkhs.ratios`, finite differences, and its batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kbf.layers import DensityRatio
from kbf.rkhs import ratios
from kbf.rkhs.kernels import gaussian

N, M, B, D = 8, 5, 3, 2
METHODS = ("kulsif", "tikhonov", "relative")
K = partial(gaussian, bandwidth=1.3)


@pytest.fixture
def given(normal) -> tuple[Tensor, Tensor, Tensor]:
    """States, samples of three priors, and weights of which some are negative."""
    return normal(N, D), 0.7 * normal(B, M, D) + 0.3, normal(B, M) / M


def layer_of(method: str, **how) -> DensityRatio:
    return DensityRatio(method=method, bandwidth=1.3, reg=0.05, alpha=0.2, **how)


def one_by_one(method: str, states: Tensor, samples: Tensor, weights: Tensor) -> Tensor:
    """The function of `kbf.rkhs.ratios` for one prior after the other."""
    gram = K(states, states)
    found = []
    for u, a in zip(samples, weights, strict=True):
        cross = K(states, u)
        if method == "relative":
            found.append(ratios.relative(gram, cross, a, 0.05, 0.2))
        else:
            found.append(getattr(ratios, method)(gram, cross @ a, 0.05))
    return torch.stack(found)


@pytest.mark.parametrize("method", METHODS)
def test_the_layer_is_the_ratio_of_each_prior(method, given):
    found = layer_of(method)(*given)
    torch.testing.assert_close(found, one_by_one(method, *given), rtol=0, atol=1e-10)
    assert method == "tikhonov" or (found == 0).any()
    states, samples, _ = given
    equal = torch.full((B, M), 1 / M, dtype=torch.float64)
    assert torch.equal(layer_of(method)(states, samples), layer_of(method)(states, samples, equal))


def test_a_prior_that_is_ignored(given):
    assert torch.equal(layer_of("one")(*given), torch.ones(B, N).double())


@pytest.mark.parametrize("method", [*METHODS, "one"])
def test_the_operator_is_the_layer_over_the_states_themselves(method, given, normal):
    states, weights = given[0], 2 * normal(B, N) / N
    layer = layer_of(method)
    here = layer.operator(states)(weights)
    found = layer(states, states.expand(B, -1, -1), weights)
    if method == "kulsif":  # the filter clips it
        assert (here < 0).any()
        here = here.clamp_min(0)
    torch.testing.assert_close(here, found, rtol=0, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_finite_differences(method, given, fast):
    """In states, samples, weights, bandwidth and ridge; at clipped values they are 0."""
    layer = layer_of(method, learn_bandwidth=True, learn_reg=True)
    names, values = zip(*layer.named_parameters(), strict=True)
    inputs = tuple(x.detach().clone().requires_grad_() for x in (*given, *values))

    def ratio(states, samples, weights, *values):
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, given, (states, samples, weights))

    assert set(names) == {"log_bandwidth", "log_reg"}
    assert torch.autograd.gradcheck(ratio, inputs, fast_mode=fast)
    assert torch.autograd.gradgradcheck(ratio, inputs, fast_mode=fast)


def test_several_backward_passes_in_a_row(given):
    layer = layer_of("kulsif", learn_bandwidth=True, learn_reg=True)
    gradients = []
    for _ in range(2):
        layer.zero_grad()
        layer(*given).square().sum().backward()
        gradients.append(torch.stack([p.grad for p in layer.parameters()]))
    assert (gradients[0] != 0).all() and torch.equal(*gradients)


@pytest.mark.parametrize("method", METHODS)
def test_single_precision_is_near_double(method, given):
    found = layer_of(method)(*[x.float() for x in given])
    assert found.dtype == torch.float32
    error = 2e-3 if method == "relative" else 1e-4  # its jitter is larger in float32
    torch.testing.assert_close(found.double(), layer_of(method)(*given), rtol=0, atol=error)


def test_a_layer_is_saved_and_loaded(given, tmp_path):
    layer = DensityRatio(bandwidth=0.8, reg=0.2, learn_bandwidth=True)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = layer_of("kulsif")
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(*given), layer(*given))
    assert not torch.equal(layer_of("kulsif")(*given), layer(*given))
    assert repr(other).startswith("DensityRatio(method=kulsif, kernel=gaussian, bandwidth=0.8")


def test_it_finds_the_ratio_of_two_known_densities():
    """N(0.5, 0.5) over N(0, 1), from 400 states and 400 samples."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(400, 1, generator=generator).double()
    samples = 0.5 + 0.5**0.5 * torch.randn(1, 400, 1, generator=generator).double()
    found = DensityRatio(bandwidth=0.6, reg=1e-2)(states, samples)[0]
    true = 2**0.5 * torch.exp(states.square() / 2 - (states - 0.5).square())[:, 0]
    assert (found - true).square().mean() < 0.1 * true.var()


Z, U = torch.zeros(8, 2).double(), torch.zeros(3, 5, 2).double()
WRONG = {
    r"states must be \(n, d\) and samples .* got \(8, 2\) and \(5, 2\)": lambda: DensityRatio()(
        Z, U[0]
    ),
    r"samples \(b, m, d\), .* got \(8, 2\) and \(3, 5, 1\)": lambda: DensityRatio()(Z, U[..., :1]),
    r"weights must be \(3, 5\), .* got \(5,\)": lambda: DensityRatio()(Z, U, Z.new_ones(5)),
    "one type and on one device, got states torch.float32": lambda: DensityRatio()(Z.float(), U),
    "method must be one of kulsif, tikhonov, relative, one; got 'ulsif'": lambda: DensityRatio(
        method="ulsif"
    ),
    r"alpha must be in \[0, 1\), got 1.0": lambda: DensityRatio(alpha=1.0),
    "kernel must be one of": lambda: DensityRatio("rbf"),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message, unchecked):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()
