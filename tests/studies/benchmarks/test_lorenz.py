"""The benchmark of the Lorenz equations: what filters reach."""

import pytest

from studies.benchmarks.lorenz import SIZES, claims, run


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
