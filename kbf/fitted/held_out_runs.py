"""Runs of filters through recordings that they have not been fitted to.

The recordings are cut into contiguous folds. The filter over the other folds runs through each fold
from its initial state, as it later runs through new data.
"""

import logging
import math
import time
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Shaped
from torch import Tensor

from kbf.data.windows import first_steps, folds, hold_out, piece, take, without
from kbf.evaluation.alarms import innermost, innovation_score
from kbf.evaluation.score import Score, score
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.protocols import Filter, FilterModel
from kbf.filters.selection.auto import ModelSelection
from kbf.fitted.held_out_forecasts import HORIZONS, HeldOutForecasts, Origins, forecasts
from kbf.fitted.model import FittedModel
from kbf.recording import Recording

log: logging.Logger = logging.getLogger(__name__)

FOLDS = 5
# Most steps that are filtered. Of larger recordings these are the first steps of each fold.
MOST_STEPS = 5000
# Steps of each recording that are filtered in any case: recordings share a batch, so that they cost
# little, and the first steps alone are not representative.
MIN_STEPS_OF_EACH = 300
# Steps of each recording that are filtered even if the time is over, and those by which a filter is
# timed.
MIN_STEPS_IN_TIME = 150
STEPS_OF_TRIAL = 10
# Origins of forecasts that a calibration requires, and each filter at least.
MIN_ORIGINS = 20
MIN_ORIGINS_OF_EACH = 10
# Seconds that the forecasts of a filter may take even if the time is over.
SECONDS_OF_FORECASTS = 1.0
# Filters, each with recordings that it has not been fitted to.
Held = Iterable[tuple[Filter[Any], list[Recording]]]


class InnovationScore(NamedTuple):
    """The `kbf.evaluation.alarms.innovation_score` of a step, ``b``.

    NaN without an observation, and for filters without a kernel.
    """

    score: Tensor


class Run(NamedTuple):
    """Results of filters on recordings that they have not been fitted to.

    Attributes:
        states: ``m d``, all recordings concatenated, with their estimates ``m d`` and covariances
            ``m d d`` (None for filters without).
        innovation_scores: ``T`` for each recording.
        filters: ``m``, the index of the filter of each step.
    """

    states: Tensor
    estimates: Tensor
    covariances: Tensor | None
    innovation_scores: list[Tensor]
    filters: Tensor


def held_out(
    net: FilterModel,
    memory: list[Recording],
    count: int = FOLDS,
    most: int = MOST_STEPS,
    *,
    until: float = math.inf,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Held:
    """Yield for each of ``count`` folds the filter over the others, fitted on demand, and the fold.

    A model that has cross-validated its candidates (`kbf.filters.selection.auto.ModelSelection`)
    provides these filters itself.

    Args:
        net: the model. memory: the recordings.
        count: number of folds. most: steps of all folds.
        until: a `time.perf_counter`. Of slow filters fewer steps are filtered, so that all folds
            end before, but at least `MIN_STEPS_IN_TIME` of each recording.
        dtype, device: with which a filter is timed, as of `kbf.evaluation.score.score`.

    Raises:
        ValueError: too few steps for the folds, or for the model without one of them.
    """
    seconds = 0.0
    if isinstance(net, ModelSelection) and net.held_out_filters:
        pairs = iter(net.held_out_filters)
        count = len(net.held_out_filters)
    else:
        parts = folds([len(s.states) for s in memory], count)
        pairs = ((net.fit(without(memory, part)), take(memory, part)) for part in parts)
    for k, (filter, fold) in enumerate(pairs, 1):
        log.info("errors on held-out steps: fold %d of %d", k, count)
        steps = -(-most // count)
        kept = first_steps(fold, max(steps, min(MIN_STEPS_OF_EACH, steps) * len(fold)))
        began = time.perf_counter()
        if until < math.inf:
            seconds = seconds or seconds_of_a_step(filter, kept, dtype, device)
            longest = (until - began) / (1 + count - k) / seconds
            kept = [piece(s, 0, max(MIN_STEPS_IN_TIME, int(longest))) for s in kept]
        yield filter, kept
        seconds = (time.perf_counter() - began) / max(len(s.states) for s in kept)


def seconds_of_a_step(
    filter: Filter[Any],
    recordings: list[Recording],
    dtype: torch.dtype,
    device: torch.device | str,
) -> float:
    """Return how long a filter takes for a step of all recordings at once."""
    few = [piece(s, 0, STEPS_OF_TRIAL) for s in recordings]
    began = time.perf_counter()
    score(filter, few, dtype=dtype, device=device, covariances=True, watch=watch_innovation)
    return (time.perf_counter() - began) / max(len(s.states) for s in few)


def never_learned_from(module: FittedModel) -> Held:
    """Return `held_out`, within the budget; without a memory, the steps that training held out.

    No fold can be removed from a network that is the filter itself.
    """
    memory, how = module.memory.recordings(), module.how
    if how is not None and how.validation > 0 and keeps_no_memory(module):
        return [(module.net.eval(), hold_out(memory, how.validation)[1])]
    how: Any = {"dtype": module.model_dtype, "device": module.device}
    return held_out(module.net, memory, until=end_of_budget(module), **how)


def end_of_budget(module: FittedModel) -> float:
    """Return the end of the budget (a `time.perf_counter`); infinite without one."""
    compared = isinstance(module.net, ModelSelection) and module.net.held_out_filters
    return module.net.until if compared else math.inf


def keeps_no_memory(module: FittedModel) -> bool:
    """Return whether the network is the filter itself, so that no fold can be removed from it."""
    return module.net.fit(module.memory.recordings()) is module.net


def run_through(
    held: Held,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
    ahead: list[HeldOutForecasts | None] | None = None,
    until: float = math.inf,
) -> Run:
    """Run each filter through its recordings.

    Args:
        held: the filters and their recordings.
        seed, dtype, device: as of `kbf.evaluation.score.score`.
        ahead: a list to which forecasts of each filter are appended.
        until: a `time.perf_counter`. Forecasts of each of `FOLDS` filters take half of its share
            of the time that is left until then, or `SECONDS_OF_FORECASTS`. If they are too slow for
            `MIN_ORIGINS_OF_EACH` in this time, this filter and the following ones make none.
    """
    how: Any = {"seed": seed, "dtype": dtype, "device": device}

    def scores() -> Iterator[tuple[list[Recording], Score]]:
        of_a_forecast, affordable = 0.0, True  # seconds
        for filter, recordings in held:
            origins = Origins(watch_innovation, recordings)
            watch = origins if ahead is not None and affordable else watch_innovation
            began = time.perf_counter()
            found = score(filter, recordings, **how, covariances=True, watch=watch)
            seconds = time.perf_counter() - began
            yield recordings, found
            if ahead is not None:
                steps = sum(len(s.states) for s in recordings)
                of_a_forecast = of_a_forecast or seconds / steps * HORIZONS[-1]
                began = time.perf_counter()
                share = (until - began) / max(1, FOLDS - len(ahead)) / 2
                most = max(SECONDS_OF_FORECASTS, share) / of_a_forecast
                made = None
                if affordable and most < MIN_ORIGINS_OF_EACH:
                    affordable = False
                    warnings.warn(
                        "the budget ended before the intervals of forecasts were calibrated: they "
                        "may be too narrow (a larger budget, or a faster model)",
                        stacklevel=2,
                    )
                if affordable:
                    made = forecasts(filter, recordings, origins, most=most, **how)
                if made is not None:
                    of_a_forecast = (time.perf_counter() - began) / made.states.shape[1]
                ahead.append(made)

    return collected(scores())


def forecast_runs(ahead: list[HeldOutForecasts | None]) -> dict[int, Run]:
    """Return the forecasts of several filters as a `Run` for each horizon, of the same origins.

    The longest horizon is the longest of which at least half the forecasts end within their
    recordings. Empty for filters without covariances, and with fewer than `MIN_ORIGINS` origins.
    """
    found = [(k, each) for k, each in enumerate(ahead) if each is not None]
    if not found:
        return {}
    states = torch.cat([each.states for _, each in found], 1)
    means = torch.cat([each.means for _, each in found], 1)
    spreads = [each.covariances for _, each in found if each.covariances is not None]
    if not spreads:
        return {}
    covariances = torch.cat(spreads, 1)
    filters = torch.cat([torch.full((each.states.shape[1],), k) for k, each in found])
    # Whether a horizon and all before it are known, of each origin.
    known = states.isfinite().all(-1).int().cumprod(0).bool()
    most = int((known.double().mean(1) >= 0.5).sum())
    origins = known[max(most - 1, 0)]
    if int(origins.sum()) < MIN_ORIGINS:
        return {}
    return {
        HORIZONS[h]: Run(
            states[h, origins], means[h, origins], covariances[h, origins], [], filters[origins]
        )
        for h in range(most)
    }


def collected(scores: Iterable[tuple[list[Recording], Score]]) -> Run:
    """Return the results of several filters as one `Run`."""
    states, means, covariances, innovations, filters = [], [], [], [], []
    for k, (recordings, found) in enumerate(scores):
        states += [s.states.double().cpu() for s in recordings]
        means += found.estimates
        covariances += found.covariances or []
        innovations += [each.score for each in found.watched]
        filters += [torch.full((len(each),), k) for each in found.estimates]
    together = torch.cat(covariances) if covariances else None
    return Run(torch.cat(states), torch.cat(means), together, innovations, torch.cat(filters))


def watch_innovation(
    filter: Filter[Any],
    predicted: Any,
    obs: Shaped[Tensor, "b *x"],
    *,
    last: InnovationScore | None = None,
    mask: Tensor | None = None,
) -> InnovationScore:
    """Return innovation scores; a `kbf.evaluation.score.Watch`."""
    inner, x = innermost(filter, obs)
    unknown = torch.full((len(obs),), torch.nan, device=obs.device)
    if not isinstance(inner, KernelBayesFilter):
        return InnovationScore(unknown)
    found = innovation_score(inner, predicted.weights, x)
    return InnovationScore(found if mask is None else torch.where(mask, found, unknown.to(found)))
