"""What the commands share."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from kbf import __version__
from kbf.data.source import Data
from kbf.evaluation import Score, summary
from kbf.files import replacing
from kbf.process import tune_process
from kbf.reliability import Reliability, reliability
from kbf.sequence import Sequence
from kbf.uncertainty import Calibration

console = Console()


def start(threads: int | None = None) -> None:
    """Settings of a process."""
    tune_process(threads)


def tell(data: Data) -> None:
    """What a person should know of the data."""
    for note in data.notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)


def estimate_rows(data: Data, result: Score) -> list[dict[str, Any]]:
    """Estimates of the test part in a person's own columns, one row a step."""
    rows = []
    for k, found in enumerate(result.estimates):
        columns = data.boundary.decode(found, None if result.covariances is None else result.covariances[k])
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        rows += [{"sequence": k, "step": t, **dict(zip(columns, row, strict=True))} for t, row in enumerate(values)]
    return rows


def score_metrics(result: Score, least: Score | None) -> dict[str, float | None]:
    """The flat keys that every scored run has; null where there is no floor, or one sequence gives no standard error."""
    told = summary(result.mse.tolist(), [None] * len(result.mse) if least is None else least.mse.tolist())
    floor = None if least is None else least.mse.mean().item()
    values = {"test.mse": told["mse"], "test.mse_se": told["se"], "test.floor": floor, "test.excess": told["excess"]}
    values |= {f"test.{name}": value for name, value in result.diagnostics.items()}
    return {name: None if value is None or value != value else value for name, value in values.items()}


def reliability_of(result: Score, sequences: list[Sequence], calibration: Calibration | None) -> dict[str, Reliability]:
    """What the filter's covariances are worth on the scored steps: as they are, under "raw", and recalibrated, under "".

    Empty for a filter without covariances; without a calibration "raw" alone.
    """
    if result.covariances is None:
        return {}
    z, m, C = (torch.cat(parts) for parts in ([s.states.double() for s in sequences], result.estimates, result.covariances))
    known = z.isfinite().all(-1)
    sides = {"raw": None} | ({} if calibration is None else {"": calibration})
    return {name: reliability(z[known], m[known], C[known], each) for name, each in sides.items()} if known.any() else {}


def recalibrated(result: Score, calibration: Calibration | None) -> Score:
    """The scores with recalibrated covariances, where there are any and a calibration."""
    if calibration is None or result.covariances is None:
        return result
    return result._replace(covariances=[calibration.covariance(C) for C in result.covariances])


def reliability_metrics(found: Mapping[str, Reliability]) -> dict[str, float]:
    """As flat keys: test.coverage_95 and the like, recalibrated, and the same with _raw behind."""
    behind = {"raw": "_raw", "": ""}
    return {f"test.{key}{behind[name]}": value for name, each in found.items() for key, value in each.numbers.items()}


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


class Drawn(NamedTuple):
    """What is drawn of the first test sequence besides its estimates: alarms ``T``, and the squared radius of its 95 % regions."""

    alarms: Tensor | None = None
    radius2: Tensor | None = None


def write_pictures(config: Mapping[str, Any], data: Data, result: Score, title: str, drawn: Drawn | None = None) -> list[str]:
    """Draw the first test sequence into the run directory; returns the names of the files.

    ``track.png`` for all data, ``frames.png`` for images, and ``filter.gif`` as ``config`` says: ``animation`` and
    ``animation_steps``.
    """
    from kbf import frame_plots, plots

    directory, images = Path(config["run_dir"]), data.test[0].obs.ndim == 4
    sequence, found = data.test[0], result.estimates[0]
    spread = None if result.covariances is None else result.covariances[0]
    title = f"{title}: test error {result.mse.mean().item():.4f}"
    track = plots.track_figure(sequence, found, spread, title=title, **(drawn or Drawn())._asdict())
    plots.save(track, directory / "track.png")
    names = ["track.png"]
    if images:
        plots.save(frame_plots.frame_grid(sequence, found, spread, extent=data.extent, title=title), directory / "frames.png")
        names.append("frames.png")
    steps = config["animation_steps"]
    if steps and (images if config["animation"] is None else config["animation"]):
        frame_plots.animate(directory / "filter.gif", sequence, found, spread, steps=steps, extent=data.extent, title=title)
        names.append("filter.gif")
    return names


def with_limits(trainer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer with the epochs and the clipping of a model."""
    training = model.get("training") or {}
    return {**trainer, "max_epochs": training.get("epochs", 1), "gradient_clip_val": training.get("clip")}


def resolved(recipe: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """A configuration with its interpolations filled in, after some of its top-level ``values`` were changed."""
    from omegaconf import OmegaConf

    filled = OmegaConf.to_container(OmegaConf.create({**recipe, **values}), resolve=True, throw_on_missing=True)
    assert isinstance(filled, dict)
    return {str(key): value for key, value in filled.items()}
