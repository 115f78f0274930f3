"""Density ratios against loops, brute-force leave-one-out, closed forms and their own definitions
as minimisers.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from kbf.rkhs import ratios
from kbf.rkhs.kernels import delta, gaussian, laplace
from kbf.rkhs.linalg import NotPositiveDefiniteError

F64 = torch.float64
KERNEL = partial(gaussian, bandwidth=0.7)


class Samples(NamedTuple):
    z: Tensor  # n 1, training
    u: Tensor  # m 1, of the prior
    gram: Tensor
    cross: Tensor
    gram_prior: Tensor


@pytest.fixture
def samples(normal) -> Samples:
    z, u = normal(15, 1), 0.6 * normal(11, 1) + 0.5
    return Samples(z, u, KERNEL(z, z), KERNEL(z, u), KERNEL(u, u))


def test_tikhonov_and_kulsif_are_the_loops(samples):
    g = samples.cross.mean(1)
    z, u = samples.z.numpy(), samples.u.numpy()
    G = reference.gaussian_gram(z, z, 0.7)
    g_loop = np.array([sum(reference.gaussian(a, b, 0.7) for b in u) / len(u) for a in z])
    gamma = ratios.tikhonov(samples.gram, g, 1e-2)
    np.testing.assert_allclose(
        gamma.numpy(), reference.tikhonov(G, g_loop, 1e-2), rtol=1e-8, atol=1e-8
    )
    ratio = ratios.kulsif(samples.gram, g, 1e-2)
    np.testing.assert_allclose(
        ratio.numpy(), reference.kulsif(G, g_loop, 1e-2), rtol=1e-8, atol=1e-8
    )
    assert (gamma < 0).any(), "the case must meet the clipping"
    assert (ratio[gamma < 0] == 0).all()


def test_kulsif_is_the_minimiser(samples):
    r = reference.kulsif_function(
        samples.z.numpy(), samples.u.numpy(), lambda a, b: reference.gaussian(a, b, 0.7), 1e-2
    )
    expected = [r(z) for z in samples.z.numpy()]
    np.testing.assert_allclose(
        ratios.tikhonov(samples.gram, samples.cross.mean(1), 1e-2).numpy(),
        expected,
        rtol=1e-6,
        atol=1e-6,
    )


def test_the_ratio_of_the_training_sample_itself_is_one(normal):
    z = normal(200, 1)
    gram = KERNEL(z, z)
    ratio = ratios.kulsif(gram, gram.mean(1), 1e-4)
    inside = z[:, 0].abs() < 1.5
    torch.testing.assert_close(ratio[inside], torch.ones_like(ratio[inside]), rtol=0, atol=0.05)


@pytest.mark.parametrize("ratio", [ratios.tikhonov, ratios.kulsif])
def test_batch_is_one_by_one(samples, normal, ratio):
    prior = (normal(2, 3, 11).square() @ samples.cross.mT) / 10
    together = ratio(samples.gram, prior, 1e-2)
    assert together.shape == (2, 3, 15)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(
                together[i, j], ratio(samples.gram, prior[i, j], 1e-2), rtol=1e-10, atol=1e-10
            )


def test_ratio_of_johno_is_ours_over_n(samples):
    g, n, epsilon = samples.cross.mean(1), 15, 1e-2
    mu = torch.linalg.solve(
        samples.gram + n * epsilon * torch.eye(n, dtype=F64), g
    )  # Johno et al. (2018), Proposition 1
    torch.testing.assert_close(ratios.tikhonov(samples.gram, g, epsilon) / n, mu)


def test_kulsif_on_a_finite_set_is_the_table():
    z = torch.tensor([0, 0, 0, 1, 1, 2], dtype=F64)[:, None]  # p = 1/2, 1/3, 1/6
    prior = torch.tensor([0.2, 0.2, 0.6], dtype=F64)
    values = torch.arange(3, dtype=F64)[:, None]
    ratio = ratios.kulsif(delta(z, z), delta(z, values) @ prior, 1e-9)
    expected = torch.tensor([0.4, 0.4, 0.4, 0.6, 0.6, 3.6], dtype=F64)
    torch.testing.assert_close(ratio, expected, rtol=1e-6, atol=1e-6)


def test_true_ratio():
    z = torch.linspace(-1, 2, 7, dtype=F64)
    prior, density = torch.distributions.Normal(0.5, 0.3), torch.distributions.Normal(0.0, 1.0)
    ratio = ratios.true_ratio(prior.log_prob(z), density.log_prob(z))
    torch.testing.assert_close(ratio, prior.log_prob(z).exp() / density.log_prob(z).exp())


def test_kulsif_comes_near_the_true_ratio(normal):
    z, u = normal(400, 1), 0.5 * normal(400, 1)
    gram, prior = KERNEL(z, z), KERNEL(z, u).mean(1)
    truth = (
        torch.distributions.Normal(0.0, 0.5).log_prob(z[:, 0]).exp()
        / torch.distributions.Normal(0.0, 1.0).log_prob(z[:, 0]).exp()
    )
    error = (ratios.kulsif(gram, prior, 3e-3) - truth).square().mean()
    assert error < 0.05 * (truth - 1).square().mean()


def test_singular_system_is_an_error_that_names_it():
    gram = -torch.eye(4, dtype=F64)
    with pytest.raises(NotPositiveDefiniteError, match=r"4 x 4 .* reg = 0\.4 .* -0\.6"):
        ratios.kulsif(gram, torch.ones(4, dtype=F64), 0.1)


# leave-one-out


@pytest.mark.parametrize("n, m", [(9, 9), (9, 6), (6, 9), (2, 2)])
@pytest.mark.parametrize("reg", [1e-3, 0.3])
def test_leave_one_out_is_brute_force(normal, n, m, reg):
    z, u = normal(n, 2), 0.5 * normal(m, 2) + 0.3
    score = ratios.kulsif_loo(KERNEL(z, z), KERNEL(z, u), KERNEL(u, u), reg)
    expected = reference.kulsif_loo(
        z.numpy(), u.numpy(), lambda a, b: reference.gaussian(a, b, 0.7), reg
    )
    assert score.item() == pytest.approx(expected, rel=1e-8)


def test_leave_one_out_prefers_a_sensible_ridge(normal):
    z, u = normal(100, 1), 0.5 * normal(100, 1)
    scores = [
        ratios.kulsif_loo(KERNEL(z, z), KERNEL(z, u), KERNEL(u, u), reg).item()
        for reg in (1e-9, 1e-2, 1e2)
    ]
    assert scores[1] < scores[0]
    assert scores[1] < scores[2]


def test_leave_one_out_gradient(samples):
    reg = torch.tensor(0.05, dtype=F64, requires_grad=True)
    width = torch.tensor(0.7, dtype=F64, requires_grad=True)

    def score(reg, width):
        k = partial(gaussian, bandwidth=width)
        return ratios.kulsif_loo(
            k(samples.z, samples.z), k(samples.z, samples.u), k(samples.u, samples.u), reg
        )

    assert torch.autograd.gradcheck(score, (reg, width))


def test_leave_one_out_needs_two_of_each(samples):
    with pytest.raises(ValueError, match="got 15 and 1"):
        ratios.kulsif_loo(samples.gram, samples.cross[:, :1], samples.gram_prior[:1, :1], 0.1)


# relative ratio


@pytest.mark.parametrize("reg", [1e-3, 0.1])
def test_relative_with_alpha_zero_is_kulsif(samples, reg):
    weights = torch.full((11,), 1 / 11, dtype=F64)
    expected = ratios.kulsif(samples.gram, samples.cross @ weights, reg)
    torch.testing.assert_close(
        ratios.relative(samples.gram, samples.cross, weights, reg, 0.0),
        expected,
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("signed", [False, True])
def test_relative_is_the_minimiser(normal, alpha, signed):
    z, u = normal(12, 1), 0.5 * normal(8, 1)
    a = np.abs(normal(8).numpy()) / 6
    if signed:
        a[:3] *= -0.3
    k = partial(laplace, bandwidth=1.0)  # a Gram matrix that can be inverted
    G, K, reg = k(z, z).numpy(), k(z, u).numpy(), 0.05
    # stationarity in the coefficients c of r = sum_i c_i k(., z_i)
    quadratic = alpha * K @ np.diag(np.maximum(a, 0)) @ K.T + (1 - alpha) / 12 * G @ G + reg * G
    expected = (G @ np.linalg.solve(quadratic, K @ a)).clip(0, 1 / alpha if alpha else None)
    ratio = ratios.relative(k(z, z), k(z, u), torch.from_numpy(a), reg, alpha)
    np.testing.assert_allclose(ratio.numpy(), expected, rtol=1e-7, atol=1e-9)


def test_relative_over_the_training_points_themselves(normal):
    z, w = normal(12, 1), normal(12).softmax(-1)
    G, reg, alpha = laplace(z, z, bandwidth=1.0), 0.05, 0.3
    # over its own points the minimiser is (G diag(alpha w + (1 - alpha)/n) + reg I)^-1 G w
    expected = torch.linalg.solve(
        G * (alpha * w + (1 - alpha) / 12) + reg * torch.eye(12, dtype=F64), G @ w
    )
    torch.testing.assert_close(
        ratios.relative(G, G, w, reg, alpha), expected.clamp(0, 1 / alpha), rtol=1e-9, atol=1e-10
    )


def test_relative_is_bounded_where_the_ratio_is_not(normal):
    z, u = normal(60, 1), 0.15 * normal(60, 1) + 2.2  # a prior in the tail of the training points
    gram, cross, a = KERNEL(z, z), KERNEL(z, u), torch.full((60,), 1 / 60, dtype=F64)
    assert ratios.kulsif(gram, cross @ a, 1e-4).max() > 10
    for alpha in (0.2, 0.5):
        r = ratios.relative(gram, cross, a, 1e-4, alpha)
        assert r.min() >= 0
        assert 0.5 / alpha < r.max() <= 1 / alpha


def test_relative_is_clipped_where_the_fit_overshoots(normal):
    z, u = normal(60, 1), 0.15 * normal(60, 1) + 1.0
    r = ratios.relative(KERNEL(z, z), KERNEL(z, u), torch.full((60,), 1 / 60, dtype=F64), 1e-4, 0.9)
    assert r.max() == 1 / 0.9
    assert r.min() == 0


def test_relative_comes_near_its_definition(normal):
    z, u = normal(400, 1), 0.5 * normal(400, 1)
    pi, p = (torch.distributions.Normal(0.0, s).log_prob(z[:, 0]).exp() for s in (0.5, 1.0))
    for alpha in (0.1, 0.5):
        truth = pi / (alpha * pi + (1 - alpha) * p)
        r = ratios.relative(
            KERNEL(z, z), KERNEL(z, u), torch.full((400,), 1 / 400, dtype=F64), 1e-3, alpha
        )
        assert (r - truth).square().mean() < 0.05 * (truth - 1).square().mean()


def test_relative_of_a_batch_and_its_gradient(samples, normal):
    weights = normal(3, 11).softmax(-1)
    together = ratios.relative(samples.gram, samples.cross, weights, 0.05, 0.2)
    for one, w in zip(together, weights, strict=True):
        torch.testing.assert_close(
            one, ratios.relative(samples.gram, samples.cross, w, 0.05, 0.2), rtol=1e-9, atol=1e-9
        )
    assert ((together > 0) & (together < 5)).any()
    weights[0, 0] = -0.05  # below zero the weight leaves the quadratic term
    weights.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda w: ratios.relative(samples.gram, samples.cross, w, 0.05, 0.2), (weights,)
    )


def test_relative_of_a_batch_of_other_samples(normal):
    """Samples of each prior: the ratios are those of one prior after the other."""
    x, u, weights = normal(9, 2), normal(3, 5, 2), normal(3, 5) / 5
    cross, G = gaussian(x, u, bandwidth=1.0), gaussian(x, x, bandwidth=1.0)
    together = ratios.relative(G, cross, weights, 0.05, 0.2)
    for one, K, w in zip(together, cross, weights, strict=True):
        torch.testing.assert_close(one, ratios.relative(G, K, w, 0.05, 0.2), rtol=1e-9, atol=1e-9)


def test_relative_in_single_precision(samples):
    weights = torch.full((11,), 1 / 11, dtype=F64)
    single = ratios.relative(
        samples.gram.float(), samples.cross.float(), weights.float(), 1e-2, 0.2
    )
    torch.testing.assert_close(
        single.double(),
        ratios.relative(samples.gram, samples.cross, weights, 1e-2, 0.2),
        rtol=0,
        atol=2e-3,
    )


@pytest.mark.parametrize("alpha", [-0.1, 1.0, math.nan])
def test_relative_refuses_alpha_out_of_range(samples, alpha):
    with pytest.raises(ValueError, match="alpha must be in"):
        ratios.relative(samples.gram, samples.cross, torch.ones(11, dtype=F64), 0.1, alpha)


# gradients, through the clipping


def test_kulsif_gradient_with_clipped_entries(samples):
    width = torch.tensor(0.7, dtype=F64, requires_grad=True)
    reg = torch.tensor(1e-2, dtype=F64, requires_grad=True)
    weights = torch.full((11,), 1 / 11, dtype=F64, requires_grad=True)

    def ratio(width, reg, weights):
        k = partial(gaussian, bandwidth=width)
        return ratios.kulsif(k(samples.z, samples.z), k(samples.z, samples.u) @ weights, reg)

    assert (ratio(width, reg, weights) == 0).any()
    assert torch.autograd.gradcheck(ratio, (width, reg, weights))


# the table


@pytest.mark.parametrize(
    "name", [name for name, form in ratios.RATIOS.items() if form.dense is not None]
)
def test_both_forms_of_a_ratio_in_the_table_are_the_same(normal, name):
    form, F, w = ratios.RATIOS[name], normal(9, 9), normal(3, 9).abs() / 9
    torch.testing.assert_close(
        form.primal(F, w, 0.05, 0.1), form.dense(F @ F.mT, w, 0.05, 0.1), rtol=1e-5, atol=1e-6
    )


# The ratio as a function: `relative_coef` and `relative_loo`


@pytest.fixture
def two_samples(normal):
    return normal(15, 1), 0.6 * normal(11, 1) + 0.5


def pooled(z, u):
    return torch.cat([z, u]), KERNEL(torch.cat([z, u]), torch.cat([z, u]))


def test_coefficients_without_alpha_are_kulsif(two_samples, normal):
    z, u = two_samples
    points, gram = pooled(z, u)
    coef = ratios.relative_coef(gram, len(z), 1e-2, 0.0)
    here = KERNEL(z, points) @ coef
    torch.testing.assert_close(here, ratios.tikhonov(KERNEL(z, z), KERNEL(z, u).mean(1), 1e-2))
    r = reference.kulsif_function(
        z.numpy(), u.numpy(), lambda a, b: reference.gaussian(a, b, 0.7), 1e-2
    )
    elsewhere = normal(5, 1)
    np.testing.assert_allclose(
        (KERNEL(elsewhere, points) @ coef).numpy(),
        [r(x) for x in elsewhere.numpy()],
        rtol=1e-6,
        atol=1e-8,
    )


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9])
def test_coefficients_are_the_minimiser(alpha, two_samples, normal):
    z, u = two_samples
    points, gram = pooled(z, u)
    best = ratios.relative_coef(gram, len(z), 1e-2, alpha)

    def loss(coef):
        r = gram @ coef
        at_z, at_u = r[: len(z)], r[len(z) :]
        fit = (
            alpha / 2 * at_u.square().mean() + (1 - alpha) / 2 * at_z.square().mean() - at_u.mean()
        )
        return fit + 1e-2 / 2 * coef @ gram @ coef

    variable = best.clone().requires_grad_()
    (slope,) = torch.autograd.grad(loss(variable), variable)
    torch.testing.assert_close(slope, torch.zeros_like(slope), atol=1e-10, rtol=0.0)
    assert all(loss(best + 0.1 * normal(len(best))) > loss(best) for _ in range(20))


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_leave_one_out_of_coefficients_is_the_loop(alpha, two_samples):
    z, u = two_samples
    n, m = len(z), len(u)
    points, gram = pooled(z, u)
    d = torch.tensor([0.0] * n + [1 / m] * m, dtype=torch.float64)
    D = torch.tensor([(1 - alpha) / n] * n + [alpha / m] * m, dtype=torch.float64)
    expected = 0.0
    for i in range(n + m):
        keep = torch.arange(n + m) != i
        system = (
            1e-2 * torch.eye(n + m - 1, dtype=torch.float64) + D[keep, None] * gram[keep][:, keep]
        )
        r = gram[i, keep] @ torch.linalg.solve(system, d[keep])
        expected += D[i] * r**2 / 2 - d[i] * r
    torch.testing.assert_close(ratios.relative_loo(gram, n, 1e-2, alpha), expected)


def test_coefficients_are_relative_where_the_centres_are(normal):
    z = normal(30, 1)
    u = z[:12]  # inside the span that `kbf.rkhs.ratios.relative` looks in
    points, gram = pooled(z, u)
    coef = ratios.relative_coef(gram, 30, 1e-2, 0.3)
    weights = torch.full((12,), 1 / 12, dtype=torch.float64)
    expected = ratios.relative(KERNEL(z, z), KERNEL(z, u), weights, 1e-2, 0.3)
    torch.testing.assert_close(
        (KERNEL(z, points) @ coef).clamp(0, 1 / 0.3), expected, rtol=1e-5, atol=1e-6
    )


def test_coefficients_need_both_samples_and_alpha_in_range():
    with pytest.raises(ValueError, match="both samples, got 3 and 0"):
        ratios.relative_coef(torch.eye(3), 3, 0.1, 0.0)
    for alpha in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"alpha in \[0, 1\)"):
            ratios.relative_coef(torch.eye(3), 2, 0.1, alpha)


def test_coefficients_come_near_the_true_relative_ratio():
    """p = N(0, 1) and pi = N(0.5, 0.5^2), with the ridge of the least leave-one-out score."""
    rng = np.random.default_rng(3)
    z, u = rng.standard_normal((400, 1)), 0.5 + 0.5 * rng.standard_normal((300, 1))
    points, new = torch.tensor(np.concatenate([z, u])), torch.tensor(rng.standard_normal((2000, 1)))
    true = (new**2 / 2 - ((new - 0.5) / 0.5) ** 2 / 2).exp()[:, 0].numpy() / 0.5
    gram, alpha = KERNEL(points, points), 0.3
    regs = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
    reg = min(regs, key=lambda reg: ratios.relative_loo(gram, 400, reg, alpha).item())
    r = (KERNEL(new, points) @ ratios.relative_coef(gram, 400, reg, alpha)).clamp(0, 1 / alpha)
    relative = true / (alpha * true + 1 - alpha)
    assert np.mean((r.numpy() - relative) ** 2) < 0.05 * relative.var()


def test_only_a_ratio_without_a_form_is_constant():
    assert ratios.Ratio().constant
    forms = ({"dense": torch.mul}, {"primal": torch.mul}, {"linear": True})
    assert not any(ratios.Ratio(**form).constant for form in forms)
