"""The one loop that every method of the project runs through: move, observe, estimate.

An observation that the prediction has no probability for is passed over: the prediction is kept, as if nothing had been seen.
Bayes' rule divides by the probability of the observation, and where no floating-point number is as small there is no posterior:
all weights are 0, or the state becomes NaN, or the likelihood underflows. So no observation, however wild, destroys a filter that
runs on. What is impossible is said by the filter (`kbf.filters.protocols.Judging`); without that, an estimate that is not finite.

What a filter is, is said in `kbf.filters.protocols`; its names can be imported from here as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor

from kbf.filters.at_once import Inputs, Rollout, at_once, joined
from kbf.filters.catalogue import WITH_CONTROLS
from kbf.filters.protocols import (
    Backward,
    Filter,
    FilterModel,
    FilterStep,
    Fused,
    Judging,
    S,
    UpdateHook,
    control_components,
    covariance_of,
    diagnostics_of,
    knows_sensors,
    move,
    offers,
    smoother_of,
)
from kbf.filters.wrapper import innermost
from kbf.sequence import Array, Sequence, check_finite, tensor_of

__all__ = [
    "ENCODE_IMAGES",
    "Backward",
    "Filter",
    "FilterModel",
    "FilterStep",
    "Rollout",
    "S",
    "UpdateHook",
    "advance",
    "check_controlled",
    "check_vectors",
    "control_components",
    "covariance_of",
    "diagnostics_of",
    "knows_sensors",
    "move",
    "observe",
    "rollout",
    "smoother_of",
    "step",
    "where",
]

ENCODE_IMAGES = "images must be encoded first: give the data a coding with an encoder, as in configs/data/dsprites.yaml"
"""What to do about observations that are images, in errors of filters of vectors."""


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

    Where ``mask`` is False nothing was observed, and the predicted state is kept. Predicting h steps ahead is h masked steps.
    Where an observation is impossible given the prediction it is kept, too: the diagnostic ``passed_over`` is 1 there, else 0.

    Args:
        filter: anything with ``init, predict, update, estimate``; its `diagnostics_of` each step are collected.
        obs: ``b T *x``, tensors or NumPy arrays.
        mask: ``b T`` or None for all observed.
        controls: ``b T k``, that of the move to each step; None for a filter that takes none.
        state: go on from here instead of from ``filter.init``.
        generator: randomness of the filters that need any.
        progress: called with t after each step.
        states: a list that takes in the state after each step.
        before: called before each update.

    Raises:
        ValueError: a wrong shape, NaN or infinite values among the observations that are not masked, or controls for a filter that
            takes none, or none for one that needs them.
    """
    obs, mask, controls = tensor_of(obs, "obs"), tensor_of(mask, "mask"), tensor_of(controls, "controls")
    if obs.ndim < 3:
        raise ValueError(f"observations must be (batch, time, ...), got {tuple(obs.shape)}; a single sequence is obs[None]")
    batch, steps = obs.shape[:2]
    if steps == 0:
        raise ValueError("there are no observations to filter: time has length 0")
    check_controlled(filter, controls, (batch, steps))
    checked = not knows_sensors(filter)
    if mask is None and checked:
        check_finite(obs.flatten(0, 1), "observations")
    elif mask is not None:
        if mask.shape != (batch, steps):
            raise ValueError(f"mask must be {(batch, steps)}, got {tuple(mask.shape)}")
        if checked:
            check_finite(obs[mask], "observations")
        obs = torch.where(mask.reshape(batch, steps, *[1] * (obs.ndim - 2)), obs, torch.zeros_like(obs))
    if state is None:
        state = filter.init(batch, generator=generator)
    inputs, walk = Inputs(obs, mask, controls), partial(walked, filter, generator=generator, before=before, states=states)
    if before is not None or states is not None or torch.compiler.is_compiling():
        return walk(state, inputs, progress=progress)
    parts = [walk(state, inputs.during(0, 1))]
    if steps > 1 and not any(leaf.requires_grad for leaf in parts[0].state):  # those ways keep no gradients
        with torch.no_grad():
            fast = at_once(filter, walk, state, inputs)
        parts = parts if fast is None else [fast]
    done = sum(part.estimates.shape[1] for part in parts)
    if progress is not None:
        for t in range(done):
            progress(t)
    if done < steps:
        parts.append(walk(parts[-1].state, inputs.during(done), progress=progress, first=done))
    return joined(parts)


def walked(
    filter: Filter[Any],
    state: Any,
    inputs: Inputs,
    *,
    generator: Generator | None = None,
    before: UpdateHook | None = None,
    states: list[Any] | None = None,
    progress: Callable[[int], None] | None = None,
    first: int = 0,
) -> Rollout:
    """The loop itself, one step after the other. Arguments as of `rollout`; ``first``: the number of the first step."""
    batch, steps = inputs.obs.shape[:2]
    estimates: list[Tensor] = []
    diagnostics: list[dict[str, Tensor]] = []
    for t in range(steps):
        now, control = (None if each is None else each[:, t] for each in (inputs.mask, inputs.controls))
        state, passed = advance(filter, state, inputs.obs[:, t], mask=now, control=control, generator=generator, before=before)
        estimates.append(filter.estimate(state))
        if states is not None:
            states.append(state)
        passed_over = estimates[-1].new_zeros(batch) if passed is None else passed.to(estimates[-1])
        diagnostics.append(diagnostics_of(filter, state) | {"passed_over": passed_over})
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
    obs, mask, control = tensor_of(obs, "obs"), tensor_of(mask, "mask"), tensor_of(control, "control")
    return advance(filter, state, obs, mask=mask, control=control, generator=generator, before=before)[0]


def advance(
    filter: Filter[Any],
    state: Any,
    obs: Shaped[Tensor, "b *x"],
    *,
    mask: Bool[Tensor, " b"] | None = None,
    control: Float[Tensor, "b k"] | None = None,
    generator: Generator | None = None,
    before: UpdateHook | None = None,
) -> tuple[Any, Bool[Tensor, " b"] | None]:
    """`step`, and ``b``, which observations were passed over, or None for none of them."""
    if before is None and mask is None and control is None:
        inner, x = innermost(filter, obs)
        fused = cast(Fused, inner).move_and_observe(state, x) if offers(type(inner), Fused) else None
        if fused is not None:
            updated, evidence = fused
            if all_possible(evidence):
                return updated, None
            return settle(inner, x, updated, evidence, inner.predict(state))
    predicted = move(filter, state, control=control, generator=generator)
    if before is not None:
        before(predicted, obs, mask)
    return observe(filter, predicted, obs, mask)


def observe(
    filter: Filter[S], predicted: S, obs: Shaped[Tensor, "b *x"], mask: Bool[Tensor, " b"] | None = None
) -> tuple[S, Bool[Tensor, " b"] | None]:
    """Take an observation into a predicted state, where there is one (``mask``) that is possible.

    Returns:
        The updated state, or the predicted one where nothing was taken in; and ``b``, which observations were passed over, or None
        for none of them.
    """
    inner, x = innermost(filter, obs)
    if offers(type(inner), Judging):
        updated, evidence = cast(Judging, inner).observe(predicted, x)
    else:
        updated = inner.update(predicted, x)
        evidence = 1 + inner.estimate(updated).abs().amax(-1)
    if mask is None and all_possible(evidence):
        return updated, None
    return settle(inner, x, updated, evidence, predicted, mask)


def settle(
    filter: Filter[Any], obs: Tensor, updated: S, evidence: Tensor, predicted: S, mask: Tensor | None = None
) -> tuple[S, Bool[Tensor, " b"]]:
    """The updated state where an observation was taken in, the predicted one elsewhere; and which observations were passed over."""
    taken = (evidence > 0) & (evidence < torch.inf)
    passed = ~taken
    if knows_sensors(filter):  # where all of them are silent nothing was observed
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


def check_controlled(filter: Filter[Any], controls: Tensor | None, lead: tuple[int, ...]) -> None:
    """Raise a ValueError unless there are controls ``*lead k``, all finite, for a filter that takes k of them, and only then."""
    takes = control_components(filter)
    if controls is None:
        if takes:
            raise ValueError(f"this filter was made from recordings with controls: give it the {takes} of each step")
        return
    if not takes:
        raise ValueError(
            f"{type(filter).__name__} takes no controls. Models that do, where their recordings have controls: "
            f"{', '.join(WITH_CONTROLS)}"
        )
    if controls.shape != (*lead, takes):
        raise ValueError(f"controls must be {(*lead, takes)}, got {tuple(controls.shape)}")
    check_finite(controls.flatten(0, -2), "controls", advice="A control is always known: fill them in.")


def where(mask: Bool[Tensor, " b"], a: S, b: S) -> S:
    """State by state of the batch: ``a`` where the mask is True, ``b`` elsewhere."""
    pick = [torch.where(mask.reshape(-1, *[1] * (u.ndim - 1)), u, v) for u, v in zip(a, b, strict=True)]
    return cast(S, type(a)(*pick))


def check_vectors(sequences: list[Sequence], name: str) -> None:
    """Raise a ValueError if observations are no vectors; ``name`` says what needs them."""
    if sequences[0].obs.ndim != 2:
        raise ValueError(f"{name} needs observations that are vectors, got {tuple(sequences[0].obs.shape[1:])}; {ENCODE_IMAGES}")
