"""Calibration, regions and densities against closed forms, other implementations and limits where
the answer is known.
"""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import scipy.stats
import torch

from kbf.cli import main
from kbf.data.synthetic import SyntheticData
from kbf.data.windows import first_steps, some_of_each
from kbf.evaluation.calibration import (
    FLOOR_SHARES,
    MOST_SCORES,
    Calibration,
    ForecastCalibration,
    calibrate,
    calibrate_constant,
    chi_square,
    floor_of,
    mahalanobis,
)
from kbf.evaluation.scoring_rules import (
    COVERAGE_LEVELS,
    CURVE_LEVELS,
    crps,
    energy_score,
    reliability,
)
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel.filter import KernelBayesFilter, KernelState
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.operators import Operator, UnitRatio
from kbf.fitted.checkpoint import load_filter, rewrite_checkpoint
from kbf.fitted.held_out_calibration import (
    calibrate_by,
    learn_and_keep,
    learn_calibration,
)
from kbf.fitted.held_out_runs import held_out, run_through
from kbf.plots.tracks import calibration_figure
from kbf.recording import Recording
from kbf.ssm import rotation
from kbf.training.fit import train


def gaussian_steps(normal, m: int, d: int = 2, wrong: float = 1.0):
    """States drawn from N(mean, wrong C): what a filter that says C would see if it were wrong by
    this factor.
    """
    root = normal(m, d, d) / math.sqrt(d) + torch.eye(d, dtype=torch.float64)
    C, means = root @ root.mT, normal(m, d)
    return means + math.sqrt(wrong) * (root @ normal(m, d, 1))[..., 0], means, C


# -- covariance of a weighted sample --


def test_the_covariance_is_psd_with_negative_weights(normal):
    """Of 500 weight vectors with signs: that of the positive part by NumPy, and never below where
    it sees a state as known.
    """
    states = normal(30, 3)
    filter = KernelBayesFilter(
        states, Operator(torch.eye(30, dtype=torch.float64)), None, UnitRatio()
    )
    w = normal(500, 30) * torch.linspace(0, 0.2, 500, dtype=torch.float64)[:, None]
    w = w + (1 - w.sum(-1, keepdim=True)) / 30
    C = filter.covariance(KernelState(w))
    for k in (0, 100, 250, 499):
        expected = np.cov(states.T.numpy(), aweights=w[k].clamp_min(0).numpy(), ddof=0)
        np.testing.assert_allclose(C[k].numpy(), expected, atol=1e-12)
    values = torch.linalg.eigvalsh(C)
    assert bool((values >= -1e-9 * values[:, -1:].clamp_min(1)).all())
    torch.testing.assert_close(C, C.mT)
    centred = states - (w @ states)[:, None]
    signed = torch.einsum("bn,bni,bnj->bij", w, centred, centred)
    assert (
        int((torch.linalg.eigvalsh(signed)[:, 0] < 1e-6).sum()) > 50
    )  # the signed sum says "known" or is no covariance at all
    assert bool((values[:, 0] > 0.01).all())


# -- calibration --


@pytest.mark.parametrize("wrong", [0.25, 1.0, 9.0])
def test_the_scale_is_found(normal, wrong):
    z, means, C = gaussian_steps(normal, 4000, wrong=wrong)
    learned = calibrate(z, means, C)
    assert learned.scale.item() == pytest.approx(wrong, rel=0.05)
    torch.testing.assert_close(learned.covariance(C), learned.scale * (C + learned.floor.diag()))
    for level in COVERAGE_LEVELS:  # the Gaussian's own radius, as the covariance is right now
        assert learned.radius2(level).item() == pytest.approx(chi_square(level, 2), rel=0.1)


def test_regions_cover_whatever_the_distribution(normal):
    """Errors with heavy tails: the Gaussian's 95 % region misses more, the one by ranks
    does not.
    """
    generator = np.random.default_rng(1)
    C = torch.eye(2, dtype=torch.float64).expand(3000, 2, 2)
    errors = torch.from_numpy(generator.standard_t(2.5, (6000, 2)))
    zero = torch.zeros(3000, 2, dtype=torch.float64)
    learned = calibrate(errors[:3000], zero, C)
    for level in (0.5, 0.8, 0.95, 0.99):
        assert learned.contains(
            errors[3000:], zero, C, level
        ).double().mean().item() == pytest.approx(level, abs=0.04)
    raw = reliability(errors[3000:], zero, C).numbers
    assert raw["coverage_95"] < 0.85
    assert reliability(errors[3000:], zero, C, learned).numbers["nll"] < raw["nll"] - 0.5


def test_a_new_step_is_covered_with_at_least_the_level(normal):
    """The small-sample correction: with 19 held-out steps the 95 % region is up to the largest
    score, and holds 95 % on average.
    """
    hits = []
    for _ in range(150):
        z, means, C = gaussian_steps(normal, 49)
        learned = calibrate(z[:19], means[:19], C[:19])
        assert learned.quantile(0.95) == learned.scores[-1]
        hits.append(learned.contains(z[19:], means[19:], C[19:], 0.95))
    assert torch.cat(hits).double().mean().item() == pytest.approx(0.95, abs=0.02)


def test_quantiles_rise_and_are_ranks(normal):
    z, means, C = gaussian_steps(normal, 99)
    learned = calibrate(z, means, C)
    for rank in (1, 50, 90, 99):
        assert learned.quantile(rank / 100) == learned.scores[rank - 1]
    levels = [k / 1000 for k in range(1, 1000)]
    found = [learned.quantile(level).item() for level in levels]
    assert found == sorted(found)
    assert learned.quantile(0.9999) == max(
        learned.scores[-1].item(), learned.scale.item() * chi_square(0.9999, 2)
    )
    for level in (0.0, 1.0):
        with pytest.raises(ValueError, match="between 0 and 1"):
            learned.quantile(level)


def test_of_many_scores_few_are_kept(normal):
    z, means, C = gaussian_steps(normal, 5000)
    learned = calibrate(z, means, C)
    scores = learned.score(z, means, C).sort().values
    assert len(learned.scores) == MOST_SCORES and learned.scores[-1] == scores[-1]
    for level in (0.5, 0.9, 0.99):
        rank = math.ceil(5001 * level)
        assert scores[rank - 1] <= learned.quantile(level) <= scores[min(rank + 10, 4999)]


def test_a_collapsed_covariance_does_not_rule(normal):
    """One step in fifty says that it knows exactly and is wrong: a larger floor is taken, and the
    scale stays near 1.
    """
    z, means, C = gaussian_steps(normal, 1000)
    C = C.clone()
    C[::50] = 0
    learned = calibrate(z, means, C)
    assert learned.floor.mean() > 0.05 * C.diagonal(dim1=-2, dim2=-1).mean()
    assert 0.5 < learned.scale.item() < 2


def test_units_do_not_matter(normal):
    """In metres or millimetres, component by component: the same scores, and a floor in the new
    units.
    """
    z, means, C = gaussian_steps(normal, 200)
    S = torch.tensor([1.0, 1000.0], dtype=torch.float64)
    a, b = calibrate(z, means, C), calibrate(S * z, S * means, S[:, None] * C * S)
    torch.testing.assert_close(a.scores, b.scores)
    torch.testing.assert_close(a.floor * S.square(), b.floor)


def test_a_constant_component_is_no_singular_matrix(normal):
    z, means, C = gaussian_steps(normal, 50)
    C = C.clone()
    C[:, 1] = C[:, :, 1] = 0
    assert bool((floor_of(C) > 0).all())
    assert torch.isfinite(calibrate(z, means, C).scores).all()


def test_what_cannot_be_calibrated(normal):
    z, means, C = gaussian_steps(normal, 5)
    with pytest.raises(ValueError, match="at least two held-out steps, got 1"):
        calibrate(z[:1], means[:1], C[:1])
    z[3] = math.nan
    with pytest.raises(ValueError, match="1 of 5 held-out steps hold NaN"):
        calibrate(z, means, C)


# -- scores --


def test_scores_against_closed_forms(normal):
    """CRPS of a Gaussian by its integral, energy score in one dimension is the CRPS, NLL by scipy,
    PIT by scipy.
    """
    z, means, C = gaussian_steps(normal, 40, d=1)
    std = C[..., 0].sqrt()
    grid = np.linspace(-30, 30, 200_001)
    plain = [
        np.trapezoid((scipy.stats.norm.cdf(grid, m, s) - (grid >= x)) ** 2, grid)
        for x, m, s in zip(
            z[:5, 0].tolist(), means[:5, 0].tolist(), std[:5, 0].tolist(), strict=True
        )
    ]
    assert crps(z[:5], means[:5], std[:5]) == pytest.approx(np.mean(plain), rel=1e-3)
    z, means, C = (part.repeat(40, *[1] * (part.ndim - 1)) for part in (z, means, C))
    assert energy_score(z, means, C) == pytest.approx(crps(z, means, C[..., 0].sqrt()), rel=0.02)
    z, means, C = gaussian_steps(normal, 40)
    found = reliability(z, means, C)
    floored = C + floor_of(C).diag()
    each = [
        scipy.stats.multivariate_normal(m, c).logpdf(x)
        for x, m, c in zip(z.numpy(), means.numpy(), floored.numpy(), strict=True)
    ]
    assert found.numbers["nll"] == pytest.approx(-np.mean(each))
    std = floored.diagonal(dim1=-2, dim2=-1).sqrt()
    np.testing.assert_allclose(found.pit, scipy.stats.norm.cdf(z, means, std), atol=1e-12)


def test_a_right_filter_is_on_the_diagonal_and_flat(normal):
    z, means, C = gaussian_steps(normal, 1500)
    found = reliability(z, means, C)
    assert (
        max(abs(level - share) for level, share in zip(CURVE_LEVELS, found.curve, strict=True))
        < 0.06
    )
    assert scipy.stats.kstest(found.pit.flatten().numpy(), "uniform").statistic < 0.05
    narrow = reliability(z, means, 0.25 * C).numbers
    assert (
        narrow["coverage_95"] < 0.6
        and narrow["nll"] > found.numbers["nll"]
        and narrow["crps"] > found.numbers["crps"]
    )
    figure = calibration_figure({"raw": found}, title="a title")
    assert [len(axes.lines) for axes in figure.axes] == [2, 1] and figure.axes[0].lines[
        1
    ].get_ydata()[0] == found.curve[0]


# -- held-out parts --


def test_no_filter_sees_its_own_fold():
    data = SyntheticData(rotation(), n_train=60)
    seen = []

    class Spy:
        def prepare(self, memory, generator=None): ...

        def fit(self, memory):
            seen.append(torch.cat([s.states for s in memory]))
            return LearnedKalman().fit(memory)

    held = list(held_out(Spy(), data.train, 4))
    assert len(held) == 4 and sum(len(s.states) for _, part in held for s in part) == 60
    for memory, (_, part) in zip(seen, held, strict=True):
        assert len(memory) == 45
        assert not (memory[:, None] == part[0].states).all(-1).any()
    short = held_out(Spy(), data.train, 4, most=20)
    assert [len(part[0].states) for _, part in short] == [5] * 4


def test_the_first_steps():
    two = [
        Recording(torch.arange(8.0).reshape(4, 2), torch.zeros(4, 1)),
        Recording(torch.ones(5, 2), torch.zeros(5, 1)),
    ]
    assert [len(s.states) for s in first_steps(two, 6)] == [2, 3]
    assert [len(s.states) for s in first_steps(two, 1)] == [1, 1]
    assert [len(s.states) for s in first_steps(two, 60)] == [4, 5]


def test_some_steps_of_each_recording_or_some_recordings():
    def numbered(*lengths: int) -> list[Recording]:
        steps = [torch.arange(float(n))[:, None] for n in lengths]
        return [Recording(each, each + 100 * k) for k, each in enumerate(steps)]

    few = some_of_each(numbered(40, 20), 30)
    assert [each.states[:, 0].tolist() for each in few] == [
        list(range(20, 40)),
        list(range(10, 20)),
    ]
    many = some_of_each(numbered(*[5] * 41), 55)
    assert [float(each.obs[0]) / 100 for each in many] == list(range(0, 41, 4))
    assert all(len(each.states) == 5 for each in many)
    whole = numbered(4, 5)
    assert some_of_each(whole, 9) is whole


def test_of_five_filters_the_best_and_the_worst_do_not_count():
    """One knows nothing of its fold: it widens no region. Of fewer filters all count."""
    states = torch.randn(500, 2, generator=torch.Generator().manual_seed(0)).double()
    folds = torch.arange(5).repeat_interleave(100)
    states[folds == 3] *= 30
    states[folds == 1] *= 0.1
    others = (folds != 3) & (folds != 1)
    means, C = torch.zeros_like(states), torch.eye(2).double().expand(500, 2, 2)
    found, expected = (
        calibrate_by(states, means, C, folds),
        calibrate(states[others], means[others], C[others]),
    )
    for field in ("scale", "floor", "scores", "steps"):
        assert torch.equal(getattr(found, field), getattr(expected, field))
    assert found.column_scores is None
    assert float(found.scale) == pytest.approx(1, abs=0.2)
    few = calibrate_by(states, means, C, folds.clamp_max(3))
    assert int(few.steps) == 500 and float(few.scale) > 100


@pytest.mark.slow
def test_a_kalman_filter_is_calibrated_by_what_it_has_not_seen():
    """Held-out regions hold their share on new data; no covariances, no calibration."""
    data = SyntheticData(rotation(), n_train=400, n_test=400)
    learned = learn_calibration(run_through(held_out(LearnedKalman(), data.train)))
    assert learned is not None and int(learned.steps) == 240, "three of five folds"
    from kbf.evaluation.score import score

    found = score(LearnedKalman().fit(data.train), data.test, covariances=True)
    assert found.covariances is not None
    inside = learned.contains(data.test[0].states, found.estimates[0], found.covariances[0], 0.9)
    assert inside.double().mean().item() == pytest.approx(0.9, abs=0.04)

    class Plain:
        def prepare(self, memory, generator=None): ...

        def fit(self, memory):
            filter = LearnedKalman().fit(memory)
            return type(
                "Filter",
                (),
                {
                    k: staticmethod(getattr(filter, k))
                    for k in ("init", "predict", "update", "estimate")
                },
            )()

    assert learn_calibration(run_through(held_out(Plain(), data.train))) is None


# -- checkpoints --


def config(net: dict, training: dict | None = None) -> dict:
    trainer = {
        "_target_": "lightning.Trainer",
        "max_epochs": 1,
        "accelerator": "cpu",
        "enable_progress_bar": False,
    }
    trainer |= {"enable_model_summary": False, "log_every_n_steps": 1}
    return {
        "model": {"name": "it", "net": net, "training": training, "encoding": None},
        "trainer": trainer,
        "seed": 0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("learns", [False, True])
def test_a_checkpoint_keeps_it(tmp_path, learns):
    data = SyntheticData(rotation(), n_train=80)
    net = {"_target_": "kbf.KBF", "learn": learns, "rank": 16}
    training = {"epochs": 1, "lr": 0.01, "window": 5, "folds": 2} if learns else None
    trained = train(config(net, training), data.train, tmp_path)
    assert trained is not None and load_filter(tmp_path / "best.ckpt").calibration is None
    found = learn_and_keep(trained, tmp_path)
    for name in ("best.ckpt", "last.ckpt"):
        loaded = load_filter(tmp_path / name)
        assert isinstance(loaded.calibration, Calibration) and found.calibration is not None
        for mine, theirs in zip(found.calibration, loaded.calibration, strict=True):
            torch.testing.assert_close(mine, theirs)
        assert (
            loaded.monitor is not None
            and found.monitor is not None
            and loaded.monitor.innovation is not None
        )
        torch.testing.assert_close(
            loaded.monitor.innovation.scores, found.monitor.innovation.scores
        )
    again = learn_and_keep(
        found, tmp_path, [s._replace() for s in data.test]
    )  # a validation part in place of the folds
    assert again.calibration is not None and int(again.calibration.steps) == 200
    best = tmp_path / "best.ckpt"
    rewrite_checkpoint(again._replace(calibration=None, monitor=None), best, best)
    assert load_filter(tmp_path / "best.ckpt").monitor is None


def test_kbf_settings_reach_the_folds():
    """A net that was tuned is conditioned on the other folds as it is: its bandwidths are not
    chosen anew.
    """
    data = SyntheticData(rotation(), n_train=60)
    net = KBF(learn=False, rank=16)
    net.prepare(data.train)
    before = net.log_bandwidth.clone()
    assert len(list(held_out(net, data.train, 3))) == 3
    assert torch.equal(net.log_bandwidth, before)


# -- commands --

SMALL = ["n_train=60", "data.n_test=30", "particles=100"]


@pytest.mark.slow
def test_evaluate_tells_how_far_to_trust(tmp_path, capsys):
    """Before and after recalibration, a picture, alarms; covariances in the file are the
    recalibrated ones.
    """
    train_it = ["train", "model=kalman", "logger=none", *SMALL, f"run_dir={tmp_path / 'run'}"]
    assert main(train_it) == 0
    best = tmp_path / "run" / "checkpoints" / "best.ckpt"
    assert (
        main(["evaluate", f"checkpoint={best}", "particles=100", f"run_dir={tmp_path / 'out'}"])
        == 0
    )
    told = json.loads((tmp_path / "out" / "metrics.json").read_text())
    names = [f"test.coverage_{level}" for level in (50, 80, 90, 95)] + [
        "test.crps",
        "test.energy_score",
        "test.nll",
    ]
    assert all(math.isfinite(told[name]) and math.isfinite(told[f"{name}_raw"]) for name in names)
    assert 0 <= told["test.out_of_distribution_alarms"] <= 1
    assert (tmp_path / "out" / "calibration.png").stat().st_size > 5000
    learned = load_filter(best).calibration
    arrays = np.load(tmp_path / "out" / "predictions.npz")
    C = torch.from_numpy(arrays["covariances_0"])
    squared = mahalanobis(
        torch.from_numpy(arrays["states_0"]), torch.from_numpy(arrays["estimates_0"]), C
    )
    assert learned is not None
    assert (squared <= learned.radius2(0.95)).double().mean().item() == pytest.approx(
        told["test.coverage_95"]
    )
    capsys.readouterr()
    assert main([*train_it, "calibrate=false", "overwrite=true"]) == 0
    again = ["evaluate", f"checkpoint={best}", "particles=100", f"run_dir={tmp_path / 'out'}"]
    assert main([*again, "overwrite=true"]) == 0
    assert "this checkpoint has no calibration" in " ".join(capsys.readouterr().out.split())
    told = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert "test.coverage_95" not in told and "test.coverage_95_raw" in told


def test_too_short_for_folds_is_said(tmp_path, capsys):
    """Ten steps make a model, eight do not: the run goes on without a calibration."""
    overrides = [
        "n_train=11",
        "data.n_test=5",
        "particles=50",
        "logger=none",
        f"run_dir={tmp_path}",
    ]
    assert main(["train", "model=particle_learned", *overrides]) == 0
    assert "no calibration and no alarms: a kernel ridge map needs at least 10" in " ".join(
        capsys.readouterr().out.split()
    )
    assert load_filter(tmp_path / "checkpoints" / "best.ckpt").calibration is None


@pytest.mark.slow
def test_compare_shows_what_is_covered(tmp_path):
    """A column for each level, for the models that have covariances."""
    overrides = [*SMALL, "models=kalman,frame", "runs=2", "workers=0"]
    assert main(["compare", *overrides, "calibrate=true", f"run_dir={tmp_path}"]) == 0
    rows = {row["model"]: row for row in csv.DictReader((tmp_path / "results.csv").open())}
    cells = [json.loads(path.read_text()) for path in (tmp_path / "cells").glob("*.json")]
    mine = [cell["test.coverage_95"] for cell in cells if cell["model"] == "kalman"]
    assert float(rows["kalman"]["coverage_95"]) == pytest.approx(sum(mine) / 2)
    assert main(["compare", *overrides, f"run_dir={tmp_path / 'raw'}"]) == 0
    assert "coverage_95" not in (tmp_path / "raw" / "results.csv").read_text().splitlines()[0]


def test_the_floor_has_the_largest_likelihood(normal):
    """The best of all candidates with their best scales, by the densities of SciPy."""
    root = torch.rand(200, 1, 1, dtype=torch.float64).exp() - 0.98
    C = root.square() * torch.eye(2, dtype=torch.float64)
    means = normal(200, 2)
    for noise in (0.05, 0.3, 0.7):
        states = means + root[..., 0] * normal(200, 2) + noise * normal(200, 2)
        best, floors = -math.inf, torch.zeros(2)
        for share in FLOOR_SHARES:
            floor = floor_of(C, share)
            total = C + floor.diag()
            scale = mahalanobis(states, means, total).mean() / 2
            found = torch.distributions.MultivariateNormal(means, scale * total)
            likelihood = found.log_prob(states).sum().item()
            if likelihood > best:
                best, floors = likelihood, floor
        torch.testing.assert_close(calibrate(states, means, C).floor, floors)


def test_a_filter_without_covariances_has_that_of_its_errors(normal):
    sizes = torch.tensor([0.1, 2.0, 30.0], dtype=torch.float64)
    means = normal(2000, 3)
    found, zeros = calibrate_constant(means + sizes * normal(2000, 3), means)
    assert zeros.shape == (2000, 3, 3) and not bool(zeros.any())
    torch.testing.assert_close(
        found.covariance(zeros[:1])[0], sizes.square().diag(), rtol=0.1, atol=0
    )


def test_between_two_horizons_calibrations_are_interpolated_by_their_logarithms(normal):
    """Halfway between 2 and 8 is 4; before the first and beyond the last there is one alone."""
    learned = {}
    for horizon, size in ((2, 1.0), (8, 3.0)):
        z, means, C = gaussian_steps(normal, 99)
        learned[horizon] = calibrate(means + size * (z - means), means, C)
    forecasts = ForecastCalibration.stack(learned)
    for horizon, weight in ((1, 0.0), (2, 0.0), (4, 0.5), (8, 1.0), (50, 1.0)):
        found = forecasts.at(horizon)
        for name in ("scale", "floor", "scores"):
            one, two = (getattr(learned[k], name).double() for k in (2, 8))
            torch.testing.assert_close(getattr(found, name), (1 - weight) * one + weight * two)


def test_intervals_of_columns_have_the_quantiles_of_their_own_scores(normal):
    """Without them there are none; above the largest rank at least those of a Gaussian."""
    z, means, C = gaussian_steps(normal, 99)
    learned = calibrate(z, means, C)
    assert learned.column_quantile(0.5) is None
    scores = torch.stack([torch.linspace(0, 9, 99), torch.linspace(0, 1, 99)], 1).double()
    learned = learned._replace(column_scores=scores)
    for rank in (1, 50, 99):
        assert torch.equal(learned.column_quantile(rank / 100), scores[rank - 1])
    gaussian = scipy.stats.norm.ppf(0.5 + 0.9999 / 2)
    assert learned.column_quantile(0.9999).tolist() == pytest.approx([9.0, gaussian])


def test_calibrations_of_forecasts_are_read_as_they_were_stored(normal):
    z, means, C = gaussian_steps(normal, 99)
    learned = {k: calibrate(means + k * (z - means), means, C) for k in (1, 4)}
    forecasts = ForecastCalibration.stack(learned)
    stored = forecasts.stored()
    assert "column_scores" not in stored and stored["horizons"].tolist() == [1, 4]
    again = ForecastCalibration.read(stored)
    assert again is not None and "horizons" in stored
    for horizon in (1, 2, 9):
        for one, two in zip(again.at(horizon), forecasts.at(horizon), strict=True):
            assert (one is None and two is None) or torch.equal(one, two)
    assert ForecastCalibration.read(None) is None
