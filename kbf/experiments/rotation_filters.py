"""Filters whose state is a rotation, seen in images: kernel Bayes rules, Kalman filters, and no filter at all.

Each is made of a memory, states ``T 9`` and observations ``T c h w``, and is a function of successive images.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Generator, Tensor, nn

from kbf.embeddings import Embedding, cme_weights_primal, project_so3
from kbf.experiments.fukumizu_filtering import Weights
from kbf.experiments.rotations import quaternions, rotations_of
from kbf.filters.base import rollout
from kbf.filters.gaussian import KalmanFilter
from kbf.filters.kalman_learned import fit_linear
from kbf.filters.kernel import KernelBayesFilter
from kbf.filters.operators import PrimalUpdate, ratio_operator_primal, transition_operator_primal
from kbf.kernels import gaussian, median_distance
from kbf.nn.encoders import CNN
from kbf.nn.feature_filter import Psi
from kbf.nn.kernel_bayes import NystromFeatures
from kbf.nn.losses import ridge_loss
from kbf.sequence import Sequence, transitions

Images = Float[Tensor, "t c h w"]
Estimator = Callable[[Tensor], Tensor]
"""Images ``t c h w`` of successive frames -> estimates ``t 3 3``."""


def matrices(states: Float[Tensor, "t 9"]) -> Float[Tensor, "t 3 3"]:
    """The nine numbers as a matrix."""
    return states.unflatten(-1, (3, 3))


def pixels(images: Images, beta: float, rank: int) -> NystromFeatures:
    """Features of the Gaussian kernel between images, with bandwidth beta times their median distance."""
    x = images.flatten(1)
    return NystromFeatures("gaussian", beta * median_distance(x), x, rank, 1e-9)


def kernel_bayes(
    memory: Sequence, psi: nn.Module, eps: float, *, gauss: tuple[float, int] | None = None, original: bool = False
) -> Estimator:
    """The kernel Bayes filter by the importance-weighted or the original rule, with the image features ``psi``.

    The original one is equations 18 and 19 of Fukumizu et al.: gamma = T (G_Z + T eps I)^-1 G_Z P alpha is T times the mu there,
    and delta T^2 times theirs, which is 2 eps.

    Args:
        memory: the training part.
        psi: ``m c h w`` -> ``m p``.
        eps: all ridges.
        gauss: beta and rank of a Gaussian kernel of the states; the estimate is the pre-image. None for the kernel tr(A B^T), whose
            features are the nine entries themselves; the estimate is in SO(3).
        original: which rule.
    """
    z, T = memory.states, len(memory.states)
    if gauss is None:
        phi, k = z, None
    else:
        width = gauss[0] * median_distance(z)
        phi, k = NystromFeatures("gaussian", width, z, gauss[1], 1e-9)(z), partial(gaussian, bandwidth=width)
    P, A = transition_operator_primal(phi, transitions([T]), eps), ratio_operator_primal(phi, eps)
    rule, reg = ("original", 2 * eps * T**2) if original else ("importance_weighted", eps)
    update = PrimalUpdate(psi, memory.obs[:, None], reg, rule=rule, dtype=z.dtype)
    filter = Weights(KernelBayesFilter(z, P, A, update, normalise=not original, clip=not original))

    def estimates(images: Images) -> Tensor:
        w = rollout(filter, images[None]).estimates[0]
        return project_so3(w, matrices(z)) if k is None else matrices(Embedding(z, w).mode(k))

    return estimates


def on_pixels(memory: Sequence, beta: float, eps: float, *, rank: int, trace: bool, original: bool) -> Estimator:
    """KBR and IW with a Gaussian kernel between images, and ``trace`` or a Gaussian kernel between states."""
    psi = pixels(memory.obs, beta, rank)
    return kernel_bayes(memory, psi, eps, gauss=None if trace else (beta, rank), original=original)


def each_frame(memory: Sequence, beta: float, eps: float, *, rank: int) -> Estimator:
    """No filter: the conditional mean embedding of the rotation given one image."""
    psi = pixels(memory.obs, beta, rank)
    features, rotations = psi(memory.obs), matrices(memory.states)
    return lambda images: project_so3(cme_weights_primal(features, psi(images), eps), rotations)


def neural() -> Callable[[Sequence, int, float], Estimator]:
    """IW(NN): features of a net by the ridge loss first, then the filter (Xu et al. (2022), section 3.3); a net is fitted once."""
    fitted: dict[tuple[int, int], Psi] = {}

    def build(memory: Sequence, steps: int, eps: float) -> Estimator:
        key = len(memory.obs), steps
        if key not in fitted:
            fitted[key] = fit_features(memory, steps)
        return kernel_bayes(memory, fitted[key], eps)

    return build


def fit_features(memory: Sequence, steps: int, *, batch: int = 128, lr: float = 3e-3, reg: float = 1e-3) -> Psi:
    """Steps of Adam on the ridge loss of batches; phi(z) = z are the features of the trace kernel."""
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


def kalman(memory: Sequence, components: int, factor: float, *, quaternion: bool = False, project: bool = False) -> Estimator:
    """The Kalman filter of a linear model between the state and principal components of the images, fitted by least squares.

    Args:
        memory: the training part.
        components: how many. factor: of the fitted observation noise.
        quaternion: the state is a quaternion, else nine entries.
        project: bring the estimate of nine entries to the nearest rotation.
    """
    x = memory.obs.flatten(1)
    mean, axes = x.mean(0), torch.linalg.eigh(torch.cov(x.mT)).eigenvectors[:, -components:]
    z = quaternions(matrices(memory.states)) if quaternion else memory.states
    model = fit_linear(Sequence(z, (x - mean) @ axes))
    filter = KalmanFilter(model._replace(R=factor * model.R))

    def estimates(images: Images) -> Tensor:
        found = rollout(filter, ((images.flatten(1) - mean) @ axes)[None]).estimates[0]
        turned = rotations_of(found) if quaternion else matrices(found)
        return project_so3(torch.eye(len(found)).to(found), turned) if project else turned

    return estimates
