"""Scores of ``kbf evaluate`` besides filtering: smoothed estimates, and predictions some steps ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kbf.commands.support.console import console, recalibrated, reliability_metrics, reliability_of
from kbf.data.dataset import Data
from kbf.evaluation.floors import floor_ahead, smoothing_floor
from kbf.evaluation.score import check_horizon, score_ahead, score_smoothed
from kbf.filters.smoothing import check_smoother
from kbf.plots.charts import curves
from kbf.plots.tracks import save, track_figure
from kbf.training.checkpoint import Trained
from kbf.training.held_out_calibration import learn_smoothed


class Scores(NamedTuple):
    """Results of smoothing and prediction.

    Attributes:
        metrics: flat keys for ``metrics.json``.
        arrays: for ``predictions.npz``.
        pictures: names of the files that were drawn in the run directory.
    """

    metrics: dict[str, float | None]
    arrays: dict[str, Tensor]
    pictures: list[str]


def check_requested(config: dict[str, Any], loaded: Trained, data: Data) -> None:
    """Refuse, before any work, what `score_requested` could not do.

    Raises:
        ValueError: a filter without a smoother, a negative lag, or a horizon longer than the test
            part.
    """
    if smoothing_requested(config):
        check_smoother(loaded.filter, config["lag"])
    if config["horizon"]:
        check_horizon(data.test, config["horizon"])


def smoothing_requested(config: dict[str, Any]) -> bool:
    """Whether ``smooth`` or ``lag`` ask for smoothed estimates."""
    return config["smooth"] or config["lag"] is not None


def score_requested(config: dict[str, Any], loaded: Trained, data: Data, title: str) -> Scores:
    """The scores that ``smooth``, ``lag`` and ``horizon`` ask for; each also draws a picture in the run directory."""
    scores = Scores({}, {}, [])
    if smoothing_requested(config):
        score_smoothing(config, loaded, data, title, scores)
    if config["horizon"]:
        score_prediction(config, loaded, data, title, scores)
    return scores


def settings(config: dict[str, Any], loaded: Trained) -> dict[str, Any]:
    """The keyword arguments that every score takes."""
    return {"seed": config["seed"], "dtype": loaded.module.input_dtype, "device": config["device"]}


def score_smoothing(
    config: dict[str, Any], loaded: Trained, data: Data, title: str, scores: Scores
) -> None:
    """Smooth the test part, and add error, floor, estimates and a picture to ``scores``.

    If the filter's covariances are recalibrated, the smoother's are too, by what held-out parts of
    the training data say.
    """
    result, calibration = (
        score_smoothed(loaded.filter, data.test, lag=config["lag"], **settings(config, loaded)),
        None,
    )
    if result.covariances is not None and loaded.calibration is not None:
        with console.status(
            "recalibrating the smoother's covariances on held-out parts of the training data"
        ):
            calibration = learn_smoothed(loaded, lag=config["lag"], seed=config["seed"])
    reliable = reliability_metrics(reliability_of(result, data.test, calibration))
    scores.metrics.update(
        {
            f"{name}_smoothed": value
            for name, value in reliable.items()
            if name.startswith("test.coverage_")
        }
    )
    result = recalibrated(result, calibration)
    floor = smoothing_floor(
        data, lag=config["lag"], particles=config["particles"], seed=config["seed"]
    )
    error = result.mse.mean().item()
    scores.metrics["test.mse_smoothed"] = error
    scores.metrics["test.smoothing_floor"] = None if floor is None else floor.mse.mean().item()
    for k, estimates in enumerate(result.estimates):
        scores.arrays[f"smoothed_{k}"] = estimates
        if result.covariances is not None:
            scores.arrays[f"smoothed_covariances_{k}"] = result.covariances[k]
    given = "all observations" if config["lag"] is None else f"{config['lag']} later observations"
    covariances = None if result.covariances is None else result.covariances[0]
    radius2 = None if calibration is None else calibration.radius2(0.95)
    title = f"{title}: error with {given} {error:.4f}"
    figure = track_figure(
        data.test[0], result.estimates[0], covariances, title=title, radius2=radius2
    )
    save(figure, Path(config["run_dir"]) / "smoothed.png")
    scores.pictures.append("smoothed.png")


def score_prediction(
    config: dict[str, Any], loaded: Trained, data: Data, title: str, scores: Scores
) -> None:
    """Predict each state of the test part 1 to ``horizon`` steps before, and add errors, estimates and a picture to ``scores``."""
    result = score_ahead(loaded.filter, data.test, config["horizon"], **settings(config, loaded))
    floor = floor_ahead(data, config["horizon"], particles=config["particles"], seed=config["seed"])
    sides = {"filter": result} | ({} if floor is None else {"floor (true model)": floor})
    rows = [
        {"steps": k, "error": error, "of": name}
        for name, score in sides.items()
        for k, error in enumerate(score.mse.mean(0).tolist(), 1)
    ]
    for row in rows:
        scores.metrics[
            f"test.{'mse' if row['of'] == 'filter' else 'floor'}_ahead_{row['steps']}"
        ] = row["error"]
    scores.arrays.update({f"ahead_{k}": estimates for k, estimates in enumerate(result.estimates)})
    figure = curves(
        rows,
        x="steps",
        y="error",
        by="of",
        xlabel="steps ahead",
        ylabel="mean squared error",
        title=title,
    )
    save(figure, Path(config["run_dir"]) / "ahead.png")
    scores.pictures.append("ahead.png")
