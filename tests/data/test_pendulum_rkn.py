"""The pendulum of Becker et al.: against a slow transcription, pixel by pixel, and what is said of
its noises.
"""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from kbf.cli import main
from kbf.config import composing, configure, plain
from kbf.data.pendulum_rkn import PendulumRKN, Quality, lanczos, lines, reduce, spoil, swing, walk
from kbf.densities.ratio import LOG_NEVER, encoding_width
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel_monte_carlo.density_ratio import RatioFilter
from kbf.filters.rollout import rollout
from kbf.filters.selection.auto import ModelSelection
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.model import inner_filter
from kbf.recording import Recording
from kbf.runtime.errors import FitError

F64 = torch.float64


def slow_angles(start: float, noise: list[float]) -> list[float]:
    """As the paper says it, number by number."""
    theta, omega, inertia = start, 0.0, 1.0 / 3
    angles = [theta]
    for e in noise:
        for _ in range(500):
            omega += 1e-4 * (9.81 / inertia * math.sin(theta) - 0.1 * omega)
            theta += 1e-4 * omega
        omega += e
        angles.append(theta)
    return angles


def slow_line(theta: float) -> list[list[float]]:
    """A pixel is on where its middle lies within the rod."""

    def on(row, column):
        right, down = column + 0.5 - 64, row + 0.5 - 64
        along = right * math.sin(theta) + down * math.cos(theta)
        across = right * math.cos(theta) - down * math.sin(theta)
        return float(0 <= along <= 55 and abs(across) <= 4)

    return [[on(row, column) for column in range(128)] for row in range(128)]


def test_angles_are_those_of_the_transcription():
    noise = 0.1 * torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    angles = swing(torch.tensor([0.3, 4.0], dtype=F64), noise)
    for k, start in enumerate((0.3, 4.0)):
        torch.testing.assert_close(
            angles[k], torch.tensor(slow_angles(start, noise[k].tolist()), dtype=F64)
        )


def test_images_are_those_of_the_transcription_pixel_by_pixel():
    theta = torch.tensor([0.0, 0.7, 2.0, 3.5, 5.9], dtype=F64)
    for angle, image in zip(theta, lines(theta), strict=True):
        slow = torch.tensor(slow_line(angle.item()), dtype=F64)
        assert torch.equal(image, slow)
        small = Image.fromarray(slow.float().numpy(), mode="F").resize(
            (24, 24), Image.Resampling.LANCZOS
        )
        expected = torch.tensor(np.asarray(small), dtype=F64).clamp(0, 1)
        torch.testing.assert_close(reduce(image[None])[0], expected, atol=1e-5, rtol=0)


def test_a_line_of_a_drawing_library_is_nearly_the_same():
    for angle in (0.4, 1.9, 3.3, 5.0):
        canvas = Image.new("F", (128, 128), 0.0)
        end = (63.5 + 55 * math.sin(angle), 63.5 + 55 * math.cos(angle))
        ImageDraw.Draw(canvas).line([(63.5, 63.5), end], fill=1.0, width=8)
        drawn = torch.tensor(
            np.asarray(canvas.resize((24, 24), Image.Resampling.LANCZOS)), dtype=F64
        )
        assert (
            drawn.clamp(0, 1) - reduce(lines(torch.tensor([angle], dtype=F64)))[0]
        ).abs().mean() < 0.0085


def test_weights_of_the_reduction_have_sum_one():
    torch.testing.assert_close(lanczos(128, 24).sum(1), torch.ones(24, dtype=F64))


def test_the_quality_of_images_is_that_of_the_transcription():
    draw = torch.Generator().manual_seed(7)
    low, high, g = (torch.rand((), generator=draw, dtype=F64).item() for _ in range(3))
    moves = torch.rand(149, generator=draw, dtype=F64).tolist()
    low, high, f = 0.25 * low, 0.75 + 0.25 * high, [1.0]
    for t, move in enumerate(moves, 1):
        g = min(max(g + 0.4 * move - 0.2, 0), 1)
        f.append(1.0 if t < 5 else min(max((g - low) / (high - low), 0), 1))
    found = walk(Quality(), 150, torch.Generator().manual_seed(7))
    torch.testing.assert_close(found, torch.tensor(f, dtype=F64), rtol=0, atol=1e-12)


def test_quality_walks_as_it_is_said():
    walks = torch.stack(
        [walk(Quality(), 150, torch.Generator().manual_seed(k)) for k in range(400)]
    )
    assert (walks[:, :5] == 1).all() and walks.min() >= 0 and walks.max() <= 1
    moves = (walks[:, 6:] - walks[:, 5:-1]).abs()
    assert moves.max() <= 0.2 / 0.5 + 1e-12  # b - a is at least 0.5
    assert (
        0.1 < (walks[:, 5:] == 0).double().mean() < 0.35
        and 0.1 < (walks[:, 5:] == 1).double().mean() < 0.35
    )
    flat = walks[:, 5:] - walks[:, 5:].mean()
    assert (flat[:, 1:] * flat[:, :-1]).mean() / flat.square().mean() > 0.9  # correlated in time


def test_a_spoiled_image_is_mixed_with_uniform_noise():
    images = torch.ones(1000, 24, 24, dtype=F64)
    shown = spoil(images, torch.full((1000,), 0.25, dtype=F64), torch.Generator().manual_seed(0))
    assert shown.dtype == torch.float32 and shown.min() >= 0.25 and shown.max() <= 1
    assert shown.mean() == pytest.approx(0.25 + 0.75 / 2, abs=1e-3)
    assert torch.equal(
        spoil(images, torch.ones(1000, dtype=F64), torch.Generator()), images.float()
    )


def test_more_sequences_begin_with_the_fewer_and_the_test_is_no_part_of_them():
    few, many = (PendulumRKN(n, n_test=2, seed=3, steps=6) for n in (2, 4))
    for name in ("train", "test"):
        for a, b in zip(getattr(few, name), getattr(many, name), strict=False):
            assert torch.equal(a.states, b.states) and torch.equal(a.obs, b.obs)
    states = torch.stack([s.states for s in [*many.train, *many.test]])
    assert (
        len(many.train) == 4 and len(many.test) == 2 and many.train[0].obs.shape == (6, 1, 24, 24)
    )
    assert len({round(z.item(), 9) for z in states[:, 0, 0]}) == 6
    torch.testing.assert_close(states.square().sum(-1), torch.ones(6, 6, dtype=F64))


def test_clean_images_show_the_angle():
    shown = PendulumRKN(1, n_test=1, seed=1, steps=8, clean=True).train[0]
    side = torch.arange(24) - 11.5
    right, down = (
        (shown.obs[:, 0] * side).sum((1, 2)),
        (shown.obs[:, 0] * side[:, None]).sum((1, 2)),
    )
    found = torch.stack([right, down], 1) / torch.stack([right, down], 1).norm(dim=1, keepdim=True)
    torch.testing.assert_close(found.double(), shown.states, atol=0.05, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"n_train": 0},
        {"n_test": 0},
        {"steps": 1},
        {"sigma_omega": -1.0},
        {"quality": Quality(low=0.8)},
    ],
)
def test_settings_out_of_range(settings):
    with pytest.raises(ValueError, match="needs"):
        PendulumRKN(**({"n_train": 2, "n_test": 1, "steps": 3} | settings))


def test_the_command_writes_it(tmp_path):
    assert (
        main(
            [
                "data",
                "data=pendulum_rkn",
                "n_train=2",
                "data.n_test=1",
                "data.source.steps=4",
                f"run_dir={tmp_path}",
            ]
        )
        == 0
    )


def test_the_experiment_sets_every_kind_of_filter_beside_kbf():
    """Nets with an encoder of their own see images, the others codes; all are calibrated, so that
    all have a log likelihood.
    """
    with composing("compare", ["experiment=rkn_pendulum"]) as composed:
        config = plain(composed, resolve=False)
    assert (config["data"]["name"], config["calibrate"], config["n_train"]) == (
        "pendulum_rkn",
        True,
        [10, 30, 100],
    )
    assert {
        "kbf",
        "rkn",
        "gru_images",
        "backprop_kf",
        "dpf",
        "gru",
        "lstm",
        "kalman",
        "frame",
    } == set(config["models"])
    for name in config["models"]:
        model = configure("train", [f"model={name}", "data=pendulum_rkn"])["model"]
        own = name in ("rkn", "gru_images", "backprop_kf", "dpf")
        assert (model["encoding"] is None) == own
        assert not own or (
            model["net"]["q"] == [1, 24, 24] and "CNN" in model["net"]["encoder"]["_target_"]
        )


TINY = [
    "data=pendulum_rkn",
    "n_train=3",
    "data.n_test=1",
    "data.source.steps=40",
    "data.encoding.members=2",
    "data.encoding.epochs=2",
]


def trained(name, path):
    """The filter of a checkpoint that a short run of a model left, and its module."""
    quiet = ["logger=none", "trainer.enable_progress_bar=false", "calibrate=false"]
    assert main(["train", f"model={name}", *TINY, *quiet, f"run_dir={path}"]) == 0
    return load_filter(path / "checkpoints" / "best.ckpt")


@pytest.mark.slow
def test_a_comparison_counts_sequences_and_tells_both_likelihoods(tmp_path, capsys):
    """That of the recalibrated covariances, and that of those that were learned; one that is not
    recalibrated has one.
    """
    words = [*TINY, "models=kalman,frame", "runs=1", "workers=0"]
    assert main(["compare", *words, "calibrate=true", f"run_dir={tmp_path}"]) == 0
    cell = next(
        json.loads(path.read_text()) for path in (tmp_path / "cells").glob("*-kalman-*.json")
    )
    kalman, frame = csv.DictReader((tmp_path / "results.csv").open())
    assert (
        float(kalman["log_likelihood"])
        == -cell["test.nll"]
        != -cell["test.nll_raw"]
        == float(kalman["log_likelihood_raw"])
    )
    assert frame["log_likelihood_raw"] == "nan" != frame["log_likelihood"]
    told = capsys.readouterr().out
    assert "pendulum_rkn, 3 training recordings" in told
    assert f"{-cell['test.nll_raw']:.2f}" in told, "at any width of the screen"
    raw = tmp_path / "raw"
    assert main(["compare", *words, f"run_dir={raw}"]) == 0
    kalman, _ = csv.DictReader((raw / "results.csv").open())
    assert "log_likelihood_raw" not in kalman
    # With a monitor the steps are computed one by one, without it all at once: rounding differs.
    assert float(kalman["log_likelihood"]) == pytest.approx(-cell["test.nll_raw"], rel=1e-6)


@pytest.mark.slow
def test_the_default_takes_ratios_whole_and_others_their_means(tmp_path, monkeypatch):
    """From the command line to the checkpoint, whose filter is the one of density ratios, over
    codes of all members.
    """
    monkeypatch.setattr("kbf.commands.train.write_figures", lambda *a, **k: [])
    moving, plain = trained("kernel_monte_carlo", tmp_path / "a"), trained("kalman", tmp_path / "b")
    assert isinstance(inner_filter(moving.filter), RatioFilter)
    assert moving.module.memory.recordings()[0].obs.shape == (40, encoding_width(2, 4))
    assert plain.module.memory.recordings()[0].obs.shape == (40, 2)
    images = PendulumRKN(1, n_test=1, seed=5, steps=12).train[0].obs[None]
    for each in (moving, plain):
        found = rollout(each.filter, images, generator=torch.Generator().manual_seed(0)).estimates
        assert found.shape == (1, 12, 2)
        assert bool(found.isfinite().all())


@pytest.mark.slow
def test_the_net_under_a_model_takes_the_filter_of_ratios(monkeypatch):
    """Where it cannot be fitted the others are compared, on means."""
    g = torch.Generator().manual_seed(0)
    steps, z = torch.randn(600, 1, generator=g, dtype=F64), torch.zeros(600, 1, dtype=F64)
    for t in range(1, 600):
        z[t] = 0.95 * z[t - 1] + 0.3 * steps[t]
    x = z + 0.3 * torch.randn(600, 1, generator=g, dtype=F64)
    gain = float(z.var() / (z.var() + 0.09))
    root = -0.5 * math.log(gain * 0.09)
    row = torch.cat(
        [
            gain * x,
            *(torch.full_like(x, value) for value in (LOG_NEVER, 0.0)),
            gain * x,
            torch.full_like(x, root),
        ],
        -1,
    )
    model = ModelSelection(LearnedKalman(), name="kalman")
    model.ratio_dim = 1
    memory = [Recording(z, row)]
    model.prepare(memory)
    assert model.used() == ["kernel_monte_carlo"]
    found = rollout(model.fit(memory), row[None, :100].float(), generator=g).estimates[0]
    assert (found - z[:100]).square().mean() < (x[:100] - z[:100]).square().mean()
    monkeypatch.setattr(model.models["kernel_monte_carlo"], "fit", lambda memory: broken())
    model.prepare(memory)
    assert {row.model for row in model.candidates if row.nmse is not None} >= {
        "kalman",
        "window_ridge",
        "mean",
    }
    estimates = rollout(model.fit(memory), row[None, :100], generator=g).estimates[0]
    assert (estimates - z[:100]).square().mean() < (x[:100] - z[:100]).square().mean()


def broken():
    """What a model that cannot be fitted raises."""
    raise FitError("too few of them")
