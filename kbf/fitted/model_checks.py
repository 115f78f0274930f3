"""Whether a model suits the recordings that it is to be fitted to."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from kbf.filters.held import check_held
from kbf.recording import Recording


def check_observations(model: dict[str, Any], recordings: list[Recording]) -> None:
    """Raise a ValueError for numbers where a model has an encoder of images inside its net."""
    if not recordings or recordings[0].obs.ndim != 2 or "encoder" not in model["net"]:
        return
    encoder = model["net"]["encoder"]
    inner = encoder.get("encoder", encoder) if isinstance(encoder, dict) else encoder
    if inner is None:
        raise ValueError(
            f"model={model['name']} learns from images, and an observation here has "
            f"{recordings[0].obs.shape[1]} numbers: kbf, kalman, gru and lstm take numbers"
        )


def check_sensors(model: dict[str, Any], net: nn.Module, recordings: list[Recording]) -> None:
    """Raise a ValueError for partly missing observations of a model that requires all sensors."""
    if hasattr(net, "allow_missing_sensors") or not recordings or recordings[0].obs.ndim != 2:
        return
    partly = 0
    for each in recordings:
        missing = each.obs.isnan()
        seen = ~missing.all(1) if each.mask is None else each.mask
        partly += int((missing.any(1) & seen).sum())
    if partly:
        raise ValueError(
            f"model={model.get('name')} requires all sensors, and {partly} steps lack some: kbf, "
            "kernel_monte_carlo, particle_learned, ukf_learned, kalman and window_ridge are among "
            "those that use the others, and "
            "allow_missing_sensors=False counts such steps as unobserved"
        )


def check_repeats(name: str | None, data: Mapping[str, Any]) -> None:
    """Raise a ValueError for ``data.held=true`` of a model that is fitted without selection."""
    if check_held(data.get("held", "auto")) is True:
        raise ValueError(
            "data.held=true takes repeats of readings as missing, which is a part of model "
            f"selection, and model={name} is fitted without it: leave out data.held. For model "
            "selection: use model=kbf with calibrate=true and model.model_selection=true"
        )
