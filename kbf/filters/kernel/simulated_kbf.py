"""Kernel Bayes Filter over a memory sampled from a learned state-space model."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.densities.base import ConditionalDensity
from kbf.densities.categorical import CategoricalDensity
from kbf.densities.learned_ssm import LearnedModel, learn_model
from kbf.densities.per_sensor import PerSensorDensity
from kbf.densities.ridge import RidgeMap
from kbf.densities.selected import SelectedDensities
from kbf.filters.kernel.controlled_transition import (
    MOVES_OF_DENSITY,
    ControlledDensity,
    controlled_run,
)
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.operators import density_transition, low_rank
from kbf.filters.kernel.update.likelihood import DensityUpdate
from kbf.filters.kernel.update.nearest_draws import LocalUpdate
from kbf.filters.kernel.update.rule import PrimalUpdate
from kbf.manifolds import FLAT, Manifold
from kbf.recording import Recording, as_recordings, observed_pairs
from kbf.rkhs.features import NystromFeatures
from kbf.rkhs.kernels import KERNELS, median_distance
from kbf.rkhs.linalg import evenly
from kbf.runtime.html_repr import ShownModule
from kbf.runtime.threads import one_thread
from kbf.ssm import simulate

DRAWS_UNDER_CONTROLS = 4
"""Factor of the draws with controls: a prediction given the control covers fewer states."""
OTHER = 128
"""Draws of a state's observation where its law is not Gaussian."""

OF_CATEGORIES = 0.05
"""Width of the kernel on categories over the distance of the farthest draw: equal or different."""


class SimulatedKBF(ShownModule):
    """Kernel Bayes Filter over a memory of any size, sampled from a learned state-space model.

    1. The laws p(z' | z) and p(x | z) are learned: kernel ridge regression with Gaussian residuals,
    or another law where
       that is better on what is held out (`kbf.densities.selection`).
    2. A long run of that model is cut down to ``points`` states by k-means; each has a mass, the
    share of the run that it stands
       for, and ``draws`` observations.
    3. The transition is the learned density's ratio to the memory's, with exact means
    (`density_transition`), and the update is
       the importance-weighted rule in its primal form. Observations of another law get `OTHER`
       draws of each state and the rule over the draws near the observation
       (`kbf.filters.kernel.update.nearest_draws`): they may be far apart, or their noise of any
       size.

    Where the recordings have controls, the map is (z, u) -> z', the run is under recorded controls,
    and the transition is computed in each step for its control
    (`kbf.filters.kernel.controlled_transition.ControlledDensity`): many times the time of a step
    without.

    Nothing needs tuning: with so many points the rule's bandwidth and ridge hardly matter.

    With ``allow_missing_sensors`` any sensor may be missing at any step, with NaN in its columns.
    The columns of each sensor are inferred from the recordings, and each sensor has a density of
    its own (`kbf.densities.per_sensor`); weights are the densities of the present sensors
    (`kbf.filters.kernel.update.likelihood`).
    """

    points: int
    draws: int
    run: int
    rank: int
    factor: float
    reg: float
    seed: int

    def __init__(
        self,
        points: int = 1000,
        draws: int = 8,
        run: int = 32_000,
        rank: int = 48,
        factor: float = 0.5,
        reg: float = 1e-4,
        seed: int = 0,
        dtype: str = "float32",
        kernel: str = "gaussian",
        transition: str | None = None,
        observation: str | None = None,
    ) -> None:
        """What to draw.

        Args:
            points: states in the memory.
            draws: observations of each.
            run: states simulated before they are cut down.
            rank: most features of the observations' kernel.
            factor: its bandwidth over the median distance of the training observations.
            reg: lambda of the rule.
            seed: of the draws; the same recording gives the same filter.
            dtype: of the filter's steps.
            kernel: of the observations, a name in `kbf.rkhs.kernels.KERNELS`.
            transition: name of the law of moves (`kbf.densities.selection.DENSITIES`); None for the
                best on what is held out.
            observation: likewise.

        Raises:
            ValueError: no size, another dtype, an unknown kernel or an unknown law.
        """
        super().__init__()
        self.densities: SelectedDensities = SelectedDensities(transition, observation)
        sizes = {"points": points, "draws": draws, "run": run, "rank": rank}
        if dtype not in ("float32", "float64") or min(sizes.values()) < 1:
            raise ValueError(
                f"SimulatedKBF: sizes must be at least 1 and dtype float32 or float64; got {sizes} and {dtype!r}"
            )
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; got {kernel!r}")
        self.kernel = kernel
        self.points, self.draws, self.run, self.rank, self.factor, self.reg, self.seed = (
            points,
            draws,
            run,
            rank,
            factor,
            reg,
            seed,
        )
        self.dtype: torch.dtype = getattr(torch, dtype)

    @property
    def allow_missing_sensors(self) -> bool:
        """Whether sensors may be silent one by one."""
        return self.densities.allow_missing_sensors

    @allow_missing_sensors.setter
    def allow_missing_sensors(self, value: bool) -> None:
        self.densities.allow_missing_sensors = value

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Choose the laws."""
        self.densities.choose(memory)

    def hyperparameters(self) -> dict[str, float]:
        """The choice of laws, for logs."""
        return self.densities.hyperparameters()

    @torch.no_grad()
    @one_thread()
    def fit(self, memory: Recording | list[Recording] | None) -> KernelBayesFilter:
        """Learn the model, draw the memory, build the operators.

        Raises:
            ValueError: as `kbf.densities.learned_ssm.learn_model`.
        """
        sequences = [
            s._replace(
                states=s.states.double(),
                obs=s.obs.double(),
                controls=None if s.controls is None else s.controls.double(),
            )
            for s in as_recordings(memory or [], allow_missing_sensors=self.allow_missing_sensors)
        ]
        self.densities.select_if_missing(sequences)
        model = learn_model(sequences, self.densities.kinds, self.densities.fitted)
        recorded = torch.cat([s.states for s in sequences])
        generator = torch.Generator(recorded.device).manual_seed(self.seed)
        moves = model.transition
        if model.controlled:
            if not isinstance(moves, RidgeMap):
                raise ValueError(
                    f"with controls the law of moves is gaussian: set transition={self.densities.names[0]} to gaussian"
                )
            before, acted, drawn = controlled_run(model, sequences, self.run, generator)
            states, mass = quantise(drawn, self.points, generator, moves.manifold)
            some = evenly(len(before), MOVES_OF_DENSITY, before.device)
            transition = ControlledDensity(
                model, states, mass, (before[some], acted[some]), self.dtype
            )
        else:
            start = recorded[
                torch.randint(len(recorded), (100,), device=recorded.device, generator=generator)
            ]
            steps = -(-self.run // len(start))
            if isinstance(moves, RidgeMap):
                drawn = simulate(model, start, steps, generator).states.flatten(0, 1)
                states, mass = quantise(drawn, self.points, generator, moves.manifold)
                mean, scale = moves.predict(states)
                log_density, mean = (
                    moves.log_density_given(states[:, None], mean, scale),
                    moves.expected(mean, scale),
                )
            else:
                states, mass = quantise(
                    bounded_run(moves, start, steps, recorded, generator), self.points, generator
                )
                log_density, mean = moves.at(states)(states), moves.mean(states)
            transition = low_rank(
                density_transition(log_density, mass, states, mean).to(self.dtype)
            )
        update = self.update_of(model, states, observed_pairs(sequences)[1], generator)
        return KernelBayesFilter(
            states.to(self.dtype),
            transition,
            None,
            update,
            prior=mass.to(self.dtype),
            normalise=True,
        )

    def update_of(
        self,
        model: LearnedModel,
        states: Float[Tensor, "n d"],
        recorded: Float[Tensor, "m q"],
        generator: Generator,
    ) -> nn.Module:
        """The update over draws at the memory's states; ``recorded``: observations, whose distances are the kernel's unit."""
        if isinstance(model.observation, PerSensorDensity):
            return DensityUpdate(model.observation, states)
        other = not isinstance(model.observation, RidgeMap)
        several = states[:, None].expand(-1, OTHER, -1)
        obs = (
            model.observation.sample(several, generator)
            if other
            else self.observations(model, states)
        )
        width = self.factor * median_distance(recorded, distinct=True)
        features = NystromFeatures(self.kernel, width, obs[:, 0], self.rank, 1e-9)
        if other:
            near = OF_CATEGORIES if isinstance(model.observation, CategoricalDensity) else 0.5
            return LocalUpdate(obs, states, width=near, psi=features, dtype=self.dtype)
        return PrimalUpdate(features, obs, self.reg, dtype=self.dtype)

    def observations(
        self, model: LearnedModel, states: Float[Tensor, "n d"]
    ) -> Float[Tensor, "n k q"]:
        """``draws`` observations of each state, from a scrambled Sobol sequence: its blocks fill the noise evenly."""
        assert isinstance(model.observation, RidgeMap)
        mean, scale = model.observation.predict(states)
        draws = self.draws * (DRAWS_UNDER_CONTROLS if model.controlled else 1)
        sobol = torch.quasirandom.SobolEngine(
            len(model.observation.noise), scramble=True, seed=self.seed
        )
        uniform = sobol.draw(len(states) * draws, dtype=mean.dtype).to(mean).clamp(1e-9, 1 - 1e-9)
        white = torch.special.ndtri(uniform).unflatten(0, (len(states), draws))
        each, scales = mean[:, None].expand(-1, draws, -1), scale[:, None].expand(-1, draws)
        return model.observation.displaced(each, scales, white)


def bounded_run(
    density: ConditionalDensity,
    start: Float[Tensor, "m d"],
    steps: int,
    recorded: Float[Tensor, "n d"],
    generator: Generator | None = None,
) -> Float[Tensor, "t d"]:
    """States of runs of a law of moves, kept within the recorded range and half of it more: heavy tails carry nothing away."""
    low, high = recorded.amin(0), recorded.amax(0)
    margin = (high - low) / 2
    z, run = start, []
    for _ in range(steps):
        z = density.sample(z, generator).clamp(low - margin, high + margin)
        run.append(z)
    return torch.cat(run)


def quantise(
    points: Float[Tensor, "n d"],
    m: int,
    generator: Generator | None = None,
    manifold: Manifold = FLAT,
    *,
    rounds: int = 5,
) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]:
    """k-means: at most m centres ``k d`` that stand for the points, and the share of the points that each stands for, ``k``.

    The centres lie on the manifold of the points.
    """
    centres = points[torch.randperm(len(points), device=points.device, generator=generator)[:m]]
    shares, middle = centres.new_ones(len(centres)), points.mean(0)
    for _ in range(rounds):
        nearest = torch.cdist((points - middle).float(), (centres - middle).float()).argmin(1)
        counts = nearest.bincount(minlength=len(centres))
        sums = torch.segment_reduce(
            points[nearest.argsort(stable=True)], "sum", lengths=counts
        )  # the same bits on a GPU, too
        taken = counts > 0
        centres, shares = (
            manifold.project(sums[taken] / counts[taken, None]),
            counts[taken].to(points) / len(points),
        )
    return centres, shares
