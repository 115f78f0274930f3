"""The first of two stages: encoders learn to predict the state from single observations, before any filter is built.

Each member of a `kbf.nn.coding.Code` learns from all recordings but one contiguous chunk, which says how good it is.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lightning
import torch
from jaxtyping import Float
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from kbf import __version__
from kbf.features import random_fourier
from kbf.kernels import median_distance
from kbf.nn.augment import Augment
from kbf.nn.coding import Code
from kbf.nn.losses import ridge_loss, ridge_weights, split_ridge_loss
from kbf.pictures import log_codes, log_features
from kbf.sequence import as_float

LOSSES = ("linear", "ridge", "split")
TOLD = 0.05
"""Share of the states' variance below which images tell next to nothing."""
Settings = TypeVar("Settings", bound=tuple)
OPTIMISERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


class Coding(NamedTuple):
    """How encoders learn: the ``coding`` part of a model's configuration, without the encoder itself.

    Attributes:
        epochs: passes over the images. lr: learning rate, its peak with schedule onecycle. weight_decay: of the optimiser.
        optimiser: adam, adamw or sgd. schedule: constant or onecycle. clip: largest norm of a gradient, None for any.
        batch_size: images in a batch (up to rounding: batches are of equal size), None for all of them.
        members: encoders; with 1 there is no held-out chunk, and codes of the recordings look better than those of new images.
        loss: linear (a linear head learns along), ridge (`kbf.nn.losses.ridge_loss`, the paper's) or split (`split_ridge_loss`).
        reg: lambda of the last two. targets: states, or fourier: random Fourier features of them.
        fourier: how many of these, with the median bandwidth.
        augment: random transforms of the images (`kbf.nn.augment.Augment`).
        visible: numbers of the components of the state that an image tells, None for all: codes have these alone.
    """

    epochs: int
    lr: float
    weight_decay: float = 0.0
    optimiser: str = "adamw"
    schedule: str = "onecycle"
    clip: float | None = None
    batch_size: int | None = 64
    members: int = 4
    loss: str = "linear"
    reg: float = 1e-3
    targets: str = "states"
    fourier: int = 100
    augment: tuple[Any, ...] = ()
    visible: tuple[int, ...] | None = None

    def told(self, states: Tensor) -> Tensor:
        """What an image tells of states ``n d``, ``n k``.

        Raises:
            ValueError: a component that the states do not have.
        """
        if self.visible is None:
            return states
        if max(self.visible) >= states.shape[1]:
            raise ValueError(f"data.coding.visible names component {max(self.visible)}, the states have 0 to {states.shape[1] - 1}")
        return states[:, list(self.visible)]


def read_settings(
    kind: type[Settings], config: dict[str, Any], name: str, options: Mapping[str, Many[str]], others: Many[str] = ()
) -> Settings:
    """A part of a configuration as a tuple of settings of this ``kind``, with ``epochs`` and ``lr`` among them.

    Args:
        kind: a NamedTuple. config: its fields. name: what the part is called.
        options: the words that a field may be. others: settings that stand beside these.

    Raises:
        ValueError: unknown or missing settings, or a word that is no option.
    """
    known: tuple[str, ...] = kind._fields  # pyright: ignore[reportAttributeAccessIssue]
    if wrong := [key for key in config if key not in known]:
        raise ValueError(f"{name} has no {wrong[0]!r}; it has {', '.join([*others, *known])}")
    if missing := {"epochs", "lr"} - config.keys():
        raise ValueError(f"{name} needs {' and '.join(sorted(missing))}")
    settings = kind(**config)
    for key, allowed in options.items():
        if (chosen := getattr(settings, key)) not in allowed:
            raise ValueError(f"{name}.{key} must be one of {', '.join(allowed)}; got {chosen!r}")
    return settings


def read_coding(config: dict[str, Any]) -> Coding:
    """Check the ``coding`` part of a configuration.

    Raises:
        ValueError: unknown, missing or impossible settings.
    """
    options = {
        "loss": LOSSES,
        "targets": ("states", "fourier"),
        "optimiser": tuple(OPTIMISERS),
        "schedule": ("constant", "onecycle"),
    }
    coding = read_settings(Coding, config, "data.coding", options, others=("encoder",))
    coding = coding._replace(augment=tuple(coding.augment or ()))
    for key in ("epochs", "members", "fourier", "batch_size"):
        value = getattr(coding, key)
        if (type(value) is not int or value < 1) and (key, value) != ("batch_size", None):
            raise ValueError(f"data.coding.{key} must be a whole number, at least 1; got {value!r}")
    shown = coding.visible
    if shown is not None and (
        not isinstance(shown, tuple) or not shown or not all(type(k) is int and k >= 0 for k in shown) or len({*shown}) < len(shown)
    ):
        raise ValueError(f"data.coding.visible must be null or different numbers of components, as [0, 1]; got {shown!r}")
    for key, least in (("lr", "> 0"), ("reg", "> 0"), ("clip", "> 0"), ("weight_decay", ">= 0")):
        value = getattr(coding, key)
        good = isinstance(value, int | float) and (value > 0 or (value == 0 and least == ">= 0"))
        if not good and (key, value) != ("clip", None):
            raise ValueError(f"data.coding.{key} must be a number {least}; got {value!r}")
    if coding.targets == "fourier" and coding.loss == "linear":
        raise ValueError("data.coding.loss=linear regresses on states: use ridge or split with targets=fourier")
    if coding.targets == "fourier" and coding.fourier % 2:
        raise ValueError(f"data.coding.fourier must be even (a cosine and a sine of each frequency); got {coding.fourier}")
    return coding


def warn_of_chance(states: Float[Tensor, "n d"], codes: Float[Tensor, "n k"], how: Coding) -> None:
    """Warn where codes of images that their encoders have not seen explain less than `TOLD` of what images tell of the states."""
    shown = how.told(states)
    unexplained = (codes - shown).square().sum() / (shown - shown.mean(0)).square().sum()
    if unexplained > 1 - TOLD:  # not where states do not vary
        share = max(0, round(100 * (1 - unexplained.item())))
        told = f"the encoders learned next to nothing: on images new to them they explain {share} % of the states' variance"
        advice = "kbf data check shows some; more recordings, data.coding.epochs, another data.coding.lr or data/encoder may help"
        warnings.warn(f"{told} ({advice})", stacklevel=2)


class Rows(NamedTuple):
    """Images ``m *x`` as they are stored, their states ``m d``, and the number ``m`` of the chunk that each lies in."""

    obs: Tensor
    states: Tensor
    chunk: Tensor


class Frames(Dataset[Rows]):
    """Batches of rows."""

    def __init__(self, obs: Tensor, states: Tensor, chunk: Tensor) -> None:
        self.obs, self.states, self.chunk = obs, states, chunk

    def __len__(self) -> int:
        return len(self.obs)

    def __getitem__(self, rows: Tensor) -> Rows:
        return Rows(self.obs[rows], self.states[rows], self.chunk[rows])


class RowOrder(Sampler[Tensor]):
    """Rows in batches of equal size (to one), in an order that depends on (seed, epoch) alone; each process has its share."""

    def __init__(self, rows: int, batch_size: int | None, seed: int, rank: int = 0, world: int = 1) -> None:
        self.rows, self.seed, self.rank, self.world, self.epoch = rows, seed, rank, world, 0
        self.batches = -(-rows // min(batch_size or rows, rows))

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Any:
        order = torch.randperm(self.rows, generator=torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + self.epoch))
        yield from (batch[self.rank :: self.world] for batch in order.tensor_split(self.batches))


class CodeTraining(lightning.LightningModule):
    """Fit the members of a code side by side; each skips the images of its own chunk.

    The losses of ridge regression have no use for the heads: these are fitted in closed form whenever codes are asked for.
    """

    def __init__(self, config: dict[str, Any], code: Code, how: Coding, frames: Frames) -> None:
        """Prepare.

        Args:
            config: what checkpoints keep of the configuration; its ``seed`` is used.
            code: to be fitted, in place.
            how: the settings.
            frames: all that there is to learn from.
        """
        super().__init__()
        self.save_hyperparameters("config", logger=False)
        self.config, self.how, self.code, self.frames = config, how, code, frames
        code.prepare(frames.states)
        code.heads.requires_grad_(how.loss == "linear")
        self.augment = Augment(how.augment)
        self.extent: Any = None
        self.fourier = None
        if how.targets == "fourier":
            width = (median_distance(frames.states) / code.z_scale).item()
            generator = torch.Generator().manual_seed(config["seed"])
            self.fourier = random_fourier(frames.states.shape[1], how.fourier, bandwidth=width, generator=generator)

    def targets(self, states: Tensor) -> Tensor:
        """What is regressed on: standardised states, or random Fourier features of them."""
        y = (states - self.code.z_mean.to(states)) / self.code.z_scale.to(states)
        return (y if self.fourier is None else self.fourier(y)).float()

    def losses(self, batch: Rows) -> Tensor:
        """One loss for each member, over the images outside of its chunk."""
        obs, states, chunk = batch
        images, y = self.augment(obs), self.targets(states)
        found = []
        for k, (encoder, head) in enumerate(zip(self.code.encoders, self.code.heads, strict=True)):
            mine = self.not_of(k, chunk)
            if len(mine) < 2:  # a small batch, nearly all of it of this member's own chunk: nothing to learn from
                own = [p.flatten()[:1].sum() for p in (*encoder.parameters(), *head.parameters()) if p.requires_grad]
                found.append(0 * torch.stack(own).sum())
                continue
            psi = encoder(images[mine])
            if self.how.loss == "linear":
                found.append((head(psi) - y[mine]).square().sum(-1).mean())
            else:  # the solve stays in double precision whatever the encoder ran in
                loss = ridge_loss if self.how.loss == "ridge" else split_ridge_loss
                found.append(loss(psi.double(), y[mine].double(), self.how.reg).float())
        return torch.stack(found)

    def not_of(self, k: int, chunk: Tensor) -> Tensor:
        """Positions of the rows that member k learns from: those outside of its chunk, or all where it is the only one."""
        return (chunk != k if len(self.code.encoders) > 1 else torch.ones_like(chunk)).nonzero()[:, 0]

    def training_step(self, batch: Rows, batch_index: int) -> Tensor:
        """The sum over members."""
        seed_step(self.config["seed"] + 7919 * self.global_rank, self.global_step, self.device)
        losses = self.losses(batch)
        if not torch.isfinite(losses).all():
            raise ValueError(f"the loss of the encoders became {losses.tolist()}: try a smaller data.coding.lr ({self.how.lr:g})")
        self.log("coding/loss", losses.mean(), prog_bar=True, on_step=False, on_epoch=True, batch_size=1, sync_dist=True)
        return losses.sum()

    def on_validation_epoch_start(self) -> None:
        """Heads for the features as they are now."""
        self.close()

    def validation_step(self, batch: Rows, batch_index: int) -> None:
        """Mean over the images of ||code - z||^2, each coded by the member that has not seen it."""
        obs, states, chunk = batch
        square = torch.zeros(len(obs), device=self.device)
        for k in range(len(self.code.encoders)):
            if (mine := chunk == k).any():
                square[mine] = (self.code.member(k, obs[mine]) - states[mine]).square().sum(-1).to(square)
        self.log("coding/validation", square.mean(), prog_bar=True, batch_size=len(obs), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Now and then a picture of images with their codes; here, where the trainer brings train mode back after it."""
        if self.current_epoch % max(1, self.how.epochs // 5) == 0 and self.trainer.is_global_zero:
            frames = (self.frames.obs, self.frames.states, self.frames.chunk)
            log_codes(list(self.loggers), self.code, frames, self.current_epoch, extent=self.extent)

    def configure_optimizers(self) -> Any:
        """The optimiser; with schedule onecycle the learning rate rises to its peak and falls to zero."""
        parameters = [p for p in self.code.parameters() if p.requires_grad]
        optimiser = OPTIMISERS[self.how.optimiser](parameters, lr=self.how.lr, weight_decay=self.how.weight_decay)
        if self.how.schedule == "constant":
            return optimiser
        steps = int(self.trainer.estimated_stepping_batches)
        adaptive = self.how.optimiser != "sgd"  # sgd is to stay without momentum
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, self.how.lr, total_steps=steps + 1, cycle_momentum=adaptive)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    @torch.no_grad()
    def close(self) -> None:
        """Heads in closed form for the losses that have none of their own: ridge regression on the features of all images."""
        self.code.eval()
        if self.how.loss == "linear":
            return
        obs, states, chunk = self.frames.obs, self.frames.states, self.frames.chunk
        z_mean, z_scale = self.code.z_mean.double(), self.code.z_scale.double()
        y = (states.to(z_mean) - z_mean) / z_scale
        for k, (encoder, head) in enumerate(zip(self.code.encoders, self.code.heads, strict=True)):
            mine = self.not_of(k, chunk)
            parts = [as_float(obs[rows], torch.float32).to(self.device) for rows in mine.split(256)]
            psi, known = torch.cat([encoder(part) for part in parts]).double(), y[mine.to(y.device)]
            middle, centre = psi.mean(0), known.mean(0)
            weights = ridge_weights(psi - middle, known - centre, self.how.reg, torch.ones_like(known[:, 0]))
            head.load_state_dict({"weight": weights.mT, "bias": centre - middle @ weights})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what the file is."""
        checkpoint["kbf"] = {"version": __version__, "stage": "coding", "operators": {}}


class LastCheckpoint(Checkpoint):
    """``coding.ckpt``, at most every few seconds: an interrupted first stage goes on from it."""

    def __init__(self, path: Path, seconds: float = 10.0) -> None:
        self.path, self.seconds, self.saved = path, seconds, -math.inf

    def on_train_epoch_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Save when the last time is long enough ago, and at the end."""
        last = trainer.current_epoch + 1 == trainer.max_epochs
        if trainer.strategy.broadcast(last or time.monotonic() - self.saved > self.seconds):
            trainer.save_checkpoint(self.path)
            self.saved = time.monotonic()


def fit_code(
    trainer: lightning.Trainer,
    config: dict[str, Any],
    code: Code,
    how: Coding,
    data: tuple[Tensor, Tensor, Tensor],
    ckpt_path: Path | None = None,
    extent: Any = None,
) -> CodeTraining:
    """Fit a code to images ``n *x``, states ``n d`` and their chunks ``n``; on every process the same code comes out.

    ``extent`` is for its pictures (`kbf.frame_plots.frame_grid`).
    """
    obs, states, chunk = data
    frames = Frames(obs, states, chunk)
    module = CodeTraining(config, code, how, frames)
    module.train()
    module.extent = extent
    rank, world = trainer.global_rank, trainer.world_size
    order = RowOrder(len(obs), how.batch_size, config["seed"], rank, world)
    everything = torch.arange(len(obs))[rank::world].split(256) if len(code.encoders) > 1 else []
    loaders = [DataLoader(frames, sampler=order, batch_size=None), DataLoader(frames, sampler=everything, batch_size=None)]  # pyright: ignore[reportArgumentType]
    fit(trainer, module, loaders[0], loaders[1] if everything else None, ckpt_path=ckpt_path)
    module.close()
    if world > 1:  # statistics of batch norm differ between processes
        code.load_state_dict(trainer.strategy.broadcast(code.state_dict()))
    if trainer.is_global_zero:
        log_codes(trainer.loggers, code, data, how.epochs, extent=extent)
        log_features(trainer.loggers, code, data, how.epochs)
    return module


def fit(trainer: lightning.Trainer, *args: Any, **settings: Any) -> None:
    """``trainer.fit``, but Ctrl-C stays a KeyboardInterrupt: the trainer turns it into the end of the process."""
    try:
        trainer.fit(*args, **settings)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise


def seed_step(seed: int, step: int, device: torch.device) -> None:
    """Seed what a training step draws (dropout, augmentation): the same after a resume."""
    number = 1_000_003 * (seed + 1) + step
    torch.default_generator.manual_seed(number)
    if device.type == "cuda":  # without this test torch.manual_seed records a stack trace for a GPU at each step
        torch.cuda.manual_seed(number)


def check_batches(rows: int, how: Coding, world: int = 1) -> None:
    """Raise if ``rows`` images, shared out to ``world`` processes, are too few for batches that can be learned from.

    Raises:
        ValueError: with the numbers.
    """
    least = rows // len(RowOrder(rows, how.batch_size, 0)) // world if rows else 0
    if least < 2:
        raise ValueError(
            f"{rows} images in batches of {how.batch_size or 'all'} for {world} processes leave batches of {least}, "
            "too few to learn from: raise data.coding.batch_size or use more data"
        )


def check_encoder(encoder: nn.Module, images: Tensor) -> None:
    """Raise if an encoder, in eval mode, does not make of ``m *x`` images what it promises: wrong shapes, missing weights.

    Raises:
        ValueError: images that it does not take, or features of another width than its attribute says.
    """
    name, first = type(encoder).__name__, next(encoder.parameters(), None)
    width = getattr(encoder, "features", None)
    try:
        with torch.no_grad():
            psi = encoder(as_float(images, torch.float32 if first is None else first.dtype))
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"the encoder {name} does not take images of shape {tuple(images.shape[1:])}: {reason}") from error
    if tuple(psi.shape) != (len(images), width):
        raise ValueError(
            f"the encoder {name} made features {tuple(psi.shape[1:])} of an image, its attribute 'features' is {width}"
        )


def build_code(encoders: list[nn.Module], d: int) -> Code:
    """A code of encoders, each of which must say how many features it has.

    Raises:
        ValueError: an encoder without ``features``.
    """
    for encoder in encoders:
        if not hasattr(encoder, "features"):
            raise ValueError(f"the encoder {type(encoder).__name__} needs an attribute 'features', the width of its output")
    return Code(encoders, d)
