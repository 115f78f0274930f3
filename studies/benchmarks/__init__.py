"""Benchmarks, one for each claim about speed or precision: ``kbf bench NAME``.

Each runs both sides in one process.
"""

BENCHMARKS = {
    "step": "one step of a filter, against the dense textbook filter and the published arithmetic",
    "rank": "error and time against rank, for wide and narrow kernels",
    "batch": "many sequences in a batch, against the matrix products alone",
    "scale": "time and memory against the number of training points",
    "local": "an update by the points of the largest ratios: error against time",
    "filter": "kbf filter on standard input: observations a second, and memory",
    "online": "latency, memory and error over a million steps",
    "checks": (
        "a running filter with its checks of inputs and outputs, against the arithmetic alone"
    ),
    "precision": "float32 against float64, part by part",
    "end_to_end": "training an encoder through the filter, by features and by Gram matrices",
    "cme": "approximations of conditional mean embeddings: error against time",
    "blocks": "whole recordings through kbf filter, in blocks and row by row",
    "smoothing": "errors of filters and smoothers, next to the least possible errors",
    "lorenz": "a UKF on learned maps, against a UKF with the Lorenz equations",
    "serving": "kbf serve, against an empty endpoint of the same framework",
    "peers": "the same tasks with other libraries",
}
"""Every benchmark with what it compares; the module of that name in this folder makes it."""
