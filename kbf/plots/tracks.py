"""Tracks of states over time, and the style of all figures."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, Patch
from torch import Tensor

from kbf.evaluation.scoring_rules import CURVE_LEVELS, Reliability
from kbf.plots.inline_figure import InlineFigure
from kbf.recording import Recording
from kbf.runtime.atomic_files import replacing

TRUTH = "#1b1b1b"
ESTIMATE = "#d1495b"
SEEN = "#7aa6c2"
GREY = "#8a8a8a"
PALETTE = [
    "#d1495b",
    "#00798c",
    "#edae49",
    "#5f4b8b",
    "#66a182",
    "#2e4057",
    "#c97c5d",
    "#8d96a3",
    "#a23b72",
    "#3b8ea5",
    "#7c9885",
    "#6b4226",
]
MARKERS = "osD^vP*Xh<>d"
# The largest ratio of the spreads of two components that are drawn with equal units of length: with
# more, the plane would be a strip.
MOST_UNEQUAL = 4.0
SEEN_DOT = Line2D([], [], color=SEEN, marker="o", ms=4, ls="", label="observation")
SPREAD = Patch(color=ESTIMATE, alpha=0.3, lw=0, label="1 and 2 standard deviations")
REGION = Line2D(
    [],
    [],
    color=ESTIMATE,
    alpha=0.5,
    lw=0.7,
    marker="o",
    ms=9,
    mfc="none",
    ls="",
    label="95 % region",
)
ALARM: Any = {"color": "#edae49", "marker": "v", "ms": 5, "ls": "", "mew": 0, "clip_on": False}
STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "figure.dpi": 100,
}


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a figure in one step, in the format that the name ends in."""
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)


@matplotlib.rc_context(STYLE)
def track_figure(
    recording: Recording,
    estimates: Tensor | None = None,
    covariances: Tensor | None = None,
    *,
    title: str = "",
    steps: int = 100,
    alarms: Tensor | None = None,
    radius2: Tensor | None = None,
    names: Sequence[str] = (),
    time_step: float | None = None,
) -> Figure:
    """Draws truth, observation and estimate of a recording, over time and in the plane.

    The plane has the first two components. Its axes have equal units of length where the spreads
    of the components are comparable.

    Args:
        recording: ``T d``; observations are drawn where they are of the space of the states
            (`visible`), except where they are masked.
        estimates: estimates ``T d``, or None to show the data alone.
        covariances: of the estimates ``T d d``: bands of 1 and 2 standard deviations.
        title: above the picture.
        steps: how many of the first steps to show.
        alarms: ``T`` bool, steps that a monitor called strange: marked at the top.
        radius2: squared radius of the 95 % regions by the covariances, drawn around some of the
            estimates in the plane.
        names: of the components, with units; without them they are z_1, z_2, ...
        time_step: time between two steps, for the horizontal axis; None for the number of the step.
    """
    labels = list(names) or [f"$z_{{{k + 1}}}$" for k in range(recording.states[0].numel())]
    z = recording.states[:steps].double().flatten(1).cpu()
    x = visible(recording, len(z))
    e = None if estimates is None else estimates[:steps].double().flatten(1).cpu()
    C = None if covariances is None else covariances[:steps].double().cpu()
    shown = min(z.shape[1], 4)
    figure = InlineFigure(figsize=(10.5, max(4.0, 1.9 * shown)), layout="constrained")
    plane = z.shape[1] > 1
    grid = figure.add_gridspec(shown, 2 if plane else 1, width_ratios=[1.9, 1] if plane else [1])
    panels = [figure.add_subplot(grid[k, 0]) for k in range(shown)]
    for k, axes in enumerate(panels):
        draw_component(axes, z, x, e, C, k, last=k == shown - 1, time_step=time_step)
        axes.set_ylabel(labels[k], rotation=90 if names else 0, labelpad=10)
    if strange := [] if alarms is None else alarms[:steps].nonzero().flatten().tolist():
        panels[0].plot(
            [t * (time_step or 1) for t in strange],
            [1.0] * len(strange),
            transform=panels[0].get_xaxis_transform(),
            **ALARM,
        )
    if plane:
        axes = figure.add_subplot(grid[:, 1])
        draw_plane(axes, z, x, e, labels)
        if e is not None and C is not None and radius2 is not None:
            draw_regions(axes, e, C, float(radius2))
    handles = {
        Line2D([], [], color=TRUTH, label="true state"): True,
        SEEN_DOT: x is not None,
        Line2D([], [], color=ESTIMATE, label="estimate"): e is not None,
        SPREAD: C is not None,
        REGION: plane and e is not None and C is not None and radius2 is not None,
        Line2D([], [], label="alarm", **ALARM): bool(strange),
    }
    finish(figure, title, handles=[each for each, drawn in handles.items() if drawn], ncols=5)
    return figure


def finish(figure: Figure, title: str, **legend: Any) -> None:
    """Adds the legend below the panels, and the title, if there is one, above them."""
    figure.legend(loc="outside lower center", **legend)
    if title:
        figure.suptitle(title, fontsize=10.5)


def visible(recording: Recording, n: int) -> Tensor | None:
    """Returns the first n observations (NaN if missing) if they are of the space of the states.

    They are if they have as many components and each of them, as an estimate of its state, is
    better than a constant: its median distance to the state is below that of the median state.
    """
    if recording.obs.shape[1:] != recording.states.shape[1:] or recording.obs.ndim != 2:
        return None
    z, x = recording.states.double().cpu(), recording.obs.double().cpu()
    if recording.mask is not None:
        x = torch.where(recording.mask[:, None].cpu(), x, torch.nan)
    constant = (z - z.nanmedian(0).values).abs().nanmedian(0).values
    return x[:n] if ((x - z).abs().nanmedian(0).values < constant).all() else None


def comparable(z: Tensor) -> bool:
    """Returns whether the spreads of all components ``T d`` are of the same order."""
    spread = z[z.isfinite().all(1)].std(0, correction=0)
    return bool(spread.max() <= MOST_UNEQUAL * spread.min())


def draw_component(
    axes: Axes,
    z: Tensor,
    x: Tensor | None,
    e: Tensor | None,
    C: Tensor | None,
    k: int,
    *,
    last: bool,
    time_step: float | None = None,
) -> None:
    """Draws component k over time: observation, truth, estimate, and 1 and 2 standard deviations.

    What is None is left out. Only the ``last`` panel has numbers at its horizontal axis, of time
    where the ``time_step`` is known.
    """
    time = torch.arange(len(z)) * (time_step or 1)
    if x is not None:
        axes.plot(time, x[:, k], "o", color=SEEN, ms=3.5, alpha=0.65, mew=0)
    axes.plot(time, z[:, k], color=TRUTH, lw=1.2)
    if e is not None:
        axes.plot(time, e[:, k], color=ESTIMATE, lw=1.4)
    if e is not None and C is not None:
        std, look = C[:, k, k].clamp(min=0).sqrt(), {"color": ESTIMATE, "alpha": 0.14, "lw": 0}
        for width in (1, 2):
            axes.fill_between(time, e[:, k] - width * std, e[:, k] + width * std, **look)
    label = "time step" if time_step is None else "time"
    axes.set(xlim=(0, max(len(z) - 1, 1) * (time_step or 1)), xlabel=label if last else "")
    axes.tick_params(labelbottom=last)


def draw_plane(
    axes: Axes, z: Tensor, x: Tensor | None, e: Tensor | None, labels: Sequence[str]
) -> None:
    """Draws states and estimates in the plane, with a thin line from each estimate to its truth."""
    if x is not None:
        axes.plot(x[:, 0], x[:, 1], "o", color=SEEN, ms=3.5, alpha=0.5, mew=0)
    if e is not None:
        axes.plot(
            torch.stack([z[:, 0], e[:, 0]]), torch.stack([z[:, 1], e[:, 1]]), color=GREY, lw=0.5
        )
        axes.plot(e[:, 0], e[:, 1], "o", color=ESTIMATE, ms=3.5, mew=0)
    axes.plot(z[:, 0], z[:, 1], "o", color=TRUTH, ms=3, mew=0)
    axes.set(aspect="equal" if comparable(z[:, :2]) else "auto", xlabel=labels[0])
    axes.set_ylabel(labels[1], rotation=0 if labels[1].startswith("$") else 90)


def draw_regions(axes: Axes, e: Tensor, C: Tensor, radius2: float, most: int = 25) -> None:
    """Draws ellipses {z: (z - e)^T C^-1 (z - e) <= radius2} around some estimates in the plane."""
    for t in range(0, len(e), -(-len(e) // most)):
        values, vectors = torch.linalg.eigh(C[t, :2, :2])
        wide, high = (2 * (radius2 * values.clamp(min=0)).sqrt()).tolist()
        angle = math.degrees(math.atan2(float(vectors[1, 0]), float(vectors[0, 0])))
        axes.add_patch(
            Ellipse(
                (float(e[t, 0]), float(e[t, 1])),
                wide,
                high,
                angle=angle,
                fill=False,
                color=ESTIMATE,
                alpha=0.5,
                lw=0.7,
            )
        )


@matplotlib.rc_context(STYLE)
def calibration_figure(sides: Mapping[str, Reliability], *, title: str = "") -> Figure:
    """Draws the coverage of credible regions by level, and the histogram of the PIT.

    Args:
        sides: by name, such as before and after recalibration.
        title: above the picture.
    """
    figure = InlineFigure(figsize=(9.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], color=GREY, lw=1, ls=(0, (5, 2)))
    right.axhline(1, color=GREY, lw=1, ls=(0, (5, 2)))
    for k, (name, reliability) in enumerate(sides.items()):
        left.plot(
            CURVE_LEVELS,
            reliability.curve,
            color=PALETTE[k],
            marker=MARKERS[k],
            ms=4,
            lw=1.2,
            label=name,
        )
        right.hist(
            reliability.pit.flatten().tolist(),
            bins=10,
            range=(0, 1),
            density=True,
            histtype="step",
            color=PALETTE[k],
            lw=1.4,
            label=name,
        )
    left.set(
        xlabel="level of the region",
        ylabel="share of true states inside",
        xlim=(0, 1),
        ylim=(0, 1),
        aspect="equal",
    )
    right.set(
        xlabel="PIT: $P(z_k \\leq$ true value), all components", ylabel="density", xlim=(0, 1)
    )
    finish(figure, title, handles=left.get_legend_handles_labels()[0], ncols=len(sides))
    return figure
