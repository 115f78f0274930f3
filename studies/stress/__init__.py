"""Stress tests: kills, damaged files, bad input and endurance runs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))  # the hostile checkpoints of the tests are run here as well
