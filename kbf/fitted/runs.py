"""Runs of a trained filter through recordings: estimates, log likelihoods, predictions."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from kbf.data.files.layout import Observations, codes_by_column
from kbf.evaluation.calibration import Calibration
from kbf.filters.gating import GatedFilter, GatedState
from kbf.filters.parallel_rollout import draws
from kbf.filters.protocols import control_components, covariance_of, move
from kbf.filters.rollout import batch_inputs, rollout
from kbf.filters.smoothing import Smoothed, sample_paths
from kbf.fitted.checkpoint import Trained
from kbf.fitted.held_out_forecasts import ORIGINS_PER_BATCH
from kbf.fitted.online_estimator import (
    ROWS_PER_BATCH,
    OnlineEstimator,
    StepInputs,
    concatenated,
    result_of,
)
from kbf.fitted.results import Array, Result, joined
from kbf.recording import Recording, without_mask
from kbf.runtime.errors import DataError, nearest

# Recordings of at most `ROWS_PER_BATCH` rows that are filtered as one batch, and the memory of
# their states and observations; filters over many points have large states.
RECORDINGS_PER_BATCH = 32
MAX_BYTES_OF_BATCH = 2**28


def check_horizon(horizon: int) -> None:
    """Raise a ValueError for a horizon that is no whole number of at least 1."""
    if not isinstance(horizon, int) or horizon < 1:
        raise ValueError(f"the horizon must be a whole number of at least 1, got {horizon!r}")


@torch.no_grad()
def moved(
    trained: Trained,
    state: Any,
    controls: Tensor | None,
    steps: int,
    generator: Generator,
) -> Result:
    """Return the predictions of the ``steps`` after filter states, ``b steps`` rows.

    Covariances are recalibrated by the calibration of each horizon (`Trained.forecasts`).

    Args:
        trained: the filter and its calibration.
        state: of a batch of b.
        controls: ``b h k`` of the moves, or None.
        steps: h.
        generator: of filters that draw random numbers.
    """
    filter, means, covariances = trained.filter, [], []
    for k in range(steps):
        control = None if controls is None else controls[:, k]
        state = move(filter, state, control=control, generator=generator)
        means.append(filter.estimate(state).double().cpu())
        C = covariance_of(filter, state)
        calibration = trained.calibration_ahead(k + 1)
        if C is not None and calibration is not None:
            C = calibration.covariance(C)
        covariances += [] if C is None else [C.double().cpu()]
    spread = torch.stack(covariances, 1).flatten(0, 1) if covariances else None
    horizons = torch.arange(1, steps + 1).repeat(len(means[0]))
    return Result(torch.stack(means, 1).flatten(0, 1), spread, None, {}, horizons)


def moved_from(
    trained: Trained,
    states: list[Any],
    origins: list[int],
    controls: Tensor | None,
    steps: int,
    generator: Generator,
) -> tuple[Result | None, list[tuple[int, int]]]:
    """Return `moved` of some of the states of a recording, and the origin and step of each row.

    Args:
        trained: the filter and its calibration.
        states: after each step. origins: the steps that are predicted from.
        controls: ``1 T k``; predictions that require controls after T are left out.
        steps: of a prediction, at most.
        generator: of filters that draw random numbers.
    """
    groups: dict[int, list[int]] = {}
    for t in origins:
        length = steps if controls is None else min(steps, len(states) - 1 - t)
        groups.setdefault(length, []).append(t)
    parts, rows = [], []
    for length, group in groups.items():
        for first in range(0, len(group) if length else 0, ORIGINS_PER_BATCH):
            some = group[first : first + ORIGINS_PER_BATCH]
            state = concatenated([states[t] for t in some])
            future = None
            if controls is not None:
                future = torch.cat([controls[:, t + 1 : t + 1 + length] for t in some])
            parts.append(moved(trained, state, future, length, generator))
            rows += [(t, k) for t in some for k in range(1, length + 1)]
    return (joined(parts) if parts else None), rows


def future_controls(trained: Trained, controls: Any, horizon: int) -> Tensor | None:
    """Return the controls of a forecast ``1 h k``; None for a filter without controls.

    Where the durations of moves are controls, they may be left out: the forecast is then one of
    moves that take the time step.

    Raises:
        DataError: controls that are missing, not wanted, or of another shape.
    """
    width, names = control_components(trained.filter), list(trained.module.column_schema().controls)
    data = trained.module.config.get("data") or {}
    if controls is None and not width:
        return None
    if controls is not None and hasattr(controls, "columns"):
        controls = controls[[name for name in names if name in controls]].to_dict("records")
    if isinstance(controls, list) and all(isinstance(each, Mapping) for each in controls):
        rows = [
            numbers_of(each, names, "controls", missing=False, left_out=data.get("controls"))
            for each in controls
        ]
        controls = np.stack(rows) if rows else None
    if controls is None and data.get("time_as_control") and not names:
        controls = np.zeros((horizon, 0))
    values = np.zeros((0, width)) if controls is None else np.asarray(controls, dtype="float64")
    if values.ndim == 1:
        values = values[:, None]
    if data.get("time_as_control") and values.shape == (horizon, width - 1):
        values = np.column_stack([values, np.full(horizon, data["time_step"])])
    if values.shape != (horizon, width):
        got = "none" if controls is None else str(values.shape)
        raise DataError(
            f"controls must be {(horizon, width)}, one row for each step that is forecast; "
            f"got {got}"
        )
    codes = codes_by_column(data.get("missing") if data.get("column_schema") else None, names)
    check_controls(values, names, codes)
    if not np.isfinite(values).all():  # the last column
        raise DataError("the duration of a move is missing: a filter requires all durations")
    return torch.from_numpy(values)[None].to(trained.module.device, trained.module.input_dtype)


def check_controls(
    values: np.ndarray, names: list[str], codes: Sequence[Sequence[int | float]]
) -> None:
    """Raise a DataError for controls ``... k`` that are missing: NaN, or one of their codes."""
    for name, column, own in zip(names, np.atleast_2d(values).T, codes, strict=False):
        if bool((~np.isfinite(column) | np.isin(column, own)).any()):
            raise DataError(f"the control {name} is missing; a filter requires all controls")


def step_through_all(
    estimator: OnlineEstimator, trained: Trained, pieces: list[Observations]
) -> list[Result]:
    """Step through recordings, each from the prior; many short ones as one batch.

    Filters that draw random numbers or have single precision, where the rounding of a batch would
    show, step through one after the other, and so does the last recording, whose end is the state
    of the estimator afterwards. A long recording is filtered in blocks of its rows
    (`OnlineEstimator.step_in_blocks`), in single precision, too.
    """
    short = [k for k, each in enumerate(pieces[:-1]) if len(each.obs) <= ROWS_PER_BATCH]
    together = recordings_per_batch(trained, pieces[0]) if len(short) > 1 else 1
    found: dict[int, Result] = {}
    for first in range(0, len(short) if together > 1 else 0, together):
        some = short[first : first + together]
        results = step_through_together(estimator, trained, [pieces[k] for k in some])
        found |= dict(zip(some, results, strict=True))
    for k, piece in enumerate(pieces):
        if k not in found:
            estimator.restart()
            found[k] = step_through(estimator, trained, piece)
    return [found[k] for k in range(len(pieces))]


def recordings_per_batch(trained: Trained, piece: Observations) -> int:
    """Return how many short recordings are filtered as one batch.

    1 if a step is random, or if the filter keeps a state in single precision.
    """
    filter, example = trained.filter, batch_of(trained, piece)["obs"][:, 0]
    if draws(filter, example, control_components(filter)):
        return 1
    prior = filter.init(1)
    if any(leaf.is_floating_point() and leaf.dtype != torch.float64 for leaf in prior):
        return 1
    row = sum(leaf[0].numel() * leaf.element_size() for leaf in (example, *prior))
    fits = MAX_BYTES_OF_BATCH // (2 * ROWS_PER_BATCH * max(1, row))  # predicted and updated
    return max(1, min(RECORDINGS_PER_BATCH, fits))


@torch.inference_mode()
def step_through_together(
    estimator: OnlineEstimator, trained: Trained, pieces: list[Observations]
) -> list[Result]:
    """Step through recordings as one padded batch, each from the prior.

    The results equal those of `step_through` up to rounding. A recording whose track diverges is
    stepped through by itself, since it starts again from the prior there.
    """
    module, monitor = trained.module, estimator.monitor
    recordings = [as_recording(each) for each in pieces]
    batch = batch_inputs(recordings, dtype=module.input_dtype, device=module.device)
    obs, mask, acted = batch["obs"], batch["mask"], batch["controls"]
    gate, state = GatedFilter(trained.filter), GatedState(trained.filter.init(len(pieces)))
    predicted, updated = [], []
    collect = None if monitor is None else lambda now, *_: predicted.append(now)
    for t in range(obs.shape[1]):
        now, control = (None if each is None else each[:, t] for each in (mask, acted))
        state = gate.step(state, obs[:, t], mask=now, control=control, before=collect)
        updated.append(state.inner)
    before, after = (over_time(each) if each else None for each in (predicted, updated))
    results = []
    for k, each in enumerate(pieces):
        estimator.restart()
        steps, alarms = len(each.obs), []
        if monitor is not None:
            seen = None if mask is None else mask[k : k + 1, :steps]
            rows = inputs_of(obs[k : k + 1, :steps], seen)
            alarms = estimator.verdicts(monitor, part_of(before, k, steps), rows)
        if "diverged" in alarms:
            estimator.restart()
            results.append(step_through(estimator, trained, each))
        else:
            estimator.alarms += sum(alarm != "" for alarm in alarms)
            results.append(result_of(estimator, part_of(after, k, steps), alarms))
    return results


def over_time(states: list[Any]) -> Any:
    """Return the states ``b ...`` of T steps as one, ``T b ...``."""
    return type(states[0])(*(torch.stack(leaves) for leaves in zip(*states, strict=True)))


def part_of(states: Any, k: int, steps: int) -> Any:
    """Return the first steps of recording k of such states, as a batch."""
    return type(states)(*(leaf[:steps, k] for leaf in states))


def inputs_of(obs: Tensor, mask: Tensor | None, controls: Tensor | None = None) -> list[StepInputs]:
    """Return the steps of a batch of one recording."""
    return [
        StepInputs(
            None if mask is not None and not mask[0, t] else obs[:, t],
            None if controls is None else controls[:, t],
        )
        for t in range(obs.shape[1])
    ]


def step_through(
    estimator: OnlineEstimator, trained: Trained, piece: Observations, skipped: int = 0
) -> Result:
    """Step through one recording from the present state of the estimator.

    ``skipped`` steps without an observation come first, which have the control of the first row.
    """
    batch, parts = batch_of(trained, piece), []
    steps = inputs_of(batch["obs"], batch["mask"], batch["controls"])
    if skipped > 0:
        estimator.advance([steps[0]._replace(obs=None)] * skipped)
    size = ROWS_PER_BATCH
    if len(steps) > size:
        size = estimator.rows_at_a_time(batch["obs"][:, 0])
    for first in range(0, len(steps), size):
        state, alarms = estimator.advance(steps[first : first + size])
        parts.append(result_of(estimator, state, alarms))
    return joined(parts)


@torch.no_grad()
def log_likelihoods(
    trained: Trained, pieces: list[Observations], rows: list[Tensor], seed: int
) -> Array | None:
    """Return log p(x_t | x_<t) of all rows, in the order of the input.

    Args:
        trained: the filter.
        pieces: the recordings. rows: of each, the rows of the input.
        seed: of filters that draw random numbers.

    Returns:
        ``T``, NaN where nothing was observed; None for a filter without a density.
    """
    found = np.full(sum(int((each >= 0).sum()) for each in rows), np.nan)
    generator = torch.Generator(trained.module.device).manual_seed(seed)
    for piece, where in zip(pieces, rows, strict=True):
        batch = batch_of(trained, piece)
        run = rollout(trained.filter, **batch, log_likelihood=True, generator=generator)
        if run.log_likelihood is None:
            return None
        has_row = where >= 0
        found[where[has_row].numpy()] = run.log_likelihood[0].double().cpu()[has_row].numpy()
    return found


@torch.no_grad()
def smoothed_paths(
    trained: Trained,
    pieces: list[Observations],
    smoothed: list[Smoothed],
    calibration: Calibration | None,
    n: int,
    generator: Generator,
) -> list[Tensor]:
    """Return draws ``n T d`` of the states of each recording given all of its observations.

    The deviations of a path from the smoothed means are scaled by S^1/2 C^-1/2 where the
    calibration makes the smoothed covariance C to S, so that each row has the calibrated spread.

    Args:
        trained: the filter.
        pieces: the recordings. smoothed: of each, as learned, without calibration.
        calibration: of the smoother, or None.
        n: number of paths.
        generator: of the draws.
    """
    found = []
    for piece, each in zip(pieces, smoothed, strict=True):
        batch = batch_of(trained, piece)
        paths = sample_paths(trained.filter, n=n, **batch, generator=generator).double().cpu()
        mean, C = each.estimates[0].double().cpu(), each.covariances
        if C is not None and calibration is not None:
            C = C[0].double().cpu()
            scale = power(calibration.covariance(C), 0.5) @ power(C, -0.5)
            paths = mean + ((paths - mean)[:, :, None] @ scale.mT)[:, :, 0]
        found.append(paths)
    return found


def power(C: Tensor, exponent: float) -> Tensor:
    """Return a power of positive semi-definite matrices ``*b d d``, 0 in their null spaces."""
    values, vectors = torch.linalg.eigh(C)
    least = torch.finfo(C.dtype).eps * C.shape[-1] * values.amax(-1, keepdim=True)
    powers = torch.where(values > least, values.clamp_min(least) ** exponent, 0)
    return (vectors * powers[..., None, :]) @ vectors.mT


def batch_of(trained: Trained, piece: Observations) -> dict[str, Any]:
    """Return a recording as arguments of `rollout`: a batch of one."""
    module = trained.module
    return batch_inputs([as_recording(piece)], dtype=module.input_dtype, device=module.device)


def as_recording(piece: Observations) -> Recording:
    """Return observations as a recording; missing ones are 0, unknown states NaN."""
    obs, states = piece.obs, piece.states
    if piece.mask is not None and obs.ndim == 2:
        obs = torch.where(piece.mask[:, None], obs, torch.zeros_like(obs))
    if states is None:
        states = torch.full((len(obs), 1), torch.nan, dtype=torch.float64)
    return Recording(states, obs, piece.mask, controls=piece.controls)


def numbers_of(
    values: Any, names: list[str], side: str, *, missing: bool, left_out: Any = None
) -> np.ndarray:
    """Return the numbers of the columns, from a mapping or an array.

    Args:
        values: by name, or in the order of ``names``. None is missing.
        names: of the columns. side: for messages.
        missing: whether columns may be absent.
        left_out: a list of columns that may be given, and have no meaning for the filter: those of
            the training that never varied. Other values, as the name of an array, are none.

    Raises:
        KeyError: an unknown name, with the nearest.
        DataError: an absent name, or another number of values.
    """
    if isinstance(values, Mapping) or hasattr(values, "to_dict"):
        given = dict(values) if isinstance(values, Mapping) else values.to_dict()
        for name in given:
            if name not in names and not (isinstance(left_out, list) and name in left_out):
                hint = nearest(str(name), names, "they are")
                raise KeyError(f"{name!r} is not among the {side}; {hint}")
        absent = [name for name in names if name not in given]
        if absent and not missing:
            raise DataError(f"{side}: {', '.join(absent)} is missing; None stands for no reading")
        values = [given.get(name) for name in names]
    elif hasattr(values, "detach"):
        values = values.detach().cpu()
    elif np.ma.is_masked(values):
        values = without_mask(values, side)
    found = np.array(
        [np.nan if each is None else each for each in np.atleast_1d(values).ravel()], "float64"
    )
    if len(found) != len(names):
        raise DataError(
            f"{side} must be {len(names)} numbers ({', '.join(names)}), got {len(found)}"
        )
    return found
