"""Deadlines: raised after their end, in threads as well, and restored afterwards."""

import time

import pytest

from kbf.runtime.deadline import check_deadline, deadline
from kbf.runtime.errors import FitError
from kbf.runtime.threads import side_by_side


def test_a_computation_is_stopped_after_its_deadline_only():
    check_deadline()
    with deadline(time.perf_counter() + 60):
        check_deadline()
    with pytest.raises(FitError, match="end of the budget"), deadline(time.perf_counter() - 1):
        check_deadline()
    check_deadline()


def test_an_outer_deadline_that_is_earlier_holds():
    with (
        pytest.raises(FitError),
        deadline(time.perf_counter() - 1),
        deadline(time.perf_counter() + 60),
    ):
        check_deadline()


def test_threads_have_the_deadline_of_their_caller():
    with pytest.raises(FitError), deadline(time.perf_counter() - 1):
        side_by_side(lambda k: check_deadline(), range(4))
