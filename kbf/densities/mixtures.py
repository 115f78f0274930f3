"""Mixtures of kernel ridge maps by EM: heavy tails, clutter, outputs with several branches.

Each of K maps is linear in the same features, y = A_k^T phi(u) + scale_k(u)^1/2 S_k^1/2 e, with a
share of its own; e is standard normal, or Student with nu degrees of freedom. A background that
does not depend on u may account for points that fit no map.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.base import (
    LOG_2PI,
    Features,
    ParametricDensity,
    gamma,
    pick,
    uniform,
    whitened,
)
from kbf.rkhs.linalg import cholesky
from kbf.runtime.deadline import check_deadline
from kbf.runtime.errors import fit_errors
from kbf.ssm import normal

# Candidate degrees of freedom of Student noise.
DEGREES = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 10.0, 20.0)
# Share of the wide Gaussian in a background: its density is positive outside of the box.
WIDE = 0.05


class Background(NamedTuple):
    """Uniform density on a box, mixed with a wide Gaussian.

    The Gaussian has the share `WIDE`, the middle of the box as its mean and the lengths of the box
    as standard deviations.

    Attributes:
        low: ``q``.
        high: ``q``.
    """

    low: Tensor
    high: Tensor

    def log_density(self, y: Float[Tensor, "*b q"]) -> Float[Tensor, "*b"]:
        """The logarithm of the density, which does not depend on u."""
        low, high = self.low.to(y), self.high.to(y)
        length, white = high - low, (y - (low + high) / 2) / (high - low)
        wide = math.log(WIDE) - (0.5 * (white.square() + LOG_2PI) + length.log()).sum(-1)
        inside = math.log(1 - WIDE) - length.log().sum()
        return torch.where((white.abs() <= 0.5).all(-1), torch.logaddexp(wide, inside), wide)

    def sample(
        self, like: Float[Tensor, "*b q"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draws of the shape of ``like``."""
        low, high = self.low.to(like), self.high.to(like)
        wide = uniform(like[..., :1], generator) < WIDE
        inside, beyond = uniform(like, generator) - 0.5, normal(like, generator)
        return (low + high) / 2 + (high - low) * torch.where(wide, beyond, inside)

    def moments(self, like: Tensor) -> tuple[Float[Tensor, " q"], Float[Tensor, "q q"]]:
        """Mean and covariance."""
        low, high = self.low.to(like), self.high.to(like)
        return (low + high) / 2, ((high - low).square() * ((1 - WIDE) / 12 + WIDE)).diag()


def background_of(y: Float[Tensor, "n q"]) -> Background:
    """The box of the points, with a margin for those that are still to come."""
    low, high = y.amin(0), y.amax(0)
    margin = (high - low) * min(10 / len(y), 0.1)
    return Background(low - margin, high + margin)


@dataclass(frozen=True, eq=False)
class MapMixture(ParametricDensity):
    """K maps and perhaps a background.

    Attributes:
        features: phi, with a constant; p of them.
        coefficients: A_k ``K p q``. factor: ``K p p``, (Phi^T W_k Phi + ridge)^-1: scale_k(u) = 1 +
            phi^T factor_k phi.
        root: ``K q q``, Cholesky factors of S_k.
        log_shares: ``K`` or ``K + 1``, the background's last.
        degrees: nu; None for Gaussian noise.
        background: None without.
    """

    features: Features
    coefficients: Tensor
    factor: Tensor
    root: Tensor
    log_shares: Tensor
    degrees: float | None = None
    background: Background | None = None

    def parameters(
        self, u: Float[Tensor, "*b d"]
    ) -> tuple[Float[Tensor, "*b K q"], Float[Tensor, "*b K"]]:
        """Means and scales of all maps at u."""
        phi = self.features(u)
        flat = phi.reshape(-1, phi.shape[-1])
        means = torch.stack([flat @ A for A in self.coefficients], 1).reshape(
            *phi.shape[:-1], *self.coefficients.shape[::2]
        )
        scales = torch.stack([1 + ((flat @ M) * flat).sum(-1) for M in self.factor], -1).reshape(
            *phi.shape[:-1], -1
        )
        return means.to(u), scales.to(u)

    def parts(self, y: Tensor, means: Tensor, scales: Tensor) -> Float[Tensor, "*e k"]:
        """Log of share times density for each map, and for the background.

        Means and scales are as returned by `parameters`.
        """
        q, shares = y.shape[-1], self.log_shares.to(y)
        white = torch.stack(
            [whitened(y - m, root) for m, root in zip(means.unbind(-2), self.root, strict=True)], -2
        )
        size = self.root.diagonal(dim1=-2, dim2=-1).log().sum(-1).to(y) + 0.5 * q * scales.log()
        logs = (
            log_radial(white.square().sum(-1) / scales, q, self.degrees)
            - size
            + shares[: len(self.root)]
        )
        if self.background is None:
            return logs
        other = (shares[-1] + self.background.log_density(y)).expand(logs.shape[:-1])
        return torch.cat([logs, other[..., None]], -1)

    def given(
        self, y: Float[Tensor, "*b q"], parameters: tuple[Tensor, ...]
    ) -> Float[Tensor, "*e"]:
        """Return `log_density` from means and scales."""
        return self.parts(y, *parameters).logsumexp(-1)

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y given u."""
        means, scales = self.parameters(u)
        K = len(self.root)
        chosen = pick(self.log_shares.to(u).expand(*u.shape[:-1], -1), generator)
        map = chosen.clamp_max(K - 1)
        mean = means.gather(-2, map[..., None, None].expand(*map.shape, 1, means.shape[-1]))[
            ..., 0, :
        ]
        scale = scales.gather(-1, map[..., None])
        if self.degrees is not None:
            half = torch.full_like(scale, self.degrees / 2)
            scale = scale * half / gamma(half, generator)
        noise = (self.root.to(u)[map] @ normal(mean, generator)[..., None])[..., 0]
        y = mean + scale.sqrt() * noise
        if self.background is None:
            return y
        return torch.where((chosen == K)[..., None], self.background.sample(y, generator), y)

    def mean(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """E[y | u]; the middle of a Student density with nu <= 1, which has no mean."""
        means, shares = self.parameters(u)[0], self.log_shares.exp().to(u)
        mean = (shares[: len(self.root), None] * means).sum(-2)
        return (
            mean if self.background is None else mean + shares[-1] * self.background.moments(u)[0]
        )

    def covariance(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q q"]:
        """Cov[y | u] by the law of total variance; infinite for nu <= 2."""
        means, scales = self.parameters(u)
        shares, total = self.log_shares.exp().to(u), self.mean(u)
        heavier = (
            1.0
            if self.degrees is None
            else self.degrees / (self.degrees - 2)
            if self.degrees > 2
            else math.inf
        )
        within = heavier * scales[..., None, None] * (self.root @ self.root.mT).to(u)
        moved = means - total[..., None, :]
        second = within + moved[..., :, None] * moved[..., None, :]
        covariance = (shares[: len(self.root), None, None] * second).sum(-3)
        if self.background is None:
            return covariance
        middle, spread = self.background.moments(u)
        far = middle - total
        return covariance + shares[-1] * (spread + far[..., :, None] * far[..., None, :])


def log_radial(squared: Tensor, q: int, degrees: float | None) -> Tensor:
    """Log density of standard normal or Student noise in q dimensions at a squared length."""
    if degrees is None:
        return -0.5 * (squared + q * LOG_2PI)
    constant = (
        math.lgamma((degrees + q) / 2)
        - math.lgamma(degrees / 2)
        - 0.5 * q * math.log(degrees * math.pi)
    )
    return constant - 0.5 * (degrees + q) * torch.log1p(squared / degrees)


class Fitted(NamedTuple):
    """A fitted mixture: leave-one-out log score, final responsibilities ``n k``, and ridge."""

    density: MapMixture
    score: float
    shares: Tensor
    ridge: float


@fit_errors()
def expectation_maximisation(
    features: Features,
    phi: Float[Tensor, "n p"],
    y: Float[Tensor, "n q"],
    shares: Float[Tensor, "n k"],
    ridge: float,
    degrees: float | None,
    background: Background | None,
    rounds: int,
) -> Fitted:
    """Fit a mixture by EM: parameters given responsibilities, and responsibilities in turn.

    Iterations stop when the score no longer changes.

    Each point is scored by maps fitted *without* it, in closed form: with h = phi^T (Phi^T W Phi +
    ridge)^-1 phi and its weight w, the residual is e / (1 - w h) and the scale 1 + h / (1 - w h).
    A map therefore gains nothing by following single points.

    Args:
        features: phi, whose values at the points are ``phi``.
        phi: ``n p``. y: outputs.
        shares: responsibilities to start from; with a background its own are last.
        ridge: of all coefficients but the intercept, in units of the noise.
        degrees: None for Gaussian noise, else where to start from.
        background: None without. rounds: at most.

    References: Dempster, Laird and Rubin (1977); Lange, Little and Taylor (1989) for the weights of
    Student noise.
    """
    (n, q), K = y.shape, shares.shape[1] - (background is not None)
    shrink = torch.full_like(phi[0], ridge)
    shrink[-1] = 1e-8
    spread = y.var(0)
    least = (
        1e-6 * spread.clamp_min(1e-9 * spread.mean()).diag()
    )  # each column in its own units: one may be all but constant
    outside = None if background is None else background.log_density(y)[:, None]
    weight, last, score = torch.ones(n, K).to(y), -math.inf, -math.inf
    A, M, roots, log_shares = [], [], [], shares.mean(0).log()
    for step in range(rounds):
        check_deadline()
        mean = shares.mean(0).clamp_min(1e-6)
        log_shares = (mean / mean.sum()).log()
        A, M, roots, squares, sizes = [], [], [], [], []
        for k in range(K):
            w = shares[:, k] * weight[:, k]
            inverse = torch.linalg.inv((phi * w[:, None]).mT @ phi + shrink.diag())
            coefficients = inverse @ (phi.mT @ (w[:, None] * y))
            h = ((phi @ inverse) * phi).sum(-1)
            left = (1 - w * h).clamp_min(1e-3)
            error, scale = (y - phi @ coefficients) / left[:, None], 1 + h / left
            noise = ((w / scale)[:, None] * error).mT @ error / shares[:, k].sum().clamp_min(
                1e-6
            ) + least
            root = cholesky(noise)
            squares.append(whitened(error, root).square().sum(-1) / scale)
            sizes.append(root.diagonal().log().sum() + 0.5 * q * scale.log())
            A.append(coefficients)
            M.append(inverse)
            roots.append(root)
        squared, size = torch.stack(squares, -1), torch.stack(sizes, -1)
        if degrees is not None:
            if step % 3 == 2:
                degrees = max(
                    DEGREES,
                    key=lambda nu: float((shares[:, :K] * log_radial(squared, q, nu)).sum()),
                )
            weight = (degrees + q) / (degrees + squared)
        parts = log_radial(squared, q, degrees) - size + log_shares[:K]
        parts = parts if outside is None else torch.cat([parts, log_shares[-1] + outside], -1)
        each = parts.logsumexp(-1, keepdim=True)
        shares, score = (parts - each).exp(), each.mean().item()
        if abs(score - last) < 1e-5 and step > 5:
            break
        last = score
    density = MapMixture(
        features,
        torch.stack(A),
        torch.stack(M),
        torch.stack(roots),
        log_shares,
        degrees,
        background,
    )
    return Fitted(density, score, shares, ridge)


def fit_maps(
    features: Sequence[Features],
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    residual: Float[Tensor, "n q"],
    *,
    maps: int = 1,
    student: bool = False,
    clutter: bool = False,
    ridges: tuple[float, ...] = (0.3, 3.0, 30.0),
    tries: int = 10,
    seed: int = 0,
) -> Fitted:
    """Fit a mixture of maps.

    The features, the ridge and, for several maps, the start are selected by the leave-one-out log
    score.

    Args:
        features: of the inputs, to choose from: those that suit a single Gaussian map are often too
            smooth.
        u: inputs ``n d``. y: outputs. residual: of a single map, from whose signs along random
            directions several maps start.
        maps: K. student: heavy-tailed noise. clutter: with a background.
        ridges: to try, in units of the noise.
        tries: starts of several maps.
        seed: of the starts.
    """
    background, degrees = background_of(y) if clutter else None, 4.0 if student else None
    rest, middle = torch.full_like(y[:, :1], 0.2), ridges[len(ridges) // 2]

    def run(features: Features, start: Tensor, ridge: float, rounds: int) -> Fitted:
        return expectation_maximisation(
            features, features(u), y, start, ridge, degrees, background, rounds
        )

    def score(fitted: Fitted) -> float:
        return fitted.score

    starts = (
        [torch.ones_like(rest)] if maps == 1 else list(branches(u, residual, maps, tries, seed))
    )
    starts = [torch.cat([0.8 * start, rest], -1) if clutter else start for start in starts]
    if maps > 1:
        starts = [max((run(features[0], start, middle, 12) for start in starts), key=score).shares]
    best = max((run(each, start, middle, 12) for each in features for start in starts), key=score)
    return max((run(best.density.features, best.shares, ridge, 60) for ridge in ridges), key=score)


def branches(
    u: Float[Tensor, "n d"], residual: Float[Tensor, "n q"], maps: int, tries: int, seed: int
) -> Iterator[Float[Tensor, "n k"]]:
    """Yield initial responsibilities: softmax of residual . B_k (u, 1) with random B_k."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.cat([standard(u), torch.ones_like(u[:, :1])], -1)
    for _ in range(tries):
        B = torch.randn(
            maps, inputs.shape[1], residual.shape[1], dtype=u.dtype, generator=generator
        ).to(u)
        yield (3 * torch.einsum("nd,kdq,nq->nk", inputs, B, standard(residual))).softmax(-1)


def standard(values: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    """Columns with mean 0 and standard deviation 1; constant ones 0."""
    spread = values.std(0)
    return (values - values.mean(0)) / torch.where(spread > 0, spread, 1)
