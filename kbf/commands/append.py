"""``kbf append``: adds recordings to the memory of a trained filter without training it again."""

import time
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

from kbf.commands.filter import same_file
from kbf.commands.support.console import (
    console,
    print_notes,
    print_read_files,
    print_values,
)
from kbf.data.dataset import load_data
from kbf.evaluation.score import score
from kbf.fitted.append import append, known_parts
from kbf.fitted.checkpoint import check_like, load_filter, read_checkpoint, save_checkpoint
from kbf.fitted.compatibility import data_differences
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
    if not config["overwrite"]:
        check_own(out, config["checkpoint"], record)
    cut = bool(config["data"].get("cut_missing"))
    recordings = known_parts([*data.train, *data.validation, *data.test], cut_missing=cut)
    check_like(loaded.module, recordings[0], config["checkpoint"])
    print_notes(data_differences(loaded, data, recordings))
    again: Any = {"refit": config["refit"], "seed": config["seed"] or 0}
    settings: Any = {"seed": config["seed"] or 0, "device": config["device"]}
    with console.status("scoring the old filter on the new recordings"):
        scores = score(loaded.filter, recordings, dtype=loaded.module.input_dtype, **settings)
    with console.status("building the filter over the new memory"):
        appended = append(loaded, recordings, budget=budget, **again)
    loaded.module.provenance = continued(loaded.module.provenance, record)
    save_checkpoint(appended.trained, out)
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


def check_own(out: Path, checkpoint: str, record: dict[str, Any]) -> None:
    """Check that ``out`` is free, the checkpoint that is extended, or of the same command before.

    Raises:
        ValueError: it is another file, whose points would be lost.
    """
    out = out.expanduser()
    if not out.exists() or same_file(checkpoint, str(out)):
        return
    advice = "name another out, or replace it with overwrite=true"
    if not out.is_file() or not is_zipfile(out):  # what PyTorch writes
        raise ValueError(f"{out} exists and is no checkpoint: {advice}")
    before = read_checkpoint(out).get("kbf", {}).get("provenance") or {}
    last = before.get("continued", [{}])[-1]
    if any(last.get(key) != record[key] for key in ("command", "folder")):
        steps = [each["command"] for each in (before, last) if "command" in each]
        written = f" of {steps[-1]}" if steps else ""
        raise ValueError(f"{out} holds the result{written}, which would be lost: {advice}")


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
    if path is not None and out.expanduser().resolve() in files_of(config["data"]):
        raise ValueError(f"out={out} would overwrite the recordings")
