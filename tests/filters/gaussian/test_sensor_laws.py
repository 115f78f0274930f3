"""Delays, faults and persistent errors of sensors, each against a truth; and counts."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch

import kbf
from kbf.filters.gating import GatedFilter, GatedState
from kbf.filters.gaussian import map_pairs, sensor_laws
from kbf.filters.gaussian.augmented import Sensor, augmented, with_past
from kbf.filters.gaussian.count_maps import expected_root, fit_count_map, log_slope, stabilised
from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.gaussian.learned_ukf import LearnedUKF
from kbf.filters.gaussian.leave_one_out import left_out
from kbf.filters.gaussian.map_sources import rare_counts, source_of
from kbf.filters.gaussian.sensor_laws import (
    Faults,
    Persistence,
    fit_faults,
    fit_gains,
    fit_mixture,
    fit_persistence,
    lagged_products,
    no_faults,
    select_delays,
    working,
)
from kbf.filters.gaussian.start import StartingFilter
from kbf.filters.gaussian.ukf import Split, UnscentedKalmanFilter
from kbf.filters.rollout import rollout
from kbf.filters.scaling import Scaling
from kbf.recording import Recording
from kbf.ssm import StateSpaceModel


def one_by_one(sensors: list[Sensor], recording: Recording):
    """Return h of the state with its past: the map of each sensor at the state that it reads."""
    d, q = recording.states.shape[1], recording.obs.shape[1]

    def read(s: torch.Tensor) -> torch.Tensor:
        found = s.new_zeros(*s.shape[:-1], q)
        for sensor in sensors:
            first = d * sensor.delay
            found[..., sensor.columns] = sensor.map(s[..., first : first + d])
        return found

    return read


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def chain(n: int, enter: float, leave: float, seed: int = 0) -> torch.Tensor:
    """Whether a sensor has failed, for n steps."""
    failed, now = [], False
    for u in torch.rand(n, generator=generator(seed)).tolist():
        now = u >= leave if now else u < enter
        failed.append(now)
    return torch.tensor(failed)


def smooth_states(n: int, d: int = 2, seed: int = 0) -> torch.Tensor:
    z, rows = torch.zeros(d).double(), []
    for e in normal(n, d, seed=seed):
        z = 0.9 * z + 0.45 * e
        rows.append(z)
    return torch.stack(rows)


def turning_state(
    q: int, failing: tuple[int, ...]
) -> tuple[StartingFilter, torch.Tensor, torch.Tensor]:
    """Return the filter of a turning state and q linear sensors; 60 states; readings.

    From the 20th step on some sensors read uniform numbers.
    """
    turn = torch.tensor([[math.cos(0.1), -math.sin(0.1)], [math.sin(0.1), math.cos(0.1)]]).double()
    angles = torch.linspace(0, math.pi, q + 1)[:-1].double()
    H = torch.stack([angles.cos(), angles.sin()], 1)
    eye, z, states = torch.eye(2).double(), torch.tensor([1.0, 0.0]).double(), []
    for e in normal(60, 2, seed=1):
        z = turn @ z + 0.01 * e
        states.append(z)
    z = torch.stack(states)
    x = z @ H.mT + 0.05 * normal(60, q, seed=2)
    for j in failing:
        x[20:, j] = 2.6 * torch.rand(40, generator=generator(j), dtype=torch.float64) - 1.3
    around = torch.arange(1000).double() * 0.1
    recorded = torch.stack([around.cos(), around.sin()], 1) + 0.1 * normal(1000, 2, seed=3)
    one = torch.ones(q).double()
    model = StateSpaceModel(
        lambda z: z @ turn.mT, lambda z: z @ H.mT, 1e-4 * eye, 0.05**2 * one.diag(), 0 * z[0], eye
    )
    faults = Faults(0.01 * one, 0.1 * one, -1.3 * one, 1.3 * one)
    return StartingFilter(UnscentedKalmanFilter(model), recorded, faults=faults), z, x


# delays


def late(n: int, delays: list[int], noise: float = 0.3, seed: int = 0) -> Recording:
    z = smooth_states(n, seed=seed)
    columns = [z[(torch.arange(n) - k).clamp_min(0), j % 2].tanh() for j, k in enumerate(delays)]
    obs = torch.stack(columns, 1) + noise * normal(n, len(delays), seed=seed + 7)
    return Recording(z, obs)


def test_delays_are_found():
    assert select_delays([late(400, [0, 3, 1])]).tolist() == [0, 3, 1]
    several = [late(60, [0, 2], seed=k) for k in range(8)]
    assert select_delays(several).tolist() == [0, 2]


@pytest.mark.parametrize("seed", range(10))
def test_sensors_without_a_delay_have_none(seed):
    assert select_delays([late(200, [0, 0, 0, 0], noise=1.0, seed=seed)]).tolist() == [0] * 4


def test_few_rows_have_no_delays():
    assert select_delays([late(40, [2, 2])]).tolist() == [0, 0]


def test_left_out_errors_are_those_of_fits_without_the_point():
    phi, x = normal(60, 4), normal(60, 2, seed=1)
    x[3, 1] = torch.nan
    found = left_out(phi, x)
    for i, j in ((0, 0), (7, 0), (7, 1)):
        rows = x[:, j].isfinite() & (torch.arange(60) != i)
        A = phi[rows]
        ridge = 1e-3 * int(x[:, j].isfinite().sum()) * torch.eye(4)
        w = torch.linalg.solve(A.mT @ A + ridge, A.mT @ x[rows, j])
        assert found[i, j].item() == pytest.approx(float(x[i, j] - phi[i] @ w), abs=1e-9)
    assert found[3, 1].isnan()


# faults


def test_faults_are_found():
    failed = chain(3000, 0.02, 0.1)
    uniform = 10 * torch.rand(3000, generator=generator(1)).double() - 5
    r = torch.where(failed, uniform, 0.3 * normal(3000))[:, None]
    faults, found = fit_faults(fit_mixture(r, r), [1000, 2000])
    assert 0.014 < faults.enter.item() < 0.028
    assert 0.07 < faults.leave.item() < 0.14
    assert (found[:, 0] == failed).double().mean() > 0.98


@pytest.mark.parametrize("seed", range(10))
def test_gaussian_errors_are_no_faults(seed):
    r = normal(400, 2, seed=seed)
    mixture = fit_mixture(r, r)
    faults, failed = fit_faults(mixture, [400])
    assert not bool(mixture.faulty.any())
    assert not faults.any
    assert not bool(failed.any())


def test_chains_of_long_recordings_are_those_of_the_last_rows(monkeypatch):
    z = smooth_states(4000)
    failed = chain(4000, 0.02, 0.1)
    uniform = 8 * torch.rand(4000, generator=generator(4)).double() - 4
    x = torch.where(failed, uniform, z[:, 0] + 0.2 * normal(4000, seed=5))[:, None]
    found = []
    for rows in (10_000, 3000):
        monkeypatch.setattr(sensor_laws, "MAX_ROWS_OF_CHAINS", rows)
        found.append(working([Recording(z, x)], torch.tensor([0]), torch.tensor([True])))
    (whole, kept), (part, also_kept) = found
    assert part.enter.item() == pytest.approx(whole.enter.item(), rel=0.4)
    assert part.leave.item() == pytest.approx(whole.leave.item(), rel=0.4)
    for each in (kept, also_kept):
        assert (each[0].obs.isnan()[:, 0] == failed).double().mean() > 0.95


def test_spikes_of_a_cell_are_no_failures():
    """Nine of ten counts are 0: with a model of failures only these were left of each sensor."""
    z = smooth_states(1000)
    centres = torch.linspace(-2, 2, 5).double()
    rates = 0.5 * (-((z[:, :1] - centres) ** 2) / 0.3).exp()
    x = torch.poisson(rates, generator=generator(7))
    recordings, counts, delays = [Recording(z, x)], torch.ones(5).bool(), torch.zeros(5).long()
    assert bool(rare_counts(recordings, counts).all())
    source = source_of(recordings, delays, counts, faulty=True)
    assert not source.faults.any
    assert [each.columns.tolist() for each in source.pairs.sensors] == [[0, 1, 2, 3, 4]]
    many = [Recording(z, torch.poisson(20 * rates + 4, generator=generator(7)))]
    assert not bool(rare_counts(many, counts).any())
    assert not bool(rare_counts(recordings, ~counts).any())


def test_the_chain_is_filtered_by_bayes_rule():
    """Two steps by enumeration of working (1) and failed (0)."""
    one = torch.ones(1).double()
    faults = Faults(0.1 * one, 0.3 * one, -2 * one, 2 * one)
    readings, variance = [0.5, 1.4], 0.25
    works = faults.predict(one[None])
    for x in readings:
        if x == readings[1]:
            works = faults.predict(works)
        works = faults.update(works, x * one[None], 0 * one[None], variance * one[None])

    def density(x: float, condition: int) -> float:
        normal_density = math.exp(-0.5 * x**2 / variance) / math.sqrt(2 * math.pi * variance)
        return normal_density if condition else 0.25

    P = {(1, 1): 0.9, (1, 0): 0.1, (0, 0): 0.7, (0, 1): 0.3}
    total = {0: 0.0, 1: 0.0}
    for a in (0, 1):
        for b in (0, 1):
            path = pairwise((1, a, b))
            prior = math.prod(P[step] for step in path)
            total[b] += prior * density(readings[0], a) * density(readings[1], b)
    assert works.item() == pytest.approx(total[1] / (total[0] + total[1]), rel=1e-9)


def test_missing_readings_and_sensors_without_faults_keep_their_probability():
    faults = no_faults(2)._replace(enter=torch.tensor([0.1, 0.0]).double())
    works = torch.full((1, 2), 0.7).double()
    x = torch.tensor([[torch.nan, 50.0]]).double()
    assert torch.equal(faults.update(works, x, 0 * x.nan_to_num(), 1 + 0 * works), works)


@pytest.mark.parametrize("sensors", [3, 5, 8])
def test_a_wrong_belief_is_lost_and_starts_again(sensors):
    """Sensors of which most disagree with the belief would otherwise count as failed for long."""
    filter, z, x = turning_state(sensors, failing=())
    gated = GatedFilter(filter)
    state = GatedState(filter.init(1))
    for each in x[:20]:
        state = gated.step(state, each[None])
    assert (filter.estimate(state.inner) - z[19]).norm() < 0.1

    state = GatedState(state.inner._replace(mean=-state.inner.mean))
    for each in x[20:60]:
        state = gated.step(state, each[None])
    assert (filter.estimate(state.inner) - z[59]).norm() < 0.1


def test_a_right_belief_is_kept_while_most_sensors_fail():
    filter, z, x = turning_state(5, failing=(0, 1, 2))
    run = rollout(filter, x[None])
    assert not run.diagnostics["rejected"].any()
    assert (run.estimates[0] - z).norm(dim=-1).max() < 0.2


# persistent errors


def autoregression(n: int, phi: float, share: float, seed: int = 0) -> torch.Tensor:
    e, rows = normal(1, seed=seed)[0], []
    for u in normal(n, seed=seed + 1):
        e = phi * e + math.sqrt(1 - phi**2) * u
        rows.append(e)
    return math.sqrt(share) * torch.stack(rows) + math.sqrt(1 - share) * normal(n, seed=seed + 2)


def test_persistence_is_found():
    r = torch.stack([autoregression(4000, 0.95, 0.6), autoregression(4000, 0.8, 0.3, 9)], 1)
    r[::3, 0] = torch.nan
    found = fit_persistence([r])
    assert found.share.tolist() == pytest.approx([0.6, 0.3], abs=0.12)
    assert found.phi.tolist() == pytest.approx([0.95, 0.8], abs=0.11)


@pytest.mark.parametrize("seed", range(10))
def test_white_errors_do_not_persist(seed):
    assert fit_persistence([normal(300, 3, seed=seed)]).share.tolist() == [0.0] * 3


def wandering(n: int, phi: float, V: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Readings h, far from 0 and not, and their errors under gains 1 + g, with white noise."""
    h = smooth_states(n, seed=seed) * torch.tensor([0.5, 1.0]) + torch.tensor([2.0, 0.0])
    g = math.sqrt(V) * torch.stack([autoregression(n, phi, 1.0, seed + 7 * k) for k in (1, 2)], 1)
    return h, g * h + 0.2 * normal(n, 2, seed=seed + 50)


def test_gains_are_found():
    h, r = wandering(8000, 0.98, 0.04)
    r[::3, 0] = torch.nan
    found = fit_persistence([r[:5000], r[5000:]], [h[:5000], h[5000:]])
    assert found.gain.tolist() == pytest.approx([0.04, 0.04], abs=0.015)
    assert found.gain_phi.tolist() == pytest.approx([0.98, 0.98], abs=0.035)
    expected = 0.04 * h.square().mean(0) / r.square().nanmean(0)
    torch.testing.assert_close(found.gain_share, expected, rtol=0.35, atol=0.0)
    assert float(found.share[1]) == 0, "the gain explains all that persists"
    assert fit_persistence([r], None).gain.tolist() == [0, 0]


def test_nothing_is_left_of_the_autocorrelations_that_gains_explain():
    h, r = wandering(8000, 0.8, 0.04)
    rho = sensor_laws.autocorrelations([r])[0]
    assert float(rho[1, 0]) > 0.15
    assert float(fit_gains([r], [h], rho)[1][1].abs().max()) < 0.05


@pytest.mark.parametrize("seed", range(5))
def test_constant_gains_are_not_found(seed):
    """White errors, those that grow with the reading, and biases that drift."""
    h, _ = wandering(1500, 0.98, 0.04, seed=100 * seed)
    white = normal(1500, 2, seed=seed + 1)
    drift = torch.stack([autoregression(1500, 0.98, 0.8, 900 + 10 * seed + k) for k in (0, 1)], 1)
    for r in (0.3 * white, 0.2 * h * white, 0.3 * drift):
        assert fit_persistence([r], [h]).gain.tolist() == [0.0, 0.0]


def test_a_gain_of_a_constant_reading_is_an_error_that_persists():
    """g c with a constant c is e, so that both filters have the same moments."""
    z, c = smooth_states(300, 1), 3.0
    recordings = [Recording(z, torch.cat([z, z], 1))]
    maps = [lambda z: z, lambda z: torch.full_like(z, c)]
    noise = torch.tensor([[1.0]]).double()
    sensors = [Sensor(torch.tensor([j]), 0, maps[j], noise) for j in (0, 1)]
    zero = torch.zeros(2).double()
    share, phi = torch.tensor([0.0, 0.6]).double(), torch.tensor([0.0, 0.9]).double()
    runs = []
    for persistence in (
        Persistence(share, phi, zero, zero, zero, zero),
        Persistence(zero, zero, share, phi, share / c**2, zero),
        Persistence(zero, zero, share, phi, share, zero + c - 1),
    ):
        read = one_by_one(sensors, recordings[0])
        found = augmented(recordings, lambda z: 0.8 * z, noise, sensors, persistence, read)
        filter = UnscentedKalmanFilter(found.model)
        runs.append(rollout(filter, normal(1, 40, 2, seed=3), covariances=True))
        assert found.model.R.diagonal().tolist() == pytest.approx([1.0, 0.4])
    for run, factor in zip(runs[1:], (c, 1.0), strict=True):
        torch.testing.assert_close(runs[0].estimates[..., 0], run.estimates[..., 0])
        torch.testing.assert_close(factor * run.estimates[..., 1], runs[0].estimates[..., 1])


def test_gains_act_on_readings_in_the_units_of_the_data():
    """Of scaled recordings, and of recordings in the units of the data, the law is the same."""
    h, r = wandering(3000, 0.98, 0.04)
    raw = Recording(smooth_states(3000, 2), h + r)
    scaling, net = Scaling().prepare([raw]), LearnedUKF()
    scaling.give_zero_reading(net)
    assert net.zero_reading is not None
    identity = torch.eye(2).double()
    laws = []
    for recording, map, zero in (
        (raw, lambda z: h[: len(z)], None),
        (scaling(raw), lambda z: scaling.scaled("x", h[: len(z)]), net.zero_reading),
    ):
        sensors = [Sensor(torch.arange(2), 0, map, identity)]
        laws.append(map_pairs.persistence_of([recording], sensors, zero))
    for before, after in zip(laws[0][:-1], laws[1][:-1], strict=True):
        torch.testing.assert_close(before, after)
    assert float(laws[0].gain[0]) > 0.02
    torch.testing.assert_close(scaling.x_mean + scaling.x_scale * laws[1].zero, 0 * h[0])


def test_a_fitted_model_knows_the_zero_reading():
    z = smooth_states(120, 1)
    x = z + 7 + 0.3 * normal(120, 1, seed=9)
    columns = {"states": z.numpy(), "observations": x.numpy()}
    fitted = kbf.fit(**columns, model="ukf_learned", calibrate=False, progress=False)
    net: Any = fitted.trained.module.net
    torch.testing.assert_close(net.zero_reading, -x.mean(0) / x.std(0), rtol=0.01, atol=0.0)


def test_the_filter_follows_gains():
    """Of the true model it is better than that of the same model with constant gains."""
    z, n = smooth_states(1500, 2), 4
    g = torch.stack([autoregression(1500, 0.98, 1.0, 5 + 10 * k) for k in range(n)], 1)
    M = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 2.0], [2.0, -2.0]]).double()
    x = (1 + 0.3 * g) * (1 + z @ M.mT) + 0.1 * normal(1500, n, seed=90)
    h2 = (1 + z @ M.mT).square().mean(0)
    total, zero = 0.01 + 0.09 * h2, torch.zeros(n).double()
    columns = torch.arange(n)
    errors = []
    for share in (zero, 0.09 * h2 / total):
        noise = (0.01 + 0.09 * h2).diag()
        sensors = [Sensor(columns, 0, lambda z: 1 + z @ M.mT, noise)]
        gain, phi = 0.09 * (share > 0).double(), zero + 0.98
        law = Persistence(zero, zero, share, phi, gain, zero)
        Q = 0.45**2 * torch.eye(2).double()
        read = one_by_one(sensors, Recording(z, x))
        found = augmented([Recording(z, x)], lambda z: 0.9 * z, Q, sensors, law, read)
        run = rollout(UnscentedKalmanFilter(found.model), x[None])
        errors.append((run.estimates[0, :, :2] - z).square().mean().item())
    assert errors[1] < 0.7 * errors[0]


def test_the_filter_of_late_and_wandering_sensors_is_the_kalman_filter():
    """One sensor of z, one of z two steps before with an error e_t = 0.9 e_{t-1} + innovation."""
    A = torch.tensor([[0.8]]).double()
    Q, noise = torch.tensor([[0.5]]).double(), torch.tensor([0.2, 0.6]).double()
    z = smooth_states(300, 1)
    recordings = [Recording(z, torch.cat([z, z], 1))]
    none = torch.zeros(2).double()
    persistence = Persistence(
        torch.tensor([0.0, 0.75]).double(),
        torch.tensor([0.0, 0.9]).double(),
        none,
        none,
        none,
        none,
    )
    sensors = [
        Sensor(torch.tensor([j]), 2 * j, lambda z: z, noise[j].reshape(1, 1)) for j in (0, 1)
    ]
    read = one_by_one(sensors, recordings[0])
    found = augmented(recordings, lambda z: z @ A.mT, Q, sensors, persistence, read)
    F = torch.zeros(4, 4).double()
    F[0, 0], F[1, 0], F[2, 1], F[3, 3] = 0.8, 1.0, 1.0, 0.9
    q = torch.zeros(4, 4).double()
    q[0, 0], q[3, 3] = 0.5, (1 - 0.81) * 0.75 * 0.6
    H = torch.tensor([[1.0, 0, 0, 0], [0, 0, 1, 1]]).double()
    R = torch.tensor([0.2, 0.25 * 0.6]).double().diag()
    none = torch.zeros(4).double()
    truth = KalmanFilter(
        LinearModel(F, none, q, H, none[:2], R, found.model.m0, found.model.P0, None)
    )
    x = normal(1, 40, 2, seed=3)
    run = rollout(UnscentedKalmanFilter(found.model), x, covariances=True)
    exact = rollout(truth, x, covariances=True)
    assert torch.allclose(run.estimates, exact.estimates, atol=1e-8)
    assert run.covariances is not None
    assert exact.covariances is not None
    assert torch.allclose(run.covariances, exact.covariances, atol=1e-8)
    assert found.states.shape == (300, 4)
    assert found.states[:, 3].var().item() == pytest.approx(0.45, rel=0.3)
    assert torch.equal(found.states[:, :3], with_past(z, 2))


# counts


def test_the_expected_root_of_a_count_is_the_sum_over_counts():
    for log_rate in (-9.0, -1.234, 0.5, 3.3, 3.999, 4.5, 6.0):
        rate = math.exp(log_rate)
        p, total = math.exp(-rate), 0.0
        for x in range(3000):
            total += p * 2 * math.sqrt(x + 0.375)
            p *= rate / (x + 1)
        found = expected_root(torch.tensor(log_rate, dtype=torch.float64)).item()
        assert found == pytest.approx(total, rel=2e-3)


def test_log_rates_are_recovered_and_their_roots_have_unit_noise():
    z = normal(3000, 2)
    B, b = torch.tensor([[0.6, -0.4], [0.0, 0.8]]).double(), torch.tensor([1.5, 2.0]).double()
    x = torch.poisson((z @ B.mT + b).exp(), generator=generator(2))
    map = fit_count_map(z, stabilised(x, torch.tensor([True, True])))
    assert torch.allclose(map.B, B, atol=0.03)
    assert torch.allclose(map.b, b, atol=0.04)
    assert map.noise.diagonal().tolist() == pytest.approx([1, 1], abs=0.12)


def test_the_density_of_a_count_is_that_of_its_root_times_the_slope():
    x = torch.tensor([[3.0, 1.5]]).double().requires_grad_()
    counts = torch.tensor([True, False])
    t = stabilised(x, counts)
    (slope,) = torch.autograd.grad(t[0, 0], x)
    assert log_slope(x.detach(), counts).item() == pytest.approx(math.log(float(slope[0, 0])))
    assert t[0, 1].item() == 1.5


# all of them, learned


def error(model: LearnedUKF, train: Recording, test: Recording) -> float:
    model.prepare([train])
    run = rollout(model.fit([train]), test.obs[None])
    return (run.estimates[0] - test.states).square().mean().item()


def test_the_learned_filter_uses_delays():
    train, test = late(400, [2, 2], noise=0.1), late(1000, [2, 2], noise=0.1, seed=5)
    model, blind = LearnedUKF(kinds=("linear",)), LearnedUKF(kinds=("linear",))
    found = error(model, train, test)
    assert model.delays.tolist() == [2, 2]
    blind.prepare([train])
    blind.delays.zero_()
    run = rollout(blind.fit([train]), test.obs[None])
    assert found < 0.8 * (run.estimates[0] - test.states).square().mean().item()


def failing(n: int, seed: int = 0) -> Recording:
    z = smooth_states(n, seed=seed)
    obs = torch.cat([z, z], 1) + 0.2 * normal(n, 4, seed=seed + 3)
    low, high = -3.0, 3.0
    for j in range(4):
        u = low + (high - low) * torch.rand(n, generator=generator(seed + j)).double()
        obs[:, j] = torch.where(chain(n, 0.03, 0.1, seed=seed + 20 + j), u, obs[:, j])
    return Recording(z, obs)


def test_the_learned_filter_leaves_out_failed_readings():
    train, test = failing(500), failing(1000, seed=40)
    model = LearnedUKF(kinds=("linear",))
    found = error(model, train, test)
    assert bool(model.faulty)
    filter = model.fit([train])
    assert isinstance(filter, StartingFilter)
    assert bool((filter.faults.enter > 0).all())
    assert not filter.allow_missing_sensors
    blind = LearnedUKF(kinds=("linear",))
    blind.prepare([train])
    blind.faulty.fill_(False)
    run = rollout(blind.fit([train]), test.obs[None])
    assert found < 0.6 * (run.estimates[0] - test.states).square().mean().item()


def test_a_plain_system_has_neither_delays_nor_faults_nor_counts():
    z = smooth_states(300)
    train = Recording(z, z + 0.3 * normal(300, 2, seed=8))
    model = LearnedUKF(kinds=("linear",))
    model.prepare([train])
    assert model.delays.tolist() == [0, 0]
    assert not bool(model.faulty)
    assert model.counts.tolist() == [False, False]
    filter: Any = model.fit([train])
    assert filter.model.m0.shape == (2,)


def test_inner_maps_are_not_computed_at_points_of_other_components():
    """The filter of `Split` maps has the moments of the filter that computes all points."""
    seed = torch.Generator().manual_seed(0)
    m0, root = (torch.randn(*size, generator=seed, dtype=torch.float64) for size in ((5,), (5, 5)))
    calls = []

    def move(z, u):
        calls.append(z.shape[1])
        return torch.stack([z[..., 0] * z[..., 1], z[..., 2].sin(), z[..., 0]], -1) + u

    def with_rest(y, w):
        return torch.cat([y, 0.9 * w], -1)

    def read(y, w):
        return y * torch.cat([1 + w, 1 + w[..., :1]], -1)

    f, h = Split(move, with_rest, 2), Split(torch.square, read, 2)
    P = root @ root.mT
    x, u = (torch.randn(4, 3, generator=seed, dtype=torch.float64) for _ in range(2))
    found = []
    for maps in ((lambda s, u: f(s, u), lambda s: h(s)), (f, h)):
        model = StateSpaceModel(*maps, 0.1 * P, torch.eye(3, dtype=torch.float64), m0, P)
        filter = UnscentedKalmanFilter(model, controlled=3, kappa=0.5)
        state = filter.predict(filter.update(filter.init(4), x), control=u)
        found.append((state.mean, state.cov, filter.log_likelihood(state, x)))
    assert calls[0] == 11 and calls[-1] == 7
    for whole, few in zip(*found, strict=True):
        torch.testing.assert_close(few, whole, rtol=1e-10, atol=1e-10)


def test_lagged_products_are_those_within_recordings():
    r = [torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[5.0]])]
    h = [torch.tensor([[2.0], [math.nan], [4.0]]), torch.tensor([[6.0]])]
    products = [tuple(each.tolist() for each in lagged_products(r, h, 0, k)) for k in (1, 2, 3)]
    assert products == [([], []), ([3.0], [8.0]), ([], [])]
