"""Losses of features: the closed forms against the minimisation that they solve, the paper's trace,
and loops in NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch

from kbf.images.losses import belief_ratio, ridge_loss, ridge_weights, split_ridge_loss


def objective(W, features, targets, reg, ratio):
    """(1/n) sum_i r_i ||phi_i - W^T psi_i||^2 + reg ||W||^2."""
    return (ratio * (targets - features @ W).square().sum(-1)).mean() + reg * W.square().sum()


@pytest.mark.parametrize("weighted", [False, True])
def test_ridge_loss_is_the_least_regularised_error(normal, weighted):
    """A minimiser that knows nothing of the closed form finds the same weights and the
    same value.
    """
    features, targets = normal(12, 3), normal(12, 2)
    ratio = normal(12).abs() if weighted else torch.ones(12, dtype=torch.float64)
    W = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    search = torch.optim.LBFGS(
        [W],
        max_iter=200,
        tolerance_grad=1e-12,
        tolerance_change=1e-14,
        line_search_fn="strong_wolfe",
    )

    def closure():
        search.zero_grad()
        value = objective(W, features, targets, 0.05, ratio)
        value.backward()
        return value

    search.step(closure)
    found = ridge_loss(features, targets, 0.05, ratio if weighted else None)
    torch.testing.assert_close(
        found, objective(W, features, targets, 0.05, ratio).detach(), rtol=1e-9, atol=0
    )
    torch.testing.assert_close(
        ridge_weights(features, targets, 0.05, ratio), W.detach(), rtol=1e-5, atol=1e-6
    )


def test_ridge_loss_is_the_trace_of_the_paper(rng):
    """(1/n) tr(G_Z (D - D Psi (Psi^T D Psi + n reg I)^-1 Psi^T D)), matrix by matrix."""
    psi, phi, r, n, reg = (
        rng.standard_normal((9, 4)),
        rng.standard_normal((9, 2)),
        rng.random(9),
        9,
        0.02,
    )
    D, gram = np.diag(r), phi @ phi.T
    inside = D - D @ psi @ np.linalg.inv(psi.T @ D @ psi + n * reg * np.eye(4)) @ psi.T @ D
    truth = np.trace(gram @ inside) / n
    assert ridge_loss(
        *map(torch.from_numpy, (psi, phi)), reg, torch.from_numpy(r)
    ).item() == pytest.approx(truth, rel=1e-12)


def test_split_ridge_loss_is_the_loop(rng):
    """Each half is predicted by the regression on the other; an odd number of points included."""
    psi, phi, reg = rng.standard_normal((7, 3)), rng.standard_normal((7, 2)), 0.1
    total = 0.0
    for known, scored in ((range(3), range(3, 7)), (range(3, 7), range(3))):
        a = sum(np.outer(psi[i], psi[i]) for i in known) + len(known) * reg * np.eye(3)
        W = np.linalg.inv(a) @ sum(np.outer(psi[i], phi[i]) for i in known)
        total += sum(((phi[i] - W.T @ psi[i]) ** 2).sum() for i in scored)
    assert split_ridge_loss(
        torch.from_numpy(psi), torch.from_numpy(phi), reg
    ).item() == pytest.approx(total / 7, rel=1e-12)


def test_features_that_memorise_gain_nothing_from_the_split(normal):
    """One feature for each point explains all of it to itself, and nothing to the others."""
    targets = normal(10, 2)
    own = torch.eye(10, dtype=torch.float64)
    assert ridge_loss(own, targets, 1e-9) < 1e-6
    torch.testing.assert_close(
        split_ridge_loss(own, targets, 1e-9), targets.square().sum(-1).mean()
    )


def test_gradients(normal):
    features, targets, ratio = (
        normal(6, 2).requires_grad_(),
        normal(6, 2).requires_grad_(),
        normal(6).abs().requires_grad_(),
    )
    assert torch.autograd.gradcheck(
        lambda *x: ridge_loss(x[0], x[1], 0.1, x[2]), (features, targets, ratio)
    )
    assert torch.autograd.gradcheck(lambda *x: split_ridge_loss(*x, 0.1), (features, targets))
    with torch.no_grad():
        ratio[:3] = 0
    assert torch.autograd.gradcheck(lambda r: ridge_loss(features, targets, 0.1, r), (ratio,))


def test_more_ridge_and_fewer_features_explain_less(normal):
    features, targets = normal(20, 4), normal(20, 2)
    values = [ridge_loss(features, targets, reg).item() for reg in (1e-3, 1e-1, 10.0, 1e9)]
    assert values == sorted(values)
    assert values[-1] == pytest.approx(targets.square().sum(-1).mean().item())
    assert ridge_loss(features[:, :2], targets, 1e-3) > ridge_loss(features, targets, 1e-3)


def test_nothing_to_split(normal):
    with pytest.raises(ValueError, match="a batch of 1 cannot be split"):
        split_ridge_loss(normal(1, 2), normal(1, 2), 0.1)


def test_the_ratio_of_a_belief_is_kulsif_for_one_of_the_states(normal):
    """Prior k_Z(., z_i) for the i that the generator draws; where the state is near, r is large."""
    z = normal(15, 2)
    found = belief_ratio(z.float(), torch.Generator().manual_seed(4)).numpy()
    i = int(torch.randint(15, (1,), generator=torch.Generator().manual_seed(4)))
    distances = np.linalg.norm(z.numpy()[:, None] - z.numpy(), axis=-1)
    width = np.sort(distances[np.triu_indices(15, 1)])[52]  # the lower one of 105 is the middle one
    G = reference.gaussian_gram(z.numpy(), z.numpy(), width)
    r = reference.kulsif(G, G[:, i], 3e-4)
    np.testing.assert_allclose(found, r / r.mean(), rtol=1e-3, atol=1e-4)
    assert found.argmax() == i
    draws = {int(belief_ratio(z, torch.Generator().manual_seed(k)).argmax()) for k in range(30)}
    assert len(draws) > 5
