"""`read`: the recordings of the arguments of `kbf.fit`, and the settings of their columns."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kbf.data.files.array_files import opened
from kbf.data.files.dataset import FileData
from kbf.data.files.in_memory import contents_of, named_arrays
from kbf.data.files.layout import TEXT_SETTINGS, Contents, Layout, layout_of, plain
from kbf.data.files.read import ARRAYS, files_in
from kbf.fitted.python_words import in_python
from kbf.runtime.errors import DataError, nearest

Columns = str | Sequence[str]
# Roles that several columns may have.
PLURAL = ("states", "observations", "controls")


def read(
    data: Any,
    *,
    states: Any,
    observations: Any = None,
    images: Any = None,
    controls: Any = None,
    recording: Any = None,
    time: Any = None,
    mask: Any = None,
    angles: Sequence[str] | Mapping[str, str] = (),
    rotations: Sequence[Sequence[str]] = (),
    allow_missing_sensors: bool | None = None,
    missing: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
    time_as_control: bool = False,
    control_timing: str = "into",
    root: str | os.PathLike[str] | None = None,
    latency: Mapping[str, float] | None = None,
    size: Sequence[int] | None = None,
    reading: Mapping[str, Any] | None = None,
    validation: float = 0.0,
    test: float = 0.0,
) -> tuple[FileData, dict[str, Any], Contents]:
    """Return the data set of the arguments of `fit`, its ``data`` settings, and its recordings.

    Raises:
        DataError: data that cannot be used.
    """
    roles = {
        "states": states,
        "observations": observations,
        "controls": controls,
        "recording": recording,
        "time": time,
        "mask": mask,
    }
    names, unit = declared_angles(angles)
    kinds: dict[str, Any] = {
        "angles": names,
        "rotations": [list(group) for group in rotations],
        "angle_unit": unit,
        "time_as_control": time_as_control,
        "control_timing": control_timing,
        "latency": plain(python_numbers(latency)),
        "missing": plain(missing),
        "root": None if root is None else str(Path(root).expanduser().resolve()),
        "size": None if size is None else list(size),
    }
    if isinstance(observations, Mapping):
        if data is None:
            raise DataError("sensors are named columns of data: observations is an array here")
        kinds["sensors"] = {name: list(as_names(each)) for name, each in observations.items()}
        roles["observations"] = [name for each in kinds["sensors"].values() for name in each]
    with in_python():
        layout = layout_of(
            checked(reading) | {key: kinds[key] for key in ("size", "missing", "root")}
        )
        contents, columns = recordings_in(data, roles, images, layout)
        partly = contents.partly_missing() > 0 if allow_missing_sensors is None else False
        kinds["allow_missing_sensors"] = partly or bool(allow_missing_sensors)
        settings = {**columns, **kinds, **checked(reading), "validation": validation, "test": test}
        return FileData(None, contents=contents, **settings), settings, contents


def recordings_in(
    data: Any,
    roles: dict[str, Any],
    images: Any,
    layout: Layout,
) -> tuple[Contents, dict[str, Any]]:
    """Return the recordings of the arguments of `fit`, and the settings of their columns.

    Raises:
        ValueError: data of an unknown kind, or that cannot be read.
    """
    if data is None:
        if images is not None and roles["observations"] is not None:
            raise ValueError("give observations or images, not both")
        given = {**roles, "observations": images if images is not None else roles["observations"]}
        if wrong := [name for name, value in given.items() if isinstance(value, str)]:
            raise ValueError(f"{wrong[0]} names a column, but there is no data")
        contents = contents_of(named_arrays(**given), layout)
        return contents, {}
    names = {key: as_list(value) for key, value in roles.items() if key in PLURAL}
    names |= arrays_named(data, {key: value for key, value in roles.items() if key in PLURAL})
    singles = {key: value for key, value in roles.items() if key not in PLURAL}
    singles["time"] = plain(singles["time"])
    layout = layout._replace(**names, **singles, images=images)
    contents = contents_of(data, layout)
    chosen = {
        "states": contents.states,
        "observations": contents.observations or None,
        "controls": contents.controls or None,
    }
    chosen |= {key: value for key, value in names.items() if isinstance(value, str)}
    timed = any(each.times is not None for each in contents.recordings)
    time = layout.time or ("time" if timed else None)
    return contents, {**chosen, **singles, "time": time, "images": images}


def python_numbers(given: Any) -> Any:
    """Returns numbers and arrays of NumPy, also within mappings and lists, as Python's.

    >>> python_numbers({"a": np.float64(3), "b": np.array([0, 1])})
    {'a': 3.0, 'b': [0, 1]}
    """
    if isinstance(given, Mapping):
        return {name: python_numbers(each) for name, each in given.items()}
    if isinstance(given, list | tuple):
        return [python_numbers(each) for each in given]
    return given.tolist() if isinstance(given, np.ndarray | np.generic) else given


def arrays_named(data: Any, names: Mapping[str, Any]) -> dict[str, str]:
    """Return those of the names that are a text, the name of an array of several columns of data.

    Args:
        data: as of `fit`; only files of arrays and dicts of arrays have named arrays.
        names: of the columns or the array, by role.
    """
    texts = {role: name for role, name in names.items() if isinstance(name, str)}
    if isinstance(data, Mapping):
        return {k: name for k, name in texts.items() if np.ndim(data.get(name, 0)) > 1}
    if not texts or not isinstance(data, str | os.PathLike):
        return {}
    path = files_in(Path(data).expanduser())[0]
    if path.suffix.lower() not in ARRAYS or not path.exists():
        return {}
    with opened(path) as (there, get, _):
        return {k: name for k, name in texts.items() if name in there and np.ndim(get(name)) > 1}


def checked(reading: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns how files are written, as settings of ``data``.

    Raises:
        ValueError: an unknown setting, with the nearest.
    """
    for name in reading or {}:
        if name not in TEXT_SETTINGS:
            raise ValueError(f"reading: there is no {name!r}; {nearest(name, TEXT_SETTINGS)}")
    return dict(reading or {})


def as_list(names: Any) -> list[str] | str | None:
    """Return a single name as a list.

    Raises:
        ValueError: arrays where names of columns are expected.
    """
    if names is None:
        return None
    if isinstance(names, str):
        return [names]
    if isinstance(names, np.ndarray | torch.Tensor) or not all(isinstance(n, str) for n in names):
        raise ValueError(
            "with data, states, observations and controls are names of columns; arrays go without "
            "data: kbf.fit(states=ARRAY, observations=ARRAY)"
        )
    return list(names)


def declared_angles(angles: Sequence[str] | Mapping[str, str]) -> tuple[list[str], str]:
    """Return the names of angles and their unit.

    Raises:
        ValueError: an unknown unit, or several.
    """
    if not isinstance(angles, Mapping):
        return as_names(angles), "radians"
    found = sorted(set(angles.values()))
    if len(found) > 1 or not set(found) <= {"radians", "degrees"}:
        raise DataError(
            f"angles must all be in radians or all in degrees, got {', '.join(map(str, found))}"
        )
    return list(angles), found[0] if found else "radians"


def as_names(names: Columns) -> list[str]:
    """Return names as a list; a single one may be given without a list."""
    return [names] if isinstance(names, str) else list(names)
