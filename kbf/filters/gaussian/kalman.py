"""Kalman filter of a linear Gaussian model.

z' = A z + B u + a + N(0, Q), x = C z + c + N(0, R), z_0 ~ N(m0, P0).

References: Sarkka (2013), theorem 4.2; Kalman (1960).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.gaussian.moments import (
    GaussianFilter,
    GaussianState,
    innovation_log_density,
    is_possible,
    kalman_correct,
    kalman_gain,
    kalman_observe,
    kalman_predict,
    rts_step,
)
from kbf.filters.protocols import FilterStep
from kbf.rkhs.linalg import product

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
        return kalman_correct(*state, *self.available(state, obs))

    def available(
        self, state: GaussianState, obs: Float[Tensor, "b q"]
    ) -> tuple[Float[Tensor, "b q"], Float[Tensor, "b q d"], Float[Tensor, "b q q"]]:
        """Return x - C m - c, C and R, without the missing components.

        A missing component has C = 0 and unit noise: it changes neither mean nor covariance.
        """
        C, R, c = self.model.C, self.model.R, self.model.c
        seen = obs.isfinite()
        residual = torch.where(seen, obs - product(C, state.mean[..., None])[..., 0] - c, 0)
        H = torch.where(seen[..., None], C, 0)
        unit = torch.eye(len(R), dtype=R.dtype, device=R.device)
        return residual, H, torch.where(seen[:, :, None] & seen[:, None], R, unit)

    def log_likelihood(
        self, state: GaussianState, obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, " b"]:
        """Return log N(x; C m + c, C P C^T + R) of the available components, ``b``.

        References: Sarkka (2013), theorem 12.3.
        """
        residual, H, R = self.available(state, obs)
        density = innovation_log_density(residual, product(H, state.cov, H.mT) + R)
        return density + 0.5 * math.log(2 * math.pi) * (~obs.isfinite()).sum(-1)

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
