"""Differentiable particle filter (DPF): transition, likelihood and proposal are networks.

All parameters are trained end to end.

References: Jonschkowski, Rastogi, Brock (2018), Differentiable Particle Filters: sections III and
IV. Soft resampling: Karkus, Hsu, Lee (2018).
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.neural.base import EndToEndFilter
from kbf.filters.particle.resampling import effective_sample_size, soft

# Smallest likelihood of a particle, the bound of the paper: no observation removes all weight.
MIN_LIKELIHOOD = 0.004
# Largest absolute component of a particle, in standard deviations of the training states.
#
# Without it the learned transition diverged on 2 of 10 draws of ten sequences of `pendulum_rkn`,
# and the particles never returned.
MAX_STATE = 5.0
# Largest absolute component of a vector observation, in standard deviations of the training part.
#
# The networks were not trained on larger values, which are rejected.
MAX_OBSERVATION = 100.0
# Proposals for each observation in `DPF.individual_loss`.
PROPOSALS_PER_OBSERVATION = 16
# States of other times for each observation in `DPF.individual_loss`.
OTHER_STATES_PER_OBSERVATION = 16


class DPFState(NamedTuple):
    """Weighted particles of y = (z, v), in standard units.

    Attributes:
        particles: ``b P y``. log_weights: ``b P``, normalised.
        drawn: ``b P y``, standard normal numbers of the last predict, used by the proposals of the
            update, which draws none.
        taken: ``b``, number of observations used so far.
    """

    particles: Tensor
    log_weights: Tensor
    drawn: Tensor
    taken: Tensor


class DPF(EndToEndFilter[DPFState]):
    """A particle filter of y = (z, v), z ``d`` in standard units and ``hidden`` components v.

    The hidden components, such as speeds, are not recorded.

    1. Resample softly from alpha w + (1 - alpha) / P (`kbf.filters.particle.resampling.soft`), so
       that the new weights have a gradient.
    2. Move: y <- A y + c + V tanh(W y + U eps + b) + s eps with eps ~ N(0, I), noise of a learned
       shape, bounded by `MAX_STATE`. A control u adds B u to c and E u to b.
    3. Propose: after t observations the share gamma^t of the particles is replaced by k(e, eps),
       where e = (w(x), r(x)) encodes the observation. The first observation replaces all of them.
    4. Weigh: w_i <- w_i l(e, z_i), with a likelihood in [`MIN_LIKELIHOOD`, 1].

    All parameters are fitted to the density of the true state, sum_i w_i N(z; z_i, diag sigma^2),
    through all steps of a window, plus the losses of l and k alone (`individual_loss`). sigma is
    learned, and part of the covariance. The paper trains l and k first and everything afterwards,
    with transitions known up to noise; here both losses are added, and transitions are learned.
    """

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        *,
        hidden: int = 2,
        particles: int = 100,
        alpha: float = 0.5,
        gamma: float | None = 0.7,
        m: int = 16,
        units: int = 32,
        individual: float = 1.0,
        controls: int = 0,
        encoder: nn.Module | None = None,
    ) -> None:
        """Initialise an untrained network.

        Args:
            d: components of the state.
            q: components of an observation, or its shape.
            hidden: components of v.
            particles: P.
            alpha: of soft resampling, in (0, 1]; 1 is systematic resampling, without a gradient.
            gamma: decay of the share of proposals; 0 proposes at the first observation only, None
                never.
            m: half the components of the encoding e.
            units: of the inner layers of each network.
            individual: factor of `individual_loss`.
            controls, encoder: as in `EndToEndFilter`.

        Raises:
            ValueError: no particles, or alpha or gamma out of range.
        """
        super().__init__(d, q, m, encoder, controls)
        if particles < 1 or not 0 < alpha <= 1 or not 0 <= (gamma or 0) <= 1:
            raise ValueError(
                "a DPF requires particles >= 1, 0 < alpha <= 1 and 0 <= gamma <= 1, "
                f"got {particles}, {alpha} and {gamma}"
            )
        self.d, self.P, self.individual = d, particles, individual
        self.alpha, self.gamma = alpha, gamma
        y = d + hidden
        self.linear, self.inner = nn.Linear(y, y), nn.Linear(2 * y, units)
        self.outer: nn.Linear = nn.Linear(units, y, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(y))
            self.linear.bias.zero_()
            self.outer.weight.mul_(0.1)
        self.log_noise: nn.Parameter = nn.Parameter(torch.full((y,), math.log(0.2)))
        self.log_start: nn.Parameter = nn.Parameter(torch.zeros(y))
        self.log_width: nn.Parameter = nn.Parameter(torch.full((d,), math.log(0.3)))
        self.likelihood_of_encoding: nn.Linear = nn.Linear(2 * m, units)
        self.likelihood_of_state: nn.Linear = nn.Linear(d, units, bias=False)
        self.likelihood: nn.Sequential = nn.Sequential(
            nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 1)
        )
        self.proposal_of_encoding: nn.Linear = nn.Linear(2 * m, units)
        self.proposal_of_noise: nn.Linear = nn.Linear(y, units, bias=False)
        self.proposal: nn.Sequential = nn.Sequential(
            nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, y)
        )
        self.push: nn.Linear | None = (
            nn.Linear(controls, y + units, bias=False) if controls else None
        )

    def move(
        self, y: Float[Tensor, "b P y"], eps: Float[Tensor, "b P y"], u: Float[Tensor, "b k"]
    ) -> Float[Tensor, "b P y"]:
        """Return A y + c + V tanh(W y + U eps + b) + s eps; u is in standard units."""
        value, inside = self.linear(y), self.inner(torch.cat([y, eps], -1))
        if self.push is not None:
            straight, bent = self.push(u)[:, None].split([value.shape[-1], inside.shape[-1]], -1)
            value, inside = value + straight, inside + bent
        return value + self.outer(inside.tanh()) + self.log_noise.exp() * eps

    def logit(
        self, z: Float[Tensor, "b P d"], w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> Float[Tensor, "b P"]:
        """Return the logit of the likelihood of particles z."""
        of_encoding = self.likelihood_of_encoding(torch.cat([w, r], -1))[:, None]
        return self.likelihood(of_encoding + self.likelihood_of_state(z))[..., 0]

    def log_likelihood(
        self, z: Float[Tensor, "b P d"], w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> Float[Tensor, "b P"]:
        """Return log l(e, z), with l in [`MIN_LIKELIHOOD`, 1]."""
        return (MIN_LIKELIHOOD + (1 - MIN_LIKELIHOOD) * self.logit(z, w, r).sigmoid()).log()

    def propose(
        self, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"], eps: Float[Tensor, "b P y"]
    ) -> Float[Tensor, "b P y"]:
        """Return k(e, eps), bounded by `MAX_STATE`."""
        of_encoding = self.proposal_of_encoding(torch.cat([w, r], -1))[:, None]
        return (
            MAX_STATE
            * (self.proposal(of_encoding + self.proposal_of_noise(eps)) / MAX_STATE).tanh()
        )

    def init(self, batch: int, *, generator: Generator | None = None) -> DPFState:
        """Return draws around the mean of the training states, with learned variances."""
        scale = (0.5 * self.log_start).exp()
        eps = self.draw(batch, generator)
        return DPFState(
            scale * eps,
            scale.new_full((batch, self.P), -math.log(self.P)),
            torch.zeros_like(eps),
            scale.new_zeros(batch),
        )

    def draw(self, batch: int, generator: Generator | None) -> Float[Tensor, "b P y"]:
        """Return standard normal numbers."""
        y = self.log_noise
        return torch.randn(
            (batch, self.P, len(y)), dtype=y.dtype, device=y.device, generator=generator
        )

    def predict(
        self,
        state: DPFState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> DPFState:
        """Return the particles after soft resampling and the transition."""
        chosen, log_weights = soft(state.log_weights, self.alpha, generator)
        y = state.particles.gather(1, chosen[..., None].expand_as(state.particles))
        moved = self.move(y, self.draw(len(y), generator), self.acted(control, len(y)))
        moved = moved.clamp(-MAX_STATE, MAX_STATE)
        return DPFState(moved, log_weights, self.draw(len(y), generator), state.taken)

    def take_in(
        self, state: DPFState, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> DPFState:
        """Return the particles, some replaced by proposals of weight 1/P, weighted by l(e, z)."""
        y, log_weights = state.particles, state.log_weights
        if self.gamma is not None:
            i = torch.arange(self.P + 1, dtype=y.dtype, device=y.device)
            count = (i * self.gamma ** state.taken[:, None]).floor()
            # evenly spread, since resampled particles stand in the order of their ancestors
            replaced = count[:, 1:] > count[:, :-1]
            y = torch.where(replaced[..., None], self.propose(w, r, state.drawn), y)
            log_weights = torch.where(replaced, -math.log(self.P), log_weights)
        log_weights = log_weights + self.log_likelihood(y[..., : self.d], w, r)
        return DPFState(y, log_weights.log_softmax(-1), state.drawn, state.taken + 1)

    def observe(
        self, state: DPFState, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[DPFState, Bool[Tensor, " b"]]:
        """Return the updated particles and whether the observation was possible.

        It is possible where particles and weights are finite and a vector is within
        `MAX_OBSERVATION`.
        """
        updated = self.update(state, obs)
        possible = updated.log_weights.isfinite().all(-1)
        possible = possible & updated.particles.isfinite().flatten(1).all(-1)
        if not self.raw:
            x = (obs - self.x_mean) / self.x_scale
            possible = possible & (x.abs() < MAX_OBSERVATION).flatten(1).all(-1)
        return updated, possible

    def mean(self, state: DPFState) -> Float[Tensor, "*b d"]:
        """Return the weighted mean of z, in standard units."""
        return (state.log_weights.exp()[..., None] * state.particles[..., : self.d]).sum(-2)

    def spread(self, state: DPFState) -> Float[Tensor, "*b d d"]:
        """Return the covariance of the mixture: that of the particles plus diag sigma^2."""
        centred = state.particles[..., : self.d] - self.mean(state)[..., None, :]
        between = (state.log_weights.exp()[..., None] * centred).mT @ centred
        return between + (2 * self.log_width).exp().diag()

    def weighted_sample(
        self, state: DPFState
    ) -> tuple[Float[Tensor, "b P d"], Float[Tensor, "b P"]]:
        """Return draws z_i + sigma eps of the mixture, in the units of the data, and weights."""
        # eps of another particle: its own may have proposed it, k(e, eps)
        eps = state.drawn[..., : self.d].roll(1, -2)
        z = state.particles[..., : self.d] + self.log_width.exp() * eps
        return self.z_mean + self.z_scale * z, state.log_weights.exp()

    def diagnostics(self, state: DPFState) -> dict[str, Tensor]:
        """Return ``ess``, the effective sample size ``b``."""
        return {"ess": effective_sample_size(state.log_weights)}

    def log_density(self, state: DPFState, z: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """Return log sum_i w_i N(z; z_i, diag sigma^2).

        References: Jonschkowski et al. (2018), section IV: the end-to-end loss.
        """
        return (state.log_weights + self.kernel(z, state.particles[..., : self.d])).logsumexp(-1)

    def kernel(
        self, z: Float[Tensor, "*b d"], points: Float[Tensor, "*b P d"]
    ) -> Float[Tensor, "*b P"]:
        """Return log N(z; z_i, diag sigma^2)."""
        white = (z[..., None, :] - points) * (-self.log_width).exp()
        return -(0.5 * white.square() + self.log_width + 0.5 * math.log(2 * math.pi)).sum(-1)

    @property
    def coupling(self) -> str | None:
        """Return why the loss is no mean over windows: `individual_loss` draws other states."""
        if self.individual == 0:
            return None
        return "its loss draws states of other windows (model.net.individual=0 leaves that out)"

    def individual_loss(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "n m"], r: Float[Tensor, "n m"]
    ) -> Tensor | float:
        """Return the losses of l and k alone, on n observations and their states.

        The loss of l is -log l(e, z) - mean log(1 - l(e, z')) with states z' of other observations,
        that of k is -log mean_j N(z; k(e, eps_j), diag sigma^2).

        References: Jonschkowski et al. (2018), section IV: individual learning of the models.
        """
        if self.individual == 0 or len(z) == 0:
            return 0.0
        others = z[torch.randint(len(z), (len(z), OTHER_STATES_PER_OBSERVATION), device=z.device)]
        loss = -functional.logsigmoid(self.logit(z[:, None], w, r)).mean()
        loss = loss - functional.logsigmoid(-self.logit(others, w, r)).mean()
        if self.gamma is None:
            return self.individual * loss
        J = PROPOSALS_PER_OBSERVATION
        eps = torch.randn(len(z), J, len(self.log_noise), dtype=z.dtype, device=z.device)
        density = self.kernel(z, self.propose(w, r, eps)[..., : self.d]).logsumexp(-1).mean()
        return self.individual * (loss + math.log(J) - density)
