"""Calibrated uncertainty: recalibrated covariances and credible regions, samples and densities of a posterior.

Held-out steps test the covariances C_t of a filter: s_t = (z_t - m_t)^T (C_t + F)^-1 (z_t
- m_t), with F a small floor, should be d on average. `calibrate` keeps what they were; a
`Calibration` then corrects covariances, and gives regions that hold a stated share of the states,
however wrong the Gaussian may be.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kbf.filters.kernel.filter import KernelBayesFilter, KernelState
from kbf.rkhs.embeddings import Embedding
from kbf.rkhs.kernels import Kernel
from kbf.rkhs.linalg import cholesky, evenly

# Candidate floors, as shares of the mean variance of the estimates; a weighted sample on a single
# point has C_t = 0.
FLOOR_SHARES = (1e-3, 1e-2, 3e-2, 0.1, 0.3)
# The least bandwidth variance of a density estimate, as a share of the variance of the points.
LEAST_DENSITY_VARIANCE = 1e-4
# A calibration keeps at most this many scores.
MOST_SCORES = 512


class Calibration(NamedTuple):
    """Recalibration of a filter's covariances, learned from held-out steps of the training data.

    Attributes:
        scale: c, the factor that covariances are to be multiplied by.
        floor: ``d``, the diagonal of F, in the units of the states squared.
        scores: the squared distances s_t in ascending order; of more than `MOST_SCORES`, evenly
            spaced ones.
        steps: how many they are of.

    References: Vovk, Gammerman and Shafer (2005) for regions by the ranks of scores (conformal
    prediction).
    """

    scale: Tensor
    floor: Tensor
    scores: Tensor
    steps: Tensor

    def covariance(self, C: Float[Tensor, "*b d d"]) -> Float[Tensor, "*b d d"]:
        """The covariance c (C + F), positive definite."""
        return self.scale.to(C) * floored(C, self.floor)

    def score(
        self, z: Float[Tensor, "*b d"], mean: Float[Tensor, "*b d"], C: Float[Tensor, "*b d d"]
    ) -> Float[Tensor, "*b"]:
        """s = (z - mean)^T (C + F)^-1 (z - mean)."""
        return mahalanobis(z, mean, floored(C, self.floor))

    def quantile(self, level: float) -> Tensor:
        """The score that ``level`` of the steps do not exceed: the ceil((steps + 1) level)-th smallest.

        A new step, exchangeable with the held-out ones, has a score up to it with a probability of
        at least ``level``. Where so few steps cannot tell (level above steps / (steps + 1)) it is
        the largest score or the Gaussian's quantile, the larger.

        Raises:
            ValueError: a level that is not between 0 and 1.
        """
        if not 0 < level < 1:
            raise ValueError(f"a region's level must be between 0 and 1, got {level}")
        steps = int(self.steps)
        rank = math.ceil((steps + 1) * level - 1e-9)
        if rank > steps:
            return torch.maximum(self.scores[-1], self.scale * chi_square(level, len(self.floor)))
        ranks = evenly(steps, len(self.scores), self.scores.device) + 1
        return self.scores[int(torch.searchsorted(ranks, rank))]

    def radius2(self, level: float) -> Tensor:
        """Squared radius of the region {z: (z - mean)^T covariance(C)^-1 (z - mean) <= radius2} that holds ``level``."""
        return self.quantile(level) / self.scale

    def contains(
        self,
        z: Float[Tensor, "*b d"],
        mean: Float[Tensor, "*b d"],
        C: Float[Tensor, "*b d d"],
        level: float,
    ) -> Bool[Tensor, "*b"]:
        """Whether z is in the region of this level around an estimate with the filter's own covariance C."""
        return self.score(z, mean, C) <= self.quantile(level).to(C)

    @staticmethod
    def read(
        stored: dict[str, Tensor] | None, device: torch.device | str = "cpu"
    ) -> Calibration | None:
        """The calibration of a checkpoint, from its ``_asdict()``; None if it has none."""
        return (
            None
            if stored is None
            else Calibration(**{name: leaf.to(device) for name, leaf in stored.items()})
        )


def calibrate(
    states: Float[Tensor, "m d"], means: Float[Tensor, "m d"], covariances: Float[Tensor, "m d d"]
) -> Calibration:
    """Learn from held-out steps: c and F are those of the largest likelihood of the states under N(m_t, c (C_t + F)).

    F is one of `FLOOR_SHARES` of the covariances' mean diagonal. Each has its best scale in closed
    form, c = mean(s) / d.

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
    best: tuple[float, Calibration] | None = None
    for share in FLOOR_SHARES:
        floor = floor_of(covariances, share)
        C = floored(covariances, floor)
        scores = mahalanobis(states, means, C)
        scale = (scores.mean() / d).clamp_min(torch.finfo(C.dtype).tiny)
        loss = d * scale.log().item() + torch.logdet(C).mean().item()
        if best is None or loss < best[0]:
            best = (
                loss,
                Calibration(
                    scale, floor, scores.sort().values[evenly(m, MOST_SCORES)], torch.tensor(m)
                ),
            )
    assert best is not None
    return best[1]


def floor_of(C: Float[Tensor, "m d d"], share: float = FLOOR_SHARES[0]) -> Float[Tensor, " d"]:
    """F: a share of the mean variance of each component; for one of variance 0, of the mean over all components."""
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
    """The quantile of the chi-square distribution with d degrees of freedom: the squared radius of a Gaussian's region.

    >>> round(chi_square(0.95, 2), 3)
    5.991
    """
    from scipy.special import gammaincinv

    return 2 * float(gammaincinv(d / 2, level))


def posterior(filter: KernelBayesFilter, state: KernelState) -> Embedding:
    """The weighted sample of a kernel filter's state, a batch of embeddings over the memory points."""
    return Embedding(filter.states, state.weights)


def herd(
    filter: KernelBayesFilter, state: KernelState, m: int, kernel: Kernel
) -> Float[Tensor, "b m d"]:
    """``m`` samples of the state by kernel herding (`kbf.rkhs.embeddings.Embedding.herd`), deterministic."""
    return posterior(filter, state).herd(kernel, m)


def log_density(embedding: Embedding, z: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
    """log p(z) by a kernel density estimate over the weighted points: sum_i v_i N(z; z_i, H).

    Negative weights are cut and the rest normalised, v. H = e^(-2/(d+4)) C is Scott's rule, with C
    the weighted covariance and e the effective sample size, 1 / sum v^2; `LEAST_DENSITY_VARIANCE`
    of the points' mean variance is added, so that a single point is no spike.

    Raises:
        ValueError: a batch member without a positive weight.

    References: Scott (1992), equation 6.42.
    """
    v = embedding.weights.clamp_min(0)
    if not (v.sum(-1) > 0).all():
        raise ValueError("an embedding without positive weights has no density")
    points, d = embedding.points, embedding.points.shape[-1]
    cut = Embedding(points, v).normalised()
    H = cut.ess[..., None, None] ** (-2 / (d + 4)) * cut.cov()
    factor = cholesky(floored(H, LEAST_DENSITY_VARIANCE * points.var(0).mean().expand(d)))
    white_z = torch.linalg.solve_triangular(factor, z.mT, upper=False).mT
    white_points = torch.linalg.solve_triangular(
        factor, points.mT.expand(*H.shape[:-2], d, -1), upper=False
    ).mT
    exponents = (
        -0.5
        * torch.cdist(white_z, white_points, compute_mode="donot_use_mm_for_euclid_dist").square()
    )
    log_det = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)[..., None]
    terms = exponents + cut.weights.log()[..., None, :]
    return terms.logsumexp(-1) - log_det - 0.5 * d * math.log(2 * math.pi)


def density_level(
    embedding: Embedding, kernel: Kernel, level: float, m: int = 200
) -> Float[Tensor, "*b"]:
    """The log density c of the highest-density region {z: log p(z) >= c}, which holds ``level`` of ``m`` herded samples."""
    if not 0 < level < 1:
        raise ValueError(f"a region's level must be between 0 and 1, got {level}")
    return log_density(embedding, embedding.herd(kernel, m)).quantile(1 - level, dim=-1)
