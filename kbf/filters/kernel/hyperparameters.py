"""Selection of bandwidths and ridges on the training part.

There are four methods: leave-one-out scores in closed form (`closed_form`), kernel-mean
cross-validation (`kernel_mean_cv`, `kernel_mean_grid`), the error of the filter on a held-out part
over the published grid (`paper_grid`), and the gradient of that error by
`kbf.training.filter_stage`, for which bandwidths and ridges are parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.filters.protocols import Filter
from kbf.filters.rollout import rollout_recordings
from kbf.recording import Recording, as_recordings, moves, transitions
from kbf.rkhs.embeddings import cme_loo
from kbf.rkhs.kernels import KERNELS, Kernel, median_distance
from kbf.rkhs.linalg import evenly
from kbf.rkhs.ratios import RATIOS, kulsif_loo, tikhonov
from kbf.rkhs.rules import RULES
from kbf.runtime.errors import FitError

T = TypeVar("T")

PAPER_SCALES = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0)
PAPER_REGS = (5e-5, 1e-4, 5e-4)
PAPER_TRANSITION_REGS = (5e-5, 1e-4, 5e-4, 1e-3, 5e-3)
LOO_FACTORS = (0.1, 0.2, 0.35, 0.5, 0.7, 1.0, 1.5)
LOO_REGS = (1e-5, 5e-5, 2e-4, 1e-3, 5e-3, 2e-2)

# Priors over which `choose_ratio_reg` takes the mean of its score.
PRIORS = 10

# Points of the scores that cost O(n^3) for each candidate.
MAX_SCORED = 500


def split_validation(
    memory: list[Recording], share: float = 0.3, most: int = 200
) -> tuple[list[Recording], Recording]:
    """Split the last min(most, share n) steps off the longest of the recordings of n steps in all.

    At least ten steps of that recording remain, and at least five are held out.

    Raises:
        FitError: the recordings are too short.
    """
    k = max(range(len(memory)), key=lambda i: len(memory[i].states))
    total, longest = sum(len(s.states) for s in memory), memory[k]
    steps = len(longest.states)
    held = min(most, int(share * total), steps - 10)
    if held < 5:
        raise FitError(
            f"too short to hold out a part for validation: of {total} training steps, {steps} in "
            f"the longest recording, at least 5 must be held out (at most {share:.0%} of all) and "
            "10 of that recording kept"
        )
    head, tail = (
        Recording(*(None if leaf is None else leaf[part] for leaf in longest))  # pyright: ignore[reportArgumentType]
        for part in (slice(-held), slice(-held, None))
    )
    return [*memory[:k], head, *memory[k + 1 :]], tail


@torch.no_grad()
def validation_error(
    filter: Filter[Any], held: Recording, *, generator: torch.Generator | None = None
) -> float:
    """Return the mean over time of ||zhat - z||^2 on held-out steps; infinity if not finite."""
    (run,) = rollout_recordings(filter, [held], generator=generator)
    error = (run.estimates - held.states).square().sum(-1).mean().item()
    return error if math.isfinite(error) else math.inf


def best_of(candidates: Iterable[T], score: Callable[[T], float]) -> T:
    """Return the candidate of lowest score, the first one of several.

    Candidates whose score is not finite or raises a `FitError` are skipped.

    Raises:
        FitError: no candidate has a finite score.
    """
    candidates, scored = list(candidates), []
    for candidate in candidates:
        with suppress(FitError):
            scored.append((score(candidate), candidate))
    finite = [entry for entry in scored if math.isfinite(entry[0])]
    if not finite:
        raise FitError(f"none of {len(candidates)} settings gives a finite score")
    return min(finite, key=lambda entry: entry[0])[1]


def choose_reg(
    gram_x: Float[Tensor, "n n"], gram_y: Float[Tensor, "n n"], regs: Iterable[float]
) -> float:
    """Return the ridge of the CME of y given x with the lowest leave-one-out score."""
    return best_of(regs, lambda reg: cme_loo(gram_x, gram_y, reg).item())


def closed_form(model: Tunable, memory: list[Recording], *, most: int = 500) -> None:
    """Set the hyper-parameters of a kernel filter by closed-form leave-one-out scores.

    Bandwidth and ridge of the transition minimise the score of the next state given the present
    one, and are those of the ratio, too (as in the published code of Xu et al.). Those of the rule
    minimise the score of the state given the observation. Both scores are in the RKHS of the state
    with the median distance as bandwidth. They are computed on a subsample, so that the cost does
    not depend on the size of the memory.

    Args:
        model: its hyper-parameters are set.
        memory: recordings.
        most: pairs of the subsample, evenly spaced.

    References: maths of the score: `kbf.rkhs.embeddings.cme_loo`.
    """
    memory = as_recordings(memory)
    states, obs = torch.cat([s.states for s in memory]).double(), torch.cat([s.obs for s in memory])
    pairs = transitions([len(s.states) for s in memory], states.device)
    chosen = evenly(len(pairs.source), most, states.device)
    source, target = states[pairs.source[chosen]], states[pairs.target[chosen]]
    seen = obs[pairs.target[chosen]].flatten(1).double()
    k, length = KERNELS[model.kernel], median_distance(states, distinct=True)
    gram, acted = k(target, target, bandwidth=length), control_gram(model, memory, chosen)

    def choose(x: Tensor, unit: Tensor, near: Tensor | float = 1.0) -> tuple[Tensor, float]:
        candidates = [(unit * factor, reg) for factor in LOO_FACTORS for reg in LOO_REGS]
        return best_of(
            candidates, lambda c: cme_loo(near * k(x, x, bandwidth=c[0]), gram, c[1]).item()
        )

    move, reg_move = choose(source, length, acted)
    see, reg_see = choose(seen, model.obs_scale(obs).to(states))
    model.set(torch.stack([move, move, see]), states.new_tensor([reg_move, reg_move, reg_see]))


@torch.no_grad()
def control_gram(
    model: Tunable, memory: list[Recording], rows: Tensor | None = None
) -> Tensor | float:
    """Return the Gram matrix of the controls of (some) recorded moves; 1 without controls.

    The Gram matrix of the states is multiplied by it.
    """
    controls, widths = moves(memory)[2], getattr(model, "log_control", None)
    if controls is None or widths is None:
        return 1.0
    u = controls.double() if rows is None else controls[rows].double()
    return KERNELS[model.kernel](u, u, bandwidth=widths.exp())


def choose_transition_reg(
    kernel: Kernel,
    memory: list[Recording],
    regs: Iterable[float] = PAPER_TRANSITION_REGS,
    near: Tensor | float = 1.0,
) -> float:
    """Return the ridge of the transition with the lowest leave-one-out score over a memory's pairs.

    ``near`` is `control_gram` if the recordings have controls.
    """
    states = torch.cat([s.states for s in memory]).double()
    pairs = transitions([len(s.states) for s in memory], states.device)
    source, target = states[pairs.source], states[pairs.target]
    return choose_reg(near * kernel(source, source), kernel(target, target), regs)


@torch.no_grad()
def choose_ratio_reg(
    kernel: Kernel,
    memory: list[Recording],
    regs: Iterable[float] = PAPER_TRANSITION_REGS,
    near: Tensor | float = 1.0,
) -> float:
    """Return the ridge of the ratio with the lowest leave-one-out score of KuLSIF.

    The score requires a sample of the prior, and a filter's prior is a prediction. The sample is
    that of successors of the states nearest to a recorded state, the prediction of a belief around
    it: `PRIORS` of them from evenly spaced states, each of a tenth of the pairs; the training
    points are all other states. The score is the mean over these priors.

    Args:
        kernel: k_Z.
        memory: recordings; at most `MAX_SCORED` evenly spaced pairs of them are used.
        regs: candidates.
        near: for the signature of `choose_transition_reg`; controls do not enter the ratio.

    Raises:
        FitError: fewer than 20 pairs, or no finite score.

    References: Xu et al. (2022), section 6.2, which does not name the sample; Kanamori et al.
    (2012).
    """
    states = torch.cat([s.states for s in memory]).double()
    pairs = transitions([len(s.states) for s in memory], states.device)
    rows = evenly(len(pairs.source), MAX_SCORED, states.device)
    if len(rows) < 2 * PRIORS:
        raise FitError(
            f"select=kulsif_loo needs at least {2 * PRIORS} pairs of successive steps, "
            f"got {len(rows)}"
        )
    source, target = states[pairs.source[rows]], states[pairs.target[rows]]
    count = len(rows) // 10
    grams = []
    for i in evenly(len(rows), PRIORS, states.device):
        nearest = (source - source[i]).square().sum(-1).argsort()
        u, z = target[nearest[:count]], target[nearest[count:]]
        grams.append((kernel(z, z), kernel(z, u), kernel(u, u)))

    def score(reg: float) -> float:
        scores = [kulsif_loo(gram, cross, own, reg).item() for gram, cross, own in grams]
        return sum(scores) / len(scores)

    return best_of(regs, score)


def kernel_mean_cv(
    build: Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]],
    kernel: Kernel,
    x: Float[Tensor, "n q"],
    z: Float[Tensor, "n d"],
    *,
    folds: int = 10,
) -> Tensor:
    """Return the score of kernel-mean cross-validation, which requires no likelihood.

    The average of the posteriors over x equals the prior. The score is the mean over the folds F of

        ||(1/|F|) sum_{a in F} m_post(x_a) - (1/|F|) sum_{a in F} k_Z(., z_a)||^2,

    with the posteriors from the points outside of F. It compares rules, bandwidths and ridges.

    Args:
        build: (x, z) of the training folds -> a function from held-out x ``m q`` to weights ``m
            n'`` over the training points.
        kernel: k_Z, in whose RKHS the means are compared.
        x: observations ``n q``.
        z: states ``n d``.
        folds: number of folds. Point i is in fold i mod ``folds``, so points must be in random or
            in temporal order.

    Raises:
        ValueError: fewer than two folds, or more than points.

    References: Fukumizu et al., section 4.2 (the sum over the folds there, the mean here).
    """
    n = len(x)
    if not 2 <= folds <= n:
        raise ValueError(f"kernel_mean_cv: {folds} folds of {n} points")
    fold = torch.arange(n, device=x.device) % folds
    scores = []
    for f in range(folds):
        train, held = fold != f, fold == f
        w = build(x[train], z[train])(x[held]).mean(0)
        u = torch.full((int(held.sum()),), 1 / int(held.sum()), dtype=z.dtype, device=z.device)
        scores.append(
            w @ kernel(z[train], z[train]) @ w
            - 2 * w @ kernel(z[train], z[held]) @ u
            + u @ kernel(z[held], z[held]) @ u
        )
    return torch.stack(scores).mean()


@runtime_checkable
class Tunable(Protocol):
    """A kernel filter with hyper-parameters to set, as `kbf.filters.kernel.kbf.KBF`."""

    kernel: str

    def set(self, bandwidths: Tensor, regs: Tensor) -> None:
        """Set bandwidths (ratio, transition, observation) and ridges (eta, lambda', lambda)."""
        ...

    def obs_scale(self, obs: Tensor, *, diagonal: bool = False) -> Tensor:
        """Return the median distance of observations ``n *x``."""
        ...

    def fit(self, memory: Recording | list[Recording] | None) -> Filter[Any]:
        """Return the filter over a memory."""
        ...


def paper_grid(
    model: Tunable,
    memory: list[Recording],
    *,
    ratio_reg: Callable[..., float] = choose_transition_reg,
) -> None:
    """Set the hyper-parameters of a kernel filter by the grid of Xu et al., on the training part.

    Kernels are exp(-||a - b||^2 / s), where s is a scale times the median squared distance
    (including the diagonal), with one scale for states and observations. eta = lambda' is selected
    by the leave-one-out score of the transitions, scale and lambda (their reg2) by the error of the
    filter on the last min(200, 0.3 n) training steps.

    Args:
        model: its hyper-parameters are set.
        memory: recordings.
        ratio_reg: selects eta; `choose_ratio_reg` is the score that the paper names.

    References: Xu et al. (2022), section 6.2 (with KuLSIF's leave-one-out score for eta; the others
    as in their published code).
    """
    memory = as_recordings(memory)
    head, held = split_validation(memory)
    candidates = paper_candidates(model, memory, ratio_reg)

    def score(numbers: tuple[Tensor, Tensor]) -> float:
        model.set(*numbers)
        return validation_error(model.fit(head), held)

    model.set(*best_of(candidates, score))


def paper_candidates(
    model: Tunable, memory: list[Recording], ratio_reg: Callable[..., float]
) -> list[tuple[Tensor, Tensor]]:
    """Return the bandwidths and ridges of the grid of Xu et al.: `PAPER_SCALES` x `PAPER_REGS`."""
    states, obs = torch.cat([s.states for s in memory]).double(), torch.cat([s.obs for s in memory])
    medians = torch.stack(
        [median_distance(states, diagonal=True, distinct=True)] * 2
        + [model.obs_scale(obs, diagonal=True).to(states)]
    )
    candidates: list[tuple[Tensor, Tensor]] = []
    for scale in PAPER_SCALES:
        bandwidths = medians * math.sqrt(scale / 2)
        kernel = partial(KERNELS[model.kernel], bandwidth=bandwidths[1])
        eta = ratio_reg(kernel, memory, near=control_gram(model, memory))
        candidates += [(bandwidths, bandwidths.new_tensor([eta, eta, reg])) for reg in PAPER_REGS]
    return candidates


@runtime_checkable
class TunableRule(Tunable, Protocol):
    """A `Tunable` with the names of its rule and its ratio."""

    rule: str
    ratio: str
    alpha: float


@torch.no_grad()
def kernel_mean_grid(model: TunableRule, memory: list[Recording]) -> None:
    """Set the hyper-parameters by kernel-mean cross-validation over the grid of Xu et al.

    The states of the training part are the prior, so that the average posterior is their embedding.
    Embeddings are compared in one RKHS, that of the median distance of the states: in that of each
    candidate the widest kernel would win, to which all points are alike. Of more than `MAX_SCORED`
    points evenly spaced ones are used.

    References: Fukumizu et al., section 4.2.
    """
    memory = as_recordings(memory)
    states, obs = torch.cat([s.states for s in memory]).double(), torch.cat([s.obs for s in memory])
    rows, base = evenly(len(states), MAX_SCORED, states.device), KERNELS[model.kernel]
    z, x = states[rows], obs[rows].flatten(1).double()
    rule, form = RULES[model.rule], RATIOS[model.ratio]
    common = partial(base, bandwidth=median_distance(states, distinct=True))

    def build(bandwidths: Tensor, regs: Tensor, x: Tensor, z: Tensor) -> Callable[[Tensor], Tensor]:
        G_Z, G_X = base(z, z, bandwidth=bandwidths[0]), base(x, x, bandwidth=bandwidths[2])
        uniform = z.new_full((1, len(z)), 1 / len(z))
        if form.constant:
            gamma = torch.ones_like(uniform)
        elif form.dense is not None:
            gamma = form.dense(G_Z, uniform, regs[0], model.alpha)
        else:
            gamma = tikhonov(G_Z, uniform @ G_Z, regs[0])
        ratio = gamma if form.signed else gamma.clamp_min(0)

        def weights(held: Tensor) -> Tensor:  # of the mean posterior: the rule is linear in k_X
            query = base(held, x, bandwidth=bandwidths[2]).mean(0, keepdim=True)
            return rule.dense(ratio, G_X, query, regs[2])

        return weights

    def score(numbers: tuple[Tensor, Tensor]) -> float:
        return kernel_mean_cv(partial(build, *numbers), common, x, z).item()

    model.set(*best_of(paper_candidates(model, memory, choose_transition_reg), score))
