"""What a filter must be able to do to be selected: its smoother, its program, its sensors."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.gaussian.start import StartingState
from kbf.filters.gaussian.switching import SwitchingState
from kbf.filters.kernel.controlled_transition import ControlledDensity
from kbf.filters.kernel_monte_carlo.filter import LocalMemory
from kbf.filters.neural.dpf import DPFState
from kbf.filters.particle.bootstrap import ParticleState
from kbf.filters.protocols import (
    Filter,
    allows_missing_sensors,
    covariance_of,
    smoother_of,
)
from kbf.filters.wrapper import FilterWrapper
from kbf.recording import Recording
from kbf.runtime.errors import FitError


def why_not_exported(filter: Filter[Any]) -> str | None:
    """Return why one step of a filter is not exported as a program; None if it can be.

    A program is a function of its input: it draws no random numbers and its operations do not
    depend on the values of the observation.
    """
    inner = filter
    while isinstance(inner, FilterWrapper):
        inner = inner.inner
    if isinstance(inner, EnsembleFilter):
        return (
            f"a stack of several filters ({', '.join(inner.filters)}) is not exported; "
            "model.model_selection=false takes kbf alone"
        )
    if isinstance(inner.init(1), ParticleState | DPFState | LocalMemory):
        return (
            "a particle filter draws random numbers in each step, and is not exported; "
            "kbf, kalman, lstm and frame are"
        )
    if isinstance(inner.init(1), SwitchingState):
        return (
            "the filter of several regimes (ukf_learned) is not exported; "
            "require=export fits one of one regime"
        )
    if isinstance(inner.init(1), StartingState):
        return (
            "the UKF on learned maps (ukf_learned) checks in each step whether a covariance has a "
            "Cholesky factor, and is not exported; kbf, kalman, lstm and frame are"
        )
    if allows_missing_sensors(filter):
        return (
            "a filter that allows missing sensors selects its rule in each step, "
            "and is not exported"
        )
    if isinstance(filter, nn.Module) and any(
        isinstance(part, ControlledDensity) for part in filter.modules()
    ):
        return (
            "a drawn memory with controls (model=kbf) computes its transition in each step, "
            "and is not exported; kbf_tuned, kbf_paper, kalman and lstm are"
        )
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
