"""Training, validation and test part of recordings: by sequence, or by time. No step is in two parts."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kbf.data.windows import Span

# How large a part is: a share, or the names of its sequences; for the test part also ``all``.
Share = float | int | str | list[str]


def split(
    names: list[str], lengths: list[int], how: str, validation: Share, test: Share
) -> dict[str, list[Span]]:
    """The spans of ``train``, ``validation`` and ``test``.

    By time, the last share of *each* sequence is the test, and the validation part lies before it.
    By sequence, the last so many sequences are the test and those before them the validation part,
    or those that are named. A test part of 0 is none.

    Raises:
        ValueError: shares that are none or leave nothing to learn from, or names that are not there
            or stand in both parts.
    """
    whole = [Span(k, 0, length) for k, length in enumerate(lengths)]
    if test == "all":
        return {"train": [], "validation": [], "test": whole}
    if how not in ("time", "recording"):
        raise ValueError(f"data.split must be time or sequence, got {how!r}")
    if how == "recording" or isinstance(test, list) or isinstance(validation, list):
        return by_recording(names, whole, validation, test)
    v, t = share_of("validation", validation), share_of("test", test)
    if v + t >= 1:
        raise ValueError(
            f"data.test and data.validation must leave something to learn from: got {t:g} and {v:g}"
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


def by_recording(
    names: list[str], whole: list[Span], validation: Share, test: Share
) -> dict[str, list[Span]]:
    """Whole sequences in each part."""
    chosen: dict[str, list[str]] = {}
    asked = {"test": test, "validation": validation}
    named = {
        part: [str(v) for v in value] for part, value in asked.items() if isinstance(value, list)
    }
    for part, wanted in named.items():
        if unknown := [name for name in wanted if name not in names]:
            raise ValueError(
                f"data.{part}: there is no sequence {unknown[0]!r}; there are {', '.join(names[:20])}"
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
        held = f"{len(chosen['validation'])} to validate, {len(chosen['test'])} to test"
        sizes = f"{len(names)} sequences: {len(free)} to learn from, {held}"
        raise ValueError(
            f"data.split=recording leaves a part empty ({sizes}); data.split=time cuts each sequence instead"
        )
    parts = {"train": free, **chosen}
    return {
        part: [span for span in whole if names[span.recording] in wanted]
        for part, wanted in parts.items()
    }


def share_of(part: str, value: object) -> float:
    """A number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ValueError(
            f"data.{part} must be a share in [0, 1) or names of sequences (data.test also: all), got {value!r}"
        )
    return float(value)


def cut_at(spans: list[Span], pieces: list[list[tuple[int, int]]]) -> list[Span]:
    """Spans cut where a recording is cut."""
    cut_spans = []
    for k, start, stop in spans:
        cut_spans += [
            Span(k, max(start, a), min(stop, b))
            for a, b in pieces[k]
            if max(start, a) < min(stop, b)
        ]
    return cut_spans


def where_known(spans: list[Span], known: Callable[[int], Tensor]) -> list[Span]:
    """The stretches of spans in which every step is known."""
    known_spans = []
    for k, start, stop in spans:
        first = None
        for t, good in enumerate([*known(k)[start:stop].tolist(), False], start):
            if good and first is None:
                first = t
            elif not good and first is not None:
                known_spans.append(Span(k, first, t))
                first = None
    return known_spans


def first_steps(spans: list[Span], count: int) -> list[Span]:
    """The first so many steps.

    Raises:
        ValueError: there are not so many.
    """
    total = sum(span.stop - span.start for span in spans)
    if not 2 <= count <= total:
        raise ValueError(
            f"n_train={count}: there are {total} training steps with known states; leave n_train out to take them all"
        )
    chosen, left = [], count
    for span in spans:
        if left > 0:
            chosen.append(span._replace(stop=min(span.stop, span.start + left)))
            left -= chosen[-1].stop - chosen[-1].start
    return chosen
