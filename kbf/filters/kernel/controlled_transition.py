"""Conditional mean embedding of the next state z' given state z and control u.

The memory is recorded (for `kbf.filters.kernel.kbf`) or sampled from a learned model (for
`kbf.filters.kernel.simulated_kbf`).
"""

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

# Steps of the learned model under recorded controls between two recorded states.
STEPS_UNDER_CONTROLS = 20

# Transitions of that run over which the density of the memory's states is averaged.
MAX_TRANSITIONS_OF_DENSITY = 4000

# States of the memory whose density is computed at a time.
STATES_AT_A_TIME = 500

# Number of columns of P(u), those of largest weight, whose means are exact.
EXACT_COLUMNS = 64

# Newton steps for the exact means.
MAX_NEWTON_STEPS = 12

# Error of a mean, in standard deviations of the memory, after which the next step is the last one.
ERROR_OF_MEAN = 1e-3

# Share of the total weight that is not propagated, that of the points of smallest weight; often
# most points.
NEGLIGIBLE_WEIGHT = 1e-4

# Entries of P(u) below this share of the largest of their column are set to 0 unless the exact mean
# requires them.
NEGLIGIBLE_ENTRY = 1e-9

# Up to this number of columns all entries are used.
MAX_COLUMNS_OF_ALL_ENTRIES = 8


def control_spread(controls: Float[Tensor, "m k"]) -> Float[Tensor, " k"]:
    """Return the standard deviation of each control, its unit of length; 1 if it is constant."""
    spread = controls.double().std(0, correction=0)
    return torch.where(spread > 0, spread, 1)


class ControlledTransition(ShownModule):
    """P(u), the conditional mean embedding of the next state given state and control.

    The kernel is the product k_Z k_U. The embedding of (z, u), for weights w over the memory and
    one control u, has at a pair (z_l, u_l) the value (right^T w)_l k_U(u_l, u), right = k_Z(Z,
    z_l). So P(u) w = left ((right^T w) * k_U(u_l, u)), O(n r) a step, with

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

    def __init__(
        self,
        left: Float[Tensor, "n r"],
        right: Float[Tensor, "n r"],
        controls: Float[Tensor, "r k"],
        kernel: Callable[..., Tensor],
        bandwidth: Float[Tensor, " k"],
    ) -> None:
        """Store left, right, the controls u_l, k_U, and its bandwidth ``k``."""
        super().__init__()
        self.register_buffer("left", left)
        self.register_buffer("right", right)
        self.register_buffer("controls", controls)
        self.register_buffer("bandwidth", bandwidth)
        self.kernel: Callable[..., Tensor] = kernel
        self.controlled: int = controls.shape[1]

    def forward(
        self, w: Float[Tensor, "b n"], control: Float[Tensor, "b k"]
    ) -> Float[Tensor, "b n"]:
        """Return P(u) w, the weights after a transition under the control u."""
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
    """Return P(u) over the recorded transitions, from all pairs or features of the product kernel.

    Args:
        states: z ``n d``.
        pairs: m transitions. controls: u ``m k`` of each.
        kernel: a name in `kbf.rkhs.kernels.KERNELS`, of k_Z and k_U.
        bandwidths: of the states, and of each control ``k``.
        reg: lambda'. rank: largest number of features; None for all pairs.
        tol: as in `kbf.rkhs.features.pivots`.
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
    return ControlledTransition(
        left, of_state(states, marks[:, :d]), marks[:, d:], k, bandwidths[1]
    )


class ControlledDensity(nn.Module):
    """P(u) from a learned density q.

        P(u)_ij = s_i q(z_i | z_j, u) / sum_k s_k q(z_k | z_j, u),    s_i = m_i / p(z_i)

    m is the mass of the memory's states, and p the density of the distribution that they represent,
    the mean of q(. | z, u) over the transitions that lead to it. So s_i is the volume around z_i,
    and a column is the distribution of z' over the memory. Columns are computed in each step for
    its control. As without controls, an exponential tilt makes their means exact
    (`kbf.filters.kernel.moment_matching`).
    """

    states: Tensor
    log_volume: Tensor
    shift: Tensor

    def __init__(
        self,
        model: LearnedModel,
        states: Float[Tensor, "n d"],
        mass: Float[Tensor, " n"],
        before: tuple[Float[Tensor, "m d"], Float[Tensor, "m k"]],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Compute the volumes of a memory.

        Args:
            model: with controls.
            states: the memory ``n d``. mass: m ``n``, sum 1.
            before: states and controls of transitions to the memory's distribution.
            dtype: of the densities in a step; predictions have that of the model.
        """
        super().__init__()
        moved = model.transition
        assert model.join is not None
        assert isinstance(moved, RidgeMap)
        kernel: Any = moved.kernel
        self.controlled: int = model.controlled
        self.manifold: Manifold = moved.manifold
        self.family: Any = kernel.func
        self.numbers: tuple[str, ...] = tuple(kernel.keywords)
        self.dtype: torch.dtype = dtype or states.dtype
        for name, value in {**moved._asdict(), **kernel.keywords, **model.join._asdict()}.items():
            if name not in ("kernel", "manifold", "selection"):
                self.register_buffer(name, torch.as_tensor(value).to(states))
        self.register_buffer("states", states)
        mean, scale = moved.predict(model.join(*before))
        parts = [
            moved.log_density_table(part, mean, scale).logsumexp(-1)
            for part in states.split(STATES_AT_A_TIME)
        ]
        self.register_buffer("log_volume", mass.log() - torch.cat(parts))

    def map(self) -> RidgeMap:
        """Return the learned transition as a `RidgeMap`, whose parts are buffers."""
        kernel = partial(self.family, **{name: getattr(self, name) for name in self.numbers})
        own = {name: getattr(self, name) for name in RidgeMap._fields if hasattr(self, name)}
        return RidgeMap(kernel=kernel, **own)

    def forward(
        self, w: Float[Tensor, "b n"], control: Float[Tensor, "b k"]
    ) -> Float[Tensor, "b n"]:
        """Return P(u) w; means are exact for the `EXACT_COLUMNS` columns of largest weight."""
        pairs = zip(w, control, strict=True)
        return torch.stack([self.moved(weights, u) for weights, u in pairs]).to(w)

    def moved(self, w: Float[Tensor, " n"], u: Float[Tensor, " k"]) -> Float[Tensor, " n"]:
        """Return P(u) w of one recording, from the columns of all but `NEGLIGIBLE_WEIGHT`."""
        sizes, order = w.abs().sort(descending=True)
        share = sizes.cumsum(0)
        count = 1 + int(torch.searchsorted(share, (1 - NEGLIGIBLE_WEIGHT) * share[-1]))
        first, rest = order[: min(count, EXACT_COLUMNS)], order[EXACT_COLUMNS:count]
        log_weight, means = self.columns(first, u, self.states.dtype)
        moved = w[first].to(means) @ self.exact(log_weight.mT, means)
        if len(rest) == 0:
            return moved
        # There are many columns at the start, where the state is unknown.
        others, _ = self.columns(rest, u, self.dtype)
        return moved + (others.softmax(0) @ w[rest].to(others)).to(means)

    def exact(
        self, log_weight: Float[Tensor, "m n"], means: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m n"]:
        """Return weights with these means.

        Many columns are matched over the rows of `large_rows` first, and over all rows if the error
        of the mean is then too large.
        """

        def over(rows: Tensor | slice, which: Tensor | slice) -> Tensor:
            return match_means(
                log_weight[which][:, rows],
                self.states[rows],
                means[which],
                steps=MAX_NEWTON_STEPS,
                error=ERROR_OF_MEAN,
            )

        every = slice(None)
        rows = large_rows(log_weight) if len(means) > MAX_COLUMNS_OF_ALL_ENTRIES else every
        if isinstance(rows, slice) or 2 * len(rows) > len(self.states):
            return over(every, every)
        found = torch.zeros_like(log_weight).index_copy(1, rows, over(rows, every))
        error = (found @ self.states - means).abs()
        missed = (error > 2 * ERROR_OF_MEAN * self.states.std(0)).any(1).nonzero()[:, 0]
        if len(missed):
            found[missed] = over(every, missed)
        return found

    def columns(
        self, which: Int[Tensor, " m"], u: Float[Tensor, " k"], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return log columns ``n m`` of P(u), up to a constant in each, and their means ``m d``."""
        q, join = self.map(), Join(self.shift, self.get_buffer("scale"))
        mean, scale = (part.to(dtype) for part in q.predict(join(self.states[which], u)))
        density = q.log_density_table(self.states.to(dtype), mean, scale)
        return density + self.log_volume[:, None].to(dtype), q.expected(mean, scale)


def large_rows(log_weight: Float[Tensor, "m n"]) -> Int[Tensor, " r"]:
    """Return points where a distribution exceeds `NEGLIGIBLE_ENTRY` times its largest weight."""
    relative = (log_weight - log_weight.amax(1, keepdim=True)).amax(0)
    return (relative > math.log(NEGLIGIBLE_ENTRY)).nonzero()[:, 0]


def controlled_run(
    model: LearnedModel,
    recordings: list[Recording],
    length: int,
    generator: Generator | None = None,
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m k"], Float[Tensor, "m d"]]:
    """Simulate about ``length`` transitions; return states before, controls, and states after.

    Each run starts from a recorded state and has `STEPS_UNDER_CONTROLS` steps with the controls
    that follow in the recording. It is short because recorded controls may be feedback from the
    state, from which a simulated state departs.
    """
    source, _, u = moves(recordings)
    assert u is not None
    runs = (-(-length // STEPS_UNDER_CONTROLS),)
    first = torch.randint(len(source), runs, device=source.device, generator=generator)
    moved, run = source[first], []
    for t in range(STEPS_UNDER_CONTROLS):
        z, control = moved, u[(first + t) % len(u)]
        moved = model.move(z, generator, control=control)
        run.append((z, control, moved))
    before, acted, after = (torch.cat(part) for part in zip(*run, strict=True))
    return before, acted, after
