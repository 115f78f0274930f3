"""The interface of all estimators of a conditional mean embedding, and what they share."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

# Default of ``block``: rows of the largest array of kernel values.
BLOCK = 1024

Inputs = Float[Tensor, "n q"]
Outputs = Float[Tensor, "n d"]
Query = Float[Tensor, "*b q"]
Weights = Float[Tensor, "*b n"]
Mean = Float[Tensor, "*b d"]
Method = TypeVar("Method", bound=Callable[..., Tensor])


@runtime_checkable
class ConditionalMean(Protocol):
    """An estimate of E[phi(Z) | X = x] over n training pairs (x_i, z_i)."""

    def weights(self, query: Query) -> Weights:
        """Return w(x) ``*b n`` for queries x ``*b q``; ``Embedding(z, w)`` is that of Z given x."""
        ...

    def mean(self, query: Query) -> Mean:
        """Return sum_i w_i(x) z_i ``*b d`` for queries x ``*b q``."""
        ...


def by_rows(method: Method) -> Method:
    """Decorate a method of queries ``c q`` to take queries ``*b q``, by ``block`` at a time.

    The object has the training inputs ``x`` and ``block``.

    Raises:
        ValueError: queries of another number of components than ``x``.
    """

    @wraps(method)
    def batched(self: Any, query: Tensor) -> Tensor:
        if query.shape[-1] != self.x.shape[-1]:
            raise ValueError(
                f"queries need {self.x.shape[-1]} components like the training points, "
                f"got {tuple(query.shape)}"
            )
        rows = query.reshape(-1, query.shape[-1]).split(self.block)
        out = torch.cat([method(self, part) for part in rows])
        return out.reshape(*query.shape[:-1], out.shape[-1])

    return cast("Method", batched)


def draw(n: int, m: int, generator: Generator | None, like: Tensor) -> Tensor:
    """Return m of the indices 0 ... n - 1, drawn without replacement, on the device of ``like``."""
    return torch.randperm(n, generator=generator)[:m].to(like.device)


def check_pairs(x: Tensor, z: Tensor, reg: float | Tensor | None = None, **counts: int) -> None:
    """Raise a ValueError for pairs, a ridge or numbers of points that determine no estimator."""
    if len(x) < 1 or len(x) != len(z) or x.dtype != z.dtype:
        raise ValueError(
            "a conditional mean needs at least one input and one output for each, of one type, "
            f"got {tuple(x.shape)} in {x.dtype} and {tuple(z.shape)} in {z.dtype}"
        )
    for name, values in {"inputs x": x, "outputs z": z}.items():
        if bad := int((~torch.isfinite(values)).any(-1).sum()):
            raise ValueError(
                f"the {name} hold NaN or infinite values in {bad} of {len(x)} rows: "
                "leave these pairs out"
            )
    if reg is not None and not reg > 0:
        raise ValueError(f"reg must be positive, got {float(reg)}")
    for name, count in counts.items():
        if not 1 <= count <= len(x):
            raise ValueError(
                f"{name} must be between 1 and the number of training pairs, {len(x)}, got {count}"
            )
