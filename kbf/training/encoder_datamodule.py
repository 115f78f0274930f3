"""Batches of images for encoders."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Sampler

from kbf.fitted.settings import EncodingSettings


class Frames(NamedTuple):
    """Images with their states.

    Attributes:
        obs: images ``n *x`` as they are stored.
        states: ``n d``.
        chunk: ``n``, the number of the chunk that each image lies in.
    """

    obs: Tensor
    states: Tensor
    chunk: Tensor


@dataclass(eq=False)
class RowOrder(Sampler[Tensor]):
    """Rows in batches of equal size (to one), in an order that depends on (seed, epoch) alone.

    Attributes:
        rows: how many there are.
        batch_size: None for all of them.
        seed: of the order.
        epoch: set by the trainer.
    """

    rows: int
    batch_size: int | None
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the trainer calls it before each."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-self.rows // min(self.batch_size or self.rows, self.rows))

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + self.epoch)
        order = torch.randperm(self.rows, generator=generator)
        yield from order.tensor_split(len(self))


def check_batches(rows: int, how: EncodingSettings) -> None:
    """Check that ``rows`` images give batches of at least two.

    Raises:
        ValueError: they do not, with the numbers.
    """
    least = rows // len(RowOrder(rows, how.batch_size, 0)) if rows else 0
    if least < 2:
        raise ValueError(
            f"{rows} images in batches of {how.batch_size or 'all'} leave batches of {least}, too "
            "few to learn from: raise data.encoding.batch_size or use more data"
        )
