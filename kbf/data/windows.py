"""Pieces of recordings: splits, folds, and windows inside them. No piece crosses the end of a sequence."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from kbf.recording import Recording
from kbf.runtime.errors import FitError


class Span(NamedTuple):
    """Steps start, ..., stop - 1 of one sequence."""

    recording: int
    start: int
    stop: int


def cut(lengths: list[int], bounds: list[int]) -> list[list[Span]]:
    """Cut the steps of all sequences, laid one behind the other, at ``bounds``: the spans of each part.

    >>> cut([4, 3], [0, 5, 7])
    [[Span(recording=0, start=0, stop=4), Span(recording=1, start=0, stop=1)], [Span(recording=1,
    start=1, stop=3)]]
    """
    starts = [sum(lengths[:k]) for k in range(len(lengths))]
    parts = []
    for low, high in itertools.pairwise(bounds):
        spans = [
            Span(k, max(low - s, 0), min(high - s, n))
            for k, (s, n) in enumerate(zip(starts, lengths, strict=True))
        ]
        parts.append([span for span in spans if span.start < span.stop])
    return parts


def folds(lengths: list[int], count: int) -> list[list[Span]]:
    """``count`` contiguous chunks of equal size (to one step).

    Raises:
        ValueError: more folds than steps.
    """
    total = sum(lengths)
    if not 1 <= count <= total:
        raise FitError(f"{total} training steps cannot be cut into {count} folds")
    return cut(lengths, [round(total * k / count) for k in range(count + 1)])


# Share of the steps in one recording from which holding it out whole would leave too little.
MOST_OF_ALL = 2 / 3


def nearest_end(lengths: list[int], step: float) -> int:
    """Where to cut near ``step``: at the end of the recording that is nearest, or at it where one recording is nearly all.

    Models will be run on new recordings: a part of a recording says little of how they do there if
    they have learned from its rest.

    >>> nearest_end([4, 3, 5], 6.0), nearest_end([4, 3, 5], 11.0), nearest_end([12], 6.0)
    (7, 7, 6)
    """
    if len(lengths) < 2 or max(lengths) > MOST_OF_ALL * sum(lengths):
        return round(step)
    return min(itertools.accumulate(lengths[:-1]), key=lambda end: abs(end - step))


def whole_folds(lengths: list[int], count: int) -> list[list[Span]]:
    """At most ``count`` chunks of about equal size that end where recordings end (`nearest_end`).

    >>> whole_folds([4, 3, 5], 2)
    [[Span(recording=0, start=0, stop=4), Span(recording=1, start=0, stop=3)], [Span(recording=2,
    start=0, stop=5)]]

    Raises:
        ValueError: more folds than steps.
    """
    total = sum(lengths)
    if not 1 <= count <= total:
        raise FitError(f"{total} training steps cannot be cut into {count} folds")
    return cut(
        lengths,
        [0, *sorted({nearest_end(lengths, total * k / count) for k in range(1, count)}), total],
    )


def split(sequences: list[Recording], fraction: float) -> tuple[list[Recording], list[Recording]]:
    """Hold out the last ``fraction`` of all steps: (the part to fit, the part held out); the second is empty for fraction 0.

    Raises:
        ValueError: a fraction outside [0, 1), or too few steps to leave two in each part.
    """
    lengths = [len(s.states) for s in sequences]
    total = sum(lengths)
    held = round(fraction * total)
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction must be in [0, 1), got {fraction}")
    if fraction > 0 and (held < 2 or total - held < 2):
        raise FitError(
            f"holding out {fraction:g} of {total} training steps leaves {total - held} to fit and {held} to validate"
        )
    fit, rest = cut(lengths, [0, total - held, total])
    return take(sequences, fit), take(sequences, rest)


def hold_out(
    sequences: list[Recording], fraction: float
) -> tuple[list[Recording], list[Recording]]:
    """`split` where a recording ends, if that holds out between half and one and a half of what was asked for.

    No part of what is held out was learned from then, as far as a sequence is a recording.

    Raises:
        ValueError: as `split`.
    """
    total = sum(len(s.states) for s in sequences)
    held = round(fraction * total)
    ends = itertools.accumulate(
        len(s.states) for s in reversed(sequences[1:])
    )  # of the last recording, the last two, ...
    nearest = min(ends, key=lambda steps: (abs(steps - held), -steps), default=0)
    near = fraction < 1 and 2 <= nearest <= total - 2 and 0 < abs(nearest - held) <= held / 2
    return split(sequences, nearest / total if near else fraction)


def take(sequences: list[Recording], spans: list[Span]) -> list[Recording]:
    """The given spans as sequences of their own."""
    return [piece(sequences[k], start, stop) for k, start, stop in spans]


def without(sequences: list[Recording], spans: list[Span]) -> list[Recording]:
    """The memory without the given spans: what is left of each sequence, cut where a span was."""
    left = []
    for k, sequence in enumerate(sequences):
        edges = [0]
        for span in sorted(s for s in spans if s.recording == k):
            edges += [span.start, span.stop]
        edges.append(len(sequence.states))
        left += [
            piece(sequence, a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b
        ]
    return left


def windows(spans: list[Span], length: int, stride: int = 1) -> list[Span]:
    """All windows of ``length`` steps inside the spans, each starting ``stride`` steps after the one before."""
    return [
        Span(k, first, first + length)
        for k, start, stop in spans
        for first in range(start, stop - length + 1, stride)
    ]


def stack(sequences: list[Recording], spans: list[Span]) -> Recording:
    """Windows of one length as a batch ``b T``; it has a mask if any of their sequences has."""
    pieces = take(sequences, spans)
    mask = None
    if any(p.mask is not None for p in pieces):
        mask = torch.stack(
            [
                p.states.new_ones(len(p.states), dtype=torch.bool) if p.mask is None else p.mask
                for p in pieces
            ]
        )
    controls = (
        None
        if pieces[0].controls is None
        else torch.stack([p.controls for p in pieces if p.controls is not None])
    )
    return Recording(
        torch.stack([p.states for p in pieces]),
        torch.stack([p.obs for p in pieces]),
        mask,
        controls,
    )


def piece(sequence: Recording, start: int, stop: int) -> Recording:
    """Steps start, ..., stop - 1 of a sequence."""
    return Recording(*(None if leaf is None else leaf[start:stop] for leaf in sequence))  # pyright: ignore[reportArgumentType]


def first_steps(sequences: list[Recording], most: int) -> list[Recording]:
    """The first steps of each sequence, about ``most`` in all: a little of each says more than one or two whole."""
    total = sum(len(s.states) for s in sequences)
    return (
        [piece(s, 0, max(1, len(s.states) * most // total)) for s in sequences]
        if total > most
        else sequences
    )
