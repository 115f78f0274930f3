"""Explicit feature maps psi with psi(x)^T psi(y) ~ k(x, y): what makes a kernel method cost O(n p^2) instead of O(n^3).

A feature map is a function from points ``*b n q`` to features ``*b n p``. Gradients flow to the
kernel's bandwidth. `NystromFeatures` is such a map as a module, for models that are saved.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn.functional import pad

from kbf.rkhs.kernels import KERNELS, Bandwidth, Kernel
from kbf.rkhs.linalg import cholesky, evenly, pivoted_cholesky

FeatureMap = Callable[[Tensor], Tensor]

FEW = 512
"""Points whose whole Gram matrix is made before pivots are picked: that is faster than column by column."""
POINTS_AT_A_TIME = 16_384
"""Points whose features are made at a time: the kernel's intermediate arrays stay small."""
FULL = 4
"""Zeros fill numbers of features up to a multiple of this: in float32 64 columns take three quarters of the time of 61."""


def nystrom(
    kernel: Kernel, landmarks: Float[Tensor, "m ..."], *, jitter: float = 1e-10
) -> FeatureMap:
    """psi(x) = L^-1 k(landmarks, x) with L L^T = k(landmarks, landmarks) + jitter I.

    psi(x)^T psi(y) is the kernel projected on the span of the landmarks: exact when one of the two
    is a landmark.

    Args:
        kernel: k.
        landmarks: ``m q``, for instance the training points at `pivots`.
        jitter: relative to the largest diagonal entry of the landmarks' Gram matrix. 1e-10 is for
            float64; float32 needs 1e-6.

    Returns:
        The map ``*b n q`` -> ``*b n m``.

    Raises:
        NotPositiveDefiniteError: landmarks so close to each other that the jitter does not carry
            the factorisation.

    References: Williams and Seeger (2001).
    """
    gram = kernel(landmarks, landmarks)
    factor = cholesky(gram, reg=jitter * gram.diagonal().max().detach())

    def features(x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor, kernel(landmarks, x), upper=False).mT

    return features


def nystrom_whitening(gram: Float[Tensor, "m m"], *, jitter: float = 1e-10) -> Float[Tensor, "m m"]:
    """W = L^-T with L L^T the landmarks' Gram matrix: psi(x)^T = k(x, landmarks) W, when the same map is used at many times.

    The jitter and the errors are those of `nystrom`.
    """
    factor = cholesky(gram, reg=jitter * gram.diagonal().max().detach())
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_triangular(factor, eye, upper=False).mT


def pivots(
    kernel: Kernel, x: Float[Tensor, "n ..."], *, rank: int, tol: float = 0.0, limit: int = 8192
) -> Int[Tensor, " r"]:
    """Positions of the landmarks that the pivoted Cholesky factorisation of k(x, x) picks, best first.

    `nystrom` at these landmarks *is* the incomplete Cholesky factor (without its jitter), as a
    function that takes new points too.

    Args:
        kernel: k.
        x: ``n q``.
        rank: the most that may be picked.
        tol: stop once trace(G - L L^T) <= tol trace(G).
        limit: of more points than this, an evenly spaced subsample is looked at.

    References: Fukumizu et al., section 4.2.
    """
    with torch.no_grad():
        among = evenly(len(x), limit, x.device)
        x = x[among]
        diagonal = kernel(x[:, None], x[:, None])[:, 0, 0]
        if len(x) <= FEW:
            gram = kernel(x, x)
            return among[pivoted_cholesky(lambda i: gram[:, i], diagonal, rank, tol)[1]]
        return among[
            pivoted_cholesky(lambda i: kernel(x, x[i][None])[:, 0], diagonal, rank, tol)[1]
        ]


def random_fourier(
    q: int,
    p: int,
    *,
    bandwidth: Bandwidth,
    generator: Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> FeatureMap:
    """Random Fourier features of the Gaussian kernel: sqrt(2/p) (cos(w^T x), sin(w^T x)), w ~ N(0, 1/bandwidth^2), p/2 of them.

    The error of psi(x)^T psi(y) falls like p^(-1/2).

    Args:
        q: components of a point.
        p: number of features, even.
        bandwidth: of the Gaussian kernel: a number, or a length for each component.
        generator: draws the frequencies.
        dtype: of the frequencies.

    Returns:
        The map ``*b n q`` -> ``*b n p``, on the device and in the type of its points.

    Raises:
        ValueError: p is odd.

    References: Rahimi and Recht (2007). With cosine and sine in pairs psi(x)^T psi(x) = 1 exactly.
    """
    if p % 2:
        raise ValueError(
            f"random_fourier: p must be even (cosine and sine of each frequency), got {p}"
        )
    return partial(_cosines, bandwidth, torch.randn(q, p // 2, dtype=dtype, generator=generator))


def _cosines(bandwidth: Bandwidth, frequencies: Tensor, x: Tensor) -> Tensor:
    """The features of `random_fourier`; a function of the module, so that what holds it can be pickled."""
    phase = (x / bandwidth) @ frequencies.to(x)
    return frequencies.shape[1] ** -0.5 * torch.cat([phase.cos(), phase.sin()], -1)


class NystromFeatures(nn.Module):
    """`nystrom` at the `pivots` of the points, with everything it needs in buffers: psi(x) = L^-1 k(landmarks, x).

    Behind them come zeros, up to a multiple of `FULL` (none where gradients flow to the kernel): no
    product of features knows them.
    """

    landmarks: Tensor
    whiten: Tensor
    bandwidth: Tensor

    def __init__(
        self, kernel: str, bandwidth: Tensor, points: Float[Tensor, "n q"], rank: int, tol: float
    ) -> None:
        """Features of a kernel, spanned by some of the points.

        Args:
            kernel: a name in `kbf.rkhs.kernels.KERNELS`. bandwidth: its bandwidth.
            points: ``n q``, among which landmarks are chosen.
            rank: the most landmarks.
            tol: fewer, if the trace residual of the Gram matrix falls to this share of its trace.

        Raises:
            NotPositiveDefiniteError: as `nystrom`.
        """
        super().__init__()
        self.kernel = kernel
        k = partial(KERNELS[kernel], bandwidth=bandwidth)
        landmarks = points[pivots(k, points, rank=rank, tol=tol)]
        self.register_buffer("landmarks", landmarks)
        whiten = nystrom_whitening(k(landmarks, landmarks))
        self.register_buffer(
            "whiten", whiten if whiten.requires_grad else pad(whiten, (0, -len(whiten) % FULL))
        )
        self.register_buffer("bandwidth", bandwidth)

    def forward(self, x: Float[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """The features of points, which are flattened to vectors."""
        return (
            KERNELS[self.kernel](
                x.flatten(1).to(self.landmarks), self.landmarks, bandwidth=self.bandwidth
            )
            @ self.whiten
        )

    def all(self, points: Float[Tensor, "n q"]) -> Float[Tensor, "n p"]:
        """The features of many points ``n q``, made `POINTS_AT_A_TIME`."""
        return torch.cat([self(block) for block in points.split(POINTS_AT_A_TIME)])
