"""Conditional mean embeddings over the points nearest to a query (LCKME)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kbf.rkhs.conditional_means.base import (
    BLOCK,
    Inputs,
    Mean,
    Outputs,
    Query,
    Weights,
    _by_rows,
    _check,
)
from kbf.rkhs.kernels import Kernel
from kbf.rkhs.linalg import psd_solve

# Near the query


@dataclass(frozen=True, eq=False)
class Nearest:
    """w(x) = (G' + m reg I)^-1 k'(x) over the m points that ``find`` says for x."""

    kernel: Kernel
    x: Inputs
    z: Outputs
    reg: float | Tensor
    m: int
    find: Callable[[Tensor], Tensor]
    block: int

    def pairs(self, query: Float[Tensor, "c q"]) -> tuple[Int[Tensor, "c m"], Float[Tensor, "c m"]]:
        """Positions of the m points, and their weights."""
        index = self.find(query.detach())
        size = max(1, self.block**2 // self.m**2)
        solved = [
            self._solve(*part)
            for part in zip(query.split(size), self.x[index].split(size), strict=True)
        ]
        return index, torch.cat(solved)

    def weights(self, query: Query) -> Weights:
        """As in `ConditionalMean`."""

        def dense(rows: Tensor) -> Tensor:
            index, w = self.pairs(rows)
            return w.new_zeros(len(rows), len(self.x)).scatter(-1, index, w)

        return _by_rows(dense, query, self.x, self.block)

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`."""

        def mean(rows: Tensor) -> Tensor:
            index, w = self.pairs(rows)
            return (w[:, None] @ self.z[index])[:, 0]

        return _by_rows(mean, query, self.x, self.block)

    def _solve(self, query: Tensor, near: Tensor) -> Tensor:
        return psd_solve(
            self.kernel(near, near), self.kernel(near, query[:, None]), reg=self.m * self.reg
        )[..., 0]


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
    """LCKME: w(x) = (G' + m reg I)^-1 k'(x) over the m training points nearest to x alone. O(n + m^3) a query, nothing to fit.

    The weights jump where the m-th neighbour changes: gradients are those between the jumps.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: neighbours, at most n.
        search: the points with the largest k(x, x_i), by comparing with all of them; or the nearest
            in Euclidean distance by a k-d tree, in O(log n) for few components (up to about 10) and
            the same where k falls with this distance. The tree is on the CPU, and is no copy: it
            does not see a later change of x.
        block: memory, as for all.

    Raises:
        ValueError: as in `exact`; or m or search out of range. NotPositiveDefiniteError: at a
            query, as in `exact`.

    References: LCKME draft, Algorithm 1 and equation 4.
    """
    _check(x, z, reg, m=m)
    if search not in ("kernel", "tree"):
        raise ValueError(f"search must be 'kernel' or 'tree', got {search!r}")
    find = partial(_largest, kernel, x.detach(), m, block) if search == "kernel" else _tree(x, m)
    return Nearest(kernel, x, z, reg, m, find, block)


@torch.no_grad()
def _largest(kernel: Kernel, x: Tensor, m: int, block: int, query: Tensor) -> Tensor:
    """Positions of the m largest k(query, x_i), best first: the best of each block against the best so far."""
    best, index = (
        query.new_empty(len(query), 0),
        torch.empty(len(query), 0, dtype=torch.long, device=query.device),
    )
    for positions in torch.arange(len(x), device=query.device).split(block):
        values = torch.cat([best, kernel(query, x[positions])], -1)
        index = torch.cat([index, positions.expand(len(query), -1)], -1)
        best, chosen = values.topk(min(m, values.shape[-1]))
        index = index.gather(-1, chosen)
    return index


def _tree(x: Tensor, m: int) -> Callable[[Tensor], Tensor]:
    """Queries -> positions of the m nearest points, by a k-d tree."""
    from scipy.spatial import KDTree  # here, because it takes a while

    tree = KDTree(x.detach().cpu().numpy())

    def find(query: Tensor) -> Tensor:
        index = torch.as_tensor(
            tree.query(query.nan_to_num().cpu().numpy(), m)[1], dtype=torch.long, device=x.device
        )
        return index.reshape(len(query), m)  # for m = 1 the tree drops the last axis

    return find
