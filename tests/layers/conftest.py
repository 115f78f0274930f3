"""What the tests of layers share."""

from __future__ import annotations

import jaxtyping
import pytest


@pytest.fixture(params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["fast", "full"])
def fast(request) -> bool:
    """Finite differences along random directions; in a slow test those of each entry."""
    return request.param


@pytest.fixture
def unchecked():
    """Shapes are not checked before a function is called: its own message is raised."""
    jaxtyping.config.update("jaxtyping_disable", True)
