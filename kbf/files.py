"""Files that are whole or absent: written under a temporary name, then moved into place."""

from __future__ import annotations

import csv
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Rows
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A temporary path beside ``path`` to write to; it takes the place of ``path`` at the end, or vanishes on an error.

    Raises:
        OSError: ``path`` is a folder, or its folder cannot be made.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def copy(source: str | os.PathLike[str], path: str | os.PathLike[str]) -> None:
    """Copy a file in one step."""
    with replacing(path) as temporary:
        shutil.copyfile(source, temporary)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file in one step."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], values: Mapping[str, Any]) -> None:
    """Write a JSON file in one step."""
    write_text(path, json.dumps(values, indent=2) + "\n")


def write_csv(path: str | os.PathLike[str], rows: Rows[Mapping[str, Any]]) -> None:
    """Write rows of one kind as CSV in one step; the keys of the first row are the header."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
