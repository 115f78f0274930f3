"""Tensor files: atomic writes, and a check of the sizes of tensors after reading."""

import os
from typing import Any

import torch
from torch import Tensor

from kbf.runtime.atomic_files import replacing

# Bound of the entries of a file.
MAX_ENTRIES = 100_000

# Bound of the size of all tensors, in sizes of the file: tensors may share their storage.
MAX_COPIES = 16


def write_tensors(contents: Any, path: str | os.PathLike[str]) -> None:
    """Write ``contents`` with `torch.save`, atomically.

    PyTorch receives an open file, since it stores a part of a file name.
    """
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(contents, file)


def check_tensors(contents: Any, size: int) -> None:
    """Raise a ValueError unless the tensors in nested dicts and lists are dense and fully stored.

    A small file may hold a tensor of 10^12 entries that repeats a single number (stride 0); code
    that reads all of them would not end.

    Args:
        contents: as `torch.load` returns it.
        size: bytes of the file.
    """
    waiting, count, total = [contents], 0, 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MAX_ENTRIES:
            raise ValueError(f"it has more than {MAX_ENTRIES:,} entries, or contains itself")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, Tensor):
            plain = (
                type(value) in (Tensor, torch.nn.Parameter)
                and value.layout == torch.strided
                and not value.is_quantized
            )
            if not plain or value.is_meta or value.nbytes > value.untyped_storage().nbytes():
                raise ValueError("it holds a tensor that is not fully stored")
            total += value.nbytes
    if total > MAX_COPIES * size:
        raise ValueError(f"its tensors are more than {MAX_COPIES} times as large as the file")
