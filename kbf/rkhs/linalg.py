"""Linear algebra: solves by Cholesky, squared distances, low-rank factors, subsamples."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kbf.runtime.errors import FitError

# Largest change of a float32 matrix by `two_factors`, over its largest singular value.
ROUNDING = 1e-6

# Matrices of a batch are multiplied by component, all at once, if there are at least
# MIN_MATRICES_BY_COMPONENT of at most MAX_ROWS_BY_COMPONENT rows and columns: one library call for
# each takes longer. For factorisations this holds up to MAX_ROWS_FACTORISED_BY_COMPONENT rows.
MIN_MATRICES_BY_COMPONENT = 200
MAX_ROWS_BY_COMPONENT = 5
MAX_ROWS_FACTORISED_BY_COMPONENT = 3

# PyTorch has no factorisation of these types.
HALF_PRECISION = (torch.bfloat16, torch.float16)

# Rows of a large matrix that are converted to float64 at a time.
FLOAT64_BLOCK = 4096

# Up to this number of entries, differences of all pairs of points are computed directly. The points
# in a step of a filter are few.
MAX_DIRECT_DIFFERENCES = 2**13


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

    Batches broadcast; one A for a batch of B is factorised once and solved once, for all
    right-hand sides together.

    Args:
        a: ``*a n n``, symmetric (only the lower triangle is read).
        b: ``*b n m``.
        reg: added to the diagonal: a scalar, or one value for each matrix of the batch.
        check: raise an error if the factorisation fails. With False X is NaN there, which saves a
            device synchronisation inside a loop whose caller checks the result once at the end.

    Raises:
        NotPositiveDefiniteError: with n, reg and the smallest eigenvalue. There is no silent retry
            with a larger ridge.

    >>> psd_solve(torch.eye(2), torch.ones(2, 1), reg=1.0).flatten()
    tensor([0.5000, 0.5000])
    """
    if a.dtype != b.dtype or a.dtype in HALF_PRECISION:  # autocast's products
        kind = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
        a, b = a.to(kind), b.to(kind)
    if (
        many_small(a, MAX_ROWS_FACTORISED_BY_COMPONENT)
        and b.ndim == 3
        and isinstance(reg, float)
        and reg == 0
    ):
        x = solved_by_component(a, b)
        if not check or math.isfinite(x.sum().item()):  # else the error comes from LAPACK
            return x
    if check and not torch.compiler.is_exporting():  # an exported program cannot raise
        factor = cholesky(a, reg=reg)
    else:
        factor, info = torch.linalg.cholesky_ex(shifted(a, reg))
        b = b.masked_fill((info != 0)[..., None, None], torch.nan)
    if factor.ndim == 2 and b.ndim > 2:
        columns = b.movedim(-2, 0)
        return (
            torch.cholesky_solve(columns.flatten(1), factor).reshape(columns.shape).movedim(0, -2)
        )
    if factor.is_cuda and factor.ndim > 2:
        # For batches PyTorch calls MAGMA, which synchronises and allocates memory of its own.
        return triangular_solves(factor, b)
    return torch.cholesky_solve(b, factor)


def triangular_solves(
    factor: Float[Tensor, "*a n n"], b: Float[Tensor, "*b n m"]
) -> Float[Tensor, "*c n m"]:
    """Solve L L^T X = B for a lower triangular L: L Y = B, then L^T X = Y."""
    y = torch.linalg.solve_triangular(factor, b, upper=False)
    return torch.linalg.solve_triangular(factor.mT, y, upper=True)


def many_small(a: Tensor, size: int = MAX_ROWS_BY_COMPONENT) -> bool:
    """Return whether arithmetic by component is faster than a library call for each matrix."""
    if a.ndim != 3 or torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    return a.is_cpu and a.shape[0] >= MIN_MATRICES_BY_COMPONENT and max(a.shape[1:]) <= size


def product(*factors: Tensor) -> Tensor:
    """Return the product of matrices; many small ones are multiplied by component."""
    out, *others = factors
    for factor in others:
        by_component = many_small(out) or many_small(factor)
        out = product_by_component(out, factor) if by_component else out @ factor
    return out


def row_product(
    a: Float[Tensor, "*b n"], matrix: Float[Tensor, "*#b n m"]
) -> Float[Tensor, "*b m"]:
    """Return a^T M of one matrix for all vectors, or of one for each.

    >>> row_product(torch.ones(2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([4., 6.])
    """
    return (a[..., None, :] @ matrix)[..., 0, :] if matrix.ndim > 2 else a @ matrix


def product_by_component(a: Tensor, b: Tensor) -> Tensor:
    """Return A B as a sum of k outer products, each of the whole batch.

    One A for all B, or one B for all A, is a single matrix product.
    """
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
    """Return the matrices; many small ones are stored as n m vectors over the batch.

    Most arithmetic preserves this order of the memory.
    """
    if a.stride(0) <= 1 or not many_small(a):
        return a
    return a.permute(1, 2, 0).contiguous().permute(2, 0, 1)


def cholesky_by_component(a: Float[Tensor, "b n n"]) -> dict[tuple[int, int], Float[Tensor, " b"]]:
    """Return the entries of the lower Cholesky factor, each of the whole batch.

    Where there is no factor the diagonal has NaN or 0.
    """
    L: dict[tuple[int, int], Tensor] = {}
    rows = [row.unbind(-1) for row in a.unbind(-2)]
    for j in range(len(rows)):
        for i in range(j, len(rows)):
            rest = rows[i][j]
            for k in range(j):
                rest = torch.addcmul(rest, L[i, k], L[j, k], value=-1)
            L[i, j] = rest.sqrt() if i == j else rest / L[j, j]
    return L


def cholesky_by_column(a: Float[Tensor, "*a n n"]) -> Float[Tensor, "*a n n"]:
    """Return the lower Cholesky factor by sums and products; NaN where there is none.

    References: Golub and Van Loan (2013), algorithm 4.2.1.
    """
    n, columns = a.shape[-1], []
    below = torch.ones(n, n, dtype=a.dtype, device=a.device).tril()
    for k in range(n):
        column = a[..., k : k + 1] * a[..., k : k + 1, k : k + 1].rsqrt() * below[:, k : k + 1]
        columns.append(column)
        a = a - column @ column.mT
    return torch.cat(columns, -1)


def solved_by_component(
    a: Float[Tensor, "b n n"], b: Float[Tensor, "b n m"]
) -> Float[Tensor, "b n m"]:
    """Solve A X = B by Cholesky by component; NaN or infinite if A is not positive definite."""
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
    """Return the lower Cholesky factor of A + reg I. Arguments and errors as in `psd_solve`."""
    moved = a if isinstance(reg, float) and reg == 0 else shifted(a, reg)
    if torch.compiler.is_exporting():  # a program can neither raise nor, in ONNX, factorise
        return cholesky_by_column(moved)
    if many_small(a, MAX_ROWS_FACTORISED_BY_COMPONENT):
        L, n = cholesky_by_component(batch_innermost(moved)), a.shape[-1]
        zero = torch.zeros_like(L[0, 0])
        factor = (
            torch.stack([L.get((i, j), zero) for i in range(n) for j in range(n)])
            .unflatten(0, (n, n))
            .permute(2, 0, 1)
        )
        if bool((factor.diagonal(dim1=-2, dim2=-1) > 0).all()):
            return factor  # else the error comes from LAPACK
    factor, info = torch.linalg.cholesky_ex(moved)
    if bool(info.any()):
        n, shift = a.shape[-1], torch.as_tensor(reg).max()
        if not torch.isfinite(moved).all():
            raise NotPositiveDefiniteError(
                f"a {n} x {n} matrix to be solved holds NaN or infinite entries"
            )
        smallest = torch.linalg.eigvalsh(moved.detach()).min().item()
        raise NotPositiveDefiniteError(
            f"a {n} x {n} matrix is not positive definite in {a.dtype}: after adding reg = "
            f"{float(shift):.3g} its smallest eigenvalue is {smallest:.3g}. Use a larger ridge, "
            "float64, or a lower rank."
        )
    return factor


def shifted(a: Float[Tensor, "*a n n"], reg: float | Tensor) -> Float[Tensor, "*c n n"]:
    """Return A + reg I ``*c n n`` without the matrix I."""
    shift = torch.as_tensor(reg, dtype=a.dtype, device=a.device)
    out = a.clone() if shift.ndim == 0 else a + torch.zeros_like(shift)[..., None, None]
    out.diagonal(dim1=-2, dim2=-1).add_(shift[..., None])
    return out


def squared_distance(
    x: Float[Tensor, "*b n q"], y: Float[Tensor, "*c m q"]
) -> Float[Tensor, "*d n m"]:
    """Return squared Euclidean distances ||x_i - y_j||^2; of many points by one matrix product.

    For the product the points are centred first, so that it does not cancel when they are far from
    the origin; the error is a few eps times the squared spread of the points. Gradients are finite
    everywhere, including equal points.
    """
    if x.shape[-1] != y.shape[-1]:
        raise ValueError(
            f"points of {x.shape[-1]} components have no distance to points of {y.shape[-1]}"
        )
    if x.ndim == y.ndim == 2 and x.shape[0] * y.shape[0] * x.shape[1] <= MAX_DIRECT_DIFFERENCES:
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
    """Return L ``n r`` and R ``r m`` with A ~ L R, or None if they are not much smaller than A.

    r is the number of singular values above ``tol`` times the largest, which bounds the error; the
    vectors are eigenvectors of A^T A in float64, for which tol must be at least 1e-7. None if L and
    R have more than ``worth`` times the entries of A.
    """
    gram = a.new_zeros(a.shape[1], a.shape[1], dtype=torch.float64)
    for rows in a.split(FLOAT64_BLOCK):
        gram.addmm_(rows.double().mT, rows.double())
    squares, vectors = torch.linalg.eigh(gram)
    kept = vectors[:, squares > tol**2 * squares[-1]]
    if kept.shape[1] * sum(a.shape) > worth * a.numel():
        return None
    left = [(rows.double() @ kept).to(a) for rows in a.split(FLOAT64_BLOCK)]
    return torch.cat(left), kept.mT.to(a).contiguous()


def safe_sqrt(x: Tensor) -> Tensor:
    """Return the square root of max(x, 0), whose gradient is 0 at x <= 0; NaN propagates."""
    at_zero = x <= 0
    return torch.where(at_zero, torch.ones_like(x), x).sqrt().masked_fill(at_zero, 0)


def pivoted_cholesky(
    column: Callable[[int], Tensor], diagonal: Float[Tensor, " n"], rank: int, tol: float = 0.0
) -> tuple[Float[Tensor, "n r"], Int[Tensor, " r"]]:
    """Return the incomplete Cholesky factor with diagonal pivoting, G ~ L L^T, in O(n r^2).

    Each step selects the point with the largest diagonal entry of G - L L^T, so that the trace of
    this residual decreases. The iteration stops early if no entry is above rounding: L L^T is then
    G.

    Args:
        column: i -> G[:, i], shape ``n``.
        diagonal: ``n``, the diagonal of G.
        rank: largest r.
        tol: the iteration stops once the trace of G - L L^T is at most ``tol`` times that of G.

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
    residual = diagonal.clone()
    # Smaller entries are rounding; this is the bound of LAPACK's pivoted factorisation.
    floor = n * torch.finfo(diagonal.dtype).eps * float(diagonal.max())
    enough = tol * float(diagonal.sum())
    rows = diagonal.new_zeros(min(rank, n), n)  # of L^T: contiguous
    pivots: list[int] = []
    for k in range(len(rows)):
        i = int(residual.argmax())
        largest = float(residual[i])
        if largest <= floor or float(residual.sum()) <= enough:
            break
        rows[k] = (column(i) - rows[:k, i] @ rows[:k]) / largest**0.5
        residual = (residual - rows[k].square()).clamp_min(0)
        residual[i] = 0
        pivots.append(i)
    return rows[: len(pivots)].mT, torch.tensor(pivots, device=diagonal.device).long()


def evenly(n: int, limit: int, device: torch.device | str | None = None) -> Int[Tensor, " m"]:
    """Return min(n, limit) of the indices 0 ... n - 1, evenly spaced, to subsample large data."""
    if n <= limit:
        return torch.arange(n, device=device)
    return torch.linspace(0, n - 1, limit, dtype=torch.float64, device=device).long()


def some_rows(n: int, limit: int, device: torch.device | str | None = None) -> Int[Tensor, " m"]:
    """Return min(n, limit) of the indices 0 ... n - 1, drawn with a fixed seed, in their order.

    Evenly spaced ones would be in step with recordings of equal lengths, and contain the same few
    steps of each of them.
    """
    if n <= limit:
        return torch.arange(n, device=device)
    drawn = torch.randperm(n, generator=torch.Generator().manual_seed(0))[:limit]
    return drawn.sort().values.to(device)


def patterns(seen: Bool[Tensor, "n q"]) -> list[Int[Tensor, " k"]]:
    """Return the columns of each group that are present in the same rows."""
    numbers = seen.mT.unique(dim=0, return_inverse=True)[1]
    return [(numbers == k).nonzero()[:, 0] for k in range(int(numbers.max()) + 1)]


def column_medians(x: Float[Tensor, "n q"]) -> Float[Tensor, " q"]:
    """Return the median of each column, the lower one of an even number of rows.

    It sorts, which is deterministic on a GPU, too.

    >>> column_medians(torch.tensor([[3.0, 1.0], [1.0, 2.0], [2.0, 9.0], [7.0, 0.0]])).tolist()
    [2.0, 1.0]
    """
    return x.sort(0).values[(len(x) - 1) // 2]


def varying(values: Float[Tensor, "n d"]) -> Bool[Tensor, " d"]:
    """Return which columns are not constant up to rounding; NaN entries do not count.

    The entries of a rotation about a fixed axis vary by the last digit of others in their row.

    >>> varying(torch.tensor([[3.0, 1.0, 1e-17], [3.0, 2.0, 0.0]], dtype=torch.float64))
    tensor([False,  True, False])
    """
    known = values.isfinite()
    if not len(values):
        return known.any(0)
    largest = torch.where(known, values.abs(), 0).amax(0)
    low = torch.where(known, values, torch.inf).amin(0)
    high = torch.where(known, values, -torch.inf).amax(0)
    return high - low > torch.maximum(1e-9 * largest, 1e-15 * largest.max())
