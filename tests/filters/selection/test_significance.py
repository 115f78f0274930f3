"""Whether held-out gains are significant."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm

from kbf.filters.selection.cross_validation import significantly_better

F64 = torch.float64


@pytest.mark.parametrize("count", [2, 5, 20])
def test_gains_of_mean_zero_are_significant_as_rarely_as_two_normal_standard_errors(count):
    """However few there are: with the normal quantile it were 15 % of two, and 6 % of five."""
    trials, level = 20_000, float(norm.sf(2.0))
    gains = torch.randn(trials, count, generator=torch.Generator().manual_seed(count), dtype=F64)
    share = sum(significantly_better(each, 2.0) for each in gains) / trials
    assert abs(share - level) < 4 * math.sqrt(level * (1 - level) / trials)


def test_one_gain_is_never_significant():
    assert not significantly_better(torch.tensor([5.0], dtype=F64), 2.0)


def test_gains_that_are_all_equal_are_significant_if_they_are_positive():
    assert significantly_better(torch.full((5,), 0.1, dtype=F64), 2.0)
    assert not significantly_better(torch.zeros(5, dtype=F64), 2.0)
