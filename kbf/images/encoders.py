"""Encoders: images ``m c h w`` -> features ``m p``.

An encoder is any ``nn.Module`` with an attribute ``features``, its p; `Encoder` adds checks to it.
Images are uint8, which every encoder divides by 255 batch by batch, or floating-point numbers
around [0, 1], which it takes as they are.

A class from elsewhere is named by its path like one of these: ``encoder: {_target_:
my_package.MyNet, ...}``. ``kbf train`` builds what your configuration names. A checkpoint is data
from an untrusted file: one that names a class outside of kbf needs ``trust=true``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm

from kbf.recording import as_float

NORMS = ("group", "batch", "none")


class Encoder(nn.Module):
    """Base class of encoders: checks and converts images.

    A subclass sets ``net``, from images ``m c h w`` to features ``m p``, or overrides ``encode``.

    Attributes:
        shape: of one image. features: p.
    """

    net: nn.Module

    def __init__(self, q: Sequence[int], features: int) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = tuple(q)
        self.features: int = features

    def forward(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """Features of images, in the dtype of the parameters.

        Raises:
            ValueError: images of another shape than the encoder was built for.
        """
        if tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"images of {by(x.shape[1:])}, the encoder was built for {by(self.shape)}"
            )
        return self.encode(as_float(x, next(self.parameters()).dtype))

    def encode(self, x: Float[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """Features of images that are floating-point numbers already."""
        return self.net(x)


class CNN(Encoder):
    """Convolutions with stride 2, normalisation and ReLU, followed by dropout and linear layers."""

    def __init__(
        self,
        q: Sequence[int],
        features: int = 32,
        channels: Sequence[int] = (16, 32, 64),
        kernel: int = 3,
        dropout: float = 0.0,
        norm: str = "group",
        hidden: Sequence[int] = (),
    ) -> None:
        """An untrained net.

        Args:
            q: shape of an image, ``c h w``.
            features: p.
            channels: of the blocks; each halves the height and the width.
            kernel: odd, pixels along a side of the filters.
            dropout: share of the numbers before the linear layers that are set to 0 in training.
            norm: group (each image by itself), batch (training needs several images at once), or
                none.
            hidden: widths of linear layers before the features.

        Raises:
            ValueError: ``q`` that is no image, an even kernel, or an unknown norm.
        """
        super().__init__(q, features)
        c, h, w = image_shape(q)
        blocks: list[nn.Module] = []
        for a, b in zip([c, *channels[:-1]], channels, strict=True):
            blocks += block(a, b, kernel, 2, norm)
            h, w = -(-h // 2), -(-w // 2)
        layers = [
            layer
            for a, b in pairwise([channels[-1] * h * w, *hidden, features])
            for layer in (nn.Linear(a, b), nn.ReLU())
        ][:-1]
        self.net: nn.Module = nn.Sequential(*blocks, nn.Flatten(), nn.Dropout(dropout), *layers)


class SoftArgmaxCNN(Encoder):
    """Positions of objects: the expected position of the softmax of each of the last channels.

    The temperature of the softmax is learned. Positions are (x, y), -1 and 1 at the first and last
    column or row.

    References: Levine, Finn, Darrell and Abbeel (2016), section 5.1; Finn et al. (2016), section
    IV.A.
    """

    def __init__(
        self,
        q: Sequence[int],
        features: int | None = None,
        channels: Sequence[int] = (16, 32),
        keypoints: int = 16,
        kernel: int = 5,
        stride: int = 2,
        hidden: Sequence[int] = (),
        temperature: float = 0.3,
        norm: str = "none",
    ) -> None:
        """An untrained net.

        Args:
            q: shape of an image, ``c h w``.
            features: p; None gives the 2 ``keypoints`` positions themselves.
            channels: of the convolutions before the positions.
            keypoints: channels that become positions.
            kernel: odd, pixels along a side of the filters.
            stride: of the first convolution; the others keep the resolution.
            hidden: widths of layers with ReLU between the positions and the features.
            temperature: to start from.
            norm: as in `CNN`; without any it learns fastest, since normalisation raises the noise
                of empty pixels.

        Raises:
            ValueError: ``q`` that is no image, an even kernel, an unknown norm, or ``hidden``
                without ``features``.
        """
        super().__init__(q, features or 2 * keypoints)
        if hidden and features is None:
            raise ValueError("hidden layers need features, the width that follows them")
        widths = [image_shape(q)[0], *channels]
        blocks: list[nn.Module] = []
        for k, (a, b) in enumerate(pairwise(widths)):
            blocks += block(a, b, kernel, 1 if k else stride, norm)
        self.net: nn.Module = nn.Sequential(*blocks, nn.Conv2d(widths[-1], keypoints, 1))
        self.log_temperature: nn.Parameter = nn.Parameter(torch.tensor(math.log(temperature)))
        widths = [2 * keypoints, *hidden, *([features] if features else [])]
        self.head: nn.Sequential = nn.Sequential(
            *[layer for a, b in pairwise(widths) for layer in (nn.ReLU(), nn.Linear(a, b))][1:]
        )

    def encode(self, x: Float[Tensor, "m c h w"]) -> Float[Tensor, "m p"]:
        """Features of images that are floating-point numbers already."""
        return self.head(soft_argmax(self.net(x) / self.log_temperature.exp()))


def soft_argmax(logits: Float[Tensor, "m k h w"]) -> Float[Tensor, "m two_k"]:
    """Expected (x, y) in [-1, 1] of each channel's softmax over the pixels: x_1, y_1, x_2, ...

    >>> soft_argmax(torch.tensor([[[[0.0, 0.0, 99.0]] * 2]]))
    tensor([[1., 0.]])
    """
    share = logits.flatten(2).softmax(-1).unflatten(2, logits.shape[2:])
    columns, rows = (
        torch.linspace(-1, 1, n, dtype=logits.dtype, device=logits.device)
        for n in (share.shape[3], share.shape[2])
    )
    return torch.stack([share.sum(2) @ columns, share.sum(3) @ rows], -1).flatten(1)


class PaperMLP(Encoder):
    """The published network: linear layers with spectral norm and ReLU; batch norm after two.

    In training batch norm needs several images at once.

    References: the code published with Xu, Chen, Doucet and Gretton (2022), networks for dSprites
    and (with dropout 0.5) DeepMind Lab; the paper itself does not describe them.
    """

    def __init__(
        self, q: Sequence[int], sizes: Sequence[int] = (1024, 512, 128, 32), dropout: float = 0.0
    ) -> None:
        """A net of widths ``sizes``, the last is p; ``dropout`` before each ReLU but the last."""
        super().__init__(q, sizes[-1])
        layers: list[nn.Module] = [nn.Flatten()]
        for k, (a, b) in enumerate(zip([math.prod(q), *sizes[:-1]], sizes, strict=True)):
            last = k == len(sizes) - 1
            layers += [
                spectral_norm(nn.Linear(a, b)),
                nn.Dropout(0.0 if last else dropout),
                nn.ReLU(),
            ]
            layers += [nn.BatchNorm1d(b)] if k == 1 else []
        self.net: nn.Module = nn.Sequential(*layers)


class Backbone(Encoder):
    """A classifier of torchvision; its last layer is replaced by a linear layer to the features.

    Images are normalised with ImageNet's mean and standard deviation, a single channel is repeated,
    and small images are enlarged. Nothing is ever downloaded: to start from trained weights, fetch
    their file yourself and give its path. A checkpoint of kbf holds all weights, and can be loaded
    where that file is missing.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        q: Sequence[int],
        name: str = "resnet18",
        features: int = 32,
        weights: str | os.PathLike[str] | None = None,
        freeze: bool = False,
        size: int = 64,
    ) -> None:
        """An untrained net, or one that starts from a file.

        Args:
            q: shape of an image, ``c h w``; 1 or 3 channels.
            name: resnet18, mobilenet_v3_small, efficientnet_b0, convnext_tiny, ... as torchvision
                calls it.
            features: p.
            weights: file of a state dict of this classifier, as torchvision publishes them (its
                last layer is left out), or None.
            freeze: train the new last layer only.
            size: images with a shorter side than this are enlarged. Vision transformers get 224 x
                224 whatever it is.

        Raises:
            ValueError: a net that is not known or whose last layer is not linear, ``q`` that is no
                image of 1 or 3 channels, or a file that is damaged or belongs to another net. A
                file that is missing is an error of the first use.
        """
        super().__init__(q, features)
        c, h, w = image_shape(q)
        if c not in (1, 3):
            raise ValueError(f"a backbone takes images of 1 or 3 channels, not of {c}")
        from torchvision import models  # slow to import

        known = models.list_models(module=models)
        if name not in known:
            some = (
                "resnet18, mobilenet_v3_small, efficientnet_b0, convnext_tiny, "
                "regnet_y_400mf, densenet121, vgg11_bn, vit_b_16"
            )
            raise ValueError(
                f"torchvision has no classifier {name!r}; it has {some} and {len(known) - 8} others"
            )
        if name.startswith(("googlenet", "inception", "squeezenet")):
            raise ValueError(
                f"{name} has no single linear layer at its end that could be replaced: "
                "take resnet18, for example"
            )
        scale = max(1.0, size / min(h, w))
        self.size: tuple[int, int] = (
            (224, 224)
            if name.startswith(("vit", "maxvit"))
            else (round(h * scale), round(w * scale))
        )
        self.net: nn.Module = models.get_model(
            name, weights=None, **({"input_size": (224, 224)} if name == "maxvit_t" else {})
        )
        self.last, linear = [
            (name, layer)
            for name, layer in self.net.named_modules()
            if isinstance(layer, nn.Linear)
        ][-1]
        parent, _, leaf = self.last.rpartition(".")
        head = nn.Linear(linear.in_features, features)
        setattr(self.net.get_submodule(parent), leaf, head)
        self.missing: str | None = (
            None if weights is None or Path(weights).is_file() else str(weights)
        )
        self.register_load_state_dict_post_hook(forget_missing)
        if weights is not None and self.missing is None:
            self.load(weights)
        self.freeze = freeze
        if freeze:
            self.net.requires_grad_(False)
            head.requires_grad_(True)
            self.train()
        self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406])[:, None, None])
        self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225])[:, None, None])

    def load(self, path: str | os.PathLike[str]) -> None:
        """Loads all but the last layer from the file of a state dict, without executing code of it.

        Raises:
            ValueError: a file that is damaged or belongs to another net.
        """
        own = self.net.get_submodule(self.last).state_dict(prefix=f"{self.last}.")
        try:
            kept = {
                key: leaf
                for key, leaf in torch.load(path, map_location="cpu", weights_only=True).items()
                if key.rpartition(".")[0] != self.last
            }
            missing, unexpected = self.net.load_state_dict(kept | own, strict=False)
        except (
            Exception
        ) as error:  # what comes out of a file that is no state dict is beyond listing
            reason = " ".join(str(error).split())[:300]
            raise ValueError(
                f"the weights {path} cannot be loaded: {type(error).__name__}: {reason}"
            ) from error
        if differences := [
            f"{what} {some(keys)}"
            for what, keys in (("lacks", missing), ("has unknown", unexpected))
            if keys
        ]:
            raise ValueError(
                f"the weights {path} belong to another net: the file {' and '.join(differences)}"
            )

    def train(self, mode: bool = True) -> Backbone:
        """Overrides `nn.Module.train`: frozen layers stay in eval mode (batch norm, dropout)."""
        super().train(mode)
        if mode and self.freeze:
            self.net.eval()
            self.net.get_submodule(self.last).train()
        return self

    def encode(self, x: Float[Tensor, "m c h w"]) -> Float[Tensor, "m p"]:
        """Features of images that are floating-point numbers already.

        Raises:
            ValueError: the file of the weights was missing, and no checkpoint has brought them
                since.
        """
        if self.missing is not None:
            raise ValueError(f"there is no file {self.missing} with weights; nothing is downloaded")
        if tuple(x.shape[2:]) != self.size:
            x = functional.interpolate(x, self.size, mode="bilinear", align_corners=False)
        return self.net((x - self.mean) / self.std)  # a single channel becomes three here


def forget_missing(module: Any, keys: Any) -> None:
    """A state dict was loaded: the file of a `Backbone` that was missing is no longer needed."""
    module.missing = None


def block(a: int, b: int, kernel: int, stride: int, norm: str) -> list[nn.Module]:
    """Convolution from a to b channels, normalisation, ReLU; the side becomes ceil(side / stride).

    Raises:
        ValueError: an even kernel or an unknown norm.
    """
    if kernel % 2 == 0:
        raise ValueError(f"kernel must be odd; got {kernel}")
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}; got {norm!r}")
    convolution = nn.Conv2d(a, b, kernel, stride, kernel // 2, bias=norm == "none")
    if norm == "none":
        return [convolution, nn.ReLU()]
    return [
        convolution,
        nn.GroupNorm(math.gcd(b, 4) if b >= 8 else 1, b) if norm == "group" else nn.BatchNorm2d(b),
        nn.ReLU(),
    ]


def image_shape(q: Sequence[int]) -> tuple[int, int, int]:
    """``c h w`` of an image.

    Raises:
        ValueError: ``q`` has not three entries.
    """
    if len(q) != 3:
        raise ValueError(
            f"this encoder takes images (channels, height, width); the observations are of {by(q)}"
        )
    c, h, w = q
    return c, h, w


def by(shape: Iterable[int]) -> str:
    """A shape in words: ``3 x 36 x 48``."""
    return " x ".join(map(str, shape)) or "single numbers"


def some(keys: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    return ", ".join(keys[:3]) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")
