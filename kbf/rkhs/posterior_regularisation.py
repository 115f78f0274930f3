"""Kernel Bayes' rule with posterior regularisation: known states at some observations pull on it.

The importance-weighted rule is a regression of the feature of z on x, with the density ratio r_i as
weights. Posterior regularisation adds m labelled pairs (x'_j, t_j), at which the posterior mean
should be near the feature of t_j, with a strength s >= 0:

    min over mu of sum_i r_i ||k_Z(., z_i) - mu(x_i)||^2 + s sum_j ||k_Z(., t_j) - mu(x'_j)||^2
        + n reg ||mu||^2.

It is the same regression over n + m points, with the weights (r, s): no pair (x'_j, t_j) has to be
drawn from p(x | z).

References: Song, Zhu and Ren (2016), Kernel Bayesian inference with posterior regularization
(equations from memory, not compared with the text). Their thresholding of the weights is the ratio
r = max(0, gamma) of KuLSIF.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.rules import importance_weighted


def regularised_posterior(
    ratio: Float[Tensor, "*b n"],
    strength: float | Float[Tensor, " m"],
    gram: Float[Tensor, "k k"],
    query: Float[Tensor, "*b k"],
    reg: float | Tensor,
) -> Float[Tensor, "*b k"]:
    """Return the posterior weights over the n states and, after them, the m labelled states.

    Args:
        ratio: r ``*b n``, of the recorded pairs.
        strength: s of all labelled pairs, or one for each ``m``. With 0 the rule is that of
            `kbf.rkhs.rules.importance_weighted`; in the limit of large values mu(x'_j) is the
            feature of t_j.
        gram: k_X of the recorded observations and the m labelled ones, ``n+m n+m``.
        query: k_X of these against the new observation, ``*b n+m``.
        reg: lambda; the ridge is n lambda, as without labelled pairs.

    Raises:
        ValueError: no labelled pairs, other shapes, or a negative strength.
        NotPositiveDefiniteError: as `kbf.rkhs.rules.importance_weighted`.
    """
    n, total = ratio.shape[-1], gram.shape[-1]
    m = total - n
    if m < 1 or query.shape[-1] != total:
        raise ValueError(
            f"regularised_posterior: {n} ratios need a Gram matrix and a query of more than {n} "
            f"points, the labelled ones last; got {total} and {query.shape[-1]}"
        )
    s = torch.as_tensor(strength, dtype=ratio.dtype, device=ratio.device).expand(m)
    if not bool((s >= 0).all()):
        raise ValueError(f"regularised_posterior: strength must not be negative, got {s.min():g}")
    both = torch.cat([ratio, s.expand(*ratio.shape[:-1], m)], -1)
    return importance_weighted(both, gram, query, reg * n / total)
