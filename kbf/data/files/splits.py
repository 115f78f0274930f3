"""Training, validation and test splits of recordings, by recording or by time, without overlap."""

import itertools
from collections.abc import Callable

from torch import Tensor

from kbf.data.windows import Span

# Size of a part: a share, or the names of its recordings; for the test part also ``all``.
Share = float | int | str | list[str]


def split(
    names: list[str], lengths: list[int], how: str, validation: Share, test: Share
) -> dict[str, list[Span]]:
    """Returns the spans of ``train``, ``validation`` and ``test``.

    By time, the last share of *each* recording is the test part, and the validation part precedes
    it. By recording, the last recordings are the test part and those before them the validation
    part, unless they are named. A share of 0 is an empty part.

    Raises:
        ValueError: invalid shares, an empty training part, or names that are unknown or in both
            parts.
    """
    whole = [Span(k, 0, length) for k, length in enumerate(lengths)]
    if test == "all":
        return {"train": [], "validation": [], "test": whole}
    if how not in ("time", "recording"):
        raise ValueError(f"data.split must be time or recording, got {how!r}")
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
