"""Unresolved configurations of checkpoints, which are resolved later with other sizes and seeds.

OmegaConf replaces ``${data.d}`` by another entry, and calls a resolver for ``${oc.env:HOME}``. A
checkpoint is an untrusted file: of its recipe, references to entries are resolved, and other
interpolations remain text. `settled` therefore calls the resolvers before a recipe is written, and
`literal` escapes them after it is read.
"""

import re
from collections.abc import Mapping
from typing import Any

from kbf.runtime.hydra_quoting import as_text

# A reference to another entry by its path from the root, such as ``${data.size[0]}``.
REFERENCE = re.compile(r"\$\{[A-Za-z_][\w.\[\]]*\}")

# Entries of a ``data`` configuration that may be null until the recordings are read.
SHAPES = ("d", "q", "image", "k", "column_schema", "time_step")


def incomplete(recipe: Mapping[str, Any]) -> bool:
    """Whether a configuration leaves ``n_train``, or shapes of its data, to the recordings."""
    data = recipe["data"]
    return recipe["n_train"] is None or any(data.get(key, 0) is None for key in SHAPES)


def resolved(recipe: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Returns a configuration with its interpolations resolved.

    Args:
        recipe: the unresolved configuration.
        values: replace top-level values before the interpolations are resolved.
    """
    from omegaconf import OmegaConf

    config = OmegaConf.create({**recipe, **values})
    container: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    return container


def calls(text: str) -> bool:
    """Whether a text contains interpolations other than references to entries."""
    return "${" in REFERENCE.sub("", text)


def settled(raw: Any, resolved: Any) -> Any:
    """Returns the ``raw`` configuration with all but references resolved."""
    if isinstance(raw, dict):
        return {key: settled(value, resolved[key]) for key, value in raw.items()}
    if isinstance(raw, list):
        return [settled(value, there) for value, there in zip(raw, resolved, strict=True)]
    return resolved if isinstance(raw, str) and calls(raw) else raw


def literal(config: Any) -> Any:
    r"""Returns a configuration in which OmegaConf resolves only references to entries.

    >>> literal({"a": "${data.d}", "b": "${oc.env:HOME}"})
    {'a': '${data.d}', 'b': '\\${oc.env:HOME}'}
    """
    if isinstance(config, dict):
        return {key: literal(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [literal(value) for value in config]
    if isinstance(config, str) and calls(config):
        return as_text(config)
    return config
