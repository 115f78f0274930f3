"""Parsing of numbers and dates in the cells of tables."""

from __future__ import annotations

import math
from datetime import UTC, datetime

# Contents of a cell, in lower case, that represent a missing value.
EMPTY_CELLS = {"", "nan", "na", "n/a", "null", "none"}


def number(cell: str) -> float | None:
    """Returns the number in a cell, NaN for an empty cell, None for any other text."""
    try:
        return float("not a number" if "_" in cell else cell)  # Python reads 1_0 as 10
    except ValueError:
        return math.nan if cell.lower() in EMPTY_CELLS else None


def seconds(cell: str) -> float | None:
    """Returns a time in seconds: a number, or the seconds since 1970 of an ISO 8601 date.

    A date without a time zone is UTC; None is returned for any other text.
    """
    value = number(cell)
    if value is not None:
        return value
    try:
        date = datetime.fromisoformat(cell)
    except ValueError:
        return None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
