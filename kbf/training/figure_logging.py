"""Pictures for loggers, in TensorBoard's words: tracks, frames with states drawn in, and what an encoder makes of images.

A logger that takes no such picture is passed over; where none does, nothing is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from kbf.images.encodings import Encoding
from kbf.plots.frames import picture, state_kind
from kbf.recording import Recording, as_float

MOST_PROJECTED = 500
"""Most images in the feature projector."""
FRAME = 2
"""Pixels of the coloured frame around a thumbnail."""


def embedding_table(
    states: Shaped[Tensor, "n d"], **more: Sequence[Any]
) -> tuple[list[str], list[list[str]]]:
    """Names of columns, and a row of texts for each state: for TensorBoard's ``add_embedding(metadata_header=..., metadata=...)``.

    The columns are the components of the state, for unit vectors in the plane their angle in
    degrees, and those in ``more``.

    >>> embedding_table(torch.tensor([[0.5, 2.0]]), time=[7])
    (['z_1', 'z_2', 'time'], [['0.5', '2', '7']])
    """
    columns: dict[str, Sequence[Any]] = {
        f"z_{k + 1}": [f"{value:.4g}" for value in z] for k, z in enumerate(states.mT.tolist())
    }
    if state_kind(states) == "compass":
        columns["angle"] = [
            f"{value:.1f}" for value in torch.atan2(states[:, 1], states[:, 0]).rad2deg().tolist()
        ]
    columns |= more
    return list(columns), [
        [str(value) for value in row] for row in zip(*columns.values(), strict=True)
    ]


def thumbnails(images: Shaped[Tensor, "n c h w"], side: int = 32) -> Float[Tensor, "n 3 s s"]:
    """Small colour pictures in [0, 1], for TensorBoard's ``add_embedding(label_img=...)``; not square ones get black edges."""
    x = (
        torch.stack(
            [image if image.ndim == 3 else image[..., None] for image in map(picture, images)]
        )
        .float()
        .movedim(-1, 1)
    )
    h, w = x.shape[2:]
    scale = side / max(h, w)
    size = (max(1, round(h * scale)), max(1, round(w * scale)))
    small = (
        functional.interpolate(x, size, mode="bilinear", antialias=True)
        .clamp(0, 1)
        .expand(-1, 3, -1, -1)
    )
    top, left = (side - size[0]) // 2, (side - size[1]) // 2
    return functional.pad(small, (left, side - size[1] - left, top, side - size[0] - top))


def state_colours(states: Float[Tensor, "n d"]) -> Float[Tensor, "n 3"]:
    """A colour for each state: its hue is the angle of a unit vector in the plane, else that of its first component.

    The least first component is blue, the greatest red.

    >>> state_colours(torch.tensor([[0.0], [1.0]]))
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    if state_kind(states) == "compass":
        hue = torch.atan2(states[:, 1], states[:, 0]) / (2 * torch.pi) % 1
    else:
        first = states[:, 0]
        hue = 2 / 3 * (first.max() - first) / (first.max() - first.min()).clamp_min(1e-12)
    corners = torch.tensor([0.0, 4.0, 2.0])
    return (((6 * hue[:, None].float() + corners) % 6 - 3).abs() - 1).clamp(0, 1)


def framed(
    images: Float[Tensor, "n 3 h w"], colours: Float[Tensor, "n 3"]
) -> Float[Tensor, "n 3 h w"]:
    """Images with an edge of `FRAME` pixels in these colours: a map of features then shows the states before anybody clicks."""
    inside = functional.pad(torch.ones_like(images)[..., FRAME:-FRAME, FRAME:-FRAME], 4 * (FRAME,))
    return inside * images + (1 - inside) * colours[:, :, None, None]


def takers(loggers: list[Any], method: str) -> list[Any]:
    """What is behind those loggers that have this method."""
    return [
        logger.experiment
        for logger in loggers
        if hasattr(getattr(logger, "experiment", None), method)
    ]


def log_track(
    loggers: list[Any],
    tag: str,
    sequence: Recording,
    estimates: Tensor,
    step: int,
    *,
    covariances: Tensor | None = None,
) -> None:
    """Truth, observation and estimate over time and in the plane."""
    for taker in takers(loggers, "add_figure"):
        from kbf.plots.tracks import track_figure

        taker.add_figure(tag, track_figure(sequence, estimates, covariances), step)


def log_frames(
    loggers: list[Any], tag: str, sequence: Recording, estimates: Tensor, step: int, **settings: Any
) -> None:
    """Images with truth and estimate; ``settings`` of `kbf.plots.frames.frame_grid`."""
    for taker in takers(loggers, "add_figure"):
        from kbf.plots.frames import frame_grid

        taker.add_figure(tag, frame_grid(sequence, estimates, **settings), step)


def log_encodings(
    loggers: list[Any],
    code: Encoding,
    data: tuple[Tensor, Tensor, Tensor],
    step: int,
    *,
    extent: Any = None,
    frames: int = 16,
) -> None:
    """Images from all over the recordings, each with the code by the member that has not seen it, as ``frames/encoding``.

    The code is left in eval mode.

    Args:
        loggers: where to.
        code: its members.
        data: observations ``n *x`` (only images ``n c h w`` are drawn), states ``n d``, and for
            each the number of the member that has not seen it ``n``; a single member has seen them
            all.
        step: of the optimizer.
        extent: as for `kbf.plots.frames.frame_grid`.
        frames: how many.
    """
    obs, states, chunk = data
    if obs.ndim == 4 and takers(loggers, "add_figure"):
        rows = spread(len(obs), frames)
        z, x, held = (values[rows].to(code.z_mean.device) for values in (states, obs, chunk))
        shown = Recording(z, x)
        encodings = code.crossfit(shown, held).obs[:, : len(code.z_mean)]
        log_frames(
            loggers,
            "frames/encoding",
            shown,
            encodings,
            step,
            names=[f"image {k}" for k in rows],
            called="code",
            extent=extent,
        )


@torch.no_grad()
def log_features(
    loggers: list[Any], code: Encoding, data: tuple[Tensor, Tensor, Tensor], step: int
) -> None:
    """For the projector: features by the first encoder of at most `MOST_PROJECTED` images, states, and thumbnails.

    The thumbnails are framed in the states' colours. Arguments as of `log_encodings`.
    """
    obs, states, chunk = data
    for taker in takers(loggers, "add_embedding"):
        code.eval()
        rows = spread(len(obs), MOST_PROJECTED)
        images = as_float(obs[rows], torch.float32).to(code.z_mean.device)
        psi = torch.cat([code.encoders[0](part) for part in images.split(256)])
        seen = ["no" if k == 0 and len(code.encoders) > 1 else "yes" for k in chunk[rows].tolist()]
        header, table = embedding_table(states[rows], image=rows, seen=seen)
        small = (
            framed(thumbnails(obs[rows].cpu()), state_colours(states[rows].cpu()))
            if obs.ndim == 4
            else None
        )
        taker.add_embedding(psi.float().cpu(), table, small, step, "features", header)


def spread(n: int, most: int) -> list[int]:
    """At most ``most`` of the numbers 0..n-1, evenly spaced.

    >>> spread(10, 4)
    [0, 3, 6, 9]
    """
    return torch.linspace(0, n - 1, min(n, most)).round().long().tolist()
