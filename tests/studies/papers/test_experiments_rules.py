"""The experiments that compare the rules: priors of two classes, filtering against EKF and UKF,
rates of convergence.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from kbf.filters.gaussian.ekf import EKF
from kbf.filters.gaussian.ukf import UKF
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.rkhs import ratios
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.ssm import oscillatory, simulate
from studies.papers import consistency, fukumizu_filtering, prior_influence
from studies.papers.free_angle import FreeAngle

F64 = torch.float64
PRIORS, POINTS = np.arange(1, 10) / 10, np.array([[0.5, 0.5], [0.6, 0.4], [0.7, 0.3]])


def bayes_table(means, covariances):
    """Bayes' rule for two Gaussian classes, one prior and point after the other."""
    table = np.empty((9, 3))
    for i, prior in enumerate(PRIORS):
        for j, y in enumerate(POINTS):
            one, two = (
                np.exp(-0.5 * (y - m) @ np.linalg.solve(S, y - m)) / np.sqrt(np.linalg.det(S))
                for m, S in zip(means, covariances, strict=True)
            )
            table[i, j] = prior * one / (prior * one + (1 - prior) * two)
    return table


# prior_influence


def test_the_true_posterior_of_the_classes_is_bayes():
    truth = bayes_table(np.eye(2), [0.1 * np.eye(2)] * 2)
    np.testing.assert_allclose(prior_influence.TRUTH.numpy(), truth, rtol=1e-12)
    np.testing.assert_allclose(truth[:, 0], PRIORS, rtol=1e-12)  # (0.5, 0.5) is as far from both


def test_the_samples_of_the_classes():
    z, x = map(torch.cat, zip(*(prior_influence.sample(seed) for seed in range(40)), strict=True))
    for j in range(2):
        mine = x[z == j]
        assert len(mine) == 2000
        torch.testing.assert_close(mine.mean(0), torch.eye(2, dtype=F64)[j], rtol=0, atol=0.03)
        torch.testing.assert_close(mine.mT.cov(), 0.1 * torch.eye(2, dtype=F64), rtol=0, atol=0.01)


def test_the_gaussian_classifier():
    z, x = prior_influence.sample(3)
    each = [x[z == j].numpy() for j in range(2)]
    truth = bayes_table([c.mean(0) for c in each], [np.cov(c.T) for c in each])
    np.testing.assert_allclose(prior_influence.bayes(z, x).numpy(), truth, rtol=1e-9)


def papers_rule(z, x, sigma, eps, delta, prior, y, pseudo=False):
    """Sections 4.1.2 and 4.1.3 of Johno et al. to the letter, for one prior of C1 and one point."""
    n = len(z)
    D = np.stack([z == 0, z == 1]).astype(float)
    G_X = (z[:, None] == z[None]).astype(float)
    m = np.array([prior, 1 - prior])[z]
    k = lambda a, b: np.exp(-((a - b) ** 2).sum(-1) / (2 * sigma**2)) / (np.sqrt(2 * np.pi) * sigma)  # noqa: E731
    G_Y, k_y = k(x[:, None], x[None]), k(x, y)
    if pseudo:
        L = np.diag(np.linalg.pinv(G_X) @ m)
        return D @ np.linalg.pinv(L @ G_Y, rcond=1e-15) @ L @ k_y
    L = np.diag(np.linalg.solve(G_X + n * eps * np.eye(n), m))
    return D @ L @ G_Y @ np.linalg.solve((L @ G_Y) @ (L @ G_Y) + delta * np.eye(n), L @ k_y)


@pytest.mark.parametrize(
    ("sigma", "eps", "delta"), [(0.1, 1e-3, 1e-3), (1.0, 1e-1, 1e-7), (0.1, 1e-5, 1e-1)]
)
def test_kbr1_is_the_papers(sigma, eps, delta):
    z, x = prior_influence.sample(1)
    found = prior_influence.kernel_bayes("KBR1", z, x, sigma, eps, delta)
    for i, j in ((0, 0), (4, 2), (8, 1)):
        expected = papers_rule(z.numpy(), x.numpy(), sigma, eps, delta, PRIORS[i], POINTS[j])
        np.testing.assert_allclose(found[i, j].numpy(), expected, rtol=1e-6)


def test_kbr2_is_the_papers_and_ignores_the_prior():
    z, x = prior_influence.sample(1)
    found = prior_influence.kernel_bayes("KBR2", z, x, 0.05, 0.0, 0.0)
    expected = papers_rule(z.numpy(), x.numpy(), 0.05, 0.0, 0.0, 0.3, POINTS[1], pseudo=True)
    np.testing.assert_allclose(found[2, 1].numpy(), expected, rtol=1e-6)
    height = 1 / (math.sqrt(2 * math.pi) * 0.05)
    G, g = (height * gaussian(a, x, bandwidth=0.05) for a in (x, torch.tensor(POINTS)))
    alone = (
        torch.linalg.solve(G, g.mT).mT @ torch.nn.functional.one_hot(z, 2).double()
    )  # regression, without any prior
    torch.testing.assert_close(found, alone.expand(9, 3, 2), rtol=1e-6, atol=1e-12)


def test_iw_with_a_large_ridge_is_bayes_rule_with_kernel_densities():
    z, x = prior_influence.sample(2)
    mass = prior_influence.kernel_bayes("IW", z, x, 0.1, 1e-12, 1e6)
    g = gaussian(torch.tensor(POINTS), x, bandwidth=0.1)
    one, two = (g[:, z == j].sum(1) for j in range(2))
    prior = torch.tensor(PRIORS)[:, None]
    torch.testing.assert_close(
        mass[..., 0] / mass.sum(-1),
        prior * one / (prior * one + (1 - prior) * two),
        rtol=1e-4,
        atol=0,
    )


def test_influence_and_error():
    truth, shift = prior_influence.TRUTH, torch.tensor([0.1, -0.2, 0.3], dtype=F64)
    assert prior_influence.influence(truth) == pytest.approx(1)
    assert prior_influence.influence(0.5 * truth + shift) == pytest.approx(0.5)
    assert prior_influence.influence(shift.expand(9, 3)) == pytest.approx(0)
    assert prior_influence.error(truth + 0.1) == pytest.approx(0.1)
    assert not prior_influence.reasonable({"influence": 0.4, "error": 0.1}, 0.2)
    assert not prior_influence.reasonable({"influence": 0.9, "error": 0.3}, 0.2)
    assert prior_influence.reasonable({"influence": 0.9, "error": 0.1}, 0.2)


def test_the_bound_is_what_bayes_rule_loses_without_the_prior(monkeypatch):
    """With true densities in BR, the answers at prior 1/2 stand for all priors."""
    monkeypatch.setattr(prior_influence, "bayes", lambda z, x: prior_influence.TRUTH)
    rows = prior_influence.work({"run": 0, "sigmas": [0.1], "regs": [0.1]})
    (row,) = [row for row in rows if row["method"] == prior_influence.NEUTRAL]
    truth = prior_influence.TRUTH
    assert row["error"] == pytest.approx((truth - truth[4]).square().mean().sqrt().item())
    assert row["influence"] == pytest.approx(0)


@pytest.mark.parametrize(
    ("through", "answers"),
    [
        (True, [False, False, False, False, False, True, True, True]),
        (False, [True, True, True, True, True, False, False, False]),
    ],
)
def test_the_verdicts_on_the_prior_follow_the_rows(through, answers, monkeypatch):
    """Rules that are Bayes' rule; and rules that ignore the prior but for large ridges, where they
    are too small.
    """
    truth = prior_influence.TRUTH

    def rule(method, z, x, sigma, eps, delta):
        late = method == "KBR1" and delta >= 1e-3
        answer = truth if through else 0.3 * truth if late else truth.mean(0).expand(9, 3)
        return torch.stack([answer, 1 - answer], -1)

    monkeypatch.setattr(prior_influence, "kernel_bayes", rule)
    rows = [
        row
        for job in prior_influence.jobs({**prior_influence.PRESETS["smoke"], "seed": 0})
        for row in prior_influence.work(job)
    ]
    verdicts = prior_influence.judge(rows)
    assert [v.reproduced for v in verdicts] == answers
    for k in (3, 4):
        assert f"KBR1: {10 if through else 0} of 10 reasonable" in verdicts[k].ours


def test_less_error_than_without_the_prior_is_not_yet_as_good_as_bayes_rule(monkeypatch):
    """Rules with an error between the two bounds: reasonable by the soft one alone."""
    truth = prior_influence.TRUTH
    rows = prior_influence.work({"run": 0, "sigmas": [0.1], "regs": [0.1]})
    fitted, none = (
        next(row["error"] for row in rows if row["method"] == method and row["y"] == "all")
        for method in (prior_influence.BR, prior_influence.NEUTRAL)
    )
    for target, answers in (
        (0.5 * (1.25 * fitted + none), [False, True, True, False]),
        (1.2 * fitted, [False, False, True, True]),
        (1.1 * none, [True, True, False, False]),
    ):

        def rule(method, z, x, sigma, eps, delta, target=target):
            answer = truth + target  # follows the prior in full
            return torch.stack([answer, 1 - answer], -1)

        monkeypatch.setattr(prior_influence, "kernel_bayes", rule)
        rows = prior_influence.work({"run": 0, "sigmas": [0.1], "regs": prior_influence.REGS})
        verdicts = prior_influence.judge([*rows, *(row | {"run": 1} for row in rows)])
        assert [verdicts[k].reproduced for k in (3, 4, 6, 7)] == answers
        monkeypatch.undo()


def test_what_is_told_of_a_ridge_is_of_both_ridges(monkeypatch):
    """Answers that depend on epsilon alone: each number is of epsilon = delta, not of another
    epsilon with that delta.
    """
    truth = prior_influence.TRUTH

    def rule(method, z, x, sigma, eps, delta):
        share = {1e-7: 0.1, 1e-5: 0.2, 1e-3: 0.3, 1e-1: 0.4}.get(eps, 0.9)
        answer = truth.mean(0) + share * (truth - truth.mean(0))
        return torch.stack([answer, 1 - answer], -1)

    monkeypatch.setattr(prior_influence, "kernel_bayes", rule)
    rows = prior_influence.work({"run": 0, "sigmas": [0.1], "regs": prior_influence.REGS})
    verdicts = prior_influence.judge([*rows, *(row | {"run": 1} for row in rows)])
    assert "influence 0.100, 0.200, 0.300, 0.400 at" in verdicts[0].ours
    assert "influence 0.100, 0.200, 0.300, 0.400 at" in verdicts[5].ours
    assert (
        verdicts[0].reproduced is True and verdicts[2].reproduced is False
    )  # shown, but not too small


# fukumizu_filtering


def test_data_a_and_b():
    theta = torch.tensor([0.0, 1.0, 2.5], dtype=F64)
    z = 1.7 * torch.stack([theta.cos(), theta.sin()], -1)
    for name, eta, b in (("(a) rotation", 0.3, 0.0), ("(b) oscillatory", 0.4, 0.4)):
        model = fukumizu_filtering.problem(name)
        moved = theta + eta
        expected = (1 + b * (8 * moved).sin())[:, None] * torch.stack(
            [moved.cos(), moved.sin()], -1
        )
        torch.testing.assert_close(model.f(z), expected)
        torch.testing.assert_close(model.Q, 0.04 * torch.eye(2, dtype=F64))
        torch.testing.assert_close(model.R, 0.04 * torch.eye(2, dtype=F64))


def test_the_free_angle_has_no_noise():
    """Equations of section 5.3 as printed: at any time the state scatters around the point of an
    angle that only depends on the first one.
    """
    for name, eta, b in (("(a) rotation", 0.3, 0.0), ("(b) oscillatory", 0.4, 0.4)):
        memory, test = fukumizu_filtering.recordings(f"{name}, free angle", 4000, 1000, 3)
        z, x = (torch.cat(parts).numpy() for parts in zip(memory[:2], test[:2], strict=True))
        t = np.arange(1, 5001)

        def residual(start, eta=eta, b=b, t=t, z=z):
            theta = start + eta * t
            point = np.stack([np.cos(theta), np.sin(theta)], 1)
            return z - (1 + b * np.sin(8 * theta))[:, None] * point

        starts = np.linspace(0, 2 * np.pi, 2000)
        best = min(starts, key=lambda start: (residual(start) ** 2).sum())
        np.testing.assert_allclose(np.cov(residual(best).T), 0.04 * np.eye(2), atol=3e-3)
        np.testing.assert_allclose(np.cov((x - z).T), 0.04 * np.eye(2), atol=3e-3)


def test_the_optimal_filter_of_a_free_angle_is_bayes_rule():
    """Against weighted simulations of the printed model, two observations."""
    model = FreeAngle(0.4, 0.4)
    obs = torch.tensor([[0.6, 0.9], [0.2, 1.3]], dtype=F64)
    found = model.optimal(obs, obs[:0]).numpy()
    rng, n = np.random.default_rng(0), 2_000_000
    theta = rng.uniform(0, 2 * np.pi, n)
    log_weight = np.zeros(n)
    for t, x in enumerate(obs.numpy()):
        theta = theta + 0.4
        point = np.stack([np.cos(theta), np.sin(theta)], 1)
        z = (1 + 0.4 * np.sin(8 * theta))[:, None] * point + 0.2 * rng.normal(size=(n, 2))
        log_weight = log_weight - ((x - z) ** 2).sum(1) / 0.08
        w = np.exp(log_weight - log_weight.max())
        np.testing.assert_allclose(found[t], w @ z / w.sum(), atol=0.01)


@pytest.mark.parametrize(("eta", "b"), [(0.3, 0.0), (0.4, 0.4)])
def test_filters_that_know_the_free_angle_are_nearly_optimal(eta, b):
    """Their start is the angle of the training states, their model the printed one."""
    model = FreeAngle(eta, b)
    whole = model.recording(300, seed=1)
    states, obs, truth = whole.states[:100], whole.obs[100:], whole.states[100:]
    chain = model.with_angle(states)
    radius = 1 + b * torch.sin(8 * (chain.m0[2] + eta))
    moved = chain.f(chain.m0)
    torch.testing.assert_close(moved[:2].norm(), radius)
    torch.testing.assert_close(moved[2], chain.m0[2] + eta)
    assert 0 < chain.P0[2, 2] < 1e-3 and chain.Q[2, 2] == 0

    def error(estimates):
        return (estimates[:, :2] - truth).square().sum(1).mean().item()

    best = error(model.optimal(obs, states))
    for filter in (EKF(chain), UKF(chain)):
        mine = error(rollout(filter.fit(None), obs[None]).estimates[0])
        assert mine == pytest.approx(best, rel=0.01)
    of_state = fukumizu_filtering.problem("(b) oscillatory" if b else "(a) rotation")
    filter = EKF(of_state).fit(Recording(states, whole.obs[:100]))
    assert error(rollout(filter, obs[None]).estimates[0]) > 1.1 * best


def test_pieces_of_both_readings():
    settings = fukumizu_filtering.PRESETS["smoke"] | {"seed": 0, "runs": 1}
    names = {job["data"] for job in fukumizu_filtering.jobs(settings)}
    assert names == {
        f"{name}{mark}"
        for name in ("(a) rotation", "(b) oscillatory")
        for mark in ("", ", free angle")
    }
    job = next(j for j in fukumizu_filtering.jobs(settings) if j["data"].endswith("free angle"))
    rows = {row["method"]: row["mse"] for row in fukumizu_filtering.work(job)}
    assert {"KBR", "IW", "EKF", "UKF", "EKF, theta", "UKF, theta", "optimal"} <= set(rows)
    memory, test = fukumizu_filtering.recordings(job["data"], job["T"], job["test"], 0)
    best = FreeAngle(0.3, 0.0).optimal(test.obs, memory.states)
    assert rows["optimal"] == pytest.approx((best - test.states).square().sum(1).mean().item())


@pytest.fixture
def recording() -> Recording:
    return simulate(
        oscillatory(), torch.tensor([1.0, 0.0], dtype=F64), 40, torch.Generator().manual_seed(5)
    )


def papers_filter(rule, memory, obs, beta, eps):
    """Equations 18 and 19 of Fukumizu et al. with full matrices, mu and delta in their scaling; or
    algorithm 1 of Xu et al.
    """
    z, y = memory.states.numpy(), memory.obs.numpy()
    T = len(z)
    k = lambda a, b, s: np.exp(-((a[:, None] - b[None]) ** 2).sum(-1) / (2 * s**2))  # noqa: E731
    s_z, s_y = (beta * median_distance(points).item() for points in (memory.states, memory.obs))
    G_X, G_Y = k(z, z, s_z), k(y, y, s_y)
    alpha, told = np.full(T, 1 / T), []
    for x in obs.numpy():
        moved = np.zeros(T)
        moved[1:] = np.linalg.solve(G_X[:-1, :-1] + (T - 1) * eps * np.eye(T - 1), G_X[:-1] @ alpha)
        g = k(y, x[None], s_y)[:, 0]
        if rule == "KBR":
            mu = np.linalg.solve(G_X + T * eps * np.eye(T), G_X @ moved)
            LG = mu[:, None] * G_Y
            alpha = LG @ np.linalg.solve(LG @ LG + 2 * eps * np.eye(T), mu * g)
        else:
            r = np.linalg.solve(G_X + T * eps * np.eye(T), G_X @ (moved / moved.sum())).clip(0)
            D = np.diag(r / r.mean())
            alpha = D @ np.linalg.solve(G_Y @ D + T * np.sqrt(2 * eps) * np.eye(T), g)
            alpha = alpha / alpha.sum()
        told.append(alpha)
    return np.array(told), z, s_z


@pytest.mark.parametrize("rule", ["KBR", "IW"])
def test_the_filters_are_the_papers(rule, recording):
    memory, obs = Recording(recording.states[:30], recording.obs[:30]), recording.obs[30:]
    found = fukumizu_filtering.filtered(rule, memory, obs, 1.0, 1e-3, 30)
    alpha, z, width = papers_filter(rule, memory, obs, 1.0, 1e-3)
    mean = alpha @ z / alpha.sum(1, keepdims=True)
    np.testing.assert_allclose(found[fukumizu_filtering.MEAN].numpy(), mean, atol=1e-4)
    height = lambda at: (alpha * np.exp(-((at - z) ** 2).sum(-1) / (2 * width**2))).sum(-1)  # noqa: E731
    mode = height(found[fukumizu_filtering.PREIMAGE].numpy()[:, None])
    for corner in np.linspace(-2, 2, 21):  # the pre-image is the highest point of the embedding
        line = np.stack([np.full(21, corner), np.linspace(-2, 2, 21)], -1)
        assert all(
            (height(np.broadcast_to(at, (len(alpha), 1, 2))) <= mode + 1e-6).all() for at in line
        )


def test_the_choice_is_the_best_on_the_second_half(recording, monkeypatch):
    job = {"betas": [0.5, 2.0], "epsilons": [1e-5, 1e-2], "rank": 12}
    errors, whole = {}, fukumizu_filtering.filtered

    def filtered(rule, memory, obs, beta, eps, rank):
        assert torch.equal(memory.states, recording.states[:20])
        assert torch.equal(memory.obs, recording.obs[:20])
        assert torch.equal(obs, recording.obs[20:])
        told = whole(rule, memory, obs, beta, eps, rank)
        for way, estimates in told.items():
            errors.setdefault(way, {})[beta, eps] = (
                (estimates - recording.states[20:]).square().sum(-1).mean().item()
            )
        return told

    monkeypatch.setattr(fukumizu_filtering, "filtered", filtered)
    chosen = fukumizu_filtering.choose("IW", recording, job)
    assert set(errors) == {fukumizu_filtering.PREIMAGE, fukumizu_filtering.MEAN}
    for way, found in errors.items():
        assert len(found) == 4
        assert chosen[way] == min(found, key=lambda key: found[key])


def test_an_estimate_that_is_not_finite_is_never_chosen():
    assert (
        fukumizu_filtering.error(
            torch.full((2, 2), torch.nan, dtype=F64), torch.zeros(2, 2, dtype=F64)
        )
        == math.inf
    )


@pytest.mark.parametrize(
    ("kbr", "ukf", "answers"),
    [
        (
            {100: 0.07, 400: 0.051},
            0.05,
            [True, True, True],
        ),  # as in the paper: EKF = UKF in (a), 0.06 in (b)
        ({100: 0.04, 400: 0.04}, 0.03, [False, False, False]),
    ],
)
def test_the_verdicts_on_filtering_follow_the_rows(kbr, ukf, answers):
    rows = []
    for data, share in (
        ("(a) rotation", 1.0),
        ("(b) oscillatory", 1.2),
        ("(a) rotation, free angle", 1.0),
        ("(b) oscillatory, free angle", 1.2),
    ):
        for T in (100, 400):
            errors = {
                "KBR": kbr[T],
                "EKF": 0.05 * share,
                "UKF": ukf * share,
                "UKF, alpha 0.001": 0.05 * share,
                "EKF, theta": 0.05 * share,
                "UKF, theta": ukf * share,
                "IW": kbr[T] + 0.01,
            }
            rows += [
                {"data": data, "T": T, "run": run, "method": m, "mse": e + 1e-4 * run}
                for m, e in errors.items()
                for run in (0, 1)
            ]
    verdicts = fukumizu_filtering.judge(rows)
    assert [v.reproduced for v in verdicts] == [*answers, *answers, *answers, True, False, False]
    assert verdicts[1].finding.endswith("[angle of the noisy state]")
    assert verdicts[4].finding.endswith("[free angle, filters of u, v and theta]")
    assert [v.asked for v in verdicts] == [False] * 6 + [True] * 6
    other = [
        row | {"mse": row["mse"] + 0.2 * (row["method"] == "KBR" and "free" in row["data"])}
        for row in rows
    ]
    if answers[2]:  # with a larger error of KBR, free angle
        depends = fukumizu_filtering.judge(other)[9]
        assert depends.reproduced is False and depends.asked
        assert "finding 2 (reproduced, not reproduced, no), 3 (rep" in depends.ours
        better = [
            row | {"mse": row["mse"] - 0.03 * (row["method"] == "EKF, theta")} for row in rows
        ]
        answers_to = [v.reproduced for v in fukumizu_filtering.judge(better)]
        assert answers_to[:3] == answers_to[6:9] == answers  # filters of u and v: as before
        assert answers_to[3:6] == [False, False, False]
    assert (
        "ahead of EKF at 1 of 1, UKF at 1 of 1"
        if answers[2]
        else "ahead of EKF at 1 of 1, UKF at 0 of 1"
    ) in verdicts[2].ours
    short = fukumizu_filtering.judge([row for row in rows if row["T"] == 100])
    assert short[2].reproduced is None


# consistency


def joint(z: float, x: int) -> float:
    """pi(z) p(x | z)."""
    seen = [0.5 * math.exp(-((z - centre) ** 2) / 2) for centre in (1, -1)]
    return float(stats.norm.pdf(z)) * [1 - sum(seen), *seen][x]


@pytest.mark.parametrize("x", [0, 1, 2])
def test_the_posterior_embedding_is_the_integral(x):
    nodes = np.linspace(-9, 9, 721)
    density = np.array([joint(z, x) for z in nodes])
    chance = integrate.simpson(density, nodes)
    assert consistency.CHANCES[x].item() == pytest.approx(chance, rel=1e-8)
    at = np.array([-2.0, 0.0, 0.7])
    expected = (
        integrate.simpson(np.exp(-((at[:, None] - nodes) ** 2) / 4) * density, nodes, axis=1)
        / chance
    )
    np.testing.assert_allclose(
        consistency.posterior_embedding(torch.tensor(at))[x].numpy(), expected, rtol=1e-7
    )
    square = np.exp(-((nodes[:, None] - nodes) ** 2) / 4) * density[:, None] * density / chance**2
    norm = integrate.simpson(integrate.simpson(square, nodes), nodes)
    assert consistency.POSTERIOR_NORMS[x].item() == pytest.approx(norm, rel=1e-7)


def test_the_ratio_of_appendix_a_is_a_kernel_section():
    z = np.linspace(-4, 4, 9)
    section = (
        math.sqrt(2)
        * consistency.kernel(torch.tensor(z)[:, None], torch.zeros(1, 1, dtype=F64))[:, 0]
    )
    np.testing.assert_allclose(
        section.numpy(), stats.norm.pdf(z) / stats.norm.pdf(z, scale=math.sqrt(2)), rtol=1e-12
    )


def test_the_draws_are_those_of_the_model():
    n = 20_000
    z, x, u = consistency.sample(n, 0)
    assert (z.var() - 2).abs() < 0.1 and (u.var() - 1).abs() < 0.05
    weights = stats.norm.pdf(z.numpy()) / stats.norm.pdf(z.numpy(), scale=math.sqrt(2))
    for value in range(
        3
    ):  # weighted by the ratio, the training observations are those of the prior
        share = (weights[:, 0] * (x == value).numpy()).mean()
        assert abs(share - consistency.CHANCES[value].item()) < 0.02


def test_the_ratio_anywhere_solves_its_equation():
    z, _, u = consistency.sample(60, 1)
    eta = 0.01
    gamma = ratios.tikhonov(consistency.kernel(z, z), consistency.kernel(z, u).mean(1), eta)
    torch.testing.assert_close(
        consistency.ratio_function(z, z, u, gamma, eta), gamma.clamp_min(0), rtol=1e-6, atol=1e-8
    )
    at = torch.tensor(
        [[0.3], [-1.1]], dtype=F64
    )  # the representer theorem: r = sum_i a_i k(., z_i) + sum_j k(., u_j) / (l eta)
    K_u, K_z = consistency.kernel(at, u).mean(1) / eta, consistency.kernel(at, z)
    G, s = consistency.kernel(z, z), consistency.kernel(z, u).mean(1) / eta
    a = -torch.linalg.solve(G + 60 * eta * torch.eye(60, dtype=F64), s)
    torch.testing.assert_close(
        consistency.ratio_function(at, z, u, gamma, eta), (K_u + K_z @ a).clamp_min(0)
    )


def test_the_errors_against_operators_on_a_grid():
    """Every error again from matrices: embeddings as values on a fine grid, norms by pinning them
    there.
    """
    n, scale = 40, 10.0
    z, x, u = (t.numpy() for t in consistency.sample(n, 7))
    told = consistency.errors(n, 7, scale)
    k = lambda a, b: np.exp(-((a.reshape(-1)[:, None] - b.reshape(-1)) ** 2) / 4)  # noqa: E731
    gamma = n * np.linalg.solve(k(z, z) + n * n ** (-1 / 3) / scale * np.eye(n), k(z, u).mean(1))
    chance = consistency.CHANCES.numpy()
    nodes = np.linspace(-7, 7, 561)
    density = np.array([[joint(node, value) for node in nodes] for value in range(3)])
    masses = density / density.sum(1, keepdims=True)
    points, f = np.concatenate([z[:, 0], nodes]), k(z, np.ones(1))[:, 0]
    for method, r in (("IW", gamma.clip(0)), ("original", gamma)):
        C = np.array(
            [r[x == value].sum() / n for value in range(3)]
        )  # the delta kernel: a diagonal operator
        assert told["covariance, operator norm", method] == pytest.approx(np.abs(C - chance).max())
        answers = {}
        for what, power in (
            (consistency.OPERATOR, 2 / 9),
            (consistency.POINT, 4 / 27),
            (consistency.AVERAGE, 1 / 6),
        ):
            inverse = (
                1 / (C + n ** (-1 / 9) / 10) if method == "IW" else C / (C**2 + n**-power / 100)
            )
            answers[what] = np.array([r / n * (x == value) * inverse[value] for value in range(3)])
        differences = np.concatenate([answers[consistency.OPERATOR], -masses], 1)
        norm = math.sqrt(sum(d @ k(points, points) @ d for d in differences))
        assert told[consistency.OPERATOR, method] == pytest.approx(norm, rel=1e-4)
        truth = masses @ k(nodes, np.ones(1))[:, 0]
        assert told[consistency.POINT, method] == pytest.approx(
            np.abs(answers[consistency.POINT] @ f - truth).max(), rel=1e-4
        )
        square = chance @ (answers[consistency.AVERAGE] @ f - truth) ** 2
        assert told[consistency.AVERAGE, method] == pytest.approx(math.sqrt(square), rel=1e-4)
    at = np.linspace(-10, 10, 2001)
    eta = n ** (-1 / 3) / scale
    r = (k(at, u).mean(1) - k(at, z) @ gamma / n) / eta
    truth = stats.norm.pdf(at) / stats.norm.pdf(at, scale=math.sqrt(2))
    assert told["ratio, sup norm", "IW"] == pytest.approx(np.abs(r.clip(0) - truth).max(), rel=1e-6)


def test_the_share_of_weights_that_is_clipped():
    shares, n, eta = [], 60, 60 ** (-1 / 3) / 100
    for seed in range(4):
        z, _, u = consistency.sample(n, seed)
        gamma = ratios.tikhonov(consistency.kernel(z, z), consistency.kernel(z, u).mean(1), eta)
        shares.append((gamma < 0).double().mean().item())
        assert consistency.errors(n, seed, 100.0)[consistency.CLIPPED, "IW"] == pytest.approx(
            shares[-1]
        )
    assert max(shares) > 0


def power_law(exponent, noise=0.0, runs=4, clipped=0.1):
    """Errors that fall as n^-exponent, with a factor of its own for each run and n; a share of the
    weights is clipped.
    """
    rng = np.random.default_rng(0)
    rows = []
    for run in range(runs):
        for n in (100, 200, 400):
            for quantity, method in sorted(
                {*consistency.PROVEN, *((what, "IW") for what in consistency.DELTAS)}
            ):  # one order
                value = 3 * n**-exponent * math.exp(noise * rng.standard_normal())
                rows.append(
                    {
                        "n": n,
                        "run": run,
                        "scale": 10.0,
                        "quantity": quantity,
                        "method": method,
                        "error": value,
                    }
                )
            share = 0.2 if n == 100 else clipped
            rows.append(
                {
                    "n": n,
                    "run": run,
                    "scale": 10.0,
                    "quantity": consistency.CLIPPED,
                    "method": "IW",
                    "error": share,
                }
            )
    return rows


def test_slopes_and_their_errors():
    assert consistency.slope(power_law(0.3), consistency.RATIO, "IW", 10.0) == pytest.approx(
        (-0.3, 0), abs=1e-12
    )
    rows = [
        row
        for row in power_law(0.3, noise=0.2)
        if (row["quantity"], row["method"]) == (consistency.RATIO, "IW")
    ]

    def fitted(runs):
        mean = [
            np.sqrt(np.mean([r["error"] ** 2 for r in rows if r["n"] == n and r["run"] in runs]))
            for n in (100, 200, 400)
        ]
        return np.polyfit(np.log([100, 200, 400]), np.log(mean), 1)[0]

    left_out = np.array([fitted(set(range(4)) - {run}) for run in range(4)])
    value, se = consistency.slope(rows, consistency.RATIO, "IW", 10.0)
    assert value == pytest.approx(fitted(set(range(4))))
    assert se == pytest.approx(math.sqrt(3 / 4 * ((left_out - left_out.mean()) ** 2).sum()))


def test_the_verdicts_on_rates_follow_the_rows():
    answers = {
        exponent: [v.reproduced for v in consistency.judge(power_law(exponent))[:7]]
        for exponent in (0.5, 0.16, 0.01)
    }
    assert answers[0.5] == [True] * 7
    assert answers[0.16] == [False, False, False, True, True, True, False]
    assert answers[0.01] == [False] * 7
    assert consistency.judge(power_law(0.5))[7].reproduced is True
    assert consistency.judge(power_law(0.16))[7].reproduced is False
    assert None in [v.reproduced for v in consistency.judge(power_law(1 / 6, noise=0.5))[:7]]
    assert all(
        v.reproduced is None for v in consistency.judge(power_law(0.5, runs=1))[:7]
    )  # no standard error


def against(quantity, iw, original, clipped=0.1):
    """The last two verdicts, where one quantity falls with these exponents."""
    rows = power_law(0.5, noise=0.01, clipped=clipped)
    exponent = {"IW": iw, "original": original}
    steep = [
        row | {"error": row["error"] * row["n"] ** (0.5 - exponent[row["method"]])}
        if row["quantity"] == quantity
        else row
        for row in rows
    ]
    return [v.reproduced for v in consistency.judge(steep)[8:]]


def test_the_verdicts_on_the_two_rules_against_each_other():
    assert against(consistency.COVARIANCE, 0.3, 0.5)[0] is True
    assert against(consistency.COVARIANCE, 0.5, 0.3)[0] is False
    assert (
        against(consistency.COVARIANCE, 0.5, 0.3, clipped=0.001)[0] is None
    )  # there was nothing to clip
    assert against(consistency.COVARIANCE, 0.3, 0.5, clipped=0.001)[0] is True
    assert against(consistency.OPERATOR, 0.5, 0.3)[1] is True
    assert against(consistency.OPERATOR, 0.3, 0.5)[1] is False
    assert against(consistency.OPERATOR, 0.4, 0.4)[1] is None
