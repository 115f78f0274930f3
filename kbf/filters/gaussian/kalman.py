"""Gaussian moments: the Kalman filter's two steps, the smoother's step back, and what EKF and UKF share.

Every covariance update is in a form that is a sum of squares, so that it stays symmetric and
positive semi-definite in float32 too.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.rollout import Backward, FilterStep
from kbf.recording import Recording, as_recordings, check_vectors
from kbf.rkhs.linalg import product, psd_solve
from kbf.runtime.html_repr import Shown
from kbf.ssm import OrientationModel, StateSpaceModel

IMPOSSIBLE = 37.0
"""Standard deviations from its mean at which the density of a Gaussian, exp(-37^2 / 2), is smaller than any double can say."""
BLOCK = 32
"""Steps of a recursion with constant matrices that go one after the other."""


FORGOTTEN = 50
"""Steps after which a filter of a model whose noises are as large as its moves has forgotten where it was: 0.5^50 is 1e-15."""


class GaussianState(NamedTuple):
    """N(mean, cov): mean ``b d``, cov ``b d d``."""

    mean: Tensor
    cov: Tensor


@runtime_checkable
class AdditiveModel(Protocol):
    """Anything with the equations of a `kbf.ssm.StateSpaceModel`: z' = f(z) + N(0, Q), x = h(z') + N(0, R), z_0 ~ N(m0, P0)."""

    @property
    def f(self) -> Any:  # pyright takes the function in a NamedTuple for a method
        """The function ``*b d`` -> ``*b d``."""
        ...

    @property
    def h(self) -> Any:  # pyright takes the function in a NamedTuple for a method
        """The function ``*b d`` -> ``*b q``."""
        ...

    @property
    def Q(self) -> Tensor:
        """``d d``."""
        ...

    @property
    def R(self) -> Tensor:
        """``q q``."""
        ...

    @property
    def m0(self) -> Tensor:
        """``d``."""
        ...

    @property
    def P0(self) -> Tensor:
        """``d d``."""
        ...


class LinearModel(NamedTuple):
    """z' = A z + B u + a + N(0, Q), x = C z + c + N(0, R), with z_0 ~ N(m0, P0).

    Attributes:
        A: ``d d``. a: ``d``. Q: ``d d``.
        C: ``q d``. c: ``q``. R: ``q q``.
        m0: ``d``. P0: ``d d``. Mean and covariance before the first move.
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


def kalman_predict(
    mean: Float[Tensor, "b d"],
    cov: Float[Tensor, "b d d"],
    F: Float[Tensor, "*f d d"],
    Q: Float[Tensor, "*g d d"],
    a: Float[Tensor, "*h d"] | float = 0.0,
) -> GaussianState:
    """Move N(m, P) by z' = F z + a + N(0, Q): mean F m + a, covariance F P F^T + Q.

    Args:
        mean: ``b d``.
        cov: ``b d d``.
        F: ``d d``, or ``b d d`` with one matrix for each sequence (as linearisation makes them).
        Q: ``d d`` or ``b d d``.
        a: ``d`` or ``b d``.

    References: Sarkka (2013), equation 4.20.
    """
    return GaussianState(product(F, mean[..., None])[..., 0] + a, product(F, cov, F.mT) + Q)


def kalman_update(
    mean: Float[Tensor, "b d"],
    cov: Float[Tensor, "b d d"],
    x: Float[Tensor, "b q"],
    H: Float[Tensor, "*f q d"],
    R: Float[Tensor, "*g q q"],
    c: Float[Tensor, "*h q"] | float = 0.0,
) -> GaussianState:
    """Condition N(m, P) on x = H z + c + N(0, R), in Joseph form.

    S = H P H^T + R, K = P H^T S^-1; mean m + K (x - H m - c), covariance (I - K H) P (I - K H)^T +
    K R K^T.

    Args:
        mean: ``b d``.
        cov: ``b d d``.
        x: ``b q``.
        H: ``q d`` or ``b q d``.
        R: ``q q`` or ``b q q``.
        c: ``q`` or ``b q``.

    Raises:
        NotPositiveDefiniteError: S is singular (R = 0 where the state is already known).

    >>> mean, cov = torch.zeros(1, 1), torch.eye(1)[None]
    >>> kalman_update(mean, cov, torch.tensor([[2.0]]), torch.eye(1), torch.eye(1))
    GaussianState(mean=tensor([[1.]]), cov=tensor([[[0.5000]]]))

    References: Sarkka (2013), equation 4.21; the Joseph form: Bucy and Joseph (1968).
    """
    return kalman_observe(mean, cov, x, H, R, c)[0]


def kalman_observe(
    mean: Float[Tensor, "b d"],
    cov: Float[Tensor, "b d d"],
    x: Float[Tensor, "b q"],
    H: Float[Tensor, "*f q d"],
    R: Float[Tensor, "*g q q"],
    c: Float[Tensor, "*h q"] | float = 0.0,
) -> tuple[GaussianState, Bool[Tensor, " b"]]:
    """`kalman_update`, and ``b``, whether x was possible: no component `IMPOSSIBLE` standard deviations from its prediction.

    A filter that passes such observations over grows less sure of its prediction with each move,
    until it takes them in.
    """
    return kalman_correct(mean, cov, x - product(H, mean[..., None])[..., 0] - c, H, R)


def kalman_correct(
    mean: Float[Tensor, "b d"],
    cov: Float[Tensor, "b d d"],
    residual: Float[Tensor, "b q"],
    H: Float[Tensor, "*f q d"],
    R: Float[Tensor, "*g q q"],
) -> tuple[GaussianState, Bool[Tensor, " b"]]:
    """`kalman_observe` by how far x is from its prediction."""
    K, updated, variances = kalman_gain(cov, H, R)
    return GaussianState(mean + product(K, residual[..., None])[..., 0], updated), is_possible(
        residual, variances
    )


def kalman_gain(
    cov: Float[Tensor, "*b d d"], H: Float[Tensor, "*f q d"], R: Float[Tensor, "*g q q"]
) -> tuple[Float[Tensor, "*s d q"], Float[Tensor, "*s d d"], Float[Tensor, "*s q"]]:
    """What does not depend on x: the gain K, the covariance after the update, and the variances of x, the diagonal of S."""
    HP = product(H, cov)
    S = product(HP, H.mT) + R
    K = psd_solve(S, HP).mT
    I_KH = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device) - product(K, H)
    return K, product(I_KH, cov, I_KH.mT) + product(K, R, K.mT), S.diagonal(dim1=-2, dim2=-1)


def is_possible(
    residual: Float[Tensor, "*b q"], variances: Float[Tensor, "*c q"]
) -> Bool[Tensor, "*b"]:
    """Whether no component is `IMPOSSIBLE` standard deviations from its prediction."""
    return (residual.square() <= IMPOSSIBLE**2 * variances).all(-1)


def rts_step(
    filtered: GaussianState,
    following: GaussianState,
    F: Float[Tensor, "*f d d"],
    Q: Float[Tensor, "*g d d"],
    a: Float[Tensor, "*h d"] | float = 0.0,
) -> GaussianState:
    """One step backwards: the smoothed moments at t, from the filtered ones at t and the smoothed ones at t + 1.

    With m⁻, P⁻ the prediction from t to t + 1 and G = P F^T (P⁻)^-1: mean m + G (m^s - m⁻),
    covariance P + G (P^s - P⁻) G^T = (I - G F) P (I - G F)^T + G (P^s + Q) G^T.

    Args:
        filtered: moments at t given x_1 ... x_t.
        following: moments at t + 1 given all observations.
        F: the move from t to t + 1 is z' = F z + a + N(0, Q).
        Q: as in `kalman_predict`.
        a: as in `kalman_predict`.

    Raises:
        NotPositiveDefiniteError: P⁻ is singular (a state known exactly that moves without noise).

    References: Sarkka (2013), equation 8.6; Rauch, Tung and Striebel (1965).
    """
    predicted = kalman_predict(*filtered, F, Q, a)
    G = psd_solve(predicted.cov, F @ filtered.cov).mT
    I_GF = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) - G @ F
    mean = filtered.mean + (G @ (following.mean - predicted.mean)[..., None])[..., 0]
    return GaussianState(mean, I_GF @ filtered.cov @ I_GF.mT + G @ (following.cov + Q) @ G.mT)


def settled(before: Float[Tensor, "d d"], after: Float[Tensor, "d d"]) -> bool:
    """Whether two covariances are the same but for rounding."""
    return bool(
        (after - before).abs().max() <= 2 * torch.finfo(after.dtype).eps * after.abs().max()
    )


class KalmanFilter(Shown):
    """The exact filter of a linear model with Gaussian noises (Sarkka (2013), theorem 4.2).

    >>> one = torch.eye(1)
    >>> kf = KalmanFilter(LinearModel(A=one, a=one[0], Q=0 * one, C=one, c=0 * one[0], R=one, m0=0 * one[0], P0=one))
    >>> kf.estimate(kf.update(kf.predict(kf.init(1)), torch.tensor([[3.0]])))
    tensor([[2.]])
    """

    def __init__(self, model: LinearModel, *, allow_missing_sensors: bool = False) -> None:
        """The filter of a model.

        Args:
            model: its tensors may require gradients; the filter keeps them.
            partial: components of an observation may be NaN: their rows of C are left out.
        """
        self.model, self.allow_missing_sensors = model, allow_missing_sensors
        self.controlled: int = 0 if model.B is None else model.B.shape[1]

    def init(self, batch: int, *, generator: Generator | None = None) -> GaussianState:
        """N(m0, P0) for each sequence."""
        return gaussian_init(self.model, batch)

    def predict(
        self,
        state: GaussianState,
        *,
        control: Float[Tensor, "b k"] | None = None,
        generator: Generator | None = None,
    ) -> GaussianState:
        """Move: `kalman_predict` with A, a + B u and Q."""
        return kalman_predict(*state, self.model.A, self.model.Q, self.offset(control))

    def offset(self, control: Float[Tensor, "b k"] | None) -> Float[Tensor, "*b d"]:
        """The part a + B u of a move that the state has no part in."""
        return (
            self.model.a
            if control is None or self.model.B is None
            else self.model.a + control @ self.model.B.mT
        )

    def update(self, state: GaussianState, obs: Float[Tensor, "b q"]) -> GaussianState:
        """Observe ``b q``: `kalman_update` with C, c and R."""
        return self.observe(state, obs)[0]

    def observe(
        self, state: GaussianState, obs: Float[Tensor, "b q"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Observe, and whether that was possible (`kalman_observe`)."""
        C, R, c = self.model.C, self.model.R, self.model.c
        if not self.allow_missing_sensors:
            return kalman_observe(*state, obs, C, R, c)
        spoke = obs.isfinite()
        residual = torch.where(spoke, obs - product(C, state.mean[..., None])[..., 0] - c, 0)
        both = spoke[:, :, None] & spoke[:, None]
        unit = torch.eye(
            len(R), dtype=R.dtype, device=R.device
        )  # of a silent component: noise that says nothing
        return kalman_correct(
            *state, residual, torch.where(spoke[..., None], C, 0), torch.where(both, R, unit)
        )

    def recursion(
        self, state: GaussianState, obs: Float[Tensor, "b T q"]
    ) -> tuple[GaussianState, Bool[Tensor, "b T"]] | None:
        """All steps: P_t and K_t depend on no observation, and soon no more on t; m_t = (I - K_t C)(A m_{t-1} + a) + K_t (x_t - c).

        None for sequences whose covariances differ, or with controls or silent components. Without
        gradients.
        """
        A, a, Q, C, c, R = self.model[:6]
        P, (b, T, _) = state.cov[0], obs.shape
        if self.controlled or self.allow_missing_sensors or not bool((state.cov == P).all()):
            return None
        gains = [kalman_gain(torch.addmm(Q, A @ P, A.mT), C, R)]
        while len(gains) < T and not (len(gains) % 4 == 0 and settled(P, gains[-1][1])):
            P = gains[-1][1]
            gains.append(kalman_gain(torch.addmm(Q, A @ P, A.mT), C, R))
        at = torch.arange(T, device=obs.device).clamp_max(len(gains) - 1)
        K, P, variances = (torch.stack(parts)[at] for parts in zip(*gains, strict=True))
        I_KC, y = (
            torch.eye(len(A), dtype=A.dtype, device=A.device) - K @ C,
            (obs - c).transpose(0, 1),
        )
        means, M = (
            torch.baddbmm((I_KC @ a)[:, None], y, K.mT),
            (I_KC @ A).mT,
        )  # T b d: the part without m_{t-1}
        changing = (
            len(gains) - 1 + (T - len(gains) + 1) % BLOCK
        )  # steps one after the other: what is left are whole blocks
        m = state.mean
        for u, M_t in zip(means[:changing].unbind(), M[:changing].unbind(), strict=True):
            m = u.addmm_(m, M_t)
        if changing < T:
            constant_recursion(m, means[changing:], M[-1])
        before = torch.cat([state.mean[None], means[:-1]])
        possible = is_possible(y - before @ (C @ A).mT - C @ a, variances[:, None])
        return GaussianState(means.transpose(0, 1), P.expand(b, *P.shape)), possible.mT

    def estimate(self, state: GaussianState) -> Float[Tensor, "b d"]:
        """The mean, ``b d``."""
        return state.mean

    def covariance(self, state: GaussianState) -> Float[Tensor, "b d d"]:
        """The covariance, ``b d d``."""
        return state.cov

    def smoother(self) -> Backward:
        """Rauch-Tung-Striebel: `rts_step` with A, a + B u and Q."""

        def step_back(
            now: FilterStep,
            following: GaussianState,
            *,
            control: Tensor | None = None,
            generator: Generator | None = None,
        ) -> GaussianState:
            return rts_step(now.state, following, self.model.A, self.model.Q, self.offset(control))

        return step_back


def constant_recursion(
    first: Float[Tensor, "b d"], inputs: Float[Tensor, "T b d"], M: Float[Tensor, "d d"]
) -> None:
    """x_t = x_{t-1} M + u_t in place of u_t, from x_{-1} = first: T is a multiple of `BLOCK`, and blocks go side by side.

    Each starts from 0; then the start of each is known from the one before, and M^k of it is added
    to the k-th step.
    """
    blocks, powers = inputs.unflatten(0, (len(inputs) // BLOCK, BLOCK)), [M]
    for k in range(1, BLOCK):
        blocks[:, k] += blocks[:, k - 1] @ M
        powers.append(powers[-1] @ M)
    starts = [first]
    for ends in blocks[:, -1]:
        starts.append(torch.addmm(ends, starts[-1], powers[-1]))
    blocks += torch.stack(starts[:-1])[:, None] @ torch.stack(powers)


def gaussian_init(model: LinearModel | AdditiveModel, batch: int) -> GaussianState:
    """N(m0, P0) of a model, ``batch`` times."""
    return GaussianState(
        model.m0.expand(batch, *model.m0.shape), model.P0.expand(batch, *model.P0.shape)
    )


def training_moments(
    memory: Recording | list[Recording],
) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Mean ``d`` and covariance ``d d`` (divided by n - 1) of the training states: where every Gaussian filter starts.

    Raises:
        ValueError: fewer than two states.
    """
    z = torch.cat([s.states for s in as_recordings(memory, allow_missing_sensors=True)])
    if len(z) < 2:
        raise ValueError(
            f"a covariance of the training states needs at least 2 of them, got {len(z)}"
        )
    return z.mean(0), torch.cov(z.mT).reshape(z.shape[1], z.shape[1])


def started(
    model: AdditiveModel | OrientationModel, memory: Recording | list[Recording] | None
) -> AdditiveModel:
    """The true model, started from the mean and covariance of the training states, in their dtype and on their device.

    Args:
        model: an `OrientationModel` becomes its additive form.
        memory: the training part; None keeps the model's own m0 and P0.

    Raises:
        ValueError: an `OrientationModel` without a memory: it has no m0 and P0 of its own. Or
            observations that are no vectors.
    """
    if memory is None:
        if isinstance(model, OrientationModel):
            raise ValueError(
                "an OrientationModel has no start of its own: condition on a memory of training states"
            )
        return model
    check_vectors(as_recordings(memory), "a Gaussian filter")
    m0, P0 = training_moments(memory)
    if isinstance(model, OrientationModel):
        return model.additive(m0, P0)
    return StateSpaceModel(model.f, model.h, model.Q.to(m0), model.R.to(m0), m0, P0)
