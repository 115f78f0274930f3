"""Reads a file or folder of any supported kind; the ending of its name selects the reader."""

import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.layout import (
    Contents,
    FileRecording,
    Layout,
    Observations,
    finished,
    is_pattern,
    layout_of,
)

# Endings of tables, and of files of arrays.
TABLES = (".csv", ".tsv", ".txt", ".dat", ".parquet", ".pq")
ARRAYS = (".npz", ".h5", ".hdf5", ".zarr", ".mat", ".nc", ".nc4", ".cdf")
# Those that are read of a folder; a .txt or a .dat may be anything.
SEVERAL = tuple({*TABLES, *ARRAYS} - {".txt", ".dat"})


def read(path: str | os.PathLike[str], layout: Layout, *, states: bool = True) -> Contents:
    """Reads a file or folder of any supported kind.

    Args:
        path: ``.csv``, ``.tsv``, ``.txt`` and ``.dat`` (also in ``.gz``, ``.bz2``, ``.xz`` or
            ``.zip``), ``.parquet``, ``.npz``,
            ``.h5``/``.hdf5``, ``.zarr``, ``.mat``, NetCDF, a video, a folder of images, a folder or
            prefix of ``.npy`` files, or without states one ``.npy`` of observations.
        layout: roles of columns or arrays.
        states: whether states are required.

    Raises:
        FileNotFoundError: no such file. ValueError: anything in it that cannot be used, with its
            place in the file.
    """
    return finished(read_kind(Path(path).expanduser(), layout, states), layout)


def read_kind(path: Path, layout: Layout, states: bool) -> Contents:
    """Reads a file with the reader of its kind."""
    from kbf.data.files import arrays, images, tables

    suffix = kind_of(path)
    readers: dict[str, Callable[..., Contents]] = {
        **dict.fromkeys(TABLES, tables.read),
        **dict.fromkeys(ARRAYS, arrays.read),
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


def read_all(paths: Any, layout: Layout, *, states: bool = True) -> Contents:
    """Reads a file, or several files with one recording or more each.

    Args:
        paths: of a file or folder, as of `read`; of a folder with several tables or files of
            arrays, which are all read; a pattern (``runs/*.csv``); or a list of them. Files are
            taken in the natural order of their names: run2 before run10.
        layout, states: as of `read`.

    Raises:
        FileNotFoundError: no file matches. ValueError: as `read`, or files with other columns.
    """
    several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    files = [file for each in several for file in files_in(Path(each).expanduser())]
    if len(files) == 1 and len(several) == 1:
        return read(files[0], layout, states=states)
    found: list[Contents] = []
    for file in files:
        found.append(read(file, layout, states=states))
        # Patterns stand for the columns of the first file.
        for side in ("states", "observations", "controls"):
            given, names = getattr(layout, side), getattr(found[0], side)
            if isinstance(given, list) and any(map(is_pattern, given)):
                layout = layout._replace(**{side: names})
    return merged(found)


def files_in(path: Path) -> list[Path]:
    """Returns the files that a path stands for: itself, those in a folder, or of a pattern.

    Raises:
        FileNotFoundError: no file matches a pattern.
    """
    from kbf.data.files.image_io import IMAGE_SUFFIXES, natural_order

    found: list[Path] = []
    if path.is_dir() and path.suffix.lower() != ".zarr":
        inside = [file for file in path.iterdir() if not file.name.startswith(".")]
        # Images and .npy files are one recording, with a table that belongs to them.
        if not any(file.suffix.lower() in (*IMAGE_SUFFIXES, ".npy") for file in inside):
            found = [file for file in inside if kind_of(file) in SEVERAL]
    elif glob.has_magic(str(path)) and not path.exists():
        found = [Path(file) for file in glob.glob(str(path))]
        if not found:
            raise FileNotFoundError(f"data.path: no file matches {path}")
    return sorted(found, key=lambda file: natural_order(str(file))) or [path]


def kind_of(path: Path) -> str:
    """Returns the ending of a name that selects the reader; that of a table in an archive."""
    suffix = path.suffix.lower()
    if suffix not in (".gz", ".bz2", ".xz", ".zip"):
        return suffix
    inner = Path(path.stem).suffix.lower()
    if suffix == ".zip" and inner not in TABLES and path.is_file():
        from kbf.data.files.dialect import file_in

        try:
            with ZipFile(path) as archive:
                return Path(file_in(archive, path)).suffix.lower()
        except BadZipFile as error:
            raise ValueError(f"{path} is damaged: {error}") from error
    return inner


def merged(several: list[Contents]) -> Contents:
    """Joins the contents of several files; recordings are named by their file.

    Raises:
        ValueError: files with different columns.
    """
    from kbf.data.files.arrays import check_widths

    first = several[0]
    recordings: list[FileRecording] = []
    stems = [Path(each.recordings[0].file).name.partition(".")[0] for each in several]
    for each, stem in zip(several, stems, strict=True):
        file = each.recordings[0].file
        for side in ("states", "observations", "controls"):
            if getattr(each, side) != getattr(first, side):
                raise ValueError(
                    f"{file}: its {side} are {', '.join(getattr(each, side))}; "
                    f"those of {first.recordings[0].file} {', '.join(getattr(first, side))}"
                )
        name = stem if stems.count(stem) == 1 else f"{Path(file).parent.name}/{stem}"
        alone = len(each.recordings) == 1
        recordings += [
            recording._replace(name=name if alone else f"{name}/{recording.name}")
            for recording in each.recordings
        ]
    check_widths(Path(first.recordings[0].file), recordings)
    notes = tuple(note for each in several for note in each.notes)
    return first._replace(recordings=recordings, notes=notes)


def read_observations(path: Any, config: dict[str, Any]) -> list[Observations]:
    """Reads the observations of a file, for a filter that was trained with ``data=own``.

    Args:
        path: see `read_all`; states are not required.
        config: the ``data`` part of the checkpoint's configuration: columns, angles, time as
            control.

    Returns:
        One for each recording of the file, split at gaps in time as in training.

    Raises:
        FileNotFoundError, ValueError: see `read`; or columns other than those of the training.
    """
    layout = trained_layout(layout_of(config), ColumnSchema.from_dict(config["column_schema"]))
    return observations_of(read_all(path, layout, states=False), config)


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
    from kbf.data.files.latency import checked_latency, without_latency
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
    names = column_schema.columns("observations")
    late = checked_latency(config.get("latency"), names)
    for recording in in_schema_order(contents, column_schema).recordings:
        check_times(recording)
        check_width(recording, column_schema)
        recording = with_control_timing(recording, config.get("control_timing"))
        recording = without_latency(recording, names, late, step)
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
