"""Bayes-optimal errors ("floors") of filters, smoothers and forecasts, by particle filters."""

from typing import Any

import torch

from kbf.data.dataset import Data
from kbf.evaluation.score import Ahead, Score, score, score_ahead, score_smoothed
from kbf.filters.particle.bootstrap import BootstrapFilter
from kbf.recording import Recording
from kbf.ssm import KnownTransition, StateSpace


def floor(
    problem: StateSpace,
    train: list[Recording],
    test: list[Recording],
    *,
    particles: int = 20_000,
    seed: int = 0,
    covariances: bool = False,
) -> Score:
    """The Bayes-optimal error of a filter: that of the particle filter of the true model.

    Args:
        problem: the true model.
        train: its states are the initial particles, as for all filters.
        test: recordings with the observations that ``problem`` describes.
        particles: their number.
        seed: of the particles.
        covariances: as of `kbf.evaluation.score.score`; slow with so many particles.
    """
    return score(
        true_filter(problem, train, particles),
        test,
        seed=seed,
        batch_size=4,
        covariances=covariances,
    )


def data_floor(data: Data, **settings: Any) -> Score | None:
    """The `floor` of the test part of a data set; None without a true model."""
    if data.problem is None:
        return None
    return floor(data.problem, data.train, data.decoded, **settings)


def smoothing_floor(
    data: Data, *, lag: int | None = None, particles: int = 20_000, seed: int = 0
) -> Score | None:
    """The Bayes-optimal error of a smoother: that of the particle smoother of the true model.

    The backward pass uses 500 of the particles (`kbf.filters.particle.bootstrap`). None without a
    true model, or without its transition density.
    """
    if data.problem is None or not isinstance(data.problem, KnownTransition):
        return None
    return score_smoothed(
        true_filter(data.problem, data.train, particles), data.decoded, lag=lag, seed=seed
    )


def floor_ahead(
    data: Data, horizon: int, *, particles: int = 20_000, seed: int = 0
) -> Ahead | None:
    """The Bayes-optimal error of forecasts 1 to h steps ahead; None without a true model."""
    if data.problem is None:
        return None
    return score_ahead(
        true_filter(data.problem, data.train, particles), data.decoded, horizon, seed=seed
    )


def true_filter(problem: StateSpace, train: list[Recording], particles: int) -> BootstrapFilter:
    """The particle filter of the true model, started from the training states."""
    return BootstrapFilter(problem, torch.cat([s.states for s in train]).double(), particles)
