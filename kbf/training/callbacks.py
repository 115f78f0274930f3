"""Callbacks of training: Lightning's checkpoints and early stopping, with exact resumption."""

import logging
import math
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import Callback, Checkpoint, ModelCheckpoint, ProgressBar
from lightning.pytorch.plugins.io import TorchCheckpointIO

from kbf.fitted.checkpoint import BEST, read_checkpoint
from kbf.runtime.instantiate import build
from kbf.runtime.tensor_files import write_tensors

log: logging.Logger = logging.getLogger(__name__)

# File of the newest encoders, while the first stage runs.
ENCODERS = "encoder.ckpt"
# Metric: the error on the held-out part.
VALIDATION = "validation/mse"
# Metric: the model's own loss on the held-out part.
VALIDATION_LOSS = "validation/loss"


class BestCheckpoint(ModelCheckpoint):
    """Writes ``best.ckpt``: the model with the least validation error, or without one the newest.

    It must precede the `LastCheckpoint`: the least error that ``last.ckpt`` stores is then always
    one that ``best.ckpt`` has reached, wherever a process is killed. In the other order a resumed
    run would compare with the error of a model that was never written. Unlike Lightning's class it
    can continue in another folder, and stores no path.

    Attributes:
        least: validation error of the best model; None without, or where it is not finite.
    """

    best_model_path: str
    kth_best_model_path: str

    def __init__(self, directory: Path, monitor: str | None = VALIDATION) -> None:
        """``monitor``: None where nothing is held out."""
        stem = BEST.removesuffix(".ckpt")
        super().__init__(
            directory, stem, monitor, enable_version_counter=False, save_on_train_epoch_end=True
        )
        self.least: float | None = None

    @property
    def state_key(self) -> str:
        """Return the name under which checkpoints store the state."""
        return type(self).__name__

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Save the model if it is the best so far, with its error."""
        found = trainer.callback_metrics
        if self.monitor is not None and self.check_monitor_top_k(trainer, found.get(self.monitor)):
            error = float(found[VALIDATION])
            self.least = error if math.isfinite(error) else None
        super().on_train_epoch_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs."""
        return {
            "best_model_score": None if self.monitor is None else self.best_model_score,
            "least": self.least,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state, if the best checkpoint is in the folder as well."""
        path, score = Path(str(self.dirpath)) / BEST, state_dict["best_model_score"]
        if score is not None and path.exists():
            self.best_model_score = self.current_score = self.kth_value = torch.as_tensor(score)
            self.best_model_path = self.kth_best_model_path = str(path)
            self.best_k_models = {str(path): self.best_model_score}
            self.least = state_dict["least"]


class LastCheckpoint(Checkpoint):
    """Writes the newest model, from which an interrupted stage continues."""

    def __init__(self, path: Path, seconds: float = 0.0, replaces: Path | None = None) -> None:
        """Set the file.

        Args:
            path: the file.
            seconds: least time between two writes; the last epoch is always written.
            replaces: file of an earlier stage, removed once this one is written.
        """
        self.path: Path = path
        self.seconds: float = seconds
        self.replaces: Path | None = replaces
        self.saved: float = -math.inf

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Save where ``seconds`` have passed since the last write, and at the end."""
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.strategy.broadcast(last or time.monotonic() - self.saved >= self.seconds):
            trainer.save_checkpoint(self.path)
            self.saved = time.monotonic()
            if self.replaces is not None and trainer.is_global_zero:
                self.replaces.unlink(missing_ok=True)


class EpochMessages(Callback):
    """Logs the number of each epoch with its losses, for `kbf.runtime.progress`."""

    def on_train_epoch_end(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Log what the module shows in progress bars."""
        numbers = trainer.progress_bar_metrics.items()
        shown = "".join(f", {name} {value:.4g}" for name, value in numbers)
        log.info("epoch %d of %d%s", trainer.current_epoch + 1, trainer.max_epochs, shown)


class EarlyStopping(lightning_callbacks.EarlyStopping):
    """Early stopping that stops a resumed run at once if it had stopped before."""

    def on_train_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule
    ) -> None:
        """Stop if the patience is exhausted already."""
        trainer.should_stop = trainer.should_stop or self.wait_count >= self.patience


def build_callbacks(
    config: dict[str, Any], *, directory: Path | None = None, first_stage: bool = False
) -> list[Callback]:
    """Build the callbacks of ``config["callbacks"]``, new ones for each stage.

    Progress bars are left out where ``trainer.enable_progress_bar`` is off. Callbacks that save
    checkpoints or watch a metric are for the filter, and left out in the first stage. Checkpoints
    without a folder go to ``directory``.

    Raises:
        ValueError: a callback cannot be built, or is none of Lightning.
    """
    made: list[Callback] = []
    shown = config["trainer"].get("enable_progress_bar", True)
    for value in (config.get("callbacks") or {}).values():
        callback = None if value is None else build(value, trust=True)
        if callback is None or (isinstance(callback, ProgressBar) and not shown):
            continue
        if not isinstance(callback, Callback):
            raise ValueError(f"callbacks: {type(callback).__name__} is no callback of Lightning")
        if isinstance(callback, ModelCheckpoint) and directory and callback.dirpath is None:
            callback.dirpath = str(directory)
        of_filter = isinstance(callback, Checkpoint) or getattr(callback, "monitor", None)
        if not (first_stage and of_filter):
            made.append(callback)
    return made


def early_stopping(
    patience: int | None, monitor: str | None, others: list[Callback]
) -> list[Callback]:
    """Return the early stopping of ``model.training.patience``, if any.

    The list is empty where no part is held out (``monitor`` is None), and where ``others`` contain
    an early stopping.
    """
    present = any(isinstance(c, lightning_callbacks.EarlyStopping) for c in others)
    if patience is None or monitor is None or present:
        return []
    settings: Any = {"check_finite": False, "check_on_train_epoch_end": True}
    return [EarlyStopping(monitor, patience=patience, **settings)]


def check_callbacks(made: list[Callback], held_out: bool) -> None:
    """Check that the metrics which callbacks watch will be logged.

    Raises:
        ValueError: a callback watches a validation metric, and nothing is held out.
    """
    for callback in made:
        name, monitor = type(callback).__name__, getattr(callback, "monitor", None)
        if monitor is not None and monitor.startswith("validation/") and not held_out:
            raise ValueError(
                f"callbacks: {name} watches {monitor}, and nothing is held out: set "
                "model.training.validation, as 0.2, or give the data a validation part"
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
