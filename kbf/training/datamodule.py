"""Training batches: windows of one fold of the recordings, with the memory that does not hold this fold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import lightning
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kbf.data.windows import Span, folds, hold_out, stack, windows, without
from kbf.recording import Recording, pad
from kbf.training.settings import Training

Batch = tuple[int, list[Span]]
"""A fold's number and some windows of it."""


class Task(NamedTuple):
    """Filter ``windows`` (a batch ``b T``) with the filter over ``memory``, which does not hold them."""

    memory: list[Recording]
    windows: Recording


class FoldTasks(Dataset[Task]):
    """From batches to tasks."""

    sequences: list[Recording]
    chunks: list[list[Span]]

    def __init__(self, sequences: list[Recording], chunks: list[list[Span]]) -> None:
        self.sequences, self.chunks = sequences, chunks

    def __getitem__(self, batch: Batch) -> Task:
        fold, spans = batch
        return Task(without(self.sequences, self.chunks[fold]), stack(self.sequences, spans))


class EpochOrder(Sampler[Batch]):
    """The batches of an epoch, in an order that depends on (seed, epoch) alone: a resumed run goes on with the same.

    A batch holds at most ``batch_size`` windows, all of one fold. Of several processes each takes
    every ``world``-th batch.
    """

    chunks: list[list[Span]]
    batch_size: int | None
    seed: int
    rank: int
    world: int
    epoch: int

    def __init__(
        self,
        chunks: list[list[Span]],
        batch_size: int | None,
        seed: int,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """``chunks``: the windows of each fold. ``batch_size``: None for all windows of a fold at once."""
        self.chunks, self.batch_size, self.seed, self.rank, self.world = (
            chunks,
            batch_size,
            seed,
            rank,
            world,
        )
        self.epoch = 0
        if len(self) < 1:
            raise ValueError(
                f"{self.total()} batches an epoch are too few for {world} processes: lower model.training.batch_size"
            )

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def size(self, chunk: list[Span]) -> int:
        """Windows in a batch of this fold."""
        return max(1, min(self.batch_size or len(chunk), len(chunk)))

    def total(self) -> int:
        """Batches of an epoch, of all processes together."""
        return sum(-(-len(chunk) // self.size(chunk)) for chunk in self.chunks)

    def __len__(self) -> int:
        return self.total() // self.world

    def __iter__(self) -> Iterator[Batch]:
        # A generator: it looks at the epoch when the first batch is asked for. Lightning makes the
        # iterator of a resumed run
        # earlier, before it knows the epoch.
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + self.epoch)
        batches: list[Batch] = []
        for fold, chunk in enumerate(self.chunks):
            order = torch.randperm(len(chunk), generator=generator).tolist()
            size = self.size(chunk)
            batches += [
                (fold, [chunk[i] for i in order[k : k + size]]) for k in range(0, len(chunk), size)
            ]
        shuffled = [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]
        yield from shuffled[self.rank :: self.world][: len(self)]


class FilterDataModule(lightning.LightningDataModule):
    """The training part, cut into a part to fit (in folds) and a held-out last part for validation; and new recordings, if any.

    Attributes:
        fit: sequences to fit. held: sequences to validate on, the last of the recordings
            (`hold_out`); may be empty.
    """

    fit: list[Recording]
    held: list[Recording]
    batch_size: int | None
    order_seed: int

    def __init__(
        self,
        sequences: list[Recording],
        training: Training,
        seed: int,
        validation: list[Recording] | None = None,
        test: list[Recording] | None = None,
    ) -> None:
        """Cut the recordings.

        Args:
            sequences: the training part, in the model's dtype.
            training: how to cut them.
            seed: of the order of the batches.
            validation: recordings to validate on, in place of a part of the training part.
            test: new recordings, in the units of the data, for ``trainer.test`` and
                ``trainer.predict``.

        Raises:
            ValueError: too few steps for the split, the folds or the window, with the numbers.
        """
        super().__init__()
        self.test: list[Recording] = test or []
        self.fit, self.held = (
            (sequences, validation) if validation else hold_out(sequences, training.validation)
        )
        lengths = [len(s.states) for s in self.fit]
        self.folds: list[list[Span]] = folds(lengths, training.folds)
        self.chunks: list[list[Span]] = [
            windows(spans, training.window, training.stride) for spans in self.folds
        ]
        if training.window <= training.burn_in:
            raise ValueError(
                f"a window of {training.window} steps leaves nothing after a burn-in of {training.burn_in}"
            )
        if not any(self.chunks):
            longest = max(span.stop - span.start for spans in self.folds for span in spans)
            total = sum(len(s.states) for s in sequences)
            raise ValueError(
                f"no window of {training.window} steps fits: {sum(lengths)} steps to fit ({total} for training, "
                f"{total - sum(lengths)} of them held out) in {training.folds} folds leave at most {longest} in a row. "
                "Use a shorter model.training.window, fewer model.training.folds, or more data."
            )
        self.batch_size, self.order_seed = training.batch_size, seed

    def train_dataloader(self) -> DataLoader[Task]:
        """One `Task` for each batch; no workers, since the data is in memory."""
        rank, world = (
            (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        )
        order = EpochOrder(self.chunks, self.batch_size, self.order_seed, rank, world)
        return DataLoader(FoldTasks(self.fit, self.folds), sampler=order, batch_size=None)

    def val_dataloader(self) -> list[DataLoader[Task]]:
        """One task: the held-out part, filtered with the memory of the part to fit."""
        held = [Task(self.fit, pad(self.held))] if self.held else []
        return [DataLoader(held, batch_size=None)] if held else []  # pyright: ignore[reportArgumentType]

    def test_dataloader(self) -> list[DataLoader[Recording]]:
        """The new recordings, as one batch; shorter ones are padded."""
        return [DataLoader([pad(self.test)], batch_size=None)] if self.test else []  # pyright: ignore[reportArgumentType]

    predict_dataloader = test_dataloader
