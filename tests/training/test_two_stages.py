"""Images from the command line: encoders first, then the filter; killed, resumed, evaluated and
compared.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
import torch

from kbf.cli import main
from kbf.data.dsprites import DSprites
from kbf.fitted.checkpoint import read_checkpoint
from kbf.training.callbacks import LastCheckpoint

CODING = [
    "data.encoding.members=2",
    "data.encoding.epochs=3",
    "data.encoding.encoder.keypoints=2",
    "data.encoding.encoder.kernel=3",
]
DATA = ["data=dsprites", "n_train=60", "data.n_test=20", "particles=50", *CODING]
QUIET = ["logger=none", "trainer.enable_progress_bar=false"]
KBF = [
    "model=kbf",
    "model.model_selection=false",  # an average has no alarms of innovations
    *(
        f"+model.net.{key}={value}"
        for key, value in {"points": 60, "draws": 2, "run": 600, "rank": 8}.items()
    ),
]
LSTM = [
    "model=lstm",
    "model.training.epochs=3",
    "model.training.window=8",
    "++model.training.validation=0.2",
]
E2E = [
    "model=kbf_features_e2e",
    "model.training.epochs=2",
    "model.training.window=8",
    "model.training.folds=2",
]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """They are tested elsewhere, and take most of the time."""
    for command in ("train", "evaluate"):
        monkeypatch.setattr(f"kbf.commands.{command}.write_figures", lambda *a, **k: [])


def metrics(directory) -> dict:
    ratio_dim = json.loads((directory / "metrics.json").read_text())
    return {
        key: value
        for key, value in ratio_dim.items()
        if "seconds" not in key and key != "checkpoint"
    }


def files(directory) -> set[str]:
    return {path.name for path in (directory / "checkpoints").iterdir()}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("images")
    assert main(["train", *DATA, *KBF, *QUIET, f"run_dir={directory}"]) == 0
    return directory


@pytest.mark.slow
def test_a_checkpoint_of_images_is_enough(run_dir, tmp_path):
    """The same error from the checkpoint alone, which holds codes and no image; other draws of the
    data have another.
    """
    assert files(run_dir) == {"best.ckpt", "last.ckpt"}
    checkpoint = torch.load(run_dir / "checkpoints" / "best.ckpt", weights_only=True)
    assert {
        len(v.shape) for k, v in checkpoint["state_dict"].items() if k.startswith("memory.")
    } == {2}
    evaluate = ["evaluate", f"checkpoint={run_dir / 'checkpoints' / 'best.ckpt'}", "particles=50"]
    assert main([*evaluate, f"run_dir={tmp_path / 'same'}"]) == 0
    mine, theirs = metrics(tmp_path / "same"), metrics(run_dir)
    alarms = {
        "test.out_of_distribution_alarms",
        "test.innovation_alarms",
        "test.diverged",
    }  # of an evaluation alone
    assert mine.keys() >= alarms
    keys = mine.keys() - alarms
    words = {key for key in keys if not isinstance(theirs[key], float)}
    assert {key: mine[key] for key in words} == {key: theirs[key] for key in words}
    numbers = {key: theirs[key] for key in keys - words}
    assert {key: mine[key] for key in numbers} == pytest.approx(
        numbers, rel=1e-4, abs=1e-6
    )  # rounding of float32
    assert main([*evaluate, f"run_dir={tmp_path / 'other'}", "seed=5"]) == 0
    assert metrics(tmp_path / "other")["test.mse"] != theirs["test.mse"]


@pytest.mark.slow
def test_images_of_another_size_are_one_line(run_dir, tmp_path, capsys, monkeypatch):
    original = DSprites.__init__

    def smaller(self, *args, **kwargs):
        original(self, *args, **kwargs)
        self.test = [s._replace(obs=s.obs[..., :32, :32].repeat(1, 3, 1, 1)) for s in self.test]

    monkeypatch.setattr(DSprites, "__init__", smaller)
    checkpoint = run_dir / "checkpoints" / "best.ckpt"
    assert main(["evaluate", f"checkpoint={checkpoint}", f"run_dir={tmp_path / 'out'}"]) == 2
    ratio_dim = capsys.readouterr().err.strip()
    assert (
        "observations have the shape (3, 32, 32), those that" in ratio_dim
        and "was trained on (1, 64, 64)" in ratio_dim
    )
    assert len(ratio_dim.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def interrupt(monkeypatch, error: type[BaseException]) -> None:
    """Stop the first stage behind its second epoch, whose checkpoint is written."""
    original = LastCheckpoint.on_train_epoch_end

    def stop(self, trainer, pl_module):
        self.saved = -1e9
        original(self, trainer, pl_module)
        if trainer.current_epoch == 1:
            raise error

    monkeypatch.setattr(LastCheckpoint, "on_train_epoch_end", stop)


@pytest.mark.slow
def test_ctrl_c_in_the_first_stage_and_on_from_there(run_dir, tmp_path, monkeypatch, capsys):
    """What an earlier run left is cleared, whole files are left, and the resumed run ends as the
    uninterrupted one.
    """
    (tmp_path / "checkpoints").mkdir()
    for name in ("encoder.ckpt", "last.ckpt", "best.ckpt"):
        (tmp_path / "checkpoints" / name).write_text("of an earlier run")
    before = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        interrupt(patch, KeyboardInterrupt)
        assert main(["train", *DATA, *KBF, *QUIET, f"run_dir={tmp_path}", "overwrite=true"]) == 130
    signal.signal(signal.SIGINT, before)
    assert "interrupted; what was finished is kept" in capsys.readouterr().err
    assert files(tmp_path) == {"encoder.ckpt"}
    checkpoint = tmp_path / "checkpoints" / "encoder.ckpt"
    assert read_checkpoint(checkpoint)["epoch"] == 1
    assert main(["evaluate", f"checkpoint={checkpoint}", f"run_dir={tmp_path / 'out'}"]) == 2
    assert "encoders were still learning" in capsys.readouterr().err
    elsewhere = tmp_path / "elsewhere"
    for directory in (["run_dir=" + str(elsewhere)], []):
        assert main(["train", f"ckpt_path={checkpoint}", *QUIET, "particles=50", *directory]) == 0
    for directory in (tmp_path, elsewhere):
        assert files(directory) == {"best.ckpt", "last.ckpt"}
        assert metrics(directory) == metrics(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("model", [LSTM, E2E], ids=["lstm", "end to end"])
def test_killed_in_the_second_stage_and_on_from_there(tmp_path, model, monkeypatch):
    train = ["train", *DATA, *model, *QUIET]
    assert main([*train, f"run_dir={tmp_path / 'whole'}"]) == 0
    assert main([*train, "trainer.max_epochs=1", f"run_dir={tmp_path / 'cut'}"]) == 0
    checkpoint = tmp_path / "cut" / "checkpoints" / "last.ckpt"
    monkeypatch.setattr(
        "kbf.training.fit.fit_encoding", lambda *_: pytest.fail("the encoders were fitted again")
    )
    assert main(["train", f"ckpt_path={checkpoint}", *QUIET, "particles=50"]) == 0
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.encoding.encoder.q=[3,8,8]"],
            "images of 1 x 64 x 64, the encoder was built for 3 x 8 x 8",
        ),
        (
            ["data.encoding.loss=hinge"],
            "there is no setting data.encoding.loss; one that a class takes and its configuration "
            "leaves out: +",
        ),
        (
            ["+data.encoding.loss=hinge"],
            "data.encoding.loss must be one of linear, ridge, split, ratio; got 'hinge'",
        ),
        (
            ["data.encoding.members=0"],
            "data.encoding.members must be a whole number, at least 1; got 0",
        ),
        (["data.encoding.members=100"], "60 training steps cannot be cut into 100 folds"),
        (
            ["data.encoding.encoder._target_=kbf.images.encoders.NoNet"],
            "'kbf.images.encoders.NoNet' does not exist",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_leaves_an_earlier_run_as_it_was(overrides, message, tmp_path, capsys):
    (tmp_path / "metrics.json").write_text("{}")
    assert (
        main(
            [
                "train",
                *DATA,
                *QUIET,
                "model=kalman",
                f"run_dir={tmp_path}",
                "overwrite=true",
                *overrides,
            ]
        )
        == 2
    )
    ratio_dim = capsys.readouterr().err.strip()
    assert message in ratio_dim
    assert len(ratio_dim.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 broken zip"])
def test_a_damaged_checkpoint_of_the_first_stage_is_one_line(tmp_path, capsys, content):
    path = tmp_path / "run" / "checkpoints" / "encoder.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    assert main(["train", f"ckpt_path={path}", *QUIET]) == 2
    ratio_dim = capsys.readouterr().err.strip()
    assert "encoder.ckpt" in ratio_dim and "is no checkpoint, or damaged" in ratio_dim
    assert len(ratio_dim.splitlines()) == 1
    assert path.read_bytes() == content


@pytest.mark.slow
def test_the_seeds_of_data_and_encoders_are_separate(tmp_path):
    """The data of one seed under another seed of everything else: the same states, other codes."""
    words, runs = [*DATA, *QUIET, "model=kalman", "+data.encoding.pixel_ridge=false"], {}
    for name, overrides in {
        "a": [],
        "b": ["seed=1", "data.source.seed=0"],
        "c": ["data.source.seed=1"],
    }.items():
        assert main(["train", *words, f"run_dir={tmp_path / name}", *overrides]) == 0
        runs[name] = read_checkpoint(tmp_path / name / "checkpoints" / "best.ckpt")["state_dict"]
    states = {name: run["memory.states_0"] for name, run in runs.items()}
    assert torch.equal(states["a"], states["b"])
    assert not torch.equal(states["a"], states["c"])
    assert not torch.equal(runs["a"]["memory.obs_0"], runs["b"]["memory.obs_0"])


@pytest.mark.slow
def test_compare_on_images_in_two_processes(tmp_path):
    """The results are those of one process, and a second call finds everything done."""
    words = ["compare", *DATA, "runs=1", "models=kalman,frame,kbf_features"]
    found = []
    for workers in (2, 0):
        directory = tmp_path / str(workers)
        assert main([*words, f"workers={workers}", f"run_dir={directory}"]) == 0
        cells = {
            path.name: json.loads(path.read_text())["test.mse"]
            for path in (directory / "cells").glob("*.json")
        }
        assert len(cells) == 4
        found.append(cells)
    assert found[0] == pytest.approx(found[1])
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "0" / "cells").glob("*.json")}
    assert main([*words, "workers=0", f"run_dir={tmp_path / '0'}"]) == 0
    assert {path: path.stat().st_mtime_ns for path in before} == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [LSTM, E2E, ["model=kalman"]], ids=["lstm", "end to end", "kalman"]
)
def test_two_processes_share_both_stages(tmp_path, model):
    """They end with one checkpoint, and near the result of one process: the same batches, shared
    out.
    """
    words = ["train", *DATA, *model, *QUIET]
    both = ["trainer=ddp", "trainer.accelerator=cpu", f"run_dir={tmp_path / 'both'}"]
    command = [sys.executable, "-m", "kbf.cli", *words, *both]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert files(tmp_path / "both") == {"best.ckpt", "last.ckpt"}
    assert main([*words, f"run_dir={tmp_path / 'one'}"]) == 0
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "both")
    assert one["epochs"] == two["epochs"]
    assert (
        two["test.mse"] < 2.5 * one["test.mse"]
    )  # end to end, two processes make half as many steps in an epoch
    assert (
        main(
            [
                "evaluate",
                f"checkpoint={tmp_path / 'both' / 'checkpoints' / 'best.ckpt'}",
                f"run_dir={tmp_path / 'again'}",
            ]
        )
        == 0
    )
    # not to the last bit: with alarms a filter goes step by step, without them all images are
    # encoded at once
    assert metrics(tmp_path / "again")["test.mse"] == pytest.approx(two["test.mse"], rel=1e-4)


@pytest.mark.slow
def test_a_real_kill_in_the_first_stage(tmp_path):
    """SIGKILL leaves a whole encoder.ckpt, and no temporary file beside it but what was being
    written.
    """
    words = [*DATA, "model=kalman", *QUIET, "data.encoding.epochs=400", f"run_dir={tmp_path}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "kbf.cli", "train", *words], stdout=subprocess.DEVNULL
    )
    path, limit = tmp_path / "checkpoints" / "encoder.ckpt", time.monotonic() + 100
    while not path.exists() and time.monotonic() < limit:
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert read_checkpoint(path)["kbf"]["stage"] == "encoding"
