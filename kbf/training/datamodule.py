"""Training batches of filters: windows of a fold, with the memory that lacks that fold."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import lightning
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kbf.data.windows import Span, common_length, folds, hold_out, stack, windows, without
from kbf.fitted.settings import Training
from kbf.recording import Recording, pad

# The number of a fold, and some windows of it.
Batch = tuple[int, list[Span]]


class Task(NamedTuple):
    """Filter ``windows`` (a batch ``b T``) with the filter over ``memory``, which lacks them.

    Attributes:
        memory: recordings.
        windows: of a batch, or the share of it that this process has.
        weight: of their mean loss. With weight b world / N, for N windows of the batch and b of
            them in this process, the mean over the processes is the mean over the batch. 0 where
            the process has none of the windows, and one of another process stands in.
    """

    memory: list[Recording]
    windows: Recording
    weight: float = 1.0


@dataclass(eq=False)
class FoldTasks(Dataset[Task]):
    """Maps batches to tasks. Several processes share the windows of each batch.

    Attributes:
        recordings: the part to fit.
        chunks: the spans of each fold.
        rank: number of this process.
        world: number of processes.
    """

    recordings: list[Recording]
    chunks: list[list[Span]]
    rank: int = 0
    world: int = 1

    def __getitem__(self, batch: Batch) -> Task:
        fold, spans = batch
        mine = spans[self.rank :: self.world]
        windows = stack(self.recordings, mine or spans[:1])
        weight = self.world * len(mine) / len(spans)
        return Task(without(self.recordings, self.chunks[fold]), windows, weight)


@dataclass(eq=False)
class EpochOrder(Sampler[Batch]):
    """The batches of an epoch, in an order that depends on (seed, epoch) alone.

    A run that is resumed thus continues with the same batches. A batch holds at most ``batch_size``
    windows, all of one fold.

    Attributes:
        chunks: the windows of each fold.
        batch_size: None for all windows of a fold.
        seed: of the order.
        epoch: set by the trainer.
    """

    chunks: list[list[Span]]
    batch_size: int | None
    seed: int
    epoch: int = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch; the trainer calls it before each."""
        self.epoch = epoch

    def size(self, chunk: list[Span]) -> int:
        """Return the number of windows in a batch of this fold."""
        return max(1, min(self.batch_size or len(chunk), len(chunk)))

    def __len__(self) -> int:
        return sum(-(-len(chunk) // self.size(chunk)) for chunk in self.chunks)

    def __iter__(self) -> Iterator[Batch]:
        # A generator: it reads the epoch when the first batch is requested. Lightning makes the
        # iterator of a resumed run earlier, before it sets the epoch.
        generator = torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + self.epoch)
        batches: list[Batch] = []
        for fold, chunk in enumerate(self.chunks):
            order = torch.randperm(len(chunk), generator=generator)
            batches += [
                (fold, [chunk[i] for i in part.tolist()])
                for part in order.split(self.size(chunk))
                if len(part)
            ]
        order = torch.randperm(len(batches), generator=generator).tolist()
        yield from (batches[i] for i in order)


class FilterDataModule(lightning.LightningDataModule):
    """The training part, cut into folds to fit and a held-out part; and new recordings, if any.

    Attributes:
        fit: recordings to fit.
        held: recordings to validate on, the last of the training part (`hold_out`); may be empty.
        test: new recordings.
    """

    fit: list[Recording]
    held: list[Recording]

    def __init__(
        self,
        recordings: list[Recording],
        training: Training,
        seed: int,
        validation: list[Recording] | None = None,
        test: list[Recording] | None = None,
    ) -> None:
        """Cut the recordings.

        Args:
            recordings: the training part, in the model's dtype.
            training: how to cut it.
            seed: of the order of the batches.
            validation: recordings to validate on, instead of the end of the training part.
            test: new recordings, in the units of the data, for ``trainer.test`` and
                ``trainer.predict``.

        Raises:
            ValueError: too few steps for the split, the folds or the window, with the numbers.
        """
        super().__init__()
        self.test: list[Recording] = test or []
        self.fit, self.held = (
            (recordings, validation) if validation else hold_out(recordings, training.validation)
        )
        lengths = [len(r.states) for r in self.fit]
        self.folds: list[list[Span]] = folds(lengths, training.folds)
        # Windows do not cross recordings; those of several short ones are as long as they are.
        common = common_length(lengths) if len(lengths) > 1 else training.window
        width = min(training.window, common)
        self.chunks: list[list[Span]] = [
            windows(spans, width, training.stride) for spans in self.folds
        ]
        if width <= training.burn_in:
            raise ValueError(
                f"a window of {width} steps leaves nothing after a burn-in of {training.burn_in}"
            )
        if not any(self.chunks):
            longest = max(span.stop - span.start for spans in self.folds for span in spans)
            total = sum(len(r.states) for r in recordings)
            raise ValueError(
                f"no window of {width} steps fits: {sum(lengths)} steps to fit ({total} "
                f"for training, {total - sum(lengths)} of them held out) in {training.folds} folds "
                f"leave at most {longest} in a row. Use a shorter model.training.window, fewer "
                "model.training.folds, or more data."
            )
        self.batch_size: int | None = training.batch_size
        self.order_seed: int = seed

    def train_dataloader(self) -> DataLoader[Task]:
        """Return one `Task` for each batch; without workers, since the data is in memory."""
        trainer = self.trainer
        share = (trainer.global_rank, trainer.world_size) if trainer else ()
        order = EpochOrder(self.chunks, self.batch_size, self.order_seed)
        return DataLoader(FoldTasks(self.fit, self.folds, *share), sampler=order, batch_size=None)

    def val_dataloader(self) -> list[DataLoader[Task]]:
        """Return one task: the held-out part, filtered with the memory of the part to fit."""
        held = [Task(self.fit, pad(self.held))] if self.held else []
        return [DataLoader(held, batch_size=None)] if held else []  # pyright: ignore[reportArgumentType]

    def test_dataloader(self) -> list[DataLoader[Recording]]:
        """Return the new recordings as one batch; shorter ones are padded."""
        return [DataLoader([pad(self.test)], batch_size=None)] if self.test else []  # pyright: ignore[reportArgumentType]

    predict_dataloader = test_dataloader
