"""The kernel Monte Carlo filter of a model that is learned from recordings: what it may choose from, and how it chooses.

The filter itself is in `kbf.filters.kernel_monte_carlo.filter`, the model with its velocities in
`kbf.densities.second_order_ssm`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.data.windows import piece, split
from kbf.densities.per_sensor import SelectedSensors
from kbf.densities.second_order_ssm import (
    ORDERS,
    LaggedModel,
    all_states,
    learn_lagged_model,
    widened,
)
from kbf.densities.selection import DENSITIES, select_density
from kbf.filters.kernel_monte_carlo.density_ratio import RatioFilter
from kbf.filters.kernel_monte_carlo.filter import KernelMonteCarloFilter
from kbf.filters.rollout import rollout
from kbf.filters.wrapper import CollectingCovariance
from kbf.recording import Recording, as_recordings, observed_pairs, pad
from kbf.rkhs.linalg import evenly
from kbf.runtime.errors import FitError
from kbf.runtime.html_repr import ShownModule

HELD_OUT, HELD_OUT_BLOCKS, LONG, BURN_IN = 0.2, 8, 100, 5
"""Share of the recordings that is held out to choose on; stretches of it that are run through, steps in each, at most; first steps
that do not count: the filter does not know yet where it is."""
LEAST_VARIANCE = 1e-4
"""Of a component, over that of the states, when its log score is asked for: a few particles in one place are no certainty."""
TIE = 0.1
"""Difference of held-out scores that decides nothing: the filter that is less sure is taken."""
MARGIN = 0.5
"""Of the recorded range, on each side of it: there the learned moves are trusted, too."""
RATIO_RESTARTS, RATIO_TEMPERS = (0.002,), (1.0, 0.5)
"""What there is to choose from where density ratios are told: these find a lost track again by themselves."""
LOOKED_AT = 1000
"""Points that the choice of a law looks at."""


class HeldOut(NamedTuple):
    """On held-out stretches: the mean squared error over the variance of each component, and -2 log N(z; m, diag C) of one."""

    error: float
    surprise: float


class KernelMonteCarlo(ShownModule):
    """The kernel Monte Carlo filter of a model learned from recordings (`kbf.densities.second_order_ssm`): no true model is needed.

    `prepare` chooses, on the last fifth of the recordings and from the rest alone, what one-step
    residuals cannot tell: whether the state carries its velocity; how much wider than its residuals
    the noise of the moves must be so that whole runs stay on track; and lambda, which smooths the
    rule where errors of the sensors go on from step to step (0 is the rule's limit, weights by the
    law's density: sharper where observations tell much, and too sure where the law is not quite
    true, unless it is tempered). All are tried by running the filter through held-out stretches.
    The law of the observations is chosen by its held-out log score (`kbf.densities.selection`).
    With ``allow_missing_sensors`` sensors may be silent one by one, each with a law of its own
    (`kbf.densities.per_sensor`): draws and observations are compared in the columns of those that
    speak.

    Observations may be density ratios of a state with ``ratio_dim`` components
    (`kbf.densities.ratio`): there is no law to choose then, nothing is imagined, and the filter is
    `kbf.filters.kernel_monte_carlo.density_ratio.RatioFilter`.
    """

    order: Tensor
    inflation: Tensor
    reg: Tensor
    restart: Tensor
    temper: Tensor
    density: Tensor
    allow_missing_sensors: bool
    ratio_dim: int
    orders: Sequence[int]
    inflations: Sequence[float]
    regs: Sequence[float]
    seed: int

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
        """What to build, and what to choose from.

        Args:
            particles, draws, rank, factor: as of `KernelMonteCarloFilter`.
            orders: of the model: 1 without velocity, 2 with. inflations: of the moves' noise. regs:
                lambda of the rule; 0 weighs by the density of the law of observations. restarts:
                shares of particles that begin anew in each move: few of them cost next to nothing,
                and a lost track is found again.
            tempers: powers of the density where lambda is 0; the middle one is that of the first
                round. Of density ratios lambda is 0, and `RATIO_RESTARTS` and `RATIO_TEMPERS` take
                the place of these.
            law: of observations, a name of `kbf.densities.selection.DENSITIES`; None chooses.
            seed: of the held-out runs.
            dtype: float32 or float64, of the filter's steps.

        Raises:
            ValueError: an unknown law or dtype, or nothing to choose from.
        """
        super().__init__()
        if density is not None and density not in DENSITIES:
            raise ValueError(
                f"law must be null (the best one is chosen) or one of {', '.join(DENSITIES)}; got {density!r}"
            )
        if dtype not in ("float32", "float64") or not (
            orders and inflations and regs and restarts and tempers
        ):
            raise ValueError(
                f"dtype must be float32 or float64, got {dtype!r}; orders, inflations, regs, restarts and tempers must not be empty"
            )
        self.sizes: dict[str, Any] = {
            "particles": particles,
            "draws": draws,
            "rank": rank,
            "factor": factor,
        }
        self.orders, self.inflations, self.regs, self.restarts, self.tempers = (
            orders,
            inflations,
            regs,
            restarts,
            tempers,
        )
        self.given_density, self.seed = density, seed
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.register_buffer("order", torch.tensor(orders[-1]))
        self.register_buffer("inflation", torch.tensor(inflations[0], dtype=torch.float64))
        self.register_buffer("reg", torch.tensor(regs[0], dtype=torch.float64))
        self.register_buffer("restart", torch.tensor(restarts[0], dtype=torch.float64))
        self.register_buffer("temper", torch.tensor(tempers[0], dtype=torch.float64))
        self.register_buffer("density", torch.tensor(DENSITIES.index(density or "gaussian")))
        self.allow_missing_sensors, self.sensors = False, SelectedSensors()
        self.ratio_dim = 0

    @torch.no_grad()
    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Choose the law of observations, then order, inflation, lambda and temper by the error of runs through held-out stretches.

        First every order with every inflation, at the least lambda and a middle temper; then lambda
        at the best of these and the inflation before it: smoothing the rule does a part of what
        wider moves do; then whether particles begin anew. The temper, where lambda is 0, is the
        least of those with the best log score of the states: it says how sure the filter may be,
        which errors hardly show. Too short recordings (no stretch of ten steps can be held out)
        leave the first of each.
        """
        sequences = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        if self.allow_missing_sensors:
            self.sensors.choose(*observed_pairs(sequences), self.given_density)
        elif self.given_density is None and not self.ratio_dim:
            seen, obs = observed_pairs(sequences)
            some = evenly(len(seen), LOOKED_AT, seen.device)
            self.density.fill_(
                DENSITIES.index(select_density(seen[some].double(), obs[some].double()).name)
            )
        try:
            fit, held = split(sequences, HELD_OUT)
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
        batch = pad(blocks)
        scale = torch.cat([s.states for s in fit]).var(0).clamp_min(1e-12)
        models: dict[int, LaggedModel] = {}
        for order in self.orders:
            with suppress(FitError):  # too few steps
                models[order] = learn_lagged_model(fit, order=order, density=self.kind)
        found: dict[tuple[int, float, float, float, float], HeldOut] = {}

        def attempt(*tried: Any) -> None:
            if tried not in found:
                order, inflation, *rest = tried
                filter = self.filter_of(widened(models[order], inflation), fit, *rest)
                found[tried] = held_out(filter, batch, scale, self.seed)

        def best() -> Any:
            return min(found, key=lambda key: found[key].error)

        cheapest = min(regs)  # 0, if it is there: nothing is imagined
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
            least = min(found[*others, each].surprise for each in tempers)
            temper = min(each for each in tempers if found[*others, each].surprise <= least + TIE)
        *others, _ = others
        for restart in restarts:
            attempt(*others, restart, temper)
        restart = min(restarts, key=lambda each: found[*others, each, temper].error)
        values = (*others, restart, temper)
        for buffer, value in zip(
            (self.order, self.inflation, self.reg, self.restart, self.temper), values, strict=True
        ):
            buffer.fill_(value)

    @property
    def kind(self) -> str | SelectedSensors:
        """The law of observations by its name; or sensors that may be silent, and theirs."""
        if self.ratio_dim:
            return "ratio"
        return self.sensors if self.sensors.known else DENSITIES[int(self.density)]

    def filter_of(
        self,
        model: LaggedModel,
        sequences: list[Recording],
        reg: float,
        restart: float,
        temper: float,
    ) -> KernelMonteCarloFilter:
        """The filter of a model, started from the recorded states."""
        initial = all_states(sequences, model.order).to(self.dtype)
        low, high = initial.amin(0), initial.amax(0)
        margin = MARGIN * (high - low)
        region = (low - margin, high + margin)
        if self.ratio_dim:
            several = {"particles": self.sizes["particles"], "restart": restart, "temper": temper}
            return RatioFilter(model, initial, d=model.d, region=region, recorded=True, **several)
        counts = (
            self.sensors.counts
            if self.sensors.known
            else DENSITIES[int(self.density)] in ("poisson", "negbin")
        )
        numbers = {"reg": reg, "restart": restart, "temper": temper, **self.sizes}
        return KernelMonteCarloFilter(
            model,  # pyright: ignore[reportArgumentType]
            initial,
            d=model.d,
            counts=counts,
            region=region,
            recorded=True,
            **numbers,
        )

    @torch.no_grad()
    def fit(self, memory: Recording | list[Recording] | None) -> KernelMonteCarloFilter:
        """Fit the model with what `prepare` has chosen to all of ``memory``.

        Raises:
            ValueError: no memory, or as `kbf.densities.second_order_ssm.learn_lagged_model`.
        """
        sequences = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        if self.allow_missing_sensors and not self.sensors.known:
            self.sensors.choose(*observed_pairs(sequences), self.given_density)
        model = learn_lagged_model(
            sequences, order=int(self.order), inflation=float(self.inflation), density=self.kind
        )
        return self.filter_of(
            model, sequences, float(self.reg), float(self.restart), float(self.temper)
        )

    def hyperparameters(self) -> dict[str, float]:
        """What was chosen, for logs; the law by its position in `DENSITIES`."""
        names = (
            "order",
            "inflation",
            "restart",
            "temper",
            *(() if self.ratio_dim else ("reg", "density")),
        )
        return {name: float(getattr(self, name)) for name in names} | self.sensors.hyperparameters()


def held_out_blocks(held: list[Recording]) -> list[Recording]:
    """At most `HELD_OUT_BLOCKS` stretches of at most `LONG` steps, spread over held-out recordings."""
    spans = [(s, k) for s in held for k in range(0, len(s.states) - 9, LONG)]
    chosen = [spans[i] for i in evenly(len(spans), HELD_OUT_BLOCKS).tolist()]
    return [piece(s, k, min(k + LONG, len(s.states))) for s, k in chosen]


def held_out(
    filter: KernelMonteCarloFilter, batch: Recording, scale: Float[Tensor, " d"], seed: int
) -> HeldOut:
    """What a filter does on held-out stretches, without the first steps of each; infinite if it breaks."""
    generator = torch.Generator(scale.device).manual_seed(seed)
    obs = batch.obs.to(filter.initial)
    controls = None if batch.controls is None else batch.controls.to(filter.initial)
    run = rollout(
        CollectingCovariance(filter), obs, mask=batch.mask, controls=controls, generator=generator
    )
    known = batch.states[:, BURN_IN:].isfinite().all(-1)
    left = ((run.estimates.double() - batch.states.double())[:, BURN_IN:] / scale.sqrt())[known]
    variance = (
        run.diagnostics[CollectingCovariance.NAME]
        .diagonal(dim1=-2, dim2=-1)
        .double()[:, BURN_IN:][known]
        / scale
    )
    variance = variance.clamp_min(LEAST_VARIANCE)
    error, surprise = (
        left.square().mean().item(),
        (left.square() / variance + variance.log()).mean().item(),
    )
    return HeldOut(error, surprise) if error == error else HeldOut(math.inf, math.inf)
