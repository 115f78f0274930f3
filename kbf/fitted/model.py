"""A model from its configuration, and the filter over its recordings: what a checkpoint restores.

The parts are a net, the scaling of ``data.normalise``, the encoding of images and the recordings
(the memory). `kbf.training.filter_stage.FilterTraining` trains one with Lightning;
`kbf.fitted.checkpoint.load_filter` restores one without it.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kbf import __version__
from kbf.data.files import ColumnSchema
from kbf.filters.protocols import Filter, RatioModel
from kbf.filters.scaling import ScaledFilter, ScaleWarning, Scaling
from kbf.filters.selection.auto import ModelSelection
from kbf.filters.wrapper import FilterWrapper
from kbf.fitted.buffers import RecordingBuffers
from kbf.fitted.model_checks import check_observations, check_repeats, check_sensors
from kbf.fitted.settings import (
    EncodingSettings,
    Training,
    read_encoding_settings,
    read_training,
)
from kbf.images.augment import Augment
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.recording import Recording, as_float, control_width
from kbf.runtime.instantiate import build
from kbf.runtime.interpolation import from_environment
from kbf.runtime.memory_limit import check_arguments


class FittedModel(nn.Module):
    """A net with scaling, encoders and recordings, as named by a configuration.

    Attributes:
        net: the model of ``model.net``, a `ModelSelection` around it with
            ``model.model_selection``.
        scaling: from the units of the data to those of the filter; None for none.
        code: the encoding of images in front of the filter; None where there is none, or the net
            has an encoder of its own.
        memory: the recordings, in the units of the filter.
        observation: shape of an observation as the data has it.
        how: settings of the training by gradient; None for models without.
    """

    encoding: EncodingSettings | None
    code: Encoding | None

    def __init__(
        self,
        config: dict[str, Any],
        recordings: list[Recording] | None = None,
        *,
        trust: bool = False,
    ) -> None:
        """Build the model.

        Args:
            config: resolved, with ``model`` (``net``, ``training``, ``dtype``) and ``seed``.
            recordings: the training part, all of it; None where a checkpoint contains it.
            trust: allow any ``_target_``, not only the public classes (`kbf.runtime.allowlist`).

        Raises:
            ValueError: a configuration that cannot be built.
        """
        super().__init__()
        self.config: dict[str, Any] = config
        self.trust: bool = trust
        config = from_environment(config) if trust else config  # the attribute keeps references
        model = config["model"]
        self.model_dtype: torch.dtype = getattr(torch, model.get("dtype") or "float64")
        self.how: Training | None = read_training(model.get("training"))
        if not trust:
            check_arguments(Training, model.get("training") or {})
        if "candidates" in model:
            raise ValueError(
                "model=auto selects a model by the data: it is for kbf train, name one here"
            )
        check_observations(model, recordings or [])
        self.net: Any = build(model["net"], trust=trust, kinds=("model",))
        if not isinstance(self.net, nn.Module):
            raise ValueError(
                f"model.net must be a module with prepare and fit, got a {type(self.net).__name__}"
            )
        if model.get("model_selection"):
            if self.how is not None:
                raise ValueError(
                    "model.model_selection is for models without training, not for one that "
                    "learns by gradient"
                )
            self.net = ModelSelection(
                self.net,
                name=self.config["model"]["name"],
                seed=config["seed"],
                budget=model.get("budget"),
                require=model.get("require") or (),
                held=(config.get("data") or {}).get("held", "auto"),
            )
        data = config.get("data") or {}
        net: Any = self.net
        if data.get("allow_missing_sensors") and hasattr(net, "allow_missing_sensors"):
            net.allow_missing_sensors = True
        check_sensors(model, net, recordings or [])
        if recordings and not isinstance(net, ModelSelection):
            check_repeats(model.get("name"), data)
        self.net.to(self.model_dtype)
        d = recordings[0].states.shape[1] if recordings else 1  # a checkpoint brings its own
        self.encoding, self.code = self.build_encoding_settings(model.get("encoding"), d, trust)
        images = self.encoding is not None  # encoders take them as they are stored
        given = getattr(net, "given_equations", False)  # they are in the units of the data
        self.scaling: Scaling | None = None if given else build_scaling(data, recordings)
        scaled = self.in_units_of_the_filter(recordings or [])
        kept = scaled if images else cast_all(scaled, self.model_dtype)
        self.memory: RecordingBuffers = RecordingBuffers(kept)
        self.augment: Augment = Augment(self.encoding.augment if self.encoding else ())
        self.observation = tuple(recordings[0].obs.shape[1:]) if recordings else None
        # The filter over the recordings, once built; in a list, so that its buffers are not those
        # of the module.
        self.ready: list[Filter[Any]] = []
        # Operators of the filter with the present parameters, once requested.
        self.operators: dict[str, Tensor] | None = None
        self.prepared: bool = False
        # Record of `kbf.runtime.provenance`, which checkpoints contain.
        self.provenance: dict[str, Any] | None = None
        # Time that the encoders took when another model fitted them.
        self.borrowed_seconds: float = 0.0

    @property
    def device(self) -> torch.device:
        """Where the recordings are."""
        return next(self.memory.buffers(), torch.empty(0)).device

    @property
    def learns(self) -> bool:
        """Whether parameters are trained by gradient."""
        return self.how is not None and any(p.requires_grad for p in self.net.parameters())

    def build_encoding_settings(
        self, config: dict[str, Any] | None, d: int, trust: bool
    ) -> tuple[EncodingSettings | None, Encoding | None]:
        """Return the settings of the encoder stage, and its encoding.

        The encoding is None for a net with an encoder of its own.

        Raises:
            ValueError: no encoder is named, or its name is given without its settings.
        """
        if config is None:
            return None, None
        settings = {key: value for key, value in config.items() if key != "encoder"}
        how = read_encoding_settings(build(settings, trust=trust, kinds=("transform",)))
        if self.own_encoder is not None:
            return how._replace(members=1), None
        if config.get("encoder") is None:
            raise ValueError("data.encoding needs encoder")
        if not isinstance(name := config["encoder"], dict):
            raise ValueError(
                "data.encoding.encoder must be a class and its settings: write "
                f"encoder@data.encoding.encoder={name}"
            )
        # Independent of what the net has drawn: models of one data set start from equal encoders.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1_000_003 * (self.config["seed"] + 1) - 1)
            encoders = [
                build(config["encoder"], trust=trust, kinds=("encoder",), copies=how.members)
                for _ in range(how.members)
            ]
            code = build_encoding(
                encoders, d if how.visible is None else len(how.visible), how.gaussians
            )
            code.returns_ratio = (
                how.gaussians > 0 and how.visible is None and isinstance(self.net, RatioModel)
            )
            if code.returns_ratio:
                self.net.ratio_dim = d
            return how, code

    @property
    def own_encoder(self) -> nn.Module | None:
        """The encoder of images that is part of the net; None for none."""
        return getattr(self.net, "own_encoder", None)

    def prepare(
        self, recordings: list[Recording], generator: torch.Generator | None = None
    ) -> None:
        """Set what the net takes from the recordings before training: bandwidths, first ridges."""
        seeded = torch.Generator().manual_seed(self.config["seed"])
        if self.scaling is not None:
            self.scaling.give_zero_reading(self.net)
        with warnings.catch_warnings():  # of columns that data.normalise scales, or is not to scale
            warnings.simplefilter("ignore", ScaleWarning)
            self.net.prepare(recordings, seeded if generator is None else generator)
        self.prepared = True

    @torch.no_grad()
    def filter(self) -> Filter[Any]:
        """Return the filter over all recordings; the module is left in eval mode."""
        self.eval()
        if self.scaling is not None:
            self.scaling.give_zero_reading(self.net)
        filter = self.net.fit(self.memory.recordings())
        store_in_rows(inner_filter(filter))
        if self.code is not None:
            filter = EncodedFilter(self.code, filter, self.model_dtype).to(self.device).eval()
        return (
            filter
            if self.scaling is None
            else ScaledFilter(self.scaling, filter, self.model_dtype).to(self.device).eval()
        )

    @property
    def input_dtype(self) -> torch.dtype:
        """Dtype of observations: float64 in front of a scaling, else that of the model.

        Far from zero float32 merges values that are close to each other.
        """
        scaled = self.scaling is not None and len(self.scaling.x_mean)
        return torch.float64 if scaled else self.model_dtype

    def column_schema(self) -> ColumnSchema:
        """Return the columns of the training files; default names for data without columns.

        The default names are those of `ColumnSchema.unnamed`.
        """
        if stored := (self.config.get("data") or {}).get("column_schema"):
            return ColumnSchema.from_dict(stored)
        shape, memory = self.observation or (), self.memory.recordings()[0]
        q = shape[0] if len(shape) == 1 else 0
        return ColumnSchema.unnamed(memory.states.shape[1], q, control_width(memory))

    def in_units_of_the_filter(self, recordings: list[Recording]) -> list[Recording]:
        """Return recordings as the memory holds them: scaled, where there is a scaling."""
        return list(recordings) if self.scaling is None else [self.scaling(s) for s in recordings]

    def in_units_of_the_data(self, states: Tensor) -> Tensor:
        """Return states or estimates in the units of the data."""
        return states if self.scaling is None else self.scaling.states(states)

    def take_ratio_means(self) -> None:
        """Keep only the means of density-ratio encodings, for a net that requires vectors."""
        assert self.code is not None
        if not self.code.returns_ratio:
            d = len(self.code.z_mean)
            self.remember([s._replace(obs=s.obs[:, :d]) for s in self.memory.recordings()])

    def remember(self, recordings: list[Recording]) -> None:
        """Replace the memory by recordings in the units of the filter."""
        self.memory = RecordingBuffers(cast_all(recordings, self.model_dtype))

    @torch.no_grad()
    def taken_in(self, recordings: list[Recording]) -> list[Recording]:
        """Return recordings as the filter takes them: scaled, and images encoded."""
        scaled, code = self.in_units_of_the_filter(recordings), self.code
        if code is not None:
            images = [s.obs.flatten(0, s.states.ndim - 2) for s in scaled]
            encodings = [torch.cat([code(part) for part in each.split(256)]) for each in images]
            scaled = [
                s._replace(obs=x.unflatten(0, s.states.shape[:-1]))
                for s, x in zip(scaled, encodings, strict=True)
            ]
        images_stay = self.encoding is not None and code is None
        return scaled if images_stay else cast_all(scaled, self.model_dtype)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the operators of the filter over all recordings to the parameters."""
        if self.operators is None:
            training = self.training
            self.operators = operators_of(self.net, self.ready[0] if self.ready else self.filter())
            self.train(training)
        checkpoint["kbf"] = {
            "version": __version__,
            "operators": self.operators,
            "observation": self.observation,
            "provenance": self.provenance,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take recordings and shapes from the checkpoint, before its values are loaded."""
        self.prepared, self.operators = True, None
        self.provenance = self.provenance or checkpoint["kbf"].get("provenance")
        state = checkpoint["state_dict"]
        self.memory = RecordingBuffers.from_state(state, "memory.").to(self.device)
        self.observation = checkpoint["kbf"].get("observation") or tuple(
            self.memory.recordings()[0].obs.shape[1:]
        )
        shaped = ("net.", "code.", "scaling.")
        take_shapes(self, {name: leaf for name, leaf in state.items() if name.startswith(shaped)})
        if self.code is not None and self.code.returns_ratio:
            self.net.ratio_dim = len(self.code.z_mean)


def build_encoding(encoders: list[nn.Module], d: int, components: int = 0) -> Encoding:
    """Return an encoding by encoders with an attribute ``features``; arguments as of `Encoding`.

    Raises:
        ValueError: an encoder without ``features``.
    """
    if without := [each for each in encoders if not hasattr(each, "features")]:
        raise ValueError(
            f"the encoder {type(without[0]).__name__} needs an attribute 'features', the width "
            "of its output"
        )
    return Encoding(encoders, d, components)


def inner_filter(filter: Filter[Any]) -> Filter[Any]:
    """Return the filter behind scaling and encoders, if there are any."""
    while isinstance(filter, FilterWrapper):
        filter = filter.inner
    return filter


def store_in_rows(filter: Filter[Any]) -> None:
    """Make the tensors of a filter contiguous, as those that are read from a checkpoint are.

    The rounding of products in float32 depends on the layout of a matrix: without this, estimates
    before and after a checkpoint differ by 1e-7.
    """
    for module in filter.modules() if isinstance(filter, nn.Module) else ():
        for name, leaf in list(module.named_buffers(recurse=False)):
            if not leaf.is_contiguous():
                setattr(module, name, leaf.contiguous())


def operators_of(net: nn.Module, filter: Filter[Any]) -> dict[str, Tensor]:
    """Return the tensors of the filter behind scaling and encoders.

    Empty for a net that is its own filter.
    """
    inner = inner_filter(filter)
    return dict(inner.state_dict()) if isinstance(inner, nn.Module) and inner is not net else {}


def build_scaling(data: dict[str, Any], recordings: list[Recording] | None) -> Scaling | None:
    """Return the scaling of ``data.normalise``; None for none.

    It is that of the training part, or empty where a checkpoint contains it.

    Raises:
        ValueError: neither standard nor none.
    """
    how = data.get("normalise") or "none"
    if how not in ("standard", "none"):
        raise ValueError(f"data.normalise must be standard or none, got {how!r}")
    if how == "none":
        return None
    if not recordings:
        return Scaling()
    if data.get("column_schema") is None:
        return Scaling().prepare(recordings)
    columns = ColumnSchema.from_dict(data["column_schema"])
    observations = columns.scalable("observations") or None
    return Scaling().prepare(recordings, columns.scalable("states"), observations)


def compared_by(module: "FittedModel") -> list[tuple[str, float | None, float | None, float, str]]:
    """Return (model, NMSE, its standard error, seconds, note) of each candidate of the selection.

    Checkpoints that keep the NMSE alone have NaN for the seconds.
    """
    if stored := module.config["model"].get("compared"):
        return [(name, nmse, error, secs, note) for name, nmse, error, secs, note in stored]
    if not isinstance(module.net, ModelSelection):
        return []
    pairs = zip(module.net.models, module.net.scores.tolist(), strict=False)
    return [(name, nmse, None, float("nan"), "") for name, nmse in pairs if nmse >= 0]


def cast_all(recordings: list[Recording], dtype: torch.dtype) -> list[Recording]:
    """Return the recordings in another dtype."""
    return [
        s._replace(
            states=s.states.to(dtype),
            obs=as_float(s.obs, dtype),
            controls=None if s.controls is None else s.controls.to(dtype),
        )
        for s in recordings
    ]


def take_shapes(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Resize buffers and parameters to their shapes in ``state``, which may depend on the data."""
    modules = dict(module.named_modules())
    for name, value in state.items():
        owner, _, leaf = name.rpartition(".")
        held = getattr(modules.get(owner), leaf, None)
        if isinstance(held, Tensor) and held.shape != value.shape:
            held.data = torch.empty(value.shape, dtype=held.dtype, device=held.device)
