"""Interfaces of filters and their models, and functions that query what a filter supports.

A filter carries a *state*: a NamedTuple of tensors, each with the batch ``b`` as first dimension.
Because of this convention every filter supports missing data, batches of unequal lengths, truncated
back-propagation, transfer between devices, and saving of a running filter.
"""

import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.recording import Recording, check_finite
from kbf.runtime.html_repr import ShownModule

# Models whose filters take the controls of recordings that have some.
WITH_CONTROLS = (
    *("kbf", "kbf_tuned", "kbf_paper", "kernel_monte_carlo", "particle_learned"),
    *("kalman", "kalman_velocity", "ukf_learned"),
    *("lstm", "lstm_feedback", "lstm_images", "gru", "gru_images", "rkn", "backprop_kf", "dpf"),
    *("mamba", "window_ridge", "window_boosting", "mean"),
)

# Models whose filters have a smoother.
WITH_SMOOTHER = (
    *("kbf", "kbf_tuned", "kbf_paper", "kbf_features", "kernel_monte_carlo"),
    *("kalman", "kalman_velocity", "ekf", "ukf", "ukf_learned"),
    *("particle", "particle_learned", "particle_observation"),
)

# Models whose filters have a memory that recordings can be added to.
WITH_MEMORY = (
    *("kbf", "kbf_tuned", "kbf_paper", "kernel_monte_carlo", "particle_learned"),
    *("kalman", "kalman_velocity", "ukf_learned"),
    *("window_ridge", "window_boosting", "frame"),
)

S = TypeVar(
    "S", bound=tuple[Any, ...]
)  # a NamedTuple; beartype refuses NamedTuple itself as a hint

# One step back in time.
#
# (`FilterStep` at t, smoothed state at t + 1, *, control=None, generator=None) -> smoothed state at
# t. The control ``b k`` is that of the move from t to t + 1.
Backward = Callable[..., Any]

# What looks at a step before the update: (predicted state, x_t, mask ``b`` or None).
UpdateHook = Callable[[Any, Any, Tensor | None], None]


class FilterStep(NamedTuple):
    """The state at step t, the state predicted before, and the update with x_t (if any)."""

    state: Any
    predicted: Any
    observe: Callable[[Any], Any]


@runtime_checkable
class Filter(Protocol[S]):
    """Predict and update; every method is pure and returns a new state.

    Further capabilities are methods of other protocols: `Controlled`, `WithSensors`,
    `WithDiagnostics`, `WithCovariance`, `WithSample`, `Smoothable`, `HasLikelihood`, `Fused`,
    `ParallelInTime`, `FadingMemory`.
    """

    def init(self, batch: int, *, generator: Generator | None = None) -> S:
        """Return the initial state of ``batch`` recordings: the distribution of training states."""
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
class Controlled(Protocol):
    """A filter whose ``predict(state, *, control, generator=None)`` may need a control ``b k``."""

    @property
    def controlled(self) -> int:
        """Components k of the control; 0 for a filter of recordings without controls."""
        ...


@runtime_checkable
class WithSensors(Protocol):
    """A filter that may have a density for each sensor."""

    @property
    def allow_missing_sensors(self) -> bool:
        """Whether observations may hold NaN, where a sensor is missing."""
        ...


@runtime_checkable
class WithDiagnostics(Protocol):
    """A filter with diagnostics of its state."""

    def diagnostics(self, state: Any) -> dict[str, Tensor]:
        """Numbers ``b`` by name."""
        ...


@runtime_checkable
class WithCovariance(Protocol):
    """A filter with a covariance of its estimate."""

    def covariance(self, state: Any) -> Tensor | None:
        """Return the covariance ``b d d``; None from a wrapper of a filter without one."""
        ...


@runtime_checkable
class WithLogLikelihood(Protocol):
    """A filter with a density of its observations."""

    def log_likelihood(self, state: Any, obs: Tensor) -> Tensor | None:
        """log p(x_t | x_1, ..., x_{t-1}), ``b``, given the predicted state and x_t.

        None if the density is known up to a constant only, or from a wrapper around a filter
        without one.
        """
        ...


@runtime_checkable
class WithSample(Protocol):
    """A filter whose belief is a weighted sample, of any shape: two modes, skew, heavy tails."""

    def weighted_sample(self, state: Any) -> tuple[Tensor, Tensor] | None:
        """Return points ``b n d`` and weights ``b n``, non-negative with sum 1.

        A wrapper of a filter without a sample returns None.
        """
        ...


@runtime_checkable
class Smoothable(Protocol):
    """A filter that can be smoothed (`kbf.filters.smoothing`)."""

    def smoother(self) -> Backward:
        """The step back in time.

        Raises:
            ValueError: the filter has no smoother, for instance because its model has no transition
                density.
        """
        ...


@runtime_checkable
class HasLikelihood(Protocol):
    """A filter that reports whether an observation is possible under its prediction."""

    def observe(self, state: Any, obs: Tensor) -> tuple[Any, Tensor]:
        """Return what ``update`` returns and, ``b``, whether the observation was possible.

        The second value is True, or a positive finite number, where it was possible.

        The new state is undefined where the observation was not possible.
        """
        ...


class UpdateByObserve(Generic[S]):
    """A filter whose ``update`` is the first result of its ``observe`` (`HasLikelihood`)."""

    def observe(self, state: S, obs: Tensor) -> tuple[S, Tensor]:
        """Return the updated state and, ``b``, whether the observation was possible."""
        raise NotImplementedError

    def update(self, state: S, obs: Tensor) -> S:
        """Return the state updated with observations ``b *x``."""
        return self.observe(state, obs)[0]


@runtime_checkable
class Fused(Protocol):
    """A filter that may be faster when it predicts and updates in one."""

    def move_and_observe(self, state: Any, obs: Tensor) -> tuple[Any, Tensor] | None:
        """The same as ``observe(predict(state), obs)``; None where it is no faster."""
        ...


@runtime_checkable
class ParallelInTime(Protocol):
    """A filter that can compute all states of a sequence faster than step by step."""

    def recursion(self, state: Any, obs: Tensor) -> tuple[Any, Tensor] | None:
        """Return the states after each observation ``b T q``, and ``b T``, whether it was possible.

        Each part of a state has ``b T`` in front. States after an impossible observation are
        undefined. None if the recursion is not available from this state.
        """
        ...


@runtime_checkable
class FadingMemory(Protocol):
    """A filter without random numbers whose state does not depend on the distant past."""

    def forgets(self) -> int:
        """Return the number of observations after which this usually holds, to rounding.

        A wrong number costs time, but does not change results.
        """
        ...


@runtime_checkable
class FilterModel(Protocol):
    """A model that fits a filter to a memory of recordings.

    Kernel filters build their operators from the memory; a recurrent network returns itself.
    """

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select hyper-parameters on the training part: bandwidths, ridges, units. Before `fit`."""
        ...

    def fit(self, memory: Recording | list[Recording] | None) -> Filter[Any]:
        """A filter over the points of ``memory``."""
        ...


class WithoutHyperparameters(ShownModule):
    """A `FilterModel` that has no hyper-parameters to select."""

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Do nothing: `fit` does all."""


@runtime_checkable
class LossModel(Protocol):
    """A `FilterModel` trained by gradient on its own loss, for instance a log likelihood."""

    def loss(
        self,
        states: Tensor,
        obs: Tensor,
        mask: Tensor | None = None,
        controls: Tensor | None = None,
        *,
        burn_in: int = 0,
    ) -> Tensor:
        """The mean over windows ``b T`` and over time, but for the first ``burn_in`` steps."""
        ...


@runtime_checkable
class RatioModel(Protocol):
    """A model whose observations are density ratios (`kbf.densities.ratio`).

    ``ratio_dim`` is their number of components, 0 for other observations.
    """

    ratio_dim: int


@runtime_checkable
class WindowModel(Protocol):
    """A `FilterModel` trained by gradient with estimates of whole windows.

    Such a model may have an attribute ``own_encoder``, an image encoder that is fitted before the
    filter.
    """

    def window_estimates(
        self,
        memory: list[Recording],
        windows: Recording,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """The estimates ``b T d`` of a `rollout` of the filter over ``memory``, with gradients.

        Args:
            memory: recordings. windows: a batch ``b T``.
            change: random changes of images ``m *x``, for an encoder that learns along.
        """
        ...


@functools.cache
def offers(kind: type, protocol: type) -> bool:
    """Return whether a class has the methods of a protocol.

    Cached, since ``isinstance`` takes as long as a step.
    """
    return issubclass(kind, protocol)


def control_components(filter: Filter[Any]) -> int:
    """Components of the control that each move of the filter needs; 0 for none."""
    return int(filter.controlled) if isinstance(filter, Controlled) else 0


def allows_missing_sensors(filter: Any) -> bool:
    """Whether a filter or a model accepts observations with NaN, where a sensor is missing."""
    return isinstance(filter, WithSensors) and bool(filter.allow_missing_sensors)


def diagnostics_of(filter: Filter[Any], state: Any) -> dict[str, Tensor]:
    """The diagnostics of a state, ``b`` by name; empty for a filter without any."""
    return (
        cast(WithDiagnostics, filter).diagnostics(state)
        if offers(type(filter), WithDiagnostics)
        else {}
    )


def covariance_of(filter: Filter[Any], state: Any) -> Tensor | None:
    """Return the covariance ``b d d`` of the estimate; None for a filter without one."""
    return (
        cast(WithCovariance, filter).covariance(state)
        if offers(type(filter), WithCovariance)
        else None
    )


def log_likelihood_of(filter: Filter[Any], state: Any, obs: Tensor) -> Tensor | None:
    """Return log p(x_t | x_1, ..., x_{t-1}), ``b``; None for a filter without a density."""
    return (
        cast(WithLogLikelihood, filter).log_likelihood(state, obs)
        if offers(type(filter), WithLogLikelihood)
        else None
    )


def sample_of(filter: Filter[Any], state: Any) -> tuple[Tensor, Tensor] | None:
    """Return points ``b n d`` and weights ``b n`` of the belief; None for a filter of moments."""
    return (
        cast(WithSample, filter).weighted_sample(state)
        if offers(type(filter), WithSample)
        else None
    )


def check_controlled(filter: Filter[Any], controls: Tensor | None, lead: tuple[int, ...]) -> None:
    """Raise a ValueError unless controls are finite, ``*lead k``, and given where k > 0 only."""
    takes = control_components(filter)
    if controls is None:
        if takes:
            raise ValueError(
                "this filter was made from recordings with controls: "
                f"give it the {takes} of each step"
            )
        return
    if not takes:
        raise ValueError(
            f"{type(filter).__name__} takes no controls. Models that do, where their recordings "
            "have controls: "
            f"{', '.join(WITH_CONTROLS)}"
        )
    if controls.shape != (*lead, takes):
        raise ValueError(f"controls must be {(*lead, takes)}, got {tuple(controls.shape)}")
    check_finite(
        controls.flatten(0, -2), "controls", advice="A control is always known: fill them in."
    )


def move(
    filter: Filter[S],
    state: S,
    *,
    control: Float[Tensor, "b k"] | None = None,
    generator: Generator | None = None,
) -> S:
    """Predict, with a control ``b k`` for a filter that takes one."""
    if control is None:
        return filter.predict(state, generator=generator)
    return cast(Any, filter).predict(state, control=control, generator=generator)


def where(mask: Bool[Tensor, " b"], a: S, b: S) -> S:
    """The state of each track from ``a`` where the mask is True, from ``b`` elsewhere."""
    pick = [
        torch.where(mask.reshape(-1, *[1] * (u.ndim - 1)), u, v) for u, v in zip(a, b, strict=True)
    ]
    return cast(S, type(a)(*pick))


def smoother_of(filter: Filter[Any]) -> Backward:
    """Return the backward step of a filter.

    Raises:
        ValueError: a filter that has none: its state is no distribution, or its model has no
            density of a move.
    """
    if not isinstance(filter, Smoothable):
        raise ValueError(
            f"{type(filter).__name__} has no smoother. Models that have one: "
            f"{', '.join(WITH_SMOOTHER)}"
        )
    return filter.smoother()
