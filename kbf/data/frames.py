"""Frames files: the views of one full turn at one place, as an npz.

==============  ====================  ============================================================
``images``      uint8 [N, H, W, 3]    the views
``yaw_degrees`` float32 [N]           their directions: in any order, plus any multiple of 360
``position``    float [N, 3]          optional: the camera's position, the same for all views
``about``       str                   optional: JSON of their origin (``renderer``, ``level``,
                                      ``seed``, ``size``)
==============  ====================  ============================================================
"""

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate

from kbf.data.cache import write_arrays

# Largest angle between neighbouring views of a full turn.
MAX_GAP_DEGREES = 5.0

# Largest distance of a camera from its first position if it counts as fixed.
MAX_CAMERA_SHIFT = 0.01

REMEDY = "make the file with 'kbf data render', or see data/README.md for its format"


class Frames(NamedTuple):
    """The views of one turn.

    Attributes:
        images: ``N H W 3`` uint8.
        yaw_degrees: ``N`` float32, counter-clockwise; as read back from an engine that rounds.
        about: their origin as far as it is known: ``renderer`` (a description), ``level``, ``seed``
            and ``size``.
        position: ``N 3`` float64, or None if it was not recorded.
    """

    images: Tensor
    yaw_degrees: Tensor
    about: dict[str, Any]
    position: Tensor | None = None


class Turn(NamedTuple):
    """Result of `check_frames`: number of views, widest gap between neighbours and where it starts.

    Both are in degrees.
    """

    views: int
    gap: float
    start: float


def read_frames(path: str | os.PathLike[str]) -> Frames:
    """Reads a frames file without unpickling anything.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, or its arrays are missing or of another type or shape.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"there is no frames file {path}; {REMEDY}")
    names = ("images", "yaw_degrees", "position", "about")
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in names if name in stored.files}
    except Exception as error:  # zip, zlib, pickle and npy errors share no base class
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(f"{path} is no frames file, or damaged ({reason}); {REMEDY}") from error
    if wrong := fault(arrays):
        raise ValueError(f"{path}: {wrong}; {REMEDY}")
    position = arrays.get("position")
    return Frames(
        torch.from_numpy(arrays["images"]),
        torch.from_numpy(arrays["yaw_degrees"].astype(np.float32)),
        metadata_of(arrays) or {},
        None if position is None else torch.from_numpy(position.astype(np.float64)),
    )


def fault(arrays: dict[str, Any]) -> str | None:
    """Returns a description of the first invalid array of a frames file, or None."""
    if missing := [name for name in ("images", "yaw_degrees") if name not in arrays]:
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
    place = arrays.get("position", np.zeros((len(images), 3)))
    if place.dtype.kind != "f" or place.shape != (len(images), 3) or not np.isfinite(place).all():
        return f"position must be float [N, 3] and finite, it is {place.dtype} {list(place.shape)}"
    return "about must be a JSON object as a string" if metadata_of(arrays) is None else None


def metadata_of(arrays: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the metadata of a frames file: {} if there are none, None if they are invalid."""
    stored = arrays.get("about", np.array("{}"))
    try:
        about = json.loads(str(stored)) if stored.dtype.kind == "U" else None
    except ValueError:
        return None
    return about if isinstance(about, dict) else None


def check_frames(frames: Frames) -> Turn:
    """Checks that the frames are the views of one full turn at one place.

    Raises:
        ValueError: more than `MAX_GAP_DEGREES` without a view, two different views of one yaw,
            images without content, or a camera that moved.
    """
    images, n = frames.images, len(frames.images)
    yaw = frames.yaw_degrees.double() % 360
    order = yaw.argsort(stable=True)
    sorted_yaw = yaw[order]
    gaps = torch.cat([sorted_yaw[1:], sorted_yaw[:1] + 360]) - sorted_yaw
    gap, widest = float(gaps.max()), int(gaps.argmax())
    start = float(sorted_yaw[widest])
    if gap > MAX_GAP_DEGREES:
        raise ValueError(
            f"the {n} views are no full turn: there is none between yaw {start:.1f} and "
            f"{(start + gap) % 360:.1f} degrees, a gap of {gap:.1f} "
            f"(at most {MAX_GAP_DEGREES:g} are allowed)"
        )
    again = (gaps[:-1] == 0).nonzero().flatten()
    differ = (images[order[again]] != images[order[again + 1]]).flatten(1).any(1)
    if differ.any():
        first = float(sorted_yaw[again[differ][0]])
        raise ValueError(
            f"{int(differ.sum())} views have the yaw of another one but differ from it "
            f"(first: at {first:.2f} degrees): yaw and image do not belong together, "
            "or something moves in the scene; keep one view for each yaw"
        )
    if all(torch.equal(image, images[0]) for image in images):
        raise ValueError(
            f"all {n} images are the same: the camera did not turn, or nothing was drawn"
        )
    if all(torch.equal(image, image[:1, :1].expand_as(image)) for image in images):
        raise ValueError(f"each of the {n} images has one colour all over: nothing was drawn")
    place = torch.zeros(1, 3) if frames.position is None else frames.position
    if (moved := float((place - place[0]).norm(dim=1).max())) > MAX_CAMERA_SHIFT:
        raise ValueError(
            f"the camera moved by {moved:.3g} while it turned: the views must be of one place"
        )
    return Turn(n, gap, start)


def write_frames(path: str | os.PathLike[str], frames: Frames) -> None:
    """Writes a frames file atomically, compressed."""
    arrays: dict[str, Any] = {
        "images": frames.images.numpy(),
        "yaw_degrees": frames.yaw_degrees.float().numpy(),
        "about": np.array(json.dumps(frames.about)),
    }
    if frames.position is not None:
        arrays["position"] = frames.position.numpy()
    write_arrays(path, arrays)


def nearest(yaw_degrees: Float[Tensor, "N"], angles: Float[Tensor, "n"]) -> Int[Tensor, "n"]:
    """Returns the index of the view closest to each of the ``angles`` (radians), on the circle.

    >>> nearest(torch.tensor([-179.0, 0.0, 90.0]), torch.tensor([0.1, 3.1, -3.1, 1.5]))
    tensor([1, 0, 0, 2])
    """
    difference = angles.double().rad2deg()[:, None] - yaw_degrees.double()
    return ((difference + 180) % 360 - 180).abs().argmin(1)


def as_observations(
    images: UInt8[Tensor, "n H W 3"], size: tuple[int, int]
) -> Float[Tensor, "n 3 h w"]:
    """Returns the images in [0, 1], channels first, float32, resized to (h, w).

    They are averaged over areas if h and w divide their height and width; otherwise they are
    interpolated bilinearly with anti-aliasing.
    """
    height, width = images.shape[1:3]
    x = images.permute(0, 3, 1, 2).float() / 255
    if (height, width) == tuple(size):
        return x.contiguous()
    if height % size[0] == 0 and width % size[1] == 0:
        return avg_pool2d(x, (height // size[0], width // size[1]))
    return interpolate(
        x, size=tuple(size), mode="bilinear", antialias=True, align_corners=False
    ).clamp(0, 1)
