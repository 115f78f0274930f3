"""Objects from plain configuration: ``{_target_: kbf.EKF, model: {_target_: kbf.rotation}}``."""

import difflib
import importlib
import inspect
from contextlib import suppress
from typing import Any

from kbf.runtime.allowlist import INSIDE, REGISTERED, check_plain, check_registered, suggestion
from kbf.runtime.interpolation import from_environment, variables_named
from kbf.runtime.memory_limit import check_arguments, check_module


def build(
    config: Any,
    *,
    trust: bool = False,
    kinds: tuple[str, ...] | None = None,
    copies: int = 1,
    **extra: Any,
) -> Any:
    """Build the object that a configuration describes.

    A dict with ``_target_`` becomes a call of it, with the other keys as arguments; a list becomes
    a tuple.

    Args:
        config: nested dicts, lists and plain values, already resolved. With ``trust`` references
            to environment variables (``${oc.env:NAME}``) are replaced.
        trust: allow any target that can be imported. Without it, as for the configuration of a
            checkpoint, targets are the public classes of kbf (`kbf.runtime.allowlist`), and objects
            need a limited memory (`kbf.runtime.memory_limit`).
        kinds: without ``trust``, the kinds that the outermost targets may be of; None for any.
        copies: networks that are built of this configuration, for the limit of the memory.
        extra: further arguments of the outermost call, used as they are.

    Raises:
        ValueError: a target that does not exist or is not allowed, arguments that it does not take,
            an object that is too large, or without ``trust`` a reference to the environment.

    >>> build({"_target_": "kbf.OrientationModel", "turn": 0.1}).turn
    0.1
    >>> build({"_target_": "kbf.EKG"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: _target_ 'kbf.EKG' is no class or function that a file may build...
    """
    if trust:
        return construct(from_environment(config), None, **extra)
    check_plain(config)
    if names := variables_named(config):
        raise ValueError(
            f"a file refers to the environment variable {', '.join(sorted(names))}, which is read "
            "for files that you trust alone: trust=true (or set the value, as data.path=FILE)"
        )
    allowed = tuple(REGISTERED) if kinds is None else kinds
    if kinds in (("model",), ("encoder",)):
        check_module(lambda: construct(config, allowed, **extra), copies)
    return construct(config, allowed, **extra)


def construct(config: Any, kinds: tuple[str, ...] | None, **extra: Any) -> Any:
    """`build` of targets of these kinds, or of any target where ``kinds`` is None."""
    if isinstance(config, list | tuple):
        return tuple(construct(value, kinds) for value in config)
    if not isinstance(config, dict):
        return config
    inside, is_call = kinds, "_target_" in config
    if kinds is not None and is_call:
        inside = INSIDE[check_registered(config["_target_"], kinds)]
    arguments = {
        key: construct(value, inside) for key, value in config.items() if key != "_target_"
    } | extra
    return call(config["_target_"], arguments, trust=kinds is None) if is_call else arguments


def call(name: Any, arguments: dict[str, Any], *, trust: bool) -> Any:
    """Call a target by its name.

    Raises:
        ValueError: arguments that it does not take, or values of which it cannot be built. OSError,
            ImportError: as the target raises them.
    """
    target = locate(name)
    try:
        with suppress(ValueError):  # classes written in C may have no signature
            inspect.signature(target).bind(**arguments)
        if not trust:
            check_arguments(target, arguments)
        return target(**arguments)
    except (ValueError, OSError, ImportError):
        raise
    except Exception as error:
        if isinstance(error, TypeError) and "argument" in str(error):
            raise ValueError(f"{name}: {error}{nearest_argument(target, error)}") from error
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name} cannot be built of these settings: {reason}") from error


def nearest_argument(target: Any, error: TypeError) -> str:
    """Returns ", did you mean ...?" with the parameter nearest to an unexpected one, or nothing."""
    wrong = str(error).rpartition("unexpected keyword argument '")[2].rstrip("'")
    near = difflib.get_close_matches(wrong, inspect.signature(target).parameters, 1, cutoff=0.7)
    return f"; did you mean {near[0]}?" if near and wrong not in near else ""


def locate(name: Any) -> Any:
    """Returns the class or function of a dotted name.

    Raises:
        ValueError: there is none.
    """
    module, _, attribute = str(name).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        advice = suggestion(name) or f": {error}"
        raise ValueError(f"_target_ {name!r} does not exist{advice}") from error
    if not callable(found):
        raise ValueError(f"_target_ {name!r} is no class or function")
    return found
