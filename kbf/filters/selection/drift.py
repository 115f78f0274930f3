"""Drift detection: selects how much of the most recent data to train on.

Folds in the middle of a recording do not detect drift, since later steps are in the training data.
`newest` holds out the end and compares a regression of the states on a window of observations that
is fitted to all previous steps with one that is fitted to the most recent of them.

Ridge regression on a window is evaluated first, since it costs little. If states change slowly, a
linear map that is fitted locally is better than one that is fitted globally, with or without drift;
a nonlinear model must therefore confirm the result. Of several recordings whole ones are held out
and left out: differences between recordings are not drift.

References: Gama et al. (2014), A survey on concept drift adaptation, on windows that are selected
by error.
"""

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

log: logging.Logger = logging.getLogger(__name__)

# Share of the steps, the last ones, that is held out.
HELD_OUT = 0.2
# Lengths of the most recent window that are evaluated in addition to the full history.
SHARES = (0.5, 0.25, 0.125)
# Steps that are kept, at least.
MIN_STEPS_KEPT = 400
# Level of the t test over blocks by which a recent window must be better than the full history, in
# standard errors of a normal distribution.
MIN_STD_ERRORS = 2.0


def last_steps(recordings: list[Recording], count: int) -> list[Recording]:
    """The last ``count`` steps of all recordings; all steps for a count of 0."""
    lengths = [len(s.states) for s in recordings]
    total = sum(lengths)
    return (
        take(recordings, cut(lengths, [total - count, total])[0])
        if 0 < count < total
        else recordings
    )


def newest(recordings: list[Recording], judges: Iterable[Any]) -> int:
    """Return the number of most recent steps to train on; 0 for all.

    It is 0 unless every judge finds the full history significantly worse.

    Args:
        recordings: the recordings, in the order of time.
        judges: models (``prepare``, ``fit``). The first selects the number of steps, the
            others must confirm it.
    """
    lengths = [len(s.states) for s in recordings]
    total = sum(lengths)
    if total < MIN_STEPS_KEPT:
        return 0
    end = nearest_end(lengths, (1 - HELD_OUT) * total)
    before, last = (take(recordings, spans) for spans in cut(lengths, [0, end, total]))
    scale = torch.cat([s.states for s in recordings]).double().var(0, correction=0)
    kept = {
        end - nearest_end([len(s.states) for s in before], (1 - share) * end) for share in SHARES
    }
    counts = sorted(count for count in kept if count >= MIN_STEPS_KEPT)
    for model in judges:
        if not counts:
            return 0
        try:
            model.prepare(before)
            scores = {n: errors_of(model, last_steps(before, n), last, scale) for n in (0, *counts)}
        except FitError:  # too few steps
            return 0
        better = [n for n in counts if significantly_better(scores[0] - scores[n], MIN_STD_ERRORS)]
        counts = [min(better, key=lambda n: float(scores[n].mean()))] if better else []
    if not counts:
        return 0
    count = total - nearest_end(lengths, float(total - counts[0]))  # whole ones of several
    log.info("drift: only the last %d of %d steps are used for training", count, total)
    return count


@torch.no_grad()
def errors_of(
    model: Any, memory: list[Recording], last: list[Recording], scale: Float[Tensor, " d"]
) -> Float[Tensor, " s"]:
    """The NMSE of a model fitted to ``memory`` on each held-out block."""
    return torch.stack([nmse_of(left, scale) for left in run_blocks(model.fit(memory), last)])
