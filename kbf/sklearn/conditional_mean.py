"""`ConditionalMeanEmbedding`: the conditional mean embedding as a scikit-learn regressor.

It wraps `kbf.rkhs.conditional_means` and selects bandwidth and ridge from the training data. Inputs
are array-likes, outputs NumPy arrays in float64. All columns of X share one bandwidth: use a
StandardScaler before. Requires ``pip install "kbf[sklearn]"``.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Generator, Tensor

from kbf.filters.kernel.hyperparameters import choose_reg
from kbf.rkhs.conditional_means import CONDITIONAL_MEANS, ConditionalMean
from kbf.rkhs.embeddings import Embedding
from kbf.rkhs.kernels import Kernel
from kbf.rkhs.linalg import evenly
from kbf.sklearn.settings import MAX_LOO_POINTS, Array, bandwidth_of, kernel_of, known, positive

REGS = tuple(float(reg) for reg in np.logspace(-8, 0, 17))


class ConditionalMeanEmbedding(RegressorMixin, BaseEstimator):
    """E[y | x] and the conditional distribution of y, as weights of the training outputs.

    The conditional mean is sum_i w_i(x) y_i. With v(x) = (G + n reg I)^-1 k(x) in the exact form,

        w_i(x) = v_i(x) + (1 - sum_j v_j(x)) / n,

    the weights of a regression with intercept: of y - mean(y) by v, plus mean(y). They sum to 1.
    Predictions go to mean(y) far from the training inputs, and a constant added to y is added to
    them.

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
            `kbf.rkhs.conditional_means.base.ConditionalMean` of y - mean(y), with weights v. y_:
            the outputs ``n d``, a tensor. intercept_: mean(y), ``d``.
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
        self.intercept_: Array = self.y_.mean(0).numpy()
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
            kernel if "kernel" in takes else self.bandwidth_, x=x, z=self._residuals(), **settings
        )
        return self

    def predict(self, X: Any) -> Array:
        """Return the conditional means sum_i w_i(x) y_i, ``m`` or ``m d`` as y was."""
        queries = self._queries(X)  # raises where fit was not called
        mean = self.intercept_ + self.cme_.mean(queries).numpy()
        return mean[:, 0] if self.single_ else mean

    def weights(self, X: Any) -> Array:
        """Return the weights w(x) of the training outputs, ``m n``, of either sign, with sum 1."""
        return self._weights(X).numpy()

    def embedding(self, X: Any) -> Embedding:
        """Return the conditional distribution of y as a batch of weighted samples.

        Its methods are ``cov()``, ``expect(f)``, ``mode(kernel)`` and others.
        """
        weights = self._weights(X)  # raises where fit was not called
        return Embedding(self.y_, weights)

    def _weights(self, X: Any) -> Tensor:
        """The weights w(x), with those of the intercept."""
        queries = self._queries(X)
        weights = self.cme_.weights(queries)
        return weights + (1 - weights.sum(-1, keepdim=True)) / len(self.y_)

    def _residuals(self) -> Tensor:
        """The outputs without the intercept."""
        return self.y_ - torch.from_numpy(self.intercept_)

    def _queries(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return torch.tensor(validate_data(self, X, dtype=np.float64, reset=False))

    def _choose(self, kernel: Kernel, x: Tensor) -> float:
        some = evenly(len(x), MAX_LOO_POINTS)
        x, z = x[some], self._residuals()[some]
        return choose_reg(kernel(x, x), z @ z.mT, REGS)

    def __sklearn_tags__(self) -> Any:
        """Return the tags: several outputs are supported."""
        tags = super().__sklearn_tags__()
        tags.target_tags.single_output, tags.target_tags.multi_output = True, True
        return tags
