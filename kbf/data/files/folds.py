"""`parts_of`: the splits that an argument ``cv`` stands for, as spans of recordings.

`without_near` removes the training steps next to a test block.
"""

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kbf.data.files.in_memory import numbers_of
from kbf.data.files.layout import FileRecording
from kbf.data.files.splits import Fold, split, where_known
from kbf.data.windows import Span

LEAVE_ONE_OUT = "leave_one_recording_out"


class Part(NamedTuple):
    """One split: spans of the recordings for training and for the test."""

    train: list[Span]
    test: list[Span]


def parts_of(recordings: list[FileRecording], cv: Any) -> list[Part]:
    """Return the splits of ``cv``, an argument of `cross_validate`, without a gap.

    Raises:
        ValueError: an unknown ``cv``, or a number of folds that is impossible.
    """
    names = [each.name for each in recordings]
    lengths = [len(each.obs) for each in recordings]
    if cv == LEAVE_ONE_OUT if isinstance(cv, str) else type(cv) is int:
        folds = len(recordings) if cv == LEAVE_ONE_OUT else int(cv)
        if folds < 2:
            raise ValueError(f"cv={cv!r}: at least 2 folds are needed, got {folds}")
        if folds > sum(lengths):
            raise ValueError(f"cv={cv!r}: there are only {sum(lengths)} rows")
        found = (split(names, lengths, "fold", 0.0, 0.2, Fold(k, folds)) for k in range(folds))
        return [Part(each["train"], each["test"]) for each in found]
    rows = numbers_of(recordings)
    pairs: Iterable[Any]
    if hasattr(cv, "split") and not isinstance(cv, str):
        order = torch.cat(rows).argsort()
        owner = torch.cat([torch.full((n,), k) for k, n in enumerate(lengths)])[order].numpy()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The groups parameter is ignored")
            pairs = list(cv.split(np.zeros((len(owner), 1)), np.zeros(len(owner)), owner))
    elif isinstance(cv, Iterable) and not isinstance(cv, str):
        pairs = cv
    else:
        raise ValueError(
            f"cv must be a number of folds, {LEAVE_ONE_OUT!r}, a splitter of scikit-learn, or "
            f"pairs of (train rows, test rows); got {cv!r}"
        )
    found = []
    for k, (train, test) in enumerate(pairs):
        chosen = [selected(each, sum(lengths), k) for each in (train, test)]
        if bool((chosen[0] & chosen[1]).any()):
            row = int((chosen[0] & chosen[1]).nonzero()[0, 0])
            raise ValueError(f"cv, fold {k}: row {row} is both a training and a test row")
        found.append(Part(*(spans_of(each, rows) for each in chosen)))
    if not found:
        raise ValueError("cv: there are no folds")
    return found


def selected(rows: Any, total: int, fold: int) -> Tensor:
    """Return which of all rows a part has, ``total`` bool, from their numbers or a mask.

    Raises:
        ValueError: numbers that are no rows, or a mask of another length.
    """
    given = np.asarray(rows)
    if given.dtype == bool and given.shape == (total,):
        return torch.from_numpy(given.copy())
    if given.ndim != 1 or given.dtype.kind not in "iu" or ((given < 0) | (given >= total)).any():
        raise ValueError(f"cv, fold {fold}: rows must be numbers from 0 to {total - 1}")
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.from_numpy(given.astype("int64"))] = True
    return chosen


def spans_of(chosen: Tensor, rows: list[Tensor]) -> list[Span]:
    """Return the rows of a part as spans of successive steps of the recordings."""
    whole = [Span(k, 0, len(each)) for k, each in enumerate(rows)]
    return where_known(whole, lambda k: chosen[rows[k]])


def without_near(part: Part, gap: int) -> list[Span]:
    """Return the training spans without the steps that are at most ``gap`` from a test step."""
    spans = part.train
    for k, start, stop in part.test:
        left = []
        for span in spans:
            if span.recording != k:
                left.append(span)
                continue
            left.append(span._replace(stop=min(span.stop, start - gap)))
            left.append(span._replace(start=max(span.start, stop + gap)))
        spans = [span for span in left if span.start < span.stop]
    return spans
