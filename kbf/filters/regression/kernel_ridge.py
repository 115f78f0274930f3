"""Memoryless baseline: kernel ridge regression of the state on one observation."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.scaling import warn_of_scales
from kbf.recording import Recording, as_recordings, control_width
from kbf.rkhs.conditional_means import exact, feature_ridge
from kbf.rkhs.features import nystrom_whitening
from kbf.rkhs.kernels import KERNELS, median_distance
from kbf.rkhs.linalg import evenly
from kbf.runtime.html_repr import Shown, ShownModule

# Landmarks of a regression, and observations that the selection of kernel and ridge uses, whose
# cost is O(n^3).
MAX_LANDMARKS = 3000


class FrameState(NamedTuple):
    """The estimate, ``b d``; no other information is carried from step to step."""

    estimate: Tensor


@dataclass(eq=False, repr=False)
class FrameFilter(Shown):
    """E[z | x] by kernel ridge regression: m + k(x, X) alpha; m without an observation.

    Attributes:
        kernel: k, of observations.
        points: X ``n q``, all observations of the memory or a part of them.
        alpha: ``n d``.
        mean: m ``d``, of the training states.
        controlled: components of the controls, which are ignored.
    """

    kernel: Callable[[Tensor, Tensor], Tensor]
    points: Float[Tensor, "n q"]
    alpha: Float[Tensor, "n d"]
    mean: Float[Tensor, " d"]
    controlled: int = 0

    def init(self, batch: int, *, generator: Generator | None = None) -> FrameState:
        """The mean of the training states."""
        return FrameState(self.mean.expand(batch, len(self.mean)))

    def predict(
        self,
        state: FrameState,
        *,
        control: Tensor | None = None,
        generator: Generator | None = None,
    ) -> FrameState:
        """The mean of the training states, the estimate without an observation."""
        return FrameState(self.mean.expand_as(state.estimate))

    def update(self, state: FrameState, obs: Float[Tensor, "b *x"]) -> FrameState:
        """The regression at the observations ``b *x``; it does not depend on the previous state."""
        return FrameState(self.mean + self.kernel(obs.flatten(1), self.points) @ self.alpha)

    def estimate(self, state: FrameState) -> Float[Tensor, "b d"]:
        """The estimate, ``b d``."""
        return state.estimate


def leave_one_out(
    gram: Float[Tensor, "n n"], targets: Float[Tensor, "n d"], regs: Float[Tensor, " r"]
) -> Float[Tensor, " r"]:
    """Mean squared leave-one-out error of kernel ridge regression for each ridge, in closed form.

    It is the mean over i of ||y_i - f_{-i}(x_i)||^2.

    With H = n reg (G + n reg I)^-1, the residual of the fit without i at i is (H Y)_i / H_ii, for
    one ridge n reg in all fits. One eigendecomposition, O(n^3), serves every ridge.

    References: Wahba (1990), section 4.2.
    """
    s, U = torch.linalg.eigh(gram)
    ridge = len(gram) * regs[:, None]
    shrink = ridge / (s.clamp_min(0) + ridge)
    residual = (U * shrink[:, None]) @ (U.mT @ targets) / (shrink @ U.mT.square())[..., None]
    return residual.square().sum(-1).mean(-1)


def subset_of_regressors(
    kernel: Callable[[Tensor, Tensor], Tensor],
    landmarks: Float[Tensor, "m q"],
    x: Float[Tensor, "n q"],
    targets: Float[Tensor, "n d"],
    reg: float,
) -> Float[Tensor, "m d"]:
    """alpha = (K_mn K_nm + n reg K_mm)^-1 K_mn Y: kernel ridge regression with m landmarks.

    The regression is on all n points.

    It is solved in the features psi(x)^T = k(x, landmarks) W, W W^T = K_mm^-1, in float64
    (`kbf.rkhs.conditional_means.feature_ridge`). With all points for landmarks it is the whole
    regression, (G + n reg I)^-1 Y. O(n m^2).

    References: Rasmussen and Williams (2006), equation 8.14.
    """
    landmarks = landmarks.double()
    whiten = nystrom_whitening(kernel(landmarks, landmarks))
    fit = feature_ridge(
        lambda rows: kernel(rows, landmarks), x.double(), targets.double(), reg, whiten=whiten
    )
    return (fit.root @ fit.coef).to(targets)


class FrameRegression(ShownModule):
    """Kernel ridge regression of the state on the observation of the same step.

    The bandwidth is a factor times the median distance of the memory's observations; `prepare`
    selects factor and ridge by `leave_one_out` and keeps both as buffers. States are centred, so
    that far from all observations the estimate is their mean. Of more than `MAX_LANDMARKS`
    observations the selection uses that many, evenly spaced; the regression is on all of them with
    kernels at these landmarks (`subset_of_regressors`).
    """

    def __init__(
        self,
        kernel: str = "gaussian",
        *,
        factors: Iterable[float] = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0),
        regs: Iterable[float] = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0),
    ) -> None:
        """Initialise with factor 1 and ridge 1e-3, which `prepare` replaces.

        Args:
            kernel: a name of `kbf.rkhs.kernels.KERNELS`.
            factors: of the bandwidth, to choose from.
            regs: ridges, to choose from (they are multiplied by n).

        Raises:
            ValueError: an unknown kernel.
        """
        super().__init__()
        if kernel not in KERNELS:
            raise ValueError(f"unknown kernel {kernel!r}: choose one of {sorted(KERNELS)}")
        self.kernel = kernel
        self.factors: tuple[float, ...] = tuple(factors)
        self.regs: tuple[float, ...] = tuple(regs)
        self.factor: Tensor = nn.Buffer(torch.tensor(1.0, dtype=torch.float64))
        self.reg: Tensor = nn.Buffer(torch.tensor(1e-3, dtype=torch.float64))

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Select factor and ridge by the leave-one-out error on the observed steps, in O(n^3)."""
        x, z, _ = observed(memory)
        if as_recordings(memory)[0].obs.ndim == 2:
            warn_of_scales(x, "observations")
        some = evenly(len(x), MAX_LANDMARKS, x.device)
        x, z = x[some], z[some]
        regs = torch.tensor(self.regs, dtype=x.dtype, device=x.device)
        scores = torch.stack(
            [leave_one_out(self.at(x, factor)(x, x), z, regs) for factor in self.factors]
        )
        best = int(scores.argmin())
        self.factor.fill_(self.factors[best // len(self.regs)])
        self.reg.fill_(self.regs[best % len(self.regs)])

    def fit(self, memory: Recording | list[Recording] | None) -> FrameFilter:
        """Fit to the observed steps of ``memory``, in O(n^3) or O(n `MAX_LANDMARKS`^2).

        In the dtype and on the device of the memory.

        Raises:
            ValueError: no memory, or fewer than two observations in it.
        """
        x, z, mean = observed(memory)
        landmarks = x[evenly(len(x), MAX_LANDMARKS, x.device)]
        kernel, reg = self.at(landmarks, float(self.factor)), float(self.reg)
        if len(x) <= MAX_LANDMARKS:
            alpha = exact(kernel, x, z, reg).coef
        else:
            alpha = subset_of_regressors(kernel, landmarks, x, z, reg)
        return FrameFilter(kernel, landmarks, alpha, mean, control_width(as_recordings(memory)))

    def at(self, x: Float[Tensor, "n q"], factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        """The kernel with the bandwidth of ``factor`` times the median distance of x."""
        return partial(KERNELS[self.kernel], bandwidth=factor * median_distance(x, distinct=True))


def observed(
    memory: Recording | list[Recording] | None,
) -> tuple[Float[Tensor, "n q"], Float[Tensor, "n d"], Float[Tensor, " d"]]:
    """Observed steps: flattened observations ``n q``, centred states ``n d``; mean state ``d``.

    The mean is over all steps.
    """
    recordings = as_recordings(memory)
    x = torch.cat([s.obs if s.mask is None else s.obs[s.mask] for s in recordings]).flatten(1)
    z = torch.cat([s.states if s.mask is None else s.states[s.mask] for s in recordings])
    mean = torch.cat([s.states for s in recordings]).mean(0)
    return x, z - mean, mean
