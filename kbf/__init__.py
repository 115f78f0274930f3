"""Kernel Bayes Filter in PyTorch. ``import kbf`` loads no module: names are loaded at first use.

Types for editors and type checkers are in ``__init__.pyi`` next to this file, and in those of the
subpackages.
"""

import importlib
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

__version__ = "0.1.0"

# Public names, and the modules that define them.
_HOME = {
    "fit": "kbf.fitting",
    "check": "kbf.fitting",
    "cross_validate": "kbf.cross_validation",
    "CrossValidation": "kbf.cross_validation",
    "load": "kbf.fitted.fitted_filter",
    "load_onnx": "kbf.export.onnx_filter",
    "FittedFilter": "kbf.fitted.fitted_filter",
    "Estimates": "kbf.fitted.estimates",
    "OnlineFilter": "kbf.fitted.online",
    "DataError": "kbf.runtime.errors",
    "DataWarning": "kbf.runtime.errors",
    "Recording": "kbf.recording",
    "FitError": "kbf.runtime.errors",
    "rollout": "kbf.filters.rollout",
    "step": "kbf.filters.rollout",
    "smooth": "kbf.filters.smoothing",
    "predict_ahead": "kbf.filters.smoothing",
    "RunningFilter": "kbf.filters.online",
    "tune_process": "kbf.runtime.threads",
    "save_state": "kbf.filters.online",
    "load_state": "kbf.filters.online",
    "kernel_bayes_filter": "kbf.filters.kernel.algorithm",
    "KBF": "kbf.filters.kernel.kbf",
    "SimulatedKBF": "kbf.filters.kernel.simulated_kbf",
    "EKF": "kbf.filters.gaussian.ekf",
    "UKF": "kbf.filters.gaussian.ukf",
    "LearnedKalman": "kbf.filters.gaussian.kalman",
    "LearnedUKF": "kbf.filters.gaussian.learned_ukf",
    "ParticleFilter": "kbf.filters.particle.bootstrap",
    "LSTMFilter": "kbf.filters.neural.lstm",
    "FrameRegression": "kbf.filters.regression.kernel_ridge",
    "Data": "kbf.data.dataset",
    "DSprites": "kbf.data.dsprites",
    "OrientationImages": "kbf.data.dmlab",
    "SyntheticData": "kbf.data.synthetic",
    "simulate": "kbf.ssm",
    "score": "kbf.evaluation.score",
    "floor": "kbf.evaluation.floors",
    "load_filter": "kbf.fitted.checkpoint",
    "FilterTraining": "kbf.training.filter_stage",
    "FilterDataModule": "kbf.training.datamodule",
    "position_model": "kbf.data.dsprites",
    "FileData": "kbf.data.files.dataset",
    "SystemRecordings": "kbf.data.benchmark_systems",
    "discrete_lorenz": "kbf.data.benchmark_systems",
    "double_pendulum": "kbf.data.benchmark_systems",
    "lorenz96": "kbf.data.benchmark_systems",
    "lorenz_flow": "kbf.data.benchmark_systems",
    "spherical_lorenz": "kbf.data.benchmark_systems",
    "turning_target": "kbf.data.benchmark_systems",
    "Clutter": "kbf.data.noise_systems",
    "Fork": "kbf.data.noise_systems",
    "HeavyTails": "kbf.data.noise_systems",
    "Multiplicative": "kbf.data.noise_systems",
    "Spikes": "kbf.data.noise_systems",
    "Volatility": "kbf.data.noise_systems",
    "Pendulum": "kbf.data.pendulum",
    "PendulumModel": "kbf.data.pendulum",
    "PendulumRKN": "kbf.data.pendulum_rkn",
    "RecordedData": "kbf.data.recorded",
    "FeatureKBF": "kbf.filters.kernel.feature_kbf",
    "KernelMonteCarlo": "kbf.filters.kernel_monte_carlo.model",
    "BackpropKF": "kbf.filters.neural.backprop_kf",
    "DPF": "kbf.filters.neural.dpf",
    "FittedGRU": "kbf.filters.neural.gru_ensemble",
    "GRUFilter": "kbf.filters.neural.gru",
    "GRUImages": "kbf.filters.neural.gru",
    "RKNFilter": "kbf.filters.neural.rkn",
    "KalmanNet": "kbf.filters.neural.kalmannet",
    "MambaFilter": "kbf.filters.neural.mamba",
    "LearnedParticleFilter": "kbf.filters.particle.learned",
    "ObservationParticleFilter": "kbf.filters.particle.learned",
    "PixelParticleFilter": "kbf.filters.particle.learned",
    "WindowBoosting": "kbf.filters.regression.boosting",
    "MeanModel": "kbf.filters.regression.window",
    "WindowRidge": "kbf.filters.regression.window",
    "Augment": "kbf.images.augment",
    "PixelNoise": "kbf.images.augment",
    "Backbone": "kbf.images.encoders",
    "CNN": "kbf.images.encoders",
    "PaperMLP": "kbf.images.encoders",
    "SoftArgmaxCNN": "kbf.images.encoders",
    "OrientationModel": "kbf.ssm",
    "oscillatory": "kbf.ssm",
    "rotation": "kbf.ssm",
}

# Modules that have a short name in addition.
_SHORT = {
    "smoothing": "kbf.filters.smoothing",
    "kernels": "kbf.rkhs.kernels",
    "rules": "kbf.rkhs.rules",
    "ratios": "kbf.rkhs.ratios",
    "metrics": "kbf.evaluation.metrics",
}

__all__ = [*sorted(_HOME), "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]


def _on_demand(
    package: str, homes: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns ``__getattr__`` and ``__dir__`` of a package that loads its modules at first use.

    Args:
        package: the full name of a package, as in ``__getattr__, __dir__ = _on_demand(__name__)``
            at its top.
        homes: public names of the package itself, and the modules that define them.

    >>> import kbf.rkhs
    >>> kbf.rkhs.kernels.__name__
    'kbf.rkhs.kernels'
    """

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(homes[name]), name)
        full = f"{package}.{name}"
        try:
            if name.startswith("_"):
                raise ModuleNotFoundError(name=full)
            return importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:  # the module exists, and imports one that is not installed
                raise
            raise AttributeError(f"module {package!r} has no attribute {name!r}") from None

    def names() -> list[str]:
        import pkgutil

        modules = pkgutil.iter_modules(sys.modules[package].__path__)
        public = (module.name for module in modules if not module.name.startswith("_"))
        return sorted({*homes, *public})

    return get, names


_public, _names = _on_demand(__name__, _HOME)


def __getattr__(name: str) -> Any:
    """Returns a public name, after the import of the module that defines it, or a module."""
    return importlib.import_module(_SHORT[name]) if name in _SHORT else _public(name)


def __dir__() -> list[str]:
    return sorted({"__version__", *_names(), *_SHORT})
