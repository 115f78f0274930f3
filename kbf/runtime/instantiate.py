"""Objects from plain configuration: ``{_target_: "kbf.EKF", model: {_target_: "kbf.rotation"}}``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from kbf.runtime.allowlist import (
    INSIDE,
    REGISTERED,
    check_plain,
    check_registered,
    check_sizes,
    suggestion,
)


def build(
    config: Any, *, trust: bool = False, kinds: tuple[str, ...] | None = None, **extra: Any
) -> Any:
    """Build what ``config`` describes.

    A dict with ``_target_`` becomes a call of it, with the other keys as arguments; a list becomes
    a tuple.

    Args:
        config: nested dicts, lists and plain values, already resolved.
        trust: allow any target that can be imported. A checkpoint is data from somebody: its
            configuration is built without, from what is registered (`kbf.runtime.allowlist`) and
            nothing else.
        kinds: without ``trust``, of which kinds the outermost targets must be; None for any.
        extra: further arguments of the outermost call, used as they are.

    Raises:
        ValueError: a target that does not exist or may not be called, or arguments that it does not
            take.

    >>> build({"_target_": "kbf.OrientationModel", "turn": 0.1}).turn
    0.1
    >>> build({"_target_": "kbf.ssm.simulate"})
    Traceback (most recent call last):
    ...
    ValueError: _target_ 'kbf.ssm.simulate' is not among the classes of kbf that a file may build...
    """
    if trust:
        return build_trusted(config, **extra)
    check_plain(config)
    return build_registered(config, tuple(REGISTERED) if kinds is None else kinds, **extra)


def build_trusted(config: Any, **extra: Any) -> Any:
    """`build` of whatever can be imported."""
    if isinstance(config, list | tuple):
        return tuple(build_trusted(value) for value in config)
    if not isinstance(config, dict):
        return config
    arguments = {
        key: build_trusted(value) for key, value in config.items() if key != "_target_"
    } | extra
    return made(config["_target_"], arguments) if "_target_" in config else arguments


def build_registered(config: Any, kinds: tuple[str, ...], **extra: Any) -> Any:
    """`build` of registered targets of these kinds. What goes wrong inside of them is the fault of the file."""
    if isinstance(config, list | tuple):
        return tuple(build_registered(value, kinds) for value in config)
    if not isinstance(config, dict):
        return config
    target = config.get("_target_")
    check_sizes(str(target), config)
    inside = kinds if "_target_" not in config else INSIDE[check_registered(target, kinds)]
    arguments = {
        key: build_registered(value, inside) for key, value in config.items() if key != "_target_"
    } | extra
    if "_target_" not in config:
        return arguments
    return made(str(target), arguments)


def made(name: str, arguments: dict[str, Any]) -> Any:
    """`call`, with a ValueError for whatever wrong values make of a class."""
    try:
        return call(name, arguments)
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        raise ValueError(
            f"{name} cannot be built of these settings: {' '.join(str(error).split())[:200]}"
        ) from error


def call(name: str, arguments: dict[str, Any]) -> Any:
    """Call a target by its name; a ValueError says which arguments it does not take."""
    target = locate(name)
    try:
        signature = inspect.signature(target)
    except ValueError:  # some classes of C have none
        return target(**arguments)
    try:
        signature.bind(**arguments)
        return target(**arguments)
    except TypeError as error:
        if "argument" not in str(error):
            raise
        raise ValueError(f"{name}: {error}") from error


def locate(name: Any) -> Any:
    """The class or function of a dotted name."""
    module, _, attribute = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"_target_ {name!r} does not exist{suggestion(name) or f': {error}'}"
        ) from error
    if not callable(found):
        raise ValueError(f"_target_ {name!r} is no class or function")
    return found
