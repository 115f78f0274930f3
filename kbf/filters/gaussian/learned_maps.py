"""Maps u -> y that are learned by regression: linear, by kernel ridge, or the sum of both.

`fit_map` fits y = B u + b + g(u), g by kernel ridge regression (`kbf.densities.ridge`) on the
residuals of the linear part. `select_kernel` selects the kernel of g by its leave-one-out log loss.

Far from its landmarks g would grow as a polynomial, with wide kernels. Outside of their box, which
is a tenth wider on each side, it therefore has its value at the border; a sum continues its linear
part.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.densities.ridge import RidgeMap, fit_ridge_map, leave_one_out_loss
from kbf.filters.gaussian.count_maps import CountMap, fit_count_map
from kbf.filters.gaussian.kalman import regress
from kbf.filters.gaussian.map_pairs import Pairs
from kbf.rkhs.kernels import KERNELS, NETWORK_KERNELS, Kernel
from kbf.rkhs.linalg import some_rows

# Kinds of maps that `fit_map` fits: linear; g alone; and both.
KINDS = ("linear", "kernel", "both")
# Kernels of maps and the names of their settings.
MAP_KERNELS: dict[str, tuple[str, ...]] = {"gaussian": ("bandwidth",), "arcsine": ("bias", "slope")}
# Settings of `fit_ridge_map` for maps whose errors add up, as those of moves do. Wide kernels, with
# features that differ by little and small ridges, represent smooth maps by few features. With the
# defaults the error of the map of data=lorenz at 30 dB was -55.9 dB, with these -66.6 dB. Far from
# the points such maps grow as polynomials: maps of sensors have the defaults, since a filter that
# has lost the state needs them there (NMSE 0.39 with these on data=bearings, 0.21 without).
PRECISE: dict[str, Any] = {"tol": 1e-10, "regs": tuple(10.0 ** (-k / 2) for k in range(1, 23))}
# Points by which a kernel is selected; of more, some that are drawn. The loss is flat near its
# minimum. Many sensors share this number of points, and none has fewer than the least.
MAX_POINTS_OF_SELECTION = 1000
MAX_POINTS_OF_ALL_SENSORS = 8000
MIN_POINTS_OF_SELECTION = 300
# Points among which landmarks are selected.
MAX_POINTS_OF_LANDMARKS = 2000
# Candidates of `select_kernel`, coarser by a factor than those of `fit_ridge_map`: half the time.
CANDIDATES: dict[str, Any] = {
    "factors": tuple(2.0**k for k in range(-3, 4)),
    "slopes": (1.0, 3.0, 10.0, 30.0),
    "biases": (0.3, 1.0),
}
# Width of the landmarks' range by which the box is wider on each side: new states exceed the range
# of those seen by little, and a border there is an edge of the map. On data=lorenz_decimated (seed
# 1000) the error was -12.8 dB without a margin, and is -16.3 with one.
MARGIN_OF_BOX = 0.1
# Share of the variance of its readings that the noise of a sensor has at least, see `least_noise`.
MIN_NOISE = 1e-12


class LearnedMap(NamedTuple):
    """y = B u + b + g(u) + N(0, noise).

    Attributes:
        B: ``q e``, or None for 0. b: ``q``.
        coefficients: ``r q``, W A of the `RidgeMap` g, or None for g = 0.
        ridge: g, with its kernel and landmarks.
        noise: ``q q``, the covariance of residuals; of g those of leave-one-out.
        rates: of counts, the map that is added; None for 0.
        box: ``2 e``, least and largest coordinates at which g is evaluated (`MARGIN_OF_BOX`).
    """

    B: Tensor | None
    b: Tensor
    coefficients: Tensor | None
    ridge: RidgeMap | None
    noise: Tensor
    rates: CountMap | None = None
    box: Tensor | None = None

    def __call__(self, u: Float[Tensor, "*b e"]) -> Float[Tensor, "*b q"]:
        """Return the mean at u, in the type of u."""
        rows = u.reshape(u.shape[:-1].numel(), u.shape[-1]).to(self.b)
        y = self.b.expand(len(rows), -1) if self.B is None else rows @ self.B.mT + self.b
        if self.ridge is not None and self.coefficients is not None:
            inside = rows if self.box is None else rows.clamp(*self.box)
            y = y + self.ridge.kernel(inside, self.ridge.landmarks) @ self.coefficients
        if self.rates is not None:
            y = y + self.rates(rows)
        return y.to(u).unflatten(0, u.shape[:-1])


def fit_map(
    kind: str,
    u: Float[Tensor, "n e"],
    y: Float[Tensor, "n q"],
    *,
    kernel: Kernel | None = None,
    ranks: tuple[int, ...] = (96, 200, 400),
    counts: bool = False,
    precise: bool = False,
) -> LearnedMap:
    """Fit a map of a kind of `KINDS`, in float64.

    Args:
        kind: linear (least squares), kernel, or both.
        u: inputs ``n e``.
        y: outputs ``n q``.
        kernel: of g; None selects it.
        ranks: most features of g. Each is compared with the one before by leave-one-out.
        counts: outputs are `kbf.filters.gaussian.count_maps.stabilised` counts; the map of their
            rates is in place of the linear one.
        precise: use `PRECISE`.

    Raises:
        FitError: too few points for a linear map, or fewer than ten for g.
    """
    u, y = u.double(), y.double()
    rates, B, b, noise = None, None, torch.zeros_like(y[0]), torch.zeros_like(y[0].diag())
    if kind != "kernel" and counts:
        rates = fit_count_map(u, y)
        noise = rates.noise
    elif kind != "kernel":
        B, b, noise = regress(u, y, "points")
    if kind == "linear":
        return LearnedMap(B, b, None, None, noise, rates)
    left = y - LearnedMap(B, b, None, None, noise, rates)(u)
    kernel = select_kernel(u, left, precise=precise) if kernel is None else kernel
    settings = {"candidates": [kernel], "flat": True, "points": MAX_POINTS_OF_LANDMARKS}
    settings |= PRECISE if precise else {}
    best = fit_ridge_map(u, left, rank=ranks[0], **settings)
    for before, rank in pairwise(ranks):
        if len(best.landmarks) < before:
            break  # the kernel has no more features
        larger = fit_ridge_map(u, left, rank=rank, **settings)
        if leave_one_out_loss(larger, u) >= leave_one_out_loss(best, u):
            break
        best = larger
    low, high = best.landmarks.amin(0), best.landmarks.amax(0)
    margin = MARGIN_OF_BOX * (high - low)
    box = torch.stack([low - margin, high + margin])
    A = best.whiten @ best.coefficients
    return LearnedMap(B, b + best.offset, A, best, best.noise, rates, box)


def select_kernel(
    u: Float[Tensor, "n e"],
    y: Float[Tensor, "n q"],
    rank: int = 96,
    *,
    precise: bool = False,
    points: int = MAX_POINTS_OF_SELECTION,
) -> Kernel:
    """Return the kernel of the map with the least leave-one-out loss on so many points.

    A map has at most a sixth as many features.
    """
    some = some_rows(len(u), points, u.device)
    rank = min(rank, max(1, points // 6))
    if bool((y[some] == y[some[0]]).all()):  # rare counts
        some = torch.arange(len(u), device=u.device)
    settings = CANDIDATES | (PRECISE if precise else {})
    return fit_ridge_map(u[some], y[some], rank=rank, flat=True, **settings).kernel


def kernels_of_maps(
    pairs: Pairs, q: int, kinds: Sequence[str], rank: int
) -> Float[Tensor, "m 2 3"]:
    """Return kernels of the change map, and of that of each of q columns of sensors.

    The row of a sensor is that of its first column. For each of the two kinds of `KINDS` that have
    a kernel there are the numbers of `row_of`; zeros where there is no candidate.

    Args:
        pairs: inputs and outputs. q: columns of observations.
        kinds: that kernels are selected for. rank: most features.
    """
    both = {0: (pairs.inputs, pairs.change)} | {
        1 + int(each.columns[0]): (each.states, each.readings) for each in pairs.sensors
    }
    points = points_of_selection(len(pairs.sensors))
    found = torch.zeros(1 + q, 2, 3, dtype=torch.float64)
    for place, (u, y) in both.items():
        u, y = u.double(), y.double()
        for k, kind in enumerate(KINDS[1:]):
            if kind in kinds:
                left = y - fit_map("linear", u, y)(u) if kind == "both" else y
                some = points if place else MAX_POINTS_OF_SELECTION
                kernel = select_kernel(u, left, rank, precise=place == 0, points=some)
                found[place, k] = row_of(kernel)
    return found


def least_noise(y: Float[Tensor, "n q"]) -> Float[Tensor, "q q"]:
    """Return a covariance to add to that of residuals of readings y.

    With the covariance 0 of sensors without noise, covariances of innovations have no inverse.
    """
    return MIN_NOISE * y.double().var(0).diag()


def points_of_selection(maps: int) -> int:
    """Return the number of points by which the kernel of each of so many maps is selected."""
    share = MAX_POINTS_OF_ALL_SENSORS // max(1, maps)
    return max(MIN_POINTS_OF_SELECTION, min(MAX_POINTS_OF_SELECTION, share))


def row_of(kernel: Kernel) -> Float[Tensor, " 3"]:
    """Return a kernel as numbers: its position in `MAP_KERNELS` and its settings."""
    assert isinstance(kernel, partial)
    name = kernel.func.__name__
    values = [float(kernel.keywords[key]) for key in MAP_KERNELS[name]]
    row = [list(MAP_KERNELS).index(name), *values, 0.0]
    return torch.tensor(row[:3], dtype=torch.float64)


def kernel_of(row: Float[Tensor, " 3"]) -> Kernel:
    """Return the kernel of such numbers.

    Raises:
        ValueError: a position that `MAP_KERNELS` does not have.
    """
    place, *values = row.tolist()
    if place not in range(len(MAP_KERNELS)):
        raise ValueError(f"a learned map has kernel 0 to {len(MAP_KERNELS) - 1}, got {place:g}")
    name = list(MAP_KERNELS)[int(place)]
    settings = dict(zip(MAP_KERNELS[name], values, strict=False))
    return partial((KERNELS | NETWORK_KERNELS)[name], **settings)
