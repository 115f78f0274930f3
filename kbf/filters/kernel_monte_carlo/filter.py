"""The kernel Monte Carlo filter: a Kernel Bayes Filter whose memory moves with the belief.

A Kernel Bayes Filter over fixed memory points z_1..z_n can only answer with mixtures of these
points. A thousand of them resolve a plane, but not the four dimensions of a place and its velocity.
Here the memory is drawn anew in each step, where the belief is:

1. *Move.* Every particle of the last belief moves on, z_i ~ p(z' | z, u).
2. *Imagine.* What would be seen from there: K draws x_ik ~ p(x | z_i) of each. The pairs (z_i,
x_ik) are the memory of this step. 3. *Observe.* The importance-weighted rule over this memory gives
the weights w_i of the posterior embedding sum_i w_i k_Z(., z_i).
   The memory was drawn from the prior itself, so that the density ratio is 1 at all of its points,
   and the rule is w = Psi (Psi^T Psi + N lambda I)^-1 psi(x), N = P K, summed over the draws of
   each particle.
4. *Estimate* with the signed weights, sum_i w_i z_i.
5. *Resample* by their positive part: particles of the next step.

*Back in time* goes the same rule: particles of the belief at t, resampled, and where they moved to
are a memory of pairs (z_i, z_i'), and the smoothed embedding at t + 1 is the "observation" z' that
weighs them. No density of the moves is needed, and so a velocity, which is the difference of two
places, may be a part of the state.

Only samples of both laws are needed, no density: the answer is the posterior of that law, whatever
its shape. With P, K and the rank growing and lambda falling the rule tends to Bayes' rule. What is
lost against weighing by a known density is the kernel's smoothing; what is won is that nothing
degenerates: many draws say a little about each x.

The features Psi are Nystrom's at m of the drawn observations themselves, so that bandwidth and
landmarks follow the belief, too: Psi = K_nm L^-T with L L^T = K_mm turns the rule into w = K_nm
(K_mn K_nm + N lambda K_mm)^-1 k_m(x): one Cholesky factor of m x m.

References: Kanagawa, Nishiyama, Gretton and Fukumizu (2016), the Kernel Monte Carlo Filter, with a
transition that is sampled; Xu et al. (2022), Algorithm 1, for the rule. Kanagawa et al. apply the
original kernel Bayes' rule to a fixed sample.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.particle.bootstrap import in_type_of
from kbf.filters.particle.resampling import effective_sample_size, invert, systematic
from kbf.filters.protocols import Backward, FilterStep, allows_missing_sensors
from kbf.filters.rollout import where
from kbf.rkhs.linalg import evenly
from kbf.runtime.html_repr import Shown
from kbf.ssm import ControlledDynamics, StateSpace

JITTER = 1e-3
"""On the diagonal of K_mm, whose diagonal is 1: landmarks that coincide (counts often do) do no harm, nor does single precision."""
FIRST, ROWS = 4000, 64
"""Recorded states that a first observation is compared with, at most; sequences that this is done for at once."""
LEAST = -40.0
"""Exponents below are as good as this: the products of smaller kernels are denormal numbers, which a processor takes long for."""
BACK_RANK, BACK_REG, BACK_FACTOR = 64, 1e-3, 0.5
"""Of the rule back in time, over standardised states. With place and velocity of two linear models and 400 particles its errors are
1 to 6 % above those of the exact smoother, its standard deviations 2 to 9 % too large; lambda 1e-2
or a factor above 1 is worse."""
LITTLE = 1e-3
"""Sum of the weights, about 1 elsewhere, under which an observation is far from everything that was imagined."""


class LocalMemory(NamedTuple):
    """The belief, and the memory around it.

    Attributes:
        particles: ``b P D``, states of the model. draws: ``b P K q``, observations drawn from each
            of them.
        weights: ``b P``, of the embedding; some may be negative, their sum is 1. begun: ``b``, 0
            before anything was observed, then 1, or how likely the track is none that was lost.
    """

    particles: Tensor
    draws: Tensor
    weights: Tensor
    begun: Tensor


class KernelMonteCarloFilter(Shown):
    """The filter of one model that can be sampled (`kbf.ssm.StateSpace`; its ``log_likelihood`` is asked for with ``reg=0`` alone).

    The estimate is of the first d components of the model's state: the rest (velocities, lags) is
    the filter's own.
    """

    model: StateSpace
    initial: Float[Tensor, "n D"]
    particles: int
    draws: int
    reg: float
    factor: float
    counts: bool

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
        """The filter of one model.

        Args:
            model: draws moves and observations; if it has an attribute ``controlled`` that is not
                0, its ``move`` takes a ``control``.
            initial: samples of the model's state before the first move, drawn with replacement;
                dtype and device are the filter's.
            d: components that are estimated; None for all.
            particles: P. draws: K, observations of each. rank: m, landmarks among them.
            reg: lambda; 0 for what the rule tends to as draws grow and lambda falls, weights by the
                density p(x | z_i) of a model that knows it (``log_likelihood``). Nothing is
                imagined then.
            factor: bandwidth over the root mean square distance of the drawn observations.
            counts: observations are counts: compare their square roots, whose noise is of one size
                whatever the mean.
            restart: share of the particles that are drawn anew from ``initial`` in each move, as if
                the state had jumped there: a track that was lost is found again (Lenser and Veloso,
                2000, sensor resetting; here at all times).
            temper: with ``reg=0``, weights by p(x | z_i)^temper: below 1 for observations whose
                errors go on from step to step, so that several of them tell no more than one
                (Grunwald, 2012, of models that are not quite true).
            region: least and largest states; a particle that leaves it begins anew. A learned move
                may run away outside of what it has seen; None for a model that is true everywhere.

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
                f"a kernel Monte Carlo filter needs {len(initial)} > 0 initial states, {sizes} >= 1, {reg} >= 0, {factor} > 0, "
                f"0 <= {restart} < 1, 0 < {temper} <= 1"
            )
        self.model, self.initial = in_type_of(model, initial), initial
        self.d: int = initial.shape[1] if d is None else d
        self.particles, self.draws, self.reg, self.factor, self.counts = (
            particles,
            draws,
            reg,
            factor,
            counts,
        )
        self.temper: float = temper
        self.region = region
        self.recorded: Tensor | None = (
            initial[evenly(len(initial), FIRST, initial.device)] if recorded else None
        )
        count = round(restart * particles)
        self.fresh: Tensor | None = (
            torch.linspace(0, particles - 1, count).round().long().to(initial.device)
            if count
            else None
        )
        self.landmarks: Tensor = (
            torch.linspace(0, particles * draws - 1, min(rank, particles * draws))
            .round()
            .long()
            .to(initial.device)
        )
        self.controlled: int = model.controlled if isinstance(model, ControlledDynamics) else 0
        self.allow_missing_sensors: bool = allows_missing_sensors(model)

    def init(self, batch: int, *, generator: Generator | None = None) -> LocalMemory:
        """P initial states for each sequence, drawn with replacement, with equal weights."""
        size, device = (batch, self.particles), self.initial.device
        particles = self.initial[
            torch.randint(len(self.initial), size, device=device, generator=generator)
        ]
        return self.simulated(particles, particles.new_zeros(batch), generator)

    def simulated(
        self,
        particles: Float[Tensor, "b P D"],
        begun: Float[Tensor, " b"],
        generator: Generator | None,
    ) -> LocalMemory:
        """The memory around particles of equal weight."""
        weights = particles.new_full(particles.shape[:2], 1 / self.particles)
        if self.reg == 0:
            return LocalMemory(
                particles, particles.new_empty(*particles.shape[:2], 0, 0), weights, begun
            )
        several = particles[:, :, None].expand(-1, -1, self.draws, -1)
        return LocalMemory(particles, self.model.observe(several, generator), weights, begun)

    def predict(
        self,
        state: LocalMemory,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> LocalMemory:
        """Resample by the positive weights, move, begin anew with a share of the particles, and draw what would be seen."""
        moved = self.moved(state, control, generator)[1]
        if self.fresh is not None:  # weights are equal: it is no matter which ones are replaced
            size = (len(moved), len(self.fresh))
            anew = torch.randint(len(self.initial), size, device=moved.device, generator=generator)
            moved = moved.index_copy(1, self.fresh, self.initial[anew])
        if self.region is not None:
            outside = ((moved < self.region[0]) | (moved > self.region[1])).any(-1, keepdim=True)
            anew = torch.randint(
                len(self.initial), moved.shape[:2], device=moved.device, generator=generator
            )
            moved = torch.where(outside, self.initial[anew], moved)
        return self.simulated(moved, state.begun, generator)

    def moved(
        self, state: LocalMemory, control: Float[Tensor, "b k"] | None, generator: Generator | None
    ) -> tuple[Float[Tensor, "b P D"], Float[Tensor, "b P D"]]:
        """Particles, resampled by the positive weights, and where they move to."""
        chosen = systematic(state.weights.clamp_min(0).log(), generator)
        source = state.particles.gather(1, chosen[..., None].expand_as(state.particles))
        acted = {} if control is None else {"control": control[:, None]}
        return source, self.model.move(source, generator, **acted)

    def update(self, state: LocalMemory, obs: Float[Tensor, "b q"]) -> LocalMemory:
        """Weigh the memory by the importance-weighted rule, given the observation ``b q``."""
        return self.observe(state, obs)[0]

    def observe(
        self, state: LocalMemory, obs: Float[Tensor, "b q"]
    ) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """Weigh, and whether anything that was imagined is near the observation: far from all of it the kernel is 0 everywhere."""
        weights, possible = self.weigh(state, obs)
        begun = state.begun > 0
        after = state._replace(weights=weights, begun=(begun | possible).to(weights))
        if self.recorded is None or bool(begun.all()):
            return after, possible
        first, suits = self.first(self.recorded, state, obs.to(state.particles))
        return where(begun, after, first), torch.where(begun, possible, suits)

    def first(
        self, recorded: Float[Tensor, "n D"], state: LocalMemory, obs: Float[Tensor, "b q"]
    ) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """P of the recorded states, of equal weight, as often as the first observation suits them; and whether it suits any."""
        weights = torch.cat(
            [self.temper * self.model.log_likelihood(x[:, None], recorded) for x in obs.split(ROWS)]
        )
        suits = weights.amax(-1) > -math.inf
        points = (
            torch.arange(self.particles, dtype=torch.float64, device=obs.device) + 0.5
        ) / self.particles
        chosen = invert(torch.where(suits[:, None], weights, 0), points.expand(len(obs), -1))
        equal = torch.full_like(state.weights, 1 / self.particles)
        return state._replace(
            particles=recorded[chosen], weights=equal, begun=suits.to(equal)
        ), suits

    def weigh(
        self, state: LocalMemory, obs: Float[Tensor, "b q"]
    ) -> tuple[Float[Tensor, "b P"], Bool[Tensor, " b"]]:
        """The weights of the particles given the observation, and whether it is possible."""
        if self.reg == 0:
            log_weights = self.temper * self.model.log_likelihood(
                obs.to(state.particles)[:, None], state.particles
            )
            possible = log_weights.amax(-1) > -math.inf
            return torch.where(possible[:, None], log_weights, 0).softmax(-1), possible
        seen, x = state.draws.flatten(1, 2), obs.to(state.draws)
        if (
            self.allow_missing_sensors
        ):  # columns of silent sensors are equal everywhere: they are not compared
            spoke = x.isfinite()
            seen, x = torch.where(spoke[:, None], seen, 0), torch.where(spoke, x, 0)
        if self.counts:
            seen, x = seen.clamp_min(0).sqrt(), x.clamp_min(0).sqrt()
        weights = local_weights(seen, x[:, None], self.landmarks, reg=self.reg, factor=self.factor)
        weights = weights.unflatten(1, (self.particles, self.draws)).sum(-1)
        total = weights.sum(-1, keepdim=True)
        possible = total > LITTLE
        return torch.where(
            possible, weights / torch.where(possible, total, 1), 1 / self.particles
        ), possible[:, 0]

    def smoother(self) -> Backward:
        """One step back by the rule; `FilterStep` at t and the smoothed memory at t + 1 -> the smoothed memory at t."""
        return self.step_back

    def step_back(
        self,
        now: FilterStep,
        following: LocalMemory,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> LocalMemory:
        """The rule over resampled particles and their moves, in units of the standard deviations of these."""
        source, moved = self.moved(now.state, control, generator)
        middle, scale = moved.mean(1, keepdim=True), moved.std(1, keepdim=True)
        scale = torch.where(scale > 0, scale, 1)
        seen, query = (moved - middle) / scale, (following.particles - middle) / scale
        marks = (
            torch.linspace(0, self.particles - 1, min(BACK_RANK, self.particles))
            .round()
            .long()
            .to(moved.device)
        )
        weights = local_weights(
            seen, query, marks, reg=BACK_REG, factor=BACK_FACTOR, weights=following.weights
        )
        weights = weights / weights.sum(-1, keepdim=True)
        return LocalMemory(
            source, source.new_empty(*source.shape[:2], 0, 0), weights, now.state.begun
        )

    def estimate(self, state: LocalMemory) -> Float[Tensor, "b d"]:
        """The mean of the embedding, by the signed weights, ``b d``."""
        return (state.weights[:, None] @ state.particles[..., : self.d])[:, 0]

    def covariance(self, state: LocalMemory) -> Float[Tensor, "b d d"]:
        """The covariance of the particles by their positive weights, ``b d d``: never indefinite."""
        states, positive = self.weighted_sample(state)
        centred = states - positive[:, None] @ states
        return (positive[..., None] * centred).mT @ centred

    def weighted_sample(
        self, state: LocalMemory
    ) -> tuple[Float[Tensor, "b P d"], Float[Tensor, "b P"]]:
        """The particles and the positive part of their weights, of sum 1."""
        positive = state.weights.clamp_min(0)
        return state.particles[..., : self.d], positive / positive.sum(-1, keepdim=True)

    def diagnostics(self, state: LocalMemory) -> dict[str, Tensor]:
        """``ess``, the effective sample size of the positive weights, and ``negative``, the mass of the others, ``b``."""
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
    """The importance-weighted rule with ratio 1 over a memory of its own for each sequence, in Nystrom features.

    w = K_nm (K_mn K_nm + n lambda K_mm)^-1 k_m(x), with a Gaussian kernel whose bandwidth is
    ``factor`` times the root mean square distance of the memory's observations; K_mm has `JITTER`
    on its diagonal. The small system is solved in float64.

    Args:
        seen: observations of the memory ``b n q``.
        obs: x, one or several: then k_m(x) is the mean sum_j a_j k_m(x_j) of an embedding.
        landmarks: numbers of the m observations that span the features.
        reg: lambda. factor: of the bandwidth. weights: a; None where there is one x.

    References: Xu et al. (2022), Algorithm 1, step 3, with D = I.
    """
    n, m = seen.shape[1], len(landmarks)
    middle = seen.mean(1, keepdim=True)
    points = torch.cat([seen, obs], 1) - middle
    spread = 2 * points[:, :n].square().sum((1, 2)) / n  # the mean squared distance of two of them
    points = (
        points / (factor * spread.clamp_min(torch.finfo(seen.dtype).tiny).sqrt())[:, None, None]
    )
    k = gaussian_table(points, points[:, landmarks])
    system = (k[:, :n].mT @ k[:, :n]).double()
    base = k[:, landmarks].double()
    rounding = (
        16 * torch.finfo(k.dtype).eps / reg if reg else 0.0
    )  # of n K_mn K_nm: a ridge below it lets w explode
    base = base + max(JITTER, rounding) * torch.eye(m, dtype=base.dtype, device=base.device)
    factorised = torch.linalg.cholesky_ex(system + n * reg * base)[0]
    query = k[:, n:] if weights is None else weights[:, None] @ k[:, n:]
    solved = torch.cholesky_solve(query.mT.double(), factorised)
    return (k[:, :n] @ solved.to(k))[..., 0]


def gaussian_table(a: Float[Tensor, "b n q"], c: Float[Tensor, "b m q"]) -> Float[Tensor, "b n m"]:
    """exp(-||a_i - c_j||^2 / 2) by one product of matrices."""
    square = torch.baddbmm(-0.5 * c.square().sum(-1)[:, None], a, c.mT) - 0.5 * a.square().sum(
        -1, keepdim=True
    )
    return square.clamp(LEAST, 0).exp()
