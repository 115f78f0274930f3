"""`JoinedMaps`: several learned maps of one vector, evaluated together.

Sensors that fail one by one have a map each, and so has each output of a sparse map. A step of a
filter evaluates all of them at few points: one after the other, most of the time is that of calls.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kbf.filters.gaussian.count_maps import expected_root
from kbf.filters.gaussian.learned_maps import LearnedMap
from kbf.rkhs.kernels import Kernel

# Values of kernels that are computed at a time: they stay in the cache of a processor.
MAX_VALUES = 2**17


class Part(NamedTuple):
    """A map of some inputs, and the outputs that are its values.

    Attributes:
        inputs: ``p``, positions in the joined vector. columns: ``k``, of the outputs.
        map: ``*b p`` -> ``*b k``.
    """

    inputs: Tensor
    columns: Tensor
    map: LearnedMap


class KernelPart(NamedTuple):
    """The kernel terms of m maps of the same kind, with zeros for what only others have.

    Attributes:
        kernel: with its settings ``m 1 1``.
        inputs: ``m p``. low, high: ``m 1 p``, the boxes of the maps.
        landmarks: ``m r p``. coefficients: ``m r k``.
        places: ``mk q``, 1 where a value belongs to an output.
    """

    kernel: Kernel
    inputs: Tensor
    low: Tensor
    high: Tensor
    landmarks: Tensor
    coefficients: Tensor
    places: Tensor

    def __call__(self, rows: Float[Tensor, "n e"]) -> Float[Tensor, "n q"]:
        """Return the terms at each row."""
        n, (m, r, _) = len(rows), self.landmarks.shape
        at_a_time = max(1, MAX_VALUES // (m * r))
        if n > at_a_time:
            return torch.cat([self(some) for some in rows.split(at_a_time)])
        given = rows[:, self.inputs].movedim(1, 0).maximum(self.low).minimum(self.high)
        values = self.kernel(given, self.landmarks) @ self.coefficients
        return values.movedim(0, 1).flatten(1) @ self.places


class JoinedMaps(NamedTuple):
    """y = B u + b + kernel terms + E[2 sqrt(x + 3/8)] of counts, as `LearnedMap`.

    Attributes:
        B: ``q e``. b: ``q``. kernels: the terms by kind.
        counted: ``c q``, 1 where a rate belongs to an output; None without counts.
        rates: ``c e+1``, of log rates, the offset last; None without counts.
    """

    B: Tensor
    b: Tensor
    kernels: list[KernelPart]
    counted: Tensor | None
    rates: Tensor | None

    def __call__(self, u: Float[Tensor, "*b e"]) -> Float[Tensor, "*b q"]:
        """Return the values of all maps at u, in the type of u."""
        rows = u.reshape(u.shape[:-1].numel(), u.shape[-1]).to(self.b)
        y = rows @ self.B.mT + self.b
        for kernel in self.kernels:
            y = y + kernel(rows)
        if self.rates is not None and self.counted is not None:
            logs = rows @ self.rates[:, :-1].mT + self.rates[:, -1]
            y = y + expected_root(logs) @ self.counted
        return y.to(u).unflatten(0, u.shape[:-1])


def join_maps(parts: Sequence[Part], e: int, q: int) -> JoinedMaps:
    """Return the maps of some of e inputs each as one map to q outputs; others are 0."""
    like = parts[0].map.b
    B, b = like.new_zeros(q, e), like.new_zeros(q)
    kinds: dict[tuple[str, int, int], list[Part]] = {}
    counted, rates = [], []
    for part in parts:
        columns, map = part.columns, part.map
        b[columns] = map.b
        if map.B is not None:
            B[columns[:, None], part.inputs] = map.B
        if map.ridge is not None:
            kinds.setdefault(kind_of(map), []).append(part)
        if map.rates is not None:
            row = like.new_zeros(len(columns), e + 1)
            row[:, part.inputs], row[:, -1] = map.rates.B, map.rates.b
            rates.append(row)
            counted.append(columns)
    return JoinedMaps(
        B,
        b,
        [join_kernels(each, q) for each in kinds.values()],
        selection(torch.cat(counted), q).to(like) if counted else None,
        torch.cat(rates) if rates else None,
    )


def kind_of(map: LearnedMap) -> tuple[str, int, int]:
    """Return name of the kernel, number of outputs, and the power of 2 above that of landmarks."""
    assert map.ridge is not None and isinstance(map.ridge.kernel, partial)
    rank = len(map.ridge.landmarks)
    return map.ridge.kernel.func.__name__, len(map.b), 2 ** (rank - 1).bit_length()


def join_kernels(parts: list[Part], q: int) -> KernelPart:
    """Return the kernel terms of maps of one `kind_of`, to q outputs."""
    ridges = [part.map.ridge for part in parts if part.map.ridge is not None]
    m, p = len(parts), max(len(part.inputs) for part in parts)
    r, k = max(len(ridge.landmarks) for ridge in ridges), len(parts[0].columns)
    like = ridges[0].landmarks
    landmarks, coefficients = like.new_zeros(m, r, p), like.new_zeros(m, r, k)
    low, high = like.new_zeros(m, 1, p), like.new_zeros(m, 1, p)
    inputs = torch.zeros(m, p, dtype=torch.long, device=like.device)
    for i, (part, ridge) in enumerate(zip(parts, ridges, strict=True)):
        own, (rank, width) = part.map, ridge.landmarks.shape
        inputs[i, :width], landmarks[i, :rank, :width] = part.inputs, ridge.landmarks
        assert own.coefficients is not None
        coefficients[i, :rank] = own.coefficients
        low[i, 0, :width] = -torch.inf if own.box is None else own.box[0]
        high[i, 0, :width] = torch.inf if own.box is None else own.box[1]
    kernels = [ridge.kernel for ridge in ridges if isinstance(ridge.kernel, partial)]
    settings = {
        key: like.new_tensor([float(kernel.keywords[key]) for kernel in kernels]).view(-1, 1, 1)
        for key in kernels[0].keywords
    }
    places = selection(torch.cat([part.columns for part in parts]), q).to(like)
    kernel = partial(kernels[0].func, **settings)
    return KernelPart(kernel, inputs, low, high, landmarks, coefficients, places)


def selection(columns: Int[Tensor, " c"], q: int) -> Float[Tensor, "c q"]:
    """Return the matrix S with (y S)_j = y_i where column i is j."""
    return torch.nn.functional.one_hot(columns, q).double()
