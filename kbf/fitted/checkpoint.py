"""Reads, checks and writes checkpoints, which contain everything that a filter needs."""

import os
import re
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kbf import __version__
from kbf.evaluation.alarms import Monitor
from kbf.evaluation.calibration import Calibration, ForecastCalibration, HeldOut
from kbf.filters.gating import observe
from kbf.filters.protocols import Filter, control_components, move
from kbf.fitted.model import FittedModel, inner_filter, operators_of, take_shapes
from kbf.recording import Recording, control_width
from kbf.runtime import html_repr
from kbf.runtime.allowlist import check_plain, without_weights
from kbf.runtime.atomic_files import check_archive
from kbf.runtime.tensor_files import check_tensors, write_tensors

# File of the model with the least validation error.
BEST = "best.ckpt"
# File of the newest model.
LAST = "last.ckpt"
# The first version whose checkpoints this one reads.
OLDEST = (0, 1)


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged, or was not written by this package."""


class Trained(NamedTuple):
    """A model with its best parameters, and the filter over its recordings.

    Attributes:
        module: the model.
        filter: over the recordings of the module.
        epochs: of the training.
        validation_mse: least validation error; None where it is not known.
        calibration: of the filter's covariances, learned from held-out steps of the training data
            (`kbf.fitted.held_out_calibration`); None where it was not requested, and in older
            checkpoints. Of a filter without covariances that of its errors.
        monitor: of the filter's predictions, learned in the same way.
        held_out: scores of the columns of the states on the same held-out steps
            (`kbf.fitted.held_out_calibration.with_columns`).
        steps: of the optimiser, in all epochs.
        forecasts: calibration of the covariances of forecasts, learned in the same way; None where
            there is none, as in checkpoints of earlier versions. Forecasts then have that of the
            estimates.
    """

    module: FittedModel
    filter: Filter[Any]
    epochs: int
    validation_mse: float | None = None
    calibration: Calibration | None = None
    monitor: Monitor | None = None
    steps: int = 0
    held_out: HeldOut | None = None
    forecasts: ForecastCalibration | None = None

    def calibration_ahead(self, horizon: int) -> Calibration | None:
        """Return the calibration of forecasts so many steps ahead, None without any."""
        return self.calibration if self.forecasts is None else self.forecasts.at(horizon)

    def __repr__(self) -> str:
        return html_repr.described("Trained", self._asdict())

    def _repr_html_(self) -> str:
        return html_repr.page("Trained", self._asdict())


def checkpoint_of(module: FittedModel) -> dict[str, Any]:
    """Return the checkpoint of a model without training by gradient, in Lightning's format."""
    contents = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "state_dict": module.state_dict(),
    }
    module.on_save_checkpoint(contents)
    return contents | {"hparams_name": "kwargs", "hyper_parameters": {"config": module.config}}


def save_checkpoint(trained: Trained, path: str | os.PathLike[str]) -> None:
    """Write a trained model to a file that `load_filter` reads; atomically."""
    contents = checkpoint_of(trained.module) | {"epoch": trained.epochs}
    write_tensors(updated(contents, trained), path)


def rewrite_checkpoint(
    trained: Trained, source: str | os.PathLike[str], path: str | os.PathLike[str]
) -> None:
    """Write the checkpoint ``source`` to ``path``, updated by a trained model."""
    write_tensors(updated(read_checkpoint(source), trained), path)


def updated(contents: dict[str, Any], trained: Trained) -> dict[str, Any]:
    """Return a checkpoint with memory, operators, calibration and monitor of a trained model."""
    calibration, monitor, held_out = trained.calibration, trained.monitor, trained.held_out
    ahead = trained.forecasts
    contents["state_dict"] = on_cpu(trained.module.state_dict())
    contents["kbf"] |= {
        "operators": on_cpu(operators_of(trained.module.net, trained.filter)),
        "calibration": None if calibration is None else on_cpu(calibration._asdict()),
        "forecasts": None if ahead is None else on_cpu(ahead.stored()),
        "held_out": None if held_out is None else on_cpu(held_out._asdict()),
        "monitor": None if monitor is None else monitor.stored(),
        "provenance": trained.module.provenance,
    }
    return contents


def on_cpu(tensors: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return tensors by name, on the CPU, without those that are None."""
    return {name: leaf.cpu() for name, leaf in tensors.items() if leaf is not None}


def load_filter(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu", trust: bool = False
) -> Trained:
    """Return a filter from its checkpoint, which contains memory, bandwidths and operators.

    Args:
        path: of a ``best.ckpt`` or ``last.ckpt``, or ``example:rotation``, one that comes with kbf.
        device: of the filter.
        trust: allow the checkpoint to name any class or function that can be imported, not only
            the public ones (`kbf.runtime.allowlist`). Only for files that are trusted like a
            program.

    Raises:
        CheckpointError: no such file, not a checkpoint of this project, or one that does not fit
            the installed version.
        ValueError: the device does not exist.
    """
    check_device(device)
    checkpoint = read_checkpoint(path)
    if checkpoint["kbf"].get("stage") == "encoding":
        raise CheckpointError(
            f"{path} is of a run whose encoders were still learning: go on with "
            f"kbf train ckpt_path={path}"
        )
    config = checkpoint["hyper_parameters"]["config"]
    try:
        module = FittedModel({**config, "model": without_weights(config["model"])}, trust=trust)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        filter = module.to(device).filter()
        operators = checkpoint["kbf"]["operators"]
        inner: Any = inner_filter(filter)
        if isinstance(inner, nn.Module) and operators:
            take_shapes(inner, operators)
            inner.load_state_dict(operators)
            inner.eval()
        check_step(module, filter, device)
        calibration = Calibration.read(checkpoint["kbf"].get("calibration"), device)
        monitor = Monitor.read(checkpoint["kbf"].get("monitor"), device)
        held_out = HeldOut.read(checkpoint["kbf"].get("held_out"))
        ahead = ForecastCalibration.read(checkpoint["kbf"].get("forecasts"), device)
    except (ValueError, OSError):
        raise
    except Exception as error:  # wrong contents can raise any exception in the classes they are for
        written = checkpoint["kbf"]["version"]
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"checkpoint {path} (kbf {written}) does not fit kbf {__version__}: {reason}"
        ) from error
    epochs = checkpoint["epoch"]
    return Trained(module, filter, epochs, None, calibration, monitor, 0, held_out, ahead)


@torch.no_grad()
def check_step(module: FittedModel, filter: Filter[Any], device: str | torch.device) -> None:
    """Check that a filter can make a step: operators of wrong shapes fail only there.

    Raises:
        ValueError: the estimate is not finite, or of another width than the recordings' states.
    """
    generator = torch.Generator(device).manual_seed(0)
    zeros = partial(torch.zeros, 1, dtype=module.input_dtype, device=device)
    controls = control_components(filter)
    start = filter.init(1, generator=generator)
    control = zeros(controls) if controls else None
    predicted = move(filter, start, control=control, generator=generator)
    obs = zeros(*(module.observation or ()))
    estimate = filter.estimate(observe(filter, predicted, obs)[0])
    width = module.memory.recordings()[0].states.shape[1]
    if estimate.shape != (1, width) or not bool(estimate.isfinite().all()):
        raise ValueError(f"the first estimate must be {width} finite numbers")


def load_own(module: FittedModel, path: Path, *, device: str | torch.device) -> Trained:
    """Return a checkpoint that a run of ``module`` has written.

    It is trusted as the module is, if it names the same net and encoders.
    """
    stored = read_checkpoint(path)["hyper_parameters"]["config"]["model"]
    same = all(stored.get(key) == module.config["model"].get(key) for key in ("net", "encoding"))
    return load_filter(path, device=device, trust=module.trust and same)


def check_device(device: str | torch.device) -> None:
    """Check that PyTorch has this device.

    Raises:
        ValueError: it has not.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an unknown name, or no driver
        raise ValueError(
            f"device={device}: PyTorch sees no such device on this machine (cpu is always there)"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the contents of a checkpoint, on the CPU; nothing in the file is executed.

    Args:
        path: of the file or of the folder of a run, or ``example:NAME``.

    Raises:
        CheckpointError: no such file, damaged, of another project, or of a version that this one
            does not read.
    """
    file = checkpoint_file(path)
    if not file.is_file():
        where = f" in the folder {path}" if file.is_dir() else f" {path}"
        raise CheckpointError(f"there is no checkpoint{where}")
    try:
        check_archive(file)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        check_tensors(checkpoint, file.stat().st_size)
    except Exception as error:  # a file that is no checkpoint can raise nearly any exception
        raise CheckpointError(
            f"{path} ({file.stat().st_size} bytes) is no checkpoint, or damaged"
        ) from error
    if (
        not isinstance(checkpoint, dict)
        or not {"kbf", "state_dict", "hyper_parameters"} <= checkpoint.keys()
    ):
        raise CheckpointError(f"{path} was not written by kbf: it lacks its entries")
    try:
        check_contents(checkpoint)
    except ValueError as error:
        raise CheckpointError(
            f"{path} was not written by kbf, or changed since: {error}"
        ) from error
    check_version(path, str(checkpoint["kbf"].get("version")))
    return checkpoint


def check_contents(checkpoint: dict[str, Any]) -> None:
    """Check that the entries that are read have the types that they are written with.

    Raises:
        ValueError: an entry has another type.
    """
    for name in ("kbf", "state_dict", "hyper_parameters"):
        if not isinstance(checkpoint[name], dict):
            raise ValueError(f"{name} is a {type(checkpoint[name]).__name__}, not a dict")
    about, config = checkpoint["kbf"], checkpoint["hyper_parameters"].get("config")
    check_plain({"config": config, "provenance": about.get("provenance")})
    if not isinstance(config, dict) or not isinstance(model := config.get("model"), dict):
        raise ValueError("there is no configuration of a model in it")
    for name, where, kinds in (
        ("net", model, (dict,)),
        ("name", model, (str,)),
        ("recipe", config, (dict,)),
        ("data", config, (dict, NoneType)),
        ("encoding", model, (dict, NoneType)),
        ("training", model, (dict, NoneType)),
    ):
        if name in where and not isinstance(where[name], kinds):
            raise ValueError(
                f"the configuration's {name} is a {type(where[name]).__name__}, "
                f"not a {kinds[0].__name__}"
            )
    if model.get("dtype") not in (None, "float32", "float64"):
        raise ValueError(f"model.dtype must be float32 or float64, got {model['dtype']!r}")
    if type(config.get("seed")) is not int or type(checkpoint.get("epoch")) is not int:
        raise ValueError("seed and epoch must be whole numbers")
    tensors = [
        checkpoint["state_dict"],
        *([about.get("operators")] if about.get("stage") != "encoding" else []),
    ]
    for leaves in tensors:
        if not isinstance(leaves, dict) or not all(
            isinstance(k, str) and isinstance(v, Tensor) for k, v in leaves.items()
        ):
            raise ValueError("state_dict and operators must be tensors by name")
        for name, leaf in leaves.items():
            observed = name.startswith("memory.obs_")  # where nothing was observed there is NaN
            if leaf.is_floating_point() and not observed and not bool(leaf.isfinite().all()):
                raise ValueError(f"{name} holds numbers that are not finite")


def checkpoint_file(path: str | os.PathLike[str]) -> Path:
    """Return the file of a checkpoint; ``example:NAME`` is one that comes with kbf.

    A folder of a run stands for ``checkpoints/best.ckpt`` in it.

    Raises:
        CheckpointError: no example has this name.
    """
    name = str(path).removeprefix("example:")
    if name == str(path):
        file = Path(path).expanduser()
        inside = [file / "checkpoints" / "best.ckpt", file / "best.ckpt"]
        return next((each for each in inside if each.is_file()), file)
    files = sorted((Path(__file__).parents[1] / "checkpoints").glob("*.ckpt"))
    shipped = {file.stem: file for file in files}
    if name not in shipped:
        names = ", ".join(f"example:{stem}" for stem in shipped) or "none"
        raise CheckpointError(f"there is no {path}; kbf comes with {names}")
    return shipped[name]


def check_version(path: str | os.PathLike[str], written: str) -> None:
    """Check that this version reads the checkpoints of the version ``written``.

    Raises:
        CheckpointError: the checkpoint is of a newer version, or of one that is no longer read.
    """
    there, here = (tuple(map(int, re.findall(r"\d+", each)[:2])) for each in (written, __version__))
    if len(there) < 2:
        raise CheckpointError(f"{path} does not contain the version of kbf that wrote it")
    if there > here:
        raise CheckpointError(
            f"{path} was written by kbf {written}, this is kbf {__version__}: pip install -U kbf"
        )
    if there < OLDEST:
        raise CheckpointError(
            f"{path} was written by kbf {written}, which kbf {__version__} no longer reads: "
            "train it again"
        )


def check_like(module: FittedModel, new: Recording, checkpoint: str | os.PathLike[str]) -> None:
    """Check that a recording has the shapes of those that a filter was trained on.

    Raises:
        ValueError: states, observations or controls have other shapes.
    """
    old = module.memory.recordings()[0]
    for name, mine, theirs in (
        ("states", tuple(old.states.shape[1:]), tuple(new.states.shape[1:])),
        ("observations", tuple(module.observation or ()), tuple(new.obs.shape[1:])),
        ("controls", (control_width(old),), (control_width(new),)),
    ):
        if mine != theirs:
            raise ValueError(
                f"the data's {name} have the shape {theirs}, those that {checkpoint} was trained "
                f"on {mine}"
            )
