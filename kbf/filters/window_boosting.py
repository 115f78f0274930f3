"""Gradient boosting of trees on a window of the last observations, fitted by scikit-learn and evaluated in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.filters.window_regression import WindowRegression, rows_of, windows_of
from kbf.rkhs.linalg import evenly
from kbf.runtime.extras import need
from kbf.runtime.process import every_core
from kbf.sequence import Sequence

HELD = 5
"""The last step of so many, in stretches of this share, is held out to learn how large errors are."""
LARGEST = 20_000_000
"""Numbers that trees are grown on; of more, evenly spaced rows: neighbours in time say much the same."""


class Trees:
    """Sums of regression trees, one sum for each component of the state, as tables that a batch of windows walks at once.

    Attributes:
        feature, threshold, left, right, value: ``trees nodes``; a leaf is its own child. owner: ``trees``, the component of each.
        base: ``d``. depth: steps from a root to the deepest leaf.
    """

    threshold: Tensor
    value: Tensor
    feature: Tensor
    left: Tensor
    right: Tensor

    def __init__(self, models: list[Any]) -> None:
        """From fitted `sklearn.ensemble.HistGradientBoostingRegressor` models, one a component."""
        trees = [(k, stage[0].nodes) for k, model in enumerate(models) for stage in model._predictors]
        most = max(len(nodes) for _, nodes in trees)
        self.base: Tensor = torch.tensor([float(model._baseline_prediction.item()) for model in models], dtype=torch.float64)
        self.owner: Tensor = torch.tensor([k for k, _ in trees])
        self.depth: int = max(int(nodes["depth"].max()) for _, nodes in trees)
        table = {name: torch.zeros(len(trees), most, dtype=torch.float64) for name in ("threshold", "value")}
        place = {name: torch.zeros(len(trees), most, dtype=torch.long) for name in ("feature", "left", "right")}
        for i, (_, nodes) in enumerate(trees):
            n, leaf = len(nodes), torch.from_numpy(nodes["is_leaf"].astype(bool))
            itself = torch.arange(n)
            for name, key in (("left", "left"), ("right", "right")):
                place[name][i, :n] = torch.where(leaf, itself, torch.from_numpy(nodes[key].astype("int64")))
            place["feature"][i, :n] = torch.where(leaf, 0, torch.from_numpy(nodes["feature_idx"].astype("int64")))
            table["threshold"][i, :n] = torch.from_numpy(nodes["num_threshold"].copy())
            table["value"][i, :n] = torch.from_numpy(nodes["value"].copy())
        self.threshold, self.value = table["threshold"], table["value"]
        self.feature, self.left, self.right = place["feature"], place["left"], place["right"]
        self.rows: Tensor = torch.arange(len(trees))

    def __call__(self, window: Float[Tensor, "b p"]) -> Float[Tensor, "b d"]:
        """The sums at windows ``b p``."""
        u = window.detach().double().cpu()
        at = torch.zeros(len(u), len(self.rows), dtype=torch.long)
        for _ in range(self.depth):
            goes = u.gather(1, self.feature[self.rows, at]) <= self.threshold[self.rows, at]
            at = torch.where(goes, self.left[self.rows, at], self.right[self.rows, at])
        found = self.base.repeat(len(u), 1).index_add(1, self.owner, self.value[self.rows, at])
        return found.to(window)


class WindowBoosting(WindowRegression):
    """Histogram gradient boosting of trees on the last ``width`` observations and controls, one model a component of the state.

    A tree cannot subtract: beside the window it sees the window in its own units, (x - mean) / sd of each column, which a level or
    an amplitude that drifts does not change (`with_own_units`).

    The settings are scikit-learn's defaults: 100 trees of at most 31 leaves, learning rate 0.1; they stop early on a tenth of the
    steps where there are more than 10,000. The covariance is that of the errors on every fifth stretch of the memory, held out from
    a fit that is made for it.

    References: Ke et al. (2017), whose algorithm scikit-learn's is.
    """

    iterations: int
    seed: int

    def __init__(self, width: int | None = 15, *, iterations: int = 100, seed: int = 0) -> None:
        """``iterations``: trees a component, at most. seed: of early stopping."""
        super().__init__(width)
        self.iterations, self.seed = iterations, seed

    def fit(self, sequences: list[Sequence]) -> tuple[Callable[[Tensor], Tensor], Tensor | None]:
        """The trees over all steps, and the covariance of the errors of those over four fifths of them.

        Raises:
            ValueError: scikit-learn is not installed.
        """
        width = self.steps(sequences)
        rows, states = (
            torch.cat(parts) for parts in zip(*((windows_of(rows_of(s), width), s.states) for s in sequences), strict=True)
        )
        some = evenly(len(rows), max(1000, LARGEST // (2 * rows.shape[1])), rows.device)
        windows, states = with_own_units(rows[some], width), states[some]
        n = len(states)
        held = (torch.arange(n, device=states.device) * 4 * HELD // n) % HELD == HELD - 1
        residual = states[held] - self.grow(windows[~held], states[~held])(windows[held])
        trees = self.grow(windows, states)
        return lambda window: trees(with_own_units(window, width)), residual.mT @ residual / max(1, len(residual))

    def grow(self, windows: Float[Tensor, "n p"], states: Float[Tensor, "n d"]) -> Trees:
        """Fit the trees, on every core."""
        ensemble = need("sklearn.ensemble", "sklearn", "model=window_boosting")
        u, z = windows.double().cpu().numpy(), states.double().cpu().numpy()
        settings: Any = {"max_iter": self.iterations, "random_state": self.seed}
        with every_core():
            return Trees([ensemble.HistGradientBoostingRegressor(**settings).fit(u, z[:, k]) for k in range(z.shape[1])])


def with_own_units(windows: Float[Tensor, "n wc"], width: int) -> Float[Tensor, "n two_wc"]:
    """Windows of ``width`` steps and, behind them, these in their own units, (x - mean) / sd of each column (0 where it stands)."""
    rows = windows.unflatten(1, (width, -1))
    centred = rows - rows.mean(1, keepdim=True)
    size = centred.square().mean(1, keepdim=True).sqrt()
    own = torch.where(size > 1e-6 * (1 + rows.abs().amax(1, keepdim=True)), centred / size, 0)
    return torch.cat([windows, own.flatten(1)], 1)
