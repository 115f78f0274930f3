"""Batches of images with their states, for encoders."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from kbf.training.settings import EncodingSettings


class Rows(NamedTuple):
    """Images ``m *x`` as they are stored, their states ``m d``, and the number ``m`` of the chunk that each lies in."""

    obs: Tensor
    states: Tensor
    chunk: Tensor


class Frames(Dataset[Rows]):
    """Batches of rows."""

    obs: Tensor
    states: Tensor
    chunk: Tensor

    def __init__(self, obs: Tensor, states: Tensor, chunk: Tensor) -> None:
        self.obs, self.states, self.chunk = obs, states, chunk

    def __len__(self) -> int:
        return len(self.obs)

    def __getitem__(self, rows: Tensor) -> Rows:
        return Rows(self.obs[rows], self.states[rows], self.chunk[rows])


class RowOrder(Sampler[Tensor]):
    """Rows in batches of equal size (to one), in an order that depends on (seed, epoch) alone; each process has its share."""

    rows: int
    seed: int
    rank: int
    world: int
    epoch: int

    def __init__(
        self, rows: int, batch_size: int | None, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        self.rows, self.seed, self.rank, self.world, self.epoch = rows, seed, rank, world, 0
        self.batches: int = -(-rows // min(batch_size or rows, rows))

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Any:
        order = torch.randperm(
            self.rows,
            generator=torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + self.epoch),
        )
        yield from (batch[self.rank :: self.world] for batch in order.tensor_split(self.batches))


def check_batches(rows: int, how: EncodingSettings, world: int = 1) -> None:
    """Raise if ``rows`` images, shared out to ``world`` processes, are too few for batches that can be learned from.

    Raises:
        ValueError: with the numbers.
    """
    least = rows // len(RowOrder(rows, how.batch_size, 0)) // world if rows else 0
    if least < 2:
        raise ValueError(
            f"{rows} images in batches of {how.batch_size or 'all'} for {world} processes leave batches of {least}, "
            "too few to learn from: raise data.encoding.batch_size or use more data"
        )
