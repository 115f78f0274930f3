"""Files of a run directory: arrays, estimates by column, figures of the first test recording."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from kbf.data.cache import write_arrays
from kbf.data.dataset import Data
from kbf.evaluation.score import Score


def state_columns(data: Data) -> list[str]:
    """Return the names of the state components as filters see them; empty where none are given."""
    names = [] if data.column_schema is None else data.column_schema.components("states")
    part = [*data.train, *data.test][:1]
    return names if part and len(names) == part[0].states.shape[1] else []


def labels(config: Mapping[str, Any], data: Data) -> list[str]:
    """Return `state_columns` with the units of ``data.units``."""
    units = (config.get("data") or {}).get("units") or {}
    return [f"{name} [{units[name]}]" if name in units else name for name in state_columns(data)]


def estimate_rows(
    data: Data, result: Score, bounds: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the estimates of the test part in the file's own columns and units, a row a step.

    They are within the bounds of the states, by column.
    """
    rows = []
    for k, estimates in enumerate(result.estimates):
        columns = data.column_schema.decode(
            estimates, None if result.covariances is None else result.covariances[k]
        )
        columns |= {key: columns[key].clamp(*ends) for key, ends in (bounds or {}).items()}
        values = zip(*(column.tolist() for column in columns.values()), strict=True)
        rows += [
            {"recording": k, "step": t, **dict(zip(columns, row, strict=True))}
            for t, row in enumerate(values)
        ]
    return rows


def save_arrays(path: Path, arrays: Mapping[str, Tensor]) -> None:
    """Write tensors to one compressed npz file, atomically."""
    write_arrays(path, {name: value.detach().cpu().numpy() for name, value in arrays.items()})


def write_figures(
    config: Mapping[str, Any], data: Data, result: Score, title: str, **marked: Any
) -> list[str]:
    """Draw the first test recording into the run directory and return the names of the files.

    ``track.png`` is drawn for all data, ``frames.png`` for images, and ``filter.gif`` where
    ``config["animation"]`` and ``config["animation_steps"]`` ask for it.

    Args:
        config: of the run.
        data: its test part was scored.
        result: the scores.
        title: of the figures; the test error is appended.
        marked: ``alarms`` and ``radius2`` of `kbf.plots.tracks.track_figure`.
    """
    from kbf.plots import animation, frames, tracks

    directory, images = Path(config["run_dir"]), data.test[0].obs.ndim == 4
    shown = (data.test[0], result.estimates[0])
    shown += (None if result.covariances is None else result.covariances[0],)
    title = f"{title}: test error {result.mse.mean().item():.4f}"
    track: Any = tracks.track_figure(
        *shown, title=title, names=labels(config, data), time_step=data.time_step, **marked
    )
    tracks.save(track, directory / "track.png")
    names = ["track.png"]
    if images:
        tracks.save(
            frames.frame_grid(*shown, extent=data.extent, title=title), directory / "frames.png"
        )
        names.append("frames.png")
    steps = config["animation_steps"]
    if steps and (images if config["animation"] is None else config["animation"]):
        where = directory / "filter.gif"
        animation.animate(where, *shown, steps=steps, extent=data.extent, title=title)
        names.append(where.name)
    return names
