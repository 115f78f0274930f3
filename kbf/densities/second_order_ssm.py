"""State-space model learned from recordings, with the velocity in the state.

A position alone does not determine the next one; a position and its last change do. With
``order=2`` the state of the model is (z_t, z_t - z_{t-1}), and the change z_{t+1} - z_t is a
regression on both, and on the control. With ``order=1`` the state is z_t alone.

One-step residuals of smooth motion are tiny, and errors of the regression accumulate from step to
step: a filter that treats them as independent noise has far too small covariances and diverges.
``inflation`` widens the noise of the transitions; it is selected on held-out blocks
(`kbf.filters.kernel_monte_carlo.model.KernelMonteCarlo`), not from residuals.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.base import ConditionalDensity
from kbf.densities.fused_ridge import MergedMap
from kbf.densities.per_sensor import PerSensorDensity, SelectedSensors
from kbf.densities.ratio import RatioDensity, fit_state_density
from kbf.densities.ridge import Join, fit_ridge_map, join_of
from kbf.densities.selection import fit_density
from kbf.manifolds import FLAT, Manifold, manifold_of
from kbf.recording import Recording, as_recordings, check_vectors, observed_pairs
from kbf.rkhs.linalg import cholesky, evenly
from kbf.runtime.errors import FitError
from kbf.ssm import normal

# Pairs that a regression is fitted to; of more, evenly spaced ones.
MAX_PAIRS = 5000
# Features of the regression of changes: a step evaluates it at every particle.
RANK = 96
ORDERS = (1, 2)


class LaggedModel(NamedTuple):
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
    observation: MergedMap | ConditionalDensity | RatioDensity
    order: int
    extra: Tensor
    d: int
    manifold: Manifold = FLAT
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
        s: Float[Tensor, "*b e"],
        generator: Generator | None = None,
        *,
        control: Tensor | None = None,
    ) -> Float[Tensor, "*b e"]:
        """Draw the next state given this one and the control, which broadcasts."""
        u = s if self.join is None or control is None else self.join(s, control)
        z = s[..., : self.d]
        change = self.change.sample(u, generator)
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
    some = evenly(len(inputs), MAX_PAIRS, inputs.device)
    moves = MergedMap(fit_ridge_map(inputs[some], change[some], rank=RANK))
    seen, obs = (each.double() for each in observed_pairs(recordings))
    few = evenly(len(seen), MAX_PAIRS, seen.device)
    if not isinstance(density, str):
        observation = density.fit(seen, obs)
    elif density == "ratio":
        observation = RatioDensity(fit_state_density(seen))
    else:
        gaussian = density == "gaussian"
        observation = (
            MergedMap(fit_ridge_map(seen[few], obs[few], rank=RANK))
            if gaussian
            else fit_density(density, seen[few], obs[few])
        )
    states = torch.cat([s.states for s in recordings])
    none = torch.zeros_like(moves.noise)
    return widened(
        LaggedModel(moves, observation, order, none, states.shape[1], manifold_of(states), join),
        inflation,
    )


def widened(model: LaggedModel, inflation: float) -> LaggedModel:
    """The model whose transition noise is ``inflation`` >= 1 times as wide as one-step residuals.

    Residuals on a circle lie along it, in all directions in turn, and their covariance has half of
    their variance in each: what a draw has across the circle is projected away. There the variance
    of a draw is doubled.
    """
    along = torch.ones(model.d).to(model.change.noise)
    for start in model.manifold.circles:
        along[start : start + 2] = 2
    root = cholesky(model.change.noise)
    return model._replace(extra=(inflation**2 * along - 1).sqrt()[:, None] * root)
