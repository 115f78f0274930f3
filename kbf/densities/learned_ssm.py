"""State-space models learned from recordings, of first order or with the velocity in the state.

`LearnedModel` consists of two conditional densities, of the next state and of the observation. The
particle filter on it is `kbf.filters.particle.learned`, the Kernel Bayes Filter over draws from it
`kbf.filters.kernel.simulated_kbf`.

`LaggedModel` is that of `kbf.filters.kernel_monte_carlo`. A position alone does not determine the
next one; a position and its last change do. With ``order=2`` its state is (z_t, z_t - z_{t-1}), and
the change z_{t+1} - z_t is a regression on both, and on the control. With ``order=1`` the state is
z_t alone.

One-step residuals of smooth motion are tiny, and errors of the regression accumulate from step to
step: a filter that treats them as independent noise has far too small covariances and diverges.
``inflation`` widens the noise of the transitions; it is selected on held-out blocks
(`kbf.filters.kernel_monte_carlo.model.KernelMonteCarlo`), not from residuals.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.fused_ridge import MergedMap
from kbf.densities.per_sensor import PerSensorDensity, SelectedSensors
from kbf.densities.ratio import RatioDensity, fit_state_density
from kbf.densities.ridge import Join, RidgeMap, fit_ridge_map, join_of
from kbf.densities.selection import Known, fit_density, fit_like
from kbf.manifolds import FLAT, Manifold, manifold_of
from kbf.recording import Recording, as_recordings, check_vectors, moves, observed_pairs
from kbf.rkhs.linalg import cholesky, some_rows
from kbf.runtime.errors import FitError
from kbf.ssm import normal

# Pairs that a density is fitted to; of more, drawn ones. It has too few features to gain
# from more.
MAX_PAIRS = 5000
# Features of the regression of changes: a step evaluates it at every particle.
CHANGE_FEATURES = 96
ORDERS = (1, 2)


class LearnedStateSpace:
    """Base class of learned models: controls as inputs, and sensors that may be missing.

    Attributes:
        observation: density of x given z.
        join: state and control as one input; None without controls.
    """

    observation: Any
    join: Join | None

    @property
    def controlled(self) -> int:
        """Components of the control."""
        return 0 if self.join is None else len(self.join.shift)

    @property
    def allow_missing_sensors(self) -> bool:
        """Whether observations may have NaN, for missing sensors."""
        return isinstance(self.observation, PerSensorDensity)

    def joined(self, z: Float[Tensor, "*b d"], control: Tensor | None) -> Float[Tensor, "*b e"]:
        """Return the state and the control, which broadcasts, as the input of a transition."""
        return z if self.join is None or control is None else self.join(z, control)


@dataclass(frozen=True)
class LearnedModel(LearnedStateSpace):
    """A `kbf.ssm.StateSpace` of two densities: z' given z (and a control u), and x given z.

    Attributes:
        transition, observation: `ConditionalDensity`; a `RidgeMap` if they are Gaussian.
        join: state and control as one input; None without controls.
    """

    transition: Any
    observation: Any
    join: Join | None = None

    def move(
        self,
        z: Float[Tensor, "*b d"],
        generator: Generator | None = None,
        *,
        control: Tensor | None = None,
    ) -> Float[Tensor, "*b d"]:
        """Draw z' given z and the control, which broadcasts."""
        return self.transition.sample(self.joined(z, control), generator)

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
        return self.transition.log_density(after, self.joined(z, control))

    def merged(self) -> "LearnedModel":
        """Return the model whose Gaussian densities are evaluated by one product of matrices."""
        return LearnedModel(merged(self.transition), merged(self.observation), self.join)


@dataclass(frozen=True)
class LaggedModel(LearnedStateSpace):
    """A `kbf.ssm.StateSpace` (without log p(z' | z)) of states (z_t) or (z_t, z_t - z_{t-1}).

    Attributes:
        change: density of z_{t+1} - z_t given the state and the control.
        observation: density of x given z.
        order: 1 or 2.
        extra: ``d d``, a root of the covariance that is added to the noise of transitions.
        d: components of z.
        manifold: of z; transitions are projected onto it.
        join: state and control as one input; None without controls.
    """

    change: MergedMap
    observation: Any
    order: int
    extra: Tensor
    d: int
    manifold: Manifold = FLAT
    join: Join | None = None

    def move(
        self,
        s: Float[Tensor, "*b e"],
        generator: Generator | None = None,
        *,
        control: Tensor | None = None,
    ) -> Float[Tensor, "*b e"]:
        """Draw the next state given this one and the control, which broadcasts."""
        z = s[..., : self.d]
        change = self.change.sample(self.joined(s, control), generator)
        change = change + normal(change, generator) @ self.extra.to(change).mT
        after = self.manifold.project(z + change)
        return after if self.order == 1 else torch.cat([after, after - z], -1)

    def observe(
        self, s: Float[Tensor, "*b e"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw x given the state.

        For several draws of one state (``s`` expanded) the regression is evaluated once.
        """
        z = s[..., : self.d]
        if not isinstance(self.observation, MergedMap) or z.ndim < 2 or z.stride(-2) != 0:
            return self.observation.sample(z, generator)
        mean, scale = self.observation.predict(z[..., :1, :])
        white = normal(mean.new_empty(*z.shape[:-1], len(self.observation.root)), generator)
        return self.observation.displaced(
            mean.expand(*z.shape[:-1], -1), scale.expand(z.shape[:-1]), white
        )

    def log_likelihood(
        self, x: Float[Tensor, "*b q"], s: Float[Tensor, "*c e"]
    ) -> Float[Tensor, "*f"]:
        """The logarithm of p(x | z), up to a constant."""
        return self.observation.log_density(x, s[..., : self.d])


def merged(density: Any) -> Any:
    """Return a Gaussian density, or those of sensors, as `MergedMap`; others are returned."""
    if isinstance(density, PerSensorDensity):
        return density._replace(densities=tuple(map(merged, density.densities)))
    return MergedMap(density) if isinstance(density, RidgeMap) else density


def learn_model(
    memory: Recording | list[Recording],
    densities: tuple[str, str | SelectedSensors] = ("gaussian", "gaussian"),
    known: Sequence[Known] = (),
    selections: Sequence[tuple[int, ...]] = (),
) -> LearnedModel:
    """Fit both densities to the transitions and the observed points of a memory, in float64.

    Args:
        memory: the recordings.
        densities: names in `kbf.densities.selection.DENSITIES` for transitions and observations;
            "gaussian" is a kernel ridge map. The second may be the densities of sensors, where
            these may be missing (NaN).
        known: densities that are already fitted; they are not fitted again to the same points.
        selections: of Gaussian densities fitted earlier (`RidgeMap.selection`).

    Raises:
        ValueError: too few points, observations that are not vectors, or states or observations
            that do not vary.
    """
    recordings = as_recordings(memory, allow_missing_sensors=not isinstance(densities[1], str))
    check_vectors(recordings, "a learned observation map")
    source, target, u = moves(recordings)
    some = some_rows(len(source), MAX_PAIRS, source.device)
    source, target, u = source[some], target[some], None if u is None else u[some]
    join = None if u is None else join_of(source, u)
    inputs = source if join is None or u is None else join(source, u)
    return LearnedModel(
        fit(densities[0], inputs, target, known, selections),
        observation_density(densities[1], recordings, known, selections),
        join,
    )


def observation_density(
    density: str | SelectedSensors,
    recordings: list[Recording],
    known: Sequence[Known] = (),
    selections: Sequence[tuple[int, ...]] = (),
) -> Any:
    """Fit the density of observations, or that of each sensor.

    A density is fitted to at most `MAX_PAIRS` pairs, those of sensors to all readings.
    """
    seen, obs = observed_pairs(recordings)
    if not isinstance(density, str):
        return density.fit(seen, obs)
    few = some_rows(len(seen), MAX_PAIRS, seen.device)
    return fit(density, seen[few], obs[few], known, selections)


def fit(
    density: str,
    inputs: Float[Tensor, "n d"],
    outputs: Float[Tensor, "n q"],
    known: Sequence[Known] = (),
    selections: Sequence[tuple[int, ...]] = (),
) -> Any:
    """Fit a density by its name: a `RidgeMap` or another `ConditionalDensity`."""
    if (found := fit_like(known, density, inputs, outputs)) is not None:
        return found
    return (
        fit_ridge_map(inputs, outputs, known=selections)
        if density == "gaussian"
        else fit_density(density, inputs, outputs)
    )


def lagged_states(states: Float[Tensor, "T d"], order: int) -> Float[Tensor, "t e"]:
    """The model's states of a recording, from step 1 (order 1) or step 2 (order 2) on."""
    return states if order == 1 else torch.cat([states[1:], states[1:] - states[:-1]], -1)


def all_states(recordings: list[Recording], order: int) -> Float[Tensor, "n e"]:
    """Those of several recordings."""
    return torch.cat([lagged_states(s.states, order) for s in recordings])


def learn_lagged_model(
    memory: Recording | list[Recording],
    *,
    order: int = 2,
    inflation: float = 1.0,
    density: str | SelectedSensors = "gaussian",
    known: Sequence[Known] = (),
    observation: Any = None,
) -> LaggedModel:
    """Fit the regression of changes and the density of observations, in float64.

    Args:
        memory: the recordings.
        order: 1 or 2.
        inflation: standard deviation of the transition noise over that of one-step residuals, at
            least 1.
        density: of observations given states: a name in `kbf.densities.selection.DENSITIES`; the
            densities of sensors that may be missing; or "ratio", for observations that are density
            ratios (`kbf.densities.ratio`).
        known: densities of observations that are already fitted, as of `learn_model`.
        observation: that of a model of the same recordings and density; None fits it.

    Raises:
        ValueError: another order or inflation, no recording of ``order`` + 1 steps, or as
            `kbf.densities.ridge.fit_ridge_map`.
    """
    if order not in ORDERS or not inflation >= 1:
        raise ValueError(
            "a lagged model has order 1 or 2 and an inflation of at least 1, "
            f"got {order} and {inflation}"
        )
    recordings = as_recordings(memory, allow_missing_sensors=not isinstance(density, str))
    check_vectors(recordings, "a learned observation density")
    long = [s for s in recordings if len(s.states) > order]
    if not long:
        raise FitError(f"a model of order {order} needs a recording of at least {order + 1} steps")
    before = torch.cat([lagged_states(s.states[:-1], order) for s in long]).double()
    change = torch.cat([s.states[order:] - s.states[order - 1 : -1] for s in long]).double()
    acted = [s.controls[order:] for s in long if s.controls is not None]
    controls = torch.cat(acted).double() if acted else None
    join = None if controls is None else join_of(before, controls)
    inputs = before if join is None or controls is None else join(before, controls)
    some = some_rows(len(inputs), MAX_PAIRS, inputs.device)
    changes = MergedMap(fit_ridge_map(inputs[some], change[some], rank=CHANGE_FEATURES))
    if observation is None:
        observation = lagged_observation(density, recordings, known)
    states = torch.cat([s.states for s in recordings])
    none, d = torch.zeros_like(changes.noise), states.shape[1]
    model = LaggedModel(changes, observation, order, none, d, manifold_of(states), join)
    return widened(model, inflation)


def lagged_observation(
    density: str | SelectedSensors, recordings: list[Recording], known: Sequence[Known]
) -> Any:
    """Fit the density of observations of `learn_lagged_model`."""
    seen, obs = (each.double() for each in observed_pairs(recordings))
    if density == "ratio":
        return RatioDensity(fit_state_density(seen))
    if density == "gaussian":
        few = some_rows(len(seen), MAX_PAIRS, seen.device)
        return MergedMap(fit_ridge_map(seen[few], obs[few], rank=CHANGE_FEATURES))
    return merged(observation_density(density, recordings, known))


def widened(model: LaggedModel, inflation: float) -> LaggedModel:
    """The model whose transition noise is ``inflation`` >= 1 times as wide as one-step residuals.

    Residuals on a circle are tangential, and their covariance over all headings has half of their
    variance in each component. The projection removes the radial part of a draw. The variance of a
    draw is therefore doubled there.
    """
    along = torch.ones(model.d).to(model.change.noise)
    for start in model.manifold.circles:
        along[start : start + 2] = 2
    root = cholesky(model.change.noise)
    return replace(model, extra=(inflation**2 * along - 1).sqrt()[:, None] * root)
