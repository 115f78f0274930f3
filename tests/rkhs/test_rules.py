"""The Bayes rules against loops, Bayes' table, each other, and the published algorithm."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from kbf.rkhs import ratios, rules
from kbf.rkhs.kernels import delta, gaussian
from kbf.rkhs.linalg import NotPositiveDefiniteError

F64 = torch.float64


class Problem(NamedTuple):
    ratio: Tensor  # n, with zeros
    gram: Tensor
    query: Tensor
    features: Tensor  # gram = features features^T
    psi: Tensor  # query = features psi


@pytest.fixture
def problem(normal) -> Problem:
    features, psi = normal(12, 5), normal(5)
    ratio = normal(12).clamp_min(0)
    assert 2 < (ratio == 0).sum() < 10
    return Problem(ratio, features @ features.mT, features @ psi, features, psi)


def batches(normal, problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Ratios, queries and feature queries ``2 3 ..``."""
    psi = normal(2, 3, 5)
    return normal(2, 3, 12).clamp_min(0), psi @ problem.features.mT, psi


# against loops


def test_importance_weighted_is_the_formula(problem):
    w = rules.importance_weighted(problem.ratio, problem.gram, problem.query, 0.02)
    expected = reference.importance_weighted_rule(
        problem.ratio.numpy(), problem.gram.numpy(), problem.query.numpy(), 0.02
    )
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-9, atol=1e-12)
    assert (w[problem.ratio == 0] == 0).all()


def test_importance_weighted_without_the_root(problem):
    D, n = torch.diag(problem.ratio), 12
    expected = D @ torch.linalg.solve(
        problem.gram @ D + n * 0.02 * torch.eye(n, dtype=F64), problem.query
    )
    torch.testing.assert_close(
        rules.importance_weighted(problem.ratio, problem.gram, problem.query, 0.02), expected
    )


def test_importance_weighted_minimises_the_weighted_loss(normal):
    # loss (3) of Xu et al. with phi(z) = z and k_X = <psi, psi>: E is ridge regression with weights
    # r / n
    features, z, psi, r = normal(20, 3), normal(20, 2), normal(3), normal(20).square()
    reg = 0.1
    E = np.linalg.lstsq(
        np.concatenate([features * (r / 20).sqrt()[:, None], np.sqrt(reg) * torch.eye(3)]),
        np.concatenate([z * (r / 20).sqrt()[:, None], np.zeros((3, 2))]),
        rcond=None,
    )[0]
    w = rules.importance_weighted(r, features @ features.mT, features @ psi, reg)
    np.testing.assert_allclose((w @ z).numpy(), psi.numpy() @ E, rtol=1e-8)


def test_original_is_the_formula(problem, normal):
    gamma = normal(12)
    w = rules.original(gamma, problem.gram, problem.query, 0.5)
    expected = reference.original_rule(
        gamma.numpy(), problem.gram.numpy(), problem.query.numpy(), 0.5
    )
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-7, atol=1e-10)


def test_pseudo_inverse_is_the_formula(problem, normal):
    gamma = normal(12)
    weighted = np.diag(gamma.numpy()) @ problem.gram.numpy()
    expected = np.linalg.pinv(weighted, rcond=1e-10) @ (gamma.numpy() * problem.query.numpy())
    np.testing.assert_allclose(
        rules.pseudo_inverse(gamma, problem.gram, problem.query).numpy(),
        expected,
        rtol=1e-7,
        atol=1e-10,
    )


# against Bayes' table: delta kernels, tiny ridges


class Table(NamedTuple):
    z: Tensor
    x: Tensor
    prior: np.ndarray
    likelihood: np.ndarray


@pytest.fixture
def table() -> Table:
    """60 pairs in the exact proportions of p(z) p(x | z), and another prior."""
    likelihood = np.array([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    counts = [[10, 6, 4], [4, 8, 28]]  # p(z) = 1/3, 2/3 times 60
    pairs = [(z, x) for z in range(2) for x in range(3) for _ in range(counts[z][x])]
    z, x = torch.tensor(pairs, dtype=F64).T
    return Table(z[:, None], x[:, None], np.array([0.8, 0.2]), likelihood)


def posterior(table: Table, rule, ridge: float, x: int) -> np.ndarray:
    """Mass of each latent value after observing x."""
    values = torch.arange(2, dtype=F64)[:, None]
    gram_z, gram_x = delta(table.z, table.z), delta(table.x, table.x)
    ratio = ratios.kulsif(gram_z, delta(table.z, values) @ torch.from_numpy(table.prior), 1e-10)
    w = rule(ratio, gram_x, delta(table.x, torch.tensor([[float(x)]], dtype=F64))[:, 0], ridge)
    return (w @ delta(table.z, values)).numpy()


@pytest.mark.parametrize("x", range(3))
def test_importance_weighted_is_bayes_table(table, x):
    found = posterior(table, rules.importance_weighted, 1e-9, x)
    np.testing.assert_allclose(
        found, reference.bayes_table(table.prior, table.likelihood, x), rtol=1e-6
    )


@pytest.mark.parametrize("x", range(3))
def test_original_becomes_bayes_table_as_its_ridge_vanishes(table, x):
    truth = reference.bayes_table(table.prior, table.likelihood, x)
    errors = [
        np.abs(posterior(table, rules.original, ridge, x) - truth).max()
        for ridge in (100.0, 1.0, 1e-2, 1e-5)
    ]
    assert errors[-1] < 1e-6
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-3


def test_the_prior_matters(table):
    flat = posterior(
        table._replace(prior=np.array([1 / 3, 2 / 3])), rules.importance_weighted, 1e-9, 0
    )
    np.testing.assert_allclose(flat, [10 / 14, 4 / 14], rtol=1e-6)
    assert abs(flat[0] - posterior(table, rules.importance_weighted, 1e-9, 0)[0]) > 0.1


def test_original_forgets_the_prior_when_the_observations_are_all_different(normal):
    # Johno et al. (2018), section 3.1: with G and Lambda invertible and delta -> 0 the weights are
    # G^-1 g
    x = normal(8, 2)
    gram, query = gaussian(x, x, bandwidth=0.5), gaussian(normal(1, 2), x, bandwidth=0.5)[0]
    gamma = normal(2, 8).abs() + 0.5
    w = rules.original(gamma, gram, query.expand(2, 8), 1e-12)
    torch.testing.assert_close(w[0], w[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(
        rules.pseudo_inverse(gamma, gram, query.expand(2, 8))[0], torch.linalg.solve(gram, query)
    )
    iw = rules.importance_weighted(gamma, gram, query.expand(2, 8), 0.1)
    assert (iw[0] - iw[1]).abs().max() > 1e-2


# the same thing in several forms


@pytest.mark.parametrize("reg", [1e-4, 0.1])
def test_dual_is_primal(problem, reg):
    dual = rules.importance_weighted(problem.ratio, problem.gram, problem.query, reg)
    primal = rules.importance_weighted_primal(problem.ratio, problem.features, problem.psi, reg)
    torch.testing.assert_close(dual, primal, rtol=1e-10, atol=1e-10)


def test_original_dual_is_primal(problem, normal):
    gamma = normal(12)
    dual = rules.original(gamma, problem.gram, problem.query, 0.3)
    primal = rules.original_primal(gamma, problem.features, problem.psi, 0.3)
    torch.testing.assert_close(dual, primal, rtol=1e-9, atol=1e-10)


def test_moments_are_the_rule_over_all_observations(normal):
    ratio, features, psi, n, k = normal(6).square(), normal(6, 3, 4), normal(4), 6, 3
    C = rules.covariance_from_moments(ratio, rules.second_moments(features), rules.places(4))
    c = rules.importance_weighted_coefficients(C, psi, n * 0.1)
    w = rules.from_coefficients(ratio, features.mean(1), c)
    every = rules.importance_weighted_primal(
        ratio.repeat_interleave(k), features.flatten(0, 1), psi, 0.1
    )
    torch.testing.assert_close(w, every.reshape(n, k).sum(1), rtol=1e-10, atol=1e-10)


def test_ratio_one_is_kernel_ridge_regression(problem):
    w = rules.importance_weighted(torch.ones(12, dtype=F64), problem.gram, problem.query, 0.05)
    torch.testing.assert_close(
        w, reference.cme_weights(problem.gram, problem.query, 0.05), rtol=1e-10, atol=1e-10
    )
    np.testing.assert_allclose(
        w.numpy(), reference.cme(problem.gram.numpy(), problem.query.numpy(), 0.05), rtol=1e-8
    )


def test_batch_is_one_by_one(problem, normal):
    ratio, query, psi = batches(normal, problem)
    together = {
        "importance_weighted": rules.importance_weighted(ratio, problem.gram, query, 0.1),
        "original": rules.original(ratio, problem.gram, query, 0.1),
        "pseudo_inverse": rules.pseudo_inverse(ratio, problem.gram, query),
        "importance_weighted_primal": rules.importance_weighted_primal(
            ratio, problem.features, psi, 0.1
        ),
        "original_primal": rules.original_primal(ratio, problem.features, psi, 0.1),
    }
    for i in range(2):
        for j in range(3):
            r, g, p = ratio[i, j], query[i, j], psi[i, j]
            alone = {
                "importance_weighted": rules.importance_weighted(r, problem.gram, g, 0.1),
                "original": rules.original(r, problem.gram, g, 0.1),
                "pseudo_inverse": rules.pseudo_inverse(r, problem.gram, g),
                "importance_weighted_primal": rules.importance_weighted_primal(
                    r, problem.features, p, 0.1
                ),
                "original_primal": rules.original_primal(r, problem.features, p, 0.1),
            }
            for name, w in alone.items():
                torch.testing.assert_close(together[name][i, j], w, rtol=1e-8, atol=1e-8)


# scalings


def test_reg_is_the_authors_reg2(problem):
    n, reg2, gamma = (
        12,
        0.03,
        problem.ratio / 12,
    )  # in the authors' importance-weighted rule the ratio has mean 1/n
    root = torch.diag(gamma.sqrt())
    theirs = root @ torch.linalg.solve(
        root @ problem.gram @ root + reg2 * torch.eye(n, dtype=F64), root @ problem.query
    )
    torch.testing.assert_close(
        rules.importance_weighted(problem.ratio, problem.gram, problem.query, reg2), theirs
    )


def test_delta_of_johno_is_ours_over_n_squared(problem, normal):
    n, gamma, ours = 12, normal(12), 0.7
    johno = torch.from_numpy(
        reference.original_rule(
            (gamma / n).numpy(), problem.gram.numpy(), problem.query.numpy(), ours / n**2
        )
    )  # Theorem 3
    torch.testing.assert_close(
        rules.original(gamma, problem.gram, problem.query, ours), johno, rtol=1e-7, atol=1e-9
    )


# errors and gradients


def test_error_names_size_ridge_and_eigenvalue():
    gram = torch.diag(torch.tensor([1.0, -1.0, 1.0], dtype=F64))
    with pytest.raises(
        NotPositiveDefiniteError, match=r"3 x 3 .* reg = 0\.3 .*eigenvalue is -0\.7"
    ):
        rules.importance_weighted(torch.ones(3, dtype=F64), gram, torch.ones(3, dtype=F64), 0.1)


def test_gradient_through_ratio_and_rule_with_exact_zeros(normal):
    z, x, new, prior = normal(8, 1), normal(8, 1), normal(1, 1), normal(8).softmax(-1)
    prior = prior * torch.tensor([1, 1, 1, 0, 0, 0, 0, 0])
    widths = torch.tensor([0.5, 0.8], dtype=F64, requires_grad=True)
    regs = torch.tensor([1e-2, 3e-2], dtype=F64, requires_grad=True)
    x.requires_grad_()

    def weights(widths, regs, x, rule):
        k_z, k_x = (partial(gaussian, bandwidth=width) for width in widths)
        ratio = ratios.kulsif(k_z(z, z), k_z(z, z) @ prior, regs[0])
        assert (ratio == 0).any()
        return rule(ratio, k_x(x, x), k_x(new, x)[0], regs[1])

    for rule in (rules.importance_weighted, rules.original):
        assert torch.autograd.gradcheck(partial(weights, rule=rule), (widths, regs, x))


def test_gradient_of_the_primal_is_right_at_a_ratio_of_zero(problem):
    inputs = [t.clone().requires_grad_() for t in (problem.ratio, problem.features, problem.psi)]
    assert (problem.ratio == 0).any()
    assert torch.autograd.gradcheck(
        lambda r, f, p: rules.importance_weighted_primal(r, f, p, 0.2), inputs
    )
    assert torch.autograd.gradcheck(lambda r, f, p: rules.original_primal(r, f, p, 0.2), inputs)


def test_gradient_of_the_dual_is_finite_at_a_ratio_of_zero(problem):
    ratio = problem.ratio.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(
        rules.importance_weighted(ratio, problem.gram, problem.query, 0.1).square().sum(), ratio
    )
    assert torch.isfinite(gradient).all()
    assert (gradient[problem.ratio == 0] == 0).all()
    primal = problem.ratio.clone().requires_grad_()
    w = rules.importance_weighted_primal(primal, problem.features, problem.psi, 0.1)
    (expected,) = torch.autograd.grad(w.square().sum(), primal)
    torch.testing.assert_close(gradient[problem.ratio > 0], expected[problem.ratio > 0])


def test_gradient_of_the_pseudo_inverse(normal):
    gamma, gram_root, query = (
        normal(4).requires_grad_(),
        normal(4, 4).requires_grad_(),
        normal(4).requires_grad_(),
    )
    assert torch.autograd.gradcheck(
        lambda a, g, q: rules.pseudo_inverse(a, g @ g.mT, q), (gamma, gram_root, query)
    )


# the published algorithm as a whole


def test_published_filter_is_the_chain_of_our_steps(rng):
    angle = np.cumsum(rng.normal(0.3, 0.2, 70))
    states = np.stack([np.cos(angle), np.sin(angle)], 1)
    obs = states + 0.2 * rng.standard_normal(states.shape)
    train, test = slice(0, 50), slice(50, 70)
    found = reference.published_filter(
        states[train],
        obs[train],
        obs[test],
        bandwidth_ratio=0.5,
        bandwidth_transition=0.4,
        bandwidth_obs=0.6,
        eta=1e-3,
        lam_transition=2e-3,
        lam_rule=5e-4,
    )

    n, z, x = 50, torch.from_numpy(states[train]), torch.from_numpy(obs[train])
    G_Z, G_P, G_X = (
        gaussian(z, z, bandwidth=0.5),
        gaussian(z, z, bandwidth=0.4),
        gaussian(x, x, bandwidth=0.6),
    )
    w = torch.full((n,), 1 / n, dtype=F64)
    for t, new in enumerate(torch.from_numpy(obs[test])):
        w = torch.cat(
            [torch.zeros(1, dtype=F64), reference.cme_weights(G_P[:-1, :-1], G_P[:-1] @ w, 2e-3)]
        )
        ratio = ratios.kulsif(G_Z, G_Z @ w, 1e-3)
        w = rules.importance_weighted(ratio, G_X, gaussian(new[None], x, bandwidth=0.6)[0], 5e-4)
        np.testing.assert_allclose(found[t], (w @ z).numpy(), rtol=0, atol=1e-7)
    assert np.square(found - states[test]).sum(1).mean() < 0.08  # 0.08: the observation noise


def test_the_reference_kernel_is_its_loop(rng):
    x, y = rng.standard_normal((4, 3)), rng.standard_normal((5, 3))
    np.testing.assert_allclose(
        reference._fast_gaussian_gram(x, y, 0.7), reference.gaussian_gram(x, y, 0.7), rtol=1e-12
    )


# the table


@pytest.mark.parametrize(
    "name", [name for name, rule in rules.RULES.items() if rule.primal is not None]
)
def test_both_forms_of_a_rule_in_the_table_give_the_same_weights(problem, name):
    rule, reg, n = rules.RULES[name], 0.02, len(problem.features)
    ratio = problem.ratio - (0.3 if rule.signed else 0)
    dense = rule.dense(ratio, problem.gram, problem.query, reg)
    covariance = rules.weighted_covariance(ratio, problem.features)
    coefficients = rule.primal(
        covariance, problem.psi, n * reg if rule.ridge_scales_with_n else reg
    )
    torch.testing.assert_close(
        rules.from_coefficients(ratio, problem.features, coefficients), dense, rtol=1e-8, atol=1e-10
    )


@pytest.mark.parametrize(
    "name", [name for name, rule in rules.RULES.items() if rule.primal is not None]
)
def test_a_ridge_that_scales_with_n_means_the_same_over_all_points_twice(problem, name):
    rule = rules.RULES[name]
    once = rule.dense(problem.ratio, problem.gram, problem.query, 0.02)
    twice = rule.dense(
        problem.ratio.repeat(2), problem.gram.repeat(2, 2), problem.query.repeat(2), 0.02
    )
    assert (
        torch.allclose(twice.unflatten(-1, (2, -1)).sum(-2), once, rtol=1e-6, atol=1e-9)
        is rule.ridge_scales_with_n
    )


@pytest.mark.parametrize("name", rules.RULES)
def test_signed_rules_see_negative_ratios_and_others_take_them_for_zero(problem, name):
    rule = rules.RULES[name]
    ratio = problem.ratio - 0.3
    assert (ratio < 0).any()
    gram = problem.gram + torch.eye(12, dtype=F64)
    as_it_is, cut = (rule.dense(r, gram, problem.query, 0.02) for r in (ratio, ratio.clamp_min(0)))
    assert torch.allclose(as_it_is, cut) is not rule.signed


def test_without_any_ridge_no_rule_knows_the_prior(normal):
    """Johno et al., section 3.1, and the same of the weighted rule: G^-1 g for every ratio."""
    x = normal(12, 2)
    G = torch.exp(-torch.cdist(x, x).square() / (2 * 0.3**2))
    g = torch.exp(-(x - 0.2).square().sum(-1) / (2 * 0.3**2))
    regression = torch.linalg.solve(G, g)
    for signs in (normal(12).sign(), torch.ones(12, dtype=x.dtype)):
        ratio = 0.5 + normal(12).abs()
        found = (
            rules.original(ratio * signs, G, g, 1e-14),
            rules.importance_weighted(ratio, G, g, 1e-14),
        )
        for w in found:
            torch.testing.assert_close(w, regression, rtol=1e-4, atol=1e-7)
