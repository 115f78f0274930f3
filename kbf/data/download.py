"""Downloads of files, with checksums and continuation after an interruption."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


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
    with one_at_a_time(path):
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


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Holds an exclusive lock for making ``path``, if the system has file locks.

    The workers of a comparison start at the same time and would each make the same file.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
