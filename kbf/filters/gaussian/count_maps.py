"""Observation maps of counts, whose square roots have almost constant noise.

A count x of rate r is filtered as t = 2 sqrt(x + 3/8), whose variance is about 1 whatever the rate
(Anscombe, 1948). The map of t is E[t | r] with r = exp(B z + b) by Poisson regression: rates of
neurons and of arrivals are often log-linear in the state. Below a rate of 4 the variance of t
varies and E[t | r] departs from its formula, so that the latter is computed from the sum over
counts.
"""

from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kbf.densities.glm import fisher_scoring
from kbf.recording import Recording
from kbf.runtime.branches import computes_all_branches

# Log rates between which E[t | r] is interpolated; above, it is 2 sqrt(r + 1/8).
LOG_RATES = (-8.0, 4.0)
GRID_POINTS = 601
# Largest count of the sum, for rates up to exp(4).
MAX_COUNT = 200
# Largest log rate of a map.
MAX_LOG_RATE = 12.0
# Ridge of the coefficients of standardised states.
RIDGE = 0.3


def stabilised(x: Tensor, counts: Bool[Tensor, " q"]) -> Tensor:
    """Return ``*b q`` with 2 sqrt(x + 3/8) in the columns of counts.

    >>> stabilised(torch.tensor([[1.0, 1.0]]), torch.tensor([False, True]))
    tensor([[1.0000, 2.3452]])
    """
    if not computes_all_branches() and not bool(counts.any()):
        return x
    roots = 2 * (x.clamp_min(0) + 0.375).sqrt()
    return torch.where(counts.to(x.device), torch.where(x.isnan(), x, roots), x)


def log_slope(x: Float[Tensor, "*b q"], counts: Bool[Tensor, " q"]) -> Float[Tensor, "*b"]:
    """Return the log density of x over that of `stabilised` x: the sum of log dt/dx of counts."""
    known = counts.to(x.device) & x.isfinite()
    return torch.where(known, -0.5 * (x.clamp_min(0) + 0.375).log(), 0).sum(-1)


def with_stable_counts(recording: Recording, counts: Bool[Tensor, " q"]) -> Recording:
    """Return the recording with `stabilised` observations."""
    return recording._replace(obs=stabilised(recording.obs, counts))


@cache
def table() -> Float[Tensor, " m"]:
    """Return E[2 sqrt(x + 3/8)], x Poisson, at evenly spaced log rates."""
    rates = torch.linspace(*LOG_RATES, GRID_POINTS, dtype=torch.float64).exp()
    x = torch.arange(MAX_COUNT + 1, dtype=torch.float64)
    log_p = x * rates.log()[:, None] - rates[:, None] - torch.lgamma(x + 1)
    return log_p.exp() @ (2 * (x + 0.375).sqrt())


def expected_root(log_rate: Tensor) -> Tensor:
    """Return E[2 sqrt(x + 3/8)] of Poisson counts x, by interpolation."""
    low, high = LOG_RATES
    place = ((log_rate.clamp(low, high) - low) / (high - low)) * (GRID_POINTS - 1)
    below = place.floor().clamp_max(GRID_POINTS - 2)
    values = table().to(log_rate)
    at = below.long()
    inside = values[at] + (place - below) * (values[at + 1] - values[at])
    outside = 2 * (log_rate.clamp_max(MAX_LOG_RATE).exp() + 0.125).sqrt()
    return torch.where(log_rate > high, outside, inside)


class CountMap(NamedTuple):
    """t = E[2 sqrt(x + 3/8) | r] + N(0, noise), r = exp(B z + b).

    Attributes:
        B: ``q d``. b: ``q``. noise: ``q q``, the covariance of residuals.
    """

    B: Tensor
    b: Tensor
    noise: Tensor

    def __call__(self, z: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """Return the mean of t at z."""
        return expected_root(z.to(self.b) @ self.B.mT + self.b).to(z)


def fit_count_map(z: Float[Tensor, "n d"], t: Float[Tensor, "n q"]) -> CountMap:
    """Fit the map to states and `stabilised` counts, by Fisher scoring."""
    z, t = z.double(), t.double()
    centre, scale = z.mean(0), z.std(0).clamp_min(1e-9)
    phi = torch.cat([(z - centre) / scale, torch.ones_like(z[:, :1])], 1)
    x = ((t / 2).square() - 0.375).round()
    ridge, none = torch.full((1,), RIDGE).to(z), torch.zeros(()).to(z)
    W = fisher_scoring("poisson", phi, x, ridge, none)[0, 0]
    B = (W[:-1] / scale[:, None]).mT
    b = W[-1] - B @ centre
    left = t - expected_root(z @ B.mT + b)
    freedom = max(1, len(t) - phi.shape[1])
    return CountMap(B, b, left.mT @ left / freedom)
