"""A state-space model learned from recordings: transition and observation maps by kernel ridge regression, with Gaussian residuals.

It feeds two filters: the bootstrap particle filter on the learned model (here), and the Kernel Bayes Filter whose memory is
enlarged by draws from it (`kbf.filters.kernel`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.features import nystrom, pivots
from kbf.filters.particle import BootstrapFilter
from kbf.kernels import gaussian, median_distance
from kbf.sequence import Sequence, as_sequences, observed_pairs, transitions
from kbf.ssm import normal


class RidgeMap(NamedTuple):
    """A regression with its predictive distribution: y | u ~ N(mean(u), scale(u) noise).

    Kernel ridge regression y = A^T phi(u) in r Nystrom features phi of a Gaussian kernel is Bayesian linear regression with
    noise covariance S and prior variance S / (n reg); its predictive covariance is S times
    scale(u) = 1 + phi(u)^T (Phi^T Phi + n reg I)^-1 phi(u) + (k(u, u) - phi(u)^T phi(u)) / (n reg),
    which grows where there are no training points.

    Attributes:
        landmarks: ``r d``. bandwidth: of the Gaussian kernel. coefficients: A ``r q``. offset: ``q``, the mean of y.
        factor: ``r r``, (Phi^T Phi + n reg I)^-1. noise: S ``q q``. ridge: n reg.

    References: Rasmussen and Williams (2006), equations 2.11 and 2.25.
    """

    landmarks: Tensor
    bandwidth: Tensor
    coefficients: Tensor
    offset: Tensor
    factor: Tensor
    noise: Tensor
    ridge: Tensor

    def features(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b r"]:
        """phi(u)."""
        shape = u.shape[:-1]
        phi = nystrom(partial(gaussian, bandwidth=self.bandwidth), self.landmarks)(u.reshape(-1, u.shape[-1]))
        return phi.reshape(*shape, -1)

    def predict(self, u: Float[Tensor, "*b d"]) -> tuple[Float[Tensor, "*b q"], Float[Tensor, "*b"]]:
        """The mean and the scale of the predictive distribution at u."""
        phi = self.features(u)
        outside = (1 - phi.square().sum(-1)).clamp_min(0) / self.ridge
        return self.offset + phi @ self.coefficients, 1 + ((phi @ self.factor) * phi).sum(-1) + outside

    def sample(self, u: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b q"]:
        """Draw y from the predictive distribution at u."""
        mean, scale = self.predict(u)
        root = torch.linalg.cholesky(self.noise)
        return mean + scale.sqrt()[..., None] * (normal(mean, generator) @ root.mT)

    def log_density(self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]) -> Float[Tensor, "*e"]:
        """log p(y | u), without the constant that does not depend on u; y and u broadcast."""
        return self.log_density_given(y, *self.predict(u))

    def log_density_given(
        self, y: Float[Tensor, "*b q"], mean: Float[Tensor, "*c q"], scale: Float[Tensor, "*c"]
    ) -> Float[Tensor, "*e"]:
        """The same from a mean and scale that are at hand."""
        root = torch.linalg.cholesky(self.noise)
        white = torch.linalg.solve_triangular(root, (y - mean)[..., None], upper=False)[..., 0]
        return -0.5 * white.square().sum(-1) / scale - 0.5 * y.shape[-1] * scale.log()


def fit_ridge_map(
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    *,
    factors: tuple[float, ...] = tuple(2.0 ** (k / 2) for k in range(-7, 6)),
    regs: tuple[float, ...] = tuple(10.0 ** (-k / 2) for k in range(1, 15)),
    rank: int = 256,
) -> RidgeMap:
    """Fit y on u; bandwidth and ridge minimise the leave-one-out predictive log loss, in closed form.

    With H_i = 1 - phi_i^T (Phi^T Phi + n reg I)^-1 phi_i, the residual of point i when it is left out is e_i / H_i and its scale
    is 1 / H_i; the noise is S = (1/n) sum_i H_i (e_i / H_i)(e_i / H_i)^T, and the score log det S - q mean_i log H_i.

    Args:
        u: inputs ``n d``. y: outputs ``n q``.
        factors: bandwidths to try, times the median distance of the inputs. regs: ridges to try.
        rank: most features.

    Raises:
        ValueError: fewer than ten points.
    """
    n, q = y.shape
    if n < 10:
        raise ValueError(f"a kernel ridge map needs at least 10 pairs, got {n}")
    offset = y.mean(0)
    best: tuple[float, RidgeMap] | None = None
    median = median_distance(u)
    for bandwidth in [factor * median for factor in factors]:
        kernel = partial(gaussian, bandwidth=bandwidth)
        landmarks = u[pivots(kernel, u, rank=rank, tol=1e-9)]
        phi = nystrom(kernel, landmarks)(u)
        values, vectors = torch.linalg.eigh(phi.mT @ phi)
        rotated = phi @ vectors
        target = rotated.mT @ (y - offset)
        for ridge in [n * reg for reg in regs]:
            shrunk = 1 / (values.clamp_min(0) + ridge)
            held_out = 1 - (rotated.square() @ shrunk)
            error = (y - offset - rotated @ (shrunk[:, None] * target)) / held_out[:, None]
            noise = (held_out[:, None] * error).mT @ error / n
            score = (torch.logdet(noise) - q * held_out.log().mean()).item()
            if best is None or score < best[0]:
                inverse = (vectors * shrunk) @ vectors.mT
                coefficients = vectors @ (shrunk[:, None] * target)
                best = score, RidgeMap(landmarks, bandwidth, coefficients, offset, inverse, noise, u.new_tensor(ridge))
    assert best is not None
    return best[1]


class LearnedModel(NamedTuple):
    """A `kbf.ssm.StateSpace` made of two regressions: z' on z, and x on z."""

    transition: RidgeMap
    observation: RidgeMap

    def move(self, z: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b d"]:
        """Draw z' given z."""
        return self.transition.sample(z, generator)

    def observe(self, z: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b q"]:
        """Draw x given z."""
        return self.observation.sample(z, generator)

    def log_likelihood(self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c d"]) -> Float[Tensor, "*e"]:
        """log p(x | z), up to a constant."""
        return self.observation.log_density(x, z)


def learn_model(memory: Sequence | list[Sequence]) -> LearnedModel:
    """Both maps from the transition pairs and the observed points of a memory.

    Raises:
        ValueError: too few points, or observations that are not vectors.
    """
    sequences = as_sequences(memory)
    if sequences[0].obs.ndim != 2:
        raise ValueError(f"a learned observation map needs vectors ``T q``, got observations {tuple(sequences[0].obs.shape)}")
    states = torch.cat([s.states for s in sequences])
    pairs = transitions([len(s.states) for s in sequences], states.device)
    seen, obs = observed_pairs(sequences)
    return LearnedModel(fit_ridge_map(states[pairs.source], states[pairs.target]), fit_ridge_map(seen, obs))


class LearnedParticleFilter(nn.Module):
    """Bootstrap particle filter on a model learned by kernel ridge regression: the competitor of every kernel Bayes filter.

    It assumes additive Gaussian noise around smooth maps; a kernel Bayes filter need not.
    """

    def __init__(self, particles: int = 4000, threshold: float = 0.5) -> None:
        """Arguments as in `kbf.filters.particle.BootstrapFilter`."""
        super().__init__()
        self.particles, self.threshold = particles, threshold

    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Nothing to choose beforehand: `condition` fits the maps."""

    def condition(self, memory: Sequence | list[Sequence] | None) -> BootstrapFilter:
        """Fit both maps and start from the training states."""
        if memory is None:
            raise ValueError("a learned particle filter needs a memory to learn its model from")
        sequences = as_sequences(memory)
        return BootstrapFilter(learn_model(sequences), torch.cat([s.states for s in sequences]), self.particles, self.threshold)
