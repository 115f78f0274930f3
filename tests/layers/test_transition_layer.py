"""The transition as a layer against its operator, loops, finite differences, and its batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from kbf.filters.kernel.operators import transition_operator
from kbf.layers import KernelTransition
from kbf.recording import transitions
from kbf.rkhs.kernels import gaussian
from kbf.runtime.errors import FitError

N, B, D = 9, 3, 2
PAIRS = transitions([5, 4])
K = partial(gaussian, bandwidth=1.3)


@pytest.fixture
def given(normal) -> tuple[Tensor, Tensor]:
    return normal(B, N), normal(N, D)


def layer_of(**how) -> KernelTransition:
    return KernelTransition(bandwidth=1.3, reg=0.05, **how)


def test_the_layer_is_the_operator_and_a_loop(given):
    weights, states = given
    found = layer_of()(weights, states, PAIRS)
    expected = transition_operator(K(states, states), PAIRS, 0.05)(weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    s, m = PAIRS.source, len(PAIRS.source)
    G = K(states, states)
    for k in range(B):
        solved = torch.linalg.inv(G[s][:, s] + m * 0.05 * torch.eye(m, dtype=torch.float64)) @ (
            G[s] @ weights[k]
        )
        loop = torch.zeros(N).double()
        for i, to in enumerate(PAIRS.target):
            loop[to] = solved[i]
        torch.testing.assert_close(found[k], loop, rtol=0, atol=1e-10)
    assert (found[:, [0, 5]] == 0).all()  # nothing precedes the first state of a recording


def test_without_pairs_each_state_is_followed_by_the_next_row(given):
    assert torch.equal(layer_of()(*given), layer_of()(*given, transitions([N])))
    assert not torch.allclose(layer_of()(*given), layer_of()(*given, PAIRS))


def test_a_control_is_a_factor_of_the_kernel(given, normal):
    """The control of a move weighs the recorded moves by k_U: formula with explicit inverse."""
    weights, states = given
    controls, control = normal(len(PAIRS.source), 1), normal(B, 1)
    found = layer_of(control_bandwidth=0.8)(
        weights, states, PAIRS, controls=controls, control=control
    )
    s, m = PAIRS.source, len(PAIRS.source)
    G, U = K(states, states), partial(gaussian, bandwidth=0.8)
    system = G[s][:, s] * U(controls, controls) + m * 0.05 * torch.eye(m, dtype=torch.float64)
    for k in range(B):
        near = (G[s] @ weights[k]) * U(controls, control[k : k + 1])[:, 0]
        expected = torch.zeros(N).double().index_copy(0, PAIRS.target, torch.inverse(system) @ near)
        torch.testing.assert_close(found[k], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("controlled", [False, True])
def test_gradients_are_finite_differences(controlled, given, normal, fast):
    """In weights, states, controls, bandwidths and ridge."""
    m = len(PAIRS.source)
    acted = (normal(m, 2), normal(B, 2)) if controlled else ()
    widths = torch.tensor([0.8, 1.1]).double() if controlled else None
    layer = layer_of(learn_bandwidth=True, learn_reg=True, control_bandwidth=widths)
    names, values = zip(*layer.named_parameters(), strict=True)
    assert len(names) == 2 + controlled
    inputs = tuple(x.detach().clone().requires_grad_() for x in (*given, *acted, *values))

    def moved(weights, states, *rest):
        acted, values = rest[: -len(names)], rest[-len(names) :]
        named = dict(zip(("controls", "control"), acted, strict=False))
        given = dict(zip(names, values, strict=True))
        return torch.func.functional_call(layer, given, (weights, states, PAIRS), named)

    assert torch.autograd.gradcheck(moved, inputs, fast_mode=fast)
    assert torch.autograd.gradgradcheck(moved, inputs, fast_mode=fast)


def test_a_batch_is_one_by_one_and_backward_runs_twice(given):
    weights, states = given
    layer = layer_of(learn_reg=True)
    for k in range(B):
        torch.testing.assert_close(
            layer(weights, states)[k], layer(weights[k : k + 1], states)[0], rtol=0, atol=1e-14
        )
    for _ in range(2):
        layer(weights, states).square().sum().backward()
    assert layer.log_reg.grad != 0


def test_single_precision_is_near_double(given):
    found = layer_of()(*[x.float() for x in given])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), layer_of()(*given), rtol=0, atol=1e-4)


def test_a_layer_is_saved_and_loaded(given, tmp_path):
    layer = KernelTransition(bandwidth=0.8, reg=0.2, control_bandwidth=0.4, learn_bandwidth=True)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = layer_of(control_bandwidth=1.0)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(*given), layer(*given))
    assert not torch.equal(layer_of()(*given), layer(*given))


def test_it_predicts_a_rotation():
    """The embedding of a point that turns by 0.3 a step has its mean one step ahead."""
    angles = 0.3 * torch.arange(200).double()
    states = torch.stack([angles.cos(), angles.sin()], 1)
    now = torch.eye(200).double()[[20, 77]]
    ahead = KernelTransition(bandwidth=0.5, reg=1e-6)(now, states) @ states
    torch.testing.assert_close(ahead, states[[21, 78]], rtol=0, atol=1e-2)


W, Z = torch.zeros(3, 9).double(), torch.arange(18.0).double().reshape(9, 2)
U, u = torch.zeros(8, 1).double(), torch.zeros(3, 1).double()
LAYER = KernelTransition()
WRONG = {
    r"weights must be \(b, n\), one for each of the 9 states; got \(9,\)": lambda: LAYER(W[0], Z),
    r"states must be \(n, d\), got \(9,\)": lambda: LAYER(W, Z[:, 0]),
    r"pairs must be \(source, target\), two vectors": lambda: LAYER(W, Z, (W, W)),
    "positions from 0 to 8, of the 9 states": lambda: LAYER(W, Z, transitions([10])),
    "targets repeat": lambda: LAYER(W, Z, (torch.tensor([0, 1]), torch.tensor([2, 2]))),
    "give both controls, .* and control": lambda: LAYER(W, Z, controls=U),
    r"give KernelTransition\(control_bandwidth=...\)": lambda: LAYER(W, Z, controls=U, control=u),
    r"controls must be \(8, k\), one row for each of the 8 moves; got \(7, 1\)": lambda: (
        KernelTransition(control_bandwidth=1.0)(W, Z, controls=U[:7], control=u)
    ),
    r"control must be \(3, 1\), got \(3, 2\)": lambda: KernelTransition(control_bandwidth=1.0)(
        W, Z, controls=U, control=torch.zeros(3, 2).double()
    ),
    "control_bandwidth has 2 lengths, there are 1 controls": lambda: KernelTransition(
        control_bandwidth=torch.ones(2)
    )(W, Z, controls=U, control=u),
    "control_bandwidth must be a positive number": lambda: KernelTransition(control_bandwidth=0.0),
    "controls require a kernel by name": lambda: KernelTransition(K, control_bandwidth=1.0)(
        W, Z, controls=U, control=u
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message, unchecked):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def test_one_state_is_no_move():
    with pytest.raises(FitError, match="no pair of successive states"):
        LAYER(W[:, :1], Z[:1])
