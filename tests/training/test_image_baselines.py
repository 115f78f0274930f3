"""Baselines on images: particle filters with the true dynamics, the LSTM with an encoder inside,
and errors in words.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from kbf.data.dsprites import position_model
from kbf.densities.ridge import fit_ridge_map
from kbf.filters.gaussian.ekf import EKF
from kbf.filters.gaussian.kalman import LearnedKalman
from kbf.filters.gaussian.ukf import UKF
from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.particle import learned
from kbf.filters.particle.bootstrap import ParticleFilter
from kbf.filters.particle.learned import ObservationParticleFilter, PixelParticleFilter
from kbf.filters.rollout import rollout
from kbf.images.augment import Augment, PixelNoise
from kbf.images.encoders import CNN
from kbf.manifolds import CIRCLE
from kbf.recording import Recording
from kbf.runtime.instantiate import build
from kbf.ssm import OrientationModel, StateSpace, oscillatory, simulate

F64 = torch.float64
SHAPE = (1, 6, 7)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def blob(z: torch.Tensor) -> torch.Tensor:
    """A small picture ``*b 1 6 7`` of a bright spot at z, in [-1.5, 1.5]^2."""
    rows, columns = (
        torch.linspace(-1.5, 1.5, 6, dtype=z.dtype),
        torch.linspace(-1.5, 1.5, 7, dtype=z.dtype),
    )
    square = (rows[:, None] - z[..., 1, None, None]).square() + (
        columns - z[..., 0, None, None]
    ).square()
    return (-square / 0.5).exp()[..., None, :, :]


def recording(n: int = 80, seed: int = 0, noise: float = 0.1) -> Recording:
    model = oscillatory(sigma_x=0.05)
    states, seen, *_ = simulate(model, model.m0, n, generator(seed))
    return Recording(
        states,
        blob(seen) + noise * torch.randn(n, *SHAPE, dtype=F64, generator=generator(seed + 100)),
    )


@pytest.fixture
def few(monkeypatch):
    """Few settings of the regressions, for speed."""
    settings = {"factors": (0.3, 0.6), "slopes": (), "regs": (1e-4, 1e-2)}
    monkeypatch.setattr(
        learned, "fit_ridge_map", lambda *a, **k: fit_ridge_map(*a, **{**k, **settings})
    )


# particle filters


def test_diagonal_noise_is_that_of_each_component_refitted_without_each_point(normal):
    """Leave-one-out by brute force: residual variances weighted by H_i, and the score that picks
    the ridge.
    """
    u, y = normal(14, 2), normal(14, 3)
    y[:, 1] += u[:, 0]
    only = {"factors": (1.0,), "slopes": (), "rank": 14}
    fitted = fit_ridge_map(u, y, regs=(1e-2,), diagonal=True, **only)
    phi, ridge = fitted.features(u).numpy(), 14 * 1e-2
    noise, logs = np.zeros(3), 0.0
    for i in range(14):
        rest = [j for j in range(14) if j != i]
        inverse = np.linalg.inv(phi[rest].T @ phi[rest] + ridge * np.eye(phi.shape[1]))
        error = (y[i] - y.mean(0)).numpy() - phi[i] @ inverse @ phi[rest].T @ (
            y[rest] - y.mean(0)
        ).numpy()
        scale = 1 + phi[i] @ inverse @ phi[i]
        noise += error**2 / scale / 14
        logs += math.log(scale) / 14
    np.testing.assert_allclose(fitted.noise, noise, rtol=1e-5)
    full = fit_ridge_map(u, y, regs=(1e-2,), **only)
    torch.testing.assert_close(fitted.noise, full.noise.diagonal())
    regs = (1e-4, 1e-2, 1.0)
    chosen = fit_ridge_map(u, y, regs=regs, diagonal=True, **only)
    scores = []
    for reg in regs:
        f = fit_ridge_map(u, y, regs=(reg,), diagonal=True, **only)
        held_out = 1 - ((f.features(u) @ f.factor) * f.features(u)).sum(-1)
        scores.append(f.noise.log().sum() - 3 * held_out.log().mean())
    assert chosen.ridge == 14 * regs[int(torch.stack(scores).argmin())]


def test_diagonal_noise_in_density_and_draws(normal):
    u, y = normal(20, 2), normal(20, 3) * torch.tensor([1.0, 2.0, 5.0])
    fitted = fit_ridge_map(u, y, factors=(1.0,), slopes=(), regs=(0.1,), diagonal=True)
    dense = fitted._replace(noise=fitted.noise.diag())
    z, x = normal(4, 5, 2), normal(4, 1, 3)
    torch.testing.assert_close(fitted.log_density(x, z), dense.log_density(x, z))
    torch.testing.assert_close(fitted.sample(z, generator()), dense.sample(z, generator()))


@pytest.mark.parametrize("predictive", [False, True])
def test_likelihood_of_pixels_is_the_product_over_pixels(few, predictive):
    """The quadratic form against pixel by pixel with plain loops; of a batch, and of uint8 as of
    floats.
    """
    filter = PixelParticleFilter(oscillatory(), particles=5, predictive=predictive).fit(recording())
    model = filter.model
    assert isinstance(model, StateSpace)
    z = torch.randn(2, 5, 2, dtype=F64, generator=generator(3))
    x = recording(2, seed=7).obs[:, None]
    found = model.log_likelihood(x, z)
    mean, scale = model.image.predict(z)
    for b in range(2):
        for k in range(5):
            s = scale[b, k].item() if predictive else 1.0
            total = sum(
                -0.5 * (x[b].flatten()[j] - mean[b, k, j]) ** 2 / (s * model.image.noise[j])
                - 0.5 * math.log(s)
                for j in range(42)
            )
            torch.testing.assert_close(found[b, k], total)
    bytes_ = (x.clamp(0, 1) * 255).round().to(torch.uint8)
    torch.testing.assert_close(
        model.log_likelihood(bytes_, z), model.log_likelihood(bytes_.double() / 255, z)
    )
    drawn = model.observe(z[:1, :1].expand(4000, 1, 2), generator())
    assert drawn.shape == (4000, 1, *SHAPE)
    size = model.image.noise * (scale[0, 0] if predictive else 1)
    torch.testing.assert_close(drawn[:, 0].flatten(1).var(0), size, rtol=0.15, atol=0)


def test_particle_filter_on_pixels_takes_the_true_moves_and_both_dtypes(few):
    truth, data, test = oscillatory(), recording(), recording(30, seed=5)
    filter = PixelParticleFilter(truth, particles=200, predictive=True).fit([data])
    z = torch.randn(3, 4, 2, dtype=F64, generator=generator())
    assert torch.equal(filter.model.move(z, generator()), truth.move(z, generator()))
    run = rollout(filter, test.obs[None], generator=generator())
    assert (run.estimates[0] - test.states).square().sum(-1).mean() < 0.1
    single = PixelParticleFilter(truth, particles=200, predictive=True).fit(
        [Recording(*(x.float() for x in data[:2]))]
    )
    found = rollout(single, test.obs[None].float(), generator=generator())
    assert found.estimates.dtype == torch.float32 and found.diagnostics["ess"].shape == (1, 30)


def test_observation_density_of_codes_flat_and_on_the_circle(few):
    """The density is the regression's own, with angles for residuals where codes have norm 1."""
    model = oscillatory()
    flat = simulate(model, model.m0, 60, generator())
    filter = ObservationParticleFilter(model, particles=50).fit(flat)
    fitted = learned.fit_ridge_map(flat.states, flat.obs)
    z, x = (
        torch.randn(2, 5, 2, dtype=F64, generator=generator(1)),
        torch.randn(2, 1, 2, dtype=F64, generator=generator(2)),
    )
    torch.testing.assert_close(filter.model.log_likelihood(x, z), fitted.log_density(x, z))
    assert torch.equal(filter.model.move(z, generator()), model.move(z, generator()))
    torch.testing.assert_close(filter.model.observe(z, generator()), fitted.sample(z, generator()))
    turning = OrientationModel()
    ring = simulate(turning, torch.tensor([1.0, 0.0], dtype=F64), 100, generator())
    filter = ObservationParticleFilter(turning, particles=2000).fit(ring)
    assert filter.model.observation.manifold == CIRCLE and filter.model.observation.noise.shape == (
        1,
        1,
    )
    assert 0.15 < filter.model.observation.noise.sqrt().item() < 0.25  # sigma_x is 0.2
    test = simulate(turning, torch.tensor([1.0, 0.0], dtype=F64), 60, generator(9))
    ours, best = (
        (rollout(f, test.obs[None], generator=generator()).estimates[0] - test.states)
        .square()
        .sum(-1)
        .mean()
        for f in (filter, ParticleFilter(turning, 2000).fit(ring))
    )
    assert ours < 1.25 * best
    for other in (ObservationParticleFilter(turning), PixelParticleFilter(turning)):
        with pytest.raises(ValueError, match="needs a memory"):
            other.fit(None)


# Gaussian filters with any model of the right equations, and observations that nobody has encoded


def test_gaussian_filters_take_the_position_model():
    model = position_model()
    data = simulate(model, model.m0, 20, generator())
    same = oscillatory(sigma_x=0.05)._replace(R=model.R)
    for kind in (EKF, UKF):
        ours, other = (rollout(kind(m).fit(data), data.obs[None]).estimates for m in (model, same))
        torch.testing.assert_close(ours, other)
    assert EKF(model).fit(None).model is model


def test_filters_of_vectors_refuse_images_in_one_sentence():
    images = recording(20)
    position, turning = position_model(), OrientationModel()
    for recipe in (
        *(
            kind(m)
            for m in (position, turning, oscillatory())
            for kind in (EKF, UKF, ParticleFilter, ObservationParticleFilter)
        ),
        LearnedKalman(),
        learned.LearnedParticleFilter(),
    ):
        with pytest.raises(
            ValueError, match=r"images must be encoded first: give the data an encoding"
        ):
            recipe.fit(images)
    with pytest.raises(ValueError, match="give the data an encoding"):
        LSTMFilter(2, 2).prepare([images])


# LSTM


def image_net(**changes) -> LSTMFilter:
    torch.manual_seed(0)
    encoder = CNN(SHAPE, 4, (4,), dropout=0.3, norm="batch")
    net = LSTMFilter(
        2,
        SHAPE,
        encoder=Augment((PixelNoise(0.2),), encoder),
        hidden=6,
        generator=generator(),
        **changes,
    ).double()
    net.prepare([recording()])
    return net


def test_the_encoder_gets_images_as_they_are_and_says_its_width():
    net = image_net()
    assert net.rnn.input_size == 5 and (net.x_mean == 0).all() and (net.x_scale == 1).all()
    seen = []
    net.encoder.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    bytes_ = torch.randint(256, (3, *SHAPE), dtype=torch.uint8, generator=generator())
    net.encode(bytes_)
    assert seen[0] is bytes_
    features = nn.Sequential(nn.Flatten(), nn.Linear(42, 4))
    features.features = nn.Identity()  # as nets of torchvision have it: no width
    with pytest.raises(ValueError, match="together"):
        LSTMFilter(2, SHAPE, encoder=features)
    net = LSTMFilter(2, SHAPE, encoder=features, features=4)
    net.prepare([recording()])
    assert net.x_scale[0, 0, 0] != 1  # standardised, as ever
    with pytest.raises(ValueError, match="together"):
        LSTMFilter(2, SHAPE, features=4)


@pytest.mark.parametrize("feedback", [False, True])
def test_forward_is_the_rollout_on_images(feedback):
    net = image_net(feedback=feedback)
    obs = torch.stack([recording(6, seed=s).obs for s in (1, 2)])
    mask = torch.tensor([[True] * 6, [False, True, True, False, False, True]])
    net.train()
    net(obs)  # batch norm has seen something
    net.eval()
    torch.testing.assert_close(net(obs), rollout(net, obs).estimates)
    gradients = []
    for estimates in (net(obs, mask), rollout(net, obs, mask=mask, gradients=True).estimates):
        net.zero_grad()
        estimates.square().mean().backward()
        gradients.append([p.grad.clone() for p in net.parameters()])
    torch.testing.assert_close(gradients[0], gradients[1])
    assert all(g.abs().sum() > 0 for g in gradients[0])


def test_training_encodes_all_windows_at_once_with_noise_and_without_what_was_not_observed():
    net, obs = image_net(), torch.stack([recording(6, seed=s).obs for s in (1, 2)])
    mask = torch.tensor([[True] * 6, [False] * 6])
    sizes = []
    net.encoder.encoder.register_forward_pre_hook(lambda module, args: sizes.append(args[0]))
    net.train()
    net(obs)
    assert len(sizes) == 1 and len(sizes[0]) == 12 and not torch.equal(sizes[0], obs.flatten(0, 1))
    noise = (sizes[0] - obs.flatten(0, 1)).std()
    assert 0.15 < noise < 0.25
    net(torch.where(mask[..., None, None, None], obs, 1e6), mask)
    assert len(sizes[1]) == 6 and sizes[1].abs().max() < 10
    assert all(torch.isfinite(b).all() for b in net.buffers())
    net.eval()
    net(obs)
    assert torch.equal(sizes[-1], obs.flatten(0, 1))
    assert net(obs, torch.zeros(2, 6, dtype=torch.bool)).shape == (
        2,
        6,
        2,
    )  # nothing observed at all


def test_feedback_is_the_previous_estimate_in_the_gates():
    """Against the cell by hand, with the estimate in standard units as a third input."""
    net = LSTMFilter(2, 3, hidden=5, sizes=(4,), feedback=True, generator=generator()).double()
    net.prepare([Recording(torch.randn(30, 2, dtype=F64) * 3 + 1, torch.randn(30, 3, dtype=F64))])
    obs = torch.randn(2, 4, 3, dtype=F64, generator=generator())
    mask = torch.tensor([[True] * 4, [True, False, False, True]])
    W, U, b, more = net.rnn.all_weights[0]
    cell = nn.LSTMCell(5 + 2, 5).double()
    with torch.no_grad():
        cell.weight_ih.copy_(torch.cat([W, net.feedback.weight], 1))
        cell.weight_hh.copy_(U)
        cell.bias_ih.copy_(b)
        cell.bias_hh.copy_(more)
        h = c = torch.zeros(2, 5, dtype=F64)
        found = []
        for t in range(4):
            previous = (net.z_mean + net.z_scale * net.readout(h) - net.z_mean) / net.z_scale
            u = torch.where(mask[:, t, None], net.encode(obs[:, t]), 0)
            h, c = cell(torch.cat([u, previous], 1), (h, c))
            found.append(net.z_mean + net.z_scale * net.readout(h))
    torch.testing.assert_close(net(obs, mask), torch.stack(found, 1))
    torch.testing.assert_close(rollout(net, obs, mask=mask).estimates, torch.stack(found, 1))


def test_configurations_build():
    """What the files in configs/model say, with the encoder of a data set."""
    encoding = {
        "encoder": {
            "_target_": "kbf.CNN",
            "q": list(SHAPE),
            "features": 3,
            "channels": [4],
        }
    }
    augment = [{"_target_": "kbf.PixelNoise", "std": 0.1}]
    data = {
        "d": 2,
        "q": [2],
        "image": list(SHAPE),
        "problem": {"_target_": "kbf.OrientationModel"},
    }
    made = {}
    for name in ("lstm_images", "lstm_feedback", "particle_observation", "particle_pixels"):
        config = OmegaConf.create(
            {"data": {**data, "encoding": {**encoding, "augment": augment}}, "model": read(name)}
        )
        model = OmegaConf.to_container(config, resolve=True)["model"]
        made[name] = build(model["net"])
        assert model["name"] == name and (model["encoding"] is None) == (
            name in ("lstm_images", "particle_pixels")
        )
    assert made["lstm_images"].rnn.input_size == 4 and made["lstm_images"].raw
    assert made["lstm_feedback"].feedback is not None and made["lstm_feedback"].shape == (2,)


def read(name: str) -> dict:
    from pathlib import Path

    return OmegaConf.to_container(
        OmegaConf.load(Path(__file__).resolve().parents[2] / "configs" / "model" / f"{name}.yaml")
    )
