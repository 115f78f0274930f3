"""EKF and UKF for turning motion with an observed angle.

The filters run in y = (theta, omega), where the noise of the observed angle is one number that
wraps around the circle. They report z = (cos theta, sin theta, omega / unit), in which no
covariance is constant.

References: Sarkka (2013), algorithms 5.5 and 5.15 (non-additive noise).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.filters.gaussian.moments import GaussianState, kalman_update
from kbf.manifolds import circle_log
from kbf.recording import Recording, as_recordings, check_vectors, observed_pairs
from kbf.rkhs.linalg import cholesky
from kbf.runtime.html_repr import Shown

# (f, m, L) -> F, a, Omega of f(m + L u) ~ F u + a + N(0, Omega), u ~ N(0, I).
Linearise = Callable[[Callable[[Tensor], Tensor], Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


@runtime_checkable
class TurningModel(Protocol):
    """A model y' = f(y, e), y = (theta, omega), e ~ N(0, 1), of states z = embed(y)."""

    @property
    def unit(self) -> float:
        """The unit of the speed in z."""
        ...

    def f(self, y: Tensor, e: Tensor) -> Tensor:
        """Return the next y ``*b 2`` from y ``*b 2`` and e ``*b 1``."""
        ...

    def chart(self, z: Tensor) -> Tensor:
        """Return y ``*b 2``, theta in (-pi, pi], of z ``*b 3``."""
        ...


@dataclass(eq=False, repr=False)
class TurningFilter(Shown):
    """A Kalman filter of y = (theta, omega), with a given linearisation.

    The noise of the move is one more coordinate of f. Observations are x = (cos, sin)(theta +
    N(0, R)): the innovation is the angle between x and the predicted one, and the update is linear.

    Attributes:
        model: the equation.
        linearise: `kbf.filters.gaussian.ekf.extended` or `kbf.filters.gaussian.ukf.unscented`.
        mean: ``2``, before the first move. cov: ``2 2``.
        R: ``1 1``, the variance of the observed angle.
    """

    model: TurningModel
    linearise: Linearise
    mean: Tensor
    cov: Tensor
    R: Tensor

    def init(self, batch: int, *, generator: Generator | None = None) -> GaussianState:
        """Return the initial moments for each recording of the batch."""
        return GaussianState(self.mean.expand(batch, 2), self.cov.expand(batch, 2, 2))

    def predict(self, state: GaussianState, *, generator: Generator | None = None) -> GaussianState:
        """Return the moments of f(y, e): (y, e) has mean (m, 0) and covariance diag(P, 1)."""
        m = torch.cat([state.mean, torch.zeros_like(state.mean[:, :1])], -1)
        L = torch.zeros(len(m), 3, 3, dtype=m.dtype, device=m.device)
        jitter = 10 * torch.finfo(m.dtype).eps * state.cov.diagonal(dim1=-2, dim2=-1).mean(-1)
        L[:, :2, :2] = cholesky(state.cov, reg=jitter)
        L[:, 2, 2] = 1
        F, a, Omega = self.linearise(lambda v: self.model.f(v[..., :2], v[..., 2:]), m, L)
        return GaussianState(a, F @ F.mT + Omega)

    def update(self, state: GaussianState, obs: Float[Tensor, "b 2"]) -> GaussianState:
        """Return the moments given unit vectors ``b 2``."""
        theta = state.mean[:, :1]
        innovation = circle_log(torch.cat([theta.cos(), theta.sin()], -1), obs.to(theta))
        H = torch.tensor([[1.0, 0.0]]).to(theta)
        return kalman_update(*state, theta + innovation, H, self.R)

    def estimate(self, state: GaussianState) -> Float[Tensor, "b 3"]:
        """Return E z: the mean of (cos, sin)(theta) has the length exp(-var / 2)."""
        theta, omega = state.mean.unbind(-1)
        length = (-state.cov[:, 0, 0] / 2).exp()
        return torch.stack(
            [length * theta.cos(), length * theta.sin(), omega / self.model.unit], -1
        )

    def covariance(self, state: GaussianState) -> Float[Tensor, "b 3 3"]:
        """Return Cov z = E z z^T - E z E z^T in closed form, ``b 3 3``.

        E cos 2 theta = exp(-2 var) cos 2m; the terms with the speed follow from Stein's lemma.
        """
        theta, var = state.mean[:, 0], state.cov[:, 0, 0]
        c, s, _ = self.estimate(state).unbind(-1)
        c2, s2 = (-2 * var).exp() * (2 * theta).cos(), (-2 * var).exp() * (2 * theta).sin()
        cross, speed = state.cov[:, 0, 1] / self.model.unit, state.cov[:, 1, 1] / self.model.unit**2
        rows = [(1 + c2) / 2 - c * c, s2 / 2 - c * s, -cross * s]
        rows += [s2 / 2 - c * s, (1 - c2) / 2 - s * s, cross * c]
        rows += [-cross * s, cross * c, speed]
        return torch.stack(rows, -1).unflatten(-1, (3, 3))


def turning_filter(
    model: TurningModel, memory: Recording | list[Recording] | None, linearise: Linearise
) -> TurningFilter:
    """Return the filter of a known equation; initial moments and R are estimated from the memory.

    The initial moments are those of the training states, with angles taken around their mean
    direction. R is the mean square of the angles between observations and states. Encodings of
    images in the memory come from encoders that were not fitted to these images.

    Raises:
        ValueError: no memory, or observations that are not unit vectors.
    """
    recordings = as_recordings(memory)
    check_vectors(recordings, "a Gaussian filter")
    z = torch.cat([s.states for s in recordings])
    seen, x = observed_pairs(recordings)
    if x.shape[1] != 2 or not bool(((x.norm(dim=-1) - 1).abs() < 1e-3).all()):
        raise ValueError(
            "a filter of turning motion requires observations (cos, sin), "
            "unit vectors; of images: data.encoding.visible"
        )
    R = circle_log(seen[:, :2], x.to(seen)).square().mean()
    middle = z[:, :2].mean(0)
    middle = torch.atan2(middle[1], middle[0])
    y = model.chart(z)
    off = torch.remainder(y[:, 0] - middle + torch.pi, 2 * torch.pi) - torch.pi
    y = torch.stack([middle + off, y[:, 1]], -1)
    return TurningFilter(model, linearise, y.mean(0), torch.cov(y.mT), R.reshape(1, 1))
