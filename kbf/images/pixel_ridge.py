"""Kernel ridge regression of the state on the pixels of an image, for few images.

Images are averaged over areas, to few pixels a side, so that neighbouring positions of an object
have similar images. The number of pixels, the bandwidth of the Gaussian kernel and the ridge are
those with the smallest leave-one-out error.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from kbf.filters.regression.kernel_ridge import FrameRegression, leave_one_out
from kbf.recording import Recording, as_float
from kbf.rkhs.kernels import gaussian

# Pixels of the longer side of averaged images, to choose from.
SIDES = (8, 16, 32)
# Images that are converted to float64 at a time.
IMAGES_AT_A_TIME = 64


class PixelRidge(nn.Module):
    """z = m + k(A x B^T, X) alpha with averages A x B^T of the pixels of an image x ``c h w``.

    Without `fit` it has no points, and is not used.

    Attributes:
        points: X ``n c r s``, averaged training images. alpha: ``n d``. mean: m ``d``.
        bandwidth: ``()``, of the Gaussian kernel k.
        rows, columns: A ``r h`` and B ``s w`` (`averages`).
    """

    rows: Tensor
    columns: Tensor
    bandwidth: Tensor
    points: Tensor
    alpha: Tensor
    mean: Tensor

    NAMES: tuple[str, ...] = ("points", "alpha", "mean", "bandwidth", "rows", "columns")

    def __init__(self) -> None:
        """All tensors are empty."""
        super().__init__()
        for name in self.NAMES:
            self.register_buffer(name, torch.zeros(0, dtype=torch.float64))

    @property
    def fitted(self) -> bool:
        """Whether `fit` has been called."""
        return len(self.points) > 0

    def averaged(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m *channels r"]:
        """Return A x B^T of each channel."""
        return averaged_by(self.rows, self.columns, x)

    def forward(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m d"]:
        """Return the regression at images."""
        found = self.averaged(x).flatten(1)
        gram = gaussian(found, self.points.flatten(1), bandwidth=self.bandwidth)
        return self.mean + gram @ self.alpha

    @torch.no_grad()
    def fit(
        self,
        x: Shaped[Tensor, "n *x"],
        states: Float[Tensor, "n d"],
        settings: "PixelSettings | None" = None,
    ) -> "PixelRidge":
        """Fit to images and their states in O(n^3), with given settings or with the best ones."""
        settings = best_settings(x, states) if settings is None else settings
        self.rows, self.columns = averages_of(x, settings.side)
        memory = Recording(states.double(), self.averaged(x))
        fitted = settings.regression().fit([memory])
        bandwidth = cast(partial[Tensor], fitted.kernel).keywords["bandwidth"]
        self.bandwidth = torch.as_tensor(bandwidth, dtype=torch.float64)
        self.points = fitted.points.unflatten(1, memory.obs.shape[1:])
        self.alpha, self.mean = fitted.alpha, fitted.mean
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module._load_from_state_dict`: tensors have the stored sizes.

        Earlier versions stored none.
        """
        for name in self.NAMES:
            own = getattr(self, name)
            stored = state_dict.setdefault(prefix + name, own.new_zeros(0))
            setattr(self, name, own.new_zeros(stored.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)


class PixelSettings(NamedTuple):
    """Settings of a `PixelRidge`.

    Attributes:
        side: pixels of the longer side of averaged images.
        factor: of the bandwidth, times the median distance. reg: the ridge, times n.
        error: mean squared leave-one-out error.
    """

    side: int
    factor: float
    reg: float
    error: float

    def regression(self) -> FrameRegression:
        """Return the regression with these settings."""
        made = FrameRegression()
        made.factor.fill_(self.factor)
        made.reg.fill_(self.reg)
        return made


def averages(pixels: int, cells: int) -> Float[Tensor, "c p"]:
    """Return the matrix that averages ``pixels`` values over equal intervals, as many as ``cells``.

    A pixel that lies in two intervals counts in both by its shares.

    >>> averages(3, 2) * 3
    tensor([[2., 1., 0.],
            [0., 1., 2.]], dtype=torch.float64)
    """
    edges = torch.linspace(0, pixels, cells + 1, dtype=torch.float64)
    first = torch.arange(pixels, dtype=torch.float64)
    shared = torch.minimum(edges[1:, None], first + 1) - torch.maximum(edges[:-1, None], first)
    return shared.clamp_min(0) * cells / pixels


def averaged_by(
    A: Float[Tensor, "r h"], B: Float[Tensor, "s w"], x: Shaped[Tensor, "m *x"]
) -> Float[Tensor, "m *channels r s"]:
    """Return A x B^T of each channel; few images at a time are float64."""
    return torch.cat([A @ as_float(some, A.dtype) @ B.mT for some in x.split(IMAGES_AT_A_TIME)])


def averages_of(
    x: Shaped[Tensor, "n *x"], side: int
) -> tuple[Float[Tensor, "r h"], Float[Tensor, "s w"]]:
    """Return A and B for images ``n c h w``: the longer side gets at most ``side`` pixels."""
    h, w = x.shape[-2:]
    scale = min(1.0, side / max(h, w))
    found = [averages(size, max(1, round(scale * size))).to(x.device) for size in (h, w)]
    return found[0], found[1]


@torch.no_grad()
def best_settings(x: Shaped[Tensor, "n *x"], states: Float[Tensor, "n d"]) -> PixelSettings:
    """Return the settings with the smallest leave-one-out error, in O(n^3)."""
    found: list[PixelSettings] = []
    z = states.double()
    for side in SIDES:
        A, B = averages_of(x, side)
        memory = Recording(z, averaged_by(A, B, x))
        regression = FrameRegression()
        regression.prepare([memory])
        flat, factor, reg = memory.obs.flatten(1), float(regression.factor), regression.reg[None]
        gram = regression.at(flat, factor)(flat, flat)
        error = leave_one_out(gram, z - z.mean(0), reg.to(gram))
        found.append(PixelSettings(side, factor, float(reg), float(error)))
    return min(found, key=lambda each: each.error)


@torch.no_grad()
def crossfit(
    x: Shaped[Tensor, "n *x"],
    states: Float[Tensor, "n d"],
    chunk: Int[Tensor, " n"],
    settings: PixelSettings,
) -> Float[Tensor, "n d"]:
    """Return the regressions at images by the fit without the chunk that each lies in."""
    found = torch.zeros_like(states, dtype=torch.float64)
    for k in chunk.unique().tolist():
        mine = chunk == k
        found[mine] = PixelRidge().fit(x[~mine], states[~mine], settings)(x[mine])
    return found
