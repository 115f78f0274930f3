"""Bootstrap particle filter: draw from the transition, weigh by the likelihood, resample when the weights degenerate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.backwards import particle_backward
from kbf.filters.base import VECTORS, Backward, Now
from kbf.filters.resampling import effective_sample_size, systematic
from kbf.sequence import Sequence, as_sequences
from kbf.ssm import StateSpace, StateSpaceModel


class ParticleState(NamedTuple):
    """Weighted particles: particles ``b P d``, log_weights ``b P`` that are normalised (their exponentials sum to 1)."""

    particles: Tensor
    log_weights: Tensor


class BootstrapFilter:
    """Bootstrap filter: z_i ~ p(z | z_i'), w_i proportional to w_i' p(x | z_i).

    A batch element whose effective sample size is under ``threshold`` P is resampled at the *start* of predict, so that the
    estimate after an update uses the weights before they are thrown away. Resampling picks particles: gradients flow through the
    chosen particles and through the weights, not through the choice.

    Where *every* particle has likelihood zero (log weights all -inf) the weights are reset to uniform: the estimate is then the
    mean of the prediction without weights, and the ``ess`` diagnostic jumps to P. It is never NaN.

    References: Gordon, Salmond and Smith (1993); Doucet and Johansen (2009) for adaptive resampling.
    """

    def __init__(
        self,
        model: StateSpace,
        initial: Float[Tensor, "n d"],
        particles: int,
        threshold: float = 0.5,
        *,
        resample: Callable[..., Tensor] = systematic,
    ) -> None:
        """The filter of one model.

        Args:
            model: draws moves and gives the likelihood; if it has an attribute ``controlled`` that is not 0, its ``move`` takes a
                ``control``. The matrices of a `StateSpaceModel` are converted to the dtype and
                device of ``initial``: float32 states make a float32 filter.
            initial: ``n d``, samples of the state before the first move (the training states), drawn with replacement.
            particles: P.
            threshold: share of P under which the effective sample size triggers resampling; 0 never, 1 (nearly) always.
            resample: a scheme of `kbf.filters.resampling`.

        Raises:
            ValueError: no particles or no initial states.
        """
        if particles < 1 or len(initial) < 1:
            raise ValueError(f"a particle filter needs particles and initial states, got {particles} and {len(initial)}")
        self.model = in_type_of(model, initial)
        self.initial, self.particles, self.threshold, self.resample = initial, particles, threshold, resample
        self.controlled = getattr(model, "controlled", 0)

    def init(self, batch: int, *, generator: Generator | None = None) -> ParticleState:
        """P initial states for each sequence, drawn with replacement, with equal weights."""
        size, device = (batch, self.particles), self.initial.device
        chosen = torch.randint(len(self.initial), size, device=device, generator=generator)
        return ParticleState(self.initial[chosen], self.initial.new_full(size, -math.log(self.particles)))

    def predict(
        self, state: ParticleState, *, control: Float[Tensor, "b k"] | None = None, generator: Generator | None = None
    ) -> ParticleState:
        """Resample where the effective sample size is low, then draw z' for each particle."""
        particles, log_weights = state
        low = effective_sample_size(log_weights) < self.threshold * self.particles
        if low.any():  # resampling costs as much as the move
            chosen = self.resample(log_weights, generator)
            chosen = torch.where(low[:, None], chosen, torch.arange(self.particles, device=chosen.device))
            particles = particles.gather(1, chosen[..., None].expand_as(particles))
            log_weights = torch.where(low[:, None], -math.log(self.particles), log_weights)
        acted = {} if control is None else {"control": control[:, None]}
        return ParticleState(self.model.move(particles, generator, **acted), log_weights)

    def update(self, state: ParticleState, obs: Float[Tensor, "b *x"]) -> ParticleState:
        """Weigh by the likelihood of the observation, ``b *x``; if it is zero for all particles, weigh them equally."""
        log_weights = state.log_weights + self.model.log_likelihood(obs[:, None], state.particles)
        possible = (log_weights > -math.inf).any(-1, keepdim=True)
        log_weights = torch.where(possible, log_weights, 0)
        return state._replace(log_weights=log_weights.log_softmax(-1))

    def estimate(self, state: ParticleState) -> Float[Tensor, "b d"]:
        """The weighted mean, ``b d``."""
        return (state.log_weights.exp()[:, None] @ state.particles)[:, 0]

    def covariance(self, state: ParticleState) -> Float[Tensor, "b d d"]:
        """The weighted covariance (divided by the sum of weights, 1), ``b d d``."""
        centred = state.particles - self.estimate(state)[:, None]
        return (state.log_weights.exp()[..., None] * centred).mT @ centred

    def diagnostics(self, state: ParticleState) -> dict[str, Tensor]:
        """``ess``, the effective sample size ``b``."""
        return {"ess": effective_sample_size(state.log_weights)}

    def smoother(self) -> Backward:
        """Forward filtering, backward smoothing (`kbf.filters.backwards.particle_backward`), over at most 1,000 particles a time.

        Raises:
            ValueError: a model that does not know the density of its moves.
        """
        dynamics = getattr(self.model, "dynamics", self.model)
        if not hasattr(dynamics, "log_transition"):
            raise ValueError(f"a smoother needs the density of a move: {type(dynamics).__name__} has no log_transition(z', z)")

        def step_back(
            now: Now, following: ParticleState, *, control: Tensor | None = None, generator: Generator | None = None
        ) -> ParticleState:
            return ParticleState(*particle_backward(dynamics, now.state, following, control=control, generator=generator))

        return step_back


def in_type_of(model: StateSpace, states: Float[Tensor, "n d"]) -> StateSpace:
    """The model with its matrices in the dtype and on the device of ``states``, if it is a `StateSpaceModel`."""
    return model._replace(Q=model.Q.to(states), R=model.R.to(states)) if isinstance(model, StateSpaceModel) else model


class ParticleFilter(nn.Module):
    """The bootstrap filter that knows the true model; with 20,000 particles, the floor: the error that no filter can beat.

    No parameters, no buffers: the model is given, and the first particles are training states.
    """

    def __init__(self, model: StateSpace, particles: int = 4000, threshold: float = 0.5) -> None:
        """Arguments as in `BootstrapFilter`."""
        super().__init__()
        self.model, self.particles, self.threshold = model, particles, threshold

    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Nothing to choose."""

    def condition(self, memory: Sequence | list[Sequence] | None) -> BootstrapFilter:
        """The filter started from the training states, in their dtype and on their device.

        Raises:
            ValueError: no memory: the first particles are drawn from it. Or observations of another shape than the model's.
        """
        if memory is None:
            raise ValueError("a particle filter draws its first particles from the training states: give condition() a memory")
        sequences = as_sequences(memory)
        states, shape = torch.cat([s.states for s in sequences]), sequences[0].obs.shape[1:]
        expected = self.model.observe(states[:1], Generator(states.device).manual_seed(0)).shape[1:]
        if shape != expected:
            raise ValueError(f"the true model sees {tuple(expected)}, the observations are {tuple(shape)}; {VECTORS}")
        return BootstrapFilter(self.model, states, self.particles, self.threshold)
