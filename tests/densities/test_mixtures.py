"""Which features and starts of a mixture are compared, by a record of the calls."""

from __future__ import annotations

import pytest
import torch

from kbf.densities import mixtures
from kbf.densities.base import features_of
from kbf.densities.mixtures import Fitted, fit_maps
from kbf.rkhs.kernels import gaussian


@pytest.fixture
def runs(monkeypatch):
    """Calls of `expectation_maximisation`; the score is the next of a list, else 0."""
    calls, scores = [], []

    def run(features, phi, y, shares, ridge, degrees, background, rounds):
        calls.append((features, shares, ridge, degrees, background is not None, rounds))
        score = scores.pop(0) if scores else 0.0
        density = mixtures.MapMixture(features, phi, phi, phi, phi)
        return Fitted(density, score, torch.full_like(shares, len(calls)), ridge)

    monkeypatch.setattr(mixtures, "expectation_maximisation", run)
    return calls, scores


@pytest.fixture
def points():
    draw = torch.Generator().manual_seed(0)
    u, y = (torch.randn(20, k, dtype=torch.float64, generator=draw) for k in (2, 1))
    features = [
        features_of(lambda a, b, w=w: gaussian(a, b, bandwidth=w), u, 5) for w in (0.5, 1.0, 2.0)
    ]
    return features, u, y


def test_one_map_starts_from_all_points_with_each_of_the_features(runs, points):
    calls, scores = runs
    scores += [0.0, 2.0, 1.0, 5.0, 7.0, 6.0]
    best = fit_maps(*points, points[2], maps=1, ridges=(0.3, 3.0, 30.0))
    assert [call[0] for call in calls[:3]] == points[0], "12 rounds with each of the features"
    assert all(torch.equal(call[1], torch.ones(20, 1).double()) for call in calls[:3])
    assert [call[2:] for call in calls[:3]] == [(3.0, None, False, 12)] * 3
    assert [call[2:] for call in calls[3:]] == [(r, None, False, 60) for r in (0.3, 3.0, 30.0)]
    assert all(call[0] is points[0][1] and (call[1] == 2).all() for call in calls[3:])
    assert best.score == 7.0 and best.ridge == 3.0


def test_several_maps_start_from_the_best_of_random_branches(runs, points):
    """All starts are run with the first features; the best goes on with each of the features."""
    calls, scores = runs
    scores += [0.0, 0.0, 9.0, 0.0]
    fit_maps(*points, points[2], maps=2, tries=4)
    starts = list(mixtures.branches(points[1], points[2], 2, 4, 0))
    assert len(calls) == 4 + 3 + 3
    for call, start in zip(calls[:4], starts, strict=True):
        assert call[0] is points[0][0] and torch.equal(call[1], start)
    assert [call[0] for call in calls[4:7]] == points[0]
    assert all((call[1] == 3).all() for call in calls[4:7]), "the third start has the best score"


def test_clutter_starts_with_a_fifth_of_each_point(runs, points):
    calls, _ = runs
    fit_maps(*points, points[2], clutter=True, student=True)
    start = torch.tensor([0.8, 0.2], dtype=torch.float64).expand(20, 2)
    assert all(torch.equal(call[1], start) for call in calls[:3])
    assert all(call[3:5] == (4.0, True) for call in calls)
