"""``kbf reproduce``: runs an experiment of a paper, from ``studies/papers`` of a clone."""

from typing import Any

from kbf.commands.support.workshop import load_study


def run(config: dict[str, Any]) -> int:
    """Run `studies.papers.command`; returns the exit code.

    Raises:
        ModuleNotFoundError: the folder ``studies/`` is missing.
    """
    return load_study("papers.command").run(config)
