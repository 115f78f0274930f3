"""``kbf append``: adds recordings to the memory of a trained filter without training it again."""

import time
from pathlib import Path
from typing import Any

from kbf.commands.support.console import (
    console,
    print_notes,
    print_read_files,
    print_values,
)
from kbf.data.dataset import load_data
from kbf.data.files.splits import where_known
from kbf.data.windows import Span, take
from kbf.evaluation.score import score
from kbf.fitted.append import append
from kbf.fitted.checkpoint import check_like, load_filter
from kbf.fitted.compatibility import data_differences
from kbf.recording import Recording
from kbf.runtime.provenance import continued, files_of, provenance


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Read recordings, append them and write the new checkpoint; returns the printed summary.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
        ValueError: the recordings do not fit it.
    """
    budget, out, began = config["budget"], Path(config["out"]), time.perf_counter()
    if budget is not None and (not isinstance(budget, int) or budget < 1):
        raise ValueError(
            f"budget must be a whole number of points, or null for all; got {budget!r}"
        )
    loaded = load_filter(config["checkpoint"], device=config["device"], trust=config["trust"])
    check_new(config, loaded.module.config, out)
    if not config["own_data"]:
        print_read_files(config["data"], config["checkpoint"], config["given"])
    data = load_data(config["data"], trust=config["trust"] or config["own_data"])
    print_notes(data.notes)
    record = provenance(config["command"], config, files_of(config["data"]))
    cut = bool(config["data"].get("cut_missing"))
    recordings = [
        part
        for whole in (*data.train, *data.validation, *data.test)
        for part in known_parts(whole, cut_missing=cut)
    ]
    if not recordings:
        raise ValueError(
            "there is no step with a known state in these recordings: nothing can be added"
        )
    check_like(loaded.module, recordings[0], config["checkpoint"])
    print_notes(data_differences(loaded, data, recordings))
    settings: Any = {"seed": config["seed"] or 0, "device": config["device"]}
    with console.status("scoring the old filter on the new recordings"):
        scores = score(loaded.filter, recordings, dtype=loaded.module.input_dtype, **settings)
    with console.status("building the filter over the new memory"):
        appended = append(
            config["checkpoint"],
            recordings,
            out,
            budget=budget,
            trust=config["trust"],
            provenance=continued(loaded.module.provenance, record),
            **settings,
        )
    summary = {
        "points before": appended.before,
        "points added": appended.added,
        "points kept": appended.kept,
        "error of the old filter on the new recordings": scores.mse.mean().item(),
        "seconds": time.perf_counter() - began,
    }
    print_values(f"{config['checkpoint']}, with more recordings", summary)
    console.print(f"in [bold]{out}[/]", highlight=False)
    return {**summary, "checkpoint": str(out)}


def check_new(config: dict[str, Any], stored: dict[str, Any], out: Path) -> None:
    """Check that the checkpoint was not trained on these recordings, and that ``out`` is free.

    Raises:
        ValueError: the recordings are those of the training, or ``out`` is their file.
    """
    path = config["data"].get("path")
    if path == stored["data"].get("path") if path is not None else config["data"] == stored["data"]:
        raise ValueError(
            "the checkpoint was trained on these recordings: name new ones with data.path=FILE "
            "(or seed=NUMBER)"
        )
    if path is not None and out.expanduser().resolve() == Path(path):
        raise ValueError(f"out={out} would overwrite the recordings")


def known_parts(recording: Recording, *, cut_missing: bool = False) -> list[Recording]:
    """Return the parts of a recording in which the state is known.

    With ``cut_missing`` the observation must be known as well, as in training.
    """
    known = recording.states.isfinite().all(-1)
    known = known & recording.mask if cut_missing and recording.mask is not None else known
    return take([recording], where_known([Span(0, 0, len(known))], lambda _: known))
