"""Other libraries on the same work: filters, density ratios and ridge regression.

Each side's numbers are compared with ours before anything is timed. What differs is the price:
filterpy is numpy, one sequence and one step at a time; dynamax compiles the whole recursion (and
jax has threads of its own); torch-kf filters a batch; gpytorch builds a Gaussian process.
`studies.benchmarks.peers_filters` and `studies.benchmarks.peers_regression` describe the
calls. A library that is not installed has a row with this note; ``pip install "kbf[bench]"``
installs them all.
"""

from __future__ import annotations

import importlib
import math
import warnings
from importlib import metadata
from typing import Any

from kbf.plots.charts import Figure, curves
from studies.benchmarks.base import Claim, Row, Settings, Tell, alternate, largest
from studies.benchmarks.peers_filters import bootstrap, extended, kalman, unscented
from studies.benchmarks.peers_regression import exact, landmarks, ratio
from studies.benchmarks.peers_sides import Side

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "batches": [1, 64],
        "steps": 1000,
        "particle_steps": 50,
        "ratio": [2000, 500],
        "exact": [2000, 1000],
        "landmarks": [20_000, 200, 1000],
    }
    | {"turns": {"rounds": 5, "seconds": 0.2}},
    "smoke": {
        "batches": [2],
        "steps": 4,
        "particle_steps": 4,
        "ratio": [40, 10],
        "exact": [30, 5],
        "landmarks": [30, 5, 5],
    }
    | {"turns": {"rounds": 1, "seconds": 0.01}},
}
LIBRARIES: dict[str, Any] = {
    "Kalman filter": ("filterpy", "torch_kf", "dynamax"),
    "EKF": ("filterpy", "dynamax"),
    "UKF": ("filterpy", "dynamax"),
    "particle filter": ("filterpy",),
    "density ratio": ("densratio",),
    "ridge regression": ("gpytorch",),
    "ridge regression, landmarks": ("gpytorch",),
}
"""Who can do what."""
OURS = "kbf"
LEAST = {"filterpy": ("1 x", 1.0), "dynamax": ("64 x", 0.5)}
"""What the filters must reach: sizes, and the least time of the other over ours."""


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Time of each side of each work, and how far its numbers are from ours.

    Raises:
        ValueError: device=cuda; most of the libraries run on the CPU.
    """
    if settings["device"] != "cpu":
        raise ValueError(
            "peers compares on the CPU, where all of the libraries run; got device=cuda"
        )
    rows = []
    for (work, size), sides in works(settings).items():
        tell(f"{work}, {size}")
        rows += measured(work, size, sides, **settings["turns"])
    return rows


def works(settings: Settings) -> dict[tuple[str, str], dict[str, Side]]:
    """The sides of each task, by (task, size); ours comes first."""
    steps, sides = settings["steps"], {}
    for batch in settings["batches"]:
        size = f"{batch} x {steps} steps"
        for work, make in {"Kalman filter": kalman, "EKF": extended, "UKF": unscented}.items():
            sides[work, size] = make(batch, steps, library)
        few = min(steps, settings["particle_steps"])
        sides["particle filter", f"{batch} x {few} steps"] = bootstrap(batch, few, library)
    n, m = settings["ratio"]
    sides["density ratio", f"n = {n}, m = {m}"] = ratio(n, m, library)
    n, queries = settings["exact"]
    sides["ridge regression", f"n = {n}"] = exact(n, queries, library)
    n, m, queries = settings["landmarks"]
    sides["ridge regression, landmarks", f"n = {n}, m = {m}"] = landmarks(n, m, queries, library)
    return sides


def measured(work: str, size: str, sides: dict[str, Side], **turns: Any) -> list[Row]:
    """A row for each side, and for each library that is missing; ``turns`` as in `alternate`."""
    ours = sides[OURS].call()
    apart = {name: largest(side.call(), ours) for name, side in sides.items()}
    seconds = alternate({name: side.call for name, side in sides.items()}, **turns)
    rows = [
        {
            "work": work,
            "size": size,
            "library": name,
            "version": version(name),
            "seconds": seconds[name],
        }
        | {
            "times ours": seconds[name] / seconds[OURS],
            "largest difference": apart[name],
            "tolerance": side.tolerance,
        }
        | {"note": side.note}
        for name, side in sides.items()
    ]
    nothing = dict.fromkeys(("seconds", "times ours", "largest difference"), math.nan)
    return rows + [
        {"work": work, "size": size, "library": name, "version": "not installed"}
        | nothing
        | {"tolerance": None, "note": ""}
        for name in LIBRARIES[work]
        if library(name) is None
    ]


def library(name: str) -> Any:
    """A module of another library, or None where it is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError:
        return None


def version(name: str) -> str:
    """The name of the library that a side belongs to."""
    return metadata.version(name.split(",")[0])


def claims(rows: list[Row]) -> list[Claim]:
    """For each library: whether its numbers equal ours, and how its times compare."""
    verdicts = []
    for name in dict.fromkeys(name for names in LIBRARIES.values() for name in names):
        mine = [row for row in rows if row["library"].split(",")[0] == name]
        checked = [row for row in mine if row["tolerance"] is not None]
        target = f"the same numbers as {name}"
        if not checked:
            verdicts.append(Claim(target, "not installed", None))
            continue
        equal = all(row["largest difference"] <= row["tolerance"] for row in checked)
        words = (
            f"largest difference {max(row['largest difference'] for row in checked):.1e}, "
            f"{len(checked)} comparisons"
        )
        verdicts.append(Claim(target, words, equal))
        times = "; ".join(f"{row['work']} ({row['size']}) {row['times ours']:.2g}" for row in mine)
        verdicts.append(Claim(f"time of {name} over ours", times, None))
        if name in LEAST:
            size, least = LEAST[name]
            ratios = [row["times ours"] for row in mine if row["size"].startswith(size)]
            if ratios:
                verdicts.append(
                    Claim(
                        f"the same, filters of batch {size[:-2]}: at least {least:g}",
                        f"{min(ratios):.2g}",
                        min(ratios) >= least,
                    )
                )
    return verdicts


def draw(rows: list[Row]) -> Figure:
    """Times of the others over ours."""
    return curves(
        [row for row in rows if row["library"] != OURS],
        x="library",
        y="times ours",
        by="size",
        panel="work",
        log="y",
        xlabel=" ",
        ylabel="time / time of kbf",
        level=(1.0, "kbf"),
        title="The same work by other libraries",
        share_y=True,
        across=3,
    )
