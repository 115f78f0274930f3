"""The Kernel Bayes Filter over recordings, as a model: what is chosen from the training part, and how a memory becomes a filter."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.kernel.controlled_transition import (
    ControlledTransition,
    control_spread,
    controlled_transition,
)
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.operators import (
    Operator,
    RatioOfWeights,
    UnitRatio,
    ratio_operator,
    ratio_operator_primal,
    transition_operator,
    transition_operator_primal,
)
from kbf.filters.kernel.shared import SharedMemory
from kbf.filters.kernel.smoother import RuleBackward
from kbf.filters.kernel.update.per_sensor import SensorUpdate, present, read_sensors, sensor_scale
from kbf.filters.kernel.update.rule import DenseUpdate, PrimalUpdate
from kbf.recording import (
    Recording,
    Transitions,
    as_recordings,
    missing_where_masked,
    moves,
    transitions,
)
from kbf.rkhs.features import NystromFeatures
from kbf.rkhs.kernels import KERNELS, median_distance
from kbf.rkhs.ratios import RATIOS
from kbf.rkhs.rules import RULES
from kbf.runtime.distributed import Reduce, no_reduce
from kbf.runtime.errors import FitError
from kbf.runtime.html_repr import ShownModule

RANK_OF_PAIRS = 4
"""Features of pairs (state, control) over those of states: more of them vary."""

TRANSITION_REG = 3e-4
"""lambda' that is started from where none is given; eta and lambda are those of `RATIOS` and `RULES`."""


class KBF(ShownModule):
    """Kernel Bayes Filter over the training recordings, by any rule and any ratio, with full Gram matrices or features.

    Observations of any shape are compared by their flattened entries. Six hyper-parameters, all
    differentiable through the rollout: bandwidths of the states' kernel for the ratio and for the
    transition and of the observations' kernel; ridges eta (ratio), lambda' (transition) and lambda
    (rule; delta of the original). Where the recordings have controls, the transition is from (z,
    u), and each control has a bandwidth too.
    """

    log_bandwidth: nn.Parameter
    log_reg: nn.Parameter
    log_control: nn.Parameter | None
    sensor_scale: Tensor
    rule: str
    ratio: str
    kernel: str
    rank: int | None
    tol: float
    local: int | None
    normalise: bool
    select: str
    factors: tuple[float, float, float]
    alpha: float
    shares_memory = True

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
        regs: tuple[float, float, float] | None = None,
        alpha: float = 0.1,
        dtype: str = "float64",
        local: int | None = None,
        sensors: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """What to build; the numbers come from `prepare`.

        Args:
            rule: a name in `kbf.rkhs.rules.RULES`: importance_weighted, original or pseudo_inverse
                (the last with rank=None only).
            ratio: a name in `kbf.rkhs.ratios.RATIOS`: kulsif, tikhonov (negative values are kept),
                relative, or one (there is no prior at all, each observation counts by itself).
            kernel: a name in `kbf.rkhs.kernels.KERNELS`.
            rank: most features of each kernel; None works with full Gram matrices.
            tol: stop adding features once the trace residual of the Gram matrix falls to this
                share; if ``rank`` allows it, estimates are then those of full matrices to about 2
                sqrt(tol) (`kbf bench rank`).
            normalise: scale weights to sum 1.
            select: median (``factors`` times the median distances, ``regs``), loo (leave-one-out
                scores in closed form, on a subsample) or paper (the grid of Xu et al., on the last
                min(200, 0.3 n) training steps).
            learn: let training move the six numbers.
            factors: bandwidths over median distances: ratio, transition, observation.
            regs: eta, lambda', lambda; None for those that the ratio and the rule start from.
            alpha: of the relative ratio.
            dtype: float32 or float64, of the filter's steps; what is done once is done in float64.
            local: how many points take part in an update, those of the largest ratios; with rank
                and a rule that is a weighted regression (`kbf.rkhs.rules.Rule.regression`).
            sensors: the columns of the observation that belong to each sensor, as [[0, 1], [2]];
                then any sensor may be silent (NaN), in the recordings and later
                (`kbf.filters.kernel.update.per_sensor`). It needs kernel=gaussian, select=median
                and normalise.

        Raises:
            ValueError: an unknown name, or a combination that does not exist.
        """
        super().__init__()
        choices = {"rule": rule, "ratio": ratio, "kernel": kernel, "select": select, "dtype": dtype}
        check_choices(choices, rank, local, sensors, normalise)
        regs = (RATIOS[ratio].reg, TRANSITION_REG, RULES[rule].reg) if regs is None else regs
        if not 0 <= tol < 1 or not min(*factors, *regs) > 0:
            raise ValueError(
                f"KBF: tol must be in [0, 1), factors and regs positive; got {tol}, {factors} and {regs}"
            )
        self.rule, self.ratio, self.kernel, self.rank, self.tol, self.local = (
            rule,
            ratio,
            kernel,
            rank,
            tol,
            local,
        )
        self.normalise, self.select, self.factors, self.alpha = normalise, select, factors, alpha
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.log_bandwidth = nn.Parameter(torch.zeros(3, dtype=torch.float64), requires_grad=learn)
        self.log_reg = nn.Parameter(
            torch.tensor(regs, dtype=torch.float64).log(), requires_grad=learn
        )
        self.register_parameter("log_control", None)
        self.sensors: tuple[tuple[int, ...], ...] | None = (
            None if sensors is None else read_sensors(sensors)
        )
        if self.sensors is not None:
            self.register_buffer(
                "sensor_scale", torch.ones(sum(map(len, self.sensors)), dtype=torch.float64)
            )

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Set bandwidths (and with select=paper the ridges) from the training part."""
        sequences = self.recordings(memory)
        states, obs = stacked(sequences)
        if self.sensors is not None:
            self.sensor_scale.copy_(sensor_scale(obs.double(), self.sensors))
        if (controls := moves(sequences)[2]) is not None:
            self.log_control = nn.Parameter(
                control_spread(controls).log(), requires_grad=self.log_reg.requires_grad
            )
        if self.select != "median":
            from kbf.filters.kernel.hyperparameters import closed_form, paper_grid

            (paper_grid if self.select == "paper" else closed_form)(self, memory)
        else:
            medians = torch.stack(
                [median_distance(states, distinct=True)] * 2 + [self.obs_scale(obs).to(states)]
            )
            self.set(medians * medians.new_tensor(self.factors), self.log_reg.exp())

    def recordings(self, memory: Recording | list[Recording] | None) -> list[Recording]:
        """The memory as a list of checked recordings; with sensors, a masked step becomes one at which all of them are silent."""
        return (
            as_recordings(memory or [])
            if self.sensors is None
            else missing_where_masked(memory or [])
        )

    def obs_scale(self, obs: Tensor, *, diagonal: bool = False) -> Tensor:
        """The median distance of observations ``n *x``, in whose units their bandwidth is chosen."""
        if self.sensors is not None:
            whole = obs[present(obs, self.sensors).all(-1)].double() / self.sensor_scale
            return (
                median_distance(whole, distinct=True)
                if len(whole) > 1
                else torch.ones_like(self.sensor_scale[0])
            )
        return median_distance(obs.flatten(1).double(), diagonal=diagonal, distinct=True)

    def set(self, bandwidths: Tensor, regs: Tensor) -> None:
        """Put numbers in: bandwidths (ratio, transition, observation) and ridges (eta, lambda', lambda)."""
        with torch.no_grad():
            self.log_bandwidth.copy_(bandwidths.log())
            self.log_reg.copy_(regs.log())

    def hyperparameters(self) -> dict[str, float]:
        """The six numbers, and the bandwidths of controls, by name, for logs."""
        values = [
            *self.log_bandwidth.detach().exp().tolist(),
            *self.log_reg.detach().exp().tolist(),
        ]
        names = [
            "bandwidth/ratio",
            "bandwidth/transition",
            "bandwidth/observation",
            "reg/ratio",
            "reg/transition",
            "reg/rule",
        ]
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
            self.log_control = nn.Parameter(
                torch.zeros_like(stored), requires_grad=self.log_reg.requires_grad
            )
        rest = (local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def fit(
        self, memory: Recording | list[Recording] | None, reduce: Reduce = no_reduce
    ) -> KernelBayesFilter:
        """Build the operators over a memory, in time and space O(n) with features; differentiable in bandwidths and ridges.

        Args:
            memory: the recordings; where processes share a memory, those of this process.
            reduce: `kbf.runtime.distributed.all_sum` where they do: all processes call this, and
                run the filter, in step.

        Raises:
            ValueError: a memory without two successive steps, with missing observations, or with
                NaN or infinite values; or a shared one with full Gram matrices, ``local`` or
                sensors, or a rule or ratio that needs all points at once.
        """
        points = SharedMemory(reduce)
        self.check_shared(points)
        sequences = self.recordings(memory)
        states, obs = stacked(sequences)
        pairs, controls = (
            transitions([len(s.states) for s in sequences], states.device),
            moves(sequences)[2],
        )
        if len(pairs.source) == 0:
            raise FitError(
                f"a kernel filter learns from pairs of successive steps, its {len(sequences)} sequences have none"
            )
        ratio_width, transition_width, obs_width = self.log_bandwidth.exp()
        eta, reg_transition, reg = self.log_reg.exp()
        transition = points.sums(
            self.transition_of(states, pairs, controls, transition_width, reg_transition, points)
        )
        filter = KernelBayesFilter(
            states.to(self.dtype),
            transition,
            points.sums(self.ratio_of(states, ratio_width, eta, points)),
            self.update_of(obs, obs_width, reg, points),
            normalise=self.normalise,
            clip=not RATIOS[self.ratio].signed,
            backward=RuleBackward(
                *pairs, KERNELS[self.kernel], transition_width, controls, self.log_control
            ),
        )
        for operator in (filter.transition, filter.ratio, filter.moved_ratio):
            if operator is not None:
                operator.to(self.dtype)
        if filter.moved_ratio is not None:
            filter.moved_ratio.right = transition.right  # one array
        return points.filter(filter)

    def check_shared(self, memory: SharedMemory) -> None:
        """Raise a ValueError if processes share the memory and the filter is one whose steps need all points at once."""
        whole = self.rank is None or self.local or self.sensors
        if memory.shared and (
            whole or not RULES[self.rule].regression or not RATIOS[self.ratio].shareable
        ):
            given = f"rank={self.rank}, local={self.local}, rule={self.rule}, ratio={self.ratio}"
            raise ValueError(
                f"KBF: a memory that processes share needs features and the importance-weighted rule; got {given}"
            )

    def transition_of(
        self,
        states: Float[Tensor, "n d"],
        pairs: Transitions,
        controls: Float[Tensor, "m k"] | None,
        bandwidth: Tensor,
        reg: Tensor,
        memory: SharedMemory,
    ) -> Operator | ControlledTransition:
        """P over the recorded moves; P(u) where they have controls.

        Raises:
            ValueError: controls, and `prepare` has not chosen their bandwidths.
        """
        if controls is not None:
            if self.log_control is None or self.log_control.shape != controls.shape[1:]:
                raise ValueError(
                    f"KBF: prepare() chooses the bandwidths of {controls.shape[1]} controls: call it before"
                )
            widths = (bandwidth, self.log_control.exp())
            rank = None if self.rank is None else RANK_OF_PAIRS * self.rank
            return controlled_transition(
                states, pairs, controls.double(), self.kernel, widths, reg, rank, self.tol, memory
            )
        if self.rank is None:
            return transition_operator(
                KERNELS[self.kernel](states, states, bandwidth=bandwidth), pairs, reg
            )
        features = self.features(states, bandwidth, memory).all(states)
        return transition_operator_primal(
            features, pairs, reg, memory.covariance(features[pairs.source])
        )

    def ratio_of(
        self, states: Float[Tensor, "n d"], bandwidth: Tensor, eta: Tensor, memory: SharedMemory
    ) -> nn.Module:
        """The module that turns weights of a prediction into the chosen density ratio at the memory's states."""
        form = RATIOS[self.ratio]
        if form.constant:
            return UnitRatio()
        if self.rank is None:
            gram = KERNELS[self.kernel](states, states, bandwidth=bandwidth)
            return (
                ratio_operator(gram, eta)
                if form.dense is None
                else RatioOfWeights(form.dense, gram, eta, self.alpha)
            )
        features = self.features(states, bandwidth, memory).all(states)
        if form.primal is None:
            return ratio_operator_primal(features, eta, memory.covariance(features))
        return RatioOfWeights(form.primal, features, eta, self.alpha)

    def update_of(
        self, obs: Tensor, bandwidth: Tensor, reg: Tensor, memory: SharedMemory
    ) -> nn.Module:
        """The chosen rule over the memory's observations ``n *x``, with sensors one for each set of them."""
        obs = obs.flatten(1).double()
        if self.sensors is not None:
            return SensorUpdate(
                lambda part: self.rule_over(part, bandwidth, reg, memory),
                obs,
                self.sensors,
                self.sensor_scale,
            )
        return self.rule_over(obs, bandwidth, reg, memory)

    def rule_over(
        self, obs: Float[Tensor, "n q"], bandwidth: Tensor, reg: Tensor, memory: SharedMemory
    ) -> nn.Module:
        """The chosen rule over observations that are vectors, with full Gram matrices or with features."""
        if self.rank is None:
            return DenseUpdate(
                RULES[self.rule].dense, KERNELS[self.kernel], bandwidth, obs, reg
            ).to(self.dtype)
        psi, n = self.features(obs, bandwidth, memory), memory.count(obs)
        return PrimalUpdate(
            psi, obs[:, None], reg, rule=self.rule, dtype=self.dtype, local=self.local, n=n
        )

    def features(
        self, points: Float[Tensor, "n q"], bandwidth: Tensor, memory: SharedMemory
    ) -> NystromFeatures:
        """Features of the kernel at landmarks among the points of the memory."""
        return NystromFeatures(
            self.kernel, bandwidth, memory.candidates(points), self.rank or len(points), self.tol
        )


CHOICES: dict[str, Collection[str]] = {
    "rule": RULES,
    "ratio": RATIOS,
    "kernel": KERNELS,
    "select": ("median", "loo", "paper"),
    "dtype": ("float32", "float64"),
}
"""What the words of `KBF` may be."""


def check_choices(
    choices: dict[str, str],
    rank: int | None,
    local: int | None,
    sensors: Sequence[Sequence[int]] | None,
    normalise: bool,
) -> None:
    """Raise a ValueError for a word that is none of `CHOICES`, or for choices that do not go together.

    What goes together follows from the tables `kbf.rkhs.rules.RULES` and `kbf.rkhs.ratios.RATIOS`.
    Arguments as of `KBF`.
    """
    for name, value in choices.items():
        if value not in CHOICES[name]:
            raise ValueError(
                f"KBF: {name} must be one of {', '.join(CHOICES[name])}; got {value!r}"
            )
    for name, number in {"rank": rank, "local": local}.items():
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(
                f"KBF: {name} must be a whole number of at least 1, or null; got {number}"
            )
    rule, ratio, kernel, select = (choices[name] for name in ("rule", "ratio", "kernel", "select"))
    form, regressions = (
        RULES[rule],
        ", ".join(name for name, other in RULES.items() if other.regression),
    )
    if RATIOS[ratio].signed and not form.signed:
        raise ValueError(
            f"KBF: rule={rule} needs a ratio that is not negative, ratio={ratio} is; use kulsif"
        )
    if rank is not None and form.primal is None:
        raise ValueError(f"KBF: rule={rule} needs full Gram matrices, set rank to null")
    if RATIOS[ratio].lacks("dense" if rank is None else "primal"):
        remedy = "give a rank" if rank is None else "set rank to null"
        raise ValueError(f"KBF: ratio={ratio} has no form for rank={rank}; {remedy}")
    if select == "loo" and not form.regression:
        raise ValueError(f"KBF: select=loo gives the ridge of rule={regressions}, not of {rule}")
    if local is not None and (rank is None or not form.regression):
        raise ValueError(
            f"KBF: local needs features and rule={regressions}; got rank={rank} and rule={rule}"
        )
    if sensors is not None and (kernel != "gaussian" or select != "median" or not normalise):
        given = f"kernel={kernel}, select={select}, normalise={normalise}"
        raise ValueError(
            f"KBF: sensors need kernel=gaussian, select=median and normalise=true; got {given}"
        )


def stacked(memory: list[Recording]) -> tuple[Tensor, Tensor]:
    """States ``n d`` in float64 and observations ``n *x`` as they are, of all sequences, one behind the other.

    Raises:
        ValueError: a masked step: a kernel filter's memory needs the observation of each of its
            points.
    """
    if any(s.mask is not None and not bool(s.mask.all()) for s in memory):
        remedy = "cut the recordings at missing steps (data=own: data.cut_missing=true)"
        raise FitError(f"a kernel filter needs every observation of its memory: {remedy}")
    return torch.cat([s.states for s in memory]).double(), torch.cat([s.obs for s in memory])
