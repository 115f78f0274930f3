"""What held-out parts of the training data say of a filter: its calibration and its monitor. No test data is looked at.

The recordings are cut into contiguous folds; the model's filter over the other folds runs through
each, from its start, as it will run through new data. A person's own validation part takes the
place of the folds.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kbf.data.windows import first_steps, folds, hold_out, take, without
from kbf.evaluation.alarms import (
    MOST_KEPT,
    WINDOW,
    Monitor,
    fit_tail,
    innermost,
    middle,
    surprise_of,
)
from kbf.evaluation.calibration import Calibration, calibrate, floor_of, floored, mahalanobis
from kbf.evaluation.score import score, score_smoothed
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.protocols import Filter, FilterModel
from kbf.filters.selection.auto import ModelSelection
from kbf.recording import Recording, as_float, observed_pairs
from kbf.rkhs.linalg import evenly
from kbf.runtime.atomic_files import copy
from kbf.training.callbacks import BEST, LAST
from kbf.training.checkpoint import Trained, load_own, rewrite_checkpoint
from kbf.training.fit import held_by
from kbf.training.fitted_model import FittedModel

FOLDS = 5
MOST_STEPS = 5000
"""Most steps that are filtered, of large recordings the first of each fold."""
BESIDE = 300
"""Steps of each recording that are filtered all the same: recordings run beside each other, and how they begin is not all."""
LEAST_OBSERVATIONS = 10
"""Observations without a silent sensor that a monitor needs."""
MOST_NUMBERS = 2**22
"""Most numbers in the observations that a monitor keeps: of large images there are fewer."""
Held = Iterable[tuple[Filter[Any], list[Recording]]]
"""Filters, each with sequences that it has not learned from."""


class Surprise(NamedTuple):
    """`kbf.evaluation.alarms.surprise_of` an observation, ``b``; NaN where there is none, or the filter has no kernel."""

    surprise: Tensor


class Run(NamedTuple):
    """What filters said of sequences that they have not learned from.

    Attributes:
        states: ``m d``, one sequence behind the other, with their estimates ``m d`` and covariances
            ``m d d`` (None without).
        surprises: ``T`` for each sequence.
        filters: ``m``, the number of the filter that each step was run through by.
    """

    states: Tensor
    estimates: Tensor
    covariances: Tensor | None
    surprises: list[Tensor]
    filters: Tensor


def held_out(
    net: FilterModel, memory: list[Recording], count: int = FOLDS, most: int = MOST_STEPS
) -> Held:
    """For each of ``count`` folds: the filter over the others, made when it is asked for, and the fold.

    A model that has held out folds of its own to choose by
    (`kbf.filters.selection.auto.ModelSelection`) has these filters already.

    Raises:
        ValueError: too few steps for the folds, or for the model without one of them.
    """
    if isinstance(net, ModelSelection) and net.crosswise:
        yield from (
            (filter, begun(part, -(-most // len(net.crosswise)))) for filter, part in net.crosswise
        )
        return
    for spans in folds([len(s.states) for s in memory], count):
        yield net.fit(without(memory, spans)), begun(take(memory, spans), -(-most // count))


def begun(fold: list[Recording], most: int) -> list[Recording]:
    """The first steps of each sequence of a fold, about ``most`` in all, but not fewer than `BESIDE` of each."""
    return first_steps(fold, max(most, min(BESIDE, most) * len(fold)))


def never_learned_from(module: FittedModel) -> Held:
    """`held_out`; of a net without a memory, which no fold can be taken out of, the steps that its training has held out."""
    memory, how = module.memory.sequences(), module.how
    alone = how is not None and how.validation > 0 and keeps_no_memory(module)
    return (
        [(module.net.eval(), hold_out(memory, how.validation)[1])]
        if alone and how
        else held_out(module.net, memory)
    )


def keeps_no_memory(module: FittedModel) -> bool:
    """Whether the net is the filter itself: what it has learned from cannot be taken out of it."""
    return module.net.fit(module.memory.sequences()) is module.net


def learned_from_all(module: FittedModel) -> bool:
    """Whether its training held out nothing, and nothing can be taken out of it."""
    return module.how is not None and module.how.validation == 0 and keeps_no_memory(module)


def run_through(
    held: Held,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Run:
    """Run each filter through its sequences, from its start; arguments as of `kbf.evaluation.score.score`."""
    states, means, covariances, surprises, filters = [], [], [], [], []
    for k, (filter, sequences) in enumerate(held):
        scores = score(
            filter,
            sequences,
            seed=seed,
            dtype=dtype,
            device=device,
            covariances=True,
            watch=surprise,
        )
        states += [s.states.double().cpu() for s in sequences]
        means += scores.estimates
        covariances += scores.covariances or []
        surprises += [each.surprise for each in scores.watched]
        filters.append(torch.full((sum(len(s.states) for s in sequences),), k))
    together = torch.cat(covariances) if covariances else None
    return Run(torch.cat(states), torch.cat(means), together, surprises, torch.cat(filters))


def surprise(
    filter: Filter[Any],
    predicted: Any,
    obs: Shaped[Tensor, "b *x"],
    *,
    last: Surprise | None = None,
    mask: Tensor | None = None,
) -> Surprise:
    """What `run_through` watches."""
    inner, x = innermost(filter, obs)
    unknown = torch.full((len(obs),), torch.nan, device=obs.device)
    if not isinstance(inner, KernelBayesFilter):
        return Surprise(unknown)
    surprises = surprise_of(inner, predicted.weights, x)
    return Surprise(
        surprises if mask is None else torch.where(mask, surprises, unknown.to(surprises))
    )


def learn_calibration(run: Run) -> Calibration | None:
    """The calibration of the covariances of a run; None if it has none."""
    return (
        None
        if run.covariances is None
        else calibrate_by(run.states, run.estimates, run.covariances, run.filters)
    )


def calibrate_by(
    states: Float[Tensor, "m d"],
    means: Float[Tensor, "m d"],
    covariances: Float[Tensor, "m d d"],
    filters: Int[Tensor, " m"],
) -> Calibration:
    """The calibration by steps that several filters were run through; of `FOLDS` filters the worst and the best are left out.

    Where a fold holds all that a recording says of some region, the filter without it knows nothing
    there. That of all recordings does: by the pooled scores of all folds its regions would be far
    too wide, by those of the middle ones they are not.
    """
    kept, count = torch.ones(len(states), dtype=torch.bool), 1 + int(filters.max())
    if count >= FOLDS:
        scores = mahalanobis(states, means, floored(covariances, floor_of(covariances)))
        order = torch.stack([scores[filters == k].mean() for k in range(count)]).argsort()
        kept = (filters != order[0]) & (filters != order[-1])
    return calibrate(states[kept], means[kept], covariances[kept])


@torch.no_grad()
def learn_monitor(
    run: Run,
    memory: list[Recording],
    *,
    rate: float = 1e-3,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Monitor | None:
    """A monitor from a run through held-out sequences, and the recordings.

    How far an observation is from those of the training, the recordings tell themselves: each from
    those of the other folds, since the steps just before and after it are nearer to it than any
    will be to a new one.

    Args:
        run: of filters through what they have not learned from.
        memory: the recordings, with observations as the innermost filter sees them.
        rate: false alarms a step and kind.
        dtype: what the filters take. device: where they are.

    Returns:
        None where sensors are silent in all but `LEAST_OBSERVATIONS` observations: there is no
        distance then.

    Raises:
        ValueError: a rate that is not between 0 and 1, or fewer than ten steps.
    """
    if not 0 < rate < 1:
        raise ValueError(f"a monitor's false alarm rate must be between 0 and 1, got {rate}")
    own = held_by([len(s.states) for s in memory], FOLDS)
    fold = torch.cat(
        [h if s.mask is None else h[s.mask.cpu()] for h, s in zip(own, memory, strict=True)]
    ).to(device)
    seen = observed_pairs(memory)[1].to(device)
    whole = seen.flatten(1).isfinite().all(1)
    if int(whole.sum()) < LEAST_OBSERVATIONS <= len(seen):
        return None
    seen, fold = seen[whole], fold[whole]
    some = evenly(len(seen), 8 * MOST_KEPT)
    seen, fold = seen[some], fold[some]
    rows = evenly(len(seen), max(2, min(MOST_KEPT, MOST_NUMBERS // seen[0].numel())), device)
    flat = as_float(seen, dtype).flatten(1)
    distance = (
        torch.cdist(flat, flat[rows]).masked_fill(fold[:, None] == fold[rows], torch.inf).amin(1)
    )
    surprises = [each.to(device, dtype) for each in run.surprises]
    scores = torch.cat(surprises)
    surprise = lost = None
    if not scores.isnan().all():
        surprise, lost = (
            fit_tail(scores),
            fit_tail(torch.cat([medians(each) for each in surprises])),
        )
    novelty = fit_tail(distance[distance.isfinite()])
    return Monitor(
        flat[rows], novelty, surprise, lost, torch.tensor(rate, dtype=dtype, device=device)
    )


def medians(run: Float[Tensor, "*b T"]) -> Float[Tensor, "*b T"]:
    """The median of the last `WINDOW` surprises at each step, as `Monitor.check` makes it."""
    return middle(
        torch.nn.functional.pad(run, (WINDOW - 1, 0), value=torch.nan).unfold(-1, WINDOW, 1)
    )


def learn(
    trained: Trained, validation: Sequence[Recording] = (), *, rate: float = 1e-3, seed: int = 0
) -> Trained:
    """A trained model with its calibration and its monitor.

    Args:
        trained: model and filter.
        validation: recordings that the model has not learned from; without them it is conditioned
            anew, fold by fold.
        rate: of false alarms.
        seed: of filters that draw.

    Raises:
        ValueError: too few steps.
    """
    module, memory = trained.module, trained.module.memory.sequences()
    settings: Any = {
        "dtype": module.input_dtype if validation else module.model_dtype,
        "device": module.device,
    }
    held: Held = [(trained.filter, list(validation))] if validation else never_learned_from(module)
    run = run_through(held, seed=seed, **settings)
    calibration = learn_calibration(run)
    if calibration is not None and not validation and learned_from_all(module):
        warnings.warn(
            "covariances are not recalibrated: the net has learned from all recordings, on which it is too sure "
            "(model.training.validation=0.15 or data.validation holds some out)",
            stacklevel=2,
        )
        calibration = None
    elif calibration is not None and not validation:  # the folds are in scaled units
        calibration = in_units_of_the_data(calibration, trained)
    monitor = learn_monitor(run, memory, rate=rate, dtype=module.model_dtype, device=module.device)
    return trained._replace(calibration=calibration, monitor=monitor)


def learn_smoothed(trained: Trained, *, lag: int | None = None, seed: int = 0) -> Calibration:
    """The calibration of smoothed covariances: the filters over the other folds, and their smoothers, run through each.

    Args:
        trained: a model whose filter has covariances and a smoother.
        lag: as of `kbf.filters.smoothing.smooth`. seed: of filters that draw.

    Raises:
        ValueError: too few steps, or a filter without a smoother.
    """
    module = trained.module
    states, means, covariances, filters = [], [], [], []
    for k, (filter, sequences) in enumerate(held_out(module.net, module.memory.sequences())):
        scores = score_smoothed(
            filter, sequences, lag=lag, seed=seed, dtype=module.model_dtype, device=module.device
        )
        states += [s.states.double().cpu() for s in sequences]
        means += scores.estimates
        covariances += scores.covariances or []
        filters.append(torch.full((sum(len(s.states) for s in sequences),), k))
    parts = (torch.cat(part) for part in (states, means, covariances, filters))
    return in_units_of_the_data(calibrate_by(*parts), trained)


def in_units_of_the_data(calibration: Calibration, trained: Trained) -> Calibration:
    """A calibration that was learned in scaled units."""
    scaling = trained.module.scaling
    return (
        calibration
        if scaling is None
        else calibration._replace(floor=calibration.floor * scaling.z_scale.cpu().square())
    )


def learn_and_keep(
    trained: Trained, directory: Path, validation: Sequence[Recording] = (), *, seed: int = 0
) -> Trained:
    """`learn`, and write it into the ``best.ckpt`` and ``last.ckpt`` of a run; the last of a model that learns has its own."""
    best, last = directory / BEST, directory / LAST
    trained = learn(trained, validation, seed=seed)
    rewrite_checkpoint(trained, best, best)
    if trained.module.learns:
        newest = learn(
            load_own(trained.module, last, device=trained.module.device), validation, seed=seed
        )
        rewrite_checkpoint(newest, last, last)
    else:
        copy(best, last)
    return trained
