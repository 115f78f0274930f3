"""Figures for loggers: tracks, frames with states drawn in, and the features of encoders.

The interface is that of TensorBoard. Loggers without it are skipped; where all are, nothing is
drawn.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import functional

from kbf.images.encodings import Encoding
from kbf.plots.frames import picture, state_kind
from kbf.recording import Recording, as_float

# Images in the feature projector.
MAX_PROJECTED_IMAGES = 500
# Pixels of the coloured frame around a thumbnail.
FRAME_WIDTH = 2


def embedding_table(
    states: Shaped[Tensor, "n d"], **more: Sequence[Any]
) -> tuple[list[str], list[list[str]]]:
    """Return names of columns and a row of texts for each state, for TensorBoard's projector.

    They are the arguments ``metadata_header`` and ``metadata`` of ``add_embedding``.

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
    """Return small square colour images in [0, 1], with black edges where they were not square.

    They are the argument ``label_img`` of TensorBoard's ``add_embedding``.
    """
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
    """Return a colour for each state.

    The hue is the angle of a unit vector in the plane; of other states it is the first component,
    from blue, the least, to red, the greatest.

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
    """Return images with an edge of `FRAME_WIDTH` pixels in these colours."""
    edge = 4 * (-FRAME_WIDTH,)
    inside = functional.pad(functional.pad(torch.ones_like(images), edge), 4 * (FRAME_WIDTH,))
    return inside * images + (1 - inside) * colours[:, :, None, None]


def takers(loggers: list[Any], method: str) -> list[Any]:
    """Return the experiments of the loggers that have this method."""
    return [
        logger.experiment
        for logger in loggers
        if hasattr(getattr(logger, "experiment", None), method)
    ]


def log_track(
    loggers: list[Any],
    tag: str,
    recording: Recording,
    estimates: Tensor,
    step: int,
    *,
    covariances: Tensor | None = None,
) -> None:
    """Log a figure of truth, observations and estimates over time and in the plane."""
    for taker in takers(loggers, "add_figure"):
        from kbf.plots.tracks import track_figure

        taker.add_figure(tag, track_figure(recording, estimates, covariances), step)


def log_frames(
    loggers: list[Any],
    tag: str,
    recording: Recording,
    estimates: Tensor,
    step: int,
    **settings: Any,
) -> None:
    """Log images with truth and estimate; ``settings`` of `kbf.plots.frames.frame_grid`."""
    for taker in takers(loggers, "add_figure"):
        from kbf.plots.frames import frame_grid

        taker.add_figure(tag, frame_grid(recording, estimates, **settings), step)


def log_encodings(
    loggers: list[Any],
    code: Encoding,
    data: tuple[Tensor, Tensor, Tensor],
    step: int,
    *,
    extent: Any = None,
    frames: int = 16,
) -> None:
    """Log images, evenly spaced over the recordings, with their encodings, as ``frames/encoding``.

    Each image is encoded by the member that was not trained on it, if there are several. The
    encoding is left in eval mode.

    Args:
        loggers: those that take figures are used.
        code: the encoding.
        data: fields of `kbf.training.encoder_datamodule.Frames`; only images ``n c h w`` are drawn.
        step: of the optimiser.
        extent: as in `kbf.plots.frames.frame_grid`.
        frames: number of images.
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
    """Log features of at most `MAX_PROJECTED_IMAGES` images by the first encoder.

    They are for the projector, with the states and with thumbnails that are framed in the states'
    colours. Arguments as of `log_encodings`.
    """
    obs, states, chunk = data
    for taker in takers(loggers, "add_embedding"):
        code.eval()
        rows = spread(len(obs), MAX_PROJECTED_IMAGES)
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
    """Return at most ``most`` of the numbers 0..n-1, evenly spaced.

    >>> spread(10, 4)
    [0, 3, 6, 9]
    """
    return torch.linspace(0, n - 1, min(n, most)).round().long().tolist()
