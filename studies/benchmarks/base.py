"""Shared parts of the benchmarks: alternating timing, settings, rows and claims.

A file ``NAME.py`` holds one benchmark as

- ``SIZES``: settings by name, "full" and "smoke" (a few seconds, for the tests);
- ``run(settings, tell) -> list[Row]``: the measurements; ``tell(text)`` prints what is being
measured;
- ``claims(rows) -> list[Claim]``: what was to be reached, and what was;
- ``draw(rows) -> Figure``: the picture.

`studies.benchmarks.command` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from kbf.plots.charts import Figure
from studies.benchmarks.timing import alternate, largest, synchronise

__all__ = ["Benchmark", "Claim", "Row", "Settings", "Tell", "alternate", "largest", "synchronise"]

Row = dict[str, Any]
Settings = dict[str, Any]
Tell = Callable[[str], None]


class Claim(NamedTuple):
    """A target, the measured value, and whether the target was reached.

    None: there is no target, or it cannot be decided here.
    """

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
