"""Scores against plain loops, the floor, and what is said of many runs."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import scipy.stats
import torch

from kbf.data.synthetic import SyntheticData
from kbf.evaluation.floors import floor
from kbf.evaluation.metrics import mean_and_error, summary, wilcoxon_pairs
from kbf.evaluation.score import check_horizon, score
from kbf.evaluation.scoring_rules import energy_score, sample_energies
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.plots.charts import comparison_figure
from kbf.plots.tracks import save, track_figure
from kbf.recording import Recording
from kbf.ssm import rotation, simulate


@pytest.fixture(scope="module")
def data() -> SyntheticData:
    return SyntheticData(rotation(), n_train=80, n_test=50)


def test_score_is_the_plain_loop(data):
    filter = LearnedKalman().fit(data.train)
    test = data.test[0]
    mask = torch.rand(50, generator=torch.Generator().manual_seed(0)) < 0.8
    sequences = [test, Recording(test.states[:17], test.obs[:17]), test._replace(mask=mask)]
    found = score(filter, sequences, batch_size=2)
    for k, sequence in enumerate(sequences):
        state, errors = filter.init(1), []
        for t in range(len(sequence.states)):
            state = filter.predict(state)
            if sequence.mask is None or sequence.mask[t]:
                state = filter.update(state, sequence.obs[t : t + 1])
            estimate = filter.estimate(state)[0]
            torch.testing.assert_close(found.estimates[k][t], estimate)
            errors.append(((estimate - sequence.states[t]) ** 2).sum())
        torch.testing.assert_close(found.mse[k], torch.stack(errors).mean())


def test_randomness_comes_from_the_seed(data):
    filter = ParticleFilter(rotation(), particles=20).fit(data.train)
    first, again, other = (score(filter, data.test, seed=s) for s in (1, 1, 2))
    assert torch.equal(first.estimates[0], again.estimates[0])
    assert not torch.equal(first.estimates[0], other.estimates[0])
    assert 1 < first.diagnostics["ess"] < 20


def test_what_is_not_finite_is_an_error(data):
    class State(NamedTuple):
        z: torch.Tensor

    class Broken:
        def init(self, batch, *, generator=None):
            return State(torch.zeros(batch, 2))

        def predict(
            self, state, *, generator=None
        ):  # an update that is not finite would be passed over
            return State(state.z + torch.nan)

        def update(self, state, obs):
            return state

        def estimate(self, state):
            return state.z

    with pytest.raises(
        ValueError, match="estimate is not finite at 50 of 50 steps, first at step 0"
    ):
        score(Broken(), data.test)
    spoiled = data.test[0]._replace(obs=data.test[0].obs.clone())
    spoiled.obs[7] = math.inf
    with pytest.raises(ValueError, match="NaN or infinite values in 1 of 50 rows"):
        score(LearnedKalman().fit(data.train), [spoiled])


def test_the_floor_is_below_every_filter_and_known(data):
    """Over 12 sequences of 200 steps: the rotation's floor is 0.0440."""
    start = data.train[0].states[torch.arange(12)]
    states, obs, *_ = simulate(rotation(), start, 200, torch.Generator().manual_seed(0))
    test = [Recording(z, x) for z, x in zip(states, obs, strict=True)]
    least = floor(rotation(), data.train, test, particles=300).mse
    mean, se = mean_and_error(least.tolist())
    assert abs(mean - 0.0440) < 4 * se
    assert se < 0.0015
    assert mean < score(LearnedKalman().fit(data.train), test).mse.mean()


def test_mean_error_and_excess_of_runs():
    errors, floors = [0.05, 0.07, 0.06, 0.065], [0.04, 0.05, 0.045, 0.05]
    told = summary(errors, floors)
    assert told["mse"] == pytest.approx(np.mean(errors))
    assert told["se"] == pytest.approx(scipy.stats.sem(errors))
    assert told["excess"] == pytest.approx(np.mean(errors) / np.mean(floors) - 1)
    assert 0 < told["excess_se"] < 0.1
    assert math.isnan(summary(errors, [*floors[:3], None])["excess"])
    assert math.isnan(mean_and_error([1.0])[1])


def test_wilcoxon_takes_the_seeds_that_both_have():
    rng = np.random.default_rng(0)
    a, b = rng.random(12), rng.random(12) + 0.4
    errors = {"a": dict(enumerate(a)), "b": dict(enumerate(b[:10])), "c": {0: a[0]}}
    rows = {(row["first"], row["second"]): row for row in wilcoxon_pairs(errors)}
    assert rows["a", "b"]["p_value"] == pytest.approx(scipy.stats.wilcoxon(a[:10], b[:10]).pvalue)
    assert rows["a", "b"]["mean_difference"] == pytest.approx((a[:10] - b[:10]).mean())
    assert rows["a", "b"]["seeds"] == 10
    assert math.isnan(rows["a", "c"]["p_value"])


def test_pictures(data, tmp_path):
    test = data.test[0]
    mask = torch.arange(50) % 3 > 0
    save(track_figure(test._replace(mask=mask), test.obs, title="a track"), tmp_path / "track.png")
    images = Recording(torch.randn(9, 6), torch.rand(9, 1, 4, 4))
    save(track_figure(images, images.states), tmp_path / "images.png")
    save(track_figure(Recording(torch.randn(9, 1), torch.randn(9, 3))), tmp_path / "line.png")
    rows = [
        {
            "model": m,
            "n_train": n,
            "mse": 0.05 + 0.01 * k,
            "se": math.nan if m == "b" else 0.002,
            "floor": 0.04 if n > 100 else math.nan,
        }
        for k, m in enumerate("abcdefghijklmn")
        for n in (100, 300)
    ]
    save(comparison_figure(rows, title="all"), tmp_path / "all.png")
    assert {p.name for p in tmp_path.iterdir()} == {
        "track.png",
        "images.png",
        "line.png",
        "all.png",
    }
    assert all(p.stat().st_size > 5000 for p in tmp_path.iterdir())


def test_energy_of_a_weighted_sample():
    """Against the double sum over all points, and 200 repetitions of the draws within their
    Monte-Carlo error.
    """
    generator = torch.Generator().manual_seed(0)
    points, weights = (
        torch.randn(1, 7, 2, generator=generator).double(),
        torch.rand(1, 7, generator=generator).double(),
    )
    weights[0, 2] = 0
    weights, z = weights / weights.sum(), torch.tensor([[0.3, -1.0]]).double()
    w, apart = weights[0], torch.cdist(points[0], points[0])
    exact = w @ (points[0] - z).norm(dim=1) - w @ apart @ w / 2
    found = torch.cat([sample_energies(z, points, weights, generator) for _ in range(200)])
    assert abs(found.mean() - exact) < 4 * found.std() / math.sqrt(200)
    assert sample_energies(torch.full_like(z, torch.nan), points, weights).isnan().all()
    for nothing in (torch.full_like(weights, torch.nan), torch.zeros_like(weights)):
        assert sample_energies(z, points, nothing).isnan().all()
    far = 1e8 * torch.ones_like(z)
    same = [
        sample_energies(a, b, weights, torch.Generator().manual_seed(1))
        for a, b in ((z, points), (z + far, points + far[:, None]))
    ]
    torch.testing.assert_close(*same, rtol=1e-6, atol=0)


def test_a_sample_of_two_modes_has_a_better_energy_score_than_its_gaussian():
    """Half of the states at 1, half at -1, and both in the sample: a Gaussian of variance 1 says
    less.
    """
    z = torch.ones(500, 1).double() * torch.tensor([1.0, -1.0]).double().repeat(250)[:, None]
    points, weights = (
        torch.tensor([[[1.0], [-1.0]]]).double().expand(500, -1, -1),
        torch.full((500, 2), 0.5).double(),
    )
    sample = sample_energies(z, points, weights, torch.Generator().manual_seed(0)).mean().item()
    assert sample == pytest.approx(0.5, rel=0.05)  # 1 - 1 / 2
    assert energy_score(z, torch.zeros_like(z), torch.ones(500, 1, 1).double()) > 0.55


def test_scores_have_the_energy_of_the_filters_sample(data):
    filter = ParticleFilter(rotation(), particles=200).fit(data.train)
    scored = score(
        filter, [data.test[0], data.test[0]._replace(mask=torch.arange(50) > 3)], covariances=True
    )
    assert [len(each) for each in scored.energies] == [50, 50]
    assert (
        scored.mse.tolist()
        == score(
            filter, [data.test[0], data.test[0]._replace(mask=torch.arange(50) > 3)]
        ).mse.tolist()
    )
    gaussian = energy_score(
        data.test[0].states.double(),
        scored.estimates[0],
        scored.covariances[0] + 1e-9 * torch.eye(2),
    )
    assert scored.energies[0].mean().item() == pytest.approx(
        gaussian, rel=0.1
    )  # a posterior that is nearly Gaussian
    assert score(LearnedKalman().fit(data.train), data.test, covariances=True).energies is None


@pytest.mark.parametrize("horizon", [5, 6])
def test_predictions_need_recordings_longer_than_the_horizon(horizon):
    recordings = [Recording(torch.zeros(n, 1), torch.zeros(n, 1)) for n in (9, 5)]
    with pytest.raises(ValueError, match=f"{horizon} steps ahead .* shortest has 5 steps"):
        check_horizon(recordings, horizon)
    check_horizon(recordings, 4)
