"""``kbf data render pendulum``: runs of Gymnasium's pendulum as a file of recordings for ``data=own``, with a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from kbf.commands.support.console import console, show
from kbf.data.pendulum import PendulumModel, noisy, simulate_run, write_recordings
from kbf.plots.frames import frame_grid
from kbf.plots.tracks import save
from kbf.recording import Recording

PIXEL_NOISE = 0.1
"""As in configs/data/pendulum.yaml."""


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Simulate ``sequences`` runs of ``steps`` images with the seeds ``seed``, ``seed`` + 1, ..., and write them.

    The file is written when all are there: a run of 1,000 images takes some seconds.

    Raises:
        ValueError: no step or no run, a file that is no npz, or Gymnasium or pygame are not
            installed.
    """
    steps, seed, out = config["steps"], config["seed"], Path(config["out"]).expanduser()
    if not steps or not config["sequences"]:
        raise ValueError(
            f"steps and sequences must be at least 1, got {steps} and {config['sequences']}"
        )
    if out.suffix != ".npz":
        raise ValueError(f"out must end in .npz, got {out}")
    model, seeds = PendulumModel(), list(range(seed, seed + config["sequences"]))
    columns = [
        TextColumn("pendulum"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("pendulum", total=steps * len(seeds))
        runs = [
            simulate_run(model, steps, one, lambda done: progress.advance(bar)) for one in seeds
        ]
    write_recordings(out, model, runs, seeds, PIXEL_NOISE)
    first = Recording(model.embed(runs[0].y), noisy(runs[0].frames, PIXEL_NOISE, seed))
    picture = out.with_suffix(".png")
    save(frame_grid(first, title=f"pendulum, seed {seed}: the first steps"), picture)
    summary = {
        "recordings": len(runs),
        "steps of each": steps,
        "state": "cos theta, sin theta, rad/s",
        "image": "3 x 32 x 32",
    }
    show(str(out), summary)
    console.print(
        f"{picture.name} shows them; the data: [bold]data=own data.path={out}[/], or data=pendulum",
        highlight=False,
    )
    return summary
