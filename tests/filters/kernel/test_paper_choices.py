"""Choices of the papers that `KBF` has as settings: features, point estimate, start."""

from __future__ import annotations

import pytest
import torch

from kbf.data.dsprites import DSprites, position_model
from kbf.filters.kernel.feature_kbf import FeatureKBF
from kbf.filters.kernel.filter import KernelState
from kbf.filters.kernel.kbf import KBF
from kbf.filters.kernel.simulated_kbf import SimulatedKBF
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.rkhs.embeddings import Embedding, cme_weights_primal
from kbf.rkhs.features import RandomFourierFeatures, random_fourier
from kbf.rkhs.kernels import gaussian
from kbf.ssm import oscillatory, rotate, rotation, simulate

F64 = torch.float64


@pytest.fixture
def run() -> Recording:
    start = torch.tensor([1.0, 0.0], dtype=F64)
    return simulate(rotation(), start, 140, torch.Generator().manual_seed(0))


def split(run: Recording) -> tuple[list[Recording], torch.Tensor]:
    return [Recording(run.states[:120], run.obs[:120])], run.obs[None, 120:]


def test_random_fourier_features_as_a_module(normal):
    width = torch.tensor(0.8, dtype=F64)
    module = RandomFourierFeatures(width, 2, 40, seed=3)
    other = random_fourier(
        2, 40, bandwidth=0.8, generator=torch.Generator().manual_seed(3), dtype=F64
    )
    x = normal(5, 2)
    torch.testing.assert_close(module(x), other(x))
    assert RandomFourierFeatures(width, 2, 41)(x).shape == (5, 42)
    assert set(module.state_dict()) == {"frequencies", "bandwidth"}


@torch.no_grad()
def test_a_filter_of_random_fourier_features_comes_to_that_of_full_matrices(run):
    """The difference of estimates falls as one over the root of the number of features."""
    memory, new = split(run)
    settings = {"factors": (0.7, 0.7, 0.9), "regs": (1e-2, 1e-2, 1e-2), "learn": False}

    def estimates(**changes):
        model = KBF(**settings | changes)
        model.prepare(memory)
        return rollout(model.fit(memory), new).estimates

    exact = estimates(rank=None)
    gaps = [
        (estimates(rank=p, feature_map="random_fourier") - exact).square().mean().sqrt().item()
        for p in (20, 800)
    ]
    assert gaps[1] < 0.4 * gaps[0] and gaps[1] < 0.05
    assert (estimates(rank=120, tol=0.0) - exact).abs().max() < 1e-3


@torch.no_grad()
def test_the_pre_image_is_the_mode_of_the_embedding(run):
    memory, new = split(run)
    model = KBF(point_estimate="preimage", learn=False)
    model.prepare(memory)
    states: list = []
    found = rollout(model.fit(memory), new, states=states).estimates[0]
    width = model.log_bandwidth.exp()[0].item()
    grid = torch.cartesian_prod(*[torch.linspace(-1.6, 1.6, 65, dtype=F64)] * 2)
    z = memory[0].states
    for t in (0, 7, 19):
        w = states[t].weights[0]
        height = gaussian(found[t : t + 1], z, bandwidth=width) @ w
        assert height >= (gaussian(grid, z, bandwidth=width) @ w).max() - 1e-6
        assert (found[t] - w @ z).abs().max() > 1e-4  # it is not the mean
    error = (found - run.states[120:]).square().sum(-1).mean()
    assert error < 0.12
    one = Embedding(z, states[3].weights[0]).mode(lambda a, b: gaussian(a, b, bandwidth=width))
    torch.testing.assert_close(one, found[3])


@torch.no_grad()
@pytest.mark.parametrize("rank", [None, 120])
@pytest.mark.parametrize("rule", ["importance_weighted", "original"])
def test_the_start_is_the_regression_on_the_first_observation(run, rank, rule):
    """Equation 10 of Fukumizu et al.; then the filter goes on from these weights."""
    memory, new = split(run)
    ratio = "tikhonov" if rule == "original" else "kulsif"
    model = KBF(rule=rule, ratio=ratio, rank=rank, tol=0.0, normalise=False, learn=False)
    model.prepare(memory)
    f = model.fit(memory)
    state = f.start(new[:, 0], reg=1e-3)
    x = memory[0].obs
    width = model.log_bandwidth.exp()[2]
    G, g = (gaussian(x, a, bandwidth=width) for a in (x, new[:, 0]))
    expected = torch.linalg.solve(G + 120 * 1e-3 * torch.eye(120, dtype=F64), g)[:, 0]
    torch.testing.assert_close(state.weights[0], expected, rtol=1e-3, atol=1e-6)
    on = rollout(f, new[:, 1:], state=state).estimates[0]
    by_hand = f.update(f.predict(KernelState(expected[None])), new[:, 1])
    torch.testing.assert_close(on[0], f.estimate(by_hand)[0], rtol=1e-3, atol=1e-5)
    scaled = KBF(rank=rank, tol=0.0, learn=False)
    scaled.prepare(memory)
    assert scaled.fit(memory).start(new[:, 0], 1e-3).weights.sum().item() == pytest.approx(1)


@torch.no_grad()
def test_the_start_over_several_draws_and_where_there_is_none(run):
    """The conditional mean over all 3 n draws, summed over those of each state."""
    memory, new = split(run)
    f = SimulatedKBF(points=30, run=300, draws=3, dtype="float64").fit(memory)
    found = f.start(new[:, 0], reg=1e-2).weights[0]
    update = f.rule
    generator = torch.Generator().manual_seed(0)
    draws = torch.randn(30, 3, 2, dtype=F64, generator=generator)
    rebuilt = type(update)(update.psi, draws, 1e-2, dtype=F64)
    f.rule = rebuilt
    psi = update.psi(draws.flatten(0, 1)).to(F64)
    w = cme_weights_primal(psi, update.psi(new[:, 0])[0].to(F64), 1e-2).unflatten(0, (30, 3))
    expected = w.sum(1) / w.sum()
    torch.testing.assert_close(f.start(new[:, 0], 1e-2).weights[0], expected, rtol=1e-6, atol=1e-9)
    assert found.sum().item() == pytest.approx(1)
    f.rule = torch.nn.Identity()
    with pytest.raises(ValueError, match="Identity is no regression over the memory's"):
        f.start(new[:, 0], 1e-2)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"feature_map": "fourier"}, "feature_map must be one of nystrom, random_fourier"),
        ({"feature_map": "random_fourier", "rank": None}, "needs a rank"),
        ({"feature_map": "random_fourier", "kernel": "laplace"}, "needs kernel=gaussian"),
        ({"point_estimate": "preimage", "kernel": "imq", "learn": False}, "needs kernel=gaussian"),
        ({"point_estimate": "preimage"}, "the pre-image has no gradient"),
        ({"select": "kulsif"}, "median, loo, paper, kulsif_loo, kernel_mean_cv"),
    ],
)
def test_what_cannot_be_set(settings, said):
    with pytest.raises(ValueError, match=said):
        KBF(**settings)


def test_what_features_and_controls_cannot_have(run):
    with pytest.raises(ValueError, match="select=kernel_mean_cv compares kernels of the obs"):
        FeatureKBF(torch.nn.Linear(2, 3), select="kernel_mean_cv")
    memory = Recording(run.states, run.obs, None, run.obs[:, :1])
    model = KBF(feature_map="random_fourier")
    model.prepare([memory])
    with pytest.raises(ValueError, match="controls have no feature_map=random_fourier"):
        model.fit([memory])


def test_dsprites_with_the_printed_angle():
    """Equation 5 of Xu et al.: sin(M theta) in place of sin(M (theta + omega))."""
    z = torch.tensor([[0.3, -0.8], [1.0, 0.2]], dtype=F64)
    printed = position_model(moved_angle=False)
    expected = oscillatory(moved_angle=False).f(z)
    torch.testing.assert_close(printed.f(z), expected)
    assert (position_model().f(z) - expected).abs().max() > 0.05
    data = DSprites(5, 3, 0, problem=printed)
    states = data.train[0].states
    noise = states[1:] - printed.f(states[:-1])
    usual = DSprites(5, 3, 0).train[0].states
    torch.testing.assert_close(noise, usual[1:] - position_model().f(usual[:-1]))


def test_the_two_readings_of_equation_5_are_one_system_seen_from_another_angle(normal):
    """f_moved(z) = R(-omega) f_printed(R(omega) z): errors of rotation-invariant filters agree."""
    z, omega = normal(200, 2), torch.tensor(0.4, dtype=F64)
    printed, moved = oscillatory(moved_angle=False), oscillatory()
    torch.testing.assert_close(rotate(printed.f(rotate(z, omega)), -omega), moved.f(z))
