"""Images: folders, columns of file names, videos, arrays. They become uint8 ``T C H W`` with 1 or 3 channels."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from kbf.data.files.image_io import IMAGE_SUFFIXES, as_images, picture, together
from kbf.data.files.layout import Contents, FileRecording, Layout, own_package
from kbf.data.files.limits import check_bytes, check_pixels

VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm", ".gif")


def read(path: Path, layout: Layout, *, states: bool = True) -> Contents:
    """The recordings of a folder of images (in the order of their names) or a video, with the rows of a table beside them.

    With ``layout.images`` a column of the table names the image of each row, in any order; without
    it row k belongs to image k.

    Raises:
        FileNotFoundError: no table of states. ValueError: other numbers of rows and images, or an
            image that cannot be read.
    """
    from kbf.data.files import tables

    table = table_beside(path, layout, states)
    sides = {
        "states": [],
        "observations": [],
        "controls": layout.controls if isinstance(layout.controls, list) else [],
    }
    if table is not None and states:
        if not isinstance(layout.states, list):
            header = ", ".join(tables.header_of(table))
            raise ValueError(
                f"{table}: say which columns are states: data.states=[...]; it has {header}"
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
                f"data.images={layout.images} names image files, but {path} is a video: leave it out"
            )
        return tables.recordings_of(table, layout, sides, rows, folder=path)
    obs = frames(path, layout.size)
    if len(obs) != len(rows.rows):
        raise ValueError(
            f"{path} has {len(obs)} images, {table} has {len(rows.rows)} rows: they must be one for one"
        )
    return tables.recordings_of(table, layout, sides, rows, obs)


def table_beside(path: Path, layout: Layout, states: bool) -> Path | None:
    """The table of a folder of images or of a video; None if none is needed."""
    if layout.table is not None:
        table = Path(layout.table).expanduser()
        if not table.is_file():
            raise FileNotFoundError(f"data.table: there is no file {table}")
        return table
    candidates = (
        sorted(path.glob("*.csv"))
        if path.is_dir()
        else [p for p in [path.with_suffix(".csv")] if p.is_file()]
    )
    if len(candidates) == 1:
        return candidates[0]
    if states or layout.images:
        where = "in it" if path.is_dir() else f"called {path.stem}.csv beside it"
        raise FileNotFoundError(
            f"{path}: there is {'no' if not candidates else 'more than one'} CSV {where}: data.table=FILE names it"
        )
    return None


def frames(path: Path, size: list[int] | None) -> Tensor:
    """All images of a folder, or all frames of a video."""
    if path.is_dir():
        files = [p for p in path.iterdir() if p.suffix.lower() in IMAGE_SUFFIXES]
        if not files:
            raise ValueError(
                f"{path} holds no images ({', '.join(IMAGE_SUFFIXES)}) and no .npy files"
            )
        files.sort(
            key=lambda p: [int(w) if w.isdecimal() else w for w in re.split(r"(\d+)", p.name)]
        )
        first = picture(files[0], size)
        check_bytes(len(files) * first.numel(), f"{path}: its {len(files):,} images together")
        return together(
            [(first, str(files[0])), *((picture(file, size), str(file)) for file in files[1:])]
        )
    return together([(image, f"{path}, frame {k}") for k, image in enumerate(video(path, size))])


def video(path: Path, size: list[int] | None) -> Iterator[Tensor]:
    """The frames of a video, ``3 H W``."""
    av = own_package("av", path)
    count = 0
    try:
        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                count += 1
                check_pixels(frame.width, frame.height, f"{path}, frame {count - 1}")
                image = as_images(
                    torch.from_numpy(frame.to_ndarray(format="rgb24"))[None], size, str(path)
                )[0]
                check_bytes(count * image.numel(), f"{path}: its first {count:,} frames together")
                yield image
    except (av.error.FFmpegError, IndexError) as error:
        raise ValueError(f"{path} is no video, or damaged after {count} frames: {error}") from error
    if not count:
        raise ValueError(f"{path} has no frames")
