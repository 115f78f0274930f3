"""Sensors that fall silent one by one, in every model that knows them: against the Kalman filter
that is told the truth.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kbf.densities.per_sensor import PerSensorDensity, SelectedSensors, find_sensors
from kbf.densities.selection import DENSITIES, fit_density
from kbf.filters.gaussian.kalman import KalmanFilter, LearnedKalman, LinearModel, fit_linear
from kbf.filters.gaussian.moments import kalman_update
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo
from kbf.filters.neural.gru_ensemble import FittedGRU, FittedMamba
from kbf.filters.online import RunningFilter
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.regression.boosting import WindowBoosting
from kbf.filters.regression.window import MeanModel, WindowRidge
from kbf.filters.rollout import rollout
from kbf.filters.selection.auto import ModelSelection
from kbf.recording import Recording
from kbf.ssm import StateSpaceModel, simulate

F64 = torch.float64
NAN = math.nan
LINEAR = LinearModel(
    A=torch.tensor([[0.9, 0.3], [-0.3, 0.9]], dtype=F64),
    a=torch.zeros(2, dtype=F64),
    Q=0.05 * torch.eye(2, dtype=F64),
    C=torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], dtype=F64),
    c=torch.ones(3, dtype=F64),
    R=0.09 * torch.eye(3, dtype=F64),
    m0=torch.zeros(2, dtype=F64),
    P0=torch.eye(2, dtype=F64),
)


def recording(n: int, seed: int = 0) -> Recording:
    """Two components that turn and fade; the first sensor (two columns) and the second (one) die
    for stretches of their own.
    """
    m = LINEAR
    known = StateSpaceModel(lambda z: z @ m.A.mT, lambda z: z @ m.C.mT + m.c, m.Q, m.R, m.m0, m.P0)
    drawn = simulate(known, torch.zeros(1, 2, dtype=F64), n, torch.Generator().manual_seed(seed))
    return silenced(Recording(drawn.states[0], drawn.obs[0]))


def silenced(sequence: Recording) -> Recording:
    t, obs = torch.arange(len(sequence.obs)), sequence.obs.clone()
    obs[t % 97 > 60, :2] = NAN
    obs[t % 61 > 40, 2] = NAN
    return sequence._replace(obs=obs)


def slow_sensor(n: int, seed: int = 0) -> Recording:
    """The second sensor is read at every tenth step alone."""
    sequence, g = recording(n, seed), torch.Generator().manual_seed(seed)
    first, second = torch.randn(2, n, 1, dtype=F64, generator=g)
    whole = sequence.states.sum(1, keepdim=True) + 1 + 0.1 * second
    whole[torch.arange(n) % 10 != 0] = NAN
    return sequence._replace(obs=torch.cat([sequence.states[:, :1] + 0.5 * first, whole], 1))


def small() -> dict[str, Any]:
    """One of each model that knows sensors, of a size for tests."""
    models: dict[str, Any] = {
        "kbf": SimulatedKBF(points=400, run=8000, transition="gaussian", observation="gaussian"),
        "weighing": KernelMonteCarlo(
            150, regs=(0.0,), inflations=(1.0,), orders=(1,), tempers=(1.0,), density="gaussian"
        ),
        "imagining": KernelMonteCarlo(
            150, regs=(1e-3,), inflations=(1.0,), orders=(1,), density="gaussian"
        ),
        "particles": LearnedParticleFilter(300, transition="gaussian", observation="gaussian"),
        "kalman": LearnedKalman(),
        "window_ridge": WindowRidge(15),
        "window_boosting": WindowBoosting(15, iterations=30),
        "gru": FittedGRU(networks=1, hidden=32, updates=200, window=40),
        "mamba": FittedMamba(hidden=32, updates=20, window=40),
        "mean": MeanModel(),
    }
    for model in models.values():
        model.allow_missing_sensors = True
    return models


def run(filter, sequence: Recording):
    g = torch.Generator().manual_seed(0)
    return rollout(
        filter,
        sequence.obs[None],
        covariances=True,
        mask=None if sequence.mask is None else sequence.mask[None],
        generator=g,
    )


def mse(filter, sequence: Recording) -> float:
    return float(
        (run(filter, sequence).estimates[0].double() - sequence.states).square().sum(-1).mean()
    )


def covered(filter, sequence: Recording) -> float:
    """Share of states in the 95 % regions."""
    found = run(filter, sequence)
    left, C = (
        found.estimates[0].double() - sequence.states,
        found.covariances[0].double(),
    )
    return float(
        ((left[:, None] @ torch.linalg.solve(C, left[..., None]))[:, 0, 0] < 5.991).double().mean()
    )


@functools.cache
def fitted(name: str):
    model = small()[name]
    model.prepare([recording(400)])
    return model.fit([recording(400)])


# the truth


def test_the_kalman_filter_leaves_out_the_rows_of_silent_components():
    """By a loop that cuts C and R down to what spoke."""
    test, filter = recording(70, 3), KalmanFilter(LINEAR, allow_missing_sensors=True)
    test.obs[5] = NAN
    found = rollout(filter, test.obs[None])
    mean, cov = LINEAR.m0[None], LINEAR.P0[None]
    for t, x in enumerate(test.obs):
        mean, cov = mean @ LINEAR.A.mT, LINEAR.A @ cov @ LINEAR.A.mT + LINEAR.Q
        rows = x.isfinite().nonzero()[:, 0]
        if len(rows):
            mean, cov = kalman_update(
                mean, cov, x[None, rows], LINEAR.C[rows], LINEAR.R[rows][:, rows], LINEAR.c[rows]
            )
        torch.testing.assert_close(found.estimates[:, t], mean)
    torch.testing.assert_close(found.state.cov, cov)
    assert float(found.diagnostics["rejected"].sum()) == 0


@pytest.mark.slow
def test_the_default_model_is_nearly_the_true_kalman_filter_where_a_sensor_dies():
    test, truth = recording(700, 1), KalmanFilter(LINEAR, allow_missing_sensors=True)
    filter = fitted("kbf")
    assert mse(filter, test) < 1.05 * mse(truth, test)
    assert 0.93 < covered(filter, test) < 0.975
    whole = recording(700, 1)._replace(
        mask=test.obs.isfinite().all(1)
    )  # what it is worth to hear the one that speaks
    whole = whole._replace(obs=test.obs.nan_to_num())
    assert mse(truth, test) < 0.8 * mse(truth, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "worse"),
    {
        "weighing": 1.2,
        "imagining": 1.4,
        "particles": 1.1,
        "kalman": 1.05,
        "window_ridge": 2.8,
        "window_boosting": 3.4,
        "gru": 2.2,
    }.items(),
)
def test_others_are_near_it_each_by_its_own_means(name, worse):
    test = recording(300, 1)
    assert mse(fitted(name), test) < worse * mse(
        KalmanFilter(LINEAR, allow_missing_sensors=True), test
    )


LONG = {"kbf", "weighing", "imagining", "particles", "gru", "mamba"}
"""Those that take seconds to fit."""


def marked(*names: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in names]


@pytest.mark.parametrize("name", marked(*small()))
def test_what_a_silent_sensor_would_have_said_is_of_no_matter(name):
    """And a step at which all are silent is one without an observation."""
    test = recording(60, 2)
    gone = test.obs.isnan().all(1)
    gone[30] = True
    obs = torch.where(gone[:, None], NAN, test.obs)
    masked = Recording(test.states, torch.where(gone[:, None], 7.0, obs), ~gone)
    torch.testing.assert_close(
        run(fitted(name), masked).estimates, run(fitted(name), test._replace(obs=obs)).estimates
    )


@pytest.mark.parametrize(
    "name",
    marked("kbf", "weighing", "kalman", "window_ridge", "window_boosting", "gru", "mamba"),
)
def test_a_live_filter_says_the_same_as_a_rollout(name):
    test, filter = recording(40, 2), fitted(name)
    live = RunningFilter(filter, generator=torch.Generator().manual_seed(0))
    found = torch.cat([live.step(x[None]) for x in test.obs])
    torch.testing.assert_close(found, run(filter, test).estimates[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["window_boosting", "gru"])
def test_a_sensor_that_was_never_read_or_never_failed_in_training(name):
    """Whatever such a sensor reads later, estimates without it are as good."""
    memory, test = recording(400), recording(60, 2)
    obs = memory.obs.clone()
    obs[:, 0], obs[:, 2] = NAN, obs[:, 2].nan_to_num(0.5)
    model = small()[name]
    filter = model.fit([memory._replace(obs=obs)])
    found = run(filter, test).estimates
    assert found.isfinite().all()
    if name == "gru":
        assert filter.flags.fails.tolist() == [True, True, False]
        kept = model.weights
        model.fit([memory._replace(obs=obs)])
        assert model.weights is kept  # the same recordings are learned once


@pytest.mark.slow
def test_sensors_of_different_rates():
    """One reading in ten steps of a good sensor, and its silence between them: the default is near
    the true filter.
    """
    model = SimulatedKBF(points=400, run=8000, transition="gaussian", observation="gaussian")
    model.allow_missing_sensors = True
    filter = model.fit([slow_sensor(500)])
    C, c, R = (
        LINEAR.C[[0, 2]],
        torch.tensor([0.0, 1.0], dtype=F64),
        torch.tensor([[0.25, 0], [0, 0.01]], dtype=F64),
    )
    truth, test = (
        KalmanFilter(LINEAR._replace(C=C, c=c, R=R), allow_missing_sensors=True),
        slow_sensor(600, 1),
    )
    alone = test._replace(obs=torch.where(torch.tensor([True, False]), test.obs, NAN))
    assert mse(truth, test) < 0.9 * mse(truth, alone)
    assert mse(filter, test) < 1.08 * mse(truth, test)
    assert len(model.densities.sensors.density) == 2


# the law


@pytest.mark.slow
def test_the_density_is_that_of_those_that_spoke():
    """The sum of the sensors' own, each fitted where it spoke, whatever its shape."""
    g = torch.Generator().manual_seed(0)
    z = torch.randn(300, 1, dtype=F64, generator=g)
    count = torch.poisson((1 + z).exp(), generator=g)
    place = torch.cat([z, 2 * z], 1) + 0.1 * torch.randn(300, 2, dtype=F64, generator=g)
    obs = torch.cat([count, place], 1)
    obs[100:150, 0], obs[200:250, 1:] = NAN, NAN
    sensors = SelectedSensors()
    sensors.choose(z, obs)
    density = sensors.fit(z, obs)
    assert sensors.columns() == [[0], [1, 2]] and sensors.density[0] != sensors.density[1]
    names = [float(k) for k in sensors.density]
    assert sensors.hyperparameters() == {"density/sensor_0": names[0], "density/sensor_1": names[1]}
    rows, others = obs[:, 0].isfinite(), obs[:, 1].isfinite()
    one = fit_density(DENSITIES[int(sensors.density[0])], z[rows], obs[rows, :1])
    two = fit_density(DENSITIES[int(sensors.density[1])], z[others], obs[others, 1:])
    u = z[:5]
    for row, expected in (
        (obs[0], one.at(u)(obs[:1, :1]) + two.at(u)(obs[:1, 1:])),
        (obs[120], two.at(u)(obs[120:121, 1:])),
        (obs[220], one.at(u)(obs[220:221, :1])),
        (torch.full((3,), NAN, dtype=F64), torch.zeros(1, 5, dtype=F64)),
    ):
        torch.testing.assert_close(density.at(u)(row[None]), expected)
        torch.testing.assert_close(density.log_density(row, u), expected[0])


@pytest.mark.parametrize("name", ["student", "clutter", "spread", "branches", "networks"])
def test_parameters_are_computed_once_for_points_that_stay(name):
    g = torch.Generator().manual_seed(0)
    z = torch.randn(120, 2, dtype=F64, generator=g)
    y = z.sin() + 0.1 * torch.randn(120, 2, dtype=F64, generator=g)
    density = PerSensorDensity((fit_density(name, z, y),), ((0, 2),), 3)
    x = torch.cat([y[:4, :1], torch.full((4, 1), NAN, dtype=F64), y[:4, 1:]], 1)
    torch.testing.assert_close(density.at(z[:9])(x), density.densities[0].at(z[:9])(y[:4]))
    torch.testing.assert_close(density.log_density(x[:, None], z[:9]), density.at(z[:9])(x))


def test_columns_that_fall_silent_together_are_one_sensor():
    obs = torch.randn(50, 5, dtype=F64)
    obs[10:20, [1, 3]], obs[15:30, 4] = NAN, NAN
    assert find_sensors(obs).tolist() == [0, 1, 0, 1, 2]
    angle = torch.rand(50, dtype=F64)
    never = torch.stack([angle, angle.cos(), angle.sin()], 1)
    assert find_sensors(never).tolist() == [0, 1, 1]


def test_a_sensor_that_hardly_ever_spoke_is_not_listened_to():
    z, obs = torch.randn(100, 1, dtype=F64), torch.randn(100, 2, dtype=F64)
    obs[9:, 1] = NAN
    sensors = SelectedSensors()
    sensors.choose(z, obs, "gaussian")
    assert sensors.fit(z, obs).columns == ((0,),)
    obs[:] = NAN
    with pytest.raises(ValueError, match="none has 10 readings"):
        sensors.choose(z, obs, "gaussian")


def test_a_linear_model_is_fitted_column_by_column():
    whole = recording(2000)
    model = fit_linear(whole, allow_missing_sensors=True)
    torch.testing.assert_close(model.C, LINEAR.C, rtol=0, atol=0.05)
    torch.testing.assert_close(model.R, LINEAR.R, rtol=0, atol=0.01)
    full = whole._replace(obs=whole.obs.nan_to_num())
    for a, b in zip(fit_linear(full), fit_linear(full, allow_missing_sensors=True), strict=True):
        torch.testing.assert_close(a, b)


# the net under it


@pytest.mark.slow
def test_the_net_under_the_default_compares_rivals_that_know_sensors():
    net = ModelSelection(LearnedKalman(), name="kalman")
    net.allow_missing_sensors = True
    net.prepare([recording(400)])
    learned = {"ukf_learned", "particle_learned", "kernel_monte_carlo"}
    assert {row.model for row in net.candidates} == {
        "kalman",
        "kalman_velocity",
        "window_ridge",
        "mean",
        "average",
        *learned,
    }
    linear = {"kalman", "kalman_velocity", "ukf_learned", "window_ridge"}
    assert set(net.used()) <= linear
    assert mse(net.fit([recording(400)]), recording(300, 1)) < 1.1 * mse(
        KalmanFilter(LINEAR, allow_missing_sensors=True), recording(300, 1)
    )


def test_without_a_word_missing_values_are_an_error():
    for model in (SimulatedKBF(), KernelMonteCarlo(), LearnedKalman(), WindowRidge()):
        with pytest.raises(ValueError, match="NaN"):
            model.fit([recording(100)])


def obs_of(values: list[list[float]]) -> Tensor:
    return torch.tensor(values, dtype=F64)


def test_a_window_holds_the_last_value_of_each_component():
    model = WindowRidge(2)
    model.allow_missing_sensors = True
    filter = model.fit([recording(100)])
    state = filter.init(1)
    start = filter.start
    for x, expected in (
        ([NAN, NAN, 5.0], [[*start[:2].tolist(), 5.0]] * 2),
        ([1.0, 2.0, NAN], [[1.0, 2.0, 5.0]] * 2),
        ([3.0, 4.0, 6.0], [[1.0, 2.0, 5.0], [3.0, 4.0, 6.0]]),
        ([NAN, NAN, NAN], [[3.0, 4.0, 6.0], [3.0, 4.0, 6.0]]),
    ):
        state = filter.update(filter.predict(state), obs_of([x]))
        torch.testing.assert_close(state.window[0], obs_of(expected))
