"""State-space models with known equations.

They generate the synthetic data sets and provide the model for the EKF, the UKF and the
Bayes-optimal filter.

``z' = f(z) + noise(Q)``, then ``x = h(z') + noise(R)``; z_0 from N(m0, P0), or from samples of it.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Generator, Tensor

from kbf.recording import Recording
from kbf.rkhs.linalg import cholesky


@runtime_checkable
class StateSpace(Protocol):
    """What a particle filter and a simulator need."""

    def move(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw z' given z, ``*b d``."""
        ...

    def observe(self, z: Tensor, generator: Generator | None = None) -> Tensor:
        """Draw x given z, ``*b q``."""
        ...

    def log_likelihood(self, x: Tensor, z: Tensor) -> Tensor:
        """log p(x | z), ``*b`` (x and z broadcast)."""
        ...


@runtime_checkable
class KnownTransition(Protocol):
    """A state-space model that a particle smoother can go back in."""

    def log_transition(self, after: Tensor, z: Tensor) -> Tensor:
        """log p(z' | z), up to a constant, ``*b`` (z' and z broadcast)."""
        ...


@runtime_checkable
class ControlledDynamics(Protocol):
    """A state-space model whose ``move`` may take a ``control``."""

    @property
    def controlled(self) -> int:
        """Components of the control; 0 for none."""
        ...


@runtime_checkable
class OverDynamics(Protocol):
    """A state-space model whose states move as those of another."""

    @property
    def dynamics(self) -> StateSpace:
        """The other."""
        ...


class Differentiated(NamedTuple):
    """A function ``*b d`` -> ``*b e`` with its own derivative; others use autodiff.

    Attributes:
        function: the function.
        tangent: z -> its Jacobian ``*b e d`` and its value ``*b e``, which share what they compute.
    """

    function: Callable[[Tensor], Tensor]
    tangent: Callable[[Tensor], tuple[Tensor, Tensor]]

    def __call__(self, z: Tensor) -> Tensor:
        """Its value at z."""
        return self.function(z)


class StateSpaceModel(NamedTuple):
    """z' = f(z) + N(0, Q), x = h(z') + N(0, R), with z_0 ~ N(m0, P0).

    Attributes:
        f: ``*b d`` -> ``*b d``, differentiable (the EKF takes its Jacobian); faster where it is
            `Differentiated`.
        h: ``*b d`` -> ``*b q``, differentiable.
        Q: ``d d``, transition noise covariance.
        R: ``q q``, observation noise covariance.
        m0: ``d``. P0: ``d d``. Mean and covariance before the first move.
    """

    f: Callable[[Tensor], Tensor]
    h: Callable[[Tensor], Tensor]
    Q: Tensor
    R: Tensor
    m0: Tensor
    P0: Tensor

    def move(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b d"]:
        """Draw z' given z."""
        return self.f(z) + gaussian_noise(z.shape[:-1], self.Q, generator)

    def observe(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw x given z."""
        return self.h(z) + gaussian_noise(z.shape[:-1], self.R, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log N(x; h(z), R)."""
        return gaussian_log_density(x - self.h(z), self.R)

    def log_transition(
        self, after: Float[Tensor, "*b d"], z: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log N(z'; f(z), Q), what a smoother needs; z' and z broadcast."""
        return gaussian_log_density_of_pairs(after, self.f(z), self.Q)


class FactoredModel(NamedTuple):
    """A `StateSpaceModel` whose covariances are factored once, not at each step: the same numbers.

    Attributes:
        model: the model. root: ``d d``, Q = root root^T. factor: ``q q``, the Cholesky factor of R.
            scale: its `log_scale`.
    """

    model: StateSpaceModel
    root: Tensor
    factor: Tensor
    scale: Tensor

    def move(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b d"]:
        """Draw z' given z."""
        return self.model.f(z) + rooted_noise(z.shape[:-1], self.root, generator)

    def observe(
        self, z: Float[Tensor, "*b d"], generator: Generator | None = None
    ) -> Float[Tensor, "*b q"]:
        """Draw x given z."""
        return self.model.observe(z, generator)

    def log_likelihood(
        self, x: Float[Tensor, "*b q"], z: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log N(x; h(z), R)."""
        return factored_log_density(x - self.model.h(z), self.factor, self.scale)

    def log_transition(
        self, after: Float[Tensor, "*b d"], z: Float[Tensor, "*c d"]
    ) -> Float[Tensor, "*e"]:
        """log N(z'; f(z), Q), what a smoother needs; z' and z broadcast."""
        return self.model.log_transition(after, z)


class OrientationModel(NamedTuple):
    """A turning heading: theta' = theta + turn + N(0, sigma_z^2), x = theta' + N(0, sigma_x^2).

    States and observations are (cos, sin) of the angle.

    The observation of this model is the noisy heading itself, as (cos, sin), which corresponds to
    a perfect encoder of images.

    References: Xu et al. (2022), section 6.3 (DeepMind Lab).
    """

    turn: float = 0.4
    sigma_z: float = 0.2
    sigma_x: float = 0.2

    def move(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """Turn by ``turn`` radians and noise."""
        return rotate(z, self.turn + self.sigma_z * normal(z[..., 0], generator))

    def observe(
        self, z: Float[Tensor, "*b 2"], generator: Generator | None = None
    ) -> Float[Tensor, "*b 2"]:
        """The heading with noise, as (cos, sin)."""
        return rotate(z, self.sigma_x * normal(z[..., 0], generator))

    def log_likelihood(
        self, x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Log density of the noisy heading."""
        return wrapped_log_density(x, z, self.sigma_x)

    def log_transition(
        self, after: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"]
    ) -> Float[Tensor, "*e"]:
        """Log density of a turn from z to z', what a smoother needs; z' and z broadcast."""
        return wrapped_log_density(
            after,
            rotate(z, torch.as_tensor(self.turn, dtype=z.dtype, device=z.device)),
            self.sigma_z,
        )

    def additive(self, m0: Tensor, P0: Tensor) -> StateSpaceModel:
        """Return the additive form: mean rotation, noises with equal second moments."""
        shrink_z, shrink_x = math.exp(-(self.sigma_z**2) / 2), math.exp(-(self.sigma_x**2) / 2)
        eye = torch.eye(2, dtype=m0.dtype, device=m0.device)
        return StateSpaceModel(
            f=lambda z: (
                shrink_z * rotate(z, torch.as_tensor(self.turn, dtype=z.dtype, device=z.device))
            ),
            h=lambda z: shrink_x * z,
            Q=(1 - shrink_z**2) / 2 * eye,
            R=(1 - shrink_x**2) / 2 * eye,
            m0=m0,
            P0=P0,
        )


def rotation(*, dtype: torch.dtype = torch.float64) -> StateSpaceModel:
    """Rotation of Xu et al.: the oscillatory model with omega 0.3 and no oscillation."""
    return oscillatory(omega=0.3, beta=0.0, dtype=dtype)


def oscillatory(
    *,
    omega: float = 0.4,
    beta: float = 0.4,
    M: float = 8.0,
    sigma_z: float = 0.2,
    sigma_x: float = 0.2,
    moved_angle: bool = True,
    dtype: torch.dtype = torch.float64,
) -> StateSpaceModel:
    """z' = (1 + beta sin(M a)) (cos, sin)(a) + N(0, sigma_z^2 I), a = theta + omega.

    x = z' + N(0, sigma_x^2 I).

    theta is the angle of z. It starts at (1, 0).

    Args:
        omega: turn in radians a step. beta, M: depth and number of the oscillations of the radius.
        sigma_z: standard deviation of the transition noise. sigma_x: of the observation noise.
        moved_angle: take the sine at the moved angle, as the authors' code and Fukumizu et al. do;
            False takes sin(M theta), as equation 5 is printed.
        dtype: of the matrices.

    References: Xu et al. (2022), equation 5; Fukumizu et al., section 5.3.
    """

    def f(z: Tensor) -> Tensor:
        theta = torch.atan2(z[..., 1], z[..., 0])
        moved = theta + omega
        radius = 1 + beta * torch.sin(M * (moved if moved_angle else theta))
        return radius[..., None] * torch.stack([moved.cos(), moved.sin()], -1)

    def tangent(z: Tensor) -> tuple[Tensor, Tensor]:
        x, y = z.unbind(-1)
        theta = torch.atan2(y, x)
        moved = theta + omega
        phase = M * (moved if moved_angle else theta)
        radius, slope = 1 + beta * phase.sin(), beta * M * phase.cos()
        c, s = moved.cos(), moved.sin()
        u, v, length = radius * c, radius * s, x * x + y * y
        du, dv = (
            (slope * c - v) / length,
            (slope * s + u) / length,
        )  # by theta, whose own derivative is (-y, x) / length
        F = torch.stack([-y * du, x * du, -y * dv, x * dv]).movedim(0, -1).unflatten(-1, (2, 2))
        return F, torch.stack([u, v]).movedim(0, -1)

    eye = torch.eye(2, dtype=dtype)
    return StateSpaceModel(
        f=Differentiated(f, tangent),
        h=Differentiated(lambda z: z, lambda z: (eye.to(z).expand(*z.shape, 2), z)),
        Q=sigma_z**2 * eye,
        R=sigma_x**2 * eye,
        m0=torch.tensor([1.0, 0.0], dtype=dtype),
        P0=0 * eye,
    )


def simulate(
    model: StateSpace, z0: Float[Tensor, "*b d"], steps: int, generator: Generator | None = None
) -> Recording:
    """Draw a recording of ``steps`` steps that starts *after* z0: move, then observe."""
    states, obs, z = [], [], z0
    for _ in range(steps):
        z = model.move(z, generator)
        states.append(z)
        obs.append(model.observe(z, generator))
    return Recording(torch.stack(states, z0.ndim - 1), torch.stack(obs, z0.ndim - 1))


def rotate(
    z: Float[Tensor, "*b 2"], angle: Float[Tensor, "*b"] | Float[Tensor, ""]
) -> Float[Tensor, "*b 2"]:
    """Turn points of the plane counter-clockwise by ``angle`` radians."""
    c, s = angle.cos(), angle.sin()
    return torch.stack([c * z[..., 0] - s * z[..., 1], s * z[..., 0] + c * z[..., 1]], -1)


def wrapped_log_density(
    x: Float[Tensor, "*b 2"], z: Float[Tensor, "*c 2"], sigma: float
) -> Float[Tensor, "*e"]:
    """Return the log density of a wrapped normal at the angle from z to x.

    Three turns of the circle are exact to rounding for sigma < 1.
    """
    gap = torch.atan2(x[..., 1] * z[..., 0] - x[..., 0] * z[..., 1], (x * z).sum(-1))
    turns = 2 * math.pi * torch.arange(-1, 2, dtype=z.dtype, device=z.device)
    exponent = -0.5 * ((gap[..., None] + turns) / sigma).square()
    return exponent.logsumexp(-1) - math.log(sigma * math.sqrt(2 * math.pi))


def normal(like: Tensor, generator: Generator | None = None) -> Tensor:
    """Standard normal numbers of the shape, type and device of ``like``."""
    return torch.randn(like.shape, dtype=like.dtype, device=like.device, generator=generator)


def gaussian_noise(
    batch: torch.Size, covariance: Float[Tensor, "d d"], generator: Generator | None = None
) -> Tensor:
    """Return draws ``*batch d`` from N(0, covariance), which may be singular."""
    return rooted_noise(batch, root_of(covariance), generator)


def root_of(covariance: Float[Tensor, "d d"]) -> Float[Tensor, "d d"]:
    """V L^(1/2), from the eigenvectors V and eigenvalues L."""
    values, vectors = torch.linalg.eigh(covariance)
    return vectors * values.clamp_min(0).sqrt()


def rooted_noise(
    batch: torch.Size, root: Float[Tensor, "d d"], generator: Generator | None = None
) -> Tensor:
    """Draws ``*batch d`` from N(0, root root^T)."""
    return (
        torch.randn(*batch, len(root), dtype=root.dtype, device=root.device, generator=generator)
        @ root.mT
    )


def gaussian_log_density(
    residual: Float[Tensor, "*b q"], covariance: Float[Tensor, "q q"]
) -> Float[Tensor, "*b"]:
    """log N(residual; 0, covariance)."""
    factor = cholesky(covariance)
    return factored_log_density(residual, factor, log_scale(factor))


def log_scale(factor: Float[Tensor, "q q"]) -> Float[Tensor, ""]:
    """Return log sqrt(det(2 pi L L^T)) of a lower triangular factor L."""
    return factor.diagonal().log().sum() + 0.5 * len(factor) * math.log(2 * math.pi)


def factored_log_density(
    residual: Float[Tensor, "*b q"], factor: Float[Tensor, "q q"], scale: Float[Tensor, ""]
) -> Float[Tensor, "*b"]:
    """log N(residual; 0, factor factor^T), the factor lower triangular, with its `log_scale`."""
    rows = residual.reshape(
        -1, residual.shape[-1]
    )  # one solve for all rows: 20,000 batched ones take thirty times as long
    white = torch.linalg.solve_triangular(factor.mT, rows, upper=True, left=False).reshape(
        residual.shape
    )
    return -0.5 * white.square().sum(-1) - scale


def gaussian_log_density_of_pairs(
    x: Float[Tensor, "*b q"], mean: Float[Tensor, "*c q"], covariance: Float[Tensor, "q q"]
) -> Float[Tensor, "*e"]:
    """Return log N(x; mean, covariance) of x and means that broadcast to many pairs.

    Each is whitened once, not once for each pair.
    """
    factor = cholesky(covariance)
    rows = [
        torch.linalg.solve_triangular(factor.mT, y.reshape(-1, y.shape[-1]), upper=True, left=False)
        for y in (x, mean)
    ]
    white, centre = (row.reshape(y.shape) for row, y in zip(rows, (x, mean), strict=True))
    return -0.5 * (white - centre).square().sum(-1) - log_scale(factor)
