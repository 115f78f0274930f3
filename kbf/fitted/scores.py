"""Scores of a fitted filter on recordings with known states, column by column."""

import math
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.data.files.layout import Observations
from kbf.evaluation.score import score
from kbf.filters.selection.auto import BASELINES
from kbf.fitted.checkpoint import Trained
from kbf.fitted.estimates import Estimates
from kbf.fitted.runs import as_recording
from kbf.recording import Recording
from kbf.runtime.errors import FitError


def column_scores(
    estimates: Estimates, states: Tensor, schema: ColumnSchema
) -> dict[str, list[float]]:
    """Return the scores of estimates by name, one number for each part of the state.

    ``rmse``: in the unit of the column. ``nmse``: mean squared error over the variance of the
    states. Both are of estimates within their bounds. ``coverage_95``: share of the states in
    intervals of 95 %. ``crps``: mean continuous ranked probability score of the Gaussian with the
    estimate's standard deviation. The last two are missing for filters without covariances, and NaN
    for rotations. All are NaN where no state is known.

    Args:
        estimates: of T rows.
        states: ``T d`` in the components that filters use; NaN where unknown.
        schema: the columns.
    """
    known = states.isfinite().all(1)
    if not known.any():
        names = ("rmse", "nmse", "coverage_95", "crps")
        unknown = [math.nan] * len(schema.states)
        return dict.fromkeys(names if estimates.std is not None else names[:2], unknown)
    means = estimates.result.means
    if estimates.bounds:
        means = schema.encode(torch.from_numpy(estimates.mean))
    errors, rmse, nmse = schema.scores(states[known], means[known])
    found = {"rmse": rmse.tolist(), "nmse": nmse.tolist()}
    if estimates.std is None:
        return found
    first = [estimates.columns.index(part.names[0]) for part in schema.states]
    std = torch.from_numpy(estimates.std)[known][:, first]
    half = torch.from_numpy(estimates.half_width(0.95))[known][:, first]
    single = torch.tensor([len(part.names) == 1 for part in schema.states])
    inside = (errors.abs() <= half).double().mean(0)
    return found | {
        "coverage_95": torch.where(single, inside, torch.nan).tolist(),
        "crps": torch.where(single, crps_of(errors, std).mean(0), torch.nan).tolist(),
    }


def forecast_nmse(
    ahead: Estimates, states: Tensor, rows: list[Tensor], horizon: int, schema: ColumnSchema
) -> dict[str, list[float]]:
    """Return the NMSE of forecasts as ``nmse_ahead_K``, of each step K up to the horizon.

    Args:
        ahead: of `FittedFilter.historical_forecasts`, from every row.
        states: ``T d`` in the components that filters use.
        rows: of each recording, the rows of ``states``.
        horizon: number of steps.
        schema: the columns.
    """
    origins = ahead.to_frame().index.to_frame(index=False)
    found = {}
    for k in range(1, horizon + 1):
        target = {
            int(a): int(b)
            for each in rows
            for a, b in zip(each, each[k:], strict=False)
            if a >= 0 and b >= 0
        }
        aims = origins.origin.where(origins.step == k).map(target)
        at = aims.notna().to_numpy().nonzero()[0]
        z = states[torch.from_numpy(aims.iloc[at].to_numpy("int64"))]
        found[f"nmse_ahead_{k}"] = column_scores(ahead.rows(at), z, schema)["nmse"]
    return found


def crps_of(errors: Tensor, std: Tensor) -> Tensor:
    """Return the CRPS of N(m, std^2) at z for errors m - z."""
    import scoringrules

    values = scoringrules.crps_normal(
        torch.zeros_like(errors).numpy(), errors.numpy(), std.numpy(), backend="numpy"
    )
    return torch.from_numpy(values)


def baseline_nmse(
    trained: Trained, pieces: list[Observations], schema: ColumnSchema
) -> dict[str, list[float]]:
    """Return ``nmse_NAME`` of each part of the state, by baselines fitted to the filter's memory.

    The baselines are those of the model selection (`kbf.filters.selection.auto.BASELINES`). Filters
    of images have none.

    Args:
        trained: the filter. pieces: recordings with states. schema: the columns.
    """
    module, found = trained.module, {}
    memory = module.memory.recordings()
    if module.encoding is not None or memory[0].obs.ndim != 2:
        return {}
    recordings = [as_recording(piece) for piece in pieces]
    states = torch.cat([each.states for each in recordings]).double()
    known = states.isfinite().all(1)
    held = module.taken_in(recordings)
    missing = bool(getattr(module.net, "allow_missing_sensors", False))
    seed, dtype = module.config["seed"], module.model_dtype
    made = baseline_estimates(memory, held, seed=seed, missing=missing, dtype=dtype)
    for name, estimates in made.items():
        means = module.in_units_of_the_data(estimates)[known]
        found[f"nmse_{name}"] = schema.scores(states[known], means)[2].tolist()
    return found


def baseline_estimates(
    memory: list[Recording],
    recordings: list[Recording],
    *,
    without: Collection[str] = (),
    seed: int = 0,
    missing: bool = False,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    """Return the estimates ``t d`` of each of `BASELINES`, all recordings concatenated.

    A baseline is missing where the memory has too few steps for it.

    Args:
        memory: that the baselines are fitted to.
        recordings: that are filtered.
        without: names of baselines that are left out.
        seed: of the models. missing: whether sensors may be missing.
        dtype: as of `kbf.evaluation.score.score`.
    """
    found = {}
    for name in (each for each in BASELINES if each not in without):
        model: Any = BASELINES[name](seed)
        model.allow_missing_sensors = missing
        with suppress(FitError):
            model.prepare(memory)
            made = score(model.fit(memory), recordings, seed=seed, dtype=dtype).estimates
            found[name] = torch.cat(made).double()
    return found
