"""Deadlines: raised after their end, in threads as well, and restored afterwards."""

import time

import pytest

from kbf.runtime.deadline import check_deadline, deadline, time_within_share
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


def test_a_share_of_the_time_that_is_left():
    assert time_within_share(0.5) == float("inf")
    now = time.perf_counter()
    with deadline(now + 100):
        assert now + 50 <= time_within_share(0.5) <= now + 51
