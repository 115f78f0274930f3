"""Linear algebra without ONNX operators, from sums and products: solves and eigenproblems.

Their loops are unrolled when a step is exported; both are exact up to rounding, as LAPACK's are.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

# Sweeps of Jacobi rotations; convergence is quadratic, and matrices of covariances are small.
SWEEPS = 8
# Argument from which on `STIRLING` is exact to rounding, and its terms: numerators and
# denominators.
LEAST_OF_STIRLING = 8
STIRLING = ((1, 12), (-1, 360), (1, 1260), (-1, 1680), (1, 1188), (-691, 360360), (1, 156))


def keep(
    a: Float[Tensor, "*b n n"], *, upper: bool = False, check_errors: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the matrix itself and 0 in place of a Cholesky factor, for `eliminate`.

    In a filter step a factor serves one solve.
    """
    return a, a.new_zeros(a.shape[:-2], dtype=torch.int32)


def eliminate(
    b: Float[Tensor, "*b n m"], a: Float[Tensor, "*b n n"], upper: bool = False
) -> Float[Tensor, "*b n m"]:
    """Return X with A X = B for a symmetric positive definite A, by Gauss-Jordan elimination.

    X is NaN where A is not positive definite.

    Step k makes column k of (A | B) the k-th unit vector: the first row is divided by its pivot,
    and its multiples are taken from the others. Without pivoting this is as stable as a Cholesky
    factorisation where A is positive definite.

    References: Golub and Van Loan (2013), sections 3.2 and 4.2; Peters and Wilkinson (1975) on its
    stability.
    """
    n = a.shape[-1]
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    table = torch.cat([a, b], -1)
    for k in range(n):
        column, table = table[..., :1], table[..., 1:]
        pivot = column[..., k : k + 1, :].sqrt().square()  # the root of a negative one is NaN
        table = table - (column - eye[:, k : k + 1]) @ (table[..., k : k + 1, :] / pivot)
    return table


def solve_triangular(
    a: Float[Tensor, "*b n n"],
    b: Float[Tensor, "..."],
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Float[Tensor, "..."]:
    """Return X with A X = B for a triangular A, or X A = B, by substitution; B is ``*b n m``.

    References: Golub and Van Loan (2013), section 3.1.
    """
    if not left:  # X A = B
        return solve_triangular(a.mT, b.mT, upper=not upper).mT
    n, x = a.shape[-1], b
    for k in reversed(range(n)) if upper else range(n):
        row = x[..., k : k + 1, :] / a[..., k : k + 1, k : k + 1]
        others = a[..., k : k + 1] * (torch.arange(n, device=a.device) != k).to(a)[:, None]
        here = (torch.arange(n, device=a.device) == k).to(a)[:, None]
        x = x * (1 - here) + here * row - others * row
    return x


def solve(
    a: Float[Tensor, "*b n n"], b: Float[Tensor, "*b n m"], *, left: bool = True
) -> Float[Tensor, "*b n m"]:
    """Return X with A X = B for a regular A, by elimination with partial pivoting.

    References: Golub and Van Loan (2013), section 3.4.
    """
    n = a.shape[-1]
    table, rows, order = torch.cat([a, b], -1), torch.arange(n, device=a.device), []
    left_over = torch.ones_like(a[..., 0], dtype=torch.bool)
    for _ in range(n):
        column, table = table[..., :1], table[..., 1:]
        at = torch.where(left_over, column[..., 0].abs(), -1).argmax(-1, keepdim=True) == rows
        left_over = left_over & ~at
        pick = at[..., None, :].to(a.dtype)
        table = table - (column - pick.mT) @ ((pick @ table) / (pick @ column))
        order.append(pick)
    return torch.cat(order, -2) @ table


def eigh(
    a: Float[Tensor, "*b n n"], uplo: str = "L"
) -> tuple[Float[Tensor, "*b n"], Float[Tensor, "*b n n"]]:
    """Return eigenvalues, in no order, and eigenvectors in columns, by Jacobi rotations.

    Each rotation makes one entry zero; n/2 of them are applied at the same time.

    References: Golub and Van Loan (2013), sections 8.5.2 and 8.5.6 (the order of the pairs).
    """
    n = a.shape[-1]
    eye = torch.eye(n, dtype=a.dtype, device=a.device)
    vectors = eye.expand(a.shape)
    for first, second in rounds(n) * (SWEEPS if n > 2 else 1):  # in the plane one rotation is all
        x, y = eye[first], eye[second]  # m n, the axes that are turned
        p, q, r = ((u @ a * v).sum(-1) for u, v in ((x, x), (y, y), (x, y)))
        none = r == 0
        tau = (q - p) / torch.where(none, 1, 2 * r)
        t = torch.where(tau >= 0, 1, -1) / (tau.abs() + (1 + tau.square()).sqrt())
        t = torch.where(none, 0, t)
        c = (1 + t.square()).rsqrt()
        less, s = (c - 1)[..., None], (t * c)[..., None]
        turn = eye + x.mT @ (less * x + s * y) + y.mT @ (less * y - s * x)
        a, vectors = turn.mT @ a @ turn, vectors @ turn
    return a.diagonal(dim1=-2, dim2=-1), vectors


def rounds(n: int) -> list[tuple[list[int], list[int]]]:
    """All pairs of n axes, in rounds in which each axis stands at most once.

    >>> rounds(4)
    [([0, 1], [3, 2]), ([0, 3], [2, 1]), ([0, 2], [1, 3])]
    """
    around, schedule = list(range(n + n % 2)), []
    for _ in range(len(around) - 1):
        half = len(around) // 2
        pairs = [
            (i, j)
            for i, j in zip(around[:half], around[: half - 1 : -1], strict=True)
            if max(i, j) < n
        ]
        schedule.append(([i for i, _ in pairs], [j for _, j in pairs]))
        around = [around[0], around[-1], *around[1:-1]]
    return schedule


def searchsorted(
    ordered: Tensor,
    values: Tensor,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Tensor | None = None,
) -> Tensor:
    """Return the number of entries of a row that are below each value, or equal with ``right``."""
    after = right or side == "right"
    a, v = ordered[..., None, :], values[..., None]
    return (a <= v if after else a < v).sum(-1)


def diagonal_scatter(
    a: Float[Tensor, "*b n n"],
    values: Float[Tensor, "*b n"],
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Float[Tensor, "*b n n"]:
    """Return A with another diagonal, over its last two dimensions.

    A filter step requires no others.
    """
    return torch.where(
        torch.eye(a.shape[-1], dtype=torch.bool, device=a.device), values[..., None], a
    )


def elu(x: Tensor, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Tensor:
    """scale x above 0, scale alpha (exp(input_scale x) - 1) below."""
    return scale * torch.where(x > 0, x, alpha * (torch.exp(input_scale * x.clamp_max(0)) - 1))


def softplus(x: Tensor, beta: float = 1.0, threshold: float = 20.0) -> Tensor:
    """log(1 + exp(beta x)) / beta, without overflow; ``threshold`` is not needed."""
    y = beta * x
    return (y.clamp_min(0) + torch.log(1 + torch.exp(-y.abs()))) / beta


def asin(x: Tensor) -> Tensor:
    """Return arcsin x: a series and two Newton steps, at arguments up to 1/2.

    Beyond, arcsin x = pi/2 - 2 arcsin sqrt((1 - x) / 2).
    """
    size = x.abs()
    large = size > 0.5
    t = torch.where(large, ((1 - size) / 2).clamp_min(0).sqrt(), size)
    y = t + t**3 / 6 + 3 * t**5 / 40 + 15 * t**7 / 336
    for _ in range(2):
        y = y - (y.sin() - t) / y.cos()
    return torch.where(large, math.pi / 2 - 2 * y, y) * x.sign()


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Return the angle of (x, y): ONNX Runtime has no arctangent in double precision.

    tan(t / 2) = y / (r + x) for x >= 0, other points are turned by a quarter; two halvings,
    tan(t / 2) = u / (1 + sqrt(1 + u^2)) with u = tan t, lead to |u| < 0.2 and a short series.
    """
    side = torch.where(y >= 0, 1.0, -1.0).to(y)
    turned = torch.where(x < 0, side * math.pi / 2, torch.zeros_like(side))
    x, y = torch.where(x < 0, side * y, x), torch.where(x < 0, -side * x, y)
    scale = (x.square() + y.square()).sqrt() + x
    u = y / torch.where(scale > 0, scale, torch.ones_like(scale))
    for _ in range(2):
        u = u / (1 + (1 + u.square()).sqrt())
    series = torch.zeros_like(u)
    for k in reversed(range(12)):
        series = series * u.square() + (-1) ** k / (2 * k + 1)
    return turned + 8 * u * series


def atan(x: Tensor) -> Tensor:
    """Return arctan x, as `atan2`."""
    return atan2(x, torch.ones_like(x))


def lgamma(x: Tensor) -> Tensor:
    """Return log Gamma(x) of positive x: Stirling's series at x + 8, or at x from 8 on.

    log Gamma(x) = log Gamma(x + 8) - log(x (x + 1) ... (x + 7)).

    References: Abramowitz and Stegun (1964), 6.1.41.
    """
    small = x < LEAST_OF_STIRLING
    product = torch.ones_like(x)
    for k in range(LEAST_OF_STIRLING):
        product = product * (x + k)
    y = torch.where(small, x + LEAST_OF_STIRLING, x)
    z = 1 / y.square()
    series = torch.zeros_like(x)
    for numerator, denominator in reversed(STIRLING):
        series = series * z + numerator / denominator
    found = (y - 0.5) * y.log() - y + 0.5 * math.log(2 * math.pi) + series / y
    return found - torch.where(small, product, torch.ones_like(x)).log()
