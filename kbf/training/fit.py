"""Training in two stages: `fit_encoders` encodes images, `fit_filter` fits the filter.

Only data of images has the first stage. Models with parameters are trained by gradient in the
second; the others are fitted in closed form.
"""

import logging
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from kbf.data.windows import folds, held_by
from kbf.filters.selection.auto import ModelSelection
from kbf.fitted.checkpoint import BEST, LAST, Trained, checkpoint_of, load_own, read_checkpoint
from kbf.fitted.model import build_encoding
from kbf.images.encodings import Encoding
from kbf.recording import Recording, observed_pairs
from kbf.runtime.atomic_files import copy, sweep
from kbf.runtime.instantiate import build
from kbf.runtime.tensor_files import write_tensors
from kbf.training.callbacks import (
    ENCODERS,
    VALIDATION,
    VALIDATION_LOSS,
    AtomicCheckpointIO,
    BestCheckpoint,
    EpochMessages,
    LastCheckpoint,
    build_callbacks,
    check_callbacks,
    early_stopping,
)
from kbf.training.datamodule import FilterDataModule
from kbf.training.encoder_datamodule import Frames, check_batches
from kbf.training.encoder_stage import check_encoder, fit, fit_encoding, warn_of_chance
from kbf.training.filter_stage import FilterTraining
from kbf.training.pixel_choice import choose_pixels
from kbf.training.processes import check_not_coupled

log: logging.Logger = logging.getLogger(__name__)

# Keys of a configuration that a checkpoint keeps.
CHECKPOINT_KEYS = ("model", "data", "recipe", "n_train", "seed")
# Least time between two checkpoints of the first stage, whose epochs may be short.
SECONDS_BETWEEN_ENCODER_CHECKPOINTS = 10.0
# Parts of Lightning's warnings that do not apply here: the data is in memory, and small.
IRRELEVANT_WARNINGS = (
    "does not have many workers",
    "GPU available but not used",
    "number of training batches",
    "litlogger",
    "in eval mode at the start",
    "have no `val_dataloader`",
    "exists and is not empty",
    "Total length of",
    "sync_dist=True",
    "isinstance.treespec, LeafSpec",
)


class Run(NamedTuple):
    """Settings that the stages of a training run share.

    Attributes:
        config: resolved: ``model``, ``trainer``, ``callbacks`` and ``seed``.
        directory: where the checkpoints go.
        loggers: where the curves go.
        begin: called by the main process before its first file is written.
        ckpt_path: a checkpoint of this stage to continue.
        single: what must run in one process; empty if several may.
    """

    config: dict[str, Any]
    directory: Path
    loggers: list[Logger]
    begin: Callable[[], None]
    ckpt_path: Path | None
    single: str = ""

    def trainer(self, *callbacks: Callback | Checkpoint, **settings: Any) -> lightning.Trainer:
        """Return the trainer of the configuration, with these callbacks and settings.

        Raises:
            ValueError: it starts several processes in a run that must have one.
        """
        own = {key: value for key, value in self.config["trainer"].items() if key != "callbacks"}
        own = {"default_root_dir": str(self.directory), **own, **settings}
        own["enable_progress_bar"] = any(isinstance(each, ProgressBar) for each in callbacks)
        plugins = [*build(own.pop("plugins", None) or []), AtomicCheckpointIO()]
        trainer = build(
            own,
            trust=True,
            callbacks=[*callbacks, EpochMessages()],
            logger=self.loggers or False,
            plugins=plugins,
        )
        if trainer.world_size > 1 and self.single:
            raise ValueError(f"{self.single} in one process: use trainer=cpu or trainer=gpu")
        return trainer

    def start(self, trainer: lightning.Trainer) -> None:
        """Make the folder, and remove temporary files of killed processes from it."""
        if trainer.is_global_zero:
            self.begin()
        self.directory.mkdir(parents=True, exist_ok=True)
        if trainer.is_global_zero:
            sweep(self.directory)


def train(
    config: dict[str, Any],
    recordings: list[Recording],
    directory: Path,
    *,
    ckpt_path: Path | None = None,
    validation_floor: float | None = None,
    loggers: list[Logger] | None = None,
    trust: bool = False,
    begin: Callable[[], None] = lambda: None,
    encodings: Path | None = None,
    extent: tuple[float, float, float, float] | None = None,
    validation: list[Recording] | None = None,
    provenance: dict[str, Any] | None = None,
    single: str = "",
) -> Trained | None:
    """Fit the encoders of images, if there are any, then the filter; write the checkpoints.

    They are ``best.ckpt`` and ``last.ckpt``.

    Args:
        config: resolved: ``model``, ``trainer`` and ``seed``; ``callbacks``, of the trainer, by
            name (None for none).
        recordings: the recordings of the training part.
        directory: where the checkpoints go.
        ckpt_path: a ``last.ckpt`` or ``encoder.ckpt`` to continue.
        validation_floor: Bayes-optimal error on the held-out part, for the logged excess error.
        loggers: where the curves go.
        trust: allow any ``_target_``, not only the public classes (`kbf.runtime.allowlist`).
        begin: called once, when the model has taken the data and before the first file is written:
            an earlier run may be removed then.
        encodings: a file with the fitted encoding of these images. It is read if it exists, and
            written if not.
        extent: of states that are positions in an image, for the figures
            (`kbf.plots.frames.frame_grid`).
        validation: recordings to validate on; without them ``model.training.validation`` holds out
            a part of the training part.
        provenance: record that the checkpoints contain (`kbf.runtime.provenance`).
        single: what must run in one process; empty if several may.

    Returns:
        The best model; None in the helper processes of a distributed run.

    Raises:
        ValueError: too few steps, or a configuration that cannot be built.
        CheckpointError: ``ckpt_path`` cannot be loaded.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in IRRELEVANT_WARNINGS:
        warnings.filterwarnings("ignore", f".*{text}.*")
    lightning.seed_everything(config["seed"], verbose=False)
    stored = {key: config[key] for key in CHECKPOINT_KEYS if key in config}
    module = FilterTraining(stored, recordings, trust=trust)
    module.extent, module.validation_floor = extent, validation_floor
    module.provenance = provenance
    # cache: the second stage must not remove what the first has written.
    run = Run(config, directory, loggers or [], cache(begin), ckpt_path, single)
    if module.encoding is not None:
        if not reuse_encoding(module, run, encodings):
            began = time.perf_counter()
            fit_encoders(module, run, validation)
            run = run._replace(ckpt_path=None)  # a checkpoint of the first stage
            if encodings is not None and module.code is not None:
                contents = {
                    "code": module.code.state_dict(),
                    "memory": module.memory.state_dict(),
                    "seconds": time.perf_counter() - began,
                }
                write_tensors(contents, encodings)
        if module.code is not None:
            module.take_ratio_means()
            module.code.requires_grad_(False).eval()
    return fit_filter(module, run, validation)


def fit_encoders(
    module: FilterTraining, run: Run, validation: list[Recording] | None = None
) -> Encoding:
    """Run the first stage: fit encoders to predict the states from single images.

    In the memory the encodings replace the images. Each member of the encoding is fitted to all
    recordings but one chunk, and encodes that chunk: no image is encoded by an encoder that was
    trained on it. A model with an encoder of its own has that encoder fitted, and keeps the images.

    Raises:
        ValueError: too few images.
    """
    how, recordings, code = module.encoding, module.memory.recordings(), module.code
    assert how is not None
    if code is None:
        if module.how is not None and not validation:  # the second stage holds these out
            recordings = FilterDataModule(recordings, module.how, run.config["seed"]).fit
        assert module.own_encoder is not None
        d = how.visible_part(recordings[0].states).shape[1]
        code = build_encoding([module.own_encoder], d, how.gaussians).to(module.model_dtype)
    held = held_by([len(r.states) for r in recordings], how.members)
    states, obs = observed_pairs(recordings)
    pairs = zip(held, recordings, strict=True)
    chunk = torch.cat([h if r.mask is None else h[r.mask] for h, r in pairs])
    frames = Frames(obs, how.visible_part(states), chunk)
    checkpoint = LastCheckpoint(run.directory / ENCODERS, SECONDS_BETWEEN_ENCODER_CHECKPOINTS)
    callbacks = [*build_callbacks(run.config, first_stage=True), checkpoint]
    trainer = run.trainer(*callbacks, max_epochs=how.epochs, gradient_clip_val=how.clip)
    check_batches(len(obs), how)
    check_not_coupled(code.train(), trainer.world_size)
    run.start(trainer)
    fit_encoding(
        trainer,
        module.config,
        code,
        how,
        frames,
        run.ckpt_path,
        module.extent,
        module.provenance,
    )
    code.to("cpu")
    if module.code is not None:
        encoded = [code.crossfit(r, own) for r, own in zip(recordings, held, strict=True)]
        encoded = choose_pixels(code, recordings, held, encoded, how)
        if how.members > 1:
            warn_of_chance(*observed_pairs(encoded), how)
        module.remember(encoded)
    return code


def fit_filter(
    module: FilterTraining, run: Run, validation: list[Recording] | None = None
) -> Trained | None:
    """Run the second stage: prepare the model from the data, then train it by gradient.

    A model without parameters is fitted by `fit_kernel_filter`.

    Returns:
        The model with the least validation error; None in the helper processes of a distributed
        run.

    Raises:
        ValueError: too few steps, or a callback that watches a metric which is not logged.
    """
    if not module.learns or module.how is None:
        return fit_kernel_filter(module, run)
    seed, how = run.config["seed"], module.how
    held = module.taken_in(validation or [])
    tasks = FilterDataModule(module.memory.recordings(), how, seed, held)
    monitor = (VALIDATION_LOSS if how.monitor == "loss" else VALIDATION) if tasks.held else None
    best = BestCheckpoint(run.directory, monitor)
    last = LastCheckpoint(run.directory / LAST, replaces=run.directory / ENCODERS)
    callbacks = build_callbacks(run.config, directory=run.directory)
    check_callbacks(callbacks, bool(tasks.held))
    callbacks += early_stopping(how.patience, monitor, callbacks)
    trainer = run.trainer(*callbacks, best, last)
    check_not_coupled(module.net.train(), trainer.world_size)
    module.prepare(tasks.fit, torch.Generator().manual_seed(seed))
    run.start(trainer)
    fit(trainer, module, tasks, ckpt_path=run.ckpt_path)
    if not trainer.is_global_zero:
        return None
    trained = load_own(module, run.directory / BEST, device=trainer.strategy.root_device)
    trained.module.borrowed_seconds = module.borrowed_seconds
    return trained._replace(
        epochs=trainer.current_epoch, validation_mse=best.least, steps=trainer.global_step
    )


def fit_kernel_filter(module: FilterTraining, run: Run) -> Trained | None:
    """Run the second stage of a model without training by gradient: fit its filter."""
    trainer = run.trainer()
    module.to(trainer.strategy.root_device).eval()
    memory = module.memory.recordings()
    module.prepare(memory, torch.Generator().manual_seed(run.config["seed"]))
    # Calibration and monitor are learned from the steps that the filter is trained on.
    if isinstance(module.net, ModelSelection):
        if int(module.net.newest):
            module.remember(module.net.kept(memory))
        module.config["model"]["compared"] = [list(row) for row in module.net.candidates]
    module.ready = [module.filter()]
    run.start(trainer)
    if not trainer.is_global_zero:
        return None
    for logger in run.loggers:
        logger.log_hyperparams(dict(module.hparams))
    write_tensors(checkpoint_of(module), run.directory / BEST)
    copy(run.directory / BEST, run.directory / LAST)
    (run.directory / ENCODERS).unlink(missing_ok=True)
    return Trained(module, module.ready[0], 0)


def reuse_encoding(module: FilterTraining, run: Run, encodings: Path | None) -> bool:
    """Take an encoding that is fitted already; returns False if there is none.

    It comes from a checkpoint of the second stage, or from the file ``encodings``.
    """
    stored = {} if run.ckpt_path is None else read_checkpoint(run.ckpt_path)
    if stored and stored["kbf"].get("stage") != "encoding":
        module.on_load_checkpoint(stored)
        module.load_state_dict(stored["state_dict"])
        return True
    if encodings is not None and encodings.is_file() and module.code is not None:
        module.take_encodings(torch.load(encodings, map_location="cpu", weights_only=True))
        return True
    return False


def check(
    config: dict[str, Any],
    recordings: list[Recording],
    *,
    trust: bool = False,
    validation: list[Recording] | None = None,
) -> None:
    """Check, before any work, that `train` can build the configuration and use the data.

    Raises:
        ValueError: as of `train`.
    """
    module = FilterTraining(config, recordings, trust=trust).eval()
    callbacks = build_callbacks(config) if "trainer" in config else []
    how, seed = module.how, config["seed"]
    if module.learns and how is not None:
        held = FilterDataModule(recordings, how, seed, validation).held
        check_callbacks(callbacks, bool(held))
    if module.encoding is not None:
        # One image through each encoder finds wrong shapes and missing weights.
        for encoder in [module.own_encoder] if module.code is None else module.code.encoders:
            assert encoder is not None
            check_encoder(encoder, recordings[0].obs[:1])
        cut = how if module.code is None and not validation else None
        part = FilterDataModule(recordings, cut, seed).fit if cut else recordings
        folds([len(r.states) for r in part], module.encoding.members)
        check_batches(len(observed_pairs(part)[1]), module.encoding)
        module.encoding.visible_part(recordings[0].states)


def is_helper() -> bool:
    """Return whether this process is a helper of a distributed run (its rank is not 0)."""
    return getattr(rank_zero_only, "rank", 0) != 0
