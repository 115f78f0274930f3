"""One thread for every test, double-precision data by name, and nothing of kbf (its shapes are
checked as it is imported).
"""

from __future__ import annotations

import os

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
    """Slow tests ask for numbers, in half the time without a check of every call: shapes are
    checked in all others.
    """
    jaxtyping.config.update(
        "jaxtyping_disable", request.node.get_closest_marker("slow") is not None
    )
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


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
