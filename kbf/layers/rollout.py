"""The Kernel Bayes Filter as a layer of a network: encoder, rule and transition in one pass."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from kbf.filters.kernel.controlled_transition import control_spread
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.kbf import stacked
from kbf.filters.kernel.smoother import RuleBackward
from kbf.filters.rollout import Rollout, checked_inputs, rollout
from kbf.filters.scaling import warn_of_isolation, warn_of_scales
from kbf.images.encodings import EncodedFilter
from kbf.layers.kernel_layer import KernelLayer
from kbf.layers.ratio import DensityRatio
from kbf.layers.rule import IWKBR
from kbf.layers.transition import KernelTransition
from kbf.recording import (
    Array,
    Recording,
    as_float,
    as_recordings,
    check_finite,
    moves,
    transitions,
)
from kbf.rkhs.kernels import median_distance
from kbf.rkhs.ratios import RATIOS

# Bandwidths over median distances, the defaults of `kbf.filters.kernel.kbf.KBF`.
BANDWIDTH_OF_STATES = 0.35
BANDWIDTH_OF_FEATURES = 0.7

DIVERGED = "Its training may have diverged: use a smaller learning rate, or clip the gradient."
"""What to do about features that are not finite."""

Memory = Recording | list[Recording]


class EncodedMemory(NamedTuple):
    """The features and Gram matrices of a memory, of `KernelBayesFilterRollout.encode`.

    Attributes:
        filter: a filter of features over the memory.
        shape: of one observation.
    """

    filter: KernelBayesFilter
    shape: tuple[int, ...]


class KernelBayesFilterRollout(nn.Module):
    """The Kernel Bayes Filter with an encoder: (observations, memory) -> estimates, differentiable.

    In each step, with the weights w over the n states z of the memory, the features psi of the
    observations, and an observation x_t,

        w <- P w,    r = max(0, A w),    w <- rule(Psi, r, psi(x_t)),    estimate sum_i w_i z_i:

    P is that of a `KernelTransition`, A that of a `DensityRatio`, and the rule an `IWKBR`.
    Gradients flow through all steps to the encoder, to the learned bandwidths and ridges, and to
    the observations and the states of the memory. Nothing is stored between calls: each computes
    features and Gram matrices of the memory with the present parameters. The encoder computes in
    the type of its parameters, everything else in the type of the memory's states.

    Observations that the filter rejects, and steps that are masked, keep the prediction, as in
    `kbf.rollout`.

    References: Xu et al. (2022), Algorithm 2; `kbf.filters.kernel.algorithm` has it in one
    function.

    >>> from kbf.ssm import rotation, simulate
    >>> run = simulate(rotation(), torch.tensor([1.0, 0.0]).double(), 60)
    >>> memory = Recording(run.states[:50], run.obs[:50])
    >>> net = nn.Linear(2, 8).double()
    >>> layer = KernelBayesFilterRollout(net, rule=IWKBR(learn_reg=True))
    >>> estimates = layer(run.obs[None, 50:], memory).estimates
    >>> (estimates - run.states[50:]).square().mean().backward()
    >>> estimates.shape, net.weight.grad.shape
    (torch.Size([1, 10, 2]), torch.Size([8, 2]))
    """

    def __init__(
        self,
        encoder: nn.Module,
        *,
        transition: KernelTransition | None = None,
        ratio: DensityRatio | None = None,
        rule: IWKBR | None = None,
        normalise: bool = False,
    ) -> None:
        """Combine the layers of a filter.

        Args:
            encoder: ``m *x`` -> ``m p``; ``nn.Identity()`` for observations that are vectors.
            transition: P; None for ``KernelTransition()``.
            ratio: A; None for ``DensityRatio()``.
            rule: over the features; None for ``IWKBR()``, inner products.
            normalise: scale weights to sum 1 and ratios to mean 1, as `kbf.filters.kernel.kbf.KBF`
                does; False is the published algorithm.

        Raises:
            ValueError: a ratio that may be negative, which the rule does not take.
        """
        super().__init__()
        self.encoder: nn.Module = encoder
        self.transition: KernelTransition = KernelTransition() if transition is None else transition
        self.ratio: DensityRatio = DensityRatio() if ratio is None else ratio
        self.rule: IWKBR = IWKBR() if rule is None else rule
        self.normalise: bool = normalise
        if RATIOS[self.ratio.method].signed:
            raise ValueError(
                "KernelBayesFilterRollout: the rule needs a ratio that is not negative; "
                f"method={self.ratio.method} may be, use kulsif"
            )

    def forward(
        self,
        obs: Shaped[Array, "b T *x"],
        memory: Memory | EncodedMemory,
        *,
        mask: Shaped[Array, "b T"] | None = None,
        controls: Float[Array, "b T k"] | None = None,
        state: Any = None,
    ) -> Rollout:
        """Return the `kbf.filters.rollout.Rollout` of a batch of recordings, estimates ``b T d``.

        Args:
            obs: ``b T *x``. Where the mask is False they may hold anything, NaN too.
            memory: recordings of states and observations, or what `encode` returns.
            mask: ``b T``, True where there is an observation; None for all.
            controls: ``b T k``, that of the move to each step, if the memory has controls.
            state: that of an earlier ``Rollout``, to continue from; None for 1/n at each state.

        Raises:
            ValueError: shapes that do not match, NaN or infinite values, or as `encode`.
            NotPositiveDefiniteError: a ridge too small for the precision of the features.
        """
        encoded = memory if isinstance(memory, EncodedMemory) else self.encode(memory)
        filter = encoded.filter
        inputs = checked_inputs(filter, obs, mask, controls)
        b, T, *x = inputs.obs.shape
        if tuple(x) != encoded.shape:
            raise ValueError(
                "observations must be (batch, time, ...) with those of one step as in the memory, "
                f"{encoded.shape}; got {tuple(inputs.obs.shape)}"
            )
        seen = inputs.obs.flatten(0, 1).to(self.rule.log_reg.device)
        features = features_of(self.encoder, seen).to(filter.states)
        check_finite(features, "features of the encoder", advice=DIVERGED)
        features = features.unflatten(0, (b, T))
        return rollout(
            filter,
            features,
            mask=inputs.mask,
            controls=inputs.controls,
            state=state,
            gradients=True,
        )

    def encode(self, memory: Memory, *, check: bool = True) -> EncodedMemory:
        """Return features and Gram matrices of a memory, for several rollouts.

        They have the gradients of the present parameters: add the losses of all rollouts before
        ``backward()``, and encode again after each step of the optimiser.

        Args:
            memory: recordings of states and observations.
            check: raise an error for a rule that fails in a step, as `IWKBR.over` has it.

        Raises:
            ValueError: no two successive steps, missing observations, NaN or infinite values.
        """
        recordings = as_recordings(memory)
        device = self.rule.log_reg.device
        states, obs = stacked(recordings)
        states = states.to(device, recordings[0].states.dtype)
        controls = moves(recordings)[2]
        controls = None if controls is None else controls.to(states)
        pairs = transitions([len(s.states) for s in recordings], device)
        features = features_of(self.encoder, obs.to(device)).to(states)
        check_finite(features, "features of the encoder", advice=DIVERGED)
        move = self.transition
        warn_of_isolation(states, move.form, move.bandwidth.to(states), "states")
        filter = KernelBayesFilter(
            states,
            move.operator(states, pairs, controls),
            self.ratio.operator(states),
            self.rule.over(features, check=check),
            normalise=self.normalise,
            backward=RuleBackward(
                *pairs,
                move.form,
                move.bandwidth.to(states),
                controls,
                None if controls is None else move.control_bandwidth(controls, len(controls)).log(),
            ),
        )
        return EncodedMemory(filter, tuple(obs.shape[1:]))

    @torch.no_grad()
    def prepare(self, memory: Memory) -> None:
        """Set the bandwidths from a memory: shares of the median distances between its points.

        `BANDWIDTH_OF_STATES` is that of transition and ratio, `BANDWIDTH_OF_FEATURES` that of a
        rule with a kernel; the bandwidths of controls become their standard deviations. Without it
        bandwidths are those given to the layers, in the units of the states.

        Args:
            memory: the training part.

        Raises:
            ValueError: as `encode`; most points coincide.
        """
        recordings = as_recordings(memory)
        states, obs = stacked(recordings)
        warn_of_scales(states, "states", offset=not self.normalise)
        distance = BANDWIDTH_OF_STATES * median_distance(states, distinct=True)
        set_bandwidth(self.transition, distance)
        set_bandwidth(self.ratio, distance)
        if self.rule.log_bandwidth is not None:
            features = features_of(self.encoder, obs.to(self.rule.log_reg.device)).double()
            distance = BANDWIDTH_OF_FEATURES * median_distance(features, distinct=True)
            set_bandwidth(self.rule, distance)
        log, controls = self.transition.log_control_bandwidth, moves(recordings)[2]
        if log is not None and controls is not None:
            spread = control_spread(controls).log().to(log)
            log.copy_(spread if log.ndim else spread.mean())

    def fit(self, memory: Memory) -> EncodedFilter:
        """Return a filter over a memory with the present parameters, for deployment.

        It takes observations ``b *x`` wherever the library takes a filter (`kbf.rollout`,
        `kbf.smooth`, `kbf.RunningFilter`, ...). Encoder and numbers are copies in eval mode without
        gradients, so that training can go on.

        Args:
            memory: recordings of states and observations.

        Raises:
            ValueError: as `encode`.
        """
        frozen = copy.deepcopy(self).eval().requires_grad_(False)
        with torch.no_grad():
            inner = frozen.encode(memory, check=False).filter
        return EncodedFilter(Features(frozen.encoder), inner, inner.states.dtype)


class Features(nn.Module):
    """An encoder that converts what it is given to its own type."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder: nn.Module = encoder

    def forward(self, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """Return the features ``m p``."""
        return features_of(self.encoder, x)


def features_of(encoder: nn.Module, x: Shaped[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
    """Return the features ``m p`` of observations, converted to the type of the encoder.

    Raises:
        ValueError: an encoder that returns no row of features for each observation.
    """
    first: Tensor | None = next(encoder.parameters(), None)
    own = x.dtype if x.is_floating_point() else torch.get_default_dtype()
    features: Callable[..., Any] | Tensor = encoder(
        as_float(x, own if first is None else first.dtype)
    )
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != len(x):
        found = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(
            f"the encoder must return one row of features for each observation, ({len(x)}, p); "
            f"for observations {tuple(x.shape)} it returned {found}"
        )
    return features


def set_bandwidth(layer: KernelLayer, value: Tensor) -> None:
    """Set each bandwidth of a layer, if it has any."""
    if layer.log_bandwidth is not None:
        layer.log_bandwidth.copy_(value.log().expand_as(layer.log_bandwidth))
