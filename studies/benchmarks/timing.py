"""Timing of both sides in turn, on a CPU or a GPU; PyTorch alone is needed for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def alternate(
    sides: Mapping[str, Callable[[], object]], *, rounds: int = 7, seconds: float = 0.2
) -> dict[str, float]:
    """Median seconds of a call of each side.

    The sides run in turn, ``rounds`` times, so that other load disturbs all alike.

    In its turn a side is called for about ``seconds``, at least once; the first call of each is not
    counted.
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
