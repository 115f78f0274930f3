"""Thread and memory settings that make small steps fast on a CPU.

The commands apply them; a program may do so once, at its start.
"""

from __future__ import annotations

import ctypes
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import ThreadPool
from typing import TypeVar

import torch

A, B = TypeVar("A"), TypeVar("B")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Names of glibc's ``mallopt``."""
CORES = torch.get_num_threads()
"""Threads at the start of the process: the number of its cores, or ``OMP_NUM_THREADS``."""


def tune_process(threads: int | None = None) -> None:
    """Flush denormal numbers to zero, keep freed memory at hand, and set the number of threads.

    Arithmetic with denormal numbers is several times slower. And glibc gives arrays of more than
    128 KiB back to the system as soon as they are freed: a filter's step, which needs such arrays
    again and again, would spend most of its time on page faults.

    Args:
        threads: of PyTorch; None leaves them as they are. One is fastest where matrices are small.

    Raises:
        ValueError: no thread at all.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    torch.set_flush_denormal(True)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        mallopt = None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest that it takes
        mallopt(M_TRIM_THRESHOLD, 2**30)
    if threads is not None:
        torch.set_num_threads(threads)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context or decorator with one thread in PyTorch: small products run faster so."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(f: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Returns f of each item, in order, computed in one thread for each core of the process.

    In a worker process the items are computed one by one.

    For long work in compiled code, which does not hold Python's interpreter. Ctrl-C does not wait
    for it.
    """
    several = list(items)
    threads = min(CORES if multiprocessing.parent_process() is None else 1, len(several))
    if threads < 2:
        return [f(each) for each in several]
    with ThreadPool(threads) as pool:
        return pool.map(f, several, chunksize=1)
