"""The comparisons of Fukumizu et al. with density estimates and with rejection ABC, against
formulas written out.
"""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import reference
import torch
from scipy import stats
from torch import Generator, Tensor

from kbf.filters.kernel.hyperparameters import best_of
from kbf.rkhs import rules
from kbf.rkhs.kernels import gaussian, median_distance
from studies.papers import abc_comparison as abc, kde_comparison as kde
from studies.papers.gaussian_model import GaussianModel, gaussian_model

D = 2


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


@pytest.fixture
def model() -> GaussianModel:
    return gaussian_model(D, seeded())


# The model


def test_the_likelihood_and_the_pairs_are_one_model(model):
    V = model.V.numpy()
    A = torch.randn(2 * D, 2 * D, dtype=torch.float64, generator=seeded()).numpy()
    np.testing.assert_allclose(V, A.T @ A + 2 * np.eye(2 * D))
    n = 200_000
    z, x = model.pairs(n, seeded(1))
    again = z, model.observe(z, seeded(2))
    queries = model.queries(n, seeded(3))
    for pair in ((z, x), again):
        joint = torch.cat(pair, -1).numpy()
        np.testing.assert_allclose(joint.mean(0), [0, 0, 1, 1], atol=5 * math.sqrt(V.max() / n))
        np.testing.assert_allclose(np.cov(joint.T), V, atol=5 * V.max() * math.sqrt(2 / n))
    np.testing.assert_allclose(queries.mean(0), [0, 0], atol=5 * math.sqrt(V.max() / n))
    np.testing.assert_allclose(
        np.cov(queries.numpy().T), V[D:, D:], atol=5 * V.max() * math.sqrt(2 / n)
    )
    np.testing.assert_allclose(
        np.cov(model.prior(n, seeded(4)).numpy().T),
        V[:D, :D] / 2,
        atol=5 * V.max() * math.sqrt(2 / n),
    )


def test_the_true_posterior_mean_is_bayes(model):
    """Prior draws weighted by the Gaussian density of x given z, from the inverse of V by NumPy."""
    precision = np.linalg.inv(model.V.numpy())
    z, x = model.prior(100_000, seeded(1)).numpy(), model.queries(3, seeded(2))
    for at, truth in zip(x.numpy(), model.posterior_mean(x).numpy(), strict=True):
        joint = np.concatenate([z, np.broadcast_to(at - 1, z.shape)], 1)
        log_joint = -0.5 * np.einsum("ni,ij,nj->n", joint, precision, joint)
        log_state = stats.multivariate_normal(np.zeros(D), model.V.numpy()[:D, :D]).logpdf(z)
        w = np.exp(log_joint - log_state - (log_joint - log_state).max())
        w /= w.sum()
        error = np.sqrt((w[:, None] ** 2 * (z - truth) ** 2).sum(0))
        assert (np.abs(w @ z - truth) < 5 * error).all()


# Density estimates


def test_kde_by_loops(normal):
    x, z, prior, queries = normal(6, 2), normal(6, 1), normal(5, 1), normal(3, 2)
    h = 0.8
    expected = []
    for y in queries.numpy():
        density = []
        for u in prior.numpy():
            K_z = [stats.norm(float(c[0]), h).pdf(u[0]) for c in z.numpy()]
            K_x = [np.prod(stats.norm(c, h).pdf(y)) for c in x.numpy()]
            density.append(np.dot(K_z, K_x) / np.sum(K_z))
        expected.append(np.array(density) / np.sum(density) @ prior.numpy())
    np.testing.assert_allclose(kde.kde(x, z, prior, queries, h), expected, rtol=1e-10)


def test_kde_of_wide_and_narrow_kernels(normal):
    x, z, prior, queries = (10 * normal(n, 64) for n in (9, 9, 7, 2))
    np.testing.assert_allclose(
        kde.kde(x, z, prior, queries, 1e7), prior.mean(0).expand(2, -1), atol=1e-8
    )
    narrow = kde.kde(x, z, prior, queries, 0.05)  # every plain kernel value is 0 here
    assert all((row == prior).all(-1).any() for row in narrow)


def test_least_squares_cv_by_quadrature(normal):
    points, h, n = normal(5, 2), 0.7, 5
    axis = np.linspace(-8, 8, 321)
    at = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)

    def density(centres, at):
        return np.mean([stats.multivariate_normal(c, h**2 * np.eye(2)).pdf(at) for c in centres], 0)

    square = (density(points.numpy(), at) ** 2).sum() * (axis[1] - axis[0]) ** 2
    left_out = np.mean(
        [density(np.delete(points.numpy(), i, 0), points[i].numpy()) for i in range(n)]
    )
    assert kde.least_squares_cv(points, h) == pytest.approx(square - 2 * left_out, rel=1e-9)


def test_least_squares_cv_finds_the_width(normal):
    """Of one Gaussian: h = sigma (4 / (d + 2) / n)^(1 / (d + 4)) is the best."""
    best = (4 / 4 / 400) ** (1 / 6)
    points = 3 * normal(400, 2)
    widths = [3 * best * f for f in (0.25, 0.5, 1.0, 2.0, 4.0)]
    assert min(widths, key=lambda h: kde.least_squares_cv(points, h)) == pytest.approx(3 * best)


# Kernel rules


def rules_by_reference(z, x, prior, queries, length_z, length_x):
    """Weights ``q n`` of the original rule in the operators' own scale (mu = gamma / n), and of the
    importance-weighted one.
    """
    n = len(z)
    z, x, prior, queries = (part.numpy() for part in (z, x, prior, queries))
    G_Z, G_X = reference.gaussian_gram(z, z, length_z), reference.gaussian_gram(x, x, length_x)
    gamma = reference.tikhonov(G_Z, reference.gaussian_gram(z, prior, length_z).mean(1), 0.01 / n)
    g = reference.gaussian_gram(x, queries, length_x).T
    original = [reference.original_rule(gamma / n, G_X, row, 0.02 / n) for row in g]
    printed = [reference.original_rule(gamma, G_X, row, 0.02 / n) for row in g]
    weighted = [
        reference.importance_weighted_rule(np.maximum(gamma, 0), G_X, row, math.sqrt(0.02 / n))
        for row in g
    ]
    conditional = [reference.cme(G_X, row, 0.01 / math.sqrt(n)) for row in g]
    return {"KBR": original, "printed": printed, "IW": weighted, "COND": conditional}


def test_rules_of_the_kde_comparison(model):
    z, x = model.pairs(15, seeded(1))
    prior, queries = model.prior(20, seeded(2)), model.queries(4, seeded(3))
    lengths = median_distance(z) / 2, 2 * median_distance(x)
    expected = rules_by_reference(z, x, prior, queries, *(float(s) for s in lengths))
    for rule, name in ((kde.KBR, "KBR"), (kde.PRINTED, "printed"), (kde.IW, "IW")):
        found = kde.posterior(rule, x, z, prior, *lengths)(
            gaussian(queries, x, bandwidth=lengths[1])
        )
        np.testing.assert_allclose(found, expected[name], rtol=1e-6, atol=1e-9)


def test_cross_validation_by_loops(model, monkeypatch):
    """Posteriors of held-out x, averaged, against held-out z; everything but the bandwidths' unit
    comes from the other folds.
    """
    n, factors, scores = 24, (0.5, 2.0), {}
    z, x = model.pairs(n, seeded(1))
    lengths = median_distance(z), median_distance(x)
    monkeypatch.setattr(kde, "FACTORS", factors)

    def watched(candidates, score):
        scores.update({candidate: score(candidate) for candidate in candidates})
        return best_of(candidates, score)

    monkeypatch.setattr(kde, "best_of", watched)
    for rule, name in ((kde.KBR, "KBR"), (kde.IW, "IW")):
        assert kde.choose_factor(rule, x, z, *lengths) == min(
            scores, key=lambda factor: scores[factor]
        )
        for factor in factors:
            expected = 0.0
            for fold in range(10):
                out = np.arange(n) % 10 == fold
                rest = z[~out]
                w = np.mean(
                    rules_by_reference(
                        rest, x[~out], rest, x[out], *(factor * float(s) for s in lengths)
                    )[name],
                    0,
                )
                points = np.concatenate([rest.numpy(), z[out].numpy()])
                signed = np.concatenate([w, np.full(out.sum(), -1 / out.sum())])
                expected += (
                    signed
                    @ reference.gaussian_gram(points, points, float(lengths[0]))
                    @ signed
                    / 10
                )
            assert scores[factor] == pytest.approx(expected, rel=1e-6)


def test_errors_of_a_piece():
    job = {"d": 12, "run": 5, "n": 20, "queries": 7}
    generator = seeded(5)
    model = gaussian_model(12, generator)
    z, x = model.pairs(20, generator)
    prior, queries = model.prior(20, generator), model.queries(7, generator)
    truth = model.posterior_mean(queries).numpy()
    rows = kde.work(job)
    expected = rules_by_reference(
        z, x, prior, queries, float(median_distance(z)), float(median_distance(x))
    )
    (median,) = (row for row in rows if row["method"] == "KBR, median")
    assert median["mse"] == pytest.approx(
        np.mean((np.array(expected["KBR"]) @ z.numpy() - truth) ** 2)
    )
    (printed,) = (row for row in rows if row["method"] == kde.PRINTED)
    assert printed["mse"] == pytest.approx(
        np.mean((np.array(expected["printed"]) @ z.numpy() - truth) ** 2)
    )
    errors = {row["bandwidth"]: row["mse"] for row in rows if row["method"] == kde.KDE}
    assert sorted(errors) == sorted((*kde.SMALLER_BANDWIDTHS, *kde.BANDWIDTHS))
    for h in (0.7, 20.0):
        assert errors[h] == pytest.approx(
            np.mean((kde.kde(x, z, prior, queries, h).numpy() - truth) ** 2)
        )
    (chosen,) = (row for row in rows if row["method"] == "KDE+IW, CV")
    joint = torch.cat([z, x], -1)
    assert (
        chosen["bandwidth"] == min(kde.BANDWIDTHS, key=lambda h: kde.least_squares_cv(joint, h)) > 2
    )
    assert chosen["mse"] == errors[chosen["bandwidth"]]


def kde_rows(factor: float = 1.0, printed: float = 1.0, weighted: float = 1.0):
    """Eight runs at two dimensions; KBR is ``factor`` times as wrong as the best density estimate
    but one, which has h = 0.5.

    ``printed`` is the factor with delta as printed, ``weighted`` that of the IW rule's error over
    KBR's.
    """
    rows = []
    for d in (2, 4):
        for run in range(8):
            level = d + 0.01 * run
            kernel = {f"{kde.KBR}, {way}": factor * level for way in (kde.MEDIAN, kde.CV)}
            kernel |= {
                f"{kde.IW}, {way}": weighted * factor * level for way in (kde.MEDIAN, kde.CV)
            }
            kernel[kde.PRINTED] = printed * level
            rows += [
                {"d": d, "run": run, "method": m, "bandwidth": 1.0, "mse": e}
                for m, e in kernel.items()
            ]
            rows.append(
                {"d": d, "run": run, "method": "KDE+IW, CV", "bandwidth": 20.0, "mse": 3 * level}
            )
            for h in (*kde.SMALLER_BANDWIDTHS, *kde.BANDWIDTHS):
                error = level * {0.5: 0.1, 6.0: 2.0 if run else 9.0, 8.0: 2.0}.get(h, 5.0)
                rows.append({"d": d, "run": run, "method": kde.KDE, "bandwidth": h, "mse": error})
    return rows


def test_best_bandwidths():
    rows = kde.with_best(kde_rows())
    chosen = {row["method"]: row["bandwidth"] for row in rows if row["method"].startswith(kde.KDE)}
    assert chosen == {
        f"{kde.KDE}, {kde.CV}": 20.0,
        f"{kde.KDE}, {kde.BEST}": 8.0,
        f"{kde.KDE}, {kde.BEST_OF_MORE}": 0.5,
    }
    assert len(rows) == 2 * 8 * 8


def test_verdicts_of_the_kde_comparison():
    better, growing, printed, _ = kde.judge(kde_rows(0.5, printed=4.0))
    assert (
        better.reproduced is True
        and "smaller at 2 of 2, largest p = 0.0078" in better.ours
        and f"{kde.BEST_OF_MORE} at 0 of 2" in better.ours
    )
    assert growing.reproduced is True and printed.reproduced is False and printed.asked
    assert kde.judge(kde_rows(4.0, printed=0.5))[2].reproduced is True
    assert [kde.judge(kde_rows(weighted=share))[3].reproduced for share in (0.8, 1.2)] == [
        True,
        False,
    ]
    assert (
        kde.judge([row for row in kde_rows(weighted=0.8) if row["run"] < 5])[3].reproduced is None
    )
    one = [
        row | {"mse": 9.0} if row["method"] == f"{kde.IW}, {kde.CV}" and row["d"] == 2 else row
        for row in kde_rows(weighted=0.8)
    ]
    assert kde.judge(one)[3].reproduced is False
    assert kde.judge(kde_rows(2.5))[0].reproduced is False
    assert (
        kde.judge([row for row in kde_rows(0.5) if row["run"] < 5])[0].reproduced is None
    )  # p is 1/16 at the least
    assert kde.judge([row | {"d": 6 - row["d"]} for row in kde_rows()])[1].reproduced is False


# Without a likelihood


def test_rules_of_the_abc_comparison(model, monkeypatch):
    """With all of the trace the low-rank rules are the dense ones."""
    monkeypatch.setattr(abc, "TOLERANCE", 0.0)
    n, queries = 15, model.queries(4, seeded(1))
    found = abc.kernel_rules(model, queries, n, seeded(2))
    generator = seeded(2)
    z = model.prior(n, generator)
    x = model.observe(z, generator)
    expected = rules_by_reference(
        z, x, z, queries, float(median_distance(z)), float(median_distance(x))
    )
    for method, name in (
        (abc.KBR, "KBR"),
        (abc.PRINTED, "printed"),
        (abc.IW, "IW"),
        (abc.COND, "COND"),
    ):
        np.testing.assert_allclose(
            found[method][1], np.array(expected[name]) @ z.numpy(), rtol=1e-4, atol=1e-6
        )
    assert 0 < found[abc.COND][0] < found[abc.KBR][0]
    alone = abc.kernel_rules(model, queries, n, seeded(2), conditional=True)
    assert list(alone) == [abc.COND] and torch.equal(alone[abc.COND][1], found[abc.COND][1])


def test_means_are_those_of_the_rules(normal):
    """With ratios of either sign, which a piece has never: its ratio is near 1."""
    Psi, psi, z, gamma, n = normal(12, 5), normal(3, 5), normal(12, 2), normal(12), 12
    every = gamma.expand(3, -1)
    np.testing.assert_allclose(
        abc.original_mean(Psi, psi, z, gamma, 0.3), rules.original_primal(every, Psi, psi, 0.3) @ z
    )
    w = rules.importance_weighted_primal(every.clamp_min(0), Psi, psi, 0.3 / n)
    np.testing.assert_allclose(abc.weighted_mean(Psi, psi, z, gamma.clamp_min(0), 0.3 / n), w @ z)


def test_incomplete_cholesky_leaves_what_it_says():
    z = gaussian_model(6, seeded()).prior(300, seeded(1))
    k = partial(gaussian, bandwidth=median_distance(z))
    Psi, psi = abc.low_rank(k, z, z[:5])
    assert Psi.shape[1] < 100 and (k(z, z) - Psi @ Psi.mT).trace() <= 0.01 * 300
    np.testing.assert_allclose(psi, Psi[:5], atol=1e-8)


class Table(GaussianModel):
    """Simulations that come from a table, from its first row to its last."""

    rows: Tensor
    at: int = 0

    def prior(self, n: int, generator: Generator) -> Tensor:
        return self.rows[self.at : self.at + n, :D]

    def observe(self, z: Tensor, generator: Generator) -> Tensor:
        self.at += len(z)
        return self.rows[self.at - len(z) : self.at, D:]


@pytest.mark.parametrize("block", [7, 50, 100])
def test_rejection_is_a_sort(model, normal, block):
    table = Table(*model)
    table.rows = normal(60, 2 * D)
    queries = normal(3, D)
    near = abc.rejection(table, queries, 50, 12, seeded(), block=block)
    for query, states in zip(queries.numpy(), near, strict=True):
        order = sorted(
            range(50), key=lambda i: float(np.sum((table.rows[i, D:].numpy() - query) ** 2))
        )
        np.testing.assert_array_equal(states, table.rows[order[:12], :D])
    assert table.at == 50


def test_rejection_comes_to_the_posterior_mean():
    model = gaussian_model(1, seeded())
    queries = model.queries(4, seeded(1))
    near = abc.rejection(model, queries, 200_000, 2000, seeded(2))
    np.testing.assert_allclose(
        near.mean(1), model.posterior_mean(queries), atol=5 * math.sqrt(model.P.item() / 2000)
    )
    assert (
        abc.rejection(model, queries, 20, 30, seeded(2)).mean(1) - near.mean(1)
    ).abs().max() > 0.1


def test_pieces_have_every_method_where_it_can_be():
    job = {"d": 2, "run": 0, "queries": 3, "sizes": [40], "conditional": [60]}
    rows = abc.work(job | {"simulations": [40, 150]})
    told = {(row["method"], row["n"]) for row in rows}
    assert told == {
        (m, 40) for m in (abc.COND, abc.KBR, abc.PRINTED, abc.IW, "ABC, 30 accepted")
    } | {
        (abc.COND, 60),
        ("ABC, 30 accepted", 150),
        ("ABC, 100 accepted", 150),
    }
    assert all(row["seconds"] > 0 and math.isfinite(row["mse"]) for row in rows)


def test_errors_of_an_abc_piece(monkeypatch):
    """The k-th nearest state is k away from the truth, in every component; the rule is 2 away."""
    generator = seeded(3)
    model = gaussian_model(D, generator)
    truth = model.posterior_mean(model.queries(4, generator))

    def nearest(model, queries, simulations, accepted, generator):
        return truth[:, None] + torch.arange(min(accepted, simulations), dtype=truth.dtype)[:, None]

    monkeypatch.setattr(abc, "rejection", nearest)
    monkeypatch.setattr(
        abc, "kernel_rules", lambda model, queries, n, generator: {abc.KBR: (0.5, truth - 2)}
    )
    job = {"d": D, "run": 3, "queries": 4, "sizes": [40], "conditional": []}
    rows = abc.work(job | {"simulations": [2000]})
    found = {row["method"]: row["mse"] for row in rows}
    assert found.pop(abc.KBR) == pytest.approx(4)
    assert found == pytest.approx({f"ABC, {k} accepted": ((k - 1) / 2) ** 2 for k in abc.ACCEPTED})


@pytest.mark.parametrize(
    ("won", "told"),
    [([True] * 2, True), ([False] * 2, False), ([True, False, False], None), ([True], True)],
)
def test_a_statement_of_many_points(won, told):
    assert abc.every(won) is told


def test_errors_at_a_cost():
    points = [{"seconds": t, "mse": 3 * t**-0.5} for t in (4.0, 0.01, 1.0)]
    assert abc.at_cost(points, "seconds", 0.3) == pytest.approx(3 * 0.3**-0.5)
    assert math.isnan(abc.at_cost(points, "seconds", 100.0))
    line = [{"seconds": t, "mse": 2.0} for t in (0.001, 0.5, 100.0)]
    assert abc.wins(line, "seconds", partial(abc.at_cost, points, "seconds")) == [True, True]
    assert abc.at_cost(points, "seconds", 0.009) == math.inf


def abc_rows(kernel: float, printed: float):
    """Errors 1 / n with ten times the time of ABC, whose error is 1 / sqrt(n); COND takes half of
    KBR's time.
    """
    rows = []
    for run in range(2):
        for n in (100, 1000, 10_000, 40_000, 1_000_000):
            told = {
                abc.COND: (5, 1 / n),
                abc.KBR: (10, kernel / n),
                abc.PRINTED: (10, printed / n),
                abc.IW: (10, 1 / n),
            }
            told["ABC, 30 accepted"] = told["ABC, 100 accepted"] = (1, 1 / math.sqrt(n))
            largest = {abc.COND: 40_000, abc.KBR: 10_000, abc.PRINTED: 10_000, abc.IW: 10_000}
            rows += [
                {"d": 2, "run": run, "method": m, "n": n, "seconds": f * n * 1e-6, "mse": e}
                for m, (f, e) in told.items()
                if n <= largest.get(m, n)
            ]
    return rows


def test_verdicts_of_the_abc_comparison():
    time, simulations, weighted, theirs, own, printed = abc.judge(abc_rows(0.1, 10.0))
    assert (time.reproduced, simulations.reproduced, own.reproduced, printed.reproduced) == (
        True,
        True,
        False,
        True,
    )
    assert [v.asked for v in (time, simulations, own, printed)] == [False, True, False, True]
    assert "COND at 4 of 4 sizes, KBR at 3 of 3 sizes; at n = 10000: COND" in time.ours
    assert "at 0 of 3 sizes and dimensions" in own.ours
    assert weighted.asked and weighted.reproduced is True and "than ABC" in weighted.finding
    assert "at 3 of 3 sizes; at n = 10000" in weighted.ours
    assert theirs.asked and theirs.reproduced is False and "than KBR" in theirs.finding
    assert "at 0 of 3 sizes; at n = 10000" in theirs.ours
    time, simulations, weighted, theirs, own, _ = abc.judge(
        abc_rows(30.0, 10.0)
    )  # 30 / n against 1 / sqrt(n), and against 1 / sqrt(10 n)
    assert (time.reproduced, simulations.reproduced, own.reproduced) == (None, None, True)
    assert "COND at 4 of 4 sizes, KBR at 1 of 3 sizes" in time.ours
    assert "COND at 4 of 4 sizes, KBR at 2 of 3 sizes" in simulations.ours
    assert weighted.reproduced is theirs.reproduced is True
    assert {test["n"] for test in abc.tests(abc_rows(1.0, 1.0))} == {100, 1000, 10_000}


def test_the_picture_has_time_above_simulations():
    rows = [row | {"d": d} for row in abc_rows(1.0, 1.0) for d in (2, 6)]
    figure = abc.draw(rows)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == [
        "d = 2: CPU seconds",
        "d = 6: CPU seconds",
        "d = 2: simulations",
        "d = 6: simulations",
    ]
    places = [
        (spec.rowspan.start, spec.colspan.start)
        for spec in (axes.get_subplotspec() for axes in figure.axes)
    ]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)]
    x = [line.get_xdata()[0] for line in (figure.axes[0].lines[0], figure.axes[2].lines[0])]
    assert x == pytest.approx([5e-4, 100])
