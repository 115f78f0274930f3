"""Saves and restores the state of a running filter."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch import Tensor

from kbf.filters.protocols import Filter, S
from kbf.runtime.atomic_files import check_archive
from kbf.runtime.tensor_files import check_tensors, write_tensors


def save_state(state: Any, path: str | os.PathLike[str], **others: Tensor) -> None:
    """Write the state of a running filter and ``others`` atomically."""
    write_tensors({**state._asdict(), **others}, path)


def read_leaves(
    path: str | os.PathLike[str], device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """What `save_state` wrote, by name.

    Raises:
        ValueError: the file is damaged (the checksums in it say so, if a bit has changed), or holds
            something else.
    """
    try:
        check_archive(path)
        leaves = torch.load(path, weights_only=True, map_location=device)
        check_tensors(leaves, os.stat(path).st_size)
    except OSError:
        raise
    except Exception as error:  # whatever a file that is none of ours makes of the reader
        raise ValueError(
            f"{path} is damaged, or not the state of a filter: {type(error).__name__}"
        ) from error
    named = isinstance(leaves, dict) and all(
        isinstance(n, str) and isinstance(leaf, Tensor) for n, leaf in leaves.items()
    )
    if not named:
        raise ValueError(f"{path} is not the state of a filter: it holds {type(leaves).__name__}")
    return leaves


def load_state(filter: Filter[S], path: str | os.PathLike[str]) -> S:
    """Read a state written by `save_state` back for ``filter``.

    Raises:
        ValueError: the file is damaged, or holds the state of another kind of filter, or NaN.
    """
    like: Any = filter.init(1)
    leaves = read_leaves(path, like[0].device)
    if not set(like._fields) <= set(leaves):
        raise ValueError(
            f"{path} holds a state of {sorted(map(str, leaves))}, "
            f"this filter's has {sorted(like._fields)}"
        )
    for name, leaf in zip(like._fields, like, strict=True):
        if leaves[name].shape[1:] != leaf.shape[1:]:
            raise ValueError(
                f"{path}: {name} is {tuple(leaves[name].shape[1:])} wide, "
                f"this filter needs {tuple(leaf.shape[1:])}"
            )
        if leaves[name].dtype != leaf.dtype:
            raise ValueError(
                f"{path}: {name} is {leaves[name].dtype}, this filter works in {leaf.dtype}"
            )
        if bool((leaves[name].isnan() | leaves[name].isposinf()).any()):
            raise ValueError(f"{path}: {name} holds NaN or infinity: start without this file")
    return cast(S, type(like)(*(leaves[name] for name in like._fields)))
