"""Training: encoders first where there are any, then the numbers of a filter by gradient (`kbf.module`), and checkpoints."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor

from kbf.build import build
from kbf.checkpoint import Trained, load_filter, read_checkpoint
from kbf.data.module import FilterDataModule
from kbf.data.windows import folds
from kbf.files import copy, replacing
from kbf.module import FilterTraining, Memory, cast_all
from kbf.pretraining import LastCheckpoint, build_code, check_batches, check_encoder, fit, fit_code, warn_of_chance
from kbf.sequence import Sequence, observed_pairs

KEPT = ("model", "data", "recipe", "n_train", "seed")
"""What a checkpoint keeps of a configuration."""


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


def quiet() -> None:
    """Silence what Lightning says to everybody and what does not apply here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    texts = ("does not have many workers", "GPU available but not used", "number of training batches", "litlogger")
    texts += ("in eval mode at the start", "have no `val_dataloader`")
    for text in (*texts, "Total length of", "sync_dist=True", "isinstance.treespec, LeafSpec"):
        warnings.filterwarnings("ignore", f".*{text}.*")
