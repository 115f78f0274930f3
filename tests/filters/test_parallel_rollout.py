"""Filters that go through a sequence at once give what the loop gives, step after step: numbers,
verdicts, states, gradients.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from kbf.filters import parallel_rollout
from kbf.filters.gaussian.ekf import ExtendedKalmanFilter, linearise, tangent
from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.rollout import Rollout, rollout
from kbf.filters.wrapper import FilterWrapper
from kbf.rkhs.linalg import NotPositiveDefiniteError, cholesky, many_small, product, psd_solve
from kbf.ssm import StateSpaceModel, oscillatory, simulate
from studies.benchmarks.peers_filters import tracking

F64 = torch.float64
B, T = 3, 230


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def linear() -> LinearModel:
    """Tracking that is pushed and seen with an offset."""
    model = tracking()
    return model._replace(
        a=torch.tensor([0.1, 0.0, -0.1, 0.05], dtype=F64),
        c=torch.tensor([3.0, -2.0], dtype=F64),
        A=0.98 * model.A,
    )


def bent() -> StateSpaceModel:
    """The oscillatory model, seen through something that no analytic Jacobian is given for."""
    base = oscillatory(sigma_x=0.3)._replace(P0=0.1 * torch.eye(2, dtype=F64))
    return base._replace(
        h=lambda z: torch.stack([z[..., 0] + 0.1 * z[..., 1] ** 2, z[..., 1], z.sum(-1)], -1),
        R=0.1 * torch.eye(3).double(),
    )


def as_space(m: LinearModel) -> StateSpaceModel:
    return StateSpaceModel(
        lambda z: z @ m.A.mT + m.a, lambda z: z @ m.C.mT + m.c, m.Q, m.R, m.m0, m.P0
    )


class Told(FilterWrapper):
    """A wrapper with units of its own, and a number to tell."""

    def observed(self, obs: torch.Tensor) -> torch.Tensor:
        return obs / 2

    def estimate(self, state: Any) -> torch.Tensor:
        return 2 * self.inner.estimate(state)

    def diagnostics(self, state: Any) -> dict[str, torch.Tensor]:
        return {"first": state.mean[:, 0]}


def case(name: str) -> tuple[Any, torch.Tensor]:
    """A filter, and observations ``B T q`` for it."""
    model = as_space(linear()) if name == "kalman" else bent()
    obs = simulate(model, model.m0.expand(B, -1), T, generator()).obs
    return {
        "kalman": lambda: KalmanFilter(linear()),
        "ekf": lambda: ExtendedKalmanFilter(bent()),
        "ukf": lambda: UnscentedKalmanFilter(bent()),
    }[name](), obs


NAMES = ("kalman", "ekf", "ukf")


@torch.no_grad()
def step_by_step(filter: Any, obs: torch.Tensor, **more: Any) -> Rollout:
    """Who asks for the states gets them from the loop."""
    return rollout(filter, obs, states=[], **more)


def assert_same(found: Rollout, truth: Rollout, tol: float = 1e-10) -> None:
    torch.testing.assert_close(found.estimates, truth.estimates, rtol=tol, atol=tol)
    assert found.diagnostics.keys() == truth.diagnostics.keys()
    for name, values in truth.diagnostics.items():
        torch.testing.assert_close(found.diagnostics[name], values, rtol=tol, atol=tol)
    assert type(found.state) is type(truth.state)
    for leaf, last in zip(found.state, truth.state, strict=True):
        torch.testing.assert_close(leaf, last, rtol=tol, atol=tol)


@pytest.fixture
def done(monkeypatch) -> list[int]:
    """How many steps each rollout did at once; 0 for none."""
    steps: list[int] = []
    whole = parallel_rollout.rollout_parallel

    def spied(*args: Any) -> parallel_rollout.Steps | None:
        found = whole(*args)
        steps.append(0 if found is None else found.length)
        return found

    monkeypatch.setattr("kbf.filters.rollout.rollout_parallel", spied)
    return steps


@pytest.mark.parametrize("name", NAMES)
def test_at_once_is_step_by_step(name, done):
    filter, obs = case(name)
    truth = step_by_step(filter, obs)
    with torch.no_grad():
        assert_same(rollout(filter, obs), truth)
        ratio_dim = rollout(Told(filter), 2 * obs)
        torch.testing.assert_close(ratio_dim.estimates, 2 * truth.estimates, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            ratio_dim.diagnostics["first"], truth.estimates[..., 0], rtol=1e-10, atol=1e-10
        )
        begun = step_by_step(filter, obs[:, :10])
        later = rollout(filter, obs[:, 10:], state=begun.state)
        torch.testing.assert_close(later.estimates, truth.estimates[:, 10:], rtol=1e-10, atol=1e-10)
        assert min(done) > T - 30 and len(done) == 3
        assert_same(rollout(filter, obs[:, :10]), begun)


@pytest.mark.parametrize("steps", [1, 2, 31, 66, 97, 98, 99, 130, 230])
def test_constant_gains_at_every_length(steps):
    """Before the gains settle, and with none, one and several blocks of steps after; a start that
    is far away.
    """
    filter, obs = case("kalman")
    start = filter.init(B)
    start = start._replace(mean=start.mean + 1e3)
    with torch.no_grad():
        found = rollout(filter, obs[:, :steps], state=start)
        assert_same(found, step_by_step(filter, obs[:, :steps], state=start))


@pytest.mark.parametrize("name", NAMES)
def test_impossible_observations_are_passed_over_at_the_same_steps(name, done):
    filter, obs = case(name)
    obs = obs.clone()
    for b, t in ((1, 70), (1, 71), (0, 180), (2, T - 1)):
        obs[b, t] = 1e30
    found, truth = rollout(filter, obs), step_by_step(filter, obs)
    assert_same(found, truth)
    assert found.diagnostics["rejected"].nonzero().tolist() == [
        [0, 180],
        [1, 70],
        [1, 71],
        [2, T - 1],
    ]
    assert done[0] == (70 if name == "kalman" else done[0]) > 0
    obs[0, 0] = 1e30
    assert_same(rollout(filter, obs), step_by_step(filter, obs))


@pytest.mark.parametrize("name", NAMES)
def test_gaps_and_ragged_ends(name):
    filter, obs = case(name)
    mask = torch.rand(B, T, generator=generator(1)) > 0.3
    mask[0, 220:], mask[1, 100:112], mask[2, 0] = (
        False,
        False,
        False,
    )  # a longer gap, and rounding errors of chaos are all there is
    obs = torch.where(mask[..., None], obs, math.nan)
    assert_same(rollout(filter, obs, mask=mask), step_by_step(filter, obs, mask=mask))


@pytest.mark.parametrize("name", NAMES)
def test_single_precision(name, done):
    filter, obs = case(name)
    model = type(filter.model)(
        *[part.float() if isinstance(part, torch.Tensor) else part for part in filter.model]
    )
    filter = type(filter)(model)
    found = rollout(filter, obs.float())
    assert done[0] > 0 and found.estimates.dtype == found.state.cov.dtype == torch.float32
    assert_same(found, step_by_step(filter, obs.float()), 1e-3)
    assert torch.linalg.eigvalsh(found.state.cov.double()).min() > 0


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_loop(name, done):
    filter, obs = case(name)
    gradients: list[Any] = []
    more: Any
    for more in ({}, {"states": []}):
        x, R = obs[:, :10].clone().requires_grad_(), filter.model.R.clone().requires_grad_()
        rollout(
            type(filter)(filter.model._replace(R=R)), x, gradients=True, **more
        ).estimates.square().sum().backward()
        gradients.append((x.grad, R.grad))
    assert done == []
    for a, b in zip(*gradients, strict=True):
        assert torch.equal(a, b)
    assert not rollout(filter, obs).estimates.requires_grad


@pytest.mark.slow
def test_a_filter_that_forgets_nothing_is_right_as_well(done):
    """A constant with little noise in it: blocks never agree about it, and the loop is left to do
    it.
    """
    one = torch.eye(1, dtype=F64)
    model = StateSpaceModel(lambda z: z, lambda z: z, 1e-8 * one, one, 0 * one[0], one)
    obs = simulate(model, torch.full((B, 1), 2.0, dtype=F64), T, generator()).obs
    for kind in (ExtendedKalmanFilter, UnscentedKalmanFilter):
        assert_same(rollout(kind(model), obs), step_by_step(kind(model), obs))
    kalman = KalmanFilter(
        LinearModel(one, 0 * one[0], 0 * one, one, 0 * one[0], one, 0 * one[0], one)
    )
    assert_same(rollout(kalman, obs), step_by_step(kalman, obs))
    assert done[-1] == T


class Fragile(ExtendedKalmanFilter):
    """A filter that fails beside itself."""

    def observe(self, state: Any, obs: torch.Tensor) -> Any:
        if len(obs) > B:
            raise NotPositiveDefiniteError("not here")
        return super().observe(state, obs)


class Undefined(ExtendedKalmanFilter):
    """A filter that knows nothing beside itself."""

    def predict(self, state: Any, *, generator: Any = None) -> Any:
        moved = super().predict(state)
        return moved._replace(mean=moved.mean * math.nan) if len(state.mean) > B else moved


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Fragile, Undefined])
def test_a_guess_that_leads_nowhere_is_given_up(kind, done):
    filter, obs = kind(bent()), case("ekf")[1]
    assert_same(rollout(filter, obs), step_by_step(filter, obs))
    assert done == [0]


def test_pieces_blocks_and_progress(monkeypatch):
    """The Kalman filter's states are held for a while only; and who watches sees every
    step once.
    """
    for name in NAMES:
        filter, obs = case(name)
        seen: list[int] = []
        whole = rollout(filter, obs, progress=seen.append)
        assert seen == list(range(T))
        monkeypatch.setattr(parallel_rollout, "MAX_HELD_NUMBERS", 100 * B * 20)
        monkeypatch.setattr(parallel_rollout, "MAX_BLOCKS", 5 * B)
        assert_same(rollout(filter, obs), whole)


def test_sequences_with_different_covariances_and_controls_are_stepped(done):
    filter, obs = case("kalman")
    state = filter.init(B)
    state = state._replace(cov=state.cov * torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    assert_same(rollout(filter, obs, state=state), step_by_step(filter, obs, state=state))
    pushed = KalmanFilter(linear()._replace(B=torch.ones(4, 1, dtype=F64)))
    controls = torch.randn(B, T, 1, dtype=F64, generator=generator(2))
    assert_same(
        rollout(pushed, obs, controls=controls), step_by_step(pushed, obs, controls=controls)
    )
    assert done == [0, 0]


# what makes it fast


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_many_small_matrices_are_as_each(n):
    a, b = (torch.randn(300, n, k, dtype=F64, generator=generator(n)) for k in (n, 4))
    one, psd = (
        torch.randn(n, n, dtype=F64, generator=generator(9)),
        a @ a.mT + torch.eye(n, dtype=F64),
    )
    assert many_small(a)
    for factors in ((a, b), (a.mT, b), (one, a, b), (a, one, b), (b.mT, a, one)):
        truth = torch.stack(
            [
                torch.linalg.multi_dot([f if f.ndim == 2 else f[k] for f in factors])
                for k in range(300)
            ]
        )
        torch.testing.assert_close(product(*factors), truth, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(psd_solve(psd, b), torch.linalg.solve(psd, b))
    reg = torch.rand(300, dtype=F64, generator=generator(3))
    for shift in (0.0, 0.5, reg):
        L = cholesky(psd, reg=shift)
        torch.testing.assert_close(
            L,
            torch.linalg.cholesky(
                psd + torch.as_tensor(shift)[..., None, None] * torch.eye(n, dtype=F64)
            ),
        )
    psd[7] = -psd[7]
    for broken in (psd, torch.where(psd == psd[7], math.nan, psd)):
        with pytest.raises(NotPositiveDefiniteError, match=f"{n} x {n} matrix"):
            psd_solve(broken, b)
        with pytest.raises(NotPositiveDefiniteError, match=f"{n} x {n} matrix"):
            cholesky(broken)


@pytest.mark.parametrize("moved_angle", [True, False])
def test_every_way_to_a_jacobian(moved_angle):
    f: Any = oscillatory(moved_angle=moved_angle).f
    z = torch.randn(7, 2, dtype=F64, generator=generator())
    truth = torch.func.vmap(torch.func.jacrev(f.function))(z)
    F, value = f.tangent(z)
    torch.testing.assert_close(F, truth)
    torch.testing.assert_close(value, f(z))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            for function in (f, lambda z: f(z)):
                found = tangent(function, z)
                torch.testing.assert_close(found[0], truth)
                torch.testing.assert_close(found[1], value)
            F, a = linearise(lambda z: torch.ones_like(z[..., :1]), z)
            assert torch.equal(F, torch.zeros(7, 1, 2, dtype=F64)) and torch.equal(
                a, torch.ones(7, 1, dtype=F64)
            )
    with torch.inference_mode():
        torch.testing.assert_close(tangent(lambda z: f(z), z)[0], truth)


@pytest.mark.slow
def test_blocks_that_nothing_is_seen_in_hand_on_what_they_know(done):
    """Sequences of a rotation (rounding does not spoil its predictions) that end early, or begin
    again.
    """
    model = bent()._replace(f=oscillatory(omega=0.3, beta=0.0).f)
    obs = simulate(model, model.m0.expand(B, 2), T, generator()).obs
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, 150:], mask[1, 60:160] = False, False
    for kind in (ExtendedKalmanFilter, UnscentedKalmanFilter):
        assert_same(
            rollout(kind(model), obs, mask=mask), step_by_step(kind(model), obs, mask=mask), 1e-8
        )
    assert min(done) > T - 20
