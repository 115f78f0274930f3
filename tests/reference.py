"""The truth that the tests compare with: the papers' formulas as plain loops and dense solves in
NumPy. Slow on purpose.

Letters and scalings as in the docstrings of kbf: ratios have mean about 1 over the n training
points, every ridge is n * reg.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from kbf.filters.gaussian.moments import GaussianState, rts_step
from kbf.filters.protocols import Filter
from kbf.filters.rollout import step

Array = NDArray[np.float64]
TRAINER = {
    "_target_": "lightning.Trainer",
    "accelerator": "cpu",
    "max_epochs": 1,
    "enable_progress_bar": False,
    "logger": False,
}
"""Of one epoch, on the CPU, that shows nothing."""


def gaussian(x: Array, y: Array, bandwidth: float) -> float:
    """exp(-||x - y||^2 / (2 bandwidth^2)) of two points."""
    total = 0.0
    for a, b in zip(x, y, strict=True):
        total += (float(a) - float(b)) ** 2
    return math.exp(-total / (2 * bandwidth**2))


def gram(kernel: Callable[[Array, Array], float], x: Array, y: Array) -> Array:
    """The Gram matrix, entry by entry."""
    out = np.empty((len(x), len(y)))
    for i in range(len(x)):
        for j in range(len(y)):
            out[i, j] = kernel(x[i], y[j])
    return out


def gaussian_gram(x: Array, y: Array, bandwidth: float) -> Array:
    """Gram matrix of the Gaussian kernel."""
    return gram(lambda a, b: gaussian(a, b, bandwidth), x, y)


def cme(G: Array, g: Array, reg: float) -> Array:
    """Conditional mean embedding: (G + n reg I)^-1 g."""
    n = len(G)
    return np.linalg.solve(G + n * reg * np.eye(n), g)


def cme_weights(G: Tensor, g: Tensor, reg: float) -> Tensor:
    """`cme` in torch, for queries g ``*b n``: w = (G + n reg I)^-1 g."""
    n = len(G)
    return torch.linalg.solve(G + n * reg * torch.eye(n, dtype=G.dtype), g[..., None])[..., 0]


def cme_loo(G: Array, K: Array, reg: float) -> float:
    """sum_i ||phi(y_i) - m_{-i}(x_i)||^2, by n fits without pair i and the ridge n reg."""
    n, total = len(G), 0.0
    for i in range(n):
        rest = [j for j in range(n) if j != i]
        w = np.linalg.solve(G[np.ix_(rest, rest)] + n * reg * np.eye(n - 1), G[rest, i])
        total += K[i, i] - 2 * w @ K[rest, i] + w @ K[np.ix_(rest, rest)] @ w
    return total


def tikhonov(G: Array, g: Array, reg: float) -> Array:
    """gamma = n (G + n reg I)^-1 g (Xu et al., equation 1)."""
    n = len(G)
    return n * np.linalg.solve(G + n * reg * np.eye(n), g)


def kulsif(G: Array, g: Array, reg: float) -> Array:
    """max(0, gamma), entry by entry (Xu et al., Algorithm 1, step 2)."""
    return np.array([max(0.0, value) for value in tikhonov(G, g, reg)])


def kulsif_function(
    z: Array, u: Array, kernel: Callable[[Array, Array], float], reg: float
) -> Callable[[Array], float]:
    """The unclipped KuLSIF fit r of samples z ~ p and u ~ pi, as a function of a point.

    Stationarity of sum_i r(z_i)^2 / (2n) - sum_j r(u_j) / m + reg/2 ||r||^2 over r = sum of k(.,
    p_i) c_i on all n + m points.
    """
    n, m, points = len(z), len(u), np.concatenate([z, u])
    K = gram(kernel, points, points)
    weight_z = np.array([1 / n] * n + [0.0] * m)
    weight_u = np.array([0.0] * n + [1 / m] * m)
    c = np.linalg.solve(weight_z[:, None] * K + reg * np.eye(n + m), weight_u)
    return lambda at: sum(c_i * kernel(at, p) for c_i, p in zip(c, points, strict=True))


def kulsif_loo(z: Array, u: Array, kernel: Callable[[Array, Array], float], reg: float) -> float:
    """mean over l of r_{-l}(z_l)^2 / 2 - r_{-l}(u_l), by fits without z_l and u_l."""
    pairs, total = min(len(z), len(u)), 0.0
    for k in range(pairs):
        r = kulsif_function(np.delete(z, k, axis=0), np.delete(u, k, axis=0), kernel, reg)
        total += r(z[k]) ** 2 / 2 - r(u[k])
    return total / pairs


def original_rule(gamma: Array, G: Array, g: Array, delta: float) -> Array:
    """Lambda G ((Lambda G)^2 + delta I)^-1 Lambda g (Fukumizu et al., equation 14)."""
    L = np.diag(gamma)
    return L @ G @ np.linalg.inv(L @ G @ L @ G + delta * np.eye(len(G))) @ L @ g


def importance_weighted_rule(ratio: Array, G: Array, g: Array, reg: float) -> Array:
    """sqrt(D) (sqrt(D) G sqrt(D) + n reg I)^-1 sqrt(D) g (Xu et al., Algorithm 1, step 3)."""
    n = len(G)
    root = np.diag(np.sqrt(ratio))
    return root @ np.linalg.solve(root @ G @ root + n * reg * np.eye(n), root @ g)


def bayes_table(prior: Array, likelihood: Array, x: int) -> Array:
    """Bayes' rule on finite sets: posterior ``s`` of prior ``s`` and likelihood p(x | z) ``s o``,
    given observation x.
    """
    joint = [prior[z] * likelihood[z, x] for z in range(len(prior))]
    return np.array(joint) / sum(joint)


def published_filter(
    states: Array,
    obs: Array,
    test_obs: Array,
    bandwidth_ratio: float,
    bandwidth_transition: float,
    bandwidth_obs: float,
    eta: float,
    lam_transition: float,
    lam_rule: float,
) -> Array:
    """Algorithm 2 of Xu et al. (2022) over one training sequence, as it stands: estimates ``T d``
    from observations ``T q``.

    Dense diagonal products and a general solve in every step, weights as they come. The paper
    starts from 1/n at the first observation; here the loop moves first, so it starts from P (1/n).
    Our ``lam_rule`` is the authors' ``reg2``.
    """
    step, w = published_step(
        states,
        obs,
        bandwidth_ratio,
        bandwidth_transition,
        bandwidth_obs,
        eta,
        lam_transition,
        lam_rule,
    )
    estimates = np.empty((len(test_obs), states.shape[1]))
    for t in range(len(test_obs)):
        w = step(w, test_obs[t])
        estimates[t] = w @ states
    return estimates


def published_step(
    states: Array,
    obs: Array,
    bandwidth_ratio: float,
    bandwidth_transition: float,
    bandwidth_obs: float,
    eta: float,
    lam_transition: float,
    lam_rule: float,
) -> tuple[Callable[[Array, Array], Array], Array]:
    """One step of that filter, (weights, observation) -> weights, and the weights to start from."""
    n = len(states)
    G_Z = _fast_gaussian_gram(states, states, bandwidth_ratio)
    G_X = _fast_gaussian_gram(obs, obs, bandwidth_obs)
    A = np.linalg.solve(G_Z + n * eta * np.eye(n), n * G_Z)
    G_sources = _fast_gaussian_gram(states[:-1], states, bandwidth_transition)
    P = np.zeros((n, n))
    P[1:] = np.linalg.solve(G_sources[:, :-1] + (n - 1) * lam_transition * np.eye(n - 1), G_sources)

    def step(w: Array, x: Array) -> Array:
        w = P @ w
        D = np.diag(np.maximum(A @ w, 0))
        root = np.sqrt(D)
        g = _fast_gaussian_gram(obs, x[None], bandwidth_obs)[:, 0]
        return root @ np.linalg.solve(root @ G_X @ root + n * lam_rule * np.eye(n), root @ g)

    return step, np.full(n, 1 / n)


def _fast_gaussian_gram(x: Array, y: Array, bandwidth: float) -> Array:
    """`gaussian_gram` without its Python loop: the filter above is also timed."""
    return np.exp(-np.square(x[:, None] - y[None]).sum(-1) / (2 * bandwidth**2))


class Blind:
    """A state-space model that does not know the density of its moves."""

    def move(self, z, generator=None):
        return z

    observe = move

    def log_likelihood(self, x, z):
        return -(x - z).square().sum(-1)


class Moments(NamedTuple):
    """The same at every step of a sequence: mean ``b T d``, cov ``b T d d``."""

    mean: Tensor
    cov: Tensor


def rts_smoother(
    filtered: Moments,
    F: Float[Tensor, "*f d d"],
    Q: Float[Tensor, "*g d d"],
    a: Float[Tensor, "*h d"] | float = 0.0,
) -> Moments:
    """Rauch-Tung-Striebel smoother: moments of every z_t given *all* observations, by `rts_step`
    from the end.

    Args:
        filtered: the filter's moments (see `filter_moments`), ``b T d`` and ``b T d d``.
        F: ``d d``, or anything that broadcasts to ``b T-1 d d``, entry t for the move from step t
            to t + 1.
        Q: likewise.
        a: likewise.

    References: Sarkka (2013), theorem 8.2.
    """
    b, T, d = filtered.mean.shape
    F, Q = F.expand(b, T - 1, d, d), Q.expand(b, T - 1, d, d)
    a = torch.as_tensor(a, dtype=Q.dtype, device=Q.device).expand(b, T - 1, d)
    smoothed = [GaussianState(filtered.mean[:, -1], filtered.cov[:, -1])]
    for t in reversed(range(T - 1)):
        now = GaussianState(filtered.mean[:, t], filtered.cov[:, t])
        smoothed.append(rts_step(now, smoothed[-1], F[:, t], Q[:, t], a[:, t]))
    mean, cov = zip(*reversed(smoothed), strict=True)
    return Moments(torch.stack(mean, 1), torch.stack(cov, 1))


def filter_moments(
    filter: Filter[GaussianState],
    obs: Float[Tensor, "b T q"],
    mask: Bool[Tensor, "b T"] | None = None,
) -> Moments:
    """Run a Gaussian filter and keep the moments of every step, for the smoother (`rollout` keeps
    the estimates alone).

    Args:
        filter: Kalman, extended or unscented Kalman filter.
        obs: ``b T q``.
        mask: ``b T``, False = not observed (the values there must be finite).
    """
    state, states = filter.init(len(obs)), []
    for t in range(obs.shape[1]):
        state = step(filter, state, obs[:, t], mask=None if mask is None else mask[:, t])
        states.append(state)
    mean, cov = zip(*states, strict=True)
    return Moments(torch.stack(mean, 1), torch.stack(cov, 1))
