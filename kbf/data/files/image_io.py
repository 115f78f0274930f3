"""Image files and arrays of images as uint8 tensors ``T C H W``."""

import re
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from kbf.data.files.layout import check_bytes, check_pixels

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def named_images(
    folder: Path,
    names: list[str],
    size: list[int] | None,
    table: str,
    rows: Tensor,
    *,
    outside: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Reads the images named in a column, and the mask of its cells that are not empty.

    An empty cell is a missing observation. The mask is None if there is none.

    Raises:
        ValueError: no image, a damaged one, or one outside of ``folder`` unless ``outside``.
        FileNotFoundError: a missing one.
    """
    seen = torch.tensor([bool(name) for name in names])
    images: list[tuple[Tensor, str]] = []
    home = folder.resolve()
    for name, row in zip(names, rows.tolist(), strict=True):
        if name and not outside and not (folder / name).resolve().is_relative_to(home):
            raise ValueError(
                f"{table}, row {row}: the image {name} is outside of {folder}; "
                "data.images_outside=true allows it"
            )
        if name and not (folder / name).is_file():
            raise FileNotFoundError(f"{table}, row {row}: there is no image {folder / name}")
        if name:
            images.append((picture(folder / name, size), str(folder / name)))
            check_bytes(len(names) * images[0][0].numel(), f"{table}: all its images")
    if not images:
        raise ValueError(f"{table}: no row names an image")
    stacked = together(images)
    if bool(seen.all()):
        return stacked, None
    obs = stacked.new_zeros(len(names), *stacked.shape[1:])
    obs[seen] = stacked
    return obs, seen


def natural_order(name: str) -> list[int | str]:
    """Returns the key that sorts names by the numbers in them: x_2 before x_10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def picture(file: Path, size: list[int] | None) -> Tensor:
    """Reads one image file as uint8 ``C H W``."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            check_pixels(*image.size, file)
            if image.mode.startswith(("I", "F")):
                raise ValueError(
                    f"{file}: images of mode {image.mode} are not read; "
                    "save them with 8 bits a channel"
                )
            array = numpy.array(image.convert("L" if image.mode in ("L", "1", "LA") else "RGB"))
    except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise ValueError(f"{file} is no image, or damaged: {error}") from error
    return as_images(torch.from_numpy(array)[None], size, str(file))[0]


def together(images: list[tuple[Tensor, str]]) -> Tensor:
    """Stacks images of one size.

    Raises:
        ValueError: images of different sizes.
    """
    first, name = images[0]
    for image, other in images:
        if image.shape != first.shape:
            raise ValueError(
                f"{other} is {tuple(image.shape)} (C, H, W), {name} is {tuple(first.shape)}: "
                "data.size=[h,w] resizes them"
            )
    return torch.stack([image for image, _ in images])


def as_images(values: Tensor, size: list[int] | None, where: str) -> Tensor:
    """Converts arrays of images to uint8 ``T C h w``.

    They are ``T H W``, ``T H W C`` or ``T C H W``, uint8 or floating-point numbers in [0, 1].

    Raises:
        ValueError: another shape or range, or an invalid size.
    """
    if values.ndim == 3:
        values = values[:, None]
    if values.ndim != 4:
        raise ValueError(
            f"{where}: images must be (T, H, W), (T, H, W, 3) or (T, 3, H, W), "
            f"got {tuple(values.shape)}"
        )
    if values.shape[1] not in (1, 3) and values.shape[-1] in (1, 3):
        values = values.permute(0, 3, 1, 2)
    if values.shape[1] not in (1, 3):
        raise ValueError(f"{where}: images have 1 or 3 channels, got {tuple(values.shape)}")
    if values.dtype != torch.uint8:
        known = values.nan_to_num(0)
        low, high = float(known.min()), float(known.max())
        top = 1.0 if high <= 1 else 255.0
        if low < 0 or high > top:
            raise ValueError(
                f"{where}: images are uint8, or floating-point numbers from 0 to 1; "
                f"got {low:g} to {high:g}"
            )
        values = (known * (255 / top)).round().to(torch.uint8)
    if size is None:
        return values.contiguous()
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise ValueError(f"data.size must be [height,width] in pixels, got {size}")
    small = [
        interpolate(part.float(), size=tuple(size), mode="bilinear", antialias=True)
        for part in values.split(256)
    ]
    return torch.cat(small).round().clamp(0, 255).to(torch.uint8)
