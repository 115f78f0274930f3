"""Opens files of named arrays: npz, folders of npy, HDF5, Zarr, MATLAB, NetCDF.

Nothing is unpickled.
"""

import glob
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy

from kbf.data.files.layout import check_bytes, own_package, stored_bytes

Get = Callable[[str], Any]

# Endings of NetCDF files.
NETCDF_SUFFIXES = (".nc", ".nc4", ".cdf")


@contextmanager
def opened(path: Path) -> Iterator[tuple[list[str], Get, tuple[str, ...]]]:
    """Opens a file of arrays; yields their names, a function that reads one, and remarks.

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
                        f"{path}, array {elsewhere[0]}: its numbers are in other files, "
                        "which are not read"
                    )
                check_bytes(sum(stored_bytes(file[name]) for name in names), path)
                yield names, guarded(path, lambda name: file[name][()]), ()
        elif suffix == ".mat":
            yield (*opened_matlab(path), ())
        elif suffix in NETCDF_SUFFIXES:
            with opened_netcdf(path) as data:
                check_bytes(data.nbytes, path)
                names = [str(name) for name in data.variables]
                yield names, guarded(path, lambda name: data[name].values), ()
        elif suffix == ".zarr":
            group = opened_zarr(path)
            check_bytes(sum(stored_bytes(array) for array in group.values()), path)
            yield list(group), guarded(path, lambda name: group[name][...]), not_stored(path, group)
        elif suffix == ".npy":  # one array
            yield ["observations"], guarded(path, lambda _: load_npy(path)), ()
        else:
            if path.is_dir():
                files = {file.stem: file for file in path.glob("*.npy")}
            else:
                files = {
                    file.stem.removeprefix(path.name).lstrip("_-."): file
                    for file in path.parent.glob(f"{glob.escape(path.name)}*.npy")
                }
            yield list(files), guarded(path, lambda name: load_npy(files[name])), ()
    except ValueError as error:
        if str(path) in str(error):
            raise
        raise ValueError(f"{path} is damaged, or no {suffix or 'npy'} file: {error}") from error
    except (OSError, EOFError, KeyError, RuntimeError, BadZipFile) as error:
        # RuntimeError: from h5py
        raise ValueError(f"{path} is damaged, or no {suffix or 'npy'} file: {error}") from error


def load_npy(path: Path) -> Any:
    """Returns the array of an npy file, without unpickling."""
    return numpy.load(path, allow_pickle=False)


def guarded(path: Path, get: Get) -> Get:
    """Returns ``get`` with all errors converted to ValueErrors that name the array."""

    def careful(name: str) -> Any:
        try:
            return get(name)
        except Exception as error:  # each library has its own classes
            if "Object arrays" in str(error):
                raise ValueError(
                    f"{path}, array {name} holds Python objects, which are not read: "
                    "save plain arrays of numbers"
                ) from error
            reason = str(error) or type(error).__name__
            if "pickle" in reason:
                reason = "it does not begin as an array"
            raise ValueError(f"{path}, array {name}: damaged: {reason}") from error

    return careful


def opened_zarr(path: Path) -> dict[str, Any]:
    """Returns the arrays of a Zarr group by name.

    Raises:
        ValueError: damaged, or an array encoded by pickle, which would execute code of the file.
    """
    zarr = own_package("zarr", path)
    for file in [*path.rglob(".zarray"), *path.rglob("zarr.json")]:
        if "pickle" in file.read_text(encoding="utf-8", errors="replace"):
            raise ValueError(
                f"{file} holds pickled Python objects, which are not read: "
                "save plain arrays of numbers"
            )
    try:
        group = zarr.open_group(str(path), mode="r")
        return {
            name: item
            for name, item in group.members(max_depth=None)
            if isinstance(item, zarr.Array)
        }
    except Exception as error:  # zarr raises exceptions of several modules
        raise ValueError(
            f"{path} is no Zarr group, or damaged: {str(error).splitlines()[0]}"
        ) from error


def not_stored(path: Path, group: dict[str, Any]) -> tuple[str, ...]:
    """Returns a remark for each array of a Zarr group with chunks that have no file.

    Zarr does not store chunks that hold only the fill value; chunks of an incomplete copy are
    missing as well.
    """
    counts = [
        (name, array.nchunks_initialized, array.nchunks, array.fill_value)
        for name, array in group.items()
    ]
    return tuple(
        f"{path}, array {name}: {total - stored} of {total} chunks have no file and are read as "
        f"{fill}: is the copy complete?"
        for name, stored, total, fill in counts
        if stored < total
    )


def opened_matlab(path: Path) -> tuple[list[str], Get]:
    """Returns the names of the arrays of a MATLAB file, and a function that reads one.

    Fields of a structure are called ``structure/field``. Files of version 7.3 are HDF5, in which
    MATLAB's arrays are transposed.

    Raises:
        ValueError: damaged.
    """
    import scipy.io

    try:
        check_bytes(sum(8 * math.prod(shape) for _, shape, _ in scipy.io.whosmat(path)), path)
        stored = scipy.io.loadmat(path)
    except NotImplementedError:  # version 7.3
        return opened_matlab_73(path)
    except ValueError:
        raise
    except Exception as error:  # zlib, struct and scipy's own
        raise ValueError(f"{path} is damaged, or no MATLAB file: {error}") from error
    arrays: dict[str, Any] = {}
    for name, values in stored.items():
        if not name.startswith("__"):
            arrays |= fields_of(name, values)
    return list(arrays), arrays.__getitem__


def fields_of(name: str, values: Any) -> dict[str, Any]:
    """Returns an array of a MATLAB file by name, or the fields of a structure; texts of cells."""
    if values.dtype.names is not None and values.size == 1:
        record, found = values.flat[0], {}
        for field in values.dtype.names:
            found |= fields_of(f"{name}/{field}", record[field])
        return found
    if values.dtype == object and all(getattr(each, "size", 0) == 1 for each in values.flat):
        values = numpy.array([each.flat[0] for each in values.flat])  # a cell of texts or numbers
    return {name: values}


def opened_matlab_73(path: Path) -> tuple[list[str], Get]:
    """Returns the names of the arrays of a MATLAB file of version 7.3, and a function as above."""
    h5py = own_package("h5py", path)
    arrays: dict[str, Any] = {}
    with h5py.File(path, "r") as file:

        def keep(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset) and not name.startswith("#"):
                arrays[name] = item

        file.visititems(keep)
        check_bytes(sum(stored_bytes(item) for item in arrays.values()), path)
        found = {name: numpy.asarray(item[()]).T for name, item in arrays.items()}
    return list(found), found.__getitem__


def opened_netcdf(path: Path) -> Any:
    """Opens a NetCDF file; times are dates.

    Raises:
        ValueError: xarray is not installed, or it cannot read the file.
    """
    try:
        import xarray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ValueError(f"{path}: NetCDF is read by xarray: pip install xarray netCDF4") from error
    try:
        return xarray.open_dataset(path)
    except Exception as error:  # each engine has its own classes
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{path} is no NetCDF file, or damaged: {reason}") from error
