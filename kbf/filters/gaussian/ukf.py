"""Unscented Kalman filter (UKF): the Kalman filter of the statistically linearised model.

f(m + L u) ~ F u + a + N(0, Omega) with u ~ N(0, I), P = L L^T, from scaled sigma points of u.

References: Wan and van der Merwe (2000); Sarkka (2013), algorithms 5.14 and 5.15; Sarkka (2008).
"""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.gaussian.moments import (
    STEPS_UNTIL_FORGOTTEN,
    AdditiveModel,
    GaussianFilter,
    GaussianState,
    check_initial,
    is_possible,
    kalman_gain,
    leave_out_missing,
    log_density_of_available,
    rts_step,
    with_initial_moments,
)
from kbf.filters.gaussian.polar import TurningFilter, TurningModel, turning_filter
from kbf.filters.protocols import FilterStep, WithoutHyperparameters
from kbf.recording import Recording
from kbf.rkhs.linalg import batch_innermost, cholesky, product
from kbf.ssm import OrientationModel


def sigma_points(
    d: int, alpha: float, beta: float, kappa: float
) -> tuple[Float[Tensor, "s d"], Float[Tensor, " s"], Float[Tensor, " s"]]:
    """Return s = 2 d + 1 scaled sigma points of N(0, I), and their mean and covariance weights.

    With l = alpha^2 (d + kappa) - d: the points 0 and +-sqrt(d + l) e_i, each with the weight 1 /
    (2 (d + l)), except the first: l / (d + l) for the mean, and 1 - alpha^2 + beta more for the
    covariance.

    Raises:
        ValueError: alpha <= 0 or d + kappa <= 0.

    References: Wan and van der Merwe (2000), equation 15; Julier and Uhlmann (1997) for alpha 1,
    beta 0.
    """
    if alpha <= 0 or d + kappa <= 0:
        raise ValueError(
            f"sigma points need alpha > 0 and d + kappa > 0, got {alpha=}, {d=}, {kappa=}"
        )
    spread = alpha**2 * (d + kappa)
    eye = torch.eye(d, dtype=torch.float64)
    points = spread**0.5 * torch.cat([0 * eye[:1], eye, -eye])
    mean_weights = torch.full((2 * d + 1,), 1 / (2 * spread), dtype=torch.float64)
    mean_weights[0] = 1 - d / spread
    cov_weights = mean_weights.clone()
    cov_weights[0] += 1 - alpha**2 + beta
    return points, mean_weights, cov_weights


def unscented(
    f: Callable[[Tensor], Tensor],
    m: Float[Tensor, "b d"],
    L: Float[Tensor, "b d d"],
    sigma: tuple[Tensor, Tensor, Tensor],
) -> tuple[Float[Tensor, "b e d"], Float[Tensor, "b e"], Float[Tensor, "b e e"]]:
    """Return F, a, Omega of f(m + L u) ~ F u + a + N(0, Omega), from the `sigma_points` of u."""
    points, mean_weights, cov_weights = (part.to(m) for part in sigma)
    y = batch_innermost(f(m[:, None] + product(points, L.mT)))
    a = product(mean_weights[None], y)[:, 0]
    dy = y - a[:, None]
    weighted = cov_weights[:, None] * dy
    F = product(weighted.mT, points)
    return F, a, product(weighted.mT, dy) - product(F, F.mT)


class Split(NamedTuple):
    """A map f(s) = outer(inner(s_1, ...), s_2) of a state whose last ``last`` components are s_2.

    ``inner`` is costly, ``outer`` is not; sigma points that differ in s_2 share values of the
    inner map.

    Attributes:
        inner: ``*b d-last`` (and a control ``*b k``) -> ``*b e``.
        outer: ``*b e`` and ``*b last`` -> the values of f.
        last: number of components of s_2.
    """

    inner: Callable[..., Tensor]
    outer: Callable[[Tensor, Tensor], Tensor]
    last: int

    def __call__(self, s: Float[Tensor, "*b d"], *control: Tensor) -> Float[Tensor, "*b e"]:
        """f(s)."""
        n = s.shape[-1] - self.last
        return self.outer(self.inner(s[..., :n], *control), s[..., n:])

    def at_points(self, s: Float[Tensor, "b s d"], *control: Tensor) -> Float[Tensor, "b s e"]:
        """f at sigma points m + L u.

        L is lower triangular: the points of the last components differ from m in these alone.
        """
        d = s.shape[-1]
        n = d - self.last
        first = [0, *range(1, n + 1), *range(d + 1, d + n + 1)]
        y = self.inner(s[:, first, :n], *(u[:, first] for u in control))
        same = y[:, :1].expand(-1, self.last, -1)
        return self.outer(torch.cat([y[:, : n + 1], same, y[:, n + 1 :], same], 1), s[..., n:])


def scaled(R: Float[Tensor, "*b q q"], factors: Float[Tensor, "b p"]) -> Float[Tensor, "b q q"]:
    """Return the covariance whose variances are multiplied by factors; correlations stay."""
    root = factors.sqrt()
    return root[:, :, None] * R * root[:, None]


class Linearised(NamedTuple):
    """h(m + L u) ~ H u + c + N(0, Omega), u ~ N(0, I), at the moments of a state.

    Attributes:
        L: ``b d d``. H: ``b q d``. c: ``b q``. Omega: ``b q q``.
    """

    L: Tensor
    H: Tensor
    c: Tensor
    Omega: Tensor


class UnscentedKalmanFilter(GaussianFilter):
    """Unscented Kalman filter of z' = f(z) + N(0, Q), x = h(z) + N(0, R).

    Prediction and update each use sigma points of the current moments. The filter is a Kalman
    filter in whitened coordinates z = m + L u, P = L L^T: sigma points of u ~
    N(0, I) give f(m + L u) ~ F u + a + N(0, Omega), with a the weighted mean, F the weighted
    covariance with u, and Omega the rest of the weighted covariance. The moments equal those of
    the textbook filter, and the update is in Joseph form.

    The defaults alpha 1, beta 0, kappa max(0, 3 - d) are the plain unscented transform. Measured on
    200 oscillatory sequences (floor 0.053): 0.0542, against 0.0554 with beta 2, 0.0592 with the
    usual alpha 1e-3, and 0.0673 for the EKF.

    References: Sarkka (2013), algorithm 5.14; Lefebvre et al. (2002) for the statistical
    linearisation.
    """

    points: Tensor
    mean_weights: Tensor
    cov_weights: Tensor

    def __init__(
        self,
        model: AdditiveModel,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        kappa: float | None = None,
        allow_missing_sensors: bool = False,
        controlled: int = 0,
    ) -> None:
        """Store the model and its sigma points.

        Args:
            model: f and h map ``*b d``; derivatives are not required. With controls f takes a
                second argument ``*b k``. Of a `Split` the inner map is computed at the points that
                differ in it.
            alpha: spread of the points. The usual 1e-3 makes them a numerical derivative at the
                mean, with weights of 1e6.
            beta: extra weight of the centre in covariances.
            kappa: None for max(0, 3 - d), which with alpha 1 and beta 0 keeps every weight
                non-negative in any dimension.
            allow_missing_sensors: components of an observation may be NaN; the update leaves their
                rows out.
            controlled: components k of the control, 0 for none.

        Raises:
            ValueError: alpha <= 0 or d + kappa <= 0.
        """
        super().__init__(model)
        self.allow_missing_sensors = allow_missing_sensors
        self.controlled = controlled
        d = len(model.m0)
        points = sigma_points(d, alpha, beta, max(0.0, 3.0 - d) if kappa is None else kappa)
        self.points, self.mean_weights, self.cov_weights = (p.to(model.m0) for p in points)

    def with_parts(self, **parts: Any) -> "UnscentedKalmanFilter":
        """Return the filter with other parts of the model: f, h, Q or R."""
        changed = copy.copy(self)
        changed.model = self.model._replace(**parts)
        return changed

    def repeated(self, times: int) -> "UnscentedKalmanFilter":
        """Return the filter of a batch in which each recording occurs so many times in turn."""
        Q, R = (
            each if each.ndim == 2 else each.repeat_interleave(times, 0)
            for each in (self.model.Q, self.model.R)
        )
        return self.with_parts(Q=Q, R=R)

    def linearise(
        self,
        f: Callable[..., Tensor],
        m: Float[Tensor, "b d"],
        L: Float[Tensor, "b d d"],
        control: Float[Tensor, "b k"] | None = None,
    ) -> tuple[Float[Tensor, "b e d"], Float[Tensor, "b e"], Float[Tensor, "b e e"]]:
        """Return `unscented` of f, or of z -> f(z, u), with the sigma points of this filter."""
        at = f.at_points if isinstance(f, Split) else f
        acted = () if control is None else (control[:, None].expand(-1, len(self.points), -1),)
        sigma = (self.points, self.mean_weights, self.cov_weights)
        return unscented(lambda z: at(z, *acted), m, L, sigma)

    def linearised(self, state: GaussianState) -> Linearised:
        """Return the observation map, linearised at a state."""
        L = self.root(state.cov)
        return Linearised(L, *self.linearise(self.model.h, state.mean, L))

    def root(self, cov: Float[Tensor, "b d d"]) -> Float[Tensor, "b d d"]:
        """Return the Cholesky factor of P + jitter I; P = 0 is allowed.

        The jitter is 10 eps times the mean diagonal of P + Q.
        """
        scale = (cov + self.model.Q).diagonal(dim1=-2, dim2=-1).mean(-1)
        return cholesky(cov, reg=10 * torch.finfo(cov.dtype).eps * scale)

    def predict(
        self,
        state: GaussianState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> GaussianState:
        """Return the weighted mean of f at the sigma points, and the weighted covariance + Q."""
        L = self.root(state.cov)
        F, a, Omega = self.linearise(self.model.f, state.mean, L, control)
        return GaussianState(a, product(F, F.mT) + Omega + self.model.Q)

    def observe(
        self,
        state: GaussianState,
        obs: Float[Tensor, "b q"],
        *,
        noise: Float[Tensor, "b p"] | None = None,
        linearised: Linearised | None = None,
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Return the update of u ~ N(0, I), mapped back to z = m + L u, and `is_possible`.

        Args:
            state: predicted. obs: ``b q``.
            noise: factors of the variances R, of each component (p = q) or of all (p = 1).
            linearised: at the state; None to compute it.
        """
        L, H, c, Omega = linearised or self.linearised(state)
        R = self.model.R if noise is None else scaled(self.model.R, noise)
        residual, R = obs - c, Omega + R
        if self.allow_missing_sensors:
            residual, H, R = leave_out_missing(residual, H, R)
        eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        K, U, variances = kalman_gain(eye, H, R)
        mean = state.mean + product(L, K, residual[..., None])[..., 0]
        return GaussianState(mean, product(L, U, L.mT)), is_possible(residual, variances)

    def log_likelihood(
        self,
        state: GaussianState,
        obs: Float[Tensor, "b q"],
        *,
        noise: Float[Tensor, "b p"] | None = None,
        linearised: Linearised | None = None,
    ) -> Float[Tensor, " b"]:
        """Return log N(x; c, H H^T + Omega + R) of the linearised h(m + L u) ~ H u + c, ``b``.

        Missing components are left out. Arguments are those of `observe`.
        """
        _, H, c, Omega = linearised or self.linearised(state)
        unit = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
        R = self.model.R if noise is None else scaled(self.model.R, noise)
        return log_density_of_available(obs - c, H, unit, Omega + R)

    def forgets(self) -> int:
        """Return `STEPS_UNTIL_FORGOTTEN`."""
        return STEPS_UNTIL_FORGOTTEN

    def step_back(
        self,
        now: FilterStep,
        following: GaussianState,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> GaussianState:
        """Return the unscented Rauch-Tung-Striebel step: `rts_step` of u, mapped to z = m + L u.

        References: Sarkka (2008), algorithm 1.
        """
        L = self.root(now.state.cov)
        F, a, Omega = self.linearise(self.model.f, now.state.mean, L, control)
        eye = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        white = GaussianState(torch.zeros_like(now.state.mean), eye.expand_as(L))
        u, U = rts_step(white, following, F, Omega + self.model.Q, a)
        return GaussianState(now.state.mean + (L @ u[..., None])[..., 0], L @ U @ L.mT)


class UKF(WithoutHyperparameters):
    """The unscented Kalman filter of the true model, as a baseline; no parameters, as `EKF`."""

    given_equations = True

    def __init__(
        self,
        model: AdditiveModel | OrientationModel | TurningModel,
        *,
        alpha: float = 1.0,
        beta: float = 0.0,
        kappa: float | None = None,
        initial: str = "memory",
    ) -> None:
        """Store model and ``initial``, as `EKF`; the others as in `UnscentedKalmanFilter`."""
        super().__init__()
        self.initial = check_initial(initial)
        self.model, self.alpha, self.beta, self.kappa = model, alpha, beta, kappa

    def fit(
        self, memory: Recording | list[Recording] | None
    ) -> UnscentedKalmanFilter | TurningFilter:
        """Return the filter, as `EKF`."""
        if isinstance(self.model, TurningModel):
            sigma = sigma_points(
                3, self.alpha, self.beta, 0.0 if self.kappa is None else self.kappa
            )
            return turning_filter(self.model, memory, partial(unscented, sigma=sigma))
        return UnscentedKalmanFilter(
            with_initial_moments(self.model, memory, self.initial),
            alpha=self.alpha,
            beta=self.beta,
            kappa=self.kappa,
        )
