"""Pieces of recordings: splits, folds and windows. No piece crosses the end of a recording."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from kbf.recording import Recording
from kbf.rkhs.linalg import evenly
from kbf.runtime.errors import FitError

# Held-out blocks that the candidates for a setting filter.
MAX_BLOCKS = 8
# Steps of a held-out block.
MAX_BLOCK_LENGTH = 100
# Recordings that represent the others, see `some_of_each`.
MIN_WHOLE_RECORDINGS = 10


class Span(NamedTuple):
    """Steps start, ..., stop - 1 of one recording."""

    recording: int
    start: int
    stop: int


def cut(lengths: list[int], bounds: list[int]) -> list[list[Span]]:
    """Splits the concatenated steps at ``bounds``; returns the spans of each part.

    >>> first, second = cut([4, 3], [0, 5, 7])
    >>> first
    [Span(recording=0, start=0, stop=4), Span(recording=1, start=0, stop=1)]
    >>> second
    [Span(recording=1, start=1, stop=3)]
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
    """Returns ``count`` contiguous chunks of equal size (up to one step).

    Raises:
        ValueError: more folds than steps.
    """
    total = sum(lengths)
    if not 1 <= count <= total:
        raise FitError(f"{total} training steps cannot be cut into {count} folds")
    return cut(lengths, [round(total * k / count) for k in range(count + 1)])


def held_by(lengths: list[int], members: int) -> list[Tensor]:
    """Return for each step of each recording the encoder that is not trained on it.

    The members of an encoding have one contiguous chunk each.
    """
    held = [torch.zeros(n, dtype=torch.long) for n in lengths]
    for k, spans in enumerate(folds(lengths, members)):
        for span in spans:
            held[span.recording][span.start : span.stop] = k
    return held


# Share of all steps in one recording above which it is split: the rest would be too small.
DOMINANT_SHARE = 2 / 3


def nearest_end(lengths: list[int], step: float) -> int:
    """Returns the end of a recording nearest to ``step``, or ``step`` if one recording dominates.

    Models are applied to new recordings: errors on a part of a recording are too optimistic if the
    model was trained on its rest.

    >>> nearest_end([4, 3, 5], 6.0), nearest_end([4, 3, 5], 11.0), nearest_end([12], 6.0)
    (7, 7, 6)
    """
    if len(lengths) < 2 or max(lengths) > DOMINANT_SHARE * sum(lengths):
        return round(step)
    return min(itertools.accumulate(lengths[:-1]), key=lambda end: abs(end - step))


def whole_folds(lengths: list[int], count: int) -> list[list[Span]]:
    """Returns at most ``count`` chunks of similar size that end with recordings (`nearest_end`).

    >>> first, second = whole_folds([4, 3, 5], 2)
    >>> first
    [Span(recording=0, start=0, stop=4), Span(recording=1, start=0, stop=3)]
    >>> second
    [Span(recording=2, start=0, stop=5)]

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


def split(recordings: list[Recording], fraction: float) -> tuple[list[Recording], list[Recording]]:
    """Holds out the last ``fraction`` of all steps; returns the rest and the held-out part.

    Raises:
        ValueError: a fraction outside [0, 1), or too few steps to leave two in each part.
    """
    lengths = [len(s.states) for s in recordings]
    total = sum(lengths)
    held = round(fraction * total)
    if not 0 <= fraction < 1:
        raise ValueError(f"the validation fraction must be in [0, 1), got {fraction}")
    if fraction > 0 and (held < 2 or total - held < 2):
        raise FitError(
            f"holding out {fraction:g} of {total} training steps leaves {total - held} to fit "
            f"and {held} to validate"
        )
    fit, rest = cut(lengths, [0, total - held, total])
    return take(recordings, fit), take(recordings, rest)


def hold_out(
    recordings: list[Recording], fraction: float
) -> tuple[list[Recording], list[Recording]]:
    """`split` at the end of a recording, if that holds out 50 to 150 % of the requested steps.

    Then the held-out part contains only recordings that are not trained on.

    Raises:
        ValueError: see `split`.
    """
    total = sum(len(s.states) for s in recordings)
    held = round(fraction * total)
    ends = itertools.accumulate(
        len(s.states) for s in reversed(recordings[1:])
    )  # of the last recording, the last two, ...
    nearest = min(ends, key=lambda steps: (abs(steps - held), -steps), default=0)
    near = fraction < 1 and 2 <= nearest <= total - 2 and 0 < abs(nearest - held) <= held / 2
    return split(recordings, nearest / total if near else fraction)


def take(recordings: list[Recording], spans: list[Span]) -> list[Recording]:
    """Returns the spans as separate recordings."""
    return [piece(recordings[k], start, stop) for k, start, stop in spans]


def without(recordings: list[Recording], spans: list[Span]) -> list[Recording]:
    """Returns the recordings without the given spans, split where a span was removed."""
    left = []
    for k, recording in enumerate(recordings):
        edges = [0]
        for span in sorted(s for s in spans if s.recording == k):
            edges += [span.start, span.stop]
        edges.append(len(recording.states))
        left += [
            piece(recording, a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b
        ]
    return left


def common_length(lengths: list[int]) -> int:
    """Returns the largest length such that half of all steps are in recordings as long as that.

    >>> common_length([5, 40, 50, 60])
    50
    """
    steps = itertools.accumulate(ordered := sorted(lengths, reverse=True))
    return next(n for n, total in zip(ordered, steps, strict=True) if 2 * total >= sum(lengths))


def windows(spans: list[Span], length: int, stride: int = 1) -> list[Span]:
    """Returns all windows of ``length`` steps inside the spans, ``stride`` steps apart."""
    return [
        Span(k, first, first + length)
        for k, start, stop in spans
        for first in range(start, stop - length + 1, stride)
    ]


def stack(recordings: list[Recording], spans: list[Span]) -> Recording:
    """Stacks windows of one length to a batch ``b T``, with a mask if any window has one."""
    pieces = take(recordings, spans)
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


def piece(recording: Recording, start: int, stop: int | None) -> Recording:
    """Returns steps start, ..., stop - 1 of a recording; a negative start counts from its end."""
    return Recording(*(None if leaf is None else leaf[start:stop] for leaf in recording))  # pyright: ignore[reportArgumentType]


def first_steps(recordings: list[Recording], most: int) -> list[Recording]:
    """Returns the first steps of each recording, about ``most`` in all.

    Parts of all recordings represent the data better than a few whole ones.
    """
    total = sum(len(s.states) for s in recordings)
    return (
        [piece(s, 0, max(1, len(s.states) * most // total)) for s in recordings]
        if total > most
        else recordings
    )


def some_of_each(recordings: list[Recording], most: int) -> list[Recording]:
    """Returns about ``most`` steps: evenly spaced recordings, or the last steps of each.

    Recordings are taken whole if there are then at least `MIN_WHOLE_RECORDINGS`.
    """
    total = sum(len(s.states) for s in recordings)
    if total <= most:
        return recordings
    count = len(recordings) * most // total
    if count >= MIN_WHOLE_RECORDINGS:
        return [recordings[i] for i in evenly(len(recordings), count).tolist()]
    return [piece(s, -max(1, len(s.states) * most // total), None) for s in recordings]


def held_out_blocks(held: list[Recording]) -> list[Recording]:
    """Returns evenly spaced blocks of held-out recordings.

    At most `MAX_BLOCKS` of at most `MAX_BLOCK_LENGTH` steps, and at least ten.
    """
    spans = [(s, k) for s in held for k in range(0, len(s.states) - 9, MAX_BLOCK_LENGTH)]
    chosen = [spans[i] for i in evenly(len(spans), MAX_BLOCKS).tolist()]
    return [piece(s, k, min(k + MAX_BLOCK_LENGTH, len(s.states))) for s, k in chosen]
