"""Helpers that several commands share: tables on the screen, scores as flat keys, pictures, provenance."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from kbf import __version__
from kbf.commands.support.metric_descriptions import meaning_of, shown
from kbf.data.dataset import Data
from kbf.evaluation.calibration import Calibration
from kbf.evaluation.metrics import nmse
from kbf.evaluation.score import Score
from kbf.evaluation.scoring_rules import Reliability, reliability
from kbf.evaluation.statistics import summary
from kbf.recording import Recording
from kbf.runtime.allowlist import files_named
from kbf.runtime.atomic_files import replacing
from kbf.runtime.threads import tune_process

console: Console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
"""In a file or a pipe tables are as wide as they need to be, not cut at 80 columns."""


def start(threads: int | None = None) -> None:
    """Set the number of threads and the floating-point mode of this process."""
    tune_process(threads)


UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
"""Seconds in a unit of time."""


def seconds_of(budget: str | int | float | None) -> float | None:
    """A time that a person sets, in seconds: 90s, 10m, 1.5h, or a number of seconds; None for none.

    Raises:
        ValueError: anything else, or no time at all.

    >>> seconds_of("10m"), seconds_of("90s"), seconds_of(30), seconds_of(None)
    (600.0, 90.0, 30.0, None)
    """
    if budget is None:
        return None
    text = str(budget).strip()
    number, unit = (text[:-1], UNITS[text[-1]]) if text[-1:] in UNITS else (text, 1.0)
    try:
        seconds = float(number) * unit
    except ValueError:
        seconds = 0.0
    if isinstance(budget, bool) or not 0 < seconds < float("inf"):
        raise ValueError(
            f"budget must be a time, as 90s, 10m or 1h, or null for none; got {budget!r}"
        )
    return seconds


class Telling(logging.Handler):
    """A line on the screen that shows what a fit does now: what the package logs, one message in place of the other."""

    def __init__(self, title: str) -> None:
        """``title``: in front of each message."""
        super().__init__(logging.INFO)
        self.title, self.status, self.logger = (
            title,
            console.status(escape(title)),
            logging.getLogger("kbf"),
        )

    def emit(self, record: logging.LogRecord) -> None:
        """Show a message, as much of it as has room; a warning stays."""
        if record.levelno > logging.INFO and not self.logger.propagate:
            console.print(f"[yellow]{escape(record.getMessage())}[/]", highlight=False)
        self.status.update(escape(f"{self.title}; {record.getMessage()}"[: console.width - 4]))

    def __enter__(self) -> Telling:
        self.before = self.logger.level, self.logger.propagate
        self.logger.propagate = self.logger.isEnabledFor(
            logging.INFO
        )  # who asked for messages gets them as before
        self.logger.setLevel(min(logging.INFO, self.logger.getEffectiveLevel()))
        self.logger.addHandler(self)
        self.status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.status.stop()
        self.logger.removeHandler(self)
        level, self.logger.propagate = self.before
        self.logger.setLevel(level)


def tell(data: Data) -> None:
    """Print the notes that reading the data left."""
    for note in data.notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)


def columns_of(data: Data) -> list[str]:
    """Names of the components of the state, as filters see them; empty where nobody named them."""
    names = [] if data.column_schema is None else data.column_schema.components("states")
    part = [*data.train, *data.test][:1]
    return names if part and len(names) == part[0].states.shape[1] else []


def estimate_rows(data: Data, result: Score) -> list[dict[str, Any]]:
    """Estimates of the test part in the recording's own columns and units, one row a step."""
    rows = []
    for k, estimates in enumerate(result.estimates):
        columns = data.column_schema.decode(
            estimates, None if result.covariances is None else result.covariances[k]
        )
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        rows += [
            {"recording": k, "step": t, **dict(zip(columns, row, strict=True))}
            for t, row in enumerate(values)
        ]
    return rows


def score_metrics(
    result: Score, least: Score | None, sequences: list[Recording]
) -> dict[str, float | None]:
    """The flat keys that every scored run has; null where there is no floor, or one sequence gives no standard error.

    ``test.nmse`` is the mean of the components' `kbf.evaluation.metrics.nmse` over all test steps,
    ``test.nmse.0`` the first's.
    """
    figures = summary(
        result.mse.tolist(), [None] * len(result.mse) if least is None else least.mse.tolist()
    )
    floor = None if least is None else least.mse.mean().item()
    values = {
        "test.mse": figures["mse"],
        "test.mse_se": figures["se"],
        "test.floor": floor,
        "test.excess": figures["excess"],
    }
    by_component = nmse(
        torch.cat(result.estimates), torch.cat([s.states.double() for s in sequences])
    )
    values["test.nmse"] = by_component.nanmean().item()
    values |= {f"test.nmse.{k}": value for k, value in enumerate(by_component.tolist())}
    values |= {f"test.{name}": value for name, value in result.diagnostics.items()}
    return {
        name: None if value is None or value != value else value for name, value in values.items()
    }


def reliability_of(
    result: Score, sequences: list[Recording], calibration: Calibration | None
) -> dict[str, Reliability]:
    """How reliable the filter's covariances are on the scored steps: as they are (key "raw") and recalibrated (key "").

    Empty for a filter without covariances; without a calibration "raw" alone.
    """
    if result.covariances is None:
        return {}
    z, m, C = (
        torch.cat(parts)
        for parts in ([s.states.double() for s in sequences], result.estimates, result.covariances)
    )
    known = z.isfinite().all(-1)
    if not known.any():
        return {}
    energies = None if result.energies is None else torch.cat(result.energies)[known]
    raw = reliability(z[known], m[known], C[known], energies=energies)
    return {"raw": raw} | (
        {} if calibration is None else {"": reliability(z[known], m[known], C[known], calibration)}
    )


def recalibrated(result: Score, calibration: Calibration | None) -> Score:
    """The scores with recalibrated covariances, where there are any and a calibration."""
    if calibration is None or result.covariances is None:
        return result
    return result._replace(covariances=[calibration.covariance(C) for C in result.covariances])


def reliability_metrics(reliabilities: Mapping[str, Reliability]) -> dict[str, float]:
    """Reliabilities as flat keys: ``test.coverage_95`` and so on for recalibrated covariances, with ``_raw`` for raw ones."""
    behind = {"raw": "_raw", "": ""}
    return {
        f"test.{key}{behind[name]}": value
        for name, each in reliabilities.items()
        for key, value in each.numbers.items()
    }


def about(config: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """Data set, model, sizes, seed and version of a result."""
    return {
        "data": config["data"].get("name"),
        "model": config["model"]["name"],
        "n_train": sum(len(s.states) for s in data.train),
        "n_test": sum(len(s.states) for s in data.test),
        "seed": config["seed"],
        "version": __version__,
    } | ({} if data.renderer is None else {"renderer": data.renderer})


def commit(root: Path = Path(__file__).parents[3]) -> str | None:
    """The commit of the checkout that the code runs from; None for an installed wheel.

    "-dirty" where tracked files differ from it: code or settings, that is, not tables of
    data/results/ that were just made.
    """

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        changed = git(
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ":(top)",
            ":(top,exclude)data/results",
        )
        return git("describe", "--always") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance() -> dict[str, Any]:
    """Where a result comes from: command line, commit, machine and versions."""
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":")[1].strip()
            for line in info.read_text().splitlines()
            if "model name" in line
        ]
        if info.exists()
        else []
    )
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
    """A table on the screen: names, values, and what they mean where `meaning_of` says it."""
    console.print(f"[bold]{title}[/]", highlight=False)
    told = [name for name in keys or values if values.get(name) is not None]
    explained = any(map(meaning_of, told))
    table = Table("quantity", "value", *(["what it is"] if explained else []))
    for name in told:
        table.add_row(
            name, escape(shown(name, values[name])), *([meaning_of(name)] if explained else [])
        )
    console.print(table)


def save_arrays(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Write tensors as one compressed npz, in one step."""
    import numpy

    values: dict[str, Any] = {name: value.detach().cpu().numpy() for name, value in arrays.items()}
    with replacing(path) as temporary, temporary.open("wb") as file:
        numpy.savez_compressed(file, **values)


class Drawn(NamedTuple):
    """Drawn besides the estimates of the first test sequence: alarms ``T``, and the squared radius of the 95 % regions."""

    alarms: Tensor | None = None
    radius2: Tensor | None = None


def write_pictures(
    config: Mapping[str, Any], data: Data, result: Score, title: str, drawn: Drawn | None = None
) -> list[str]:
    """Draw the first test sequence into the run directory; returns the names of the files.

    ``track.png`` for all data, ``frames.png`` for images, and ``filter.gif`` as ``config`` says:
    ``animation`` and ``animation_steps``.
    """
    from kbf.plots import animation, frames, tracks

    directory, images = Path(config["run_dir"]), data.test[0].obs.ndim == 4
    sequence, estimates = data.test[0], result.estimates[0]
    spread = None if result.covariances is None else result.covariances[0]
    title = f"{title}: test error {result.mse.mean().item():.4f}"
    track = tracks.track_figure(
        sequence,
        estimates,
        spread,
        title=title,
        names=columns_of(data),
        **(drawn or Drawn())._asdict(),
    )
    tracks.save(track, directory / "track.png")
    names = ["track.png"]
    if images:
        tracks.save(
            frames.frame_grid(sequence, estimates, spread, extent=data.extent, title=title),
            directory / "frames.png",
        )
        names.append("frames.png")
    steps = config["animation_steps"]
    if steps and (images if config["animation"] is None else config["animation"]):
        animation.animate(
            directory / "filter.gif",
            sequence,
            estimates,
            spread,
            steps=steps,
            extent=data.extent,
            title=title,
        )
        names.append("filter.gif")
    return names


def tell_files(data: Mapping[str, Any], checkpoint: object, given: Collection[str] = ()) -> None:
    """Say which files a checkpoint's own configuration of the data makes us read; those ``given`` on the command line are known."""
    for path in files_named(data):
        if path not in given:
            told = f"reading {escape(path)}, which {escape(str(checkpoint))} names"
            console.print(f"[dim]{told}[/]", highlight=False, soft_wrap=True)


def without_model_selection(model: Mapping[str, Any]) -> dict[str, Any]:
    """A model's configuration without the net under it: a run that learns nothing from held-out parts does not choose by them."""
    return {key: value for key, value in model.items() if key != "model_selection"}


def with_limits(trainer: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """A trainer with the epochs and the clipping of a model."""
    training = model.get("training") or {}
    limits = {"max_epochs": training.get("epochs", 1), "gradient_clip_val": training.get("clip")}
    if wrong := [
        value for value in limits.values() if not isinstance(value, int | float | None)
    ]:  # of a checkpoint, perhaps
        raise ValueError(f"model.training: epochs and clip must be numbers, got {wrong[0]!r}")
    return {**trainer, **limits}


def resolved(recipe: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """A configuration with its interpolations filled in, after some of its top-level ``values`` were changed."""
    from omegaconf import OmegaConf

    filled = OmegaConf.to_container(
        OmegaConf.create({**recipe, **values}), resolve=True, throw_on_missing=True
    )
    assert isinstance(filled, dict)
    return {str(key): value for key, value in filled.items()}
