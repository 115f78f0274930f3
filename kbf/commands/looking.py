"""Before and behind the filter, for ``kbf evaluate``: smoothed estimates, and predictions some steps ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from kbf.charts import curves
from kbf.checkpoint import Trained
from kbf.commands.common import console, recalibrated, reliability_metrics, reliability_of
from kbf.data.source import Data
from kbf.evaluation import check_horizon, floor_ahead, score_ahead, score_smoothed, smoothing_floor
from kbf.held_out import learn_smoothed
from kbf.plots import save, track_figure
from kbf.smoothing import check_smoother


class Looked(NamedTuple):
    """Flat keys for ``metrics.json``, arrays for ``predictions.npz``, and names of pictures."""

    metrics: dict[str, float | None]
    arrays: dict[str, Tensor]
    names: list[str]


def check_asked(config: dict[str, Any], loaded: Trained, data: Data) -> None:
    """Refuse, before any work, what `look` could not do.

    Raises:
        ValueError: a filter without a smoother, a negative lag, or a horizon longer than the test part.
    """
    if backwards(config):
        check_smoother(loaded.filter, config["lag"])
    if config["horizon"]:
        check_horizon(data.test, config["horizon"])


def backwards(config: dict[str, Any]) -> bool:
    """Whether smoothed estimates are asked for."""
    return config["smooth"] or config["lag"] is not None


def look(config: dict[str, Any], loaded: Trained, data: Data, title: str) -> Looked:
    """What ``smooth``, ``lag`` and ``horizon`` ask for; each leaves a picture in the run directory."""
    looked = Looked({}, {}, [])
    if backwards(config):
        back(config, loaded, data, title, looked)
    if config["horizon"]:
        ahead(config, loaded, data, title, looked)
    return looked


def settings(config: dict[str, Any], loaded: Trained) -> dict[str, Any]:
    """Those of every score."""
    return {"seed": config["seed"], "dtype": loaded.module.input_dtype, "device": config["device"]}


def back(config: dict[str, Any], loaded: Trained, data: Data, title: str, looked: Looked) -> None:
    """Smooth the test part. Covariances are recalibrated if the filter's are, by what the smoother says of the training's folds."""
    result, calibration = score_smoothed(loaded.filter, data.test, lag=config["lag"], **settings(config, loaded)), None
    if result.covariances is not None and loaded.calibration is not None:
        with console.status("learning from held-out parts of the training data how sure the smoother may be"):
            calibration = learn_smoothed(loaded, lag=config["lag"], seed=config["seed"])
    reliable = reliability_metrics(reliability_of(result, data.test, calibration))
    looked.metrics.update({f"{name}_smoothed": value for name, value in reliable.items() if name.startswith("test.coverage_")})
    result = recalibrated(result, calibration)
    least = smoothing_floor(data, lag=config["lag"], particles=config["particles"], seed=config["seed"])
    error = result.mse.mean().item()
    looked.metrics["test.mse_smoothed"] = error
    looked.metrics["test.smoothing_floor"] = None if least is None else least.mse.mean().item()
    for k, found in enumerate(result.estimates):
        looked.arrays[f"smoothed_{k}"] = found
        if result.covariances is not None:
            looked.arrays[f"smoothed_covariances_{k}"] = result.covariances[k]
    known = "all observations" if config["lag"] is None else f"{config['lag']} later observations"
    spread = None if result.covariances is None else result.covariances[0]
    radius2 = None if calibration is None else calibration.radius2(0.95)
    told = f"{title}: error with {known} {error:.4f}"
    figure = track_figure(data.test[0], result.estimates[0], spread, title=told, radius2=radius2)
    save(figure, Path(config["run_dir"]) / "smoothed.png")
    looked.names.append("smoothed.png")


def ahead(config: dict[str, Any], loaded: Trained, data: Data, title: str, looked: Looked) -> None:
    """Predict the test part from 1 to ``horizon`` steps before."""
    result = score_ahead(loaded.filter, data.test, config["horizon"], **settings(config, loaded))
    least = floor_ahead(data, config["horizon"], particles=config["particles"], seed=config["seed"])
    sides = {"filter": result} | ({} if least is None else {"floor (true model)": least})
    rows = [
        {"steps": k, "error": error, "of": name}
        for name, each in sides.items()
        for k, error in enumerate(each.mse.mean(0).tolist(), 1)
    ]
    for row in rows:
        looked.metrics[f"test.{'mse' if row['of'] == 'filter' else 'floor'}_ahead_{row['steps']}"] = row["error"]
    looked.arrays.update({f"ahead_{k}": found for k, found in enumerate(result.estimates)})
    figure = curves(rows, x="steps", y="error", by="of", xlabel="steps ahead", ylabel="mean squared error", title=title)
    save(figure, Path(config["run_dir"]) / "ahead.png")
    looked.names.append("ahead.png")
