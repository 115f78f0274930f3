"""The cheap ways of a step against the plain ones: composed operators, points left out, products
kept, ratios in features.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.operators import Operator, compose, low_rank
from kbf.filters.kernel.update.rule import MIN_BATCH_FOR_MOMENTS, PrimalUpdate
from kbf.filters.rollout import rollout, step
from kbf.rkhs import ratios, rules
from kbf.ssm import oscillatory, simulate

F64 = torch.float64


def recording(steps: int, seed: int = 0, batch: int = 1):
    start = torch.tensor([1.0, 0.0], dtype=F64).expand(batch, 2)
    return simulate(oscillatory(), start, steps, torch.Generator().manual_seed(seed))


def memory(steps: int, seed: int = 0):
    whole = recording(steps, seed)
    return whole._replace(states=whole.states[0], obs=whole.obs[0])


def published(**changes) -> KBF:
    model = KBF(**{"normalise": False, "tol": 0.0, "learn": False, **changes})
    model.set(torch.tensor([0.7, 0.5, 0.8], dtype=F64), torch.tensor([1e-3, 5e-4, 2e-4], dtype=F64))
    return model


def test_composed_is_one_after_the_other(normal):
    outer, inner = Operator(normal(6, 3), normal(6, 3)), Operator(normal(6, 2), normal(6, 2))
    both = compose(outer, inner)
    assert both is not None and both.right is not None and both.right.shape == (6, 2)
    w = normal(4, 6)
    torch.testing.assert_close(both(w), outer(inner(w)))
    assert compose(Operator(normal(6, 6)), inner) is None
    assert compose(None, inner) is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalise": True},
        {"rule": "original", "ratio": "tikhonov"},
        {"ratio": "one"},
        {"rank": None},
    ],
)
def test_step_is_predict_and_update(changes):
    filter = published(**{"rank": 20, **changes}).fit(memory(60))
    obs = recording(6, seed=1, batch=3).obs
    state = filter.init(3)
    for t in range(6):
        apart = filter.update(filter.predict(state), obs[:, t])
        state = step(filter, state, obs[:, t])
        torch.testing.assert_close(state.weights, apart.weights, rtol=1e-8, atol=1e-9)
    assert (filter.moved_ratio is not None) == (
        changes in ({}, {"rule": "original", "ratio": "tikhonov"})
    )


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("draws", [1, 3])
def test_local_points_are_the_rule_over_them_alone(normal, batch, draws):
    """The ridge stays n lambda for the n points of the memory."""
    n, m, psi = 9, 4, nn.Linear(2, 5).double().requires_grad_(False)
    obs, ratio, x = normal(n, draws, 2), normal(batch, n).square(), normal(batch, 2)
    found = PrimalUpdate(psi, obs, 0.05, local=m)(ratio, x)
    for b in range(batch):
        rows = ratio[b].argsort(descending=True)[:m]
        plain = PrimalUpdate(psi, obs[rows], 0.05 * n / m)(ratio[b : b + 1, rows], x[b : b + 1])
        expected = torch.zeros(1, n, dtype=F64).index_copy(1, rows, plain)
        torch.testing.assert_close(found[b : b + 1], expected, rtol=1e-10, atol=1e-12)


def test_local_of_all_points_is_the_whole_filter():
    test = recording(8, seed=1, batch=2).obs
    whole, local = (
        rollout(published(rank=20, local=m).fit(memory(50)), test).estimates for m in (None, 50)
    )
    torch.testing.assert_close(whole, local)
    most, few = (
        rollout(published(rank=20, local=m).fit(memory(50)), test).estimates for m in (44, 10)
    )
    assert 0 < (most - whole).abs().mean() < 0.2 * (few - whole).abs().mean()


@pytest.mark.parametrize("batch", [(), (1,), (3,), (2, 2)])
@pytest.mark.parametrize("p", [3, 70])
@pytest.mark.parametrize("many", [2, 128])
def test_covariance_by_blocks_and_without_clipped_points(normal, monkeypatch, batch, p, many):
    """Whatever the blocks, whether points of ratio 0 are left out or not, and products are made
    once for all ratios or for each.
    """
    monkeypatch.setattr(rules, "COVARIANCE_BLOCK", 4 * p * (p if many == 2 else 1))
    monkeypatch.setattr(rules, "MANY_RATIOS", many)
    F, ratio = normal(11, p), normal(*batch, 11).clamp_min(0)
    expected = torch.einsum("...n,np,nq->...pq", ratio, F, F)
    torch.testing.assert_close(rules.weighted_covariance(ratio, F), expected)
    each = F.expand(*batch, 11, p) * torch.arange(1.0, 2.0 + len(batch))[-1]
    torch.testing.assert_close(
        rules.weighted_covariance(ratio, each), expected * (1.0 + len(batch)) ** 2
    )
    assert (rules.weighted_covariance(torch.zeros_like(ratio), F) == 0).all()


def test_a_large_batch_takes_kept_products_and_a_small_one_does_not(normal, monkeypatch):
    psi = nn.Linear(2, 5).double().requires_grad_(False)
    update = PrimalUpdate(psi, normal(7, 1, 2), 0.05)
    ratio, x = normal(MIN_BATCH_FOR_MOMENTS, 7).square(), normal(MIN_BATCH_FOR_MOMENTS, 2)
    whole = update(ratio, x)
    each = torch.cat([update(ratio[b : b + 1], x[b : b + 1]) for b in range(MIN_BATCH_FOR_MOMENTS)])
    torch.testing.assert_close(whole, each, rtol=1e-10, atol=1e-12)
    used = []
    kept, new = rules.covariance_from_moments, rules.weighted_covariance
    monkeypatch.setattr(
        rules, "covariance_from_moments", lambda *a: used.append("kept") or kept(*a)
    )
    monkeypatch.setattr(rules, "weighted_covariance", lambda *a: used.append("new") or new(*a))
    update(ratio, x)
    update(ratio[:1], x[:1])
    assert used == ["kept", "new"]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.5])
def test_relative_ratio_in_features_is_that_of_their_gram_matrix(normal, alpha):
    F, U, a = normal(9, 4), normal(6, 4), normal(3, 6)
    found = ratios.relative_primal(F, U, a, 0.05, alpha)
    jitter = 1e-9 * torch.eye(9, dtype=F64)  # the dense form needs a Gram matrix of full rank
    torch.testing.assert_close(
        found, ratios.relative(F @ F.mT + jitter, F @ U.mT, a, 0.05, alpha), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(ValueError, match="alpha must be"):
        ratios.relative_primal(F, U, a, 0.05, 1.0)


def test_relative_filter_in_features_is_the_dense_one():
    test = recording(10, seed=1, batch=2).obs
    dense, low = (
        rollout(
            published(rank=rank, ratio="relative", normalise=True).fit(memory(40)), test
        ).estimates
        for rank in (None, 40)
    )
    torch.testing.assert_close(low, dense, rtol=0, atol=2e-4)


def test_tolerance_bounds_the_difference_to_full_matrices():
    """What is left out of a Gram matrix counts against the ridge, n lambda with lambda = 2e-4."""
    test = recording(30, seed=1).obs
    dense = rollout(published(rank=None).fit(memory(150)), test).estimates
    apart = []
    for tol in (1e-5, 1e-7):
        low = published(rank=150, tol=tol).fit(memory(150))
        assert low.rule.features.shape[1] < 110
        apart.append((rollout(low, test).estimates - dense).abs().max())
        assert apart[-1] < 4 * tol / 2e-4
    assert apart[1] < 0.1 * apart[0]


@pytest.mark.parametrize("batch", [1, rules.MANY_RATIOS])
def test_a_ratio_of_zero_has_a_gradient_too(normal, batch):
    F, ratio = normal(6, 70), normal(batch, 6).clamp_min(0).requires_grad_()
    (gradient,) = torch.autograd.grad(rules.weighted_covariance(ratio, F).sum(), ratio)
    torch.testing.assert_close(gradient, F.sum(1).square().expand_as(ratio))


@pytest.mark.parametrize(
    ("settings", "ratio_dim"),
    [
        ({"rank": 0}, "rank must be a whole number"),
        ({"local": -3}, "local must be a whole number"),
        ({"tol": -1.0}, "tol must be in"),
        ({"tol": float("nan")}, "tol must be in"),
        ({"regs": (0.0, 1e-3, 1e-3)}, "factors and regs positive"),
        (
            {"select": "loo", "rule": "original", "ratio": "tikhonov"},
            "select=loo gives the ridge of",
        ),
    ],
)
def test_settings_that_make_no_filter(settings, ratio_dim):
    with pytest.raises(ValueError, match=ratio_dim):
        KBF(**settings)


@pytest.mark.slow
def test_leave_one_out_chooses_well_and_whatever_the_size():
    """Better than the median on a wavy recording; the same from a memory far larger than the
    subsample that is looked at.
    """
    whole, test = memory(400), recording(200, seed=1)
    errors = {}
    for select in ("median", "loo"):
        model = KBF(select=select, rank=100, learn=False)
        model.prepare([whole])
        errors[select] = (
            (rollout(model.fit(whole), test.obs).estimates - test.states).square().sum(-1).mean()
        )
    assert errors["loo"] < 1.05 * errors["median"]
    assert errors["loo"] < 0.08
    with pytest.raises(ValueError, match="needs every observation of its memory"):
        KBF(select="loo").prepare([whole._replace(mask=torch.arange(400) != 7)])


def test_bad_numbers():
    psi, obs = nn.Identity(), torch.zeros(4, 1, 2)
    with pytest.raises(ValueError, match="local must be at least 1"):
        PrimalUpdate(psi, obs, 0.1, local=0)
    with pytest.raises(ValueError, match="original with k = 1 and all points"):
        PrimalUpdate(psi, obs, 0.1, rule="original", local=2)


def test_operators_of_single_precision_are_factorised_where_their_rank_is_low(normal):
    left, right, w = normal(60, 4), normal(60, 4), normal(3, 60)
    dense, full = (Operator((x @ right.mT).float()) for x in (left, normal(60, 4)))
    factors = low_rank(dense)
    assert factors.right is not None and factors.left.shape == (60, 4)
    torch.testing.assert_close(factors(w.float()), dense(w.float()), rtol=1e-4, atol=1e-4)
    full.left += normal(60, 60).float()
    assert low_rank(full) is full
    precise = Operator(left @ right.mT)
    assert low_rank(precise) is precise
