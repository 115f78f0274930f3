"""Particle filters of learned models.

`LearnedParticleFilter` learns transition and observation. The others use the true dynamics with a
learned observation density.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor

from kbf.densities.ridge import RidgeMap, fit_ridge_map
from kbf.densities.selected import DensityModel
from kbf.filters.particle.bootstrap import BootstrapFilter, ParticleRecipe, in_type_of
from kbf.recording import Recording, as_float, as_recordings, check_vectors, observed_pairs
from kbf.ssm import StateSpace, normal


class LearnedParticleFilter(DensityModel):
    """Bootstrap particle filter of the learned model that the Kernel Bayes Filter simulates from.

    It weighs particles by the learned observation density, where the Kernel Bayes Filter only
    requires draws. With ``allow_missing_sensors`` each sensor may be missing at any step, and the
    density is that of the available sensors (`kbf.densities.per_sensor`).
    """

    def __init__(
        self,
        particles: int = 4000,
        threshold: float = 0.5,
        transition: str | None = None,
        observation: str | None = None,
    ) -> None:
        """Store the settings.

        Args:
            particles, threshold: as in `kbf.filters.particle.bootstrap.BootstrapFilter`.
            transition, observation: as in `kbf.densities.selected.SelectedDensities`.
        """
        super().__init__(transition, observation)
        self.particles, self.threshold = particles, threshold

    def fit(self, memory: Recording | list[Recording] | None) -> BootstrapFilter:
        """Return the filter of the fitted model that starts from the training states."""
        recordings = as_recordings(memory, allow_missing_sensors=self.allow_missing_sensors)
        model = self.learned(recordings).merged()
        return BootstrapFilter(
            model, torch.cat([s.states for s in recordings]), self.particles, self.threshold
        )


class ObservationModel(NamedTuple):
    """A `kbf.ssm.StateSpace` of given dynamics and a regression of x on z."""

    dynamics: StateSpace
    observation: RidgeMap

    def move(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b d"]:
        """Draw z' given z."""
        return self.dynamics.move(z, generator)

    def observe(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw x given z."""
        return self.observation.sample(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """Return log p(x | z), up to a constant."""
        return self.observation.log_density(x, z)


class ObservationParticleFilter(ParticleRecipe):
    """Bootstrap particle filter of the *true* dynamics and a learned observation density.

    x = m(z) + e in flat space, x = m(z) turned by e on the circle, e ~ N(0, scale(z) S): kernel
    ridge regression of the observations of the memory (for images: their encodings) on its states,
    with its predictive variance (`RidgeMap`).
    """

    def state_space(self, recordings: list[Recording], states: Float[Tensor, "n d"]) -> StateSpace:
        """Return the true dynamics with the fitted map.

        Raises:
            ValueError: fewer than ten observations, or observations that are not vectors or do not
                vary.
        """
        check_vectors(recordings, "a learned observation map")
        return ObservationModel(
            in_type_of(self.model, states), fit_ridge_map(*observed_pairs(recordings))
        )


class PixelModel(NamedTuple):
    """A `kbf.ssm.StateSpace` of given dynamics and images with independent pixels.

    Pixel j is x_j = m_j(z) + e_j, e_j ~ N(0, scale s_j^2). With phi the features of z, A the
    coefficients, o the mean image and W = diag(1/s), the sum of squares over all pixels is

        ||W (x - o - A^T phi)||^2
            = ||W (x - o)||^2 - 2 phi^T A W^2 (x - o) + phi^T A W^2 A^T phi,

    which costs one product ``r r`` per particle.

    Attributes:
        dynamics: draws the moves.
        image: m, of flattened images, with noise s_j^2.
        weighted: A W ``r q``. gram: A W^2 A^T ``r r``.
        shape: of one image.
        predictive: scale is the predictive variance of `RidgeMap`; False: scale is 1.
    """

    dynamics: StateSpace
    image: RidgeMap
    weighted: Tensor
    gram: Tensor
    shape: tuple[int, ...]
    predictive: bool

    def move(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b d"]:
        """Draw z' given z."""
        return self.dynamics.move(z, generator)

    def observe(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "..."]:
        """Draw an image given z, ``*b *x``."""
        mean, scale = self.image.predict(z)
        scale = scale if self.predictive else torch.ones_like(scale)
        return self.image.displaced(mean, scale, normal(mean, generator)).unflatten(-1, self.shape)

    def log_likelihood(
        self, x: Shaped[Tensor, "..."], z: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """Return log p(x | z) for images ``*b *x``, up to a constant."""
        pixels = as_float(x, self.gram.dtype).flatten(x.ndim - len(self.shape))
        white = (pixels - self.image.offset) / self.image.noise.sqrt()
        phi = self.image.features(z)
        scale = self.image.scale(z, phi) if self.predictive else phi.new_ones(())
        cross = (phi * (white @ self.weighted.mT)).sum(-1)
        square = white.square().sum(-1) - 2 * cross + ((phi @ self.gram) * phi).sum(-1)
        return (-0.5 * square / scale - 0.5 * len(self.image.noise) * scale.log()).to(z)


class PixelParticleFilter(ParticleRecipe):
    """Bootstrap particle filter with the *true* dynamics and a likelihood of raw pixels.

    A baseline without an encoder. p(x | z) is a product over pixels of Gaussians around a learned
    image m(z): kernel ridge regression of the pixels on the state, with the leave-one-out residual
    variance of each pixel (`PixelModel`). Many pixels share the errors of m, but the product treats
    them as independent: log likelihoods of particles differ by hundreds, and few particles have any
    weight. Far from all training states m is the mean image, which may explain an image better than
    a wrong state does, so that some runs diverge. With ``predictive`` the variance is larger where
    m is uncertain, which prevents this.

    Xu et al. report a particle filter on images that "performs significantly worse [...] since
    likelihood evaluation is unstable in the high dimensional observation space, despite the true
    dynamics being available". The paper does not define its likelihood, and the published code
    contains no particle filter. The likelihood here is the textbook choice.

    References: Xu et al. (2022), section 6.3.
    """

    def __init__(
        self,
        model: StateSpace,
        particles: int = 4000,
        threshold: float = 0.5,
        *,
        predictive: bool = False,
        rank: int = 256,
    ) -> None:
        """Store the settings.

        Args:
            model: the true model, whose ``move`` is used.
            particles, threshold: as in `kbf.filters.particle.bootstrap.BootstrapFilter`.
            predictive: use the predictive variance of the regression, not only the residual
                variance.
            rank: number of features of m, at most.
        """
        super().__init__(model, particles, threshold)
        self.predictive, self.rank = predictive, rank

    def state_space(self, recordings: list[Recording], states: Float[Tensor, "n d"]) -> StateSpace:
        """Return the true dynamics with the fitted m.

        Bandwidth and ridge of m minimise the leave-one-out log loss.

        Raises:
            ValueError: fewer than ten images, or images that are all equal.
        """
        seen, obs = observed_pairs(recordings)
        pixels = as_float(obs, torch.float64).flatten(1)
        few = {
            "factors": (0.1, 0.2, 0.3, 0.5, 0.8),
            "slopes": (),
            "regs": (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1),
        }
        # few settings: each costs n r q operations, with q in the thousands
        image = fit_ridge_map(seen, pixels, **few, rank=self.rank, diagonal=True)
        weighted = image.coefficients / image.noise.sqrt()
        dynamics, shape = in_type_of(self.model, states), tuple(obs.shape[1:])
        return PixelModel(dynamics, image, weighted, weighted @ weighted.mT, shape, self.predictive)
