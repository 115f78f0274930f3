"""Behaviour of kbf on a graphics card: accuracy, training, step time, memory, equal bits.

`scripts/gpu_check` runs it: each part in a process of its own, with a limit of time, so that
neither a failure nor a crash of the driver takes the others along. It needs PyTorch, NumPy and
jaxtyping; of kbf it imports what needs no more (one part tries Lightning). Without a card,
``--device cpu --small`` runs all of it in a minute or two.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import kbf
from kbf.data.pendulum_rkn import PendulumRKN
from kbf.filters.compile import Step, compile_step
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.neural.backprop_kf import BackpropKF
from kbf.filters.neural.gru import GRUFilter
from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.neural.rkn import RKNFilter
from kbf.filters.protocols import Filter
from kbf.filters.regression.kernel_ridge import FrameRegression
from kbf.filters.rollout import rollout
from kbf.images.encoders import CNN
from kbf.recording import Recording
from kbf.rkhs.kernels import median_distance
from kbf.runtime.atomic_files import write_csv, write_json, write_text
from kbf.ssm import oscillatory, simulate
from studies.benchmarks.timing import alternate, largest, synchronise

ROOT = Path(__file__).parents[2]
SIZES: dict[str, dict[str, Any]] = {
    "full": {
        "points": [900, 10_000, 100_000],
        "batches": [1, 64, 4096],
        "rank": 64,
        "run": 20_000,
        "steps": 200,
        "images": 2000,
        "epochs": 20,
        "updates": 60,
        "warm": 10,
        "rounds": 5,
        "seconds": 0.05,
    },
    "small": {
        "points": [200],
        "batches": [1, 4],
        "rank": 16,
        "run": 600,
        "steps": 20,
        "images": 60,
        "epochs": 2,
        "updates": 5,
        "warm": 2,
        "rounds": 1,
        "seconds": 0.005,
    },
}
LIMITS = {
    "tests": 120.0,
    "equal": 90.0,
    "training": 100.0,
    "steps": 180.0,
    "compiled": 90.0,
    "memory": 60.0,
    "determinism": 60.0,
}
"""Parts, and the seconds that each may take at most.

All of them together are held to ``--seconds``.
"""
TOLERANCES = {torch.float64: 1e-8, torch.float32: 2e-3}
"""Largest difference to the CPU's estimates, in standard deviations of the states."""


class Finding(NamedTuple):
    """A row of the table: a measurement, and whether it is good (None: there is no target)."""

    part: str
    what: str
    quantity: str
    value: float | None = None
    good: bool | None = None
    note: str = ""


def attempt(part: str, what: str, work: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a piece of work.

    If it fails, or requires a package that is not installed, the findings so far, and one with the
    reason.
    """
    try:
        yield from work()
    except Exception as error:  # of any kind: it is reported, and the next piece is run
        words = " ".join(str(error).split())[:200]
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] != "kbf":
            yield Finding(
                part, what, "not installed", None, None, f"it needs {error.name or error}"
            )
        elif isinstance(error, torch.OutOfMemoryError):
            yield Finding(part, what, "more memory than the card has", None, None, words)
        else:
            yield Finding(part, what, "failed", None, False, f"{type(error).__name__}: {words}")
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def recordings(
    n: int, device: str = "cpu", dtype: torch.dtype = torch.float64, seed: int = 0
) -> list[Recording]:
    """Oscillatory data in sequences of 100 steps, n steps in all."""
    start = torch.tensor([1.0, 0.0], dtype=torch.float64).expand(max(n // 100, 1), 2)
    drawn = simulate(oscillatory(), start, min(n, 100), torch.Generator().manual_seed(seed))
    return [
        Recording(z.to(device, dtype), x.to(device, dtype))
        for z, x in zip(drawn.states, drawn.obs, strict=True)
    ]


def make_filters(
    size: dict[str, Any], dtype: torch.dtype, device: str
) -> dict[str, Callable[[], Filter[Any]]]:
    """Filters by name, all without random numbers: learned on the CPU, then moved.

    The fitted ones learn on the device.
    """
    memory = recordings(300, dtype=dtype)
    there = recordings(300, device, dtype)
    name = str(dtype).removeprefix("torch.")

    def net(make: Callable[[], Any]) -> Filter[Any]:
        torch.manual_seed(0)
        model = make().to(dtype)
        model.prepare(memory, torch.Generator().manual_seed(0))
        return copy.deepcopy(model.fit(memory)).to(device).eval()

    def fitted(model: Any) -> Filter[Any]:
        model.prepare(there)
        return model.fit(there)

    densities: dict[str, Any] = {"transition": "gaussian", "observation": "gaussian"}
    return {
        "kbf": lambda: net(
            lambda: SimulatedKBF(
                200, 8, size["run"], size["rank"], reg=1e-3, dtype=name, **densities
            )
        ),
        "kbf, low rank": lambda: net(
            lambda: KBF(rank=size["rank"], tol=0.0, regs=(1e-3, 1e-3, 1e-3), dtype=name)
        ),
        "kbf, Gram matrices": lambda: net(
            lambda: KBF(rank=None, regs=(1e-3, 1e-3, 1e-3), dtype=name)
        ),
        "lstm": lambda: net(lambda: LSTMFilter(2, 2, generator=torch.Generator().manual_seed(0))),
        "gru": lambda: net(lambda: GRUFilter(2, 2, generator=torch.Generator().manual_seed(0))),
        "rkn": lambda: net(lambda: RKNFilter(2, 2)),
        "backprop_kf": lambda: net(lambda: BackpropKF(2, 2)),
        "kalman": lambda: fitted(LearnedKalman()),
        "frame": lambda: fitted(FrameRegression()),
    }


@torch.no_grad()
def equal(size: dict[str, Any], device: str) -> Iterator[Finding]:
    """Compares the estimates of a rollout on the device and on the CPU, with missing steps."""
    test = recordings(400, seed=1)
    obs, scale = (
        torch.stack([s.obs for s in test])[:, : size["steps"]],
        torch.cat([s.states for s in test]).std(0),
    )
    mask = torch.rand(obs.shape[:2], generator=torch.Generator().manual_seed(2)) < 0.8
    for dtype, tolerance in TOLERANCES.items():
        for name, make in make_filters(size, dtype, "cpu").items():

            def compare(
                name: str = name,
                make: Any = make,
                dtype: torch.dtype = dtype,
                tolerance: float = tolerance,
            ) -> Iterator[Finding]:
                here = rollout(make(), obs.to(dtype), mask=mask).estimates
                moved = make_filters(size, dtype, device)[name]()
                there = rollout(moved, obs.to(device, dtype), mask=mask.to(device)).estimates.cpu()
                apart = largest(here / scale, there / scale)
                quantity = "difference to the CPU, standard deviations"
                yield Finding(
                    "equal",
                    f"{name}, {dtype}".replace("torch.", ""),
                    quantity,
                    apart,
                    apart <= tolerance,
                )

            yield from attempt("equal", f"{name}, {dtype}", compare)


def encoder_losses(
    size: dict[str, Any], device: str, low: torch.dtype | None = None
) -> tuple[list[float], float]:
    """Losses of an encoder that learns the angle of a pendulum, and the seconds of a step."""
    steps = 50
    data = PendulumRKN(max(size["images"] // steps, 1), 1, steps=steps).train
    images, states = (
        torch.cat([getattr(s, name) for s in data]).float().to(device) for name in ("obs", "states")
    )
    torch.manual_seed(0)
    encoder = CNN((1, 24, 24), features=32)
    net = nn.Sequential(encoder, nn.Linear(32, 2)).to(device)
    optimiser, order, losses = (
        torch.optim.Adam(net.parameters(), 3e-3),
        torch.Generator().manual_seed(1),
        [],
    )
    began = 0.0
    for k in range(size["updates"]):
        if k == size["warm"]:
            synchronise()
            began = time.perf_counter()
        batch = torch.randint(len(images), (64,), generator=order).to(device)
        with torch.autocast(device, low or torch.bfloat16, enabled=low is not None):
            loss = (net(images[batch]).float() - states[batch]).square().sum(-1).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    values = torch.stack(losses).tolist()
    return values, (time.perf_counter() - began) / (len(values) - size["warm"])


def training(size: dict[str, Any], device: str) -> Iterator[Finding]:
    """An encoder, and an LSTM with an encoder, in float32 and mixed precision against the CPU."""
    part = "training"
    reference: dict[str, float] = {}

    def alone(where: str, low: torch.dtype | None) -> Iterator[Finding]:
        losses, seconds = encoder_losses(size, where, low)
        what = f"encoder, {where}, {'float32' if low is None else 'bfloat16 autocast'}"
        last = sum(losses[-10:]) / len(losses[-10:])
        own = reference.setdefault("encoder", last)
        yield Finding(
            part,
            what,
            "loss of the last ten steps",
            last,
            abs(last - own) <= 0.25 * own,
            f"{own:.4g} on the CPU",
        )
        yield Finding(part, what, "milliseconds a step", 1e3 * seconds)

    def inside(where: str, precision: str) -> Iterator[Finding]:
        error, seconds = lightning_error(size, where, precision)
        what = f"lstm with an encoder, trainer on {where}, {precision}"
        own = reference.setdefault("lstm", error)
        yield Finding(
            part,
            what,
            "error on new sequences",
            error,
            abs(error - own) <= 0.25 * own,
            f"{own:.4g} on the CPU",
        )
        yield Finding(part, what, "seconds", seconds)

    runs = [("cpu", None), (device, None), (device, torch.bfloat16)]
    for where, low in runs:
        yield from attempt(
            part, f"encoder, {where}, {low}", lambda where=where, low=low: alone(where, low)
        )
    for where, precision in (("cpu", "32-true"), (device, "32-true"), (device, "bf16-mixed")):
        what = f"lstm with an encoder, {where}, {precision}"
        yield from attempt(
            part, what, lambda where=where, precision=precision: inside(where, precision)
        )


def lightning_error(size: dict[str, Any], device: str, precision: str) -> tuple[float, float]:
    """Test error and seconds of an LSTM with an image encoder, trained as by ``trainer=gpu``."""
    from kbf.training.fit import train  # needs Lightning

    data = PendulumRKN(max(size["images"] // 50, 4), 25, steps=50)
    encoder = {"_target_": "kbf.CNN", "q": [1, 24, 24], "features": 32}
    net = {
        "_target_": "kbf.LSTMFilter",
        "d": 2,
        "q": [1, 24, 24],
        "encoder": encoder,
    }
    how = {
        "epochs": size["epochs"],
        "lr": 3e-3,
        "batch_size": 8,
        "window": 25,
        "stride": 25,
        "folds": 1,
        "validation": 0.0,
    }
    trainer = {
        "_target_": "lightning.Trainer",
        "accelerator": "gpu" if device == "cuda" else device,
        "devices": 1,
    }
    trainer |= {
        "max_epochs": size["epochs"],
        "precision": precision,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    model = {"name": "lstm_images", "dtype": "float32", "net": net, "training": how}
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        trained = train(
            {"model": model, "trainer": trainer, "seed": 0}, data.train, Path(directory)
        )
        seconds = time.perf_counter() - began
    assert trained is not None
    obs, states = (
        torch.stack([getattr(s, name) for s in data.test]).float() for name in ("obs", "states")
    )
    filter = trained.filter.to("cpu") if isinstance(trained.filter, nn.Module) else trained.filter
    with torch.no_grad():
        estimates = rollout(filter, obs).estimates
    return (estimates - states).square().sum(-1).mean().item(), seconds


def kernel_filter(n: int, rank: int, device: str) -> KernelBayesFilter:
    """The published filter with features, steps in float32, over n points."""
    memory = recordings(n, device)
    some = [
        torch.cat([getattr(s, name) for s in memory[:20]]) for name in ("states", "states", "obs")
    ]
    model = KBF(rank=rank, tol=0.0, normalise=False, learn=False, dtype="float32")
    widths = torch.stack([median_distance(part, diagonal=True) for part in some]) * 0.5**0.5 / 4
    model.set(widths.cpu(), torch.tensor([1e-3, 1e-3, 5e-4], dtype=torch.float64))
    return model.to(device).fit(memory)


@torch.no_grad()
def steps(size: dict[str, Any], device: str) -> Iterator[Finding]:
    """Time of a step by points and batch, eager and as a CUDA graph.

    The largest matrix product of the step is timed for comparison.
    """
    for n in size["points"]:
        made: list[KernelBayesFilter] = []

        def build(n: int = n, made: list[KernelBayesFilter] = made) -> Iterator[Finding]:
            kernel_filter(200, 16, device)  # loads the libraries of the card
            synchronise()
            began = time.perf_counter()
            made.append(kernel_filter(n, size["rank"], device))
            synchronise()
            yield Finding(
                "steps", f"n = {n:,}", "conditioning, seconds", time.perf_counter() - began
            )

        yield from attempt("steps", f"n = {n:,}", build)
        for b in size["batches"] if made else ():
            what = f"n = {n:,}, batch {b:,}"
            yield from attempt(
                "steps",
                what,
                lambda n=n, b=b, what=what, filter=made[0]: time_step(filter, n, b, what, size),
            )


def time_step(
    filter: KernelBayesFilter, n: int, b: int, what: str, size: dict[str, Any]
) -> Iterator[Finding]:
    """Seconds of a step on b sequences, of its bare product, and its memory; also as a graph."""
    device, rank = filter.states.device, size["rank"]
    part, on_card = "steps", device.type == "cuda"
    step = Step(filter).eval()
    inputs = (*(leaf.contiguous() for leaf in filter.init(b)), torch.randn(b, 2, device=device))
    ratio = torch.rand(b, n, device=device)
    moments = torch.randn(n, rank * (rank + 1) // 2, device=device)
    if on_card:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_card else 0
    sides: dict[str, Callable[[], object]] = {
        "as it is": lambda: step(*inputs),
        "product": lambda: ratio @ moments,
    }
    plain = step(*inputs)
    if on_card:
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        yield Finding(part, what, "memory of a step, MiB", peak)
        try:
            graph, outputs = capture(step, inputs)
            graph.replay()
            apart = max(largest(a, c) for a, c in zip(plain[:-1], outputs[:-1], strict=True))
            yield Finding(part, what, "difference of the graph", apart, apart <= 1e-4)
            sides["graph"] = graph.replay
        except RuntimeError as error:
            yield Finding(part, what, "graph", None, False, " ".join(str(error).split())[:200])
    seconds = alternate(sides, rounds=size["rounds"], seconds=size["seconds"])
    for name, took in seconds.items():
        yield Finding(part, what, f"{name}, microseconds", 1e6 * took)
        if name != "product":
            yield Finding(part, what, f"{name}, times the bare product", took / seconds["product"])


def capture(
    step: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """The step as a CUDA graph over these very inputs, and the tensors that a replay fills."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            outputs = step(*inputs)
    finally:
        torch.cuda.set_stream(before)  # PyTorch up to 2.11 leaves its own where the capture fails
    return graph, outputs


@torch.no_grad()
def compiled(size: dict[str, Any], device: str) -> Iterator[Finding]:
    """`kbf.filters.compile.compile_step` at the least n; a card needs Triton and a C compiler."""
    n, part = size["points"][0], "compiled"

    def work() -> Iterator[Finding]:
        filter = kernel_filter(n, size["rank"], device)
        obs = torch.randn(1, 2, device=device)
        leaves = tuple(leaf.contiguous() for leaf in filter.init(1))
        began = time.perf_counter()
        fast, plain = compile_step(filter, obs), Step(filter).eval()
        apart = max(
            largest(a, b)
            for a, b in zip(fast(*leaves, obs)[:-1], plain(*leaves, obs)[:-1], strict=True)
        )
        yield Finding(
            part, f"n = {n:,}, batch 1", "compiling, seconds", time.perf_counter() - began
        )
        yield Finding(part, f"n = {n:,}, batch 1", "difference to as it is", apart, apart <= 1e-4)
        sides = {"compiled": lambda: fast(*leaves, obs), "as it is": lambda: plain(*leaves, obs)}
        for name, took in alternate(sides, rounds=size["rounds"], seconds=size["seconds"]).items():
            yield Finding(part, f"n = {n:,}, batch 1", f"{name}, microseconds", 1e6 * took)

    yield from attempt(part, f"n = {n:,}", work)


@torch.no_grad()
def memory(size: dict[str, Any], device: str) -> Iterator[Finding]:
    """Peak memory of fitting, memory of the filter, and growth over a rollout."""

    def work(n: int) -> Iterator[Finding]:
        what, on_card = f"n = {n:,}", device == "cuda"
        if on_card:
            torch.cuda.reset_peak_memory_stats()
        filter = kernel_filter(n, size["rank"], device)
        held = sum(
            leaf.numel() * leaf.element_size() for leaf in (*filter.buffers(), *filter.parameters())
        )
        yield Finding("memory", what, "the filter, MiB", held / 2**20)
        if not on_card:
            yield Finding(
                "memory", what, "peak of conditioning, MiB", note="measured on a GPU only"
            )
            return
        yield Finding(
            "memory", what, "peak of conditioning, MiB", torch.cuda.max_memory_allocated() / 2**20
        )
        obs, used = torch.randn(1, size["steps"], 2, device=device), []
        for _ in range(3):
            rollout(filter, obs)
            used.append(torch.cuda.memory_allocated())
        yield Finding(
            "memory",
            what,
            "growth from one rollout to the next, bytes",
            used[2] - used[1],
            used[2] == used[1],
        )

    for n in size["points"]:
        yield from attempt("memory", f"n = {n:,}", lambda n=n: work(n))


def determinism(size: dict[str, Any], device: str) -> Iterator[Finding]:
    """Whether two runs give the same bits: rollouts as they are.

    Training as it is, and with PyTorch's deterministic algorithms.
    """
    part = "determinism"
    obs = torch.stack([s.obs for s in recordings(400, seed=1)])[:, : size["steps"]]

    def rolled(name: str) -> Iterator[Finding]:
        make = make_filters(size, torch.float32, device)[name]
        with torch.no_grad():
            runs = [rollout(make(), obs.to(device, torch.float32)).estimates for _ in range(2)]
        same = torch.equal(*runs)
        yield Finding(part, f"{name}, two rollouts", "same bits", float(same), same)

    def trained(strict: bool) -> Iterator[Finding]:
        torch.use_deterministic_algorithms(strict)
        try:
            first, second = (encoder_losses(size, device)[0] for _ in range(2))
        finally:
            torch.use_deterministic_algorithms(False)
        what = f"training of an encoder, {'deterministic algorithms' if strict else 'as it is'}"
        yield Finding(
            part, what, "same bits", float(first == second), (first == second) if strict else None
        )

    for name in ("kbf", "kbf, low rank", "lstm", "gru", "rkn", "kalman"):
        yield from attempt(part, name, lambda name=name: rolled(name))
    for strict in (False, True):
        yield from attempt(part, "training of an encoder", lambda strict=strict: trained(strict))


def tests(size: dict[str, Any], device: str) -> Iterator[Finding]:
    """The tests marked ``gpu``, by pytest in a process of its own.

    They are skipped where there is no card.
    """

    def work() -> Iterator[Finding]:
        importlib.import_module("pytest")
        words = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-m",
            "gpu",
            "-o",
            "addopts=",
            "-p",
            "no:cacheprovider",
            "tests/test_gpu.py",
        ]
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=LIMITS["tests"] - 10
        )
        last = (done.stdout.strip() or done.stderr.strip() or "it said nothing").splitlines()[-1]
        yield Finding(
            "tests",
            "pytest -m gpu",
            "exit status",
            done.returncode,
            done.returncode == 0,
            last[:200],
        )

    yield from attempt("tests", "pytest -m gpu", work)


PARTS: dict[str, Callable[[dict[str, Any], str], Iterator[Finding]]] = {
    "tests": tests,
    "equal": equal,
    "training": training,
    "steps": steps,
    "compiled": compiled,
    "memory": memory,
    "determinism": determinism,
}


def machine(device: str) -> dict[str, Any]:
    """The card, its driver's version, and those of PyTorch and kbf."""
    about: dict[str, Any] = {
        "device": device,
        "name": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    if device == "cuda":
        card = torch.cuda.get_device_properties(0)
        about |= {
            "name": card.name,
            "memory, GiB": round(card.total_memory / 2**30, 1),
            "cuda": torch.version.cuda,
        }
        about |= {
            "capability": f"{card.major}.{card.minor}",
            "multiprocessors": card.multi_processor_count,
        }
    return about | {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kbf": kbf.__version__,
    }


def run_group(words: list[str], limit: float, **settings: Any) -> int:
    """The exit status of a process.

    After ``limit`` seconds, or Ctrl-C, it and all that it has started are killed.

    Raises:
        subprocess.TimeoutExpired: after ``limit`` seconds.
    """
    with subprocess.Popen(words, start_new_session=True, **settings) as process:
        try:
            return process.wait(limit)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise


def run_part(part: str, size: str, device: str, limit: float, directory: Path) -> list[Finding]:
    """The findings of a part, made by a process of its own.

    What it has said stays where it fails, crashes or takes too long.
    """
    path, why = directory / f"{part}.jsonl", ""
    words = [
        sys.executable,
        "-m",
        "studies.benchmarks.gpu",
        "--part",
        part,
        "--size",
        size,
        "--device",
        device,
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    environment |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # deterministic algorithms need it
    began = time.perf_counter()
    with (
        path.open("w", encoding="utf-8") as out,
        (directory / f"{part}.log").open("w", encoding="utf-8") as log,
    ):
        try:
            code = run_group(words, limit, stdout=out, stderr=log, env=environment)
            why = f"its process ended with {code}" if code else ""
        except subprocess.TimeoutExpired:
            why = f"stopped after {limit:.0f} seconds"
    findings = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            findings.append(Finding(**json.loads(line)))
        except (
            ValueError,
            TypeError,
        ):  # the last line of a process that was stopped, or a library's remark
            continue
    if why:
        said = (
            (directory / f"{part}.log")
            .read_text(encoding="utf-8", errors="replace")
            .strip()
            .splitlines()
        )
        findings.append(
            Finding(
                part, "all of it", "not finished", None, False, " ".join([why, *said[-1:]])[:300]
            )
        )
    return [*findings, Finding(part, "all of it", "seconds", time.perf_counter() - began)]


def write(directory: Path, about: dict[str, Any], findings: list[Finding]) -> None:
    """The table as gpu.md, results.csv and results.json."""
    write_csv(directory / "results.csv", [each._asdict() for each in findings])
    write_json(
        directory / "results.json",
        {"about": about, "findings": [each._asdict() for each in findings]},
    )
    failed = [each for each in findings if each.good is False]
    lines = [
        f"# {about['name']}",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
    ]
    lines += [
        f"{len(findings)} findings, {sum(each.good is True for each in findings)} good, "
        f"{len(failed)} bad.",
        "",
    ]
    for part in dict.fromkeys(each.part for each in findings):
        lines += [f"## {part}", "", "| | quantity | value | | |", "|---|---|---|---|---|"]
        for each in findings:
            if each.part == part:
                value = "" if each.value is None else f"{each.value:.4g}"
                verdict = {True: "good", False: "**bad**", None: ""}[each.good]
                lines.append(
                    f"| {each.what} | {each.quantity} | {value} | {verdict} | "
                    f"{each.note.replace('|', '/')} |"
                )
        lines.append("")
    write_text(directory / "gpu.md", "\n".join(lines))


def main(words: list[str] | None = None) -> int:
    """Run the parts and write the folder after each; 1 if anything was bad."""
    parser = argparse.ArgumentParser(
        prog="gpu_check",
        description="Check kbf on a graphics card: numbers, training, time, memory.",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, a minute on a CPU")
    parser.add_argument(
        "--out", type=Path, help="the folder; data/results/gpu/NAME OF THE DEVICE if none is given"
    )
    parser.add_argument("--seconds", type=float, default=480.0, help="for all of it")
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them, with commas")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--size", choices=tuple(SIZES), help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.part:
        if given.device == "cpu":
            torch.set_num_threads(1)  # fastest where matrices are small
        for finding in PARTS[given.part](SIZES[given.size or "full"], given.device):
            print(json.dumps(finding._asdict()), flush=True)
        return 0
    chosen = [part.strip() for part in given.parts.split(",")]
    if unknown := [part for part in chosen if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "PyTorch sees no CUDA device on this machine; --device cpu --small tries the rest"
        )
    about = machine(given.device)
    name = (
        "".join(letter if letter.isalnum() else "_" for letter in str(about["name"])).strip("_")
        or "device"
    )
    directory = given.out or ROOT / "data" / "results" / "gpu" / name
    (directory / "log").mkdir(parents=True, exist_ok=True)
    end, findings = time.perf_counter() + given.seconds, []
    for part in chosen:
        left = end - time.perf_counter()
        if left < 5:
            findings.append(
                Finding(part, "all of it", "not started", None, False, "no time was left")
            )
        else:
            print(f"{part} ...", flush=True)
            findings += run_part(
                part,
                "small" if given.small else "full",
                given.device,
                min(left, LIMITS[part]),
                directory / "log",
            )
        write(directory, about, findings)
    bad = [each for each in findings if each.good is False]
    for each in bad:
        print(
            f"bad: {each.part}, {each.what}: {each.quantity} "
            f"{'' if each.value is None else each.value} {each.note}"
        )
    print(f"{len(findings)} findings, {len(bad)} bad, in {directory}")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
