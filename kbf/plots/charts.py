"""Charts of tables: lines with error bars in panels, scatter plots and time series."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import matplotlib
import numpy as np
import torch
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from kbf.plots.inline_figure import InlineFigure
from kbf.plots.tracks import GREY, MARKERS, PALETTE, STYLE, TRUTH, finish
from kbf.rkhs.linalg import evenly

Row = Mapping[str, Any]

# Points of a column or a part that are drawn, evenly spaced: more are indistinguishable, and take
# minutes.
MOST_POINTS = 20_000

PART_COLOURS = {"train": PALETTE[1], "validation": PALETTE[2], "test": PALETTE[0], "": GREY}


@matplotlib.rc_context(STYLE)
def curves(
    rows: Sequence[Row],
    *,
    x: str,
    y: str,
    by: str,
    se: str | None = None,
    panel: str | None = None,
    log: Literal["", "x", "y", "xy"] = "",
    xlabel: str = "",
    ylabel: str = "",
    title: str = "",
    level: tuple[float, str] | None = None,
    share_y: bool = False,
    marks: Mapping[tuple[Any, Any], str] | None = None,
    across: int = 4,
) -> Figure:
    """Draws one line for each value of ``by`` and one panel for each value of ``panel``.

    Args:
        rows: a row for each point, as in a CSV file; points without a finite ``y`` are left out.
        x: column of the horizontal axis; texts are set side by side.
        y: column of the vertical axis.
        by: column with one line for each value.
        se: column of the error bars.
        panel: column with one panel for each value; None for a single one.
        log: axes with a logarithmic scale.
        xlabel: below each panel; the column's name unless given.
        ylabel: left of the first panel; the column's name unless given.
        title: above everything.
        level: a horizontal line and what it is.
        share_y: the same vertical axis for all panels.
        marks: short texts at the top, such as the stars of a test, by (panel, x); the panel is None
            where there is a single one.
        across: the most panels side by side.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to draw")
    panels = list(dict.fromkeys(row[panel] for row in rows)) if panel else [None]
    lines = list(dict.fromkeys(row[by] for row in rows))
    across = min(len(panels), across)
    down = -(-len(panels) // across)
    figure = InlineFigure(figsize=(3.7 * across + 1.9, 3.3 * down + 0.3), layout="constrained")
    grid = figure.subplots(down, across, squeeze=False, sharey=share_y).flatten()
    for axes, here in zip(grid, panels, strict=False):
        draw_lines(
            axes,
            [row for row in rows if panel is None or row[panel] == here],
            lines,
            x,
            y,
            by,
            se,
            log,
        )
        if level is not None:
            axes.axhline(level[0], color=TRUTH, lw=1.2, ls=(0, (5, 2)), label=level[1])
        for at, mark in [
            (at, mark) for (place, at), mark in (marks or {}).items() if place == here
        ]:
            axes.text(at, 1.0, mark, transform=axes.get_xaxis_transform(), ha="center", va="top")
        axes.set_xlabel(xlabel or x)
        axes.set_title("" if here is None else str(here), fontsize=9.5)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    for row in grid.reshape(down, across):
        row[0].set_ylabel(ylabel or y)
    handles = {
        name: handle
        for axes in grid
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside right center", labelspacing=0.7)
    if title:
        figure.suptitle(textwrap.fill(title, int(11 * figure.get_figwidth())), fontsize=10.5)
    return figure


def draw_lines(
    axes: Axes,
    rows: Sequence[Row],
    lines: list[Any],
    x: str,
    y: str,
    by: str,
    se: str | None,
    log: str,
) -> None:
    """The lines of one panel; each keeps its colour and its mark in all panels."""
    places = list(dict.fromkeys(row[x] for row in rows))
    words = any(isinstance(place, str) for place in places)
    for k, line in enumerate(lines):
        mine = [
            row
            for row in rows
            if row[by] == line and row[y] is not None and abs(row[y]) < float("inf")
        ]
        mine = mine if words else sorted(mine, key=lambda row: row[x])
        bars = (
            None
            if se is None
            else [row[se] if row[se] is not None and row[se] == row[se] else 0 for row in mine]
        )
        axes.errorbar(
            [places.index(row[x]) if words else row[x] for row in mine],
            [row[y] for row in mine],
            bars,
            color=PALETTE[k % len(PALETTE)],
            marker=MARKERS[k % len(MARKERS)],
            ms=4.5,
            lw=0 if words else 1.2,
            capsize=2.5,
            elinewidth=1,
            label=str(line),
        )
    if words:
        axes.set_xticks(range(len(places)), places, rotation=30, ha="right")
    if "x" in log:
        axes.set_xscale("log")
        if have_room(sorted(places)):  # the points themselves
            axes.set_xticks(places, [f"{place:g}" for place in places])
            axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        else:  # 2 and 5 between few powers of ten
            low, high = axes.get_xlim()
            axes.xaxis.set_minor_locator(ticker.LogLocator(subs=(2.0, 5.0)))
            axes.xaxis.set_minor_formatter(
                ticker.StrMethodFormatter("{x:g}") if high < 30 * low else ticker.NullFormatter()
            )
    if "y" in log:
        axes.set_yscale("log")


def have_room(places: list[Any]) -> bool:
    """Whether sorted numbers fit below a logarithmic axis of about 36 characters.

    >>> have_room([100, 200, 500, 1000]), have_room([10_000, 20_000, 40_000, 70_000, 100_000])
    (True, False)
    """
    if not 0 < len(places) <= 8 or places[0] < 1e-3:
        return False
    whole = math.log(places[-1] / places[0])
    wide = [(len(f"{a:g}") + len(f"{b:g}")) / 2 + 1 for a, b in pairwise(places)]
    gaps = [math.log(b / a) for a, b in pairwise(places)]
    return all(
        gap > math.log(1.3) and 36 * gap > length * whole
        for gap, length in zip(gaps, wide, strict=True)
    )


@matplotlib.rc_context(STYLE)
def comparison_figure(
    rows: Sequence[Mapping[str, Any]], *, title: str = "", unit: str = "steps"
) -> Figure:
    """Error of each model against the size of the training, with standard errors, above the floor.

    Args:
        rows: with ``model``, ``n_train``, ``mse``, ``se`` and ``floor`` (NaN where it is not
            known).
        title: above the picture. unit: what ``n_train`` counts.
    """
    sizes = sorted({row["n_train"] for row in rows})
    last = max(sizes)
    models = list(dict.fromkeys(row["model"] for row in rows))
    order = sorted(
        models,
        key=lambda m: (
            -min((r["mse"] for r in rows if r["model"] == m and r["n_train"] == last), default=0)
        ),
    )
    positions = {n: k for k, n in enumerate(sizes)}
    figure = InlineFigure(figsize=(5.2 + 0.9 * len(sizes), 4.6), layout="constrained")
    axes = figure.add_subplot()
    for k, model in enumerate(order):
        mine = sorted(
            (row for row in rows if row["model"] == model), key=lambda row: row["n_train"]
        )
        shift = 0.32 * (
            k / max(len(order) - 1, 1) - 0.5
        )  # side by side, so that error bars can be read
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
        edges = [
            positions[known[0]] - 0.35,
            *[positions[n] for n in known],
            positions[known[-1]] + 0.35,
        ]
        axes.plot(
            edges,
            [floors[n] for n in [known[0], *known, known[-1]]],
            color=TRUTH,
            lw=1.3,
            ls=(0, (5, 2)),
            label="floor (true model)",
        )
    axes.set_yscale("log")
    ticks = ticker.LogLocator(
        subs=(1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0), numticks=30
    )
    axes.yaxis.set_major_locator(ticks)
    axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%.3g"))
    axes.yaxis.set_minor_formatter(ticker.NullFormatter())
    axes.set_xticks(list(positions.values()), [str(n) for n in sizes])
    axes.grid(visible=False, axis="x")
    axes.set(xlabel=f"training {unit} $n$", ylabel="mean squared error")
    axes.set_title(title, fontsize=10.5)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), labelspacing=0.7)
    return figure


@matplotlib.rc_context(STYLE)
def series_figure(
    columns: Mapping[str, Sequence[Tensor]],
    parts: Sequence[Sequence[str]],
    *,
    title: str = "",
    most: int = 16,
) -> Figure:
    """Draws columns over the steps of all recordings, one panel each, coloured by part.

    Args:
        columns: by name, one tensor ``T`` for each recording.
        parts: for each recording and step train, validation, test, or "" for none.
        title: above the picture.
        most: panels.
    """
    kinds = [part for each in parts for part in each]
    edges = [sum(len(each) for each in parts[:k]) for k in range(1, len(parts))]
    shown = list(columns.items())[:most]
    figure = InlineFigure(figsize=(11, 1.0 + 1.3 * max(1, len(shown))), layout="constrained")
    panels = figure.subplots(max(1, len(shown)), sharex=True, squeeze=False)[:, 0]
    for axes, (name, each) in zip(panels, shown, strict=False):
        values = torch.cat(list(each)).double()
        steps = evenly(len(values), MOST_POINTS)
        for part in [part for part in PART_COLOURS if part in kinds]:
            inside = torch.tensor([kinds[k] == part for k in steps.tolist()])
            look: Any = {"color": PART_COLOURS[part], "label": part or "not used"}
            axes.plot(
                steps, torch.where(inside, values[steps], torch.nan), ".-", lw=0.8, ms=1.5, **look
            )
        for edge in edges:
            axes.axvline(edge - 0.5, color=GREY, lw=0.6)
        axes.set_ylabel(name, rotation=0, ha="right")
    panels[-1].set_xlabel("step")
    finish(figure, title, handles=panels[0].get_legend_handles_labels()[0], ncols=4)
    return figure


@matplotlib.rc_context(STYLE)
def scatter_figure(
    parts: Mapping[str, Tensor], names: Sequence[str], *, title: str = "", most: int = 5
) -> Figure:
    """Draws pairs of the first components of points ``n d``, or a single one, coloured by part."""
    width = min(len(names), most)
    side = max(1, width - 1)
    figure = InlineFigure(figsize=(2.6 + 2.4 * side, 2.6 + 2.2 * side), layout="constrained")
    grid = figure.subplots(side, side, squeeze=False)
    for (i, j), axes in np.ndenumerate(grid):
        axes.set_visible(j <= i)
        for part, points in parts.items():
            some = evenly(len(points), MOST_POINTS)
            across, up = (
                (points[some, j], points[some, i + 1]) if width > 1 else (some, points[some])
            )
            axes.plot(across, up, ".", ms=2.5, color=PART_COLOURS[part], label=part, alpha=0.6)
        labels = (names[j], names[i + 1]) if width > 1 else ("step", names[0])
        axes.set(xlabel=labels[0], ylabel=labels[1])
    finish(figure, title, handles=grid[0, 0].get_legend_handles_labels()[0], ncols=3)
    return figure
