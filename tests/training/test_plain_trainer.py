"""A plain trainer of Lightning, and data modules of one's own, train what `kbf.training.fit`
trains.
"""

from __future__ import annotations

from typing import Any

import lightning
import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from kbf.data.synthetic import SyntheticData
from kbf.evaluation.score import score
from kbf.filters.rollout import rollout
from kbf.fitted.checkpoint import load_filter
from kbf.recording import Recording
from kbf.ssm import rotation
from kbf.training import filter_stage
from kbf.training.datamodule import FilterDataModule
from kbf.training.filter_stage import FilterTraining
from kbf.training.fit import train

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}
LSTM = {
    "name": "lstm",
    "net": {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": 2,
        "hidden": 6,
        "sizes": [6],
    },
    "training": {"epochs": 3, "lr": 0.02, "window": 8, "stride": 4, "folds": 1, "validation": 0.2},
}
KERNEL = {
    "name": "kbf_tuned",
    "net": {"_target_": "kbf.KBF", "rank": 16},
    "training": {
        "epochs": 3,
        "lr": 0.05,
        "window": 8,
        "stride": 8,
        "burn_in": 2,
        "folds": 2,
        "validation": 0.2,
    },
}


@pytest.fixture(scope="module")
def data() -> SyntheticData:
    return SyntheticData(rotation(), n_train=60, n_test=20)


def plain(tmp_path, **settings: Any) -> lightning.Trainer:
    torch.manual_seed(0)
    return lightning.Trainer(
        **QUIET, **{"max_epochs": 3, "default_root_dir": tmp_path, "logger": False, **settings}
    )


def test_the_lines_of_the_docstring_run(data, tmp_path, monkeypatch):
    """As a person copies them."""
    text = (filter_stage.__doc__ or "").partition("::\n")[2]
    code = "\n".join(line.removeprefix("    ") for line in text.splitlines())
    assert 6 <= len(code.strip().splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model": LSTM, "recordings": data.train, "new": data.test}
    exec(code, names)
    expected = rollout(names["module"].filter(), data.test[0].obs[None]).estimates
    torch.testing.assert_close(names["estimates"][0], expected)


@pytest.mark.parametrize("model", [LSTM, KERNEL], ids=lambda m: m["name"])
def test_a_plain_trainer_ends_where_kbf_train_does(data, tmp_path, model):
    """The same parameters to the last bit; its own checkpoint is one of ours; test and predict are
    those of the scoring loop.
    """
    config = {"model": model, "seed": 3}
    trainer = {"_target_": "lightning.Trainer", "max_epochs": 3, "num_sanity_val_steps": 0, **QUIET}
    ours = train({**config, "trainer": trainer}, data.train, tmp_path / "ours")
    lightning.seed_everything(3, verbose=False)
    module = FilterTraining(config, data.train)
    assert module.how is not None and ours is not None
    parts = FilterDataModule(data.train, module.how, seed=3, test=data.test)
    runner = plain(tmp_path, num_sanity_val_steps=0)
    runner.fit(module, parts)
    last = load_filter(tmp_path / "ours" / "last.ckpt")
    for name, value in last.module.net.state_dict().items():
        assert torch.equal(value, module.net.state_dict()[name]), name
    (logged,) = runner.test(module, parts, verbose=False)
    scores = score(last.filter, data.test)
    assert logged["test/mse"] == pytest.approx(scores.mse.mean().item(), rel=1e-6)
    (estimates,) = runner.predict(module, parts) or []
    torch.testing.assert_close(estimates[0], scores.estimates[0])
    checkpoint = runner.checkpoint_callback
    assert checkpoint is not None
    loaded = load_filter(checkpoint.best_model_path)  # pyright: ignore[reportAttributeAccessIssue]
    torch.testing.assert_close(score(loaded.filter, data.test).estimates[0], scores.estimates[0])


class Windows(lightning.LightningDataModule):
    """Somebody's own: plain sequences of the data, in batches ``b T``."""

    def __init__(self, sequence: Recording, window: int) -> None:
        super().__init__()
        states, obs = (leaf.unfold(0, window, window).mT for leaf in sequence[:2])
        self.train, self.held = Recording(states[:4], obs[:4]), Recording(states[4:], obs[4:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader([self.train], batch_size=None)  # pyright: ignore[reportArgumentType]

    def val_dataloader(self) -> DataLoader:
        return DataLoader([self.held], batch_size=None)  # pyright: ignore[reportArgumentType]

    test_dataloader = predict_dataloader = val_dataloader


@pytest.mark.parametrize("units", [None, "standard"])
def test_a_data_module_of_one_s_own(data, tmp_path, units):
    """In the units of the data, whatever the filter works in; Lightning's hparams.yaml says what
    was trained.
    """
    big = [s._replace(states=100 * s.states + 7, obs=0.01 * s.obs) for s in data.train]
    module = FilterTraining({"model": LSTM, "seed": 0, "data": {"normalise": units or "none"}}, big)
    windows = Windows(big[0], 10)
    logger = CSVLogger(tmp_path, name="", version="")
    trainer = plain(tmp_path, max_epochs=60, logger=logger, check_val_every_n_epoch=60)
    (before,) = trainer.validate(module, windows, verbose=False)
    trainer.fit(module, windows)
    (after,) = trainer.test(module, windows, verbose=False)
    assert after["test/mse"] < 0.5 * big[0].states.var(0).sum() < before["validation/mse"]
    estimates: Any = (trainer.predict(module, windows) or [])[0]
    error = (estimates - windows.held.states).square().sum(-1).mean()
    assert error.item() == pytest.approx(after["test/mse"], rel=1e-6)
    assert (
        yaml.safe_load((tmp_path / "hparams.yaml").read_text())["config"]["model"]["name"] == "lstm"
    )


def test_forward_is_the_filter_in_the_units_of_the_data(data):
    module = FilterTraining(
        {"model": KERNEL, "seed": 0, "data": {"normalise": "standard"}}, data.train
    )
    module.prepare(module.memory.recordings())
    mask = torch.arange(20) % 3 > 0
    found = module(data.test[0].obs[None], mask[None])
    torch.testing.assert_close(
        found, rollout(module.filter(), data.test[0].obs[None], mask=mask[None]).estimates
    )
    assert (found[0] - data.test[0].states).square().sum(-1).mean() < 0.5
