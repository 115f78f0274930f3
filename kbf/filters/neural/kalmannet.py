"""KalmanNet: a Kalman filter of given equations whose gain is a recurrent network (`KalmanNet`).

A step from z (the estimate) with f and h known:

    predict: m = f(z);   update: z' = m + K (x - h(m)),

with K from three recurrent units instead of covariances (architecture 2). Their inputs are four
differences, each of length one: of observations a1 = x - x_before, the innovation a2 = x - h(m), of
estimates a3 = z - z_before, and the last correction a4 = z - m_before.

    Q = GRU(FC5(a3), Q)                    (d^2), in place of the covariance of the transition
    Sigma = GRU((Q, FC6(a4)), Sigma)       (d^2), of the predicted state
    S = GRU((FC1(Sigma), FC7(a1, a2)), S)  (q^2), of the innovation
    K = FC2(Sigma, S)                      (d q)
    Sigma <- FC4(Sigma, FC3(S, K))         (d^2), of the updated state

Each FC is a linear layer with ReLU; FC2 has a hidden layer of `HIDDEN_FACTOR` times its inputs and
no ReLU at its end.

References: Revach et al. (2022), KalmanNet: Neural Network Aided Kalman Filtering for Partially
Known Dynamics, section III.C, figure 4.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Generator, Tensor, nn
from torch.nn import functional

from kbf.filters.gaussian.moments import (
    MAX_DEVIATIONS,
    AdditiveModel,
    check_initial,
    with_initial_moments,
)
from kbf.filters.protocols import UpdateByObserve, where
from kbf.recording import Recording, observed_pairs
from kbf.runtime.html_repr import ShownModule

# Width of the inputs of recurrent units, and of the hidden layer of FC2, over those of their
# inputs: the numbers of the paper's code.
INPUT_FACTOR = 5
HIDDEN_FACTOR = 40
# Components of the state up to which there is a network: it has d^4 weights and more.
MAX_COMPONENTS = 12


class KalmanNetState(NamedTuple):
    """State of a `KalmanNet`.

    Attributes:
        mean: ``b d``, the estimate.
        predicted: ``b d``, m of the last predict. predicted_before: of the one before it.
        updated: ``b d``, z before the last predict. updated_before: z before the one before it.
        seen: ``b q``, the last observation.
        Q: ``b d^2``. Sigma: ``b d^2``. S: ``b q^2``. States of the recurrent units.
    """

    mean: Tensor
    predicted: Tensor
    predicted_before: Tensor
    updated: Tensor
    updated_before: Tensor
    seen: Tensor
    Q: Tensor
    Sigma: Tensor
    S: Tensor


def layer(inputs: int, outputs: int) -> nn.Sequential:
    """Return a linear layer with ReLU."""
    return nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU())


class KalmanNet(UpdateByObserve[KalmanNetState], ShownModule):
    """The filter of the module's equations, and its own model.

    Equations, states and observations are in the units of the data. It has no covariance. Training
    minimises the squared error of whole recordings from the initial state on.
    """

    given_equations = True

    def __init__(self, model: AdditiveModel, *, initial: str = "memory") -> None:
        """Initialise an untrained network.

        Args:
            model: f and h, and the sizes of states and observations; Q and R are not used.
            initial: the initial estimate: memory, the mean of the training states; or model, m0.

        Raises:
            ValueError: a model of more than `MAX_COMPONENTS` states or observations, one without
                f and h, or another ``initial``.
        """
        super().__init__()
        if not isinstance(model, AdditiveModel):
            raise ValueError(
                "KalmanNet requires z' = f(z) + noise and x = h(z) + noise; a "
                f"{type(model).__name__} has no f and h"
            )
        self.model, self.initial = model, check_initial(initial)
        d, q = len(model.m0), len(model.R)
        if max(d, q) > MAX_COMPONENTS:
            raise ValueError(
                f"KalmanNet is for at most {MAX_COMPONENTS} states and observations, its network "
                f"for {d} and {q} would have "
                f"{HIDDEN_FACTOR * (d * d + q * q) * (d * d + q * q + d * q):,} weights"
            )
        self.m0: Tensor = nn.Buffer(model.m0.float())
        self.scale: Tensor = nn.Buffer(torch.ones(()))
        self.x_scale: Tensor = nn.Buffer(torch.full((q,), torch.inf))
        k = INPUT_FACTOR
        self.unit_Q: nn.GRUCell = nn.GRUCell(k * d, d * d)
        self.unit_Sigma: nn.GRUCell = nn.GRUCell(d * d + k * d, d * d)
        self.unit_S: nn.GRUCell = nn.GRUCell(q * q + 2 * k * q, q * q)
        self.fc1: nn.Sequential = layer(d * d, q * q)
        both = d * d + q * q
        self.fc2: nn.Sequential = nn.Sequential(
            *layer(both, HIDDEN_FACTOR * both), nn.Linear(HIDDEN_FACTOR * both, d * q)
        )
        self.fc3: nn.Sequential = layer(q * q + d * q, d * d)
        self.fc4: nn.Sequential = layer(2 * d * d, d * d)
        self.fc5: nn.Sequential = layer(d, k * d)
        self.fc6: nn.Sequential = layer(d, k * d)
        self.fc7: nn.Sequential = layer(2 * q, 2 * k * q)

    def prepare(self, memory: list[Recording], generator: Generator | None = None) -> None:
        """Store the initial estimate, and the scales of training states and observations.

        Raises:
            ValueError: observations that are not vectors, or sizes other than those of the model.
        """
        first = memory[0]
        sizes = (first.states.shape[1], first.obs.shape[-1])
        if sizes != (len(self.model.m0), len(self.model.R)):
            raise ValueError(
                f"the equations have {len(self.model.m0)} states and {len(self.model.R)} "
                f"observations, the recordings {sizes[0]} and {sizes[1]}"
            )
        self.m0.copy_(with_initial_moments(self.model, memory, self.initial).m0)
        states = torch.cat([each.states for each in memory])
        self.scale.copy_(states.var(0, correction=0).mean())
        self.x_scale.copy_(observed_pairs(memory)[1].std(0, correction=0))

    def fit(self, memory: Recording | list[Recording] | None = None) -> Any:
        """Return the network itself: it does not depend on a memory."""
        return self

    def init(self, batch: int, *, generator: Generator | None = None) -> KalmanNetState:
        """Return m0; the units of Q and S start from the identity, that of Sigma from zero."""
        d, q = len(self.m0), len(self.model.R)
        z = self.m0.expand(batch, -1)
        eyes = (torch.eye(n, dtype=z.dtype, device=z.device).flatten() for n in (d, q))
        Q, S = (eye.expand(batch, -1) for eye in eyes)
        return KalmanNetState(z, z, z, z, z, self.model.h(z), Q, torch.zeros_like(Q), S)

    def predict(
        self, state: KalmanNetState, *, generator: Generator | None = None
    ) -> KalmanNetState:
        """Return m = f(z)."""
        m = self.model.f(state.mean)
        return state._replace(
            mean=m,
            predicted=m,
            predicted_before=state.predicted,
            updated=state.mean,
            updated_before=state.updated,
        )

    def gain(
        self, state: KalmanNetState, obs: Float[Tensor, "b q"], innovation: Float[Tensor, "b q"]
    ) -> tuple[Float[Tensor, "b d q"], KalmanNetState]:
        """Return K, and the state with the next states of the recurrent units."""
        differences = (
            obs - state.seen,
            innovation,
            state.updated - state.updated_before,
            state.updated - state.predicted_before,
        )
        a1, a2, a3, a4 = (functional.normalize(each, dim=-1) for each in differences)
        Q = self.unit_Q(self.fc5(a3), state.Q)
        Sigma = self.unit_Sigma(torch.cat([Q, self.fc6(a4)], -1), state.Sigma)
        inputs = torch.cat([self.fc1(Sigma), self.fc7(torch.cat([a1, a2], -1))], -1)
        S = self.unit_S(inputs, state.S)
        K = self.fc2(torch.cat([Sigma, S], -1))
        Sigma = self.fc4(torch.cat([Sigma, self.fc3(torch.cat([S, K], -1))], -1))
        return K.unflatten(-1, (-1, obs.shape[-1])), state._replace(Q=Q, Sigma=Sigma, S=S)

    def observe(
        self, state: KalmanNetState, obs: Float[Tensor, "b q"]
    ) -> tuple[KalmanNetState, Bool[Tensor, " b"]]:
        """Return z' = m + K (x - h(m)), and whether the innovation was possible.

        It is impossible if a component is larger than `MAX_DEVIATIONS` standard deviations of the
        training observations.
        """
        innovation = obs - self.model.h(state.predicted)
        K, state = self.gain(state, obs, innovation)
        z = state.predicted + (K @ innovation[..., None])[..., 0]
        possible = (innovation.abs() <= MAX_DEVIATIONS * self.x_scale).all(-1)
        return state._replace(mean=z, seen=obs), possible & z.isfinite().all(-1)

    def estimate(self, state: KalmanNetState) -> Float[Tensor, "b d"]:
        """Return z, ``b d``."""
        return state.mean

    def loss(
        self,
        states: Float[Tensor, "b T d"],
        obs: Float[Tensor, "b T q"],
        mask: Bool[Tensor, "b T"] | None = None,
        controls: Tensor | None = None,
        *,
        burn_in: int = 0,
    ) -> Float[Tensor, ""]:
        """Return the mean squared error over the mean variance of the training states.

        Windows begin where recordings begin: the network starts from the initial estimate.

        Raises:
            ValueError: recordings with controls.
        """
        if controls is not None:
            raise ValueError("KalmanNet takes no controls")
        state, found = self.init(len(obs)), []
        for t in range(obs.shape[1]):
            predicted = self.predict(state)
            state = self.update(predicted, obs[:, t])
            state = state if mask is None else where(mask[:, t], state, predicted)
            found.append(state.mean)
        left = (torch.stack(found, 1) - states)[:, burn_in:]
        return left.square().mean() / self.scale
