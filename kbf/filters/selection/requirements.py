"""What a filter must be able to do to be selected: its smoother, its program, its sensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from kbf.filters.kernel.controlled_transition import ControlledDensity
from kbf.filters.protocols import (
    Filter,
    allows_missing_sensors,
    control_components,
    covariance_of,
    move,
    smoother_of,
)
from kbf.recording import Recording
from kbf.runtime.errors import FitError
from kbf.runtime.random_inputs import NotExportedError, RandomInputs


def why_not_exported(filter: Filter[Any]) -> str | None:
    """Return why one step of a filter is not exported as a program; None if it can be.

    A program is a function of its input: its operations do not depend on values, and its random
    numbers are uniform and Gaussian inputs (`kbf.runtime.random_inputs`).
    """
    if isinstance(filter, nn.Module) and any(
        isinstance(part, ControlledDensity) for part in filter.modules()
    ):
        return (
            "a drawn memory with controls (model=kbf) computes its transition in each step, "
            "and is not exported; kbf_tuned, kbf_paper, kalman and lstm are"
        )
    width = control_components(filter)
    state: Any = filter.init(1)
    try:
        with torch.no_grad(), RandomInputs():
            move(filter, state, control=state[0].new_zeros(1, width) if width else None)
    except NotExportedError as error:
        return str(error)
    return None


def can_smooth(filter: Filter[Any]) -> bool:
    """Return whether a filter has a smoother."""
    try:
        return smoother_of(filter) is not None
    except ValueError:
        return False


def has_covariances(filter: Filter[Any]) -> bool:
    """Return whether a filter has covariances of its estimates."""
    return covariance_of(filter, filter.init(1)) is not None


# Requirements by name, with what decides whether a fitted filter meets them.
REQUIREMENTS: dict[str, Callable[[Filter[Any]], bool]] = {
    "smooth": can_smooth,
    "export": lambda filter: why_not_exported(filter) is None,
    "missing_sensors": allows_missing_sensors,
    "intervals": has_covariances,
}


def check_meets(filter: Filter[Any], require: Sequence[str]) -> None:
    """Raise a `FitError` for a filter that does not meet one of some `REQUIREMENTS`."""
    for name in require:
        if not REQUIREMENTS[name](filter):
            verb = "cannot" if name in ("smooth", "export") else "lacks"
            raise FitError(f"it {verb} {name}")


def fit_meeting(model: Any, require: Sequence[str], memory: list[Recording]) -> Filter[Any]:
    """Fit a model whose filter must meet some `REQUIREMENTS`.

    Raises:
        FitError: it does not meet one, or as the model's ``fit``.
    """
    filter = model.fit(memory)
    check_meets(filter, require)
    return filter
