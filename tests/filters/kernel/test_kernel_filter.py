"""The Kernel Bayes Filter against the published algorithm in NumPy, regressions, the Kalman filter
and its own pieces.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import reference
import torch
from torch import Tensor, nn

from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.kernel.filter import KernelBayesFilter, KernelState
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.operators import (
    Operator,
    RatioOfWeights,
    density_transition,
    ratio_operator,
    ratio_operator_primal,
    transition_operator,
    transition_operator_primal,
)
from kbf.filters.kernel.simulated_kbf import quantise
from kbf.filters.kernel.update import rule
from kbf.filters.kernel.update.rule import MIN_BATCH_FOR_MOMENTS, DenseUpdate, PrimalUpdate
from kbf.filters.protocols import Filter
from kbf.filters.rollout import rollout
from kbf.recording import Recording, Transitions, transitions
from kbf.rkhs import ratios, rules
from kbf.rkhs.features import NystromFeatures
from kbf.rkhs.kernels import gaussian
from kbf.rkhs.weights import effective_sample_size, negative_mass, normalised
from kbf.ssm import StateSpaceModel, gaussian_log_density, gaussian_noise, oscillatory, simulate

F64 = torch.float64
WIDTHS, REGS = (
    (0.7, 0.5, 0.8),
    (1e-3, 5e-4, 2e-4),
)  # ratio, transition, observation; eta, lambda', lambda


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=F64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def recording(n: int, seed: int = 0, batch: int = 1) -> Recording:
    """Oscillatory data ``b n 2``."""
    model = oscillatory()
    return simulate(model, model.m0.expand(batch, 2), n, generator(seed))


def first(sequence: Recording, start: int = 0, stop: int | None = None) -> Recording:
    """Steps of the first sequence of a batch."""
    return Recording(sequence.states[0, start:stop], sequence.obs[0, start:stop])


def published(**changes) -> KBF:
    """The paper's filter: weights as they come, the numbers put in by hand."""
    model = KBF(**{"rank": None, "normalise": False, **changes})
    model.set(tensor(WIDTHS), tensor(REGS))
    return model


# the published algorithm


@pytest.mark.parametrize(
    "changes, tol", [({}, 1e-8), ({"rank": 60, "tol": 0.0}, 5e-6)], ids=["dense", "full-rank"]
)
def test_filter_is_the_published_algorithm(changes, tol):
    """At full rank up to the features' jitter of 1e-10."""
    memory, test = recording(60), recording(40, seed=1)
    run = rollout(published(**changes).fit(first(memory)), test.obs)
    expected = reference.published_filter(
        memory.states[0].numpy(), memory.obs[0].numpy(), test.obs[0].numpy(), *WIDTHS, *REGS
    )
    np.testing.assert_allclose(run.estimates[0].detach().numpy(), expected, rtol=0, atol=tol)
    assert 0.1 < run.diagnostics["zero_weight_share"].mean() < 0.9, (
        "the case must meet the clipping"
    )


def test_published_scaling():
    """With the authors' ratio, of mean 1/n, and their ridge reg2, not times n, the numbers are the
    same.
    """
    memory, test, n = first(recording(30)), first(recording(15, seed=1)), 30
    z, x = memory.states.numpy(), memory.obs.numpy()
    G_ratio, G_move, G_X = (
        reference.gaussian_gram(u, u, s) for u, s in zip((z, z, x), WIDTHS, strict=True)
    )
    eta, reg_transition, reg2 = REGS
    w, estimates = np.full(n, 1 / n), []
    for seen in test.obs.numpy():
        w = np.append(
            0,
            np.linalg.solve(
                G_move[:-1, :-1] + (n - 1) * reg_transition * np.eye(n - 1), G_move[:-1] @ w
            ),
        )
        gamma = np.maximum(0, np.linalg.solve(G_ratio + n * eta * np.eye(n), G_ratio @ w))
        w = reference.importance_weighted_rule(
            gamma, G_X, reference.gaussian_gram(x, seen[None], WIDTHS[2])[:, 0], reg2 / n
        )
        estimates.append(w @ z)
    found = rollout(published().fit(memory), test.obs[None]).estimates[0].detach()
    np.testing.assert_allclose(found.numpy(), np.stack(estimates), rtol=0, atol=1e-9)


@pytest.mark.parametrize("rank, tol", [(None, 2e-6), (30, 5e-4)])
def test_original_filter_in_the_scaling_of_fukumizu(rank, tol):
    """Equation 19 with mu = gamma / n: its delta is ours over n^2. Ratios keep their sign.

    It magnifies the features' jitter.
    """
    memory, test, n = first(recording(30)), first(recording(15, seed=1)), 30
    z, x = memory.states.numpy(), memory.obs.numpy()
    G_ratio, G_move, G_X = (
        reference.gaussian_gram(u, u, s) for u, s in zip((z, z, x), WIDTHS, strict=True)
    )
    eta, reg_transition, delta = REGS
    w, estimates, negative = np.full(n, 1 / n), [], 0
    for seen in test.obs.numpy():
        w = np.append(
            0,
            np.linalg.solve(
                G_move[:-1, :-1] + (n - 1) * reg_transition * np.eye(n - 1), G_move[:-1] @ w
            ),
        )
        mu = np.linalg.solve(G_ratio + n * eta * np.eye(n), G_ratio @ w)
        w = reference.original_rule(
            mu, G_X, reference.gaussian_gram(x, seen[None], WIDTHS[2])[:, 0], delta / n**2
        )
        estimates.append(w @ z)
        negative += (mu < 0).sum()
    model = published(rule="original", ratio="tikhonov", rank=rank, tol=0.0)
    found = rollout(model.fit(memory), test.obs[None])
    np.testing.assert_allclose(
        found.estimates[0].detach().numpy(), np.stack(estimates), rtol=0, atol=tol
    )
    assert negative > 0 and (found.diagnostics["zero_weight_share"] == 0).all(), (
        "the original rule keeps the sign of its ratios"
    )
    assert negative > 0


# ratio one


def test_with_ratio_one_it_is_a_chain_of_regressions():
    """Each observation is regressed on by itself; where none is there, the regression of the next
    state follows the last one.
    """
    memory, test = first(recording(40)), first(recording(8, seed=1))
    filter = published(ratio="one").fit(memory)
    mask = torch.tensor([[True, True, False, False, True, False, True, True]])
    found = rollout(filter, test.obs[None], mask=mask).estimates[0].detach()
    gram = gaussian(memory.obs, memory.obs, bandwidth=WIDTHS[2])
    observed = reference.cme_weights(
        gram, gaussian(test.obs, memory.obs, bandwidth=WIDTHS[2]), REGS[2]
    )
    source, target = memory.states[:-1], memory.states[1:]
    gram = gaussian(source, source, bandwidth=WIDTHS[1])
    moved = torch.zeros(40, 40, dtype=F64)  # column j: the embedding of the state after z_j
    moved[1:] = reference.cme_weights(
        gram, gaussian(memory.states, source, bandwidth=WIDTHS[1]), REGS[1]
    ).mT
    for t, last in enumerate([0, 1, 1, 1, 4, 4, 6, 7]):
        w = torch.linalg.matrix_power(moved, t - last) @ observed[last]
        torch.testing.assert_close(found[t], w @ memory.states, rtol=1e-9, atol=1e-9)
    # and the plain regression of the next state's mean
    regression = gaussian(memory.states, source, bandwidth=WIDTHS[1]) @ torch.linalg.solve(
        gram + 39 * REGS[1] * torch.eye(39), target
    )
    torch.testing.assert_close(moved.mT @ memory.states, regression, rtol=1e-8, atol=1e-8)


# operators


def test_operators_from_features_are_the_operators_of_their_gram_matrix(normal):
    features, w = normal(12, 4), normal(3, 12)
    gram, pairs = features @ features.mT, transitions([5, 7])
    for dense, primal in (
        (transition_operator(gram, pairs, 1e-3), transition_operator_primal(features, pairs, 1e-3)),
        (ratio_operator(gram, 1e-3), ratio_operator_primal(features, 1e-3)),
    ):
        torch.testing.assert_close(dense(w), primal(w), rtol=1e-9, atol=1e-9)


def test_operators_are_the_formulas(normal):
    states = normal(9, 2)
    gram, pairs = (
        gaussian(states, states, bandwidth=0.8),
        Transitions(torch.tensor([0, 1, 4, 5, 6]), torch.tensor([1, 2, 5, 6, 7])),
    )
    P = transition_operator(gram, pairs, 0.02)(torch.eye(9, dtype=F64)).mT
    G = gram.numpy()
    for row, i in enumerate([1, 2, 5, 6, 7]):
        source = G[np.ix_(pairs.source, pairs.source)]
        torch.testing.assert_close(
            P[i],
            torch.from_numpy(np.linalg.inv(source + 5 * 0.02 * np.eye(5)) @ G[pairs.source])[row],
        )
    assert (P[[0, 3, 4, 8]] == 0).all(), "a first state is no target"
    A = ratio_operator(gram, 0.02)
    w = normal(2, 9)
    torch.testing.assert_close(A(w), ratios.tikhonov(gram, w @ gram, 0.02))


def test_relative_ratio_is_the_one_of_kbf_ratios(normal):
    z = normal(20, 2)
    gram, w = gaussian(z, z, bandwidth=0.7), normal(3, 20)
    relative = ratios.RATIOS["relative"].dense
    r = RatioOfWeights(relative, gram, 1e-3, 0.2)(w)
    torch.testing.assert_close(r, ratios.relative(gram, gram, w, 1e-3, 0.2))
    assert r.max() <= 5
    kulsif = ratio_operator(gram, 1e-3)(w).clamp_min(0)
    torch.testing.assert_close(
        RatioOfWeights(relative, gram, 1e-3, 0.0)(w), kulsif, rtol=1e-6, atol=1e-6
    )


def test_pairs_never_cross_the_end_of_a_sequence():
    whole = recording(50)
    a, b = first(whole, 0, 20), first(whole, 20)
    w = torch.rand(1, 50, dtype=F64, generator=generator())
    for rank in (None, 50):
        two, other, one = (
            published(rank=rank, tol=0.0).fit(m) for m in ([a, b], [b, a], [first(whole)])
        )
        order = torch.cat([torch.arange(20, 50), torch.arange(20)])
        predicted = two.predict(KernelState(w)).weights
        assert (predicted[0, [0, 20]] == 0).all(), "nothing moves to the first state of a sequence"
        assert one.predict(KernelState(w)).weights[0, 20] != 0
        swapped = other.predict(KernelState(w[:, order])).weights
        torch.testing.assert_close(swapped, predicted[:, order], rtol=1e-5, atol=1e-5)
        test = recording(12, seed=1)
        found, again = rollout(two, test.obs), rollout(other, test.obs)
        torch.testing.assert_close(found.estimates, again.estimates, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            found.state.weights[:, order], again.state.weights, rtol=1e-5, atol=1e-5
        )
        assert not torch.allclose(found.estimates, rollout(one, test.obs).estimates, atol=1e-4)


# updates


def features_of(obs: Tensor, p: int = 5) -> nn.Module:
    """Features of a batch of observations, not linear in them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(obs.shape[-1], p), nn.Tanh()).double().requires_grad_(False)


def test_update_over_k_draws_is_the_rule_over_all_of_them(normal):
    """n points with k observations each = n k points, every ratio k times and the same reg; the
    weights of a point add up.
    """
    obs, ratio, x, n, k = normal(6, 3, 2), normal(4, 6).square(), normal(4, 2), 6, 3
    psi = features_of(obs)
    update = PrimalUpdate(psi, obs, 0.05)
    every = rules.importance_weighted_primal(
        ratio.repeat_interleave(k, -1), psi(obs.flatten(0, 1)), psi(x), 0.05
    )
    torch.testing.assert_close(
        update(ratio, x), every.unflatten(-1, (n, k)).sum(-1), rtol=1e-10, atol=1e-10
    )


def test_update_in_float32_keeps_few_products_and_the_digits(normal):
    """Products of smooth features are of low rank: their two factors give the weights of float64,
    to the digits of float32.
    """
    obs, ratio, x = normal(200, 4, 1), normal(3, 200).square(), normal(3, 1)
    psi = NystromFeatures("gaussian", tensor(1.0), obs[:, 0], 12, 0.0)
    exact, single = (PrimalUpdate(psi, obs, 1e-2, dtype=dtype) for dtype in (F64, torch.float32))
    assert exact.basis is None
    assert single.basis is not None
    assert single.moments is not None
    assert single.moments.shape[1] < 40, "of 78 products"
    torch.testing.assert_close(
        single(ratio.float(), x).double(), exact(ratio, x), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("kept", [True, False], ids=["mass is kept", "mass is not kept"])
def test_move_and_observe_of_scaled_weights_is_predict_then_observe(normal, kept):
    """Weights of either sign, and an operator that changes their sum: the ratios are
    scaled anyway.
    """
    obs, states, P = normal(9, 3, 2), normal(9, 2), normal(9, 9).abs()
    transition = Operator(P / P.sum(0) if kept else P)
    filter = KernelBayesFilter(
        states, transition, None, PrimalUpdate(features_of(obs), obs, 0.05), normalise=True
    )
    w = normal(4, 9) + 1
    state, x = KernelState(normalised(w, w)), normal(4, 2)
    fused = filter.move_and_observe(state, x)
    assert fused is not None
    after, evidence = filter.observe(filter.predict(state), x)
    torch.testing.assert_close(fused[0].weights, after.weights)
    torch.testing.assert_close(fused[1], evidence)


def test_update_is_the_same_with_and_without_stored_products(normal, monkeypatch):
    obs, ratio, x = (
        normal(7, 1, 2),
        normal(MIN_BATCH_FOR_MOMENTS, 7).square(),
        normal(MIN_BATCH_FOR_MOMENTS, 2),
    )
    stored = PrimalUpdate(features_of(obs), obs, 0.05)
    monkeypatch.setattr(rule, "MAX_BYTES_OF_MOMENTS", 0)
    fresh = PrimalUpdate(features_of(obs), obs, 0.05)
    assert stored.moments is not None
    assert fresh.moments is None
    torch.testing.assert_close(stored(ratio, x), fresh(ratio, x), rtol=1e-10, atol=1e-10)
    assert PrimalUpdate(features_of(obs), obs.expand(7, 3, 2), 0.05).moments is not None, (
        "several observations a point need them"
    )


@pytest.mark.parametrize("rule", ["importance_weighted", "original"])
def test_dense_update_is_the_update_over_its_features(normal, rule):
    obs, ratio, x = normal(7, 2), normal(3, 7).abs(), normal(3, 2)
    psi = features_of(obs)
    dense = DenseUpdate(
        getattr(rules, rule),
        lambda a, b, bandwidth: psi(a / bandwidth) @ psi(b / bandwidth).mT,
        tensor(2.0),
        obs,
        0.05,
    )
    primal = PrimalUpdate(nn.Sequential(Halve(), psi), obs[:, None], 0.05, rule=rule)
    torch.testing.assert_close(dense(ratio, x), primal(ratio, x), rtol=1e-8, atol=1e-8)


class Halve(nn.Module):
    def forward(self, x):
        return x / 2


def test_update_refuses_what_it_cannot_do(normal):
    obs = normal(6, 3, 2)
    with pytest.raises(ValueError, match="got original with k = 3"):
        PrimalUpdate(features_of(obs), obs, 0.1, rule="original")
    with pytest.raises(ValueError, match="got pseudo_inverse with k = 1"):
        PrimalUpdate(features_of(obs), obs[:, :1], 0.1, rule="pseudo_inverse")


# densities


class LinearProblem(NamedTuple):
    """A stable linear-Gaussian model, its stationary covariance, and the log density of a move."""

    model: LinearModel
    cov: Tensor

    def moved(self, z: Tensor) -> Tensor:
        """E[z' | z]."""
        return z @ self.model.A.mT + self.model.a

    def log_move(self, z: Tensor) -> Tensor:
        """Row i the target, column j the source; without a constant."""
        return gaussian_log_density(z[:, None] - self.moved(z), self.model.Q)

    def sample(self, n: int, seed: int) -> Tensor:
        return self.model.m0 + gaussian_noise(torch.Size([n]), self.cov, generator(seed))


@pytest.fixture(scope="module")
def linear() -> LinearProblem:
    A, a, Q = (
        tensor([[0.8, 0.4], [-0.4, 0.8]]),
        tensor([0.2, -0.1]),
        tensor([[0.2, 0.05], [0.05, 0.1]]),
    )
    eye = torch.eye(2, dtype=F64)
    mean, cov = torch.linalg.solve(eye - A, a), Q
    for _ in range(200):
        cov = A @ cov @ A.mT + Q
    return LinearProblem(
        LinearModel(A, a, Q, C=eye, c=tensor([0.5, 0.0]), R=0.3 * eye, m0=mean, P0=cov), cov
    )


def test_density_transition_is_the_formula(linear):
    """If the volumes alone give the wanted means, they are not tilted."""
    z, mass = linear.sample(7, 0), torch.rand(7, dtype=F64, generator=generator()).softmax(0)
    q = linear.log_move(z).exp()
    P = torch.tensor(
        [
            [mass[i] * q[i, j] / sum(mass[k] * q[i, k] for k in range(7)) for j in range(7)]
            for i in range(7)
        ],
        dtype=F64,
    )
    P = P / P.sum(0)
    operator = density_transition(
        linear.log_move(z) + 700, mass, z, P.mT @ z
    )  # no constant matters, and nothing overflows
    torch.testing.assert_close(operator(torch.eye(7, dtype=F64)), P.mT)
    assert (operator.left >= 0).all()


def test_density_transition_moves_a_gaussian(linear):
    """24 memories of 500 stationary points carry N(m, S) to N(A m + a, A S A^T + Q), within
    Monte-Carlo error.

    Averages over the memories of the predicted mean and covariance are within 4.5 standard errors,
    plus 2 % of the stationary spread for the bias of order 1/n of self-normalised weights.
    """
    m, S = linear.model.m0 + tensor([0.4, -0.3]), tensor([[0.2, 0.05], [0.05, 0.15]])
    means, covs = [], []
    for seed in range(24):
        z = linear.sample(500, seed)
        w = (
            gaussian_log_density(z - m, S) - gaussian_log_density(z - linear.model.m0, linear.cov)
        ).softmax(0)
        moved = density_transition(
            linear.log_move(z), z.new_full((500,), 1 / 500), z, linear.moved(z)
        )(w[None])[0]
        means.append(moved @ z)
        covs.append((z - means[-1]).mT @ (moved[:, None] * (z - means[-1])))
    spread = linear.cov.diagonal().mean()
    for values, truth, unit in (
        (torch.stack(means), linear.model.A @ m + linear.model.a, spread.sqrt()),
        (torch.stack(covs), linear.model.A @ S @ linear.model.A.mT + linear.model.Q, spread),
    ):
        error = values.std(0) / math.sqrt(24)
        assert ((values.mean(0) - truth).abs() < 4.5 * error + 0.02 * unit).all()
        assert (error < 0.03 * unit).all()


def test_filter_over_a_drawn_memory_is_the_kalman_filter(linear):
    """500 points with masses and the true transition density, 16 draws of the observation: within
    0.1 standard deviations (rms).
    """
    m = linear.model
    model = StateSpaceModel(lambda z: z @ m.A.mT + m.a, lambda z: z + m.c, m.Q, m.R, m.m0, m.P0)
    points, mass = quantise(linear.sample(20_000, 1), 500, generator(2))
    obs = model.observe(points[:, None].expand(-1, 16, -1), generator(3))
    psi = NystromFeatures("gaussian", tensor(1.0), obs[:, 0], 40, 1e-9)
    transition = density_transition(linear.log_move(points), mass, points, linear.moved(points))
    filter = KernelBayesFilter(
        points, transition, None, PrimalUpdate(psi, obs, 1e-4), prior=mass, normalise=True
    )
    assert isinstance(filter, Filter)
    test = simulate(model, linear.sample(16, 4), 12, generator(5))
    mask = torch.rand(16, 12, generator=generator(6)) < 0.7
    found, kalman = (rollout(f, test.obs, mask=mask).estimates for f in (filter, KalmanFilter(m)))
    spread = linear.cov.diagonal().mean().sqrt()
    assert (found - kalman).square().mean().sqrt() < 0.1 * spread
    error, best = ((e - test.states).square().sum(-1).mean() for e in (found, kalman))
    assert error < 1.06 * best


# the loop


def test_masked_is_predicted_and_step_is_rollout():
    filter = published().fit(first(recording(30)))
    test = recording(6, seed=1, batch=3)
    mask = torch.tensor([[True] * 6, [True, False, True, False, False, True], [False] * 6])
    run = rollout(filter, test.obs, mask=mask)
    for k in range(3):
        state = filter.init(1)
        for t in range(6):
            state = filter.predict(state)
            if mask[k, t]:
                state = filter.update(state, test.obs[k : k + 1, t])
            torch.testing.assert_close(
                run.estimates[k, t], filter.estimate(state)[0], rtol=1e-9, atol=1e-9
            )
        torch.testing.assert_close(run.state.weights[k], state.weights[0], rtol=1e-9, atol=1e-9)
    P = filter.transition(torch.eye(30, dtype=F64)).mT
    ahead = torch.linalg.matrix_power(P, 6) @ filter.prior
    torch.testing.assert_close(run.state.weights[2], ahead, rtol=1e-9, atol=1e-12)


def test_start_is_the_embedding_of_the_training_states(normal):
    z = normal(8, 3)
    operators = Operator(torch.eye(8, dtype=F64)), None, nn.Identity()
    uniform = KernelBayesFilter(z, *operators)
    torch.testing.assert_close(uniform.estimate(uniform.init(2)), z.mean(0).expand(2, 3))
    prior = torch.rand(8, dtype=F64, generator=generator())
    given = KernelBayesFilter(z, *operators, prior=prior)
    torch.testing.assert_close(given.estimate(given.init(1))[0], prior @ z)


def test_weights_are_normalised_or_left_alone():
    memory, test = first(recording(40)), recording(10, seed=1)
    plain, scaled = (rollout(published(normalise=n).fit(memory), test.obs) for n in (False, True))
    torch.testing.assert_close(scaled.diagnostics["weight_sum"], torch.ones(1, 10, dtype=F64))
    assert (plain.diagnostics["weight_sum"] - 1).abs().min() > 1e-6
    filter = published(normalise=True).fit(memory)
    state = filter.predict(filter.init(1))
    torch.testing.assert_close(state.weights.sum(), tensor(1.0))
    gamma = filter.ratio(state.weights)
    ratio = gamma.clamp_min(0) * 40 / gamma.clamp_min(0).sum()
    w = filter.rule(ratio, test.obs[:, 0])
    torch.testing.assert_close(filter.update(state, test.obs[:, 0]).weights, w / w.sum())


def test_without_a_ratio_operator_the_ratio_is_n_times_the_weights(normal):
    z, seen = normal(8, 2), []

    class Watch(nn.Module):
        def forward(self, ratio, obs):
            seen.append(ratio)
            return ratio

    filter = KernelBayesFilter(z, nn.Identity(), None, Watch())
    state = KernelState(normal(3, 8))
    filter.update(state, normal(3, 2))
    torch.testing.assert_close(seen[0], (8 * state.weights).clamp_min(0))


def test_diagnostics_say_what_the_weights_are():
    filter = published().fit(first(recording(40)))
    test = recording(5, seed=1, batch=2)
    state, obs = filter.predict(rollout(filter, test.obs[:, :4]).state), test.obs[:, 4]
    gamma = filter.ratio(state.weights)
    after = filter.update(state, obs)
    ratio_dim = filter.diagnostics(after)
    torch.testing.assert_close(ratio_dim["zero_weight_share"], (gamma <= 0).double().mean(-1))
    torch.testing.assert_close(ratio_dim["weight_sum"], after.weights.sum(-1))
    torch.testing.assert_close(ratio_dim["negative_mass"], negative_mass(after.weights))
    torch.testing.assert_close(ratio_dim["ess"], effective_sample_size(after.weights))
    assert (ratio_dim["negative_mass"] < 0).all()
    assert (ratio_dim["zero_weight_share"] > 0).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("rank", [None, 20])
def test_an_observation_like_none_before_is_passed_over(rank, dtype):
    """Its features are zero to the last bit; the others of the batch do not notice, and gradients
    stay finite.
    """
    model = published(rank=rank, normalise=True, dtype=dtype)
    filter = model.fit(first(recording(30)))
    obs = recording(6, seed=1, batch=2).obs.to(filter.states.dtype)
    far = obs.clone()
    far[0, 2] = 1e4
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, 2] = False
    skipped = rollout(filter, obs, mask=mask).estimates
    found = rollout(filter, far, gradients=True).estimates
    assert torch.equal(found, skipped)
    found.sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_weights_that_nearly_cancel_are_passed_over():
    """Divided by their sum they would put the estimate a thousand times as far out as any point."""
    z = tensor([[1.0, 0.0], [-1.0, 0.0]])

    class Cancels(nn.Module):
        def forward(self, ratio, obs):
            return torch.cat([1 + obs, -torch.ones_like(obs)], -1)

    filter = KernelBayesFilter(z, nn.Identity(), None, Cancels(), normalise=True)
    state = KernelState(tensor([[0.25, 0.75]]).expand(2, 2))
    after = filter.update(state, tensor([[1e-3], [1.0]]))
    torch.testing.assert_close(after.weights, tensor([[0.25, 0.75], [2.0, -1.0]]))


# gradients


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"normalise": True},
        {"rank": 6, "normalise": True},
        {"rule": "original", "ratio": "tikhonov", "rank": 6},
        {"ratio": "relative", "normalise": True},
        {"ratio": "one"},
    ],
    ids=["published", "normalised", "low-rank", "original", "relative", "one"],
)
def test_gradients_through_ratio_rule_and_three_steps(changes):
    """Against finite differences in bandwidths and ridges, with ratios that are cut off to exactly
    0.
    """
    memory, test = [first(recording(8)), first(recording(6, seed=2))], recording(3, seed=1, batch=2)
    mask = torch.tensor([[True, True, True], [True, False, True]])
    clipped = []

    def estimates(log_bandwidth, log_reg):
        model = KBF(**{"rank": None, "normalise": False, "tol": 0.0, **changes})
        del model.log_bandwidth, model.log_reg
        model.log_bandwidth, model.log_reg = log_bandwidth, log_reg
        run = rollout(model.fit(memory), test.obs, mask=mask, gradients=True)
        clipped.append(run.diagnostics["zero_weight_share"].detach())
        return run.estimates

    start = tensor(WIDTHS).log().requires_grad_(), tensor([0.01, 0.02, 0.05]).log().requires_grad_()
    assert torch.autograd.gradcheck(estimates, start, rtol=1e-4, atol=1e-6)
    if changes.get("ratio", "kulsif") in ("kulsif", "relative"):
        assert clipped[0].max() > 0.1
    norms = [g.norm() for g in torch.autograd.grad(estimates(*start).sum(), start)]
    assert min(norms) > 1e-3


def test_nan_weights_are_seen_and_not_taken_for_an_outlier():
    class Broken(torch.nn.Module):
        def forward(self, ratio, obs):
            return ratio * torch.nan

    filter = KernelBayesFilter(
        torch.zeros(3, 2), Operator(torch.eye(3)), None, Broken(), normalise=True
    )
    state = filter.update(filter.init(1), torch.zeros(1, 2))
    assert filter.estimate(state).isnan().all()


def test_covariance_is_that_of_the_positive_part_of_the_weights(normal):
    """Against NumPy's weighted covariance, without the negative weights and whatever their sum."""
    z, w = normal(7, 2), normal(3, 7)
    filter = KernelBayesFilter(z, nn.Identity(), None, nn.Identity())
    found = filter.covariance(KernelState(w))
    points, weights = filter.weighted_sample(KernelState(w))
    for b in range(3):
        v = np.maximum(w[b].numpy(), 0)
        expected = np.cov(z.numpy().T, aweights=v, ddof=0)
        np.testing.assert_allclose(found[b].numpy(), expected, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(weights[b].numpy(), v / v.sum(), rtol=1e-12)
        assert torch.equal(points[b], z)
