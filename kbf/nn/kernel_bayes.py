"""Kernel Bayes Filters as models: what is chosen from the training part, and how a memory becomes a filter.

`KBF` filters over the recording itself. `EnlargedKBF` filters over a larger memory drawn from a model learned from the recording.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf import features, rules
from kbf.distributed import Total, alone, gather
from kbf.filters.backwards import RuleBackward
from kbf.filters.kernel import KernelBayesFilter
from kbf.filters.learned import LearnedModel, learn_model
from kbf.filters.operators import (
    BLOCK,
    SAMPLE,
    ControlledTransition,
    DenseUpdate,
    Operator,
    PrimalUpdate,
    RelativeRatio,
    RelativeRatioPrimal,
    density_transition,
    ratio_operator,
    ratio_operator_primal,
    transition_operator,
    transition_operator_primal,
)
from kbf.kernels import KERNELS, evenly, median_distance
from kbf.manifolds import FLAT, Manifold
from kbf.nn.controlled import BEFORE, ControlledDensity, control_spread, controlled_run, controlled_transition
from kbf.nn.sensors import SensorUpdate, present, read_sensors, sensor_scale, silent_where_masked
from kbf.sequence import Sequence, Transitions, as_sequences, moves, observed_pairs, transitions
from kbf.ssm import simulate

DENSE_RULES = {
    "importance_weighted": rules.importance_weighted,
    "original": rules.original,
    "pseudo_inverse": lambda ratio, gram, query, reg: rules.pseudo_inverse(ratio, gram, query),
}
PAIRS = 4
"""Features of pairs (state, control) over those of states: more of them vary."""
FINER = 4
"""Draws of a state's observation with controls over those without: a prediction that knows the control covers fewer states."""
RATIOS = ("kulsif", "tikhonov", "relative", "one")


class NystromFeatures(nn.Module):
    """`kbf.features.nystrom` at the pivots of the pivoted Cholesky factorisation, with everything it needs in buffers."""

    landmarks: Tensor
    whiten: Tensor
    bandwidth: Tensor

    def __init__(
        self, kernel: str, bandwidth: Tensor, points: Float[Tensor, "n q"], rank: int, tol: float, total: Total = alone
    ) -> None:
        """Features of ``kernel`` spanned by at most ``rank`` of the ``points`` (fewer if the trace residual falls to ``tol``).

        Processes that share a memory (``total``) look at a sample of all their points and choose alike.
        """
        super().__init__()
        self.kernel = kernel
        k = partial(KERNELS[kernel], bandwidth=bandwidth)
        if total is not alone:
            points = gather(points[evenly(len(points), SAMPLE)])
        landmarks = points[features.pivots(k, points, rank=rank, tol=tol)]
        self.register_buffer("landmarks", landmarks)
        self.register_buffer("whiten", features.nystrom_whitening(k(landmarks, landmarks)))
        self.register_buffer("bandwidth", bandwidth)

    def forward(self, x: Float[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """The features psi(x) = L^-1 k(landmarks, x)."""
        return KERNELS[self.kernel](x.flatten(1).to(self.landmarks), self.landmarks, bandwidth=self.bandwidth) @ self.whiten

    def all(self, points: Float[Tensor, "n q"]) -> Float[Tensor, "n p"]:
        """Those of many points, by blocks: the kernel's intermediate arrays stay small."""
        return torch.cat([self(block) for block in points.split(BLOCK)])


class KBF(nn.Module):
    """Kernel Bayes Filter over the training recordings, by any rule and any ratio, with full Gram matrices or features.

    Observations of any shape are compared by their flattened entries.
    Six hyper-parameters, all differentiable through the rollout: bandwidths of the states' kernel for the ratio and for the
    transition and of the observations' kernel; ridges eta (ratio), lambda' (transition) and lambda (rule; delta of the original).
    Where the recordings have controls, the transition is from (z, u), and each control has a bandwidth too.
    """

    log_bandwidth: nn.Parameter
    log_reg: nn.Parameter
    log_control: nn.Parameter | None
    sensor_scale: Tensor

    def __init__(
        self,
        rule: str = "importance_weighted",
        ratio: str = "kulsif",
        kernel: str = "gaussian",
        rank: int | None = 64,
        tol: float = 1e-9,
        normalise: bool = True,
        select: str = "median",
        learn: bool = True,
        factors: tuple[float, float, float] = (0.35, 0.35, 0.7),
        regs: tuple[float, float, float] = (3e-4, 3e-4, 3e-4),
        alpha: float = 0.1,
        dtype: str = "float64",
        local: int | None = None,
        sensors: Many[Many[int]] | None = None,
    ) -> None:
        """What to build; the numbers come from `prepare`.

        Args:
            rule: importance_weighted, original or pseudo_inverse (the last with rank=None only).
            ratio: kulsif, tikhonov, relative, or one: no prior at all, each observation by itself.
            kernel: a name in `kbf.kernels.KERNELS`.
            rank: most features of each kernel; None works with full Gram matrices.
            tol: stop adding features once the trace residual of the Gram matrix falls to this share ; if ``rank`` allows
                it, estimates are then those of full matrices to about 2 sqrt(tol) (`kbf bench rank`).
            normalise: scale weights to sum 1.
            select: median (``factors`` times the median distances, ``regs``), loo (leave-one-out scores in closed form, on a
                subsample) or paper (the grid of Xu et al., on the last min(200, 0.3 n) training steps).
            learn: let training move the six numbers.
            factors: bandwidths over median distances: ratio, transition, observation.
            regs: eta, lambda', lambda.
            alpha: of the relative ratio.
            dtype: float32 or float64, of the filter's steps; what is done once is done in float64.
            local: with rank and rule=importance_weighted, only the points of the so many largest ratios take part in an update.
            sensors: the columns of the observation that belong to each sensor, as [[0, 1], [2]]; then any sensor may be silent
                (NaN), in the recordings and later (`kbf.nn.sensors`). It needs kernel=gaussian, select=median and normalise.

        Raises:
            ValueError: an unknown name, or a combination that does not exist.
        """
        super().__init__()
        choices = {
            "rule": (rule, DENSE_RULES),
            "ratio": (ratio, RATIOS),
            "kernel": (kernel, KERNELS),
            "select": (select, ("median", "loo", "paper")),
            "dtype": (dtype, ("float32", "float64")),
        }
        for name, (value, allowed) in choices.items():
            if value not in allowed:
                raise ValueError(f"KBF: {name} must be one of {', '.join(allowed)}; got {value!r}")
        if rule == "importance_weighted" and ratio == "tikhonov":
            raise ValueError("KBF: rule=importance_weighted needs a ratio that is not negative, ratio=tikhonov is; use kulsif")
        if rank is not None and rule == "pseudo_inverse":
            raise ValueError(f"KBF: rule={rule} needs full Gram matrices, set rank to null")
        numbers = {"rank": rank, "local": local}
        for name, number in numbers.items():
            if number is not None and (not isinstance(number, int) or number < 1):
                raise ValueError(f"KBF: {name} must be a whole number of at least 1, or null; got {number}")
        if not 0 <= tol < 1 or not min(*factors, *regs) > 0:
            raise ValueError(f"KBF: tol must be in [0, 1), factors and regs positive; got {tol}, {factors} and {regs}")
        if select == "loo" and rule != "importance_weighted":
            raise ValueError(f"KBF: select=loo gives the ridge of rule=importance_weighted, not of {rule}")
        if local is not None and (rank is None or rule != "importance_weighted"):
            raise ValueError(f"KBF: local needs features and rule=importance_weighted; got rank={rank} and rule={rule}")
        if sensors is not None and (kernel != "gaussian" or select != "median" or not normalise):
            told = f"kernel={kernel}, select={select}, normalise={normalise}"
            raise ValueError(f"KBF: sensors need kernel=gaussian, select=median and normalise=true; got {told}")
        self.rule, self.ratio, self.kernel, self.rank, self.tol, self.local = rule, ratio, kernel, rank, tol, local
        self.normalise, self.select, self.factors, self.alpha = normalise, select, factors, alpha
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.log_bandwidth = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=learn)
        self.log_reg = nn.Parameter(torch.tensor(regs, dtype=torch.float64).log(), requires_grad=learn)
        self.register_parameter("log_control", None)
        self.sensors = None if sensors is None else read_sensors(sensors)
        if self.sensors is not None:
            self.register_buffer("sensor_scale", torch.ones(sum(map(len, self.sensors)), dtype=torch.float64))

    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Set bandwidths (and with select=paper the ridges) from the training part."""
        sequences = self.recordings(memory)
        states, obs = stacked(sequences)
        if self.sensors is not None:
            self.sensor_scale.copy_(sensor_scale(obs.double(), self.sensors))
        if (controls := moves(sequences)[2]) is not None:
            self.log_control = nn.Parameter(control_spread(controls).log(), requires_grad=self.log_reg.requires_grad)
        if self.select != "median":
            from kbf.selection import closed_form, paper_grid

            (paper_grid if self.select == "paper" else closed_form)(self, memory)
        else:
            medians = torch.stack([median_distance(states)] * 2 + [self.obs_scale(obs).to(states)])
            self.set(medians * medians.new_tensor(self.factors), self.log_reg.exp())

    def recordings(self, memory: Sequence | list[Sequence] | None) -> list[Sequence]:
        """The memory as a list, checked."""
        return as_sequences(memory or []) if self.sensors is None else silent_where_masked(memory or [])

    def obs_scale(self, obs: Tensor, *, diagonal: bool = False) -> Tensor:
        """The median distance of observations ``n *x``, in whose units their bandwidth is chosen."""
        if self.sensors is not None:
            whole = obs[present(obs, self.sensors).all(-1)].double() / self.sensor_scale
            return median_distance(whole) if len(whole) > 1 else torch.ones_like(self.sensor_scale[0])
        return median_distance(obs.flatten(1).double(), diagonal=diagonal)

    def set(self, bandwidths: Tensor, regs: Tensor) -> None:
        """Put numbers in: bandwidths (ratio, transition, observation) and ridges (eta, lambda', lambda)."""
        with torch.no_grad():
            self.log_bandwidth.copy_(bandwidths.log())
            self.log_reg.copy_(regs.log())

    def hyperparameters(self) -> dict[str, float]:
        """The six numbers, and the bandwidths of controls, by name, for logs."""
        values = [*self.log_bandwidth.detach().exp().tolist(), *self.log_reg.detach().exp().tolist()]
        names = ["bandwidth/ratio", "bandwidth/transition", "bandwidth/observation", "reg/ratio", "reg/transition", "reg/rule"]
        widths = [] if self.log_control is None else self.log_control.detach().exp().tolist()
        controls = {f"bandwidth/control_{k}": width for k, width in enumerate(widths)}
        return dict(zip(names, values, strict=True)) | controls

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """As always; the bandwidths of controls, which exist with controls only, are made for those that come."""
        if (stored := state_dict.get(f"{prefix}log_control")) is not None:
            self.log_control = nn.Parameter(torch.zeros_like(stored), requires_grad=self.log_reg.requires_grad)
        rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def condition(self, memory: Sequence | list[Sequence] | None, total: Total = alone) -> KernelBayesFilter:
        """Build the operators over a memory, in time and space O(n) with features; differentiable in bandwidths and ridges.

        Args:
            memory: the recordings; where processes share a memory, those of this process.
            total: `kbf.distributed.all_sum` where they do: all processes call this, and run the filter, in step.

        Raises:
            ValueError: a memory without two successive steps, with missing observations, or with NaN or infinite values; or a
                shared one with full Gram matrices, or a rule or ratio other than the importance-weighted ones.
        """
        whole = self.rank is None or self.local or self.sensors
        if total is not alone and (whole or self.rule != "importance_weighted" or self.ratio == "relative"):
            told = f"rank={self.rank}, local={self.local}, rule={self.rule}, ratio={self.ratio}"
            raise ValueError(f"KBF: a memory that processes share needs features and the importance-weighted rule; got {told}")
        sequences = self.recordings(memory)
        states, obs = stacked(sequences)
        pairs, controls = transitions([len(s.states) for s in sequences], states.device), moves(sequences)[2]
        if len(pairs.source) == 0:
            raise ValueError(f"a kernel filter learns from pairs of successive steps, its {len(sequences)} sequences have none")
        ratio_width, transition_width, obs_width = self.log_bandwidth.exp()
        eta, reg_transition, reg = self.log_reg.exp()
        transition = self.transition_of(states, pairs, controls, transition_width, reg_transition, total)
        filter = KernelBayesFilter(
            states.to(self.dtype),
            transition,
            self.ratio_of(states, ratio_width, eta, total),
            self.update_of(obs, obs_width, reg, total),
            normalise=self.normalise,
            clip=self.ratio != "tikhonov",
            total=total,
            backward=RuleBackward(*pairs, KERNELS[self.kernel], transition_width, controls, self.log_control),
        )
        for operator in (filter.transition, filter.ratio, filter.moved_ratio):
            if operator is not None:
                operator.to(self.dtype)
        if filter.moved_ratio is not None:
            filter.moved_ratio.right = transition.right  # one array
        return filter

    def transition_of(
        self,
        states: Float[Tensor, "n d"],
        pairs: Transitions,
        controls: Tensor | None,
        bandwidth: Tensor,
        reg: Tensor,
        total: Total = alone,
    ) -> Operator | ControlledTransition:
        """P over the recorded moves; P(u) where they have controls ``m k``.

        Raises:
            ValueError: controls, and `prepare` has not chosen their bandwidths.
        """
        if controls is not None:
            if self.log_control is None or self.log_control.shape != controls.shape[1:]:
                raise ValueError(f"KBF: prepare() chooses the bandwidths of {controls.shape[1]} controls: call it before")
            widths = (bandwidth, self.log_control.exp())
            rank = None if self.rank is None else PAIRS * self.rank
            return controlled_transition(states, pairs, controls.double(), self.kernel, widths, reg, rank, self.tol, total)
        if self.rank is None:
            return transition_operator(KERNELS[self.kernel](states, states, bandwidth=bandwidth), pairs, reg)
        features = NystromFeatures(self.kernel, bandwidth, states, self.rank, self.tol, total)
        return transition_operator_primal(features.all(states), pairs, reg, total)

    def update_of(self, obs: Tensor, bandwidth: Tensor, reg: Tensor, total: Total = alone) -> nn.Module:
        """The rule over the memory's observations ``n *x``."""
        obs = obs.flatten(1).double()
        if self.sensors is not None:
            return SensorUpdate(lambda part: self.rule_over(part, bandwidth, reg, total), obs, self.sensors, self.sensor_scale)
        return self.rule_over(obs, bandwidth, reg, total)

    def rule_over(self, obs: Float[Tensor, "n q"], bandwidth: Tensor, reg: Tensor, total: Total = alone) -> nn.Module:
        """The rule over observations as vectors."""
        if self.rank is None:
            return DenseUpdate(DENSE_RULES[self.rule], KERNELS[self.kernel], bandwidth, obs, reg).to(self.dtype)
        features = NystromFeatures(self.kernel, bandwidth, obs, self.rank, self.tol, total)
        return PrimalUpdate(features, obs[:, None], reg, rule=self.rule, dtype=self.dtype, local=self.local, total=total)

    def ratio_of(self, states: Float[Tensor, "n d"], bandwidth: Tensor, eta: Tensor, total: Total = alone) -> nn.Module:
        """The operator of the chosen ratio over the memory's states."""
        if self.ratio == "one":
            return One()
        if self.rank is not None:
            features = NystromFeatures(self.kernel, bandwidth, states, self.rank, self.tol, total).all(states)
            return (
                RelativeRatioPrimal(features, eta, self.alpha)
                if self.ratio == "relative"
                else ratio_operator_primal(features, eta, total)
            )
        gram = KERNELS[self.kernel](states, states, bandwidth=bandwidth)
        return RelativeRatio(gram, eta, self.alpha) if self.ratio == "relative" else ratio_operator(gram, eta)


class One(nn.Module):
    """The ratio r = 1, whatever the prediction: the filter becomes a chain of regressions ("COND")."""

    def forward(self, w: Tensor) -> Tensor:
        """Ones."""
        return torch.ones_like(w)


class EnlargedKBF(nn.Module):
    """Kernel Bayes Filter over a memory that is drawn from a model learned from the recording, as large as one likes.

    1. The maps z -> z' and z -> x are learned by kernel ridge regression with Gaussian residuals (`kbf.filters.learned`).
    2. A long run of that model is cut down to ``points`` states by k-means; each has a mass, the share of the run that it stands
       for, and ``draws`` observations.
    3. The transition is the learned density's ratio to the memory's, with exact means (`density_transition`), and the update is
       the importance-weighted rule in its primal form.

    Where the recordings have controls, the map is (z, u) -> z', the run is under recorded controls, and the transition is made anew
    in each step for its control (`kbf.nn.controlled.ControlledDensity`): many times the time of a step without.

    Nothing needs tuning: with so many points the rule's bandwidth and ridge hardly matter.
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
    ) -> None:
        """What to draw.

        Args:
            points: states in the memory.
            draws: observations of each.
            run: states simulated before they are cut down.
            rank: most features of the observations' Gaussian kernel.
            factor: its bandwidth over the median distance of the training observations.
            reg: lambda of the rule.
            seed: of the draws; the same recording gives the same filter.
            dtype: of the filter's steps.
        """
        super().__init__()
        sizes = {"points": points, "draws": draws, "run": run, "rank": rank}
        if dtype not in ("float32", "float64") or min(sizes.values()) < 1:
            raise ValueError(f"EnlargedKBF: sizes must be at least 1 and dtype float32 or float64; got {sizes} and {dtype!r}")
        self.points, self.draws, self.run, self.rank, self.factor, self.reg, self.seed = points, draws, run, rank, factor, reg, seed
        self.dtype: torch.dtype = getattr(torch, dtype)

    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Nothing to choose beforehand."""

    @torch.no_grad()
    def condition(self, memory: Sequence | list[Sequence] | None) -> KernelBayesFilter:
        """Learn the model, draw the memory, build the operators.

        Raises:
            ValueError: as `kbf.filters.learned.learn_model`.
        """
        sequences = [
            s._replace(states=s.states.double(), obs=s.obs.double(), controls=None if s.controls is None else s.controls.double())
            for s in as_sequences(memory or [])
        ]
        model = learn_model(sequences)
        recorded, recorded_obs = torch.cat([s.states for s in sequences]), observed_pairs(sequences)[1]
        generator = torch.Generator(recorded.device).manual_seed(self.seed)
        if model.controlled:
            before, acted, drawn = controlled_run(model, sequences, self.run, generator)
            states, mass = quantise(drawn, self.points, generator, model.transition.manifold)
            some = evenly(len(before), BEFORE, before.device)
            transition = ControlledDensity(model, states, mass, (before[some], acted[some]), self.dtype)
        else:
            start = recorded[torch.randint(len(recorded), (100,), device=recorded.device, generator=generator)]
            drawn = simulate(model, start, -(-self.run // len(start)), generator).states.flatten(0, 1)
            states, mass = quantise(drawn, self.points, generator, model.transition.manifold)
            mean, scale = model.transition.predict(states)
            log_density = model.transition.log_density_given(states[:, None], mean, scale)
            transition = density_transition(log_density, mass, states, model.transition.expected(mean, scale)).to(self.dtype)
        obs = self.observations(model, states)
        width = self.factor * median_distance(recorded_obs)
        update = PrimalUpdate(NystromFeatures("gaussian", width, obs[:, 0], self.rank, 1e-9), obs, self.reg, dtype=self.dtype)
        return KernelBayesFilter(states.to(self.dtype), transition, None, update, prior=mass.to(self.dtype), normalise=True)

    def observations(self, model: LearnedModel, states: Float[Tensor, "n d"]) -> Float[Tensor, "n k q"]:
        """``draws`` observations of each state, from a scrambled Sobol sequence: its blocks fill the noise evenly."""
        mean, scale = model.observation.predict(states)
        draws = self.draws * (FINER if model.controlled else 1)
        sobol = torch.quasirandom.SobolEngine(len(model.observation.noise), scramble=True, seed=self.seed)
        uniform = sobol.draw(len(states) * draws, dtype=mean.dtype).to(mean).clamp(1e-9, 1 - 1e-9)
        white = torch.special.ndtri(uniform).unflatten(0, (len(states), draws))
        each, scales = mean[:, None].expand(-1, draws, -1), scale[:, None].expand(-1, draws)
        return model.observation.displaced(each, scales, white)


def quantise(
    points: Float[Tensor, "n d"], m: int, generator: Generator | None = None, manifold: Manifold = FLAT, *, rounds: int = 5
) -> tuple[Float[Tensor, "k d"], Float[Tensor, " k"]]:
    """k-means: at most m centres ``k d`` that stand for the points, and the share of the points that each stands for, ``k``.

    The centres lie on the manifold of the points.
    """
    centres = points[torch.randperm(len(points), device=points.device, generator=generator)[:m]]
    shares, middle = centres.new_ones(len(centres)), points.mean(0)
    for _ in range(rounds):
        nearest = torch.cdist((points - middle).float(), (centres - middle).float()).argmin(1)
        counts = torch.zeros_like(shares).index_add(0, nearest, points.new_ones(len(points)))
        sums = torch.zeros_like(centres).index_add(0, nearest, points)
        taken = counts > 0
        centres, shares = manifold.project(sums[taken] / counts[taken, None]), counts[taken] / len(points)
    return centres, shares


def stacked(memory: list[Sequence]) -> tuple[Tensor, Tensor]:
    """States ``n d`` in float64 and observations ``n *x`` as they are, of all sequences, one behind the other.

    Raises:
        ValueError: a masked step: a kernel filter's memory needs the observation of each of its points.
    """
    if any(s.mask is not None and not bool(s.mask.all()) for s in memory):
        told = "a kernel filter needs every observation of its memory: cut the recordings at missing steps"
        raise ValueError(f"{told} (data=own: data.cut_missing=true)")
    return torch.cat([s.states for s in memory]).double(), torch.cat([s.obs for s in memory])
