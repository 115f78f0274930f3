"""KalmanNet: with the Kalman gain it is the Kalman filter; its recurrent units as the paper's code
writes them; learning on a linear model.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kbf.filters.gaussian.moments import kalman_predict, kalman_update
from kbf.filters.neural.kalmannet import KalmanNet
from kbf.filters.rollout import rollout
from kbf.recording import Recording
from kbf.ssm import StateSpaceModel, oscillatory, simulate

F64 = torch.float64
F = torch.tensor([[0.9, 0.2, 0.0], [-0.2, 0.9, 0.1], [0.0, 0.0, 0.8]], dtype=F64)
H = torch.tensor([[1.0, 0.0, 0.5], [0.0, 1.0, -0.3]], dtype=F64)


def linear() -> StateSpaceModel:
    return StateSpaceModel(
        f=lambda z: z @ F.to(z).mT,
        h=lambda z: z @ H.to(z).mT,
        Q=0.1 * torch.eye(3, dtype=F64),
        R=0.3 * torch.eye(2, dtype=F64),
        m0=torch.tensor([1.0, -1.0, 0.5], dtype=F64),
        P0=0.5 * torch.eye(3, dtype=F64),
    )


def drawn(batch: int, steps: int, seed: int) -> Recording:
    model = linear()
    return simulate(model, model.m0.expand(batch, -1), steps, torch.Generator().manual_seed(seed))


def net(dtype: torch.dtype = F64, initial: str = "model") -> KalmanNet:
    torch.manual_seed(0)
    return KalmanNet(linear(), initial=initial).to(dtype)


def test_with_the_kalman_gain_it_is_the_kalman_filter():
    model, obs, gains = linear(), drawn(4, 15, 0).obs, []
    P = model.P0[None]
    for _ in range(15):
        P = F @ P @ F.mT + model.Q
        K = P @ H.mT @ torch.linalg.inv(H @ P @ H.mT + model.R)
        P = P - K @ H @ P
        gains.append(K)

    class Given(KalmanNet):
        def gain(self, state, obs, innovation):
            return gains.pop(0).expand(len(obs), -1, -1), state

    filter = Given(model, initial="model").double()
    found = rollout(filter, obs).estimates
    state = (model.m0.expand(4, -1), model.P0.expand(4, -1, -1))
    for t in range(15):
        state = kalman_predict(*state, F, model.Q)
        state = kalman_update(*state, obs[:, t], H, model.R)
        torch.testing.assert_close(found[:, t], state.mean)


def unit(cell: torch.nn.GRUCell, x: Tensor, h: Tensor) -> Tensor:
    """One step of `torch.nn.GRU` with the weights of a cell."""
    whole = torch.nn.GRU(cell.input_size, cell.hidden_size).double()
    whole.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
    return whole(x[None], h[None])[0][0]


def test_gains_are_those_of_the_papers_loop():
    """The published loop, with its own names: differences are of the estimates of two steps ago."""
    filter, obs = net(), drawn(2, 4, 1).obs
    found = rollout(filter, obs).estimates
    posterior = previous = prior_previous = filter.m0.expand(2, -1)
    y_previous = posterior @ H.mT
    Q, S = torch.eye(3, dtype=F64).flatten(), torch.eye(2, dtype=F64).flatten()
    Q, Sigma, S = Q.expand(2, -1), torch.zeros(2, 9, dtype=F64), S.expand(2, -1)
    for t in range(4):
        prior = posterior @ F.mT
        y = prior @ H.mT
        obs_diff = functional.normalize(obs[:, t] - y_previous, dim=1)
        obs_innov_diff = functional.normalize(obs[:, t] - y, dim=1)
        fw_evol_diff = functional.normalize(posterior - previous, dim=1)
        fw_update_diff = functional.normalize(posterior - prior_previous, dim=1)
        Q = unit(filter.unit_Q, filter.fc5(fw_evol_diff), Q)
        Sigma = unit(filter.unit_Sigma, torch.cat([Q, filter.fc6(fw_update_diff)], 1), Sigma)
        seen = filter.fc7(torch.cat([obs_diff, obs_innov_diff], 1))
        S = unit(filter.unit_S, torch.cat([filter.fc1(Sigma), seen], 1), S)
        K = filter.fc2(torch.cat([Sigma, S], 1))
        Sigma = filter.fc4(torch.cat([Sigma, filter.fc3(torch.cat([S, K], 1))], 1))
        previous, prior_previous, y_previous = posterior, prior, obs[:, t]
        posterior = prior + (K.reshape(2, 3, 2) @ (obs[:, t] - y)[..., None])[..., 0]
        torch.testing.assert_close(found[:, t], posterior)


def test_the_loss_is_the_error_of_a_rollout():
    filter, batch = net(), drawn(3, 8, 2)
    filter.prepare([Recording(z, x) for z, x in zip(batch.states, batch.obs, strict=True)])
    mask = torch.rand(3, 8, generator=torch.Generator().manual_seed(3)) < 0.7
    left = rollout(filter, batch.obs, mask=mask).estimates - batch.states
    scale = batch.states.flatten(0, 1).var(0, correction=0).mean()
    found = filter.loss(batch.states, batch.obs, mask, burn_in=3)
    torch.testing.assert_close(found, left[:, 3:].square().mean() / scale, check_dtype=False)


def test_it_approaches_the_kalman_filter_on_a_linear_model():
    filter = net(torch.float32)
    batch, test = (drawn(n, 20, seed) for n, seed in ((60, 4), (200, 5)))
    filter.prepare([Recording(z.float(), x.float()) for z, x in zip(*batch[:2], strict=True)])
    optimiser = torch.optim.Adam(filter.parameters(), lr=2e-3)
    for _ in range(60):
        optimiser.zero_grad()
        filter.loss(batch.states.float(), batch.obs.float()).backward()
        optimiser.step()
    with torch.no_grad():
        error = (rollout(filter, test.obs.float()).estimates - test.states).square().mean()
        z, open_loop = linear().m0.expand(200, -1), []
        for _ in range(20):
            z = z @ F.mT
            open_loop.append(z)
    state = (linear().m0.expand(200, -1), torch.zeros(200, 3, 3, dtype=F64))
    least = 0.0
    for t in range(20):
        state = kalman_predict(*state, F, linear().Q)
        state = kalman_update(*state, test.obs[:, t], H, linear().R)
        least += float((state.mean - test.states[:, t]).square().mean()) / 20
    nothing = (torch.stack(open_loop, 1) - test.states).square().mean()
    assert least < error < 1.25 * least < 0.6 * nothing


def test_the_initial_estimate_is_the_mean_of_the_training_states_or_the_models():
    batch = drawn(3, 9, 6)
    memory = [Recording(z, x) for z, x in zip(batch.states, batch.obs, strict=True)]
    for initial, expected in (("memory", batch.states.mean((0, 1))), ("model", linear().m0)):
        filter = net(initial=initial)
        filter.prepare(memory)
        torch.testing.assert_close(filter.estimate(filter.init(1))[0], expected)


def test_what_it_cannot_do_is_an_error():
    with pytest.raises(ValueError, match="initial must be memory or model"):
        KalmanNet(linear(), initial="start")
    many = oscillatory()._replace(m0=torch.zeros(40), R=torch.eye(40))
    with pytest.raises(ValueError, match="at most 12"):
        KalmanNet(many)
    with pytest.raises(ValueError, match="3 states and 2 observations, the recordings 2 and 2"):
        net().prepare([Recording(torch.zeros(9, 2).double(), torch.zeros(9, 2).double())])
    batch = drawn(2, 5, 0)
    with pytest.raises(ValueError, match="takes no controls"):
        net().loss(batch.states, batch.obs, controls=torch.zeros(2, 5, 1))
