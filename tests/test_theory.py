"""The formulas of docs/theory.md, computed in NumPy as printed, and what the library computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from numpy.testing import assert_allclose

from kbf.filters.kernel import smoother
from kbf.filters.kernel.algorithm import kernel_bayes_filter
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.rollout import rollout
from kbf.filters.smoothing import smooth
from kbf.recording import Recording
from kbf.rkhs import rules
from kbf.rkhs.kernels import gaussian
from kbf.ssm import rotation, simulate

PAGE = (Path(__file__).parents[1] / "docs" / "theory.md").read_text(encoding="utf-8")
FORMULAS = {
    "transition": r"\left( G_{--} + (n - 1) \lambda' I \right)^{-1} G_{-} \, w .",
    "ratio": r"r = \max \left( 0, \; n \, (G_Z + n \eta I)^{-1} G_Z \, w \right) .",
    "rule": r"\sqrt{D} \left( \sqrt{D} \, G_X \sqrt{D} + n \lambda I \right)^{-1} \sqrt{D} \, g .",
    "original": r"\Lambda G_X \left( (\Lambda G_X)^2 + \delta I \right)^{-1} \Lambda g",
    "n2 delta": r"\Lambda G_X \left( (\Lambda G_X)^2 + n^2 \delta I \right)^{-1} \Lambda g",
    "backward ratio": r"r_i = m \, \frac{\max(0, w^t_i)}{\sum_j \max(0, w^t_j)}",
    "backward query": r"g_i = \sum_{j=1}^{n} k_Z(z_{i+1}, z_j) \, w_j^{t+1 \mid T}",
    "backward rule": r"\sqrt{D} \left( \sqrt{D} \, G_{++} \sqrt{D} + m \lambda_s I \right)^{-1}",
    "future": r"h_i = \frac{w_i^{t+1 \mid T}}{(P w^t)_i}, \qquad b_j = \max",
    "backward density": r"\frac{\sum_i P_{ij} h_i}{\sum_i P_{ij}}",
}
"""What this file computes, as it is printed on the page."""


def data(n: int, new: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Recorded states and observations, and new observations, of the rotating point."""
    start = torch.tensor([1.0, 0.0], dtype=torch.float64)
    run = simulate(rotation(), start, n + new, torch.Generator().manual_seed(0))
    return run.states[:n], run.obs[:n], run.obs[n:]


@pytest.mark.parametrize("name", FORMULAS)
def test_the_page_has_the_formulas_of_this_file(name):
    assert FORMULAS[name] in PAGE


def test_prediction_ratio_and_rule():
    z, x, new = data(25, 4)
    kernels = [lambda a, b, s=s: gaussian(a, b, bandwidth=s) for s in (0.5, 0.6, 0.9)]
    eta, reg_move, lam = 1e-3, 2e-3, 3e-3
    k_ratio, k_move, k_x = kernels
    found = kernel_bayes_filter(z, x, new, (k_ratio, k_move, k_x), (eta, reg_move, lam))
    n, w = len(z), np.full(len(z), 1 / len(z))
    G, G_ratio, G_X, g_new = (
        t.numpy() for t in (k_move(z, z), k_ratio(z, z), k_x(x, x), k_x(new, x))
    )
    for t, g in enumerate(g_new):
        later = np.linalg.solve(G[:-1, :-1] + (n - 1) * reg_move * np.eye(n - 1), G[:-1] @ w)
        w = np.concatenate([[0.0], later])
        r = np.maximum(0, n * np.linalg.solve(G_ratio + n * eta * np.eye(n), G_ratio @ w))
        root = np.diag(np.sqrt(r))
        w = root @ np.linalg.solve(root @ G_X @ root + n * lam * np.eye(n), root @ g)
        assert_allclose(found.weights[t].numpy(), w, rtol=1e-7, atol=1e-10)


def test_the_delta_of_papers_whose_weights_are_the_ratio_over_n():
    """Rule with mu = gamma / n and delta: that of the library with gamma and n^2 delta."""
    n, delta, draw = 12, 1e-3, np.random.default_rng(0)
    gamma, x = draw.normal(1, 1, n), draw.normal(size=(n, 2))
    G, g = reference.gaussian_gram(x, x, 1.0), reference.gaussian_gram(x, x[:1] + 0.2, 1.0)[:, 0]
    M = np.diag(gamma / n) @ G
    printed = M @ np.linalg.solve(M @ M + delta * np.eye(n), gamma / n * g)
    tensors = [torch.from_numpy(a) for a in (gamma, G, g)]
    gamma_t, G_t, g_t = tensors
    assert_allclose(rules.original(gamma_t, G_t, g_t, n**2 * delta).numpy(), printed, rtol=1e-6)
    unscaled = rules.original(gamma_t, G_t, g_t, delta).numpy()
    assert np.abs(unscaled - printed).max() > 0.1 * np.abs(printed).max()  # it is not the same


@torch.no_grad()
def test_smoothing_over_recorded_states():
    """The page's formula over its own weights of the filter, with the page's ridge."""
    z, x, new = data(30, 6)
    model = KBF(rank=None)
    model.set(torch.tensor([0.5, 0.5, 0.9]).double(), torch.tensor([1e-3, 1e-3, 1e-3]).double())
    f = model.fit([Recording(z, x)])
    found = smooth(f, new[None]).estimates[0].numpy()
    states: list = []
    rollout(f, new[None], states=states)
    weights = [state.weights[0].numpy() for state in states]
    ridge, n, m = 0.1, len(z), len(z) - 1
    assert rf"\lambda_s = {ridge}" in PAGE and ridge == smoother.REG
    G = reference.gaussian_gram(z.numpy(), z.numpy(), 0.5)
    later = weights[-1]
    for t in reversed(range(len(new) - 1)):
        positive = np.maximum(0, weights[t][:m])
        r, g = m * positive / positive.sum(), G[1:] @ later
        root = np.diag(np.sqrt(r))
        sources = root @ np.linalg.solve(root @ G[1:, 1:] @ root + m * ridge * np.eye(m), root @ g)
        later = np.append(sources, 0.0)
        assert later.shape == (n,)
        later = later / later.sum()
        assert_allclose(later @ z.numpy(), found[t], rtol=1e-7, atol=1e-9)


@torch.no_grad()
def test_smoothing_over_simulated_states():
    """The default's: the likelihood of later observations, then the filter's own update."""
    z, x, new = data(150, 5)
    f = SimulatedKBF(points=60, run=600, draws=2, dtype="float64").fit([Recording(z, x)])
    found = smooth(f, new[None]).estimates[0].numpy()
    states: list = []
    predicted: list = []
    rollout(f, new[None], states=states, before=lambda state, *_: predicted.append(state))
    P = f.transition(torch.eye(f.n, dtype=torch.float64)).mT.numpy()
    later = states[-1].weights[0].numpy()
    for t in reversed(range(len(new) - 1)):
        w = states[t].weights[0].numpy()
        moved = P @ w
        known = moved > np.finfo(float).eps * moved.max()
        h = np.where(known, later / np.where(known, moved, 1), 0)
        b = np.maximum(0, (P.T @ h) / (P.T @ known))
        prior = predicted[t].weights[0].numpy() * b
        state = states[t]._replace(weights=torch.from_numpy(prior / prior.sum())[None])
        later = f.observe(state, new[None, t])[0].weights[0].numpy()
        later = later / later.sum()
        assert_allclose(later @ f.states.numpy(), found[t], rtol=1e-6, atol=1e-8)
