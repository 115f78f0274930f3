"""kbf on a graphics card: the CPU's numbers, equal bits. `scripts/gpu_check` runs these, and without a card the rest of itself."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import time

import pytest
import torch

from kbf.bench import gpu
from kbf.bench.gpu import SIZES, TOLERANCES, Finding, make_filters, recordings
from kbf.filters.base import rollout

card = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
SMALL = SIZES["small"]
FILTERS = tuple(make_filters(SMALL, torch.float64, "cpu"))


def observations(device: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([s.obs for s in recordings(400, seed=1)])[:, :40].to(device, dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("name", [pytest.param(name, marks=card) for name in FILTERS])
def test_a_rollout_on_the_card_has_the_numbers_of_the_cpu(name, dtype):
    with torch.no_grad():
        here = rollout(make_filters(SMALL, dtype, "cpu")[name](), observations("cpu", dtype)).estimates
        there = rollout(make_filters(SMALL, dtype, "cuda")[name](), observations("cuda", dtype)).estimates
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", [pytest.param(name, marks=card) for name in FILTERS])
def test_two_runs_on_the_card_have_the_same_bits(name):
    filter = make_filters(SMALL, torch.float32, "cuda")[name]()
    with torch.no_grad():
        first, second = (rollout(filter, observations("cuda", torch.float32)).estimates for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("part", ["steps", "memory"])
def test_parts_run_without_a_card(part):
    found = list(gpu.PARTS[part](SMALL, "cpu"))
    assert found and all(each.part == part and each.good is not False for each in found), found
    if part == "steps":
        ratios = [each.value for each in found if each.quantity == "as it is, times the bare product"]
        assert len(ratios) == len(SMALL["points"]) * len(SMALL["batches"]) and all(value > 0 for value in ratios if value)


def test_a_failure_costs_only_itself():
    def fails():
        yield Finding("steps", "a", "seconds", 1.0)
        raise RuntimeError("CUDA error:\n no luck")

    found = list(gpu.attempt("steps", "b", fails))
    assert [each.quantity for each in found] == ["seconds", "failed"]
    assert found[1].note == "RuntimeError: CUDA error: no luck"


def test_a_missing_library_is_told_and_is_no_failure(monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    (found,) = gpu.tests(SMALL, "cpu")
    assert (found.quantity, found.good, found.note) == ("not installed", None, "pytest is not installed")
    inside = [each for each in gpu.training(SMALL | {"updates": 1}, "cpu") if each.what.startswith("lstm")]
    assert {(each.quantity, each.good) for each in inside} == {("not installed", None)}


def test_what_a_part_has_started_ends_with_it(tmp_path):
    """A process that starts another, which would write a file after a second, is stopped before."""
    later = tmp_path / "later"
    child = f"import time, pathlib; time.sleep(2); pathlib.Path({str(later)!r}).touch()"
    words = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    with pytest.raises(subprocess.TimeoutExpired):
        gpu.run_alone(words, 0.7)
    time.sleep(2.5)
    assert not later.exists()


def test_a_part_that_takes_too_long_or_crashes_keeps_what_it_found(tmp_path, monkeypatch):
    said = json.dumps(Finding("steps", "a", "seconds", 1.0)._asdict())
    for last, told in (("import time; time.sleep(60)", "stopped after 5 seconds"), ("import os; os.abort()", "ended with -6")):
        command = [sys.executable, "-c", f"print({said!r}, flush=True); {last}"]
        with monkeypatch.context() as patch:
            real = gpu.run_alone
            patch.setattr(gpu, "run_alone", lambda words, *how, real=real, command=command, **to: real(command, *how, **to))
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
    words = ["--device", "cpu", "--small", "--parts", "memory,steps,tests", "--out", str(tmp_path / "out")]
    environment = {"PYTHON": sys.executable, "PYTHONPATH": str(hidden), "PATH": "/usr/bin:/bin"}
    script = gpu.ROOT / "scripts" / "gpu_check"
    done = subprocess.run([str(script), *words], env=environment, capture_output=True, text=True, timeout=300)
    out = tmp_path / "out"
    assert done.returncode == 1 and "findings, 1 bad" in done.stdout, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {"gpu.md", "results.csv", "results.json", "log"}
    stored = json.loads((out / "results.json").read_text())
    with (out / "results.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(stored["findings"])
    assert [each["part"] for each in stored["findings"] if each["good"] is False] == ["tests"]
    assert "| n = 200, batch 4 | product, microseconds |" in (out / "gpu.md").read_text()


def test_bad_words(capsys):
    for words, told in ((["--parts", "steps,none"], "no part 'none'"), (["--device", "tpu"], "invalid choice")):
        with pytest.raises(SystemExit):
            gpu.main(words)
        assert told in capsys.readouterr().err
