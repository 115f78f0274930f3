"""How much a file of somebody's may become in memory: pictures, videos and archives are small on the disk and large behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Of all that is read of a file, unpacked, at most: 4 GiB.
LARGEST_BYTES = 2**32

# A measurement, at most: its square is still a number.
LARGEST_NUMBER = 1e150

# Pixels of a picture or a frame, at most: 67 million.
LARGEST_PICTURE = 2**26


def check_bytes(count: int, where: Path | str, largest: int | None = None) -> None:
    """Raise a ValueError if a file would become more than `LARGEST_BYTES` in memory (or ``largest``)."""
    largest = LARGEST_BYTES if largest is None else largest
    if count > largest:
        raise ValueError(
            f"{where} becomes {count:,} bytes in memory, more than the {largest:,} that are read: split the recording"
        )


def check_pixels(width: int, height: int, where: Path | str) -> None:
    """Raise a ValueError if a picture has more than `LARGEST_PICTURE` pixels."""
    if width * height > LARGEST_PICTURE:
        raise ValueError(
            f"{where} has {width} x {height} pixels, more than the {LARGEST_PICTURE:,} that are read: make it smaller"
        )


def stored_bytes(array: Any) -> int:
    """What an array of HDF5 or Zarr becomes in memory."""
    return int(array.size) * array.dtype.itemsize
