"""Densities of observations with missing sensors, against sums and blocks written out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kbf.densities.base import ConditionalDensity
from kbf.densities.per_sensor import (
    MIN_READINGS,
    PerSensorDensity,
    SelectedSensors,
    find_sensors,
)
from kbf.densities.selection import DENSITIES, fit_density, fit_like
from kbf.runtime.errors import FitError

F64 = torch.float64
NAN = math.nan


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    """120 states of one number, and four columns of observations."""
    draw = generator()
    z = 2 * torch.rand(120, 1, dtype=F64, generator=draw) - 1
    noise = torch.randn(120, 4, dtype=F64, generator=draw)
    return z, torch.cat([z.sin(), 2 * z, z.square(), -z], 1) + 0.1 * noise


@pytest.fixture(scope="module")
def product(data) -> PerSensorDensity:
    """Sensors of the columns 2 and (3, 0) of five; columns 1 and 4 belong to none."""
    z, x = data
    parts = (fit_density("student", z, x[:, [2]]), fit_density("gaussian", z, x[:, [3, 0]]))
    return PerSensorDensity(parts, ((2,), (3, 0)), 5)


def readings() -> Tensor:
    """Everything present; either sensor missing; one column of a pair missing; none present."""
    x = 0.3 * torch.randn(5, 5, dtype=F64, generator=generator(3))
    x[1, 2] = x[2, 3] = x[2, 0] = x[3, 0] = NAN
    x[4] = NAN
    x[0, 1] = x[1, 4] = NAN  # columns of no sensor
    return x


PRESENT = torch.tensor([[True, True], [False, True], [True, False], [True, False], [False, False]])


def test_the_log_density_is_the_sum_over_the_sensors_that_are_present(product):
    x, u = readings(), torch.linspace(-1, 1, 5, dtype=F64)[:, None]
    found = product.log_density(x, u)
    for i in range(5):
        expected = 0.0
        for density, columns, present in zip(
            product.densities, product.columns, PRESENT[i].tolist(), strict=True
        ):
            if present:
                reading = torch.stack([x[i, k] for k in columns])
                expected += float(density.log_density(reading[None], u[i : i + 1])[0])
        assert float(found[i]) == pytest.approx(expected, abs=1e-12)
    assert float(found[4]) == 0


def test_a_table_has_the_log_density_of_every_pair(product):
    x, u = readings(), torch.linspace(-1, 1, 3, dtype=F64)[:, None]
    table = product.at(u)(x)
    assert table.shape == (5, 3)
    torch.testing.assert_close(table, product.log_density(x[:, None], u[None]))


def test_presence_and_readings_of_each_sensor(product):
    x = readings()
    for k, (reading, present) in enumerate(product.readings(x)):
        assert present.tolist() == PRESENT[:, k].tolist()
        assert reading.shape == (5, len(product.columns[k]))
        torch.testing.assert_close(reading[present], x[present][:, list(product.columns[k])])
        assert bool((reading[~present] == 0).all())


def test_means_draws_and_covariances_stand_in_the_columns_of_their_sensors(product):
    u = torch.linspace(-1, 1, 6, dtype=F64).reshape(2, 3, 1)
    one, pair = product.densities
    mean, cov = product.mean(u), product.covariance(u)
    assert mean.shape == (2, 3, 5)
    assert cov.shape == (2, 3, 5, 5)
    torch.testing.assert_close(mean[..., [2]], one.mean(u))
    torch.testing.assert_close(mean[..., [3, 0]], pair.mean(u))
    torch.testing.assert_close(cov[..., 2, 2], one.covariance(u)[..., 0, 0])
    block = pair.covariance(u)
    for i, a in enumerate((3, 0)):
        for j, b in enumerate((3, 0)):
            torch.testing.assert_close(cov[..., a, b], block[..., i, j])
    none, across = [1, 4], [0, 3]
    assert bool((mean[..., none] == 0).all())
    assert bool((cov[..., none, :] == 0).all())
    assert bool((cov[..., :, none] == 0).all())
    assert bool((cov[..., 2, across] == 0).all())
    assert bool((cov[..., across, 2] == 0).all())
    draw, same = product.sample(u, generator(1)), generator(1)
    torch.testing.assert_close(draw[..., [2]], one.sample(u, same))
    torch.testing.assert_close(draw[..., [3, 0]], pair.sample(u, same))
    assert bool((draw[..., none] == 0).all())


@pytest.mark.parametrize(
    ("missing", "numbers"),
    [
        ([[0], [0]], [0, 1, 1, 1]),  # column 0 in both rows
        ([[0, 2], [0, 2]], [0, 1, 0, 1]),  # together
        ([[0, 2], [0]], [0, 1, 2, 1]),  # column 2 once without column 0
        ([[0], [1]], [0, 1, 2, 2]),  # one each, never together
        ([[2], [2, 3]], [0, 0, 1, 2]),  # column 3 missing only where column 2 is
        ([[], [0, 1, 2, 3]], [0, 0, 0, 0]),
    ],
)
def test_columns_that_are_missing_in_the_same_rows_are_a_sensor(missing, numbers):
    x = torch.arange(20, dtype=F64).reshape(5, 4)
    for row, columns in zip((1, 3), missing, strict=True):
        x[row, columns] = NAN
    assert find_sensors(x).tolist() == numbers


def test_without_gaps_each_column_is_a_sensor(data):
    assert find_sensors(data[1]).tolist() == [0, 1, 2, 3]


def with_gaps(x: Tensor) -> Tensor:
    """Columns 0 and 2 missing in every third row, column 3 in all but nine."""
    x = x.clone()
    x[::3, [0, 2]] = NAN
    x[MIN_READINGS - 1 :, 3] = NAN
    return x


def test_a_sensor_of_few_readings_is_not_used(data, caplog):
    z, x = data[0], with_gaps(data[1])
    sensors = SelectedSensors()
    assert not sensors.known
    sensors.choose(z, x, "student")
    assert sensors.known
    assert sensors.column.tolist() == [0, 1, 0, 2]
    assert sensors.columns() == [[0, 2], [1], [3]]
    student = DENSITIES.index("student")
    assert sensors.density.tolist() == [student, student, -1]
    assert f"columns [3] has {MIN_READINGS - 1} readings" in caplog.text
    assert sensors.hyperparameters() == {
        "density/sensor_0": float(student),
        "density/sensor_1": float(student),
        "density/sensor_2": -1.0,
    }
    fitted = sensors.fit(z, x)
    assert fitted.columns == ((0, 2), (1,))
    assert fitted.width == 4
    present = x[:, 0].isfinite()
    alone = fit_density("student", z[present], x[present][:, [0, 2]])
    u, y = z[:4], 0.1 * torch.ones(4, 2, dtype=F64)
    assert torch.equal(fitted.densities[0].log_density(y, u), alone.log_density(y, u))
    # exactly the least number of readings
    enough = x.clone()
    enough[MIN_READINGS - 1, 3] = 0.5
    sensors.choose(z, enough, "gaussian")
    assert sensors.density.tolist() == [0, 0, 0]
    assert sensors.fit(z, enough).columns == ((0, 2), (1,), (3,))
    # fewer at the fit than at the choice
    assert sensors.fit(z, x).columns == ((0, 2), (1,))


def test_no_sensor_with_enough_readings_is_an_error(data):
    z, x = data[0][: MIN_READINGS - 1], data[1][: MIN_READINGS - 1].clone()
    sensors = SelectedSensors()
    with pytest.raises(FitError, match=rf"of 4 sensors none has {MIN_READINGS} readings"):
        sensors.choose(z, x, "gaussian")
    sensors.choose(*data, "gaussian")
    with pytest.raises(FitError, match=rf"of 4 sensors none has {MIN_READINGS} readings"):
        sensors.fit(z, x)


def test_counts_are_sensors_that_all_count():
    sensors = SelectedSensors()
    for names, counts in (
        (("poisson", "negbin"), True),
        (("poisson", None), True),
        (("poisson", "gaussian"), False),
        (("categories",), False),
    ):
        places = [-1 if name is None else DENSITIES.index(name) for name in names]
        sensors.density = torch.tensor(places)
        assert sensors.counts == counts


@pytest.fixture
def counted(monkeypatch) -> list[tuple[int, ...]]:
    """The shapes of the outputs that densities are selected for."""
    from kbf.densities import per_sensor

    calls: list[tuple[int, ...]] = []
    select: Callable = per_sensor.select_density

    def counting(u: Tensor, y: Tensor):
        calls.append(tuple(y.shape))
        return select(u, y)

    monkeypatch.setattr(per_sensor, "select_density", counting)
    return calls


def test_the_density_of_a_sensor_is_selected_once_for_the_same_readings(data, counted):
    z, x = data[0][:60], with_gaps(data[1][:60])
    sensors = SelectedSensors()
    sensors.choose(z, x)
    assert counted == [(40, 2), (60, 1)]
    assert [each.outputs.shape for each in sensors.fitted] == [(40, 2), (60, 1)]
    sensors.choose(z, x)
    assert len(counted) == 2
    other = x.clone()
    other[5, 1] += 1
    sensors.choose(z, other)
    assert counted[2:] == [(60, 1)]
    # a fit of the same readings is the density of the selection
    first = sensors.fit(z, x).densities
    assert first[0] is sensors.fitted[0].choice.density
    assert first[1] is sensors.fitted[1].choice.density
    assert sensors.fit(z, other).densities[1] is sensors.fitted[2].choice.density
    assert fit_like(sensors.fitted, "student", z[:30], x[:30, [1]]) is None


def test_stored_sensors_fit_the_same_densities(data):
    z, x = data[0], with_gaps(data[1])
    sensors, again = SelectedSensors(), SelectedSensors()
    sensors.choose(z, x, "student")
    again.column, again.density = sensors.column.clone() * 0, sensors.density.clone() * 0
    again.load_state_dict(sensors.state_dict())
    assert again.columns() == sensors.columns()
    one, two = sensors.fit(z, x), again.fit(z, x)
    assert torch.equal(one.log_density(x, z), two.log_density(x, z))
    empty = SelectedSensors()
    empty.load_state_dict({})
    assert not empty.known
    assert isinstance(one, ConditionalDensity)
