"""What the error of a filter depends on: rows, sensors, and the place in the state space.

A quick filter is fitted again and again to parts of the training recordings and run through the
blocks that it has not been fitted to, as in `kbf.filters.selection.cross_validation`. The filter
that was selected may have a smaller error; differences between sensors and between numbers of rows
are similar.
"""

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.data.windows import take, whole_folds, without
from kbf.filters.selection.auto import BASELINES, FOLDS, LEARNED
from kbf.filters.selection.cross_validation import (
    blocks_of,
    deviation,
    nmse_of,
    run_blocks,
    scored_states,
)
from kbf.filters.selection.drift import last_steps
from kbf.recording import Recording
from kbf.runtime.errors import FitError

log: logging.Logger = logging.getLogger(__name__)

# Models that trials can be made with, and those that are compared where none is named.
MODELS: dict[str, Callable[[int], Any]] = {**BASELINES, **LEARNED}
QUICK = ("kalman", "kalman_velocity", "window_ridge")
# Shares of the rows that the learning curve has.
SHARES = (0.25, 0.5, 1.0)
# Rows that trials require.
MIN_ROWS = 100
# Parts of equal size that the values of a state are cut into, rows that each must have, and the
# ratio of its squared error to the mean from which it is a weak region.
PARTS_OF_STATES = 5
MIN_ROWS_OF_PART = 20
MIN_RATIO_OF_WEAK = 1.5
# Share of the error by which twice the rows, or a sensor, must lower it to be worth having, and
# standard errors of this decrease.
MIN_GAIN = 0.05
MIN_STD_ERRORS = 2.0
# NMSE below which nothing is to be gained.
MIN_NMSE = 1e-3


class Trial(NamedTuple):
    """Held-out results of a filter.

    Attributes:
        states: ``m d``. residuals: ``m d``, z - m. scores: the NMSE of each block.
    """

    states: Tensor
    residuals: Tensor
    scores: Tensor

    @property
    def nmse(self) -> float:
        """The mean over blocks."""
        return float(self.scores.mean())

    @property
    def error(self) -> float:
        """The standard error of `nmse`."""
        return deviation(self.scores) or math.nan


class Weak(NamedTuple):
    """A region in which the error is large: between two values of a component of the state.

    Attributes:
        column: the component. low, high: its values. ratio: of the mean squared error there to
            that of all rows.
    """

    column: int
    low: float
    high: float
    ratio: float


class Trials(NamedTuple):
    """Results of all trials.

    Attributes:
        model: the name of the filter.
        whole: with all sensors and rows.
        curve: rows of training, and the trial with so many.
        without: trials without the sensor of each name; empty with a single sensor.
        weak: the weakest region of each component that has one, the weakest first.
    """

    model: str
    whole: Trial
    curve: list[tuple[int, Trial]]
    without: dict[str, Trial]
    weak: list[Weak]


def run_trials(
    recordings: list[Recording], sensors: dict[str, list[int]], *, model: str | None = None
) -> Trials:
    """Make the trials.

    Args:
        recordings: with states ``T d`` and observations ``T q``.
        sensors: the columns of the observations that each sensor has.
        model: a name of `MODELS`; None takes the best of `QUICK`.

    Raises:
        ValueError: an unknown model.
        FitError: too few rows.
    """
    if model is not None and model not in MODELS:
        raise ValueError(f"model={model} is none of {', '.join(MODELS)}")
    if sum(len(each.states) for each in recordings) < MIN_ROWS:
        raise FitError(f"trials require {MIN_ROWS} rows")
    scale = torch.cat([each.states for each in recordings]).var(0, correction=0)

    def trial(name: str, share: float = 1.0, left_out: str | None = None) -> Trial:
        """Return the trial with a share of the rows and without a sensor."""
        what = f"{name}, {100 * share:.0f} % of the rows"
        log.info("%s%s", what, f", without {left_out}" if left_out else "")
        kept = [k for key, columns in sensors.items() if key != left_out for k in columns]
        these = [each._replace(obs=each.obs[:, sorted(kept)]) for each in recordings]
        return held_out(MODELS[name], these, scale, share)

    names = QUICK if model is None else (model,)
    results: dict[str, Trial] = {}
    reasons = []
    for name in names:
        try:
            results[name] = trial(name)
        except FitError as error:
            reasons.append(f"{name}: {error}")
    if not results:
        raise FitError(f"no filter can be fitted for trials ({'; '.join(reasons)})")
    best = min(results, key=lambda name: results[name].nmse)
    whole = results[best]
    total = sum(len(each.states) for each in recordings) * (FOLDS - 1) // FOLDS
    curve = []
    for share in SHARES:
        if share * total >= MIN_ROWS:
            found = whole if share == 1.0 else possible(trial, best, share)
            curve += [] if found is None else [(round(share * total), found)]
    without_each = {}
    for sensor in sensors if len(sensors) > 1 else ():
        found = possible(trial, best, 1.0, sensor)
        if found is not None:
            without_each[sensor] = found
    return Trials(best, whole, curve, without_each, weak_regions(whole))


def possible(trial: Callable[..., Trial], *settings: Any) -> Trial | None:
    """Return a trial, None if the filter cannot be fitted so."""
    try:
        return trial(*settings)
    except FitError:
        return None


def held_out(
    make: Callable[[int], Any], recordings: list[Recording], scale: Tensor, share: float
) -> Trial:
    """Fit a model without each fold, to the last share of the rest; run it through the fold.

    Raises:
        FitError: the model cannot be fitted, or an estimate is not finite.
    """
    lengths = [len(each.states) for each in recordings]
    missing = any(not bool(each.obs.isfinite().all()) for each in recordings)
    states, residuals, scores = [], [], []
    for fold in whole_folds(lengths, FOLDS):
        rest, part = without(recordings, fold), take(recordings, fold)
        steps = sum(len(each.states) for each in rest)
        rest = last_steps(rest, round(share * steps)) if share < 1 else rest
        net = make(0).double()
        if missing and hasattr(net, "allow_missing_sensors"):
            net.allow_missing_sensors = True
        net.prepare(rest)
        for block, left in zip(blocks_of(part), run_blocks(net.fit(rest), part), strict=True):
            if not bool(left.isfinite().all()):
                raise FitError("an estimate on a held-out block is not finite")
            states.append(scored_states(block))
            residuals.append(left)
            scores.append(nmse_of(left, scale))
    return Trial(torch.cat(states), torch.cat(residuals), torch.stack(scores))


def weak_regions(trial: Trial) -> list[Weak]:
    """Return the weakest of `PARTS_OF_STATES` parts of each component, where its error is large."""
    squares = trial.residuals.square()
    mean = squares.mean(0)
    error = (squares / mean.clamp_min(1e-300))[:, mean > 0].mean(1)
    found = []
    for column, z in enumerate(trial.states.mT):
        cuts = z.quantile(torch.linspace(0, 1, PARTS_OF_STATES + 1, dtype=z.dtype))
        parts = []
        for low, high in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            inside = (z >= low) & (z <= high)
            if int(inside.sum()) >= MIN_ROWS_OF_PART and high > low:
                ratio = float(error[inside].mean() / error.mean())
                parts.append(Weak(column, low, high, ratio))
        worst = max(parts, key=lambda each: each.ratio, default=None)
        if worst is not None and worst.ratio >= MIN_RATIO_OF_WEAK:
            found.append(worst)
    return sorted(found, key=lambda each: -each.ratio)


def gain_of(before: Trial, after: Trial) -> tuple[float, bool]:
    """Return the share by which an error falls, and whether it is worth having.

    The blocks of both trials are the same, so that their differences are compared.
    """
    gain = 1 - after.nmse / before.nmse if before.nmse > 0 else 0.0
    if len(before.scores) != len(after.scores):
        return gain, gain > MIN_GAIN
    error = deviation(before.scores - after.scores) or math.inf
    return gain, gain > MIN_GAIN and before.nmse - after.nmse > MIN_STD_ERRORS * error


def most_helpful(trials: Trials) -> str:
    """Return what would lower the error most: more rows, another sensor, or nothing.

    More rows help if the error decreases significantly from half of the rows to all rows. Another
    sensor helps if the present sensor with the median decrease of the error does.
    """
    if trials.whole.nmse < MIN_NMSE:
        return f"The NMSE is {trials.whole.nmse:.2g}: no improvement is expected."
    rows, worth_rows = 0.0, False
    if len(trials.curve) > 1:
        rows, worth_rows = gain_of(trials.curve[-2][1], trials.curve[-1][1])
    each = sorted(gain_of(trial, trials.whole) for trial in trials.without.values())
    sensor, worth_sensor = each[(len(each) - 1) // 2] if each else (0.0, False)
    if worth_rows and rows >= sensor:
        return f"More rows would help most: the last doubling lowered the error by {rows:.0%}."
    if worth_sensor:
        return (
            f"Another sensor would help most: a sensor of these lowers the error by {sensor:.0%} "
            f"(the median), twice the rows by {max(rows, 0.0):.0%}."
        )
    if worth_rows:
        return f"More rows would help: the last doubling lowered the error by {rows:.0%}."
    if len(trials.curve) > 1 and not trials.without:
        return (
            "More rows would not help: the last doubling lowered the error by "
            f"{max(rows, 0.0):.0%}; with a single sensor the worth of another one is not known."
        )
    if len(trials.curve) < 2:
        return "There are too few rows to find out what would help."
    return (
        "Neither more rows nor another sensor of this kind would help much: the last doubling "
        f"lowered the error by {max(rows, 0.0):.0%}."
    )


def mean_squares(trial: Trial, column: int) -> Float[Tensor, "p 2"]:
    """Return the middle of each of `PARTS_OF_STATES` parts of a component, and its RMSE there."""
    z, left = trial.states[:, column], trial.residuals[:, column]
    order = z.argsort()
    rows = [
        torch.stack([z[part].mean(), left[part].square().mean().sqrt()])
        for part in order.tensor_split(PARTS_OF_STATES)
        if len(part)
    ]
    return torch.stack(rows)
