"""Base class of filters trained end to end.

An encoder turns observations into encodings w(x) with variances r(x), a filter runs on these, and
all parameters are fitted to the log likelihood of the true states.
"""

import math
from collections.abc import Sequence
from typing import Any, Generic, cast

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.protocols import S, where
from kbf.recording import ENCODE_IMAGES, Recording, as_recordings

# Smallest variance of an encoding or a read-out, in standard units.
#
# The likelihood is unbounded where a variance may vanish.
LEAST_VARIANCE = 1e-4


class Standardised(nn.Module):
    """A network with the mean and scale of states, observations and controls as buffers.

    Attributes:
        shape: of one observation.
        raw: observations go to the encoder as they are, as images do.
        controlled: k, components of a control; 0 for recordings without controls.
    """

    raw: bool

    def register_units(self, d: int, q: int | tuple[int, ...], controls: int) -> None:
        """Register the buffers, with mean 0 and scale 1."""
        self.shape: tuple[int, ...] = (q,) if isinstance(q, int) else tuple(q)
        self.controlled: int = controls
        self.z_mean: Tensor = nn.Buffer(torch.zeros(d))
        self.z_scale: Tensor = nn.Buffer(torch.ones(d))
        self.x_mean: Tensor = nn.Buffer(torch.zeros(self.shape))
        self.x_scale: Tensor = nn.Buffer(torch.ones(self.shape))
        if controls:
            self.u_mean: Tensor = nn.Buffer(torch.zeros(controls))
            self.u_scale: Tensor = nn.Buffer(torch.ones(controls))

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Store mean and standard deviation of states, controls and, unless raw, observations.

        Each component of a vector has its own scale; the pixels of an image share one. Constant
        components keep the scale 1.

        Raises:
            ValueError: states, observations or controls of another size than the network was built
                for, or no observation at all.
        """
        z, x = check_memory(memory, self.z_mean.shape, self.shape)
        u = controls_of(memory, self.controlled)
        store_units(self.z_mean, self.z_scale, z)
        if not self.raw:
            store_units(self.x_mean, self.x_scale, x)
        if u is not None:
            store_units(self.u_mean, self.u_scale, u)

    def fit(self, memory: Recording | list[Recording] | None = None) -> Any:
        """Return the network itself: it does not depend on a memory."""
        return self

    def standard(self, control: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
        """Return controls in standard units, in the type of the network."""
        return ((control - self.u_mean) / self.u_scale).to(self.u_mean)

    def encoder_input(self, obs: Shaped[Tensor, "b *x"]) -> Shaped[Tensor, "b *x"]:
        """Return observations as the encoder takes them: in standard units, or images unchanged.

        Numbers get the type of the network: a float32 network takes float64 observations.
        """
        x = obs if self.raw else (obs - self.x_mean) / self.x_scale
        return x.to(self.x_mean) if x.is_floating_point() else x


class EndToEndFilter(Standardised, Generic[S]):
    """An encoder with two heads, w(x) and its variances r(x), and a filter defined by a subclass.

    A subclass defines ``init``, ``predict``, ``take_in`` (the update with w and r), ``mean`` and
    ``spread``. All parameters are fitted to the log likelihood of the true states (``log_density``,
    by default Gaussian) through all steps of a window (`loss`). A move may depend on a control u
    ``k`` in standard units; without a control it uses their mean.
    """

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        encodings: int,
        encoder: nn.Module | None = None,
        controls: int = 0,
    ) -> None:
        """Initialise an untrained network.

        Args:
            d: components of the state.
            q: components of an observation, or its shape.
            encodings: m, components of w and r.
            encoder: ``b *x`` -> ``b p`` with an attribute ``features`` = p, as those of
                `kbf.images.encoders`; it receives images as they are. None: an MLP over
                standardised observations.
            controls: k, components of a control; 0 for recordings without controls.
        """
        super().__init__()
        self.register_units(d, q, controls)
        self.raw: bool = encoder is not None
        self.encoder: nn.Module = (
            multi_layer(math.prod(self.shape), (64, 64)) if encoder is None else encoder
        )
        features = 64 if encoder is None else int(encoder.features)  # pyright: ignore[reportArgumentType]
        self.code: nn.Linear = nn.Linear(features, encodings)
        self.encoding_variance: nn.Linear = nn.Linear(features, encodings)

    def encode(
        self, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[Float[Tensor, "b m"], Float[Tensor, "b m"]]:
        """Return encodings w and their variances r, at least `LEAST_VARIANCE`."""
        e = functional.relu(self.encoder(self.encoder_input(obs)))
        return self.code(e), positive(self.encoding_variance(e)) + LEAST_VARIANCE

    def init(self, batch: int, *, generator: Generator | None = None) -> S:
        """Return the initial state of each element of the batch."""
        raise NotImplementedError

    def predict(
        self,
        state: S,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> S:
        """Return the state one step later, given the control if there is one."""
        raise NotImplementedError

    def acted(self, control: Float[Tensor, "b k"] | None, batch: int) -> Float[Tensor, "b k"]:
        """Return the control in standard units; zeros without one."""
        if control is None or self.controlled == 0:
            return self.z_mean.new_zeros(batch, self.controlled)
        return self.standard(control)

    def take_in(self, state: S, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]) -> S:
        """Return the state updated with an encoding and its variances."""
        raise NotImplementedError

    def mean(self, state: S) -> Float[Tensor, "*b d"]:
        """Return the mean of z, in standard units."""
        raise NotImplementedError

    def spread(self, state: S) -> Float[Tensor, "*b d d"]:
        """Return the covariance of z, in standard units."""
        raise NotImplementedError

    def log_density(self, state: S, z: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        """Return log p(z | state) = log N(z; mean, spread), in standard units."""
        return gaussian_log_density(z - self.mean(state), self.spread(state))

    def individual_loss(
        self, z: Float[Tensor, "n d"], w: Float[Tensor, "n m"], r: Float[Tensor, "n m"]
    ) -> Tensor | float:
        """Return a further loss of encodings and the states they belong to; 0 by default."""
        return 0.0

    def update(self, state: S, obs: Shaped[Tensor, "b *x"]) -> S:
        """Return the state updated with an observation ``b *x``."""
        return self.take_in(state, *self.encode(obs))

    def estimate(self, state: S) -> Float[Tensor, "b d"]:
        """Return the mean, ``b d``, in the units of the data."""
        return self.z_mean + self.z_scale * self.mean(state)

    def covariance(self, state: S) -> Float[Tensor, "b d d"]:
        """Return the covariance, ``b d d``, in the units of the data."""
        return self.z_scale[:, None] * self.spread(state) * self.z_scale

    def loss(
        self,
        states: Float[Tensor, "b T d"],
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Float[Tensor, "b T k"] | None = None,
        *,
        burn_in: int = 0,
    ) -> Float[Tensor, ""]:
        """Return -log p(z | state) of the true states, in standard units, averaged over steps.

        All images are encoded at once.

        Raises:
            ValueError: controls of another size than the network was built for.
        """
        given = 0 if controls is None else controls.shape[-1]
        if given != self.controlled:
            raise ValueError(wrong_controls(self.controlled, given))
        w, r = (part.unflatten(0, obs.shape[:2]) for part in self.encode(obs.flatten(0, 1)))
        state, seen = self.init(len(obs)), []
        for t in range(obs.shape[1]):
            predicted = self.predict(state, control=None if controls is None else controls[:, t])
            state = self.take_in(predicted, w[:, t], r[:, t])
            state = state if mask is None else where(mask[:, t], state, predicted)
            seen.append(state)
        every = cast(
            S, type(state)(*(torch.stack(parts, 1) for parts in zip(*seen[burn_in:], strict=True)))
        )
        z = (states - self.z_mean) / self.z_scale
        seen_at = slice(None) if mask is None else mask.flatten()
        individual = self.individual_loss(*(part.flatten(0, 1)[seen_at] for part in (z, w, r)))
        return individual - self.log_density(every, z[:, burn_in:]).mean()


def check_memory(
    memory: list[Recording], d: torch.Size, q: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Return all states and observations of the recordings that a network is trained on.

    Raises:
        ValueError: sizes other than d and q, or no observation at all.
    """
    recordings = as_recordings(memory)
    z = torch.cat([s.states for s in recordings])
    x = torch.cat([s.obs if s.mask is None else s.obs[s.mask] for s in recordings])
    if z.shape[1:] != d or x.shape[1:] != q or len(x) == 0:
        raise ValueError(
            f"the network is built for states {tuple(d)} and observations {q}, "
            f"the memory has {tuple(z.shape[1:])} and {len(x)} observations {tuple(x.shape[1:])}"
            + (f"; {ENCODE_IMAGES}" if x.ndim > 2 and len(q) == 1 else "")
        )
    return z, x


def controls_of(memory: list[Recording], k: int) -> Float[Tensor, "n k"] | None:
    """Return all controls of the recordings that a network is trained on; None where k is 0.

    Raises:
        ValueError: controls with another number of components than k.
    """
    controls = [s.controls for s in as_recordings(memory) if s.controls is not None]
    width = controls[0].shape[1] if controls else 0
    if width != k:
        raise ValueError(wrong_controls(k, width))
    return torch.cat(controls) if controls else None


def wrong_controls(k: int, given: int) -> str:
    """Return the message of an error about the number of controls."""
    return (
        f"the network is built for {k} controls (model.net.controls), the recordings have {given}"
    )


def store_units(mean: Tensor, scale: Tensor, values: Shaped[Tensor, "n *x"]) -> None:
    """Write mean and standard deviation into two buffers.

    The pixels of an image share one scale. Constant components have the scale 1.
    """
    variance = values.var(0, correction=0)
    spread = (variance if variance.ndim == 1 else variance.mean()).sqrt()
    mean.copy_(values.mean(0))
    scale.copy_(torch.where(spread > 0, spread, 1))


def multi_layer(q: int, sizes: Sequence[int]) -> nn.Sequential:
    """Return an MLP: flatten, then linear layers of the given widths with ReLU between them."""
    layers: list[nn.Module] = [nn.Flatten(1)]
    for k, (a, b) in enumerate(zip([q, *sizes[:-1]], sizes, strict=True)):
        layers += [nn.ReLU(), nn.Linear(a, b)] if k else [nn.Linear(a, b)]
    return nn.Sequential(*layers)


def gaussian_log_density(
    residual: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]
) -> Float[Tensor, "*b"]:
    """Return log N(residual; 0, covariance)."""
    L = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(L, residual[..., None], upper=False)[..., 0]
    log_volume = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    constant = 0.5 * residual.shape[-1] * math.log(2 * math.pi)
    return -0.5 * white.square().sum(-1) - log_volume - constant


def mean_and_variance_loss(
    residual: Float[Tensor, "b T d"], log_variance: Float[Tensor, "b T d"]
) -> Float[Tensor, ""]:
    """Return the squared error plus the log score of the variances, averaged over steps.

    The score is that of the current residuals without their gradient: variances change no mean.

    References: Nix and Weigend (1994).
    """
    log_score = 0.5 * (residual.detach().square() * (-log_variance).exp() + log_variance)
    return (residual.square() + log_score).sum(-1).mean()


def positive(x: Tensor) -> Tensor:
    """Return elu(x) + 1, which is positive, and linear above 0."""
    return functional.elu(x) + 1


def inverse_positive(y: float) -> float:
    """Return the x with elu(x) + 1 = y."""
    return math.log(y) if y < 1 else y - 1
