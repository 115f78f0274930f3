"""Training and checkpoints: a resumed run is an uninterrupted one, and a checkpoint gives equal
estimates.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

from kbf.data.synthetic import SyntheticData
from kbf.data.windows import split
from kbf.evaluation.score import score
from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.rollout import rollout
from kbf.fitted.checkpoint import CheckpointError, load_filter, read_checkpoint
from kbf.recording import Recording
from kbf.runtime.instantiate import build
from kbf.ssm import rotation
from kbf.training.callbacks import LastCheckpoint
from kbf.training.filter_stage import FilterTraining
from kbf.training.fit import check, train

TRAINER = {
    "_target_": "lightning.Trainer",
    "accelerator": "cpu",
    "max_epochs": 4,
    "gradient_clip_val": 1.0,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
LSTM = {
    "name": "lstm",
    "dtype": "float32",
    "net": {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": 2,
        "hidden": 8,
        "sizes": [8],
    },
    "training": {
        "epochs": 4,
        "lr": 0.01,
        "schedule": "cosine",
        "batch_size": 16,
        "window": 8,
        "folds": 1,
        "validation": 0.2,
    },
}
KERNEL = {
    "name": "kbf_tuned",
    "net": {"_target_": "kbf.KBF", "rank": 16},
    "training": {
        "epochs": 2,
        "lr": 0.05,
        "window": 8,
        "stride": 4,
        "burn_in": 2,
        "folds": 2,
        "validation": 0.2,
    },
}
TRUE_MODEL = {"_target_": "kbf.rotation"}
CLOSED = {
    "kalman": {"_target_": "kbf.LearnedKalman"},
    "frame": {"_target_": "kbf.FrameRegression"},
    "ekf": {"_target_": "kbf.EKF", "model": TRUE_MODEL},
    "ukf": {"_target_": "kbf.UKF", "model": TRUE_MODEL},
    "particle": {
        "_target_": "kbf.ParticleFilter",
        "model": TRUE_MODEL,
        "particles": 50,
    },
    "kbf": {
        "_target_": "kbf.SimulatedKBF",
        "points": 60,
        "draws": 2,
        "rank": 8,
    },
    "dense": {"_target_": "kbf.KBF", "rank": None},
}


@pytest.fixture(scope="module")
def data() -> SyntheticData:
    return SyntheticData(rotation(), n_train=60, n_test=20)


def config(model: dict, **training) -> dict:
    model = deepcopy(model)
    if training:
        model["training"] |= training
    epochs = (model.get("training") or {}).get("epochs", 1)
    return {"model": model, "seed": 3, "trainer": {**TRAINER, "max_epochs": epochs}}


class Interrupted(Exception):
    pass


def interrupt_after(epoch: int, monkeypatch) -> None:
    original = LastCheckpoint.on_train_epoch_end

    def stop(self, trainer, pl_module):
        original(self, trainer, pl_module)
        if trainer.current_epoch == epoch:
            raise Interrupted

    monkeypatch.setattr(LastCheckpoint, "on_train_epoch_end", stop)


@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_resumed_is_uninterrupted(data, tmp_path, monkeypatch, schedule):
    settings = config(LSTM, schedule=schedule)
    dropout = {"_target_": "torch.nn.Dropout", "p": 0.3}  # its random numbers must go on as well
    settings["model"]["net"] |= {"features": 2, "encoder": dropout}
    whole = train(settings, data.train, tmp_path / "whole", trust=True)
    with monkeypatch.context() as patch:
        interrupt_after(1, patch)
        with pytest.raises(Interrupted):
            train(settings, data.train, tmp_path / "cut", trust=True)
    assert read_checkpoint(tmp_path / "cut" / "last.ckpt")["epoch"] == 1
    resumed = train(
        settings, data.train, tmp_path / "cut", ckpt_path=tmp_path / "cut" / "last.ckpt", trust=True
    )
    assert whole is not None and resumed is not None
    assert whole.validation_mse == resumed.validation_mse
    last, other = (read_checkpoint(tmp_path / d / "last.ckpt") for d in ("whole", "cut"))
    assert last["global_step"] == other["global_step"]
    for name, value in last["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name


def test_early_stopping_keeps_the_best_and_stays_stopped(data, tmp_path):
    settings = config(LSTM, epochs=40, lr=0.5, patience=3, schedule="constant")
    trained = train(settings, data.train, tmp_path)
    assert trained is not None
    assert 4 <= trained.epochs < 40
    best, last = (read_checkpoint(tmp_path / f"{name}.ckpt") for name in ("best", "last"))
    assert last["epoch"] - best["epoch"] == 3
    assert best["callbacks"]["BestCheckpoint"]["best_model_score"] == trained.validation_mse
    again = train(settings, data.train, tmp_path, ckpt_path=tmp_path / "last.ckpt")
    assert again is not None
    assert (again.epochs, again.validation_mse) == (trained.epochs, trained.validation_mse)


def test_the_best_epoch_may_be_that_of_the_net_s_own_loss(data, tmp_path):
    net = {
        "_target_": "kbf.GRUImages",
        "d": 2,
        "q": 2,
        "m": 3,
        "units": 8,
    }
    settings = config(
        LSTM | {"name": "gru_images", "net": net},
        epochs=12,
        lr=0.05,
        schedule="constant",
        monitor="loss",
    )
    trained = train(settings, data.train, tmp_path)
    assert trained is not None
    kept = read_checkpoint(tmp_path / "best.ckpt")["callbacks"]["BestCheckpoint"]
    (held,) = split(data.train, 0.2)[1]
    own = trained.module.net
    with torch.no_grad():
        loss = own.loss(*(leaf[None].float() for leaf in (held.states, held.obs))).item()
        z = rollout(own, held.obs[None].float()).estimates
    assert float(kept["best_model_score"]) == pytest.approx(loss, rel=1e-4)
    assert (
        kept["least"]
        == trained.validation_mse
        == pytest.approx(float((z[0] - held.states).square().sum(-1).mean()), rel=1e-4)
    )
    again = train(settings, data.train, tmp_path, ckpt_path=tmp_path / "last.ckpt")
    assert again is not None and again.validation_mse == trained.validation_mse
    with pytest.raises(ValueError, match="needs a net with a loss of its own, KBF has none"):
        train(config(KERNEL, monitor="loss"), data.train, tmp_path / "kbf")


def test_gradient_training_lowers_the_error_and_ignores_the_validation_part(data, tmp_path):
    settings = config(KERNEL, epochs=6)
    start = FilterTraining(settings, data.train)
    start.net.prepare([data.train[0]])
    trained = train(settings, data.train, tmp_path)
    assert trained is not None
    moved = trained.module.net.log_bandwidth.detach() - start.net.log_bandwidth.detach()
    assert moved.abs().max() > 0.01
    other = [
        data.train[0]._replace(states=data.train[0].states.clone(), obs=data.train[0].obs.clone())
    ]
    other[0].states[48:] += 100.0
    spoiled = train(config(KERNEL, epochs=1, schedule="constant"), other, tmp_path / "a")
    clean = train(config(KERNEL, epochs=1, schedule="constant"), data.train, tmp_path / "b")
    assert spoiled is not None and clean is not None
    assert torch.equal(spoiled.module.net.log_bandwidth, clean.module.net.log_bandwidth)
    assert spoiled.validation_mse != clean.validation_mse


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [LSTM, KERNEL, *({"name": name, "net": net, "training": None} for name, net in CLOSED.items())],
    ids=lambda m: m["name"],
)
def test_a_checkpoint_gives_equal_estimates_from_itself_alone(data, tmp_path, model):
    trained = train(
        config(model, **({"epochs": 1} if model["training"] else {})), data.train, tmp_path
    )
    assert trained is not None
    assert {path.name for path in tmp_path.iterdir()} == {"best.ckpt", "last.ckpt"}
    torch.load(tmp_path / "best.ckpt", weights_only=True)
    dtype = trained.module.model_dtype
    before = score(trained.filter, data.test, dtype=dtype)
    after = score(load_filter(tmp_path / "best.ckpt").filter, data.test, dtype=dtype)
    assert torch.equal(before.estimates[0], after.estimates[0])
    assert torch.isfinite(after.mse).all()


@pytest.mark.slow
def test_saved_operators_are_the_ones_used(data, tmp_path, monkeypatch):
    """Also where another machine would build them differently, with another rank even."""
    train(config({"name": "kbf", "net": CLOSED["kbf"], "training": None}), data.train, tmp_path)
    before = score(load_filter(tmp_path / "best.ckpt").filter, data.test)
    from kbf.filters.kernel.simulated_kbf import SimulatedKBF

    original = SimulatedKBF.fit

    def otherwise(self, memory):
        self.rank, self.seed = self.rank - 3, self.seed + 1
        return original(self, memory)

    monkeypatch.setattr(SimulatedKBF, "fit", otherwise)
    after = score(load_filter(tmp_path / "best.ckpt").filter, data.test)
    torch.testing.assert_close(before.estimates[0], after.estimates[0])


def test_several_sequences_and_images(tmp_path):
    """An encoder of images is trained by the same path, on recordings of different lengths."""
    generator = torch.Generator().manual_seed(0)
    sequences = [
        Recording(
            torch.randn(n, 2, generator=generator), torch.rand(n, 1, 4, 4, generator=generator)
        )
        for n in (30, 17, 23)
    ]
    net = {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": [1, 4, 4],
        "hidden": 4,
        "encoder": {"_target_": "torch.nn.Flatten"},
        "features": 16,
    }
    model = {
        **LSTM,
        "net": net,
        "training": {"epochs": 2, "lr": 0.01, "window": 6, "folds": 1, "validation": 0.5},
    }
    trained = train(config(model), sequences, tmp_path, trust=True)
    assert trained is not None
    assert trained.validation_mse is not None
    assert [len(s.states) for s in trained.module.memory.recordings()] == [30, 17, 23]


def test_the_fast_way_through_a_recurrent_net_is_the_rollout(data):
    net = LSTMFilter(2, 2, hidden=4, sizes=(4,)).double()
    mask = torch.rand(1, 60, generator=torch.Generator().manual_seed(0)) < 0.7
    windows = Recording(data.train[0].states[None], data.train[0].obs[None], mask)
    torch.testing.assert_close(
        net.window_estimates([], windows), rollout(net, windows.obs, mask=mask).estimates
    )


@pytest.mark.parametrize("content", [b"", b"no checkpoint at all", b"PK\x03\x04 broken zip"])
def test_damaged_checkpoints(tmp_path, content):
    path = tmp_path / "best.ckpt"
    path.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=rf"best.ckpt \({len(content)} bytes\) is no checkpoint"
    ):
        load_filter(path)


def test_missing_foreign_and_cut_checkpoints(data, tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_filter(tmp_path / "none.ckpt")
    torch.save({"state_dict": nn.Linear(2, 2).state_dict()}, tmp_path / "other.ckpt")
    with pytest.raises(CheckpointError, match="not written by kbf"):
        load_filter(tmp_path / "other.ckpt")
    train(
        config({"name": "kalman", "net": CLOSED["kalman"], "training": None}), data.train, tmp_path
    )
    whole = (tmp_path / "best.ckpt").read_bytes()
    (tmp_path / "cut.ckpt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load_filter(tmp_path / "cut.ckpt")
    checkpoint = read_checkpoint(tmp_path / "best.ckpt")
    checkpoint["hyper_parameters"]["config"]["model"]["net"] = LSTM["net"]
    torch.save(checkpoint, tmp_path / "mixed.ckpt")
    with pytest.raises(CheckpointError, match="does not fit"):
        load_filter(tmp_path / "mixed.ckpt")


@pytest.mark.parametrize(
    "target",
    ["os.getcwd", "kbf.training.fit.Path", "kbf.training.fit.torch.load", "builtins.print"],
)
def test_a_checkpoint_names_only_what_kbf_defines(data, tmp_path, target):
    train(
        config({"name": "kalman", "net": CLOSED["kalman"], "training": None}), data.train, tmp_path
    )
    checkpoint = read_checkpoint(tmp_path / "best.ckpt")
    checkpoint["hyper_parameters"]["config"]["model"]["net"] = {"_target_": target}
    torch.save(checkpoint, tmp_path / "evil.ckpt")
    with pytest.raises(ValueError, match=r"trust=true|does not exist"):
        load_filter(tmp_path / "evil.ckpt")


def test_build():
    assert build({"a": [1, {"_target_": "kbf.OrientationModel"}]})["a"][1].turn == 0.4
    assert build({"_target_": "collections.OrderedDict", "x": 1}, trust=True) == {"x": 1}
    with pytest.raises(ValueError, match="unexpected keyword argument 'bogus'"):
        build({"_target_": "kbf.OrientationModel", "bogus": 1})
    with pytest.raises(ValueError, match="does not exist"):
        build({"_target_": "kbf.ssm.NoSuchModel"})
    with pytest.raises(ValueError, match="no class or function"):
        build({"_target_": "kbf.rkhs.kernels.KERNELS"})


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"bogus": 1}, "no 'bogus'; it has epochs, lr"),
        ({"optimiser": "lbfgs"}, "must be one of adam, adamw, sgd; got 'lbfgs'"),
        ({"window": 70}, "no window of 70 steps fits"),
    ],
)
def test_check_finds_what_cannot_be_trained(data, training, message):
    with pytest.raises(ValueError, match=message):
        check(config(LSTM, **training), data.train)


def test_a_diverging_loss_is_one_error(data, tmp_path, monkeypatch):
    monkeypatch.setattr(
        LSTMFilter, "forward", lambda self, obs, *_: torch.full((*obs.shape[:2], 2), float("nan"))
    )
    with pytest.raises(ValueError, match=r"loss became nan in epoch 0.*lr is 0.01"):
        train(config(LSTM), data.train, Path(tmp_path))
