"""Models of vectors for observations that are density ratios: they take the means alone."""

from typing import Any

from jaxtyping import Shaped
from torch import Generator, Tensor

from kbf.filters.protocols import Filter
from kbf.filters.wrapper import FilterWrapper
from kbf.recording import Recording, as_recordings


class MeanFilter(FilterWrapper):
    """A filter of the first d components of each observation."""

    def __init__(self, inner: Filter[Any], d: int) -> None:
        """``inner`` takes observations ``b d``."""
        super().__init__(inner)
        self.d = d

    def observed(self, obs: Shaped[Tensor, "b w"]) -> Tensor:
        """The mean at the beginning of an encoding."""
        return obs[:, : self.d]


class RatioMean:
    """A model (``prepare``, ``fit``) of the first d components of each observation."""

    def __init__(self, model: Any, d: int) -> None:
        """``model`` takes observations ``T d``."""
        self.model, self.d = model, d

    def cut(self, memory: Recording | list[Recording]) -> list[Recording]:
        """The recordings with the first d components of each observation."""
        return [s._replace(obs=s.obs[:, : self.d]) for s in as_recordings(memory)]

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """The model's."""
        self.model.prepare(self.cut(memory), generator)

    def fit(self, memory: Recording | list[Recording]) -> Filter[Any]:
        """The filter of the model, which takes density ratios."""
        return MeanFilter(self.model.fit(self.cut(memory)), self.d)
