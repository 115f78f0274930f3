"""Backprop KF: on a linear system it is the Kalman filter, and its gradients reach back to the
first observation.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.gaussian.moments import GaussianState
from kbf.filters.neural.backprop_kf import MAX_STANDARD_UNITS, BackpropKF
from kbf.filters.neural.base import LEAST_VARIANCE, inverse_positive
from kbf.filters.rollout import rollout
from kbf.recording import Recording

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class AsTheyAre(nn.Module):
    """Both signs of an observation: what is behind is linear in it, whatever a rectifier cuts."""

    features = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, -x], -1)


def linear_net(controls: int = 0) -> tuple[BackpropKF, LinearModel]:
    """A net whose move and code are linear, and the model that it is the filter of."""
    torch.manual_seed(0)
    net = BackpropKF(2, 2, hidden=1, units=3, controls=controls, encoder=AsTheyAre()).double()
    A = torch.tensor([[0.9, 0.2, 0.3], [-0.2, 0.9, 0.0], [0.0, 0.1, 0.8]], dtype=F64)
    with torch.no_grad():
        net.linear.weight.copy_(A)
        net.linear.bias.copy_(torch.tensor([0.1, -0.2, 0.3], dtype=F64))
        net.outer.weight.zero_()
        net.code.weight.copy_(torch.cat([torch.eye(2), -torch.eye(2)], 1))
        net.code.bias.zero_()
        net.encoding_variance.weight.zero_()
        net.encoding_variance.bias.fill_(inverse_positive(0.3))
    model = LinearModel(
        A=A,
        a=net.linear.bias.detach(),
        Q=0.1 * torch.eye(3, dtype=F64),
        C=torch.eye(3, dtype=F64)[:2],
        c=torch.zeros(2, dtype=F64),
        R=(0.3 + LEAST_VARIANCE) * torch.eye(2, dtype=F64),
        m0=torch.zeros(3, dtype=F64),
        P0=torch.eye(3, dtype=F64),
        B=None if net.push is None else net.push.weight.detach()[:3],
    )
    return net, model


@pytest.mark.parametrize("k", [0, 2])
def test_on_a_linear_system_it_is_the_kalman_filter(k):
    net, model = linear_net(k)
    obs = torch.randn(3, 8, 2, generator=generator(), dtype=F64)
    mask = torch.rand(3, 8, generator=generator(1)) < 0.7
    u = torch.randn(3, 8, k, generator=generator(2), dtype=F64) if k else None
    ours: list[GaussianState] = []
    theirs: list[GaussianState] = []
    found = rollout(net, obs, mask=mask, controls=u, states=ours).estimates
    expected = rollout(KalmanFilter(model), obs, mask=mask, controls=u, states=theirs).estimates
    torch.testing.assert_close(found, expected[..., :2])
    torch.testing.assert_close(net.covariance(ours[-1]), theirs[-1].cov[:, :2, :2])


def test_the_loss_is_that_of_the_rollout_and_its_gradient_reaches_the_first_observation():
    net, _ = linear_net(controls=1)
    with torch.no_grad():
        net.outer.weight.normal_(0, 0.3, generator=generator())
    obs = torch.randn(2, 5, 2, generator=generator(), dtype=F64).requires_grad_()
    states = torch.randn(2, 5, 2, generator=generator(2), dtype=F64)
    u = torch.randn(2, 5, 1, generator=generator(3), dtype=F64)
    run: list[GaussianState] = []
    estimates = rollout(net, obs, controls=u, states=run).estimates
    covariances = torch.stack([net.covariance(state) for state in run], 1)
    expected = -torch.distributions.MultivariateNormal(estimates, covariances).log_prob(states)
    torch.testing.assert_close(net.loss(states, obs, None, u), expected.mean())
    torch.testing.assert_close(net.loss(states, obs, None, u, burn_in=4), expected[:, 4].mean())
    (gradient,) = torch.autograd.grad(net.loss(states, obs, None, u, burn_in=4), obs)
    assert (gradient[:, 0].abs() > 1e-6).all()
    assert torch.autograd.gradcheck(
        lambda x, v: net.loss(states, x, None, v, burn_in=3), (obs, u.requires_grad_())
    )


def test_the_jacobian_is_that_of_the_move():
    torch.manual_seed(1)
    net = BackpropKF(2, 3, hidden=2, units=5, controls=1).double()
    y, u = (
        torch.randn(4, 4, generator=generator(), dtype=F64),
        torch.randn(4, 1, generator=generator(2), dtype=F64),
    )
    value, F = net.move(y, u)
    for k in range(4):
        jacobian = torch.autograd.functional.jacobian(
            lambda one, u=u[k]: net.move(one[None], u[None])[0][0], y[k]
        )
        torch.testing.assert_close(F[k], jacobian)
    assert net.push is not None
    straight, bent = net.push(u).split([4, 5], -1)
    torch.testing.assert_close(
        value, net.linear(y) + straight + net.outer((net.inner(y) + bent).tanh())
    )


def test_what_it_does_not_take():
    net = BackpropKF(2, 3)
    with pytest.raises(ValueError, match="built for 0 controls"):
        net.loss(torch.zeros(1, 2, 2), torch.zeros(1, 2, 3), None, torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match="built for states"):
        net.prepare([Recording(torch.randn(5, 1), torch.randn(5, 3))])


@pytest.mark.parametrize("growth", [1.5, 10.0])
def test_a_move_that_runs_away_is_held(growth):
    """Means, covariances and the gradient stay finite in single precision, over as long a recording
    as tests have.
    """
    net = linear_net()[0].float()
    with torch.no_grad():
        net.linear.weight.copy_(growth * torch.ones(3, 3))
        net.encoding_variance.bias.fill_(-50.0)  # variances of LEAST_VARIANCE
    states, obs = (
        torch.randn(1, 150, 2, generator=generator()),
        torch.randn(1, 150, 2, generator=generator(1)),
    )
    loss = net.loss(states, obs)
    loss.backward()
    assert loss.isfinite() and all(
        p.grad is None or p.grad.isfinite().all() for p in net.parameters()
    )
    run = rollout(net, obs, mask=torch.zeros(1, 150, dtype=torch.bool))
    assert (run.estimates.abs() <= MAX_STANDARD_UNITS).all()
