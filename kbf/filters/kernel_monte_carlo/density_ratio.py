"""A filter of density ratios: the belief is a sum of Gaussian kernels around particles, and an image multiplies it by its ratio.

What a good image tells can be a thousand times sharper than what was known before. A particle
filter then keeps one particle or none. Here every particle stands for a neighbourhood, N(s; s_i,
h^2 C) with C the covariance of all, and the product of two Gaussians is one: with z = H s the part
of the state that an image shows and

    r(x, z) = pi_0 + sum_j pi_j N(z; m_j, S_j) / p(z)

of `kbf.densities.ratio`, V_j = h^2 H C H^T + S_j and G_j = h^2 C H^T V_j^-1,

1. *Move* and resample: as `kbf.filters.kernel_monte_carlo.filter`.
2. *Weigh.* Particle i: w_i ~ pi_0 + sum_j pi_j N(m_j; z_i, V_j) / p(z_i), to the power ``temper``.
3. *Shift.* It takes one of the terms, j with a chance as its share of w_i. With j = 0 it stays;
else it becomes a draw of the
   product, s_i + xi + G_j (m_j - H (s_i + xi) - eta), xi ~ N(0, h^2 C), eta ~ N(0, S_j).

4. *Begin anew.* With a chance rho the track is lost and the state is anywhere, at one of n recorded
states s_k; these have w_k,
   too. By Bayes' rule a share a of the particles, those of least weight, becomes draws of the
   products of s_k with the ratio,

       a = rho W / (rho W + (1 - rho) w),    W = mean_k w_k,    w = mean_i w_i    (of powers 1);

   rho is half of the a before, at least ``restart``. Before anything was seen a = 1.

With h falling this is the particle filter weighed by density ratios, with h = 1 and one Gaussian
the ensemble Kalman filter.

References: Anderson and Anderson (1999) and Stordal et al. (2011), for kernels around the members
of an ensemble; Evensen (2003), equation 20, for the shift; Lenser and Veloso (2000), for particles
that are drawn from what a sensor says once they do not suit it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from kbf.densities.base import LOG_2PI
from kbf.densities.ratio import RatioDensity, read_encoding
from kbf.filters.kernel_monte_carlo.filter import ROWS, KernelMonteCarloFilter, LocalMemory
from kbf.filters.particle.resampling import invert
from kbf.filters.rollout import where
from kbf.manifolds import Manifold
from kbf.rkhs.linalg import cholesky, evenly

WIDTH, FIRST_WIDTH = 0.3, 0.05
"""h of the particles, and of recorded states that a lost track is sought among, whose velocity may be new; and of those that a
first image is compared with, which are thousands."""
STILL_LOST = 0.5
"""Of the share that began anew before, as a chance that the track is lost: several images in a row that do not suit it add up."""
LEAST_BEGUN = 1e-6
"""Chance that a track is followed where there is one: 0 says that nothing was seen yet."""
RECORDED = 1000
"""Recorded states that a lost track is sought among, at most."""
DOUBT = 0.05
"""Least chance that an image tells nothing: the encoder may be wrong, and a track that was lost is not thrown away for it."""
JITTER = 1e-9
"""On the diagonal of C: on a circle it is singular."""


class Terms(NamedTuple):
    """The products of kernels with the terms of a ratio.

    Attributes:
        s: ``b n D``, the states in the middle of the kernels. log_weights: ``b n J+1``, of the
            terms; their sum is w.
        centres: ``b J d``, m_j. spread: ``b J d d``, roots of S_j. root: ``b D D``, of h^2 C. v:
            ``b J d d``, of V_j, Cholesky's.
    """

    s: Tensor
    log_weights: Tensor
    centres: Tensor
    spread: Tensor
    root: Tensor
    v: Tensor

    @property
    def log_w(self) -> Float[Tensor, "b n"]:
        """Logarithms of w."""
        return self.log_weights.logsumexp(-1)


class RatioFilter(KernelMonteCarloFilter):
    """The filter of one model whose law of observations is a `RatioDensity`; ``draws`` of its state are the random numbers of 3."""

    def __init__(self, model: Any, initial: Float[Tensor, "n D"], **settings: Any) -> None:
        """As `KernelMonteCarloFilter`, with ``reg=0``: nothing is imagined.

        Raises:
            ValueError: another law of observations, or as there.
        """
        if not isinstance(getattr(model, "observation", None), RatioDensity):
            raise ValueError(
                f"a filter of density ratios needs a law of ratios, got {type(model.observation).__name__}"
            )
        super().__init__(model, initial, reg=0.0, **settings)
        self.density: RatioDensity = model.observation
        self.manifold: Manifold = model.manifold
        self.restart: float = settings.get("restart", 0.0)
        self.fresh = None  # nothing begins anew before the image has spoken
        self.sought: Tensor | None = None
        if self.recorded is not None and self.restart:
            self.sought = self.recorded[evenly(len(self.recorded), RECORDED, initial.device)]
            self.log_p_sought: Tensor = self.log_p(self.sought)

    def simulated(
        self,
        particles: Float[Tensor, "b P D"],
        begun: Float[Tensor, " b"],
        generator: Generator | None,
    ) -> LocalMemory:
        """Particles of equal weight; for ``draws`` the numbers that the next shift takes: 1 uniform, D + d normal ones."""
        like = {"dtype": particles.dtype, "device": particles.device, "generator": generator}
        size, numbers = particles.shape[:2], particles.shape[2] + self.d
        draws = torch.cat([torch.rand(*size, 1, **like), torch.randn(*size, numbers, **like)], -1)
        return LocalMemory(
            particles, draws[:, :, None], particles.new_full(size, 1 / self.particles), begun
        )

    def observe(
        self, state: LocalMemory, obs: Float[Tensor, "b w"]
    ) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """Steps 2 to 4; before anything was seen, the recorded states in place of the particles."""
        possible, begun = torch.ones_like(state.begun, dtype=torch.bool), state.begun > 0
        if self.recorded is None or bool(begun.all()):
            return self.followed(state, obs), possible
        first = self.first(self.recorded, state, obs)[0]
        return where(begun, self.followed(state, obs), first) if bool(
            begun.any()
        ) else first, possible

    def first(
        self, recorded: Float[Tensor, "n D"], state: LocalMemory, obs: Float[Tensor, "b w"]
    ) -> tuple[LocalMemory, Bool[Tensor, " b"]]:
        """P states of equal weight from the product of the recorded ones with the ratio of a first image: it suits them always."""
        points = (
            torch.arange(self.particles, dtype=torch.float64, device=obs.device) + 0.5
        ).expand(len(obs), -1) / self.particles
        parts = zip(
            obs.split(ROWS), points.split(ROWS), state.draws[:, :, 0].split(ROWS), strict=True
        )
        log_p, sure = self.log_p(recorded), torch.ones_like(state.begun)
        particles = torch.cat(
            [
                self.begin(self.of_recorded(recorded, log_p, x, FIRST_WIDTH), *rest)
                for x, *rest in parts
            ]
        )
        equal = torch.full_like(state.weights, 1 / self.particles)
        return LocalMemory(particles, state.draws, equal, sure), sure > 0

    def followed(self, state: LocalMemory, obs: Float[Tensor, "b w"]) -> LocalMemory:
        """Steps 2 to 4 for the particles."""
        terms = self.terms(state.particles, obs, WIDTH, self.log_p(state.particles))
        log_w = terms.log_w
        weights = (self.temper * log_w).softmax(-1).to(state.weights)
        particles = self.shifted(terms, state.draws[:, :, 0])
        if self.sought is None:
            return LocalMemory(particles, state.draws, weights, torch.ones_like(state.begun))
        tracked = LocalMemory(particles, state.draws, weights, state.begun)
        return self.renewed(
            tracked, log_mean(log_w), self.of_recorded(self.sought, self.log_p_sought, obs, WIDTH)
        )

    def renewed(
        self, tracked: LocalMemory, log_tracked: Float[Tensor, " b"], terms: Terms
    ) -> LocalMemory:
        """Step 4, with the logarithm of w, and the terms of the recorded states; ``begun`` becomes 1 - a."""
        lost = (STILL_LOST * (1 - tracked.begun)).clamp_min(self.restart)
        share = (log_mean(terms.log_w) - log_tracked + lost.logit()).sigmoid()
        count = (share * self.particles).round()[:, None]
        begun = (1 - share).clamp_min(LEAST_BEGUN).to(tracked.begun)
        if not bool((count > 0).any()):
            return tracked._replace(begun=begun)
        rank = tracked.weights.argsort(-1).argsort(-1)
        anew = rank < count
        drawn = self.begin(terms, (rank + 0.5) / count.clamp_min(1), tracked.draws[:, :, 0])
        kept = torch.where(anew, 0, tracked.weights)
        kept = kept * (
            (1 - count / self.particles)
            / kept.sum(-1, keepdim=True).clamp_min(torch.finfo(kept.dtype).tiny)
        ).to(kept)
        return tracked._replace(
            particles=torch.where(anew[..., None], drawn, tracked.particles),
            weights=torch.where(anew, 1 / self.particles, kept),
            begun=begun,
        )

    def begin(
        self, terms: Terms, points: Float[Tensor, "b P"], white: Float[Tensor, "b P k"]
    ) -> Float[Tensor, "b P D"]:
        """P draws of the products in ``terms``, in the order of ``points`` between 0 and 1."""
        chosen = invert(self.temper * terms.log_w, points)
        return self.shifted(
            terms._replace(
                s=of_each(terms.s, chosen), log_weights=of_each(terms.log_weights, chosen)
            ),
            white,
        )

    def of_recorded(
        self,
        recorded: Float[Tensor, "n D"],
        log_p: Float[Tensor, " n"],
        obs: Float[Tensor, "b w"],
        width: float,
    ) -> Terms:
        """The products of recorded states with the ratios of images."""
        return self.terms(recorded.expand(len(obs), -1, -1), obs, width, log_p[None])

    def log_p(self, s: Float[Tensor, "*b n D"]) -> Float[Tensor, "*b n"]:
        """log p(z) of states, in float64."""
        return self.density.density.log(s[..., : self.d].double())

    def terms(
        self,
        s: Float[Tensor, "b n D"],
        obs: Float[Tensor, "b w"],
        width: float,
        log_p: Float[Tensor, "c n"],
    ) -> Terms:
        """Step 2, in float64; ``log_p``: of the states, of which all sequences may have the same."""
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
        log_nothing = ratio.log_shares[:, :1].clamp_min(math.log(DOUBT)).expand(z.shape[:2])
        return Terms(
            s,
            torch.cat([log_nothing[..., None], log_ratio_given.mT], -1),
            ratio.centres,
            spread,
            root,
            v,
        )

    def shifted(self, terms: Terms, white: Float[Tensor, "b n k"]) -> Float[Tensor, "b n D"]:
        """Step 3, with the random numbers ``white``."""
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
    """The logarithm of the mean of w over states: how well these expect the image."""
    return log_w.logsumexp(-1) - math.log(log_w.shape[1])


def of_each(values: Float[Tensor, "b J *x"], j: Int[Tensor, "b n"]) -> Float[Tensor, "b n *x"]:
    """The values with these numbers, of each sequence."""
    return values[torch.arange(len(values), device=values.device)[:, None], j]


def covariance_of_rows(s: Float[Tensor, "b n D"]) -> Float[Tensor, "b D D"]:
    """C of states of equal weight, with `JITTER` times its mean variance on the diagonal."""
    centred = s - s.mean(1, keepdim=True)
    c = centred.mT @ centred / s.shape[1]
    least = JITTER * c.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(
        torch.finfo(c.dtype).tiny ** 0.5
    )
    return c + least[:, None, None] * torch.eye(c.shape[-1]).to(c)
