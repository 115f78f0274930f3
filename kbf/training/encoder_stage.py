"""The encoder stage: encoders learn to predict the state from single images, before any filter.

Each member of a `kbf.images.encodings.Encoding` is trained on all recordings but one contiguous
chunk, on which its error is measured.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from kbf import __version__
from kbf.fitted.settings import OPTIMISERS, EncodingSettings
from kbf.images.augment import Augment
from kbf.images.encodings import Encoding
from kbf.images.losses import belief_ratio, ridge_loss, ridge_weights, split_ridge_loss
from kbf.recording import as_float
from kbf.rkhs.features import random_fourier
from kbf.rkhs.kernels import median_distance
from kbf.training.encoder_datamodule import Frames, RowOrder
from kbf.training.figure_logging import log_encodings, log_features
from kbf.training.processes import gathered, rank_and_world, watched

# Losses by which the heads are trained together with the encoders.
OWN_HEADS = ("linear", "ratio")
# Share of the states' variance below which a warning is given: the encoders learned nothing.
MIN_EXPLAINED_VARIANCE = 0.05
# Images that go through an encoder at once, outside of training.
ROWS_PER_PASS = 256


def warn_of_chance(
    states: Float[Tensor, "n d"], encodings: Float[Tensor, "n k"], how: EncodingSettings
) -> None:
    """Warn where encodings of held-out images explain less than `MIN_EXPLAINED_VARIANCE`.

    Args:
        states: all components.
        encodings: begin with the visible components.
        how: settings, with the visible components.
    """
    visible = how.visible_part(states)
    encodings = encodings[:, : visible.shape[1]]
    unexplained = (encodings - visible).square().sum() / (visible - visible.mean(0)).square().sum()
    if unexplained > 1 - MIN_EXPLAINED_VARIANCE:  # False where states do not vary
        share = max(0, round(100 * (1 - unexplained.item())))
        warnings.warn(
            "the encoders learned next to nothing: on held-out images they explain "
            f"{share} % of the states' variance (kbf data check shows some images; more "
            "recordings, data.encoding.epochs, another data.encoding.lr or data/encoder may help)",
            stacklevel=2,
        )


class EncoderTraining(lightning.LightningModule):
    """Fits the members of an encoding in parallel; each skips the images of its own chunk.

    Of several processes each computes the features of a share of the batch. All features are
    gathered, since the losses of ridge regression couple the images of a batch.

    The losses of ridge regression do not use the heads: these are fitted in closed form whenever
    encodings are requested. With ``how.loss`` ratio the loss is `ratio_loss`.
    """

    def __init__(
        self, config: dict[str, Any], code: Encoding, how: EncodingSettings, frames: Frames
    ) -> None:
        """Prepare the training.

        Args:
            config: the configuration as checkpoints keep it; its ``seed`` is used.
            code: the encoding, fitted in place.
            how: the settings.
            frames: all images.
        """
        super().__init__()
        self.save_hyperparameters("config")
        self.config: dict[str, Any] = config
        self.how: EncodingSettings = how
        self.code: Encoding = code
        self.frames: Frames = frames
        code.prepare(frames.states)
        code.heads.requires_grad_(how.loss in OWN_HEADS)
        self.augment: Augment = Augment(how.augment)
        self.extent: Any = None
        self.provenance: dict[str, Any] | None = None
        self.fourier: Callable[[Tensor], Tensor] | None = None
        if how.targets == "fourier":
            width = (median_distance(frames.states) / code.z_scale).item()
            generator = torch.Generator().manual_seed(config["seed"])
            self.fourier = random_fourier(
                frames.states.shape[1], how.fourier, bandwidth=width, generator=generator
            )

    def targets(self, states: Tensor) -> Tensor:
        """Return the regression targets: standardised states, or random Fourier features."""
        y = (states - self.code.z_mean.to(states)) / self.code.z_scale.to(states)
        return (y if self.fourier is None else self.fourier(y)).float()

    def losses(self, batch: Frames) -> Tensor:
        """Return one loss for each member, over the images outside of its chunk."""
        obs, states, chunk = batch
        images, y = self.augment(obs), self.targets(states)
        if (process := rank_and_world())[1] > 1:  # dropout differs between processes
            seed = self.config["seed"] + 7919 * (1 + process[0])
            seed_step(seed, self.global_step, self.device)
        losses = []
        for k, (encoder, head) in enumerate(zip(self.code.encoders, self.code.heads, strict=True)):
            mine = self.not_of(k, chunk)
            if len(mine) < 2:
                # A small batch, nearly all of this member's own chunk: the loss is 0, but depends
                # on the parameters, as distributed training requires.
                own = [
                    p.flatten()[:1].sum()
                    for p in (*encoder.parameters(), *head.parameters())
                    if p.requires_grad
                ]
                losses.append(0 * torch.stack(own).sum())
                continue
            psi = shared_features(encoder, images[mine])
            if self.how.loss == "ratio":
                losses.append(self.ratio_loss(head(psi), states[mine].to(psi)))
            elif self.how.loss == "linear":
                losses.append((head(psi) - y[mine]).square().sum(-1).mean())
            else:  # the solve stays in double precision whatever the precision of the encoder
                pair, reg = (psi.double(), y[mine].double()), self.how.reg
                if self.how.loss == "ridge":
                    weights = (
                        None if self.how.weighting == "uniform" else belief_ratio(states[mine])
                    )
                    losses.append(ridge_loss(*pair, reg, weights).float())
                else:
                    losses.append(split_ridge_loss(*pair, reg).float())
        return torch.stack(losses)

    def ratio_loss(
        self, output: Float[Tensor, "m k"], z: Float[Tensor, "m d"]
    ) -> Float[Tensor, ""]:
        """Return the mean of |E[z | x] - z|^2 / scale^2 - log r(x, z).

        Both terms are minimal where r(x, z) = p(z | x) / p(z). The first is for the start, where no
        image is informative yet: with -log r alone some encoders converge to pi_0 = 1, the ratio of
        an uninformative image, and stay there.
        """
        row = self.code.row(output)
        residual = (row[:, : z.shape[1]] - z) / self.code.z_scale
        return residual.square().sum(-1).mean() - self.code.density.log_density(row, z).mean()

    def not_of(self, k: int, chunk: Tensor) -> Tensor:
        """Return the rows that member k is trained on: those outside of its chunk.

        A single member is trained on all rows.
        """
        mine = chunk != k if len(self.code.encoders) > 1 else torch.ones_like(chunk)
        return mine.nonzero()[:, 0]

    def training_step(self, batch: list[Tensor], batch_index: int) -> Tensor:
        """Return the sum of the losses over members.

        Raises:
            ValueError: a loss is not finite.
        """
        seed_step(self.config["seed"], self.global_step, self.device)
        losses = self.losses(Frames(*batch))
        if not torch.isfinite(losses).all():
            raise ValueError(
                f"the loss of the encoders became {losses.tolist()}: "
                f"try a smaller data.encoding.lr ({self.how.lr:g})"
            )
        settings: Any = {"prog_bar": True, "batch_size": 1, "sync_dist": True}
        self.log("encoding/loss", losses.mean(), on_step=False, on_epoch=True, **settings)
        return losses.sum()

    def on_validation_epoch_start(self) -> None:
        """Fit the heads to the present features."""
        self.close()

    def validation_step(self, batch: list[Tensor], batch_index: int) -> None:
        """Log the mean of |encoding - z|^2; each image is encoded by the member that skips it."""
        obs, states, chunk = batch
        square = torch.zeros(len(obs), device=self.device)
        for k in range(len(self.code.encoders)):
            if (mine := chunk == k).any():
                errors = self.code.member(k, obs[mine]) - states[mine]
                square[mine] = errors.square().sum(-1).to(square)
        settings: Any = {"prog_bar": True, "batch_size": len(obs), "sync_dist": True}
        self.log("encoding/validation", square.mean(), **settings)

    def on_validation_epoch_end(self) -> None:
        """Draw images with their encodings, five times in all.

        `log_encodings` leaves the encoding in eval mode; after this hook the trainer restores train
        mode. The last epoch is drawn by `fit_encoding`, with the final heads.
        """
        last = self.current_epoch + 1 == self.how.epochs
        due = self.current_epoch % max(1, self.how.epochs // 5) == 0
        if due and self.trainer.is_global_zero and not last:
            step = self.trainer.global_step - 1
            log_encodings(list(self.loggers), self.code, self.frames, step, extent=self.extent)

    def configure_optimizers(self) -> Any:
        """Return the optimiser; with schedule onecycle the learning rate rises, then falls to 0."""
        parameters = [p for p in self.code.parameters() if p.requires_grad]
        optimiser = OPTIMISERS[self.how.optimiser](
            parameters, lr=self.how.lr, weight_decay=self.how.weight_decay
        )
        if self.how.schedule == "constant":
            return optimiser
        steps = int(self.trainer.estimated_stepping_batches)
        adaptive = self.how.optimiser != "sgd"  # sgd has no momentum to cycle
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimiser, self.how.lr, total_steps=steps + 1, cycle_momentum=adaptive
        )
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    @torch.no_grad()
    def close(self) -> None:
        """Fit the heads in closed form, for losses outside of `OWN_HEADS`.

        Ridge regression on the features of all images.
        """
        self.code.eval()
        if self.how.loss in OWN_HEADS:
            return
        obs, states, chunk = self.frames
        z_mean, z_scale = self.code.z_mean.double(), self.code.z_scale.double()
        y = (states.to(z_mean) - z_mean) / z_scale
        for k, (encoder, head) in enumerate(zip(self.code.encoders, self.code.heads, strict=True)):
            mine = self.not_of(k, chunk)
            images = (as_float(obs[rows], torch.float32) for rows in mine.split(ROWS_PER_PASS))
            psi = torch.cat([encoder(part.to(self.device)) for part in images]).double()
            known = y[mine.to(y.device)]
            middle, centre = psi.mean(0), known.mean(0)
            ones = torch.ones_like(known[:, 0])
            weights = ridge_weights(psi - middle, known - centre, self.how.reg, ones)
            head.load_state_dict({"weight": weights.mT, "bias": centre - middle @ weights})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the version and the stage to the checkpoint."""
        checkpoint["kbf"] = {
            "version": __version__,
            "stage": "encoding",
            "operators": {},
            "provenance": self.provenance,
        }


def shared_features(encoder: nn.Module, images: Tensor) -> Tensor:
    """Return the features ``m p`` of images ``m *x``, of which each process computes a share."""
    rank, world = rank_and_world()
    own = images[rank::world]
    # The parameters of a process without a share are in its graph as well, as DDP requires.
    return gathered(encoder(own if len(own) else images[:1])[: len(own)], len(images))


def fit_encoding(
    trainer: lightning.Trainer,
    config: dict[str, Any],
    code: Encoding,
    how: EncodingSettings,
    frames: Frames,
    ckpt_path: Path | None = None,
    extent: Any = None,
    provenance: dict[str, Any] | None = None,
) -> EncoderTraining:
    """Fit an encoding; it is equal on all processes of a distributed run.

    Args:
        trainer: runs the epochs.
        config: of `EncoderTraining`.
        code: the encoding, fitted in place.
        how: the settings.
        frames: all images.
        ckpt_path: a checkpoint of this stage to continue.
        extent: for the figures (`kbf.plots.frames.frame_grid`).
        provenance: record that checkpoints contain (`kbf.runtime.provenance`).
    """
    module = EncoderTraining(config, code, how, frames)
    module.train()
    module.extent, module.provenance = extent, provenance
    rank, world, n = trainer.global_rank, trainer.world_size, len(frames.obs)
    order = RowOrder(n, how.batch_size, config["seed"])
    everything = torch.arange(n)[rank::world].split(ROWS_PER_PASS)
    images: Any = TensorDataset(*frames)
    train = DataLoader(images, sampler=order, batch_size=None)
    validation = DataLoader(images, sampler=everything, batch_size=None)
    fit(trainer, module, train, validation if how.members > 1 else None, ckpt_path=ckpt_path)
    module.close()
    if world > 1:  # equal but for rounding
        code.load_state_dict(trainer.strategy.broadcast(code.state_dict()))
    if trainer.is_global_zero:
        log_encodings(trainer.loggers, code, frames, trainer.global_step - 1, extent=extent)
        log_features(trainer.loggers, code, frames, trainer.global_step - 1)
    return module


def fit(trainer: lightning.Trainer, *args: Any, **settings: Any) -> None:
    """Call ``trainer.fit``; Ctrl-C raises KeyboardInterrupt, not the SystemExit of the trainer."""
    try:
        with watched(trainer):
            trainer.fit(*args, **settings)
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise


def seed_step(seed: int, step: int, device: torch.device) -> None:
    """Seed the draws of a training step, as dropout; a resumed run repeats them."""
    number = 1_000_003 * (seed + 1) + step
    torch.default_generator.manual_seed(number)
    # Without this test torch.manual_seed records a stack trace for a GPU at each step.
    if device.type == "cuda":
        torch.cuda.manual_seed(number)


def check_encoder(encoder: nn.Module, images: Tensor) -> None:
    """Check that an encoder, in eval mode, takes images ``m *x`` and returns features ``m p``.

    Raises:
        ValueError: it does not take the images, or p is not its attribute ``features``.
    """
    name, first = type(encoder).__name__, next(encoder.parameters(), None)
    width = getattr(encoder, "features", None)
    try:
        with torch.no_grad():
            psi = encoder(as_float(images, torch.float32 if first is None else first.dtype))
    except (RuntimeError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        shape = tuple(images.shape[1:])
        raise ValueError(
            f"the encoder {name} does not take images of shape {shape}: {reason}"
        ) from error
    if tuple(psi.shape) != (len(images), width):
        raise ValueError(
            f"the encoder {name} made features {tuple(psi.shape[1:])} of an image, "
            f"its attribute 'features' is {width}"
        )
