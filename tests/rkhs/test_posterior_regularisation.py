"""Posterior regularisation against its objective, in explicit features, and its two limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from kbf.rkhs.posterior_regularisation import regularised_posterior
from kbf.rkhs.rules import importance_weighted

F64 = torch.float64


def case(normal, n=12, m=3, p=4):
    """Features of observations, n recorded and m labelled, and of a query; ratios."""
    return normal(n + m, p), normal(p), normal(n).abs(), m


def test_the_weights_minimise_the_objective(normal):
    """With linear features mu is a matrix: minimised numerically, its value at a query compared."""
    psi, query, ratio, m = case(normal)
    n, reg, s = len(ratio), 0.05, 0.7
    z = normal(n + m, 2).numpy()  # linear kernel of the states: their features are themselves
    weight = np.concatenate([ratio.numpy(), np.full(m, s)])

    def objective(flat):
        mu = flat.reshape(2, 4)
        errors = ((z - psi.numpy() @ mu.T) ** 2).sum(1)
        return weight @ errors + n * reg * (mu**2).sum()

    best = minimize(objective, np.zeros(8), method="BFGS", options={"gtol": 1e-9})
    w = regularised_posterior(ratio, s, psi @ psi.mT, psi @ query, reg)
    expected = best.x.reshape(2, 4) @ query.numpy()
    np.testing.assert_allclose((w @ torch.from_numpy(z)).numpy(), expected, rtol=1e-4, atol=1e-6)


def test_without_strength_it_is_the_importance_weighted_rule(normal):
    psi, query, ratio, m = case(normal)
    n = len(ratio)
    found = regularised_posterior(ratio, 0.0, psi @ psi.mT, psi @ query, 0.05)
    alone = importance_weighted(ratio, psi[:n] @ psi[:n].mT, psi[:n] @ query, 0.05)
    torch.testing.assert_close(found[:n], alone)
    assert (found[n:] == 0).all() and len(found) == n + m


def test_with_a_large_strength_labelled_observations_have_their_labels(normal):
    ratio, x = normal(6).abs(), normal(8, 2)
    gram = torch.exp(-torch.cdist(x, x).square())
    for j in (6, 7):
        w = regularised_posterior(ratio, 1e9, gram, gram[j], 0.05)
        expected = torch.eye(8, dtype=F64)[j]
        torch.testing.assert_close(w, expected, rtol=0, atol=1e-5)


def test_strengths_of_each_label_and_batches(normal):
    ratio, x = normal(3, 6).abs(), normal(8, 2)
    gram = torch.exp(-torch.cdist(x, x).square())
    strength = torch.tensor([0.3, 2.0], dtype=F64)
    found = regularised_posterior(ratio, strength, gram, gram[:3], 0.05)
    for k in range(3):
        one = regularised_posterior(ratio[k], strength, gram, gram[k], 0.05)
        torch.testing.assert_close(found[k], one)


def test_a_label_corrects_a_wrong_likelihood(normal):
    """Recorded pairs with a constant error of the states; a few labels without."""
    x = torch.linspace(-2, 2, 60, dtype=F64)[:, None]
    z = x + 0.8  # the recording is off by 0.8
    labelled = torch.linspace(-2, 2, 7, dtype=F64)[:, None]
    at = torch.tensor([[0.4]], dtype=F64)
    points = torch.cat([x, labelled])
    k = lambda a, b: torch.exp(-0.5 * torch.cdist(a, b).square() / 0.5**2)  # noqa: E731
    states, errors = torch.cat([z, labelled]), []
    for s in (0.0, 10.0, 1000.0):
        w = regularised_posterior(
            torch.ones(60, dtype=F64), s, k(points, points), k(at, points)[0], 1e-4
        )
        errors.append(abs((w @ states).item() / w.sum().item() - 0.4))
    assert errors[0] == pytest.approx(0.8, abs=0.05)
    assert errors[2] < errors[1] < errors[0] and errors[2] < 0.3


@pytest.mark.parametrize(
    ("total", "strength", "said"),
    [(6, 1.0, "more than 6 points"), (8, -1.0, "strength must not be negative, got -1")],
)
def test_impossible_arguments(total, strength, said):
    gram = torch.eye(total, dtype=F64)
    with pytest.raises(ValueError, match=said):
        regularised_posterior(torch.ones(6, dtype=F64), strength, gram, gram[0], 0.1)
