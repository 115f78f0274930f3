"""The cache of data that can be made again: its folder, files that are made once, downloads.

The key of a file names everything that its contents depend on, so that a file never goes stale:
settings, versions of packages, and a version number of the code, which is raised with every change
of the code that changes the data.
"""

import hashlib
import http.client
import json
import os
import sys
import urllib.error
import urllib.request
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from filelock import FileLock

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
        print(f"\r{what}: {share:.0%}", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)


def download(
    url: str,
    path: str | os.PathLike[str],
    checksums: Mapping[str, str] | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Downloads a file unless it exists; an interrupted download continues from ``path`` + ".part".

    Args:
        url: of the file.
        path: of the copy, which is complete and checked, or absent.
        checksums: hexadecimal digest by the name of its algorithm, such as ``{"sha256": ...}``.
        progress: called with the bytes received so far and the size of the file (None if the server
            does not report it).

    Raises:
        ValueError: no connection, an error of the server, an interrupted connection, or another
            checksum. A download with another checksum is removed; a file that existed before is
            kept.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}.lock")):
        if path.exists():
            try:
                check(path, checksums)
            except ValueError as error:
                raise ValueError(f"{error}; delete it to fetch it again") from error
            return path
        part = path.with_name(f"{path.name}.part")
        fetch(url, part, progress)
        try:
            check(part, checksums)
        except ValueError as error:
            part.unlink()
            raise ValueError(
                f"the contents of {url} are not as expected; the download was removed: {error}"
            ) from error
        os.replace(part, path)
    return path


def fetch(url: str, part: Path, progress: Callable[[int, int | None], None] | None = None) -> None:
    """Appends the rest of a file to ``part``."""
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            resumed = response.status == 206 and (
                response.headers["Content-Range"] or ""
            ).startswith(f"bytes {have}-")
            have = have if resumed else 0  # some servers send the whole file all the same
            length = response.headers["Content-Length"]
            total = have + int(length) if length else None
            with part.open("ab" if resumed else "wb") as file:
                while block := response.read(1 << 18):
                    have += file.write(block)
                    if progress:
                        progress(have, total)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # no bytes after these: restart
            part.unlink()
            return fetch(url, part, progress)
        raise ValueError(
            f"cannot download {url}: the server answers {error.code} {error.reason}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"cannot download {url}: {getattr(error, 'reason', error)}") from error
    if total is not None and have != total:
        raise ValueError(
            f"cannot download {url}: interrupted after {have} of {total} bytes; "
            "the next attempt continues from there"
        )


def check(path: str | os.PathLike[str], checksums: Mapping[str, str] | None) -> None:
    """Raises a ValueError if the file has another checksum (hexadecimal, by algorithm)."""
    for name, expected in (checksums or {}).items():
        with open(path, "rb") as file:
            digest = hashlib.file_digest(
                file, lambda name=name: hashlib.new(name, usedforsecurity=False)
            ).hexdigest()
        if digest != expected.lower():
            raise ValueError(f"{path} has the {name} checksum {digest}, expected {expected}")
