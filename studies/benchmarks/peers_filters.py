"""Kalman, extended and unscented Kalman filters of `kbf` and of other libraries, in float64.

Each side gives the filtered means of all steps, of a model in the arithmetic that suits it (numpy,
jax, torch). filterpy and kbf get the Jacobian (`kbf.ssm.Differentiated`), dynamax
differentiates as it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from kbf.filters.gaussian.ekf import ExtendedKalmanFilter
from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.particle.bootstrap import BootstrapFilter
from kbf.filters.rollout import rollout
from kbf.ssm import StateSpaceModel, simulate
from studies.benchmarks.peers_sides import (
    Side,
    by_dynamax,
    by_filterpy,
    by_numpy,
    jacobian,
    move,
    numbers,
    of_dynamax,
    turning,
)

PARTICLES = 1000
"""Of the particle filters."""


def tracking() -> LinearModel:
    """A point of nearly constant velocity in the plane, seen with noise."""
    eye, zero = torch.eye(2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64)
    A = torch.cat([torch.cat([eye, 0.1 * eye], 1), torch.cat([zero, eye], 1)])
    Q = 0.1 * torch.cat(
        [torch.cat([0.1**2 / 3 * eye, 0.05 * eye], 1), torch.cat([0.05 * eye, eye], 1)]
    )
    return LinearModel(
        A,
        A.new_zeros(4),
        Q,
        torch.cat([eye, zero], 1),
        A.new_zeros(2),
        0.04 * eye,
        A.new_zeros(4),
        torch.eye(4).double(),
    )


def kalman(batch: int, steps: int, library: Callable[[str], Any]) -> dict[str, Side]:
    """The Kalman filter of a linear model with d = 4, q = 2."""
    model = tracking()
    space = StateSpaceModel(
        lambda z: z @ model.A.mT, lambda z: z @ model.C.mT, model.Q, model.R, model.m0, model.P0
    )
    obs = simulate(space, model.m0.expand(batch, 4), steps, Generator().manual_seed(0)).obs
    ours = KalmanFilter(model)
    sides = {"kbf": Side(lambda: rollout(ours, obs).estimates)}
    if library("filterpy.kalman"):

        def one() -> Any:
            filter = library("filterpy.kalman").KalmanFilter(4, 2)
            filter.F, filter.H = model.A.numpy(), model.C.numpy()
            return filter

        sides["filterpy"] = Side(
            lambda: by_filterpy(one, model, obs, lambda filter, x: filter.update(x))
        )
    if library("torch_kf"):
        torch_kf = library("torch_kf")
        theirs = torch_kf.KalmanFilter(model.A, model.C, model.Q, model.R, joseph_update=True)
        start = torch_kf.GaussianState(
            model.m0.expand(batch, 4)[..., None], model.P0.expand(batch, 4, 4)
        )
        columns = obs.transpose(0, 1)[..., None]
        sides["torch_kf"] = Side(
            lambda: (
                theirs.filter(start, columns, update_first=False, return_all=True)
                .mean[..., 0]
                .transpose(0, 1)
            )
        )
    if library("dynamax"):
        lgssm, to_jax = library("dynamax.linear_gaussian_ssm"), numbers(library)
        linear = lgssm.LinearGaussianSSM(4, 2)
        moved = ours.predict(ours.init(1))
        parameters = linear.initialize(
            library("jax").random.PRNGKey(0),
            initial_mean=to_jax(moved.mean[0]),
            initial_covariance=to_jax(moved.cov[0]),
            dynamics_weights=to_jax(model.A),
            dynamics_covariance=to_jax(model.Q),
            emission_weights=to_jax(model.C),
            emission_covariance=to_jax(model.R),
        )[0]
        sides["dynamax"] = by_dynamax(
            library, obs, lambda x: lgssm.lgssm_filter(parameters, x).filtered_means
        )
    return sides


def extended(batch: int, steps: int, library: Callable[[str], Any]) -> dict[str, Side]:
    """The extended Kalman filter of the oscillatory model."""
    model = turning()
    ours = ExtendedKalmanFilter(model)
    obs, sides = nonlinear(ours, batch, steps, library)
    if library("filterpy.kalman"):

        def one() -> Any:
            filter = library("filterpy.kalman").ExtendedKalmanFilter(2, 2)

            def predict_x(u: Any = 0) -> None:
                filter.x = move(np, filter.x)

            filter.predict_x = predict_x
            return filter

        def update(filter: Any, x: Any) -> None:
            filter.update(x, lambda z: np.eye(2), lambda z: z)

        def before(filter: Any) -> None:
            filter.F = jacobian(np, filter.x)

        sides["filterpy"] = Side(lambda: by_filterpy(one, model, obs, update, before))
    if library("dynamax"):
        module = library("dynamax.nonlinear_gaussian_ssm")
        parameters = of_dynamax(library, ours.predict(ours.init(1)), model)
        sides["dynamax"] = by_dynamax(
            library, obs, lambda x: module.extended_kalman_filter(parameters, x).filtered_means
        )
    return sides


def unscented(batch: int, steps: int, library: Callable[[str], Any]) -> dict[str, Side]:
    """The unscented Kalman filter of the oscillatory model: alpha 1, beta 0, kappa 1.

    These are the default values of `kbf.UKF`.
    """
    model = turning()
    ours = UnscentedKalmanFilter(model)
    obs, sides = nonlinear(ours, batch, steps, library)
    if library("filterpy.kalman"):
        filterpy = library("filterpy.kalman")
        points = filterpy.MerweScaledSigmaPoints(2, alpha=1.0, beta=0.0, kappa=1.0)

        def one() -> Any:
            return filterpy.UnscentedKalmanFilter(
                2, 2, dt=1, hx=lambda z: z, fx=lambda z, dt: move(np, z), points=points
            )

        sides["filterpy"] = Side(
            lambda: by_filterpy(one, model, obs, lambda filter, x: filter.update(x))
        )
    if library("dynamax"):
        module = library("dynamax.nonlinear_gaussian_ssm")
        parameters = of_dynamax(library, ours.predict(ours.init(1)), model)
        settings = module.UKFHyperParams(alpha=1.0, beta=0, kappa=1)
        sides["dynamax"] = by_dynamax(
            library,
            obs,
            lambda x: module.unscented_kalman_filter(parameters, x, settings).filtered_means,
        )
    return sides


def bootstrap(
    batch: int, steps: int, library: Callable[[str], Any], particles: int = PARTICLES
) -> dict[str, Side]:
    """The bootstrap particle filter of the oscillatory model.

    It resamples systematically when the effective sample size is below one half.

    No library of these has one: the other side is a loop of NumPy with filterpy's resampling. Both
    draw numbers of their own.
    """
    model = turning()
    start = model.m0 + model.P0[0, 0].sqrt() * torch.randn(
        particles, 2, dtype=torch.float64, generator=Generator().manual_seed(1)
    )
    ours = BootstrapFilter(model, start, particles)
    obs = simulate(model, model.m0.expand(batch, 2), steps, Generator().manual_seed(0)).obs
    note = f"{particles} particles; random"
    sides = {
        "kbf": Side(
            lambda: rollout(ours, obs, generator=Generator().manual_seed(2)).estimates, None, note
        )
    }
    if library("filterpy.monte_carlo"):
        resample = library("filterpy.monte_carlo").systematic_resample
        sides["filterpy, NumPy loop"] = Side(
            lambda: by_numpy(resample, model, start.numpy(), obs), None, note
        )
    return sides


def nonlinear(
    ours: Any, batch: int, steps: int, library: Callable[[str], Any]
) -> tuple[Tensor, dict[str, Side]]:
    """Observations of the oscillatory model, and our side."""
    obs = simulate(
        ours.model, ours.model.m0.expand(batch, 2), steps, Generator().manual_seed(0)
    ).obs
    return obs, {"kbf": Side(lambda: rollout(ours, obs).estimates)}
