"""Kernel ridge maps against dense Gaussian processes and brute-force refits in NumPy; the model and
the filter made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

from kbf.densities import learned_ssm
from kbf.densities.learned_ssm import LearnedModel, learn_model
from kbf.densities.per_sensor import SelectedSensors, find_sensors
from kbf.densities.ridge import fit_ridge_map
from kbf.densities.selection import DENSITIES, fit_density
from kbf.filters.particle.learned import LearnedParticleFilter
from kbf.filters.protocols import Filter, FilterModel
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.rkhs.kernels import KERNELS, arcsine, median_distance
from kbf.ssm import StateSpace, oscillatory, rotation, simulate

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def pairs(normal) -> tuple[Tensor, Tensor]:
    """25 inputs in the plane, two outputs with correlated noise, far from zero."""
    u = normal(25, 2)
    noise = 0.2 * normal(25, 2) @ torch.tensor([[1.0, 0.5], [0.0, 0.7]], dtype=F64)
    return u, torch.stack([u[:, 0].sin() + 5, u[:, 0] * u[:, 1] - 3], -1) + noise


def wide_network(a: np.ndarray, b: np.ndarray, bias: float, slope: float) -> float:
    """The kernel of a wide network of sigmoids with weights N(0, slope^2) and offsets N(0, bias^2):
    GPML, equation 4.29.
    """
    s = np.array([[bias**2 + slope**2 * (p @ q) for q in (a, b)] for p in (a, b)])
    return 2 / math.pi * math.asin(2 * s[0, 1] / math.sqrt((1 + 2 * s[0, 0]) * (1 + 2 * s[1, 1])))


class Choice(NamedTuple):
    """One setting: what makes `fit_ridge_map` try nothing else, and the kernel that it stands for,
    entry by entry.
    """

    only: dict[str, Any]
    gram: Callable[[Tensor, Tensor, Tensor], np.ndarray]
    reg: float


def gaussian_choice(factor: float, reg: float) -> Choice:
    def gram(a: Tensor, b: Tensor, u: Tensor) -> np.ndarray:
        return reference.gaussian_gram(a.numpy(), b.numpy(), factor * median_distance(u).item())

    return Choice({"factors": (factor,), "slopes": (), "regs": (reg,)}, gram, reg)


def arcsine_choice(slope: float, bias: float, reg: float) -> Choice:
    def gram(a: Tensor, b: Tensor, u: Tensor) -> np.ndarray:
        size = math.sqrt(np.square(u.numpy()).sum(-1).mean())
        return reference.gram(
            partial(wide_network, bias=bias, slope=slope / size), a.numpy(), b.numpy()
        )

    return Choice({"factors": (), "slopes": (slope,), "biases": (bias,), "regs": (reg,)}, gram, reg)


CHOICES = [gaussian_choice(1.0, 1e-2), arcsine_choice(3.0, 1.0, 1e-2)]
both_kernels = pytest.mark.parametrize("choice", CHOICES, ids=["gaussian", "arcsine"])


def one_map(u: Tensor, y: Tensor, choice: Choice = CHOICES[0], **changes) -> learned_ssm.RidgeMap:
    return fit_ridge_map(u, y, **{**choice.only, **changes})


def far_and_near(normal) -> Tensor:
    return torch.cat([normal(6, 2), 4 * normal(6, 2), torch.full((1, 2), 50.0, dtype=F64)])


# one map


@both_kernels
def test_mean_is_dense_kernel_ridge_regression(pairs, normal, choice):
    u, y, at = *pairs, far_and_near(normal)
    offset = y.numpy().mean(0)
    expected = offset + choice.gram(at, u, u) @ np.linalg.solve(
        choice.gram(u, u, u) + 25 * 1e-2 * np.eye(25), y.numpy() - offset
    )
    mean, _ = one_map(u, y, choice).predict(at)
    np.testing.assert_allclose(mean.numpy(), expected, atol=1e-3 * np.abs(expected).max())
    if choice is CHOICES[0]:
        np.testing.assert_allclose(mean[-1].numpy(), offset, rtol=1e-12)


@both_kernels
def test_scale_is_the_predictive_variance_of_a_gaussian_process(pairs, normal, choice):
    """In units of the noise S: kernel k / (n reg), noise 1.

    Far away from all points a Gaussian kernel makes it 1 + 1 / (n reg).
    """
    u, y, at = *pairs, far_and_near(normal)
    ridge = 25 * 1e-2
    G, g, own = (choice.gram(a, b, u) / ridge for a, b in ((u, u), (at, u), (at, at)))
    expected = [
        1 + own[i, i] - g[i] @ np.linalg.solve(G + np.eye(25), g[i]) for i in range(len(at))
    ]
    _, scale = one_map(u, y, choice).predict(at)
    np.testing.assert_allclose(scale.numpy(), expected, rtol=1e-3)
    if choice is CHOICES[0]:
        assert scale[-1].item() == pytest.approx(1 + 1 / ridge)
        few = one_map(u, y, rank=5).predict(at)[1]
        assert few[-1].item() == pytest.approx(1 + 1 / ridge), "with few landmarks as well"


def held_out(u: Tensor, y: Tensor, choice: Choice) -> tuple[np.ndarray, np.ndarray]:
    """Residual and scale of each point under the process fitted without it; offset, kernel and
    ridge n reg are those of all.
    """
    n = len(u)
    G, centred = choice.gram(u, u, u) / (n * choice.reg), y.numpy() - y.numpy().mean(0)
    residuals, scales = [], []
    for i in range(n):
        rest = [j for j in range(n) if j != i]
        A = G[np.ix_(rest, rest)] + np.eye(n - 1)
        residuals.append(centred[i] - G[i, rest] @ np.linalg.solve(A, centred[rest]))
        scales.append(1 + G[i, i] - G[i, rest] @ np.linalg.solve(A, G[rest, i]))
    return np.array(residuals), np.array(scales)


@both_kernels
def test_noise_is_that_of_brute_force_refits(pairs, choice):
    u, y = pairs
    residuals, scales = held_out(u, y, choice)
    expected = (residuals / scales[:, None]).T @ residuals / 25
    np.testing.assert_allclose(one_map(u, y, choice).noise.numpy(), expected, rtol=5e-3, atol=1e-4)


@pytest.mark.parametrize("steep", [False, True], ids=["smooth", "directions"])
def test_choice_is_the_least_log_loss_of_brute_force_refits(pairs, steep):
    """The predictive log loss of each left-out point under N(mean, scale S), with S the most
    likely.

    Outputs that follow the direction of the input from the origin make the arcsine kernel the
    better one. The smooth outputs have different units, which the loss does not mind, while least
    squares would choose otherwise.
    """
    u, y = pairs
    y = (
        u / u.norm(dim=-1, keepdim=True) + 0.1 * (y - y.mean(0))
        if steep
        else y * torch.tensor([1.0, 0.1], dtype=F64)
    )
    factors, slopes, biases, regs = (0.3, 0.7, 1.5), (1.0, 30.0), (0.1, 1.0), (1e-3, 1e-2, 0.1)
    choices = [gaussian_choice(f, reg) for f in factors for reg in regs]
    choices += [arcsine_choice(s, b, reg) for s in slopes for b in biases for reg in regs]
    losses, squares = [], []
    for choice in choices:
        e, s = held_out(u, y, choice)
        squares.append(np.square(e).mean())
        S = (e / s[:, None]).T @ e / 25
        exponents = np.einsum("ni,ij,nj->n", e, np.linalg.inv(S), e) / s
        losses.append(np.mean(0.5 * exponents + 0.5 * np.log(np.linalg.det(S)) + np.log(s)))
    first, second = np.sort(losses)[:2]
    assert second - first > 1e-3, "the case must be decided"
    assert steep or np.argmin(squares) != np.argmin(losses)
    best = choices[int(np.argmin(losses))]
    chosen = fit_ridge_map(u, y, factors=factors, slopes=slopes, biases=biases, regs=regs)
    np.testing.assert_allclose(
        chosen.kernel(u, u).numpy(), best.gram(u, u, u), rtol=1e-8, atol=1e-8
    )
    assert chosen.ridge.item() == pytest.approx(25 * best.reg)
    assert ("slopes" in best.only and best.only["slopes"] != ()) == steep


def test_log_density_is_the_normal_density(pairs, normal):
    u, y = pairs
    fitted, at, values = one_map(u, y), normal(6, 2), 3 * normal(4, 1, 2)
    mean, scale = fitted.predict(at)
    truth, constant = (
        np.empty((4, 6)),
        -0.5 * np.linalg.slogdet(2 * math.pi * fitted.noise.numpy())[1],
    )
    assert fitted.constant.item() == pytest.approx(constant)
    for i in range(4):
        for j in range(6):
            cov, residual = (scale[j] * fitted.noise).numpy(), (values[i, 0] - mean[j]).numpy()
            exponent = -0.5 * residual @ np.linalg.inv(cov) @ residual
            truth[i, j] = exponent - 0.5 * np.linalg.slogdet(2 * math.pi * cov)[1]
    np.testing.assert_allclose(fitted.log_density(values, at).numpy(), truth, rtol=1e-9)
    np.testing.assert_allclose(
        fitted.log_density_given(values, mean, scale).numpy(), truth - constant, rtol=1e-9
    )


def test_draws_have_mean_scale_and_noise(pairs, normal):
    """20,000 draws at three points: means and covariances within 4.5 standard errors (18
    comparisons).
    """
    u, y = pairs
    fitted = one_map(u, y)
    at = torch.tensor([[0.0, 0.0], [1.0, -1.0], [9.0, 9.0]], dtype=F64)
    draws = fitted.sample(at.expand(20_000, 3, 2), generator())
    mean, scale = fitted.predict(at)
    cov = scale[:, None, None] * fitted.noise
    spread = cov.diagonal(dim1=-2, dim2=-1)
    assert ((draws.mean(0) - mean).abs() < 4.5 * (spread / 20_000).sqrt()).all()
    centred = draws - mean
    found = torch.einsum("snq,snr->nqr", centred, centred) / 20_000
    error = ((spread[:, :, None] * spread[:, None, :] + cov.square()) / 20_000).sqrt()  # Isserlis
    assert ((found - cov).abs() < 4.5 * error).all()
    again = fitted.sample(at.expand(20_000, 3, 2), generator())
    assert torch.equal(draws, again)


def test_float32_answers_are_those_of_float64(pairs, normal):
    u, y, at = *pairs, normal(7, 2)
    single, double = one_map(u.float(), y.float()), one_map(u, y)
    assert single.coefficients.dtype == F64
    for found, expected in zip(single.predict(at.float()), double.predict(at), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert single.sample(at.float(), generator()).dtype == torch.float32
    assert single.log_density(y[:7].float(), at.float()).dtype == torch.float32


def test_constant_components_do_no_harm(pairs):
    """A sensor that is stuck: its noise is almost nothing, and the rest is what it would be without
    it.
    """
    u, y = pairs
    stuck = torch.cat([y, torch.full((25, 1), 7.0, dtype=F64)], 1)
    for fitted in (one_map(u, stuck), fit_ridge_map(u, stuck, factors=(0.5, 1.0), slopes=(3.0,))):
        mean, scale = fitted.predict(u)
        torch.testing.assert_close(mean[:, 2], stuck[:, 2])
        assert torch.isfinite(fitted.log_density(stuck, u)).all()
        assert torch.isfinite(fitted.sample(u, generator())).all()
        assert torch.isfinite(scale).all()
    torch.testing.assert_close(one_map(u, stuck).predict(u)[0][:, :2], one_map(u, y).predict(u)[0])


def test_errors(pairs):
    u, y = pairs
    with pytest.raises(ValueError, match="at least 10 pairs, got 9"):
        fit_ridge_map(u[:9], y[:9])
    with pytest.raises(ValueError, match="outputs that vary"):
        fit_ridge_map(u, torch.ones_like(y))


# the model


def recordings(*lengths: int) -> list[Recording]:
    model = rotation()
    return [simulate(model, model.m0, n, generator(seed)) for seed, n in enumerate(lengths)]


@pytest.fixture
def few_kernels(monkeypatch):
    """Four settings in place of hundreds."""
    monkeypatch.setattr(
        learned_ssm,
        "fit_ridge_map",
        partial(fit_ridge_map, factors=(0.7, 1.4), slopes=(), regs=(1e-3, 1e-2)),
    )


def test_model_regresses_on_pairs_within_sequences_and_on_observed_steps(monkeypatch):
    """The inputs and outputs of both fits, of two sequences with a missing observation."""
    a, b = recordings(14, 12)
    mask = torch.ones(12, dtype=torch.bool)
    mask[3] = False
    b = b._replace(mask=mask, obs=b.obs.clone())
    b.obs[3] = math.nan
    seen = []
    monkeypatch.setattr(
        learned_ssm, "fit_ridge_map", lambda u, y, **_: seen.append((u, y)) or "map"
    )
    assert learn_model([a, b]) == LearnedModel("map", "map")  # pyright: ignore[reportArgumentType]
    (source, target), (states, obs) = seen
    torch.testing.assert_close(source, torch.cat([a.states[:-1], b.states[:-1]]))
    torch.testing.assert_close(target, torch.cat([a.states[1:], b.states[1:]]))
    torch.testing.assert_close(states, torch.cat([a.states, b.states[mask]]))
    torch.testing.assert_close(obs, torch.cat([a.obs, b.obs[mask]]))


def test_model_is_a_state_space(few_kernels):
    model = learn_model(recordings(40))
    assert isinstance(model, StateSpace)
    z = torch.randn(3, 5, 2, dtype=F64, generator=generator())
    assert model.move(z, generator()).shape == model.observe(z, generator()).shape == (3, 5, 2)
    torch.testing.assert_close(model.move(z, generator()), model.transition.sample(z, generator()))
    torch.testing.assert_close(
        model.observe(z, generator()), model.observation.sample(z, generator())
    )
    x = torch.randn(3, 1, 2, dtype=F64, generator=generator(1))
    torch.testing.assert_close(
        model.log_likelihood(x, z), model.observation.log_density(x.expand(3, 5, 2), z)
    )


def test_merged_densities_give_the_numbers_of_the_model(few_kernels):
    """Draws are equal; log likelihoods are, up to a constant."""
    data = recordings(60)
    gappy = [each._replace(obs=each.obs.clone()) for each in data]
    gappy[0].obs[::5, 0] = torch.nan
    sensors = SelectedSensors()
    sensors.choose(gappy[0].states, gappy[0].obs, "gaussian")
    z = torch.randn(3, 5, 2, dtype=F64, generator=generator())
    x = torch.randn(3, 1, 2, dtype=F64, generator=generator(1))
    for each, densities in ((data, "gaussian"), (gappy, sensors)):
        model = learn_model(each, ("gaussian", densities))
        merged = model.merged()
        for name in ("move", "observe"):
            draws = (getattr(one, name)(z, generator()) for one in (merged, model))
            torch.testing.assert_close(*draws, rtol=1e-6, atol=1e-8)
        differences = merged.log_likelihood(x, z) - model.log_likelihood(x, z)
        torch.testing.assert_close(differences, differences[:1, :1].expand(3, 5))
    branches = fit_density("branches", data[0].states, data[0].obs)
    assert learned_ssm.merged(branches) is branches


@pytest.mark.parametrize("order", [1, 2])
def test_a_move_of_a_lagged_model_adds_the_drawn_change(few_kernels, order):
    data = recordings(60)
    model = learned_ssm.learn_lagged_model(data, order=order)
    model = replace(model, extra=torch.zeros_like(model.extra))
    z, change = data[0].states[5:9], torch.diff(data[0].states[4:9], dim=0)
    state = torch.cat([z, change], 1)[:, : order * z.shape[1]]
    moved, drawn = model.move(state, generator()), model.change.sample(state, generator())
    after = model.manifold.project(z + drawn)
    torch.testing.assert_close(moved, torch.cat([after, after - z], 1)[:, : order * z.shape[1]])


def test_observations_of_a_lagged_model_are_fitted_once(monkeypatch, few_kernels):
    """Models of both orders have the same density of observations."""
    data = recordings(60)
    first = learned_ssm.learn_lagged_model(data, order=1)
    again = learned_ssm.learn_lagged_model(data, order=2)
    fits: list[int] = []
    fit = learned_ssm.fit_ridge_map
    monkeypatch.setattr(
        learned_ssm, "fit_ridge_map", lambda *a, **b: fits.append(1) or fit(*a, **b)
    )
    second = learned_ssm.learn_lagged_model(data, order=2, observation=first.observation)
    assert len(fits) == 1
    z = torch.randn(5, 4, dtype=F64, generator=generator())
    for name in ("move", "observe"):
        torch.testing.assert_close(
            getattr(second, name)(z, generator()), getattr(again, name)(z, generator())
        )


def test_model_finds_the_dynamics(few_kernels):
    """From 200 steps of the rotation model, whose noises are 0.04 I: mean errors are small, noises
    within a third.
    """
    truth, model = rotation(), learn_model(recordings(200))
    z = recordings(1, 50)[1].states
    assert (model.transition.predict(z)[0] - truth.f(z)).square().sum(-1).mean() < 0.015
    assert (model.observation.predict(z)[0] - z).square().sum(-1).mean() < 0.006
    for noise in (model.transition.noise, model.observation.noise):
        assert (noise - 0.04 * torch.eye(2, dtype=F64)).abs().max() < 0.013


# lagged models


def steered(*lengths: int) -> list[Recording]:
    """Recordings of two components with a control of one."""
    found = []
    for seed, n in enumerate(lengths):
        draw = generator(seed)
        z = torch.randn(n, 2, dtype=F64, generator=draw).cumsum(0) / 3
        found.append(Recording(z, z.sin(), None, torch.rand(n, 1, dtype=F64, generator=draw)))
    return found


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("controlled", [False, True])
def test_lagged_models_regress_changes_on_states_step_by_step(monkeypatch, order, controlled):
    """Recordings without a change of their own are left out of the regression only."""
    data = steered(14, order, 13)
    if not controlled:
        data = [each._replace(controls=None) for each in data]
    fits = []

    def watched(u: Tensor, y: Tensor, **settings: Any) -> learned_ssm.RidgeMap:
        fits.append((u, y, settings))
        return fit_ridge_map(u, y, factors=(1.0,), slopes=(), regs=(1e-2,))

    monkeypatch.setattr(learned_ssm, "fit_ridge_map", watched)
    model = learned_ssm.learn_lagged_model(data, order=order)
    before, change, acted = [], [], []
    for each in (data[0], data[2]):
        for t in range(order - 1, len(each.states) - 1):
            lag = [each.states[t] - each.states[t - 1]] if order == 2 else []
            before.append(torch.cat([each.states[t], *lag]))
            change.append(each.states[t + 1] - each.states[t])
            acted.append(math.nan if each.controls is None else each.controls[t + 1])
    (inputs, outputs, settings), (seen, obs, _) = fits
    expected = torch.stack(before)
    if controlled:
        assert model.join is not None
        expected = model.join(expected, torch.stack(acted))
    torch.testing.assert_close(inputs, expected)
    torch.testing.assert_close(outputs, torch.stack(change))
    assert settings == {"rank": learned_ssm.CHANGE_FEATURES}
    torch.testing.assert_close(seen, torch.cat([each.states for each in data]))
    torch.testing.assert_close(obs, torch.cat([each.obs for each in data]))
    assert model.controlled == int(controlled)
    assert (model.order, model.d, model.manifold.circles) == (order, 2, ())
    states = learned_ssm.all_states([data[0], data[2]], order)
    last = [
        torch.cat([each.states[t], *([each.states[t] - each.states[t - 1]] if order == 2 else [])])
        for each in (data[0], data[2])
        for t in range(order - 1, len(each.states))
    ]
    torch.testing.assert_close(states, torch.stack(last))


def test_a_control_changes_the_move_of_a_lagged_model(few_kernels):
    model = learned_ssm.learn_lagged_model(steered(60))
    s = torch.randn(5, 4, dtype=F64, generator=generator())
    moved = [model.move(s, generator(1), control=c * torch.ones(1, dtype=F64)) for c in (0.0, 0.9)]
    assert not torch.allclose(*moved)
    drawn = model.change.sample(model.joined(s, 0.9 * torch.ones(1, dtype=F64)), generator(1))
    torch.testing.assert_close(moved[1][:, :2], s[:, :2] + drawn)


@pytest.mark.parametrize("inflation", [1.0, 1.7])
def test_inflation_is_of_the_standard_deviation_of_moves(few_kernels, inflation):
    """Noise S of changes and an independent extra noise: inflation^2 S together; on the circle
    twice as much.
    """
    data = recordings(60)
    model = learned_ssm.learn_lagged_model(data, inflation=inflation)
    total = model.change.noise + model.extra @ model.extra.mT
    torch.testing.assert_close(total, inflation**2 * model.change.noise)
    angles = torch.atan2(data[0].states[:, 1], data[0].states[:, 0])[:, None]
    pose = torch.cat([angles.cos(), angles.sin(), data[0].states[:, :1]], 1)
    turning = learned_ssm.learn_lagged_model(Recording(pose, data[0].obs), inflation=inflation)
    assert turning.manifold.circles == (0,)
    root = torch.linalg.cholesky(turning.change.noise)
    for i, along in enumerate((2.0, 2.0, 1.0)):
        torch.testing.assert_close(
            turning.extra[i], math.sqrt(inflation**2 * along - 1) * root[i], rtol=1e-6, atol=1e-9
        )


def test_draws_of_one_state_evaluate_the_observation_once(few_kernels):
    """The same draws as of copies of the state, whose regression is evaluated at each."""
    model = learned_ssm.learn_lagged_model(recordings(60))
    s = torch.randn(3, 1, 4, dtype=F64, generator=generator())
    once = s.expand(3, 6, 4)
    draws = [model.observe(each, generator(1)) for each in (once, once.contiguous())]
    torch.testing.assert_close(*draws)
    assert draws[0].shape == (3, 6, 2)
    x = torch.randn(3, 6, 2, dtype=F64, generator=generator(2))
    torch.testing.assert_close(
        model.log_likelihood(x, once), model.observation.log_density(x, once[..., :2])
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"order": 0}, "order 1 or 2 and an inflation of at least 1, got 0 and 1.0"),
        ({"order": 3}, "got 3 and 1.0"),
        ({"inflation": 0.99}, "got 2 and 0.99"),
        ({"inflation": math.nan}, "got 2 and nan"),
    ],
)
def test_settings_of_lagged_models_that_there_are_not(settings, message):
    with pytest.raises(ValueError, match=message):
        learned_ssm.learn_lagged_model(recordings(30), **settings)


def test_lagged_models_need_a_change():
    for order in (1, 2):
        short = steered(order, order)
        with pytest.raises(ValueError, match=f"order {order} needs a recording of at least"):
            learned_ssm.learn_lagged_model(short, order=order)


def test_densities_of_a_model_are_fitted_to_drawn_pairs_of_many(monkeypatch):
    """At most `MAX_PAIRS`, and states stay with their observations and controls."""
    monkeypatch.setattr(learned_ssm, "MAX_PAIRS", 20)
    (data,) = steered(50)
    fits = []
    monkeypatch.setattr(
        learned_ssm, "fit_ridge_map", lambda u, y, **_: fits.append((u, y)) or "map"
    )
    model = learn_model([data])
    (inputs, target), (seen, obs) = fits
    assert len(inputs) == len(seen) == 20
    assert model.controlled == 1
    assert model.join is not None
    assert data.controls is not None
    every = model.join(data.states[:-1], data.controls[1:])
    place = (inputs[:, None] - every).abs().sum(-1).argmin(1)
    assert len(place.unique()) == 20
    torch.testing.assert_close(inputs, every[place])
    torch.testing.assert_close(target, data.states[1:][place])
    torch.testing.assert_close(obs, seen.sin())


# the filter


@pytest.mark.slow
def test_particle_filter_on_the_learned_model(few_kernels):
    """It runs on the fitted maps, starts from the training states, and beats the observations
    themselves.
    """
    a, b, test = recordings(60, 30, 40)
    recipe = LearnedParticleFilter(particles=300)
    recipe.prepare([a, b], None)
    filter = recipe.fit([a, b])
    assert isinstance(recipe, FilterModel)
    assert isinstance(filter, Filter)
    start = filter.init(2, generator=generator())
    assert start.particles.shape == (2, 300, 2)
    assert (start.particles[:, :, None] == torch.cat([a.states, b.states])).all(-1).any(-1).all()
    estimates = rollout(filter, test.obs[None], generator=generator()).estimates[0]
    error = (estimates - test.states).square().sum(-1).mean()
    assert error < 0.95 * (test.obs - test.states).square().sum(-1).mean()


def test_particle_filter_refuses_a_memory_it_cannot_learn_from():
    (short,) = recordings(10)
    with pytest.raises(ValueError, match="at least 10 pairs, got 9"):
        LearnedParticleFilter().fit(short)
    with pytest.raises(ValueError, match=r"fit\(\) needs a memory"):
        LearnedParticleFilter().fit(None)
    images = short._replace(obs=short.obs[:, None].expand(-1, 3, 2))
    with pytest.raises(ValueError, match="needs observations that are vectors"):
        LearnedParticleFilter().fit(images)


def test_a_function_of_the_direction_is_learned_with_the_arcsine_kernel():
    """A turning state: the leave-one-out loss takes the arcsine kernel, and its map beats the
    Gaussian one.
    """
    model = oscillatory()
    z = simulate(model, model.m0, 150, torch.Generator().manual_seed(0)).states
    fresh = simulate(model, model.m0, 300, torch.Generator().manual_seed(1)).states
    free, stationary = fit_ridge_map(z[:-1], z[1:]), fit_ridge_map(z[:-1], z[1:], slopes=())
    assert free.kernel.func is arcsine
    errors = [
        (fitted.predict(fresh)[0] - model.f(fresh)).square().sum(-1).mean()
        for fitted in (free, stationary)
    ]
    assert errors[0] < 0.5 * errors[1]


@pytest.mark.parametrize("name", KERNELS)
def test_a_map_by_any_kernel_follows_its_function(name):
    """Up to the noise of 0.01, most of which a rough kernel keeps; the fit chooses among this
    kernel's bandwidths alone.
    """
    u = torch.linspace(-1.5, 1.5, 60, dtype=torch.float64)[:, None]
    y = torch.cat([u.sin(), u.square()], 1)
    noise = 0.01 * torch.randn(
        y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    fit = fit_ridge_map(u, y + noise, kernels=(name,))
    mean, scale = fit.predict(u)
    assert (mean - y).square().mean().sqrt() < 0.015
    assert (scale >= 1).all()


def test_inputs_that_are_mostly_equal_have_a_map(normal):
    u = normal(100, 1)
    u[:80] = 0
    mean, _ = fit_ridge_map(u, u.sin() + 0.01 * normal(100, 1)).predict(u)
    torch.testing.assert_close(mean, u.sin(), rtol=0, atol=0.1)


def test_an_unknown_kernel_of_a_map():
    u = torch.linspace(-1, 1, 20, dtype=torch.float64)[:, None]
    with pytest.raises(
        ValueError, match=r"kernels must be among gaussian, .*arcsine; got 'cosine'"
    ):
        fit_ridge_map(u, u, kernels=("cosine",))
    with pytest.raises(ValueError, match="no setting to try of the kernels arcsine"):
        fit_ridge_map(u, u, kernels=("arcsine",), slopes=())


def test_cosine_and_sine_are_one_sensor(normal):
    angle, others = normal(50, 1), normal(50, 2)
    obs = torch.cat([others[:, :1], angle.cos(), angle.sin(), others[:, 1:]], 1)
    assert find_sensors(obs).tolist() == [0, 1, 1, 2]


def test_stored_sensors_have_a_known_density_or_none():
    for densities in ([-1, 0], [len(DENSITIES) - 1, -1]):
        sensors, stored = SelectedSensors(), SelectedSensors()
        for each, values in ((sensors, [0, 0]), (stored, densities)):
            each.column, each.density = torch.tensor([0, 1]), torch.tensor(values)
        sensors.load_state_dict(stored.state_dict())
        assert sensors.density.tolist() == densities
    for unknown in (-2, len(DENSITIES)):
        with pytest.raises(ValueError, match="there are 0 to"):
            sensors.load_state_dict(stored.state_dict() | {"density": torch.tensor([0, unknown])})
