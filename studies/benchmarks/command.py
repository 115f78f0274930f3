"""``kbf bench``: runs benchmarks and writes their tables, claims and the machine."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table

from kbf.commands.support.console import console, print_table
from kbf.plots.tracks import save
from kbf.runtime.atomic_files import write_csv, write_json, write_text
from kbf.runtime.provenance import provenance
from kbf.runtime.threads import tune_process
from studies.benchmarks import BENCHMARKS
from studies.benchmarks.base import Benchmark, Claim

ANSWERS: dict[bool | None, str] = {True: "reached", False: "missed", None: ""}


def run(config: dict[str, Any]) -> int:
    """Run one benchmark, or all of them.

    Raises:
        ValueError: an unknown benchmark, size or device.
    """
    tune_process(config["threads"])
    name = config["name"]
    if name != "all" and name not in BENCHMARKS:
        raise ValueError(
            f"there is no benchmark {name!r}; there are {', '.join(BENCHMARKS)}, and all"
        )
    if config["device"] == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: PyTorch sees no CUDA device on this machine")
    if config["device"] not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {config['device']!r}")
    for each in BENCHMARKS if name == "all" else [name]:
        directory = Path(config["run_dir"]) / (each if name == "all" else "")
        try:
            measure(each, config, directory)
        except ValueError as error:
            if name != "all":
                raise
            console.print(f"[yellow]left out[/]: {escape(str(error))}", highlight=False)
    return 0


def measure(name: str, config: dict[str, Any], directory: Path) -> None:
    """One benchmark: table, picture and claims, on the screen and as files."""
    benchmark: Benchmark = importlib.import_module(f"studies.benchmarks.{name}")  # pyright: ignore[reportAssignmentType]
    if config["size"] not in benchmark.SIZES:
        raise ValueError(
            f"size must be one of {', '.join(benchmark.SIZES)}, got {config['size']!r}"
        )
    console.print(f"\n[bold]{name}[/] {BENCHMARKS[name]} ({config['size']})", highlight=False)
    about = provenance() | {
        "benchmark": name,
        "size": config["size"],
        "threads": torch.get_num_threads(),
        "device": config["device"],
    }
    machine = (
        about["gpu"]
        if config["device"] == "cuda"
        else f"{about['processor']}, {about['threads']} of {about['cores']} cores"
    )
    console.print(f"{machine}; PyTorch {about['torch']}", highlight=False)
    with console.status("measuring") as status:
        rows = benchmark.run(
            {**benchmark.SIZES[config["size"]], "device": config["device"]},
            lambda text: status.update(text),
        )
    claims = benchmark.claims(rows)
    write_csv(directory / "results.csv", rows)
    save(benchmark.draw(rows), directory / "figure.png")
    write_json(directory / "about.json", about)
    write_text(directory / "claims.md", claims_text(name, machine, claims))
    show_rows(rows)
    if claims:
        table = Table()
        for header in ("to be reached", "measured", ""):
            table.add_column(header)
        for claim in claims:
            table.add_row(escape(claim.target), escape(claim.measured), ANSWERS[claim.reached])
        console.print(table)
    console.print(
        f"in [bold]{directory}[/]: results.csv, figure.png, claims.md, about.json", highlight=False
    )


def show_rows(rows: list[dict[str, Any]]) -> None:
    """The measurements as a table."""
    table = Table()
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        table.add_row(
            *(
                f"{value:.4g}" if isinstance(value, float) else escape(str(value))
                for value in row.values()
            )
        )
    print_table(table)


def claims_text(name: str, machine: str, claims: list[Claim]) -> str:
    """The claims as Markdown."""
    lines = [
        f"`kbf bench {name}`, {machine}",
        "",
        "| to be reached | measured | |",
        "|---|---|---|",
    ]
    lines += [
        f"| {claim.target} | {claim.measured} | {ANSWERS[claim.reached]} |" for claim in claims
    ]
    return "\n".join([*lines, ""])
