"""A belief that makes observations impossible many times in a row is wrong: the track begins anew,
in every loop alike.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from kbf.export.step import ExportedStep
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.gating import MAX_CONSECUTIVE_REJECTIONS
from kbf.filters.gaussian.ekf import EKF
from kbf.filters.gaussian.kalman import KalmanFilter, LearnedKalman, LinearModel
from kbf.filters.gaussian.learned_ukf import LearnedUKF
from kbf.filters.gaussian.ukf import UKF
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo
from kbf.filters.online import RunningFilter
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.regression.window import WindowRidge
from kbf.filters.rollout import Rollout, rollout
from kbf.recording import Recording
from kbf.runtime.branches import all_branches
from kbf.ssm import StateSpaceModel, rotation, simulate

F64 = torch.float64
SHIFT = torch.tensor([100.0, -50.0], dtype=F64)
JUMP = 30
SMALL: dict[str, Any] = {"inflations": (1.0,), "orders": (1,), "density": "gaussian"}
GAUSSIAN: dict[str, Any] = {"transition": "gaussian", "observation": "gaussian"}


def exact() -> StateSpaceModel:
    """A point on a ring far from the origin, seen with little noise: a jump across is a hundred
    standard deviations.
    """
    ring = rotation()
    small = {"Q": 0.01 * ring.Q, "R": 0.01 * ring.R, "m0": ring.m0 + SHIFT}
    return ring._replace(
        f=lambda z: ring.f(z - SHIFT) + SHIFT, h=lambda z: ring.h(z - SHIFT), **small
    )


@functools.cache
def drawn() -> Recording:
    model = exact()
    found = simulate(model, model.m0, 700, torch.Generator().manual_seed(0))
    return Recording(found.states, found.obs)


def train() -> Recording:
    return Recording(drawn().states[:300], drawn().obs[:300])


def jumping() -> Recording:
    """After `JUMP` steps it goes on from across the ring."""
    z, x = drawn().states, drawn().obs
    apart = (z[500:600] - z[300 + JUMP]).norm(dim=-1) > 1.8
    k = 500 + int(apart.int().argmax())
    return Recording(
        torch.cat([z[300 : 300 + JUMP], z[k : k + 30]]),
        torch.cat([x[300 : 300 + JUMP], x[k : k + 30]]),
    )


MODELS: dict[str, Any] = {
    "kbf": lambda: SimulatedKBF(points=500, run=8000, **GAUSSIAN),
    "kbf_tuned": KBF,
    "kmc": lambda: KernelMonteCarlo(200, regs=(1e-3,), restarts=(0.0,), **SMALL),
    "kmc_weighing": lambda: KernelMonteCarlo(200, regs=(0.0,), tempers=(1.0,), **SMALL),
    "particle_learned": lambda: LearnedParticleFilter(1000, **GAUSSIAN),
    "particle": lambda: ParticleFilter(exact(), 1000),
    "kalman": LearnedKalman,
    "ekf": lambda: EKF(exact()),
    "ukf": lambda: UKF(exact()),
    "window_ridge": WindowRidge,
}
PASSING = ("kbf", "kmc", "particle_learned", "particle", "ekf", "ukf")
"""Those for which what comes after the jump is impossible for good, or for long."""


@functools.cache
def filter_of(name: str) -> Any:
    model = MODELS[name]()
    model.prepare([train()])
    return model.fit([train()])


def run(filter: Any, obs: Tensor, **more: Any) -> Rollout:
    return rollout(filter, obs[None], generator=torch.Generator().manual_seed(0), **more)


def errors(estimates: Tensor, sequence: Recording) -> Tensor:
    return (estimates.double() - sequence.states).norm(dim=-1)


@pytest.mark.parametrize("name", MODELS)
def test_first_estimates_lie_inside_the_region_of_the_states_and_a_lost_track_is_found(name):
    test, known = jumping(), train().states
    found = run(filter_of(name), test.obs).estimates[0].double()
    assert ((found[:10] >= known.amin(0) - 0.1) & (found[:10] <= known.amax(0) + 0.1)).all()
    assert errors(found, test)[5:JUMP].mean() < 0.06
    assert errors(found, test)[-10:].mean() < 0.06


@pytest.mark.parametrize("name", PASSING)
def test_it_begins_anew_after_as_many_impossible_observations_as_patience(name):
    test = jumping()
    found = run(filter_of(name), test.obs)
    passed = found.diagnostics["rejected"][0]
    assert passed.nonzero()[:, 0].tolist() == list(range(JUMP, JUMP + MAX_CONSECUTIVE_REJECTIONS))
    assert errors(found.estimates[0], test)[JUMP + MAX_CONSECUTIVE_REJECTIONS] < 0.3


@pytest.mark.parametrize("name", ["kbf", "ekf", "ukf"])
def test_a_recovered_track_equals_a_fresh_start_at_that_step(name):
    obs, first = jumping().obs, JUMP + MAX_CONSECUTIVE_REJECTIONS
    found, fresh = (
        run(filter_of(name), obs).estimates[0, first:],
        run(filter_of(name), obs[first:]).estimates[0],
    )
    torch.testing.assert_close(found, fresh, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["kbf", "particle", "ekf"])
def test_running_filters_and_those_with_masks_do_the_same(name, tmp_path):
    """A step without an observation counts neither way; a state that was saved keeps the count."""
    test, filter = jumping(), filter_of(name)
    seen = torch.ones(len(test.obs), dtype=torch.bool)
    seen[JUMP + 1] = False
    found = run(filter, test.obs, mask=seen[None])
    assert found.diagnostics["rejected"][0].nonzero()[:, 0].tolist() == [JUMP, JUMP + 2, JUMP + 3]
    live, stopped = (
        RunningFilter(filter, generator=torch.Generator().manual_seed(0)) for _ in range(2)
    )
    ratio_dim = []
    for t, x in enumerate(test.obs):
        ratio_dim.append(live.step(x[None] if seen[t] else None))
        if t == JUMP + 2:
            live.save(tmp_path / "state.npz")
            stopped.load(tmp_path / "state.npz")
            live = stopped
    torch.testing.assert_close(torch.cat(ratio_dim), found.estimates[0])


def test_an_observation_unlike_all_that_is_known_never_begins_a_track():
    """Far outside of the ring for ten steps: the prediction is kept, and then the track goes on."""
    test, filter = jumping(), filter_of("kbf")
    obs = test.obs[:JUMP].clone()
    obs[10:20] += 50
    found = run(filter, obs)
    masked = run(filter, obs, mask=(torch.arange(JUMP) // 10 != 1)[None])
    assert found.diagnostics["rejected"][0].nonzero()[:, 0].tolist() == list(range(10, 20))
    torch.testing.assert_close(found.estimates, masked.estimates)


def test_of_a_batch_only_the_lost_ones_begin_anew():
    filter, test = filter_of("kbf"), jumping()
    fine = drawn().obs[300:360]
    both = rollout(filter, torch.stack([test.obs, fine]))
    for k, obs in enumerate((test.obs, fine)):
        torch.testing.assert_close(
            both.estimates[k], run(filter, obs).estimates[0], rtol=1e-4, atol=1e-4
        )


@pytest.mark.slow
def test_blocks_side_by_side_give_way_where_a_track_is_lost():
    """A long recording that is filtered at once, with a jump in it: as one step after the other."""
    filter = filter_of("ukf")
    obs = torch.cat([drawn().obs[: 300 + JUMP], jumping().obs[JUMP:], drawn().obs[300:700]])
    states: list[Any] = []
    slow = run(filter, obs, states=states)  # keeps states: the loop itself
    torch.testing.assert_close(run(filter, obs).estimates, slow.estimates)
    assert slow.diagnostics["rejected"].sum() >= MAX_CONSECUTIVE_REJECTIONS


def test_a_step_at_which_all_sensors_are_silent_counts_neither_way():
    """Where silent sensors are known, nothing need be passed over for them: the count stays all the
    same.
    """
    eye, zero = torch.eye(2, dtype=F64), torch.zeros(2, dtype=F64)
    model = LinearModel(
        A=0.9 * eye, a=zero, Q=1e-4 * eye, C=eye, c=zero, R=1e-4 * eye, m0=zero, P0=eye
    )
    filter = KalmanFilter(model, allow_missing_sensors=True)
    obs = torch.zeros(12, 2, dtype=F64)
    obs[5:] = 1.0
    obs[7] = torch.nan
    live = RunningFilter(filter)
    ratio_dim = torch.cat([live.step(x[None]) for x in obs])
    found = run(filter, obs)
    assert found.diagnostics["rejected"][0].nonzero()[:, 0].tolist() == [5, 6, 8]
    torch.testing.assert_close(found.estimates[0], ratio_dim)


def test_an_exported_step_does_the_same():
    """The function that becomes a program, by its own state: the count of those passed over is a
    part of it.
    """
    filter, test = filter_of("kbf"), jumping()
    step = ExportedStep(filter).eval()
    state, found = step.start(), []
    for x in test.obs:
        *state, estimate, _, passed = step(*state, x[None], torch.ones(1, dtype=torch.bool))
        found.append(estimate)
    assert step.fields[-1] == "rejections" and not bool(passed)
    torch.testing.assert_close(torch.cat(found), run(filter, test.obs).estimates[0])


def test_a_member_of_a_stack_begins_anew():
    ridge, kbf, test = filter_of("window_ridge"), filter_of("kbf"), jumping()
    none = torch.zeros(2, 2, 2, dtype=F64)
    stack = EnsembleFilter(
        {"ridge": ridge, "kbf": kbf}, torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=F64), none
    )
    found = run(stack, test.obs)
    assert errors(found.estimates[0], test)[-10:].mean() < 0.06
    torch.testing.assert_close(
        found.estimates[0].float(), run(kbf, test.obs).estimates[0], rtol=1e-4, atol=1e-4
    )


def test_members_of_a_stack_get_their_controls_while_all_branches_are_computed():
    """As in compiled steps, and where it is found out whether a step draws random numbers."""
    z = torch.randn(80, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    controls = z.roll(1, 0)[:, :1]
    memory = [Recording(z, z + 0.1 * z.flip(0), controls=controls)]
    learned = LearnedUKF(kinds=("linear",), factors=(1.0,), switches=False)
    filters = {"learned": learned.fit(memory), "window": WindowRidge(3).fit(memory)}
    weights = torch.full((2, 2), 0.5, dtype=F64)
    stack = EnsembleFilter(filters, weights, torch.eye(2, dtype=F64).expand(2, 2, 2))
    u = controls[:1]
    expected = stack.update(stack.predict(stack.init(1), control=u), z[:1])
    with all_branches():
        found = stack.update(stack.predict(stack.init(1), control=u), z[:1])
    torch.testing.assert_close(stack.estimate(found), stack.estimate(expected))
