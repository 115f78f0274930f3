"""Gaussian moments: prediction, update and Rauch-Tung-Striebel step.

Every covariance update is a sum of squares (Joseph form), so that covariances stay symmetric and
positive semi-definite in float32, too. The Kalman filter, the EKF and the UKF consist of these
functions; `GaussianFilter` holds the methods that the three have in common.

References: Sarkka (2013), *Bayesian filtering and smoothing*, chapters 4, 5, 8 and 9.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.densities.base import LOG_2PI
from kbf.filters.protocols import Backward, FilterStep, UpdateByObserve
from kbf.recording import Recording, as_recordings, check_vectors
from kbf.rkhs.linalg import cholesky, product, psd_solve
from kbf.runtime.errors import FitError
from kbf.runtime.html_repr import Shown
from kbf.ssm import OrientationModel, StateSpaceModel

# Steps after which the state no longer depends on the first one, to rounding.
#
# Of a model whose noises are as large as its moves: 0.5^50 is 1e-15.
STEPS_UNTIL_FORGOTTEN = 50
# Standard deviations from the mean at which an observation counts as impossible.
#
# The density of a Gaussian there, exp(-37^2 / 2), is below the smallest number in double precision.
MAX_DEVIATIONS = 37.0


# Where a filter with given equations takes the moments of z_0 from.
INITIALS = ("memory", "model")


class GaussianState(NamedTuple):
    """The moments of N(mean, cov): mean ``b d``, cov ``b d d``."""

    mean: Tensor
    cov: Tensor


@runtime_checkable
class AdditiveModel(Protocol):
    """A model z' = f(z) + N(0, Q), x = h(z') + N(0, R), z_0 ~ N(m0, P0).

    `kbf.ssm.StateSpaceModel` is one.
    """

    @property
    def f(self) -> Any:  # pyright takes a function in a NamedTuple for a method
        """The mean of the next state, ``*b d`` -> ``*b d``."""
        ...

    @property
    def h(self) -> Any:  # pyright takes a function in a NamedTuple for a method
        """The mean of the observation, ``*b d`` -> ``*b q``."""
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


def kalman_predict(
    mean: Float[Tensor, "b d"],
    cov: Float[Tensor, "b d d"],
    F: Float[Tensor, "*f d d"],
    Q: Float[Tensor, "*g d d"],
    a: Float[Tensor, "*h d"] | float = 0.0,
) -> GaussianState:
    """Return the moments of z' = F z + a + N(0, Q): mean F m + a, covariance F P F^T + Q.

    Args:
        mean: ``b d``.
        cov: ``b d d``.
        F: ``d d``, or ``b d d`` with one matrix for each element of the batch.
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
    """Return N(m, P) given x = H z + c + N(0, R), in Joseph form.

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
        NotPositiveDefiniteError: S is singular (R = 0 where P is 0).

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
    """Return `kalman_update` and, ``b``, whether x was possible (`is_possible`).

    A filter that rejects impossible observations becomes less certain with each prediction, until
    it accepts them.
    """
    return kalman_correct(mean, cov, x - product(H, mean[..., None])[..., 0] - c, H, R)


def kalman_correct(
    mean: Float[Tensor, "b d"],
    cov: Float[Tensor, "b d d"],
    residual: Float[Tensor, "b q"],
    H: Float[Tensor, "*f q d"],
    R: Float[Tensor, "*g q q"],
) -> tuple[GaussianState, Bool[Tensor, " b"]]:
    """Return `kalman_observe` from the innovation, ``residual`` = x - H m - c."""
    K, updated, variances = kalman_gain(cov, H, R)
    corrected = GaussianState(mean + product(K, residual[..., None])[..., 0], updated)
    return corrected, is_possible(residual, variances)


def kalman_gain(
    cov: Float[Tensor, "*b d d"], H: Float[Tensor, "*f q d"], R: Float[Tensor, "*g q q"]
) -> tuple[Float[Tensor, "*s d q"], Float[Tensor, "*s d d"], Float[Tensor, "*s q"]]:
    """Return the gain K, the updated covariance and the diagonal of S: none depends on x."""
    HP = product(H, cov)
    S = product(HP, H.mT) + R
    K = psd_solve(S, HP).mT
    I_KH = torch.eye(cov.shape[-1], dtype=cov.dtype, device=cov.device) - product(K, H)
    return K, product(I_KH, cov, I_KH.mT) + product(K, R, K.mT), S.diagonal(dim1=-2, dim2=-1)


def innovation_log_density(
    residual: Float[Tensor, "b q"], S: Float[Tensor, "*b q q"]
) -> Float[Tensor, " b"]:
    """Return log N(residual; 0, S), the log density of an observation given those before it."""
    return log_densities(residual[:, None], S)[:, 0]


def log_densities(
    residuals: Float[Tensor, "*b n q"], S: Float[Tensor, "*b q q"]
) -> Float[Tensor, "*b n"]:
    """Return log N(r_i; 0, S) of n residuals; S is factorised once for all of them."""
    factor = cholesky(S)
    white = torch.linalg.solve_triangular(factor, residuals.mT, upper=False)
    scale = factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * LOG_2PI * S.shape[-1]
    return -0.5 * white.square().sum(-2) - scale[..., None]


def log_density_of_available(
    residual: Float[Tensor, "b q"], H: Float[Tensor, "*f q d"], cov: Tensor, R: Tensor
) -> Float[Tensor, " b"]:
    """Return log N(residual; 0, H P H^T + R) of the components that are not NaN.

    References: Sarkka (2013), theorem 12.3.
    """
    missing = (~residual.isfinite()).sum(-1).to(cov)
    residual, H, R = leave_out_missing(residual, H, R)
    density = innovation_log_density(residual, product(H, cov, H.mT) + R)
    return density + 0.5 * LOG_2PI * missing


def is_possible(
    residual: Float[Tensor, "*b q"], variances: Float[Tensor, "*c q"]
) -> Bool[Tensor, "*b"]:
    """Return whether no component is `MAX_DEVIATIONS` standard deviations from its prediction."""
    return (residual.square() <= MAX_DEVIATIONS**2 * variances).all(-1)


def leave_out_missing(
    residual: Float[Tensor, "b q"], H: Float[Tensor, "*f q d"], R: Float[Tensor, "*g q q"]
) -> tuple[Float[Tensor, "b q"], Float[Tensor, "b q d"], Float[Tensor, "b q q"]]:
    """Return innovation, H and R without the components whose innovation is NaN.

    A missing component has H = 0 and unit noise: it changes neither mean nor covariance.
    """
    seen = residual.isfinite()
    unit = torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    return (
        torch.where(seen, residual, 0),
        torch.where(seen[..., None], H, 0),
        torch.where(seen[:, :, None] & seen[:, None], R, unit),
    )


def rts_step(
    filtered: GaussianState,
    following: GaussianState,
    F: Float[Tensor, "*f d d"],
    Q: Float[Tensor, "*g d d"],
    a: Float[Tensor, "*h d"] | float = 0.0,
) -> GaussianState:
    """Return the smoothed moments at t from the filtered ones at t and the smoothed ones at t + 1.

    With m⁻, P⁻ the prediction from t to t + 1 and G = P F^T (P⁻)^-1: mean m + G (m^s - m⁻),
    covariance P + G (P^s - P⁻) G^T = (I - G F) P (I - G F)^T + G (P^s + Q) G^T.

    Args:
        filtered: moments at t given x_1 ... x_t.
        following: moments at t + 1 given all observations.
        F: the move from t to t + 1 is z' = F z + a + N(0, Q).
        Q: as in `kalman_predict`.
        a: as in `kalman_predict`.

    Raises:
        NotPositiveDefiniteError: P⁻ is singular (P = 0 and Q = 0).

    References: Sarkka (2013), equation 8.6; Rauch, Tung and Striebel (1965).
    """
    predicted = kalman_predict(*filtered, F, Q, a)
    G = psd_solve(predicted.cov, F @ filtered.cov).mT
    I_GF = torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) - G @ F
    mean = filtered.mean + (G @ (following.mean - predicted.mean)[..., None])[..., 0]
    return GaussianState(mean, I_GF @ filtered.cov @ I_GF.mT + G @ (following.cov + Q) @ G.mT)


class GaussianFilter(UpdateByObserve[GaussianState], Shown):
    """A filter whose belief is N(mean, cov): the methods that do not depend on the linearisation.

    A subclass defines ``predict``, ``observe`` and ``step_back``.
    """

    def __init__(self, model: Any) -> None:
        """``model``: has the moments ``m0`` and ``P0`` of the state before the first move."""
        self.model = model

    def init(self, batch: int, *, generator: Generator | None = None) -> GaussianState:
        """Return N(m0, P0) for each recording of the batch."""
        m0, P0 = self.model.m0, self.model.P0
        return GaussianState(m0.expand(batch, *m0.shape), P0.expand(batch, *P0.shape))

    def estimate(self, state: GaussianState) -> Float[Tensor, "b d"]:
        """Return the mean, ``b d``."""
        return state.mean

    def covariance(self, state: GaussianState) -> Float[Tensor, "b d d"]:
        """Return the covariance, ``b d d``."""
        return state.cov

    def smoother(self) -> Backward:
        """Return the step back in time, ``step_back``."""
        return self.step_back

    def step_back(
        self,
        now: FilterStep,
        following: GaussianState,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> GaussianState:
        """Return the smoothed moments at t from the smoothed moments at t + 1 (`rts_step`)."""
        raise NotImplementedError


def training_moments(
    memory: Recording | list[Recording],
) -> tuple[Float[Tensor, " d"], Float[Tensor, "d d"]]:
    """Return mean ``d`` and covariance ``d d`` (divided by n - 1) of the training states.

    Every Gaussian filter starts from them.

    Raises:
        FitError: fewer than two states.
    """
    z = torch.cat([s.states for s in as_recordings(memory, allow_missing_sensors=True)])
    if len(z) < 2:
        raise FitError(
            f"a covariance of the training states needs at least 2 of them, got {len(z)}"
        )
    return z.mean(0), torch.cov(z.mT).reshape(z.shape[1], z.shape[1])


def check_initial(initial: str) -> str:
    """Return a name among `INITIALS`.

    Raises:
        ValueError: another name.
    """
    if initial not in INITIALS:
        raise ValueError(f"initial must be {' or '.join(INITIALS)}, got {initial!r}")
    return initial


def with_initial_moments(
    model: AdditiveModel | OrientationModel,
    memory: Recording | list[Recording] | None,
    initial: str = "memory",
) -> AdditiveModel:
    """Return the true model with the moments of the training states as its initial moments.

    The result has the dtype and the device of the training states.

    Args:
        model: the true model; of an `OrientationModel` the additive form is used.
        memory: the training part; None keeps the m0 and P0 of the model.
        initial: memory, or model to keep the m0 and P0 of an additive model.

    Raises:
        ValueError: an `OrientationModel` without a memory, since it has no m0 and P0; or
            observations that are not vectors.
    """
    if memory is None:
        if isinstance(model, OrientationModel):
            raise ValueError("an OrientationModel has no initial moments: fit() requires a memory")
        return model
    check_vectors(as_recordings(memory), "a Gaussian filter")
    m0, P0 = training_moments(memory)
    if isinstance(model, OrientationModel):
        return model.additive(m0, P0)
    if initial == "model":
        m0, P0 = model.m0.to(m0), model.P0.to(m0)
    return StateSpaceModel(model.f, model.h, model.Q.to(m0), model.R.to(m0), m0, P0)
