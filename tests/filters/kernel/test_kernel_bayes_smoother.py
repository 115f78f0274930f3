"""The nonparametric kernel Bayes smoother against Bayes' table, loops and Rauch-Tung-Striebel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.kernel_bayes_smoother import kernel_bayes_smoother
from kbf.filters.kernel.smoother import RuleBackward
from kbf.filters.rollout import rollout
from kbf.filters.smoothing import smooth
from kbf.recording import Recording, transitions
from kbf.rkhs.kernels import delta, gaussian
from kbf.ssm import StateSpaceModel, simulate

F64 = torch.float64


@pytest.mark.parametrize("rule", ["original", "importance_weighted"])
def test_on_a_finite_chain_it_is_the_sum_over_all_paths(rule):
    """Three states, a delta kernel, hardly any ridge: w^s(j) = sum_i P(j | i, past) w^s'(i)."""
    generator = torch.Generator().manual_seed(1)
    P = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]], dtype=F64)  # from, to
    path = [0]
    for _ in range(400):
        path.append(int(torch.multinomial(P[path[-1]], 1, generator=generator)))
    z = torch.eye(3, dtype=F64)[path]
    pairs = transitions([len(z)], z.device)
    counts = z[pairs.source].mT @ z[pairs.target]
    moves = counts / counts.sum(1, keepdim=True)
    beliefs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.3, 0.6, 0.1]], dtype=F64)
    weights = (beliefs / z.sum(0)) @ z.mT
    expected, later = [beliefs[-1]], beliefs[-1]
    for t in (1, 0):
        joint = beliefs[t][:, None] * moves  # from, to
        later = (joint / joint.sum(0)) @ later
        expected.append(later)
    found = kernel_bayes_smoother(weights, delta(z, z), pairs, (1e-9, 1e-9), rule=rule) @ z
    torch.testing.assert_close(found, torch.stack(expected[::-1]), rtol=1e-4, atol=1e-5)


def test_it_is_the_printed_formula(normal):
    """By NumPy with explicit inverses; two recordings, whose ends are no pairs."""
    z, w = normal(12, 2), normal(4, 12).abs()
    w = w / w.sum(1, keepdim=True)
    pairs = transitions([7, 5], z.device)
    G = gaussian(z, z, bandwidth=0.9)
    eta, reg = 1e-2, 0.3
    found = kernel_bayes_smoother(w, G, pairs, (eta, reg)).numpy()
    K, s, t = G.numpy(), pairs.source.numpy(), pairs.target.numpy()
    m = len(s)
    assert m == 10 and 6 not in s
    later = w[-1].numpy()
    for step in (2, 1, 0):
        gamma = m * np.linalg.inv(K[np.ix_(s, s)] + m * eta * np.eye(m)) @ K[s] @ w[step].numpy()
        LG = np.diag(gamma) @ K[np.ix_(t, t)]
        on_sources = LG @ np.linalg.inv(LG @ LG + reg * np.eye(m)) @ (gamma * (K[t] @ later))
        later = np.zeros(12)
        later[s] = on_sources / on_sources.sum()
        np.testing.assert_allclose(found[step], later, rtol=1e-6, atol=1e-9)
    assert found.sum(1) == pytest.approx(1)


@pytest.mark.slow
@torch.no_grad()
def test_next_to_the_smoother_of_kbf():
    """A linear-Gaussian model, 500 recorded steps: both are better than the filter, and the ratio
    that is estimated is worse than the filter's own weights.
    """
    eye = torch.eye(2, dtype=F64)
    turn = 0.95 * torch.tensor([[np.cos(0.4), -np.sin(0.4)], [np.sin(0.4), np.cos(0.4)]])
    A, zero = turn.to(F64), torch.zeros(2, dtype=F64)
    model = StateSpaceModel(lambda z: z @ A.mT, lambda z: z, 0.1 * eye, 0.1 * eye, zero, 0 * eye)
    data = simulate(model, zero, 700, torch.Generator().manual_seed(100))
    memory, new, z = Recording(data.states[:500], data.obs[:500]), data.obs[500:], data.states[500:]
    kbf = KBF(factors=(1.0, 1.0, 1.0), regs=(1e-3, 1e-3, 1e-3))
    kbf.prepare([memory])
    f = kbf.fit([memory])
    states: list = []
    filtered = rollout(f, new[None], states=states).estimates[0]
    weights = torch.stack([state.weights[0] for state in states])
    G = gaussian(memory.states, memory.states, bandwidth=kbf.log_bandwidth.exp()[1].item())
    pairs = transitions([500], z.device)
    linear = LinearModel(A, zero, 0.1 * eye, eye, zero, 0.1 * eye, zero, 0 * eye)
    estimates = {
        "filter": filtered,
        "KBF": smooth(f, new[None]).estimates[0],
        "kernel Bayes": kernel_bayes_smoother(weights, G, pairs, (1e-3, 1e-2 * 500**2))
        @ memory.states,
        "weighted": kernel_bayes_smoother(
            weights, G, pairs, (1e-3, 0.1), rule="importance_weighted"
        )
        @ memory.states,
        "RTS": smooth(KalmanFilter(linear), new[None]).estimates[0],
    }
    error = {name: (e - z).square().sum(-1).mean().item() for name, e in estimates.items()}
    for name in ("KBF", "kernel Bayes"):
        assert error["RTS"] < error[name] < 0.85 * error["filter"], error
    assert error["KBF"] < min(error["kernel Bayes"], error["weighted"]), error


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="original or importance_weighted, got 'pseudo'"):
        kernel_bayes_smoother(
            torch.ones(2, 3), torch.eye(3), transitions([3], None), (0.1, 0.1), rule="pseudo"
        )


def test_a_step_back_of_a_batch_is_that_of_each_recording(normal):
    """Over the Gram matrix, and over features that span it."""
    z, w, following = normal(9, 2), normal(3, 9) + 0.5, normal(3, 9)
    source, target, width = torch.arange(8), torch.arange(1, 9), torch.tensor(1.0, dtype=F64)
    back = RuleBackward(source, target, gaussian, width)
    together = back(w, following, z)
    for k in range(3):
        torch.testing.assert_close(together[k], back(w[k : k + 1], following[k : k + 1], z)[0])
    features = torch.linalg.cholesky(gaussian(z, z, bandwidth=width))
    torch.testing.assert_close(together, back(w, following, z, features), rtol=1e-6, atol=1e-8)
    assert not bool(together[:, 8].any()), "the last state has no successor"
