"""Conditional mean embeddings over all points: kernel ridge regression, and Nadaraya-Watson weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.conditional_means.base import (
    BLOCK,
    Inputs,
    Mean,
    Outputs,
    Query,
    Weights,
    _by_rows,
    _check,
    _positive,
)
from kbf.rkhs.kernels import Kernel
from kbf.rkhs.linalg import cholesky

# Over all points


@dataclass(frozen=True, eq=False)
class KernelRidge:
    """w(x) = (G + n reg I)^-1 k(x): ``factor`` is the Cholesky factor of G + n reg I, ``coef`` its solution for z."""

    kernel: Kernel
    x: Inputs
    factor: Float[Tensor, "n n"]
    coef: Outputs
    block: int

    def weights(self, query: Query) -> Weights:
        """As in `ConditionalMean`, O(n^2)."""
        return _by_rows(
            lambda rows: torch.cholesky_solve(self.kernel(rows, self.x).mT, self.factor).mT,
            query,
            self.x,
            self.block,
        )

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`, O(n)."""
        return _by_rows(
            lambda rows: self.kernel(rows, self.x) @ self.coef, query, self.x, self.block
        )


def exact(
    kernel: Kernel, x: Inputs, z: Outputs, reg: float | Tensor, *, block: int = BLOCK
) -> KernelRidge:
    """w(x) = (G + n reg I)^-1 k(x): the CME itself, for as many points as a matrix ``n n`` fits. O(n^3).

    Args:
        kernel: k, with its bandwidth filled in.
        x: inputs ``n q``. z: outputs ``n d``, in the same floating-point type.
        reg: lambda > 0.
        block: rows of the largest array of kernel values between queries and points.

    Raises:
        ValueError: no pairs, or not one output for each input; NaN; reg that is not positive.
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue.

    References: Song et al. (2009); Fukumizu et al. (2013); LCKME draft, equation 1.
    """
    _check(x, z, reg)
    factor = cholesky(kernel(x, x), reg=len(x) * reg)
    return KernelRidge(kernel, x, factor, torch.cholesky_solve(z, factor), block)


@dataclass(frozen=True, eq=False)
class NadarayaWatson:
    """w(x) = k(x) / ||k(x)||_1."""

    kernel: Kernel
    x: Inputs
    z: Outputs
    block: int

    def weights(self, query: Query) -> Weights:
        """As in `ConditionalMean`, O(n)."""

        def weights(rows: Tensor) -> Tensor:
            values = self.kernel(rows, self.x)
            return values / _positive(values.abs().sum(-1, keepdim=True))

        return _by_rows(weights, query, self.x, self.block)

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`, O(n)."""

        def mean(rows: Tensor) -> Tensor:
            total, norm = (
                self.z.new_zeros(len(rows), self.z.shape[1]),
                self.z.new_zeros(len(rows), 1),
            )
            for x, z in zip(self.x.split(self.block), self.z.split(self.block), strict=True):
                values = self.kernel(rows, x)
                total, norm = total + values @ z, norm + values.abs().sum(-1, keepdim=True)
            return total / _positive(norm)

        return _by_rows(mean, query, self.x, self.block)


def nadaraya_watson(kernel: Kernel, x: Inputs, z: Outputs, *, block: int = BLOCK) -> NadarayaWatson:
    """w(x) = k(x) / ||k(x)||_1: no ridge and nothing to solve. O(n) a query.

    Where all of k(x) is too small for a number the weights are zero, as those of the other forms
    become. Arguments and errors as in `exact`.

    References: LCKME draft, section 4.3.
    """
    _check(x, z)
    return NadarayaWatson(kernel, x, z, block)
