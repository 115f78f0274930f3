"""The conditional mean embedding (CME) and its cheap forms, all with one interface.

The CME of Z given X = x is sum_i w_i(x) k(., z_i), with w(x) = (G + n reg I)^-1 k(x) over n
training pairs (x_i, z_i). Each function of the table `CONDITIONAL_MEANS` fits it, or something
cheaper in its place, and returns a `ConditionalMean`: ``weights`` gives w(x), with zeros where a
form looks at some of the pairs only; ``mean`` gives sum_i w_i(x) z_i without making w(x).

===================== =========================================================== =====================
function              w(x)                                                        cost: once, a query
===================== =========================================================== =====================
exact                 (G + n reg I)^-1 k(x)                                       n^3, n
incomplete_cholesky   L (n reg I + L^T L)^-1 l(x), G ~ L L^T by m pivots          n m^2, m^2
nystrom               the same with m landmarks drawn at random                   n m^2, m^2
random_fourier        the same with m random features in place of l               n m^2, m^2
nearest (LCKME)       (G' + m reg I)^-1 k'(x) over the m points nearest to x      0, n + m^3
subsample             (G' + m reg I)^-1 k'(x) over m points drawn at random       m^3, m
divide_and_conquer    the mean of s exact ones over n/s points each               n^3 / s^2, n
nadaraya_watson       k(x) / ||k(x)||_1                                           0, n
===================== =========================================================== =====================

A query costs this for ``mean``; ``weights`` are n numbers, or n m kernel values where there are
features. ``block`` bounds memory: no array made on the way has more than about max(block, m)^2
numbers, whatever n and the number of queries are, but for the factors of `exact` and its kin and
the pivots' L. Gradients flow to queries and, but for the choice of points, to bandwidths, ridges
and training pairs. A query with NaN gives NaN for itself alone.
"""

from __future__ import annotations

from kbf.rkhs.conditional_means.all_points import (
    KernelRidge,
    NadarayaWatson,
    exact,
    nadaraya_watson,
)
from kbf.rkhs.conditional_means.base import BLOCK, ConditionalMean
from kbf.rkhs.conditional_means.local import Nearest, nearest
from kbf.rkhs.conditional_means.low_rank import (
    FeatureRidge,
    feature_loo,
    feature_ridge,
    incomplete_cholesky,
    leverage_scores,
    nystrom,
    random_fourier,
)
from kbf.rkhs.conditional_means.parts import Average, divide_and_conquer, subsample
from kbf.rkhs.conditional_means.table import CONDITIONAL_MEANS

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
