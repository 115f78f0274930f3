"""Regimes: chains by enumeration, fits against known systems, the filter against Bayes by hand."""

import math
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kbf.filters.gaussian.block_scores import COARSE_FACTORS, with_factors
from kbf.filters.gaussian.hidden_chain import products, smoothed_chain
from kbf.filters.gaussian.learned_maps import LearnedMap
from kbf.filters.gaussian.learned_ukf import LearnedUKF
from kbf.filters.gaussian.leave_one_out import weighted_errors
from kbf.filters.gaussian.map_sources import jump_covariance, source_of
from kbf.filters.gaussian.moments import GaussianState, kalman_predict, kalman_update
from kbf.filters.gaussian.regimes import (
    STRUCTURES,
    Moves,
    expectation_maximisation,
    fit_chain,
    fit_regimes,
    select_regimes,
)
from kbf.filters.gaussian.start import StartingFilter
from kbf.filters.gaussian.switching import SwitchingFilter
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.protocols import FilterStep
from kbf.filters.rollout import rollout
from kbf.filters.smoothing import smooth
from kbf.recording import Recording
from kbf.runtime.errors import FitError
from kbf.ssm import StateSpaceModel

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=F64)


# chains


def test_smoothed_probabilities_are_those_of_all_paths():
    """Two recordings of four and three steps with three conditions; enumeration."""
    lengths, k = [4, 3], 3
    logs = 3 * normal(1, 7, k)
    P, start = normal(1, k, k, seed=1).softmax(-1), normal(1, k, seed=2).softmax(-1)
    found = smoothed_chain(logs, P, start, lengths)
    marginals, transitions, log_total = torch.zeros(7, k).double(), torch.zeros(k, k).double(), 0.0
    first = 0
    for length in lengths:
        weights: dict[tuple[int, ...], float] = {}
        for path in product(range(k), repeat=length):
            weight = float(start[0, path[0]])
            weight *= math.prod(float(P[0, i, j]) for i, j in pairwise(path))
            weight *= math.exp(sum(float(logs[0, first + t, i]) for t, i in enumerate(path)))
            weights[path] = weight
        total = sum(weights.values())
        log_total += math.log(total)
        for path, weight in weights.items():
            for t, i in enumerate(path):
                marginals[first + t, i] += weight / total
            for i, j in pairwise(path):
                transitions[i, j] += weight / total
        first += length
    torch.testing.assert_close(found.marginals[0], marginals)
    torch.testing.assert_close(found.transitions[0], transitions)
    assert float(found.log_predictive.sum()) == pytest.approx(log_total, rel=1e-12)


def test_the_last_probabilities_do_not_depend_on_the_future():
    """log p(x_t | past) of a longer recording are those of a shorter one."""
    logs, P = normal(2, 9, 2), normal(2, 2, 2, seed=1).softmax(-1)
    start = normal(2, 2, seed=2).softmax(-1)
    long, short = (smoothed_chain(logs[:, :n], P, start, [n]) for n in (9, 6))
    torch.testing.assert_close(long.log_predictive[:, :6], short.log_predictive)


@pytest.mark.parametrize("n", [1, 2, 11])
def test_products_of_matrices_are_those_of_the_loop(n):
    M, total = normal(3, n, 2, 2).exp(), torch.eye(2).double().expand(3, 2, 2)
    for t, each in enumerate(products(M).unbind(1)):
        total = total @ M[:, t]
        torch.testing.assert_close(each, total / total.amax((1, 2), keepdim=True))


def test_impossible_observations_stay_finite():
    logs = torch.tensor([[[0.0, -1e5], [-1e5, 0.0], [-1e6, 0.0]]], dtype=F64).repeat(1, 500, 1)
    P = torch.tensor([[[0.999, 0.001], [0.001, 0.999]]], dtype=F64)
    found = smoothed_chain(logs, P, torch.full((1, 2), 0.5, dtype=F64), [1500])
    assert bool(found.marginals.isfinite().all())
    assert (found.marginals[0].argmax(-1) == logs[0].argmax(-1)).all()


# fits


def test_left_out_errors_are_those_of_fits_without_a_point():
    phi, y, w = normal(12, 3), normal(12, 2, seed=1), torch.rand(1, 1, 12, generator=generator())
    w = w.double()
    found = weighted_errors(phi, y, w)[0, 0]
    ridge = 1e-3 * float(w.sum())
    for i in range(12):
        keep = torch.arange(12) != i
        A = (w[0, 0, keep, None] * phi[keep]).mT
        B = torch.linalg.solve(A @ phi[keep] + ridge * torch.eye(3).double(), A @ y[keep])
        torch.testing.assert_close(found[i], y[i] - phi[i] @ B)


def turning_or_not(n: int, seed: int = 0, stay: float = 0.98) -> tuple[Moves, Tensor]:
    """Return moves of a state that turns left or right, and the regime of each."""
    angle = torch.tensor(0.3, dtype=F64)
    turn = torch.stack([torch.cos(angle), -torch.sin(angle), torch.sin(angle), torch.cos(angle)])
    left = turn.reshape(2, 2)
    uniform = torch.rand(n, generator=generator(seed))
    regime, regimes, z = 0, [], torch.tensor([1.0, 0.0], dtype=F64)
    states, e = [z], normal(n, 2, seed=seed + 1)
    for t in range(n):
        regime = regime if uniform[t] < stay else 1 - regime
        z = 0.98 * (left if regime else left.mT) @ z + 0.1 * e[t]
        regimes.append(regime)
        states.append(z)
    path = torch.stack(states)
    return Moves(path[:-1], path[1:] - path[:-1], [n]), torch.tensor(regimes)


def test_two_regimes_are_found():
    moves, regime = turning_or_not(600)
    assert select_regimes(moves) == (0, 1)
    found = fit_regimes(moves, (0, 1))
    guess = found.marginals.argmax(-1)
    right = (guess == regime).double().mean()
    assert max(float(right), 1 - float(right)) > 0.95
    assert bool((found.P.diagonal() > 0.93).all())
    assert found.Q.diagonal(dim1=-2, dim2=-1).mean() == pytest.approx(0.01, rel=0.3)


def test_each_iteration_makes_the_moves_more_likely():
    moves, _ = turning_or_not(300)
    phi = torch.cat([torch.ones(300, 1, dtype=F64), moves.inputs], 1)
    weights = torch.rand(1, 300, 1, generator=generator(3)).double()
    weights = torch.cat([weights, 1 - weights], -1)
    maps, all_moves = torch.tensor([0, 1]), torch.ones(1, 300).bool()
    totals = [
        float(
            expectation_maximisation(
                phi, moves.change, moves, maps, all_moves, weights, count
            ).log_predictive.sum()
        )
        for count in range(5)
    ]
    assert all(more > less for less, more in pairwise(totals)), totals


def test_jumps_are_found_from_a_dozen():
    e, z = normal(400, 2), torch.zeros(401, 2, dtype=F64)
    jumps = torch.rand(400, generator=generator(5)) < 0.03
    for t in range(400):
        z[t + 1] = 0.9 * z[t] + (3.0 if jumps[t] else 0.2) * e[t]
    moves = Moves(z[:-1], z[1:] - z[:-1], [400])
    assert int(jumps.sum()) < 20
    assert select_regimes(moves) == (0, 0)
    found = fit_regimes(moves, (0, 0))
    assert found.Q[0].diagonal().mean() == pytest.approx(0.04, rel=0.25)
    assert found.Q[1].diagonal().mean() > 1.0


@pytest.mark.parametrize("seed", range(5))
def test_one_law_stays_one(seed):
    moves, _ = turning_or_not(400, seed, stay=1.0)
    assert select_regimes(moves) == STRUCTURES[0]


def test_few_moves_have_one_regime():
    moves, _ = turning_or_not(60)
    assert select_regimes(moves) == STRUCTURES[0]


def test_held_out_moves_do_not_change_the_fit():
    moves, _ = turning_or_not(200)
    visible = torch.arange(200)[None] < 150
    other = moves._replace(change=torch.where(visible.mT, moves.change, 7.0))
    one, two = (fit_chain(each, (0, 1), visible) for each in (moves, other))
    torch.testing.assert_close(one.Q, two.Q)
    torch.testing.assert_close(one.P, two.P)


def test_the_newest_moves_keep_the_ends_of_recordings():
    moves = Moves(normal(10, 1), normal(10, 1), [4, 3, 3])
    newest = moves.newest(5)
    assert newest.lengths == [2, 3]
    assert torch.equal(newest.inputs, moves.inputs[5:])


# the filter


def scalar(a: float, q: float = 0.2) -> StateSpaceModel:
    one = torch.ones(1, 1, dtype=F64)
    return StateSpaceModel(
        lambda z: a * z, lambda z: z, q * one, 0.3 * one, torch.zeros(1, dtype=F64), 0.7 * one
    )


def switching(models: list[StateSpaceModel], P: Tensor, states: Tensor) -> SwitchingFilter:
    filters = [StartingFilter(UnscentedKalmanFilter(each), states) for each in models]
    return SwitchingFilter(filters, P, torch.full((len(models),), 1 / len(models), dtype=F64))


STAY = torch.tensor([[0.9, 0.1], [0.2, 0.8]], dtype=F64)


def test_two_steps_are_bayes_rule_over_the_regimes():
    """Four paths of regimes by hand: probabilities are exact while nothing was mixed before."""
    filter = switching([scalar(0.9), scalar(-0.9)], STAY, normal(50, 1))
    state = filter.init(1)._replace(waiting=torch.zeros(1, dtype=F64))
    start = GaussianState(state.mean[:, 0], state.cov[:, 0])
    x = torch.tensor([[0.8]], dtype=F64)
    state, _ = filter.observe(filter.predict(state), x)
    weights, means, variances = [], [], []
    for k, a in enumerate((0.9, -0.9)):
        prior = float(sum(0.5 * STAY[i, k] for i in range(2)))
        m, v = a * start.mean[0, 0], a**2 * start.cov[0, 0, 0] + 0.2
        density = torch.exp(-0.5 * (x[0, 0] - m) ** 2 / (v + 0.3)) / (v + 0.3).sqrt()
        weights.append(prior * density)
        gain = v / (v + 0.3)
        means.append(m + gain * (x[0, 0] - m))
        variances.append((1 - gain) * v)
    w = torch.stack(weights) / torch.stack(weights).sum()
    m, v = torch.stack(means), torch.stack(variances)
    torch.testing.assert_close(state.probabilities[0], w)
    torch.testing.assert_close(filter.estimate(state)[0, 0], (w * m).sum())
    expected = (w * (v + m.square())).sum() - (w * m).sum().square()
    torch.testing.assert_close(filter.covariance(state)[0, 0, 0], expected)


def test_equal_regimes_are_the_filter_of_one():
    states, obs = normal(50, 1), normal(1, 30, 1, seed=3)
    one = StartingFilter(UnscentedKalmanFilter(scalar(0.9)), states)
    two = switching([scalar(0.9), scalar(0.9)], STAY, states)
    runs = [rollout(each, obs, covariances=True) for each in (one, two)]
    torch.testing.assert_close(runs[0].estimates, runs[1].estimates)
    torch.testing.assert_close(runs[0].covariances, runs[1].covariances)


def test_regimes_share_one_update_with_factors_of_each_recording():
    """Recordings of a batch with factors of their own are filtered as by themselves."""
    states, obs = normal(50, 1), normal(3, 20, 1, seed=3)
    filter = switching([scalar(0.9), scalar(-0.9)], STAY, states)
    factors = torch.tensor([[1.0, 1.0], [4.0, 1.0], [1.0, 16.0]], dtype=F64)
    together = rollout(with_factors(filter, factors), obs, covariances=True)
    for k, pair in enumerate(factors):
        alone = rollout(with_factors(filter, pair), obs[k : k + 1], covariances=True)
        torch.testing.assert_close(together.estimates[k], alone.estimates[0])
        torch.testing.assert_close(together.covariances[k], alone.covariances[0])
    step = with_factors(filter, factors)
    state = step.predict(step.init(3)._replace(waiting=torch.zeros(3, dtype=F64)))
    mean, cov = state.mean, state.cov
    R = 0.3 * factors[:, 1, None]
    density = torch.distributions.Normal(mean[..., 0], (cov[..., 0, 0] + R).sqrt())
    logs = state.probabilities.log() + density.log_prob(obs[:, 0])
    found = step.log_likelihood(state, obs[:, 0])
    torch.testing.assert_close(found, logs.logsumexp(-1))


def test_kinds_are_compared_with_the_noise_as_fitted_and_with_more():
    filter = StartingFilter(UnscentedKalmanFilter(scalar(0.9)), normal(50, 1))
    factors = torch.tensor(COARSE_FACTORS, dtype=F64)
    (Q, R), fitted = with_factors(filter, factors).inner.model[2:4], filter.inner.model
    assert torch.equal(Q[0], fitted.Q) and torch.equal(R[0], fitted.R)
    assert (Q[1:] > fitted.Q).all()


def test_the_error_is_near_that_of_all_paths():
    """The exact filter of a short recording enumerates the paths of regimes."""
    P = torch.tensor([[0.95, 0.05], [0.05, 0.95]], dtype=F64)
    draws, steps = 200, 8
    z, regime = normal(draws), (torch.rand(draws, generator=generator(1)) < 0.5).long()
    states, obs = [], []
    for t in range(steps):
        moved = torch.rand(draws, generator=generator(10 + t)) < 0.05
        regime = torch.where(moved, 1 - regime, regime)
        z = torch.where(regime == 0, 0.95, -0.95) * z + 0.3 * normal(draws, seed=30 + t)
        states.append(z)
        obs.append(z + 0.55 * normal(draws, seed=60 + t))
    x, truth = torch.stack(obs, 1)[..., None], torch.stack(states, 1)
    models = [scalar(a, 0.09) for a in (0.95, -0.95)]
    filter = switching(models, P, normal(3000, 1, seed=7))
    state = filter.init(draws)._replace(waiting=torch.zeros(draws, dtype=F64))
    for t in range(steps):
        state, _ = filter.observe(filter.predict(state), x[:, t])
    best, total = torch.zeros(draws, dtype=F64), torch.zeros(draws, dtype=F64)
    one = torch.ones(1, 1, dtype=F64)
    for path in product((0, 1), repeat=steps):
        prior = 0.5 * math.prod(float(P[i, j]) for i, j in pairwise(path))
        moments = GaussianState(torch.zeros(draws, 1, dtype=F64), one.expand(draws, 1, 1))
        log = torch.zeros(draws, dtype=F64)
        for t, k in enumerate(path):
            moments = kalman_predict(*moments, (0.95, -0.95)[k] * one, 0.09 * one)
            variance = moments.cov[:, 0, 0] + 0.3
            left = x[:, t, 0] - moments.mean[:, 0]
            log = log - 0.5 * (left.square() / variance + variance.log())
            moments = kalman_update(*moments, x[:, t], one, 0.3 * one)
        best += prior * log.exp() * moments.mean[:, 0]
        total += prior * log.exp()
    exact = (best / total - truth[:, -1]).square().mean()
    error = (filter.estimate(state)[:, 0] - truth[:, -1]).square().mean()
    assert float(error) < 1.05 * float(exact)


def test_the_smoother_of_equal_regimes_is_that_of_one():
    states, obs = normal(50, 1), normal(1, 30, 1, seed=3)
    one = StartingFilter(UnscentedKalmanFilter(scalar(0.9)), states)
    two = switching([scalar(0.9), scalar(0.9)], STAY, states)
    runs = [smooth(each, obs) for each in (one, two)]
    torch.testing.assert_close(runs[0].estimates, runs[1].estimates)
    torch.testing.assert_close(runs[0].covariances, runs[1].covariances)


def test_the_smoothed_probabilities_are_those_of_the_chain():
    """Regimes that differ in the noise alone, states seen without error: a hidden Markov chain."""
    exact = {"R": 1e-10 * torch.ones(1, 1, dtype=F64)}
    models = [scalar(0.0, q)._replace(**exact) for q in (0.1, 4.0)]
    filter = switching(models, STAY, normal(50, 1))
    x, state = normal(12, 1, seed=2), filter.init(1)
    state = state._replace(waiting=torch.zeros(1, dtype=F64))
    steps, logs = [], []
    for each in x:
        predicted = filter.predict(state)
        state, _ = filter.observe(predicted, each[None])
        steps.append(FilterStep(state, predicted, lambda one: one))
        logs.append([-0.5 * (float(each) ** 2 / q + math.log(q)) for q in (0.1, 4.0)])
    start = torch.full((1, 2), 0.5, dtype=F64) @ STAY
    chain = smoothed_chain(torch.tensor([logs], dtype=F64), STAY[None], start, [12])
    torch.testing.assert_close(state.probabilities[0], chain.marginals[0, -1], rtol=1e-6, atol=0)
    back, following = filter.smoother(), state
    for t in range(10, -1, -1):
        following = back(steps[t], following)
        torch.testing.assert_close(
            following.probabilities[0], chain.marginals[0, t], rtol=1e-6, atol=1e-9
        )


def seen(moves: Moves, seed: int) -> Recording:
    states = moves.inputs
    return Recording(states, states + 0.5 * normal(len(states), 2, seed=seed))


def test_the_learned_filter_of_two_regimes_beats_that_of_one():
    train = seen(turning_or_not(800)[0], 3)
    test = seen(turning_or_not(1000, seed=20)[0], 5)
    errors = []
    for switches in (False, True):
        model = LearnedUKF(kinds=("linear",), factors=(1.0,), switches=switches)
        model.prepare([train])
        run = rollout(model.fit([train]), test.obs[None], covariances=True)
        errors.append(float((run.estimates[0] - test.states).square().mean()))
        assert tuple(model.regimes.tolist()) == ((0, 1) if switches else (0,))
    assert errors[1] < 0.7 * errors[0]
    again = LearnedUKF(kinds=("linear",), factors=(1.0,))
    again.load_state_dict(model.state_dict())
    both = rollout(again.fit([train]), test.obs[None])
    torch.testing.assert_close(both.estimates, run.estimates)


def test_too_few_moves_of_a_regime_leave_one():
    moves, _ = turning_or_not(60)
    model = LearnedUKF(kinds=("linear",))
    model.regimes = torch.tensor((0, 1, 2))
    filter = model.fit([seen(moves, 1)])
    assert isinstance(filter, StartingFilter)


def test_regimes_that_no_model_has_are_refused():
    state = LearnedUKF().state_dict()
    state["regimes"] = torch.tensor([0, 7])
    with pytest.raises(ValueError, match="stored with regimes"):
        LearnedUKF().load_state_dict(state)


def test_a_regime_of_one_recording_needs_enough_steps():
    with pytest.raises(FitError):
        LearnedUKF().fit([Recording(normal(3, 2), normal(3, 1))])


def test_the_covariance_of_few_jumps_is_drawn_to_the_noise_of_the_map():
    """(sum_t w_t e_t e_t^T + diag(noise)) / (sum_t w_t + 1); the noise itself without jumps."""
    none, noise = torch.zeros(1, dtype=torch.long), 0.3 * torch.eye(2, dtype=F64) + 0.1
    source = source_of(
        [Recording(normal(41, 2), normal(41, 1, seed=1))], none, none > 0, faulty=False
    )
    w = torch.rand(40, generator=generator(2), dtype=F64)
    regimes: Any = SimpleNamespace(marginals=torch.stack([w, torch.zeros_like(w)], 1))
    source = source._replace(regimes=regimes)
    still = LearnedMap(None, torch.zeros(2, dtype=F64), None, None, noise)
    e, prior = source.moves.change, noise.diagonal().diag()
    expected = (torch.einsum("t,ti,tj->ij", w, e, e) + prior) / (w.sum() + 1)
    torch.testing.assert_close(jump_covariance(source, still, 0), expected)
    torch.testing.assert_close(jump_covariance(source, still, 1), prior)
