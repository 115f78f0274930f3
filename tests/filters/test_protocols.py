"""What filters can do beyond the four methods is stated, and asked for in one place; wrappers pass
it on.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.protocols import (
    WITH_CONTROLS,
    WITH_SMOOTHER,
    allows_missing_sensors,
    control_components,
    covariance_of,
    diagnostics_of,
    smoother_of,
)
from kbf.filters.regression.kernel_ridge import FrameRegression
from kbf.filters.wrapper import FilterWrapper, innermost
from kbf.recording import Recording

ROOT = Path(__file__).resolve().parents[2]


def kalman(controls: int = 0) -> KalmanFilter:
    one = torch.eye(1)
    B = torch.ones(1, controls) if controls else None
    return KalmanFilter(
        LinearModel(A=one, a=one[0], Q=one, C=one, c=0 * one[0], R=one, m0=0 * one[0], P0=one, B=B)
    )


class Plain:
    """The four methods, and no more."""

    def __init__(self) -> None:
        self.inner = kalman()

    def init(self, batch: int, *, generator: Any = None) -> Any:
        return self.inner.init(batch)

    def predict(self, state: Any, *, generator: Any = None) -> Any:
        return self.inner.predict(state)

    def update(self, state: Any, obs: torch.Tensor) -> Any:
        return self.inner.update(state, obs)

    def estimate(self, state: Any) -> torch.Tensor:
        return self.inner.estimate(state)


class Doubled(FilterWrapper):
    """Observations and controls count twice."""

    def observed(self, obs: torch.Tensor) -> torch.Tensor:
        return 2 * obs

    def acted(self, control: torch.Tensor) -> torch.Tensor:
        return 2 * control


def test_four_methods_are_enough():
    for filter in (Plain(), FilterWrapper(Plain())):
        state = filter.init(2)
        assert control_components(filter) == 0 and not allows_missing_sensors(filter)
        assert diagnostics_of(filter, state) == {} and covariance_of(filter, state) is None
        with pytest.raises(ValueError, match=r"Plain has no smoother\. Models that have one: kbf"):
            smoother_of(filter)() if isinstance(filter, Plain) else filter.smoother()


def test_a_wrapper_passes_everything_on():
    inner = kalman(controls=1)
    filter, u, x = Doubled(Doubled(inner)), torch.full((2, 1), 0.5), torch.ones(2, 1)
    assert control_components(filter) == 1
    state = filter.predict(filter.init(2), control=u)
    truth = inner.predict(inner.init(2), control=4 * u)
    assert torch.equal(state.mean, truth.mean)
    assert torch.equal(
        filter.estimate(filter.update(state, x)), inner.estimate(inner.update(truth, 4 * x))
    )
    spread = filter.covariance(state)
    assert spread is not None and torch.equal(spread, truth.cov)
    found, seen = innermost(filter, x)
    assert found is inner and torch.equal(seen, 4 * x)
    assert not hasattr(filter, "step"), "what the inner filter cannot do, its wrapper cannot"


def test_wrapped_modules_are_modules():
    model = FrameRegression()
    wrapped = FilterWrapper(model.fit(Recording(torch.randn(12, 2), torch.randn(12, 2))))
    assert isinstance(wrapped, nn.Module)


def test_names_in_errors_are_those_of_the_models():
    there = {path.stem: path.read_text() for path in (ROOT / "configs" / "model").glob("*.yaml")}
    assert set(WITH_CONTROLS) | set(WITH_SMOOTHER) <= there.keys()
    nets = {name for name, text in there.items() if "\n  controls: ${" in text}
    assert {"lstm", "rkn"} <= nets <= set(WITH_CONTROLS), (
        "nets that are told how many components a control has take them"
    )


@pytest.mark.parametrize("folder", ["filters", "evaluation", "export"])
def test_nobody_else_probes_filters(folder):
    """``hasattr(filter, ...)`` and ``getattr(filter, ..., default)`` are asked nowhere: what a
    filter can do is a protocol.
    """
    for path in (ROOT / "kbf" / folder).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("hasattr", "getattr")
            ):
                probed = ast.unparse(node.args[0])
                assert probed not in (
                    "filter",
                    "self.filter",
                    "inner",
                    "self.inner",
                    "model",
                    "self.model",
                ), f"{path}:{node.lineno}"
