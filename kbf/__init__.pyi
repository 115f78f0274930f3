from collections.abc import Callable
from types import ModuleType

from kbf import (
    cli as cli,
    commands as commands,
    config as config,
    data as data,
    evaluation as evaluation,
    export as export,
    filters as filters,
    images as images,
    manifolds as manifolds,
    plots as plots,
    recording as recording,
    rkhs as rkhs,
    runtime as runtime,
    sklearn as sklearn,
    ssm as ssm,
    training as training,
)
from kbf.data.dataset import Data as Data
from kbf.data.dmlab import OrientationImages as OrientationImages
from kbf.data.dsprites import DSprites as DSprites
from kbf.data.synthetic import SyntheticData as SyntheticData
from kbf.evaluation import metrics as metrics
from kbf.evaluation.floors import floor as floor
from kbf.evaluation.score import score as score
from kbf.filters import smoothing as smoothing
from kbf.filters.gaussian.ekf import EKF as EKF
from kbf.filters.gaussian.learned_kalman import LearnedKalman as LearnedKalman
from kbf.filters.gaussian.ukf import UKF as UKF
from kbf.filters.kernel.algorithm import kernel_bayes_filter as kernel_bayes_filter
from kbf.filters.kernel.kbf import KBF as KBF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF as SimulatedKBF
from kbf.filters.neural.lstm import LSTMFilter as LSTMFilter
from kbf.filters.online import Live as Live
from kbf.filters.particle.bootstrap import ParticleFilter as ParticleFilter
from kbf.filters.regression.kernel_ridge import FrameRegression as FrameRegression
from kbf.filters.rollout import rollout as rollout, step as step
from kbf.filters.smoothing import predict_ahead as predict_ahead, smooth as smooth
from kbf.filters.state_io import load_state as load_state, save_state as save_state
from kbf.recording import Recording as Recording
from kbf.rkhs import kernels as kernels, ratios as ratios, rules as rules
from kbf.runtime.threads import tune_process as tune_process
from kbf.ssm import simulate as simulate
from kbf.training.checkpoint import load_filter as load_filter
from kbf.training.datamodule import FilterDataModule as FilterDataModule
from kbf.training.filter_stage import FilterTraining as FilterTraining
from studies import benchmarks as benchmarks, papers as papers

__version__: str
__all__ = [
    "EKF",
    "KBF",
    "UKF",
    "DSprites",
    "Data",
    "FilterDataModule",
    "FilterTraining",
    "FrameRegression",
    "LSTMFilter",
    "LearnedKalman",
    "Live",
    "OrientationImages",
    "ParticleFilter",
    "Recording",
    "SimulatedKBF",
    "SyntheticData",
    "__version__",
    "floor",
    "kernel_bayes_filter",
    "load_filter",
    "load_state",
    "predict_ahead",
    "rollout",
    "save_state",
    "score",
    "simulate",
    "smooth",
    "step",
    "tune_process",
]

def _on_demand(package: str) -> tuple[Callable[[str], ModuleType], Callable[[], list[str]]]: ...
