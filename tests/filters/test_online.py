"""A running filter: the same as a rollout, missing observations, saved states, compiled steps, and
nothing that grows.
"""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch

from kbf.filters.compile import compile_step
from kbf.filters.gaussian.ekf import EKF
from kbf.filters.kernel.kbf import KBF
from kbf.filters.online import RunningFilter
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.filters.rollout import rollout, step
from kbf.runtime.threads import tune_process
from kbf.ssm import oscillatory, simulate

F64 = torch.float64
compiler = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
)


def recording(steps: int, seed: int = 0, batch: int = 1):
    start = torch.tensor([1.0, 0.0], dtype=F64).expand(batch, 2)
    return simulate(oscillatory(), start, steps, torch.Generator().manual_seed(seed))


def kernel_filter(**settings):
    whole = recording(80)
    model = KBF(**{"rank": 16, **settings})
    memory = whole._replace(states=whole.states[0], obs=whole.obs[0])
    model.prepare([memory])
    return model.fit(memory)


@pytest.mark.parametrize("settings", [{}, {"normalise": False}, {"rank": None}])
def test_live_is_the_rollout(settings):
    filter, obs = kernel_filter(**settings), recording(12, seed=1, batch=2).obs
    live = RunningFilter(filter, batch=2)
    found = torch.stack([live.step(obs[:, t]) for t in range(12)], 1)
    torch.testing.assert_close(found, rollout(filter, obs).estimates.detach())


def test_missing_observations_are_masked_ones():
    filter, obs = kernel_filter(), recording(6, seed=1, batch=2).obs
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 2] = mask[:, 4] = False
    gaps = torch.where(mask[..., None], obs, torch.nan)
    gaps[0, 2, 1] = 0.3  # one missing component is a missing observation
    live = RunningFilter(filter, batch=2)
    found = [live.step(None if t == 4 else gaps[:, t]) for t in range(6)]
    torch.testing.assert_close(
        torch.stack(found, 1), rollout(filter, obs, mask=mask).estimates.detach()
    )
    infinite = obs[:, 0].clone()
    infinite[1] = torch.inf
    assert torch.isfinite(RunningFilter(filter, batch=2).step(infinite)).all()


def test_state_is_saved_and_taken_up_again(tmp_path):
    filter, obs = kernel_filter(), recording(6, seed=1).obs
    first = RunningFilter(filter)
    for t in range(3):
        first.step(obs[:, t])
    first.save(tmp_path / "state.pt")
    again = RunningFilter(filter)
    again.load(tmp_path / "state.pt")
    assert torch.equal(again.step(obs[:, 3]), first.step(obs[:, 3]))
    with pytest.raises(ValueError, match="holds 1 sequences, this filter runs 2"):
        RunningFilter(filter, batch=2).load(tmp_path / "state.pt")
    again.restart()
    assert torch.equal(again.step(obs[:, 0]), RunningFilter(filter).step(obs[:, 0]))


def test_a_particle_filter_goes_on_with_the_numbers_that_would_have_come(tmp_path):
    obs = recording(8, seed=1).obs
    whole = recording(40)
    memory = whole._replace(states=whole.states[0], obs=whole.obs[0])
    filter = ParticleFilter(oscillatory(), particles=50).fit([memory])
    first = RunningFilter(filter, generator=torch.Generator().manual_seed(5))
    for t in range(4):
        first.step(obs[:, t])
    first.save(tmp_path / "state.pt")
    again = RunningFilter(filter, generator=torch.Generator().manual_seed(6))
    again.load(tmp_path / "state.pt")
    for t in range(4, 8):
        assert torch.equal(again.step(obs[:, t]), first.step(obs[:, t]))


def test_a_state_with_nan_or_a_flipped_bit_is_refused(tmp_path):
    live, path = RunningFilter(kernel_filter()), tmp_path / "state.pt"
    live.state = live.state._replace(weights=live.state.weights.clone().fill_(torch.nan))
    live.save(path)
    with pytest.raises(ValueError, match="weights holds NaN or infinity"):
        RunningFilter(kernel_filter()).load(path)
    live.restart()
    live.save(path)
    stored = path.read_bytes()
    for at in range(100, len(stored), len(stored) // 25):
        broken = bytearray(stored)
        broken[at] ^= 1
        path.write_bytes(bytes(broken))
        again = RunningFilter(kernel_filter())
        try:
            again.load(path)
        except ValueError:
            continue
        assert torch.equal(again.state.weights, live.state.weights), (
            "what is loaded is what was written"
        )


def test_one_of_a_batch_is_restarted():
    filter, obs = kernel_filter(), recording(4, seed=1, batch=2).obs
    live = RunningFilter(filter, batch=2)
    for t in range(3):
        live.step(obs[:, t])
    kept = live.state.weights[1].clone()
    live.restart(torch.tensor([True, False]))
    assert torch.equal(live.state.weights[0], filter.init(1).weights[0])
    assert torch.equal(live.state.weights[1], kept)


@pytest.mark.slow
def test_nothing_grows():
    """5,000 steps keep the size of the state and, but for a page or two, of the process; the error
    does not drift.
    """
    tune_process()
    filter, sequence = kernel_filter(dtype="float32"), recording(5000, seed=1)
    live, errors = RunningFilter(filter), []
    before = None
    for t in range(5000):
        found = live.step(sequence.obs[:, t].float())
        errors.append((found - sequence.states[:, t]).square().sum())
        if t == 1000:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert (
        before is not None and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 4096
    )  # KiB
    assert live.state.weights.shape == (1, 80)
    first, last = torch.stack(errors[:2500]).mean(), torch.stack(errors[2500:]).mean()
    assert abs(first - last) < 0.2 * first


@compiler
@pytest.mark.slow
@pytest.mark.parametrize("settings", [{"normalise": False}, {}], ids=["published", "normalised"])
def test_compiled_is_eager(settings):
    filter, obs = kernel_filter(dtype="float32", **settings), recording(20, seed=1).obs.float()
    fast, slow = RunningFilter(filter, compiled=obs[:, 0]), RunningFilter(filter)
    for t in range(20):
        x = None if t == 7 else obs[:, t]
        torch.testing.assert_close(fast.step(x), slow.step(x), rtol=1e-4, atol=1e-5)


@compiler
@pytest.mark.slow
def test_a_compiled_batch_takes_an_example_of_any_strides():
    """One that is cut out of sequences is not contiguous, and compiled code looks at no strides."""
    filter = kernel_filter(dtype="float32")
    obs = torch.cat([recording(10, seed=seed).obs for seed in (1, 2, 3)]).float()
    assert not obs[:, 0].is_contiguous()
    fast, slow = RunningFilter(filter, batch=3, compiled=obs[:, 0]), RunningFilter(filter, batch=3)
    for x in obs.unbind(1):
        torch.testing.assert_close(fast.step(x), slow.step(x), rtol=1e-4, atol=1e-5)


WHOLE = """
import torch
import kbf
from kbf.filters.compile import Step
from kbf.filters.kernel.kbf import KBF
from kbf.recording import Recording

draw = torch.Generator().manual_seed(0)
z = torch.randn(60, 2, dtype=torch.float64, generator=draw)
model = KBF(rank=16, normalise=NORMALISE)
model.prepare([Recording(z, z)])
filter = model.fit(Recording(z, z)).requires_grad_(False)
whole = torch.compile(Step(filter), fullgraph=True, backend="eager")
state, obs = filter.init(3), z[:3]
torch.testing.assert_close(whole(*state, obs)[-2], filter.estimate(kbf.step(filter, state, obs)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("normalise", [True, False])
def test_a_step_is_one_graph(normalise):
    """torch.compile finds no break in it: nothing waits for a value.

    (Not in this process: it cannot take the checks of shapes.)
    """
    code = WHOLE.replace("NORMALISE", str(normalise))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


RECORDED = (
    WHOLE.partition("whole =")[0]
    + """
from kbf.filters.compile import recorded
state, obs = filter.init(3), z[:3]
fast, now = recorded(Step(filter), (*state, obs)), tuple(state)
for t in range(4):
    plain = Step(filter)(*now, obs)
    for a, b in zip(fast(*now, obs), plain, strict=True):
        torch.testing.assert_close(a, b)
    now = plain[: len(now)]
torch._dynamo.reset()  # it does not see new hooks of a module that it knows
filter.rule.register_forward_hook(lambda _, inputs, w: w if bool((w > 0).any()) else None)
try:
    recorded(Step(filter), (*state, obs))
except ValueError as error:
    assert "cannot be compiled, run it as it is" in str(error), error
else:
    raise AssertionError("a step that looks at values was recorded")
"""
)


@compiler
@pytest.mark.slow
def test_a_step_is_recorded_at_once():
    """As on a graphics card, where it becomes a CUDA graph; here the same without a graph."""
    done = subprocess.run(
        [sys.executable, "-c", RECORDED.replace("NORMALISE", "True")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


@compiler
@pytest.mark.slow
def test_compiled_code_gets_what_it_was_made_for():
    """It looks at neither shapes, types nor strides itself, and would read beyond the end of what
    it gets.
    """
    filter, obs = kernel_filter(dtype="float32"), recording(9, seed=1, batch=2).obs
    fast, slow = (
        RunningFilter(filter, batch=2, compiled=obs[:, 0].float()),
        RunningFilter(filter, batch=2),
    )
    for t in range(9):  # float64, and a view with strides
        torch.testing.assert_close(fast.step(obs[:, t]), slow.step(obs[:, t]), rtol=1e-4, atol=1e-5)
    for wrong in (torch.zeros(2, 1), torch.zeros(2, 3)):
        with pytest.raises(ValueError, match=r"compiled for \(2, 2\), got"):
            fast.step(wrong)
    with pytest.raises(ValueError, match="compiled for 1 sequences, and to run 2"):
        RunningFilter(filter, batch=2, compiled=obs[:1, 0].float())
    looking = kernel_filter()
    looking.rule.register_forward_hook(lambda _, inputs, w: w if bool((w > 0).any()) else None)
    with pytest.raises(ValueError, match="cannot be compiled, run it as it is"):
        RunningFilter(looking, compiled=obs[:1, 0])


@pytest.mark.parametrize("obs", [torch.zeros(3, 2), torch.zeros(1, 2), torch.zeros(2)])
def test_observations_of_another_batch(obs):
    with pytest.raises(ValueError, match="the batch in front"):
        RunningFilter(kernel_filter(), batch=2).step(obs)


@pytest.mark.parametrize("settings", [{}, {"rank": None}])
@pytest.mark.parametrize("width", [1, 3])
def test_observations_of_another_width(settings, width):
    with pytest.raises(
        (ValueError, TypeError), match=r"points of \d components|Type-check error"
    ):  # here shapes are checked
        RunningFilter(kernel_filter(**settings), batch=2).step(torch.zeros(2, width, dtype=F64))


def test_restart_of_another_batch():
    with pytest.raises(ValueError, match="which is for 3 sequences, this filter runs 2"):
        RunningFilter(kernel_filter(), batch=2).restart(torch.tensor([True, False, True]))


def test_only_modules_are_compiled():
    with pytest.raises(ValueError, match="only filters that are modules can be compiled"):
        compile_step(
            EKF(oscillatory()).fit(
                recording(20)._replace(states=recording(20).states[0], obs=recording(20).obs[0])
            ),
            torch.zeros(1, 2),
        )


def test_tune_process_sets_threads():
    with pytest.raises(ValueError, match="threads must be at least 1"):
        tune_process(threads=0)
    before = torch.get_num_threads()
    tune_process(threads=1)
    assert torch.get_num_threads() == 1
    assert (torch.tensor([1e-40]) * 1.0).item() == 0, "a denormal number"
    torch.set_num_threads(before)


def test_a_single_observation_is_taken_without_the_batch():
    filter, obs = kernel_filter(), recording(3).obs[0]
    live, expected = RunningFilter(filter), RunningFilter(filter)
    for x in obs:
        assert torch.equal(live.step(x), expected.step(x[None]))
        assert torch.equal(live.step(x.numpy()), expected.step(x[None]))
    state = filter.init(1)
    one, other = (step(filter, state, x) for x in (obs[0], obs[:1]))
    assert torch.equal(filter.estimate(one), filter.estimate(other))
    for entrance in (live.step, partial(step, filter, state)):
        with pytest.raises(ValueError, match=r"observations by name are for .*online\(\)"):
            entrance({"a": 1.0})
