"""Generalised linear densities in kernel features: heteroscedastic Gaussian, counts, binary values.

Components are independent given u (Gaussian ones after whitening by their covariance). The
coefficients are those of the largest penalised likelihood, by Fisher scoring, for several ridges at
once; bandwidth and ridge are those of the best held-out log score.

==============  ===============================================================================
``spread``      N(eta_1(u), exp(eta_2(u))): a Gaussian whose mean *and* variance depend on u
``poisson``     counts of mean exp(eta(u))
``negbin``      counts of mean m = exp(eta(u)) and variance m + a m^2, one a for all components
``bernoulli``   0 or 1, with the probability 1 / (1 + exp(-eta(u))) of 1
==============  ===============================================================================

References: McCullagh and Nelder (1989), sections 2.5 and 11.2, for Fisher scoring and the negative
binomial distribution; Smyth (1989) for joint scoring of mean and dispersion.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.base import (
    LOG_2PI,
    Candidate,
    Features,
    ParametricDensity,
    features_of,
    gamma,
    select_features,
    whitened,
)
from kbf.rkhs.linalg import cholesky
from kbf.runtime.deadline import check_deadline
from kbf.runtime.errors import fit_errors
from kbf.ssm import normal

FAMILIES = ("spread", "poisson", "negbin", "bernoulli")
# Candidate bandwidths, over the median distance of the inputs.
FACTORS = (0.5, 1.0, 2.0)
# Candidate ridges.
RIDGES = (0.03, 0.3, 3.0, 30.0)
# Candidate dispersions of the negative binomial density.
DISPERSIONS = (0.1, 0.3, 1.0)
# Most features.
MAX_FEATURES = 48


@dataclass(frozen=True, eq=False)
class GLMDensity(ParametricDensity):
    """One of the families of this file; counts have probability 0 where they are not whole.

    Attributes:
        family: its name. features: phi, with a constant; p of them.
        coefficients: ``m p q``, of the m parameters of each component (2 of ``spread``, else 1).
        shift: ``q``, and root: ``q q``, of the whitening y -> root^-1 (y - shift) of ``spread``; of
            whole numbers the offset and the diagonal of steps: y = shift + root k, k = 0, 1, ...
        dispersion: a, of ``negbin``. ridge: of the coefficients.
    """

    family: str
    features: Features
    coefficients: Tensor
    shift: Tensor
    root: Tensor
    dispersion: Tensor
    ridge: Tensor

    def parameters(self, u: Float[Tensor, "*b d"]) -> tuple[Float[Tensor, "*b q"], ...]:
        """Eta at u, m of them."""
        together = self.features.times(u, torch.cat(list(self.coefficients), -1))
        return together.to(u).chunk(len(self.coefficients), -1)

    def given(
        self, y: Float[Tensor, "*b q"], parameters: tuple[Tensor, ...]
    ) -> Float[Tensor, "*e"]:
        """Return `log_density` from eta."""
        eta, white = parameters, whitened(y - self.shift.to(y), self.root)
        if self.family == "spread":
            return log_family(self.family, white, eta, self.dispersion).sum(
                -1
            ) - self.root.diagonal().log().sum().to(y)
        whole = white.round()
        possible = ((white - whole).abs() < 1e-3).all(-1) & (whole >= 0).all(-1)
        if self.family == "bernoulli":
            possible &= (whole <= 1).all(-1)
        return torch.where(
            possible,
            log_family(self.family, whole.clamp_min(0), eta, self.dispersion).sum(-1),
            -torch.inf,
        )

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y given u."""
        eta = self.parameters(u)
        if self.family == "spread":
            drawn = eta[0] + (eta[1] / 2).exp() * normal(eta[0], generator)
        elif self.family == "bernoulli":
            drawn = torch.bernoulli(eta[0].sigmoid(), generator=generator)
        else:
            mean = eta[0].exp()
            if self.family == "negbin":
                a = self.dispersion.to(mean)
                mean = mean * a * gamma((1 / a).expand_as(mean), generator)
            drawn = torch.poisson(mean, generator)
        return self.shift.to(u) + drawn @ self.root.mT.to(u)

    def mean(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """E[y | u]."""
        eta = self.parameters(u)[0]
        centre = {"spread": lambda e: e, "bernoulli": torch.sigmoid}.get(self.family, torch.exp)(
            eta
        )
        return self.shift.to(u) + centre @ self.root.mT.to(u)

    def covariance(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q q"]:
        """Cov[y | u]."""
        eta = self.parameters(u)
        if self.family == "spread":
            variance = eta[1].exp()
        elif self.family == "bernoulli":
            variance = eta[0].sigmoid() * (-eta[0]).sigmoid()
        else:
            mean = eta[0].exp()
            variance = mean + (
                self.dispersion.to(mean) * mean.square() if self.family == "negbin" else 0
            )
        root = self.root.to(u)
        return (root * variance[..., None, :]) @ root.mT


def log_family(
    family: str, y: Float[Tensor, "*b q"], eta: Sequence[Tensor], dispersion: Tensor
) -> Float[Tensor, "*e q"]:
    """log p of each component, of whitened numbers or of counts; eta ``*c q``, m of them."""
    if family == "spread":
        return -0.5 * ((y - eta[0]).square() * (-eta[1]).exp() + eta[1] + LOG_2PI)
    if family == "bernoulli":
        return y * eta[0] - torch.nn.functional.softplus(eta[0])
    if family == "poisson":
        return y * eta[0] - eta[0].exp() - torch.lgamma(y + 1)
    r = (1 / dispersion).to(eta[0])
    binomial = torch.lgamma(y + r) - torch.lgamma(r) - torch.lgamma(y + 1)
    return binomial - r * torch.log1p(eta[0].exp() / r) + y * (eta[0] - (r + eta[0].exp()).log())


def fisher_scoring(
    family: str,
    phi: Float[Tensor, "n p"],
    y: Float[Tensor, "n q"],
    ridges: Float[Tensor, " g"],
    dispersion: Tensor,
    rounds: int = 25,
) -> Float[Tensor, "m g p q"]:
    """Return the coefficients of the largest penalised log likelihood, for each ridge.

    The penalty is ridge / 2 |coefficients|^2, without the intercept.

    The variance of ``spread`` is fitted to squared residuals with the posterior variance of the
    mean added, so that an overfitted mean does not lead to an underestimated noise.
    """
    (_, p), q = phi.shape, y.shape[1]
    shrink = ridges[:, None].repeat(1, p)
    shrink[:, -1] = 1e-6
    start = torch.zeros(len(ridges), p, q).to(y)
    first = y.mean(0)
    if family == "spread":
        centre, size = start, start.clone()
        size[:, -1] = y.var(0).log()
        inner = 0.5 * phi.mT @ phi + torch.diag_embed(shrink)
        for _ in range(rounds):
            check_deadline()
            precision = (-(phi @ size).clamp(-30, 30)).exp()
            inverse = torch.linalg.inv(
                weighted_gram(phi, precision) + torch.diag_embed(shrink)[:, None]
            )
            centre = (inverse @ (phi.mT @ (precision * y)).mT[..., None])[..., 0].mT
            squared = (y - phi @ centre).square() + torch.einsum(
                "np,gqpr,nr->gnq", phi, inverse, phi
            )
            slope = phi.mT @ (0.5 * (squared * precision - 1)) - shrink[..., None] * size
            step = bounded(phi, torch.linalg.solve(inner, slope))
            size = size + step
            if float(step.abs().max()) < 1e-4:
                break
        return torch.stack([centre, size])
    start[:, -1] = (
        torch.logit(first.clamp(1e-3, 1 - 1e-3))
        if family == "bernoulli"
        else first.clamp_min(1e-3).log()
    )
    for _ in range(rounds):
        check_deadline()
        eta = (phi @ start).clamp(-20, 20)
        if family == "bernoulli":
            mean = eta.sigmoid()
            weight, slope = mean * (1 - mean), y - mean
        else:
            mean = eta.exp()
            over = 1 + dispersion * mean if family == "negbin" else torch.ones_like(mean)
            weight, slope = mean / over, (y - mean) / over
        system = weighted_gram(phi, weight) + torch.diag_embed(shrink)[:, None]
        rise = (phi.mT @ slope - shrink[..., None] * start).mT
        step = bounded(phi, torch.linalg.solve(system, rise[..., None])[..., 0].mT)
        start = start + step
        if float(step.abs().max()) < 1e-5:
            break
    return start[None]


def weighted_gram(
    phi: Float[Tensor, "n p"], weight: Float[Tensor, "g n q"]
) -> Float[Tensor, "g q p p"]:
    """Phi^T diag(w) Phi for each w."""
    return torch.stack(
        [torch.stack([(phi * w[:, None]).mT @ phi for w in each.unbind(-1)]) for each in weight]
    )


def bounded(phi: Float[Tensor, "n p"], step: Float[Tensor, "g p q"]) -> Float[Tensor, "g p q"]:
    """A step that changes no parameter by more than 3."""
    return step * (3 / (phi @ step).abs().amax((1, 2), keepdim=True).clamp_min(1e-30)).clamp_max(1)


@fit_errors()
def fit_parameters(
    family: str,
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    *,
    step: Float[Tensor, " q"] | None = None,
    factors: tuple[float, ...] = FACTORS,
    ridges: tuple[float, ...] = RIDGES,
    rank: int = MAX_FEATURES,
) -> Candidate:
    """Fit a density of one family.

    Bandwidth, ridge and dispersion are those of the best log score in blocked cross-validation.

    Args:
        family: one of `FAMILIES`.
        u: inputs ``n d``. y: outputs; of counts from 0 on, or from their least value where they are
            no multiples of ``step`` at or above 0, in units of it.
        step: of whole numbers, between neighbours.
        factors: bandwidths of the Gaussian kernel over the median distance. ridges: of the
            coefficients. rank: most features.
    """
    shift, root = whitening(family, y, step)
    constant = root.diagonal().log().sum() if family == "spread" else 0.0
    white, reg = whitened(y - shift, root), torch.tensor(ridges).to(y)
    white = white if family == "spread" else white.round()
    dispersions = [torch.tensor(a).to(y) for a in (DISPERSIONS if family == "negbin" else (0.0,))]

    def score(phi: Tensor, out: Tensor) -> Tensor:
        each = []
        for a in dispersions:
            eta = phi[out] @ fisher_scoring(family, phi[~out], white[~out], reg, a, 12)
            each.append(log_family(family, white[out], eta.unbind(), a).sum(-1) - constant)
        return torch.cat(each)

    held_out, features, best = select_features(u, factors, rank, score)
    j, k = divmod(best, len(ridges))
    coefficients = fisher_scoring(family, features(u), white, reg[k : k + 1], dispersions[j])[:, 0]
    density = GLMDensity(family, features, coefficients, shift, root, dispersions[j], reg[k])
    return Candidate(density, held_out)


def whitening(
    family: str, y: Float[Tensor, "n q"], step: Float[Tensor, " q"] | None
) -> tuple[Float[Tensor, " q"], Float[Tensor, "q q"]]:
    """Return ``shift`` and ``root`` of `GLMDensity` for these outputs."""
    if family == "spread":
        least = 1e-9 * y.var(0).mean() * torch.eye(y.shape[1]).to(y)
        return y.mean(0), cholesky(torch.cov(y.mT).reshape(y.shape[1], -1) + least)
    least, root = y.amin(0), (torch.ones_like(y[0]) if step is None else step).diag()
    above = least / root.diagonal()
    # counts begin at 0, whether it is observed or not
    natural = (above >= 0) & ((above - above.round()).abs() < 1e-3)
    return (least if family == "bernoulli" else torch.where(natural, 0, least)), root


@fit_errors()
def refitted(density: GLMDensity, u: Float[Tensor, "n d"], y: Float[Tensor, "n q"]) -> GLMDensity:
    """Fit a density to some of its points, with its bandwidth, ridge and dispersion.

    The shift and the steps of whole numbers remain, too.
    """
    family, spread = density.family, density.family == "spread"
    shift, root = whitening(family, y, None) if spread else (density.shift, density.root)
    white = whitened(y - shift, root)
    features = features_of(density.features.kernel, u, MAX_FEATURES)
    coefficients = fisher_scoring(
        family,
        features(u),
        white if spread else white.round(),
        density.ridge[None],
        density.dispersion,
    )[:, 0]
    return replace(density, features=features, coefficients=coefficients, shift=shift, root=root)
