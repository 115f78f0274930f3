"""The Recurrent Kalman Network against a dense Kalman filter with the same matrices, its likelihood
against SciPy's.
"""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from kbf.filters.gaussian.moments import kalman_update
from kbf.filters.neural.base import inverse_positive, positive
from kbf.filters.neural.rkn import (
    FactorisedCovariance,
    RKNFilter,
    RKNState,
    predict_factorised,
    update_factorised,
)
from kbf.filters.rollout import rollout
from kbf.images.encoders import CNN
from kbf.recording import Recording

F64 = torch.float64
B, M = 3, 4


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def dense(S: FactorisedCovariance) -> Tensor:
    """The whole matrix of three diagonals."""
    upper, lower, between = (part.diag_embed() for part in S)
    return torch.cat([torch.cat([upper, between], -1), torch.cat([between, lower], -1)], -2)


def example() -> tuple[Tensor, FactorisedCovariance]:
    """A mean and a positive definite covariance."""
    draw = torch.rand(3, B, M, generator=generator(), dtype=F64)
    upper, lower = 0.5 + draw[0], 0.5 + draw[1]
    between = (draw[2] - 0.5) * (upper * lower).sqrt()
    return torch.randn(B, 2 * M, generator=generator(1), dtype=F64), FactorisedCovariance(
        upper, lower, between
    )


def test_the_update_is_a_dense_kalman_update():
    mean, S = example()
    w = torch.randn(B, M, generator=generator(2), dtype=F64)
    r = 0.1 + torch.rand(B, M, generator=generator(3), dtype=F64)
    H = torch.cat([torch.eye(M, dtype=F64), torch.zeros(M, M, dtype=F64)], 1)
    expected = kalman_update(mean, dense(S), w, H, r.diag_embed())
    found, covariance = update_factorised(mean, S, w, r)
    torch.testing.assert_close(found, expected.mean)
    torch.testing.assert_close(dense(covariance), expected.cov)


def test_the_prediction_has_the_diagonals_of_the_dense_one():
    mean, S = example()
    A = torch.randn(B, 2 * M, 2 * M, generator=generator(4), dtype=F64)
    noise = torch.rand(2, M, generator=generator(5), dtype=F64)
    found, covariance = predict_factorised(mean, S, A, noise)
    torch.testing.assert_close(found, (A @ mean[..., None])[..., 0])
    expected = A @ dense(S) @ A.mT + noise.flatten().diag()
    torch.testing.assert_close(covariance.upper, expected[:, :M, :M].diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(covariance.lower, expected[:, M:, M:].diagonal(dim1=-2, dim2=-1))
    torch.testing.assert_close(covariance.between, expected[:, :M, M:].diagonal(dim1=-2, dim2=-1))


def test_a_control_moves_the_mean_alone():
    filter = net(controls=2)
    filter.u_mean, filter.u_scale = (
        torch.tensor([1.0, -2.0], dtype=F64),
        torch.tensor([0.5, 3.0], dtype=F64),
    )
    state = filter.update(filter.init(4), torch.randn(4, 3, generator=generator(), dtype=F64))
    u = torch.randn(4, 2, generator=generator(1), dtype=F64)
    pushed, free = filter.predict(state, control=u), filter.predict(state)
    assert filter.push is not None
    moved = filter.push((u - filter.u_mean) / filter.u_scale) - filter.push(
        torch.zeros(1, 2, dtype=F64)
    )
    torch.testing.assert_close(pushed.mean - free.mean, moved)
    assert all(torch.equal(a, b) for a, b in zip(pushed[1:], free[1:], strict=True))


def net(**changes: object) -> RKNFilter:
    torch.manual_seed(0)
    return RKNFilter(**{"d": 2, "q": 3, "m": M, "matrices": 3, "bandwidth": 1} | changes).double()  # pyright: ignore[reportArgumentType]


def test_matrices_keep_to_their_band_and_mix():
    filter = net()
    with torch.no_grad():
        filter.blocks.copy_(torch.randn(filter.blocks.shape, generator=generator(), dtype=F64))
    state = RKNState(*(leaf + 0.1 for leaf in filter.init(1)))
    A = torch.einsum(
        "k,kpij->pij", filter.mixing(state.mean)[0].softmax(-1), filter.blocks * filter.band
    )
    assert (A[:, 0, 2:] == 0).all() and (A[:, 0, :2] != 0).all()
    moved = (
        torch.cat([torch.cat([A[0], A[1]], -1), torch.cat([A[2], A[3]], -1)], -2) @ state.mean[0]
    )
    torch.testing.assert_close(filter.predict(state).mean[0], moved)


def test_codes_have_length_one_and_positive_variances():
    filter = net()
    w, r = filter.encode(100 * torch.randn(50, 3, generator=generator(), dtype=F64))
    torch.testing.assert_close(w.norm(dim=-1), torch.ones(50, dtype=F64))
    assert (r > 0).all()
    assert positive(torch.tensor(inverse_positive(0.1))).item() == pytest.approx(0.1)


def test_the_loss_is_the_log_likelihood_of_the_filter_step_by_step():
    filter = net()
    obs = torch.randn(2, 6, 3, generator=generator(), dtype=F64)
    states = torch.randn(2, 6, 2, generator=generator(1), dtype=F64)
    mask = torch.tensor([[True] * 6, [True, False, True, True, False, True]])
    filter.prepare([Recording(3 * states[0] + 1, obs[0])])
    states = 3 * states + 1
    run: list[RKNState] = []
    with torch.no_grad():
        estimates = rollout(filter, obs, mask=mask, states=run).estimates
        covariances = torch.stack([filter.covariance(state) for state in run], 1)
        found = filter.loss(states, obs, mask, burn_in=2).item()
    scores = [
        stats.multivariate_normal.logpdf(
            states[k, t].numpy(), estimates[k, t].numpy(), covariances[k, t].numpy()
        )
        for k in range(2)
        for t in range(2, 6)
    ]
    standard = sum(
        math.log(scale) for scale in filter.z_scale.tolist()
    )  # densities of standardised states
    assert found == pytest.approx(-sum(scores) / len(scores) - standard)


@pytest.mark.slow
def test_it_learns_and_knows_how_much_to_trust_an_observation():
    """Half of the observations are noise, and a third component tells which: errors and variances
    follow.
    """
    drawn = torch.randn(40, 30, 2, generator=generator(), dtype=F64)
    states = torch.nn.functional.normalize(drawn.cumsum(1), dim=-1)
    good = (torch.rand(40, 30, 1, generator=generator(1), dtype=F64) < 0.5).double()
    noise = torch.randn(40, 30, 2, generator=generator(2), dtype=F64)
    obs = torch.cat([good * states + (1 - good) * noise, good], -1)
    filter = net()
    filter.prepare([Recording(z, x) for z, x in zip(states[:30], obs[:30], strict=True)])
    optimiser = torch.optim.Adam(filter.parameters(), 0.01)
    with torch.no_grad():
        before = filter.loss(states[30:], obs[30:]).item()
    for _ in range(60):
        optimiser.zero_grad()
        filter.loss(states[:30], obs[:30]).backward()
        optimiser.step()
    with torch.no_grad():
        assert filter.loss(states[30:], obs[30:]).item() < before - 1
        r = filter.encode(obs[30:].flatten(0, 1))[1].mean(-1)
    clear = good[30:].flatten() == 1
    assert r[clear].mean() < 0.5 * r[~clear].mean()


def test_images_go_through_an_encoder_as_they_are():
    filter = RKNFilter(
        2,
        (1, 24, 24),
        m=M,
        matrices=2,
        bandwidth=1,
        encoder=CNN((1, 24, 24), features=6, channels=(4, 4)),
    )
    images = torch.rand(2, 4, 1, 24, 24, generator=generator())
    filter.prepare([Recording(torch.randn(4, 2), image) for image in images])
    assert rollout(filter, images).estimates.shape == (2, 4, 2)


def test_what_it_does_not_take():
    filter = net()
    with pytest.raises(ValueError, match="built for 0 controls"):
        filter.loss(torch.zeros(1, 2, 2), torch.zeros(1, 2, 3), None, torch.zeros(1, 2, 1))
    with pytest.raises(ValueError, match="built for states"):
        filter.prepare([Recording(torch.randn(5, 1), torch.randn(5, 3))])
