"""Training, validation and test splits of recordings, by recording or by time, without overlap.

Single splits have shares; folds of a cross-validation have a number.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kbf.data.windows import Span

# Size of a part: a share, or the names of its recordings; for the test part also ``all``.
Share = float | int | str | list[str]

# Recordings that the name of a part has; tables have a column for it.
MOST_NAMES = 5

# Ways to split that have folds.
FOLDED = ("fold", "blocks", "recording")


class Fold(NamedTuple):
    """One fold of a cross-validation.

    Attributes:
        number: from 0 to folds - 1. folds: how many there are.
        gap: steps on each side of a test block that are not trained on.
    """

    number: int
    folds: int
    gap: int = 0


def fold_of(how: str, number: object, count: object, gap: Callable[[], int]) -> Fold | None:
    """Returns the fold of the settings of a data set; None for a single split.

    Args:
        how: ``data.split``. number: ``data.fold``. count: ``data.folds``.
        gap: returns the steps on each side of a test block; called for blocks only.

    Raises:
        ValueError: a number or a count that is missing or impossible.
    """
    if number is None and how not in ("fold", "blocks"):
        return None
    if how not in FOLDED:
        raise ValueError(f"data.fold needs data.split=fold, blocks or recording, got {how!r}")
    if type(count) is not int or count < 2:
        raise ValueError(f"data.folds must be the number of folds, at least 2, got {count!r}")
    if type(number) is not int or not 0 <= number < count:
        raise ValueError(f"data.fold must be a number from 0 to {count - 1}, got {number!r}")
    steps = 0 if how == "recording" else gap()
    if type(steps) is not int or steps < 0:
        raise ValueError(f"data.gap must be a number of steps, got {steps!r}")
    return Fold(number, count, steps)


def split(
    names: list[str],
    lengths: list[int],
    how: str,
    validation: Share,
    test: Share,
    fold: Fold | None = None,
) -> dict[str, list[Span]]:
    """Returns the spans of ``train``, ``validation`` and ``test``.

    By time, the last share of *each* recording is the test part, and the validation part precedes
    it. By recording, the last recordings are the test part and those before them the validation
    part, unless they are named. A share of 0 is an empty part.

    With a fold k of N, the test part is the k-th of N groups of successive recordings; for
    ``blocks``, and for ``fold`` if there are fewer than N recordings, it is the k-th of N blocks of
    each recording (`blocks`). ``test`` has no effect then.

    Raises:
        ValueError: invalid shares, an empty training part, or names that are unknown or in both
            parts.
    """
    whole = [Span(k, 0, length) for k, length in enumerate(lengths)]
    if test == "all":
        return {"train": [], "validation": [], "test": whole}
    if how not in ("time", *FOLDED):
        raise ValueError(
            f"data.split must be time or recording (folds: fold or blocks), got {how!r}"
        )
    if fold is not None:
        if how == "blocks" or (how == "fold" and len(names) < fold.folds):
            return blocks(lengths, fold, share_of("validation", validation))
        if len(names) < fold.folds:
            raise ValueError(
                f"data.split=recording: {len(names)} recordings cannot be {fold.folds} folds; "
                "data.split=blocks makes blocks of time of each recording"
            )
        first, end = (len(names) * k // fold.folds for k in (fold.number, fold.number + 1))
        return by_recording(names, whole, validation, names[first:end])
    if how == "recording" or isinstance(test, list) or isinstance(validation, list):
        return by_recording(names, whole, validation, test)
    v, t = share_of("validation", validation), share_of("test", test)
    if v + t >= 1:
        raise ValueError(
            f"data.test and data.validation must leave training steps: got {t:g} and {v:g}"
        )
    parts: dict[str, list[Span]] = {"train": [], "validation": [], "test": []}
    for k, length in enumerate(lengths):
        first_test = length - round(t * length)
        first_held = first_test - round(v * length)
        for part, start, stop in (
            ("train", 0, first_held),
            ("validation", first_held, first_test),
            ("test", first_test, length),
        ):
            if start < stop:
                parts[part].append(Span(k, start, stop))
    return parts


def blocks(lengths: list[int], fold: Fold, validation: float) -> dict[str, list[Span]]:
    """Returns the split whose test part is one block of each recording.

    A recording of n steps has N contiguous blocks; the steps before and after block k are two
    spans of the training part, without those next to the block (`Fold.gap`). The last share of
    each span is the validation part.

    >>> parts = blocks([10], Fold(number=1, folds=5, gap=1), 0.0)
    >>> parts["train"], parts["test"]
    ([Span(recording=0, start=0, stop=1), Span(recording=0, start=5, stop=10)], \
[Span(recording=0, start=2, stop=4)])
    """
    parts: dict[str, list[Span]] = {"train": [], "validation": [], "test": []}
    for k, length in enumerate(lengths):
        start, stop = (length * j // fold.folds for j in (fold.number, fold.number + 1))
        found = {"train": [], "validation": [], "test": [Span(k, start, stop)]}
        for low, high in ((0, start - fold.gap), (stop + fold.gap, length)):
            held = high - round(validation * max(0, high - low))
            found["train"].append(Span(k, low, held))
            found["validation"].append(Span(k, held, high))
        for part, spans in found.items():
            parts[part] += [span for span in spans if span.start < span.stop]
    return parts


def correlation_time(states: Sequence[Tensor]) -> int:
    r"""Returns the number of steps after which the states are hardly correlated.

    This is the first lag :math:`l` at which the autocorrelation of each column is at most 1/e:
    :math:`\rho(l) = \sum_t z_t z_{t+l} / \sum_t z_t^2`, where the sums are over all recordings and
    :math:`z` is the column minus its mean over the recording. Unknown states (NaN) do not count.

    Args:
        states: ``T d`` of each recording.

    >>> correlation_time([torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])])
    1
    """
    longest = max(map(len, states))
    size = 2 ** math.ceil(math.log2(2 * longest))
    power = torch.zeros(size // 2 + 1, states[0].shape[1], dtype=torch.float64)
    for each in states:
        centred = (each.double() - each.double().nanmean(0)).nan_to_num()
        power += torch.fft.rfft(centred, size, dim=0).abs().square()
    sums = torch.fft.irfft(power, size, dim=0)[:longest]
    low = sums <= sums[0] / math.e
    return int(torch.where(low.any(0), low.int().argmax(0), longest).max())


def described(spans: list[Span], names: list[str], lengths: list[int]) -> str:
    """Returns the names of the recordings of a part, with the steps where they are not whole.

    >>> described([Span(0, 0, 9), Span(1, 3, 6)], ["a", "b"], [9, 9])
    'a, b 3-5'
    """
    texts = [
        names[k] if stop - start == lengths[k] else f"{names[k]} {start}-{stop - 1}"
        for k, start, stop in spans
    ]
    more = f" and {len(texts) - MOST_NAMES} more" if len(texts) > MOST_NAMES else ""
    return ", ".join(texts[:MOST_NAMES]) + more


def by_recording(
    names: list[str], whole: list[Span], validation: Share, test: Share
) -> dict[str, list[Span]]:
    """Assigns whole recordings to the parts."""
    chosen: dict[str, list[str]] = {}
    asked = {"test": test, "validation": validation}
    named = {
        part: [str(v) for v in value] for part, value in asked.items() if isinstance(value, list)
    }
    for part, wanted in named.items():
        if unknown := [name for name in wanted if name not in names]:
            raise ValueError(
                f"data.{part}: there is no recording {unknown[0]!r}; "
                f"there are {', '.join(names[:20])}"
            )
    if both := set(named.get("test", [])) & set(named.get("validation", [])):
        raise ValueError(f"data.test and data.validation both name {sorted(both)[0]!r}")
    free = [name for name in names if not any(name in wanted for wanted in named.values())]
    for part, value in asked.items():
        if isinstance(value, list):
            chosen[part] = named[part]
            continue
        share = share_of(part, value)
        count = max(1, round(share * len(names))) if share > 0 else 0
        chosen[part], free = free[len(free) - count :], free[: max(0, len(free) - count)]
    if not free or (test != 0 and not chosen["test"]):
        held = f"{len(chosen['validation'])} for validation, {len(chosen['test'])} for the test"
        raise ValueError(
            f"data.split=recording leaves a part empty ({len(names)} recordings: {len(free)} for "
            f"training, {held}); data.split=time splits each recording instead"
        )
    return {
        part: [span for span in whole if names[span.recording] in wanted]
        for part, wanted in {"train": free, **chosen}.items()
    }


def share_of(part: str, value: object) -> float:
    """Returns the share, a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"data.{part} must be a share in [0, 1) or names of recordings (data.test also: all), "
            f"got {value!r}"
        )
    return float(value)


def cut_at(spans: list[Span], pieces: list[list[tuple[int, int]]]) -> list[Span]:
    """Splits spans at the ends of the pieces of each recording."""
    return [
        Span(k, max(start, a), min(stop, b))
        for k, start, stop in spans
        for a, b in pieces[k]
        if max(start, a) < min(stop, b)
    ]


def where_known(spans: list[Span], known: Callable[[int], Tensor]) -> list[Span]:
    """Returns the longest parts of the spans in which every step is known."""
    known_spans = []
    for k, start, stop in spans:
        for good, steps in itertools.groupby(range(start, stop), known(k).tolist().__getitem__):
            if good:
                first, *rest = steps
                known_spans.append(Span(k, first, first + len(rest) + 1))
    return known_spans


def first_steps(spans: list[Span], count: int) -> list[Span]:
    """Returns the first ``count`` steps.

    Raises:
        ValueError: there are fewer steps, or ``count`` is below 2.
    """
    total = sum(span.stop - span.start for span in spans)
    if not 2 <= count <= total:
        raise ValueError(
            f"n_train={count}: there are {total} training steps with known states; "
            "without n_train all of them are used"
        )
    chosen, left = [], count
    for span in spans:
        if left > 0:
            chosen.append(span._replace(stop=min(span.stop, span.start + left)))
            left -= chosen[-1].stop - chosen[-1].start
    return chosen
