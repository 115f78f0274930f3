"""Objects from plain configuration: ``{_target_: "kbf.filters.ekf.EKF", model: {_target_: "kbf.ssm.rotation"}}``."""

from __future__ import annotations

import importlib
import inspect
from typing import Any


def build(config: Any, *, trust: bool = False, **extra: Any) -> Any:
    """Build what ``config`` describes.

    A dict with ``_target_`` becomes a call of it, with the other keys as arguments; a list becomes a tuple.

    Args:
        config: nested dicts, lists and plain values, already resolved.
        trust: allow targets outside of this package. A checkpoint is data from somebody: its configuration is built without.
        extra: further arguments of the outermost call.

    Raises:
        ValueError: a target that does not exist or may not be called, or arguments that it does not take.

    >>> build({"_target_": "kbf.ssm.OrientationModel", "turn": 0.1}).turn
    0.1
    >>> build({"_target_": "os.getcwd"})
    Traceback (most recent call last):
    ...
    ValueError: 'os.getcwd' is not part of kbf: only a configuration that you trust may name it (trust=true)
    """
    if isinstance(config, list | tuple):
        return tuple(build(value, trust=trust) for value in config)
    if not isinstance(config, dict):
        return config
    arguments = {key: build(value, trust=trust) for key, value in config.items() if key != "_target_"} | extra
    if "_target_" not in config:
        return arguments
    target = locate(config["_target_"], trust=trust)
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
        raise ValueError(f"{config['_target_']}: {error}") from error


def locate(name: str, *, trust: bool = False) -> Any:
    """The class or function of a dotted name. Without ``trust`` it must be *defined* in kbf, not merely imported there."""
    if not trust and not name.startswith("kbf."):
        raise ValueError(f"{name!r} is not part of kbf: only a configuration that you trust may name it (trust=true)")
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"_target_ {name!r} does not exist: {error}") from error
    if not callable(found):
        raise ValueError(f"_target_ {name!r} is no class or function")
    if not trust and not str(getattr(found, "__module__", "")).startswith("kbf."):
        raise ValueError(f"{name!r} is not defined in kbf: only a configuration that you trust may name it (trust=true)")
    return found
