"""Per-observation regression, against refitting without each point and plain NumPy ridge
regression.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from kbf.filters.protocols import Filter, FilterModel
from kbf.filters.regression import kernel_ridge
from kbf.filters.regression.kernel_ridge import (
    FrameRegression,
    leave_one_out,
    subset_of_regressors,
)
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.rkhs.kernels import gaussian

F64 = torch.float64


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def gram(x: np.ndarray, y: np.ndarray, bandwidth: float) -> np.ndarray:
    return np.exp(-((x[:, None] - y[None]) ** 2).sum(-1) / (2 * bandwidth**2))


def median(x: np.ndarray) -> float:
    """As torch counts: the lower of the two middle ones."""
    distances = [np.linalg.norm(x[i] - x[j]) for i in range(len(x)) for j in range(i)]
    return float(np.sort(distances)[(len(distances) - 1) // 2])


def refit_score(x: np.ndarray, z: np.ndarray, bandwidth: float, reg: float) -> float:
    """Mean squared error at each point of a ridge regression on all others, ridge n reg with n of
    *all* points.
    """
    n, errors = len(x), []
    for i in range(n):
        rest = np.arange(n) != i
        alpha = np.linalg.solve(
            gram(x[rest], x[rest], bandwidth) + n * reg * np.eye(n - 1), z[rest]
        )
        errors.append(((gram(x[i : i + 1], x[rest], bandwidth) @ alpha - z[i]) ** 2).sum())
    return float(np.mean(errors))


def data(n: int = 25, noise: float = 0.3) -> tuple[torch.Tensor, torch.Tensor]:
    x = randn(n, 3)
    z = (
        torch.stack([torch.sin(2 * x[:, 0]), x[:, 1] * x[:, 2]], -1)
        + noise * randn(n, 2, seed=1)
        + 5
    )
    return x, z


def test_leave_one_out_is_refitting():
    x, z = data()
    regs = torch.tensor([1e-4, 1e-2, 1.0], dtype=F64)
    ours = leave_one_out(torch.as_tensor(gram(x.numpy(), x.numpy(), 1.3)), z, regs)
    naive = [refit_score(x.numpy(), z.numpy(), 1.3, float(reg)) for reg in regs]
    np.testing.assert_allclose(ours.numpy(), naive, rtol=1e-9)


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_prepare_takes_the_best_of_the_grid(noise):
    x, z = data(noise=noise)
    factors, regs = (0.3, 1.0, 3.0), (1e-6, 1e-3, 1e-1)
    model = FrameRegression(factors=factors, regs=regs)
    model.prepare([Recording(z[:10], x[:10]), Recording(z[10:], x[10:])], None)
    centred = (z - z.mean(0)).numpy()
    scores = {
        (f, r): refit_score(x.numpy(), centred, f * median(x.numpy()), r)
        for f in factors
        for r in regs
    }
    assert (float(model.factor), float(model.reg)) == min(scores, key=lambda k: scores[k])


def test_estimate_is_ridge_regression_of_the_observed_part():
    x, z = data()
    mask = torch.rand(25, generator=torch.Generator().manual_seed(0)) < 0.7
    broken = torch.where(mask[:, None], x, float("nan"))
    model = FrameRegression()
    model.factor.fill_(0.8)
    model.reg.fill_(0.01)
    filter = model.fit(Recording(z, broken, mask))
    assert isinstance(model, FilterModel) and isinstance(filter, Filter)
    seen, mean, n = x[mask].numpy(), z.mean(0).numpy(), int(mask.sum())
    bandwidth = 0.8 * median(seen)
    alpha = np.linalg.solve(
        gram(seen, seen, bandwidth) + n * 0.01 * np.eye(n), z[mask].numpy() - mean
    )
    queries = randn(2, 6, 3, seed=5)
    present = torch.rand(2, 6, generator=torch.Generator().manual_seed(1)) < 0.5
    ours = rollout(filter, queries, mask=present).estimates
    naive = mean + (gram(queries.reshape(12, 3).numpy(), seen, bandwidth) @ alpha).reshape(2, 6, 2)
    naive = np.where(present[..., None].numpy(), naive, mean)  # nothing observed: the mean
    np.testing.assert_allclose(ours.numpy(), naive, rtol=1e-9, atol=1e-9)
    far = filter.update(filter.init(1), torch.full((1, 3), 1e3, dtype=F64))
    torch.testing.assert_close(filter.estimate(far)[0], z.mean(0))


def test_images_are_flattened_and_float32_is_close():
    x, z = randn(30, 2, 3, 4), randn(30, 2, seed=1)
    model = FrameRegression("laplace")
    model.prepare([Recording(z, x)])
    image = rollout(model.fit(Recording(z, x)), x[None]).estimates
    flat = rollout(model.fit(Recording(z, x.flatten(1))), x.flatten(1)[None]).estimates
    torch.testing.assert_close(image, flat)
    single = rollout(model.fit(Recording(z.float(), x.float())), x.float()[None]).estimates
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), image, rtol=1e-3, atol=1e-3)


def test_subset_of_regressors_is_ridge_regression_with_kernels_at_the_landmarks():
    x, z = data()
    few, n, reg = x[:8], len(x), 1e-3
    at, among = gram(x.numpy(), few.numpy(), 1.3), gram(few.numpy(), few.numpy(), 1.3)
    naive = np.linalg.solve(at.T @ at + n * reg * among, at.T @ z.numpy())
    kernel = partial(gaussian, bandwidth=1.3)
    np.testing.assert_allclose(
        subset_of_regressors(kernel, few, x, z, reg).numpy(), naive, rtol=1e-5
    )
    whole = np.linalg.solve(gram(x.numpy(), x.numpy(), 1.3) + n * reg * np.eye(n), z.numpy())
    np.testing.assert_allclose(subset_of_regressors(kernel, x, x, z, reg).numpy(), whole, rtol=1e-5)
    single = subset_of_regressors(kernel, few.float(), x.float(), z.float(), reg)
    assert single.dtype == torch.float32
    np.testing.assert_allclose(single.numpy(), naive, rtol=1e-3)


def test_many_observations_share_the_kernels_of_a_few(monkeypatch):
    x, z = data(400)
    memory, queries = [Recording(z[:150], x[:150]), Recording(z[150:], x[150:])], x[None, :20]
    whole = FrameRegression()
    whole.prepare(memory)
    exact = rollout(whole.fit(memory), queries).estimates
    monkeypatch.setattr(kernel_ridge, "MAX_LANDMARKS", 200)
    model = FrameRegression()
    model.prepare(memory)
    filter = model.fit(memory)
    assert len(filter.points) == 200
    error = (rollout(filter, queries).estimates - exact).square().mean()
    assert error < 0.02 * z.var()


def test_state_dict_keeps_the_choice():
    x, z = data()
    model, fresh = FrameRegression(), FrameRegression()
    model.prepare([Recording(z, x)])
    assert float(model.reg) != 1e-3 or float(model.factor) != 1
    fresh.load_state_dict(model.state_dict())
    a, b = (rollout(m.fit(Recording(z, x)), x[None]).estimates for m in (model, fresh))
    assert torch.equal(a, b)


def test_errors():
    with pytest.raises(ValueError, match="unknown kernel 'linear'"):
        FrameRegression("linear")
    with pytest.raises(ValueError, match="memory"):
        FrameRegression().fit(None)
    x, z = data()
    with pytest.raises(ValueError, match="two points"):
        FrameRegression().fit(Recording(z, x, torch.arange(25) < 1))
