from kbf import _on_demand

# Public names, and the modules that define them.
_HOME = {
    "IWKBR": "kbf.layers.rule",
    "DensityRatio": "kbf.layers.ratio",
    "KernelTransition": "kbf.layers.transition",
    "KernelBayesFilterRollout": "kbf.layers.rollout",
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = _on_demand(__name__, _HOME)
