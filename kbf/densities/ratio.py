"""Density ratios p(z | x) / p(z) as observations: the output of an encoder of images.

An encoder of images x predicts the state, its uncertainty, and the probability that the image is
not informative. Its output is a *density ratio*

    r(x, z) = p(z | x) / p(z) = pi_0(x) + sum_j pi_j(x) N(z; m_j(x), S_j(x)) / p(z),
    pi_0 + ... + pi_J = 1,

where pi_0 is the probability that x is not informative. By Bayes' rule r(x, z) = p(x | z) / p(x),
which is all that a filter requires of an observation. Because of the division by p(z), repeated
observations add no information: an image of noise has r = 1 everywhere, and ten of them in a row do
not change a belief, whereas the density p(z | x) = p(z) of a regression with a variance would move
it ten times towards common states.

The encoding of an image is a row of numbers: the mean E[z | x] ``d``, the logarithms of
pi_0..pi_J, and for each j the mean m_j ``d`` and R_j, lower triangular, with S_j^-1 = R_j^T R_j:
the logarithms of its diagonal, then the entries below it.

References: Bishop (1994), Mixture density networks, for the Gaussians; Sugiyama, Suzuki and
Kanamori (2012), for ratios.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.base import FOLDS, LOG_2PI, blocks
from kbf.runtime.errors import FitError

# States that the kernel density p(z) is centred at.
DENSITY_POINTS = 500
# Candidate bandwidths of p(z), over the standard deviation of the states: with narrower ones ratios
# are hard to learn.
WIDTHS = (0.1, 0.2, 0.4)
# Logarithm of a negligible share; finite, as all numbers of an encoding are.
LOG_NEVER = -40.0
# Share of the broad Gaussian in p(z), which bounds p(z) from below, since ratios divide by it.
BROAD = 0.1


class StateDensity(NamedTuple):
    """Kernel density p(z): Gaussians of one width at training states, and one broad Gaussian.

    Attributes:
        points: ``n d``. width: standard deviation of each, ``()``.
    """

    points: Tensor
    width: Tensor

    def log(self, z: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """log p(z), p(z) = 0.9 / n sum_i N(z; z_i, width^2 I) + 0.1 N(z; mean, variance I).

        In the type of z.
        """
        rows, points = z.reshape(-1, z.shape[-1]), self.points.to(z)
        width, middle = self.width.to(z), points.mean(0, keepdim=True)
        wide = (points.var(0, correction=0).mean() + width.square()).sqrt()
        near = log_kernels(rows, points, width).logsumexp(-1) + math.log((1 - BROAD) / len(points))
        return torch.logaddexp(
            near, log_kernels(rows, middle, wide)[:, 0] + math.log(BROAD)
        ).reshape(z.shape[:-1])


def log_kernels(
    rows: Float[Tensor, "b d"], points: Float[Tensor, "n d"], width: Float[Tensor, ""]
) -> Float[Tensor, "b n"]:
    """log N(row; point, width^2 I) of each with each."""
    apart = torch.cdist(rows, points, compute_mode="donot_use_mm_for_euclid_dist") / width
    return -0.5 * apart.square() - rows.shape[-1] * (0.5 * LOG_2PI + width.log())


def fit_state_density(states: Float[Tensor, "n d"]) -> StateDensity:
    """Fit p(z); the width has the best log score in blocked cross-validation.

    Raises:
        ValueError: fewer than two states.
    """
    n = len(states)
    if n < 2:
        raise FitError(f"a density of states needs at least 2 of them, got {n}")
    points = states[
        torch.linspace(0, n - 1, DENSITY_POINTS, device=states.device).round().long()
    ].double()
    scale = states.double().var(0, correction=0).mean().sqrt()
    scale = torch.where(scale > 0, scale, 1)
    held = [part.to(states.device) for part in blocks(DENSITY_POINTS, FOLDS)]

    def score(factor: float) -> float:
        return sum(
            StateDensity(points[~part], factor * scale).log(points[part]).sum().item()
            for part in held
        )

    return StateDensity(points, max(WIDTHS, key=score) * scale)


class Ratio(NamedTuple):
    """Parameters of a density ratio, as read from an encoding.

    Attributes:
        log_shares: ``*b J+1``, of pi_0..pi_J. centres: ``*b J d``, m_j. roots: ``*b J d d``, R_j.
    """

    log_shares: Tensor
    centres: Tensor
    roots: Tensor

    def log_gaussians(self, z: Float[Tensor, "*c d"]) -> Float[Tensor, "*e J"]:
        """log N(z; m_j, S_j); z broadcasts with the encodings."""
        white = (self.roots @ (z[..., None, :] - self.centres)[..., None])[..., 0]
        diagonal = self.roots.diagonal(dim1=-2, dim2=-1).log().sum(-1)
        return diagonal - 0.5 * white.square().sum(-1) - 0.5 * z.shape[-1] * LOG_2PI

    def log_ratio(
        self, z: Float[Tensor, "*c d"], log_p: Float[Tensor, "*c"]
    ) -> Float[Tensor, "*e"]:
        """log r(x, z), with log p(z) given."""
        parts = self.log_gaussians(z) - log_p[..., None]
        nothing = self.log_shares[..., :1].expand(*parts.shape[:-1], 1)
        return torch.cat([nothing, self.log_shares[..., 1:] + parts], -1).logsumexp(-1)


def numbers_of_one(d: int) -> int:
    """Numbers of one Gaussian in an encoding, without its share."""
    return d + d * (d + 1) // 2


def encoding_width(d: int, components: int) -> int:
    """Numbers in an encoding: the mean, J + 1 shares and J Gaussians.

    >>> encoding_width(2, components=2)
    15
    """
    return d + components + 1 + components * numbers_of_one(d)


def read_encoding(encoding: Float[Tensor, "*b w"], d: int) -> Ratio:
    """Read the density ratios of encodings, for states with d components.

    Raises:
        ValueError: a width that no number of Gaussians has.
    """
    one = numbers_of_one(d)
    components, rest = divmod(encoding.shape[-1] - d - 1, one + 1)
    if rest or components < 1:
        raise ValueError(
            f"encodings of {encoding.shape[-1]} numbers are no ratios over states of {d}"
        )
    log_shares, gaussians = encoding[..., d:].split([components + 1, components * one], -1)
    centres, entries = gaussians.unflatten(-1, (components, one)).split([d, one - d], -1)
    rows, columns = torch.tril_indices(d, d, device=encoding.device)
    lower = entries.new_zeros(*entries.shape[:-1], d, d)
    lower[..., rows, columns] = entries
    return Ratio(
        log_shares, centres, lower.tril(-1) + lower.diagonal(dim1=-2, dim2=-1).exp().diag_embed()
    )


def mixed(
    encodings: list[Float[Tensor, "*b w"]], d: int, *, alone: int | None = None
) -> Float[Tensor, "*b v"]:
    """Return the encoding of the equal mixture of several, with all of their Gaussians.

    With ``alone=k`` only member k has a share, in an encoding of the same width.
    """
    one = numbers_of_one(d)
    components = (encodings[0].shape[-1] - d - 1) // (one + 1)
    means, shares, gaussians = zip(
        *(encoding.split([d, components + 1, components * one], -1) for encoding in encodings),
        strict=True,
    )
    if alone is None:
        log_shares = torch.stack(shares, -2) - math.log(len(encodings))
        nothing = log_shares[..., 0].logsumexp(-1, keepdim=True)
        return torch.cat(
            [torch.stack(means).mean(0), nothing, log_shares[..., 1:].flatten(-2), *gaussians], -1
        )
    never = [torch.full_like(share[..., 1:], LOG_NEVER) for share in shares]
    never[alone] = shares[alone][..., 1:]
    return torch.cat([means[alone], shares[alone][..., :1], *never, *gaussians], -1)


class RatioDensity(NamedTuple):
    """Density ratios as the observations of a model: a likelihood up to p(x), without samples.

    ``density``: p(z).
    """

    density: StateDensity

    def log_density(
        self, y: Float[Tensor, "*b w"], u: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log r(x, z) of the encoding y of x, at z = u; they broadcast."""
        return read_encoding(y.to(u), u.shape[-1]).log_ratio(u, self.density.log(u))

    def sample(self, u: Float[Tensor, "*b d"], generator: Generator | None = None) -> Tensor:
        """Raises a ValueError: a density ratio is not a distribution of images."""
        raise ValueError("a density ratio comes with an image: no image can be drawn from it")
