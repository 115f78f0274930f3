"""Learned maps that are evaluated together have the values of each."""

import pytest
import torch

from kbf.filters.gaussian import joined_maps
from kbf.filters.gaussian.augmented import Sensor
from kbf.filters.gaussian.count_maps import stabilised
from kbf.filters.gaussian.joined_maps import Part, join_maps
from kbf.filters.gaussian.learned_maps import fit_map, kernel_of
from kbf.filters.gaussian.sparse_maps import fit_sparse, read_by, select_inputs

F64 = torch.float64
GAUSSIAN, ARCSINE = torch.tensor([0.0, 1.5, 0.0]), torch.tensor([1.0, 0.3, 1.0])


def draws(n: int, e: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, e, generator=torch.Generator().manual_seed(seed), dtype=F64)


def parts_of_each_kind(u: torch.Tensor) -> list[Part]:
    """A linear map of one input, kernels of two kinds and sizes, two outputs, and counts."""
    y = torch.cat([u[:, :1].sin(), u[:, 1:3].cos() * u[:, :1]], 1) + 0.1 * draws(len(u), 3, 1)
    counts = torch.poisson(u[:, :1].exp(), torch.Generator().manual_seed(2))
    counts = stabilised(counts, torch.tensor([True]))

    def part(inputs, columns, kind, y, kernel=None, ranks=(20,), counts=False):
        given = None if kernel is None else kernel_of(kernel)
        map = fit_map(kind, u[:, inputs], y, kernel=given, ranks=ranks, counts=counts)
        return Part(torch.tensor(inputs), torch.tensor(columns), map)

    return [
        part([2], [3], "linear", y[:, :1]),
        part([0, 2], [0], "kernel", y[:, :1], GAUSSIAN),
        part([1], [5], "both", y[:, 1:2], 2 * GAUSSIAN, (60,)),
        part([0, 1, 2], [2, 1], "both", y[:, 1:], ARCSINE),
        part([0, 1, 2], [6], "both", counts, GAUSSIAN, (30,), counts=True),
    ]


@pytest.mark.parametrize("at_a_time", [2**17, 500])
def test_joined_maps_have_the_values_of_each(at_a_time, monkeypatch):
    monkeypatch.setattr(joined_maps, "MAX_VALUES", at_a_time)
    parts = parts_of_each_kind(draws(200, 3))
    joined = join_maps(parts, 3, 8)
    u = 2 * draws(30, 3, 5)  # partly outside of the boxes of the landmarks
    found = joined(u.view(5, 6, 3))
    assert found.shape == (5, 6, 8)
    for part in parts:
        expected = part.map(u[:, part.inputs])
        found_here = found.flatten(0, 1)[:, part.columns]
        torch.testing.assert_close(found_here, expected, rtol=0, atol=1e-8)
    assert not found[..., [4, 7]].any()  # outputs of no map
    assert joined(u.float()).dtype == torch.float32


def test_sensors_are_read_together_as_one_by_one():
    """One of few inputs and late, one with all inputs, both of the state and the one before."""
    u = draws(300, 3)
    y = torch.cat([u[:, :1].sin(), u[:, 1:]], 1) + 0.1 * draws(300, 3, 1)
    sparse = fit_sparse(select_inputs(u, y[:, :2]), u, y[:, :2], ranks=(20,))
    whole = fit_map("both", u, y[:, 2:], kernel=kernel_of(GAUSSIAN), ranks=(20,))
    sensors = [
        Sensor(torch.tensor([3, 0]), 1, sparse, torch.eye(2)),
        Sensor(torch.tensor([2]), 0, whole, torch.eye(1)),
    ]
    s = torch.cat([draws(10, 3, 7), draws(10, 3, 8)], 1)
    found = read_by(sensors, 3, 5)(s)
    torch.testing.assert_close(found[:, [3, 0]], sparse(s[:, 3:]), rtol=0, atol=1e-9)
    torch.testing.assert_close(found[:, [2]], whole(s[:, :3]), rtol=0, atol=1e-9)
    assert not found[:, [1, 4]].any()
