"""Positive definite kernels as plain functions k(X, Y) -> Gram matrix, and the median heuristic.

Every kernel takes points ``*b n q`` and ``*b m q`` and returns ``*b n m``. A bandwidth is a length
in the units of the points: a number, or a vector ``q`` with one length for each component. It is
set with ``functools.partial``:

>>> k = partial(gaussian, bandwidth=0.5)
>>> k(torch.zeros(1, 2), torch.tensor([[0.5, 0.0]]))
tensor([[0.6065]])
"""

import math
from collections.abc import Callable
from functools import partial, reduce

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.linalg import evenly, safe_sqrt, squared_distance
from kbf.runtime.errors import FitError

Kernel = Callable[[Tensor, Tensor], Tensor]
Points = Float[Tensor, "*b n q"]
Others = Float[Tensor, "*c m q"]
Gram = Float[Tensor, "*d n m"]
Bandwidth = float | Tensor


def gaussian(x: Points, y: Others, *, bandwidth: Bandwidth) -> Gram:
    """Return exp(-||x - y||^2 / (2 bandwidth^2)).

    For papers that write exp(-||x - y||^2 / s), s = 2 bandwidth^2.
    """
    return torch.exp(-0.5 * squared_distance(x / bandwidth, y / bandwidth))


def laplace(x: Points, y: Others, *, bandwidth: Bandwidth) -> Gram:
    """Return exp(-||x - y||_1 / bandwidth), the product of exponential kernels of components."""
    return torch.exp(
        -((x / bandwidth)[..., :, None, :] - (y / bandwidth)[..., None, :, :]).abs().sum(-1)
    )


def matern(x: Points, y: Others, *, bandwidth: Bandwidth, nu: float | Tensor) -> Gram:
    """Return the Matern kernel with nu = 1/2, 3/2 or 5/2.

    It is exp(-a) times 1, 1 + a or 1 + a + a^2/3, with a = sqrt(2 nu) ||x - y|| / bandwidth. In
    float32 the distance of nearly equal points has an error of about 3e-4 of the points' spread,
    and so have the values for nu = 1/2, which has a kink at 0; for nu = 3/2 and 5/2 this error is
    squared.

    Raises:
        ValueError: another nu.

    References: Rasmussen and Williams (2006), section 4.2.1.
    """
    nu = float(nu)  # a tensor if a filter stores it in a buffer
    if nu not in (0.5, 1.5, 2.5):
        raise ValueError(f"matern: nu must be 0.5, 1.5 or 2.5, got {nu}")
    a = math.sqrt(2 * nu) * safe_sqrt(squared_distance(x / bandwidth, y / bandwidth))
    return {0.5: 1.0, 1.5: 1 + a, 2.5: 1 + a + a.square() / 3}[nu] * torch.exp(-a)


def imq(x: Points, y: Others, *, bandwidth: Bandwidth) -> Gram:
    """Return the inverse multiquadric kernel (1 + ||x - y||^2 / bandwidth^2)^(-1/2)."""
    return (1 + squared_distance(x / bandwidth, y / bandwidth)).rsqrt()


def arcsine(x: Points, y: Others, *, bias: float | Tensor, slope: float | Tensor) -> Gram:
    """Return the kernel of an infinitely wide network of sigmoids (erf).

        k(x, y) = (2/pi) arcsin(2 s(x, y) / sqrt((1 + 2 s(x, x)) (1 + 2 s(y, y)))),
        s(x, y) = bias^2 + slope^2 <x, y>

    It is not stationary: with a small bias and a steep slope it depends on the *direction* of a
    point from the origin, which suits a state on a circle; with a small slope it is nearly linear.

    Args:
        x: ``*b n q``. y: ``*b m q``.
        bias: standard deviation of the units' offsets. slope: of their weights, one over the units
            of the points.

    References: Williams (1998), Computation with infinite neural networks.
    """
    return 2 / math.pi * torch.asin(shrunk(x, bias, slope) @ shrunk(y, bias, slope).mT)


def shrunk(p: Points, bias: float | Tensor, slope: float | Tensor) -> Float[Tensor, "*b n r"]:
    """Return (slope p, bias) / sqrt(1/2 + s(p, p)), a factor of the argument of `arcsine`."""
    weighted = torch.cat([slope * p, torch.zeros_like(p[..., :1]) + bias], -1)
    return weighted * (0.5 + weighted.square().sum(-1, keepdim=True)).rsqrt()


def linear(x: Points, y: Others) -> Gram:
    """Return <x, y>; with a linear kernel of the states the embedding is the mean."""
    return x @ y.mT


def trace(x: Float[Tensor, "*b n q q"], y: Float[Tensor, "*c m q q"]) -> Gram:
    """Return tr(A B^T) of matrices ``*b n q q``, the kernel on SO(3) of Fukumizu et al., 5.3."""
    return torch.einsum("...nij,...mij->...nm", x, y)


def delta(x: Points, y: Others) -> Gram:
    """Return 1 where two points are equal, 0 elsewhere.

    On a finite set an embedding is then a table of probabilities.

    References: Johno et al. (2018), section 4.1.2.
    """
    return (x[..., :, None, :] == y[..., None, :, :]).all(-1).to(x.dtype)


def product(x: Points, y: Others, *, parts: list[tuple[Kernel, int]]) -> Gram:
    """Return k_1(x_1, y_1) k_2(x_2, y_2) ..., with the components split in the order of ``parts``.

    Each part is a kernel and its number of components.

    >>> k = partial(product, parts=[(partial(gaussian, bandwidth=1.0), 2), (delta, 1)])
    >>> k(torch.tensor([[0.0, 1.0, 7.0]]), torch.tensor([[0.0, 1.0, 7.0], [0.0, 1.0, 8.0]]))
    tensor([[1., 0.]])

    Raises:
        ValueError: the parts do not add up to the number of components.
    """
    sizes = [size for _, size in parts]
    if sum(sizes) != x.shape[-1]:
        raise ValueError(
            f"product: parts of {sizes} components do not cover points of {x.shape[-1]}"
        )
    grams = [
        k(u, v) for (k, _), u, v in zip(parts, x.split(sizes, -1), y.split(sizes, -1), strict=True)
    ]
    return reduce(torch.mul, grams)


KERNELS: dict[str, Callable[..., Tensor]] = {
    "gaussian": gaussian,
    "laplace": laplace,
    "matern12": partial(matern, nu=0.5),
    "matern32": partial(matern, nu=1.5),
    "matern52": partial(matern, nu=2.5),
    "imq": imq,
}
"""Kernels with one bandwidth by their names in configurations. Each is 1 at equal points."""

NETWORK_KERNELS: dict[str, Callable[..., Tensor]] = {"arcsine": arcsine}
"""Kernels of infinitely wide networks, with a bias and a slope, by name."""


def own_value(kernel: Kernel, x: Float[Tensor, "*b q"]) -> Float[Tensor, "*b"]:
    """Return k(x, x) of each point, in closed form where there is one.

    >>> own_value(partial(gaussian, bandwidth=0.5), torch.tensor([[3.0], [4.0]]))
    tensor([1., 1.])
    """
    base = kernel.func if isinstance(kernel, partial) else kernel
    if base in (gaussian, laplace, matern, imq):
        return torch.ones_like(x[..., 0])
    if base is arcsine and isinstance(kernel, partial):
        own = 2 * (
            kernel.keywords["bias"] ** 2 + kernel.keywords["slope"] ** 2 * x.square().sum(-1)
        )
        return 2 / math.pi * torch.asin(own / (1 + own))
    return kernel(x[..., None, :], x[..., None, :])[..., 0, 0]


def median_distance(
    x: Float[Tensor, "n q"], *, limit: int = 2000, diagonal: bool = False, distinct: bool = False
) -> Tensor:
    """Return the median Euclidean distance between training points, a scale for bandwidths.

    Of an even number of distances it is the lower of the two in the middle.

    Args:
        x: ``n q``, *training* points only.
        limit: of more points an evenly spaced subsample of this size is used.
        diagonal: include the n zero distances of points to themselves, as in the published code of
            Xu et al.
        distinct: if the median is zero (counts, switches, repeated values), return that of the
            positive distances.

    Raises:
        FitError: fewer than two points, or a median of zero (most points are the same; with
            ``distinct``, all).
    """
    if len(x) < 2:
        raise FitError(f"median_distance needs at least two points, got {len(x)}")
    x = x[evenly(len(x), limit, x.device)]
    distance = squared_distance(x, x).sqrt()
    if not diagonal:
        row, column = torch.triu_indices(len(x), len(x), 1, device=x.device)
        distance = distance[row, column]
    median = distance.median()
    if distinct and median == 0 and bool((distance > 0).any()):
        median = distance[distance > 0].median()
    if not median > 0:
        raise FitError(
            f"the median distance between {len(x)} training points is {median.item()}: "
            "most of them coincide"
        )
    return median
