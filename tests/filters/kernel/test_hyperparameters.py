"""Selection against brute force, and proof that it looks at nothing but the memory it is given."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from kbf.data.synthetic import SyntheticData
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel import hyperparameters
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.hyperparameters import (
    best_of,
    choose_ratio_reg,
    choose_reg,
    choose_transition_reg,
    kernel_mean_cv,
    paper_grid,
    split_validation,
    validation_error,
)
from kbf.filters.kernel.kbf import KBF
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.runtime.errors import FitError
from kbf.ssm import rotation, simulate

F64 = torch.float64
KERNEL = partial(gaussian, bandwidth=0.7)


def recordings(*lengths: int) -> list[Recording]:
    model = rotation()
    runs = [
        simulate(model, model.m0, n, torch.Generator().manual_seed(seed))
        for seed, n in enumerate(lengths)
    ]
    return [s._replace(mask=None) for s in runs]


def conditional_mean(kernel, reg: float):
    """What `kernel_mean_cv` scores when the rule is the conditional mean embedding with this kernel
    and ridge.
    """

    def build(x: Tensor, z: Tensor):
        gram = kernel(x, x)
        return lambda queries: reference.cme_weights(gram, kernel(queries, x), reg)

    return build


# the validation part


@pytest.mark.parametrize(
    "lengths, share, most, cut, held",
    [
        ([100], 0.3, 200, 0, 30),
        ([1000], 0.3, 200, 0, 200),
        ([40, 60, 20], 0.3, 200, 1, 36),
        ([20, 20], 0.5, 200, 0, 10),  # ten steps of the longest are kept, of two the first
        ([17], 0.3, 200, 0, 5),
        ([50], 0.3, 7, 0, 7),
    ],
)
def test_split_cuts_the_end_off_the_longest_sequence(lengths, share, most, cut, held):
    memory = recordings(*lengths)
    mask = torch.arange(lengths[cut]) % 7 > 0
    memory = [s._replace(controls=s.obs[:, :1]) for s in memory]
    memory[cut] = memory[cut]._replace(mask=mask)
    kept, tail = split_validation(memory, share, most)
    n = lengths[cut]
    assert [len(s.states) for s in kept] == [*lengths[:cut], n - held, *lengths[cut + 1 :]]
    for whole, head, end in zip(memory[cut], kept[cut], tail, strict=True):
        assert whole is not None
        assert torch.equal(head, whole[: n - held])
        assert torch.equal(end, whole[n - held :])
    assert all(kept[i] is memory[i] for i in range(len(memory)) if i != cut)


def test_split_of_too_little_is_an_error():
    for lengths in ([16], [14, 14], [3]):
        with pytest.raises(
            ValueError,
            match=f"of {sum(lengths)} training steps, {lengths[0]} in the longest recording",
        ):
            split_validation(recordings(*lengths))


def test_validation_error_is_the_mean_squared_error():
    memory, held = recordings(40, 12)
    filter = LearnedKalman().fit(memory)
    held = held._replace(mask=torch.tensor([True, False] * 6))
    assert held.mask is not None
    estimates = rollout(filter, held.obs[None], mask=held.mask[None]).estimates[0]
    expected = np.mean([((estimates[t] - held.states[t]) ** 2).sum().item() for t in range(12)])
    assert validation_error(filter, held) == pytest.approx(expected)
    broken = LearnedKalman().fit(memory)
    broken.model = broken.model._replace(a=math.nan * broken.model.a)
    assert validation_error(broken, held) == math.inf


def test_best_of():
    assert best_of([3.0, -1.0, 2.0], lambda c: c**2) == -1.0
    assert best_of("abc", {"a": math.nan, "b": 2.0, "c": 2.0}.__getitem__) == "b"
    with pytest.raises(ValueError, match="none of 2 settings"):
        best_of([1, 2], lambda c: math.nan)


def test_best_of_passes_over_what_cannot_be_solved(normal):
    x = normal(9, 1).float()
    same = torch.cat([x, x])
    gram = KERNEL(same, same)
    assert choose_reg(gram, gram, [1e-30, 1e-2]) == 1e-2
    with pytest.raises(ValueError, match="none of 1 settings"):
        choose_reg(gram, gram, [1e-30])


# leave-one-out


def test_choose_reg_is_the_least_brute_force_score(normal):
    x = normal(18, 2)
    y = x + 0.3 * normal(18, 2)
    G, K = (reference.gaussian_gram(v.numpy(), v.numpy(), 0.7) for v in (x, y))
    regs = [1e-5, 1e-3, 1e-2, 0.1, 1.0]
    scores = [reference.cme_loo(G, K, reg) for reg in regs]
    assert choose_reg(KERNEL(x, x), KERNEL(y, y), regs) == regs[int(np.argmin(scores))]
    assert 0 < np.argmin(scores) < 4, "the least must lie inside"


def test_choose_transition_reg_takes_pairs_within_sequences():
    memory, regs = recordings(12, 9), (1e-4, 1e-3, 1e-2, 0.1)
    source = torch.cat([s.states[:-1] for s in memory]).numpy()
    target = torch.cat([s.states[1:] for s in memory]).numpy()
    G, K = (reference.gaussian_gram(v, v, 0.7) for v in (source, target))
    scores = [reference.cme_loo(G, K, reg) for reg in regs]
    assert choose_transition_reg(KERNEL, memory, regs) == regs[int(np.argmin(scores))]
    seen = []
    kernel = lambda a, b: seen.append(a) or KERNEL(a, b)  # noqa: E731
    choose_transition_reg(kernel, memory, regs)
    np.testing.assert_array_equal(seen[0].numpy(), source)
    np.testing.assert_array_equal(seen[1].numpy(), target)


# kernel means


@pytest.mark.parametrize("folds", [2, 4, 13])
def test_kernel_mean_cv_is_the_loop(normal, folds):
    x = normal(13, 1)
    z = x + 0.4 * normal(13, 1)
    total = 0.0
    for f in range(folds):
        train, held = (
            [i for i in range(13) if i % folds != f],
            [i for i in range(13) if i % folds == f],
        )
        n = len(train)
        G = reference.gaussian_gram(x[train].numpy(), x[train].numpy(), 0.5)
        points, weights = list(z[train].numpy()), np.zeros(n)
        for i in held:
            weights += reference.cme(
                G, reference.gaussian_gram(x[train].numpy(), x[i : i + 1].numpy(), 0.5)[:, 0], 0.01
            ) / len(held)
        points += list(z[held].numpy())
        c = np.append(
            weights, [-1 / len(held)] * len(held)
        )  # the difference of two embeddings, as one
        total += sum(
            c[i] * c[j] * reference.gaussian(points[i], points[j], 0.7)
            for i in range(len(c))
            for j in range(len(c))
        )
    found = kernel_mean_cv(
        conditional_mean(partial(gaussian, bandwidth=0.5), 0.01), KERNEL, x, z, folds=folds
    )
    assert found.item() == pytest.approx(total / folds, rel=1e-8)


def test_kernel_mean_cv_refuses_folds_without_points(normal):
    x = normal(5, 1)
    for folds in (1, 6):
        with pytest.raises(ValueError, match=f"{folds} folds of 5 points"):
            kernel_mean_cv(conditional_mean(KERNEL, 0.1), KERNEL, x, x, folds=folds)


# the paper's grid


class Watched(KBF):
    """A filter that keeps every memory that it is conditioned on, and the numbers that
    it had then.
    """

    seen: list[tuple[list[Recording], Tensor, Tensor]]

    def fit(self, memory: Any) -> KernelBayesFilter:
        self.seen = [
            *getattr(self, "seen", []),
            (memory, self.log_bandwidth.exp(), self.log_reg.exp()),
        ]
        return super().fit(memory)


@pytest.fixture
def small_grid(monkeypatch):
    """Two scales and two ridges in place of 18 settings."""
    monkeypatch.setattr(hyperparameters, "PAPER_SCALES", (1.0, 0.25))
    monkeypatch.setattr(hyperparameters, "PAPER_REGS", (1e-4, 5e-4))


def test_the_grid_is_the_published_one():
    """The settings of the published code of Xu et al. (2022): 18 for each filter."""
    assert hyperparameters.PAPER_SCALES == (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
    assert hyperparameters.PAPER_REGS == (5e-5, 1e-4, 5e-4)


def test_paper_grid_is_the_least_validation_error(small_grid):
    """All settings by hand: the published kernel exp(-||a - b||^2 / s), and the error of each on
    the last part.
    """
    memory = recordings(40, 20)
    head = [Recording(memory[0].states[:22], memory[0].obs[:22]), memory[1]]
    states, obs = (torch.cat([s[k] for s in memory]) for k in (0, 1))
    source, target = (
        torch.cat([s.states[part] for s in memory]) for part in (slice(-1), slice(1, None))
    )
    squared = [
        np.sort(np.square(v.numpy()[:, None] - v.numpy()).sum(-1).ravel()) for v in (states, obs)
    ]
    s_z, s_x = (
        d[(len(d) - 1) // 2] for d in squared
    )  # of an even number, the lower of the two in the middle
    settings, errors = [], []
    for scale in (1.0, 0.25):
        G, K = (
            np.exp(-np.square(v.numpy()[:, None] - v.numpy()).sum(-1) / (scale * s_z))
            for v in (source, target)
        )
        etas = (5e-5, 1e-4, 5e-4, 1e-3, 5e-3)
        eta = etas[int(np.argmin([reference.cme_loo(G, K, reg) for reg in etas]))]
        for reg in (1e-4, 5e-4):
            widths = [math.sqrt(scale * s / 2) for s in (s_z, s_z, s_x)]
            settings.append([*widths, eta, eta, reg])
            model = KBF(normalise=False, rank=None)
            model.set(torch.tensor(widths, dtype=F64), torch.tensor([eta, eta, reg], dtype=F64))
            with torch.no_grad():
                found = rollout(model.fit(head), memory[0].obs[None, 22:]).estimates[0]
            errors.append((found - memory[0].states[22:]).square().sum(-1).mean().item())
    model = KBF(normalise=False, rank=None, select="paper")
    model.prepare(memory)
    np.testing.assert_allclose(
        list(model.hyperparameters().values()), settings[int(np.argmin(errors))], rtol=1e-9
    )
    assert 0 < np.argmin(errors) < 3, "neither the first nor the last that is tried"


def test_paper_grid_filters_over_the_first_part_only(small_grid):
    """Nothing of the last part is in the memory that is judged by it, and the choice is not the
    last one tried.
    """
    (memory,) = recordings(40)
    model = Watched(normalise=False)
    paper_grid(model, [memory])
    assert len(model.seen) == 4
    for (head,), _, _ in model.seen:
        assert torch.equal(head.states, memory.states[:28])
        assert torch.equal(head.obs, memory.obs[:28])
    tried = torch.stack([torch.cat([b, r]) for _, b, r in model.seen])
    chosen = torch.cat([model.log_bandwidth.exp(), model.log_reg.exp()])
    assert (tried == chosen).all(-1).sum() == 1
    for _, bandwidths, regs in model.seen:
        assert bandwidths[0] == bandwidths[1]
        assert regs[0] == regs[1]


# nothing of the test part


@pytest.mark.parametrize("select", ["median", "paper", "kulsif_loo", "kernel_mean_cv"])
def test_bandwidths_do_not_change_when_the_test_part_changes(small_grid, select):
    """The same training part with another test part behind it, and with one that is filled with NaN
    in place.
    """
    problem = rotation()
    data = [SyntheticData(problem, 40, n_test=n, seed=3) for n in (5, 60, 60)]
    assert torch.equal(data[0].train[0].obs, data[1].train[0].obs)
    data[2].test[0].states.fill_(math.nan)
    data[2].test[0].obs.fill_(math.nan)
    numbers, estimates = [], []
    test = recordings(8)[0].obs[None]
    for d in data:
        model = KBF(select=select)
        model.prepare(d.train)
        numbers.append(model.hyperparameters())
        with torch.no_grad():
            estimates.append(rollout(model.fit(d.train), test).estimates)
    assert numbers[0] == numbers[1] == numbers[2]
    assert torch.equal(estimates[0], estimates[1])
    assert torch.equal(estimates[0], estimates[2])
    other = KBF(select=select)
    other.prepare(SyntheticData(problem, 40, n_test=5, seed=4).train)
    assert other.hyperparameters() != numbers[0]


def test_median_bandwidths_are_factors_of_the_training_medians():
    memory = recordings(30, 20)
    model = KBF(factors=(0.2, 0.3, 0.4), regs=(1e-3, 2e-3, 3e-3))
    model.prepare(memory)
    z, x = (median_distance(torch.cat([s[k] for s in memory])).item() for k in (0, 1))
    expected = [0.2 * z, 0.3 * z, 0.4 * x, 1e-3, 2e-3, 3e-3]
    np.testing.assert_allclose(list(model.hyperparameters().values()), expected, rtol=1e-12)


# the papers' own scores


def test_the_ridge_of_the_ratio_has_the_lowest_score_of_kulsif():
    """The priors by loops, the leave-one-out score by fits without each pair."""
    memory = recordings(26, 16)
    z, later = (
        torch.cat([s.states[part] for s in memory]).numpy() for part in (slice(-1), slice(1, None))
    )
    regs = (1e-4, 3e-3, 1e-1)
    k = lambda a, b: reference.gaussian(a, b, 0.7)  # noqa: E731
    scores = np.zeros(3)
    for i in np.linspace(0, len(z) - 1, 10).astype(int):
        nearest = np.argsort(((z - z[i]) ** 2).sum(1))
        u, others = later[nearest[:4]], later[nearest[4:]]
        scores += [reference.kulsif_loo(others, u, k, reg) for reg in regs]
    found = choose_ratio_reg(KERNEL, memory, regs)
    assert found == regs[int(np.argmin(scores))]
    with pytest.raises(FitError, match="at least 20 pairs of successive steps, got 9"):
        choose_ratio_reg(KERNEL, recordings(10))


def test_kulsif_loo_is_the_papers_grid_with_that_ridge(small_grid, monkeypatch):
    memory = recordings(60)
    found = {}
    for select in ("paper", "kulsif_loo"):
        model = KBF(normalise=False, select=select)
        model.prepare(memory)
        numbers = found[select] = model.hyperparameters()
        assert numbers["reg/ratio"] == pytest.approx(numbers["reg/transition"])  # lambda' = eta
    width = found["kulsif_loo"]["bandwidth/ratio"]
    eta = choose_ratio_reg(partial(gaussian, bandwidth=width), memory)
    assert found["kulsif_loo"]["reg/ratio"] == pytest.approx(eta)
    assert found["paper"]["reg/ratio"] != pytest.approx(eta)  # the case tells them apart


@pytest.mark.parametrize(
    ("rule", "ratio"), [("importance_weighted", "kulsif"), ("original", "tikhonov")]
)
def test_kernel_mean_grid_by_loops(small_grid, rule, ratio):
    """Every candidate: posteriors of the left-out observations, by NumPy; the mean posterior in the
    RKHS of the median distance.
    """
    memory = recordings(40)
    z, x = memory[0].states.numpy(), memory[0].obs.numpy()
    n, fold = len(z), np.arange(40) % 10
    common = median_distance(memory[0].states).item()
    scores, settings = [], []
    for bandwidths, regs in hyperparameters.paper_candidates(
        KBF(rule=rule, ratio=ratio), memory, choose_transition_reg
    ):
        (s_z, _, s_x), (eta, _, reg) = bandwidths.tolist(), regs.tolist()
        total = 0.0
        for f in range(10):
            train, held = fold != f, fold == f
            G_Z = reference.gaussian_gram(z[train], z[train], s_z)
            gamma = reference.tikhonov(G_Z, G_Z.mean(1), eta)
            G_X = reference.gaussian_gram(x[train], x[train], s_x)
            g = reference.gaussian_gram(x[train], x[held], s_x)
            if rule == "original":
                w = [reference.original_rule(gamma, G_X, q, reg) for q in g.T]
            else:
                w = [reference.importance_weighted_rule(gamma.clip(0), G_X, q, reg) for q in g.T]
            points = np.concatenate([z[train], z[held]])
            signed = np.concatenate([np.mean(w, 0), np.full(held.sum(), -1 / held.sum())])
            total += signed @ reference.gaussian_gram(points, points, common) @ signed / 10
        scores.append(total)
        settings.append([*bandwidths.tolist(), *regs.tolist()])
    model = KBF(rule=rule, ratio=ratio, select="kernel_mean_cv")
    model.prepare(memory)
    assert n == 40 and len({round(s, 12) for s in scores}) == len(scores)
    np.testing.assert_allclose(
        list(model.hyperparameters().values()), settings[int(np.argmin(scores))], rtol=1e-9
    )


def test_kernel_mean_grid_of_other_ratios(small_grid):
    for ratio in ("relative", "one"):
        model = KBF(ratio=ratio, select="kernel_mean_cv")
        model.prepare(recordings(40))
        assert all(math.isfinite(v) for v in model.hyperparameters().values())
