"""Kalman filter of a linear Gaussian model, given or fitted by least squares.

z' = A z + B u + a + N(0, Q), x = C z + c + N(0, R), z_0 ~ N(m0, P0).

References: Sarkka (2013), theorem 4.2; Kalman (1960); Hastie, Tibshirani and Friedman (2009),
section 3.2.4 (multivariate regression).
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.densities.learned_ssm import ORDERS, lagged_states
from kbf.filters.gaussian.moments import (
    GaussianFilter,
    GaussianState,
    is_possible,
    kalman_correct,
    kalman_gain,
    kalman_observe,
    kalman_predict,
    leave_out_missing,
    log_density_of_available,
    rts_step,
    training_moments,
)
from kbf.filters.protocols import FilterStep, WithoutHyperparameters
from kbf.recording import Recording, as_recordings, check_vectors, moves, observed_pairs
from kbf.rkhs.linalg import product
from kbf.runtime.errors import FitError, fit_errors

# Steps of a recursion with constant matrices that are computed one after the other.
#
# Blocks of so many steps are computed side by side (`constant_recursion`).
STEPS_IN_BLOCK = 32


class LinearModel(NamedTuple):
    """z' = A z + B u + a + N(0, Q), x = C z + c + N(0, R), with z_0 ~ N(m0, P0).

    Attributes:
        A: ``d d``. a: ``d``. Q: ``d d``.
        C: ``q d``. c: ``q``. R: ``q q``.
        m0: ``d``. P0: ``d d``. Mean and covariance of z_0.
        B: ``d k``, or None for a model without controls u.
    """

    A: Tensor
    a: Tensor
    Q: Tensor
    C: Tensor
    c: Tensor
    R: Tensor
    m0: Tensor
    P0: Tensor
    B: Tensor | None = None


def is_steady(before: Float[Tensor, "d d"], after: Float[Tensor, "d d"]) -> bool:
    """Return whether two covariances are equal up to rounding."""
    tolerance = 2 * torch.finfo(after.dtype).eps * after.abs().max()
    return bool((after - before).abs().max() <= tolerance)


class KalmanFilter(GaussianFilter):
    """The exact filter of a linear Gaussian model.

    >>> one = torch.eye(1)
    >>> model = LinearModel(
    ...     A=one, a=one[0], Q=0 * one, C=one, c=0 * one[0], R=one, m0=0 * one[0], P0=one
    ... )
    >>> kf = KalmanFilter(model)
    >>> kf.estimate(kf.update(kf.predict(kf.init(1)), torch.tensor([[3.0]])))
    tensor([[2.]])
    """

    def __init__(self, model: LinearModel, *, allow_missing_sensors: bool = False) -> None:
        """Store the model.

        Args:
            model: its tensors may require gradients, which the filter propagates.
            allow_missing_sensors: components of an observation may be NaN; the update leaves their
                rows of C out.
        """
        super().__init__(model)
        self.allow_missing_sensors = allow_missing_sensors
        self.controlled: int = 0 if model.B is None else model.B.shape[1]

    def predict(
        self,
        state: GaussianState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> GaussianState:
        """Return `kalman_predict` with A, a + B u and Q."""
        return kalman_predict(*state, self.model.A, self.model.Q, self.offset(control))

    def offset(self, control: Float[Tensor, "b k"] | None) -> Float[Tensor, "*b d"]:
        """Return a + B u, the part of a move that does not depend on the state."""
        if control is None or self.model.B is None:
            return self.model.a
        return self.model.a + control @ self.model.B.mT

    def observe(
        self, state: GaussianState, obs: Float[Tensor, "b q"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Return `kalman_observe` with C, c and R."""
        C, R, c = self.model.C, self.model.R, self.model.c
        if not self.allow_missing_sensors:
            return kalman_observe(*state, obs, C, R, c)
        residual = obs - product(C, state.mean[..., None])[..., 0] - c
        return kalman_correct(*state, *leave_out_missing(residual, C, R))

    def log_likelihood(
        self, state: GaussianState, obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, " b"]:
        """Return log N(x; C m + c, C P C^T + R) of the available components, ``b``."""
        C = self.model.C
        residual = obs - product(C, state.mean[..., None])[..., 0] - self.model.c
        return log_density_of_available(residual, C, state.cov, self.model.R)

    def recursion(
        self, state: GaussianState, obs: Float[Tensor, "b T q"]
    ) -> tuple[GaussianState, Bool[Tensor, "b T"]] | None:
        """Return all steps at once: m_t = (I - K_t C)(A m_{t-1} + a) + K_t (x_t - c).

        P_t and K_t depend on no observation, and become constant in t up to rounding. Returns None
        where the covariances of the batch differ, with controls and with missing sensors. The
        result has no gradients.
        """
        A, a, Q, C, c, R = self.model[:6]
        P, (b, T, _) = state.cov[0], obs.shape
        if self.controlled or self.allow_missing_sensors or not bool((state.cov == P).all()):
            return None
        gains = [kalman_gain(torch.addmm(Q, A @ P, A.mT), C, R)]
        while len(gains) < T and not (len(gains) % 4 == 0 and is_steady(P, gains[-1][1])):
            P = gains[-1][1]
            gains.append(kalman_gain(torch.addmm(Q, A @ P, A.mT), C, R))
        at = torch.arange(T, device=obs.device).clamp_max(len(gains) - 1)
        K, P, variances = (torch.stack(parts)[at] for parts in zip(*gains, strict=True))
        I_KC = torch.eye(len(A), dtype=A.dtype, device=A.device) - K @ C
        y = (obs - c).transpose(0, 1)
        means = torch.baddbmm((I_KC @ a)[:, None], y, K.mT)  # T b d: the part without m_{t-1}
        M = (I_KC @ A).mT
        # so many steps are computed one after the other, so that whole blocks are left
        changing = len(gains) - 1 + (T - len(gains) + 1) % STEPS_IN_BLOCK
        m = state.mean
        for u, M_t in zip(means[:changing].unbind(), M[:changing].unbind(), strict=True):
            m = u.addmm_(m, M_t)
        if changing < T:
            constant_recursion(m, means[changing:], M[-1])
        before = torch.cat([state.mean[None], means[:-1]])
        possible = is_possible(y - before @ (C @ A).mT - C @ a, variances[:, None])
        return GaussianState(means.transpose(0, 1), P.expand(b, *P.shape)), possible.mT

    def step_back(
        self,
        now: FilterStep,
        following: GaussianState,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> GaussianState:
        """Return `rts_step` with A, a + B u and Q."""
        return rts_step(now.state, following, self.model.A, self.model.Q, self.offset(control))


def constant_recursion(
    first: Float[Tensor, "b d"], inputs: Float[Tensor, "T b d"], M: Float[Tensor, "d d"]
) -> None:
    """Overwrite ``inputs`` u with x_t = x_{t-1} M + u_t, from x_{-1} = first.

    T is a multiple of `STEPS_IN_BLOCK`. All blocks are computed at the same time from x = 0. Then
    the first state of each block follows from the one before, and its product with M^k is added to
    step k.
    """
    blocks = inputs.unflatten(0, (len(inputs) // STEPS_IN_BLOCK, STEPS_IN_BLOCK))
    powers = [M]
    for k in range(1, STEPS_IN_BLOCK):
        blocks[:, k] += blocks[:, k - 1] @ M
        powers.append(powers[-1] @ M)
    starts = [first]
    for ends in blocks[:, -1]:
        starts.append(torch.addmm(ends, starts[-1], powers[-1]))
    blocks += torch.stack(starts[:-1])[:, None] @ torch.stack(powers)


@fit_errors()
def regress(
    inputs: Float[Tensor, "m d"], targets: Float[Tensor, "m e"], name: str
) -> tuple[Float[Tensor, "e d"], Float[Tensor, " e"], Float[Tensor, "e e"]]:
    """Return B, b and the residual covariance of the least-squares fit y ~ B u + b.

    The residual covariance is sum r r^T / (m - d - 1). Where inputs are linearly dependent, B is
    the solution of least norm.

    Raises:
        FitError: fewer than d + 1 + e points, with which the residual covariance would be
            singular. The message names the points by ``name``.
    """
    (m, d), e = inputs.shape, targets.shape[1]
    if m < d + 1 + e:
        raise FitError(
            f"a linear model of {name} with {d} inputs and {e} outputs needs at least "
            f"{d + 1 + e} of them, got {m}"
        )
    B = (torch.linalg.pinv(inputs - inputs.mean(0)) @ (targets - targets.mean(0))).mT
    b = targets.mean(0) - B @ inputs.mean(0)
    residual = targets - inputs @ B.mT - b
    return B, b, residual.mT @ residual / (m - d - 1)


def fit_linear(
    memory: Recording | list[Recording] | None, *, allow_missing_sensors: bool = False
) -> LinearModel:
    """Return the least-squares fit of z' = A z + B u + a + N(0, Q) and x = C z + c + N(0, R).

    Transitions do not cross the end of a recording. Masked observations are not used. m0 and P0 are
    the mean and covariance of the training states. With ``allow_missing_sensors`` entries of
    observations may be NaN (`regress_columns`).

    Raises:
        ValueError: observations that are not vectors, or fewer than 2 d + k + 1 transitions or
            d + 1 + q observations.
    """
    recordings = as_recordings(memory, allow_missing_sensors=allow_missing_sensors)
    check_vectors(recordings, "a linear model")
    z, z_next, u = moves(recordings)
    z_seen, x = observed_pairs(recordings)
    AB, a, Q = regress(z if u is None else torch.cat([z, u], -1), z_next, "transitions")
    A, B = AB[:, : z.shape[1]], None if u is None else AB[:, z.shape[1] :]
    fit = regress_columns if allow_missing_sensors else regress
    C, c, R = fit(z_seen, x, "observations")
    R = with_noise_of_constant_sensors(R, x)
    return LinearModel(A, a, Q, C, c, R, *training_moments(recordings), B)


def with_noise_of_constant_sensors(
    R: Float[Tensor, "q q"], x: Float[Tensor, "m q"]
) -> Float[Tensor, "q q"]:
    """Return R with the mean variance of the others for sensors that are constant in ``x``.

    Such a sensor has no row in C, and does not change estimates. Without noise R is singular, and a
    reading that differs from the constant is impossible.
    """
    seen = x.isfinite()
    high = torch.where(seen, x, -torch.inf).amax(0)
    constant = high <= torch.where(seen, x, torch.inf).amin(0)
    if not bool(constant.any()):
        return R
    spread = R.diagonal()[~constant].mean() if bool((~constant).any()) else R.new_ones(())
    return R.masked_fill(constant | constant[:, None], 0) + spread * constant.to(R).diag()


def regress_columns(
    inputs: Float[Tensor, "m d"], targets: Float[Tensor, "m e"], name: str
) -> tuple[Float[Tensor, "e d"], Float[Tensor, " e"], Float[Tensor, "e e"]]:
    """Return `regress` for targets with NaN: each column is fitted to the rows where it is finite.

    The covariance of two residuals is estimated from the rows that have both, and is 0 where there
    are none. Non-positive eigenvalues of the matrix are replaced by 1e-6 of its mean variance.

    Raises:
        ValueError: as `regress`, for a column.
    """
    seen = targets.isfinite()
    fits = [
        regress(inputs[rows], column[rows, None], name)
        for rows, column in zip(seen.mT, targets.mT, strict=True)
    ]
    B, b = torch.cat([fit[0] for fit in fits]), torch.cat([fit[1] for fit in fits])
    residual = torch.where(seen, targets - inputs @ B.mT - b, 0)
    rows = seen.to(residual)
    covariance = residual.mT @ residual / (rows.mT @ rows - inputs.shape[1] - 1).clamp_min(1)
    values, vectors = torch.linalg.eigh(covariance)
    if bool(values[0] <= 0):
        covariance = (vectors * values.clamp_min(1e-6 * covariance.diagonal().mean())) @ vectors.mT
    return B, b, covariance


class LearnedKalman(WithoutHyperparameters):
    """The Kalman filter of the linear model that `fit_linear` fits to the training recordings.

    With order 2 the state of the model is (z_t, z_t - z_{t-1}): a position and its velocity. A
    position alone does not determine the next one where motion has inertia. The filter returns
    estimates of the position.

    It has neither hyper-parameters nor parameters or buffers. The filter has the dtype and the
    device of the recordings. With ``allow_missing_sensors`` components of an observation may be
    NaN; the update leaves their rows of C out.
    """

    allow_missing_sensors: bool = False

    def __init__(self, order: int = 1) -> None:
        """Set the order of the model: 1, or 2 for a state with velocity.

        Raises:
            ValueError: another order.
        """
        super().__init__()
        if order not in ORDERS:
            raise ValueError(f"a linear model has order 1 or 2, got {order!r}")
        self.order: int = order

    def fit(self, memory: Recording | list[Recording] | None) -> KalmanFilter:
        """Return the Kalman filter of the linear model fitted to ``memory``.

        Raises:
            ValueError: no memory, or too few points (`fit_linear`).
        """
        missing = self.allow_missing_sensors
        recordings = as_recordings(memory, allow_missing_sensors=missing)
        if self.order == 1:
            model = fit_linear(recordings, allow_missing_sensors=missing)
            return KalmanFilter(model, allow_missing_sensors=missing)
        longer = [with_velocity(s) for s in recordings if len(s.states) > self.order]
        if not longer:
            raise FitError("a linear model with velocity requires a recording of at least 3 steps")
        model = fit_linear(longer, allow_missing_sensors=missing)
        d = recordings[0].states.shape[1]
        mean = torch.cat([s.states for s in recordings]).mean(0)
        model = model._replace(m0=torch.cat([mean, model.m0[d:]]))
        return PositionFilter(model, d, allow_missing_sensors=missing)


class PositionFilter(KalmanFilter):
    """The Kalman filter of positions and velocities, whose estimates are the positions."""

    def __init__(self, model: LinearModel, d: int, *, allow_missing_sensors: bool = False) -> None:
        """``model`` has states (z, velocity) of 2 d components."""
        super().__init__(model, allow_missing_sensors=allow_missing_sensors)
        self.d: int = d

    def estimate(self, state: GaussianState) -> Float[Tensor, "b d"]:
        """Return the mean of the position, ``b d``."""
        return state.mean[:, : self.d]

    def covariance(self, state: GaussianState) -> Float[Tensor, "b d d"]:
        """Return the covariance of the position, ``b d d``."""
        return state.cov[:, : self.d, : self.d]


def with_velocity(recording: Recording) -> Recording:
    """Return a recording of states (z_t, z_t - z_{t-1}), from its second step on."""
    mask, controls = recording.mask, recording.controls
    return Recording(
        lagged_states(recording.states, 2),
        recording.obs[1:],
        None if mask is None else mask[1:],
        None if controls is None else controls[1:],
    )
