"""Kernel Bayes Filter in PyTorch. ``import kbf`` costs nothing: a name is loaded when it is used."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Sequence": "kbf.sequence",
    "rollout": "kbf.filters.base",
    "step": "kbf.filters.base",
    "Live": "kbf.filters.live",
    "tune_process": "kbf.process",
    "save_state": "kbf.filters.base",
    "load_state": "kbf.filters.base",
    "KBF": "kbf.nn.kernel_bayes",
    "EnlargedKBF": "kbf.nn.kernel_bayes",
    "EKF": "kbf.filters.ekf",
    "UKF": "kbf.filters.ukf",
    "LearnedKalman": "kbf.filters.kalman_learned",
    "ParticleFilter": "kbf.filters.particle",
    "LSTMFilter": "kbf.filters.recurrent",
    "FrameRegression": "kbf.filters.frame",
    "DSprites": "kbf.data.dsprites",
    "OrientationImages": "kbf.data.dmlab",
    "SyntheticData": "kbf.data.synthetic",
    "simulate": "kbf.ssm",
    "score": "kbf.evaluation",
    "floor": "kbf.evaluation",
    "load_filter": "kbf.checkpoint",
}


def __getattr__(name: str) -> Any:
    """Load a public name from the file that holds it."""
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'kbf' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
