"""Weights of given points that have a wanted mean: how a coarse memory still moves as far as it should."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

NEWTON_STEPS, LEAST_PART_OF_STEP = 50, 1e-6
"""Newton steps at most, and the least part of one; a memory that is fine enough needs two or three."""
HALVES = 4
"""Halvings of a step that are tried at once."""
LONGEST_STEP = 1000.0
"""Length of a step at most: where all weight is at one point, the curvature says nothing."""
ERROR_OF_MEAN = 1e-5
"""Error of a mean, in standard deviations of the points, that is let be."""


def match_means(
    log_weight: Float[Tensor, "m n"],
    points: Float[Tensor, "n d"],
    means: Float[Tensor, "m d"],
    reg: float = 1e-6,
    steps: int = NEWTON_STEPS,
    error: float = ERROR_OF_MEAN,
) -> Float[Tensor, "m n"]:
    """Rows p_j of weights with sum 1 and sum_i p_ji z_i = means_j, of all such the least relative entropy to those given.

    p_ji = exp(b_ji + l_j . z_i) / sum_k exp(b_jk + l_j . z_k), where l_j minimises the convex dual

        log sum_i exp(b_ji + l . z_i) - l . means_j + reg / 2 |l|^2

    by Newton's method, each step halved until the dual falls. Points count in units of their
    standard deviations; ``reg`` keeps l finite where a mean lies outside of the points, and leaves
    a gap of reg l there. O(m n d^2) a step, for the rows that need it.

    Args:
        log_weight: b ``m n``, up to a constant in each row. points: z ``n d``. means: ``m d``. reg:
            of the dual. steps: at most.
        error: of a mean, after which a row's next step is its last.

    References: Farmer and Toda (2017), Discretizing nonlinear, non-Gaussian Markov processes with
    exact conditional moments.
    """
    centre, spread = points.mean(0), points.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1)
    z, target, d = (points - centre) / spread, (means - centre) / spread, points.shape[1]
    powers, ridge = (
        torch.cat([z, (z[:, :, None] * z[:, None, :]).flatten(1)], 1),
        reg * torch.eye(d).to(z),
    )

    tilt, todo, b, goal = (
        torch.zeros_like(target),
        torch.arange(len(target), device=z.device),
        log_weight,
        target,
    )
    old, halves = tilt, 0.5 ** torch.arange(1, HALVES + 1, dtype=z.dtype, device=z.device)
    log_p, before = dual(b, old, goal, z, reg)
    for _ in range(steps):
        mean, square = (log_p.exp() @ powers).split([d, d * d], 1)
        slope = mean - goal + reg * old
        curvature = square.unflatten(-1, (d, d)) - mean[:, :, None] * mean[:, None, :] + ridge
        step = torch.linalg.solve(curvature, slope)
        size = (LONGEST_STEP / step.norm(dim=-1, keepdim=True)).clamp_max(1)
        new = old - size * step
        log_p, after = dual(b, new, goal, z, reg)
        rising = (after > before + 1e-12 * before.abs()).nonzero()[:, 0]
        while len(rising) and float(size[rising].min()) > LEAST_PART_OF_STEP:
            shorter = size[rising] * halves
            some = rising.repeat_interleave(HALVES)
            trial = old[some] - shorter.reshape(-1, 1) * step[some]
            tried, duals = dual(b[some], trial, goal[some], z, reg)
            falls = (duals <= (before + 1e-12 * before.abs())[some]).unflatten(0, (-1, HALVES))
            falls[:, -1] |= ~falls.any(1)  # none: go on from the shortest
            longest = falls.to(torch.uint8).argmax(1)
            chosen = longest + HALVES * torch.arange(len(rising), device=z.device)
            size[rising], new[rising], log_p[rising], after[rising] = (
                shorter.gather(1, longest[:, None]),
                trial[chosen],
                tried[chosen],
                duals[chosen],
            )
            rising = rising[after[rising] > before[rising] + 1e-12 * before[rising].abs()]
        tilt[todo] = new
        left = (slope.abs().amax(-1) > error).nonzero()[:, 0]
        if len(left) == 0:
            break
        if len(left) < len(todo):
            todo, b, goal, new, log_p, after = (
                todo[left],
                b[left],
                goal[left],
                new[left],
                log_p[left],
                after[left],
            )
        old, before = new, after
    return torch.addmm(log_weight, tilt, z.mT).softmax(-1)


def dual(
    b: Float[Tensor, "m n"],
    tilt: Float[Tensor, "m d"],
    goal: Float[Tensor, "m d"],
    z: Float[Tensor, "n d"],
    reg: float,
) -> tuple[Float[Tensor, "m n"], Float[Tensor, " m"]]:
    """The logarithms of the weights at a tilt l, and the dual of `match_means`."""
    logits = torch.addmm(b, tilt, z.mT)
    total = logits.logsumexp(-1, keepdim=True)
    return logits - total, total[:, 0] + (tilt * (reg / 2 * tilt - goal)).sum(-1)
