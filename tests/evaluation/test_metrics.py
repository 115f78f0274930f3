"""Figures of merit against loops, scipy and simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
import torch

from kbf.evaluation.metrics import (
    corrected_pairs,
    corrected_t,
    excess,
    mean_and_error,
    mse,
    nll,
    nmse,
)
from kbf.rkhs.linalg import NotPositiveDefiniteError
from kbf.rkhs.weights import effective_sample_size, negative_mass

F64 = torch.float64


def test_mse_is_summed_over_components_and_averaged_over_time():
    states = torch.zeros(2, 3, 2, dtype=F64)
    estimates = torch.tensor([[[1, 1], [0, 0], [0, 2]], [[3, 4], [0, 0], [0, 0]]], dtype=F64)
    assert mse(estimates, states).tolist() == pytest.approx([2.0, 25 / 3])
    assert mse(estimates[1], states[1]).shape == ()


def test_masked_steps_do_not_count_even_when_they_are_nan(normal):
    estimates, states = normal(2, 5, 2).requires_grad_(), normal(2, 5, 2)
    mask = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    expected = [mse(estimates[0], states[0]).item(), mse(estimates[1, :3], states[1, :3]).item()]
    states[1, 3:] = math.nan
    error = mse(estimates, states, mask)
    assert error.tolist() == pytest.approx(expected)
    (gradient,) = torch.autograd.grad(error.sum(), estimates)
    assert torch.isfinite(gradient).all()
    assert (gradient[1, 3:] == 0).all()
    assert mse(estimates, states)[1].isnan(), "without a mask NaN must be seen"


def test_masked_steps_of_every_metric(normal):
    mean, states = normal(1, 4, 2), normal(1, 4, 2)
    covariance = torch.eye(2, dtype=F64).expand(1, 4, 2, 2)
    mask = torch.tensor([[True, True, True, False]])
    short = [t[:, :3] for t in (mean, states, covariance)]
    states = states.clone()
    states[0, 3] = math.nan
    torch.testing.assert_close(
        nll(states, mean, covariance, mask), nll(short[1], short[0], short[2])
    )


def test_excess_is_a_ratio_of_means():
    value, stderr = excess(torch.tensor([0.2, 0.4], dtype=F64), torch.tensor([0.1, 0.3], dtype=F64))
    assert value.item() == pytest.approx(0.5)  # 0.6 / 0.4 - 1, and not the mean of 2 and 4/3
    # residuals 0.2 - 1.5 * 0.1 and 0.4 - 1.5 * 0.3: +-0.05
    assert stderr.item() == pytest.approx(0.05 * math.sqrt(2) / math.sqrt(2) / 0.2)


def test_excess_of_errors_in_proportion_to_the_floors_is_certain():
    floors = torch.tensor([0.03, 0.05, 0.04], dtype=F64)
    value, stderr = excess(1.2 * floors, floors)
    assert value.item() == pytest.approx(0.2)
    assert stderr.item() == pytest.approx(0.0, abs=1e-12)


def test_standard_error_of_the_excess_is_the_spread_of_repetitions(rng):
    floors = torch.from_numpy(rng.normal(0.05, 0.005, (2000, 30)))
    errors = 1.2 * floors + torch.from_numpy(rng.normal(0, 0.004, (2000, 30)))
    found = [excess(e, f) for e, f in zip(errors, floors, strict=True)]
    spread = torch.stack([value for value, _ in found]).std().item()
    assert torch.stack([stderr for _, stderr in found]).mean().item() == pytest.approx(
        spread, rel=0.06
    )


def test_excess_is_close_to_the_jackknife(rng):
    floors = torch.from_numpy(rng.normal(0.05, 0.005, 30))
    errors = 1.3 * floors + torch.from_numpy(rng.normal(0, 0.004, 30))
    keep = [[j for j in range(30) if j != i] for i in range(30)]
    left_out = np.array([excess(errors[k], floors[k]).value.item() for k in keep])
    jackknife = math.sqrt(29 / 30 * np.square(left_out - left_out.mean()).sum())
    assert excess(errors, floors).stderr.item() == pytest.approx(jackknife, rel=0.02)


def test_excess_of_one_seed_has_no_standard_error():
    value, stderr = excess(torch.tensor([0.3]), torch.tensor([0.2]))
    assert value.item() == pytest.approx(0.5)
    assert stderr.isnan()


@pytest.mark.parametrize("floors", [[], [0.0, 0.0], [math.nan, 1.0]])
def test_excess_refuses_a_floor_that_is_not_positive(floors):
    with pytest.raises(ValueError, match="positive floor"):
        excess(torch.ones(len(floors)), torch.tensor(floors))


def gaussians(normal, *batch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    root = normal(*batch, 3, 3)
    return normal(*batch, 3), normal(*batch, 3), root @ root.mT + 0.5 * torch.eye(3, dtype=F64)


def test_nll_is_scipys(normal):
    states, mean, covariance = gaussians(normal, 2, 4)
    found = nll(states, mean, covariance)
    for k in range(2):
        expected = [
            -scipy.stats.multivariate_normal(m, c).logpdf(z)
            for z, m, c in zip(states[k], mean[k], covariance[k], strict=True)
        ]
        assert found[k].item() == pytest.approx(np.mean(expected))


def test_nll_of_a_singular_covariance_is_an_error():
    with pytest.raises(NotPositiveDefiniteError):
        nll(torch.zeros(1, 2), torch.zeros(1, 2), torch.tensor([[[1.0, 1.0], [1.0, 1.0]]]))


def test_weights():
    w = torch.tensor([[0.5, 0.5, 0.0], [0.8, 0.4, -0.2]], dtype=F64)
    assert effective_sample_size(w).tolist() == pytest.approx([2.0, 1 / 0.84])
    assert negative_mass(w).tolist() == pytest.approx([0.0, -0.2])


def test_nmse_is_one_for_the_mean_and_leaves_unknown_states_out():
    states = torch.randn(
        50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ) * torch.tensor([1.0, 5.0, 0.0])
    constant = states.mean(0).expand(50, 3)
    found = nmse(constant, states)
    torch.testing.assert_close(found[:2], torch.ones(2, dtype=torch.float64))
    assert found[2].isnan()
    unknown = torch.cat([states, torch.full((4, 3), torch.nan, dtype=torch.float64)])
    assert torch.equal(nmse(torch.cat([constant, constant[:4]]), unknown)[:2], found[:2])
    by_hand = [
        sum((0.5 * s[k] - s[k]) ** 2 for s in states)
        / sum((s[k] - states[:, k].mean()) ** 2 for s in states)
        for k in (0, 1)
    ]
    torch.testing.assert_close(nmse(0.5 * states, states)[:2], torch.stack(by_hand))


def test_standard_errors_of_runs_that_share_training_data():
    """By hand: J = 4, s^2 = 20/3, n_test/n_train = 1/3, variance (1/4 + 1/3) 20/3 = 35/9."""
    mean, error = mean_and_error([2.0, 4.0, 6.0, 8.0], 1 / 3)
    assert (mean, error) == (5.0, pytest.approx(math.sqrt(35 / 9)))
    mean, error, p = corrected_t([2.0, 4.0, 6.0, 8.0], 1 / 3)
    t = 5 / math.sqrt(35 / 9)
    assert error == pytest.approx(math.sqrt(35 / 9))
    assert p == pytest.approx(2 * scipy.stats.t.sf(t, 3))
    independent = corrected_t([2.0, 4.0, 6.0, 8.0], 0.0)
    assert independent[2] == pytest.approx(scipy.stats.ttest_1samp([2, 4, 6, 8], 0).pvalue)
    assert independent[2] < p
    assert math.isnan(mean_and_error([2.0, 4.0], math.nan)[1]), "runs on the same test part"


def test_corrected_tests_of_equal_models_and_of_one_fold():
    assert math.isnan(corrected_t([0.0, 0.0, 0.0], 0.5)[2])
    assert all(math.isnan(each) for each in corrected_t([1.0], 0.5)[1:])
    assert corrected_t([1.0, 1.0, 1.0], 0.5)[1:] == (0.0, 0.0), "no spread: certain"
    (row,) = corrected_pairs({"a": {0: 1.0, 1: 3.0, 2: 9.0}, "b": {1: 1.0, 2: 4.0, 5: 0.0}}, 0.5)
    assert (row["first"], row["second"], row["seeds"], row["mean_difference"]) == ("a", "b", 2, 3.5)
    assert row["difference_se"] == pytest.approx(math.sqrt((1 / 2 + 0.5) * 4.5))
    assert corrected_pairs({"a": {0: 1.0}, "b": {1: 1.0}}, 0.5) == []


def test_the_corrected_test_is_calibrated_where_the_plain_one_is_not():
    """Differences of two equal learners over overlapping folds are correlated.

    With the correlation n_test / (n_test + n_train) = 1/5 between folds that the correction
    assumes, 5 % of the corrected p-values are below 0.05, and far more of the plain ones.
    """
    rng = np.random.default_rng(0)
    covariance = 0.8 * np.eye(5) + 0.2
    draws = rng.multivariate_normal(np.zeros(5), covariance, size=2000)
    shares = [np.mean([corrected_t(d.tolist(), r)[2] < 0.05 for d in draws]) for r in (0.25, 0.0)]
    assert 0.03 < shares[0] < 0.07 and shares[1] > 0.09
