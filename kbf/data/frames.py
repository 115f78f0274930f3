"""Frames files: the views of one full turn at one place, as an npz.

==============  ====================  =====================================================================================
``images``      uint8 [N, H, W, 3]    the views
``yaw_degrees`` float32 [N]           where each of them looks: any order, any multiple of 360 added
``position``    float [N, 3]          optional: where the camera stood, the same for all
``about``       str                   optional: JSON of what made them (``renderer``, ``level``, ``seed``, ``size``)
==============  ====================  =====================================================================================
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from kbf.runtime.atomic_files import replacing

LARGEST_GAP = 5.0
"""Degrees between neighbouring views that still count as a full turn."""
LARGEST_MOVE = 0.01
"""Distance that a camera may be away from its first position and still stand still."""
REMEDY = "make the file with 'kbf data render', or see data/README.md for what it must hold"


class Frames(NamedTuple):
    """The views of one turn.

    Attributes:
        images: ``N H W 3`` uint8.
        yaw_degrees: ``N`` float32, growing to the left (counter-clockwise).
        about: what made them, where that is known.
        position: ``N 3`` float64, or None where it was not recorded.
    """

    images: Tensor
    yaw_degrees: Tensor
    about: dict[str, Any]
    position: Tensor | None = None


class Turn(NamedTuple):
    """What `check_frames` found: the number of views, and the largest gap between neighbours, from ``start`` on, in degrees."""

    views: int
    gap: float
    start: float


def read_frames(path: str | os.PathLike[str]) -> Frames:
    """Read a frames file; nothing in it is executed.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or its arrays are missing or of another type or shape.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no frames file {path}; {REMEDY}")
    try:
        with np.load(path, allow_pickle=False) as stored:
            names = set(stored.files)
            arrays = {
                name: stored[name]
                for name in ("images", "yaw_degrees", "position", "about")
                if name in names
            }
    except (
        Exception
    ) as error:  # zip, zlib, pickle, header: what a damaged file raises has no common class
        what = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is no frames file, or damaged ({what}); {REMEDY}") from error
    wrong = faults(arrays)
    if wrong:
        raise ValueError(f"{path}: {wrong}; {REMEDY}")
    position = (
        torch.from_numpy(arrays["position"].astype(np.float64)) if "position" in arrays else None
    )
    yaw = torch.from_numpy(arrays["yaw_degrees"].astype(np.float32))
    return Frames(torch.from_numpy(arrays["images"]), yaw, told_by(arrays) or {}, position)


def faults(arrays: dict[str, Any]) -> str | None:
    """The first thing wrong with the arrays of a frames file, or None."""
    missing = [name for name in ("images", "yaw_degrees") if name not in arrays]
    if missing:
        return f"the array {missing[0]!r} is missing"
    images, yaw = arrays["images"], arrays["yaw_degrees"]
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3 or not images.size:
        return f"images must be uint8 [N, H, W, 3], they are {images.dtype} {list(images.shape)}"
    if yaw.dtype.kind != "f" or yaw.ndim != 1:
        return f"yaw_degrees must be float32 [N], it is {yaw.dtype} {list(yaw.shape)}"
    if len(yaw) != len(images):
        return f"there are {len(images)} images and {len(yaw)} yaws"
    if not np.isfinite(yaw).all():
        return f"{int((~np.isfinite(yaw)).sum())} of {len(yaw)} yaws are NaN or infinite"
    position = arrays.get("position")
    if position is not None and (
        position.dtype.kind != "f"
        or position.shape != (len(images), 3)
        or not np.isfinite(position).all()
    ):
        return f"position must be float [N, 3] and finite, it is {position.dtype} {list(position.shape)}"
    if told_by(arrays) is None:
        return "about must be a JSON object as a string"
    return None


def told_by(arrays: dict[str, Any]) -> dict[str, Any] | None:
    """The metadata of a frames file: empty where there is none, None where it cannot be read."""
    if "about" not in arrays:
        return {}
    try:
        about = json.loads(str(arrays["about"])) if arrays["about"].dtype.kind == "U" else None
    except ValueError:
        return None
    return about if isinstance(about, dict) else None


def check_frames(frames: Frames) -> Turn:
    """Whether the frames are the views of one full turn at one place.

    Raises:
        ValueError: more than `LARGEST_GAP` degrees without a view, two different views at one yaw,
            nothing to be seen, or a camera that moved.
    """
    images, n = frames.images, len(frames.images)
    yaw = frames.yaw_degrees.double() % 360
    order = yaw.argsort(stable=True)
    sorted_yaw = yaw[order]
    gaps = torch.cat([sorted_yaw[1:], sorted_yaw[:1] + 360]) - sorted_yaw
    gap, widest = float(gaps.max()), int(gaps.argmax())
    start = float(sorted_yaw[widest])
    if gap > LARGEST_GAP:
        end = (start + gap) % 360
        raise ValueError(
            f"the {n} views are no full turn: there is none between yaw {start:.1f} and {end:.1f} degrees, a gap of {gap:.1f} "
            f"(at most {LARGEST_GAP:g} are allowed)"
        )
    again = (gaps[:-1] == 0).nonzero().flatten()
    differ = (images[order[again]] != images[order[again + 1]]).flatten(1).any(1)
    if differ.any():
        first = float(sorted_yaw[again[differ][0]])
        raise ValueError(
            f"{int(differ.sum())} views have the yaw of another one but differ from it (first: at {first:.2f} degrees): "
            "yaw and image do not belong together, or something moves in the scene; keep one view for each yaw"
        )
    if all(torch.equal(image, images[0]) for image in images):
        raise ValueError(
            f"all {n} images are the same: the camera did not turn, or nothing was drawn"
        )
    if all(torch.equal(image, image[:1, :1].expand_as(image)) for image in images):
        raise ValueError(f"each of the {n} images has one colour all over: nothing was drawn")
    if frames.position is not None:
        moved = float((frames.position - frames.position[0]).norm(dim=1).max())
        if moved > LARGEST_MOVE:
            raise ValueError(
                f"the camera moved by {moved:.3g} while it turned: the views must be of one place"
            )
    return Turn(n, gap, start)


def write_frames(path: str | os.PathLike[str], frames: Frames) -> None:
    """Write a frames file in one step, compressed."""
    arrays: dict[str, Any] = {
        "images": frames.images.numpy(),
        "yaw_degrees": frames.yaw_degrees.float().numpy(),
        "about": np.array(json.dumps(frames.about)),
    }
    if frames.position is not None:
        arrays["position"] = frames.position.numpy()
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def nearest(yaw_degrees: Float[Tensor, "N"], angles: Float[Tensor, "n"]) -> Int[Tensor, "n"]:
    """Index of the view that looks closest to each of the ``angles`` (radians), around the circle.

    >>> nearest(torch.tensor([-179.0, 0.0, 90.0]), torch.tensor([0.1, 3.1, -3.1, 1.5]))
    tensor([1, 0, 0, 2])
    """
    difference = angles.double().rad2deg()[:, None] - yaw_degrees.double()
    return ((difference + 180) % 360 - 180).abs().argmin(1)


def as_observations(
    images: UInt8[Tensor, "n H W 3"], size: tuple[int, int]
) -> Float[Tensor, "n 3 h w"]:
    """Images in [0, 1], channels first, float32, of the size (h, w): means over areas where it divides theirs, else antialiased."""
    height, width = images.shape[1:3]
    x = images.permute(0, 3, 1, 2).float() / 255
    if (height, width) == tuple(size):
        return x.contiguous()
    if height % size[0] == 0 and width % size[1] == 0:
        return avg_pool2d(x, (height // size[0], width // size[1]))
    return interpolate(
        x, size=tuple(size), mode="bilinear", antialias=True, align_corners=False
    ).clamp(0, 1)
