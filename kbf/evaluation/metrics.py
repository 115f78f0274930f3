"""Error metrics, each with its equation, and their means over seeds with paired tests.

A mask selects steps (None: all); padding may hold NaN.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributions import MultivariateNormal

from kbf.rkhs.linalg import cholesky, varying


def mse(
    estimates: Float[Tensor, "*b T d"],
    states: Float[Tensor, "*b T d"],
    mask: Bool[Tensor, "*b T"] | None = None,
) -> Float[Tensor, "*b"]:
    """Mean over time of ||z_hat_t - z_t||^2, summed over the d components."""
    return _over_time(_difference(estimates, states, mask).square().sum(-1), mask)


def nmse(estimates: Float[Tensor, "n d"], states: Float[Tensor, "n d"]) -> Float[Tensor, " d"]:
    """Mean squared error of each component over its variance; the best constant has 1.

    Steps with an unknown state (NaN) do not count; a component that never varies has no NMSE (NaN).

    >>> nmse(torch.tensor([[1.0], [1.0]]), torch.tensor([[0.0], [2.0]]))
    tensor([1.])
    """
    known = states.isfinite().all(-1)
    spread = states[known].var(0, correction=0)
    error = (estimates[known] - states[known]).square().mean(0)
    return torch.where(varying(states[known]), error / spread, torch.nan)


class Excess(NamedTuple):
    """The excess of an error over the floor, and its standard error."""

    value: Tensor
    stderr: Tensor


def excess(errors: Float[Tensor, " s"], floors: Float[Tensor, " s"]) -> Excess:
    """mean(errors) / mean(floors) - 1 over s seeds, both of a seed on the same recordings.

    The standard error is that of a ratio R of paired means by the delta method: that of the mean of
    e_i - R f_i, over mean(f). With a single seed it is NaN.

    Raises:
        ValueError: no seeds, or a mean floor that is not positive.

    >>> excess(torch.tensor([0.11, 0.23]), torch.tensor([0.1, 0.2])).value
    tensor(0.1333)
    """
    if len(errors) == 0 or not floors.mean() > 0:
        raise ValueError(
            f"excess needs at least one seed and a positive floor, got {len(errors)} "
            f"with mean {floors.mean().item()}"
        )
    ratio = errors.mean() / floors.mean()
    residual = errors - ratio * floors
    variance = (
        residual.square().sum() / (len(errors) - 1)
        if len(errors) > 1
        else residual.new_tensor(math.nan)
    )
    return Excess(ratio - 1, (variance / len(errors)).sqrt() / floors.mean())


def nll(
    states: Float[Tensor, "*b T d"],
    mean: Float[Tensor, "*b T d"],
    covariance: Float[Tensor, "*b T d d"],
    mask: Bool[Tensor, "*b T"] | None = None,
) -> Float[Tensor, "*b"]:
    """Mean over time of -log N(z_t; mean_t, covariance_t).

    Raises:
        NotPositiveDefiniteError: a covariance is singular.
    """
    apart = _difference(states, mean, mask)
    zero, factor = torch.zeros_like(apart), cholesky(covariance)
    normal = MultivariateNormal(zero, scale_tril=factor, validate_args=False)
    return -_over_time(normal.log_prob(apart), mask)


def _difference(a: Tensor, b: Tensor, mask: Tensor | None) -> Tensor:
    """The difference, zero where the mask is False: NaN in the padding affects no gradient."""
    return a - b if mask is None else torch.where(mask[..., None], a - b, torch.zeros_like(a))


def _over_time(values: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the last dimension, of the steps in the mask."""
    if mask is None:
        return values.mean(-1)
    return torch.where(mask, values, torch.zeros_like(values)).sum(-1) / mask.sum(-1)


def mean_and_error(values: Sequence[float], overlap: float = 0.0) -> tuple[float, float]:
    """Mean and standard error of the mean; the error of a single value is NaN.

    With the variance s^2 of the J values, the variance of the mean is (1/J + overlap) s^2. The
    values of runs whose training parts overlap are not independent; overlap = n_test / n_train
    corrects for it (Nadeau and Bengio, 2003, Inference for the generalization error). NaN, for
    runs on the same test part, has no error.

    >>> mean_and_error([1.0, 2.0, 3.0])
    (2.0, 0.5773502691896257)
    """
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, math.nan
    variance = sum((v - mean) ** 2 for v in values) / (len(values) - 1)
    if not overlap:
        return mean, math.sqrt(variance / len(values))
    return mean, math.sqrt(variance * (1 / len(values) + overlap))


def corrected_t(differences: Sequence[float], overlap: float) -> tuple[float, float, float]:
    """Mean of paired differences, its standard error, and the two-sided p-value of no difference.

    The corrected resampled t-test: t = mean / sqrt((1/J + n_test / n_train) s^2) with J - 1 degrees
    of freedom. The p-value is NaN with fewer than two differences, or when all are zero.

    Args:
        differences: in each of J folds. overlap: n_test / n_train.

    References: Nadeau and Bengio (2003), Inference for the generalization error.
    """
    from scipy.stats import t  # here, because it takes half a second

    mean, error = mean_and_error(differences, overlap)
    if math.isnan(error) or not any(differences):
        return mean, error, math.nan
    return mean, error, float(2 * t.sf(abs(mean) / error, len(differences) - 1)) if error else 0.0


def summary(
    errors: Sequence[float], floors: Sequence[float | None], overlap: float = 0.0
) -> dict[str, float]:
    """Mean error and excess error, each with its standard error, given the floors.

    Without all floors the excess is NaN. ``overlap``: see `mean_and_error`.
    """
    mean, se = mean_and_error(errors, overlap)
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


def corrected_pairs(errors: dict[str, dict[int, float]], overlap: float) -> list[dict[str, Any]]:
    """`corrected_t` between every two models, over the folds that both have.

    Args:
        errors: by model, by number of the run. overlap: n_test / n_train.

    Returns:
        Rows as of `wilcoxon_pairs`, and the standard error of the mean difference.
    """
    rows = []
    for a, b in itertools.combinations(errors, 2):
        both = sorted(errors[a].keys() & errors[b].keys())
        if not both:
            continue
        mean, se, p = corrected_t([errors[a][k] - errors[b][k] for k in both], overlap)
        pair = {"first": a, "second": b, "seeds": len(both), "mean_difference": mean, "p_value": p}
        rows.append(pair | {"difference_se": se})
    return rows
