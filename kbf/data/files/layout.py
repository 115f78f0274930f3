"""Types that the readers of files return, and functions and limits that the readers share.

Images, videos and archives are small on disk and large in memory.
"""

import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kbf.runtime.optional_dependencies import need

# Unpacked size of all that is read of one file: 4 GiB.
MAX_BYTES = 2**32

# Absolute value of a measurement. Its square is finite.
MAX_NUMBER = 1e150

# Pixels of an image or a frame: 67 million.
MAX_PIXELS = 2**26

# Settings of a layout about the text of a table, with the values that they may have.
TEXT_SETTINGS: dict[str, Any] = {
    "text_encoding": str,
    "date_format": str,
    "decimal": (".", ","),
    "thousands": (".", ",", " ", "'", "_"),
    "comment": str,
    "skip_lines": int,
    "units_row": bool,
    "header": bool,
    "sort_by_time": bool,
}


class Layout(NamedTuple):
    """Roles of the columns or arrays of a file.

    A list contains names of columns or patterns of names; a string is the name of an array.

    Attributes:
        states, observations, controls: columns or array; None for the array of that name.
        time, recording, mask: a column or array each. Several columns of the time, such as a date
            and a time of day, are joined by spaces.
        missing: values that stand for a missing one, in all columns or by column.
        images: of a table, the column with the names of image files. images_outside: whether they
            may be outside of the table's folder. root: the folder of these files; None is that of
            the table.
        table: for a folder of images or a video, the CSV with the states; None for the only one in
            the folder, or the one with the name of the video.
        size: height and width to which images are resized; None keeps their size.
        text_encoding: of CSV files; None is UTF-8, or UTF-16 with a byte order mark.
        date_format: of times that are texts, as of `datetime.strptime`; None is ISO 8601.
        decimal, thousands: marks in the numbers of CSV files; None is a point, or a comma where it
            is no delimiter and numbers have it; and none.
        comment: beginning of the lines of CSV files that are comments.
        skip_lines: lines before the header. units_row: whether a row of units follows the header.
        header: whether the first row names the columns; otherwise they are c1, c2, ...
        sort_by_time: whether the rows of each recording are sorted by time.
    """

    states: list[str] | str | None = None
    observations: list[str] | str | None = None
    controls: list[str] | str | None = None
    time: str | list[str] | None = None
    recording: str | None = None
    mask: str | None = None
    missing: list[int | float] | dict[str, list[int | float]] | None = None
    images: str | None = None
    table: str | None = None
    size: list[int] | None = None
    images_outside: bool = False
    root: str | None = None
    text_encoding: str | None = None
    date_format: str | None = None
    decimal: str | None = None
    thousands: str | None = None
    comment: str | None = None
    skip_lines: int = 0
    units_row: bool = False
    header: bool = True
    sort_by_time: bool = False

    def time_columns(self) -> list[str]:
        """Returns the columns of the time."""
        return [self.time] if isinstance(self.time, str) else list(self.time or ())

    def time_name(self) -> str | None:
        """Returns a name for the time; None without."""
        return " ".join(self.time_columns()) or None

    def is_plain_text(self) -> bool:
        """Whether CSV files of this layout can be read line by line, as by ``kbf filter``."""
        return all(
            getattr(self, name) == default
            for name, default in self._field_defaults.items()
            if name in TEXT_SETTINGS
        ) and not isinstance(self.time, list)


class FileRecording(NamedTuple):
    """One recording of a file, in the columns and units of the file.

    Attributes:
        name: of the recording. obs: ``T c`` float64 with NaN where missing, or ``T C H W`` uint8.
        states: ``T s`` float64 with NaN where unknown; None if they were not requested.
        mask: ``T`` bool, False where the mask of the file marks a missing observation, or None.
        times: ``T`` float64, dates in seconds. controls: ``T k`` float64.
        file: its path. rows: ``T``, line or row numbers in the file; None counts steps.
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
        """Returns the place of a step in the file, for messages."""
        if self.rows is None:
            return f"{self.file}, recording {self.name}, step {step}"
        return f"{self.file}, row {int(self.rows[step])}"


class Contents(NamedTuple):
    """The recordings of a file, the names of their columns (none for images), and remarks."""

    recordings: list[FileRecording]
    states: list[str]
    observations: list[str]
    controls: list[str]
    notes: tuple[str, ...] = ()

    def partly_missing(self) -> int:
        """Returns the number of rows that lack some, but not all, of their observations."""
        missing = [r.obs.isnan() for r in self.recordings if r.obs.ndim == 2]
        return sum(int((each.any(1) & ~each.all(1)).sum()) for each in missing)


class Observations(NamedTuple):
    """One recording to be filtered, in the components that filters use.

    Attributes:
        obs: ``T *x``, NaN where missing; images as uint8. times: ``T`` or None. controls: ``T k``
            or None. name: of the recording.
        mask: ``T`` bool, False where the observation is missing; None if none is missing. Images
            cannot represent missing observations by NaN.
        states: ``T d``, NaN where unknown; None if they were not requested.
        inserted: ``T`` bool, the steps that have no row in the file; None if all have one.
    """

    obs: Tensor
    times: Tensor | None
    controls: Tensor | None
    name: str
    mask: Tensor | None = None
    states: Tensor | None = None
    inserted: Tensor | None = None


def layout_of(config: dict[str, Any]) -> Layout:
    """Returns the `Layout` of a ``data`` configuration.

    Raises:
        ValueError: ``size`` is not a list, or ``images_outside`` not a bool.
    """
    layout = Layout(**{name: plain(config.get(name)) for name in Layout._fields if name in config})
    for name in ("states", "observations", "controls"):
        if isinstance(names := getattr(layout, name), list):
            layout = layout._replace(**{name: [normalised(each) for each in names]})
    for name in ("time", "recording"):
        if isinstance(text := getattr(layout, name), str):
            layout = layout._replace(**{name: normalised(text)})
    if not isinstance(layout.images_outside, bool):
        raise ValueError(
            f"data.images_outside must be true or false, got {layout.images_outside!r}"
        )
    if not isinstance(layout.size, list | None):
        raise ValueError(f"data.size must be [height,width] in pixels, got {layout.size}")
    check_texts(layout)
    return layout


def normalised(name: Any) -> str:
    """Return the name of a column as text, with composed letters (Unicode NFC).

    >>> normalised("u\u0308") == "\u00fc", normalised(1)
    (True, '1')
    """
    return unicodedata.normalize("NFC", str(name))


def check_texts(layout: Layout) -> None:
    """Raises a ValueError for a setting in `TEXT_SETTINGS` with a value that it cannot have."""
    for name, kind in TEXT_SETTINGS.items():
        value, default = getattr(layout, name), Layout._field_defaults[name]
        if value == default and type(value) is type(default):
            continue
        if isinstance(kind, tuple):
            if value not in kind:
                marks = ", ".join(map(repr, kind))
                raise ValueError(f"data.{name} must be one of {marks}, got {value!r}")
        elif type(value) is not kind or (kind is str and not value) or (kind is int and value < 0):
            what = {str: "a text", int: "a number of lines", bool: "true or false"}[kind]
            raise ValueError(f"data.{name} must be {what}, got {value!r}")
    if layout.decimal is not None and layout.decimal == layout.thousands:
        raise ValueError(f"data.decimal and data.thousands are both {layout.decimal!r}")


def codes_by_column(missing: Any, names: list[str]) -> list[list[int | float]]:
    """Returns the values that stand for a missing one, of each column.

    Args:
        missing: a list for all columns, or a dict of lists by column; None for none.
        names: of the columns.

    Returns:
        Lists of codes, which include their values in single precision.

    Raises:
        ValueError: codes that are no lists of numbers.
    """
    by_name = missing if isinstance(missing, Mapping) else dict.fromkeys(names, missing or [])
    found = [by_name.get(name, []) for name in names]
    for codes in [*by_name.values(), *found]:
        if not isinstance(codes, list | tuple) or not all(type(c) in (int, float) for c in codes):
            raise ValueError(
                "data.missing must be a list of numbers, as [-999], or lists by column, as "
                f"{{a: [0]}}; got {missing!r}"
            )
    return [[*codes, *in_single_precision(codes)] for codes in found]


def in_single_precision(codes: Sequence[int | float]) -> list[float]:
    """Returns codes as a column of float32 holds them, where these are other numbers."""
    found = torch.tensor(codes, dtype=torch.float64).float().double().tolist()
    return [low for low, code in zip(found, codes, strict=True) if low != code]


def without_codes(contents: Contents, missing: Any) -> Contents:
    """Returns contents with NaN in place of the values that stand for a missing one.

    Raises:
        ValueError: as `codes_by_column`.
    """
    if not missing:
        return contents
    sides = {"obs": "observations", "states": "states", "controls": "controls"}
    codes = {
        leaf: codes_by_column(missing, getattr(contents, side)) for leaf, side in sides.items()
    }
    recordings = []
    for each in contents.recordings:
        leaves = {}
        for name, columns in codes.items():
            if (leaf := getattr(each, name)) is None or not any(columns):
                continue
            marked = [
                torch.isin(column, torch.tensor(marks, dtype=column.dtype))
                for column, marks in zip(leaf.unbind(1), columns, strict=True)
            ]
            leaves[name] = leaf.masked_fill(torch.stack(marked, 1), torch.nan)
        recordings.append(each._replace(**leaves))
    return contents._replace(recordings=recordings)


def finished(contents: Contents, layout: Layout) -> Contents:
    """Returns contents that were read, without codes, and sorted by time where that is declared.

    Raises:
        ValueError: as `codes_by_column`, or a number above `MAX_NUMBER`.
    """
    contents = without_codes(contents, layout.missing)
    for recording in contents.recordings:
        check_sizes(recording)
    if not layout.sort_by_time:
        return contents
    return contents._replace(recordings=[sorted_by_time(each) for each in contents.recordings])


def sorted_by_time(recording: FileRecording) -> FileRecording:
    """Returns a recording with its steps in the order of time.

    Raises:
        ValueError: it has no times.
    """
    if (times := recording.times) is None:
        raise ValueError(f"{recording.file}: data.sort_by_time needs time stamps: data.time=COLUMN")
    if bool((times.diff() >= 0).all()):
        return recording
    order = times.argsort(stable=True)
    rows = torch.arange(len(times)) if recording.rows is None else recording.rows
    return rows_of(order, recording._replace(rows=rows), recording.name)


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


def plain(value: Any) -> Any:
    """Returns lists in place of tuples; configurations may contain either."""
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def own_package(module: str, path: Path) -> Any:
    """Imports the module that reads a kind of file.

    Raises:
        ValueError: it is not installed or cannot be imported.
    """
    return need(module, "own", f"{path}: reading this kind of file")


def rows_of(chosen: Tensor, recording: FileRecording, name: str) -> FileRecording:
    """Returns the selected steps of a recording under another name."""
    leaves = {
        key: leaf[chosen] for key, leaf in recording._asdict().items() if isinstance(leaf, Tensor)
    }
    return recording._replace(name=name, **leaves)


def by_recording(whole: FileRecording, ids: list[str]) -> list[FileRecording]:
    """Splits steps into one recording for each id, in the order of first appearance.

    Raises:
        ValueError: a step without an id.
    """
    if lost := [step for step, name in enumerate(ids) if name in ("", "nan")]:
        raise ValueError(
            f"{whole.place(lost[0])}: the recording's name is missing (data.recording)"
        )
    steps: dict[str, list[int]] = {}
    for step, name in enumerate(ids):
        steps.setdefault(name, []).append(step)
    if len(steps) == 1:
        return [whole._replace(name=ids[0])]
    return [rows_of(torch.tensor(chosen), whole, name) for name, chosen in steps.items()]


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern for several columns, such as ``cell_*``."""
    return "*" in name or "?" in name


def check_bytes(count: int, where: Path | str) -> None:
    """Raises a ValueError if a file would take more than `MAX_BYTES` in memory."""
    if count > MAX_BYTES:
        raise ValueError(
            f"{where}: {count:,} bytes in memory, more than the limit of {MAX_BYTES:,}: "
            "split the recording"
        )


def check_pixels(width: int, height: int, where: Path | str) -> None:
    """Raises a ValueError if an image has more than `MAX_PIXELS` pixels."""
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"{where} has {width} x {height} pixels, more than the limit of {MAX_PIXELS:,}: "
            "resize it"
        )


def stored_bytes(array: Any) -> int:
    """Returns the size of an array of HDF5 or Zarr in memory."""
    return int(array.size) * array.dtype.itemsize
