"""Maps whose outputs have few inputs each, selected by their error on contiguous blocks.

Inputs of an output are added one at a time (forward selection), and a kernel term where it helps,
while the error on held-out blocks falls by more than two standard errors over blocks. A block is a
stretch of time: a map that has learned the places of a recording fails on the stretch that is left
out, and a map of the input that matters does not.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.filters.gaussian.learned_maps import LearnedMap, fit_map, kernel_of, row_of, select_kernel
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.rkhs.linalg import evenly
from kbf.runtime.deadline import check_deadline

# Held-out blocks, and steps that a block requires.
BLOCKS = 8
MIN_STEPS_OF_BLOCK = 10
# Standard errors over blocks by which an input must reduce the mean logarithm of the error.
MIN_STD_ERRORS = 2.0
# Inputs of an output.
MAX_INPUTS = 8
# Points by which inputs are selected, of more, evenly spaced ones; and kernel features.
MAX_POINTS = 2000
FEATURES = 48
# Ridge for each point, in units of the variance of an output.
RIDGE = 1e-8


class SparseMap(NamedTuple):
    """y_j = f_j(u[inputs_j]) + N(0, noise).

    Attributes:
        inputs: of each output, positions of its inputs.
        maps: f_j of each output.
        noise: ``q q``, the covariance of residuals.
    """

    inputs: list[Tensor]
    maps: list[LearnedMap]
    noise: Tensor

    def __call__(self, u: Float[Tensor, "*b e"]) -> Float[Tensor, "*b q"]:
        """Return the mean at u, in the type of u."""
        pairs = zip(self.inputs, self.maps, strict=True)
        return torch.cat([map(u[..., inputs]) for inputs, map in pairs], -1)


def select_inputs(
    u: Float[Tensor, "n e"], y: Float[Tensor, "n q"], *, precise: bool = False
) -> Float[Tensor, "q f"]:
    """Return for each output which of the e inputs it has, and the row of its kernel.

    Rows are e numbers, 1 for an input that is used, and 3 of
    `kbf.filters.gaussian.learned_maps.row_of`, zeros for a linear map.

    Args:
        u, y: in the order of time.
        precise: as of `kbf.filters.gaussian.learned_maps.fit_map`.
    """
    some = evenly(len(u), MAX_POINTS, u.device)
    u, y = u[some].double(), y[some].double()
    scale = torch.where(u.std(0) > 0, u.std(0), 1)
    white = (u - u.mean(0)) / scale
    found = torch.zeros(y.shape[1], u.shape[1] + 3, dtype=torch.float64)
    if len(u) < BLOCKS * MIN_STEPS_OF_BLOCK:
        return found
    for j, target in enumerate(y.mT):
        check_deadline()
        inputs, nonlinear = selected(white, target - target.mean())
        found[j, inputs] = 1
        if nonlinear:
            chosen = u[:, inputs]
            left = target[:, None] - fit_map("linear", chosen, target[:, None])(chosen)
            found[j, -3:] = row_of(select_kernel(chosen, left, FEATURES, precise=precise))
    return found


def selected(u: Float[Tensor, "n e"], y: Float[Tensor, " n"]) -> tuple[list[int], bool]:
    """Return the inputs of an output by forward selection, and whether its map has a kernel."""
    inputs: list[int] = []
    nonlinear = False
    now = block_errors(u[:, :0], y)
    while len(inputs) < min(MAX_INPUTS, u.shape[1]) or not nonlinear:
        more = [[*inputs, i] for i in range(u.shape[1]) if i not in inputs]
        more = more if len(inputs) < MAX_INPUTS else []
        trials = [(each, kernel) for each in more for kernel in (nonlinear, True)]
        if inputs and not nonlinear:
            trials.append((inputs, True))
        errors = [
            block_errors(features(u[:, each]) if kernel else u[:, each], y)
            for each, kernel in trials
        ]
        best = min(range(len(trials)), key=lambda k: float(errors[k].mean()))
        gain = now.log() - errors[best].log()
        uncertain = MIN_STD_ERRORS * gain.std() / BLOCKS**0.5
        if not bool(gain.mean() > uncertain) or bool(errors[best].mean() >= now.mean()):
            break
        (inputs, nonlinear), now = trials[best], errors[best]
    return inputs, nonlinear


def features(u: Float[Tensor, "n e"]) -> Float[Tensor, "n p"]:
    """Return u and values of a wide Gaussian kernel at points of u."""
    places = u[evenly(len(u), FEATURES, u.device)]
    bandwidth = 2 * median_distance(places, distinct=True)
    return torch.cat([u, gaussian(u, places, bandwidth=bandwidth)], 1)


def block_errors(phi: Float[Tensor, "n p"], y: Float[Tensor, " n"]) -> Float[Tensor, " k"]:
    """Return the mean squared error of least squares on each of k blocks, fitted to the others."""
    n = len(y)
    one = torch.cat([torch.ones_like(phi[:, :1]), phi], 1)
    per = n // BLOCKS
    used = per * BLOCKS
    P, t = one[:used].unflatten(0, (BLOCKS, per)), y[:used].unflatten(0, (BLOCKS, per))
    grams, moments = P.mT @ P, (P.mT @ t[..., None])[..., 0]
    rest = grams.sum(0) - grams + RIDGE * n * torch.eye(one.shape[1]).to(one)
    w = torch.linalg.solve(rest, moments.sum(0) - moments)
    error = (t - (P @ w[..., None])[..., 0]).square().mean(1)
    return error.clamp_min(torch.finfo(y.dtype).eps * y.var())


def fit_sparse(
    choice: Float[Tensor, "q f"],
    u: Float[Tensor, "n e"],
    y: Float[Tensor, "n q"],
    *,
    ranks: tuple[int, ...],
    precise: bool = False,
) -> SparseMap:
    """Fit the maps of `select_inputs`.

    Args:
        choice: the result of `select_inputs`. u, y: inputs and outputs.
        ranks, precise: as of `kbf.filters.gaussian.learned_maps.fit_map`.

    Raises:
        FitError: as `kbf.filters.gaussian.learned_maps.fit_map`.
    """
    inputs, maps, left, spread = [], [], [], []
    for j, row in enumerate(choice):
        used = row[:-3].nonzero()[:, 0]
        target, given = y[:, j : j + 1].double(), u[:, used].double()
        kernel = kernel_of(row[-3:]) if bool(row[-3:].any()) else None
        kind = "linear" if kernel is None else "both"
        map = fit_map(kind, given, target, kernel=kernel, ranks=ranks, precise=precise)
        inputs.append(used)
        maps.append(map)
        left.append(target - map(given))
        spread.append(map.noise[0, 0].sqrt())
    residual = torch.cat(left, 1)
    white = residual / residual.square().mean(0).sqrt().clamp_min(1e-300)
    sigma = torch.stack(spread)
    noise = sigma[:, None] * (white.mT @ white / len(white)) * sigma
    return SparseMap(inputs, maps, noise.diagonal_scatter(sigma.square()))
