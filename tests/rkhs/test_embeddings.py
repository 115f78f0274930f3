"""Weighted samples against NumPy's moments, brute-force maxima and leave-one-out by hand."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference
import torch

from kbf.rkhs.embeddings import Embedding, cme_loo, cme_weights_primal, project_so3
from kbf.rkhs.features import random_fourier
from kbf.rkhs.kernels import gaussian
from kbf.rkhs.linalg import NotPositiveDefiniteError
from kbf.rkhs.weights import effective_sample_size, negative_mass

F64 = torch.float64
KERNEL = partial(gaussian, bandwidth=0.6)


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


def rotation(axis: int, angle: float) -> torch.Tensor:
    c, s = math.cos(angle), math.sin(angle)
    a, b = [k for k in range(3) if k != axis]
    out = torch.eye(3, dtype=F64)
    out[a, a], out[a, b], out[b, a], out[b, b] = c, -s, s, c
    return out


# moments


def test_moments_are_numpys(normal):
    points, counts = normal(6, 3), [1, 4, 2, 2, 5, 1]
    m = Embedding(points, tensor(counts) / 15)
    sample = np.repeat(points.numpy(), counts, axis=0)
    np.testing.assert_allclose(m.mean().numpy(), sample.mean(0), rtol=1e-12)
    np.testing.assert_allclose(m.cov().numpy(), np.cov(sample.T, bias=True), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(
        m.expect(lambda z: z.square().sum(-1)).numpy(), np.square(sample).sum(1).mean(), rtol=1e-12
    )
    assert m.expect(lambda z: z[:, None] * z[..., None]).shape == (3, 3)


def test_mean_takes_the_weights_as_they_are():
    m = Embedding(tensor([[1.0], [3.0]]), tensor([0.5, -0.1]))
    assert m.mean().item() == pytest.approx(0.2)
    assert m.normalised().mean().item() == pytest.approx(0.5)
    assert m.normalised().weights.tolist() == pytest.approx([1.25, -0.25])


def test_a_batch_is_one_by_one(normal):
    points, weights = normal(7, 2), normal(2, 3, 7).softmax(-1)
    together = Embedding(points, weights)
    for i in range(2):
        for j in range(3):
            one = Embedding(points, weights[i, j])
            for name in ["mean", "cov"]:
                torch.testing.assert_close(getattr(together, name)()[i, j], getattr(one, name)())
            torch.testing.assert_close(
                together.mode(KERNEL)[i, j], one.mode(KERNEL), rtol=0, atol=1e-5
            )


def test_covariance_far_from_the_origin(normal):
    points, w = normal(9, 2), normal(9).softmax(-1)
    torch.testing.assert_close(
        Embedding(points + 1e6, w).cov(), Embedding(points, w).cov(), rtol=1e-6, atol=1e-8
    )


def test_covariance_of_negative_weights_is_the_nearest_positive_semidefinite_matrix(normal):
    points, w = normal(6, 2), tensor([0.6, 0.6, -0.4, 0.2, 0.2, -0.2])
    raw = (points.mT * w) @ points - torch.outer(w @ points, w @ points)
    values, vectors = torch.linalg.eigh(raw)
    assert values[0] < -0.01 < 0.01 < values[1], "the case must need the projection"
    cov = Embedding(points, 3 * w).cov()  # the scale of the weights does not matter
    torch.testing.assert_close(cov, vectors @ torch.diag(values.clamp_min(0)) @ vectors.mT)
    assert torch.linalg.eigvalsh(cov).min() > -1e-12


def test_diagnostics():
    weights = tensor([[0.25, 0.25, 0.25, 0.25], [1.0, 0.5, -0.5, 0.0]])
    assert effective_sample_size(weights).tolist() == pytest.approx([4.0, 1 / 1.5])
    assert negative_mass(weights).tolist() == [0.0, -0.5]


def test_refusals(normal):
    with pytest.raises(ValueError, match=r"weights \(\.\.\., n\), got \(4,\) and \(4,\)"):
        Embedding(normal(4), normal(4))
    with pytest.raises(ValueError, match=r"sum -0\.5"):
        Embedding(normal(2, 1), tensor([0.5, -1.0])).normalised()
    matrices = Embedding(normal(4, 3, 3), torch.ones(4, dtype=F64))
    with pytest.raises(ValueError, match=r"cov needs points \(n, d\), got \(4, 3, 3\)"):
        matrices.cov()
    with pytest.raises(ValueError, match="mode needs points"):
        matrices.mode(KERNEL)


# pre-image


def height(points: torch.Tensor, w: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    return KERNEL(at, points) @ w


@pytest.mark.parametrize("negative", [False, True])
def test_mode_is_the_highest_point_of_the_plane(normal, negative):
    points, w = normal(30, 2), normal(30).softmax(-1)
    if negative:
        w = w - 0.02
    z = Embedding(points, w).mode(KERNEL, tol=1e-9)
    line = torch.linspace(-3, 3, 301, dtype=F64)
    grid = torch.cartesian_prod(line, line)
    heights = height(points, w, grid)
    assert height(points, w, z[None]).item() >= heights.max().item()
    torch.testing.assert_close(z, grid[heights.argmax()], rtol=0, atol=0.02)


def test_mode_is_not_the_mean_of_two_peaks():
    points = tensor([[-2.0], [-1.9], [-2.1], [2.0], [2.1]])
    m = Embedding(points, torch.full((5,), 0.2, dtype=F64))
    assert m.mode(KERNEL).item() == pytest.approx(-2.0, abs=1e-3)
    assert m.mean().item() == pytest.approx(-0.38)


def test_mode_is_never_worse_than_the_best_training_point(normal):
    for k in range(50):
        points, w = (
            normal(10, 2),
            normal(10) / 3,
        )  # mostly negative mass: the plain fixed point leaves the data
        z = Embedding(points, w).mode(KERNEL)
        best = height(points, w, points).max()
        assert torch.isfinite(z).all()
        assert height(points, w, z[None]).item() >= best.item() - 1e-12, k


def test_mode_of_weights_without_positive_mass_is_the_best_training_point():
    points = tensor([[0.0], [1.0], [5.0]])
    assert Embedding(points, tensor([-1.0, -1.0, -0.1])).mode(KERNEL).tolist() == [5.0]
    points = tensor([[0.7], [-1.9], [2.5]])  # from its best point the iteration goes to infinity
    wide = partial(gaussian, bandwidth=2.0)
    assert Embedding(points, tensor([1.7, -1.3, -1.8])).mode(wide).tolist() == [0.7]


# rotations


def test_project_so3_gives_a_rotation_back():
    r = rotation(0, 0.4) @ rotation(1, -1.2)
    torch.testing.assert_close(project_so3(tensor([0.7, -0.2]), torch.stack([r, r])), r)


def test_project_so3_between_two_turns_is_the_middle():
    two = torch.stack([rotation(2, 0.2), rotation(2, 0.8)])
    torch.testing.assert_close(
        project_so3(tensor([[0.5, 0.5], [1.0, 0.0]]), two), torch.stack([rotation(2, 0.5), two[0]])
    )


def test_project_so3_is_the_best_rotation_and_no_reflection(normal):
    rotations = torch.linalg.qr(normal(5, 3, 3))[0]
    rotations = rotations * torch.linalg.det(rotations)[:, None, None]
    reflected = 0
    for _ in range(20):
        w = normal(5)
        total = torch.einsum("n,nij->ij", w, rotations)
        r = project_so3(w, rotations)
        torch.testing.assert_close(r @ r.mT, torch.eye(3, dtype=F64))
        assert torch.linalg.det(r).item() == pytest.approx(1)
        reflected += int(torch.linalg.det(total) < 0)
        for _ in range(50):
            other = torch.linalg.qr(normal(3, 3))[0]
            other = other * torch.linalg.det(other)
            assert (r * total).sum() >= (other * total).sum()
    assert reflected > 0, "the case must meet the sign"


# conditional mean embedding


def test_cme_dual_is_primal(normal):
    psi = random_fourier(2, 8, bandwidth=1.0, generator=torch.Generator().manual_seed(0))
    features, queries = psi(normal(20, 2)), psi(normal(2, 3, 2))
    dual = reference.cme_weights(features @ features.mT, queries @ features.mT, 0.02)
    torch.testing.assert_close(
        cme_weights_primal(features, queries, 0.02), dual, rtol=1e-10, atol=1e-10
    )


def test_cme_with_a_linear_kernel_is_ridge_regression(normal):
    x, new = normal(30, 2), normal(4, 2)
    z = x @ tensor([[1.0, 0.0], [0.5, -1.0]]) + 0.1 * normal(30, 2)
    w = cme_weights_primal(x, new, 1e-2)
    slope = torch.linalg.solve(x.mT @ x + 0.3 * torch.eye(2, dtype=F64), x.mT @ z)
    torch.testing.assert_close(Embedding(z, w).mean(), new @ slope)


@pytest.mark.parametrize("reg", [1e-4, 1e-2, 1.0])
def test_cme_leave_one_out_is_brute_force(normal, reg):
    x = normal(12, 1)
    y = torch.sin(2 * x) + 0.2 * normal(12, 1)
    G, K = KERNEL(x, x), gaussian(y, y, bandwidth=0.9)
    assert cme_loo(G, K, reg).item() == pytest.approx(
        reference.cme_loo(G.numpy(), K.numpy(), reg), rel=1e-8
    )


def test_cme_leave_one_out_is_its_trace_formula(normal):
    x, y, reg = normal(8, 1), normal(8, 1), 0.05
    G, K, eye = KERNEL(x, x), KERNEL(y, y), torch.eye(8, dtype=F64)
    H = eye - G @ torch.linalg.inv(G + 8 * reg * eye)
    D = torch.diag(1 / H.diagonal())
    torch.testing.assert_close(cme_loo(G, K, reg), (D @ H @ K @ H @ D).trace())


def test_cme_leave_one_out_prefers_a_sensible_ridge(normal):
    x = normal(60, 1)
    y = torch.sin(2 * x) + 0.3 * normal(60, 1)
    scores = [cme_loo(KERNEL(x, x), KERNEL(y, y), reg).item() for reg in (1e-8, 1e-3, 1e2)]
    assert scores[1] < min(scores[0], scores[2])


def test_cme_leave_one_out_gradient(normal):
    x, y, reg = normal(6, 1), normal(6, 1), torch.tensor(0.05, dtype=F64, requires_grad=True)
    width = torch.tensor(0.6, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda r, b: cme_loo(gaussian(x, x, bandwidth=b), KERNEL(y, y), r), (reg, width)
    )


def test_cme_error_names_the_ridge():
    with pytest.raises(NotPositiveDefiniteError, match=r"2 x 2 .* reg = 0\.2 .* -0\.8"):
        cme_loo(-torch.eye(2, dtype=F64), torch.eye(2, dtype=F64), 0.1)


@pytest.mark.parametrize("weights", [2, 4])
def test_an_embedding_needs_a_weight_for_each_point(weights):
    fields: Any = SimpleNamespace(points=torch.zeros(3, 1), weights=torch.ones(weights))
    with pytest.raises(ValueError, match=rf"points \(n, d\) and weights .* and \({weights},\)"):
        Embedding.__post_init__(fields)  # without the tests' own checks of shapes
