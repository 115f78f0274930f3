"""Settings of recordings that only the recordings contain: shapes and the number of steps."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kbf.config.composition import plain
from kbf.runtime.hydra_quoting import as_text

# The source of ``data=own``.
OWN_DATA = "kbf.FileData"

# The source of recordings that packages contain or simulate.
RECORDED_DATA = "kbf.RecordedData"

# Settings of ``data=own`` that are read from the file.
FROM_FILE = ("d", "q", "image", "k", "column_schema", "time_step")


def complete_data(composed: Any, overrides: list[str]) -> None:
    """Set what only the recordings contain: the shapes of ``data=own``, and ``n_train``.

    ``n_train`` is set to all training steps where it is not given, or null.
    """
    from omegaconf import OmegaConf

    data, n_train = composed.get("data"), composed.get("n_train")
    own = has_source(data, OWN_DATA) and data.get("path") is not None and "d" in data
    given = any(w.lstrip("+").startswith("n_train=") and w != "n_train=null" for w in overrides)
    sizes = list(n_train) if isinstance(n_train, Iterable) else [n_train]
    every_step = "n_train" in composed and (not given or None in sizes)
    if own:
        data.path = absolute(data.path)
    elif not every_step or not has_source(data, RECORDED_DATA):
        return
    raw = OmegaConf.create({**plain(composed, resolve=False), "n_train": None})
    source: Any = OmegaConf.to_container(raw.data.source, resolve=True)
    if own:
        from kbf.data.files import complete

        shapes = complete({key: value for key, value in source.items() if key != "_target_"})
        steps = shapes["n_train"]
        if shapes["image"] is None:
            data.encoding = None
        for key in FROM_FILE:
            data[key] = shapes[key]
    else:
        from kbf.data.recorded import training_steps

        steps = None
        # A missing package or wrong settings: the error is raised when the data is loaded.
        with suppress(ValueError):
            steps = training_steps(source)
    if every_step and steps is not None:
        several = isinstance(n_train, Iterable) and None in sizes
        composed.n_train = [steps if n is None else n for n in sizes] if several else steps


def has_source(data: Any, target: str) -> bool:
    """Whether the source of a ``data`` configuration is of this class."""
    source = None if data is None else data.get("source")
    return source is not None and hasattr(source, "get") and source.get("_target_") == target


def absolute(path: Any) -> str:
    """Returns an absolute path, which a checkpoint finds from any folder."""
    return as_text(str(Path(str(path)).expanduser().resolve()))
