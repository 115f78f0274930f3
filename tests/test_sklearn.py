"""The scikit-learn estimators: scikit-learn's own checks, and the numbers against the library and
against known laws.
"""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from kbf.rkhs.conditional_means import CONDITIONAL_MEANS
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.sklearn import ConditionalMeanEmbedding, KuLSIF, RelativeRatio
from kbf.sklearn.conditional_mean import REGS


@parametrize_with_checks([ConditionalMeanEmbedding(), RelativeRatio(), KuLSIF()])
def test_scikit_learn_accepts_them(estimator, check):
    check(estimator)


@pytest.fixture
def wave(rng):
    x = rng.uniform(-3, 3, (80, 2))
    y = np.stack([np.sin(x[:, 0]), x[:, 1] ** 2], axis=1)
    return x, y + 0.05 * rng.standard_normal(y.shape)


# The conditional mean embedding


def test_it_is_kernel_ridge_regression(wave, rng):
    x, y = wave
    queries = rng.uniform(-3, 3, (7, 2))
    fit = ConditionalMeanEmbedding(bandwidth=0.9, reg=1e-3).fit(x, y)
    ridge = KernelRidge(kernel="rbf", gamma=1 / (2 * 0.9**2), alpha=len(x) * 1e-3)
    expected = y.mean(0) + ridge.fit(x, y - y.mean(0)).predict(queries)
    np.testing.assert_allclose(fit.predict(queries), expected, rtol=1e-9)
    np.testing.assert_allclose(fit.weights(queries) @ y, fit.predict(queries), rtol=1e-9)
    np.testing.assert_allclose(
        fit.embedding(queries).mean().numpy(), fit.predict(queries), rtol=1e-9
    )
    assert fit.predict(queries).shape == (7, 2)
    assert clone(fit).fit(x, y[:, 0]).predict(queries).shape == (7,)


def test_what_is_none_is_chosen_from_the_training_pairs(wave):
    x, y = wave
    fit = ConditionalMeanEmbedding().fit(x, y)
    assert fit.bandwidth_ == median_distance(torch.from_numpy(x)).item()
    gram = gaussian(*[torch.from_numpy(x)] * 2, bandwidth=fit.bandwidth_).numpy()
    centred = y - y.mean(0)

    def left_out(reg: float) -> float:
        """Fit without each pair in turn, with the ridge of all n of them."""
        error = 0.0
        for i in range(len(x)):
            keep = np.arange(len(x)) != i
            weights = np.linalg.solve(
                gram[np.ix_(keep, keep)] + len(x) * reg * np.eye(len(x) - 1), gram[keep, i]
            )
            error += ((weights @ centred[keep] - centred[i]) ** 2).sum()
        return error

    nearby = [reg for reg in REGS if 0.05 < reg / fit.reg_ < 20]
    assert len(nearby) >= 5 and min(nearby, key=left_out) == fit.reg_
    assert fit.score(x, y) > 0.95
    assert ConditionalMeanEmbedding(reg=0.3, bandwidth=0.2).fit(x, y).reg_ == 0.3


@pytest.mark.parametrize("form", CONDITIONAL_MEANS)
def test_a_constant_added_to_the_outputs_is_added_to_the_predictions(form, wave):
    x, y = wave
    settings = {"form": form, "size": 2 if form == "divide_and_conquer" else 60, "random_state": 0}
    settings |= {"bandwidth": 0.3} if form == "nadaraya_watson" else {}
    fit, moved = (ConditionalMeanEmbedding(**settings).fit(x, z) for z in (y, y + 1e9))
    assert abs(fit.score(x, y) - moved.score(x, y + 1e9)) < 1e-3
    np.testing.assert_allclose(moved.weights(x[:5]).sum(1), 1, rtol=1e-9)
    far = np.full((1, 2), 1e3)
    if form in ("exact", "nystrom"):  # the kernel is 0 there
        np.testing.assert_allclose(fit.predict(far)[0], y.mean(0), rtol=1e-9)
    np.testing.assert_allclose(
        moved.embedding(x[:3]).cov().numpy(), fit.embedding(x[:3]).cov().numpy(), atol=1e-5
    )


@pytest.mark.parametrize("form", CONDITIONAL_MEANS)
def test_every_form_predicts_weighs_and_can_be_pickled(form, wave):
    x, y = wave
    settings = {"form": form, "size": 2 if form == "divide_and_conquer" else 60, "random_state": 0}
    settings |= {"bandwidth": 0.3} if form == "nadaraya_watson" else {}
    fit = ConditionalMeanEmbedding(**settings).fit(x, y)
    assert fit.score(x, y) > 0.9
    np.testing.assert_allclose(fit.weights(x[:5]) @ y, fit.predict(x[:5]), atol=1e-7)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fit)).predict(x), fit.predict(x))
    np.testing.assert_array_equal(clone(fit).fit(x, y).predict(x), fit.predict(x))


def test_it_works_inside_of_scikit_learn(wave):
    x, y = wave
    scaled = x * [1, 1000]
    pipeline = make_pipeline(StandardScaler(), ConditionalMeanEmbedding())
    search = GridSearchCV(
        pipeline, {"conditionalmeanembedding__kernel": ["laplace", "gaussian"]}, cv=3
    ).fit(scaled, y)
    assert search.best_params_ == {"conditionalmeanembedding__kernel": "gaussian"}
    assert search.best_score_ > 0.9 > ConditionalMeanEmbedding().fit(scaled, y).score(scaled, y)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "cosine"}, "kernel must be one of gaussian, .*'cosine'"),
        ({"form": "fast"}, "form must be one of exact, .*'fast'"),
        ({"bandwidth": 0.0}, "bandwidth must be positive, got 0.0"),
        ({"reg": -1.0}, "reg must be positive, got -1.0"),
        (
            {"form": "nystrom", "size": 81},
            "m must be between 1 and the number of training pairs, 80, got 81",
        ),
        (
            {"form": "random_fourier", "kernel": "imq"},
            "random_fourier features are of the gaussian kernel, not of 'imq'",
        ),
    ],
)
def test_bad_settings_get_one_clear_error(settings, message, wave):
    with pytest.raises(ValueError, match=message):
        ConditionalMeanEmbedding(**settings).fit(*wave)


def test_points_that_coincide_ask_for_a_bandwidth():
    x, y = np.repeat([[0.0], [1.0]], [9, 1], axis=0), np.arange(10) % 2
    for estimator in (ConditionalMeanEmbedding(), KuLSIF()):
        with pytest.raises(ValueError, match="most of them coincide"):
            estimator.fit(x, y)
    assert ConditionalMeanEmbedding(bandwidth=1.0).fit(x, y).predict(x).shape == (10,)


# Density ratios


@pytest.fixture(scope="module")
def two_normals():
    """400 points of N(0, 1), labelled "p", and 300 of N(0.5, 0.5^2), labelled "q"; new points, and
    the true ratio there.
    """
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.standard_normal((400, 1)), 0.5 + 0.5 * rng.standard_normal((300, 1))])
    new = rng.standard_normal((2000, 1))
    true = np.exp(-(((new[:, 0] - 0.5) / 0.5) ** 2) / 2 + new[:, 0] ** 2 / 2) / 0.5
    return x, np.repeat(["p", "q"], [400, 300]), new, true


@pytest.mark.parametrize(
    "estimator", [KuLSIF(), RelativeRatio(), RelativeRatio(alpha=0.5)], ids=str
)
def test_ratio_and_probability_of_two_normals(estimator, two_normals):
    x, y, new, true = two_normals
    fit = clone(estimator).fit(x, y)
    alpha = getattr(estimator, "alpha", 0.0)
    relative = true / (alpha * true + 1 - alpha)
    assert np.mean((fit.ratio(new) - relative) ** 2) < 0.05 * relative.var()
    bayes = true * 300 / (true * 300 + 400)
    assert np.mean((fit.predict_proba(new)[:, 1] - bayes) ** 2) < 0.05 * bayes.var()
    assert np.mean(fit.predict(new) == np.where(bayes > 0.5, "q", "p")) > 0.94
    assert list(fit.classes_) == ["p", "q"]
    assert alpha == 0 or fit.ratio(np.linspace(-9, 9, 500)[:, None]).max() <= 1 / alpha
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fit)).ratio(new), fit.ratio(new))


def test_alpha_bounds_the_ratio_of_samples_that_do_not_overlap(normal):
    x = torch.cat([normal(50, 1), normal(50, 1) + 20]).numpy()
    y = np.repeat([0, 1], 50)
    far = RelativeRatio(alpha=0.25, bandwidth=2.0).fit(x, y)
    assert far.ratio(x[y == 1]).max() <= 4 and far.score(x, y) > 0.97
    np.testing.assert_allclose(far.ratio([[20.0]]), 4, rtol=0.1)
    assert KuLSIF(bandwidth=2.0).fit(x, y).ratio([[20.0]])[0] > 10
    wild = RelativeRatio(alpha=0.25, bandwidth=1.0, reg=1e-4).fit(x, y)
    assert wild.ratio(np.linspace(17, 23, 200)[:, None]).max() == 4  # it would overshoot


def test_samples_that_make_no_ratio_are_refused(two_normals):
    x, y, new, _ = two_normals
    for alpha in (-0.1, 1.0):
        with pytest.raises(ValueError, match=r"alpha in \[0, 1\)"):
            RelativeRatio(alpha=alpha).fit(x, y)
    with pytest.raises(ValueError, match="one class only"):
        KuLSIF().fit(x, np.zeros(len(x)))
    with pytest.raises(ValueError, match="NaN"):
        KuLSIF().fit(np.where(x > 2, np.nan, x), y)
    with pytest.raises(NotFittedError):
        KuLSIF().ratio(new)
