"""An extended Kalman filter trained end to end: codes of images with variances and moves with hidden components learn together."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.gaussian import GaussianState, kalman_observe, kalman_predict
from kbf.filters.lstm import multi_layer
from kbf.filters.rkn import check_memory, gaussian_loss, positive, store_units
from kbf.sequence import Sequence

LEAST_VARIANCE = 1e-4
"""Of a code, in standard units: what inverts is never singular."""


class BackpropKF(nn.Module):
    """The filter of y = (z, v): the state z ``d`` in standard units, and ``hidden`` components v that nobody recorded (speeds).

    1. Code: an observation x becomes w(x) ``d`` and variances r(x) ``d``: p(x | z) is taken for N(w(x); z, diag r(x)).
    2. Predict: f(y) = A y + V tanh(W y + b) + c, linearised at the mean: F = A + V diag(1 - tanh^2) W, covariance F P F^T + Q.
    3. Update: the Kalman update with H = [I 0] and R = diag r(x) (`kbf.filters.gaussian.kalman_observe`).

    Trained on the Gaussian log likelihood of the true states, through all steps of a window.

    References: Haarnoja, Ajay, Levine, Abbeel (2016), Backprop KF: section 4; here the moves are learned, too.
    """

    z_mean: Tensor
    z_scale: Tensor
    x_mean: Tensor
    x_scale: Tensor

    def __init__(
        self, d: int, q: int | tuple[int, ...], *, hidden: int = 2, units: int = 32, encoder: nn.Module | None = None
    ) -> None:
        """An untrained net.

        Args:
            d: components of the state. q: components of an observation, or its shape.
            hidden: components of v. units: of the network inside the move.
            encoder: ``b *x`` -> ``b p`` with an attribute ``features`` = p, as those of `kbf.images.encoders`; it takes images as
                they are. None: an MLP over standardised observations.
        """
        super().__init__()
        self.shape, self.d, self.raw = (q,) if isinstance(q, int) else tuple(q), d, encoder is not None
        self.encoder = multi_layer(math.prod(self.shape), (64, 64)) if encoder is None else encoder
        features = 64 if encoder is None else int(encoder.features)  # pyright: ignore[reportArgumentType]
        self.code, self.code_variance = nn.Linear(features, d), nn.Linear(features, d)
        y = d + hidden
        self.linear, self.inner, self.outer = nn.Linear(y, y), nn.Linear(y, units), nn.Linear(units, y, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(y))
            self.linear.bias.zero_()
            self.outer.weight.mul_(0.1)
        self.log_noise = nn.Parameter(torch.full((y,), math.log(0.1)))
        self.log_start = nn.Parameter(torch.zeros(y))
        for name, size, value in (("z_mean", d, 0), ("z_scale", d, 1), ("x_mean", self.shape, 0), ("x_scale", self.shape, 1)):
            self.register_buffer(name, torch.full((size,) if isinstance(size, int) else size, float(value)))

    def prepare(self, memory: list[Sequence], generator: Generator | None = None) -> None:
        """Store mean and standard deviation of the training part's states and, without an encoder of images, of observations.

        Raises:
            ValueError: states or observations of another size than the net was built for, or no observation at all.
        """
        z, x = check_memory(memory, self.z_mean.shape, self.shape)
        store_units(self.z_mean, self.z_scale, z)
        if not self.raw:
            store_units(self.x_mean, self.x_scale, x)

    def condition(self, memory: Sequence | list[Sequence] | None = None) -> BackpropKF:
        """The net itself: it needs no memory."""
        return self

    def encode(self, obs: Shaped[Tensor, "b *x"]) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]:
        """Codes w, in standard units of the state, and their variances r."""
        e = functional.relu(self.encoder(obs if self.raw else (obs - self.x_mean) / self.x_scale))
        return self.code(e), positive(self.code_variance(e)) + LEAST_VARIANCE

    def move(self, y: Float[Tensor, "b y"]) -> tuple[Float[Tensor, "b y"], Float[Tensor, "b y y"]]:
        """f(y) and its Jacobian F."""
        u = self.inner(y).tanh()
        value = self.linear(y) + self.outer(u)
        return value, self.linear.weight + self.outer.weight @ ((1 - u.square())[..., None] * self.inner.weight)

    def init(self, batch: int, *, generator: Generator | None = None) -> GaussianState:
        """The mean of the training states, with learned variances."""
        variances = self.log_start.exp()
        return GaussianState(torch.zeros_like(variances).expand(batch, -1), variances.diag_embed().expand(batch, -1, -1))

    def predict(self, state: GaussianState, *, generator: Generator | None = None) -> GaussianState:
        """y <- f(y), linearised at the mean."""
        value, F = self.move(state.mean)
        return kalman_predict(*state, F, self.log_noise.exp().diag(), value - (F @ state.mean[..., None])[..., 0])

    def update(self, state: GaussianState, obs: Shaped[Tensor, "b *x"]) -> GaussianState:
        """Take in an observation ``b *x``."""
        return self.observe(state, obs)[0]

    def observe(self, state: GaussianState, obs: Shaped[Tensor, "b *x"]) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Take in an observation, and whether that was possible: its code and variances are finite, too."""
        w, r = self.encode(obs)
        known = (w.isfinite() & r.isfinite()).all(-1)
        updated, possible = self.take_in(state, torch.where(known[:, None], w, 0), torch.where(known[:, None], r, 1))
        return updated, possible & known

    def take_in(
        self, state: GaussianState, w: Float[Tensor, "b d"], r: Float[Tensor, "b d"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """The Kalman update with a code and its variances."""
        H = torch.eye(len(self.log_noise), dtype=w.dtype, device=w.device)[: self.d]
        return kalman_observe(*state, w, H, r.diag_embed())

    def estimate(self, state: GaussianState) -> Float[Tensor, "b d"]:
        """The mean of z, ``b d``, in the units of the data."""
        return self.z_mean + self.z_scale * state.mean[..., : self.d]

    def covariance(self, state: GaussianState) -> Float[Tensor, "b d d"]:
        """Of z, ``b d d``, in the units of the data."""
        return self.z_scale[:, None] * state.cov[..., : self.d, : self.d] * self.z_scale

    def loss(
        self,
        states: Float[Tensor, "b T d"],
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Tensor | None = None,
        *,
        burn_in: int = 0,
    ) -> Float[Tensor, ""]:
        """The negative Gaussian log likelihood of the states, in standard units.

        Raises:
            ValueError: recordings with controls.
        """
        if controls is not None:
            raise ValueError("backprop_kf takes no controls")
        w, r = (part.unflatten(0, obs.shape[:2]) for part in self.encode(obs.flatten(0, 1)))
        state, means, covariances = self.init(len(obs)), [], []
        for t in range(obs.shape[1]):
            predicted = self.predict(state)
            state = self.take_in(predicted, w[:, t], r[:, t])[0]
            if mask is not None:
                seen = mask[:, t, None]
                state = GaussianState(
                    torch.where(seen, state.mean, predicted.mean), torch.where(seen[..., None], state.cov, predicted.cov)
                )
            means.append(state.mean[:, : self.d])
            covariances.append(state.cov[:, : self.d, : self.d])
        residual = (states - self.z_mean) / self.z_scale - torch.stack(means, 1)
        return gaussian_loss(residual[:, burn_in:], torch.stack(covariances, 1)[:, burn_in:])
