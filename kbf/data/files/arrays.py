"""Files of named arrays: npz, folders of npy, HDF5, Zarr. Nothing is unpickled.

A recording is ``states`` ``(T, d)`` and ``observations`` (or ``obs``) ``(T, ...)``, if there are
any with ``mask``, ``times``, ``controls``. Several of them are one array ``(B, T, ...)``, with
``lengths`` where they end earlier; or one array with ``recording``, an id for each step; or arrays
of their own: ``states_0``, ``states_1``, ..., ``train_states_0``, ... (as kbf writes them), or
groups of an HDF5 or Zarr file.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy
import torch
from torch import Tensor

from kbf.data.files.image_io import as_images
from kbf.data.files.layout import Contents, FileRecording, Layout, by_recording, own_package
from kbf.data.files.limits import check_bytes, stored_bytes

# Names that arrays of each role usually have; the layout may give others.
USUAL_NAMES = {
    "states": ["states"],
    "observations": ["observations", "obs"],
    "controls": ["controls"],
    "mask": ["mask"],
    "time": ["times", "time"],
    "recording": ["recording"],
}

Get = Callable[[str], Any]


def read(path: Path, layout: Layout, *, states: bool = True) -> Contents:
    """The recordings of a file of arrays.

    Raises:
        ValueError: damaged, arrays that are not there, that are no numbers, or whose shapes do not
            fit.
    """
    with opened(path) as (names, get, notes):
        if not names:
            raise ValueError(f"{path} holds no arrays")
        keys_by_role = {
            role: keys_of(names, role, said_of(layout, role, names, states), path)
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
                f"{path}: the sequence {missing[0] or 'of states'} has no observations; it has {', '.join(names)}"
            )
        check_all_there(path, keys_by_role, states)
        recordings = []
        for name in wanted:
            loaded = {
                role: numbers(get(keys[name]), path, keys[name])
                for role, keys in keys_by_role.items()
                if name in keys and role != "recording" and (states or role != "states")
            }
            lengths = numbers(get("lengths"), path, "lengths") if "lengths" in names else None
            ids = (
                numpy.asarray(get(keys_by_role["recording"][name]))
                if name in keys_by_role["recording"]
                else None
            )
            recordings += recordings_of(path, layout, name or path.stem, loaded, lengths, ids)
    check_widths(path, recordings)
    first = recordings[0]
    return Contents(
        recordings,
        column_names(layout.states, first.states, "z", path),
        column_names(layout.observations, first.obs, "x", path) if first.obs.ndim == 2 else [],
        column_names(layout.controls, first.controls, "u", path),
        notes,
    )


def said_of(layout: Layout, role: str, names: list[str], states: bool) -> list[str] | str | None:
    """The layout's name of a role; None if a file to be filtered has no such array, as it may be of another kind."""
    said = getattr(layout, role)
    return None if not states and isinstance(said, str) and said not in names else said


def check_all_there(path: Path, keys_by_role: dict[str, dict[str, str]], states: bool) -> None:
    """Raise a ValueError if some sequences of a file have states, controls or times, and others do not."""
    roles = ("states", "controls", "time") if states else ("controls", "time")
    for role, name in [
        (role, name)
        for role in roles
        if keys_by_role[role]
        for name in keys_by_role["observations"]
        if name not in keys_by_role[role]
    ]:
        problem = f"{keys_by_role['observations'][name]} has no {role} beside it, others have"
        raise ValueError(
            f"{path}: {problem}: add them (NaN for states not known), or name one array: data.observations=NAME"
        )


def check_widths(path: Path, recordings: list[FileRecording]) -> None:
    """Raise a ValueError unless all recordings of a file have columns alike, and at least one, and images of one size."""
    for role in ("obs", "states", "controls"):
        shapes = [
            None if (leaf := getattr(r, role)) is None else tuple(leaf.shape[1:])
            for r in recordings
        ]
        word = "observations" if role == "obs" else role
        for shape, recording in zip(shapes, recordings, strict=True):
            if shape is not None and 0 in shape:
                raise ValueError(f"{path}, sequence {recording.name}: its {word} have no columns")
            if shape != shapes[0]:
                problem = f"the {word} of sequence {recording.name} are {shape}, those of {recordings[0].name} {shapes[0]}"
                raise ValueError(f"{path}: {problem}: all sequences must be alike")


def keys_of(
    names: list[str], role: str, said: list[str] | str | None, path: Path
) -> dict[str, str]:
    """The arrays of one role, by the name of their sequence ("" where one array holds all)."""
    called = [said] if isinstance(said, str) else USUAL_NAMES[role]
    if isinstance(said, str) and said in names:
        return {"": said}
    keys = {}
    for key in names:
        for word in called:
            group, _, leaf = key.rpartition("/")
            match = re.fullmatch(rf"(?:(.+)_)?{re.escape(word)}(?:_(\d+))?", leaf)
            if match:
                keys["_".join(part for part in (group, match[1], match[2]) if part)] = key
    if isinstance(said, str) and not keys:
        raise ValueError(
            f"{path}: there is no array {said!r} (data.{role}); it has {', '.join(names)}"
        )
    return dict(
        sorted(
            keys.items(),
            key=lambda pair: [int(p) if p.isdecimal() else p for p in re.split(r"(\d+)", pair[0])],
        )
    )


def numbers(array: Any, path: Path, name: str) -> Tensor:
    """An array as a tensor: uint8 and bool as they are, dates in seconds since 1970, all else float64.

    Raises:
        ValueError: no numbers, or infinite ones, or one alone.
    """
    array = numpy.asarray(array)
    if array.dtype.kind == "M":  # dates and times
        array = numpy.where(
            numpy.isnat(array), numpy.nan, array.astype("datetime64[us]").astype("int64") / 1e6
        )
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
    """One recording, or those that one array holds.

    Raises:
        ValueError: shapes that do not fit together.
    """
    obs, states = loaded["observations"], loaded.get("states")
    # A batch of sequences is told by the states; without them by images having three dimensions and
    # vectors one.
    alone = (
        states.ndim <= 2
        if states is not None
        else obs.ndim in (1, 2, 4) or (obs.dtype == torch.uint8 and obs.ndim == 3)
    )
    if lengths is not None and len(lengths) == len(obs):
        alone = False
    if not alone:
        count = len(obs)
        ends = (
            [obs.shape[1]] * count
            if lengths is None
            else lengths.flatten().nan_to_num().int().tolist()
        )
        for role, leaf in loaded.items():
            if leaf.ndim < 2 or leaf.shape[:2] != obs.shape[:2]:
                raise ValueError(
                    f"{path}: {role} {tuple(leaf.shape)} and observations {tuple(obs.shape)} are not (B, T, ...) alike"
                )
        whole = lengths is None or (lengths.ndim == 1 and bool((lengths == lengths.round()).all()))
        if not whole or len(ends) != count or not all(0 < end <= obs.shape[1] for end in ends):
            raise ValueError(
                f"{path}: lengths must be {count} whole numbers from 1 to {obs.shape[1]}"
            )
        each = [{role: leaf[k, : ends[k]] for role, leaf in loaded.items()} for k in range(count)]
        return [one(path, layout, f"{name}_{k}", leaves) for k, leaves in enumerate(each)]
    recording = one(path, layout, name, loaded)
    if ids is None:
        return [recording]
    if ids.size != len(recording.obs) or len(ids) != ids.size:
        raise ValueError(
            f"{path}: {len(recording.obs)} observations, but sequence of shape {ids.shape}"
        )
    return by_recording(recording, ids.astype(str).flatten().tolist())


def one(path: Path, layout: Layout, name: str, loaded: dict[str, Tensor]) -> FileRecording:
    """A recording of arrays ``T ...``."""
    obs, states, mask = loaded["observations"], loaded.get("states"), None
    for role, leaf in loaded.items():
        if len(leaf) != len(obs):
            raise ValueError(
                f"{path}: sequence {name} has {len(obs)} observations, but {role} of length {len(leaf)}"
            )
    if not len(obs):
        raise ValueError(f"{path}: sequence {name} has no steps")
    obs = obs[:, None] if obs.ndim == 1 else obs
    for role in ("states", "controls"):
        if role in loaded and loaded[role].ndim > 2:
            raise ValueError(f"{path}: {role} must be (T, number), got {tuple(loaded[role].shape)}")
    for role in ("time", "mask"):
        if role in loaded and loaded[role].numel() != len(obs):
            raise ValueError(f"{path}: {role} must be (T,), got {tuple(loaded[role].shape)}")
    if "mask" in loaded:
        mask = loaded["mask"].bool().flatten()
    if obs.ndim > 2:
        if obs.is_floating_point() and not bool((seen := obs.isfinite().flatten(1).all(1)).all()):
            mask = seen if mask is None else seen & mask
        obs = as_images(obs, layout.size, f"{path}, sequence {name}")
    wide = {role: columns(loaded[role]) for role in ("states", "controls") if role in loaded}
    times = loaded["time"].double().flatten() if "time" in loaded else None
    return FileRecording(
        name,
        obs if obs.ndim == 4 else obs.double(),
        None if states is None else wide["states"],
        mask,
        times,
        wide.get("controls"),
        str(path),
    )


def columns(values: Tensor) -> Tensor:
    """``T`` or ``T c`` as ``T c`` float64."""
    return (values[:, None] if values.ndim == 1 else values).double()


def column_names(
    said: list[str] | str | None, values: Tensor | None, letter: str, path: Path
) -> list[str]:
    """Names of an array's columns: the configuration's list, or z1, z2, ..."""
    if values is None:
        return []
    width = values.shape[1]
    if isinstance(said, list) and len(said) != width:
        raise ValueError(
            f"{path}: {len(said)} names ({', '.join(said)}) for an array of {width} columns"
        )
    return list(said) if isinstance(said, list) else [f"{letter}{k + 1}" for k in range(width)]


@contextmanager
def opened(path: Path) -> Iterator[tuple[list[str], Get, tuple[str, ...]]]:
    """Open a file of arrays: the names of the arrays, a function that reads one, and remarks.

    Raises:
        ValueError: damaged, or of another kind.
    """
    suffix = path.suffix.lower()
    try:
        if suffix == ".npz":
            with numpy.load(path, allow_pickle=False) as file:
                check_bytes(sum(entry.file_size for entry in file.zip.infolist()), path)
                yield list(file.files), guarded(path, file.__getitem__), ()
        elif suffix in (".h5", ".hdf5"):
            h5py = own_package("h5py", path)
            with h5py.File(path, "r") as file:
                names: list[str] = []
                file.visititems(
                    lambda name, item: (
                        names.append(name) if isinstance(item, h5py.Dataset) else None
                    )
                )
                if elsewhere := [
                    name for name in names if file[name].external or file[name].is_virtual
                ]:
                    raise ValueError(
                        f"{path}, array {elsewhere[0]}: its numbers are in other files, which are not read"
                    )
                check_bytes(sum(stored_bytes(file[name]) for name in names), path)
                yield names, guarded(path, lambda name: file[name][()]), ()
        elif suffix == ".zarr":
            group = opened_zarr(path)
            check_bytes(sum(stored_bytes(array) for array in group.values()), path)
            yield list(group), guarded(path, lambda name: group[name][...]), not_stored(path, group)
        elif suffix == ".npy":  # one array
            yield (
                ["observations"],
                guarded(path, lambda _: numpy.load(path, allow_pickle=False)),
                (),
            )
        else:
            stems = {
                file.stem: file
                for file in (
                    path.glob("*.npy")
                    if path.is_dir()
                    else path.parent.glob(f"{glob.escape(path.name)}*.npy")
                )
            }
            files = {
                stem if path.is_dir() else stem.removeprefix(path.name).lstrip("_-."): file
                for stem, file in stems.items()
            }
            yield (
                list(files),
                guarded(path, lambda name: numpy.load(files[name], allow_pickle=False)),
                (),
            )
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} is damaged, or no {suffix or 'npy'} file: {error}") from error
    except (
        OSError,
        EOFError,
        KeyError,
        RuntimeError,
        BadZipFile,
    ) as error:  # RuntimeError: of h5py
        raise ValueError(f"{path} is damaged, or no {suffix or 'npy'} file: {error}") from error


def guarded(path: Path, get: Get) -> Get:
    """``get`` with every error turned into a ValueError that names the array."""

    def careful(name: str) -> Any:
        try:
            return get(name)
        except Exception as error:  # each library has kinds of its own
            if "Object arrays" in str(error):
                raise ValueError(
                    f"{path}, array {name} holds Python objects, which are not read: save plain arrays of numbers"
                ) from error
            reason = (
                "it does not begin as an array"
                if "pickle" in str(error)
                else str(error) or type(error).__name__
            )
            raise ValueError(f"{path}, array {name}: damaged: {reason}") from error

    return careful


def opened_zarr(path: Path) -> dict[str, Any]:
    """The arrays of a Zarr group by name.

    Raises:
        ValueError: damaged, or an array that is encoded by pickle, which would run code of the
            file.
    """
    zarr = own_package("zarr", path)
    for file in [*path.rglob(".zarray"), *path.rglob("zarr.json")]:
        if "pickle" in file.read_text(encoding="utf-8", errors="replace"):
            raise ValueError(
                f"{file} holds pickled Python objects, which are not read: save plain arrays of numbers"
            )
    try:
        group = zarr.open_group(str(path), mode="r")
        return {
            name: item
            for name, item in group.members(max_depth=None)
            if isinstance(item, zarr.Array)
        }
    except Exception as error:  # zarr's own kinds, of several modules
        raise ValueError(
            f"{path} is no Zarr group, or damaged: {str(error).splitlines()[0]}"
        ) from error


def not_stored(path: Path, group: dict[str, Any]) -> tuple[str, ...]:
    """A sentence for each array of a Zarr group of which parts have no file: they are read as the fill value.

    That is how a Zarr keeps a part that holds nothing else, and also what a copy looks like that
    was cut short.
    """
    counts = [
        (name, array.nchunks_initialized, array.nchunks, array.fill_value)
        for name, array in group.items()
    ]
    return tuple(
        f"{path}, array {name}: {total - there} of {total} chunks have no file and are read as {fill}: is the copy complete?"
        for name, there, total, fill in counts
        if there < total
    )
