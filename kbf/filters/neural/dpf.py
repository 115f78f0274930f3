"""The differentiable particle filter: moves, likelihoods and proposals of particles are networks that are trained end to end."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.neural.base import EndToEndFilter
from kbf.filters.particle.resampling import effective_sample_size, soft

LEAST_LIKELIHOOD = 0.004
"""Of any particle: what the paper bounds its estimator by, so that no observation empties a region for good."""
FURTHEST = 5.0
"""From the mean, in standard deviations of the training states: no particle is proposed or moved farther. On 2 of 10 draws of ten
sequences of `pendulum_rkn` the learned moves ran away without it, and nothing ever brought the
particles back."""
LARGEST = 100.0
"""Of an observation that is no image, in standard deviations of the training part: beyond, networks have learned nothing."""
PROPOSALS, OTHERS = 16, 16
"""Proposals, and states of other times, for each observation in `DPF.individual_loss`."""


class DPFState(NamedTuple):
    """Weighted particles of y = (z, v), in standard units.

    Attributes:
        particles: ``b P y``. log_weights: ``b P``, normalised.
        drawn: ``b P y``, standard normal numbers of the last predict, for the proposals of the
            update: that one draws nothing.
        taken: ``b``, how many observations were taken in.
    """

    particles: Tensor
    log_weights: Tensor
    drawn: Tensor
    taken: Tensor


class DPF(EndToEndFilter[DPFState]):
    """The filter of y = (z, v): the state z ``d`` in standard units, and ``hidden`` components v that nobody recorded (speeds).

    1. Resample softly, from alpha w + (1 - alpha) / P (`kbf.filters.particle.resampling.soft`): the
    new weights have a gradient. 2. Move: y <- A y + c + V tanh(W y + U eps + b) + s eps with eps ~
    N(0, I): noise of a learned shape; none beyond `FURTHEST`.
       A control u adds B u to c and E u to b.
    3. Propose: the share gamma^t of the particles, after t observations, is replaced by k(e, eps);
    e = (w(x), r(x)) encodes the
       observation: the first one places all of them.
    4. Weigh: w_i <- w_i l(e, z_i), a likelihood within (0, 1] (bounded from below, too:
    `LEAST_LIKELIHOOD`).

    Trained on the density of the true state under the particles, sum_i w_i N(z; z_i, diag sigma^2),
    through all steps of a window, and beside it on the losses of l and k by themselves
    (`individual_loss`). Here sigma is learned, and part of the covariance.

    References: Jonschkowski, Rastogi, Brock (2018), Differentiable Particle Filters: sections III
    and IV. Resampling that has a gradient: Karkus, Hsu, Lee (2018). The paper trains l and k first
    and all of it afterwards, with moves that are known up to noise; here both losses are added up,
    and moves are learned as well.
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
        """An untrained net.

        Args:
            d: components of the state. q: components of an observation, or its shape.
            hidden: components of v. particles: P.
            alpha: of soft resampling, within (0, 1]; 1 is the usual one, without a gradient.
            gamma: how the share of proposals falls; 0 proposes at the first observation only, None
                never.
            m: half the components of the encoding e. units: of each network's inner layers.
            individual: factor of `individual_loss`.
            controls, encoder: as in `EndToEndFilter`.

        Raises:
            ValueError: no particles, or alpha or gamma out of range.
        """
        super().__init__(d, q, m, encoder, controls)
        if particles < 1 or not 0 < alpha <= 1 or not 0 <= (gamma or 0) <= 1:
            raise ValueError(
                f"a DPF needs particles >= 1, 0 < alpha <= 1, 0 <= gamma <= 1, got {particles}, {alpha} and {gamma}"
            )
        self.d, self.P, self.alpha, self.gamma, self.individual = (
            d,
            particles,
            alpha,
            gamma,
            individual,
        )
        y = d + hidden
        self.linear, self.inner, self.outer = (
            nn.Linear(y, y),
            nn.Linear(2 * y, units),
            nn.Linear(units, y, bias=False),
        )
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(y))
            self.linear.bias.zero_()
            self.outer.weight.mul_(0.1)
        self.log_noise = nn.Parameter(torch.full((y,), math.log(0.2)))
        self.log_start = nn.Parameter(torch.zeros(y))
        self.log_width = nn.Parameter(torch.full((d,), math.log(0.3)))
        self.likelihood_of_encoding, self.likelihood_of_state = (
            nn.Linear(2 * m, units),
            nn.Linear(d, units, bias=False),
        )
        self.likelihood = nn.Sequential(
            nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, 1)
        )
        self.proposal_of_encoding, self.proposal_of_noise = (
            nn.Linear(2 * m, units),
            nn.Linear(y, units, bias=False),
        )
        self.proposal = nn.Sequential(
            nn.ReLU(), nn.Linear(units, units), nn.ReLU(), nn.Linear(units, y)
        )
        self.push = nn.Linear(controls, y + units, bias=False) if controls else None

    def move(
        self, y: Float[Tensor, "b P y"], eps: Float[Tensor, "b P y"], u: Float[Tensor, "b k"]
    ) -> Float[Tensor, "b P y"]:
        """A y + c + V tanh(W y + U eps + b) + s eps, of all particles with one control, u in standard units."""
        value, inside = self.linear(y), self.inner(torch.cat([y, eps], -1))
        if self.push is not None:
            straight, bent = self.push(u)[:, None].split([value.shape[-1], inside.shape[-1]], -1)
            value, inside = value + straight, inside + bent
        return value + self.outer(inside.tanh()) + self.log_noise.exp() * eps

    def logit(
        self, z: Float[Tensor, "b P d"], w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> Float[Tensor, "b P"]:
        """What the likelihood is a function of, for particles z: the part of the encoding is computed once for all of them."""
        of_code = self.likelihood_of_encoding(torch.cat([w, r], -1))[:, None]
        return self.likelihood(of_code + self.likelihood_of_state(z))[..., 0]

    def log_likelihood(
        self, z: Float[Tensor, "b P d"], w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> Float[Tensor, "b P"]:
        """log l(e, z), l within [`LEAST_LIKELIHOOD`, 1]."""
        return (LEAST_LIKELIHOOD + (1 - LEAST_LIKELIHOOD) * self.logit(z, w, r).sigmoid()).log()

    def propose(
        self, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"], eps: Float[Tensor, "b P y"]
    ) -> Float[Tensor, "b P y"]:
        """k(e, eps), within `FURTHEST`."""
        of_code = self.proposal_of_encoding(torch.cat([w, r], -1))[:, None]
        return FURTHEST * (self.proposal(of_code + self.proposal_of_noise(eps)) / FURTHEST).tanh()

    def init(self, batch: int, *, generator: Generator | None = None) -> DPFState:
        """Draws around the mean of the training states, with learned variances; equal weights."""
        scale = (0.5 * self.log_start).exp()
        eps = self.draw(batch, generator)
        weights = scale.new_full((batch, self.P), -math.log(self.P))
        return DPFState(scale * eps, weights, torch.zeros_like(eps), scale.new_zeros(batch))

    def draw(self, batch: int, generator: Generator | None) -> Float[Tensor, "b P y"]:
        """Standard normal numbers."""
        like = self.log_noise
        return torch.randn(
            batch, self.P, len(like), dtype=like.dtype, device=like.device, generator=generator
        )

    def predict(
        self,
        state: DPFState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> DPFState:
        """Resample softly, and move each particle with noise of its own, within `FURTHEST`."""
        chosen, log_weights = soft(state.log_weights, self.alpha, generator)
        y = state.particles.gather(1, chosen[..., None].expand_as(state.particles))
        moved = self.move(y, self.draw(len(y), generator), self.acted(control, len(y))).clamp(
            -FURTHEST, FURTHEST
        )
        return DPFState(moved, log_weights, self.draw(len(y), generator), state.taken)

    def take_in(
        self, state: DPFState, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> DPFState:
        """Propose some particles anew, with the weight 1/P, and weigh all by their likelihood."""
        y, log_weights = state.particles, state.log_weights
        if self.gamma is not None:
            i = torch.arange(self.P + 1, dtype=y.dtype, device=y.device)
            count = (i * self.gamma ** state.taken[:, None]).floor()
            anew = (
                count[:, 1:] > count[:, :-1]
            )  # evenly spread, as resampled particles stand in the order of their ancestors
            y = torch.where(anew[..., None], self.propose(w, r, state.drawn), y)
            log_weights = torch.where(anew, -math.log(self.P), log_weights)
        log_weights = log_weights + self.log_likelihood(y[..., : self.d], w, r)
        return DPFState(y, log_weights.log_softmax(-1), state.drawn, state.taken + 1)

    def observe(
        self, state: DPFState, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[DPFState, Bool[Tensor, " b"]]:
        """Take in an observation, and whether that was possible: within `LARGEST`, and particles and weights are finite."""
        updated = self.update(state, obs)
        finite = updated.log_weights.isfinite().all(-1) & updated.particles.isfinite().flatten(
            1
        ).all(-1)
        if self.raw:
            return updated, finite
        return updated, finite & (((obs - self.x_mean) / self.x_scale).abs() < LARGEST).flatten(
            1
        ).all(-1)

    def mean(self, state: DPFState) -> Float[Tensor, "*b d"]:
        """The weighted mean of z, in standard units."""
        return (state.log_weights.exp()[..., None] * state.particles[..., : self.d]).sum(-2)

    def spread(self, state: DPFState) -> Float[Tensor, "*b d d"]:
        """The covariance of the mixture of Gaussians around the particles: theirs and diag sigma^2, in standard units."""
        centred = state.particles[..., : self.d] - self.mean(state)[..., None, :]
        return (state.log_weights.exp()[..., None] * centred).mT @ centred + (
            2 * self.log_width
        ).exp().diag()

    def weighted_sample(
        self, state: DPFState
    ) -> tuple[Float[Tensor, "b P d"], Float[Tensor, "b P"]]:
        """Of the mixture, in the units of the data: z_i + sigma eps of each particle, eps the draw of another, and the weights."""
        eps = state.drawn[..., : self.d].roll(1, -2)  # its own may have placed it: k(e, eps)
        z = state.particles[..., : self.d] + self.log_width.exp() * eps
        return self.z_mean + self.z_scale * z, state.log_weights.exp()

    def diagnostics(self, state: DPFState) -> dict[str, Tensor]:
        """``ess``, the effective sample size ``b``."""
        return {"ess": effective_sample_size(state.log_weights)}

    def log_density(self, state: DPFState, z: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """log sum_i w_i N(z; z_i, diag sigma^2).

        References: Jonschkowski et al. (2018), section IV: the end-to-end loss.
        """
        return (state.log_weights + self.kernel(z, state.particles[..., : self.d])).logsumexp(-1)

    def kernel(
        self, z: Float[Tensor, "*b d"], points: Float[Tensor, "*b P d"]
    ) -> Float[Tensor, "*b P"]:
        """log N(z; z_i, diag sigma^2)."""
        white = (z[..., None, :] - points) * (-self.log_width).exp()
        return -(0.5 * white.square() + self.log_width + 0.5 * math.log(2 * math.pi)).sum(-1)

    def individual_loss(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "n m"], r: Float[Tensor, "n m"]
    ) -> Tensor | float:
        """Of l and k by themselves, on n observations and their states.

        l tells z from states z' of other observations: -log l(e, z) - mean log(1 - l(e, z')). k
        gives z a high density: -log mean_j N(z; k(e, eps_j), diag sigma^2).

        References: Jonschkowski et al. (2018), section IV: individual learning of the models.
        """
        if self.individual == 0 or len(z) == 0:
            return 0.0
        others = z[torch.randint(len(z), (len(z), OTHERS), device=z.device)]
        ratio_dim = -functional.logsigmoid(self.logit(z[:, None], w, r)).mean()
        ratio_dim = ratio_dim - functional.logsigmoid(-self.logit(others, w, r)).mean()
        if self.gamma is None:
            return self.individual * ratio_dim
        eps = torch.randn(len(z), PROPOSALS, len(self.log_noise), dtype=z.dtype, device=z.device)
        proposed = self.propose(w, r, eps)[..., : self.d]
        return self.individual * (
            ratio_dim + math.log(PROPOSALS) - self.kernel(z, proposed).logsumexp(-1).mean()
        )
