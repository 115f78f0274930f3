"""`write_report`: what was found about a filter and its recordings, as one HTML file.

Pictures are inside the file, and nothing is loaded from elsewhere.
"""

import html
import math
import os
from pathlib import Path
from typing import Any

from kbf import __version__
from kbf.fitted.structure import ALWAYS, recordings_of
from kbf.fitted.trials import Trials, mean_squares, most_helpful, run_trials
from kbf.plots.bars import bars_figure, data_url
from kbf.plots.charts import curves
from kbf.runtime.atomic_files import write_text
from kbf.runtime.errors import FitError

# Components of the state whose error is drawn over their values.
MAX_DRAWN = 8
PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }}
table {{ border-collapse: collapse; margin: 1rem 0 }}
th, td {{ border-bottom: 1px solid #ccc; padding: .25rem .75rem; text-align: left }}
img {{ max-width: 100%; display: block; margin: 1rem 0 }}
</style></head><body>
<h1>{title}</h1>
{body}
<footer><small>kbf {version}</small></footer>
</body></html>
"""


def write_report(
    fitted: Any, path: str | os.PathLike[str], *, trials: bool = True, model: str | None = None
) -> list[str]:
    """Write the report of a fitted filter.

    Args:
        fitted: the filter, a `kbf.FittedFilter`.
        path: of the HTML file.
        trials: whether a quick filter is fitted again without each sensor and to fewer rows, which
            takes seconds to minutes.
        model: of these fits, a name of `kbf.fitted.trials.MODELS`; None takes the best of
            `kbf.fitted.trials.QUICK`.

    Returns:
        The sentences of the report.

    Raises:
        ValueError: an unknown model.
    """
    structure = fitted.structure
    named = structure[~structure.kind.isin(ALWAYS)]
    reason = str(structure.sentence.iloc[0])
    sentences = [reason, *(named.sentence.tolist() or ["Nothing unusual was found."])]
    body = [*list_of(sentences), fitted._repr_html_()]
    if len(fitted.candidates):
        body += ["<h2>Candidates</h2>", table_of(fitted.candidates)]
    numbers = structure[structure.kind != "filter"].drop(columns="sentence")
    if len(numbers):
        body += ["<h2>Sensors and states</h2>", table_of(numbers), *noise_pictures(structure)]
    if trials:
        found, problem = trials_of(fitted, model)
        if found is None:
            body += ["<h2>Rows and sensors</h2>", f"<p>{html.escape(problem)}</p>"]
        else:
            more = trial_sentences(fitted, found)
            sentences += more
            body += ["<h2>Rows and sensors</h2>", *list_of(more), *trial_pictures(fitted, found)]
    page = PAGE.format(
        title=html.escape(f"{fitted.model_name}: what was found"),
        body="\n".join(body),
        version=html.escape(__version__),
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_text(path, page)
    return sentences


def trials_of(fitted: Any, model: str | None) -> tuple[Trials | None, str]:
    """Return the trials; None, and why there are none, for images and too few rows."""
    module = fitted.trained.module
    recordings = recordings_of(module)
    if module.encoding is not None or recordings[0].obs.ndim != 2:
        return None, "Images have no sensors to leave out."
    try:
        return run_trials(recordings, sensors_of(fitted), model=model), ""
    except FitError as error:
        return None, f"No trials: {error}."


def sensors_of(fitted: Any) -> dict[str, list[int]]:
    """Return the components of the observations of each sensor; of unnamed ones, of each column."""
    schema, start = fitted.schema, 0
    groups = {name: key for key, names in schema.sensors for name in names}
    found: dict[str, list[int]] = {}
    for part in schema.observations:
        width = len(part.components())
        name = groups.get(part.names[0], ", ".join(part.names))
        found.setdefault(name, []).extend(range(start, start + width))
        start += width
    return found


def trial_sentences(fitted: Any, trials: Trials) -> list[str]:
    """Return what the trials show."""
    names, units = fitted.schema.components("states"), units_of(fitted)
    found = [
        f"Trials are made with {trials.model}, whose held-out NMSE is {trials.whole.nmse:.3g}.",
        most_helpful(trials),
    ]
    worth = sorted(trials.without.items(), key=lambda each: -each[1].nmse)
    for name, trial in worth:
        found.append(
            f"Without {name} the NMSE is {trial.nmse:.3g}, {trial.nmse / trials.whole.nmse:.3g} "
            "times that with all sensors."
        )
    for weak in trials.weak[:1]:
        unit = f" {units[names[weak.column]]}" if names[weak.column] in units else ""
        found.append(
            f"It is weakest where {names[weak.column]} is from {weak.low:.3g} to "
            f"{weak.high:.3g}{unit}: the squared error is {weak.ratio:.2g} times the mean there."
        )
    return found


def trial_pictures(fitted: Any, trials: Trials) -> list[str]:
    """Return pictures of sensors, rows and places."""
    names, units, found = fitted.schema.components("states"), units_of(fitted), []
    if trials.without:
        bars = {"all sensors": (trials.whole.nmse, trials.whole.error)}
        bars |= {f"without {key}": (each.nmse, each.error) for key, each in trials.without.items()}
        found.append(picture(bars_figure(bars, xlabel="NMSE"), "The error without each sensor"))
    if len(trials.curve) > 1:
        rows = [
            {"rows": n, "NMSE": each.nmse, "se": each.error, "model": trials.model}
            for n, each in trials.curve
        ]
        figure = curves(rows, x="rows", y="NMSE", by="model", se="se", log="xy")
        found.append(picture(figure, "The error with fewer rows"))
    places = []
    for column, name in enumerate(names[:MAX_DRAWN]):
        label = f"{name} [{units[name]}]" if name in units else name
        for z, error in mean_squares(trials.whole, column).tolist():
            places.append({"value": z, "RMSE": error, "state": label, "model": trials.model})
    figure = curves(places, x="value", y="RMSE", by="model", panel="state")
    return [*found, picture(figure, "The error at the values of each state")]


def noise_pictures(structure: Any) -> list[str]:
    """Return bars of the noises of one unit, for sensors and for states."""
    found = []
    for kind in ("sensor noise", "process noise"):
        rows = structure[structure.kind == kind]
        for unit, same in rows.groupby("unit", sort=False):
            bars = {
                column: (size, math.nan)
                for column, size in zip(same.column, same["size"], strict=True)
            }
            label = f"standard deviation [{unit}]" if unit else "standard deviation"
            found.append(picture(bars_figure(bars, xlabel=label), kind.capitalize()))
    return found


def units_of(fitted: Any) -> dict[str, str]:
    """Return the units of the columns that have one."""
    return (fitted.config.get("data") or {}).get("units") or {}


def picture(figure: Any, title: str) -> str:
    """Return a figure as HTML."""
    text = html.escape(title)
    return f'<h3>{text}</h3><img alt="{text}" src="{data_url(figure)}">'


def list_of(sentences: list[str]) -> list[str]:
    """Return sentences as an HTML list."""
    return ["<ul>", *(f"<li>{html.escape(each)}</li>" for each in sentences), "</ul>"]


def table_of(frame: Any) -> str:
    """Return a DataFrame as an HTML table."""
    return frame.to_html(
        index=False, border=0, na_rep="", float_format=lambda x: f"{x:.3g}", escape=True
    )
