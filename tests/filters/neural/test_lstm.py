"""The LSTM as a filter, against its equations in NumPy and torch.nn.LSTM."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from kbf.filters.neural.lstm import LSTMFilter
from kbf.filters.protocols import Filter, FilterModel, where
from kbf.filters.rollout import rollout
from kbf.recording import Recording

F64 = torch.float64


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=generator(seed))


def small_net(q: int | tuple[int, ...] = 3) -> LSTMFilter:
    net = LSTMFilter(2, q, hidden=5, sizes=(6, 4), generator=generator()).double()
    shape = (q,) if isinstance(q, int) else q
    net.prepare([Recording(2 * randn(40, 2, seed=1) + 3, 4 * randn(40, *shape, seed=2) - 1)])
    return net


def masked_batch(b: int = 3, T: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.rand(b, T, generator=generator(5)) < 0.6
    mask[0, :2] = torch.tensor([False, True])
    return randn(b, T, 3, seed=3), mask


def naive(net: LSTMFilter, obs, mask) -> np.ndarray:
    """The estimates of one sequence, by the equations of Gers et al. (2000), with plain vectors."""
    p = {k: v.detach().numpy() for k, v in net.state_dict().items()}
    logistic = lambda a: 1 / (1 + np.exp(-a))  # noqa: E731
    h = c = np.zeros(5)
    out = []
    for x, seen in zip(obs.numpy(), mask, strict=True):
        u = np.zeros(5)
        if seen:
            e = p["encoder.1.weight"] @ ((x - p["x_mean"]) / p["x_scale"]) + p["encoder.1.bias"]
            u[:4] = p["encoder.3.weight"] @ np.maximum(e, 0) + p["encoder.3.bias"]
            u[4] = 1
        gates = (
            p["rnn.weight_ih_l0"] @ u
            + p["rnn.weight_hh_l0"] @ h
            + p["rnn.bias_ih_l0"]
            + p["rnn.bias_hh_l0"]
        )
        i, f, g, o = np.split(gates, 4)
        c = logistic(f) * c + logistic(i) * np.tanh(g)
        h = logistic(o) * np.tanh(c)
        out.append(p["z_mean"] + p["z_scale"] * (p["readout.weight"] @ h + p["readout.bias"]))
    return np.stack(out)


def test_rollout_is_the_lstm_equations():
    net = small_net()
    obs, mask = masked_batch()
    ours = rollout(net, obs, mask=mask).estimates
    for k in range(3):
        np.testing.assert_allclose(
            ours[k].detach().numpy(), naive(net, obs[k], mask[k]), rtol=1e-10, atol=1e-10
        )


def test_forward_is_the_rollout_with_its_gradients():
    net = small_net()
    obs, mask = masked_batch()
    torch.testing.assert_close(net(obs), rollout(net, obs).estimates)
    gradients = []
    for estimates in (net(obs, mask), rollout(net, obs, mask=mask, gradients=True).estimates):
        net.zero_grad()
        estimates.square().mean().backward()
        gradients.append([p.grad.clone() for p in net.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(net.parameters())) and all(
        g.abs().sum() > 0 for g in gradients[0]
    )
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_step_costs_one_cell_and_a_masked_step_moves_in_time(monkeypatch):
    net = small_net()
    calls = {"recur": 0, "encode": 0}
    for name in calls:
        original = getattr(net, name)

        def update_rejection_count(*args, name=name, original=original):
            calls[name] += 1
            return original(*args)

        monkeypatch.setattr(net, name, update_rejection_count)
    state = net.init(2)
    calls["recur"] = 0
    seen = net.update(net.predict(state), randn(2, 3))
    assert calls == {"recur": 1, "encode": 1}
    first = net.predict(seen)
    second = net.predict(first)
    assert calls == {"recur": 3, "encode": 1}
    assert not torch.allclose(net.estimate(first), net.estimate(seen))
    assert not torch.allclose(net.estimate(second), net.estimate(first))
    twice = net.update(net.update(first, randn(2, 3, seed=8)), randn(2, 3, seed=9))
    torch.testing.assert_close(twice, net.update(first, randn(2, 3, seed=9)))
    assert not torch.allclose(
        net.update(first, 0 * randn(2, 3)).h, first.h
    )  # a zero is not a missing observation


def test_state_law_and_batch_is_one_by_one():
    net = small_net()
    assert isinstance(net, FilterModel) and isinstance(net, Filter) and net.fit(None) is net
    obs, mask = masked_batch()
    together = rollout(net, obs, mask=mask)
    assert all(len(leaf) == 3 for leaf in together.state)
    for k in range(3):
        alone = rollout(net, obs[k : k + 1], mask=mask[k : k + 1])
        torch.testing.assert_close(alone.estimates[0], together.estimates[k])
    early = rollout(net, obs[:, :4], mask=mask[:, :4])
    late = rollout(net, obs[:, 4:], mask=mask[:, 4:], state=early.state)
    torch.testing.assert_close(torch.cat([early.estimates, late.estimates], 1), together.estimates)
    a, b = net.predict(net.init(3)), net.update(net.predict(net.init(3)), obs[:, 0])
    picked = where(torch.tensor([True, False, True]), a, b)
    assert torch.equal(picked.h[1], b.h[1]) and torch.equal(picked.h[0], a.h[0])


def test_prepare_standardises_by_the_observed_training_part():
    z = randn(50, 2) * torch.tensor([3.0, 0.5]) + torch.tensor([10.0, -2.0])
    x = randn(50, 3, seed=1) * 7 + 1
    x[:, 2] = 4.0  # constant
    mask = torch.rand(50, generator=generator()) < 0.7
    broken = torch.where(mask[:, None], x, float("nan"))
    net = LSTMFilter(2, 3)
    net.prepare(
        [Recording(z[:30], broken[:30], mask[:30]), Recording(z[30:], broken[30:], mask[30:])], None
    )
    seen = x[mask]
    torch.testing.assert_close(net.x_mean.double(), seen.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        net.x_scale[:2].double(), seen.std(0, correction=0)[:2], rtol=1e-5, atol=1e-5
    )
    assert net.x_scale[2] == 1
    torch.testing.assert_close(net.z_mean.double(), z.mean(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(net.z_scale.double(), z.std(0, correction=0), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="built for"):
        net.prepare([Recording(z, randn(50, 4))])


def test_units_of_the_data_do_not_matter():
    net = small_net()
    z, x = 2 * randn(40, 2, seed=1) + 3, 4 * randn(40, 3, seed=2) - 1
    before = (net(x[None]) - z.mean(0)) / z.std(0)
    net.prepare([Recording(100 * z - 5, 0.01 * x + 7)])
    after = (net(0.01 * x[None] + 7) - (100 * z.mean(0) - 5)) / (100 * z.std(0))
    torch.testing.assert_close(before, after)


def test_images_own_encoders_and_seeds():
    images = torch.rand(30, 3, 4, 5, generator=generator())
    memory = [Recording(randn(30, 2).float(), images)]
    flat = LSTMFilter(2, (3, 4, 5), generator=generator(7))
    flat.prepare(memory)
    assert flat.x_mean.shape == (3, 4, 5) and len(flat.x_scale.unique()) == 1
    torch.testing.assert_close(
        flat.x_scale[0, 0, 0], (images - images.mean(0)).square().mean().sqrt()
    )
    first = nn.Conv2d(3, 2, 3)
    weights = first.weight.clone()
    cnn = nn.Sequential(first, nn.ReLU(), nn.Flatten(), nn.Linear(12, 6))
    own = LSTMFilter(2, (3, 4, 5), encoder=cnn, features=6, generator=generator(7))
    assert torch.equal(first.weight, weights)
    for net in (flat, own):
        torch.testing.assert_close(net(images[None]), rollout(net, images[None]).estimates)
    with pytest.raises(ValueError, match="together"):
        LSTMFilter(2, (3, 4, 5), encoder=cnn)
    twin, other = (LSTMFilter(2, (3, 4, 5), generator=generator(s)) for s in (7, 8))
    for a, b in zip(flat.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(twin.readout.weight, other.readout.weight)
    _, _, bias, more_bias = twin.rnn.all_weights[0]
    assert ((bias + more_bias)[64:128] == 1).all()


def test_state_dict_is_complete():
    net, fresh = small_net(), LSTMFilter(2, 3, hidden=5, sizes=(6, 4)).double()
    fresh.load_state_dict(net.state_dict())
    obs, mask = masked_batch()
    assert torch.equal(
        rollout(net, obs, mask=mask).estimates, rollout(fresh, obs, mask=mask).estimates
    )


def test_it_learns_to_remember_and_to_predict():
    """A point that turns by 0.5 a step, seen only in the first three of eight steps: after 60 steps
    of Adam the error of the
    unseen steps is under a tenth of the variance, which no filter without memory can reach.
    """
    start = 6.28 * torch.rand(64, 1, generator=generator())
    angle = start + 0.5 * torch.arange(8)
    z = torch.stack([angle.cos(), angle.sin()], -1)
    mask = (torch.arange(8) < 3).expand(64, 8)
    net = LSTMFilter(2, 2, hidden=32, generator=generator())
    net.prepare([Recording(s, s) for s in z])
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        (net(z, mask) - z).square().sum(-1).mean().backward()
        optimiser.step()
    with torch.no_grad():
        error = (rollout(net, z, mask=mask).estimates - z).square().sum(-1)
    assert error[:, 3:].mean() < 0.1


def test_float32_is_close_to_float64():
    net = small_net()
    obs, mask = masked_batch(3, 40)
    double = rollout(net, obs, mask=mask).estimates.detach()
    single = rollout(net.float(), obs.float(), mask=mask).estimates.detach()
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), double, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("controls", [0, 1])
def test_a_float32_network_takes_float64(controls):
    net = LSTMFilter(2, 3, hidden=5, sizes=(6, 4), controls=controls, generator=generator())
    obs = torch.randn(2, 6, 3, generator=generator(), dtype=F64)
    u = torch.randn(2, 6, controls, generator=generator(), dtype=F64) if controls else None
    wide = rollout(net, obs, controls=u).estimates
    narrow = rollout(net, obs.float(), controls=None if u is None else u.float()).estimates
    assert wide.dtype == narrow.dtype == torch.float32
    torch.testing.assert_close(wide, narrow, rtol=1e-5, atol=1e-6)
