"""``kbf export``: writes one step of a trained filter as a program for other machines.

The program is compared with the filter before it is written.
"""

from pathlib import Path
from typing import Any

from kbf.commands.filter import same_file
from kbf.commands.support.console import console
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.fitted_filter import FittedFilter


def run(config: dict[str, Any]) -> int:
    """Load, export and compare; returns the exit code.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ValueError: the filter cannot be exported.
    """
    if not isinstance(config["steps"], int) or config["steps"] < 1:
        raise ValueError(f"steps must be a whole number of at least 1, got {config['steps']!r}")
    fitted = FittedFilter(load_filter(config["checkpoint"], trust=config["trust"]))
    path = Path(config["out"])
    if same_file(config["checkpoint"], config["out"]):
        raise ValueError(f"out={path} would overwrite the checkpoint")
    with console.status(f"writing and comparing {path}"):
        difference = fitted.export(path, format=config["format"], steps=config["steps"])
    message = (
        f"largest difference to the filter over {config['steps']} steps: {difference.estimate:.1e} "
        f"(estimates), {difference.covariance:.1e} (covariances), in standard deviations of the "
        "state"
    )
    if difference.own is not None:
        message += f"; to the filter as it is, in float32, {difference.own:.1e}"
    console.print(f"[bold]{path}[/], {path.name}.json: {message}", highlight=False, soft_wrap=True)
    return 0
