"""Packages that only some commands need: imported where they are used, and named with their extra where they cannot be."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from kbf.runtime.errors import MissingPackageError


def need(module: str, extra: str, what: str) -> Any:
    """Import a module of a package that is optional.

    Args:
        module: its name.
        extra: of kbf, that installs its package.
        what: what needs it, to begin the error with.

    Raises:
        MissingPackageError: the package is not installed, or does not load; one line that says what to do.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(missing(package, extra, what)) from error
        reason = f"it lacks {error.name}"
    except Exception as error:  # a library that it cannot open, another package's version, ...: whatever its first lines raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    raise MissingPackageError(
        missing(package, extra, what, f"is installed but does not load ({reason})")
    )


def missing(package: str, extra: str, what: str, why: str = "is not installed") -> str:
    """The line that says what lacks which package, why, and what to do."""
    return f'{what} needs the package {package}, which {why}: pip install "kbf[{extra}]"'
