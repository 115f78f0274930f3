"""Thread and memory settings that make small steps fast on a CPU.

The commands apply them; a program may call `tune_process` once, at its start.
"""

import ctypes
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from contextvars import copy_context
from multiprocessing.pool import ThreadPool
from typing import TypeVar

import torch

A, B = TypeVar("A"), TypeVar("B")

# Parameters of glibc's ``mallopt``.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3

# Threads at the start of the process: the number of its cores, or ``OMP_NUM_THREADS``.
CORES = torch.get_num_threads()


def tune_process(threads: int | None = None) -> None:
    """Flush denormal numbers to zero, keep freed memory at hand, and set the number of threads.

    Arithmetic with denormal numbers is several times slower. glibc returns arrays of more than
    128 KiB to the system as soon as they are freed; a filter's step, which allocates such arrays
    repeatedly, would spend most of its time on page faults.

    Args:
        threads: of PyTorch; None does not change them. One is fastest where matrices are small.

    Raises:
        ValueError: ``threads`` is below 1.
    """
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    torch.set_flush_denormal(True)
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        mallopt = None
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 32 * 2**20)  # the largest value that it accepts
        mallopt(M_TRIM_THRESHOLD, 2**30)
    if threads is not None:
        torch.set_num_threads(threads)


def release_memory() -> None:
    """Return freed memory to the system, in which the teardown of PyTorch's libraries needs some.

    Another C library than glibc keeps it.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def one_thread() -> Iterator[None]:
    """Context or decorator with one thread in PyTorch, which is faster for small products."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def limited_threads(threads: int | None) -> Iterator[None]:
    """Context with a number of threads in PyTorch and in the libraries of linear algebra.

    None changes nothing.

    Raises:
        ValueError: ``threads`` is below 1.
    """
    if threads is None:
        yield
        return
    if threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    before = torch.get_num_threads()
    try:
        from threadpoolctl import threadpool_limits as limits
    except ImportError:  # comes with scikit-learn
        limits = nullcontext
    with limits(threads):
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def side_by_side(f: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """Returns f of each item, in order, computed in one thread for each core of the process.

    In a worker process the items are computed one by one. Threads have the context variables of the
    caller, such as its `kbf.runtime.deadline`. Suited to long work in compiled code,
    which releases Python's global interpreter lock. Ctrl-C does not wait for it.
    """
    several = list(items)
    threads = min(CORES if multiprocessing.parent_process() is None else 1, len(several))
    if threads < 2:
        return [f(each) for each in several]
    tasks = [(copy_context(), each) for each in several]
    with ThreadPool(threads) as pool:
        return pool.map(lambda task: task[0].run(f, task[1]), tasks, chunksize=1)
