"""Time and memory of fitting, of a step and of selection against the number of points.

Nothing is n x n: landmarks, medians and leave-one-out scores look at subsamples, features are made
by blocks, and what is kept are arrays of n times the rank. Memory is the process's largest resident
set since the start of the benchmark.
"""

from __future__ import annotations

import math
import resource
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kbf.filters.kernel.kbf import KBF
from kbf.filters.online import RunningFilter
from kbf.plots.charts import Figure, curves
from kbf.recording import Recording
from kbf.ssm import oscillatory, simulate
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate
from studies.benchmarks.timing import synchronise

SIZES: dict[str, dict[str, Any]] = {
    "full": {"sizes": [1000, 3000, 10_000, 30_000, 100_000], "rank": 256, "rounds": 5},
    "smoke": {"sizes": [200, 400], "rank": 16, "rounds": 1},
}
RECORDINGS = 10


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Each size in turn, the smallest first: the memory peak is that of the current size."""
    torch.manual_seed(0)
    device = settings["device"]
    reset_peak()
    before = gibibytes()
    rows = []
    for n in settings["sizes"]:
        tell(f"{n:,} training points")
        memory = [
            s._replace(states=s.states.to(device), obs=s.obs.to(device)) for s in recordings(n)
        ]
        model = KBF(rank=settings["rank"], tol=0.0, select="loo", dtype="float32", learn=False)
        began = time.perf_counter()
        model.prepare(memory)
        chosen = time.perf_counter() - began
        # narrow kernels: these data do not need so high a rank otherwise
        model.log_bandwidth.sub_(math.log(4.0))
        began = time.perf_counter()
        filter = model.to(device).fit(memory)
        synchronise()
        fitted = time.perf_counter() - began
        live, obs = RunningFilter(filter), memory[0].obs[:1].float()
        seconds = alternate(
            {"step": lambda live=live, obs=obs: live.step(obs)}, rounds=settings["rounds"]
        )["step"]
        used = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else gibibytes()
        row: Row = {
            "training points": n,
            "rank": filter.rule.features.shape[1],  # pyright: ignore[reportIndexIssue]
            "choosing, seconds": chosen,
        }
        row |= {"conditioning, seconds": fitted, "step, milliseconds": 1e3 * seconds}
        rows.append(
            row
            | {
                "memory, GiB": used,
                "memory above the start, GiB": used - (0 if device == "cuda" else before),
            }
        )
        del live, filter, model
    return rows


def recordings(n: int) -> list[Recording]:
    """Oscillatory data, n steps in all."""
    start = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(RECORDINGS, 2)
    drawn = simulate(oscillatory(), start, n // RECORDINGS, torch.Generator().manual_seed(0))
    return [Recording(z, x) for z, x in zip(drawn.states, drawn.obs, strict=True)]


STATUS, PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak() -> None:
    """Reset the peak of the resident memory, where the system allows it."""
    with suppress(OSError):
        PEAK.write_text("5", encoding="ascii")


def gibibytes() -> float:
    """The largest resident set of this process since `reset_peak`."""
    with suppress(OSError, StopIteration):
        line = next(
            line
            for line in STATUS.read_text(encoding="ascii").splitlines()
            if line.startswith("VmHWM")
        )
        return int(line.split()[1]) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def slope(rows: list[Row], key: str, least: int = 10_000) -> float:
    """Slope of the line through log(key) against log(n), over the sizes that are large enough."""
    large = [row for row in rows if row["training points"] >= least] if len(rows) > 2 else rows
    n, values = (
        [math.log(max(row[name], 1e-12)) for row in large] for name in ("training points", key)
    )
    return float(np.polyfit(n, values, 1)[0])


def claims(rows: list[Row]) -> list[Claim]:
    """Linear time and memory, and 100,000 points within 4 GB."""
    verdicts = []
    for key in ("conditioning, seconds", "step, milliseconds", "memory above the start, GiB"):
        exponent, grown = slope(rows, key), rows[-1][key] > rows[0][key] > 0
        target = (
            f"{key.split(',')[0]}: slope of the log-log line at most 1.1, from 10,000 points on"
        )
        verdicts.append(
            Claim(
                target,
                f"{exponent:.2f}" if grown else "nothing grew",
                exponent <= 1.1 if grown else None,
            )
        )
    last = rows[-1]
    measured = (
        f"{last['memory, GiB'] * 2**30 / 1e9:.2f} GB at {last['training points']:,} points of "
        f"rank {last['rank']}"
    )
    enough = last["memory, GiB"] * 2**30 < 4e9 if last["training points"] >= 100_000 else None
    return [
        *verdicts,
        Claim("100,000 training points under 4 GB, PyTorch and all", measured, enough),
    ]


def draw(rows: list[Row]) -> Figure:
    """Each quantity against n, in its own panel."""
    quantities = ("choosing, seconds", "conditioning, seconds", "step, milliseconds", "memory, GiB")
    points = [
        {"n": row["training points"], "value": row[key], "what": key, "line": "kbf"}
        for key in quantities
        for row in rows
    ]
    return curves(
        points,
        x="n",
        y="value",
        by="line",
        panel="what",
        log="xy",
        xlabel="training points",
        ylabel="see above",
    )
