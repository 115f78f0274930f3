"""The filter protocol, and the one loop that every method of the project runs through.

A filter carries a *state*: a NamedTuple of tensors, each with the batch ``b`` in front (the state law). That law alone
gives every filter missing data, ragged batches, truncated back-propagation, moves between devices, and a running filter
that can be saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor

from kbf.files import replacing
from kbf.sequence import Sequence, check_finite

CONTROLLED = "kbf, kbf_tuned, kbf_paper, particle_learned, kalman and lstm"
"""Models whose filters take controls, in errors."""

VECTORS = "images must be encoded first: give the data a coding with an encoder, as in configs/data/dsprites.yaml"
"""What to do about observations that are images, in errors of filters of vectors."""

SMOOTHED = "kbf, kbf_tuned, kbf_paper, kbf_features, kalman, ekf, ukf, particle, particle_learned and particle_observation"
"""Models whose filters have a smoother, in errors."""

S = TypeVar("S", bound="tuple[Any, ...]")  # a NamedTuple; beartype refuses NamedTuple itself as a hint

Backward = Callable[..., Any]
"""One step back in time, (`Now` at t, smoothed state at t + 1, *, control=None, generator=None) -> smoothed state at t. The
control ``b k`` is that of the move from t to t + 1."""


Before = Callable[[Any, Tensor, Tensor | None], None]
"""What looks at a step before the update: (predicted state, x_t, mask ``b`` or None)."""


class Now(NamedTuple):
    """What a filter knew at step t: its state, the state predicted before, and how to take x_t (if any) into such a state."""

    state: Any
    predicted: Any
    observe: Callable[[Any], Any]


@runtime_checkable
class Filter(Protocol[S]):
    """Predict and update; every method is pure and returns a new state.

    A filter may have three more: ``diagnostics(state)``, a dict of numbers ``b`` by name; ``covariance(state)``, that of its
    estimate, ``b d d``; and ``step(state, obs)``, predict and update in one where that is faster.

    A filter with an attribute ``controlled`` that is not 0 needs a control of so many components in each move:
    ``predict(state, *, control, generator=None)``, ``b k``. One with an attribute ``partial`` that is true takes observations with
    NaN, where a sensor is silent.

    A filter with a method ``smoother() -> Backward`` can be smoothed (`kbf.smoothing`).
    """

    def init(self, batch: int, *, generator: Generator | None = None) -> S:
        """The state before anything was seen, for ``batch`` sequences: the distribution of the training states."""
        ...

    def predict(self, state: S, *, generator: Generator | None = None) -> S:
        """Move one step in time."""
        ...

    def update(self, state: S, obs: Tensor) -> S:
        """Take in one observation of each sequence, ``b *x``."""
        ...

    def estimate(self, state: S) -> Tensor:
        """The mean of the latent state, ``b d``."""
        ...


@runtime_checkable
class FilterModel(Protocol):
    """The recipe of a filter. Kernel filters build their operators from the memory; a recurrent net returns itself."""

    def condition(self, memory: Sequence | list[Sequence] | None) -> Filter[Any]:
        """A filter over the points of ``memory``."""
        ...


class Rollout(NamedTuple):
    """What the loop returns: estimates ``b T d``, the last state, and diagnostics by name, each ``b T``."""

    estimates: Tensor
    state: Any
    diagnostics: dict[str, Tensor]


def rollout(
    filter: Filter[Any],
    obs: Shaped[Tensor, "b T *x"],
    *,
    mask: Bool[Tensor, "b T"] | None = None,
    controls: Float[Tensor, "b T k"] | None = None,
    state: Any = None,
    generator: Generator | None = None,
    progress: Callable[[int], None] | None = None,
    states: list[Any] | None = None,
    before: Before | None = None,
) -> Rollout:
    """Run a filter over sequences of observations: move, observe, estimate, T times.

    Where ``mask`` is False nothing was observed, and the predicted state is kept. Predicting h steps ahead is h masked steps.

    Args:
        filter: anything with ``init, predict, update, estimate``; if it has ``diagnostics(state)`` too, they are collected.
        obs: ``b T *x``.
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
    if obs.ndim < 3:
        raise ValueError(f"observations must be (batch, time, ...), got {tuple(obs.shape)}; a single sequence is obs[None]")
    batch, steps = obs.shape[:2]
    if steps == 0:
        raise ValueError("there are no observations to filter: time has length 0")
    check_controlled(filter, controls, (batch, steps))
    partial = getattr(filter, "partial", False)
    if mask is None and not partial:
        check_finite(obs.flatten(0, 1), "observations")
    elif mask is not None:
        if mask.shape != (batch, steps):
            raise ValueError(f"mask must be {(batch, steps)}, got {tuple(mask.shape)}")
        if not partial:
            check_finite(obs[mask], "observations")
        obs = torch.where(mask.reshape(batch, steps, *[1] * (obs.ndim - 2)), obs, torch.zeros_like(obs))
    if state is None:
        state = filter.init(batch, generator=generator)
    diagnose = getattr(filter, "diagnostics", None)
    estimates: list[Tensor] = []
    diagnostics: list[dict[str, Tensor]] = []
    for t in range(steps):
        now, control = (None if each is None else each[:, t] for each in (mask, controls))
        state = step(filter, state, obs[:, t], mask=now, control=control, generator=generator, before=before)
        estimates.append(filter.estimate(state))
        if states is not None:
            states.append(state)
        if diagnose is not None:
            diagnostics.append(diagnose(state))
        if progress is not None:
            progress(t)
    stacked = {k: torch.stack([d[k] for d in diagnostics], 1) for k in (diagnostics[0] if diagnostics else {})}
    return Rollout(torch.stack(estimates, 1), state, stacked)


def step(
    filter: Filter[Any],
    state: Any,
    obs: Shaped[Tensor, "b *x"],
    *,
    mask: Bool[Tensor, " b"] | None = None,
    control: Float[Tensor, "b k"] | None = None,
    generator: Generator | None = None,
    before: Before | None = None,
) -> Any:
    """One step of a running filter: predict (``control``: ``b k``), then update with ``obs`` (``b *x``) where ``mask`` is True.

    Nothing is checked here, for speed: mask a NaN observation and put a number in its place, or the state becomes NaN.
    """
    if before is None and mask is None and control is None and hasattr(filter, "step"):
        return cast(Any, filter).step(state, obs)
    predicted = move(filter, state, control=control, generator=generator)
    if before is not None:
        before(predicted, obs, mask)
    updated = filter.update(predicted, obs)
    return updated if mask is None else where(mask, updated, predicted)


def move(filter: Filter[S], state: S, *, control: Float[Tensor, "b k"] | None = None, generator: Generator | None = None) -> S:
    """Predict, with a control ``b k`` for a filter that takes one."""
    if control is None:
        return filter.predict(state, generator=generator)
    return cast(Any, filter).predict(state, control=control, generator=generator)


def smoother_of(filter: Filter[Any]) -> Backward:
    """The filter's way back in time.

    Raises:
        ValueError: a filter that has none: its state is no distribution, or its model does not know the density of a move.
    """
    make = getattr(filter, "smoother", None)
    if make is None:
        raise ValueError(f"{type(filter).__name__} has no smoother. Models that have one: {SMOOTHED}")
    return make()


def check_controlled(filter: Filter[Any], controls: Tensor | None, lead: tuple[int, ...]) -> None:
    """Raise a ValueError unless there are controls ``*lead k``, all finite, for a filter that takes k of them, and only then."""
    takes = int(getattr(filter, "controlled", 0))
    if controls is None:
        if takes:
            raise ValueError(f"this filter was made from recordings with controls: give it the {takes} of each step")
        return
    if not takes:
        raise ValueError(
            f"{type(filter).__name__} takes no controls. Models that do, where their recordings have controls: {CONTROLLED}"
        )
    if controls.shape != (*lead, takes):
        raise ValueError(f"controls must be {(*lead, takes)}, got {tuple(controls.shape)}")
    check_finite(controls.flatten(0, -2), "controls")


def where(mask: Bool[Tensor, " b"], a: S, b: S) -> S:
    """State by state of the batch: ``a`` where the mask is True, ``b`` elsewhere."""
    pick = [torch.where(mask.reshape(-1, *[1] * (u.ndim - 1)), u, v) for u, v in zip(a, b, strict=True)]
    return cast(S, type(a)(*pick))


def check_vectors(sequences: list[Sequence], name: str) -> None:
    """Raise a ValueError if observations are no vectors; ``name`` says what needs them."""
    if sequences[0].obs.ndim != 2:
        raise ValueError(f"{name} needs observations that are vectors, got {tuple(sequences[0].obs.shape[1:])}; {VECTORS}")


def save_state(state: Any, path: str | os.PathLike[str], **others: Tensor) -> None:
    """Write the state of a running filter, and ``others`` beside it; a kill in the middle leaves the old file or none."""
    with replacing(path) as temporary:
        torch.save({**state._asdict(), **others}, temporary)


def read_leaves(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """What `save_state` wrote, by name.

    Raises:
        ValueError: the file is damaged, or holds something else.
    """
    try:
        leaves = torch.load(path, weights_only=True, map_location=device)
    except OSError:
        raise
    except Exception as error:  # whatever a file that is none of ours makes of the reader
        raise ValueError(f"{path} is damaged, or not the state of a filter: {type(error).__name__}") from error
    named = isinstance(leaves, dict) and all(isinstance(n, str) and isinstance(leaf, Tensor) for n, leaf in leaves.items())
    if not named:
        raise ValueError(f"{path} is not the state of a filter: it holds {type(leaves).__name__}")
    return leaves


def load_state(filter: Filter[S], path: str | os.PathLike[str]) -> S:
    """Read a state written by `save_state` back for ``filter``.

    Raises:
        ValueError: the file is damaged, or holds the state of another kind of filter.
    """
    like: Any = filter.init(1)
    leaves = read_leaves(path, like[0].device)
    if not set(like._fields) <= set(leaves):
        raise ValueError(f"{path} holds a state of {sorted(map(str, leaves))}, this filter's has {sorted(like._fields)}")
    for name, leaf in zip(like._fields, like, strict=True):
        if leaves[name].shape[1:] != leaf.shape[1:]:
            raise ValueError(f"{path}: {name} is {tuple(leaves[name].shape[1:])} wide, this filter needs {tuple(leaf.shape[1:])}")
        if leaves[name].dtype != leaf.dtype:
            raise ValueError(f"{path}: {name} is {leaves[name].dtype}, this filter works in {leaf.dtype}")
    return cast(S, type(like)(*(leaves[name] for name in like._fields)))
