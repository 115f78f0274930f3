"""Rank that a kernel needs: features to a tolerance in float32 against float64 Gram matrices.

The tolerance is the share of the Gram matrix's trace that features may leave out: its root is how
far they are from the kernel's own, in the mean of squares. So estimates should differ in proportion
to that root. Batch 1, as written; they are compared over the test steps. Scale s: kernels exp(-||a
- b||^2 / (s times the median squared distance)).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from kbf.filters.online import RunningFilter
from kbf.filters.rollout import rollout
from kbf.plots.charts import Figure, curves
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate, largest
from studies.benchmarks.problem import problem
from studies.benchmarks.step import stepper

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "n": 900,
        "steps": 200,
        "scales": [0.1, 0.25, 0.5, 1, 2, 4],
        "tolerances": [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8],
        "rounds": 5,
        "seconds": 0.1,
    },
    "smoke": {
        "n": 60,
        "steps": 20,
        "scales": [0.5, 2],
        "tolerances": [1e-2, 1e-4],
        "rounds": 1,
        "seconds": 0.01,
    },
}
LARGEST_CONSTANT = 2.0
"""The largest difference over the root of the tolerance that the claim allows."""


@torch.no_grad()
def run(settings: Settings, tell: Tell) -> list[Row]:
    """Ranks, time of a step, difference and error for each scale and tolerance."""
    n, device, rows = settings["n"], settings["device"], []
    for scale in settings["scales"]:
        tell(f"scale {scale:g}")
        p = problem(n, steps=settings["steps"], scale=float(scale))
        truth, obs = p.test.states.double(), p.test.obs[None].double().to(device)
        dense = p.filter().fit(p.memory).to(device)
        exact = rollout(dense, obs).estimates[0].cpu()
        least = (exact - truth).square().sum(-1).mean()
        sides: dict[str, Callable[[], object]] = {"dense": stepper(RunningFilter(dense), obs[0])}
        here: list[Row] = []
        for tol in settings["tolerances"]:
            low = p.filter(n, tol, dtype="float32").fit(p.memory).to(device)
            estimates = rollout(low, obs.float()).estimates[0].cpu().double()
            states, observations = p.ranks(low)
            row: Row = {
                "scale": float(scale),
                "tolerance": tol,
                "rank of states": states,
                "rank of observations": observations,
            }
            row |= {"largest difference": largest(estimates, exact)}
            here.append(
                row
                | {
                    "error above dense": (
                        (estimates - truth).square().sum(-1).mean() / least - 1
                    ).item()
                }
            )
            sides[f"{tol:g}"] = stepper(RunningFilter(low), obs[0].float())
        tell(f"scale {scale:g}: time of a step")
        seconds = alternate(sides, rounds=settings["rounds"], seconds=settings["seconds"])
        for row in here:
            took = seconds[f"{row['tolerance']:g}"]
            rows.append(
                row
                | {"microseconds": 1e6 * took, "times faster than dense": seconds["dense"] / took}
            )
    return rows


def claims(rows: list[Row]) -> list[Claim]:
    """Whether errors stay within the tolerance's bound at every width, and the rank required."""
    worst = max(rows, key=lambda row: row["largest difference"] / math.sqrt(row["tolerance"]))
    times = worst["largest difference"] / math.sqrt(worst["tolerance"])
    verdicts = [
        Claim(
            f"at every scale and tolerance estimates differ by at most {LARGEST_CONSTANT:g} "
            "sqrt(tolerance)",
            f"{times:.2g} sqrt(tolerance) at the most (scale {worst['scale']:g}, tolerance "
            f"{worst['tolerance']:g})",
            times <= LARGEST_CONSTANT,
        )
    ]
    fine = [row for row in rows if row["tolerance"] <= 1e-4]
    far = max((abs(row["error above dense"]) for row in fine), default=None)
    verdicts.append(
        Claim(
            "at every scale the error is within 0.5 % of the dense filter's from tolerance 1e-4 on",
            "not measured" if far is None else f"within {100 * far:.2g} %",
            None if far is None else far <= 5e-3,
        )
    )
    needed = []
    for scale in dict.fromkeys(row["scale"] for row in rows):
        good = [row for row in rows if row["scale"] == scale and row["largest difference"] <= 1e-3]
        if good:
            row = min(good, key=lambda row: row["rank of states"])
            ranks = f"{row['rank of states']} and {row['rank of observations']}"
            needed.append(
                f"scale {scale:g}: {ranks} ({row['times faster than dense']:.3g} times faster "
                "than dense)"
            )
    return [
        *verdicts,
        Claim(
            "ranks of states and observations that estimates equal to 1e-3 take",
            "; ".join(needed) or "none",
            None,
        ),
    ]


def draw(rows: list[Row]) -> Figure:
    """Difference and time against the rank of the states, a line for each scale."""
    shown = {
        "largest difference": "largest difference of the estimates",
        "microseconds": "microseconds a step",
    }
    points = [
        {
            "scale": f"scale {row['scale']:g}",
            "rank": row["rank of states"],
            "what": what,
            "value": row[key],
        }
        for key, what in shown.items()
        for row in rows
    ]
    return curves(
        points,
        x="rank",
        y="value",
        by="scale",
        panel="what",
        log="xy",
        xlabel="features of the states' kernel",
        ylabel=" ",
        title="Narrow kernels need more rank",
    )
