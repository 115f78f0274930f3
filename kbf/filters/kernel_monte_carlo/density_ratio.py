"""The filter for density-ratio observations, with Gaussian kernels around particles.

A good image may be a thousand times more informative than the prediction, so that a particle filter
keeps one particle or none. Here each particle represents a neighbourhood, N(s; s_i, h^2 C) with C
the covariance of all particles, and the product of two Gaussians is known in closed form. With z =
H s the part of the state that an image depends on and

    r(x, z) = pi_0 + sum_j pi_j N(z; m_j, S_j) / p(z)

of `kbf.densities.ratio`, V_j = h^2 H C H^T + S_j and G_j = h^2 C H^T V_j^-1,

1. *Move* and resample as in `kbf.filters.kernel_monte_carlo.filter`.
2. *Weigh.* The weight of particle i is w_i ~ pi_0 + sum_j pi_j N(m_j; z_i, V_j) / p(z_i), to the
   power ``temper``.
3. *Shift.* Particle i selects term j with probability in proportion to its share of w_i. It is
   unchanged if j = 0, otherwise it becomes a draw of the product,
   s_i + xi + G_j (m_j - H (s_i + xi) - eta), xi ~ N(0, h^2 C), eta ~ N(0, S_j).
4. *Re-initialise.* With probability rho the track is lost, and the state is one of n recorded
   states s_k, whose weights w_k are those of step 2. By Bayes' rule a share a of the particles,
   those of least weight, is replaced by draws of the products of s_k with the ratio,

       a = rho W / (rho W + (1 - rho) w),    W = mean_k w_k,    w = mean_i w_i    (of powers 1);

   rho is half of the previous a, at least ``restart``. a = 1 before the first observation.

The limit h = 0 is the particle filter weighted by density ratios; h = 1 with one Gaussian is the
ensemble Kalman filter.

References: Anderson and Anderson (1999) and Stordal et al. (2011) for kernels around the members of
an ensemble; Evensen (2003), equation 20, for the shift; Lenser and Veloso (2000) for particles
drawn from the observation after a loss of track.
"""

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from kbf.densities.base import LOG_2PI
from kbf.densities.ratio import RatioDensity, read_encoding
from kbf.filters.kernel_monte_carlo.filter import (
    MAX_SEQUENCES_AT_FIRST,
    KernelMonteCarloFilter,
    LocalMemory,
)
from kbf.filters.particle.resampling import invert
from kbf.filters.protocols import where
from kbf.manifolds import Manifold
from kbf.rkhs.linalg import cholesky, some_rows

# h of the particles, and of the recorded states for a lost track, whose velocity may be new.
WIDTH = 0.3

# h of the recorded states that are compared with the first image, of which there are thousands.
FIRST_WIDTH = 0.05

# rho over the previous share a: several images in a row that contradict the particles add up.
LOSS_PERSISTENCE = 0.5

# Smallest probability of a track after the first observation; 0 means that there was none.
MIN_TRACK_PROBABILITY = 1e-6

# Recorded states among which a lost track is searched.
MAX_STATES_FOR_LOST_TRACK = 1000

# Smallest pi_0: encoders may be wrong, and a recovered track must not be lost to one image.
MIN_UNINFORMATIVE_SHARE = 0.05

# Added to the diagonal of C over its mean variance: on a circle C is singular.
JITTER = 1e-9


class Terms(NamedTuple):
    """The products of kernels with the terms of a ratio.

    Attributes:
        s: centres of the kernels ``b n D``.
        log_weights: of the terms ``b n J+1``; w is the sum of their exponentials.
        centres: m_j ``b J d``.
        spread: roots of S_j ``b J d d``.
        root: Cholesky factor of h^2 C ``b D D``.
        v: Cholesky factors of V_j ``b J d d``.
    """

    s: Tensor
    log_weights: Tensor
    centres: Tensor
    spread: Tensor
    root: Tensor
    v: Tensor

    @property
    def log_w(self) -> Float[Tensor, "b n"]:
        """Return log w."""
        return self.log_weights.logsumexp(-1)


class RatioFilter(KernelMonteCarloFilter):
    """The filter of a model whose observation density is a `RatioDensity`.

    ``draws`` of its state are the random numbers of the next shift.
    """

    def __init__(self, model: Any, initial: Float[Tensor, "n D"], **settings: Any) -> None:
        """Build the filter; arguments are those of `KernelMonteCarloFilter`, with ``reg=0``.

        Raises:
            ValueError: another observation density, or as `KernelMonteCarloFilter`.
        """
        if not isinstance(getattr(model, "observation", None), RatioDensity):
            raise ValueError(
                "a filter for density ratios needs a RatioDensity of observations, "
                f"got {type(model.observation).__name__}"
            )
        super().__init__(model, initial, reg=0.0, **settings)
        self.density: RatioDensity = model.observation
        self.manifold: Manifold = model.manifold
        self.restart: float = settings.get("restart", 0.0)
        self.restarted: Tensor = self.restarted[:0]  # step 4 re-initialises, given the image
        self.candidates: Tensor | None = None
        if self.recorded is not None and self.restart:
            self.candidates = self.recorded[
                some_rows(len(self.recorded), MAX_STATES_FOR_LOST_TRACK, initial.device)
            ]
            self.log_p_candidates: Tensor = self.log_p(self.candidates)

    def simulate_observations(
        self,
        particles: Float[Tensor, "b P D"],
        initialized: Float[Tensor, " b"],
        generator: Generator | None,
    ) -> LocalMemory:
        """Return particles of equal weight; draws: 1 uniform, D + d normal numbers of each."""
        like = {"dtype": particles.dtype, "device": particles.device, "generator": generator}
        size, numbers = particles.shape[:2], particles.shape[2] + self.d
        draws = torch.cat([torch.rand(*size, 1, **like), torch.randn(*size, numbers, **like)], -1)
        return LocalMemory(
            particles, draws[:, :, None], particles.new_full(size, 1 / self.particles), initialized
        )

    def observe(
        self, state: LocalMemory, obs: Float[Tensor, "b w"]
    ) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """Apply steps 2 to 4, to the recorded states if the observation is the first one."""
        known = state.initialized > 0
        possible = torch.ones_like(known)
        if self.recorded is None or bool(known.all()):
            return self.track(state, obs), possible
        first, _ = self.first(self.recorded, state, obs)
        if bool(known.any()):
            first = where(known, self.track(state, obs), first)
        return first, possible

    def first(
        self, recorded: Float[Tensor, "n D"], state: LocalMemory, obs: Float[Tensor, "b w"]
    ) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """Return P draws of equal weight of the recorded states times the ratio of the first image.

        Every first image is possible.
        """
        inputs = obs, self.midpoints(len(obs), obs.device), state.draws[:, :, 0]
        parts = zip(*(x.split(MAX_SEQUENCES_AT_FIRST) for x in inputs), strict=True)
        log_p, ones = self.log_p(recorded), torch.ones_like(state.initialized)
        drawn = [
            self.draw(self.of_recorded(recorded, log_p, x, FIRST_WIDTH), *rest)
            for x, *rest in parts
        ]
        equal = torch.full_like(state.weights, 1 / self.particles)
        return LocalMemory(torch.cat(drawn), state.draws, equal, ones), ones > 0

    def track(self, state: LocalMemory, obs: Float[Tensor, "b w"]) -> LocalMemory:
        """Apply steps 2 to 4 to the particles."""
        terms = self.terms(state.particles, obs, WIDTH, self.log_p(state.particles))
        log_w = terms.log_w
        weights = (self.temper * log_w).softmax(-1).to(state.weights)
        tracked = state._replace(
            particles=self.shifted(terms, state.draws[:, :, 0]), weights=weights
        )
        if self.candidates is None:
            return tracked._replace(initialized=torch.ones_like(state.initialized))
        terms = self.of_recorded(self.candidates, self.log_p_candidates, obs, WIDTH)
        return self.reinitialize_lost(tracked, log_mean(log_w), terms)

    def reinitialize_lost(
        self, tracked: LocalMemory, log_tracked: Float[Tensor, " b"], terms: Terms
    ) -> LocalMemory:
        """Apply step 4, given log w and the terms of the recorded states.

        ``initialized``, the probability that the track is not lost, becomes 1 - a.
        """
        lost = (LOSS_PERSISTENCE * (1 - tracked.initialized)).clamp_min(self.restart)
        share = (log_mean(terms.log_w) - log_tracked + lost.logit()).sigmoid()
        count = (share * self.particles).round()[:, None]
        initialized = (1 - share).clamp_min(MIN_TRACK_PROBABILITY).to(tracked.initialized)
        if not bool((count > 0).any()):
            return tracked._replace(initialized=initialized)
        rank = tracked.weights.argsort(-1).argsort(-1)
        replaced = rank < count
        drawn = self.draw(terms, (rank + 0.5) / count.clamp_min(1), tracked.draws[:, :, 0])
        kept = torch.where(replaced, 0, tracked.weights)
        total = kept.sum(-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)
        kept = kept * ((1 - count / self.particles) / total).to(kept)
        return LocalMemory(
            torch.where(replaced[..., None], drawn, tracked.particles),
            tracked.draws,
            torch.where(replaced, 1 / self.particles, kept),
            initialized,
        )

    def draw(
        self, terms: Terms, points: Float[Tensor, "b P"], white: Float[Tensor, "b P k"]
    ) -> Float[Tensor, "b P D"]:
        """Return P draws of the products in ``terms``, at quantiles ``points`` of their weights."""
        chosen = invert(self.temper * terms.log_w, points)
        s, log_weights = of_each(terms.s, chosen), of_each(terms.log_weights, chosen)
        return self.shifted(terms._replace(s=s, log_weights=log_weights), white)

    def of_recorded(
        self,
        recorded: Float[Tensor, "n D"],
        log_p: Float[Tensor, " n"],
        obs: Float[Tensor, "b w"],
        width: float,
    ) -> Terms:
        """Return the products of recorded states with the ratios of images."""
        return self.terms(recorded.expand(len(obs), -1, -1), obs, width, log_p[None])

    def log_p(self, s: Float[Tensor, "*b n D"]) -> Float[Tensor, "*b n"]:
        """Return log p(z) of states, in float64."""
        return self.density.density.log(s[..., : self.d].double())

    def terms(
        self,
        s: Float[Tensor, "b n D"],
        obs: Float[Tensor, "b w"],
        width: float,
        log_p: Float[Tensor, "c n"],
    ) -> Terms:
        """Apply step 2 in float64; ``log_p`` of the states has a batch of b, or of 1 for all."""
        ratio, d = read_encoding(obs.double(), self.d), self.d
        root = width * cholesky(covariance_of_rows(s.double()))
        z = s[..., :d].double()
        spread = torch.linalg.solve_triangular(
            ratio.roots, torch.eye(d).to(z), upper=False
        )  # S_j = spread spread^T
        v = cholesky((root @ root.mT)[:, None, :d, :d] + spread @ spread.mT)
        white = torch.linalg.solve_triangular(
            v, (ratio.centres[:, :, None] - z[:, None]).mT, upper=False
        )
        log_n = (
            -0.5 * white.square().sum(-2)
            - v.diagonal(dim1=-2, dim2=-1).log().sum(-1)[..., None]
            - 0.5 * d * LOG_2PI
        )
        log_ratio_given = ratio.log_shares[:, 1:, None] + log_n - log_p[:, None]
        least = math.log(MIN_UNINFORMATIVE_SHARE)
        log_pi_0 = ratio.log_shares[:, :1].clamp_min(least).expand(z.shape[:2])
        log_weights = torch.cat([log_pi_0[..., None], log_ratio_given.mT], -1)
        return Terms(s, log_weights, ratio.centres, spread, root, v)

    def shifted(self, terms: Terms, white: Float[Tensor, "b n k"]) -> Float[Tensor, "b n D"]:
        """Apply step 3 with the random numbers ``white``."""
        s, d = terms.s.double(), self.d
        which = terms.log_weights.softmax(-1).cumsum(-1).lt(white[..., :1]).sum(-1)  # 0..J
        which = which.clamp_max(terms.centres.shape[1])
        j = (which - 1).clamp_min(0)
        xi = white[..., 1 : 1 + s.shape[-1]].double() @ terms.root.mT
        eta = (of_each(terms.spread, j) @ white[..., 1 + s.shape[-1] :, None].double())[..., 0]
        gain = (terms.root @ terms.root.mT)[:, None, :, :d] @ torch.cholesky_inverse(
            terms.v
        )  # b J D d
        blurred = s + xi
        short = of_each(terms.centres, j) - blurred[..., :d] - eta
        moved = blurred + (of_each(gain, j) @ short[..., None])[..., 0]
        moved[..., :d] = self.manifold.project(moved[..., :d])
        return torch.where((which > 0)[..., None], moved, s).to(terms.s)


def log_mean(log_w: Float[Tensor, "b n"]) -> Float[Tensor, " b"]:
    """Return log of the mean of w over states, the log likelihood of the image up to a constant."""
    return log_w.logsumexp(-1) - math.log(log_w.shape[1])


def of_each(values: Float[Tensor, "b J *x"], j: Int[Tensor, "b n"]) -> Float[Tensor, "b n *x"]:
    """Return the values at the indices j, for each element of the batch."""
    return values[torch.arange(len(values), device=values.device)[:, None], j]


def covariance_of_rows(s: Float[Tensor, "b n D"]) -> Float[Tensor, "b D D"]:
    """Return C of states of equal weight, plus `JITTER` times its mean variance on the diagonal."""
    centred = s - s.mean(1, keepdim=True)
    c = centred.mT @ centred / s.shape[1]
    mean = c.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(c.dtype).tiny ** 0.5)
    return c + JITTER * mean[:, None, None] * torch.eye(c.shape[-1]).to(c)
