"""The filter of density ratios: against the Kalman filter, Bayes' rule over recorded states, and
images that tell nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from kbf.densities.ratio import (
    LOG_NEVER,
    RatioDensity,
    StateDensity,
    fit_state_density,
    read_encoding,
)
from kbf.filters.gaussian.kalman import KalmanFilter, LinearModel
from kbf.filters.kernel_monte_carlo import density_ratio
from kbf.filters.kernel_monte_carlo.density_ratio import RatioFilter
from kbf.filters.kernel_monte_carlo.model import KernelMonteCarlo
from kbf.filters.rollout import rollout
from kbf.manifolds import FLAT, Manifold
from kbf.recording import Recording

F64 = torch.float64
A = torch.tensor([[0.9, 0.3], [-0.3, 0.9]], dtype=F64)
NOISE, SEEN = 0.1, 0.3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Turning(NamedTuple):
    """A linear move of two components, both told."""

    observation: Any
    manifold: Manifold = FLAT

    def move(self, s: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A s with noise."""
        return s @ A.to(s).mT + NOISE * torch.randn(s.shape, dtype=s.dtype, generator=generator)

    def observe(self, s: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Never asked for."""
        raise AssertionError

    def log_likelihood(self, x: Tensor, s: Tensor) -> Tensor:
        """log r."""
        return self.observation.log_density(x, s)


def flat() -> RatioDensity:
    """p(z) that is the same everywhere, so that a ratio is a likelihood."""
    return RatioDensity(StateDensity(torch.zeros(1, 2, dtype=F64), torch.tensor(1e3, dtype=F64)))


def ratio_dim(
    x: Tensor, std: float = SEEN, *, nothing: float = LOG_NEVER, ratio_dim: float = 0.0
) -> Tensor:
    """The code of one Gaussian at x, beside a share that tells nothing."""
    one = torch.ones_like(x[..., :1])
    entry = -torch.tensor(std, dtype=F64).log()
    return torch.cat([x, nothing * one, ratio_dim * one, x, entry * one, 0 * one, entry * one], -1)


def recording(steps: int = 30, batch: int = 4) -> tuple[Tensor, Tensor]:
    g = generator(1)
    z, states = torch.randn(batch, 2, dtype=F64, generator=g), []
    for _ in range(steps):
        z = z @ A.mT + NOISE * torch.randn(z.shape, dtype=F64, generator=g)
        states.append(z)
    track = torch.stack(states, 1)
    return track, track + SEEN * torch.randn(track.shape, dtype=F64, generator=g)


@pytest.mark.parametrize("width", [0.05, 0.2])
def test_with_one_gaussian_and_a_linear_move_it_is_the_kalman_filter(width, monkeypatch):
    """Wider kernels add width^2 of the prior's covariance, no more."""
    monkeypatch.setattr(density_ratio, "WIDTH", width)
    obs = recording()[1]
    eye, none = torch.eye(2, dtype=F64), torch.zeros(2, dtype=F64)
    kalman = KalmanFilter(
        LinearModel(A=A, a=none, Q=NOISE**2 * eye, C=eye, c=none, R=SEEN**2 * eye, m0=none, P0=eye)
    )
    exact = rollout(kalman, obs, covariances=True)
    prior = torch.randn(4000, 2, dtype=F64, generator=generator(2))
    filter = RatioFilter(Turning(flat()), prior, particles=2000)
    found = rollout(filter, ratio_dim(obs), covariances=True, generator=generator(3))
    std = exact.covariances.diagonal(dim1=-2, dim2=-1).sqrt()
    assert ((found.estimates - exact.estimates) / std).square().mean().sqrt() < 0.15
    variances = found.covariances.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(variances.mean(), std.square().mean(), rtol=0.1, atol=0)


def test_the_posterior_after_one_image_is_that_of_recorded_states_weighed_by_the_ratio(monkeypatch):
    """Of a prior from recorded states, and a ratio of two Gaussians and doubt: mean and covariance
    after one observation.
    """
    monkeypatch.setattr(density_ratio, "FIRST_WIDTH", 1e-3)
    recorded = 0.5 * torch.randn(4000, 2, dtype=F64, generator=generator(4))
    density = RatioDensity(fit_state_density(recorded))
    row = torch.tensor(
        [[0.0, 0.0, 0.2, 0.3, 0.5, 0.4, 0.1, 1.5, 0.3, 1.0, -0.5, 0.2, 1.2, -0.2, 2.0]], dtype=F64
    )
    row[:, 2:5] = row[:, 2:5].log()
    filter = RatioFilter(Turning(density), recorded, particles=4000, recorded=True)
    after = filter.update(filter.init(1, generator=generator(5)), row)
    weights = density.log_density(row, recorded).softmax(-1)
    mean = weights @ recorded
    centred = recorded - mean
    torch.testing.assert_close(filter.estimate(after)[0], mean, atol=0.03, rtol=0)
    torch.testing.assert_close(
        filter.covariance(after)[0], (weights[:, None] * centred).mT @ centred, atol=0.02, rtol=0
    )


def test_the_terms_of_an_image_are_its_gaussians_with_wider_covariances():
    """N(z; m_j, S_j + width^2 C) with C of the particles and S_j = (R_j^T R_j)^-1, by SciPy."""
    recorded = torch.randn(50, 2, dtype=F64, generator=generator(4)) @ A
    density = RatioDensity(fit_state_density(recorded))
    row = torch.tensor(
        [[0.0, 0.0, 0.2, 0.3, 0.5, 0.4, 0.1, 1.5, 0.9, 1.0, -0.5, 0.2, 1.2, -0.8, 2.0]], dtype=F64
    )
    row[:, 2:5] = row[:, 2:5].log()
    ratio = read_encoding(row, 2)
    assert bool((ratio.roots[0, :, 1, 0].abs() > 0.5).all()), "neither is diagonal"
    filter = RatioFilter(Turning(density), recorded, particles=50)
    log_p = filter.log_p(recorded)
    for width in (1e-9, 0.4):
        terms = filter.terms(recorded[None], row, width, log_p[None])
        own = width**2 * np.cov(recorded.numpy().T, bias=True)
        for j in range(2):
            R = ratio.roots[0, j].numpy()
            S = np.linalg.inv(R.T @ R)
            np.testing.assert_allclose(terms.spread[0, j] @ terms.spread[0, j].mT, S, rtol=1e-9)
            log_n = multivariate_normal(ratio.centres[0, j].numpy(), S + own).logpdf(recorded)
            expected = float(ratio.log_shares[0, 1 + j]) + log_n - log_p.numpy()
            np.testing.assert_allclose(
                terms.log_weights[0, :, 1 + j].numpy(), expected, rtol=1e-6, atol=1e-6
            )
        np.testing.assert_allclose(terms.log_weights[0, :, 0].exp().numpy(), 0.2, rtol=1e-9)
    narrow = filter.terms(recorded[None], row, 1e-9, log_p[None]).log_weights[0].logsumexp(-1)
    torch.testing.assert_close(narrow, density.log_density(row, recorded))


def test_images_that_tell_nothing_leave_the_belief_as_it_was():
    """Ten of them, too: they do not pull to where states are common."""
    filter = RatioFilter(Turning(flat()), torch.randn(500, 2, dtype=F64, generator=generator()))
    state = filter.predict(filter.init(3, generator=generator(1)), generator=generator(2))
    noise = ratio_dim(torch.zeros(3, 2, dtype=F64), nothing=0.0, ratio_dim=LOG_NEVER - 60)
    once = filter.update(state, noise)
    assert torch.equal(once.particles, state.particles)
    torch.testing.assert_close(once.weights, state.weights)


def test_a_sharp_image_far_from_all_particles_is_mostly_doubted_and_a_sharp_one_nearby_taken():
    filter = RatioFilter(
        Turning(flat()), 0.1 * torch.randn(500, 2, dtype=F64, generator=generator())
    )
    state = filter.init(1, generator=generator(1))
    far, near = torch.tensor([[30.0, 0.0]], dtype=F64), torch.tensor([[0.2, 0.1]], dtype=F64)
    assert filter.estimate(filter.update(state, ratio_dim(far, 0.01))).norm() < 0.1
    torch.testing.assert_close(
        filter.estimate(filter.update(state, ratio_dim(near, 0.01))), near, atol=0.01, rtol=0
    )


def test_shifted_particles_stay_on_the_circle():
    angles = torch.linspace(0, 6.28, 500, dtype=F64)
    z = torch.stack([angles.cos(), angles.sin()], -1)
    filter = RatioFilter(
        Turning(RatioDensity(fit_state_density(z)), Manifold((0,))), z, recorded=True
    )
    after = filter.update(filter.init(2, generator=generator()), ratio_dim(z[[10, 300]], 0.05))
    torch.testing.assert_close(after.particles.norm(dim=-1), torch.ones(2, 400, dtype=F64))
    torch.testing.assert_close(
        filter.estimate(after), z[[10, 300]], atol=0.05, rtol=0
    )  # a tenth doubts


@pytest.mark.slow
def test_a_learned_model_makes_it_and_chooses_no_law():
    track, obs = recording(400, 1)
    gain = track.var() / (track.var() + SEEN**2)  # of p(z | x), with z as normal as it is here
    memory = [Recording(track[0], ratio_dim(gain * obs[0], float(gain.sqrt() * SEEN)))]
    model = KernelMonteCarlo(particles=100)
    model.ratio_dim = 2
    model.prepare(memory)
    filter = model.fit(memory)
    assert isinstance(filter, RatioFilter)
    assert {"density", "reg"}.isdisjoint(model.hyperparameters())
    new, x = recording(60, 3)
    encodings = ratio_dim(gain * x, float(gain.sqrt() * SEEN))
    error = (
        (rollout(filter, encodings.float(), generator=generator()).estimates - new)
        .square()
        .sum(-1)
        .mean()
    )
    assert error < 0.7 * (gain * x - new).square().sum(-1).mean()


def test_bad_input_is_refused():
    class Blind(NamedTuple):
        observation: Any = None

    with pytest.raises(ValueError, match="needs a RatioDensity"):
        RatioFilter(Blind(), torch.zeros(3, 2, dtype=F64))  # pyright: ignore[reportArgumentType]


def test_the_share_that_begins_anew_is_by_bayes_rule(monkeypatch):
    """With narrow kernels all w are the law's ratios, of particles that suit the image less than
    recorded states do.
    """
    monkeypatch.setattr(density_ratio, "WIDTH", 1e-3)
    recorded = torch.randn(1000, 2, dtype=F64, generator=generator(6))
    density = RatioDensity(fit_state_density(recorded))
    row = ratio_dim(
        torch.tensor([[0.5, 0.5]], dtype=F64), 0.3, nothing=math.log(0.2), ratio_dim=math.log(0.8)
    )
    filter = RatioFilter(Turning(density), recorded, particles=1000, recorded=True, restart=0.3)
    state = filter.init(1, generator=generator(7))._replace(initialized=torch.ones(1, dtype=F64))
    state = state._replace(particles=state.particles + 2.0)
    w, every = (density.log_density(row, s).exp().mean() for s in (state.particles[0], recorded))
    share = 0.3 * every / (0.3 * every + 0.7 * w)
    assert 0.35 < share < 0.9
    after = filter.update(state, row)
    anew = (after.weights == 1 / 1000) & ((after.particles - state.particles).norm(dim=-1) > 0.01)
    assert abs(anew.double().mean() - share) < 0.03
    torch.testing.assert_close(after.weights.sum(-1), torch.ones(1, dtype=F64))


def test_a_lost_track_is_found_again_by_a_few_sharp_images():
    recorded = torch.randn(2000, 2, dtype=F64, generator=generator(8))
    place = torch.tensor([[1.5, -1.0]], dtype=F64)
    image, density = ratio_dim(place, 0.05), RatioDensity(fit_state_density(recorded))
    left = {}
    for restart in (0.0, 0.01):
        filter = RatioFilter(
            Turning(density), recorded, particles=400, recorded=True, restart=restart
        )
        state = filter.init(1, generator=generator(9))
        state = state._replace(
            particles=0.05 * state.particles - 1.0, initialized=torch.ones(1, dtype=F64)
        )
        for _ in range(3):
            state = filter.update(state, image)
            chosen = torch.multinomial(
                state.weights, 400, replacement=True, generator=generator(10)
            )
            state = state._replace(
                particles=state.particles[:, chosen[0]],
                weights=torch.full((1, 400), 1 / 400, dtype=F64),
            )
        left[restart] = (filter.estimate(state) - place).norm().item()
    assert left[0.0] > 2 and left[0.01] < 0.2
