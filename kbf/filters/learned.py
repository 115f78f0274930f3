"""A state-space model learned from recordings: transition and observation maps by kernel ridge regression, with Gaussian residuals.

It feeds the bootstrap particle filter on the learned model (here), and the Kernel Bayes Filter whose memory is enlarged by draws
from it (`kbf.nn.kernel_bayes`). Two particle filters more take the true dynamics and learn only what is observed: of codes or
other vectors, and of images pixel by pixel.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor, nn

from kbf.features import nystrom_whitening, pivots
from kbf.filters.base import check_vectors
from kbf.filters.particle import BootstrapFilter, in_type_of
from kbf.kernels import Kernel, arcsine, gaussian, median_distance
from kbf.linalg import cholesky, squared_distance
from kbf.manifolds import FLAT, Manifold, manifold_of
from kbf.sequence import Sequence, as_float, as_sequences, moves, observed_pairs
from kbf.ssm import StateSpace, normal


class RidgeMap(NamedTuple):
    """A regression with its predictive distribution: y | u ~ N(mean(u), scale(u) noise).

    Kernel ridge regression y = A^T phi(u) in r Nystrom features phi of a kernel is Bayesian linear regression with
    noise covariance S and prior variance S / (n reg); its predictive covariance is S times
    scale(u) = 1 + phi(u)^T (Phi^T Phi + n reg I)^-1 phi(u) + (k(u, u) - phi(u)^T phi(u)) / (n reg),
    which grows where there are no training points. With all training points as landmarks it is the predictive variance of a
    Gaussian process whose kernel is k / (n reg), in units of the noise. Computed in float64, answered in the type of u.

    On a manifold (`kbf.manifolds`: headings as unit vectors, alone or beside other components) the mean is brought back to it, and
    the noise is a displacement along it: y = exp(project(mean(u)), e), e ~ N(0, scale(u) S).

    Attributes:
        landmarks: ``r d``. whiten: ``r r``, L^-T with L L^T their Gram matrix. kernel: k, all filled in.
        coefficients: A ``r q``. offset: ``q``, the mean of y.
        factor: ``r r``, (Phi^T Phi + n reg I)^-1. ridge: n reg.
        noise: S ``k k``, k = q in flat space; or only its diagonal ``k``, where components are independent.
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
        return self.manifold.project(self.offset + phi @ self.coefficients).to(u), self.scale(u, phi).to(u)

    def scale(self, u: Float[Tensor, "*b d"], phi: Float[Tensor, "*b r"]) -> Float[Tensor, "*b"]:
        """The scale of the predictive distribution at u, whose features are phi."""
        each = u[..., None, :].to(self.landmarks)
        outside = (self.kernel(each, each)[..., 0, 0] - phi.square().sum(-1)).clamp_min(0) / self.ridge
        return 1 + ((phi @ self.factor) * phi).sum(-1) + outside

    def sample(self, u: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b q"]:
        """Draw y from the predictive distribution at u."""
        mean, scale = self.predict(u)
        white = normal(mean.new_empty(*mean.shape[:-1], len(self.noise)), generator)
        return self.displaced(mean, scale, white)

    def displaced(
        self, mean: Float[Tensor, "*b q"], scale: Float[Tensor, "*b"], white: Float[Tensor, "*b k"]
    ) -> Float[Tensor, "*b q"]:
        """The mean with noise: from ``white``, standard normal, to covariance scale S."""
        coloured = white * self.noise.sqrt().to(mean) if self.noise.ndim == 1 else white @ cholesky(self.noise).to(mean).mT
        return self.manifold.exp(mean, scale.sqrt()[..., None] * coloured)

    def expected(self, mean: Float[Tensor, "*b q"], scale: Float[Tensor, "*b"]) -> Float[Tensor, "*b q"]:
        """E y of a prediction: where a pair is a point of the circle, shorter than 1, by exp(-variance of the angle / 2)."""
        length = torch.ones_like(mean)
        for before, start in enumerate(self.manifold.circles):
            angle = start - before  # of the displacement
            length[..., start : start + 2] = (-scale * self.noise[angle, angle].to(scale) / 2).exp()[..., None]
        return mean * length

    def log_density(self, y: Float[Tensor, "*b q"], u: Float[Tensor, "*c d"]) -> Float[Tensor, "*e"]:
        """The logarithm of p(y | u) without -1/2 log det(2 pi S), which depends on neither; y and u broadcast."""
        return self.log_density_given(y, *self.predict(u))

    def log_density_given(
        self, y: Float[Tensor, "*b q"], mean: Float[Tensor, "*c q"], scale: Float[Tensor, "*c"]
    ) -> Float[Tensor, "*e"]:
        """The same from a mean and scale that are at hand."""
        residual = self.manifold.log(mean, y)
        rows = residual.reshape(-1, residual.shape[-1])  # one solve for all rows: many small ones take far longer
        white, turns = self.whitened(rows), self.whitened(self.manifold.turns(rows.shape[-1]).to(rows))
        # the density is that of all displacements that lead to y
        exponents = torch.stack([-0.5 * (white + turn).square().sum(-1).reshape(residual.shape[:-1]) / scale for turn in turns])
        return exponents.logsumexp(0) - 0.5 * rows.shape[-1] * scale.log()

    def whitened(self, rows: Float[Tensor, "m k"]) -> Float[Tensor, "m k"]:
        """Displacements in units of the noise, S^-1/2 v."""
        if self.noise.ndim == 1:
            return rows / self.noise.sqrt().to(rows)
        return torch.linalg.solve_triangular(cholesky(self.noise).mT.to(rows), rows, upper=True, left=False)

    def log_density_table(
        self, y: Float[Tensor, "n q"], mean: Float[Tensor, "m q"], scale: Float[Tensor, " m"]
    ) -> Float[Tensor, "n m"]:
        """The same for every y under every prediction; in flat space by one product of matrices, some ten times faster."""
        if self.manifold.circles:
            return self.log_density_given(y[:, None], mean, scale)
        return -0.5 * squared_distance(self.whitened(y), self.whitened(mean)) / scale - 0.5 * y.shape[-1] * scale.log()


def fit_ridge_map(
    u: Float[Tensor, "n d"],
    y: Float[Tensor, "n q"],
    *,
    factors: tuple[float, ...] = tuple(2.0 ** (k / 2) for k in range(-7, 6)),
    slopes: tuple[float, ...] = (1.0, 3.0, 10.0, 30.0, 100.0),
    biases: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0),
    regs: tuple[float, ...] = tuple(10.0 ** (-k / 2) for k in range(1, 15)),
    rank: int = 128,
    diagonal: bool = False,
) -> RidgeMap:
    """Fit y on u; kernel (Gaussian or arcsine), its numbers and the ridge minimise the leave-one-out log loss, in closed form.

    With H_i = 1 - phi_i^T (Phi^T Phi + n reg I)^-1 phi_i, the mean at point i when it is left out is y_i - e_i / H_i and its scale
    is 1 / H_i (offset, landmarks and the ridge n reg stay as they are); with v_i the displacement from that mean to y_i
    (e_i / H_i in flat space) the noise is S = (1/n) sum_i H_i v_i v_i^T, and the score log det S - k mean_i log H_i.
    Neighbouring components of y whose norm is always 1 are taken as points of the circle.

    Args:
        u: inputs ``n d``.
        y: outputs ``n q``. S is given 1e-9 of their mean variance on its diagonal: a constant component does no harm.
        factors: bandwidths of the Gaussian kernel to try, times the median distance of the inputs.
        slopes: of the arcsine kernel, over the root mean square of the inputs' norms; none tries only the Gaussian kernel.
        biases: of the arcsine kernel, for each slope.
        regs: ridges to try.
        rank: most features.
        diagonal: keep only the diagonal of S, as if the components of the noise were independent: for outputs by the thousand.

    Raises:
        ValueError: fewer than ten points, or outputs that are all the same.
    """
    n = len(y)
    u, y = u.double(), y.double()
    if n < 10:
        raise ValueError(f"a kernel ridge map needs at least 10 pairs, got {n}")
    offset, manifold = y.mean(0), FLAT if diagonal else manifold_of(y)
    k = manifold.log(y[:1], y[:1]).shape[-1]
    least = 1e-9 * y.var(0).mean()
    if not least > 0:
        raise ValueError(f"a kernel ridge map needs outputs that vary, got {n} times {offset[:4].tolist()}")
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
            if diagonal:
                noise = (held_out[:, None] * moved.square()).mean(0) + least
                spread = noise.log().sum()
            else:
                noise = (held_out[:, None] * moved).mT @ moved / n + least * torch.eye(k, dtype=y.dtype, device=y.device)
                spread = torch.logdet(noise)
            score = (spread - k * held_out.log().mean()).item()
            if best is None or score < best[0]:
                inverse = (vectors * shrunk) @ vectors.mT
                coefficients = vectors @ (shrunk[:, None] * target)
                best = (
                    score,
                    RidgeMap(landmarks, whiten, kernel, coefficients, offset, inverse, noise, u.new_tensor(ridge), manifold),
                )
    assert best is not None
    return best[1]


class Join(NamedTuple):
    """(z, u) as one vector, the input of a map: every control is shifted and scaled to spread as the states do.

    Attributes:
        shift: ``k``, the mean control. scale: ``k``, states' spread over the control's.
    """

    shift: Tensor
    scale: Tensor

    def __call__(self, z: Float[Tensor, "*b d"], u: Float[Tensor, "*c k"]) -> Float[Tensor, "*e"]:
        """``*b d+k``; u broadcasts."""
        scaled = ((u - self.shift) * self.scale).to(z)
        return torch.cat([z, scaled.expand(*z.shape[:-1], scaled.shape[-1])], -1)


def join_of(z: Float[Tensor, "m d"], u: Float[Tensor, "m k"]) -> Join:
    """That of the recorded moves; a control that never changes is left out (its scale is 0)."""
    spread, own = z.var(0, correction=0).mean().sqrt(), u.std(0, correction=0)
    return Join(u.mean(0), torch.where(own > 0, spread / own, 0))


class LearnedModel(NamedTuple):
    """A `kbf.ssm.StateSpace` made of two regressions: z' on z, or on (z, u) with a control u, and x on z."""

    transition: RidgeMap
    observation: RidgeMap
    join: Join | None = None

    @property
    def controlled(self) -> int:
        """Components of the control."""
        return 0 if self.join is None else len(self.join.shift)

    def move(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None, *, control: Tensor | None = None
    ) -> Float[Tensor, "*b d"]:
        """Draw z' given z and the control, which broadcasts."""
        return self.transition.sample(z if self.join is None or control is None else self.join(z, control), generator)

    def observe(self, z: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b q"]:
        """Draw x given z."""
        return self.observation.sample(z, generator)

    def log_likelihood(self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c d"]) -> Float[Tensor, "*e"]:
        """The logarithm of p(x | z), up to a constant."""
        return self.observation.log_density(x, z)

    def log_transition(
        self, after: Float[Tensor, "*b d"], z: Float[Tensor, "*c d"], *, control: Tensor | None = None
    ) -> Float[Tensor, "*e"]:
        """The logarithm of p(z' | z), or p(z' | z, u), up to a constant; z', z and u broadcast."""
        return self.transition.log_density(after, z if self.join is None or control is None else self.join(z, control))


def learn_model(memory: Sequence | list[Sequence]) -> LearnedModel:
    """Both maps from the transition pairs and the observed points of a memory, in float64.

    Raises:
        ValueError: too few points, observations that are not vectors, or states or observations that do not vary.
    """
    sequences = as_sequences(memory)
    check_vectors(sequences, "a learned observation map")
    source, target, u = moves(sequences)
    seen, obs = observed_pairs(sequences)
    join = None if u is None else join_of(source, u)
    inputs = source if join is None or u is None else join(source, u)
    return LearnedModel(fit_ridge_map(inputs, target), fit_ridge_map(seen, obs), join)


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


class ObservationModel(NamedTuple):
    """A `kbf.ssm.StateSpace` of given dynamics and a regression of x on z."""

    dynamics: StateSpace
    observation: RidgeMap

    def move(self, z: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b d"]:
        """Draw z' given z."""
        return self.dynamics.move(z, generator)

    def observe(self, z: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b q"]:
        """Draw x given z."""
        return self.observation.sample(z, generator)

    def log_likelihood(self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c d"]) -> Float[Tensor, "*e"]:
        """The logarithm of p(x | z), up to a constant."""
        return self.observation.log_density(x, z)


class ObservationParticleFilter(nn.Module):
    """Bootstrap particle filter with the *true* dynamics and a learned observation density p(x | z).

    x = m(z) + e in flat space, x = m(z) turned by e on the circle, e ~ N(0, scale(z) S): kernel ridge regression of the
    memory's observations (for images: their codes) on its states, with its own predictive variance (`RidgeMap`).
    """

    def __init__(self, model: StateSpace, particles: int = 4000, threshold: float = 0.5) -> None:
        """``model``: the true one, whose ``move`` is used. The others as in `kbf.filters.particle.BootstrapFilter`."""
        super().__init__()
        self.model, self.particles, self.threshold = model, particles, threshold

    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Nothing to choose beforehand: `condition` fits the map."""

    def condition(self, memory: Sequence | list[Sequence] | None) -> BootstrapFilter:
        """Fit the map and start from the training states.

        Raises:
            ValueError: no memory, fewer than ten observations, or observations that are no vectors or do not vary.
        """
        if memory is None:
            raise ValueError("a particle filter with a learned observation density needs a memory to learn it from")
        sequences = as_sequences(memory)
        check_vectors(sequences, "a learned observation map")
        states = torch.cat([s.states for s in sequences])
        model = ObservationModel(in_type_of(self.model, states), fit_ridge_map(*observed_pairs(sequences)))
        return BootstrapFilter(model, states, self.particles, self.threshold)


class PixelModel(NamedTuple):
    """A `kbf.ssm.StateSpace` of given dynamics and images x_j = m_j(z) + e_j, e_j ~ N(0, scale s_j^2), independent pixels.

    With phi the features of z, A the coefficients, o the mean image and W = diag(1/s), the sum of squares over thousands of pixels,
    ||W (x - o - A^T phi)||^2 = ||W (x - o)||^2 - 2 phi^T A W^2 (x - o) + phi^T A W^2 A^T phi, costs one product ``r r`` a particle.

    Attributes:
        dynamics: draws the moves. image: m, with the diagonal (s_j^2) as its noise; images are flattened.
        weighted: A W ``r q``. gram: A W^2 A^T ``r r``. shape: of one image.
        predictive: scale grows where the regression does not know (`RidgeMap`), instead of being 1.
    """

    dynamics: StateSpace
    image: RidgeMap
    weighted: Tensor
    gram: Tensor
    shape: tuple[int, ...]
    predictive: bool

    def move(self, z: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "*b d"]:
        """Draw z' given z."""
        return self.dynamics.move(z, generator)

    def observe(self, z: Float[Tensor, "*b d"], generator: Generator | None = None) -> Float[Tensor, "..."]:
        """Draw an image given z, ``*b *x``."""
        mean, scale = self.image.predict(z)
        scale = scale if self.predictive else torch.ones_like(scale)
        return self.image.displaced(mean, scale, normal(mean, generator)).unflatten(-1, self.shape)

    def log_likelihood(self, x: Shaped[Tensor, "..."], z: Float[Tensor, "*c d"]) -> Float[Tensor, "*e"]:
        """The logarithm of p(x | z) for images ``*b *x``, up to a constant."""
        pixels = as_float(x, self.gram.dtype).flatten(x.ndim - len(self.shape))
        white = (pixels - self.image.offset) / self.image.noise.sqrt()
        phi = self.image.features(z)
        scale = self.image.scale(z, phi) if self.predictive else phi.new_ones(())
        cross = (phi * (white @ self.weighted.mT)).sum(-1)
        square = white.square().sum(-1) - 2 * cross + ((phi @ self.gram) * phi).sum(-1)
        return (-0.5 * square / scale - 0.5 * len(self.image.noise) * scale.log()).to(z)


class PixelParticleFilter(nn.Module):
    """Bootstrap particle filter with the *true* dynamics and a likelihood of raw pixels: what is lost without an encoder.

    p(x | z) is a product over all pixels of Gaussians around a learned image m(z): kernel ridge regression of the pixels on the
    state, with the leave-one-out residual variance of each pixel (`PixelModel`). Errors of m are shared by many pixels, and the
    product counts them as so many independent ones: log likelihoods of particles differ by hundreds, and few particles have any
    weight. Where no training state is near, m is the mean image, which may explain a picture better than a wrong place does: some
    runs lose the track. With ``predictive`` the variance grows where m is not known, which keeps them on it.

    Xu et al. show a particle filter on images that "performs significantly worse [...] since likelihood evaluation is unstable in
    the high dimensional observation space, despite the true dynamics being available". They do not say what its likelihood was,
    and their published code has no particle filter. This is the textbook's choice, not known to be theirs.

    References: Xu et al. (2022), section 6.3.
    """

    def __init__(
        self, model: StateSpace, particles: int = 4000, threshold: float = 0.5, *, predictive: bool = False, rank: int = 256
    ) -> None:
        """The recipe.

        Args:
            model: the true one, whose ``move`` is used.
            particles: as in `kbf.filters.particle.BootstrapFilter`. threshold: likewise.
            predictive: use the predictive variance of the regression, not the residual variance alone.
            rank: most features of m.
        """
        super().__init__()
        self.model, self.particles, self.threshold = model, particles, threshold
        self.predictive, self.rank = predictive, rank

    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Nothing to choose beforehand: `condition` fits the images."""

    def condition(self, memory: Sequence | list[Sequence] | None) -> BootstrapFilter:
        """Fit m, choosing bandwidth and ridge by the leave-one-out log loss, and start from the training states.

        Raises:
            ValueError: no memory, fewer than ten images, or images that are all the same.
        """
        if memory is None:
            raise ValueError("a particle filter with a learned likelihood of pixels needs a memory to learn it from")
        sequences = as_sequences(memory)
        states = torch.cat([s.states for s in sequences])
        seen, obs = observed_pairs(sequences)
        pixels = as_float(obs, torch.float64).flatten(1)
        few = {"factors": (0.1, 0.2, 0.3, 0.5, 0.8), "slopes": (), "regs": (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1)}
        image = fit_ridge_map(seen, pixels, **few, rank=self.rank, diagonal=True)  # each setting costs n r q, q is in the thousands
        weighted = image.coefficients / image.noise.sqrt()
        dynamics, shape = in_type_of(self.model, states), tuple(obs.shape[1:])
        model = PixelModel(dynamics, image, weighted, weighted @ weighted.mT, shape, self.predictive)
        return BootstrapFilter(model, states, self.particles, self.threshold)
