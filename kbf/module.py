"""The LightningModule of every model: the recordings it learns from, and the loss of its filter.

The loss is the filter's own error. A batch is some windows of one fold of the recordings; the filter over the *other* folds runs
through them, and the squared error of its estimates is followed down. In the memory that filters it a window would only look
itself up. This one path trains bandwidths and ridges, recurrent nets, and encoders of images alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from kbf import __version__
from kbf.build import build
from kbf.data.module import Task, Training
from kbf.data.own import Boundary
from kbf.data.windows import folds, take
from kbf.distributed import Total, all_sum
from kbf.filters.base import Filter, rollout
from kbf.filters.recurrent import LSTMFilter
from kbf.metrics import mse
from kbf.nn.augment import Augment
from kbf.nn.coding import Code, CodedFilter
from kbf.nn.feature_filter import FeatureKBF
from kbf.nn.kernel_bayes import KBF
from kbf.nn.scaling import ScaledFilter, Scaling
from kbf.pictures import log_frames, log_track
from kbf.pretraining import OPTIMISERS, Coding, build_code, read_coding, read_settings, seed_step
from kbf.sequence import Sequence, as_float


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


def take_shapes(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give buffers and parameters the shape that they have in ``state``, where it differs: it may depend on the data."""
    for name, value in state.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = module.get_submodule(owner_name) if owner_name in dict(module.named_modules()) else None
        held = None if owner is None else getattr(owner, leaf, None)
        if isinstance(held, Tensor) and held.shape != value.shape:
            held.data = torch.empty(value.shape, dtype=held.dtype, device=held.device)


def read_training(config: dict[str, Any] | None) -> Training | None:
    """The ``training`` part of a model's configuration; None for a model that does not learn by gradient."""
    if config is None:
        return None
    options = {"optimiser": tuple(OPTIMISERS), "schedule": ("constant", "cosine")}
    return read_settings(Training, config, "model.training", options)
