"""Conditional mean embeddings from kernel values: over all points, parts, or the nearest points."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from kbf.rkhs.conditional_means.base import (
    BLOCK,
    Inputs,
    Mean,
    Outputs,
    Query,
    Weights,
    by_rows,
    check_pairs,
    draw,
)
from kbf.rkhs.kernels import Kernel
from kbf.rkhs.linalg import cholesky, psd_solve

# Over all points


@dataclass(frozen=True, eq=False)
class KernelRidge:
    """w(x) = (G + n reg I)^-1 k(x).

    ``factor`` is the Cholesky factor of G + n reg I, and ``coef`` is (G + n reg I)^-1 z.
    """

    kernel: Kernel
    x: Inputs
    factor: Float[Tensor, "n n"]
    coef: Outputs
    block: int

    @by_rows
    def weights(self, query: Query) -> Weights:
        """See `ConditionalMean`; O(n^2)."""
        return torch.cholesky_solve(self.kernel(query, self.x).mT, self.factor).mT

    @by_rows
    def mean(self, query: Query) -> Mean:
        """See `ConditionalMean`; O(n)."""
        return self.kernel(query, self.x) @ self.coef


def exact(
    kernel: Kernel, x: Inputs, z: Outputs, reg: float | Tensor, *, block: int = BLOCK
) -> KernelRidge:
    """Return the CME itself, w(x) = (G + n reg I)^-1 k(x), in O(n^3).

    It requires memory for a matrix ``n n``.

    Args:
        kernel: k, with its bandwidth filled in.
        x: inputs ``n q``. z: outputs ``n d``, in the same floating-point type.
        reg: lambda > 0.
        block: rows of the largest array of kernel values between queries and points.

    Raises:
        ValueError: no pairs, or not one output for each input; NaN; reg that is not positive.
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue.

    References: Song et al. (2009); Fukumizu et al. (2013); LCKME draft, equation 1.
    """
    check_pairs(x, z, reg)
    factor = cholesky(kernel(x, x), reg=len(x) * reg)
    return KernelRidge(kernel, x, factor, torch.cholesky_solve(z, factor), block)


@dataclass(frozen=True, eq=False)
class NadarayaWatson:
    """w(x) = k(x) / ||k(x)||_1."""

    kernel: Kernel
    x: Inputs
    z: Outputs
    block: int

    @by_rows
    def weights(self, query: Query) -> Weights:
        """See `ConditionalMean`; O(n)."""
        values = self.kernel(query, self.x)
        norm = values.abs().sum(-1, keepdim=True)
        return values / torch.where(norm == 0, 1, norm)

    @by_rows
    def mean(self, query: Query) -> Mean:
        """See `ConditionalMean`; O(n)."""
        total, norm = (self.z.new_zeros(len(query), k) for k in (self.z.shape[1], 1))
        for x, z in zip(self.x.split(self.block), self.z.split(self.block), strict=True):
            values = self.kernel(query, x)
            total, norm = total + values @ z, norm + values.abs().sum(-1, keepdim=True)
        return total / torch.where(norm == 0, 1, norm)


def nadaraya_watson(kernel: Kernel, x: Inputs, z: Outputs, *, block: int = BLOCK) -> NadarayaWatson:
    """Return w(x) = k(x) / ||k(x)||_1, without a ridge or a fit; O(n) for each query.

    Where k(x) underflows the weights are zero, the limit of those of the other estimators.
    Arguments and errors are those of `exact`.

    References: LCKME draft, section 4.3.
    """
    check_pairs(x, z)
    return NadarayaWatson(kernel, x, z, block)


# Over parts of the points


@dataclass(frozen=True, eq=False)
class Average:
    """The mean of estimators over parts of the n points, each with the indices of its part."""

    n: int
    parts: tuple[tuple[Tensor, KernelRidge], ...]

    def weights(self, query: Query) -> Weights:
        """See `ConditionalMean`; zero at points that are in no part."""
        index = torch.cat([index for index, _ in self.parts])
        w = torch.cat([fit.weights(query) for _, fit in self.parts], -1) / len(self.parts)
        return w.new_zeros(*w.shape[:-1], self.n).index_copy(-1, index, w)

    def mean(self, query: Query) -> Mean:
        """See `ConditionalMean`."""
        first, *others = (fit.mean(query) for _, fit in self.parts)
        return sum(others, first) / len(self.parts)


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
    """Return w(x) = (G' + m reg I)^-1 k'(x) over m points drawn at random, in O(m^3).

    Weights of the other points are zero.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: points to draw without replacement, at most n.
        generator: draws them.
        block: as in `exact`.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or m out of range.

    References: Cortes et al. (2005); LCKME draft, section 4.2.
    """
    check_pairs(x, z, reg, m=m)
    index = draw(len(x), m, generator, x)
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
    """Return the mean of s exact CMEs over disjoint random parts of about n/s points.

    It costs O(n^3 / s^2), and its factors have n^2 / s entries. Each part keeps reg (its ridge is
    reg times its own number of points), as if it had all points: each estimator undersmooths, and
    the mean reduces the variance.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        s: parts, at most n.
        generator: draws them.
        block: as in `exact`.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or s out of range.

    References: Zhang, Duchi and Wainwright (2015).
    """
    check_pairs(x, z, reg, s=s)
    parts = draw(len(x), len(x), generator, x).tensor_split(s)
    fits = ((index, exact(kernel, x[index], z[index], reg, block=block)) for index in parts)
    return Average(len(x), tuple(fits))


# Near the query


@dataclass(frozen=True, eq=False)
class Nearest:
    """w(x) = (G' + m reg I)^-1 k'(x) over the m points whose indices ``find`` returns for x."""

    kernel: Kernel
    x: Inputs
    z: Outputs
    reg: float | Tensor
    m: int
    find: Callable[[Tensor], Tensor]
    block: int

    def pairs(self, query: Float[Tensor, "c q"]) -> tuple[Int[Tensor, "c m"], Float[Tensor, "c m"]]:
        """Return the indices of the m points, and their weights."""
        index, size = self.find(query.detach()), max(1, self.block**2 // self.m**2)
        parts = zip(query[:, None].split(size), self.x[index].split(size), strict=True)
        solved = [
            psd_solve(self.kernel(near, near), self.kernel(near, x), reg=self.m * self.reg)
            for x, near in parts
        ]
        return index, torch.cat(solved)[..., 0]

    @by_rows
    def weights(self, query: Query) -> Weights:
        """See `ConditionalMean`."""
        index, w = self.pairs(query)
        return w.new_zeros(len(query), len(self.x)).scatter(-1, index, w)

    @by_rows
    def mean(self, query: Query) -> Mean:
        """See `ConditionalMean`."""
        index, w = self.pairs(query)
        return (w[:, None] @ self.z[index])[:, 0]


def nearest(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    m: int,
    search: Literal["kernel", "tree"] = "kernel",
    block: int = BLOCK,
) -> Nearest:
    """Return the LCKME: w(x) = (G' + m reg I)^-1 k'(x) over the m training points nearest to x.

    It costs O(n + m^3) for each query and nothing in advance. The weights jump where the m-th
    neighbour changes; gradients are those between the jumps.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: neighbours, at most n.
        search: kernel compares x with all points and selects those with the largest k(x, x_i). tree
            finds the nearest points in Euclidean distance with a k-d tree, in O(log n) for up to
            about 10 components; they are the same if k decreases with this distance. The tree is
            on the CPU and does not follow later changes of x.
        block: as in `exact`.

    Raises:
        ValueError: as in `exact`; or m or search out of range.
        NotPositiveDefiniteError: at a query, as in `exact`.

    References: LCKME draft, Algorithm 1 and equation 4.
    """
    check_pairs(x, z, reg, m=m)
    if search not in ("kernel", "tree"):
        raise ValueError(f"search must be 'kernel' or 'tree', got {search!r}")
    find = partial(_largest, kernel, x.detach(), m, block) if search == "kernel" else _tree(x, m)
    return Nearest(kernel, x, z, reg, m, find, block)


@torch.no_grad()
def _largest(kernel: Kernel, x: Tensor, m: int, block: int, query: Tensor) -> Tensor:
    """Return the indices of the m largest k(query, x_i) in descending order, block by block."""
    best = query.new_empty(len(query), 0)
    index = best.long()
    for rows in torch.arange(len(x), device=query.device).split(block):
        values = torch.cat([best, kernel(query, x[rows])], -1)
        best, chosen = values.topk(min(m, values.shape[-1]))
        index = torch.cat([index, rows.expand(len(query), -1)], -1).gather(-1, chosen)
    return index


def _tree(x: Tensor, m: int) -> Callable[[Tensor], Tensor]:
    """Return the function from queries to the indices of the m nearest points in a k-d tree."""
    from scipy.spatial import KDTree  # here, because the import is slow

    tree = KDTree(x.detach().cpu().numpy())

    def find(query: Tensor) -> Tensor:
        index = torch.as_tensor(tree.query(query.nan_to_num().cpu().numpy(), m)[1], device=x.device)
        return index.long().reshape(len(query), m)  # for m = 1 the tree drops the last axis

    return find
