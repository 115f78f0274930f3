from collections.abc import Callable, Mapping
from typing import Any

from kbf import (
    cli as cli,
    commands as commands,
    config as config,
    cross_validation as cross_validation,
    data as data,
    densities as densities,
    evaluation as evaluation,
    export as export,
    filters as filters,
    fitted as fitted,
    fitting as fitting,
    images as images,
    layers as layers,
    manifolds as manifolds,
    model_choice as model_choice,
    plots as plots,
    recording as recording,
    rkhs as rkhs,
    runtime as runtime,
    serving as serving,
    sklearn as sklearn,
    ssm as ssm,
    training as training,
)
from kbf.cross_validation import (
    CrossValidation as CrossValidation,
    cross_validate as cross_validate,
)
from kbf.data.benchmark_systems import (
    SystemRecordings as SystemRecordings,
    discrete_lorenz as discrete_lorenz,
    double_pendulum as double_pendulum,
    lorenz96 as lorenz96,
    lorenz_flow as lorenz_flow,
    spherical_lorenz as spherical_lorenz,
    turning_target as turning_target,
)
from kbf.data.dataset import Data as Data
from kbf.data.dmlab import OrientationImages as OrientationImages
from kbf.data.dsprites import DSprites as DSprites, position_model as position_model
from kbf.data.files.dataset import FileData as FileData
from kbf.data.noise_systems import (
    Clutter as Clutter,
    Fork as Fork,
    HeavyTails as HeavyTails,
    Multiplicative as Multiplicative,
    Spikes as Spikes,
    Volatility as Volatility,
)
from kbf.data.pendulum import Pendulum as Pendulum, PendulumModel as PendulumModel
from kbf.data.pendulum_rkn import PendulumRKN as PendulumRKN
from kbf.data.recorded import RecordedData as RecordedData
from kbf.data.synthetic import SyntheticData as SyntheticData
from kbf.evaluation import metrics as metrics
from kbf.evaluation.floors import floor as floor
from kbf.evaluation.score import score as score
from kbf.export.onnx_filter import load_onnx as load_onnx
from kbf.filters import smoothing as smoothing
from kbf.filters.gaussian.ekf import EKF as EKF
from kbf.filters.gaussian.kalman import LearnedKalman as LearnedKalman
from kbf.filters.gaussian.learned_ukf import LearnedUKF as LearnedUKF
from kbf.filters.gaussian.ukf import UKF as UKF
from kbf.filters.kernel.algorithm import kernel_bayes_filter as kernel_bayes_filter
from kbf.filters.kernel.feature_kbf import FeatureKBF as FeatureKBF
from kbf.filters.kernel.kbf import KBF as KBF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF as SimulatedKBF
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo as KernelMonteCarlo
from kbf.filters.neural.backprop_kf import BackpropKF as BackpropKF
from kbf.filters.neural.dpf import DPF as DPF
from kbf.filters.neural.gru import GRUFilter as GRUFilter, GRUImages as GRUImages
from kbf.filters.neural.gru_ensemble import FittedGRU as FittedGRU
from kbf.filters.neural.kalmannet import KalmanNet as KalmanNet
from kbf.filters.neural.lstm import LSTMFilter as LSTMFilter
from kbf.filters.neural.mamba import MambaFilter as MambaFilter
from kbf.filters.neural.rkn import RKNFilter as RKNFilter
from kbf.filters.online import (
    RunningFilter as RunningFilter,
    load_state as load_state,
    save_state as save_state,
)
from kbf.filters.particle.bootstrap import ParticleFilter as ParticleFilter
from kbf.filters.particle.learned import (
    LearnedParticleFilter as LearnedParticleFilter,
    ObservationParticleFilter as ObservationParticleFilter,
    PixelParticleFilter as PixelParticleFilter,
)
from kbf.filters.regression.boosting import WindowBoosting as WindowBoosting
from kbf.filters.regression.kernel_ridge import FrameRegression as FrameRegression
from kbf.filters.regression.window import MeanModel as MeanModel, WindowRidge as WindowRidge
from kbf.filters.rollout import rollout as rollout, step as step
from kbf.filters.smoothing import predict_ahead as predict_ahead, smooth as smooth
from kbf.fitted.checkpoint import load_filter as load_filter
from kbf.fitted.estimates import Estimates as Estimates
from kbf.fitted.fitted_filter import FittedFilter as FittedFilter, load as load
from kbf.fitted.online import OnlineFilter as OnlineFilter
from kbf.fitting import check as check, fit as fit
from kbf.images.augment import Augment as Augment, PixelNoise as PixelNoise
from kbf.images.encoders import (
    CNN as CNN,
    Backbone as Backbone,
    PaperMLP as PaperMLP,
    SoftArgmaxCNN as SoftArgmaxCNN,
)
from kbf.recording import Recording as Recording
from kbf.rkhs import kernels as kernels, ratios as ratios, rules as rules
from kbf.runtime.errors import (
    DataError as DataError,
    DataWarning as DataWarning,
    FitError as FitError,
)
from kbf.runtime.threads import tune_process as tune_process
from kbf.ssm import (
    OrientationModel as OrientationModel,
    oscillatory as oscillatory,
    rotation as rotation,
    simulate as simulate,
)
from kbf.training.datamodule import FilterDataModule as FilterDataModule
from kbf.training.filter_stage import FilterTraining as FilterTraining

__version__: str
__all__ = [
    "CNN",
    "DPF",
    "EKF",
    "KBF",
    "UKF",
    "Augment",
    "Backbone",
    "BackpropKF",
    "Clutter",
    "CrossValidation",
    "DSprites",
    "Data",
    "DataError",
    "DataWarning",
    "Estimates",
    "FeatureKBF",
    "FileData",
    "FilterDataModule",
    "FilterTraining",
    "FitError",
    "FittedFilter",
    "FittedGRU",
    "Fork",
    "FrameRegression",
    "GRUFilter",
    "GRUImages",
    "HeavyTails",
    "KalmanNet",
    "KernelMonteCarlo",
    "LSTMFilter",
    "LearnedKalman",
    "LearnedParticleFilter",
    "LearnedUKF",
    "MambaFilter",
    "MeanModel",
    "Multiplicative",
    "ObservationParticleFilter",
    "OnlineFilter",
    "OrientationImages",
    "OrientationModel",
    "PaperMLP",
    "ParticleFilter",
    "Pendulum",
    "PendulumModel",
    "PendulumRKN",
    "PixelNoise",
    "PixelParticleFilter",
    "RKNFilter",
    "RecordedData",
    "Recording",
    "RunningFilter",
    "SimulatedKBF",
    "SoftArgmaxCNN",
    "Spikes",
    "SyntheticData",
    "SystemRecordings",
    "Volatility",
    "WindowBoosting",
    "WindowRidge",
    "__version__",
    "check",
    "cross_validate",
    "discrete_lorenz",
    "double_pendulum",
    "fit",
    "floor",
    "kernel_bayes_filter",
    "load",
    "load_filter",
    "load_onnx",
    "load_state",
    "lorenz96",
    "lorenz_flow",
    "oscillatory",
    "position_model",
    "predict_ahead",
    "rollout",
    "rotation",
    "save_state",
    "score",
    "simulate",
    "smooth",
    "spherical_lorenz",
    "step",
    "tune_process",
    "turning_target",
]

def _on_demand(
    package: str, homes: Mapping[str, str] = ...
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]: ...
