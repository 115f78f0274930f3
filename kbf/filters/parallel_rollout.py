"""Parallel-in-time evaluation by associative scans, for filters that support it.

Two ways, both with the results of the loop up to rounding: a filter with a closed-form recursion
computes all its states (`kbf.filters.protocols.ParallelInTime`), and the steps of a filter with a
fading memory (`kbf.filters.protocols.FadingMemory`) are divided into blocks that are filtered as
one batch. A step of a small filter costs about the same for any size of the batch.

References: Gander (2015) for methods that are parallel in time; Atar and Zeitouni (1997) for how
filters forget their initial state.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kbf.filters.gating import GatedFilter, GatedState, is_observed
from kbf.filters.protocols import (
    FadingMemory,
    Filter,
    ParallelInTime,
    covariance_of,
    diagnostics_of,
    offers,
)
from kbf.filters.wrapper import innermost
from kbf.rkhs.linalg import NotPositiveDefiniteError
from kbf.runtime.random_inputs import NotExportedError, RandomInputs

# Numbers in the states and observations that are held in memory at a time.
MAX_HELD_NUMBERS = 2**21
# Approximate numbers that an encoder of images holds for each pixel.
NUMBERS_PER_PIXEL = 16
# Blocks in one batch; with more of them a step costs more than its calls.
MAX_BLOCKS = 1280
# Blocks of a recording below which the division into blocks is not faster.
MIN_BLOCKS = 4
# Steps after which a filter that does not know it is taken to forget its initial state.
REACH = 32
# Units in the last place by which two states may differ and count as equal.
ROUNDING = 256


class Inputs(NamedTuple):
    """Inputs of a filter: obs ``b T *x``, mask ``b T`` or None, controls ``b T k`` or None."""

    obs: Tensor
    mask: Tensor | None = None
    controls: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Applies a function to all that are given."""
        return Inputs(*[None if part is None else change(part) for part in self])  # pyright: ignore[reportArgumentType]

    def during(self, begin: int, end: int | None = None) -> Inputs:
        """The steps from ``begin`` until before ``end``."""
        return self.each(lambda part: part[:, begin:end])


class Steps(NamedTuple):
    """Results of consecutive steps: ``b T ...`` by name, and the state after the last of them."""

    series: dict[str, Tensor]
    state: GatedState

    @property
    def length(self) -> int:
        """The number of steps."""
        return self.series["estimates"].shape[1]


# The loop, one step after the other: from a state through inputs.
Walk = Callable[[GatedState, Inputs], Steps]


def outputs_of(filter: Filter[Any], state: Any, covariances: bool) -> dict[str, Tensor]:
    """What is recorded of a state: the estimate, on request its covariance, and the diagnostics."""
    found = {"estimates": filter.estimate(state)}
    covariance = covariance_of(filter, state) if covariances else None
    if covariance is not None:
        found["covariances"] = covariance
    return found | diagnostics_of(filter, state)


def rollout_parallel(
    filter: Filter[Any], walk: Walk, state: Any, inputs: Inputs, covariances: bool = False
) -> Steps | None:
    """The first steps, as many as can be evaluated in parallel; None for none of them."""
    kind = type(innermost(filter, inputs.obs[:, 0])[0])
    if offers(kind, ParallelInTime) and inputs.mask is None and inputs.controls is None:
        return recursively(filter, state, inputs.obs, covariances)
    if not offers(kind, FadingMemory):
        return None
    return in_blocks(filter, walk, GatedState(state), inputs, reach_of(filter, inputs.obs[:, 0]))


class States(NamedTuple):
    """States of T consecutive steps of one recording, as a batch of T.

    Attributes:
        predicted, updated: before and after each observation.
        rejected: ``T``, whether the observation was rejected.
        last: the state after them.
    """

    predicted: Any
    updated: Any
    rejected: Tensor
    last: GatedState


def states_in_blocks(filter: Filter[Any], state: GatedState, inputs: Inputs) -> States | None:
    """Return the states of the first steps of one recording; None if blocks are not faster.

    For a filter without random numbers (`draws`), whether or not it is known to forget.
    """
    gate, kind = GatedFilter(filter), type(state.inner)

    def walk(state: GatedState, inputs: Inputs) -> Steps:
        leaves: list[list[Tensor]] = []
        before: list[Any] = []
        for t in range(inputs.obs.shape[1]):
            obs, mask, control = (None if part is None else part[:, t] for part in inputs)
            assert obs is not None
            state = gate.step(
                state, obs, mask=mask, control=control, before=lambda s, *_: before.append(s)
            )
            rejected = torch.zeros(len(obs), dtype=torch.bool, device=obs.device)
            if state.rejected is not None:
                rejected = state.rejected & is_observed(filter, obs).to(rejected.device)
                rejected = rejected if mask is None else rejected & mask
            leaves.append([*before.pop(), *state.inner, rejected])
        series = {str(k): torch.stack(each, 1) for k, each in enumerate(zip(*leaves, strict=True))}
        return Steps(series, state)

    found = in_blocks(filter, walk, state, inputs, reach_of(filter, inputs.obs[:, 0]))
    if found is None:
        return None
    *leaves, rejected = (each[0] for each in found.series.values())
    count = len(kind._fields)
    last = found.state
    if last.rejections is not None and not bool(last.rejections.any()):
        last = GatedState(last.inner)
    return States(kind(*leaves[:count]), kind(*leaves[count:]), rejected, last)


def reach_of(filter: Filter[Any], obs: Tensor) -> int:
    """Return the steps after which the filter is taken to have forgotten its initial state.

    Args:
        filter: any filter. obs: an example ``1 *x``.
    """
    inner = innermost(filter, obs)[0]
    return inner.forgets() if isinstance(inner, FadingMemory) else REACH


def draws(filter: Filter[Any], obs: Tensor, controls: int) -> bool:
    """Return whether a step draws random numbers.

    Args:
        filter: any filter. obs: an example ``1 *x``. controls: components of a control.
    """
    control = obs.new_zeros(1, controls) if controls else None
    try:
        with torch.no_grad(), RandomInputs() as counting:
            GatedFilter(filter).step(GatedState(filter.init(1)), obs, control=control)
    except NotExportedError:
        return True
    return any(counting.counts.values())


def recursively(filter: Filter[Any], state: Any, obs: Tensor, covariances: bool) -> Steps | None:
    """All steps before the first rejected observation, in pieces that bound the memory."""
    numbers = sum(leaf.numel() for leaf in state) + NUMBERS_PER_PIXEL * obs[:, 0].numel()
    parts: list[Steps] = []
    for x in obs.split(max(1, MAX_HELD_NUMBERS // numbers), 1):
        part = one_piece(filter, state, x, covariances)
        if part is None:
            break
        parts, state = [*parts, part], part.state.inner
        if part.length < x.shape[1]:
            break
    return joined(parts) if parts else None


def one_piece(filter: Filter[Any], state: Any, obs: Tensor, covariances: bool) -> Steps | None:
    """All steps before the first rejected observation."""
    inner, x = innermost(filter, obs.flatten(0, 1))
    found = cast(ParallelInTime, inner).recursion(state, x.unflatten(0, obs.shape[:2]))
    if found is None:
        return None
    states, plausible = found
    T = int(plausible.all(0).long().cumprod(0).sum())
    if T == 0:
        return None
    states = with_leaves(states, lambda leaf: leaf[:, :T])
    rows = [  # the times of one recording serve as a batch; to flatten both would copy
        outputs_of(filter, with_leaves(states, itemgetter(k)), covariances) for k in range(len(obs))
    ]
    series = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    series["rejected"] = series["estimates"].new_zeros(len(obs), T)
    return Steps(series, GatedState(with_leaves(states, lambda leaf: leaf[:, -1].clone())))


def joined(parts: list[Steps]) -> Steps:
    """Consecutive parts as one."""
    if len(parts) == 1:
        return parts[0]
    names = parts[0].series
    series = {name: torch.cat([part.series[name] for part in parts], 1) for name in names}
    return Steps(series, parts[-1].state)


def in_blocks(
    filter: Filter[Any], walk: Walk, state: GatedState, inputs: Inputs, reach: int
) -> Steps | None:
    """Divides the steps into blocks of equal lengths and filters these as one batch.

    The initial state of a block is guessed first: it is the state that the steps before the block
    lead to from the filter's own initial state. After a sweep through all blocks the last state of
    each is the initial state of the next, and the blocks that started from another state (or
    another count of rejections) are filtered again, until none did. The result is that of the
    loop. The last steps, which fill no block, are not evaluated. None if a loop is no slower.
    """
    try:
        return blocks_until_equal(filter, walk, state, inputs, reach)
    except NotPositiveDefiniteError:  # a guessed initial state, which the loop may never reach
        return None


def blocks_until_equal(
    filter: Filter[Any], walk: Walk, state: GatedState, inputs: Inputs, reach: int
) -> Steps | None:
    """Return `in_blocks`.

    Raises:
        NotPositiveDefiniteError: from a guessed state, or from a true one.
    """
    batch, steps = inputs.obs.shape[:2]
    count = min(steps // reach, MAX_BLOCKS // batch)
    if count < MIN_BLOCKS:
        return None
    n = steps // count
    blocks = inputs.during(0, count * n).each(
        lambda part: part.unflatten(1, (count, n)).flatten(0, 1)
    )

    def nested(leaves: list[Tensor]) -> GatedState:
        return GatedState(type(state.inner)(*leaves[:-1]), leaves[-1])

    def initial(ends: list[Tensor]) -> list[Tensor]:
        """Initial states of the blocks, given their last states."""
        return [
            torch.cat([a[:, None], b.unflatten(0, (batch, count))[:, :-1]], 1).flatten(0, 1)
            for a, b in zip(leaves_of(state), ends, strict=True)
        ]

    guessed = walk(GatedState(filter.init(batch * count)), blocks.during(n - reach)).state
    starts = initial(leaves_of(guessed))
    found = walk(nested(starts), blocks)
    ends, rows = leaves_of(found.state), 0
    while True:
        following = initial(ends)
        again = differ(starts, following).nonzero()[:, 0]
        if len(again) == 0:
            break
        rows += len(again)
        if rows > 2 * batch * count:  # a filter that does not forget: the loop is no slower
            return None
        new = [leaf[again] for leaf in following]
        part = walk(nested(new), blocks.each(itemgetter(again)))
        rewritten = [*part.series.values(), *leaves_of(part.state), *new]
        for whole, rows_of in zip([*found.series.values(), *ends, *starts], rewritten, strict=True):
            whole[again] = rows_of
    series = {
        name: values.unflatten(0, (batch, -1)).flatten(1, 2)
        for name, values in found.series.items()
    }
    return Steps(series, nested([leaf.unflatten(0, (batch, -1))[:, -1] for leaf in ends]))


def leaves_of(state: GatedState) -> list[Tensor]:
    """All tensors of a state, the count of rejections last."""
    leaves, count = list(state.inner), state.rejections
    zero = torch.zeros(len(leaves[0]), dtype=torch.long, device=leaves[0].device)
    return [*leaves, zero if count is None else count]


def differ(a: list[Tensor], b: list[Tensor]) -> Tensor:
    """``b``, whether two states differ by more than rounding in any leaf, or hold NaN."""
    near = []
    for u, v in zip(a, b, strict=True):
        if u.numel() == 0:
            continue
        unit = torch.finfo(u.dtype).eps if u.is_floating_point() else 0
        gap, size = (x.abs().reshape(len(x), -1).amax(1) for x in (u - v, v))
        near.append(gap <= ROUNDING * unit * size)
    return ~torch.stack(near).all(0)


def with_leaves(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The state with a function applied to each leaf."""
    return type(state)(*[change(leaf) for leaf in state])
