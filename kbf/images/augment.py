"""Images that are changed at random before an encoder learns from them.

Transforms must not change the state: moved or turned images show another position or heading.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from kbf.recording import as_float


class Augment(nn.Module):
    """Random transforms of the images in training mode, followed by the encoder, if there is one.

    Each image gets draws of its own: the random transforms of torchvision draw once for all that
    they are given, and are given one image at a time. A transform with an attribute ``whole =
    True``, as those of this file, is given the batch. All draws come from PyTorch's global
    generator, which the training loop seeds in each step.

    In a configuration::

        _target_: kbf.Augment
        transforms:
          - {_target_: kbf.PixelNoise, std: 0.1}
          - {_target_: torchvision.transforms.v2.GaussianBlur, kernel_size: 3}
        encoder: {_target_: kbf.CNN, q: "${data.q}"}
    """

    def __init__(self, transforms: Sequence[Any] | None, encoder: nn.Module | None = None) -> None:
        """``transforms`` of images ``c h w`` in [0, 1] are applied in order, then ``encoder``."""
        super().__init__()
        self.transforms: tuple[Any, ...] = tuple(transforms or ())
        self.encoder: nn.Module | None = encoder
        if wrong := [t for t in self.transforms if not callable(t)]:
            raise ValueError(
                f"augmentation needs transforms, each with its _target_; got {wrong[0]!r}"
            )
        if encoder is not None:
            self.features: int = encoder.features  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Shaped[Tensor, "m *x"]) -> Shaped[Tensor, "m ..."]:
        """Features ``m p``, or the images ``m *x`` where there is no encoder."""
        if self.training:
            first = next(self.parameters(), None)
            x = as_float(
                x,
                x.dtype
                if x.is_floating_point()
                else torch.float32
                if first is None
                else first.dtype,
            )
            for transform in self.transforms if len(x) else ():
                x = (
                    transform(x)
                    if getattr(transform, "whole", False)
                    else torch.stack([transform(image) for image in x])
                )
        return x if self.encoder is None else self.encoder(x)


class PixelNoise(nn.Module):
    """Adds Gaussian noise of standard deviation ``std`` to each number."""

    whole = True

    def __init__(self, std: float) -> None:
        super().__init__()
        self.std = std

    def forward(self, x: Float[Tensor, "*x"]) -> Float[Tensor, "*x"]:
        """Noisy images; they may leave [0, 1]."""
        return x + self.std * torch.randn_like(x)
