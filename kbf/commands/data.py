"""``kbf data``: writes a data set as arrays, with a figure."""

from pathlib import Path
from typing import Any

from torch import Tensor

from kbf.commands.support.console import print_values, print_written
from kbf.commands.support.run_files import labels, save_arrays
from kbf.commands.support.run_states import read_json
from kbf.data.dataset import load_data
from kbf.plots.frames import frame_grid
from kbf.plots.tracks import save, track_figure
from kbf.runtime.atomic_files import write_json
from kbf.runtime.provenance import files_of, provenance
from kbf.runtime.run_folders import ABOUT


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Make the data set, write its arrays and a figure, and print and return a summary.

    Raises:
        ValueError: the folder holds another data set.
    """
    directory = Path(config["run_dir"])
    data = load_data(config["data"], trust=True)
    record = provenance(config["command"], config, files_of(config["data"]))
    other = read_json(directory / ABOUT).get("command", record["command"])
    if other != record["command"] and not config["overwrite"]:
        raise ValueError(
            f"{directory} holds the data of {other}: name another run_dir, or replace it with "
            "overwrite=true"
        )
    arrays: dict[str, Tensor] = {}
    summary: dict[str, Any] = {}
    for part in ("train", "validation", "test") if data.validation else ("train", "test"):
        recordings = getattr(data, part)
        for k, recording in enumerate(recordings):
            arrays |= {
                f"{part}_{name}_{k}": leaf
                for name, leaf in recording._asdict().items()
                if leaf is not None
            }
        masks = [recording.mask for recording in recordings if recording.mask is not None]
        summary |= {
            f"{part} recordings": len(recordings),
            f"{part} steps": sum(len(recording.states) for recording in recordings),
            f"{part} steps without observation": sum(int((~mask).sum()) for mask in masks),
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
    if first.obs.ndim == 4:
        figure = frame_grid(first, extent=data.extent, title=title)
    else:
        figure = track_figure(
            first, title=title, names=labels(config, data), time_step=data.time_step
        )
    save(figure, directory / "data.png")
    print_values(str(config["data"]["name"]), summary)
    write_json(directory / ABOUT, record)
    print_written(directory, ["data.npz", "data.png", ABOUT])
    return summary
