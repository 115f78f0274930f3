"""Kernel Bayes Filter over recordings: selects hyper-parameters, builds the filter."""

from collections.abc import Callable, Collection
from functools import partial
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
from kbf.filters.kernel.hyperparameters import (
    choose_ratio_reg,
    closed_form,
    kernel_mean_grid,
    paper_grid,
)
from kbf.filters.kernel.operators import (
    Operator,
    RatioOfWeights,
    UnitRatio,
    ratio_operator,
    ratio_operator_primal,
    transition_operator,
    transition_operator_primal,
)
from kbf.filters.kernel.smoother import RuleBackward
from kbf.filters.kernel.update.rule import DenseUpdate, PrimalUpdate
from kbf.filters.scaling import warn_of_isolation, warn_of_scales
from kbf.recording import Recording, Transitions, as_recordings, moves, transitions
from kbf.rkhs.features import NystromFeatures, RandomFourierFeatures
from kbf.rkhs.kernels import KERNELS, median_distance
from kbf.rkhs.ratios import RATIOS
from kbf.rkhs.rules import RULES
from kbf.runtime.errors import FitError
from kbf.runtime.html_repr import ShownModule

# Landmarks of pairs (state, control) over those of states: pairs vary more.
RANK_OF_PAIRS = 4

# Default of lambda'. The defaults of eta and lambda are in `RATIOS` and `RULES`.
TRANSITION_REG = 3e-4


class KBF(ShownModule):
    """The Kernel Bayes Filter over the training recordings, for every rule and density ratio.

    `prepare` selects the hyper-parameters from the training part, and `fit` builds a
    `KernelBayesFilter` over a memory:

        predict: w <- P w,    update: r = max(0, A w),  w <- rule(r, x)

    Six hyper-parameters are differentiable through the rollout of the filter: the bandwidths of the
    kernel of the states for the ratio and for the transition, that of the kernel of the
    observations, and the ridges eta (ratio), lambda' (transition) and lambda (rule; delta of the
    original rule). If the recordings have controls u, the transition is from (z, u), and each
    control has a bandwidth of its own. Observations of any shape are compared by their flattened
    entries.

    References: Xu et al. (2022), Algorithm 2; `kbf.filters.kernel.algorithm` has it in one
    function.

    >>> from kbf.filters.rollout import rollout
    >>> from kbf.ssm import rotation, simulate
    >>> seed = Generator().manual_seed(0)
    >>> run = simulate(rotation(), torch.tensor([1.0, 0.0]).double(), 400, seed)
    >>> model = KBF()
    >>> memory = [Recording(run.states[:300], run.obs[:300])]
    >>> model.prepare(memory)
    >>> estimates = rollout(model.fit(memory), run.obs[None, 300:]).estimates[0]
    >>> print(f"{(estimates - run.states[300:]).square().sum(-1).mean():.3f}")
    0.048
    """

    log_control: nn.Parameter | None

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
        feature_map: str = "nystrom",
        point_estimate: str = "mean",
    ) -> None:
        """Choose the form of the filter; `prepare` sets the numbers.

        Args:
            rule: a name in `kbf.rkhs.rules.RULES`: importance_weighted, original or pseudo_inverse
                (the last requires rank=None).
            ratio: a name in `kbf.rkhs.ratios.RATIOS`: kulsif, tikhonov (negative values are kept),
                relative, or one (the prior is ignored, each observation is regressed on by itself).
            kernel: a name in `kbf.rkhs.kernels.KERNELS`.
            rank: largest number of features of each kernel; None for full Gram matrices.
            tol: no more features are added once the trace of the residual of the Gram matrix is at
                most this share of its trace. If ``rank`` does not end it before, estimates differ
                from those of full matrices by about 2 sqrt(tol) (`kbf bench rank`).
            normalise: scale weights to sum 1.
            select: median (``factors`` times the median distances, and ``regs``), loo
                (leave-one-out scores in closed form, on a subsample), paper (the grid of Xu et
                al., on the last min(200, 0.3 n) training steps), kulsif_loo (the same, with eta by
                the leave-one-out score of KuLSIF, as their paper has it) or kernel_mean_cv (the
                grid by the score of Fukumizu et al., which requires no states to be estimated).
            learn: whether training changes the six numbers.
            factors: bandwidths over median distances: ratio, transition, observation.
            regs: eta, lambda', lambda; None for the defaults of the ratio and the rule.
            alpha: of the relative ratio.
            dtype: float32 or float64, of the steps of the filter; operators are computed in
                float64.
            local: number of memory points in an update, those of the largest ratios; requires a
                rank, and a rule that is a weighted regression (`kbf.rkhs.rules.Rule.regression`).
            feature_map: nystrom (landmarks by pivoted Cholesky) or random_fourier (``rank`` random
                Fourier features of the Gaussian kernels, in rule, ratio and transition).
            point_estimate: mean of the embedding, or preimage (`kbf.rkhs.embeddings.Embedding.mode`
                with the kernel of the ratio; Gaussian kernel, ``learn`` False).

        Raises:
            ValueError: an unknown name, or a combination that does not exist.
        """
        super().__init__()
        choices = {"rule": rule, "ratio": ratio, "kernel": kernel, "select": select, "dtype": dtype}
        choices |= {"feature_map": feature_map, "point_estimate": point_estimate}
        check_choices(choices, rank, local)
        if point_estimate == "preimage" and learn:
            raise ValueError(
                "KBF: the pre-image has no gradient; point_estimate=preimage needs learn=False"
            )
        regs = (RATIOS[ratio].reg, TRANSITION_REG, RULES[rule].reg) if regs is None else regs
        if not 0 <= tol < 1 or not min(*factors, *regs) > 0:
            raise ValueError(
                "KBF: tol must be in [0, 1), factors and regs positive; "
                f"got {tol}, {factors} and {regs}"
            )
        self.rule: str = rule
        self.ratio: str = ratio
        self.kernel: str = kernel
        self.select: str = select
        self.rank: int | None = rank
        self.tol: float = tol
        self.local: int | None = local
        self.feature_map: str = feature_map
        self.point_estimate: str = point_estimate
        self.normalise: bool = normalise
        self.factors: tuple[float, float, float] = factors
        self.alpha: float = alpha
        self.dtype: torch.dtype = getattr(torch, dtype)
        log_reg = torch.tensor(regs, dtype=torch.float64).log()
        widths = torch.zeros_like(log_reg)
        self.log_bandwidth: nn.Parameter = nn.Parameter(widths, requires_grad=learn)
        self.log_reg: nn.Parameter = nn.Parameter(log_reg, requires_grad=learn)
        self.register_parameter("log_control", None)

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select bandwidths, and ridges unless ``select`` is median, from the training part."""
        recordings = as_recordings(memory)
        states, obs = stacked(recordings)
        warn_of_scales(states, "states", offset=not self.normalise)
        if obs.ndim == 2:
            warn_of_scales(obs, "observations")
        if (controls := moves(recordings)[2]) is not None:
            self.set_control_bandwidths(control_spread(controls).log())
        if self.select == "median":
            medians = torch.stack(
                [median_distance(states, distinct=True)] * 2 + [self.obs_scale(obs).to(states)]
            )
            self.set(medians * medians.new_tensor(self.factors), self.log_reg.exp())
        else:
            SELECTIONS[self.select](self, memory)

    def obs_scale(self, obs: Tensor, *, diagonal: bool = False) -> Tensor:
        """Return the median distance of observations ``n *x``, the unit of their bandwidth."""
        return median_distance(obs.flatten(1).double(), diagonal=diagonal, distinct=True)

    def set(self, bandwidths: Tensor, regs: Tensor) -> None:
        """Set bandwidths (ratio, transition, observation) and ridges (eta, lambda', lambda)."""
        with torch.no_grad():
            self.log_bandwidth.copy_(bandwidths.log())
            self.log_reg.copy_(regs.log())

    def set_control_bandwidths(self, log_control: Float[Tensor, " k"]) -> None:
        """Make the bandwidths of the controls a parameter with these logarithms."""
        self.log_control = nn.Parameter(log_control, requires_grad=self.log_reg.requires_grad)

    def hyperparameters(self) -> dict[str, float]:
        """Return bandwidths and ridges by name, for logs."""
        parts = ("ratio", "transition", "observation"), ("ratio", "transition", "rule")
        names = [f"bandwidth/{part}" for part in parts[0]] + [f"reg/{part}" for part in parts[1]]
        numbers = torch.cat([self.log_bandwidth, self.log_reg]).detach().exp().tolist()
        widths = [] if self.log_control is None else self.log_control.detach().exp().tolist()
        controls = {f"bandwidth/control_{k}": width for k, width in enumerate(widths)}
        return dict(zip(names, numbers, strict=True)) | controls

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Overrides `nn.Module`: creates the bandwidths of controls if ``state_dict`` has them."""
        if (stored := state_dict.get(f"{prefix}log_control")) is not None:
            self.set_control_bandwidths(torch.zeros_like(stored))
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)

    def fit(self, memory: Recording | list[Recording] | None) -> KernelBayesFilter:
        """Build the filter over a memory; differentiable in bandwidths and ridges.

        With features it takes O(n) time and space, with full Gram matrices O(n^3).

        Args:
            memory: recordings of states and observations.

        Raises:
            ValueError: a memory without two successive steps, with missing observations, or with
                NaN or infinite values.
        """
        recordings = as_recordings(memory or [])
        states, obs = stacked(recordings)
        pairs = transitions([len(s.states) for s in recordings], states.device)
        controls = moves(recordings)[2]
        if len(pairs.source) == 0:
            raise FitError(
                "a kernel filter learns from pairs of successive steps; "
                f"its {len(recordings)} recordings have none"
            )
        ratio_width, transition_width, obs_width = self.log_bandwidth.exp()
        eta, reg_transition, reg = self.log_reg.exp()
        kernel = KERNELS[self.kernel]
        warn_of_isolation(states, kernel, transition_width, "states")
        transition = self.transition_of(states, pairs, controls, transition_width, reg_transition)
        filter = KernelBayesFilter(
            states.to(self.dtype),
            transition,
            self.ratio_of(states, ratio_width, eta),
            self.update_of(obs, obs_width, reg),
            normalise=self.normalise,
            clip=not RATIOS[self.ratio].signed,
            backward=RuleBackward(*pairs, kernel, transition_width, controls, self.log_control),
            preimage=None
            if self.point_estimate == "mean"
            else partial(kernel, bandwidth=ratio_width.item()),
        )
        for operator in (filter.transition, filter.ratio, filter.moved_ratio):
            if operator is not None:
                operator.to(self.dtype)
        if filter.moved_ratio is not None:
            filter.moved_ratio.right = transition.right  # one array in place of two equal ones
        return filter

    def transition_of(
        self,
        states: Float[Tensor, "n d"],
        pairs: Transitions,
        controls: Float[Tensor, "m k"] | None,
        bandwidth: Tensor,
        reg: Tensor,
    ) -> Operator | ControlledTransition:
        """Return P over the recorded transitions, or P(u) if they have controls.

        Raises:
            ValueError: controls whose bandwidths `prepare` has not set.
        """
        if controls is not None:
            if self.log_control is None or self.log_control.shape != controls.shape[1:]:
                raise ValueError(
                    "KBF: call prepare() first, "
                    f"it sets the bandwidths of {controls.shape[1]} controls"
                )
            if self.feature_map != "nystrom":
                raise ValueError(
                    f"KBF: controls have no feature_map={self.feature_map}; use nystrom"
                )
            widths = (bandwidth, self.log_control.exp())
            rank = None if self.rank is None else RANK_OF_PAIRS * self.rank
            return controlled_transition(
                states, pairs, controls.double(), self.kernel, widths, reg, rank, self.tol
            )
        if self.rank is None:
            gram = KERNELS[self.kernel](states, states, bandwidth=bandwidth)
            return transition_operator(gram, pairs, reg)
        return transition_operator_primal(self.features(states, bandwidth).all(states), pairs, reg)

    def ratio_of(self, states: Float[Tensor, "n d"], bandwidth: Tensor, eta: Tensor) -> nn.Module:
        """Return the module from predicted weights to the density ratio at the memory points."""
        form = RATIOS[self.ratio]
        if form.constant:
            return UnitRatio()
        if self.rank is None:
            points = KERNELS[self.kernel](states, states, bandwidth=bandwidth)
            linear, other = ratio_operator, form.dense
        else:
            points = self.features(states, bandwidth).all(states)
            linear, other = ratio_operator_primal, form.primal
        if other is None:
            return linear(points, eta)
        return RatioOfWeights(other, points, eta, self.alpha)

    def update_of(self, obs: Tensor, bandwidth: Tensor, reg: Tensor) -> nn.Module:
        """Return the rule over observations ``n *x``, with full Gram matrices or features."""
        warn_of_isolation(obs.flatten(1), KERNELS[self.kernel], bandwidth, "observations")
        obs = obs.flatten(1).double()
        if self.rank is None:
            return DenseUpdate(
                RULES[self.rule].dense, KERNELS[self.kernel], bandwidth, obs, reg
            ).to(self.dtype)
        psi, settings = self.features(obs, bandwidth), {"dtype": self.dtype, "local": self.local}
        return PrimalUpdate(psi, obs[:, None], reg, rule=self.rule, **settings)

    def features(
        self, points: Float[Tensor, "n q"], bandwidth: Tensor
    ) -> NystromFeatures | RandomFourierFeatures:
        """Return features of the kernel, by landmarks among the points or random frequencies."""
        if self.feature_map == "random_fourier":
            return RandomFourierFeatures(bandwidth, points.shape[1], self.rank or len(points))
        return NystromFeatures(self.kernel, bandwidth, points, self.rank or len(points), self.tol)


# The ways of `KBF.prepare` other than median.
SELECTIONS: dict[str, Callable[[KBF, list[Recording]], None]] = {
    "loo": closed_form,
    "paper": paper_grid,
    "kulsif_loo": partial(paper_grid, ratio_reg=choose_ratio_reg),
    "kernel_mean_cv": kernel_mean_grid,
}

# The values of the arguments of `KBF` that are names.
CHOICES: dict[str, Collection[str]] = {
    "rule": RULES,
    "ratio": RATIOS,
    "kernel": KERNELS,
    "select": ("median", *SELECTIONS),
    "dtype": ("float32", "float64"),
    "feature_map": ("nystrom", "random_fourier"),
    "point_estimate": ("mean", "preimage"),
}


def check_choices(choices: dict[str, str], rank: int | None, local: int | None) -> None:
    """Raise a ValueError for a name that is not in `CHOICES`, or for an impossible combination.

    Combinations follow from the tables `kbf.rkhs.rules.RULES` and `kbf.rkhs.ratios.RATIOS`.
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
    rule, ratio = choices["rule"], choices["ratio"]
    form, regressions = RULES[rule], ", ".join(name for name, r in RULES.items() if r.regression)
    if RATIOS[ratio].signed and not form.signed:
        raise ValueError(
            f"KBF: rule={rule} needs a ratio that is not negative; ratio={ratio} may be, use kulsif"
        )
    if rank is not None and form.primal is None:
        raise ValueError(f"KBF: rule={rule} needs full Gram matrices; set rank to null")
    if RATIOS[ratio].lacks("dense" if rank is None else "primal"):
        remedy = "give a rank" if rank is None else "set rank to null"
        raise ValueError(f"KBF: ratio={ratio} has no form for rank={rank}; {remedy}")
    for name, value in {"feature_map": "random_fourier", "point_estimate": "preimage"}.items():
        if choices.get(name) == value and choices["kernel"] != "gaussian":
            raise ValueError(f"KBF: {name}={value} needs kernel=gaussian")
    if choices.get("feature_map") == "random_fourier" and rank is None:
        raise ValueError("KBF: feature_map=random_fourier needs a rank, the number of features")
    if choices["select"] == "loo" and not form.regression:
        raise ValueError(
            f"KBF: select=loo gives the ridge of rule={regressions}, not that of {rule}"
        )
    if local is not None and (rank is None or not form.regression):
        raise ValueError(
            f"KBF: local needs features and rule={regressions}; got rank={rank}, rule={rule}"
        )


def stacked(memory: list[Recording]) -> tuple[Tensor, Tensor]:
    """Return states ``n d`` in float64 and observations ``n *x`` of all recordings, concatenated.

    Raises:
        ValueError: a masked step. The memory of a kernel filter requires all observations.
    """
    if any(s.mask is not None and not bool(s.mask.all()) for s in memory):
        raise FitError(
            "a kernel filter needs every observation of its memory: cut the recordings at missing "
            "steps (data=own: data.cut_missing=true)"
        )
    return torch.cat([s.states for s in memory]).double(), torch.cat([s.obs for s in memory])
