"""The filter with learned features in its rule: what it computes, where its gradient goes, and how
it is trained.
"""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

import kbf.training.fit
from kbf.config import configure
from kbf.evaluation.score import score
from kbf.filters.kernel.feature_kbf import FeatureKBF
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.hyperparameters import paper_grid
from kbf.filters.kernel.kbf import KBF
from kbf.filters.rollout import rollout
from kbf.fitted.checkpoint import load_filter, read_checkpoint
from kbf.fitted.settings import Training
from kbf.images.augment import Augment, PixelNoise
from kbf.images.encoders import CNN
from kbf.recording import Recording
from kbf.rkhs.rules import importance_weighted
from kbf.training.datamodule import FilterDataModule
from kbf.training.filter_stage import FilterTraining
from kbf.training.fit import check, train

SHAPE = (1, 6, 6)
TRAINER = {
    "_target_": "lightning.Trainer",
    "accelerator": "cpu",
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
ENCODER = {
    "_target_": "kbf.CNN",
    "q": list(SHAPE),
    "features": 4,
    "channels": [4],
    "norm": "batch",
    "dropout": 0.3,
}
NOISE = {"_target_": "kbf.PixelNoise", "std": 0.1}
MODEL = {
    "name": "kbf_features_e2e",
    "dtype": "float32",
    "net": {
        "_target_": "kbf.FeatureKBF",
        "encoder": ENCODER,
        "regs": [1e-3, 1e-3, 1e-2],
    },
    "encoding": {"encoder": ENCODER, "epochs": 5, "lr": 0.02, "batch_size": 32, "augment": [NOISE]},
    "training": {
        "epochs": 2,
        "lr": 0.02,
        "lr_encoder": 0.001,
        "window": 8,
        "stride": 4,
        "burn_in": 2,
        "folds": 3,
        "validation": 0.0,
    },
}


def spots(steps: int, seed: int = 0) -> Recording:
    """A bright spot that circles on 6 x 6 pixels; its position is the state."""
    generator = torch.Generator().manual_seed(seed)
    angle = (0.5 + 0.2 * torch.randn(steps, generator=generator)).cumsum(0)
    states = 0.8 * torch.stack([angle.cos(), angle.sin()], -1)
    grid = torch.linspace(-1, 1, 6)
    rows, columns = (-4 * (grid - states[:, i, None]).square() for i in (1, 0))
    images = (rows[:, :, None] + columns[:, None, :]).exp()[:, None]
    return Recording(
        states.double(), (images + 0.1 * torch.randn(images.shape, generator=generator)).clamp(0, 1)
    )


def net(seed: int = 0, **settings) -> FeatureKBF:
    torch.manual_seed(seed)
    made = FeatureKBF(
        CNN(SHAPE, features=3, channels=(4,), norm="batch", dropout=0.5),
        **{"regs": (1e-2, 1e-2, 1e-2), **settings},
    )
    made.prepare([spots(40)])
    return made


def config(**training) -> dict:
    model = deepcopy(MODEL)
    model["training"] |= training
    return {
        "model": model,
        "seed": 3,
        "trainer": TRAINER | {"max_epochs": model["training"]["epochs"]},
    }


def windows(sequence: Recording, *starts: int, length: int = 6) -> Recording:
    parts = [slice(first, first + length) for first in starts]
    return Recording(
        torch.stack([sequence.states[p] for p in parts]),
        torch.stack([sequence.obs[p] for p in parts]),
    )


# what it computes


@pytest.mark.parametrize("constant", [True, False])
def test_its_rule_is_the_dual_one_with_the_features_gram_matrix(constant):
    """Features standardised by the training part: their mean is taken off, and their mean squared
    norm is 1.
    """
    filter, memory, x = net(constant=constant).fit(spots(40)), spots(40), spots(5, seed=9).obs
    encoder = filter.rule.psi.encoder
    with torch.no_grad():
        psi, query = encoder(memory.obs).double(), encoder(x).double()
        psi, query = psi - psi.mean(0), query - psi.mean(0)
        psi, query = (values / psi.square().sum(-1).mean().sqrt() for values in (psi, query))
        ratio = torch.rand(5, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        gram, against = psi @ psi.mT + constant, query @ psi.mT + constant
        torch.testing.assert_close(
            filter.rule(ratio, x),
            importance_weighted(ratio, gram, against, 1e-2),
            rtol=1e-4,
            atol=1e-6,
        )


def test_whole_numbers_are_pixels():
    filter, whole = net().fit(spots(40)), (255 * spots(10, seed=9).obs).to(torch.uint8)
    a, b, c = (
        rollout(filter, x[None]).estimates
        for x in (whole, whole.float() / 255, whole.double() / 255)
    )
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, c)
    memory = spots(40)._replace(obs=(255 * spots(40).obs).to(torch.uint8))
    over = memory._replace(obs=memory.obs.float() / 255)
    model = net()
    torch.testing.assert_close(
        rollout(model.fit(memory), whole[None]).estimates,
        rollout(model.fit(over), whole[None]).estimates,
    )


def test_the_units_of_the_features_are_of_no_matter_unless_wanted():
    """An encoder whose features are 100 times larger and far from 0 makes the same filter, or
    another one as published.
    """
    for standardise in (True, False):
        model, other = net(standardise=standardise), net(standardise=standardise)
        with torch.no_grad():
            other.encoder.net[-1].weight *= 100
            other.encoder.net[-1].bias.mul_(100).add_(5)
        other.prepare([spots(40)])
        a, b = (
            rollout(m.fit(spots(40)), spots(20, seed=3).obs[None]).estimates for m in (model, other)
        )
        assert torch.allclose(a, b, rtol=1e-2, atol=1e-3) is standardise


def test_the_fast_way_is_the_rollout_and_only_windows_are_changed():
    model, memory, w = net(), spots(40), windows(spots(30, seed=2), 0, 7, 20)
    truth = rollout(model.fit(memory), w.obs).estimates
    torch.testing.assert_close(model.window_estimates([memory], w), truth, rtol=1e-5, atol=1e-6)
    mask = torch.rand(3, 6, generator=torch.Generator().manual_seed(0)) < 0.6
    masked = rollout(model.fit(memory), w.obs, mask=mask).estimates
    torch.testing.assert_close(
        model.window_estimates([memory], w._replace(mask=mask)), masked, rtol=1e-5, atol=1e-6
    )
    changed = rollout(model.fit(memory), 1 - w.obs).estimates
    torch.testing.assert_close(
        model.window_estimates([memory], w, lambda x: 1 - x), changed, rtol=1e-5, atol=1e-6
    )
    assert isinstance(model.psi, nn.Module) and isinstance(
        model.fit(memory).rule.psi, type(model.psi)
    )


def test_gradients_are_those_of_finite_differences():
    """Through ratio, rule and all steps: to weights of each layer, two bandwidths and
    three ridges.
    """
    model = net().double()
    model.encoder.net[
        1
    ].bias.data.normal_()  # pixels of exactly 0 would sit on the kink of the ReLU
    memory, w = spots(40), windows(spots(30, seed=2), 0, 9)

    def loss() -> Tensor:
        return (model.window_estimates([memory], w) - w.states).square().sum(-1).mean()

    named = dict(model.named_parameters())
    gradients = dict(zip(named, torch.autograd.grad(loss(), list(named.values())), strict=True))
    assert (
        len(named) == 7
    )  # convolution; scale and shift of its batch norm; the linear layer; bandwidths and ridges
    assert gradients["log_bandwidth"][2] == 0
    for name, parameter in named.items():
        flat, gradient = parameter.data.view(-1), gradients[name].flatten()
        places = range(3) if name.startswith("log_") else gradient.abs().topk(2).indices.tolist()
        for k in places:
            values = []
            for shift in (1e-7, -1e-7):  # so small that no ReLU and no ratio changes its sign
                flat[k] += shift
                values.append(loss().item())
                flat[k] -= shift
            assert gradient[k].item() == pytest.approx(
                (values[0] - values[1]) / 2e-7, rel=1e-3, abs=1e-6
            ), (name, k)
            assert gradient[k] != 0 or (name, k) == ("log_bandwidth", 2), (name, k)


def test_the_encoder_stays_in_eval_mode():
    model = net()
    for mode in (True, False, True):
        model.train(mode)
        assert model.training is mode
        assert not any(m.training for m in model.psi.modules())
    before = deepcopy(model.encoder.state_dict())
    model.window_estimates([spots(40)], windows(spots(30), 0)).sum().backward()
    assert all(
        torch.equal(value, before[name]) for name, value in model.encoder.state_dict().items()
    )


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"the data set has no default: set model\.net\.encoder"):
        FeatureKBF(None)
    names = "importance_weighted or original"
    with pytest.raises(
        ValueError, match=f"rule=pseudo_inverse needs full Gram matrices; use {names}$"
    ):
        net(rule="pseudo_inverse", rank=None)
    with pytest.raises(ValueError, match="KBF: kernel must be one of"):
        net(kernel="none")


def test_the_grid_never_looks_at_distances_of_images(monkeypatch):
    """It only runs the filter: bandwidths of states alone are set, and no image is made a float64
    number.
    """
    seen = []
    original = KBF.obs_scale
    monkeypatch.setattr(
        KBF, "obs_scale", lambda self, obs, **kw: seen.append(obs) or original(self, obs, **kw)
    )
    monkeypatch.setattr("kbf.filters.kernel.hyperparameters.PAPER_SCALES", (0.5, 1.0))
    monkeypatch.setattr("kbf.filters.kernel.hyperparameters.PAPER_REGS", (1e-4,))
    model = net(select="paper", normalise=False)
    model.prepare([spots(60)])
    assert not seen
    numbers = model.hyperparameters()
    assert numbers["bandwidth/ratio"] == numbers["bandwidth/transition"] != 1
    plain = KBF()
    paper_grid(plain, [spots(60)._replace(obs=spots(60).states)])
    assert len(seen) == 1


# training


def test_windows_are_not_in_the_memory_that_filters_them(tmp_path, monkeypatch):
    """Every image is different: none of a window's is among those that the filter is conditioned
    on, and all take their turn.
    """
    tasks = []
    original = FeatureKBF.window_estimates

    def watched(self, memory, w, change=None):
        tasks.append(
            (
                torch.cat([s.obs for s in memory]),
                w.obs.flatten(0, 1),
                isinstance(change, Augment) and change.training,
            )
        )
        return original(self, memory, w, change)

    monkeypatch.setattr(FeatureKBF, "window_estimates", watched)
    data = spots(60)
    train(config(epochs=1), [data], tmp_path)
    assert len(tasks) == 3
    for memory, shown, augmented in tasks:
        together = (memory.flatten(1)[:, None] == shown.flatten(1)[None]).all(-1)
        assert not together.any()
        assert len(memory) == 40
        assert augmented
    shown = torch.cat([shown for _, shown, _ in tasks]).flatten(1).unique(dim=0)
    assert len(shown) >= 54  # a few steps at the end of each chunk are in no window


@pytest.mark.slow
def test_both_stages_lower_the_error_and_the_checkpoint_holds_them(tmp_path):
    data, test = spots(120), spots(60, seed=5)
    two = deepcopy(config())
    two["model"]["training"] = None
    first = train(two, [data], tmp_path / "two")
    both = train(config(epochs=6, lr_encoder=0.003), [data], tmp_path / "both")
    assert first is not None and both is not None
    errors = [score(t.filter, [test], dtype=torch.float32).mse.item() for t in (first, both)]
    variance = test.states.var(0).sum().item()
    assert errors[1] < errors[0] < 0.3 * variance
    for name, trained in (("two", first), ("both", both)):
        assert trained.module.memory.recordings()[0].obs.shape == (120, *SHAPE)
        torch.load(tmp_path / name / "best.ckpt", weights_only=True)
        again = load_filter(tmp_path / name / "best.ckpt")
        a, b = (
            score(f, [test], dtype=torch.float32).estimates[0]
            for f in (trained.filter, again.filter)
        )
        assert torch.equal(a, b)
    numbers = [t.module.net.hyperparameters() for t in (first, both)]
    assert all(numbers[0][k] != numbers[1][k] for k in numbers[0] if k != "bandwidth/observation")
    statistics = [t.module.net.encoder.net[1].running_mean for t in (first, both)]
    assert torch.equal(*statistics)  # of batch norm: they belong to the first stage


def test_operators_are_made_in_eval_mode(tmp_path, monkeypatch):
    """What is saved in the middle of training is the filter that a loaded checkpoint builds anew:
    no dropout, no augmentation.
    """
    train(config(), [spots(60)], tmp_path)
    checkpoint = read_checkpoint(tmp_path / "last.ckpt")
    module = FilterTraining(checkpoint["hyper_parameters"]["config"])
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"])
    module.train()
    assert module.augment.training
    filter = module.filter()
    assert isinstance(filter, KernelBayesFilter)
    assert not any(m.training for m in module.modules())
    torch.testing.assert_close(
        filter.rule.features, checkpoint["kbf"]["operators"]["rule.features"]
    )
    module.train()
    module.on_save_checkpoint({})
    assert module.training and module.augment.training


def test_a_resumed_second_stage_is_an_uninterrupted_one(tmp_path, monkeypatch):
    settings, data = config(epochs=2, schedule="cosine", stride=8), [spots(48)]
    train(settings, data, tmp_path / "whole")
    cut = deepcopy(settings)
    cut["trainer"]["max_epochs"] = 1
    train(cut, data, tmp_path / "cut")
    with monkeypatch.context() as patch:
        patch.setattr(
            kbf.training.fit, "fit_encoding", lambda *_: pytest.fail("the encoder was fitted again")
        )
        train(settings, data, tmp_path / "cut", ckpt_path=tmp_path / "cut" / "last.ckpt")
    whole, other = (
        read_checkpoint(tmp_path / d / "last.ckpt")["state_dict"] for d in ("whole", "cut")
    )
    for name, value in whole.items():
        assert torch.equal(value, other[name]), name


def test_the_encoder_has_a_learning_rate_of_its_own():
    class FakeTrainer:
        max_epochs, estimated_stepping_batches = 2, 6

    module = FilterTraining(config(schedule="cosine", weight_decay=0.5), [spots(60)])
    module._trainer = FakeTrainer()  # pyright: ignore[reportAttributeAccessIssue]
    groups = module.configure_optimizers()["optimizer"].param_groups
    assert [(g["lr"], len(g["params"]), g["weight_decay"]) for g in groups] == [
        (0.02, 2, 0.5),
        (0.001, 5, 0.5),
    ]
    module.how = module.how._replace(lr_encoder=None)  # pyright: ignore[reportOptionalMemberAccess]
    assert [g["lr"] for g in module.configure_optimizers()["optimizer"].param_groups] == [
        0.02,
        0.02,
    ]


def test_what_is_held_out_for_validation_is_held_out_of_the_first_stage_too(tmp_path, monkeypatch):
    rows = []
    original = kbf.training.fit.fit_encoding
    monkeypatch.setattr(
        kbf.training.fit, "fit_encoding", lambda *a: rows.append(len(a[4][0])) or original(*a)
    )
    trained = train(config(epochs=1, validation=0.25), [spots(80)], tmp_path)
    assert rows == [60]
    assert trained is not None and trained.validation_mse is not None
    assert [len(s.states) for s in trained.module.memory.recordings()] == [80]
    tasks = FilterDataModule(
        [spots(80)], Training(**config(validation=0.25)["model"]["training"]), 0
    )
    assert [len(s.states) for s in tasks.fit] == [60]


@pytest.mark.parametrize("model", ["kbf_features", "kbf_features_e2e", "kbf_nn_paper"])
def test_configurations(model):
    with pytest.raises(ValueError, match="requires an encoder, and the data set has no default"):
        check(configure("train", [f"model={model}", "data=rotation"]), [spots(120)])


def test_augmentation_changes_each_step_and_a_resume_repeats_it():
    torch.manual_seed(0)
    change = Augment((PixelNoise(0.1),))
    x = spots(4).obs
    assert not torch.equal(change(x), change(x))
    assert torch.equal(change.eval()(x), x)
