"""Many sequences at once, compared with bare matrix products and with single filters.

The floor is Psi^T D Psi of each sequence as matrix products, 2 n p^2 operations each, at the rate
that this machine reaches for a large product of float32, timed in turn with the sides. (Kept
products of features, `kbf.rkhs.rules.second_moments`, need half of them.) The sides: `kbf.rollout`,
which makes diagnostics as well; `kbf.step` and the estimate as they are written; the same compiled
(`kbf.filters.compile.compile_step`); and as many filters of one sequence each. The sequences are
windows of one recording.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kbf.filters.compile import compile_step
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.rollout import rollout, step
from kbf.plots.charts import Figure, curves
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate, largest
from studies.benchmarks.problem import problem

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "n": 900,
        "rank": 64,
        "batches": [1, 4, 16, 64, 256],
        "steps": 5,
        "rounds": 7,
        "seconds": 0.1,
        "compile": True,
    },
    "smoke": {
        "n": 60,
        "rank": 8,
        "batches": [1, 16],
        "steps": 2,
        "rounds": 1,
        "seconds": 0.01,
        "compile": False,
    },
}
ROLLOUT, WRITTEN, COMPILED, SINGLE = "rollout", "as written", "compiled", "one by one"
PRODUCT_SIZE = 1024
"""Rows and columns of the product that measures the machine's rate."""


@torch.no_grad()
def run(settings: Settings, tell: Tell) -> list[Row]:
    """Time of a step for each batch and each side, and its ratio to the floor."""
    n, rank, steps, device = settings["n"], settings["rank"], settings["steps"], settings["device"]
    p = problem(n, steps=steps + max(settings["batches"]))
    filter = p.filter(rank, dtype="float32").fit(p.memory).to(device)
    widths = p.ranks(filter)
    large, rows = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device), []
    for batch in settings["batches"]:
        obs = torch.stack([p.test.obs[i : i + steps] for i in range(batch)]).float().to(device)
        sides: dict[str, Callable[[], Tensor]] = {
            ROLLOUT: lambda obs=obs: rollout(filter, obs).estimates[:, -1],
            WRITTEN: partial(written, filter, obs),
            SINGLE: lambda obs=obs: torch.cat([written(filter, one) for one in obs.split(1)]),
        }
        if settings["compile"]:
            tell(f"{batch} at once: compiling")
            torch.compiler.reset()  # each batch by itself: shapes stay constants
            sides[COMPILED] = partial(compiled, filter, compile_step(filter, obs[:, 0]), obs)
        tell(f"{batch} at once")
        timed = {**sides, "product": lambda: large @ large}
        seconds = alternate(timed, rounds=settings["rounds"], seconds=settings["seconds"])
        floor = n * widths[1] ** 2 * batch / PRODUCT_SIZE**3 * seconds["product"]
        exact = sides[ROLLOUT]()
        for name, side in sides.items():
            took = seconds[name] / steps
            row: Row = {"batch": batch, "side": name, "rank": widths[1], "microseconds": 1e6 * took}
            row |= {
                "microseconds a sequence": 1e6 * took / batch,
                "floor, microseconds": 1e6 * floor,
                "times the floor": took / floor,
            }
            rows.append(
                row
                | {
                    "times one by one": seconds[SINGLE] / seconds[name],
                    "largest difference": largest(side(), exact),
                }
            )
    return rows


def written(filter: KernelBayesFilter, obs: Tensor) -> Tensor:
    """The last estimates of sequences ``b T *x``, each step as it is written."""
    state, estimate = filter.init(len(obs)), obs
    for x in obs.unbind(1):
        state = step(filter, state, x)
        estimate = filter.estimate(state)
    return estimate


def compiled(
    filter: KernelBayesFilter, fast: Callable[..., tuple[Tensor, ...]], obs: Tensor
) -> Tensor:
    """The last estimates of sequences ``b T *x``, by a compiled step."""
    weights, estimate = filter.init(len(obs)).weights.contiguous(), obs
    for x in obs.unbind(1):
        weights, estimate, _ = fast(weights, x)
    return estimate


def claims(rows: list[Row]) -> list[Claim]:
    """Compare the ratio to the floor with its target, and say what batches and compiling bring."""
    at = {(row["batch"], row["side"]): row for row in rows}
    batches = list(dict.fromkeys(row["batch"] for row in rows))
    verdicts = []
    for side in (WRITTEN, ROLLOUT):
        row = at.get((64, side))
        ratio = None if row is None else row["times the floor"]
        measured = (
            "not measured"
            if row is None
            else f"{ratio:.2f} times ({row['microseconds a sequence']:.0f} us a sequence)"
        )
        target = f"64 sequences, {side}: a step takes at most 3 times the bare matrix products"
        verdicts.append(Claim(target, measured, None if ratio is None else ratio <= 3))
    apart = max(row["largest difference"] for row in rows)
    verdicts.append(
        Claim(
            "every side has the same estimates, to 1e-4",
            f"{apart:.1e} apart at the most",
            apart <= 1e-4,
        )
    )
    gain = "; ".join(f"{b}: {at[b, WRITTEN]['times one by one']:.3g} times" for b in batches)
    verdicts.append(Claim("a batch is faster than one by one", gain, None))
    if (batches[0], COMPILED) in at:
        gain = "; ".join(
            f"{b}: {at[b, WRITTEN]['microseconds'] / at[b, COMPILED]['microseconds']:.3g} times"
            for b in batches
        )
        verdicts.append(Claim("compiled is faster than as written", gain, None))
    return verdicts


def draw(rows: list[Row]) -> Figure:
    """Time of a step for each sequence against their number, and the floor."""
    floor = [
        {
            **row,
            "side": "bare matrix products",
            "microseconds a sequence": row["floor, microseconds"] / row["batch"],
        }
        for row in rows
    ]
    first = {row["batch"]: row for row in reversed(floor)}
    return curves(
        [*rows, *first.values()],
        x="batch",
        y="microseconds a sequence",
        by="side",
        log="xy",
        xlabel="sequences at once",
        ylabel="microseconds a step and sequence",
        title="Many sequences at once",
    )
