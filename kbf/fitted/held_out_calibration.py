"""Calibration and monitor of a filter, learned from held-out parts of the training data.

Test data are not used. The recordings are cut into contiguous folds. The filter over the other
folds runs through each fold from its initial state, as it later runs through new data. A validation
part of the data replaces the folds.
"""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kbf.data.files import ColumnSchema
from kbf.data.windows import held_by
from kbf.evaluation.alarms import MOST_KEPT, Monitor, fit_tail, running_median
from kbf.evaluation.calibration import (
    Calibration,
    ForecastCalibration,
    HeldOut,
    calibrate,
    calibrate_constant,
    floor_of,
    floored,
    mahalanobis,
    sorted_scores,
)
from kbf.evaluation.score import score_smoothed
from kbf.fitted.checkpoint import BEST, LAST, Trained, load_own, rewrite_checkpoint
from kbf.fitted.held_out_forecasts import HeldOutForecasts
from kbf.fitted.held_out_runs import (
    FOLDS,
    MIN_ORIGINS,
    Held,
    Run,
    collected,
    end_of_budget,
    forecast_runs,
    held_out,
    keeps_no_memory,
    never_learned_from,
    run_through,
)
from kbf.recording import Recording, as_float, observed_pairs
from kbf.rkhs.linalg import evenly
from kbf.runtime import atomic_files

# Observations without a missing sensor that a monitor requires.
MIN_WHOLE_OBSERVATIONS = 10
# Most numbers in the observations that a monitor keeps; fewer observations are kept of large
# images.
MOST_NUMBERS = 2**22


def learn_calibration(run: Run) -> Calibration | None:
    """Return the calibration of the covariances of a run; None for filters without covariances."""
    if run.covariances is None:
        return None
    return calibrate_by(run.states, run.estimates, run.covariances, run.filters)


def calibrate_by(
    states: Float[Tensor, "m d"],
    means: Float[Tensor, "m d"],
    covariances: Float[Tensor, "m d d"],
    filters: Int[Tensor, " m"],
) -> Calibration:
    """Return the calibration by the `typical` steps of several filters."""
    kept = typical(states, means, covariances, filters)
    return calibrate(states[kept], means[kept], covariances[kept])


def typical(
    states: Float[Tensor, "m d"],
    means: Float[Tensor, "m d"],
    covariances: Float[Tensor, "m d d"],
    filters: Int[Tensor, " m"],
) -> Bool[Tensor, " m"]:
    """Return which steps are not of the worst or the best of at least `FOLDS` filters.

    Where one fold contains all recorded steps of a part of the state space, the filter over the
    other folds has no data there, but the filter over all recordings has. With the scores of all
    folds its credible regions would be far too wide.
    """
    kept, count = torch.ones(len(states), dtype=torch.bool), 1 + int(filters.max())
    if count >= FOLDS:
        scores = mahalanobis(states, means, floored(covariances, floor_of(covariances)))
        order = torch.stack([scores[filters == k].mean() for k in range(count)]).argsort()
        kept = (filters != order[0]) & (filters != order[-1])
    return kept


def typical_steps(run: Run) -> Bool[Tensor, " m"] | None:
    """Return the `typical` steps of a run; None for filters without covariances."""
    if run.covariances is None:
        return None
    return typical(run.states, run.estimates, run.covariances, run.filters)


def with_constant_covariance(run: Run) -> tuple[Run, Calibration, Bool[Tensor, " m"]]:
    """Return the run of a filter without covariances with zeros, and what calibrates these.

    All steps are used: which folds are typical depends on covariances.
    """
    calibration, zeros = calibrate_constant(run.states, run.estimates)
    kept = torch.ones(len(run.states), dtype=torch.bool)
    return run._replace(covariances=zeros), calibration, kept


def with_columns(
    calibration: Calibration | None,
    run: Run,
    schema: ColumnSchema,
    kept: Bool[Tensor, " m"] | None = None,
) -> tuple[Calibration | None, HeldOut]:
    """Return the calibration with `Calibration.column_scores`, and the scores of the columns.

    Args:
        calibration: of the covariances of the run; None for a filter without them.
        run: in the units of the data.
        schema: the columns of the states.
        kept: the steps that the calibration was learned from, see `typical`.
    """
    errors, rmse, nmse = schema.scores(run.states, run.estimates)
    if calibration is None or run.covariances is None or kept is None:
        return calibration, HeldOut(rmse, nmse, torch.full_like(rmse, torch.nan))
    columns = schema.decode(run.estimates, calibration.covariance(run.covariances))
    scores = errors.abs() / torch.stack([columns[f"{name}_std"] for name in schema.parts()], 1)
    # One filter, on a validation part: five contiguous blocks take the place of the folds.
    folds = run.filters
    if not folds.any():
        folds = (torch.arange(len(scores)) * FOLDS).div(len(scores), rounding_mode="floor")
    inside = torch.zeros_like(scores)
    for k in folds.unique().tolist():
        others = scores[(folds != k) & kept]
        others = others if len(others) else scores
        inside[folds == k] = (scores[folds == k] <= others.quantile(0.95, dim=0)).to(scores)
    calibration = calibration._replace(column_scores=sorted_scores(scores[kept]))
    return calibration, HeldOut(rmse, nmse, inside.mean(0))


@torch.no_grad()
def learn_monitor(
    run: Run,
    memory: list[Recording],
    *,
    rate: float = 1e-3,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Monitor | None:
    """Return a monitor, learned from a run through held-out recordings and the training recordings.

    The distances of training observations are measured to those of the other folds, since adjacent
    steps are nearer to each other than any new observation is to a recorded one.

    Args:
        run: of filters through recordings that they have not been fitted to.
        memory: the recordings, with observations as the innermost filter takes them.
        rate: false alarms per step and kind.
        dtype: of the filters. device: where they are.

    Returns:
        The monitor; None where fewer than `MIN_WHOLE_OBSERVATIONS` observations have all sensors,
        since distances are not defined then.

    Raises:
        ValueError: a rate that is not between 0 and 1, or fewer than ten steps.
    """
    if not 0 < rate < 1:
        raise ValueError(f"a monitor's false alarm rate must be between 0 and 1, got {rate}")
    own = held_by([len(s.states) for s in memory], FOLDS)
    pairs = zip(own, memory, strict=True)
    fold = torch.cat([h if s.mask is None else h[s.mask.cpu()] for h, s in pairs]).to(device)
    seen = observed_pairs(memory)[1].to(device)
    whole = seen.flatten(1).isfinite().all(1)
    if int(whole.sum()) < MIN_WHOLE_OBSERVATIONS <= len(seen):
        return None
    some = evenly(int(whole.sum()), 8 * MOST_KEPT)
    seen, fold = seen[whole][some], fold[whole][some]
    rows = evenly(len(seen), max(2, min(MOST_KEPT, MOST_NUMBERS // seen[0].numel())), device)
    flat = as_float(seen, dtype).flatten(1)
    same = fold[:, None] == fold[rows]
    distance = torch.cdist(flat, flat[rows]).masked_fill(same, torch.inf).amin(1)
    each = [scores.to(device, dtype) for scores in run.innovation_scores]
    scores = torch.cat(each)
    innovation = divergence = None
    if not scores.isnan().all():
        medians = torch.cat([running_median(scores) for scores in each])
        innovation, divergence = fit_tail(scores), fit_tail(medians)
    outside = fit_tail(distance[distance.isfinite()])
    alarm_rate = torch.tensor(rate, dtype=dtype, device=device)
    return Monitor(flat[rows], outside, innovation, divergence, alarm_rate)


def learn(
    trained: Trained, validation: Sequence[Recording] = (), *, rate: float = 1e-3, seed: int = 0
) -> Trained:
    """Return the trained model with a calibration and a monitor.

    Args:
        trained: model and filter.
        validation: recordings that the model has not been fitted to; without them it is fitted
            again without each fold.
        rate: of false alarms.
        seed: of filters that draw.

    Raises:
        ValueError: too few steps.
    """
    module, memory = trained.module, trained.module.memory.recordings()
    dtype = module.input_dtype if validation else module.model_dtype
    held: Held = [(trained.filter, list(validation))] if validation else never_learned_from(module)
    ahead: list[HeldOutForecasts | None] = []
    until = end_of_budget(module)
    run = run_through(held, seed=seed, dtype=dtype, device=module.device, ahead=ahead, until=until)
    constant = run.covariances is None
    if constant:
        run, calibration, kept = with_constant_covariance(run)
    else:
        calibration, kept = learn_calibration(run), typical_steps(run)
    used = run.filters if kept is None else run.filters[kept].unique()
    if not validation:  # the folds are in scaled units
        run, calibration = in_units_of_the_data(run, calibration, trained)
    calibration, scores = with_columns(calibration, run, module.column_schema(), kept)
    in_sample = not validation and module.how is not None and module.how.validation == 0
    if in_sample and keeps_no_memory(module):
        if calibration is not None:
            lacking = "no intervals" if constant else "covariances are not recalibrated"
            warnings.warn(
                f"{lacking}: the network was fitted to all recordings, on "
                "which its errors are too small (model.training.validation=0.15 or "
                "data.validation holds some out)",
                stacklevel=2,
            )
        calibration = scores = None
    forecasts = None
    if calibration is not None and not constant:
        forecasts = learn_forecasts(ahead, used, trained, scaled=not validation)
    monitor = learn_monitor(run, memory, rate=rate, dtype=module.model_dtype, device=module.device)
    return trained._replace(
        calibration=calibration, monitor=monitor, held_out=scores, forecasts=forecasts
    )


def learn_forecasts(
    ahead: list[HeldOutForecasts | None], used: Int[Tensor, " f"], trained: Trained, *, scaled: bool
) -> ForecastCalibration | None:
    """Return the calibration of forecasts; None where `forecast_runs` has none.

    Args:
        ahead: forecasts of each filter from held-out steps.
        used: the numbers of the filters that the estimates are calibrated by (`typical`).
        trained: the filter over all recordings.
        scaled: whether forecasts are in the units of the filter.
    """
    found = {}
    for horizon, run in forecast_runs(ahead).items():
        kept = torch.isin(run.filters, used)
        if int(kept.sum()) < MIN_ORIGINS or run.covariances is None:
            return None
        calibration = calibrate(run.states[kept], run.estimates[kept], run.covariances[kept])
        if scaled:
            run, calibration = in_units_of_the_data(run, calibration, trained)
        schema = trained.module.column_schema()
        found[horizon] = with_columns(calibration, run, schema, kept)[0]
    return ForecastCalibration.stack(found) if found else None


def learn_smoothed(trained: Trained, *, lag: int | None = None, seed: int = 0) -> Calibration:
    """Return the calibration of smoothed covariances, by smoothers over the other folds.

    Args:
        trained: a model whose filter has covariances and a smoother.
        lag: as of `kbf.filters.smoothing.smooth`. seed: of filters that draw.

    Raises:
        ValueError: too few steps, or a filter without a smoother or without covariances.
    """
    module = trained.module
    how: Any = {"dtype": module.model_dtype, "device": module.device}
    held = held_out(module.net, module.memory.recordings(), **how)
    run = collected(
        (part, score_smoothed(filter, part, lag=lag, seed=seed, **how)) for filter, part in held
    )
    calibration, kept = learn_calibration(run), typical_steps(run)
    run, calibration = in_units_of_the_data(run, calibration, trained)
    calibration = with_columns(calibration, run, module.column_schema(), kept)[0]
    if calibration is None:
        raise ValueError(f"{type(trained.filter).__name__} has no covariances to calibrate")
    return calibration


def in_units_of_the_data(
    run: Run, calibration: Calibration | None, trained: Trained
) -> tuple[Run, Calibration | None]:
    """Return a run and its calibration, both in scaled units, in the units of the data."""
    scaling = trained.module.scaling
    if scaling is None:
        return run, calibration
    scaling = copy.deepcopy(scaling).cpu()
    spreads = None if run.covariances is None else scaling.covariances(run.covariances)
    run = run._replace(
        states=scaling.states(run.states),
        estimates=scaling.states(run.estimates),
        covariances=spreads,
    )
    if calibration is not None:
        calibration = calibration._replace(floor=calibration.floor * scaling.z_scale.square())
    return run, calibration


def learn_and_keep(
    trained: Trained, directory: Path, validation: Sequence[Recording] = (), *, seed: int = 0
) -> Trained:
    """Call `learn` and write the result to the ``best.ckpt`` and ``last.ckpt`` of a run.

    The last checkpoint of a model that is trained by gradients gets a calibration of its own.
    """
    best, last = directory / BEST, directory / LAST
    trained = learn(trained, validation, seed=seed)
    rewrite_checkpoint(trained, best, best)
    if trained.module.learns:
        newest = load_own(trained.module, last, device=trained.module.device)
        rewrite_checkpoint(learn(newest, validation, seed=seed), last, last)
    else:
        atomic_files.copy(best, last)
    return trained
