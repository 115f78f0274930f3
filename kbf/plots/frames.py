"""Grids of image observations with the true and the estimated states."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import torch
from jaxtyping import Float, Shaped
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Circle, Ellipse, Patch, Wedge
from torch import Tensor

from kbf.plots.inline_figure import InlineFigure
from kbf.plots.tracks import ESTIMATE, GREY, SPREAD, STYLE, TRUTH, comparable, finish
from kbf.recording import Recording

PANEL_KINDS = ("auto", "compass", "map", "rows")

# Most components that are drawn below a frame.
MOST_COMPONENTS = 6

# Colours and sizes: an estimate does not hide the truth behind it.
DOT_SIZES = ((TRUTH, 6.0), (ESTIMATE, 4.0))

Extent = tuple[float, float, float, float]

# States ``t d``, estimates ``t d``, covariances ``t d d`` or None.
Values = tuple[Tensor, Tensor, Tensor | None]

# Draws a true state ``d``, its estimate ``d`` and the estimate's covariance ``d d`` or None, in
# place of the ones before.
Show = Callable[[Tensor, Tensor, Tensor | None], None]


@matplotlib.rc_context(STYLE)
def frame_grid(
    recording: Recording,
    estimates: Shaped[Tensor, "t d"] | None = None,
    covariances: Shaped[Tensor, "t d d"] | None = None,
    steps: int = 24,
    columns: int = 8,
    kind: str = "auto",
    extent: Extent | None = None,
    names: Sequence[str] | None = None,
    called: str = "estimate",
    title: str = "",
) -> Figure:
    """The first observed frames, each with its true and its estimated state.

    Args:
        recording: states ``T d`` and frames ``T c h w``, uint8 or floating-point numbers around [0,
            1].
        estimates: of the states, as many as there are; None to show the data alone.
        covariances: of the estimates.
        steps: how many of the first steps to show.
        columns: frames in a row.
        kind: how states are shown: compass (headings (cos, sin)), map (positions in the plane),
            rows (a line for each component), or auto, which takes what fits the states.
        extent: of positions: the coordinates of the picture's left, right, bottom and top edge.
            They are then drawn in the picture.
        names: above the frames, in place of the time.
        called: what the estimates are.
        title: above the picture.

    Raises:
        ValueError: observations that are no images, no step at all, or a kind that is unknown or
            does not fit the states.
    """
    known = (
        recording.states.new_full(recording.states.shape, torch.nan)
        if estimates is None
        else estimates
    )
    z, e, C = shown_steps(recording, known, covariances, steps)
    if recording.obs.ndim != 4:
        raise ValueError(
            "frames are (channels, height, width), these observations are "
            f"{tuple(recording.obs.shape[1:])}"
        )
    kind = state_kind(z, kind)
    extent = extent if kind == "map" else None
    if kind == "rows" and not comparable(z):  # each row on an axis of its own
        z, e, C = standardised(z, e, C)
    ends = limits(z, e)
    frames, columns = recording.obs[: len(z)].cpu(), min(columns, len(z))
    lines, aspect = -(-len(z) // columns), frames.shape[2] / frames.shape[3]
    panel = kind == "rows" or (kind == "map" and extent is None)
    shown = min(z.shape[1], MOST_COMPONENTS)
    panel_height = 0.15 * shown + 0.05 if kind == "rows" else 0.8
    sizes = [1.3 * aspect, *([panel_height] if panel else [])]  # inches
    figure = InlineFigure(
        figsize=(max(1.38 * columns, 4.4), lines * (sum(sizes) + 0.24) + (0.75 if title else 0.45)),
        layout="compressed",
    )
    engine: Any = figure.get_layout_engine()
    engine.set(w_pad=0.03, h_pad=0.03, hspace=0.0, wspace=0.0)
    grid = figure.add_gridspec(lines * len(sizes), columns, height_ratios=sizes * lines)
    for t in range(len(z)):
        line, column = divmod(t, columns)
        axes = figure.add_subplot(grid[line * len(sizes), column])
        draw_frame(axes, extent)(frames[t], seen(recording, t))
        axes.set_title(
            step_name(recording, t) if names is None else names[t],
            fontsize=7.5,
            pad=2.5,
            color="#555555",
        )
        below = figure.add_subplot(grid[line * len(sizes) + 1, column]) if panel else axes
        if kind == "rows":
            show = draw_rows(below, ends, shown, named=column == 0)
        elif kind == "compass":
            side = 0.45 * min(1, aspect)  # a square in the lower right corner of the frame
            show = draw_compass(axes.inset_axes((1 - side, 0.0, side, side / aspect)))
        else:
            plane, big = (None, 0.75) if extent else (view(z, e, sizes[-1] / 1.3), 1.0)
            show = draw_map(below, plane, big)
            below.set(xticks=[], yticks=[])
        show(z[t], e[t], None if C is None else C[t])
    handles = state_handles(kind, C is not None, called)
    finish(figure, title, handles=handles if estimates is not None else handles[:1], ncols=4)
    return figure


def shown_steps(
    recording: Recording, estimates: Tensor, covariances: Tensor | None, steps: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """States, estimates and covariances of the first steps, as matplotlib takes them.

    Raises:
        ValueError: no step at all.
    """
    if (n := min(steps, len(recording.states), len(estimates))) < 1:
        raise ValueError("there is no step to show")
    z, e = (values[:n].detach().double().cpu() for values in (recording.states, estimates))
    return z, e, None if covariances is None else covariances[:n].detach().double().cpu()


def standardised(z: Tensor, e: Tensor, C: Tensor | None) -> Values:
    """Returns states, estimates and covariances in units of each component's spread and mean."""
    known = z[z.isfinite().all(1)]
    mean, scale = known.mean(0), known.std(0, correction=0)
    scale = torch.where(scale > 0, scale, 1.0)
    return (
        (z - mean) / scale,
        (e - mean) / scale,
        None if C is None else C / (scale[:, None] * scale),
    )


def state_kind(z: Float[Tensor, "t d"], kind: str = "auto") -> str:
    """Returns the panel for these states: compass (unit vectors in the plane), map or rows.

    A map has equal units of length; states whose components have other spreads are rows.

    Raises:
        ValueError: a kind that is unknown or does not fit the states.
    """
    if kind not in PANEL_KINDS:
        raise ValueError(f"kind must be one of {', '.join(PANEL_KINDS)}; got {kind!r}")
    if kind in ("compass", "map") and z.shape[1] != 2:
        raise ValueError(
            f"a {kind} shows states of 2 components, these have {z.shape[1]}: take kind=rows"
        )
    if kind != "auto":
        return kind
    return (
        "rows"
        if z.shape[1] != 2
        else "compass"
        if bool(((z.norm(dim=1) - 1).abs() < 1e-3).all())
        else "map"
        if comparable(z)
        else "rows"
    )


def seen(recording: Recording, t: int) -> bool:
    """Whether step t was observed."""
    return recording.mask is None or bool(recording.mask[t])


def step_name(recording: Recording, t: int) -> str:
    """The title of a frame."""
    return f"$t$ = {t}" + ("" if seen(recording, t) else " (not seen)")


def picture(frame: Shaped[Tensor, "c h w"]) -> Tensor:
    """Returns a frame for matplotlib in [0, 1]: ``h w 3``, or the first channel ``h w``."""
    x = frame.double() / 255 if frame.dtype == torch.uint8 else frame.double()
    x = x.nan_to_num(0.5).clamp(0, 1)
    return x.movedim(0, -1) if len(x) == 3 else x[0]


def draw_frame(axes: Axes, extent: Extent | None = None) -> Callable[[Tensor, bool], None]:
    """Returns a function that draws a frame ``c h w``, pale if it was not observed."""
    axes.set(xticks=[], yticks=[])
    axes.set_axis_off()
    look: Any = {"cmap": "gray", "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    shown: list[Any] = []

    def show(frame: Tensor, seen: bool) -> None:
        if not shown:
            shown.append(axes.imshow(picture(frame).numpy(), extent=extent, **look))
            axes.autoscale(enable=False)
        shown[0].set(data=picture(frame).numpy(), alpha=1.0 if seen else 0.15)

    return show


def at(values: Values, t: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """State, estimate and covariance of step t."""
    z, e, C = values
    return z[t], e[t], None if C is None else C[t]


def draw_compass(axes: Axes, big: float = 1.0) -> Show:
    """Draws the true and the estimated direction with 1 and 2 standard deviations of the angle.

    The arrow of the estimate is as long as the estimate: short where the filter does not know.
    """
    axes.set(xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), aspect="equal", xticks=[], yticks=[])
    axes.set_axis_off()
    axes.add_patch(Circle((0, 0), 1, fc=("white", 0.88), ec=GREY, lw=0.8))
    wedges = [Wedge((0, 0), 1, 0, 0, color=ESTIMATE, alpha=0.22, lw=0) for _ in range(2)]
    for wedge in wedges:
        axes.add_patch(wedge)
    look: Any = {"angles": "xy", "scale_units": "xy", "scale": 1, "units": "inches", "zorder": 3}
    look |= {"headwidth": 3.6, "headlength": 4.2, "headaxislength": 3.8}
    arrows = [
        axes.quiver(0, 0, 1.0, 0.0, color=color, width=width, **look)
        for color, width in {TRUTH: 0.023 * big, ESTIMATE: 0.015 * big}.items()
    ]

    def show(z: Tensor, e: Tensor, C: Tensor | None) -> None:
        for arrow, value in zip(arrows, (z, e), strict=True):
            arrow.set_UVC(*value.numpy()[:, None])
        angle = math.atan2(float(e[1]), float(e[0]))
        across = e.new_tensor([-math.sin(angle), math.cos(angle)])
        std = (
            0.0
            if C is None
            else max(float(across @ C @ across), 0.0) ** 0.5 / max(float(e.norm()), 1e-9)
        )
        for k, wedge in enumerate(wedges, 1):
            wedge.set_visible(std > 0)  # no NaN either
            if std > 0:
                half = min(k * std, math.pi)
                wedge.set(theta1=math.degrees(angle - half), theta2=math.degrees(angle + half))

    return show


def draw_map(axes: Axes, extent: Extent | None, big: float = 1.0) -> Show:
    """Draws truth and estimate of two components, and ellipses of 1 and 2 standard deviations.

    ``extent`` are the limits; None leaves those of a picture. ``big`` enlarges the dots.
    """
    if extent is not None:
        axes.set(xlim=extent[:2], ylim=extent[2:], aspect="equal")
        axes.spines[:].set_visible(True)
    ellipses = [
        Ellipse((0, 0), 0, 0, fc=(ESTIMATE, 0.2), ec=(ESTIMATE, 0.8), lw=0.5) for _ in range(2)
    ]
    for ellipse in ellipses:
        axes.add_patch(ellipse)
    (line,) = axes.plot([], [], color=GREY, lw=0.7)
    dots = [
        axes.plot([], [], "o", color=c, ms=big * ms, mec="white", mew=0.6, zorder=3)[0]
        for c, ms in DOT_SIZES
    ]

    def show(z: Tensor, e: Tensor, C: Tensor | None) -> None:
        line.set_data([z[0], e[0]], [z[1], e[1]])
        for dot, value in zip(dots, (z, e), strict=True):
            dot.set_data(value[:1], value[1:2])
        known = C is not None and bool(C.isfinite().all())
        for ellipse in ellipses:
            ellipse.set_visible(known)
        if C is not None and known:
            variance, direction = torch.linalg.eigh(C[:2, :2])
            high, wide = (2 * variance.clamp(min=0).sqrt()).tolist()
            angle = math.degrees(math.atan2(float(direction[1, 1]), float(direction[0, 1])))
            for k, ellipse in enumerate(ellipses, 1):
                ellipse.set(center=e[:2].tolist(), height=k * high, width=k * wide, angle=angle)

    return show


def draw_rows(axes: Axes, ends: tuple[float, float], k: int, named: bool) -> Show:
    """Draws a line for each of k components: truth, estimate and a bar of 1 standard deviation."""
    axes.set(xlim=ends, ylim=(k - 0.4, -0.6), xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.hlines(range(k), *ends, color="#dddddd", lw=0.8)
    if named:
        axes.set_yticks(range(k), [f"$z_{{{j + 1}}}$" for j in range(k)], fontsize=7.5)
        axes.tick_params(length=0, pad=1)
    bars = axes.hlines(range(k), [0.0] * k, [0.0] * k, color=ESTIMATE, alpha=0.35, lw=4.5)
    dots = [
        axes.plot([], [], "o", color=c, ms=ms, mec="white", mew=0.5, zorder=3)[0]
        for c, ms in DOT_SIZES
    ]

    def show(z: Tensor, e: Tensor, C: Tensor | None) -> None:
        std = torch.zeros_like(e) if C is None else C.diagonal().clamp(min=0).sqrt()
        bars.set_segments(
            [[(float(e[j] - std[j]), j), (float(e[j] + std[j]), j)] for j in range(k)]
        )
        for dot, value in zip(dots, (z, e), strict=True):
            dot.set_data(value[:k], range(k))

    return show


def limits(*parts: Tensor) -> tuple[float, float]:
    """Least and greatest of all finite numbers, with a margin."""
    values = torch.cat([part.flatten() for part in parts])
    values = values[values.isfinite()]
    low, high = (float(values.min()), float(values.max())) if len(values) else (0.0, 1.0)
    margin = 0.1 * (high - low) or 0.5
    return low - margin, high + margin


def view(z: Tensor, e: Tensor, aspect: float = 1.0, down: bool = False) -> Extent:
    """Limits of the plane that hold the first two components of all states.

    Args:
        z: ``t d``, and e: ``t d``.
        aspect: height over width.
        down: the second component grows downwards.
    """
    (left, right), (low, high) = (limits(z[:, k : k + 1], e[:, k : k + 1]) for k in (0, 1))
    half, x, y = max(aspect * (right - left), high - low) / 2, (left + right) / 2, (low + high) / 2
    return (
        x - half / aspect,
        x + half / aspect,
        *((y + half, y - half) if down else (y - half, y + half)),
    )


def state_handles(kind: str, spread: bool, called: str = "estimate") -> list[Any]:
    """The handles of the legend."""
    what = {"compass": "heading", "map": "position", "rows": "state"}[kind]
    marker, size = (r"$\rightarrow$", 13) if kind == "compass" else ("o", 5)
    look: Any = {"marker": marker, "ms": size, "ls": ""}
    handles: list[Any] = [
        Line2D([], [], color=TRUTH, label=f"true {what}", **look),
        Line2D([], [], color=ESTIMATE, label=called, **look),
    ]
    if spread:
        handles.append(
            Patch(color=ESTIMATE, alpha=0.3, lw=0, label="1 standard deviation")
            if kind == "rows"
            else SPREAD
        )
    return handles
