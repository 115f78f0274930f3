"""Callbacks by configuration: Lightning's and one's own, added and refused; and the folder of a run
that is being written.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from kbf.cli import main
from kbf.config import configure
from kbf.fitted import checkpoint
from kbf.fitted.checkpoint import load_filter, read_checkpoint
from kbf.runtime.run_folders import LOCK, locked
from kbf.training.callbacks import EarlyStopping, build_callbacks, early_stopping

HOW = {
    "epochs": 30,
    "batch_size": 16,
    "window": 8,
    "stride": 4,
    "burn_in": 0,
    "lr": 0.5,
    "schedule": "constant",
}
WORDS = [
    "train",
    "model=lstm",
    "n_train=60",
    "data.n_test=10",
    "particles=50",
    "logger=none",
    "calibrate=false",
]
WORDS += [
    "trainer.enable_progress_bar=false",
    *(f"model.training.{key}={value}" for key, value in HOW.items()),
]
HELD = "model.training.validation=0.3"


SEEN: list[int] = []


class Counter(Callback):
    """Somebody's own."""

    def __init__(self, every: int) -> None:
        self.every = every

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch % self.every == 0:
            SEEN.append(trainer.current_epoch)


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    monkeypatch.setattr("kbf.commands.train.write_figures", lambda *a, **k: [])


def test_the_group_s_files(tmp_path):
    made = {
        name: build_callbacks(configure("train", [f"callbacks={name}"]))
        for name in ("none", "early_stopping")
    }
    assert made["none"] == [] and [type(c) for c in made["early_stopping"]] == [EarlyStopping]
    whole = configure(
        "train",
        ["callbacks=checkpoints", f"run_dir={tmp_path}", "trainer.enable_progress_bar=false"],
    )
    (keeper,) = build_callbacks(whole)
    assert isinstance(keeper, ModelCheckpoint) and keeper.dirpath == str(tmp_path / "checkpoints")
    assert build_callbacks(whole, first_stage=True) == []


def test_patience_is_early_stopping_unless_there_is_another():
    (made,) = early_stopping(4, "validation/loss", [])
    assert isinstance(made, EarlyStopping) and (made.patience, made.monitor) == (
        4,
        "validation/loss",
    )
    assert (
        early_stopping(None, "a", [])
        == early_stopping(4, None, [])
        == early_stopping(4, "a", [EarlyStopping("x")])
        == []
    )


def test_lightning_s_own_and_somebody_s_in_one_run(tmp_path):
    """Early stopping ends it, the best two epochs are kept beside best.ckpt, and a callback of
    one's own is called.
    """
    SEEN.clear()
    own = [
        "+callbacks.mine._target_=tests.training.test_callbacks.Counter",
        "+callbacks.mine.every=2",
    ]
    own = [word.replace("tests.training.test_callbacks", __name__) for word in own]
    keep = [
        "+callbacks.keep._target_=lightning.pytorch.callbacks.ModelCheckpoint",
        "+callbacks.keep.save_top_k=2",
    ]
    keep += ["+callbacks.keep.monitor=validation/mse", "+callbacks.keep.filename='{epoch}'"]
    stop = ["callbacks=early_stopping", "callbacks.early_stopping.patience=2"]
    assert main([*WORDS, HELD, *own, *keep, *stop, f"run_dir={tmp_path}"]) == 0
    ratio_dim = json.loads((tmp_path / "metrics.json").read_text())
    best, last = (
        read_checkpoint(tmp_path / "checkpoints" / name) for name in ("best.ckpt", "last.ckpt")
    )
    assert ratio_dim["epochs"] < 30 and last["epoch"] - best["epoch"] == 2
    assert list(range(0, ratio_dim["epochs"], 2)) == SEEN
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("epoch=*.ckpt"))
    assert len(kept) == 2 and f"epoch={best['epoch']}.ckpt" in kept
    loaded = load_filter(
        tmp_path / "checkpoints" / f"epoch={best['epoch']}.ckpt"
    ).module.net.state_dict()
    assert all((value == best["state_dict"][f"net.{name}"]).all() for name, value in loaded.items())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["callbacks=early_stopping"],
            "EarlyStopping watches validation/mse, and nothing is held out: set "
            "model.training.validation",
        ),
        (
            [HELD, "+callbacks.x._target_=fractions.Fraction"],
            "callbacks: Fraction is no callback of Lightning",
        ),
        (
            [HELD, "+callbacks.x._target_=nowhere.Callback"],
            "_target_ 'nowhere.Callback' does not exist",
        ),
    ],
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(words, message, tmp_path, capsys):
    assert main([*WORDS, *words, f"run_dir={tmp_path / 'run'}"]) == 2
    ratio_dim = capsys.readouterr().err.strip()
    assert message in ratio_dim and len(ratio_dim.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_the_second_run_in_a_folder_is_told(tmp_path, capsys):
    """It changes nothing there; what killed runs left is swept by the one that may write."""
    words = [*WORDS, "model.training.epochs=1", f"run_dir={tmp_path}", "overwrite=true"]
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / ".99999999-last.ckpt").write_bytes(b"half")
    (tmp_path / ".99999999-scratch").mkdir()
    with locked(tmp_path):
        (tmp_path / "metrics.json").write_text("{}")
        assert main(words) == 2
        ratio_dim = capsys.readouterr().err.strip()
        assert "is being written by process" in ratio_dim and len(ratio_dim.splitlines()) == 1
        assert {path.name for path in tmp_path.iterdir()} == {"checkpoints", "metrics.json", LOCK}
    assert main(words) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "about.json",
        "checkpoints",
        "metrics.json",
        "config.yaml",
    }
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {
        "best.ckpt",
        "last.ckpt",
    }


@pytest.mark.slow
def test_a_run_is_not_replaced_unless_somebody_says_so(tmp_path, capsys):
    words = [*WORDS, "model.training.epochs=2", f"run_dir={tmp_path}"]
    assert main([*words, "trainer.max_epochs=1"]) == 0

    def refused(*more):
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert main([*words, *more]) == 2
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        ratio_dim = capsys.readouterr().err.strip()
        assert len(ratio_dim.splitlines()) == 1
        return ratio_dim

    assert (
        "holds a finished run: name another run_dir, or replace it with overwrite=true" in refused()
    )
    assert "holds a finished run" in refused("seed=3")
    (tmp_path / "metrics.json").unlink()
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert (
        f"holds an interrupted run: kbf train ckpt_path={last} continues it; overwrite=true "
        "starts a new one" in refused()
    )
    with locked(tmp_path):
        assert "is being written by process" in refused("overwrite=true")
    assert main([*WORDS, "model.training.epochs=2", f"ckpt_path={last}"]) == 0, (
        "its own run may go on"
    )
    assert json.loads((tmp_path / "metrics.json").read_text())["epochs"] == 2
    assert main([*words, "overwrite=true", "model.training.epochs=1"]) == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["epochs"] == 1


@pytest.mark.slow
def test_resumed_elsewhere_with_another_run_s_files_in_the_way(tmp_path):
    """They are gone before the first checkpoint comes: a kill leaves no best model of one run
    beside the last of another.
    """
    for name, seed in (("a", 0), ("b", 1)):
        assert (
            main(
                [
                    *WORDS,
                    HELD,
                    "model.training.epochs=2",
                    f"seed={seed}",
                    f"run_dir={tmp_path / name}",
                ]
            )
            == 0
        )
    source, target = (tmp_path / name / "checkpoints" for name in "ab")
    config = {**configure("train", [*WORDS[1:], HELD]), "run_dir": str(tmp_path / "b")}
    from kbf.commands.train import prepare_directory

    prepare_directory(tmp_path / "b", source / checkpoint.LAST, config)
    assert [path.name for path in target.iterdir()] == ["best.ckpt"]
    assert (target / "best.ckpt").read_bytes() == (source / "best.ckpt").read_bytes()
    (source / "best.ckpt").unlink()
    prepare_directory(tmp_path / "b", source / checkpoint.LAST, config)
    assert (target / "best.ckpt").exists(), "it is of the same run"
    assert (
        main(
            [
                *WORDS,
                HELD,
                "model.training.epochs=2",
                "seed=1",
                f"run_dir={tmp_path / 'b'}",
                "overwrite=true",
            ]
        )
        == 0
    )
    prepare_directory(tmp_path / "b", source / checkpoint.LAST, config)
    assert list(target.iterdir()) == [], "it is of another"
