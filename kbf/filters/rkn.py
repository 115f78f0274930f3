"""The Recurrent Kalman Network: a Kalman filter over a latent space that is learned together with its images' codes.

One step is a Kalman filter's on a state of 2 m numbers, the upper m of which are observed as codes with learned variances. Its
covariance has three diagonals, so that nothing is inverted and a step costs O(m b) products.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.lstm import multi_layer
from kbf.sequence import Sequence, as_sequences


class FactorisedCovariance(NamedTuple):
    """[[diag upper, diag between], [diag between, diag lower]], ``*b m`` each: u, l and s of the paper."""

    upper: Tensor
    lower: Tensor
    between: Tensor


class RKNState(NamedTuple):
    """Mean ``b 2m`` and the three diagonals of the covariance ``b m``."""

    mean: Tensor
    upper: Tensor
    lower: Tensor
    between: Tensor


class RKNFilter(nn.Module):
    """The Recurrent Kalman Network as a filter of its own.

    1. Code: an image x becomes w(x) ``m``, of length 1, and variances r(x) ``m``.
    2. Predict: A = sum_k softmax(c(z))_k A_k, each A_k of four blocks with a band; z <- A z, S <- A S A^T + Q, of which the three
       diagonals are kept (`predict_factorised`).
    3. Update: a Kalman update with H = [I 0] and R = diag r, exact for such S (`update_factorised`).
    4. Read out: the state from z, by an MLP, and its variances from the three diagonals, by another.

    All is trained end to end on the Gaussian log likelihood of the true states.

    References: Becker, Pandya, Gebhardt, Zhao, Taylor, Neumann (2019), Recurrent Kalman Networks: section 4, equations 2 to 8.
    """

    z_mean: Tensor
    z_scale: Tensor
    band: Tensor
    x_mean: Tensor
    x_scale: Tensor

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        *,
        m: int = 15,
        matrices: int = 15,
        bandwidth: int = 3,
        hidden: int = 30,
        start: float = 10.0,
        encoder: nn.Module | None = None,
    ) -> None:
        """An untrained net.

        Args:
            d: components of the state. q: components of an observation, or its shape.
            m: of a code; the latent state has 2 m. matrices: K, how many A_k. bandwidth: of their blocks, to each side.
            hidden: units of the read-outs. start: variance of the latent state before anything was seen.
            encoder: ``b *x`` -> ``b p`` with an attribute ``features`` = p, as those of `kbf.images.encoders`; it takes images as
                they are. None: an MLP over standardised observations.
        """
        super().__init__()
        self.shape, self.m, self.start = (q,) if isinstance(q, int) else tuple(q), m, start
        self.raw = encoder is not None
        width = math.prod(self.shape)
        self.encoder = multi_layer(width, (64, 64)) if encoder is None else encoder
        features = 64 if encoder is None else int(encoder.features)  # pyright: ignore[reportArgumentType]
        self.code, self.code_variance = nn.Linear(features, m), nn.Linear(features, m)
        eye = torch.eye(m)
        first = torch.stack(
            [eye, 0.2 * eye, -0.2 * eye, eye]
        )  # upper from upper, upper from lower, lower from upper, lower from lower
        self.blocks = nn.Parameter(first.expand(matrices, 4, m, m).clone())
        self.mixing = nn.Linear(2 * m, matrices)
        self.noise = nn.Parameter(torch.full((2, m), inverse_positive(0.1)))
        self.readout = nn.Sequential(nn.Linear(2 * m, hidden), nn.Tanh(), nn.Linear(hidden, d))
        self.readout_variance = nn.Sequential(nn.Linear(3 * m, hidden), nn.Tanh(), nn.Linear(hidden, d))
        self.register_buffer("band", (torch.arange(m)[:, None] - torch.arange(m)).abs() <= bandwidth)
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

    def condition(self, memory: Sequence | list[Sequence] | None = None) -> RKNFilter:
        """The net itself: it needs no memory."""
        return self

    def encode(self, obs: Shaped[Tensor, "b *x"]) -> tuple[Float[Tensor, "b m"], Float[Tensor, "b m"]]:
        """Codes w and their variances r."""
        e = self.encoder(obs if self.raw else (obs - self.x_mean) / self.x_scale)
        e = functional.relu(e)
        return functional.normalize(self.code(e), dim=-1), positive(self.code_variance(e))

    def init(self, batch: int, *, generator: Generator | None = None) -> RKNState:
        """z = 0 with a wide covariance: the first observation says nearly all."""
        zero = self.z_mean.new_zeros(batch, self.m)
        return RKNState(torch.cat([zero, zero], -1), zero + self.start, zero + self.start, zero)

    def predict(self, state: RKNState, *, generator: Generator | None = None) -> RKNState:
        """z <- A(z) z, and the covariance with it."""
        weights = self.mixing(state.mean).softmax(-1)
        A = torch.einsum("bk,kpij->bpij", weights, self.blocks * self.band)
        mean, covariance = predict_factorised(state.mean, FactorisedCovariance(*state[1:]), A, positive(self.noise))
        return RKNState(mean, *covariance)

    def update(self, state: RKNState, obs: Shaped[Tensor, "b *x"]) -> RKNState:
        """Take in an observation ``b *x``."""
        return self.take_in(state, *self.encode(obs))

    def take_in(self, state: RKNState, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]) -> RKNState:
        """The update with a code and its variances."""
        mean, covariance = update_factorised(state.mean, FactorisedCovariance(*state[1:]), w, r)
        return RKNState(mean, *covariance)

    def estimate(self, state: RKNState) -> Float[Tensor, "b d"]:
        """The read-out, ``b d``, in the units of the data."""
        return self.z_mean + self.z_scale * self.readout(state.mean)

    def covariance(self, state: RKNState) -> Float[Tensor, "b d d"]:
        """Diagonal, in the units of the data."""
        return (self.z_scale.square() * self.variances(state)).diag_embed()

    def variances(self, state: RKNState) -> Float[Tensor, "*b d"]:
        """Of the read-out, in standard units."""
        return positive(self.readout_variance(torch.cat(state[1:], -1))) + LEAST_VARIANCE

    def loss(
        self,
        states: Float[Tensor, "b T d"],
        obs: Shaped[Tensor, "b T *x"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Tensor | None = None,
        *,
        burn_in: int = 0,
    ) -> Float[Tensor, ""]:
        """The negative Gaussian log likelihood of the states, in standard units, summed over components.

        Raises:
            ValueError: recordings with controls.
        """
        if controls is not None:
            raise ValueError("rkn takes no controls")
        w, r = (part.unflatten(0, obs.shape[:2]) for part in self.encode(obs.flatten(0, 1)))
        state, seen = self.init(len(obs)), []
        for t in range(obs.shape[1]):
            predicted = self.predict(state)
            state = self.take_in(predicted, w[:, t], r[:, t])
            if mask is not None:
                state = RKNState(*(torch.where(mask[:, t, None], a, b) for a, b in zip(state, predicted, strict=True)))
            seen.append(state)
        every = RKNState(*(torch.stack(leaves, 1) for leaves in zip(*seen[burn_in:], strict=True)))
        residual = (states[:, burn_in:] - self.z_mean) / self.z_scale - self.readout(every.mean)
        return gaussian_loss(residual, self.variances(every).diag_embed())


LEAST_VARIANCE = 1e-4
"""Of a read-out, in standard units: a likelihood has no bound where a variance may vanish."""


def predict_factorised(
    mean: Float[Tensor, "b two_m"],
    S: FactorisedCovariance,
    A: Float[Tensor, "b 4 m m"],
    noise: Float[Tensor, "2 m"],
) -> tuple[Float[Tensor, "b two_m"], FactorisedCovariance]:
    """A z, and the three diagonals of A S A^T + diag(noise), with A = [[A_0, A_1], [A_2, A_3]].

    (A_i diag(v) A_j^T)_kk = sum_n (A_i)_kn (A_j)_kn v_n.

    References: Becker et al. (2019), equations 2 and 3, and their appendix A.
    """
    A0, A1, A2, A3 = A.unbind(1)
    top, low = (part[..., None] for part in mean.chunk(2, -1))
    moved = torch.cat([A0 @ top + A1 @ low, A2 @ top + A3 @ low], -2)[..., 0]

    def diagonal(B: Tensor, C: Tensor, v: Tensor) -> Tensor:
        return ((B * C) @ v[..., None])[..., 0]

    upper = diagonal(A0, A0, S.upper) + 2 * diagonal(A0, A1, S.between) + diagonal(A1, A1, S.lower) + noise[0]
    lower = diagonal(A2, A2, S.upper) + 2 * diagonal(A2, A3, S.between) + diagonal(A3, A3, S.lower) + noise[1]
    between = diagonal(A2, A0, S.upper) + diagonal(A3, A0, S.between) + diagonal(A2, A1, S.between) + diagonal(A3, A1, S.lower)
    return moved, FactorisedCovariance(upper, lower, between)


def update_factorised(
    mean: Float[Tensor, "b two_m"], S: FactorisedCovariance, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
) -> tuple[Float[Tensor, "b two_m"], FactorisedCovariance]:
    """The Kalman update with observation w = z_upper + N(0, diag r): gain u / (u + r) above, s / (u + r) below.

    References: Becker et al. (2019), equations 4 to 8.
    """
    top, low = mean.chunk(2, -1)
    gain, gain_below = S.upper / (S.upper + r), S.between / (S.upper + r)
    residual = w - top
    updated = torch.cat([top + gain * residual, low + gain_below * residual], -1)
    return updated, FactorisedCovariance((1 - gain) * S.upper, S.lower - gain_below * S.between, (1 - gain) * S.between)


def check_memory(memory: list[Sequence], d: torch.Size, q: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """All states and observations of the recordings.

    Raises:
        ValueError: of another size than d and q, or no observation at all.
    """
    sequences = as_sequences(memory)
    z = torch.cat([s.states for s in sequences])
    x = torch.cat([s.obs if s.mask is None else s.obs[s.mask] for s in sequences])
    if z.shape[1:] != d or x.shape[1:] != q or len(x) == 0:
        raise ValueError(
            f"the net is built for states {tuple(d)} and observations {q}, "
            f"the memory holds {tuple(z.shape[1:])} and {len(x)} observations {tuple(x.shape[1:])}"
        )
    return z, x


def store_units(mean: Tensor, scale: Tensor, values: Shaped[Tensor, "n *x"]) -> None:
    """Mean and standard deviation of each component into two buffers; of a constant one, 1."""
    spread = values.std(0, correction=0)
    mean.copy_(values.mean(0))
    scale.copy_(torch.where(spread > 0, spread, 1))


def gaussian_loss(residual: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]) -> Float[Tensor, ""]:
    """The mean of -log N(residual; 0, covariance)."""
    L = torch.linalg.cholesky(covariance)
    white = torch.linalg.solve_triangular(L, residual[..., None], upper=False)[..., 0]
    log_volume = L.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return (0.5 * white.square().sum(-1) + log_volume + 0.5 * residual.shape[-1] * math.log(2 * math.pi)).mean()


def positive(x: Tensor) -> Tensor:
    """elu(x) + 1: positive, and linear above 0."""
    return functional.elu(x) + 1


def inverse_positive(y: float) -> float:
    """The x with elu(x) + 1 = y."""
    return math.log(y) if y < 1 else y - 1
