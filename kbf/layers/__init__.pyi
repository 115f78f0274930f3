from kbf.layers import (
    kernel_layer as kernel_layer,
    ratio as ratio,
    rollout as rollout,
    rule as rule,
    transition as transition,
)
from kbf.layers.ratio import DensityRatio as DensityRatio
from kbf.layers.rollout import KernelBayesFilterRollout as KernelBayesFilterRollout
from kbf.layers.rule import IWKBR as IWKBR
from kbf.layers.transition import KernelTransition as KernelTransition
