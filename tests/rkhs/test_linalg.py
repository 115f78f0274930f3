"""Solving, distances and low-rank factors against NumPy and against their definitions."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch

from kbf.rkhs.linalg import (
    NotPositiveDefiniteError,
    cholesky,
    cholesky_by_column,
    column_medians,
    patterns,
    pivoted_cholesky,
    product,
    psd_solve,
    safe_sqrt,
    some_rows,
    squared_distance,
    triangular_solves,
    two_factors,
    varying,
)

F64 = torch.float64


def spd(normal, n: int, *batch: int) -> torch.Tensor:
    root = normal(*batch, n, n)
    return root @ root.mT + 0.1 * torch.eye(n, dtype=F64)


def test_psd_solve_is_the_solution(normal):
    a, b = spd(normal, 6), normal(6, 2)
    expected = np.linalg.solve(a.numpy() + 0.3 * np.eye(6), b.numpy())
    np.testing.assert_allclose(psd_solve(a, b, reg=0.3).numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize(
    "batch_a, batch_b",
    [((), (4,)), ((), (4, 3)), ((4,), ()), ((4,), (4,)), ((3,), (4, 3)), ((4, 1), (3,))],
)
def test_psd_solve_broadcasts_one_by_one(normal, batch_a, batch_b):
    a, b = spd(normal, 5, *batch_a), normal(*batch_b, 5, 2)
    together = psd_solve(a, b, reg=0.1)
    batch = torch.broadcast_shapes(batch_a, batch_b)
    assert together.shape == (*batch, 5, 2)
    a, b = a.expand(*batch, 5, 5).reshape(-1, 5, 5), b.expand(*batch, 5, 2).reshape(-1, 5, 2)
    for one, a_k, b_k in zip(together.reshape(-1, 5, 2), a, b, strict=True):
        torch.testing.assert_close(one, psd_solve(a_k, b_k, reg=0.1), rtol=1e-12, atol=1e-12)


def test_psd_solve_takes_a_ridge_for_each_matrix(normal):
    a, b, reg = spd(normal, 4), normal(4, 1), torch.tensor([0.1, 10.0], dtype=F64)
    together = psd_solve(a, b, reg=reg)
    for k in range(2):
        torch.testing.assert_close(together[k], psd_solve(a, b, reg=float(reg[k])))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7])
def test_many_small_matrices_are_those_one_by_one(normal, n):
    """They are factorised, solved and multiplied by component, in any order of the memory."""
    a, b, ridge = spd(normal, n, 300), normal(300, n, 2), 0.3 * torch.eye(n, dtype=F64)
    for each in (a, a.permute(1, 2, 0).contiguous().permute(2, 0, 1)):
        torch.testing.assert_close(cholesky(each), torch.linalg.cholesky(a))
        torch.testing.assert_close(psd_solve(each, b, reg=0.3), torch.linalg.solve(a + ridge, b))
        torch.testing.assert_close(product(each, b), a @ b)
        torch.testing.assert_close(product(a[0], each, b[1]), a[0] @ a @ b[1])
        torch.testing.assert_close(product(b.mT, each, b), b.mT @ a @ b)


def test_a_product_of_a_tall_matrix(normal):
    a, b = normal(300, 3), normal(3, 2)
    torch.testing.assert_close(product(a, b), a @ b)
    torch.testing.assert_close(product(a.mT, a), a.mT @ a)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_many_small_systems_without_a_ridge(normal, n):
    a, b = spd(normal, n, 300), normal(300, n, 2)
    torch.testing.assert_close(psd_solve(a, b), torch.linalg.solve(a, b))
    a[7] = 0
    with pytest.raises(NotPositiveDefiniteError):
        psd_solve(a, b)


def test_cholesky_by_column_is_cholesky(normal):
    a = spd(normal, 5, 3)
    torch.testing.assert_close(cholesky_by_column(a), torch.linalg.cholesky(a))
    assert cholesky_by_column(a - 100 * torch.eye(5, dtype=F64)).isnan().any()


def test_columns_that_are_present_together_are_a_group():
    seen = torch.tensor([[True, False, True, True], [True, True, True, False]])
    assert sorted(group.tolist() for group in patterns(seen)) == [[0, 2], [1], [3]]


def test_medians_of_columns_are_the_lower_ones():
    x = torch.tensor([[3.0, 1.0], [1.0, 2.0], [2.0, 9.0], [7.0, 0.0]])
    assert column_medians(x).tolist() == [2.0, 1.0]
    assert column_medians(x[:3]).tolist() == [2.0, 2.0]


def test_constant_columns_are_those_that_vary_by_rounding_only():
    nan = math.nan
    columns = {
        (1e9, 1e9 + 1e-3): False,  # relative to its own size
        (1e9, 1e9 + 10): True,
        (0.0, 1e-9): False,  # relative to the largest column
        (0.0, 1e-5): True,
        (nan, 2.0): False,
        (nan, nan): False,
    }
    x = torch.tensor(list(columns), dtype=F64).mT
    assert varying(x).tolist() == list(columns.values())
    assert varying(x[:0]).tolist() == [False] * 6


@pytest.mark.parametrize("n", [1, 3])
def test_one_indefinite_matrix_of_many_small_ones_is_an_error(normal, n):
    a = spd(normal, n, 300)
    a[7] -= 2 * a[7].trace() * torch.eye(n, dtype=F64)
    with pytest.raises(NotPositiveDefiniteError):
        cholesky(a)


def test_psd_solve_gradient(normal):
    root, b = normal(4, 4).requires_grad_(), normal(3, 4, 2).requires_grad_()
    reg = torch.tensor(0.2, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda r, b, reg: psd_solve(r @ r.mT, b, reg=reg), (root, b, reg)
    )


@pytest.mark.parametrize("batch_b", [(3,), (1,), ()])
def test_triangular_solves_are_the_solution(normal, batch_b):
    root, b = normal(3, 5, 5), normal(*batch_b, 5, 2)
    a = root @ root.mT + torch.eye(5, dtype=F64)
    torch.testing.assert_close(triangular_solves(torch.linalg.cholesky(a), b), psd_solve(a, b))


def test_products_of_autocast_are_solved_in_float32(normal):
    a, b = torch.eye(3, dtype=torch.bfloat16), torch.ones(3, 2)
    for left, right in ((a, b), (a, b.bfloat16()), (a.float(), b.bfloat16())):
        torch.testing.assert_close(psd_solve(left, right, reg=1.0), b / 2)


def test_error_names_size_ridge_and_smallest_eigenvalue():
    a = torch.diag(torch.tensor([1.0, 1.0, -0.5], dtype=F64))
    with pytest.raises(
        NotPositiveDefiniteError, match=r"3 x 3 .* reg = 0\.125 .*smallest eigenvalue is -0\.375"
    ):
        psd_solve(a, torch.ones(3, 1, dtype=F64), reg=0.125)
    assert torch.isfinite(psd_solve(a, torch.ones(3, 1, dtype=F64), reg=0.625)).all()


def test_error_of_one_matrix_in_a_batch(normal):
    a = spd(normal, 3, 4)
    a[2] = -a[2]
    with pytest.raises(NotPositiveDefiniteError, match="smallest eigenvalue is -"):
        cholesky(a)
    unchecked = psd_solve(a, torch.ones(4, 3, 1, dtype=F64), check=False)
    assert unchecked[2].isnan().all() and torch.isfinite(unchecked[[0, 1, 3]]).all()
    single = psd_solve(a[2], torch.ones(4, 3, 1, dtype=F64), check=False)
    assert single.shape == (4, 3, 1) and single.isnan().all()


def test_error_of_nan():
    a = torch.eye(3, dtype=F64)
    a[2, 1] = math.nan
    with pytest.raises(NotPositiveDefiniteError, match="NaN"):
        psd_solve(a, torch.ones(3, 1, dtype=F64), reg=1.0)


def test_squared_distance_is_the_double_loop(normal):
    x, y = normal(2, 4, 3), normal(5, 3)
    expected = torch.stack(
        [torch.stack([torch.stack([(a - b).square().sum() for b in y]) for a in one]) for one in x]
    )
    torch.testing.assert_close(squared_distance(x, y), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("n", [3, 3000])
def test_points_of_other_widths_have_no_distance(n):
    with pytest.raises(ValueError, match="points of 1 components have no distance to points of 2"):
        inspect.unwrap(squared_distance)(
            torch.zeros(n, 1), torch.zeros(4, 2)
        )  # without the checks of shapes, which come first here


def test_squared_distance_far_from_the_origin_keeps_its_digits(normal):
    x = normal(6, 2).float()
    near, far = squared_distance(x, x), squared_distance(x + 4096, x + 4096)
    torch.testing.assert_close(
        far, near, rtol=0, atol=5e-3
    )  # 4096 + x itself is rounded to 5e-4; the bare expansion is off by 4
    assert (near >= 0).all()


def test_squared_distance_gradient_at_equal_points():
    x = torch.zeros(3, 2, dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(squared_distance(x, x).sum(), x)
    assert torch.equal(gradient, torch.zeros_like(x))


def test_safe_sqrt():
    x = torch.tensor([4.0, 0.0, -1.0, math.nan], dtype=F64, requires_grad=True)
    root = safe_sqrt(x)
    assert root[:3].tolist() == [2.0, 0.0, 0.0]
    assert root[3].isnan(), "NaN must not turn into a ratio of zero"
    (gradient,) = torch.autograd.grad(root[:3].sum(), x)
    assert gradient[:3].tolist() == [0.25, 0.0, 0.0]


def gram_of(normal, n: int) -> torch.Tensor:
    return torch.exp(-torch.cdist(*[normal(n, 2)] * 2).square())


def factor_of(gram: torch.Tensor, rank: int, tol: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    return pivoted_cholesky(lambda i: gram[:, i], gram.diagonal(), rank, tol)


def test_pivoted_cholesky_at_full_rank_is_exact(normal):
    gram = spd(normal, 20)
    factor, pivots = factor_of(gram, 20)
    torch.testing.assert_close(factor @ factor.mT, gram, rtol=1e-10, atol=1e-10)
    assert sorted(pivots.tolist()) == list(range(20))
    at_pivots = factor[pivots]
    torch.testing.assert_close(at_pivots, at_pivots.tril(), rtol=0, atol=1e-9)


def test_pivoted_cholesky_residual_falls_and_stays_positive(normal):
    gram = gram_of(normal, 40)
    factor, _ = factor_of(gram, 30)
    residuals = [gram - factor[:, :r] @ factor[:, :r].mT for r in range(31)]
    traces = torch.stack([residual.trace() for residual in residuals])
    assert (traces.diff() < 0).all()
    assert all(torch.linalg.eigvalsh(residual).min() > -1e-10 for residual in residuals)


def test_pivoted_cholesky_takes_the_largest_residual_first():
    gram = torch.diag(torch.tensor([1.0, 3.0, 2.0], dtype=F64))
    factor, pivots = factor_of(gram, 2)
    assert pivots.tolist() == [1, 2]
    torch.testing.assert_close(
        factor @ factor.mT, torch.diag(torch.tensor([0.0, 3.0, 2.0], dtype=F64))
    )


def test_pivoted_cholesky_stops_at_the_tolerance(normal):
    gram = gram_of(normal, 40)
    factor, pivots = factor_of(gram, 40, tol=1e-3)
    r = len(pivots)
    assert 0 < r < 40
    assert (
        (gram - factor @ factor.mT).trace()
        <= 1e-3 * 40
        < (gram - factor[:, : r - 1] @ factor[:, : r - 1].mT).trace()
    )


def test_pivoted_cholesky_ends_at_the_true_rank(normal):
    x = normal(10, 3)
    factor, pivots = factor_of(x @ x.mT, 10)
    assert factor.shape == (10, 3)
    assert pivots.shape == (3,)
    torch.testing.assert_close(factor @ factor.mT, x @ x.mT, rtol=1e-10, atol=1e-10)


def test_pivoted_cholesky_of_zero_and_of_nan():
    factor, pivots = factor_of(torch.zeros(4, 4, dtype=F64), 2)
    assert factor.shape == (4, 0)
    assert pivots.shape == (0,)
    with pytest.raises(ValueError, match="NaN"):
        factor_of(torch.full((4, 4), math.nan, dtype=F64), 2)


def test_an_unchecked_factor_of_an_indefinite_matrix_is_nan_and_says_nothing_false():
    a = torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, -1.0, 1.0]))]).double()
    solved = psd_solve(a, torch.ones(3, 1, dtype=torch.float64), check=False)
    assert solved[0].isfinite().all()
    assert solved[1].isnan().all()


@pytest.mark.parametrize("tol", [1e-2, 1e-4, 1e-6])
def test_two_factors_leave_out_the_small_singular_values(normal, tol):
    u, v = (torch.linalg.qr(normal(n, 40))[0] for n in (60, 50))
    a = (u * 10.0 ** (-0.9 * torch.arange(40.0, dtype=F64))) @ v.mT
    factors = two_factors(a, tol)
    assert factors is not None
    left, right = factors
    assert left.shape[1] == len(right) == math.floor(-math.log10(tol) / 0.9) + 1
    assert torch.linalg.matrix_norm(a - left @ right, 2) <= tol * (1 + 1e-6)


def test_two_factors_of_a_matrix_of_full_rank_are_not_worth_it(normal):
    assert two_factors(normal(30, 20), 1e-6) is None


@pytest.mark.parametrize(("n", "limit"), [(99_000, 5000), (100_000, 2000), (2001, 2000)])
def test_some_rows_are_not_in_step_with_recordings_of_equal_lengths(n, limit):
    """Of evenly spaced rows of recordings of 99 steps only some of the steps are ever taken."""
    rows = some_rows(n, limit)
    assert len(rows) == limit and bool((rows.diff() > 0).all())
    assert rows[0] >= 0 and rows[-1] < n
    for period in (50, 99, 100):
        counts = (rows % period).bincount(minlength=period)
        assert counts.min() > 0.3 * limit / period
    assert torch.equal(some_rows(n, limit), rows)
    assert torch.equal(some_rows(limit, limit), torch.arange(limit))
