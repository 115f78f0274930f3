"""What held-out parts of the training data say of a filter: its calibration and its monitor. No test data is looked at.

The recordings are cut into contiguous folds; the model's filter over the other folds runs through each, from its start, as it will
run through new data. A person's own validation part takes the place of the folds.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.data.windows import folds, piece, take, without
from kbf.evaluation import score
from kbf.files import copy, replacing
from kbf.filters.base import Filter, FilterModel
from kbf.filters.kernel import KernelBayesFilter
from kbf.kernels import evenly
from kbf.monitor import KEPT, WINDOW, Monitor, fit_tail, innermost, middle, moved, predictions, surprise_of
from kbf.sequence import Sequence, as_float, observed_pairs, pad
from kbf.training import Trained, load_filter, read_checkpoint
from kbf.uncertainty import Calibration, calibrate

FOLDS = 5
MOST = 5000
"""Most steps that are filtered, of large recordings the first of each fold."""
NUMBERS = 2**22
"""Most numbers in the observations that a monitor keeps: of large images there are fewer."""
Held = list[tuple[Filter[Any], list[Sequence]]]
"""Filters, each with sequences that it has not learned from."""


def held_out(net: FilterModel, memory: list[Sequence], count: int = FOLDS, most: int = MOST) -> Held:
    """For each of ``count`` folds: the filter over the others, and the fold.

    Raises:
        ValueError: too few steps for the folds, or for the model without one of them.
    """
    parts = folds([len(s.states) for s in memory], count)
    left = -(-most // count)
    return [(net.condition(without(memory, spans)), first_steps(take(memory, spans), left)) for spans in parts]


def first_steps(sequences: list[Sequence], most: int) -> list[Sequence]:
    """The sequences up to ``most`` steps in all."""
    kept = []
    for sequence in sequences:
        if most > 0:
            kept.append(piece(sequence, 0, min(most, len(sequence.states))))
            most -= len(sequence.states)
    return kept


def learn_calibration(
    held: Held, *, dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", seed: int = 0
) -> Calibration | None:
    """The calibration of the covariances of these filters; None if they have none."""
    states, means, covariances = [], [], []
    for filter, sequences in held:
        found = score(filter, sequences, seed=seed, dtype=dtype, device=device, covariances=True)
        if found.covariances is None:
            return None
        states += [s.states.double().cpu() for s in sequences]
        means += found.estimates
        covariances += found.covariances
    return calibrate(torch.cat(states), torch.cat(means), torch.cat(covariances))


@torch.no_grad()
def learn_monitor(
    held: Held,
    memory: list[Sequence],
    *,
    rate: float = 1e-3,
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> Monitor:
    """A monitor from filters, each with sequences that it has not learned from, and the recordings.

    Args:
        held: as `held_out` makes it.
        memory: the recordings, with observations as the innermost filter sees them.
        rate: false alarms a step and kind.
        dtype: what the filters take. device: where they are.

    Raises:
        ValueError: a rate that is not between 0 and 1, or fewer than ten steps.
    """
    if not 0 < rate < 1:
        raise ValueError(f"a monitor's false alarm rate must be between 0 and 1, got {rate}")
    seen = observed_pairs(memory)[1].to(device)
    seen = seen[seen.flatten(1).isfinite().all(1)]  # with silent sensors there is no distance
    seen = seen[evenly(len(seen), 8 * KEPT)]
    rows = evenly(len(seen), max(2, min(KEPT, NUMBERS // seen[0].numel())), device)
    flat = as_float(seen, dtype).flatten(1)
    distance = torch.cdist(flat, flat[rows])
    distance[rows, torch.arange(len(rows), device=rows.device)] = torch.inf  # each is compared with the others
    runs = [surprises(filter, moved(pad(sequences), device), dtype) for filter, sequences in held]
    scores = torch.cat([run.flatten() for run in runs])
    surprise = lost = None
    if not scores.isnan().all():
        surprise, lost = fit_tail(scores), fit_tail(torch.cat([medians(run).flatten() for run in runs]))
    return Monitor(flat[rows], fit_tail(distance.amin(1)), surprise, lost, torch.tensor(rate, dtype=dtype, device=device))


def surprises(filter: Filter[Any], batch: Sequence, dtype: torch.dtype) -> Float[Tensor, "b T"]:
    """The surprise at each step of a batch, by a filter from its start; NaN where nothing was observed or there is no kernel."""
    steps = batch.states.shape[:2]
    found = batch.states.new_full(steps, torch.nan, dtype=dtype)
    if not isinstance(innermost(filter, batch.obs[:, 0])[0], KernelBayesFilter):
        return found
    for t, (predicted, x, _) in enumerate(predictions(filter, batch, dtype)):
        inner: Any
        inner, seen = innermost(filter, x)
        found[:, t] = surprise_of(inner, predicted.weights, seen).to(found)
    return found if batch.mask is None else found.masked_fill(~batch.mask, torch.nan)


def medians(run: Float[Tensor, "b T"]) -> Float[Tensor, "b T"]:
    """The median of the last `WINDOW` surprises at each step, as `Monitor.check` makes it."""
    return middle(torch.nn.functional.pad(run, (WINDOW - 1, 0), value=torch.nan).unfold(1, WINDOW, 1))


def learn(trained: Trained, validation: Many[Sequence] = (), *, rate: float = 1e-3, seed: int = 0) -> Trained:
    """A trained model with its calibration and its monitor.

    Args:
        trained: model and filter.
        validation: recordings that the model has not learned from; without them it is conditioned anew, fold by fold.
        rate: of false alarms.
        seed: of filters that draw.

    Raises:
        ValueError: too few steps.
    """
    module, memory = trained.module, trained.module.memory.sequences()
    settings: Any = {"dtype": module.model_dtype, "device": module.device}
    held: Held = [(trained.filter, list(validation))] if validation else held_out(module.net, memory)
    calibration = learn_calibration(held, seed=seed, **settings)
    if calibration is not None and module.scaling is not None and not validation:  # the folds are in scaled units
        calibration = calibration._replace(floor=calibration.floor * module.scaling.z_scale.cpu().square())
    return trained._replace(calibration=calibration, monitor=learn_monitor(held, memory, rate=rate, **settings))


def stored(trained: Trained) -> dict[str, Any]:
    """Calibration and monitor as a checkpoint holds them."""
    calibration, monitor = trained.calibration, trained.monitor
    return {
        "calibration": None if calibration is None else Calibration(*(leaf.cpu() for leaf in calibration))._asdict(),
        "monitor": None if monitor is None else monitor.stored(),
    }


def keep(trained: Trained, path: Path) -> None:
    """Write calibration and monitor into a checkpoint."""
    checkpoint = read_checkpoint(path)
    checkpoint["kbf"] |= stored(trained)
    with replacing(path) as temporary:
        torch.save(checkpoint, temporary)


def learn_and_keep(trained: Trained, directory: Path, validation: Many[Sequence] = (), *, seed: int = 0) -> Trained:
    """`learn`, and write it into the ``best.ckpt`` and ``last.ckpt`` of a run; the last of a model that learns has its own."""
    best, last = directory / "best.ckpt", directory / "last.ckpt"
    found = learn(trained, validation, seed=seed)
    keep(found, best)
    if trained.module.learns:
        keep(learn(load_filter(last, device=trained.module.device, trust=True), validation, seed=seed), last)
    else:
        copy(best, last)
    return found
