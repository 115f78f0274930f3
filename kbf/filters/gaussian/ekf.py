"""Extended Kalman filter: the Kalman filter of the model linearised at the mean, with Jacobians by autodiff."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor

from kbf.filters.gaussian.kalman import (
    FORGOTTEN,
    AdditiveModel,
    GaussianState,
    gaussian_init,
    kalman_correct,
    rts_step,
    started,
)
from kbf.filters.gaussian.polar import TurningFilter, TurningModel, turning_filter
from kbf.filters.rollout import Backward, FilterStep
from kbf.recording import Recording
from kbf.rkhs.linalg import product
from kbf.runtime.html_repr import Shown, ShownModule
from kbf.ssm import Differentiated, OrientationModel


def linearise(
    f: Callable[[Tensor], Tensor], m: Float[Tensor, "b d"]
) -> tuple[Float[Tensor, "b e d"], Float[Tensor, "b e"]]:
    """First-order Taylor series f(z) ~ F z + a at m: the Jacobian F = f'(m) and a = f(m) - F m. Gradients are kept.

    >>> F, a = linearise(lambda z: z.square(), torch.tensor([[3.0]]))
    >>> F.item(), a.item()
    (6.0, -9.0)
    """
    F, value = tangent(f, m)
    return F, value - (F @ m[..., None])[..., 0]


def tangent(
    f: Callable[[Tensor], Tensor], m: Float[Tensor, "b d"]
) -> tuple[Float[Tensor, "b e d"], Float[Tensor, "b e"]]:
    """The Jacobian F = f'(m), and f(m)."""
    if isinstance(f, Differentiated):
        return f.tangent(m)
    if (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch.compiler.is_compiling()
    ):

        def twice(z: Tensor) -> tuple[Tensor, Tensor]:
            value = f(z)
            return value, value

        # reverse mode: forward mode (torch 2.15) turns float32 into float64 in such f as z[0] +
        # 0.4, and takes twice the time
        return torch.func.vmap(torch.func.jacrev(twice, has_aux=True))(m)
    value = f(m)
    with (
        torch.enable_grad()
    ):  # one pass back through a copy of m for each row of F: a quarter of the time
        copies = m.expand(value.shape[-1], *m.shape).requires_grad_()
        rows = f(copies).diagonal(dim1=0, dim2=-1)
    if not rows.requires_grad:
        return m.new_zeros(*value.shape, m.shape[-1]), value
    return torch.autograd.grad(rows, copies, torch.ones_like(rows), materialize_grads=True)[
        0
    ].movedim(0, -2), value


def extended(
    f: Callable[[Tensor], Tensor], m: Float[Tensor, "b d"], L: Float[Tensor, "b d d"]
) -> tuple[Float[Tensor, "b e d"], Float[Tensor, "b e"], Float[Tensor, "b e e"]]:
    """The same of f(m + L u) ~ F u + a, u ~ N(0, I), with an Omega of zeros for what the line leaves out."""
    F, value = tangent(f, m)
    return F @ L, value, torch.zeros(*value.shape, value.shape[-1], dtype=m.dtype, device=m.device)


class ExtendedKalmanFilter(Shown):
    """Extended Kalman filter for z' = f(z) + N(0, Q), x = h(z) + N(0, R).

    f is linearised at the filtered mean and h at the predicted one; gradients flow through both
    Jacobians.

    References: Sarkka (2013), algorithm 5.4.
    """

    def __init__(self, model: AdditiveModel) -> None:
        """``model``: f and h must be differentiable and map one point ``d`` as well as a batch of them."""
        self.model = model

    def init(self, batch: int, *, generator: Generator | None = None) -> GaussianState:
        """N(m0, P0) for each sequence."""
        return gaussian_init(self.model, batch)

    def predict(self, state: GaussianState, *, generator: Generator | None = None) -> GaussianState:
        """Mean f(m), covariance F P F^T + Q with F = f'(m)."""
        F, mean = tangent(self.model.f, state.mean)
        return GaussianState(mean, product(F, state.cov, F.mT) + self.model.Q)

    def update(self, state: GaussianState, obs: Float[Tensor, "b q"]) -> GaussianState:
        """Observe ``b q``: `kalman_update` with H = h'(m)."""
        return self.observe(state, obs)[0]

    def observe(
        self, state: GaussianState, obs: Float[Tensor, "b q"]
    ) -> tuple[GaussianState, Bool[Tensor, " b"]]:
        """Observe, and whether that was possible (`kalman_correct`)."""
        H, expected = tangent(self.model.h, state.mean)
        return kalman_correct(*state, obs - expected, H, self.model.R)

    def forgets(self) -> int:
        """As many steps as noise of the size of the states takes."""
        return FORGOTTEN

    def estimate(self, state: GaussianState) -> Float[Tensor, "b d"]:
        """The mean, ``b d``."""
        return state.mean

    def covariance(self, state: GaussianState) -> Float[Tensor, "b d d"]:
        """The covariance, ``b d d``."""
        return state.cov

    def smoother(self) -> Backward:
        """Extended Rauch-Tung-Striebel: `rts_step` with f linearised at the filtered mean, as in predict.

        References: Sarkka (2013), theorem 9.1.
        """

        def step_back(
            now: FilterStep,
            following: GaussianState,
            *,
            control: Tensor | None = None,
            generator: Generator | None = None,
        ) -> GaussianState:
            F, a = linearise(self.model.f, now.state.mean)
            return rts_step(now.state, following, F, self.model.Q, a)

        return step_back


class EKF(ShownModule):
    """The extended Kalman filter that knows the true model, as a baseline.

    It has no parameters and no buffers: the model is given, the start comes from the memory.
    """

    def __init__(self, model: AdditiveModel | OrientationModel | TurningModel) -> None:
        """``model``: the true one; an `OrientationModel` is used in its additive form, a `TurningModel` in (theta, omega)."""
        super().__init__()
        self.model = model

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Nothing to choose."""

    def fit(
        self, memory: Recording | list[Recording] | None
    ) -> ExtendedKalmanFilter | TurningFilter:
        """The filter started from the mean and covariance of the training states, in their dtype and on their device.

        Args:
            memory: the training part; None starts from the model's own m0 and P0.

        Raises:
            ValueError: fewer than two training states, or an `OrientationModel` or `TurningModel`
                without a memory.
        """
        if isinstance(self.model, TurningModel):
            return turning_filter(self.model, memory, extended)
        return ExtendedKalmanFilter(started(self.model, memory))
