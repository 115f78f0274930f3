"""Numbers for loggers: the settings of a run that tell it from others, and what came out: a sweep can be sorted and plotted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

LEARNING = ("epochs", "lr", "lr_encoder", "weight_decay", "batch_size", "window")
"""Those settings of ``model.training`` that are columns of a sweep."""
SHAPES = ("d", "q", "controls")
"""Arguments of a model that the data sets."""
RESULTS = (
    "test/mse",
    "test/floor",
    "test/excess",
    "test/coverage_95",
    "validation/best_mse",
    "train/epochs",
    "seconds/fit",
)
"""Results that are columns of a sweep; the others are curves of one point."""


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """About ten settings of a run: what it is of, and the numbers and words that its model's file or the command line sets.

    >>> model = {"name": "lstm", "net": {"_target_": "x", "d": 2, "hidden": 8}, "training": {"lr": 0.1, "clip": 1.0}}
    >>> settings({"model": model, "data": {"name": "rotation"}, "n_train": 300, "seed": 0})
    {'model.name': 'lstm', 'data.name': 'rotation', 'n_train': 300, 'seed': 0, 'model.net.hidden':
    8, 'model.training.lr': 0.1}
    """
    model = config["model"]
    columns = {"model.name": model["name"], "data.name": (config.get("data") or {}).get("name")}
    columns |= {key: config.get(key) for key in ("n_train", "seed")}
    columns |= {
        f"model.net.{key}": value
        for key, value in model["net"].items()
        if key != "_target_" and key not in SHAPES
    }
    columns |= {f"model.training.{key}": (model.get("training") or {}).get(key) for key in LEARNING}
    return {key: value for key, value in columns.items() if isinstance(value, str | int | float)}


def results(metrics: Mapping[str, Any], *, learned: bool) -> dict[str, float]:
    """The finite numbers of ``metrics.json`` by tags with a group in front: ``test.mse`` as ``test/mse``.

    Args:
        metrics: flat keys.
        learned: the model has learned by gradient: its hyper-parameters are curves already.

    >>> results({"model": "ekf", "n_train": 300, "test.mse": 0.1, "test.floor": None, "seconds": 2.0}, learned=False)
    {'test/mse': 0.1, 'seconds/total': 2.0}
    """
    renamed = {
        "seconds": "seconds.total",
        "epochs": "train.epochs",
        "validation.mse": "validation.best_mse",
    }
    numbers = {
        renamed.get(key, key): value
        for key, value in metrics.items()
        if isinstance(value, int | float)
    }
    grouped = {
        key.replace(".", "/"): float(value)
        for key, value in numbers.items()
        if "." in key and math.isfinite(value)
    }
    return {
        key: value
        for key, value in grouped.items()
        if not (learned and key.startswith("hyperparameters/"))
    }


def log_results(
    loggers: list[Any], config: Mapping[str, Any], metrics: Mapping[str, Any], step: int
) -> None:
    """Tell each logger the settings and the results of a run, at the optimizer's last step.

    TensorBoard gets both together, for its page HParams; others, which have been told the whole
    configuration before, the numbers.
    """
    numbers = results(metrics, learned=step > 0)
    columns = {key: value for key, value in numbers.items() if key in RESULTS}
    for logger in loggers:
        if hasattr(getattr(logger, "experiment", None), "add_hparams"):
            logger.log_hyperparams(settings(config), columns, step)
            logger.log_metrics(
                {key: value for key, value in numbers.items() if key not in columns}, step
            )
        else:
            logger.log_metrics(numbers, step)
        logger.save()
