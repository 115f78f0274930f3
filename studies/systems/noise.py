"""Noise of zero mean: five laws, independent for each component or mixed by a matrix.

The laws have unit variance: Gaussian; Laplace; Student with 3 degrees of freedom; uniform on
(-sqrt 3, sqrt 3); and skewed, an exponential variable minus its mean.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

ROOT_2 = math.sqrt(2)
ROOT_3 = math.sqrt(3)


class Law(NamedTuple):
    """A distribution of the numbers, with mean 0 and variance 1.

    Attributes:
        draw: (shape, generator) -> draws, float64.
        log_density: e -> log p(e). cdf: e -> P(draw <= e).
    """

    draw: Callable[[tuple[int, ...], Generator | None], Tensor]
    log_density: Callable[[Tensor], Tensor]
    cdf: Callable[[Tensor], Tensor]


def draw_gaussian(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def draw_laplace(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return numbers with the density exp(-sqrt 2 |e|) / sqrt 2."""
    u = draw_unit(shape, generator) - 0.5
    return -u.sign() * torch.log1p(-2 * u.abs()) / ROOT_2


def laplace_cdf(e: Tensor) -> Tensor:
    """Return the distribution function of `draw_laplace`."""
    return 0.5 + 0.5 * e.sign() * -torch.expm1(-ROOT_2 * e.abs())


def draw_student(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return numbers t / sqrt 3, t from a Student distribution with 3 degrees of freedom."""
    normal = draw_gaussian(shape, generator)
    return normal / draw_gaussian((*shape, 3), generator).square().sum(-1).sqrt()


def student_log_density(e: Tensor) -> Tensor:
    """Return log[2 / pi (1 + e^2)^-2]."""
    return math.log(2 / math.pi) - 2 * torch.log1p(e.square())


def student_cdf(e: Tensor) -> Tensor:
    """Return 1/2 + (e / (1 + e^2) + arctan e) / pi."""
    return 0.5 + (e / (1 + e.square()) + e.atan()) / math.pi


def draw_uniform(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return numbers that are uniform on (-sqrt 3, sqrt 3)."""
    return ROOT_3 * (2 * draw_unit(shape, generator) - 1)


def uniform_log_density(e: Tensor) -> Tensor:
    """Return -log(2 sqrt 3) within the interval, -inf outside."""
    inside = e.abs() <= ROOT_3
    return torch.where(inside, -math.log(2 * ROOT_3), -math.inf).to(e)


def draw_skewed(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return exponential numbers minus 1."""
    return -torch.log1p(-draw_unit(shape, generator)) - 1


def skewed_log_density(e: Tensor) -> Tensor:
    """Return -(e + 1) from -1 on, -inf below."""
    return torch.where(e >= -1, -(e + 1), -math.inf)


def draw_unit(shape: tuple[int, ...], generator: Generator | None) -> Tensor:
    """Return numbers that are uniform on [0, 1)."""
    return torch.rand(shape, dtype=torch.float64, generator=generator)


LAWS: dict[str, Law] = {
    "gaussian": Law(
        draw_gaussian,
        lambda e: -0.5 * (e.square() + math.log(2 * math.pi)),
        torch.special.ndtr,
    ),
    "laplace": Law(draw_laplace, lambda e: -ROOT_2 * e.abs() - 0.5 * math.log(2), laplace_cdf),
    "student": Law(draw_student, student_log_density, student_cdf),
    "uniform": Law(
        draw_uniform, uniform_log_density, lambda e: (0.5 + e / (2 * ROOT_3)).clamp(0, 1)
    ),
    "skewed": Law(draw_skewed, skewed_log_density, lambda e: -torch.expm1(-(e + 1).clamp_min(0))),
}


class Noise(NamedTuple):
    """L e, e independent numbers of one law.

    Attributes:
        law: a name among `LAWS`.
        root: L ``q q``, lower triangular; diagonal for independent components.
    """

    law: str
    root: Tensor

    def draw(
        self, batch: tuple[int, ...], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Return draws ``*batch q``."""
        return LAWS[self.law].draw((*batch, len(self.root)), generator) @ self.root.mT

    def log_density(self, residual: Float[Tensor, "*b q"]) -> Float[Tensor, "*b q"]:
        """Return the terms of the log density, whose sum over the last dimension it is.

        Term j is log p(r_j | r_1, ..., r_{j-1}), which is log p(r_j) for independent components.
        """
        rows = residual.reshape(-1, residual.shape[-1])
        if bool((self.root == self.root.diag().diag()).all()):
            white = rows / self.root.diag()
        else:
            white = torch.linalg.solve_triangular(self.root.mT, rows, upper=True, left=False)
        terms = LAWS[self.law].log_density(white) - self.root.diag().log()
        return terms.reshape(residual.shape)

    @property
    def covariance(self) -> Float[Tensor, "q q"]:
        """L L^T."""
        return self.root @ self.root.mT
