"""`ColumnValues`: the estimate of one step, a mapping from state columns to numbers."""

from collections.abc import Iterator, Mapping


class ColumnValues(Mapping[str, float]):
    """A mapping from state columns to numbers.

    Attributes:
        std: standard deviations by column; empty for a filter without covariances.
        rejected: whether the observation was rejected as implausible.
    """

    def __init__(self, values: dict[str, float], std: dict[str, float], rejected: bool) -> None:
        """Take the values of the columns."""
        self._values = values
        self.std: dict[str, float] = std
        self.rejected: bool = rejected

    def __getitem__(self, name: str) -> float:
        if name not in self._values:
            raise KeyError(f"there is no state {name!r}; there are {', '.join(self._values)}")
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def to_dict(self) -> dict[str, float]:
        """Return the estimates as a plain dict."""
        return dict(self._values)
