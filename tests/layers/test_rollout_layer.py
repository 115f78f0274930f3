"""The filter as a layer against the published algorithm, finite differences, and kbf's filters."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kbf
from kbf.filters.kernel.feature_kbf import FeatureKBF
from kbf.layers import IWKBR, DensityRatio, KernelBayesFilterRollout, KernelTransition
from kbf.recording import Recording
from kbf.rkhs.kernels import gaussian, linear
from kbf.rkhs.linalg import NotPositiveDefiniteError

N, T, B = 40, 7, 3
K_Z, K_T, K_X = (partial(gaussian, bandwidth=width) for width in (0.6, 0.5, 1.1))
REGS = (0.02, 0.003, 0.01)


@pytest.fixture(scope="module")
def data() -> kbf.SyntheticData:
    return kbf.SyntheticData(kbf.ssm.rotation(), n_train=N, n_test=B * T, seed=0)


@pytest.fixture
def memory(data) -> Recording:
    return data.train[0]


@pytest.fixture
def obs(data) -> Tensor:
    return data.test[0].obs.unflatten(0, (B, T))


@pytest.fixture
def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def layer_of(
    encoder: nn.Module, kernel=None, learn: bool = False, **how
) -> KernelBayesFilterRollout:
    """A layer with the kernels and ridges above."""
    learned = {"learn_reg": learn, "learn_bandwidth": learn}
    rule = {"bandwidth": 1.1, **learned} if kernel else {"learn_reg": learn}
    return KernelBayesFilterRollout(
        encoder,
        transition=KernelTransition(bandwidth=0.5, reg=REGS[1], **learned),
        ratio=DensityRatio(bandwidth=0.6, reg=REGS[0], **learned),
        rule=IWKBR(kernel, reg=REGS[2], **rule),
        **how,
    )


@pytest.mark.parametrize("kernel", ["gaussian", None])
def test_the_layer_is_the_algorithm(kernel, memory, obs, encoder):
    """Algorithm 2 of the paper, over the features, for each recording of the batch."""
    layer = layer_of(encoder, kernel)
    found = layer(obs, memory)
    k_X = K_X if kernel else linear
    with torch.no_grad():
        psi, new = encoder(memory.obs), encoder(obs)
    for k in range(B):
        expected = kbf.kernel_bayes_filter(memory.states, psi, new[k], (K_Z, K_T, k_X), REGS)
        torch.testing.assert_close(found.estimates[k], expected.estimates, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.state.weights[k], expected.weights[-1], rtol=0, atol=1e-10)
    assert (found.diagnostics["rejected"] == 0).all()


@pytest.mark.parametrize("normalise", [False, True])
def test_the_layer_is_the_model_of_the_library(normalise, memory, obs):
    """`KBF` over full Gram matrices, with the same numbers."""
    regs = tuple(REGS)
    model = kbf.KBF(rank=None, regs=regs, normalise=normalise)
    model.set(torch.tensor([0.6, 0.5, 1.1]), torch.tensor(regs))
    expected = kbf.rollout(model.fit(memory), obs)
    found = layer_of(nn.Identity(), "gaussian", normalise=normalise)(obs, memory)
    torch.testing.assert_close(found.estimates, expected.estimates, rtol=0, atol=1e-6)


def test_two_recordings_are_not_joined(memory, obs, encoder):
    """No move leads from the end of one recording to the start of the next."""
    parts = [
        memory._replace(states=z, obs=x)
        for z, x in zip(memory.states.split(25), memory.obs.split(25), strict=True)
    ]
    layer = layer_of(encoder)
    assert not torch.allclose(layer(obs, parts).estimates, layer(obs, memory).estimates)
    P = layer.encode(parts).filter.transition.left
    assert (P[[0, 25]] == 0).all() and (P[[24, 26]] != 0).any(1).all()


def test_a_batch_is_one_by_one(memory, obs, encoder):
    layer = layer_of(encoder)
    together = layer(obs, memory)
    for k in range(B):
        alone = layer(obs[k : k + 1], memory)
        torch.testing.assert_close(together.estimates[k], alone.estimates[0], rtol=0, atol=1e-11)


def test_an_encoded_memory_serves_several_rollouts(memory, obs, encoder):
    layer = layer_of(encoder, learn=True)
    encoded = layer.encode(memory)
    parts = [layer(obs[k : k + 1], encoded).estimates for k in range(B)]
    expected = layer(obs, memory).estimates
    torch.testing.assert_close(torch.cat(parts), expected, rtol=0, atol=1e-11)
    torch.stack([part.square().sum() for part in parts]).sum().backward()
    found = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    expected.square().sum().backward()
    for one, p in zip(found, layer.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad, rtol=1e-6, atol=1e-9)


# Gradients


@pytest.mark.parametrize("kernel", ["gaussian", None])
def test_gradients_are_finite_differences(kernel, memory, obs, encoder, fast):
    """In every parameter, the observations, and the states and observations of the memory."""
    small = Recording(memory.states[:12], memory.obs[:12])
    layer = layer_of(encoder, kernel, learn=True)
    names, values = zip(*layer.named_parameters(), strict=True)
    assert {name.partition(".")[0] for name in names} == {"encoder", "transition", "ratio", "rule"}
    assert len(names) == 4 + 5 + (kernel is not None)
    inputs = (obs[:2, :3], small.states, small.obs, *values)
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    mask = torch.tensor([[True, True, True], [False, True, True]])

    def estimates(obs, states, memory_obs, *values):
        given = dict(zip(names, values, strict=True))
        call = (obs, Recording(states, memory_obs))
        return torch.func.functional_call(layer, given, call, {"mask": mask}).estimates

    assert torch.autograd.gradcheck(estimates, inputs, fast_mode=fast)
    assert all(g.abs().max() > 0 for g in torch.autograd.grad(estimates(*inputs).sum(), inputs))


def test_several_backward_passes_and_steps_in_a_row(memory, obs, data, encoder):
    """Nothing is kept with a graph, and the second step sees the encoder of the first."""
    layer, target = layer_of(encoder, learn=True), data.test[0].states.unflatten(0, (B, T))
    gradients = []
    for _ in range(2):
        layer.zero_grad()
        (layer(obs, memory).estimates - target).square().mean().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in layer.parameters()]))
    assert torch.equal(*gradients) and gradients[0].norm() > 0
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.02)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = (layer(obs, memory).estimates - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]


def test_masked_observations_have_no_gradient_and_may_be_nan(memory, obs, encoder):
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[0, 2], mask[1, 0] = False, False
    layer = layer_of(encoder, learn=True)
    hidden = torch.where(mask[..., None], obs, torch.nan).requires_grad_()
    found = layer(hidden, memory, mask=mask)
    assert torch.equal(found.estimates, layer(obs, memory, mask=mask).estimates)
    found.estimates.square().sum().backward()
    assert (hidden.grad[~mask] == 0).all() and (hidden.grad[mask] != 0).any()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_a_large_batch_is_one_by_one(memory, encoder, normal):
    """From 8 recordings on stored products of features are used; numbers and gradients agree."""
    obs, layer = normal(9, 3, 2), layer_of(encoder, learn=True)
    layer(obs, memory).estimates.square().sum().backward()
    together = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    torch.stack([layer(x[None], memory).estimates.square().sum() for x in obs]).sum().backward()
    for one, p in zip(together, layer.parameters(), strict=True):
        torch.testing.assert_close(one, p.grad, rtol=1e-6, atol=1e-8)


def test_a_rule_that_fails_is_an_error(memory, obs):
    """In place of NaN in the gradient: six equal features are singular without a ridge."""
    layer = KernelBayesFilterRollout(nn.Linear(2, 6).float(), rule=IWKBR(reg=1e-30))
    nn.init.zeros_(layer.encoder.weight)
    with pytest.raises(NotPositiveDefiniteError, match="6 x 6 matrix is not positive definite"):
        layer(obs, memory)
    with torch.no_grad():
        layer.encoder.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match=r"features of the encoder hold NaN .* diverged"):
        layer(obs, memory)


def test_the_gradient_of_a_continued_rollout_is_truncated(memory, obs, encoder):
    """As docs/layers.md has it: earlier steps have no gradient after the state is detached."""
    layer = layer_of(encoder)
    first = layer(obs[:, :4].clone().requires_grad_(), memory)
    state = type(first.state)(*(part.detach() for part in first.state))
    x = obs[:, 4:].clone().requires_grad_()
    rest = layer(x, memory, state=state)
    assert torch.equal(rest.estimates, layer(x, memory, state=first.state).estimates)
    rest.estimates.sum().backward()
    assert (x.grad != 0).any()


def test_autocast_lowers_the_precision_of_the_encoder_alone(memory, obs, encoder):
    layer = layer_of(copy.deepcopy(encoder).float())
    expected = layer(obs, memory).estimates
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(obs, memory).estimates
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
    low = copy.deepcopy(layer)
    low.encoder = nn.Sequential(low.encoder.bfloat16())
    torch.testing.assert_close(low(obs, memory).estimates, expected, rtol=0, atol=0.1)


# Time


def test_a_state_continued_is_the_whole(memory, obs, encoder):
    layer = layer_of(encoder)
    whole = layer(obs, memory)
    first = layer(obs[:, :4], memory)
    rest = layer(obs[:, 4:], memory, state=first.state)
    found = torch.cat([first.estimates, rest.estimates], 1)
    torch.testing.assert_close(found, whole.estimates, rtol=0, atol=1e-12)
    torch.testing.assert_close(rest.state.weights, whole.state.weights, rtol=0, atol=1e-12)


def test_a_masked_step_is_the_prediction(memory, obs, encoder):
    layer = layer_of(encoder)
    mask = torch.ones(B, T, dtype=torch.bool)
    mask[:, -1] = False
    encoded = layer.encode(memory)
    before = layer(obs[:, :-1], encoded).state
    predicted = layer.transition(before.weights, memory.states) @ memory.states
    found = layer(obs, encoded, mask=mask).estimates[:, -1]
    torch.testing.assert_close(found, predicted, rtol=0, atol=1e-12)


def test_controls(encoder):
    """A point that turns by the control, hidden from the observation for five steps."""
    generator = torch.Generator().manual_seed(0)
    turn = 0.6 * torch.rand(260, 1, generator=generator).double() - 0.1
    angle = turn.cumsum(0)
    states = torch.cat([angle.cos(), angle.sin()], 1)
    x = states + 0.1 * torch.randn(260, 2, generator=generator).double()
    memory = Recording(states[:250], x[:250], controls=turn[:250])
    layer = KernelBayesFilterRollout(
        nn.Identity(),
        transition=KernelTransition(bandwidth=0.5, reg=1e-5, control_bandwidth=0.3),
        ratio=DensityRatio(bandwidth=0.5),
        rule=IWKBR("gaussian", bandwidth=0.5),
        normalise=True,
    )
    mask = torch.arange(10)[None] < 5
    found = layer(x[None, 250:], memory, mask=mask, controls=turn[None, 250:]).estimates
    assert (found[0] - states[250:]).square().sum(-1).max() < 0.05
    with pytest.raises(ValueError, match="give it the 1 of each step"):
        layer(x[None, 250:], memory)


# Types, devices, files


def test_single_precision_is_near_double(memory, obs, encoder):
    expected = layer_of(encoder, "gaussian")(obs, memory).estimates
    single = Recording(memory.states.float(), memory.obs.float())
    layer = layer_of(copy.deepcopy(encoder).float(), "gaussian")
    found = layer(obs.float(), single).estimates
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)
    mixed = layer(obs, memory).estimates  # a float32 encoder among float64 states
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-4)


def test_a_layer_is_saved_and_loaded(memory, obs, encoder, tmp_path):
    layer = layer_of(encoder, "gaussian", learn=True)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = KernelBayesFilterRollout(copy.deepcopy(encoder), rule=IWKBR("gaussian"))
    nn.init.zeros_(other.encoder[0].weight)
    assert not torch.allclose(other(obs, memory).estimates, layer(obs, memory).estimates)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    assert torch.equal(other(obs, memory).estimates, layer(obs, memory).estimates)


def test_everything_moves_to_a_device(encoder):
    layer = layer_of(encoder, "gaussian", learn=True).to("meta")
    assert {x.device.type for x in [*layer.parameters(), *layer.buffers()]} == {"meta"}


def test_images_of_bytes_and_arrays(rng):
    """uint8 is divided by 255, as by every encoder of kbf."""
    images = rng.integers(0, 256, (20, 1, 4, 4)).astype(np.uint8)
    states = rng.standard_normal((20, 2))
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    layer = layer_of(net)
    memory = Recording(states[:15], images[:15])
    found = layer(images[None, 15:], memory).estimates
    floats = Recording(states[:15], images[:15] / 255)
    assert found.dtype == torch.float64
    torch.testing.assert_close(
        found, layer(images[None, 15:] / 255, floats).estimates, rtol=0, atol=1e-5
    )


# The filter for deployment


@pytest.mark.parametrize("kernel", ["gaussian", None])
def test_the_fitted_filter_is_the_layer(kernel, memory, obs, encoder):
    layer = layer_of(encoder, kernel, learn=True)
    filter = layer.fit([memory])
    expected = layer(obs, memory).estimates
    found = kbf.rollout(filter, obs).estimates
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)
    assert not found.requires_grad and not any(p.requires_grad for p in filter.parameters())
    live = kbf.RunningFilter(filter, batch=B)
    steps = torch.stack([live.step(obs[:, t]) for t in range(T)], 1)
    torch.testing.assert_close(steps, expected, rtol=0, atol=1e-11)
    smoothed = kbf.smooth(filter, obs).estimates
    assert smoothed.shape == found.shape and smoothed.isfinite().all()
    torch.testing.assert_close(smoothed[:, -1], found[:, -1], rtol=0.5, atol=0.5)
    covariances = kbf.rollout(filter, obs, covariances=True).covariances
    assert (torch.linalg.eigvalsh(covariances) > -1e-12).all()


def test_the_fitted_filter_does_not_change_with_training(memory, obs, encoder):
    layer = layer_of(encoder, learn=True)
    filter = layer.fit(memory)
    before = kbf.rollout(filter, obs).estimates
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.3)
    assert torch.equal(kbf.rollout(filter, obs).estimates, before)
    assert all(p.requires_grad for p in layer.parameters()) and layer.training
    assert not torch.allclose(layer(obs, memory).estimates, before)


def test_smoothing_is_that_of_the_library(memory, obs):
    model = kbf.KBF(rank=None, regs=REGS, normalise=True)
    model.set(torch.tensor([0.6, 0.5, 1.1]), torch.tensor(REGS))
    expected = kbf.smooth(model.fit(memory), obs).estimates
    filter = layer_of(nn.Identity(), "gaussian", normalise=True).fit(memory)
    torch.testing.assert_close(kbf.smooth(filter, obs).estimates, expected, rtol=0, atol=1e-6)


def test_bandwidths_of_a_memory(memory, obs):
    """Those that `KBF.prepare` selects, in the units of the data."""
    model = kbf.KBF(rank=None, normalise=True, regs=REGS)
    layer = layer_of(nn.Identity(), "gaussian", learn=True, normalise=True)
    for scale in (1.0, 1000.0):
        scaled = [memory._replace(states=scale * memory.states)]
        model.prepare(scaled)
        layer.prepare(scaled)
        widths = [layer.ratio.bandwidth, layer.transition.bandwidth, layer.rule.bandwidth]
        torch.testing.assert_close(torch.stack(widths), model.log_bandwidth.exp())
        expected = kbf.rollout(model.fit(scaled), obs).estimates
        found = layer(obs, scaled).estimates
        torch.testing.assert_close(found / scale, expected / scale, rtol=0, atol=1e-7)


def test_features_are_those_of_the_model_of_the_library(memory, obs, encoder):
    """`FeatureKBF` has the same rule over features, with a low-rank ratio and transition."""
    model = FeatureKBF(encoder, constant=False, standardise=False, rank=N, regs=REGS)
    model.set(torch.tensor([0.6, 0.5, 1.0]), torch.tensor(REGS))
    expected = kbf.rollout(model.fit(memory), obs).estimates
    found = layer_of(encoder, normalise=True)(obs, memory).estimates
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


# What is refused


WRONG = {
    r"observations must be \(batch, time, ...\)": lambda layer, memory, x: layer(x[0], memory),
    r"as in the memory, \(2,\); got \(3, 7, 3\)": lambda layer, memory, x: layer(
        torch.cat([x, x[..., :1]], -1), memory
    ),
    r"mask must be \(3, 7\), got \(3, 6\)": lambda layer, memory, x: layer(
        x, memory, mask=torch.ones(3, 6, dtype=torch.bool)
    ),
    "takes no controls": lambda layer, memory, x: layer(x, memory, controls=x[..., :1]),
    "observations hold NaN or infinite values": lambda layer, memory, x: layer(x / 0 * 0, memory),
    "the memory holds no recording": lambda layer, memory, x: layer(x, []),
    "recording 0: states must be": lambda layer, memory, x: layer(
        x, memory._replace(states=memory.states[:-1])
    ),
    "needs every observation of its memory": lambda layer, memory, x: layer(
        x, memory._replace(mask=torch.arange(N) > 3)
    ),
    "no pair of successive states": lambda layer, memory, x: layer(
        x, [Recording(memory.states[:1], memory.obs[:1])]
    ),
    r"one row of features for each observation, \(40, p\); .* returned \(80,\)": (
        lambda layer, memory, x: KernelBayesFilterRollout(nn.Flatten(0))(x, memory)
    ),
    "a ratio that is not negative": lambda layer, memory, x: KernelBayesFilterRollout(
        nn.Identity(), ratio=DensityRatio(method="tikhonov")
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_refused(message, memory, obs, encoder, unchecked):
    with pytest.raises(ValueError, match=message):
        WRONG[message](layer_of(encoder), memory, obs)
