"""The systems by seed: laws of noise, faults, features, and the floors against exact filters."""

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch

from kbf.data.benchmark_systems import runge_kutta
from studies.systems import floors
from studies.systems.command import main, read_cells, summary
from studies.systems.draws import Draws
from studies.systems.faults import FAILED, STUCK, WORKS, Faults
from studies.systems.floors import (
    error_of,
    has_moments,
    is_linear_gaussian,
    kalman_floor,
    particle_floor,
    ukf_floor,
)
from studies.systems.grammar import DIMENSIONS, FEATURES, draw_system, faults_of
from studies.systems.motions import MOTIONS, linear, rotating
from studies.systems.noise import LAWS, Noise
from studies.systems.sensors import SENSORS, Reading, of_matrix
from studies.systems.system import System

DEVELOPMENT_SEEDS = range(100)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def eye(q: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.eye(q, dtype=torch.float64)


def linear_system(d: int = 2, **changes: object) -> System:
    """A linear Gaussian system whose d sensors see mixtures of its components."""
    draws = Draws(1)
    motion, sensor = linear(d, draws), of_matrix(draws.orthogonal(d))
    plain = System(
        d=d,
        motions=(motion,),
        stay=0.98,
        noise=Noise("gaussian", eye(d, motion.levels[0])),
        jump_rate=0.0,
        B=torch.zeros(d, 0, dtype=torch.float64),
        sensor=sensor,
        reading=Reading("continuous", Noise("gaussian", eye(d, 0.5)), torch.zeros(d).double()),
        late=torch.zeros(d, dtype=torch.bool),
        delay=0,
        gain_spread=0.0,
        bias_spread=torch.zeros(0, dtype=torch.float64),
        faults=None,
        held=torch.zeros(d, dtype=torch.bool),
        period=1,
        length=None,
        features=("linear", "mixed"),
    )
    return replace(plain, **changes)


def first_of(d: int) -> torch.Tensor:
    return torch.arange(d) == 0


def sticking(d: int) -> Faults:
    found = faults_of(
        ("sticking",), {"sticking": 0.1}, (-3 * torch.ones(d), 3 * torch.ones(d)), 0 * torch.ones(d)
    )
    assert found is not None
    return Faults(*(leaf.double() for leaf in found))


LINEAR = {
    "plain": {},
    "late": {"late": first_of(2), "delay": 2},
    "biases": {"bias_spread": torch.tensor([0.5, 0.8]).double()},
    "controls": {"B": torch.tensor([[0.5], [-0.3]]).double()},
    "held": {"held": first_of(2), "period": 3},
    "sticking": {"faults": sticking(2)},
}


# laws


@pytest.mark.parametrize("name", LAWS)
def test_laws_have_mean_0_variance_1_and_consistent_densities(name):
    law = LAWS[name]
    e = torch.linspace(-60, 60, 240_001, dtype=torch.float64)
    p = law.log_density(e).exp()
    assert torch.trapezoid(p, e) == pytest.approx(1, abs=2e-3)
    assert torch.trapezoid(p * e, e) == pytest.approx(0, abs=2e-3)
    if name != "student":  # its tails beyond 60 have 1 % of the variance
        assert torch.trapezoid(p * e.square(), e) == pytest.approx(1, abs=4e-3)
    a, b = -0.7, 0.9
    between = (e >= a) & (e <= b)
    inside = float(torch.trapezoid(p[between], e[between]))
    assert law.cdf(torch.tensor(b)) - law.cdf(torch.tensor(a)) == pytest.approx(inside, abs=2e-3)
    drawn = law.draw((200_000,), generator())
    for at in (-1.0, -0.2, 0.4, 1.5):
        assert (drawn <= at).double().mean() == pytest.approx(
            float(law.cdf(torch.tensor(at))), abs=5e-3
        )


def test_terms_of_a_joint_noise_sum_to_its_density():
    root = torch.tensor([[1.0, 0.0], [0.8, 0.5]]).double()
    noise, r = Noise("gaussian", root), torch.tensor([[0.3, -1.2]]).double()
    exact = torch.distributions.MultivariateNormal(torch.zeros(2).double(), root @ root.mT)
    assert torch.allclose(noise.log_density(r).sum(-1), exact.log_prob(r), atol=1e-12)
    drawn = noise.draw((100_000,), generator())
    assert torch.allclose(torch.cov(drawn.mT), noise.covariance, atol=0.02)


@pytest.mark.parametrize("law", LAWS)
def test_probabilities_of_rounded_readings_sum_to_1(law):
    step = torch.tensor([0.4], dtype=torch.float64)
    reading = Reading("rounded", Noise(law, eye(1, 0.3)), step)
    values = step * torch.arange(-2000, 2001)[:, None]
    mean = torch.tensor([[0.17]]).double()
    p = reading.log_density(values, mean).exp()
    assert p.sum() == pytest.approx(1, abs=1e-6)
    drawn = reading.draw(mean.expand(100_000, 1), generator())
    for value in (0.0, 0.4):
        expected = p[values == value]
        assert torch.isclose(drawn, torch.tensor(value).double()).double().mean() == pytest.approx(
            expected.item(), abs=6e-3
        )


def test_probabilities_of_counts_sum_to_1():
    reading = Reading("counts", Noise("gaussian", eye(1)), torch.ones(1).double())
    counts = torch.arange(100).double()[:, None]
    assert reading.log_density(counts, torch.tensor([[3.2]]).double()).exp().sum() == pytest.approx(
        1
    )


# motions and sensors


@pytest.mark.parametrize("name", MOTIONS)
@pytest.mark.parametrize("d", DIMENSIONS)
def test_motions_stay_bounded(name, d):
    if d == 1 and name in ("rotating", "oscillating"):
        return
    for seed in range(3):
        motion, drawn = MOTIONS[name](d, Draws(seed)), generator(seed)
        z = torch.randn(50, d, generator=drawn, dtype=torch.float64)
        for _ in range(300):
            e = torch.randn(50, d, generator=drawn, dtype=torch.float64)
            z = motion.f(z) + motion.levels[1] * e
        assert z.shape == (50, d)
        assert z.abs().max() < 12


def test_turning_keeps_the_circle_and_the_linear_map_is_its_matrix():
    z = torch.tensor([[0.6, 0.8]]).double()
    assert rotating(2, Draws(0)).f(z).norm() == pytest.approx(1)
    motion = linear(3, Draws(0))
    z = torch.randn(4, 3, generator=generator()).double()
    assert motion.matrix is not None
    assert torch.allclose(motion.f(z), z @ motion.matrix.mT)
    assert 0.8 <= torch.linalg.eigvals(motion.matrix).abs().max() <= 0.99 + 1e-9


def test_runge_kutta_solves_an_equation_with_a_known_solution():
    z = runge_kutta(lambda z: -2 * z, torch.tensor([[1.5]]).double(), 0.3 / 6, 6)
    assert z.item() == pytest.approx(1.5 * math.exp(-0.6), rel=1e-6)


@pytest.mark.parametrize("name", SENSORS)
def test_sensors_have_q_readings_that_vary_with_the_state(name):
    for d in (2, 5):
        sensor = SENSORS[name](d, Draws(d))
        x = sensor.h(torch.randn(40, d, generator=generator()).double())
        assert x.shape == (40, sensor.q)
        assert (x.std(0) > 1e-3).all()
        assert (x > 0).all() or sensor.reading != "counts"


# faults


def test_faults_are_filtered_as_by_enumeration():
    """The forward recursion against the sum over all 3^T chains of conditions."""
    T, transition = 4, torch.tensor([[0.7, 0.2, 0.1], [0.3, 0.7, 0.0], [0.4, 0.0, 0.6]]).double()
    for step in (0.0, 1.0):
        faults = Faults(transition, *(torch.tensor([v]).double() for v in (0.0, 4.0, step)))
        x = torch.tensor([2.0, 1.0, 1.0, 3.0]).double()
        log_working = torch.tensor([-1.0, -0.4, -2.0, -0.9]).double()
        background = math.log(1 / 5 if step else 1 / 4)
        total, last = 0.0, torch.zeros(3).double()
        for chain in itertools.product((WORKS, FAILED, STUCK), repeat=T):
            p, before = 1.0, WORKS
            for t, now in enumerate(chain):
                repeats = t > 0 and x[t] == x[t - 1]
                stuck = (1.0 if repeats else 0.0) if t > 0 else math.exp(log_working[t])
                works = math.exp(log_working[t]) if step or not repeats else 0.0
                failed = math.exp(background) if step or not repeats else 0.0
                p *= float(transition[before, now]) * (works, failed, stuck)[now]
                before = now
            total += p
            last[chain[-1]] += p
        state, log_total = faults.start(1), 0.0
        before = torch.tensor([torch.nan]).double()
        for t in range(T):
            prior = state @ transition
            terms, state = faults.update(prior, log_working[t].reshape(1, 1), x[t : t + 1], before)
            log_total, before = log_total + terms.item(), x[t : t + 1]
        assert log_total == pytest.approx(math.log(total), abs=1e-10)
        assert torch.allclose(state[0, 0], last / total, atol=1e-10)


# systems


def test_a_seed_determines_system_and_recordings():
    for seed in (0, 8, 13):
        first, second = (draw_system(seed).recordings(50, generator(1)) for _ in range(2))
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a.states, b.states)
            assert torch.equal(a.obs, b.obs)
    assert draw_system(0).features != draw_system(1).features


@pytest.mark.parametrize("part", range(3))
def test_every_feature_that_is_drawn_acts(part):
    """On the development seeds; recordings are finite and every state varies."""
    for seed in DEVELOPMENT_SEEDS[part:36:3]:
        system = draw_system(seed)
        recordings = system.recordings(300, generator(seed))
        states, obs = (torch.cat([getattr(r, n) for r in recordings]) for n in ("states", "obs"))
        assert states.isfinite().all()
        assert obs.isfinite().all()
        assert (states.std(0) > 0.02).all()
        has = set(system.features)
        assert ("recordings" in has) == (len(recordings) > 1)
        assert ("controls" in has) == bool(system.B.abs().sum() > 0)
        assert ("controls" in has) == (recordings[0].controls is not None)
        assert ("late" in has) == bool(system.delay > 0 and system.late.any())
        assert ("gains" in has) == (system.gain_spread > 0)
        assert ("biases" in has) == bool((system.bias_spread > 0).any())
        z = torch.randn(50, system.d, generator=generator()).double()
        assert ("regimes" in has) == (len(system.motions) == 2)
        if len(system.motions) == 2:
            assert not torch.allclose(system.motions[0].f(z), system.motions[1].f(z), atol=0.02)
        joint = any(
            not torch.equal(each.root, each.root.diag().diag())
            for each in (system.noise, system.reading.noise)
        )
        assert ("joint_noise" in has) == joint
        repeats = torch.cat([r.obs[1:] == r.obs[:-1] for r in recordings]).double().mean()
        if not system.reading.discrete:
            assert (repeats > 0.002) == bool(has & {"held", "sticking"}), seed
        if "failing" in has:
            assert system.faults is not None
            assert system.faults.transition[WORKS, FAILED] >= 0.01
        assert ("jumps" in has) == (system.jump_rate >= 0.01)


def test_all_kinds_and_features_occur():
    drawn = [draw_system(seed) for seed in DEVELOPMENT_SEEDS]
    names = {name for system in drawn for name in system.features}
    assert names == {*MOTIONS, *SENSORS, *FEATURES}
    assert {system.d for system in drawn} == set(DIMENSIONS)


# floors


@pytest.mark.parametrize("name", ["plain", "late", "biases"])
def test_the_kalman_floor_has_the_error_of_the_best_linear_estimator(name):
    """The regression of z_T on x_1 ... x_T over 4,000 recordings; a control and faults aside."""
    system, T = linear_system(**LINEAR[name]), 5
    recordings = system.simulate(4_000, T, generator())
    floor = kalman_floor(system, recordings)
    last = torch.stack([each[-1] for each in floor.estimates])
    z = torch.stack([each.states[-1] for each in recordings])
    x = torch.stack([each.obs.flatten() for each in recordings])
    solved = torch.linalg.lstsq(x, z).solution
    best, ours = (z - x @ solved).square().mean(), (z - last).square().mean()
    assert ours == pytest.approx(best.item(), rel=0.02)
    assert torch.stack([v[-1] for v in floor.variances]).mean() == pytest.approx(
        ours.item(), rel=0.04
    )


@pytest.mark.parametrize("name", LINEAR)
def test_particles_and_the_ukf_agree_with_the_kalman_floor(name):
    system = linear_system(**LINEAR[name])
    assert is_linear_gaussian(system)
    recordings = system.simulate(1, 60, generator(3))
    exact = torch.cat(kalman_floor(system, recordings).estimates)
    particles = torch.cat(particle_floor(system, recordings, particles=1000).estimates)
    ukf = torch.cat(ukf_floor(system, recordings).estimates)
    error = error_of(exact, recordings)
    assert error < 0.6
    scale = torch.cat([each.states for each in recordings]).var(0)
    for found in (particles, ukf):
        gap = (found - exact).square().mean(0) / scale
        assert gap.mean() < 0.06 * error


@pytest.mark.parametrize("seed", [seed for seed in range(60) if draw_system(seed).d <= 2][:5])
def test_the_particle_floor_is_calibrated(seed):
    """Squared errors are as large as the variances: simulation and weights have one law."""
    system = replace(draw_system(seed), length=None)
    recordings = system.simulate(4, 40, generator(seed))
    floor = particle_floor(system, recordings, particles=500)
    left = torch.cat(floor.estimates) - torch.cat([each.states for each in recordings])
    ratio = left.square().sum() / torch.cat(floor.variances).sum()
    assert 0.5 < ratio < 1.7


def test_floors_refuse_what_they_cannot_filter():
    nonlinear = linear_system(jump_rate=0.02, features=("linear", "mixed", "jumps"))
    with pytest.raises(ValueError, match="no exact filter of linear, mixed, jumps"):
        kalman_floor(nonlinear, nonlinear.simulate(1, 5, generator()))
    two = linear_system(motions=(linear(2, Draws(0)), linear(2, Draws(1))))
    assert not has_moments(two)
    with pytest.raises(ValueError, match="no filter of moments"):
        ukf_floor(two, two.simulate(1, 5, generator()))


def test_the_floor_is_the_better_of_two_filters(monkeypatch):
    system = linear_system(jump_rate=0.03, features=("linear", "mixed", "jumps"))
    recordings = system.simulate(1, 30, generator())
    found = floors.floor_of(system, recordings, particles=300)
    both = [particle_floor(system, recordings, particles=300), ukf_floor(system, recordings)]
    errors = [error_of(torch.cat(each.estimates), recordings) for each in both]
    assert error_of(torch.cat(found.estimates), recordings) == min(errors)
    assert floors.floor_of(linear_system(), recordings).kind == "kalman"


def test_error_is_the_mean_nmse_of_components():
    recordings = linear_system().simulate(1, 50, generator())
    z = recordings[0].states
    mean = z.mean(0).expand_as(z)
    assert error_of(mean, recordings) == pytest.approx(1)
    assert error_of(z, recordings) == 0
    assert error_of(z * torch.nan, recordings) == math.inf


# the command


def test_the_command_writes_cells_and_resumes(tmp_path, capsys):
    file = tmp_path / "cells.jsonl"
    words = ["--seeds", "2", "--rows", "100", "--test-rows", "100", "--particles", "200"]
    words += ["--file", str(file), "--methods"]
    assert main([*words, "mean", "floor"]) == 0
    assert [(c["method"], c["rows"]) for c in read_cells(file)] == [("floor", 0), ("mean", 100)]
    file.write_text(file.read_text() + '{"seed": 2, "rows"')  # a run that was stopped
    first = read_cells(file)
    assert len(first) == 2
    assert all("commit" in cell for cell in first)
    file.write_text("".join(json.dumps(cell) + "\n" for cell in first))
    assert main([*words, "mean", "kalman"]) == 0
    cells = read_cells(file)
    assert cells[:2] == first
    assert [c["method"] for c in cells] == ["floor", "mean", "kalman"]
    assert 0 < cells[0]["error"] < cells[1]["error"] < 1.5
    assert "100 rows" in capsys.readouterr().out
    assert main([*words, "nothing"]) == 2
    assert "there is no method 'nothing'" in capsys.readouterr().out


def test_the_summary_counts_excess_and_baselines():
    errors = {"floor": (0.1, 0.2), "kbf": (0.11, 0.3), "mean": (0.2, 0.25)}
    cells = [
        {"seed": k, "rows": 0 if name == "floor" else 300, "method": name, "error": error}
        | {"seconds": 2.0, "coverage": 0.95 if name == "kbf" else 0.5, "model": name}
        for name, pair in errors.items()
        for k, error in enumerate(pair)
    ]
    line = next(row for row in summary(cells).splitlines() if row.startswith("kbf"))
    words = line.split()
    assert words[1] == "2"
    assert float(words[2]) == 30  # the mean of 10 and 50 %
    assert float(words[4]) == 50
    assert float(words[6]) == pytest.approx((0.11 / 0.2 + 0.3 / 0.25) / 2, abs=0.01)
    assert words[7:9] == ["1", "2/2"]
    cells.append(cells[2] | {"seed": 7, "error": 0.5})  # without a floor or a baseline
    line = next(row for row in summary(cells).splitlines() if row.startswith("kbf"))
    assert line.split()[1:3] == ["3", "30"]
    cells[2]["error"] = None
    assert "inf" in summary(cells)
