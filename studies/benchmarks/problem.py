"""The filter of the speed benchmarks: oscillatory data, published form, fixed widths."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from kbf.data.synthetic import SyntheticData
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.operators import Operator
from kbf.filters.kernel.update.rule import PrimalUpdate
from kbf.recording import Recording
from kbf.rkhs.kernels import median_distance
from kbf.ssm import oscillatory

REGS = (1e-3, 1e-3, 5e-4)
"""eta, lambda', lambda."""


class Problem(NamedTuple):
    """A recording, a sequence to filter, and the bandwidths (ratio, transition, observation)."""

    memory: Recording
    test: Recording
    bandwidths: Tensor

    def filter(self, rank: int | None = None, tol: float = 0.0, **settings: object) -> KBF:
        """The published filter (Xu et al., Algorithm 2) with features or full Gram matrices.

        Features are limited by a rank or a tolerance.
        """
        model = KBF(**{"rank": rank, "tol": tol, "normalise": False, "learn": False, **settings})  # pyright: ignore[reportArgumentType]
        model.set(self.bandwidths, self.bandwidths.new_tensor(REGS))
        return model

    def ranks(self, filter: KernelBayesFilter) -> tuple[int, int]:
        """How many features its states and its observations have."""
        transition, rule = filter.transition, filter.rule
        assert (
            isinstance(transition, Operator)
            and isinstance(rule, PrimalUpdate)
            and transition.right is not None
        )
        states, obs = (
            int(features.any(0).sum()) for features in (transition.right, rule.features)
        )  # the others are zeros
        return states, obs


def problem(n: int, *, steps: int = 200, scale: float = 1.0, seed: int = 0) -> Problem:
    """Oscillatory data.

    Kernels exp(-||a - b||^2 / s) with s = ``scale`` times the median squared distance (diagonal
    included).
    """
    data = SyntheticData(oscillatory(), n_train=n, n_test=steps, seed=seed)
    memory, test = data.train[0], data.test[0]
    medians = [
        median_distance(part.double(), diagonal=True)
        for part in (memory.states, memory.states, memory.obs)
    ]
    return Problem(memory, test, torch.stack(medians) * math.sqrt(scale / 2))


def reference() -> ModuleType | None:
    """The published arithmetic, as the tests of a checkout have it.

    None where there is no checkout.
    """
    path = Path(__file__).parents[2] / "tests" / "reference.py"
    if not path.is_file():
        return None
    spec = importlib.util.spec_from_file_location("kbf_reference", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
