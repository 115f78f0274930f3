"""The first of two stages: encoders learn to predict the state from single observations, before any filter is built.

Each member of a `kbf.images.encodings.Encoding` learns from all recordings but one contiguous
chunk, which says how good it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader

from kbf import __version__
from kbf.images.augment import Augment
from kbf.images.encodings import Encoding
from kbf.images.losses import ridge_loss, ridge_weights, split_ridge_loss
from kbf.recording import as_float
from kbf.rkhs.features import random_fourier
from kbf.rkhs.kernels import median_distance
from kbf.training.encoder_datamodule import Frames, RowOrder, Rows
from kbf.training.figure_logging import log_encodings, log_features
from kbf.training.settings import OPTIMISERS, EncodingSettings

OWN_HEADS = ("linear", "ratio")
"""Losses that the heads are trained by together with the encoders."""
LEAST_EXPLAINED = 0.05
"""Share of the states' variance below which encoders have learned next to nothing."""


def warn_of_chance(
    states: Float[Tensor, "n d"], encodings: Float[Tensor, "n k"], how: EncodingSettings
) -> None:
    """Warn where codes of images that their encoders have not seen explain less than `LEAST_EXPLAINED` of the states' variance.

    ``states``: all components, of which ``encodings`` begin with the visible ones.
    """
    visible = how.visible_part(states)
    encodings = encodings[:, : visible.shape[1]]
    unexplained = (encodings - visible).square().sum() / (visible - visible.mean(0)).square().sum()
    if unexplained > 1 - LEAST_EXPLAINED:  # not where states do not vary
        share = max(0, round(100 * (1 - unexplained.item())))
        finding = f"the encoders learned next to nothing: on images new to them they explain {share} % of the states' variance"
        advice = "kbf data check shows some; more recordings, data.encoding.epochs, another data.encoding.lr or data/encoder may help"
        warnings.warn(f"{finding} ({advice})", stacklevel=2)


class EncoderTraining(lightning.LightningModule):
    """Fit the members of a code side by side; each skips the images of its own chunk.

    The losses of ridge regression have no use for the heads: these are fitted in closed form
    whenever codes are asked for. With ``how.loss`` ratio the loss is `ratio_loss`.
    """

    config: dict[str, Any]
    how: EncodingSettings
    code: Encoding
    frames: Frames

    def __init__(
        self, config: dict[str, Any], code: Encoding, how: EncodingSettings, frames: Frames
    ) -> None:
        """Prepare.

        Args:
            config: what checkpoints keep of the configuration; its ``seed`` is used.
            code: to be fitted, in place.
            how: the settings.
            frames: all that there is to learn from.
        """
        super().__init__()
        self.save_hyperparameters("config")
        self.config, self.how, self.code, self.frames = config, how, code, frames
        code.prepare(frames.states)
        code.heads.requires_grad_(how.loss in OWN_HEADS)
        self.augment: Augment = Augment(how.augment)
        self.extent: Any = None
        self.fourier: Callable[[Tensor], Tensor] | None = None
        if how.targets == "fourier":
            width = (median_distance(frames.states) / code.z_scale).item()
            generator = torch.Generator().manual_seed(config["seed"])
            self.fourier = random_fourier(
                frames.states.shape[1], how.fourier, bandwidth=width, generator=generator
            )

    def targets(self, states: Tensor) -> Tensor:
        """What is regressed on: standardised states, or random Fourier features of them."""
        y = (states - self.code.z_mean.to(states)) / self.code.z_scale.to(states)
        return (y if self.fourier is None else self.fourier(y)).float()

    def losses(self, batch: Rows) -> Tensor:
        """One loss for each member, over the images outside of its chunk."""
        obs, states, chunk = batch
        images, y = self.augment(obs), self.targets(states)
        losses = []
        for k, (encoder, head) in enumerate(zip(self.code.encoders, self.code.heads, strict=True)):
            mine = self.not_of(k, chunk)
            if (
                len(mine) < 2
            ):  # a small batch, nearly all of it of this member's own chunk: nothing to learn from
                own = [
                    p.flatten()[:1].sum()
                    for p in (*encoder.parameters(), *head.parameters())
                    if p.requires_grad
                ]
                losses.append(0 * torch.stack(own).sum())
                continue
            psi = encoder(images[mine])
            if self.how.loss == "ratio":
                losses.append(self.ratio_loss(head(psi), states[mine].to(psi)))
            elif self.how.loss == "linear":
                losses.append((head(psi) - y[mine]).square().sum(-1).mean())
            else:  # the solve stays in double precision whatever the encoder ran in
                loss = ridge_loss if self.how.loss == "ridge" else split_ridge_loss
                losses.append(loss(psi.double(), y[mine].double(), self.how.reg).float())
        return torch.stack(losses)

    def ratio_loss(self, said: Float[Tensor, "m k"], z: Float[Tensor, "m d"]) -> Float[Tensor, ""]:
        """The mean of |E[z | x] - z|^2 / scale^2 - log r(x, z), which is the least where r(x, z) = p(z | x) / p(z).

        The first term has its least value there, too. It is for the start, where no image tells
        anything yet: from -log r alone some encoders learn that none ever does (pi_0 = 1), and then
        learn no more.
        """
        row = self.code.row(said)
        apart = (row[:, : z.shape[1]] - z) / self.code.z_scale
        return apart.square().sum(-1).mean() - self.code.density.log_density(row, z).mean()

    def not_of(self, k: int, chunk: Tensor) -> Tensor:
        """Positions of the rows that member k learns from: those outside of its chunk, or all where it is the only one."""
        return (chunk != k if len(self.code.encoders) > 1 else torch.ones_like(chunk)).nonzero()[
            :, 0
        ]

    def training_step(self, batch: Rows, batch_index: int) -> Tensor:
        """The sum over members."""
        seed_step(self.config["seed"] + 7919 * self.global_rank, self.global_step, self.device)
        losses = self.losses(batch)
        if not torch.isfinite(losses).all():
            raise ValueError(
                f"the loss of the encoders became {losses.tolist()}: try a smaller data.encoding.lr ({self.how.lr:g})"
            )
        self.log(
            "encoding/loss",
            losses.mean(),
            prog_bar=True,
            on_step=False,
            on_epoch=True,
            batch_size=1,
            sync_dist=True,
        )
        return losses.sum()

    def on_validation_epoch_start(self) -> None:
        """Heads for the features as they are now."""
        self.close()

    def validation_step(self, batch: Rows, batch_index: int) -> None:
        """Mean over the images of ||code - z||^2, each encoded by the member that has not seen it."""
        obs, states, chunk = batch
        square = torch.zeros(len(obs), device=self.device)
        for k in range(len(self.code.encoders)):
            if (mine := chunk == k).any():
                square[mine] = (
                    (self.code.member(k, obs[mine]) - states[mine]).square().sum(-1).to(square)
                )
        self.log(
            "encoding/validation", square.mean(), prog_bar=True, batch_size=len(obs), sync_dist=True
        )

    def on_validation_epoch_end(self) -> None:
        """Now and then a picture of images with their codes; here, where the trainer brings train mode back after it."""
        last = (
            self.current_epoch + 1 == self.how.epochs
        )  # shown by `fit_encoding`, with heads as they are kept
        if (
            self.current_epoch % max(1, self.how.epochs // 5) == 0
            and self.trainer.is_global_zero
            and not last
        ):
            frames = (self.frames.obs, self.frames.states, self.frames.chunk)
            log_encodings(
                list(self.loggers),
                self.code,
                frames,
                self.trainer.global_step - 1,
                extent=self.extent,
            )

    def configure_optimizers(self) -> Any:
        """The optimiser; with schedule onecycle the learning rate rises to its peak and falls to zero."""
        parameters = [p for p in self.code.parameters() if p.requires_grad]
        optimiser = OPTIMISERS[self.how.optimiser](
            parameters, lr=self.how.lr, weight_decay=self.how.weight_decay
        )
        if self.how.schedule == "constant":
            return optimiser
        steps = int(self.trainer.estimated_stepping_batches)
        adaptive = self.how.optimiser != "sgd"  # sgd is to stay without momentum
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.how.lr, total_steps=steps + 1, cycle_momentum=adaptive
        )
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    @torch.no_grad()
    def close(self) -> None:
        """Heads in closed form for the losses that have none of their own: ridge regression on the features of all images."""
        self.code.eval()
        if self.how.loss in OWN_HEADS:
            return
        obs, states, chunk = self.frames.obs, self.frames.states, self.frames.chunk
        z_mean, z_scale = self.code.z_mean.double(), self.code.z_scale.double()
        y = (states.to(z_mean) - z_mean) / z_scale
        for k, (encoder, head) in enumerate(zip(self.code.encoders, self.code.heads, strict=True)):
            mine = self.not_of(k, chunk)
            parts = [as_float(obs[rows], torch.float32).to(self.device) for rows in mine.split(256)]
            psi, known = torch.cat([encoder(part) for part in parts]).double(), y[mine.to(y.device)]
            middle, centre = psi.mean(0), known.mean(0)
            weights = ridge_weights(
                psi - middle, known - centre, self.how.reg, torch.ones_like(known[:, 0])
            )
            head.load_state_dict({"weight": weights.mT, "bias": centre - middle @ weights})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Say what the file is."""
        checkpoint["kbf"] = {"version": __version__, "stage": "encoding", "operators": {}}


def fit_encoding(
    trainer: lightning.Trainer,
    config: dict[str, Any],
    code: Encoding,
    how: EncodingSettings,
    data: tuple[Tensor, Tensor, Tensor],
    ckpt_path: Path | None = None,
    extent: Any = None,
) -> EncoderTraining:
    """Fit a code to images ``n *x``, states ``n d`` and their chunks ``n``; on every process the same code comes out.

    ``extent`` is for its pictures (`kbf.plots.frames.frame_grid`).
    """
    obs, states, chunk = data
    frames = Frames(obs, states, chunk)
    module = EncoderTraining(config, code, how, frames)
    module.train()
    module.extent = extent
    rank, world = trainer.global_rank, trainer.world_size
    order = RowOrder(len(obs), how.batch_size, config["seed"], rank, world)
    everything = torch.arange(len(obs))[rank::world].split(256) if len(code.encoders) > 1 else []
    loaders = [
        DataLoader(frames, sampler=order, batch_size=None),
        DataLoader(frames, sampler=everything, batch_size=None),
    ]  # pyright: ignore[reportArgumentType]
    fit(trainer, module, loaders[0], loaders[1] if everything else None, ckpt_path=ckpt_path)
    module.close()
    if world > 1:  # statistics of batch norm differ between processes
        code.load_state_dict(trainer.strategy.broadcast(code.state_dict()))
    if trainer.is_global_zero:
        log_encodings(trainer.loggers, code, data, trainer.global_step - 1, extent=extent)
        log_features(trainer.loggers, code, data, trainer.global_step - 1)
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
    if (
        device.type == "cuda"
    ):  # without this test torch.manual_seed records a stack trace for a GPU at each step
        torch.cuda.manual_seed(number)


def check_encoder(encoder: nn.Module, images: Tensor) -> None:
    """Raise if an encoder, in eval mode, does not make of ``m *x`` images what it promises: wrong shapes, missing weights.

    Raises:
        ValueError: images that it does not take, or features of another width than its attribute
            says.
    """
    name, first = type(encoder).__name__, next(encoder.parameters(), None)
    width = getattr(encoder, "features", None)
    try:
        with torch.no_grad():
            psi = encoder(as_float(images, torch.float32 if first is None else first.dtype))
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the encoder {name} does not take images of shape {tuple(images.shape[1:])}: {reason}"
        ) from error
    if tuple(psi.shape) != (len(images), width):
        raise ValueError(
            f"the encoder {name} made features {tuple(psi.shape[1:])} of an image, its attribute 'features' is {width}"
        )
