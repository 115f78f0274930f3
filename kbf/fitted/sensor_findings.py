"""How sensors of recordings behave: constant, late, held, stuck, failing, drifting, their noise.

Recorded states are known, so that each property is read off the residuals of a regression of the
readings on the states (`kbf.filters.gaussian.sensor_laws`). A filter is not required. A property
is reported only if neither chance, nor a law of noise with heavy tails, nor an error of the
regression that depends on the place explains it.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kbf.densities.ridge import fit_ridge_map
from kbf.filters.gaussian.count_maps import with_stable_counts
from kbf.filters.gaussian.learned_maps import PRECISE, select_kernel
from kbf.filters.gaussian.leave_one_out import features_of, left_out
from kbf.filters.gaussian.map_sources import counts_in, rare_counts
from kbf.filters.gaussian.sensor_laws import (
    fit_mixture,
    fit_persistence,
    former,
    select_delays,
    working,
)
from kbf.filters.held import held_sensors, readings_before, without_repeats
from kbf.recording import Recording, observed


class Finding(NamedTuple):
    """A property of a component.

    Attributes:
        kind: of the property.
        column: the component, of the observations for sensors; -1 for the whole state.
        share: of the steps that have it; NaN where it holds in all.
        steps: that it lasts, or by which a sensor is late; NaN without.
        size: in the unit of the component; NaN without.
    """

    kind: str
    column: int
    share: float = math.nan
    steps: float = math.nan
    size: float = math.nan


# Periods in which a slow sensor is read.
PERIODS = range(2, 21)
# Share of the readings between two periods that must be repeats, and most of those at a period.
MIN_SHARE_OF_HELD = 0.99
MAX_SHARE_AT_PERIOD = 0.9
# Standard errors by which a failure must last, and by which an error must persist.
MIN_STD_ERRORS = 5.0
# Least number of failed readings.
MIN_FAILED = 8
# Share of failed readings that follow a failed one, at least.
MIN_SHARE_OF_PAIRS = 0.35
# Ratio of the share of failed readings among neighbours to that of all from which it is the place.
MAX_RATIO_OF_PLACE = 2.5
# Share of repeats among the failed readings of a sensor that sticks, and most among the others.
MIN_SHARE_OF_STUCK = 0.8
MAX_SHARE_OF_REPEATS = 0.6
# Rank correlation of the errors of two failed readings in turn from which they are a drift.
MAX_RANK_CORRELATION = 0.6
# Steps around failed readings that are left out where drifts are looked for.
STEPS_OF_FAILURE = 5
# Neighbours in space, and the steps by which they are apart in time, that show errors of the place.
NEIGHBOURS = 5
STEPS_APART = 30
# Distance of neighbours, in medians, from which a state has none.
MAX_DISTANCE = 4.0
# Least autocorrelation of errors that persist.
MIN_PERSISTENCE = 0.1
# Features of the precise maps.
RANK_OF_MAPS = 200
# Residuals that a property requires.
MIN_RESIDUALS = 100


def sensor_findings(recordings: list[Recording]) -> list[Finding]:
    """Return what is found in the observations ``T q`` of recordings with known states."""
    counts = counts_in(recordings)
    seen = [each._replace(obs=observed(each)) for each in recordings]
    stable = [with_stable_counts(each, counts) for each in seen]
    found, fresh = repeats(stable)
    delays = select_delays(fresh)
    found += [Finding("late", k, steps=float(delays[k])) for k in delays.nonzero()[:, 0].tolist()]
    suitable = ~rare_counts(seen, counts)
    _, kept = working(fresh, delays, suitable)
    lengths = [len(each.states) for each in recordings]
    x, all_x = (torch.cat([observed(s) for s in each]) for each in (kept, fresh))
    z = torch.cat([each.states for each in recordings])
    near, lonely = neighbours(z.double(), lengths)
    residuals = torch.full_like(x, torch.nan)
    for delay in delays.unique().tolist():
        past = torch.cat([former(each.states, delay) for each in recordings]).double()
        columns = (delays == delay).nonzero()[:, 0]
        used = x[:, columns].isfinite()
        residuals[:, columns] = left_out(features_of(past).to(x), all_x[:, columns], used)
    residuals[lonely] = torch.nan
    same = torch.cat([each.obs == readings_before(each.obs) for each in fresh])
    smoothed = x.isnan() & all_x.isfinite()
    named, bad = failures(residuals, all_x, near, same, smoothed, suitable)
    hidden = torch.stack([widened(each, STEPS_OF_FAILURE) for each in bad.mT], 1)
    inside = torch.where(hidden, torch.nan, residuals)
    return [*found, *named, *drifts(inside, all_x - residuals, lengths, near)]


def repeats(recordings: list[Recording]) -> tuple[list[Finding], list[Recording]]:
    """Return the sensors that are constant, held or stick, and the recordings without repeats."""
    held, found = torch.zeros(recordings[0].obs.shape[1], dtype=torch.bool), []
    stuck = held_sensors(recordings)
    for k in range(len(held)):
        columns = [each.obs[:, k] for each in recordings]
        same = [column[1:] == column[:-1] for column in columns]
        share = float(torch.cat(same).double().mean())
        readings = torch.cat([observed(each)[:, k] for each in recordings])
        if len(readings[readings.isfinite()].unique()) == 1:
            held[k] = True
            found.append(Finding("constant", k))
        elif period := period_of(same):
            held[k] = True
            found.append(Finding("held", k, share=share, steps=float(period)))
        elif bool(stuck[k]):
            held[k] = True
            runs = sum(int((each[1:] & ~each[:-1]).sum()) + int(each[:1].sum()) for each in same)
            gaps = torch.cat([intervals(each) for each in same])
            often = bool(gaps.median() > 1)
            steps = sum(int(each.sum()) for each in same) / max(1, runs)
            found.append(
                Finding("held", k, share=share, steps=float(gaps.median()))
                if often
                else Finding("sticking", k, share=share, steps=steps)
            )
    return found, [without_repeats(each, held) for each in recordings]


def intervals(same: Bool[Tensor, " t"]) -> Tensor:
    """Return the steps between readings that are no repeat."""
    return torch.cat([torch.zeros(1).long(), 1 + (~same).nonzero()[:, 0]]).diff()


def period_of(same: list[Bool[Tensor, " t"]]) -> int:
    """Return the period in which readings change, 0 for none.

    Readings between repeat the one before, and those at the period do so least often.
    """
    best, least = 0, MAX_SHARE_AT_PERIOD
    for period in PERIODS:
        long = [each for each in same if len(each) >= 2 * period]
        if not long:
            break
        steps = torch.cat([torch.arange(1, len(each) + 1) % period for each in long])
        values = torch.cat(long).double()
        for phase in range(period):
            between, at = values[steps != phase].mean(), values[steps == phase].mean()
            if between >= MIN_SHARE_OF_HELD and at < least:
                best, least = period, float(at)
    return best


def neighbours(z: Float[Tensor, "n d"], lengths: list[int]) -> tuple[Tensor, Bool[Tensor, " n"]]:
    """Return `NEIGHBOURS` nearest states ``n k`` of each, and which states have none near.

    Neighbours are `STEPS_APART` in time. Where there are none, maps have errors of their own.
    """
    white = (z - z.mean(0)) / z.std(0).clamp_min(1e-9)
    apart = torch.arange(len(z)) + torch.tensor(
        [STEPS_APART * k for k, length in enumerate(lengths) for _ in range(length)]
    )
    some = torch.arange(len(z))
    found, far = [], []
    for rows in some.split(500):
        distance = torch.cdist(white[rows], white)
        distance[(apart[rows, None] - apart).abs() < STEPS_APART] = torch.inf
        least, indices = distance.topk(min(NEIGHBOURS, len(z)), largest=False)
        found.append(indices)
        far.append(least.mean(1))
    distance = torch.cat(far)
    return torch.cat(found), distance > MAX_DISTANCE * distance.median()


def precise_errors(u: Float[Tensor, "n e"], y: Float[Tensor, "n q"]) -> Float[Tensor, "n q"]:
    """Return leave-one-out errors of y: of `features_of`, or of a kernel map where it is better.

    The kernel is the one of the change maps of `kbf.filters.gaussian.learned_maps`.
    """
    errors = left_out(features_of(u), y)
    white = (u - u.mean(0)) / u.std(0).clamp_min(1e-9)
    kernel = select_kernel(white, y, precise=True)
    map = fit_ridge_map(white, y, rank=RANK_OF_MAPS, flat=True, candidates=[kernel], **PRECISE)
    phi = map.features(white)
    left = 1 - ((phi @ map.factor) * phi).sum(-1)
    precise = (y - map.offset - phi @ map.coefficients) / left.clamp_min(1e-6)[:, None]
    better = precise.abs().median(0).values < errors.abs().median(0).values
    return torch.where(better, precise, errors)


def at_places(values: Float[Tensor, "n q"], near: Tensor) -> Float[Tensor, "n q"]:
    """Return the mean of the values of the neighbours of each row, NaN where none is known."""
    return values[near].nanmean(1)


def failures(
    residuals: Float[Tensor, "n q"],
    x: Float[Tensor, "n q"],
    near: Tensor,
    same: Bool[Tensor, "n q"],
    smoothed: Bool[Tensor, "n q"],
    suitable: Bool[Tensor, " q"],
) -> tuple[list[Finding], Bool[Tensor, "n q"]]:
    """Return the sensors that fail or stick for several steps, and which readings are concerned.

    Readings of a law with heavy tails are far off in single steps: a reading after one that has
    failed has failed more often than others. Errors that are alike in successive steps are drifts,
    and errors of a place are found again by its neighbours.

    Args:
        residuals: of the readings x.
        near: of `neighbours`.
        same: whether a reading repeats the one before.
        smoothed: whether a reading has failed by `kbf.filters.gaussian.sensor_laws.working`.
        suitable: sensors that are compared; not `rare_counts`, whose few readings above 0 would be
            taken for failures.
    """
    mixture = fit_mixture(residuals, x)
    failed, found = mixture.failed, []
    bad, h = torch.zeros_like(failed), x - residuals
    for k in (mixture.faulty & suitable).nonzero()[:, 0].tolist():
        f, r = failed[:, k], residuals[:, k]
        count, share = int(f.sum()), float(f.double().mean())
        both = f[1:] & f[:-1]
        pairs, expected = int(both.sum()), len(f) * share * share
        lasts = pairs > expected + MIN_STD_ERRORS * math.sqrt(expected)
        lasts = lasts and pairs >= MIN_SHARE_OF_PAIRS * count
        here = at_places(failed[:, [k]].double(), near)[:, 0]
        if count < MIN_FAILED or not lasts or float(here[f].mean()) >= MAX_RATIO_OF_PLACE * share:
            continue
        runs = max(1, int((f[1:] & ~f[:-1]).sum()) + int(f[0]))
        sticks = float(same[f, k].double().mean()) >= MIN_SHARE_OF_STUCK
        relative = r / h[:, k]
        goes_on = max(rank_correlation(each[:-1][both], each[1:][both]) for each in (r, relative))
        if sticks and float(same[~f, k].double().mean()) < MAX_SHARE_OF_REPEATS:
            bad[:, k] = f | smoothed[:, k] | same[:, k]
            found.append(Finding("sticking", k, share=share, steps=count / runs))
        elif goes_on < MAX_RANK_CORRELATION:
            bad[:, k] = f | smoothed[:, k]
            size = float(r[f].square().mean().sqrt())
            found.append(Finding("failing", k, share=share, steps=count / runs, size=size))
    return found, bad


def rank_correlation(a: Float[Tensor, " n"], b: Float[Tensor, " n"]) -> float:
    """Return the rank correlation (Spearman) of two samples.

    >>> rank_correlation(torch.tensor([1.0, 2.0, 9.0]), torch.tensor([3.0, 4.0, 5.0]))
    1.0
    """
    ranks = torch.stack([a, b]).argsort(1).argsort(1).double()
    return round(float(torch.corrcoef(ranks)[0, 1]), 6)


def widened(mask: Bool[Tensor, " n"], steps: int) -> Bool[Tensor, " n"]:
    """Return which steps are at most ``steps`` from one of a mask.

    >>> widened(torch.tensor([False, False, True, False, False, False]), 1).tolist()
    [False, True, True, True, False, False]
    """
    whole = mask.double()[None, None]
    return torch.nn.functional.max_pool1d(whole, 2 * steps + 1, 1, steps)[0, 0] > 0


def drifts(
    residuals: Float[Tensor, "n q"],
    h: Float[Tensor, "n q"],
    lengths: list[int],
    near: Tensor,
) -> list[Finding]:
    """Return the sensors whose errors persist, and the noise of all.

    A gain that wanders has errors in proportion to the reading: r_t r_{t+1} has the sign of
    h_t h_{t+1}.
    """
    found = []
    persistence = fit_persistence(list(residuals.split(lengths)))
    variance = residuals.square().nanmean(0)
    place = (residuals * at_places(residuals, near)).nanmean(0) / variance
    for k in range(residuals.shape[1]):
        r = residuals[:, k]
        if int(r.isfinite().sum()) < MIN_RESIDUALS:
            continue
        std = math.sqrt(float(variance[k]))
        tests = {
            "drift": persistence_of(r, torch.ones_like(r), lengths),
            "gain": persistence_of(r, h[:, k], lengths),
        }
        law = max(tests, key=lambda name: tests[name][1])
        rho, z_score = tests[law]
        lasting = 0.0
        if z_score > MIN_STD_ERRORS and rho > MIN_PERSISTENCE + max(0.0, float(place[k])):
            phi = float(persistence.phi[k])
            share = float(persistence.share[k])
            lasting = share if law == "drift" and share > 0 else min(rho, 0.95)
            steps = -1 / math.log(phi) if phi > 0 else math.nan
            found.append(Finding(law, k, steps=steps, size=std * math.sqrt(lasting)))
        found.append(Finding("sensor noise", k, size=std * math.sqrt(1 - lasting)))
    return found


def persistence_of(
    r: Float[Tensor, " n"], weights: Float[Tensor, " n"], lengths: list[int]
) -> tuple[float, float]:
    """Return the mean over lags 1 to 3 of the weighted autocorrelation of r, and its z-score."""
    rho, score = [], []
    lasts = torch.cat([torch.arange(n) for n in lengths])  # step within the recording
    for lag in (1, 2, 3):
        inside = lasts[lag:] >= lag
        product = (r[lag:] * r[:-lag])[inside]
        weight = (weights[lag:] * weights[:-lag])[inside]
        known = product.isfinite() & weight.isfinite()
        product, weight = product[known], weight[known]
        total = (product * weight).sum()
        spread = (product * weight).square().sum().sqrt().clamp_min(1e-300)
        score.append(float(total / spread))
        variance = r.square().nanmean()
        rho.append(float(total / (weight.abs().sum() * variance).clamp_min(1e-300)))
    return sum(rho) / 3, sum(score) / 3
