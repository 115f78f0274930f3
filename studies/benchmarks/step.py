"""One step of the Kernel Bayes Filter: features in float32 against dense float64.

The published code is a third side. Batch 1.

The dense filter is the textbook's: constant operators made once, one Cholesky factorisation a step.
The published arithmetic (diagonal matrices as dense ones, a general solver) is that of
`tests/reference.py`. The rank is chosen by the tolerance, the share of the Gram matrix's trace that
features may leave out. Estimates are compared over 200 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kbf.filters.online import RunningFilter
from kbf.filters.rollout import rollout
from kbf.plots.charts import Figure, curves
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate, largest
from studies.benchmarks.problem import REGS, problem, reference

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "n": 900,
        "tolerances": [1e-2, 3e-3, 1e-3, 1e-4, 1e-5, 3e-6, 2e-6, 1e-6, 1e-7],
        "rounds": 9,
        "compile": True,
    },
    "smoke": {"n": 60, "tolerances": [1e-2, 1e-4], "rounds": 1, "compile": False},
}
DENSE, PUBLISHED = "dense float64", "published"


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Time of a step, differences and errors of each side."""
    torch.manual_seed(0)
    device, p = settings["device"], problem(settings["n"])
    dense = p.filter().fit(p.memory).to(device)
    truth, obs = p.test.states.double(), p.test.obs[None].double().to(device)
    exact = rollout(dense, obs).estimates[0].cpu()
    estimates = {DENSE: exact}
    sides: dict[str, Callable[[], object]] = {DENSE: stepper(RunningFilter(dense), obs[0])}
    ranks: dict[str, str] = {DENSE: ""}
    code = reference()
    if code is not None and device == "cpu":
        tell("published arithmetic")
        step, w = code.published_step(
            p.memory.states.double().numpy(),
            p.memory.obs.double().numpy(),
            *p.bandwidths.tolist(),
            *REGS,
        )
        published, z, state = [], p.memory.states.double(), w
        for x in obs[0, :20].numpy():
            state = step(state, x)
            published.append(torch.from_numpy(state) @ z)
        estimates[PUBLISHED], ranks[PUBLISHED] = torch.stack(published), ""
        sides[PUBLISHED] = lambda: step(w, obs[0, 0].numpy())
    for tol in settings["tolerances"]:
        low = p.filter(settings["n"], tol, dtype="float32").fit(p.memory).to(device)
        both = " and ".join(str(rank) for rank in p.ranks(low))
        for compiled in (False, True) if settings["compile"] else (False,):
            name = f"tolerance {tol:g}{', compiled' if compiled else ''}"
            tell(name)
            live = RunningFilter(low, compiled=obs[0, :1].float() if compiled else None)
            estimates[name] = torch.cat([live.step(x[None]) for x in obs[0].float()]).cpu()
            sides[name], ranks[name] = stepper(live, obs[0].float()), both
    tell("time of a step")
    seconds = alternate(sides, rounds=settings["rounds"])
    rows = []
    for name in sides:
        own = estimates[name].double()
        steps = len(own)  # the published code makes fewer
        error, least = (
            (side[:steps] - truth[:steps]).square().sum(-1).mean() for side in (own, exact)
        )
        row: Row = {
            "side": name,
            "ranks": ranks[name],
            "compiled": "compiled" in name,
            "microseconds": 1e6 * seconds[name],
        }
        row |= {"times faster than dense": seconds[DENSE] / seconds[name]}
        row["times faster than published"] = (
            seconds[PUBLISHED] / seconds[name] if PUBLISHED in seconds else float("nan")
        )
        rows.append(
            row
            | {
                "largest difference": largest(own, exact[: len(own)]),
                "error above dense": (error / least - 1).item(),
            }
        )
    return rows


def stepper(live: RunningFilter, obs: Tensor) -> Callable[[], object]:
    """A function that filters the next observation, starting over at the end of the sequence."""
    at = [0]

    def call() -> Tensor:
        at[0] = (at[0] + 1) % len(obs)
        return live.step(obs[at[0]][None])

    return call


def claims(rows: list[Row]) -> list[Claim]:
    """Compare the ratios of times with their targets."""
    verdicts = []
    for limit, key, words in (
        (1e-4, "largest difference", "estimates equal to 1e-4"),
        (5e-3, "error above dense", "equal error within 0.5 %"),
    ):
        good = [row for row in rows if row["ranks"] != "" and abs(row[key]) <= limit]
        best: dict[str, Any] | None = min(good, key=lambda row: row["microseconds"], default=None)
        for against, times in (
            ("dense", 60 if key == "largest difference" else 100),
            ("published", 300 if key == "largest difference" else 500),
        ):
            ratio = float("nan") if best is None else best[f"times faster than {against}"]
            measured = (
                "no rank is as exact"
                if best is None
                else f"{ratio:.0f} times ({best['side']}, {best['microseconds']:.0f} us)"
            )
            verdicts.append(
                Claim(
                    f"at least {times} times faster than {against}, {words}",
                    measured,
                    ratio >= times if ratio == ratio else None,
                )
            )
    return verdicts


def draw(rows: list[Row]) -> Figure:
    """Time against the largest difference of the estimates."""
    low = [
        {**row, "form": "compiled" if row["compiled"] else "as written"}
        for row in rows
        if row["ranks"] != ""
    ]
    dense = next(row["microseconds"] for row in rows if row["side"] == DENSE)
    return curves(
        low,
        x="largest difference",
        y="microseconds",
        by="form",
        log="xy",
        ylabel="microseconds a step",
        level=(dense, "dense, float64"),
        title="One step of the Kernel Bayes Filter",
    )
