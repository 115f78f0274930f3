"""Figures in notebooks: displayed once, with and without ``%matplotlib inline`` and pyplot."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from kbf.plots.inline_figure import InlineFigure


def test_the_png_is_the_figure():
    figure = InlineFigure(figsize=(3, 2), dpi=50)
    figure.subplots().plot([0, 1], color="#ff0000", lw=20)
    with Image.open(io.BytesIO(figure._repr_png_())) as image:
        assert image.size == (150, 100) and image.format == "PNG"
        colours = image.convert("RGB").getcolors(100_000)
    assert colours and (255, 0, 0) in [colour for _, colour in colours]


FIGURE = """
from kbf.plots.inline_figure import InlineFigure
figure = InlineFigure(figsize=(3, 2))
line = figure.subplots().plot([0, 1])
figure
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", ["", "%matplotlib inline\nimport matplotlib.pyplot as plt"])
def test_a_notebook_displays_a_figure_once(before, tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    jupyter_client = pytest.importorskip("jupyter_client")
    cells = [nbformat.v4.new_code_cell(source) for source in (before, FIGURE)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    manager = jupyter_client.AsyncKernelManager(
        kernel_name="python3", transport="ipc", ip=f"{tmp_path}/ipc"
    )
    client = nbclient.NotebookClient(notebook, km=manager, timeout=300, startup_timeout=300)
    client.execute(cleanup_kc=True)
    shown = [
        output for output in notebook.cells[-1].outputs if "image/png" in output.get("data", {})
    ]
    assert len(shown) == 1
