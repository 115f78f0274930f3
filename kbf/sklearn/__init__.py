from kbf import _on_demand

# Public names, and the modules that define them.
_HOME = {
    "ConditionalMeanEmbedding": "kbf.sklearn.conditional_mean",
    "KuLSIF": "kbf.sklearn.density_ratio",
    "RelativeRatio": "kbf.sklearn.density_ratio",
    "StateEstimator": "kbf.sklearn.state_estimator",
}

__all__ = [*_HOME]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = _on_demand(__name__, _HOME)
