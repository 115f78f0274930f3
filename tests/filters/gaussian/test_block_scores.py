"""Which kinds of maps are run on which held-out parts."""

import pytest
import torch

from kbf.filters.gaussian.block_scores import MAX_PART_RATIO, Scored, raced

# Errors of three kinds on three parts; that of (2, 0) on the first is above the ratio.
ERRORS = {(0, 0): [1.0, 2.0, 3.0], (1, 0): [1.4, 1.0, 1.0], (2, 0): [1.6, 0.0, 0.0]}


@pytest.fixture
def calls():
    return []


def run_of(errors, calls):
    def run(pair, k):
        calls.append((pair, k))
        found = errors[pair][k]
        return None if found is None else (f"filter {pair} {k}", torch.tensor([9.0, found]))

    return run


def test_kinds_that_lose_on_a_part_are_not_run_on_the_others(calls):
    found = raced(list(ERRORS), run_of(ERRORS, calls), 3)
    assert MAX_PART_RATIO == 1.5
    assert ((2, 0), 0) in calls and ((2, 0), 1) not in calls
    assert ((0, 0), 1) in calls and ((0, 0), 2) not in calls, "twice the least on the second part"
    assert list(found) == [(1, 0)]
    assert found[1, 0].filters == [f"filter (1, 0) {k}" for k in range(3)]
    assert found[1, 0].errors.tolist() == [[9.0, pytest.approx(e)] for e in ERRORS[1, 0]]
    assert float(found[1, 0].errors.mean(0).min()) == pytest.approx(3.4 / 3)


def test_scores_are_compared_on_common_parts():
    one = Scored([], torch.tensor([[1.0, 9.0], [9.0, 9.0]]))
    assert one.better_than(Scored([], torch.tensor([[2.0, 3.0]])))
    assert not one.better_than(Scored([], torch.tensor([[2.0, 3.0], [2.0, 3.0]])))


def test_after_the_time_is_over_the_first_result_remains(calls):
    errors = {(0, 0): [None, 1.0], (1, 0): [1.2, 1.0], (2, 0): [1.0, 1.0]}
    found = raced(list(errors), run_of(errors, calls), 2, until=0.0)
    assert calls == [((0, 0), 0), ((1, 0), 0)] and list(found) == [(1, 0)]
    assert found[1, 0].errors.shape == (1, 2)
    best = Scored([], torch.tensor([[0.9]]))
    assert not raced([(2, 0)], run_of(errors, calls), 2, best, until=0.0) and len(calls) == 2


def test_kinds_are_compared_with_the_best_so_far(calls):
    best = Scored([], torch.tensor([[0.9], [0.9], [0.9]]))
    errors = {(0, 0): [1.0, 1.3, 1.4], (1, 0): [1.3, 1.3, 1.3]}
    assert list(raced(list(errors), run_of(errors, calls), 3, best)) == [(1, 0)]
    best = Scored([], torch.tensor([[0.1], [0.9], [0.9]]))
    assert not raced(list(errors), run_of(errors, calls), 3, best)


def test_kinds_without_a_filter_are_left_out(calls):
    errors = {(0, 0): [1.0, None, 1.0], (1, 0): [1.0, 1.0, 1.0]}
    found = raced(list(errors), run_of(errors, calls), 3)
    assert list(found) == [(1, 0)] and ((0, 0), 2) not in calls
    assert not raced([(0, 0)], run_of({(0, 0): [None]}, calls), 1)
