"""Checkpoints that hold all that a filter needs: how they are read, checked, and made a filter again."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from kbf import __version__
from kbf.filters.base import Filter
from kbf.module import FilterTraining, inner_filter, take_shapes
from kbf.monitor import Monitor
from kbf.sequence import Sequence, control_width
from kbf.uncertainty import Calibration

OLDEST = (0, 1)
"""The first version whose checkpoints this one reads."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not one of ours."""


class Trained(NamedTuple):
    """A model with its best parameters, the filter over its recordings, the epochs it took, and its least validation error.

    ``calibration`` and ``monitor``: what held-out steps of the training data said of the filter's covariances and of its
    predictions; None where nobody asked (`kbf.held_out`), in older checkpoints, and without covariances the first of them.
    """

    module: FilterTraining
    filter: Filter[Any]
    epochs: int
    validation_mse: float | None = None
    calibration: Calibration | None = None
    monitor: Monitor | None = None


def load_filter(path: str | os.PathLike[str], *, device: str | torch.device = "cpu", trust: bool = False) -> Trained:
    """A filter from its checkpoint alone: memory, bandwidths and operators are inside.

    Args:
        path: of a ``best.ckpt`` or ``last.ckpt``, or ``example:rotation``, one that comes with kbf.
        device: where to.
        trust: allow the checkpoint to name classes outside of this package.

    Raises:
        CheckpointError: no such file, not a checkpoint of this project, or one that does not fit the installed version.
        ValueError: a device that is not there.
    """
    check_device(device)
    checkpoint = read_checkpoint(path)
    if checkpoint["kbf"].get("stage") == "coding":
        raise CheckpointError(f"{path} is of a run whose encoders were still learning: go on with kbf train ckpt_path={path}")
    config = checkpoint["hyper_parameters"]["config"]
    try:
        module = FilterTraining(config, trust=trust)
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(checkpoint["state_dict"])
        filter = module.to(device).filter()
        operators = checkpoint["kbf"]["operators"]
        inner: Any = inner_filter(filter)
        if isinstance(inner, nn.Module) and operators:
            take_shapes(inner, operators)
            inner.load_state_dict(operators)
            inner.eval()
    except (RuntimeError, KeyError, TypeError) as error:
        version = checkpoint["kbf"]["version"]
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"checkpoint {path} (kbf {version}) does not fit kbf {__version__}: {reason}") from error
    learned = checkpoint["kbf"]
    calibration, monitor = Calibration.read(learned.get("calibration"), device), Monitor.read(learned.get("monitor"), device)
    return Trained(module, filter, checkpoint["epoch"], None, calibration, monitor)


def check_device(device: str | torch.device) -> None:
    """Raise a ValueError unless PyTorch has this device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such word, or no driver
        raise ValueError(f"device={device}: PyTorch sees no such device on this machine (cpu is always there)") from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint of this project (or ``example:NAME``), on the CPU; nothing in the file is executed.

    Raises:
        CheckpointError: no such file, damaged, of another project, or of a version that this one does not read.
    """
    file = checkpoint_file(path)
    if not file.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # what comes out of a file that is no checkpoint is beyond listing
        raise CheckpointError(f"{path} ({file.stat().st_size} bytes) is no checkpoint, or damaged") from error
    if not isinstance(checkpoint, dict) or not {"kbf", "state_dict", "hyper_parameters"} <= checkpoint.keys():
        raise CheckpointError(f"{path} was not written by kbf: it lacks its entries")
    check_version(path, str(checkpoint["kbf"].get("version")))
    return checkpoint


def checkpoint_file(path: str | os.PathLike[str]) -> Path:
    """Where a checkpoint is: ``example:NAME`` is one that comes with kbf.

    Raises:
        CheckpointError: no example of this name.
    """
    name = str(path).removeprefix("example:")
    if name == str(path):
        return Path(path)
    shipped = {file.stem: file for file in sorted((Path(__file__).parent / "checkpoints").glob("*.ckpt"))}
    if name not in shipped:
        raise CheckpointError(f"there is no {path}; kbf comes with {', '.join(f'example:{stem}' for stem in shipped) or 'none'}")
    return shipped[name]


def check_version(path: str | os.PathLike[str], written: str) -> None:
    """Raise a CheckpointError if ``written``, the version that wrote a checkpoint, has a format that this one does not know."""
    there, here = (tuple(map(int, re.findall(r"\d+", version)[:2])) for version in (written, __version__))
    if len(there) < 2:
        raise CheckpointError(f"{path} does not say which version of kbf wrote it")
    if there > here:
        raise CheckpointError(f"{path} was written by kbf {written}, this is kbf {__version__}: pip install -U kbf")
    if there < OLDEST:
        raise CheckpointError(f"{path} was written by kbf {written}, which kbf {__version__} no longer reads: train it again")


def check_like(module: FilterTraining, new: Sequence, checkpoint: str | os.PathLike[str]) -> None:
    """Raise a ValueError unless a recording has the states, observations and controls of those that a filter was trained on."""
    old = module.memory.sequences()[0]
    for name, mine, theirs in (
        ("states", tuple(old.states.shape[1:]), tuple(new.states.shape[1:])),
        ("observations", tuple(module.observation or ()), tuple(new.obs.shape[1:])),
        ("controls", (control_width(old),), (control_width(new),)),
    ):
        if mine != theirs:
            raise ValueError(f"the data's {name} have the shape {theirs}, those that {checkpoint} was trained on {mine}")
