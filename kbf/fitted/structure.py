"""`structure_of`: what the training recordings of a filter show, with a sentence for each finding.

The findings are properties of the recordings (`kbf.fitted.sensor_findings`,
`kbf.fitted.move_findings`): they are the same whichever filter was selected.
"""

import math
from collections.abc import Callable
from itertools import count
from typing import Any

from kbf.filters.gaussian.map_sources import counts_in
from kbf.filters.selection.auto import ModelSelection
from kbf.filters.selection.drift import last_steps
from kbf.fitted.checkpoint import Trained
from kbf.fitted.model import FittedModel, compared_by
from kbf.fitted.move_findings import move_findings
from kbf.fitted.sensor_findings import MIN_RESIDUALS, Finding, sensor_findings
from kbf.recording import Recording
from kbf.runtime.errors import FitError, fit_errors

# Rows that are examined; of more, the last ones.
MAX_ROWS = 5000
# Columns of the DataFrame.
COLUMNS = ("kind", "column", "share", "steps", "size", "unit", "sentence")
# Kinds that every recording has; the others are reported only where they are found.
ALWAYS = ("filter", "sensor noise", "process noise")
# Unit of counts, whose square roots are examined (`kbf.filters.gaussian.count_maps`).
UNIT_OF_COUNTS = "2 sqrt(count)"


def structure_of(trained: Trained) -> Any:
    """Return the findings about the training recordings, a DataFrame with the columns `COLUMNS`.

    The kinds are ``constant``, ``late``, ``held``, ``sticking``, ``failing``, ``drift``, ``gain``,
    ``sensor noise`` (of sensors); ``regime``, ``jumps``, ``process noise`` (of states); and
    ``filter``, the reason why the filter was selected. ``share`` is that of the steps, ``steps``
    the mean duration or the delay, ``size`` a standard deviation in ``unit``. Images have no
    findings about sensors, and recordings of fewer than
    `kbf.fitted.sensor_findings.MIN_RESIDUALS` rows none at all.
    """
    import pandas as pd

    module: FittedModel = trained.module
    schema, data = module.column_schema(), module.config.get("data") or {}
    units, step = data.get("units") or {}, data.get("time_step")
    recordings = recordings_of(module)
    rows: list[dict[str, Any]] = [row_of(Finding("filter", -1), "", "", why_selected(module))]
    if sum(len(each.states) for each in recordings) < MIN_RESIDUALS:
        return pd.DataFrame(rows, columns=list(COLUMNS))
    states = schema.components("states")
    if module.encoding is None and recordings[0].obs.ndim == 2:
        sensors = schema.components("observations")
        counts = counts_in(recordings).tolist()
        for each in found_by(sensor_findings, recordings):
            name = sensors[each.column]
            unit = UNIT_OF_COUNTS if counts[each.column] else units.get(name, "")
            rows.append(row_of(each, name, unit, sentence_of(each, name, unit, step)))
    numbers = count(1)
    for each in found_by(move_findings, recordings):
        name = states[each.column] if each.column >= 0 else f"mode {next(numbers)}"
        unit = units.get(name, "")
        rows.append(row_of(each, name, unit, sentence_of(each, name, unit, step)))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def found_by(
    detector: Callable[[list[Recording]], list[Finding]], recordings: list[Recording]
) -> list[Finding]:
    """Return the findings; none where the recordings do not determine the regressions."""
    try:
        with fit_errors():
            return detector(recordings)
    except FitError:
        return []


def row_of(found: Finding, name: str, unit: str, sentence: str) -> dict[str, Any]:
    """Return a row of the DataFrame."""
    numbers = {"share": found.share, "steps": found.steps, "size": found.size}
    return {"kind": found.kind, "column": name, **numbers, "unit": unit, "sentence": sentence}


def recordings_of(module: FittedModel) -> list[Recording]:
    """Return the last `MAX_ROWS` rows of the training recordings, in the units of the data.

    Controls, and encodings of images, are in those of the filter.
    """
    found = []
    for each in last_steps(module.memory.recordings(), MAX_ROWS):
        obs, scaling = each.obs.double(), module.scaling
        if scaling is not None and len(scaling.x_mean) and obs.ndim == 2:
            obs = scaling.unscaled("x", obs)
        states = module.in_units_of_the_data(each.states.double())
        controls = None if each.controls is None else each.controls.double().cpu()
        mask = None if each.mask is None else each.mask.cpu()
        found.append(Recording(states.cpu(), obs.cpu(), mask, controls))
    return found


def sentence_of(found: Finding, name: str, unit: str, step: float | None) -> str:
    """Return what was found as a sentence.

    >>> sentence_of(Finding("late", 0, steps=2.0), "range", "m", 0.5)
    'range is late by 2 steps (1 s).'
    """
    share = f"{100 * found.share:.3g} %"
    size = f"{found.size:.3g} {unit}".rstrip()
    if math.isfinite(found.steps):
        count = f"{found.steps:.0f} step{'' if round(found.steps) == 1 else 's'}"
        steps = count if step is None else f"{count} ({found.steps * step:.3g} s)"
    else:
        steps = "an unknown number of steps"
    return {
        "constant": f"{name} is constant: it contains no information about the state.",
        "late": f"{name} is late by {steps}.",
        "held": f"{name} repeats its last reading in {share} of the rows: a new one arrives every "
        f"{steps}.",
        "sticking": f"{name} sticks in {share} of the rows, for {steps} at a time.",
        "failing": f"{name} fails in {share} of the rows, for {steps} at a time; failed readings "
        f"are off by {size}.",
        "drift": f"{name} drifts: errors of {size} are correlated over {steps}.",
        "gain": f"the gain of {name} varies slowly: errors in proportion to its reading have a "
        f"standard deviation of {size}.",
        "sensor noise": f"the noise of {name} has a standard deviation of {size}.",
        "regime": f"{name} has {share} of the steps and lasts for {steps} at a time.",
        "jumps": f"{name} jumps in {share} of the steps, by {size}.",
        "process noise": f"the noise of {name} in a step has a standard deviation of {size}.",
    }[found.kind]


def why_selected(module: FittedModel) -> str:
    """Return which filter was selected and why, in one sentence."""
    net: Any = module.net
    name = str(module.config["model"].get("name", type(net).__name__))
    known = {key: float(nmse) for key, nmse, *_ in compared_by(module) if nmse is not None}
    if known:
        used = net.used() if isinstance(net, ModelSelection) else [name]
        return sentence_of_selection(used, known)
    return f"{name} is the filter; no other one was compared with it."


def sentence_of_selection(used: list[str], scores: dict[str, float]) -> str:
    """Return why a filter was selected among candidates with these NMSE on held-out blocks.

    >>> sentence_of_selection(["kalman"], {"kalman": 0.02, "mean": 1.0})
    'kalman has the least held-out NMSE, 0.02; that of the next of 2 candidates, mean, is 1.'
    """
    alone = {key: score for key, score in scores.items() if key != "average"}
    if len(used) > 1:
        least, first = min((score, key) for key, score in alone.items())
        own = scores.get("average")  # checkpoints may keep the NMSE of single models only
        what = "is the filter" if own is None else f"has the held-out NMSE {own:.3g}"
        return (
            f"the average of {' and '.join(used)} {what}; "
            f"the best of {len(alone)} candidates alone, {first}, has {least:.3g}."
        )
    others = sorted((score, key) for key, score in alone.items() if key not in used)
    if not others:
        return f"{' + '.join(used)} is the only filter that could be compared."
    best, other = others[0]
    own = scores.get(used[0])
    if own is None:
        return f"{used[0]} is the filter; it was not compared."
    least, rank = ("least ", "next") if own <= best else ("", "best")
    return (
        f"{used[0]} has the {least}held-out NMSE, {own:.3g}; that of the {rank} of "
        f"{len(alone)} candidates, {other}, is {best:.3g}."
    )
