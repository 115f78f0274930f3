"""Filters that draw random numbers return equal numbers in `filter` and in `online`."""

from __future__ import annotations

import numpy as np

import kbf
from scripts.make_arm import arm


def test_a_particle_filter_draws_the_same_numbers_online():
    """Of one recording with the same seed; another seed gives other numbers."""
    data = arm(2, 40)
    fitted = kbf.fit(
        data,
        states=["reach_mm", "torque_kNm"],
        observations=["s*"],
        recording="run",
        model="particle_learned",
        calibrate=False,
        progress=False,
    )
    new = data[data.run == "run1"].iloc[:15]
    expected = fitted.filter(new, seed=3).mean
    live = fitted.online(seed=3)
    found = [list(live.step(dict(row)).values()) for _, row in new[["s1", "s2", "s3"]].iterrows()]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert not np.allclose(fitted.filter(new, seed=4).mean, expected)
