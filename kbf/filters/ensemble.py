"""A filter made of several: they run beside each other, and the estimate is a weighted mean of theirs."""

from __future__ import annotations

from collections import namedtuple
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from kbf.filters.protocols import (
    Backward,
    Filter,
    FilterStep,
    Smoothable,
    allows_missing_sensors,
    control_components,
    covariance_of,
    move,
    smoother_of,
)
from kbf.filters.rollout import MAX_CONSECUTIVE_REJECTIONS, observe, update_rejection_count, where


class EnsembleFilter:
    """m = sum_k a_k m_k, with weights a_k of their own for each component of the state, and the covariance of the mixture.

    Each filter k enters as a law of mean m_k and covariance C_k (its own, or that of its errors on
    held-out steps). With e_k = m_k - m the covariance is sum_k A_k (C_k + e_k e_k^T) A_k, A_k =
    diag(a_k)^(1/2): wider where the filters disagree.

    The state is all of theirs, one behind the other, and how many observations each has passed over
    in a row: after `kbf.filters.rollout.MAX_CONSECUTIVE_REJECTIONS` it begins anew. An observation
    is impossible where it is for every one of them.
    """

    def __init__(
        self,
        filters: dict[str, Filter[Any]],
        weights: Float[Tensor, "m d"],
        spreads: Float[Tensor, "m d d"],
    ) -> None:
        """The stack.

        Args:
            filters: by name, m of them.
            weights: a_k, not negative, each column of sum 1.
            spreads: covariances of their errors, for filters that give none.
        """
        self.filters, self.weights, self.spreads = filters, weights, spreads
        self.kinds = [type(each.init(1)) for each in filters.values()]
        names = [
            f"member{k}_{field}" for k, kind in enumerate(self.kinds) for field in kind._fields
        ]
        self.kind: Any = namedtuple("StackState", [*names, "members_passed_over"])
        self.controlled = max(control_components(each) for each in filters.values())
        self.allow_missing_sensors = all(allows_missing_sensors(each) for each in filters.values())

    def parts(self, state: Any) -> list[Any]:
        """The state of each filter."""
        found, first = [], 0
        for kind in self.kinds:
            found.append(kind(*state[first : first + len(kind._fields)]))
            first += len(kind._fields)
        return found

    def joined(self, parts: list[Any], misses: Int[Tensor, "b m"]) -> Any:
        """The states of the filters as one."""
        return self.kind(*(leaf for part in parts for leaf in part), misses)

    def init(self, batch: int, *, generator: Generator | None = None) -> Any:
        """The start of each."""
        none = torch.zeros(batch, len(self.filters), dtype=torch.long, device=self.weights.device)
        return self.joined(
            [each.init(batch, generator=generator) for each in self.filters.values()], none
        )

    def predict(
        self,
        state: Any,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> Any:
        """Each moves; one that is lost, from its start."""
        moved, lost = [], state.members_passed_over >= MAX_CONSECUTIVE_REJECTIONS
        for k, (each, part) in enumerate(
            zip(self.filters.values(), self.parts(state), strict=True)
        ):
            if bool(lost[:, k].any()):
                part = where(lost[:, k], each.init(len(lost), generator=generator), part)
            moved.append(move(each, part, control=control, generator=generator))
        return self.joined(moved, state.members_passed_over.masked_fill(lost, 0))

    def update(self, state: Any, obs: Shaped[Tensor, "b *x"]) -> Any:
        """Each observes."""
        return self.observe(state, obs)[0]

    def observe(self, state: Any, obs: Shaped[Tensor, "b *x"]) -> tuple[Any, Bool[Tensor, " b"]]:
        """Each observes, or passes over what is impossible for it; and for which sequences one of them did not."""
        updated, misses = [], torch.zeros_like(state.members_passed_over)
        for k, (each, part) in enumerate(
            zip(self.filters.values(), self.parts(state), strict=True)
        ):
            after, passed = observe(each, part, obs, None)
            updated.append(after)
            found = update_rejection_count(each, state.members_passed_over[:, k], passed, obs)
            misses[:, k] = 0 if found is None else found
        return self.joined(updated, misses), (misses == 0).any(1)

    def smoother(self) -> Backward:
        """One step back of each that has a smoother; what the others say stays as it is.

        Raises:
            ValueError: none of them has one.
        """
        able = [isinstance(each, Smoothable) for each in self.filters.values()]
        if not any(able):
            smoother_of(next(iter(self.filters.values())))  # which says so
        backs = [
            smoother_of(each) if yes else None
            for each, yes in zip(self.filters.values(), able, strict=True)
        ]

        def step_back(
            now: FilterStep,
            following: Any,
            *,
            control: Tensor | None = None,
            generator: Generator | None = None,
        ) -> Any:
            states, before, after = (
                self.parts(each) for each in (now.state, now.predicted, following)
            )

            def observed(k: int, part: Any) -> Any:
                """Part k after x_t."""
                whole = [part if j == k else each for j, each in enumerate(before)]
                return self.parts(
                    now.observe(self.joined(whole, now.predicted.members_passed_over))
                )[k]

            for k, (each, back) in enumerate(zip(self.filters.values(), backs, strict=True)):
                if back is not None:
                    acted = control if control_components(each) else None
                    step = FilterStep(states[k], before[k], partial(observed, k))
                    states[k] = back(step, after[k], control=acted, generator=generator)
            return self.joined(states, now.state.members_passed_over)

        return step_back

    def means(self, state: Any) -> Float[Tensor, "m b d"]:
        """The estimate of each."""
        pairs = zip(self.filters.values(), self.parts(state), strict=True)
        return torch.stack([each.estimate(part).to(self.weights) for each, part in pairs])

    def estimate(self, state: Any) -> Float[Tensor, "b d"]:
        """The weighted mean, ``b d``."""
        return (self.weights[:, None] * self.means(state)).sum(0)

    def covariance(self, state: Any) -> Float[Tensor, "b d d"]:
        """The covariance of the mixture, ``b d d``."""
        means = self.means(state)
        apart = means - (self.weights[:, None] * means).sum(0)
        total = torch.zeros_like(self.spreads[0]).expand(means.shape[1], -1, -1)
        for k, (each, part) in enumerate(
            zip(self.filters.values(), self.parts(state), strict=True)
        ):
            own = covariance_of(each, part)
            spread = self.spreads[k] if own is None else own.to(self.weights)
            root = self.weights[k].sqrt()
            total = (
                total + root[:, None] * (spread + apart[k, :, :, None] * apart[k, :, None]) * root
            )
        return total
