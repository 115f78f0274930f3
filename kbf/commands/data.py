"""``kbf data``: write a data set as arrays, with a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from kbf.commands.support.console import console, save_arrays, show, start
from kbf.data.dataset import load_data
from kbf.plots.frames import frame_grid
from kbf.plots.tracks import save, track_figure


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Make the data set, write its arrays and a picture, and print a summary."""
    start(config["threads"])
    data = load_data(config["data"], trust=True)
    directory = Path(config["run_dir"])
    arrays: dict[str, Tensor] = {}
    summary: dict[str, Any] = {}
    for part in ("train", "validation", "test") if data.validation else ("train", "test"):
        sequences = getattr(data, part)
        for k, sequence in enumerate(sequences):
            arrays |= {
                f"{part}_{name}_{k}": leaf
                for name, leaf in sequence._asdict().items()
                if leaf is not None
            }
        summary |= {
            f"{part} sequences": len(sequences),
            f"{part} steps": sum(len(s.states) for s in sequences),
            f"{part} steps without observation": sum(
                0 if s.mask is None else int((~s.mask).sum()) for s in sequences
            ),
        }
    first = data.train[0]
    summary |= {
        "state": tuple(first.states.shape[1:]),
        "observation": tuple(first.obs.shape[1:]),
        "true model known": data.problem is not None,
        "views": data.renderer,  # of images: who rendered them
    }
    save_arrays(directory / "data.npz", arrays)
    title = f"{config['data']['name']}, the first training steps"
    images = first.obs.ndim == 4
    figure = (
        frame_grid(first, extent=data.extent, title=title)
        if images
        else track_figure(first, title=title)
    )
    save(figure, directory / "data.png")
    show(str(config["data"]["name"]), summary)
    console.print(f"in [bold]{directory}[/]: data.npz, data.png", highlight=False)
    return summary
