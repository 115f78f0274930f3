"""Throughput of ``kbf filter``: observations in and estimates with covariances out by pipes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from kbf.plots.charts import Figure, curves
from kbf.ssm import oscillatory, simulate
from studies.benchmarks.base import Claim, Row, Settings, Tell

SIZES: dict[str, dict[str, Any]] = {
    "full": {"n": 900, "lines": 20_000, "models": ("kbf_paper", "kbf")},
    "smoke": {"n": 60, "lines": 1000, "models": ("kalman",)},
}
KBF = [sys.executable, "-m", "kbf.cli"]
LEAST_RATE = 1000
"""Observations a second to be reached."""


def run(settings: Settings, tell: Tell) -> list[Row]:
    """Rows for each of ten parts of a stream: observations a second, and memory.

    Seconds are those of the clock and of the process.

    The models are trained here on oscillatory data; one thread each.
    """
    start = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    obs = simulate(oscillatory(), start, settings["lines"], torch.Generator().manual_seed(1)).obs[0]
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for model in settings["models"]:
            tell(f"training {model}")
            words = [
                "data=oscillatory",
                f"n_train={settings['n']}",
                "particles=100",
                "data.n_test=20",
                "logger=none",
            ]
            command = [
                *KBF,
                "train",
                f"model={model}",
                *words,
                "trainer.enable_progress_bar=false",
                f"run_dir={directory}/{model}",
            ]
            subprocess.run(command, check=True, capture_output=True)
            rows += stream(
                model,
                Path(directory) / model / "checkpoints" / "best.ckpt",
                obs,
                settings["device"],
                tell,
            )
    return rows


def stream(model: str, checkpoint: Path, obs: Tensor, device: str, tell: Tell) -> Iterator[Row]:
    """Ten parts of a stream through one filter."""
    command = [*KBF, "filter", f"checkpoint={checkpoint}", "input=-", f"device={device}"]
    lines = [f"{','.join(f'{v:.6f}' for v in row)}\n".encode() for row in obs.tolist()]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        feeder = threading.Thread(target=feed, args=(process.stdin, lines))
        feeder.start()
        part = len(lines) // 10
        for _ in range(1 + part // 2):  # the header, and steps until it is warm
            process.stdout.readline()
        read = part // 2
        for k in range(10):
            clock, own = time.perf_counter(), processor(process.pid)
            until = min((k + 1) * part + part // 2, len(lines) - 1)
            count = until - read
            for _ in range(count):
                line = process.stdout.readline()
                if not line:
                    raise ValueError(f"kbf filter ended after {read} of {len(lines)} lines")
            read = until
            tell(f"{model}: {until:,} of {len(lines):,} observations")
            taken, busy = time.perf_counter() - clock, processor(process.pid) - own
            yield {
                "model": model,
                "observations so far": until,
                "a second": count / taken,
                "a second of its own time": count / busy if busy > 0 else float("nan"),
                "memory, MiB": memory(process.pid),
            }
        process.stdout.read()
        feeder.join()


def feed(pipe: IO[bytes], lines: list[bytes]) -> None:
    """Write the lines one by one, as a sensor does."""
    for line in lines:
        pipe.write(line)
        pipe.flush()
    pipe.close()


def processor(pid: int) -> float:
    """CPU seconds of a process, where the system reports them."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid: int) -> float:
    """Resident memory of a process, where the system reports it."""
    try:
        return (
            int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
        )
    except OSError:
        return float("nan")


def claims(rows: list[Row]) -> list[Claim]:
    """Fast enough, in constant memory."""
    verdicts = []
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        rate, own = (
            sorted(row[key] for row in mine)[len(mine) // 2]
            for key in ("a second", "a second of its own time")
        )
        words = (
            f"{rate:,.0f} by the clock, {own:,.0f} of the process's own time (medians of ten parts)"
        )
        verdicts.append(
            Claim(f"{name}: {LEAST_RATE:,} observations a second", words, rate >= LEAST_RATE)
        )
        grown = mine[-1]["memory, MiB"] - mine[1]["memory, MiB"]
        verdicts.append(
            Claim(
                f"{name}: memory does not grow",
                f"{grown:+.1f} MiB from the second part to the last",
                grown < 4,
            )
        )
    return verdicts


def draw(rows: list[Row]) -> Figure:
    """Throughput and memory over the stream."""
    points = [
        {
            "observations": row["observations so far"],
            "value": row[key],
            "what": key,
            "model": row["model"],
        }
        for key in ("a second", "a second of its own time", "memory, MiB")
        for row in rows
    ]
    return curves(
        points,
        x="observations",
        y="value",
        by="model",
        panel="what",
        xlabel="observations",
        ylabel="see above",
    )
