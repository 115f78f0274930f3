"""Deadlines of fits: long computations check them between their steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kbf.runtime.errors import FitError

_end: ContextVar[float] = ContextVar("_end", default=float("inf"))


class DeadlineError(Exception):
    """A computation was stopped at its deadline."""


@contextmanager
def deadline(end: float) -> Iterator[None]:
    """Context in which `check_deadline` raises after a time, unless an outer deadline is earlier.

    The error of `check_deadline` leaves the context as a `FitError`.

    Args:
        end: a `time.perf_counter`.

    Raises:
        FitError: the computation was stopped.
    """
    token = _end.set(min(end, _end.get()))
    try:
        yield
    except DeadlineError as error:
        raise FitError("stopped at the end of the budget") from error
    finally:
        _end.reset(token)


def time_within_share(share: float) -> float:
    """Return the time (`time.perf_counter`) after a share of what is left until the deadline.

    Infinite without a deadline. Selections that can stop with what they have do so at this time.
    """
    now = time.perf_counter()
    return now + share * (_end.get() - now)


def check_deadline() -> None:
    """Raise a `DeadlineError` after the `deadline` in which this is called, if any.

    Loops whose steps take more than some milliseconds call it in each step.
    """
    if time.perf_counter() > _end.get():
        raise DeadlineError
