"""``kbf runs show``: prints the provenance of a run or a checkpoint, and how to repeat it."""

import shlex
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from kbf.commands.support.console import console, print_notes, print_table, print_values
from kbf.commands.support.run_states import read_json
from kbf.fitted.checkpoint import read_checkpoint
from kbf.runtime.provenance import commit, sha256
from kbf.runtime.run_folders import ABOUT

# Commands that write to ``run_dir``, which does not take a second run.
WITH_RUN_DIR = ("train", "evaluate", "compare", "data")


def run(config: dict[str, Any]) -> int:
    """Print the record, the state of its files, and the command that repeats the run; returns 0.

    Raises:
        ValueError: the folder or the checkpoint contains no record.
    """
    place = Path(config["folder"])
    record = record_of(place)
    lists = ("files", "continued", "settings")
    print_values(str(place), {key: value for key, value in record.items() if key not in lists})
    if record.get("files"):
        table = Table("file", "bytes", "SHA-256", "now")
        for file in record["files"]:
            known = (str(file["path"]), f"{file['bytes']:,}", str(file["sha256"]))
            table.add_row(*map(escape, known), present_state(file))
        print_table(table)
    steps = record.get("continued", [])
    print_notes(f"continued by {step['command']} (commit {step['commit']})" for step in steps)
    if (here := commit()) != record.get("commit"):
        print_notes([f"the run is of commit {record.get('commit')}, this is {here}"])
    console.print("to repeat it:", highlight=False)
    text = repeating(record, place if place.is_dir() else None)
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0


def record_of(place: Path) -> dict[str, Any]:
    """Return the record of a run directory or of a checkpoint.

    Raises:
        ValueError: there is none.
    """
    if place.is_dir():
        record = read_json(place / ABOUT)
    else:
        record = read_checkpoint(place)["kbf"].get("provenance")
    if not isinstance(record, dict) or not isinstance(record.get("command"), str):
        raise ValueError(
            f"{place} has no record of its provenance: it is not of kbf train, evaluate, "
            "compare or data, or of an older version of kbf"
        )
    return record


def present_state(file: dict[str, Any]) -> str:
    """Return whether a file of a record is the same now: unchanged, changed or missing."""
    path = Path(file["path"])
    if not path.is_file():
        return "missing"
    same = path.stat().st_size == file["bytes"] and sha256(path) == file["sha256"]
    return "unchanged" if same else "changed"


def repeating(record: dict[str, Any], directory: Path | None) -> str:
    """Return the command that repeats a run, into another folder than its own.

    Args:
        record: of `kbf.runtime.provenance.provenance`.
        directory: of the run; None for that of the command.

    >>> record = {"command": "kbf train n_train=50 run_dir=a overwrite=true", "folder": "/home/me"}
    >>> repeating(record, Path("runs/a"))
    'cd /home/me && kbf train n_train=50 run_dir=runs/a-again'
    """
    words = shlex.split(record["command"])
    if words[:1] == ["kbf"] and words[1:2] and words[1] in WITH_RUN_DIR and directory is not None:
        words = [w for w in words if w.partition("=")[0] not in ("run_dir", "overwrite")]
        words.append(f"run_dir={directory}-again")
    place = f"cd {shlex.quote(record['folder'])} && " if record.get("folder") else ""
    return place + shlex.join(words)
