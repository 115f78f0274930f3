"""``kbf report``: what was found about a filter and its recordings, as one HTML file."""

from pathlib import Path
from typing import Any

from kbf.commands.support.console import console
from kbf.fitted.checkpoint import load_filter
from kbf.fitted.fitted_filter import FittedFilter
from kbf.fitted.trials import MODELS
from kbf.runtime.progress import shown_progress


def run(config: dict[str, Any]) -> int:
    """Load the checkpoint, write the report and print its sentences; returns the exit code.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ValueError: an unknown model, or a file that exists.
    """
    model, out = config["trial_model"], Path(config["out"]).expanduser()
    if model is not None and model not in MODELS:
        raise ValueError(f"trial_model={model} is none of {', '.join(MODELS)}")
    if out.suffix.lower() not in (".html", ".htm"):
        raise ValueError(f"out={config['out']}: a report is an HTML file, as report.html")
    if out.exists() and not config["overwrite"]:
        raise ValueError(f"{out} exists: name another out, or replace it with overwrite=true")
    fitted = FittedFilter(load_filter(config["checkpoint"], trust=config["trust"]))
    with shown_progress("report"):
        sentences = fitted.report(out, trials=config["trials"], model=model)
    for sentence in sentences:
        console.print(sentence, markup=False, highlight=False, soft_wrap=True)
    console.print(f"in [bold]{out}[/]", highlight=False, soft_wrap=True)
    return 0
