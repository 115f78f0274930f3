"""`StartingFilter`: a Gaussian filter whose first update uses the recorded states.

Before the first observation the belief is the empirical distribution of the recorded states z_i,
not N(m0, P0). With l_i = p(x | z_i) and w_i proportional to l_i^a, the states are moved to their
weighted moments N(m, P), and the update of the Gaussian filter with p(x | z)^(1 - a) completes
p(x | z). The power a is the largest for which the effective number of states is at least
`MIN_EFFECTIVE_STATES`: a few near states have no reliable covariance.

Where there are many recordings, the first states of these have half of the probability before the
first observation, and all states the other half: recordings may start in places of their own.
"""

import copy
import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.densities.base import LOG_2PI
from kbf.filters.gaussian.count_maps import log_slope, stabilised
from kbf.filters.gaussian.moments import (
    GaussianState,
    leave_out_missing,
    log_densities,
)
from kbf.filters.gaussian.sensor_laws import Faults, no_faults
from kbf.filters.gaussian.ukf import Linearised, UnscentedKalmanFilter, scaled
from kbf.filters.protocols import Backward, FilterStep, UpdateByObserve
from kbf.rkhs.linalg import product, psd_solve, some_rows
from kbf.runtime.branches import computes_all_branches
from kbf.runtime.html_repr import Shown
from kbf.ssm import StateSpaceModel

# Effective number of recorded states whose moments are taken.
MIN_EFFECTIVE_STATES = 50.0
# First states of recordings, and the number of them for each component of the state, from which on
# they have half of the probability.
MIN_FIRST_STATES = 10
MIN_FIRST_STATES_PER_COMPONENT = 4
# Recorded states that the first observation is compared with; of more, some that are drawn.
MAX_STATES = 3000
# Times that the probabilities of all sensors are computed in turn.
ROUNDS_OF_FAULTS = 4
# How much more probable readings must be given the recorded states than given a belief by which
# most sensors fail, for this belief to count as lost.
MIN_RATIO_OF_LOST = 3.0
# Least probability that a sensor works, in the update: the noise stays finite.
MIN_PROBABILITY = 1e-6
# Share of the mean variance that is added to each component of the first covariance: former states
# equal the first one where all weight is on the beginnings of recordings.
MIN_VARIANCE = 1e-10
# Halvings of the interval (0, 1) that contains the power.
BISECTIONS = 20


class StartingState(NamedTuple):
    """State of a `StartingFilter`.

    Attributes:
        mean: ``b e``. cov: ``b e e``.
        waiting: ``b``, 1 before the first observation and 0 after it.
        works: ``b q``, the probability that each sensor works.
    """

    mean: Tensor
    cov: Tensor
    waiting: Tensor
    works: Tensor


class Prepared(NamedTuple):
    """What an update and a log likelihood of a `StartingFilter` have in common.

    Attributes:
        obs: ``b q``, with stable counts.
        linearised: the observation map at the state.
        works: ``b q``, the probability that each sensor works.
        noise: ``b q``, factors of the variances of sensors; None without faults.
    """

    obs: Tensor
    linearised: Linearised
    works: Tensor
    noise: Tensor | None


class StartingFilter(UpdateByObserve[StartingState], Shown):
    """The UKF of a model, except for the first observation of a recording and for faults.

    The variance of the noise of a sensor that may fail is divided by the probability that it works.
    """

    def __init__(
        self,
        inner: UnscentedKalmanFilter,
        states: Float[Tensor, "n e"],
        *,
        d: int | None = None,
        faults: Faults | None = None,
        counts: Bool[Tensor, " q"] | None = None,
        missing: bool | None = None,
        first: Float[Tensor, "k e"] | None = None,
    ) -> None:
        """Keep the filter and the recorded states.

        Args:
            inner: of the model.
            states: recorded states of the model.
            d: the first components, which are estimated; None for all.
            faults: of the sensors; None if they always work.
            counts: columns of observations whose square roots the model is of; None for none.
            missing: whether observations may hold NaN; None for what ``inner`` allows.
            first: the first state of each recording; None if they are not known.
        """
        self.inner: UnscentedKalmanFilter = inner
        self.d: int = states.shape[1] if d is None else d
        self.faults: Faults = no_faults(len(inner.model.R)) if faults is None else faults
        self.sensors_fail: bool = self.faults.any
        self.counts: Tensor = torch.zeros(len(inner.model.R)).bool() if counts is None else counts
        some = states[some_rows(len(states), MAX_STATES, states.device)]
        least = max(MIN_FIRST_STATES, MIN_FIRST_STATES_PER_COMPONENT * self.d)
        first = some[:0] if first is None or len(first) < least else first[:MAX_STATES]
        self.states: Tensor = torch.cat([first, some])
        half = 0.5 if len(first) else 1.0
        shares = [torch.full((len(some),), half / len(some))]
        if len(first):
            shares.insert(0, torch.full((len(first),), half / len(first)))
        self.log_prior: Tensor = torch.cat(shares).to(states).log()
        self.effective: float = min(MIN_EFFECTIVE_STATES, 0.5 * (len(first) or len(some)))
        self.expected: Tensor = inner.model.h(self.states)
        self.controlled: int = inner.controlled
        self.allow_missing_sensors: bool = (
            inner.allow_missing_sensors if missing is None else missing
        )

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
        working = moments.mean.new_ones(batch, len(self.faults.enter))
        return StartingState(*moments, torch.ones_like(moments.mean[:, 0]), working)

    def predict(
        self,
        state: StartingState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> StartingState:
        """Return the inner filter's prediction."""
        moments = self.inner.predict(GaussianState(state.mean, state.cov), control=control)
        works = self.faults.predict(state.works) if self.sensors_fail else state.works
        return StartingState(*moments, state.waiting, works)

    def observe(
        self, state: StartingState, obs: Float[Tensor, "b q"]
    ) -> tuple[StartingState, Bool[Tensor, " b"]]:
        """Return the inner filter's update; that of the recorded states where the state waits.

        References: Minka (2001), section 3.2, for the probabilities that sensors work.
        """
        return self.updated(state, self.prepared(state, obs))

    def observe_with_density(
        self, state: StartingState, obs: Float[Tensor, "b q"]
    ) -> tuple[StartingState, Bool[Tensor, " b"], Float[Tensor, " b"]]:
        """Return `observe` and `log_likelihood`, computed together."""
        known = self.prepared(state, obs)
        return *self.updated(state, known), self.density(state, obs, known)

    def prepared(self, state: StartingState, obs: Float[Tensor, "b q"]) -> Prepared:
        """Return what update and density have in common."""
        linearised = self.inner.linearised(GaussianState(state.mean, state.cov))
        x = stabilised(obs, self.counts)
        if not self.sensors_fail:
            return Prepared(x, linearised, state.works, None)
        works = self.working(linearised, state.works, x)
        return Prepared(x, linearised, works, 1 / works.clamp_min(MIN_PROBABILITY))

    def updated(
        self, state: StartingState, known: Prepared
    ) -> tuple[StartingState, Bool[Tensor, " b"]]:
        """Return `observe` of what was prepared."""
        obs, works = known.obs, known.works
        first = obs
        if known.noise is not None:
            first = torch.where(works < 0.5, torch.nan, obs)
        moments, possible = self.inner.observe(
            GaussianState(state.mean, state.cov),
            obs,
            noise=known.noise,
            linearised=known.linearised,
        )
        if known.noise is not None:
            possible = possible & ~self.lost(state, obs, works)
        waiting = state.waiting * (~obs.isfinite().any(-1)).to(state.waiting)
        if not computes_all_branches() and not bool((state.waiting > 0).any()):
            return StartingState(*moments, waiting, works), possible
        started, first_possible = self.first_update(first)
        here = state.waiting > 0
        return (
            StartingState(
                torch.where(here[:, None], started.mean, moments.mean),
                torch.where(here[:, None, None], started.cov, moments.cov),
                waiting,
                works,
            ),
            (here & first_possible) | (~here & possible),  # ONNX selects no truth values
        )

    def working(
        self, linearised: Linearised, prior: Float[Tensor, "b q"], obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, "b q"]:
        """Return the probability that each sensor works, given the reading and all others.

        The reading of a sensor is compared with its prediction from those of the others, by their
        probabilities, a few times in turn: sensors that agree outvote the one that does not.
        """
        _, H, c, Omega = linearised
        residual, H, R = leave_out_missing(obs - c, H, Omega + self.inner.model.R)
        variances = R.diagonal(dim1=-2, dim2=-1)
        works, G = torch.ones_like(prior), product(H, H.mT)
        seen = torch.where(obs.isfinite(), obs, torch.nan)
        odds = self.faults.odds(prior, seen)
        for _ in range(ROUNDS_OF_FAULTS):
            noise = 1 / works.clamp_min(MIN_PROBABILITY)
            scaled_R = scaled(R, noise)
            K = psd_solve(G + scaled_R, G).mT  # of the predicted readings
            spread = (K * scaled_R).sum(-1)
            kept = 1 - spread / (noise * variances)  # of a prediction without the sensor itself
            left = (residual - product(K, residual[..., None])[..., 0]) / kept
            works = self.faults.update(prior, seen, seen - left, spread / kept + variances, odds)
        return works

    def lost(
        self, state: StartingState, obs: Float[Tensor, "b q"], works: Float[Tensor, "b q"]
    ) -> Bool[Tensor, " b"]:
        """Return whether a wrong belief explains why most sensors seem to fail, all at once.

        Their readings have no effect, so that a wrong belief would stay wrong. It counts as lost
        if the density of the readings given the recorded states, mean_i prod_j p(x_j | z_i), is
        at least `MIN_RATIO_OF_LOST` times the largest possible one given this belief: U(x_j) of
        failed sensors times N(h_j; h_j, R_jj) of the others.
        """
        seen, fails = obs.isfinite(), works < 0.5
        failed = (seen & fails).sum(-1)
        silent = (failed > 1) & (2 * failed > seen.sum(-1)) & (state.waiting == 0)
        if not computes_all_branches() and not bool(silent.any()):
            return silent
        faults, variances = self.faults, self.model.R.diagonal(dim1=-2, dim2=-1)
        log_peaks = -0.5 * (variances.log() + LOG_2PI)
        log_failed = -(faults.high - faults.low).log().to(obs)
        belief = torch.where(seen, torch.where(fails, log_failed, log_peaks), 0).sum(-1)
        share = (faults.enter / (faults.enter + faults.leave)).to(obs)
        squares = (obs[:, None] - self.expected).square() / variances[..., None, :]
        log_works = (1 - share).log() + log_peaks[..., None, :] - 0.5 * squares
        logs = torch.logaddexp(log_works, share.log() + log_failed)
        each = torch.where(seen[:, None], logs, 0).sum(-1)
        recorded = (each + self.log_prior).logsumexp(-1)
        return silent & (recorded > belief + math.log(MIN_RATIO_OF_LOST))

    def first_update(self, obs: Float[Tensor, "b q"]) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Return the moments of the recorded states given x, and whether x was possible."""
        logs = self.log_likelihoods(obs)
        power = tempering(logs, self.effective, self.log_prior)
        weights = (power[:, None] * logs + self.log_prior).softmax(-1)
        mean = weights @ self.states
        centred = self.states - mean[:, None]
        cov = (weights[..., None] * centred).mT @ centred
        least = MIN_VARIANCE * cov.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        cov = cov + least * torch.eye(cov.shape[-1]).to(cov)
        rest = 1 / (1 - power).clamp_min(torch.finfo(obs.dtype).eps)
        return self.inner.observe(GaussianState(mean, cov), obs, noise=rest[:, None])

    def log_likelihoods(self, obs: Float[Tensor, "b q"]) -> Float[Tensor, "b n"]:
        """Return log N(x; h(z_i), R) of the available components, for each recorded state."""
        residual = obs[:, None] - self.expected
        _, _, R = leave_out_missing(obs, torch.zeros_like(obs[0])[:, None], self.model.R)
        seen = torch.where(residual.isfinite(), residual, 0)
        missing = 0.5 * LOG_2PI * (~obs.isfinite()).sum(-1)
        return log_densities(seen, R) + missing[:, None]

    def log_likelihood(
        self, state: StartingState, obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, " b"]:
        """Return the inner filter's; log mean_i p(x | z_i) where the state waits."""
        return self.density(state, obs, self.prepared(state, obs))

    def density(
        self, state: StartingState, obs: Float[Tensor, "b q"], known: Prepared
    ) -> Float[Tensor, " b"]:
        """Return `log_likelihood`."""
        slope = log_slope(obs, self.counts)
        density = slope + self.inner.log_likelihood(
            GaussianState(state.mean, state.cov),
            known.obs,
            noise=known.noise,
            linearised=known.linearised,
        )
        if not computes_all_branches() and not bool((state.waiting > 0).any()):
            return density
        first = (self.log_likelihoods(known.obs) + self.log_prior).logsumexp(-1)
        return torch.where(state.waiting > 0, first + slope, density)

    def estimate(self, state: StartingState) -> Float[Tensor, "b d"]:
        """Return the mean of the first components, ``b d``."""
        return state.mean[:, : self.d]

    def covariance(self, state: StartingState) -> Float[Tensor, "b d d"]:
        """Return the covariance of the first components, ``b d d``."""
        return state.cov[:, : self.d, : self.d]

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
            return StartingState(*moments, state.waiting, state.works)

        return step_back


def tempering(
    logs: Float[Tensor, "b n"], effective: float, log_prior: Float[Tensor, " n"]
) -> Float[Tensor, " b"]:
    """Return the largest power a in [0, 1] for which p_i l_i^a have so many effective states.

    By bisection: (sum w)^2 / sum w^2 falls with a.
    """

    def enough(a: Tensor) -> Tensor:
        w = (a[:, None] * logs + log_prior).softmax(-1)
        return w.square().sum(-1).reciprocal() >= effective

    low, high = torch.zeros_like(logs[:, 0]), torch.ones_like(logs[:, 0])
    whole = enough(high)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        suits = enough(middle)
        low, high = torch.where(suits, middle, low), torch.where(suits, high, middle)
    return torch.where(whole, 1.0, low)
