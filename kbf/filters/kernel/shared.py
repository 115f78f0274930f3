"""A memory that processes may share: what a kernel filter must know of all points, and not only of those that are here."""

from __future__ import annotations

from typing import TypeVar

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.operators import Covariance, covariance_of
from kbf.rkhs.linalg import evenly
from kbf.runtime.distributed import OverPoints, Reduce, gather, no_reduce

M = TypeVar("M", bound=nn.Module)

LANDMARK_SAMPLE = 4096
"""Points of each process among which processes that share a memory look for landmarks."""


class SharedMemory:
    """Counts, covariances and candidates for landmarks over all points of a memory, and filters whose steps sum over them.

    The formulas of a filter are those of one process. Where processes share the memory, each calls
    them with its own points, and gives them what is needed of the others' from here. All processes
    must do so in step.
    """

    reduce: Reduce
    shared: bool

    def __init__(self, reduce: Reduce = no_reduce) -> None:
        """``reduce``: `kbf.runtime.distributed.all_sum`, or `no_reduce` where this process has the memory for itself."""
        self.reduce, self.shared = reduce, reduce is not no_reduce

    def count(self, points: Shaped[Tensor, "n ..."]) -> int:
        """How many points there are."""
        if not self.shared:
            return len(points)
        return int(
            self.reduce(torch.tensor(float(len(points)), dtype=torch.float64, device=points.device))
        )

    def covariance(self, features: Float[Tensor, "n r"]) -> Covariance:
        """The sum of f f^T over all points, and their number."""
        return Covariance(self.reduce(covariance_of(features).total), self.count(features))

    def candidates(self, points: Float[Tensor, "n ..."]) -> Float[Tensor, "m ..."]:
        """Points to choose landmarks from, the same for all processes: a sample of everybody's points, if there is anybody else."""
        return gather(points[evenly(len(points), LANDMARK_SAMPLE)]) if self.shared else points

    def sums(self, module: M) -> M:
        """The module, whose sums in each step (`kbf.runtime.distributed.OverPoints`) are now over all points."""
        for part in module.modules():
            if isinstance(part, OverPoints):
                part.reduce = self.reduce
        return module

    def filter(self, filter: KernelBayesFilter) -> KernelBayesFilter:
        """A filter over the points of this process, as a part of the filter over all; the prior is 1/n for all n points."""
        if self.shared:
            filter.n = self.count(filter.states)
            filter.prior.fill_(1 / filter.n)
        return self.sums(filter)
