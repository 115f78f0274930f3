"""Callbacks of training: which checkpoints a run leaves, and when it ends. Lightning's, made to go on where a run ended."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO

from kbf.runtime.instantiate import build
from kbf.runtime.tensor_files import write_tensors
from kbf.training.checkpoint import read_checkpoint

BEST, LAST, ENCODERS = "best.ckpt", "last.ckpt", "encoder.ckpt"
"""Files of a run: the model with the least validation error, the newest one, and the newest of the first stage."""
VALIDATION, VALIDATION_LOSS = "validation/mse", "validation/loss"
"""The error on what is held out, and the net's own loss there: metrics by which one epoch is better than another."""


class BestCheckpoint(ModelCheckpoint):
    """Lightning's, for ``best.ckpt``: the model with the least validation error, or the newest where nothing is held out.

    It must come before the `LastCheckpoint`: the error that ``last.ckpt`` calls the least so far is
    then always one that ``best.ckpt`` has reached, wherever a process is killed. (The other way
    round, a resumed run would compare with the error of a model that was never written.) Unlike
    Lightning's it goes on in another folder too, and writes no path of this machine.
    """

    best_model_path: str
    kth_best_model_path: str
    least: float | None
    """The validation error of the best model; None without, or where it is no finite number."""

    def __init__(self, directory: Path, monitor: str | None = VALIDATION) -> None:
        """``monitor``: None where nothing is held out."""
        stem = BEST.removesuffix(".ckpt")
        super().__init__(
            directory, stem, monitor, enable_version_counter=False, save_on_train_epoch_end=True
        )
        self.least = None

    @property
    def state_key(self) -> str:
        """The name under which checkpoints keep the state."""
        return type(self).__name__

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Save what is best so far, with its error."""
        found = trainer.callback_metrics
        if self.monitor is not None and self.check_monitor_top_k(trainer, found.get(self.monitor)):
            error = float(found[VALIDATION])
            self.least = error if math.isfinite(error) else None
        super().on_train_epoch_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {
            "best_model_score": None if self.monitor is None else self.best_model_score,
            "least": self.least,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, if the best checkpoint so far is here as well."""
        path, score = Path(str(self.dirpath)) / BEST, state_dict["best_model_score"]
        if score is not None and path.exists():
            self.best_model_score = self.current_score = self.kth_value = torch.as_tensor(score)
            self.best_model_path = self.kth_best_model_path = str(path)
            self.best_k_models = {str(path): self.best_model_score}
            self.least = state_dict.get(
                "least", float(score)
            )  # of a run before there were two metrics


class LastCheckpoint(Checkpoint):
    """The newest model: an interrupted stage goes on from it.

    A file of an earlier stage, ``replaces``, is removed once this one is written.
    """

    path: Path
    seconds: float
    replaces: Path | None
    saved: float

    def __init__(self, path: Path, seconds: float = 0.0, replaces: Path | None = None) -> None:
        """``seconds``: write at most every so many, and at the end."""
        self.path, self.seconds, self.replaces, self.saved = path, seconds, replaces, -math.inf

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Save when the last time is long enough ago, and at the end."""
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.strategy.broadcast(last or time.monotonic() - self.saved >= self.seconds):
            trainer.save_checkpoint(self.path)
            self.saved = time.monotonic()
            if self.replaces is not None and trainer.is_global_zero:
                self.replaces.unlink(missing_ok=True)


class EarlyStopping(lightning_callbacks.EarlyStopping):
    """Lightning's; a run that had stopped has nothing left to do when it is resumed."""

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Stop where the patience is at its end already."""
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience


def build_callbacks(
    config: dict[str, Any], *, directory: Path | None = None, first_stage: bool = False
) -> list[Callback]:
    """The callbacks that ``config["callbacks"]`` names, made anew for each stage.

    Progress bars are left out where ``trainer.enable_progress_bar`` is off. In the first stage,
    which fits encoders, those that save checkpoints or watch a metric are: they are meant for the
    filter. Checkpoints of which nobody has said where go to ``directory``.

    Raises:
        ValueError: something that cannot be built, or is no callback.
    """
    made = [
        build(value, trust=True)
        for value in (config.get("callbacks") or {}).values()
        if value is not None
    ]
    shown = config["trainer"].get("enable_progress_bar", True)
    made = [callback for callback in made if shown or not isinstance(callback, ProgressBar)]
    for callback in made:
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks: {type(callback).__name__} is no callback of Lightning")
        if (
            isinstance(callback, ModelCheckpoint)
            and callback.dirpath is None
            and directory is not None
        ):
            callback.dirpath = str(directory)
    return [
        c
        for c in made
        if not first_stage
        or (not isinstance(c, Checkpoint) and getattr(c, "monitor", None) is None)
    ]


def early_stopping(
    patience: int | None, monitor: str | None, others: list[Callback]
) -> list[Callback]:
    """What ``model.training.patience`` asks for, by the metric ``monitor`` (None where no part is held out).

    Nothing where ``others`` have a rule of their own.
    """
    if (
        patience is None
        or monitor is None
        or any(isinstance(c, lightning_callbacks.EarlyStopping) for c in others)
    ):
        return []
    return [
        EarlyStopping(monitor, patience=patience, check_finite=False, check_on_train_epoch_end=True)
    ]


def check_callbacks(made: list[Callback], held_out: bool) -> None:
    """Raise unless the metrics that callbacks watch will be there.

    Raises:
        ValueError: a callback that watches a validation metric, where nothing is held out.
    """
    for callback in made:
        name, monitor = type(callback).__name__, getattr(callback, "monitor", None)
        if monitor is not None and monitor.startswith("validation/") and not held_out:
            raise ValueError(
                f"callbacks: {name} watches {monitor}, and nothing is held out: set model.training.validation, as 0.2, or give "
                "the data a validation part"
            )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints of a run whole or not at all, and reads only undamaged ones.

    Lightning's own class writes to a temporary file in TMPDIR, which is copied, not renamed, where
    that is another file system.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Overrides `TorchCheckpointIO.save_checkpoint`: writes the file in one step."""
        write_tensors(checkpoint, path)

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = True
    ) -> dict[str, Any]:
        """Overrides `TorchCheckpointIO.load_checkpoint`: nothing in the file is executed."""
        return read_checkpoint(path)
