"""Smoothers against conditioning of the joint Gaussian, all paths of a finite chain, and
quadrature; predictions ahead.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import reference
import torch
from torch import Tensor, nn

from kbf.data.dsprites import position_model
from kbf.densities.learned_ssm import learn_model
from kbf.densities.ridge import fit_ridge_map
from kbf.filters.ensemble import EnsembleFilter
from kbf.filters.gaussian.ekf import ExtendedKalmanFilter
from kbf.filters.gaussian.kalman import KalmanFilter, LearnedKalman, LinearModel
from kbf.filters.gaussian.ukf import UnscentedKalmanFilter
from kbf.filters.kernel import smoother
from kbf.filters.kernel.filter import KernelBayesFilter
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.operators import Operator
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.kernel.smoother import RuleBackward, density_backward
from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.particle.bootstrap import (
    MAX_BACKWARD_PARTICLES,
    BootstrapFilter,
    ParticleFilter,
    particle_backward,
    thinned,
)
from kbf.filters.particle.learned import LearnedParticleFilter, ObservationModel
from kbf.filters.protocols import FilterStep
from kbf.filters.regression.kernel_ridge import FrameRegression
from kbf.filters.rollout import rollout
from kbf.filters.scaling import ScaledFilter, Scaling
from kbf.filters.smoothing import predict_ahead, sample_paths, smooth
from kbf.images.encodings import EncodedFilter, Encoding
from kbf.recording import Recording
from kbf.ssm import OrientationModel, StateSpaceModel, gaussian_noise, oscillatory, rotate, simulate

F64 = torch.float64


def tensor(values) -> Tensor:
    return torch.tensor(values, dtype=F64)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Gaussian: conditioning of the joint Gaussian


def linear(B: Tensor | None = None) -> LinearModel:
    """Two states, two observations, nothing symmetric."""
    return LinearModel(
        A=tensor([[0.9, 0.3], [-0.4, 0.8]]),
        a=tensor([0.2, -0.1]),
        Q=tensor([[0.2, 0.05], [0.05, 0.1]]),
        C=tensor([[1.0, 0.4], [-0.3, 0.9]]),
        c=tensor([0.1, 0.3]),
        R=tensor([[0.3, 0.1], [0.1, 0.4]]),
        m0=tensor([0.5, -1.0]),
        P0=tensor([[0.6, 0.1], [0.1, 0.4]]),
        B=B,
    )


def as_state_space(m: LinearModel) -> StateSpaceModel:
    return StateSpaceModel(
        lambda z: z @ m.A.mT + m.a, lambda z: z @ m.C.mT + m.c, m.Q, m.R, m.m0, m.P0
    )


def draw(m: LinearModel, b: int, T: int, seed: int = 0) -> Track:
    g = generator(seed)
    return simulate(as_state_space(m), m.m0 + gaussian_noise(torch.Size([b]), m.P0, g), T, g)


def fitted(
    m: LinearModel, x: Tensor, seen: list[int], at: int, moved: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean and covariance of z_at given x_t, t in ``seen``."""
    part = slice(at * len(m.a), (at + 1) * len(m.a))
    mean, spread = conditioned(m, x, seen, moved)
    return mean[part], spread[part, part]


def conditioned(
    m: LinearModel, x: Tensor, seen: list[int], moved: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mean ``Td`` and covariance ``Td Td`` of all states given x_t, t in ``seen``: their joint
    Gaussian, written down and conditioned once.
    """
    T, d = len(x), len(m.a)
    means, mean, blocks, cov = [], m.m0, {}, m.P0
    for t in range(T):
        mean = m.A @ mean + m.a + (0 if moved is None else moved[t])
        cov = m.A @ cov @ m.A.mT + m.Q
        means.append(mean)
        blocks[t, t] = cov
        for s in range(t):
            blocks[t, s] = m.A @ blocks[t - 1, s]
            blocks[s, t] = blocks[t, s].mT
    joint = torch.cat([torch.cat([blocks[t, s] for s in range(T)], 1) for t in range(T)])
    H = torch.zeros(len(seen) * d, T * d, dtype=F64)
    for row, t in enumerate(seen):
        H[row * d : (row + 1) * d, t * d : (t + 1) * d] = m.C
    S = H @ joint @ H.mT + torch.block_diag(*[m.R] * len(seen))
    gain = joint @ H.mT @ torch.linalg.inv(S)
    stacked = torch.cat(means)
    found = stacked + gain @ (torch.cat([x[t] - m.c for t in seen]) - H @ stacked)
    return found, joint - gain @ H @ joint


GAUSSIAN: dict[str, Callable[[LinearModel], Any]] = {
    "kalman": KalmanFilter,
    "ekf": lambda m: ExtendedKalmanFilter(as_state_space(m)),
    "ukf": lambda m: UnscentedKalmanFilter(as_state_space(m)),
}


@pytest.mark.parametrize("lag", [None, 0, 2])
@pytest.mark.parametrize("kind", GAUSSIAN)
def test_gaussian_smoothers_condition_the_joint_gaussian(kind, lag):
    m, T = linear(), 8
    x = draw(m, 2, T).obs
    mask = torch.ones(2, T, dtype=torch.bool)
    mask[0, 3], mask[1, -1] = False, False
    found = smooth(
        GAUSSIAN[kind](m), torch.where(mask[..., None], x, torch.nan), mask=mask, lag=lag
    )
    assert found.covariances is not None
    for k, t in itertools.product(range(2), range(T)):
        seen = [s for s in range(T if lag is None else min(t + lag + 1, T)) if mask[k, s]]
        mean, cov = fitted(m, x[k], seen, t)
        torch.testing.assert_close(found.estimates[k, t], mean, atol=1e-7, rtol=1e-7)
        torch.testing.assert_close(found.covariances[k, t], cov, atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("kind", GAUSSIAN)
def test_paths_of_gaussian_filters_have_the_joint_gaussian(kind):
    m, T, n = linear(), 5, 40_000
    x = draw(m, 1, T).obs
    mask = torch.tensor([[True, True, False, True, True]])
    drawn = sample_paths(GAUSSIAN[kind](m), x, n, mask=mask, generator=generator(3)).flatten(1)
    mean, cov = conditioned(m, x[0], [0, 1, 3, 4])
    std = cov.diagonal().sqrt()
    assert ((drawn.mean(0) - mean) / std).abs().max() < 5 / math.sqrt(n)
    errors = (drawn.mT.cov() - cov) / (std[:, None] * std)
    assert errors.abs().max() < 5 * math.sqrt(2 / n)


def test_paths_of_particles_have_the_smoothed_moments():
    m, n = linear(), 2000
    x = draw(m, 1, 12).obs
    start = m.m0 + gaussian_noise(torch.Size([400]), m.P0, generator(1))
    f = BootstrapFilter(as_state_space(m), start, 400)
    drawn = sample_paths(f, x, n, generator=generator(2))
    _, cov = conditioned(m, x[0], list(range(12)))
    smoothed = smooth(f, x, generator=generator(2)).estimates[0]  # of the same particles
    errors = (drawn.mean(0) - smoothed).flatten() / cov.diagonal().sqrt()
    assert errors.abs().max() < 5 / math.sqrt(n)
    step = (drawn[:, 1:] - drawn[:, :-1]).var(0).sum()  # of neighbours, not of single steps
    D = torch.eye(24, dtype=F64)[2:] - torch.eye(24, dtype=F64)[:-2]
    assert step == pytest.approx(float((D @ cov @ D.mT).trace()), rel=0.1)


def test_an_ensemble_has_no_paths():
    members = {name: KalmanFilter(linear()) for name in "ab"}
    half, spreads = torch.full((2, 2), 0.5, dtype=F64), torch.eye(2, dtype=F64).expand(2, 2, 2)
    both = EnsembleFilter(members, half, spreads)
    with pytest.raises(ValueError, match="an average of several models has no paths"):
        sample_paths(both, draw(linear(), 1, 3).obs, 2)


def test_kalman_smoother_with_controls():
    m, T = linear(B=tensor([[0.7], [-0.5]])), 6
    u, x = torch.randn(1, T, 1, dtype=F64, generator=generator(3)), draw(m, 1, T).obs
    found = smooth(KalmanFilter(m), x, controls=u).estimates[0]
    for t in range(T):
        torch.testing.assert_close(found[t], fitted(m, x[0], list(range(T)), t, u[0] @ m.B.mT)[0])


@pytest.mark.slow
def test_a_long_lag_is_the_whole_interval_and_no_lag_is_the_filter():
    f = SimulatedKBF(points=60, run=600).fit(Recording(*one(linear(), 80)))
    x = draw(linear(), 2, 12, seed=5).obs.float()
    torch.testing.assert_close(
        smooth(f, x, lag=0).estimates, rollout(f, x).estimates, rtol=0, atol=1e-4
    )  # rounding of float32
    torch.testing.assert_close(smooth(f, x, lag=50).estimates, smooth(f, x).estimates)
    assert not torch.allclose(smooth(f, x, lag=1).estimates, smooth(f, x).estimates, atol=1e-3)


def one(m: LinearModel, T: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    data = draw(m, 1, T, seed)
    return data.states[0], data.obs[0]


# Weights over a memory: all paths of a finite chain


class Table(nn.Module):
    """Bayes' rule over a finite set: (ratio, x) -> ratio times the likelihood p(x | i)."""

    def __init__(self, likelihood: Tensor) -> None:
        super().__init__()
        self.likelihood = likelihood

    def forward(self, ratio: Tensor, obs: Tensor) -> Tensor:
        return ratio * self.likelihood[:, obs[:, 0].long()].mT


class Chosen(nn.Module):
    """P(u): one table of moves for each of two controls."""

    controlled = 1

    def __init__(self, tables: Tensor) -> None:
        super().__init__()
        self.tables = tables

    def forward(self, w: Tensor, control: Tensor) -> Tensor:
        return (self.tables[control[:, 0].long()] @ w[..., None])[..., 0]


class Chain(NamedTuple):
    """Four states, three symbols, and two tables of moves whose column j is p(. | j)."""

    prior: Tensor
    moves: Tensor
    likelihood: Tensor


def chain() -> Chain:
    g = generator(2)
    raw = [
        torch.rand(*shape, dtype=F64, generator=g) ** 2 + 0.02
        for shape in ((4,), (2, 4, 4), (4, 3))
    ]
    return Chain(
        raw[0] / raw[0].sum(),
        raw[1] / raw[1].sum(1, keepdim=True),
        raw[2] / raw[2].sum(1, keepdim=True),
    )


def path_probabilities(
    c: Chain, x: list[int], seen: list[bool], controls: list[int]
) -> dict[tuple[int, ...], float]:
    """p(z_1 ... z_T | all x) of each path, by enumeration."""
    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(4), repeat=len(x) + 1):
        p = float(c.prior[path[0]])
        for t, (i, j) in enumerate(itertools.pairwise(path)):
            p *= float(c.moves[controls[t], j, i]) * (
                float(c.likelihood[j, x[t]]) if seen[t] else 1.0
            )
        found[path[1:]] = found.get(path[1:], 0.0) + p
    return {path: p / sum(found.values()) for path, p in found.items()}


def enumerated(c: Chain, x: list[int], seen: list[bool], controls: list[int]) -> Tensor:
    """p(z_t | all x), ``T 4``, by the probability of each path."""
    found = torch.zeros(len(x), 4, dtype=F64)
    for path, p in path_probabilities(c, x, seen, controls).items():
        for t, j in enumerate(path):
            found[t, j] += p
    return found


@pytest.mark.parametrize("controlled", [False, True])
def test_density_smoother_is_the_sum_over_all_paths(controlled):
    c, x, seen, u = chain(), [0, 2, 1, 1, 0], [True, True, False, True, True], [0, 1, 1, 0, 1]
    transition = Chosen(c.moves) if controlled else Operator(c.moves[0])
    f = KernelBayesFilter(
        torch.eye(4, dtype=F64),
        transition,
        None,
        Table(c.likelihood),
        prior=c.prior,
        normalise=True,
    )
    given: dict[str, Any] = {"controls": tensor(u)[None, :, None]} if controlled else {}
    found = smooth(f, tensor(x)[None, :, None], mask=torch.tensor([seen]), **given).estimates[0]
    torch.testing.assert_close(found, enumerated(c, x, seen, u if controlled else [0] * 5))


@pytest.mark.parametrize("controlled", [False, True])
def test_paths_of_a_chain_have_their_probabilities(controlled):
    c, x, seen, u = chain(), [0, 2, 1, 1, 0], [True, True, False, True, True], [0, 1, 1, 0, 1]
    transition = Chosen(c.moves) if controlled else Operator(c.moves[0])
    f = KernelBayesFilter(
        torch.eye(4, dtype=F64),
        transition,
        None,
        Table(c.likelihood),
        prior=c.prior,
        normalise=True,
    )
    given: dict[str, Any] = {"controls": tensor(u)[None, :, None]} if controlled else {}
    n, mask = 20_000, torch.tensor([seen])
    drawn = sample_paths(f, tensor(x)[None, :, None], n, mask=mask, generator=generator(), **given)
    assert drawn.shape == (n, 5, 4)
    expected = path_probabilities(c, x, seen, u if controlled else [0] * 5)
    counted = Counter(map(tuple, drawn.argmax(-1).tolist()))
    for path, p in expected.items():
        assert abs(counted[path] / n - p) < 5 * math.sqrt(p / n) + 6 / n, path


def test_likelihood_of_the_future():
    """Factors of rows cancel where columns do not move; nothing later is 1; what cannot be is 0,
    and never NaN.
    """
    c = chain()
    P, w = c.moves[0], c.prior[None]
    torch.testing.assert_close(
        density_backward(Operator(P), w, w @ P.mT), torch.ones(1, 4, dtype=F64)
    )
    later = torch.rand(1, 4, dtype=F64, generator=generator(1))
    scale = tensor([0.5, 2.0, 3.0, 0.1])[:, None]
    plain, scaled = (density_backward(Operator(M), w, later) * M.sum(0) for M in (P, scale * P))
    torch.testing.assert_close(plain, scaled)
    signed = density_backward(Operator(P), tensor([[1.4, -0.3, -0.2, 0.1]]), later - 0.4)
    assert (signed >= 0).all() and torch.isfinite(signed).all()
    nowhere = P.clone()
    nowhere[:, 2] = 0
    assert density_backward(Operator(nowhere), w, later)[0, 2] == 0


def test_ripples_of_signed_weights_cancel_in_the_likelihood_of_the_future():
    """On a fine grid, h = N(x; z', r^2) and ripples of both signs: b is N(x; a z, q^2 + r^2),
    without what they leave if cut.
    """
    grid, a, q, r, x = torch.linspace(-5, 5, 501, dtype=F64), 0.9, 0.5, 0.3, 0.7
    P = (-0.5 * ((grid[:, None] - a * grid) / q).square()).exp()
    P = P / P.sum(0)
    w = (-0.5 * (grid / 0.6).square()).softmax(0)[None]
    h = (-0.5 * ((x - grid) / r).square()).exp() + 0.2 * (12 * grid).cos()
    b = density_backward(Operator(P), w, (w @ P.mT) * h)[0]
    truth = (-0.5 * (x - a * grid).square() / (q**2 + r**2)).exp() * r / math.sqrt(q**2 + r**2)
    inside = grid.abs() < 3
    torch.testing.assert_close(b[inside], truth[inside], atol=1e-4, rtol=0)


@pytest.mark.slow
@torch.no_grad()
def test_nothing_more_observed_changes_nothing():
    model = oscillatory()
    data = simulate(model, model.m0[None], 150, generator(0))
    f = SimulatedKBF(points=150, run=3000, dtype="float64").fit(
        Recording(data.states[0, :120], data.obs[0, :120])
    )
    x, mask = data.obs[:, 120:], torch.arange(30)[None] < 22
    found, filtered = (
        smooth(f, x, mask=mask).estimates[:, 21:],
        rollout(f, x, mask=mask).estimates[:, 21:],
    )
    torch.testing.assert_close(found, filtered, atol=1e-9, rtol=0)


# The rule backwards


class Track(NamedTuple):
    """A finite chain's recording, states as unit vectors; how often each pair (to i, from j) is in
    it, by control, ``2 4 4``.
    """

    sequence: Recording
    counts: Tensor


def recording(n: int = 400, controls: bool = False) -> Track:
    c, g = chain(), generator(7)
    u = torch.randint(2 if controls else 1, (n,), generator=g)
    path = [0]
    for t in range(1, n):
        path.append(int(torch.multinomial(c.moves[u[t], :, path[-1]], 1, generator=g)))
    z, counts = torch.eye(4, dtype=F64)[path], torch.zeros(2, 4, 4, dtype=F64)
    for t in range(1, n):
        counts[u[t], path[t], path[t - 1]] += 1
    acted = u[:, None].double() if controls else None
    return Track(Recording(z, torch.zeros(n, 1, dtype=F64), None, acted), counts)


def delta(x: Tensor, y: Tensor, *, bandwidth: Tensor) -> Tensor:
    """1 for equal points."""
    return (x[..., :, None, :] == y[..., None, :, :]).all(-1).to(x)


@pytest.mark.parametrize("controlled", [False, True])
@pytest.mark.parametrize("primal", [False, True])
def test_rule_backward_is_bayes_table(primal, controlled, monkeypatch):
    """On a finite set with a delta kernel and hardly any ridge: w^s_j = sum_i p(j | i) s_i, with
    the pairs' own frequencies.
    """
    monkeypatch.setattr(smoother, "REG", 1e-10)
    r = recording(controls=controlled)
    z, i = r.sequence.states, torch.arange(len(r.sequence.states) - 1)
    acted = r.sequence.controls[1:] if r.sequence.controls is not None else None
    back = RuleBackward(i, i + 1, delta, tensor(1.0), acted, tensor([0.0]) if controlled else None)
    prior, later = tensor([0.1, 0.5, 0.3, 0.1]), tensor([0.3, 0.1, 0.4, 0.2])
    w, after = (
        (p / z.sum(0))[None] @ z.mT for p in (prior, later)
    )  # weights over the points with these sums over the states
    found = back(w, after, z, z if primal else None, tensor([[1.0]]) if controlled else None) @ z
    counts = r.counts[1 if controlled else 0]
    joint = counts * (prior / z.sum(0))  # each source point weighs what the prior gives it
    expected = (joint / joint.sum(1, keepdim=True)).mT @ later
    torch.testing.assert_close(found[0], expected, atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_kernel_smoother_by_features_is_that_of_full_matrices():
    m = linear()
    memory, x = Recording(*one(m, 60)), draw(m, 2, 10, seed=4).obs
    found = []
    for rank in (None, 60):
        net = KBF(rank=rank, tol=1e-14, factors=(0.5, 0.5, 0.7), regs=(1e-3, 1e-3, 1e-3))
        net.prepare([memory])
        f = net.fit([memory])
        assert not any("backward" in name for name in f.state_dict())
        found.append(smooth(f, x).estimates)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_kernel_smoothers_on_a_linear_gaussian_model():
    """700 points: at most 1.15 (recording) and 1.05 (enlarged) times the error of
    Rauch-Tung-Striebel.
    """
    A = 0.95 * rotate(torch.eye(2, dtype=F64), tensor(0.4)).mT
    zero, eye = torch.zeros(2, dtype=F64), torch.eye(2, dtype=F64)
    m = LinearModel(A, zero, 0.1 * eye, eye, zero, 0.1 * eye, zero, 0 * eye)
    data = draw(m, 1, 900, 100)
    memory, x, z = (
        Recording(data.states[0, :700], data.obs[0, :700]),
        data.obs[:, 700:],
        data.states[:, 700:],
    )
    tuned = KBF(factors=(1.0, 1.0, 1.0), regs=(1e-3, 1e-3, 1e-3))
    tuned.prepare([memory])
    filters = {
        "rts": KalmanFilter(m),
        "kbf": tuned.fit([memory]),
        "enlarged": SimulatedKBF().fit([memory]),
    }
    errors = {}
    for name, f in filters.items():
        given = x.float() if name == "enlarged" else x
        found = rollout(f, given).estimates, smooth(f, given).estimates
        errors[name] = [(side.double() - z).square().sum(-1).mean().item() for side in found]
    for name, factor in (("kbf", 1.15), ("enlarged", 1.05)):
        assert (
            errors[name][1] < factor * errors["rts"][1] and errors[name][1] < 0.8 * errors[name][0]
        ), errors


@torch.no_grad()
@pytest.mark.parametrize(
    "net",
    [KBF(normalise=False), SimulatedKBF(points=80, run=800, draws=2)],
    ids=["recording", "enlarged"],
)
def test_smoothed_weights_have_sum_1_and_a_covariance(net):
    m = linear()
    memory, x = Recording(*one(m, 60)), draw(m, 2, 10, seed=4).obs
    net.prepare([memory])
    far = torch.cat([x, 1e3 * torch.ones_like(x[:, :1])], 1).to(
        next(iter(net.fit([memory]).buffers()))
    )
    found = smooth(net.fit([memory]), far)
    assert torch.isfinite(found.estimates[:, :-1]).all() and found.covariances is not None
    assert (torch.linalg.eigvalsh(found.covariances[:, :-1].double()) > -1e-6).all()
    f = net.fit([memory])
    start = f.init(2)
    state = f.update(f.predict(start), x[:, 0].to(f.states))
    now = FilterStep(state, f.predict(start), lambda s: f.update(s, x[:, 0].to(f.states)))
    back = f.smoother()(now, f.predict(state)).weights
    torch.testing.assert_close(back.sum(-1), torch.ones_like(back[:, 0]))


@pytest.mark.slow
@torch.no_grad()
def test_controlled_recordings():
    """A point pushed by a control that only hindsight locates: the smoothers of both kernel filters
    know the controls.
    """
    g = generator(0)
    u = torch.randn(2, 260, 1, dtype=F64, generator=g)
    z, states = torch.zeros(2, 1, dtype=F64), []
    for t in range(260):
        z = 0.8 * z + u[:, t] + 0.3 * torch.randn(2, 1, dtype=F64, generator=g)
        states.append(z)
    z = torch.stack(states, 1)
    x = z + 0.8 * torch.randn(z.shape, dtype=F64, generator=g)
    memory, error = [Recording(z[0], x[0], None, u[0])], {}
    for net in (KBF(), SimulatedKBF(points=100, run=2000, draws=3, dtype="float64")):
        net.prepare(memory)
        f = net.fit(memory)
        given = {"obs": x[1:, :80], "controls": u[1:, :80]}
        wrong = {**given, "controls": u[1:, :80].flip(1)}
        sides = {
            "filter": rollout(f, **given),
            "smoother": smooth(f, **given),
            "wrong": smooth(f, **wrong),
        }
        error = {
            name: (side.estimates - z[1:, :80]).square().mean().item()
            for name, side in sides.items()
        }
        assert (
            error["smoother"] < 0.97 * error["filter"] and error["smoother"] < 0.5 * error["wrong"]
        ), (net, error)


# Particles


def test_particle_step_is_its_formula():
    m = linear()
    g = generator(1)
    z, after = (
        torch.randn(2, 5, 2, dtype=F64, generator=g),
        torch.randn(2, 3, 2, dtype=F64, generator=g),
    )
    w, s = (torch.rand(2, n, dtype=F64, generator=g).log().log_softmax(-1) for n in (5, 3))
    kept, found = particle_backward(as_state_space(m), (z, w), (after, s))
    density = torch.distributions.MultivariateNormal(torch.zeros(2, dtype=F64), m.Q)
    for k, i in itertools.product(range(2), range(5)):
        total = 0.0
        for j in range(3):
            q = [
                float(w[k, n].exp() * density.log_prob(after[k, j] - m.A @ z[k, n] - m.a).exp())
                for n in range(5)
            ]
            total += float(s[k, j].exp()) * q[i] / sum(q)
        assert found[k, i].exp().item() == pytest.approx(total, rel=1e-9)
    assert torch.equal(kept, z)


def test_thinning_keeps_the_mean_and_leaves_few_alone():
    g = generator(0)
    z = torch.randn(2, 4000, 2, dtype=F64, generator=g)
    w = (1.5 * z[..., 0]).log_softmax(-1)
    few, equal = thinned(z, w, g)
    assert few.shape == (2, MAX_BACKWARD_PARTICLES, 2) and torch.allclose(
        equal.exp().sum(-1), torch.ones(2, dtype=F64)
    )
    assert (few.mean(1) - (w.exp()[..., None] * z).sum(1)).abs().max() < 4 / math.sqrt(
        MAX_BACKWARD_PARTICLES
    )
    assert thinned(few, equal, g)[0] is few


@pytest.mark.slow
@torch.no_grad()
def test_particle_smoother_is_near_the_exact_one():
    """The mean squared distance to the exact means is that of so many particles, 2 over their
    number of the smoothed variance.
    """
    m = linear()
    x, g = draw(m, 20, 15).obs, generator(1)
    start = m.m0 + gaussian_noise(torch.Size([4000]), m.P0, g)
    exact = smooth(KalmanFilter(m), x)
    found = smooth(BootstrapFilter(as_state_space(m), start, 4000), x, generator=g)
    assert exact.covariances is not None and found.covariances is not None
    variance = exact.covariances.diagonal(dim1=-2, dim2=-1).sum(-1)
    ratio = ((found.estimates - exact.estimates).square().sum(-1) / variance).mean().item()
    assert ratio < 6 / MAX_BACKWARD_PARTICLES
    assert (found.covariances - exact.covariances).abs().mean() < 0.1 * variance.mean()


@torch.no_grad()
def test_heading_smoother_is_quadrature_on_the_circle():
    model, bins, T = OrientationModel(turn=0.4, sigma_z=0.3, sigma_x=0.5), 360, 10
    angle = 2 * math.pi * torch.arange(bins, dtype=F64) / bins
    grid = torch.stack([angle.cos(), angle.sin()], -1)
    x = simulate(model, grid[:1], T, generator(3)).obs
    P = model.log_transition(grid[:, None], grid[None]).exp() * (2 * math.pi / bins)
    torch.testing.assert_close(P.sum(0), torch.ones(bins, dtype=F64))  # a density
    likelihood = model.log_likelihood(x[0][:, None], grid).exp()
    forward, w = [], torch.full((bins,), 1 / bins, dtype=F64)
    for t in range(T):
        w = P @ w * likelihood[t]
        forward.append(w)
    beta, means = torch.ones(bins, dtype=F64), []
    for t in reversed(range(T)):
        smoothed = forward[t] * beta
        means.append(smoothed / smoothed.sum() @ grid)
        beta = P.mT @ (likelihood[t] * beta)
    found = smooth(BootstrapFilter(model, grid, 5000), x, generator=generator(0)).estimates[0]
    assert (found - torch.stack(means[::-1])).norm(dim=-1).max() < 0.06


def test_densities_of_moves():
    """Of the models in the plane: each integrates to 1 over z'; of the learned one: that of what it
    draws, up to a factor.
    """
    axis = torch.linspace(-4, 4, 161, dtype=F64)
    plane, z = torch.cartesian_prod(axis, axis), tensor([[0.7, -0.4], [0.1, 1.2]])
    for model in (oscillatory(), position_model(), as_state_space(linear())):
        mass = model.log_transition(plane[:, None], z).exp().sum(0) * (axis[1] - axis[0]) ** 2
        torch.testing.assert_close(mass, torch.ones(2, dtype=F64), atol=1e-6, rtol=0)
    data = simulate(oscillatory(), oscillatory().m0[None], 80, generator(0))
    model = learn_model(Recording(data.states[0], data.obs[0]))
    drawn = model.move(z[:1].expand(4000, 2), generator(1))
    density = model.log_transition(plane, z[:1]).exp()
    mean = (density[:, None] * plane).sum(0) / density.sum()
    assert (drawn.mean(0) - mean).abs().max() < 0.02


@pytest.mark.slow
@torch.no_grad()
def test_particle_smoother_of_a_learned_and_of_a_half_known_model():
    model = oscillatory()
    data = simulate(model, model.m0[None], 240, generator(0))
    memory, x, z = (
        Recording(data.states[0, :200], data.obs[0, :200]),
        data.obs[:, 200:],
        data.states[:, 200:],
    )
    half = ObservationModel(model, fit_ridge_map(memory.states, memory.obs))
    for f in (LearnedParticleFilter(300).fit(memory), BootstrapFilter(half, memory.states, 300)):
        sides = rollout(f, x, generator=generator(0)), smooth(f, x, generator=generator(0))
        filtered, smoothed = ((side.estimates - z).square().sum(-1).mean().item() for side in sides)
        assert smoothed < 0.95 * filtered


# Filters inside of others


class Double(nn.Module):
    """An "encoder": images of 1 x 1 x 2 -> their entries."""

    features = 2

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


@torch.no_grad()
def test_coded_and_scaled_filters_smooth_inside():
    m = linear()
    inner, x = (
        SimulatedKBF(points=60, run=600, dtype="float64").fit(Recording(*one(m, 60))),
        draw(m, 2, 9, seed=4).obs,
    )
    plain = smooth(inner, x)
    code = Encoding([Double()], 2).double()
    code.heads[0].weight.copy_(torch.eye(2))
    code.heads[0].bias.zero_()
    encoded = smooth(EncodedFilter(code, inner, F64), x[:, :, None, None])
    torch.testing.assert_close(encoded.estimates, plain.estimates)
    states, obs = one(m, 60)
    scaling = Scaling().prepare([Recording(3 * states + 7, 0.1 * obs - 2)])
    net = SimulatedKBF(points=60, run=600, dtype="float64")
    own = net.fit(scaling(Recording(3 * states + 7, 0.1 * obs - 2)))
    found = smooth(ScaledFilter(scaling, own, F64), 0.1 * x - 2)
    within = smooth(own, scaling.observation(0.1 * x - 2))
    torch.testing.assert_close(found.estimates, scaling.z_mean + scaling.z_scale * within.estimates)
    assert found.covariances is not None and within.covariances is not None
    torch.testing.assert_close(found.covariances, scaling.covariances(within.covariances))


# Prediction


@torch.no_grad()
@pytest.mark.parametrize("kind", ["kalman", "kbf", "lstm", "frame"])
def test_prediction_ahead_is_masked_steps(kind):
    m, h = linear(), 3
    memory, x = Recording(*one(m, 60)), draw(m, 2, 7, seed=4).obs
    nets: dict[str, Any] = {
        "kalman": LearnedKalman(),
        "kbf": KBF(),
        "lstm": LSTMFilter(2, 2).double(),
        "frame": FrameRegression(),
    }
    net = nets[kind]
    net.prepare([memory])
    f = net.fit([memory])
    found = predict_ahead(f, x, h)
    assert found.shape == (2, h, 7, 2)
    for t in range(7):
        longer = torch.cat([x[:, : t + 1], torch.full((2, h, 2), torch.nan, dtype=F64)], 1)
        mask = (torch.arange(t + 1 + h) <= t).expand(2, -1)
        torch.testing.assert_close(
            found[:, :, t], rollout(f, longer, mask=mask).estimates[:, t + 1 :]
        )


def test_prediction_ahead_takes_the_controls_to_come():
    m = linear(B=tensor([[0.7], [-0.5]]))
    u, x = torch.randn(1, 6, 1, dtype=F64, generator=generator(3)), draw(m, 1, 6).obs
    f = KalmanFilter(m)
    found = predict_ahead(f, x, 2, controls=u)
    state = rollout(f, x[:, :3], controls=u[:, :3]).state
    for k in (3, 4):
        state = f.predict(state, control=u[:, k])
        torch.testing.assert_close(found[:, k - 3, 2], state.mean)
    assert (
        found[:, 0, -1].isnan().all()
        and found[:, 1, -2].isnan().all()
        and found[:, 1, :-2].isfinite().all()
    )


# Errors


def test_what_has_no_smoother_says_so():
    m = linear()
    memory, x = Recording(*one(m, 60)), draw(m, 1, 5).obs
    for net in (LSTMFilter(2, 2).double(), FrameRegression()):
        net.prepare([memory])
        with pytest.raises(ValueError, match=r"has no smoother\. Models that have one: kbf"):
            smooth(net.fit([memory]), x)
        with pytest.raises(ValueError, match="has no smoother"):
            smooth(EncodedFilter(Encoding([Double()], 2), net.fit([memory]), F64), x)
    with pytest.raises(ValueError, match=r"density of a move: Blind has no log_transition"):
        smooth(BootstrapFilter(reference.Blind(), memory.states, 10), x)
    plain = KernelBayesFilter(
        memory.states,
        Operator(torch.eye(60, dtype=F64)),
        Operator(torch.eye(60, dtype=F64)),
        Table(x),
    )
    with pytest.raises(ValueError, match="built without the pairs of the recording"):
        smooth(plain, x)


def test_impossible_lags_and_horizons():
    f, x = KalmanFilter(linear()), draw(linear(), 1, 5).obs
    with pytest.raises(ValueError, match=r"lag is the number of later observations .* got -1"):
        smooth(f, x, lag=-1)
    with pytest.raises(ValueError, match="horizon of a prediction must be at least 1, got 0"):
        predict_ahead(f, x, 0)
    with pytest.raises(ValueError, match="a single recording is obs"):
        smooth(f, x[0])
    particles = ParticleFilter(as_state_space(linear()), 20).fit(Recording(*one(linear(), 20)))
    assert smooth(particles, x[:, :1]).estimates.shape == (1, 1, 2)
