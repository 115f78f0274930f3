"""`RelativeRatio` and `KuLSIF`: density ratios as probabilistic classifiers of scikit-learn.

They wrap `kbf.rkhs.ratios` and select bandwidth and ridge from the training data. Inputs are
array-likes, outputs NumPy arrays in float64. All columns of X share one bandwidth: use a
StandardScaler before. Requires ``pip install "kbf[sklearn]"``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from kbf.filters.kernel.hyperparameters import best_of
from kbf.rkhs.linalg import evenly
from kbf.rkhs.ratios import relative_coef, relative_loo
from kbf.sklearn.settings import MAX_LOO_POINTS, Array, bandwidth_of, kernel_of, positive


class RelativeRatio(ClassifierMixin, BaseEstimator):
    """Relative density ratio r(x) = pi(x) / (alpha pi(x) + (1 - alpha) p(x)) of two samples.

    RuLSIF; the ratio is bounded by 1/alpha.

    y has two labels: the smaller one (0) for the sample of p below the line, the larger one (1) for
    that of pi above it. A ratio makes a probabilistic classifier: with r0 = pi/p and the shares s
    of the labels, P(1 | x) = r0 s1 / (r0 s1 + s0).

    Args:
        alpha: in [0, 1); 0 is KuLSIF.
        kernel: a name of `kbf.rkhs.kernels.KERNELS`.
        bandwidth: a length in the units of X; None takes the median distance between all points.
        reg: eta > 0; None takes the one of nine from 1/min(n, m) to 1 with the least closed-form
            leave-one-out score, at up to `MAX_LOO_POINTS` evenly spaced points of each sample.
            Theory requires at least 1/min(n, m); the score alone would select less where the
            samples do not overlap.

    Attributes:
        classes_: the two labels. bandwidth_, reg_: the numbers in use. points_, coef_: r(x) = sum_l
            coef_l k(x, points_l), clipped.
        share_: of the larger label in y. n_features_in_: columns of X.

    >>> x = np.random.default_rng(0).normal(size=(400, 1)) * np.repeat([[1.0], [0.5]], 200, axis=0)
    >>> fit = RelativeRatio().fit(x, np.repeat([0, 1], 200))
    >>> bool(fit.ratio([[0.0]]) > 1 > fit.ratio([[1.5]])), fit.predict([[0.0], [1.5]])
    (True, array([1, 0]))

    References: Yamada et al. (2013); Kanamori, Suzuki and Sugiyama (2012).
    """

    def __init__(
        self, *, alpha: Any = 0.1, kernel: Any = "gaussian", bandwidth: Any = None, reg: Any = None
    ) -> None:
        self.alpha: Any = alpha
        self.kernel: Any = kernel
        self.bandwidth: Any = bandwidth
        self.reg: Any = reg

    def fit(self, X: Any, y: Any) -> RelativeRatio:
        """Select the parameters that are None, and fit.

        Args:
            X: the points of both samples ``n q``. y: their labels ``n``.

        Raises:
            ValueError: arrays that scikit-learn refuses, not two labels, a setting out of range, or
                no bandwidth for points that mostly coincide.
        """
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_: NDArray[Any] = np.unique(y)
        if len(self.classes_) > 2:
            kind = type_of_target(y, input_name="y")
            raise ValueError(
                f"Only binary classification is supported. The type of the target is {kind}."
            )
        if len(self.classes_) < 2:
            raise ValueError(
                f"a density ratio needs two samples, but y has one class only: {self.classes_[0]!r}"
            )
        samples = [torch.tensor(X[y == label]) for label in self.classes_]
        alpha, chosen = float(self.alpha), self.reg
        self.share_: float = len(samples[1]) / len(y)
        self.points_: Tensor = torch.cat(samples)
        self.bandwidth_: float = bandwidth_of(self.points_, self.bandwidth)
        kernel = kernel_of(self.kernel, self.bandwidth_)
        if chosen is None:
            few = [sample[evenly(len(sample), MAX_LOO_POINTS)] for sample in samples]
            gram = kernel(torch.cat(few), torch.cat(few))
            regs = map(float, np.geomspace(1 / min(map(len, samples)), 1, 9))
            chosen = best_of(regs, lambda reg: relative_loo(gram, len(few[0]), reg, alpha).item())
        self.reg_: float = positive("reg", chosen)
        self.coef_: Tensor = relative_coef(
            kernel(self.points_, self.points_), len(samples[0]), self.reg_, alpha
        )
        return self

    def ratio(self, X: Any) -> Array:
        """Return r(x) of each row of X, clipped to [0, 1/alpha]."""
        check_is_fitted(self)
        x = torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))
        kernel, alpha = kernel_of(self.kernel, self.bandwidth_), float(self.alpha)
        values = torch.cat([kernel(rows, self.points_) @ self.coef_ for rows in x.split(1024)])
        return values.clamp(0, 1 / alpha if alpha > 0 else None).numpy()

    def predict_proba(self, X: Any) -> Array:
        """Return P(label | x) ``m 2``, in the order of ``classes_``.

        It uses pi/p = (1 - alpha) r / (1 - alpha r).
        """
        r, alpha = self.ratio(X), float(self.alpha)
        upper, lower = self.share_ * (1 - alpha) * r, (1 - self.share_) * (1 - alpha * r).clip(0)
        one = upper / (upper + lower)
        return np.stack([1 - one, one], axis=1)

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the more probable label."""
        chosen = self.predict_proba(X).argmax(1)
        return self.classes_[chosen]

    def __sklearn_tags__(self) -> Any:
        """Return the tags: the classifier is binary."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_class = False
        return tags


class KuLSIF(RelativeRatio):
    """Density ratio r(x) = pi(x) / p(x) of two samples by unconstrained least squares (KuLSIF).

    `RelativeRatio` with alpha = 0: not bounded, so of larger variance where p is small.

    References: Kanamori, Suzuki and Sugiyama (2012).
    """

    alpha: Any = 0.0

    def __init__(self, *, kernel: Any = "gaussian", bandwidth: Any = None, reg: Any = None) -> None:
        self.kernel: Any = kernel
        self.bandwidth: Any = bandwidth
        self.reg: Any = reg
