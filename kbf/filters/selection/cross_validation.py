"""Blocked cross-validation of several models within a time budget.

``model=auto`` (`kbf.commands.auto`) and `kbf.filters.selection.auto` share its score, its table and
its rules for stopping early. The candidates of the former are training recipes, those of the latter
models without training.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
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
# Most blocks of each fold that are filtered.
MAX_BLOCKS = 8
# Steps of a block of a short fold.
SHORT_BLOCK = 120
# Most steps of a block: slow changes are visible in long blocks alone.
LONG_BLOCK = 1000
# Times the error of another model on the first fold above which a model is stopped early.
HOPELESS = 2.0
Fit = Callable[[list[Recording]], Filter[Any]]
# Recordings without a fold, to fit; and the fold.
Part = tuple[list[Recording], list[Recording]]
# Of each block z - m ``t d``, and whether it is within 1.96 standard deviations (None without).
Held = Iterable[tuple[Tensor, Bool[Tensor, "t d"] | None]]


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
        covered: share of states within 1.96 standard deviations; None for a filter without
            covariances.
    """

    filters: list[Filter[Any]]
    residuals: list[Tensor]
    folds: list[int]
    scores: Tensor
    covered: float | None


class Search:
    """Cross-validates models one after the other.

    Each model is fitted to the rest of each part and run through the part.

    Attributes:
        found: results by name, of models that could be run through all parts.
        rows: results of all candidates, in their order.
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
            budget: seconds from ``began`` on (a `time.perf_counter`; None for now), or None for any
                time.
        """
        self.parts: Sequence[Part] = parts
        self.scale: Tensor = scale
        self.budget: float | None = budget
        self.began: float = time.perf_counter() if began is None else began
        self.found: dict[str, Trial] = {}
        self.rows: list[Row] = []

    def attempt(
        self,
        name: str,
        fit: Fit,
        *,
        prepare: Callable[[], Any] | None = None,
        timed: bool = True,
        compared: bool = True,
        run: Callable[[Filter[Any], list[Recording]], Held] | None = None,
    ) -> None:
        """Cross-validate a model and record the result in `rows`.

        Args:
            name: of the model, for the table.
            fit: recordings -> a filter.
            prepare: called before.
            timed: whether the budget may stop it.
            compared: whether a first fold that is much worse than another model's stops it.
            run: used in place of `run_blocks`.
        """
        began, note = time.perf_counter(), ""
        left = (
            self.budget - (began - self.began) if timed and self.budget is not None else torch.inf
        )
        log.info("held out: %s", name)
        try:
            if left <= 0:
                raise FitError(f"not started: the budget of {self.budget:g} s is spent")
            with deadline(began + left):
                if prepare is not None:
                    prepare()
                least = least_on_first(self.found) if compared else torch.inf
                self.found[name] = trial(
                    fit, self.parts, self.scale, least, began + left, run, f"held out: {name}"
                )
        except (FitError, MissingPackageError) as error:
            note = " ".join(str(error).split())
        scores = self.found[name].scores if name in self.found else torch.zeros(0)
        known = None if name not in self.found else float(scores.mean())
        self.rows.append(
            Row(name, known, deviation(scores), round(time.perf_counter() - began, 2), note)
        )
        log.info("held out: %s has an NMSE of %.3g", name, float("nan") if known is None else known)

    def table(self) -> list[Row]:
        """The results of all candidates, the best first."""
        return sorted(self.rows, key=lambda row: (row.nmse is None, row.nmse))


def least_on_first(found: dict[str, Trial]) -> float:
    """The least NMSE of any model on the first fold; infinite without one."""
    return min(
        [each.scores[: each.folds.count(each.folds[0])].mean().item() for each in found.values()],
        default=torch.inf,
    )


def trial(
    fit: Fit,
    parts: Sequence[Part],
    scale: Float[Tensor, " d"],
    least: float = torch.inf,
    until: float = torch.inf,
    run: Callable[[Filter[Any], list[Recording]], Held] | None = None,
    title: str = "held out",
) -> Trial:
    """Fit a model to the rest of each fold and run it through the fold's blocks.

    Args:
        fit: recordings -> a filter, as a model's ``fit``. parts: (the rest, the fold) of each.
        scale: the variance of the states.
        least: NMSE of another model on the first fold; a model with more than `HOPELESS` times that
            is stopped early.
        until: time (`time.perf_counter`) of the deadline; a model that would not finish, by the
            time of its first fold, is stopped early.
        run: filter and fold -> residuals; None for `run_blocks`.
        title: of the messages about progress.

    Raises:
        ValueError: as ``fit``; estimates that are not finite; stopped early.
    """
    filters, residuals, places, covered = [], [], [], []
    began = time.perf_counter()
    for k, (rest, part) in enumerate(parts):
        log.info("%s, fold %d of %d", title, k + 1, len(parts))
        filters.append(fit(rest))
        for left, inside in (run or run_blocks)(filters[-1], part):
            residuals.append(left)
            places.append(k)
            covered += [] if inside is None else [inside.double().mean()]
        if k > 0 or len(parts) == 1:
            continue
        if not (first := mean_nmse(residuals, scale)) <= HOPELESS * least:
            raise FitError(
                f"stopped early: an NMSE of {first:.3g} on the first part, "
                f"where another model has {least:.3g}"
            )
        taken = time.perf_counter() - began
        needed = taken * (len(parts) + 1)  # and the fit to all recordings
        if began + needed > until:
            raise FitError(
                f"stopped early: {needed:.0f} s by its first part, and the budget has "
                f"{until - began:.0f} s left"
            )
    scores = torch.stack([nmse_of(left, scale) for left in residuals])
    if not bool(scores.isfinite().all()):
        raise FitError("it diverged on a held-out block: an estimate is not finite")
    return Trial(
        filters, residuals, places, scores, float(torch.stack(covered).mean()) if covered else None
    )


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
    it.
    """
    total = sum(len(s.states) for s in part)
    length = max(2, min(SHORT_BLOCK, total // MIN_BLOCKS), min(LONG_BLOCK, total // MAX_BLOCKS))
    whole = len(part) > 1 and all(len(s.states) <= 2 * SHORT_BLOCK for s in part)
    spans = [
        (s, k)
        for s in part
        for k in ([0] if whole else range(0, max(1, len(s.states) - length // 2), length))
    ]
    chosen = {round(i * (len(spans) - 1) / (MAX_BLOCKS - 1)) for i in range(MAX_BLOCKS)}
    return [
        piece(spans[i][0], spans[i][1], 2 * SHORT_BLOCK if whole else spans[i][1] + length)
        for i in sorted(chosen)
    ]


def run_blocks(
    filter: Filter[Any], part: list[Recording]
) -> Iterator[tuple[Tensor, Bool[Tensor, "t d"] | None]]:
    """Run a filter through the blocks of a fold and yield the residuals z - m ``t d`` of each.

    Also yields whether they are within 1.96 standard deviations, None without covariances.

    The first fifth of a block, at most 25 steps, is a burn-in that is not scored.
    """
    blocks = blocks_of(part)
    generator = torch.Generator(blocks[0].states.device).manual_seed(0)
    runs = rollout_recordings(filter, blocks, covariances=True, generator=generator)
    for block, run in zip(blocks, runs, strict=True):
        first = min(25, len(block.states) // 5)
        left = block.states[first:].double() - run.estimates[first:].double()
        if run.covariances is None:
            yield left, None
        else:
            variance = run.covariances[first:].diagonal(dim1=-2, dim2=-1).double().clamp_min(0)
            yield left, left.abs() <= 1.96 * variance.sqrt()


def deviation(scores: Float[Tensor, " s"]) -> float | None:
    """The standard error of a mean; None of fewer than two numbers."""
    return float(scores.std() / len(scores) ** 0.5) if len(scores) > 1 else None


def significantly_better(gains: Float[Tensor, " s"], errors: float) -> bool:
    """Whether gains are positive on average, by so many standard errors."""
    error = deviation(gains)
    return error is not None and float(gains.mean()) > errors * error
