"""Training in two sentences: `fit_encoders` makes a code of images, `fit_filter` makes the filter that runs on it.

Only data of images has the first; only models with parameters have epochs in the second.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from kbf.data.windows import folds
from kbf.filters.selection.auto import ModelSelection
from kbf.images.encodings import Encoding
from kbf.recording import Recording, observed_pairs
from kbf.runtime.atomic_files import copy, sweep
from kbf.runtime.instantiate import build
from kbf.runtime.tensor_files import write_tensors
from kbf.training.callbacks import (
    BEST,
    ENCODERS,
    LAST,
    VALIDATION,
    VALIDATION_LOSS,
    AtomicCheckpointIO,
    BestCheckpoint,
    LastCheckpoint,
    build_callbacks,
    check_callbacks,
    early_stopping,
)
from kbf.training.checkpoint import (
    Trained,
    checkpoint_of,
    load_own,
    read_checkpoint,
)
from kbf.training.datamodule import FilterDataModule
from kbf.training.encoder_datamodule import check_batches
from kbf.training.encoder_stage import (
    check_encoder,
    fit,
    fit_encoding,
    warn_of_chance,
)
from kbf.training.filter_stage import FilterTraining
from kbf.training.fitted_model import build_encoding

CHECKPOINT_KEYS = ("model", "data", "recipe", "n_train", "seed")
"""What a checkpoint keeps of a configuration."""
ENCODER_SECONDS = 10.0
"""Time between two checkpoints of the first stage."""


class Run(NamedTuple):
    """What the stages of a training run share.

    Attributes:
        config: resolved: ``model``, ``trainer``, ``callbacks`` and ``seed``. directory: where the
            checkpoints go.
        loggers: where the curves go.
        begin: called by the main process before its first file is written.
        ckpt_path: a checkpoint of this stage to go on from.
    """

    config: dict[str, Any]
    directory: Path
    loggers: list[Logger]
    begin: Callable[[], None]
    ckpt_path: Path | None

    def trainer(self, *callbacks: Callback | Checkpoint, **settings: Any) -> lightning.Trainer:
        """The trainer of the configuration, with these callbacks, and with other settings where they are given."""
        own = {key: value for key, value in self.config["trainer"].items() if key != "callbacks"}
        own = {"default_root_dir": str(self.directory), **own, **settings}
        plugins = [*build(own.pop("plugins", None) or []), AtomicCheckpointIO()]
        return build(
            own,
            trust=True,
            callbacks=list(callbacks),
            logger=self.loggers or False,
            plugins=plugins,
        )

    def start(self, trainer: lightning.Trainer) -> None:
        """Make the folder, and remove what killed processes left in it."""
        if trainer.is_global_zero:
            self.begin()
        self.directory.mkdir(parents=True, exist_ok=True)
        if trainer.is_global_zero:
            sweep(self.directory)


def train(
    config: dict[str, Any],
    sequences: list[Recording],
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
) -> Trained | None:
    """Fit the encoders of images, if there are any, then the filter, and leave ``best.ckpt`` and ``last.ckpt``.

    Args:
        config: resolved: ``model``, ``trainer`` and ``seed``; ``callbacks``, of the trainer, by
            name (None for none).
        sequences: the training part.
        directory: where the checkpoints go.
        ckpt_path: a ``last.ckpt`` or ``encoder.ckpt`` to go on from.
        validation_floor: least possible error on the held-out part, to log the excess over it.
        loggers: where the curves go.
        trust: allow any ``_target_``, not only what is registered (`kbf.runtime.allowlist`).
        begin: called when the model has taken the data and before the first file is written: an
            earlier run may be cleared then.
        codes: a file that keeps the fitted code of these images: taken from there if it exists,
            written there if not.
        extent: of states that are positions in an image, for the pictures
            (`kbf.plots.frames.frame_grid`).
        validation: recordings to validate on; without them ``model.training.validation`` holds out
            a part of the training part.

    Returns:
        The best model; None in the helper processes of a distributed run.

    Raises:
        ValueError: too few steps, or a configuration that cannot be built. CheckpointError:
            ``ckpt_path`` cannot be loaded.
    """
    quiet()
    lightning.seed_everything(config["seed"], verbose=False)
    module = FilterTraining(
        {key: config[key] for key in CHECKPOINT_KEYS if key in config}, sequences, trust=trust
    )
    module.extent, module.validation_floor = extent, validation_floor
    run = Run(config, directory, loggers or [], once(begin), ckpt_path)
    if module.encoding is not None:
        if not reuse_encoding(module, run, encodings):
            began = time.perf_counter()
            fit_encoders(module, run, validation)
            run = run._replace(ckpt_path=None)  # of the first stage, if it was one
            keep_encoding(module, encodings, time.perf_counter() - began)
        if module.code is not None:
            module.take_ratio_means()
            module.code.requires_grad_(False).eval()
    return fit_filter(module, run, validation)


def fit_encoders(
    module: FilterTraining, run: Run, validation: list[Recording] | None = None
) -> Encoding:
    """The first stage: encoders learn to predict the states from single images; codes take the images' place in the memory.

    Each member of the code learns from all recordings but one chunk, and codes that chunk: no image
    is encoded by who has seen it. A net with an encoder of its own has that fitted, and keeps the
    images.

    Raises:
        ValueError: too few images.
    """
    how, sequences = module.encoding, module.memory.sequences()
    assert how is not None
    code = module.code
    if code is None:  # what will be held out later is held out now
        if module.how is not None and not validation:
            sequences = FilterDataModule(sequences, module.how, run.config["seed"]).fit
        assert module.own_encoder is not None
        code = build_encoding(
            [module.own_encoder], how.visible_part(sequences[0].states).shape[1], how.gaussians
        )
    held = held_by([len(s.states) for s in sequences], how.members)
    states, obs = observed_pairs(sequences)
    chunk = torch.cat(
        [h if s.mask is None else h[s.mask] for h, s in zip(held, sequences, strict=True)]
    )
    checkpoint = LastCheckpoint(run.directory / ENCODERS, ENCODER_SECONDS)
    callbacks = [*build_callbacks(run.config, first_stage=True), checkpoint]
    trainer = run.trainer(*callbacks, max_epochs=how.epochs, gradient_clip_val=how.clip)
    check_batches(len(obs), how, trainer.world_size)
    run.start(trainer)
    fit_encoding(
        trainer,
        module.config,
        code,
        how,
        (obs, how.visible_part(states), chunk),
        run.ckpt_path,
        module.extent,
    )
    code.to("cpu")
    if module.code is not None:
        encoded = [code.crossfit(s, own) for s, own in zip(sequences, held, strict=True)]
        if how.members > 1:
            warn_of_chance(*observed_pairs(encoded), how)
        module.remember(encoded)
    return code


def fit_filter(
    module: FilterTraining, run: Run, validation: list[Recording] | None = None
) -> Trained | None:
    """The second stage: set what the model takes from the data, then follow the error of its filter down, if it has parameters.

    Returns:
        The model with the least validation error; None in the helper processes of a distributed
        run.

    Raises:
        ValueError: too few steps, or a callback that watches what is not there.
    """
    if not module.learns or module.how is None:
        return fit_kernel_filter(module, run)
    seed, how = run.config["seed"], module.how
    tasks = FilterDataModule(
        module.memory.sequences(), how, seed, module.taken_in(validation or [])
    )
    monitor = (VALIDATION_LOSS if how.monitor == "loss" else VALIDATION) if tasks.held else None
    best = BestCheckpoint(run.directory, monitor)
    last = LastCheckpoint(run.directory / LAST, replaces=run.directory / ENCODERS)
    callbacks = build_callbacks(run.config, directory=run.directory)
    check_callbacks(callbacks, bool(tasks.held))
    callbacks += early_stopping(how.patience, monitor, callbacks)
    trainer = run.trainer(*callbacks, best, last)
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
    """The second stage of a model that nothing is to be learned of by gradient: its filter over the recordings."""
    trainer = run.trainer()
    module.to(trainer.strategy.root_device).eval()
    memory = module.memory.sequences()
    module.prepare(memory, torch.Generator().manual_seed(run.config["seed"]))
    if isinstance(module.net, ModelSelection) and int(
        module.net.newest
    ):  # calibration and monitor are of what is learned from, too
        module.remember(module.net.kept(memory))
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
    """Take a code that is fitted already, from a checkpoint of the second stage or the file ``encodings``; False if there is none."""
    stored = {} if run.ckpt_path is None else read_checkpoint(run.ckpt_path)
    if stored and stored["kbf"].get("stage") != "encoding":
        module.on_load_checkpoint(stored)
        module.load_state_dict(stored["state_dict"])
        return True
    if encodings is not None and encodings.is_file() and module.code is not None:
        module.take_encodings(torch.load(encodings, map_location="cpu", weights_only=True))
        return True
    return False


def keep_encoding(module: FilterTraining, encodings: Path | None, seconds: float) -> None:
    """Write a fitted code to the file ``encodings``, if there is one, for other models on the same images."""
    if encodings is not None and module.code is not None:
        write_tensors(
            {
                "code": module.code.state_dict(),
                "memory": module.memory.state_dict(),
                "seconds": seconds,
            },
            encodings,
        )


def held_by(lengths: list[int], members: int) -> list[Tensor]:
    """For each step of each sequence the number of the member of a code that does not learn from it: contiguous chunks."""
    held = [torch.zeros(n, dtype=torch.long) for n in lengths]
    for k, spans in enumerate(folds(lengths, members)):
        for span in spans:
            held[span.recording][span.start : span.stop] = k
    return held


def once(begin: Callable[[], None]) -> Callable[[], None]:
    """``begin``, but only for the first call: the second stage must not clear what the first wrote."""
    calls: list[None] = []

    def first() -> None:
        if not calls:
            calls.append(None)
            begin()

    return first


def check(
    config: dict[str, Any],
    sequences: list[Recording],
    *,
    trust: bool = False,
    validation: list[Recording] | None = None,
) -> None:
    """Raise what `train` would raise of a configuration that cannot be built or data that is too short, before anything is done."""
    module = FilterTraining(config, sequences, trust=trust).eval()
    callbacks = build_callbacks(config) if "trainer" in config else []
    if module.learns and module.how is not None:
        check_callbacks(
            callbacks,
            bool(FilterDataModule(sequences, module.how, config["seed"], validation).held),
        )
    if (
        module.encoding is not None
    ):  # one image through each encoder tells of wrong shapes and missing weights
        for encoder in [module.own_encoder] if module.code is None else module.code.encoders:
            assert encoder is not None
            check_encoder(encoder, sequences[0].obs[:1])
        cut = module.code is None and not validation and module.how
        fit = FilterDataModule(sequences, cut, config["seed"]).fit if cut else sequences
        folds([len(s.states) for s in fit], module.encoding.members)
        check_batches(len(observed_pairs(fit)[1]), module.encoding)
        module.encoding.visible_part(sequences[0].states)


def is_helper() -> bool:
    """Whether this process helps another in a distributed run; Lightning tells those their number when it starts them."""
    return getattr(rank_zero_only, "rank", 0) != 0


def quiet() -> None:
    """Silence what Lightning says to everybody and what does not apply here."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    texts = (
        "does not have many workers",
        "GPU available but not used",
        "number of training batches",
        "litlogger",
    )
    texts += ("in eval mode at the start", "have no `val_dataloader`", "exists and is not empty")
    for text in (*texts, "Total length of", "sync_dist=True", "isinstance.treespec, LeafSpec"):
        warnings.filterwarnings("ignore", f".*{text}.*")
