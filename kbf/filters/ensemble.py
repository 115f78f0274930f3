"""A weighted ensemble of filters."""

from collections import namedtuple
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from kbf.filters.gating import MAX_CONSECUTIVE_REJECTIONS, counted, observe
from kbf.filters.protocols import (
    Backward,
    Filter,
    FilterStep,
    Smoothable,
    UpdateByObserve,
    allows_missing_sensors,
    control_components,
    covariance_of,
    move,
    smoother_of,
    where,
)
from kbf.runtime.branches import computes_all_branches


class EnsembleFilter(UpdateByObserve[Any]):
    """The mean m = sum_k a_k m_k of several filters, and the covariance of their mixture.

    Each component of the state has weights a_k of its own. Member k enters as a distribution with
    mean m_k and covariance C_k (its own, or that of its errors on held-out steps). With
    e_k = m_k - m and A_k = diag(a_k)^(1/2) the covariance is sum_k A_k (C_k + e_k e_k^T) A_k, which
    is larger where the members disagree.

    The state consists of the members' states and the consecutive rejections of each member. After
    `kbf.filters.gating.MAX_CONSECUTIVE_REJECTIONS` a member is re-initialised at its next
    prediction. An observation is rejected if every member rejects it.
    """

    def __init__(
        self,
        filters: dict[str, Filter[Any]],
        weights: Float[Tensor, "m d"],
        spreads: Float[Tensor, "m d d"],
    ) -> None:
        """The ensemble of given members.

        Args:
            filters: m members by name.
            weights: a_k, not negative, each column of sum 1.
            spreads: covariances of the errors, for members without covariances.
        """
        self.filters: dict[str, Filter[Any]] = filters
        self.weights: Tensor = weights
        self.spreads: Tensor = spreads
        self.kinds: list[Any] = [type(each.init(1)) for each in filters.values()]
        names = [
            f"member{k}_{field}" for k, kind in enumerate(self.kinds) for field in kind._fields
        ]
        self.kind: Any = namedtuple("EnsembleState", [*names, "rejections"])
        self.controlled: int = max(control_components(each) for each in filters.values())
        self.allow_missing_sensors: bool = all(
            allows_missing_sensors(each) for each in filters.values()
        )

    def parts(self, state: Any) -> list[Any]:
        """The state of each filter."""
        found, first = [], 0
        for kind in self.kinds:
            found.append(kind(*state[first : first + len(kind._fields)]))
            first += len(kind._fields)
        return found

    def joined(self, parts: list[Any], rejections: Int[Tensor, "b m"]) -> Any:
        """The states of the filters as one."""
        return self.kind(*(leaf for part in parts for leaf in part), rejections)

    def init(self, batch: int, *, generator: Generator | None = None) -> Any:
        """The initial states of the members."""
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
        """Predict with each member; one that is lost starts from its initial state."""
        moved, lost = [], state.rejections >= MAX_CONSECUTIVE_REJECTIONS
        for k, (each, part) in enumerate(
            zip(self.filters.values(), self.parts(state), strict=True)
        ):
            if computes_all_branches() or bool(lost[:, k].any()):
                part = where(lost[:, k], each.init(len(lost), generator=generator), part)
            moved.append(move(each, part, control=control, generator=generator))
        return self.joined(moved, state.rejections.masked_fill(lost, 0))

    def observe(self, state: Any, obs: Shaped[Tensor, "b *x"]) -> tuple[Any, Bool[Tensor, " b"]]:
        """Update each member for which the observation is plausible; ``b``, whether any is."""
        updated, rejections = [], []
        for k, (each, part) in enumerate(
            zip(self.filters.values(), self.parts(state), strict=True)
        ):
            count = state.rejections[:, k]
            found, rejected = observe(each, part, obs)
            rejected = torch.zeros_like(count, dtype=torch.bool) if rejected is None else rejected
            updated.append(found)
            rejections.append(counted(each, count, rejected, obs))
        count = torch.stack(rejections, 1)
        return self.joined(updated, count), (count == 0).any(1)

    def smoother(self) -> Backward:
        """One step back of each member with a smoother; the others keep their filtered state.

        Raises:
            ValueError: no member has a smoother.
        """
        able = [isinstance(each, Smoothable) for each in self.filters.values()]
        if not any(able):
            smoother_of(next(iter(self.filters.values())))  # raises
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
                return self.parts(now.observe(self.joined(whole, now.predicted.rejections)))[k]

            for k, (each, back) in enumerate(zip(self.filters.values(), backs, strict=True)):
                if back is not None:
                    acted = control if control_components(each) else None
                    step = FilterStep(states[k], before[k], partial(observed, k))
                    states[k] = back(step, after[k], control=acted, generator=generator)
            return self.joined(states, now.state.rejections)

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
