"""One case for every kernel: the same loops, the same laws.

Then what is special about each, and the median heuristic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch

from kbf.rkhs import kernels
from kbf.rkhs.kernels import (
    KERNELS,
    arcsine,
    delta,
    gaussian,
    linear,
    matern,
    median_distance,
    own_value,
    product,
    trace,
)

F64 = torch.float64


class Case(NamedTuple):
    kernel: Callable[..., torch.Tensor]
    of_two: Callable[[np.ndarray, np.ndarray], float]  # the formula, for two points
    shape: tuple[int, ...] = (3,)  # of one point
    float32: float = 1e-5  # error allowed in single precision
    smooth: bool = True  # has a gradient


def matern_of_two(x, y, nu):
    a = math.sqrt(2 * nu) * math.dist(x, y) / 0.8
    return {0.5: 1, 1.5: 1 + a, 2.5: 1 + a + a * a / 3}[nu] * math.exp(-a)


def arcsine_of_two(x, y, bias, slope):
    xx, yy, xy = (
        bias**2 + slope**2 * sum(a * b for a, b in zip(u, v, strict=True))
        for u, v in ((x, x), (y, y), (x, y))
    )
    return 2 / math.pi * math.asin(2 * xy / math.sqrt((1 + 2 * xx) * (1 + 2 * yy)))


CASES = {
    "gaussian": Case(partial(gaussian, bandwidth=0.8), lambda x, y: reference.gaussian(x, y, 0.8)),
    "gaussian, a length for each component": Case(
        partial(gaussian, bandwidth=torch.tensor([0.5, 1.0, 2.0], dtype=F64)),
        lambda x, y: math.exp(
            -sum((a - b) ** 2 / (2 * s * s) for a, b, s in zip(x, y, [0.5, 1.0, 2.0], strict=True))
        ),
    ),
    "laplace": Case(
        partial(KERNELS["laplace"], bandwidth=0.8),
        lambda x, y: math.exp(-sum(abs(a - b) for a, b in zip(x, y, strict=True)) / 0.8),
    ),
    # the distance of equal points is sqrt(eps) in single precision, and matern12 has a kink there
    "matern12": Case(
        partial(KERNELS["matern12"], bandwidth=0.8), partial(matern_of_two, nu=0.5), float32=3e-3
    ),
    "matern32": Case(partial(KERNELS["matern32"], bandwidth=0.8), partial(matern_of_two, nu=1.5)),
    "matern52": Case(partial(KERNELS["matern52"], bandwidth=0.8), partial(matern_of_two, nu=2.5)),
    "imq": Case(
        partial(KERNELS["imq"], bandwidth=0.8),
        lambda x, y: 1 / math.sqrt(1 + math.dist(x, y) ** 2 / 0.64),
    ),
    "arcsine": Case(
        partial(arcsine, bias=0.5, slope=3.0), lambda x, y: arcsine_of_two(x, y, 0.5, 3.0)
    ),
    "linear": Case(linear, lambda x, y: sum(a * b for a, b in zip(x, y, strict=True))),
    "trace": Case(trace, lambda x, y: float(np.trace(x @ y.T)), shape=(3, 3)),
    "delta": Case(
        delta, lambda x, y: float(all(a == b for a, b in zip(x, y, strict=True))), smooth=False
    ),
    "product": Case(
        partial(product, parts=[(partial(gaussian, bandwidth=0.8), 2), (linear, 1)]),
        lambda x, y: reference.gaussian(x[:2], y[:2], 0.8) * x[2] * y[2],
    ),
}


@pytest.fixture(params=CASES, ids=lambda name: name.replace(" ", "-"))
def case(request) -> Case:
    return CASES[request.param]


def points(normal, case: Case, n: int, *batch: int) -> torch.Tensor:
    """Random points; the last repeats the first, so that every test meets two equal ones."""
    x = normal(*batch, n, *case.shape)
    at = len(batch)
    return torch.cat([x.narrow(at, 0, n - 1), x.narrow(at, 0, 1)], at)


def test_every_kernel_has_a_case():
    public = {
        name
        for name, f in vars(kernels).items()
        if callable(f) and getattr(f, "__module__", "") == "kbf.rkhs.kernels"
    }
    assert public - {"evenly", "median_distance", "matern", "own_value", "shrunk"} <= set(CASES)
    assert set(KERNELS) <= set(CASES)


def test_kernel_is_its_formula(normal, case):
    x, y = points(normal, case, 6), points(normal, case, 4)
    y[1] = x[2]
    np.testing.assert_allclose(
        case.kernel(x, y).numpy(),
        reference.gram(case.of_two, x.numpy(), y.numpy()),
        rtol=1e-7,
        atol=1e-7,
    )


def test_kernel_is_symmetric_and_positive_semidefinite(normal, case):
    x = points(normal, case, 12)
    gram = case.kernel(x, x)
    torch.testing.assert_close(gram, gram.mT, rtol=1e-12, atol=1e-7)
    assert torch.linalg.eigvalsh(gram).min() > -1e-6


def test_kernel_of_a_batch_is_one_by_one(normal, case):
    x, y = points(normal, case, 5, 2, 3), points(normal, case, 4, 3)
    together = case.kernel(x, y)
    assert together.shape == (2, 3, 5, 4)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(
                together[i, j], case.kernel(x[i, j], y[j]), rtol=1e-7, atol=1e-7
            )


def test_kernel_gradient_is_finite_at_equal_points(normal, case):
    if not case.smooth:
        pytest.skip("has no gradient")
    x = points(normal, case, 5).requires_grad_()
    (gradient,) = torch.autograd.grad(case.kernel(x, x).sum(), x)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() < 1e3


def test_kernel_gradient_at_different_points(normal, case):
    if not case.smooth:
        pytest.skip("has no gradient")
    x, y = normal(3, *case.shape).requires_grad_(), normal(2, *case.shape).requires_grad_()
    assert torch.autograd.gradcheck(case.kernel, (x, y))


def test_kernel_in_single_precision(normal, case):
    x = points(normal, case, 8)
    single = case.kernel(x.float(), x.float())
    kernel32 = (
        single if single.dtype == torch.float32 else single.float()
    )  # a float64 bandwidth vector promotes
    torch.testing.assert_close(kernel32.double(), case.kernel(x, x), rtol=0, atol=case.float32)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_by_name_are_one_at_equal_points(normal, name):
    x = normal(4, 2)
    torch.testing.assert_close(
        KERNELS[name](x, x, bandwidth=0.3).diagonal(), torch.ones(4, dtype=F64), rtol=0, atol=1e-6
    )


def test_gaussian_of_the_papers():
    x, y = torch.zeros(1, 1, dtype=F64), torch.tensor([[3.0]], dtype=F64)
    s = 5.0
    torch.testing.assert_close(gaussian(x, y, bandwidth=math.sqrt(s / 2)), torch.exp(-(y**2) / s))


def test_gradient_of_the_bandwidth(normal):
    x, bandwidth = normal(3, 2), torch.tensor([0.5, 1.5], dtype=F64, requires_grad=True)
    for name in ["gaussian", "laplace", "matern32", "imq"]:
        assert torch.autograd.gradcheck(
            lambda b, name=name: KERNELS[name](x, x + 0.1, bandwidth=b), (bandwidth,)
        )


def test_matern_refuses_another_nu(normal):
    with pytest.raises(ValueError, match=r"nu must be .* got 2"):
        matern(normal(2, 1), normal(2, 1), bandwidth=1.0, nu=2.0)


def test_arcsine_is_a_wide_network_of_error_functions(normal):
    """k(x, y) = E[erf(v + <w, x>) erf(v + <w, y>)] over random units, within 5 standard errors."""
    x, bias, slope, units = normal(6, 3), 0.7, 1.5, 40_000
    hidden = torch.erf(bias * normal(units, 1) + slope * normal(units, 3) @ x.mT)
    products = hidden[:, :, None] * hidden[:, None, :]
    gap = (products.mean(0) - arcsine(x, x, bias=bias, slope=slope)).abs()
    assert (gap < 5 * products.std(0) / math.sqrt(units)).all()


def test_product_refuses_parts_that_do_not_cover(normal):
    with pytest.raises(ValueError, match=r"parts of \[1\] components do not cover points of 2"):
        product(normal(2, 2), normal(2, 2), parts=[(linear, 1)])


def test_shapes_are_checked_in_tests(normal):
    with pytest.raises(Exception, match="gaussian"):
        gaussian(normal(3, 2), normal(3, 1), bandwidth=1.0)  # would broadcast in silence


def test_median_distance(normal):
    x = normal(9, 2)  # 36 distances, 81 with the zeros of the diagonal
    pairs = sorted(math.dist(x[i], x[j]) for i in range(9) for j in range(i))
    assert median_distance(x).item() == pytest.approx(pairs[17])
    everything = sorted(math.dist(a, b) for a in x for b in x)
    assert median_distance(x, diagonal=True).item() == pytest.approx(everything[40])


def test_median_distance_of_a_subsample():
    x = torch.arange(1001, dtype=F64)[:, None]
    assert (
        median_distance(x, limit=11).item()
        == median_distance(100 * torch.arange(11, dtype=F64)[:, None]).item()
    )


def test_median_distance_of_points_that_mostly_coincide():
    x = torch.tensor([[0.0]] * 9 + [[3.0], [4.0]], dtype=F64)  # 18 distances of 3 and 4, one of 1
    assert median_distance(x, distinct=True).item() == 3
    assert median_distance(x[8:], distinct=True).item() == median_distance(x[8:]).item() == 3
    with pytest.raises(ValueError, match="coincide"):
        median_distance(torch.zeros(5, 2), distinct=True)


def test_median_distance_refuses_points_without_a_scale():
    with pytest.raises(ValueError, match="at least two"):
        median_distance(torch.zeros(1, 2))
    with pytest.raises(ValueError, match="coincide"):
        median_distance(torch.zeros(5, 2))
    with pytest.raises(ValueError, match="nan"):
        median_distance(torch.full((5, 2), math.nan))


@pytest.mark.parametrize("name", sorted(set(CASES) - {"trace"}))
def test_the_value_of_a_point_with_itself_is_the_diagonal_of_its_gram_matrix(name, normal):
    kernel, x = CASES[name].kernel, normal(2, 5, 3)
    torch.testing.assert_close(
        own_value(kernel, x), kernel(x, x).diagonal(dim1=-2, dim2=-1), rtol=1e-6, atol=1e-6
    )
