"""What every form of the conditional mean embedding shares: the interface, shapes, checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

BLOCK = 1024

Inputs = Float[Tensor, "n q"]

Outputs = Float[Tensor, "n d"]

Query = Float[Tensor, "*b q"]

Weights = Float[Tensor, "*b n"]

Mean = Float[Tensor, "*b d"]


@runtime_checkable
class ConditionalMean(Protocol):
    """An estimate of E[phi(Z) | X = x] over n training pairs (x_i, z_i)."""

    def weights(self, query: Query) -> Weights:
        """The weights ``*b n`` for queries x ``*b q``, so that ``Embedding(z, weights)`` is the embedding of Z given x."""
        ...

    def mean(self, query: Query) -> Mean:
        """sum_i w_i(x) z_i ``*b d``."""
        ...


def _by_rows(f: Callable[[Tensor], Tensor], query: Tensor, x: Tensor, block: int) -> Tensor:
    """F of the queries ``*b q``, for an f that takes ``c q``, by at most ``block`` of them at a time."""
    if query.shape[-1] != x.shape[-1]:
        raise ValueError(
            f"queries need {x.shape[-1]} components like the training points, got {tuple(query.shape)}"
        )
    out = torch.cat([f(rows) for rows in query.reshape(-1, x.shape[-1]).split(block)])
    return out.reshape(*query.shape[:-1], out.shape[-1])


def _draw(n: int, m: int, generator: Generator | None, like: Tensor) -> Tensor:
    """Positions of m of n points, without replacement."""
    return torch.randperm(n, generator=generator)[:m].to(like.device)


def _positive(norm: Tensor) -> Tensor:
    """1 in place of 0, to divide by."""
    return torch.where(norm == 0, torch.ones_like(norm), norm)


def _check(x: Tensor, z: Tensor, reg: float | Tensor | None = None, **counts: int) -> None:
    """Raise a ValueError for what no form can be fitted to."""
    if len(x) < 1 or len(x) != len(z) or x.dtype != z.dtype:
        got = f"{tuple(x.shape)} in {x.dtype} and {tuple(z.shape)} in {z.dtype}"
        raise ValueError(
            f"a conditional mean needs at least one input and one output for each, of one type, got {got}"
        )
    for name, values in {"inputs x": x, "outputs z": z}.items():
        bad = int((~torch.isfinite(values)).any(-1).sum())
        if bad:
            raise ValueError(
                f"the {name} hold NaN or infinite values in {bad} of {len(x)} rows: leave these pairs out"
            )
    if reg is not None and not reg > 0:
        raise ValueError(f"reg must be positive, got {float(reg)}")
    for name, count in counts.items():
        if not 1 <= count <= len(x):
            raise ValueError(
                f"{name} must be between 1 and the number of training pairs, {len(x)}, got {count}"
            )
