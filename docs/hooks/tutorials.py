"""Tutorials: runs the cells of docs/tutorials/ and writes them as pages and as notebooks."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import jupytext
from jupyter_client import AsyncKernelManager
from nbclient import NotebookClient
from nbconvert import MarkdownExporter

FOLDER = Path(__file__).resolve().parents[1] / "tutorials"
NAMES = (
    *("getting_started", "vectors", "images", "missing_sensors", "spikes", "own_network"),
    *("recordings", "extending"),
)
"""Tutorials in reading order."""
ARM = FOLDER.parents[1] / "data" / "arm.csv"
"""The recordings that tutorials read as ``data/arm.csv``, offered for download."""


def run(name: str) -> Any:
    """The notebook of a tutorial with outputs, run next to data/arm.csv; raises errors of cells.

    With ``RUN_TUTORIALS=0`` in the environment it is not run and has no outputs.
    """
    notebook = jupytext.read(FOLDER / f"{name}.py")
    notebook.metadata["kernelspec"] = {
        "name": "python3",
        "display_name": "Python 3",
        "language": "python",
    }
    if os.environ.get("RUN_TUTORIALS") == "0":  # pages without outputs, to look at the others
        return notebook
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "data").mkdir()
        shutil.copy(ARM, Path(folder) / "data")
        kernel = os.environ | {
            "PYTHONPATH": os.pathsep.join(
                [str(FOLDER.parents[1]), os.environ.get("PYTHONPATH", "")]
            )
        }
        manager = AsyncKernelManager(
            kernel_name="python3", transport="ipc", ip=f"{folder}/ipc"
        )  # no port of the machine is opened
        resources = {"metadata": {"path": folder}}
        NotebookClient(
            notebook, km=manager, timeout=600, startup_timeout=600, resources=resources
        ).execute(env=kernel, cleanup_kc=True)
    return notebook


def pages(name: str) -> dict[str, str | bytes]:
    """Files of a tutorial below tutorials/: the page in Markdown, its figures, and the notebook."""
    notebook = run(name)
    text, resources = MarkdownExporter().from_notebook_node(notebook)
    files: dict[str, str | bytes] = {f"{name}.ipynb": jupytext.writes(notebook, fmt="ipynb")}
    for picture, content in resources["outputs"].items():
        text = text.replace(f"]({picture})", f"]({name}_{picture})")
        files[f"{name}_{picture}"] = content
    text = text.replace("![png](", "![Figure of the cell above](")
    files[f"{name}.md"] = (
        f"{text}\n*This page is a notebook, run when the documentation was built: "
        f"[download]({name}.ipynb).*\n"
    )
    if f"({ARM.name})" in text:
        files[ARM.name] = ARM.read_bytes()
    return files
