"""A memory shared by two processes (gloo, on the CPU) is one memory: estimates, diagnostics,
gradients, and a training step.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kbf.cli import main
from kbf.filters.kernel.kbf import KBF
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.runtime.distributed import no_reduce
from kbf.ssm import oscillatory, simulate

SETTINGS = {
    "plain": {"normalise": False},
    "normalised": {"normalise": True},
    "no ratio": {"normalise": True, "ratio": "one"},
}
F64 = torch.float64


def recordings() -> list[Recording]:
    """Three recordings of unlike lengths; process 0 has the first two."""
    start = torch.tensor([1.0, 0.0], dtype=F64)
    return [
        simulate(oscillatory(), start, steps, torch.Generator().manual_seed(k))
        for k, steps in enumerate((30, 11, 47))
    ]


def results(memory: list[Recording], reduce, rank: int = 0) -> dict[str, torch.Tensor]:
    """Estimates, diagnostics, covariances and gradients of each kind of filter."""
    obs = torch.stack(
        [
            simulate(
                oscillatory(), torch.zeros(2, dtype=F64), 7, torch.Generator().manual_seed(9 + k)
            ).obs
            for k in range(3)
        ]
    )
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 2] = mask[2, :2] = False
    told = {}
    for name, settings in SETTINGS.items():
        model = KBF(rank=12, tol=0.0, **settings)
        model.prepare(recordings())
        filter = model.fit(memory, reduce)
        run = rollout(filter, obs, mask=mask)
        told[f"{name} estimates"] = run.estimates.detach()
        told |= {f"{name} {key}": values.detach() for key, values in run.diagnostics.items()}
        told[f"{name} covariance"] = filter.covariance(run.state).detach()
        run.estimates.square().sum().backward()
        told |= {f"{name} gradient {key}": p.grad for key, p in model.named_parameters()}
        told[f"{name} moments"] = rollout(filter, obs.repeat(4, 1, 1)).estimates.detach()
    return told


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """What each of two processes found, with the recordings divided between them."""
    directory = tmp_path_factory.mktemp("shared")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = Path(__file__).with_name("shared_job.py")
    settings = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen([sys.executable, job, directory], env={**settings, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.slow
def test_two_processes_are_one(shared):
    whole = results(recordings(), no_reduce)
    for rank, found in enumerate(shared):
        for name, value in whole.items():
            if "gradient" not in name:
                torch.testing.assert_close(
                    found[name], value, rtol=1e-9, atol=1e-10, msg=f"process {rank}, {name}"
                )


@pytest.mark.slow
def test_gradients_of_the_processes_average_to_that_of_one(shared):
    whole = results(recordings(), no_reduce)
    gradients = [name for name in whole if "gradient" in name]
    assert len(gradients) == 6
    for name in gradients:
        torch.testing.assert_close(
            (shared[0][name] + shared[1][name]) / 2, whole[name], rtol=1e-7, atol=1e-9
        )
    assert any(not torch.allclose(shared[0][name], shared[1][name]) for name in gradients), (
        "each process has its own share"
    )


@pytest.mark.slow
def test_gather_keeps_the_order(shared):
    for found in shared:
        assert found["gathered"].tolist() == [[0.0], [1.0], [10.0]]


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": None},
        {"local": 5},
        {"rule": "original", "ratio": "tikhonov"},
        {"ratio": "relative"},
    ],
)
def test_what_cannot_be_shared_is_refused(settings):
    with pytest.raises(
        ValueError, match="processes share needs features and the importance-weighted rule"
    ):
        KBF(**settings).fit(recordings(), lambda x: x)


@pytest.mark.slow
def test_training_with_a_shared_memory_is_training_with_one(tmp_path):
    """The same batches, the same memory but for the transition where it was cut: nearly the same
    numbers are learned.
    """
    words = [
        "train",
        "model=kbf_tuned",
        "n_train=150",
        "data.n_test=30",
        "model.training.epochs=4",
        "model.training.shared=true",
    ]
    words += ["trainer.enable_progress_bar=false", "logger=csv", "model.training.validation=0.2"]
    both = [*words, "trainer=ddp", "trainer.accelerator=cpu", f"run_dir={tmp_path / 'both'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "kbf.cli", *both],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert main([*words, f"run_dir={tmp_path / 'one'}"]) == 0
    one, two = (
        json.loads((tmp_path / name / "metrics.json").read_text(encoding="utf-8"))
        for name in ("one", "both")
    )
    assert two["test.mse"] == pytest.approx(one["test.mse"], rel=0.02)
    assert two["validation.mse"] == pytest.approx(one["validation.mse"], rel=0.02)


def test_only_kernel_filters_share_a_memory(capsys):
    assert main(["train", "model=lstm", "+model.training.shared=true", "n_train=60"]) == 2
    assert "only kernel filters share a memory" in capsys.readouterr().err
