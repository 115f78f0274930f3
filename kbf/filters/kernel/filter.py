"""The Kernel Bayes Filter over a memory: its weights are predicted and updated by kernel means.

`kbf.filters.kernel.algorithm` has the same algorithm in one function. Here the operators that are
constant in time are computed once: P predicts the weights, A converts a predicted embedding to a
density ratio (both in `kbf.filters.kernel.operators`), and a rule over the memory's observations
updates the weights (`kbf.filters.kernel.update.rule`).
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.kernel.operators import Operator, compose
from kbf.filters.kernel.smoother import RuleBackward, step_back_by_density, step_back_by_rule
from kbf.filters.protocols import Backward, Controlled, UpdateByObserve, WithSensors
from kbf.rkhs.embeddings import Embedding
from kbf.rkhs.kernels import Kernel
from kbf.rkhs.weights import (
    MIN_SHARE_OF_SUM,
    divisor,
    effective_sample_size,
    negative_mass,
    normalised,
)
from kbf.runtime.branches import computes_all_branches
from kbf.runtime.html_repr import ShownModule


@runtime_checkable
class Regresses(Protocol):
    """An update that has the regression of the state on an observation."""

    def regress(self, obs: Tensor, reg: float) -> Tensor:
        """Return the weights of the conditional mean embedding ``b n``."""
        ...


class KernelState(NamedTuple):
    """The belief: weights ``b n`` over the memory points."""

    weights: Tensor


class KernelBayesFilter(UpdateByObserve[KernelState], ShownModule):
    """The Kernel Bayes Filter over n memory points.

    1. Predict: w <- P w.
    2. Update with x: gamma = A w, r = max(0, gamma), w <- rule(r, x). The original rule takes gamma
       without the clipping.

    Weights may be negative and need not sum to 1. With ``normalise`` weights are scaled to sum 1
    and ratios to mean 1. An observation for which the weights of the posterior cancel or vanish
    (`kbf.rkhs.weights.MIN_SHARE_OF_SUM`), because it is far from those of the memory or from the
    predicted ones, is rejected: the filter keeps the prediction. With features and the
    importance-weighted rule neither `predict` nor `update` synchronises with a GPU. All operators
    are buffers.

    References: Xu et al. (2022), Algorithm 2 (here the loop predicts first: z_0 from the prior,
    then predict, then update).
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
        backward: RuleBackward | None = None,
        preimage: Kernel | None = None,
    ) -> None:
        """Build the filter of given operators.

        Args:
            states: memory points ``n d``.
            transition: P, weights ``b n`` -> ``b n``; or P(u), (weights, control ``b k``) -> ``b
                n``, with ``controlled`` = k.
            ratio: A, weights ``b n`` -> gamma ``b n``; None for n I.
            rule: (ratio ``b n``, observation ``b *x``) -> weights ``b n``; a module of
                `kbf.filters.kernel.update`.
            prior: initial weights ``n``; None for 1/n, the embedding of the training states.
            normalise: scale the weights to sum 1, the ratios to mean 1.
            clip: set negative ratios to 0; the original rule requires them unchanged.
            backward: the rule backwards in time, for a smoother. A filter without ``ratio``
                requires none: its P is a density.
            preimage: Gaussian kernel of the states whose pre-image is the estimate; None for the
                mean.
        """
        super().__init__()
        self.n: int = len(states)
        self.register_buffer("states", states)
        uniform = states.new_full((self.n,), 1 / self.n)
        self.register_buffer("prior", uniform if prior is None else prior)
        self.transition: nn.Module = transition
        self.ratio: nn.Module | None = ratio
        self.rule: nn.Module = rule
        self.normalise: bool = normalise
        self.clip: bool = clip
        self.backward: RuleBackward | None = backward
        self.preimage: Kernel | None = preimage
        self.moved_ratio: Operator | None = None if normalise else compose(ratio, transition)
        self.scale_free: bool = (
            normalise and clip and ratio is None and isinstance(transition, Operator)
        )
        missing = isinstance(rule, WithSensors) and rule.allow_missing_sensors
        self.allow_missing_sensors: bool = missing
        self.controlled: int = transition.controlled if isinstance(transition, Controlled) else 0

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelBayesFilter:
        """Return a copy with its own, detached buffers; PyTorch copies only leaf tensors."""
        memo |= {id(x): x.detach().clone() for x in self.buffers() if x.grad_fn is not None}
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied

    def init(self, batch: int, *, generator: Generator | None = None) -> KernelState:
        """Return the weights of the prior for each element of the batch."""
        return KernelState(self.prior.expand(batch, -1))

    def predict(
        self,
        state: KernelState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> KernelState:
        """Return the prediction: w <- P w, or P(u) w given a control u."""
        w = state.weights
        moved = self.transition(w) if control is None else self.transition(w, control)
        return KernelState(normalised(moved, moved) if self.normalise else moved)

    def observe(self, state: KernelState, obs: Tensor) -> tuple[KernelState, Float[Tensor, " b"]]:
        """Return the posterior, and a number that is positive where the observation is possible.

        The posterior given observations ``b *x`` is w <- rule(max(0, A w), x).

        It is finite and positive where the weights have a positive, finite sum and do not cancel.
        """
        gamma = self.n * state.weights if self.ratio is None else self.ratio(state.weights)
        return self.weighed(gamma, obs, state.weights)

    def weighed(
        self, gamma: Float[Tensor, "b n"], obs: Tensor, before: Float[Tensor, "b n"]
    ) -> tuple[KernelState, Float[Tensor, " b"]]:
        """Apply the rule to r = max(0, gamma), scaled to mean 1 if the filter normalises.

        Where the new weights cancel the result is ``before``.
        """
        ratio = gamma.clamp_min(0) if self.clip else gamma
        if self.normalise and self.clip:
            total = ratio.sum(-1, keepdim=True).clamp_min(torch.finfo(ratio.dtype).tiny)
            ratio = ratio * (total.reciprocal() * self.n)
        weights = self.rule(ratio, obs)
        if not self.normalise:
            return KernelState(weights), torch.sub(weights, before, alpha=MIN_SHARE_OF_SUM).sum(-1)
        cancel, sums = divisor(weights)
        posterior = torch.where(cancel, before, weights * sums.reciprocal())
        return KernelState(posterior), sums.masked_fill(cancel, 0)[:, 0]

    def move_and_observe(
        self, state: KernelState, obs: Tensor
    ) -> tuple[KernelState, Float[Tensor, " b"]] | None:
        """Predict and observe in one, without the predicted weights; None if this is not possible.

        If A and P are of low rank, A P is one operator. If the ratios are the predicted weights and
        are scaled anyway, the prediction is not normalised before. A compiled step computes the
        predicted weights in any case, for observations that are rejected.
        """
        if self.scale_free and not computes_all_branches():
            moved = self.transition(state.weights)
            return self.weighed(moved, obs, moved)
        if self.moved_ratio is None:
            return None
        return self.weighed(self.moved_ratio(state.weights), obs, state.weights)

    def smoother(self) -> Backward:
        """Return the backward step (`kbf.filters.kernel.smoother`).

        It is Bayes' rule if P is a density, otherwise the kernel Bayes' rule. Smoothed weights have
        sum 1 whether or not the filter normalises; where their sum is not positive, the weights of
        the filter are kept.

        Raises:
            ValueError: P is not a density, and the filter has no ``backward``.
        """
        if self.backward is not None:
            operators = (self.transition, self.ratio)
            features = (op.right for op in operators if isinstance(op, Operator))
            F = next((right for right in features if right is not None), None)
            return step_back_by_rule(self.backward, self.states, F)
        if self.ratio is not None:
            raise ValueError(
                "this filter has no smoother: it was built without the pairs of the recording "
                "(backward=RuleBackward)"
            )
        return step_back_by_density(self.transition)

    def start(self, obs: Tensor, reg: float) -> KernelState:
        """Return the weights given the first observations ``b *x`` alone, without a prior.

            w = (G_X + n reg I)^-1 k_X(x)

        It is the start of Fukumizu et al. where the prior is unknown. The filter goes on from it by
        `kbf.rollout` with ``state`` over the observations after the first.

        Args:
            obs: ``b *x``. reg: lambda of the regression.

        Raises:
            ValueError: the update has no Gram matrix of observations.

        References: Fukumizu et al., equation 10 and the end of section 4.3.
        """
        if not isinstance(self.rule, Regresses):
            raise ValueError(
                f"{type(self.rule).__name__} is no regression over the memory's observations: "
                "start from the prior"
            )
        w = self.rule.regress(obs, reg)
        return KernelState(normalised(w, w) if self.normalise else w)

    def estimate(self, state: KernelState) -> Float[Tensor, "b d"]:
        """Return the mean of the embedding, sum_i w_i z_i ``b d``, or its pre-image."""
        if self.preimage is None:
            return state.weights @ self.states
        if torch.compiler.is_exporting():
            raise ValueError(
                "the pre-image is an iteration, which cannot be exported: use the mean"
            )
        return Embedding(self.states, state.weights).mode(self.preimage)

    def weighted_sample(
        self, state: KernelState
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n"]]:
        """Return the memory points ``b n d`` and the positive part of the weights, of sum 1."""
        return self.states.expand(len(state.weights), -1, -1), self.positive_part(state)

    def positive_part(self, state: KernelState) -> Float[Tensor, "b n"]:
        """Return the weights clipped at 0 and scaled to sum 1; 0 if no weight is positive."""
        v = state.weights.clamp_min(0)
        return v / v.sum(-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)

    def diagnostics(self, state: KernelState) -> dict[str, Tensor]:
        """Return effective sample size, sum, negative mass and zero-weight share, each ``b``.

        After an update the weight is 0 at memory points whose ratio was clipped, or which
        `PrimalUpdate`'s ``local`` left out.
        """
        w = state.weights
        return {
            "ess": effective_sample_size(w),
            "weight_sum": w.sum(-1),
            "negative_mass": negative_mass(w),
            "zero_weight_share": (w == 0).to(w).mean(-1),
        }

    def covariance(self, state: KernelState) -> Float[Tensor, "b d d"]:
        """Return sum_i v_i (z_i - m)(z_i - m)^T ``b d d`` with the positive part v of the weights.

        m is sum_i v_i z_i. With the signed weights the same sum need not be positive semi-definite,
        and where weights cancel it would be too small.
        """
        v = self.positive_part(state)
        centred = self.states - (v @ self.states)[:, None]
        return (v[..., None] * centred).mT @ centred
