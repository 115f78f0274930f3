"""``kbf data render pendulum``: simulates Gymnasium's pendulum for ``data=own``, with a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kbf.commands.support.console import console, print_values, progress_bar
from kbf.data.pendulum import PendulumModel, noisy, simulate_run, write_recordings
from kbf.plots.frames import frame_grid
from kbf.plots.tracks import save
from kbf.recording import Recording

# Standard deviation of the noise of a pixel, as in configs/data/pendulum.yaml.
PIXEL_NOISE = 0.1


def run(config: dict[str, Any], out: Path) -> dict[str, Any]:
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
