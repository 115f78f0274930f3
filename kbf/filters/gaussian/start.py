"""`StartingFilter`: a Gaussian filter whose first observation meets the recorded states.

Before the first observation the belief is the empirical distribution of the recorded states z_i,
not N(m0, P0). With l_i = p(x | z_i) and w_i proportional to l_i^a, the states are moved to their
weighted moments N(m, P), and the update of the Gaussian filter with p(x | z)^(1 - a) completes
p(x | z). The power a is the largest for which the effective number of states is at least
`MIN_EFFECTIVE_STATES`: a few near states have no reliable covariance.
"""

import copy
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.densities.base import LOG_2PI
from kbf.filters.gaussian.moments import GaussianState, leave_out_missing
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.protocols import Backward, FilterStep, UpdateByObserve
from kbf.rkhs.linalg import evenly
from kbf.runtime.html_repr import Shown
from kbf.ssm import StateSpaceModel

# Effective number of recorded states whose moments are taken.
MIN_EFFECTIVE_STATES = 50.0
# Recorded states that the first observation is compared with; of more, evenly spaced ones.
MAX_STATES = 3000
# Halvings of the interval (0, 1) that contains the power.
BISECTIONS = 20


class StartingState(NamedTuple):
    """mean ``b d``, cov ``b d d``; waiting ``b``, 1 before the first observation and 0 after it."""

    mean: Tensor
    cov: Tensor
    waiting: Tensor


class StartingFilter(UpdateByObserve[StartingState], Shown):
    """The UKF of a model, except for the first observation of a recording."""

    def __init__(self, inner: UnscentedKalmanFilter, states: Float[Tensor, "n d"]) -> None:
        """Keep the filter and the recorded states."""
        self.inner: UnscentedKalmanFilter = inner
        self.states: Tensor = states[evenly(len(states), MAX_STATES, states.device)]
        self.expected: Tensor = inner.model.h(self.states)
        self.controlled: int = inner.controlled
        self.allow_missing_sensors: bool = inner.allow_missing_sensors

    def with_inner(self, inner: UnscentedKalmanFilter) -> "StartingFilter":
        """Return the filter with another inner filter of the same observation map."""
        changed = copy.copy(self)
        changed.inner = inner
        return changed

    @property
    def model(self) -> StateSpaceModel:
        """The model of the inner filter."""
        return self.inner.model

    def init(self, batch: int, *, generator: Generator | None = None) -> StartingState:
        """Return the moments of the recorded states, waiting for an observation."""
        moments = self.inner.init(batch)
        return StartingState(*moments, torch.ones_like(moments.mean[:, 0]))

    def predict(
        self,
        state: StartingState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> StartingState:
        """Return the inner filter's prediction."""
        moments = self.inner.predict(GaussianState(state.mean, state.cov), control=control)
        return StartingState(*moments, state.waiting)

    def observe(
        self, state: StartingState, obs: Float[Tensor, "b q"]
    ) -> tuple[StartingState, Bool[Tensor, " b"]]:
        """Return the inner filter's update; that of the recorded states where the state waits."""
        moments, possible = self.inner.observe(GaussianState(state.mean, state.cov), obs)
        waiting = state.waiting * (~obs.isfinite().any(-1)).to(state.waiting)
        if not torch.compiler.is_compiling() and not bool((state.waiting > 0).any()):
            return StartingState(*moments, waiting), possible
        first, first_possible = self.first_update(obs)
        here = state.waiting > 0
        return (
            StartingState(
                torch.where(here[:, None], first.mean, moments.mean),
                torch.where(here[:, None, None], first.cov, moments.cov),
                waiting,
            ),
            torch.where(here, first_possible, possible),
        )

    def first_update(self, obs: Float[Tensor, "b q"]) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Return the moments of the recorded states given x, and whether x was possible."""
        logs = self.log_likelihoods(obs)
        power = tempering(logs, min(MIN_EFFECTIVE_STATES, 0.5 * len(self.states)))
        weights = (power[:, None] * logs).softmax(-1)
        mean = weights @ self.states
        centred = self.states - mean[:, None]
        cov = (weights[..., None] * centred).mT @ centred
        rest = 1 / (1 - power).clamp_min(torch.finfo(obs.dtype).eps)
        return self.inner.observe(GaussianState(mean, cov), obs, noise=rest)

    def log_likelihoods(self, obs: Float[Tensor, "b q"]) -> Float[Tensor, "b n"]:
        """Return log N(x; h(z_i), R) of the available components, for each recorded state."""
        residual = obs[:, None] - self.expected
        _, _, R = leave_out_missing(obs, torch.zeros_like(obs[0])[:, None], self.model.R)
        factor = torch.linalg.cholesky(R)
        seen = torch.where(residual.isfinite(), residual, 0)
        white = torch.linalg.solve_triangular(factor, seen.mT, upper=False)
        scale = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * LOG_2PI * obs.shape[1]
        missing = 0.5 * LOG_2PI * (~obs.isfinite()).sum(-1)
        return -0.5 * white.square().sum(-2) - (scale - missing)[:, None]

    def log_likelihood(
        self, state: StartingState, obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, " b"]:
        """Return the inner filter's; log mean_i p(x | z_i) where the state waits."""
        density = self.inner.log_likelihood(GaussianState(state.mean, state.cov), obs)
        if not bool((state.waiting > 0).any()):
            return density
        first = self.log_likelihoods(obs).logsumexp(-1) - math.log(len(self.states))
        return torch.where(state.waiting > 0, first, density)

    def estimate(self, state: StartingState) -> Float[Tensor, "b d"]:
        """Return the mean, ``b d``."""
        return state.mean

    def covariance(self, state: StartingState) -> Float[Tensor, "b d d"]:
        """Return the covariance, ``b d d``."""
        return state.cov

    def smoother(self) -> Backward:
        """Return the inner filter's step back in time."""

        def step_back(
            now: FilterStep,
            following: StartingState,
            *,
            control: Tensor | None = None,
            generator: Generator | None = None,
        ) -> StartingState:
            state = now.state
            moments = self.inner.step_back(
                FilterStep(GaussianState(state.mean, state.cov), now.predicted, now.observe),
                GaussianState(following.mean, following.cov),
                control=control,
            )
            return StartingState(*moments, state.waiting)

        return step_back


def tempering(logs: Float[Tensor, "b n"], effective: float) -> Float[Tensor, " b"]:
    """Return the largest power a in [0, 1] for which weights l_i^a have so many effective states.

    By bisection: (sum w)^2 / sum w^2 falls with a.
    """

    def enough(a: Tensor) -> Tensor:
        w = (a[:, None] * logs).softmax(-1)
        return w.square().sum(-1).reciprocal() >= effective

    low, high = torch.zeros_like(logs[:, 0]), torch.ones_like(logs[:, 0])
    whole = enough(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        suits = enough(middle)
        low, high = torch.where(suits, middle, low), torch.where(suits, high, middle)
    return torch.where(whole, 1.0, low)
