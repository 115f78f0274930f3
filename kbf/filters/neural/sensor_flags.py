"""Missing sensors as inputs of a network: the mean in place of a missing value, and a flag.

The network sees (x, f) ``2 q``: f is 1 where the sensor was read and 0 where it is missing, and x
is then the mean of the training recordings. To carry the last value forward instead would hide that
nothing was read: recurrent networks remember it themselves.

References: Che et al. (2018), Recurrent Neural Networks for Multivariate Time Series with Missing
Values, section 2.2, GRU-simple.
"""

from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.protocols import (
    Filter,
    HasLikelihood,
    UpdateByObserve,
    control_components,
    covariance_of,
    move,
)
from kbf.recording import Recording, observed


class SensorFlags(NamedTuple):
    """What the recordings of a network contain of each sensor.

    Attributes:
        mean: ``q``, of the values that were read; 0 for a sensor that was never read.
        fails: ``q``, whether values are missing. The flag of other sensors is 1 even where one is
            missing later, since the network has not learned what a 0 means.
    """

    mean: Float[Tensor, " q"]
    fails: Bool[Tensor, " q"]

    @staticmethod
    def of(recordings: list[Recording]) -> "SensorFlags":
        """Return those of recordings ``T q``; steps without any observation do not count."""
        obs = torch.cat([each.obs[seen_steps(each)] for each in recordings])
        return SensorFlags(obs.nanmean(0).nan_to_num(), obs.isnan().any(0))

    def inputs(self, obs: Float[Tensor, "*b q"]) -> Float[Tensor, "*b two_q"]:
        """Return (x, f) of observations with NaN.

        >>> flags = SensorFlags(torch.tensor([5.0, 6.0]), torch.tensor([True, False]))
        >>> flags.inputs(torch.tensor([[1.0, torch.nan], [torch.nan, 2.0]]))
        tensor([[1., 6., 1., 1.],
                [5., 2., 0., 1.]])
        """
        missing = obs.isnan()
        read = ~(missing & self.fails)
        return torch.cat([torch.where(missing, self.mean.to(obs), obs), read.to(obs)], -1)

    def recording(self, recording: Recording) -> Recording:
        """Return the recording with (x, f) as observations; its mask leaves out empty steps."""
        seen = seen_steps(recording)
        mask = recording.mask if bool(seen.all()) else seen
        return recording._replace(obs=self.inputs(recording.obs), mask=mask)


def seen_steps(recording: Recording) -> Bool[Tensor, " T"]:
    """Return the steps at which at least one sensor was read."""
    return ~observed(recording).isnan().all(1)


class FlaggedFilter(UpdateByObserve[Any]):
    """A filter of observations (x, f) as one of observations with NaN; its state is the same."""

    allow_missing_sensors: bool = True

    def __init__(self, inner: Filter[Any], flags: SensorFlags) -> None:
        """``inner``: fitted to recordings of these flags (`SensorFlags.recording`)."""
        self.inner: Filter[Any] = inner
        self.flags: SensorFlags = flags
        self.controlled: int = control_components(inner)

    def init(self, batch: int, *, generator: Generator | None = None) -> Any:
        """Return the initial state of the inner filter."""
        return self.inner.init(batch, generator=generator)

    def predict(
        self, state: Any, *, control: Tensor | None = None, generator: Generator | None = None
    ) -> Any:
        """Move the inner state."""
        return move(self.inner, state, control=control, generator=generator)

    def observe(self, state: Any, obs: Float[Tensor, "b q"]) -> tuple[Any, Tensor]:
        """Return the updated state, and whether the observation was possible.

        A row without any value is no observation.
        """
        inner = cast(HasLikelihood, self.inner)
        updated, possible = inner.observe(state, self.flags.inputs(obs))
        return updated, possible & ~obs.isnan().all(-1)

    def estimate(self, state: Any) -> Float[Tensor, "b d"]:
        """Return the inner filter's, ``b d``."""
        return self.inner.estimate(state)

    def covariance(self, state: Any) -> Float[Tensor, "b d d"] | None:
        """Return the inner filter's, ``b d d``; None if it has none."""
        return covariance_of(self.inner, state)
