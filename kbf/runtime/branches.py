"""Whether a step computes all branches: while it is compiled or exported.

Otherwise a branch that no element of the batch takes is left out, which depends on values.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_ALL: ContextVar[bool] = ContextVar("all_branches", default=False)


def computes_all_branches() -> bool:
    """Return whether a step may not depend on values."""
    return torch.compiler.is_compiling() or _ALL.get()


@contextmanager
def all_branches() -> Iterator[None]:
    """Context in which steps compute all branches, as exported ones do."""
    token = _ALL.set(True)
    try:
        yield
    finally:
        _ALL.reset(token)
