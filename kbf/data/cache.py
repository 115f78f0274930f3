"""The cache of data that can be made again: its folder, and files that are made once.

The key of a file names everything that its contents depend on, so that a file never goes stale:
settings, versions of packages, and a version number of the code, which is raised with every change
of the code that changes the data.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kbf.runtime.atomic_files import replacing

T = TypeVar("T")


def cache_dir() -> Path:
    """Returns ``KBF_CACHE``, or the folder ``kbf`` in ``XDG_CACHE_HOME`` or in ``~/.cache``."""
    if own := os.environ.get("KBF_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kbf"


def cached(
    name: str,
    key: Sequence[Any],
    load: Callable[[Path], T],
    make: Callable[[], T],
    save: Callable[[Path, T], None],
) -> T:
    """Loads a file of the cache, or makes and saves it if it is absent or damaged.

    Processes that run at the same time may each make the file; the last one's stays.

    Args:
        name: the beginning of the file's name.
        key: everything that the contents depend on, as JSON has it; the name ends in its hash.
        load: reads the file. Any exception means that it is absent or damaged.
        make: returns the contents.
        save: writes them. If it raises an OSError, a warning is issued and nothing is kept.
    """
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path = cache_dir() / f"{name}-{digest}.npz"
    try:
        return load(path)
    except Exception:  # absent or damaged: the errors of zip, zlib and npy share no base class
        made = make()
    try:
        save(path, made)
    except OSError as error:
        warnings.warn(
            f"{name}: the data cannot be kept ({error}): name a writable folder in KBF_CACHE",
            stacklevel=3,
        )
    return made


def write_arrays(path: str | os.PathLike[str], arrays: dict[str, Any]) -> None:
    """Writes arrays as a compressed npz, atomically."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **arrays)


def installed(package: str) -> str | None:
    """Returns the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def show_progress(what: str, share: float) -> None:
    """Shows the finished share as one line of a terminal on standard error."""
    if sys.stderr.isatty():
        end = "\n" if share >= 1 else ""
        print(f"\r{what}: {share:.0%}", end=end, file=sys.stderr, flush=True)
