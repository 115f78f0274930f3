"""Errors of filters and of their smoothers, next to the least errors that are possible.

Both floors know the true model, and are of the same test part: 20,000 particles forwards, and 500
of them backwards. Bandwidths, ridges, maps and encoders come from the training part; smoothers use
the observations of the test part alone.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from kbf.data.dataset import Data
from kbf.data.dmlab import OrientationImages
from kbf.data.dsprites import DSprites
from kbf.data.synthetic import SyntheticData
from kbf.evaluation.floors import data_floor, smoothing_floor
from kbf.evaluation.metrics import mean_and_error
from kbf.evaluation.score import score, score_smoothed
from kbf.filters.gaussian.ekf import EKF
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.gaussian.ukf import UKF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.protocols import Filter
from kbf.plots.charts import Figure, curves
from kbf.ssm import oscillatory, rotation
from kbf.training.fit import train
from studies.benchmarks.base import Claim, Row, Settings, Tell
from studies.papers.images import Problem, configured

SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "n": 300,
        "n_test": 200,
        "runs": {"rotation": 10, "oscillatory": 10, "dsprites": 3, "dmlab": 3},
        "particles": 20_000,
        "points": 1000,
        "seed": 0,
    },
    "smoke": {
        "n": 40,
        "n_test": 12,
        "runs": {"rotation": 2},
        "particles": 200,
        "points": 60,
        "seed": 0,
    },
}
KBF = "kbf"
VECTORS: dict[str, Any] = {"rotation": rotation, "oscillatory": oscillatory}
IMAGES: dict[str, Any] = {"dsprites": DSprites, "dmlab": OrientationImages}
MODELS = (KBF, "particle_learned", "kalman", "particle_observation")
"""Models of image encodings, and one with the true transition.

The latter shows the share of the error that is due to the encodings.
"""


@torch.no_grad()
def run(settings: Settings, tell: Tell) -> list[Row]:
    """Mean errors over the runs of each data set, by model."""
    rows = []
    for name, runs in settings["runs"].items():
        errors: dict[str, list[tuple[float, float]]] = {}
        floors = []
        for seed in range(settings["seed"], settings["seed"] + runs):
            tell(f"{name}, run {seed}: floors")
            data = data_of(name, settings, seed)
            pair = [
                f(data, particles=settings["particles"], seed=seed)
                for f in (data_floor, smoothing_floor)
            ]
            floors.append([floor.mse.mean().item() for floor in pair if floor is not None])
            for model, filter, dtype in filters(name, data, settings, seed, tell):
                sides = (
                    f(filter, data.test, seed=seed, dtype=dtype) for f in (score, score_smoothed)
                )
                filtered, smoothed = (side.mse.mean().item() for side in sides)
                errors.setdefault(model, []).append((filtered, smoothed))
        of_filter, of_smoother = (mean_and_error(side)[0] for side in zip(*floors, strict=True))
        for model, both in errors.items():
            (filtered, _), (smoothed, se) = (
                mean_and_error(side) for side in zip(*both, strict=True)
            )
            rows.append(
                {
                    "data": name,
                    "model": model,
                    "runs": runs,
                    "filter": filtered,
                    "filtering floor": of_filter,
                    "smoother": smoothed,
                    "s.e.": se,
                    "smoothing floor": of_smoother,
                    "share of the gap": (of_filter - smoothed) / (of_filter - of_smoother),
                }
            )
    return rows


def data_of(name: str, settings: Settings, seed: int) -> Data:
    """A data set; for images the problem sees what they show."""
    n, n_test = settings["n"], settings["n_test"]
    source: Any = (
        SyntheticData(VECTORS[name](), n, n_test, seed)
        if name in VECTORS
        else IMAGES[name](n, n_test, seed)
    )
    return Data(source.train, source.test, source.problem, getattr(source, "decoded", source.test))


def filters(
    name: str, data: Data, settings: Settings, seed: int, tell: Tell
) -> Iterator[tuple[str, Filter[Any], torch.dtype]]:
    """Filters by model, each with the type of its observations; of images all share their encoders.

    EKF and UKF know the truth.
    """
    if name in VECTORS:
        problem: Any = data.problem
        models = {
            KBF: SimulatedKBF(settings["points"]),
            "particle_learned": LearnedParticleFilter(),
            "kalman": LearnedKalman(),
        }
        for model, net in {**models, "ekf": EKF(problem), "ukf": UKF(problem)}.items():
            tell(f"{name}, run {seed}: {model}")
            yield model, net.fit(data.train), torch.float64
        return
    with tempfile.TemporaryDirectory() as directory:
        for model in MODELS:
            tell(f"{name}, run {seed}: {model}")
            config = {**configured(Problem(name), model), "seed": seed}
            with torch.enable_grad():
                trained = train(
                    config, data.train, Path(directory), encodings=Path(directory) / "codes.pt"
                )
            assert trained is not None
            yield model, trained.filter, trained.module.input_dtype


def claims(rows: list[Row]) -> list[Claim]:
    """Half of the gap between the floors, on each data set."""
    verdicts, knowing = (
        [],
        {row["data"]: row["smoother"] for row in rows if row["model"] == "particle_observation"},
    )
    for row in rows:
        if row["model"] == KBF:
            half = (row["filtering floor"] + row["smoothing floor"]) / 2
            target = (
                f"{row['data']}: kbf's smoother closes half of the gap between the floors (error "
                f"at most {half:.4f})"
            )
            measured = f"{row['smoother']:.4f} ({100 * row['share of the gap']:.0f} % of the gap)"
            if row["data"] in knowing:
                measured += f"; with the true moves and the same codes {knowing[row['data']]:.4f}"
            verdicts.append(Claim(target, measured, row["smoother"] <= half))
    return verdicts


def draw(rows: list[Row]) -> Figure:
    """Errors over the filtering floor."""
    sides = ("filter", "smoother", "smoothing floor")
    shown = [
        {**row, "of": side, "error": row[side] / row["filtering floor"]}
        for row in rows
        for side in sides
    ]
    level = (1.0, "filtering floor")
    return curves(
        shown,
        x="data",
        y="error",
        by="of",
        panel="model",
        ylabel="error / filtering floor",
        level=level,
        share_y=True,
    )
