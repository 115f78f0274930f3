"""What a data set is to the rest of the project: training and test sequences, and the true model where it is known."""

from __future__ import annotations

from typing import Any, NamedTuple

from kbf.build import build
from kbf.sequence import Sequence, as_sequences, mask_missing
from kbf.ssm import StateSpace


class Data(NamedTuple):
    """A data set, checked.

    Attributes:
        train: recordings to learn from. test: recordings to score on, which nothing may be learned from.
        problem: the true model, or None. With it there is a floor.
        decoded: the test sequences as the problem observes them: ``test`` itself, or for images what they show.
        renderer: of images, who rendered them. extent: the coordinates of an image's left, right, bottom and top edge, where
            states are positions in it.
    """

    train: list[Sequence]
    test: list[Sequence]
    problem: StateSpace | None
    decoded: list[Sequence]
    renderer: str | None = None
    extent: tuple[float, float, float, float] | None = None


def load_data(config: dict[str, Any], *, trust: bool = False) -> Data:
    """Build and check the data set of a ``data`` configuration.

    ``config["source"]`` names a class whose objects have ``train`` and ``test`` (lists of `Sequence`) and may have ``problem``,
    ``decoded``, ``renderer`` and ``extent``. With ``config["missing"]``, NaN observations are treated as missing.

    Raises:
        ValueError: shapes that do not fit, or NaN or infinite values that are not to be treated as missing.
    """
    source = build(config["source"], trust=trust)
    parts = {}
    for name in ("train", "test"):
        sequences = list(getattr(source, name))
        if config.get("missing"):
            sequences = [mask_missing(s) for s in sequences]
        try:
            parts[name] = as_sequences(sequences)
        except ValueError as error:
            hint = " From the command line: data.missing=true." if "NaN" in str(error) else ""
            raise ValueError(f"{name} data {config.get('name', '')}: {error}{hint}") from error
    decoded = getattr(source, "decoded", None) or parts["test"]
    problem, renderer, extent = (getattr(source, name, None) for name in ("problem", "renderer", "extent"))
    return Data(parts["train"], parts["test"], problem, decoded, renderer, extent)
