"""Filters of rotations from images: kernel Bayes rules, Kalman filters, and regression.

Each is made of a memory, states ``T 9`` and observations ``T c h w``, and is a function of
successive images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.filters.gaussian.kalman import KalmanFilter, fit_linear
from kbf.filters.kernel.feature_kbf import Psi
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.operators import ratio_operator_primal, transition_operator_primal
from kbf.filters.kernel.update.rule import PrimalUpdate
from kbf.filters.rollout import rollout
from kbf.images.encoders import CNN
from kbf.images.losses import ridge_loss
from kbf.recording import Recording, transitions
from kbf.rkhs.embeddings import Embedding, cme_weights_primal, project_so3
from kbf.rkhs.features import NystromFeatures
from kbf.rkhs.kernels import Kernel, gaussian, median_distance
from studies.papers.fukumizu_filtering import Weights
from studies.papers.rotations import quaternions, rotations_of

Images = Float[Tensor, "t c h w"]
Estimator = Callable[[Tensor], Tensor]
"""Images ``t c h w`` of successive frames -> estimates ``t 3 3``."""


def matrices(states: Float[Tensor, "t 9"]) -> Float[Tensor, "t 3 3"]:
    """Vectors of nine numbers as 3 x 3 matrices."""
    return states.unflatten(-1, (3, 3))


def pixels(images: Images, beta: float, rank: int) -> NystromFeatures:
    """Features of the Gaussian kernel between images; bandwidth beta times the median distance."""
    x = images.flatten(1)
    return NystromFeatures("gaussian", beta * median_distance(x), x, rank, 1e-9)


def entries(
    states: Float[Tensor, "T 9"], beta: float, rank: int
) -> tuple[Float[Tensor, "T r"], Kernel]:
    """Features of the states for a Gaussian kernel of the nine entries, and the kernel.

    The bandwidth is beta times the median distance.
    """
    width = beta * median_distance(states)
    return NystromFeatures("gaussian", width, states, rank, 1e-9)(states), partial(
        gaussian, bandwidth=width
    )


def kernel_bayes(
    memory: Recording,
    psi: nn.Module,
    eps: float,
    *,
    gauss: tuple[Float[Tensor, "T r"], Kernel] | None = None,
    original: bool = False,
) -> Estimator:
    """The kernel Bayes filter by either rule, with the image features ``psi``.

    The original one is equations 18 and 19 of Fukumizu et al.: gamma = T (G_Z + T eps I)^-1 G_Z P
    alpha is T times the mu there, and delta T^2 times theirs, which is 2 eps.

    Args:
        memory: the training part.
        psi: ``m c h w`` -> ``m p``; applied to all images of a film at once.
        eps: all ridges.
        gauss: `entries`, for a Gaussian kernel of the states; the estimate is the pre-image. None
            for the kernel tr(A B^T), whose features are the nine entries themselves; the estimate
            is in SO(3).
        original: which rule.
    """
    z, T = memory.states, len(memory.states)
    phi, k = gauss or (z, None)
    P, A = transition_operator_primal(phi, transitions([T]), eps), ratio_operator_primal(phi, eps)
    rule, reg = ("original", 2 * eps * T**2) if original else ("importance_weighted", eps)
    update = PrimalUpdate(nn.Identity(), psi(memory.obs)[:, None], reg, rule=rule, dtype=z.dtype)
    filter = Weights(KernelBayesFilter(z, P, A, update, normalise=not original, clip=not original))

    def estimates(images: Images) -> Tensor:
        w = rollout(filter, psi(images)[None]).estimates[0]
        return project_so3(w, matrices(z)) if k is None else matrices(Embedding(z, w).mode(k))

    return estimates


def once(make: Callable[[Recording, Any], Any]) -> Callable[[Recording, Any], Any]:
    """The same function of a memory and a number, with its intermediate results cached.

    The lengths of the memories are the keys.
    """
    made: dict[tuple[int, Any], Any] = {}

    def get(memory: Recording, number: Any) -> Any:
        key = len(memory.obs), number
        if key not in made:
            made[key] = make(memory, number)
        return made[key]

    return get


def on_pixels(
    *, rank: int, trace: bool, original: bool
) -> Callable[[Recording, float, float], Estimator]:
    """KBR and IW: Gaussian kernel between images, ``trace`` or Gaussian kernel between states."""
    images = once(lambda memory, beta: pixels(memory.obs, beta, rank))
    states = once(lambda memory, beta: None if trace else entries(memory.states, beta, rank))

    def build(memory: Recording, beta: float, eps: float) -> Estimator:
        return kernel_bayes(
            memory, images(memory, beta), eps, gauss=states(memory, beta), original=original
        )

    return build


def each_frame(*, rank: int) -> Callable[[Recording, float, float], Estimator]:
    """No filter: the conditional mean embedding of the rotation given one image."""
    images = once(lambda memory, beta: pixels(memory.obs, beta, rank))

    def build(memory: Recording, beta: float, eps: float) -> Estimator:
        psi = images(memory, beta)
        features, rotations = psi(memory.obs), matrices(memory.states)
        return lambda film: project_so3(cme_weights_primal(features, psi(film), eps), rotations)

    return build


def neural() -> Callable[[Recording, int, float], Estimator]:
    """IW(NN): features of a network trained by the ridge loss, then the filter.

    Xu et al. (2022), section 3.3; a network is fitted once.
    """
    fitted = once(fit_features)
    return lambda memory, steps, eps: kernel_bayes(memory, fitted(memory, steps), eps)


def fit_features(
    memory: Recording, steps: int, *, batch: int = 128, lr: float = 3e-3, reg: float = 1e-3
) -> Psi:
    """Steps of Adam on the ridge loss of batches.

    Phi(z) = z are the features of the trace kernel.
    """
    x, phi, generator = memory.obs.float(), memory.states, Generator().manual_seed(0)
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = CNN(x.shape[1:], 32, (32, 64), hidden=(256,))
        optimiser = torch.optim.AdamW(net.parameters(), lr, weight_decay=0.01)
        rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps)
        for _ in range(steps):
            rows = torch.randperm(len(x), generator=generator)[:batch]
            loss = ridge_loss(net(x[rows]).double(), phi[rows], reg)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            rate.step()
    psi = Psi(net, constant=True).eval()
    psi.prepare(memory.obs)
    return psi


def kalman(
    memory: Recording,
    components: int,
    factor: float,
    *,
    quaternion: bool = False,
    project: bool = False,
) -> Estimator:
    """The Kalman filter of a linear model between state and image principal components.

    Fitted by least squares.

    Args:
        memory: the training part.
        components: how many. factor: of the fitted observation noise.
        quaternion: the state is a quaternion, else nine entries.
        project: bring the estimate of nine entries to the nearest rotation.
    """
    x = memory.obs.flatten(1)
    mean, axes = x.mean(0), torch.linalg.eigh(torch.cov(x.mT)).eigenvectors[:, -components:]
    z = quaternions(matrices(memory.states)) if quaternion else memory.states
    model = fit_linear(Recording(z, (x - mean) @ axes))
    filter = KalmanFilter(model._replace(R=factor * model.R))

    def estimates(images: Images) -> Tensor:
        rows = rollout(filter, ((images.flatten(1) - mean) @ axes)[None]).estimates[0]
        turned = rotations_of(rows) if quaternion else matrices(rows)
        return project_so3(torch.eye(len(rows)).to(rows), turned) if project else turned

    return estimates
