"""What the commands share."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kbf import __version__
from kbf.data.source import Data
from kbf.evaluation import Score, summary
from kbf.files import replacing
from kbf.process import tune_process

console = Console()


def start(threads: int | None = None) -> None:
    """Settings of a process."""
    tune_process(threads)


def score_metrics(result: Score, least: Score | None) -> dict[str, float | None]:
    """The flat keys that every scored run has; null where there is no floor, or one sequence gives no standard error."""
    told = summary(result.mse.tolist(), [None] * len(result.mse) if least is None else least.mse.tolist())
    floor = None if least is None else least.mse.mean().item()
    values = {"test.mse": told["mse"], "test.mse_se": told["se"], "test.floor": floor, "test.excess": told["excess"]}
    values |= {f"test.{name}": value for name, value in result.diagnostics.items()}
    return {name: None if value is None or value != value else value for name, value in values.items()}


def about(config: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """What a result belongs to."""
    return {
        "data": config["data"].get("name"),
        "model": config["model"]["name"],
        "n_train": sum(len(s.states) for s in data.train),
        "n_test": sum(len(s.states) for s in data.test),
        "seed": config["seed"],
        "version": __version__,
    } | ({} if data.renderer is None else {"renderer": data.renderer})


def commit() -> str | None:
    """The commit of the checkout that the code runs from, "-dirty" with changes; None for an installed wheel."""
    git = ["git", "-C", str(Path(__file__).parents[2]), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance() -> dict[str, Any]:
    """What made a result: the command line, the commit, the machine and the versions."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return {
        "command": "kbf " + shlex.join(sys.argv[1:]),
        "commit": commit(),
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kbf": __version__,
    }


def show(title: str, values: Mapping[str, Any], keys: list[str] | None = None) -> None:
    """A two-column table on the screen."""
    console.print(f"[bold]{title}[/]", highlight=False)
    table = Table(show_header=False)
    for name in keys or values:
        if values.get(name) is not None:
            table.add_row(name, shown(values[name]))
    console.print(table)


def shown(value: Any) -> str:
    """A number as people read it."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def save_arrays(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Write tensors as one compressed npz, in one step."""
    import numpy

    values: dict[str, Any] = {name: value.detach().cpu().numpy() for name, value in arrays.items()}
    with replacing(path) as temporary, temporary.open("wb") as file:
        numpy.savez_compressed(file, **values)


def write_pictures(config: Mapping[str, Any], data: Data, result: Score, title: str) -> list[str]:
    """Draw the first test sequence into the run directory; returns the names of the files.

    ``track.png`` for all data, ``frames.png`` for images, and ``filter.gif`` as ``config`` says: ``animation`` and
    ``animation_steps``.
    """
    from kbf import frame_plots, plots

    directory, images = Path(config["run_dir"]), data.test[0].obs.ndim == 4
    sequence, found = data.test[0], result.estimates[0]
    spread = None if result.covariances is None else result.covariances[0]
    title = f"{title}: test error {result.mse.mean().item():.4f}"
    plots.save(plots.track_figure(sequence, found, spread, title=title), directory / "track.png")
    names = ["track.png"]
    if images:
        plots.save(frame_plots.frame_grid(sequence, found, spread, extent=data.extent, title=title), directory / "frames.png")
        names.append("frames.png")
    steps = config["animation_steps"]
    if steps and (images if config["animation"] is None else config["animation"]):
        frame_plots.animate(directory / "filter.gif", sequence, found, spread, steps=steps, extent=data.extent, title=title)
        names.append("filter.gif")
    return names


def resolved(recipe: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """A configuration with its interpolations filled in, after some of its top-level ``values`` were changed."""
    from omegaconf import OmegaConf

    filled = OmegaConf.to_container(OmegaConf.create({**recipe, **values}), resolve=True, throw_on_missing=True)
    assert isinstance(filled, dict)
    return {str(key): value for key, value in filled.items()}
