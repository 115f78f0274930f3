"""Estimates of each state column over time, in its own panel, with intervals and alarms."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

from kbf.plots.inline_figure import InlineFigure
from kbf.plots.tracks import ALARM, ESTIMATE, STYLE, TRUTH

# Height of a panel and width of the figure, in inches.
PANEL_HEIGHT = 1.9
WIDTH = 9.0


def estimates_figure(
    time: np.ndarray,
    mean: np.ndarray,
    ends: Sequence[np.ndarray] | None,
    truth: np.ndarray | None,
    *,
    names: Sequence[str],
    periods: Mapping[int, float] | None = None,
    alarms: np.ndarray | None = None,
    starts: Sequence[int] = (0,),
    level: float = 0.95,
    axes: Any = None,
    xlabel: str = "row",
) -> Any:
    """Draws one panel for each column: truth, estimate, interval, and alarms at the top.

    Lines are interrupted where a recording starts.

    Args:
        time: ``T``, the horizontal axis.
        mean: estimates ``T c``. ends: lower and upper ends of the intervals ``T c``, or None.
        truth: states ``T c``, or None.
        names: labels of the columns, with units.
        periods: of the columns that are angles, which are drawn without jumps.
        alarms: ``T`` bool, rows that are marked; None for none.
        starts: first rows of the recordings.
        level: of the intervals, for the legend.
        axes: of matplotlib, one for each column; None makes a figure.
        xlabel: label of the horizontal axis.

    Returns:
        The figure; the given ``axes`` where there are some, as a notebook displays their figure.

    Raises:
        ValueError: another number of axes than columns.
    """
    bounds = [0, *list(starts)[1:], len(time)]
    for k, period in (periods or {}).items():
        mean, ends, truth = without_jumps(mean, ends, truth, k, period, bounds)
    with matplotlib.rc_context(STYLE):
        figure = None
        if axes is None:
            size = (WIDTH, max(2.6, PANEL_HEIGHT * len(names)))
            figure = InlineFigure(figsize=size, layout="constrained")
            panels = figure.subplots(len(names), 1, sharex=True, squeeze=False)[:, 0]
        else:
            panels = np.atleast_1d(axes).ravel()
            if len(panels) != len(names):
                raise ValueError(f"axes must be {len(names)}, one for each column")
        spans = list(zip(starts, [*starts[1:], len(time)], strict=True))
        for k, (panel, name) in enumerate(zip(panels, names, strict=True)):
            for first, last in spans:
                rows = slice(first, last)
                label = first == spans[0][0]
                if ends is not None:
                    panel.fill_between(
                        time[rows],
                        ends[0][rows, k],
                        ends[1][rows, k],
                        color=ESTIMATE,
                        alpha=0.2,
                        lw=0,
                        label=f"{100 * level:g} % interval" if label else None,
                    )
                if truth is not None:
                    panel.plot(
                        time[rows],
                        truth[rows, k],
                        color=TRUTH,
                        lw=1.1,
                        label="truth" if label else None,
                    )
                panel.plot(
                    time[rows],
                    mean[rows, k],
                    color=ESTIMATE,
                    lw=1.3,
                    label="estimate" if label else None,
                )
            if alarms is not None and alarms.any():
                top = np.ones(int(alarms.sum()))
                transform = panel.get_xaxis_transform()
                panel.plot(time[alarms], top, transform=transform, label="alarm", **ALARM)
            panel.set_ylabel(name)
        panels[-1].set_xlabel(xlabel)
        handles = panels[0].get_legend_handles_labels()
        if figure is None:
            panels[0].legend(*handles, loc="upper right")
            return axes
        figure.legend(*handles, loc="outside upper right", ncols=4)
    return figure


def without_jumps(
    mean: np.ndarray,
    ends: Sequence[np.ndarray] | None,
    truth: np.ndarray | None,
    column: int,
    period: float,
    bounds: Sequence[int],
) -> tuple[np.ndarray, Sequence[np.ndarray] | None, np.ndarray | None]:
    """Returns estimates, ends and truth of an angle that differ by less than half a turn.

    Each estimate is taken on the turn that is the nearest to the one before, in each recording
    between ``bounds``; the truth on the turn that is the nearest to the estimate.
    """
    arrays = [each.copy() for each in (mean, *(ends or ()))]
    for first, last in itertools.pairwise(bounds):
        angle = mean[first:last, column]
        turns = np.unwrap(angle, period=period) - angle
        for each in arrays:
            each[first:last, column] += turns
    if truth is not None:
        truth = truth.copy()
        apart = truth[:, column] - arrays[0][:, column]
        truth[:, column] -= period * np.round(apart / period)
    return arrays[0], None if ends is None else arrays[1:], truth
