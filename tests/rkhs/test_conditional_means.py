"""Cheap conditional mean embeddings: one contract for all, each against its formula, and the exact
one at full size.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import reference
import torch

from kbf.rkhs import conditional_means
from kbf.rkhs.embeddings import Embedding, cme_loo
from kbf.rkhs.features import MAX_POINTS_OF_FULL_GRAM, random_fourier
from kbf.rkhs.kernels import arcsine, gaussian, linear, matern
from kbf.rkhs.linalg import NotPositiveDefiniteError, pivoted_cholesky

F64 = torch.float64
WIDTH, REG = 0.6, 1e-2
KERNEL = partial(gaussian, bandwidth=WIDTH)
SAMPLED = {
    "nystrom_leverage",
    "subsample",
    "divide_and_conquer",
}  # which points are drawn follows their order


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fit(case: str, x, z, **settings):
    """Every form of the table, some of them in two settings, for n >= 20."""
    own = {
        "exact": {},
        "incomplete_cholesky": {"rank": 12},
        "nystrom": {"m": len(x)},
        "nystrom_leverage": {"m": 9, "sampling": "leverage"},
        "random_fourier": {"m": 30},
        "nearest": {"m": 6},
        "nearest_tree": {"m": 6, "search": "tree"},
        "subsample": {"m": 9},
        "divide_and_conquer": {"s": 3},
        "nadaraya_watson": {},
    }[case]
    name = case.removesuffix("_leverage").removesuffix("_tree")
    measure = WIDTH if name == "random_fourier" else KERNEL
    reg = () if name == "nadaraya_watson" else (REG,)
    if name in ("nystrom", "random_fourier", "subsample", "divide_and_conquer"):
        own = {"generator": seeded(), **own}
    return conditional_means.CONDITIONAL_MEANS[name](measure, x, z, *reg, **own, **settings)


CASES = [*conditional_means.CONDITIONAL_MEANS, "nystrom_leverage", "nearest_tree"]


# the contract


@pytest.mark.parametrize("case", CASES)
def test_mean_is_weights_times_outputs_for_any_batch_and_block(normal, case):
    x, z, query = normal(25, 2), normal(25, 3), normal(2, 4, 2)
    m = fit(case, x, z)
    assert isinstance(m, conditional_means.ConditionalMean)
    w, mean = m.weights(query), m.mean(query)
    assert w.shape == (2, 4, 25) and mean.shape == (2, 4, 3)
    torch.testing.assert_close(mean, w @ z, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(mean, Embedding(z, w).mean(), rtol=1e-7, atol=1e-9)
    for i in range(2):
        for j in range(4):
            torch.testing.assert_close(m.weights(query[i, j]), w[i, j], rtol=1e-7, atol=1e-9)
            torch.testing.assert_close(m.mean(query[i, j]), mean[i, j], rtol=1e-7, atol=1e-9)
    small = fit(case, x, z, block=3)
    torch.testing.assert_close(small.weights(query), w, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(small.mean(query), mean, rtol=1e-7, atol=1e-9)
    assert m.weights(query[:0]).shape == (0, 4, 25) and m.mean(query[:0]).shape == (0, 4, 3)


@pytest.mark.parametrize("case", CASES)
def test_single_precision(normal, case):
    x, z, query = normal(30, 2), normal(30, 2), normal(5, 2)
    double, single = fit(case, x, z), fit(case, x.float(), z.float())
    assert single.weights(query.float()).dtype == single.mean(query.float()).dtype == torch.float32
    torch.testing.assert_close(
        single.weights(query.float()).double(), double.weights(query), rtol=0, atol=2e-3
    )
    torch.testing.assert_close(
        single.mean(query.float()).double(), double.mean(query), rtol=0, atol=5e-3
    )


@pytest.mark.parametrize("case", ["incomplete_cholesky", "nystrom"])
def test_landmarks_in_single_precision_need_no_larger_ridge(normal, case):
    x, z, query = normal(300, 2).float(), normal(300, 1).float(), normal(50, 2).float()
    size = {"rank": 100} if case == "incomplete_cholesky" else {"m": 100}
    form = partial(conditional_means.CONDITIONAL_MEANS[case], KERNEL, reg=1e-6, **size)
    torch.manual_seed(0)
    single = form(x, z)
    torch.manual_seed(0)
    double = form(x.double(), z.double())
    torch.testing.assert_close(
        single.weights(query).double(), double.weights(query.double()), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(
        single.mean(query).double(), double.mean(query.double()), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("case", [c for c in CASES if c not in SAMPLED])
def test_weights_follow_a_permutation_of_the_pairs(normal, case):
    x, z, query, order = (
        normal(25, 2),
        normal(25, 3),
        normal(4, 2),
        torch.randperm(25, generator=seeded(3)),
    )
    if (
        case == "incomplete_cholesky"
    ):  # all diagonal entries are alike: the first pivot is the first point
        order = torch.cat([order[order == 0], order[order != 0]])
    m, permuted = fit(case, x, z), fit(case, x[order], z[order])
    torch.testing.assert_close(
        permuted.weights(query), m.weights(query)[:, order], rtol=1e-5, atol=1e-7
    )
    torch.testing.assert_close(permuted.mean(query), m.mean(query), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_the_query(normal, case):
    m, query = fit(case, normal(20, 2), normal(20, 2)), normal(2, 2).requires_grad_()
    assert torch.autograd.gradcheck(
        m.weights, query
    )  # `nearest`: no neighbour changes within the step
    assert torch.autograd.gradcheck(m.mean, query)


@pytest.mark.parametrize("case", CASES)
def test_a_missing_query_stays_alone(normal, case):
    m, query = fit(case, normal(20, 2), normal(20, 2)), normal(3, 2)
    alone = m.mean(query[[0, 2]])
    query[1, 0] = torch.nan
    assert torch.isnan(m.mean(query)[1]).all()
    torch.testing.assert_close(m.mean(query)[[0, 2]], alone)
    torch.testing.assert_close(m.weights(query)[[0, 2]], m.weights(query[[0, 2]]))


@pytest.mark.parametrize("case", CASES)
def test_far_from_all_points_nothing_is_known(normal, case):
    m = fit(case, normal(20, 2), normal(20, 2))
    if case != "random_fourier":  # whose kernel does not fall to zero
        torch.testing.assert_close(
            m.mean(torch.full((1, 2), 1e3, dtype=F64)), torch.zeros(1, 2, dtype=F64)
        )


@pytest.mark.parametrize("case", CASES)
def test_refusals(normal, case):
    x, z = normal(20, 2), normal(20, 2)
    hole = x.clone()
    hole[3, 1] = torch.nan
    with pytest.raises(ValueError, match="inputs x hold NaN or infinite values in 1 of 20 rows"):
        fit(case, hole, z)
    with pytest.raises(ValueError, match="outputs z hold NaN"):
        fit(case, x, hole)
    with pytest.raises(ValueError, match=r"one output for each.*\(0, 2\)"):
        fit(case, x[:0], z[:0])
    with pytest.raises(
        ValueError, match=r"one type, got \(20, 2\) in torch.float64 and \(20, 2\) in torch.float32"
    ):
        fit(case, x, z.float())
    with pytest.raises(ValueError, match=r"2 components .* \(5, 3\)"):
        fit(case, x, z).mean(normal(5, 3))


def test_numbers_out_of_range(normal):
    x, z = normal(20, 2), normal(20, 2)
    for reg in (0.0, -1.0, float("nan")):
        for build in (
            conditional_means.exact,
            partial(conditional_means.nearest, m=3),
            partial(conditional_means.subsample, m=3),
            partial(conditional_means.incomplete_cholesky, rank=3),
        ):
            with pytest.raises(ValueError, match="reg must be positive"):
                build(KERNEL, x, z, reg)
        with pytest.raises(ValueError, match="reg must be positive"):
            conditional_means.random_fourier(WIDTH, x, z, reg, m=4)
    for name, key in [
        ("nearest", "m"),
        ("subsample", "m"),
        ("nystrom", "m"),
        ("incomplete_cholesky", "rank"),
        ("divide_and_conquer", "s"),
    ]:
        for count in (0, 21):
            with pytest.raises(
                ValueError,
                match=f"{key} must be between 1 and the number of training pairs, 20, got {count}",
            ):
                conditional_means.CONDITIONAL_MEANS[name](KERNEL, x, z, REG, **{key: count})
    with pytest.raises(ValueError, match="pilot must be between"):
        conditional_means.nystrom(KERNEL, x, z, REG, m=3, pilot=21)
    with pytest.raises(ValueError, match="even"):
        conditional_means.random_fourier(WIDTH, x, z, REG, m=3)
    with pytest.raises(NotPositiveDefiniteError):
        conditional_means.exact(lambda a, b: -KERNEL(a, b), x, z, REG)


def test_draws_are_the_generators(normal):
    x, z, query = normal(30, 2), normal(30, 1), normal(4, 2)
    forms = {
        "uniform": partial(conditional_means.nystrom, KERNEL, m=5),
        "leverage": partial(conditional_means.nystrom, KERNEL, m=5, sampling="leverage", pilot=8),
        "replacement": partial(
            conditional_means.nystrom, KERNEL, m=5, sampling="leverage", replacement=True
        ),
        "features": partial(conditional_means.random_fourier, WIDTH, m=6),
        "subsample": partial(conditional_means.subsample, KERNEL, m=5),
        "parts": partial(conditional_means.divide_and_conquer, KERNEL, s=5),
    }
    for name, form in forms.items():
        a, b, other = (form(x, z, REG, generator=seeded(s)).mean(query) for s in (0, 0, 1))
        assert torch.equal(a, b) and not torch.allclose(a, other), name


def test_a_point_drawn_twice_is_one_landmark(normal):
    x, z = normal(30, 2), normal(30, 1)
    with_, without = (
        conditional_means.nystrom(KERNEL, x, z, REG, m=30, replacement=r, generator=seeded())
        for r in (True, False)
    )
    assert 10 < len(with_.root) < 30 == len(without.root)


# equal to the exact one at full size


FULL = {
    "incomplete_cholesky": partial(conditional_means.incomplete_cholesky, KERNEL, rank=40),
    "nystrom": partial(conditional_means.nystrom, KERNEL, m=40),
    "nystrom_leverage": partial(conditional_means.nystrom, KERNEL, m=40, sampling="leverage"),
    "nearest": partial(conditional_means.nearest, KERNEL, m=40),
    "nearest_tree": partial(conditional_means.nearest, KERNEL, m=40, search="tree"),
    "subsample": partial(conditional_means.subsample, KERNEL, m=40),
    "divide_and_conquer": partial(conditional_means.divide_and_conquer, KERNEL, s=1),
}


@pytest.mark.parametrize("case", FULL)
@pytest.mark.parametrize("reg", [1e-1, 1e-4])
def test_full_size_is_exact(normal, case, reg):
    x, z, query = normal(40, 2), normal(40, 2), normal(6, 2)
    truth, m = conditional_means.exact(KERNEL, x, z, reg), FULL[case](x, z, reg)
    torch.testing.assert_close(m.weights(query), truth.weights(query), rtol=0, atol=1e-6)
    torch.testing.assert_close(m.mean(query), truth.mean(query), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["nystrom", "incomplete_cholesky", "nystrom_leverage"])
def test_full_size_with_points_that_coincide(normal, case):
    x, z, query = normal(20, 2)[[*range(20)] * 2], normal(40, 2), normal(6, 2)
    torch.testing.assert_close(
        FULL[case](x, z, 1e-2).mean(query),
        conditional_means.exact(KERNEL, x, z, 1e-2).mean(query),
        rtol=0,
        atol=1e-6,
    )
    single = FULL[case](x.float(), z.float(), 1e-2).mean(query.float())
    torch.testing.assert_close(
        single.double(), conditional_means.exact(KERNEL, x, z, 1e-2).mean(query), rtol=0, atol=1e-3
    )


def test_many_random_features_come_near(normal):
    x, z, query = normal(40, 2), normal(40, 1), 0.5 * normal(10, 2)
    truth = conditional_means.exact(KERNEL, x, z, 0.05).mean(query)

    def rms(m: int) -> float:
        means = torch.stack(
            [
                conditional_means.random_fourier(WIDTH, x, z, 0.05, m=m, generator=seeded(s)).mean(
                    query
                )
                for s in range(10)
            ]
        )
        return (means - truth).square().mean().sqrt().item()

    few, many = rms(64), rms(576)  # the root of 9
    assert many < 0.07 and 2 < few / many < 5


# each against its formula in loops


def gram(x, y, width: float = WIDTH) -> np.ndarray:
    return reference.gaussian_gram(np.asarray(x), np.asarray(y), width)


def local(x, query, chosen: list[int], reg: float) -> np.ndarray:
    """(G' + m reg I)^-1 k' over chosen points, in its places."""
    w = np.zeros(len(x))
    w[chosen] = reference.cme(gram(x[chosen], x[chosen]), gram(x[chosen], query[None])[:, 0], reg)
    return w


def test_exact_is_the_formula(normal):
    x, query = normal(12, 2), normal(3, 2)
    w = conditional_means.exact(KERNEL, x, normal(12, 1), REG).weights(query)
    for k in range(3):
        truth = reference.cme(gram(x, x), gram(x, query[k : k + 1])[:, 0], REG)
        np.testing.assert_allclose(w[k].numpy(), truth, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("search", ["kernel", "tree"])
@pytest.mark.parametrize("m", [1, 5])
def test_nearest_is_the_formula(normal, search, m):
    x, query = normal(15, 2), normal(4, 2)
    w = conditional_means.nearest(
        KERNEL, x, normal(15, 1), REG, m=m, search=search, block=4
    ).weights(query)
    for k in range(4):
        order = sorted(
            range(15),
            key=lambda i: sum(
                (float(a) - float(b)) ** 2 for a, b in zip(x[i], query[k], strict=True)
            ),
        )
        np.testing.assert_allclose(
            w[k].numpy(), local(x, query[k], order[:m], REG), rtol=1e-8, atol=1e-10
        )


def test_nearest_means_the_kernels_own_measure(normal):
    x, z = normal(30, 2), normal(30, 1)
    lengths = torch.tensor([0.2, 5.0], dtype=F64)
    m = conditional_means.nearest(partial(gaussian, bandwidth=lengths), x, z, REG, m=4)
    index, _ = m.pairs(x[:3])
    truth = ((x[:3, None] - x) / lengths).square().sum(-1).argsort(-1)[:, :4]
    assert torch.equal(index, truth)
    scaled = conditional_means.nearest(
        partial(gaussian, bandwidth=1.0), x / lengths, z, REG, m=4, search="tree"
    )
    torch.testing.assert_close(m.weights(x), scaled.weights(x / lengths))


def test_nearest_pairs_are_the_dense_weights(normal):
    x, query = normal(30, 2), normal(7, 2)
    m = conditional_means.nearest(KERNEL, x, normal(30, 1), REG, m=4, block=8)
    index, w = m.pairs(query)
    dense = m.weights(query)
    assert index.shape == w.shape == (7, 4) and (dense != 0).sum(-1).tolist() == [4] * 7
    torch.testing.assert_close(dense.gather(-1, index), w)


def test_subsample_and_parts_are_the_formula(normal):
    x, z, query = normal(20, 2), normal(20, 1), normal(3, 2)
    one = conditional_means.subsample(KERNEL, x, z, REG, m=7, generator=seeded())
    (index, _), *none = one.parts
    assert not none and len(set(index.tolist())) == 7
    parts = conditional_means.divide_and_conquer(KERNEL, x, z, REG, s=3, generator=seeded()).parts
    assert sorted(i for index, _ in parts for i in index.tolist()) == list(range(20))
    assert [len(index) for index, _ in parts] == [7, 7, 6]
    together = conditional_means.divide_and_conquer(
        KERNEL, x, z, REG, s=3, generator=seeded()
    ).weights(query)
    for k in range(3):
        np.testing.assert_allclose(
            one.weights(query)[k].numpy(),
            local(x, query[k], index.tolist(), REG),
            rtol=1e-8,
            atol=1e-10,
        )
        truth = sum(local(x, query[k], index.tolist(), REG) for index, _ in parts) / 3
        np.testing.assert_allclose(together[k].numpy(), truth, rtol=1e-8, atol=1e-10)


def test_nadaraya_watson_is_the_formula(normal):
    x, z, query = normal(15, 2), normal(15, 1), normal(3, 2)
    w = conditional_means.nadaraya_watson(KERNEL, x, z).weights(query)
    K = gram(query, x)
    np.testing.assert_allclose(w.numpy(), K / K.sum(1, keepdims=True), rtol=1e-10)
    signed = conditional_means.nadaraya_watson(partial(arcsine, bias=0.1, slope=2.0), x, z).weights(
        query
    )
    assert (signed < 0).any()
    torch.testing.assert_close(signed.abs().sum(-1), torch.ones(3, dtype=F64))


def test_incomplete_cholesky_is_the_formula(normal):
    x, z = normal(25, 2), normal(25, 1)
    G = KERNEL(x, x)
    L = pivoted_cholesky(lambda i: G[:, i], G.diagonal(), 8)[0].numpy()
    w = conditional_means.incomplete_cholesky(KERNEL, x, z, REG, rank=8).weights(x)
    truth = L @ np.linalg.solve(
        25 * REG * np.eye(8) + L.T @ L, L.T
    )  # at the training points l(x_i) is row i
    np.testing.assert_allclose(w.numpy(), truth.T, rtol=0, atol=1e-8)


def test_nystrom_is_the_projected_kernel(normal):
    x, z, query = normal(25, 2), normal(25, 1), normal(4, 2)
    m = conditional_means.nystrom(KERNEL, x, z, REG, m=6, generator=seeded())
    chosen = torch.multinomial(torch.ones(25), 6, generator=seeded()).numpy()
    inner = np.linalg.inv(gram(x[chosen], x[chosen]))
    K, k = gram(x, x[chosen]), gram(query, x[chosen])
    truth = np.stack([reference.cme(K @ inner @ K.T, K @ inner @ row, REG) for row in k])
    np.testing.assert_allclose(m.weights(query).numpy(), truth, rtol=0, atol=1e-7)


def test_random_fourier_is_its_primal_formula(normal):
    x, z, query = normal(25, 2), normal(25, 1), normal(4, 2)
    psi = random_fourier(2, 8, bandwidth=WIDTH, generator=seeded())
    w = conditional_means.random_fourier(WIDTH, x, z, REG, m=8, generator=seeded()).weights(query)
    torch.testing.assert_close(
        w,
        reference.cme_weights(psi(x) @ psi(x).mT, psi(query) @ psi(x).mT, REG),
        rtol=1e-8,
        atol=1e-10,
    )


def test_ridge_on_linear_features_is_ridge_regression(normal):
    x, z, query = normal(30, 2), normal(30, 2), normal(4, 2)
    slope = np.linalg.solve(x.T.numpy() @ x.numpy() + 30 * REG * np.eye(2), x.T.numpy() @ z.numpy())
    np.testing.assert_allclose(
        conditional_means.feature_ridge(lambda v: v, x, z, REG).mean(query).numpy(),
        query.numpy() @ slope,
        rtol=1e-10,
    )


# incomplete Cholesky: its bound, and the draft's form


@pytest.mark.parametrize("tol", [1e-1, 1e-2, 1e-4])
def test_the_tolerance_bounds_the_error(normal, tol):
    x, z, reg = normal(80, 2), normal(80, 1), 1e-3
    m = conditional_means.incomplete_cholesky(KERNEL, x, z, reg, rank=80, tol=tol)
    assert m.root.shape[0] < 75
    error = torch.linalg.matrix_norm(
        m.weights(x) - conditional_means.exact(KERNEL, x, z, reg).weights(x), 2
    ).item()
    assert 1e-3 * tol < error <= tol / reg  # tr(G) = n


# leverage scores


def exact_scores(x, reg: float) -> np.ndarray:
    G = gram(x, x)
    return np.diag(G @ np.linalg.inv(G + len(x) * reg * np.eye(len(x))))


@pytest.mark.parametrize("reg", [1e-1, 1e-3])
def test_leverage_scores_of_a_full_pilot_are_exact(normal, reg):
    x = normal(40, 2)
    scores = conditional_means.leverage_scores(KERNEL, x, reg, x[torch.randperm(40)], block=7)
    np.testing.assert_allclose(scores.numpy(), exact_scores(x.numpy(), reg), rtol=1e-6)


def test_leverage_scores_of_a_small_pilot_are_near(normal):
    x = normal(200, 1)
    scores, truth = (
        conditional_means.leverage_scores(KERNEL, x, 1e-2, x[:60]).numpy(),
        exact_scores(x.numpy(), 1e-2),
    )
    assert (scores / truth).min() > 0.4 and (scores / truth).max() < 3
    assert np.corrcoef(scores, truth)[0, 1] > 0.8


def test_leverage_sampling_finds_the_rare_region(normal):
    x = torch.cat([0.3 * normal(380, 1), 8 + 0.3 * normal(20, 1)])
    z = torch.sin(3 * x)
    truth = conditional_means.exact(KERNEL, x, z, 1e-4).mean(x[380:])

    def error(sampling: str) -> float:
        means = [
            conditional_means.nystrom(
                KERNEL, x, z, 1e-4, m=10, sampling=sampling, generator=seeded(s)
            ).mean(x[380:])
            for s in range(12)
        ]
        return (torch.stack(means) - truth).abs().mean().item()

    assert error("leverage") < 0.3 * error("uniform")


# known answers


def test_gaussian_conditional(normal):
    """X, Z normal: E[Z | x] is linear, and the embedding of Z given x is a Gaussian: the draft's
    ground truth (section 5.1).
    """
    n, slope, noise, width = 900, 0.8, 0.6, 1.0
    x = normal(n, 1)
    z = slope * x + noise * normal(n, 1)
    query = torch.tensor([[-1.0], [0.0], [0.7]], dtype=F64)
    centre, spread = slope * query, width**2 + noise**2
    at_z = (
        width / spread**0.5 * torch.exp(-0.5 * (centre - z.mT).square() / spread)
    )  # the true embedding at the z_i
    own = width / (width**2 + 2 * noise**2) ** 0.5  # its squared norm
    K_Z = gaussian(z, z, bandwidth=width)
    kernel = partial(gaussian, bandwidth=1.0)
    forms = {
        "exact": conditional_means.exact(kernel, x, z, 1e-3),
        "incomplete_cholesky": conditional_means.incomplete_cholesky(kernel, x, z, 1e-3, rank=12),
        "nystrom": conditional_means.nystrom(kernel, x, z, 1e-3, m=40, generator=seeded()),
        "leverage": conditional_means.nystrom(
            kernel, x, z, 1e-3, m=40, sampling="leverage", generator=seeded()
        ),
        "random_fourier": conditional_means.random_fourier(
            1.0, x, z, 1e-3, m=60, generator=seeded()
        ),
        "nearest": conditional_means.nearest(kernel, x, z, 1e-2, m=150, search="tree"),
        "subsample": conditional_means.subsample(kernel, x, z, 1e-2, m=300, generator=seeded()),
        "divide_and_conquer": conditional_means.divide_and_conquer(
            kernel, x, z, 1e-3, s=5, generator=seeded()
        ),
        "nadaraya_watson": conditional_means.nadaraya_watson(
            partial(gaussian, bandwidth=0.2), x, z
        ),
    }
    for name, m in forms.items():
        w = m.weights(query)
        distance = own - 2 * (w * at_z).sum(-1) + (w @ K_Z * w).sum(-1)
        assert distance.min() > -1e-9 and distance.max() < 0.02, name  # of 0.8
        torch.testing.assert_close(m.mean(query), centre, rtol=0, atol=0.15, msg=name)


def test_leave_one_out_is_brute_force(normal):
    x = normal(15, 1)
    z = torch.cat([torch.sin(2 * x), x.square()], -1) + 0.2 * normal(15, 2)

    def brute(build) -> float:
        total = 0.0
        for i in range(15):
            rest = torch.tensor([j for j in range(15) if j != i])
            total += (
                (z[i] - build(x[rest], z[rest], 15 / 14 * REG).mean(x[i])).square().sum().item()
            )  # the ridge stays n reg
        return total

    assert cme_loo(KERNEL(x, x), linear(z, z), REG).item() == pytest.approx(
        brute(partial(conditional_means.exact, KERNEL)), rel=1e-8
    )
    psi = random_fourier(1, 10, bandwidth=WIDTH, generator=seeded())
    score = conditional_means.feature_loo(
        conditional_means.feature_ridge(psi, x, z, REG, block=4), z
    )
    assert score.item() == pytest.approx(
        brute(partial(conditional_means.feature_ridge, psi)), rel=1e-8
    )
    full = conditional_means.feature_loo(
        conditional_means.incomplete_cholesky(KERNEL, x, z, REG, rank=15), z
    )
    assert full.item() == pytest.approx(cme_loo(KERNEL(x, x), linear(z, z), REG).item(), rel=1e-5)


def test_gradients_of_bandwidth_and_ridge(normal):
    x, z, query = normal(12, 2), normal(12, 1), normal(3, 2)
    width, reg = (
        torch.tensor(0.8, dtype=F64, requires_grad=True),
        torch.tensor(0.05, dtype=F64, requires_grad=True),
    )
    forms = [
        conditional_means.exact,
        partial(conditional_means.incomplete_cholesky, rank=5),
        lambda *args: conditional_means.nystrom(
            *args, m=5, sampling="leverage", pilot=12, generator=seeded()
        ),
        partial(conditional_means.nearest, m=4),
        lambda *args: conditional_means.divide_and_conquer(*args, s=2, generator=seeded()),
    ]
    for form in forms:
        assert torch.autograd.gradcheck(
            lambda b, r, form=form: form(partial(gaussian, bandwidth=b), x, z, r).mean(query),
            (width, reg),
        )


# memory


BLOCKED = {
    "incomplete_cholesky": partial(conditional_means.incomplete_cholesky, reg=REG, rank=20),
    "nystrom": partial(conditional_means.nystrom, reg=REG, m=20),
    "nystrom_leverage": partial(conditional_means.nystrom, reg=REG, m=20, sampling="leverage"),
    "nearest": partial(conditional_means.nearest, reg=REG, m=20),
    "nearest_tree": partial(conditional_means.nearest, reg=REG, m=20, search="tree"),
    "nadaraya_watson": conditional_means.nadaraya_watson,
}


@pytest.mark.parametrize("case", BLOCKED)
def test_no_array_of_all_points_and_queries(normal, case):
    sizes = []

    def watched(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        values = matern(a, b, bandwidth=1.0, nu=1.5)
        sizes.append(values.numel())
        return values

    n = (
        MAX_POINTS_OF_FULL_GRAM + 100
    )  # of fewer points landmarks are picked from the whole Gram matrix
    m = BLOCKED[case](watched, normal(n, 2), normal(n, 1), block=50)
    m.mean(normal(300, 2))
    assert max(sizes) <= 50 * 50
