"""Checkpoints that hold all that a filter needs: how they are written, read, checked, and made a filter again."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kbf import __version__
from kbf.evaluation.alarms import Monitor
from kbf.evaluation.calibration import Calibration
from kbf.filters.gating import observe
from kbf.filters.protocols import Filter, control_components, move
from kbf.recording import Recording, control_width
from kbf.runtime import html_repr
from kbf.runtime.allowlist import check_plain, without_weights
from kbf.runtime.atomic_files import check_archive
from kbf.runtime.tensor_files import check_tensors, write_tensors
from kbf.training.fitted_model import FittedModel, inner_filter, operators_of, take_shapes

OLDEST = (0, 1)
"""The first version whose checkpoints this one reads."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged, or not one of ours."""


class Trained(NamedTuple):
    """A model with its best parameters, the filter over its recordings, the epochs it took, and its least validation error.

    ``calibration`` and ``monitor``: what held-out steps of the training data said of the filter's
    covariances and of its predictions; None where nobody asked
    (`kbf.training.held_out_calibration`), in older checkpoints, and without covariances the first
    of them. ``steps``: of the optimizer, in all of these epochs.
    """

    module: FittedModel
    filter: Filter[Any]
    epochs: int
    validation_mse: float | None = None
    calibration: Calibration | None = None
    monitor: Monitor | None = None
    steps: int = 0

    def __repr__(self) -> str:
        return html_repr.described("Trained", self._asdict())

    def _repr_html_(self) -> str:
        return html_repr.page("Trained", self._asdict())


def checkpoint_of(module: FittedModel) -> dict[str, Any]:
    """The checkpoint of a model that has nothing to learn by gradient, as Lightning's trainer makes it of one that has."""
    contents = {
        "epoch": 0,
        "global_step": 0,
        "pytorch-lightning_version": version("lightning"),
        "state_dict": module.state_dict(),
    }
    module.on_save_checkpoint(contents)
    return contents | {"hparams_name": "kwargs", "hyper_parameters": {"config": module.config}}


def rewrite_checkpoint(
    trained: Trained, source: str | os.PathLike[str], path: str | os.PathLike[str]
) -> None:
    """Write the checkpoint ``source`` to ``path`` with the memory, operators, calibration and monitor of a trained model."""
    contents = read_checkpoint(source)
    calibration, monitor = trained.calibration, trained.monitor
    contents["state_dict"] = {
        name: leaf.cpu() for name, leaf in trained.module.state_dict().items()
    }
    contents["kbf"] |= {
        "operators": {
            name: leaf.cpu()
            for name, leaf in operators_of(trained.module.net, trained.filter).items()
        },
        "calibration": None
        if calibration is None
        else Calibration(*(leaf.cpu() for leaf in calibration))._asdict(),
        "monitor": None if monitor is None else monitor.stored(),
    }
    write_tensors(contents, path)


def load_filter(
    path: str | os.PathLike[str], *, device: str | torch.device = "cpu", trust: bool = False
) -> Trained:
    """A filter from its checkpoint alone: memory, bandwidths and operators are inside.

    Args:
        path: of a ``best.ckpt`` or ``last.ckpt``, or ``example:rotation``, one that comes with kbf.
        device: where to.
        trust: allow the checkpoint to name any class or function that can be imported, not only
            what is registered (`kbf.runtime.allowlist`): for files that you trust as you trust a
            program.

    Raises:
        CheckpointError: no such file, not a checkpoint of this project, or one that does not fit
            the installed version.
        ValueError: a device that is not there.
    """
    check_device(device)
    checkpoint = read_checkpoint(path)
    if checkpoint["kbf"].get("stage") == "encoding":
        raise CheckpointError(
            f"{path} is of a run whose encoders were still learning: go on with kbf train ckpt_path={path}"
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
        learned = checkpoint["kbf"]
        check_step(module, filter, device)
        calibration, monitor = (
            Calibration.read(learned.get("calibration"), device),
            Monitor.read(learned.get("monitor"), device),
        )
    except (ValueError, OSError):
        raise
    except Exception as error:  # whatever wrong contents make of the classes that they are for
        written = checkpoint["kbf"]["version"]
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"checkpoint {path} (kbf {written}) does not fit kbf {__version__}: {reason}"
        ) from error
    return Trained(module, filter, checkpoint["epoch"], None, calibration, monitor)


@torch.no_grad()
def check_step(module: FittedModel, filter: Filter[Any], device: str | torch.device) -> None:
    """Raise unless a filter can take a step, and knows a state afterwards: operators of other shapes would fail only then.

    Raises:
        ValueError: an estimate that is not finite, or of another width than the recordings' states.
    """
    generator = torch.Generator(device).manual_seed(0)
    controls = control_components(filter)
    control = (
        torch.zeros(1, controls, dtype=module.input_dtype, device=device) if controls else None
    )
    predicted = move(
        filter, filter.init(1, generator=generator), control=control, generator=generator
    )
    obs = torch.zeros(1, *(module.observation or ()), dtype=module.input_dtype, device=device)
    estimate = filter.estimate(observe(filter, predicted, obs)[0])
    width = module.memory.sequences()[0].states.shape[1]
    if estimate.shape != (1, width) or not bool(estimate.isfinite().all()):
        raise ValueError(f"the first estimate must be {width} finite numbers")


def load_own(module: FittedModel, path: Path, *, device: str | torch.device) -> Trained:
    """A checkpoint that a run of ``module`` has written, trusted as the module is if it names the same net and encoders."""
    stored = read_checkpoint(path)["hyper_parameters"]["config"]["model"]
    same = all(stored.get(key) == module.config["model"].get(key) for key in ("net", "encoding"))
    return load_filter(path, device=device, trust=module.trust and same)


def check_device(device: str | torch.device) -> None:
    """Raise a ValueError unless PyTorch has this device."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # no such word, or no driver
        raise ValueError(
            f"device={device}: PyTorch sees no such device on this machine (cpu is always there)"
        ) from error


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The contents of a checkpoint of this project (or ``example:NAME``), on the CPU; nothing in the file is executed.

    Raises:
        CheckpointError: no such file, damaged, of another project, or of a version that this one
            does not read.
    """
    file = checkpoint_file(path)
    if not file.is_file():
        raise CheckpointError(f"there is no checkpoint {path}")
    try:
        check_archive(file)
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        check_tensors(checkpoint, file.stat().st_size)
    except Exception as error:  # what comes out of a file that is no checkpoint is beyond listing
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
    """Raise a ValueError unless the entries that are read have the types that they are written with."""
    for name in ("kbf", "state_dict", "hyper_parameters"):
        if not isinstance(checkpoint[name], dict):
            raise ValueError(f"{name} is a {type(checkpoint[name]).__name__}, not a dict")
    about, config = checkpoint["kbf"], checkpoint["hyper_parameters"].get("config")
    check_plain({"config": config})
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError("there is no configuration of a model in it")
    for name, where, kind in (
        ("net", config["model"], dict),
        ("name", config["model"], str),
        ("recipe", config, dict),
    ):
        if name in where and not isinstance(where[name], kind):
            raise ValueError(
                f"the configuration's {name} is a {type(where[name]).__name__}, not a {kind.__name__}"
            )
    for name, where, kind in (
        ("data", config, dict),
        ("encoding", config["model"], dict),
        ("training", config["model"], dict),
    ):
        if where.get(name) is not None and not isinstance(where[name], kind):
            raise ValueError(
                f"the configuration's {name} is a {type(where[name]).__name__}, not a {kind.__name__}"
            )
    if config["model"].get("dtype") not in (None, "float32", "float64"):
        raise ValueError(
            f"model.dtype must be float32 or float64, got {config['model']['dtype']!r}"
        )
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
    """Where a checkpoint is: ``example:NAME`` is one that comes with kbf.

    Raises:
        CheckpointError: no example of this name.
    """
    name = str(path).removeprefix("example:")
    if name == str(path):
        return Path(path)
    shipped = {
        file.stem: file
        for file in sorted((Path(__file__).parents[1] / "checkpoints").glob("*.ckpt"))
    }
    if name not in shipped:
        raise CheckpointError(
            f"there is no {path}; kbf comes with {', '.join(f'example:{stem}' for stem in shipped) or 'none'}"
        )
    return shipped[name]


def check_version(path: str | os.PathLike[str], written: str) -> None:
    """Raise a CheckpointError if ``written``, the version that wrote a checkpoint, has a format that this one does not know."""
    there, here = (tuple(map(int, re.findall(r"\d+", each)[:2])) for each in (written, __version__))
    if len(there) < 2:
        raise CheckpointError(f"{path} does not say which version of kbf wrote it")
    if there > here:
        raise CheckpointError(
            f"{path} was written by kbf {written}, this is kbf {__version__}: pip install -U kbf"
        )
    if there < OLDEST:
        raise CheckpointError(
            f"{path} was written by kbf {written}, which kbf {__version__} no longer reads: train it again"
        )


def check_like(module: FittedModel, new: Recording, checkpoint: str | os.PathLike[str]) -> None:
    """Raise a ValueError unless a recording has the states, observations and controls of those that a filter was trained on."""
    old = module.memory.sequences()[0]
    for name, mine, theirs in (
        ("states", tuple(old.states.shape[1:]), tuple(new.states.shape[1:])),
        ("observations", tuple(module.observation or ()), tuple(new.obs.shape[1:])),
        ("controls", (control_width(old),), (control_width(new),)),
    ):
        if mine != theirs:
            raise ValueError(
                f"the data's {name} have the shape {theirs}, those that {checkpoint} was trained on {mine}"
            )
