"""The filter stage: the LightningModule of every model, whose loss is the error of its filter.

A batch is some windows of one fold of the recordings. The filter over the *other* folds runs
through them, and the squared error of its estimates is minimised: a filter whose memory held the
window would look it up. Bandwidths and ridges, recurrent networks, and encoders of images are all
trained in this way.

`kbf.training.fit.train` runs it; so does a trainer of Lightning, with `FilterDataModule` or another
data module::

    import lightning
    from kbf.training.datamodule import FilterDataModule
    from kbf.training.filter_stage import FilterTraining

    module = FilterTraining({"model": model, "seed": 0}, recordings)
    data = FilterDataModule(recordings, module.how, seed=0, test=new)
    trainer = lightning.Trainer(max_epochs=module.how.epochs)
    trainer.fit(module, data)
    trainer.test(module, data)
    estimates = trainer.predict(module, data)
"""

from typing import Any

import lightning
import torch
from torch import Tensor

from kbf.evaluation.metrics import mse
from kbf.filters.protocols import LossModel, WindowModel
from kbf.filters.rollout import rollout
from kbf.fitted.buffers import RecordingBuffers
from kbf.fitted.model import FittedModel
from kbf.fitted.settings import OPTIMISERS
from kbf.recording import Recording, as_float
from kbf.training.datamodule import FilterDataModule, Task
from kbf.training.encoder_stage import seed_step
from kbf.training.figure_logging import log_frames, log_track


class FilterTraining(FittedModel, lightning.LightningModule):
    """A model, its recordings, and the loss of its filter.

    A batch is a `Task`, in the units of the filter, or a `Recording` ``b T`` in those of the data.
    The latter is filtered with the memory of all recordings: it must not be one of them, unless the
    model has no memory, as an LSTM.

    Hyper-parameters are one plain dict, so that a checkpoint loads with ``weights_only=True``.
    """

    def __init__(
        self,
        config: dict[str, Any],
        recordings: list[Recording] | None = None,
        *,
        trust: bool = False,
    ) -> None:
        """Build the model; arguments and errors as of `FittedModel`."""
        super().__init__(config, recordings, trust=trust)
        self.save_hyperparameters("config")
        if self.how is not None:
            kind = type(self.net).__name__
            if self.how.monitor == "loss" and not isinstance(self.net, LossModel):
                raise ValueError(
                    f"model.training.monitor=loss needs a net with a loss of its own, {kind} "
                    "has none"
                )
        self.validation_floor: float | None = None
        self.held_out: tuple[Recording, Tensor] | None = None
        self.extent: tuple[float, float, float, float] | None = None

    def setup(self, stage: str) -> None:
        """Prepare a module that a trainer of Lightning fits, on all but the held-out recordings."""
        if stage == "fit":
            self.ready.clear()
            if not self.prepared:
                data = getattr(self.trainer, "datamodule", None)
                cut = isinstance(data, FilterDataModule)
                self.prepare(data.fit if cut else self.memory.recordings())

    def take_encodings(self, stored: dict[str, Any]) -> None:
        """Take a fitted encoding, the encoded recordings, and the time that the fit took."""
        assert self.code is not None
        self.borrowed_seconds = float(stored["seconds"])
        self.code.load_state_dict(stored["code"])
        self.remember(RecordingBuffers.from_state(stored["memory"], "").recordings())

    def task(self, batch: Task | Recording) -> Task:
        """Return the task of a batch."""
        if isinstance(batch, Task):
            return batch
        return Task(self.memory.recordings(), self.taken_in([batch])[0])

    def forward(
        self, obs: Tensor, mask: Tensor | None = None, controls: Tensor | None = None
    ) -> Tensor:
        """Return estimates ``b T d`` of observations ``b T *x``, both in the units of the data.

        The memory of the filter is all recordings.
        """
        filter = self.ready[0] if self.ready else self.filter()
        obs = as_float(obs, self.input_dtype)
        return rollout(filter, obs, mask=mask, controls=controls).estimates

    def training_step(self, batch: Task | Recording, batch_index: int) -> Tensor:
        """Return the mean over windows and time, after ``burn_in`` steps, of ||z_hat - z||^2.

        A model with a loss of its own returns that.
        """
        assert self.how is not None
        seed_step(self.config["seed"] + 7919 * self.global_rank, self.global_step, self.device)
        task, self.operators = self.task(batch), None
        windows, first = task.windows, self.how.burn_in
        if isinstance(self.net, LossModel):
            return self.log_loss(self.net.loss(*windows, burn_in=first), task)
        if isinstance(self.net, WindowModel):
            z = self.net.window_estimates(task.memory, windows, self.augment)
        else:
            z = rollout(
                self.net.fit(task.memory),
                windows.obs,
                mask=windows.mask,
                controls=windows.controls,
                gradients=True,
            ).estimates
        return self.log_loss(mse(z[:, first:], windows.states[:, first:]).mean(), task)

    def log_loss(self, loss: Tensor, task: Task) -> Tensor:
        """Log the mean loss of the windows of a task; returns it with the weight of the task.

        Raises:
            ValueError: it is not finite.
        """
        if not torch.isfinite(loss):
            raise ValueError(
                f"the training loss became {loss.item()} in epoch {self.current_epoch}: "
                f"try a smaller learning rate "
                f"(model.training.lr is {self.how.lr if self.how else 0:g}) or larger ridges"
            )
        windows = len(task.windows.states) if task.weight else 0
        settings: Any = {"prog_bar": True, "batch_size": windows, "sync_dist": True}
        self.log("train/loss", loss, on_step=False, on_epoch=True, **settings)
        return task.weight * loss

    def validation_step(self, batch: Task | Recording, batch_index: int) -> None:
        """Log error, excess error and diagnostics of the filter on the held-out part."""
        task = self.task(batch)
        filter, windows = self.net.fit(task.memory), task.windows
        run = rollout(filter, windows.obs, mask=windows.mask, controls=windows.controls)
        states = self.in_units_of_the_data(windows.states)  # NaN behind the end of the shorter ones
        z = self.in_units_of_the_data(run.estimates)
        known = states.isfinite().all(-1)
        error = mse(z, states, known).mean()
        self.log("validation/mse", error, prog_bar=True, batch_size=1, sync_dist=True)
        if self.how is not None and self.how.monitor == "loss":
            self.log(
                "validation/loss",
                self.own_loss(windows, known.sum(1)),
                batch_size=1,
                sync_dist=True,
            )
        if self.validation_floor is not None:
            self.log(
                "validation/excess", error / self.validation_floor - 1, batch_size=1, sync_dist=True
            )
        for name, values in run.diagnostics.items():
            self.log(f"filter/{name}", values.mean(), batch_size=1, sync_dist=True)
        self.held_out = windows._replace(states=states), z

    def own_loss(self, recordings: Recording, lengths: Tensor) -> Tensor:
        """Return the model's loss of recordings ``b T``, averaged over their steps.

        ``lengths`` (b) are the numbers of steps: shorter recordings are padded.
        """
        assert isinstance(self.net, LossModel)
        parts = []
        for n in lengths.unique().tolist():
            z, x, mask, u = (
                None if leaf is None else leaf[lengths == n, :n] for leaf in recordings
            )
            assert z is not None and x is not None
            parts.append((z.shape[0] * n, self.net.loss(z, x, mask, u)))
        return sum(steps * loss for steps, loss in parts) / lengths.sum()

    def on_test_start(self) -> None:
        """Fit one filter for all batches."""
        self.ready = [self.filter()]

    on_predict_start = on_test_start

    def test_step(self, batch: Recording, batch_index: int) -> None:
        """Log ``test/mse``, the error on new recordings ``b T``, in the units of the data."""
        z = self.predict_step(batch, batch_index)
        known = batch.states.isfinite().all(-1)  # shorter ones end with NaN
        error = mse(z, batch.states.to(z), known).mean()
        self.log("test/mse", error, batch_size=int(known.sum()), sync_dist=True)

    def predict_step(self, batch: Recording, batch_index: int) -> Tensor:
        """Return estimates ``b T d`` of new recordings, in the units of the data."""
        return self(batch.obs, batch.mask, batch.controls)

    def on_train_epoch_end(self) -> None:
        """Log hyper-parameters, the learning rate and, five times, the held-out track."""
        assert self.how is not None
        if hasattr(self.net, "hyperparameters"):
            self.log_dict(
                {f"hyperparameters/{k}": v for k, v in self.net.hyperparameters().items()}
            )
        self.log("train/learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.held_out is not None and self.current_epoch % max(1, self.how.epochs // 5) == 0:
            recording, z = self.held_out
            first = Recording(*(None if leaf is None else leaf[0].cpu() for leaf in recording))  # pyright: ignore[reportArgumentType]
            # The step is that of the epoch's curves.
            shown = (first, z[0].detach().cpu(), self.trainer.global_step - 1)
            log_track(list(self.loggers), "track/validation", *shown)
            if first.obs.ndim == 4:
                log_frames(list(self.loggers), "frames/validation", *shown, extent=self.extent)

    def configure_optimizers(self) -> Any:
        """Return the optimiser; the learning rate is constant, or half a cosine down to zero."""
        assert self.how is not None
        parts: dict[bool, list[Any]] = {False: [], True: []}
        for name, parameter in self.net.named_parameters():
            if parameter.requires_grad:
                parts["encoder." in name].append(parameter)
        lr = self.how.lr if self.how.lr_encoder is None else self.how.lr_encoder
        groups = [{"params": parts[False]}, {"params": parts[True], "lr": lr}]
        parameters = [group for group in groups if group["params"]]
        optimiser = OPTIMISERS[self.how.optimiser](
            parameters, lr=self.how.lr, weight_decay=self.how.weight_decay
        )
        if self.how.schedule == "cosine":
            # A run that is resumed for more epochs keeps the schedule of its configuration.
            epochs = self.trainer.max_epochs or self.how.epochs
            steps = int(self.trainer.estimated_stepping_batches) * self.how.epochs // epochs
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
            schedule = {"scheduler": cosine, "interval": "step"}
            return {"optimizer": optimiser, "lr_scheduler": schedule}
        return optimiser
