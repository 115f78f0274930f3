"""Hyper-parameters and final metrics of a run, for loggers.

They are the columns by which a sweep can be sorted and plotted.
"""

import math
from collections.abc import Mapping
from typing import Any

# Settings of ``model.training`` that are columns of a sweep.
LOGGED_TRAINING_SETTINGS = ("epochs", "lr", "lr_encoder", "weight_decay", "batch_size", "window")
# Arguments of a model that follow from the data: no hyper-parameters.
SHAPES = ("d", "q", "controls")
# Results that are columns of a sweep; the others are logged as curves of one point.
LOGGED_RESULTS = (
    "test/mse",
    "test/floor",
    "test/excess",
    "test/coverage_95",
    "validation/best_mse",
    "train/epochs",
    "seconds/fit",
)
# Keys of ``metrics.json`` that get a group, or would have the name of a curve.
RENAMED = {
    "seconds": "seconds.total",
    "epochs": "train.epochs",
    "validation.mse": "validation.best_mse",
}


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return about ten settings of a run: names, sizes, and numbers of the model's configuration.

    >>> net = {"_target_": "x", "d": 2, "hidden": 8}
    >>> model = {"name": "lstm", "net": net, "training": {"lr": 0.1, "clip": 1.0}}
    >>> run = {"model": model, "data": {"name": "rotation"}, "n_train": 300, "seed": 0}
    >>> list(settings(run))
    ['model.name', 'data.name', 'n_train', 'seed', 'model.net.hidden', 'model.training.lr']
    """
    model = config["model"]
    training = model.get("training") or {}
    net = {key: v for key, v in model["net"].items() if key != "_target_" and key not in SHAPES}
    columns = {
        "model.name": model["name"],
        "data.name": (config.get("data") or {}).get("name"),
        "n_train": config.get("n_train"),
        "seed": config.get("seed"),
        **{f"model.net.{key}": value for key, value in net.items()},
        **{f"model.training.{key}": training.get(key) for key in LOGGED_TRAINING_SETTINGS},
    }
    return {key: value for key, value in columns.items() if isinstance(value, str | int | float)}


def results(metrics: Mapping[str, Any], *, learned: bool) -> dict[str, float]:
    """Return the finite numbers of ``metrics.json``, tagged by group: ``test.mse`` as ``test/mse``.

    Args:
        metrics: flat keys.
        learned: the model is trained by gradient: its hyper-parameters are logged as curves.

    >>> metrics = {"model": "ekf", "n_train": 300, "test.mse": 0.1, "test.floor": None}
    >>> results(metrics | {"seconds": 2.0}, learned=False)
    {'test/mse': 0.1, 'seconds/total': 2.0}
    """
    named = {RENAMED.get(key, key): value for key, value in metrics.items()}
    return {
        key.replace(".", "/"): float(value)
        for key, value in named.items()
        if "." in key
        and isinstance(value, int | float)
        and math.isfinite(value)
        and not (learned and key.startswith("hyperparameters."))
    }


def log_results(
    loggers: list[Any], config: Mapping[str, Any], metrics: Mapping[str, Any], step: int
) -> None:
    """Log the settings and the results of a run, at the last step of the optimiser.

    TensorBoard takes both together, for its page HParams. Other loggers have the configuration
    already, and take the numbers.
    """
    numbers = results(metrics, learned=step > 0)
    columns = {key: value for key, value in numbers.items() if key in LOGGED_RESULTS}
    for logger in loggers:
        if hasattr(getattr(logger, "experiment", None), "add_hparams"):
            logger.log_hyperparams(settings(config), columns, step)
            others = {key: value for key, value in numbers.items() if key not in columns}
            logger.log_metrics(others, step)
        else:
            logger.log_metrics(numbers, step)
        logger.save()
