"""Which of several models is best: all run through the same held-out stretches of the training part, within a time one may set.

``model=auto`` (`kbf.commands.auto`) and the net under the default (`kbf.filters.selection.auto`)
both search by it: the same measure, the same table, the same reasons to give one up. They differ in
what they try, whole recipes there and plain estimators here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kbf.data.windows import piece
from kbf.filters.protocols import Filter
from kbf.filters.rollout import rollout
from kbf.filters.wrapper import CollectingCovariance
from kbf.recording import Recording, pad
from kbf.runtime.errors import FitError, MissingPackageError

log = logging.getLogger(__name__)

FEW, MOST, SHORT, LONG = 4, 8, 120, 1000
"""Stretches of each part that are run through, and steps in a stretch: `SHORT` are enough where `FEW` of them fill the part, but
what changes slowly shows itself in `LONG` ones alone."""
HOPELESS = 2.0
"""Times the error of another on the first fold from which a model is not tried on the rest."""
Fit = Callable[[list[Recording]], Filter[Any]]
Part = tuple[list[Recording], list[Recording]]
"""Recordings without a fold, to fit; and the fold."""
Held = Iterable[tuple[Tensor, Bool[Tensor, "t d"] | None]]
"""Of each stretch z - m ``t d``, and whether it is within 1.96 standard deviations (None without)."""


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
        residuals: ``t d`` for each stretch, z - m on the steps that count. folds: the fold of each
            stretch.
        scores: ``s``, the NMSE of each stretch, over the variance of all states.
        covered: share of states within 1.96 standard deviations; None for a filter without
            covariances.
    """

    filters: list[Filter[Any]]
    residuals: list[Tensor]
    folds: list[int]
    scores: Tensor
    covered: float | None


class Search:
    """Models that are fitted to the rest of each part and run through the part, one after the other.

    Attributes:
        found: by name, what could be run through all parts. rows: what was tried, in that order.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        scale: Float[Tensor, " d"],
        budget: float | None = None,
        began: float | None = None,
    ) -> None:
        """Where to look.

        Args:
            parts: (the rest, the part) of each. scale: the variance of the states.
            budget: seconds from ``began`` on (a `time.perf_counter`; None for now), or None for any
                time.
        """
        self.parts, self.scale, self.budget = parts, scale, budget
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
        """Try a model, and say what came of it.

        Args:
            name: for the table. fit: recordings -> a filter. prepare: called before. run: as
                `run_blocks`, in its place.
            timed: the budget may end it. compared: a first part that is hopeless beside another's
                may.
        """
        began, note = time.perf_counter(), ""
        left = (
            self.budget - (began - self.began) if timed and self.budget is not None else torch.inf
        )
        log.info("held out: %s", name)
        try:
            if left <= 0:
                raise FitError(f"not tried: the budget of {self.budget:g} s is spent")
            if prepare is not None:
                prepare()
            least = least_on_first(self.found) if compared else torch.inf
            self.found[name] = trial(fit, self.parts, self.scale, least, began + left, run)
        except (FitError, MissingPackageError) as error:
            note = " ".join(str(error).split())
        scores = self.found[name].scores if name in self.found else torch.zeros(0)
        known = None if name not in self.found else float(scores.mean())
        self.rows.append(
            Row(name, known, deviation(scores), round(time.perf_counter() - began, 2), note)
        )
        log.info("held out: %s has an NMSE of %.3g", name, float("nan") if known is None else known)

    def table(self) -> list[Row]:
        """What was tried, the best first."""
        return sorted(self.rows, key=lambda row: (row.nmse is None, row.nmse))


def least_on_first(found: dict[str, Trial]) -> float:
    """The least NMSE of any model on the first fold; infinite without one."""
    first = [
        each.scores[: each.folds.count(each.folds[0])].mean().item() for each in found.values()
    ]
    return min(first, default=torch.inf)


def trial(
    fit: Fit,
    parts: Sequence[Part],
    scale: Float[Tensor, " d"],
    least: float = torch.inf,
    until: float = torch.inf,
    run: Callable[[Filter[Any], list[Recording]], Held] | None = None,
) -> Trial:
    """Fit a model to the rest of each fold and run it through the fold's stretches.

    Args:
        fit: recordings -> a filter, as a model's ``fit``. parts: (the rest, the fold) of each.
        scale: the variance of the states.
        least: NMSE of another on the first fold: a model of more than `HOPELESS` times that is
            given up there.
        until: time (`time.perf_counter`) at which all is to be done: a model whose first fold says
            that it will not is given up.
        run: filter and fold -> what it did; None for `run_blocks`.

    Raises:
        ValueError: as ``fit``; estimates that are not finite; given up.
    """
    filters, residuals, places, covered = [], [], [], []
    began = time.perf_counter()
    for k, (rest, part) in enumerate(parts):
        filters.append(fit(rest))
        for left, inside in (run or run_blocks)(filters[-1], part):
            residuals.append(left)
            places.append(k)
            covered += [] if inside is None else [inside.double().mean()]
        if k > 0 or len(parts) == 1:
            continue
        if not (first := mean_nmse(residuals, scale)) <= HOPELESS * least:
            raise FitError(
                f"given up: an NMSE of {first:.3g} on the first part, where another has {least:.3g}"
            )
        taken = time.perf_counter() - began
        if began + taken * len(parts) > until:
            raise FitError(
                f"given up: {taken * len(parts):.0f} s by its first part, and the budget has {until - began:.0f} s left"
            )
    scores = torch.stack([nmse_of(left, scale) for left in residuals])
    if not bool(scores.isfinite().all()):
        raise FitError("it lost itself on held-out stretches: an estimate is not finite")
    return Trial(
        filters, residuals, places, scores, float(torch.stack(covered).mean()) if covered else None
    )


def mean_nmse(residuals: list[Tensor], scale: Float[Tensor, " d"]) -> float:
    """`nmse_of` stretches, averaged."""
    return torch.stack([nmse_of(left, scale) for left in residuals]).mean().item()


def nmse_of(residuals: Float[Tensor, "t d"], scale: Float[Tensor, " d"]) -> Float[Tensor, ""]:
    """Mean squared residual over the variance, averaged over the components that vary."""
    return (residuals.square().mean(0) / scale)[scale > 0].mean()


def blocks_of(part: list[Recording]) -> list[Recording]:
    """At most `MOST` stretches, evenly over a fold, of at most `LONG` steps; where it is of several short recordings, these.

    How a recording begins may be all that tells where the state is: a short one is run through as
    long as it lies in the fold, from its beginning, as it will be later, unless the fold begins
    within it.
    """
    total = sum(len(s.states) for s in part)
    length = max(2, min(SHORT, total // FEW), min(LONG, total // MOST))
    whole = len(part) > 1 and all(len(s.states) <= 2 * SHORT for s in part)
    spans = [
        (s, k)
        for s in part
        for k in ([0] if whole else range(0, max(1, len(s.states) - length // 2), length))
    ]
    chosen = {round(i * (len(spans) - 1) / (MOST - 1)) for i in range(MOST)}
    return [
        piece(spans[i][0], spans[i][1], 2 * SHORT if whole else spans[i][1] + length)
        for i in sorted(chosen)
    ]


def run_blocks(
    filter: Filter[Any], part: list[Recording]
) -> Iterator[tuple[Tensor, Bool[Tensor, "t d"] | None]]:
    """Run a filter through the stretches of a part: of each z - m ``t d``, and whether it is within 1.96 standard deviations.

    The first fifth of a stretch, at most 25 steps, does not count: the filter does not know yet
    where it is.
    """
    blocks = blocks_of(part)
    batch = pad(blocks)
    whole = all(s.mask is None and len(s.states) == batch.states.shape[1] for s in blocks)
    ratio_dim = CollectingCovariance(filter)
    generator = torch.Generator(batch.states.device).manual_seed(0)
    mask = None if whole else batch.mask
    found = rollout(ratio_dim, batch.obs, mask=mask, controls=batch.controls, generator=generator)
    spread = found.diagnostics.get(CollectingCovariance.NAME)
    for k, block in enumerate(blocks):
        steps = len(block.states)
        first = min(25, steps // 5)
        left = block.states[first:].double() - found.estimates[k, first:steps].double()
        std = (
            None
            if spread is None
            else spread[k, first:steps].diagonal(dim1=-2, dim2=-1).double().clamp_min(0).sqrt()
        )
        yield left, None if std is None else left.abs() <= 1.96 * std


def deviation(scores: Float[Tensor, " s"]) -> float | None:
    """The standard error of a mean; None of fewer than two numbers."""
    return float(scores.std() / len(scores) ** 0.5) if len(scores) > 1 else None


def significantly_better(gains: Float[Tensor, " s"], errors: float) -> bool:
    """Whether gains are positive on average, by so many standard errors."""
    error = deviation(gains)
    return error is not None and float(gains.mean()) > errors * error
