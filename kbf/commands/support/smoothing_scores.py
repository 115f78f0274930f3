"""Scores of smoothed and predicted estimates, for ``kbf evaluate``."""

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kbf.commands.support.console import console
from kbf.commands.support.run_files import labels
from kbf.commands.support.score_metrics import recalibrated, reliability_metrics, reliability_of
from kbf.data.dataset import Data
from kbf.evaluation.floors import floor_ahead, smoothing_floor
from kbf.evaluation.score import check_horizon, score_ahead, score_smoothed
from kbf.filters.smoothing import check_smoother
from kbf.fitted.checkpoint import Trained
from kbf.fitted.held_out_calibration import learn_smoothed
from kbf.plots.charts import curves
from kbf.plots.tracks import save, track_figure


class Scores(NamedTuple):
    """Results of smoothing and prediction; `score_smoothing` and `score_prediction` add to them.

    Attributes:
        metrics: flat keys for ``metrics.json``.
        arrays: for ``predictions.npz``.
        figures: names of the files that were drawn in the run directory.
    """

    metrics: dict[str, float | None]
    arrays: dict[str, Tensor]
    figures: list[str]


def check_requested(config: dict[str, Any], loaded: Trained, data: Data) -> None:
    """Check, before any work, that `score_requested` can do what is requested.

    Raises:
        ValueError: a filter without a smoother, a negative lag, or a horizon longer than the test
            part.
    """
    if smoothing_requested(config):
        check_smoother(loaded.filter, config["lag"])
    if config["horizon"]:
        check_horizon(data.test, config["horizon"])


def smoothing_requested(config: dict[str, Any]) -> bool:
    """Return whether ``smooth`` or ``lag`` request smoothed estimates."""
    return config["smooth"] or config["lag"] is not None


def score_requested(config: dict[str, Any], loaded: Trained, data: Data, title: str) -> Scores:
    """Return the scores that ``smooth``, ``lag`` and ``horizon`` request; draw their figures."""
    scores, seed = Scores({}, {}, []), config["seed"]
    settings = {"seed": seed, "dtype": loaded.module.input_dtype, "device": config["device"]}
    if smoothing_requested(config):
        score_smoothing(config, loaded, data, title, scores, settings)
    if config["horizon"]:
        score_prediction(config, loaded, data, title, scores, settings)
    return scores


def score_smoothing(
    config: dict[str, Any],
    loaded: Trained,
    data: Data,
    title: str,
    scores: Scores,
    settings: dict[str, Any],
) -> None:
    """Smooth the test part, and add error, floor, estimates and a figure to ``scores``.

    If the filter's covariances are recalibrated, the smoother's are recalibrated as well, on
    held-out parts of the training data.
    """
    lag, calibration = config["lag"], None
    result = score_smoothed(loaded.filter, data.test, lag=lag, **settings)
    if result.covariances is not None and loaded.calibration is not None:
        with console.status(
            "recalibrating the smoother's covariances on held-out parts of the training data"
        ):
            calibration = learn_smoothed(loaded, lag=lag, seed=config["seed"])
    reliable = reliability_metrics(reliability_of(result, data.test, calibration))
    scores.metrics.update(
        {
            f"{name}_smoothed": value
            for name, value in reliable.items()
            if name.startswith("test.coverage_")
        }
    )
    result = recalibrated(result, calibration)
    floor = smoothing_floor(data, lag=lag, particles=config["particles"], seed=config["seed"])
    error = result.mse.mean().item()
    scores.metrics["test.mse_smoothed"] = error
    scores.metrics["test.smoothing_floor"] = None if floor is None else floor.mse.mean().item()
    covariances = result.covariances or []
    for key, series in (("smoothed", result.estimates), ("smoothed_covariances", covariances)):
        scores.arrays.update({f"{key}_{k}": values for k, values in enumerate(series)})
    given = "all observations" if lag is None else f"{lag} later observations"
    figure = track_figure(
        data.test[0],
        result.estimates[0],
        covariances[0] if covariances else None,
        title=f"{title}: error with {given} {error:.4f}",
        names=labels(config, data),
        time_step=data.time_step,
        radius2=None if calibration is None else calibration.radius2(0.95),
    )
    save(figure, Path(config["run_dir"]) / "smoothed.png")
    scores.figures.append("smoothed.png")


def score_prediction(
    config: dict[str, Any],
    loaded: Trained,
    data: Data,
    title: str,
    scores: Scores,
    settings: dict[str, Any],
) -> None:
    """Predict each test state 1 to ``horizon`` steps ahead, and add the results to ``scores``.

    Errors, Bayes-optimal errors, estimates and a figure are added.
    """
    result = score_ahead(loaded.filter, data.test, config["horizon"], **settings)
    floor = floor_ahead(data, config["horizon"], particles=config["particles"], seed=config["seed"])
    rows = []
    for key, name, each in (("mse", "filter", result), ("floor", "floor (true model)", floor)):
        if each is not None:
            errors = dict(enumerate(each.mse.mean(0).tolist(), 1))
            rows += [{"steps": k, "error": error, "of": name} for k, error in errors.items()]
            scores.metrics.update({f"test.{key}_ahead_{k}": error for k, error in errors.items()})
    scores.arrays.update({f"ahead_{k}": estimates for k, estimates in enumerate(result.estimates)})
    labels: Any = {"xlabel": "steps ahead", "ylabel": "mean squared error", "title": title}
    save(
        curves(rows, x="steps", y="error", by="of", **labels), Path(config["run_dir"]) / "ahead.png"
    )
    scores.figures.append("ahead.png")
