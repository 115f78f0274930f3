"""Moment matching: weights over given points with exact means and minimal relative entropy.

They make the predictions of a transition over a coarse memory unbiased.
"""

import torch
from jaxtyping import Float
from torch import Tensor

# Newton steps; a fine memory requires two or three.
MAX_NEWTON_STEPS = 50

# Smallest fraction of a Newton step.
MIN_STEP_FRACTION = 1e-6

# Halvings of a step that are evaluated at once.
HALVINGS_AT_ONCE = 4

# Length of a step: if all weight is at one point, the curvature is 0.
MAX_STEP_LENGTH = 1000.0

# Tolerated error of a mean, in standard deviations of the points.
MAX_ERROR_OF_MEAN = 1e-5


def match_means(
    log_weight: Float[Tensor, "m n"],
    points: Float[Tensor, "n d"],
    means: Float[Tensor, "m d"],
    reg: float = 1e-6,
    steps: int = MAX_NEWTON_STEPS,
    error: float = MAX_ERROR_OF_MEAN,
) -> Float[Tensor, "m n"]:
    """Return rows p_j of weights with sum 1, sum_i p_ji z_i = means_j and least relative entropy.

    The relative entropy is that to the given weights, of all rows with these moments. The minimum
    is p_ji = exp(b_ji + l_j . z_i) / sum_k exp(b_jk + l_j . z_k), where l_j minimises the dual

        log sum_i exp(b_ji + l . z_i) - l . means_j + reg / 2 |l|^2

    by Newton's method; each step is halved until the dual decreases. Points are in units of their
    standard deviations. ``reg`` keeps l finite if a mean is outside of the hull of the points; the
    error of the mean is then reg l. A step costs O(m n d^2) for the rows that have not converged.

    Args:
        log_weight: b ``m n``, up to a constant in each row. points: z ``n d``. means: ``m d``.
        reg: ridge of the dual. steps: largest number of Newton steps.
        error: of a mean, below which the next step of a row is its last one.

    References: Farmer and Toda (2017), Discretizing nonlinear, non-Gaussian Markov processes with
    exact conditional moments.
    """
    centre, spread = points.mean(0), points.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1)
    z, target, d = (points - centre) / spread, (means - centre) / spread, points.shape[1]
    powers = torch.cat([z, (z[:, :, None] * z[:, None, :]).flatten(1)], 1)
    ridge, halves = reg * torch.eye(d).to(z), 0.5 ** torch.arange(1, HALVINGS_AT_ONCE + 1).to(z)

    tilt, todo = torch.zeros_like(target), torch.arange(len(target), device=z.device)
    old, b, goal = tilt, log_weight, target
    log_p, before = dual(b, old, goal, z, reg)
    for _ in range(steps):
        mean, square = (log_p.exp() @ powers).split([d, d * d], 1)
        slope = mean - goal + reg * old
        curvature = square.unflatten(-1, (d, d)) - mean[:, :, None] * mean[:, None, :] + ridge
        step = torch.linalg.solve(curvature, slope)
        size = (MAX_STEP_LENGTH / step.norm(dim=-1, keepdim=True)).clamp_max(1)
        new = old - size * step
        log_p, after = dual(b, new, goal, z, reg)
        rising = (after > before + 1e-12 * before.abs()).nonzero()[:, 0]
        while len(rising) and float(size[rising].min()) > MIN_STEP_FRACTION:
            shorter = size[rising] * halves
            some = rising.repeat_interleave(HALVINGS_AT_ONCE)
            trial = old[some] - shorter.reshape(-1, 1) * step[some]
            log_q, duals = dual(b[some], trial, goal[some], z, reg)
            falls = (duals <= (before + 1e-12 * before.abs())[some]).unflatten(0, (-1, len(halves)))
            falls[:, -1] |= ~falls.any(1)  # if none does, continue from the shortest
            longest = falls.to(torch.uint8).argmax(1)
            chosen = longest + len(halves) * torch.arange(len(rising), device=z.device)
            size[rising], new[rising], log_p[rising], after[rising] = (
                shorter.gather(1, longest[:, None]),
                trial[chosen],
                log_q[chosen],
                duals[chosen],
            )
            rising = rising[after[rising] > before[rising] + 1e-12 * before[rising].abs()]
        tilt[todo] = new
        left = (slope.abs().amax(-1) > error).nonzero()[:, 0]
        if len(left) == 0:
            break
        if len(left) < len(todo):
            rows = (todo, b, goal, new, log_p, after)
            todo, b, goal, new, log_p, after = (each[left] for each in rows)
        old, before = new, after
    return torch.addmm(log_weight, tilt, z.mT).softmax(-1)


def dual(
    b: Float[Tensor, "m n"],
    tilt: Float[Tensor, "m d"],
    goal: Float[Tensor, "m d"],
    z: Float[Tensor, "n d"],
    reg: float,
) -> tuple[Float[Tensor, "m n"], Float[Tensor, " m"]]:
    """Return the log weights at a tilt l, and the dual of `match_means`."""
    logits = torch.addmm(b, tilt, z.mT)
    total = logits.logsumexp(-1, keepdim=True)
    return logits - total, total[:, 0] + (tilt * (reg / 2 * tilt - goal)).sum(-1)
