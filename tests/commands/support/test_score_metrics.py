"""Metrics of a scored run."""

import math

import pytest
import torch

from kbf.commands.support.score_metrics import score_metrics, settled_error
from kbf.evaluation.score import Score
from kbf.recording import Recording


def scored(lengths: list[int], errors: list[float]) -> tuple[Score, list[Recording]]:
    """Recordings whose estimates are wrong by one in the first ten steps and by less later."""
    recordings, estimates = [], []
    for n, error in zip(lengths, errors, strict=True):
        z = torch.randn(n, 2, generator=torch.Generator().manual_seed(n), dtype=torch.float64)
        left = torch.where(torch.arange(n) < 10, 1.0, error)
        recordings.append(Recording(z, z))
        estimates.append(z + left[:, None])
    mse = torch.tensor([10.0] * len(lengths), dtype=torch.float64)
    return Score(mse, estimates, {}), recordings


def test_the_settled_error_leaves_out_the_first_ten_steps_of_each_recording():
    result, recordings = scored([12, 25], [0.5, 0.1])
    expected = 2 * (2 * 0.25 + 15 * 0.01) / 17
    assert score_metrics(result, None, recordings)["test.mse_settled"] == pytest.approx(expected)


def test_steps_with_unknown_states_do_not_count():
    result, recordings = scored([30], [0.5])
    recordings[0].states[20:] = torch.nan
    assert settled_error(result, recordings) == pytest.approx(2 * 0.25)


def test_short_recordings_have_no_settled_error():
    result, recordings = scored([4, 10], [0.5, 0.5])
    assert math.isnan(settled_error(result, recordings))
    assert score_metrics(result, None, recordings)["test.mse_settled"] is None
