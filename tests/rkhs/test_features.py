"""Feature maps against the kernels that they stand for."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from kbf.rkhs.features import (
    POINTS_AT_A_TIME,
    NystromFeatures,
    RandomFourierFeatures,
    nystrom,
    pivots,
    random_fourier,
)
from kbf.rkhs.kernels import gaussian, trace
from kbf.rkhs.linalg import NotPositiveDefiniteError, pivoted_cholesky

F64 = torch.float64
KERNEL = partial(gaussian, bandwidth=1.0)


def test_nystrom_is_exact_at_the_landmarks(normal):
    landmarks, x = normal(8, 2), normal(5, 2)
    psi = nystrom(KERNEL, landmarks, jitter=0.0)
    torch.testing.assert_close(
        psi(x) @ psi(landmarks).mT, KERNEL(x, landmarks), rtol=1e-8, atol=1e-8
    )


def test_nystrom_underestimates_elsewhere(normal):
    landmarks, x = normal(4, 2), normal(20, 2)
    psi = nystrom(KERNEL, landmarks)
    residual = KERNEL(x, x) - psi(x) @ psi(x).mT
    assert torch.linalg.eigvalsh(residual).min() > -1e-8
    assert residual.trace() > 0.1


def test_nystrom_at_pivots_is_the_pivoted_cholesky_factor(normal):
    x = normal(60, 2)
    gram = KERNEL(x, x)
    factor, chosen = pivoted_cholesky(lambda i: gram[:, i], gram.diagonal(), 15)
    assert pivots(KERNEL, x, rank=15).tolist() == chosen.tolist()
    torch.testing.assert_close(
        nystrom(KERNEL, x[chosen], jitter=0.0)(x), factor, rtol=1e-8, atol=1e-8
    )


def test_pivots_stop_at_the_tolerance(normal):
    x = normal(60, 2)
    chosen = pivots(KERNEL, x, rank=60, tol=1e-2)
    psi = nystrom(KERNEL, x[chosen])(x)
    assert len(chosen) < 30
    assert 60 - psi.square().sum() <= 60 * 1.1e-2


def test_pivots_of_rotations():
    rotations = torch.linalg.qr(
        torch.randn(12, 3, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
    )[0]
    chosen = pivots(trace, rotations, rank=12)
    assert len(chosen) == 9  # matrices 3 x 3 with the kernel tr(A B^T)
    psi = nystrom(trace, rotations[chosen])(rotations)
    torch.testing.assert_close(psi @ psi.mT, trace(rotations, rotations), rtol=1e-6, atol=1e-6)


def test_nystrom_of_a_batch_is_one_by_one(normal):
    psi, x = nystrom(KERNEL, normal(6, 2)), normal(3, 5, 2)
    assert psi(x).shape == (3, 5, 6)
    for one, x_k in zip(psi(x), x, strict=True):
        torch.testing.assert_close(one, psi(x_k))


def test_nystrom_gradient_of_the_bandwidth(normal):
    landmarks, x, bandwidth = (
        normal(4, 2),
        normal(3, 2),
        torch.tensor(0.8, dtype=F64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(
        lambda b: nystrom(partial(gaussian, bandwidth=b), landmarks)(x), (bandwidth,)
    )


@pytest.mark.parametrize(("rank", "width"), [(3, 4), (8, 8), (9, 12)])
def test_the_module_fills_features_up_with_zeros(normal, rank, width):
    """The first columns are those of the map at the same landmarks, and no product knows the
    others.
    """
    points, x = normal(40, 2), normal(5, 2)
    psi = NystromFeatures("gaussian", torch.tensor(1.0, dtype=F64), points, rank, 0.0)
    features = psi(x)
    assert psi.landmarks.shape == (rank, 2) and features.shape == (5, width)
    torch.testing.assert_close(features[:, :rank], nystrom(KERNEL, psi.landmarks)(x))
    assert not features[:, rank:].any()
    learned = NystromFeatures(
        "gaussian", torch.tensor(1.0, dtype=F64, requires_grad=True), points, rank, 0.0
    )
    assert learned(x).shape == (5, rank) and learned(x).requires_grad


def test_nystrom_refuses_landmarks_that_coincide(normal):
    landmarks = normal(3, 2)[[0, 1, 2, 0, 1, 2]].float()
    with pytest.raises(NotPositiveDefiniteError, match="6 x 6"):
        nystrom(KERNEL, landmarks, jitter=0.0)
    assert torch.isfinite(nystrom(KERNEL, landmarks, jitter=1e-6)(landmarks)).all()


def test_random_fourier_error_shrinks_like_the_root(normal):
    x = normal(20, 2)
    gram = KERNEL(x, x)

    def rms(p: int) -> float:
        psi = [
            random_fourier(2, p, bandwidth=1.0, generator=torch.Generator().manual_seed(s))(x)
            for s in range(20)
        ]
        return torch.stack([psi_s @ psi_s.mT - gram for psi_s in psi]).square().mean().sqrt().item()

    few, many = rms(20), rms(2000)
    assert few / many == pytest.approx(10, rel=0.25)
    # variance of cos(w^T (x - y)) over p/2 frequencies, by its closed form
    expected = ((1 + gram**4 - 2 * gram**2) / 2 / (20 / 2)).mean().sqrt().item()
    assert few == pytest.approx(expected, rel=0.2)


def test_random_fourier_keeps_the_diagonal_and_the_bandwidth(normal):
    x, lengths = normal(6, 2), torch.tensor([0.5, 3.0], dtype=F64)
    psi = random_fourier(2, 50_000, bandwidth=lengths, generator=torch.Generator().manual_seed(0))(
        x
    )
    torch.testing.assert_close(psi.square().sum(-1), torch.ones(6, dtype=F64))
    torch.testing.assert_close(psi @ psi.mT, gaussian(x, x, bandwidth=lengths), rtol=0, atol=0.03)


def test_random_fourier_is_drawn_by_its_generator(normal):
    x = normal(3, 2)
    a, b, other = (
        random_fourier(2, 10, bandwidth=1.0, generator=torch.Generator().manual_seed(s))(x)
        for s in (0, 0, 1)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, other)
    assert random_fourier(2, 10, bandwidth=1.0)(x.float()).dtype == torch.float32


def test_random_fourier_refuses_an_odd_number():
    with pytest.raises(ValueError, match="even"):
        random_fourier(2, 7, bandwidth=1.0)


def test_the_module_of_random_features_is_the_function(normal):
    x, generator = normal(POINTS_AT_A_TIME + 3, 2), torch.Generator().manual_seed(3)
    psi = random_fourier(2, 8, bandwidth=0.7, generator=generator)
    bandwidth = torch.tensor(0.7, dtype=torch.float64)
    module = RandomFourierFeatures(bandwidth, 2, 7, seed=3)
    torch.testing.assert_close(module(x), psi(x))
    torch.testing.assert_close(module.all(x), psi(x))


def test_features_of_many_points_are_those_of_each(normal):
    x = normal(POINTS_AT_A_TIME + 3, 1)
    features = NystromFeatures("gaussian", torch.tensor(0.7, dtype=torch.float64), x[:50], 8, 1e-9)
    torch.testing.assert_close(features.all(x), features(x))
