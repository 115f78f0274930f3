"""Extended Kalman filter (EKF): the Kalman filter of the model linearised at the mean.

Jacobians come from automatic differentiation.

References: Sarkka (2013), algorithms 5.4, 5.5 and 9.1.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.gaussian.moments import (
    STEPS_UNTIL_FORGOTTEN,
    AdditiveModel,
    GaussianFilter,
    GaussianState,
    check_initial,
    innovation_log_density,
    kalman_correct,
    rts_step,
    with_initial_moments,
)
from kbf.filters.gaussian.polar import TurningFilter, TurningModel, turning_filter
from kbf.filters.protocols import FilterStep, WithoutHyperparameters
from kbf.recording import Recording
from kbf.rkhs.linalg import product
from kbf.ssm import Differentiated, OrientationModel


def linearise(
    f: Callable[[Tensor], Tensor], m: Float[Tensor, "b d"]
) -> tuple[Float[Tensor, "b e d"], Float[Tensor, "b e"]]:
    """Return F = f'(m) and a = f(m) - F m of the first-order Taylor series f(z) ~ F z + a at m.

    Gradients flow through both.

    >>> F, a = linearise(lambda z: z.square(), torch.tensor([[3.0]]))
    >>> F.item(), a.item()
    (6.0, -9.0)
    """
    F, value = tangent(f, m)
    return F, value - (F @ m[..., None])[..., 0]


def tangent(
    f: Callable[[Tensor], Tensor], m: Float[Tensor, "b d"]
) -> tuple[Float[Tensor, "b e d"], Float[Tensor, "b e"]]:
    """Return the Jacobian F = f'(m) and f(m)."""
    if isinstance(f, Differentiated):
        return f.tangent(m)
    with_gradients = torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    if with_gradients or torch.compiler.is_compiling():

        def twice(z: Tensor) -> tuple[Tensor, Tensor]:
            value = f(z)
            return value, value

        # Reverse mode: forward mode (torch 2.15) returns float64 for float32 in functions such as
        # z[0] + 0.4, and takes twice the time.
        return torch.func.vmap(torch.func.jacrev(twice, has_aux=True))(m)
    value = f(m)
    # One backward pass through a copy of m for each row of F: a quarter of the time of jacrev.
    with torch.enable_grad():
        copies = m.expand(value.shape[-1], *m.shape).requires_grad_()
        rows = f(copies).diagonal(dim1=0, dim2=-1)
    if not rows.requires_grad:
        return m.new_zeros(*value.shape, m.shape[-1]), value
    (F,) = torch.autograd.grad(rows, copies, torch.ones_like(rows), materialize_grads=True)
    return F.movedim(0, -2), value


def extended(
    f: Callable[[Tensor], Tensor], m: Float[Tensor, "b d"], L: Float[Tensor, "b d d"]
) -> tuple[Float[Tensor, "b e d"], Float[Tensor, "b e"], Float[Tensor, "b e e"]]:
    """Return F, a and Omega of f(m + L u) ~ F u + a + N(0, Omega), u ~ N(0, I); Omega is zero."""
    F, value = tangent(f, m)
    return F @ L, value, torch.zeros(*value.shape, value.shape[-1], dtype=m.dtype, device=m.device)


class ExtendedKalmanFilter(GaussianFilter):
    """Extended Kalman filter of z' = f(z) + N(0, Q), x = h(z) + N(0, R).

    f is linearised at the filtered mean, h at the predicted mean. Gradients flow through both
    Jacobians. f and h must be differentiable, and map one point ``d`` as well as a batch of them.

    References: Sarkka (2013), algorithm 5.4.
    """

    def predict(self, state: GaussianState, *, generator: Generator | None = None) -> GaussianState:
        """Return the moments: mean f(m), covariance F P F^T + Q with F = f'(m)."""
        F, mean = tangent(self.model.f, state.mean)
        return GaussianState(mean, product(F, state.cov, F.mT) + self.model.Q)

    def observe(
        self, state: GaussianState, obs: Float[Tensor, "b q"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Return `kalman_correct` with H = h'(m)."""
        H, expected = tangent(self.model.h, state.mean)
        return kalman_correct(*state, obs - expected, H, self.model.R)

    def log_likelihood(
        self, state: GaussianState, obs: Float[Tensor, "b q"]
    ) -> Float[Tensor, " b"]:
        """Return log N(x; h(m), H P H^T + R) with H = h'(m), ``b``."""
        H, expected = tangent(self.model.h, state.mean)
        return innovation_log_density(obs - expected, product(H, state.cov, H.mT) + self.model.R)

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
        """Return the extended Rauch-Tung-Striebel step: `rts_step` with f linearised at m.

        References: Sarkka (2013), theorem 9.1.
        """
        F, a = linearise(self.model.f, now.state.mean)
        return rts_step(now.state, following, F, self.model.Q, a)


class EKF(WithoutHyperparameters):
    """The extended Kalman filter of the true model, as a baseline.

    It has neither parameters nor buffers. The equations are in the units of the data.
    """

    given_equations = True

    def __init__(
        self,
        model: AdditiveModel | OrientationModel | TurningModel,
        *,
        initial: str = "memory",
    ) -> None:
        """Store the true model.

        Args:
            model: of an `OrientationModel` the additive form is used; a `TurningModel` is filtered
                in (theta, omega).
            initial: moments of z_0: memory, those of the training states; or model, its m0 and P0.

        Raises:
            ValueError: another ``initial``.
        """
        super().__init__()
        self.model, self.initial = model, check_initial(initial)

    def fit(
        self, memory: Recording | list[Recording] | None
    ) -> ExtendedKalmanFilter | TurningFilter:
        """Return the filter, which starts from the moments that ``initial`` names.

        It has the dtype and the device of the training states.

        Args:
            memory: the training part; None keeps the m0 and P0 of the model.

        Raises:
            ValueError: fewer than two training states, or an `OrientationModel` or `TurningModel`
                without a memory.
        """
        if isinstance(self.model, TurningModel):
            return turning_filter(self.model, memory, extended)
        return ExtendedKalmanFilter(with_initial_moments(self.model, memory, self.initial))
