"""Backward steps of kernel filters, against definitions and a finite chain."""

from __future__ import annotations

import pytest
import torch

from kbf.filters.kernel.filter import KernelState
from kbf.filters.kernel.smoother import (
    REG,
    RuleBackward,
    density_backward,
    step_back_by_density,
    step_back_by_rule,
)
from kbf.filters.protocols import FilterStep
from kbf.rkhs.kernels import gaussian

F64 = torch.float64


@pytest.fixture
def chain():
    """P_ij = q(i | j) of a chain of five points, filtered weights and smoothed ones, ``2 5``."""
    g = torch.Generator().manual_seed(0)
    P, w, following = (
        torch.rand(*shape, dtype=F64, generator=g) for shape in ((5, 5), (2, 5), (2, 5))
    )
    return P / P.sum(0), w / w.sum(1, keepdim=True), following / following.sum(1, keepdim=True)


def move_of(P):
    return lambda w: w @ P.mT


def test_of_a_finite_chain_it_is_the_exact_backward_step(chain):
    """p(j | x_1..x_T) = w_j sum_i P_ij s_i / (P w)_i."""
    P, w, following = chain
    b = density_backward(move_of(P), w, following)
    for k in range(2):
        predicted = P @ w[k]
        for j in range(5):
            expected = sum(P[i, j] * following[k, i] / predicted[i] for i in range(5))
            torch.testing.assert_close(b[k, j], expected)
    torch.testing.assert_close((w * b).sum(1), torch.ones(2, dtype=F64))


def test_points_that_were_not_predicted_take_no_part(chain):
    """Point 0 cannot be reached: what is said of it is left out of both sums."""
    P, w, following = chain
    P = P.clone()
    P[0] = 0
    b = density_backward(move_of(P), w, following)
    predicted = w @ P.mT
    h = following[:, 1:] / predicted[:, 1:]
    torch.testing.assert_close(b, (h @ P[1:]) / P[1:].sum(0))
    one = density_backward(move_of(P), w, predicted)
    torch.testing.assert_close(one, torch.ones(2, 5, dtype=F64))  # nothing was seen since
    assert (density_backward(move_of(P), w, -following) == 0).all()


def test_the_update_of_the_filter_comes_last(chain):
    P, w, following = chain
    likelihood = torch.tensor([0.1, 0.5, 0.2, 0.9, 0.3], dtype=F64)
    predicted = torch.full((2, 5), 0.2, dtype=F64)
    now = FilterStep(
        KernelState(w),
        KernelState(predicted),
        lambda state: KernelState(state.weights * likelihood),
    )
    found = step_back_by_density(move_of(P))(now, KernelState(following)).weights
    expected = predicted * density_backward(move_of(P), w, following) * likelihood
    torch.testing.assert_close(found, expected / expected.sum(1, keepdim=True))


def controlled(w, control=None):
    """A shift by one place, as often as the control says."""
    return w if control is None else w.roll(int(control[0, 0]), -1)


def test_the_move_is_that_under_the_control(chain):
    _, w, following = chain
    now = FilterStep(KernelState(w), KernelState(w), lambda state: state)
    step = step_back_by_density(controlled)
    found = step(now, KernelState(following), control=torch.full((2, 1), 2.0)).weights
    prior = w * following.roll(-2, -1) / w
    torch.testing.assert_close(found, prior / prior.sum(1, keepdim=True))


@pytest.mark.parametrize("acted", [False, True])
def test_the_rule_takes_the_smoothed_embedding_as_query(normal, acted):
    """w = (D G + m reg I)^-1 D g at the sources, D the filter's weights with mean 1."""
    states, n = normal(6, 2), 6
    source, target = torch.tensor([0, 1, 3, 4]), torch.tensor([1, 2, 4, 5])
    controls, width = (normal(4, 1), torch.tensor([0.8], dtype=F64)) if acted else (None, None)
    log_widths = None if width is None else width.log()
    bandwidth = torch.tensor(0.7, dtype=F64)
    rule = RuleBackward(source, target, gaussian, bandwidth, controls, log_widths)
    w, following = normal(2, n), normal(2, n).abs() * torch.tensor([[1.0], [-1.0]])
    w[:, 3] = w[:, 3].abs()  # negative weights are clipped, but not all of them
    u = normal(2, 1) if acted else None
    gram = gaussian(states, states, bandwidth=0.7)
    expected = torch.zeros(2, n, dtype=F64)
    for k in range(2):
        d = w[k, source].clamp_min(0)
        if controls is not None and u is not None:
            d = d * (-0.5 * ((controls[:, 0] - u[k, 0]) / 0.8).square()).exp()
        D = (d * 4 / d.sum()).diag()
        g = gram[target] @ following[k]
        A = D @ gram[target][:, target] + 4 * REG * torch.eye(4, dtype=F64)
        expected[k, source] = torch.linalg.solve(A, D @ g)
    torch.testing.assert_close(rule(w, following, states, control=u), expected)
    features = torch.linalg.cholesky(gram)
    torch.testing.assert_close(rule(w, following, states, features, u), expected)
    step = step_back_by_rule(rule, states, features)
    now = FilterStep(KernelState(w), KernelState(w), lambda state: state)
    found = step(now, KernelState(following), control=u).weights
    sums = expected.sum(1, keepdim=True)
    assert (sums[:, 0] > 0).tolist() == [True, False]
    torch.testing.assert_close(found, torch.where(sums > 0, expected / sums, w))
