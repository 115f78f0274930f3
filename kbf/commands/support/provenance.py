"""Provenance of a result: command line, commit, machine and versions."""

import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from kbf import __version__
from kbf.data.dataset import Data


def about(config: Mapping[str, Any], data: Data) -> dict[str, Any]:
    """Return data set, model, numbers of steps, seed and version of a result."""
    return {
        "data": config["data"].get("name"),
        "model": config["model"]["name"],
        "n_train": sum(len(r.states) for r in data.train),
        "n_test": sum(len(r.states) for r in data.test),
        "seed": config["seed"],
        "version": __version__,
    } | ({} if data.renderer is None else {"renderer": data.renderer})


def commit(root: Path = Path(__file__).parents[3]) -> str | None:
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


def provenance() -> dict[str, Any]:
    """Return command line, commit, machine and versions."""
    cpus = ""
    with suppress(OSError):  # only Linux has this file
        cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = re.findall(r"model name\s*:(.*)", cpus)
    return {
        "command": "kbf " + shlex.join(sys.argv[1:]),
        "commit": commit(),
        "processor": names[0].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kbf": __version__,
    }
