"""Smallest and largest values of the states: those that are declared, and those of few values."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kbf.data.files.column_schema import ColumnSchema
from kbf.recording import Recording
from kbf.runtime.errors import nearest

# A state with at most this many values is discrete, if each occurs this often on average.
MAX_FEW_VALUES = 10
MIN_REPEATS = 10

# A state with more values that has its smallest or largest in at least this share of the steps, and
# at least this often, cannot exceed it, as a tank that is full.
MIN_EDGE_SHARE = 0.1
MIN_EDGE_COUNT = 20


def checked_bounds(given: Mapping[str, Any] | None, schema: ColumnSchema) -> dict[str, list[Any]]:
    """Returns declared bounds as lists.

    Raises:
        ValueError: of a column that is no state, or an angle or rotation; or no pair in order.
    """
    numbers = [part.names[0] for part in schema.states if part.kind == "number"]
    found = {}
    for name, ends in (given or {}).items():
        if name not in numbers:
            hint = nearest(str(name), numbers, "they are")
            raise ValueError(f"data.bounds: {name!r} is no number among the states; {hint}")
        pair = list(ends) if isinstance(ends, list | tuple) else []
        if len(pair) != 2 or not all(each is None or type(each) in (int, float) for each in pair):
            raise ValueError(f"data.bounds of {name} must be two numbers or null, got {ends!r}")
        low, high = pair
        if low is not None and high is not None and not low < high:
            raise ValueError(f"data.bounds of {name}: {low:g} is not below {high:g}")
        found[str(name)] = pair
    return found


def few_valued(schema: ColumnSchema, recordings: list[Recording]) -> dict[str, list[float]]:
    """Returns the smallest and largest value of each discrete state, by column."""
    found = {}
    for name, values in states_of(schema, recordings).items():
        count = len(values.unique())
        if 2 <= count <= MAX_FEW_VALUES and len(values) >= MIN_REPEATS * count:
            found[name] = [float(values.min()), float(values.max())]
    return found


def edge_warnings(schema: ColumnSchema, recordings: list[Recording], given: Any) -> list[str]:
    """Returns warnings of states that are often at their smallest or largest value."""
    found = []
    for name, values in states_of(schema, recordings).items():
        if name in (given or {}) or len(values.unique()) <= MAX_FEW_VALUES:
            continue
        ends = [float(values.min()), float(values.max())]
        counts = [int((values == end).sum()) for end in ends]
        least = max(MIN_EDGE_COUNT, MIN_EDGE_SHARE * len(values))
        bounds = [end if n >= least else None for end, n in zip(ends, counts, strict=True)]
        if bounds != [None, None]:
            often = " and ".join(f"{end:g}" for end in bounds if end is not None)
            pair = ", ".join("null" if end is None else f"{end:g}" for end in bounds)
            found.append(
                f"column {name} is {often} in {max(counts)} of {len(values)} steps: if it cannot "
                f"exceed that, data.bounds={{{name}: [{pair}]}} keeps estimates inside"
            )
    return found


def states_of(schema: ColumnSchema, recordings: list[Recording]) -> dict[str, Tensor]:
    """Returns the known values of states that are numbers, by column."""
    if not recordings:
        return {}
    states, found, at = torch.cat([each.states for each in recordings]), {}, 0
    for part, width in zip(schema.states, schema.widths(), strict=True):
        if part.kind == "number":
            column = states[:, at]
            found[part.names[0]] = column[column.isfinite()]
        at += width
    return found
