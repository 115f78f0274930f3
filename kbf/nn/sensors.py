"""Observations of several sensors, any of which may be silent: an update for every set of them that may speak together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kbf.kernels import median_distance
from kbf.sequence import Sequence, as_sequences

MOST = 5
"""Sensors: each set of them has an update of its own."""
LEAST = 10
"""Memory points that a set of sensors must have seen together to have an update."""

Sensors = tuple[tuple[int, ...], ...]


def read_sensors(sensors: Many[Many[int]]) -> Sensors:
    """Columns of the observation that belong to each sensor, checked.

    Raises:
        ValueError: no sensor or too many, an empty one, or a column in none, twice, or not there.
    """
    read = tuple(tuple(int(column) for column in columns) for columns in sensors)
    columns = sorted(itertools.chain(*read))
    if not 1 <= len(read) <= MOST or not all(read) or columns != list(range(len(columns))):
        told = [list(columns) for columns in read]
        raise ValueError(f"sensors must be 1 to {MOST} lists that share out the columns 0, 1, ... of the observation; got {told}")
    return read


def present(obs: Float[Tensor, "m q"], sensors: Sensors) -> Bool[Tensor, "m s"]:
    """Which sensors spoke: those whose columns are all finite."""
    return torch.stack([obs[:, list(columns)].isfinite().all(-1) for columns in sensors], -1)


def sensor_scale(obs: Float[Tensor, "n q"], sensors: Sensors) -> Float[Tensor, " q"]:
    """For each column the median distance between the readings of its sensor, in whose units the sensors are compared.

    Raises:
        ValueError: observations of another width, or a sensor that spoke less than twice or always said the same.
    """
    width = sum(len(columns) for columns in sensors)
    if obs.shape[1] != width:
        raise ValueError(f"the sensors share out {width} columns, the observations have {obs.shape[1]}")
    scale = obs.new_ones(width)
    for k, (columns, spoke) in enumerate(zip(sensors, present(obs, sensors).T, strict=True)):
        try:
            scale[list(columns)] = median_distance(obs[spoke][:, list(columns)])
        except ValueError as error:
            raise ValueError(f"sensor {k} (columns {list(columns)}): {error}") from error
    return scale


def silent_where_masked(sequences: Sequence | list[Sequence]) -> list[Sequence]:
    """Recordings, checked, without masks: a step that is masked is one at which no sensor spoke."""
    return [
        s if s.mask is None else s._replace(obs=torch.where(s.mask[:, None], s.obs, torch.nan), mask=None)
        for s in as_sequences(sequences, partial=True)
    ]


class SensorUpdate(nn.Module):
    """A rule over the sensors that speak: (ratio, x) -> weights, where silent sensors have NaN (or infinity) in x.

    A product kernel over the sensors that are there is the kernel on their columns. Each set A of sensors has the rule over the
    memory points that have all of A; the others get weight 0. Where fewer than `LEAST` points have all of the sensors that speak,
    the largest set of them takes part of which there are so many. With no such set all weights are 0: a filter that normalises
    then keeps its prediction.
    """

    partial = True
    scale: Tensor

    def __init__(
        self, update: Callable[[Tensor], nn.Module], obs: Float[Tensor, "n q"], sensors: Sensors, scale: Float[Tensor, " q"]
    ) -> None:
        """The updates of a memory.

        Args:
            update: from scaled observations ``m q'`` of some sensors to their rule, (ratio ``b m``, x ``b q'``) -> weights ``b m``.
            obs: the memory's, with NaN where a sensor was silent.
            sensors: columns of each. scale: by which columns are divided first.
        """
        super().__init__()
        self.sensors = sensors
        self.register_buffer("scale", scale)
        there, every = present(obs, sensors), range(1, 2 ** len(sensors))
        self.updates = nn.ModuleDict()
        for code in every:
            rows = there[:, self.members(code)].all(-1).nonzero()[:, 0]
            if len(rows) >= min(LEAST, len(obs)):
                self.register_buffer(f"rows_{code}", rows)
                self.updates[str(code)] = update(self.of(obs[rows], code))
        built = [0, *map(int, self.updates)]
        self.instead = {code: max((c for c in built if c & code == c), key=int.bit_count) for code in [0, *every]}

    def members(self, code: int) -> list[int]:
        """The sensors of a set: those whose bit is set."""
        return [k for k in range(len(self.sensors)) if code >> k & 1]

    def of(self, obs: Float[Tensor, "m q"], code: int) -> Float[Tensor, "m p"]:
        """The scaled columns of a set of sensors."""
        columns = [column for k in self.members(code) for column in self.sensors[k]]
        return obs[:, columns] / self.scale[columns].to(obs)

    def forward(self, ratio: Float[Tensor, "b n"], obs: Float[Tensor, "b q"]) -> Float[Tensor, "b n"]:
        """The posterior's weights."""
        bits = 2 ** torch.arange(len(self.sensors), device=obs.device)
        spoke, weights = (present(obs, self.sensors) * bits).sum(-1), torch.zeros_like(ratio)
        for code in spoke.unique().tolist():
            if (used := self.instead[code]) == 0:
                continue
            which, rows = (spoke == code).nonzero(), getattr(self, f"rows_{used}")
            part = self.updates[str(used)](ratio[which, rows], self.of(obs[which[:, 0]], used))
            weights = weights.index_put((which, rows), part)
        return weights
