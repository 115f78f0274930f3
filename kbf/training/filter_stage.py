"""The LightningModule of every model: the recordings it learns from, and the loss of its filter.

The loss is the filter's own error. A batch is some windows of one fold of the recordings; the
filter over the *other* folds runs through them, and the squared error of its estimates is followed
down. In the memory that filters it a window would only look itself up. This one path trains
bandwidths and ridges, recurrent nets, and encoders of images alike.

`kbf.training.fit.train` runs it; so does a plain trainer of Lightning, with `FilterDataModule` or a
data module of one's own::

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

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from kbf import __version__
from kbf.data.files import ColumnSchema
from kbf.data.windows import folds, take
from kbf.evaluation.metrics import mse
from kbf.filters.protocols import Filter, LossModel, RatioModel, WindowModel
from kbf.filters.rollout import rollout
from kbf.filters.scaling import ScaledFilter, Scaling
from kbf.filters.selection.auto import ModelSelection
from kbf.filters.wrapper import FilterWrapper
from kbf.images.augment import Augment
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.recording import Recording, as_float
from kbf.runtime.allowlist import check_sizes
from kbf.runtime.distributed import all_sum
from kbf.runtime.instantiate import build
from kbf.training.buffers import RecordingBuffers
from kbf.training.datamodule import FilterDataModule, Task
from kbf.training.encoder_stage import build_encoding, seed_step
from kbf.training.figure_logging import log_frames, log_track
from kbf.training.settings import (
    OPTIMISERS,
    EncodingSettings,
    Training,
    read_encoding_settings,
    read_training,
)


class FilterTraining(lightning.LightningModule):
    """A model, the recordings it learns from, and the loss of its filter.

    A batch is a `Task`, in the units of the filter, or a `Recording` ``b T`` in those of the data,
    which the filter over all the recordings runs through: what a model learns from so must not be
    among them, unless it has no memory (as an LSTM).

    Hyper-parameters are one plain dict, so that a checkpoint loads with ``weights_only=True``.
    """

    encoding: EncodingSettings | None
    code: Encoding | None
    borrowed_seconds: float
    prepared: bool
    memory: RecordingBuffers

    def __init__(
        self,
        config: dict[str, Any],
        sequences: list[Recording] | None = None,
        *,
        trust: bool = False,
    ) -> None:
        """Build the model.

        Args:
            config: resolved, with ``model`` (``net``, ``training``, ``dtype``) and ``seed``.
            sequences: the training part, all of it; None when a checkpoint brings it.
            trust: allow any ``_target_``, not only what is registered (`kbf.runtime.allowlist`).

        Raises:
            ValueError: a configuration that cannot be built.
        """
        super().__init__()
        self.save_hyperparameters("config")
        self.config = config
        self.model_dtype: torch.dtype = getattr(torch, config["model"].get("dtype") or "float64")
        self.how: Training | None = read_training(config["model"].get("training"))
        if not trust:
            check_sizes("", config["model"].get("training") or {})
        if "candidates" in config["model"]:
            raise ValueError(
                "model=auto chooses a model from the data: that is for kbf train, name one here"
            )
        self.trust = trust
        self.net: Any = build(config["model"]["net"], trust=trust, kinds=("model",))
        if not isinstance(self.net, torch.nn.Module):
            raise ValueError(
                f"model.net must be a module with prepare and condition, got a {type(self.net).__name__}"
            )
        if config["model"].get("model_selection"):
            if self.how is not None:
                raise ValueError(
                    "model.model_selection is for models without training, not for one that learns by gradient"
                )
            given: Any = {
                "name": config["model"]["name"],
                "seed": config["seed"],
                "budget": config["model"].get("budget"),
            }
            self.net = ModelSelection(self.net, **given)
        net: Any = self.net
        if (config.get("data") or {}).get("allow_missing_sensors") and hasattr(
            net, "allow_missing_sensors"
        ):
            net.allow_missing_sensors = True
        self.net.to(self.model_dtype)
        if (
            self.how is not None
            and self.how.monitor == "loss"
            and not isinstance(self.net, LossModel)
        ):
            raise ValueError(
                f"model.training.monitor=loss needs a net with a loss of its own, {type(self.net).__name__} has none"
            )
        if (
            self.how is not None
            and self.how.shared
            and not getattr(self.net, "shares_memory", False)
        ):
            raise ValueError(
                f"model.training.shared: only kernel filters share a memory, not {type(self.net).__name__}"
            )
        d = sequences[0].states.shape[1] if sequences else 1  # a checkpoint brings its own
        self.encoding, self.code = self.build_encoding_settings(
            config["model"].get("encoding"), d, trust
        )
        images = self.encoding is not None  # encoders take them as they are stored
        self.scaling: Scaling | None = build_scaling(config.get("data") or {}, sequences)
        scaled = self.in_units_of_the_filter(sequences or [])
        self.memory = RecordingBuffers(scaled if images else cast_all(scaled, self.model_dtype))
        self.augment: Augment = Augment(self.encoding.augment if self.encoding else ())
        self.observation = tuple(sequences[0].obs.shape[1:]) if sequences else None
        self.validation_floor: float | None = None
        self.borrowed_seconds = 0.0
        self.ready: list[
            Filter[Any]
        ] = []  # a filter that is made already; in a list, since its buffers are not the module's own
        self.operators: dict[str, Tensor] | None = (
            None  # of the filter with the parameters as they are, once somebody asked
        )
        self.prepared = False
        self.held_out: tuple[Recording, Tensor] | None = None
        self.extent: tuple[float, float, float, float] | None = None

    @property
    def learns(self) -> bool:
        """Whether anything is to be learned by gradient."""
        return self.how is not None and any(p.requires_grad for p in self.net.parameters())

    def build_encoding_settings(
        self, config: dict[str, Any] | None, d: int, trust: bool
    ) -> tuple[EncodingSettings | None, Encoding | None]:
        """How encoders are fitted before all else, and the code that they make; none for a net with an encoder of its own."""
        if config is None:
            return None, None
        settings = {key: value for key, value in config.items() if key != "encoder"}
        how = read_encoding_settings(build(settings, trust=trust, kinds=("transform",)))
        if self.own_encoder is not None:
            return how._replace(members=1), None
        if config.get("encoder") is None:
            raise ValueError("data.encoding needs encoder")
        if not isinstance(config["encoder"], dict):
            name = config["encoder"]
            raise ValueError(
                f"data.encoding.encoder must be a class and its settings: write encoder@data.encoding.encoder={name}"
            )
        with torch.random.fork_rng(
            devices=[]
        ):  # whatever the net has drawn: models on one data set start from one code
            torch.manual_seed(1_000_003 * (self.config["seed"] + 1) - 1)
            encoders = [
                build(config["encoder"], trust=trust, kinds=("encoder",))
                for _ in range(how.members)
            ]
            code = build_encoding(
                encoders, d if how.visible is None else len(how.visible), how.gaussians
            )
            code.tells = (
                how.gaussians > 0 and how.visible is None and isinstance(self.net, RatioModel)
            )
            if code.tells:
                self.net.ratio_dim = d
            return how, code

    @property
    def own_encoder(self) -> nn.Module | None:
        """The encoder of images that a net brings itself; its features take no codes' place."""
        return getattr(self.net, "own_encoder", None)

    def prepare(self, sequences: list[Recording], generator: torch.Generator | None = None) -> None:
        """Set what a model takes from the part to fit before it learns: units, bandwidths, first ridges."""
        self.net.prepare(
            sequences,
            torch.Generator().manual_seed(self.config["seed"]) if generator is None else generator,
        )
        self.prepared = True

    def setup(self, stage: str) -> None:
        """`prepare`, where a plain trainer fits a module that nobody has prepared, by all but what its data module holds out."""
        if stage == "fit":
            self.ready.clear()
            if not self.prepared:
                data = getattr(self.trainer, "datamodule", None)
                self.prepare(
                    data.fit if isinstance(data, FilterDataModule) else self.memory.sequences()
                )

    @torch.no_grad()
    def filter(self) -> Filter[Any]:
        """The filter over all the recordings; the module is left in eval mode."""
        self.eval()
        filter = self.net.fit(self.memory.sequences())
        if self.code is not None:
            filter = EncodedFilter(self.code, filter, self.model_dtype).to(self.device).eval()
        return (
            filter
            if self.scaling is None
            else ScaledFilter(self.scaling, filter, self.model_dtype).to(self.device).eval()
        )

    @property
    def input_dtype(self) -> torch.dtype:
        """What the filter takes. In front of a scaling float64: far from zero single precision would not tell values apart."""
        return (
            torch.float64
            if self.scaling is not None and len(self.scaling.x_mean)
            else self.model_dtype
        )

    def in_units_of_the_filter(self, sequences: list[Recording]) -> list[Recording]:
        """Recordings as the memory holds them, if there is a scaling."""
        return list(sequences) if self.scaling is None else [self.scaling(s) for s in sequences]

    def in_units_of_the_data(self, states: Tensor) -> Tensor:
        """States or estimates as people know them."""
        return states if self.scaling is None else self.scaling.states(states)

    def take_encodings(self, stored: dict[str, Any]) -> None:
        """A code that was fitted before, the encoded recordings, and the time that it took."""
        assert self.code is not None
        self.borrowed_seconds = float(stored["seconds"])
        self.code.load_state_dict(stored["code"])
        self.remember(RecordingBuffers.from_state(stored["memory"], "").sequences())

    def take_ratio_means(self) -> None:
        """Of codes that are ratios the mean alone, for a net that knows no ratios."""
        assert self.code is not None
        if not self.code.tells:
            d = len(self.code.z_mean)
            self.remember([s._replace(obs=s.obs[:, :d]) for s in self.memory.sequences()])

    def remember(self, sequences: list[Recording]) -> None:
        """Take recordings in the units of the filter as the memory."""
        self.memory = RecordingBuffers(cast_all(sequences, self.model_dtype))

    @torch.no_grad()
    def taken_in(self, sequences: list[Recording]) -> list[Recording]:
        """Recordings as the filter takes them: in its units, and images encoded, where a code stands in front of it."""
        scaled, code = self.in_units_of_the_filter(sequences), self.code
        if code is not None:
            images = [s.obs.flatten(0, s.states.ndim - 2) for s in scaled]
            encodings = [torch.cat([code(part) for part in each.split(256)]) for each in images]
            scaled = [
                s._replace(obs=x.unflatten(0, s.states.shape[:-1]))
                for s, x in zip(scaled, encodings, strict=True)
            ]
        images_stay = self.encoding is not None and code is None
        return scaled if images_stay else cast_all(scaled, self.model_dtype)

    def task(self, batch: Task | Recording) -> Task:
        """What a batch asks for."""
        return (
            batch
            if isinstance(batch, Task)
            else Task(self.memory.sequences(), self.taken_in([batch])[0])
        )

    def forward(
        self, obs: Tensor, mask: Tensor | None = None, controls: Tensor | None = None
    ) -> Tensor:
        """Estimates ``b T d`` of observations ``b T *x`` by the filter over all the recordings, both in the units of the data."""
        filter = self.ready[0] if self.ready else self.filter()
        return rollout(
            filter, as_float(obs, self.input_dtype), mask=mask, controls=controls
        ).estimates

    def training_step(self, batch: Task | Recording, batch_index: int) -> Tensor:
        """Mean over windows and time, after ``burn_in`` steps, of ||z_hat - z||^2."""
        assert self.how is not None
        seed_step(self.config["seed"], self.global_step, self.device)
        task, self.operators = self.task(batch), None
        memory, shared = self.share(task.memory)
        windows, first = task.windows, self.how.burn_in
        if isinstance(self.net, LossModel):
            return self.log_loss(self.net.loss(*windows, burn_in=first), len(windows.states))
        if isinstance(self.net, WindowModel):
            z = self.net.window_estimates(memory, windows, self.augment, **shared)
        else:
            z = rollout(
                self.net.fit(memory, **shared),
                windows.obs,
                mask=windows.mask,
                controls=windows.controls,
            ).estimates
        return self.log_loss(mse(z[:, first:], windows.states[:, first:]).mean(), len(z))

    def log_loss(self, loss: Tensor, batch_size: int) -> Tensor:
        """The loss, logged.

        Raises:
            ValueError: it is no finite number.
        """
        if not torch.isfinite(loss):
            raise ValueError(
                f"the training loss became {loss.item()} in epoch {self.current_epoch}: try a smaller learning rate "
                f"(model.training.lr is {self.how.lr if self.how else 0:g}) or larger ridges"
            )
        self.log(
            "train/loss",
            loss,
            prog_bar=True,
            on_step=False,
            on_epoch=True,
            batch_size=batch_size,
            sync_dist=True,
        )
        return loss

    def share(self, memory: list[Recording]) -> tuple[list[Recording], dict[str, Any]]:
        """What a filter is conditioned on: a memory, or this process's share of it and (``reduce``) how the shares' sums add up.

        A share is a stretch of the recordings laid one behind the other; where one is cut, a
        transition is lost.
        """
        world = self.trainer.world_size
        if self.how is None or not self.how.shared or world == 1:
            return memory, {}
        return take(memory, folds([len(s.states) for s in memory], world)[self.global_rank]), {
            "reduce": all_sum
        }

    def validation_step(self, batch: Task | Recording, batch_index: int) -> None:
        """Error of the held-out part from its first step on, its excess over the floor, and how the filter is doing."""
        task = self.task(batch)
        memory, shared = self.share(task.memory)
        filter, windows = self.net.fit(memory, **shared), task.windows
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

    def own_loss(self, sequences: Recording, lengths: Tensor) -> Tensor:
        """The net's loss of sequences ``b T``, each to its own end (``lengths`` b), averaged over their steps."""
        assert isinstance(self.net, LossModel)
        parts = []
        for n in lengths.unique().tolist():
            z, x, mask, u = (None if leaf is None else leaf[lengths == n, :n] for leaf in sequences)
            assert z is not None and x is not None
            parts.append((z.shape[0] * n, self.net.loss(z, x, mask, u)))
        return sum(steps * loss for steps, loss in parts) / lengths.sum()

    def on_test_start(self) -> None:
        """One filter for all batches."""
        self.ready = [self.filter()]

    on_predict_start = on_test_start

    def test_step(self, batch: Recording, batch_index: int) -> None:
        """Log ``test/mse``, the error of the filter over all the recordings on new ones ``b T``, in the units of the data."""
        z = self.predict_step(batch, batch_index)
        known = batch.states.isfinite().all(-1)  # shorter ones end with NaN
        self.log(
            "test/mse",
            mse(z, batch.states.to(z), known).mean(),
            batch_size=int(known.sum()),
            sync_dist=True,
        )

    def predict_step(self, batch: Recording, batch_index: int) -> Tensor:
        """Estimates ``b T d`` of new recordings, in the units of the data."""
        return self(batch.obs, batch.mask, batch.controls)

    def on_train_epoch_end(self) -> None:
        """Log the hyper-parameters that move, the learning rate, and now and then a picture of the held-out track."""
        assert self.how is not None
        if hasattr(self.net, "hyperparameters"):
            self.log_dict(
                {f"hyperparameters/{k}": v for k, v in self.net.hyperparameters().items()}
            )
        self.log("train/learning_rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        if self.held_out is not None and self.current_epoch % max(1, self.how.epochs // 5) == 0:
            sequence, z = self.held_out
            first = Recording(*(None if leaf is None else leaf[0].cpu() for leaf in sequence))  # pyright: ignore[reportArgumentType]
            shown = (
                first,
                z[0].detach().cpu(),
                self.trainer.global_step - 1,
            )  # the step of the epoch's curves
            log_track(list(self.loggers), "track/validation", *shown)
            if first.obs.ndim == 4:
                log_frames(list(self.loggers), "frames/validation", *shown, extent=self.extent)

    def configure_optimizers(self) -> Any:
        """The optimiser, and a learning rate that stays or falls to zero along half a cosine."""
        assert self.how is not None
        named = [(name, p) for name, p in self.net.named_parameters() if p.requires_grad]
        parameters: list[dict[str, Any]] = [
            {"params": [p for name, p in named if "encoder." not in name]}
        ]
        lr = self.how.lr if self.how.lr_encoder is None else self.how.lr_encoder
        parameters += [{"params": [p for name, p in named if "encoder." in name], "lr": lr}]
        parameters = [group for group in parameters if group["params"]]
        optimiser = OPTIMISERS[self.how.optimiser](
            parameters, lr=self.how.lr, weight_decay=self.how.weight_decay
        )
        if self.how.schedule == "cosine":
            steps = (
                int(self.trainer.estimated_stepping_batches)
                * self.how.epochs
                // (self.trainer.max_epochs or self.how.epochs)
            )
            cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
            return {
                "optimizer": optimiser,
                "lr_scheduler": {"scheduler": cosine, "interval": "step"},
            }
        return optimiser

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put the operators of the filter over all the recordings beside the parameters."""
        if self.operators is None:
            training = self.training
            self.operators = operators_of(self.net, self.ready[0] if self.ready else self.filter())
            self.train(training)
        checkpoint["kbf"] = {
            "version": __version__,
            "operators": self.operators,
            "observation": self.observation,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the recordings, and the shapes of what depends on them, from the checkpoint before its values are loaded."""
        self.prepared, self.operators = True, None
        self.memory = RecordingBuffers.from_state(checkpoint["state_dict"], "memory.").to(
            self.device
        )
        self.observation = checkpoint["kbf"].get("observation") or tuple(
            self.memory.sequences()[0].obs.shape[1:]
        )
        take_shapes(
            self,
            {
                k: v
                for k, v in checkpoint["state_dict"].items()
                if k.startswith(("net.", "code.", "scaling."))
            },
        )
        if self.code is not None and self.code.tells:
            self.net.ratio_dim = len(self.code.z_mean)


def inner_filter(filter: Filter[Any]) -> Filter[Any]:
    """What is behind units and encoders, if there are any."""
    while isinstance(filter, FilterWrapper):
        filter = filter.inner
    return filter


def operators_of(net: nn.Module, filter: Filter[Any]) -> dict[str, Tensor]:
    """The tensors of the filter behind units and encoders; none of a net that is its own filter."""
    inner = inner_filter(filter)
    return dict(inner.state_dict()) if isinstance(inner, nn.Module) and inner is not net else {}


def build_scaling(data: dict[str, Any], sequences: list[Recording] | None) -> Scaling | None:
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
    column_schema = (
        None if data.get("column_schema") is None else ColumnSchema.from_dict(data["column_schema"])
    )
    free = (
        [None, None]
        if column_schema is None
        else [column_schema.scalable("states"), column_schema.scalable("observations") or None]
    )
    return Scaling().prepare(sequences, *free)


def cast_all(sequences: list[Recording], dtype: torch.dtype) -> list[Recording]:
    """The same recordings in another dtype."""
    return [
        s._replace(
            states=s.states.to(dtype),
            obs=as_float(s.obs, dtype),
            controls=None if s.controls is None else s.controls.to(dtype),
        )
        for s in sequences
    ]


def take_shapes(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give buffers and parameters the shape that they have in ``state``, where it differs: it may depend on the data."""
    for name, value in state.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = (
            module.get_submodule(owner_name) if owner_name in dict(module.named_modules()) else None
        )
        held = None if owner is None else getattr(owner, leaf, None)
        if isinstance(held, Tensor) and held.shape != value.shape:
            held.data = torch.empty(value.shape, dtype=held.dtype, device=held.device)
