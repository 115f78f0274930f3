"""Pictures for loggers, in TensorBoard's words: tracks, frames with states drawn in, and what an encoder makes of images.

A logger that takes no such picture is passed over; where none does, nothing is drawn.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kbf.nn.coding import Code
from kbf.sequence import Sequence, as_float

SHOWN = 500
"""Most images in the feature projector."""


def takers(loggers: list[Any], method: str) -> list[Any]:
    """What is behind those loggers that have this method."""
    return [logger.experiment for logger in loggers if hasattr(getattr(logger, "experiment", None), method)]


def log_track(
    loggers: list[Any], tag: str, sequence: Sequence, found: Tensor, step: int, *, covariances: Tensor | None = None
) -> None:
    """Truth, observation and estimate over time and in the plane."""
    for taker in takers(loggers, "add_figure"):
        from kbf.plots import track_figure

        taker.add_figure(tag, track_figure(sequence, found, covariances), step)


def log_frames(loggers: list[Any], tag: str, sequence: Sequence, found: Tensor, step: int, **settings: Any) -> None:
    """Images with truth and estimate; ``settings`` of `kbf.frame_plots.frame_grid`."""
    for taker in takers(loggers, "add_figure"):
        from kbf.frame_plots import frame_grid

        taker.add_figure(tag, frame_grid(sequence, found, **settings), step)


def log_codes(
    loggers: list[Any], code: Code, data: tuple[Tensor, Tensor, Tensor], step: int, *, extent: Any = None, frames: int = 16
) -> None:
    """Images from all over the recordings, each with the code by the member that has not seen it, as ``frames/coding``.

    The code is left in eval mode.

    Args:
        loggers: where to.
        code: its members.
        data: observations ``n *x`` (only images ``n c h w`` are drawn), states ``n d``, and for each the number of the member that
            has not seen it ``n``; a single member has seen them all.
        step: epoch.
        extent: as for `kbf.frame_plots.frame_grid`.
        frames: how many.
    """
    obs, states, chunk = data
    if obs.ndim == 4 and takers(loggers, "add_figure"):
        rows = spread(len(obs), frames)
        z, x, held = (values[rows].to(code.z_mean.device) for values in (states, obs, chunk))
        shown = Sequence(z, x)
        codes = code.crossfit(shown, held).obs
        log_frames(loggers, "frames/coding", shown, codes, step, names=[f"image {k}" for k in rows], called="code", extent=extent)


@torch.no_grad()
def log_features(loggers: list[Any], code: Code, data: tuple[Tensor, Tensor, Tensor], step: int) -> None:
    """Features by the first encoder of at most `SHOWN` images, with states and thumbnails, for the projector; as `log_codes`."""
    obs, states, chunk = data
    for taker in takers(loggers, "add_embedding"):
        from kbf.frame_plots import embedding_table, thumbnails

        code.eval()
        rows = spread(len(obs), SHOWN)
        images = as_float(obs[rows], torch.float32).to(code.z_mean.device)
        psi = torch.cat([code.encoders[0](part) for part in images.split(256)])
        seen = ["no" if k == 0 and len(code.encoders) > 1 else "yes" for k in chunk[rows].tolist()]
        header, table = embedding_table(states[rows], image=rows, seen=seen)
        small = thumbnails(obs[rows].cpu()) if obs.ndim == 4 else None
        taker.add_embedding(psi.float().cpu(), table, small, step, "features", header)


def spread(n: int, most: int) -> list[int]:
    """At most ``most`` of the numbers 0..n-1, evenly spaced.

    >>> spread(10, 4)
    [0, 3, 6, 9]
    """
    return torch.linspace(0, n - 1, min(n, most)).round().long().tolist()
