"""The conditional mean embedding (CME) and its cheap forms, all with one interface.

The CME of Z given X = x is sum_i w_i(x) k(., z_i), with w(x) = (G + n reg I)^-1 k(x) over n training pairs (x_i, z_i). Each
function of the table `CONDITIONAL_MEANS` fits it, or something cheaper in its place, and returns a `ConditionalMean`: ``weights``
gives w(x), with zeros where a form looks at some of the pairs only; ``mean`` gives sum_i w_i(x) z_i without making w(x).

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

A query costs this for ``mean``; ``weights`` are n numbers, or n m kernel values where there are features. ``block`` bounds memory:
no array made on the way has more than about max(block, m)^2 numbers, whatever n and the number of queries are, but for the
factors of `exact` and its kin and the pivots' L. Gradients flow to queries and, but for the choice of points, to bandwidths, ridges
and training pairs. A query with NaN gives NaN for itself alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from kbf import features
from kbf.kernels import Bandwidth, Kernel
from kbf.linalg import cholesky, psd_solve

BLOCK = 1024
Inputs = Float[Tensor, "n q"]
Outputs = Float[Tensor, "n d"]
Query = Float[Tensor, "*b q"]
Weights = Float[Tensor, "*b n"]
Mean = Float[Tensor, "*b d"]


@runtime_checkable
class ConditionalMean(Protocol):
    """An estimate of E[phi(Z) | X = x] over n training pairs (x_i, z_i)."""

    def weights(self, query: Query) -> Weights:
        """The weights ``*b n`` for queries x ``*b q``, so that ``Embedding(z, weights)`` is the embedding of Z given x."""
        ...

    def mean(self, query: Query) -> Mean:
        """sum_i w_i(x) z_i ``*b d``."""
        ...


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
        return _by_rows(lambda rows: torch.cholesky_solve(self.kernel(rows, self.x).mT, self.factor).mT, query, self.x, self.block)

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`, O(n)."""
        return _by_rows(lambda rows: self.kernel(rows, self.x) @ self.coef, query, self.x, self.block)


def exact(kernel: Kernel, x: Inputs, z: Outputs, reg: float | Tensor, *, block: int = BLOCK) -> KernelRidge:
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
            total, norm = self.z.new_zeros(len(rows), self.z.shape[1]), self.z.new_zeros(len(rows), 1)
            for x, z in zip(self.x.split(self.block), self.z.split(self.block), strict=True):
                values = self.kernel(rows, x)
                total, norm = total + values @ z, norm + values.abs().sum(-1, keepdim=True)
            return total / _positive(norm)

        return _by_rows(mean, query, self.x, self.block)


def nadaraya_watson(kernel: Kernel, x: Inputs, z: Outputs, *, block: int = BLOCK) -> NadarayaWatson:
    """w(x) = k(x) / ||k(x)||_1: no ridge and nothing to solve. O(n) a query.

    Where all of k(x) is too small for a number the weights are zero, as those of the other forms become.
    Arguments and errors as in `exact`.

    References: LCKME draft, section 4.3.
    """
    _check(x, z)
    return NadarayaWatson(kernel, x, z, block)


# On explicit features


@dataclass(frozen=True, eq=False)
class FeatureRidge:
    """w_i(x) = h(x)^T h(x_i) with the whitened features h(x) = root^T base(x); ``coef`` is sum_i h(x_i) z_i^T.

    Both are float64 whatever the type of the data is, and so are the sums: Psi^T Psi squares the condition of Psi. Results are in
    the type of the query.
    """

    base: features.FeatureMap
    root: Float[Tensor, "p r"]
    coef: Float[Tensor, "r d"]
    x: Inputs
    block: int

    def weights(self, query: Query) -> Weights:
        """As in `ConditionalMean`: n p values of the base once for all queries, and O(n p) a query."""
        dual = _by_rows(lambda rows: self.base(rows).double() @ self.root @ self.root.mT, query, self.x, self.block)
        return torch.cat([(dual @ self.base(x).double().mT).to(query.dtype) for x in self.x.split(self.block)], -1)

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`, O(p r): it does not depend on n."""
        return _by_rows(lambda rows: self.base(rows).double() @ self.root @ self.coef, query, self.x, self.block).to(query.dtype)


def feature_ridge(
    base: features.FeatureMap,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    whiten: Float[Tensor, "p r"] | None = None,
    block: int = BLOCK,
) -> FeatureRidge:
    """w(x) = Psi (Psi^T Psi + n reg I)^-1 psi(x) for any features psi(x) = whiten^T base(x): the CME with k = psi^T psi. O(n p^2).

    With R R^T = (Psi^T Psi + n reg I)^-1, h(x) = R^T psi(x). One pass over the points, by ``block`` of them at a time.

    Args:
        base: features ``n q`` -> ``n p``.
        x: ``n q``. z: ``n d``. reg: lambda > 0.
        whiten: ``p r``, or None for the base as it is.
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`.
    """
    _check(x, z, reg)
    whiten = torch.eye(base(x[:1]).shape[-1], dtype=x.dtype, device=x.device) if whiten is None else whiten
    whiten = whiten.double()
    r = whiten.shape[1]
    gram, cross = whiten.new_zeros(r, r), whiten.new_zeros(r, z.shape[1])
    for rows, outputs in zip(x.split(block), z.split(block), strict=True):
        psi = base(rows).double() @ whiten
        gram, cross = gram + psi.mT @ psi, cross + psi.mT @ outputs.double()
    factor = cholesky(gram, reg=len(x) * reg)
    root = torch.linalg.solve_triangular(factor, whiten.mT, upper=False).mT
    coef = torch.linalg.solve_triangular(factor, cross, upper=False)
    return FeatureRidge(base, root, coef, x, block)


def feature_loo(fit: FeatureRidge, z: Outputs) -> Float[Tensor, ""]:
    """Leave-one-out score sum_i ||z_i - m_{-i}(x_i)||^2 in closed form, O(n p r); lower is better.

    m_{-i} is fitted without pair i, with the same features and the same ridge n reg: z_i - m_{-i}(x_i) is
    (z_i - m(x_i)) / (1 - w_i(x_i)). It is `kbf.embeddings.cme_loo` for the kernel psi^T psi of x and the linear kernel of z.

    Args:
        fit: on the training inputs. z: its outputs ``n d``.
    """
    total = fit.coef.new_zeros(())
    for rows, outputs in zip(fit.x.split(fit.block), z.split(fit.block), strict=True):
        h = fit.base(rows).double() @ fit.root
        total = total + ((outputs - h @ fit.coef) / (1 - h.square().sum(-1, keepdim=True))).square().sum()
    return total.to(z.dtype)


def incomplete_cholesky(
    kernel: Kernel, x: Inputs, z: Outputs, reg: float | Tensor, *, rank: int, tol: float = 0.0, block: int = BLOCK
) -> FeatureRidge:
    """w(x) = L (n reg I + L^T L)^-1 l(x), with G ~ L L^T by r pivots and l(x) = L_piv^-1 k_piv(x). O(n r^2).

    l(x_i) is row i of L, so that this is the exact CME of the kernel l(x)^T l(y). At the training points its weights are off by
    at most tr(G - L L^T) / (n reg) in the spectral norm. The search for pivots holds L, ``n r``; it is not kept. For a
    kernel with one value on the diagonal the first pivot is the first training point.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        rank: the most pivots, at most n.
        tol: stop once tr(G - L L^T) <= tol tr(G).
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or rank out of range.

    References: Fine and Scheinberg (2001); LCKME draft, section 4.1, whose equation 5 is `woodbury_weights`.
    """
    _check(x, z, reg, rank=rank)
    return _at_landmarks(kernel, x[features.pivots(kernel, x.double(), rank=rank, tol=tol)], x, z, reg, block)


def woodbury_weights(factor: Float[Tensor, "n r"], query: Weights, reg: float | Tensor) -> Weights:
    """w(x) = (I - L (n reg I + L^T L)^-1 L^T) k(x) / (n reg), the draft's form for incomplete Cholesky. For reference only.

    It is (L L^T + n reg I)^-1 k(x) with the kernel itself in k(x): what of k(x) lies outside of the span of L is divided by n reg
    alone, and explodes with a small ridge. `incomplete_cholesky` approximates G and k(x) alike.

    Args:
        factor: L. query: k(x). reg: lambda > 0.

    References: LCKME draft, equation 5.
    """
    shift = len(factor) * reg
    inside = psd_solve(factor.mT @ factor, (query @ factor)[..., None], reg=shift)[..., 0]
    return (query - inside @ factor.mT) / shift


def nystrom(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    m: int,
    sampling: Literal["uniform", "leverage"] = "uniform",
    pilot: int | None = None,
    replacement: bool = False,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> FeatureRidge:
    """The ridge of `incomplete_cholesky`, on m landmarks drawn at random instead of pivots. O(n m^2).

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: landmarks, at most n.
        sampling: all points alike, or with probabilities in proportion to their `leverage_scores`, which rare regions need.
        pilot: points that the leverage scores are computed from, at most n; m unless given.
        replacement: draw with replacement; a point that is drawn twice is one landmark.
        generator: draws the pilot and the landmarks.
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or m, pilot or sampling out of range.

    References: Williams and Seeger (2001); Alaoui and Mahoney (2015); Rudi, Camoriano and Rosasco (2015).
    """
    pilot = m if pilot is None else pilot
    _check(x, z, reg, m=m, pilot=pilot)
    if sampling not in ("uniform", "leverage"):
        raise ValueError(f"sampling must be 'uniform' or 'leverage', got {sampling!r}")
    if sampling == "uniform":
        scores = torch.ones(len(x))
    else:
        with torch.no_grad():
            scores = leverage_scores(kernel, x, reg, x[_draw(len(x), pilot, generator, x)], block=block).cpu()
    chosen = torch.multinomial(scores, m, replacement, generator=generator).unique()
    return _at_landmarks(kernel, x[chosen.to(x.device)], x, z, reg, block)


def leverage_scores(
    kernel: Kernel, x: Inputs, reg: float | Tensor, pilot: Float[Tensor, "m q"], *, block: int = BLOCK
) -> Float[Tensor, " n"]:
    """Approximate ridge leverage scores [G (G + n reg I)^-1]_ii: how much the fit at x_i hangs on pair i alone. O(n m^2).

    (k(x_i, x_i) - k_J(x_i)^T (G_J + m reg I)^-1 k_J(x_i)) / (n reg) over a uniform sample J, the pilot: exact when J is everything,
    large for points that J does not reach. Kept within [eps, 1], so that every point can be drawn.

    Args:
        kernel: k. x: ``n q``. reg: lambda > 0.
        pilot: J, ``m q``.
        block: points at a time.

    References: Rudi, Calandriello, Carratino and Rosasco (2018).
    """
    pilot = pilot.double()  # 1 - (1 - small) / small
    factor = cholesky(kernel(pilot, pilot), reg=len(pilot) * reg)
    residuals = []
    for rows in x.double().split(block):
        own = kernel(rows[:, None], rows[:, None])[:, 0, 0]
        residuals.append(own - torch.linalg.solve_triangular(factor, kernel(pilot, rows), upper=False).square().sum(0))
    return (torch.cat(residuals) / (len(x) * reg)).clamp(torch.finfo(x.dtype).eps, 1).to(x.dtype)


def random_fourier(
    bandwidth: Bandwidth,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    m: int,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> FeatureRidge:
    """w(x) = Psi (Psi^T Psi + n reg I)^-1 psi(x) with m random Fourier features of the Gaussian kernel. O(n m^2).

    Args:
        bandwidth: of the Gaussian kernel.
        x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: features, an even number (it may exceed n).
        generator: draws the frequencies.
        block: points at a time.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or m is odd.

    References: Rahimi and Recht (2007); LCKME draft, section 4.4, there with complex features and the ridge m reg.
    """
    return feature_ridge(features.random_fourier(x.shape[1], m, bandwidth=bandwidth, generator=generator), x, z, reg, block=block)


# Near the query


@dataclass(frozen=True, eq=False)
class Nearest:
    """w(x) = (G' + m reg I)^-1 k'(x) over the m points that ``find`` says for x."""

    kernel: Kernel
    x: Inputs
    z: Outputs
    reg: float | Tensor
    m: int
    find: Callable[[Tensor], Tensor]
    block: int

    def pairs(self, query: Float[Tensor, "c q"]) -> tuple[Int[Tensor, "c m"], Float[Tensor, "c m"]]:
        """Positions of the m points, and their weights."""
        index = self.find(query.detach())
        size = max(1, self.block**2 // self.m**2)
        solved = [self._solve(*part) for part in zip(query.split(size), self.x[index].split(size), strict=True)]
        return index, torch.cat(solved)

    def weights(self, query: Query) -> Weights:
        """As in `ConditionalMean`."""

        def dense(rows: Tensor) -> Tensor:
            index, w = self.pairs(rows)
            return w.new_zeros(len(rows), len(self.x)).scatter(-1, index, w)

        return _by_rows(dense, query, self.x, self.block)

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`."""

        def mean(rows: Tensor) -> Tensor:
            index, w = self.pairs(rows)
            return (w[:, None] @ self.z[index])[:, 0]

        return _by_rows(mean, query, self.x, self.block)

    def _solve(self, query: Tensor, near: Tensor) -> Tensor:
        return psd_solve(self.kernel(near, near), self.kernel(near, query[:, None]), reg=self.m * self.reg)[..., 0]


def nearest(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    m: int,
    search: Literal["kernel", "tree"] = "kernel",
    block: int = BLOCK,
) -> Nearest:
    """LCKME: w(x) = (G' + m reg I)^-1 k'(x) over the m training points nearest to x alone. O(n + m^3) a query, nothing to fit.

    The weights jump where the m-th neighbour changes: gradients are those between the jumps.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: neighbours, at most n.
        search: the points with the largest k(x, x_i), by comparing with all of them; or the nearest in Euclidean distance by a
            k-d tree, in O(log n) for few components (up to about 10) and the same where k falls with this distance. The tree is
            on the CPU, and is no copy: it does not see a later change of x.
        block: memory, as for all.

    Raises:
        ValueError: as in `exact`; or m or search out of range. NotPositiveDefiniteError: at a query, as in `exact`.

    References: LCKME draft, Algorithm 1 and equation 4.
    """
    _check(x, z, reg, m=m)
    if search not in ("kernel", "tree"):
        raise ValueError(f"search must be 'kernel' or 'tree', got {search!r}")
    find = partial(_largest, kernel, x.detach(), m, block) if search == "kernel" else _tree(x, m)
    return Nearest(kernel, x, z, reg, m, find, block)


@torch.no_grad()
def _largest(kernel: Kernel, x: Tensor, m: int, block: int, query: Tensor) -> Tensor:
    """Positions of the m largest k(query, x_i), best first: the best of each block against the best so far."""
    best, index = query.new_empty(len(query), 0), torch.empty(len(query), 0, dtype=torch.long, device=query.device)
    for positions in torch.arange(len(x), device=query.device).split(block):
        values = torch.cat([best, kernel(query, x[positions])], -1)
        index = torch.cat([index, positions.expand(len(query), -1)], -1)
        best, chosen = values.topk(min(m, values.shape[-1]))
        index = index.gather(-1, chosen)
    return index


def _tree(x: Tensor, m: int) -> Callable[[Tensor], Tensor]:
    """Queries -> positions of the m nearest points, by a k-d tree."""
    from scipy.spatial import KDTree  # here, because it takes a while

    tree = KDTree(x.detach().cpu().numpy())

    def find(query: Tensor) -> Tensor:
        index = torch.as_tensor(tree.query(query.nan_to_num().cpu().numpy(), m)[1], dtype=torch.long, device=x.device)
        return index.reshape(len(query), m)  # for m = 1 the tree drops the last axis

    return find


# Over parts of the points


@dataclass(frozen=True, eq=False)
class Average:
    """The mean of estimators over parts of the n points, each with the positions of its part."""

    n: int
    parts: tuple[tuple[Tensor, KernelRidge], ...]

    def weights(self, query: Query) -> Weights:
        """As in `ConditionalMean`; zero at points in no part."""
        index = torch.cat([index for index, _ in self.parts])
        w = torch.cat([fit.weights(query) for _, fit in self.parts], -1) / len(self.parts)
        return w.new_zeros(*w.shape[:-1], self.n).index_copy(-1, index, w)

    def mean(self, query: Query) -> Mean:
        """As in `ConditionalMean`."""
        return sum((fit.mean(query) for _, fit in self.parts[1:]), self.parts[0][1].mean(query)) / len(self.parts)


def subsample(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    m: int,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> Average:
    """w(x) = (G' + m reg I)^-1 k'(x) over m points drawn at random, zero at the others. O(m^3).

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        m: points to draw without replacement, at most n.
        generator: draws them.
        block: as in `exact`.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or m out of range.

    References: Cortes et al. (2005); LCKME draft, section 4.2.
    """
    _check(x, z, reg, m=m)
    index = _draw(len(x), m, generator, x)
    return Average(len(x), ((index, exact(kernel, x[index], z[index], reg, block=block)),))


def divide_and_conquer(
    kernel: Kernel,
    x: Inputs,
    z: Outputs,
    reg: float | Tensor,
    *,
    s: int,
    generator: Generator | None = None,
    block: int = BLOCK,
) -> Average:
    """The mean of s exact CMEs over disjoint random parts of about n/s points. O(n^3 / s^2), with factors of n^2 / s numbers.

    Each part keeps reg (its ridge is reg times its own number of points), as if it had all points: it undersmooths, and the mean
    takes the variance away.

    Args:
        kernel: k. x: ``n q``. z: ``n d``. reg: lambda > 0.
        s: parts, at most n.
        generator: draws them.
        block: as in `exact`.

    Raises:
        ValueError, NotPositiveDefiniteError: as in `exact`; or s out of range.

    References: Zhang, Duchi and Wainwright (2015).
    """
    _check(x, z, reg, s=s)
    parts = _draw(len(x), len(x), generator, x).tensor_split(s)
    return Average(len(x), tuple((index, exact(kernel, x[index], z[index], reg, block=block)) for index in parts))


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
"""Every form by its name. All take (kernel, x, z, reg), but for `random_fourier` (a bandwidth, no kernel) and `nadaraya_watson`
(no ridge)."""


# What they share


def _at_landmarks(kernel: Kernel, landmarks: Tensor, x: Tensor, z: Tensor, reg: float | Tensor, block: int) -> FeatureRidge:
    """Ridge on psi(x) = L^-1 k(landmarks, x), L L^T the landmarks' Gram matrix with a jitter of eps^(2/3).

    The kernel is taken in float64 as well: in float32 the jitter would have to be 2e-5, which costs more than all other rounding.
    """
    double = landmarks.double()
    jitter = torch.finfo(double.dtype).eps ** (2 / 3)  # 4e-11: above the rounding of a Gram matrix, far below m reg
    whiten = features.nystrom_whitening(kernel(double, double), jitter=jitter)
    return feature_ridge(partial(_against, kernel, double), x, z, reg, whiten=whiten, block=block)


def _against(kernel: Kernel, landmarks: Tensor, rows: Tensor) -> Tensor:
    """k(rows, landmarks) in the type of the landmarks; a function of the module, so that a fit can be pickled."""
    return kernel(rows.to(landmarks.dtype), landmarks)


def _by_rows(f: Callable[[Tensor], Tensor], query: Tensor, x: Tensor, block: int) -> Tensor:
    """F of the queries ``*b q``, for an f that takes ``c q``, by at most ``block`` of them at a time."""
    if query.shape[-1] != x.shape[-1]:
        raise ValueError(f"queries need {x.shape[-1]} components like the training points, got {tuple(query.shape)}")
    out = torch.cat([f(rows) for rows in query.reshape(-1, x.shape[-1]).split(block)])
    return out.reshape(*query.shape[:-1], out.shape[-1])


def _draw(n: int, m: int, generator: Generator | None, like: Tensor) -> Tensor:
    """Positions of m of n points, without replacement."""
    return torch.randperm(n, generator=generator)[:m].to(like.device)


def _positive(norm: Tensor) -> Tensor:
    """1 in place of 0, to divide by."""
    return torch.where(norm == 0, torch.ones_like(norm), norm)


def _check(x: Tensor, z: Tensor, reg: float | Tensor | None = None, **counts: int) -> None:
    """Raise a ValueError for what no form can be fitted to."""
    if len(x) < 1 or len(x) != len(z) or x.dtype != z.dtype:
        got = f"{tuple(x.shape)} in {x.dtype} and {tuple(z.shape)} in {z.dtype}"
        raise ValueError(f"a conditional mean needs at least one input and one output for each, of one type, got {got}")
    for name, values in {"inputs x": x, "outputs z": z}.items():
        bad = int((~torch.isfinite(values)).any(-1).sum())
        if bad:
            raise ValueError(f"the {name} hold NaN or infinite values in {bad} of {len(x)} rows: leave these pairs out")
    if reg is not None and not reg > 0:
        raise ValueError(f"reg must be positive, got {float(reg)}")
    for name, count in counts.items():
        if not 1 <= count <= len(x):
            raise ValueError(f"{name} must be between 1 and the number of training pairs, {len(x)}, got {count}")
