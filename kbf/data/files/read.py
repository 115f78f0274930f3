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
    without_codes,
)


def read(path: str | os.PathLike[str], layout: Layout, *, states: bool = True) -> Contents:
    """Reads a file or folder of any supported kind.

    Args:
        path: ``.csv`` and ``.tsv`` (also in ``.gz`` or ``.zip``), ``.parquet``, ``.npz``,
            ``.h5``/``.hdf5``, ``.zarr``, a video, a folder of images, a folder or prefix of
            ``.npy`` files, or without states one ``.npy`` of observations.
        layout: roles of columns or arrays.
        states: whether states are required.

    Raises:
        FileNotFoundError: no such file. ValueError: anything in it that cannot be used, with its
            place in the file.
    """
    contents = without_codes(read_kind(Path(path).expanduser(), layout, states), layout.missing)
    for recording in contents.recordings:
        check_sizes(recording)
    return contents


def read_kind(path: Path, layout: Layout, states: bool) -> Contents:
    """Reads a file with the reader of its kind."""
    from kbf.data.files import arrays, images, tables

    suffix = path.suffix.lower()
    if suffix in (".gz", ".zip"):  # of a table
        suffix = Path(path.stem).suffix.lower()
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
    layout = trained_layout(layout_of(config), ColumnSchema.from_dict(config["column_schema"]))
    return observations_of(read(path, layout, states=False), config)


def trained_layout(layout: Layout, column_schema: ColumnSchema) -> Layout:
    """Returns the layout of further data of a filter: roles as in training, columns by name."""
    for side, names in column_schema.sides().items():
        given = getattr(layout, side)
        # None: the file of the training was an array, this one may be a table. Patterns stand for
        # the columns of the training.
        no_array = given is None and side != "states"
        if no_array or (isinstance(given, list) and any(map(is_pattern, given))):
            layout = layout._replace(**{side: names or None})
    return layout


def in_schema_order(contents: Contents, column_schema: ColumnSchema) -> Contents:
    """Returns contents with the columns of the schema in its order, where the names are the same.

    The order in a file, or of a pattern in another file, is of no matter. Further columns, such as
    those that never varied in the training, are left out.
    """
    for side, leaf in (("states", "states"), ("observations", "obs"), ("controls", "controls")):
        names, wanted = getattr(contents, side), column_schema.sides()[side]
        if names == wanted or not set(wanted) <= set(names):
            continue
        order = [names.index(name) for name in wanted]
        recordings = [
            each._replace(**{leaf: None})
            if side == "controls" and not wanted
            else each
            if (values := getattr(each, leaf)) is None
            else each._replace(**{leaf: values[:, order]})
            for each in contents.recordings
        ]
        contents = contents._replace(recordings=recordings, **{side: wanted})
    return contents


def observations_of(contents: Contents, config: dict[str, Any]) -> list[Observations]:
    """Returns the observations of recordings, as filters take them.

    Where whole time steps have no row, steps without observation are inserted
    (`kbf.data.files.timestamps.with_missing_steps`).

    Args:
        contents: recordings with the columns of the training.
        config: as of `read_observations`.

    Raises:
        ValueError: times that do not increase, or columns other than those of the training.
    """
    from kbf.data.files.timestamps import (
        check_times,
        encode_recording,
        pieces_at_gaps,
        with_control_timing,
        with_missing_steps,
        with_time_control,
    )

    column_schema = ColumnSchema.from_dict(config["column_schema"])
    step, found = config.get("time_step"), []
    for recording in in_schema_order(contents, column_schema).recordings:
        check_times(recording)
        check_width(recording, column_schema)
        recording = with_control_timing(recording, config.get("control_timing"))
        if config.get("time_as_control"):
            recording = with_time_control(recording, step)
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
        for a, b in pieces_at_gaps(recording, step):
            piece: Any = {k: None if leaf is None else leaf[a:b] for k, leaf in leaves.items()}
            grid = None if config.get("time_as_control") else piece["times"]
            piece, inserted = with_missing_steps(piece, grid, step)
            name = recording.name if (a, b) == (0, len(obs)) else f"{recording.name}[{a}:{b}]"
            found.append(Observations(name=name, inserted=inserted, **piece))
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
