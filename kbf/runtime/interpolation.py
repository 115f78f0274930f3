"""Unresolved configurations of checkpoints, which are resolved later with other sizes and seeds.

OmegaConf replaces ``${data.d}`` by another entry, and calls a resolver for ``${oc.env:HOME}``. A
checkpoint is an untrusted file: of its recipe, references to entries are resolved, and other
interpolations remain text. `settled` therefore calls the resolvers before a recipe is written, and
`literal` escapes them after it is read.

Values of environment variables may be secrets. A configuration keeps the reference
``${oc.env:NAME}`` as its text, files of a run contain this text, and `from_environment` reads the
variable where an object is built (`kbf.runtime.instantiate.build` of trusted configurations).
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from kbf.runtime.hydra_quoting import as_text

# A reference to another entry by its path from the root, such as ``${data.size[0]}``.
REFERENCE = re.compile(r"\$\{[A-Za-z_][\w.\[\]]*\}")

# A reference to an environment variable, with its name.
ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)")

# Characters of the shortest value that `masked` replaces: a shorter one is part of other words.
MIN_MASKED_LENGTH = 4

# Entries of a ``data`` configuration that may be null until the recordings are read.
SHAPES = ("d", "q", "image", "k", "column_schema", "time_step")


def incomplete(recipe: Mapping[str, Any]) -> bool:
    """Whether a configuration leaves ``n_train``, or shapes of its data, to the recordings."""
    data = recipe["data"]
    return recipe["n_train"] is None or any(data.get(key, 0) is None for key in SHAPES)


def resolved(recipe: Mapping[str, Any], **values: Any) -> dict[str, Any]:
    """Returns a configuration with its interpolations resolved, but for texts of the environment.

    Args:
        recipe: the unresolved configuration.
        values: replace top-level values before the interpolations are resolved.
    """
    from omegaconf import OmegaConf

    config: Any = OmegaConf.create({**recipe, **values})

    def container() -> Any:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)

    result = container()
    with environment_as_text():
        return with_references(result, container())


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


@contextmanager
def environment_as_text() -> Iterator[None]:
    """Context in which OmegaConf resolves ``${oc.env:NAME}`` to this text, not to the variable."""
    from omegaconf import OmegaConf
    from omegaconf.resolvers import oc

    def text(name: str, *default: Any) -> str:
        return "${oc.env:" + ",".join([name, *map(str, default)]) + "}"

    OmegaConf.register_new_resolver("oc.env", text, replace=True)
    try:
        yield
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def with_references(values: Any, texts: Any) -> Any:
    """Returns a resolved configuration in which texts of the environment are references.

    Numbers that are decoded from the environment stay numbers: they are settings.

    Args:
        values: the configuration.
        texts: the same, resolved within `environment_as_text`.
    """
    if isinstance(values, dict):
        return {key: with_references(value, texts[key]) for key, value in values.items()}
    if isinstance(values, list):
        return [with_references(value, text) for value, text in zip(values, texts, strict=True)]
    return texts if isinstance(values, str) and variables_named(texts) else values


def variables_named(config: Any) -> set[str]:
    """Returns the names of the environment variables that a configuration refers to.

    >>> sorted(variables_named({"a": ["${oc.env:HOME}/x"], "b": "${data.d}"}))
    ['HOME']
    """
    if isinstance(config, dict):
        return variables_named(list(config.values()))
    if isinstance(config, list | tuple):
        return {name for value in config for name in variables_named(value)}
    return set(ENVIRONMENT.findall(config)) if isinstance(config, str) else set()


def from_environment(config: Any) -> Any:
    """Returns a configuration with its references to the environment replaced by the variables.

    Raises:
        ValueError: a variable is not set.
    """
    if not variables_named(config):
        return config
    if isinstance(config, dict):
        return {key: from_environment(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [from_environment(value) for value in config]
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationResolutionError

    try:
        return OmegaConf.to_container(OmegaConf.create([config]), resolve=True)[0]  # pyright: ignore
    except InterpolationResolutionError as error:
        names = ", ".join(sorted(variables_named(config) - os.environ.keys()))
        raise ValueError(f"{config}: the environment variable {names} is not set") from error


def masked(text: str, config: Any) -> str:
    """Returns a text in which values of environment variables are references to them.

    Args:
        text: a message or a path, in which the values may occur.
        config: refers to the variables.

    >>> os.environ["KBF_FOLDER"] = "/mnt/lab"
    >>> masked("/mnt/lab/a.csv", ["${oc.env:KBF_FOLDER}/a.csv"])
    '${oc.env:KBF_FOLDER}/a.csv'
    """
    for name in sorted(variables_named(config)):
        value = os.environ.get(name, "")
        if len(value) >= MIN_MASKED_LENGTH:
            text = text.replace(value, f"${{oc.env:{name}}}")
    return text
