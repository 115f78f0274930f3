"""``kbf data render``: the views of a full turn as a frames file, with a picture; or a simulator's recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from torchvision.utils import make_grid, save_image

import kbf.data.render
from kbf.commands import render_pendulum
from kbf.commands.support.console import console, show, start
from kbf.data.dmlab import VIEWS, render_turn
from kbf.data.frames import Frames, check_frames, write_frames
from kbf.data.render import dmlab
from kbf.runtime.atomic_files import replacing

NAMES = ("dmlab", *kbf.data.render.NAMES)


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Render, check, write; say what it is.

    Raises:
        ValueError: no such renderer, a setting that cannot be, or views that are no full turn.
    """
    start()
    if config["renderer"] == "pendulum":
        return render_pendulum.run(config)
    name, turns, out = config["renderer"], config["turns"], Path(config["out"]).expanduser()
    size = config["size"]
    if name not in NAMES:
        raise ValueError(f"there is no renderer {name!r}; renderers: {', '.join(NAMES)}, pendulum")
    if out.suffix != ".npz":
        raise ValueError(f"out must end in .npz, got {out}")
    if not turns:
        raise ValueError(f"turns must be at least 1, got {turns}")
    if (
        not isinstance(size, list)
        or len(size) != 2
        or not all(isinstance(side, int) and side > 0 for side in size)
    ):
        raise ValueError(f"size must be [height,width] in pixels, got {size}")
    part = out.with_name(f"{out.name}.part")
    level, seed, sides, look = config["level"], config["seed"], (size[0], size[1]), config["look"]
    views = dmlab.expected_views(turns, look or 1) if name == "dmlab" else VIEWS * turns
    columns = [
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(name, total=views)

        def tell(done: int) -> None:
            progress.update(bar, completed=done)

        if name == "dmlab":
            turned = dmlab.turn_round(
                part, level=level, seed=seed, size=sides, turns=turns, look=look, progress=tell
            )
            frames = Frames(*turned)
        else:
            frames = render_turn(name, views, level, seed, sides, tell)
        progress.update(bar, total=len(frames.images), completed=len(frames.images))
    try:
        turn = check_frames(frames)
    except ValueError:
        part.unlink(missing_ok=True)  # the same views would come again
        raise
    write_frames(out, frames)
    part.unlink(missing_ok=True)
    picture = out.with_suffix(".png")
    contact_sheet(frames, picture)
    summary = {key: frames.about.get(key) for key in ("renderer", "level", "seed")}
    summary |= {
        "views": turn.views,
        "size": f"{size[0]} x {size[1]}",
        "largest gap": f"{turn.gap:.3f} degrees",
    }
    show(str(out), summary)
    console.print(
        f"{picture.name} shows them; the data: [bold]data=dmlab data.frames={out}[/]",
        highlight=False,
    )
    return summary


def contact_sheet(frames: Frames, path: Path, count: int = 24) -> None:
    """Write a picture of ``count`` views, evenly spaced in yaw from -180 degrees on, line by line."""
    order = ((frames.yaw_degrees + 180) % 360).argsort()
    which = order[torch.linspace(0, len(order) - 1, count + 1)[:count].long()]
    grid = make_grid(
        frames.images[which].permute(0, 3, 1, 2).float() / 255, nrow=6, padding=3, pad_value=1.0
    )
    with replacing(path) as temporary:
        save_image(grid, temporary)
