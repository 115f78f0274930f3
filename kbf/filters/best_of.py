"""A net under a model: held-out stretches say whether it, a plain estimator, or a stack of several becomes the filter.

No model suits every recording. `BestOf` fits a main model and its rivals to the recordings without a stretch, runs them through
that stretch, goes on with the next, and compares. Two rounds keep it cheap where nothing is wrong:

1. The main model against `PLAIN`: ridge regression on a window, the Kalman filter of a linear model, the mean.
2. Only where there are `ENOUGH` steps, and one of these is better, or the main model's own regions hold far less than they promise
   (`TRUSTED`), as where states are not Markov or errors go on from step to step: `MORE`, the kernel Monte Carlo filter and boosted
   trees on a window, and from `MANY` steps on `NETS`.

Up to `MANY` steps the published filter over the recording itself (`PUBLISHED`) is tried as well: it assumes no law at all.

The main model stays unless another is better by `SURE` standard errors over stretches; else the kernel Monte Carlo filter is taken
unless another is better by one: stretches are few, and a filter knows how sure it is. In the second round this is compared with the
stack of all: weights a_jk of model k for component j, not negative and of sum 1, that minimise the held-out squared error
sum_t (z_tj - sum_k a_jk m_tkj)^2. The stack is scored on stretches that its weights were not fitted to, and taken where it is
better by a standard error.

References: Wolpert (1992), Breiman (1996), for stacking with weights of one sign.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence as Many
from itertools import combinations
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn

from kbf.data.windows import folds, piece, take, without
from kbf.filters.base import Filter, FilterModel, rollout
from kbf.filters.gru_fitted import FittedGRU
from kbf.filters.kalman_fitted import LearnedKalman
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.monte_carlo import KernelMonteCarlo
from kbf.filters.stack import StackedFilter
from kbf.filters.window_boosting import WindowBoosting
from kbf.filters.window_regression import MeanModel, WindowRidge
from kbf.filters.wrapper import CollectingCovariance
from kbf.sequence import Sequence, as_sequences, pad

log = logging.getLogger(__name__)

PLAIN: dict[str, Callable[[int], nn.Module]] = {
    "window_ridge": lambda seed: WindowRidge(None),
    "kalman": lambda seed: LearnedKalman(),
    "mean": lambda seed: MeanModel(),
}
"""Estimators that no filter may be worse than, made for a seed."""
MORE: dict[str, Callable[[int], nn.Module]] = {
    "kernel_monte_carlo": lambda seed: KernelMonteCarlo(seed=seed),
    "window_boosting": lambda seed: WindowBoosting(None, seed=seed),
}
"""What is tried where the main model is in trouble."""
MOVING = "kernel_monte_carlo"
"""The one of them that is a filter with a model."""
NETS: dict[str, Callable[[int], nn.Module]] = {"gru": lambda seed: FittedGRU(seed=seed)}
"""What is tried beside these from `MANY` steps on: nets learn little from less, and take long."""
PUBLISHED: dict[str, Callable[[int], nn.Module]] = {
    "kbf_median": lambda seed: KBF(normalise=False, rank=128, learn=False),
}
"""The filter of Xu et al. (2022), Algorithm 2, over the recording, with bandwidths from median distances: their grid takes long."""
FOLDS = 5
"""Parts of the recordings that are held out in turn."""
FEW, MOST, SHORT, LONG = 4, 8, 120, 1000
"""Stretches of each part that are run through, and steps in a stretch: `SHORT` are enough where `FEW` of them fill the part, but
what changes slowly shows itself in `LONG` ones alone."""
LEAST, ENOUGH = 100, 500
"""Steps from which anything is compared, and from which `MORE` is tried: fewer cannot say so much."""
MANY = 2000
"""Steps from which only every third part is held out: fits take long, and stretches are many enough."""
SURE = 1.5
"""Standard errors by which another must be better than the main model."""
HOPELESS = 2.0
"""Times the error of another on the first fold from which a model is not tried on the rest."""
TRUSTED = 0.8
"""Share of held-out states within 1.96 standard deviations, on average over components, below which a filter is far too sure."""


class Row(NamedTuple):
    """What was tried: NMSE on held-out stretches (None: it could not be fitted), its standard error, seconds, why not."""

    model: str
    nmse: float | None
    error: float | None
    seconds: float
    note: str


class Trial(NamedTuple):
    """One model on all held-out stretches.

    Attributes:
        filters: one for each fold.
        residuals: ``t d`` for each stretch, z - m on the steps that count. folds: the fold of each stretch.
        scores: ``s``, the NMSE of each stretch, over the variance of all states.
        covered: share of states within 1.96 standard deviations; None for a filter without covariances.
    """

    filters: list[Filter[Any]]
    residuals: list[Tensor]
    folds: list[int]
    scores: Tensor
    covered: float | None


class BestOf(nn.Module):
    """A model with a net under it; before `prepare`, and where nothing can be held out, the main model alone.

    Attributes:
        weights: ``m d``, of the main model and its rivals in turn: one row of ones, or a stack. Empty before `prepare`.
        spreads: ``m d d``, covariances of their held-out errors. scores: ``m``, their NMSE on held-out stretches, -1 where
            they were not tried. tried: what `prepare` tried, the best first; not kept in checkpoints.
    """

    weights: Tensor
    spreads: Tensor
    scores: Tensor

    def __init__(self, main: nn.Module, *, name: str = "main", seed: int = 0, budget: float | None = None) -> None:
        """A net under ``main``, called ``name``; ``seed`` of rivals that draw.

        ``budget``: seconds of `prepare`, or None. No rival is begun after them, and one whose first fold says that it would take
        longer than is left is given up; the main model is always tried.
        """
        super().__init__()
        self.budget = budget
        self.main_name = name = name.replace(".", "_")  # a module's name has no dots
        rivals = {key: make(seed) for key, make in (PLAIN | PUBLISHED | MORE | NETS).items() if key != name}
        self.models = nn.ModuleDict({name: main, **rivals})
        for key in ("weights", "spreads", "scores"):
            self.register_buffer(key, torch.zeros(0, dtype=torch.float64))
        self.tried: list[Row] = []
        self.crosswise: list[tuple[Filter[Any], list[Sequence]]] = []

    @property
    def main(self) -> Any:
        """The main model."""
        return self.models[self.main_name]

    @property
    def partial(self) -> bool:
        """Whether sensors may be silent one by one; rivals that know no sensors are not tried then."""
        return getattr(self.main, "partial", False)

    @partial.setter
    def partial(self, value: bool) -> None:
        known: list[Any] = [each for each in self.models.values() if hasattr(each, "partial")]
        for each in known:
            each.partial = value

    @torch.no_grad()
    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Prepare the main model, compare, choose.

        What ``prepare`` of a model chooses (laws, orders, lags), it chooses on all recordings; fitted are all without the stretch.
        """
        began_all = time.perf_counter()
        self.main.prepare(memory, generator)
        first = memory[0] if len(memory) else None
        silent = not self.partial and not all(bool(s.obs.isfinite().all()) for s in memory)
        if first is None or first.obs.ndim != 2 or silent:
            return  # images, or missing observations: rivals know neither
        sequences = as_sequences(memory, partial=self.partial)
        total = sum(len(s.states) for s in sequences)
        if total < LEAST:
            return
        try:
            spans = folds([len(s.states) for s in sequences], FOLDS)
        except ValueError:
            return
        few = spans[1::3] if total > MANY else spans
        parts = [(without(sequences, each), take(sequences, each)) for each in few]
        scale = torch.cat([s.states for s in sequences]).double().var(0, correction=0)
        found: dict[str, Trial] = {}
        rows: list[Row] = []

        def attempt(name: str) -> None:
            began, note = time.perf_counter(), ""
            left = torch.inf if self.budget is None or name == self.main_name else self.budget - (began - began_all)
            log.info("held out: %s", name)
            try:
                if left <= 0:
                    raise ValueError(f"not tried: the budget of {self.budget:g} s is spent")
                if name != self.main_name:
                    self.models[name].prepare(sequences, generator)  # pyright: ignore[reportCallIssue]
                least = torch.inf if name in PLAIN else least_on_first(found)
                model: Any = self.models[name]
                found[name] = trial(model, parts, scale, least, began + left)
            except (ValueError, RuntimeError) as error:
                note = " ".join(str(error).split())
            scores = found[name].scores if name in found else torch.zeros(0)
            known = None if name not in found else float(scores.mean())
            rows.append(Row(name, known, deviation(scores), round(time.perf_counter() - began, 2), note))
            log.info("held out: %s has an NMSE of %.3g", name, float("nan") if known is None else known)

        known = [name for name, each in self.models.items() if not self.partial or getattr(each, "partial", False)]
        for name in [*(name for name in PLAIN if name in known and name != self.main_name), self.main_name]:
            attempt(name)
        main = found.get(self.main_name)
        unsure = main is None or better_than(main, found) or (main.covered is not None and main.covered < TRUSTED)
        for name in PUBLISHED if total <= MANY and self.main_name not in PUBLISHED and not self.partial else ():
            attempt(name)
        if unsure and total >= ENOUGH:
            for name in (name for name in MORE | (NETS if total > MANY else {}) if name in known and name != self.main_name):
                attempt(name)
        if not found:
            return
        self.choose(found, rows, scale)
        chosen = self.filters_of({name: each.filters for name, each in found.items()})
        self.crosswise = [(filter, part) for filter, (_, part) in zip(chosen, parts, strict=True)]
        self.tried = sorted(rows, key=lambda row: (row.nmse is None, row.nmse))

    def choose(self, found: dict[str, Trial], rows: list[Row], scale: Float[Tensor, " d"]) -> None:
        """Set the weights from what was found."""
        names = list(self.models)
        best = least = min(found, key=lambda name: float(found[name].scores.mean()))
        for name, errors in ((MOVING, 1.0), (self.main_name, SURE)):
            if name in found and not surely(found[name].scores - found[least].scores, errors):
                best = name
        chosen = {best: torch.ones_like(scale)}
        if len(found) > 1 and any(row.model in MORE | NETS and row.model != self.main_name for row in rows):
            stack, scores = stacked(list(found.values()), scale)
            rows.append(Row("stack", float(scores.mean()), deviation(scores), 0.0, ""))
            if surely(found[best].scores - scores, 1.0):
                chosen = dict(zip(found, stack, strict=True))
        self.weights = torch.stack([chosen.get(name, torch.zeros_like(scale)) for name in names])
        left = {name: torch.cat(each.residuals) for name, each in found.items()}
        none = torch.zeros_like(scale.diag())
        self.spreads = torch.stack([left[k].mT @ left[k] / len(left[k]) if k in left else none for k in names])
        self.scores = torch.stack([found[k].scores.mean() if k in found else torch.full_like(scale[0], -1) for k in names])

    def used(self) -> list[str]:
        """The models that the filter is made of."""
        taken = (self.weights > 0).any(-1).tolist() if len(self.weights) else []
        return [name for name, here in zip(self.models, taken, strict=False) if here] or [self.main_name]

    def filters_of(self, filters: dict[str, list[Filter[Any]]]) -> list[Filter[Any]]:
        """The filters of the models in use, made one for each memory."""
        names = self.used()
        if len(names) == 1:
            return filters[names[0]]
        rows = [list(self.models).index(name) for name in names]
        each = zip(*(filters[name] for name in names), strict=True)
        return [StackedFilter(dict(zip(names, some, strict=True)), self.weights[rows], self.spreads[rows]) for some in each]

    def condition(self, memory: Sequence | list[Sequence] | None) -> Filter[Any]:
        """The filter of what was chosen.

        Raises:
            ValueError: as the models'.
        """
        return self.filters_of({name: [self.models[name].condition(memory)] for name in self.used()})[0]  # pyright: ignore

    def hyperparameters(self) -> dict[str, float]:
        """Those of the models in use; their weights, and the NMSE of all that were tried on held-out stretches."""
        numbers: dict[str, float] = {}
        for name in self.used():
            own: Any = getattr(self.models[name], "hyperparameters", dict)
            numbers |= own() if name == self.main_name else {f"{name}/{key}": value for key, value in own().items()}
        for k, name in enumerate(self.models if len(self.weights) else []):
            if float(self.scores[k]) >= 0:
                numbers |= {f"held_out/{name}": float(self.scores[k]), f"weight/{name}": float(self.weights[k].mean())}
        return numbers


def least_on_first(found: dict[str, Trial]) -> float:
    """The least NMSE of any model on the first fold; infinite without one."""
    first = [each.scores[: each.folds.count(each.folds[0])].mean().item() for each in found.values()]
    return min(first, default=torch.inf)


def trial(
    model: FilterModel,
    parts: Many[tuple[list[Sequence], list[Sequence]]],
    scale: Float[Tensor, " d"],
    least: float = torch.inf,
    until: float = torch.inf,
) -> Trial:
    """Fit a model to the rest of each fold and run it through the fold's stretches.

    Args:
        model: what to fit. parts: (the rest, the fold) of each.
        scale: the variance of the states.
        least: NMSE of another on the first fold: a model of more than `HOPELESS` times that is given up there.
        until: time (`time.perf_counter`) at which all is to be done: a model whose first fold says that it will not is given up.

    Raises:
        ValueError: as the model's; estimates that are not finite; given up.
    """
    filters, residuals, places, covered = [], [], [], []
    began = time.perf_counter()
    for k, (rest, part) in enumerate(parts):
        filters.append(model.condition(rest))
        for left, inside in run(filters[-1], stretches_of(part)):
            residuals.append(left)
            places.append(k)
            covered += [] if inside is None else [inside.double().mean()]
        if k == 0 and not (first := mean_nmse(residuals, scale)) <= HOPELESS * least:
            raise ValueError(f"given up: an NMSE of {first:.3g} on the first part, where another has {least:.3g}")
        taken = time.perf_counter() - began
        if k == 0 and began + taken * len(parts) > until:
            raise ValueError(
                f"given up: {taken * len(parts):.0f} s by its first part, and the budget has {until - began:.0f} s left"
            )
    scores = torch.stack([nmse_of(left, scale) for left in residuals])
    if not bool(scores.isfinite().all()):
        raise ValueError("it lost itself on held-out stretches: an estimate is not finite")
    return Trial(filters, residuals, places, scores, float(torch.stack(covered).mean()) if covered else None)


def mean_nmse(residuals: list[Tensor], scale: Float[Tensor, " d"]) -> float:
    """`nmse_of` stretches, averaged."""
    return torch.stack([nmse_of(left, scale) for left in residuals]).mean().item()


def nmse_of(residuals: Float[Tensor, "t d"], scale: Float[Tensor, " d"]) -> Float[Tensor, ""]:
    """Mean squared residual over the variance, averaged over the components that vary."""
    return (residuals.square().mean(0) / scale)[scale > 0].mean()


def stretches_of(part: list[Sequence]) -> list[Sequence]:
    """At most `MOST` stretches, evenly over a fold, of at most `LONG` steps; where it is of several short recordings, these.

    How a recording begins may be all that tells where the state is: a short one is run through as long as it lies in the fold, from
    its beginning, as it will be later, unless the fold begins within it.
    """
    total = sum(len(s.states) for s in part)
    length = max(2, min(SHORT, total // FEW), min(LONG, total // MOST))
    whole = len(part) > 1 and all(len(s.states) <= 2 * SHORT for s in part)
    spans = [(s, k) for s in part for k in ([0] if whole else range(0, max(1, len(s.states) - length // 2), length))]
    chosen = {round(i * (len(spans) - 1) / (MOST - 1)) for i in range(MOST)}
    return [piece(spans[i][0], spans[i][1], 2 * SHORT if whole else spans[i][1] + length) for i in sorted(chosen)]


def run(filter: Filter[Any], stretches: list[Sequence]) -> Iterator[tuple[Tensor, Bool[Tensor, "t d"] | None]]:
    """Run a filter through stretches: of each z - m ``t d``, and whether it is within 1.96 standard deviations.

    The first fifth of a stretch, at most 25 steps, does not count: the filter does not know yet where it is.
    """
    batch = pad(stretches)
    whole = all(s.mask is None and len(s.states) == batch.states.shape[1] for s in stretches)
    told = CollectingCovariance(filter)
    generator = torch.Generator(batch.states.device).manual_seed(0)
    mask = None if whole else batch.mask
    found = rollout(told, batch.obs, mask=mask, controls=batch.controls, generator=generator)
    spread = found.diagnostics.get(CollectingCovariance.NAME)
    for k, stretch in enumerate(stretches):
        steps = len(stretch.states)
        first = min(25, steps // 5)
        left = stretch.states[first:].double() - found.estimates[k, first:steps].double()
        sd = None if spread is None else spread[k, first:steps].diagonal(dim1=-2, dim2=-1).double().clamp_min(0).sqrt()
        yield left, None if sd is None else left.abs() <= 1.96 * sd


def deviation(scores: Float[Tensor, " s"]) -> float | None:
    """The standard error of a mean; None of fewer than two numbers."""
    return float(scores.std() / len(scores) ** 0.5) if len(scores) > 1 else None


def surely(gains: Float[Tensor, " s"], errors: float) -> bool:
    """Whether gains are positive on average, by so many standard errors."""
    error = deviation(gains)
    return error is not None and float(gains.mean()) > errors * error


def better_than(main: Trial, found: dict[str, Trial]) -> bool:
    """Whether anything has a smaller error than the main model."""
    return any(float(each.scores.mean()) < float(main.scores.mean()) for each in found.values() if each is not main)


def stacked(trials: list[Trial], scale: Float[Tensor, " d"]) -> tuple[Float[Tensor, "m d"], Float[Tensor, " s"]]:
    """Weights of a stack, and its NMSE on each stretch by weights that were fitted without the stretches of its fold.

    As the weights of a component sum to 1, the residual of the stack is the weighted sum of the residuals.
    """
    together = [torch.stack(each) for each in zip(*(trial.residuals for trial in trials), strict=True)]  # m t d, each stretch
    places, scores = trials[0].folds, []
    for out, stretch in zip(places, together, strict=True):
        rest = [each for k, each in zip(places, together, strict=True) if k != out]
        weights = simplex_weights(torch.cat(rest, 1))
        scores.append(nmse_of((weights[:, None] * stretch).sum(0), scale))
    return simplex_weights(torch.cat(together, 1)), torch.stack(scores)


def simplex_weights(residuals: Float[Tensor, "m t d"]) -> Float[Tensor, "m d"]:
    """For each component the weights, not negative and of sum 1, of the least squared sum of weighted residuals.

    With R = sum_t r_t r_t^T the least of a^T R a under 1^T a = 1 is a = R^-1 1 / (1^T R^-1 1). Of all subsets of the m models whose
    solution has no negative weight the best one is it: m is small, and so nothing is iterated.

    >>> simplex_weights(torch.tensor([[[1.0], [1.0]], [[-1.0], [-1.0]]]))
    tensor([[0.5000],
            [0.5000]], dtype=torch.float64)
    """
    m, _, d = residuals.shape
    found = torch.zeros(m, d, dtype=torch.float64, device=residuals.device)
    for j in range(d):
        rows = residuals[..., j].double()
        R = rows @ rows.mT
        R = R + 1e-9 * R.diagonal().mean().clamp_min(torch.finfo(R.dtype).tiny) * torch.eye(m).to(R)
        best = torch.inf
        for size in range(1, m + 1):
            for subset in map(list, combinations(range(m), size)):
                part = R[subset][:, subset]
                solved = torch.linalg.solve(part, torch.ones_like(part[0]))
                a = solved / solved.sum()
                error = float(a @ part @ a)
                if bool((a >= 0).all()) and error < best:
                    best = error
                    found[:, j] = 0
                    found[subset, j] = a
    return found
