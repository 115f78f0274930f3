"""Numbers and dates in the cells of tables."""

from __future__ import annotations

import math
from datetime import UTC, datetime

# Contents of a cell, in lower case, that mean a missing value.
EMPTY_CELLS = {"", "nan", "na", "n/a", "null", "none"}


def number(cell: str) -> float | None:
    """The number that a cell holds, NaN for an empty one; None if it holds something else."""
    try:
        return float("not a number" if "_" in cell else cell)  # Python reads 1_0 as 10
    except ValueError:
        return math.nan if cell.lower() in EMPTY_CELLS else None


def seconds(cell: str) -> float | None:
    """A time: a number, or a date and time in ISO 8601 (UTC unless it says so) in seconds since 1970."""
    value = number(cell)
    if value is not None:
        return value
    try:
        date = datetime.fromisoformat(cell)
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
