"""A memory that several processes share: each holds some recordings, and the sums over all points add up over the processes.

What a kernel filter in features needs of its memory are sums over the points, p x p at most: the
feature covariance, the weighted covariance of a step, the estimate. Each process sums over its own
points, and `all_sum` adds the results, with gradients. The formulas themselves know nothing of
this: modules that sum over points in their steps are `OverPoints`, and
`kbf.filters.kernel.shared.SharedMemory` tells them how.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed as dist

from kbf.runtime.html_repr import ShownModule

Reduce = Callable[[Tensor], Tensor]
"""Adds a sum up over the processes that share a memory: `no_reduce` for one process, `all_sum` for all of a process group."""


def no_reduce(x: Tensor) -> Tensor:
    """The sum over one process: x itself."""
    return x


class OverPoints(ShownModule):
    """A module that sums over the points of a memory in its steps.

    ``reduce`` is applied to each such sum. It leaves them as they are, unless processes share the
    memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reduce: Reduce = no_reduce


class AllSum(torch.autograd.Function):
    """y = sum over the processes of x; the gradient of x is the sum of the gradients of y."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Every process gets the sum."""
        total = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Every process's y depends on this x."""
        return AllSum.forward(ctx, gradients[0])


def all_sum(x: Tensor) -> Tensor:
    """Sum over the processes of the default group; all of them must call it, in the same order.

    When every process computes the same loss from such sums, the gradients of the processes' copies
    of a parameter *average* to the gradient of the loss: what `DistributedDataParallel` does.
    """
    return AllSum.apply(x)  # pyright: ignore[reportReturnType]


def gather(x: Tensor) -> Tensor:
    """The rows of all processes, one behind the other in the order of their ranks; without gradients."""
    sizes = [
        torch.zeros(1, dtype=torch.long, device=x.device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(sizes, torch.tensor([len(x)], device=x.device))
    rows = [x.new_empty(int(size), *x.shape[1:]) for size in sizes]
    most = max(len(part) for part in rows)
    padded = [x.new_empty(most, *x.shape[1:]) for _ in rows]
    own = torch.cat([x.detach(), x.new_zeros(most - len(x), *x.shape[1:])])
    dist.all_gather(padded, own)  # of one shape in all processes
    return torch.cat([part[: len(row)] for part, row in zip(padded, rows, strict=True)])
