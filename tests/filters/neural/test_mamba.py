"""The selective state-space network: its scan against a loop and linear attention, its two forms
against each other, and its variances against the errors.
"""

import pytest
import torch
from torch import Tensor

from kbf.filters.neural.mamba import MambaFilter, SelectiveLayer, scan
from kbf.filters.rollout import rollout
from kbf.recording import Recording

F64 = torch.float64


def normal(*size: int, seed: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=F64)


def parts(T: int) -> tuple[Tensor, ...]:
    """v, D, A, B, C, S of two recordings, three heads of width 4, and 5 numbers a state."""
    D, A = normal(2, T, 3, seed=1).exp(), -normal(3, seed=2).exp()
    B, C = normal(2, T, 5, seed=3), normal(2, T, 5, seed=4)
    return normal(2, T, 3, 4, seed=0), D, A, B, C, normal(2, 3, 4, 5, seed=5)


@pytest.mark.parametrize("block", [1, 4, 7, 64])
def test_the_scan_is_the_recursion_whatever_the_block(block):
    v, D, A, B, C, S = parts(19)
    found, last = scan(v, D, A, B, C, S, block)
    for t in range(19):
        keep = (D[:, t] * A).exp()[..., None, None]
        S = keep * S + torch.einsum("bh,bhp,bn->bhpn", D[:, t], v[:, t], B[:, t])
        y = torch.einsum("bhpn,bn->bhp", S, C[:, t])
        torch.testing.assert_close(found[:, t], y, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(last, S, rtol=1e-12, atol=1e-12)


def test_without_decay_the_scan_is_linear_attention():
    v, D, A, B, C, S = parts(11)
    found, _ = scan(v, torch.ones_like(D), 0 * A, B, C, 0 * S, 4)
    attention = (C @ B.mT).tril()
    torch.testing.assert_close(found, torch.einsum("bts,bshp->bthp", attention, v))


def test_large_rates_forget_and_stay_finite():
    v, D, A, B, C, S = parts(9)
    D = (D * 1e4).requires_grad_()
    found, _ = scan(v, D, A, B, C, S)
    now = D[..., None] * v * (C * B).sum(-1)[..., None, None]
    torch.testing.assert_close(found, now)
    found.sum().backward()
    assert D.grad is not None
    assert bool(D.grad.isfinite().all())


def net(k: int = 0, dtype: torch.dtype = F64) -> MambaFilter:
    settings = {"hidden": 12, "heads": 3, "head_width": 4, "n": 5, "controls": k}
    made = MambaFilter(2, 3, **settings, generator=torch.Generator().manual_seed(0)).to(dtype)
    controls = None if k == 0 else 2 + normal(40, k, seed=8).to(dtype)
    memory = Recording(3 * normal(40, 2, seed=6) + 1, 5 * normal(40, 3, seed=7), controls=controls)
    made.prepare([memory._replace(states=memory.states.to(dtype), obs=memory.obs.to(dtype))])
    return made


@pytest.mark.parametrize(("dtype", "tolerance"), [(F64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("k", [0, 2])
def test_steps_are_the_parallel_form(k, dtype, tolerance):
    filter, obs = net(k, dtype), normal(2, 90, 3, seed=9).to(dtype)
    controls = normal(2, 90, k, seed=10).to(dtype) if k else None
    mask = torch.rand(2, 90, generator=torch.Generator().manual_seed(11)) < 0.7
    with torch.no_grad():
        run = rollout(filter, obs, mask=mask, controls=controls, covariances=True)
        h = filter.hidden_states(obs, mask, controls)
        means = filter.z_mean + filter.z_scale * filter.readout(h)
        variances = filter.z_scale.square() * filter.log_variance(h).exp()
    torch.testing.assert_close(run.estimates, means, rtol=tolerance, atol=tolerance)
    assert run.covariances is not None
    found = run.covariances.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(found, variances, rtol=tolerance, atol=tolerance)


def test_a_step_depends_on_the_steps_before_it_alone():
    filter, obs = net(), normal(1, 30, 3, seed=0)
    changed = obs.clone()
    changed[:, 20:] += 1
    with torch.no_grad():
        a, b = filter.hidden_states(obs), filter.hidden_states(changed)
    torch.testing.assert_close(a[:, :20], b[:, :20], rtol=0, atol=1e-12)
    assert not torch.allclose(a[:, 20], b[:, 20])


def test_initial_rates_and_decays_are_in_their_ranges():
    layer = SelectiveLayer(8, 50, 2, 3)
    layer.start(torch.Generator().manual_seed(0))
    rate = torch.nn.functional.softplus(layer.rate_bias.detach())
    decay = layer.log_decay.detach().exp()
    assert 1e-3 <= float(rate.min()) < 3e-3
    assert 0.05 < float(rate.max()) <= 0.1
    assert 1 <= float(decay.min()) < 3
    assert 13 < float(decay.max()) <= 16


def test_the_loss_reaches_all_parameters_and_variances_change_no_mean():
    filter, obs, states = net(), normal(2, 12, 3, seed=1), normal(2, 12, 2, seed=2)
    filter.loss(states, obs, burn_in=2).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in filter.parameters())
    gradient = filter.readout.weight.grad
    assert gradient is not None
    with torch.no_grad():
        h = filter.hidden_states(obs)[:, 2:]
    left = (states[:, 2:] - filter.z_mean) / filter.z_scale - filter.readout(h)
    (expected,) = torch.autograd.grad(left.square().sum(-1).mean(), filter.readout.weight)
    torch.testing.assert_close(gradient, expected)


def test_sizes_are_checked():
    with pytest.raises(ValueError, match="at least 1"):
        MambaFilter(2, 3, heads=0)
