"""Types of what recording files hold (`Layout`, `FileRecording`, `Contents`, `Observations`) and helpers that the readers share."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kbf.runtime.optional_dependencies import need


class Layout(NamedTuple):
    """Which columns or arrays of a file hold what. A list names columns, or patterns of names; a word an array of a file of arrays.

    Attributes:
        states, observations, controls: columns or array; None takes what an array file calls so.
        time, recording, mask: a column or array each.
        images: of a table, the column that names image files. images_outside: they need not be in
            the table's folder.
        table: for a folder of images or a video, the CSV with the states; None takes the only one
            beside them.
        size: height and width that images are brought to; None leaves them.
    """

    states: list[str] | str | None = None
    observations: list[str] | str | None = None
    controls: list[str] | str | None = None
    time: str | None = None
    recording: str | None = None
    mask: str | None = None
    images: str | None = None
    table: str | None = None
    size: list[int] | None = None
    images_outside: bool = False


class FileRecording(NamedTuple):
    """One sequence of a file, in the file's own columns and units.

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
        """The place of a step in the file, for messages."""
        return f"{self.file}, " + (
            f"sequence {self.name}, step {step}"
            if self.rows is None
            else f"row {int(self.rows[step])}"
        )


class Contents(NamedTuple):
    """The contents of a file: recordings, the names of their columns (no observation columns for images), and remarks."""

    recordings: list[FileRecording]
    states: list[str]
    observations: list[str]
    controls: list[str]
    notes: tuple[str, ...] = ()


class Observations(NamedTuple):
    """One sequence to filter, as filters see it.

    Attributes:
        obs: ``T *x``, NaN where missing; images as uint8. times: ``T`` or None. controls: ``T k``
            or None. name: of the sequence.
        mask: ``T`` bool, False where nothing was observed; None for vectors without a missing step.
            It is needed for images.
    """

    obs: Tensor
    times: Tensor | None
    controls: Tensor | None
    name: str
    mask: Tensor | None = None


def layout_of(config: dict[str, Any]) -> Layout:
    """The `Layout` of a ``data`` configuration.

    Raises:
        ValueError: a size that is no list.
    """
    layout = Layout(**{name: plain(config.get(name)) for name in Layout._fields if name in config})
    if not isinstance(layout.images_outside, bool):
        raise ValueError(
            f"data.images_outside must be true or false, got {layout.images_outside!r}"
        )
    if not isinstance(layout.size, list | None):
        raise ValueError(f"data.size must be [height,width] in pixels, got {layout.size}")
    return layout


def plain(value: Any) -> Any:
    """Tuples turned into lists: a configuration may hold either."""
    return [plain(v) for v in value] if isinstance(value, list | tuple) else value


def own_package(module: str, path: Path) -> Any:
    """The module that reads a kind of file.

    Raises:
        ValueError: it is not installed, or does not load.
    """
    return need(module, "own", f"{path}: reading this kind of file")


def rows_of(chosen: Tensor, recording: FileRecording, name: str) -> FileRecording:
    """The chosen steps of a recording, under another name."""
    leaves = {
        key: leaf[chosen] for key, leaf in recording._asdict().items() if isinstance(leaf, Tensor)
    }
    return recording._replace(name=name, **leaves)


def by_recording(whole: FileRecording, ids: list[str]) -> list[FileRecording]:
    """One recording for each id, in the order of first appearance.

    Raises:
        ValueError: a step without an id.
    """
    if lost := [step for step, name in enumerate(ids) if name in ("", "nan")]:
        raise ValueError(
            f"{whole.place(lost[0])}: data.recording does not say which recording this is"
        )
    order = list(dict.fromkeys(ids))
    number = (
        torch.tensor([{name: k for k, name in enumerate(order)}[name] for name in ids])
        if len(order) > 1
        else None
    )
    if number is None:
        return [whole._replace(name=order[0])]
    return [rows_of((number == k).nonzero()[:, 0], whole, name) for k, name in enumerate(order)]


def is_pattern(name: str) -> bool:
    """Whether a name stands for all columns that are like it, as ``cell_*`` does."""
    return "*" in name or "?" in name
