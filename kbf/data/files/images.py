"""Reads folders of images and videos as uint8 ``T C H W`` with 1 or 3 channels."""

import glob
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kbf.data.files.image_io import IMAGE_SUFFIXES, as_images, natural_order, picture, together
from kbf.data.files.layout import (
    Contents,
    FileRecording,
    Layout,
    check_bytes,
    check_pixels,
    own_package,
)

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".gif")


def read(path: Path, layout: Layout, *, states: bool = True) -> Contents:
    """Reads a folder of images (in the order of their names) or a video, with a table of states.

    With ``layout.images``, a column of the table contains the name of the image of each row, in any
    order; otherwise row k belongs to image k.

    Raises:
        FileNotFoundError: no table of states. ValueError: different numbers of rows and images, or
            an image that cannot be read.
    """
    from kbf.data.files import tables

    table = table_of(path, layout, states)
    sides = {
        "states": [],
        "observations": [],
        "controls": layout.controls if isinstance(layout.controls, list) else [],
    }
    if table is not None and states:
        if not isinstance(layout.states, list):
            header = ", ".join(tables.header_of(table, layout))
            raise ValueError(
                f"{table}: data.states=[...] must name the columns of the states; it has {header}"
            )
        sides["states"] = layout.states
    if table is None:
        return Contents(
            [FileRecording(path.stem, frames(path, layout.size), file=str(path))], [], [], []
        )
    rows = tables.read_table(table, layout, sides)
    if layout.images:
        if not path.is_dir():
            raise ValueError(
                f"data.images={layout.images} is for image files, but {path} is a video: "
                "leave it out"
            )
        return tables.recordings_of(table, layout, sides, rows, folder=path)
    obs = frames(path, layout.size)
    if len(obs) != len(rows.rows):
        raise ValueError(
            f"{path} has {len(obs)} images, {table} has {len(rows.rows)} rows: "
            "each image needs one row"
        )
    return tables.recordings_of(table, layout, sides, rows, obs)


def table_of(path: Path, layout: Layout, states: bool) -> Path | None:
    """Returns the table of a folder of images or of a video; None if none is required."""
    if layout.table is not None:
        table = Path(layout.table).expanduser()
        if not table.is_file():
            raise FileNotFoundError(f"data.table: there is no file {table}")
        return table
    pattern = "*.csv" if path.is_dir() else f"{glob.escape(path.stem)}.csv"
    candidates = sorted((path if path.is_dir() else path.parent).glob(pattern))
    if len(candidates) == 1:
        return candidates[0]
    if states or layout.images:
        where = "in it" if path.is_dir() else f"called {path.stem}.csv in its folder"
        raise FileNotFoundError(
            f"{path}: there is {'no' if not candidates else 'more than one'} CSV {where}: "
            "data.table=FILE names it"
        )
    return None


def frames(path: Path, size: list[int] | None) -> Tensor:
    """Reads all images of a folder, or all frames of a video."""
    if path.is_dir():
        if not (files := [p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES]):
            raise ValueError(
                f"{path} holds no images ({', '.join(IMAGE_SUFFIXES)}) and no .npy files"
            )
        files.sort(key=lambda file: natural_order(file.name))
        first = picture(files[0], size)
        check_bytes(len(files) * first.numel(), f"{path}: all its {len(files):,} images")
        return together(
            [(first, str(files[0])), *((picture(file, size), str(file)) for file in files[1:])]
        )
    return together([(image, f"{path}, frame {k}") for k, image in enumerate(video(path, size))])


def video(path: Path, size: list[int] | None) -> Iterator[Tensor]:
    """Yields the frames of a video, ``3 H W``."""
    av = own_package("av", path)
    count = 0
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                check_pixels(frame.width, frame.height, f"{path}, frame {count}")
                count += 1
                image = as_images(
                    torch.from_numpy(frame.to_ndarray(format="rgb24"))[None], size, str(path)
                )[0]
                check_bytes(count * image.numel(), f"{path}: its first {count:,} frames")
                yield image
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is no video, or damaged after {count} frames: {error}") from error
    if not count:
        raise ValueError(f"{path} has no frames")
