"""Descriptions of the metrics and columns that commands print, also for ``kbf COMMAND --help``."""

import re
from typing import Any

# Diagnostics of a filter step.
DIAGNOSTICS = {
    "ess": "effective sample size: the number of equal weights with the same variance",
    "weight_sum": "sum of the weights of the memory's points",
    "negative_mass": "sum of the negative weights: an estimate may lie outside the memory's states",
    "negative": "absolute sum of the negative weights",
    "zero_weight_share": "share of the points of the memory whose density ratio is 0",
}

# Columns that ``kbf filter`` writes after recording, step and time; diagnostics depend on the
# model.
COLUMNS = {
    "NAME": "estimate of a column of the state, in its unit",
    "NAME_std": "its standard deviation (covariance=full: cov_i_j too)",
    **DIAGNOSTICS,
    "alarm": "out_of_distribution (unlike all training observations), innovation_outlier "
    "(not as predicted), diverged (re-initialised at the prior), or empty",
}

# Metrics of ``kbf train`` and ``kbf evaluate``; K stands for a number.
METRICS = {
    "filter": "the filter that is used; another name than the model's is model selection's choice",
    "n_train": "steps in the training part of this data",
    "n_test": "steps in its test part",
    "test.mse": "squared error, summed over the state's components, mean over the steps",
    "test.mse_settled": "test.mse without the first ten steps of each recording",
    "test.mse_se": "its standard error over recordings",
    "test.floor": "Bayes-optimal error: that of the best possible filter, with the true model",
    "test.excess": "excess error: test.mse relative to test.floor, minus 1",
    "test.nmse": "squared error over the variance of the state, mean over components; "
    "1 is the error of a constant estimate",
    "test.nmse.K": "test.nmse of component K",
    **{f"test.{name}": f"mean {meaning}" for name, meaning in DIAGNOSTICS.items()},
    "test.rejected": "share of observations rejected as implausible under the prediction",
    "test.coverage_K": "share of states inside their K % credible regions; K % if calibrated",
    "test.crps": "continuous ranked probability score, in the state's unit; smaller is better",
    "test.energy_score": "energy score: the same for all components jointly",
    "test.nll": "negative log likelihood of the state per step; smaller is better",
    "test.out_of_distribution_alarms": "share of out-of-distribution observations",
    "test.innovation_alarms": "share of innovation outliers",
    "test.diverged": "share of steps at which the filter had diverged",
    "test.mse_smoothed": "test.mse of smoothed estimates, which also use later observations",
    "test.smoothing_floor": "Bayes-optimal error of a smoother",
    "test.mse_ahead_K": "error of predictions K steps ahead",
    "test.floor_ahead_K": "Bayes-optimal error K steps ahead",
    "baseline.NAME.nmse": "test.nmse of a baseline, fitted to the same training part",
    "validation.mse": "error on the validation part, by which training is stopped early",
    "held_out.mse": "error on the end of the training part (hold_out) of a fit to the rest",
    "epochs": "passes over the training data",
}

# Metrics that are printed as percentages; files and loggers hold the number.
PERCENTAGES = re.compile(
    r"test\.(excess|zero_weight_share|rejected|out_of_distribution_alarms|innovation_alarms|diverged|"
    r"coverage_.*)"
)


def description_of(name: str) -> str:
    """Return the description of a metric; empty where there is none.

    The suffixes ``_raw`` (before recalibration) and ``_smoothed`` are explained.

    >>> description_of("test.nmse.0")
    'test.nmse of component 0'
    >>> description_of("test.crps_raw")
    'test.crps before recalibration'
    """
    name = re.sub(r"^baseline\.\w+\.", "baseline.NAME.", name)
    if name in METRICS:
        return METRICS[name]
    if name.endswith("_raw"):
        return f"{name.removesuffix('_raw')} before recalibration"
    if name.startswith("test.coverage_") and name.endswith("_smoothed"):
        return f"{name.removesuffix('_smoothed')} of smoothed estimates"
    found = re.fullmatch(r"(.*[._])(\d+)", name)
    return METRICS.get(f"{found[1]}K", "").replace("K", found[2]) if found else ""


def formatted(name: str, value: Any) -> str:
    """Format a metric with four significant digits; shares and the excess error as percentages.

    >>> formatted("test.excess", 0.0561), formatted("test.mse", 0.0561234), formatted("epochs", 3)
    ('5.6 %', '0.05612', '3')
    """
    if not isinstance(value, float):
        return str(value)
    return f"{100 * value:.1f} %" if PERCENTAGES.fullmatch(name) else f"{value:.4g}"
