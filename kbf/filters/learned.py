"""A state-space model learned from recordings: transition and observation maps by kernel ridge regression, with Gaussian residuals.

It feeds two filters: the bootstrap particle filter on the learned model (here), and the Kernel Bayes Filter whose memory is
enlarged by draws from it (`kbf.nn.kernel_bayes`).
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.features import nystrom_whitening, pivots
from kbf.filters.particle import BootstrapFilter
from kbf.kernels import Kernel, arcsine, gaussian, median_distance
from kbf.linalg import cholesky
from kbf.manifolds import FLAT, Manifold, manifold_of
from kbf.sequence import Sequence, as_sequences, observed_pairs, transitions
from kbf.ssm import normal


class RidgeMap(NamedTuple):
    """A regression with its predictive distribution: y | u ~ N(mean(u), scale(u) noise).

    Kernel ridge regression y = A^T phi(u) in r Nystrom features phi of a kernel is Bayesian linear regression with
    noise covariance S and prior variance S / (n reg); its predictive covariance is S times
    scale(u) = 1 + phi(u)^T (Phi^T Phi + n reg I)^-1 phi(u) + (k(u, u) - phi(u)^T phi(u)) / (n reg),
    which grows where there are no training points. With all training points as landmarks it is the predictive variance of a
    Gaussian process whose kernel is k / (n reg), in units of the noise. Computed in float64, answered in the type of u.

    On a manifold (headings as unit vectors, `kbf.manifolds`) the mean is brought back to it, and the noise is a displacement
    along it: y = exp(project(mean(u)), e), e ~ N(0, scale(u) S).

    Attributes:
        landmarks: ``r d``. whiten: ``r r``, L^-T with L L^T their Gram matrix. kernel: k, all filled in.
        coefficients: A ``r q``. offset: ``q``, the mean of y.
        factor: ``r r``, (Phi^T Phi + n reg I)^-1. noise: S ``k k``, k = q in flat space. ridge: n reg.
        manifold: where y lives.

    References: Rasmussen and Williams (2006), equations 2.11, 2.25 and 2.26.
    """

    landmarks: Tensor
    whiten: Tensor
    kernel: Kernel
    coefficients: Tensor
    offset: Tensor
    factor: Tensor
    noise: Tensor
    ridge: Tensor
    manifold: Manifold = FLAT

    def features(self, u: Float[Tensor, "*b d"]) -> Float[Tensor, "*b r"]:
        """phi(u)."""
        rows = u.reshape(-1, u.shape[-1]).to(self.landmarks)
        phi = self.kernel(rows, self.landmarks) @ self.whiten
        return phi.reshape(*u.shape[:-1], -1)

    def predict(self, u: Float[Tensor, "*b d"]) -> tuple[Float[Tensor, "*b q"], Float[Tensor, "*b"]]:
        """The mean and the scale of the predictive distribution at u."""
        phi = self.features(u)
        each = u[..., None, :].to(self.landmarks)
        outside = (self.kernel(each, each)[..., 0, 0] - phi.square().sum(-1)).clamp_min(0) / self.ridge
        mean, scale = self.offset + phi @ self.coefficients, 1 + ((phi @ self.factor) * phi).sum(-1) + outside
        return self.manifold.project(mean).to(u), scale.to(u)

    def sample(self, u: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b q"]:
        """Draw y from the predictive distribution at u."""
        mean, scale = self.predict(u)
        white = normal(mean.new_empty(*mean.shape[:-1], len(self.noise)), generator)
        return self.displaced(mean, scale, white)

    def displaced(
        self, mean: Float[Tensor, "*b q"], scale: Float[Tensor, "*b"], white: Float[Tensor, "*b k"]
    ) -> Float[Tensor, "*b q"]:
        """The mean with noise: from ``white``, standard normal, to covariance scale S."""
        root = cholesky(self.noise).to(mean)
        return self.manifold.exp(mean, scale.sqrt()[..., None] * (white @ root.mT))

    def log_density(self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]) -> Float[Tensor, "*e"]:
        """The logarithm of p(y | u) without -1/2 log det(2 pi S), which depends on neither; y and u broadcast."""
        return self.log_density_given(y, *self.predict(u))

    def log_density_given(
        self, y: Float[Tensor, "*b q"], mean: Float[Tensor, "*c q"], scale: Float[Tensor, "*c"]
    ) -> Float[Tensor, "*e"]:
        """The same from a mean and scale that are at hand."""
        residual, period = self.manifold.log(mean, y), self.manifold.period
        rows = residual.reshape(-1, residual.shape[-1])  # one solve for all rows: many small ones take far longer
        if period is not None:  # the density is that of all displacements that lead to y: three turns are enough
            turns = period * torch.tensor([[-1.0], [0.0], [1.0]]).to(rows)
            exponents = -0.5 * (rows + turns.unsqueeze(1)).square() / self.noise.to(rows)
            square = exponents.reshape(3, *residual.shape[:-1]) / scale
            return square.logsumexp(0) - 0.5 * scale.log()
        white = torch.linalg.solve_triangular(cholesky(self.noise).mT.to(rows), rows, upper=True, left=False)
        return -0.5 * white.square().sum(-1).reshape(residual.shape[:-1]) / scale - 0.5 * y.shape[-1] * scale.log()


def fit_ridge_map(
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    *,
    factors: tuple[float, ...] = tuple(2.0 ** (k / 2) for k in range(-7, 6)),
    slopes: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0),
    biases: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0),
    regs: tuple[float, ...] = tuple(10.0 ** (-k / 2) for k in range(1, 15)),
    rank: int = 128,
) -> RidgeMap:
    """Fit y on u; kernel (Gaussian or arcsine), its numbers and the ridge minimise the leave-one-out log loss, in closed form.

    With H_i = 1 - phi_i^T (Phi^T Phi + n reg I)^-1 phi_i, the mean at point i when it is left out is y_i - e_i / H_i and its scale
    is 1 / H_i (offset, landmarks and the ridge n reg stay as they are); with v_i the displacement from that mean to y_i
    (e_i / H_i in flat space) the noise is S = (1/n) sum_i H_i v_i v_i^T, and the score log det S - k mean_i log H_i.
    Pairs y of norm 1 are taken as points of the circle.

    Args:
        u: inputs ``n d``.
        y: outputs ``n q``. S is given 1e-9 of their mean variance on its diagonal: a constant component does no harm.
        factors: bandwidths of the Gaussian kernel to try, times the median distance of the inputs.
        slopes: of the arcsine kernel, over the root mean square of the inputs' norms; none tries only the Gaussian kernel.
        biases: of the arcsine kernel, for each slope.
        regs: ridges to try.
        rank: most features.

    Raises:
        ValueError: fewer than ten points, or outputs that are all the same.
    """
    n = len(y)
    u, y = u.double(), y.double()
    if n < 10:
        raise ValueError(f"a kernel ridge map needs at least 10 pairs, got {n}")
    offset, manifold = y.mean(0), manifold_of(y)
    k = manifold.log(y[:1], y[:1]).shape[-1]
    least = 1e-9 * y.var(0).mean() * torch.eye(k, dtype=y.dtype, device=y.device)
    if not least.trace() > 0:
        raise ValueError(f"a kernel ridge map needs outputs that vary, got {n} times {offset.tolist()}")
    best: tuple[float, RidgeMap] | None = None
    median, size = median_distance(u), u.square().sum(-1).mean().sqrt().item()
    kernels: list[Kernel] = [partial(gaussian, bandwidth=factor * median) for factor in factors]
    kernels += [partial(arcsine, bias=bias, slope=slope / size) for slope in slopes for bias in biases]
    for kernel in kernels:
        landmarks = u[pivots(kernel, u, rank=rank, tol=1e-6)]
        whiten = nystrom_whitening(kernel(landmarks, landmarks))
        phi = kernel(u, landmarks) @ whiten
        values, vectors = torch.linalg.eigh(phi.mT @ phi)
        rotated = phi @ vectors
        target = rotated.mT @ (y - offset)
        for ridge in [n * reg for reg in regs]:
            shrunk = 1 / (values.clamp_min(0) + ridge)
            held_out = 1 - (rotated.square() @ shrunk)
            error = (y - offset - rotated @ (shrunk[:, None] * target)) / held_out[:, None]
            moved = manifold.log(manifold.project(y - error), y)
            noise = (held_out[:, None] * moved).mT @ moved / n + least
            score = (torch.logdet(noise) - k * held_out.log().mean()).item()
            if best is None or score < best[0]:
                inverse = (vectors * shrunk) @ vectors.mT
                coefficients = vectors @ (shrunk[:, None] * target)
                best = (
                    score,
                    RidgeMap(landmarks, whiten, kernel, coefficients, offset, inverse, noise, u.new_tensor(ridge), manifold),
                )
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
        """The logarithm of p(x | z), up to a constant."""
        return self.observation.log_density(x, z)


def learn_model(memory: Sequence | list[Sequence]) -> LearnedModel:
    """Both maps from the transition pairs and the observed points of a memory, in float64.

    Raises:
        ValueError: too few points, observations that are not vectors, or states or observations that do not vary.
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
