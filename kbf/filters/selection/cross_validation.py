"""Blocked cross-validation of several models within a time budget.

``model=auto`` (`kbf.model_choice`) and `kbf.filters.selection.auto` share its score, its table and
its rules for stopping early. The candidates of the former are training recipes, those of the latter
models without training.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.data.windows import piece
from kbf.filters.protocols import Filter
from kbf.filters.rollout import rollout_recordings
from kbf.recording import Recording
from kbf.runtime.deadline import deadline
from kbf.runtime.errors import FitError, MissingPackageError

log: logging.Logger = logging.getLogger(__name__)

# Blocks of `SHORT_BLOCK` steps that a fold is cut into before blocks become longer.
MIN_BLOCKS = 4
# Most blocks of each fold that are filtered, if they are not short recordings.
MAX_BLOCKS = 8
# Steps of a block of a short fold.
SHORT_BLOCK = 120
# Most steps of a block: slow changes are visible in long blocks alone.
LONG_BLOCK = 1000
# Fewest parts by which models are compared if a budget is too short for all of them; a part with so
# many steps is enough.
MIN_PARTS = 3
STEPS_OF_ENOUGH = 1000
# Times the least error on the first fold above which a model is stopped early.
HOPELESS = 2.0
# Share of a budget after which a search ends: the filter is still to be fitted and calibrated.
SHARE_OF_SEARCH = 0.85
# Models, the best on the first part, for whose other parts time is reserved before further models
# are tried; and the multiple of the time of their first part that is reserved for each other one.
RESERVED_MODELS = 2
RESERVED_TIME = 2.0
Fit = Callable[[list[Recording]], Filter[Any]]
# Recordings without a fold, to fit; and the fold.
Part = tuple[list[Recording], list[Recording]]
# The residuals z - m ``t d`` of each block.
Held = Iterable[Tensor]


class Row(NamedTuple):
    """Result of a candidate.

    Attributes:
        model: its name.
        nmse: NMSE on held-out blocks; None if it could not be fitted.
        error: standard error of the NMSE.
        seconds: that it took.
        note: why it could not be fitted.
    """

    model: str
    nmse: float | None
    error: float | None
    seconds: float
    note: str


class Trial(NamedTuple):
    """Results of one model on all held-out blocks.

    Attributes:
        filters: one for each fold.
        residuals: ``t d`` for each block, z - m after the burn-in. folds: the fold of each
            block.
        scores: ``s``, the NMSE of each block, over the variance of all states.
    """

    filters: list[Filter[Any]]
    residuals: list[Tensor]
    folds: list[int]
    scores: Tensor


@dataclass
class Attempt:
    """A model in cross-validation, with its results on the parts that it has been run through.

    Attributes:
        fit: recordings -> a filter. run: filter and part -> residuals of its blocks.
        timed: whether the budget may stop it.
        seconds: of all that was computed. seconds_of_first: of the first part.
        first: NMSE on the first part.
        end: the time (`time.perf_counter`) at which it is stopped on the first part.
        filters, residuals, folds: as of `Trial`.
    """

    fit: Fit
    run: Callable[[Filter[Any], list[Recording]], Held]
    timed: bool
    seconds: float = 0.0
    seconds_of_first: float = 0.0
    first: float = torch.inf
    end: float = torch.inf
    filters: list[Filter[Any]] = field(default_factory=list)
    residuals: list[Tensor] = field(default_factory=list)
    folds: list[int] = field(default_factory=list)

    def run_through(self, rest: list[Recording], part: list[Recording]) -> None:
        """Fit the model to the rest of a part and run it through the blocks of the part."""
        self.filters.append(self.fit(rest))
        for left in self.run(self.filters[-1], part):
            self.residuals.append(left)
            self.folds.append(len(self.filters) - 1)

    def trial(self, scale: Float[Tensor, " d"]) -> Trial:
        """Return the results on all parts.

        Raises:
            FitError: estimates that are not finite.
        """
        scores = torch.stack([nmse_of(left, scale) for left in self.residuals])
        if not bool(scores.isfinite().all()):
            raise FitError("it diverged on a held-out block: an estimate is not finite")
        return Trial(self.filters, self.residuals, self.folds, scores)


class Search:
    """Cross-validates models by successive halving: all on the first part, the best on all parts.

    Each model is fitted to the rest of each part and run through the part.

    Attributes:
        running: models that have been run through the first part, by name.
        found: results by name, of models that could be run through all parts.
        rows: results of all candidates, in the order in which they were finished.
        waiting: attempts that are made once the best models are finished: until then the time that
            is left is reserved for these.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        scale: Float[Tensor, " d"],
        budget: float | None = None,
        began: float | None = None,
    ) -> None:
        """Set the parts and the budget.

        Args:
            parts: (the rest, the part) of each. scale: the variance of the states.
            budget: seconds from ``began`` on (a `time.perf_counter`; None for now), of which the
                search has `SHARE_OF_SEARCH`; or None for any time.
        """
        self.parts: Sequence[Part] = parts
        self.scale: Tensor = scale
        self.budget: float | None = budget
        self.began: float = time.perf_counter() if began is None else began
        self.running: dict[str, Attempt] = {}
        self.found: dict[str, Trial] = {}
        self.rows: list[Row] = []
        self.waiting: list[Callable[[], None]] = []

    def attempt(
        self,
        name: str,
        fit: Fit,
        *,
        prepare: Callable[[], Any] | None = None,
        timed: bool = True,
        run: Callable[[Filter[Any], list[Recording]], Held] | None = None,
        share: float = 1.0,
    ) -> None:
        """Prepare a model and run it through the first part.

        Args:
            name: of the model, for the table.
            fit: recordings -> a filter.
            prepare: called before.
            timed: whether the budget may stop it.
            run: used in place of `run_blocks`.
            share: of the time that is left and not reserved (`reserved`), after which the budget
                stops the model.
        """
        reserved, began = self.reserved(), time.perf_counter()
        model = Attempt(fit, run or run_blocks, timed)
        left = self.end(model) - began
        if reserved > left > 0 and self.best_timed():
            again = partial(self.attempt, name, fit, prepare=prepare, timed=timed, run=run)
            self.waiting.append(again)
            return
        log.info("held out: %s, fold 1 of %d", name, len(self.parts))
        self.running[name] = model
        model.end = began + share * (left - reserved)
        with self.within_budget(name):
            if began > self.end(model):
                raise FitError(f"not started: the budget of {self.budget:g} s is spent")
            if prepare is not None:
                prepare()
                began = time.perf_counter()
            model.run_through(*self.parts[0])
            model.seconds_of_first = time.perf_counter() - began
            model.first = mean_nmse(model.residuals, self.scale)
            model.end = torch.inf  # other parts may take the rest of the budget

    def finish(self, most: int | None = None) -> None:
        """Run the best models through the other parts, the best one on the first part first.

        There are fewer parts, but at least `MIN_PARTS` or one of `STEPS_OF_ENOUGH`, if the time
        that is left is too short for the best ones that the budget may stop. In the time that they
        leave, the models that are `waiting` are attempted and finished in the same way.

        Args:
            most: number of models; None for all. A model with more than `HOPELESS` times the
                least error on the first part belongs to them only if the budget may not stop it.
        """
        order = sorted(self.running, key=lambda name: self.running[name].first)
        best = order[:most]
        least = min((model.first for model in self.running.values()), default=torch.inf)
        if not self.found:
            self.parts = self.parts[: self.affordable_parts()]
        for name in order:
            if name in self.found:
                continue
            model = self.running[name]
            hopeless = most is not None and model.first > HOPELESS * least
            with self.within_budget(name):
                if model.timed and (name not in best or hopeless):
                    raise FitError(
                        f"stopped early: an NMSE of {model.first:.3g} on the first part, "
                        f"where another model has {least:.3g}"
                    )
                self.check_time(model)
                for k, (rest, part) in enumerate(self.parts[1:], 2):
                    log.info("held out: %s, fold %d of %d", name, k, len(self.parts))
                    model.run_through(rest, part)
                self.found[name] = model.trial(self.scale)
            if name in self.found:
                self.record(name, model, "")
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for attempt in waiting:
                attempt()
            self.finish(most)

    @contextmanager
    def within_budget(self, name: str) -> Iterator[None]:
        """Context that records why a model could not be fitted, and ends with the budget."""
        model, began, note = self.running[name], time.perf_counter(), ""
        try:
            with deadline(self.end(model)):
                yield
        except (FitError, MissingPackageError) as error:
            note = " ".join(str(error).split())
        model.seconds += time.perf_counter() - began
        if note:
            del self.running[name]
            self.record(name, model, note)

    def end(self, model: Attempt) -> float:
        """The time (`time.perf_counter`) at which a model is stopped."""
        if not model.timed or self.budget is None:
            return torch.inf
        return min(model.end, self.began + SHARE_OF_SEARCH * self.budget)

    def needed(self, model: Attempt) -> float:
        """Seconds that a model needs after its first part, for the others and the last fit.

        Each of them takes as long as the first part did.
        """
        return model.seconds_of_first * len(self.parts)

    def best_timed(self) -> list[Attempt]:
        """The best models on the first part among those that the budget may stop.

        Models that are finished are not among them.
        """
        timed = [m for name, m in self.running.items() if m.timed and name not in self.found]
        return sorted(timed, key=lambda model: model.first)[:RESERVED_MODELS]

    def reserved(self) -> float:
        """Seconds that are kept for `best_timed`, and for the last fit of the best finished one."""
        needed = sum(self.needed(model) for model in self.best_timed())
        if self.found:
            best = min(self.found, key=lambda name: float(self.found[name].scores.mean()))
            needed += self.running[best].seconds_of_first
        return RESERVED_TIME * needed

    def affordable_parts(self) -> int:
        """The number of parts that `best_timed` can be run through within the budget.

        Without time for the fewest parts, only the best model counts; without time for it, too, the
        number of all parts is returned.
        """
        best, now = self.best_timed(), time.perf_counter()
        enough = sum(len(s.states) for s in self.parts[0][1]) >= STEPS_OF_ENOUGH
        least = 1 if enough else MIN_PARTS
        for models in (best, best[:1]):
            left = min((self.end(model) - now for model in models), default=torch.inf)
            first = sum(model.seconds_of_first for model in models)
            for count in range(len(self.parts), least - 1, -1):
                if first * count <= left:
                    return count
        return len(self.parts)

    def check_time(self, model: Attempt) -> None:
        """Raise a FitError if a model would not finish within the budget."""
        needed, left = self.needed(model), self.end(model) - time.perf_counter()
        if len(self.parts) > 1 and needed > left:
            raise FitError(
                f"stopped early: it needs {needed:.0f} s more, by its first part, and the budget "
                f"has {left:.0f} s left"
            )

    def record(self, name: str, model: Attempt, note: str) -> None:
        """Append the row of a model, and log its result."""
        scores = self.found[name].scores if name in self.found else torch.zeros(0)
        known = None if name not in self.found else float(scores.mean())
        self.rows.append(Row(name, known, deviation(scores), round(model.seconds, 2), note))
        log.info("held out: %s: %s", name, note or f"NMSE {known:.3g}")

    def table(self) -> list[Row]:
        """The results of all candidates, the best first."""
        return sorted(self.rows, key=lambda row: (row.nmse is None, row.nmse))


def mean_nmse(residuals: list[Tensor], scale: Float[Tensor, " d"]) -> float:
    """The mean of `nmse_of` over blocks."""
    return torch.stack([nmse_of(left, scale) for left in residuals]).mean().item()


def nmse_of(residuals: Float[Tensor, "t d"], scale: Float[Tensor, " d"]) -> Float[Tensor, ""]:
    """Mean squared residual over the variance, averaged over the components that vary."""
    return (residuals.square().mean(0) / scale)[scale > 0].mean()


def blocks_of(part: list[Recording]) -> list[Recording]:
    """Return at most `MAX_BLOCKS` blocks, spread evenly over a fold, or its short recordings.

    The beginning of a recording may be its only information about the state. A short recording is
    therefore run through from its first step, as new recordings are, unless the fold begins within
    it. There are as many short recordings as have the steps of `MAX_BLOCKS` long blocks together.
    """
    total = sum(len(s.states) for s in part)
    length = max(2, min(SHORT_BLOCK, total // MIN_BLOCKS), min(LONG_BLOCK, total // MAX_BLOCKS))
    whole = len(part) > 1 and all(len(s.states) <= 2 * SHORT_BLOCK for s in part)
    spans = [
        (s, k)
        for s in part
        for k in ([0] if whole else range(0, max(1, len(s.states) - length // 2), length))
    ]
    most = MAX_BLOCKS
    if whole:
        most = MAX_BLOCKS * LONG_BLOCK // max(len(s.states) for s in part)
    chosen = {round(i * (len(spans) - 1) / (most - 1)) for i in range(most)}
    return [
        piece(spans[i][0], spans[i][1], 2 * SHORT_BLOCK if whole else spans[i][1] + length)
        for i in sorted(chosen)
    ]


def run_blocks(filter: Filter[Any], part: list[Recording]) -> Iterator[Float[Tensor, "t d"]]:
    """Run a filter through the blocks of a fold; yield residuals z - m of `scored_states`."""
    blocks = blocks_of(part)
    generator = torch.Generator(blocks[0].states.device).manual_seed(0)
    runs = rollout_recordings(filter, blocks, generator=generator)
    for block, run in zip(blocks, runs, strict=True):
        z = scored_states(block)
        yield z - run.estimates[-len(z) :].double()


def scored_states(block: Recording) -> Float[Tensor, "t d"]:
    """Return the states of a block without its burn-in: the first fifth, at most 25 steps."""
    return block.states[min(25, len(block.states) // 5) :].double()


def deviation(scores: Float[Tensor, " s"]) -> float | None:
    """The standard error of a mean; None of fewer than two numbers."""
    return float(scores.std() / len(scores) ** 0.5) if len(scores) > 1 else None


def significantly_better(gains: Float[Tensor, " s"], errors: float) -> bool:
    """Whether gains are positive on average, by a one-sided t test.

    Its level is that of ``errors`` standard errors of a normal distribution. With few gains more
    of them are needed: 2.87 with five in place of 2.
    """
    from scipy.special import ndtr, stdtrit  # quantiles of Student's t

    if (error := deviation(gains)) is None:
        return False
    return float(gains.mean()) > error * float(stdtrit(len(gains) - 1, ndtr(errors)))
