"""KLIEP against its optimality conditions and an optimiser; classifiers against densities."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import norm
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures

from kbf.rkhs.kernels import gaussian
from kbf.rkhs.sample_ratios import classifier_ratio, kliep, kliep_cv
from kbf.runtime.errors import FitError

F64 = torch.float64


@pytest.fixture
def grams(normal):
    """Training points N(0, 1), prior points N(0.5, 0.6^2), which are the centres."""
    z, u = normal(60, 1), 0.5 + 0.6 * normal(20, 1)
    k = partial(gaussian, bandwidth=0.5)
    return k(z, u), k(u, u)


def test_kliep_meets_the_optimality_conditions(grams):
    """Mean 1 of r; the derivative of the objective by each share is at most 1, and 1 where used."""
    gram, prior_gram = grams
    alpha = kliep(gram, prior_gram, steps=20_000)
    r, s = prior_gram @ alpha, gram.mean(0)
    assert (alpha >= 0).all()
    assert (gram @ alpha).mean().item() == pytest.approx(1, abs=1e-9)
    slope = (prior_gram / (s * r[:, None])).mean(0)
    assert slope.max().item() < 1 + 1e-4
    used = s * alpha > 1e-3
    assert used.any()
    torch.testing.assert_close(slope[used], torch.ones_like(slope[used]), rtol=0, atol=1e-4)


def test_kliep_is_the_maximum_that_an_optimiser_finds(grams):
    gram, prior_gram = (g.numpy() for g in grams)
    s = gram.mean(0)
    basis = prior_gram / s
    found = kliep(*grams, steps=20_000).numpy()
    best = minimize(
        lambda b: -np.log(basis @ b).mean(),
        np.full(20, 1 / 20),
        jac=lambda b: -(basis / (basis @ b)[:, None]).mean(0),
        bounds=[(0, 1)] * 20,
        constraints={"type": "eq", "fun": lambda b: b.sum() - 1},
        method="SLSQP",
        options={"ftol": 1e-12, "maxiter": 1000},
    )
    ours = np.log(prior_gram @ found).mean()
    assert ours >= -best.fun - 1e-6
    np.testing.assert_allclose(prior_gram @ found, basis @ best.x, rtol=2e-3)


def test_weights_of_the_prior_are_repetitions(grams):
    gram, prior_gram = grams
    weights = torch.tensor([2.0] * 5 + [1.0] * 15, dtype=F64) / 25
    repeated = torch.cat([prior_gram[:5], prior_gram])
    torch.testing.assert_close(kliep(gram, prior_gram, weights), kliep(gram, repeated))


def test_kliep_and_a_classifier_find_a_known_ratio(normal):
    """N(0.5, 0.7^2) over N(0, 1), at the points where both have mass."""
    z, u = normal(3000, 1), 0.5 + 0.7 * normal(600, 1)
    at = torch.linspace(-1, 1.7, 10, dtype=F64)[:, None]
    truth = norm.pdf(at[:, 0].numpy(), 0.5, 0.7) / norm.pdf(at[:, 0].numpy())
    centres = u[:100]
    k = partial(gaussian, bandwidth=0.6)
    by_kliep = k(at, centres) @ kliep(k(z, centres), k(u, centres))
    np.testing.assert_allclose(by_kliep.numpy(), truth, rtol=0.15, atol=0.05)
    logistic = LogisticRegression(C=100.0, max_iter=1000)
    for features in (PolynomialFeatures(2), Nystroem(gamma=0.5, n_components=30, random_state=0)):
        ratio = classifier_ratio(make_pipeline(features, logistic), z, u)
        np.testing.assert_allclose(ratio(at).numpy(), truth, rtol=0.15, atol=0.05)
        assert ratio(z).mean().item() == pytest.approx(1, abs=0.05)


def test_the_ratio_of_a_classifier_is_bayes_rule():
    """Labels in the shares 3 : 1, whatever the points: n / m times the odds."""

    class Constant:
        def fit(self, X, y):
            self.share = y.mean()

        def predict_proba(self, X):
            return np.tile([1 - self.share, self.share], (len(X), 1))

    z, u = torch.zeros(30, 2, dtype=F64), torch.ones(10, 2, dtype=F64)
    torch.testing.assert_close(classifier_ratio(Constant(), z, u)(z), torch.ones(30, dtype=F64))

    class Certain(Constant):
        def predict_proba(self, X):
            return np.tile([0.0, 1.0], (len(X), 1))

    with pytest.raises(ValueError, match="certain that a point is of the prior"):
        classifier_ratio(Certain(), z, u)(z)


def test_cross_validation_finds_the_width(normal):
    z, u = 2 * normal(400, 1), normal(150, 1)
    kernels = [partial(gaussian, bandwidth=h) for h in (0.001, 0.02, 0.8, 30.0)]
    assert kliep_cv(kernels, z, u) == 2
    with pytest.raises(ValueError, match="1 folds of 150 points"):
        kliep_cv(kernels, z, u, folds=1)
    with pytest.raises(FitError, match="none of 1 kernels has a finite score"):
        kliep_cv(kernels[:1], z, u)


def test_what_kliep_cannot_fit(grams):
    gram, prior_gram = grams
    with pytest.raises(ValueError, match="not negative"):
        kliep(gram - 1, prior_gram)
    with pytest.raises(FitError, match="no training point is near a centre"):
        kliep(0 * gram, prior_gram)
    far = prior_gram.clone()
    far[3] = 0
    with pytest.raises(FitError, match="a prior point is near no centre"):
        kliep(gram, far)
