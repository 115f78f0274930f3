"""Whole recordings through `kbf filter`: in blocks of many rows, and row by row.

The filter of ``example:rotation`` with its alarms, on a recording of its own system. Both sides run
in this process and alternate; reading and writing of text is not part of the time.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

from kbf.fitted.checkpoint import load_filter
from kbf.fitted.online_estimator import OnlineEstimator, StepInputs
from kbf.plots.charts import Figure, curves
from kbf.ssm import rotation, simulate
from studies.benchmarks.base import Claim, Row, Settings, Tell

SIZES: dict[str, dict[str, Any]] = {
    "full": {"rows": [1000, 4000, 16_000, 64_000], "rounds": 3},
    "smoke": {"rows": [600], "rounds": 1},
}
LEAST_RATIO = 3.0
"""Times that blocks are to be faster on the longest recording."""
MAX_DIFFERENCE = 1e-3
"""Largest difference of estimates, in standard deviations: the rounding of float32."""


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Seconds of both sides, and the largest difference, for each number of rows."""
    trained = load_filter("example:rotation", device=settings["device"])
    schema, dtype = trained.module.column_schema(), trained.module.input_dtype
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = []
    for count in settings["rows"]:
        obs = simulate(rotation(), start, count, torch.Generator().manual_seed(1)).obs[0]
        rows = [StepInputs(x[None].to(settings["device"], dtype)) for x in obs]
        sides: dict[str, list[float]] = {"blocks": [], "row by row": []}
        outputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for _ in range(settings["rounds"]):
            for name, seconds in sides.items():
                tell(f"{count:,} rows, {name}")
                estimator = OnlineEstimator(trained, schema)
                if name == "row by row":
                    estimator.in_blocks = False
                began = time.perf_counter()
                outputs[name] = filtered(estimator, rows)
                seconds.append(time.perf_counter() - began)
        (means, spread), (wanted, _) = outputs["blocks"], outputs["row by row"]
        found.append(
            {
                "rows": count,
                "blocks, rows a second": count / median(sides["blocks"]),
                "row by row, rows a second": count / median(sides["row by row"]),
                "ratio": median(
                    b / a for a, b in zip(sides["blocks"], sides["row by row"], strict=True)
                ),
                "largest difference, standard deviations": float(
                    ((means - wanted).abs() / spread).max()
                ),
            }
        )
    return found


def filtered(
    estimator: OnlineEstimator, rows: list[StepInputs]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return estimates of all rows and their standard deviations, ``T d``."""
    assert rows[0].obs is not None
    size, means, spreads = estimator.rows_at_a_time(rows[0].obs), [], []
    for first in range(0, len(rows), size):
        state, _ = estimator.advance(rows[first : first + size])
        means.append(estimator.filter.estimate(state))
        C = estimator.covariances(state)
        assert C is not None
        spreads.append(C.diagonal(dim1=-2, dim2=-1).sqrt())
    return torch.cat(means), torch.cat(spreads)


def claims(rows: list[Row]) -> list[Claim]:
    """Faster on the longest recording, with equal estimates."""
    last = rows[-1]
    worst = max(row["largest difference, standard deviations"] for row in rows)
    rates = f"{last['blocks, rows a second']:,.0f} and {last['row by row, rows a second']:,.0f}"
    return [
        Claim(
            f"{last['rows']:,} rows: blocks are {LEAST_RATIO:g} times as fast as row by row",
            f"{last['ratio']:.1f} times, {rates} rows a second",
            last["ratio"] >= LEAST_RATIO,
        ),
        Claim(
            "equal estimates, up to rounding in single precision",
            f"they differ by at most {worst:.1e} standard deviations",
            worst < MAX_DIFFERENCE,
        ),
    ]


def draw(rows: list[Row]) -> Figure:
    """Rows a second by the length of the recording."""
    points = [
        {"rows": row["rows"], "value": row[f"{side}, rows a second"], "side": side}
        for row in rows
        for side in ("blocks", "row by row")
    ]
    return curves(points, x="rows", y="value", by="side")
