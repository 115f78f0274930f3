"""Error against time of updates that use the memory points with the largest ratios only.

Batch 1, features in float32.

"all" is the rule as its formula stands, Psi^T D Psi over every point in one product. Points of
ratio 0 have weight 0: to leave them out ("positive") changes nothing but time, and `kbf.rkhs.rules`
does so by itself, by blocks, for one sequence on a CPU. `KBF(local=m)` takes the m points of the
largest ratios, and is an approximation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.update.rule import PrimalUpdate
from kbf.filters.online import RunningFilter
from kbf.filters.rollout import rollout
from kbf.plots.charts import Figure, curves
from kbf.rkhs.linalg import psd_solve
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate, largest
from studies.benchmarks.problem import problem
from studies.benchmarks.step import stepper

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "n": 5000,
        "rank": 128,
        "steps": 500,
        "points": [2500, 1000, 500, 250, 100],
        "rounds": 9,
        "seconds": 0.2,
    },
    "smoke": {
        "n": 300,
        "rank": 128,
        "steps": 20,
        "points": [150, 50],
        "rounds": 1,
        "seconds": 0.01,
    },
}
ALL, POSITIVE = "all", "positive"


class AllPoints(nn.Module):
    """The importance-weighted rule over every memory point, those of ratio 0 too."""

    def __init__(self, update: nn.Module) -> None:
        super().__init__()
        assert isinstance(update, PrimalUpdate)
        self.update = update

    def forward(self, ratio: Tensor, obs: Tensor) -> Tensor:
        """The posterior's weights."""
        features = self.update.features
        query = self.update.psi(obs).to(features.dtype)
        system = (features * ratio[..., None]).mT @ features
        solved = psd_solve(
            system, query[..., None], reg=len(features) * self.update.reg, check=False
        )
        return ratio * (solved[..., 0] @ features.mT)


@torch.no_grad()
def run(settings: Settings, tell: Tell) -> list[Row]:
    """Time of a step, error and difference to all points."""
    n, rank, device = settings["n"], settings["rank"], settings["device"]
    p = problem(n, steps=settings["steps"])
    truth, obs = p.test.states, p.test.obs[None].float().to(device)

    def made(local: int | None) -> KernelBayesFilter:
        tell("all points" if local is None else f"{local} points")
        return p.filter(rank, dtype="float32", local=local).fit(p.memory).to(device)

    whole = made(None)
    whole.rule = AllPoints(whole.rule)
    filters = {ALL: whole} | (
        {POSITIVE: made(None)} if device == "cpu" else {}
    )  # on a GPU their number is not asked for
    filters |= {str(m): made(m) for m in settings["points"]}
    runs = {name: rollout(each, obs) for name, each in filters.items()}
    tell("time of a step")
    sides: dict[str, Callable[[], object]] = {
        name: stepper(RunningFilter(each), obs[0]) for name, each in filters.items()
    }
    seconds = alternate(sides, rounds=settings["rounds"], seconds=settings["seconds"])
    errors = {
        name: (rolled.estimates[0].cpu() - truth).square().sum(-1).mean().item()
        for name, rolled in runs.items()
    }
    return [
        {
            "points": name,
            "points that take part": n
            if name == ALL
            else n * (1 - rolled.diagnostics["zero_weight_share"].mean().item()),
            "microseconds": 1e6 * seconds[name],
            "times faster than all": seconds[ALL] / seconds[name],
            "error": errors[name],
            "error above all": errors[name] / errors[ALL] - 1,
            "largest difference": largest(rolled.estimates, runs[ALL].estimates),
        }
        for name, rolled in runs.items()
    ]


def claims(rows: list[Row]) -> list[Claim]:
    """The fewest points whose error is at most 1 % above that of all, and what they bring."""
    local = [row for row in rows if row["points"] not in (ALL, POSITIVE)]
    good = [row for row in local if row["error above all"] <= 0.01]
    fewest = "none of those tried"
    if good:
        least = min(good, key=lambda row: int(row["points"]))
        fewest = (
            f"{least['points']} ({100 * least['error above all']:+.2g} %), "
            f"{least['times faster than all']:.3g} times faster"
        )
    claims = [
        Claim(
            "the fewest points of the largest ratios with an error at most 1 % above that of all "
            "points",
            fewest,
            None,
        )
    ]
    for row in rows:
        if row["points"] == POSITIVE:
            share = (
                f"{row['points that take part']:.0f} points, {row['times faster than all']:.3g} "
                "times faster"
            )
            target = "only the points of a positive ratio: estimates equal to 1e-4"
            claims.append(
                Claim(
                    target,
                    f"{row['largest difference']:.2g} ({share})",
                    row["largest difference"] <= 1e-4,
                )
            )
    return claims


def draw(rows: list[Row]) -> Figure:
    """Error against the time of a step."""
    shown = [
        {**row, "points": name if (name := row["points"]) in (ALL, POSITIVE) else f"largest {name}"}
        for row in rows
    ]
    return curves(
        shown,
        x="microseconds",
        y="error",
        by="points",
        log="y",
        xlabel="microseconds a step",
        ylabel="error",
        level=(rows[0]["error"], "error of all points"),
        title="Updates by the points of the largest ratios",
    )
