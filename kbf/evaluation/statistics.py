"""Means over seeds with their standard errors, and paired tests."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from kbf.evaluation.metrics import excess


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of the mean; the error of a single value is NaN.

    >>> mean_and_error([1.0, 2.0, 3.0])
    (2.0, 0.5773502691896257)
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def summary(errors: Sequence[float], floors: Sequence[float | None]) -> dict[str, float]:
    """Mean error and excess error, each with its standard error, given the floors."""
    mean, se = mean_and_error(errors)
    known = [f for f in floors if f is not None]
    if len(known) < len(errors):
        return {"mse": mean, "se": se, "excess": math.nan, "excess_se": math.nan}
    above, above_se = excess(
        torch.tensor(errors, dtype=torch.float64), torch.tensor(known, dtype=torch.float64)
    )
    return {"mse": mean, "se": se, "excess": float(above), "excess_se": float(above_se)}


def wilcoxon_pairs(errors: dict[str, dict[int, float]]) -> list[dict[str, Any]]:
    """Wilcoxon signed-rank test between every two models, over the seeds that both have.

    Args:
        errors: by model, by seed.

    Returns:
        Rows with the two models, the number of seeds, the mean difference first - second, and the
        two-sided p-value (NaN with fewer than two seeds, or when all differences are zero).

    References: Wilcoxon (1945); the test that Xu et al. (2022) quote.
    """
    from scipy.stats import wilcoxon  # here, because it takes half a second

    rows = []
    for a, b in itertools.combinations(errors, 2):
        seeds = sorted(errors[a].keys() & errors[b].keys())
        differences = [errors[a][s] - errors[b][s] for s in seeds]
        p = float(wilcoxon(differences).pvalue) if len(seeds) > 1 and any(differences) else math.nan  # pyright: ignore[reportAttributeAccessIssue]
        mean = sum(differences) / len(seeds) if seeds else math.nan
        rows.append(
            {"first": a, "second": b, "seeds": len(seeds), "mean_difference": mean, "p_value": p}
        )
    return rows
