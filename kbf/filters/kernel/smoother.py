"""Kernel backward step: smoothed weights at t from filtered weights and smoothed ones at t + 1.

Given z_{t+1}, the state z_t is independent of later observations. So p(z_t | x_1 ... x_T) is the
mean over the smoothed z_{t+1} of p(z_t | z_{t+1}, x_1 ... x_t), the filter at t updated with
z_{t+1} as an observation. The steps here are for weights over a memory; the Gaussian step is
`kbf.filters.gaussian.moments.rts_step`, that of particles
`kbf.filters.particle.bootstrap.particle_backward`. `kbf.filters.smoothing` applies them along a
recording.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from kbf.filters.protocols import Backward, FilterStep
from kbf.rkhs.rules import importance_weighted, importance_weighted_primal
from kbf.rkhs.weights import normalised

# Ridge of the backward rule, with the kernel of the transition.
#
# On linear-Gaussian, rotation, oscillatory and orientation data of 300 to 900 points (seeds 100 and
# up) errors are about equal for 0.1 to 0.3, and 0.003 is unstable. The closed-form leave-one-out
# score of z_t given z_{t+1} selects 2e-4, but it is for all n points, and here only the few near
# the track have weight.
REG = 0.1


def density_backward(
    move: Callable[[Tensor], Tensor], w: Float[Tensor, "b n"], following: Float[Tensor, "b n"]
) -> Float[Tensor, "b n"]:
    """Return the likelihood b of all later observations given z_t, at the points of a memory.

        b_j = max(0, sum_i P_ij h_i / sum_i P_ij),  h_i = w^{s+}_i / (P w)_i

    P_ij is q(z_i | z_j) up to factors in i and in j: those in i cancel in P_ij h_i, those in j in
    the quotient. h is the likelihood at z_{t+1}, the ratio of smoothed and predicted weights, and b
    its mean over the transitions from z_j. h may be negative, as the weights of the rule. Its
    oscillations cancel in the mean, while clipping h would bias it upwards; only b is clipped at 0.
    Where the filter predicts no weight, (P w)_i <= 0, h is unknown, and i is left out of both sums.
    Without later observations w^{s+} = P w, and b = 1.

    Args:
        move: w -> P w; its vector-Jacobian product is the transpose of P.
        w: the filter at t.
        following: w^{s+}, smoothed, at t + 1.
    """
    predicted, transpose = torch.func.vjp(move, w)[:2]
    least = torch.finfo(w.dtype).eps * predicted.amax(-1, keepdim=True)
    known = predicted > least  # the others are rounding
    h = torch.where(known, following / torch.where(known, predicted, 1), 0)
    mass = transpose(known.to(w))[0]
    return (transpose(h)[0] / torch.where(mass > 0, mass, 1)).clamp_min(0)


class RuleBackward(nn.Module):
    """The importance-weighted kernel Bayes' rule with the smoothed embedding of z_{t+1} as query.

    The training pairs are the transitions (z_i, z_i') of the recording. The prior is the filter at
    t, whose weights, clipped at 0, are the ratio at the sources z_i. The Gram matrix is that of the
    targets z_i', and the query is g_i = sum_j k_Z(z_i', z_j) w^{s+}_j. The result is weights of the
    sources. With controls u_i the ratio of a pair is multiplied by k_U(u_i, u).

    No density ratio of the filter's weights is estimated, as for a prediction: they are already
    those of a sample, and it would add noise.
    """

    def __init__(
        self,
        source: Int[Tensor, " m"],
        target: Int[Tensor, " m"],
        kernel: Callable[..., Tensor],
        bandwidth: Tensor,
        controls: Float[Tensor, "m k"] | None = None,
        log_widths: Float[Tensor, " k"] | None = None,
    ) -> None:
        """Store the recorded pairs of a memory.

        They are not part of a checkpoint, since they are computed from its recordings.

        Args:
            source: positions of z_i in the memory. target: of z_i'.
            kernel: k_Z and k_U. bandwidth: of k_Z, for a filter without features.
            controls: of each pair. log_widths: logarithms of the bandwidths of k_U.
        """
        super().__init__()
        self.kernel = kernel
        self.source: Tensor = nn.Buffer(source, persistent=False)
        self.target: Tensor = nn.Buffer(target, persistent=False)
        self.bandwidth: Tensor = nn.Buffer(bandwidth.detach(), persistent=False)
        kept = None if controls is None else nn.Buffer(controls, persistent=False)
        widths = (
            None if log_widths is None else nn.Buffer(log_widths.detach().exp(), persistent=False)
        )
        self.controls: Tensor | None = kept
        self.widths: Tensor | None = widths

    def forward(
        self,
        w: Float[Tensor, "b n"],
        following: Float[Tensor, "b n"],
        states: Float[Tensor, "n d"],
        features: Float[Tensor, "n r"] | None = None,
        control: Float[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n"]:
        """Return smoothed weights at t.

        Args:
            w: the filter at t.
            following: smoothed, at t + 1.
            states: the memory.
            features: F with F F^T the Gram matrix of the states; None for the matrix itself.
            control: of the move, where the recordings have controls.
        """
        ratio = w[:, self.source].clamp_min(0)
        if self.controls is not None and control is not None:
            u = control.to(self.controls)
            ratio = ratio * self.kernel(u, self.controls, bandwidth=self.widths).to(w)
        total = ratio.sum(-1, keepdim=True)
        ratio = ratio * len(self.source) / torch.where(total > 0, total, 1)
        if features is None:
            gram = self.kernel(states, states[self.target], bandwidth=self.bandwidth)
            smoothed = importance_weighted(ratio, gram[self.target], following @ gram, REG)
        else:
            targets, query = features[self.target], following @ features
            smoothed = importance_weighted_primal(ratio, targets, query, REG)
        return torch.zeros_like(w).index_copy(-1, self.source, smoothed)


def step_back_by_density(transition: Callable[..., Tensor]) -> Backward:
    """Return the backward step of a filter whose P is a density (`density_backward`).

    b is the likelihood of later observations at the memory points. The prior at t is the prediction
    times b, and the filter's update with x_t comes last: its regression is then local to the
    smoothed state, and more accurate there than the filtered weights times b.

    Args:
        transition: weights ``b n`` -> P w; or P(u) w, given ``control``.
    """

    def step_back(
        now: FilterStep,
        following: Any,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Any:
        w = now.state.weights
        move = transition if control is None else partial(transition, control=control)
        prior = now.predicted.weights * density_backward(move, w, following.weights)
        smoothed = now.observe(following._replace(weights=normalised(prior, w))).weights
        return following._replace(weights=normalised(smoothed, w))

    return step_back


def step_back_by_rule(
    rule: RuleBackward, states: Float[Tensor, "n d"], features: Float[Tensor, "n r"] | None = None
) -> Backward:
    """Return the backward step by the kernel Bayes' rule, with the filter's weights as prior.

    Args:
        rule: of the recorded pairs. states: the memory. features: as of `RuleBackward.forward`.
    """

    def step_back(
        now: FilterStep,
        following: Any,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> Any:
        w = now.state.weights
        smoothed = rule(w, following.weights, states, features, control)
        return following._replace(weights=normalised(smoothed, w))

    return step_back
