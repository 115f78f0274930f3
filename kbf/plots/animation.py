"""A filter at work as a moving picture."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from jaxtyping import Shaped
from matplotlib import ticker
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from kbf.plots.frames import (
    Extent,
    Values,
    at,
    draw_compass,
    draw_frame,
    draw_map,
    limits,
    seen,
    shown_steps,
    state_handles,
    state_kind,
    step_name,
    view,
)
from kbf.plots.tracks import (
    ESTIMATE,
    GREY,
    SEEN,
    SEEN_DOT,
    SPREAD,
    STYLE,
    TRUTH,
    comparable,
    draw_component,
    finish,
    visible,
)
from kbf.recording import Recording
from kbf.runtime.atomic_files import replacing

# Steps of the past that stay in an animation.
TRAIL_STEPS = 20


@matplotlib.rc_context(STYLE)
def animate(
    path: str | os.PathLike[str],
    recording: Recording,
    estimates: Shaped[Tensor, "t d"],
    covariances: Shaped[Tensor, "t d d"] | None = None,
    fps: int = 8,
    steps: int = 200,
    kind: str = "auto",
    extent: Extent | None = None,
    title: str = "",
) -> None:
    """Writes a GIF of the observed frames, the plane of the states, and the components over time.

    Args:
        path: ends in .gif; the file is whole or absent.
        recording: and ``estimates``, ``covariances``, ``kind``, ``extent``, ``title``: as for
            `frame_grid`; but observations may be vectors, drawn where they are of the space of the
            states, and of states with three and more components the plane shows the first two.
        fps: steps a second.
        steps: how many of the first steps to show.

    Raises:
        ValueError: no step at all, a kind that is unknown or does not fit the states, or another
            suffix.
    """
    if Path(path).suffix.lower() != ".gif":
        raise ValueError(f"an animation is a .gif, not {path}")
    z, e, C = shown_steps(recording, estimates, covariances, steps)
    plane = "map" if comparable(z[:, :2]) else "rows"
    kind = plane if z.shape[1] > 2 else state_kind(z, kind)
    extent = extent if kind == "map" else None
    shown, images, x = min(z.shape[1], 4), recording.obs.ndim == 4, visible(recording, len(z))
    figure = Figure(
        figsize=(
            7.2,
            (3.2 + 0.8 * shown if images else max(3.3, 0.9 * shown)) + (0.7 if title else 0.4),
        ),
        layout="constrained",
    )
    shows: list[Callable[[int], None]] = []
    if images:
        grid = figure.add_gridspec(1 + shown, 2, height_ratios=[3.1, *[0.8] * shown])
        top = figure.add_subplot(grid[0, :] if kind == "rows" else grid[0, 0])
        shows.append(draw_frames(top, recording, (z, e, C), extent))
        plane, below = grid[0, 1], [grid[1 + k, :] for k in range(shown)]
    else:
        grid = figure.add_gridspec(shown, 1 if kind == "rows" else 2)
        plane, below = grid[:, 0], [grid[k, -1] for k in range(shown)]
    if kind != "rows":
        shows.append(
            draw_moves(
                figure.add_subplot(plane),
                (z, e, C),
                x,
                kind,
                extent is not None and extent[2] > extent[3],
            )
        )
    shows += [
        draw_series(axes, z, e, C, x, k, last=k == shown - 1)
        for k, axes in enumerate([figure.add_subplot(cell) for cell in below])
    ]
    handles = state_handles(kind if images or kind == "compass" else "rows", False)
    handles += ([] if x is None else [SEEN_DOT]) + ([] if C is None else [SPREAD])
    finish(figure, title, handles=handles, ncols=4)
    canvas, pages = FigureCanvasAgg(figure), []
    for t in range(len(z)):
        for show in shows:
            show(t)
        canvas.draw()
        figure.set_layout_engine("none")  # once is enough
        pages.append(Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB").quantize())
    with replacing(path) as temporary:
        pages[0].save(
            temporary,
            format="GIF",
            save_all=True,
            append_images=pages[1:],
            duration=1000 / fps,
            loop=0,
        )


def draw_frames(
    axes: Axes, recording: Recording, values: Values, extent: Extent | None
) -> Callable[[int], None]:
    """A function that draws the frame of step t; with an extent also truth and estimate in it."""
    name = axes.set_title(step_name(recording, 0), fontsize=9, color="#555555")
    show_frame = draw_frame(axes, extent)
    show_frame(recording.obs[0].cpu(), seen(recording, 0))
    dots = draw_map(axes, None) if extent else None

    def show(t: int) -> None:
        show_frame(recording.obs[t].cpu(), seen(recording, t))
        name.set_text(step_name(recording, t))
        if dots is not None:
            dots(*at(values, t))

    return show


def draw_moves(
    axes: Axes, values: Values, x: Tensor | None, kind: str, down: bool
) -> Callable[[int], None]:
    """Returns a function that draws step t and its trail in the plane of the first components."""
    z, e, _ = values
    trails: list[tuple[Tensor, dict[str, Any]]] = []
    if x is not None:
        trails.append(
            (x, {"marker": "o", "ls": "", "color": SEEN, "ms": 4, "alpha": 0.5, "mew": 0})
        )
    if kind == "compass":
        state = draw_compass(axes, 1.8)
    else:
        state = draw_map(axes, view(z, e if x is None else torch.cat([e, x]), down=down), 1.5)
        trails += [
            (p, {"color": c, "lw": 1.1, "alpha": 0.45}) for p, c in ((z, TRUTH), (e, ESTIMATE))
        ]
        axes.set_xlabel("$z_1$")
        axes.set_ylabel("$z_2$", rotation=0, labelpad=8)
    drawn = [(axes.plot([], [], zorder=1.5, **look)[0], points) for points, look in trails]

    def show(t: int) -> None:
        state(*at(values, t))
        for line, points in drawn:
            line.set_data(*points[max(0, t - TRAIL_STEPS) : t + 1, :2].T)

    return show


def draw_series(
    axes: Axes, z: Tensor, e: Tensor, C: Tensor | None, x: Tensor | None, k: int, last: bool
) -> Callable[[int], None]:
    """Draws component k over time; returns a function that moves the line of the current step."""
    draw_component(axes, z, x, e, C, k, last=last)
    axes.set_ylabel(f"$z_{{{k + 1}}}$", rotation=0, labelpad=10)
    axes.set_ylim(limits(*(values[:, k : k + 1] for values in (z, e, x) if values is not None)))
    axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    veil = axes.axvspan(0, axes.get_xlim()[1], color="white", alpha=0.72, lw=0, zorder=3)
    now = axes.axvline(0, color=GREY, lw=1.0, zorder=4)

    def move(t: int) -> None:
        veil.set_x(t)
        now.set_xdata([t, t])

    return move
