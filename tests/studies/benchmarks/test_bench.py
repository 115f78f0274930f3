"""The command ``kbf bench``, and the benchmarks of a step, of size and of a long run."""

from __future__ import annotations

import csv
import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from kbf.cli import main
from kbf.filters.rollout import rollout
from kbf.ssm import oscillatory
from studies.benchmarks import BENCHMARKS, command
from studies.benchmarks.base import alternate
from studies.benchmarks.problem import problem, reference
from studies.benchmarks.scale import slope

HERE = ("step", "scale", "online", "serving")


def module(name: str):
    return importlib.import_module(f"studies.benchmarks.{name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", HERE)
def test_smoke(name, tmp_path, capsys):
    if name == "serving":
        pytest.importorskip("starlette")
    assert main(["bench", name, "size=smoke", f"run_dir={tmp_path}"]) == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        "results.csv",
        "figure.png",
        "claims.md",
        "about.json",
    }
    with (tmp_path / "results.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 2
    about = json.loads((tmp_path / "about.json").read_text(encoding="utf-8"))
    assert (about["benchmark"], about["size"]) == (name, "smoke")
    assert "PyTorch" in capsys.readouterr().out


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_has_its_parts(name):
    assert {"full", "smoke"} <= set(module(name).SIZES)
    assert all(callable(getattr(module(name), part)) for part in ("run", "claims", "draw"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["bench", "nothing"], "no benchmark 'nothing'"),
        (["bench", "step", "size=tiny"], "size must be one of full, smoke"),
        (["bench", "step", "device=tpu"], "device must be cpu or cuda"),
        (["bench", "step", "threads=0"], "threads must be at least 1"),
        (["bench", "step", "threads=two"], "threads must be a whole number"),
    ],
)
def test_bad_input(words, told, capsys, tmp_path):
    assert main([*words, f"run_dir={tmp_path}"]) == 2
    assert told in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_all_goes_on_without_one_that_cannot_run(monkeypatch, capsys):
    ran = []

    def measure(name, config, directory):
        ran.append((name, directory.name))
        if name == "peers":
            raise ValueError("not on this device")

    monkeypatch.setattr(command, "measure", measure)
    assert main(["bench", "all"]) == 0
    assert ran == [(name, name) for name in BENCHMARKS]
    assert "not on this device" in capsys.readouterr().out


def test_sides_are_called_in_turn():
    calls = []
    seconds = alternate(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, seconds=0.0
    )
    assert calls == ["a", "a", "b", "b"] + ["a", "b"] * 3  # twice to know how long it takes
    assert set(seconds) == {"a", "b"} and min(seconds.values()) > 0


def test_the_published_step_is_the_dense_filter():
    """What the times are compared of gives the same estimates."""
    p, code = problem(40, steps=6), reference()
    assert code is not None
    numbers = (*p.bandwidths.tolist(), 1e-3, 1e-3, 5e-4)
    found = code.published_filter(
        p.memory.states.numpy(), p.memory.obs.numpy(), p.test.obs.numpy(), *numbers
    )
    ours = rollout(p.filter().fit(p.memory), p.test.obs[None]).estimates[0]
    np.testing.assert_allclose(found, ours.numpy(), rtol=0, atol=1e-10)


def step_row(side: str, microseconds: float, apart: float, above: float):
    row = {
        "side": side,
        "ranks": "" if side == "dense float64" else "8 and 9",
        "compiled": False,
        "microseconds": microseconds,
    }
    row |= {
        "times faster than dense": 6000 / microseconds,
        "times faster than published": 50_000 / microseconds,
    }
    return row | {"largest difference": apart, "error above dense": above}


def test_claims_of_a_step():
    rows = [
        step_row("dense float64", 6000, 0, 0),
        step_row("fast", 50, 0.01, -0.004),
        step_row("exact", 110, 5e-5, 0.0),
    ]
    sixty, three_hundred, hundred, five_hundred = module("step").claims(rows)
    assert (sixty.reached, three_hundred.reached, hundred.reached, five_hundred.reached) == (
        False,
        True,
        True,
        True,
    )
    assert "exact" in sixty.measured and "fast" in hundred.measured
    assert [claim.reached for claim in module("step").claims(rows[:1])] == [None] * 4
    assert not module("step").claims([rows[0], step_row("wrong", 1, 1.0, 0.5)])[0].reached


def scale_rows(memory: float, power: float = 1.0):
    sizes = (1000, 10_000, 30_000, 100_000)
    keys = (
        "choosing, seconds",
        "conditioning, seconds",
        "step, milliseconds",
        "memory above the start, GiB",
    )
    return [
        {"training points": n, "rank": 256, "memory, GiB": memory, **dict.fromkeys(keys, n**power)}
        for n in sizes
    ]


def test_claims_of_scale():
    assert slope(scale_rows(1.0, 1.3), "step, milliseconds") == pytest.approx(1.3)
    assert [claim.reached for claim in module("scale").claims(scale_rows(2.0))] == [
        True,
        True,
        True,
        True,
    ]
    assert [claim.reached for claim in module("scale").claims(scale_rows(4.0, 1.2))] == [
        False,
        False,
        False,
        False,
    ]
    still = [row | {"memory above the start, GiB": 0.0} for row in scale_rows(2.0)]
    assert module("scale").claims(still)[2].reached is None


# a process of its own: what earlier tests leave would be freed in between
PEAKS = """
import torch
from studies.benchmarks.scale import gibibytes, reset_peak
block = torch.ones(2**26)  # 256 MiB
peak = gibibytes()
del block
reset_peak()
before = gibibytes()
block = torch.ones(2**25)
print(peak, before, gibibytes())
"""


def test_memory_is_counted_from_the_start_of_the_benchmark():
    run = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    peak, before, after = map(float, run.stdout.split())
    if before > peak - 0.2:
        pytest.skip("this system does not let a process forget its peak")
    assert 0.1 < after - before < 0.2


def online_rows(bad: int = 0, grown: float = 0.0, drift: float = 0.0):
    micro = {f"{share} %, microseconds": 100.0 for share in ("50", "99", "99.9")}
    return [
        {
            "filter": "f",
            "steps so far": 100_000 * k,
            "not finite": bad,
            "error": 0.06 + drift * k,
            "memory, MiB": 500 + grown * k,
            **micro,
        }
        for k in range(1, 11)
    ]


def test_claims_of_a_long_run():
    claims = module("online").claims
    assert [claim.reached for claim in claims(online_rows())] == [True, True, True, None]
    for k, changes in enumerate(({"bad": 1}, {"grown": 1.0}, {"drift": 0.001})):
        assert claims(online_rows(**changes))[k].reached is False


def test_the_default_has_latencies_to_reach():
    online = module("online")
    for name, most in online.LATENCIES.items():
        for median, reached in ((most, True), (most + 1, False)):
            rows = [
                row | {"filter": name, "50 %, microseconds": float(median)} for row in online_rows()
            ]
            assert online.claims(rows)[-1].reached is reached


def test_controls_push_the_states_that_are_drawn():
    """z' - f(z) - u is the noise of the moves, and u what it should be."""
    online, model = module("online"), oscillatory()
    z, _, _, u = online.drive(
        torch.tensor([[1.0, 0.0]], dtype=torch.float64), 4000, torch.Generator().manual_seed(0)
    )
    noise = z[:, 1:] - model.f(z[:, :-1]) - u[:, 1:]
    assert z.shape == u.shape == (1, 4000, 2)
    torch.testing.assert_close(noise.std((0, 1)), model.Q.diagonal().sqrt(), rtol=0.05, atol=0)
    torch.testing.assert_close(u.std((0, 1)), u.new_full((2,), online.PUSH), rtol=0.05, atol=0)
    correlation = (noise * u[:, 1:]).mean((0, 1)) / (noise.std((0, 1)) * u.std((0, 1)))
    assert correlation.abs().max() < 0.05
