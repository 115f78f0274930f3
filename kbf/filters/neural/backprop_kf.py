"""Backprop KF: an extended Kalman filter trained end to end (Haarnoja et al. 2016).

References: Haarnoja, Ajay, Levine, Abbeel (2016), Backprop KF, section 4. The transition is learned
here as well.
"""

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn

from kbf.filters.gaussian.moments import GaussianState, kalman_observe, kalman_predict
from kbf.filters.neural.base import EndToEndFilter

# Largest absolute mean and standard deviation, in standard units.
#
# An untrained transition may diverge, and single precision cannot invert a sum of two variances
# whose ratio is 1e7.
MAX_STANDARD_UNITS = 30.0


class BackpropKF(EndToEndFilter[GaussianState]):
    """An EKF of y = (z, v): the state z ``d`` in standard units and ``hidden`` components v.

    The hidden components, such as speeds, are not recorded.

    1. Encode: an observation x becomes w(x) ``d`` and variances r(x) ``d``; p(x | z) is
       approximated by N(w(x); z, diag r(x)).
    2. Predict: f(y) = A y + V tanh(W y + b) + c, linearised at the mean, F = A + V diag(1 - tanh^2)
       W, covariance F P F^T + Q; both are bounded by `MAX_STANDARD_UNITS`. A control u adds B u to
       c and U u to b.
    3. Update: the Kalman update with H = [I 0] and R = diag r(x)
       (`kbf.filters.gaussian.moments.kalman_observe`).

    All parameters are fitted to the Gaussian log likelihood of the true states, through all steps
    of a window (`EndToEndFilter.loss`).
    """

    def __init__(
        self,
        d: int,
        q: int | tuple[int, ...],
        *,
        hidden: int = 2,
        units: int = 32,
        controls: int = 0,
        encoder: nn.Module | None = None,
    ) -> None:
        """Initialise an untrained network.

        Args:
            d: components of the state.
            q: components of an observation, or its shape.
            hidden: components of v.
            units: of the network in the transition.
            controls, encoder: as in `EndToEndFilter`.
        """
        super().__init__(d, q, d, encoder, controls)
        self.d, y = d, d + hidden
        self.linear, self.inner = nn.Linear(y, y), nn.Linear(y, units)
        self.outer: nn.Linear = nn.Linear(units, y, bias=False)
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(y))
            self.linear.bias.zero_()
            self.outer.weight.mul_(0.1)
        self.log_noise: nn.Parameter = nn.Parameter(torch.full((y,), math.log(0.1)))
        self.log_start: nn.Parameter = nn.Parameter(torch.zeros(y))
        self.push: nn.Linear | None = (
            nn.Linear(controls, y + units, bias=False) if controls else None
        )

    def move(
        self, y: Float[Tensor, "b y"], u: Float[Tensor, "b k"]
    ) -> tuple[Float[Tensor, "b y"], Float[Tensor, "b y y"]]:
        """Return f(y) and its Jacobian F; u is in standard units."""
        # Computed first: another order changes the rounding of gradients, and so the training.
        inside = self.inner(y)
        pushed = None
        if self.push is not None:
            pushed = self.push(u).split([y.shape[-1], inside.shape[-1]], -1)
        t = (inside if pushed is None else inside + pushed[1]).tanh()
        value = (self.linear(y) if pushed is None else self.linear(y) + pushed[0]) + self.outer(t)
        bent = self.outer.weight @ ((1 - t.square())[..., None] * self.inner.weight)
        return value, self.linear.weight + bent

    def init(self, batch: int, *, generator: Generator | None = None) -> GaussianState:
        """Return the mean of the training states, with learned variances."""
        variances = self.log_start.exp()
        return GaussianState(
            torch.zeros_like(variances).expand(batch, -1),
            variances.diag_embed().expand(batch, -1, -1),
        )

    def predict(
        self,
        state: GaussianState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> GaussianState:
        """Return the moments of f(y) linearised at the mean."""
        value, F = self.move(state.mean, self.acted(control, len(state.mean)))
        offset = value - (F @ state.mean[..., None])[..., 0]
        mean, P = kalman_predict(*state, F, self.log_noise.exp().diag(), offset)
        largest = P.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        return GaussianState(
            mean.clamp(-MAX_STANDARD_UNITS, MAX_STANDARD_UNITS),
            P / (largest / MAX_STANDARD_UNITS**2).clamp_min(1),
        )

    def observe(
        self, state: GaussianState, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Return the update and whether x was possible, with a finite encoding."""
        w, r = self.encode(obs)
        known = (w.isfinite() & r.isfinite()).all(-1)
        w, r = torch.where(known[:, None], w, 0), torch.where(known[:, None], r, 1)
        updated, possible = self.weigh(state, w, r)
        return updated, possible & known

    def take_in(
        self, state: GaussianState, w: Float[Tensor, "b d"], r: Float[Tensor, "b d"]
    ) -> GaussianState:
        """Return the Kalman update with an encoding and its variances."""
        return self.weigh(state, w, r)[0]

    def weigh(
        self, state: GaussianState, w: Float[Tensor, "b d"], r: Float[Tensor, "b d"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Return the Kalman update and whether the encoding was possible."""
        H = torch.eye(len(self.log_noise), dtype=w.dtype, device=w.device)[: self.d]
        return kalman_observe(*state, w, H, r.diag_embed())

    def mean(self, state: GaussianState) -> Float[Tensor, "*b d"]:
        """Return the mean of z, in standard units."""
        return state.mean[..., : self.d]

    def spread(self, state: GaussianState) -> Float[Tensor, "*b d d"]:
        """Return the covariance of z, in standard units."""
        return state.cov[..., : self.d, : self.d]
