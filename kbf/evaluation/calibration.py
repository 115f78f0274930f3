"""Calibrated uncertainty: recalibrated covariances and credible regions.

Held-out steps test the covariances C_t of a filter: the squared distance

    s_t = (z_t - m_t)^T (C_t + F)^-1 (z_t - m_t),

with a small diagonal F, should be d on average. `calibrate` keeps these distances; a `Calibration`
corrects covariances and returns regions that contain a stated share of the states, whether or not
the posterior is Gaussian.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kbf.filters.protocols import Filter, covariance_of
from kbf.rkhs.linalg import cholesky, evenly, varying

# Candidate floors, as shares of the mean variance of the estimates; a weighted sample on a single
# point has C_t = 0.
FLOOR_SHARES = (1e-3, 1e-2, 3e-2, 0.1, 0.3)
# Standard deviation of a component that never varies, as a share of its value, or of the deviations
# of the others where that is larger.
STILL_SHARE = 1e-6
# A calibration keeps at most this many scores.
MOST_SCORES = 512


@lru_cache(maxsize=64)
def rank_of(level: float, steps: int, kept: int) -> int | None:
    """As `Calibration.rank`, of ``kept`` scores; each step of a running filter asks for it."""
    rank = math.ceil((steps + 1) * level - 1e-9)
    return None if rank > steps else int(torch.searchsorted(evenly(steps, kept) + 1, rank))


class Calibration(NamedTuple):
    """Recalibration of a filter's covariances, learned from held-out steps of the training data.

    Attributes:
        scale: c, the factor that covariances are to be multiplied by.
        floor: ``d``, the diagonal of F, in the units of the states squared.
        scores: the squared distances s_t in ascending order; of more than `MOST_SCORES`, evenly
            spaced ones.
        steps: how many they are of.
        column_scores: ``MOST_SCORES c``, for each column of the states the absolute errors divided
            by their recalibrated standard deviations, in ascending order; None in checkpoints of
            earlier versions. A joint region is too wide for a single column.

    References: Vovk, Gammerman and Shafer (2005) for regions by the ranks of scores (conformal
    prediction).
    """

    scale: Tensor
    floor: Tensor
    scores: Tensor
    steps: Tensor
    column_scores: Tensor | None = None

    def covariance(self, C: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        """The covariance c (C + F), positive definite."""
        return self.scale.to(C) * floored(C, self.floor)

    def score(
        self, z: Float[Tensor, "*b d"], mean: Float[Tensor, "*b d"], C: Float[Tensor, "*b d d"]
    ) -> Float[Tensor, "*b"]:
        """s = (z - mean)^T (C + F)^-1 (z - mean)."""
        return mahalanobis(z, mean, floored(C, self.floor))

    def quantile(self, level: float) -> Tensor:
        """The ceil((steps + 1) level)-th smallest score: ``level`` of the steps do not exceed it.

        A new step, exchangeable with the held-out ones, has a score up to it with a probability of
        at least ``level``. For a level above steps / (steps + 1) it is the largest score or the
        Gaussian's quantile, whichever is larger.

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        rank = self.rank(level)
        if rank is None:
            gaussian = self.scale * chi_square(level, len(self.floor))
            return torch.maximum(self.scores[-1], gaussian)
        return self.scores[rank]

    def column_quantile(self, level: float) -> Float[Tensor, " c"] | None:
        """The factors of the standard deviations in intervals of this level, one for each column.

        As `quantile`, for the errors of single columns; None without `column_scores`.
        """
        rank, scores = self.rank(level), self.column_scores
        if scores is None:
            return None
        if rank is None:
            return scores[-1].clamp_min(math.sqrt(chi_square(level, 1)))
        return scores[rank]

    def rank(self, level: float) -> int | None:
        """Index of the score of rank ceil((steps + 1) level); None where there are fewer steps.

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"a region's level must be between 0 and 1, got {level}")
        return rank_of(level, int(self.steps), len(self.scores))

    def radius2(self, level: float) -> Tensor:
        """Squared radius of the region {z: (z - m)^T covariance(C)^-1 (z - m) <= radius2}.

        It contains the state with probability ``level``.
        """
        return self.quantile(level) / self.scale

    def contains(
        self,
        z: Float[Tensor, "*b d"],
        mean: Float[Tensor, "*b d"],
        C: Float[Tensor, "*b d d"],
        level: float,
    ) -> Bool[Tensor, "*b"]:
        """Whether z is in the region of this level around an estimate with covariance C."""
        return self.score(z, mean, C) <= self.quantile(level).to(C)

    @staticmethod
    def read(
        stored: dict[str, Tensor] | None, device: torch.device | str = "cpu"
    ) -> Calibration | None:
        """The calibration of a checkpoint, from its ``_asdict()``; None if it has none."""
        return (
            None
            if stored is None
            else Calibration(
                **{name: leaf.to(device) for name, leaf in stored.items() if leaf is not None}
            )
        )


class ForecastCalibration(NamedTuple):
    """Calibrations of forecasts some steps ahead, learned from the same held-out origins.

    Attributes:
        horizons: ``k``, the numbers of steps ahead, ascending.
        stacked: a `Calibration` whose fields have ``k`` in front.
    """

    horizons: Tensor
    stacked: Calibration

    def at(self, horizon: int) -> Calibration:
        """The calibration of forecasts ``horizon`` steps ahead.

        Between two learned horizons a < h < b it is w of that of b and 1 - w of that of a, with
        w = log(h / a) / log(b / a): its scale, its floor, and each of its sorted scores. Beyond the
        last horizon it is that of the last.
        """
        log = self.horizons.double().log()
        at = math.log(max(horizon, int(self.horizons[0])))
        upper = int(torch.searchsorted(log, at).clamp_max(len(log) - 1))
        lower = max(upper - 1, 0)
        w = 1.0
        if upper > lower:
            w = min(1.0, (at - float(log[lower])) / float(log[upper] - log[lower]))
        steps = self.stacked.steps[upper]
        leaves = (
            None if leaf is None else torch.lerp(leaf[lower].double(), leaf[upper].double(), w)
            for leaf in self.stacked
        )
        return Calibration(*leaves)._replace(steps=steps)  # pyright: ignore[reportArgumentType]

    def stored(self) -> dict[str, Tensor]:
        """Return the tensors by name, as `read` takes them."""
        leaves = {name: leaf for name, leaf in self.stacked._asdict().items() if leaf is not None}
        return {"horizons": self.horizons, **leaves}

    @staticmethod
    def read(
        stored: dict[str, Tensor] | None, device: torch.device | str = "cpu"
    ) -> ForecastCalibration | None:
        """The calibrations of a checkpoint, from `stored`; None if it has none."""
        if stored is None:
            return None
        leaves = {name: leaf.to(device) for name, leaf in stored.items()}
        return ForecastCalibration(leaves.pop("horizons"), Calibration(**leaves))

    @staticmethod
    def stack(calibrations: dict[int, Calibration]) -> ForecastCalibration:
        """Return calibrations by their horizons, which are of equal numbers of steps, as one."""
        leaves = (
            None if leaf[0] is None else torch.stack([part for part in leaf if part is not None])
            for leaf in zip(*calibrations.values(), strict=True)
        )
        return ForecastCalibration(
            torch.tensor(list(calibrations)),
            Calibration(*leaves),  # pyright: ignore[reportArgumentType]
        )


class HeldOut(NamedTuple):
    """Scores of each column of the states on held-out steps, ``c``.

    Attributes:
        rmse: root of the mean squared error, in the unit of the column.
        nmse: mean squared error over the variance of the column.
        coverage: share of the states in intervals of 95 %, whose widths are calibrated on the
            other folds; NaN for filters without covariances.
    """

    rmse: Tensor
    nmse: Tensor
    coverage: Tensor

    @staticmethod
    def read(stored: dict[str, Tensor] | None) -> HeldOut | None:
        """The scores of a checkpoint, from their ``_asdict()``; None if it has none."""
        return None if stored is None else HeldOut(**stored)


def calibrate(
    states: Float[Tensor, "m d"], means: Float[Tensor, "m d"], covariances: Float[Tensor, "m d d"]
) -> Calibration:
    """Fit c and F to held-out steps by the likelihood of the states under N(m_t, c (C_t + F)).

    F is one of `FLOOR_SHARES` of the covariances' mean diagonal. Each has its best scale in closed
    form, c = mean(s) / d. Components that never vary are left out: their floor is tiny, and they do
    not count in d.

    Args:
        states: z_t.
        means: estimates of a filter that has not learned from these steps.
        covariances: of these estimates.

    Raises:
        ValueError: fewer than two steps, or values that are not finite.
    """
    m, d = states.shape
    if m < 2:
        raise ValueError(f"a calibration needs at least two held-out steps, got {m}")
    finite = torch.cat([states, means, covariances.flatten(1)], 1).isfinite().all(1)
    if not finite.all():
        raise ValueError(
            f"{int((~finite).sum())} of {m} held-out steps hold NaN or infinite values"
        )
    fits: list[tuple[float, Calibration]] = []
    varies = varying(states)
    still = torch.maximum(means.abs().mean(0), states[:, varies].std(0).square().mean().sqrt())
    d = max(1, int(varies.sum()))
    for share in FLOOR_SHARES:
        floor = floor_of(covariances, share)
        floor = (
            torch.where(varies, floor, (STILL_SHARE * still).square()) if varies.any() else floor
        )
        C = floored(covariances, floor)
        scores = mahalanobis(states, means, C)
        scale = (scores.mean() / d).clamp_min(torch.finfo(C.dtype).tiny)
        loss = d * scale.log().item() + torch.logdet(C).mean().item()
        kept = sorted_scores(scores[:, None])[:, 0]
        fits.append((loss, Calibration(scale, floor, kept, torch.tensor(m))))
    return min(fits, key=lambda fit: fit[0])[1]


def no_covariances(means: Float[Tensor, "*m d"]) -> Float[Tensor, "*m d d"]:
    """Return zeros, the covariances of a filter without any, which `calibrate_constant` fits."""
    return means.new_zeros(*means.shape, means.shape[-1])


def calibrate_constant(
    states: Float[Tensor, "m d"], means: Float[Tensor, "m d"]
) -> tuple[Calibration, Float[Tensor, "m d d"]]:
    """Fit the covariance of the errors of a filter that has none, the same at all steps.

    F is the mean square of each component's errors in addition to that of `calibrate`, so that
    `Calibration.covariance` of C = 0 is this covariance.

    Returns:
        The calibration, and the covariances that it scores: zeros.

    Raises:
        ValueError: as `calibrate`.
    """
    square = (states - means).square().mean(0)
    found = calibrate(states, means, square.diag().expand(len(states), -1, -1))
    return found._replace(floor=found.floor + square), no_covariances(means)


def calibrated_covariance(
    filter: Filter[Any], state: Any, calibration: Calibration | None
) -> Float[Tensor, "b d d"] | None:
    """The recalibrated covariances of a filter's estimates.

    Of a filter without covariances they are those of its held-out errors (`calibrate_constant`);
    None without a calibration.
    """
    C = covariance_of(filter, state)
    if calibration is None:
        return C
    return calibration.covariance(no_covariances(filter.estimate(state)) if C is None else C)


def sorted_scores(errors: Float[Tensor, "m c"]) -> Float[Tensor, "s c"]:
    """The errors of each column in ascending order, at most `MOST_SCORES` evenly spaced ones."""
    return errors.sort(dim=0).values[evenly(len(errors), MOST_SCORES)]


def floor_of(C: Float[Tensor, "m d d"], share: float = FLOOR_SHARES[0]) -> Float[Tensor, " d"]:
    """F, a share of the mean variance of each component.

    For a component of variance 0 it is a share of the mean over all components.
    """
    mean = C.diagonal(dim1=-2, dim2=-1).mean(0)
    return share * torch.where(mean > 0, mean, mean.mean()).clamp_min(torch.finfo(C.dtype).tiny)


def floored(C: Float[Tensor, "*b d d"], floor: Float[Tensor, " d"]) -> Float[Tensor, "*b d d"]:
    """C + diag(F)."""
    return C + floor.to(C).diag()


def mahalanobis(
    z: Float[Tensor, "*b d"], mean: Float[Tensor, "*b d"], C: Float[Tensor, "*b d d"]
) -> Float[Tensor, "*b"]:
    """The squared Mahalanobis distance (z - mean)^T C^-1 (z - mean)."""
    white = torch.linalg.solve_triangular(cholesky(C), (z - mean)[..., None], upper=False)
    return white[..., 0].square().sum(-1)


def chi_square(level: float, d: int) -> float:
    """Quantile of the chi-square distribution with d degrees of freedom.

    It is the squared radius of a Gaussian's credible region.

    >>> round(chi_square(0.95, 2), 3)
    5.991
    """
    from scipy.special import gammaincinv

    return 2 * float(gammaincinv(d / 2, level))
