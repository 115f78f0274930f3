"""Estimators for scikit-learn: the conditional mean embedding, and density ratios.

They wrap `kbf.rkhs.conditional_means` and `kbf.rkhs.ratios`, select hyper-parameters from the
training data, and work in pipelines, grid searches and cross-validation. Inputs are array-likes,
outputs NumPy arrays in float64. All columns of X share one bandwidth: use a StandardScaler before.
Requires ``pip install "kbf[sklearn]"``.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Generator, Tensor

from kbf.filters.kernel.hyperparameters import best_of, choose_reg
from kbf.rkhs.conditional_means import CONDITIONAL_MEANS, ConditionalMean
from kbf.rkhs.embeddings import Embedding
from kbf.rkhs.kernels import KERNELS, Kernel, median_distance
from kbf.rkhs.linalg import evenly
from kbf.rkhs.ratios import relative_coef, relative_loo

Array = NDArray[np.float64]
REGS = tuple(float(reg) for reg in np.logspace(-8, 0, 17))
# Upper bound on the points, evenly spaced, of a leave-one-out score: it bounds the cost.
MAX_LOO_POINTS = 1000


class ConditionalMeanEmbedding(RegressorMixin, BaseEstimator):
    """E[y | x] and the conditional distribution of y, as weights of the training outputs.

    The conditional mean is sum_i w_i(x) y_i.

    w(x) = (G + n reg I)^-1 k(x) in the exact form. As there is no intercept, predictions go to 0
    far from the training inputs.

    Args:
        kernel: a name of `kbf.rkhs.kernels.KERNELS`.
        bandwidth: a length in the units of X; None takes the median distance between training
            inputs.
        reg: lambda > 0; None takes the one of `REGS` with the least leave-one-out error of the mean
            (in closed form, for the exact form, at up to `MAX_LOO_POINTS` evenly spaced pairs).
            `nadaraya_watson` does not use it.
        form: a name of `kbf.rkhs.conditional_means.CONDITIONAL_MEANS`.
        size: of the cheap forms: pivots, landmarks, features, neighbours or points; of
            `divide_and_conquer`: parts.
        random_state: of the forms that draw.

    Attributes:
        bandwidth_, reg_: the numbers in use. cme_: the
            `kbf.rkhs.conditional_means.base.ConditionalMean`. y_: the outputs ``n d``,
        a tensor.
        n_features_in_: columns of X.

    >>> x = np.linspace(0, 6, 60)[:, None]
    >>> fit = ConditionalMeanEmbedding().fit(x, np.sin(x[:, 0]))
    >>> fit.predict([[1.5]]).round(2), fit.weights([[1.5]]).shape
    (array([1.]), (1, 60))
    """

    def __init__(
        self,
        *,
        kernel: Any = "gaussian",
        bandwidth: Any = None,
        reg: Any = None,
        form: Any = "exact",
        size: Any = 100,
        random_state: Any = None,
    ) -> None:  # scikit-learn requires that settings are checked by fit, not here
        self.kernel: Any = kernel
        self.bandwidth: Any = bandwidth
        self.reg: Any = reg
        self.form: Any = form
        self.size: Any = size
        self.random_state: Any = random_state

    def fit(self, X: Any, y: Any) -> ConditionalMeanEmbedding:
        """Select the parameters that are None, and fit.

        Args:
            X: inputs ``n q``. y: outputs ``n`` or ``n d``.

        Raises:
            ValueError: arrays that scikit-learn refuses, a setting out of range, or no bandwidth
                for inputs that mostly coincide.
        """
        X, y = validate_data(
            self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2
        )
        known("form", self.form, CONDITIONAL_MEANS)
        x, z = torch.tensor(X), torch.tensor(y, dtype=torch.float64)
        self.y_: Tensor = z.reshape(len(z), -1)
        self.single_: bool = z.ndim == 1
        self.bandwidth_: float = bandwidth_of(x, self.bandwidth)
        kernel = kernel_of(self.kernel, self.bandwidth_)
        if self.form == "random_fourier" and self.kernel != "gaussian":
            raise ValueError(
                f"random_fourier features are of the gaussian kernel, not of {self.kernel!r}"
            )
        chosen = self._choose(kernel, x) if self.reg is None else self.reg
        self.reg_: float = positive("reg", chosen)
        fit = CONDITIONAL_MEANS[self.form]
        takes = signature(fit).parameters
        settings: dict[str, Any] = {
            name: int(self.size) for name in ("m", "s", "rank") if name in takes
        }
        settings |= {"reg": self.reg_} if "reg" in takes else {}
        if "generator" in takes:
            settings["generator"] = Generator().manual_seed(
                int(check_random_state(self.random_state).randint(2**31))
            )
        self.cme_: ConditionalMean = fit(
            kernel if "kernel" in takes else self.bandwidth_, x=x, z=self.y_, **settings
        )
        return self

    def predict(self, X: Any) -> Array:
        """Return the conditional means sum_i w_i(x) y_i, ``m`` or ``m d`` as y was."""
        queries = self._queries(X)  # raises where fit was not called
        mean = self.cme_.mean(queries).numpy()
        return mean[:, 0] if self.single_ else mean

    def weights(self, X: Any) -> Array:
        """Return the weights w(x) of the training outputs, ``m n``, of either sign and any sum."""
        queries = self._queries(X)
        return self.cme_.weights(queries).numpy()

    def embedding(self, X: Any) -> Embedding:
        """Return the conditional distribution of y as a batch of weighted samples.

        Its methods are ``cov()``, ``expect(f)``, ``mode(kernel)`` and others.
        """
        queries = self._queries(X)
        return Embedding(self.y_, self.cme_.weights(queries))

    def _queries(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))

    def _choose(self, kernel: Kernel, x: Tensor) -> float:
        some = evenly(len(x), MAX_LOO_POINTS)
        x, z = x[some], self.y_[some]
        return choose_reg(kernel(x, x), z @ z.mT, REGS)

    def __sklearn_tags__(self) -> Any:
        """Return the tags: several outputs are supported."""
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output, tags.target_tags.multi_output = True, True
        return tags


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


def bandwidth_of(x: Tensor, given: float | None) -> float:
    """Return the given bandwidth, or the median distance between the points."""
    return median_distance(x).item() if given is None else positive("bandwidth", given)


def kernel_of(name: str, bandwidth: float) -> Kernel:
    """Return a kernel with its bandwidth."""
    return partial(known("kernel", name, KERNELS), bandwidth=bandwidth)


def known(what: str, name: str, table: dict[str, Any]) -> Any:
    """Return the entry of a table.

    Raises:
        ValueError: no entry has this name.
    """
    if name not in table:
        raise ValueError(f"{what} must be one of {', '.join(table)}, got {name!r}")
    return table[name]


def positive(what: str, value: float) -> float:
    """Return the number.

    Raises:
        ValueError: it is not positive.
    """
    if not value > 0:
        raise ValueError(f"{what} must be positive, got {value!r}")
    return float(value)
