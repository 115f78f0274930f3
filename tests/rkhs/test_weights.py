"""Weights that cancel, and those that do not."""

import math

import torch

from kbf.rkhs.weights import divisor, normalised

F64 = torch.float64


def test_weights_are_divided_by_their_sum_unless_they_cancel():
    weights = torch.tensor([[3.0, -1.0], [1.0, -1.0], [-2.0, 1.0], [0.0, 0.0]], dtype=F64)
    found = normalised(weights, torch.full((4, 2), 0.5, dtype=F64))
    assert found.tolist() == [[1.5, -0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]]
    cancel, sums = divisor(weights)
    assert cancel[:, 0].tolist() == [False, True, True, True]
    assert sums[:, 0].tolist() == [2.0, 1.0, 1.0, 1.0]


def test_nan_is_no_cancellation():
    weights = torch.tensor([[math.nan, 1.0]], dtype=F64)
    assert not divisor(weights)[0].any()
    assert normalised(weights, torch.zeros(1, 2, dtype=F64)).isnan().all()
