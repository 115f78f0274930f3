"""Provenance of a result: command, commit, versions, machine, and the files that were read."""

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kbf import __version__
from kbf.runtime.allowlist import REGISTERED, files_named
from kbf.runtime.interpolation import from_environment, masked

# Packages whose versions are recorded: results may differ between versions of these.
PACKAGES = ("torch", "numpy", "lightning")


def commit(root: Path = Path(__file__).parents[2]) -> str | None:
    """Return the commit of the checkout that the code runs from; None for an installed wheel.

    The name ends with "-dirty" where tracked files differ from the commit. Tables in data/results/
    are ignored: they are outputs.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()

    inputs = (":(top)", ":(top,exclude)data/results")
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *inputs)
        return git("describe", "--always") + ("-dirty" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def provenance(
    command: Sequence[str] | None = None, config: Any = None, files: Iterable[Path] = ()
) -> dict[str, Any]:
    """Return command, commit, machine and versions, and the sums of the files that were read.

    Args:
        command: the words after ``kbf``, which are recorded with the working folder; None for
            those that started this process.
        config: of the command. Values of the environment variables that it refers to are written
            as references.
        files: that were read.
    """
    cpus = ""
    with suppress(OSError):  # only Linux has this file
        cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = re.findall(r"model name\s*:(.*)", cpus)
    state = commit()
    words = shlex.join(sys.argv[1:] if command is None else command)
    return {
        "command": masked(f"kbf {words}", config),
        **({} if command is None else {"folder": masked(str(Path.cwd()), config)}),
        "commit": state,
        "clean": None if state is None else not state.endswith("-dirty"),
        "processor": names[0].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
        "kbf": __version__,
        "files": sums_of(files, config),
    }


def sums_of(files: Iterable[Path], config: Any = None) -> list[dict[str, Any]]:
    """Return path, size and SHA-256 sum of each file; ``config`` as of `provenance`."""
    return [
        {"path": masked(str(path), config), "bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in files
    ]


def sha256(path: Path) -> str:
    """Return the SHA-256 sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_of(data: dict[str, Any]) -> list[Path]:
    """Return the files that a ``data`` configuration names, absolute.

    ``path`` may be a file, a folder, a pattern, the common beginning of the names of several files,
    or a list of these. Of a source that is no class of kbf, every setting that is the name of a
    file counts.
    """
    data = from_environment(data)
    settings = data.get("source")
    source = str(settings.get("_target_")) if isinstance(settings, Mapping) else ""
    texts = [value for value in data.values() if isinstance(value, str) and value]
    named = files_named(data) if source in REGISTERED["source"] else texts
    files = [path for name in named if (path := Path(name).expanduser()).is_file()]
    paths = data.get("path") or []
    for path in map(Path, [paths] if isinstance(paths, str) else paths):
        if not (path := path.expanduser()).is_file():
            inside = path.rglob("*") if path.is_dir() else path.parent.glob(f"{path.name}*")
            files += sorted(file for file in inside if file.is_file())
        elif path not in files:
            files.append(path)
    return [file.resolve() for file in files]


def continued(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Return the record of a result that a further command has changed, with that command.

    Args:
        before: record of `provenance`; None where there is none, as in older checkpoints.
        now: that of the further command.
    """
    if before is None:
        return now
    files = {file["path"]: file for file in [*before["files"], *now["files"]]}
    step = {key: now[key] for key in ("command", "folder", "commit", "clean")}
    steps = [*before.get("continued", []), step]
    return {**before, "files": list(files.values()), "continued": steps}


def changes(
    before: dict[str, Any] | None, now: dict[str, Any], *, same_files: bool = False
) -> list[str]:
    """Return one sentence for each file of a former record that has other contents now.

    Args:
        before: record of `provenance`; None where there is none, as in older checkpoints.
        now: the present one.
        same_files: report files that are in one of the records only, as well.
    """
    if before is None:
        return []
    then, present = ({file["path"]: file for file in each["files"]} for each in (before, now))
    found = [
        f"{path} has changed since the training: {file['bytes']:,} bytes, "
        f"SHA-256 {file['sha256'][:12]} then; {present[path]['bytes']:,} bytes, "
        f"{present[path]['sha256'][:12]} now"
        for path, file in then.items()
        if path in present and present[path]["sha256"] != file["sha256"]
    ]
    if same_files:
        found += [f"{path} is new since the training" for path in present if path not in then]
        found += [f"{path} is gone since the training" for path in then if path not in present]
    return found
