"""Tensor files: atomic writes, and a check of the sizes of tensors after reading."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from kbf.runtime.atomic_files import replacing

MOST_ENTRIES, MOST_COPIES = 100_000, 16
"""Most entries of a file, and most times that all tensors may exceed its size (storage is shared)."""


def write_tensors(contents: Any, path: str | os.PathLike[str]) -> None:
    """Write by `torch.save`, whole or not at all.

    PyTorch gets an open file, since it would store a part of the file name.
    """
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(contents, file)


def check_tensors(contents: Any, size: int) -> None:
    """Raise a ValueError unless the tensors in nested dicts and lists are dense and fully stored.

    A file of some bytes may hold a tensor of 10^12 entries that repeats a single
    number (stride 0): nothing that looks at all of them would come to an end.

    Args:
        contents: as `torch.load` returns it.
        size: bytes of the file.
    """
    waiting, count, total = [contents], 0, 0
    while waiting:
        value = waiting.pop()
        count += 1
        if count > MOST_ENTRIES:
            raise ValueError(f"it has more than {MOST_ENTRIES:,} entries, or contains itself")
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
    if total > MOST_COPIES * size:
        raise ValueError(f"its tensors are more than {MOST_COPIES} times as large as the file")
