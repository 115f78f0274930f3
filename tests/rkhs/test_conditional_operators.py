"""Sum rule and chain rule against tables of probabilities and Gaussian integrals."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from kbf.rkhs.conditional_operators import chain_rule, sum_rule
from kbf.rkhs.kernels import delta, gaussian
from kbf.rkhs.rules import importance_weighted

F64 = torch.float64
TABLE = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.25, 0.25, 0.5]], dtype=F64)
PRIOR = torch.tensor([0.5, 0.2, 0.3], dtype=F64)


@pytest.fixture
def finite():
    """Pairs whose frequencies are exactly those of the table p(x | z), 20 of each state."""
    counts = (20 * TABLE).round().long()
    z = torch.cat([torch.full((20, 1), float(k), dtype=F64) for k in range(3)])
    x = torch.cat(
        [torch.full((int(c), 1), float(j), dtype=F64) for row in counts for j, c in enumerate(row)]
    )
    return z, x, torch.arange(3, dtype=F64)[:, None]


def by_value(points, values):
    """1 where a point has a value, ``n k``."""
    return delta(points, values)


def test_on_a_finite_set_they_are_the_rules_of_probability(finite):
    z, x, values = finite
    gram, cross = delta(z, z), delta(z, values)
    w = sum_rule(gram, cross, PRIOR, 1e-9)
    torch.testing.assert_close(w @ by_value(x, values), PRIOR @ TABLE, rtol=1e-6, atol=1e-8)
    W = chain_rule(gram, cross, PRIOR, 1e-9)
    joint = by_value(x, values).mT @ W  # p(x, z)
    torch.testing.assert_close(joint, (PRIOR[:, None] * TABLE).mT, rtol=1e-6, atol=1e-8)


def test_bayes_rule_conditions_the_joint_embedding(finite):
    """The rule with the true ratio has the posterior of the chain rule's joint table."""
    z, x, values = finite
    joint = by_value(x, values).mT @ chain_rule(delta(z, z), delta(z, values), PRIOR, 1e-9)
    ratio = (PRIOR / (1 / 3))[z[:, 0].long()]
    for k in range(3):
        query = delta(values[k][None], x)[0]
        w = importance_weighted(ratio, delta(x, x), query, 1e-9)
        found = w @ by_value(z, values)
        torch.testing.assert_close(found, joint[k] / joint[k].sum(), rtol=1e-5, atol=1e-7)


def test_the_marginal_of_the_joint_embedding_is_the_sum_rule(normal):
    z, u, a = normal(20, 2), normal(7, 2), normal(3, 7)
    k = partial(gaussian, bandwidth=0.8)
    gram, cross = k(z, z), k(z, u)
    w, W = sum_rule(gram, cross, a, 1e-2), chain_rule(gram, cross, a, 1e-2)
    assert w.shape == (3, 20) and W.shape == (3, 20, 7)
    torch.testing.assert_close(W.sum(-1), w)
    naive = np.linalg.solve(gram.numpy() + 20 * 1e-2 * np.eye(20), cross.numpy())
    np.testing.assert_allclose(W[1].numpy(), naive * a[1].numpy(), rtol=1e-8)


def test_gaussian_marginal_and_joint_moments(normal):
    """x = z / 2 + noise: E[x], E[x^2] and E[x z] of a prior away from the recorded states."""
    n, m = 1500, 400
    z = 1.5 * normal(n, 1)
    x = 0.5 * z + 0.3 * normal(n, 1)
    u = 0.4 + 0.6 * normal(m, 1)
    k, a = partial(gaussian, bandwidth=1.0), torch.full((m,), 1 / m, dtype=F64)
    w = sum_rule(k(z, z), k(z, u), a, 1e-6)
    mean, square = u.mean(), u.square().mean()  # of the sample of the prior
    assert (w @ x).item() == pytest.approx(0.5 * mean.item(), abs=0.03)
    assert (w @ x.square()).item() == pytest.approx(0.25 * square.item() + 0.09, abs=0.03)
    W = chain_rule(k(z, z), k(z, u), a, 1e-6)
    assert (x.mT @ W @ u).item() == pytest.approx(0.5 * square.item(), abs=0.03)
    assert w.sum().item() == pytest.approx(1, abs=0.01)
