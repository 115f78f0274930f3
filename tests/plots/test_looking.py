"""Scores of smoothers and of predictions ahead, their floors, and the commands that show them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import reference
import torch
from reference import TRAINER

from kbf.cli import main
from kbf.data.dataset import Data
from kbf.data.synthetic import SyntheticData
from kbf.evaluation.calibration import mahalanobis
from kbf.evaluation.floors import data_floor, floor_ahead, smoothing_floor
from kbf.evaluation.score import score_ahead, score_smoothed
from kbf.filters.gaussian.kalman import KalmanFilter, LearnedKalman, LinearModel
from kbf.filters.rollout import rollout
from kbf.filters.smoothing import smooth
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.held_out_calibration import learn_smoothed
from kbf.recording import Recording
from kbf.ssm import StateSpaceModel, rotate, rotation, simulate
from kbf.training.fit import train
from studies.benchmarks import smoothing

F64 = torch.float64


def linear() -> tuple[StateSpaceModel, LinearModel]:
    """A slow rotation, seen with much noise: hindsight is worth a lot."""
    zero, eye = torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)
    A = 0.95 * rotate(eye, torch.tensor(0.3, dtype=F64)).mT
    numbers = {"Q": 0.1 * eye, "R": 0.3 * eye, "m0": zero, "P0": eye}
    return StateSpaceModel(lambda z: z @ A.mT, lambda z: z, **numbers), LinearModel(
        A=A, a=zero, C=eye, c=zero, **numbers
    )


@pytest.fixture(scope="module")
def data() -> Data:
    source = SyntheticData(rotation(), n_train=80, n_test=50)
    test = source.test[0]
    mask = torch.rand(50, generator=torch.Generator().manual_seed(0)) < 0.8
    hidden = test.states.clone()
    hidden[:10] = torch.nan
    tests = [
        test,
        Recording(test.states[:17], test.obs[:17]),
        test._replace(mask=mask),
        test._replace(states=hidden),
    ]
    return Data(source.train, tests, rotation(), tests)


@pytest.mark.slow
def test_each_sequence_is_smoothed_by_itself(data):
    filter = LearnedKalman().fit(data.train)
    for lag in (None, 3):
        found = score_smoothed(filter, data.test, lag=lag)
        for k, s in enumerate(data.test):
            alone = smooth(
                filter, s.obs[None], mask=None if s.mask is None else s.mask[None], lag=lag
            )
            torch.testing.assert_close(found.estimates[k], alone.estimates[0])
            error = (alone.estimates[0] - s.states).square().sum(-1)
            torch.testing.assert_close(found.mse[k], error[~error.isnan()].mean())
            assert found.covariances is not None and alone.covariances is not None
            torch.testing.assert_close(found.covariances[k], alone.covariances[0])


@pytest.mark.slow
def test_all_horizons_are_scored_on_the_same_steps(data):
    filter, h = LearnedKalman().fit(data.train), 3
    tests = data.test[:2]
    found = score_ahead(filter, tests, h)
    assert found.mse.shape == (2, h)
    for k, s in enumerate(tests):
        errors = torch.zeros(h)
        for target in range(h, len(s.states)):
            for ahead in range(1, h + 1):
                state = rollout(filter, s.obs[None, : target - ahead + 1]).state
                for _ in range(ahead):
                    state = filter.predict(state)
                errors[ahead - 1] += (state.mean[0] - s.states[target]).square().sum() / (
                    len(s.states) - h
                )
        torch.testing.assert_close(found.mse[k].float(), errors, atol=1e-5, rtol=1e-4)
    with pytest.raises(
        ValueError, match="17 steps ahead need longer test recordings; the shortest has 17"
    ):
        score_ahead(filter, tests, 17)


@pytest.mark.slow
@torch.no_grad()
def test_floors_are_those_of_the_exact_filter():
    """Linear-Gaussian data, 6 sequences of 40 steps: the particle smoother against
    Rauch-Tung-Striebel, and predictions ahead.
    """
    model, linear_model = linear()
    g = torch.Generator().manual_seed(0)
    start = torch.randn(3000, 2, dtype=F64, generator=g)
    drawn = simulate(model, start[:6], 40, g)
    tests = [Recording(z, x) for z, x in zip(drawn.states, drawn.obs, strict=True)]
    data = Data([Recording(start, start)], tests, model, tests)
    kalman = KalmanFilter(linear_model)
    for lag in (None, 2):
        least = smoothing_floor(data, lag=lag, particles=3000)
        exact = score_smoothed(kalman, tests, lag=lag).mse.mean()
        assert least is not None and abs(least.mse.mean() / exact - 1) < 0.04
    above = data_floor(data, particles=3000)
    assert above is not None and exact < 0.9 * above.mse.mean()
    ahead, truth = floor_ahead(data, 3, particles=3000), score_ahead(kalman, tests, 3).mse.mean(0)
    assert ahead is not None and (ahead.mse.mean(0) / truth - 1).abs().max() < 0.02
    assert (truth.diff() > 0).all()


def test_without_a_true_model_there_is_no_floor(data):
    assert (
        smoothing_floor(data._replace(problem=None)) is None
        and floor_ahead(data._replace(problem=None), 2) is None
    )
    assert smoothing_floor(data._replace(problem=reference.Blind())) is None


@pytest.mark.slow
def test_smoothed_covariances_are_recalibrated(tmp_path):
    """Regions around smoothed states hold their share of new states, in units of the data; with a
    lag it is another smoother.
    """
    whole = SyntheticData(rotation(), n_train=300, n_test=400)
    train_part, test_part = (
        [s._replace(states=1000 * s.states, obs=7 * s.obs) for s in part]
        for part in (whole.train, whole.test)
    )
    model = {
        "name": "kalman",
        "net": {"_target_": "kbf.LearnedKalman"},
        "training": None,
        "encoding": None,
    }
    trained = train(
        {"model": model, "data": {"normalise": "standard"}, "trainer": TRAINER, "seed": 0},
        train_part,
        tmp_path,
    )
    assert trained is not None
    smoothed = score_smoothed(trained.filter, test_part)
    assert smoothed.covariances is not None
    learned = learn_smoothed(trained)
    for level in (0.5, 0.9):
        inside = learned.contains(
            test_part[0].states, smoothed.estimates[0], smoothed.covariances[0], level
        )
        assert inside.double().mean().item() == pytest.approx(level, abs=0.06)
    assert not torch.equal(learn_smoothed(trained, lag=1).scores, learned.scores)
    assert (
        trained.module.scaling is not None
        and learned.floor.mean() > 1e-4 * trained.module.scaling.z_scale.square().mean()
    )


# Commands


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    quick = ["n_train=60", "data.n_test=20", "particles=200", "calibrate=false"]
    assert main(["train", "model=kalman", *quick, f"run_dir={directory}"]) == 0
    return directory / "checkpoints" / "best.ckpt"


@pytest.mark.slow
def test_evaluate_looks_back_and_ahead(checkpoint, tmp_path):
    words = [
        f"checkpoint={checkpoint}",
        "particles=300",
        f"run_dir={tmp_path}",
        "smooth=true",
        "horizon=3",
    ]
    assert main(["evaluate", *words]) == 0
    told = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert (
        told["test.smoothing_floor"] < told["test.floor"]
        and told["test.mse_smoothed"] < told["test.mse"]
    )
    assert told["test.mse_ahead_1"] < told["test.mse_ahead_3"] and "test.mse_ahead_4" not in told
    assert told["test.floor_ahead_1"] < told["test.mse_ahead_1"]
    with np.load(tmp_path / "predictions.npz") as arrays:
        error = np.square(arrays["smoothed_0"] - arrays["states_0"]).sum(-1).mean()
        assert error == pytest.approx(told["test.mse_smoothed"])
        assert "test.coverage_95_raw_smoothed" in told and "test.coverage_95_smoothed" not in told
        assert arrays["ahead_0"].shape == (3, 20, 2) and arrays["smoothed_covariances_0"].shape == (
            20,
            2,
            2,
        )
        one = np.square(arrays["ahead_0"][0, 2:-1] - arrays["states_0"][3:]).sum(-1).mean()
        assert one == pytest.approx(told["test.mse_ahead_1"])
    for name in ("smoothed.png", "ahead.png", "track.png"):
        assert (tmp_path / name).stat().st_size > 5000


@pytest.mark.slow
def test_evaluate_recalibrates_what_is_smoothed(tmp_path):
    quick = ["n_train=60", "data.n_test=20", "particles=200", "logger=none"]
    assert main(["train", "model=kalman", *quick, f"run_dir={tmp_path}"]) == 0
    best = tmp_path / "checkpoints" / "best.ckpt"
    assert (
        main(
            [
                "evaluate",
                f"checkpoint={best}",
                "particles=200",
                f"run_dir={tmp_path / 'out'}",
                "lag=2",
            ]
        )
        == 0
    )
    told = json.loads((tmp_path / "out" / "metrics.json").read_text(encoding="utf-8"))
    learned = learn_smoothed(load_filter(best), lag=2)
    with np.load(tmp_path / "out" / "predictions.npz") as arrays:
        found = [
            torch.from_numpy(arrays[f"{name}_0"])
            for name in ("states", "smoothed", "smoothed_covariances")
        ]
    share = (mahalanobis(*found) <= learned.radius2(0.95)).double().mean().item()
    assert share == pytest.approx(told["test.coverage_95_smoothed"])
    assert "test.coverage_95_raw_smoothed" in told


@pytest.mark.slow
def test_a_lag_alone_smooths(checkpoint, tmp_path):
    assert (
        main(
            [
                "evaluate",
                f"checkpoint={checkpoint}",
                "particles=300",
                f"run_dir={tmp_path}",
                "lag=1",
            ]
        )
        == 0
    )
    told = json.loads((tmp_path / "metrics.json").read_text(encoding="utf-8"))
    assert "test.mse_smoothed" in told and not (tmp_path / "ahead.png").exists()


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("lag=-1", "lag must be at least 0, got -1"),
        ("horizon=soon", "horizon must be a whole number"),
        ("smooth=true horizon=20", "20 steps ahead"),
    ],
)
def test_impossible_settings_are_one_line(checkpoint, tmp_path, capsys, word, said):
    assert (
        main(
            [
                "evaluate",
                f"checkpoint={checkpoint}",
                "particles=100",
                f"run_dir={tmp_path}",
                *word.split(),
            ]
        )
        == 2
    )
    told = capsys.readouterr().err
    assert said in told and told.count("\n") == 1
    assert not list(tmp_path.glob("*.png"))  # refused before any work


def test_a_model_without_a_smoother_is_one_line(tmp_path, capsys):
    quick = [
        "model=frame",
        "n_train=60",
        "data.n_test=20",
        "particles=100",
        "calibrate=false",
        f"run_dir={tmp_path}",
    ]
    assert main(["train", *quick]) == 0
    words = [
        f"checkpoint={tmp_path}/checkpoints/best.ckpt",
        "particles=100",
        f"run_dir={tmp_path}/e",
        "smooth=true",
    ]
    assert main(["evaluate", *words]) == 2
    assert "FrameFilter has no smoother. Models that have one: kbf" in capsys.readouterr().err


def test_floor_of_smoothers(capsys):
    words = ["data=rotation", "n_train=50", "data.n_test=30", "runs=2", "particles=300"]
    found = []
    for more in ([], ["smooth=true"]):
        assert main(["floor", *words, *more]) == 0
        told = capsys.readouterr().out
        assert ("smoothing floor of rotation" in told) == bool(more)
        found.append(float(told.split("│")[2]))
    assert 0.02 < found[1] < found[0] < 0.08


@pytest.mark.slow
def test_benchmark():
    rows = smoothing.run({**smoothing.SIZES["smoke"], "runs": {"rotation": 1}}, lambda text: None)
    assert [row["model"] for row in rows] == ["kbf", "particle_learned", "kalman", "ekf", "ukf"]
    assert all(
        0 < row[key] < 0.3
        for row in rows
        for key in ("filter", "smoother", "filtering floor", "smoothing floor")
    )
    share = [
        (row["filtering floor"] - row["smoother"])
        / (row["filtering floor"] - row["smoothing floor"])
        for row in rows
    ]
    assert share == pytest.approx([row["share of the gap"] for row in rows])
    row = {
        "data": "a",
        "model": "kbf",
        "filtering floor": 0.05,
        "smoothing floor": 0.03,
        "share of the gap": math.nan,
    }
    sides = [
        {"smoother": 0.0399},
        {"smoother": 0.0401},
        {"smoother": 0.01, "model": "particle_observation"},
    ]
    told = smoothing.claims([{**row, **side} for side in sides])
    assert [claim.reached for claim in told] == [True, False] and "same codes 0.0100" in told[
        0
    ].measured
    assert smoothing.draw(rows).axes
