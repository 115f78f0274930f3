"""Representations of data, filters and results: one line for ``repr``, HTML for notebooks."""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, nn

# Size of curves, in pixels.
WIDTH = 420
HEIGHT = 90

# Steps of a curve that are drawn.
MAX_STEPS = 400

# Colours of the components that are drawn: Okabe and Ito's, which colour-blind readers distinguish.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def table(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Returns a table with a heading and rows of a name and a value.

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

    At most `MAX_STEPS` steps are drawn.
    """
    shown = series[:MAX_STEPS]
    finite = [value for row in shown for value in row[: len(COLOURS)] if math.isfinite(value)]
    if len(shown) < 2 or not finite:
        return ""
    low, high = min(finite), max(finite)
    across, up = WIDTH / (len(shown) - 1), (HEIGHT - 4) / ((high - low) or 1)
    curves = []
    for k, colour in enumerate(COLOURS[: len(shown[0])]):
        path, move = "", "M"
        for t, row in enumerate(shown):
            drawn = math.isfinite(row[k])
            if drawn:
                path += f"{move}{t * across:.1f} {HEIGHT - 2 - (row[k] - low) * up:.1f}"
            move = "L" if drawn else "M"
        curves.append(f'<path d="{path}" fill="none" stroke="{colour}"/>')
    what = f"{title}, {len(shown)} of {len(series)} steps, from {low:.3g} to {high:.3g}"
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    label = f'role="img" aria-label="{html.escape(what)}"'
    picture = f"<svg {size} {label}>{''.join(curves)}</svg>"
    return f"<div>{picture}<br><small>{html.escape(what)}</small></div>"


def shown_value(value: Any) -> str:
    """Returns a number, a text, the shape of a tensor, a number of recordings, or a type's name.

    >>> import torch
    >>> shown_value(torch.zeros(300, 2)), shown_value(torch.tensor([0.5, 2.0])), shown_value([])
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
    if type(value) in (list, tuple):
        if all(isinstance(each, (int, float, str)) for each in value):
            return ", ".join(map(shown_value, value)) or "none"
        steps = [len(each.states) for each in value if hasattr(each, "states")]
        kind = "recording" if steps else type(value[0]).__name__
        return f"{len(value)} {kind}{'s' * (len(value) > 1)}" + (
            f", {sum(steps)} steps" if steps else ""
        )
    if isinstance(value, dict):
        entries = list(value.items())[:6]
        return ", ".join(f"{key} {shown_value(each)}" for key, each in entries) or "none"
    return type(value).__name__


def present(parts: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns names and shown values of the parts that are neither None nor empty."""
    containers = (str, list, tuple, dict)
    empty = {k for k, v in parts.items() if v is None or (isinstance(v, containers) and not len(v))}
    return [(key, shown_value(value)) for key, value in parts.items() if key not in empty]


def described(name: str, parts: dict[str, Any]) -> str:
    """Returns one line with the parts, for ``repr``."""
    return f"{name}({', '.join(f'{key}: {value}' for key, value in present(parts))})"


def page(name: str, parts: dict[str, Any], curve: Any = None, title: str = "") -> str:
    """Returns a table of the parts for ``_repr_html_``, with a curve ``T d`` below it."""
    return table(name, present(parts)) + ("" if curve is None else lines(curve.tolist(), title))


class Shown:
    """An object with a table of its public attributes in notebooks, and one line as ``repr``."""

    def __repr__(self) -> str:
        return described(type(self).__name__, self.parts())

    def _repr_html_(self) -> str:
        return page(type(self).__name__, self.parts(), *self.curve())

    def parts(self) -> dict[str, Any]:
        """Returns what the table shows, by name: the public attributes."""
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def curve(self) -> tuple[Any, str]:
        """Returns the curve below the table and its title: the states of the test part, if any."""
        test = getattr(self, "test", None)
        return (test[0].states, "states of the test part") if test else (None, "")


class ShownModule(nn.Module):
    """A module with a table of its settings and shapes in notebooks."""

    def extra_repr(self) -> str:
        """Overrides `nn.Module.extra_repr`: the settings and shapes."""
        return ", ".join(f"{key}={value}" for key, value in present(self.parts()))

    def _repr_html_(self) -> str:
        return page(type(self).__name__, self.parts())

    def parts(self) -> dict[str, Any]:
        """Returns the public attributes, and the module's own parameters and buffers."""
        held = dict(self.named_parameters(recurse=False)) | dict(self.named_buffers(recurse=False))
        settings = {key: value for key, value in vars(self).items() if key[0] != "_"} | held
        del settings["training"]
        return {key: value for key, value in settings.items() if not callable(value)}
