"""The benchmark of the Lorenz equations: its map, its sensor, and what filters reach."""

import math

import pytest
import torch

from studies.benchmarks.lorenz import SIZES, claims, run, sensor_rotation, transition


def test_the_transition_is_the_taylor_series_of_its_matrix():
    z = torch.tensor([[1.0, -3.0, 20.0], [7.0, 2.0, 30.0]], dtype=torch.float64)
    for row, moved in zip(z, transition(z), strict=True):
        A = torch.tensor([[-10, 10, 0], [28 - row[2], -1, 0], [row[1], 0, -8 / 3]]).double()
        powers = [torch.linalg.matrix_power(0.02 * A, j) / math.factorial(j) for j in range(6)]
        assert torch.allclose(moved, sum(powers) @ row, atol=1e-12)
        assert torch.allclose(moved, torch.linalg.matrix_exp(0.02 * A) @ row, atol=1e-2)


def test_the_sensor_turns():
    R = sensor_rotation()
    assert torch.allclose(R @ R.mT, torch.eye(3).double(), atol=1e-12)
    assert R[1, 0] == pytest.approx(math.pi / 180, rel=0.03)


def test_the_filter_that_knows_has_the_published_error():
    """-29.7 dB at r^2 = 0.01, and learned maps are between it and a linear model."""
    settings = {**SIZES["smoke"], "test": 20}
    rows = {row["model"]: row for row in run(settings, lambda text: None)}
    assert rows["ukf"]["error [dB]"] == pytest.approx(-29.7, abs=1.5)
    assert rows["ukf"]["within 1.96 std"] == pytest.approx(0.95, abs=0.04)
    assert (
        rows["ukf"]["error [dB]"] < rows["ukf_learned"]["error [dB]"] < rows["kalman"]["error [dB]"]
    )
    (claim,) = claims(list(rows.values()))
    assert claim.reached == (rows["ukf_learned"]["error [dB]"] <= -29.3)
