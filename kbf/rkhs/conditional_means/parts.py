"""Conditional mean embeddings over some of the points, or as the mean over parts of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from kbf.rkhs.conditional_means.all_points import KernelRidge, exact
from kbf.rkhs.conditional_means.base import (
    BLOCK,
    Inputs,
    Mean,
    Outputs,
    Query,
    Weights,
    _check,
    _draw,
)
from kbf.rkhs.kernels import Kernel

# Over parts of the points


@dataclass(frozen=True, eq=False)
class Average:
    """The mean of estimators over parts of the n points, each with the positions of its part."""

    n: int
    parts: tuple[tuple[Tensor, KernelRidge], ...]

    def weights(self, query: Query) -> Weights:
        """As in `ConditionalMean`; zero at points in no part."""
        index = torch.cat([index for index, _ in self.parts])
        w = torch.cat([fit.weights(query) for _, fit in self.parts], -1) / len(self.parts)
        return w.new_zeros(*w.shape[:-1], self.n).index_copy(-1, index, w)

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`."""
        return sum(
            (fit.mean(query) for _, fit in self.parts[1:]), self.parts[0][1].mean(query)
        ) / len(self.parts)


def subsample(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    m: int,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> Average:
    """w(x) = (G' + m reg I)^-1 k'(x) over m points drawn at random, zero at the others. O(m^3).

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: points to draw without replacement, at most n.
        generator: draws them.
        block: as in `exact`.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or m out of range.

    References: Cortes et al. (2005); LCKME draft, section 4.2.
    """
    _check(x, z, reg, m=m)
    index = _draw(len(x), m, generator, x)
    return Average(len(x), ((index, exact(kernel, x[index], z[index], reg, block=block)),))


def divide_and_conquer(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    s: int,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> Average:
    """The mean of s exact CMEs over disjoint random parts of about n/s points. O(n^3 / s^2), with factors of n^2 / s numbers.

    Each part keeps reg (its ridge is reg times its own number of points), as if it had all points:
    it undersmooths, and the mean takes the variance away.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        s: parts, at most n.
        generator: draws them.
        block: as in `exact`.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or s out of range.

    References: Zhang, Duchi and Wainwright (2015).
    """
    _check(x, z, reg, s=s)
    parts = _draw(len(x), len(x), generator, x).tensor_split(s)
    return Average(
        len(x),
        tuple((index, exact(kernel, x[index], z[index], reg, block=block)) for index in parts),
    )
