"""Cost of the checks of a running filter: `RunningFilter` against the bare arithmetic.

The checks: the shape of the observation, whether it was possible given the prediction, and what to
do where it was not (`kbf.filters.gating`). The bare side is the filter's own predict and
update, in one where it has that, and estimate.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.online import RunningFilter
from kbf.filters.protocols import Filter
from kbf.plots.charts import Figure, curves
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate
from studies.benchmarks.problem import problem
from studies.benchmarks.step import stepper

SIZES = {
    "full": {"n": 900, "tol": 1e-6, "rounds": 41},
    "smoke": {"n": 60, "tol": 1e-2, "rounds": 1},
}
DEFAULT, LARGEST = "default model", 0.05


def run(settings: Settings, tell: Tell) -> list[Row]:
    """A step of each filter, batch 1, with the checks and without."""
    torch.manual_seed(0)
    p = problem(settings["n"])
    obs = p.test.obs.float()
    filters: dict[str, Filter[Any]] = {
        DEFAULT: SimulatedKBF().fit(p.memory),
        "published filter": p.filter(settings["n"], settings["tol"], dtype="float32").fit(p.memory),
        "published filter, normalised": p.filter(
            settings["n"], settings["tol"], normalise=True
        ).fit(p.memory),
        "LSTM": LSTMFilter(p.memory.states.shape[1], obs.shape[1]).eval(),
        "Kalman": LearnedKalman().fit(p.memory),
    }
    rows = []
    for name, filter in filters.items():
        tell(name)
        both = {"checked": stepper(RunningFilter(filter), obs), "bare": bare(filter, obs)}
        seconds = [alternate(both, rounds=1, seconds=0.02) for _ in range(settings["rounds"])]
        row: Row = {"filter": name}
        row |= {
            f"{side}, microseconds": 1e6 * statistics.median(each[side] for each in seconds)
            for side in both
        }
        rows.append(
            row
            | {
                "cost of checks": statistics.median(
                    each["checked"] / each["bare"] for each in seconds
                )
                - 1
            }
        )
    return rows


def bare(filter: Filter[Any], obs: Tensor) -> Callable[[], object]:
    """A function that filters the next observation by the arithmetic alone."""
    at, both = [0, filter.init(1)], getattr(filter, "step", None)

    @torch.inference_mode()
    def call() -> Tensor:
        at[0] = (at[0] + 1) % len(obs)
        x = obs[at[0]][None]
        at[1] = filter.update(filter.predict(at[1]), x) if both is None else both(at[1], x)
        return filter.estimate(at[1])

    return call


def claims(rows: list[Row]) -> list[Claim]:
    """The share of a step of the default model that the checks may take."""
    cost = next(row["cost of checks"] for row in rows if row["filter"] == DEFAULT)
    return [
        Claim(
            f"checks cost below {LARGEST:.0%} of a live step of the default model",
            f"{cost:.1%}",
            cost < LARGEST,
        )
    ]


def draw(rows: list[Row]) -> Figure:
    """Time of a step, with the checks and without."""
    both = [
        {"filter": row["filter"], "side": side, "value": row[f"{side}, microseconds"]}
        for row in rows
        for side in ("checked", "bare")
    ]
    return curves(
        both,
        x="filter",
        y="value",
        by="side",
        log="y",
        xlabel=" ",
        ylabel="microseconds a step",
        title="What checks cost",
    )
