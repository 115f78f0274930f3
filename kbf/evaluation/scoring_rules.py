"""Scores of predicted uncertainty: coverage, likelihood, CRPS, energy score, PIT.

Scores are those of the Gaussian N(m_t, C_t), averaged over steps; CRPS and energy score are in the
units of the states, lower is better (`scoringrules`). For a filter with a weighted sample the
energy score is that of the sample, which differs from the Gaussian's if the posterior has several
modes.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.evaluation.calibration import Calibration, chi_square, floor_of, floored, mahalanobis
from kbf.evaluation.metrics import nll
from kbf.filters.particle.resampling import multinomial

# Levels whose coverage is reported as a number.
COVERAGE_LEVELS = (0.5, 0.8, 0.9, 0.95)

# Levels of the calibration curve in the picture.
CURVE_LEVELS = tuple(k / 20 for k in range(1, 20))

# Samples drawn from each Gaussian for the energy score.
ENERGY_SCORE_DRAWS = 64

# The energy score is computed for this many steps at a time, as its samples are compared pair by
# pair.
STEPS_PER_BLOCK = 256


class Reliability(NamedTuple):
    """How well a filter's covariances describe its errors.

    Attributes:
        numbers: by name: ``coverage_50`` ..., ``crps`` (mean over components too),
            ``energy_score``, ``nll``.
        curve: the share of states within the regions of each level of `CURVE_LEVELS`.
        pit: ``m d``, the Gaussian's distribution function at the state, component by component:
            uniform if it is right.
    """

    numbers: dict[str, float]
    curve: list[float]
    pit: Tensor


def reliability(
    z: Float[Tensor, "m d"],
    mean: Float[Tensor, "m d"],
    C: Float[Tensor, "m d d"],
    calibration: Calibration | None = None,
    energies: Float[Tensor, " m"] | None = None,
) -> Reliability:
    """Score the predicted distributions of m states, in float64.

    Args:
        z: the states.
        mean: the estimates.
        C: the filter's own covariances.
        calibration: score its covariances and regions; None for C as it is (with the least floor,
        `kbf.evaluation.calibration.floor_of`: it
            may be singular) and the Gaussian's regions.
        energies: energy scores of the filter's own weighted sample, step by step, in place of the
            Gaussian's.
    """
    C = floored(C, floor_of(C)) if calibration is None else calibration.covariance(C)
    squared = mahalanobis(z, mean, C)

    def covered(level: float) -> float:
        radius2 = (
            chi_square(level, z.shape[-1]) if calibration is None else calibration.radius2(level)
        )
        return (squared <= radius2).double().mean().item()

    numbers = {f"coverage_{round(100 * level)}": covered(level) for level in COVERAGE_LEVELS}
    std = C.diagonal(dim1=-2, dim2=-1).sqrt()
    energy = energy_score(z, mean, C) if energies is None else energies.nanmean().item()
    numbers |= {"crps": crps(z, mean, std), "energy_score": energy, "nll": nll(z, mean, C).item()}
    return Reliability(
        numbers, [covered(level) for level in CURVE_LEVELS], torch.special.ndtr((z - mean) / std)
    )


def crps(z: Tensor, mean: Tensor, std: Tensor) -> float:
    """Mean continuous ranked probability score of N(mean, std^2), over steps and components."""
    import scoringrules

    return float(
        scoringrules.crps_normal(z.numpy(), mean.numpy(), std.numpy(), backend="numpy").mean()
    )


def energy_score(
    z: Float[Tensor, "m d"], mean: Float[Tensor, "m d"], C: Float[Tensor, "m d d"]
) -> float:
    """Mean energy score E ||X - z|| - E ||X - X'|| / 2 of X, X' ~ N(mean, C).

    Unbiased, by `ENERGY_SCORE_DRAWS` samples.
    """
    import scoringrules

    white = torch.randn(
        len(z),
        ENERGY_SCORE_DRAWS,
        z.shape[-1],
        dtype=z.dtype,
        generator=torch.Generator().manual_seed(0),
    )
    draws = mean[:, None] + white @ torch.linalg.cholesky(C).mT
    pairs = zip(z.split(STEPS_PER_BLOCK), draws.split(STEPS_PER_BLOCK), strict=True)
    scores = [
        scoringrules.es_ensemble(a.numpy(), b.numpy(), estimator="fair", backend="numpy")
        for a, b in pairs
    ]
    return torch.cat([torch.as_tensor(score) for score in scores]).mean().item()


def sample_energies(
    z: Float[Tensor, "b d"],
    points: Float[Tensor, "b n d"],
    weights: Float[Tensor, "b n"],
    generator: Generator | None = None,
) -> Float[Tensor, " b"]:
    """Energy scores of weighted samples, by `ENERGY_SCORE_DRAWS` draws from each (unbiased).

    NaN where z or the sum of weights is, and for weights that are all 0.
    """
    m, total = ENERGY_SCORE_DRAWS, weights.sum(-1)
    known = (total > 0) & (total < torch.inf)
    log_weights = torch.where(known[:, None], weights, 1).log()
    chosen = multinomial(log_weights, generator, draws=m)
    draws = points.gather(1, chosen[..., None].expand(-1, -1, points.shape[-1])).to(z) - z[:, None]
    apart = torch.cdist(draws, draws, compute_mode="donot_use_mm_for_euclid_dist").sum((1, 2)) / (
        m * (m - 1)
    )
    return torch.where(known, draws.norm(dim=-1).mean(1) - apart / 2, torch.nan)
