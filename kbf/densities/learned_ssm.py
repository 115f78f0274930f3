"""State-space model learned from recordings: kernel ridge maps or other conditional densities.

The particle filter on it is `kbf.filters.particle.learned`, the Kernel Bayes Filter over draws from
it `kbf.filters.kernel.simulated_kbf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.base import ConditionalDensity
from kbf.densities.per_sensor import PerSensorDensity, SelectedSensors
from kbf.densities.ridge import Join, RidgeMap, fit_ridge_map, join_of
from kbf.densities.selection import Known, fit_density
from kbf.recording import Recording, as_recordings, check_vectors, moves, observed_pairs
from kbf.rkhs.linalg import evenly

# Pairs that a density is fitted to; of more, evenly spaced ones. It has too few features to gain
# from more.
MAX_PAIRS = 5000


class LearnedModel(NamedTuple):
    """A `kbf.ssm.StateSpace` of two densities: z' given z (and a control u), and x given z."""

    transition: RidgeMap | ConditionalDensity
    observation: RidgeMap | ConditionalDensity
    join: Join | None = None

    @property
    def controlled(self) -> int:
        """Components of the control."""
        return 0 if self.join is None else len(self.join.shift)

    @property
    def allow_missing_sensors(self) -> bool:
        """Whether observations may have NaN, for missing sensors."""
        return isinstance(self.observation, PerSensorDensity)

    def move(
        self,
        z: Float[Tensor, "*b d"],
        generator: Generator | None = None,
        *,
        control: Tensor | None = None,
    ) -> Float[Tensor, "*b d"]:
        """Draw z' given z and the control, which broadcasts."""
        return self.transition.sample(
            z if self.join is None or control is None else self.join(z, control), generator
        )

    def observe(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw x given z."""
        return self.observation.sample(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(x | z), up to a constant."""
        return self.observation.log_density(x, z)

    def log_transition(
        self,
        after: Float[Tensor, "*b d"],
        z: Float[Tensor, "*c d"],
        *,
        control: Tensor | None = None,
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(z' | z), or p(z' | z, u), up to a constant; z', z and u broadcast."""
        return self.transition.log_density(
            after, z if self.join is None or control is None else self.join(z, control)
        )


def learn_model(
    memory: Recording | list[Recording],
    densities: tuple[str, str | SelectedSensors] = ("gaussian", "gaussian"),
    known: Sequence[Known] = (),
) -> LearnedModel:
    """Fit both densities to the transitions and the observed points of a memory, in float64.

    Args:
        memory: the recordings.
        densities: names in `kbf.densities.selection.DENSITIES` for transitions and observations;
            "gaussian" is a kernel ridge map. The second may be the densities of sensors, where
            these may be missing (NaN).
        known: densities that are already fitted; they are not fitted again to the same points.

    Raises:
        ValueError: too few points, observations that are not vectors, or states or observations
            that do not vary.
    """
    recordings = as_recordings(memory, allow_missing_sensors=not isinstance(densities[1], str))
    check_vectors(recordings, "a learned observation map")
    source, target, u = moves(recordings)
    some = evenly(len(source), MAX_PAIRS, source.device)
    source, target, u = source[some], target[some], None if u is None else u[some]
    join = None if u is None else join_of(source, u)
    inputs = source if join is None or u is None else join(source, u)
    return LearnedModel(
        fit(densities[0], inputs, target, known),
        observation_density(densities[1], recordings, known),
        join,
    )


def observation_density(
    density: str | SelectedSensors, recordings: list[Recording], known: Sequence[Known] = ()
) -> Any:
    """Fit the density of observations, or that of each sensor.

    A density is fitted to at most `MAX_PAIRS` pairs, those of sensors to all readings.
    """
    seen, obs = observed_pairs(recordings)
    if not isinstance(density, str):
        return density.fit(seen, obs)
    few = evenly(len(seen), MAX_PAIRS, seen.device)
    return fit(density, seen[few], obs[few], known)


def fit(
    density: str,
    inputs: Float[Tensor, "n d"],
    outputs: Float[Tensor, "n q"],
    known: Sequence[Known] = (),
) -> Any:
    """Fit a density by its name: a `RidgeMap` or another `ConditionalDensity`."""
    for each in known:
        here = each.name == density and each.inputs.device == inputs.device
        if (
            here
            and torch.equal(each.inputs, inputs.double())
            and torch.equal(each.outputs, outputs.double())
        ):
            return each.density
    return (
        fit_ridge_map(inputs, outputs)
        if density == "gaussian"
        else fit_density(density, inputs, outputs)
    )
