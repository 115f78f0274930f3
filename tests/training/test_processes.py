"""Several processes of one training run compute what one does, and name one that dies."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import ddp_steps
import pytest
import torch
from torch import nn

from kbf.cli import main
from kbf.filters.neural.dpf import DPF
from kbf.images.encoders import Backbone
from kbf.training.processes import check_not_coupled, gathered, rank_and_world

TRAIN = ["train", "n_train=100", "data.n_test=20", "particles=50", "logger=none", "calibrate=false"]
DDP = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false"]
LSTM = ["model=lstm", "model.training.window=10"]
# Bound of the difference of the gradients of one and of two processes.
TOLERANCE = 1e-8
# Runs a command of which one process raises an error in its first step.
FAILS = """
import os, sys
from kbf.cli import main
from kbf.filters.neural.lstm import LSTMFilter

def forward(self, *_):
    if os.environ.get("LOCAL_RANK", "0") == os.environ["FAILS"]:
        raise ValueError("no more memory")
    return original(self, *_)

original = LSTMFilter.forward
LSTMFilter.forward = forward
sys.exit(main())
"""


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """Weights of all models: before, after an epoch in one process, and in two; the step size."""
    folder, step = tmp_path_factory.mktemp("steps"), 1e-2
    found = []
    for kind, lr in (("cpu", 1e-30), ("cpu", step), ("ddp", step)):
        words = [ddp_steps.__file__, kind, str(lr), str(folder / "weights.pt")]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(torch.load(folder / "weights.pt", weights_only=True))
    return *found, step


@pytest.mark.slow
@pytest.mark.parametrize("model", [*ddp_steps.MODELS, *(f"encoder, {k}" for k in ddp_steps.LOSSES)])
def test_gradients_of_two_processes_are_those_of_one(weights, model):
    before, one, two, step = (each if isinstance(each, float) else each[model] for each in weights)
    moved = {name for name in one if not torch.equal(one[name], before[name])}
    assert moved and one.keys() == two.keys()
    assert max(float((one[k] - before[k]).abs().max()) for k in moved) > 1e-4 * step
    for name in moved:
        gradient = (one[name] - two[name]) / step
        assert gradient.abs().max() < TOLERANCE, name


def run_until_trained(folder: Path, *more: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Start a training run that would take very long; returns it and its helper processes."""
    words = [*TRAIN, *LSTM, *DDP, "model.training.epochs=100000", f"run_dir={folder}", *more]
    process = subprocess.Popen(
        [sys.executable, "-m", "kbf.cli", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    limit = time.monotonic() + 200
    while not (folder / "checkpoints" / "last.ckpt").exists():
        assert process.poll() is None and time.monotonic() < limit
        time.sleep(0.1)
    below = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    return process, [int(each) for each in below.split()]


def has_ended(process: int) -> bool:
    status = Path(f"/proc/{process}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="lists processes in /proc")
@pytest.mark.parametrize("killed", [0, 1, 2])
def test_a_rank_that_dies_is_one_line_that_names_it(tmp_path, killed):
    more = ["trainer.devices=3"] if killed == 2 else []
    process, helpers = run_until_trained(tmp_path, *more)
    assert len(helpers) == 1 + len(more)
    os.kill([process.pid, *helpers][killed], signal.SIGKILL)
    error = process.communicate(timeout=100)[1]
    assert process.returncode == (-9 if killed == 0 else 2)
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith(f"kbf train: rank {killed} of {2 + len(more)} processes was killed")
    limit = time.monotonic() + 20
    while not all(map(has_ended, helpers)):
        assert time.monotonic() < limit, "helpers outlive the run"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 1])
def test_an_error_of_one_rank_is_printed_once(tmp_path, fails):
    (tmp_path / "run.py").write_text(FAILS)
    words = [*TRAIN, *LSTM, *DDP, "model.training.epochs=3", f"run_dir={tmp_path / 'run'}"]
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), *words],
        capture_output=True,
        text=True,
        env={**os.environ, "FAILS": str(fails)},
        timeout=200,
    )
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and lines[0] == "kbf train: no more memory", done.stderr
    assert len(lines) == 1 + fails
    if fails:
        assert re.match(r"kbf train: rank 1 of 2 processes ended with exit code 2", lines[1])


def test_what_couples_a_batch_is_refused(tmp_path, capsys):
    images = ["train", "data=dsprites", "n_train=60", "data.n_test=20", "particles=50"]
    images += ["logger=none", "data.encoding.epochs=1", f"run_dir={tmp_path / 'run'}", *DDP]
    batch_norm = ["encoder@data.encoding.encoder=cnn", "data.encoding.encoder.norm=batch"]
    for model in ("kalman", "lstm_images"):
        assert main([*images, *batch_norm, f"model={model}"]) == 2
        error = capsys.readouterr().err
        assert "2 processes cannot share a batch of" in error and "norm=group" in error
        assert error.count("\n") == 1
    assert main([*images, "model=dpf"]) == 2
    assert "2 processes cannot share a batch of DPF: its loss draws" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_what_does_not_couple_a_batch_is_shared():
    check_not_coupled(DPF(2, (1, 8, 8), encoder=None), 1)
    check_not_coupled(DPF(2, 2, individual=0.0), 2)
    with pytest.raises(ValueError, match="2 processes cannot share a batch of DPF"):
        check_not_coupled(DPF(2, 2), 2)
    frozen = Backbone((1, 8, 8), features=4, freeze=True).train()
    assert any(isinstance(each, nn.BatchNorm2d) for each in frozen.modules())
    check_not_coupled(frozen, 2)
    with pytest.raises(ValueError, match="4 processes cannot share a batch of Backbone"):
        check_not_coupled(Backbone((1, 8, 8), features=4).train(), 4)


@pytest.mark.parametrize("words", [["-m", "seed=0"], ["hold_out=0.2"], ["model=auto"]])
def test_what_runs_in_one_process_is_refused_in_several(tmp_path, monkeypatch, capsys, words):
    monkeypatch.chdir(tmp_path)
    model = [] if "model=auto" in words else LSTM
    assert main([*TRAIN, *model, *DDP, *words]) == 2
    error = capsys.readouterr().err
    assert "in one process: use trainer=cpu or trainer=gpu" in error and error.count("\n") == 1


def test_one_process_has_all_rows():
    rows = torch.rand(5, 2)
    assert rank_and_world() == (0, 1) and gathered(rows, 5) is rows
