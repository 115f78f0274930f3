"""The particle filters that `kbf bench peers` times do the same work."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from studies.benchmarks.peers_filters import bootstrap


def test_both_particle_filters_estimate_the_same():
    """Their means differ by Monte Carlo errors alone: 0.007 to 0.013 over 40 seeds of the other
    side, whose numbers NumPy draws.
    """
    pytest.importorskip("filterpy")
    np.random.seed(0)
    ours, theirs = (
        side.call() for side in bootstrap(2, 10, importlib.import_module, 4000).values()
    )
    assert ours.shape == theirs.shape == (2, 10, 2)
    assert (ours - theirs).square().mean().sqrt() < 0.02
