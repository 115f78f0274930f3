"""Selection of a conditional density by held-out log score; ties go to the simpler one.

Only training pairs are used, in blocked cross-validation. The candidates, in order of complexity:

==============  ==========================================================  =====================
``gaussian``    a kernel ridge map with Gaussian noise of one covariance    `densities.ridge`
``student``     the same with Student noise                                 `densities.mixtures`
``clutter``     Gaussian noise and a background that does not depend on u   `densities.mixtures`
``spread``      a Gaussian whose mean and variance depend on u              `densities.glm`
``branches``    two ridge maps, each with its share                         `densities.mixtures`
``networks``    mixture density networks; candidates only if one of the     `densities.mdn`
                above is better than ``gaussian``
``poisson``     counts; also ``negbin``, and ``bernoulli`` for two values   `densities.glm`
``categories``  values without an order: 3 to 12 levels, each with its      `densities.categorical`
                share
==============  ==========================================================  =====================

Candidates for whole numbers (evenly spaced values of any step, at most `MAX_STEPS` of them) are the
densities of counts and the Gaussian. If the step is below half the standard deviation of the noise
(rounded readings, large counts) the others are candidates as well, with each value spread evenly
over its cell. Landmarks, bandwidths, ridges and the box of the background are those of all points;
coefficients and noise are held out.
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.densities.base import (
    FOLDS,
    Candidate,
    ConditionalDensity,
    Features,
    blocks,
    features_of,
)
from kbf.densities.categorical import FEWEST_LEVELS, MOST_LEVELS, fit_categories
from kbf.densities.glm import GLMDensity, fit_parameters, refitted as refitted_glm
from kbf.densities.mdn import fit_networks
from kbf.densities.mixtures import Fitted, expectation_maximisation, fit_maps
from kbf.densities.ridge import RidgeMap, fit_ridge_map, refitted
from kbf.rkhs.kernels import gaussian as gaussian_kernel, median_distance
from kbf.rkhs.linalg import some_rows
from kbf.runtime.errors import FitError
from kbf.runtime.threads import one_thread

log: logging.Logger = logging.getLogger(__name__)
# Most steps between the least and the largest of values that count as whole numbers.
MAX_STEPS = 200
# Points that candidates other than the Gaussian require.
MIN_POINTS = 80
# Points that a selection uses; of more, drawn ones.
MAX_POINTS = 4000
# Components of y up to which networks and categories are candidates.
MAX_COMPONENTS = 8
# Standard errors by which a density must be better than a simpler one.
MIN_STD_ERRORS = 2.0
# The same over the Gaussian density, whose update is more accurate.
MIN_STD_ERRORS_OVER_GAUSSIAN = 4.0
# Share of the gains at either end that is clamped.
TAILS = 0.02
# Candidate bandwidths of mixtures of maps, over the median distance of the inputs.
FACTORS = (0.25, 0.5, 1.0)
# Most features of mixtures of maps.
MAX_FEATURES = 48
# Mixtures of maps by name.
MAPS: dict[str, dict[str, Any]] = {
    "student": {"student": True},
    "clutter": {"clutter": True},
    "branches": {"maps": 2},
}
COUNTS = ("poisson", "negbin", "bernoulli", "categories")
# Names of all densities; a checkpoint stores a position in this tuple.
DENSITIES = ("gaussian", "student", "clutter", "spread", "branches", "networks", *COUNTS)


class Choice(NamedTuple):
    """The selected density and its candidates.

    Attributes:
        name: of the selected density.
        density: fitted to all points.
        scores: mean held-out log score of each candidate, by name.
        margin: held-out gain of the selected density over ``gaussian``, nats per point.
        error: standard error of the margin.
        left_out: why a density was not a candidate, by name.
    """

    name: str
    density: ConditionalDensity
    scores: dict[str, float]
    margin: float
    error: float
    left_out: dict[str, str]

    def __str__(self) -> str:
        """One line for a log."""
        others = ", ".join(f"{name} {score:.3f}" for name, score in self.scores.items())
        why = "".join(f"; {name} left out: {reason}" for name, reason in self.left_out.items())
        by = (
            ""
            if self.name == "gaussian"
            else f" ({self.margin:+.3f} ± {self.error:.3f} over gaussian)"
        )
        return f"{self.name}{by}; held-out log score a point: {others}{why}"


class Known(NamedTuple):
    """A selected density, with the inputs and outputs in float64 that it is fitted to."""

    choice: Choice
    inputs: Tensor
    outputs: Tensor

    def fits(self, inputs: Float[Tensor, "n d"], outputs: Float[Tensor, "n q"]) -> bool:
        """Whether the density is fitted to these points, of its device."""
        return (
            self.inputs.device == inputs.device
            and torch.equal(self.inputs, inputs.double())
            and torch.equal(self.outputs, outputs.double())
        )

    def contains(self, inputs: Float[Tensor, "n d"], outputs: Float[Tensor, "n q"]) -> bool:
        """Whether all of these points are among those that the density is fitted to."""
        if inputs.shape[1:] != self.inputs.shape[1:] or outputs.shape[1:] != self.outputs.shape[1:]:
            return False
        own, some = (
            {tuple(row) for row in torch.cat([u.double(), y.double()], 1).tolist()}
            for u, y in ((self.inputs, self.outputs), (inputs, outputs))
        )
        return some <= own


def fit_like(
    known: Sequence[Known], name: str, u: Float[Tensor, "n d"], y: Float[Tensor, "n q"]
) -> ConditionalDensity | None:
    """Return a known density of these points, or one with its settings; None without either.

    A generalised linear density of some of its points has the bandwidth and the ridge that were
    selected on all of them.

    Args:
        known: densities that are fitted already.
        name: of the density.
        u: inputs. y: outputs.
    """
    for each in known:
        if each.choice.name == name and each.fits(u, y):
            return each.choice.density
    for each in known:
        density = each.choice.density
        fewer = each.choice.name == name and len(u) < len(each.inputs)
        if fewer and isinstance(density, GLMDensity) and each.contains(u, y):
            log.info("the density %s of %d points, with the settings of all", name, len(u))
            return refitted_glm(density, u.double(), fitted_outputs(name, y.double()))
    return None


@one_thread()
def select_density(
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    *,
    map: RidgeMap | None = None,
    counts: bool = True,
) -> Choice:
    """Fit every density that suits the outputs, and select one.

    Args:
        u: inputs ``n d``. y: outputs ``n q``, both in the order of time.
        map: the kernel ridge map of these points; None to fit it.
        counts: whether densities of counts are candidates for whole numbers.

    Raises:
        ValueError: as `kbf.densities.ridge.fit_ridge_map`.
    """
    some = some_rows(len(u), MAX_POINTS, u.device)
    u, y = u[some].double(), y[some].double()
    varies = (y != y[:1]).any(0)
    # constant columns do not distinguish densities
    if bool(varies.any()) and not bool(varies.all()):
        choice = select_density(u, y[:, varies], counts=counts)
        return choice._replace(density=fit_density(choice.name, u, y))
    map = fit_ridge_map(u, y) if map is None or len(some) < len(u) else map
    step = lattice(y)
    volume = y.new_zeros(()) if step is None else step.log().sum()  # of a cell of the lattice
    gaussian = candidate("gaussian", u, y, map)
    if step is not None:  # a probability, at most 1
        gaussian = gaussian._replace(held_out=(gaussian.held_out + volume).clamp_max(0))
    found, left_out = {"gaussian": gaussian}, {}
    fine = step is not None and bool((step < (y - map.predict(u)[0]).std(0) / 2).all())
    names, reason = suitable(y, map, step, fine)
    spread = y if step is None else spread_evenly(y, step)
    for name in DENSITIES[1:]:
        if name not in names or (name in COUNTS and not counts):
            if reason:
                left_out[name] = reason
            continue
        if name == "networks" and chain(found) == "gaussian":
            left_out[name] = "no simpler density is better than gaussian"
            continue
        if name in ("networks", "categories") and y.shape[1] > MAX_COMPONENTS:
            left_out[name] = f"more than {MAX_COMPONENTS} components"
            continue
        log.info("cross-validation: the density %s of %d points", name, len(u))
        try:
            fitted = candidate(name, u, y if name in COUNTS else spread, map, step)
            if name not in COUNTS:  # the probability of a cell
                fitted = fitted._replace(held_out=fitted.held_out + volume)
            found[name] = fitted
        except FitError as error:
            left_out[name] = " ".join(str(error).split())[:80]
    name = chain(found)
    gain = found[name].held_out - gaussian.held_out
    error = float(gain.std() / len(gain) ** 0.5)
    scores = {key: float(each.held_out.mean()) for key, each in found.items()}
    choice = Choice(name, found[name].density, scores, float(gain.mean()), error, left_out)
    log.info("density of %d points: %s", len(u), choice)
    return choice


def chain(found: dict[str, Candidate]) -> str:
    """The name of the selected density.

    Candidates are compared in order of complexity. A candidate replaces the current one if its
    held-out log score is significantly higher.
    """
    best = "gaussian"
    for name, each in found.items():
        if better(
            each.held_out - found[best].held_out,
            MIN_STD_ERRORS_OVER_GAUSSIAN if best == "gaussian" else MIN_STD_ERRORS,
        ):
            best = name
    return best


def better(gain: Float[Tensor, " n"], sure: float = MIN_STD_ERRORS) -> bool:
    """Whether gains are positive on average, and by ``sure`` standard errors without their tails.

    Both `TAILS` are clamped: otherwise one outlier of a Gaussian density would dominate the
    standard error.
    """
    cut = gain.clamp(gain.quantile(TAILS), gain.quantile(1 - TAILS))
    return float(gain.mean()) > 0 and float(cut.mean()) > sure * float(cut.std() / len(cut) ** 0.5)


def suitable(
    y: Float[Tensor, "n q"], map: RidgeMap, step: Tensor | None, fine: bool
) -> tuple[tuple[str, ...], str]:
    """Names of candidates other than the Gaussian, or none and the reason.

    ``fine``: whether the step is small compared with the noise.
    """
    if len(y) < MIN_POINTS:
        return (), f"fewer than {MIN_POINTS} points"
    if map.manifold.circles:
        return (), "outputs on a circle"
    others = ("student", "clutter", "spread", "branches", "networks")
    if step is None:
        return others, ""
    levels = [len(column.unique()) for column in y.unbind(1)]
    if max(levels) <= 2 and bool(((y - y.amin(0)) / step < 1.5).all()):
        return ("bernoulli",), ""
    few = FEWEST_LEVELS <= max(levels) <= MOST_LEVELS
    return ("poisson", "negbin", *(("categories",) if few else ()), *(others if fine else ())), ""


def candidate(
    name: str,
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    map: RidgeMap,
    step: Float[Tensor, " q"] | None = None,
) -> Candidate:
    """Fit the density of this name to all points, with held-out log scores."""
    if name == "gaussian":
        return Candidate(map, crosswise(lambda kept: refitted(map, u[kept], y[kept]), u, y))
    if name in MAPS:
        fitted = fit_maps(features_to_try(map, u), u, y, y - map.predict(u)[0], **MAPS[name])
        return Candidate(fitted.density, crosswise(lambda kept: again(fitted, u, y, kept), u, y))
    if name == "networks":
        return fit_networks(u, y)
    if name == "categories":
        return fit_categories(u, y)
    return fit_parameters(name, u, y, step=step)


def crosswise(
    fit: Callable[[Tensor], ConditionalDensity],
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
) -> Float[Tensor, " n"]:
    """Log scores of each block by the density that ``fit`` returns for the points outside of it."""
    return torch.cat([fit(~out).log_density(y[out], u[out]) for out in blocks(len(y), FOLDS)])


def again(
    fitted: Fitted, u: Float[Tensor, "n d"], y: Float[Tensor, "n q"], kept: Tensor
) -> ConditionalDensity:
    """Refit a mixture of maps to some of its points, starting from its final responsibilities."""
    density = fitted.density
    part = expectation_maximisation(
        density.features,
        density.features(u[kept]),
        y[kept],
        fitted.shares[kept],
        fitted.ridge,
        density.degrees,
        density.background,
        40,
    )
    return part.density


def features_to_try(map: RidgeMap, u: Float[Tensor, "n d"]) -> list[Features]:
    """Return the features of a ridge map, and those of Gaussian kernels of several bandwidths."""
    median = median_distance(u, distinct=True)
    others = [
        features_of(partial(gaussian_kernel, bandwidth=factor * median), u, MAX_FEATURES)
        for factor in FACTORS
    ]
    return [Features(map.landmarks, map.whiten, map.kernel), *others]


def spread_evenly(y: Float[Tensor, "n q"], step: Float[Tensor, " q"]) -> Float[Tensor, "n q"]:
    """Spread values over the cells of their lattice: densities of single values are unbounded."""
    return y + step * (
        torch.rand(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0)).to(y) - 0.5
    )


def lattice(y: Float[Tensor, "n q"], rows: float = 4.0) -> Float[Tensor, " q"] | None:
    """The step of each column of whole numbers; 1 for a constant column.

    None if a column has other numbers, or fewer than ``rows`` rows for each value.

    >>> lattice(torch.tensor([[0.0, 5.0], [4.0, 5.0], [2.0, 5.0]]).repeat(3, 1))
    tensor([2., 1.])
    >>> lattice(torch.tensor([[0.0], [0.31], [1.0]]))
    """
    steps = []
    for column in y.unbind(1):
        gaps = column.unique().diff()
        if len(gaps) == 0:
            steps.append(torch.ones_like(column[0]))
            continue
        least = gaps.min()
        wholes = gaps / least
        if (
            float(wholes.sum()) > MAX_STEPS
            or bool(((wholes - wholes.round()).abs() > 1e-3).any())
            or rows * len(gaps) > len(y)
        ):
            return None
        steps.append(least)
    return torch.stack(steps)


def with_noise_where_constant(y: Float[Tensor, "n q"]) -> Float[Tensor, "n q"]:
    """Add the least noise of a ridge map to constant columns, so that densities exist."""
    constant = (y == y[:1]).all(0)
    if not bool(constant.any()) or lattice(y) is not None:
        return y
    least = (1e-9 * y.var(0).mean()).sqrt()
    noise = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0)).to(y)
    return y + torch.where(constant, least * noise, 0)


def fitted_outputs(name: str, y: Float[Tensor, "n q"]) -> Float[Tensor, "n q"]:
    """Return the outputs that a density of this name is fitted to.

    Densities of real numbers are fitted to values that are spread over the cells of their lattice,
    if they have one, as in `select_density`.
    """
    step = None if name in COUNTS else lattice(y)
    if step is None:
        return with_noise_where_constant(y)
    return spread_evenly(y, torch.where((y != y[:1]).any(0), step, 0))


@one_thread()
def fit_density(name: str, u: Float[Tensor, "n d"], y: Float[Tensor, "n q"]) -> ConditionalDensity:
    """Fit the density of this name to these points, without a selection.

    Raises:
        ValueError: an unknown name, counts that are not whole, or as
            `kbf.densities.ridge.fit_ridge_map`.
    """
    if name not in DENSITIES:
        raise ValueError(f"there is no density {name!r}: choose one of {', '.join(DENSITIES)}")
    some = some_rows(len(u), MAX_POINTS, u.device)
    u, y = u[some].double(), y[some].double()
    if name == "networks":
        return fit_networks(u, fitted_outputs(name, y)).density
    if name == "categories":
        return fit_categories(u, y).density
    if name in COUNTS or name == "spread":
        # a density of all rows is fitted to a part of them, too, hence rows=0
        step = lattice(y, rows=0.0) if name in COUNTS else None
        if name in COUNTS and step is None:
            raise FitError(
                f"the density {name} is of whole numbers, evenly spaced; "
                f"these {len(y)} values are not"
            )
        return fit_parameters(name, u, fitted_outputs(name, y), step=step).density
    map = fit_ridge_map(u, y)
    if name == "gaussian":
        return map
    y = fitted_outputs(name, y)
    return fit_maps(features_to_try(map, u), u, y, y - map.predict(u)[0], **MAPS[name]).density
