"""A filter is loaded from its checkpoint without the frameworks that trained it."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import kbf, numpy
filter = kbf.load_filter("example:rotation").filter
print(tuple(kbf.rollout(filter, numpy.zeros((1, 3, 2))).estimates.shape))
print([name for name in ("lightning", "hydra", "omegaconf") if name in sys.modules])
"""


def test_a_filter_is_loaded_without_lightning_and_hydra():
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert run.stdout.split("\n")[:2] == ["(1, 3, 2)", "[]"]
