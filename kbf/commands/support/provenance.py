"""What a result is of: data set, model, numbers of steps, seed and version."""

from collections.abc import Mapping
from typing import Any

from kbf import __version__
from kbf.data.dataset import Data


def about(config: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """Return data set, model, numbers of steps, seed and version of a result."""
    return {
        "data": config["data"].get("name"),
        "model": config["model"]["name"],
        "n_train": sum(len(r.states) for r in data.train),
        "n_test": sum(len(r.states) for r in data.test),
        "seed": config["seed"],
        "version": __version__,
    } | ({} if data.renderer is None else {"renderer": data.renderer})
