"""Imports of the workshop: the folder ``studies/`` of a clone, which is not installed with kbf."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

# The folder that contains the package: the repository, if kbf is imported from a clone.
ROOT = Path(__file__).resolve().parents[3]


def load_study(name: str) -> ModuleType:
    """Return the module ``studies.NAME``, from the folder next to the package or the import path.

    Raises:
        ModuleNotFoundError: the folder ``studies/`` is missing, as it is where kbf is installed
            from a wheel.
    """
    if (ROOT / "studies" / "papers").is_dir() and str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    if importlib.util.find_spec("studies") is None:
        raise ModuleNotFoundError(
            "the folder studies/ is missing: it is part of the repository and of the source "
            "archive, not of the installed package; clone the repository, then pip install -e .",
            name="studies",
        )
    return importlib.import_module(f"studies.{name}")
