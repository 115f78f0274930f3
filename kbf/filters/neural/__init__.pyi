from kbf.filters.neural import (
    backprop_kf as backprop_kf,
    base as base,
    dpf as dpf,
    gru as gru,
    gru_ensemble as gru_ensemble,
    kalmannet as kalmannet,
    lstm as lstm,
    mamba as mamba,
    rkn as rkn,
    sensor_flags as sensor_flags,
)
