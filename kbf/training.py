"""Training of every model that learns by gradient, and checkpoints that hold all that a filter needs.

The loss is the filter's own error. A batch is some windows of one fold of the recordings; the filter over the *other* folds runs
through them, and the squared error of its estimates is followed down. In the memory that filters it a window would only look
itself up. This one path trains bandwidths and ridges, recurrent nets, and encoders of images alike.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from kbf import __version__
from kbf.build import build
from kbf.data.module import FilterDataModule, Task, Training
from kbf.files import copy
from kbf.filters.base import Filter, rollout
from kbf.filters.recurrent import LSTMFilter
from kbf.metrics import mse
from kbf.sequence import Sequence

OPTIMISERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}

KEPT = ("model", "data", "recipe", "n_train", "seed")
"""What a checkpoint keeps of a configuration."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not one of ours."""


class Memory(nn.Module):
    """Recordings as buffers: they move with the module, and are saved with it."""

    def __init__(self, sequences: list[Sequence]) -> None:
        super().__init__()
        for k, sequence in enumerate(sequences):
            for name, leaf in sequence._asdict().items():
                if leaf is not None:
                    self.register_buffer(f"{name}_{k}", leaf)

    def sequences(self) -> list[Sequence]:
        """The recordings."""
        buffers = dict(self.named_buffers())
        count = sum(name.startswith("states_") for name in buffers)
        return [Sequence(buffers[f"states_{k}"], buffers[f"obs_{k}"], buffers.get(f"mask_{k}")) for k in range(count)]

    @staticmethod
    def from_state(state: Mapping[str, Tensor], prefix: str) -> Memory:
        """The memory that was saved under names with this prefix."""
        memory = Memory([])
        for name, leaf in state.items():
            if name.startswith(prefix):
                memory.register_buffer(name.removeprefix(prefix), leaf)
        return memory


class FilterTraining(lightning.LightningModule):
    """A model, the recordings it learns from, and the loss of its filter.

    Hyper-parameters are one plain dict, so that a checkpoint loads with ``weights_only=True``.
    """

    def __init__(self, config: dict[str, Any], sequences: list[Sequence] | None = None, *, trust: bool = False) -> None:
        """Build the model.

        Args:
            config: resolved, with ``model`` (``net``, ``training``, ``dtype``) and ``seed``.
            sequences: the training part, all of it; None when a checkpoint brings it.
            trust: allow ``_target_`` outside of this package.

        Raises:
            ValueError: a configuration that cannot be built.
        """
        super().__init__()
        self.save_hyperparameters("config", logger=False)
        self.config = config
        self.model_dtype: torch.dtype = getattr(torch, config["model"].get("dtype") or "float64")
        self.how = read_training(config["model"].get("training"))
        self.net: Any = build(config["model"]["net"], trust=trust)
        self.net.to(self.model_dtype)
        self.memory = Memory(cast_all(sequences or [], self.model_dtype))
        self.validation_floor: float | None = None
        self.ready: list[Filter[Any]] = []  # a filter that is made already; in a list, since its buffers are not the module's own
        self.held_out: tuple[Sequence, Tensor] | None = None

    @property
    def learns(self) -> bool:
        """Whether anything is to be learned by gradient."""
        return self.how is not None and any(p.requires_grad for p in self.net.parameters())

    def filter(self) -> Filter[Any]:
        """The filter over all the recordings."""
        return self.net.condition(self.memory.sequences())

    def training_step(self, task: Task, batch_index: int) -> Tensor:
        """Mean over windows and time, after ``burn_in`` steps, of ||z_hat - z||^2."""
        assert self.how is not None
        seed = 1_000_003 * (self.config["seed"] + 1) + self.global_step  # dropout: the same after a resume
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":  # without this test torch.manual_seed records a stack trace for a GPU at each step
            torch.cuda.manual_seed(seed)
        found, first = estimates(self.net.condition(task.memory), task.windows), self.how.burn_in
        loss = mse(found[:, first:], task.windows.states[:, first:]).mean()
        if not torch.isfinite(loss):
            raise ValueError(
                f"the training loss became {loss.item()} in epoch {self.current_epoch}: try a smaller learning rate "
                f"(model.training.lr is {self.how.lr:g}) or larger ridges"
            )
        self.log("train/loss", loss, prog_bar=True, on_step=False, on_epoch=True, batch_size=len(found), sync_dist=True)
        return loss

    def validation_step(self, task: Task, batch_index: int) -> None:
        """Error of the held-out part from its first step on, its excess over the floor, and how the filter is doing."""
        run = rollout(self.net.condition(task.memory), task.windows.obs, mask=task.windows.mask)
        states = task.windows.states  # NaN behind the end of the shorter ones
        error = mse(run.estimates, states, states.isfinite().all(-1)).mean()
        self.log("validation/mse", error, prog_bar=True, batch_size=1, sync_dist=True)
        if self.validation_floor is not None:
            self.log("validation/excess", error / self.validation_floor - 1, batch_size=1, sync_dist=True)
        for name, values in run.diagnostics.items():
            self.log(f"filter/{name}", values.mean(), batch_size=1, sync_dist=True)
        self.held_out = task.windows, run.estimates

    def on_train_epoch_end(self) -> None:
        """Log the hyper-parameters that move, the learning rate, and now and then a picture of the held-out track."""
        assert self.how is not None
        if hasattr(self.net, "hyperparameters"):
            self.log_dict({f"hyperparameters/{k}": v for k, v in self.net.hyperparameters().items()})
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.held_out is not None and self.current_epoch % max(1, self.how.epochs // 5) == 0:
            sequence, found = self.held_out
            first = Sequence(*(None if leaf is None else leaf[0].cpu() for leaf in sequence))  # pyright: ignore[reportArgumentType]
            log_track(list(self.loggers), "track/validation", first, found[0].detach().cpu(), self.current_epoch)

    def configure_optimizers(self) -> Any:
        """The optimiser, and a learning rate that stays or falls to zero along half a cosine."""
        assert self.how is not None
        parameters = [p for p in self.net.parameters() if p.requires_grad]
        optimiser = OPTIMISERS[self.how.optimiser](parameters, lr=self.how.lr, weight_decay=self.how.weight_decay)
        if self.how.schedule == "cosine":
            steps = int(self.trainer.estimated_stepping_batches) * self.how.epochs // (self.trainer.max_epochs or self.how.epochs)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
            return {"optimizer": optimiser, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}
        return optimiser

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the operators of the filter over all the recordings beside the parameters."""
        with torch.no_grad():
            filter = self.ready[0] if self.ready else self.filter()
        operators = filter.state_dict() if isinstance(filter, nn.Module) and filter is not self.net else {}
        checkpoint["kbf"] = {"version": __version__, "operators": dict(operators)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the recordings, and the shapes of what depends on them, from the checkpoint before its values are loaded."""
        self.memory = Memory.from_state(checkpoint["state_dict"], "memory.").to(self.device)
        take_shapes(self.net, {k.removeprefix("net."): v for k, v in checkpoint["state_dict"].items() if k.startswith("net.")})


class Checkpoints(Checkpoint):
    """``best.ckpt`` with the least validation error so far, ``last.ckpt``, and the end when it no longer falls.

    Without a validation part the newest is the best. Lightning writes each file in one step.
    """

    def __init__(self, directory: Path, patience: int | None = None) -> None:
        """``patience``: stop after this many epochs without a new best; None goes on to the end."""
        self.directory, self.patience = directory, patience
        self.best, self.wait = float("inf"), 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run must know."""
        return {"best": self.best, "wait": self.wait}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there, if the best checkpoint so far is here as well."""
        if (self.directory / "best.ckpt").exists():
            self.best, self.wait = state_dict["best"], state_dict["wait"]

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """A run that had already stopped early has nothing left to do."""
        self.stop_if_done(trainer)

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Compare, save, perhaps stop."""
        score = trainer.callback_metrics.get("validation/mse")
        better = score is None or float(score) < self.best
        self.best = float(score) if better and score is not None else self.best
        self.wait = 0 if better else self.wait + 1
        trainer.save_checkpoint(self.directory / "last.ckpt")
        if better and trainer.is_global_zero:
            copy(self.directory / "last.ckpt", self.directory / "best.ckpt")
        self.stop_if_done(trainer)

    def stop_if_done(self, trainer: lightning.Trainer) -> None:
        """Tell the trainer to stop when the patience is at its end."""
        if self.patience is not None and self.wait >= self.patience:
            trainer.should_stop = True


class Trained(NamedTuple):
    """A model with its best parameters, the filter over its recordings, the epochs it took, and its least validation error."""

    module: FilterTraining
    filter: Filter[Any]
    epochs: int
    validation_mse: float | None = None


def train(
    config: dict[str, Any],
    sequences: list[Sequence],
    directory: Path,
    *,
    ckpt_path: Path | None = None,
    validation_floor: float | None = None,
    loggers: list[Logger] | None = None,
    trust: bool = False,
    begin: Callable[[], None] = lambda: None,
) -> Trained | None:
    """Prepare a model on the training part, fit what learns by gradient, and leave ``best.ckpt`` and ``last.ckpt``.

    Args:
        config: resolved: ``model``, ``trainer`` and ``seed``.
        sequences: the training part.
        directory: where the checkpoints go.
        ckpt_path: a ``last.ckpt`` to go on from.
        validation_floor: least possible error on the held-out part, to log the excess over it.
        loggers: where the curves go.
        trust: allow ``_target_`` outside of this package.
        begin: called when the model has taken the data and before the first file is written: an earlier run may be cleared then.

    Returns:
        The best model; None in the helper processes of a distributed run.

    Raises:
        ValueError: too few steps, or a configuration that cannot be built. CheckpointError: ``ckpt_path`` cannot be loaded.
    """
    quiet()
    lightning.seed_everything(config["seed"], verbose=False)
    kept = {key: config[key] for key in KEPT if key in config}
    module = FilterTraining(kept, sequences, trust=trust)
    checkpoints = Checkpoints(directory, module.how.patience if module.how else None)
    callbacks = [*build(config["trainer"].get("callbacks") or [], trust=True), checkpoints]
    settings = {key: value for key, value in config["trainer"].items() if key != "callbacks"}
    trainer = build(settings, trust=True, callbacks=callbacks, logger=loggers or False)
    generator = torch.Generator().manual_seed(config["seed"])
    if module.learns and module.how is not None:
        tasks = FilterDataModule(module.memory.sequences(), module.how, config["seed"])
        module.net.prepare(tasks.fit, generator)
        module.validation_floor = validation_floor
        if ckpt_path is not None:
            read_checkpoint(ckpt_path)
        if trainer.is_global_zero:
            begin()
        directory.mkdir(parents=True, exist_ok=True)
        trainer.fit(module, tasks, ckpt_path=ckpt_path)
    else:
        module.to(trainer.strategy.root_device).eval()
        module.net.prepare(module.memory.sequences(), generator)
        with torch.no_grad():
            module.ready.append(module.filter())
        if trainer.is_global_zero:
            begin()
        trainer.strategy.connect(module)
        directory.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(directory / "last.ckpt")
        copy(directory / "last.ckpt", directory / "best.ckpt")
    if not trainer.is_global_zero:
        return None
    if module.ready:
        return Trained(module, module.ready[0], 0)
    best = load_filter(directory / "best.ckpt", device=trainer.strategy.root_device, trust=trust)
    return Trained(best.module, best.filter, trainer.current_epoch, checkpoints.best if math.isfinite(checkpoints.best) else None)


def check(config: dict[str, Any], sequences: list[Sequence], *, trust: bool = False) -> None:
    """Raise what `train` would raise of a configuration that cannot be built or data that is too short, before anything is done."""
    module = FilterTraining(config, sequences, trust=trust)
    if module.learns and module.how is not None:
        FilterDataModule(sequences, module.how, config["seed"])


def load_filter(path: str | os.PathLike[str], *, device: str | torch.device = "cpu", trust: bool = False) -> Trained:
    """A filter from its checkpoint alone: memory, bandwidths and operators are inside.

    Args:
        path: of a ``best.ckpt`` or ``last.ckpt``.
        device: where to.
        trust: allow the checkpoint to name classes outside of this package.

    Raises:
        CheckpointError: no such file, not a checkpoint of this project, or one that does not fit the installed version.
    """
    checkpoint = read_checkpoint(path)
    config = checkpoint["hyper_parameters"]["config"]
    try:
        module = FilterTraining(config, trust=trust)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        module.to(device).eval()
        with torch.no_grad():
            filter = module.filter()
        operators = checkpoint["kbf"]["operators"]
        if isinstance(filter, nn.Module) and operators:
            take_shapes(filter, operators)
            filter.load_state_dict(operators)
            filter.eval()
    except (RuntimeError, KeyError, TypeError) as error:
        version = checkpoint["kbf"]["version"]
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"checkpoint {path} (kbf {version}) does not fit kbf {__version__}: {reason}") from error
    return Trained(module, filter, checkpoint["epoch"])


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint of this project, on the CPU; nothing in the file is executed.

    Raises:
        CheckpointError: no such file, damaged, or of another project.
    """
    if not Path(path).is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what comes out of a file that is no checkpoint is beyond listing
        reason = str(error).strip().split("\n")[0][:200]
        size = Path(path).stat().st_size
        raise CheckpointError(f"{path} ({size} bytes) is no checkpoint, or damaged: {type(error).__name__}: {reason}") from error
    if not isinstance(checkpoint, dict) or not {"kbf", "state_dict", "hyper_parameters"} <= checkpoint.keys():
        raise CheckpointError(f"{path} was not written by kbf: it lacks its entries")
    return checkpoint


def take_shapes(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give buffers and parameters the shape that they have in ``state``, where it differs: it may depend on the data."""
    for name, value in state.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name) if owner_name in dict(module.named_modules()) else None
        held = None if owner is None else getattr(owner, leaf, None)
        if isinstance(held, Tensor) and held.shape != value.shape:
            held.data = torch.empty(value.shape, dtype=held.dtype, device=held.device)


def estimates(filter: Filter[Any], windows: Sequence) -> Tensor:
    """``b T d``: the rollout's, or a recurrent net's own faster way to the same numbers."""
    if isinstance(filter, LSTMFilter):
        return filter(windows.obs, windows.mask)
    return rollout(filter, windows.obs, mask=windows.mask).estimates


def cast_all(sequences: list[Sequence], dtype: torch.dtype) -> list[Sequence]:
    """The same recordings in another dtype."""
    return [s._replace(states=s.states.to(dtype), obs=s.obs.to(dtype)) for s in sequences]


def log_track(loggers: list[Any], tag: str, sequence: Sequence, found: Tensor, step: int) -> None:
    """A picture of truth and estimate, for the loggers that take pictures."""
    takers = [logger for logger in loggers if hasattr(getattr(logger, "experiment", None), "add_figure")]
    if takers:
        from kbf.plots import track_figure

        figure = track_figure(sequence, found)
        for logger in takers:
            logger.experiment.add_figure(tag, figure, step)


def read_training(config: dict[str, Any] | None) -> Training | None:
    """The ``training`` part of a model's configuration; None for a model that does not learn by gradient."""
    if config is None:
        return None
    known = Training._fields
    if wrong := [key for key in config if key not in known]:
        raise ValueError(f"model.training has no {wrong[0]!r}; it has {', '.join(known)}")
    if missing := {"epochs", "lr"} - config.keys():
        raise ValueError(f"model.training needs {' and '.join(sorted(missing))}")
    training = Training(**config)
    for key, options in (("optimiser", list(OPTIMISERS)), ("schedule", ["constant", "cosine"])):
        if (chosen := getattr(training, key)) not in options:
            raise ValueError(f"model.training.{key} must be one of {', '.join(options)}; got {chosen!r}")
    return training


def quiet() -> None:
    """Silence what Lightning says to everybody and what does not apply here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    texts = ("does not have many workers", "GPU available but not used", "number of training batches", "litlogger")
    for text in (*texts, "Total length of", "sync_dist=True", "isinstance.treespec, LeafSpec"):
        warnings.filterwarnings("ignore", f".*{text}.*")
