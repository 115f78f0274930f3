"""Moves of several regimes: mixtures of change maps whose component is a Markov chain.

z' = z + g_k(z, u) + N(0, Q_k), k a hidden chain. Regimes that last, and rare jumps (a component
with the map of another one and a large Q), are of this kind. Since states are recorded, the chain
is fitted to the changes themselves by expectation maximisation: errors of each map are those of
leave-one-out, so that a map does not favour the points that it is fitted to.

`select_regimes` compares the `STRUCTURES` by the log density of changes in held-out blocks.

References: Hamilton (1989), for Markov-switching regression; Rabiner (1989), for the chain.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.gaussian.hidden_chain import smoothed_chain
from kbf.filters.gaussian.leave_one_out import features_of, weighted_errors
from kbf.filters.gaussian.moments import log_densities
from kbf.runtime.deadline import check_deadline

# The map of each component: one law; rare jumps; two regimes; two and jumps; three. Those of three
# components are compared only if one of two is better than one law.
STRUCTURES: tuple[tuple[int, ...], ...] = ((0,), (0, 0), (0, 1), (0, 1, 0), (0, 1, 2))
# Moves that chains are fitted to; of more, the last ones.
MAX_MOVES = 3000
# Moves that a comparison of structures requires.
MIN_MOVES = 100
# Blocks of the moves that are held out in turn, and their parts that gains are averaged over.
FOLDS = 4
PARTS_OF_BLOCKS = 5
# Log density of all moves, and standard errors over parts, by which a component must be better.
MIN_GAIN = 10.0
MIN_STD_ERRORS = 3.0
# Random starts, iterations with linear maps from each of them, and with all features from the best.
STARTS = 5
ITERATIONS = 12
ITERATIONS_OF_BEST = 6
# Steps of a regime in a random start, and the probability to leave it at first.
STEPS_OF_START = 30
LEAVE_OF_START = 0.05
# Least 1 - leverage of a move: a map of few moves passes through single ones.
LEAST_LEFT = 0.05
# Weight of the priors of covariances and of the transition probabilities, in moves.
PRIOR_MOVES = 2.0
# Share of moves with the largest errors that a component of jumps starts with.
SHARE_OF_JUMPS = 0.05


class Chain(NamedTuple):
    """Parameters of a mixture for each element b of a batch.

    Attributes:
        Q: ``b k d d``. P: ``b k k``. start: ``b k``.
        log_predictive: ``b n``, log p(change_t | changes before t).
        marginals: ``b n k``, probabilities of components given the visible changes.
    """

    Q: Tensor
    P: Tensor
    start: Tensor
    log_predictive: Tensor
    marginals: Tensor


class Regimes(NamedTuple):
    """A fitted mixture.

    Attributes:
        maps: the map of each component, a structure of `STRUCTURES`.
        P: ``k k``. start: ``k``. Q: ``k d d``, of the maps of the fit.
        marginals: ``n k``, probabilities of components in each move.
    """

    maps: tuple[int, ...]
    P: Tensor
    start: Tensor
    Q: Tensor
    marginals: Tensor

    def moves_of(self, map: int) -> Bool[Tensor, " n"]:
        """Return the moves that a map is fitted to: its first component is the likeliest."""
        return self.marginals.argmax(-1) == self.maps.index(map)


class Moves(NamedTuple):
    """Moves of recordings, one after the other.

    Attributes:
        inputs: ``n e``. change: ``n d``. lengths: of the recordings.
    """

    inputs: Tensor
    change: Tensor
    lengths: list[int]

    def newest(self, most: int = MAX_MOVES) -> "Moves":
        """Return the last moves."""
        left, kept = most, []
        for length in reversed(self.lengths):
            kept.append(min(length, left))
            left -= kept[-1]
        lengths = [each for each in reversed(kept) if each]
        n = sum(lengths)
        return Moves(self.inputs[-n:], self.change[-n:], lengths)


def select_regimes(moves: Moves) -> tuple[int, ...]:
    """Return the structure with the best log density of held-out moves, the first one if in doubt.

    Structures are compared in their order. Another one is selected if it is better than the best
    one before by `MIN_GAIN` and by `MIN_STD_ERRORS`.
    """
    moves = moves.newest()
    n = len(moves.change)
    if n < MIN_MOVES:
        return STRUCTURES[0]
    blocks = (FOLDS * torch.arange(n) / n).long()
    visible = blocks != torch.arange(FOLDS)[:, None]
    best, scores = STRUCTURES[0], torch.zeros(n)
    for structure in STRUCTURES:
        if len(structure) > 2 and best == STRUCTURES[0]:
            break
        chain = fit_chain(moves, structure, visible)
        each = torch.where(visible, 0, chain.log_predictive).sum(0)
        if structure == STRUCTURES[0]:
            scores = each
            continue
        gains = torch.stack(
            [part.sum() for part in (each - scores).tensor_split(FOLDS * PARTS_OF_BLOCKS)]
        )
        error = gains.std() * math.sqrt(len(gains))
        if float(gains.sum()) > max(MIN_GAIN, MIN_STD_ERRORS * float(error)):
            best, scores = structure, each
    return best


def fit_regimes(moves: Moves, structure: tuple[int, ...]) -> Regimes:
    """Return the mixture of a structure, fitted to all moves."""
    chain = fit_chain(moves, structure, torch.ones(1, len(moves.change)).bool())
    return Regimes(structure, chain.P[0], chain.start[0], chain.Q[0], chain.marginals[0])


def fit_chain(moves: Moves, structure: tuple[int, ...], visible: Bool[Tensor, "f n"]) -> Chain:
    """Fit a mixture to the visible moves, for each row of ``visible``.

    Expectation maximisation starts from regimes at random with linear maps; the best start goes on
    with the features of `kbf.filters.gaussian.leave_one_out.features_of`.
    """
    phi, y = features_of(moves.inputs.double()), moves.change.double()
    linear = phi[:, : 1 + moves.inputs.shape[1]]
    maps, f = torch.tensor(structure), len(visible)
    starts = STARTS if int(maps.max()) else 1
    seen = visible.repeat_interleave(starts, 0)
    weights = started(structure, linear, y, moves.lengths, seen)
    chain = expectation_maximisation(linear, y, moves, maps, seen, weights, ITERATIONS)
    likelihood = torch.where(seen, chain.log_predictive, 0).sum(1).reshape(f, starts)
    best = likelihood.argmax(1) + starts * torch.arange(f)
    weights = torch.where(visible[..., None], chain.marginals[best], 1 / len(maps))
    return expectation_maximisation(phi, y, moves, maps, visible, weights, ITERATIONS_OF_BEST)


def expectation_maximisation(
    phi: Float[Tensor, "n p"],
    y: Float[Tensor, "n d"],
    moves: Moves,
    maps: Tensor,
    visible: Bool[Tensor, "b n"],
    weights: Float[Tensor, "b n k"],
    iterations: int,
) -> Chain:
    """Alternate the fit of maps, covariances and chain with the probabilities of components."""
    b, _, k = weights.shape
    leave = LEAVE_OF_START if k > 1 else 0.0
    P = torch.full((b, k, k), leave / max(1, k - 1), dtype=y.dtype)
    P.diagonal(dim1=-2, dim2=-1).fill_(1 - leave)
    start = torch.full((b, k), 1 / k, dtype=y.dtype)
    step = 0
    while True:
        check_deadline()
        used = weights * visible[..., None]
        errors = weighted_errors(phi, y, map_weights(used, maps), LEAST_LEFT)[:, maps]  # b k n d
        Q = covariances(errors, used)
        logs = log_densities(errors, Q).mT
        hidden = torch.where(visible[..., None], logs, 0)  # held-out moves are missing
        smooth = smoothed_chain(hidden, P, start, moves.lengths)
        weights = smooth.marginals
        if step == iterations:
            predictive = smoothed_chain(logs, P, start, moves.lengths).log_predictive
            return Chain(Q, P, start, predictive, weights)
        counts = smooth.transitions + PRIOR_MOVES * P
        P = counts / counts.sum(-1, keepdim=True)
        start = (weights.mean(1) + 1e-6) / (1 + k * 1e-6)
        step += 1


def started(
    structure: tuple[int, ...],
    phi: Float[Tensor, "n p"],
    y: Float[Tensor, "n d"],
    lengths: list[int],
    visible: Bool[Tensor, "b n"],
) -> Float[Tensor, "b n k"]:
    """Return the first probabilities of components: regimes at random, jumps by size of errors."""
    b, n, k = *visible.shape, len(structure)
    generator = Generator().manual_seed(0)
    regimes = max(structure) + 1
    ends = (torch.rand(b, n, generator=generator) < 1 / STEPS_OF_START).cumsum(1)
    labels = torch.randint(regimes, (b, n + 1), generator=generator).gather(1, ends)
    weights = torch.zeros(b, n, k, dtype=y.dtype)
    places = torch.tensor([structure.index(each) for each in range(regimes)])
    weights.scatter_(2, places[labels][..., None], 1.0)
    wide = [j for j, each in enumerate(structure) if each in structure[:j]]
    if wide:
        error = weighted_errors(phi, y, visible[:, None].to(y), LEAST_LEFT)[:, 0]
        size = (error / error.std(1, keepdim=True)).square().sum(-1)
        jumps = size >= size.quantile(1 - SHARE_OF_JUMPS, dim=1, keepdim=True)
        weights = torch.where(jumps[..., None], 0.0, weights)
        weights[..., wide[0]] += jumps.to(weights)
    return 0.9 * weights + 0.1 / k


def map_weights(weights: Float[Tensor, "b n k"], maps: Tensor) -> Float[Tensor, "b m n"]:
    """Return the weight of each move in each map: that of its first component."""
    first = torch.stack([(maps == m).nonzero()[0, 0] for m in range(int(maps.max()) + 1)])
    return weights[..., first].mT


def covariances(
    errors: Float[Tensor, "b k n d"], weights: Float[Tensor, "b n k"]
) -> Float[Tensor, "b k d d"]:
    """Return weighted covariances; the prior has `PRIOR_MOVES` moves of the variance of all."""
    w = weights.mT[..., None]
    total = w.sum(-2)[..., None]
    S = (w * errors).mT @ errors
    pooled = S.sum(1, keepdim=True) / total.sum(1, keepdim=True)
    D = pooled.diagonal(dim1=-2, dim2=-1).clamp_min(1e-12).diag_embed()
    return (S + PRIOR_MOVES * D) / (total + PRIOR_MOVES)
