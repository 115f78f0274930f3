"""Scores of a Gaussian filter on held-out blocks, for several factors of its covariances."""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.data.windows import held_out_blocks, take, whole_folds, without
from kbf.filters.gaussian.moments import innovation_log_density
from kbf.filters.gaussian.start import StartingFilter
from kbf.filters.gaussian.switching import SwitchingFilter
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.rollout import rollout_recordings
from kbf.recording import Recording
from kbf.runtime.errors import FitError

# Parts that the recordings are cut into.
FOLDS = 5
# Steps from which on the last part alone is held out; of fewer, `FOLDS_OF_FEW` parts are in turn.
MANY_STEPS = 3000
FOLDS_OF_FEW = (0, 2, 4)
# Factors of Q and R with which the kinds of maps are compared.
COARSE_FACTORS = ((1.0, 1.0), (64.0, 1.0))
# Kinds with this multiple of the least error on a part are not run on the others.
MAX_PART_RATIO = 1.5
# Shares of the time until a deadline after which no further kinds, and no further factors, are
# compared: the filter itself is still to be fitted. With 0.6 for kinds and no end for factors the
# filter was not ready in time on development systems with 10 and 20 components (seeds 4, 5 and 10,
# 1,000 rows, one minute). The last one is for kinds of data that are selected by a part of their
# steps: a fit to all of them takes longer.
MAX_SHARE_FOR_KINDS = 0.5
MAX_SHARE_FOR_FACTORS = 0.65
MAX_SHARE_OF_LARGE_DATA = 0.35
# First steps of a held-out block that do not count: the filter has not converged yet.
BURN_IN = 5
# Share of the mean variance that is added to each component in a log score: states may lie on a
# circle, where a covariance is nearly singular.
MIN_VARIANCE = 1e-6

# Recordings without a fold, to fit; and held-out blocks of the fold.
Part = tuple[list[Recording], list[Recording]]
# Of one regime, and of several.
Fitted = StartingFilter | SwitchingFilter


class Scored(NamedTuple):
    """Filters without each of p parts, and their errors ``p m`` with m pairs of factors."""

    filters: list[Fitted]
    errors: Tensor

    def better_than(self, other: "Scored") -> bool:
        """Whether the mean error, with the best factors, is smaller, over at least as many parts.

        Fewer parts are those of a comparison that was ended: they are not enough.
        """
        p = len(other.errors)
        mine, theirs = (each.errors[:p].mean(0).min() for each in (self, other))
        return len(self.errors) >= p and bool(mine < theirs)


def held_out_parts(recordings: list[Recording]) -> list[Part]:
    """Return the rest and the held-out blocks of each fold; folds without blocks are left out."""
    lengths = [len(s.states) for s in recordings]
    try:
        spans = whole_folds(lengths, FOLDS)
    except FitError:
        return []
    few = [k for k in FOLDS_OF_FEW if k < len(spans)] if sum(lengths) < MANY_STEPS else [-1]
    parts = [(without(recordings, spans[k]), take(recordings, spans[k])) for k in few]
    blocks = [(rest, held_out_blocks(held)) for rest, held in parts]
    return [(rest, held) for rest, held in blocks if rest and held]


def with_factors(filter: Fitted, factors: Float[Tensor, "*b 2"]) -> Fitted:
    """Return the filter with the covariances q Q of z and r R for each pair (q, r) of factors.

    Of several pairs, each is that of one recording of a batch.
    """
    if isinstance(filter, SwitchingFilter):
        return filter.each(lambda one: scaled_noise(one, factors))
    return scaled_noise(filter, factors)


def scaled_noise(filter: StartingFilter, factors: Float[Tensor, "*b 2"]) -> StartingFilter:
    """Return `with_factors` of the filter of one regime."""
    inner, d = filter.inner, filter.d
    q, r = (each[..., None, None].to(inner.model.Q) for each in factors.unbind(-1))
    Q = inner.model.Q.expand(*factors.shape[:-1], -1, -1).clone()
    Q[..., :d, :d] *= q
    changed = UnscentedKalmanFilter(
        inner.model._replace(Q=Q, R=r * inner.model.R),
        allow_missing_sensors=inner.allow_missing_sensors,
        controlled=inner.controlled,
    )
    return filter.with_inner(changed)


def raced(
    pairs: Sequence[tuple[int, ...]],
    run: Callable[[tuple[int, ...], int], tuple[Fitted, Tensor] | None],
    parts: int,
    best: Scored | None = None,
    until: float = math.inf,
) -> dict[tuple[int, ...], Scored]:
    """Return the scores of those kinds that come near the least error on each part.

    Args:
        pairs: of kinds of the maps.
        run: kinds and part -> the filter and its errors ``m``, None if there is no filter.
        parts: number of them.
        best: scores that are compared with, too.
        until: a `time.perf_counter`, after which no further part is started, and on the first part
            no further pair once one has a result.
    """
    found: dict[tuple[int, ...], list[tuple[Fitted, Tensor]]] = {pair: [] for pair in pairs}
    for k in range(parts):
        if k > 0 and time.perf_counter() > until:
            break
        results: dict[tuple[int, ...], tuple[Fitted, Tensor] | None] = {}
        for pair in found:
            known = best is not None or any(results.values())
            if k > 0 or not known or time.perf_counter() <= until:
                results[pair] = run(pair, k)
        tried = {pair: result for pair, result in results.items() if result is not None}
        least = [float(errors.min()) for _, errors in tried.values()]
        least += [] if best is None else [float(best.errors[k].min())]
        found = {
            pair: [*found[pair], result]
            for pair, result in tried.items()
            if float(result[1].min()) <= MAX_PART_RATIO * min(least)
        }
    return {
        pair: Scored([filter for filter, _ in each], torch.stack([errors for _, errors in each]))
        for pair, each in found.items()
    }


def variance_of(parts: list[Part]) -> Float[Tensor, " d"]:
    """Return the variances of the held-out states."""
    return torch.cat([block.states for _, blocks in parts for block in blocks]).double().var(0)


def held_out_scores(
    filter: Fitted,
    part: Part,
    factors: Sequence[tuple[float, float]],
    scale: Float[Tensor, " d"],
) -> tuple[Float[Tensor, " m"], Float[Tensor, " m"]]:
    """Return scores over held-out steps for m pairs of factors of Q and R.

    All pairs are run as one batch.

    Args:
        filter: without the part.
        part: that is held out.
        factors: of Q and R.
        scale: variances of the state's components.

    Returns:
        The mean of log N(z; m, C), and the mean squared error of a component over its variance.
        -inf and inf where they are not finite.
    """
    blocks = part[1]
    rows = torch.tensor(factors, dtype=torch.float64).repeat_interleave(len(blocks), 0)
    runs = rollout_recordings(
        with_factors(filter, rows),
        blocks * len(factors),
        dtype=filter.states.dtype,
        covariances=True,
    )
    scores, squares = [], []
    for block, run in zip(blocks * len(factors), runs, strict=True):
        assert run.covariances is not None
        left = (block.states - run.estimates)[BURN_IN:].double()
        C = run.covariances[BURN_IN:].double()
        least = MIN_VARIANCE * C.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        scores.append(innovation_log_density(left, C + least * torch.eye(C.shape[-1]).to(C)))
        squares.append((left.square() / scale)[:, scale > 0].mean(-1))
    log, error = (
        torch.cat(each).unflatten(0, (len(factors), -1)).mean(1) for each in (scores, squares)
    )
    return (
        torch.where(log.isfinite(), log, -torch.inf),
        torch.where(error.isfinite(), error, torch.inf),
    )
