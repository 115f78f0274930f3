"""Unresolved configuration kept in a checkpoint, to be resolved later with other sizes and seeds.

OmegaConf fills ``${data.d}`` in with another entry, and calls a resolver for ``${oc.env:HOME}``. In
the recipe of a checkpoint, which is an untrusted file, references to entries are followed and
everything else stays the text that it is. So `settled` fills resolvers in before a recipe is
written, and `literal` quotes what a file brings.
"""

from __future__ import annotations

import re
from typing import Any

REFERENCE = re.compile(r"\$\{[A-Za-z_][\w.\[\]]*\}")
"""``${data.size[0]}``: another entry, counted from the top."""


def calls(text: str) -> bool:
    """Whether there is more in a text than references to entries."""
    return "${" in REFERENCE.sub("", text)


def settled(raw: Any, resolved: Any) -> Any:
    """Returns the ``raw`` configuration with all but references resolved."""
    if isinstance(raw, dict):
        return {key: settled(value, resolved[key]) for key, value in raw.items()}
    if isinstance(raw, list):
        return [settled(value, there) for value, there in zip(raw, resolved, strict=True)]
    return resolved if isinstance(raw, str) and calls(raw) else raw


def literal(config: Any) -> Any:
    r"""Returns a configuration in which OmegaConf follows references to entries alone.

    >>> literal({"a": "${data.d}", "b": "${oc.env:HOME}"})
    {'a': '${data.d}', 'b': '\\${oc.env:HOME}'}
    """
    if isinstance(config, dict):
        return {key: literal(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [literal(value) for value in config]
    if isinstance(config, str) and calls(config):
        return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", config)
    return config
