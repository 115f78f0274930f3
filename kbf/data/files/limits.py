"""Limits of what is read: images, videos and archives are small on disk and large in memory."""

from pathlib import Path
from typing import Any

# Unpacked size of all that is read of one file: 4 GiB.
MAX_BYTES = 2**32

# Absolute value of a measurement. Its square is finite.
MAX_NUMBER = 1e150

# Pixels of an image or a frame: 67 million.
MAX_PIXELS = 2**26


def check_bytes(count: int, where: Path | str) -> None:
    """Raises a ValueError if a file would take more than `MAX_BYTES` in memory."""
    if count > MAX_BYTES:
        raise ValueError(
            f"{where}: {count:,} bytes in memory, more than the limit of {MAX_BYTES:,}: "
            "split the recording"
        )


def check_pixels(width: int, height: int, where: Path | str) -> None:
    """Raises a ValueError if an image has more than `MAX_PIXELS` pixels."""
    if width * height > MAX_PIXELS:
        raise ValueError(
            f"{where} has {width} x {height} pixels, more than the limit of {MAX_PIXELS:,}: "
            "resize it"
        )


def stored_bytes(array: Any) -> int:
    """Returns the size of an array of HDF5 or Zarr in memory."""
    return int(array.size) * array.dtype.itemsize
