"""``kbf data render``: renders the views of a full turn, or a simulator's recordings, as a file."""

from pathlib import Path
from typing import Any

import torch
from torchvision.utils import make_grid, save_image

import kbf.data.render
from kbf.commands.support.console import console, print_values, progress_bar
from kbf.data.dmlab import VIEWS, render_turn
from kbf.data.frames import Frames, check_frames, write_frames
from kbf.data.pendulum import PendulumModel, noisy, simulate_run, write_recordings
from kbf.data.render import dmlab
from kbf.plots.frames import frame_grid
from kbf.plots.tracks import save
from kbf.recording import Recording
from kbf.runtime.atomic_files import replacing

# Standard deviation of the noise of a pixel, as in configs/data/pendulum.yaml.
PIXEL_NOISE = 0.1

# The renderers.
NAMES = ("dmlab", *kbf.data.render.NAMES, "pendulum")


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Render, check and write the views; prints and returns a summary.

    Raises:
        ValueError: there is no such renderer, a setting is impossible, or the views are no full
            turn.
    """
    name, turns, out = config["renderer"], config["turns"], Path(config["out"]).expanduser()
    size, level, seed, look = (config[key] for key in ("size", "level", "seed", "look"))
    if name not in NAMES:
        raise ValueError(f"there is no renderer {name!r}; renderers: {', '.join(NAMES)}")
    if out.suffix != ".npz":
        raise ValueError(f"out must end in .npz, got {out}")
    if name == "pendulum":
        return render_pendulum(config, out)
    if not turns:
        raise ValueError(f"turns must be at least 1, got {turns}")
    sides = size if isinstance(size, list) and len(size) == 2 else [0, 0]
    if not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"size must be [height,width] in pixels, got {size}")
    height, width = sides
    part = out.with_name(f"{out.name}.part")
    views = dmlab.expected_views(turns, look or 1) if name == "dmlab" else VIEWS * turns
    with progress_bar(name, transient=True) as progress:
        bar = progress.add_task("", total=views)

        def show(done: int) -> None:
            progress.update(bar, completed=done)

        settings = {"level": level, "seed": seed, "size": (height, width)}
        if name == "dmlab":
            frames = dmlab.turn_round(part, **settings, turns=turns, look=look, progress=show)
        else:
            frames = render_turn(name, views, **settings, progress=show)
        progress.update(bar, total=len(frames.images), completed=len(frames.images))
    try:
        turn = check_frames(frames)
    except ValueError:
        part.unlink(missing_ok=True)  # a second attempt would continue with the same views
        raise
    write_frames(out, frames)
    part.unlink(missing_ok=True)
    sheet = out.with_suffix(".png")
    contact_sheet(frames, sheet)
    summary = {key: frames.about.get(key) for key in ("renderer", "level", "seed")}
    summary |= {
        "views": turn.views,
        "size": f"{height} x {width}",
        "largest gap": f"{turn.gap:.3f} degrees",
    }
    print_values(str(out), summary)
    use = f"[bold]data=dmlab data.frames={out}[/]"
    console.print(f"{sheet.name} shows them; the data: {use}", highlight=False)
    return summary


def contact_sheet(frames: Frames, path: Path, count: int = 24) -> None:
    """Write an image of ``count`` views, evenly spaced in yaw from -180 degrees on, row by row."""
    order = ((frames.yaw_degrees + 180) % 360).argsort()
    which = order[torch.linspace(0, len(order) - 1, count + 1)[:count].long()]
    views = frames.images[which].permute(0, 3, 1, 2).float() / 255
    with replacing(path) as temporary:
        save_image(make_grid(views, nrow=6, padding=3, pad_value=1.0), temporary)


def render_pendulum(config: dict[str, Any], out: Path) -> dict[str, Any]:
    """Simulate runs of ``steps`` images with the seeds ``seed``, ``seed`` + 1, ... and write them.

    ``recordings`` is the number of runs. The file is written when all are finished; a run of 1,000
    images takes some seconds.

    Raises:
        ValueError: no step or no run, or Gymnasium or pygame are not installed.
    """
    steps, count, seed = config["steps"], config["recordings"], config["seed"]
    if not steps or not count:
        raise ValueError(f"steps and recordings must be at least 1, got {steps} and {count}")
    model, seeds = PendulumModel(), list(range(seed, seed + count))
    with progress_bar("pendulum", transient=True) as progress:
        bar = progress.add_task("", total=steps * count)
        runs = [
            simulate_run(model, steps, one, lambda done: progress.advance(bar)) for one in seeds
        ]
    write_recordings(out, model, runs, seeds, PIXEL_NOISE)
    first = Recording(model.embed(runs[0].y), noisy(runs[0].frames, PIXEL_NOISE, seed))
    figure = out.with_suffix(".png")
    save(frame_grid(first, title=f"pendulum, seed {seed}: the first steps"), figure)
    summary = {
        "recordings": len(runs),
        "steps of each": steps,
        "state": "cos theta, sin theta, rad/s",
        "image": "3 x 32 x 32",
    }
    print_values(str(out), summary)
    use = f"[bold]data=own data.path={out}[/], or data=pendulum"
    console.print(f"{figure.name} shows them; the data: {use}", highlight=False)
    return summary
