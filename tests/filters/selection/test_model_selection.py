"""Stacks and the net under a model: weights against brute force, mixtures by loops, choices on data
whose best model is known.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import kbf
from kbf.commands.support.baseline_report import baseline_notes
from kbf.commands.support.search_report import selection_notes
from kbf.data.noise_systems import Fork
from kbf.data.synthetic import SyntheticData
from kbf.evaluation.score import score
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.gaussian.kalman import KalmanFilter, LearnedKalman, LinearModel
from kbf.filters.gaussian.learned_ukf import LearnedUKF
from kbf.filters.kernel.kbf import KBF
from kbf.filters.online import RunningFilter
from kbf.filters.regression.window import MeanModel, WindowRidge
from kbf.filters.rollout import rollout
from kbf.filters.selection import auto
from kbf.filters.selection.auto import ModelSelection
from kbf.filters.selection.averaging import averaged, weights_of
from kbf.filters.selection.cross_validation import (
    SHARE_OF_SEARCH,
    STEPS_OF_ENOUGH,
    Attempt,
    Search,
    Trial,
    blocks_of,
    run_blocks,
)
from kbf.filters.smoothing import smooth
from kbf.recording import Recording
from kbf.rkhs.linalg import NotPositiveDefiniteError
from kbf.runtime.deadline import check_deadline
from kbf.runtime.errors import FitError, fit_errors
from kbf.ssm import StateSpaceModel, simulate

F64 = torch.float64


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def linear(noise: float) -> LinearModel:
    """Two components that turn and fade, both seen with noise."""
    return LinearModel(
        A=torch.tensor([[0.9, 0.3], [-0.3, 0.9]], dtype=F64),
        a=torch.zeros(2, dtype=F64),
        Q=0.05 * torch.eye(2, dtype=F64),
        C=torch.eye(2, dtype=F64),
        c=torch.ones(2, dtype=F64),
        R=noise**2 * torch.eye(2, dtype=F64),
        m0=torch.zeros(2, dtype=F64),
        P0=torch.eye(2, dtype=F64),
    )


def recording(n=600, noise=0.5, seed=0) -> Recording:
    model = linear(noise)
    known = StateSpaceModel(
        lambda z: z @ model.A.mT, lambda z: z + 1, model.Q, model.R, model.m0, model.P0
    )
    drawn = simulate(known, torch.zeros(1, 2, dtype=F64), n, generator(seed))
    return Recording(drawn.states[0], drawn.obs[0])


@pytest.fixture(autouse=True)
def without_more(monkeypatch):
    """Only plain candidates: the others take long, and have tests of their own.

    On a linear system the Kalman filters with and without velocity are alike: one is a candidate.
    """
    monkeypatch.delitem(auto.BASELINES, "kalman_velocity")
    for others in ("LEARNED", "PUBLISHED", "SLOW"):
        monkeypatch.setattr(auto, others, {})


# weights


def test_weights_are_inverse_powers_of_the_errors():
    """By hand: errors 1, 1.2 and 3 have the inverse fourth powers 1, 0.48 and 0.01."""
    errors = torch.tensor([[1.0, 3.0], [1.2, 3.0], [3.0, 3.0]], dtype=F64)
    a = weights_of(errors)
    expected = torch.tensor([1, 1.2**-4, 3.0**-4], dtype=F64)
    torch.testing.assert_close(a[:, 0], expected / expected.sum())
    torch.testing.assert_close(a[:, 1], torch.full((3,), 1 / 3, dtype=F64))
    alone = weights_of(errors[:, :1])
    torch.testing.assert_close(
        alone[:, 0], torch.tensor([1, 1.2**-4, 0], dtype=F64) / (1 + 1.2**-4)
    )
    assert weights_of(torch.tensor([[1e-300, 0.0], [1.0, 0.0]], dtype=F64)).tolist() == [
        [1, 0.5],
        [0, 0.5],
    ]


def test_the_average_of_models_that_are_equal_is_that_of_an_oracle():
    """Independent errors of one variance: equal weights are best, with a third of the error."""
    noise = torch.randn(3, 8, 500, 1, generator=generator(), dtype=F64)
    found = {
        name: Trial([], list(each), list(range(8)), each.square().mean((1, 2)))
        for name, each in zip("abc", noise, strict=True)
    }
    weights, scores = averaged(found, torch.ones(1, dtype=F64))
    assert float(scores.mean()) == pytest.approx(1 / 3, rel=0.1)
    oracle = noise.mean(0).square().mean()
    assert float(oracle) <= float(scores.mean()) < 1.01 * float(oracle)
    assert sum(float(each) for each in weights.values()) == pytest.approx(1)


def test_an_average_is_scored_by_its_weighted_residuals():
    """By a loop over blocks."""
    data, scale = recording(400), torch.ones(2, dtype=F64)
    first, second = (
        Recording(data.states[s], data.obs[s]) for s in (slice(0, 200), slice(200, 400))
    )
    search = Search([([second], [first]), ([first], [second])], scale)
    search.attempt("kalman", LearnedKalman().fit)
    search.attempt("window_ridge", WindowRidge(3).fit)
    search.finish()
    weights, scores = averaged(search.found, scale)
    assert set(weights) == {"kalman", "window_ridge"}
    for k, found in enumerate(scores.tolist()):
        parts = [weights[name] * search.found[name].residuals[k] for name in weights]
        assert found == pytest.approx(float(torch.stack(parts).sum(0).square().mean()))


# the average as a filter


def two_filters():
    return {"sure": KalmanFilter(linear(0.3)), "unsure": KalmanFilter(linear(2.0))}


def stack_of(filters, weights):
    return EnsembleFilter(
        filters, torch.tensor(weights, dtype=F64), torch.eye(2, dtype=F64).expand(2, 2, 2)
    )


def test_a_stack_is_the_weighted_mean_of_filters_that_run_beside_each_other():
    filters, weights = two_filters(), [[0.25, 1.0], [0.75, 0.0]]
    data = recording(40)
    obs, seen = data.obs[None], torch.rand(1, 40, generator=generator(2)) > 0.3
    own = [rollout(each, obs, mask=seen).estimates for each in filters.values()]
    run = rollout(stack_of(filters, weights), obs, mask=seen)
    torch.testing.assert_close(
        run.estimates, own[0] * torch.tensor(weights[0]) + own[1] * torch.tensor(weights[1])
    )


def test_its_covariance_is_that_of_the_mixture():
    """With equal weights of both components: by the law of total covariance."""
    filters, a = two_filters(), [0.25, 0.75]
    stack = stack_of(filters, [[a[0]] * 2, [a[1]] * 2])
    state = rollout(stack, recording(10).obs[None]).state
    means = [
        each.estimate(part)[0]
        for each, part in zip(filters.values(), stack.parts(state), strict=True)
    ]
    middle = a[0] * means[0] + a[1] * means[1]
    expected = torch.zeros(2, 2, dtype=F64)
    for share, mean, each, part in zip(a, means, filters.values(), stack.parts(state), strict=True):
        expected += share * (each.covariance(part)[0] + torch.outer(mean - middle, mean - middle))
    torch.testing.assert_close(stack.covariance(state)[0], expected)


def test_what_gives_no_covariance_has_that_of_its_held_out_errors():
    data = recording(100)
    filters = {"ridge": WindowRidge(2).fit(data)}
    filters["ridge"].spread = None
    spread = torch.tensor([[[2.0, 0.5], [0.5, 1.0]]], dtype=F64)
    stack = EnsembleFilter(filters, torch.ones(1, 2, dtype=F64), spread)
    torch.testing.assert_close(stack.covariance(rollout(stack, data.obs[None]).state), spread)


def test_a_stack_runs_live_and_its_state_is_saved(tmp_path):
    stack, obs = stack_of(two_filters(), [[0.5, 0.5], [0.5, 0.5]]), recording(20).obs
    whole, first, second = RunningFilter(stack), RunningFilter(stack), RunningFilter(stack)
    for x in obs[:10]:
        whole.step(x[None]), first.step(x[None])
    first.save(tmp_path / "state.npz")
    second.load(tmp_path / "state.npz")
    for x in obs[10:]:
        torch.testing.assert_close(second.step(x[None]), whole.step(x[None]), rtol=0, atol=0)


# the choice


class Wrong(nn.Module):
    """A model that has learned nothing: its estimates are off by ten, and it is quite
    sure of them.
    """

    def prepare(self, memory, generator=None):
        self.prepared = True

    def fit(self, memory):
        return KalmanFilter(linear(0.5)._replace(c=10 * torch.ones(2, dtype=F64)))


def test_a_model_that_is_wrong_is_replaced_by_the_right_one():
    """The data are linear and Gaussian: the net catches by the Kalman filter, whose error it then
    has.
    """
    data, new = recording(600), recording(400, seed=1)
    net = ModelSelection(Wrong(), name="wrong")
    net.prepare([data])
    assert net.main.prepared and net.used() == ["kalman"]
    note = next(row.note for row in net.candidates if row.model == "wrong")
    assert "stopped early" in note
    caught, kalman = (
        rollout(each.fit(data), new.obs[None]).estimates for each in (net, LearnedKalman())
    )
    torch.testing.assert_close(caught, kalman, rtol=0, atol=0)


class Slow(LearnedKalman):
    """Takes three seconds for each fold."""

    def fit(self, memory):
        time.sleep(3)
        return super().fit(memory)


def test_plain_models_are_compared_without_a_budget_and_others_are_not_started():
    net = ModelSelection(Wrong(), name="main", budget=1e-9)
    net.prepare([recording(300)])
    notes = {row.model: row.note for row in net.candidates}
    assert "the budget of 1e-09 s is spent" in notes["main"] and not hasattr(net.main, "prepared")
    assert "main" not in net.used() and "kalman" in net.used()
    assert {name for name, note in notes.items() if not note} >= set(auto.BASELINES)


def test_a_model_that_would_take_longer_than_the_budget_is_stopped_early(monkeypatch):
    """By the time of its first fold, three seconds: two other folds and the fit need nine."""
    monkeypatch.setattr(auto, "LEARNED", {"slow": lambda seed: Slow()})
    net = ModelSelection(LearnedKalman(), name="main", budget=9.0)
    net.prepare([recording(300)])
    note = next(row.note for row in net.candidates if row.model == "slow")
    assert note.startswith("stopped early: it needs ") and "by its first part" in note


def test_one_long_part_selects_a_model_and_is_calibrated_by(monkeypatch):
    """The weights of the average are those of its blocks."""
    monkeypatch.setattr(auto, "LEARNED", {})
    monkeypatch.setattr(Search, "affordable_parts", lambda self: 1)
    net = ModelSelection(LearnedKalman(), name="main", budget=60.0)
    net.prepare([recording(600)])
    assert len(net.held_out_filters) == 1
    assert "average" in {row.model for row in net.candidates}


class Endless(LearnedKalman):
    """Never ends its preparation, unless it is stopped."""

    def prepare(self, memory, generator=None):
        while True:
            check_deadline()


def test_a_main_model_that_takes_too_long_is_stopped_and_another_is_selected():
    net = ModelSelection(Endless(), name="main", budget=10.0)
    start = time.perf_counter()
    net.prepare([recording(300)])
    assert time.perf_counter() - start < 60
    assert "main" not in net.used() and "kalman" in net.used()
    note = next(row.note for row in net.candidates if row.model == "main")
    assert note == "stopped at the end of the budget"


def test_the_main_model_stays_where_nothing_is_better():
    net = ModelSelection(LearnedKalman(), name="main")
    net.prepare([recording(600)])
    assert net.used() == ["main"]
    names = {"main", "kalman", "window_ridge", "mean", "average"}
    assert {row.model for row in net.candidates} == names


def test_the_choice_is_kept_with_the_model():
    net, other = ModelSelection(Wrong(), name="wrong"), ModelSelection(Wrong(), name="wrong")
    net.prepare([recording(300)])
    for key, value in net.state_dict().items():
        setattr(other, key, value)
    assert other.used() == net.used() and "kalman" in net.used() and "wrong" not in net.used()
    weights = [net.hyperparameters()[f"weight/{name}"] for name in net.used()]
    assert sum(weights) == pytest.approx(1)


class Memorising(LearnedKalman):
    """Remembers what it was conditioned on."""

    def __init__(self):
        super().__init__()
        self.memories = []

    def fit(self, memory):
        self.memories.append(memory)
        return super().fit(memory)


def test_no_filter_is_compared_on_what_it_has_learned_from():
    net = ModelSelection(Memorising(), name="main")
    net.prepare([recording(300)])
    assert len(net.held_out_filters) == len(net.main.memories) == auto.FOLDS
    for memory, (_, held) in zip(net.main.memories, net.held_out_filters, strict=True):
        rows = torch.cat([s.states for s in memory])
        for part in held:
            assert torch.cdist(part.states, rows).min() > 0


def test_without_enough_steps_or_with_silent_sensors_it_is_the_main_model():
    data = recording(60)
    silent = data._replace(obs=torch.where(torch.arange(60)[:, None] == 5, torch.nan, data.obs))
    for memory in ([Recording(data.states[:3], data.obs[:3])], [silent]):
        net = ModelSelection(Wrong(), name="wrong")
        net.prepare(memory)
        assert net.used() == ["wrong"] and not net.candidates


@pytest.mark.slow
def test_models_that_are_good_at_different_components_are_stacked(monkeypatch):
    """Two halves of the truth: each component is told by one model; the stack has both, and a mean
    error below each.
    """

    class Half(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.k = k

        def prepare(self, memory, generator=None):
            pass

        def fit(self, memory):
            filter, mean = LearnedKalman().fit(memory), MeanModel().fit(memory)
            weights = torch.zeros(2, 2, dtype=F64)
            weights[0, self.k] = weights[1, 1 - self.k] = 1
            return EnsembleFilter(
                {"own": filter, "mean": mean}, weights, torch.eye(2, dtype=F64).expand(2, 2, 2)
            )

    monkeypatch.setattr(auto, "BASELINES", {"mean": lambda seed: MeanModel()})
    monkeypatch.setattr(
        auto, "LEARNED", {"first": lambda seed: Half(0), "second": lambda seed: Half(1)}
    )
    net = ModelSelection(MeanModel(), name="main")
    net.prepare([recording(800)])
    assert set(net.used()) == {"first", "second"}
    best = {row.model: row.nmse for row in net.candidates}
    assert best["average"] < min(best["first"], best["second"])


def test_a_stack_is_smoothed_as_its_members_are():
    """Those that have no smoother stay as they are; without any there is none."""
    data = recording(60)
    given = {"kalman": LearnedKalman().fit([data]), "mean": MeanModel().fit([data])}
    weights = torch.tensor([[0.7, 1.0], [0.3, 0.0]], dtype=F64)
    spreads = torch.eye(2, dtype=F64).expand(2, 2, 2)
    found = smooth(EnsembleFilter(given, weights, spreads), data.obs[None]).estimates
    members = [
        smooth(given["kalman"], data.obs[None]).estimates,
        rollout(given["mean"], data.obs[None]).estimates,
    ]
    torch.testing.assert_close(
        found, sum(a * each for a, each in zip(weights, members, strict=True))
    )
    with pytest.raises(ValueError, match="has no smoother"):
        smooth(EnsembleFilter({"mean": given["mean"]}, weights[1:], spreads[1:]), data.obs[None])


# words


def test_remarks_name_what_the_data_forbid():
    g = generator()
    train, states = (
        torch.randn(500, 3, generator=g, dtype=F64),
        torch.randn(200, 3, generator=g, dtype=F64),
    )
    states[:100, 1] += 10  # leaves the training region
    estimates = states + torch.tensor([0.1, 0.1, 5.0], dtype=F64)  # the third rules the error
    found = {"kbf": torch.tensor([0.5, 0.1, 1.2]), "kalman": torch.tensor([0.3, 0.1, 0.99])}
    ratio_dim = " | ".join(
        baseline_notes(["place", "speed", "mood"], found, train, states, estimates)
    )
    assert "no estimator predicts mood better than a constant" in ratio_dim
    assert (
        "leave the training region, in which speed is from" in ratio_dim
        and "in which place" not in ratio_dim
    )
    assert "% of test.mse is the error of mood" in ratio_dim
    assert "kalman has a smaller error on this test part than kbf: model=kalman" in ratio_dim
    fine = {"kbf": torch.full((3,), 0.1), "kalman": torch.full((3,), 0.2)}
    assert baseline_notes(["a", "b", "c"], fine, train, train[:100], train[:100] + 0.1) == []


@pytest.mark.slow
def test_the_published_filter_is_taken_where_it_is_better(monkeypatch):
    """Moves of two modes and a main model that knows of one: the filter over the recording needs no
    law at all.
    """
    monkeypatch.undo()
    for others in ("LEARNED", "SLOW"):
        monkeypatch.setattr(auto, others, {})
    data = SyntheticData(Fork(), n_train=500, n_test=200, seed=1000)
    model = ModelSelection(LearnedKalman(), name="main")
    model.prepare(data.train)
    assert model.used() == ["kbf_median"]
    assert {row.model for row in model.candidates} >= {"kbf_median", "main", "window_ridge"}
    errors = [
        float(score(each.fit(data.train), data.test).mse.mean())
        for each in (model, LearnedKalman())
    ]
    assert errors[0] < 0.95 * errors[1]


@pytest.mark.parametrize(("error", "taken"), [(0.96, {"main", "mean"}), (0.98, {"main"})])
def test_the_average_is_selected_if_its_error_is_smaller_by_enough(error, taken, monkeypatch):
    def given(found, scale):
        weights = {"main": torch.tensor([0.6]), "mean": torch.tensor([0.4])}
        return weights, error * found["main"].scores

    monkeypatch.setattr(auto, "averaged", given)
    search = Search([], torch.ones(1, dtype=F64))
    ones = [torch.ones(4, 1, dtype=F64)] * 8
    scores = {"main": torch.ones(8, dtype=F64), "mean": 2 * torch.ones(8, dtype=F64)}
    search.found |= {name: Trial([], ones, list(range(8)), each) for name, each in scores.items()}
    model = ModelSelection(LearnedKalman())
    model.select(search)
    assert set(model.used()) == taken
    model = ModelSelection(LearnedKalman(), require=["smooth"])
    model.select(search)
    assert model.used() == ["main"]


def test_stretches_are_as_long_as_a_fold_allows():
    """`MIN_BLOCKS` of `SHORT_BLOCK` steps at first, then `MAX_BLOCKS` of up to `LONG_BLOCK` steps.

    Short recordings are taken whole, as many as have the steps of the long blocks.
    """

    def lengths(*steps):
        return [
            len(s.states)
            for s in blocks_of([Recording(torch.zeros(n, 1), torch.zeros(n, 1)) for n in steps])
        ]

    assert lengths(100) == [25] * 4
    assert lengths(480) == [120] * 4
    assert lengths(960) == [120] * 8
    assert lengths(4000) == [500] * 8
    assert lengths(100_000) == [1000] * 8
    assert lengths(*[150] * 30) == [150] * 30
    assert lengths(*[100] * 400) == [100] * 80
    assert lengths(*[1700] * 28)[:2] == [1000, 1000] and len(lengths(*[1700] * 28)) == 8


def test_recordings_that_do_not_speak_for_each_other_are_held_out_whole():
    """Each has a sensor of its own: within a recording it tells everything, of another one nothing.

    What is left is the mean.
    """
    g = torch.Generator().manual_seed(0)
    z = [torch.randn(300, 1, generator=g, dtype=F64) for _ in range(3)]
    memory = [
        Recording(each, torch.cat([turn * each, torch.full_like(each, turn)], 1))
        for each, turn in zip(z, (1, -1, 0), strict=True)
    ]
    memory = [
        s._replace(obs=s.obs + 0.01 * torch.randn(s.obs.shape, generator=g, dtype=F64))
        for s in memory
    ]
    net = ModelSelection(LearnedKalman(), name="main")
    net.prepare(memory)
    assert len(net.held_out_filters) == 3 and all(
        len(part) == 1 and len(part[0].states) == 300 for _, part in net.held_out_filters
    )
    rows = {row.model: row.nmse for row in net.candidates}
    assert rows["mean"] < 1.1 and rows["window_ridge"] > 1.5
    assert net.used() == ["mean"]
    assert ["always answers the mean" in ratio_dim for ratio_dim in selection_notes(net)] == [True]
    assert selection_notes(ModelSelection(MeanModel(), name="mean")) == []


# candidates that cannot be fitted


class Broken(LearnedKalman):
    """Raises an error in `fit`."""

    def __init__(self, error: Exception):
        super().__init__()
        self.error = error

    def fit(self, memory):
        raise self.error


def test_a_fit_error_of_one_candidate_is_reported_and_the_others_are_compared(monkeypatch):
    monkeypatch.setitem(auto.BASELINES, "broken", lambda seed: Broken(FitError("two steps")))
    net = ModelSelection(LearnedKalman(), name="main")
    net.prepare([recording(300)])
    rows = {row.model: row for row in net.candidates}
    assert rows["broken"].note == "two steps" and rows["broken"].nmse is None
    assert all(rows[name].nmse is not None for name in ("main", "kalman", "window_ridge", "mean"))


@pytest.mark.parametrize("error", [ValueError("shape"), RuntimeError("3x4 and 5x6")])
def test_an_error_of_shapes_in_a_candidate_is_raised(monkeypatch, error):
    monkeypatch.setitem(auto.BASELINES, "broken", lambda seed: Broken(error))
    with pytest.raises(type(error), match=str(error)):
        ModelSelection(LearnedKalman(), name="main").prepare([recording(300)])
    search = Search([([recording(50)], [recording(50)])], torch.ones(2, dtype=F64))

    def fit(memory):
        return memory[0].states @ memory[0].states

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        search.attempt("main", fit)


def test_a_singular_matrix_is_a_fit_error():
    with pytest.raises(FitError, match="singular"), fit_errors():
        torch.linalg.inv(torch.zeros(2, 2))
    assert kbf.FitError is FitError and issubclass(NotPositiveDefiniteError, FitError)


def test_only_filters_with_a_smoother_are_candidates_where_they_must_smooth():
    states = torch.cumsum(torch.randn(300, 2, generator=generator(), dtype=F64), 0) / 5
    obs = states + 0.3 * torch.randn(states.shape, generator=generator(1), dtype=F64)
    net = ModelSelection(LearnedKalman(), name="kalman", require=["smooth"])
    net.prepare([Recording(states, obs)])
    notes = {row.model: row.note for row in net.candidates}
    assert notes["window_ridge"] == notes["mean"] == "it cannot smooth"
    assert net.used() == ["kalman"]
    smooth(net.fit([Recording(states, obs)]), obs[None])


def test_repeats_of_held_sensors_are_missing_readings_of_all_candidates():
    """A sensor that is read every fourth step."""
    data, new = recording(800), recording(2000, seed=1)
    held = [
        r._replace(obs=torch.stack([r.obs[:, 0], r.obs[torch.arange(len(r.obs)) // 4 * 4, 1]], 1))
        for r in (data, new)
    ]
    net = ModelSelection(LearnedKalman(), name="main")
    net.prepare(held[:1])
    assert net.held.tolist() == [False, True]
    assert {row.model for row in net.candidates} >= {"main", "kalman", "window_ridge"}
    assert not net.allow_missing_sensors
    models = (net, LearnedKalman())
    runs = [rollout(each.fit(held[:1]), held[1].obs[None]) for each in models]
    found, raw = ((run.estimates[0] - new.states).square().mean().item() for run in runs)
    assert found < 0.9 * raw
    plain = ModelSelection(LearnedKalman(), name="main")
    plain.prepare([data])
    assert plain.held.tolist() == [False, False]


def test_the_learned_ukf_is_a_candidate_where_a_program_is_required(monkeypatch):
    """All candidates have programs (tests/export/test_candidates.py), stacks as well."""
    model = LearnedUKF(kinds=("linear",))
    monkeypatch.setattr(auto, "LEARNED", {"ukf_learned": lambda seed: model})
    net = ModelSelection(LearnedKalman(), name="main", require=("export",))
    net.prepare([recording(300)])
    found = {row.model: row.note for row in net.candidates}
    assert "export" not in found["ukf_learned"] and "average" in found


@pytest.mark.parametrize(("held", "expected"), [(True, [1, 1]), (False, []), ("auto", [1, 0])])
def test_repeats_are_missing_as_data_held_has_it(held, expected, monkeypatch):
    for others in ("LEARNED", "PUBLISHED", "SLOW"):
        monkeypatch.setattr(auto, others, {})
    data = recording(300)
    repeated = data.obs.clone()
    repeated[1::2, 0] = repeated[:-1:2, 0]
    net = ModelSelection(LearnedKalman(), name="main", held=held)
    net.prepare([data._replace(obs=repeated)])
    assert net.held.int().tolist() == expected
    notes = [note for note in selection_notes(net, ["gps", "imu"]) if "repeat exactly" in note]
    names = [name for name, here in zip(("gps", "imu"), expected, strict=False) if here]
    assert [f"readings of {', '.join(names)} repeat exactly" in note for note in notes] == (
        [True] if names else []
    )


def test_another_value_of_data_held_is_refused():
    with pytest.raises(ValueError, match=r"data\.held must be auto, true or false"):
        ModelSelection(LearnedKalman(), held="sometimes")


def test_late_sensors_of_the_selected_filter_are_named(monkeypatch):
    monkeypatch.setattr(
        auto, "LEARNED", {"ukf_learned": lambda seed: LearnedUKF(kinds=("linear",), factors=(1.0,))}
    )
    net = ModelSelection(MeanModel(), name="main")
    net.weights = torch.zeros(len(net.models), 2, dtype=F64)
    net.weights[list(net.models).index("ukf_learned")] = 1.0
    learned = net.models["ukf_learned"]
    assert isinstance(learned, LearnedUKF)
    learned.delays = torch.tensor([0, 3])
    assert selection_notes(net, ["gps", "imu"]) == ["NOTE: imu is late by 3 steps, and filtered so"]


# candidates


def test_networks_are_candidates_from_some_thousands_of_steps_on(monkeypatch):
    names = ("window_boosting", "gru", "mamba")
    monkeypatch.setattr(auto, "SLOW", {name: lambda seed: MeanModel() for name in names})
    net = auto.ModelSelection(LearnedKalman(), name="kalman")
    for total, expected in (
        (499, ()),
        (500, names[:1]),
        (2000, names[:1]),
        (2001, names[:2]),
        (5000, names),
    ):
        assert tuple(name for name in net.in_order(total) if name in names) == expected


def test_a_checkpoint_from_before_a_candidate_loads_without_it(monkeypatch):
    """The filter is that of the checkpoint; a candidate that was compared must be there."""
    data = [recording(400)]
    before = auto.ModelSelection(LearnedKalman(), name="kalman")
    before.prepare(data)
    monkeypatch.setattr(auto, "SLOW", {"late": lambda seed: KBF()})
    after = auto.ModelSelection(LearnedKalman(), name="kalman")
    for name in ("weights", "spreads", "scores", "held"):
        setattr(after, name, torch.zeros_like(getattr(before, name)))
    state = before.state_dict()
    after.load_state_dict(dict(state))
    assert after.used() == before.used()
    obs = recording(50, seed=1).obs[None]
    found, expected = (rollout(net.fit(data), obs).estimates for net in (after, before))
    assert torch.equal(found, expected)
    assert set(after.state_dict()) > set(state)
    lacking = {k: v for k, v in after.state_dict().items() if not k.startswith("models.late")}
    after.weights = torch.cat([after.weights, 0 * after.weights[:1]])  # it was compared
    with pytest.raises(RuntimeError, match=r"models\.late"):
        after.load_state_dict({**lacking, "weights": after.weights})


def attempt(first: float, seconds: float) -> Attempt:
    """A model that has been run through the first part."""
    made = Attempt(LearnedKalman().fit, run_blocks, timed=True)
    made.first, made.seconds_of_first = first, seconds
    return made


def test_time_is_reserved_for_the_two_best_models():
    parts: Any = [([], [])] * 5
    search = Search(parts, torch.ones(1), budget=100.0 / SHARE_OF_SEARCH)
    assert search.reserved() == 0
    search.running = {"c": attempt(3.0, 9.0), "a": attempt(1.0, 1.0), "b": attempt(2.0, 4.0)}
    assert search.reserved() == 2 * 5 * (1 + 4)
    given = []

    def fit(rest: list[Recording]) -> Any:
        given.append(search.end(search.running["next"]))
        raise FitError("enough")

    search.attempt("next", fit, share=0.5)
    left = given[0] - time.perf_counter()
    assert 0.5 * 48 < left < 0.5 * 50, "half of 100 s less 50 s"


def test_a_model_without_unreserved_time_waits_until_the_best_ones_are_finished():
    """Eight of ten seconds are what the best one needs, twice which is reserved; it takes none."""
    parts: Any = [([recording(60)], [recording(60)])] * 2
    search = Search(parts, torch.ones(2, dtype=F64), budget=10.0 / SHARE_OF_SEARCH)
    search.attempt("best", LearnedKalman().fit)
    search.running["best"].seconds_of_first = 4.0
    search.attempt("next", LearnedKalman().fit, share=0.5)
    assert "next" not in search.running and not search.rows
    search.finish()
    assert [row.model for row in search.rows] == ["best", "next"] and not search.waiting
    assert torch.equal(search.found["next"].scores, search.found["best"].scores)


def test_parts_are_left_out_where_the_best_model_lacks_the_time():
    def affordable(
        *seconds: float, budget: float | None = 100.0 / SHARE_OF_SEARCH, steps: int = 0
    ) -> int:
        held = [Recording(torch.zeros(steps, 1), torch.zeros(steps, 1))]
        search = Search([([], held)] * 5, torch.ones(1), budget=budget)
        search.running = {str(k): attempt(float(k), each) for k, each in enumerate(seconds)}
        return search.affordable_parts()

    assert affordable() == affordable(10.0) == affordable(9.0, 9.0) == 5
    assert affordable(24.0) == affordable(12.0, 12.0) == 4
    assert affordable(30.0) == affordable(15.0, 15.0) == 3
    assert affordable(19.0, 40.0) == 5, "the best one alone"
    assert affordable(40.0) == 5, "it is stopped"
    assert affordable(1e6, budget=None) == 5
    assert affordable(40.0, steps=STEPS_OF_ENOUGH) == 2, "a long part is enough"
    assert affordable(90.0, steps=STEPS_OF_ENOUGH) == 1
    assert affordable(40.0, steps=STEPS_OF_ENOUGH - 1) == 5
