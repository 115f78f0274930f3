"""kbf on a graphics card: the CPU's numbers, equal bits.

`scripts/gpu_check` runs these, and without a card the rest of itself.
"""

from __future__ import annotations

import csv
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kbf.filters.particle.resampling import invert, systematic
from kbf.filters.rollout import rollout
from studies.benchmarks import gpu
from studies.benchmarks.gpu import SIZES, TOLERANCES, Finding, make_filters, recordings

card = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SMALL = SIZES["small"]
FILTERS = tuple(make_filters(SMALL, torch.float64, "cpu"))


def observations(device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([s.obs for s in recordings(400, seed=1)])[:, :40].to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", [pytest.param(name, marks=card) for name in FILTERS])
def test_a_rollout_on_the_card_has_the_numbers_of_the_cpu(name, dtype):
    with torch.no_grad():
        here = rollout(
            make_filters(SMALL, dtype, "cpu")[name](), observations("cpu", dtype)
        ).estimates
        there = rollout(
            make_filters(SMALL, dtype, "cuda")[name](), observations("cuda", dtype)
        ).estimates
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", [pytest.param(name, marks=card) for name in FILTERS])
def test_two_runs_on_the_card_have_the_same_bits(name):
    filter = make_filters(SMALL, torch.float32, "cuda")[name]()
    with torch.no_grad():
        first, second = (
            rollout(filter, observations("cuda", torch.float32)).estimates for _ in range(2)
        )
    assert torch.equal(first, second)


@pytest.mark.parametrize("P", [pytest.param(P, marks=card) for P in (1, 1000, 20_000)])
def test_particles_are_resampled_on_the_card_as_by_a_search(P):
    """By counts; and a row of NaN is an error of its own, not of the card."""
    weights = torch.randn(8, P, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weights[1:, : P // 3] = weights[1:, P - P // 3 :] = -torch.inf
    there = weights.cuda()
    chosen = systematic(there, torch.Generator("cuda").manual_seed(0))
    u = torch.rand(
        8, 1, dtype=torch.float64, device="cuda", generator=torch.Generator("cuda").manual_seed(0)
    )
    differ = chosen != invert(there, (torch.arange(P, device="cuda") + u) / P)
    assert (
        int(differ.sum()) <= 2 and not there.gather(1, chosen).isinf().any()
    )  # a point may fall onto an end, up to rounding
    there[0] = torch.nan
    assert not there[1:].gather(1, systematic(there)[1:]).isinf().any()


@pytest.mark.slow
@pytest.mark.parametrize("part", ["steps", "memory"])
def test_parts_run_without_a_card(part):
    found = list(gpu.PARTS[part](SMALL, "cpu"))
    assert found and all(each.part == part and each.good is not False for each in found), found
    if part == "steps":
        ratios = [
            each.value for each in found if each.quantity == "as it is, times the bare product"
        ]
        assert len(ratios) == len(SMALL["points"]) * len(SMALL["batches"]) and all(
            value > 0 for value in ratios if value
        )


def test_a_failure_costs_only_itself():
    def fails():
        yield Finding("steps", "a", "seconds", 1.0)
        raise RuntimeError("CUDA error:\n no luck")

    found = list(gpu.attempt("steps", "b", fails))
    assert [each.quantity for each in found] == ["seconds", "failed"]
    assert found[1].note == "RuntimeError: CUDA error: no luck"


@pytest.mark.parametrize(
    ("error", "told", "good"),
    [
        (ModuleNotFoundError("No module named 'rich'", name="rich"), "not installed", None),
        (ModuleNotFoundError("No module named 'kbf.gone'", name="kbf.gone"), "failed", False),
        (torch.OutOfMemoryError("CUDA out of memory"), "more memory than the card has", None),
    ],
)
def test_what_is_the_fault_of_kbf_is_bad(error, told, good):
    def fails():
        yield from ()
        raise error

    [found] = gpu.attempt("steps", "b", fails)
    assert (found.quantity, found.good) == (told, good)


@pytest.mark.slow
def test_a_part_that_takes_too_long_or_crashes_keeps_what_it_found(tmp_path, monkeypatch):
    said = json.dumps(Finding("steps", "a", "seconds", 1.0)._asdict())
    for last, told in (
        ("import time; time.sleep(60)", "stopped after 5 seconds"),
        ("import os; os.abort()", "ended with -6"),
    ):
        command = [sys.executable, "-c", f"print({said!r}, flush=True); {last}"]
        with monkeypatch.context() as patch:
            real = gpu.run_group
            patch.setattr(
                gpu,
                "run_group",
                lambda words, limit, real=real, command=command, **how: real(command, limit, **how),
            )
            found = gpu.run_part("steps", "small", "cpu", 5.0, tmp_path)
        assert found[0] == Finding("steps", "a", "seconds", 1.0)
        assert found[1].good is False and told in found[1].note


@pytest.mark.slow
def test_the_script_writes_one_folder_and_needs_neither_hydra_nor_matplotlib(tmp_path):
    """A machine with few packages: these are hidden; what needs one says so in the table."""
    hidden = tmp_path / "hidden"
    for name in ("hydra", "matplotlib", "lightning", "rich", "pytest"):
        (hidden / name).mkdir(parents=True)
        (hidden / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name} here')\n")
    words = [
        "--device",
        "cpu",
        "--small",
        "--parts",
        "memory,steps,tests",
        "--out",
        str(tmp_path / "out"),
    ]
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(hidden), "PATH": "/usr/bin:/bin"}
    script = gpu.ROOT / "scripts" / "gpu_check"
    done = subprocess.run(
        [str(script), *words], env=environment, capture_output=True, text=True, timeout=300
    )
    out = tmp_path / "out"
    assert done.returncode == 0 and "findings, 0 bad" in done.stdout, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {"gpu.md", "results.csv", "results.json", "log"}
    stored = json.loads((out / "results.json").read_text())
    with (out / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(stored["findings"])
    missing = [each["part"] for each in stored["findings"] if each["quantity"] == "not installed"]
    assert missing == ["tests"]  # no failure of the card
    assert "| n = 200, batch 4 | product, microseconds |" in (out / "gpu.md").read_text()


def test_bad_words(capsys):
    for words, told in (
        (["--parts", "steps,none"], "no part 'none'"),
        (["--device", "tpu"], "invalid choice"),
    ):
        with pytest.raises(SystemExit):
            gpu.main(words)
        assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_stopped_with_all_that_it_started(tmp_path):
    begun = tmp_path / "begun"
    child = (
        "import time, pathlib; "
        f"pathlib.Path({str(begun)!r}).write_text(str(__import__('os').getpid())); time.sleep(60)"
    )
    words = [
        sys.executable,
        "-c",
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])",
    ]
    with pytest.raises(subprocess.TimeoutExpired):
        gpu.run_group(words, 5.0)
    pid = int(begun.read_text())
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return
        if (
            Path(f"/proc/{pid}/stat").exists()
            and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        ):
            return
        time.sleep(0.1)
    pytest.fail("the grandchild goes on")


def test_a_part_that_lacks_a_library_says_so_and_is_not_bad():
    def work():
        importlib.import_module("no_such_library")
        yield Finding("training", "lstm", "seconds", 1.0)

    expected = Finding("training", "lstm", "not installed", note="it needs no_such_library")
    assert list(gpu.attempt("training", "lstm", work)) == [expected]
