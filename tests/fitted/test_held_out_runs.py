"""Held-out parts are filtered within the budget of a model selection, by a clock of the test."""

import math
from types import SimpleNamespace

import pytest
import torch

from kbf.filters.gaussian.kalman import KalmanFilter, LearnedKalman
from kbf.filters.selection.auto import ModelSelection
from kbf.fitted import held_out_runs
from kbf.fitted.held_out_runs import MIN_STEPS_IN_TIME, STEPS_OF_TRIAL, held_out, run_through
from kbf.recording import Recording

FOLDS, STEPS = 3, 900


def recordings() -> list[Recording]:
    z = torch.randn(FOLDS * STEPS, 1, generator=torch.Generator().manual_seed(0)).double()
    return [Recording(part, part.clone()) for part in z.split(STEPS)]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(held_out_runs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    return now


def steps_within(budget: float, clock: list[float]) -> list[int]:
    """Return how many steps of each fold are filtered, at a second for each step."""

    class Slow(KalmanFilter):
        def predict(self, state, *, control=None, generator=None):
            clock[0] += 1
            return super().predict(state, control=control, generator=generator)

    data = recordings()
    net = ModelSelection(LearnedKalman())
    net.held_out_filters = [(Slow(LearnedKalman().fit(data).model), [fold]) for fold in data]
    return run_through(held_out(net, data, until=budget)).filters.bincount().tolist()


def test_without_a_budget_all_steps_are_filtered(clock):
    assert steps_within(math.inf, clock) == [STEPS] * FOLDS


def test_folds_share_the_time_that_is_left(clock):
    budget = 1500.0
    found = steps_within(budget, clock)
    assert clock[0] <= 1.02 * budget
    assert min(found) > 0.9 * (budget - STEPS_OF_TRIAL) / FOLDS and max(found) < STEPS


def test_when_the_time_is_over_each_fold_has_some_steps(clock):
    assert steps_within(-1.0, clock) == [MIN_STEPS_IN_TIME] * FOLDS
