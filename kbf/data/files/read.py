"""Reads a file or folder of any supported kind; the ending of its name selects the reader."""

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.layout import (
    MAX_NUMBER,
    Contents,
    FileRecording,
    Layout,
    Observations,
    is_pattern,
    layout_of,
)


def read(path: str | os.PathLike[str], layout: Layout, *, states: bool = True) -> Contents:
    """Reads a file or folder of any supported kind.

    Args:
        path: ``.csv``, ``.tsv``, ``.parquet``, ``.npz``, ``.h5``/``.hdf5``, ``.zarr``, a video, a
            folder of images, a folder or prefix of ``.npy`` files, or without states one ``.npy``
            of observations.
        layout: roles of columns or arrays.
        states: whether states are required.

    Raises:
        FileNotFoundError: no such file. ValueError: anything in it that cannot be used, with its
            place in the file.
    """
    contents = read_kind(Path(path).expanduser(), layout, states)
    for recording in contents.recordings:
        check_sizes(recording)
    return contents


def read_kind(path: Path, layout: Layout, states: bool) -> Contents:
    """Reads a file with the reader of its kind."""
    from kbf.data.files import arrays, images, tables

    suffix = path.suffix.lower()
    readers: dict[str, Callable[..., Contents]] = {
        **dict.fromkeys((".csv", ".tsv", ".txt", ".parquet", ".pq"), tables.read),
        **dict.fromkeys((".npz", ".h5", ".hdf5", ".zarr"), arrays.read),
        **dict.fromkeys(images.VIDEO_SUFFIXES, images.read),
    }
    if suffix not in readers:
        if suffix == ".npy" and path.is_file():
            if states:
                raise ValueError(
                    f"{path} is a single array, without states: data.path must be the folder "
                    f"{path.parent}, or the common beginning of the names of several files"
                )
            return arrays.read(path, layout, states=False)
        if path.is_dir() and not any(path.glob("*.npy")):
            return images.read(path, layout, states=states)
        if path.is_dir() or any(path.parent.glob(f"{glob.escape(path.name)}*.npy")):
            return arrays.read(path, layout, states=states)
    if not path.exists():
        raise FileNotFoundError(f"data.path: there is no file {path}")
    if suffix not in readers:
        raise ValueError(
            f"{path}: files of this kind are not known; known are {', '.join(readers)}, "
            "and folders of images or .npy"
        )
    return readers[suffix](path, layout, states=states)


def check_sizes(recording: FileRecording) -> None:
    """Raises a ValueError with the place of the first number above `MAX_NUMBER`."""
    for name in ("states", "obs", "controls", "times"):
        values: Tensor | None = getattr(recording, name)
        if values is None or not values.is_floating_point() or not values.numel():
            continue
        if bool((large := values.abs() > MAX_NUMBER).any()):
            at = large.nonzero()[0].tolist()
            what = {"obs": "observations"}.get(name, name)
            number = values[tuple(at)].item()
            raise ValueError(
                f"{recording.place(at[0])}, {what}: {number:g} is no measurement; "
                f"the limit is {MAX_NUMBER:g}"
            )


def read_observations(path: str | os.PathLike[str], config: dict[str, Any]) -> list[Observations]:
    """Reads the observations of a file, for a filter that was trained with ``data=own``.

    Args:
        path: see `read`; states are not required.
        config: the ``data`` part of the checkpoint's configuration: columns, angles, time as
            control.

    Returns:
        One for each recording of the file, split at gaps in time as in training.

    Raises:
        FileNotFoundError, ValueError: see `read`; or columns other than those of the training.
    """
    layout = trained_layout(config, ColumnSchema.from_dict(config["column_schema"]))
    return observations_of(read(path, layout, states=False).recordings, config)


def trained_layout(config: dict[str, Any], column_schema: ColumnSchema) -> Layout:
    """Returns the layout of further data of a filter: roles as in training, columns by name."""
    layout = layout_of(config)
    for side, names in (
        ("observations", column_schema.columns("observations")),
        ("controls", list(column_schema.controls)),
    ):
        given = getattr(layout, side)
        # None: the file of the training was an array, this one may be a table. Patterns stand for
        # the columns of the training.
        if given is None or (isinstance(given, list) and any(map(is_pattern, given))):
            layout = layout._replace(**{side: names or None})
    return layout


def observations_of(recordings: list[FileRecording], config: dict[str, Any]) -> list[Observations]:
    """Returns the observations of recordings, as filters take them.

    Args:
        recordings: in the columns of the training.
        config: as of `read_observations`.

    Raises:
        ValueError: times that do not increase, or columns other than those of the training.
    """
    from kbf.data.files.timestamps import (
        check_times,
        encode_recording,
        pieces_at_gaps,
        with_time_control,
    )

    column_schema = ColumnSchema.from_dict(config["column_schema"])
    found = []
    for recording in recordings:
        check_times(recording)
        check_width(recording, column_schema)
        if config.get("time_as_control"):
            recording = with_time_control(recording, config.get("time_step"))
        obs, states, mask, controls = encode_recording(
            recording,
            column_schema,
            allow_missing_sensors=bool(config.get("allow_missing_sensors")),
        )
        leaves = {
            "obs": obs,
            "times": recording.times,
            "controls": controls,
            "mask": mask,
            "states": states,
        }
        for a, b in pieces_at_gaps(recording, config.get("time_step")):
            piece: Any = {k: None if leaf is None else leaf[a:b] for k, leaf in leaves.items()}
            name = recording.name if (a, b) == (0, len(obs)) else f"{recording.name}[{a}:{b}]"
            found.append(Observations(name=name, **piece))
    return found


def check_width(recording: FileRecording, column_schema: ColumnSchema) -> None:
    """Raises a ValueError if the number of columns is not that of the training."""
    sides = {
        "observations": (recording.obs, column_schema.columns("observations")),
        "controls": (recording.controls, column_schema.controls),
    }
    for side, (values, names) in sides.items():
        if (width := 0 if values is None or values.ndim == 4 else values.shape[1]) != len(names):
            expected = ", ".join(names) or ("images" if side == "observations" else "none")
            raise ValueError(
                f"{recording.file}: {width} columns of {side}, the training had {len(names)} "
                f"({expected})"
            )
