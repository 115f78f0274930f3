"""Random choices of the grammar, from one generator."""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

T = TypeVar("T")


class Draws:
    """Choices and numbers, in float64, that one seed determines."""

    def __init__(self, seed: int) -> None:
        """``seed``: of the generator."""
        self.generator: torch.Generator = torch.Generator().manual_seed(seed)

    def choice(self, options: Sequence[T]) -> T:
        """Return one of the options, each with the same probability."""
        return options[int(torch.randint(len(options), (), generator=self.generator))]

    def subset(self, n: int, k: int) -> list[int]:
        """Return k of the numbers 0 ... n - 1, ascending."""
        return sorted(torch.randperm(n, generator=self.generator)[:k].tolist())

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.uniform(0.0, 1.0) < probability

    def uniform(self, low: float, high: float) -> float:
        """Return a number between two others."""
        draw = torch.rand((), generator=self.generator, dtype=torch.float64)
        return low + (high - low) * draw.item()

    def log_uniform(self, low: float, high: float) -> float:
        """Return a positive number whose logarithm is uniform."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def normal(self, *shape: int) -> Float[Tensor, "..."]:
        """Return standard normal numbers."""
        return torch.randn(*shape, generator=self.generator, dtype=torch.float64)

    def uniforms(self, low: float, high: float, *shape: int) -> Float[Tensor, "..."]:
        """Return numbers between two others."""
        drawn = torch.rand(*shape, generator=self.generator, dtype=torch.float64)
        return low + (high - low) * drawn

    def orthogonal(self, d: int) -> Float[Tensor, "d d"]:
        """Return an orthogonal matrix."""
        return torch.linalg.qr(self.normal(d, d))[0]
