"""Settings of a run that several commands read: time budget, trainer limits, equations."""

from collections.abc import Mapping
from typing import Any

# Units of time that a budget may end with.
SECONDS_PER_UNIT = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(budget: str | int | float | None) -> float | None:
    """Convert a time budget to seconds: 90s, 10m, 1.5h, a number of seconds, or None for none.

    Raises:
        ValueError: the text is no time, or the time is not positive and finite.

    >>> seconds_of("10m"), seconds_of("90s"), seconds_of(30), seconds_of(None)
    (600.0, 90.0, 30.0, None)
    """
    if budget is None:
        return None
    text = str(budget).strip()
    number, unit = (text[:-1], text[-1]) if text[-1:] in SECONDS_PER_UNIT else (text, "s")
    try:
        seconds = float(number) * SECONDS_PER_UNIT[unit]
    except ValueError:
        seconds = 0.0
    if isinstance(budget, bool) or not 0 < seconds < float("inf"):
        raise ValueError(
            f"budget must be a time, as 90s, 10m or 1h, or null for none; got {budget!r}"
        )
    return seconds


def without_model_selection(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model without its model selection.

    Model selection cross-validates; runs that use no held-out parts switch it off.
    """
    return {key: value for key, value in model.items() if key != "model_selection"}


def with_selection(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of a run whose model selection follows ``calibrate`` and ``budget``.

    Without ``calibrate`` there is none; ``budget`` is the time that it may take.

    Raises:
        ValueError: the budget is no time.
    """
    budget, model = seconds_of(config["budget"]), config["model"]
    if not config["calibrate"]:
        model = without_model_selection(model)
    if budget is not None and model.get("model_selection"):
        model = {**model, "budget": budget}
    return {**config, "model": model}


def with_limits(trainer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a trainer with the epochs and the gradient clipping of a model.

    Raises:
        ValueError: a limit is not a number, as a checkpoint from an untrusted source may have it.
    """
    training = model.get("training") or {}
    limits = {"max_epochs": training.get("epochs", 1), "gradient_clip_val": training.get("clip")}
    if wrong := [value for value in limits.values() if not isinstance(value, int | float | None)]:
        raise ValueError(f"model.training: epochs and clip must be numbers, got {wrong[0]!r}")
    return {**trainer, **limits}


def lacks_equations(model: dict[str, Any], data: dict[str, Any]) -> bool:
    """Return whether a filter requires the true equations, on data that has none."""
    net = model.get("net")
    refers = isinstance(net, dict) and "${data.problem}" in net.values()
    return refers and data.get("problem", "") is None


def check_equations(model: dict[str, Any], data: dict[str, Any]) -> None:
    """Raise a ValueError for a filter with the true equations, on data that has none."""
    if lacks_equations(model, data):
        raise ValueError(
            f"model {model['name']} requires the equations of the system, and data={data['name']} "
            "has none: kalman, ukf_learned and particle_learned learn them from the recordings"
        )
