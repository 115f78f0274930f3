"""Chooses between encoders and a kernel ridge regression on pixels, by their held-out errors.

Convolutional networks need some hundreds of images, depending on what they show; of fewer ones a
kernel ridge regression on averaged pixels may be more accurate. Both are fitted without each chunk
of the recordings in turn and compared on it.
"""

import logging

import torch
from torch import Tensor

from kbf.filters.selection.cross_validation import significantly_better
from kbf.fitted.settings import EncodingSettings
from kbf.images.encodings import Encoding
from kbf.images.pixel_ridge import PixelRidge, best_settings, crossfit
from kbf.recording import Recording, observed_pairs

log: logging.Logger = logging.getLogger(__name__)

# Images above which the encoders are not compared: they have enough, and the regression is O(n^3).
MAX_IMAGES = 1000
# Blocks of consecutive images whose mean errors are compared.
BLOCKS = 20
# Level of the t test by which the regression must be better than the encoders, in standard errors.
MIN_STD_ERRORS = 2.0


def choose_pixels(
    code: Encoding,
    recordings: list[Recording],
    held: list[Tensor],
    encoded: list[Recording],
    how: EncodingSettings,
) -> list[Recording]:
    """Return the recordings with the encodings of the better of the two.

    The regression on all images is then `Encoding.pixels`. It is compared for losses of states
    (``linear``) with held-out chunks, on at most `MAX_IMAGES` images.

    Args:
        code: the fitted encoders.
        recordings: with images.
        held: ``T``, the chunk of each step.
        encoded: the recordings with encodings of the encoders that have not seen their chunks.
        how: the settings.
    """
    states, images = observed_pairs(recordings)
    applies = how.pixel_ridge and how.loss == "linear" and how.members > 1
    if not applies or images.ndim < 3 or len(images) > MAX_IMAGES:
        return encoded
    z = how.visible_part(states).double()
    seen = [
        torch.ones_like(h, dtype=torch.bool) if r.mask is None else r.mask.to(h.device)
        for r, h in zip(recordings, held, strict=True)
    ]
    chunk = torch.cat([h[rows] for h, rows in zip(held, seen, strict=True)]).to(z.device)
    settings = best_settings(images, z)
    ours = code.manifold.project(crossfit(images, z, chunk, settings))
    theirs = observed_pairs(encoded)[1].to(ours)
    gains = (theirs - z).square().sum(1) - (ours - z).square().sum(1)
    blocks = torch.stack([part.mean() for part in gains.tensor_split(min(BLOCKS, len(gains)))])
    better = significantly_better(blocks, MIN_STD_ERRORS)
    scale = (z - z.mean(0)).square().sum()
    log.info(
        "held-out images: NMSE %.3g of the encoders, %.3g of a kernel ridge regression on pixels%s",
        (theirs - z).square().sum() / scale,
        (ours - z).square().sum() / scale,
        ", which is used" if better else "",
    )
    if not better:
        return encoded
    code.pixels = PixelRidge().fit(images, z, settings)
    parts = ours.split([int(rows.sum()) for rows in seen])
    return [
        each._replace(obs=each.obs.index_put((rows.to(each.obs.device),), part.to(each.obs)))
        for each, rows, part in zip(encoded, seen, parts, strict=True)
    ]
