"""The differentiable particle filter: with true models it is a bootstrap and a Kalman filter, and
its gradients are right.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.neural.dpf import DPF, MAX_STATE, MIN_LIKELIHOOD, DPFState
from kbf.filters.particle.bootstrap import BootstrapFilter
from kbf.filters.protocols import sample_of
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.ssm import StateSpaceModel

F64 = torch.float64
A = torch.tensor([[0.9, 0.2], [-0.2, 0.9]], dtype=F64)
P = 20_000


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Known(DPF):
    """Moves A y + 0.3 eps, and the likelihood N(x; z, 0.5 I) of observations, both as they are."""

    def encode(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return obs, torch.ones_like(obs)

    def log_likelihood(self, z: Tensor, w: Tensor, r: Tensor) -> Tensor:
        return -(w[:, None] - z).square().sum(-1)


def known(alpha: float) -> DPF:
    net = Known(2, 2, hidden=0, particles=P, alpha=alpha, gamma=None, m=2).double()
    with torch.no_grad():
        net.linear.weight.copy_(A)
        net.outer.weight.zero_()
        net.log_noise.fill_(math.log(0.3))
        net.log_width.fill_(math.log(1e-6))
    return net


def small(**changes: object) -> DPF:
    torch.manual_seed(0)
    settings = {"hidden": 1, "particles": 12, "m": 3, "units": 6} | changes
    return DPF(2, 3, **settings).double()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_with_the_true_model_it_is_the_bootstrap_and_the_kalman_filter(alpha):
    """Errors of P particles are of the order P^(-1/2) = 0.007; 0.03 is four times that, and a wrong
    weight is 0.1 away.
    """
    net = known(alpha)
    eye, zero = torch.eye(2, dtype=F64), torch.zeros(2, dtype=F64)
    obs = torch.randn(2, 8, 2, generator=generator(), dtype=F64)
    mask = torch.rand(2, 8, generator=generator(1)) < 0.7
    model = StateSpaceModel(
        f=lambda z: z @ A.T, h=lambda z: z, Q=0.09 * eye, R=0.5 * eye, m0=zero, P0=eye
    )
    bootstrap = BootstrapFilter(model, torch.randn(P, 2, generator=generator(2), dtype=F64), P)
    kalman = KalmanFilter(
        LinearModel(A=A, a=zero, Q=0.09 * eye, C=eye, c=zero, R=0.5 * eye, m0=zero, P0=eye)
    )
    with torch.no_grad():
        runs: list[list[object]] = [[], [], []]
        ours, theirs, exact = (
            rollout(filter, obs, mask=mask, generator=generator(3), states=states)
            for filter, states in zip((net, bootstrap, kalman), runs, strict=True)
        )
        torch.testing.assert_close(ours.estimates, exact.estimates, rtol=0, atol=0.03)
        torch.testing.assert_close(ours.estimates, theirs.estimates, rtol=0, atol=0.04)
        for mine, its in zip(runs[0], runs[2], strict=True):
            torch.testing.assert_close(
                net.covariance(mine), kalman.covariance(its), rtol=0, atol=0.03
            )
    assert (ours.diagnostics["ess"] <= P * (1 + 1e-9)).all()


def test_a_control_moves_all_particles_as_it_says():
    net = small(controls=2, hidden=0)
    y, eps = (
        torch.randn(3, 12, 2, generator=generator(), dtype=F64),
        torch.randn(3, 12, 2, generator=generator(1), dtype=F64),
    )
    net.u_mean, net.u_scale = (
        torch.tensor([1.0, -2.0], dtype=F64),
        torch.tensor([0.5, 3.0], dtype=F64),
    )
    u = torch.randn(3, 2, generator=generator(2), dtype=F64)
    assert net.push is not None
    B, E = net.push.weight[:2], net.push.weight[2:]
    inside = net.inner(torch.cat([y, eps], -1)) + (u @ E.mT)[:, None]
    expected = (
        net.linear(y) + (u @ B.mT)[:, None] + net.outer(inside.tanh()) + net.log_noise.exp() * eps
    )
    torch.testing.assert_close(net.move(y, eps, u), expected)
    state = net.init(3, generator=generator())
    a, b, none, mean = (
        net.predict(state, control=c, generator=generator(3))
        for c in (u, u + 1, None, net.u_mean.expand(3, -1))
    )
    assert (a.particles != b.particles).all() and torch.equal(a.log_weights, b.log_weights)
    assert torch.equal(none.particles, mean.particles)


def test_gradients_through_soft_resampling_are_those_of_finite_differences():
    """With the same noise the loss is smooth but where a choice jumps; every network has a part in
    it.
    """
    net = small(alpha=0.5, gamma=0.7)
    obs = torch.randn(2, 4, 3, generator=generator(), dtype=F64)
    states = torch.randn(2, 4, 2, generator=generator(1), dtype=F64)

    def loss() -> Tensor:
        torch.manual_seed(5)
        return net.loss(states, obs, burn_in=3)

    loss().backward()
    for name, parameter in net.named_parameters():
        if name == "log_start":
            continue  # the first observation places all particles
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        k = int(parameter.grad.abs().argmax())
        values = []
        for h in (1e-6, -1e-6):
            with torch.no_grad():
                parameter.view(-1)[k] += h
                values.append(loss().item())
                parameter.view(-1)[k] -= h
        assert parameter.grad.view(-1)[k].item() == pytest.approx(
            (values[0] - values[1]) / 2e-6, rel=1e-4, abs=1e-7
        ), name


def test_the_weights_of_the_past_have_a_gradient_only_where_resampling_is_soft():
    for alpha, reached in ((0.5, True), (1.0, False)):
        net = small(alpha=alpha, gamma=None)
        state = net.init(1, generator=generator())
        weights = torch.randn(1, 12, generator=generator(1), dtype=F64).requires_grad_()
        moved = net.predict(
            state._replace(log_weights=weights.log_softmax(-1)), generator=generator(2)
        )
        (gradient,) = torch.autograd.grad(net.mean(moved).sum(), weights)
        assert bool((gradient.abs() > 1e-9).any()) == reached


def test_the_density_is_the_mixture_around_the_particles():
    net = small()
    with torch.no_grad():
        net.log_width.copy_(torch.tensor([0.2, -0.4]))
    weights = torch.randn(3, 12, generator=generator(), dtype=F64).log_softmax(-1)
    state = DPFState(
        torch.randn(3, 12, 3, generator=generator(1), dtype=F64),
        weights,
        torch.zeros(3, 12, 3),
        torch.zeros(3),
    )
    z = torch.randn(3, 2, generator=generator(2), dtype=F64)
    parts = torch.distributions.MultivariateNormal(
        state.particles[..., :2], (2 * net.log_width).exp().diag()
    )
    mixture = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=weights), parts
    )
    torch.testing.assert_close(net.log_density(state, z), mixture.log_prob(z))
    torch.testing.assert_close(
        net.mean(state), (weights.exp()[..., None] * state.particles[..., :2]).sum(1)
    )
    drawn = mixture.sample((200_000,))
    torch.testing.assert_close(net.spread(state)[0], drawn[:, 0].T.cov(), rtol=0.03, atol=0.03)


def test_its_sample_is_one_of_the_mixture():
    """With many particles mean and covariance are those of the filter, in the units of the data;
    without noise, the particles.
    """
    net = small(particles=P, gamma=1.0)  # all are placed by the draws
    net.z_mean, net.z_scale = (
        torch.tensor([3.0, -2.0], dtype=F64),
        torch.tensor([2.0, 0.5], dtype=F64),
    )
    with torch.no_grad():
        net.log_width.copy_(torch.tensor([0.2, -0.4]))
    state = net.update(
        net.predict(net.init(2, generator=generator()), generator=generator(1)),
        torch.ones(2, 3, dtype=F64),
    )
    points, weights = net.weighted_sample(state)
    assert points.shape == (2, P, 2) and weights.shape == (2, P)
    mean = (weights[..., None] * points).sum(1)
    torch.testing.assert_close(mean, net.estimate(state), rtol=0, atol=0.1)
    centred = points - mean[:, None]
    torch.testing.assert_close(
        (weights[..., None] * centred).mT @ centred, net.covariance(state), rtol=0.05, atol=0.05
    )
    bare, _ = net.weighted_sample(state._replace(drawn=torch.zeros_like(state.drawn)))
    assert torch.equal(bare, net.z_mean + net.z_scale * state.particles[..., :2])
    assert sample_of(net, state) is not None


def test_the_share_of_proposals_falls_and_they_carry_the_weight_of_one():
    net = small(gamma=0.5, particles=16)
    state = net.predict(net.init(1, generator=generator()), generator=generator(1))
    w, r = net.encode(torch.randn(1, 3, generator=generator(2), dtype=F64))
    for taken, expected in ((0, 16), (1, 8), (2, 4), (4, 1), (5, 0)):
        after = net.take_in(state._replace(taken=torch.full((1,), taken, dtype=F64)), w, r)
        anew = (after.particles != state.particles).any(-1)[0]
        assert anew.sum() == expected
        assert after.particles[0, anew].abs().le(MAX_STATE).all()
    assert (net.take_in(state, w, r).taken == 1).all()
    none = small(gamma=None, particles=16)
    assert torch.equal(none.take_in(state, w, r).particles, state.particles)


def test_likelihoods_are_within_their_bounds():
    net = small()
    w, r = net.encode(100 * torch.randn(4, 3, generator=generator(), dtype=F64))
    values = net.log_likelihood(
        1000 * torch.randn(4, 50, 2, generator=generator(1), dtype=F64), w, r
    ).exp()
    assert (values >= MIN_LIKELIHOOD * (1 - 1e-9)).all() and (values <= 1 + 1e-9).all()


def oscillations(count: int, seed: int) -> list[Recording]:
    """A state that turns, seen through noise as large as itself: no single observation
    says much.
    """
    z, states = torch.randn(count, 2, generator=generator(seed)), []
    for t in range(20):
        z = z @ A.float().T + 0.2 * torch.randn(count, 2, generator=generator(1000 * seed + t))
        states.append(z)
    drawn = torch.stack(states, 1)
    obs = drawn + 0.7 * torch.randn(drawn.shape, generator=generator(seed + 7))
    return [Recording(a, b) for a, b in zip(drawn, obs, strict=True)]


@pytest.mark.slow
def test_it_learns_a_linear_problem():
    """Better than the mean, than an observation by itself, and with a covariance of the
    right size.
    """
    train, test = oscillations(60, 1), oscillations(60, 2)
    torch.manual_seed(0)
    net = DPF(2, 2, hidden=0, particles=50, m=8)
    net.prepare(train)
    z, x = (torch.stack([getattr(s, name) for s in train]) for name in ("states", "obs"))
    optimiser = torch.optim.Adam(net.parameters(), 0.005)
    for _ in range(120):
        optimiser.zero_grad()
        net.loss(z, x).backward()
        optimiser.step()
    states, obs = torch.stack([s.states for s in test]), torch.stack([s.obs for s in test])
    run: list[DPFState] = []
    with torch.no_grad():
        residual = rollout(net, obs, generator=generator(), states=run).estimates - states
        C = torch.stack([net.covariance(state) for state in run], 1)
    error = residual.square().sum(-1)[:, 5:].mean()
    assert error < 0.5 * states[:, 5:].square().sum(-1).mean()
    assert error < 0.7 * (obs - states)[:, 5:].square().sum(-1).mean()
    distance = (residual[..., None, :] @ torch.linalg.solve(C, residual[..., None])).mean()
    assert 1.3 < distance < 3.0, "2 is right"


def test_what_it_does_not_take():
    with pytest.raises(ValueError, match="alpha <= 1"):
        DPF(2, 3, alpha=0.0)
    with pytest.raises(ValueError, match="gamma <= 1"):
        DPF(2, 3, gamma=1.5)
    with pytest.raises(ValueError, match="built for 0 controls"):
        small().loss(torch.zeros(1, 2, 2), torch.zeros(1, 2, 3), None, torch.zeros(1, 2, 1))


def test_moves_that_run_away_are_held():
    """A net whose moves double the state in each step: its estimates stay among the proposals,
    through a thousand steps.
    """
    net = DPF(1, 1, particles=20, gamma=None)
    with torch.no_grad():
        net.linear.weight.mul_(2)
    state = net.init(3, generator=torch.Generator().manual_seed(0))
    for _ in range(1000):
        state = net.predict(state, generator=torch.Generator().manual_seed(1))
    assert (state.particles.abs() <= MAX_STATE).all() and (state.particles.abs() == MAX_STATE).any()
