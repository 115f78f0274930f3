"""Wrappers of filters that change units, encode images or add a diagnostic."""

from typing import Any

from jaxtyping import Shaped
from torch import Generator, Tensor

from kbf.filters.protocols import (
    Backward,
    Filter,
    FilterStep,
    allows_missing_sensors,
    control_components,
    covariance_of,
    diagnostics_of,
    log_likelihood_of,
    move,
    sample_of,
    smoother_of,
)
from kbf.runtime.html_repr import ShownModule


class FilterWrapper(ShownModule):
    """A filter that delegates to ``inner``; subclasses change observations, controls or outputs.

    The state is the inner filter's. A subclass overrides `observed` and `acted` for what goes in,
    and `estimate`, `covariance`, `weighted_sample` and `diagnostics` for what comes out; predict,
    update, step and smoother follow.
    """

    def __init__(self, inner: Filter[Any]) -> None:
        super().__init__()
        self.inner = inner
        self.controlled: int = control_components(inner)
        self.allow_missing_sensors: bool = allows_missing_sensors(inner)

    def observed(self, obs: Shaped[Tensor, "b *x"]) -> Tensor:
        """The observation as the inner filter takes it."""
        return obs

    def acted(self, control: Tensor) -> Tensor:
        """The control ``b k`` as the inner filter takes it."""
        return control

    def init(self, batch: int, *, generator: Generator | None = None) -> Any:
        """The inner filter's start."""
        return self.inner.init(batch, generator=generator)

    def predict(
        self, state: Any, *, control: Tensor | None = None, generator: Generator | None = None
    ) -> Any:
        """Move."""
        return move(
            self.inner,
            state,
            control=None if control is None else self.acted(control),
            generator=generator,
        )

    def update(self, state: Any, obs: Shaped[Tensor, "b *x"]) -> Any:
        """Observe."""
        return self.inner.update(state, self.observed(obs))

    def estimate(self, state: Any) -> Tensor:
        """The inner filter's, ``b d``."""
        return self.inner.estimate(state)

    def diagnostics(self, state: Any) -> dict[str, Tensor]:
        """The inner filter's; empty if it has none."""
        return diagnostics_of(self.inner, state)

    def covariance(self, state: Any) -> Tensor | None:
        """The inner filter's, ``b d d``; None if it has none."""
        return covariance_of(self.inner, state)

    def log_likelihood(self, state: Any, obs: Shaped[Tensor, "b *x"]) -> Tensor | None:
        """The inner filter's, ``b``; None if it has none."""
        return log_likelihood_of(self.inner, state, self.observed(obs))

    def weighted_sample(self, state: Any) -> tuple[Tensor, Tensor] | None:
        """The inner filter's, ``b n d`` and ``b n``; None if it has none."""
        return sample_of(self.inner, state)

    def smoother(self) -> Backward:
        """The inner filter's, with controls as it takes them."""
        inner = smoother_of(self.inner)

        def step_back(
            now: FilterStep,
            following: Any,
            *,
            control: Tensor | None = None,
            generator: Generator | None = None,
        ) -> Any:
            return inner(
                now,
                following,
                control=None if control is None else self.acted(control),
                generator=generator,
            )

        return step_back


def innermost(filter: Filter[Any], obs: Shaped[Tensor, "b *x"]) -> tuple[Filter[Any], Tensor]:
    """The filter behind all wrappers, and the observation as it takes it."""
    while isinstance(filter, FilterWrapper):
        obs, filter = filter.observed(obs), filter.inner
    return filter, obs
