"""One thread for every test, double-precision data by name, and nothing of kbf (its shapes are
checked as it is imported).
"""

from __future__ import annotations

import os
import threading

os.environ["OMP_NUM_THREADS"] = "1"  # of NumPy and of commands, too: two workers share the cores

import jaxtyping
import numpy as np
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory) -> None:
    """What the tests download or simulate does not land among the user's files."""
    os.environ["KBF_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def shapes(request):
    """Shapes are checked in the first second of a test: later calls are mostly those of loops, and
    checks of every call take half of the time. They are not checked in slow tests.
    """

    def check(wanted: bool) -> None:
        jaxtyping.config.update("jaxtyping_disable", not wanted)

    check(request.node.get_closest_marker("slow") is None)
    timer = threading.Timer(1.0, check, (False,))
    timer.start()
    yield
    timer.cancel()
    timer.join()
    check(True)


@pytest.fixture
def rng() -> np.random.Generator:
    """The same numbers in every run of a test."""
    return np.random.default_rng(0)


@pytest.fixture
def normal(rng):
    """``normal(3, 2)``: a float64 tensor of standard normal numbers; consecutive calls go on in one
    stream.
    """

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape))

    return draw
