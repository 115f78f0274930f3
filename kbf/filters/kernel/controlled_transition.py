"""Transitions with a control, z' given (z, u): over the recording, and over a memory drawn from a learned model.

`kbf.filters.kernel.kbf` and `kbf.filters.kernel.simulated_kbf` use them where recordings have
controls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from kbf.densities.learned_ssm import LearnedModel
from kbf.densities.ridge import Join, RidgeMap
from kbf.filters.kernel.moment_matching import match_means
from kbf.manifolds import Manifold
from kbf.recording import Recording, Transitions, moves
from kbf.rkhs.features import POINTS_AT_A_TIME, nystrom_whitening, pivots
from kbf.rkhs.kernels import KERNELS, product
from kbf.rkhs.linalg import psd_solve
from kbf.runtime.html_repr import ShownModule

STEPS_UNDER_CONTROLS = 20
"""Steps that the learned model is run on with recorded controls before it starts from a recorded state again."""
MOVES_OF_DENSITY = 4000
"""Moves of that run over which the density of the memory's states is a mean."""
STATES_AT_A_TIME = 500
"""States of the memory whose density is computed at a time."""
EXACT_COLUMNS, NEWTON_STEPS, ERROR_OF_MEAN = 64, 12, 1e-3
"""Columns of P(u) whose means are made exact, Newton steps for that, and the error, in standard deviations of the memory, after
which the next step is the last one."""
LEAST_WEIGHT = 1e-4
"""Share of all weight that is not moved: that of the points of least weight, often most of them."""
LEAST_DENSITY, FEW_COLUMNS = 1e-9, 8
"""Share of the greatest of its column below which an entry of P(u) is nothing, unless a tilt needs it; columns, so few that all of
their entries are looked at."""


def control_spread(controls: Float[Tensor, "m k"]) -> Float[Tensor, " k"]:
    """Standard deviation of each control, in whose units its bandwidth is chosen; 1 where it never changes."""
    spread = controls.double().std(0, correction=0)
    return torch.where(spread > 0, spread, 1)


class ControlledTransition(ShownModule):
    """P(u): the conditional mean embedding of the next state given state *and* control, with the product kernel k_Z k_U.

    The embedding of a filter's (z, u), weights w over the memory and one control u, has at a pair
    (z_l, u_l) the value (right^T w)_l k_U(u_l, u), right = k_Z(Z, z_l). So P(u) w = left ((right^T
    w) * k_U(u_l, u)), O(n r) a step, with

    - all m recorded pairs for l: left = (G_Z * G_U + m reg I)^-1, as in `transition_operator`;
    - r of them, landmarks of features psi = W^T k(l, .), Psi of all pairs: left = Psi (Psi^T Psi +
    m reg I)^-1 W^T.

    References: Song, Huang, Smola, Fukumizu (2009) for embeddings of controlled (conditioned)
    transitions.
    """

    left: Tensor
    right: Tensor
    controls: Tensor
    bandwidth: Tensor
    kernel: Callable[..., Tensor]
    controlled: int

    def __init__(
        self,
        left: Float[Tensor, "n r"],
        right: Float[Tensor, "n r"],
        controls: Float[Tensor, "r k"],
        kernel: Callable[..., Tensor],
        bandwidth: Float[Tensor, " k"],
    ) -> None:
        """left, right and u_l as above; k_U and its bandwidth, one length for each control."""
        super().__init__()
        for name, value in (
            ("left", left),
            ("right", right),
            ("controls", controls),
            ("bandwidth", bandwidth),
        ):
            self.register_buffer(name, value)
        self.kernel, self.controlled = kernel, controls.shape[1]

    def forward(
        self, w: Float[Tensor, "b n"], control: Float[Tensor, "b k"]
    ) -> Float[Tensor, "b n"]:
        """P(u) w: the weights after a move under the control u."""
        near = self.kernel(control.to(self.controls), self.controls, bandwidth=self.bandwidth)
        return (w @ self.right * near) @ self.left.mT


def controlled_transition(
    states: Float[Tensor, "n d"],
    pairs: Transitions,
    controls: Float[Tensor, "m k"],
    kernel: str,
    bandwidths: tuple[Tensor, Tensor],
    reg: Tensor,
    rank: int | None,
    tol: float,
) -> ControlledTransition:
    """P(u) over the recorded moves, with all of them (``rank`` None) or with features of the product kernel.

    Args:
        states: z ``n d``.
        pairs: m transitions. controls: u ``m k`` of each.
        kernel: a name in `kbf.rkhs.kernels.KERNELS`, of k_Z and k_U.
        bandwidths: of the states, and of each control ``k``.
        reg: lambda'. rank: most features. tol: as of `kbf.rkhs.features.pivots`.
    """
    k, d = KERNELS[kernel], states.shape[1]
    of_state, of_control = (partial(k, bandwidth=width) for width in bandwidths)
    joint = partial(product, parts=[(of_state, d), (of_control, controls.shape[1])])
    acted = torch.cat([states[pairs.source], controls], -1)
    ridge = len(acted) * reg
    if rank is None:
        marks = acted
        solved = psd_solve(joint(acted, acted), torch.eye(len(acted)).to(acted), reg=ridge)
    else:
        marks = acted[pivots(joint, acted, rank=rank, tol=tol)]
        whiten = nystrom_whitening(joint(marks, marks))
        psi = torch.cat([joint(block, marks) @ whiten for block in acted.split(POINTS_AT_A_TIME)])
        solved = psd_solve(psi.mT @ psi, psi.mT, reg=ridge).mT @ whiten.mT
    left = solved.new_zeros(len(states), len(marks)).index_copy(0, pairs.target, solved)
    right = of_state(states, marks[:, :d])
    return ControlledTransition(left, right, marks[:, d:], k, bandwidths[1])


class ControlledDensity(nn.Module):
    """P(u) from a learned density: row i, column j is s_i q(z_i | z_j, u) / sum_k s_k q(z_k | z_j, u), s_i = m_i / p(z_i), tilted.

    m is the mass of the memory's states, p the density of the distribution that they stand for, the
    mean of q(. | z, u) over the moves that led to it: so s_i is the volume around z_i, and a column
    the distribution of z' over the memory, made anew in each step. As on a memory without controls,
    a tilt makes its mean exact (`kbf.filters.kernel.moment_matching`).
    """

    states: Tensor
    log_volume: Tensor
    shift: Tensor
    controlled: int
    manifold: Manifold
    family: Any
    numbers: tuple[Any, ...]
    dtype: torch.dtype

    def __init__(
        self,
        model: LearnedModel,
        states: Float[Tensor, "n d"],
        mass: Float[Tensor, " n"],
        before: tuple[Float[Tensor, "m d"], Float[Tensor, "m k"]],
        dtype: torch.dtype | None = None,
    ) -> None:
        """The operator of a model.

        Args:
            model: with controls.
            states: the memory ``n d``. mass: m ``n``, sum 1.
            before: states and controls of moves to the memory's distribution.
            dtype: of the densities in a step; predictions stay in that of the model.
        """
        super().__init__()
        moved = model.transition
        assert model.join is not None
        assert isinstance(moved, RidgeMap)
        kernel: Any = moved.kernel
        self.controlled, self.manifold = model.controlled, moved.manifold
        self.family, self.numbers, self.dtype = (
            kernel.func,
            tuple(kernel.keywords),
            dtype or states.dtype,
        )
        for name, value in {**moved._asdict(), **kernel.keywords, **model.join._asdict()}.items():
            if name not in ("kernel", "manifold"):
                self.register_buffer(name, torch.as_tensor(value).to(states))
        self.register_buffer("states", states)
        mean, scale = moved.predict(model.join(*before))
        parts = [
            moved.log_density_table(part, mean, scale).logsumexp(-1)
            for part in states.split(STATES_AT_A_TIME)
        ]
        self.register_buffer("log_volume", mass.log() - torch.cat(parts))

    def map(self) -> RidgeMap:
        """The learned transition as a `RidgeMap`, whose parts are kept in buffers so that a checkpoint holds them."""
        kernel = partial(self.family, **{name: getattr(self, name) for name in self.numbers})
        own = {name: getattr(self, name) for name in RidgeMap._fields if name != "kernel"}
        return RidgeMap(kernel=kernel, **own)

    def forward(
        self, w: Float[Tensor, "b n"], control: Float[Tensor, "b k"]
    ) -> Float[Tensor, "b n"]:
        """P(u) w: means are exact for the `EXACT_COLUMNS` columns of largest weight, as in `density_transition`."""
        return torch.stack(
            [self.moved(weights, u) for weights, u in zip(w, control, strict=True)]
        ).to(w)

    def moved(self, w: Float[Tensor, " n"], u: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
        """P(u) w of one sequence, from the columns that carry all but `LEAST_WEIGHT` of the weight."""
        sizes, order = w.abs().sort(descending=True)
        share = sizes.cumsum(0)
        count = 1 + int(torch.searchsorted(share, (1 - LEAST_WEIGHT) * share[-1]))
        first, rest = order[: min(count, EXACT_COLUMNS)], order[EXACT_COLUMNS:count]
        log_weight, means = self.columns(first, u, self.states.dtype)
        moved = w[first].to(means) @ self.exact(log_weight.mT, means)
        if len(rest) == 0:
            return moved
        others, _ = self.columns(
            rest, u, self.dtype
        )  # as at the start, when the state may be anywhere
        return moved + (others.softmax(0) @ w[rest].to(others)).to(means)

    def exact(
        self, log_weight: Float[Tensor, "m n"], means: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m n"]:
        """Weights with these means, of many columns in two goes: over the rows of `large_rows`, and over all where these miss."""

        def over(rows: Tensor | slice, which: Tensor | slice) -> Tensor:
            return match_means(
                log_weight[which][:, rows],
                self.states[rows],
                means[which],
                steps=NEWTON_STEPS,
                error=ERROR_OF_MEAN,
            )

        every = slice(None)
        rows = large_rows(log_weight) if len(means) > FEW_COLUMNS else every
        if isinstance(rows, slice) or 2 * len(rows) > len(self.states):
            return over(every, every)
        found = torch.zeros_like(log_weight).index_copy(1, rows, over(rows, every))
        missed = (
            ((found @ self.states - means).abs() > 2 * ERROR_OF_MEAN * self.states.std(0))
            .any(1)
            .nonzero()[:, 0]
        )
        if len(missed):
            found[missed] = over(every, missed)
        return found

    def columns(
        self, which: Int[Tensor, " m"], u: Float[Tensor, " k"], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Logarithms ``n m`` of some columns of P(u), up to a constant in each, and the means ``m d`` that they should have."""
        q, join = self.map(), Join(self.shift, self.get_buffer("scale"))
        mean, scale = (part.to(dtype) for part in q.predict(join(self.states[which], u)))
        density = q.log_density_table(self.states.to(dtype), mean, scale)
        return density + self.log_volume[:, None].to(dtype), q.expected(mean, scale)


def large_rows(log_weight: Float[Tensor, "m n"]) -> Int[Tensor, " r"]:
    """Points at which any of m distributions has more than `LEAST_DENSITY` of its largest weight."""
    return (
        (log_weight - log_weight.amax(1, keepdim=True)).amax(0) > math.log(LEAST_DENSITY)
    ).nonzero()[:, 0]


def controlled_run(
    model: LearnedModel, sequences: list[Recording], length: int, generator: Generator | None = None
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m k"], Float[Tensor, "m d"]]:
    """About ``length`` moves of the model under the recorded controls: states before, controls, states after.

    It starts from recorded states, and goes on for `STEPS_UNDER_CONTROLS` steps with the controls
    that followed there: where a control answered to the state, the states do not drift away from it
    for long.
    """
    source, _, u = moves(sequences)
    assert u is not None
    first = torch.randint(
        len(source),
        (-(-length // STEPS_UNDER_CONTROLS),),
        device=source.device,
        generator=generator,
    )
    z, run = source[first], []
    for t in range(STEPS_UNDER_CONTROLS):
        control = u[(first + t) % len(u)]
        moved = model.move(z, generator, control=control)
        run.append((z, control, moved))
        z = moved
    before, acted, after = (torch.cat(part) for part in zip(*run, strict=True))
    return before, acted, after
