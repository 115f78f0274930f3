"""How the states of recordings move: regimes that last, jumps, and the noise of each component.

A regime is a hidden mode with a change map of its own. It is reported if a chain of two modes that
both last explains the errors of a single map better than one mode does. The errors are replaced by
their normal scores, so that heavy-tailed noise is not mistaken for a regime.
"""

import math
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.densities.ridge import join_of
from kbf.filters.gaussian.hidden_chain import smoothed_chain
from kbf.filters.gaussian.leave_one_out import features_of, weighted_errors
from kbf.filters.gaussian.moments import log_densities
from kbf.filters.gaussian.regimes import LEAST_LEFT, Moves, covariances, map_weights
from kbf.fitted.sensor_findings import Finding, precise_errors, widened
from kbf.recording import Recording, moves
from kbf.runtime.deadline import check_deadline

# Moves that findings require.
MIN_MOVES = 100
# Probability that a mode goes on, and steps of a mode in a random start.
STAY = 0.97
STEPS_OF_START = 30
# Random starts with linear maps, their iterations, and those of the best with all features.
STARTS = 12
ITERATIONS = 15
ITERATIONS_OF_BEST = 8
# Log density by which two modes must be better than one: without modes it was at most 30 on 20
# systems of 1,000 moves.
MIN_GAIN_OF_REGIMES = 40.0
# Moves that each mode must have, as a share.
MIN_SHARE_OF_REGIME = 0.1
# Steps around a change of modes in which errors are not jumps: the step of the change is not known.
STEPS_OF_CHANGE = 4
# Largest share of jumps: what is more frequent is a law of noise.
MAX_SHARE_OF_JUMPS = 0.2
# Log density by which jumps must be better than each law of noise with heavy tails.
MIN_GAIN_OF_JUMPS = 10.0
# Shares of jumps that expectation maximisation starts from, and its iterations.
SHARES_OF_START = (0.01, 0.05, 0.15)
ITERATIONS_OF_JUMPS = 30
# Least size of jumps, in standard deviations of the noise.
MIN_SIZE_OF_JUMPS = 3.0
# Degrees of freedom of the laws with heavy tails, and scales of all laws in standard deviations.
DEGREES = (2.5, 3.0, 4.0, 6.0, 10.0, 30.0)
SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)


class Modes(NamedTuple):
    """Two modes that last.

    Attributes:
        gain: of log density over one mode. marginals: ``n 2``, probabilities of the modes.
    """

    gain: float
    marginals: Tensor


def move_findings(recordings: list[Recording]) -> list[Finding]:
    """Return what is found in the moves of the states ``T d`` of recordings."""
    z, after, u = moves(recordings)
    if len(z) < MIN_MOVES:
        return []
    inputs = z if u is None else join_of(z, u)(z, u)
    lengths = [len(each.states) - 1 for each in recordings if len(each.states) > 1]
    found = Moves(inputs.double(), (after - z).double(), lengths).newest()
    varies = found.change.std(0) > 1e-12 * found.change.abs().amax(0).clamp_min(1e-300)
    columns = varies.nonzero()[:, 0]
    if not len(columns):
        return []
    found = found._replace(change=found.change[:, columns])
    errors = precise_errors(found.inputs, found.change)
    jumped, report = jumps(errors), []
    for hidden in (jumped, torch.zeros_like(jumped)) if bool(jumped.any()) else (jumped,):
        modes = two_modes(found._replace(change=errors), hidden)
        share = float(modes.marginals[:, 0].mean())
        if modes.gain < MIN_GAIN_OF_REGIMES or min(share, 1 - share) < MIN_SHARE_OF_REGIME:
            continue
        path = modes.marginals.argmax(-1)
        left, within = errors_of_modes(found, path), ~widened(changes_of(path), STEPS_OF_CHANGE)
        rest = torch.zeros_like(within).index_put((within,), jumps(left[within]))
        if bool(rest.any()) and hidden is not jumped:
            continue  # jumps that are mistaken for modes
        report, errors, jumped = lasting(path, found.lengths), left, rest
        break
    if bool(jumped.any()):
        size, rate = errors[jumped].square().mean(0).sqrt(), float(jumped.double().mean())
        report += [
            Finding("jumps", k, share=rate, size=float(each))
            for k, each in zip(columns.tolist(), size, strict=True)
        ]
    noise = errors[~jumped].square().mean(0).sqrt()
    return report + [
        Finding("process noise", k, size=float(each))
        for k, each in zip(columns.tolist(), noise, strict=True)
    ]


def two_modes(moves: Moves, hidden: Bool[Tensor, " n"]) -> Modes:
    """Fit a chain of two modes with maps of their own to errors; jumps are hidden.

    The gain is over one mode, and over two modes of one map with two covariances, as noise whose
    size varies has.
    """
    phi, n = features_of(moves.inputs), len(moves.change)
    ranks = moves.change.argsort(0).argsort(0).double()
    scores = torch.special.ndtri((ranks + 0.5) / n)
    fit = partial(fit_modes, scores, lengths=moves.lengths, seen=~hidden)
    one, _ = fit(phi, [0], torch.ones(1, n, 1, dtype=torch.float64), iterations=1)
    size = torch.nn.functional.avg_pool1d(
        scores.square().sum(1)[None, None], STEPS_OF_START + 1, 1, STEPS_OF_START // 2
    )[0, 0]
    loud, _ = fit(phi, [0, 0], split(size > size.median())[None], iterations=ITERATIONS)
    generator = Generator().manual_seed(0)
    ends = (torch.rand(STARTS, n, generator=generator) < 1 / STEPS_OF_START).cumsum(1)
    labels = torch.randint(2, (STARTS, n + 1), generator=generator).gather(1, ends)
    linear = phi[:, : 1 + moves.inputs.shape[1]]
    each, weights = fit(linear, [0, 1], split(labels == 0), iterations=ITERATIONS)
    best = weights[[int(each.argmax())]]
    two, weights = fit(phi, [0, 1], best, iterations=ITERATIONS_OF_BEST)
    return Modes(float(two - torch.maximum(one, loud)), weights[0])


def split(first: Bool[Tensor, "*b n"]) -> Float[Tensor, "*b n 2"]:
    """Return probabilities of two modes, 0.9 for that of each step."""
    weight = torch.where(first, 0.9, 0.1).double()
    return torch.stack([weight, 1 - weight], -1)


def fit_modes(
    y: Float[Tensor, "n d"],
    phi: Float[Tensor, "n p"],
    structure: list[int],
    weights: Float[Tensor, "b n k"],
    *,
    lengths: list[int],
    seen: Bool[Tensor, " n"],
    iterations: int,
) -> tuple[Float[Tensor, " b"], Float[Tensor, "b n k"]]:
    """Return log densities of y and probabilities of modes, which go on with probability `STAY`.

    As `kbf.filters.gaussian.regimes.expectation_maximisation`, whose chain is learned: there modes
    of single steps may be those of a law of noise.
    """
    maps, (b, _, k) = torch.tensor(structure), weights.shape
    P = torch.full((b, k, k), (1 - STAY) / max(1, k - 1), dtype=y.dtype)
    P.diagonal(dim1=-2, dim2=-1).fill_(STAY if k > 1 else 1.0)
    start = torch.full((b, k), 1 / k, dtype=y.dtype)
    total = torch.zeros(b, dtype=y.dtype)
    for _ in range(iterations):
        check_deadline()
        used = weights * seen[:, None]
        errors = weighted_errors(phi, y, map_weights(used, maps), LEAST_LEFT)[:, maps]
        logs = torch.where(seen[:, None], log_densities(errors, covariances(errors, used)).mT, 0)
        chain = smoothed_chain(logs, P, start, lengths)
        weights, total = chain.marginals, chain.log_predictive.sum(1)
    return total, weights


def lasting(path: Tensor, lengths: list[int]) -> list[Finding]:
    """Return share and mean duration of each mode of a path."""
    firsts = torch.tensor([0, *lengths[:-1]]).cumsum(0)
    changes = changes_of(path)
    changes[firsts] = True
    found = []
    for m in (0, 1):
        steps, visits = int((path == m).sum()), int((changes & (path == m)).sum())
        share = steps / len(path)
        found.append(Finding("regime", -1, share=share, steps=steps / max(1, visits)))
    return sorted(found, key=lambda each: -each.share)


def changes_of(path: Tensor) -> Bool[Tensor, " n"]:
    """Return whether the mode of a step is another one than that before."""
    found = torch.zeros_like(path, dtype=torch.bool)
    found[1:] = path[1:] != path[:-1]
    return found


def errors_of_modes(moves: Moves, path: Tensor) -> Float[Tensor, "n d"]:
    """Return the leave-one-out errors of each move under the map of its mode."""
    found = moves.change - moves.change.mean(0)
    for m in (0, 1):
        here = path == m
        found[here] = precise_errors(moves.inputs[here], moves.change[here])
    return found


def jumps(errors: Float[Tensor, "n d"]) -> Bool[Tensor, " n"]:
    """Return which errors are jumps of the whole state; none if a law of noise explains them.

    (1 - share) q(e) + share N(0, size^2 I) is compared with the laws q of independent components:
    normal, Laplace, and Student laws, of the errors in units of their covariance.
    """
    found = torch.zeros(len(errors), dtype=torch.bool)
    if len(errors) < MIN_MOVES:
        return found
    e = whitened(errors)
    best = law_of(e, e).sum() + MIN_GAIN_OF_JUMPS
    for start in SHARES_OF_START:
        share, size = start, 2 * MIN_SIZE_OF_JUMPS
        odds = torch.zeros(len(e), dtype=e.dtype)
        for _ in range(ITERATIONS_OF_JUMPS):
            odds = odds_of_jumps(e, share, size)
            share = float(odds.mean().clamp(1e-4, 0.5))
            square = (odds * e.square().mean(1)).sum() / odds.sum().clamp_min(1e-9)
            size = max(float(square.sqrt()), MIN_SIZE_OF_JUMPS)
        quiet = law_of(e[odds < 0.5], e)
        wide = normal(e, torch.tensor(size, dtype=e.dtype)).sum(1)
        total = torch.logaddexp(math.log1p(-share) + quiet, math.log(share) + wide).sum()
        if total > best and share < MAX_SHARE_OF_JUMPS:
            best, found = total, odds > 0.5
    return found


def odds_of_jumps(e: Float[Tensor, "n d"], share: float, size: float) -> Float[Tensor, " n"]:
    """Return the probability of a jump of each error, with normal laws."""
    quiet, wide = (normal(e, torch.tensor(s, dtype=e.dtype)).sum(1) for s in (1.0, size))
    return torch.sigmoid(math.log(share) + wide - math.log1p(-share) - quiet)


def whitened(errors: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Return L^-1 e, L the Cholesky factor of the covariance of the nine tenths in the middle."""
    size = (errors / errors.abs().median(0).values.clamp_min(1e-12)).square().mean(1)
    inner = errors[size <= size.quantile(0.9)]
    S = inner.mT @ inner / len(inner)
    L = torch.linalg.cholesky(S + 1e-9 * S.diagonal().clamp_min(1e-300).diag())
    white = torch.linalg.solve_triangular(L, errors.mT, upper=False).mT
    return white / (white.abs().median(0).values / 0.6745).clamp_min(1e-12)


def law_of(sample: Float[Tensor, "m d"], e: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
    """Return the log density at e of the laws of components that suit a sample best."""
    total = torch.zeros(len(e), dtype=e.dtype)
    laws = [normal, laplace, *(partial(student, nu=nu) for nu in DEGREES)]
    for column, values in zip(sample.mT, e.mT, strict=True):
        scales = column.std() * torch.tensor(SCALES, dtype=e.dtype)[:, None]
        fits = torch.stack([law(column, scales).sum(1) for law in laws])
        law, scale = divmod(int(fits.argmax()), len(SCALES))
        total = total + laws[law](values, scales[scale])
    return total


def student(e: Tensor, scale: Tensor, *, nu: float) -> Tensor:
    """Return the log density of scale times a Student variable of nu degrees of freedom."""
    constant = math.lgamma((nu + 1) / 2) - math.lgamma(nu / 2) - 0.5 * math.log(nu * math.pi)
    return constant - scale.log() - (nu + 1) / 2 * torch.log1p((e / scale).square() / nu)


def normal(e: Tensor, scale: Tensor) -> Tensor:
    """Return the log density of N(0, scale^2)."""
    return -0.5 * (e / scale).square() - scale.log() - 0.5 * math.log(2 * math.pi)


def laplace(e: Tensor, scale: Tensor) -> Tensor:
    """Return the log density exp(-|e| / scale) / (2 scale)."""
    return -e.abs() / scale - (2 * scale).log()
