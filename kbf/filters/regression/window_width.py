"""Selects the width of the window of a ridge regression by the error on held-out blocks.

A window of few steps has few coefficients, one of many steps a long memory: which is better depends
on the number of training steps. Windows of all widths end at the same step. All regressions of a
width are solved from the products G_k = U_k^T U_k and C_k = U_k^T Z_k of each block k of centred
windows U and states Z:

    B_k = (sum_{l != k} G_l + r I)^-1 sum_{l != k} C_l,
    |Z_k - U_k B_k|^2 = |Z_k|^2 - tr B_k^T (2 C_k - G_k B_k).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.linalg import evenly

# Contiguous blocks, each of which is held out.
BLOCKS = 5
# Widths that are compared, as multiples of the usual one, of windows with at most so many numbers
# (the time grows as their cube); the larger ones if there are so many steps for each number.
NARROWER = (1, 2, 4, 8)
WIDER = (2, 4)
MAX_NUMBERS = 1000
STEPS_PER_NUMBER = 10
# Windows that are used; of more, evenly spaced ones.
MAX_WINDOWS = 20_000


def candidates(width: int, columns: int, steps: int) -> list[int]:
    """Return the widths that are compared, ascending; the usual one alone if it is too wide.

    >>> candidates(50, 3, 1000), candidates(100, 1, 10_000), candidates(8, 300, 1000)
    ([6, 12, 25, 50], [12, 25, 50, 100, 200, 400], [8])

    Args:
        width: the usual one. columns: numbers of a step. steps: of training.
    """
    if width * columns > MAX_NUMBERS:
        return [width]
    most = min(MAX_NUMBERS, steps // STEPS_PER_NUMBER)
    wider = {factor * width for factor in WIDER if factor * width * columns <= most}
    return sorted({max(1, width // divisor) for divisor in NARROWER} | wider)


def select_width(
    parts: Sequence[tuple[Float[Tensor, "_ p"], Float[Tensor, "_ d"]]],
    widths: Sequence[int],
    regs: Sequence[float],
    usual: int,
) -> int:
    """Return the width with the least error on held-out blocks, each component with its best ridge.

    Widths above the usual one are compared while the error falls: they take most of the time.

    Args:
        parts: flattened windows of the largest width, the newest step last, and states, of each
            recording.
        widths: that are compared, ascending. regs: ridges, as of
            `kbf.filters.regression.window.WindowRidge`.
        usual: one of the widths.
    """
    if len(widths) == 1:
        return widths[0]
    total = sum(len(u) for u, _ in parts)
    some = [evenly(len(u), max(1, len(u) * MAX_WINDOWS // total), u.device) for u, _ in parts]
    u = torch.cat([each[rows].double() for (each, _), rows in zip(parts, some, strict=True)])
    z = torch.cat([each[rows].double() for (_, each), rows in zip(parts, some, strict=True)])
    u, z = u - u.mean(0), z - z.mean(0)
    scale = u.std(0)
    u = u / torch.where(scale > 0, scale, 1)
    square = z.square().sum(0)  # d
    ridges, errors = u.new_tensor(regs), list[float]()
    for width in widths:
        if width > usual and len(errors) > 1 and errors[-1] >= errors[-2]:
            break
        p = u.shape[1] * width // widths[-1]
        blocks = list(zip(u[:, -p:].tensor_split(BLOCKS), z.tensor_split(BLOCKS), strict=True))
        G = torch.stack([a.mT @ a for a, _ in blocks])  # k p p
        C = torch.stack([a.mT @ b for a, b in blocks])  # k p d
        values, V = torch.linalg.eigh(G.sum(0) - G)
        target = V.mT @ (C.sum(0) - C)
        shrunk = target[:, None] / (values.clamp_min(0)[:, None] + ridges[:, None])[..., None]
        B = V[:, None] @ shrunk  # k r p d
        explained = (B * (2 * C[:, None] - G[:, None] @ B)).sum((0, 2))  # r d
        left = (square - explained).amin(0)[square > 0] / square[square > 0]
        errors.append(float(left.mean()))
    return widths[errors.index(min(errors))]
