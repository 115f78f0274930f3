"""Protocol of conditional densities p(y | u), and the parts that several of them share."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.rkhs.features import nystrom_whitening, pivots
from kbf.rkhs.kernels import Kernel, gaussian, median_distance

LOG_2PI = math.log(2 * math.pi)
# Blocks of the cross-validation of densities.
FOLDS = 5
# Numbers in one block of a table of log densities: the memory that it takes at a time.
MAX_NUMBERS_IN_BLOCK = 2**20
# y ``n q`` -> log p(y | u_i) ``n m`` at fixed inputs u_i, whose parameters are computed once.
Likelihood = Callable[[Tensor], Tensor]


@runtime_checkable
class ConditionalDensity(Protocol):
    """Conditional density p(y | u), y ``q`` given u ``d``; methods take batches.

    Results have the type of u.
    """

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y given u."""
        ...

    def log_density(
        self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log p(y | u), or the log probability of whole numbers; y and u broadcast."""
        ...

    def at(self, u: Float[Tensor, "m d"]) -> Likelihood:
        """Return y ``n q`` -> `log_density` ``n m`` of every y given every u, for fixed u."""
        ...

    def mean(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """E[y | u]."""
        ...

    def covariance(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q q"]:
        """Cov[y | u]; infinite where it does not exist."""
        ...


class ParametricDensity:
    """Base class of conditional densities that depend on u through their parameters at u.

    A subclass defines `parameters` and `given`.
    """

    def parameters(self, u: Float[Tensor, "*b d"]) -> tuple[Tensor, ...]:
        """Return the parameters of the density at u, each with ``*b`` in front."""
        raise NotImplementedError

    def given(self, y: Float[Tensor, "*b q"], parameters: tuple[Tensor, ...]) -> Tensor:
        """Return `log_density` from the parameters."""
        raise NotImplementedError

    def log_density(
        self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log p(y | u), of whole numbers their log probability; y and u broadcast."""
        return self.given(y, self.parameters(u))

    def at(self, u: Float[Tensor, "m d"]) -> Likelihood:
        """Return y -> `log_density` of every y given every u; parameters are computed once."""
        parameters = self.parameters(u)
        rows = max(1, MAX_NUMBERS_IN_BLOCK // max(part.numel() for part in parameters))
        return lambda y: torch.cat(
            [self.given(part[:, None], parameters) for part in y.split(rows)]
        )


class Candidate(NamedTuple):
    """A density fitted to all points, and the held-out log score ``n`` of each point.

    The held-out score is that of a fit without the block of the point.
    """

    density: ConditionalDensity
    held_out: Tensor


class Features(NamedTuple):
    """Nystrom features of a kernel at given landmarks, and a constant 1 for the intercept.

    Attributes:
        landmarks: ``r d``. whiten: ``r r``, L^-T with L L^T their Gram matrix. kernel: k, all
            filled in.
    """

    landmarks: Tensor
    whiten: Tensor
    kernel: Kernel

    def __call__(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b p"]:
        """(phi(u), 1), p = r + 1, in the type of the landmarks."""
        rows = u.reshape(-1, u.shape[-1]).to(self.landmarks)
        phi = self.kernel(rows, self.landmarks) @ self.whiten
        return torch.cat([phi, torch.ones_like(phi[:, :1])], -1).reshape(*u.shape[:-1], -1)

    def times(
        self, u: Float[Tensor, "*b d"], coefficients: Float[Tensor, "p q"]
    ) -> Float[Tensor, "*b q"]:
        """(phi(u), 1) @ coefficients. At many points the small matrices are multiplied first."""
        rows = u.reshape(-1, u.shape[-1]).to(self.landmarks)
        table = self.kernel(rows, self.landmarks)
        if len(rows) < coefficients.shape[1]:
            found = torch.addmm(coefficients[-1], table @ self.whiten, coefficients[:-1])
        else:
            found = torch.addmm(coefficients[-1], table, self.whiten @ coefficients[:-1])
        return found.reshape(*u.shape[:-1], -1)


def features_of(kernel: Kernel, u: Float[Tensor, "n d"], rank: int, tol: float = 1e-4) -> Features:
    """The features at the pivots of the training inputs."""
    landmarks = u[pivots(kernel, u, rank=rank, tol=tol)]
    return Features(landmarks, nystrom_whitening(kernel(landmarks, landmarks)), kernel)


def blocks(n: int, count: int) -> list[Bool[Tensor, " n"]]:
    """Masks of ``count`` contiguous blocks of n points, for blocked cross-validation.

    >>> [int(part.sum()) for part in blocks(10, 3)]
    [3, 4, 3]
    """
    at, bounds = torch.arange(n), [round(k * n / count) for k in range(count + 1)]
    return [(at >= a) & (at < b) for a, b in pairwise(bounds)]


def select_features(
    u: Float[Tensor, "n d"],
    factors: Sequence[float],
    rank: int,
    score: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Float[Tensor, " n"], Features, int]:
    """Select a bandwidth and a setting by the log score in blocked cross-validation.

    Args:
        u: inputs ``n d``.
        factors: bandwidths of the Gaussian kernel, over the median distance of the inputs.
        rank: most features.
        score: (features ``n p``, mask ``n`` of a block) -> log scores ``g m`` of the m points of
            the block by fits of g settings to the other points.

    Returns:
        The held-out log scores of the best pair, its features, and the position of its setting.
    """
    median, found = median_distance(u, distinct=True), []
    for factor in factors:
        features = features_of(partial(gaussian, bandwidth=factor * median), u, rank)
        phi = features(u)
        held = torch.cat([score(phi, out) for out in blocks(len(u), FOLDS)], 1)
        k = int(held.mean(1).argmax())
        found.append((held[k], features, k))
    return max(found, key=lambda each: float(each[0].mean()))


def whitened(rows: Float[Tensor, "*b q"], factor: Float[Tensor, "q q"]) -> Float[Tensor, "*b q"]:
    """L^-1 y for each y, L lower triangular."""
    return torch.linalg.solve_triangular(
        factor.mT.to(rows), rows.reshape(-1, rows.shape[-1]), upper=True, left=False
    ).reshape(rows.shape)


def uniform(like: Tensor, generator: Generator | None = None) -> Tensor:
    """Numbers between 0 and 1 of the shape, type and device of ``like``."""
    return torch.rand(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def gamma(shape: Tensor, generator: Generator | None = None) -> Tensor:
    """Draws from gamma distributions of the given shapes and scale 1."""
    draw: Any = getattr(torch, "_standard_gamma")  # noqa: B009 - the public function takes no generator
    return draw(shape.contiguous(), generator=generator)


def pick(log_shares: Float[Tensor, "*b k"], generator: Generator | None = None) -> Tensor:
    """Draw an index ``*b`` from shares, given by their logarithms."""
    rows = log_shares.exp().reshape(-1, log_shares.shape[-1])
    return torch.multinomial(rows, 1, replacement=True, generator=generator).reshape(
        log_shares.shape[:-1]
    )
