"""Window baseline: gradient-boosted trees (scikit-learn), evaluated in PyTorch."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy
import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.filters.regression.window import WindowRegression
from kbf.recording import Recording
from kbf.rkhs.linalg import evenly
from kbf.runtime.deadline import check_deadline
from kbf.runtime.optional_dependencies import need
from kbf.runtime.threads import side_by_side

# Every fifth block is held out to estimate the covariance of the errors.
HELD_OUT_EVERY = 5
# Numbers that trees are grown on; of more, evenly spaced rows: consecutive ones are similar.
MAX_NUMBERS = 20_000_000
# The width of windows of unspecified width if there are at most so many steps. A wider window has
# more inputs in which trees find splits by chance, and takes longer.
WIDTH_OF_FEW_STEPS = 15
FEW_STEPS = 2000
# Histogram bins of an input for so few steps; scikit-learn's default is 255.
BINS_OF_FEW_STEPS = 64
BINS = 255


class Trees:
    """Sums of regression trees, one sum for each component of the state, as tables.

    A batch of windows is evaluated at once.

    All nodes of all trees stand in one row, the deepest tree first, so that the trees that have a
    level are the first ones.

    Attributes:
        feature, threshold, value: ``nodes``. child: ``2 nodes``, to the left and to the right of
            each; a leaf is its own. gap_right: ``nodes``, whether NaN goes to the right; None for
            trees without NaN.
        root, owner: ``trees``, the first node and the component of each. levels: how many trees are
            that deep, level by level.
        base: ``d``.
    """

    threshold: Tensor
    value: Tensor

    def __init__(self, models: list[Any], *, gaps: bool = False) -> None:
        """From fitted `sklearn.ensemble.HistGradientBoostingRegressor` models, one a component.

        ``gaps``: windows may contain NaN.
        """
        trees = [
            (k, stage[0].nodes) for k, model in enumerate(models) for stage in model._predictors
        ]
        trees.sort(key=lambda tree: -int(tree[1]["depth"].max()))
        nodes = numpy.concatenate([each for _, each in trees])
        sizes = torch.tensor([len(each) for _, each in trees])
        self.root: Tensor = sizes.cumsum(0) - sizes
        self.owner: Tensor = torch.tensor([k for k, _ in trees])
        depths = [int(each["depth"].max()) for _, each in trees]
        levels = range(depths[0])
        self.levels: list[int] = [sum(depth > level for depth in depths) for level in levels]
        self.base: Tensor = torch.tensor(
            [float(model._baseline_prediction.item()) for model in models], dtype=torch.float64
        )
        leaf, first = (
            torch.from_numpy(nodes["is_leaf"].astype(bool)),
            self.root.repeat_interleave(sizes),
        )
        sides = [
            first + torch.from_numpy(nodes[side].astype("int64")) for side in ("left", "right")
        ]
        child = torch.where(leaf, torch.arange(len(leaf)), torch.stack(sides))
        self.child: Tensor = child.mT.flatten()
        feature = torch.from_numpy(nodes["feature_idx"].astype("int64"))
        self.feature: Tensor = torch.where(leaf, 0, feature)
        self.threshold, self.value = (
            torch.from_numpy(nodes[name].copy()) for name in ("num_threshold", "value")
        )
        left = torch.from_numpy(nodes["missing_go_to_left"].astype(bool))
        self.gap_right: Tensor | None = ~left if gaps else None

    def __call__(self, window: Float[Tensor, "b p"]) -> Float[Tensor, "b d"]:
        """The sums at windows ``b p``."""
        u = window.detach().double().cpu()
        at = self.root.repeat(len(u), 1)
        for count in self.levels:
            here = at[:, :count]
            x = u.gather(1, self.feature.take(here))
            right = x > self.threshold.take(here)  # False for NaN
            if self.gap_right is not None:
                right = right | (x.isnan() & self.gap_right.take(here))
            at[:, :count] = self.child.take(2 * here + right)
        return self.base.repeat(len(u), 1).index_add(1, self.owner, self.value.take(at)).to(window)


class WindowBoosting(WindowRegression):
    """Histogram gradient boosting of trees on the last ``width`` observations and controls.

    There is one model per component of the state. Trees cannot compute differences: their inputs
    are the window and the standardised window, (x - mean) / std of each column, which does not
    depend on a level or an amplitude that drifts (`with_own_units`).

    A missing sensor is NaN in the window: each split sends NaN to the side that reduces the error
    more. The tree thus knows which readings of the window there were.

    The settings are scikit-learn's defaults: 100 trees of at most 31 leaves, learning rate 0.1;
    they stop early on a tenth of the steps if there are more than 10,000. The covariance is that of
    the errors on every fifth block of the memory, by a fit to the other blocks.

    Without a width, a memory of at most `FEW_STEPS` steps gets windows of at most
    `WIDTH_OF_FEW_STEPS` steps and histograms of `BINS_OF_FEW_STEPS` bins.

    References: Ke et al. (2017), the algorithm that scikit-learn implements.
    """

    accepts_gaps: bool = True

    def __init__(self, width: int | None = 15, *, iterations: int = 100, seed: int = 0) -> None:
        """``iterations``: trees a component, at most. seed: of early stopping."""
        super().__init__(width)
        self.iterations, self.seed = iterations, seed

    @torch.no_grad()
    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select the width, if none is given."""
        recordings, _ = self.inputs(memory)
        few = self.width is None and sum(len(s.states) for s in recordings) <= FEW_STEPS
        width = min(WIDTH_OF_FEW_STEPS, self.usual_width(recordings))
        self.selected.fill_(width if few else 0)

    def fit_regression(
        self, recordings: list[Recording]
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]:
        """Fit the trees to all steps, and those of 4/5 of the steps once the covariance is needed.

        Raises:
            ValueError: scikit-learn is not installed.
        """
        width = self.steps(recordings)
        rows, states = (
            torch.cat(parts)
            for parts in zip(*((self.windows(s), s.states) for s in recordings), strict=True)
        )
        some = evenly(len(rows), max(1000, MAX_NUMBERS // (2 * rows.shape[1])), rows.device)
        windows, states = with_own_units(rows[some], width), states[some]
        trees = self.grow(windows, states)

        @cache
        def spread() -> Tensor:
            n = len(states)
            held = (
                torch.arange(n, device=states.device) * 4 * HELD_OUT_EVERY // n
            ) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
            residual = states[held] - self.grow(windows[~held], states[~held])(windows[held])
            return residual.mT @ residual / max(1, len(residual))

        return lambda window: trees(with_own_units(window, width)), spread

    def grow(self, windows: Float[Tensor, "n p"], states: Float[Tensor, "n d"]) -> Trees:
        """Fit the trees, those of each component on a core of its own.

        Two threads in one tree wait for each other thousands of times, which takes minutes where a
        core has other work.
        """
        ensemble = need("sklearn.ensemble", "sklearn", "model=window_boosting")
        pools = need("threadpoolctl", "sklearn", "model=window_boosting")
        u, z = windows.double().cpu().numpy(), states.double().cpu().numpy()
        u = numpy.where(numpy.isnan(u).all(0), 0, u)  # scikit-learn requires a value in each column
        bins = BINS_OF_FEW_STEPS if int(self.selected) else BINS

        def one(k: int) -> Any:
            check_deadline()
            with pools.threadpool_limits(1, user_api="openmp"):
                return ensemble.HistGradientBoostingRegressor(
                    max_iter=self.iterations, max_bins=bins, random_state=self.seed
                ).fit(u, z[:, k])

        return Trees(side_by_side(one, range(z.shape[1])), gaps=not self.fills)


def with_own_units(windows: Float[Tensor, "n wc"], width: int) -> Float[Tensor, "n two_wc"]:
    """Append the standardised windows, (x - mean) / std of each column; 0 for constant columns.

    Mean and std are those of the values that are not NaN; NaN stays NaN.
    """
    rows = windows.unflatten(1, (width, -1))
    centred = rows - rows.nanmean(1, keepdim=True)
    size = centred.square().nanmean(1, keepdim=True).sqrt()
    largest = rows.nan_to_num().abs().amax(1, keepdim=True)
    own = torch.where(size > 1e-6 * (1 + largest), centred / size, 0 * centred)
    return torch.cat([windows, own.flatten(1)], 1)
