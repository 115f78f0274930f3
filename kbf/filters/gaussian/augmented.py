"""The state-space model of a state with its past and with errors of sensors that persist.

s = (z_t, z_{t-1}, ..., z_{t-L}, g_t, e_t): a delayed sensor reads a former state, and the error of
a sensor is w_t + e_t + g_t h(z_t) with e_t = phi e_{t-1} + innovation, g_t likewise, w white. The
model of s is again s' = f(s) + N(0, Q), x = h(s) + N(0, R).

References: Sarkka (2013), section 3.6.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kbf.filters.gaussian.moments import training_moments
from kbf.filters.gaussian.sensor_laws import Persistence, former
from kbf.filters.gaussian.ukf import Split
from kbf.recording import Recording
from kbf.ssm import StateSpaceModel

# Variance of a sensor without a map.
UNUSED_VARIANCE = 1e12


class Sensor(NamedTuple):
    """Sensors that share a map.

    Attributes:
        columns: of the observation. delay: steps. map: ``*b d`` -> ``*b k``. noise: ``k k``.
    """

    columns: Tensor
    delay: int
    map: Callable[[Tensor], Tensor]
    noise: Tensor


class Augmented(NamedTuple):
    """A model of s, and the recorded s.

    Attributes:
        model: of s; its maps are `kbf.filters.gaussian.ukf.Split`, the errors come last.
        states: ``n e``, recorded. d: components of z.
    """

    model: StateSpaceModel
    states: Tensor
    d: int


def augmented(
    recordings: list[Recording],
    move: Callable[..., Tensor],
    Q: Float[Tensor, "d d"],
    sensors: list[Sensor],
    persistence: Persistence,
    read: Callable[[Tensor], Tensor],
) -> Augmented:
    """Return the model of s = (z, past, g, e), and recorded s, whose g and e are drawn.

    Args:
        recordings: of z. move: z (and u) -> the mean of z'. Q: its noise.
        sensors: their maps. persistence: of their errors.
        read: (z, past) -> the values of all maps, ``*b q``.
    """
    d, q = recordings[0].states.shape[1], recordings[0].obs.shape[1]
    past = max(sensor.delay for sensor in sensors)
    m0, P0 = training_moments(recordings)
    noise = UNUSED_VARIANCE * torch.eye(q, dtype=torch.float64, device=m0.device)
    for sensor in sensors:
        noise[sensor.columns[:, None], sensor.columns] = sensor.noise
    varying, erring = (
        (each > 0).nonzero()[:, 0].to(m0.device) for each in (persistence.gain, persistence.share)
    )
    share, phi, gain_share, gain_phi, gain, zero = (each.to(noise) for each in persistence)
    G = len(varying)
    phi = torch.cat([gain_phi[varying], phi[erring]])
    variance = torch.cat([gain[varying], (share * noise.diagonal())[erring]])
    white = (1 - share - gain_share).sqrt()

    def former_states(s: Tensor, u: Tensor | None = None) -> Tensor:
        z = s[..., :d]
        moved = move(z) if u is None else move(z, u)
        return torch.cat([moved, s[..., : d * past]], -1)

    def with_errors(y: Tensor, w: Tensor) -> Tensor:
        x = y.clone()
        x[..., varying] = y[..., varying] + w[..., :G] * (y[..., varying] - zero[varying].to(y))
        x[..., erring] = x[..., erring] + w[..., G:]
        return x

    states = torch.cat([with_past(each.states, past) for each in recordings])
    size, width = states.shape[1], len(phi)
    if past:
        P0 = torch.cov(states.mT)
    drawn = torch.randn(len(states), width, generator=torch.Generator().manual_seed(0))
    states = torch.cat([states, drawn.to(states) * variance.sqrt().to(states)], 1)
    Q_s, P_s = (torch.zeros(size + width, size + width).to(m0) for _ in range(2))
    w = slice(size, None)
    Q_s[:d, :d], P_s[:size, :size] = Q.to(m0), P0
    Q_s[w, w], P_s[w, w] = ((1 - phi.square()) * variance).diag().to(m0), variance.diag().to(m0)
    R = (white[:, None] * noise * white).to(m0)
    start = torch.cat([m0.repeat(past + 1), torch.zeros(width).to(m0)])
    f = Split(former_states, lambda y, w: torch.cat([y, phi.to(w) * w], -1), width)
    h = Split(read, with_errors, width)
    return Augmented(StateSpaceModel(f, h, Q_s, R, start, P_s), states, d)


def with_past(states: Float[Tensor, "T d"], past: int) -> Float[Tensor, "T e"]:
    """Return (z_t, ..., z_{t-past}); before the first step, the first state."""
    return torch.cat([former(states, k) for k in range(past + 1)], 1)
