"""Baselines next to the model's scores: the NMSE of each column, and what limits the error."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from kbf.commands.support.console import print_notes, print_table
from kbf.commands.support.run_files import state_columns
from kbf.data.dataset import Data
from kbf.evaluation.metrics import nmse
from kbf.evaluation.score import Score
from kbf.filters.selection.auto import BASELINES
from kbf.filters.selection.cross_validation import significantly_better
from kbf.fitted.scores import baseline_estimates
from kbf.recording import observed

# NMSE from which a column counts as not predictable: a constant estimate has 1.
MIN_NMSE_UNPREDICTABLE = 0.95
# Share of test steps outside the range of the training states from which a note is printed.
MIN_SHARE_OUTSIDE = 0.05
# Blocks of the test part, and the level of the t test over them, in standard errors of a normal
# distribution: with ten blocks it is reached at two of them.
BLOCKS = 10
MIN_STD_ERRORS = 1.77
# Share of the squared error from which one column dominates ``test.mse``.
MIN_SHARE_DOMINANT = 0.9


def print_baselines(
    config: Mapping[str, Any],
    data: Data,
    result: Score,
    name: str,
    causes: Sequence[str] = (),
) -> dict[str, float]:
    """Print the NMSE of the model and of the baselines, and notes; return ``baseline.NAME.nmse``.

    The baselines are fitted to the training part. Images and missing observations have none.

    Args:
        config: of the run.
        data: training and test part.
        result: scores of the model.
        name: of the filter that was scored.
        causes: known problems of the data (`kbf.data.files.report.Report.causes`).
    """
    missing = bool(config["data"].get("allow_missing_sensors"))
    complete = all(bool(r.obs.isfinite().all()) for r in (*data.train, *data.test))
    states = torch.cat([r.states for r in data.test]).double()
    if data.train[0].obs.ndim != 2 or not (missing or complete) or not states.isfinite().any():
        return {}
    found = {name: nmse(torch.cat(result.estimates), states)}
    plain = baseline_estimates(
        data.train, data.test, without=found, seed=config["seed"], missing=missing
    )
    found |= {baseline: nmse(each, states) for baseline, each in plain.items()}
    names = state_columns(data) or [f"z_{k + 1}" for k in range(states.shape[1])]
    table = Table("NMSE of the test part", *map(escape, names), "all")
    for row, columns in found.items():
        table.add_row(
            row,
            *(
                "" if value != value else f"{value:.3g}"
                for value in [*columns.tolist(), columns.nanmean().item()]
            ),
        )
    print_table(table)
    train = torch.cat([r.states for r in data.train]).double()
    estimates = torch.cat(result.estimates)
    print_notes(baseline_notes(names, found, train, states, estimates, causes))
    print_notes(sensor_notes(names, data, estimates))
    return {
        f"baseline.{row}.nmse": columns.nanmean().item()
        for row, columns in found.items()
        if row in BASELINES
    }


def sensor_notes(names: list[str], data: Data, estimates: Float[Tensor, "m d"]) -> list[str]:
    """Return notes on states that a sensor itself reads with a smaller error than the estimate.

    The error is smaller by a t test at the level of `MIN_STD_ERRORS` standard errors, over `BLOCKS`
    blocks of the test part.

    Args:
        names: of the columns of the state.
        data: whose test part has observations ``T q``.
        estimates: of the test part.
    """
    x = torch.cat([observed(r) for r in data.test]).to(estimates)
    z = torch.cat([r.states for r in data.test]).to(estimates)
    schema = data.column_schema
    sensors = [f"x_{k + 1}" for k in range(x.shape[1])]
    if schema is not None and len(schema.components("observations")) == len(sensors):
        sensors = schema.components("observations")
    notes = []
    for k, name in enumerate(names):
        own = (estimates[:, k] - z[:, k]).square()
        each = (x - z[:, [k]]).square()
        means = each.nanmean(0).nan_to_num(torch.inf)
        best = int(means.argmin())
        gains = (own - each[:, best])[own.isfinite() & each[:, best].isfinite()]
        blocks = [part.mean() for part in gains.tensor_split(BLOCKS)]
        if len(gains) >= BLOCKS and significantly_better(torch.stack(blocks), MIN_STD_ERRORS):
            notes.append(
                f"the estimate of {name} is worse than the sensor itself: its RMSE is "
                f"{own.nanmean().sqrt():.3g}, that of {sensors[best]}, taken as it is, "
                f"{means[best].sqrt():.3g}"
            )
    return notes


def baseline_notes(
    names: list[str],
    found: Mapping[str, Float[Tensor, " d"]],
    train: Float[Tensor, "n d"],
    states: Float[Tensor, "m d"],
    estimates: Float[Tensor, "m d"],
    causes: Sequence[str] = (),
) -> list[str]:
    """Return notes on what limits the error of a model on the test part.

    Reported are columns that no estimator predicts, test states outside the range of the training
    states, a column that dominates the squared error, and a baseline with a smaller error.

    Args:
        names: of the columns.
        found: NMSE of each column by estimator; the first is the model.
        train: states of the training part.
        states: states of the test part.
        estimates: of the model on the test part.
        causes: known problems of the data, which explain an unpredictable column.
    """
    notes = []
    known = states.isfinite().all(-1)
    states, estimates = states[known], estimates[known]
    least = torch.stack(list(found.values())).amin(0).tolist()
    if unpredictable := [
        name for name, value in zip(names, least, strict=True) if value >= MIN_NMSE_UNPREDICTABLE
    ]:
        reason = "these observations do not determine it"
        if causes:
            reason = f"this may be the cause: {causes[0]}"
        notes.append(
            f"no estimator predicts {', '.join(unpredictable)} better than a constant: {reason}"
        )
    lowest, highest = train.amin(0), train.amax(0)
    outside = ((states < lowest) | (states > highest)).double().mean(0)
    limits = (each.tolist() for each in (outside, lowest, highest))
    for name, share, low, high in zip(names, *limits, strict=True):
        if share > MIN_SHARE_OUTSIDE:
            notes.append(
                f"{100 * share:.0f} % of the test steps leave the training region, in which "
                f"{name} is from {low:.4g} to {high:.4g}"
            )
    squared = (estimates - states).square().mean(0)
    shares = squared / squared.sum()
    k = int(shares.argmax())
    if len(names) > 1 and float(shares[k]) > MIN_SHARE_DOMINANT:
        notes.append(
            f"{100 * float(shares[k]):.0f} % of test.mse is the error of {names[k]}, in its unit: "
            "compare test.nmse"
        )
    model, *baselines = found
    best = min(baselines, key=lambda name: float(found[name].nanmean()), default=model)
    if float(found[best].nanmean()) < float(found[model].nanmean()):
        notes.append(f"{best} has a smaller error on this test part than {model}: model={best}")
    return notes
