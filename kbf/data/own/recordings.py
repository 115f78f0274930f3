"""Recordings as they stand in files, before anything is made of them; one reader for each kind of file."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kbf.data.own.boundary import Boundary


class Layout(NamedTuple):
    """Where things stand in a file. A list names columns; a word names an array of a file of arrays.

    Attributes:
        states, observations, controls: columns or array; None takes what an array file calls so.
        time, sequence, mask: a column or array each.
        images: of a table, the column that names image files.
        table: for a folder of images or a video, the CSV with the states; None takes the only one beside them.
        size: height and width that images are brought to; None leaves them.
    """

    states: list[str] | str | None = None
    observations: list[str] | str | None = None
    controls: list[str] | str | None = None
    time: str | None = None
    sequence: str | None = None
    mask: str | None = None
    images: str | None = None
    table: str | None = None
    size: list[int] | None = None


class Recording(NamedTuple):
    """One sequence of a file, in the person's columns.

    Attributes:
        name: of the sequence. obs: ``T c`` float64 with NaN where missing, or ``T C H W`` uint8.
        states: ``T s`` float64 with NaN where not known; None if they were not asked for.
        mask: ``T`` bool, False where the file says that nothing was observed, or None.
        times: ``T`` float64, seconds of dates. controls: ``T k`` float64.
        file: where it came from. rows: ``T``, line or row numbers there; None counts steps.
    """

    name: str
    obs: Tensor
    states: Tensor | None = None
    mask: Tensor | None = None
    times: Tensor | None = None
    controls: Tensor | None = None
    file: str = ""
    rows: Tensor | None = None

    def place(self, step: int) -> str:
        """Where a step stands, for messages."""
        return f"{self.file}, " + (f"sequence {self.name}, step {step}" if self.rows is None else f"row {int(self.rows[step])}")


class Contents(NamedTuple):
    """What a file holds: recordings, the names of their columns (no observation columns for images), and what looks odd."""

    recordings: list[Recording]
    states: list[str]
    observations: list[str]
    controls: list[str]
    notes: tuple[str, ...] = ()


class Observations(NamedTuple):
    """One sequence to filter, as filters see it.

    Attributes:
        obs: ``T *x``, NaN where missing; images as uint8. times: ``T`` or None. controls: ``T k`` or None. name: of the sequence.
        mask: ``T`` bool, False where nothing was observed; None for vectors without a missing step. It is needed for images.
    """

    obs: Tensor
    times: Tensor | None
    controls: Tensor | None
    name: str
    mask: Tensor | None = None


def read(path: str | os.PathLike[str], layout: Layout, *, states: bool = True) -> Contents:
    """Read a file or folder of any known kind.

    Args:
        path: ``.csv``, ``.tsv``, ``.parquet``, ``.npz``, ``.h5``/``.hdf5``, ``.zarr``, a video, a folder of images, a folder or
            prefix of ``.npy`` files, or without states one ``.npy`` of observations.
        layout: where things stand in it.
        states: whether they are needed.

    Raises:
        FileNotFoundError: no such file. ValueError: anything in it that cannot be used, with its place.
    """
    path = Path(path).expanduser()
    from kbf.data.own import arrays, images, tables

    suffix = path.suffix.lower()
    readers: dict[str, Callable[..., Contents]] = {
        **dict.fromkeys((".csv", ".tsv", ".txt", ".parquet", ".pq"), tables.read),
        **dict.fromkeys((".npz", ".h5", ".hdf5", ".zarr"), arrays.read),
        **dict.fromkeys(images.VIDEOS, images.read),
    }
    if suffix not in readers:
        if suffix == ".npy" and path.is_file():
            if states:
                told = f"the folder {path.parent}, or what the names of several begin with, as data.path"
                raise ValueError(f"{path} is one array, and there are no states beside it: give {told}")
            return arrays.read(path, layout, states=False)
        if path.is_dir() and not any(path.glob("*.npy")):
            return images.read(path, layout, states=states)
        if path.is_dir() or any(path.parent.glob(f"{path.name}*.npy")):
            return arrays.read(path, layout, states=states)
    if not path.exists():
        raise FileNotFoundError(f"data.path: there is no file {path}")
    if suffix not in readers:
        raise ValueError(f"{path}: files of this kind are not known; known are {', '.join(readers)}, and folders of images or .npy")
    return readers[suffix](path, layout, states=states)


def read_observations(path: str | os.PathLike[str], config: dict[str, Any]) -> list[Observations]:
    """The observations of a file alone, for a filter that was trained with ``data=own``.

    Args:
        path: as of `read`; states need not be there.
        config: the ``data`` part of the checkpoint's configuration: columns, angles, time as control.

    Returns:
        One for each sequence of the file, cut at gaps in time as in training.

    Raises:
        FileNotFoundError, ValueError: as `read`; columns that are not those of the training.
    """
    from kbf.data.own.times import check_times, encode_recording, pieces_at_gaps, with_time_control

    boundary = Boundary.from_dict(config["boundary"])
    layout = layout_of(config)
    if layout.observations is None:  # an array in the training; here it may be a table
        layout = layout._replace(observations=boundary.columns("observations") or None)
    if layout.controls is None:
        layout = layout._replace(controls=list(boundary.controls) or None)
    found = []
    for recording in read(path, layout, states=False).recordings:
        check_times(recording)
        check_width(recording, boundary)
        if config.get("time_as_control"):
            recording = with_time_control(recording, config.get("time_step"))
        obs, _, mask, controls = encode_recording(recording, boundary, partial=bool(config.get("partial")))
        found += [
            Observations(
                obs[a:b],
                None if recording.times is None else recording.times[a:b],
                None if controls is None else controls[a:b],
                recording.name if (a, b) == (0, len(obs)) else f"{recording.name}[{a}:{b}]",
                None if mask is None else mask[a:b],
            )
            for a, b in pieces_at_gaps(recording, config.get("time_step"))
        ]
    return found


def check_width(recording: Recording, boundary: Boundary) -> None:
    """Raise a ValueError if a file's columns are not as many as those of the training."""
    sides = {"observations": (recording.obs, boundary.columns("observations")), "controls": (recording.controls, boundary.controls)}
    for side, (values, names) in sides.items():
        width = 0 if values is None or values.ndim == 4 else values.shape[1]
        if width != len(names):
            told = ", ".join(names) or ("images" if side == "observations" else "none")
            raise ValueError(f"{recording.file}: {width} columns of {side}, the training had {len(names)} ({told})")


def layout_of(config: dict[str, Any]) -> Layout:
    """The part of a ``data`` configuration that says where things stand.

    Raises:
        ValueError: a size that is no list.
    """
    layout = Layout(**{name: plain(config.get(name)) for name in Layout._fields})
    if not isinstance(layout.size, list | None):
        raise ValueError(f"data.size must be [height,width] in pixels, got {layout.size}")
    return layout


def plain(value: Any) -> Any:
    """Tuples as lists: a configuration may bring either."""
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def need(package: str, path: Path) -> Any:
    """An optional package.

    Raises:
        ValueError: it is not installed.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.split(".")[0]
        raise ValueError(f'{path}: reading this kind of file needs the package {name}: pip install -e ".[own]"') from error


def rows_of(chosen: Tensor, recording: Recording, name: str) -> Recording:
    """The chosen steps of a recording, under another name."""
    leaves = {key: leaf[chosen] for key, leaf in recording._asdict().items() if isinstance(leaf, Tensor)}
    return recording._replace(name=name, **leaves)


def by_sequence(whole: Recording, ids: list[str]) -> list[Recording]:
    """One recording for each id, in the order in which they come.

    Raises:
        ValueError: a step without an id.
    """
    if lost := [step for step, name in enumerate(ids) if name in ("", "nan")]:
        raise ValueError(f"{whole.place(lost[0])}: data.sequence does not say which recording this is")
    order = list(dict.fromkeys(ids))
    number = torch.tensor([{name: k for k, name in enumerate(order)}[name] for name in ids]) if len(order) > 1 else None
    if number is None:
        return [whole._replace(name=order[0])]
    return [rows_of((number == k).nonzero()[:, 0], whole, name) for k, name in enumerate(order)]
