"""Observations of several sensors, any of which may be silent: an update for every set of them that may speak together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kbf.rkhs.kernels import median_distance
from kbf.runtime.errors import FitError

MOST_SENSORS = 5
"""Sensors: each set of them has an update of its own."""
LEAST_TOGETHER = 10
"""Memory points that a set of sensors must have seen together to have an update."""

Sensors = tuple[tuple[int, ...], ...]


def read_sensors(sensors: Sequence[Sequence[int]]) -> Sensors:
    """Columns of the observation that belong to each sensor, checked.

    Raises:
        ValueError: no sensor or too many, an empty one, or a column in none, twice, or not there.
    """
    read = tuple(tuple(int(column) for column in columns) for columns in sensors)
    columns = sorted(itertools.chain(*read))
    if not 1 <= len(read) <= MOST_SENSORS or not all(read) or columns != list(range(len(columns))):
        given = [list(columns) for columns in read]
        raise ValueError(
            f"sensors must be 1 to {MOST_SENSORS} lists that share out the columns 0, 1, ... of the observation; got {given}"
        )
    return read


def present(obs: Float[Tensor, "m q"], sensors: Sensors) -> Bool[Tensor, "m s"]:
    """Which sensors spoke: those whose columns are all finite."""
    return torch.stack([obs[:, list(columns)].isfinite().all(-1) for columns in sensors], -1)


def sensor_scale(obs: Float[Tensor, "n q"], sensors: Sensors) -> Float[Tensor, " q"]:
    """For each column the median distance between the readings of its sensor, in whose units the sensors are compared.

    Raises:
        ValueError: observations of another width, or a sensor that spoke less than twice or always
            said the same.
    """
    width = sum(len(columns) for columns in sensors)
    if obs.shape[1] != width:
        raise ValueError(
            f"the sensors share out {width} columns, the observations have {obs.shape[1]}"
        )
    scale = obs.new_ones(width)
    for k, (columns, spoke) in enumerate(zip(sensors, present(obs, sensors).T, strict=True)):
        try:
            scale[list(columns)] = median_distance(obs[spoke][:, list(columns)], distinct=True)
        except FitError as error:
            raise FitError(f"sensor {k} (columns {list(columns)}): {error}") from error
    return scale


class SensorUpdate(nn.Module):
    """A rule over the sensors that speak: (ratio, x) -> weights, where silent sensors have NaN (or infinity) in x.

    A product kernel over the sensors that are there is the kernel on their columns. Each set A of
    sensors has the rule over the memory points that have all of A; the others get weight 0. Where
    fewer than `LEAST_TOGETHER` points have all of the sensors that speak, the largest set of them
    takes part of which there are so many. With no such set all weights are 0: a filter that
    normalises then keeps its prediction.
    """

    allow_missing_sensors = True
    scale: Tensor

    def __init__(
        self,
        update: Callable[[Tensor], nn.Module],
        obs: Float[Tensor, "n q"],
        sensors: Sensors,
        scale: Float[Tensor, " q"],
    ) -> None:
        """The updates of a memory.

        Args:
            update: from scaled observations ``m q'`` of some sensors to their rule, (ratio ``b m``,
                x ``b q'``) -> weights ``b m``.
            obs: the memory's, with NaN where a sensor was silent.
            sensors: columns of each. scale: by which columns are divided first.
        """
        super().__init__()
        self.sensors = sensors
        self.register_buffer("scale", scale)
        there, every = present(obs, sensors), range(1, 2 ** len(sensors))
        self.updates: nn.ModuleDict = nn.ModuleDict()
        for code in every:
            rows = there[:, self.members(code)].all(-1).nonzero()[:, 0]
            if len(rows) >= min(LEAST_TOGETHER, len(obs)):
                self.register_buffer(f"rows_{code}", rows)
                self.updates[str(code)] = update(self.of(obs[rows], code))
        built = [0, *map(int, self.updates)]
        self.instead: dict[int, int] = {
            code: max((c for c in built if c & code == c), key=int.bit_count)
            for code in [0, *every]
        }

    def members(self, code: int) -> list[int]:
        """The sensors of a set, which is written as a number: bit k stands for sensor k."""
        return [k for k in range(len(self.sensors)) if code >> k & 1]

    def of(self, obs: Float[Tensor, "m q"], code: int) -> Float[Tensor, "m p"]:
        """The columns of the observations ``m p`` that belong to a set of sensors, divided by their scale."""
        columns = [column for k in self.members(code) for column in self.sensors[k]]
        return obs[:, columns] / self.scale[columns].to(obs)

    def forward(
        self, ratio: Float[Tensor, "b n"], obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, "b n"]:
        """Weights ``b n`` of the posterior embedding given the sensors that spoke, which may differ along the batch."""
        bits = 2 ** torch.arange(len(self.sensors), device=obs.device)
        spoke, weights = (present(obs, self.sensors) * bits).sum(-1), torch.zeros_like(ratio)
        for code in spoke.unique().tolist():
            if (used := self.instead[code]) == 0:
                continue
            which, rows = (spoke == code).nonzero(), getattr(self, f"rows_{used}")
            part = self.updates[str(used)](ratio[which, rows], self.of(obs[which[:, 0]], used))
            weights = weights.index_put((which, rows), part)
        return weights
