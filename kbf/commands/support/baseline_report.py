"""What ``kbf train`` says beside a score: the plain estimators' errors column by column, and in words what the data forbids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from kbf.commands.support.console import columns_of, console
from kbf.commands.support.console_tables import print_wide
from kbf.data.dataset import Data
from kbf.evaluation.metrics import nmse
from kbf.evaluation.score import Score, score
from kbf.filters.selection.auto import PLAIN

NOTHING, OUTSIDE, RULES = 0.95, 0.05, 0.9
"""NMSE from which a column is as good as unknown; share of test steps outside of the training's range that is told; share of the
squared error from which one column rules it."""


def beside(config: Mapping[str, Any], data: Data, result: Score) -> dict[str, float]:
    """Print the table and the remarks; returns the plain estimators' NMSE as ``plain.NAME.nmse``.

    The estimators are fitted to the training part as it is. Nothing is said of images, nor where
    observations are missing.
    """
    train, test, silent = data.train, data.test, bool(config["data"].get("allow_missing_sensors"))
    if train[0].obs.ndim != 2 or not (
        silent or all(bool(s.obs.isfinite().all()) for s in (*train, *test))
    ):
        return {}
    states = torch.cat([s.states for s in test]).double()
    if not bool(states.isfinite().any()):
        return {}
    found = {config["model"]["name"]: nmse(torch.cat(result.estimates), states)}
    for name, make in PLAIN.items():
        if name in found:
            continue
        try:
            model: Any = make(config["seed"])
            model.allow_missing_sensors = silent
            estimates = score(model.fit(train), test, seed=config["seed"]).estimates
        except ValueError:  # too few steps
            continue
        found[name] = nmse(torch.cat(estimates), states)
    names = columns_of(data) or [f"z_{k + 1}" for k in range(states.shape[1])]
    table = Table("NMSE of the test part", *(escape(name) for name in names), "all")
    for name, columns in found.items():
        table.add_row(
            name, *(shown(value) for value in [*columns.tolist(), columns.nanmean().item()])
        )
    print_wide(table)
    for told in remarks(
        names,
        found,
        torch.cat([s.states for s in train]).double(),
        states,
        torch.cat(result.estimates),
    ):
        console.print(f"[yellow]{escape(told)}[/]", highlight=False)
    return {
        f"plain.{name}.nmse": columns.nanmean().item()
        for name, columns in found.items()
        if name in PLAIN
    }


def shown(value: float) -> str:
    """An NMSE as text; empty for a column that never varies."""
    return f"{value:.3f}" if value == value else ""


def remarks(
    names: list[str],
    found: Mapping[str, Float[Tensor, " d"]],
    train: Float[Tensor, "n d"],
    states: Float[Tensor, "m d"],
    estimates: Float[Tensor, "m d"],
) -> list[str]:
    """In words: columns that nobody can tell, states outside of the training's range, a column that rules the error, a better one.

    Args:
        names: of the columns. found: NMSE of each column, by estimator, that of the model first.
        train, states: the states of the training and of the test part. estimates: of the model.
    """
    told = []
    known = states.isfinite().all(-1)
    states, estimates = states[known], estimates[known]
    least = torch.stack(list(found.values())).amin(0)
    if unknown := [
        name for name, value in zip(names, least.tolist(), strict=True) if value >= NOTHING
    ]:
        told.append(
            f"no estimator tells {', '.join(unknown)} better than a constant: these observations do not say what it is"
        )
    beyond = ((states < train.amin(0)) | (states > train.amax(0))).double().mean(0)
    for name, share, low, high in zip(
        names, beyond.tolist(), train.amin(0).tolist(), train.amax(0).tolist(), strict=True
    ):
        if share > OUTSIDE:
            told.append(
                f"{100 * share:.0f} % of the test steps leave the training region, in which {name} is from {low:.4g} to {high:.4g}"
            )
    squared = (estimates - states).square().mean(0)
    share = squared / squared.sum()
    k = int(share.argmax())
    if len(names) > 1 and float(share[k]) > RULES:
        told.append(
            f"{100 * float(share[k]):.0f} % of test.mse is the error of {names[k]}, in its unit: compare test.nmse"
        )
    model, *others = found
    best = min(others, key=lambda name: float(found[name].nanmean()), default=model)
    if float(found[best].nanmean()) < float(found[model].nanmean()):
        told.append(f"{best} has a smaller error on this test part than {model}: model={best}")
    return told
