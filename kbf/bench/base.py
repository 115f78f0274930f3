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

from kbf.plots.charts import Figure

Row = dict[str, Any]
Settings = dict[str, Any]
Tell = Callable[[str], None]


class Claim(NamedTuple):
    """A target, what was measured, and whether the target was reached (None: there is none, or it cannot be said here)."""

    target: str
    measured: str
    reached: bool | None


@runtime_checkable
class Benchmark(Protocol):
    """The parts of a benchmark's module."""

    SIZES: Mapping[str, Settings]

    def run(self, settings: Settings, tell: Tell) -> list[Row]:
        """Measure; returns the rows of the table."""
        ...

    def claims(self, rows: list[Row]) -> list[Claim]:
        """Compare the rows with the targets."""
        ...

    def draw(self, rows: list[Row]) -> Figure:
        """The picture."""
        ...


def alternate(sides: Mapping[str, Callable[[], object]], *, rounds: int = 7, seconds: float = 0.2) -> dict[str, float]:
    """Median seconds of a call of each side. The sides run in turn, ``rounds`` times, so that other load disturbs all alike.

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


def largest(a: Tensor, b: Tensor) -> float:
    """The largest absolute difference."""
    return (a.double() - b.double()).abs().max().item()
