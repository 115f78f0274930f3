"""The kernel Monte Carlo filter: a Kernel Bayes Filter whose memory moves with the belief.

A Kernel Bayes Filter over fixed memory points z_1..z_n can only answer with mixtures of these points. A thousand of them resolve a
plane, but not the four dimensions of a place and its velocity. Here the memory is drawn anew in each step, where the belief is:

1. *Move.* Every particle of the last belief moves on, z_i ~ p(z' | z, u).
2. *Imagine.* What would be seen from there: K draws x_ik ~ p(x | z_i) of each. The pairs (z_i, x_ik) are the memory of this step.
3. *Observe.* The importance-weighted rule over this memory gives the weights w_i of the posterior embedding sum_i w_i k_Z(., z_i).
   The memory was drawn from the prior itself, so that the density ratio is 1 at all of its points, and the rule is
   w = Psi (Psi^T Psi + N lambda I)^-1 psi(x), N = P K, summed over the draws of each particle.
4. *Estimate* with the signed weights, sum_i w_i z_i.
5. *Resample* by their positive part: particles of the next step.

Only samples of both laws are needed, no density: the answer is the posterior of that law, whatever its shape. With P, K and the
rank growing and lambda falling the rule tends to Bayes' rule. What is lost against weighing by a known density is the kernel's
smoothing; what is won is that nothing degenerates: many draws say a little about each x.

The features Psi are Nystrom's at m of the drawn observations themselves, so that bandwidth and landmarks follow the belief, too:
Psi = K_nm L^-T with L L^T = K_mm turns the rule into w = K_nm (K_mn K_nm + N lambda K_mm)^-1 k_m(x): one Cholesky factor of m x m.

References: Kanagawa, Nishiyama, Gretton and Fukumizu (2016), the Kernel Monte Carlo Filter, with a transition that is sampled;
Xu et al. (2022), Algorithm 1, for the rule. Kanagawa et al. apply the original kernel Bayes' rule to a fixed sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.data.windows import piece, split
from kbf.filters.base import rollout
from kbf.filters.lagged_model import ORDERS, LaggedModel, all_states, learn_lagged_model, widened
from kbf.filters.laws.choice import LAWS, choose_law
from kbf.filters.laws.sensors import ChosenSensors
from kbf.filters.particle import in_type_of
from kbf.filters.protocols import knows_sensors
from kbf.filters.resampling import effective_sample_size, systematic
from kbf.filters.wrapper import CollectingCovariance
from kbf.rkhs.linalg import evenly
from kbf.runtime.notebook import Shown, ShownModule
from kbf.sequence import Sequence, as_sequences, observed_pairs, pad
from kbf.ssm import ControlledDynamics, StateSpace

JITTER = 1e-3
"""On the diagonal of K_mm, whose diagonal is 1: landmarks that coincide (counts often do) do no harm, nor does single precision."""
LEAST = -40.0
"""Exponents below are as good as this: the products of smaller kernels are denormal numbers, which a processor takes long for."""
LITTLE = 1e-3
"""Sum of the weights, about 1 elsewhere, under which an observation is far from everything that was imagined."""
HELD_OUT, STRETCHES, LONG, BURN_IN = 0.2, 8, 100, 5
"""Share of the recordings that is held out to choose on; stretches of it that are run through, steps in each, at most; first steps
that do not count: the filter does not know yet where it is."""
LEAST_VARIANCE = 1e-4
"""Of a component, over that of the states, when its log score is asked for: a few particles in one place are no certainty."""
TIE = 0.1
"""Difference of held-out scores that decides nothing: the filter that is less sure is taken."""
MARGIN = 0.5
"""Of the recorded range, on each side of it: there the learned moves are trusted, too."""
LOOKED_AT = 1000
"""Points that the choice of a law looks at."""


class HeldOut(NamedTuple):
    """On held-out stretches: the mean squared error over the variance of each component, and -2 log N(z; m, diag C) of one."""

    error: float
    surprise: float


class LocalMemory(NamedTuple):
    """The belief, and the memory around it.

    Attributes:
        particles: ``b P D``, states of the model. draws: ``b P K q``, observations drawn from each of them.
        weights: ``b P``, of the embedding; some may be negative, their sum is 1.
    """

    particles: Tensor
    draws: Tensor
    weights: Tensor


class KernelMonteCarloFilter(Shown):
    """The filter of one model that can be sampled (`kbf.ssm.StateSpace`; its ``log_likelihood`` is asked for with ``reg=0`` alone).

    The estimate is of the first d components of the model's state: the rest (velocities, lags) is the filter's own.
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
    ) -> None:
        """The filter of one model.

        Args:
            model: draws moves and observations; if it has an attribute ``controlled`` that is not 0, its ``move`` takes a
                ``control``.
            initial: samples of the model's state before the first move, drawn with replacement; dtype and device are the filter's.
            d: components that are estimated; None for all.
            particles: P. draws: K, observations of each. rank: m, landmarks among them.
            reg: lambda; 0 for what the rule tends to as draws grow and lambda falls, weights by the density p(x | z_i) of a model
                that knows it (``log_likelihood``). Nothing is imagined then.
            factor: bandwidth over the root mean square distance of the drawn observations.
            counts: observations are counts: compare their square roots, whose noise is of one size whatever the mean.
            restart: share of the particles that are drawn anew from ``initial`` in each move, as if the state had jumped there: a
                track that was lost is found again (Lenser and Veloso, 2000, sensor resetting; here at all times).
            temper: with ``reg=0``, weights by p(x | z_i)^temper: below 1 for observations whose errors go on from step to step, so
                that several of them tell no more than one (Grunwald, 2012, of models that are not quite true).
            region: least and largest states; a particle that leaves it begins anew. A learned move may run away outside of what it
                has seen; None for a model that is true everywhere.

        Raises:
            ValueError: no initial states, sizes below 1, or a number out of range.
        """
        sizes = {"particles": particles, "draws": draws, "rank": rank}
        if min(sizes.values()) < 1 or len(initial) < 1 or not (reg >= 0 and factor > 0 and 0 <= restart < 1 and 0 < temper <= 1):
            raise ValueError(
                f"a kernel Monte Carlo filter needs {len(initial)} > 0 initial states, {sizes} >= 1, {reg} >= 0, {factor} > 0, "
                f"0 <= {restart} < 1, 0 < {temper} <= 1"
            )
        self.model, self.initial = in_type_of(model, initial), initial
        self.d: int = initial.shape[1] if d is None else d
        self.particles, self.draws, self.reg, self.factor, self.counts = particles, draws, reg, factor, counts
        self.temper: float = temper
        self.region = region
        count = round(restart * particles)
        self.fresh: Tensor | None = torch.linspace(0, particles - 1, count).round().long().to(initial.device) if count else None
        self.landmarks: Tensor = (
            torch.linspace(0, particles * draws - 1, min(rank, particles * draws)).round().long().to(initial.device)
        )
        self.controlled: int = model.controlled if isinstance(model, ControlledDynamics) else 0
        self.partial: bool = knows_sensors(model)

    def init(self, batch: int, *, generator: Generator | None = None) -> LocalMemory:
        """P initial states for each sequence, drawn with replacement, with equal weights."""
        size, device = (batch, self.particles), self.initial.device
        particles = self.initial[torch.randint(len(self.initial), size, device=device, generator=generator)]
        return self.imagined(particles, generator)

    def imagined(self, particles: Float[Tensor, "b P D"], generator: Generator | None) -> LocalMemory:
        """The memory around particles of equal weight."""
        weights = particles.new_full(particles.shape[:2], 1 / self.particles)
        if self.reg == 0:
            return LocalMemory(particles, particles.new_empty(*particles.shape[:2], 0, 0), weights)
        several = particles[:, :, None].expand(-1, -1, self.draws, -1)
        return LocalMemory(particles, self.model.observe(several, generator), weights)

    def predict(
        self, state: LocalMemory, *, control: Float[Tensor, "b k"] | None = None, generator: Generator | None = None
    ) -> LocalMemory:
        """Resample by the positive weights, move, begin anew with a share of the particles, and draw what would be seen."""
        chosen = systematic(state.weights.clamp_min(0).log(), generator)
        particles = state.particles.gather(1, chosen[..., None].expand_as(state.particles))
        acted = {} if control is None else {"control": control[:, None]}
        moved = self.model.move(particles, generator, **acted)
        if self.fresh is not None:  # weights are equal: it is no matter which ones are replaced
            size = (len(moved), len(self.fresh))
            anew = torch.randint(len(self.initial), size, device=moved.device, generator=generator)
            moved = moved.index_copy(1, self.fresh, self.initial[anew])
        if self.region is not None:
            outside = ((moved < self.region[0]) | (moved > self.region[1])).any(-1, keepdim=True)
            anew = torch.randint(len(self.initial), moved.shape[:2], device=moved.device, generator=generator)
            moved = torch.where(outside, self.initial[anew], moved)
        return self.imagined(moved, generator)

    def update(self, state: LocalMemory, obs: Float[Tensor, "b q"]) -> LocalMemory:
        """Weigh the memory by the importance-weighted rule, given the observation ``b q``."""
        return self.observe(state, obs)[0]

    def observe(self, state: LocalMemory, obs: Float[Tensor, "b q"]) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """Weigh, and whether anything that was imagined is near the observation: far from all of it the kernel is 0 everywhere."""
        if self.reg == 0:
            log_weights = self.temper * self.model.log_likelihood(obs.to(state.particles)[:, None], state.particles)
            possible = log_weights.amax(-1) > -math.inf
            return state._replace(weights=torch.where(possible[:, None], log_weights, 0).softmax(-1)), possible
        seen, x = state.draws.flatten(1, 2), obs.to(state.draws)
        if self.partial:  # columns of silent sensors are equal everywhere: they are not compared
            spoke = x.isfinite()
            seen, x = torch.where(spoke[:, None], seen, 0), torch.where(spoke, x, 0)
        if self.counts:
            seen, x = seen.clamp_min(0).sqrt(), x.clamp_min(0).sqrt()
        weights = local_weights(seen, x, self.landmarks, reg=self.reg, factor=self.factor)
        weights = weights.unflatten(1, (self.particles, self.draws)).sum(-1)
        total = weights.sum(-1, keepdim=True)
        possible = total > LITTLE
        weights = torch.where(possible, weights / torch.where(possible, total, 1), 1 / self.particles)
        return state._replace(weights=weights), possible[:, 0]

    def estimate(self, state: LocalMemory) -> Float[Tensor, "b d"]:
        """The mean of the embedding, by the signed weights, ``b d``."""
        return (state.weights[:, None] @ state.particles[..., : self.d])[:, 0]

    def covariance(self, state: LocalMemory) -> Float[Tensor, "b d d"]:
        """The covariance of the particles by their positive weights, ``b d d``: never indefinite."""
        states, positive = self.weighted_sample(state)
        centred = states - positive[:, None] @ states
        return (positive[..., None] * centred).mT @ centred

    def weighted_sample(self, state: LocalMemory) -> tuple[Float[Tensor, "b P d"], Float[Tensor, "b P"]]:
        """The particles and the positive part of their weights, of sum 1."""
        positive = state.weights.clamp_min(0)
        return state.particles[..., : self.d], positive / positive.sum(-1, keepdim=True)

    def diagnostics(self, state: LocalMemory) -> dict[str, Tensor]:
        """``ess``, the effective sample size of the positive weights, and ``negative``, the mass of the others, ``b``."""
        positive = state.weights.clamp_min(0)
        return {"ess": effective_sample_size(positive.log()), "negative": (positive - state.weights).sum(-1)}


def local_weights(
    seen: Float[Tensor, "b n q"], obs: Float[Tensor, "b q"], landmarks: Tensor, *, reg: float, factor: float
) -> Float[Tensor, "b n"]:
    """The importance-weighted rule with ratio 1 over a memory of its own for each sequence, in Nystrom features.

    w = K_nm (K_mn K_nm + n lambda K_mm)^-1 k_m(x), with a Gaussian kernel whose bandwidth is ``factor`` times the root mean square
    distance of the memory's observations; K_mm has `JITTER` on its diagonal. The small system is solved in float64.

    Args:
        seen: observations of the memory ``b n q``.
        obs: x ``b q``.
        landmarks: numbers of the m observations that span the features.
        reg: lambda. factor: of the bandwidth.

    References: Xu et al. (2022), Algorithm 1, step 3, with D = I.
    """
    n, m = seen.shape[1], len(landmarks)
    spread = 2 * seen.var(1, correction=0).sum(-1)  # the mean squared distance of two of them
    scale = (factor * spread.clamp_min(torch.finfo(seen.dtype).tiny).sqrt())[:, None, None]
    middle = seen.mean(1, keepdim=True)
    points = torch.cat([seen - middle, obs[:, None] - middle], 1) / scale
    k = gaussian_table(points, points[:, landmarks])
    system = (k[:, :n].mT @ k[:, :n]).double()
    base = k[:, landmarks].double()
    base = base + JITTER * torch.eye(m, dtype=base.dtype, device=base.device)
    factorised = torch.linalg.cholesky_ex(system + n * reg * base)[0]
    solved = torch.cholesky_solve(k[:, n:].mT.double(), factorised)
    return (k[:, :n] @ solved.to(k))[..., 0]


def gaussian_table(a: Float[Tensor, "b n q"], c: Float[Tensor, "b m q"]) -> Float[Tensor, "b n m"]:
    """exp(-||a_i - c_j||^2 / 2) by one product of matrices."""
    square = torch.baddbmm(-0.5 * c.square().sum(-1)[:, None], a, c.mT) - 0.5 * a.square().sum(-1, keepdim=True)
    return square.clamp(LEAST, 0).exp()


class KernelMonteCarlo(ShownModule):
    """The kernel Monte Carlo filter of a model learned from recordings (`kbf.filters.lagged_model`): no true model is needed.

    `prepare` chooses, on the last fifth of the recordings and from the rest alone, what one-step residuals cannot tell: whether the
    state carries its velocity; how much wider than its residuals the noise of the moves must be so that whole runs stay on track;
    and lambda, which smooths the rule where errors of the sensors go on from step to step (0 is the rule's limit, weights by the
    law's density: sharper where observations tell much, and too sure where the law is not quite true, unless it is tempered). All
    are tried by running the filter through held-out stretches. The law of the observations is chosen by its held-out log score
    (`kbf.filters.laws.choice`). With ``partial`` sensors may be silent one by one, each with a law of its own
    (`kbf.filters.laws.sensors`): draws and observations are compared in the columns of those that speak.
    """

    order: Tensor
    inflation: Tensor
    reg: Tensor
    restart: Tensor
    temper: Tensor
    law: Tensor
    partial: bool
    orders: Many[int]
    inflations: Many[float]
    regs: Many[float]
    seed: int

    def __init__(
        self,
        particles: int = 400,
        draws: int = 4,
        rank: int = 64,
        factor: float = 0.7,
        *,
        orders: Many[int] = ORDERS,
        inflations: Many[float] = (1.0, 2.0, 4.0, 8.0),
        regs: Many[float] = (1e-3, 1e-2, 0.0),
        restarts: Many[float] = (0.005, 0.02),
        tempers: Many[float] = (1.0, 0.5, 0.25),
        law: str | None = None,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        """What to build, and what to choose from.

        Args:
            particles, draws, rank, factor: as of `KernelMonteCarloFilter`.
            orders: of the model: 1 without velocity, 2 with. inflations: of the moves' noise. regs: lambda of the rule;
                0 weighs by the density of the law of observations. restarts: shares of particles that begin anew in each move:
                few of them cost next to nothing, and a lost track is found again.
            tempers: powers of the density where lambda is 0; the middle one is that of the first round.
            law: of observations, a name of `kbf.filters.laws.choice.LAWS`; None chooses.
            seed: of the held-out runs.
            dtype: float32 or float64, of the filter's steps.

        Raises:
            ValueError: an unknown law or dtype, or nothing to choose from.
        """
        super().__init__()
        if law is not None and law not in LAWS:
            raise ValueError(f"law must be null (the best one is chosen) or one of {', '.join(LAWS)}; got {law!r}")
        if dtype not in ("float32", "float64") or not (orders and inflations and regs and restarts and tempers):
            raise ValueError(
                f"dtype must be float32 or float64, got {dtype!r}; orders, inflations, regs, restarts and tempers must not be empty"
            )
        self.sizes: dict[str, Any] = {"particles": particles, "draws": draws, "rank": rank, "factor": factor}
        self.orders, self.inflations, self.regs, self.restarts, self.tempers = orders, inflations, regs, restarts, tempers
        self.given_law, self.seed = law, seed
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.register_buffer("order", torch.tensor(orders[-1]))
        self.register_buffer("inflation", torch.tensor(inflations[0], dtype=torch.float64))
        self.register_buffer("reg", torch.tensor(regs[0], dtype=torch.float64))
        self.register_buffer("restart", torch.tensor(restarts[0], dtype=torch.float64))
        self.register_buffer("temper", torch.tensor(tempers[0], dtype=torch.float64))
        self.register_buffer("law", torch.tensor(LAWS.index(law or "gaussian")))
        self.partial, self.sensors = False, ChosenSensors()

    @torch.no_grad()
    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Choose the law of observations, then order, inflation, lambda and temper by the error of runs through held-out stretches.

        First every order with every inflation, at the least lambda and a middle temper; then lambda at the best of these and the
        inflation before it: smoothing the rule does a part of what wider moves do; then whether particles begin anew. The temper,
        where lambda is 0, is the least of those with the best log score of the states: it says how sure the filter may be, which
        errors hardly show. Too short recordings (no stretch of ten steps can be held out) leave the first of each.
        """
        sequences = as_sequences(memory, partial=self.partial)
        if self.partial:
            self.sensors.choose(*observed_pairs(sequences), self.given_law)
        elif self.given_law is None:
            seen, obs = observed_pairs(sequences)
            some = evenly(len(seen), LOOKED_AT, seen.device)
            self.law.fill_(LAWS.index(choose_law(seen[some].double(), obs[some].double()).name))
        try:
            fit, held = split(sequences, HELD_OUT)
        except ValueError:
            return
        stretches = held_stretches(held)
        several = (self.orders, self.inflations, self.regs, self.restarts, self.tempers)
        if not stretches or all(len(each) == 1 for each in several):
            return
        batch = pad(stretches)
        scale = torch.cat([s.states for s in fit]).var(0).clamp_min(1e-12)
        models: dict[int, LaggedModel] = {}
        for order in self.orders:
            with suppress(ValueError):  # too few steps
                models[order] = learn_lagged_model(fit, order=order, law=self.kind)
        found: dict[tuple[int, float, float, float, float], HeldOut] = {}

        def attempt(*tried: Any) -> None:
            if tried not in found:
                order, inflation, *rest = tried
                filter = self.filter_of(widened(models[order], inflation), fit, *rest)
                found[tried] = held_out(filter, batch, scale, self.seed)

        def best() -> Any:
            return min(found, key=lambda key: found[key].error)

        cheapest = min(self.regs)  # 0, if it is there: nothing is imagined
        middle = self.tempers[len(self.tempers) // 2]
        for order in models:
            for inflation in self.inflations:
                attempt(order, inflation, cheapest, self.restarts[-1], middle)
        if not found:
            return
        order, inflation = best()[:2]
        k = list(self.inflations).index(inflation)
        for reg in self.regs:
            for near in self.inflations[max(0, k - 1) : k + 1]:
                attempt(order, near, reg, self.restarts[-1], middle)
        *others, temper = best()
        if others[2] == 0:
            for temper in self.tempers:
                attempt(*others, temper)
            least = min(found[*others, each].surprise for each in self.tempers)
            temper = min(each for each in self.tempers if found[*others, each].surprise <= least + TIE)
        *others, _ = others
        for restart in self.restarts:
            attempt(*others, restart, temper)
        restart = min(self.restarts, key=lambda each: found[*others, each, temper].error)
        values = (*others, restart, temper)
        for buffer, value in zip((self.order, self.inflation, self.reg, self.restart, self.temper), values, strict=True):
            buffer.fill_(value)

    @property
    def kind(self) -> str | ChosenSensors:
        """The law of observations by its name; or sensors that may be silent, and theirs."""
        return self.sensors if self.sensors.known else LAWS[int(self.law)]

    def filter_of(
        self, model: LaggedModel, sequences: list[Sequence], reg: float, restart: float, temper: float
    ) -> KernelMonteCarloFilter:
        """The filter of a model, started from the recorded states."""
        initial = all_states(sequences, model.order).to(self.dtype)
        counts = self.sensors.counts if self.sensors.known else LAWS[int(self.law)] in ("poisson", "negbin")
        numbers = {"reg": reg, "restart": restart, "temper": temper, **self.sizes}
        low, high = initial.amin(0), initial.amax(0)
        margin = MARGIN * (high - low)
        region = (low - margin, high + margin)
        return KernelMonteCarloFilter(model, initial, d=model.d, counts=counts, region=region, **numbers)  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def condition(self, memory: Sequence | list[Sequence] | None) -> KernelMonteCarloFilter:
        """Fit the model with what `prepare` has chosen to all of ``memory``.

        Raises:
            ValueError: no memory, or as `kbf.filters.lagged_model.learn_lagged_model`.
        """
        if memory is None:
            raise ValueError("a learned kernel Monte Carlo filter needs a memory to learn its model from")
        sequences = as_sequences(memory, partial=self.partial)
        if self.partial and not self.sensors.known:
            self.sensors.choose(*observed_pairs(sequences), self.given_law)
        model = learn_lagged_model(sequences, order=int(self.order), inflation=float(self.inflation), law=self.kind)
        return self.filter_of(model, sequences, float(self.reg), float(self.restart), float(self.temper))

    def hyperparameters(self) -> dict[str, float]:
        """What was chosen, for logs; the law by its position in `LAWS`."""
        names = ("order", "inflation", "reg", "restart", "temper", "law")
        return {name: float(getattr(self, name)) for name in names} | self.sensors.hyperparameters()


def held_stretches(held: list[Sequence]) -> list[Sequence]:
    """At most `STRETCHES` stretches of at most `LONG` steps, spread over held-out recordings."""
    spans = [(s, k) for s in held for k in range(0, len(s.states) - 9, LONG)]
    chosen = [spans[i] for i in evenly(len(spans), STRETCHES).tolist()]
    return [piece(s, k, min(k + LONG, len(s.states))) for s, k in chosen]


def held_out(filter: KernelMonteCarloFilter, batch: Sequence, scale: Float[Tensor, " d"], seed: int) -> HeldOut:
    """What a filter does on held-out stretches, without the first steps of each; infinite if it breaks."""
    generator = torch.Generator(scale.device).manual_seed(seed)
    obs = batch.obs.to(filter.initial)
    controls = None if batch.controls is None else batch.controls.to(filter.initial)
    run = rollout(CollectingCovariance(filter), obs, mask=batch.mask, controls=controls, generator=generator)
    known = batch.states[:, BURN_IN:].isfinite().all(-1)
    left = ((run.estimates.double() - batch.states.double())[:, BURN_IN:] / scale.sqrt())[known]
    variance = run.diagnostics[CollectingCovariance.NAME].diagonal(dim1=-2, dim2=-1).double()[:, BURN_IN:][known] / scale
    variance = variance.clamp_min(LEAST_VARIANCE)
    error, surprise = left.square().mean().item(), (left.square() / variance + variance.log()).mean().item()
    return HeldOut(error, surprise) if error == error else HeldOut(math.inf, math.inf)
