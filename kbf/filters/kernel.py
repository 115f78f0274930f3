"""The Kernel Bayes Filter: the posterior is a weighted sample over the training points, moved and updated by kernel means.

Read `KernelBayesFilter` first: it is the algorithm. What is constant in time is an operator, made once by the functions above it:
P moves weights one step in time, A turns a predicted embedding into a density ratio, and G_X (or features Psi) serve the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn

from kbf import ratios, rules
from kbf.linalg import psd_solve
from kbf.metrics import effective_sample_size, negative_mass
from kbf.sequence import Transitions

CACHED = 2**24
"""Bytes up to which the products of features are kept (`kbf.rules.second_moments`): what stays in a processor's cache."""


class KernelState(NamedTuple):
    """Weights ``b n`` over the memory points, and the share ``b`` of ratios that the last update clipped at zero."""

    weights: Tensor
    clipped: Tensor


class Operator(nn.Module):
    """A linear map of weights, w -> left (right^T w): ``n r`` twice; dense when right is None (then left is ``n n``)."""

    left: Tensor
    right: Tensor | None

    def __init__(self, left: Float[Tensor, "n r"], right: Float[Tensor, "n r"] | None = None) -> None:
        super().__init__()
        self.register_buffer("left", left)
        self.register_buffer("right", right)

    def forward(self, w: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Apply it to a batch of weights."""
        return w @ self.left.mT if self.right is None else (w @ self.right) @ self.left.mT


def transition_operator(gram: Float[Tensor, "n n"], pairs: Transitions, reg: float | Tensor) -> Operator:
    """P: the conditional mean embedding of the next state. Row target(i) of P is row i of (G_ss + m reg I)^-1 G_s:.

    Args:
        gram: G_Z ``n n``.
        pairs: m transitions (source, target).
        reg: lambda'.

    References: Xu et al. (2022), Algorithm 2, step 4; Fukumizu et al., equation 18, the two factors on the right.
    """
    source = gram[pairs.source]
    solved = psd_solve(source[:, pairs.source], source, reg=len(pairs.source) * reg)
    return Operator(torch.zeros_like(gram).index_copy(0, pairs.target, solved))


def transition_operator_primal(features: Float[Tensor, "n r"], pairs: Transitions, reg: float | Tensor) -> Operator:
    """The same from features, G_Z = F F^T: rows F_s (F_s^T F_s + m reg I_r)^-1 on the left, F on the right."""
    source = features[pairs.source]
    solved = psd_solve(source.mT @ source, source.mT, reg=len(pairs.source) * reg).mT
    return Operator(torch.zeros_like(features).index_copy(0, pairs.target, solved), features)


def ratio_operator(gram: Float[Tensor, "n n"], reg: float | Tensor) -> Operator:
    """A = n (G_Z + n reg I)^-1 G_Z: from the weights of a prior over the memory points to gamma at these points.

    References: Xu et al. (2022), equation 1, with the prior m_Pi = sum_i w_i phi(z_i).
    """
    n = len(gram)
    return Operator(n * psd_solve(gram, gram, reg=n * reg))


def ratio_operator_primal(features: Float[Tensor, "n r"], reg: float | Tensor) -> Operator:
    """The same from features, G_Z = F F^T: n F (F^T F + n reg I_r)^-1 on the left, F on the right."""
    n = len(features)
    return Operator(n * psd_solve(features.mT @ features, features.mT, reg=n * reg).mT, features)


def density_transition(log_density: Float[Tensor, "n n"], mass: Float[Tensor, " n"]) -> Operator:
    """P from a transition density: P_ij = m_i q(z_i | z_j) / sum_k m_k q(z_i | z_k).

    The predicted density at z_i, sum_j w_j q(z_i | z_j), over that of the memory after a move, sum_k m_k q(z_i | z_k), is a density
    ratio r_i; times its mass m_i it is the importance weight of the memory point. So P w is the predicted embedding as a weighted
    sample of the memory, and n P w, n m_i r_i at point i, what the rule needs (where each point counts 1/n): the operator A is then
    n I. The memory itself does not move: P m = m.

    Args:
        log_density: log q(z_i | z_j), row i the target, column j the source; a constant is of no matter.
        mass: m ``n``, the share of the memory's distribution that each point stands for, sum 1; 1/n for a plain sample.
    """
    log_mass = mass.log()
    return Operator((log_mass[:, None] + log_density - (log_density + log_mass).logsumexp(-1, keepdim=True)).exp())


class RelativeRatio(nn.Module):
    """The relative ratio (`kbf.ratios.relative`) of the predicted embedding, over the memory points' Gram matrix G_Z."""

    gram: Tensor
    reg: Tensor

    def __init__(self, gram: Float[Tensor, "n n"], reg: float | Tensor, alpha: float) -> None:
        super().__init__()
        self.register_buffer("gram", gram)
        self.register_buffer("reg", torch.as_tensor(reg, dtype=gram.dtype))
        self.alpha = alpha

    def forward(self, w: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """r_alpha at the memory points."""
        return ratios.relative(self.gram, self.gram, w, self.reg, self.alpha)


class DenseUpdate(nn.Module):
    """A rule of `kbf.rules` over the full Gram matrix of the memory's observations: (ratio, x) -> weights."""

    obs: Tensor
    bandwidth: Tensor
    gram: Tensor
    reg: Tensor

    def __init__(
        self,
        rule: Callable[..., Tensor],
        kernel: Callable[..., Tensor],
        bandwidth: Tensor,
        obs: Float[Tensor, "n q"],
        reg: float | Tensor,
    ) -> None:
        """The update of a rule (ratio, gram, query, reg) and a kernel of `kbf.kernels` with its bandwidth."""
        super().__init__()
        self.rule, self.kernel = rule, kernel
        self.register_buffer("obs", obs)
        self.register_buffer("bandwidth", bandwidth)
        self.register_buffer("gram", kernel(obs, obs, bandwidth=bandwidth))
        self.register_buffer("reg", torch.as_tensor(reg, dtype=obs.dtype))

    def forward(self, ratio: Float[Tensor, "b n"], obs: Float[Tensor, "b *x"]) -> Float[Tensor, "b n"]:
        """The posterior's weights."""
        query = self.kernel(obs.flatten(1).to(self.obs), self.obs, bandwidth=self.bandwidth)
        return self.rule(ratio, self.gram, query, self.reg)


class PrimalUpdate(nn.Module):
    """The importance-weighted or the original rule over features psi of the observations, O(n p^2) a step: (ratio, x) -> weights.

    Each memory point may come with k observations (`kbf.rules.importance_weighted_moments`).
    """

    features: Tensor
    moments: Tensor | None
    reg: Tensor

    def __init__(
        self,
        psi: nn.Module,
        obs: Shaped[Tensor, "n k *x"],
        reg: float | Tensor,
        *,
        rule: str = "importance_weighted",
        dtype: torch.dtype | None = None,
    ) -> None:
        """The update of a feature map.

        Args:
            psi: ``m *x`` -> ``m p``, differentiable.
            obs: k observations of each memory point.
            reg: lambda (delta for the original rule).
            rule: "importance_weighted" or "original" (the latter for k = 1).
            dtype: of the rule's arithmetic, when it is not that of the features.

        Raises:
            ValueError: another rule, or the original rule with several observations of a point.
        """
        super().__init__()
        n, k = obs.shape[:2]
        if rule not in ("importance_weighted", "original") or (rule == "original" and k > 1):
            raise ValueError(f"a rule over features is importance_weighted, or original with k = 1; got {rule} with k = {k}")
        features = psi(obs.flatten(0, 1)).unflatten(0, (n, k))
        features = features.to(dtype or features.dtype)
        self.psi, self.rule = psi, rule
        self.register_buffer("features", features.mean(1))
        p = features.shape[-1]
        keep = rule == "importance_weighted" and (k > 1 or n * p * (p + 1) // 2 * features.element_size() <= CACHED)
        self.register_buffer("moments", rules.second_moments(features) if keep else None)
        self.register_buffer("reg", torch.as_tensor(reg, dtype=features.dtype))

    def forward(self, ratio: Float[Tensor, "b n"], obs: Tensor) -> Float[Tensor, "b n"]:
        """The posterior's weights."""
        query = self.psi(obs).to(self.features.dtype)
        if self.rule == "original":
            return rules.original_primal(ratio, self.features, query, self.reg)
        if self.moments is None:
            return rules.importance_weighted_primal(ratio, self.features, query, self.reg, check=False)
        return rules.importance_weighted_moments(ratio, self.features, self.moments, query, self.reg, check=False)


class KernelBayesFilter(nn.Module):
    """The filter over n memory points; every operator is a buffer.

    1. predict: w <- P w.
    2. update: gamma = A w, r = max(0, gamma) (clipped unless the rule takes signed ratios), then w = rule(r, observation).

    Weights may be negative and need not sum to 1; with ``normalise`` they are scaled to sum 1 (and ratios to mean 1). Then an
    observation so far from those of the memory that the posterior's weights have no positive sum is passed over: the prediction
    is kept. Without ``normalise`` weights stay as they come, and such an observation leaves a filter that estimates 0.

    References: Xu et al. (2022), Algorithm 2 (here the loop moves first: z_0 from the prior, move, observe).
    """

    states: Tensor
    prior: Tensor

    def __init__(
        self,
        states: Float[Tensor, "n d"],
        transition: nn.Module,
        ratio: nn.Module | None,
        rule: nn.Module,
        *,
        prior: Float[Tensor, " n"] | None = None,
        normalise: bool = False,
        clip: bool = True,
    ) -> None:
        """The filter of given operators.

        Args:
            states: memory points ``n d``.
            transition: P, weights ``b n`` -> ``b n``.
            ratio: A, weights ``b n`` -> gamma ``b n``; None for n I.
            rule: (ratio ``b n``, observation ``b *x``) -> weights ``b n``; a `DenseUpdate` or `PrimalUpdate`.
            prior: weights to start from ``n``; None for 1/n, the embedding of the training states.
            normalise: scale the weights to sum 1, the ratios to mean 1.
            clip: cut negative ratios; the original rule takes them as they are.
        """
        super().__init__()
        n = len(states)
        self.register_buffer("states", states)
        self.register_buffer("prior", states.new_full((n,), 1 / n) if prior is None else prior)
        self.transition, self.ratio, self.rule = transition, ratio, rule
        self.normalise, self.clip = normalise, clip

    def init(self, batch: int, *, generator: Generator | None = None) -> KernelState:
        """The prior's weights."""
        return KernelState(self.prior.expand(batch, -1), self.states.new_zeros(batch))

    def predict(self, state: KernelState, *, generator: Generator | None = None) -> KernelState:
        """Move: w <- P w."""
        weights = self.transition(state.weights)
        return state._replace(weights=self.scaled(weights, 1))

    def update(self, state: KernelState, obs: Tensor) -> KernelState:
        """Observe ``b *x``: w <- rule(max(0, A w), x)."""
        n = len(self.states)
        gamma = n * state.weights if self.ratio is None else self.ratio(state.weights)
        ratio = self.scaled(gamma.clamp_min(0), n) if self.clip else gamma
        weights = self.rule(ratio, obs)
        if self.normalise:
            weights = torch.where(positive_sum(weights), self.scaled(weights, 1), state.weights)
        return KernelState(weights, (gamma <= 0).to(gamma).mean(-1))

    def scaled(self, weights: Float[Tensor, "b n"], total: int) -> Float[Tensor, "b n"]:
        """Weights with the given sum if this filter normalises and their sum is positive, else as they are."""
        if not self.normalise:
            return weights
        return weights / torch.where(positive_sum(weights), weights.sum(-1, keepdim=True), total) * total

    def estimate(self, state: KernelState) -> Float[Tensor, "b d"]:
        """The mean, sum_i w_i z_i."""
        return state.weights @ self.states

    def diagnostics(self, state: KernelState) -> dict[str, Tensor]:
        """Effective sample size, sum and negative mass of the weights, and the share of clipped ratios, each ``b``."""
        w = state.weights
        return {
            "ess": effective_sample_size(w),
            "weight_sum": w.sum(-1),
            "negative_mass": negative_mass(w),
            "clipped": state.clipped,
        }

    def covariance(self, state: KernelState) -> Float[Tensor, "b d d"]:
        """Of the state, ``b d d``: sum_i w_i (z_i - m)(z_i - m)^T / sum_i w_i around the estimate m; no variance is negative.

        Negative weights may make one: negative eigenvalues are set to 0. NaN where an estimate is not finite.
        """
        w, m = state.weights, self.estimate(state)
        centred = self.states - m[:, None]
        second = (w[..., None] * centred).mT @ centred / torch.where(positive_sum(w), w.sum(-1, keepdim=True), 1)[..., None]
        values, vectors = torch.linalg.eigh(second.nan_to_num(0, 0, 0))
        known = second.isfinite().all(-1).all(-1)
        return torch.where(known[:, None, None], (vectors * values.clamp_min(0)[:, None]) @ vectors.mT, torch.nan)


def positive_sum(weights: Float[Tensor, "b n"]) -> Bool[Tensor, "b 1"]:
    """Whether the weights can be divided by their sum; True for NaN, which is passed on to be seen."""
    return ~(weights.sum(-1, keepdim=True) <= torch.finfo(weights.dtype).tiny)
