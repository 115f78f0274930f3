"""Adapters that run the filters of other libraries.

filterpy runs one sequence and one step at a time, dynamax compiles the whole recursion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.filters.gaussian.kalman import LinearModel
from kbf.filters.gaussian.moments import GaussianState
from kbf.ssm import StateSpaceModel, oscillatory

OMEGA, BETA, M = 0.4, 0.4, 8.0
"""Of the oscillatory model."""


class Side(NamedTuple):
    """One implementation of a task: its function, and the allowed difference from ours.

    None: the note explains why there is no bound.
    """

    call: Callable[[], Tensor]
    tolerance: float | None = 1e-8
    note: str = ""


def turning() -> StateSpaceModel:
    """The oscillatory model, started from a Gaussian."""
    return oscillatory(omega=OMEGA, beta=BETA, M=M)._replace(
        P0=0.1 * torch.eye(2, dtype=torch.float64)
    )


def move(xp: Any, z: Any) -> Any:
    """The oscillatory model's f, in numpy or jax.numpy."""
    theta = xp.arctan2(z[1], z[0]) + OMEGA
    return (1 + BETA * xp.sin(M * theta)) * xp.stack([xp.cos(theta), xp.sin(theta)])


def jacobian(xp: Any, z: Any) -> Any:
    """The Jacobian of f, written out."""
    theta = xp.arctan2(z[1], z[0]) + OMEGA
    along = xp.stack([xp.cos(theta), xp.sin(theta)])
    turn = BETA * M * xp.cos(M * theta) * along + (1 + BETA * xp.sin(M * theta)) * xp.stack(
        [-along[1], along[0]]
    )
    return xp.outer(turn, xp.stack([-z[1], z[0]]) / (z @ z))


def by_filterpy(
    one: Callable[[], Any],
    model: LinearModel | StateSpaceModel,
    obs: Tensor,
    update: Callable[[Any, Any], None],
    before: Callable[[Any], None] = lambda filter: None,
) -> Tensor:
    """Run a filter of filterpy over each sequence; ``before`` each move."""
    means = torch.empty(*obs.shape[:2], len(model.m0), dtype=torch.float64)
    for b, sequence in enumerate(obs.numpy()):
        filter = one()
        filter.x, filter.P, filter.Q, filter.R = (
            v.numpy().copy() for v in (model.m0, model.P0, model.Q, model.R)
        )
        for t, x in enumerate(sequence):
            before(filter)
            filter.predict()
            update(filter, x)
            means[b, t] = torch.from_numpy(filter.x)
    return means


def by_numpy(
    resample: Callable[[Any], Any], model: StateSpaceModel, start: Any, obs: Tensor
) -> Tensor:
    """A bootstrap filter as one writes it in NumPy, over each sequence.

    ``resample``: weights -> numbers of particles.
    """
    random, n = np.random.default_rng(0), len(start)
    root, precision = np.linalg.cholesky(model.Q.numpy()), np.linalg.inv(model.R.numpy())
    means = torch.empty(obs.shape, dtype=torch.float64)
    for b, sequence in enumerate(obs.numpy()):
        z, w = start[random.integers(n, size=n)], np.full(n, 1 / n)
        for t, x in enumerate(sequence):
            if 1 / (w @ w) < n / 2:
                z, w = z[resample(w)], np.full(n, 1 / n)
            z = move(np, z.T).T + random.standard_normal(z.shape) @ root.T
            exponent = -0.5 * ((x - z) @ precision * (x - z)).sum(1)
            w = w * np.exp(exponent - exponent.max())
            w = w / w.sum()
            means[b, t] = torch.from_numpy(w @ z)
    return means


def numbers(library: Callable[[str], Any]) -> Callable[[Tensor], Any]:
    """Tensor -> jax array, in float64, which jax requires as a setting."""
    library("jax").config.update("jax_enable_x64", True)
    return lambda tensor: library("jax.numpy").asarray(tensor.numpy())


def of_dynamax(library: Callable[[str], Any], moved: GaussianState, model: StateSpaceModel) -> Any:
    """The oscillatory model as dynamax has it, which starts from the first predicted moments."""
    to_jax, xp = numbers(library), library("jax.numpy")
    return library("dynamax.nonlinear_gaussian_ssm").ParamsNLGSSM(
        initial_mean=to_jax(moved.mean[0]),
        initial_covariance=to_jax(moved.cov[0]),
        dynamics_function=lambda z: move(xp, z),
        dynamics_covariance=to_jax(model.Q),
        emission_function=lambda z: z,
        emission_covariance=to_jax(model.R),
    )


def by_dynamax(library: Callable[[str], Any], obs: Tensor, one: Callable[[Any], Any]) -> Side:
    """A compiled filter of dynamax over all sequences at once.

    It adds 1e-9 to the diagonal of each matrix that it solves with, which an extended Kalman filter
    carries on from step to step: 1e-6 is what comes of it over 1,000 steps. Without, the numbers
    are ours to 1e-12.
    """
    jax, x = library("jax"), numbers(library)(obs)
    run = jax.jit(jax.vmap(one))
    return Side(
        lambda: torch.from_numpy(np.array(run(x))),
        1e-5,
        "compiled; adds 1e-9 to each matrix that it solves with",
    )
