"""What the numbers mean that commands print: told beside them, and in ``kbf COMMAND --help``."""

from __future__ import annotations

import re
from typing import Any

DIAGNOSTICS = {
    "ess": "effective sample size: so many points of equal weight would say as much",
    "weight_sum": "sum of the weights of the memory's points",
    "negative_mass": "sum of the negative weights: far below 0 an estimate may lie far from all recorded states",
    "negative": "size of the sum of the negative weights",
    "clipped": "share of the memory's points that do not count: their density ratio, prediction to recording, is 0",
}
"""What filters tell of a step."""

COLUMNS = {
    "NAME": "estimate of a column of the state, in its unit",
    "NAME_std": "its standard deviation (covariance=full: cov_i_j too)",
    **DIAGNOSTICS,
    "alarm": "novel (unlike all training observations), surprise (not as predicted), lost (begins anew at the prior), or empty",
}
"""What ``kbf filter`` writes behind sequence, step and time; which diagnostics there are depends on the model."""

METRICS = {
    "n_train": "steps in the training part of this data",
    "n_test": "steps in its test part",
    "test.mse": "squared error, summed over the state's components, mean over the steps",
    "test.mse_se": "its standard error, from sequence to sequence",
    "test.floor": "the error of the best possible filter, which knows the true model",
    "test.excess": "how far test.mse is above test.floor",
    "test.nmse": "squared error over the variance of the state, mean over components: 1 is what their means alone have",
    "test.nmse.K": "that of component K",
    **{f"test.{name}": f"mean {meaning}" for name, meaning in DIAGNOSTICS.items()},
    "test.rejected": "share of observations that were not used, as the prediction makes them impossible",
    "test.coverage_K": "share of states inside their regions of K %: about K % if the covariances are right",
    "test.crps": "continuous ranked probability score, in the state's unit: smaller is better",
    "test.energy_score": "the same for all components together",
    "test.nll": "minus the log likelihood of a state, a step: smaller is better",
    "test.novelty_alarms": "share of observations unlike all of training",
    "test.surprise_alarms": "share of observations that were not as predicted",
    "test.lost": "share of steps at which the track was found lost",
    "test.mse_smoothed": "test.mse with hindsight: given later observations too",
    "test.smoothing_floor": "the error of the best possible smoother",
    "test.mse_ahead_K": "error of a prediction K steps ahead",
    "test.floor_ahead_K": "the least possible error K steps ahead",
    "validation.mse": "error on the part of the training data by which training was stopped",
    "held_out.mse": "error on the last part of the training data (hold_out), of a fit without it",
    "epochs": "passes over the training data",
}
"""Figures of ``kbf train`` and ``kbf evaluate``, K for a number. ``_raw``: before recalibration, ``_smoothed``: with hindsight."""

SHARE = re.compile(
    r"test\.(excess|clipped|rejected|novelty_alarms|surprise_alarms|lost|coverage_.*)"
)
"""Figures that are printed as percentages; files and loggers keep the number."""


def meaning_of(name: str) -> str:
    """What a figure of ``kbf train`` or ``kbf evaluate`` is; empty where nobody said.

    >>> meaning_of("test.nmse.0")
    'that of component 0'
    >>> meaning_of("test.crps_raw")
    'test.crps before recalibration'
    """
    if name in METRICS:
        return METRICS[name]
    if name.endswith("_raw"):
        return f"{name.removesuffix('_raw')} before recalibration"
    if name.startswith("test.coverage_") and name.endswith("_smoothed"):
        return f"{name.removesuffix('_smoothed')} with hindsight"
    found = re.fullmatch(r"(.*[._])(\d+)", name)
    return METRICS.get(f"{found[1]}K", "").replace("K", found[2]) if found else ""


def shown(name: str, value: Any) -> str:
    """A figure as text, with four significant digits; shares and the excess as percentages.

    >>> shown("test.excess", 0.0561), shown("test.mse", 0.0561234), shown("epochs", 3)
    ('5.6 %', '0.05612', '3')
    """
    if not isinstance(value, float):
        return str(value)
    return f"{100 * value:.1f} %" if SHARE.fullmatch(name) else f"{value:.4g}"
