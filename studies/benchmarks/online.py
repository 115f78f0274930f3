"""A filter at work: latency, memory and error over a million steps of oscillatory data.

Observations are drawn as they are needed and forgotten; the state of the filter is all that is
carried on. With controls the states are pushed, z' = f(z) + u + noise with u ~ N(0, 0.1^2 I), and
the default is the kernel Monte Carlo filter.
"""

from __future__ import annotations

import math
import resource
import time
from typing import Any

import torch
from torch import Generator, Tensor

from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo
from kbf.filters.online import RunningFilter
from kbf.filters.protocols import Filter
from kbf.plots.charts import Figure, curves
from kbf.recording import Recording
from kbf.ssm import oscillatory, simulate
from studies.benchmarks.base import Claim, Row, Settings, Tell
from studies.benchmarks.problem import problem

SIZES: dict[str, dict[str, Any]] = {
    "full": {"n": 900, "steps": 1_000_000, "others": 20_000, "chunk": 10_000, "compile": True},
    "smoke": {"n": 60, "steps": 2000, "others": 400, "chunk": 100, "compile": False},
}
PUSH = 0.1
"""Standard deviation of a control, in each direction."""
DEFAULT, CONTROLLED = "default model, as written", "default model with controls, as written"
LATENCIES = {DEFAULT: 250, CONTROLLED: 2000}
"""Microseconds that half of the steps may take at most."""


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Rows for each of ten parts of the run: latency percentiles, error and memory.

    The published filter (features, float32) makes all the steps; the default model and the step as
    written make fewer.
    """
    p = problem(settings["n"])
    device, example = settings["device"], p.test.obs[:1].float().to(settings["device"])
    low = p.filter(settings["n"], 1e-6, dtype="float32").fit(p.memory).to(device)
    enlarged = SimulatedKBF().fit(p.memory).to(device)
    compiled = example if settings["compile"] else None
    sides = [
        ("published filter", low, compiled, settings["steps"]),
        ("published filter, as written", low, None, settings["others"]),
    ]
    sides.append(("default model", enlarged, compiled, settings["others"]))
    sides.append((DEFAULT, enlarged, None, settings["others"]))
    sides.append((CONTROLLED, with_controls(settings["n"], device), None, settings["others"]))
    return [
        row
        for name, filter, obs, steps in sides
        for row in work(name, filter, obs, steps, settings["chunk"], device, tell)
    ]


def with_controls(n: int, device: str) -> Filter[Any]:
    """What the default begins with where recordings have controls, learned from n steps."""
    states, obs, _, controls = drive(
        torch.tensor([1.0, 0.0], dtype=torch.float64), n, Generator().manual_seed(0)
    )
    assert controls is not None
    recording, model = (
        Recording(states.to(device), obs.to(device), controls=controls.to(device)),
        KernelMonteCarlo(),
    )
    model.prepare([recording])
    return model.fit([recording])


def drive(z: Tensor, steps: int, generator: Generator) -> Recording:
    """So many steps after z ``*b 2``, of states that controls push."""
    model, drawn = oscillatory(), []
    for _ in range(steps):
        u = PUSH * torch.randn(z.shape, dtype=z.dtype, generator=generator)
        z = model.move(z, generator) + u
        drawn.append((z, model.observe(z, generator), u))
    states, obs, controls = (torch.stack(each, z.ndim - 1) for each in zip(*drawn, strict=True))
    return Recording(states, obs, controls=controls)


def work(
    name: str,
    filter: Filter[Any],
    compiled: torch.Tensor | None,
    steps: int,
    chunk: int,
    device: str,
    tell: Tell,
) -> list[Row]:
    """Ten parts of a run of one filter."""
    live, generator = RunningFilter(filter, compiled=compiled), Generator().manual_seed(1)
    z, rows, chunk = torch.tensor([[1.0, 0.0]], dtype=torch.float64), [], min(chunk, steps // 10)
    for part in range(10):
        latencies, total, bad = [], 0.0, 0
        for first in range(0, steps // 10, chunk):
            tell(f"{name}: {part * (steps // 10) + first:,} of {steps:,} steps")
            drawn = (
                drive(z, chunk, generator)
                if live.controlled
                else simulate(oscillatory(), z, chunk, generator)
            )
            z, states, seen = (
                drawn.states[:, -1],
                drawn.states[0],
                drawn.obs.transpose(0, 1).float().to(device),
            )
            acted = (
                None
                if drawn.controls is None
                else drawn.controls.transpose(0, 1).float().to(device)
            )
            estimates = torch.empty_like(states)
            for t in range(chunk):
                began = time.perf_counter_ns()
                estimate = live.step(seen[t], None if acted is None else acted[t])
                estimates[t] = estimate[0]  # on a GPU: waits for it, as a reader of estimates does
                latencies.append(time.perf_counter_ns() - began)
            bad += int((~torch.isfinite(estimates)).any(-1).sum())
            total += (estimates - states).square().sum().item()
        micro = torch.tensor(latencies, dtype=torch.float64) / 1e3
        row: Row = {
            "filter": name,
            "steps so far": (part + 1) * (steps // 10),
            "not finite": bad,
            "error": total / len(latencies),
        }
        for share in (0.5, 0.99, 0.999):
            row[f"{100 * share:g} %, microseconds"] = (
                micro.quantile(share).item() if len(micro) < 2**24 else math.nan
            )
        rows.append(row | {"slowest, microseconds": micro.max().item(), "memory, MiB": resident()})
    return rows


def resident() -> float:
    """Resident memory of the process in MiB.

    Its maximum so far where the system does not report the present value.
    """
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize() / 2**20
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def claims(rows: list[Row]) -> list[Claim]:
    """No NaN, no growth, no drift."""
    verdicts = []
    for name in dict.fromkeys(row["filter"] for row in rows):
        mine = [row for row in rows if row["filter"] == name]
        steps, bad = mine[-1]["steps so far"], sum(row["not finite"] for row in mine)
        verdicts.append(
            Claim(f"{name}: every estimate finite", f"{bad} of {steps:,} are not", bad == 0)
        )
        grown = mine[-1]["memory, MiB"] - mine[1]["memory, MiB"]
        verdicts.append(
            Claim(
                f"{name}: memory does not grow",
                f"{grown:+.1f} MiB from the second tenth to the last",
                grown < 2,
            )
        )
        apart = mine[-1]["error"] / mine[0]["error"] - 1
        measured = f"{mine[0]['error']:.4f} in the first tenth, {mine[-1]['error']:.4f} in the last"
        noise = 30 / math.sqrt(
            steps / 10
        )  # successive errors hang together; three standard errors and more
        verdicts.append(
            Claim(f"{name}: the error does not drift", measured, abs(apart) < max(0.01, noise))
        )
        keys = ("50 %, microseconds", "99 %, microseconds", "99.9 %, microseconds")
        median, high, higher = (sorted(row[key] for row in mine)[5] for key in keys)
        words = (
            f"{median:.0f}, {high:.0f} and {higher:.0f} us: {1e6 / median:,.0f} observations a "
            "second"
        )
        most = LATENCIES.get(name)
        target = (
            f"{name}: latency, 50, 99 and 99.9 "
            f"%{'' if most is None else f'; half of the steps within {most:,} us'}"
        )
        verdicts.append(Claim(target, words, None if most is None else median <= most))
    return verdicts


def draw(rows: list[Row]) -> Figure:
    """Error, latency and memory over the run."""
    quantities = ("error", "50 %, microseconds", "99 %, microseconds", "memory, MiB")
    points = [
        {"steps": row["steps so far"], "value": row[key], "what": key, "filter": row["filter"]}
        for key in quantities
        for row in rows
    ]
    return curves(
        points,
        x="steps",
        y="value",
        by="filter",
        panel="what",
        log="x",
        xlabel="steps",
        ylabel="see above",
    )
