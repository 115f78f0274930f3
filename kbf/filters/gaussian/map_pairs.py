"""Pairs of inputs and outputs that the maps of a state-space model are fitted to, and residuals."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kbf.densities.per_sensor import MIN_READINGS, find_sensors
from kbf.densities.ridge import Join, join_of
from kbf.filters.gaussian.augmented import Sensor
from kbf.filters.gaussian.sensor_laws import Persistence, fit_persistence
from kbf.recording import Recording, moves, observed
from kbf.rkhs.linalg import some_rows
from kbf.runtime.errors import FitError

# Pairs that a map is fitted to; of more, some that are drawn.
MAX_PAIRS = 5000


class SensorPairs(NamedTuple):
    """States ``n d`` and readings ``n p`` of the columns of a sensor, ``delay`` steps later."""

    columns: Tensor
    delay: int
    counts: bool
    states: Tensor
    readings: Tensor


class Pairs(NamedTuple):
    """Inputs and outputs of the maps.

    Attributes:
        inputs: ``m e``, states joined with controls. change: ``m d``.
        sensors: of each sensor.
        join: how states and controls are joined.
    """

    inputs: Tensor
    change: Tensor
    sensors: list[SensorPairs]
    join: Join | None


def pairs_of(
    recordings: list[Recording], delays: Int[Tensor, " q"], counts: Bool[Tensor, " q"]
) -> Pairs:
    """Return the pairs that maps are fitted to, at most `MAX_PAIRS` of each map.

    Args:
        recordings: with `kbf.filters.gaussian.count_maps.stabilised` counts.
        delays: of the columns of observations.
        counts: which columns are counts.

    Columns of one kind with one delay that are never missing alone are one sensor, so that
    residuals may be correlated. A sensor with fewer than
    `kbf.densities.per_sensor.MIN_READINGS` readings is left out, and so are columns that do not
    vary.

    Raises:
        FitError: no sensor has so many readings.
    """
    z, after, u = moves(recordings)
    some = some_rows(len(z), MAX_PAIRS, z.device)
    z, after, u = z[some], after[some], None if u is None else u[some]
    join = None if u is None else join_of(z, u)
    inputs = z if join is None or u is None else join(z, u)
    x = torch.cat([observed(each) for each in recordings])
    if bool(x.isfinite().any(1).eq(x.isfinite().all(1)).all()):
        numbers = torch.zeros_like(x[0], dtype=torch.long)
    else:
        numbers = find_sensors(x)
    delays = delays.to(numbers)
    sensors = []
    kinds = torch.stack([numbers, delays, counts.to(numbers)], 1)
    for kind in kinds.unique(dim=0):
        columns = (kinds == kind).all(1).nonzero()[:, 0]
        _, delay, counted = kind.tolist()
        seen, x = delayed_pairs(recordings, delay)
        read = x[:, columns].isfinite().all(1)
        if int(read.sum()) >= MIN_READINGS:
            at = read.nonzero()[:, 0]
            at = at[some_rows(len(at), MAX_PAIRS, at.device)]
            readings = x[at][:, columns]
            vary = (readings != readings[0]).any(0)
            if bool(vary.any()):
                sensors.append(
                    SensorPairs(columns[vary], delay, counted > 0, seen[at], readings[:, vary])
                )
    if not sensors:
        raise FitError(f"of {x.shape[1]} observations none has {MIN_READINGS} readings")
    return Pairs(inputs, after - z, sensors, join)


def delayed_pairs(
    recordings: list[Recording], delay: int
) -> tuple[Float[Tensor, "n d"], Float[Tensor, "n q"]]:
    """Return states, and the observations of ``delay`` steps later."""
    return (
        torch.cat([s.states[: len(s.states) - delay] for s in recordings]),
        torch.cat([observed(s)[delay:] for s in recordings]),
    )


def persistence_of(
    recordings: list[Recording], sensors: list[Sensor], zero: Float[Tensor, " q"] | None = None
) -> Persistence:
    """Return the persistent errors of sensors in recordings, of x - h(z) and h(z).

    Gains act on h(z) less ``zero``, the reading 0 in the units of the recordings; None for 0.
    """
    readings = [readings_of(each, sensors) for each in recordings]
    pairs = zip(recordings, readings, strict=True)
    residuals = [observed(each) - read for each, read in pairs]
    if zero is None:
        return fit_persistence(residuals, readings)
    found = fit_persistence(residuals, [each - zero.to(each) for each in readings])
    return found._replace(zero=zero.double().cpu())


def readings_of(recording: Recording, sensors: list[Sensor]) -> Float[Tensor, "T q"]:
    """Return h(z) of each step; NaN without a state, or without a map."""
    found = torch.full_like(recording.obs, torch.nan)
    steps = len(recording.states)
    for columns, delay, map, _ in sensors:
        if delay < steps:
            found[delay:, columns] = map(recording.states[: steps - delay]).to(found)
    return found
