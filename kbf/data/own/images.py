"""Images: folders, columns of file names, videos, arrays. They become uint8 ``T C H W`` with 1 or 3 channels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from kbf.data.own.recordings import Contents, Layout, Recording, need

VIDEOS = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".gif")
PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm")


def read(path: Path, layout: Layout, *, states: bool = True) -> Contents:
    """The recordings of a folder of images (in the order of their names) or a video, with the rows of a table beside them.

    With ``layout.images`` a column of the table names the image of each row, in any order; without it row k belongs to image k.

    Raises:
        FileNotFoundError: no table of states. ValueError: other numbers of rows and images, or an image that cannot be read.
    """
    from kbf.data.own import tables

    table = table_beside(path, layout, states)
    sides = {"states": [], "observations": [], "controls": layout.controls if isinstance(layout.controls, list) else []}
    if table is not None and states:
        if not isinstance(layout.states, list):
            header = ", ".join(tables.header_of(table))
            raise ValueError(f"{table}: say which columns are states: data.states=[...]; it has {header}")
        sides["states"] = layout.states
    if table is None:
        return Contents([Recording(path.stem, frames(path, layout.size), file=str(path))], [], [], [])
    rows = tables.read_table(table, layout, sides)
    if layout.images:
        if not path.is_dir():
            raise ValueError(f"data.images={layout.images} names image files, but {path} is a video: leave it out")
        return tables.recordings_of(table, layout, sides, rows, folder=path)
    obs = frames(path, layout.size)
    if len(obs) != len(rows.rows):
        raise ValueError(f"{path} has {len(obs)} images, {table} has {len(rows.rows)} rows: they must be one for one")
    return tables.recordings_of(table, layout, sides, rows, obs)


def table_beside(path: Path, layout: Layout, states: bool) -> Path | None:
    """The table of a folder of images or of a video; None if none is needed."""
    if layout.table is not None:
        table = Path(layout.table).expanduser()
        if not table.is_file():
            raise FileNotFoundError(f"data.table: there is no file {table}")
        return table
    found = sorted(path.glob("*.csv")) if path.is_dir() else [p for p in [path.with_suffix(".csv")] if p.is_file()]
    if len(found) == 1:
        return found[0]
    if states or layout.images:
        where = "in it" if path.is_dir() else f"called {path.stem}.csv beside it"
        raise FileNotFoundError(f"{path}: there is {'no' if not found else 'more than one'} CSV {where}: data.table=FILE names it")
    return None


def frames(path: Path, size: list[int] | None) -> Tensor:
    """All images of a folder, or all frames of a video."""
    if path.is_dir():
        files = [p for p in path.iterdir() if p.suffix.lower() in PICTURES]
        if not files:
            raise ValueError(f"{path} holds no images ({', '.join(PICTURES)}) and no .npy files")
        files.sort(key=lambda p: [int(w) if w.isdigit() else w for w in re.split(r"(\d+)", p.name)])
        return together([(picture(file, size), str(file)) for file in files])
    return together([(image, f"{path}, frame {k}") for k, image in enumerate(video(path, size))])


def video(path: Path, size: list[int] | None) -> Iterator[Tensor]:
    """The frames of a video, ``3 H W``."""
    av = need("av", path)
    count = 0
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                count += 1
                yield as_images(torch.from_numpy(frame.to_ndarray(format="rgb24"))[None], size, str(path))[0]
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is no video, or damaged after {count} frames: {error}") from error
    if not count:
        raise ValueError(f"{path} has no frames")


def named_images(folder: Path, names: list[str], size: list[int] | None, table: str, rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """The images that a column names, and where there is one (an empty cell: nothing was observed); None for everywhere."""
    seen = torch.tensor([bool(name) for name in names])
    images: list[tuple[Tensor, str]] = []
    for name, row in zip(names, rows.tolist(), strict=True):
        if name and not (folder / name).is_file():
            raise FileNotFoundError(f"{table}, row {row}: there is no image {folder / name}")
        if name:
            images.append((picture(folder / name, size), str(folder / name)))
    if not images:
        raise ValueError(f"{table}: no row names an image")
    found = together(images)
    if bool(seen.all()):
        return found, None
    obs = found.new_zeros(len(names), *found.shape[1:])
    obs[seen] = found
    return obs, seen


def picture(file: Path, size: list[int] | None) -> Tensor:
    """One image file as uint8 ``C H W``."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError(f"{file}: images of mode {image.mode} are not read; save them with 8 bits a channel")
            array = numpy.array(image.convert("L" if image.mode in ("L", "1", "LA") else "RGB"))
    except (OSError, SyntaxError, UnidentifiedImageError) as error:
        raise ValueError(f"{file} is no image, or damaged: {error}") from error
    return as_images(torch.from_numpy(array)[None], size, str(file))[0]


def together(images: list[tuple[Tensor, str]]) -> Tensor:
    """Images of one size as one tensor."""
    first, name = images[0]
    for image, other in images:
        if image.shape != first.shape:
            raise ValueError(f"{other} is {tuple(image.shape)} (C, H, W), {name} is {tuple(first.shape)}: data.size=[h,w] resizes")
    return torch.stack([image for image, _ in images])


def as_images(values: Tensor, size: list[int] | None, where: str) -> Tensor:
    """Arrays of images, ``T H W``, ``T H W C`` or ``T C H W``, uint8 or floating-point in [0, 1], as uint8 ``T C h w``.

    Raises:
        ValueError: another shape or range, or a size that is none.
    """
    if values.ndim == 3:
        values = values[:, None]
    if values.ndim != 4:
        raise ValueError(f"{where}: images must be (T, H, W), (T, H, W, 3) or (T, 3, H, W), got {tuple(values.shape)}")
    if values.shape[1] not in (1, 3) and values.shape[-1] in (1, 3):
        values = values.permute(0, 3, 1, 2)
    if values.shape[1] not in (1, 3):
        raise ValueError(f"{where}: images have 1 or 3 channels, got {tuple(values.shape)}")
    if values.dtype != torch.uint8:
        known = values.nan_to_num(0)
        low, high = float(known.min()), float(known.max())
        top = 1.0 if high <= 1 else 255.0
        if low < 0 or high > top:
            raise ValueError(f"{where}: images are uint8, or floating-point numbers from 0 to 1; got {low:g} to {high:g}")
        values = (known * (255 / top)).round().to(torch.uint8)
    if size is None:
        return values.contiguous()
    if len(size) != 2 or not all(isinstance(side, int) and side > 0 for side in size):
        raise ValueError(f"data.size must be [height,width] in pixels, got {size}")
    small = [interpolate(part.float(), size=tuple(size), mode="bilinear", antialias=True) for part in values.split(256)]
    return torch.cat(small).round().clamp(0, 255).to(torch.uint8)
