"""One step back in time: the smoothed state at t, from the filtered state at t and the smoothed state at t + 1.

Whoever knows z_{t+1} learns nothing more of z_t from later observations. So p(z_t | x_1 ... x_T) is
the mean over the smoothed z_{t+1} of p(z_t | z_{t+1}, x_1 ... x_t), which is the filter at t,
updated by z_{t+1} as if it were observed. Here for weights over a memory and for particles; the
Gaussian step is `kbf.filters.gaussian.kalman.rts_step`. `kbf.filters.smoothing` walks along the
sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from kbf.filters.protocols import Backward, FilterStep
from kbf.rkhs.rules import importance_weighted, importance_weighted_primal
from kbf.rkhs.weights import normalised

REG = 0.1
"""Ridge of the rule backwards, with the kernel of the transition. On linear-Gaussian, rotation, oscillatory and orientation data of
300 to 900 points (seeds 100 and up) 0.1 to 0.3 are about as good, and 0.003 is unstable. The
closed-form leave-one-out score of z_t given z_{t+1} says 2e-4: that is for all n points, and here
only the few near the track have weight."""


def density_backward(
    move: Callable[[Tensor], Tensor], w: Float[Tensor, "b n"], following: Float[Tensor, "b n"]
) -> Float[Tensor, "b n"]:
    """The likelihood b at z_t of all that came later, on the points of a memory; P_ij is q(z_i | z_j) up to factors in i and in j.

        b_j = max(0, sum_i P_ij h_i / sum_i P_ij),  h_i = w^{s+}_i / (P w)_i

    h is the same at z_{t+1}: what is smoothed there over what was predicted, and b its mean over
    the moves from z_j. Factors in i cancel in P_ij h_i, those in j in the quotient. h has a sign,
    like the rule's weights: its ripples cancel in the mean, and to cut them would leave a wide
    pedestal of what lies between. Only b is cut at 0. Where the filter predicts nothing, (P w)_i <=
    0, h is not known, and i is left out of both sums. If nothing came later, w^{s+} = P w, then b =
    1.

    Args:
        move: w -> P w; what pulls back through it is its transpose.
        w: the filter at t.
        following: w^{s+}, smoothed, at t + 1.
    """
    predicted, transpose = torch.func.vjp(move, w)[:2]
    known = predicted > torch.finfo(w.dtype).eps * predicted.amax(
        -1, keepdim=True
    )  # the rest is rounding
    h = torch.where(known, following / torch.where(known, predicted, 1), 0)
    mass = transpose(known.to(w))[0]
    return (transpose(h)[0] / torch.where(mass > 0, mass, 1)).clamp_min(0)


class RuleBackward(nn.Module):
    """The importance-weighted kernel Bayes' rule for the "observation" z_{t+1}, integrated over the smoothed embedding of it.

    Pairs (z_i, z_i') of the recording; the prior is the filter at t, with its weights, cut at 0,
    for the ratio at the sources z_i; the Gram matrix is that of the targets z_i', and the query its
    mean, g_i = sum_j k_Z(z_i', z_j) w^{s+}_j. The result weighs the sources. With controls u_i a
    pair counts k_U(u_i, u) times.

    The filter's weights are already those of a sample: a ratio made of them once more, as for a
    prediction, only adds noise.
    """

    source: Tensor
    target: Tensor
    bandwidth: Tensor
    controls: Tensor | None
    widths: Tensor | None

    def __init__(
        self,
        source: Int[Tensor, " m"],
        target: Int[Tensor, " m"],
        kernel: Callable[..., Tensor],
        bandwidth: Tensor,
        controls: Float[Tensor, "m k"] | None = None,
        log_widths: Float[Tensor, " k"] | None = None,
    ) -> None:
        """The recorded pairs of a memory. They are not saved in a checkpoint, since they are made from its recordings again.

        Args:
            source: positions of z_i in the memory. target: of z_i'.
            kernel: k_Z and k_U. bandwidth: of k_Z, for a filter without features.
            controls: of each pair. log_widths: logarithms of the bandwidths of k_U.
        """
        super().__init__()
        self.kernel = kernel
        widths = None if log_widths is None else log_widths.detach().exp()
        kept = {
            "source": source,
            "target": target,
            "bandwidth": bandwidth.detach(),
            "controls": controls,
            "widths": widths,
        }
        for name, value in kept.items():
            self.register_buffer(name, value, persistent=False)

    def forward(
        self,
        w: Float[Tensor, "b n"],
        following: Float[Tensor, "b n"],
        states: Float[Tensor, "n d"],
        features: Float[Tensor, "n r"] | None = None,
        control: Float[Tensor, "b k"] | None = None,
    ) -> Float[Tensor, "b n"]:
        """Smoothed weights at t.

        Args:
            w: the filter at t.
            following: smoothed, at t + 1.
            states: the memory.
            features: F with F F^T the Gram matrix of the states; None for the matrix itself.
            control: of the move, where the recordings have controls.
        """
        ratio = w[:, self.source].clamp_min(0)
        if self.controls is not None and control is not None:
            ratio = ratio * self.kernel(
                control.to(self.controls), self.controls, bandwidth=self.widths
            ).to(w)
        total = ratio.sum(-1, keepdim=True)
        ratio = ratio * len(self.source) / torch.where(total > 0, total, 1)
        if features is None:
            gram = self.kernel(states, states[self.target], bandwidth=self.bandwidth)
            smoothed = importance_weighted(ratio, gram[self.target], following @ gram, REG)
        else:
            smoothed = importance_weighted_primal(
                ratio, features[self.target], following @ features, REG
            )
        return torch.zeros_like(w).index_copy(-1, self.source, smoothed)


def step_back_by_density(transition: Callable[..., Tensor]) -> Backward:
    """One step back for a filter whose P is a density (`density_backward`).

    What came later has the likelihood b at the memory points. The prior at t is the prediction
    times b, and the filter's update takes x_t in *last*: its regression is then one near the
    smoothed state, and better there than the filter's own, times b.

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
    """One step back by the kernel Bayes' rule, with the filter's weights for the prior.

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
