"""A net under a model: held-out stretches say whether it, a plain estimator, or a stack of several becomes the filter.

No model suits every recording. `ModelSelection` fits a main model and its rivals to the recordings
without a stretch, runs them through that stretch, goes on with the next, and compares. Two rounds
keep it cheap where nothing is wrong:

1. The main model against `PLAIN`: ridge regression on a window, the Kalman filter of a linear
model, the mean. 2. Only where there are `ENOUGH` steps, and one of these is better, or the main
model's own regions hold far less than they promise
   (`TRUSTED`), as where states are not Markov or errors go on from step to step: `MORE`, the kernel
   Monte Carlo filter and boosted trees on a window, and from `MANY` steps on `NETS`.

Up to `MANY` steps the published filter over the recording itself (`PUBLISHED`) is tried as well: it
assumes no law at all.

The main model stays unless another is better by `SURE` standard errors over stretches; else the
kernel Monte Carlo filter is taken unless another is better by one: stretches are few, and a filter
knows how sure it is. Where recordings have controls these two change places: a memory that stands
still is weighed anew for every control, which is slow, and resolves the next state no finer than
its points lie; one that is drawn around the belief moves with it. In the second round what is left
is compared with the stack of all: weights a_jk of model k for component j, not negative and of sum
1, that minimise the held-out squared error sum_t (z_tj - sum_k a_jk m_tkj)^2. The stack is scored
on stretches that its weights were not fitted to, and taken where it is better by a standard error.

Where observations are density ratios (`kbf.densities.ratio`) the kernel Monte Carlo filter is
taken, and another only if it cannot be fitted: it alone takes them whole, the others see their
means, and the ratios of the recordings are those of one encoder each, duller than what new images
have.

Before all this the end of the recordings says whether they drift (`kbf.filters.selection.drift`):
then their newest steps alone are learned from.

References: Wolpert (1992), Breiman (1996), for stacking with weights of one sign.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from kbf.data.windows import take, whole_folds, without
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.gaussian.learned_kalman import LearnedKalman
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo
from kbf.filters.neural.gru_ensemble import FittedGRU
from kbf.filters.protocols import Filter, RatioModel
from kbf.filters.regression.boosting import WindowBoosting
from kbf.filters.regression.window import MeanModel, WindowRidge
from kbf.filters.selection.cross_validation import (
    Part,
    Row,
    Search,
    Trial,
    deviation,
    significantly_better,
)
from kbf.filters.selection.drift import last_steps, newest
from kbf.filters.selection.ratio_mean import OfMeans
from kbf.filters.selection.stacking import stacked
from kbf.recording import Recording, as_recordings
from kbf.runtime.errors import FitError

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
"""Parts of the recordings that are held out in turn; of several recordings these are whole, and may be fewer."""
LEAST, ENOUGH = 100, 500
"""Steps from which anything is compared, and from which `MORE` is tried: fewer cannot say so much."""
MANY = 2000
"""Steps from which only every third part is held out: fits take long, and stretches are many enough."""
SURE = 1.5
"""Standard errors by which another must be better than the main model."""
TRUSTED = 0.8
"""Share of held-out states within 1.96 standard deviations, on average over components, below which a filter is far too sure."""


class ModelSelection(nn.Module):
    """A model with a net under it; before `prepare`, and where nothing can be held out, the main model alone.

    Attributes:
        weights: ``m d``, of the main model and its rivals in turn: one row of ones, or a stack.
            Empty before `prepare`.
        spreads: ``m d d``, covariances of their held-out errors. scores: ``m``, their NMSE on
            held-out stretches, -1 where they were not tried. newest: the last steps that are
            learned from, 0 for all.
        tried: what `prepare` tried, the best first; not kept in checkpoints.
    """

    weights: Tensor
    spreads: Tensor
    scores: Tensor
    newest: Tensor

    def __init__(
        self, main: nn.Module, *, name: str = "main", seed: int = 0, budget: float | None = None
    ) -> None:
        """A net under ``main``, called ``name``; ``seed`` of rivals that draw.

        ``budget``: seconds of `prepare`, or None. No rival is begun after them, and one whose first
        fold says that it would take longer than is left is given up; the main model is always
        tried.
        """
        super().__init__()
        self.budget = budget
        self.main_name = name = name.replace(".", "_")  # a module's name has no dots
        rivals = {
            key: make(seed)
            for key, make in (PLAIN | PUBLISHED | MORE | NETS).items()
            if key != name
        }
        self.models = nn.ModuleDict({name: main, **rivals})
        for key in ("weights", "spreads", "scores"):
            self.register_buffer(key, torch.zeros(0, dtype=torch.float64))
        self.register_buffer("newest", torch.tensor(0))
        self.ratio_dim = 0
        self.tried: list[Row] = []
        self.crosswise: list[tuple[Filter[Any], list[Recording]]] = []

    @property
    def main(self) -> Any:
        """The main model."""
        return self.models[self.main_name]

    @property
    def allow_missing_sensors(self) -> bool:
        """Whether sensors may be silent one by one; rivals that know no sensors are not tried then."""
        return getattr(self.main, "allow_missing_sensors", False)

    @allow_missing_sensors.setter
    def allow_missing_sensors(self, value: bool) -> None:
        known: list[Any] = [
            each for each in self.models.values() if hasattr(each, "allow_missing_sensors")
        ]
        for each in known:
            each.allow_missing_sensors = value

    def model(self, name: str) -> Any:
        """A model as it takes observations that are ratios of states with ``ratio_dim`` components, or others with 0."""
        return self.as_told(self.models[name])

    def as_told(self, model: Any) -> Any:
        """Any model likewise."""
        if isinstance(model, RatioModel):
            model.ratio_dim = self.ratio_dim
            return model
        return OfMeans(model, self.ratio_dim) if self.ratio_dim else model

    @torch.no_grad()
    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Prepare the main model, compare, choose.

        What ``prepare`` of a model chooses (laws, orders, lags), it chooses on all recordings;
        fitted are all without the stretch.
        """
        began = time.perf_counter()
        memory = self.forget(memory)
        sequences, parts = self.held_out(memory)
        if not parts:
            self.model(self.main_name).prepare(memory, generator)
            return
        search = Search(
            parts,
            torch.cat([s.states for s in sequences]).double().var(0, correction=0),
            self.budget,
            began,
        )
        known = {
            name: each
            for name, each in self.models.items()
            if not self.allow_missing_sensors or getattr(each, "allow_missing_sensors", False)
        }

        def attempt(names: Iterable[str]) -> None:
            for name in (
                name
                for name in names
                if name in known and name not in {row.model for row in search.rows}
            ):
                model = self.model(name)
                main = name == self.main_name
                ready = None if main else partial(model.prepare, sequences, generator)
                search.attempt(
                    name, model.fit, prepare=ready, timed=not main, compared=name not in PLAIN
                )

        if self.ratio_dim:
            attempt([MOVING])
        leading, stack = MOVING, False
        if not search.found:
            self.model(self.main_name).prepare(memory, generator)
            moves = sequences[0].controls is not None or self.ratio_dim > 0
            leading = MOVING if moves and MOVING in known else self.main_name
            stack = self.compare(search, attempt, leading, sum(len(s.states) for s in sequences))
        if not search.found:
            return
        self.choose(search, leading, stack=stack)
        chosen = self.filters_of({name: each.filters for name, each in search.found.items()})
        self.crosswise = [(filter, part) for filter, (_, part) in zip(chosen, parts, strict=True)]
        self.tried = search.table()

    def compare(
        self, search: Search, attempt: Callable[[Iterable[str]], None], leading: str, total: int
    ) -> bool:
        """The two rounds, of ``total`` steps; whether the second tried anything, so that a stack is worth it."""
        attempt([*(name for name in PLAIN if name != self.main_name), leading, self.main_name])
        lead = search.found.get(leading)
        unsure = (
            lead is None
            or better_than(lead, search.found)
            or (lead.covered is not None and lead.covered < TRUSTED)
        )
        if total <= MANY and self.main_name not in PUBLISHED and not self.allow_missing_sensors:
            attempt(PUBLISHED)
        before = len(search.rows)
        if unsure and total >= ENOUGH:
            attempt([*MORE, *(NETS if total > MANY else ())])
        return len(search.rows) > before

    def held_out(self, memory: list[Recording]) -> tuple[list[Recording], list[Part]]:
        """What rivals are compared on: the recordings, and each fold with the rest; no fold where nothing can be compared."""
        if not self.compares(memory):
            return [], []
        sequences = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        total = sum(len(s.states) for s in sequences)
        try:
            spans = whole_folds([len(s.states) for s in sequences], FOLDS) if total >= LEAST else []
        except FitError:
            return sequences, []
        few = spans[1::3] if total > MANY and len(spans) == FOLDS else spans
        return sequences, [(without(sequences, each), take(sequences, each)) for each in few]

    def compares(self, memory: list[Recording]) -> bool:
        """Whether rivals know such data: neither images nor missing observations."""
        vectors = len(memory) > 0 and memory[0].obs.ndim == 2
        return vectors and (
            self.allow_missing_sensors or all(bool(s.obs.isfinite().all()) for s in memory)
        )

    def forget(self, memory: list[Recording]) -> list[Recording]:
        """Set `newest`, by the plain ridge regression and, where that would forget, by the main model; what is left."""
        self.newest.zero_()
        ridge = WindowRidge(None)
        ridge.allow_missing_sensors = self.allow_missing_sensors
        if self.compares(memory):
            self.newest.fill_(
                newest(
                    as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors),
                    [self.as_told(ridge), self.model(self.main_name)],
                )
            )
        return self.kept(memory)

    def kept(self, memory: list[Recording]) -> list[Recording]:
        """The steps of ``memory`` that are learned from."""
        return last_steps(memory, int(self.newest))

    def choose(self, search: Search, leading: str, *, stack: bool) -> None:
        """Set the weights from what was found; ``leading``: the model that stays unless another is `SURE` to be better."""
        names, found, scale = list(self.models), search.found, search.scale
        best = least = min(found, key=lambda name: float(found[name].scores.mean()))
        for name, errors in (
            (self.main_name if leading == MOVING else MOVING, 1.0),
            (leading, SURE),
        ):
            if name in found and not significantly_better(
                found[name].scores - found[least].scores, errors
            ):
                best = name
        chosen = {best: torch.ones_like(scale)}
        if len(found) > 1 and stack:
            weights, scores = stacked(list(found.values()), scale)
            search.rows.append(Row("stack", float(scores.mean()), deviation(scores), 0.0, ""))
            if significantly_better(found[best].scores - scores, 1.0):
                chosen = dict(zip(found, weights, strict=True))
        self.weights = torch.stack([chosen.get(name, torch.zeros_like(scale)) for name in names])
        left = {name: torch.cat(each.residuals) for name, each in found.items()}
        none = torch.zeros_like(scale.diag())
        self.spreads = torch.stack(
            [left[k].mT @ left[k] / len(left[k]) if k in left else none for k in names]
        )
        self.scores = torch.stack(
            [found[k].scores.mean() if k in found else torch.full_like(scale[0], -1) for k in names]
        )

    def used(self) -> list[str]:
        """The models that the filter is made of."""
        taken = (self.weights > 0).any(-1).tolist() if len(self.weights) else []
        return [name for name, here in zip(self.models, taken, strict=False) if here] or [
            self.main_name
        ]

    def filters_of(self, filters: dict[str, list[Filter[Any]]]) -> list[Filter[Any]]:
        """The filters of the models in use, made one for each memory."""
        names = self.used()
        if len(names) == 1:
            return filters[names[0]]
        rows = [list(self.models).index(name) for name in names]
        each = zip(*(filters[name] for name in names), strict=True)
        return [
            EnsembleFilter(
                dict(zip(names, some, strict=True)), self.weights[rows], self.spreads[rows]
            )
            for some in each
        ]

    def fit(self, memory: Recording | list[Recording] | None) -> Filter[Any]:
        """The filter of what was chosen.

        Raises:
            ValueError: as the models'.
        """
        memory = (
            memory
            if memory is None
            else self.kept([memory] if isinstance(memory, Recording) else memory)
        )
        return self.filters_of({name: [self.model(name).fit(memory)] for name in self.used()})[0]

    def hyperparameters(self) -> dict[str, float]:
        """Those of the models in use; their weights, and the NMSE of all that were tried on held-out stretches."""
        numbers: dict[str, float] = {"newest": float(self.newest)} if int(self.newest) else {}
        for name in self.used():
            own: Any = getattr(self.models[name], "hyperparameters", dict)
            numbers |= (
                own()
                if name == self.main_name
                else {f"{name}/{key}": value for key, value in own().items()}
            )
        for k, name in enumerate(self.models if len(self.weights) else []):
            if float(self.scores[k]) >= 0:
                numbers |= {
                    f"held_out/{name}": float(self.scores[k]),
                    f"weight/{name}": float(self.weights[k].mean()),
                }
        return numbers


def better_than(main: Trial, found: dict[str, Trial]) -> bool:
    """Whether anything has a smaller error than the main model."""
    return any(
        float(each.scores.mean()) < float(main.scores.mean())
        for each in found.values()
        if each is not main
    )
