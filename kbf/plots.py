"""All pictures: the only file that draws."""

from __future__ import annotations

import os
from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

import matplotlib
import torch
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from kbf.files import replacing
from kbf.sequence import Sequence

TRUTH, ESTIMATE, SEEN, GREY = "#1b1b1b", "#d1495b", "#7aa6c2", "#8a8a8a"
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


def track_figure(sequence: Sequence, found: Tensor | None = None, *, title: str = "", steps: int = 100) -> Figure:
    """Truth, observation and estimate of one sequence, over time and in the plane of the first two components.

    Args:
        sequence: ``T d``; observations are drawn where they are vectors like the state, except where they are masked.
        found: estimates ``T d``, or None to show the data alone.
        title: above the picture.
        steps: how many of the first steps to show.
    """
    z = sequence.states[:steps].double().flatten(1).cpu()
    x = sequence.obs[:steps].double().cpu() if sequence.obs.shape[1:] == sequence.states.shape[1:] else None
    if x is not None and sequence.mask is not None:
        x = torch.where(sequence.mask[:steps, None].cpu(), x, torch.nan)
    e = None if found is None else found[:steps].double().flatten(1).cpu()
    shown = min(z.shape[1], 4)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.5, max(4.0, 1.9 * shown)), layout="constrained")
        plane = z.shape[1] > 1
        grid = figure.add_gridspec(shown, 2 if plane else 1, width_ratios=[1.9, 1] if plane else [1])
        time = range(len(z))
        panels = [figure.add_subplot(grid[k, 0]) for k in range(shown)]
        for k, axes in enumerate(panels):
            if x is not None:
                axes.plot(time, x[:, k], "o", color=SEEN, ms=3.5, alpha=0.65, mew=0)
            axes.plot(time, z[:, k], color=TRUTH, lw=1.2)
            if e is not None:
                axes.plot(time, e[:, k], color=ESTIMATE, lw=1.4)
            axes.set_ylabel(f"$z_{{{k + 1}}}$", rotation=0, labelpad=10)
            axes.set_xlim(0, len(z) - 1)
            axes.tick_params(labelbottom=k == shown - 1)
        panels[-1].set_xlabel("time step")
        if plane:
            draw_plane(figure.add_subplot(grid[:, 1]), z, x, e)
        handles = [Line2D([], [], color=TRUTH, label="true state")]
        handles += [Line2D([], [], color=SEEN, marker="o", ms=4, ls="", label="observation")] if x is not None else []
        handles += [Line2D([], [], color=ESTIMATE, label="estimate")] if e is not None else []
        figure.legend(handles=handles, loc="outside lower center", ncols=3)
        if title:
            figure.suptitle(title, fontsize=10.5)
    return figure


def draw_plane(axes: Axes, z: Tensor, x: Tensor | None, e: Tensor | None) -> None:
    """The same in the plane of the first two components; a thin line joins each estimate with its truth."""
    if x is not None:
        axes.plot(x[:, 0], x[:, 1], "o", color=SEEN, ms=3.5, alpha=0.5, mew=0)
    if e is not None:
        axes.plot(torch.stack([z[:, 0], e[:, 0]]), torch.stack([z[:, 1], e[:, 1]]), color=GREY, lw=0.5)
        axes.plot(e[:, 0], e[:, 1], "o", color=ESTIMATE, ms=3.5, mew=0)
    axes.plot(z[:, 0], z[:, 1], "o", color=TRUTH, ms=3, mew=0)
    axes.set_aspect("equal")
    axes.set_xlabel("$z_1$")
    axes.set_ylabel("$z_2$", rotation=0)


def comparison_figure(rows: Many[Mapping[str, Any]], *, title: str = "") -> Figure:
    """Error of each model against the number of training steps, with standard errors, above the floor.

    Args:
        rows: with ``model``, ``n_train``, ``mse``, ``se`` and ``floor`` (NaN where it is not known).
        title: above the picture.
    """
    sizes = sorted({row["n_train"] for row in rows})
    last = max(sizes)
    models = list(dict.fromkeys(row["model"] for row in rows))
    order = sorted(models, key=lambda m: -min((r["mse"] for r in rows if r["model"] == m and r["n_train"] == last), default=0))
    positions = {n: k for k, n in enumerate(sizes)}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2 + 0.9 * len(sizes), 4.6), layout="constrained")
        axes = figure.add_subplot()
        for k, model in enumerate(order):
            mine = sorted((row for row in rows if row["model"] == model), key=lambda row: row["n_train"])
            shift = 0.32 * (k / max(len(order) - 1, 1) - 0.5)  # side by side, so that error bars can be read
            axes.errorbar(
                [positions[row["n_train"]] + shift for row in mine],
                [row["mse"] for row in mine],
                [0 if row["se"] != row["se"] else row["se"] for row in mine],
                color=PALETTE[models.index(model) % len(PALETTE)],
                marker=MARKERS[models.index(model) % len(MARKERS)],
                ms=5,
                lw=1.2,
                capsize=2.5,
                elinewidth=1,
                label=model,
            )
        floors = {row["n_train"]: row["floor"] for row in rows if row["floor"] == row["floor"]}
        if floors:
            known = sorted(floors)
            edges = [positions[known[0]] - 0.35, *[positions[n] for n in known], positions[known[-1]] + 0.35]
            values = [floors[n] for n in [known[0], *known, known[-1]]]
            axes.plot(edges, values, color=TRUTH, lw=1.3, ls=(0, (5, 2)), label="floor (true model)")
        axes.set_yscale("log")
        ticks = ticker.LogLocator(subs=(1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), numticks=30)
        axes.yaxis.set_major_locator(ticks)
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.3g"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
        axes.set_xticks(list(positions.values()), [str(n) for n in sizes])
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("training steps $n$")
        axes.set_ylabel("mean squared error")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), labelspacing=0.7)
        if title:
            axes.set_title(title, fontsize=10.5)
    return figure
