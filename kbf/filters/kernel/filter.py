"""The Kernel Bayes Filter: the posterior is a weighted sample over the training points, moved and updated by kernel means.

The same algorithm in one function, to read first: `kbf.filters.kernel.algorithm`. Here what is
constant in time is made once: P moves weights one step in time, A turns a predicted embedding into
a density ratio (`kbf.filters.kernel.operators`), and the rule goes over the memory's observations
(`kbf.filters.kernel.update.rule`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.kernel.operators import Operator, compose
from kbf.filters.kernel.smoother import RuleBackward, step_back_by_density, step_back_by_rule
from kbf.filters.protocols import Backward, Controlled, WithSensors
from kbf.rkhs.weights import LEAST_SHARE, divisor, mass, normalised, with_sum
from kbf.runtime.distributed import OverPoints, no_reduce


class KernelState(NamedTuple):
    """Weights ``b n`` over the memory points."""

    weights: Tensor


class KernelBayesFilter(OverPoints):
    """The filter over n memory points; every operator is a buffer.

    With features and the importance-weighted rule nothing in `predict` and `update` waits for a
    GPU.

    1. predict: w <- P w.
    2. update: gamma = A w, r = max(0, gamma) (clipped unless the rule takes signed ratios), then w
    = rule(r, observation).

    Weights may be negative and need not sum to 1; with ``normalise`` they are scaled to sum 1 (and
    ratios to mean 1). An observation so far from those of the memory, or from what was predicted,
    that the posterior's weights cancel or vanish (`kbf.rkhs.weights.LEAST_SHARE`) is passed over by
    the loop: the prediction is kept.

    References: Xu et al. (2022), Algorithm 2 (here the loop moves first: z_0 from the prior, move,
    observe).
    """

    states: Tensor
    prior: Tensor
    transition: nn.Module
    ratio: nn.Module | None
    rule: nn.Module
    normalise: bool
    clip: bool
    backward: RuleBackward | None
    controlled: int
    allow_missing_sensors: bool

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
    ) -> None:
        """The filter of given operators.

        Args:
            states: memory points ``n d``.
            transition: P, weights ``b n`` -> ``b n``; or P(u), (weights, control ``b k``) -> ``b
                n``, with ``controlled`` = k.
            ratio: A, weights ``b n`` -> gamma ``b n``; None for n I.
            rule: (ratio ``b n``, observation ``b *x``) -> weights ``b n``; one of
                `kbf.filters.kernel.update.rule`.
            prior: weights to start from ``n``; None for 1/n, the embedding of the training states.
            normalise: scale the weights to sum 1, the ratios to mean 1.
            clip: cut negative ratios; the original rule takes them as they are.
            backward: the rule backwards, for a smoother; a filter without a ratio needs none: its P
                is a density.
        """
        super().__init__()
        self.n: int = len(states)
        self.register_buffer("states", states)
        self.register_buffer(
            "prior", states.new_full((len(states),), 1 / self.n) if prior is None else prior
        )
        self.transition, self.ratio, self.rule = transition, ratio, rule
        self.normalise, self.clip, self.backward = normalise, clip, backward
        self.moved_ratio: Operator | None = None if normalise else compose(ratio, transition)
        self.scale_free: bool = (
            normalise and clip and ratio is None and isinstance(transition, Operator)
        )
        self.controlled = transition.controlled if isinstance(transition, Controlled) else 0
        self.allow_missing_sensors = (
            rule.allow_missing_sensors if isinstance(rule, WithSensors) else False
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelBayesFilter:
        """A copy with its own numbers; gradients end there, as PyTorch copies no tensor that has been computed with gradients."""
        memo |= {id(tensor): tensor.detach().clone() for tensor in computed(vars(self), set())}
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied

    def init(self, batch: int, *, generator: Generator | None = None) -> KernelState:
        """The state before the first move: the prior's weights for each sequence of the batch."""
        return KernelState(self.prior.expand(batch, -1))

    def predict(
        self,
        state: KernelState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> KernelState:
        """Move: w <- P w, or P(u) w with a control u."""
        moved = (
            self.transition(state.weights)
            if control is None
            else self.transition(state.weights, control)
        )
        return KernelState(self.scaled(moved, 1))

    def update(self, state: KernelState, obs: Tensor) -> KernelState:
        """Observe ``b *x``: w <- rule(max(0, A w), x)."""
        return self.observe(state, obs)[0]

    def observe(self, state: KernelState, obs: Tensor) -> tuple[KernelState, Float[Tensor, " b"]]:
        """Observe, and the evidence: positive and finite where the sum of the weights is, and they neither cancel nor vanish."""
        gamma = self.n * state.weights if self.ratio is None else self.ratio(state.weights)
        return self.weighed(gamma, obs, state.weights)

    def weighed(
        self, gamma: Float[Tensor, "b n"], obs: Tensor, before: Float[Tensor, "b n"]
    ) -> tuple[KernelState, Float[Tensor, " b"]]:
        """The rule over r = max(0, gamma), of mean 1 if this filter normalises, and the evidence; ``before``: to fall back to."""
        ratio = gamma.clamp_min(0) if self.clip else gamma
        if self.normalise and self.clip:
            ratio = with_sum(ratio, self.reduce(ratio.sum(-1, keepdim=True)), self.n)
        weights = self.rule(ratio, obs)
        if not self.normalise:
            return KernelState(weights), self.evidence(weights, before)
        cancel, sums = divisor(self.reduce(mass(weights)))
        return KernelState(
            torch.where(cancel, before, weights * sums.reciprocal())
        ), sums.masked_fill(cancel, 0)[:, 0]

    def evidence(
        self, weights: Float[Tensor, "b n"], before: Float[Tensor, "b n"]
    ) -> Float[Tensor, " b"]:
        """By how much the sum of weights that are not normalised is above `LEAST_SHARE` of what it was."""
        return self.reduce(torch.sub(weights, before, alpha=LEAST_SHARE).sum(-1))

    def move_and_observe(
        self, state: KernelState, obs: Tensor
    ) -> tuple[KernelState, Float[Tensor, " b"]] | None:
        """Predict and observe, where nothing needs the predicted weights: they are left out, and A P is one operator. Else None.

        Where ratios are the weights that P moves, and scaled anyway, these are not scaled to the
        sum 1 before. A compiled step has the predicted weights at hand for observations that are
        passed over.
        """
        if self.scale_free and not torch.compiler.is_compiling():
            moved = self.transition(state.weights)
            return self.weighed(moved, obs, moved)
        if self.moved_ratio is None:
            return None
        return self.weighed(self.moved_ratio(state.weights), obs, state.weights)

    def step(self, state: KernelState, obs: Tensor) -> KernelState:
        """Predict and update in one."""
        fused = self.move_and_observe(state, obs)
        return self.update(self.predict(state), obs) if fused is None else fused[0]

    def smoother(self) -> Backward:
        """Back in time (`kbf.filters.kernel.smoother`): by Bayes' rule where P is a density, else by the kernel Bayes' rule.

        Smoothed weights have sum 1, whether the filter's are normalised or not; where they have no
        positive sum, the filter's stay.

        Raises:
            ValueError: a memory that processes share, or P is no density and the filter was made
                without the rule backwards.
        """
        if self.reduce is not no_reduce:
            raise ValueError("a filter whose memory is spread over processes has no smoother")
        if self.backward is not None:
            known = [
                op.right
                for op in (self.transition, self.ratio)
                if isinstance(op, Operator) and op.right is not None
            ]
            return step_back_by_rule(self.backward, self.states, known[0] if known else None)
        if self.ratio is not None:
            raise ValueError(
                "this filter has no smoother: it was made without the pairs of the recording (backward=RuleBackward)"
            )
        return step_back_by_density(self.transition)

    def scaled(
        self, weights: Float[Tensor, "b n"], to: int, otherwise: Tensor | None = None
    ) -> Float[Tensor, "b n"]:
        """Weights with the given sum if this filter normalises; where they cannot have it, ``otherwise`` or as they are."""
        if not self.normalise:
            return weights
        return normalised(
            weights, self.reduce(mass(weights)), weights if otherwise is None else otherwise, to
        )

    def estimate(self, state: KernelState) -> Float[Tensor, "b d"]:
        """The mean of the embedding, sum_i w_i z_i ``b d``."""
        return self.reduce(state.weights @ self.states)

    def weighted_sample(
        self, state: KernelState
    ) -> tuple[Float[Tensor, "b n d"], Float[Tensor, "b n"]] | None:
        """The memory's points and the positive part of the weights, of sum 1; None where processes share the memory."""
        if self.reduce is not no_reduce:
            return None
        return self.states.expand(len(state.weights), -1, -1), self.positive_part(state)

    def positive_part(self, state: KernelState) -> Float[Tensor, "b n"]:
        """The weights without the negative ones, of sum 1 (0 where none is positive)."""
        v = state.weights.clamp_min(0)
        return v / self.reduce(v.sum(-1, keepdim=True)).clamp_min(torch.finfo(v.dtype).tiny)

    def diagnostics(self, state: KernelState) -> dict[str, Tensor]:
        """Effective sample size, sum and negative mass of the weights, and the share of them that are 0, each ``b``.

        After an update those are the memory points whose ratio was clipped (or passed over by
        `PrimalUpdate`'s ``local``).
        """
        w = state.weights
        parts = w.sum(-1), w.square().sum(-1), w.clamp_max(0).sum(-1), (w == 0).to(w).sum(-1)
        total, squares, negative, zeros = map(self.reduce, parts)
        return {
            "ess": total.square() / squares,
            "weight_sum": total,
            "negative_mass": negative,
            "clipped": zeros / self.n,
        }

    def covariance(self, state: KernelState) -> Float[Tensor, "b d d"]:
        """Of the weights' positive part v (of sum 1), ``b d d``: sum_i v_i (z_i - m)(z_i - m)^T around its own mean m.

        With signed weights the same sum need not be a covariance: where they cancel it says that
        the state is known when it is not.
        """
        v = self.positive_part(state)
        centred = self.states - self.reduce(v @ self.states)[:, None]
        return self.reduce((v[..., None] * centred).mT @ centred)


def computed(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """All tensors within an object that were computed with gradients."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        if thing.grad_fn is not None:
            yield thing
        return
    inside: Iterable[Any] = ()
    if isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, (list, tuple)):
        inside = thing
    elif isinstance(thing, partial):
        inside = (thing.args, thing.keywords)
    elif isinstance(thing, nn.Module) or type(thing).__module__.startswith("kbf."):
        inside = vars(thing).values() if hasattr(thing, "__dict__") else ()
    for each in inside:
        yield from computed(each, seen)
