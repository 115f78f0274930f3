"""``kbf bench``: runs a benchmark, from the folder ``studies/benchmarks`` of a clone."""

from typing import Any

from kbf.commands.support.workshop import load_study


def run(config: dict[str, Any]) -> int:
    """Run `studies.benchmarks.command`; returns the exit code.

    Raises:
        ModuleNotFoundError: the folder ``studies/`` is missing.
    """
    return load_study("benchmarks.command").run(config)
