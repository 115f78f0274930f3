"""Explicit feature maps psi with psi(x)^T psi(y) ~ k(x, y): O(n p^2) in place of O(n^3).

A feature map is a function from points ``*b n q`` to features ``*b n p``. Gradients flow to the
kernel's bandwidth. `NystromFeatures` and `RandomFourierFeatures` are such maps as modules, for
models that are saved.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn.functional import pad

from kbf.rkhs.kernels import KERNELS, Bandwidth, Kernel
from kbf.rkhs.linalg import cholesky, evenly, pivoted_cholesky

FeatureMap = Callable[[Tensor], Tensor]

# Points whose features are computed at a time, which bounds intermediate arrays of the kernel.
POINTS_AT_A_TIME = 16_384

# Up to this number of points `pivots` computes the whole Gram matrix, which is faster than columns.
MAX_POINTS_OF_FULL_GRAM = 512

# Features are padded with zeros to a multiple of this: in float32 products with 64 columns take
# three quarters of the time of those with 61.
FEATURES_MULTIPLE_OF = 4


def nystrom(
    kernel: Kernel, landmarks: Float[Tensor, "m ..."], *, jitter: float = 1e-10
) -> FeatureMap:
    """psi(x) = L^-1 k(landmarks, x) with L L^T = k(landmarks, landmarks) + jitter I.

    psi(x)^T psi(y) is the kernel projected on the span of the landmarks, which is exact if x or y
    is a landmark.

    Args:
        kernel: k.
        landmarks: ``m q``, for instance the training points at `pivots`.
        jitter: relative to the largest diagonal entry of the landmarks' Gram matrix. 1e-10 is for
            float64; float32 requires 1e-6.

    Returns:
        The map ``*b n q`` -> ``*b n m``.

    Raises:
        NotPositiveDefiniteError: the jitter is too small for landmarks that are close to each
            other.

    References: Williams and Seeger (2001).
    """
    gram = kernel(landmarks, landmarks)
    factor = cholesky(gram, reg=jitter * gram.diagonal().max().detach())

    def features(x: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(factor, kernel(landmarks, x), upper=False).mT

    return features


def nystrom_whitening(gram: Float[Tensor, "m m"], *, jitter: float = 1e-10) -> Float[Tensor, "m m"]:
    """Return W = L^-T of the landmarks' Gram matrix L L^T, so that psi(x)^T = k(x, landmarks) W.

    It is for a map that is evaluated many times. Jitter and errors are those of `nystrom`.
    """
    factor = cholesky(gram, reg=jitter * gram.diagonal().max().detach())
    eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return torch.linalg.solve_triangular(factor, eye, upper=False).mT


def pivots(
    kernel: Kernel, x: Float[Tensor, "n ..."], *, rank: int, tol: float = 0.0, limit: int = 8192
) -> Int[Tensor, " r"]:
    """Return the indices of landmarks by pivoted Cholesky factorisation of k(x, x), best first.

    `nystrom` at these landmarks is the incomplete Cholesky factor (without the jitter) as a
    function of any point.

    Args:
        kernel: k.
        x: ``n q``.
        rank: largest number of landmarks.
        tol: the factorisation stops once trace(G - L L^T) <= tol trace(G).
        limit: of more points an evenly spaced subsample of this size is used.

    References: Fukumizu et al., section 4.2.
    """
    with torch.no_grad():
        among = evenly(len(x), limit, x.device)
        x = x[among]
        diagonal = kernel(x[:, None], x[:, None])[:, 0, 0]
        gram = kernel(x, x) if len(x) <= MAX_POINTS_OF_FULL_GRAM else None

        def column(i: int) -> Tensor:
            return kernel(x, x[i : i + 1])[:, 0] if gram is None else gram[i]

        return among[pivoted_cholesky(column, diagonal, rank, tol)[1]]


def random_fourier(
    q: int,
    p: int,
    *,
    bandwidth: Bandwidth,
    generator: Generator | None = None,
    dtype: torch.dtype = torch.float64,
) -> FeatureMap:
    """Return random Fourier features of the Gaussian kernel.

    They are sqrt(2/p) (cos(w^T x), sin(w^T x)) for p/2 frequencies w ~ N(0, 1/bandwidth^2). The
    error of psi(x)^T psi(y) is of order p^(-1/2).

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
    """Return the features of `random_fourier`; a global function can be pickled."""
    phase = (x / bandwidth) @ frequencies.to(x)
    return frequencies.shape[1] ** -0.5 * torch.cat([phase.cos(), phase.sin()], -1)


class NystromFeatures(nn.Module):
    """`nystrom` at the `pivots` of the points, as a module: psi(x) = L^-1 k(landmarks, x).

    Landmarks, whitening and bandwidth are buffers. Unless gradients flow to the kernel, features
    are padded with zeros to a multiple of `FEATURES_MULTIPLE_OF`, which changes no inner product.
    """

    landmarks: Tensor
    whiten: Tensor
    bandwidth: Tensor

    def __init__(
        self, kernel: str, bandwidth: Tensor, points: Float[Tensor, "n q"], rank: int, tol: float
    ) -> None:
        """Select landmarks among the points and compute the whitening.

        Args:
            kernel: a name in `kbf.rkhs.kernels.KERNELS`. bandwidth: its bandwidth.
            points: ``n q``.
            rank: largest number of landmarks.
            tol: as in `pivots`.

        Raises:
            NotPositiveDefiniteError: as `nystrom`.
        """
        super().__init__()
        self.kernel = kernel
        k = partial(KERNELS[kernel], bandwidth=bandwidth)
        landmarks = points[pivots(k, points, rank=rank, tol=tol)]
        whiten = nystrom_whitening(k(landmarks, landmarks))
        if not whiten.requires_grad:
            whiten = pad(whiten, (0, -len(whiten) % FEATURES_MULTIPLE_OF))
        self.register_buffer("landmarks", landmarks)
        self.register_buffer("whiten", whiten)
        self.register_buffer("bandwidth", bandwidth)

    def forward(self, x: Float[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """Return the features of points, which are flattened to vectors."""
        x, k = x.flatten(1).to(self.landmarks), KERNELS[self.kernel]
        return k(x, self.landmarks, bandwidth=self.bandwidth) @ self.whiten

    def all(self, points: Float[Tensor, "n q"]) -> Float[Tensor, "n p"]:
        """Return the features of many points, computed `POINTS_AT_A_TIME`."""
        return torch.cat([self(block) for block in points.split(POINTS_AT_A_TIME)])


class RandomFourierFeatures(nn.Module):
    """`random_fourier` as a module. Frequencies and bandwidth are buffers."""

    frequencies: Tensor
    bandwidth: Tensor

    def __init__(self, bandwidth: Tensor, q: int, p: int, seed: int = 0) -> None:
        """Draw the frequencies.

        Args:
            bandwidth: of the Gaussian kernel.
            q: components of a point.
            p: number of features; one more if it is odd.
            seed: of the frequencies.
        """
        super().__init__()
        generator = Generator().manual_seed(seed)
        drawn = torch.randn(q, (p + 1) // 2, dtype=torch.float64, generator=generator)
        self.register_buffer("frequencies", drawn.to(bandwidth))
        self.register_buffer("bandwidth", bandwidth)

    def forward(self, x: Float[Tensor, "m *x"]) -> Float[Tensor, "m p"]:
        """Return the features of points, which are flattened to vectors."""
        return _cosines(self.bandwidth, self.frequencies, x.flatten(1).to(self.frequencies))

    def all(self, points: Float[Tensor, "n q"]) -> Float[Tensor, "n p"]:
        """Return the features of many points, computed `POINTS_AT_A_TIME`."""
        return torch.cat([self(block) for block in points.split(POINTS_AT_A_TIME)])
