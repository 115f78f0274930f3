"""Imports of optional packages, with an error that names the extra of kbf to install."""

import importlib
import importlib.util
from typing import Any

from kbf.runtime.errors import MissingPackageError


def need(module: str, extra: str, what: str) -> Any:
    """Import a module of a package that is optional.

    Args:
        module: its name.
        extra: of kbf, that installs its package.
        what: the feature that needs it, the first words of the error.

    Raises:
        MissingPackageError: the package is not installed, or does not load; the
            message names what to install.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if importlib.util.find_spec(package) is None:
            raise MissingPackageError(missing(package, extra, what)) from error
        reason = f"it lacks {error.name}"
    except Exception as error:  # any error of its import: a shared library, a version
        reason = " ".join(str(error).split())[:200] or type(error).__name__
    raise MissingPackageError(
        missing(package, extra, what, f"is installed but does not load ({reason})")
    )


def missing(package: str, extra: str, what: str, why: str = "is not installed") -> str:
    """Returns the message about a missing package: who needs it, why, what to install."""
    return f'{what} needs the package {package}, which {why}: pip install "kbf[{extra}]"'
