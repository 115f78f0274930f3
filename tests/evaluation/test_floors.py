"""Floors of data sets, with a true model and without."""

from __future__ import annotations

import torch

from kbf.data.dataset import Data
from kbf.data.synthetic import SyntheticData
from kbf.evaluation.floors import data_floor, floor, floor_ahead, smoothing_floor
from kbf.ssm import StateSpace, rotation


def rotations(problem: StateSpace | None) -> Data:
    made = SyntheticData(rotation(), n_train=20, n_test=30)
    return Data(made.train, made.test, problem, made.test)


def test_a_data_set_has_the_floor_of_its_true_model():
    data = rotations(rotation())
    found = data_floor(data, particles=200)
    assert data.problem is not None and found is not None
    expected = floor(data.problem, data.train, data.decoded, particles=200)
    torch.testing.assert_close(found.mse, expected.mse)
    assert smoothing_floor(data, particles=200) is not None
    assert floor_ahead(data, 2, particles=200) is not None


def test_without_a_true_model_there_is_no_floor():
    data = rotations(None)
    assert data_floor(data) is smoothing_floor(data) is floor_ahead(data, 2) is None
