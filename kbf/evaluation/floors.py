"""The least error that any filter or smoother can reach: particle filters that know the true model."""

from __future__ import annotations

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
    """The least error that any filter can reach: the particle filter that knows the true model, started as all filters are.

    Args:
        problem: the true model.
        train: its states are the particles before the first move.
        test: sequences with the observations that ``problem`` describes.
        particles: how many.
        seed: of the particles.
        covariances: as of `kbf.evaluation.score.score`; with so many particles they take their
            time.
    """
    return score(
        true_filter(problem, train, particles),
        test,
        seed=seed,
        batch_size=4,
        covariances=covariances,
    )


def data_floor(
    data: Data, *, particles: int = 20_000, seed: int = 0, covariances: bool = False
) -> Score | None:
    """The floor of a data set's test part, or None where no true model is known."""
    if data.problem is None:
        return None
    return floor(
        data.problem,
        data.train,
        data.decoded,
        particles=particles,
        seed=seed,
        covariances=covariances,
    )


def smoothing_floor(
    data: Data, *, lag: int | None = None, particles: int = 20_000, seed: int = 0
) -> Score | None:
    """The least error that any smoother can reach: the particle smoother that knows the true model.

    The way back goes over 500 of the particles (`kbf.filters.kernel.smoother`). None where no true
    model is known, or not the density of its moves.
    """
    if data.problem is None or not isinstance(data.problem, KnownTransition):
        return None
    return score_smoothed(
        true_filter(data.problem, data.train, particles), data.decoded, lag=lag, seed=seed
    )


def floor_ahead(
    data: Data, horizon: int, *, particles: int = 20_000, seed: int = 0
) -> Ahead | None:
    """The least error of any prediction 1 to h steps ahead, or None where no true model is known."""
    if data.problem is None:
        return None
    return score_ahead(
        true_filter(data.problem, data.train, particles), data.decoded, horizon, seed=seed
    )


def true_filter(problem: StateSpace, train: list[Recording], particles: int) -> BootstrapFilter:
    """The particle filter that knows the true model, started from the training states."""
    return BootstrapFilter(problem, torch.cat([s.states for s in train]).double(), particles)
