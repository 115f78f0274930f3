"""The nonparametric kernel Bayes smoother, in one function over the weights of a filter.

Backwards in time, kernel Bayes' rule gives p(z_t | z_{t+1}, x_1 ... x_t) from the filter's
embedding at t as prior and the recorded transitions (z_i, z_i') as pairs; the kernel sum rule takes
its mean over the smoothed embedding at t + 1. With G_ss the Gram matrix of the m sources z_i, G_++
that of the targets z_i', and G_s:, G_+: their rows against all n memory points,

    gamma = m (G_ss + m eta I)^-1 G_s: w^t,    w^{t|T} = rule(gamma, G_++, G_+: w^{t+1|T}),

with weights on the sources.

`kbf.filters.kernel.smoother.RuleBackward`, the smoother of `KBF`, differs in two points: its ratio
is the filter's own weights in place of gamma, which is estimated from them, and its rule the
importance-weighted one.

References: Nishiyama, Afsharinejad, Naruse, Boots and Song (2016), The nonparametric kernel Bayes
smoother (equations from memory, not compared with the text).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.recording import Transitions
from kbf.rkhs.ratios import tikhonov
from kbf.rkhs.rules import RULES
from kbf.rkhs.weights import normalised


@torch.no_grad()
def kernel_bayes_smoother(
    weights: Float[Tensor, "T n"],
    gram: Float[Tensor, "n n"],
    pairs: Transitions,
    regs: tuple[float, float],
    *,
    rule: str = "original",
) -> Float[Tensor, "T n"]:
    """Return the smoothed weights w^{t|T} of all steps, of sum 1.

    Where the smoothed weights cancel, those of the filter are kept.

    Args:
        weights: w^t ``T n``, of the filter after each observation.
        gram: k_Z of the memory ``n n``.
        pairs: positions of z_i and z_i' in the memory, as of `kbf.recording.transitions`.
        regs: eta of the ratio, and delta of the original rule (in the scaling of
            `kbf.rkhs.rules.original`) or lambda.
        rule: original, as in the paper, or importance_weighted, with the ratio max(0, gamma).

    Raises:
        ValueError: another rule.
        NotPositiveDefiniteError: a ridge too small for the precision of the data.
    """
    if rule not in ("original", "importance_weighted"):
        raise ValueError(
            f"kernel_bayes_smoother: rule must be original or importance_weighted, got {rule!r}"
        )
    (source, target), (eta, reg) = pairs, regs
    update = RULES[rule]
    at_sources = weights @ gram[:, source]
    gamma = tikhonov(gram[source][:, source], at_sources, eta)
    if not update.signed:
        gamma = gamma.clamp_min(0)
    targets, smoothed = gram[target][:, target], [weights[-1]]
    for t in reversed(range(len(weights) - 1)):
        query = smoothed[-1] @ gram[:, target]
        sources = update.dense(gamma[t], targets, query, reg)
        w = torch.zeros_like(weights[t]).index_copy(0, source, sources)
        smoothed.append(normalised(w, weights[t]))
    return torch.stack(smoothed[::-1])
