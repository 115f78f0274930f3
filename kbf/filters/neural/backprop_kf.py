"""An extended Kalman filter trained end to end: codes of images with variances and moves with hidden components learn together."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Generator, Tensor, nn

from kbf.filters.gaussian.moments import GaussianState, kalman_observe, kalman_predict
from kbf.filters.neural.base import EndToEndFilter

FAR = 30.0
"""Standard units: no mean is farther away, no standard deviation larger. A move that is still to be learned may run away, and where
variances are 1e7 times those of a code single precision cannot invert their sum."""


class BackpropKF(EndToEndFilter[GaussianState]):
    """The filter of y = (z, v): the state z ``d`` in standard units, and ``hidden`` components v that nobody recorded (speeds).

    1. Code: an observation x becomes w(x) ``d`` and variances r(x) ``d``: p(x | z) is taken for
    N(w(x); z, diag r(x)). 2. Predict: f(y) = A y + V tanh(W y + b) + c, linearised at the mean: F =
    A + V diag(1 - tanh^2) W, covariance F P F^T + Q;
       neither goes beyond `FAR`. A control u adds B u to c and U u to b.
    3. Update: the Kalman update with H = [I 0] and R = diag r(x)
    (`kbf.filters.gaussian.kalman.kalman_observe`).

    Trained on the Gaussian log likelihood of the true states, through all steps of a window
    (`EndToEndFilter.loss`).

    References: Haarnoja, Ajay, Levine, Abbeel (2016), Backprop KF: section 4; here the moves are
    learned, too.
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
        """An untrained net.

        Args:
            d: components of the state. q: components of an observation, or its shape.
            hidden: components of v. units: of the network inside the move.
            controls, encoder: as in `EndToEndFilter`.
        """
        super().__init__(d, q, d, encoder, controls)
        self.d, y = d, d + hidden
        self.linear, self.inner, self.outer = (
            nn.Linear(y, y),
            nn.Linear(y, units),
            nn.Linear(units, y, bias=False),
        )
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(y))
            self.linear.bias.zero_()
            self.outer.weight.mul_(0.1)
        self.log_noise = nn.Parameter(torch.full((y,), math.log(0.1)))
        self.log_start = nn.Parameter(torch.zeros(y))
        self.push = nn.Linear(controls, y + units, bias=False) if controls else None

    def move(
        self, y: Float[Tensor, "b y"], u: Float[Tensor, "b k"]
    ) -> tuple[Float[Tensor, "b y"], Float[Tensor, "b y y"]]:
        """f(y) and its Jacobian F; u in standard units."""
        inside = self.inner(
            y
        )  # first, as ever: in another order sums of gradients round otherwise, and training goes elsewhere
        pushed = (
            None if self.push is None else self.push(u).split([y.shape[-1], inside.shape[-1]], -1)
        )
        t = (inside if pushed is None else inside + pushed[1]).tanh()
        value = (self.linear(y) if pushed is None else self.linear(y) + pushed[0]) + self.outer(t)
        return value, self.linear.weight + self.outer.weight @ (
            (1 - t.square())[..., None] * self.inner.weight
        )

    def init(self, batch: int, *, generator: Generator | None = None) -> GaussianState:
        """The mean of the training states, with learned variances."""
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
        """y <- f(y), linearised at the mean."""
        value, F = self.move(state.mean, self.acted(control, len(state.mean)))
        mean, P = kalman_predict(
            *state, F, self.log_noise.exp().diag(), value - (F @ state.mean[..., None])[..., 0]
        )
        largest = P.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        return GaussianState(mean.clamp(-FAR, FAR), P / (largest / FAR**2).clamp_min(1))

    def observe(
        self, state: GaussianState, obs: Shaped[Tensor, "b *x"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Take in an observation, and whether that was possible: its code and variances are finite, too."""
        w, r = self.encode(obs)
        known = (w.isfinite() & r.isfinite()).all(-1)
        updated, possible = self.weigh(
            state, torch.where(known[:, None], w, 0), torch.where(known[:, None], r, 1)
        )
        return updated, possible & known

    def take_in(
        self, state: GaussianState, w: Float[Tensor, "b d"], r: Float[Tensor, "b d"]
    ) -> GaussianState:
        """The Kalman update with a code and its variances."""
        return self.weigh(state, w, r)[0]

    def weigh(
        self, state: GaussianState, w: Float[Tensor, "b d"], r: Float[Tensor, "b d"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """The same, and whether the code was possible."""
        H = torch.eye(len(self.log_noise), dtype=w.dtype, device=w.device)[: self.d]
        return kalman_observe(*state, w, H, r.diag_embed())

    def mean(self, state: GaussianState) -> Float[Tensor, "*b d"]:
        """Of z, in standard units."""
        return state.mean[..., : self.d]

    def spread(self, state: GaussianState) -> Float[Tensor, "*b d d"]:
        """The covariance of z, in standard units."""
        return state.cov[..., : self.d, : self.d]
