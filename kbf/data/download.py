"""Files from the network, and the folder that keeps them."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Where files that can be had again are kept: ``KBF_CACHE``, or ``kbf`` in ``XDG_CACHE_HOME`` or in ``~/.cache``."""
    if own := os.environ.get("KBF_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kbf"


def download(
    url: str,
    path: str | os.PathLike[str],
    checksums: Mapping[str, str] | None = None,
    progress: Callable[[int, int | None], None] | None = None,
) -> Path:
    """Fetch a file, unless it is there. What was fetched before an interruption (in ``path`` + ".part") is not fetched again.

    Args:
        url: where it is.
        path: where it goes: whole and checked, or not at all.
        checksums: hexadecimal digest by the name of its algorithm, such as ``{"sha256": ...}``.
        progress: called with the bytes that are there and the bytes of the whole file (None if the
            server does not say).

    Raises:
        ValueError: no connection, an error of the server, a connection that broke off, or another
            checksum. After another checksum the fetched file is removed; a file that was there
            before is left.
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
                f"what {url} holds is not what was expected, and was removed: {error}"
            ) from error
        os.replace(part, path)
    return path


def fetch(url: str, part: Path, progress: Callable[[int, int | None], None] | None = None) -> None:
    """Fetch a file into ``part``, from where it ends."""
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
        if error.code == 416 and have:  # nothing comes behind that byte: begin again
            part.unlink()
            return fetch(url, part, progress)
        raise ValueError(
            f"cannot download {url}: the server says {error.code} {error.reason}"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(f"cannot download {url}: {getattr(error, 'reason', error)}") from error
    if total is not None and have != total:
        raise ValueError(
            f"cannot download {url}: it broke off after {have} of {total} bytes; the next attempt goes on from there"
        )


def check(path: str | os.PathLike[str], checksums: Mapping[str, str] | None) -> None:
    """Raise a ValueError if the file has other checksums than these (hexadecimal, by algorithm)."""
    for name, expected in (checksums or {}).items():
        with open(path, "rb") as file:
            digest = hashlib.file_digest(
                file, lambda name=name: hashlib.new(name, usedforsecurity=False)
            ).hexdigest()
        if digest != expected.lower():
            raise ValueError(f"{path} has the {name} checksum {digest}, expected {expected}")


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Let one process at a time make ``path`` (where the system has file locks); the workers of a comparison all begin at once."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.with_name(f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
