"""Files of tensors: written whole or not at all, read only if they are as large as they say."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from kbf.runtime.atomic_files import replacing

MOST_ENTRIES, MOST_COPIES = 100_000, 16
"""Entries of a file, and times that all tensors together may be larger than it (some share their numbers), at most."""


def write_tensors(contents: Any, path: str | os.PathLike[str]) -> None:
    """`torch.save` in one step. PyTorch gets an open file: of a name it would take but some signs, and put a part of it inside."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        torch.save(contents, file)


def check_tensors(contents: Any, size: int) -> None:
    """Raise a ValueError unless every tensor in nested dicts and lists is a plain one, with as many numbers as it has entries.

    A file of some bytes may hold a tensor that says it has 10^12 entries and repeats a single
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
                raise ValueError("it holds a tensor that is not as large as it says")
            total += value.nbytes
    if total > MOST_COPIES * size:
        raise ValueError(f"its tensors are more than {MOST_COPIES} times as large as the file")
