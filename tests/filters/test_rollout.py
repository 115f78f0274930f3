"""What `rollout` returns: covariances, and the log likelihood of each observation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kbf.filters.gaussian.ekf import ExtendedKalmanFilter
from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.kernel.kbf import KBF
from kbf.filters.particle.bootstrap import BootstrapFilter
from kbf.filters.regression.kernel_ridge import FrameRegression
from kbf.filters.regression.window import WindowRidge
from kbf.filters.rollout import rollout, step
from kbf.filters.scaling import ScaledFilter, Scaling
from kbf.filters.smoothing import predict_ahead, smooth
from kbf.recording import Recording
from kbf.ssm import StateSpaceModel, simulate

F64 = torch.float64
T = 5
MODEL = LinearModel(
    A=torch.tensor([[0.9, 0.3], [-0.2, 0.8]], dtype=F64),
    a=torch.tensor([0.1, -0.2], dtype=F64),
    Q=torch.tensor([[0.3, 0.1], [0.1, 0.2]], dtype=F64),
    C=torch.tensor([[1.0, 0.5], [0.2, -1.0], [0.7, 0.1]], dtype=F64),
    c=torch.tensor([0.5, 0.0, -1.0], dtype=F64),
    R=0.4 * torch.eye(3, dtype=F64) + 0.1,
    m0=torch.tensor([1.0, 2.0], dtype=F64),
    P0=torch.tensor([[1.0, 0.2], [0.2, 0.5]], dtype=F64),
)
SPACE = StateSpaceModel(
    f=lambda z: z @ MODEL.A.mT + MODEL.a,
    h=lambda z: z @ MODEL.C.mT + MODEL.c,
    Q=MODEL.Q,
    R=MODEL.R,
    m0=MODEL.m0,
    P0=MODEL.P0,
)


def observations(batch: int = 2) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    return simulate(SPACE, MODEL.m0.expand(batch, 2), T, draw).obs


def log_joint(obs: Tensor) -> Tensor:
    """log p(x_1, ..., x_T), by the joint Gaussian of all observed components, ``T q``."""
    mean, cov, means, noise = MODEL.m0, MODEL.P0, [], torch.zeros(2 * T, 2 * T, dtype=F64)
    for t in range(T):
        mean, cov = MODEL.A @ mean + MODEL.a, MODEL.A @ cov @ MODEL.A.mT + MODEL.Q
        means.append(mean)
        later = cov
        for s in range(t, T):  # Cov(z_s, z_t) = A^(s - t) P_t
            noise[2 * s : 2 * s + 2, 2 * t : 2 * t + 2] = later
            noise[2 * t : 2 * t + 2, 2 * s : 2 * s + 2] = later.mT
            later = MODEL.A @ later
    C = torch.block_diag(*[MODEL.C] * T)
    S = C @ noise @ C.mT + torch.block_diag(*[MODEL.R] * T)
    expected = torch.cat([MODEL.C @ m + MODEL.c for m in means])
    kept = obs.flatten().isfinite()
    return torch.distributions.MultivariateNormal(expected[kept], S[kept][:, kept]).log_prob(
        obs.flatten()[kept]
    )


@pytest.mark.parametrize("kind", [KalmanFilter, ExtendedKalmanFilter, UnscentedKalmanFilter])
def test_log_likelihoods_sum_to_the_joint_density(kind):
    obs = observations()
    filter = kind(MODEL if kind is KalmanFilter else SPACE)
    found = rollout(filter, obs, log_likelihood=True)
    assert found.log_likelihood is not None and found.log_likelihood.shape == (2, T)
    truth = torch.stack([log_joint(each) for each in obs])
    torch.testing.assert_close(found.log_likelihood.sum(1), truth, rtol=1e-6, atol=1e-6)
    plain = rollout(filter, obs)
    assert plain.log_likelihood is None and plain.covariances is None
    torch.testing.assert_close(found.estimates, plain.estimates)


def test_missing_sensors_and_masked_steps_are_left_out():
    obs = observations(1)
    obs[0, 1, 0], obs[0, 3], mask = math.nan, math.nan, torch.ones(1, T, dtype=torch.bool)
    filter = KalmanFilter(MODEL, allow_missing_sensors=True)
    found = rollout(filter, obs, log_likelihood=True).log_likelihood
    assert found is not None and found.isnan().nonzero().tolist() == [[0, 3]]
    torch.testing.assert_close(found.nansum(), log_joint(obs[0]))
    obs, mask[0, 3] = observations(1), False
    found = rollout(KalmanFilter(MODEL), obs, mask=mask, log_likelihood=True).log_likelihood
    assert found is not None and found.isnan().nonzero().tolist() == [[0, 3]]
    obs[0, 3] = math.nan
    torch.testing.assert_close(found.nansum(), log_joint(obs[0]))


def test_a_rejected_observation_has_no_likelihood():
    obs = observations(1)
    obs[0, 2] = 1e6
    found = rollout(KalmanFilter(MODEL), obs, log_likelihood=True)
    assert found.log_likelihood is not None
    assert found.log_likelihood.isnan().tolist() == (found.diagnostics["rejected"] == 1).tolist()
    assert found.diagnostics["rejected"].sum() == 1


def test_particles_approach_the_likelihood_of_the_kalman_filter():
    """The mean of the likelihood over 64 filters, within 4 standard errors."""
    obs = observations(1).expand(64, -1, -1)
    draw = torch.Generator().manual_seed(0)
    root = torch.linalg.cholesky(MODEL.P0)
    initial = MODEL.m0 + torch.randn(20_000, 2, dtype=F64, generator=draw) @ root.mT
    filter = BootstrapFilter(SPACE, initial, 500)
    found = rollout(filter, obs, log_likelihood=True, generator=draw).log_likelihood
    assert found is not None
    ratios = (found.sum(1) - log_joint(obs[0])).exp()
    assert abs(ratios.mean() - 1) < 4 * ratios.std() / 8
    assert ratios.std() < 0.5


def test_the_density_of_a_scaled_filter_is_that_of_the_data():
    """p(x) in the units of the data is p((x - mean) / scale) / prod scale."""
    obs = observations(1)
    scaling = Scaling()
    scaling.x_mean = torch.tensor([1.0, -2.0, 0.5], dtype=F64)
    scaling.x_scale = torch.tensor([2.0, 0.5, 3.0], dtype=F64)
    scaling.z_mean, scaling.z_scale = torch.zeros(2, dtype=F64), torch.ones(2, dtype=F64)
    inner = MODEL._replace(
        C=MODEL.C / scaling.x_scale[:, None],
        c=(MODEL.c - scaling.x_mean) / scaling.x_scale,
        R=MODEL.R / scaling.x_scale[:, None] / scaling.x_scale,
    )
    filter = ScaledFilter(scaling, KalmanFilter(inner), F64)
    found = rollout(filter, obs, log_likelihood=True).log_likelihood
    assert found is not None
    torch.testing.assert_close(found.sum(), log_joint(obs[0]))


@pytest.mark.parametrize("way", [{}, {"states": []}])
def test_covariances_are_those_of_the_states(way):
    filter, obs = KalmanFilter(MODEL), observations()
    states: list[Any] = []
    rollout(filter, obs, states=states)
    with torch.no_grad():
        found = rollout(filter, obs, covariances=True, **way)
    truth = torch.stack([state.cov for state in states], 1)
    torch.testing.assert_close(found.covariances, truth)


def test_filters_without_covariance_or_density_return_none():
    filter = FrameRegression().fit([Recording(torch.randn(20, 2), torch.randn(20, 2))])
    found = rollout(filter, torch.randn(1, 3, 2), covariances=True, log_likelihood=True)
    assert found.log_likelihood is None


@pytest.mark.parametrize("more", [{}, {"states": []}, {"log_likelihood": True}])
def test_a_graph_is_kept_only_where_it_is_requested(more, normal):
    model, recording = KBF(), Recording(normal(40, 2), normal(40, 2))
    model.prepare([recording])
    filter, obs = model.fit([recording]), normal(1, 6, 2)
    plain = rollout(filter, obs, **more)
    assert not plain.estimates.requires_grad and not plain.state[0].requires_grad
    whole = rollout(filter, obs, gradients=True)
    assert torch.equal(whole.estimates, plain.estimates)
    whole.estimates.square().sum().backward()
    assert model.log_bandwidth.grad is not None and (model.log_bandwidth.grad != 0).all()
    with torch.no_grad():
        assert not rollout(filter, obs, gradients=True).estimates.requires_grad
    smoothed = smooth(filter, obs).estimates
    assert not smoothed.requires_grad and not predict_ahead(filter, obs, 2).requires_grad


def test_observations_of_another_width_are_refused_in_words():
    """In a filter whose annotations state no width: tests check those of the others."""
    whole = simulate(SPACE, MODEL.m0.expand(1, 2), 40, torch.Generator().manual_seed(0))
    drawn = Recording(whole.states[0], whole.obs[0])
    f = WindowRidge().fit([drawn])
    rollout(f, drawn.obs[None, :5])
    wider = torch.cat([drawn.obs, drawn.obs, drawn.obs], -1)
    text = f"observations have {wider.shape[1]} components, and the filter was fitted to others"
    with pytest.raises(ValueError, match=text):
        rollout(f, wider[None, :5])
    with pytest.raises(ValueError, match=text):
        step(f, f.init(1), wider[:1])


def test_other_errors_of_a_filter_stay_as_they_are():
    class Broken(KalmanFilter):
        def estimate(self, state):
            raise RuntimeError("no device")

    with pytest.raises(RuntimeError, match=r"^no device$"):
        rollout(Broken(MODEL), torch.zeros(1, 2, 3, dtype=F64))
