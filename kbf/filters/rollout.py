"""The one loop that every method of the project runs through: move, observe, estimate.

An observation that the prediction has no probability for is passed over: the prediction is kept, as
if nothing had been seen. Bayes' rule divides by the probability of the observation, and where no
floating-point number is as small there is no posterior: all weights are 0, or the state becomes
NaN, or the likelihood underflows. So no observation, however wild, destroys a filter that runs on.
What is impossible is said by the filter (`kbf.filters.protocols.HasLikelihood`); without that, an
estimate that is not finite.

Where `MAX_CONSECUTIVE_REJECTIONS` observations in a row were passed over, and the next one is
impossible as well, but possible from the filter's own start, it is the belief that is wrong: the
track begins anew, with this observation. One that is impossible there, too, is unlike anything
known, and passed over. So it is in `rollout`, in running filters (`kbf.filters.online`) and in
exported programs alike.

What a filter is, is said in `kbf.filters.protocols`; its names can be imported from here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from kbf.filters.parallel_rollout import Inputs, Rollout, at_once, joined
from kbf.filters.protocols import (
    Filter,
    Fused,
    HasLikelihood,
    S,
    UpdateHook,
    allows_missing_sensors,
    check_controlled,
    diagnostics_of,
    move,
    offers,
)
from kbf.filters.wrapper import innermost
from kbf.recording import Array, check_finite, tensor_of

MAX_CONSECUTIVE_REJECTIONS = 3
"""Observations passed over in a row after which a track begins anew."""


def rollout(
    filter: Filter[Any],
    obs: Shaped[Array, "b T *x"],
    *,
    mask: Bool[Array, "b T"] | None = None,
    controls: Float[Array, "b T k"] | None = None,
    state: Any = None,
    generator: Generator | None = None,
    progress: Callable[[int], None] | None = None,
    states: list[Any] | None = None,
    before: UpdateHook | None = None,
) -> Rollout:
    """Run a filter over sequences of observations: move, observe, estimate, T times.

    Where ``mask`` is False nothing was observed, and the predicted state is kept. Predicting h
    steps ahead is h masked steps. Where an observation is impossible given the prediction it is
    kept, too: the diagnostic ``rejected`` is 1 there, else 0. After `MAX_CONSECUTIVE_REJECTIONS` of
    these in a row the track begins anew with the next one that is possible given the filter's start
    alone.

    Args:
        filter: anything with ``init, predict, update, estimate``; its `diagnostics_of` each step
            are collected.
        obs: ``b T *x``, tensors or NumPy arrays.
        mask: ``b T`` or None for all observed.
        controls: ``b T k``, that of the move to each step; None for a filter that takes none.
        state: go on from here instead of from ``filter.init``.
        generator: randomness of the filters that need any.
        progress: called with t after each step.
        states: a list that takes in the state after each step.
        before: called before each update.

    Raises:
        ValueError: a wrong shape, NaN or infinite values among the observations that are not
            masked, or controls for a filter that takes none, or none for one that needs them.
    """
    obs, mask, controls = (
        tensor_of(obs, "obs"),
        tensor_of(mask, "mask"),
        tensor_of(controls, "controls"),
    )
    if obs.ndim < 3:
        raise ValueError(
            f"observations must be (batch, time, ...), got {tuple(obs.shape)}; a single sequence is obs[None]"
        )
    batch, steps = obs.shape[:2]
    if steps == 0:
        raise ValueError("there are no observations to filter: time has length 0")
    check_controlled(filter, controls, (batch, steps))
    checked = not allows_missing_sensors(filter)
    if mask is None and checked:
        check_finite(obs.flatten(0, 1), "observations")
    elif mask is not None:
        if mask.shape != (batch, steps):
            raise ValueError(f"mask must be {(batch, steps)}, got {tuple(mask.shape)}")
        if checked:
            check_finite(obs[mask], "observations")
        obs = torch.where(
            mask.reshape(batch, steps, *[1] * (obs.ndim - 2)), obs, torch.zeros_like(obs)
        )
    if state is None:
        state = filter.init(batch, generator=generator)
    inputs = Inputs(obs, mask, controls).each(lambda x: x.to(state[0].device))
    walk = partial(rollout_sequential, filter, generator=generator, before=before, states=states)
    if before is not None or states is not None or torch.compiler.is_compiling():
        return walk(state, inputs, progress=progress)
    parts = [walk(state, inputs.during(0, 1))]
    if steps > 1 and not any(
        leaf.requires_grad for leaf in parts[0].state
    ):  # those ways keep no gradients
        with torch.no_grad():
            fast = at_once(filter, walk, state, inputs)
        if fast is not None and not bool(
            (misses_at(filter, fast, inputs) >= MAX_CONSECUTIVE_REJECTIONS).any()
        ):  # else a track begins anew
            parts = [fast]
    done = sum(part.estimates.shape[1] for part in parts)
    if progress is not None:
        for t in range(done):
            progress(t)
    if done < steps:
        misses = misses_at(filter, parts[-1], inputs)[:, -1]
        parts.append(
            walk(parts[-1].state, inputs.during(done), progress=progress, first=done, misses=misses)
        )
    return joined(parts)


def rollout_sequential(
    filter: Filter[Any],
    state: Any,
    inputs: Inputs,
    *,
    generator: Generator | None = None,
    before: UpdateHook | None = None,
    states: list[Any] | None = None,
    progress: Callable[[int], None] | None = None,
    first: int = 0,
    misses: Int[Tensor, " b"] | None = None,
) -> Rollout:
    """The loop itself, one step after the other. Arguments as of `rollout`.

    ``first``: the number of the first step. ``misses``: observations that were passed over in a row
    before it (`update_rejection_count`).
    """
    batch, steps = inputs.obs.shape[:2]
    fresh = FreshStart(filter, generator)
    estimates: list[Tensor] = []
    diagnostics: list[dict[str, Tensor]] = []
    for t in range(steps):
        now, control = (
            None if each is None else each[:, t] for each in (inputs.mask, inputs.controls)
        )
        x, given = (
            inputs.obs[:, t],
            {"mask": now, "control": control, "generator": generator, "before": before},
        )
        state, passed = advance(filter, state, x, **given, misses=misses, fresh=fresh)
        misses = update_rejection_count(filter, misses, passed, x, now)
        estimates.append(filter.estimate(state))
        if states is not None:
            states.append(state)
        rejected = estimates[-1].new_zeros(batch) if passed is None else passed.to(estimates[-1])
        diagnostics.append(diagnostics_of(filter, state) | {"rejected": rejected})
        if progress is not None:
            progress(first + t)
    stacked = {k: torch.stack([d[k] for d in diagnostics], 1) for k in diagnostics[0]}
    return Rollout(torch.stack(estimates, 1), state, stacked)


def step(
    filter: Filter[Any],
    state: Any,
    obs: Shaped[Array, "b *x"],
    *,
    mask: Bool[Array, " b"] | None = None,
    control: Float[Array, "b k"] | None = None,
    generator: Generator | None = None,
    before: UpdateHook | None = None,
) -> Any:
    """One step of a running filter: predict (``control``: ``b k``), then update with ``obs`` (``b *x``) where ``mask`` is True.

    Where the observation is impossible, NaN for one, the predicted state is kept.
    """
    obs, mask, control = (
        tensor_of(obs, "obs"),
        tensor_of(mask, "mask"),
        tensor_of(control, "control"),
    )
    return advance(
        filter, state, obs, mask=mask, control=control, generator=generator, before=before
    )[0]


def advance(
    filter: Filter[Any],
    state: Any,
    obs: Shaped[Tensor, "b *x"],
    *,
    mask: Bool[Tensor, " b"] | None = None,
    control: Float[Tensor, "b k"] | None = None,
    generator: Generator | None = None,
    before: UpdateHook | None = None,
    misses: Int[Tensor, " b"] | None = None,
    fresh: FreshStart | None = None,
) -> tuple[Any, Bool[Tensor, " b"] | None]:
    """`step`, and ``b``, which observations were passed over, or None for none of them.

    ``misses``: how many were so in a row before (`update_rejection_count`), and ``fresh``: what a
    track begins anew with (`reinitialize_lost`).
    """
    state, passed = advanced(filter, state, obs, mask, control, generator, before)
    if misses is None or passed is None or fresh is None:
        return state, passed
    return reinitialize_lost(filter, state, passed, obs, misses, fresh, mask=mask, control=control)


def advanced(
    filter: Filter[Any],
    state: Any,
    obs: Shaped[Tensor, "b *x"],
    mask: Bool[Tensor, " b"] | None,
    control: Float[Tensor, "b k"] | None,
    generator: Generator | None,
    before: UpdateHook | None,
) -> tuple[Any, Bool[Tensor, " b"] | None]:
    """`advance` of a track that never begins anew."""
    if before is None and mask is None and control is None:
        inner, x = innermost(filter, obs)
        fused = (
            cast(Fused, inner).move_and_observe(state, x) if offers(type(inner), Fused) else None
        )
        if fused is not None:
            updated, evidence = fused
            if all_possible(evidence):
                return updated, None
            return select_updated(inner, x, updated, evidence, inner.predict(state))
    predicted = move(filter, state, control=control, generator=generator)
    if before is not None:
        before(predicted, obs, mask)
    return observe(filter, predicted, obs, mask)


class FreshStart:
    """The prediction from a filter's own start, what a lost track begins anew with; without controls it is made once."""

    def __init__(self, filter: Filter[Any], generator: Generator | None = None) -> None:
        """``generator``: randomness of the filters that need any."""
        self.filter, self.generator = filter, generator
        self.made: Any = None

    def __call__(self, batch: int, control: Float[Tensor, "b k"] | None = None) -> Any:
        """The prediction."""
        if self.made is not None:
            return self.made
        start = self.filter.init(batch, generator=self.generator)
        fresh = move(self.filter, start, control=control, generator=self.generator)
        self.made = fresh if control is None else None
        return fresh


def reinitialize_lost(
    filter: Filter[S],
    state: S,
    passed: Bool[Tensor, " b"],
    obs: Shaped[Tensor, "b *x"],
    misses: Int[Tensor, " b"],
    fresh: FreshStart,
    *,
    mask: Bool[Tensor, " b"] | None = None,
    control: Float[Tensor, "b k"] | None = None,
) -> tuple[S, Bool[Tensor, " b"]]:
    """The states after a step, but ``fresh`` with the observation taken in where the track is lost and that is possible.

    Args:
        filter: whose state it is.
        state: after the step. passed: whether its observation was passed over.
        obs: ``b *x``. misses: how many were passed over in a row before.
        fresh: of this filter. mask, control: of the step.

    Returns:
        The states, and which observations were passed over in the end.
    """
    lost = passed & (misses >= MAX_CONSECUTIVE_REJECTIONS)
    if not torch.compiler.is_compiling() and not bool(lost.any()):
        return state, passed
    begun, impossible = observe(filter, fresh(len(misses), control), obs, mask)
    found = lost if impossible is None else lost & ~impossible
    return where(found, begun, state), passed & ~found


def update_rejection_count(
    filter: Filter[Any],
    misses: Int[Tensor, " b"] | None,
    passed: Bool[Tensor, " b"] | None,
    obs: Shaped[Tensor, "b *x"],
    mask: Bool[Tensor, " b"] | None = None,
) -> Int[Tensor, " b"] | None:
    """How many observations were passed over in a row, ``b``, from how many it were before; None for none of any sequence.

    A step without an observation counts neither way. Arguments as of `advance` and as it returns
    them.
    """
    if misses is None and (
        passed is None or (not torch.compiler.is_compiling() and not bool(passed.any()))
    ):
        return None
    if passed is None and not allows_missing_sensors(filter):  # each was observed
        return None
    there = is_observed(filter, obs) if mask is None else is_observed(filter, obs) & mask
    passed = torch.zeros_like(there) if passed is None else passed
    before = torch.zeros_like(passed, dtype=torch.long) if misses is None else misses
    return torch.where(there, (before + 1) * passed, before)


def is_observed(filter: Filter[Any], obs: Shaped[Tensor, "b *x"]) -> Bool[Tensor, " b"]:
    """Whether there is an observation: one with NaN is none, but where sensors may be silent one that is all NaN."""
    missing = obs.isnan().flatten(1)
    return ~(missing.all(1) if allows_missing_sensors(filter) else missing.any(1))


def misses_at(filter: Filter[Any], run: Rollout, inputs: Inputs) -> Int[Tensor, "b T"]:
    """`update_rejection_count` at each step of a run, of the first of the inputs."""
    passed = run.diagnostics["rejected"] > 0
    if not bool(passed.any()):
        return passed.long()
    obs, steps = (
        inputs.obs[:, : passed.shape[1]],
        torch.arange(passed.shape[1], device=passed.device),
    )
    there = is_observed(filter, obs.flatten(0, 1)).unflatten(0, passed.shape)
    there = there if inputs.mask is None else there & inputs.mask[:, : passed.shape[1]]
    before = (
        torch.where(there & ~passed, steps, -1).cummax(1).values
    )  # the last step that was not passed over
    total = passed.long().cumsum(1)
    return total - torch.where(before >= 0, total.gather(1, before.clamp_min(0)), 0)


def observe(
    filter: Filter[S],
    predicted: S,
    obs: Shaped[Tensor, "b *x"],
    mask: Bool[Tensor, " b"] | None = None,
) -> tuple[S, Bool[Tensor, " b"] | None]:
    """Take an observation into a predicted state, where there is one (``mask``) that is possible.

    Returns:
        The updated state, or the predicted one where nothing was taken in; and ``b``, which
        observations were passed over, or None for none of them.
    """
    inner, x = innermost(filter, obs)
    if offers(type(inner), HasLikelihood):
        updated, evidence = cast(HasLikelihood, inner).observe(predicted, x)
    else:
        updated = inner.update(predicted, x)
        evidence = 1 + inner.estimate(updated).abs().amax(-1)
    if mask is None and all_possible(evidence):
        return updated, None
    return select_updated(inner, x, updated, evidence, predicted, mask)


def select_updated(
    filter: Filter[Any],
    obs: Tensor,
    updated: S,
    evidence: Tensor,
    predicted: S,
    mask: Tensor | None = None,
) -> tuple[S, Bool[Tensor, " b"]]:
    """The updated state where an observation was taken in, the predicted one elsewhere; and which observations were passed over."""
    taken = (evidence > 0) & (evidence < torch.inf)
    passed = ~taken
    if allows_missing_sensors(filter):  # where all of them are silent nothing was observed
        passed = passed & obs.isfinite().flatten(1).any(1)
    if mask is not None:
        passed, taken = passed & mask, taken & mask
    return where(taken, updated, predicted), passed


def all_possible(evidence: Shaped[Tensor, " b"]) -> bool:
    """Whether all is possible, if it costs nothing to look: in a CPU's memory, and not while a step is compiled or exported."""
    if torch.compiler.is_compiling() or not evidence.is_cpu:
        return False
    if evidence.dtype == torch.bool:
        return bool(evidence.all())
    if len(evidence) > 64:
        return bool(((evidence > 0) & (evidence < math.inf)).all())
    return all(0 < e < math.inf for e in evidence.tolist())  # faster for few


def where(mask: Bool[Tensor, " b"], a: S, b: S) -> S:
    """State by state of the batch: ``a`` where the mask is True, ``b`` elsewhere."""
    pick = [
        torch.where(mask.reshape(-1, *[1] * (u.ndim - 1)), u, v) for u, v in zip(a, b, strict=True)
    ]
    return cast(S, type(a)(*pick))
