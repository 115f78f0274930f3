"""Atomic writes: files are written under a temporary name, flushed, then moved into place."""

import csv
import errno
import json
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

# Errors of a full disk and of an exhausted quota; they name no file.
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Space that checkpoints, events and figures need in addition to the recordings.
MIN_FREE_BYTES = 20 * 2**20


def check_space(directory: str | os.PathLike[str], needed: int) -> None:
    """Check that the file system of a folder has space for results, before any work.

    Args:
        directory: of the results, which may not exist yet.
        needed: bytes in addition to `MIN_FREE_BYTES`.

    Raises:
        OSError: there is less.
    """
    place = Path(directory).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    free, needed = shutil.disk_usage(place).free, needed + MIN_FREE_BYTES
    if free < needed:
        message = f"{free / 2**20:,.0f} MiB are free, and the results need {needed / 2**20:,.0f}"
        raise OSError(errno.ENOSPC, f"the disk is nearly full: {message}", str(directory))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary path to write to, which replaces ``path`` or is removed on errors.

    If the process is killed or the power fails, ``path`` holds either all of the old or all of the
    new contents. A killed process leaves a file whose name begins with its number; the next writer
    of ``path`` removes it (`sweep`).

    Raises:
        OSError: ``path`` is a folder, or its folder cannot be made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    sweep(path.parent, path.name)
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        try:
            yield temporary
        except RuntimeError as error:  # PyTorch's error of a full disk
            if "inline_container" not in str(error) and "PytorchStreamWriter" not in str(error):
                raise
            raise OSError(
                errno.ENOSPC, "cannot be written whole (is the disk full?)", str(path)
            ) from error
        except OSError as error:
            if error.errno not in DISK_FULL or error.filename is not None:
                raise
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        flush(temporary)
        os.replace(temporary, path)
        flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk, so that it survives a power failure."""
    if path.is_dir() and os.name != "posix":  # only there folders can be opened
        return
    descriptor = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)
    try:
        with suppress(OSError):  # file systems without fsync
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def scratch(directory: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields a temporary folder inside ``directory``; `sweep` removes those of killed processes."""
    there = Path(directory).is_dir()
    Path(directory).mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{os.getpid()}-", dir=directory, ignore_cleanup_errors=True
        ) as made:
            yield Path(made)
    finally:
        if not there:
            with suppress(OSError):  # it contains other files by now
                Path(directory).rmdir()


def sweep(directory: str | os.PathLike[str], name: str | None = None) -> None:
    """Remove the temporary files and folders of killed processes from a folder.

    ``name``: only those that were to become the file of this name.
    """
    for path in Path(directory).glob(".*"):
        owner = re.match(r"\.(\d+)-", path.name)
        if (
            owner is None
            or (name is not None and path.name[owner.end() :] != name)
            or runs(int(owner[1]))
        ):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def runs(process: int) -> bool:
    """Whether a process of this number runs on this machine; True on systems other than POSIX."""
    if os.name != "posix":
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # a process of another user
        pass
    return True


def check_archive(path: str | os.PathLike[str]) -> None:
    """Check the contents of a checkpoint against the checksums that were written with it.

    PyTorch's files are uncompressed zip archives with a CRC-32 for each tensor. `torch.load` does
    not check it, so that a flipped bit would change a number.

    Raises:
        ValueError: the file is no such archive, or has changed.
        OSError: the file cannot be opened.
    """
    with open(path, "rb") as file:
        try:
            with zipfile.ZipFile(file) as archive:
                for entry in archive.infolist():
                    plain = (
                        entry.compress_type == zipfile.ZIP_STORED
                        and entry.compress_size == entry.file_size
                    )
                    if not plain or entry.external_attr:
                        raise ValueError(f"{entry.filename} is not as PyTorch writes it")
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"{damaged} has changed since it was written")
        except Exception as error:  # damaged archives raise errors of many types
            raise ValueError(" ".join(str(error).split())[:200]) from error


def copy(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Copy a file atomically."""
    with replacing(path) as temporary:
        shutil.copyfile(source, temporary)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as CSV atomically; all have the keys of the first row, which are the header."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
