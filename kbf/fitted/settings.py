"""Training settings, read from a configuration: `EncodingSettings` and `Training` of filters."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

LOSSES = ("linear", "ridge", "split", "ratio")

Settings = TypeVar("Settings", bound=tuple)

OPTIMISERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


class Training(NamedTuple):
    """Settings of training by gradient: the ``training`` part of a model's configuration.

    Attributes:
        epochs: at most. lr: learning rate. weight_decay: of the optimiser. clip: largest norm of a
            gradient, None for any.
        optimiser: adam, adamw or sgd. schedule: of the learning rate: constant, or cosine (half a
            cosine, down to zero).
        batch_size: windows in a batch, None for all of a fold. An epoch is one pass over all
            windows.
        window: steps in a window. stride: steps between the starts of two windows.
        burn_in: first steps of a window that are left out of the loss: the estimates are still
            those of the prior.
        folds: contiguous chunks of the part to fit; a window is filtered by the memory without its
            chunk. With 1 there is no memory left, for models that use none.
        validation: share of the training part, its last steps or recordings, that is held out.
            monitor: the metric that selects the best epoch: mse, the error of the estimates, or
            loss, what the net itself is trained on (a likelihood, for one). patience: epochs
            without a new best one after which to stop, None for never.
        lr_encoder: learning rate of an encoder inside the net; None for that of all else.
    """

    epochs: int
    lr: float
    weight_decay: float = 0.0
    clip: float | None = None
    optimiser: str = "adam"
    schedule: str = "constant"
    batch_size: int | None = None
    window: int = 20
    stride: int = 1
    burn_in: int = 0
    folds: int = 5
    validation: float = 0.2
    monitor: str = "mse"
    patience: int | None = None
    lr_encoder: float | None = None


def read_training(config: dict[str, Any] | None) -> Training | None:
    """Check the ``training`` part of a model's configuration; None without training by gradient.

    Raises:
        ValueError: unknown, missing or impossible settings.
    """
    if config is None:
        return None
    return read_settings(
        Training,
        config,
        "model.training",
        options={
            "optimiser": tuple(OPTIMISERS),
            "schedule": ("constant", "cosine"),
            "monitor": ("mse", "loss"),
        },
        whole={
            "epochs": 1,
            "batch_size": 1,
            "window": 1,
            "stride": 1,
            "burn_in": 0,
            "folds": 1,
            "patience": 1,
        },
        numbers={
            "lr": "> 0",
            "weight_decay": ">= 0",
            "clip": "> 0",
            "validation": ">= 0",
            "lr_encoder": "> 0",
        },
        nullable=("batch_size", "patience", "clip", "lr_encoder"),
    )


class EncodingSettings(NamedTuple):
    """Settings of the encoder stage: ``model.encoding`` of a configuration, without the encoder.

    Attributes:
        epochs: passes over the images. lr: learning rate, its peak with schedule onecycle.
            weight_decay: of the optimiser.
        optimiser: adam, adamw or sgd. schedule: constant or onecycle. clip: largest norm of a
            gradient, None for any.
        batch_size: images in a batch (up to rounding: batches are of equal size), None for all of
            them.
        members: encoders; with 1 there is no held-out chunk, and encodings of the recordings are
            more accurate than those of new images.
        loss: linear (a linear head learns along), ridge (`kbf.images.losses.ridge_loss`, the
            paper's) or split
        (`split_ridge_loss`); or ratio: -log r of a density ratio and the error of its mean
        (`kbf.densities.ratio`), for images whose quality varies.
        weighting: uniform, or kulsif: the errors of the ridge loss are weighted by the density
            ratio of a belief around a random state of each batch, as a filter's rule weights them.
        components: of a ratio, its Gaussians. reg: lambda of ridge and split.
        targets: states, or fourier: random Fourier features of them.
        fourier: how many of these, with the median bandwidth.
        augment: random transforms of the images (`kbf.images.augment.Augment`).
        visible: numbers of the components of the state that an image shows, None for all: encodings
            have these alone.
        pixel_ridge: with loss linear, compare the encoders with a kernel ridge regression on pixels
            (`kbf.training.pixel_choice`).
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
    components: int = 2
    weighting: str = "uniform"
    pixel_ridge: bool = True

    @property
    def gaussians(self) -> int:
        """Return `components` where the encoding is a density ratio, else 0."""
        return self.components if self.loss == "ratio" else 0

    def visible_part(self, states: Tensor) -> Tensor:
        """Return the components ``n k`` of states ``n d`` that an image shows.

        Raises:
            ValueError: a component that the states do not have.
        """
        if self.visible is None:
            return states
        if max(self.visible) >= states.shape[1]:
            raise ValueError(
                f"data.encoding.visible names component {max(self.visible)}, the states have 0 to "
                f"{states.shape[1] - 1}"
            )
        return states[:, list(self.visible)]


def read_settings(
    kind: type[Settings],
    config: dict[str, Any],
    name: str,
    *,
    options: Mapping[str, Sequence[str]],
    whole: Mapping[str, int],
    numbers: Mapping[str, str],
    nullable: Sequence[str],
    others: Sequence[str] = (),
) -> Settings:
    """Return a part of a configuration as a tuple of settings; ``epochs`` and ``lr`` are required.

    Args:
        kind: a NamedTuple.
        config: its fields.
        name: of the part, on the command line.
        options: the words that a field may be.
        whole: settings that are whole numbers, with their lower bounds.
        numbers: other numbers, each with "> 0" or ">= 0".
        nullable: the numbers that may be None.
        others: settings next to these.

    Raises:
        ValueError: unknown or missing settings, a word that is no option, or a setting that is no
            number or too small.
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
    for key in (*whole, *numbers):
        value = getattr(settings, key)
        if key in whole:
            good = type(value) is int and value >= whole[key]
            wanted = f"a whole number, at least {whole[key]}"
        else:
            positive = numbers[key] == "> 0"
            good = type(value) in (int, float) and (
                0 < value < math.inf or (value == 0 and not positive)
            )
            wanted = f"a number {numbers[key]}"
        if not good and not (value is None and key in nullable):
            raise ValueError(f"{name}.{key} must be {wanted}; got {value!r}")
    return settings


def read_encoding_settings(config: dict[str, Any]) -> EncodingSettings:
    """Check the ``encoding`` part of a configuration.

    Raises:
        ValueError: unknown, missing or impossible settings.
    """
    encoding = read_settings(
        EncodingSettings,
        config,
        "data.encoding",
        options={
            "loss": LOSSES,
            "targets": ("states", "fourier"),
            "weighting": ("uniform", "kulsif"),
            "optimiser": tuple(OPTIMISERS),
            "schedule": ("constant", "onecycle"),
        },
        whole=dict.fromkeys(("epochs", "members", "fourier", "batch_size", "components"), 1),
        numbers={"lr": "> 0", "reg": "> 0", "clip": "> 0", "weight_decay": ">= 0"},
        nullable=("batch_size", "clip"),
        others=("encoder",),
    )
    encoding = encoding._replace(augment=tuple(encoding.augment or ()))
    if not isinstance(encoding.pixel_ridge, bool):
        raise ValueError(
            f"data.encoding.pixel_ridge must be true or false, got {encoding.pixel_ridge!r}"
        )
    if encoding.weighting != "uniform" and encoding.loss != "ridge":
        raise ValueError(
            f"data.encoding.weighting={encoding.weighting} is for data.encoding.loss=ridge; "
            f"got loss={encoding.loss}"
        )
    shown = encoding.visible
    if shown is not None and (
        not isinstance(shown, tuple)
        or not shown
        or not all(type(k) is int and k >= 0 for k in shown)
        or len({*shown}) < len(shown)
    ):
        raise ValueError(
            "data.encoding.visible must be null or different numbers of components, as [0, 1]; "
            f"got {shown!r}"
        )
    if encoding.targets == "fourier" and encoding.loss in ("linear", "ratio"):
        raise ValueError(
            f"data.encoding.loss={encoding.loss} learns states: use ridge or split with "
            "targets=fourier"
        )
    if encoding.targets == "fourier" and encoding.fourier % 2:
        raise ValueError(
            "data.encoding.fourier must be even (a cosine and a sine of each frequency); got "
            f"{encoding.fourier}"
        )
    return encoding
