"""Kernel sum rule and kernel chain rule: marginal and joint embeddings from a conditional one.

The conditional embedding operator C_{X|Z} is estimated from pairs (z_i, x_i), i = 1 ... n, by
kernel ridge regression. The prior of z comes as a weighted sample u_j with weights a_j, m_Pi =
sum_j a_j k_Z(., u_j). With G = k_Z(z_i, z_j) ``n n`` and K = k_Z(z_i, u_j) ``n m``,

    sum rule:    m_X  = C_{X|Z} m_Pi         = sum_i w_i k_X(., x_i),
    chain rule:  C_XZ = C_{X|Z} C_ZZ (of Pi) = sum_ij W_ij k_X(., x_i) (x) k_Z(., u_j).

Bayes' rule (`kbf.rkhs.rules`) conditions the joint embedding on x.

References: Song, Fukumizu and Gretton (2013), Kernel embeddings of conditional distributions,
sections on the kernel sum, chain and Bayes' rules (equations from memory, not compared with the
text); Fukumizu et al., section 3, which calls the estimate of the sum rule kernel sum rule, too.
"""

from jaxtyping import Float
from torch import Tensor

from kbf.rkhs.linalg import psd_solve


def sum_rule(
    gram: Float[Tensor, "n n"],
    cross: Float[Tensor, "n m"],
    weights: Float[Tensor, "*b m"],
    reg: float | Tensor,
) -> Float[Tensor, "*b n"]:
    """Return the weights of the marginal embedding of x: w = (G + n reg I)^-1 K a.

    Args:
        gram: G ``n n``, of the states of the pairs.
        cross: K ``n m``, against the points of the prior.
        weights: a ``*b m``.
        reg: lambda > 0.

    Raises:
        NotPositiveDefiniteError: with n, n reg and the smallest eigenvalue.

    >>> import torch
    >>> eye, prior = torch.eye(2), torch.tensor([0.3, 0.7])  # two states, delta kernel
    >>> torch.round(sum_rule(eye, eye, prior, 1e-6), decimals=3)
    tensor([0.3000, 0.7000])
    """
    n = gram.shape[-1]
    return psd_solve(gram, (weights @ cross.mT)[..., None], reg=n * reg)[..., 0]


def chain_rule(
    gram: Float[Tensor, "n n"],
    cross: Float[Tensor, "n m"],
    weights: Float[Tensor, "*b m"],
    reg: float | Tensor,
) -> Float[Tensor, "*b n m"]:
    """Return the weights of the joint embedding: W = (G + n reg I)^-1 K diag(a).

    E[f(x) g(z)] is estimated by sum_ij W_ij f(x_i) g(u_j). The sums over j are those of `sum_rule`:
    the marginal of the joint embedding, as g = 1.

    Args:
        gram: G ``n n``.
        cross: K ``n m``.
        weights: a ``*b m``.
        reg: lambda > 0.

    Raises:
        NotPositiveDefiniteError: with n, n reg and the smallest eigenvalue.
    """
    n = gram.shape[-1]
    return psd_solve(gram, cross, reg=n * reg) * weights[..., None, :]
