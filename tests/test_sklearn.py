"""The scikit-learn estimators: scikit-learn's own checks, and the numbers against the library and
against known laws.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import NotFittedError
from sklearn.kernel_ridge import KernelRidge
from sklearn.model_selection import GridSearchCV, GroupKFold, TimeSeriesSplit, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

import kbf
from kbf.rkhs.conditional_means import CONDITIONAL_MEANS
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.sklearn import ConditionalMeanEmbedding, KuLSIF, RelativeRatio, StateEstimator
from kbf.sklearn.conditional_mean import REGS

DEPENDS_ON_EARLIER_ROWS = "the estimate of a row depends on the rows before it"


def failing(estimator) -> dict[str, str]:
    """The checks of scikit-learn that an estimator cannot pass, and why."""
    if not isinstance(estimator, StateEstimator):
        return {}
    checks = {
        "check_methods_sample_order_invariance": DEPENDS_ON_EARLIER_ROWS,
        "check_methods_subset_invariance": DEPENDS_ON_EARLIER_ROWS,
    }
    if estimator.model == "kalman":
        checks["check_regressor_multioutput"] = "10 rows do not determine a model of 5 states"
    return checks


@parametrize_with_checks(
    [
        ConditionalMeanEmbedding(),
        RelativeRatio(),
        KuLSIF(),
        StateEstimator(model="kalman"),
        StateEstimator(model="window_ridge"),
    ],
    expected_failed_checks=failing,
)
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


# The filter as a regressor


@pytest.fixture(scope="module")
def runs():
    """Four runs of 30 steps of an oscillation: y ``n 2``, and X with two sensors and the run.

    Sensors have noise of the size of the signal, so that a filter is much better than a regression,
    and offsets of runs in phase, so that a filter that mixes runs is worse.
    """
    rng = np.random.default_rng(0)
    phases = rng.uniform(0, 2 * np.pi, 4)[:, None] + 0.2 * np.arange(30)
    y = np.stack([np.cos(phases), np.sin(phases)], -1).reshape(-1, 2)
    s = y + 0.5 * rng.standard_normal(y.shape)
    X = pd.DataFrame({"s1": s[:, 0], "run": np.repeat([f"r{k}" for k in range(4)], 30)})
    X["s2"] = s[:, 1]
    return X, y


@pytest.fixture(scope="module")
def expected(runs):
    """Predictions of an estimator that knows the recordings."""
    X, y = runs
    return estimator_of(recording="run").fit(X, y).predict(X)


def estimator_of(**settings) -> StateEstimator:
    return StateEstimator(model="kalman", **settings)


def test_it_is_the_filter_of_the_front_door(runs):
    X, y = runs
    frame = X.assign(a=y[:, 0], b=y[:, 1])
    columns = {"states": ["a", "b"], "observations": ["s1", "s2"], "recording": "run"}
    fitted = kbf.fit(frame, **columns, model="kalman", seed=3, progress=False)
    truth = pd.DataFrame(y, columns=["a", "b"])
    found = estimator_of(recording="run", random_state=3).fit(X, truth)
    expected = fitted.filter(frame)
    mean, std = found.predict(X, return_std=True)
    np.testing.assert_array_equal(mean, expected.mean)
    np.testing.assert_array_equal(std, expected.std)
    assert found.filter_.columns["states"] == ["a", "b"]
    assert found.score(X, truth) == pytest.approx(
        1 - (((mean - y) ** 2).sum(0) / ((y - y.mean(0)) ** 2).sum(0)).mean()
    )
    one = estimator_of(recording="run").fit(X, y[:, 0])
    mean, std = one.predict(X, return_std=True)
    assert mean.shape == std.shape == (len(X),)


def test_names_positions_and_groups_mean_the_same(runs, expected):
    X, y = runs
    number = X.assign(run=np.repeat(np.arange(4), 30)).to_numpy(dtype=float)
    by_position = estimator_of(recording=1).fit(number, y).predict(number)
    np.testing.assert_allclose(by_position, expected, rtol=1e-12)
    s, groups = number[:, [0, 2]], X["run"]
    by_groups = estimator_of().fit(s, y, groups=groups)
    np.testing.assert_allclose(by_groups.predict(s, groups=groups), expected, rtol=1e-12)
    weights = np.arange(len(y))
    assert by_groups.score(s, y, sample_weight=weights, groups=groups) != by_groups.score(
        s, y, groups=groups
    )
    with pytest.warns(kbf.DataWarning, match="all rows are filtered as one recording"):
        fused = by_groups.predict(s)
    assert not np.allclose(fused[30:], expected[30:])
    mixed = np.argsort(np.tile(np.arange(30), 4), kind="stable")  # rows of all runs in turn
    interleaved = estimator_of(recording="run").fit(X.iloc[mixed], y[mixed])
    np.testing.assert_allclose(interleaved.predict(X.iloc[mixed]), expected[mixed], rtol=1e-9)


def test_cross_validation_keeps_recordings_apart(runs):
    X, y = runs
    folds = GroupKFold(2)
    split = {"cv": folds, "groups": X["run"]}
    kept = cross_val_score(estimator_of(recording="run"), X, y, **split)
    fused = cross_val_score(estimator_of(), X[["s1", "s2"]], y, **split)
    single = cross_val_score(ConditionalMeanEmbedding(), X[["s1", "s2"]], y, **split)
    assert kept.min() > 0.85 and kept.mean() > fused.mean() + 0.02
    assert kept.mean() > single.mean() + 0.1
    with sklearn.config_context(enable_metadata_routing=True):
        routed = cross_val_score(
            estimator_of(), X[["s1", "s2"]], y, cv=folds, params={"groups": X["run"]}
        )
    np.testing.assert_allclose(routed, kept, rtol=1e-9)


def test_cross_validation_of_one_recording_goes_forward_in_time():
    phase = 0.2 * np.arange(200)
    y = np.stack([np.cos(phase), np.sin(phase)], 1)
    X = y + 0.3 * np.random.default_rng(0).normal(size=(200, 2))
    assert cross_val_score(estimator_of(), X, y, cv=TimeSeriesSplit(3)).min() > 0.9


def test_the_recording_passes_through_a_pipeline(runs, expected):
    X, y = runs
    scale = ColumnTransformer(
        [("scale", StandardScaler(), ["s1", "s2"])],
        remainder="passthrough",
        verbose_feature_names_out=False,
    ).set_output(transform="pandas")
    pipeline = make_pipeline(scale, estimator_of(recording="run"))
    np.testing.assert_allclose(pipeline.fit(X, y).predict(X), expected, rtol=1e-6)
    search = GridSearchCV(
        pipeline, {"stateestimator__model": ["mean", "kalman"]}, cv=GroupKFold(2)
    ).fit(X, y, groups=X["run"])
    assert search.best_params_ == {"stateestimator__model": "kalman"}
    arrays = make_pipeline(StandardScaler(), estimator_of(recording="run"))
    with pytest.raises(ValueError, match=r"'run' is no column of X.*set_output"):
        arrays.fit(X.assign(run=np.repeat(np.arange(4), 30)), y)
    # A scaled number still identifies the recording.
    number = X.assign(run=np.repeat(np.arange(4), 30))
    by_position = make_pipeline(StandardScaler(), estimator_of(recording=1)).fit(number, y)
    np.testing.assert_allclose(by_position.predict(number), expected, rtol=1e-6)


def test_times_bounds_and_missing_sensors(runs):
    X, y = runs
    timed = X.assign(t=np.tile(0.1 * np.arange(30), 4))
    estimator = estimator_of(recording="run", time="t", bounds={1: (-0.5, None)}).fit(timed, y)
    assert estimator.filter_.time_step == pytest.approx(0.1)
    found = estimator.predict(timed)
    assert found[:, 1].min() == -0.5 and found[:, 0].min() < -0.8
    by_name = estimator_of(recording="run", bounds={"b": (-0.5, None)}).fit(
        X, pd.DataFrame(y, columns=["a", "b"])
    )
    assert by_name.predict(X)[:, 1].min() == -0.5
    indexed = timed.drop(columns="t").set_index(pd.to_timedelta(timed["t"], unit="s"))
    by_index = estimator_of(recording="run").fit(indexed, y)
    assert by_index.filter_.time_step == pytest.approx(0.1)
    lacking = X.copy()
    lacking.loc[::5, "s1"] = np.nan
    partial = estimator_of(recording="run").fit(lacking, y)
    assert partial.filter_.capabilities["missing_sensors"]
    assert partial.score(lacking, y) > 0.9


def test_a_column_may_have_the_name_of_an_output(runs, expected):
    X, y = runs
    named = X.rename(columns={"s1": "a", "s2": "time"})
    found = estimator_of(recording="run").fit(named, pd.DataFrame(y, columns=["a", "recording"]))
    np.testing.assert_allclose(found.predict(named), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("settings", "change", "message"),
    [
        ({"recording": "trial"}, {}, "recording='trial' is no column of X, which has columns s1, "),
        ({"recording": 3}, {}, "recording=3 is no column of X"),
        ({"recording": "run", "bounds": {"z": (0, 1)}}, {}, "bounds: 'z' is no column"),
        ({"recording": "run"}, {"run": [None] * 120}, "row 0 of X has no recording"),
        ({"recording": "run"}, {"s1": "a"}, "could not convert string to float"),
        ({"recording": "run"}, {"s1": np.inf}, "contains infinity"),
        ({}, {}, "could not convert string to float: 'r0'"),
    ],
)
def test_inputs_of_the_state_estimator_that_are_refused(settings, change, message, runs):
    X, y = runs
    with pytest.raises(ValueError, match=message):
        StateEstimator(**{"model": "kalman", **settings}).fit(X.assign(**change), y)


def test_a_filter_without_standard_deviations(runs, monkeypatch):
    X, y = runs
    estimator = estimator_of(recording="run").fit(X, y)
    without = SimpleNamespace(mean=y, std=None)
    monkeypatch.setattr(kbf.FittedFilter, "filter", lambda *_, **__: without)
    with pytest.raises(ValueError, match="has no standard deviations"):
        estimator.predict(X, return_std=True)
