"""Recordings of named arrays: npz, folders of npy, HDF5, Zarr, MATLAB, NetCDF.

A recording consists of ``states`` ``(T, d)`` and ``observations`` (or ``obs``) ``(T, ...)``, and
optionally ``mask``, ``times``, ``controls``. Several recordings are one array ``(B, T, ...)``, with
``lengths`` if they differ in length; or one array with ``recording``, an id for each step; or
separate arrays ``states_0``, ``states_1``, ..., ``train_states_0``, ... (as kbf writes them), or
groups of an HDF5 or Zarr file.
"""

import fnmatch
import re
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from kbf.data.files.array_files import Get, opened
from kbf.data.files.image_io import as_images, natural_order
from kbf.data.files.layout import Contents, FileRecording, Layout, by_recording, normalised
from kbf.data.files.tables import check_columns, matching
from kbf.data.files.timestamps import seconds_since_1970

# Default names of the arrays of each role; the layout may give others.
USUAL_NAMES = {
    "states": ["states"],
    "observations": ["observations", "obs"],
    "controls": ["controls"],
    "mask": ["mask"],
    "time": ["times", "time"],
    "recording": ["recording"],
}


def read(path: Path, layout: Layout, *, states: bool = True) -> Contents:
    """Reads the recordings of a file of arrays.

    Raises:
        ValueError: damaged, or missing arrays, arrays that are not numeric, or whose shapes do not
            agree.
    """
    with opened(path) as (names, get, notes):
        if not names:
            raise ValueError(f"{path} holds no arrays")
        stored = {normalised(name): name for name in names}
        if len(stored) < len(names):
            raise ValueError(
                f"{path}: two arrays have one name, in letters of one and of two parts"
            )
        contents = recordings_by_name(
            path, layout, list(stored), lambda name: get(stored[name]), states
        )
        return contents._replace(notes=(*notes, *contents.notes))


def recordings_by_name(
    path: Path, layout: Layout, names: list[str], get: Get, states: bool
) -> Contents:
    """Returns the recordings of named arrays.

    Args:
        path: of the file, for messages. layout: names of the arrays, if not the usual ones.
        names: of all arrays. get: returns the array of a name.
        states: whether states are required.

    Raises:
        ValueError: missing arrays, arrays that are not numeric, or whose shapes do not agree.
    """
    layout, names, get = with_columns(path, layout, names, get)
    keys_by_role = {
        role: keys_of(names, role, name_given(layout, role, names, states), path)
        for role in USUAL_NAMES
    }
    for role in ("states", "observations") if states else ("observations",):
        if not keys_by_role[role]:
            raise ValueError(
                f"{path}: there are no {role}: data.{role}=NAME names one of {', '.join(names)}"
            )
    wanted = list(keys_by_role["states"] if states else keys_by_role["observations"])
    if missing := [name for name in wanted if name not in keys_by_role["observations"]]:
        raise ValueError(
            f"{path}: the recording {missing[0] or 'of states'} has no observations; "
            f"it has {', '.join(names)}"
        )
    check_all_there(path, keys_by_role, states)
    lengths = numbers(get("lengths"), path, "lengths") if "lengths" in names else None
    recordings, notes = [], []
    arrays = {
        name: {
            role: numbers(get(keys[name]), path, keys[name])
            for role, keys in keys_by_role.items()
            if name in keys and role != "recording" and (states or role != "states")
        }
        for name in wanted
    }
    rows = [all(len(leaf) == 1 for leaf in loaded.values()) for loaded in arrays.values()]
    for (name, loaded), one_row in zip(arrays.items(), rows, strict=True):
        one_step = one_row and not all(rows)  # others have their steps as rows
        if lengths is None and not one_step:
            notes += upright(path, layout, loaded)
        key = keys_by_role["recording"].get(name)
        ids = None if key is None else numpy.asarray(get(key))
        recordings += recordings_of(path, layout, name or path.stem, loaded, lengths, ids)
    check_widths(path, recordings)
    first = recordings[0]
    return Contents(
        recordings,
        column_names(layout.states, first.states, "z", path),
        column_names(layout.observations, first.obs, "x", path) if first.obs.ndim == 2 else [],
        column_names(layout.controls, first.controls, "u", path),
        tuple(notes),
    )


def with_columns(
    path: Path, layout: Layout, names: list[str], get: Get
) -> tuple[Layout, list[str], Get]:
    """Adds an array ``T c`` for each role whose columns are arrays of their own.

    Returns:
        The layout without patterns, the names with that of the role, and a function that reads one.

    Raises:
        ValueError: some of the columns are no arrays, or not one number for each step.
    """
    roles = [*layout.time_columns(), layout.recording, layout.mask]
    columns: dict[str, list[str]] = {}
    for role in ("states", "observations", "controls"):
        given = getattr(layout, role)
        if not isinstance(given, list) or not any(fnmatch.filter(names, each) for each in given):
            continue
        if role in names and not {*given} <= {*names}:
            continue  # names of the columns of one array, one of which another array has as well
        columns[role] = matching(path, names, given, roles)
        check_columns(path, names, columns[role])
        layout = layout._replace(**{role: columns[role]})
    if not columns:
        return layout, names, get

    def stacked(name: str) -> Any:
        if name not in columns:
            return get(name)
        found = [numbers(get(each), path, each).double().squeeze() for each in columns[name]]
        for each, values in zip(columns[name], found, strict=True):
            if values.ndim != 1 or len(values) != len(found[0]):
                raise ValueError(
                    f"{path}, array {each}: it is {tuple(values.shape)}, not one number for each "
                    f"step, as {columns[name][0]} {tuple(found[0].shape)}"
                )
        return torch.stack(found, 1)

    used = {each for several in columns.values() for each in several}
    return layout, [*columns, *(each for each in names if each not in {*used, *columns})], stacked


def upright(path: Path, layout: Layout, loaded: dict[str, Tensor]) -> list[str]:
    """Transposes arrays of one recording whose steps are columns; returns a remark on each.

    That is so where only one number is a dimension of all arrays, or where all arrays have the same
    number of columns, which is larger than the number of rows.
    """
    flat = {role: leaf for role, leaf in loaded.items() if leaf.ndim <= 2 and leaf.numel()}
    if len(flat) < len(loaded) and (loaded["observations"].ndim == 3 or "states" not in flat):
        return []
    firsts = {len(leaf) for leaf in loaded.values()}
    several = len(loaded) > 1
    common = set.intersection(
        *(
            {leaf.shape[0], leaf.shape[-1]} if role in flat else {len(leaf)}
            for role, leaf in loaded.items()
        )
    )
    lasts = {leaf.shape[-1] for leaf in flat.values()}
    if "states" not in loaded and isinstance(layout.observations, list):
        q = len(layout.observations)
        obs = flat.get("observations")
        wide = obs is not None and obs.ndim == 2 and len(obs) == q != obs.shape[1]
        steps = obs.shape[1] if wide and obs is not None else 0
    elif len(firsts) > 1 and len(common - {1}) == 1:
        steps = next(iter(common - {1}))
    elif several and len(firsts) == 1 and len(lasts) == 1 and max(lasts) > max(firsts):
        steps = max(lasts)
    else:
        steps = 0
    remarks = []
    for role, leaf in flat.items():
        if leaf.ndim == 2 and steps and len(leaf) != steps == leaf.shape[1]:
            loaded[role] = leaf.mT
            if role != "time" and min(leaf.shape) > 1:
                remarks.append(
                    f"{path}: {role} {tuple(leaf.shape)} are read as {steps} steps of {len(leaf)}"
                )
    return remarks


def name_given(layout: Layout, role: str, names: list[str], states: bool) -> list[str] | str | None:
    """Returns the layout's entry of a role; None if a file to be filtered has no such array.

    A file to be filtered may be of another kind than that of the training.
    """
    given = getattr(layout, role)
    return None if not states and isinstance(given, str) and given not in names else given


def check_all_there(path: Path, keys_by_role: dict[str, dict[str, str]], states: bool) -> None:
    """Raises a ValueError if only some recordings of a file have states, controls or times."""
    for role in ("states", "controls", "time") if states else ("controls", "time"):
        lacking = keys_by_role["observations"].keys() - keys_by_role[role].keys()
        if keys_by_role[role] and lacking:
            array = keys_by_role["observations"][min(lacking)]
            raise ValueError(
                f"{path}: {array} has no {role}, others have: add them (NaN for unknown states), "
                "or name one array: data.observations=NAME"
            )


def check_widths(path: Path, recordings: list[FileRecording]) -> None:
    """Raises a ValueError unless all recordings have the same columns or image size."""
    for role in ("obs", "states", "controls"):
        shapes = [
            None if (leaf := getattr(r, role)) is None else tuple(leaf.shape[1:])
            for r in recordings
        ]
        noun = "observations" if role == "obs" else role
        for shape, recording in zip(shapes, recordings, strict=True):
            if shape is not None and 0 in shape:
                raise ValueError(f"{path}, recording {recording.name}: its {noun} have no columns")
            if shape != shapes[0]:
                raise ValueError(
                    f"{path}: the {noun} of recording {recording.name} are {shape}, those of "
                    f"{recordings[0].name} {shapes[0]}: all recordings must be alike"
                )


def keys_of(
    names: list[str], role: str, given: list[str] | str | None, path: Path
) -> dict[str, str]:
    """Returns the arrays of one role by recording; "" is a single array for all recordings."""
    called = [given] if isinstance(given, str) else USUAL_NAMES[role]
    if isinstance(given, str) and given in names:
        return {"": given}
    keys = {}
    pattern = rf"(?:(.+)/)?(?:([^/]+)_)?(?:{'|'.join(map(re.escape, called))})(?:_(\d+))?"
    for key in names:
        if match := re.fullmatch(pattern, key):
            keys["_".join(part for part in match.groups() if part)] = key
    if isinstance(given, str) and not keys:
        raise ValueError(
            f"{path}: there is no array {given!r} (data.{role}); it has {', '.join(names)}"
        )
    return {name: keys[name] for name in sorted(keys, key=natural_order)}


def numbers(array: Any, path: Path, name: str) -> Tensor:
    """Returns an array as a tensor: dates in seconds; float64 unless it is uint8 or bool.

    Raises:
        ValueError: the array is not numeric, has infinite entries, or is a scalar.
    """
    array = numpy.asarray(array)
    if array.dtype.kind == "M":  # dates and times
        array = seconds_since_1970(array)
    if not array.ndim:
        raise ValueError(f"{path}, array {name}: it is a single value, not one for each step")
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{path}, array {name}: it holds {array.dtype}, not numbers")
    if array.dtype in (numpy.uint8, numpy.bool_):
        return torch.from_numpy(numpy.ascontiguousarray(array))
    values = torch.from_numpy(array.astype("float64"))
    if bool(values.isinf().any()):
        raise ValueError(
            f"{path}, array {name}, row {int(values.isinf().nonzero()[0, 0])}: infinite"
        )
    return values


def recordings_of(
    path: Path,
    layout: Layout,
    name: str,
    loaded: dict[str, Tensor],
    lengths: Tensor | None,
    ids: numpy.ndarray | None,
) -> list[FileRecording]:
    """Returns one recording, or all recordings of one array.

    Raises:
        ValueError: shapes that do not agree.
    """
    obs, states = loaded["observations"], loaded.get("states")
    # The states show whether there is a batch of recordings. Without them, images are taken to have
    # three dimensions and vectors one.
    alone = (
        states.ndim <= 2
        if states is not None
        else obs.ndim in (1, 2, 4) or (obs.dtype == torch.uint8 and obs.ndim == 3)
    )
    if not alone or (lengths is not None and len(lengths) == len(obs)):
        count = len(obs)
        ends = (
            [obs.shape[1]] * count
            if lengths is None
            else lengths.flatten().nan_to_num().int().tolist()
        )
        for role, leaf in loaded.items():
            if leaf.ndim < 2 or leaf.shape[:2] != obs.shape[:2]:
                raise ValueError(
                    f"{path}: {role} {tuple(leaf.shape)} and observations {tuple(obs.shape)} "
                    "are not (B, T, ...) alike"
                )
        whole = lengths is None or (lengths.ndim == 1 and bool((lengths == lengths.round()).all()))
        if not whole or len(ends) != count or not all(0 < end <= obs.shape[1] for end in ends):
            raise ValueError(
                f"{path}: lengths must be {count} whole numbers from 1 to {obs.shape[1]}"
            )
        return [
            one(path, layout, f"{name}_{k}", {r: leaf[k, :end] for r, leaf in loaded.items()})
            for k, end in enumerate(ends)
        ]
    recording = one(path, layout, name, loaded)
    if ids is None:
        return [recording]
    if ids.size != len(recording.obs) or len(ids) != ids.size:
        raise ValueError(
            f"{path}: {len(recording.obs)} observations, but recording of shape {ids.shape}"
        )
    return by_recording(recording, ids.astype(str).flatten().tolist())


def one(path: Path, layout: Layout, name: str, loaded: dict[str, Tensor]) -> FileRecording:
    """Returns a recording of arrays ``T ...``."""
    obs = loaded["observations"]
    for role, leaf in loaded.items():
        if len(leaf) != len(obs):
            raise ValueError(
                f"{path}: recording {name} has {len(obs)} observations, "
                f"but {role} of length {len(leaf)}"
            )
    if not len(obs):
        raise ValueError(f"{path}: recording {name} has no steps")
    obs = obs[:, None] if obs.ndim == 1 else obs
    for role, leaf in loaded.items():
        if role in ("states", "controls") and leaf.ndim > 2:
            raise ValueError(f"{path}: {role} must be (T, number), got {tuple(leaf.shape)}")
        if role in ("time", "mask") and leaf.numel() != len(obs):
            raise ValueError(f"{path}: {role} must be (T,), got {tuple(leaf.shape)}")
    mask = loaded["mask"].flatten() if "mask" in loaded else None
    if mask is not None:
        if bool((wrong := (mask != 0) & (mask != 1)).any()):
            k = int(wrong.nonzero()[0, 0])
            raise ValueError(f"{path}: a mask is 0 or 1, that of step {k} is {float(mask[k]):g}")
        mask = mask.bool()
    if obs.ndim > 2:
        if obs.is_floating_point() and not bool((seen := obs.isfinite().flatten(1).all(1)).all()):
            mask = seen if mask is None else seen & mask
        obs = as_images(obs, layout.size, f"{path}, recording {name}")
    wide = {
        role: (leaf[:, None] if leaf.ndim == 1 else leaf).double()
        for role, leaf in loaded.items()
        if role in ("states", "controls")
    }
    return FileRecording(
        name,
        obs if obs.ndim == 4 else obs.double(),
        wide.get("states"),
        mask,
        loaded["time"].double().flatten() if "time" in loaded else None,
        wide.get("controls"),
        str(path),
    )


def column_names(
    given: list[str] | str | None, values: Tensor | None, letter: str, path: Path
) -> list[str]:
    """Returns the names of an array's columns: those of the configuration, or z1, z2, ..."""
    if values is None:
        return []
    width = values.shape[1]
    if not isinstance(given, list):
        return [f"{letter}{k + 1}" for k in range(width)]
    if len(given) != width:
        raise ValueError(
            f"{path}: {len(given)} names ({', '.join(given)}) for an array of {width} columns"
        )
    return list(given)
