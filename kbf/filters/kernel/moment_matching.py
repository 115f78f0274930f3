"""Weights of given points that have a wanted mean: how a coarse memory still moves as far as it should."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

NEWTON_STEPS, LEAST_PART_OF_STEP = 50, 1e-6
"""Newton steps at most, and the least part of one; a memory that is fine enough needs two or three."""
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
) -> Float[Tensor, "m n"]:
    """Rows p_j of weights with sum 1 and sum_i p_ji z_i = means_j, of all such the least relative entropy to those given.

    p_ji = exp(b_ji + l_j . z_i) / sum_k exp(b_jk + l_j . z_k), where l_j minimises the convex dual

        log sum_i exp(b_ji + l . z_i) - l . means_j + reg / 2 |l|^2

    by Newton's method, each step halved until the dual falls. Points count in units of their standard deviations; ``reg`` keeps l
    finite where a mean lies outside of the points, and leaves a gap of reg l there. O(m n d^2) a step, for the rows that need it.

    Args:
        log_weight: b ``m n``, up to a constant in each row. points: z ``n d``. means: ``m d``. reg: of the dual. steps: at most.

    References: Farmer and Toda (2017), Discretizing nonlinear, non-Gaussian Markov processes with exact conditional moments.
    """
    centre, spread = points.mean(0), points.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1)
    z, target, d = (points - centre) / spread, (means - centre) / spread, points.shape[1]
    squares, eye = (z[:, :, None] * z[:, None, :]).flatten(1), torch.eye(d).to(z)

    def dual(b: Tensor, tilt: Tensor, goal: Tensor) -> Tensor:
        return (b + tilt @ z.mT).logsumexp(-1) - (tilt * goal).sum(-1) + reg / 2 * tilt.square().sum(-1)

    tilt, todo = torch.zeros_like(target), torch.arange(len(target), device=z.device)
    for _ in range(steps):
        b, old, goal = log_weight[todo], tilt[todo], target[todo]
        p = (b + old @ z.mT).softmax(-1)
        mean = p @ z
        slope = mean - goal + reg * old
        curvature = (p @ squares).unflatten(-1, (d, d)) - mean[:, :, None] * mean[:, None, :] + reg * eye
        step, before = torch.linalg.solve(curvature, slope), dual(b, old, goal)
        size = (LONGEST_STEP / step.norm(dim=-1, keepdim=True)).clamp_max(1)
        rising = torch.arange(len(todo), device=z.device)
        while len(rising) and float(size.min()) > LEAST_PART_OF_STEP:
            after = dual(b[rising], old[rising] - size[rising] * step[rising], goal[rising])
            rising = rising[after > before[rising] + 1e-12 * before[rising].abs()]
            size[rising] /= 2
        tilt[todo] = old - size * step
        todo = todo[slope.abs().amax(-1) > ERROR_OF_MEAN]
        if len(todo) == 0:
            break
    return (log_weight + tilt @ z.mT).softmax(-1)
