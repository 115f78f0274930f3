"""What loggers are shown, the pictures of a run, and the covariances in them, against plain
formulas.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from reference import filter_moments
from torch import Tensor, nn

from kbf.cli import main
from kbf.data.dsprites import DSprites, position_model
from kbf.data.synthetic import SyntheticData
from kbf.evaluation.score import score
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel.filter import KernelBayesFilter, KernelState
from kbf.filters.particle.bootstrap import BootstrapFilter, ParticleState
from kbf.fitted.settings import EncodingSettings
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.plots.tracks import ESTIMATE, TRUTH
from kbf.recording import Recording
from kbf.runtime.instantiate import build
from kbf.ssm import rotation
from kbf.training.encoder_datamodule import Frames
from kbf.training.encoder_stage import fit_encoding
from kbf.training.figure_logging import (
    log_encodings,
    log_features,
    log_frames,
    log_track,
    spread,
    state_colours,
    thumbnails,
)

QUIET = ["trainer.enable_progress_bar=false", "particles=20", "n_train=12", "data.n_test=4"]


class Board:
    """A logger with what TensorBoard's has, which keeps what it is shown."""

    def __init__(self) -> None:
        self.experiment, self.figures, self.embeddings = self, {}, {}

    def add_figure(self, tag, figure, step):
        self.figures[tag, step] = figure

    def add_embedding(self, *values):
        self.embeddings[values[4], values[3]] = values


PLAIN = SimpleNamespace(
    experiment=SimpleNamespace(log_metrics=None)
)  # a logger that takes numbers only


class Sum(nn.Module):
    """One feature: the sum of the pixels."""

    features = 1

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).sum(1, keepdim=True)


def code(members: int) -> Encoding:
    """Member k says 10 k, whatever it sees."""
    made = Encoding([Sum() for _ in range(members)], 1)
    for k, head in enumerate(made.heads):
        head.load_state_dict({"weight": torch.zeros(1, 1), "bias": torch.tensor([10.0 * k])})
    return made


def recording(n: int) -> tuple[Tensor, Tensor, Tensor]:
    chunk = torch.arange(n) * 3 // n
    return (
        torch.rand(n, 1, 4, 4, generator=torch.Generator().manual_seed(0)),
        torch.arange(n)[:, None] * 0.1,
        chunk,
    )


def at(axes, color: str) -> list[float]:
    return (
        next(line for line in axes.lines if line.get_color() == color and line.get_marker() == "o")
        .get_xdata()
        .tolist()
    )


def test_each_image_is_shown_with_the_code_of_the_member_that_has_not_seen_it():
    board, (obs, states, chunk) = Board(), recording(9)
    log_encodings([PLAIN, board], code(3), (obs, states, chunk), 7, frames=5)
    figure = board.figures["frames/encoding", 7]
    rows = [0, 2, 4, 6, 8]
    assert [axes.get_title() for axes in figure.axes[::2]] == [f"image {k}" for k in rows]
    for k, image, line in zip(rows, figure.axes[::2], figure.axes[1::2], strict=True):
        assert at(line, TRUTH) == pytest.approx([0.1 * k]) and at(line, ESTIMATE) == pytest.approx(
            [10.0 * chunk[k].item()]
        )
        assert image.images[0].get_array().data == pytest.approx(obs[k, 0].numpy())


def test_the_projector_gets_features_states_and_thumbnails():
    board, data = Board(), recording(9)
    log_features([PLAIN, board], code(3), data, 2)
    features, table, small, _, _, header = board.embeddings["features", 2]
    assert features[:, 0] == pytest.approx(data[0].sum((1, 2, 3)))
    assert header == ["z_1", "image", "seen"] and small.shape == (9, 3, 32, 32)
    assert table == [[f"{0.1 * k:.4g}", str(k), "no" if k < 3 else "yes"] for k in range(9)]
    log_features([board], code(1), recording(700), 0)
    _, table, *_ = board.embeddings["features", 0]
    for k, hue in {
        0: (0, 0, 1),
        8: (1, 0, 0),
    }.items():  # framed in the state's colour, the picture inside
        assert small[k, :, 0, 0].tolist() == small[k, :, -1, 5].tolist() == pytest.approx(hue)
        torch.testing.assert_close(small[k, 0, 2:-2, 2:-2], thumbnails(data[0])[k, 0, 2:-2, 2:-2])
    assert (
        len(table) == 500
        and [table[0][1], table[-1][1]] == ["0", "699"]
        and {row[2] for row in table} == {"yes"}
    )


def test_the_hue_of_a_heading_is_its_angle():
    angle = torch.tensor([0.0, 2.0, 4.0]) * torch.pi / 3
    found = state_colours(torch.stack([angle.cos(), angle.sin()], -1))
    torch.testing.assert_close(found, torch.eye(3), atol=1e-5, rtol=0)


def test_what_cannot_be_shown_is_not_drawn(monkeypatch):
    board, (obs, states, chunk) = Board(), recording(6)
    log_encodings([board], code(3), (obs.flatten(1), states, chunk), 0)  # no images
    log_features([board], code(3), (obs.flatten(1), states, chunk), 0)
    assert not board.figures and board.embeddings["features", 0][2] is None
    monkeypatch.setattr("kbf.plots.tracks.track_figure", None)
    monkeypatch.setattr("kbf.plots.frames.frame_grid", None)
    sequence = Recording(states, obs)
    log_track([PLAIN], "track", sequence, states, 0)
    log_frames([PLAIN], "frames", sequence, states, 0)
    log_encodings([], code(3), (obs, states, chunk), 0)
    assert spread(3, 10) == [0, 1, 2] and spread(1, 4) == [0]


@pytest.mark.slow
def test_pictures_do_not_change_what_is_learned(monkeypatch):
    from lightning.pytorch.loggers import CSVLogger

    def fitted(shown: bool) -> dict[str, Tensor]:
        board = Board()
        logger = CSVLogger("unused")
        monkeypatch.setattr(CSVLogger, "experiment", board)
        for method in ("log_metrics", "log_hyperparams"):
            monkeypatch.setattr(CSVLogger, method, lambda *_, **__: None)
        monkeypatch.setattr(CSVLogger, "save", lambda *_: None)
        torch.manual_seed(0)
        encoders = [
            nn.Sequential(nn.Flatten(), nn.Linear(16, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
            for _ in range(3)
        ]
        for encoder in encoders:
            encoder.features = 3  # pyright: ignore[reportArgumentType]
        made = Encoding(encoders, 1)
        settings = {
            "_target_": "lightning.Trainer",
            "accelerator": "cpu",
            "max_epochs": 3,
            "num_sanity_val_steps": 0,
        }
        quiet = {
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
        }
        trainer = build(settings | quiet, trust=True, logger=[logger] if shown else False)
        fit_encoding(
            trainer,
            {"seed": 0},
            made,
            EncodingSettings(3, 0.01, batch_size=6),
            Frames(*recording(18)),
        )
        assert set(board.figures) == (
            {("frames/encoding", step) for step in (2, 5, 8)} if shown else set()
        )
        return made.state_dict()

    plain, shown = fitted(False), fitted(True)
    assert all(torch.equal(value, shown[name]) for name, value in plain.items())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A finished run on images, over another one's leavings."""
    directory = tmp_path_factory.mktemp("images")
    (directory / "00009" / "features").mkdir(parents=True)
    (directory / "frames.png").write_bytes(b"old")
    words = [
        "data=dsprites",
        "model=kalman",
        "data.encoding.epochs=1",
        "data.encoding.members=2",
        "animation_steps=2",
    ]
    assert main(["train", *words, *QUIET, f"run_dir={directory}"]) == 0
    return directory


@pytest.mark.slow
def test_a_run_on_images_leaves_pictures(run_dir):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run_dir))
    events.Reload()
    assert {"frames/encoding", "frames/test", "track/test"} <= set(events.Tags()["images"])
    assert [event.step for event in events.Images("frames/encoding")] == [0]
    assert 'tensor_name: "features:00000"' in (run_dir / "projector_config.pbtxt").read_text()
    assert (
        not (run_dir / "00009").exists()
        and (run_dir / "00000" / "features" / "sprite.png").exists()
    )
    assert (run_dir / "frames.png").stat().st_size > 5000
    assert Image.open(run_dir / "filter.gif").n_frames == 2  # pyright: ignore[reportAttributeAccessIssue]
    assert json.loads((run_dir / "metrics.json").read_text())["renderer"] == "drawn by kbf"


@pytest.mark.slow
def test_an_evaluation_on_images_leaves_pictures_and_covariances(run_dir, tmp_path):
    words = [
        "evaluate",
        f"checkpoint={run_dir / 'checkpoints' / 'best.ckpt'}",
        "particles=20",
        f"run_dir={tmp_path}",
    ]
    assert main([*words, "animation=false"]) == 0
    names = {"metrics.json", "predictions.npz", "track.png", "frames.png", "calibration.png"}
    assert {path.name for path in tmp_path.iterdir()} == {*names, "about.json"}
    arrays = np.load(tmp_path / "predictions.npz")
    assert (
        arrays["covariances_0"].shape == (4, 2, 2)
        and (np.linalg.eigvalsh(arrays["covariances_0"]) > 0).all()
    )
    assert json.loads((tmp_path / "metrics.json").read_text())["renderer"] == "drawn by kbf"


def test_an_animation_of_vectors_if_asked_for(tmp_path):
    words = ["train", "model=kalman", "logger=none", *QUIET, "animation_steps=2", "animation=true"]
    assert main([*words, f"run_dir={tmp_path}"]) == 0
    assert (tmp_path / "filter.gif").exists() and not (tmp_path / "frames.png").exists()
    assert "renderer" not in json.loads((tmp_path / "metrics.json").read_text())


def test_the_edges_of_a_sprite_picture():
    data = DSprites(
        2, 40, problem=position_model(extent=2.0, sigma_x=1e-6), shape=0, pixel_noise=0.0
    )
    assert data.extent == (-4, 4, 4, -4)
    left, right, bottom, top = data.extent
    frames, z = data.test[0].obs[:, 0], data.decoded[0].obs
    mass, middle = frames.sum((1, 2)), torch.arange(64) + 0.5
    x = left + (right - left) / 64 * ((frames.sum(1) * middle).sum(1) / mass)
    y = top + (bottom - top) / 64 * ((frames.sum(2) * middle).sum(1) / mass)
    assert (torch.stack([x, y], 1) - z).abs().max() < 0.07  # half a pixel is 0.0625


def test_covariances_of_a_kalman_filter_with_gaps_and_unequal_lengths():
    data = SyntheticData(rotation(), n_train=60, n_test=20)
    filter, test = LearnedKalman().fit(data.train), data.test[0]
    gaps = test._replace(mask=torch.arange(20) % 4 > 0)
    found = score(filter, [gaps, Recording(test.states[:7], test.obs[:7])], covariances=True)
    assert found.covariances is not None and "covariance" not in found.diagnostics
    for k, sequence in enumerate((gaps, Recording(test.states[:7], test.obs[:7]))):
        mask = None if sequence.mask is None else sequence.mask[None]
        expected = filter_moments(filter, sequence.obs[None], mask).cov[0]
        torch.testing.assert_close(found.covariances[k], expected)
    plain = score(filter, [gaps])
    assert plain.covariances is None
    torch.testing.assert_close(plain.mse[0], found.mse[0])


def test_covariances_go_through_codes_where_there_are_any():
    data = SyntheticData(rotation(), n_train=30, n_test=5)
    inner = LearnedKalman().fit(data.train)
    seer = Encoding([Sum()], 2)
    images = [s._replace(obs=s.obs[:, None, None]) for s in data.test]
    encoded = score(EncodedFilter(seer, inner, torch.float64), images, covariances=True)
    own = score(inner, data.test, covariances=True)
    torch.testing.assert_close(
        encoded.covariances, own.covariances
    )  # a Kalman filter's do not depend on what it sees

    class Mean:
        def init(self, batch, *, generator=None):
            return (torch.zeros(batch, 2, dtype=torch.float64),)

        def predict(self, state, *, generator=None):
            return state

        def update(self, state, obs):
            return state

        def estimate(self, state):
            return state[0]

    for filter in (Mean(), EncodedFilter(seer, Mean(), torch.float64)):
        assert score(filter, images, covariances=True).covariances is None


def test_covariance_of_weighted_particles(normal):
    particles, log_weights = normal(2, 50, 3), normal(2, 50).log_softmax(-1)
    found = BootstrapFilter(rotation(), normal(4, 3), 50).covariance(
        ParticleState(particles, log_weights)
    )
    for C, z, w in zip(found, particles, log_weights.exp(), strict=True):
        np.testing.assert_allclose(
            C, np.cov(z.T.numpy(), aweights=w.numpy(), bias=True), rtol=1e-10
        )


def kernel_covariance(states: Tensor, weights: Tensor) -> Tensor:
    filter = KernelBayesFilter(states, nn.Identity(), None, nn.Identity())
    return filter.covariance(KernelState(weights))


def test_covariance_of_a_kernel_mean(normal):
    states, w = normal(40, 3) + 5, normal(2, 40).softmax(-1)
    for C, weights in zip(kernel_covariance(states, w), w, strict=True):
        np.testing.assert_allclose(
            C, np.cov(states.T.numpy(), aweights=weights.numpy(), bias=True), rtol=1e-9
        )


def test_covariance_with_negative_weights_is_that_of_the_positive_ones(normal):
    states, w = normal(20, 2), 1 + 2 * normal(60, 20)
    w = w / w.sum(-1, keepdim=True)
    assert ((w < 0).sum(-1) > 0).sum() > 50
    for C, weights in zip(kernel_covariance(states, w), w, strict=True):
        np.testing.assert_allclose(
            C, np.cov(states.T.numpy(), aweights=weights.clamp_min(0).numpy(), bias=True), rtol=1e-9
        )


def test_covariance_without_a_positive_sum_or_with_nan(normal):
    states, w = normal(20, 2), normal(3, 20)
    w[0] -= w[0].mean() + 1
    w[1, 3] = torch.nan
    found = kernel_covariance(states, w)
    assert torch.isfinite(found[[0, 2]]).all() and found[1].isnan().all()
