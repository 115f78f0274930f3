"""Gated recurrent units over codes with variances: the recurrence against PyTorch's, the likelihood
against SciPy's.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from kbf.filters.neural.gru import GRUImages, GRUState
from kbf.filters.rollout import rollout
from kbf.images.encoders import CNN
from kbf.recording import Recording

F64 = torch.float64


def normal(*size: int, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=F64)


def net(controls: int = 0) -> GRUImages:
    torch.manual_seed(0)
    return GRUImages(2, 3, m=4, units=8, controls=controls).double()


@pytest.mark.parametrize("k", [0, 2])
def test_a_rollout_is_pytorch_s_recurrence_and_moves_with_zeros_where_nothing_was_seen(k):
    filter, obs, u = net(k), normal(2, 5, 3, seed=0), normal(2, 5, k, seed=1)
    if k:
        filter.u_mean, filter.u_scale = normal(k, seed=2), normal(k, seed=3).exp()
    mask = torch.tensor([[True, True, False, True, True], [True, False, False, True, True]])
    whole = torch.nn.GRU(9 + k, 8, batch_first=True).double()
    whole.load_state_dict({f"{name}_l0": value for name, value in filter.cell.state_dict().items()})
    with torch.no_grad():
        encodings = torch.cat(
            [*filter.encode(obs.flatten(0, 1)), torch.ones(10, 1, dtype=F64)], -1
        ).unflatten(0, (2, 5))
        acted = (u - filter.u_mean) / filter.u_scale if k else u
        h = whole(torch.cat([encodings * mask[..., None], acted], -1))[0]
        found = rollout(filter, obs, mask=mask, controls=u if k else None).estimates
    torch.testing.assert_close(found, filter.readout(h))


def test_the_loss_is_the_log_likelihood_and_reaches_all_parameters():
    filter, obs, states = net(), normal(2, 6, 3, seed=0), 3 * normal(2, 6, 2, seed=1) + 1
    filter.prepare([Recording(states[0], obs[0])])
    run: list[GRUState] = []
    with torch.no_grad():
        estimates = rollout(filter, obs, states=run).estimates
        covariances = torch.stack([filter.covariance(state) for state in run], 1)
    scores = [
        stats.multivariate_normal.logpdf(
            states[k, t].numpy(), estimates[k, t].numpy(), covariances[k, t].numpy()
        )  # pyright: ignore[reportArgumentType]
        for k in range(2)
        for t in range(2, 6)
    ]
    loss = filter.loss(states, obs, burn_in=2)
    standard = sum(
        math.log(scale) for scale in filter.z_scale.tolist()
    )  # densities of standardised states
    assert loss.item() == pytest.approx(-sum(scores) / len(scores) - standard)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in filter.parameters())


def test_images_go_through_an_encoder_as_they_are():
    filter = GRUImages(
        2, (1, 24, 24), m=4, units=8, encoder=CNN((1, 24, 24), features=6, channels=(4, 4))
    )
    images = torch.randint(
        0, 256, (1, 3, 1, 24, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    assert rollout(filter.eval(), images).estimates.shape == (1, 3, 2)
