"""Innovation gating: rejects implausible observations and re-initialises lost tracks.

An observation is rejected where the prediction gives it no probability: every particle has
likelihood zero, a component of the innovation exceeds 37 standard deviations, the weights of a
kernel filter cancel or vanish (`kbf.filters.protocols.HasLikelihood`), or, in filters without a
likelihood, the updated estimate is not finite. The track then keeps its predicted state, as at a
step without an observation.

After `MAX_CONSECUTIVE_REJECTIONS` rejections in a row a track counts as lost. A lost track is
re-initialised with its next observation, if that is plausible given the prior of the filter.
Otherwise that observation is rejected, too.

`kbf.filters.rollout`, `kbf.filters.online`, `kbf.filters.ensemble` and `kbf.export` use the same
`GatedFilter`.
"""

import math
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Generator, Tensor

from kbf.filters.protocols import (
    Filter,
    Fused,
    HasLikelihood,
    S,
    UpdateHook,
    allows_missing_sensors,
    move,
    offers,
    where,
)
from kbf.filters.wrapper import innermost
from kbf.runtime.branches import computes_all_branches

# Observations that are rejected in a row before a track counts as lost.
MAX_CONSECUTIVE_REJECTIONS = 3
# Batch size up to which Python compares the likelihoods faster than tensor operations do.
FEW_TRACKS = 64


class GatedState(NamedTuple):
    """State of a `GatedFilter`.

    Attributes:
        inner: state of the filter.
        rejections: ``b``, consecutive rejections so far; None if they are all 0.
        rejected: ``b``, whether the last observation was rejected; None if none was.
    """

    inner: Any
    rejections: Tensor | None = None
    rejected: Tensor | None = None


class GatedFilter:
    """A filter that rejects implausible observations and re-initialises lost tracks.

    None stands for counts that are all 0, so that a step without rejections costs no operation on
    tensors.
    """

    def __init__(self, filter: Filter[Any], generator: Generator | None = None) -> None:
        """The gated version of ``filter``; ``generator`` is the source of its random numbers."""
        self.filter: Filter[Any] = filter
        self.generator: Generator | None = generator
        self.fresh: Any = None

    def step(
        self,
        state: GatedState,
        obs: Shaped[Tensor, "b *x"],
        *,
        mask: Bool[Tensor, " b"] | None = None,
        control: Float[Tensor, "b k"] | None = None,
        before: UpdateHook | None = None,
    ) -> GatedState:
        """Predict, then update where ``mask`` is True; see `kbf.filters.rollout.step`."""
        updated, rejected = self.attempt(
            state.inner, obs, mask=mask, control=control, before=before
        )
        return self.resolve(state, updated, rejected, obs, mask=mask, control=control)

    def attempt(
        self,
        state: Any,
        obs: Shaped[Tensor, "b *x"],
        *,
        mask: Bool[Tensor, " b"] | None = None,
        control: Float[Tensor, "b k"] | None = None,
        before: UpdateHook | None = None,
    ) -> tuple[Any, Bool[Tensor, " b"] | None]:
        """`step` of the inner state, without re-initialisation.

        Returns:
            The next state; and ``b``, which observations were rejected, or None if none was.
        """
        if before is None and mask is None and control is None:
            inner, x = innermost(self.filter, obs)
            fused = (
                cast(Fused, inner).move_and_observe(state, x)
                if offers(type(inner), Fused)
                else None
            )
            if fused is not None:
                updated, likelihood = fused
                if all_plausible(likelihood):
                    return updated, None
                return select_updated(inner, x, updated, likelihood, inner.predict(state))
        predicted = move(self.filter, state, control=control, generator=self.generator)
        if before is not None:
            before(predicted, obs, mask)
        return observe(self.filter, predicted, obs, mask)

    def resolve(
        self,
        before: GatedState,
        updated: Any,
        rejected: Bool[Tensor, " b"] | None,
        obs: Shaped[Tensor, "b *x"],
        *,
        mask: Bool[Tensor, " b"] | None = None,
        control: Float[Tensor, "b k"] | None = None,
    ) -> GatedState:
        """Re-initialises the lost tracks and counts the rejections.

        Args:
            before: state before the step.
            updated, rejected: results of `attempt`.
            obs, mask, control: of the step. A step without an observation leaves the count as it
                is.
        """
        count, compiling = before.rejections, computes_all_branches()
        if rejected is None:
            if count is None or not allows_missing_sensors(self.filter):  # each was observed
                return GatedState(updated)
            rejected = torch.zeros_like(count, dtype=torch.bool)
        elif count is None and not compiling and not bool(rejected.any()):
            return GatedState(updated)
        obs = obs.to(rejected.device)
        count = torch.zeros_like(rejected, dtype=torch.long) if count is None else count
        lost = rejected & (count >= MAX_CONSECUTIVE_REJECTIONS)
        if compiling or bool(lost.any()):
            fresh, implausible = observe(self.filter, self.prior(len(count), control), obs, mask)
            found = lost if implausible is None else lost & ~implausible
            updated, rejected = where(found, fresh, updated), rejected & ~found
        count = counted(self.filter, count, rejected, obs, mask)
        return GatedState(updated, count if compiling or bool(count.any()) else None, rejected)

    def prior(self, batch: int, control: Float[Tensor, "b k"] | None = None) -> Any:
        """The prediction from the filter's initial state; without controls it is computed once."""
        if self.fresh is not None and len(self.fresh[0]) == batch:
            return self.fresh
        fresh = move(
            self.filter,
            self.filter.init(batch, generator=self.generator),
            control=control,
            generator=self.generator,
        )
        if control is None and not computes_all_branches():
            self.fresh = fresh
        return fresh


def counted(
    filter: Filter[Any],
    count: Int[Tensor, " b"],
    rejected: Bool[Tensor, " b"],
    obs: Shaped[Tensor, "b *x"],
    mask: Bool[Tensor, " b"] | None = None,
) -> Int[Tensor, " b"]:
    """Return the consecutive rejections after a step; without an observation they are kept."""
    observed = is_observed(filter, obs)
    observed = observed if mask is None else mask & observed
    return torch.where(observed, (count + 1) * rejected, count)


def observe(
    filter: Filter[S],
    predicted: S,
    obs: Shaped[Tensor, "b *x"],
    mask: Bool[Tensor, " b"] | None = None,
) -> tuple[S, Bool[Tensor, " b"] | None]:
    """Update a predicted state with the observations that are plausible, where ``mask`` is True.

    Returns:
        The updated state, or the predicted one where there is no plausible observation; and ``b``,
        which observations were rejected, or None if none was.
    """
    inner, x = innermost(filter, obs)
    if offers(type(inner), HasLikelihood):
        updated, likelihood = cast(HasLikelihood, inner).observe(predicted, x)
    else:
        updated = inner.update(predicted, x)
        likelihood = 1 + inner.estimate(updated).abs().amax(-1)
    if mask is None and all_plausible(likelihood):
        return updated, None
    return select_updated(inner, x, updated, likelihood, predicted, mask)


def select_updated(
    filter: Filter[Any],
    obs: Tensor,
    updated: S,
    likelihood: Tensor,
    predicted: S,
    mask: Tensor | None = None,
) -> tuple[S, Bool[Tensor, " b"]]:
    """The updated state where the observation is plausible, the predicted one elsewhere.

    Returns:
        The state; and ``b``, which observations are rejected.
    """
    accepted = (likelihood > 0) & (likelihood < torch.inf)
    rejected = ~accepted
    if allows_missing_sensors(filter):  # a row without any value is no observation
        rejected = rejected & obs.isfinite().flatten(1).any(1)
    if mask is not None:
        rejected, accepted = rejected & mask, accepted & mask
    return where(accepted, updated, predicted), rejected


def all_plausible(likelihood: Shaped[Tensor, " b"]) -> bool:
    """Whether all observations are plausible, as far as that is known without synchronising.

    False on a GPU, and while a step is compiled or exported.
    """
    if computes_all_branches() or not likelihood.is_cpu:
        return False
    if likelihood.dtype == torch.bool:
        return bool(likelihood.all())
    if len(likelihood) > FEW_TRACKS:
        return bool(((likelihood > 0) & (likelihood < math.inf)).all())
    return all(0 < each < math.inf for each in likelihood.tolist())


def is_observed(filter: Filter[Any], obs: Shaped[Tensor, "b *x"]) -> Bool[Tensor, " b"]:
    """Whether rows hold an observation.

    A row with NaN holds none; for filters that allow missing sensors, only a row that is all NaN.
    """
    missing = obs.isnan().flatten(1)
    return ~(missing.all(1) if allows_missing_sensors(filter) else missing.any(1))
