"""Methods that are compared on the systems: what `kbf.fit` fits by name."""

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import kbf
from kbf.recording import Recording

# Settings of `kbf.fit` by the name of a method. ``kbf`` is the default, which selects among models.
METHODS: dict[str, dict[str, Any]] = {
    "kbf": {},
    **{
        name: {"model": name}
        for name in (
            "mean",
            "window_ridge",
            "kalman",
            "kalman_velocity",
            "kernel_monte_carlo",
            "particle_learned",
            "ukf_learned",
        )
    },
    # Slow to fit; they keep their own covariances instead of calibrated ones.
    "window_boosting": {"model": "window_boosting", "calibrate": False},
    "gru": {"model": "gru_ensemble", "calibrate": False},
}
# Methods that any user has without this library.
BASELINES = ("mean", "window_ridge", "kalman", "kalman_velocity", "window_boosting", "gru")


class Result(NamedTuple):
    """Results of a method.

    Attributes:
        estimates: ``n d``, the rows of all recordings.
        coverage: share of the states in regions of 95 %; None for a method without covariances.
        seconds: of the fit.
        model: that was selected.
    """

    estimates: Tensor
    coverage: float | None
    seconds: float
    model: str


def run_method(
    name: str, train: list[Recording], test: list[Recording], budget: str | None = None
) -> Result:
    """Fit a method to the training recordings and filter the test recordings.

    Raises:
        kbf.FitError: the recordings do not determine a fit.
    """
    began = time.perf_counter()
    states = [each.states.numpy() for each in train]
    settings = {**METHODS[name], "budget": budget, "progress": False}
    fitted = kbf.fit(states=states, **inputs_of(train), **settings)
    seconds = time.perf_counter() - began
    estimates = fitted.filter(**inputs_of(test))
    covered = None
    if estimates.std is not None:
        covered = float(estimates.contains(np.concatenate([s.states.numpy() for s in test])).mean())
    return Result(torch.from_numpy(estimates.mean), covered, seconds, fitted.model_name)


def inputs_of(recordings: list[Recording]) -> dict[str, Any]:
    """Return observations and controls as arguments of `kbf.fit` and `FittedFilter.filter`."""
    given: dict[str, Any] = {"observations": [each.obs.numpy() for each in recordings]}
    controls = [each.controls.numpy() for each in recordings if each.controls is not None]
    return {**given, "controls": controls} if controls else given
