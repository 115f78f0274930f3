"""Maps whose outputs have few inputs each, selected by their error on contiguous blocks.

Inputs of an output are added one at a time (forward selection), and a kernel term where it helps,
while the error on held-out blocks falls by more than two standard errors over blocks. Blocks are
contiguous in time: a map that overfits to the positions of a recording fails on the block that is
left out, and a map of the relevant inputs does not.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.filters.gaussian.augmented import Sensor
from kbf.filters.gaussian.joined_maps import JoinedMaps, Part, join_maps
from kbf.filters.gaussian.learned_maps import LearnedMap, fit_map, kernel_of, row_of
from kbf.filters.gaussian.map_pairs import Pairs
from kbf.rkhs.kernels import gaussian
from kbf.rkhs.linalg import evenly, some_rows
from kbf.runtime.deadline import check_deadline

# Held-out blocks, and steps that a block requires.
BLOCKS = 8
MIN_STEPS_OF_BLOCK = 10
# Standard errors over blocks by which an input must reduce the mean logarithm of the error.
MIN_STD_ERRORS = 2.0
# Inputs of an output.
MAX_INPUTS = 8
# Points by which inputs are selected, of more, some that are drawn; and kernel features.
MAX_POINTS = 1000
FEATURES = 48
# Candidates of the bandwidth of a kernel, see `bandwidth`.
FACTORS = (0.5, 1.0, 2.0, 4.0)
# Ridge for each point, of features of inputs of variance 1.
RIDGE = 1e-8


class SparseMap(NamedTuple):
    """y_j = f_j(u[inputs_j]) + N(0, noise).

    Attributes:
        parts: f_j of each output, with the positions of its inputs. joined: all of them.
        noise: ``q q``, the covariance of residuals.
    """

    parts: list[Part]
    joined: JoinedMaps
    noise: Tensor

    def __call__(self, u: Float[Tensor, "*b e"]) -> Float[Tensor, "*b q"]:
        """Return the mean at u, in the type of u."""
        return self.joined(u)


AnyMap = LearnedMap | SparseMap


def select_inputs(u: Float[Tensor, "n e"], y: Float[Tensor, "n q"]) -> Float[Tensor, "q f"]:
    """Return for each output which of the e inputs it has, and the row of its kernel.

    Rows are e numbers, 1 for an input that is used, and 3 of
    `kbf.filters.gaussian.learned_maps.row_of`, zeros for a linear map.

    Args:
        u, y: in the order of time.
    """
    some = some_rows(len(u), MAX_POINTS, u.device)
    u, y = u[some].double(), y[some].double()
    scale = torch.where(u.std(0) > 0, u.std(0), 1)
    white = (u - u.mean(0)) / scale
    found = torch.zeros(y.shape[1], u.shape[1] + 3, dtype=torch.float64)
    if len(u) < BLOCKS * MIN_STEPS_OF_BLOCK:
        return found
    for j, target in enumerate(y.mT):
        check_deadline()
        inputs, nonlinear = forward_selection(white, target - target.mean())
        found[j, inputs] = 1
        if nonlinear:
            given = white[:, inputs]
            trials = torch.stack([with_kernel(given[None], factor)[0] for factor in FACTORS])
            best = int(block_errors(trials, target).mean(1).argmin())
            size = bandwidth(len(inputs), FACTORS[best]) * scale[inputs].log().mean().exp()
            found[j, -3:] = row_of(partial(gaussian, bandwidth=float(size)))
    return found


def forward_selection(u: Float[Tensor, "n e"], y: Float[Tensor, " n"]) -> tuple[list[int], bool]:
    """Return the inputs of an output, and whether its map has a kernel.

    Linear maps first. A kernel is then tried on their inputs, and on these and one more.

    Args:
        u: candidates, of variance 1. y: the output, of mean 0.
    """
    inputs: list[int] = []
    nonlinear = False
    now = block_errors(u[None, :, :0], y)[0]
    for kernel in (False, True):
        while True:
            others = [i for i in range(u.shape[1]) if i not in inputs]
            trials = [[*inputs, i] for i in others] if len(inputs) < MAX_INPUTS else []
            errors = errors_of(trials, u, y, kernel)
            if inputs and kernel and not nonlinear:
                trials.append(inputs)
                errors += errors_of([inputs], u, y, kernel)
            if not trials:
                break
            best = min(range(len(trials)), key=lambda k: float(errors[k].mean()))
            if not better(errors[best], now):
                break
            inputs, now, nonlinear = trials[best], errors[best], kernel
    return inputs, nonlinear


def errors_of(
    trials: list[list[int]], u: Float[Tensor, "n e"], y: Float[Tensor, " n"], kernel: bool
) -> list[Tensor]:
    """Return the `block_errors` of maps of each set of inputs; the sets have one size."""
    if not trials:
        return []
    chosen = u[:, torch.tensor(trials)].movedim(1, 0)
    return list(block_errors(with_kernel(chosen) if kernel else chosen, y))


def better(errors: Float[Tensor, " k"], others: Float[Tensor, " k"]) -> bool:
    """Return whether errors on k blocks are smaller by `MIN_STD_ERRORS` standard errors."""
    gain = others.log() - errors.log()
    certain = gain.mean() > MIN_STD_ERRORS * gain.std() / len(gain) ** 0.5
    return bool(certain & (errors.mean() < others.mean()))


def with_kernel(u: Float[Tensor, "c n e"], factor: float = 2.0) -> Float[Tensor, "c n p"]:
    """Return u, of variance 1, and values of a Gaussian kernel at points of u."""
    places = u[:, evenly(u.shape[1], FEATURES, u.device)]
    return torch.cat([u, gaussian(u, places, bandwidth=bandwidth(u.shape[2], factor))], -1)


def bandwidth(e: int, factor: float) -> float:
    """Return a multiple of the typical distance of two points with e inputs of variance 1."""
    return factor * (2 * e) ** 0.5


def block_errors(phi: Float[Tensor, "c n p"], y: Float[Tensor, " n"]) -> Float[Tensor, "c k"]:
    """Return the mean squared error of least squares on each of k blocks, fitted to the others.

    Args:
        phi: features of c regressions. y: the output of all.
    """
    per = len(y) // BLOCKS
    one = torch.cat([torch.ones_like(phi[..., :1]), phi], -1)[:, : per * BLOCKS]
    P, t = one.unflatten(1, (BLOCKS, per)), y[: per * BLOCKS].unflatten(0, (BLOCKS, per, 1))
    grams, moments = P.mT @ P, P.mT @ t
    rest = grams.sum(1, keepdim=True) - grams
    rest = rest + RIDGE * len(y) * torch.eye(rest.shape[-1]).to(rest)
    w = torch.linalg.solve(rest, moments.sum(1, keepdim=True) - moments)
    error = (t - P @ w).square().mean((-2, -1))
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
        ValueError: a choice among other inputs.
    """
    if len(choice) != y.shape[1] or bool(choice[:, u.shape[1] : -3].any()):
        raise ValueError(
            f"sparse maps were selected for other data than {u.shape[1]} inputs and "
            f"{y.shape[1]} outputs"
        )
    parts, left, spread = [], [], []
    for j, row in enumerate(choice):
        used = row[:-3].nonzero()[:, 0].to(u.device)
        target, given = y[:, j : j + 1].double(), u[:, used].double()
        kernel = kernel_of(row[-3:]) if bool(row[-3:].any()) else None
        kind = "linear" if kernel is None else "both"
        map = fit_map(kind, given, target, kernel=kernel, ranks=ranks, precise=precise)
        parts.append(Part(used, torch.tensor([j], device=u.device), map))
        left.append(target - map(given))
        spread.append(map.noise[0, 0].sqrt())
    residual = torch.cat(left, 1)
    white = residual / residual.square().mean(0).sqrt().clamp_min(1e-300)
    sigma = torch.stack(spread)
    noise = sigma[:, None] * (white.mT @ white / len(white)) * sigma
    joined = join_maps(parts, u.shape[1], len(parts))
    return SparseMap(parts, joined, noise.diagonal_scatter(sigma.square()))


def read_by(
    sensors: list[Sensor], d: int, q: int
) -> Callable[[Float[Tensor, "*b e"]], Float[Tensor, "*b q"]]:
    """Return h(z_t, z_{t-1}, ...) ``*b q`` of sensors with learned maps, all at once."""
    parts = []
    for columns, delay, map, _ in sensors:
        first = d * delay
        if isinstance(map, SparseMap):
            own = [(each.inputs, columns[each.columns], each.map) for each in map.parts]
        else:
            assert isinstance(map, LearnedMap)
            own = [(torch.arange(d, device=columns.device), columns, map)]
        parts += [Part(first + inputs, to, each) for inputs, to, each in own]
    size = d * (1 + max(sensor.delay for sensor in sensors))
    joined = join_maps(parts, size, q)
    return lambda s: joined(s[..., :size])


def inputs_of_maps(pairs: Pairs, q: int) -> Float[Tensor, "m f"]:
    """Return `select_inputs` of d changes and of q columns of sensors; zeros for counts."""
    d, e = pairs.change.shape[1], pairs.inputs.shape[1]
    found = torch.zeros(d + q, e + 3, dtype=torch.float64)
    found[:d] = select_inputs(pairs.inputs, pairs.change)
    for each in pairs.sensors:
        if not each.counts:
            rows, at = select_inputs(each.states, each.readings), d + each.columns.cpu()
            found[at, :d], found[at, -3:] = rows[:, :-3], rows[:, -3:]
    return found
