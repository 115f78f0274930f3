"""Kernel Monte Carlo filter of a model learned from recordings: selects its settings and builds it.

The filter is in `kbf.filters.kernel_monte_carlo.filter`, the state-space model with velocities in
`kbf.densities.learned_ssm`.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.data.windows import held_out_blocks, split
from kbf.densities.learned_ssm import (
    ORDERS,
    LaggedModel,
    all_states,
    learn_lagged_model,
    widened,
)
from kbf.densities.per_sensor import SelectedSensors
from kbf.densities.selection import DENSITIES, Known, select_density
from kbf.filters.kernel_monte_carlo.density_ratio import RatioFilter
from kbf.filters.kernel_monte_carlo.filter import KernelMonteCarloFilter
from kbf.filters.rollout import rollout_recordings
from kbf.recording import Recording, as_recordings, observed_pairs
from kbf.rkhs.linalg import some_rows
from kbf.runtime.errors import FitError
from kbf.runtime.html_repr import ShownModule

# Share of the recordings, their last part, on which settings are selected.
HELD_OUT_SHARE = 0.2

# First steps of a block that do not count: the filter has not converged yet.
BURN_IN = 5

# Smallest variance in a log score over that of the states: particles may coincide.
MIN_VARIANCE = 1e-4

# Difference of log scores within which the candidate of larger spread is selected.
LOG_SCORE_TOLERANCE = 0.1

# Margin around the recorded range, over its width, within which the learned transition is used.
MARGIN = 0.5

# Candidates for ``restart`` with density ratios, which recover lost tracks themselves.
RATIO_RESTARTS = (0.002,)

# Candidates for ``temper`` if observations are density ratios.
RATIO_TEMPERS = (1.0, 0.5)

# Points by which the conditional density of the observations is selected.
MAX_POINTS_OF_DENSITY_SELECTION = 1000


class HeldOut(NamedTuple):
    """Scores on held-out blocks, means over steps and components, lower is better.

    Attributes:
        error: squared error over the variance of the component.
        log_score: -2 log N(z; m, diag C), up to a constant.
    """

    error: float
    log_score: float


class KernelMonteCarlo(ShownModule):
    """The kernel Monte Carlo filter of a model learned from recordings.

    `prepare` selects, by running candidates over held-out blocks of the last fifth of the
    recordings:

    - the order of the model, that is, whether the state contains its velocity;
    - the inflation of the noise of the transition, by which runs over many steps remain on track;
    - lambda, which smooths the rule if errors of the sensors are serially correlated. 0 is the
      limit of the rule, weights by the density: sharper for informative observations, and
      overconfident for a misspecified density unless it is tempered;
    - the share of particles that are re-initialised, and the temper.

    The conditional density of the observations is selected by its held-out log score
    (`kbf.densities.selection`). With ``allow_missing_sensors`` single sensors may be missing: each
    sensor has a density of its own (`kbf.densities.per_sensor`), and simulated and real
    observations are compared in the columns of the present ones.

    Observations may be density ratios of a state with ``ratio_dim`` components
    (`kbf.densities.ratio`). The filter is then
    `kbf.filters.kernel_monte_carlo.density_ratio.RatioFilter`.
    """

    def __init__(
        self,
        particles: int = 400,
        draws: int = 4,
        rank: int = 64,
        factor: float = 0.7,
        *,
        orders: Sequence[int] = ORDERS,
        inflations: Sequence[float] = (1.0, 2.0, 4.0, 8.0),
        regs: Sequence[float] = (1e-3, 1e-2, 0.0),
        restarts: Sequence[float] = (0.005, 0.02),
        tempers: Sequence[float] = (1.0, 0.5, 0.25),
        density: str | None = None,
        seed: int = 0,
        dtype: str = "float32",
    ) -> None:
        """Set the sizes and the candidates.

        Args:
            particles: as of `KernelMonteCarloFilter`.
            draws: likewise.
            rank: likewise.
            factor: likewise.
            orders: candidates for the order of the model: 1 without velocity, 2 with.
            inflations: candidates for the inflation of the noise of the transition.
            regs: candidates for lambda of the rule; 0 for weights by the density of observations.
            restarts: candidates for the share of particles that are re-initialised in each move.
            tempers: candidates for the power of the density if lambda is 0; the middle one is used
                in the first round. For density ratios lambda is 0, and `RATIO_RESTARTS` and
                `RATIO_TEMPERS` replace ``restarts`` and ``tempers``.
            density: of observations, a name of `kbf.densities.selection.DENSITIES`; None selects.
            seed: of the held-out runs.
            dtype: float32 or float64, of the filter's steps.

        Raises:
            ValueError: an unknown density or dtype, or no candidates.
        """
        super().__init__()
        if density is not None and density not in DENSITIES:
            raise ValueError(
                "density must be null (the best one is selected) or one of "
                f"{', '.join(DENSITIES)}; got {density!r}"
            )
        if dtype not in ("float32", "float64") or not (
            orders and inflations and regs and restarts and tempers
        ):
            raise ValueError(
                f"dtype must be float32 or float64, got {dtype!r}; orders, inflations, regs, "
                "restarts and tempers must not be empty"
            )
        self.sizes: dict[str, Any] = {
            "particles": particles,
            "draws": draws,
            "rank": rank,
            "factor": factor,
        }
        self.orders, self.inflations, self.regs = orders, inflations, regs
        self.restarts, self.tempers = restarts, tempers
        self.given_density, self.seed = density, seed
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.order: Tensor = nn.Buffer(torch.tensor(orders[-1]))
        self.inflation: Tensor = nn.Buffer(torch.tensor(inflations[0], dtype=torch.float64))
        self.reg: Tensor = nn.Buffer(torch.tensor(regs[0], dtype=torch.float64))
        self.restart: Tensor = nn.Buffer(torch.tensor(restarts[0], dtype=torch.float64))
        self.temper: Tensor = nn.Buffer(torch.tensor(tempers[0], dtype=torch.float64))
        self.density: Tensor = nn.Buffer(torch.tensor(DENSITIES.index(density or "gaussian")))
        self.allow_missing_sensors: bool = False
        self.sensors: SelectedSensors = SelectedSensors()
        # densities that are fitted already, perhaps those of another model
        self.fitted: list[Known] = []
        self.ratio_dim: int = 0

    @torch.no_grad()
    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select the density of observations, then the settings by their error on held-out blocks.

        1. Every order with every inflation, at the smallest lambda and the middle temper.
        2. Every lambda, at the best of these and the inflation before it, since a smoother rule
           has in part the effect of a wider transition.
        3. If lambda is 0, the smallest temper among those with the best log score, which depends
           on the spread of the belief more than the error does.
        4. The share of particles that are re-initialised.

        Recordings that are too short for a held-out block of ten steps leave the first candidates.
        """
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        if self.allow_missing_sensors:
            self.sensors.choose(*observed_pairs(recordings), self.given_density)
        elif self.given_density is None and not self.ratio_dim:
            seen, obs = observed_pairs(recordings)
            some = some_rows(len(seen), MAX_POINTS_OF_DENSITY_SELECTION, seen.device)
            self.density.fill_(
                DENSITIES.index(self.select(seen[some].double(), obs[some].double()))
            )
        try:
            fit, held = split(recordings, HELD_OUT_SHARE)
        except FitError:
            return
        blocks = held_out_blocks(held)
        choice = (
            ((0.0,), RATIO_RESTARTS, RATIO_TEMPERS)
            if self.ratio_dim
            else (self.regs, self.restarts, self.tempers)
        )
        regs, restarts, tempers = choice
        several = (self.orders, self.inflations, *choice)
        if not blocks or all(len(each) == 1 for each in several):
            return
        scale = torch.cat([s.states for s in fit]).var(0).clamp_min(1e-12)
        models: dict[int, LaggedModel] = {}
        observation: Any = None
        for order in self.orders:
            with suppress(FitError):  # too few steps
                settings = {"density": self.kind, "known": self.fitted}
                models[order] = learn_lagged_model(
                    fit, order=order, observation=observation, **settings
                )
                observation = models[order].observation
        found: dict[tuple[int, float, float, float, float], HeldOut] = {}

        def attempt(*candidate: Any) -> None:
            if candidate not in found:
                order, inflation, *rest = candidate
                filter = self.filter_of(widened(models[order], inflation), fit, *rest)
                found[candidate] = held_out(filter, blocks, scale, self.seed)

        def best() -> Any:
            return min(found, key=lambda key: found[key].error)

        cheapest = min(regs)  # 0, if it is a candidate: no observations are simulated
        middle = tempers[len(tempers) // 2]
        for order in models:
            for inflation in self.inflations:
                attempt(order, inflation, cheapest, restarts[-1], middle)
        if not found:
            return
        order, inflation = best()[:2]
        k = list(self.inflations).index(inflation)
        for reg in regs:
            for near in self.inflations[max(0, k - 1) : k + 1]:
                attempt(order, near, reg, restarts[-1], middle)
        *others, temper = best()
        if others[2] == 0:
            for temper in tempers:
                attempt(*others, temper)
            least = min(found[*others, each].log_score for each in tempers)
            temper = min(
                each
                for each in tempers
                if found[*others, each].log_score <= least + LOG_SCORE_TOLERANCE
            )
        *others, _ = others
        for restart in restarts:
            attempt(*others, restart, temper)
        restart = min(restarts, key=lambda each: found[*others, each, temper].error)
        for buffer, value in zip(
            (self.order, self.inflation, self.reg, self.restart, self.temper),
            (*others, restart, temper),
            strict=True,
        ):
            buffer.fill_(value)

    def select(self, z: Float[Tensor, "n d"], x: Float[Tensor, "n q"]) -> str:
        """Return the name of the density of these observations, selected here or by another."""
        for each in self.fitted:
            if each.fits(z, x):
                return each.choice.name
        choice = select_density(z, x)
        self.fitted.append(Known(choice, z, x))
        return choice.name

    @property
    def kind(self) -> str | SelectedSensors:
        """Return the density of observations by name, or the selected ones of single sensors."""
        if self.ratio_dim:
            return "ratio"
        return self.sensors if self.sensors.known else DENSITIES[int(self.density)]

    def filter_of(
        self,
        model: LaggedModel,
        recordings: list[Recording],
        reg: float,
        restart: float,
        temper: float,
    ) -> KernelMonteCarloFilter:
        """Return the filter of a model; its initial states are the recorded ones."""
        initial = all_states(recordings, model.order).to(self.dtype)
        low, high = initial.amin(0), initial.amax(0)
        margin = MARGIN * (high - low)
        given = {"d": model.d, "region": (low - margin, high + margin), "recorded": True}
        given |= {"restart": restart, "temper": temper}
        if self.ratio_dim:
            return RatioFilter(model, initial, particles=self.sizes["particles"], **given)
        counts = (
            self.sensors.counts
            if self.sensors.known
            else DENSITIES[int(self.density)] in ("poisson", "negbin")
        )
        learned: Any = model
        return KernelMonteCarloFilter(
            learned, initial, reg=reg, counts=counts, **given, **self.sizes
        )

    @torch.no_grad()
    def fit(self, memory: Recording | list[Recording] | None) -> KernelMonteCarloFilter:
        """Fit the model with the selected settings to all of ``memory``.

        Raises:
            ValueError: no memory, or as `kbf.densities.learned_ssm.learn_lagged_model`.
        """
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        if self.allow_missing_sensors and not self.sensors.known:
            self.sensors.choose(*observed_pairs(recordings), self.given_density)
        model = learn_lagged_model(
            recordings,
            order=int(self.order),
            inflation=float(self.inflation),
            density=self.kind,
            known=self.fitted,
        )
        return self.filter_of(
            model, recordings, float(self.reg), float(self.restart), float(self.temper)
        )

    def hyperparameters(self) -> dict[str, float]:
        """Return the selected settings for logs; the density by its position in `DENSITIES`."""
        names = (
            "order",
            "inflation",
            "restart",
            "temper",
            *(() if self.ratio_dim else ("reg", "density")),
        )
        return {name: float(getattr(self, name)) for name in names} | self.sensors.hyperparameters()


def held_out(
    filter: KernelMonteCarloFilter, blocks: list[Recording], scale: Float[Tensor, " d"], seed: int
) -> HeldOut:
    """Return the scores on held-out blocks without their first steps; infinite if one is NaN."""
    generator = torch.Generator(scale.device).manual_seed(seed)
    runs = rollout_recordings(
        filter,
        blocks,
        dtype=filter.initial.dtype,
        device=filter.initial.device,
        covariances=True,
        generator=generator,
    )
    states = torch.cat([s.states[BURN_IN:] for s in blocks]).double()
    known = states.isfinite().all(-1)
    estimates = torch.cat([run.estimates[BURN_IN:] for run in runs]).double()
    left = ((estimates - states) / scale.sqrt())[known]
    covariances = [run.covariances[BURN_IN:] for run in runs if run.covariances is not None]
    variances = torch.cat(covariances).diagonal(dim1=-2, dim2=-1).double()
    variance = (variances[known] / scale).clamp_min(MIN_VARIANCE)
    error, log_score = (
        left.square().mean().item(),
        (left.square() / variance + variance.log()).mean().item(),
    )
    return HeldOut(error, log_score) if error == error else HeldOut(math.inf, math.inf)
