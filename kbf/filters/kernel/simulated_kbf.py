"""Kernel Bayes Filter over a memory sampled from a learned state-space model."""

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.densities.base import ConditionalDensity
from kbf.densities.categorical import CategoricalDensity
from kbf.densities.learned_ssm import LearnedModel
from kbf.densities.per_sensor import PerSensorDensity
from kbf.densities.ridge import RidgeMap
from kbf.densities.selected import DensityModel
from kbf.filters.kernel.controlled_transition import (
    MAX_TRANSITIONS_OF_DENSITY,
    ControlledDensity,
    controlled_run,
)
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.operators import density_transition, low_rank
from kbf.filters.kernel.update.nearest_draws import LocalUpdate
from kbf.filters.kernel.update.rule import DensityUpdate, PrimalUpdate
from kbf.manifolds import FLAT, Manifold
from kbf.recording import Recording, as_recordings, observed_pairs
from kbf.rkhs.features import NystromFeatures
from kbf.rkhs.kernels import KERNELS, median_distance
from kbf.rkhs.linalg import some_rows
from kbf.runtime.deadline import check_deadline
from kbf.runtime.threads import one_thread
from kbf.ssm import simulate

# Factor of the draws with controls: a prediction given the control covers fewer states.
DRAWS_UNDER_CONTROLS = 4

# Draws of a state's observation if its density is not Gaussian.
DRAWS_OF_OTHER_DENSITIES = 128

# Width of the kernel over the distance of the farthest draw; categories are equal or different.
WIDTH = 0.5
WIDTH_OF_CATEGORIES = 0.05


class SimulatedKBF(DensityModel):
    """Kernel Bayes Filter over a memory of any size, sampled from a learned state-space model.

    1. The conditional densities p(z' | z) and p(x | z) are learned: kernel ridge regression with
       Gaussian residuals, or another density with a better held-out score
       (`kbf.densities.selection`).
    2. A long run of that model is reduced to ``points`` states by k-means. Each has a mass, the
       share of the run that it represents, and ``draws`` observations.
    3. The transition is the ratio of the learned density to that of the memory, with exact means
       (`density_transition`), and the update is the importance-weighted rule in its primal form.
       If the density of observations is not Gaussian, their noise may have any scale: there are
       `DRAWS_OF_OTHER_DENSITIES` of each state, and the rule is restricted to those near the
       observation (`kbf.filters.kernel.update.nearest_draws`).

    If the recordings have controls, the transition is that of (z, u) to z', the run is under
    recorded controls, and the operator is computed in each step for its control
    (`kbf.filters.kernel.controlled_transition.ControlledDensity`), which takes many times longer.

    There are no hyper-parameters to select: with many points the bandwidth and the ridge of the
    rule have little effect.

    With ``allow_missing_sensors`` any sensor may be missing at any step, with NaN in its columns.
    The columns of each sensor are inferred from the recordings, and each sensor has a density of
    its own (`kbf.densities.per_sensor`); weights are the densities of the present sensors
    (`kbf.filters.kernel.update.rule.DensityUpdate`).
    """

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
        """Store the settings.

        Args:
            points: states in the memory.
            draws: observations of each.
            run: simulated states before k-means.
            rank: largest number of features of the observations' kernel.
            factor: its bandwidth over the median distance of the training observations.
            reg: lambda of the rule.
            seed: of the draws; the same recordings give the same filter.
            dtype: float32 or float64, of the filter's steps.
            kernel: of the observations, a name in `kbf.rkhs.kernels.KERNELS`.
            transition: name of the density of transitions (`kbf.densities.selection.DENSITIES`);
                None for the best one on held-out data.
            observation: likewise.

        Raises:
            ValueError: a size below 1, another dtype, an unknown kernel or an unknown density.
        """
        super().__init__(transition, observation)
        sizes = {"points": points, "draws": draws, "run": run, "rank": rank}
        if dtype not in ("float32", "float64") or min(sizes.values()) < 1:
            raise ValueError(
                "SimulatedKBF: sizes must be at least 1 and dtype float32 or float64; "
                f"got {sizes} and {dtype!r}"
            )
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}; got {kernel!r}")
        self.points, self.draws, self.run, self.rank = points, draws, run, rank
        self.kernel, self.factor, self.reg, self.seed = kernel, factor, reg, seed
        self.dtype: torch.dtype = getattr(torch, dtype)

    @torch.no_grad()
    @one_thread()
    def fit(self, memory: Recording | list[Recording] | None) -> KernelBayesFilter:
        """Learn the model, sample the memory, and compute the operators.

        Raises:
            ValueError: as `kbf.densities.learned_ssm.learn_model`.
        """
        recordings = [
            s._replace(
                states=s.states.double(),
                obs=s.obs.double(),
                controls=None if s.controls is None else s.controls.double(),
            )
            for s in as_recordings(memory or [], allow_missing_sensors=self.allow_missing_sensors)
        ]
        model = self.learned(recordings)
        recorded = torch.cat([s.states for s in recordings])
        generator = torch.Generator(recorded.device).manual_seed(self.seed)
        moves = model.transition
        if model.controlled:
            if not isinstance(moves, RidgeMap):
                raise ValueError(
                    "with controls the transition density must be gaussian: "
                    f"set transition={self.densities.names[0]} to gaussian"
                )
            before, acted, drawn = controlled_run(model, recordings, self.run, generator)
            states, mass = quantise(drawn, self.points, generator, moves.manifold)
            some = some_rows(len(before), MAX_TRANSITIONS_OF_DENSITY, before.device)
            transition = ControlledDensity(
                model, states, mass, (before[some], acted[some]), self.dtype
            )
        else:
            first = torch.randint(
                len(recorded), (100,), device=recorded.device, generator=generator
            )
            start = recorded[first]
            steps = -(-self.run // len(start))
            if isinstance(moves, RidgeMap):
                drawn = simulate(model, start, steps, generator).states.flatten(0, 1)
                states, mass = quantise(drawn, self.points, generator, moves.manifold)
                mean, scale = moves.predict(states)
                log_density = moves.log_density_given(states[:, None], mean, scale)
                mean = moves.expected(mean, scale)
            else:
                drawn = bounded_run(moves, start, steps, recorded, generator)
                states, mass = quantise(drawn, self.points, generator)
                log_density, mean = moves.at(states)(states), moves.mean(states)
            transition = low_rank(
                density_transition(log_density, mass, states, mean).to(self.dtype)
            )
        update = self.update_of(model, states, observed_pairs(recordings)[1], generator)
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
        """Return the update over draws at the memory's states.

        The bandwidth is in units of the median distance of the ``recorded`` observations.
        """
        density = model.observation
        if isinstance(density, PerSensorDensity):
            return DensityUpdate(density, states)
        if isinstance(density, RidgeMap):
            obs = self.observations(model, states)
        else:
            obs = density.sample(
                states[:, None].expand(-1, DRAWS_OF_OTHER_DENSITIES, -1), generator
            )
        width = self.factor * median_distance(recorded, distinct=True)
        features = NystromFeatures(self.kernel, width, obs[:, 0], self.rank, 1e-9)
        if isinstance(density, RidgeMap):
            return PrimalUpdate(features, obs, self.reg, dtype=self.dtype)
        near = WIDTH_OF_CATEGORIES if isinstance(density, CategoricalDensity) else WIDTH
        return LocalUpdate(obs, states, width=near, psi=features, dtype=self.dtype)

    def observations(
        self, model: LearnedModel, states: Float[Tensor, "n d"]
    ) -> Float[Tensor, "n k q"]:
        """Return ``draws`` observations of each state, their noise from a Sobol sequence."""
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
    """Return the states of runs of a transition density, clamped to a bounded region.

    The region is the recorded range with a margin of half its width on each side, since heavy tails
    may leave it.
    """
    low, high = recorded.amin(0), recorded.amax(0)
    margin = (high - low) / 2
    z, run = start, []
    for _ in range(steps):
        check_deadline()
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
    """Return at most m centres ``k d`` by k-means, and the share of the points of each ``k``.

    The centres are on the manifold of the points.
    """
    centres = points[torch.randperm(len(points), device=points.device, generator=generator)[:m]]
    shares, middle = centres.new_ones(len(centres)), points.mean(0)
    for _ in range(rounds):
        check_deadline()
        nearest = torch.cdist((points - middle).float(), (centres - middle).float()).argmin(1)
        counts = nearest.bincount(minlength=len(centres))
        # Unlike index_add this is deterministic on a GPU.
        sums = torch.segment_reduce(points[nearest.argsort(stable=True)], "sum", lengths=counts)
        used = counts > 0
        centres = manifold.project(sums[used] / counts[used, None])
        shares = counts[used].to(points) / len(points)
    return centres, shares
