"""Training of every model that learns by gradient, and checkpoints that hold all that a filter needs.

The loss is the filter's own error. A batch is some windows of one fold of the recordings; the filter over the *other* folds runs
through them, and the squared error of its estimates is followed down. In the memory that filters it a window would only look
itself up. This one path trains bandwidths and ridges, recurrent nets, and encoders of images alike.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
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
from kbf.data.own import Boundary
from kbf.data.windows import folds, take
from kbf.distributed import Total, all_sum
from kbf.files import copy, replacing
from kbf.filters.base import Filter, rollout
from kbf.filters.recurrent import LSTMFilter
from kbf.metrics import mse
from kbf.monitor import Monitor
from kbf.nn.augment import Augment
from kbf.nn.coding import Code, CodedFilter
from kbf.nn.feature_filter import FeatureKBF
from kbf.nn.kernel_bayes import KBF
from kbf.nn.scaling import ScaledFilter, Scaling
from kbf.pictures import log_frames, log_track
from kbf.pretraining import (
    OPTIMISERS,
    Coding,
    LastCheckpoint,
    build_code,
    check_batches,
    check_encoder,
    fit,
    fit_code,
    read_coding,
    seed_step,
    warn_of_chance,
)
from kbf.sequence import Sequence, as_float, control_width, observed_pairs
from kbf.uncertainty import Calibration

KEPT = ("model", "data", "recipe", "n_train", "seed")
"""What a checkpoint keeps of a configuration."""
OLDEST = (0, 1)
"""The first version whose checkpoints this one reads."""


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
        return [Sequence(*(buffers.get(f"{name}_{k}") for name in Sequence._fields)) for k in range(count)]  # pyright: ignore[reportArgumentType]

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
        if "candidates" in config["model"]:
            raise ValueError("model=auto chooses a model from the data: that is for kbf train, name one here")
        self.net: Any = build(config["model"]["net"], trust=trust)
        self.net.to(self.model_dtype)
        if self.how is not None and self.how.shared and not isinstance(self.net, KBF):
            raise ValueError(f"model.training.shared: only kernel filters share a memory, not {type(self.net).__name__}")
        d = sequences[0].states.shape[1] if sequences else 1  # a checkpoint brings its own
        self.coding, self.code = self.build_coding(config["model"].get("coding"), d, trust)
        images = self.coding is not None  # encoders take them as they are stored
        self.scaling = build_scaling(config.get("data") or {}, sequences)
        scaled = self.in_units_of_the_filter(sequences or [])
        self.memory = Memory(scaled if images else cast_all(scaled, self.model_dtype))
        self.augment = Augment(self.coding.augment if self.coding else ())
        self.observation = tuple(sequences[0].obs.shape[1:]) if sequences else None
        self.validation_floor: float | None = None
        self.borrowed_seconds = 0.0
        self.ready: list[Filter[Any]] = []  # a filter that is made already; in a list, since its buffers are not the module's own
        self.held_out: tuple[Sequence, Tensor] | None = None
        self.extent: tuple[float, float, float, float] | None = None

    @property
    def learns(self) -> bool:
        """Whether anything is to be learned by gradient."""
        return self.how is not None and any(p.requires_grad for p in self.net.parameters())

    def build_coding(self, config: dict[str, Any] | None, d: int, trust: bool) -> tuple[Coding | None, Code | None]:
        """How encoders are fitted before all else, and the code that they make; none for a net with an encoder of its own."""
        if config is None:
            return None, None
        how = read_coding({key: build(value, trust=trust) for key, value in config.items() if key != "encoder"})
        if isinstance(self.net, FeatureKBF):
            return how._replace(members=1), None
        if config.get("encoder") is None:
            raise ValueError("data.coding needs encoder")
        if not isinstance(config["encoder"], dict):
            name = config["encoder"]
            raise ValueError(f"data.coding.encoder must be a class and its settings: write encoder@data.coding.encoder={name}")
        with torch.random.fork_rng(devices=[]):  # whatever the net has drawn: models on one data set start from one code
            torch.manual_seed(1_000_003 * (self.config["seed"] + 1) - 1)
            encoders = [build(config["encoder"], trust=trust) for _ in range(how.members)]
            return how, build_code(encoders, d if how.visible is None else len(how.visible))

    @torch.no_grad()
    def filter(self) -> Filter[Any]:
        """The filter over all the recordings; the module is left in eval mode."""
        self.eval()
        filter = self.net.condition(self.memory.sequences())
        if self.code is not None:
            filter = CodedFilter(self.code, filter, self.model_dtype).to(self.device).eval()
        return filter if self.scaling is None else ScaledFilter(self.scaling, filter, self.model_dtype).to(self.device).eval()

    @property
    def input_dtype(self) -> torch.dtype:
        """What the filter takes. In front of a scaling float64: far from zero single precision would not tell values apart."""
        return torch.float64 if self.scaling is not None and len(self.scaling.x_mean) else self.model_dtype

    def in_units_of_the_filter(self, sequences: list[Sequence]) -> list[Sequence]:
        """Recordings as the memory holds them, if there is a scaling."""
        return list(sequences) if self.scaling is None else [self.scaling(s) for s in sequences]

    def in_units_of_the_data(self, states: Tensor) -> Tensor:
        """States or estimates as people know them."""
        return states if self.scaling is None else self.scaling.states(states)

    def take_codes(self, stored: dict[str, Any]) -> None:
        """A code that was fitted before, the coded recordings, and the time that it took."""
        assert self.code is not None
        self.borrowed_seconds = float(stored["seconds"])
        self.code.load_state_dict(stored["code"])
        coded = Memory.from_state(stored["memory"], "").sequences()
        self.memory = Memory(cast_all(coded, self.model_dtype))

    def training_step(self, task: Task, batch_index: int) -> Tensor:
        """Mean over windows and time, after ``burn_in`` steps, of ||z_hat - z||^2."""
        assert self.how is not None
        seed_step(self.config["seed"], self.global_step, self.device)
        memory = self.share(task.memory)
        if isinstance(self.net, FeatureKBF):
            found = self.net.estimates(memory[0], task.windows, self.augment, *memory[1:])
        else:
            found = estimates(self.net.condition(*memory), task.windows)
        first = self.how.burn_in
        loss = mse(found[:, first:], task.windows.states[:, first:]).mean()
        if not torch.isfinite(loss):
            raise ValueError(
                f"the training loss became {loss.item()} in epoch {self.current_epoch}: try a smaller learning rate "
                f"(model.training.lr is {self.how.lr:g}) or larger ridges"
            )
        self.log("train/loss", loss, prog_bar=True, on_step=False, on_epoch=True, batch_size=len(found), sync_dist=True)
        return loss

    def share(self, memory: list[Sequence]) -> tuple[list[Sequence]] | tuple[list[Sequence], Total]:
        """What a filter is conditioned on: a memory, or this process's share of it and how the shares' sums add up.

        A share is a stretch of the recordings laid one behind the other; where one is cut, a transition is lost.
        """
        world = self.trainer.world_size
        if self.how is None or not self.how.shared or world == 1:
            return (memory,)
        return take(memory, folds([len(s.states) for s in memory], world)[self.global_rank]), all_sum

    def validation_step(self, task: Task, batch_index: int) -> None:
        """Error of the held-out part from its first step on, its excess over the floor, and how the filter is doing."""
        filter = self.net.condition(*self.share(task.memory))
        run = rollout(filter, task.windows.obs, mask=task.windows.mask, controls=task.windows.controls)
        states = self.in_units_of_the_data(task.windows.states)  # NaN behind the end of the shorter ones
        found = self.in_units_of_the_data(run.estimates)
        error = mse(found, states, states.isfinite().all(-1)).mean()
        self.log("validation/mse", error, prog_bar=True, batch_size=1, sync_dist=True)
        if self.validation_floor is not None:
            self.log("validation/excess", error / self.validation_floor - 1, batch_size=1, sync_dist=True)
        for name, values in run.diagnostics.items():
            self.log(f"filter/{name}", values.mean(), batch_size=1, sync_dist=True)
        self.held_out = task.windows._replace(states=states), found

    def on_train_epoch_end(self) -> None:
        """Log the hyper-parameters that move, the learning rate, and now and then a picture of the held-out track."""
        assert self.how is not None
        if hasattr(self.net, "hyperparameters"):
            self.log_dict({f"hyperparameters/{k}": v for k, v in self.net.hyperparameters().items()})
        self.log("learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.held_out is not None and self.current_epoch % max(1, self.how.epochs // 5) == 0:
            sequence, found = self.held_out
            first = Sequence(*(None if leaf is None else leaf[0].cpu() for leaf in sequence))  # pyright: ignore[reportArgumentType]
            shown = (first, found[0].detach().cpu(), self.current_epoch)
            log_track(list(self.loggers), "track/validation", *shown)
            if first.obs.ndim == 4:
                log_frames(list(self.loggers), "frames/validation", *shown, extent=self.extent)

    def configure_optimizers(self) -> Any:
        """The optimiser, and a learning rate that stays or falls to zero along half a cosine."""
        assert self.how is not None
        named = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
        parameters: list[dict[str, Any]] = [{"params": [p for name, p in named if "encoder." not in name]}]
        lr = self.how.lr if self.how.lr_encoder is None else self.how.lr_encoder
        parameters += [{"params": [p for name, p in named if "encoder." in name], "lr": lr}]
        parameters = [group for group in parameters if group["params"]]
        optimiser = OPTIMISERS[self.how.optimiser](parameters, lr=self.how.lr, weight_decay=self.how.weight_decay)
        if self.how.schedule == "cosine":
            steps = int(self.trainer.estimated_stepping_batches) * self.how.epochs // (self.trainer.max_epochs or self.how.epochs)
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
            return {"optimizer": optimiser, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}
        return optimiser

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the operators of the filter over all the recordings beside the parameters."""
        training = self.training
        filter = inner_filter(self.ready[0] if self.ready else self.filter())
        self.train(training)
        operators = filter.state_dict() if isinstance(filter, nn.Module) and filter is not self.net else {}
        checkpoint["kbf"] = {"version": __version__, "operators": dict(operators), "observation": self.observation}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the recordings, and the shapes of what depends on them, from the checkpoint before its values are loaded."""
        self.memory = Memory.from_state(checkpoint["state_dict"], "memory.").to(self.device)
        self.observation = checkpoint["kbf"].get("observation") or tuple(self.memory.sequences()[0].obs.shape[1:])
        take_shapes(self, {k: v for k, v in checkpoint["state_dict"].items() if k.startswith(("net.", "code.", "scaling."))})


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
        if trainer.is_global_zero:
            if better:
                copy(self.directory / "last.ckpt", self.directory / "best.ckpt")
            (self.directory / "coding.ckpt").unlink(missing_ok=True)
        self.stop_if_done(trainer)

    def stop_if_done(self, trainer: lightning.Trainer) -> None:
        """Tell the trainer to stop when the patience is at its end."""
        if self.patience is not None and self.wait >= self.patience:
            trainer.should_stop = True


class Trained(NamedTuple):
    """A model with its best parameters, the filter over its recordings, the epochs it took, and its least validation error.

    ``calibration`` and ``monitor``: what held-out steps of the training data said of the filter's covariances and of its
    predictions; None where nobody asked (`kbf.held_out`), in older checkpoints, and without covariances the first of them.
    """

    module: FilterTraining
    filter: Filter[Any]
    epochs: int
    validation_mse: float | None = None
    calibration: Calibration | None = None
    monitor: Monitor | None = None


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
    codes: Path | None = None,
    extent: tuple[float, float, float, float] | None = None,
    validation: list[Sequence] | None = None,
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
        codes: a file that keeps the fitted code of these images: taken from there if it exists, written there if not.
        extent: of states that are positions in an image, for the pictures (`kbf.frame_plots.frame_grid`).
        validation: recordings to validate on; without them ``model.training.validation`` holds out a part of the training part.

    Returns:
        The best model; None in the helper processes of a distributed run.

    Raises:
        ValueError: too few steps, or a configuration that cannot be built. CheckpointError: ``ckpt_path`` cannot be loaded.
    """
    quiet()
    lightning.seed_everything(config["seed"], verbose=False)
    kept = {key: config[key] for key in KEPT if key in config}
    module = FilterTraining(kept, sequences, trust=trust)
    module.extent = extent
    checkpoints = Checkpoints(directory, module.how.patience if module.how else None)
    settings = {key: value for key, value in config["trainer"].items() if key != "callbacks"}
    generator = torch.Generator().manual_seed(config["seed"])
    stored = {} if ckpt_path is None else read_checkpoint(ckpt_path)
    if module.coding is not None:
        begin = started(begin)
        if stored and stored["kbf"].get("stage") != "coding":
            module.on_load_checkpoint(stored)
            module.load_state_dict(stored["state_dict"])
        elif codes is not None and codes.is_file() and module.code is not None:
            module.take_codes(torch.load(codes, map_location="cpu", weights_only=True))
        else:
            began = time.perf_counter()
            encode(module, settings, bars(config), loggers, directory, ckpt_path, begin, validation)
            ckpt_path = None
            if codes is not None and module.code is not None:
                stored = {"code": module.code.state_dict(), "memory": module.memory.state_dict()}
                with replacing(codes) as temporary:
                    torch.save(stored | {"seconds": time.perf_counter() - began}, temporary)
        if module.code is not None:
            module.code.requires_grad_(False).eval()
    trainer = build(settings, trust=True, callbacks=[*bars(config), checkpoints], logger=loggers or False)
    if module.learns and module.how is not None:
        tasks = FilterDataModule(module.memory.sequences(), module.how, config["seed"], held_recordings(module, validation))
        module.net.prepare(tasks.fit, generator)
        module.validation_floor = validation_floor
        if trainer.is_global_zero:
            begin()
        directory.mkdir(parents=True, exist_ok=True)
        fit(trainer, module, tasks, ckpt_path=ckpt_path)
    else:
        module.to(trainer.strategy.root_device).eval()
        module.net.prepare(module.memory.sequences(), generator)
        module.ready.append(module.filter())
        if trainer.is_global_zero:
            begin()
        trainer.strategy.connect(module)
        directory.mkdir(parents=True, exist_ok=True)
        trainer.save_checkpoint(directory / "last.ckpt")
        if trainer.is_global_zero:
            copy(directory / "last.ckpt", directory / "best.ckpt")
            (directory / "coding.ckpt").unlink(missing_ok=True)
    if not trainer.is_global_zero:
        return None
    if module.ready:
        return Trained(module, module.ready[0], 0)
    best = load_filter(directory / "best.ckpt", device=trainer.strategy.root_device, trust=trust)
    best.module.borrowed_seconds = module.borrowed_seconds
    return Trained(best.module, best.filter, trainer.current_epoch, checkpoints.best if math.isfinite(checkpoints.best) else None)


def encode(
    module: FilterTraining,
    settings: dict[str, Any],
    callbacks: list[Any],
    loggers: list[Logger] | None,
    directory: Path,
    ckpt_path: Path | None,
    begin: Callable[[], None],
    validation: list[Sequence] | None = None,
) -> None:
    """The first stage: fit the encoders; a code takes the place of the images in the memory, each coded by who has not seen it."""
    how, sequences = module.coding, module.memory.sequences()
    assert how is not None
    trainer = build(
        settings | {"max_epochs": how.epochs, "gradient_clip_val": how.clip},
        trust=True,
        callbacks=[*callbacks, LastCheckpoint(directory / "coding.ckpt")],
        logger=loggers or False,
    )
    code = module.code
    if code is None:  # a net whose own features are to be fitted; what will be held out later is held out now
        if module.how is not None and not validation:
            sequences = FilterDataModule(sequences, module.how, module.config["seed"]).fit
        code = build_code([module.net.encoder], how.told(sequences[0].states).shape[1])
    held = held_by([len(s.states) for s in sequences], how.members)
    states, obs = observed_pairs(sequences)
    chunk = torch.cat([h if s.mask is None else h[s.mask] for h, s in zip(held, sequences, strict=True)])
    check_batches(len(obs), how, trainer.world_size)
    if trainer.is_global_zero:
        begin()
    directory.mkdir(parents=True, exist_ok=True)
    fit_code(trainer, module.config, code, how, (obs, how.told(states), chunk), ckpt_path, module.extent)
    code.to("cpu")
    if module.code is not None:
        coded = [code.crossfit(s, own) for s, own in zip(sequences, held, strict=True)]
        if how.members > 1:
            warn_of_chance(*observed_pairs(coded), how)
        module.memory = Memory(cast_all(coded, module.model_dtype))


@torch.no_grad()
def held_recordings(module: FilterTraining, validation: list[Sequence] | None) -> list[Sequence]:
    """Recordings to validate on as the filter takes them: in its units, and images coded."""
    held = module.in_units_of_the_filter(validation or [])
    code = module.code
    if code is not None:
        held = [s._replace(obs=torch.cat([code(part) for part in s.obs.split(256)])) for s in held]
    return held if module.coding is not None and code is None else cast_all(held, module.model_dtype)


def held_by(lengths: list[int], members: int) -> list[Tensor]:
    """For each step of each sequence the number of the member of a code that does not learn from it: contiguous chunks."""
    held = [torch.zeros(n, dtype=torch.long) for n in lengths]
    for k, spans in enumerate(folds(lengths, members)):
        for span in spans:
            held[span.sequence][span.start : span.stop] = k
    return held


def bars(config: dict[str, Any]) -> list[Any]:
    """The trainer's callbacks, made anew for each stage."""
    shown = config["trainer"].get("enable_progress_bar", True)  # Lightning refuses a progress bar that is switched off
    callbacks = [c for c in config["trainer"].get("callbacks") or [] if shown or "ProgressBar" not in str(c.get("_target_"))]
    return list(build(callbacks, trust=True))


def started(begin: Callable[[], None]) -> Callable[[], None]:
    """``begin``, but only for the first call: the second stage must not clear what the first wrote."""
    calls: list[None] = []

    def once() -> None:
        if not calls:
            calls.append(None)
            begin()

    return once


def check(
    config: dict[str, Any], sequences: list[Sequence], *, trust: bool = False, validation: list[Sequence] | None = None
) -> None:
    """Raise what `train` would raise of a configuration that cannot be built or data that is too short, before anything is done."""
    module = FilterTraining(config, sequences, trust=trust).eval()
    if module.learns and module.how is not None:
        FilterDataModule(sequences, module.how, config["seed"], validation)
    if module.coding is not None:  # one image through each encoder tells of wrong shapes and missing weights
        for encoder in [module.net.encoder] if module.code is None else module.code.encoders:
            check_encoder(encoder, sequences[0].obs[:1])
        cut = module.code is None and not validation and module.how
        fit = FilterDataModule(sequences, cut, config["seed"]).fit if cut else sequences
        folds([len(s.states) for s in fit], module.coding.members)
        check_batches(len(observed_pairs(fit)[1]), module.coding)
        module.coding.told(sequences[0].states)


def load_filter(path: str | os.PathLike[str], *, device: str | torch.device = "cpu", trust: bool = False) -> Trained:
    """A filter from its checkpoint alone: memory, bandwidths and operators are inside.

    Args:
        path: of a ``best.ckpt`` or ``last.ckpt``, or ``example:rotation``, one that comes with kbf.
        device: where to.
        trust: allow the checkpoint to name classes outside of this package.

    Raises:
        CheckpointError: no such file, not a checkpoint of this project, or one that does not fit the installed version.
        ValueError: a device that is not there.
    """
    check_device(device)
    checkpoint = read_checkpoint(path)
    if checkpoint["kbf"].get("stage") == "coding":
        raise CheckpointError(f"{path} is of a run whose encoders were still learning: go on with kbf train ckpt_path={path}")
    config = checkpoint["hyper_parameters"]["config"]
    try:
        module = FilterTraining(config, trust=trust)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        filter = module.to(device).filter()
        operators = checkpoint["kbf"]["operators"]
        inner: Any = inner_filter(filter)
        if isinstance(inner, nn.Module) and operators:
            take_shapes(inner, operators)
            inner.load_state_dict(operators)
            inner.eval()
    except (RuntimeError, KeyError, TypeError) as error:
        version = checkpoint["kbf"]["version"]
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"checkpoint {path} (kbf {version}) does not fit kbf {__version__}: {reason}") from error
    learned = checkpoint["kbf"]
    calibration, monitor = Calibration.read(learned.get("calibration"), device), Monitor.read(learned.get("monitor"), device)
    return Trained(module, filter, checkpoint["epoch"], None, calibration, monitor)


def check_device(device: str | torch.device) -> None:
    """Raise a ValueError unless PyTorch has this device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such word, or no driver
        raise ValueError(f"device={device}: PyTorch sees no such device on this machine (cpu is always there)") from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint of this project (or ``example:NAME``), on the CPU; nothing in the file is executed.

    Raises:
        CheckpointError: no such file, damaged, of another project, or of a version that this one does not read.
    """
    file = checkpoint_file(path)
    if not file.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what comes out of a file that is no checkpoint is beyond listing
        raise CheckpointError(f"{path} ({file.stat().st_size} bytes) is no checkpoint, or damaged") from error
    if not isinstance(checkpoint, dict) or not {"kbf", "state_dict", "hyper_parameters"} <= checkpoint.keys():
        raise CheckpointError(f"{path} was not written by kbf: it lacks its entries")
    check_version(path, str(checkpoint["kbf"].get("version")))
    return checkpoint


def checkpoint_file(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint is: ``example:NAME`` is one that comes with kbf.

    Raises:
        CheckpointError: no example of this name.
    """
    name = str(path).removeprefix("example:")
    if name == str(path):
        return Path(path)
    shipped = {file.stem: file for file in sorted((Path(__file__).parent / "checkpoints").glob("*.ckpt"))}
    if name not in shipped:
        raise CheckpointError(f"there is no {path}; kbf comes with {', '.join(f'example:{stem}' for stem in shipped) or 'none'}")
    return shipped[name]


def check_version(path: str | os.PathLike[str], written: str) -> None:
    """Raise a CheckpointError if ``written``, the version that wrote a checkpoint, has a format that this one does not know."""
    there, here = (tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (written, __version__))
    if len(there) < 2:
        raise CheckpointError(f"{path} does not say which version of kbf wrote it")
    if there > here:
        raise CheckpointError(f"{path} was written by kbf {written}, this is kbf {__version__}: pip install -U kbf")
    if there < OLDEST:
        raise CheckpointError(f"{path} was written by kbf {written}, which kbf {__version__} no longer reads: train it again")


def take_shapes(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give buffers and parameters the shape that they have in ``state``, where it differs: it may depend on the data."""
    for name, value in state.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name) if owner_name in dict(module.named_modules()) else None
        held = None if owner is None else getattr(owner, leaf, None)
        if isinstance(held, Tensor) and held.shape != value.shape:
            held.data = torch.empty(value.shape, dtype=held.dtype, device=held.device)


def check_like(module: FilterTraining, new: Sequence, checkpoint: str | os.PathLike[str]) -> None:
    """Raise a ValueError unless a recording has the states, observations and controls of those that a filter was trained on."""
    old = module.memory.sequences()[0]
    for name, mine, theirs in (
        ("states", tuple(old.states.shape[1:]), tuple(new.states.shape[1:])),
        ("observations", tuple(module.observation or ()), tuple(new.obs.shape[1:])),
        ("controls", (control_width(old),), (control_width(new),)),
    ):
        if mine != theirs:
            raise ValueError(f"the data's {name} have the shape {theirs}, those that {checkpoint} was trained on {mine}")


def estimates(filter: Filter[Any], windows: Sequence) -> Tensor:
    """``b T d``: the rollout's, or a recurrent net's own faster way to the same numbers."""
    if isinstance(filter, LSTMFilter):
        return filter(windows.obs, windows.mask, windows.controls)
    return rollout(filter, windows.obs, mask=windows.mask, controls=windows.controls).estimates


def inner_filter(filter: Filter[Any]) -> Filter[Any]:
    """What is behind units and encoders, if there are any."""
    while isinstance(filter, ScaledFilter | CodedFilter):
        filter = filter.inner
    return filter


def build_scaling(data: dict[str, Any], sequences: list[Sequence] | None) -> Scaling | None:
    """The units of ``data.normalise``: those of the training part, or empty where a checkpoint brings them; None for none.

    Raises:
        ValueError: neither standard nor none.
    """
    how = data.get("normalise") or "none"
    if how not in ("standard", "none"):
        raise ValueError(f"data.normalise must be standard or none, got {how!r}")
    if how == "none":
        return None
    if not sequences:
        return Scaling()
    boundary = None if data.get("boundary") is None else Boundary.from_dict(data["boundary"])
    free = [None, None] if boundary is None else [boundary.free("states"), boundary.free("observations") or None]
    return Scaling().prepare(sequences, *free)


def cast_all(sequences: list[Sequence], dtype: torch.dtype) -> list[Sequence]:
    """The same recordings in another dtype."""
    return [
        s._replace(
            states=s.states.to(dtype),
            obs=as_float(s.obs, dtype),
            controls=None if s.controls is None else s.controls.to(dtype),
        )
        for s in sequences
    ]


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
    texts += ("in eval mode at the start", "have no `val_dataloader`")
    for text in (*texts, "Total length of", "sync_dist=True", "isinstance.treespec, LeafSpec"):
        warnings.filterwarnings("ignore", f".*{text}.*")
