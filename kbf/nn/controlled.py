"""Transitions with a control, z' given (z, u): over the recording, and over a memory drawn from a learned model.

`kbf.nn.kernel_bayes` uses them where recordings have controls.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from kbf.distributed import Total, alone, gather
from kbf.features import nystrom_whitening, pivots
from kbf.filters.learned import Join, LearnedModel, RidgeMap
from kbf.filters.moments import match_means
from kbf.filters.operators import BLOCK, SAMPLE, ControlledTransition, count
from kbf.kernels import KERNELS, evenly, product
from kbf.linalg import psd_solve
from kbf.sequence import Sequence, Transitions, moves

STRETCH = 20
"""Steps that the learned model is run on with recorded controls before it starts from a recorded state again."""
BEFORE = 4000
"""Moves of that run over which the density of the memory's states is a mean."""
PART = 500
"""States of the memory whose density is computed at a time."""
EXACT, ROUGH, LITTLE = 64, 12, 1e-3
"""Columns of P(u) whose means are made exact, Newton steps for that, and the share of all weight that others are made from."""


def control_spread(controls: Float[Tensor, "m k"]) -> Float[Tensor, " k"]:
    """Standard deviation of each control, in whose units its bandwidth is chosen; 1 where it never changes."""
    spread = controls.double().std(0, correction=0)
    return torch.where(spread > 0, spread, 1)


def controlled_transition(
    states: Float[Tensor, "n d"],
    pairs: Transitions,
    controls: Float[Tensor, "m k"],
    kernel: str,
    bandwidths: tuple[Tensor, Tensor],
    reg: Tensor,
    rank: int | None,
    tol: float,
    total: Total = alone,
) -> ControlledTransition:
    """P(u) over the recorded moves, with all of them (``rank`` None) or with features of the product kernel.

    Args:
        states: z ``n d``.
        pairs: m transitions. controls: u ``m k`` of each.
        kernel: a name in `kbf.kernels.KERNELS`, of k_Z and k_U.
        bandwidths: of the states, and of each control ``k``.
        reg: lambda'. rank: most features. tol: as of `kbf.features.pivots`.
        total: adds up over processes that share the memory.
    """
    k, d = KERNELS[kernel], states.shape[1]
    parts = [(partial(k, bandwidth=width), size) for width, size in zip(bandwidths, (d, controls.shape[1]), strict=True)]
    joint = partial(product, parts=parts)
    acted = torch.cat([states[pairs.source], controls], -1)
    ridge = count(acted, total) * reg
    if rank is None:
        marks = acted
        solved = psd_solve(joint(acted, acted), torch.eye(len(acted)).to(acted), reg=ridge)
    else:
        among = acted if total is alone else gather(acted[evenly(len(acted), SAMPLE)])
        marks = among[pivots(joint, among, rank=rank, tol=tol)]
        whiten = nystrom_whitening(joint(marks, marks))
        psi = torch.cat([joint(block, marks) @ whiten for block in acted.split(BLOCK)])
        solved = psd_solve(total(psi.mT @ psi), psi.mT, reg=ridge).mT @ whiten.mT
    left = solved.new_zeros(len(states), len(marks)).index_copy(0, pairs.target, solved)
    right = k(states, marks[:, :d], bandwidth=bandwidths[0])
    return ControlledTransition(left, right, marks[:, d:], k, bandwidths[1], total)


class ControlledDensity(nn.Module):
    """P(u) from a learned density: row i, column j is s_i q(z_i | z_j, u) / sum_k s_k q(z_k | z_j, u), s_i = m_i / p(z_i), tilted.

    m is the mass of the memory's states, p the density of the distribution that they stand for, the mean of q(. | z, u) over the
    moves that led to it: so s_i is the volume around z_i, and a column the distribution of z' over the memory, made anew in each
    step. As on a memory without controls, a tilt makes its mean exact (`kbf.filters.moments`).
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
        """The operator of a model.

        Args:
            model: with controls.
            states: the memory ``n d``. mass: m ``n``, sum 1.
            before: states and controls of moves to the memory's distribution.
            dtype: of the densities in a step; predictions stay in that of the model.
        """
        super().__init__()
        assert model.join is not None
        kernel: Any = model.transition.kernel
        self.controlled, self.manifold = model.controlled, model.transition.manifold
        self.family, self.numbers, self.dtype = kernel.func, tuple(kernel.keywords), dtype or states.dtype
        for name, value in {**model.transition._asdict(), **kernel.keywords, **model.join._asdict()}.items():
            if name not in ("kernel", "manifold"):
                self.register_buffer(name, torch.as_tensor(value).to(states))
        self.register_buffer("states", states)
        mean, scale = model.transition.predict(model.join(*before))
        parts = [model.transition.log_density_table(part, mean, scale).logsumexp(-1) for part in states.split(PART)]
        self.register_buffer("log_volume", mass.log() - torch.cat(parts))

    def map(self) -> RidgeMap:
        """The learned transition, put together from the buffers."""
        kernel = partial(self.family, **{name: getattr(self, name) for name in self.numbers})
        own = {name: getattr(self, name) for name in RidgeMap._fields if name != "kernel"}
        return RidgeMap(kernel=kernel, **own)

    def forward(self, w: Float[Tensor, "b n"], control: Float[Tensor, "b k"]) -> Float[Tensor, "b n"]:
        """P(u) w: means are exact for the `EXACT` columns of largest weight, as in `kbf.filters.operators.density_transition`."""
        moved = []
        for weights, u in zip(w, control, strict=True):
            order = weights.abs().argsort(descending=True)
            first, rest = order[:EXACT], order[EXACT:]
            log_weight, means = self.columns(first, u, self.states.dtype)
            moved.append(weights[first].to(means) @ match_means(log_weight.mT, self.states, means, steps=ROUGH))
            if weights[rest].abs().sum() > LITTLE * weights.abs().sum():  # as at the start, when the state may be anywhere
                others, _ = self.columns(rest, u, self.dtype)
                moved[-1] = moved[-1] + (others.softmax(0) @ weights[rest].to(others)).to(means)
        return torch.stack(moved).to(w)

    def columns(self, which: Int[Tensor, " m"], u: Float[Tensor, " k"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Logarithms ``n m`` of some columns of P(u), up to a constant in each, and the means ``m d`` that they should have."""
        q, join = self.map(), Join(self.shift, self.get_buffer("scale"))
        mean, scale = (part.to(dtype) for part in q.predict(join(self.states[which], u)))
        density = q.log_density_table(self.states.to(dtype), mean, scale)
        return density + self.log_volume[:, None].to(dtype), q.expected(mean, scale)


def controlled_run(
    model: LearnedModel, sequences: list[Sequence], length: int, generator: Generator | None = None
) -> tuple[Float[Tensor, "m d"], Float[Tensor, "m k"], Float[Tensor, "m d"]]:
    """About ``length`` moves of the model under the recorded controls: states before, controls, states after.

    It starts from recorded states, and goes on for `STRETCH` steps with the controls that followed there: where a control answered
    to the state, the states do not drift away from it for long.
    """
    source, _, u = moves(sequences)
    assert u is not None
    first = torch.randint(len(source), (-(-length // STRETCH),), device=source.device, generator=generator)
    z, run = source[first], []
    for t in range(STRETCH):
        control = u[(first + t) % len(u)]
        moved = model.move(z, generator, control=control)
        run.append((z, control, moved))
        z = moved
    before, acted, after = (torch.cat(part) for part in zip(*run, strict=True))
    return before, acted, after
