"""Bootstrap particle filter of a known model.

Draws from the transition, weighs by the likelihood, and resamples where the weights degenerate.

References: Gordon, Salmond and Smith (1993); Doucet and Johansen (2009).
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor

from kbf.filters.gaussian.moments import MAX_DEVIATIONS
from kbf.filters.particle.resampling import effective_sample_size, systematic
from kbf.filters.protocols import (
    Backward,
    FilterStep,
    UpdateByObserve,
    WithoutHyperparameters,
    allows_missing_sensors,
)
from kbf.recording import ENCODE_IMAGES, Recording, as_recordings
from kbf.rkhs.linalg import cholesky
from kbf.runtime.branches import computes_all_branches
from kbf.runtime.html_repr import Shown
from kbf.ssm import (
    ControlledDynamics,
    FactoredModel,
    KnownTransition,
    OrientationModel,
    OverDynamics,
    StateSpace,
    StateSpaceModel,
    log_scale,
    root_of,
)

# Particles of each of the two times in a backward step, whose cost is quadratic in them.
MAX_BACKWARD_PARTICLES = 500


def particle_backward(
    model: Any,
    now: tuple[Float[Tensor, "b P d"], Float[Tensor, "b P"]],
    following: tuple[Float[Tensor, "b N d"], Float[Tensor, "b N"]],
    *,
    control: Tensor | None = None,
    generator: Generator | None = None,
) -> tuple[Float[Tensor, "b M d"], Float[Tensor, "b M"]]:
    """Return the particles at t with smoothed log weights, by forward filtering-backward smoothing.

    w^s_i = w_i sum_j w^{s+}_j q(z'_j | z_i) / sum_k w_k q(z'_j | z_k), in O(M^2) for M particles at
    each of the two times. More than `MAX_BACKWARD_PARTICLES` particles are thinned first.

    Args:
        model: has ``log_transition(z', z)``, up to a constant.
        now: filtered particles at t and their normalised log weights.
        following: smoothed particles at t + 1 and their normalised log weights.
        control: ``b k``, of the move between them.
        generator: of the thinning.

    References: Doucet, Godsill and Andrieu (2000), equation 37.
    """
    z, log_w = thinned(*now, generator)
    after, log_after = thinned(*following, generator)
    acted = {} if control is None else {"control": control[:, None, None]}
    log_q = model.log_transition(after[:, :, None], z[:, None], **acted) + log_w[:, None]
    back = log_q.softmax(-1)  # row j: distribution of the ancestor of z'_j
    return z, (log_after.exp()[:, None] @ back)[:, 0].log().log_softmax(-1)


def thinned(
    particles: Float[Tensor, "b P d"],
    log_weights: Float[Tensor, "b P"],
    generator: Generator | None = None,
) -> tuple[Float[Tensor, "b M d"], Float[Tensor, "b M"]]:
    """Return at most `MAX_BACKWARD_PARTICLES` particles, drawn by systematic resampling.

    Fewer particles are returned unchanged.
    """
    b, P = log_weights.shape
    if P <= MAX_BACKWARD_PARTICLES:
        return particles, log_weights
    chosen = systematic(log_weights, generator, draws=MAX_BACKWARD_PARTICLES)
    equal = log_weights.new_zeros(b, MAX_BACKWARD_PARTICLES).log_softmax(-1)
    return particles.gather(1, chosen[..., None].expand(-1, -1, particles.shape[-1])), equal


class ParticleState(NamedTuple):
    """Weighted particles: particles ``b P d`` and normalised log_weights ``b P``."""

    particles: Tensor
    log_weights: Tensor


class BootstrapFilter(UpdateByObserve[ParticleState], Shown):
    """Bootstrap filter: z_i ~ p(z | z_i'), w_i proportional to w_i' p(x | z_i).

    A batch element whose effective sample size is below ``threshold`` P is resampled at the *start*
    of predict, so that the estimate after an update uses the weights before resampling. Gradients
    flow through the chosen particles and through the weights, not through the choice.

    Where *every* particle has likelihood zero, ``update`` resets the weights to uniform. The
    filtering loop rejects such an observation and keeps the predicted weights. Estimates are never
    NaN.
    """

    def __init__(
        self,
        model: StateSpace,
        initial: Float[Tensor, "n d"],
        particles: int,
        threshold: float = 0.5,
    ) -> None:
        """Store the model and the initial states.

        Args:
            model: draws moves and evaluates the likelihood. If it has an attribute ``controlled``
                that is not 0, its ``move`` takes a ``control``. The matrices of a `StateSpaceModel`
                are converted to the dtype and the device of ``initial``.
            initial: ``n d``, samples of the state before the first move (the training states),
                drawn with replacement.
            particles: P.
            threshold: share of P below which the effective sample size triggers resampling; 0
                never, 1 (nearly) always.

        Raises:
            ValueError: no particles or no initial states.
        """
        if particles < 1 or len(initial) < 1:
            raise ValueError(
                "a particle filter requires particles and initial states, "
                f"got {particles} and {len(initial)}"
            )
        self.model: StateSpace = in_type_of(model, initial)
        self.initial: Tensor = initial
        self.particles: int = particles
        self.threshold: float = threshold
        self.controlled: int = model.controlled if isinstance(model, ControlledDynamics) else 0
        self.allow_missing_sensors: bool = allows_missing_sensors(model)

    def init(self, batch: int, *, generator: Generator | None = None) -> ParticleState:
        """Return P initial states per recording, drawn with replacement, with equal weights."""
        size, device = (batch, self.particles), self.initial.device
        chosen = torch.randint(len(self.initial), size, device=device, generator=generator)
        return ParticleState(
            self.initial[chosen], self.initial.new_full(size, -math.log(self.particles))
        )

    def predict(
        self,
        state: ParticleState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> ParticleState:
        """Resample where the effective sample size is low, then draw z' of each particle."""
        particles, log_weights = state
        P = log_weights.shape[1]
        low = effective_sample_size(log_weights) < self.threshold * P
        every = computes_all_branches()
        # skipped if possible: resampling costs as much as the move
        if every or bool(low.any()):
            chosen = systematic(log_weights, generator)
            if every or not bool(low.all()):  # the others keep their particles
                chosen = torch.where(low[:, None], chosen, torch.arange(P, device=chosen.device))
            particles = particles.gather(1, chosen[..., None].expand_as(particles))
            log_weights = log_weights.masked_fill(low[:, None], -math.log(P))
        acted = {} if control is None else {"control": control[:, None]}
        return ParticleState(self.model.move(particles, generator, **acted), log_weights)

    def observe(
        self, state: ParticleState, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[ParticleState, Bool[Tensor, " b"]]:
        """Return the particles weighted by p(x | z_i), and whether any p(x | z_i) is above zero.

        Weights are equal where it is zero for all particles, or NaN for one.

        Below the density of a Gaussian at `kbf.filters.gaussian.moments.MAX_DEVIATIONS` standard
        deviations, in each component, it counts as 0.
        """
        log_likelihood = self.model.log_likelihood(obs[:, None], state.particles)
        log_weights = state.log_weights + log_likelihood
        least = -0.5 * MAX_DEVIATIONS**2 * obs[0].numel()
        possible = (
            torch.where(state.log_weights > -math.inf, log_likelihood, -math.inf).amax(-1) > least
        )
        log_weights = log_weights.masked_fill(~possible[:, None], 0)
        return state._replace(log_weights=log_weights.log_softmax(-1)), possible

    def log_likelihood(
        self, state: ParticleState, obs: Shaped[Tensor, "b *x"]
    ) -> Float[Tensor, " b"] | None:
        """Return log sum_i w_i p(x | z_i) of the predicted particles, ``b``.

        None for learned models, whose density p(x | z) is known up to a constant.
        """
        if not isinstance(self.model, StateSpaceModel | FactoredModel | OrientationModel):
            return None
        return (
            state.log_weights + self.model.log_likelihood(obs[:, None], state.particles)
        ).logsumexp(-1)

    def estimate(self, state: ParticleState) -> Float[Tensor, "b d"]:
        """Return the weighted mean, ``b d``."""
        return state.log_weights.exp().unsqueeze(1).bmm(state.particles).squeeze(1)

    def covariance(self, state: ParticleState) -> Float[Tensor, "b d d"]:
        """Return the weighted covariance, ``b d d``."""
        centred = state.particles - self.estimate(state)[:, None]
        return (state.log_weights.exp()[..., None] * centred).mT @ centred

    def weighted_sample(
        self, state: ParticleState
    ) -> tuple[Float[Tensor, "b P d"], Float[Tensor, "b P"]]:
        """Return particles and weights."""
        return state.particles, state.log_weights.exp()

    def diagnostics(self, state: ParticleState) -> dict[str, Tensor]:
        """Return ``ess``, the effective sample size ``b``."""
        return {"ess": effective_sample_size(state.log_weights)}

    def smoother(self) -> Backward:
        """Return the step of forward filtering-backward smoothing (`particle_backward`).

        Raises:
            ValueError: the model has no transition density, ``log_transition``.
        """
        dynamics = self.model.dynamics if isinstance(self.model, OverDynamics) else self.model
        if not isinstance(dynamics, KnownTransition):
            raise ValueError(
                "a smoother requires the density of a move: "
                f"{type(dynamics).__name__} has no log_transition(z', z)"
            )

        def step_back(
            now: FilterStep,
            following: ParticleState,
            *,
            control: Tensor | None = None,
            generator: Generator | None = None,
        ) -> ParticleState:
            settings = {"control": control, "generator": generator}
            return ParticleState(*particle_backward(dynamics, now.state, following, **settings))

        return step_back


def in_type_of(model: StateSpace, states: Float[Tensor, "n d"]) -> StateSpace:
    """Return the model in the dtype and on the device of ``states``.

    Only a `StateSpaceModel` is converted. If it is constant, its covariances are factored once.
    """
    if not isinstance(model, StateSpaceModel):
        return model
    model = model._replace(Q=model.Q.to(states), R=model.R.to(states))
    if type(model) is not StateSpaceModel or model.Q.requires_grad or model.R.requires_grad:
        return model
    factor = cholesky(model.R)
    return FactoredModel(model, root_of(model.Q), factor, log_scale(factor))


class ParticleRecipe(WithoutHyperparameters):
    """Base class of models with known dynamics: neither parameters nor buffers."""

    given_equations = True

    def __init__(self, model: StateSpace, particles: int = 4000, threshold: float = 0.5) -> None:
        """Store the true model; the others as in `BootstrapFilter`."""
        super().__init__()
        self.model: StateSpace = model
        self.particles: int = particles
        self.threshold: float = threshold

    def fit(self, memory: Recording | list[Recording] | None) -> BootstrapFilter:
        """Return the filter that starts from the training states, in their dtype and device.

        Raises:
            ValueError: no memory, or as `state_space`.
        """
        recordings = as_recordings(memory)
        states = torch.cat([s.states for s in recordings])
        return BootstrapFilter(
            self.state_space(recordings, states), states, self.particles, self.threshold
        )

    def state_space(self, recordings: list[Recording], states: Float[Tensor, "n d"]) -> StateSpace:
        """Return the model of the filter, from the true one and the recordings."""
        raise NotImplementedError


class ParticleFilter(ParticleRecipe):
    """The bootstrap filter of the true model.

    With 20,000 particles its error is the floor, the Bayes-optimal error. The initial particles are
    training states.
    """

    def state_space(self, recordings: list[Recording], states: Float[Tensor, "n d"]) -> StateSpace:
        """Return the true model.

        Raises:
            ValueError: observations of another shape than those of the model.
        """
        shape = recordings[0].obs.shape[1:]
        expected = self.model.observe(states[:1], Generator(states.device).manual_seed(0)).shape[1:]
        if shape != expected:
            raise ValueError(
                f"observations of the true model have the shape {tuple(expected)}, "
                f"those of the memory {tuple(shape)}; {ENCODE_IMAGES}"
            )
        return self.model
