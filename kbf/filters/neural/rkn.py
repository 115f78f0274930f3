"""Recurrent Kalman network: a Kalman filter over a learned latent space (Becker et al. 2019).

The latent state has 2 m numbers, of which the upper m are observed as encodings with learned
variances. The covariance consists of three diagonals, so that no matrix is inverted and a step
costs O(m^2) for each A_k.

References: Becker, Pandya, Gebhardt, Zhao, Taylor, Neumann (2019), Recurrent Kalman Networks:
section 4; equations 2 to 7, and 10 to 12 of the supplement. Controls: Shaj, Becker, Büchler,
Pandya, van Duijkeren, Taylor, Hanheide, Neumann (2020), Action-Conditional Recurrent Kalman
Networks.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.neural.base import LEAST_VARIANCE, EndToEndFilter, inverse_positive, positive


class FactorisedCovariance(NamedTuple):
    """The covariance [[diag upper, diag between], [diag between, diag lower]].

    ``*b m`` each; u, l and s in the paper.
    """

    upper: Tensor
    lower: Tensor
    between: Tensor


class RKNState(NamedTuple):
    """Mean ``b 2m`` and the three diagonals of the covariance ``b m``."""

    mean: Tensor
    upper: Tensor
    lower: Tensor
    between: Tensor


class RKNFilter(EndToEndFilter[RKNState]):
    """The recurrent Kalman network as a filter.

    1. Encode: an image x becomes w(x) ``m``, of length 1, and variances r(x) ``m``.
    2. Predict: A = sum_k softmax(c(z))_k A_k, each A_k of four banded blocks; z <- A z and
       S <- A S A^T + Q, of which the three diagonals are kept (`predict_factorised`).
    3. Update: a Kalman update with H = [I 0] and R = diag r, exact for such S
       (`update_factorised`).
    4. Read out: the state from z by an MLP, and its variances from the three diagonals by another.

    All parameters are fitted to the Gaussian log likelihood of the true states
    (`EndToEndFilter.loss`). The initial variance ``start`` is fixed, and the encoder is that of the
    configuration. With controls u the mean moves to A z + b(u), b an MLP.
    """

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
        controls: int = 0,
        encoder: nn.Module | None = None,
    ) -> None:
        """Initialise an untrained network.

        Args:
            d: components of the state.
            q: components of an observation, or its shape.
            m: components of an encoding; the latent state has 2 m.
            matrices: K, the number of matrices A_k.
            bandwidth: of their blocks, to each side of the diagonal.
            hidden: units of the read-outs, and of b.
            start: initial variance of the latent state.
            controls, encoder: as in `EndToEndFilter`.
        """
        super().__init__(d, q, m, encoder, controls)
        self.m, self.start = m, start
        eye = torch.eye(m)
        # upper from upper, upper from lower, lower from upper, lower from lower
        first = torch.stack([eye, 0.2 * eye, -0.2 * eye, eye])
        self.blocks: nn.Parameter = nn.Parameter(first.expand(matrices, 4, m, m).clone())
        self.mixing: nn.Linear = nn.Linear(2 * m, matrices)
        self.noise: nn.Parameter = nn.Parameter(torch.full((2, m), inverse_positive(0.1)))
        self.readout: nn.Sequential = nn.Sequential(
            nn.Linear(2 * m, hidden), nn.Tanh(), nn.Linear(hidden, d)
        )
        self.readout_variance: nn.Sequential = nn.Sequential(
            nn.Linear(3 * m, hidden), nn.Tanh(), nn.Linear(hidden, d)
        )
        self.push: nn.Sequential | None = (
            nn.Sequential(nn.Linear(controls, hidden), nn.Tanh(), nn.Linear(hidden, 2 * m))
            if controls
            else None
        )
        self.band: Tensor = nn.Buffer(
            (torch.arange(m)[:, None] - torch.arange(m)).abs() <= bandwidth
        )

    def encode(
        self, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[Float[Tensor, "b m"], Float[Tensor, "b m"]]:
        """Return encodings w of length 1 and their variances r."""
        w, r = super().encode(obs)
        return functional.normalize(w, dim=-1), r

    def init(self, batch: int, *, generator: Generator | None = None) -> RKNState:
        """Return z = 0 with the variance ``start``."""
        zero = self.z_mean.new_zeros(batch, self.m)
        return RKNState(torch.cat([zero, zero], -1), zero + self.start, zero + self.start, zero)

    def predict(
        self,
        state: RKNState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> RKNState:
        """Return A(z) z + b(u) and its covariance."""
        weights = self.mixing(state.mean).softmax(-1)
        A0, A1, A2, A3 = (self.blocks * self.band).unbind(1)
        every = torch.cat([torch.cat([A0, A1], -1), torch.cat([A2, A3], -1)], -2)
        A = (weights @ every.flatten(1)).unflatten(-1, every.shape[1:])
        mean, covariance = predict_factorised(
            state.mean, FactorisedCovariance(*state[1:]), A, positive(self.noise)
        )
        if self.push is not None:
            mean = mean + self.push(self.acted(control, len(mean)))
        return RKNState(mean, *covariance)

    def take_in(
        self, state: RKNState, w: Float[Tensor, "b m"], r: Float[Tensor, "b m"]
    ) -> RKNState:
        """Return the state updated with an encoding and its variances."""
        mean, covariance = update_factorised(state.mean, FactorisedCovariance(*state[1:]), w, r)
        return RKNState(mean, *covariance)

    def mean(self, state: RKNState) -> Float[Tensor, "*b d"]:
        """Return the read-out, in standard units."""
        return self.readout(state.mean)

    def spread(self, state: RKNState) -> Float[Tensor, "*b d d"]:
        """Return the diagonal covariance, in standard units."""
        return (
            positive(self.readout_variance(torch.cat(state[1:], -1))) + LEAST_VARIANCE
        ).diag_embed()


def predict_factorised(
    mean: Float[Tensor, "b two_m"],
    S: FactorisedCovariance,
    A: Float[Tensor, "b two_m two_m"],
    noise: Float[Tensor, "2 m"],
) -> tuple[Float[Tensor, "b two_m"], FactorisedCovariance]:
    """Return A z and the three diagonals of A S A^T + diag(noise).

    With A = [L R] split into the columns of the upper and the lower half, A S = [L u + R s, L s +
    R l], and the diagonals of (A S) A^T are sums of products of rows.

    References: Becker et al. (2019), equations 10 to 12 of the supplement.
    """
    m = noise.shape[1]
    u, lower, s = (part[:, None] for part in S)
    L, R = A.split(m, -1)
    AS = torch.cat([L * u + R * s, L * s + R * lower], -1)
    above, below = ((AS * A).sum(-1) + noise.flatten()).split(m, -1)
    between = (AS[:, m:] * A[:, :m]).sum(-1)
    return (A @ mean[..., None])[..., 0], FactorisedCovariance(above, below, between)


def update_factorised(
    mean: Float[Tensor, "b two_m"],
    S: FactorisedCovariance,
    w: Float[Tensor, "b m"],
    r: Float[Tensor, "b m"],
) -> tuple[Float[Tensor, "b two_m"], FactorisedCovariance]:
    """Return the Kalman update with the observation w = z_upper + N(0, diag r).

    The gain is u / (u + r) for the upper half and s / (u + r) for the lower half.

    References: Becker et al. (2019), equations 2 to 7.
    """
    top, low = mean.chunk(2, -1)
    gain, gain_below = S.upper / (S.upper + r), S.between / (S.upper + r)
    residual = w - top
    updated = torch.cat([top + gain * residual, low + gain_below * residual], -1)
    return updated, FactorisedCovariance(
        (1 - gain) * S.upper, S.lower - gain_below * S.between, (1 - gain) * S.between
    )
