"""Trials: what a sensor is worth, what rows are worth, and where the error is large."""

import math

import pytest
import torch

from kbf.fitted.trials import (
    SHARES,
    Trial,
    Trials,
    gain_of,
    mean_squares,
    most_helpful,
    run_trials,
    weak_regions,
)
from kbf.recording import Recording
from kbf.runtime.errors import FitError


def walk(n, generator, phi=0.9):
    z = torch.zeros(n, 1, dtype=torch.float64)
    e = torch.randn(n, 1, dtype=torch.float64, generator=generator)
    for t in range(1, n):
        z[t] = phi * z[t - 1] + e[t]
    return z


def recording(n=500):
    """A state, a sensor of noise 0.2, and a column that is noise alone."""
    generator = torch.Generator().manual_seed(1)
    z = walk(n, generator)
    noise = torch.randn(n, 2, dtype=torch.float64, generator=generator)
    x = torch.cat([z + 0.2 * noise[:, :1], noise[:, 1:]], 1)
    return [Recording(z, x, None, None)]


@pytest.fixture(scope="module")
def trials():
    return run_trials(recording(), {"good": [0], "useless": [1]}, model="kalman")


def test_the_error_without_a_sensor_is_its_worth(trials):
    assert trials.model == "kalman" and trials.whole.nmse < 0.05
    assert trials.without["good"].nmse > 0.8  # nothing is known about the state then
    assert trials.without["useless"].nmse == pytest.approx(trials.whole.nmse, rel=0.05)


def test_the_learning_curve_has_halves_and_quarters(trials):
    assert [n for n, _ in trials.curve] == [round(share * 400) for share in SHARES]
    assert trials.curve[-1][1] is trials.whole


def trial(nmse, blocks=8, spread=0.01):
    scores = nmse * (1 + spread * torch.linspace(-1, 1, blocks, dtype=torch.float64))
    return Trial(torch.zeros(1, 1), torch.zeros(1, 1), scores)


@pytest.mark.parametrize(
    ("half", "without", "words"),
    [
        (0.4, [], "More rows would help most"),
        (0.2, [0.6, 0.8], "Another sensor would help most"),
        (0.2, [0.2, 0.2], "Neither more rows nor another sensor"),
        (0.2, [], "worth of another one is not known"),
    ],
)
def test_what_helps_most(half, without, words):
    whole = trial(0.2)
    each = {str(k): trial(value) for k, value in enumerate(without)}
    found = Trials("kalman", whole, [(200, trial(half)), (400, whole)], each, [])
    assert words in most_helpful(found)
    assert "no improvement is expected" in most_helpful(found._replace(whole=trial(1e-4)))
    assert "too few rows" in most_helpful(found._replace(curve=[(400, whole)], without={}))


def test_a_gain_within_chance_is_none():
    noisy = torch.tensor([0.1, 0.9, 0.2, 0.8], dtype=torch.float64)
    before = Trial(torch.zeros(1, 1), torch.zeros(1, 1), noisy)
    gain, worth = gain_of(before, before._replace(scores=noisy.flip(0) * 0.9))
    assert gain == pytest.approx(0.1) and not worth


def test_the_weakest_region_is_where_errors_are_large():
    z = torch.linspace(0, 10, 500, dtype=torch.float64)[:, None]
    error = torch.where(z > 8, 3.0, 1.0)
    found = weak_regions(Trial(z, error, torch.ones(1)))
    assert [each.column for each in found] == [0]
    assert found[0].low == pytest.approx(8, abs=0.1) and found[0].high == 10
    assert found[0].ratio == pytest.approx(9 / (0.2 * 9 + 0.8), rel=0.05)
    assert not weak_regions(Trial(z, torch.ones_like(z), torch.ones(1)))
    means = mean_squares(Trial(z, error, torch.ones(1)), 0)
    assert means[:, 1].tolist() == pytest.approx([1, 1, 1, 1, 3], rel=0.01)


def test_trials_that_cannot_be_made():
    with pytest.raises(ValueError, match="model=arima is none of"):
        run_trials(recording(), {"good": [0, 1]}, model="arima")
    with pytest.raises(FitError, match="100 rows"):
        run_trials(recording(60), {"good": [0, 1]})
    assert not run_trials(recording(150), {"both": [0, 1]}, model="mean").without
    assert math.isnan(Trial(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1)).error)
