"""The linear algebra that the rest stands on: one way to solve, one way to measure distance, one low-rank factor."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kbf.runtime.errors import FitError

SMALL, MANY = 5, 200
"""Rows and columns of matrices, and how many of them, for which a call for each takes longer than arithmetic of all at once."""
FACTORISED = 3
"""Rows of those for which that is true of their factorisation."""
HALVES = (torch.bfloat16, torch.float16)
"""Types that have no factorisation."""
ROUNDING = 1e-6
"""Share of the largest singular value that a matrix in float32 may change by to become a product of two of low rank."""
ROWS_IN_DOUBLE = 4096
"""Rows of a large matrix that are taken to float64 at a time."""
NUMBERS_ONE_BY_ONE = 2**13
"""Numbers in the differences of all pairs of points up to which these are formed one by one: a step of a filter has few."""


class NotPositiveDefiniteError(FitError):
    """A matrix that must be positive definite is not, or holds NaN."""


def psd_solve(
    a: Float[Tensor, "*a n n"],
    b: Float[Tensor, "*b n m"],
    *,
    reg: float | Tensor = 0.0,
    check: bool = True,
) -> Float[Tensor, "*c n m"]:
    """Solve (A + reg I) X = B for a symmetric positive semi-definite A by Cholesky.

    Batches broadcast; one A for a batch of B is factorised once and solved once, with all
    right-hand sides side by side.

    Args:
        a: ``*a n n``, symmetric (only the lower triangle is read).
        b: ``*b n m``.
        reg: added to the diagonal: a scalar, or one value for each matrix of the batch.
        check: ask the factorisation whether it went well. False saves a device synchronisation
            inside a loop, where the caller looks at the result once at the end: where it did not go
            well, X is NaN.

    Raises:
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue. Nothing is retried behind
            the caller's back.

    >>> psd_solve(torch.eye(2), torch.ones(2, 1), reg=1.0).flatten()
    tensor([0.5000, 0.5000])
    """
    if a.dtype != b.dtype or a.dtype in HALVES:  # autocast's products
        kind = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = a.to(kind), b.to(kind)
    if many_small(a, FACTORISED) and b.ndim == 3 and isinstance(reg, float) and reg == 0:
        x = solved_by_component(a, b)
        if not check or math.isfinite(x.sum().item()):  # else LAPACK says what is wrong
            return x
    if (
        check and not torch.compiler.is_exporting()
    ):  # a program cannot raise: where it does not go well, X is NaN
        factor = cholesky(a, reg=reg)
    else:
        factor, info = torch.linalg.cholesky_ex(shifted(a, reg))
        b = b.masked_fill((info != 0)[..., None, None], torch.nan)
    if factor.ndim == 2 and b.ndim > 2:
        columns = b.movedim(-2, 0)
        return (
            torch.cholesky_solve(columns.flatten(1), factor).reshape(columns.shape).movedim(0, -2)
        )
    if (
        factor.is_cuda and factor.ndim > 2
    ):  # there many at once are MAGMA's, which waits for the card and takes memory of its own
        return triangular_solves(factor, b)
    return torch.cholesky_solve(b, factor)


def triangular_solves(
    factor: Float[Tensor, "*a n n"], b: Float[Tensor, "*b n m"]
) -> Float[Tensor, "*c n m"]:
    """L L^T X = B as L Y = B, then L^T X = Y, of a lower triangular L."""
    return torch.linalg.solve_triangular(
        factor.mT, torch.linalg.solve_triangular(factor, b, upper=False), upper=True
    )


def many_small(a: Tensor, size: int = SMALL) -> bool:
    """Whether there are so many small matrices that calls for each of them take longer than arithmetic of all at once."""
    if a.ndim != 3 or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return a.is_cpu and a.shape[0] >= MANY and max(a.shape[1:]) <= size


def product(*factors: Tensor) -> Tensor:
    """The product of matrices: of many small ones by component, with the batch innermost in memory; else as it is."""
    out, *others = factors
    for factor in others:
        out = (
            product_by_component(out, factor)
            if many_small(out) or many_small(factor)
            else out @ factor
        )
    return out


def product_by_component(a: Tensor, b: Tensor) -> Tensor:
    """A B as a sum of k outer products, each of the whole batch; of one A for all B, or one B for all A, as one product."""
    if b.ndim == 2:
        return product_by_component(b.mT, a.mT).mT
    if a.ndim == 2:
        return (
            (a @ b.permute(1, 2, 0).flatten(1))
            .unflatten(1, (b.shape[2], b.shape[0]))
            .permute(2, 0, 1)
        )
    a, b = batch_innermost(a), batch_innermost(b)
    out = a[..., :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        out = torch.addcmul(out, a[..., k : k + 1], b[..., k : k + 1, :])
    return out


def batch_innermost(a: Float[Tensor, "b n m"]) -> Float[Tensor, "b n m"]:
    """The same matrices; of many small ones, laid out in memory as n m vectors over the batch: most arithmetic leaves them so."""
    return (
        a
        if a.stride(0) <= 1 or not many_small(a)
        else a.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    )


def cholesky_by_component(a: Float[Tensor, "b n n"]) -> dict[tuple[int, int], Float[Tensor, " b"]]:
    """The entries of the lower Cholesky factor, each of the whole batch; NaN or 0 on the diagonal where there is none."""
    L: dict[tuple[int, int], Tensor] = {}
    rows = [row.unbind(-1) for row in a.unbind(-2)]
    for j in range(len(rows)):
        for i in range(j, len(rows)):
            rest = rows[i][j]
            for k in range(j):
                rest = torch.addcmul(rest, L[i, k], L[j, k], value=-1)
            L[i, j] = rest.sqrt() if i == j else rest / L[j, j]
    return L


def solved_by_component(
    a: Float[Tensor, "b n n"], b: Float[Tensor, "b n m"]
) -> Float[Tensor, "b n m"]:
    """A X = B by Cholesky, written out: NaN or infinite where A is not positive definite."""
    n = a.shape[-1]
    L = {at: entry[:, None] for at, entry in cholesky_by_component(batch_innermost(a)).items()}
    x = list(batch_innermost(b).unbind(-2))
    for i in range(n):  # L Y = B
        for k in range(i):
            x[i] = torch.addcmul(x[i], L[i, k], x[k], value=-1)
        x[i] = x[i] / L[i, i]
    for i in reversed(range(n)):  # L^T X = Y
        for k in range(i + 1, n):
            x[i] = torch.addcmul(x[i], L[k, i], x[k], value=-1)
        x[i] = x[i] / L[i, i]
    return torch.stack([row.mT for row in x]).permute(2, 0, 1)


def cholesky(a: Float[Tensor, "*a n n"], *, reg: float | Tensor = 0.0) -> Float[Tensor, "*c n n"]:
    """Lower Cholesky factor of A + reg I. Arguments and errors as in `psd_solve`."""
    moved = a if isinstance(reg, float) and reg == 0 else shifted(a, reg)
    if many_small(a, FACTORISED):
        L, n = cholesky_by_component(batch_innermost(moved)), a.shape[-1]
        zero = torch.zeros_like(L[0, 0])
        factor = (
            torch.stack([L.get((i, j), zero) for i in range(n) for j in range(n)])
            .unflatten(0, (n, n))
            .permute(2, 0, 1)
        )
        if bool((factor.diagonal(dim1=-2, dim2=-1) > 0).all()):
            return factor  # else LAPACK says what is wrong
    factor, info = torch.linalg.cholesky_ex(moved)
    if bool(info.any()):
        n, shift = a.shape[-1], torch.as_tensor(reg).max()
        if not torch.isfinite(moved).all():
            raise NotPositiveDefiniteError(
                f"a {n} x {n} matrix to be solved holds NaN or infinite entries"
            )
        smallest = torch.linalg.eigvalsh(moved.detach()).min().item()
        raise NotPositiveDefiniteError(
            f"a {n} x {n} matrix is not positive definite in {a.dtype}: after adding reg = {float(shift):.3g} its smallest "
            f"eigenvalue is {smallest:.3g}. Use a larger ridge, float64, or a lower rank."
        )
    return factor


def shifted(a: Float[Tensor, "*a n n"], reg: float | Tensor) -> Float[Tensor, "*c n n"]:
    """A + reg I ``*c n n``, without making the matrix I."""
    shift = torch.as_tensor(reg, dtype=a.dtype, device=a.device)
    out = a.clone() if shift.ndim == 0 else a + torch.zeros_like(shift)[..., None, None]
    out.diagonal(dim1=-2, dim2=-1).add_(shift[..., None])
    return out


def squared_distance(
    x: Float[Tensor, "*b n q"], y: Float[Tensor, "*c m q"]
) -> Float[Tensor, "*d n m"]:
    """Squared Euclidean distances ||x_i - y_j||^2: of few points as they stand, else expanded into one matrix product.

    For the product the points are centred first, so that it does not cancel when they are far from
    the origin; what is left is an error of a few eps times the squared spread of the points.
    Gradients are finite everywhere, at equal points as well.
    """
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"points of {x.shape[-1]} components have no distance to points of {y.shape[-1]}"
        )
    if x.ndim == y.ndim == 2 and x.shape[0] * y.shape[0] * x.shape[1] <= NUMBERS_ONE_BY_ONE:
        return (x[:, None] - y).square().sum(-1)
    centre = y.mean(-2, keepdim=True).detach()
    x, y = x - centre, y - centre
    cross = x @ y.mT
    return (
        x.square().sum(-1)[..., :, None] + y.square().sum(-1)[..., None, :] - 2 * cross
    ).clamp_min(0)


def two_factors(
    a: Float[Tensor, "n m"], tol: float, worth: float = 0.7
) -> tuple[Tensor, Tensor] | None:
    """A ~ L R, ``n r`` and ``r m`` by the singular vectors of values above ``tol`` times the largest: the error is no larger.

    None where L and R have more than ``worth`` of the numbers of A. In float64 by the eigenvectors
    of A^T A: tol is at least 1e-7.
    """
    gram = a.new_zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for rows in a.split(ROWS_IN_DOUBLE):
        gram.addmm_(rows.double().mT, rows.double())
    squares, vectors = torch.linalg.eigh(gram)
    kept = vectors[:, squares > tol**2 * squares[-1]]
    if kept.shape[1] * sum(a.shape) > worth * a.numel():
        return None
    return torch.cat(
        [(rows.double() @ kept).to(a) for rows in a.split(ROWS_IN_DOUBLE)]
    ), kept.mT.to(a).contiguous()


def safe_sqrt(x: Tensor) -> Tensor:
    """The square root of max(x, 0), with gradient 0 instead of infinity (or NaN) at x <= 0; NaN stays NaN."""
    at_zero = x <= 0
    return torch.where(at_zero, torch.ones_like(x), x).sqrt().masked_fill(at_zero, 0)


def pivoted_cholesky(
    column: Callable[[Tensor], Tensor], diagonal: Float[Tensor, " n"], rank: int, tol: float = 0.0
) -> tuple[Float[Tensor, "n r"], Int[Tensor, " r"]]:
    """Incomplete Cholesky factor with diagonal pivoting: G ~ L L^T, by r columns of G, in O(n r^2).

    Each step takes the point with the largest diagonal entry of G - L L^T, so the trace of this
    residual only falls. It ends early when no entry is above rounding: L L^T is then G.

    Args:
        column: i -> G[:, i], shape ``n`` (i is a zero-dimensional integer tensor).
        diagonal: ``n``, the diagonal of G.
        rank: the largest r.
        tol: stop once the trace of G - L L^T falls to ``tol`` times the trace of G.

    Returns:
        L ``n r`` and the pivots ``r`` in the order of their choice; the rows of L at the pivots are
        lower triangular.

    Raises:
        ValueError: the diagonal holds NaN or infinite entries.

    References: Fine and Scheinberg (2001); Harbrecht, Peters and Schneider (2012).
    """
    if not torch.isfinite(diagonal).all():
        raise ValueError(
            "pivoted_cholesky: the diagonal of the matrix holds NaN or infinite entries"
        )
    n = len(diagonal)
    rank = min(rank, n)
    residual = diagonal.clone()
    trace = residual.sum()
    floor = (
        n * torch.finfo(diagonal.dtype).eps * diagonal.max()
    )  # LAPACK's, for its pivoted factorisation: below is rounding
    factor = diagonal.new_zeros(n, rank)
    pivots = torch.zeros(rank, dtype=torch.long, device=diagonal.device)
    for k in range(rank):
        i = residual.argmax()
        if residual[i] <= floor or residual.clamp_min(0).sum() <= tol * trace:
            return factor[:, :k], pivots[:k]
        factor[:, k] = (column(i) - factor[:, :k] @ factor[i, :k]) / residual[i].sqrt()
        residual = residual - factor[:, k].square()
        residual[i] = 0
        pivots[k] = i
    return factor, pivots


def evenly(n: int, limit: int, device: torch.device | str | None = None) -> Int[Tensor, " m"]:
    """Positions of min(n, limit) of n points, evenly spaced: the subsample that large data is looked at by."""
    if n <= limit:
        return torch.arange(n, device=device)
    return torch.linspace(0, n - 1, limit, dtype=torch.float64, device=device).long()


def column_medians(x: Float[Tensor, "n q"]) -> Float[Tensor, " q"]:
    """The median of each column, of an even number the lower one; by sorting, which a GPU does in the same way every time.

    >>> column_medians(torch.tensor([[3.0, 1.0], [1.0, 2.0], [2.0, 9.0], [7.0, 0.0]])).tolist()
    [2.0, 1.0]
    """
    return x.sort(0).values[(len(x) - 1) // 2]
