"""Ways through a sequence that are not one step after the other, for filters that have one (`ParallelInTime`, `FadingMemory`).

`kbf.filters.rollout.rollout` tries them. A step of a small filter costs what its dozens of calls
cost, whatever the size of the batch; so a sequence is cut into blocks, and the blocks are filtered
side by side.

References: Gander (2015) for methods that are parallel in time; Atar and Zeitouni (1997) for how
filters forget.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from kbf.filters.protocols import FadingMemory, Filter, ParallelInTime, diagnostics_of, offers
from kbf.filters.wrapper import innermost
from kbf.rkhs.linalg import NotPositiveDefiniteError
from kbf.runtime import html_repr

NUMBERS = 2**21
"""In the states that are held at a time."""
IMAGES = 16
"""Numbers that an encoder of images makes of one pixel, about: they count as well."""
ROWS = 1280
"""Blocks side by side: with more of them a step costs more than its calls."""
FEWEST = 4
"""Blocks of a sequence for which cutting it is worth its while."""
ROUNDING = 256
"""Units in the last place that two states may be apart and still be the same."""


class Rollout(NamedTuple):
    """What the loop returns: estimates ``b T d``, the last state, and diagnostics by name, each ``b T``."""

    estimates: Tensor
    state: Any
    diagnostics: dict[str, Tensor]

    def __repr__(self) -> str:
        return html_repr.described("Rollout", self._asdict())

    def _repr_html_(self) -> str:
        return html_repr.page(
            "Rollout", self._asdict(), self.estimates[0], "estimates of the first recording"
        )


class Inputs(NamedTuple):
    """What goes into a filter: obs ``b T *x``, mask ``b T`` or None, controls ``b T k`` or None."""

    obs: Tensor
    mask: Tensor | None = None
    controls: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same change of all that there are."""
        return Inputs(*[None if part is None else change(part) for part in self])  # pyright: ignore[reportArgumentType]

    def during(self, begin: int, end: int | None = None) -> Inputs:
        """The steps from ``begin`` until before ``end``."""
        return self.each(lambda part: part[:, begin:end])


Walk = Callable[[Any, Inputs], Rollout]
"""The loop, one step after the other: from a state through inputs."""


def at_once(filter: Filter[Any], walk: Walk, state: Any, inputs: Inputs) -> Rollout | None:
    """As many of the steps as can be done without one after the other; None for none of them."""
    kind = type(innermost(filter, inputs.obs[:, 0])[0])
    if offers(kind, ParallelInTime) and inputs.mask is None and inputs.controls is None:
        return recursively(filter, state, inputs.obs)
    try:
        return in_blocks(filter, walk, state, inputs) if offers(kind, FadingMemory) else None
    except (
        NotPositiveDefiniteError
    ):  # the start of a block is a guess first, which the filter itself might never come to
        return None


def recursively(filter: Filter[Any], state: Any, obs: Tensor) -> Rollout | None:
    """All steps until before the first observation that is impossible, in pieces whose states are no burden to the memory."""
    parts: list[Rollout] = []
    for x in obs.split(
        max(1, NUMBERS // (sum(leaf.numel() for leaf in state) + IMAGES * obs[:, 0].numel())), 1
    ):
        part = one_piece(filter, state, x)
        if part is None:
            break
        parts, state = [*parts, part], part.state
        if part.estimates.shape[1] < x.shape[1]:
            break
    return joined(parts) if parts else None


def one_piece(filter: Filter[Any], state: Any, obs: Tensor) -> Rollout | None:
    """All steps until before the first observation that is impossible."""
    inner, x = innermost(filter, obs.flatten(0, 1))
    found = cast(ParallelInTime, inner).recursion(state, x.unflatten(0, obs.shape[:2]))
    if found is None:
        return None
    states, possible = found
    T = int(possible.all(0).long().cumprod(0).sum())
    if T == 0:
        return None
    states = with_leaves(states, lambda leaf: leaf[:, :T])
    each = [
        with_leaves(states, itemgetter(k)) for k in range(len(obs))
    ]  # its times are a batch; to flatten both would copy
    estimates = torch.stack([filter.estimate(one) for one in each])
    ratio_dim = [diagnostics_of(filter, one) for one in each]
    diagnostics = {name: torch.stack([one[name] for one in ratio_dim]) for name in ratio_dim[0]}
    diagnostics["rejected"] = estimates.new_zeros(estimates.shape[:2])
    return Rollout(estimates, with_leaves(states, lambda leaf: leaf[:, -1].clone()), diagnostics)


def joined(parts: list[Rollout]) -> Rollout:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    diagnostics = {
        name: torch.cat([part.diagnostics[name] for part in parts], 1)
        for name in parts[0].diagnostics
    }
    return Rollout(torch.cat([part.estimates for part in parts], 1), parts[-1].state, diagnostics)


def in_blocks(filter: Filter[Any], walk: Walk, state: Any, inputs: Inputs) -> Rollout | None:
    """Cut the steps into blocks of equal lengths and filter these side by side, from where each of them starts.

    That is guessed first: it is where the steps before lead to from the filter's own start. After a
    sweep through all blocks the end of each is the start of the next, and those that started from
    elsewhere are filtered again, until none did. What is left is the loop's own result. The last
    few steps, which fill no block, are not done.
    """
    reach = cast(FadingMemory, innermost(filter, inputs.obs[:, 0])[0]).forgets()
    batch, steps = inputs.obs.shape[:2]
    count = min(steps // reach, ROWS // batch)
    if count < FEWEST:
        return None
    n = steps // count
    blocks = inputs.during(0, count * n).each(
        lambda part: part.unflatten(1, (count, n)).flatten(0, 1)
    )

    def handed_on(ends: Any) -> Any:
        """Where the blocks start, from where they end."""
        return type(state)(
            *[
                torch.cat([a[:, None], b.unflatten(0, (batch, count))[:, :-1]], 1).flatten(0, 1)
                for a, b in zip(state, ends, strict=True)
            ]
        )

    starts = handed_on(walk(filter.init(batch * count), blocks.during(n - reach)).state)
    found, rows = walk(starts, blocks), 0
    while True:
        following = handed_on(found.state)
        again = apart(starts, following).nonzero()[:, 0]
        rows += len(again)
        if len(again) == 0:
            return found_in_blocks(found, batch)
        if rows > 2 * batch * count:  # a filter that does not forget: the loop is no slower
            return None
        new = with_leaves(following, itemgetter(again))
        part = walk(new, blocks.each(itemgetter(again)))
        pairs = zip(parts_of(found, starts), parts_of(part, new), strict=True)
        for whole, rewritten in pairs:
            whole[again] = rewritten


def parts_of(found: Rollout, starts: Any) -> list[Tensor]:
    """All tensors of a sweep, each with the blocks in front."""
    return [found.estimates, *found.state, *found.diagnostics.values(), *starts]


def found_in_blocks(found: Rollout, batch: int) -> Rollout:
    """The blocks of each sequence, one after the other."""
    diagnostics = {
        name: values.unflatten(0, (batch, -1)).flatten(1, 2)
        for name, values in found.diagnostics.items()
    }
    last = with_leaves(found.state, lambda leaf: leaf.unflatten(0, (batch, -1))[:, -1])
    return Rollout(found.estimates.unflatten(0, (batch, -1)).flatten(1, 2), last, diagnostics)


def apart(a: Any, b: Any) -> Tensor:
    """``b``, whether two states differ by more than rounding, in any of their parts, or hold NaN."""
    near = []
    for u, v in zip(a, b, strict=True):
        size = ROUNDING * torch.finfo(u.dtype).eps * v.abs().flatten(1).amax(1)
        near.append((u - v).abs().flatten(1).amax(1) <= size)
    return ~torch.stack(near).all(0)


def with_leaves(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The state with the same change of each part."""
    return type(state)(*[change(leaf) for leaf in state])
