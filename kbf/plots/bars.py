"""Bars with error bars, and pictures as text for HTML pages."""

import base64
from collections.abc import Mapping

import matplotlib
from matplotlib.figure import Figure

from kbf.plots.inline_figure import InlineFigure
from kbf.plots.tracks import PALETTE, STYLE, TRUTH

# Height of a bar, in inches.
HEIGHT = 0.32


@matplotlib.rc_context(STYLE)
def bars_figure(
    values: Mapping[str, tuple[float, float]],
    *,
    xlabel: str = "",
    title: str = "",
    level: tuple[float, str] | None = None,
) -> Figure:
    """Draws a horizontal bar for each name, the first one at the top.

    Args:
        values: length and its standard error by name; an error that is NaN is not drawn.
        xlabel: below the bars. title: above them.
        level: a vertical line and what it is.

    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("there are no values to draw")
    figure = InlineFigure(figsize=(7, 1.1 + HEIGHT * len(values)), layout="constrained")
    axes = figure.add_subplot()
    places = range(len(values))
    lengths = [value for value, _ in values.values()]
    errors = [0.0 if error != error else error for _, error in values.values()]
    axes.barh(places, lengths, xerr=errors, color=PALETTE[0], alpha=0.8, capsize=2.5)
    axes.set_yticks(places, list(values))
    axes.invert_yaxis()
    if level is not None:
        axes.axvline(level[0], color=TRUTH, lw=1.2, ls=(0, (5, 2)), label=level[1])
        figure.legend(loc="outside upper right")
    axes.set(xlabel=xlabel, title=title)
    return figure


def data_url(figure: InlineFigure) -> str:
    """Returns a figure as the address of a picture that is inside a page: PNG in base 64."""
    return "data:image/png;base64," + base64.b64encode(figure._repr_png_()).decode()
