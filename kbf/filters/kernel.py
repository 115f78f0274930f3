"""The Kernel Bayes Filter: the posterior is a weighted sample over the training points, moved and updated by kernel means.

What is constant in time is an operator, made once by the functions of `kbf.filters.operators`: P moves weights one step in time, A
turns a predicted embedding into a density ratio, and G_X (or features Psi) serve the rule.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from kbf.distributed import Total, alone
from kbf.filters.backwards import RuleBackward, density_backward
from kbf.filters.base import Backward, Now
from kbf.filters.operators import Operator, compose, count
from kbf.metrics import effective_sample_size, negative_mass

LEAST = 0.05
"""Least sum of weights over that of their absolute values with which weights are normalised; it is usually 0.5 to 1."""


class KernelState(NamedTuple):
    """Weights ``b n`` over the memory points."""

    weights: Tensor


class KernelBayesFilter(nn.Module):
    """The filter over n memory points; every operator is a buffer.

    With features and the importance-weighted rule nothing in a step waits for a GPU.

    1. predict: w <- P w.
    2. update: gamma = A w, r = max(0, gamma) (clipped unless the rule takes signed ratios), then w = rule(r, observation).

    Weights may be negative and need not sum to 1; with ``normalise`` they are scaled to sum 1 (and ratios to mean 1). Then an
    observation so far from those of the memory that the posterior's weights cancel (`LEAST`) is passed over: the prediction
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
        total: Total = alone,
        backward: RuleBackward | None = None,
    ) -> None:
        """The filter of given operators.

        Args:
            states: memory points ``n d``.
            transition: P, weights ``b n`` -> ``b n``; or P(u), (weights, control ``b k``) -> ``b n``, with ``controlled`` = k.
            ratio: A, weights ``b n`` -> gamma ``b n``; None for n I.
            rule: (ratio ``b n``, observation ``b *x``) -> weights ``b n``; a `DenseUpdate` or `PrimalUpdate`.
            prior: weights to start from ``n``; None for 1/n, the embedding of the training states.
            normalise: scale the weights to sum 1, the ratios to mean 1.
            clip: cut negative ratios; the original rule takes them as they are.
            total: adds up over processes that share the memory, each with its points (`kbf.distributed`).
            backward: the rule backwards, for a smoother; a filter without a ratio needs none: its P is a density.
        """
        super().__init__()
        self.n = int(count(states, total))
        self.register_buffer("states", states)
        self.register_buffer("prior", states.new_full((len(states),), 1 / self.n) if prior is None else prior)
        self.transition, self.ratio, self.rule = transition, ratio, rule
        self.normalise, self.clip, self.total, self.backward = normalise, clip, total, backward
        self.moved_ratio = None if normalise else compose(ratio, transition)
        self.controlled, self.partial = getattr(transition, "controlled", 0), getattr(rule, "partial", False)

    def init(self, batch: int, *, generator: Generator | None = None) -> KernelState:
        """The prior's weights."""
        return KernelState(self.prior.expand(batch, -1))

    def predict(
        self, state: KernelState, *, control: Float[Tensor, "b k"] | None = None, generator: Generator | None = None
    ) -> KernelState:
        """Move: w <- P w, or P(u) w with a control u."""
        moved = self.transition(state.weights) if control is None else self.transition(state.weights, control)
        return KernelState(self.scaled(moved, 1))

    def update(self, state: KernelState, obs: Tensor) -> KernelState:
        """Observe ``b *x``: w <- rule(max(0, A w), x)."""
        gamma = self.n * state.weights if self.ratio is None else self.ratio(state.weights)
        ratio = self.scaled(gamma.clamp_min(0), self.n) if self.clip else gamma
        return KernelState(self.scaled(self.rule(ratio, obs), 1, state.weights))

    def step(self, state: KernelState, obs: Tensor) -> KernelState:
        """Predict and update. Where nothing needs the predicted weights they are left out: A P is one operator."""
        if self.moved_ratio is None:
            return self.update(self.predict(state), obs)
        gamma = self.moved_ratio(state.weights)
        return KernelState(self.rule(gamma.clamp_min(0) if self.clip else gamma, obs))

    def smoother(self) -> Backward:
        """Back in time (`kbf.filters.backwards`): by Bayes' rule where P is a density, else by the kernel Bayes' rule.

        1. P is a density: what came later has the likelihood b at the memory points. The prior at t is the prediction times b, and
           the filter's update takes x_t in *last*: its regression is then one near the smoothed state, and better there than the
           filter's own, times b.
        2. Else: the rule backwards, with the filter's weights for the prior.

        Smoothed weights have sum 1, whether the filter's are normalised or not; where they have no positive sum, the filter's stay.

        Raises:
            ValueError: a memory that processes share, or P is no density and the filter was made without the rule backwards.
        """
        if self.total is not alone:
            raise ValueError("a filter whose memory is spread over processes has no smoother")
        if self.ratio is not None and self.backward is None:
            raise ValueError("this filter has no smoother: it was made without the pairs of the recording (backward=RuleBackward)")
        known = [op.right for op in (self.transition, self.ratio) if isinstance(op, Operator) and op.right is not None]
        features = known[0] if known else None

        def step_back(
            now: Now, following: KernelState, *, control: Tensor | None = None, generator: Generator | None = None
        ) -> KernelState:
            w = now.state.weights
            if self.backward is not None:
                return KernelState(self.of_sum_1(self.backward(w, following.weights, self.states, features, control), w))
            move = self.transition if control is None else partial(self.transition, control=control)
            prior = now.predicted.weights * density_backward(move, w, following.weights)
            found: KernelState = now.observe(KernelState(self.of_sum_1(prior, w)))
            return KernelState(self.of_sum_1(found.weights, w))

        return step_back

    def of_sum_1(self, weights: Float[Tensor, "b n"], otherwise: Float[Tensor, "b n"]) -> Float[Tensor, "b n"]:
        """Weights over their sum; ``otherwise`` where it is not positive."""
        positive, scale = self.scale(weights)
        return torch.where(positive, weights / scale, otherwise)

    def scaled(self, weights: Float[Tensor, "b n"], to: int, otherwise: Tensor | None = None) -> Float[Tensor, "b n"]:
        """Weights with the given sum if this filter normalises; where their sum is not positive, ``otherwise`` or as they are."""
        if not self.normalise:
            return weights
        positive, scale = self.scale(weights)
        return torch.where(positive, weights * (to / scale), weights if otherwise is None else otherwise)

    def scale(self, weights: Float[Tensor, "b n"]) -> tuple[Bool[Tensor, "b 1"], Float[Tensor, "b 1"]]:
        """Whether the weights can be divided by their sum, and that sum or else 1. NaN is passed on, to be seen.

        They cannot where positive and negative ones nearly cancel (`LEAST`): an estimate might come out far from all points.
        """
        sums, sizes = self.total(torch.stack([weights.sum(-1), weights.abs().sum(-1)], -1)).split(1, -1)
        positive = ~(sums <= (LEAST * sizes).clamp_min(torch.finfo(weights.dtype).tiny))
        return positive, torch.where(positive, sums, 1)

    def estimate(self, state: KernelState) -> Float[Tensor, "b d"]:
        """The mean, sum_i w_i z_i."""
        return self.total(state.weights @ self.states)

    def diagnostics(self, state: KernelState) -> dict[str, Tensor]:
        """Effective sample size, sum and negative mass of the weights, and the share of them that are 0, each ``b``.

        After an update those are the memory points whose ratio was clipped (or passed over by `PrimalUpdate`'s ``local``).
        """
        w, total = state.weights, self.total
        return {
            "ess": effective_sample_size(w, total),
            "weight_sum": total(w.sum(-1)),
            "negative_mass": negative_mass(w, total),
            "clipped": total((w == 0).to(w).sum(-1)) / self.n,
        }

    def covariance(self, state: KernelState) -> Float[Tensor, "b d d"]:
        """Of the state, ``b d d``: sum_i w_i (z_i - m)(z_i - m)^T / sum_i w_i around the estimate m; no variance is negative.

        Negative weights may make one: negative eigenvalues are set to 0. NaN where an estimate is not finite.
        """
        w, m = state.weights, self.estimate(state)
        centred = self.states - m[:, None]
        second = self.total((w[..., None] * centred).mT @ centred) / self.scale(w)[1][..., None]
        values, vectors = torch.linalg.eigh(second.nan_to_num(0, 0, 0))
        known = second.isfinite().all(-1).all(-1)
        return torch.where(known[:, None, None], (vectors * values.clamp_min(0)[:, None]) @ vectors.mT, torch.nan)
