"""Sensors whose readings arrive late by a fixed time: their detection and their correction."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kbf.data.files.layout import FileRecording
from kbf.rkhs.linalg import patterns
from kbf.runtime.errors import nearest

# Steps of latency that are looked for.
MAX_LAG = 20

# Steps that regressions use at most; more change the estimates by less than their margins.
MAX_STEPS = 20_000

# States of a window from which a reading is explained: a value, its velocity and acceleration.
WIDTH = 3

# Share of the unexplained variance that remains at a latency, below which it is reported, and by
# which states after it may still improve the explanation: a smoothed sensor is not a late one.
MAX_REST = 0.7
MAX_GAIN_OF_LATER = 0.05

# Variance that later windows may leave in comparison with the least: the first one counts.
MAX_ABOVE_LEAST = 1.02


def checked_latency(given: Any, names: list[str]) -> dict[str, float]:
    """Returns the latency of each sensor, in seconds or, without times, in steps.

    Raises:
        ValueError: of a column that is no observation, or no number of at least 0.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"data.latency must name columns, as {{a: 0.3}}; got {given!r}")
    for name, value in (given or {}).items():
        if name not in names:
            raise ValueError(
                f"data.latency: {name!r} is no observation; {nearest(str(name), names, 'they are')}"
            )
        number = type(value) in (int, float) or isinstance(value, np.integer | np.floating)
        if not number or not 0 <= value < float("inf"):
            raise ValueError(f"data.latency of {name} must be at least 0 seconds, got {value!r}")
    return {str(name): float(value) for name, value in (given or {}).items()}


def without_latency(
    recording: FileRecording, names: list[str], latency: Mapping[str, float], step: float | None
) -> FileRecording:
    """Returns a recording in which the readings of late sensors are in the rows of their own time.

    A reading in the row at time t is of time t - latency. A row takes the reading whose time is the
    nearest to its own, within half of a time step; without one the reading is missing, as at the
    end.

    Args:
        recording: ``T c``. names: of its columns. latency: of `checked_latency`.
        step: the time step; None without times, when latencies are numbers of steps.
    """
    if not latency:
        return recording
    if recording.obs.ndim != 2:
        raise ValueError("data.latency is for observations that are numbers, not for images")
    times = recording.times if step is not None else None
    times = torch.arange(len(recording.obs)).double() if times is None else times
    obs, within = recording.obs.clone(), 0.5 * (1.0 if step is None else step)
    for name, late in latency.items():
        k, wanted = names.index(name), times + late
        after = torch.searchsorted(times, wanted).clamp(max=len(times) - 1)
        before = (after - 1).clamp(min=0)
        nearer = (times[before] - wanted).abs() < (times[after] - wanted).abs()
        row = torch.where(nearer, before, after)
        there = (times[row] - wanted).abs() <= within * (1 + 1e-9)
        obs[:, k] = torch.where(there, recording.obs[row, k], torch.nan)
    return recording._replace(obs=obs)


def latency_warnings(
    recordings: list[FileRecording], names: list[str], step: float | None
) -> list[str]:
    """Returns a warning of each sensor that is explained better by states of some steps before.

    Compares linear regressions of x_t on z_{t-k}, ..., z_{t-k+2}: with k = 0 they contain the
    velocity of the state as well.
    """
    found = []
    for name, lag in zip(names, lags_of(recordings, len(names)), strict=True):
        if lag is None:
            continue
        amount, unit = (lag, "steps") if step is None else (lag * step, "s")
        found.append(
            f"column {name}: its readings seem to be {amount:.4g} {unit} late: states of {lag} "
            f"rows before explain them better. data.latency={{{name}: {amount:.4g}}} moves them"
        )
    return found


def lags_of(recordings: list[FileRecording], q: int) -> list[int | None]:
    """Returns the latency of each of q sensors in steps; None if there is none."""
    readings, windows, room = [], [], MAX_STEPS
    for each in recordings:
        z, reach = each.states, MAX_LAG + WIDTH - 1
        if z is None or each.obs.ndim != 2:
            return [None] * q
        z, x = z[: room + 2 * reach], each.obs[: room + 2 * reach]
        if room <= 0 or len(z) < 3 * reach:
            continue
        # Row t of the windows has z_{t-reach}, ..., z_{t+2}, the oldest first.
        stacked = z.unfold(0, reach + WIDTH, 1).transpose(1, 2)
        target = x[reach : reach + len(stacked)]
        known = stacked.isfinite().flatten(1).all(1)
        if bool(known.any()):  # not where every window lacks a state, as those of a slow reference
            windows.append(stacked[known])
            readings.append(target[known])
        room -= len(target)
    found: list[int | None] = [None] * q
    if not readings:
        return found
    x, W = torch.cat(readings), torch.cat(windows)
    for columns in patterns(x.isfinite()):
        read = x[:, columns[0]].isfinite()
        lags = fitted_lags(x[read][:, columns], W[read])
        for column, lag in zip(columns.tolist(), lags, strict=True):
            found[column] = lag
    return found


def fitted_lags(x: Float[Tensor, "n q"], W: Float[Tensor, "n w d"]) -> list[int | None]:
    """Returns the latency of each column of readings, from windows of states."""
    found: list[int | None] = [None] * x.shape[1]
    if len(x) < 20 * MAX_LAG:
        return found
    zero = W.shape[1] - WIDTH  # the place of z_t
    variance = x.var(0)

    def rests(first: int, last: int) -> Tensor:
        """The unexplained shares of the variances, with z_{t-first}, ..., z_{t-last}."""
        Z = W[:, zero - first : zero - last + 1].flatten(1)
        Z = torch.cat([Z - Z.mean(0), torch.ones(len(Z), 1).to(Z)], 1)
        Z = Z / Z.norm(dim=0).clamp_min(1e-300)
        solution = torch.linalg.lstsq(Z, x, driver="gelsd").solution
        return (x - Z @ solution).var(0) / variance

    each = torch.stack([rests(k, k - WIDTH + 1) for k in range(MAX_LAG + 1)])
    lags = (each <= MAX_ABOVE_LEAST * each.amin(0) + 1e-12).int().argmax(0)  # the first one
    better = each.gather(0, lags[None])[0] < MAX_REST * each[0]
    for lag in lags[better].unique().tolist():
        older, later = rests(lag + WIDTH - 1, lag), rests(lag + WIDTH - 1, 0)
        late = better & (lags == lag) & (later > (1 - MAX_GAIN_OF_LATER) * older)
        for column in late.nonzero()[:, 0].tolist():
            found[column] = lag
    return found
