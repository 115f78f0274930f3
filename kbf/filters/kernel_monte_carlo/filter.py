"""The kernel Monte Carlo filter: a Kernel Bayes Filter over a memory that is sampled in each step.

A Kernel Bayes Filter over fixed memory points z_1 ... z_n represents every belief as a mixture of
these points. A thousand of them cover a plane, but not the four dimensions of a position and its
velocity. Here each step samples a memory around the belief:

1. *Move.* Each particle of the last belief moves, z_i ~ p(z' | z, u).
2. *Simulate observations*, K draws x_ik ~ p(x | z_i) for each particle. The pairs (z_i, x_ik) are
   the memory of this step.
3. *Observe.* The importance-weighted rule over this memory gives the weights w_i of the posterior
   embedding sum_i w_i k_Z(., z_i). The memory is a sample of the prior itself, so that the density
   ratio is 1 at all of its points and the rule is w = Psi (Psi^T Psi + N lambda I)^-1 psi(x), N =
   P K, summed over the draws of each particle.
4. *Estimate* with the signed weights, sum_i w_i z_i.
5. *Resample* in proportion to the positive part of the weights.

The *smoother* applies the same rule backwards in time. Resampled particles of the belief at t and
their successors are a memory of pairs (z_i, z_i'), and the smoothed embedding at t + 1 is the
"observation" z' that weighs them. It requires no density of the moves, so that a velocity, which is
the difference of two positions, may be a part of the state.

The filter requires samples of both conditional densities, not their values. As P, K and the rank
grow and lambda falls, the rule tends to Bayes' rule. Compared with weights by a known density it
has the bias of the kernel's smoothing, but its weights do not degenerate: many draws are close to
each x.

The features Psi are Nystrom features at m of the simulated observations, so that bandwidth and
landmarks follow the belief, too: Psi = K_nm L^-T with L L^T = K_mm gives w = K_nm (K_mn K_nm + N
lambda K_mm)^-1 k_m(x), with one Cholesky factorisation of an m x m matrix.

References: Kanagawa, Nishiyama, Gretton and Fukumizu (2016), the Kernel Monte Carlo Filter, with a
sampled transition (they apply the original kernel Bayes' rule to a fixed sample); Xu et al. (2022),
Algorithm 1, for the rule.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from kbf.filters.particle.bootstrap import in_type_of
from kbf.filters.particle.resampling import effective_sample_size, invert, systematic
from kbf.filters.protocols import (
    Backward,
    FilterStep,
    UpdateByObserve,
    allows_missing_sensors,
    where,
)
from kbf.rkhs.linalg import some_rows
from kbf.runtime.branches import computes_all_branches
from kbf.runtime.html_repr import Shown
from kbf.ssm import ControlledDynamics, StateSpace

# Added to the diagonal of K_mm, which is 1: landmarks may coincide, as counts often do.
JITTER = 1e-3

# Recorded states that the first observation is compared with.
MAX_RECORDED_STATES = 4000

# Sequences whose first observation is processed at a time.
MAX_SEQUENCES_AT_FIRST = 64

# Exponents are clamped here: products of smaller kernels are denormal numbers, which are slow.
MIN_EXPONENT = -40.0

# Landmarks of the rule backwards in time, over standardised states.
SMOOTHER_RANK = 64

# lambda of that rule; 1e-2 is worse.
SMOOTHER_REG = 1e-3

# Bandwidth factor of that rule; a factor above 1 is worse.
#
# With position and velocity of two linear models and 400 particles the errors of the smoother are 1
# to 6 % above those of the exact smoother, its standard deviations 2 to 9 % too large.
SMOOTHER_FACTOR = 0.5

# Sum of weights (usually about 1) below which an observation is far from all simulated ones.
MIN_SUM_OF_WEIGHTS = 1e-3


class LocalMemory(NamedTuple):
    """The belief and its memory.

    Attributes:
        particles: states of the model ``b P D``.
        draws: simulated observations of each particle ``b P K q``.
        weights: of the embedding ``b P``; some may be negative, their sum is 1.
        initialized: ``b``, 0 before the first observation, then 1. The filter for density ratios
            stores the probability that the track is not lost.
    """

    particles: Tensor
    draws: Tensor
    weights: Tensor
    initialized: Tensor


class KernelMonteCarloFilter(UpdateByObserve[LocalMemory], Shown):
    """The filter of one model that can be sampled (`kbf.ssm.StateSpace`).

    The ``log_likelihood`` of the model is required only if ``reg`` is 0. The estimate is of the
    first d components of the model's state; the others (velocities, lags) are internal.
    """

    def __init__(
        self,
        model: StateSpace,
        initial: Float[Tensor, "n D"],
        *,
        d: int | None = None,
        particles: int = 400,
        draws: int = 4,
        rank: int = 64,
        reg: float = 1e-3,
        factor: float = 0.7,
        counts: bool = False,
        restart: float = 0.0,
        temper: float = 1.0,
        region: tuple[Float[Tensor, " D"], Float[Tensor, " D"]] | None = None,
        recorded: bool = False,
    ) -> None:
        """Build the filter of one model.

        Args:
            model: samples moves and observations; if it has an attribute ``controlled`` that is not
                0, its ``move`` takes a ``control``.
            initial: samples of the model's state before the first move, drawn with replacement;
                their dtype and device are those of the filter.
            d: number of estimated components; None for all.
            particles: P.
            draws: K, simulated observations of each particle.
            rank: m, landmarks among the simulated observations.
            reg: lambda; 0 for the limit of many draws and small lambda, in which the weights are
                the densities p(x | z_i) of a model with ``log_likelihood``, and no observations are
                simulated.
            factor: bandwidth over the root mean square distance of the simulated observations.
            counts: observations are counts; their square roots, whose noise does not depend on the
                mean, are compared.
            restart: share of the particles that are drawn from ``initial`` in each move, by which a
                lost track recovers (sensor resetting of Lenser and Veloso, 2000, in every step).
            temper: exponent of the density if ``reg`` is 0, weights p(x | z_i)^temper. A value
                below 1 is for observations with serially correlated errors, of which several have
                little more information than one (Grunwald, 2012, for misspecified models).
            region: smallest and largest states; a particle outside of them is re-initialised, since
                a learned transition may diverge outside of its training data. None for no bounds.
            recorded: whether ``initial`` are recorded states among which the first observation
                selects the particles.

        Raises:
            ValueError: no initial states, sizes below 1, or a number out of range.
        """
        sizes = {"particles": particles, "draws": draws, "rank": rank}
        if (
            min(sizes.values()) < 1
            or len(initial) < 1
            or not (reg >= 0 and factor > 0 and 0 <= restart < 1 and 0 < temper <= 1)
        ):
            raise ValueError(
                f"a kernel Monte Carlo filter needs {len(initial)} > 0 initial states, "
                f"{sizes} >= 1, {reg} >= 0, {factor} > 0, 0 <= {restart} < 1, 0 < {temper} <= 1"
            )
        self.model: StateSpace = in_type_of(model, initial)
        self.initial: Tensor = initial
        self.d: int = initial.shape[1] if d is None else d
        self.particles: int = particles
        self.draws: int = draws
        self.reg: float = reg
        self.factor: float = factor
        self.counts: bool = counts
        self.temper: float = temper
        self.region: tuple[Tensor, Tensor] | None = region
        device = initial.device
        self.recorded: Tensor | None = (
            initial[some_rows(len(initial), MAX_RECORDED_STATES, device)] if recorded else None
        )
        self.restarted: Tensor = spread(particles, round(restart * particles), device)
        self.landmarks: Tensor = spread(particles * draws, rank, device)
        self.controlled: int = model.controlled if isinstance(model, ControlledDynamics) else 0
        self.allow_missing_sensors: bool = allows_missing_sensors(model)

    def init(self, batch: int, *, generator: Generator | None = None) -> LocalMemory:
        """Return P initial states of equal weight for each element of the batch."""
        particles = self.initial_states(batch, self.particles, generator)
        return self.simulate_observations(particles, particles.new_zeros(batch), generator)

    def initial_states(
        self, batch: int, count: int, generator: Generator | None
    ) -> Float[Tensor, "b m D"]:
        """Draw initial states with replacement."""
        size, device = (batch, count), self.initial.device
        return self.initial[
            torch.randint(len(self.initial), size, device=device, generator=generator)
        ]

    def simulate_observations(
        self,
        particles: Float[Tensor, "b P D"],
        initialized: Float[Tensor, " b"],
        generator: Generator | None,
    ) -> LocalMemory:
        """Return the memory of particles of equal weight, with K observations of each."""
        size = particles.shape[:2]
        if self.reg == 0:
            draws = particles.new_empty(*size, 0, 0)
        else:
            draws = self.model.observe(
                particles[:, :, None].expand(-1, -1, self.draws, -1), generator
            )
        return LocalMemory(
            particles, draws, particles.new_full(size, 1 / self.particles), initialized
        )

    def predict(
        self,
        state: LocalMemory,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> LocalMemory:
        """Resample in proportion to the positive weights, move, and simulate observations.

        A share of the particles, and those outside of the region, are re-initialised.
        """
        moved, b = self.moved(state, control, generator)[1], len(state.weights)
        if len(self.restarted):  # any of them, since all have the same weight
            restarted = self.initial_states(b, len(self.restarted), generator)
            moved = moved.index_copy(1, self.restarted, restarted)
        if self.region is not None:
            outside = ((moved < self.region[0]) | (moved > self.region[1])).any(-1, keepdim=True)
            restarted = self.initial_states(b, self.particles, generator)
            moved = torch.where(outside, restarted, moved)
        return self.simulate_observations(moved, state.initialized, generator)

    def moved(
        self, state: LocalMemory, control: Float[Tensor, "b k"] | None, generator: Generator | None
    ) -> tuple[Float[Tensor, "b P D"], Float[Tensor, "b P D"]]:
        """Return resampled particles and their successors."""
        chosen = systematic(state.weights.clamp_min(0).log(), generator)
        source = state.particles.gather(1, chosen[..., None].expand_as(state.particles))
        acted = {} if control is None else {"control": control[:, None]}
        return source, self.model.move(source, generator, **acted)

    def observe(
        self, state: LocalMemory, obs: Float[Tensor, "b q"]
    ) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """Return the posterior, and whether the observation is possible.

        It is not if it is far from all simulated observations, where the kernel is 0.
        """
        weights, possible = self.weigh(state, obs)
        known = state.initialized > 0
        after = state._replace(weights=weights, initialized=(known | possible).to(weights))
        if self.recorded is None or (not computes_all_branches() and bool(known.all())):
            return after, possible
        first, possible_first = self.first(self.recorded, state, obs.to(state.particles))
        # ONNX selects no truth values
        return where(known, after, first), (known & possible) | (~known & possible_first)

    def first(
        self, recorded: Float[Tensor, "n D"], state: LocalMemory, obs: Float[Tensor, "b q"]
    ) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """Return the belief after the first observation, and whether the observation is possible.

        P recorded states of equal weight are drawn in proportion to their (tempered) likelihood.
        """
        parts = obs.split(MAX_SEQUENCES_AT_FIRST)
        log_weights = torch.cat(
            [self.temper * self.model.log_likelihood(x[:, None], recorded) for x in parts]
        )
        possible = log_weights.amax(-1) > -math.inf
        chosen = invert(
            torch.where(possible[:, None], log_weights, 0), self.midpoints(len(obs), obs.device)
        )
        equal = torch.full_like(state.weights, 1 / self.particles)
        return LocalMemory(recorded[chosen], state.draws, equal, possible.to(equal)), possible

    def midpoints(self, batch: int, device: torch.device) -> Float[Tensor, "b P"]:
        """Return the midpoints of P equal parts of [0, 1]."""
        points = torch.arange(self.particles, dtype=torch.float64, device=device) + 0.5
        return (points / self.particles).expand(batch, -1)

    def weigh(
        self, state: LocalMemory, obs: Float[Tensor, "b q"]
    ) -> tuple[Float[Tensor, "b P"], Bool[Tensor, " b"]]:
        """Return the weights given the observation, and whether the observation is possible."""
        if self.reg == 0:
            log_weights = self.temper * self.model.log_likelihood(
                obs.to(state.particles)[:, None], state.particles
            )
            possible = log_weights.amax(-1) > -math.inf
            return torch.where(possible[:, None], log_weights, 0).softmax(-1), possible
        seen, x = state.draws.flatten(1, 2), obs.to(state.draws)
        if self.allow_missing_sensors:  # columns of missing sensors are set to 0 everywhere
            known = x.isfinite()
            seen, x = torch.where(known[:, None], seen, 0), torch.where(known, x, 0)
        if self.counts:
            seen, x = seen.clamp_min(0).sqrt(), x.clamp_min(0).sqrt()
        weights = local_weights(seen, x[:, None], self.landmarks, reg=self.reg, factor=self.factor)
        weights = weights.unflatten(1, (self.particles, self.draws)).sum(-1)
        total = weights.sum(-1, keepdim=True)
        possible = total > MIN_SUM_OF_WEIGHTS
        normalised = weights / torch.where(possible, total, 1)
        return torch.where(possible, normalised, 1 / self.particles), possible[:, 0]

    def smoother(self) -> Backward:
        """Return the backward step: (`FilterStep` at t, smoothed at t + 1) -> smoothed at t."""
        return self.step_back

    def step_back(
        self,
        now: FilterStep,
        following: LocalMemory,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> LocalMemory:
        """Apply the rule to resampled particles and their successors, standardised."""
        source, moved = self.moved(now.state, control, generator)
        middle, scale = moved.mean(1, keepdim=True), moved.std(1, keepdim=True)
        scale = torch.where(scale > 0, scale, 1)
        seen, query = (moved - middle) / scale, (following.particles - middle) / scale
        landmarks = spread(self.particles, SMOOTHER_RANK, moved.device)
        settings = {"reg": SMOOTHER_REG, "factor": SMOOTHER_FACTOR}
        weights = local_weights(seen, query, landmarks, weights=following.weights, **settings)
        weights = weights / weights.sum(-1, keepdim=True)
        return LocalMemory(
            source, source.new_empty(*source.shape[:2], 0, 0), weights, now.state.initialized
        )

    def estimate(self, state: LocalMemory) -> Float[Tensor, "b d"]:
        """Return the mean of the embedding with the signed weights, ``b d``."""
        return (state.weights[:, None] @ state.particles[..., : self.d])[:, 0]

    def covariance(self, state: LocalMemory) -> Float[Tensor, "b d d"]:
        """Return the covariance ``b d d`` of the positive part of the weights."""
        states, positive = self.weighted_sample(state)
        centred = states - positive[:, None] @ states
        return (positive[..., None] * centred).mT @ centred

    def weighted_sample(
        self, state: LocalMemory
    ) -> tuple[Float[Tensor, "b P d"], Float[Tensor, "b P"]]:
        """Return the particles and the positive part of their weights, of sum 1."""
        positive = state.weights.clamp_min(0)
        return state.particles[..., : self.d], positive / positive.sum(-1, keepdim=True)

    def diagnostics(self, state: LocalMemory) -> dict[str, Tensor]:
        """Return ``ess`` of the positive weights and ``negative``, the mass of the others."""
        positive = state.weights.clamp_min(0)
        return {
            "ess": effective_sample_size(positive.log()),
            "negative": (positive - state.weights).sum(-1),
        }


def local_weights(
    seen: Float[Tensor, "b n q"],
    obs: Float[Tensor, "b s q"],
    landmarks: Tensor,
    *,
    reg: float,
    factor: float,
    weights: Float[Tensor, "b s"] | None = None,
) -> Float[Tensor, "b n"]:
    """Return the weights of the importance-weighted rule with ratio 1, one memory per sequence.

    w = K_nm (K_mn K_nm + n lambda K_mm)^-1 k_m(x), with a Gaussian kernel whose bandwidth is
    ``factor`` times the root mean square distance of the memory's observations, in Nystrom
    features; `JITTER` is added to the diagonal of K_mm. The m x m system is solved in float64.

    Args:
        seen: observations of the memory ``b n q``.
        obs: x; several x_j are the points of an embedding, with k_m(x) = sum_j a_j k_m(x_j).
        landmarks: indices of the m observations that span the features.
        reg: lambda.
        factor: of the bandwidth.
        weights: a ``b s``; None for one x.

    References: Xu et al. (2022), Algorithm 1, step 3, with D = I.
    """
    n, m = seen.shape[1], len(landmarks)
    points = torch.cat([seen, obs], 1) - seen.mean(1, keepdim=True)
    distance = 2 * points[:, :n].square().sum((1, 2)) / n  # mean squared, between two of them
    distance = distance.clamp_min(torch.finfo(seen.dtype).tiny).sqrt()
    points = points / (factor * distance)[:, None, None]
    k = gaussian_table(points, points[:, landmarks])
    system = (k[:, :n].mT @ k[:, :n]).double()
    base = k[:, landmarks].double()
    # rounding of n K_mn K_nm: with a smaller ridge w would diverge
    rounding = 16 * torch.finfo(k.dtype).eps / reg if reg else 0.0
    base = base + max(JITTER, rounding) * torch.eye(m, dtype=base.dtype, device=base.device)
    factorised = torch.linalg.cholesky_ex(system + n * reg * base)[0]
    query = k[:, n:] if weights is None else weights[:, None] @ k[:, n:]
    return (k[:, :n] @ torch.cholesky_solve(query.mT.double(), factorised).to(k))[..., 0]


def gaussian_table(a: Float[Tensor, "b n q"], c: Float[Tensor, "b m q"]) -> Float[Tensor, "b n m"]:
    """Return exp(-||a_i - c_j||^2 / 2), by one matrix product."""
    square = torch.baddbmm(-0.5 * c.square().sum(-1)[:, None], a, c.mT) - 0.5 * a.square().sum(
        -1, keepdim=True
    )
    return square.clamp(MIN_EXPONENT, 0).exp()


def spread(n: int, limit: int, device: torch.device) -> Int[Tensor, " m"]:
    """Return min(n, limit) of the indices 0 ... n - 1, evenly spaced, both ends included."""
    return torch.linspace(0, n - 1, min(n, limit)).round().long().to(device)
