"""MMD and HSIC against loops, closed forms and the level of their tests."""

from __future__ import annotations

import math
from functools import partial
from itertools import permutations, product

import numpy as np
import pytest
import torch

from kbf.rkhs import hypothesis_tests
from kbf.rkhs.hypothesis_tests import hsic, hsic_test, mmd2, mmd2_unbiased, mmd_test
from kbf.rkhs.kernels import delta, gaussian, linear

F64 = torch.float64
KERNEL = partial(gaussian, bandwidth=0.8)


def seed(k: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(k)


def test_mmd_by_loops(normal):
    x, y = normal(6, 2), normal(4, 2) + 0.5
    k = lambda a, b: math.exp(-((a - b) ** 2).sum().item() / (2 * 0.8**2))  # noqa: E731
    xx = [[k(a, b) for b in x] for a in x]
    yy = [[k(a, b) for b in y] for a in y]
    xy = [[k(a, b) for b in y] for a in x]
    biased = np.mean(xx) + np.mean(yy) - 2 * np.mean(xy)
    assert mmd2(KERNEL, x, y).item() == pytest.approx(biased)
    off = lambda g: np.mean([g[i][j] for i, j in permutations(range(len(g)), 2)])  # noqa: E731
    expected = off(xx) + off(yy) - 2 * np.mean(xy)
    assert mmd2_unbiased(KERNEL, x, y).item() == pytest.approx(expected)
    with pytest.raises(ValueError, match="at least two points of each, got 1 and 4"):
        mmd2_unbiased(KERNEL, x[:1], y)


def test_mmd_of_weighted_samples(normal):
    """Linear kernel: distance of the means; equal samples: 0, for weights of either sign."""
    x, y, v, w = normal(5, 3), normal(7, 3), normal(5), normal(7)
    expected = (v @ x - w @ y).square().sum()
    torch.testing.assert_close(mmd2(linear, x, y, v, w), expected)
    order = torch.tensor([3, 1, 4, 0, 2])
    assert mmd2(KERNEL, x, x[order], v, v[order]).item() < 1e-12


def test_mmd_of_two_gaussians_is_the_integral(normal):
    """N(0, 1) and N(m, s^2), as weighted samples at Hermite nodes, and in closed form:
    E k = h / sqrt(h^2 + var) exp(-d^2 / (2 (h^2 + var))), var the variance of the difference.
    """
    m, s, h = 0.7, 1.5, 0.8
    nodes, w = (torch.from_numpy(a) for a in np.polynomial.hermite_e.hermegauss(60))
    x, y, w = nodes[:, None], m + s * nodes[:, None], w / w.sum()

    def mean_kernel(distance, variance):
        total = h**2 + variance
        return h / math.sqrt(total) * math.exp(-(distance**2) / (2 * total))

    truth = mean_kernel(0, 2) + mean_kernel(0, 2 * s**2) - 2 * mean_kernel(m, 1 + s**2)
    assert mmd2(KERNEL, x, y, w, w).item() == pytest.approx(truth, abs=1e-6)
    x, y = normal(1000, 1), m + s * normal(1000, 1)
    assert mmd2_unbiased(KERNEL, x, y).item() == pytest.approx(truth, abs=0.03)


def test_hsic_by_loops_and_on_tables(normal):
    x, y = normal(6, 1), normal(6, 1)
    K, L = KERNEL(x, x).numpy(), KERNEL(y, y).numpy()
    n = 6
    joint = np.mean([K[i, j] * L[i, j] for i, j in product(range(n), repeat=2)])
    apart = K.mean() * L.mean()
    cross = np.mean([K[i].mean() * L[i].mean() for i in range(n)])
    found = hsic(KERNEL(x, x), KERNEL(y, y))
    assert found.item() == pytest.approx(joint + apart - 2 * cross)
    # delta kernels on a finite set: the squared distance of the joint table and the product
    a = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0], dtype=F64)[:, None]
    b = torch.tensor([0, 1, 1, 1, 0, 0, 1, 0], dtype=F64)[:, None]
    table = torch.zeros(3, 2, dtype=F64)
    for i, j in zip(a[:, 0].long(), b[:, 0].long(), strict=True):
        table[i, j] += 1 / 8
    apart_table = table.sum(1, keepdim=True) * table.sum(0)
    expected = (table - apart_table).square().sum()
    torch.testing.assert_close(hsic(delta(a, a), delta(b, b)), expected)


def test_p_values_are_shares_of_all_permutations(normal):
    """With many random orders: the share over all of them, by enumeration."""
    x, y = normal(3, 1), normal(3, 1) + 1.0
    pooled = torch.cat([x, y])
    values = [
        mmd2(KERNEL, pooled[list(p[:3])], pooled[list(p[3:])]).item()
        for p in permutations(range(6))
    ]
    share = np.mean(np.array(values) >= mmd2(KERNEL, x, y).item() - 1e-12)
    found = mmd_test(KERNEL, x, y, permutations=4000, generator=seed())
    assert found.statistic == pytest.approx(mmd2(KERNEL, x, y).item())
    assert found.p_value == pytest.approx(share, abs=0.03)
    K, L = KERNEL(x, x), KERNEL(y, y)
    values = [hsic(K, L[list(p)][:, list(p)]).item() for p in permutations(range(3))]
    share = np.mean(np.array(values) >= hsic(K, L).item() - 1e-12)
    found = hsic_test(K, L, permutations=2000, generator=seed())
    assert found.p_value == pytest.approx(share, abs=0.04)


@pytest.mark.parametrize("name", ["mmd", "hsic"])
def test_level_and_power(name, normal):
    """Under the hypothesis p-values are at most 0.1 in about a tenth of the draws; a difference is
    seen in nearly all.
    """

    def p_value(shift: float, k: int) -> float:
        x, e = normal(40, 1), normal(40, 1)
        if name == "mmd":
            return mmd_test(KERNEL, x, e + shift, permutations=99, generator=seed(k)).p_value
        y = e + shift * x
        grams = KERNEL(x, x), KERNEL(y, y)
        return hsic_test(*grams, permutations=99, generator=seed(k)).p_value

    null = np.array([p_value(0.0, k) for k in range(200)])
    assert 0.04 < np.mean(null <= 0.1) < 0.17
    assert 0.4 < np.mean(null) < 0.6
    assert np.mean([p_value(1.2, k) <= 0.05 for k in range(30)]) > 0.9


def autoregression(steps: int, k: int) -> torch.Tensor:
    noise = torch.randn(steps, dtype=F64, generator=seed(k))
    z = [noise[0]]
    for e in noise[1:]:
        z.append(0.8 * z[-1] + e)
    return torch.stack(z)[:, None]


def test_blocks_keep_the_level_on_recordings():
    """Two recordings of one process: single points reject it far too often, blocks do not."""

    def rejections(block: int) -> float:
        p = [
            mmd_test(
                KERNEL,
                autoregression(400, 2 * k),
                autoregression(400, 2 * k + 1),
                permutations=99,
                block=block,
                generator=seed(k),
            ).p_value
            for k in range(40)
        ]
        return float(np.mean(np.array(p) <= 0.1))

    assert rejections(1) > 0.4 and rejections(40) < 0.25


def test_blocks_of_pairs_stay_pairs(normal):
    """HSIC with blocks: rows and columns of a block move together."""
    x, y = normal(8, 1), normal(8, 1)
    K, L = KERNEL(x, x), KERNEL(y, y)
    seen = []

    def keep(statistic, items, count, like, generator):
        seen.append((items, statistic(torch.tensor([[0, 1, 2, 3], [1, 0, 2, 3]]))))
        return hypothesis_tests.PermutationTest(0.0, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hypothesis_tests, "permutation_test", keep)
        hsic_test(K, L, block=2)
    items, values = seen[0]
    order = [2, 3, 0, 1, 4, 5, 6, 7]
    expected = torch.stack([hsic(K, L), hsic(K, L[order][:, order])])
    assert items == 4
    torch.testing.assert_close(values, expected)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"permutations": 0}, "at least 1, got 0 and 1"),
        ({"block": 0}, "at least 1, got 999 and 0"),
        ({"block": 4}, "fewer than two blocks of 4"),
    ],
)
def test_impossible_tests(settings, said, normal):
    x = normal(6, 1)
    with pytest.raises(ValueError, match=said):
        mmd_test(KERNEL, x, x, **settings)
    with pytest.raises(ValueError, match=said):
        hsic_test(KERNEL(x, x), KERNEL(x, x), **settings)


@pytest.mark.slow  # shapes are not checked there, as in ordinary use
def test_grams_of_different_samples_are_no_pairs(normal):
    x = normal(6, 1)
    with pytest.raises(ValueError, match="6 and 5 points are no pairs"):
        hsic_test(KERNEL(x, x), torch.eye(5, dtype=F64))
