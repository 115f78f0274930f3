"""``kbf export``: writes one step of a trained filter as a program for other machines.

The program is compared with the filter before it is written.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kbf.commands.filter import same_file
from kbf.commands.support.console import console
from kbf.export.step import export
from kbf.fitted.checkpoint import Trained, load_filter


def run(config: dict[str, Any]) -> int:
    """Load, export and compare; returns the exit code.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ValueError: the filter cannot be exported.
    """
    if not isinstance(config["steps"], int) or config["steps"] < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {config['steps']!r}")
    trained, path = load_filter(config["checkpoint"], trust=config["trust"]), Path(config["out"])
    if same_file(config["checkpoint"], config["out"]):
        raise ValueError(f"out={path} would overwrite the checkpoint")
    states = undone(trained, "z", torch.cat([s.states for s in trained.module.memory.sequences()]))
    obs, controls = examples(trained, config["steps"])
    column_schema, stored = trained.module.column_schema(), trained.module.config
    with console.status(f"writing and comparing {path}"):
        difference = export(
            trained.filter,
            path,
            config["format"],
            obs,
            torch.where((std := states.std(0)) > 0, std, 1.0),
            controls=controls,
            calibration=trained.calibration,
            about={
                "model": stored["model"].get("name"),
                "data": (stored.get("data") or {}).get("name"),
                "format": config["format"],
                "states": column_schema.components("states"),
                "observations": column_schema.components("observations"),
                "controls": list(column_schema.controls),
                "column_schema": column_schema.to_dict(),
            },
        )
    message = (
        f"largest difference to the filter over {len(obs)} steps: {difference.estimate:.1e} "
        f"(estimates), {difference.covariance:.1e} (covariances), in standard deviations of the "
        "state"
    )
    if difference.own is not None:
        message += f"; to the filter as it is, in float32, {difference.own:.1e}"
    console.print(f"[bold]{path}[/], {path.name}.json: {message}", highlight=False, soft_wrap=True)
    return 0


def examples(trained: Trained, steps: int) -> tuple[Tensor, Tensor | None]:
    """Return observations ``T *x`` and controls on which program and filter are compared.

    They are those of the memory with noise; images are random.
    """
    generator = torch.Generator().manual_seed(0)
    sequence, shape, dtype = (
        trained.module.memory.sequences()[0],
        trained.module.observation or (),
        trained.module.input_dtype,
    )
    if len(shape) > 1:
        return torch.rand(steps, *shape, generator=generator, dtype=dtype), None
    rows = torch.arange(steps) % len(sequence.obs)
    obs = undone(trained, "x", sequence.obs.nan_to_num()[rows]).to(dtype)
    noise = (
        0.1 * obs.std(0, correction=0) * torch.randn(obs.shape, generator=generator, dtype=dtype)
    )
    controls = (
        None
        if sequence.controls is None
        else undone(trained, "u", sequence.controls[rows]).to(dtype)
    )
    return obs + noise, controls


def undone(trained: Trained, side: str, values: Tensor) -> Tensor:
    """Return states (z), observations (x) or controls (u) of the memory, in the data's units."""
    scaling = trained.module.scaling
    return (
        values
        if scaling is None
        else values * getattr(scaling, f"{side}_scale") + getattr(scaling, f"{side}_mean")
    )
