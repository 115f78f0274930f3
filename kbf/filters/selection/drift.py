"""How far back a recording is worth learning from: where its sensors or its motion drift, what is old misleads.

Parts that are held out in the middle of a recording cannot tell: what came after them was learned
from, too. `newest` therefore holds out the end, and asks whether a regression of the states on a
window of observations errs less there if it has learned from the newest steps before it alone.
Ridge regression on a window is asked first, since it costs next to nothing; but where states move
slowly a plane that is fitted nearby is better than one that is fitted everywhere, drift or not, and
so a model that bends must say the same. Several recordings are held out and left out whole: that
one differs from another is no drift.

References: Gama et al. (2014), A survey on concept drift adaptation, of windows that are chosen by
error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.data.windows import cut, nearest_end, take
from kbf.filters.selection.cross_validation import nmse_of, run_blocks, significantly_better
from kbf.recording import Recording
from kbf.runtime.errors import FitError

log = logging.getLogger(__name__)

HELD_OUT = 0.2
"""Share of the steps, the last ones, that is held out."""
SHARES = (0.5, 0.25, 0.125)
"""Of the steps before them, the newest: what is tried beside all of them."""
LEAST = 400
"""Steps that are kept, at least."""
SURE = 2.0
"""Standard errors over stretches by which the newest steps must be better than all."""


def last_steps(sequences: list[Recording], count: int) -> list[Recording]:
    """The last ``count`` steps of all; all of them where there are no more, or for a count of 0."""
    lengths = [len(s.states) for s in sequences]
    total = sum(lengths)
    return (
        take(sequences, cut(lengths, [total - count, total])[0]) if 0 < count < total else sequences
    )


def newest(sequences: list[Recording], judges: Iterable[Any]) -> int:
    """How many of the last steps to learn from: 0 for all, unless every judge is `SURE` that all are worse.

    Args:
        sequences: the recordings, in the order of time.
        judges: models (``prepare``, ``fit``). The first says how many, those behind it whether they
            agree.
    """
    lengths = [len(s.states) for s in sequences]
    total = sum(lengths)
    if total < LEAST:
        return 0
    end = nearest_end(lengths, (1 - HELD_OUT) * total)
    before, last = (take(sequences, spans) for spans in cut(lengths, [0, end, total]))
    scale = torch.cat([s.states for s in sequences]).double().var(0, correction=0)
    kept = {
        end - nearest_end([len(s.states) for s in before], (1 - share) * end) for share in SHARES
    }
    counts = sorted(count for count in kept if count >= LEAST)
    for model in judges:
        if not counts:
            return 0
        try:
            model.prepare(before)
            scores = {n: errors_of(model, last_steps(before, n), last, scale) for n in (0, *counts)}
        except FitError:  # too few steps
            return 0
        better = [n for n in counts if significantly_better(scores[0] - scores[n], SURE)]
        counts = [min(better, key=lambda n: float(scores[n].mean()))] if better else []
    if counts:
        log.info(
            "what is older than the last %d of %d steps misleads: it is left out", counts[0], end
        )
    return counts[0] if counts else 0


@torch.no_grad()
def errors_of(
    model: Any, memory: list[Recording], last: list[Recording], scale: Float[Tensor, " d"]
) -> Float[Tensor, " s"]:
    """The NMSE of each held-out stretch of a model that has learned from ``memory``."""
    return torch.stack([nmse_of(left, scale) for left, _ in run_blocks(model.fit(memory), last)])
