"""Density of observations with missing sensors: one density per sensor.

Columns that are always missing together are one sensor. Given the state, the errors of the sensors
are assumed to be independent,

    p(x | z) = prod_s p(x_s | z),

so that a missing sensor (NaN in any of its columns) is left out of the likelihood, and each sensor
has a density of its own type: counts for one, heavy tails for another. A sensor with a lower rate
than the rows is missing between its readings.
"""

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor, nn

from kbf.densities.base import ConditionalDensity, Likelihood
from kbf.densities.selection import (
    DENSITIES,
    MAX_POINTS,
    Known,
    fit_density,
    fit_like,
    select_density,
)
from kbf.manifolds import manifold_of
from kbf.runtime.errors import FitError

log: logging.Logger = logging.getLogger(__name__)
# Readings that the density of a sensor requires; a sensor with fewer is not used.
MIN_READINGS = 10


class PerSensorDensity(NamedTuple):
    """Product of one density per sensor, a `ConditionalDensity` of observations with NaN.

    Attributes:
        densities: one for each sensor.
        columns: columns of x that each sensor has; columns of no sensor are ignored.
        width: q, columns of x.
    """

    densities: tuple[ConditionalDensity, ...]
    columns: tuple[tuple[int, ...], ...]
    width: int

    def readings(
        self, y: Float[Tensor, "*b q"]
    ) -> Iterator[tuple[Float[Tensor, "*b p"], Bool[Tensor, "*b"]]]:
        """The reading of each sensor in y, 0 where it is missing, and whether it is present."""
        for columns in self.columns:
            reading = y[..., list(columns)]
            present = reading.isfinite().all(-1)
            yield torch.where(present[..., None], reading, 0), present

    def log_density(
        self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log p(y | u) of the sensors that are present in y."""
        total = y.new_zeros(())
        for density, (reading, present) in zip(self.densities, self.readings(y), strict=True):
            total = total + torch.where(present, density.log_density(reading, u), 0)
        return total

    def at(self, u: Float[Tensor, "m d"]) -> Likelihood:
        """Return y -> `log_density` of every y given every u; parameters are computed once."""
        each = [density.at(u) for density in self.densities]

        def log_densities(y: Tensor) -> Tensor:
            total = y.new_zeros(())
            for density, (reading, present) in zip(each, self.readings(y), strict=True):
                total = total + torch.where(present[:, None], density(reading), 0)
            return total

        return log_densities

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y given u, of all sensors; 0 in columns of none."""
        return self.together([density.sample(u, generator) for density in self.densities], u)

    def mean(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """E[y | u]; 0 in columns of no sensor."""
        return self.together([density.mean(u) for density in self.densities], u)

    def covariance(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q q"]:
        """Cov[y | u], block by block; 0 in columns of no sensor."""
        total = u.new_zeros(*u.shape[:-1], self.width, self.width)
        for density, columns in zip(self.densities, self.columns, strict=True):
            at = torch.tensor(columns, device=u.device)
            total[..., at[:, None], at] = density.covariance(u)
        return total

    def together(self, parts: list[Tensor], u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """The sensors' columns in their places."""
        found = u.new_zeros(*u.shape[:-1], self.width)
        for part, columns in zip(parts, self.columns, strict=True):
            found[..., list(columns)] = part
        return found


def find_sensors(obs: Float[Tensor, "n q"]) -> Int[Tensor, " q"]:
    """The number of each column's sensor: columns that are always missing together are one sensor.

    Where nothing is missing, each column is a sensor, and a pair (cos, sin) is one.

    >>> find_sensors(torch.tensor([[1.0, 2.0, torch.nan], [3.0, 4.0, 5.0]]))
    tensor([0, 0, 1])
    >>> find_sensors(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([0, 1])
    """
    present = obs.isfinite()
    if bool(present.all()):
        numbers = torch.arange(obs.shape[1], device=obs.device)
        for cosine in manifold_of(obs).circles:
            numbers[cosine + 1] = cosine
    else:
        both = present.double().mT @ present.double()  # rows in which two columns are present
        own = both.diagonal()
        numbers = ((both == own) & (both == own[:, None])).int().argmax(1)
    return numbers.unique(return_inverse=True)[1]


class SelectedSensors(nn.Module):
    """Columns and density of each sensor, as a module that a checkpoint stores.

    Attributes:
        column: ``q``, the number of each column's sensor; empty if no sensor may be missing.
        density: ``s``, the position of each sensor's density in `DENSITIES`; -1 for a sensor with
            fewer than `MIN_READINGS` readings.
        fitted: the selected densities with the pairs that they are fitted to, not stored. Models
            that share the list select each density once.
    """

    def __init__(self) -> None:
        """No sensor is found before `choose` is called or a checkpoint is loaded."""
        super().__init__()
        self.column: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.long))
        self.density: Tensor = nn.Buffer(torch.zeros(0, dtype=torch.long))
        self.fitted: list[Known] = []

    @property
    def known(self) -> bool:
        """Whether the sensors have been found."""
        return len(self.column) > 0

    @property
    def counts(self) -> bool:
        """Whether the density of every sensor is one of counts."""
        return all(DENSITIES[k] in ("poisson", "negbin") for k in self.density.tolist() if k >= 0)

    def columns(self) -> list[list[int]]:
        """Those of each sensor."""
        return [(self.column == k).nonzero()[:, 0].tolist() for k in range(len(self.density))]

    @torch.no_grad()
    def choose(
        self, u: Float[Tensor, "n d"], obs: Float[Tensor, "n q"], name: str | None = None
    ) -> None:
        """Find the sensors and select the density of each, given the states u.

        ``name`` is the density of all sensors; None selects by the held-out log score.

        Raises:
            ValueError: as `kbf.densities.selection.select_density`; or no sensor with
                `MIN_READINGS` readings.
        """
        self.column = find_sensors(obs)
        self.density = torch.full((int(self.column.max()) + 1,), -1, device=obs.device)
        for k, columns in enumerate(self.columns()):
            readings = obs[:, columns]
            present = readings.isfinite().all(1)
            if int(present.sum()) < MIN_READINGS:
                log.warning(
                    "the sensor of columns %s has %d readings only: it is not used",
                    columns,
                    int(present.sum()),
                )
                continue
            density, seen, read = name, u[present], readings[present]
            if density is None:
                known = next((each for each in self.fitted if each.fits(seen, read)), None)
                choice = select_density(seen, read) if known is None else known.choice
                density = choice.name
                if known is None and len(seen) <= MAX_POINTS:  # all of them were used
                    self.fitted.append(Known(choice, seen.double(), read.double()))
            log.info("density of the sensor of columns %s: %s", columns, density)
            self.density[k] = DENSITIES.index(density)
        if not bool((self.density >= 0).any()):
            raise FitError(f"of {len(self.density)} sensors none has {MIN_READINGS} readings")

    @torch.no_grad()
    def fit(self, u: Float[Tensor, "n d"], obs: Float[Tensor, "n q"]) -> PerSensorDensity:
        """Fit the density of each sensor with at least `MIN_READINGS` readings.

        Raises:
            ValueError: as `kbf.densities.selection.fit_density`; or no sensor with
                `MIN_READINGS` readings.
        """
        densities, places = [], []
        for k, columns in enumerate(self.columns()):
            readings = obs[:, columns]
            present = readings.isfinite().all(1)
            if int(self.density[k]) >= 0 and int(present.sum()) >= MIN_READINGS:
                name, seen, read = DENSITIES[int(self.density[k])], u[present], readings[present]
                known = fit_like(self.fitted, name, seen, read)
                densities.append(fit_density(name, seen, read) if known is None else known)
                places.append(tuple(columns))
        if not densities:
            raise FitError(f"of {len(self.density)} sensors none has {MIN_READINGS} readings")
        return PerSensorDensity(tuple(densities), tuple(places), obs.shape[1])

    def hyperparameters(self) -> dict[str, float]:
        """The density of each sensor by its position in `DENSITIES`, for logs."""
        return {
            f"density/sensor_{k}": float(density) for k, density in enumerate(self.density.tolist())
        }

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module._load_from_state_dict`: without stored sensors there are none.

        Raises:
            ValueError: unknown densities.
        """
        for name in ("column", "density"):
            state_dict.setdefault(prefix + name, getattr(self, name).clone())
        stored = state_dict[prefix + "density"]
        if not bool(((stored >= -1) & (stored < len(DENSITIES))).all()):
            raise ValueError(
                f"this model was stored with densities {stored.tolist()}; "
                f"there are 0 to {len(DENSITIES) - 1}"
            )
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
