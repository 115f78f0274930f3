"""The page of ``kbf serve`` on which a person watches a running filter.

Drawn by Bokeh, whose scripts are in its Python package and become part of the page: a browser needs
nothing but the server. The figures request the last steps of the session every `MILLISECONDS`.
"""

import html
import math
from itertools import cycle
from typing import Any

from kbf.fitted.fitted_filter import FittedFilter
from kbf.runtime.optional_dependencies import need
from kbf.serving.sessions import Session

# Milliseconds between two requests of the page.
MILLISECONDS = 500
# States and sensors that the page draws, the first ones.
MAX_STATES = 12
MAX_SENSORS = 24
# Colours of estimates, of rejected observations and of alarms.
ESTIMATE = "#1f77b4"
REJECTED = "#d62728"
ALARM = "#ff7f0e"
# Colours of sensors, in turn.
SENSORS = ("#2ca02c", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
# JSON has no NaN, and Bokeh draws null as 0.
NULL_TO_NAN = """
const columns = {}
for (const [name, values] of Object.entries(cb_data.response))
    columns[name] = values.map((value) => value === null ? NaN : value)
return columns
"""


def page(fitted: FittedFilter, sessions: list[Session], chosen: Session | None) -> str:
    """Return the page of a session as HTML; without one, how to start one.

    Args:
        fitted: the filter.
        sessions: that can be chosen.
        chosen: the one that is drawn.
    """
    title = f"kbf serve: {fitted.model_name}"
    if chosen is None:
        return (
            "<!doctype html><html lang=en><meta charset=utf-8>"
            f"<meta http-equiv=refresh content=20><title>{html.escape(title)}</title>"
            f"<h1>{html.escape(title)}</h1><p>No session is running. POST /sessions starts one: "
            "<a href=docs>all requests</a>. Then reload this page.</html>"
        )
    embed = need("bokeh.embed", "serve", "kbf serve")
    resources = need("bokeh.resources", "serve", "kbf serve")
    return embed.file_html(layout(fitted, sessions, chosen), resources.INLINE, title)


def layout(fitted: FittedFilter, sessions: list[Session], chosen: Session) -> Any:
    """Return the choice of the session and the figures, as a Bokeh layout."""
    models = need("bokeh.models", "serve", "kbf serve")
    layouts = need("bokeh.layouts", "serve", "kbf serve")
    address = f"sessions/{chosen.name}/history"
    source = models.AjaxDataSource(
        data={
            name: [math.nan if value is None else value for value in values]
            for name, values in chosen.columns().items()
        },
        adapter=models.CustomJS(code=NULL_TO_NAN),
        data_url=address,
        method="GET",
        polling_interval=MILLISECONDS,
        mode="replace",
    )
    menu = models.Select(
        title="Session", value=chosen.name, options=[each.name for each in sessions]
    )
    follow = "window.location.search = '?session=' + this.value"
    menu.js_on_change("value", models.CustomJS(code=follow))
    units = (fitted.config.get("data") or {}).get("units") or {}
    columns = fitted.columns
    states = [
        state_figure(source, name, units.get(name), spread=bool(chosen.spread))
        for name in columns["states"][:MAX_STATES]
    ]
    right = []
    if len(columns["states"]) > 1:
        right.append(plane_figure(source, columns["states"][:2], units))
    if columns["observations"]:
        right.append(sensor_figure(source, columns["observations"][:MAX_SENSORS]))
    else:
        right.append(image_view(chosen))
    caption = models.Div(
        text="Lines are estimates, bands intervals of 95 %. "
        f"<span style='color:{REJECTED}'>Crosses</span> are rejected observations "
        "(in the range of the others), "
        f"<span style='color:{ALARM}'>triangles</span> alarms."
    )
    figures = layouts.row(
        layouts.column(*states, sizing_mode="stretch_width"),
        layouts.column(*right, sizing_mode="stretch_width"),
        sizing_mode="stretch_width",
    )
    return layouts.column(menu, caption, figures, sizing_mode="stretch_width")


def figure(title: str, **settings: Any) -> Any:
    """Return an empty figure."""
    plotting = need("bokeh.plotting", "serve", "kbf serve")
    return plotting.figure(title=title, height=240, sizing_mode="stretch_width", **settings)


def state_figure(source: Any, name: str, unit: str | None, *, spread: bool) -> Any:
    """Return the figure of a state over the steps: estimate, interval and alarms."""
    drawn = figure(f"{name} [{unit}]" if unit else name, x_axis_label="step")
    if spread:
        ends = {"y1": f"lower_{name}", "y2": f"upper_{name}"}
        drawn.varea("step", source=source, fill_color=ESTIMATE, fill_alpha=0.25, **ends)
    drawn.line("step", f"values_{name}", source=source, line_color=ESTIMATE, line_width=2)
    drawn.scatter("step", f"alarm_{name}", source=source, marker="triangle", size=10, color=ALARM)
    return drawn


def sensor_figure(source: Any, names: list[str]) -> Any:
    """Return the figure of the sensors over the steps, with the rejected observations."""
    drawn = figure("sensors", x_axis_label="step")
    for name, colour in zip(names, cycle(SENSORS), strict=False):
        drawn.line("step", f"obs_{name}", source=source, line_color=colour, legend_label=name)
        drawn.scatter(
            "step",
            f"rejected_{name}",
            source=source,
            marker="x",
            size=12,
            line_width=3,
            color=REJECTED,
        )
    drawn.legend.label_text_font_size = "8pt"
    drawn.legend.location = "top_left"
    drawn.legend.background_fill_alpha = 0.5
    return drawn


def plane_figure(source: Any, names: list[str], units: dict[str, str]) -> Any:
    """Return the figure of two states in the plane: the path and the last place."""
    models = need("bokeh.models", "serve", "kbf serve")
    labels = [f"{name} [{units[name]}]" if name in units else name for name in names]
    drawn = figure("place", x_axis_label=labels[0], y_axis_label=labels[1], match_aspect=True)
    x, y = (f"values_{name}" for name in names)
    drawn.line(x, y, source=source, line_color=ESTIMATE, line_alpha=0.5)
    last = models.CustomJSFilter(code="return [Math.max(0, source.get_length() - 1)]")
    drawn.scatter(x, y, source=source, view=models.CDSView(filter=last), size=12, color=ESTIMATE)
    return drawn


def image_view(chosen: Session) -> Any:
    """Return the last image of a session, requested again as the figures are."""
    models = need("bokeh.models", "serve", "kbf serve")
    address = f"sessions/{chosen.name}/image"
    script = (
        f"setInterval(() => {{ this.src = '{address}?' + Date.now() }}, {MILLISECONDS}); "
        "this.onload = null"
    )
    return models.Div(
        text=f"<b>image</b><br><img alt='the last image' src='{address}' width=320 "
        f'style="image-rendering:pixelated" onload="{script}">'
    )
