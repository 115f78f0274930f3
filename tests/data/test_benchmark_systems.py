"""Systems of other papers: their equations against SciPy's integrators, matrices and conserved
energy, their statistics, noises against densities, and what the recordings consist of.
"""

import math

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

from kbf.config.prepare import configure
from kbf.data.benchmark_systems import (
    Bearings,
    SystemRecordings,
    bearings,
    discrete_lorenz,
    double_pendulum,
    lorenz96,
    lorenz_flow,
    pendulum_field,
    runge_kutta,
    sensor_rotation,
    spherical_lorenz,
    turned,
    turning_target,
)
from kbf.data.dataset import load_data
from kbf.runtime.interpolation import resolved

F64 = torch.float64
SYSTEMS = {
    "lorenz": discrete_lorenz(20),
    "spherical": spherical_lorenz(20),
    "flow": lorenz_flow(),
    "lorenz96": lorenz96(5, 10),
    "pendulum": double_pendulum(),
    "target": turning_target(),
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def integrated(right: object, z: Tensor, time: float) -> Tensor:
    """The solution of an equation by SciPy, to 1e-11."""
    settings = {"rtol": 1e-12, "atol": 1e-12, "method": "DOP853"}
    found = solve_ivp(right, (0, time), z.numpy(), **settings)  # pyright: ignore
    return torch.from_numpy(found.y[:, -1])


def test_a_discrete_step_is_the_taylor_series_of_its_matrix():
    z = torch.tensor([[1.0, -3.0, 20.0], [7.0, 2.0, 30.0]], dtype=F64)
    for row, moved in zip(z, discrete_lorenz().f(z), strict=True):
        A = torch.tensor([[-10, 10, 0], [28 - row[2], -1, 0], [row[1], 0, -8 / 3]], dtype=F64)
        powers = [torch.linalg.matrix_power(0.02 * A, j) / math.factorial(j) for j in range(6)]
        torch.testing.assert_close(moved, sum(powers) @ row, rtol=1e-12, atol=1e-12)


def test_the_flow_is_the_solution_of_the_differential_equations():
    z = torch.tensor([-5.0, 4.0, 22.0], dtype=F64)

    def right(_: float, y: np.ndarray) -> list[float]:
        return [10 * (y[1] - y[0]), y[0] * (28 - y[2]) - y[1], y[0] * y[1] - 8 / 3 * y[2]]

    expected = integrated(right, z, 0.02)
    torch.testing.assert_close(lorenz_flow().f(z), expected, rtol=0, atol=1e-9)
    discrete = (discrete_lorenz().f(z) - expected).abs().max()
    assert 1e-4 < discrete < 0.1  # the discrete equations are others


@pytest.mark.parametrize("d", [4, 7])
def test_a_step_of_lorenz_96_is_the_solution_of_its_equations(d):
    z = 8 / 3 + 2 * torch.randn(d, generator=generator(1), dtype=F64)

    def right(_: float, y: np.ndarray) -> list[float]:
        return [(y[(i + 1) % d] - y[i - 2]) * y[i - 1] - y[i] + 8 for i in range(d)]

    torch.testing.assert_close(lorenz96(d).f(z), integrated(right, z, 0.05), rtol=0, atol=1e-6)


def test_lorenz_96_has_its_known_statistics():
    """Mean 2.34 and standard deviation 3.64 of a variable for many variables and force 8."""
    found = SystemRecordings(lorenz96(40), 40, 1, 0, steps=60, warm_up=400)
    states = torch.cat([each.states for each in found.train])
    assert float(states.mean()) == pytest.approx(2.34, abs=0.06)
    assert float(states.std()) == pytest.approx(3.64, abs=0.06)


def test_the_lorenz_attractor_has_its_known_statistics():
    """The mean of z_3 is 23.55 and that of z_1^2 equals that of z_1 z_2, which is 8/3 of it."""
    found = SystemRecordings(lorenz_flow(), 40, 1, 0, steps=300, warm_up=600)
    x, y, z = torch.cat([each.states for each in found.train]).unbind(-1)
    assert float(z.mean()) == pytest.approx(23.55, abs=0.3)
    assert float((x * y).mean()) == pytest.approx(8 / 3 * float(z.mean()), rel=0.01)
    assert float((x * x).mean()) == pytest.approx(float((x * y).mean()), rel=0.01)


def test_the_double_pendulum_keeps_its_energy_and_small_swings_their_periods():
    """The normal modes of small angles have the frequencies sqrt(g (2 -+ sqrt 2))."""

    def energy(z: Tensor) -> Tensor:
        a, b, p, q = z.unbind(-1)
        kinetic = p.square() + q.square() / 2 + p * q * (a - b).cos()
        return kinetic - 9.81 * (2 * a.cos() + b.cos())

    z = torch.tensor([[1.1, -0.8, 0.5, -1.0], [0.3, 1.2, 0.0, 0.0]], dtype=F64)
    moved = runge_kutta(pendulum_field, z, 0.005, 1000)
    torch.testing.assert_close(energy(moved), energy(z), rtol=0, atol=1e-4)
    for sign in (-1, 1):
        mode = torch.tensor([1.0, -sign * 2**0.5, 0, 0], dtype=F64) * 1e-4
        half = math.pi / math.sqrt(9.81 * (2 + sign * 2**0.5))
        back = runge_kutta(pendulum_field, mode, half / 500, 500)
        torch.testing.assert_close(back, -mode, rtol=0, atol=1e-9)


def test_a_target_moves_on_a_circle():
    """Without the pull and the decay: the velocity turns, and small steps make the same arc."""
    z = torch.tensor([3.0, -4.0, 1.0, 0.5, 0.7], dtype=F64)
    moved = turned(z)
    heading = math.atan2(0.5, 1.0) + 0.7
    speed = math.hypot(1.0, 0.5)
    expected = torch.tensor([math.cos(heading), math.sin(heading)], dtype=F64) * speed
    torch.testing.assert_close(moved[2:4], expected - 0.004 * moved[:2])
    times = (torch.arange(100_000, dtype=F64) + 0.5) / 100_000
    angles = math.atan2(0.5, 1.0) + 0.7 * times
    arc = speed * torch.stack([angles.cos().mean(), angles.sin().mean()])
    torch.testing.assert_close(moved[:2], z[:2] + arc)
    torch.testing.assert_close(moved[4], 0.99 * z[4])
    straight = turned(torch.cat([z[:4], torch.zeros(1, dtype=F64)]))
    torch.testing.assert_close(straight[:2], z[:2] + z[2:4])


def test_bearings_are_directions_and_their_noise_is_of_the_angle():
    model, z = turning_target(), torch.tensor([10.0, 20.0, 0, 0, 0], dtype=F64)
    angles = [math.atan2(20 - y, 10 - x) for x, y in Bearings.SENSORS]
    expected = [f(a) for f in (math.cos, math.sin) for a in angles]
    torch.testing.assert_close(bearings(z), torch.tensor(expected, dtype=F64))
    x = model.observe(z.expand(50_000, 5), generator())
    found = torch.atan2(x[:, 3:], x[:, :3]) - torch.tensor(angles, dtype=F64)
    torch.testing.assert_close(x[:, :3].square() + x[:, 3:].square(), torch.ones_like(found))
    assert float(found.mean().abs()) < 1e-3
    torch.testing.assert_close(found.std(0), torch.full((3,), 0.03, dtype=F64), rtol=0.02, atol=0)
    log_density = torch.distributions.Normal(0.0, 0.03).log_prob(found).sum(-1)
    torch.testing.assert_close(model.log_likelihood(x, z), log_density)


def test_the_sensor_turns_by_a_degree_about_each_axis():
    R = sensor_rotation()
    torch.testing.assert_close(R @ R.mT, torch.eye(3, dtype=F64))
    assert math.acos((float(R.trace()) - 1) / 2) == pytest.approx(3**0.5 * math.pi / 180, rel=0.01)
    plain = discrete_lorenz(rotated=False)
    z = torch.tensor([1.0, 2.0, 3.0], dtype=F64)
    torch.testing.assert_close(discrete_lorenz().h(z), R @ z)
    torch.testing.assert_close(plain.h(z), z)


def test_spherical_coordinates_lead_back_to_the_state():
    z = torch.randn(50, 3, generator=generator(), dtype=F64)
    norm, inclination, azimuth = spherical_lorenz().h(z).unbind(-1)
    assert float(azimuth.min()) >= 0
    assert float(azimuth.max()) > math.pi
    flat = norm * inclination.sin()
    back = torch.stack([flat * azimuth.cos(), flat * azimuth.sin(), norm * inclination.cos()], -1)
    torch.testing.assert_close(back, z)


@pytest.mark.parametrize("name", SYSTEMS)
def test_noises_have_the_covariances_of_the_model(name):
    model = SYSTEMS[name]
    z = model.m0.expand(40_000, -1) + torch.tensor([0.3], dtype=F64)
    moved, seen = model.move(z, generator(1)) - model.f(z), model.observe(z, generator(2))
    torch.testing.assert_close(moved.mT.cov(), model.Q, rtol=0.05, atol=0.02 * float(model.Q.max()))
    if not isinstance(model, Bearings):
        left = (seen - model.h(z)).mT.cov()
        torch.testing.assert_close(left, model.R, rtol=0.05, atol=0.03 * float(model.R.max()))


@pytest.mark.parametrize(("db", "r2"), [(0, 1.0), (10, 0.1), (30, 1e-3)])
def test_decibels_are_of_the_variance_of_observations(db, r2):
    for model, share in (
        (discrete_lorenz(db), 0.01),
        (lorenz96(6, db), 0.01),
        (spherical_lorenz(db), 1.0),
        (discrete_lorenz(db, q2=0.15), 0.15 / r2),
    ):
        torch.testing.assert_close(model.R, r2 * torch.eye(len(model.R), dtype=F64))
        torch.testing.assert_close(model.Q, share * r2 * torch.eye(len(model.Q), dtype=F64))


def small(n: int, **settings: int) -> SystemRecordings:
    return SystemRecordings(discrete_lorenz(), n, 3, 2, steps=7, **settings)


def test_recordings_of_a_smaller_set_are_the_first_of_a_larger_one():
    few, many = small(5), small(45)
    for a, b in zip(few.train, many.train, strict=False):
        assert torch.equal(a.states, b.states)
        assert torch.equal(a.obs, b.obs)
    assert [len(each) for each in (many.train, many.validation, many.test)] == [45, 2, 3]
    assert all(torch.equal(a.obs, b.obs) for a, b in zip(few.test, many.test, strict=True))
    obs = torch.stack([r.obs for r in [*many.train, *many.validation, *many.test]])
    assert len(obs.flatten(1).unique(dim=0)) == 50
    assert not torch.equal(small(5, seed=1).train[0].obs, few.train[0].obs)


def test_recordings_start_after_the_start_of_the_model():
    """One move away from (1, 1, 1); a warm-up moves on without noise."""
    first = torch.stack([each.states[0] for each in small(500).train])
    model = discrete_lorenz()
    expected = model.f(model.m0)
    torch.testing.assert_close(first.mean(0), expected, rtol=0, atol=0.02)
    torch.testing.assert_close(first.std(0), torch.full((3,), 0.1, dtype=F64), rtol=0.15, atol=0)
    later = torch.stack([each.states[0] for each in small(500, warm_up=2).train])
    expected = model.f(model.f(expected))
    torch.testing.assert_close(later.mean(0), expected, rtol=0, atol=0.02)


def test_the_first_components_of_a_start_may_be_uniform():
    settings = {"steps": 2, "uniform": 2}
    drawn = SystemRecordings(turning_target(), 20, 1, 0, **settings)
    z = torch.cat([drawn.starts(generator(k)) for k in range(200)])
    assert float(z[:, :2].abs().max()) <= 25
    assert float(z[:, :2].abs().max()) > 24.9
    spread = torch.tensor([25 / 3**0.5, 25 / 3**0.5, 1.2, 1.2, 0.05], dtype=F64)
    torch.testing.assert_close(z.std(0), spread, rtol=0.05, atol=0)
    assert float(z[:, 2].abs().max()) > 3  # normal


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="n_train >= 1"):
        small(0)
    with pytest.raises(ValueError, match="need 4 to 5,000 variables"):
        lorenz96(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "sizes", "steps"),
    [
        ("lorenz", [20, 1000], 100),
        ("lorenz_spherical", [100], 20),
        ("lorenz_decimated", [10], 300),
        ("lorenz96", [20, 200], 100),
        ("double_pendulum", [20, 200], 100),
        ("bearings", [20, 200], 100),
    ],
)
def test_the_experiment_has_every_model_on_every_system(data, sizes, steps):
    """Windows of networks are whole recordings, except for the long ones; the data can be made."""
    config = configure("compare", ["experiment=lorenz", f"data={data}"])
    assert config["n_train"] == sizes
    assert config["calibrate"]
    assert {*config["bases"]} >= {"ekf", "ukf", "kalmannet", "kbf", "ukf_learned", "gru", "mamba"}
    for name in ("gru", "lstm", "mamba", "kalmannet"):
        training = resolved(config["bases"][name], n_train=2, seed=0)["model"]["training"]
        assert training["window"] in ({steps} if name == "kalmannet" else {min(steps, 100)})
        assert training["burn_in"] == 0
    recipe = resolved(config["recipe"], n_train=2, seed=0)
    made = load_data({**recipe["data"], "source": {**recipe["data"]["source"], "n_test": 1}})
    assert made.train[0].states.shape == (steps, recipe["data"]["d"])
    assert list(made.test[0].obs.shape[1:]) == recipe["data"]["q"]
    assert recipe["data"]["name"].startswith(data)


@pytest.mark.parametrize("d", [3, 5001])
def test_lorenz96_has_limits(d):
    with pytest.raises(ValueError, match="need 4 to 5,000 variables"):
        lorenz96(d)
