"""The rule as a layer against `kbf.rkhs.rules`, finite differences, and its own batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kbf.layers import IWKBR
from kbf.rkhs.kernels import gaussian, linear
from kbf.rkhs.linalg import NotPositiveDefiniteError
from kbf.rkhs.rules import importance_weighted, importance_weighted_primal

N, P, B = 9, 4, 3
LAYERS = {
    "features": lambda **how: IWKBR(reg=0.02, **how),
    "gaussian": lambda **how: IWKBR("gaussian", bandwidth=1.5, reg=0.02, **how),
    "imq, a bandwidth for each component": lambda **how: IWKBR(
        "imq", bandwidth=torch.tensor([1.0, 2.0, 1.5, 0.7]), reg=0.02, **how
    ),
}


@pytest.fixture
def given(normal) -> tuple[Tensor, Tensor, Tensor]:
    """Features, ratios of which some are 0, and queries."""
    ratio = normal(B, N).clamp_min(0)
    assert 0 < (ratio == 0).sum() < ratio.numel()
    return normal(N, P), ratio, normal(B, P)


def kernel_of(layer: IWKBR):
    return (
        linear if layer.log_bandwidth is None else partial(layer.kernel, bandwidth=layer.bandwidth)
    )


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_the_layer_is_the_rule(make, given):
    features, ratio, query = given
    layer = make()
    k = kernel_of(layer)
    expected = importance_weighted(ratio, k(features, features), k(query, features), 0.02)
    torch.testing.assert_close(layer(features, ratio, query), expected, rtol=0, atol=1e-10)
    from_gram = layer.from_gram(k(features, features), ratio, k(query, features))
    torch.testing.assert_close(from_gram, expected, rtol=0, atol=1e-12)


def test_the_smaller_system_is_solved(given, normal, monkeypatch):
    """Over p < n features that of p equations, over more that of n; the weights are the same."""
    features, ratio, query = given
    layer = IWKBR(reg=0.02)
    assert layer.in_features(features) and not layer.in_features(normal(N, N))
    assert not IWKBR("gaussian").in_features(features)
    small = importance_weighted_primal(ratio, features, query, layer.reg)
    assert torch.equal(layer(features, ratio, query), small)
    wide, queries = normal(N, 20), normal(B, 20)
    primal = importance_weighted_primal(ratio, wide, queries, 0.02)
    torch.testing.assert_close(layer(wide, ratio, queries), primal, rtol=0, atol=1e-10)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_batch_is_one_by_one(make, given):
    features, ratio, query = given
    layer = make()
    together = layer(features, ratio, query)
    for k in range(B):
        alone = layer(features, ratio[k : k + 1], query[k : k + 1])
        torch.testing.assert_close(together[k : k + 1], alone, rtol=0, atol=1e-13)
        shared = layer(features, ratio[k], query)
        torch.testing.assert_close(shared[k], together[k], rtol=0, atol=1e-13)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_no_ratio_is_a_ratio_of_one_and_negative_ones_count_as_zero(make, given):
    features, ratio, query = given
    layer = make()
    assert torch.equal(layer(features, None, query), layer(features, torch.ones_like(ratio), query))
    signed = torch.where(ratio == 0, -0.3, ratio)
    assert torch.equal(layer(features, signed, query), layer(features, ratio, query))


def as_function(layer: IWKBR, names: list[str]):
    """The layer as a function of features, ratio, query and its parameters."""

    def function(features, ratio, query, *values):
        return torch.func.functional_call(
            layer, dict(zip(names, values, strict=True)), (features, ratio, query)
        )

    return function


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_gradients_are_finite_differences(make, given, fast):
    """First and second ones: in features, ratio, query, bandwidth and ridge."""
    features, ratio, query = given
    layer = make(learn_reg=True, learn_bandwidth=make is not LAYERS["features"])
    parameters = dict(layer.named_parameters())
    assert set(parameters) == {"log_reg"} | (
        set() if layer.log_bandwidth is None else {"log_bandwidth"}
    )
    inputs = [features, ratio + 0.1, query, *(p.detach() for p in parameters.values())]
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    assert torch.autograd.gradcheck(as_function(layer, list(parameters)), inputs, fast_mode=fast)
    assert torch.autograd.gradgradcheck(
        as_function(layer, list(parameters)), inputs, fast_mode=fast
    )


def test_gradients_from_gram(given, fast):
    features, ratio, query = given
    gram = features @ features.mT
    inputs = (gram, ratio + 0.1, query @ features.mT, torch.tensor(0.02).double().log())
    inputs = tuple(x.clone().requires_grad_() for x in inputs)
    layer = IWKBR(learn_reg=True)

    def weights(gram, ratio, query_gram, log_reg):
        given = {"log_reg": log_reg}
        symmetric = (gram + gram.mT) / 2  # only one triangle of a symmetric matrix is read
        with torch.nn.utils.stateless._reparametrize_module(layer, given):
            return layer.from_gram(symmetric, ratio, query_gram)

    assert torch.autograd.gradcheck(weights, inputs, fast_mode=fast)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_several_backward_passes_in_a_row(make, given):
    features, ratio, query = given
    layer = make(learn_reg=True)
    net = nn.Linear(P, P).double()
    gradients = []
    for _ in range(3):
        net.zero_grad()
        layer.zero_grad()
        layer(net(features), ratio, net(query)).square().sum().backward()
        gradients.append(torch.cat([net.weight.grad.flatten(), layer.log_reg.grad[None]]))
    assert gradients[0].abs().min() > 0
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[1], gradients[2])


def test_features_are_not_frozen(given):
    """The second step of an optimiser sees the features of the first."""
    features, ratio, query = given
    layer, net = IWKBR(reg=0.1), nn.Linear(P, P).double()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = layer(net(features), ratio, net(query)).square().sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[-1] < losses[0]
    fresh = importance_weighted_primal(ratio, net(features), net(query), 0.1).square().sum()
    assert fresh < losses[-1]


def test_bandwidth_and_ridge_stay_positive():
    layer = IWKBR("gaussian", bandwidth=0.5, reg=1e-3, learn_bandwidth=True, learn_reg=True)
    assert layer.bandwidth.item() == pytest.approx(0.5, rel=1e-14)
    assert layer.reg.item() == pytest.approx(1e-3, rel=1e-14)
    optimiser = torch.optim.SGD(layer.parameters(), lr=3.0)
    for _ in range(5):
        optimiser.zero_grad()
        (layer.bandwidth + layer.reg).backward()
        optimiser.step()
    assert 0 < layer.bandwidth.item() < 0.1 and 0 < layer.reg.item() < 1e-3


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_single_precision_is_near_double(make, given):
    expected = make()(*given)
    found = make()(*[x.float() for x in given])
    assert found.dtype == torch.float32 and expected.dtype == torch.float64
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    lowered = make().float()(*[x.float() for x in given])
    torch.testing.assert_close(lowered, found, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_a_layer_is_saved_and_loaded(make, given, tmp_path):
    layer = make(learn_reg=True)
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.add_(0.3)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = make()
    assert not torch.equal(other(*given), layer(*given))
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(*given), layer(*given))


def test_everything_moves_to_a_device():
    layer = IWKBR("gaussian", learn_reg=True).to("meta")
    assert {x.device.type for x in [*layer.parameters(), *layer.buffers()]} == {"meta"}
    assert layer.bandwidth.is_meta and layer.reg.is_meta


def test_kernels_of_ones_own(given):
    features, ratio, query = given
    bound, named = IWKBR(partial(gaussian, bandwidth=1.5)), IWKBR(gaussian, bandwidth=1.5)
    assert bound.log_bandwidth is None and named.log_bandwidth is not None
    torch.testing.assert_close(
        bound(features, ratio, query), named(features, ratio, query), rtol=0, atol=1e-12
    )

    class Learned(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(P).double())

        def forward(self, x, y):
            return gaussian(self.scale * x, self.scale * y, bandwidth=1.5)

    layer = IWKBR(Learned())
    assert [name for name, _ in layer.named_parameters()] == ["kernel.scale"]
    weights = layer(features, ratio, query)
    torch.testing.assert_close(weights, named(features, ratio, query), rtol=0, atol=1e-12)
    weights.square().sum().backward()
    assert (layer.kernel.scale.grad != 0).all()


def test_what_it_shows():
    assert (
        repr(IWKBR("gaussian", bandwidth=0.5)) == "IWKBR(kernel=gaussian, bandwidth=0.5, reg=0.001)"
    )
    assert repr(IWKBR()) == "IWKBR(kernel=linear, reg=0.001)"


WRONG = {
    "kernel must be one of gaussian, ": lambda: IWKBR("gausian"),
    "bandwidth must be a positive number": lambda: IWKBR("gaussian", bandwidth=-1.0),
    "reg must be a positive number, got 0": lambda: IWKBR(reg=0.0),
    "reg must be a positive number, got nan": lambda: IWKBR(reg=float("nan")),
    "this kernel has no free bandwidth": lambda: IWKBR(learn_bandwidth=True),
    "choose a kernel with one": lambda: IWKBR(bandwidth=0.5),
}


@pytest.mark.parametrize("message", WRONG)
def test_settings_that_are_refused(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


X, Q = torch.zeros(9, 4).double(), torch.zeros(3, 4).double()
WRONG_CALLS = {
    r"features must be \(n, p\), .* got \(9, 4\) and \(3, 5\)": lambda: IWKBR()(
        X, None, Q.new_zeros(3, 5)
    ),
    r"query \(b, p\), .* got \(9, 4\) and \(4,\)": lambda: IWKBR()(X, None, Q[0]),
    r"\(9,\), or for each query, \(3, 9\); got \(3, 8\)": lambda: IWKBR()(X, Q.new_ones(3, 8), Q),
    r"one type .* features torch.float64 on cpu, ratio torch.float32": lambda: IWKBR()(
        X, Q.new_ones(9).float(), Q
    ),
    "features must be floating-point, got torch.int64": lambda: IWKBR()(X.long(), None, Q.long()),
    "bandwidth has 2 lengths, the points have 4 components": lambda: IWKBR(
        "gaussian", bandwidth=torch.ones(2)
    )(X, None, Q),
    r"gram must be \(n, n\)": lambda: IWKBR().from_gram(X, None, Q),
}


@pytest.mark.parametrize("message", WRONG_CALLS)
def test_calls_that_are_refused(message, unchecked):
    with pytest.raises(ValueError, match=message):
        WRONG_CALLS[message]()


@pytest.mark.parametrize("kernel", [None, "gaussian"])
def test_nan_is_an_error(kernel, given):
    features, ratio, query = given
    with pytest.raises(NotPositiveDefiniteError, match="NaN or infinite"):
        IWKBR(kernel)(features.index_fill(0, torch.tensor([2]), torch.nan), ratio + 1, query)
