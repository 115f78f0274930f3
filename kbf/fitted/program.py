"""One step of a trained filter as a program for other machines, or compiled for this one."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kbf.data.files.layout import codes_by_column
from kbf.export.step import Exported, export
from kbf.filters.compile import CompiledStep, compile_step
from kbf.fitted.checkpoint import Trained
from kbf.rkhs.linalg import evenly

# Formats by the ending of the file.
FORMATS = {".onnx": "onnx", ".pt2": "torch_export", ".pt": "torchscript"}


def export_step(
    trained: Trained, path: str | os.PathLike[str], format: str | None = None, *, steps: int = 50
) -> Exported:
    """Write one step of a trained filter as a program for other machines.

    Args:
        trained: the filter, with its calibration.
        path: of the program; the description is written to ``PATH.json``.
        format: onnx, torch_export or torchscript; None takes that of the ending of the file
            (`FORMATS`).
        steps: on which program and filter are compared.

    Returns:
        The largest differences to the filter, in standard deviations of the state.

    Raises:
        ValueError: an unknown ending or format, or a filter that cannot be exported.
    """
    target = Path(path)
    if format is None and target.suffix not in FORMATS:
        raise ValueError(
            f"{target}: the ending must be one of {', '.join(FORMATS)}, or format= names the format"
        )
    chosen = FORMATS[target.suffix] if format is None else format
    module, schema = trained.module, trained.module.column_schema()
    states = undone(trained, "z", torch.cat([s.states for s in module.memory.recordings()]))
    obs, controls = examples(trained, steps)
    about = for_users(trained)
    duration = ["seconds of the move"] if about["time_as_control"] else []
    return export(
        trained.filter,
        target,
        chosen,
        obs,
        torch.where((std := states.std(0)) > 0, std, 1.0),
        controls=controls,
        calibration=trained.calibration,
        about={
            "model": module.config["model"].get("name"),
            "data": (module.config.get("data") or {}).get("name"),
            "format": chosen,
            "states": schema.components("states"),
            "observations": schema.components("observations"),
            "controls": [*schema.controls, *duration],
            "column_schema": schema.to_dict(),
            **about,
        },
    )


def for_users(trained: Trained) -> dict[str, Any]:
    """Return what `kbf.load_onnx` requires for the columns of a program.

    The time step, whether durations are controls, bounds, latencies, codes of missing values and,
    for intervals, the held-out errors of columns in standard deviations with their ranks
    (`Calibration.column_quantile`).
    """
    data = trained.module.config.get("data") or {}
    schema, known = trained.module.column_schema(), trained.calibration
    names, acted = schema.columns("observations"), list(schema.controls)
    intervals = None
    if known is not None and known.column_scores is not None:
        steps = int(known.steps)
        ranks = evenly(steps, len(known.column_scores)) + 1
        scores = known.column_scores.tolist()
        intervals = {"steps": steps, "ranks": ranks.tolist(), "scores": scores}
    return {
        "time_step": data.get("time_step"),
        "time_as_control": bool(data.get("time_as_control")),
        "bounds": data.get("bounds"),
        "latency": data.get("latency"),
        "missing": codes_by_column(data.get("missing"), names) if names else None,
        "missing_controls": codes_by_column(data.get("missing"), acted) if acted else None,
        "intervals": intervals,
    }


def compiled_step(trained: Trained) -> CompiledStep:
    """Return the compiled step of a filter, which its running filters can share.

    Raises:
        ValueError: as `compile_step`.
    """
    return compile_step(trained.filter, zero_observation(trained))


def zero_observation(trained: Trained) -> Tensor:
    """Return an observation ``1 *x`` of zeros, of the shape, type and device of a filter."""
    module = trained.module
    shape = (1, *(module.observation or ()))
    return torch.zeros(shape, dtype=module.input_dtype, device=module.device)


def examples(trained: Trained, steps: int) -> tuple[Tensor, Tensor | None]:
    """Return observations ``T *x`` and controls on which program and filter are compared.

    They are those of the memory with noise; images are random.
    """
    generator = torch.Generator().manual_seed(0)
    recording, shape, dtype = (
        trained.module.memory.recordings()[0],
        trained.module.observation or (),
        trained.module.input_dtype,
    )
    if len(shape) > 1:
        return torch.rand(steps, *shape, generator=generator, dtype=dtype), None
    rows = torch.arange(steps) % len(recording.obs)
    obs = undone(trained, "x", recording.obs.nan_to_num()[rows]).to(dtype)
    noise = (
        0.1 * obs.std(0, correction=0) * torch.randn(obs.shape, generator=generator, dtype=dtype)
    )
    controls = (
        None
        if recording.controls is None
        else undone(trained, "u", recording.controls[rows]).to(dtype)
    )
    return obs + noise, controls


def undone(trained: Trained, side: str, values: Tensor) -> Tensor:
    """Return states (z), observations (x) or controls (u) of the memory, in the data's units."""
    scaling = trained.module.scaling
    return values if scaling is None else scaling.unscaled(side, values)
