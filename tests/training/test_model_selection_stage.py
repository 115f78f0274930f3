"""A model with a net under it through training, calibration and checkpoint."""

from __future__ import annotations

import pytest
import torch

from kbf.config import configure
from kbf.data.dataset import load_data
from kbf.data.windows import piece
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo
from kbf.filters.rollout import rollout
from kbf.filters.selection import auto
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.held_out_calibration import learn, learn_and_keep
from kbf.fitted.held_out_runs import never_learned_from
from kbf.model_choice import held_out_part
from kbf.training.datamodule import FilterDataModule
from kbf.training.filter_stage import FilterTraining
from kbf.training.fit import train


def trained(tmp_path, *words):
    config = configure(
        "train",
        ["data=oscillatory", "n_train=120", "+model.model_selection=true", "logger=none", *words],
    )
    data = load_data(config["data"])
    return data, train(config, data.train, tmp_path)


def test_what_was_chosen_is_in_the_checkpoint(tmp_path, monkeypatch):
    """The mean is no filter: the Kalman filter takes its place, and comes back from the file with
    its calibration.
    """
    monkeypatch.setattr(auto, "LEARNED", {})
    monkeypatch.delitem(auto.BASELINES, "kalman_velocity")
    data, made = trained(tmp_path, "model=mean")
    assert made is not None and made.module.net.used() == ["kalman"]
    made = learn_and_keep(made, tmp_path)
    loaded = load_filter(tmp_path / "best.ckpt")
    assert loaded.module.net.used() == ["kalman"] and loaded.calibration is not None
    obs = data.test[0].obs[None]
    torch.testing.assert_close(
        rollout(loaded.filter, obs).estimates, rollout(made.filter, obs).estimates
    )


def average_of_all(found, scale):
    """All models with equal weights, and errors below those of each."""
    return {name: torch.full_like(scale, 1 / len(found)) for name in found}, torch.zeros(8)


@pytest.mark.slow
def test_an_average_comes_back_from_its_checkpoint(tmp_path, monkeypatch):
    """Also one whose members draw, with what they have chosen: the same random numbers give the
    same estimates.
    """
    small = KernelMonteCarlo(particles=40, regs=(0.0,), inflations=(1.0, 2.0), density="gaussian")
    monkeypatch.setattr(auto, "LEARNED", {"kernel_monte_carlo": lambda seed: small})
    monkeypatch.setattr(auto, "MIN_STEPS_FOR_MORE", 100)
    monkeypatch.setattr(auto, "averaged", average_of_all)
    data, made = trained(tmp_path, "model=kalman")
    assert made is not None and set(made.module.net.used()) >= {"kernel_monte_carlo"}
    loaded, obs = load_filter(tmp_path / "best.ckpt"), data.test[0].obs[None]
    own, again = (
        rollout(f, obs, generator=torch.Generator().manual_seed(3)).estimates
        for f in (made.filter, loaded.filter)
    )
    torch.testing.assert_close(again, own)


def test_a_model_that_learns_by_gradient_has_no_net_under_it(tmp_path):
    with pytest.raises(ValueError, match="model_selection is for models without training"):
        trained(tmp_path, "model=gru")


def test_a_net_without_a_memory_is_calibrated_on_what_its_training_held_out():
    """No fold can be taken out of it: of all steps it has learned from it would be too sure."""
    config = configure("train", ["data=oscillatory", "n_train=200", "model=gru", "logger=none"])
    module = FilterTraining(config, load_data(config["data"]).train)
    ((net, held),) = never_learned_from(module)
    assert net is module.net and module.how is not None
    assert sum(len(s.states) for s in held) == round(200 * module.how.validation)
    last = module.memory.recordings()[-1].states[-1]
    assert torch.equal(held[-1].states[-1], last)


def test_many_recordings_are_held_out_whole_wherever_a_part_is():
    """Of ten the last two: training does not learn from them, and calibrates on them; choices
    between models are made on them.
    """
    config = configure(
        "train",
        ["data=oscillatory", "n_train=500", "model=gru", "logger=none", "model.training.window=40"],
    )
    data = load_data(config["data"])
    ten = [piece(s, k, k + 50) for s in data.train for k in range(0, 500, 50)]
    module = FilterTraining(config, ten)
    assert module.how is not None and len(ten) == 10
    ((_, held),) = never_learned_from(module)
    scaled = module.memory.recordings()
    trained = FilterDataModule(scaled, module.how, seed=0)
    for found, expected in (
        (held, scaled[8:]),
        (trained.held, scaled[8:]),
        (trained.fit, scaled[:8]),
    ):
        assert len(found) == len(expected)
        assert all(torch.equal(a.states, b.states) for a, b in zip(found, expected, strict=True))
    assert [len(part) for part in held_out_part(data._replace(train=ten), 0.15)] == [8, 2]


def test_a_net_that_has_learned_from_all_steps_is_not_calibrated_on_them(tmp_path):
    """On what it has learned from it is too sure; it says so, and has a monitor all the same."""
    words = [
        "data=oscillatory",
        "n_train=200",
        "model=gru",
        "logger=none",
        "model.training.epochs=1",
    ]
    words += ["model.training.validation=0.0", "model.training.patience=null"]
    config = configure("train", [*words, "trainer.enable_progress_bar=false"])
    made = train(config, load_data(config["data"]).train, tmp_path)
    assert made is not None
    with pytest.warns(UserWarning, match="not recalibrated"):
        learned = learn(made)
    assert learned.calibration is None and learned.monitor is not None
