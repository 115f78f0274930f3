"""A run that is killed between any two of its file operations, and resumed, ends as one that was
not.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from kbf.data.synthetic import SyntheticData
from kbf.fitted.checkpoint import Trained, read_checkpoint
from kbf.recording import Recording
from kbf.ssm import rotation
from kbf.training.fit import train

QUIET = {
    "num_sanity_val_steps": 0,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
}
TRAINER = {
    "_target_": "lightning.Trainer",
    "accelerator": "cpu",
    "max_epochs": 4,
    "log_every_n_steps": 1,
    **QUIET,
}
NET = {"_target_": "kbf.LSTMFilter", "d": 2, "q": 2, "hidden": 4, "sizes": [4]}
HOW = {"epochs": 4, "lr": 0.3, "window": 8, "stride": 8, "folds": 1, "validation": 0.4}
CONFIG = {
    "model": {"name": "lstm", "dtype": "float32", "net": NET, "training": HOW},
    "seed": 2,
    "trainer": TRAINER,
}


class Killed(BaseException):
    pass


class FileOperations:
    """Those of a process, which may end before one of them; then nothing is cleaned up either."""

    def __init__(self, monkeypatch, end: int | None = None) -> None:
        self.done: list[str] = []
        self.end = end
        for name in ("fsync", "replace", "unlink"):
            monkeypatch.setattr(os, name, self.counted(name, getattr(os, name)))

    def counted(self, name: str, original: Any) -> Any:
        def operation(*args: Any, **settings: Any) -> Any:
            if len(self.done) == self.end:
                raise Killed
            self.done.append(f"{name} {args[0]}")
            return original(*args, **settings)

        return operation


@pytest.fixture(scope="module")
def data() -> list[Recording]:
    return SyntheticData(rotation(), n_train=40, n_test=1).train


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory) -> tuple[Path, Trained, list[str]]:
    """A run that nobody interrupts, and what it does to files."""
    directory = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        operations = FileOperations(patch)
        trained = train(CONFIG, data, directory)
    assert trained is not None
    return directory, trained, operations.done


def test_the_best_is_not_the_last(whole):
    """Else the others would say nothing."""
    best, last = (read_checkpoint(whole[0] / name) for name in ("best.ckpt", "last.ckpt"))
    assert 0 < best["epoch"] < last["epoch"] == 3
    assert len(whole[2]) > 20


def killed_and_resumed(
    end: int, data: list[Recording], directory: Path, whole: tuple[Path, Trained, list[str]]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        FileOperations(patch, end)
        with pytest.raises(Killed):
            train(CONFIG, data, directory)
    litter = [path for path in directory.iterdir() if path.name.startswith(".")]
    for path in litter:  # it bears the number of this process, which is not dead
        path.rename(path.with_name(path.name.replace(str(os.getpid()), "99999999")))
    last = directory / "last.ckpt"
    resumed = train(CONFIG, data, directory, ckpt_path=last if last.exists() else None)
    assert (
        resumed is not None
        and resumed.validation_mse == whole[1].validation_mse
        and resumed.epochs == 4
    )
    assert {path.name for path in directory.iterdir()} == {"best.ckpt", "last.ckpt"}
    for name in ("best.ckpt", "last.ckpt"):
        mine, theirs = (read_checkpoint(folder / name) for folder in (directory, whole[0]))
        assert (mine["epoch"], mine["global_step"]) == (theirs["epoch"], theirs["global_step"])
        assert all(
            torch.equal(value, mine["state_dict"][key])
            for key, value in theirs["state_dict"].items()
        )


def test_killed_where_the_best_is_written(data, tmp_path, whole):
    """Before and after the best model takes its name, and before and after the last does in the
    same epoch.
    """
    renames = [
        k
        for k, done in enumerate(whole[2])
        if done.startswith("replace") and done.endswith("best.ckpt")
    ]
    first = renames[-1]  # of the best epoch
    assert [done.split()[0] for done in whole[2][first - 1 : first + 4]] == [
        "fsync",
        "replace",
        "fsync",
        "unlink",
        "fsync",
    ]
    for end in (first, first + 1, first + 5):
        killed_and_resumed(end, data, tmp_path / str(end), whole)


@pytest.mark.slow
def test_killed_before_every_file_operation(data, tmp_path, whole):
    for end in range(len(whole[2])):
        killed_and_resumed(end, data, tmp_path / str(end), whole)
