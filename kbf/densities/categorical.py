"""Multinomial logistic density of categories: values without an order, such as rooms.

Each component c of y is one of its levels, with probabilities softmax_k(eta_ck(u)), eta linear in
kernel features of u; components are independent given u. The coefficients W are those of the
largest log likelihood - ridge / 2 |W|^2; bandwidth and ridge are those of the best held-out log
score. A value that was not among the levels has probability 0: a filter rejects it.

References: Bohning (1992), Multinomial logistic regression algorithm: the fixed bound of the
Hessian that `ascend` climbs by.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.densities.base import Candidate, Features, ParametricDensity, pick, select_features
from kbf.runtime.deadline import check_deadline
from kbf.runtime.errors import FitError, fit_errors

# Levels of a component: two are 0 and 1 (`bernoulli`), and of many each is observed too rarely.
FEWEST_LEVELS = 3
MOST_LEVELS = 12
# Candidate bandwidths, over the median distance of the inputs.
FACTORS = (0.5, 1.0)
# Candidate ridges.
RIDGES = (0.1, 1.0, 10.0)
# Steps of the ascent of the selected density.
ROUNDS = 150
# Steps of the ascent of candidates.
FIRST_ROUNDS = 50


@dataclass(frozen=True, eq=False)
class CategoricalDensity(ParametricDensity):
    """p(y | u) = prod_c softmax(eta_c(u)) at the level of y_c; 0 where y_c is none of its levels.

    Attributes:
        features: phi, with a constant; p of them.
        coefficients: W ``p s``, of all levels of all components, one component behind the other.
        levels: ``s``, their values. sizes: levels of each component, q of them, of sum s.
    """

    features: Features
    coefficients: Tensor
    levels: Tensor
    sizes: tuple[int, ...]

    def parameters(self, u: Float[Tensor, "*b d"]) -> tuple[Float[Tensor, "*b k"], ...]:
        """Log probabilities of the levels of each component."""
        eta = self.features.times(u, self.coefficients).to(u)
        return tuple(part.log_softmax(-1) for part in eta.split(self.sizes, -1))

    def values(self, like: Tensor) -> tuple[Float[Tensor, " k"], ...]:
        """The levels of each component."""
        return self.levels.to(like).split(self.sizes)

    def given(
        self, y: Float[Tensor, "*b q"], parameters: tuple[Tensor, ...]
    ) -> Float[Tensor, "*e"]:
        """Return `log_density` from the log probabilities."""
        found = [
            torch.where(
                (column[..., None] - levels).abs() < 1e-3 * gap(levels), share, -torch.inf
            ).amax(-1)
            for column, share, levels in zip(y.unbind(-1), parameters, self.values(y), strict=True)
        ]
        return torch.stack(torch.broadcast_tensors(*found)).sum(0)

    def sample(
        self, u: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw y given u."""
        pairs = zip(self.parameters(u), self.values(u), strict=True)
        return torch.stack([levels[pick(share, generator)] for share, levels in pairs], -1)

    def mean(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q"]:
        """E[y | u] of the numbers that the categories are written as."""
        pairs = zip(self.parameters(u), self.values(u), strict=True)
        return torch.stack([share.exp() @ levels for share, levels in pairs], -1)

    def covariance(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b q q"]:
        """Cov[y | u] of the same numbers."""
        pairs = zip(self.parameters(u), self.values(u), strict=True)
        second = torch.stack([share.exp() @ levels.square() for share, levels in pairs], -1)
        return (second - self.mean(u).square()).diag_embed()


def gap(levels: Float[Tensor, " k"]) -> Float[Tensor, ""]:
    """The least distance of two levels."""
    return levels.diff().min() if len(levels) > 1 else torch.ones_like(levels[0])


def ascend(
    phi: Float[Tensor, "n p"],
    y: Float[Tensor, "n s"],
    sizes: tuple[int, ...],
    ridges: Float[Tensor, " g"],
    rounds: int = ROUNDS,
) -> Float[Tensor, "g p s"]:
    """Return W of the largest penalised log likelihood for each ridge.

    ``y`` is 1 at the level that is observed, else 0.

    The Hessian is bounded below by -H, H = Phi^T Phi / 2 + ridge, so that a step H^-1 gradient does
    not decrease the likelihood; momentum is added to the steps.
    """
    shrink = ridges[:, None].repeat(1, phi.shape[1])
    shrink[:, -1] = 1e-6  # the constant
    factor = torch.linalg.cholesky(
        0.5 * phi.mT @ phi + torch.diag_embed(shrink) + 1e-8 * torch.eye(phi.shape[1]).to(phi)
    )
    W = torch.zeros(len(ridges), phi.shape[1], y.shape[1]).to(phi)
    W[:, -1] = (y.mean(0) + 1e-3).log()
    before = W
    for k in range(rounds):
        check_deadline()
        ahead = W + k / (k + 3) * (W - before)
        p = torch.cat([part.softmax(-1) for part in (phi @ ahead).split(sizes, -1)], -1)
        before, W = (
            W,
            ahead + torch.cholesky_solve(phi.mT @ (y - p) - shrink[..., None] * ahead, factor),
        )
        if float((W - before).abs().max()) < 1e-5:
            break
    return W


@fit_errors()
def fit_categories(
    u: Float[Tensor, "n d"], y: Float[Tensor, "n q"], *, rank: int = 48
) -> Candidate:
    """Fit the density, with the held-out log score of each point.

    Raises:
        ValueError: a component of more than `MOST_LEVELS` levels.
    """
    columns = [column.unique(return_inverse=True) for column in y.unbind(1)]
    sizes = tuple(len(levels) for levels, _ in columns)
    if max(sizes) > MOST_LEVELS:
        raise FitError(f"more than {MOST_LEVELS} categories")
    seen = torch.cat(
        [torch.nn.functional.one_hot(at, len(levels)).to(y) for levels, at in columns], 1
    )
    reg = torch.tensor(RIDGES).to(y)

    def score(phi: Tensor, out: Tensor) -> Tensor:
        eta = phi[out] @ ascend(phi[~out], seen[~out], sizes, reg, FIRST_ROUNDS)
        log_p = torch.cat([part.log_softmax(-1) for part in eta.split(sizes, -1)], -1)
        return (log_p * seen[out]).sum(-1)

    held_out, features, k = select_features(u, FACTORS, rank, score)
    levels = torch.cat([levels for levels, _ in columns])
    coefficients = ascend(features(u), seen, sizes, reg[k : k + 1])[0]
    return Candidate(CategoricalDensity(features, coefficients, levels, sizes), held_out)
