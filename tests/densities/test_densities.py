"""Conditional laws: densities by quadrature, moments and draws against them, gradients, and fits to
their own samples.
"""

from __future__ import annotations

import math
import pickle
from itertools import pairwise

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from kbf.densities import glm
from kbf.densities.base import FOLDS, Candidate, ConditionalDensity, Features, gamma
from kbf.densities.categorical import ascend
from kbf.densities.glm import (
    GLMDensity,
    fisher_scoring,
    fit_parameters,
    log_family,
    refitted as refitted_glm,
)
from kbf.densities.mdn import MixtureDensityNetwork, fit_networks
from kbf.densities.mixtures import MapMixture, expectation_maximisation
from kbf.densities.ridge import RidgeMap, fit_ridge_map, refitted
from kbf.densities.selection import (
    MAX_STEPS,
    Choice,
    Known,
    better,
    candidate,
    chain,
    crosswise,
    fit_density,
    fit_like,
    lattice,
    select_density,
    spread_evenly,
    suitable,
    with_noise_where_constant,
)
from kbf.rkhs.kernels import median_distance
from kbf.rkhs.linalg import cholesky

F64 = torch.float64
REAL = ("gaussian", "student", "clutter", "spread", "branches", "networks")
WHOLE = ("poisson", "negbin", "bernoulli", "categories")
LEVELS = {"bernoulli": 2, "categories": 4}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=generator(seed))


def inputs(n: int, seed: int = 0) -> Tensor:
    return 4 * torch.rand(n, 1, dtype=F64, generator=generator(seed)) - 2


def outputs(kind: str, u: Tensor, seed: int = 1) -> Tensor:
    """Draws from a law of this kind around sin(2 u)."""
    g, middle = generator(seed), (2 * u).sin()
    e, share = (
        torch.randn(u.shape, dtype=F64, generator=g),
        torch.rand(u.shape, dtype=F64, generator=g),
    )
    if kind == "student":
        return middle + 0.2 * e / (-share.log()).sqrt()
    if kind == "clutter":
        return torch.where(
            share < 0.3, 6 * torch.rand(u.shape, dtype=F64, generator=g) - 3, middle + 0.1 * e
        )
    if kind == "spread":
        return middle + (u - 1).exp() * e
    if kind == "branches":
        return torch.where(share < 0.4, middle, 1.5 - u) + 0.1 * e
    if kind == "networks":  # skewed, by an amount that depends on u
        return middle + 0.1 * e - (0.2 + 0.4 * (u > 0)) * share.log()
    if kind == "poisson":
        return torch.poisson((1 + middle).exp(), g)
    if kind == "negbin":
        return torch.poisson((1 + middle).exp() * gamma(torch.full_like(u, 1.5), g) / 1.5, g)
    if kind == "categories":  # 0 to 3, without an order
        scores = 3 * (2 * u + torch.tensor([0.0, 3.0, 1.5, 4.5])).cos()
        return torch.multinomial(scores.softmax(-1), 1, generator=g).double()
    if kind == "bernoulli":
        return (share < (2 * middle).sigmoid()).double()
    return middle + 0.3 * e


@pytest.fixture(scope="module")
def densities() -> dict[str, ConditionalDensity]:
    """Every law, fitted to 400 points of its own kind."""
    u = inputs(400)
    return {name: fit_density(name, u, outputs(name, u)) for name in (*REAL, *WHOLE)}


def support(name: str) -> tuple[Tensor, float]:
    """Outputs to sum over, and the weight of each."""
    if name in WHOLE:
        return torch.arange(LEVELS.get(name, 400), dtype=F64)[:, None], 1.0
    reach, m = (4000.0, 200_001) if name == "student" else (60.0, 24_001)
    return torch.linspace(-reach, reach, m, dtype=F64)[:, None], 2 * reach / (m - 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REAL, *WHOLE])
def test_densities_integrate_to_one(densities, name):
    y, weight = support(name)
    for u in (-1.3, 0.2, 1.9):
        total = densities[name].log_density(y, torch.tensor([[u]], dtype=F64)).exp().sum() * weight
        assert total.item() == pytest.approx(1, abs=5e-3 if name == "student" else 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["student", "clutter", "spread", "branches", "networks", "gaussian"]
)
def test_densities_of_two_components_integrate_to_one(name):
    u = inputs(300)
    y = torch.cat([outputs(name, u, 1), 0.5 * outputs(name, u, 2) + 0.5 * outputs(name, u, 1)], -1)
    density = fit_density(name, u, y)
    step = 0.05 if name == "clutter" else 0.125  # the box has edges
    axis = torch.linspace(-25, 25, round(50 / step) + 1, dtype=F64)
    total = (
        density.log_density(torch.cartesian_prod(axis, axis), torch.tensor([[0.4]], dtype=F64))
        .exp()
        .sum()
        * step**2
    )
    assert total.item() == pytest.approx(1, abs=2e-2 if name == "student" else 5e-3)


@pytest.mark.parametrize("name", [*REAL, *WHOLE])
def test_mean_and_covariance_are_those_of_the_density(densities, name):
    y, weight = support(name)
    u = torch.tensor([[0.2]], dtype=F64)
    p = densities[name].log_density(y, u).exp()[:, None] * weight
    mean = (p * y).sum(0) / p.sum()
    assert torch.allclose(densities[name].mean(u)[0], mean, atol=1e-3)
    own = densities[name].covariance(u)[0, 0, 0].item()
    if math.isfinite(own):
        variance = float((p * (y - mean).square()).sum() / p.sum())
        assert own == pytest.approx(variance, rel=0.05 if name == "student" else 2e-3)
    else:
        assert isinstance(densities[name], MapMixture)
        assert densities[name].degrees <= 2


@pytest.mark.parametrize("name", [*REAL, *WHOLE])
def test_draws_have_the_density(densities, name):
    """The mean over draws of exp(log q - log p) is 1 for another density q: here the law at another
    input.
    """
    density, m = densities[name], 20_000
    u, other = (torch.full((m, 1), at, dtype=F64) for at in (0.3, 0.35))
    y = density.sample(u, generator(3))
    assert y.shape == (m, 1)
    ratio = (density.log_density(y, other) - density.log_density(y, u)).exp()
    assert abs(ratio.mean().item() - 1) < 4.5 * ratio.std().item() / m**0.5 + 1e-6
    known = density.mean(u[:1])[0, 0]
    if name != "student":
        assert abs(float(y.mean() - known)) < 4.5 * float(y.std()) / m**0.5


@pytest.mark.parametrize("name", [*REAL, *WHOLE])
def test_table_batches_and_precisions_agree(densities, name):
    density, u = densities[name], inputs(7, 5)
    y = density.sample(inputs(5, 6), generator(4))
    table = density.at(u)(y)
    assert table.shape == (5, 7)
    one_by_one = torch.stack(
        [torch.stack([density.log_density(a[None], b[None])[0] for b in u]) for a in y]
    )
    assert torch.allclose(table, one_by_one, atol=1e-9)
    assert torch.allclose(density.log_density(y[:, None], u), table, atol=1e-9)
    single = density.log_density(y[:, None].float(), u.float())
    assert single.dtype == torch.float32
    assert torch.allclose(single.double(), table, atol=2e-3, rtol=2e-3)
    for shape in ((7, 1), (1, 7, 1), (7, 1, 1)):
        assert density.mean(u.reshape(shape)).shape == shape
        assert density.covariance(u.reshape(shape)).shape == (*shape, 1)
        assert density.sample(u.reshape(shape), generator()).shape == shape


@pytest.mark.parametrize("name", REAL)
def test_gradients(densities, name):
    y, u = torch.tensor([[0.31], [-0.4]], dtype=F64), torch.tensor([[0.2], [0.9]], dtype=F64)
    assert torch.autograd.gradcheck(
        densities[name].log_density, (y.requires_grad_(), u.requires_grad_())
    )


@pytest.mark.parametrize("name", WHOLE)
def test_gradients_of_counts_in_the_input(densities, name):
    u = torch.tensor([[0.2], [0.9]], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda u: densities[name].log_density(torch.ones(2, 1, dtype=F64), u), (u,)
    )


@pytest.mark.parametrize("name", [*REAL, *WHOLE])
def test_a_stored_law_answers_equally(densities, name):
    u = inputs(9, 8)
    y = densities[name].sample(u, generator())
    again = pickle.loads(pickle.dumps(densities[name]))
    assert torch.equal(again.log_density(y, u), densities[name].log_density(y, u))
    assert torch.equal(again.sample(u, generator(2)), densities[name].sample(u, generator(2)))


@pytest.mark.parametrize("name", [*REAL, *WHOLE])
def test_the_same_points_give_the_same_law(densities, name):
    u = inputs(400)
    assert torch.equal(fit_density(name, u, outputs(name, u)).mean(u), densities[name].mean(u))


def test_the_gaussian_density_is_the_ridge_map():
    u = inputs(120)
    y = outputs("gaussian", u)
    map = fit_ridge_map(u, y)
    density = fit_density("gaussian", u, y)
    assert isinstance(density, RidgeMap)
    assert torch.equal(density.coefficients, map.coefficients)
    assert torch.equal(density.sample(u, generator(1)), map.sample(u, generator(1)))
    mean, scale = map.predict(u)
    truth = [
        torch.distributions.MultivariateNormal(m, s * map.noise).log_prob(each)
        for m, s, each in zip(mean, scale, y, strict=True)
    ]
    assert torch.allclose(density.log_density(y, u), torch.stack(truth))
    assert torch.allclose(density.at(u)(y).diagonal(), torch.stack(truth))
    assert torch.allclose(density.covariance(u), scale[:, None, None] * map.noise)
    whole = refitted(map, u, y)
    assert torch.allclose(whole.coefficients, map.coefficients, atol=1e-9)
    assert torch.allclose(whole.noise, map.noise, atol=1e-12)


def test_a_map_that_leaves_each_point_out_is_the_refit_without_it():
    """The scores that one round of `expectation_maximisation` gives, against fits without each
    point in turn.
    """
    u = inputs(30)
    y = outputs("gaussian", u)
    map = fit_ridge_map(u, y)
    features = Features(map.landmarks, map.whiten, map.kernel)
    phi = features(u)
    one = expectation_maximisation(
        features, phi, y, torch.ones(30, 1, dtype=F64), 3.0, None, None, 1
    )
    shrink = torch.full_like(phi[0], 3.0)
    shrink[-1] = 1e-8
    errors, scales = [], []
    for i in range(30):
        rest = torch.arange(30) != i
        M = torch.linalg.inv(phi[rest].mT @ phi[rest] + shrink.diag())
        errors.append(y[i] - phi[i] @ M @ phi[rest].mT @ y[rest])
        scales.append(1 + phi[i] @ M @ phi[i])
    error, scale = torch.stack(errors)[:, 0], torch.stack(scales)
    variance = (error.square() / scale).mean() + 1e-6 * y.var()
    score = -0.5 * (error.square() / (scale * variance) + (2 * math.pi * scale * variance).log())
    assert one.score == pytest.approx(score.mean().item(), rel=1e-9)


TRUE = {
    "student": lambda y, m, u: (
        -1.5 * torch.log1p(((y - m) / 0.2).square() / 2) - math.log(0.2 * 2 * math.sqrt(2))
    ),
    "spread": lambda y, m, u: (
        -0.5 * ((y - m) * (1 - u).exp()).square() + 1 - u - 0.5 * math.log(2 * math.pi)
    ),
    "poisson": lambda y, m, u: y * (1 + m) - (1 + m).exp() - torch.lgamma(y + 1),
    "bernoulli": lambda y, m, u: y * 2 * m - torch.nn.functional.softplus(2 * m),
}


@pytest.mark.parametrize("name", TRUE)
def test_fits_come_near_the_true_law_and_do_not_beat_it(name):
    u, new = inputs(1000), inputs(4000, 11)
    y = outputs(name, new, 12)
    true = TRUE[name](y, (2 * new).sin(), new)[:, 0]
    gap = true - fit_density(name, u, outputs(name, u)).log_density(y, new)
    assert -4 * float(gap.std()) / 4000**0.5 < float(gap.mean()) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REAL, *WHOLE])
def test_the_choice_finds_the_true_family_in_nine_of_ten_draws(name):
    names = [
        select_density(u := inputs(1000, 20 + k), outputs(name, u, 40 + k)).name for k in range(10)
    ]
    assert names.count(name) >= 9, names


@pytest.mark.slow
def test_a_choice_says_what_it_chose_and_by_how_much():
    u = inputs(300)
    choice = select_density(u, outputs("clutter", u))
    assert choice.name == "clutter"
    assert choice.margin == pytest.approx(choice.scores["clutter"] - choice.scores["gaussian"])
    assert choice.margin > 2 * choice.error
    assert str(choice).startswith(f"clutter ({choice.margin:+.3f}")


def test_few_points_and_circles_get_the_gaussian_law():
    u = inputs(60)
    choice = select_density(u, outputs("clutter", u))
    assert choice.name == "gaussian"
    assert set(choice.left_out.values()) == {"fewer than 80 points"}
    u = inputs(200)
    angle = outputs("branches", u)
    choice = select_density(u, torch.cat([angle.cos(), angle.sin()], -1))
    assert (choice.name, choice.left_out["branches"]) == ("gaussian", "outputs on a circle")


@pytest.mark.slow
def test_constant_columns_do_no_harm():
    u = inputs(300)
    y = torch.cat([outputs("clutter", u), torch.full_like(u, 7.0)], -1)
    choice = select_density(u, y)
    assert choice.name in ("clutter", "networks")
    assert (choice.density.sample(u, generator())[:, 1] - 7).abs().median() < 1e-3


def test_whole_numbers_of_any_step_and_origin():
    step = lattice(torch.tensor([[0.5], [2.0], [1.0]] * 9))
    assert step is not None
    assert step.tolist() == [0.5]
    assert lattice(randn(50, 1)) is None
    u = inputs(400)
    y = outputs("poisson", u)
    plain, scaled = select_density(u, y), select_density(u, (y - 2) / 3)
    assert plain.name == scaled.name == "poisson"
    drawn = scaled.density.sample(u, generator()) * 3 + 2
    assert torch.allclose(drawn, drawn.round(), atol=1e-9)
    assert torch.allclose(
        scaled.density.log_density((y - 2) / 3, u), plain.density.log_density(y, u)
    )
    assert plain.density.log_density(y + 0.5, u).isneginf().all()


def test_bad_input_is_told():
    u = inputs(100)
    with pytest.raises(ValueError, match="no density 'cauchy'"):
        fit_density("cauchy", u, u)
    with pytest.raises(ValueError, match="whole numbers"):
        fit_density("poisson", u, outputs("gaussian", u))
    with pytest.raises(ValueError, match="vary"):
        select_density(u, torch.ones_like(u))


def test_networks_are_scored_on_what_they_did_not_see():
    """A memorised output gains nothing: with pure noise for outputs the held-out score is that of
    the noise at most.
    """
    u, y = inputs(200), randn(200, 1, seed=9)
    fitted = fit_networks(u, y, rounds=150)
    assert isinstance(fitted.density, MixtureDensityNetwork)
    own = fitted.density.log_density(y, u).mean()
    assert fitted.held_out.mean() < -0.5 * math.log(2 * math.pi * math.e) + 0.1
    assert fitted.held_out.mean() < own


@pytest.mark.parametrize("q", [1, 3])
def test_networks_have_as_many_components_as_asked_for(q):
    u = inputs(60)
    fitted = fit_networks(u, randn(60, q, seed=3), components=4, networks=2, rounds=2)
    assert isinstance(fitted.density, MixtureDensityNetwork)
    log_shares, means, sizes = fitted.density.parameters(u[:5])
    assert log_shares.shape == (5, 2 * 4) and means.shape == sizes.shape == (5, 2 * 4, q)


def test_networks_learn_two_branches():
    """y = +-(2 + u / 2) + N(0, 0.1^2), both signs with probability 1/2."""

    def draw(seed: int) -> tuple[Tensor, Tensor]:
        u = inputs(400, seed)
        sign = torch.where(torch.rand(400, 1, generator=generator(seed + 1)) < 0.5, -1.0, 1.0)
        return u, sign * (2 + u / 2) + 0.1 * randn(400, 1, seed=seed + 2)

    u, y = draw(10)
    densities = [torch.distributions.Normal(s * (2 + u / 2), 0.1).log_prob(y) for s in (-1, 1)]
    truth = torch.stack(densities).logsumexp(0).mean() - math.log(2)
    found = fit_networks(*draw(0)).density.log_density(y, u).mean()
    assert found > truth - 0.15


def test_candidates_are_scored_without_their_stretch():
    """The first fifth is moved far away: a law that had seen it would not be surprised."""
    u = inputs(200)
    y = outputs("gaussian", u)
    y[:40] += 5
    held = candidate("gaussian", u, y, fit_ridge_map(u, y)).held_out
    assert held[:40].mean() < held[40:].mean() - 2


def test_covariance_of_counts(densities):
    density = densities["negbin"]
    assert isinstance(density, GLMDensity)
    assert (density.covariance(inputs(5))[:, 0, 0] > density.mean(inputs(5))[:, 0]).all()
    assert cholesky(density.covariance(inputs(5))).isfinite().all()


def test_categories_reach_the_largest_penalised_likelihood():
    """The gradient is 0 at the coefficients, and with two levels they are those of logistic
    regression by SciPy.
    """
    u = inputs(200)
    y = outputs("bernoulli", u)
    phi = torch.cat([u, u.square(), torch.ones_like(u)], -1)
    seen = torch.cat([1 - y, y], -1)
    ridge = torch.tensor([0.7], dtype=F64)
    W = ascend(phi, seen, (2,), ridge, 5000)[0]
    shrink = torch.tensor([[0.7], [0.7], [1e-6]], dtype=F64)
    assert (phi.mT @ (seen - (phi @ W).softmax(-1)) - shrink * W).abs().max() < 1e-2

    def loss(w):
        eta = torch.tensor(w, dtype=F64).reshape(3, 2)
        return -((phi @ eta).log_softmax(-1) * seen).sum().item() + 0.5 * float(
            (shrink * eta.square()).sum()
        )

    best = scipy.optimize.minimize(loss, torch.zeros(6).numpy(), tol=1e-9)
    assert torch.allclose(
        (phi @ W).softmax(-1),
        (phi @ torch.tensor(best.x, dtype=F64).reshape(3, 2)).softmax(-1),
        atol=1e-3,
    )


def test_unseen_and_many_categories():
    u = inputs(300)
    density = fit_density("categories", u, outputs("categories", u))
    assert density.log_density(torch.tensor([[7.0]], dtype=F64), u[:1]).isneginf().all()
    assert select_density(u, outputs("categories", u)).name == "categories"
    with pytest.raises(ValueError, match="more than 12 categories"):
        fit_density("categories", u, torch.arange(300, dtype=F64)[:, None] % 20)


@pytest.mark.parametrize("points", [1, 3, 4001])
def test_draws_of_networks_have_the_density_of_their_mixture(points):
    """Three networks, whose means are -4, 0 and 4 everywhere, each of two components."""
    shares, apart, size = torch.tensor([0.25, 0.75]), torch.tensor([-1.0, 1.0]), 0.1
    bias = torch.stack(
        [
            torch.cat([shares.log(), middle + apart, torch.full((2,), math.log(size))])
            for middle in (-4.0, 0.0, 4.0)
        ]
    )[:, None].double()
    layers = (torch.zeros(3, 1, 6, dtype=torch.float64), bias)
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    networks = MixtureDensityNetwork(layers, zero, one, 10 + zero, 2 * one)
    generator = torch.Generator().manual_seed(0)
    u = torch.zeros(points, 1, dtype=torch.float64)
    y = torch.cat([networks.sample(u, generator) for _ in range(24_000 // points)])
    edges = torch.arange(-1.0, 22.0, 2.0, dtype=torch.float64)  # between all components
    grid = edges[:-1, None] + torch.linspace(0, 2, 401, dtype=torch.float64)
    given = torch.zeros(*grid.shape, 1, dtype=torch.float64)
    density = networks.log_density(grid[..., None], given).exp()
    expected = torch.trapezoid(density, dx=2 / 400)
    found = torch.histc(y, len(edges) - 1, float(edges[0]), float(edges[-1])) / len(y)
    assert float(expected.sum()) == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("family", ["spread", "poisson", "negbin", "bernoulli"])
def test_a_density_of_some_points_has_the_settings_of_all(family, monkeypatch):
    """It is what a fit with one bandwidth, ridge and dispersion finds."""
    monkeypatch.setattr(glm, "DISPERSIONS", (0.3,))
    u, some = inputs(300), slice(40, 240)
    y = outputs(family, u)
    known = fit_parameters(family, u, y, factors=(1.0,), ridges=(0.3,)).density
    assert isinstance(known, GLMDensity)
    found = refitted_glm(known, u[some], y[some])
    factor = float(median_distance(u, distinct=True) / median_distance(u[some], distinct=True))
    expected = fit_parameters(family, u[some], y[some], factors=(factor,), ridges=(0.3,)).density
    assert isinstance(expected, GLMDensity)
    new = inputs(50, 7)
    y = outputs(family, new)
    torch.testing.assert_close(
        found.log_density(y, new), expected.log_density(y, new), rtol=1e-6, atol=1e-6
    )


def test_known_densities_are_those_of_the_points():
    """Fitted to these points, or to more than these; not to others."""
    u = inputs(300)
    y = outputs("spread", u)
    choice = Choice("spread", fit_density("spread", u, y), {}, 0.0, 0.0, {})
    known = [Known(choice, u, y)]
    assert fit_like(known, "spread", u.float().double(), y) is None
    assert fit_like(known, "spread", u, y) is choice.density
    assert isinstance(fit_like(known, "spread", u[:200], y[:200]), GLMDensity)
    assert fit_like(known, "gaussian", u, y) is None
    assert fit_like(known, "spread", u[:200], y[1:201]) is None
    assert fit_like(known, "spread", u[:200].repeat(1, 2), y[:200]) is None


@pytest.mark.parametrize("kind", ["student", "clutter", "spread", "branches"])
def test_a_density_of_rounded_values_is_selected_as_it_is_fitted(kind):
    """A checkpoint is loaded by a fit without a selection, which must find the same density."""
    u = inputs(900)
    y = (outputs(kind, u) * 8).round() / 8
    assert lattice(y) is not None
    choice = select_density(u, y)
    assert choice.name != "gaussian"
    again = fit_density(choice.name, u, y)
    torch.testing.assert_close(choice.density.log_density(y, u), again.log_density(y, u))


@pytest.mark.parametrize("family", ["bernoulli", "poisson", "negbin"])
def test_fisher_scoring_ends_where_the_penalised_likelihood_is_largest(family):
    phi = torch.cat([randn(200, 3), torch.ones(200, 1, dtype=F64)], 1)
    eta, dispersion = phi @ torch.tensor([[0.5], [-0.3], [0.2], [0.4]], dtype=F64), 0.7
    y = torch.bernoulli(eta.sigmoid(), generator=generator(1))
    if family != "bernoulli":
        y = torch.poisson(2 * eta.exp() * torch.rand(200, 1, generator=generator(2)), generator())
    ridges, size = torch.tensor([0.5, 20.0], dtype=F64), torch.tensor([dispersion], dtype=F64)
    found = fisher_scoring(family, phi, y, ridges, size)
    assert found.shape == (1, 2, 4, 1)
    few = fisher_scoring(family, phi, y, ridges, size, rounds=8)
    torch.testing.assert_close(few, found, atol=1e-6, rtol=0)
    for k, ridge in enumerate(ridges):
        c = found[:, k].clone().requires_grad_()
        penalty = ridge / 2 * c[:, :-1].square().sum()
        (log_family(family, y, [phi @ c[0]], size).sum() - penalty).backward()
        assert c.grad is not None
        torch.testing.assert_close(c.grad, torch.zeros_like(c), atol=1e-3, rtol=0)


# the selection, part by part


def test_gains_are_significant_by_standard_errors_without_their_tails():
    """Both ends at the 2nd and the 98th percentile; the mean itself is of all gains."""
    gain = randn(400, seed=3) + 0.25
    cut = np.clip(gain.numpy(), *np.quantile(gain.numpy(), [0.02, 0.98]))
    ratio = float(cut.mean() / (cut.std(ddof=1) / math.sqrt(400)))
    assert 2 < ratio < 4
    assert better(gain, ratio - 1e-9)
    assert not better(gain, ratio + 1e-9)
    assert better(gain)
    assert not better(gain, 4.0)
    assert not better(-gain, -math.inf), "a loss on average"
    outlier = gain.clone()
    outlier[0] = -70
    assert float(outlier.mean()) < 0
    assert not better(outlier)
    outlier[0] = 70
    assert better(outlier), "an outlier does not hide a gain"


def found(**shifts: float) -> dict[str, Candidate]:
    """Candidates with these held-out scores over that of the Gaussian, on average.

    Standard errors of gains are 0.05.
    """
    noise = torch.arange(401, dtype=F64).sub(200) / 200
    noise = noise / noise.clamp(-0.96, 0.96).std() * 0.05 * math.sqrt(401)
    density = fit_density("gaussian", inputs(20), inputs(20, 1))
    return {
        "gaussian": Candidate(density, torch.zeros_like(noise)),
        **{
            name: Candidate(density, shift + (-1) ** k * noise[torch.randperm(401)] / 2)
            for k, (name, shift) in enumerate(shifts.items())
        },
    }


@pytest.mark.parametrize(
    ("shifts", "name"),
    [
        ({}, "gaussian"),
        ({"student": 0.09}, "gaussian"),  # 3.6 standard errors
        ({"student": 0.11}, "student"),  # 4.4
        ({"student": 0.3, "clutter": 0.35}, "student"),  # 1.4 of the difference
        ({"student": 0.3, "clutter": 0.45}, "clutter"),
        ({"student": 0.3, "clutter": 0.31, "spread": 0.6}, "spread"),
        ({"student": 0.5, "clutter": 0.2}, "student"),
        ({"student": 0.08, "clutter": 0.2}, "clutter"),
    ],
)
def test_a_density_must_be_better_than_the_simpler_ones(shifts, name):
    torch.manual_seed(0)
    assert chain(found(**shifts)) == name


def test_held_out_scores_are_of_fits_without_the_block():
    """Five contiguous blocks, each scored by a fit to the other points."""
    u = inputs(23)
    y = outputs("gaussian", u)
    map = fit_ridge_map(u, y)
    seen = []

    def fit(kept: Tensor) -> RidgeMap:
        seen.append(kept)
        return refitted(map, u[kept], y[kept])

    scores = crosswise(fit, u, y)
    edges = pairwise(round(k * 23 / FOLDS) for k in range(FOLDS + 1))
    for kept, (a, b) in zip(seen, edges, strict=True):
        assert (~kept).nonzero()[:, 0].tolist() == list(range(a, b))
        alone = refitted(map, u[kept], y[kept]).log_density(y[a:b], u[a:b])
        torch.testing.assert_close(scores[a:b], alone)
    assert len(scores) == 23


@pytest.mark.parametrize(
    ("column", "step"),
    [
        ([0.0, 1.0, 1.0, 2.0] * 3, 1.0),
        ([0.0, 3.0, 9.0] * 4, 3.0),
        ([-0.5, 0.25] * 4, 0.75),
        ([7.0] * 5, 1.0),
        ([0.0, 1.0, 2.0, 3.0] * 2, None),  # 3 gaps, 8 rows: fewer than 4 a gap
        ([0.0, 1.0, 2.0, 3.0] * 3, 1.0),  # 12 rows
        ([0.0, 1.0, 2.5] * 8, None),
        ([0.0, 1.0, MAX_STEPS] * 8, 1.0),
        ([0.0, 1.0, MAX_STEPS + 1.0] * 8, None),
        ([0.0, 1.0, 2.0009] * 8, 1.0),  # whole but for rounding
        ([0.0, 1.0, 2.002] * 8, None),
    ],
)
def test_whole_numbers_have_a_step(column, step):
    found = lattice(torch.tensor(column, dtype=F64)[:, None])
    assert (None if found is None else float(found)) == step


def test_the_rows_that_whole_numbers_require():
    y = torch.arange(10, dtype=F64)[:, None]
    assert lattice(y) is None
    assert lattice(y, rows=0.0) is not None
    assert lattice(y, rows=1.0) is not None  # 9 gaps
    assert lattice(y, rows=1.2) is None
    both = torch.cat([y % 2, randn(10, 1)], 1)
    assert lattice(both, rows=0.0) is None, "one column of other numbers"


def test_values_are_spread_evenly_over_their_cells():
    y = torch.tensor([[0.0, 6.0], [2.0, 3.0]], dtype=F64).repeat(5_000, 1)
    step = torch.tensor([2.0, 3.0], dtype=F64)
    offset = (spread_evenly(y, step) - y) / step
    assert float(offset.min()) >= -0.5
    assert float(offset.max()) <= 0.5
    # a uniform distribution: mean 0, variance 1/12, within 4.5 standard errors
    assert abs(float(offset.mean())) < 4.5 / math.sqrt(12 * 20_000)
    assert float(offset.var()) == pytest.approx(1 / 12, abs=4.5 / math.sqrt(180 * 20_000))
    none = torch.tensor([2.0, 0.0], dtype=F64)
    assert torch.equal(spread_evenly(y, none)[:, 1], y[:, 1])


def test_constant_columns_get_the_least_noise_of_a_map():
    varying = randn(4_000, 2)
    y = torch.cat([varying, torch.full((4_000, 1), 7.0, dtype=F64)], 1)
    filled = with_noise_where_constant(y)
    assert torch.equal(filled[:, :2], varying)
    deviation = (filled[:, 2] - 7).std() / (1e-9 * y.var(0).mean()).sqrt()
    assert float(deviation) == pytest.approx(1, abs=4.5 / math.sqrt(2 * 4_000))
    assert with_noise_where_constant(varying) is varying
    whole = torch.tensor([[0.0, 5.0], [1.0, 5.0]], dtype=F64).repeat(9, 1)
    assert with_noise_where_constant(whole) is whole


COUNTED = ("poisson", "negbin")
CONTINUOUS = ("student", "clutter", "spread", "branches", "networks")


def test_which_densities_suit_outputs():
    u = inputs(80)
    map = fit_ridge_map(u, outputs("gaussian", u))

    def names(column: Tensor, fine: bool = False) -> tuple[str, ...]:
        return suitable(column, map, lattice(column), fine)[0]

    real = randn(80, 1)
    assert names(real) == CONTINUOUS
    assert suitable(real[:79], map, None, False) == ((), "fewer than 80 points")
    row = torch.arange(80, dtype=F64)[:, None]
    assert names(row % 2) == ("bernoulli",)
    assert names(3 * (row % 2) + 1) == ("bernoulli",)
    assert names(row % 3) == (*COUNTED, "categories")
    assert names(row % 12) == (*COUNTED, "categories")
    assert names(row % 13) == COUNTED
    assert names(row % 13, fine=True) == (*COUNTED, *CONTINUOUS)
    assert names(row % 3, fine=True) == (*COUNTED, "categories", *CONTINUOUS)
    assert names(torch.cat([row % 2, row % 3], 1)) == (*COUNTED, "categories")


def test_known_densities_contain_points_in_any_order():
    u, y = inputs(40), randn(40, 2)
    known = Known(Choice("gaussian", fit_density("gaussian", u, y), {}, 0.0, 0.0, {}), u, y)
    assert known.fits(u, y)
    assert not known.fits(u, y + 1)
    assert not known.fits(u + 1, y)
    assert not known.fits(u[:30], y[:30])
    mixed = torch.randperm(40, generator=generator())[:30]
    assert known.contains(u[mixed], y[mixed])
    assert known.contains(u, y)
    assert not known.contains(u[mixed], y[mixed].roll(1, 0))
    assert not known.contains(u.repeat(1, 2), y)
    assert not known.contains(u, y[:, :1])


def test_a_choice_in_one_line():
    u, y = inputs(20), inputs(20, 1)
    density = fit_density("gaussian", u, y)
    scores = {"gaussian": -1.25, "student": -0.5}
    assert str(Choice("gaussian", density, scores, 0.0, 0.0, {"networks": "too slow"})) == (
        "gaussian; held-out log score a point: gaussian -1.250, student -0.500"
        "; networks left out: too slow"
    )
    assert str(Choice("student", density, scores, 0.75, 0.031, {})) == (
        "student (+0.750 ± 0.031 over gaussian); held-out log score a point: "
        "gaussian -1.250, student -0.500"
    )


def test_a_selection_of_two_values():
    """Whether u is positive, nearly always; the scores are log probabilities."""
    u = inputs(1000)
    y = (u + 0.2 * randn(1000, 1, seed=5) > 0).double()
    choice = select_density(u, y)
    assert set(choice.scores) == {"gaussian", "bernoulli"}
    assert choice.name == "bernoulli"
    assert choice.scores["gaussian"] <= 0
    held = candidate("bernoulli", u, y, fit_ridge_map(u, y), lattice(y)).held_out
    plain = candidate("gaussian", u, y, fit_ridge_map(u, y)).held_out.clamp_max(0)
    assert choice.scores["bernoulli"] == pytest.approx(float(held.mean()))
    assert choice.scores["gaussian"] == pytest.approx(float(plain.mean()))
    gain = (held - plain).numpy()
    assert choice.margin == pytest.approx(gain.mean())
    assert choice.error == pytest.approx(gain.std(ddof=1) / math.sqrt(1000))
    assert select_density(u, y, counts=False).name == "gaussian"
