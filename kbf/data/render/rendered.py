"""What a renderer returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Rendered(NamedTuple):
    """Views of one turn.

    Attributes:
        images: ``N H W 3`` uint8.
        yaw_degrees: ``N`` float32, where the views look: as asked for, or as the engine tells it
            where it rounds.
        about: ``renderer`` in words, ``level`` and ``seed``.
    """

    images: Tensor
    yaw_degrees: Tensor
    about: dict[str, str | int]
