"""``kbf floor``: the least error that any filter can reach on a data set."""

from __future__ import annotations

from typing import Any

from kbf.commands.support.console import console, resolved, show, start
from kbf.data.dataset import load_data
from kbf.evaluation.floors import data_floor, smoothing_floor
from kbf.evaluation.statistics import mean_and_error


def run(config: dict[str, Any]) -> dict[str, Any]:
    """The floor of each seed, their mean and its standard error.

    Raises:
        ValueError: data without a known true model, or for a smoother one without a density of its
            moves.
    """
    start(config["threads"])
    values = []
    for seed in range(config["seed"], config["seed"] + config["runs"]):
        with console.status(f"seed {seed}"):
            data = load_data(resolved(config["recipe"], seed=seed)["data"], trust=True)
            if config["smooth"]:
                least = smoothing_floor(
                    data, lag=config["lag"], particles=config["particles"], seed=seed
                )
            else:
                least = data_floor(data, particles=config["particles"], seed=seed)
        if least is None:
            known = (
                "no density of the true moves"
                if config["smooth"] and data.problem is not None
                else "no true model"
            )
            raise ValueError(
                f"{known} of {config['data'].get('name')} is known, so there is no floor"
            )
        values.append(least.mse.mean().item())
    mean, se = mean_and_error(values)
    summary = {
        "floor": mean,
        "standard error": se,
        "runs": len(values),
        "n_train": config["n_train"],
        "particles": config["particles"],
    }
    show(
        f"{'smoothing floor' if config['smooth'] else 'floor'} of {config['data']['name']}", summary
    )
    return summary
