"""`SwitchingFilter`: Gaussian filters of several regimes, the interacting multiple model filter.

The regime k is a Markov chain with probabilities P(i, j). Each filter starts a step from the
moments of the mixture of all filters, weighted by the probability that its regime comes after
theirs; a regime's probability is multiplied by the filter's likelihood of the observation.

References: Blom and Bar-Shalom (1988), for the filter; Kim (1994), for the smoother.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.gaussian.start import StartingFilter, StartingState
from kbf.filters.gaussian.ukf import Split
from kbf.filters.protocols import Backward, FilterStep, UpdateByObserve
from kbf.runtime.html_repr import Shown


class SwitchingState(NamedTuple):
    """State of a `SwitchingFilter`: that of each regime's filter, and the regimes' probabilities.

    Attributes:
        mean: ``b k e``. cov: ``b k e e``. waiting: ``b``. works: ``b k q``, as of `StartingState`.
        probabilities: ``b k``.
    """

    mean: Tensor
    cov: Tensor
    waiting: Tensor
    works: Tensor
    probabilities: Tensor


class SwitchingFilter(UpdateByObserve[SwitchingState], Shown):
    """The mixture of filters, one for each regime, that differ in the change of the state."""

    def __init__(
        self,
        filters: list[StartingFilter],
        P: Float[Tensor, "k k"],
        start: Float[Tensor, " k"],
    ) -> None:
        """Keep the filters and the chain.

        Args:
            filters: of the regimes; they share sensors, recorded states, and hence the update.
            P: transition probabilities; rows sum to 1. start: probabilities at the beginning.
        """
        self.filters: list[StartingFilter] = filters
        inner = filters[0].inner.repeated(len(filters)).with_parts(f=moves_of(filters))
        self.sensors: StartingFilter = filters[0].with_inner(inner)  # of `stacked_parts`
        self.Q: Tensor = torch.stack([each.model.Q for each in filters], -3)
        self.P: Tensor = P.to(filters[0].states)
        self.start: Tensor = start.to(filters[0].states)
        self.states: Tensor = filters[0].states
        self.controlled: int = filters[0].controlled
        self.allow_missing_sensors: bool = filters[0].allow_missing_sensors

    def each(self, change: Callable[[StartingFilter], StartingFilter]) -> "SwitchingFilter":
        """Return the mixture of changed filters."""
        return SwitchingFilter([change(one) for one in self.filters], self.P, self.start)

    def init(self, batch: int, *, generator: Generator | None = None) -> SwitchingState:
        """Return the filters' initial states."""
        return joined([each.init(batch) for each in self.filters], self.start.expand(batch, -1))

    def predict(
        self,
        state: SwitchingState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> SwitchingState:
        """Mix the filters' moments, and predict with each filter."""
        flow = state.probabilities[..., None] * self.P  # b i j
        probabilities = flow.sum(1)
        shares = (flow / probabilities.clamp_min(torch.finfo(flow.dtype).tiny)[:, None]).mT
        mean = shares @ state.mean
        cov = mixture_covariance(shares, state.mean[:, None], state.cov[:, None], mean)
        mixed = SwitchingState(mean, cov, state.waiting, shares @ state.works, probabilities)
        Q = self.Q.expand(len(mean), *self.Q.shape[-3:]).flatten(0, 1)
        moves = self.sensors.with_inner(self.sensors.inner.with_parts(Q=Q))
        acted = None if control is None else control.repeat_interleave(len(self.filters), 0)
        return unstacked(moves.predict(stacked_parts(mixed), control=acted), probabilities)

    def observe(
        self, state: SwitchingState, obs: Float[Tensor, "b q"]
    ) -> tuple[SwitchingState, Bool[Tensor, " b"]]:
        """Update each filter, and the regimes' probabilities by its likelihood."""
        k = len(self.filters)
        stacked, each_obs = stacked_parts(state), obs.repeat_interleave(k, 0)
        after, fits, logs = self.sensors.observe_with_density(stacked, each_obs)
        weights = state.probabilities.log() + logs.unflatten(0, (-1, k))
        seen = obs.isfinite().any(-1)[:, None]
        found = torch.where(seen, weights.softmax(-1), state.probabilities)
        return unstacked(after, found), fits.unflatten(0, (-1, k)).any(1)

    def log_likelihood(
        self, state: SwitchingState, obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, " b"]:
        """Return log sum_k p(k) p(x | k)."""
        k = len(self.filters)
        logs = self.sensors.log_likelihood(stacked_parts(state), obs.repeat_interleave(k, 0))
        return (state.probabilities.log() + logs.unflatten(0, (-1, k))).logsumexp(-1)

    def estimate(self, state: SwitchingState) -> Float[Tensor, "b d"]:
        """Return the mean of the mixture, ``b d``."""
        d = self.filters[0].d
        return (state.probabilities[:, None] @ state.mean[..., :d])[:, 0]

    def covariance(self, state: SwitchingState) -> Float[Tensor, "b d d"]:
        """Return the covariance of the mixture, ``b d d``."""
        d = self.filters[0].d
        return mixture_covariance(
            state.probabilities, state.mean[..., :d], state.cov[..., :d, :d], self.estimate(state)
        )

    def smoother(self) -> Backward:
        """Return the step back in time of Kim's smoother.

        Each filter's state is smoothed with the move of each regime j that may follow; the results
        are mixed by P(i at t, j at t + 1 | all observations) = P(j at t + 1 | all) p_i P(i, j) /
        sum_l p_l P(l, j), p the filtered probabilities.

        References: Kim (1994), equations 2.20 to 2.27.
        """
        backs = [each.smoother() for each in self.filters]

        def step_back(
            now: FilterStep,
            following: SwitchingState,
            *,
            control: Tensor | None = None,
            generator: Generator | None = None,
        ) -> SwitchingState:
            state: SwitchingState = now.state
            flow = state.probabilities[..., None] * self.P  # b i j
            tiny = torch.finfo(flow.dtype).tiny
            joint = flow / flow.sum(1, keepdim=True).clamp_min(tiny)
            joint = joint * following.probabilities[:, None]
            probabilities = joint.sum(-1)
            shares = joint / probabilities.clamp_min(tiny)[..., None]
            after, smoothed = parts_of(following), []
            for i, part in enumerate(parts_of(state)):
                here = FilterStep(part, now.predicted, now.observe)
                each = joined(
                    [
                        back(here, next, control=control)
                        for back, next in zip(backs, after, strict=True)
                    ],
                    shares[:, i],
                )
                mean = (shares[:, i, None] @ each.mean)[:, 0]
                cov = mixture_covariance(shares[:, i], each.mean, each.cov, mean)
                smoothed.append(StartingState(mean, cov, part.waiting, part.works))
            return joined(smoothed, probabilities)

        return step_back


def parts_of(state: SwitchingState) -> list[StartingState]:
    """Return the state of each filter."""
    return [
        StartingState(state.mean[:, k], state.cov[:, k], state.waiting, state.works[:, k])
        for k in range(state.mean.shape[1])
    ]


def stacked_parts(state: SwitchingState) -> StartingState:
    """Return the state of each filter for each recording of the batch, as one batch."""
    k = state.mean.shape[1]
    mean, cov, works = (each.flatten(0, 1) for each in (state.mean, state.cov, state.works))
    return StartingState(mean, cov, state.waiting.repeat_interleave(k, 0), works)


def unstacked(state: StartingState, probabilities: Float[Tensor, "b k"]) -> SwitchingState:
    """Return the inverse of `stacked_parts`, with the regimes' probabilities."""
    k = probabilities.shape[1]
    mean, cov, works = (each.unflatten(0, (-1, k)) for each in (state.mean, state.cov, state.works))
    return SwitchingState(mean, cov, state.waiting[::k], works, probabilities)


def moves_of(filters: list[StartingFilter]) -> Callable[..., Tensor]:
    """Return f of `stacked_parts`: each row moves as its regime does."""
    k, maps = len(filters), [each.model.f for each in filters]

    def by_regime(functions: list[Callable[..., Tensor]]) -> Callable[..., Tensor]:
        def moved(z: Tensor, *control: Tensor) -> Tensor:
            given = [each.unflatten(0, (-1, k)) for each in (z, *control)]
            found = [f(*(each[:, j] for each in given)) for j, f in enumerate(functions)]
            return torch.stack(found, 1).flatten(0, 1)

        return moved

    if splits := [f for f in maps if isinstance(f, Split)]:
        return Split(by_regime([f.inner for f in splits]), splits[0].outer, splits[0].last)
    return by_regime(maps)


def joined(parts: list[StartingState], probabilities: Float[Tensor, "b k"]) -> SwitchingState:
    """Return the states of filters as one; all of them wait, or none."""
    mean, cov, works = (
        torch.stack([getattr(each, name) for each in parts], 1) for name in ("mean", "cov", "works")
    )
    return SwitchingState(mean, cov, parts[0].waiting, works, probabilities)


def mixture_covariance(
    weights: Float[Tensor, "*b k"],
    means: Float[Tensor, "*c k e"],
    covs: Float[Tensor, "*c k e e"],
    mean: Float[Tensor, "*b e"],
) -> Float[Tensor, "*b e e"]:
    """Return sum_k w_k (C_k + (m_k - m) (m_k - m)^T)."""
    left = means - mean[..., None, :]
    return (weights[..., None, None] * covs).sum(-3) + (weights[..., None] * left).mT @ left
