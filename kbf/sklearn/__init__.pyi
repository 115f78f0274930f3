from kbf.sklearn import (
    conditional_mean as conditional_mean,
    density_ratio as density_ratio,
    settings as settings,
    state_estimator as state_estimator,
)
from kbf.sklearn.conditional_mean import ConditionalMeanEmbedding as ConditionalMeanEmbedding
from kbf.sklearn.density_ratio import KuLSIF as KuLSIF, RelativeRatio as RelativeRatio
from kbf.sklearn.state_estimator import StateEstimator as StateEstimator
