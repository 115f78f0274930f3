"""``kbf floor``: the Bayes-optimal error of a data set, the least that any filter can reach."""

from typing import Any

from kbf.commands.support.console import console, print_values
from kbf.data.dataset import load_data
from kbf.evaluation.floors import data_floor, smoothing_floor
from kbf.evaluation.metrics import mean_and_error
from kbf.runtime.interpolation import resolved


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Compute the floor of each seed; prints and returns their mean and its standard error.

    Raises:
        ValueError: the true model of the data is not known or, for a smoother, has no transition
            density.
    """
    smooth, name, values = config["smooth"], config["data"].get("name"), []
    for seed in range(config["seed"], config["seed"] + config["runs"]):
        settings = {"particles": config["particles"], "seed": seed}
        with console.status(f"seed {seed}"):
            data = load_data(resolved(config["recipe"], seed=seed)["data"], trust=True)
            if smooth:
                least = smoothing_floor(data, lag=config["lag"], **settings)
            else:
                least = data_floor(data, **settings)
        if least is None:
            unknown = "transition density" if smooth and data.problem is not None else "true model"
            raise ValueError(f"the {unknown} of {name} is not known, so there is no floor")
        values.append(least.mse.mean().item())
    mean, se = mean_and_error(values)
    summary = {
        "floor": mean,
        "standard error": se,
        "runs": len(values),
        "n_train": config["n_train"],
        "particles": config["particles"],
    }
    print_values(f"{'smoothing floor' if smooth else 'floor'} of {name}", summary)
    return summary
