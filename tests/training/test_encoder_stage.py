"""The first stage: encoders learn, an interrupted fit is an uninterrupted one, and what cannot be
fitted is one clear line.
"""

from __future__ import annotations

import math
import warnings
from copy import deepcopy
from pathlib import Path

import lightning
import pytest
import torch
from torch import Tensor, nn

import kbf.training.fit
from kbf.data.windows import held_by
from kbf.densities.ratio import StateDensity, read_encoding
from kbf.fitted.checkpoint import CheckpointError, load_filter, read_checkpoint
from kbf.fitted.settings import EncodingSettings, read_encoding_settings
from kbf.images import losses
from kbf.images.augment import PixelNoise
from kbf.images.encoders import CNN
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.images.losses import ridge_loss
from kbf.recording import Recording
from kbf.rkhs.linalg import psd_solve
from kbf.training import encoder_stage
from kbf.training.callbacks import LastCheckpoint
from kbf.training.encoder_datamodule import Frames, RowOrder
from kbf.training.encoder_stage import EncoderTraining, check_encoder, fit_encoding, warn_of_chance
from kbf.training.fit import check, train

SIDE = 8
TRAINER = {
    "_target_": "lightning.Trainer",
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
ENCODER = {
    "_target_": "kbf.CNN",
    "q": [1, SIDE, SIDE],
    "features": 8,
    "channels": [8],
    "norm": "batch",
    "dropout": 0.1,
}
NOISE = {"_target_": "kbf.PixelNoise", "std": 0.1}
CODING = {
    "encoder": ENCODER,
    "epochs": 4,
    "lr": 0.02,
    "members": 2,
    "batch_size": 32,
    "augment": [NOISE],
    "pixel_ridge": False,
}
KALMAN = {
    "name": "kalman",
    "net": {"_target_": "kbf.LearnedKalman"},
    "training": None,
    "encoding": CODING,
}


def blobs(*lengths: int, seed: int = 0) -> list[Recording]:
    """A bright blob that circles on 8 x 8 pixels; its position is the state, both as it is."""
    found = []
    for k, steps in enumerate(lengths):
        generator = torch.Generator().manual_seed(100 * seed + k)
        angle = (0.5 + 0.3 * torch.randn(steps, generator=generator)).cumsum(0)
        radius = 0.4 + 0.4 * torch.rand(steps, generator=generator)
        states = radius[:, None] * torch.stack([angle.cos(), angle.sin()], -1)
        grid = torch.linspace(-1, 1, SIDE)
        rows, columns = (-4 * (grid - states[:, i, None]).square() for i in (1, 0))
        images = (rows[:, :, None] + columns[:, None, :]).exp()[:, None]
        found.append(
            Recording(
                states.double(),
                (images + 0.1 * torch.randn(images.shape, generator=generator)).clamp(0, 1),
            )
        )
    return found


def config(encoding: dict | None = None, **trainer) -> dict:
    model = deepcopy(KALMAN)
    model["encoding"] |= encoding or {}
    return {"model": model, "seed": 3, "trainer": TRAINER | trainer}


def fitted(
    sequences: list[Recording], how: EncodingSettings, seed: int = 0, **trainer
) -> tuple[Encoding, EncoderTraining]:
    """A code of small nets, fitted."""
    torch.manual_seed(seed)
    code = Encoding(
        [CNN((1, SIDE, SIDE), features=8, channels=(8,), norm="batch") for _ in range(how.members)],
        2,
        how.gaussians,
    )
    obs, states = torch.cat([s.obs for s in sequences]), torch.cat([s.states for s in sequences])
    chunk = torch.cat(held_by([len(s.states) for s in sequences], how.members))
    settings: dict = {key: value for key, value in (TRAINER | trainer).items() if key != "_target_"}
    made = lightning.Trainer(
        max_epochs=how.epochs, logger=False, enable_checkpointing=False, **settings
    )
    return code, fit_encoding(made, {"seed": seed}, code, how, Frames(obs, states, chunk))


def error(code: Encoding, sequence: Recording) -> float:
    """Of codes of new images, over the variance of the states."""
    with torch.no_grad():
        square = (code.eval()(sequence.obs) - sequence.states).square().sum(-1).mean()
    return (square / sequence.states.var(0).sum()).item()


# learning


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"loss": "ridge"},
        {"loss": "split"},
        {"loss": "ridge", "targets": "fourier", "fourier": 20},
        {"loss": "split", "targets": "fourier", "fourier": 20},
        {"loss": "ridge", "weighting": "kulsif"},
        {"members": 1},
        {"batch_size": None, "epochs": 60},
        {"optimiser": "adam", "schedule": "constant", "lr": 0.01},
        {"optimiser": "sgd", "lr": 0.1, "clip": 1.0},
    ],
    ids=lambda changes: " ".join(f"{k}={v}" for k, v in changes.items()) or "linear",
)
def test_every_kind_learns(changes):
    how = EncodingSettings(
        **{
            "epochs": 15,
            "lr": 0.02,
            "members": 2,
            "batch_size": 32,
            "weight_decay": 0.01,
            **changes,
        }
    )
    (test,) = blobs(60, seed=1)
    code, module = fitted(blobs(160), how)
    assert error(code, test) < 0.15
    assert not any(m.training for m in code.modules())
    if how.members > 1:  # the validation error that was logged is that of crosswise codes
        (train,) = blobs(160)
        encoded = code.crossfit(train, held_by([160], 2)[0])
        truth = (encoded.obs - train.states).square().sum(-1).mean().item()
        ratio_dim = module.trainer.callback_metrics["encoding/validation"].item()
        assert ratio_dim == pytest.approx(
            truth, rel=1e-3 if how.loss != "linear" or how.schedule == "onecycle" else 0.5
        )


def test_a_member_never_sees_its_own_chunk(monkeypatch):
    """Images that say which chunk they are of: no encoder is given one of its own in training."""
    (sequence,) = blobs(30)
    held = held_by([30], 3)[0]
    marked = sequence._replace(
        obs=held[:, None, None, None].float().expand(30, 1, SIDE, SIDE).clone()
    )
    seen: dict[int, set[float]] = {}
    original = CNN.encode

    def watched(self, x):
        if self.training:
            seen.setdefault(id(self), set()).update(x[:, 0, 0, 0].tolist())
        return original(self, x)

    monkeypatch.setattr(CNN, "encode", watched)
    code, _ = fitted([marked], EncodingSettings(epochs=2, lr=0.01, members=3, batch_size=8))
    assert [seen[id(encoder)] for encoder in code.encoders] == [{1.0, 2.0}, {0.0, 2.0}, {0.0, 1.0}]


def test_closed_heads_are_the_ridge_regression_on_the_other_chunks():
    (sequence,) = blobs(60)
    how = EncodingSettings(epochs=1, lr=0.01, members=2, loss="ridge", reg=0.1)
    code, _ = fitted([sequence], how)
    held = held_by([60], 2)[0]
    for k in range(2):
        with torch.no_grad():
            psi = code.encoders[k](sequence.obs[held != k]).double()
        y = (sequence.states[held != k] - code.z_mean) / code.z_scale
        left = torch.cat(
            [psi, torch.ones(30, 1, dtype=torch.float64)], 1
        )  # the offset is not shrunk
        shrink = 30 * 0.1 * torch.diag(torch.tensor([1.0] * 8 + [0.0], dtype=torch.float64))
        truth = torch.linalg.solve(left.mT @ left + shrink, left.mT @ y)
        head = code.heads[k]
        torch.testing.assert_close(
            torch.cat([head.weight.mT, head.bias[None]]).double(), truth, rtol=1e-3, atol=1e-4
        )


def test_one_seed_one_code_another_seed_another():
    how = EncodingSettings(epochs=2, lr=0.02, members=2, batch_size=16, augment=(PixelNoise(0.1),))
    a, b, c = (fitted(blobs(60), how, seed)[0].state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["heads.0.weight"], c["heads.0.weight"])


def test_a_batch_of_one_chunk_teaches_its_member_nothing_and_breaks_nothing():
    how = EncodingSettings(epochs=1, lr=0.02, members=2)
    torch.manual_seed(0)
    code = Encoding(
        [CNN((1, SIDE, SIDE), features=8, channels=(8,), norm="batch") for _ in range(2)], 2
    )
    (s,) = blobs(12)
    chunk = torch.zeros(12, dtype=torch.long)
    for kind in ("linear", "ridge", "split"):
        module = EncoderTraining(
            {"seed": 0}, code, how._replace(loss=kind), Frames(s.obs, s.states, chunk)
        )
        for rows in (slice(None), slice(1)):
            found = module.losses(Frames(s.obs[rows], s.states[rows], chunk[rows]))
            found.sum().backward()
            assert found[0] == 0
            assert torch.isfinite(found).all()
        gradients = [p.grad for p in code.encoders[0].parameters()]
        assert all(
            g is not None and (g == 0).all() for g in gradients
        )  # there, since distributed training wants them


def test_fourier_targets():
    (s,) = blobs(50)
    code = Encoding([CNN((1, SIDE, SIDE))], 2)
    how = EncodingSettings(
        epochs=1, lr=0.1, members=1, loss="ridge", targets="fourier", fourier=4000
    )
    module = EncoderTraining({"seed": 0}, code, how, Frames(s.obs, s.states, torch.zeros(50)))
    phi, width = module.targets(s.states), torch.pdist(s.states).median()
    gram = (-0.5 * torch.cdist(s.states, s.states).square() / width**2).exp()
    torch.testing.assert_close((phi @ phi.mT).double(), gram, atol=0.1, rtol=0)
    assert phi.dtype == torch.float32


@pytest.mark.parametrize("kind", ["linear", "split"])
def test_mixed_precision(kind, monkeypatch):
    """Encoders run in bfloat16, the solve in double precision, and the error is that of single
    precision.
    """
    solved, ran = set(), set()
    original, encode = psd_solve, CNN.encode
    monkeypatch.setattr(
        losses,
        "psd_solve",
        lambda a, b, **kw: solved.add((a.dtype, b.dtype)) or original(a, b, **kw),
    )

    def watched(self, x):
        out = encode(self, x)
        ran.add(out.dtype)
        return out

    monkeypatch.setattr(CNN, "encode", watched)
    how, (test,) = (
        EncodingSettings(epochs=8, lr=0.02, members=2, batch_size=32, loss=kind),
        blobs(60, seed=1),
    )
    full = error(fitted(blobs(128), how)[0], test)
    assert torch.bfloat16 not in ran
    half = error(fitted(blobs(128), how, precision="bf16-mixed")[0], test)
    assert torch.bfloat16 in ran
    assert solved <= {(torch.float64, torch.float64)}
    assert half < full + 0.05


# whole runs of both stages


class Interrupted(Exception):
    pass


def stop_after(epoch: int, monkeypatch, name: str = "encoder.ckpt") -> None:
    """The run ends when the checkpoint of this name is written in an epoch."""
    original = LastCheckpoint.on_train_epoch_end

    def stop(self, trainer, pl_module):
        self.saved = -math.inf
        original(self, trainer, pl_module)
        if trainer.current_epoch == epoch and self.path.name == name:
            raise Interrupted

    monkeypatch.setattr(LastCheckpoint, "on_train_epoch_end", stop)


def code_of(directory: Path) -> dict[str, Tensor]:
    return read_checkpoint(directory / "best.ckpt")["state_dict"]


@pytest.mark.parametrize("schedule", ["onecycle", "constant"])
@pytest.mark.parametrize("epoch", [1, 3], ids=["middle", "end"])
def test_a_resumed_first_stage_is_an_uninterrupted_one(tmp_path, monkeypatch, schedule, epoch):
    """Batch norm, optimiser, learning rate, dropout and augmentation go on; also when all epochs
    are done already.
    """
    data, settings = blobs(50, 30), config({"schedule": schedule})
    train(settings, data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(epoch, patch)
        with pytest.raises(Interrupted):
            train(settings, data, tmp_path / "cut")
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {"encoder.ckpt"}
    stored = read_checkpoint(tmp_path / "cut" / "encoder.ckpt")
    assert (stored["epoch"], stored["kbf"]["stage"]) == (epoch, "encoding")
    train(settings, data, tmp_path / "cut", ckpt_path=tmp_path / "cut" / "encoder.ckpt")
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {"best.ckpt", "last.ckpt"}
    whole, cut = code_of(tmp_path / "whole"), code_of(tmp_path / "cut")
    assert whole.keys() == cut.keys()
    for name, value in whole.items():
        assert torch.equal(value, cut[name]), name


def test_the_first_stage_is_kept_until_the_second_has_a_checkpoint(tmp_path, monkeypatch):
    data = blobs(60)
    with monkeypatch.context() as patch:
        patch.setattr(
            "kbf.filters.gaussian.kalman.LearnedKalman.fit",
            lambda self, memory: 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            train(config(), data, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"encoder.ckpt"}
    assert read_checkpoint(tmp_path / "encoder.ckpt")["epoch"] == CODING["epochs"] - 1
    train(config(), data, tmp_path, ckpt_path=tmp_path / "encoder.ckpt")
    train(config(), data, tmp_path / "whole")
    assert all(torch.equal(v, code_of(tmp_path / "whole")[k]) for k, v in code_of(tmp_path).items())


LSTM = {
    "name": "lstm",
    "dtype": "float32",
    "encoding": CODING,
    "net": {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": [2],
        "hidden": 8,
        "sizes": [8],
    },
    "training": {
        "epochs": 3,
        "lr": 0.01,
        "schedule": "cosine",
        "batch_size": 16,
        "window": 8,
        "folds": 1,
        "validation": 0.2,
    },
}


def test_a_resumed_second_stage_is_an_uninterrupted_one(tmp_path, monkeypatch):
    """It takes the code from its checkpoint: the encoders are not fitted again."""
    settings = {"model": LSTM, "seed": 3, "trainer": TRAINER | {"max_epochs": 3}}
    data = blobs(60, 40)
    whole = train(settings, data, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(1, patch, "last.ckpt")
        with pytest.raises(Interrupted):
            train(settings, data, tmp_path / "cut")
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {"best.ckpt", "last.ckpt"}
    with monkeypatch.context() as patch:
        patch.setattr(
            "kbf.training.fit.fit_encoding",
            lambda *_: pytest.fail("the encoders were fitted again"),
        )
        resumed = train(settings, data, tmp_path / "cut", ckpt_path=tmp_path / "cut" / "last.ckpt")
    assert whole is not None and resumed is not None
    assert whole.validation_mse == resumed.validation_mse
    last, other = (read_checkpoint(tmp_path / d / "last.ckpt") for d in ("whole", "cut"))
    for name, value in last["state_dict"].items():
        assert torch.equal(value, other["state_dict"][name]), name


def test_memory_holds_codes_and_no_images(tmp_path):
    data = blobs(50, 30)
    trained = train(config(), data, tmp_path)
    assert trained is not None
    checkpoint = torch.load(tmp_path / "best.ckpt", weights_only=True)
    sizes = {
        tuple(value.shape)
        for name, value in checkpoint["state_dict"].items()
        if name.startswith("memory.")
    }
    assert sizes == {(50, 2), (30, 2)}
    assert checkpoint["kbf"]["observation"] == (1, SIDE, SIDE)
    loaded = load_filter(tmp_path / "best.ckpt").filter
    assert isinstance(loaded, EncodedFilter) and not any(m.training for m in loaded.modules())
    trained.module.train()
    assert not any(m.training for m in trained.module.filter().code.modules())
    code, held = trained.module.code, held_by([50, 30], 2)
    assert code is not None
    for k, sequence in enumerate(trained.module.memory.recordings()):
        torch.testing.assert_close(sequence.obs, code.crossfit(data[k], held[k]).obs)
        torch.testing.assert_close(sequence.states, data[k].states)


def test_encoders_that_learn_nothing_are_told_of(tmp_path):
    data = blobs(50, 30)
    noise = [
        s._replace(states=torch.rand(s.states.shape, generator=torch.Generator().manual_seed(k)))
        for k, s in enumerate(data)
    ]
    with pytest.warns(
        UserWarning, match=r"learned next to nothing: .* 0 % of the states' variance"
    ):
        train(config(), noise, tmp_path)


@pytest.mark.parametrize(("error", "warned"), [(0.96, True), (0.94, False)])
def test_next_to_nothing_is_five_percent_of_the_variance_that_images_tell_of(error, warned):
    states = torch.cat(
        [torch.tensor([[-1.0], [1.0]]).repeat(50, 1), 99 * torch.ones(100, 1)], 1
    )  # the second is not told of
    encodings = states[:, :1] + math.sqrt(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_chance(states, encodings, EncodingSettings(epochs=1, lr=0.1, visible=(0,)))
    assert bool(caught) == warned


def test_missing_images_are_not_learned_from_and_stay_missing(tmp_path, monkeypatch):
    """What is in their place changes nothing; the others keep their chunks."""
    given = []
    original = kbf.training.fit.fit_encoding
    monkeypatch.setattr(
        kbf.training.fit, "fit_encoding", lambda *a: given.append(a[4]) or original(*a)
    )
    data = blobs(50, 30)
    mask = torch.rand(50, generator=torch.Generator().manual_seed(0)) < 0.7
    runs = []
    for value in (0.0, 1e6):
        spoiled = torch.where(mask[:, None, None, None], data[0].obs, value)
        trained = train(
            config(), [Recording(data[0].states, spoiled, mask), data[1]], tmp_path / str(value)
        )
        assert trained is not None
        runs.append(trained.module)
    obs, states, chunk = given[0]
    held = held_by([50, 30], 2)
    assert torch.equal(chunk, torch.cat([held[0][mask], held[1]]))
    assert len(obs) == len(states) == len(chunk)
    assert torch.equal(obs, torch.cat([data[0].obs[mask], data[1].obs]))
    a, b = (run.code.state_dict() for run in runs)
    assert all(torch.equal(a[name], b[name]) for name in a)
    first = runs[0].memory.recordings()[0]
    assert first.mask is not None and torch.equal(first.mask, mask)
    assert torch.equal(first.obs[mask], runs[1].memory.recordings()[0].obs[mask])
    assert runs[0].memory.recordings()[1].mask is None


def test_encoders_depend_on_the_seed_alone_and_differ(tmp_path):
    """Not on the data, nor on the net behind them: models are compared on one code."""
    first = train(
        config({"epochs": 1, "lr": 1e-12, "weight_decay": 0.0}), blobs(50), tmp_path / "a"
    )
    model = deepcopy(LSTM) | {
        "encoding": deepcopy(CODING) | {"epochs": 1, "lr": 1e-12, "weight_decay": 0.0}
    }
    second = train(
        {"model": model, "seed": 3, "trainer": TRAINER | {"max_epochs": 1}},
        blobs(60, seed=1),
        tmp_path / "b",
    )
    other = train(
        config({"epochs": 1, "lr": 1e-12, "weight_decay": 0.0}) | {"seed": 4},
        blobs(50),
        tmp_path / "c",
    )
    assert first is not None and second is not None and other is not None
    nets = [[e.net[0].weight for e in t.module.code.encoders] for t in (first, second, other)]  # pyright: ignore[reportOptionalMemberAccess]
    torch.testing.assert_close(nets[0], nets[1])
    assert not torch.allclose(nets[0][0], nets[0][1])
    assert not torch.allclose(nets[0][0], nets[2][0])


def test_an_unfinished_first_stage_is_no_filter(tmp_path, monkeypatch):
    stop_after(0, monkeypatch)
    with pytest.raises(Interrupted):
        train(config(), blobs(50), tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"encoders were still learning: go on with kbf train ckpt_path=.*encoder.ckpt",
    ):
        load_filter(tmp_path / "encoder.ckpt")


def test_a_diverging_loss_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr(CNN, "encode", lambda self, x: torch.full((len(x), 8), float("nan")))
    with pytest.raises(
        ValueError,
        match=r"loss of the encoders became \[nan, nan\]: try a smaller data.encoding.lr \(0.02\)",
    ):
        train(config(), blobs(50), tmp_path)


# the order of the images


@pytest.mark.parametrize("batch_size", [4, 7, None, 100])
def test_batches_are_even_and_hold_every_row_once(batch_size):
    order = RowOrder(23, batch_size, seed=0)
    batches = list(order)
    assert len(batches) == len(order)
    sizes = [len(batch) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= (batch_size or 23)
    assert sorted(torch.cat(batches).tolist()) == list(range(23))


def test_the_order_depends_on_seed_and_epoch_alone():
    def rows(seed: int, epoch: int) -> list[int]:
        order = RowOrder(20, 5, seed)
        list(order)  # what was drawn before is of no matter
        order.set_epoch(epoch)
        torch.rand(3)
        return torch.cat(list(order)).tolist()

    assert rows(1, 4) == rows(1, 4)
    assert len({tuple(rows(seed, epoch)) for seed in (0, 1) for epoch in range(5)}) == 10
    order = RowOrder(20, 5, 1)
    late = iter(order)
    order.set_epoch(4)  # Lightning makes the iterator of a resumed run before it knows the epoch
    assert torch.cat(list(late)).tolist() == rows(1, 4)


def test_processes_share_each_batch(monkeypatch):
    """Each encodes a share of the images; a process without any still has a graph."""
    images, shares = torch.rand(5, 3), []

    def keep(mine, n):
        assert n == len(images) and mine.requires_grad
        shares.append(mine)
        return mine

    monkeypatch.setattr(encoder_stage, "gathered", keep)
    encoder = torch.nn.Linear(3, 2)
    for world in (2, 7):
        shares.clear()
        for rank in range(world):
            monkeypatch.setattr(encoder_stage, "rank_and_world", lambda r=rank, w=world: (r, w))
            encoder_stage.shared_features(encoder, images)
        rows = torch.empty(5, 2)
        for rank, share in enumerate(shares):
            rows[rank::world] = share.detach()
        assert torch.allclose(rows, encoder(images))


def test_the_ridge_loss_has_the_weights_of_a_belief(monkeypatch):
    """The loss of each member is that of its own images with the ratio of a belief among them."""
    (sequence,) = blobs(24)
    how = EncodingSettings(
        epochs=1, lr=0.01, members=2, batch_size=None, loss="ridge", weighting="kulsif"
    )
    seen: list = []

    def watched(features, targets, reg, ratio=None):
        seen.append(ratio)
        return ridge_loss(features, targets, reg, ratio)

    monkeypatch.setattr("kbf.training.encoder_stage.ridge_loss", watched)
    fitted([sequence], how)
    assert len(seen) == 2
    for ratio in seen:
        assert ratio.shape == (12,) and (ratio >= 0).all()
        assert ratio.mean().item() == pytest.approx(1) and ratio.std() > 0.1


# settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speed": 1}, "data.encoding has no 'speed'; it has encoder, epochs, lr"),
        (
            {"loss": "hinge"},
            "data.encoding.loss must be one of linear, ridge, split, ratio; got 'hinge'",
        ),
        ({"targets": "pixels"}, "data.encoding.targets must be one of states, fourier"),
        ({"optimiser": "lbfgs"}, "data.encoding.optimiser must be one of adam, adamw, sgd"),
        ({"schedule": "cosine"}, "data.encoding.schedule must be one of constant, onecycle"),
        ({"members": 0}, "data.encoding.members must be a whole number, at least 1; got 0"),
        ({"epochs": 1.5}, "data.encoding.epochs must be a whole number, at least 1; got 1.5"),
        ({"batch_size": 0}, "data.encoding.batch_size must be a whole number, at least 1; got 0"),
        ({"lr": 0}, "data.encoding.lr must be a number > 0; got 0"),
        ({"lr": "fast"}, "data.encoding.lr must be a number > 0; got 'fast'"),
        ({"reg": -1.0}, "data.encoding.reg must be a number > 0; got -1.0"),
        ({"weight_decay": -1.0}, "data.encoding.weight_decay must be a number >= 0"),
        ({"targets": "fourier"}, "use ridge or split with targets=fourier"),
        (
            {"targets": "fourier", "loss": "ridge", "fourier": 5},
            "data.encoding.fourier must be even",
        ),
        ({"encoder": None}, "data.encoding needs encoder"),
        ({"weighting": "kulsif"}, "weighting=kulsif is for data.encoding.loss=ridge; got loss=lin"),
        ({"weighting": "iw"}, "data.encoding.weighting must be one of uniform, kulsif"),
        ({"members": 99}, "50 training steps cannot be cut into 99 folds"),
        (
            {"batch_size": 1},
            "50 images in batches of 1 leave batches of 1, too few",
        ),
        (
            {"encoder": ENCODER | {"q": [3, 8, 8]}},
            "images of 1 x 8 x 8, the encoder was built for 3 x 8 x 8",
        ),
        (
            {"encoder": {"_target_": "torch.nn.Flatten"}},
            "the encoder Flatten needs an attribute 'features'",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_cannot_be_are_one_line_before_anything_is_written(
    changes, message, tmp_path
):
    for go in (
        lambda c, d: check(c, d, trust=True),
        lambda c, d: train(c, d, tmp_path / "run", trust=True),
    ):
        if (
            "encoder was built" in message
            and not (tmp_path / "run").exists()
            and go.__code__.co_names[0] == "train"
        ):
            continue  # training finds it, too, but only after the folder is made: `check` is first
        with pytest.raises(ValueError, match=message.replace(".", r"\.")) as ratio_dim:
            go(config(changes), blobs(50))
        assert "\n" not in str(ratio_dim.value)
        assert not (tmp_path / "run").exists()


def test_missing_settings():
    with pytest.raises(ValueError, match=r"data\.encoding needs epochs and lr"):
        read_encoding_settings({})
    assert (
        read_encoding_settings(
            {"epochs": 1, "lr": 0.1, "augment": None, "clip": None, "batch_size": None}
        ).augment
        == ()
    )


def test_encoders_are_tried_with_an_image():
    class Wrong(nn.Module):
        features = 3

        def forward(self, x: Tensor) -> Tensor:
            return x.flatten(1)

    image = torch.zeros(1, 1, 4, 4)
    with pytest.raises(
        ValueError, match=r"Wrong made features \(16,\) of an image, its attribute 'features' is 3"
    ):
        check_encoder(Wrong(), image)
    linear = nn.Linear(5, 2)
    linear.features = 2  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    with pytest.raises(ValueError, match=r"Linear does not take images of shape \(1, 4, 4\)"):
        check_encoder(linear, image)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    flat.features = 2  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
    check_encoder(flat, image.to(torch.uint8))


def test_missing_weights_are_found_before_anything_is_written():
    encoder = {
        "_target_": "kbf.Backbone",
        "q": [1, SIDE, SIDE],
        "name": "mobilenet_v3_small",
        "weights": "none.pt",
    }
    with pytest.raises(ValueError, match=r"there is no file none.pt with weights"):
        check(config({"encoder": encoder, "members": 1}), blobs(50))


@pytest.mark.slow
def test_ratios_know_which_images_tell_nothing():
    """Half of the images are noise: these are doubted, the others are not, and the mixture is
    better than chance on new ones.
    """
    clear, noisy = blobs(200, 200), []
    g = torch.Generator().manual_seed(1)
    spoilt = [torch.rand(len(s.obs), generator=g) < 0.5 for s in (*clear, *blobs(100, seed=1))]
    for s, rows in zip((*clear, *blobs(100, seed=1)), spoilt, strict=True):
        obs = s.obs.clone()
        obs[rows] = (
            torch.rand(obs[rows].shape, generator=g).to(obs)
            if obs.is_floating_point()
            else torch.randint(0, 256, obs[rows].shape, generator=g).to(obs)
        )
        noisy.append(s._replace(obs=obs))
    how = read_encoding_settings(
        {"epochs": 40, "lr": 0.005, "members": 2, "loss": "ratio", "clip": 5.0, "batch_size": 20}
    )
    code = fitted(noisy[:2], how)[0]
    code.returns_ratio = True
    with torch.no_grad():
        ratio = read_encoding(code(noisy[2].obs), 2)
    doubt = ratio.log_shares[:, 0].exp()
    assert doubt[spoilt[2]].mean() > 10 * doubt[~spoilt[2]].mean()
    z = noisy[2].states.float()
    assert ratio.log_ratio(z, StateDensity(code.points, code.width).log(z)).mean() > 0.3
