"""The conditional mean embedding (CME) and its low-cost approximations, with one interface.

The CME of Z given X = x is sum_i w_i(x) k(., z_i), with w(x) = (G + n reg I)^-1 k(x) over n
training pairs (x_i, z_i). Each function of the table `CONDITIONAL_MEANS` fits it or an
approximation and returns a `ConditionalMean`: ``weights`` returns w(x), with zeros at pairs that
the estimator does not use; ``mean`` returns sum_i w_i(x) z_i without computing w(x).

===================== ==================================================== =======================
function              w(x)                                                 cost of a fit, a query
===================== ==================================================== =======================
exact                 (G + n reg I)^-1 k(x)                                n^3, n
incomplete_cholesky   L (n reg I + L^T L)^-1 l(x), G ~ L L^T by m pivots   n m^2, m^2
nystrom               the same with m random landmarks                     n m^2, m^2
random_fourier        the same with m random features in place of l        n m^2, m^2
nearest (LCKME)       (G' + m reg I)^-1 k'(x) over the m nearest points    0, n + m^3
subsample             (G' + m reg I)^-1 k'(x) over m random points         m^3, m
divide_and_conquer    the mean of s exact ones over n/s points each        n^3 / s^2, n
nadaraya_watson       k(x) / ||k(x)||_1                                    0, n
===================== ==================================================== =======================

The cost of a query is that of ``mean``; ``weights`` has n entries and costs n m kernel values if
there are features. ``block`` bounds memory: intermediate arrays have at most about
max(block, m)^2 entries for any n and any number of queries, except for the factors of `exact` and
its averages and the pivots' L. Gradients flow to queries and, except for the choice of points, to
bandwidths, ridges and training pairs. A query with NaN gives NaN only for itself.
"""

from collections.abc import Callable

from kbf.rkhs.conditional_means.base import BLOCK, ConditionalMean
from kbf.rkhs.conditional_means.kernel_ridge import (
    Average,
    KernelRidge,
    NadarayaWatson,
    Nearest,
    divide_and_conquer,
    exact,
    nadaraya_watson,
    nearest,
    subsample,
)
from kbf.rkhs.conditional_means.low_rank import (
    FeatureRidge,
    feature_loo,
    feature_ridge,
    incomplete_cholesky,
    leverage_scores,
    nystrom,
    random_fourier,
)

__all__ = [
    "BLOCK",
    "CONDITIONAL_MEANS",
    "Average",
    "ConditionalMean",
    "FeatureRidge",
    "KernelRidge",
    "NadarayaWatson",
    "Nearest",
    "divide_and_conquer",
    "exact",
    "feature_loo",
    "feature_ridge",
    "incomplete_cholesky",
    "leverage_scores",
    "nadaraya_watson",
    "nearest",
    "nystrom",
    "random_fourier",
    "subsample",
]

# The estimators by name.
#
# All take (kernel, x, z, reg), except `random_fourier` (a bandwidth in place of the kernel) and
# `nadaraya_watson` (no ridge).
CONDITIONAL_MEANS: dict[str, Callable[..., ConditionalMean]] = {
    "exact": exact,
    "incomplete_cholesky": incomplete_cholesky,
    "nystrom": nystrom,
    "random_fourier": random_fourier,
    "nearest": nearest,
    "subsample": subsample,
    "divide_and_conquer": divide_and_conquer,
    "nadaraya_watson": nadaraya_watson,
}
