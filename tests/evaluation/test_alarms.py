"""The monitor against naive loops, known distributions, and tracks that are known to be lost."""

from __future__ import annotations

import math

import pytest
import torch

from kbf.evaluation.alarms import (
    LEAST_DENSITY,
    WINDOW,
    Check,
    Monitor,
    fit_tail,
    innermost,
    innovation_score,
    lower_median,
    nearest,
    running_median,
)
from kbf.evaluation.score import score
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.operators import density_transition
from kbf.filters.kernel.update.rule import PrimalUpdate
from kbf.filters.rollout import rollout
from kbf.filters.scaling import ScaledFilter, Scaling
from kbf.fitted.held_out_calibration import learn_monitor
from kbf.fitted.held_out_runs import Run, held_out, run_through
from kbf.recording import Recording, mask_missing, pad
from kbf.rkhs.features import NystromFeatures
from kbf.rkhs.kernels import gaussian, median_distance
from kbf.ssm import gaussian_log_density, rotation, simulate

MODEL = rotation()


def draw(count: int, steps: int, seed: int, model=MODEL) -> list[Recording]:
    """Independent recordings, each from a place of its own on the circle."""
    angle = torch.linspace(0, 2 * math.pi, count + 1, dtype=torch.float64)[:-1]
    run = simulate(
        model,
        torch.stack([angle.cos(), angle.sin()], -1),
        steps,
        torch.Generator().manual_seed(seed),
    )
    return [Recording(z, x) for z, x in zip(run.states, run.obs, strict=True)]


@pytest.fixture(scope="module")
def memory() -> list[Recording]:
    return draw(4, 75, 0)


@pytest.fixture(scope="module")
def net(memory) -> KBF:
    net = KBF(learn=False, rank=48)
    net.prepare(memory)
    return net


@pytest.fixture(scope="module")
def filter(net, memory) -> KernelBayesFilter:
    return net.fit(memory)


@pytest.fixture(scope="module")
def monitor(net, memory) -> Monitor:
    return learn_monitor(run_through(held_out(net, memory)), memory)


# -- tails --


def test_p_values_are_ranks_then_an_exponential_tail():
    """Of exponential scores p(s) = exp(-s), far beyond what n scores can count."""
    scores = -torch.rand(
        3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).log()
    tail = fit_tail(scores)
    at = torch.tensor([0.1, 0.5, 1.0, 2.0, 4.0, 7.0], dtype=torch.float64)
    torch.testing.assert_close(tail.p_value(at).log(), -at, atol=0.4, rtol=0.1)
    grid = torch.linspace(0, 10, 500, dtype=torch.float64)
    assert bool((tail.p_value(grid).diff() <= 1e-12).all())
    few = fit_tail(scores[:100])
    for s in (0.2, 0.9):
        counted = (1 + int((scores[:100] >= s).sum())) / 101
        assert few.p_value(torch.tensor([s], dtype=torch.float64)).item() == pytest.approx(counted)


def test_tails_of_what_is_constant_or_unknown():
    same = fit_tail(torch.zeros(50))
    assert (
        same.p_value(torch.tensor([0.0])).item() == 1
        and same.p_value(torch.tensor([0.1])).item() < 1e-6
    )
    scores = torch.arange(20.0)
    scores[3] = torch.nan
    assert len(fit_tail(scores).scores) == 19
    assert math.isnan(same.p_value(torch.tensor([torch.nan])).item())
    with pytest.raises(ValueError, match="at least 10 held-out steps, got 9"):
        fit_tail(scores[:10])


# -- distances and innovation scores, by naive loops --


def test_the_nearest_is_the_nearest(normal):
    x, obs = normal(5, 2, 3), normal(40, 6)
    naive = [min(float((a.flatten() - b).norm()) for b in obs) for a in x]
    torch.testing.assert_close(nearest(x, obs), torch.tensor(naive, dtype=torch.float64))


@pytest.mark.parametrize("rank", [None, 300])
def test_the_innovation_score_is_the_density_over_its_mean(memory, rank):
    """m(x) and E m(X) by sums over the memory's kernel, for full Gram matrices and for features of
    full rank.
    """
    net = KBF(learn=False, rank=rank, tol=1e-12)
    net.prepare(memory)
    filter = net.fit(memory)
    obs = torch.cat([s.obs for s in memory])
    width = float(net.log_bandwidth.exp()[2])
    w = filter.predict(filter.update(filter.init(2), obs[:2])).weights
    x = obs[[5, 60]]
    for k in range(2):
        density = (w[k] * gaussian(x[k : k + 1], obs, bandwidth=width)[0]).sum() / w[k].sum()
        mean = sum(
            w[k, i] * (w[k] * gaussian(obs[i : i + 1], obs, bandwidth=width)[0]).sum()
            for i in range(len(obs))
        )
        expected = -math.log(max(float(density / (mean / w[k].sum() ** 2)), LEAST_DENSITY))
        assert innovation_score(filter, w, x)[k].item() == pytest.approx(expected, abs=1e-3)
        assert innovation_score(filter, 7 * w, x)[k].item() == pytest.approx(expected, abs=1e-3)


def test_without_weights_everything_is_surprising(filter):
    found = innovation_score(
        filter, torch.zeros(1, len(filter.states), dtype=torch.float64), filter.states[:1]
    )
    assert found.item() == pytest.approx(-math.log(LEAST_DENSITY))


def test_the_median_of_the_last_ones():
    run = torch.tensor([[0.0, 5.0, 1.0, 9.0, 2.0, 3.0, torch.nan, torch.nan, torch.nan, 4.0]])
    found = running_median(run)[0].tolist()
    for t, value in enumerate(found):
        known = sorted(v for v in run[0, max(0, t - WINDOW + 1) : t + 1].tolist() if v == v)
        assert (
            math.isnan(value)
            if len(known) <= WINDOW // 2
            else value == known[(len(known) - 1) // 2]
        )
    assert lower_median(torch.full((1, WINDOW), torch.nan)).isnan().all()


# -- at work --


@pytest.mark.slow
def test_a_stopped_rollout_and_check_agree(filter, monitor):
    """What `score` watches is the loop of `check`, masks and all; one by one as in a batch."""
    sequences = draw(3, 20, 5)
    sequences[1] = sequences[1]._replace(mask=torch.arange(20) % 3 > 0)
    sequences[2] = Recording(sequences[2].states[:8], sequences[2].obs[:8])
    found = score(filter, sequences, watch=monitor.check).watched
    assert [len(check.alarm) for check in found] == [20, 20, 8]
    for sequence, together in zip(sequences, found, strict=True):
        alone = score(filter, [sequence], watch=monitor.check).watched[0]
        for mine, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)
    assert bool((found[1].out_of_distribution.isnan() == (torch.arange(20) % 3 == 0)).all())
    assert not found[1].alarm[0]


@pytest.mark.slow
def test_false_alarms_come_at_the_rate(net, filter, memory):
    """Over 100 x 25 fresh steps, at a nominal rate of 1 %; what was learned is from 300 steps, so
    it is not exact.
    """
    monitor = learn_monitor(run_through(held_out(net, memory)), memory, rate=0.01)
    found = score(filter, draw(100, 25, 7), watch=monitor.check).watched
    for name in ("out_of_distribution", "innovation"):
        share = (torch.cat([getattr(check, name) for check in found]) < 0.01).double().mean().item()
        assert 0.002 < share < 0.03, name
    assert torch.cat([check.diverged for check in found]).double().mean().item() < 0.02


def test_an_observation_from_outside_raises_the_alarm_at_once(filter, monitor):
    sequences = draw(20, 16, 8)
    for s in sequences:
        s.obs[10] = 4 * s.obs[10] / s.obs[10].norm()
    found = score(filter, sequences, watch=monitor.check).watched
    before = torch.stack([check.alarm[:10] for check in found])
    assert before.double().mean().item() < 0.03
    assert all(
        bool(check.out_of_distribution[10] < monitor.rate) and bool(check.alarm[10])
        for check in found
    )
    assert not any(bool(check.diverged[10]) for check in found)  # outside, not diverged
    last = found[0].recent[10]
    assert last[-1].isnan() and not last[:-1].isnan().any()


def stuck_model():
    """Little noise in the state, much in the observation: a filter that is elsewhere stays there
    for long.
    """
    eye = torch.eye(2, dtype=torch.float64)
    return MODEL._replace(Q=0.05**2 * eye, R=0.4**2 * eye)


def known(model) -> KernelBayesFilter:
    """`SimulatedKBF`, but with the true model in place of a learned one, which takes no time."""
    points = draw(20, 20, 11, model)
    z = torch.cat([s.states for s in points])
    log_density = gaussian_log_density(z[:, None] - model.f(z), model.Q)
    obs = torch.stack([model.observe(z, torch.Generator().manual_seed(k)) for k in range(4)], 1)
    psi = NystromFeatures("gaussian", 0.5 * median_distance(obs[:, 0]), obs[:, 0], 48, 1e-9)
    transition = density_transition(
        log_density, torch.full((len(z),), 1 / len(z), dtype=z.dtype), z, model.f(z)
    )
    return KernelBayesFilter(z, transition, None, PrimalUpdate(psi, obs, 1e-4), normalise=True)


def test_a_kidnapped_state_is_found_and_recovered():
    """At step 20 the state jumps to the opposite place.

    With restarts the error is back within six steps, without it is not.
    """
    model = stuck_model()
    filter, memory = known(model), draw(3, 80, 1, model)
    monitor = learn_monitor(run_through([(filter, memory)]), memory)
    sequences = pad(draw(15, 32, 2, model))
    z, x = sequences.states.clone(), sequences.obs.clone()
    z[:, 20:], x[:, 20:] = -z[:, 20:], x[:, 20:] - 2 * z[:, 20:]
    errors, diverged = {}, {}
    for restart in (False, True):
        state, last, error, told = filter.init(15), None, [], []
        for t in range(32):
            if restart:
                state, last = monitor.step(filter, state, x[:, t], last=last)
            else:
                predicted = filter.predict(state)
                last = monitor.check(filter, predicted, x[:, t], last=last)
                state = filter.update(predicted, x[:, t])
            error.append((filter.estimate(state) - z[:, t]).square().sum(-1))
            told.append(last.diverged)
        errors[restart], diverged[restart] = torch.stack(error, 1), torch.stack(told, 1)
    assert diverged[True][:, :20].double().mean() < 0.01
    assert diverged[True][:, 20:26].any(1).double().mean() > 0.9
    assert errors[True][:, 26:32].median() < 0.2
    assert errors[False][:, 26:32].median() > 1


def test_a_lost_track_is_told_once_and_starts_from_the_prior(filter, monitor):
    high = torch.full((1, WINDOW), 10.0, dtype=torch.float64)
    last = Check(*([torch.zeros(1)] * 4), recent=high)
    x = filter.states[:1]
    state = filter.update(filter.init(1), -x)
    after, found = monitor.step(filter, state, x, last=last)
    assert bool(found.diverged) and found.recent.isnan().all()
    fresh = filter.update(filter.predict(filter.init(1)), x)
    torch.testing.assert_close(after.weights, fresh.weights)
    again = monitor.check(filter, filter.predict(after), x, last=found)
    assert not bool(again.diverged)


def test_a_filter_without_a_kernel_is_judged_by_novelty_alone(memory):
    filter = LearnedKalman().fit(memory)
    monitor = learn_monitor(run_through([(filter, draw(2, 20, 3))]), memory)
    assert monitor.innovation is None and monitor.divergence is None
    far = monitor.check(
        filter, filter.predict(filter.init(1)), torch.full((1, 2), 9.0, dtype=torch.float64)
    )
    assert far.innovation.isnan().all() and bool(far.alarm) and not bool(far.diverged)


@pytest.mark.slow
def test_behind_scalings_and_codes(net, filter, memory, monitor):
    """What is judged is what the innermost filter sees, in its units."""
    scaling = Scaling().prepare(
        [s._replace(states=5 * s.states, obs=3 * s.obs + 1) for s in memory]
    )
    inner = net.fit(
        [
            Recording(scaling.scaled("z", 5 * s.states), scaling.observation(3 * s.obs + 1))
            for s in memory
        ]
    )
    wrapped = ScaledFilter(scaling, inner, torch.float64)
    x = 3 * memory[0].obs[:2] + 1
    found, seen = innermost(wrapped, x)
    assert found is inner
    torch.testing.assert_close(seen, scaling.observation(x))
    scaled = [scaling(s._replace(states=5 * s.states, obs=3 * s.obs + 1)) for s in memory]
    learned = learn_monitor(run_through(held_out(net, scaled)), scaled)
    raw = [s._replace(states=5 * s.states, obs=3 * s.obs + 1) for s in draw(2, 10, 4)]
    outside = score(wrapped, raw, watch=learned.check).watched
    within = score(inner, [scaling(s) for s in raw], watch=learned.check).watched
    for mine, theirs in zip(outside, within, strict=True):
        torch.testing.assert_close(mine.out_of_distribution, theirs.out_of_distribution)
        torch.testing.assert_close(mine.innovation, theirs.innovation)


def test_silent_sensors_and_missing_observations_raise_nothing(filter, monitor):
    x = torch.tensor([[torch.nan, 0.3]], dtype=torch.float64)
    found = monitor.check(filter, filter.init(1), x)
    assert (
        found.out_of_distribution.isnan().all()
        and not bool(found.alarm)
        and not bool(found.diverged)
    )
    whole = draw(1, 6, 3)[0]
    whole.obs[2] = torch.nan
    check = score(filter, [mask_missing(whole)], watch=monitor.check).watched[0]
    assert check.out_of_distribution.isnan().tolist() == [False, False, True, False, False, False]


def test_a_watcher_sees_each_step_before_the_update(filter):
    """Predicted states, observations and masks of the plain loop; the filter's own way is not
    changed by it.
    """
    sequence = draw(1, 6, 9)[0]
    mask = torch.tensor([[True, True, False, True, True, True]])
    for given in (None, mask):
        seen = []
        run = rollout(
            filter,
            sequence.obs[None],
            mask=given,
            before=lambda *step, seen=seen: seen.append(step),
        )
        state = filter.init(1)
        for t, (predicted, x, told) in enumerate(seen):
            state = filter.predict(state)
            torch.testing.assert_close(predicted.weights, state.weights)
            assert told is None if given is None else torch.equal(told, mask[:, t])
            assert torch.equal(
                x[0], torch.zeros(2).to(x) if told is not None and not told else sequence.obs[t]
            )
            state = state if told is not None and not told else filter.update(state, x)
            torch.testing.assert_close(run.estimates[:, t], filter.estimate(state))
        assert len(seen) == 6
        torch.testing.assert_close(
            run.estimates, rollout(filter, sequence.obs[None], mask=given).estimates
        )
    innovation_scores = run_through([(filter, [sequence._replace(mask=mask[0])])]).innovation_scores
    assert innovation_scores[0].isnan().tolist() == [False, False, True, False, False, False]


def slow(n: int, seed: int) -> Recording:
    """A state that takes some 30 steps to forget, and is observed nearly without noise."""
    white = torch.randn(
        n + 1, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    z, a = [white[0]], math.exp(-1 / 30)
    for e in white[1:]:
        z.append(a * z[-1] + math.sqrt(1 - a * a) * e)
    states = torch.stack(z[1:])
    return Recording(states, states + 0.02 * white[1:].flip(0))


def test_neighbours_in_time_make_nothing_novel():
    """Steps just before and after an observation are nearer to it than those of the training are to
    a new one.
    """
    shares, no_run = [], Run(*[torch.zeros(0)] * 3, [torch.full((20,), torch.nan)], torch.zeros(0))
    for seed in range(4):
        memory = [slow(1000, seed)]
        monitor = learn_monitor(no_run, memory, rate=0.01)
        assert monitor is not None
        shares.append(
            (
                monitor.out_of_distribution.p_value(nearest(slow(2000, 9 + seed).obs, monitor.obs))
                < 0.01
            )
            .double()
            .mean()
            .item()
        )
    assert sum(shares) / 4 < 0.04  # 0.13 if only the step itself is left out


def test_sensors_that_never_speak_together_have_no_monitor():
    """There is no distance between observations that are never whole; too few steps are another
    matter.
    """
    silent = torch.rand(60, 2, dtype=torch.float64)
    silent[::2, 0] = silent[1::2, 1] = torch.nan
    memory = [Recording(torch.zeros(60, 2, dtype=torch.float64), silent)]
    assert (
        learn_monitor(Run(*[torch.zeros(0)] * 3, [torch.zeros(60)], torch.zeros(0)), memory) is None
    )


def test_large_images_are_kept_in_part(memory):
    """Of images with 840,000 numbers a few are kept, and a rate is a rate."""
    images = [
        Recording(
            torch.zeros(12, 2),
            torch.rand(12, 3, 700, 400, generator=torch.Generator().manual_seed(0)),
        )
    ]
    nothing = Run(*[torch.zeros(0)] * 3, [torch.full((12,), torch.nan)], torch.zeros(0))
    monitor = learn_monitor(nothing, images, dtype=torch.float32)
    assert monitor.obs.shape == (4, 840_000)
    with pytest.raises(ValueError, match="rate must be between 0 and 1, got 2"):
        learn_monitor(nothing, images, rate=2.0)


def test_it_is_kept_as_plain_tensors(monitor, filter, tmp_path):
    torch.save(monitor.stored(), tmp_path / "monitor.pt")
    again = Monitor.read(torch.load(tmp_path / "monitor.pt", weights_only=True))
    assert again is not None and Monitor.read(None) is None
    x = filter.states[:3] + 0.3
    for mine, theirs in zip(
        monitor.check(filter, filter.init(3), x),
        again.check(filter, filter.init(3), x),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_the_first_alarm_that_applies_is_named():
    """A diverged track before an observation far from the training, before a large innovation."""
    far = torch.tensor([0.001, 0.001, 0.5, 0.5, torch.nan])
    yes, no = torch.tensor([True]), torch.tensor([False])
    alarm, diverged = torch.cat([yes, yes, yes, no, no]), torch.cat([yes, no, no, no, no])
    check = Check(far, torch.ones(5), alarm, diverged, torch.zeros(5, 1))
    names = ["diverged", "out_of_distribution", "innovation_outlier", "", ""]
    assert check.names(torch.tensor(0.01)) == names
