"""HTML representations of data, filters and results for notebooks: a table and curves."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

WIDTH, HEIGHT = 420, 90
"""Of curves, in pixels."""
MOST = 400
"""Steps of a curve that are drawn."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
"""Of the first components; Okabe and Ito's, which colour-blind readers can distinguish."""


def table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """A heading and rows of a name and a value.

    >>> table("A", [("n", 3)]).partition("</thead>")[2]
    '<tbody><tr><td>n</td><td>3</td></tr></tbody></table>'
    """
    body = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
        for name, value in rows
    )
    head = f'<thead><tr><th colspan="2">{html.escape(title)}</th></tr></thead>'
    return f"<table>{head}<tbody>{body}</tbody></table>"


def lines(series: Sequence[Sequence[float]], title: str) -> str:
    """Returns the first components of a series ``T d`` over time as SVG, with gaps at NaN.

    At most `MOST` steps are drawn.
    """
    shown = series[:MOST]
    finite = [value for row in shown for value in row[: len(COLOURS)] if math.isfinite(value)]
    if len(shown) < 2 or not finite:
        return ""
    low, high = min(finite), max(finite)
    across, up = WIDTH / (len(shown) - 1), (HEIGHT - 4) / ((high - low) or 1)
    curves = []
    for k, colour in enumerate(COLOURS[: len(shown[0])]):
        path, move = [], "M"
        for t, row in enumerate(shown):
            if not math.isfinite(row[k]):
                move = "M"
                continue
            path.append(f"{move}{t * across:.1f} {HEIGHT - 2 - (row[k] - low) * up:.1f}")
            move = "L"
        curves.append(f'<path d="{"".join(path)}" fill="none" stroke="{colour}"/>')
    what = f"{title}, {len(shown)} of {len(series)} steps, from {low:.3g} to {high:.3g}"
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    label = f'role="img" aria-label="{html.escape(what)}"'
    picture = f"<svg {size} {label}>{''.join(curves)}</svg>"
    return f"<div>{picture}<br><small>{html.escape(what)}</small></div>"


def in_words(value: Any) -> str:
    """A number, a text, the shape of a tensor, how many recordings; of anything else its type.

    >>> import torch
    >>> in_words(torch.zeros(300, 2)), in_words(torch.tensor([0.5, 2.0])), in_words([])
    ('300 x 2 float32', '0.5, 2', 'none')
    """
    if isinstance(value, Tensor):
        if value.numel() <= 4:
            return ", ".join(f"{number:.4g}" for number in value.flatten().tolist())
        return f"{' x '.join(map(str, value.shape))} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if value is None or isinstance(value, (bool, int, str)):
        return str(value)
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        if all(isinstance(each, (int, float, str)) for each in value):
            return ", ".join(map(in_words, value)) or "none"
        steps = [len(each.states) for each in value if hasattr(each, "states")]
        what = f", {sum(steps)} steps" if steps else ""
        kind = "recording" if steps else type(value[0]).__name__
        return f"{len(value)} {kind}{'s' * (len(value) > 1)}{what}"
    if isinstance(value, dict):
        return (
            ", ".join(f"{key} {in_words(each)}" for key, each in list(value.items())[:6]) or "none"
        )
    return type(value).__name__


def described(name: str, parts: dict[str, Any]) -> str:
    """A line that names parts, for ``repr``; those that are None or empty are left out."""
    shown = (f"{key}: {in_words(value)}" for key, value in present(parts))
    return f"{name}({', '.join(shown)})"


def present(parts: dict[str, Any]) -> list[tuple[str, Any]]:
    """The parts that are there."""
    return [
        (key, value) for key, value in parts.items() if value is not None and not is_empty(value)
    ]


def is_empty(value: Any) -> bool:
    """Whether a value is a text or container without anything in it."""
    return isinstance(value, (str, list, tuple, dict)) and len(value) == 0


def page(name: str, parts: dict[str, Any], curve: Any = None, title: str = "") -> str:
    """The same as a table for ``_repr_html_``, with a curve ``T d`` below it."""
    return table(name, [(key, in_words(value)) for key, value in present(parts)]) + (
        "" if curve is None else lines(curve.tolist(), title)
    )


class Shown:
    """An object whose parts a notebook shows in a table; ``repr`` is one line."""

    def __repr__(self) -> str:
        return described(type(self).__name__, self.parts())

    def _repr_html_(self) -> str:
        return page(type(self).__name__, self.parts(), *self.curve())

    def parts(self) -> dict[str, Any]:
        """What is shown, by name: the public attributes."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def curve(self) -> tuple[Any, str]:
        """What is drawn below the table: the states of the test part, if there is one."""
        return (
            (test[0].states, "states of the test part")
            if (test := getattr(self, "test", None))
            else (None, "")
        )


class ShownModule(nn.Module):
    """A module that a notebook shows with its numbers."""

    def extra_repr(self) -> str:
        """What stands between the brackets."""
        return ", ".join(f"{key}={in_words(value)}" for key, value in present(self.parts()))

    def _repr_html_(self) -> str:
        return page(type(self).__name__, self.parts())

    def parts(self) -> dict[str, Any]:
        """Settings, and the shapes of what the module holds itself."""
        settings = {
            key: value
            for key, value in vars(self).items()
            if not key.startswith("_") and key != "training"
        }
        held = dict(self.named_parameters(recurse=False)) | dict(self.named_buffers(recurse=False))
        return {key: value for key, value in (settings | held).items() if not callable(value)}
