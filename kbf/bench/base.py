"""What the benchmarks share: timing sides in turn, the machine's rate of matrix products, and claims.

A file ``NAME.py`` holds one benchmark as

- ``SIZES``: settings by name, "full" and "smoke" (a few seconds, for the tests);
- ``run(settings, tell) -> list[Row]``: the measurements; ``tell(text)`` says what is being measured;
- ``claims(rows) -> list[Claim]``: what was to be reached, and what was;
- ``draw(rows) -> Figure``: the picture.

`kbf.commands.bench` runs it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from kbf.charts import Figure

Row = dict[str, Any]
Settings = dict[str, Any]
Tell = Callable[[str], None]


class Claim(NamedTuple):
    """What was to be reached, what was measured, and whether it was reached (None: it cannot be said here)."""

    target: str
    measured: str
    reached: bool | None


@runtime_checkable
class Benchmark(Protocol):
    """The parts of a benchmark's module."""

    SIZES: Mapping[str, Settings]

    def run(self, settings: Settings, tell: Tell) -> list[Row]:
        """Measure."""
        ...

    def claims(self, rows: list[Row]) -> list[Claim]:
        """Compare with what was to be reached."""
        ...

    def draw(self, rows: list[Row]) -> Figure:
        """The picture."""
        ...


def alternate(sides: Mapping[str, Callable[[], object]], *, rounds: int = 7, seconds: float = 0.2) -> dict[str, float]:
    """Median seconds of a call of each side, the sides taken in turn ``rounds`` times: what disturbs the machine disturbs all.

    In its turn a side is called for about ``seconds``, at least once; the first call of each is not counted.
    """
    calls = {}
    for name, side in sides.items():
        side()
        began = time.perf_counter()
        side()
        synchronise()
        calls[name] = max(1, round(seconds / max(time.perf_counter() - began, 1e-7)))
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            began = time.perf_counter()
            for _ in range(calls[name]):
                side()
            synchronise()
            times[name].append((time.perf_counter() - began) / calls[name])
    return {name: statistics.median(values) for name, values in times.items()}


def synchronise() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def matrix_rate(dtype: torch.dtype = torch.float32, *, device: torch.device | str = "cpu", n: int = 1024) -> float:
    """Floating-point operations a second of a large matrix product, 2 n^3 each: what no filter can be faster than."""
    a = torch.randn(n, n, dtype=dtype, device=device)
    return 2 * n**3 / alternate({"product": lambda: a @ a}, rounds=5)["product"]


def largest(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference."""
    return (a.double() - b.double()).abs().max().item()
